"""The command line: ``unshard convert``, ``inspect``, ``plan`` and the others.

Parsing, printing and exit statuses only; whatever a command does, it does through ``workers`` or the service's
client. A command loads what it needs when it runs, so that ``--help`` and ``inspect`` answer at once.
"""

from __future__ import annotations

import os
import sys

INTERRUPTED = 130


def main() -> None:
    """Run the command that ``sys.argv`` names and exit with its status."""
    from service.cli.run import run  # noqa: PLC0415 - importing this package must cost nothing

    status = run(sys.argv[1:])
    if status == INTERRUPTED:
        # All that was open is closed by now. While the interpreter winds down it no longer handles signals, and one
        # more would end this process by itself: with another status than that of an interruption that was told.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)
