"""What isn't a job: formats, workers, health, metrics, and what a problem's type means."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any, get_args

from fastapi import APIRouter, Query, Response

from service import schemas
from service.api.context import PROBLEMS, Context, Here, Reader
from service.db.database import newest_revision
from service.errors import PROBLEM_PATH, Problem
from service.errors import PROBLEMS as PROBLEM_NAMES
from workers.formats import known_formats
from workers.options import TargetFormat

router = APIRouter(tags=["service"], responses=PROBLEMS)


@router.get("/v1/formats")
def formats(_: Reader) -> schemas.Formats:
    """List what can be read and written."""
    return schemas.Formats(
        read=[schemas.FormatAnswer(**asdict(known)) for known in known_formats()],
        write=list(get_args(TargetFormat)),
        options=schemas.options_schema(),
    )


@router.get("/v1/workers")
def workers(here: Here, caller: Reader) -> schemas.Workers:
    """Show the cluster and what each worker does. That one works for somebody else is told, but not at what."""
    state, detail = here.conversions.state()
    told = schemas.Workers.model_validate({"state": state, "detail": detail, **here.conversions.describe()})
    if caller.only_owner is None:
        return told
    doing = {work.job_id for worker in told.items for work in worker.doing if work.job_id is not None}
    own = here.store.owned(sorted(doing), caller.only_owner)
    for worker in told.items:
        worker.doing = [work if work.job_id in own else schemas.Doing() for work in worker.doing]
    return told


@router.get("/healthz", include_in_schema=False)
async def healthz() -> dict[str, str]:
    """Say that the process answers."""
    return {"status": "ok"}


@router.get("/readyz", responses={503: {"model": schemas.Readiness}})
def readyz(here: Here, response: Response, query: Annotated[schemas.ReadinessQuery, Query()]) -> schemas.Readiness:
    """Say whether jobs can be done, and which part is missing."""
    parts = _parts(here)
    ready = all(part.state == "ok" for name, part in parts.items() if name not in query.exclude)
    response.status_code = 200 if ready else 503
    return schemas.Readiness(ready=ready, parts=parts)


def _parts(here: Context) -> dict[str, schemas.Part]:
    fault = here.database.problem()
    found, wanted = here.database.revision(), newest_revision()
    ray, detail = here.conversions.state()
    migrations = "" if found == wanted else f"the schema is at {found}, this version works with {wanted}"
    return {
        "database": schemas.Part(state="failed" if fault else "ok", detail=fault or ""),
        "migrations": schemas.Part(state="failed" if migrations else "ok", detail=migrations),
        "ray": schemas.Part.model_validate({"state": ray, "detail": detail}),
    }


@router.get("/metrics", include_in_schema=False)
def metrics(here: Here) -> Response:
    """Tell Prometheus."""
    return Response(here.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")


@router.get(PROBLEM_PATH + "{name}", include_in_schema=False)
def problem(name: str) -> dict[str, Any]:
    """Say what a problem's type means."""
    if name not in PROBLEM_NAMES:
        raise Problem("not-found", f"there is no problem of the type {name}", hint=", ".join(PROBLEM_NAMES))
    status, title = PROBLEM_NAMES[name]
    return {"type": PROBLEM_PATH + name, "title": title, "status": status}
