"""What the service does by itself: threads that take one turn after the other until they are stopped."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from sqlalchemy.exc import SQLAlchemyError

log = logging.getLogger(__name__)


class Loop:
    """One thread, or several that take the same turns. No fault ends it: it is logged, and the next turn comes.

    A turn that returns something true is followed by the next at once, else after ``poll_s`` or ``wake``.
    """

    def __init__(self, name: str, turn: Callable[[], object], poll_s: float, threads: int = 1) -> None:
        self._name = name
        self._turn = turn
        self._poll_s = poll_s
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}-{number}" if number else name, daemon=True)
            for number in range(threads)
        ]

    @property
    def stopping(self) -> bool:
        """Whether no further turn will come."""
        return self._stopping.is_set()

    def start(self) -> None:
        """Begin."""
        for thread in self._threads:
            thread.start()

    def wake(self) -> None:
        """Let the next turn come at once."""
        self._wake.set()

    def stop(self, timeout_s: float) -> None:
        """Begin no further turn, and wait so long for those under way."""
        self._stopping.set()
        self._wake.set()
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            if thread.is_alive():
                thread.join(max(0.0, deadline - time.monotonic()))

    def _run(self) -> None:
        while not self.stopping:
            self._wake.clear()
            try:
                if self._turn():
                    continue
            except SQLAlchemyError:
                log.warning("%s: the job store does not answer", self._name, exc_info=True)
            except Exception:
                log.exception("%s stumbled and goes on", self._name)
            # A stop between the clearing above and here has to be seen.
            if not self.stopping:
                self._wake.wait(self._poll_s)
