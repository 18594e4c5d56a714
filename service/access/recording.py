"""Writes each change into the audit before its answer leaves: nobody is told of a success that nothing tells of.

A row that can't be written goes to the log as an error, whole: what was done can't be taken back by then.
"""

from __future__ import annotations

import json
import logging
from typing import Any
from urllib.parse import quote

from sqlalchemy.exc import SQLAlchemyError
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.types import Message, Scope, Send

from service.access.audit import AuditLog, Deed
from service.access.principals import Principal

LONGEST_TARGET = 1024
LONGEST_ACTION = 255
PROBLEM_TYPE = "application/problem+json"
log = logging.getLogger(__name__)


class Recorder:
    """The way of one answer; ``send`` stands in for the server's."""

    def __init__(self, audit: AuditLog, scope: Scope, caller: Principal, send: Send) -> None:
        self._audit = audit
        self._scope = scope
        self._caller = caller
        self._send = send
        self._start: Message | None = None
        self._is_written = False

    async def send(self, message: Message) -> None:
        """Hold the head of the answer back until the row is written, which the first piece of the body brings."""
        if message["type"] == "http.response.start":
            self._start = message
            return
        if self._start is not None:
            start, self._start = self._start, None
            await self._write(start["status"], _facts(start, message.get("body", b"")), Headers(raw=start["headers"]))
            await self._send(start)
        await self._send(message)

    async def failed(self) -> None:
        """No answer came: what was asked for broke."""
        if not self._is_written:
            await self._write(500, {"problem": "internal"}, Headers())

    async def _write(self, status: int, facts: dict[str, Any], headers: Headers) -> None:
        self._is_written = True
        caller, scope = self._caller, self._scope
        deed = Deed(
            actor=caller.id,
            actor_name=caller.name,
            address=client_address(scope),
            action=f"{scope['method']} {_route(scope)}"[:LONGEST_ACTION],
            target=_target(scope, headers),
            status=status,
            detail=facts,
        )
        try:
            await run_in_threadpool(self._audit.add, deed)
        except SQLAlchemyError:
            log.exception("the audit could not be written: %s", deed)


def client_address(scope: Scope) -> str:
    """Where a request comes from, as the server sees it; of proxies it believes only those of the settings."""
    client = scope.get("client")
    return str(client[0])[:64] if client else ""


def plain_path(scope: Scope) -> str:
    """The path as it was sent, so without any character that a database or a terminal chokes on."""
    return quote(scope["path"], safe="/:{}@!$&'()*+,;=~")[:LONGEST_TARGET]


def _route(scope: Scope) -> str:
    route = scope.get("route")
    return str(getattr(route, "path", None) or plain_path(scope))


def _target(scope: Scope, headers: Headers) -> str:
    """The ids in the path; of what was made its id; else the path."""
    ids = [quote(str(value), safe=":") for value in scope.get("path_params", {}).values()]
    if ids:
        return "/".join(ids)[:LONGEST_TARGET]
    made = headers.get("location", "").rpartition("/")[2]
    return (quote(made, safe=":") or plain_path(scope))[:LONGEST_TARGET]


def _facts(start: Message, body: bytes) -> dict[str, Any]:
    headers = Headers(raw=start["headers"])
    facts: dict[str, Any] = {}
    if headers.get("content-type", "").startswith(PROBLEM_TYPE):
        facts["problem"] = str(json.loads(body).get("type", "")).rpartition("/")[2]
    if headers.get("idempotency-replayed"):
        facts["replayed"] = True
    return facts
