"""What lies in the dicts of an unpickled state dict: its values one by one, and which of them hold weights.

Dicts of a pickle can hold themselves, or each other so often that they never come to an end; both are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from workers.errors import CorruptFile, GeometryMismatch
from workers.formats._nf4_records import KIND as NF4
from workers.pickles import DType, Record, TensorRecord
from workers.shown import shown

DEEPEST = 32
"""Levels of dicts that are looked into; Megatron-DeepSpeed has five."""
MOST_REPEATED = 250_000
"""Values that may be met again in dicts and lists that stand in several places."""

_NO_PLAIN_TENSORS = {
    "_rebuild_sparse_tensor": "a sparse tensor",
    "_rebuild_nested_tensor": "a nested tensor",
    "_rebuild_qtensor": "a tensor quantised by torch",
    "_rebuild_meta_tensor_no_storage": "a meta tensor, which has no values",
    "_rebuild_device_tensor_from_numpy": "a tensor of a device that torch saves through numpy",
    "_rebuild_device_tensor_from_cpu_tensor": "a tensor of a device that torch saves through the CPU",
    "DTensor": "a rank's part of a distributed tensor",
    "ShardedTensor": "a rank's part of a sharded tensor",
    NF4: "a tensor of torchao in 4 bits",
}
"""Kinds of records that hold weights, but not as plain tensors."""

_QUANTIZED = "torchao."
"""Where the classes of tensors come from that torchao quantised; there is one for each of its methods."""

Keys = tuple[Any, ...]


def leaves(root: dict[Any, Any], file: str, opens: Callable[[Any, Any], bool]) -> Iterator[tuple[Keys, Any]]:
    """The values below a dict in their order, each with its keys.

    ``opens(key, value)`` says whether a dict or list is looked into instead; places in a list are its keys. Raises
    ``CorruptFile`` for dicts that are nested more than ``DEEPEST`` deep, and for more than ``MOST_REPEATED`` values in
    dicts that stand in several places.
    """
    met: set[int] = set()
    repeated = 0
    open_now: list[tuple[Keys, Iterator[tuple[Any, Any]]]] = [((), _entries(root))]
    while open_now:
        above, entries = open_now[-1]
        for key, value in entries:
            if not opens(key, value):
                yield (*above, key), value
                continue
            repeated += len(value) if id(value) in met else 0
            if len(open_now) > DEEPEST or repeated > MOST_REPEATED:
                raise _without_end((*above, key), file)
            met.add(id(value))
            open_now.append(((*above, key), _entries(value)))
            break
        else:
            open_now.pop()


def _entries(value: Any) -> Iterator[tuple[Any, Any]]:
    return iter(value.items() if isinstance(value, dict) else enumerate(value))


def _without_end(keys: Iterable[Any], file: str) -> CorruptFile:
    return CorruptFile(
        f"{file}: its dicts are nested more than {DEEPEST} deep, or hold each other again and again, at "
        f"{'.'.join(key[:40] if type(key) is str else shown(key, 40) for key in list(keys)[:4])}",
        file=file,
        expected="a state dict",
        found="dicts in dicts",
        hint="The file is damaged or no state dict; fetch it again from where it was saved.",
    )


def other_weights(value: Any) -> str | None:
    """What a value that holds weights otherwise than as a plain tensor is, in words; None for all others."""
    if not isinstance(value, Record):
        return None
    kind = type(value).kind
    if kind in _NO_PLAIN_TENSORS:
        return _NO_PLAIN_TENSORS[kind]
    if kind.startswith(_QUANTIZED):
        return f"a tensor quantised by torchao ({kind})"
    # As ``_rebuild_from_type_v2`` makes them: of a plain tensor, or of the class itself and a dtype.
    first, second, *_ = (*value.args, None, None)
    is_tensor = isinstance(first, TensorRecord) or (first is type(value) and isinstance(second, DType))
    return f"a tensor of the class {type(value).origin}" if is_tensor else None


def no_plain_tensor(file: str, name: str, what: str) -> GeometryMismatch:
    """The error for a weight that is no plain tensor but ``what``."""
    return GeometryMismatch(
        f"{file}: {name} is {what}, not a plain tensor",
        file=file,
        tensor=name,
        expected="a plain tensor",
        found=what,
        hint="Load the file with torch, turn the tensor into a plain one on the CPU, and save it again.",
    )
