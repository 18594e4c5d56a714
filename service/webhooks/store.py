"""Webhooks and their deliveries in the database, as the API asks for them."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import Connection, RowMapping, delete, insert, select, update

from service.db.database import Database
from service.db.tables import webhook_deliveries, webhooks
from service.ids import is_id, new_id
from service.refusals import NotFound, StateRefused, TooMany, require_fewer
from service.times import now
from service.webhooks.outbox import JsonObject
from service.webhooks.sending import Outcome
from service.webhooks.signing import new_secret

MOST_PER_OWNER = 100
ENOUGH_HINT = "Delete some, or let one of them hear more events."
ENABLE_HINT = 'Make it active first: PATCH it with {"state": "active"}.'
DELIVERIES_HINT = "GET /v1/webhooks/{id}/deliveries lists those of this webhook; they are kept for a while only."
ROTATION = timedelta(hours=24)
"""How long deliveries are signed with the secret before the newest one, too."""


@dataclass(frozen=True, slots=True)
class NewWebhook:
    """A webhook that somebody asks for, its URL checked."""

    owner: str
    url: str
    events: list[str]
    description: str = ""
    everyone: bool = False


@dataclass(frozen=True, slots=True)
class Webhook:
    """A webhook. ``secrets`` are those that deliveries are signed with now, the newest first."""

    id: str
    owner: str
    everyone: bool
    url: str
    description: str
    events: list[str]
    state: str
    disabled_reason: str | None
    created_at: datetime
    updated_at: datetime
    previous_secret_until: datetime | None
    secrets: tuple[str, ...]

    def __repr__(self) -> str:
        return f"Webhook({self.id})"  # URL and secrets stay out of logs


@dataclass(frozen=True, slots=True)
class Delivery:
    """An event on its way to a webhook; ``body`` is what is sent."""

    id: str
    webhook_id: str
    event_type: str
    job_id: str | None
    body: JsonObject
    state: str
    attempts: int
    created_at: datetime
    next_attempt_at: datetime | None
    last_attempt_at: datetime | None
    response_status: int | None
    error: str | None


_PLAIN = tuple(name for name in Webhook.__dataclass_fields__ if name != "secrets")


def webhook_of(row: RowMapping) -> Webhook:
    """The webhook in a row of ``webhooks``; a secret whose time is over is not among its secrets any more."""
    values = {name: row[name] for name in _PLAIN}
    secrets = [row["secret"]]
    if row["previous_secret_until"] is not None and row["previous_secret_until"] > now():
        secrets.append(row["previous_secret"])
    else:
        values["previous_secret_until"] = None
    return Webhook(**values, secrets=tuple(secrets))


def delivery_of(row: RowMapping) -> Delivery:
    """The delivery in a row of ``webhook_deliveries``."""
    return Delivery(**{name: row[name] for name in Delivery.__dataclass_fields__})


class WebhookStore:
    """Thread-safe; each method is one transaction. ``owner`` limits a method to the webhooks of one."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def create(self, new: NewWebhook) -> Webhook:
        """Store a webhook with a fresh secret; ``TooMany`` when its owner has enough."""
        moment = now()
        row: JsonObject = {
            "id": new_id("webhook"),
            "owner": new.owner,
            "everyone": new.everyone,
            "url": new.url,
            "description": new.description,
            "secret": new_secret(),
            "events": new.events,
            "state": "active",
            "refusals": 0,
            "created_at": moment,
            "updated_at": moment,
        }
        with self._database.write() as connection:
            enough = TooMany("webhook", MOST_PER_OWNER, ENOUGH_HINT)
            require_fewer(self._database, connection, webhooks, new.owner, enough)
            connection.execute(insert(webhooks).values(**row))
            return _get(connection, row["id"])

    def get(self, webhook_id: str, owner: str | None = None) -> Webhook:
        """The webhook, or ``NotFound``."""
        with self._database.read() as connection:
            return _get(connection, webhook_id, owner)

    def page(self, owner: str | None, limit: int, before: str | None = None) -> list[Webhook]:
        """Webhooks from the newest on; ``before`` is the id of the last one of the page before."""
        query = select(webhooks).order_by(webhooks.c.id.desc()).limit(limit)
        if owner is not None:
            query = query.where(webhooks.c.owner == owner)
        if before is not None:
            query = query.where(webhooks.c.id < before)
        with self._database.read() as connection:
            return [webhook_of(row) for row in connection.execute(query).mappings()]

    def change(self, webhook_id: str, values: JsonObject, owner: str | None = None) -> Webhook:
        """Give columns other values. One made active again starts without refusals and sends what still waits."""
        state = values.get("state")
        if state == "active":
            values = {**values, "disabled_reason": None, "refusals": 0}
        elif state == "disabled":
            values = {**values, "disabled_reason": "disabled on request"}
        return self._update(webhook_id, owner, values)

    def rotate_secret(self, webhook_id: str, owner: str | None = None) -> Webhook:
        """Make a new secret; for a day deliveries are signed with the old one as well."""
        fresh = {
            "secret": new_secret(),
            "previous_secret": webhooks.c.secret,
            "previous_secret_until": now() + ROTATION,
        }
        return self._update(webhook_id, owner, fresh)

    def _update(self, webhook_id: str, owner: str | None, values: JsonObject) -> Webhook:
        with self._database.write() as connection:
            _get(connection, webhook_id, owner, lock=True)
            changed = update(webhooks).where(webhooks.c.id == webhook_id).values(**values, updated_at=now())
            connection.execute(changed)
            return _get(connection, webhook_id)

    def delete(self, webhook_id: str, owner: str | None = None) -> None:
        """Forget a webhook, with what it was or was to be told."""
        with self._database.write() as connection:
            _get(connection, webhook_id, owner)
            connection.execute(delete(webhooks).where(webhooks.c.id == webhook_id))

    def deliveries(
        self, webhook: Webhook, states: tuple[str, ...], limit: int, before: str | None = None
    ) -> list[Delivery]:
        """Deliveries from the newest on, those in some states if any are given."""
        table = webhook_deliveries
        query = select(table).where(table.c.webhook_id == webhook.id).order_by(table.c.id.desc()).limit(limit)
        if states:
            query = query.where(table.c.state.in_(states))
        if before is not None:
            query = query.where(table.c.id < before)
        with self._database.read() as connection:
            return [delivery_of(row) for row in connection.execute(query).mappings()]

    def delivery(self, webhook: Webhook, delivery_id: str) -> Delivery:
        """One delivery of a webhook, or ``NotFound``."""
        with self._database.read() as connection:
            return _delivery(connection, webhook.id, delivery_id)

    def redeliver(self, webhook: Webhook, delivery_id: str) -> Delivery:
        """Send a delivery again, at once and with all its attempts anew; its id, and so ``webhook-id``, stays.

        One that is being sent at this moment is left alone. ``StateRefused`` when nothing is sent at all.
        """
        table = webhook_deliveries
        with self._database.write() as connection:
            if _get(connection, webhook.id, lock=True).state != "active":
                raise StateRefused(f"webhook {webhook.id}", "disabled", ("active",), ENABLE_HINT)
            _delivery(connection, webhook.id, delivery_id)
            again: JsonObject = {"state": "pending", "attempts": 0, "next_attempt_at": now()}
            # An attempt under way has neither status nor error yet, see service.webhooks.claims.
            at_rest = (table.c.attempts == 0) | table.c.error.is_not(None) | table.c.response_status.is_not(None)
            connection.execute(update(table).where(table.c.id == delivery_id, at_rest).values(**again))
            return _delivery(connection, webhook.id, delivery_id)

    def record_test(self, webhook: Webhook, delivery_id: str, body: JsonObject, outcome: Outcome) -> Delivery:
        """Write down a delivery that was made on request; it is never tried again by itself."""
        moment = now()
        row: dict[str, Any] = {
            "id": delivery_id,
            "webhook_id": webhook.id,
            "event_type": body["type"],
            "body": body,
            "state": "delivered" if outcome.delivered else "failed",
            "attempts": 1,
            "created_at": moment,
            "last_attempt_at": moment,
            "response_status": outcome.status,
            "error": outcome.error,
        }
        with self._database.write() as connection:
            _get(connection, webhook.id, lock=True)  # it may have been deleted meanwhile
            connection.execute(insert(webhook_deliveries).values(**row))
            return _delivery(connection, webhook.id, delivery_id)


def _get(connection: Connection, webhook_id: str, owner: str | None = None, *, lock: bool = False) -> Webhook:
    if not is_id("webhook", webhook_id):
        raise NotFound("webhook", repr(webhook_id))
    query = select(webhooks).where(webhooks.c.id == webhook_id)
    # Locked, where there are locks, it is not deleted before what follows is written.
    row = connection.execute(query.with_for_update(key_share=True) if lock else query).mappings().first()
    if row is None or (owner is not None and row["owner"] != owner):
        raise NotFound("webhook", webhook_id)
    return webhook_of(row)


def _delivery(connection: Connection, webhook_id: str, delivery_id: str) -> Delivery:
    if not is_id("delivery", delivery_id):
        raise NotFound("delivery", repr(delivery_id), DELIVERIES_HINT)
    table = webhook_deliveries
    query = select(table).where(table.c.id == delivery_id, table.c.webhook_id == webhook_id)
    row = connection.execute(query).mappings().first()
    if row is None:
        raise NotFound("delivery", delivery_id, DELIVERIES_HINT)
    return delivery_of(row)
