"""What a job's error looks like to its user: who has to act, what is wrong, what to do."""

from __future__ import annotations

from service.jobs.addresses import NotAllowed
from service.jobs.planning import TookTooLong, UnexpectedFault
from service.jobs.records import JsonObject
from workers.errors import DestinationError, InputError, InsufficientResources, UnshardError, VerificationFailed

KINDS = ("input", "destination", "resource", "internal", "timeout")


def describe(error: BaseException) -> JsonObject:
    """The error as JSON. Of an unexpected one only its class is told: its text may hold anything, secrets included."""
    if isinstance(error, UnshardError):
        return {
            "kind": _kind(error),
            "type": error.code,
            "message": error.message,
            "hint": error.hint,
            **error.details(),
        }
    if isinstance(error, NotAllowed):
        kind = "input" if error.role != "destination" else "destination"
        return {"kind": kind, "type": f"{error.role}-not-allowed", "message": str(error), "hint": error.hint}
    if isinstance(error, TookTooLong):
        return {"kind": "timeout", "type": "timeout", "message": str(error), "hint": error.hint}
    name = error.name if isinstance(error, UnexpectedFault) else type(error).__name__
    return {
        "kind": "internal",
        "type": "internal",
        "message": f"an unexpected fault of unshard: {name}",
        "hint": "The service's log has the details under this job's id.",
    }


def timed_out(limit_s: float) -> JsonObject:
    """The error of a job that ran longer than it may."""
    return {
        "kind": "timeout",
        "type": "timeout",
        "message": f"the job did not end within {limit_s:g} s",
        "hint": "Retry it, finished files are kept; or raise UNSHARD_JOB_TIMEOUT_S.",
    }


def _kind(error: UnshardError) -> str:
    if isinstance(error, InputError | VerificationFailed):
        return "input"
    if isinstance(error, InsufficientResources):
        return "resource"
    return "destination" if isinstance(error, DestinationError) else "internal"
