"""``/v1/tokens``: who may use the service, and for what."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Response

from service.access import schemas
from service.access.tokens import KIND, NewToken
from service.api.context import PROBLEMS, Administrator, Anyone, Here
from service.api.paging import cut, decoded
from service.batches.bulk import cancel_of
from service.errors import Problem, pointer
from service.schemas import PageQuery
from service.times import now

router = APIRouter(prefix="/v1/tokens", tags=["tokens"], responses=PROBLEMS)


@router.post("", status_code=201)
def create_token(
    request: schemas.TokenRequest, here: Here, caller: Administrator, response: Response
) -> schemas.TokenWithSecret:
    """Make a token. The answer has its text, this once."""
    _require_future(request)
    limits = request.model_dump(include={"name", "max_running", "max_queued", "requests_per_minute"})
    scopes = tuple(dict.fromkeys(request.scopes))
    made, text = here.guard.tokens.create(
        NewToken(scopes=scopes, created_by=caller.id, expires_at=request.end, **limits)
    )
    response.headers["Location"] = f"/v1/tokens/{made.id}"
    return schemas.TokenWithSecret(**schemas.Token.model_validate(made).model_dump(), token=text)


@router.get("")
def tokens(here: Here, _: Administrator, query: Annotated[PageQuery, Query()]) -> schemas.TokenPage:
    """List tokens, newest first, revoked ones included."""
    found = here.guard.tokens.page(query.limit + 1, decoded(query.cursor, KIND))
    items, following = cut(found, query.limit)
    return schemas.TokenPage(items=[schemas.Token.model_validate(token) for token in items], next_cursor=following)


@router.get("/self")
def own_token(here: Here, caller: Anyone) -> schemas.Caller:
    """Tell a caller whom the service takes it for, and what it may do."""
    is_kept = caller.id.startswith(f"{KIND}_")
    return schemas.Caller(
        id=caller.id,
        name=caller.name,
        scopes=sorted(caller.scopes),
        max_running=caller.max_running,
        max_queued=caller.max_queued,
        requests_per_minute=here.guard.requests_per_minute(caller),
        max_streams=here.settings.max_streams,
        expires_at=here.guard.tokens.get(caller.id).expires_at if is_kept else None,
    )


@router.get("/{token_id}")
def token(token_id: str, here: Here, _: Administrator) -> schemas.Token:
    """Show a token; its secret is kept nowhere."""
    return schemas.Token.model_validate(here.guard.tokens.get(token_id))


@router.patch("/{token_id}")
def change_token(
    token_id: str,
    request: schemas.TokenChange,
    here: Here,
    _: Administrator,
) -> schemas.Token:
    """Give a token another name, end or limits. Its scopes stay as they are."""
    _require_future(request)
    changed = here.guard.tokens.change(token_id, request.values)
    here.guard.keyring.empty()
    return schemas.Token.model_validate(changed)


@router.delete("/{token_id}")
def revoke_token(
    token_id: str, here: Here, _: Administrator, query: Annotated[schemas.RevokeQuery, Query()]
) -> schemas.Token:
    """End a token for good: at once here, within seconds in other replicas. It stays in the list.

    Its watches and webhooks end with it; its jobs go on, unless they are to be cancelled.
    """
    revoked = here.guard.tokens.revoke(token_id)
    here.guard.keyring.empty()
    if query.cancel_jobs:
        cancel_of(here.database, token_id)
        here.runner.wake()
    return schemas.Token.model_validate(revoked)


def _require_future(request: schemas.TokenRequest | schemas.TokenChange) -> None:
    end = request.expires_at
    if end is not None and end <= now():
        fault = {"pointer": pointer(("expires_at",)), "detail": "this time has passed"}
        hint = "Name a time to come, or use DELETE to end a token now."
        raise Problem("validation", "/expires_at: this time has passed", hint=hint, errors=[fault])
