"""What each exception means to a user: its lines, its JSON document and the exit status."""

from __future__ import annotations

import os
from typing import Any

from workers.errors import Cancelled, UnshardError

INTERRUPTED = 130
RESOURCES = 3
INTERNAL = 70
MOST_PLACES = 20
"""Places of a request at fault that are told."""

RESUME = "interrupted; run the same command again to resume"


def exit_status(error: BaseException) -> int:
    """The exit status that a failure ends with."""
    if isinstance(error, UnshardError):
        return error.exit_status
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    return RESOURCES if isinstance(error, OSError | MemoryError) else INTERNAL


def unexpected(error: BaseException) -> bool:
    """Whether the failure is unshard's own fault."""
    return exit_status(error) == INTERNAL


def document(error: BaseException) -> dict[str, Any]:
    """The failure as JSON values, always with the same keys."""
    told = as_told(error)
    parts = {name: told.details().get(name) for name in ("file", "tensor", "expected", "found")}
    return {"error": {"code": told.code, "message": told.message, "hint": told.hint, **parts}}


def lines(error: BaseException) -> list[str]:
    """The failure in plain lines; what the message already says isn't said again."""
    told = as_told(error)
    if isinstance(told, Cancelled):
        return [told.message]
    said = [f"error: {told.message}", *_places(told)]
    said += [f"{name}: {value}" for name, value in told.details().items() if value not in told.message]
    if told.hint:
        said.append(f"hint: {told.hint}")
    return said


def _places(error: UnshardError) -> list[str]:
    """What a service found wrong at several places of a request, a line for each."""
    errors = getattr(error, "problem", {}).get("errors") or []
    told = [f"{fault.get('pointer', '')}: {fault.get('detail', '')}" for fault in errors]
    if len(told) < 2 and all(fault.get("detail", "") in error.message for fault in errors):
        return []
    more = [f"and {len(told) - MOST_PLACES} more"] if len(told) > MOST_PLACES else []
    return [f"  - {line}" for line in told[:MOST_PLACES] + more]


def as_told(error: BaseException) -> UnshardError:
    """Any failure as one of ours."""
    if isinstance(error, KeyboardInterrupt | Cancelled):
        return Cancelled(RESUME)
    if isinstance(error, UnshardError):
        return error
    if isinstance(error, MemoryError):
        return _Plain("resources", "there is not enough memory", hint="Give a smaller --memory, such as 512MiB.")
    if isinstance(error, OSError):
        return _system_error(error)
    return _own_fault(error)


class _Plain(UnshardError):
    """A failure that isn't an ``UnshardError`` by birth."""

    def __init__(self, code: str, message: str, *, hint: str = "", file: str | None = None) -> None:
        super().__init__(message, hint=hint, file=file)
        self.code = code


def _system_error(error: OSError) -> UnshardError:
    reason = (error.strerror or str(error) or type(error).__name__).lower()
    if error.filename is None:
        return _Plain("system", f"the system refused: {reason}")
    name = os.fsdecode(error.filename) if isinstance(error.filename, str | bytes) else str(error.filename)
    return _Plain("system", f"{name}: {reason}", file=name, hint="Check the path and its permissions.")


def _own_fault(error: BaseException) -> UnshardError:
    summary = str(error).partition("\n")[0]
    return _Plain(
        "internal",
        f"a fault of unshard itself: {type(error).__name__}{': ' if summary else ''}{summary}",
        hint="Set UNSHARD_DEBUG=1 and run the command again to see the traceback; please report it.",
    )
