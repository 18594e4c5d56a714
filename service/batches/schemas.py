"""What goes over the wire about batches."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from service.batches.discovery import MOST_FOUND
from service.batches.naming import FIELDS
from service.jobs.schemas import JobError, State
from service.schemas import (
    SEVERAL,
    Address,
    LabelFilter,
    Labels,
    Moment,
    Options,
    PageQuery,
    Priority,
    Request,
)

BatchState = Literal["running", "cancelling", "completed", "cancelled"]
ItemState = Literal[State, "refused"]
Name = Annotated[str, Field(max_length=255, pattern=r"^[^\x00-\x1f\x7f]*$")]
MaxRunning = Annotated[int, Field(ge=1, le=10_000, description="Most jobs of the batch at work at once.")]
OnItemError = Literal["continue", "fail"]
FIELDS_TEXT = ", ".join(f"{{{name}}} ({what})" for name, what in FIELDS.items())


class ItemRequest(Request):
    """One conversion of a batch. Its options and labels come over those of the template."""

    source: Annotated[Address, Field(description="Absolute path or URL of the checkpoint.")]
    destination: Annotated[Address | None, Field(description="None: as the template has it.")] = None
    options: Options = Field(default_factory=dict)
    labels: Labels = Field(default_factory=dict)


class Discover(Request):
    """Folders to look for. Each that fits the pattern becomes an item."""

    prefix: Annotated[Address, Field(description="Absolute path or URL of the folder to look below.")]
    pattern: Annotated[
        str,
        Field(
            min_length=1,
            max_length=255,
            description="Names of folders, segment by segment, such as global_step_* or run-*/global_step_*/actor; "
            "*, ? and [a-z] stand for parts of a name.",
        ),
    ]


class Template(Request):
    """What the jobs have in common."""

    destination: Annotated[Address | None, Field(description=f"Text with the fields {FIELDS_TEXT}.")] = None
    options: Options = Field(default_factory=dict)
    labels: Labels = Field(default_factory=dict)
    priority: Priority = 0


class BatchRequest(Request):
    """Many conversions at once: either listed as ``items``, or found by ``discover``."""

    name: Name = ""
    items: Annotated[list[ItemRequest] | None, Field(min_length=1, max_length=MOST_FOUND)] = None
    discover: Discover | None = None
    template: Template = Field(default_factory=Template)
    labels: Annotated[Labels, Field(description="Of the batch; those of its jobs are in the template.")] = Field(
        default_factory=dict
    )
    on_item_error: Annotated[
        OnItemError,
        Field(
            description="continue: an item that cannot be done is refused or fails, and the others go on. "
            "fail: nothing is stored while one cannot be done, and what waits is cancelled when one fails."
        ),
    ] = "continue"
    max_running: MaxRunning | None = None
    if_done: Annotated[
        Literal["skip", "redo"],
        Field(
            description="Of a destination that holds the model of this very plan, source and options included. "
            "skip: the job succeeds at once and counts as skipped. redo: the model is made again."
        ),
    ] = "skip"

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if (self.items is None) == (self.discover is None):
            raise ValueError("give either items or discover")
        return self


class BatchQuery(PageQuery):
    """Which batches to list; all that is given has to fit."""

    state: Annotated[list[BatchState], Field(default_factory=list, description=SEVERAL)]
    label: Annotated[list[LabelFilter], Field(default_factory=list, description=f"NAME:VALUE. {SEVERAL}")]
    created_after: Moment | None = None
    created_before: Moment | None = None


class ItemQuery(PageQuery):
    """Which items to list."""

    state: Annotated[list[ItemState], Field(default_factory=list, description=SEVERAL)]


class BatchChange(Request):
    """What may change of a batch; what is left out stays."""

    name: Name = ""
    labels: Labels = Field(default_factory=dict)
    max_running: Annotated[MaxRunning | None, Field(description="Null: as many as the service runs.")] = None
    priority: Annotated[Priority, Field(description="Of the jobs that wait.")] = 0


class Counts(BaseModel):
    """Items by what became of them; ``skipped``: this very model was there already."""

    model_config = ConfigDict(from_attributes=True)

    total: int
    queued: int
    running: int
    succeeded: int
    skipped: int
    failed: int
    cancelled: int
    refused: int


class Batch(BaseModel):
    """A batch. Clients should expect further states to come."""

    id: str
    name: str
    state: BatchState
    owner: str
    labels: dict[str, str]
    counts: Counts
    bytes_done: Annotated[int, Field(description="Bytes of weights written.")]
    bytes_total: Annotated[
        int | None,
        Field(description="With an average size for each job that is not planned yet; null before the first."),
    ]
    bytes_per_s: int | None
    eta_s: float | None
    on_item_error: OnItemError
    max_running: int | None
    if_done: Literal["skip", "redo"]
    discover: Discover | None
    template: Template
    created_at: datetime
    updated_at: datetime
    ended_at: datetime | None
    links: dict[str, str]


class BatchPage(BaseModel):
    """Batches from the newest on; ``next_cursor`` asks for the following page, None at the end."""

    items: list[Batch]
    next_cursor: str | None = None


class BatchItem(BaseModel):
    """One item and its job; ``state`` is refused where it became none, and null when its job was deleted."""

    model_config = ConfigDict(from_attributes=True)

    position: int
    source: str
    destination: str
    job_id: str | None
    state: ItemState | None
    already_there: bool
    error: JobError | None


class BatchItemPage(BaseModel):
    """Items in the order of the batch."""

    items: list[BatchItem]
    next_cursor: str | None = None


class PreviewItem(BaseModel):
    """What would become of one item. ``done``: whether the model is there; null where that was not found out."""

    position: int
    source: str
    destination: str
    done: bool | None
    error: JobError | None


class Preview(BaseModel):
    """What a batch would do. Nothing is stored."""

    total: int
    done: Annotated[int, Field(description="Models that are there already.")]
    unknown: Annotated[int, Field(description="Items of which the time of a request was too short to find that out.")]
    refused: int
    items: list[PreviewItem]


class Busy(BaseModel):
    """A job that was not queued again, since another has its destination."""

    job_id: str
    busy_with: str


class Retried(BaseModel):
    """What was queued again."""

    batch: Batch
    requeued: int
    not_requeued: list[Busy]
