"""Whom a request comes from, and whether that caller has asked for too much: what the gate knows of access."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from sqlalchemy.exc import SQLAlchemyError
from starlette.concurrency import run_in_threadpool

from service.access.audit import NOBODY, AuditLog, Deed
from service.access.keyring import Keyring
from service.access.principals import LOCAL, Principal
from service.access.rates import Rates, Streams, neighbourhood
from service.access.tokens import KIND, BadToken, EndedToken, TokenStore
from service.db.database import Database
from service.refusals import NotFound
from service.settings import Settings

AUTHENTICATION = "authentication"
"""The action of audit rows that tell of a refused token."""

log = logging.getLogger(__name__)


class NotAuthenticated(Exception):
    """The request doesn't show a token that opens anything."""

    def __init__(self, detail: str, hint: str) -> None:
        super().__init__(detail)
        self.hint = hint


@dataclass(frozen=True, slots=True)
class Attempt:
    """A request, as far as it matters for finding out whose it is."""

    authorization: str | None
    address: str
    path: str


class Guard:
    """Tokens, rates, streams and the audit of one service. Thread-safe."""

    def __init__(self, settings: Settings, database: Database) -> None:
        self._settings = settings
        self._rates = Rates()
        self._failures = Rates()
        self._streams = Streams(settings.max_streams)
        self.tokens = TokenStore(database)
        self.audit = AuditLog(database)
        administrators = settings.admin_token.get_secret_value() if settings.admin_token else None
        self.keyring = Keyring(self.tokens, administrators)

    def close(self) -> None:
        """Write down what is still to be written."""
        self.keyring.close()

    async def identify(self, attempt: Attempt) -> Principal:
        """The caller; ``NotAuthenticated``, or ``TooFast`` when its address has shown too many wrong tokens."""
        if attempt.authorization is None:
            if not self.keyring.asks:
                return LOCAL
            raise NotAuthenticated(
                "the request shows no valid token: it has no header Authorization",
                "Send the header Authorization: Bearer TOKEN; the administrator has the token.",
            )
        scheme, _, token = attempt.authorization.partition(" ")
        if scheme.lower() != "bearer":
            raise NotAuthenticated(
                "the request shows no valid token: its header Authorization is not of the kind Bearer",
                "Send the header Authorization: Bearer TOKEN; the administrator has the token.",
            )
        return self.keyring.remembered(token.strip()) or await self._look_up(token.strip(), attempt)

    async def _look_up(self, token: str, attempt: Attempt) -> Principal:
        # Who showed a good token before is let through, so that guesses from behind the same proxy lock nobody out.
        guesses = not self.keyring.was_good(token)
        source, limit = neighbourhood(attempt.address), self._settings.failed_logins_per_minute
        if guesses:
            # Counted before the look, so that many at once don't all pass; given back when it was none.
            self._failures.take(source, limit)
        try:
            principal = await run_in_threadpool(self.keyring.verify, token)
        except BadToken as error:
            if not guesses:
                self._failures.take(source, limit)
            await self._tell_failure(error, attempt)
            raise _refusal(error, asks=self.keyring.asks) from None
        if guesses:
            self._failures.give_back(source, limit)
        return principal

    async def _tell_failure(self, error: BadToken, attempt: Attempt) -> None:
        reason = str(error) if isinstance(error, EndedToken) else "unknown token"
        log.warning("a token was refused: %s, from %s", reason, attempt.address)
        deed = Deed(NOBODY, "", attempt.address, AUTHENTICATION, attempt.path, 401, {"reason": reason})
        try:
            await run_in_threadpool(self.audit.add, deed)
        except SQLAlchemyError:
            log.exception("the audit could not be written: %s", deed)

    async def still_knows(self, caller: Principal) -> bool:
        """Whether who was let in a while ago still would be: its token may have ended since."""
        if not caller.id.startswith(f"{KIND}_"):
            return True
        try:
            return (await run_in_threadpool(self.tokens.get, caller.id)).is_good
        except NotFound:
            return False

    def count(self, caller: Principal) -> None:
        """Count a request; ``TooFast`` when the caller made as many as it may."""
        limit = self.requests_per_minute(caller)
        if limit is not None:
            self._rates.take(caller.id, limit)

    def requests_per_minute(self, caller: Principal) -> int | None:
        """What a caller may ask in a minute; None: as much as it likes."""
        if caller is LOCAL:
            return None
        return caller.requests_per_minute or self._settings.requests_per_minute

    @contextmanager
    def stream(self, caller: Principal) -> Iterator[None]:
        """Count a stream as long as it lasts; ``TooManyStreams`` when the caller has as many as it may."""
        self._streams.open(caller.id)
        try:
            yield
        finally:
            self._streams.close(caller.id)


def _refusal(error: BadToken, *, asks: bool) -> NotAuthenticated:
    if isinstance(error, EndedToken):
        return NotAuthenticated(f"the token {error.how}", "Ask the administrator for a new token.")
    hint = "Check the token; the administrator has it." if asks else "This service asks for no token: send none."
    return NotAuthenticated("the request shows no valid token: nobody has this one", hint)
