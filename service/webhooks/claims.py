"""Due deliveries: which process sends one, and what becomes of it.

A claim moves the next attempt to a later time and counts the attempt. So one process sends it; should that one die,
the delivery is due again when the time has come, under the same id; and whoever comes back late writes nothing over.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy import Connection, delete, or_, select, update

from service.db.database import Database
from service.db.tables import tokens, webhook_deliveries, webhooks
from service.ids import id_floor
from service.times import now
from service.webhooks.outbox import JsonObject, encoded
from service.webhooks.sending import Outcome
from service.webhooks.signing import Message
from service.webhooks.store import Webhook, webhook_of

RETRY_DELAYS_S: tuple[float, ...] = (5, 30, 2 * 60, 10 * 60, 30 * 60, 3600, 3 * 3600, 6 * 3600, 12 * 3600, 24 * 3600)
"""Between an attempt and the next: eleven attempts over about two days."""

JITTER = 0.2
"""A delay is longer by up to this share, so that what failed together does not come again together."""

CLAIM_S = 60.0
"""When a claimed delivery is due again if nothing is heard of it: more than resolving a name and sending take."""

MOST_REFUSALS = 5
"""Deliveries given up, or answered 410 (Gone), in a row until a webhook is disabled."""

GONE = 410
KEPT = timedelta(days=30)
"""How long a delivery waits for a disabled webhook to be enabled; how long ended ones are kept is a setting."""

DELIVERED, RETRIED, FAILED = "delivered", "retried", "failed"


@dataclass(frozen=True, slots=True)
class Claim:
    """The right to make one attempt at a delivery."""

    webhook: Webhook
    delivery_id: str
    attempt: int
    body: JsonObject

    @property
    def message(self) -> Message:
        return Message(self.delivery_id, encoded(self.body))

    @property
    def is_spent(self) -> bool:
        """Whether every attempt was begun before, the last of which never ended."""
        return self.attempt > len(RETRY_DELAYS_S) + 1


class Claims:
    """Thread-safe; each method is one transaction."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def due(self) -> list[str]:
        """Active webhooks with something to send now."""
        table = webhook_deliveries
        query = (
            select(table.c.webhook_id)
            .join(webhooks, webhooks.c.id == table.c.webhook_id)
            .where(table.c.state == "pending", table.c.next_attempt_at <= now(), webhooks.c.state == "active")
            .distinct()
        )
        with self._database.read() as connection:
            return list(connection.execute(query).scalars())

    def claim(self, webhook_id: str, count: int) -> list[Claim]:
        """Take up to ``count`` due deliveries of a webhook, the oldest first.

        A webhook whose owner's token is not good any more is disabled instead.
        """
        with self._database.write() as connection:
            row = _lock(connection, webhook_id)
            if row is None or row.state != "active":
                return []
            if _is_orphan(connection, row.owner):
                _disable(connection, webhook_id, "the token that made it was revoked or has expired")
                return []
            return [Claim(row, taken.id, taken.attempts, taken.body) for taken in _take(connection, webhook_id, count)]

    def record(self, claim: Claim, outcome: Outcome) -> str | None:
        """Write down how an attempt ended: DELIVERED, RETRIED or FAILED; None when it came too late to count."""
        table = webhook_deliveries
        with self._database.write() as connection:
            if _lock(connection, claim.webhook.id) is None:
                return None
            result, following = _verdict(claim, outcome)
            values = {
                "state": "pending" if result == RETRIED else result,
                "next_attempt_at": following,
                "response_status": outcome.status,
                "error": outcome.error,
            }
            ours = (table.c.id == claim.delivery_id, table.c.state == "pending", table.c.attempts == claim.attempt)
            if not connection.execute(update(table).where(*ours).values(**values)).rowcount:
                return None
            if outcome.delivered:
                changed = update(webhooks).where(webhooks.c.id == claim.webhook.id, webhooks.c.refusals > 0)
                connection.execute(changed.values(refusals=0))
            elif result == FAILED or outcome.status == GONE:
                _count_refusal(connection, claim.webhook.id, outcome)
            return result

    def forget_old(self) -> int:
        """Drop deliveries that waited too long, and how many there were."""
        table = webhook_deliveries
        old = (table.c.id < id_floor("delivery", now() - KEPT), table.c.state == "pending")
        with self._database.write() as connection:
            return connection.execute(delete(table).where(*old)).rowcount


@dataclass(frozen=True, slots=True)
class _Taken:
    id: str
    attempts: int
    body: JsonObject


def _lock(connection: Connection, webhook_id: str) -> Webhook | None:
    """The webhook, which nobody else changes or deletes until the transaction ends; None when it is gone.

    Before its deliveries: whoever deletes a webhook locks it first, too, and two that lock in turn do not block
    each other for good.
    """
    query = select(webhooks).where(webhooks.c.id == webhook_id).with_for_update(key_share=True)
    row = connection.execute(query).mappings().first()
    return None if row is None else webhook_of(row)


def _is_orphan(connection: Connection, owner: str) -> bool:
    gone = or_(tokens.c.revoked_at.is_not(None), tokens.c.expires_at <= now())
    return connection.execute(select(tokens.c.id).where(tokens.c.id == owner, gone)).first() is not None


def _take(connection: Connection, webhook_id: str, count: int) -> Sequence[_Taken]:
    table, moment = webhook_deliveries, now()
    due = (
        select(table.c.id)
        .where(table.c.webhook_id == webhook_id, table.c.state == "pending", table.c.next_attempt_at <= moment)
        .order_by(table.c.id)
        .limit(count)
    )
    claimed = (
        update(table)
        .where(table.c.id.in_(due.scalar_subquery()), table.c.state == "pending")
        .values(
            attempts=table.c.attempts + 1,
            last_attempt_at=moment,
            next_attempt_at=moment + timedelta(seconds=CLAIM_S),
            response_status=None,
            error=None,
        )
        .returning(table.c.id, table.c.attempts, table.c.body)
    )
    return sorted((_Taken(*row) for row in connection.execute(claimed)), key=lambda taken: taken.id)


def _verdict(claim: Claim, outcome: Outcome) -> tuple[str, datetime | None]:
    if outcome.delivered:
        return DELIVERED, None
    if claim.attempt > len(RETRY_DELAYS_S):
        return FAILED, None
    planned_s = RETRY_DELAYS_S[claim.attempt - 1] * random.uniform(1, 1 + JITTER)  # noqa: S311 - no secret
    # Never sooner than planned: a receiver that asks for a second each time would use all attempts up in no time.
    return RETRIED, now() + timedelta(seconds=max(planned_s, outcome.retry_after_s))


def _count_refusal(connection: Connection, webhook_id: str, outcome: Outcome) -> None:
    counted = (
        update(webhooks)
        .where(webhooks.c.id == webhook_id)
        .values(refusals=webhooks.c.refusals + 1)
        .returning(webhooks.c.refusals)
    )
    if connection.execute(counted).scalar_one() >= MOST_REFUSALS:
        _disable(connection, webhook_id, f"refused {MOST_REFUSALS} times in a row, at last: {outcome.error}")


def _disable(connection: Connection, webhook_id: str, reason: str) -> None:
    values = {"state": "disabled", "disabled_reason": reason, "updated_at": now()}
    connection.execute(
        update(webhooks).where(webhooks.c.id == webhook_id, webhooks.c.state == "active").values(**values)
    )
