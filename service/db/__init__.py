"""The database of the control plane: tables, connections, migrations. Knows nothing of HTTP or Ray."""
