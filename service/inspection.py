"""What goes over the wire about checkpoints that are looked at and compared."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from service.schemas import Address, Options, Request

TensorName = Annotated[str, Field(max_length=1024)]


class InspectRequest(Request):
    """A checkpoint to be looked at."""

    source: Address
    options: Options = Field(default_factory=dict)
    tensor: Annotated[TensorName | None, Field(description="Tell where the pieces of this one lie.")] = None
    table: Annotated[bool, Field(description="List all tensors.")] = False
    partial: Annotated[
        bool,
        Field(description="Look into one of which something is missing, too, and say what, as far as its format can."),
    ] = False
    version: Annotated[
        str | None,
        Field(max_length=64, description="The version that was looked at before: what was read then may be used."),
    ] = None


class SourceFile(BaseModel):
    """A file that holds weights."""

    path: str
    size_bytes: int
    rank: int | None


class Box(BaseModel):
    """A part of a tensor: where it begins and how long it is in each dimension."""

    offsets: list[int]
    sizes: list[int]


class PieceAnswer(Box):
    """A box of a tensor and the bytes of the file that hold it; ``replica``: another piece holds the same."""

    rank: int | None
    file: str
    offset: int
    length: int
    replica: bool


class TensorAnswer(BaseModel):
    """A tensor of a source with its pieces, and the boxes that are in no piece or in several different ones."""

    name: str
    dtype: str
    shape: list[int]
    pieces: list[PieceAnswer]
    uncovered: list[Box]
    overlaps: list[Box]


class Kind(BaseModel):
    """What tensors are alike in."""

    dtype: str
    shape: list[int]
    size_bytes: int


class TensorFault(BaseModel):
    """A tensor whose pieces do not tile it."""

    tensor: Annotated[int, Field(description="Its place in names.")]
    elements: int
    missing_elements: int
    overlaps: bool


class TensorTable(BaseModel):
    """All tensors of a source in columns: names[i] is of the kind kinds[kind[i]] and lies in pieces[i] pieces."""

    names: list[str]
    kind: list[int]
    pieces: list[int]
    kinds: list[Kind]
    faults: list[TensorFault]


class InspectionFault(BaseModel):
    """What is wrong with a source, as the problem of its conversion would say it."""

    type: str
    message: str
    hint: str
    file: str | None = None
    tensor: str | None = None
    expected: str | None = None
    found: str | None = None


class Inspection(BaseModel):
    """What lies at a source."""

    url: str
    format: str
    evidence: list[str]
    layout: Annotated[dict[str, Any], Field(description="How training was laid out, as far as the format tells.")]
    fingerprint: str
    version: Annotated[str, Field(description="Changes when a file of the source does.")]
    files: list[SourceFile]
    file_bytes: int
    tensors: int
    pieces: int
    bytes: int
    dtypes: dict[str, int]
    model_type: str | None
    architectures: list[str] | None
    config: str | None
    replicas: int
    side_files: list[str]
    notes: list[str]
    missing: list[str]
    problems: Annotated[list[InspectionFault], Field(description="With partial: why it cannot be converted.")]
    tensor: TensorAnswer | None = None
    table: TensorTable | None = None


class CompareRequest(Request):
    """Two checkpoints or models to be compared, as Hugging Face would see them."""

    a: Address
    b: Address
    options_a: Options = Field(default_factory=dict)
    options_b: Options = Field(default_factory=dict)
    atol: Annotated[float, Field(ge=0, le=1e30, description="0: every bit; else how far values may be apart.")] = 0.0


class ComparedModel(BaseModel):
    """One side of a comparison, with the tensors that it makes."""

    url: str
    format: str
    version: str
    tensors: int
    bytes: int


class SpelledKind(BaseModel):
    """Type and shape."""

    dtype: str
    shape: list[int]


class OtherKind(BaseModel):
    """A tensor that both have, in other types or shapes."""

    tensor: str
    first: SpelledKind
    second: SpelledKind


class Difference(SpelledKind):
    """A tensor whose values differ; null stands for what is no number. ``index`` is the first place that differs."""

    tensor: str
    elements: int
    different_elements: int
    largest: float | None
    index: list[int]
    first: float | None
    second: float | None


class Comparison(BaseModel):
    """Which tensors differ and by how much. Lists tell at most 1000 each; the counts tell all."""

    equal: Annotated[
        bool | None, Field(description="Null: nothing differs in what was compared, which was not every value.")
    ]
    compared: Annotated[
        Literal["values", "part", "digests", "metadata"],
        Field(
            description="What was compared: all values, a part of them (the differences are those found so far), "
            "digests of manifests, or no values at all."
        ),
    ]
    reason: Annotated[str, Field(description="Why not all values were compared.")]
    checks: list[str]
    models: list[ComparedModel]
    tensors: Annotated[int, Field(description="Tensors that both have.")]
    bytes: int
    compared_bytes: int
    different_tensors: int
    differences: list[Difference]
    only_in_first: list[str]
    only_in_second: list[str]
    other_kinds: list[OtherKind]
