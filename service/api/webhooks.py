"""``/v1/webhooks``: who is told what happens, and the log of it."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Response

from service.access.principals import Principal
from service.api.context import PROBLEMS, Context, Here, HookKeeper
from service.api.paging import cut, decoded
from service.errors import Problem, pointer
from service.ids import new_id
from service.schemas import PageQuery
from service.times import now
from service.webhooks import schemas
from service.webhooks.outbox import Happening, encoded
from service.webhooks.signing import Message
from service.webhooks.store import NewWebhook, Webhook
from service.webhooks.targets import BadTarget

router = APIRouter(prefix="/v1/webhooks", tags=["webhooks"], responses=PROBLEMS)


@router.post("", status_code=201)
def create_webhook(
    request: schemas.WebhookRequest, here: Here, caller: HookKeeper, response: Response
) -> schemas.WebhookWithSecret:
    """Be told what happens. The answer has the secret, this once."""
    if request.everyone and not caller.is_admin:
        hint = "Leave everyone out, and the webhook hears of your own jobs."
        detail = "only an administrator's webhook may hear of everybody's jobs"
        raise Problem("forbidden", detail, hint=hint, required_scope="admin")
    _check(here, request.url)
    made = here.hooks.store.create(NewWebhook(owner=caller.id, **request.model_dump()))
    response.headers["Location"] = f"/v1/webhooks/{made.id}"
    return _with_secret(made)


def _check(here: Context, url: str) -> None:
    try:
        with here.hooks.trial():  # a name server may take its time
            here.hooks.sender.check(url)
    except BadTarget as error:
        fault = {"pointer": pointer(("url",)), "detail": error.message}
        raise Problem("validation", error.message, hint=error.hint, errors=[fault]) from None


def _with_secret(webhook: Webhook) -> schemas.WebhookWithSecret:
    shown = schemas.WebhookAnswer.model_validate(webhook)
    return schemas.WebhookWithSecret(**shown.model_dump(), secret=webhook.secrets[0])


@router.get("")
def webhooks(here: Here, caller: HookKeeper, query: Annotated[PageQuery, Query()]) -> schemas.WebhookPage:
    """List webhooks, newest first."""
    found = here.hooks.store.page(caller.only_owner, query.limit + 1, decoded(query.cursor, "webhook"))
    items, following = cut(found, query.limit)
    return schemas.WebhookPage(
        items=[schemas.WebhookAnswer.model_validate(item) for item in items], next_cursor=following
    )


@router.get("/{webhook_id}")
def webhook(webhook_id: str, here: Here, caller: HookKeeper) -> schemas.WebhookAnswer:
    """Show one webhook."""
    return schemas.WebhookAnswer.model_validate(here.hooks.store.get(webhook_id, caller.only_owner))


@router.patch("/{webhook_id}")
def change_webhook(
    webhook_id: str, request: schemas.WebhookChange, here: Here, caller: HookKeeper
) -> schemas.WebhookAnswer:
    """Change a webhook, or make a disabled one active again: then it is sent what still waits."""
    here.hooks.store.get(webhook_id, caller.only_owner)
    if request.url is not None:
        _check(here, request.url)
    values = request.model_dump(exclude_none=True)
    changed = here.hooks.store.change(webhook_id, values, caller.only_owner)
    here.hooks.deliverer.wake()
    return schemas.WebhookAnswer.model_validate(changed)


@router.delete("/{webhook_id}", status_code=204)
def delete_webhook(webhook_id: str, here: Here, caller: HookKeeper) -> None:
    """Forget a webhook and its deliveries, sent or not."""
    here.hooks.store.delete(webhook_id, caller.only_owner)


@router.post("/{webhook_id}:rotate_secret")
def rotate_webhook_secret(webhook_id: str, here: Here, caller: HookKeeper) -> schemas.WebhookWithSecret:
    """Make a new secret. For a day each delivery has two signatures, so that receivers can change over."""
    return _with_secret(here.hooks.store.rotate_secret(webhook_id, caller.only_owner))


@router.post("/{webhook_id}:test")
def test_webhook(webhook_id: str, here: Here, caller: HookKeeper) -> schemas.DeliveryAnswer:
    """Send the event ``webhook.test`` now, also to a disabled webhook, and tell what came of it."""
    found = here.hooks.store.get(webhook_id, caller.only_owner)
    body = Happening(found.owner, "webhook.test", now(), {"webhook_id": found.id, "sent_by": caller.name}).body
    message = Message(new_id("delivery"), encoded(body))
    with here.hooks.trial():
        outcome = here.hooks.sender.send(found.url, message, list(found.secrets))
    return schemas.DeliveryAnswer.model_validate(here.hooks.store.record_test(found, message.id, body, outcome))


@router.get("/{webhook_id}/deliveries")
def deliveries(
    webhook_id: str, here: Here, caller: HookKeeper, query: Annotated[schemas.DeliveryQuery, Query()]
) -> schemas.DeliveryPage:
    """List what a webhook was told and is to be told, newest first; for 30 days."""
    found = _seen(here, caller, webhook_id)
    before = decoded(query.cursor, "delivery")
    listed = here.hooks.store.deliveries(found, tuple(query.state), query.limit + 1, before)
    items, following = cut(listed, query.limit)
    return schemas.DeliveryPage(
        items=[schemas.DeliveryAnswer.model_validate(item) for item in items], next_cursor=following
    )


@router.get("/{webhook_id}/deliveries/{delivery_id}")
def delivery(webhook_id: str, delivery_id: str, here: Here, caller: HookKeeper) -> schemas.DeliveryWithBody:
    """Show one delivery, with its body."""
    found = here.hooks.store.delivery(_seen(here, caller, webhook_id), delivery_id)
    return schemas.DeliveryWithBody.model_validate(found)


@router.post("/{webhook_id}/deliveries/{delivery_id}:redeliver", status_code=202)
def redeliver(webhook_id: str, delivery_id: str, here: Here, caller: HookKeeper) -> schemas.DeliveryAnswer:
    """Send a delivery again, under the same id."""
    again = here.hooks.store.redeliver(_seen(here, caller, webhook_id), delivery_id)
    here.hooks.deliverer.wake()
    return schemas.DeliveryAnswer.model_validate(again)


def _seen(here: Context, caller: Principal, webhook_id: str) -> Webhook:
    return here.hooks.store.get(webhook_id, caller.only_owner)
