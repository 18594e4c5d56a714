"""Compare two models with each other.

Comparing is a plan whose parts are compared instead of written: the same blocks, the same readers.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from workers.arithmetic import NumpyArithmetic
from workers.dtypes import ELEMENT_TYPES
from workers.merge import Block, SourceReader, blocks_of
from workers.plan import Plan
from workers.storage import open_folder
from workers.verify import Report

MOST_DIFFERENCES = 20
"""Differences that a report tells in words."""
THREADS = 2


@dataclass(frozen=True, slots=True)
class _Difference:
    target: int
    elements: int
    largest: float
    first: int
    """Row-major position of the first differing element."""
    first_values: tuple[float, float]


@dataclass(frozen=True, slots=True)
class CompareLimits:
    """How much a comparison of values may take; what does not fit is left out, and the report says so."""

    most_bytes: int | None = None
    """Of either model's weights. None: any."""
    until: float | None = None
    """A moment of ``time.monotonic``."""

    def admit(self, *plans: Plan) -> bool:
        """Whether the models are small enough."""
        return self.most_bytes is None or all(plan.bytes_total <= self.most_bytes for plan in plans)

    @property
    def is_over(self) -> bool:
        return self.until is not None and time.monotonic() > self.until


def compare_plans(a: Plan, b: Plan, *, atol: float = 0.0, limits: CompareLimits = CompareLimits()) -> Report:
    """Compare what two sources make of themselves: names, dtypes, shapes and every element.

    ``atol`` 0 means the same bits; otherwise floating-point elements may differ by that much.
    """
    structure = _structure(a, b)
    problems = list(_structural_problems(structure))
    numbers_b = {(target.folder, target.name): number for number, target in enumerate(b.targets)}
    shared = {
        number: numbers_b[key]
        for number, target in enumerate(a.targets)
        if (key := (target.folder, target.name)) in numbers_b and _kind(a, number) == _kind(b, numbers_b[key])
    }
    whole = sum(_bytes(a, number) for number in shared)
    differences, compared = _compare_values(a, b, shared, (atol, limits)) if limits.admit(a, b) else ([], 0)
    problems += [_difference_text(a, difference) for difference in differences[:MOST_DIFFERENCES]]
    if len(differences) > MOST_DIFFERENCES:
        problems.append(f"… and {len(differences) - MOST_DIFFERENCES} more tensors differ")
    return Report(
        problems=tuple(problems),
        tensors=len(shared),
        bytes=whole,
        checks=("names, dtypes and shapes", *_value_checks(whole, compared, atol)),
        details={
            "different_tensors": [a.targets[difference.target].name for difference in differences],
            "differences": [_difference_values(a, difference) for difference in differences],
            "compared_bytes": compared,
            **structure,
        },
    )


def _value_checks(whole: int, compared: int, atol: float) -> Iterator[str]:
    how = "every bit" if atol == 0 else f"values within {atol:g}"
    if compared == whole:
        yield how
    elif compared:
        yield f"{how} of {compared} of {whole} bytes"


def _kind(plan: Plan, number: int) -> tuple[str, tuple[int, ...]]:
    return plan.targets[number].expression.dtype, plan.targets[number].expression.shape


def _bytes(plan: Plan, number: int) -> int:
    dtype, shape = _kind(plan, number)
    return ELEMENT_TYPES[dtype].size_bytes * prod(shape)


def _structure(a: Plan, b: Plan) -> dict[str, list[Any]]:
    """Names that only one has, and tensors of other types or shapes."""
    kinds = [{_full_name(plan, n): _kind(plan, n) for n in range(len(plan.targets))} for plan in (a, b)]
    both = sorted(kinds[0].keys() & kinds[1].keys())
    return {
        "only_in_first": sorted(kinds[0].keys() - kinds[1].keys()),
        "only_in_second": sorted(kinds[1].keys() - kinds[0].keys()),
        "other_kinds": [
            {
                "tensor": name,
                **{label: _spelled(kind[name]) for label, kind in zip(("first", "second"), kinds, strict=True)},
            }
            for name in both
            if kinds[0][name] != kinds[1][name]
        ],
    }


def _spelled(kind: tuple[str, tuple[int, ...]]) -> dict[str, Any]:
    return {"dtype": kind[0], "shape": list(kind[1])}


def _structural_problems(structure: dict[str, list[Any]]) -> Iterator[str]:
    for missing, label in ((structure["only_in_first"], "second"), (structure["only_in_second"], "first")):
        if missing:
            more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
            yield f"the {label} model lacks {len(missing)} tensors: {', '.join(missing[:5])}{more}"
    for other in structure["other_kinds"]:
        first, second = (f"{kind['dtype']} {kind['shape']}" for kind in (other["first"], other["second"]))
        yield f"tensor {other['tensor']}: {first} in the first, {second} in the second"


def _full_name(plan: Plan, number: int) -> str:
    target = plan.targets[number]
    return f"{target.folder}:{target.name}" if target.folder else target.name


