"""Every error that the API answers with, as one kind of document: an RFC 9457 problem with a hint.

Problem                      raised by our own code, by its name in PROBLEMS
UnshardError                 raised by workers; its code is the problem's name
Starlette's and FastAPI's    404, 405, 422 and the like, told in the same form
anything else                ``internal``: the log has it, the answer doesn't
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from functools import singledispatch
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from sqlalchemy.exc import SQLAlchemyError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from service.access.guard import NotAuthenticated
from service.access.rates import TooFast, TooManyStreams
from service.jobs.addresses import NotAllowed
from service.jobs.keys import KeyReused
from service.jobs.planning import TookTooLong
from service.jobs.store import BusyDestination, TooManyQueued, WrongState
from service.jobs.submit import BadOption
from service.room import Overloaded
from workers.errors import UnshardError

log = logging.getLogger(__name__)

PROBLEMS: dict[str, tuple[int, str]] = {
    "ambiguous-source": (422, "Several checkpoints could be meant"),
    "bad-request": (400, "The request cannot be read"),
    "cancelled": (409, "The work was stopped"),
    "corrupt-file": (422, "A file is damaged"),
    "destination": (422, "The destination cannot take the model"),
    "destination-busy": (409, "Something else writes to the destination"),
    "destination-not-allowed": (403, "The destination is not in a place that may be used"),
    "destination-not-empty": (409, "Something is at the destination already"),
    "duplicate-destination": (422, "Two checkpoints would become one model"),
    "forbidden": (403, "The token may not do this"),
    "foreign-origin": (403, "The request comes from another site"),
    "geometry-mismatch": (422, "Parts of the checkpoint contradict each other"),
    "idempotency-key-reuse": (422, "The idempotency key was used for another request"),
    "incomplete-checkpoint": (422, "Parts of the checkpoint are missing"),
    "input": (422, "The checkpoint or the options are at fault"),
    "insufficient-resources": (422, "Disk, memory or cluster are too small"),
    "internal": (500, "A fault of unshard itself"),
    "invalid-option": (422, "An option has an impossible value"),
    "invalid-state": (409, "This cannot be done in the state that it is in"),
    "method-not-allowed": (405, "This method is not for this path"),
    "not-acceptable": (406, "The answer has another form than the request takes"),
    "not-found": (404, "There is nothing of this name"),
    "no-step": (422, "A name holds no number"),
    "nothing-found": (422, "Nothing fits the pattern"),
    "payload-too-large": (413, "The request is too large"),
    "rate-limited": (429, "Too many requests"),
    "source-not-allowed": (403, "The source is not in a place that may be used"),
    "storage": (424, "Reading or writing files failed"),
    "timeout": (504, "Reading the source took too long"),
    "too-many-found": (422, "Too much fits the pattern"),
    "target-not-allowed": (403, "Webhooks may not be sent to this address"),
    "too-many-queued": (429, "Too many jobs wait already"),
    "too-many-streams": (429, "Too many streams are open already"),
    "too-many-watches": (409, "There are as many watches as may be"),
    "too-many-webhooks": (409, "There are as many webhooks as may be"),
    "unauthenticated": (401, "A token is needed"),
    "unavailable": (503, "A part of the service does not answer"),
    "unknown-format": (422, "No known checkpoint format"),
    "unknown-host": (403, "The service is not known under this name"),
    "unmapped-tensor": (422, "No rule says what becomes of a tensor"),
    "unsafe-pickle": (422, "A pickle is refused"),
    "validation": (422, "The request is not valid"),
    "unsupported-media-type": (415, "The body is not JSON"),
    "verification-failed": (422, "Models differ"),
}
PROBLEM_PATH = "/problems/"


class Problem(Exception):
    """An answer that isn't what was asked for. ``extra`` goes into the document as it is."""

    def __init__(self, name: str, detail: str, *, hint: str = "", **extra: Any) -> None:
        super().__init__(detail)
        self.name = name
        self.detail = detail
        self.hint = hint
        self.extra = extra


class ProblemResponse(JSONResponse):
    """A problem as it is sent, whatever it repeats of the request: half of a surrogate pair can't be UTF-8."""

    media_type = "application/problem+json"

    def render(self, content: Any) -> bytes:
        return json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "backslashreplace")


def answer(problem: Problem, headers: Mapping[str, str] | None = None) -> JSONResponse:
    """The response to a problem; one that has ``retry_after_s`` says so in the header for that, too."""
    status, title = PROBLEMS[problem.name]
    headers = dict(headers or {})
    if "retry_after_s" in problem.extra:
        headers.setdefault("Retry-After", str(problem.extra["retry_after_s"]))
    document = {
        "type": PROBLEM_PATH + problem.name,
        "title": title,
        "status": status,
        "detail": problem.detail,
        "hint": problem.hint,
        **problem.extra,
    }
    return ProblemResponse(document, status, headers=headers)


@singledispatch
def problem_of(_error: Exception) -> Problem:
    """The problem that stands for an error; of one that isn't ours nothing is told."""
    return Problem("internal", "an unexpected fault of unshard", hint="The service's log has the details.")


@problem_of.register
def _(error: Problem) -> Problem:
    return error


