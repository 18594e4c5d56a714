"""Whoever makes a request: what may be done in its name, and how much of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Scope = Literal["jobs:read", "jobs:write", "batches:write", "webhooks", "admin"]
SCOPES: tuple[Scope, ...] = get_args(Scope)


@dataclass(frozen=True, slots=True)
class Principal:
    """A caller. ``id`` owns what it makes; who has the scope ``admin`` has all others and sees what others own."""

    id: str
    name: str
    scopes: frozenset[str]
    max_running: int | None = None
    max_queued: int | None = None
    requests_per_minute: int | None = None

    @property
    def is_admin(self) -> bool:
        return "admin" in self.scopes

    def may(self, scope: str) -> bool:
        """Whether it has this scope."""
        return self.is_admin or scope in self.scopes

    def sees(self, owner: str) -> bool:
        """Whether what that owner made is there for this caller."""
        return self.is_admin or owner == self.id

    @property
    def only_owner(self) -> str | None:
        """Whose things its lists are limited to; None for everybody's."""
        return None if self.is_admin else self.id


LOCAL = Principal("local", "this machine", frozenset({"admin"}))
"""Everybody, where no token is asked for: only this machine can connect then."""

ADMINISTRATOR = Principal("administrator", "the administrator's token", frozenset({"admin"}))
"""Who shows the token of the environment."""
