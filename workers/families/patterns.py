"""Regular expressions that a checkpoint brings along, for the names of its tensors.

Matching some takes a time that doubles with each letter of a name. Only those are used that cannot take so long.
"""

from __future__ import annotations

import re

MOST_REPETITIONS = 3
"""The time to match grows with this power of the name's length."""
LONGEST_NAME = 512
"""No module of a model has a longer name."""

_ESCAPES = re.compile(r"\\.|\[[^\]]*\]")
_ENDLESS = re.compile(r"\)[*+?{]|\(\?")


def compiled(text: str, *, groups: int = 0, repetitions: int = MOST_REPETITIONS) -> re.Pattern[str] | None:
    """The expression, if it is one and has no more than so many groups, none repeated, and so many repetitions."""
    plain = _ESCAPES.sub("", text)
    fine = len(text) <= LONGEST_NAME and plain.count("(") <= groups and not _ENDLESS.search(plain)
    if not fine or len(re.findall(r"[*+{]", plain)) > repetitions:
        return None
    try:
        return re.compile(text)
    except re.error:
        return None
