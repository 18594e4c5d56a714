"""What goes over the wire. The options of a job are those of ``workers.options``, listed there alone."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, WithJsonSchema

from workers.options import ConvertOptions

State = Literal["queued", "planning", "running", "verifying", "cancelling", "succeeded", "failed", "cancelled"]
LABEL = r"^[A-Za-z0-9][A-Za-z0-9._/-]{0,62}$"
MOST_LABELS = 32


def _options_schema() -> dict[str, Any]:
    schema = TypeAdapter(ConvertOptions).json_schema()
    return {**schema, "title": "ConvertOptions", "additionalProperties": False}


Options = Annotated[dict[str, Any], WithJsonSchema(_options_schema())]
Address = Annotated[str, Field(min_length=1, max_length=4096, pattern=r"^[^\x00-\x1f\x7f]+$")]
LabelName = Annotated[str, Field(pattern=LABEL)]
LabelValue = Annotated[str, Field(max_length=255, pattern=r"^[^\x00-\x1f\x7f]*$")]


class _Request(BaseModel):
    model_config = ConfigDict(extra="forbid")


class JobRequest(_Request):
    """A conversion to be done."""

    source: Annotated[Address, Field(description="Absolute path or URL of the checkpoint.")]
    destination: Annotated[Address, Field(description="Absolute path or URL of the model folder to make.")]
    options: Options = Field(default_factory=dict)
    labels: Annotated[dict[LabelName, LabelValue], Field(max_length=MOST_LABELS)] = Field(default_factory=dict)
    priority: Annotated[int, Field(ge=-1000, le=1000, description="Higher goes first.")] = 0


class InspectRequest(_Request):
    """A checkpoint to be looked at."""

    source: Address
    options: Options = Field(default_factory=dict)
    tensor: Annotated[str, Field(max_length=1024)] | None = None


class Progress(BaseModel):
    """How far the weights are; sizes in bytes of output."""

    bytes_done: int
    bytes_total: int
    bytes_read: int = 0
    tensors_done: int
    tensors_total: int
    files_done: int = 0
    files_total: int = 0
    bytes_per_s: int | None = None
    eta_s: float | None = None
    workers: dict[str, str] = Field(default_factory=dict)


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


class FormatAnswer(BaseModel):
    """A checkpoint format that can be read."""

    name: str
    title: str
    signs: str


class Formats(BaseModel):
    """What can be read and written, and the options with their JSON Schema."""

    read: list[FormatAnswer]
    write: list[str]
    options: dict[str, Any]


class Workers(BaseModel):
    """The cluster and its workers."""

    state: str
    detail: str
    items: list[dict[str, Any]]


class Part(BaseModel):
    """A part of the service."""

    state: Literal["ok", "starting", "failed"]
    detail: str = ""


class Readiness(BaseModel):
    """Whether the service can do its work, and what is missing."""

    ready: bool
    parts: dict[str, Part]


class Fault(BaseModel):
    """One place of a request that is wrong: a JSON Pointer into the body, or a parameter's name."""

    detail: str
    pointer: str | None = None
    parameter: str | None = None


class ProblemDocument(BaseModel):
    """An error (RFC 9457). ``type`` is stable; ``hint`` says what to do."""

    model_config = ConfigDict(extra="allow")

    type: str
    title: str
    status: int
    detail: str
    hint: str = ""
    errors: list[Fault] = Field(default_factory=list)
