"""The API's answers as types for programs that use the client: the JSON objects that the packages' ``schemas`` make.

``TypedDict``, so that an answer is what came over the wire, fields of newer services included.
"""

from __future__ import annotations

from typing import Any, TypedDict


class Progress(TypedDict):
    """How far the weights are; sizes in bytes of output."""

    bytes_done: int
    bytes_total: int
    bytes_read: int
    bytes_merged: int
    tensors_done: int
    tensors_total: int
    files_done: int
    files_total: int
    bytes_per_s: int | None
    eta_s: float | None
    workers: dict[str, str]
    written: dict[str, list[tuple[int, int]]]


class JobError(TypedDict):
    """Why a job failed, and what to do about it."""

    kind: str
    type: str
    message: str
    hint: str
    file: str | None
    tensor: str | None
    expected: str | None
    found: str | None


class ResultFile(TypedDict):
    """A file of the finished model."""

    path: str
    size_bytes: int
    digest: str


class JobResult(TypedDict):
    """The finished model."""

    location: str
    files: list[ResultFile]
    bytes: int
    bytes_read: int
    seconds: float
    digest: str
    already_there: bool


class Job(TypedDict):
    """A job. Times are ISO 8601 texts in UTC."""

    id: str
    state: str
    source: str
    destination: str
    options: dict[str, Any]
    labels: dict[str, str]
    priority: int
    owner: str
    batch_id: str | None
    watch_id: str | None
    created_at: str
    updated_at: str
    state_times: dict[str, str]
    attempt: int
    progress: Progress | None
    error: JobError | None
    warnings: list[str]
    result: JobResult | None
    links: dict[str, str]


class Event(TypedDict):
    """Something that happened to a job."""

    job_id: str
    seq: int
    at: str
    type: str
    data: dict[str, Any]


class Shard(TypedDict):
    """An output file of a job."""

    position: int
    path: str
    size_bytes: int
    tensors: int
    state: str
    digest: str | None
    finished_at: str | None


class Tensor(TypedDict):
    """A tensor of a job's result."""

    position: int
    name: str
    dtype: str
    shape: list[int]
    file: str
    offset: int
    size_bytes: int
    sources: list[str]
    operation: str
    state: str


class JobAttempt(TypedDict):
    """One try at a job."""

    attempt: int
    started_at: str
    ended_at: str | None
    outcome: str | None
    error: JobError | None


class BatchCounts(TypedDict):
    """Items of a batch by what became of them."""

    total: int
    queued: int
    running: int
    succeeded: int
    skipped: int
    failed: int
    cancelled: int
    refused: int


class Batch(TypedDict):
    """Many conversions that were handed in at once."""

    id: str
    name: str
    state: str
    owner: str
    labels: dict[str, str]
    counts: BatchCounts
    bytes_done: int
    bytes_total: int | None
    bytes_per_s: int | None
    eta_s: float | None
    on_item_error: str
    max_running: int | None
    if_done: str
    discover: dict[str, str] | None
    template: dict[str, Any]
    created_at: str
    updated_at: str
    ended_at: str | None
    links: dict[str, str]


class BatchItem(TypedDict):
    """What a batch asked for at one place, and its job."""

    position: int
    source: str
    destination: str
    job_id: str | None
    state: str | None
    already_there: bool
    error: JobError | None


class WatchCounts(TypedDict):
    """Folders that a watch has seen, by what became of them."""

    waiting: int
    submitted: int
    refused: int


class Watch(TypedDict):
    """A prefix that is looked at regularly."""

    id: str
    name: str
    state: str
    owner: str
    prefix: str
    pattern: str
    template: dict[str, Any]
    interval_s: float
    created_at: str
    updated_at: str
    last_look_at: str | None
    next_look_at: str
    error: JobError | None
    counts: WatchCounts
    links: dict[str, str]


class WatchItem(TypedDict):
    """A folder that a watch has seen."""

    source: str
    state: str
    job_id: str | None
    job_state: str | None
    error: JobError | None
    first_seen_at: str
    updated_at: str
