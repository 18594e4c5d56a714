"""What is refused alike of all that the service keeps: it is not there, there are enough, its state forbids it."""

from __future__ import annotations

from sqlalchemy import Connection, Table, func, select

from service.db.database import Database
from workers.errors import InputError

CREATION_LOCK = 8_241_907_359
"""Key of the lock that is held while an owner's things are counted: two requests could both take the last place."""


class NotFound(InputError):
    """There is nothing of this kind and id, or nothing for this caller."""

    code = "not-found"

    def __init__(self, kind: str, named: str, hint: str = "") -> None:
        super().__init__(f"there is no {kind} {named}", hint=hint or f"GET /v1/{many(kind)} lists the {many(kind)}.")


class TooMany(InputError):
    """An owner has as many of a kind as it may."""

    def __init__(self, kind: str, limit: int, hint: str) -> None:
        super().__init__(f"{limit} {many(kind)} of this token are there already, and more may not be", hint=hint)
        self.code = f"too-many-{many(kind)}"
        self.limit = limit


class StateRefused(InputError):
    """What was asked isn't possible in the state that it is in."""

    code = "invalid-state"

    def __init__(self, named: str, state: str, allowed: tuple[str, ...], hint: str) -> None:
        super().__init__(f"{named} is {state}", hint=hint, expected=" or ".join(allowed), found=state)


def many(kind: str) -> str:
    """The plural of a kind, which is also the name of its list."""
    return f"{kind}es" if kind.endswith("ch") else f"{kind}s"


def require_fewer(database: Database, connection: Connection, table: Table, owner: str, refusal: TooMany) -> None:
    """Refuse one more row of an owner when it has as many as it may; of several requests one at a time is counted."""
    database.serialize(connection, CREATION_LOCK)
    count = select(func.count()).select_from(table).where(table.c.owner == owner)
    if connection.execute(count).scalar_one() >= refusal.limit:
        raise refusal
