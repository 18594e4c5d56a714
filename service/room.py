"""Room for requests that hold a thread for long: so many at work, some in waiting, and the others refused at once.

All requests share a few dozen threads. Without a bound those that wait for a slow store or a huge source would take
every one, and nothing else would be answered any more.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Overloaded(Exception):
    """As many do this at this moment, or wait to, as may."""


class Room:
    """Thread-safe. ``doing`` is what those inside do, as in "as many ... as may"."""

    def __init__(self, doing: str, at_once: int, waiting: int) -> None:
        self._doing = doing
        self._inside = threading.BoundedSemaphore(at_once)
        self._admitted = threading.BoundedSemaphore(at_once + waiting)

    @contextmanager
    def entered(self, limit_s: float) -> Iterator[None]:
        """Be inside while the block runs; ``Overloaded`` when too many wait, or it takes longer than ``limit_s``."""
        if not self._admitted.acquire(blocking=False):
            raise Overloaded(f"as many {self._doing} as may, and others wait")
        try:
            if not self._inside.acquire(timeout=max(0.0, limit_s)):
                raise Overloaded(f"as many {self._doing} as may")
            try:
                yield
            finally:
                self._inside.release()
        finally:
            self._admitted.release()
