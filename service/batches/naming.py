"""Names: which folders a pattern means, what is known of one that was found, and where its model goes.

A pattern is read segment by segment: ``*``, ``?`` and ``[a-z]`` stand for parts of one name, never for a ``/``, and
never for the dot that hides a name. A template for destinations is text with the fields in ``FIELDS``.
"""

from __future__ import annotations

import fnmatch
import re
import string
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from workers.errors import InputError, InvalidOption
from workers.storage import check_path

MOST_SEGMENTS = 8
FIELDS = {
    "name": "the folder that the pattern's last wildcard found, such as global_step_100",
    "step": "the number in that name, without leading zeros",
    "path": "where that folder lies below the prefix, such as run-a/global_step_100",
    "flat": "the same with - for each /",
    "run": "the folder that holds it, such as run-a",
}
_WILD = re.compile(r"[*?\[]")
_STEP = re.compile(r"(?:step|steps|iter|iteration|epoch|checkpoint|ckpt)[-_=.]?0*(\d+)", re.IGNORECASE)
_NUMBER = re.compile(r"\d+")
_PARTS = re.compile(r"(\d+)")


class NoStep(InputError):
    """A template asks for the step, and the folder's name holds no number."""

    code = "no-step"


@dataclass(frozen=True, slots=True)
class Pattern:
    """Which folders below a prefix are meant; ``named`` is the segment that gives them their name."""

    segments: tuple[str, ...]
    named: int

    @classmethod
    def parse(cls, text: str) -> Pattern:
        """Read a pattern; ``InvalidOption`` says what is wrong with it."""
        hint = "Write names joined by '/', such as global_step_* or run-*/global_step_*/actor."
        try:
            segments = tuple(check_path(text).split("/"))
        except InvalidOption as error:
            raise InvalidOption(f"{text!r} is not a pattern: {error.message}", hint=hint) from None
        wild = [number for number, segment in enumerate(segments) if is_wild(segment)]
        if not wild:
            raise InvalidOption(f"the pattern {text!r} has no *, ? or [...]", hint=hint)
        if len(segments) > MOST_SEGMENTS:
            raise InvalidOption(f"the pattern {text!r} is deeper than {MOST_SEGMENTS} folders", hint=hint)
        if any("**" in segment for segment in segments):
            raise InvalidOption(f"the pattern {text!r} has **, which isn't known here", hint=hint)
        return cls(segments, wild[-1])


def is_wild(segment: str) -> bool:
    """Whether a segment of a pattern stands for more than itself."""
    return _WILD.search(segment) is not None


def fits(segment: str, name: str) -> bool:
    """Whether a name is one that a segment stands for; case counts."""
    if name.startswith(".") and not segment.startswith("."):
        return False
    return fnmatch.fnmatchcase(name, segment)


def natural(path: str) -> tuple[tuple[int, int, str], ...]:
    """A key that sorts step 9 before step 10."""
    return tuple((0, int(part), "") if part.isdecimal() else (1, 0, part) for part in _PARTS.split(path) if part)


@dataclass(frozen=True, slots=True)
class Found:
    """A folder that may hold a checkpoint: its address, and the segments from the prefix to the one that names it.

    ``above`` is the last segment of the prefix, for a folder right below it.
    """

    source: str
    segments: tuple[str, ...]
    above: str = ""

    @classmethod
    def named(cls, source: str) -> Found:
        """A folder that somebody named, without a prefix."""
        segments = source.rstrip("/").split("/")
        return cls(source, (segments[-1],), segments[-2] if len(segments) > 1 else "")

    def field(self, name: str) -> str:
        """The value of a template's field; ``NoStep`` when there is none."""
        match name:
            case "name":
                return self.segments[-1]
            case "path":
                return "/".join(self.segments)
            case "flat":
                return "-".join(self.segments)
            case "run":
                return self.segments[-2] if len(self.segments) > 1 else self.above
            case _:
                return self._step()

    def _step(self) -> str:
        name = self.segments[-1]
        # The number behind the word, if there is one: the 7 of qwen2-step-7-fp8.
        found = _STEP.findall(name) or _NUMBER.findall(name)
        if not found:
            raise NoStep(
                f"{{step}} stands for the number in a folder's name, and {name!r} has none",
                hint="Use {name} in the template, or a pattern that only finds names with a number.",
            )
        return str(int(found[-1]))


@dataclass(frozen=True, slots=True)
class Template:
    """Where models go: literal text and fields in turn."""

    text: str
    parts: tuple[tuple[str, str | None], ...]

    @classmethod
    @lru_cache(maxsize=256)
    def parse(cls, text: str) -> Template:
        """Read a template; ``InvalidOption`` says what is wrong with it."""
        hint = "Fields: " + "; ".join(f"{{{name}}}: {what}" for name, what in FIELDS.items()) + "."
        parts: list[tuple[str, str | None]] = []
        try:
            for literal, name, form, conversion in string.Formatter().parse(text):
                if name is not None and (name not in FIELDS or form or conversion):
                    shown = name + (f"!{conversion}" if conversion else "") + (f":{form}" if form else "")
                    raise InvalidOption(f"the template {text!r} has the unknown field {{{shown}}}", hint=hint)
                parts.append((literal, name))
        except ValueError:
            raise InvalidOption(f"the braces of the template {text!r} do not fit together", hint=hint) from None
        return cls(text, tuple(parts))

    @property
    def fields(self) -> Sequence[str]:
        """The fields that it uses."""
        return [name for _, name in self.parts if name is not None]

    def require_distinct(self) -> None:
        """Refuse a template that sends every checkpoint of a run to the same place."""
        if not {"name", "step", "path", "flat"} & set(self.fields):
            raise self._same()

    def require_any(self) -> None:
        """Refuse a template without a field, which sends all of several checkpoints to the same place."""
        if not self.fields:
            raise self._same()

    def _same(self) -> InvalidOption:
        return InvalidOption(
            f"the template {self.text!r} gives every checkpoint the same destination",
            hint="Use {name}, {step}, {path} or {flat} in it.",
        )

    def destination(self, found: Found) -> str:
        """The destination of what was found; ``NoStep`` when its name holds no number that is asked for."""
        return "".join(literal + (found.field(name) if name else "") for literal, name in self.parts)
