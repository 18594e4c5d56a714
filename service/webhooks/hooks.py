"""The parts of webhooks that routes and the application's start and stop work with."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from service.db.database import Database
from service.settings import Settings
from service.webhooks.deliverer import Deliverer, DeliveryCounter
from service.webhooks.sending import Sender
from service.webhooks.store import WebhookStore
from service.webhooks.targets import TargetRules
from workers.errors import InputError

MOST_TRIALS = 4


class TooManyTrials(InputError):
    """As many tests of webhooks are under way as may be: each holds a thread of the service for seconds."""

    code = "unavailable"

    def __init__(self) -> None:
        super().__init__(f"{MOST_TRIALS} webhooks are being tested already", hint="Try again in some seconds.")


@dataclass(frozen=True, slots=True)
class Hooks:
    """Store, sender and deliverer."""

    store: WebhookStore
    sender: Sender
    deliverer: Deliverer
    _trials: threading.BoundedSemaphore = field(default_factory=lambda: threading.BoundedSemaphore(MOST_TRIALS))

    @classmethod
    def of(cls, settings: Settings, database: Database, counter: DeliveryCounter) -> Hooks:
        """The parts, put together from settings."""
        rules = TargetRules(settings.webhook_allow_http, settings.webhook_allowed_networks)
        sender = Sender(rules)
        return cls(WebhookStore(database), sender, Deliverer(database, sender, counter, settings.poll_s))

    @contextmanager
    def trial(self) -> Iterator[None]:
        """Room for a delivery in a request's own thread; ``TooManyTrials`` when there is none."""
        if not self._trials.acquire(blocking=False):
            raise TooManyTrials
        try:
            yield
        finally:
            self._trials.release()
