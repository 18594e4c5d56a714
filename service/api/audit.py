"""``/v1/audit``: who changed what. There is no way to change or remove a row."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query

from service.access import schemas
from service.access.audit import KIND, AuditFilter
from service.api.context import PROBLEMS, Administrator, Here
from service.api.paging import cut, decoded

router = APIRouter(prefix="/v1/audit", tags=["audit"], responses=PROBLEMS)


@router.get("")
def audit(
    here: Here,
    _: Administrator,
    query: Annotated[schemas.AuditQuery, Query()],
) -> schemas.AuditPage:
    """List changes and refused tokens, newest first."""
    wanted = AuditFilter(**query.model_dump(exclude={"limit", "cursor"}))
    found = here.guard.audit.page(wanted, query.limit + 1, decoded(query.cursor, KIND))
    items, following = cut(found, query.limit)
    return schemas.AuditPage(items=[schemas.AuditEntry.model_validate(row) for row in items], next_cursor=following)
