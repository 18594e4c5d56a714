"""Why an actor was lost, in one line: Ray tells it in a page or two, with the reason somewhere in between."""

from __future__ import annotations

MEMORY_HINT = (
    "Give the nodes more memory, run fewer workers on each (UNSHARD_MERGERS, or more UNSHARD_MERGER_CPUS for each) or "
    "lower what parts may take with the option memory (--memory)."
)

_SHORT = "low on memory"
"""How Ray's own monitor begins to tell that it ended workers; the system's tells nobody anything."""

_SILENT = "unexpectedly exits with a connection error"
_SILENT_REASON = (
    "its process ended without a word, as when the system kills it because memory is short (SIGKILL), or in a crash"
)
_LONGEST = 300


def reason_of(error: BaseException) -> str:
    """Why an actor was lost."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    for line in lines:
        if _SHORT in line:
            return line[:_LONGEST]
    if any(_SILENT in line for line in lines):
        return _SILENT_REASON
    told = [line for line in lines if line.startswith(("The actor is dead because", "The actor died because"))]
    return next(iter((*told, *lines)), type(error).__name__)[:_LONGEST]


def is_short_of_memory(error: BaseException) -> bool:
    """Whether an actor was ended because memory ran out, or so that nobody can tell."""
    return _SHORT in str(error) or _SILENT in str(error)
