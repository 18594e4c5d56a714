"""Idempotency keys: a request that comes twice is answered twice and done once."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Generic, Protocol, TypeVar

from sqlalchemy import ColumnElement, Connection, delete, insert, select
from sqlalchemy.exc import IntegrityError

from service.db.database import Database
from service.db.tables import idempotency_keys
from service.jobs.records import JsonObject, now

KEY_LIFETIME = timedelta(hours=24)


class KeyReused(Exception):
    """An idempotency key came again with another request."""


@dataclass(frozen=True, slots=True)
class RequestKey:
    """A client's word that two requests with this key are one. ``owner`` is whose key it is."""

    owner: str
    key: str
    request_digest: str

    @classmethod
    def of(cls, owner: str, key: str, request: Any) -> RequestKey:
        """The key of a request, with the digest by which another request with the same key is told."""
        text = json.dumps(request, sort_keys=True)
        return cls(owner, key, hashlib.sha256(text.encode()).hexdigest())


@dataclass(frozen=True, slots=True)
class Replay:
    """What the first request with this key was answered, and the id of what it made."""

    resource_id: str
    answer: JsonObject


class _Identified(Protocol):
    @property
    def id(self) -> str: ...


Made = TypeVar("Made", bound=_Identified)


@dataclass(frozen=True, slots=True)
class Submission(Generic[Made]):
    """How something is handed in: under which key, with which answer to keep for it, and how many jobs may wait."""

    key: RequestKey | None = None
    answer: Callable[[Made], JsonObject] = lambda made: {"id": made.id}
    max_queued: int | None = None


def hand_in(
    database: Database, how: Submission[Made], make: Callable[[Connection], Made], lock: int | None = None
) -> Made | Replay:
    """Make something in one transaction, or find what the same key was answered before.

    With ``lock`` one process at a time does it. ``make`` may be called twice: the second time when another process was
    faster with the key or with something else that is there once, which can be seen then.
    """
    try:
        return _hand_in(database, how, make, lock)
    except IntegrityError:
        return _hand_in(database, how, make, lock)


def _hand_in(
    database: Database, how: Submission[Made], make: Callable[[Connection], Made], lock: int | None
) -> Made | Replay:
    with database.write() as connection:
        if lock is not None:
            database.serialize(connection, lock)
        earlier = replayed(connection, how.key) if how.key else None
        if earlier is not None:
            return earlier
        made = make(connection)
        if how.key is not None:
            _remember(connection, how.key, Replay(made.id, how.answer(made)))
        return made


def replayed(connection: Connection, key: RequestKey) -> Replay | None:
    """The first answer to this key, None when it is new; ``KeyReused`` when it belongs to another request."""
    table = idempotency_keys
    live = select(table).where(*_of(key), table.c.expires_at >= now())
    row = connection.execute(live).mappings().first()
    if row is None:
        return None
    if row["request_digest"] != key.request_digest:
        raise KeyReused(key.key)
    return Replay(row["resource_id"], row["answer"])


def _remember(connection: Connection, key: RequestKey, made: Replay) -> None:
    """Keep an answer for the next request with this key; in the transaction that made what it tells of."""
    # One whose time is over may still be there: the sweep takes them away by and by.
    connection.execute(delete(idempotency_keys).where(*_of(key), idempotency_keys.c.expires_at < now()))
    connection.execute(
        insert(idempotency_keys).values(
            owner=key.owner,
            key=key.key,
            request_digest=key.request_digest,
            resource_id=made.resource_id,
            answer=made.answer,
            expires_at=now() + KEY_LIFETIME,
        )
    )


def _of(key: RequestKey) -> tuple[ColumnElement[bool], ...]:
    return idempotency_keys.c.owner == key.owner, idempotency_keys.c.key == key.key
