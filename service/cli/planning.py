"""``unshard plan``, and the lines about a plan that ``convert`` shows, too."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from service.cli.output import count, emit_json, say, say_fields, say_table, shape_text, size
from workers.convert import plan
from workers.finished import is_made
from workers.options import MAPPING, ConvertOptions
from workers.plan import Plan

NAMES_SHOWN = 4


def run_plan(ends: tuple[str, str], options: ConvertOptions, *, tensors: bool, as_json: bool) -> int:
    """Plan a conversion from the first to the second of ``ends`` and print it."""
    made = plan(*ends, options)
    there = is_made(made, ends[1])
    if as_json:
        emit_json(made.summary() | {"already_there": there} | ({"table": list(made.table())} if tensors else {}))
        return 0
    _say_plan(made.summary(), *ends)
    if there:
        say()
        say(f"{ends[1]} holds this very model already: nothing would be done")
    if tensors:
        say()
        _say_tensors(made)
    return 0


def where_from(source: dict[str, Any]) -> str:
    """The source in a line: its format, ranks, family."""
    layout = source.get("layout", {})
    ranks = layout.get("world_size")
    parts = [source["format"], count(ranks, "rank") if ranks else "", source.get("family") or ""]
    return ", ".join(filter(None, parts))


def remarks(summary: dict[str, Any], warnings: Iterable[str] = ()) -> list[tuple[str, str]]:
    """What was dropped on purpose, the notes and the warnings."""
    reasons: dict[str, list[str]] = {}
    for dropped in summary["dropped"]:
        reasons.setdefault(dropped["reason"], []).append(dropped["name"])
    fields = [("dropped", f"{_some(names)}: {reason}") for reason, names in reasons.items()]
    fields += [("note", note) for note in dict.fromkeys(summary["notes"])]
    return fields + [("warning", warning) for warning in warnings]


def _some(names: list[str]) -> str:
    more = len(names) - NAMES_SHOWN
    return ", ".join(names[:NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _say_plan(summary: dict[str, Any], source: str, destination: str) -> None:
    cost = summary["cost"]
    parts, largest = count(summary["parts"], "part"), size(summary["largest_part_bytes"])
    say(f"Plan {summary['fingerprint']}")
    say_fields(
        [
            ("source", source),
            ("", where_from(summary["source"])),
            ("destination", destination),
            ("reads", f"{size(cost['bytes_read'])} in {count(cost['pieces_read'], 'piece')}"),
            ("writes", f"{count(summary['tensors'], 'tensor')}, {size(cost['bytes_written'])}"),
            ("parts", f"{parts}, the largest {largest}"),
            ("memory", f"{size(summary['memory_bytes'])} budget, {size(summary['worker_memory_bytes'])} for a worker"),
            ("options", _options(summary)),
            *remarks(summary),
        ]
    )
    say()
    rows = [(f["name"], size(f["size_bytes"]), f"{f['tensors']:,}", f"{f['parts']:,}") for f in summary["files"]]
    rows += [(name, "", "", "") for name in summary["small_files"]]
    say_table(("file", "size", "tensors", "parts"), rows, right=frozenset({1, 2, 3}))


def _options(summary: dict[str, Any]) -> str:
    """The options that were given; a mapping, which may be long, by its digest."""
    shown = dict(summary["options"])
    if MAPPING in shown:
        shown[MAPPING] = summary["mapping"]
    return ", ".join(f"{name}={value}" for name, value in shown.items()) or "defaults"


def _say_tensors(made: Plan) -> None:
    rows = (
        (
            row["name"],
            row["dtype"],
            shape_text(row["shape"]),
            size(row["size_bytes"]),
            row["file"],
            f"{row['operation']}: {_some(row['sources'])}",
        )
        for row in made.table()
    )
    say_table(("tensor", "dtype", "shape", "size", "file", "made by"), rows, right=frozenset({3}))
