"""``unshard inspect`` and ``unshard formats``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from service.cli.output import count, emit_json, say, say_fields, say_table, shape_text, size
from workers.formats import known_formats
from workers.inspect import inspect
from workers.options import ConvertOptions

FILES_SHOWN = 16


def run_inspect(source: str, options: ConvertOptions, tensor: str | None, *, as_json: bool) -> int:
    """Print what the source is, or where one tensor of it lies."""
    found = inspect(source, options).to_dict(tensor)
    if as_json:
        emit_json(found)
    elif found["tensor"] is not None:
        _say_tensor(found["tensor"])
    else:
        _say_source(source, found)
    return 0


def run_formats(*, as_json: bool) -> int:
    """Print the formats that can be read."""
    known = known_formats()
    if as_json:
        emit_json([{"name": info.name, "title": info.title, "signs": info.signs} for info in known])
    else:
        say_table(("format", "what it is", "recognised by"), [(info.name, info.title, info.signs) for info in known])
    return 0


def _say_source(source: str, found: dict[str, Any]) -> None:
    say(f"{source} is a {found['format']} checkpoint")
    dtypes = ", ".join(f"{name} {size(size_bytes)}" for name, size_bytes in found["dtypes"].items())
    model = found.get("model_type")
    classes = ", ".join(found.get("architectures") or [])
    say_fields(
        [
            *(("evidence", line) for line in found["evidence"]),
            *((label.replace("_", " "), text) for label, text in _layout(found["layout"])),
            ("model", f"{model}{f' ({classes})' if classes else ''}" if model else "unknown: there is no config.json"),
            ("tensors", f"{count(found['tensors'], 'tensor')} in {count(found['pieces'], 'piece')}"),
            ("weights", f"{size(found['bytes'])}: {dtypes}"),
            ("files", f"{count(len(found['files']), 'file')}, {size(found['file_bytes'])}"),
            ("beside", ", ".join(found.get("side_files") or []) or "nothing"),
            *(("missing", line) for line in found["missing"]),
            *(("note", note) for note in found["notes"] if note not in found["evidence"]),
        ]
    )
    say()
    shown = found["files"][:FILES_SHOWN]
    rows = [("" if f["rank"] is None else str(f["rank"]), size(f["size_bytes"]), f["path"]) for f in shown]
    say_table(("rank", "size", "file"), rows, right=frozenset({0, 1}))
    if len(found["files"]) > len(shown):
        say(f"and {count(len(found['files']) - len(shown), 'more file')}")


def _layout(layout: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for label, value in layout.items():
        if isinstance(value, dict):
            yield label, ", ".join(f"{name} {number}" for name, number in value.items())
        elif isinstance(value, list):
            yield label, "; ".join(_mesh(entry) for entry in value) or "none"
        elif value is not None:
            yield label, str(value)


def _mesh(entry: Any) -> str:
    if isinstance(entry, dict):
        return " x ".join(f"{name} {extent}" for name, extent in entry.items())
    return str(entry)


def _say_tensor(tensor: dict[str, Any]) -> None:
    say(f"{tensor['name']}: {tensor['dtype']} {shape_text(tensor['shape'])}")
    rows = [
        (
            "" if piece["rank"] is None else str(piece["rank"]),
            _box(piece["offsets"], piece["sizes"]) + (" (replica)" if piece.get("replica") else ""),
            size(piece["length"]),
            str(piece["offset"]),
            piece["file"],
        )
        for piece in tensor["pieces"]
    ]
    say_table(("rank", "slice", "size", "at byte", "file"), rows, right=frozenset({0, 2, 3}))


def _box(offsets: list[int], sizes: list[int]) -> str:
    ranges = (f"{start}:{start + length}" for start, length in zip(offsets, sizes, strict=True))
    return f"[{', '.join(ranges)}]"
