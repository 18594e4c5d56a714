"""How much a caller may ask for: token buckets by caller and by address, and the streams that are open.

Each process counts for itself: behind several replicas a caller has as many times the limit.
"""

from __future__ import annotations

import ipaddress
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable

MOST_BUCKETS = 10_000
"""Kept at once. The longest unused is forgotten first, and is full when it comes again."""

Clock = Callable[[], float]


class TooFast(Exception):
    """More requests came than may. ``wait_s`` is when the next one may come."""

    def __init__(self, limit: float, wait_s: float) -> None:
        super().__init__(f"more than {limit:g} requests a minute")
        self.limit = limit
        self.wait_s = wait_s


class TooManyStreams(Exception):
    """As many streams of this caller are open as may be."""

    def __init__(self, limit: int) -> None:
        super().__init__(f"{limit} streams of this token are open already, and more may not be")
        self.limit = limit


class Rates:
    """A bucket for each key: it holds what a minute allows and fills at that pace. Thread-safe."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def take(self, key: str, per_minute: float) -> None:
        """Count one request; ``TooFast`` when the bucket is empty."""
        with self._lock:
            level, moment = self._level(key, per_minute)
            if level < 1:
                raise TooFast(per_minute, (1 - level) * 60 / per_minute)
            self._buckets[key] = level - 1, moment
            self._buckets.move_to_end(key)
            while len(self._buckets) > MOST_BUCKETS:
                self._buckets.popitem(last=False)

    def give_back(self, key: str, per_minute: float) -> None:
        """Undo a ``take``."""
        with self._lock:
            level, moment = self._level(key, per_minute)
            self._buckets[key] = min(per_minute, level + 1), moment

    def _level(self, key: str, per_minute: float) -> tuple[float, float]:
        moment = self._clock()
        level, then = self._buckets.get(key, (per_minute, moment))
        return min(per_minute, level + (moment - then) * per_minute / 60), moment


class Streams:
    """The open streams of each caller. Thread-safe."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._open: Counter[str] = Counter()

    def open(self, key: str) -> None:
        """Count one more; ``TooManyStreams`` when that would be too many. Whoever opens closes."""
        with self._lock:
            if self._open[key] >= self._limit:
                raise TooManyStreams(self._limit)
            self._open[key] += 1

    def close(self, key: str) -> None:
        """Count one less."""
        with self._lock:
            self._open[key] -= 1
            if not self._open[key]:
                del self._open[key]


def neighbourhood(address: str) -> str:
    """What stands for an address when attempts are counted: of IPv6 its /64, of which one machine has all."""
    try:
        known = ipaddress.ip_address(address)
    except ValueError:
        return address
    if isinstance(known, ipaddress.IPv6Address) and known.ipv4_mapped is None:
        return str(ipaddress.ip_network((known, 64), strict=False))
    return str(known)
