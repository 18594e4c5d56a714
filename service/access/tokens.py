"""Tokens in the database. Of a token's secret only the digest is there: who reads the table can't use it.

A secret has 256 bits of chance, so that a plain SHA-256 of it can't be turned back; slow hashes are for passwords.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import Connection, insert, or_, select, update

from service.access.principals import Principal
from service.db.database import Database
from service.db.tables import tokens
from service.ids import is_id, new_id
from service.refusals import NotFound
from service.times import now, spelled

KIND = "token"
USE_INTERVAL = timedelta(minutes=1)
"""How exact ``last_used_at`` is: more would be a write with each request."""

_TEXT = re.compile(r"unshard_([0-9a-f]{26})_([A-Za-z0-9_-]{43})")


class BadToken(Exception):
    """What was shown opens nothing."""


class EndedToken(BadToken):
    """The token was right once. Only said to who shows its secret: to others all that opens nothing is alike."""

    def __init__(self, token_id: str, how: str) -> None:
        super().__init__(f"{token_id} {how}")
        self.token_id = token_id
        self.how = how


@dataclass(frozen=True, slots=True)
class NewToken:
    """A token that somebody asks for. Limits that are None are the service's own."""

    name: str
    scopes: tuple[str, ...]
    created_by: str
    expires_at: datetime | None = None
    max_running: int | None = None
    max_queued: int | None = None
    requests_per_minute: int | None = None


@dataclass(frozen=True, slots=True)
class Token:
    """A token as everybody but its holder sees it."""

    id: str
    name: str
    scopes: list[str]
    max_running: int | None
    max_queued: int | None
    requests_per_minute: int | None
    created_by: str
    created_at: datetime
    expires_at: datetime | None
    last_used_at: datetime | None
    revoked_at: datetime | None

    @property
    def is_good(self) -> bool:
        """Whether it still opens anything."""
        return self.revoked_at is None and (self.expires_at is None or self.expires_at > now())

    @property
    def principal(self) -> Principal:
        """Whom the token speaks for: itself."""
        limits = (self.max_running, self.max_queued, self.requests_per_minute)
        return Principal(self.id, self.name, frozenset(self.scopes), *limits)


_FIELDS = tuple(tokens.c[name] for name in Token.__dataclass_fields__)


class TokenStore:
    """Thread-safe; each method is one transaction."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def create(self, new: NewToken) -> tuple[Token, str]:
        """Make a token: as it is kept, and the text that its holder shows, which nobody can find out later."""
        token_id = new_id(KIND)
        secret = secrets.token_urlsafe(32)
        row = {name: getattr(new, name) for name in NewToken.__dataclass_fields__} | {"scopes": list(new.scopes)}
        with self._database.write() as connection:
            connection.execute(insert(tokens).values(id=token_id, digest=_digest(secret), created_at=now(), **row))
            return _get(connection, token_id), f"unshard_{token_id.removeprefix(KIND + '_')}_{secret}"

    def get(self, token_id: str) -> Token:
        """The token, or ``NotFound``."""
        with self._database.read() as connection:
            return _get(connection, token_id)

    def page(self, limit: int, before: str | None = None) -> list[Token]:
        """Tokens from the newest on, revoked ones included."""
        query = select(*_FIELDS).order_by(tokens.c.id.desc()).limit(limit)
        if before is not None:
            query = query.where(tokens.c.id < before)
        with self._database.read() as connection:
            return [Token(**row) for row in connection.execute(query).mappings()]

    def change(self, token_id: str, values: dict[str, Any]) -> Token:
        """Give a token another name, end or limits. Its scopes stay: for others there are other tokens."""
        with self._database.write() as connection:
            _get(connection, token_id)
            if values:
                connection.execute(update(tokens).where(tokens.c.id == token_id).values(**values))
            return _get(connection, token_id)

    def revoke(self, token_id: str) -> Token:
        """End a token for good. The row stays, so that what was done with it has a name."""
        with self._database.write() as connection:
            _get(connection, token_id)
            live = (tokens.c.id == token_id, tokens.c.revoked_at.is_(None))
            connection.execute(update(tokens).where(*live).values(revoked_at=now()))
            return _get(connection, token_id)

    def verify(self, text: str) -> Token:
        """The live token that a text is the secret of; ``BadToken`` or one of its kinds otherwise."""
        match = _TEXT.fullmatch(text)
        if match is None:
            raise BadToken
        query = select(*_FIELDS, tokens.c.digest).where(tokens.c.id == f"{KIND}_{match[1]}")
        with self._database.read() as connection:
            row = connection.execute(query).mappings().first()
        # Also where there is no such token, so that the time taken doesn't tell.
        fits = hmac.compare_digest(_digest(match[2]), row["digest"] if row is not None else _digest(""))
        if row is None or not fits:
            raise BadToken
        token = Token(**{name: row[name] for name in Token.__dataclass_fields__})
        if token.revoked_at is not None:
            raise EndedToken(token.id, "was revoked")
        if token.expires_at is not None and token.expires_at <= now():
            raise EndedToken(token.id, f"expired at {spelled(token.expires_at)}")
        return token

    def used(self, token_id: str) -> None:
        """Note that a token is in use, at most once a minute."""
        moment = now()
        due = or_(tokens.c.last_used_at.is_(None), tokens.c.last_used_at < moment - USE_INTERVAL)
        with self._database.write() as connection:
            connection.execute(update(tokens).where(tokens.c.id == token_id, due).values(last_used_at=moment))


def _get(connection: Connection, token_id: str) -> Token:
    row = None
    if is_id(KIND, token_id):
        row = connection.execute(select(*_FIELDS).where(tokens.c.id == token_id)).mappings().first()
    if row is None:
        raise NotFound("token", token_id)
    return Token(**row)


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()
