"""Reading a user's document value by value: each fault says where in the file it is, as in ``rules[3].drop``."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from workers.errors import InvalidOption

LARGEST_NUMBER = 1 << 40
"""More than any dimension of a tensor."""

LONGEST_TEXT = 1024
"""More than any tensor's name."""

_KINDS: dict[type, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    list: "a list",
    dict: "an object",
    type(None): "nothing",
}


@dataclass(frozen=True, slots=True)
class Value:
    """A value of the document, the way to it, and the file for messages."""

    content: Any
    path: str
    file: str

    def fault(self, message: str, *, expected: str, hint: str = "", found: str | None = None) -> InvalidOption:
        """An error at this place."""
        where = f"{self.path}: " if self.path else ""
        return InvalidOption(
            f"{self.file}: {where}{message}",
            file=self.file,
            expected=expected,
            found=_kind(self.content) if found is None else found,
            hint=hint,
        )

    def has(self, key: str) -> bool:
        """Whether an object has a key."""
        return isinstance(self.content, dict) and key in self.content

    def __getitem__(self, key: str) -> Value:
        """The value of a key that is there; of one that is not, the way to where it should be."""
        return Value(self.content.get(key), f"{self.path}.{key}" if self.path else key, self.file)

    def object(self, known: Collection[str], required: Collection[str] = ()) -> Value:
        """This value, an object with no other keys than the ``known`` and with all that are ``required``."""
        self._expect(dict)
        for key in self.content:
            if key not in known:
                near = difflib.get_close_matches(str(key), known, n=1, cutoff=0.5)
                raise self[str(key)].fault(
                    "there is no such key here",
                    expected=", ".join(sorted(known)),
                    found=str(key)[:80],
                    hint=f"Perhaps {near[0]} is meant." if near else f"The keys are: {', '.join(sorted(known))}.",
                )
        for key in required:
            if key not in self.content:
                raise self.fault(f"the key {key} is missing", expected=key, found=", ".join(self.content) or "no key")
        return self

    def items(self, most: int, *, least: int = 0) -> Iterator[Value]:
        """The entries of a list of bounded length."""
        self._expect(list)
        if not least <= len(self.content) <= most:
            told = f"{least} to {most} entries"
            raise self.fault(f"has {len(self.content)} entries", expected=told, found=str(len(self.content)))
        for number, content in enumerate(self.content):
            yield Value(content, f"{self.path}[{number}]", self.file)

    def text(self) -> str:
        """A text of bounded length without control characters."""
        self._expect(str)
        text: str = self.content
        if not text or len(text) > LONGEST_TEXT or not text.isprintable():
            told = f"1 to {LONGEST_TEXT} printable characters"
            raise self.fault(f"{text[:40]!r} is no text for this", expected=told, found=f"{len(text)} characters")
        return text

    def word(self, allowed: Collection[str]) -> str:
        """One of a few words."""
        self._expect(str)
        if self.content not in allowed:
            listed = ", ".join(allowed)
            near = difflib.get_close_matches(self.content[:80], allowed, n=1, cutoff=0.5)
            raise self.fault(
                f"{self.content[:40]!r} is not one of: {listed}",
                expected=listed,
                found=self.content[:80],
                hint=f"Perhaps {near[0]} is meant." if near else "",
            )
        return str(self.content)

    def flag(self) -> bool:
        """True or false."""
        self._expect(bool)
        return bool(self.content)

    def whole(self, least: int, most: int = LARGEST_NUMBER) -> int:
        """A whole number within bounds, both included."""
        self._expect(int)
        if not least <= self.content <= most:
            told = f"a whole number from {least} to {most}"
            raise self.fault("this number is out of bounds", expected=told, found=str(self.content)[:40])
        return int(self.content)

    def size(self, *, least: int = 1) -> int | str:
        """A whole number, or the key of one in the config."""
        if isinstance(self.content, str):
            return self.text()
        if type(self.content) is not int:
            raise self.fault(
                f"expected a whole number or a key of config.json, found {_kind(self.content)}",
                expected="a whole number or a key of config.json",
            )
        return self.whole(least)

    def _expect(self, kind: type) -> None:
        if type(self.content) is not kind:
            raise self.fault(f"expected {_KINDS[kind]}, found {_kind(self.content)}", expected=_KINDS[kind])


def _kind(content: Any) -> str:
    return _KINDS.get(type(content), type(content).__name__)
