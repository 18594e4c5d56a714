"""What goes over the wire about jobs. Their options are those of ``workers.options``, listed there alone."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from service.schemas import (
    DURATION,
    SEVERAL,
    Address,
    Cursor,
    Id,
    LabelFilter,
    Labels,
    Moment,
    Options,
    PageQuery,
    Prefix,
    Priority,
    Request,
)

State = Literal["queued", "planning", "running", "verifying", "cancelling", "succeeded", "failed", "cancelled"]


class JobRequest(Request):
    """A conversion to be done."""

    source: Annotated[Address, Field(description="Absolute path or URL of the checkpoint.")]
    destination: Annotated[Address, Field(description="Absolute path or URL of the model folder to make.")]
    options: Options = Field(default_factory=dict)
    labels: Labels = Field(default_factory=dict)
    priority: Priority = 0


class JobChoice(Request):
    """Which jobs; all that is given has to fit."""

    state: Annotated[list[State], Field(default_factory=list, description=SEVERAL)]
    label: Annotated[list[LabelFilter], Field(default_factory=list, description=f"NAME:VALUE. {SEVERAL}")]
    batch_id: Id | None = None
    watch_id: Id | None = None
    source_prefix: Prefix | None = None
    destination_prefix: Prefix | None = None
    created_after: Moment | None = None
    created_before: Moment | None = None
    search: (
        Annotated[Prefix, Field(description="A part of id, source or destination; case does not matter.")] | None
    ) = None


class SubmitQuery(Request):
    """How a job is handed in."""

    dry_run: Annotated[bool, Field(description="Answer with the plan and store nothing.")] = False
    wait: Annotated[str | None, Field(pattern=DURATION, description="Answer when it has ended: 30s.")] = None
    if_done: Annotated[
        Literal["again", "return"],
        Field(description="return: answer with the job that did this, if source and result are as they were then."),
    ] = "again"


class TensorQuery(Request):
    """Which tensors to list."""

    limit: Annotated[int, Field(ge=1, le=5000)] = 50
    cursor: Cursor | None = None
    name: Annotated[str, Field(max_length=1024, description="A part of the name; case does not matter.")] | None = None
    file: Annotated[str, Field(max_length=4096, description="The output file that holds it.")] | None = None


class JobQuery(JobChoice, PageQuery):
    """Which jobs to list."""


class StreamQuery(JobChoice):
    """Which jobs to follow."""

    job_id: Annotated[list[Id], Field(default_factory=list, max_length=100, description=SEVERAL)]


class JobChange(Request):
    """What may change of a job; what is left out stays."""

    priority: Priority | None = None
    labels: Labels | None = None


class RetryRequest(Request):
    """How to do it again."""

    from_scratch: Annotated[bool, Field(description="Make files again that an earlier attempt finished.")] = False


class Progress(BaseModel):
    """How far the weights are; sizes in bytes of output."""

    bytes_done: Annotated[int, Field(description="Written, with what an earlier attempt finished.")]
    bytes_total: int
    bytes_read: Annotated[int, Field(description="Read from the source in this attempt.")] = 0
    bytes_merged: Annotated[
        int, Field(description="Made by mergers in this attempt; for a bucket, some may wait for their upload.")
    ] = 0
    tensors_done: int
    tensors_total: int
    files_done: int = 0
    files_total: int = 0
    bytes_per_s: int | None = None
    eta_s: float | None = None
    workers: dict[str, str] = Field(default_factory=dict)
    written: Annotated[
        dict[str, list[tuple[int, int]]],
        Field(description="Of the output files under way: byte ranges [start, stop) that are done."),
    ] = Field(default_factory=dict)


class JobError(BaseModel):
    """Why a job failed, and what to do about it. ``kind`` says who has to act."""

    kind: Literal["input", "destination", "resource", "internal", "timeout"]
    type: str
    message: str
    hint: str = ""
    file: str | None = None
    tensor: str | None = None
    expected: str | None = None
    found: str | None = None


class ResultFile(BaseModel):
    """A file of the finished model."""

    path: str
    size_bytes: int
    digest: str


class JobResult(BaseModel):
    """The finished model. ``digest`` stands for all its files."""

    location: str
    files: list[ResultFile]
    bytes: int
    bytes_read: int = 0
    seconds: float
    digest: str
    already_there: Annotated[bool, Field(description="This very model was there, and nothing was written.")] = False


class Job(BaseModel):
    """A job. Clients should expect further states to come."""

    model_config = ConfigDict(from_attributes=True)

    id: str
    state: State
    source: str
    destination: str
    options: Options
    labels: dict[str, str]
    priority: int
    owner: str = ""
    batch_id: str | None = None
    watch_id: str | None = None
    created_at: datetime
    updated_at: datetime
    state_times: dict[str, datetime]
    attempt: int
    progress: Progress | None = None
    error: JobError | None = None
    warnings: list[str] = Field(default_factory=list)
    result: JobResult | None = None
    links: dict[str, str] = Field(default_factory=dict)

    @property
    def is_terminal(self) -> bool:
        """Whether the job has ended."""
        return self.state in ("succeeded", "failed", "cancelled")


class JobPage(BaseModel):
    """Jobs from the newest on; ``next_cursor`` asks for the following page, None at the end."""

    items: list[Job]
    next_cursor: str | None = None


class Event(BaseModel):
    """Something that happened to a job; ``seq`` grows within the job, with gaps where old progress was dropped."""

    model_config = ConfigDict(from_attributes=True)

    job_id: str
    seq: int
    at: datetime
    type: str
    data: dict[str, Any]


class EventPage(BaseModel):
    """Events after a number; ask again with ``after=next_after``."""

    items: list[Event]
    next_after: int


class PlanAnswer(BaseModel):
    """What a conversion would do, or did: the plan's summary."""

    job_id: str | None = None
    plan: dict[str, Any]


class JobAttempt(BaseModel):
    """One try at a job; ``outcome`` is null while it runs."""

    model_config = ConfigDict(from_attributes=True)

    attempt: int
    started_at: datetime
    ended_at: datetime | None
    outcome: str | None
    error: JobError | None


class AttemptList(BaseModel):
    """All attempts at a job, the first one first."""

    items: list[JobAttempt]


class Shard(BaseModel):
    """An output file. ``state`` is done when it is finished at the destination; before the commit nobody sees it."""

    model_config = ConfigDict(from_attributes=True)

    position: int
    path: str
    size_bytes: int
    tensors: int
    state: Literal["pending", "done"]
    digest: str | None = None
    finished_at: datetime | None = None


class ShardPage(BaseModel):
    """Output files in the order of writing."""

    items: list[Shard]
    next_cursor: str | None = None


class Tensor(BaseModel):
    """A tensor of the result: where it lies, and which source tensors it is made of by which operation."""

    position: int
    name: str
    dtype: str
    shape: list[int]
    file: str
    offset: Annotated[int, Field(description="First byte in the file.")]
    size_bytes: int
    sources: list[str]
    operation: str
    state: Literal["pending", "done"]


class TensorPage(BaseModel):
    """Tensors in the order of writing."""

    items: list[Tensor]
    total: Annotated[int, Field(description="Tensors that fit the filter, on all pages.")]
    next_cursor: str | None = None
