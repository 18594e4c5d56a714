"""Text for people and JSON for programs: plain, unwrapped, with nothing in it that a terminal would act on."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TextIO

from workers.errors import StorageError

_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")
_BOLD, _RED, _GREEN, _DIM, _RESET = "\x1b[1m", "\x1b[31m", "\x1b[32m", "\x1b[2m", "\x1b[0m"
STYLES = {"error": _BOLD + _RED, "hint": _BOLD, "good": _GREEN, "dim": _DIM, "title": _BOLD}


def say(line: str = "", *, to: TextIO | None = None) -> None:
    """Write one line; a stream whose encoding lacks a character gets an escape for it."""
    stream = to or sys.stdout
    text = clean(line)
    encoding = stream.encoding or "utf-8"
    text = text.encode(encoding, "backslashreplace").decode(encoding)
    prefix, colon, rest = text.partition(":")
    if colon and prefix in STYLES and has_colour(stream):
        text = f"{STYLES[prefix]}{prefix}:{_RESET}{rest}"
    _write(stream, text + "\n")


def flush() -> None:
    """See that all was written. Raises ``OutputLost`` when the output takes no more."""
    with _told_as_lost(sys.stdout):
        sys.stdout.flush()


class OutputLost(StorageError):
    """The output takes nothing: a full disk, say."""


def _write(stream: TextIO, text: str) -> None:
    with _told_as_lost(stream):
        stream.write(text)


@contextmanager
def _told_as_lost(stream: TextIO) -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        forget(stream)
        raise OutputLost(
            f"the output could not be written: {error.strerror}",
            hint="What the command does is done, and only what it had to say is lost.",
        ) from None


def forget(stream: TextIO) -> None:
    """Keep the interpreter from complaining, at its end, about what can't be written any more."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def styled(text: str, style: str, stream: TextIO | None = None) -> str:
    """The text in a style where the stream shows colours; what came from outside must be cleaned before."""
    return f"{STYLES[style]}{text}{_RESET}" if has_colour(stream or sys.stdout) else text


def emit_json(value: Any) -> None:
    """Write one JSON document to stdout."""
    _write(sys.stdout, json.dumps(value, indent=1, default=str) + "\n")


def has_colour(stream: TextIO) -> bool:
    """Whether colours are wanted: on a terminal that can, unless NO_COLOR says otherwise."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def clean(text: str) -> str:
    """Escape control characters: names out of a checkpoint must not move a terminal's cursor."""
    return "".join(c if c.isprintable() or c == "\n" else f"\\x{ord(c):02x}" for c in text)


def size(size_bytes: float) -> str:
    """A size for people, in decimal units as Hugging Face has them: ``4.98 GB``."""
    value, unit = float(size_bytes), 0
    while value >= 999.5 and unit < len(_UNITS) - 1:
        value, unit = value / 1000, unit + 1
    return f"{value:.0f} B" if unit == 0 else f"{value:.3g} {_UNITS[unit]}"


def count(number: int, noun: str) -> str:
    """``1 file``, ``2 files``."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def duration(seconds: float) -> str:
    """``0.42 s``, ``3 min 20 s``."""
    if seconds < 60:
        return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def shape_text(shape: Iterable[int]) -> str:
    """``[4096, 11008]``."""
    return f"[{', '.join(map(str, shape))}]"


def say_fields(fields: Iterable[tuple[str, str]]) -> None:
    """Lines of a label and a value; a repeated label is left out, as below it belongs what follows."""
    rows = list(fields)
    width = max((len(label) for label, _ in rows), default=0)
    before = None
    for label, value in rows:
        shown = "" if label == before else label
        say(f"  {shown:<{width}}  {value}")
        before = label


def say_table(heads: Sequence[str], rows: Iterable[Sequence[str]], *, right: frozenset[int] = frozenset()) -> None:
    """A plain table, columns as wide as their widest cell; ``right`` are the columns that hold numbers."""
    body = [[clean(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(heads, *body, strict=True)]
    for row in (list(heads), *body):
        cells = [
            cell.rjust(width) if number in right else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        say("  ".join(cells).rstrip())
