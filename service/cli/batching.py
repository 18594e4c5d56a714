"""``unshard batch`` and ``unshard watch``: many conversions by a running service."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

from service.calls import ApiError, Call, Patience, path_of
from service.cli.output import count, duration, emit_json, say, say_fields, say_table, size
from service.cli.progress import Bar
from service.cli.remote import EXIT_STATUSES, INTERRUPTED, NOT_DONE, Endpoint, placed, placed_options
from service.client import Client, JsonObject, Unreachable

ENDED = frozenset({"completed", "cancelled"})
POLL_S = 0.5
MOST_SHOWN = 50
"""Rows of a table for people; ``--json`` has all."""

BATCH_VERBS = {"cancel": "cancel", "retry": "retry_failed"}


def run_batch(endpoint: Endpoint, request: JsonObject, *, wait: bool, as_json: bool, dry_run: bool = False) -> int:
    """Hand in a batch, as ``POST /v1/batches`` takes it; local paths may be relative.

    With ``wait`` the status is 0 only if every item has succeeded or was skipped; with ``dry_run`` nothing is handed
    in, and it is 0 only if no item is refused.
    """
    with endpoint.client() as client:
        if dry_run:
            return _preview(client.create("batches", _absolute(request), dry_run="true"), as_json=as_json)
        batch = client.create("batches", _absolute(request))
        if not wait:
            return _submitted(batch, as_json=as_json)
        try:
            batch = _follow(client, batch, visible=sys.stderr.isatty() and not as_json)
        except KeyboardInterrupt:
            say(f"batch {batch['id']} goes on; cancel it to stop it", to=sys.stderr)
            return INTERRUPTED
        return _ended(client, batch, as_json=as_json)


def run_batches(endpoint: Endpoint, batch: str | None, *, action: str | None = None, as_json: bool) -> int:
    """Print the latest batches, or one; ``action`` is ``cancel`` or ``retry`` and comes first."""
    with endpoint.client() as client:
        if batch is None:
            found = client.get("/v1/batches")["items"]
            _say(found, _say_batches, as_json=as_json)
            return 0
        path = path_of("batches", batch)
        if action is not None:
            client.do(path, BATCH_VERBS[action])
        told = client.get(path)
        items = client.pages(Call("GET", f"{path}/items", {"limit": 200}))
        if as_json:
            emit_json({**told, "items": list(items)})
        else:
            _say_batch(told, items)
    return 0


def run_watch(endpoint: Endpoint, request: JsonObject, *, as_json: bool) -> int:
    """Start a watch, as ``POST /v1/watches`` takes it; local paths may be relative."""
    with endpoint.client() as client:
        watch = client.create("watches", _absolute(request))
    _say(watch, _say_watch, as_json=as_json)
    return 0


def run_watches(endpoint: Endpoint, watch: str | None, *, action: str | None = None, as_json: bool) -> int:
    """Print the latest watches, or one with what it has seen.

    ``action`` is ``pause``, ``resume``, ``look`` or ``delete`` and comes first.
    """
    with endpoint.client() as client:
        if watch is None:
            _say(client.get("/v1/watches")["items"], _say_watches, as_json=as_json)
            return 0
        path = path_of("watches", watch)
        if action == "delete":
            client.send(Call("DELETE", path))
            _say({"id": watch, "deleted": True}, lambda _: say(f"watch {watch} is deleted"), as_json=as_json)
            return 0
        if action == "look":
            client.do(path, "look")
        elif action is not None:
            client.send(Call("PATCH", path, body={"state": "paused" if action == "pause" else "active"}))
        told = client.get(path)
        items = list(client.pages(Call("GET", f"{path}/items", {"limit": 200})))
    if as_json:
        emit_json({**told, "items": items})
    else:
        _say_watch(told)
        _say_items(("folder", "state", "why"), [(item["source"], _watched(item), _why(item)) for item in items])
    return 0


def _absolute(request: JsonObject) -> JsonObject:
    """The request as the service must be told it: it looks for paths from another folder than this process."""
    told = dict(request)
    if told.get("items") is not None:
        told["items"] = [_with_options(placed(item, "source", "destination")) for item in told["items"]]
    if told.get("discover") is not None:
        told["discover"] = placed(told["discover"], "prefix")
    if told.get("template") is not None:
        told["template"] = _with_options(placed(told["template"], "destination"))
    return placed(told, "prefix")


def _with_options(values: JsonObject) -> JsonObject:
    options = values.get("options")
    return {**values, "options": placed_options(options)} if isinstance(options, dict) else values


def _follow(client: Client, batch: JsonObject, *, visible: bool) -> JsonObject:
    """Watch a batch to its end, with a bar where it can be seen; the batch as it ended."""
    bar = Bar("batch") if visible else None
    patience = Patience(f"batch {batch['id']}")
    try:
        while batch["state"] not in ENDED:
            if bar is not None:
                _draw(bar, batch)
            time.sleep(POLL_S)
            try:
                batch = client.get(path_of("batches", batch["id"]))
                patience.heard()
            except (Unreachable, ApiError) as error:
                time.sleep(patience.pause_s(error))
    finally:
        if bar is not None:
            bar.close()
    return batch


def _draw(bar: Bar, batch: JsonObject) -> None:
    counts = batch["counts"]
    over = counts["total"] - counts["queued"] - counts["running"]
    bar.describe(f"{over:,} of {counts['total']:,}, {counts['running']} running")
    if batch["bytes_total"]:
        bar.update(batch["bytes_done"], batch["bytes_total"])


def _submitted(batch: JsonObject, *, as_json: bool) -> int:
    _say(batch, _say_submitted, as_json=as_json)
    return 0


def _say_submitted(batch: JsonObject) -> None:
    say(f"batch {batch['id']} is {batch['state']}: {_summary(batch)}")
    say(
        f"unshard batches {batch['id']} shows how it goes{', and what was refused' * bool(batch['counts']['refused'])}"
    )


def _ended(client: Client, batch: JsonObject, *, as_json: bool) -> int:
    items = list(client.pages(Call("GET", path_of("batches", batch["id"], "items"), {"limit": 200})))
    if as_json:
        emit_json({**batch, "items": items})
    else:
        _say_batch(batch, items)
    counts = batch["counts"]
    if counts["succeeded"] + counts["skipped"] == counts["total"]:
        return 0
    kinds = [item["error"]["kind"] for item in items if item["error"]]
    statuses = {EXIT_STATUSES.get(kind, NOT_DONE) for kind in kinds} or {NOT_DONE}
    return statuses.pop() if len(statuses) == 1 else NOT_DONE


def _preview(preview: JsonObject, *, as_json: bool) -> int:
    if as_json:
        emit_json(preview)
    else:
        rows = [(item["source"], item["destination"], _plan_of(item)) for item in preview["items"]]
        _say_items(("source", "destination", "what"), rows)
        left = preview["total"] - preview["done"] - preview["refused"]
        say(f"{count(left, 'model')} to make, {preview['done']:,} there already, {preview['refused']:,} refused")
    return NOT_DONE if preview["refused"] else 0


def _plan_of(item: JsonObject) -> str:
    if item["error"]:
        return f"refused: {item['error']['message']}"
    return {True: "there already", False: "to make", None: "to make, unless it is there"}[item["done"]]


def _say(value: Any, tell: Callable[[Any], None], *, as_json: bool) -> None:
    if as_json:
        emit_json(value)
    else:
        tell(value)


def _say_batches(batches: list[JsonObject]) -> None:
    rows = [(batch["id"], batch["state"], batch["name"], _summary(batch)) for batch in batches]
    say_table(("batch", "state", "name", "items"), rows)


def _say_batch(batch: JsonObject, items: Iterable[JsonObject]) -> None:
    say(f"batch {batch['id']} is {batch['state']}: {_summary(batch)}")
    fields = [("name", batch["name"])] if batch["name"] else []
    if batch["bytes_total"]:
        fields.append(("done", f"{size(batch['bytes_done'])} of {size(batch['bytes_total'])}"))
    if batch["eta_s"] is not None:
        fields.append(("left", duration(batch["eta_s"])))
    say_fields(fields)
    rows = [(item["source"], item["destination"], _state(item)) for item in items]
    _say_items(("source", "destination", "state"), rows)


def _summary(batch: JsonObject) -> str:
    counts = batch["counts"]
    parts = [f"{number:,} {name}" for name, number in counts.items() if name != "total" and number]
    return ", ".join(parts) + f" of {counts['total']:,}"


def _state(item: JsonObject) -> str:
    if item["already_there"]:
        return "skipped"
    error = item["error"]
    return f"{item['state'] or 'deleted'}{': ' + error['message'] if error else ''}"


def _say_watches(watches: list[JsonObject]) -> None:
    rows = [(watch["id"], watch["state"], watch["name"], _place(watch)) for watch in watches]
    say_table(("watch", "state", "name", "place"), rows)


def _say_watch(watch: JsonObject) -> None:
    say(f"watch {watch['id']} is {watch['state']}: {_place(watch)}")
    fields = [(name, f"{number:,}") for name, number in watch["counts"].items() if number]
    fields.append(("every", duration(watch["interval_s"])))
    say_fields(fields)
    if error := watch["error"]:
        say(f"  error: {error['message']}")
        say(f"  hint: {error['hint']}")


def _place(watch: JsonObject) -> str:
    return f"{watch['prefix'].rstrip('/')}/{watch['pattern']}"


def _watched(item: JsonObject) -> str:
    return str(item["job_state"] or item["state"])


def _why(item: JsonObject) -> str:
    return str(item["error"]["message"]) if item["error"] else ""


def _say_items(heads: tuple[str, str, str], rows: list[tuple[str, str, str]]) -> None:
    if rows:
        say_table(heads, rows[:MOST_SHOWN])
    if len(rows) > MOST_SHOWN:
        say(f"and {len(rows) - MOST_SHOWN:,} more; --json shows all")
