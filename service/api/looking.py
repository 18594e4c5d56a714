"""Look into checkpoints and compare them, without converting anything."""

from __future__ import annotations

import gzip
from typing import Any

from fastapi import APIRouter, Request, Response

from service import inspection as schemas
from service.api.context import PROBLEMS, Context, Here, Reader
from service.jobs.looking import Look
from service.jobs.planning import ComparingLimits
from service.jobs.submit import read_options
from workers.compare import SAME_DIGESTS, Compared
from workers.manifest import MANIFEST_NAME

router = APIRouter(tags=["checkpoints"], responses=PROBLEMS)

PACKED_FROM_BYTES = 1024
MOST_TOLD = 1000


@router.post("/v1/inspect", response_model=schemas.Inspection)
def inspect_source(body: schemas.InspectRequest, request: Request, here: Here, _: Reader) -> Response:
    """Say what lies at a source, from its metadata."""
    options = read_options(body.options)
    source = here.places.check_source(body.source, options)
    look = Look(body.tensor, partial=body.partial, table=body.table, version=body.version)
    content = here.planner.inspect(source, options, look)
    headers = {"Vary": "Accept-Encoding"}
    if len(content) >= PACKED_FROM_BYTES and "gzip" in request.headers.get("accept-encoding", ""):
        content, headers["Content-Encoding"] = gzip.compress(content, compresslevel=5, mtime=0), "gzip"
    return Response(content, media_type="application/json", headers=headers)


@router.post("/v1/compare")
def compare_checkpoints(request: schemas.CompareRequest, here: Here, _: Reader) -> schemas.Comparison:
    """Say which tensors of two checkpoints differ, and by how much."""
    a = _side(here, request.a, request.options_a, "options_a")
    b = _side(here, request.b, request.options_b, "options_b")
    limits = ComparingLimits(here.settings.compare_timeout_s, here.settings.compare_bytes)
    return _comparison(here.planner.compare(a, b, request.atol, limits), limits)


def _side(here: Context, source: str, options: dict[str, Any], place: str) -> Compared:
    read = read_options(options, (place,))
    return Compared(here.places.check_source(source, read), read)


def _comparison(report: dict[str, Any], limits: ComparingLimits) -> schemas.Comparison:
    whole, done = report["bytes"], report["compared_bytes"]
    by_digests = SAME_DIGESTS in report["checks"]
    compared = "values" if done == whole else "part" if done else "digests" if by_digests else "metadata"
    equal = report["equal"] if not report["equal"] or compared == "values" else None
    largest = max(model["bytes"] for model in report["models"])
    reason = ""
    if compared != "values" and largest > limits.most_bytes:
        reason = f"values are compared up to {limits.most_bytes} bytes (UNSHARD_COMPARE_BYTES); one has {largest}"
    elif compared != "values":
        reason = f"the time of a comparison was over after {limits.time_s:g} s (UNSHARD_COMPARE_TIMEOUT_S)"
    if compared == "digests":
        reason += f"; by their {MANIFEST_NAME} the weight files are the same, which unshard verify proves of each"
    names = ("differences", "only_in_first", "only_in_second", "other_kinds")
    return schemas.Comparison.model_validate(
        {
            **report,
            **{name: report[name][:MOST_TOLD] for name in names},
            "different_tensors": len(report["different_tensors"]),
            "equal": equal,
            "compared": compared,
            "reason": reason,
        }
    )
