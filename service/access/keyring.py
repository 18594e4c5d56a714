"""From what a request shows to whose it is.

Tokens of the database are looked up at most every ``CACHE_S`` seconds, so that a revocation counts at once in the
process that made it and within that time in others. The administrator's token needs no database.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import threading
import time
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from typing import TypeVar

from sqlalchemy.exc import SQLAlchemyError

from service.access.principals import ADMINISTRATOR, Principal
from service.access.tokens import USE_INTERVAL, BadToken, TokenStore
from service.times import now

CACHE_S = 5.0
MOST_KEPT = 2048
Value = TypeVar("Value")
log = logging.getLogger(__name__)


class Keyring:
    """Thread-safe."""

    def __init__(self, tokens: TokenStore, administrators: str | None) -> None:
        self._tokens = tokens
        self._administrators = None if administrators is None else _digest(administrators)
        self._lock = threading.Lock()
        self._verified: OrderedDict[bytes, tuple[float, Principal, datetime | None]] = OrderedDict()
        self._good: OrderedDict[bytes, None] = OrderedDict()
        self._emptied = 0
        self._noted: dict[str, float] = {}
        self._notes = ThreadPoolExecutor(1, "token-use")

    @property
    def asks(self) -> bool:
        """Whether a request has to show a token at all."""
        return self._administrators is not None

    def remembered(self, text: str) -> Principal | None:
        """Whose token this is, if that was found out within the last seconds; takes no time."""
        digest = _digest(text)
        # Digests, so that neither content nor length of the token shows in the time that this takes.
        if self._administrators is not None and hmac.compare_digest(digest, self._administrators):
            return ADMINISTRATOR
        with self._lock:
            found = self._verified.get(digest)
        if found is None or time.monotonic() > found[0]:
            return None
        _, principal, expires_at = found
        return principal if expires_at is None or expires_at > now() else None

    def was_good(self, text: str) -> bool:
        """Whether this was a valid token when it was last looked up: then it is no guess."""
        with self._lock:
            return _digest(text) in self._good

    def verify(self, text: str) -> Principal:
        """Whose token this is, by the database; ``BadToken`` when it is nobody's."""
        digest = _digest(text)
        with self._lock:
            emptied = self._emptied
        try:
            token = self._tokens.verify(text)
        except BadToken:
            with self._lock:
                self._good.pop(digest, None)
            raise
        principal = token.principal
        with self._lock:
            _keep(self._good, digest, None)
            if emptied == self._emptied:  # else it may have been revoked between the look and now
                _keep(self._verified, digest, (time.monotonic() + CACHE_S, principal, token.expires_at))
        self._note_use(token.id)
        return principal

    def empty(self) -> None:
        """Forget what was found out: a token has changed."""
        with self._lock:
            self._emptied += 1
            self._verified.clear()

    def close(self) -> None:
        """Write down what is still to be written."""
        self._notes.shutdown()

    def _note_use(self, token_id: str) -> None:
        """Have the time of use written, not in the way of the request."""
        moment = time.monotonic()
        with self._lock:
            if moment - self._noted.get(token_id, float("-inf")) < USE_INTERVAL.total_seconds():
                return
            self._noted[token_id] = moment
        self._notes.submit(self._write_use, token_id)

    def _write_use(self, token_id: str) -> None:
        try:
            self._tokens.used(token_id)
        except SQLAlchemyError:
            log.warning("the time of a token's use could not be written", exc_info=True)


def _keep(kept: OrderedDict[bytes, Value], key: bytes, value: Value) -> None:
    kept[key] = value
    kept.move_to_end(key)
    while len(kept) > MOST_KEPT:
        kept.popitem(last=False)


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()
