"""The parts of webhooks that routes and the application's start and stop work with."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from service.db.database import Database
from service.room import Room
from service.settings import Settings
from service.webhooks.deliverer import Deliverer, DeliveryCounter
from service.webhooks.sending import Sender
from service.webhooks.store import WebhookStore
from service.webhooks.targets import TargetRules

TRIAL_PATIENCE_S = 10.0


@dataclass(frozen=True, slots=True)
class Hooks:
    """Store, sender and deliverer."""

    store: WebhookStore
    sender: Sender
    deliverer: Deliverer
    _trials: Room = field(default_factory=lambda: Room("webhooks are being checked or tested", 4, waiting=4))

    @classmethod
    def of(cls, settings: Settings, database: Database, counter: DeliveryCounter) -> Hooks:
        """The parts, put together from settings."""
        rules = TargetRules(settings.webhook_allow_http, settings.webhook_allowed_networks)
        sender = Sender(rules)
        return cls(WebhookStore(database), sender, Deliverer(database, sender, counter, settings.poll_s))

    def trial(self) -> AbstractContextManager[None]:
        """Room for asking the network in a request's own thread; ``Overloaded`` when there is none."""
        return self._trials.entered(TRIAL_PATIENCE_S)
