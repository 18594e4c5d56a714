"""Webhooks and deliveries as they go over the wire."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from service.schemas import SEVERAL, PageQuery, Request
from service.webhooks.outbox import EVENT_PATTERNS, EVENT_TYPES
from service.webhooks.targets import MOST_URL_LENGTH

WebhookState = Literal["active", "disabled"]
DeliveryState = Literal["pending", "delivered", "failed"]
KNOWN_EVENTS = (*EVENT_PATTERNS, *EVENT_TYPES)


def _known(events: list[str]) -> list[str]:
    for name in events:
        if name not in KNOWN_EVENTS:
            raise ValueError(f"{name[:40]!r} is none of {', '.join(KNOWN_EVENTS)}")
    return list(dict.fromkeys(events))


Url = Annotated[
    str,
    Field(
        min_length=1,
        max_length=MOST_URL_LENGTH,
        pattern=r"^[^\s\x00-\x1f\x7f\\]+$",
        description="Where deliveries are sent: https, a public address, no user or password.",
    ),
]
Events = Annotated[
    list[Annotated[str, Field(max_length=40)]],
    Field(min_length=1, max_length=20, description="Types of events, or * and job.* for several."),
    AfterValidator(_known),
]
Description = Annotated[str, Field(max_length=255, pattern=r"^[^\x00-\x1f\x7f]*$")]


class WebhookRequest(Request):
    """A webhook to be made."""

    url: Url
    events: Events
    description: Description = ""
    everyone: Annotated[bool, Field(description="Hear of everybody's jobs; for administrators.")] = False


class WebhookChange(Request):
    """What may change of a webhook; what is left out stays."""

    url: Url | None = None
    events: Events | None = None
    description: Description | None = None
    state: WebhookState | None = None


class WebhookAnswer(BaseModel):
    """A webhook. Its secret is told once, when it is made or rotated."""

    model_config = ConfigDict(from_attributes=True)

    id: str
    owner: str
    everyone: bool
    url: str
    description: str
    events: list[str]
    state: WebhookState
    disabled_reason: str | None
    created_at: datetime
    updated_at: datetime
    previous_secret_until: Annotated[
        datetime | None, Field(description="Until then deliveries are signed with the secret before, too.")
    ]


class WebhookWithSecret(WebhookAnswer):
    """A webhook and the secret that its deliveries are signed with; keep it, it is not shown again."""

    secret: str


class WebhookPage(BaseModel):
    """Webhooks from the newest on."""

    items: list[WebhookAnswer]
    next_cursor: str | None = None


class DeliveryQuery(PageQuery):
    """Which deliveries to list."""

    state: Annotated[list[DeliveryState], Field(default_factory=list, description=SEVERAL)]


class DeliveryAnswer(BaseModel):
    """An event on its way to a webhook. ``id`` is the header ``webhook-id`` of each attempt."""

    model_config = ConfigDict(from_attributes=True)

    id: str
    webhook_id: str
    event_type: str
    job_id: str | None
    state: DeliveryState
    attempts: int
    created_at: datetime
    next_attempt_at: datetime | None
    last_attempt_at: datetime | None
    response_status: int | None
    error: str | None


class DeliveryWithBody(DeliveryAnswer):
    """A delivery and what is sent with it."""

    body: dict[str, Any]


class DeliveryPage(BaseModel):
    """Deliveries from the newest on."""

    items: list[DeliveryAnswer]
    next_cursor: str | None = None
