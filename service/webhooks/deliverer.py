"""Carries the outbox out: looks for what is due, sends a few at a time, and writes down what came of it.

Every process of the service has one; ``service.webhooks.claims`` sees to it that each delivery is sent by one of them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from typing import Protocol

from sqlalchemy.exc import SQLAlchemyError

from service.db.database import Database
from service.loop import Loop
from service.webhooks.claims import Claim, Claims
from service.webhooks.sending import TIMEOUT_S, Outcome, Sender

MOST_AT_ONCE = 8
MOST_PER_WEBHOOK = 2
"""At once. So receivers that never answer do not keep the others waiting."""

STOP_TIMEOUT_S = TIMEOUT_S + 2
CLEAN_UP_EVERY_S = 3600.0
RECORD_ATTEMPTS = 5
"""Times that an outcome is tried to be written, a second apart, before the delivery is left to be sent once more."""

SPENT = Outcome(None, "the last attempt was begun and never ended")

log = logging.getLogger(__name__)


class DeliveryCounter(Protocol):
    """Whoever counts deliveries by how they ended."""

    def labels(self, result: str, /) -> Countable: ...


class Countable(Protocol):
    """A counter."""

    def inc(self) -> None: ...


class Deliverer:
    """A loop in a thread of its own, and a thread for each delivery under way."""

    def __init__(self, database: Database, sender: Sender, counter: DeliveryCounter, poll_s: float) -> None:
        self._claims = Claims(database)
        self._sender = sender
        self._counter = counter
        self._under_way: dict[threading.Thread, str] = {}
        self._served: dict[str, float] = {}
        self._cleaned = float("-inf")
        self._loop = Loop("webhooks", self._tick, poll_s)

    def start(self) -> None:
        """Begin."""
        self._loop.start()

    def wake(self) -> None:
        """Look at once."""
        self._loop.wake()

    def stop(self) -> None:
        """Take nothing more and wait for what is under way, which ends by itself."""
        deadline = time.monotonic() + STOP_TIMEOUT_S
        self._loop.stop(STOP_TIMEOUT_S)
        for thread in list(self._under_way):
            thread.join(max(0.0, deadline - time.monotonic()))

    def _tick(self) -> None:
        self._under_way = {thread: webhook for thread, webhook in self._under_way.items() if thread.is_alive()}
        busy = Counter(self._under_way.values())
        due = self._claims.due() if len(self._under_way) < MOST_AT_ONCE else []
        # In turns, whoever was served longest ago first.
        for webhook_id in sorted(due, key=lambda webhook_id: self._served.get(webhook_id, 0.0)):
            room = min(MOST_PER_WEBHOOK - busy[webhook_id], MOST_AT_ONCE - len(self._under_way))
            if room > 0 and not self._loop.stopping:
                self._served[webhook_id] = time.monotonic()
                for claim in self._claims.claim(webhook_id, room):
                    self._begin(claim)
        if time.monotonic() - self._cleaned > CLEAN_UP_EVERY_S:
            self._cleaned = time.monotonic()
            self._served = {webhook_id: self._served[webhook_id] for webhook_id in due if webhook_id in self._served}
            self._claims.forget_old()

    def _begin(self, claim: Claim) -> None:
        thread = threading.Thread(target=self._carry_out, args=(claim,), name=claim.delivery_id, daemon=True)
        self._under_way[thread] = claim.webhook.id
        thread.start()

    def _carry_out(self, claim: Claim) -> None:
        try:
            outcome = SPENT if claim.is_spent else self._send(claim)
            result = self._record(claim, outcome)
        except Exception:
            log.exception("delivery %s stumbled and is tried again", claim.delivery_id)
            result = None
        if result is not None:
            self._counter.labels(result).inc()
            log.info("delivery %s to %s: %s %s", claim.delivery_id, claim.webhook.id, result, outcome.error or "")
        self.wake()

    def _send(self, claim: Claim) -> Outcome:
        return self._sender.send(claim.webhook.url, claim.message, list(claim.webhook.secrets))

    def _record(self, claim: Claim, outcome: Outcome) -> str | None:
        """Write the outcome, outlasting a database that is away for a moment."""
        for _ in range(RECORD_ATTEMPTS):
            try:
                return self._claims.record(claim, outcome)
            except SQLAlchemyError:
                log.warning("the outcome of %s could not be written yet", claim.delivery_id, exc_info=True)
                threading.Event().wait(1.0)
        return None
