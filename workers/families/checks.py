"""Compare tensors with what config and options say of them in number: layers, experts, a value model's head."""

from __future__ import annotations

from collections.abc import Iterable

from workers.errors import GeometryMismatch
from workers.families.operations import Facts
from workers.families.rules import Count, Entry, Pattern


def check_value_model(entries: Iterable[Entry], *, asked: bool) -> None:
    """Refuse to call a model with a head for tokens a value model."""
    head = next((expression for name, expression in entries if name == "lm_head.weight"), None)
    if asked and head is not None and head.shape[:1] != (1,):
        raise GeometryMismatch(
            f"the option value_model says true, but lm_head.weight has {head.shape[0]} rows: it is a head for tokens",
            tensor="lm_head.weight",
            expected="a head of one row",
            found=str(list(head.shape)),
            hint="Leave the option out, or name the critic's checkpoint with the option role.",
        )


def check_counts(names: Iterable[str], counts: Iterable[Count], facts: Facts) -> None:
    """Raise ``GeometryMismatch`` where layers, experts or the like are not as many as the config says."""
    names = list(names)
    for count in counts:
        key = next((key for key in count.keys if key in facts.sizes), None)
        if key is not None:
            _check_count(names, count, (key, facts.sizes[key]), facts)


def _check_count(names: Iterable[str], count: Count, told: tuple[str, int], facts: Facts) -> None:
    pattern = Pattern(count.pattern, facts)
    found: dict[tuple[str, ...], set[int]] = {}
    for values in filter(None, map(pattern.match, names)):
        number = int(values.pop(count.placeholder))
        values.pop("rest", None)
        found.setdefault(tuple(values.values()), set()).add(number)
    key, size = told
    for owner, numbers in found.items():
        if numbers == set(range(size)):
            continue
        where = f"{count.what} in layer {', '.join(owner)}" if owner else count.what
        absent = sorted(set(range(size)) - numbers)
        which = f"; number {absent[0]} is the first that is missing" if absent else ""
        raise GeometryMismatch(
            f"config.json says that {key} is {size}, but the checkpoint holds {len(numbers)} {where}{which}",
            file="config.json",
            expected=f"{key} = {size}",
            found=str(len(numbers)),
            hint="The config belongs to another model, or a part of the checkpoint is missing; option config_dir "
            "names another config.",
        )
