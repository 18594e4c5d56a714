"""What goes over the wire about watches."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from service.batches.schemas import FIELDS_TEXT, Discover, Name, Template
from service.jobs.schemas import JobError, State
from service.schemas import SEVERAL, Address, PageQuery, Request

WatchState = Literal["active", "paused"]
WatchItemState = Literal["waiting", "submitted", "refused"]
LONGEST_INTERVAL_S = 7 * 24 * 3600
Interval = Annotated[float, Field(gt=0, le=LONGEST_INTERVAL_S, description="Seconds from one look to the next.")]


class WatchTemplate(Template):
    """What becomes of each checkpoint."""

    destination: Annotated[Address, Field(description=f"Text with the fields {FIELDS_TEXT}.")]


class WatchRequest(Discover):
    """A prefix to be looked at regularly: each folder that fits the pattern becomes a job once it is whole."""

    name: Name = ""
    template: WatchTemplate
    interval_s: Interval = 60.0


class WatchChange(Request):
    """What may change of a watch; what is left out stays."""

    name: Name = ""
    state: Annotated[WatchState, Field(description="A paused watch is not looked at.")] = "active"
    interval_s: Interval = 60.0
    template: Annotated[WatchTemplate | None, Field(description="Of what has not become a job yet.")] = None


class WatchQuery(PageQuery):
    """Which watches to list."""

    state: Annotated[list[WatchState], Field(default_factory=list, description=SEVERAL)]


class WatchItemQuery(PageQuery):
    """Which items to list."""

    state: Annotated[list[WatchItemState], Field(default_factory=list, description=SEVERAL)]


class WatchCounts(BaseModel):
    """Folders that were seen: those that wait to be whole, those that became jobs, those that can't."""

    waiting: int = 0
    submitted: int = 0
    refused: int = 0


class Watch(BaseModel):
    """A watch. ``error`` is why the last look could not be made."""

    model_config = ConfigDict(from_attributes=True)

    id: str
    name: str
    state: WatchState
    owner: str
    prefix: str
    pattern: str
    template: WatchTemplate
    interval_s: float
    created_at: datetime
    updated_at: datetime
    last_look_at: datetime | None
    next_look_at: datetime
    error: JobError | None
    counts: WatchCounts
    links: dict[str, str] = Field(default_factory=dict)


class WatchPage(BaseModel):
    """Watches from the newest on; ``next_cursor`` asks for the following page, None at the end."""

    items: list[Watch]
    next_cursor: str | None = None


class WatchItem(BaseModel):
    """A folder that was seen. ``error`` is what it waits for, why it was refused, or why its job failed."""

    model_config = ConfigDict(from_attributes=True)

    source: str
    state: WatchItemState
    job_id: str | None
    job_state: State | None
    error: JobError | None
    first_seen_at: datetime
    updated_at: datetime


class WatchItemPage(BaseModel):
    """Folders in the order in which they were first seen."""

    items: list[WatchItem]
    next_cursor: str | None = None
