"""Tokens and the audit as they go over the wire."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from service.access.principals import Scope
from service.schemas import Moment, PageQuery, Request
from service.times import now

Name = Annotated[str, Field(min_length=1, max_length=255, pattern=r"^[^\x00-\x1f\x7f]+$")]
Count = Annotated[int, Field(ge=1, le=1_000_000)]
Seconds = Annotated[int, Field(ge=1, le=10 * 366 * 86_400)]


class _Lifetime(Request):
    expires_at: Annotated[Moment | None, Field(description="Null: never.")] = None
    expires_in_s: Annotated[Seconds | None, Field(description="Instead of expires_at: seconds from now.")] = None

    @model_validator(mode="after")
    def _one_end(self) -> Self:
        if self.expires_at is not None and self.expires_in_s is not None:
            raise ValueError("expires_at and expires_in_s exclude each other")
        return self

    @property
    def end(self) -> datetime | None:
        """When the token ends."""
        return self.expires_at if self.expires_in_s is None else now() + timedelta(seconds=self.expires_in_s)


class TokenRequest(_Lifetime):
    """A token to be made. Limits that are left out are the service's own."""

    name: Annotated[Name, Field(description="Who or what has it.")]
    scopes: Annotated[list[Scope], Field(min_length=1, max_length=5)]
    max_running: Annotated[Count | None, Field(description="Jobs at work at a time.")] = None
    max_queued: Annotated[Count | None, Field(description="Jobs that wait.")] = None
    requests_per_minute: Count | None = None


class TokenChange(_Lifetime):
    """What may change of a token; what is left out stays, null takes a limit or the end away."""

    name: Name | None = None
    max_running: Count | None = None
    max_queued: Count | None = None
    requests_per_minute: Count | None = None

    @property
    def values(self) -> dict[str, Any]:
        """The columns that change."""
        given = self.model_fields_set
        changed = {name: getattr(self, name) for name in ("max_running", "max_queued", "requests_per_minute")}
        values = {name: value for name, value in changed.items() if name in given}
        if self.name is not None:
            values["name"] = self.name
        if given & {"expires_at", "expires_in_s"}:
            values["expires_at"] = self.end
        return values


class RevokeQuery(Request):
    """What else is to end with a token."""

    cancel_jobs: Annotated[bool, Field(description="Cancel its jobs, waiting and at work. Else they go on.")] = False


class Token(BaseModel):
    """A token without its secret."""

    model_config = ConfigDict(from_attributes=True)

    id: str
    name: str
    scopes: list[str]
    max_running: int | None
    max_queued: int | None
    requests_per_minute: int | None
    created_by: str
    created_at: datetime
    expires_at: datetime | None
    last_used_at: Annotated[datetime | None, Field(description="To the minute.")]
    revoked_at: datetime | None


class TokenWithSecret(Token):
    """A new token. ``token`` is what its holder sends; it is shown this once and kept nowhere."""

    token: str


class TokenPage(BaseModel):
    """Tokens from the newest on, revoked ones included."""

    items: list[Token]
    next_cursor: str | None = None


class Caller(BaseModel):
    """Whom the service takes a caller for, and what it may do. ``id`` is the owner of what it makes."""

    id: str
    name: str
    scopes: list[str]
    max_running: int | None
    max_queued: int | None
    requests_per_minute: Annotated[int | None, Field(description="Null: no limit.")]
    max_streams: int
    expires_at: datetime | None = None


ActorName = Annotated[str, Field(max_length=40, pattern=r"^[a-z]+(_[0-9a-f]+)?$")]
Text = Annotated[str, Field(max_length=1024, pattern=r"^[^\x00-\x1f\x7f]*$")]


class AuditQuery(PageQuery):
    """Which rows to list; all that is given has to fit."""

    actor: Annotated[ActorName | None, Field(description="A token's id, administrator, local or nobody.")] = None
    action: Annotated[Text | None, Field(description="A method and route, such as DELETE /v1/jobs/{job_id}.")] = None
    target: Annotated[Text | None, Field(description="The id of what was changed.")] = None
    status: Annotated[int, Field(ge=100, le=599)] | None = None
    after: Moment | None = None
    before: Moment | None = None


class AuditEntry(BaseModel):
    """A request that changed something, or whose token was refused."""

    model_config = ConfigDict(from_attributes=True)

    id: str
    at: datetime
    actor: str
    actor_name: str
    address: str
    action: str
    target: str
    status: int
    detail: dict[str, Any]


class AuditPage(BaseModel):
    """Rows from the newest on."""

    items: list[AuditEntry]
    next_cursor: str | None = None
