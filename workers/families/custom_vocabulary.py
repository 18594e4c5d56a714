"""The operations by the names that users write, with what each is told: ``{"op": "split", "dim": 0, "parts": 2}``.

A reader of an operation makes it from its object in the file and says what it does to columns and entries, so that a
rule which can't work is refused before any tensor is looked at. ``docs/mapping.md`` shows each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import get_args

from workers.families.custom_values import Value
from workers.families.operations import Concatenate, Operation, Split, Stack, Transpose, Unstack
from workers.families.rotary import HalvesToPairs, PairsToHalves
from workers.families.row_operations import (
    Deinterleave,
    Interleave,
    JoinGroups,
    JoinHeads,
    SplitGroups,
    SplitHeads,
)
from workers.families.size_operations import (
    REST,
    ExpectShape,
    JoinSizes,
    Pad,
    Shape,
    Size,
    SplitSizes,
    ToDtype,
    Trim,
    WithSizes,
)
from workers.options import FloatType

MOST_DIMENSIONS = 16
"""Dimensions of any tensor, and the number that a dimension is below."""

MOST_COLUMNS = 256
"""Tensors that one use of a rule joins or makes, without counting layers and experts."""

_HEAD_KEYS = ("num_attention_heads", "num_key_value_heads", "head_dim")
_QKV = 3


@dataclass(frozen=True, slots=True)
class Group:
    """What is known of tensors on their way through a rule, before any is seen."""

    columns: int
    counted: bool
    """Whether a column has an entry for each number of a layer or an expert, or just one."""


@dataclass(frozen=True, slots=True)
class Step:
    """An operation of a rule, and the tensors after it."""

    operation: Operation
    after: Group
    lossy: bool = False
    """That the way back does not bring everything back: what is gone, or what nothing tells."""


@dataclass(frozen=True, slots=True)
class _Kind:
    """An operation as users know it."""

    read: Callable[[Value, Group], Step]
    keys: tuple[str, ...] = ()
    required: tuple[str, ...] = ()


def read_operation(value: Value, before: Group) -> Step:
    """The operation that an object of the file describes; ``InvalidOption`` says what is wrong with it."""
    if not value.has("op"):
        raise value.fault(
            "an operation is an object with the key op",
            expected='an object such as {"op": "transpose", "dims": [0, 1]}',
            hint=f"The operations are: {', '.join(OPERATIONS)}.",
        )
    kind = OPERATIONS[value["op"].word(OPERATIONS)]
    value.object(("op", *kind.keys), kind.required)
    return kind.read(value, before)


def _dim(value: Value) -> int:
    return value["dim"].whole(0, MOST_DIMENSIONS - 1)


def _sizes(value: Value, *, least: int = 1) -> tuple[Size, ...]:
    return tuple(entry.size(least=least) for entry in value.items(MOST_COLUMNS, least=1))


def _shape(value: Value) -> tuple[Size, ...]:
    shape = tuple(entry.size(least=REST) for entry in value.items(MOST_DIMENSIONS))
    if 0 in shape:
        raise value.fault("a dimension can't be 0", expected=f"sizes from 1 on, or {REST}", found="0")
    return shape


def _one_rest(value: Value) -> tuple[Size, ...]:
    shape = _shape(value)
    if shape.count(REST) > 1:
        raise value.fault(
            f"only one dimension can be {REST}", expected=f"one {REST}", found=f"{shape.count(REST)} times {REST}"
        )
    return shape


def _needs(value: Value, before: Group, columns: int) -> None:
    if before.columns != columns:
        raise value.fault(
            f"{value['op'].content} works on {_tensors(columns)}, and there are {before.columns} at this place",
            expected=_tensors(columns),
            found=_tensors(before.columns),
            hint="Sources, or what earlier operations make of them, are what an operation works on.",
        )


def _tensors(count: int) -> str:
    return "one tensor" if count == 1 else f"{count} tensors"


def _split(value: Value, before: Group) -> Step:
    _needs(value, before, 1)
    if value.has("sizes") == value.has("parts"):
        raise value.fault("split is told either parts or sizes", expected="parts or sizes", found="both or neither")
    if value.has("sizes"):
        sizes = _sizes(value["sizes"])
        return Step(SplitSizes(_dim(value), sizes), Group(len(sizes), before.counted))
    parts = value["parts"].whole(2, MOST_COLUMNS)
    return Step(Split(_dim(value), parts), Group(parts, before.counted))


def _concatenate(value: Value, before: Group) -> Step:
    after = Group(1, before.counted)
    if not value.has("sizes"):
        return Step(Concatenate(_dim(value), before.columns), after)
    sizes = _sizes(value["sizes"])
    _needs(value, before, len(sizes))
    return Step(JoinSizes(_dim(value), sizes), after)


def _stack(value: Value, before: Group) -> Step:
    if not before.counted:
        raise value.fault(
            "there is nothing to stack: no placeholder of the sources counts tensors that the targets don't",
            expected="a placeholder {layer} or {expert} that only the sources have",
            found="none",
        )
    return Step(Stack(_dim(value)), Group(before.columns, counted=False))


def _unstack(value: Value, before: Group) -> Step:
    if before.counted:
        raise value.fault(
            "the tensors are one for each number already, and can't be counted by a second one",
            expected="a placeholder {layer} or {expert} that only the targets have",
            found="one that only the sources have",
        )
    return Step(Unstack(_dim(value)), Group(before.columns, counted=True))


def _transpose(value: Value, before: Group) -> Step:
    dims = [entry.whole(0, MOST_DIMENSIONS - 1) for entry in value["dims"].items(2, least=2)]
    if dims[0] == dims[1]:
        raise value["dims"].fault("the two are the same", expected="two different dimensions", found=str(dims))
    return Step(Transpose(min(dims), max(dims)), before)


def _reshape(value: Value, before: Group) -> Step:
    told = _one_rest(value["from"]) if value.has("from") else None
    return Step(Shape(_one_rest(value["shape"]), told), before, lossy=told is None)


def _expect(value: Value, before: Group) -> Step:
    return Step(ExpectShape(_shape(value["shape"])), before)


def _trim(value: Value, before: Group) -> Step:
    padded = value["from"].size() if value.has("from") else None
    return Step(Trim(_dim(value), value["size"].size(), padded), before, lossy=True)


def _pad(value: Value, before: Group) -> Step:
    unpadded = value["from"].size() if value.has("from") else None
    return Step(Pad(_dim(value), value["size"].size(), unpadded), before, lossy=unpadded is None)


def _cast(value: Value, before: Group) -> Step:
    return Step(ToDtype(value["dtype"].word(get_args(FloatType))), before, lossy=True)


def _blocks(operation: type[Interleave | Deinterleave]) -> _Kind:
    def read(value: Value, before: Group) -> Step:
        return Step(operation(_dim(value), value["parts"].whole(2)), before)

    return _Kind(read, ("dim", "parts"), ("dim", "parts"))


def _rotary(operation: type[PairsToHalves | HalvesToPairs]) -> _Kind:
    def read(value: Value, before: Group) -> Step:
        projection = "query" if value["projection"].word(("query", "key")) == "query" else "key"
        return Step(_told(value, operation(projection)), before)  # type: ignore[arg-type]

    return _Kind(read, ("projection", *_HEAD_KEYS), ("projection",))


def _heads(operation: Operation, *, joins: bool) -> _Kind:
    """An operation between one tensor and its queries, keys and values."""
    needed, made = (_QKV, 1) if joins else (1, _QKV)

    def read(value: Value, before: Group) -> Step:
        _needs(value, before, needed)
        return Step(_told(value, operation), Group(made, before.counted))

    return _Kind(read, _HEAD_KEYS)


def _told(value: Value, operation: Operation) -> Operation:
    """The operation with the heads that are written beside it, if any are."""
    sizes = tuple((key, value[key].size()) for key in _HEAD_KEYS if value.has(key))
    return WithSizes(operation, sizes) if sizes else operation


OPERATIONS: Mapping[str, _Kind] = {
    "split": _Kind(_split, ("dim", "parts", "sizes"), ("dim",)),
    "concatenate": _Kind(_concatenate, ("dim", "sizes"), ("dim",)),
    "stack": _Kind(_stack, ("dim",), ("dim",)),
    "unstack": _Kind(_unstack, ("dim",), ("dim",)),
    "transpose": _Kind(_transpose, ("dims",), ("dims",)),
    "reshape": _Kind(_reshape, ("shape", "from"), ("shape",)),
    "split_groups": _heads(SplitGroups(), joins=False),
    "join_groups": _heads(JoinGroups(), joins=True),
    "split_heads": _heads(SplitHeads(), joins=False),
    "join_heads": _heads(JoinHeads(), joins=True),
    "interleave": _blocks(Interleave),
    "deinterleave": _blocks(Deinterleave),
    "pairs_to_halves": _rotary(PairsToHalves),
    "halves_to_pairs": _rotary(HalvesToPairs),
    "trim": _Kind(_trim, ("dim", "size", "from"), ("dim", "size")),
    "pad": _Kind(_pad, ("dim", "size", "from"), ("dim", "size")),
    "cast": _Kind(_cast, ("dtype",), ("dtype",)),
    "expect": _Kind(_expect, ("shape",), ("shape",)),
}
"""By the names that users write."""
