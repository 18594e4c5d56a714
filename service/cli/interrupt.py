"""Stop signals: the first asks the work to stop at a good place, the second ends the process."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Self

from service.cli.problems import INTERRUPTED

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_SHOW_CURSOR = "\x1b[?25h"


class StopSignals:
    """While it is entered, SIGINT and SIGTERM set ``event``; before ``defer`` was called they interrupt at once."""

    def __init__(self, before_exit: Callable[[], None] = lambda: None) -> None:
        self.before_exit = before_exit
        """Called when a second signal ends the process."""
        self.event = threading.Event()
        self._deferred = False
        self._previous = {number: signal.getsignal(number) for number in STOP_SIGNALS}

    def __enter__(self) -> Self:
        self.install()
        return self

    def install(self) -> None:
        """Take the handlers (back); for the main thread only."""
        for number in STOP_SIGNALS:
            signal.signal(number, self._received)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def defer(self) -> None:
        """From here on there is something to leave in order."""
        self._deferred = True

    def undefer(self) -> None:
        """It would now be left in order: interrupt at once again, for a signal that came meanwhile, too."""
        self._deferred = False
        if self.event.is_set():
            raise KeyboardInterrupt

    def _received(self, _number: int, _frame: FrameType | None) -> None:
        if self.event.is_set():
            if sys.stderr.isatty():
                os.write(sys.stderr.fileno(), _SHOW_CURSOR.encode())
            self.before_exit()
            os._exit(INTERRUPTED)
        self.event.set()
        if not self._deferred:
            raise KeyboardInterrupt
