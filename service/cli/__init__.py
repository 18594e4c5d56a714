"""The command line: ``unshard convert``, ``inspect``, ``plan`` and the others.

Parsing, printing and exit statuses only; whatever a command does, it does through ``workers`` or the service's
client. A command loads what it needs when it runs, so that ``--help`` and ``inspect`` answer at once.
"""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command that ``sys.argv`` names and exit with its status."""
    from service.cli.run import run  # noqa: PLC0415 - importing this package must cost nothing

    sys.exit(run(sys.argv[1:]))
