"""Answers to what makes something: 201 with its place, and once more the first answer when the request comes again."""

from __future__ import annotations

from typing import Annotated

from fastapi import Header
from starlette.responses import JSONResponse

from service.jobs.keys import Replay
from service.jobs.records import JsonObject

IdempotencyKey = Annotated[
    str | None,
    Header(alias="Idempotency-Key", min_length=1, max_length=255, description="Kept for 24 hours."),
]


def created(kind: str, made: JsonObject | Replay) -> JSONResponse:
    """The answer that tells of a new resource of ``/v1/KIND``, or of the one that the same key made before."""
    answer, headers = (made.answer, {"Idempotency-Replayed": "true"}) if isinstance(made, Replay) else (made, {})
    return JSONResponse(answer, 201, headers={"Location": f"/v1/{kind}/{answer['id']}", **headers})