def _compare_values(
    a: Plan, b: Plan, shared: dict[int, int], how: tuple[float, CompareLimits]
) -> tuple[list[_Difference], int]:
    """The tensors that differ by more than a tolerance, and how many bytes were compared within the limits."""
    atol, limits = how
    found: dict[int, _Difference] = {}
    compared = 0
    lock = threading.Lock()
    folders = [open_folder(plan.checkpoint.address) for plan in (a, b)]
    of_thread = threading.local()

    def readers() -> list[tuple[Plan, SourceReader]]:
        """Each thread's own: they keep the compressed storage that was read last."""
        if not hasattr(of_thread, "readers"):
            of_thread.readers = [
                (plan, SourceReader(plan.checkpoint, folder, NumpyArithmetic()))
                for plan, folder in zip((a, b), folders, strict=True)
            ]
        mine: list[tuple[Plan, SourceReader]] = of_thread.readers
        return mine

    def compare(part: int) -> None:
        nonlocal compared
        for block in blocks_of(a.recipe, part):
            if block.target not in shared:
                continue
            if limits.is_over:
                return
            difference = _compare_block(readers(), block, shared, atol)
            with lock:
                compared += ELEMENT_TYPES[_kind(a, block.target)[0]].size_bytes * prod(block.sizes)
                if difference is not None:
                    found[block.target] = _merged(found.get(block.target), difference)

    try:
        with ThreadPoolExecutor(THREADS) as pool:
            for _ in pool.map(compare, range(len(a.layout.parts))):
                pass
    finally:
        for folder in folders:
            folder.close()
    return [found[number] for number in sorted(found)], compared


def _compare_block(
    readers: Sequence[tuple[Plan, SourceReader]], block: Block, shared: dict[int, int], atol: float
) -> _Difference | None:
    values = []
    for (plan, reader), target in zip(readers, (block.target, shared[block.target]), strict=True):
        expression = plan.targets[target].expression
        out = np.empty(block.sizes, dtype=ELEMENT_TYPES[expression.dtype].numpy_type)
        expression.fill(out, block.offsets, reader)
        reader.checksums.clear()
        values.append(out.reshape(-1))
    unequal = values[0] != values[1]
    if not unequal.any():
        return None
    dtype, shape = _kind(readers[0][0], block.target)
    numbers = [_as_numbers(value[unequal], dtype) for value in values]
    with np.errstate(invalid="ignore"):
        distance = np.abs(numbers[0] - numbers[1])
    beyond = np.ones(distance.shape, dtype=bool) if atol == 0 else ~(distance <= atol)
    if not beyond.any():
        return None
    first = int(np.flatnonzero(unequal)[np.flatnonzero(beyond)[0]])
    start = int(np.ravel_multi_index(block.offsets, shape)) if shape else 0
    position = int(np.flatnonzero(beyond)[0])
    return _Difference(
        target=block.target,
        elements=int(beyond.sum()),
        largest=float(np.nanmax(distance)) if not np.isnan(distance).all() else float("nan"),
        first=start + first,
        first_values=(float(numbers[0][position]), float(numbers[1][position])),
    )


def _as_numbers(elements: np.ndarray[Any, Any], dtype: str) -> np.ndarray[Any, np.dtype[np.float64]]:
    if dtype == "F64":
        return elements.view(np.float64)
    if dtype in ("F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"):
        return NumpyArithmetic().as_float32(elements, dtype).astype(np.float64)
    if dtype.startswith("I"):
        return elements.view(np.dtype(f"i{elements.itemsize}")).astype(np.float64)
    return elements.astype(np.float64)


def _merged(before: _Difference | None, new: _Difference) -> _Difference:
    if before is None:
        return new
    earliest = min(before, new, key=lambda difference: difference.first)
    return _Difference(
        target=new.target,
        elements=before.elements + new.elements,
        largest=max(before.largest, new.largest),
        first=earliest.first,
        first_values=earliest.first_values,
    )


def _index(plan: Plan, difference: _Difference) -> list[int]:
    _, shape = _kind(plan, difference.target)
    return list(map(int, np.unravel_index(difference.first, shape))) if shape else []


def _difference_values(plan: Plan, difference: _Difference) -> dict[str, Any]:
    """A difference as JSON values; None stands for what is no number."""
    dtype, shape = _kind(plan, difference.target)
    numbers = (difference.largest, *difference.first_values)
    largest, first, second = (number if math.isfinite(number) else None for number in numbers)
    return {
        "tensor": _full_name(plan, difference.target),
        **_spelled((dtype, shape)),
        "elements": prod(shape),
        "different_elements": difference.elements,
        "largest": largest,
        "index": _index(plan, difference),
        "first": first,
        "second": second,
    }


def _difference_text(plan: Plan, difference: _Difference) -> str:
    _, shape = _kind(plan, difference.target)
    index = _index(plan, difference)
    a, b = difference.first_values
    return (
        f"tensor {_full_name(plan, difference.target)}: {difference.elements} of {prod(shape)} elements differ, "
        f"by up to {difference.largest:g}; first at {index}: {a:g} and {b:g}"
    )
