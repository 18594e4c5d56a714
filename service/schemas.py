"""What goes over the wire everywhere: fields and lists that the parts share, and what the service tells of itself."""

from __future__ import annotations

import ast
import inspect
from datetime import UTC, datetime
from itertools import pairwise
from typing import Annotated, Any, Literal

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, TypeAdapter, WithJsonSchema

from workers.options import MAPPING, ConvertOptions

LABEL = r"^[A-Za-z0-9][A-Za-z0-9._/-]{0,62}$"
MOST_LABELS = 32
SEVERAL = "May be given several times."
DURATION = r"^[0-9]{1,4}(\.[0-9]{1,3})?s?$"
"""``30`` or ``30s``."""


def options_schema() -> dict[str, Any]:
    """Describe the options as they come over the wire."""
    schema = TypeAdapter(ConvertOptions).json_schema()
    schema["properties"][MAPPING]["anyOf"].append({"type": "object"})  # it may come as it is, and is kept as text
    for name, text in _option_texts().items():
        schema["properties"][name]["description"] = text
    return {**schema, "title": "ConvertOptions", "additionalProperties": False}


def _option_texts() -> dict[str, str]:
    """What the text below each option's declaration says of it."""
    [declared] = ast.parse(inspect.getsource(ConvertOptions)).body
    texts: dict[str, str] = {}
    for field, text in pairwise(getattr(declared, "body", ())):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
            texts[ast.unparse(field.target)] = inspect.cleandoc(str(text.value.value))
    return texts


Options = Annotated[dict[str, Any], WithJsonSchema(options_schema())]
Address = Annotated[str, Field(min_length=1, max_length=4096, pattern=r"^[^\x00-\x1f\x7f]+$")]
LabelName = Annotated[str, Field(pattern=LABEL)]
LabelValue = Annotated[str, Field(max_length=255, pattern=r"^[^\x00-\x1f\x7f]*$")]
Labels = Annotated[dict[LabelName, LabelValue], Field(max_length=MOST_LABELS)]
Priority = Annotated[int, Field(ge=-1000, le=1000, description="Higher goes first.")]


class Request(BaseModel):
    """What is asked for; a field that is not known is a mistake."""

    model_config = ConfigDict(extra="forbid")


Moment = Annotated[AwareDatetime, Field(ge=datetime(1970, 1, 2, tzinfo=UTC), lt=datetime(9000, 1, 1, tzinfo=UTC))]
LabelFilter = Annotated[str, Field(max_length=320, pattern=LABEL[:-1] + r":[^\x00-\x1f\x7f]*$")]
Prefix = Annotated[str, Field(max_length=4096, pattern=r"^[^\x00-\x1f\x7f]*$")]
Id = Annotated[str, Field(max_length=40, pattern=r"^[a-z]+_[0-9a-f]+$")]
Limit = Annotated[int, Field(ge=1, le=200)]
Cursor = Annotated[str, Field(max_length=200, description="next_cursor of the page before.")]


class PageQuery(Request):
    """Which part of a list."""

    limit: Limit = 50
    cursor: Cursor | None = None


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


class Node(BaseModel):
    """A machine of the cluster; resources as Ray counts them, memory in bytes."""

    id: str
    address: str
    total: dict[str, float]
    available: dict[str, float]
    object_store_bytes: int
    object_store_used_bytes: int


class Doing(BaseModel):
    """A piece of work at this moment; all null when it is for somebody else's job."""

    job_id: str | None = None
    attempt: str | None = None
    file: Annotated[str | None, Field(description="The output file.")] = None


class Worker(BaseModel):
    """An actor of the cluster."""

    name: str
    kind: Annotated[str, Field(description="merger or collector; others may come.")]
    node: Annotated[str, Field(description="The id of its node.")]
    pid: int
    doing: list[Doing]


class Workers(BaseModel):
    """The cluster, its nodes, and its workers with what each does."""

    state: str
    detail: str
    nodes: list[Node]
    items: list[Worker]


class Part(BaseModel):
    """A part of the service."""

    state: Literal["ok", "starting", "failed"]
    detail: str = ""


class ReadinessQuery(Request):
    """What to be ready for."""

    exclude: Annotated[
        list[Literal["database", "migrations", "ray"]],
        Field(
            max_length=3,
            description="Parts that may be missing: without ray the API answers, and jobs wait. May be given several "
            "times.",
        ),
    ] = []


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
