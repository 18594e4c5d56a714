"""The outbox: what webhooks are to be told is written in the transaction in which it happens, and sent later.

So no event is told that was rolled back, and none that happened is forgotten, whichever process dies when.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, insert, or_, select

from service.db.tables import webhook_deliveries, webhooks
from service.ids import reserve_ids
from service.times import now, spelled

EVENT_TYPES = (
    "batch.completed",
    "job.cancelled",
    "job.created",
    "job.failed",
    "job.requeued",
    "job.running",
    "job.succeeded",
    "job.warned",
)
"""What may be heard. Not progress, which polling is for, nor single files, which nobody can use before the commit."""

EVENT_PATTERNS = ("*", *sorted({f"{name.split('.', maxsplit=1)[0]}.*" for name in EVENT_TYPES}))
"""Ways to ask for several."""

MOST_BODY_BYTES = 64 * 1024
LIST_LENGTHS = (256, 32, 0)
TEXT_LENGTHS = (4096, 1024, 256, 64)

JsonObject = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Happening:
    """Something that webhooks of ``owner``, and those that hear everything, may want to know."""

    owner: str
    type: str
    at: datetime
    data: JsonObject
    job_id: str | None = None

    @property
    def body(self) -> JsonObject:
        """What is sent: the event, in at most ``MOST_BODY_BYTES`` of JSON."""
        return fitted({"type": self.type, "timestamp": spelled(self.at), "data": self.data})


def enqueue(connection: Connection, owner: str, event_type: str, data: JsonObject, job_id: str | None = None) -> int:
    """Put an event into the outbox, for each active webhook that hears it; the number of those.

    ``data`` is what is told of the event, beside its type and time. Call it in the transaction that records the event.
    """
    happening = Happening(owner, event_type, now(), data, job_id)
    return deliver(connection, [happening], hearers(connection, owner, event_type))


def deliver(connection: Connection, happenings: Sequence[Happening], ears: Sequence[str]) -> int:
    """Store a delivery of each event for each of these webhooks, as ``hearers`` found them."""
    pairs = [(happening, webhook_id) for happening in happenings for webhook_id in ears]
    if not pairs:
        return 0
    moment = now()
    rows = [
        {
            "id": delivery_id,
            "webhook_id": webhook_id,
            "event_type": happening.type,
            "job_id": happening.job_id,
            "body": happening.body,
            "state": "pending",
            "attempts": 0,
            "created_at": moment,
            "next_attempt_at": moment,
        }
        for delivery_id, (happening, webhook_id) in zip(reserve_ids("delivery", len(pairs)), pairs, strict=True)
    ]
    connection.execute(insert(webhook_deliveries), rows)
    return len(rows)


def hearers(connection: Connection, owner: str, event_type: str) -> list[str]:
    """The active webhooks that hear this event of this owner; one query, which without webhooks finds nothing."""
    query = (
        select(webhooks.c.id, webhooks.c.events)
        .where(webhooks.c.state == "active", or_(webhooks.c.owner == owner, webhooks.c.everyone))
        # A webhook that is being deleted is waited for, so that it is gone here instead of when its delivery comes in.
        .with_for_update(read=True, key_share=True)
    )
    return [row.id for row in connection.execute(query) if hears(row.events, event_type)]


def hears(patterns: Sequence[str], event_type: str) -> bool:
    """Whether a list of event types and patterns covers a type."""
    return not {"*", event_type, f"{event_type.split('.', maxsplit=1)[0]}.*"}.isdisjoint(patterns)


def fitted(body: JsonObject) -> JsonObject:
    """The body, cut to ``MOST_BODY_BYTES`` where it is larger: long lists first, then long texts.

    A body that was cut says so with ``truncated``.
    """
    longest_text = max(MOST_BODY_BYTES, *TEXT_LENGTHS)
    cuts = [(length, longest_text) for length in LIST_LENGTHS] + [(0, length) for length in TEXT_LENGTHS]
    told = body
    for lists, texts in cuts:
        if len(encoded(told)) <= MOST_BODY_BYTES:
            return told
        told = {**_cut(body, lists, texts), "truncated": True}
    return told


def encoded(body: JsonObject) -> bytes:
    """A body as it is sent and signed."""
    return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "backslashreplace")


def _cut(value: Any, lists: int, texts: int) -> Any:
    if isinstance(value, str):
        return value if len(value) <= texts else value[:texts] + "…"
    if isinstance(value, list):
        return [_cut(item, lists, texts) for item in value[:lists]]
    if isinstance(value, Mapping):
        return {name: _cut(item, lists, texts) for name, item in value.items()}
    return value
