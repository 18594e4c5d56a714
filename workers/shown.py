"""Values of a file in an error's words, cut short.

A pickle can make a list of two times the same list, and so on many levels deep: to write it down whole would take for
ever, as ``repr`` does even when only its beginning is wanted.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

_LONGEST = 120
_BRACKETS = ((list, "[", "]"), (tuple, "(", ")"), (set, "{", "}"), (frozenset, "frozenset({", "})"))


def shown(value: object, longest: int = _LONGEST) -> str:
    """The beginning of what ``repr`` gives, in time that grows with its length alone, whatever the value is."""
    # Each piece has a character or more, and each level begins with one: neither can go on for ever.
    return "".join(islice(_pieces(value, longest), longest))[:longest]


def _pieces(value: object, longest: int) -> Iterator[str]:
    if isinstance(value, dict):
        yield "{"
        for number, (key, held) in enumerate(value.items()):
            if number:
                yield ", "
            yield from _pieces(key, longest)
            yield ": "
            yield from _pieces(held, longest)
        yield "}"
    elif isinstance(value, (str, bytes, bytearray)):
        yield repr(value[:longest])
    else:
        brackets = next((marks for kind, *marks in _BRACKETS if isinstance(value, kind)), None)
        if brackets is None or hasattr(value, "_fields"):
            yield repr(value)  # a number, a record or a named tuple of such
        else:
            yield from _collection(value, brackets, longest)


def _collection(value: object, brackets: list[str], longest: int) -> Iterator[str]:
    assert isinstance(value, (list, tuple, set, frozenset))  # noqa: S101 - as _BRACKETS says
    yield brackets[0]
    for number, held in enumerate(value):
        if number:
            yield ", "
        yield from _pieces(held, longest)
    yield ",)" if isinstance(value, tuple) and len(value) == 1 else brackets[1]
