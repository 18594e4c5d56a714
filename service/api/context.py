"""What routes work with, found on the application."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import Depends, Request, Security
from fastapi.security import SecurityScopes

from service.access.guard import Guard
from service.access.principals import LOCAL, Principal
from service.batches.keeper import Keeper
from service.batches.store import BatchStore
from service.db.database import Database
from service.errors import Problem
from service.jobs import schemas
from service.jobs.addresses import Places
from service.jobs.changes import Changes
from service.jobs.cluster import Conversions
from service.jobs.parts import JobParts
from service.jobs.planning import Planner
from service.jobs.retention import Janitor
from service.jobs.runner import Runner
from service.jobs.store import JobStore
from service.metrics import Metrics
from service.settings import Settings
from service.watches.store import WatchStore
from service.watches.watcher import Watcher
from service.webhooks.hooks import Hooks


@dataclass(frozen=True, slots=True)
class Context:
    """The parts of a running service."""

    settings: Settings
    database: Database
    guard: Guard
    store: JobStore
    parts: JobParts
    places: Places
    planner: Planner
    janitor: Janitor
    conversions: Conversions
    runner: Runner
    metrics: Metrics
    hooks: Hooks
    changes: Changes
    batches: BatchStore
    keeper: Keeper
    watches: WatchStore
    watcher: Watcher


def _context(request: Request) -> Context:
    context: Context = request.app.state.context
    return context


def _caller(request: Request, needed: SecurityScopes) -> Principal:
    """Whose request it is, as the gate found out; a problem when it may not do this."""
    caller: Principal = request.scope.get("principal", LOCAL)
    for scope in needed.scopes:
        if not caller.may(scope):
            hint = "Use a token with this scope; GET /v1/tokens/self tells what a token may do."
            raise Problem("forbidden", f"the token lacks the scope {scope}", hint=hint, required_scope=scope)
    return caller


Here = Annotated[Context, Depends(_context)]
Reader = Annotated[Principal, Security(_caller, scopes=["jobs:read"])]
Writer = Annotated[Principal, Security(_caller, scopes=["jobs:write"])]
BatchWriter = Annotated[Principal, Security(_caller, scopes=["batches:write"])]
HookKeeper = Annotated[Principal, Security(_caller, scopes=["webhooks"])]
Administrator = Annotated[Principal, Security(_caller, scopes=["admin"])]
Anyone = Annotated[Principal, Security(_caller, scopes=[])]
PROBLEMS: dict[int | str, dict[str, Any]] = {
    "4XX": {
        "description": "A problem of the request",
        "content": {"application/problem+json": {"schema": {"$ref": "#/components/schemas/ProblemDocument"}}},
    },
    "5XX": {
        "description": "A problem of the service",
        "content": {"application/problem+json": {"schema": {"$ref": "#/components/schemas/ProblemDocument"}}},
    },
}


def job_answer(job: object) -> schemas.Job:
    """A job as it is answered, with the ways to more of it."""
    told = schemas.Job.model_validate(job)
    here = f"/v1/jobs/{told.id}"
    links = {"self": here}
    links |= {part: f"{here}/{part}" for part in ("events", "plan", "tensors", "shards", "attempts")}
    if not told.is_terminal:
        links["cancel"] = f"{here}:cancel"
    elif told.state == "succeeded":
        links["report"] = f"{here}/report"
    else:
        links["retry"] = f"{here}:retry"
    if told.batch_id is not None:
        links["batch"] = f"/v1/batches/{told.batch_id}"
    return told.model_copy(update={"links": links})


def spelled_job(job: object) -> str:
    """The same as JSON."""
    return job_answer(job).model_dump_json()
