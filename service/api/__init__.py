"""Routes: they read a request, call the logic, and shape the answer; nothing is decided here."""