@problem_of.register
def _(error: UnshardError) -> Problem:
    name = error.code if error.code in PROBLEMS else "internal"
    return Problem(name, error.message, hint=error.hint, **error.details())


@problem_of.register
def _(error: NotAllowed) -> Problem:
    return Problem(f"{error.role}-not-allowed", str(error), hint=error.hint)


@problem_of.register
def _(error: BadOption) -> Problem:
    fault = {"pointer": pointer(error.place), "detail": str(error)}
    hint = error.hint or "GET /v1/formats lists the options and their values."
    return Problem("validation", str(error), hint=hint, errors=[fault])


@problem_of.register
def _(error: NotAuthenticated) -> Problem:
    return Problem("unauthenticated", str(error), hint=error.hint)


@problem_of.register
def _(error: TooFast) -> Problem:
    hint = "Wait as long as retry_after_s says, ask less often, or ask for a higher limit."
    return Problem("rate-limited", str(error), hint=hint, retry_after_s=math.ceil(error.wait_s))


@problem_of.register
def _(error: TooManyStreams) -> Problem:
    return Problem("too-many-streams", str(error), hint="Close some: one stream per page is enough.", retry_after_s=5)


@problem_of.register
def _(error: WrongState) -> Problem:
    return Problem(
        "invalid-state",
        str(error),
        hint=f"This is for jobs that are {' or '.join(error.allowed)}.",
        job_id=error.job.id,
        state=error.job.state,
        allowed=list(error.allowed),
    )


@problem_of.register
def _(error: BusyDestination) -> Problem:
    hint = "Wait for it, cancel it, or name another destination."
    return Problem("destination-busy", str(error), hint=hint, job_id=error.job_id)


@problem_of.register
def _(error: TooManyQueued) -> Problem:
    return Problem("too-many-queued", str(error), hint="Wait until some have started, or ask for a higher limit.")


@problem_of.register
def _(_error: KeyReused) -> Problem:
    return Problem(
        "idempotency-key-reuse",
        "this Idempotency-Key came with another request before",
        hint="Use a new key for a new request; a key is kept for 24 hours.",
    )


@problem_of.register
def _(error: TookTooLong) -> Problem:
    return Problem("timeout", str(error), hint=error.hint)


@problem_of.register
def _(error: Overloaded) -> Problem:
    return Problem("unavailable", str(error), hint="Try again in a moment.", retry_after_s=10)


@problem_of.register
def _(_error: SQLAlchemyError) -> Problem:
    return Problem("unavailable", "the job store does not answer", hint="Try again in a moment.", retry_after_s=2)


def pointer(path: tuple[int | str, ...]) -> str:
    """A JSON Pointer (RFC 6901)."""
    return "".join("/" + str(part).replace("~", "~0").replace("/", "~1") for part in path)


def _invalid(error: RequestValidationError) -> Problem:
    """FastAPI's own list of faults in our form; the refused values are not repeated, since one may be a secret."""
    faults = []
    for fault in error.errors():
        where, *path = fault["loc"]
        if fault["type"] == "json_invalid":
            return Problem("bad-request", "the body is not JSON", hint="Send a JSON object as application/json.")
        place = {"pointer": pointer(tuple(path))} if where == "body" else {"parameter": ".".join(map(str, path))}
        faults.append({"detail": fault["msg"], **place})
    first = faults[0]
    detail = f"{first.get('pointer') or first.get('parameter') or 'body'}: {first['detail']}"
    hint = "See errors for each place, and /v1/docs for what is expected."
    return Problem("validation", detail, hint=hint, errors=faults)


def _of_status(error: HTTPException) -> Problem:
    names = {status: name for name, (status, _) in PROBLEMS.items() if name in _GENERIC}
    name = names.get(error.status_code, "bad-request" if error.status_code < 500 else "internal")
    hints = {
        "bad-request": "Send a JSON object as application/json; see /v1/docs for what is expected.",
        "not-found": "The paths are listed at /v1/docs.",
        "method-not-allowed": "See /v1/docs.",
    }
    return Problem(name, str(error.detail), hint=hints.get(name, ""))


_GENERIC = {"bad-request", "not-found", "method-not-allowed", "payload-too-large", "unauthenticated"}


_EXPECTED: tuple[type[Exception], ...] = (
    Problem,
    UnshardError,
    NotAllowed,
    BadOption,
    WrongState,
    BusyDestination,
    KeyReused,
    TooManyQueued,
    TookTooLong,
    Overloaded,
    Exception,
)


def install(app: FastAPI) -> None:
    """Answer every error of an application with a problem."""

    async def expected(_: Request, error: Exception) -> JSONResponse:
        return answer(problem_of(error))

    async def unavailable(_: Request, error: Exception) -> JSONResponse:
        log.warning("the job store does not answer", exc_info=error)
        return answer(problem_of(error))

    async def invalid(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)  # noqa: S101 - registered for nothing else
        return answer(_invalid(error))

    async def of_status(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)  # noqa: S101 - registered for nothing else
        return answer(_of_status(error), error.headers)

    for kind in _EXPECTED:
        app.add_exception_handler(kind, expected)
    app.add_exception_handler(SQLAlchemyError, unavailable)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, of_status)
