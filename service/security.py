"""What every request passes before a route sees it: name, origin, token, rate, kind, size and depth of the body.

And what every answer gets on its way out: headers, and for a change its row in the audit. Plain ASGI, so that streams
pass through untouched.
"""

from __future__ import annotations

import re
from contextlib import AsyncExitStack
from urllib.parse import urlsplit

from sqlalchemy.exc import SQLAlchemyError
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.access.guard import Attempt, Guard, NotAuthenticated
from service.access.principals import Principal
from service.access.rates import TooFast, TooManyStreams
from service.access.recording import Recorder, client_address, plain_path
from service.errors import Problem, answer, problem_of
from service.settings import Settings

SAFE_METHODS = {"GET", "HEAD", "OPTIONS"}
LOOPBACK_NAMES = {"localhost", "127.0.0.1", "[::1]"}
OPEN_PATHS = ("/healthz", "/readyz", "/metrics")
"""For probes and Prometheus, which come under any name and without a token; they tell counts and states only."""

CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Permissions-Policy": "camera=(), microphone=(), geolocation=()",
    "Cross-Origin-Resource-Policy": "same-origin",
}
JSON = "application/json"
_REFUSALS = (Problem, NotAuthenticated, TooFast, SQLAlchemyError)
_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*"|[\[{]|[\]}]', re.DOTALL)


class Gate:
    """The checks, in the order of their cost."""

    def __init__(self, app: ASGIApp, settings: Settings, guard: Guard) -> None:
        self._app = app
        self._settings = settings
        self._guard = guard
        names = (settings.host, *settings.allowed_hosts)
        self._hosts = LOOPBACK_NAMES | {name.lower() for name in names if name}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer it with a problem."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        sending = _with_headers(send, no_store=scope["path"].startswith("/v1"))
        try:
            self._check_sender(scope)
            if not _asks_for_caller(scope["path"]):
                await self._app(scope, receive, sending)
                return
            caller = await self._caller(scope)
        except _REFUSALS as error:
            await _refused(error)(scope, receive, sending)
            return
        scope["principal"] = caller
        if scope["method"] in SAFE_METHODS:
            await self._show(scope, receive, sending)
        else:
            await self._change(scope, receive, sending)

    async def _show(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on what changes nothing; a stream is counted as long as it lasts."""
        async with AsyncExitStack() as stack:
            if "text/event-stream" in Headers(scope=scope).get("accept", ""):
                try:
                    stack.enter_context(self._guard.stream(scope["principal"]))
                except TooManyStreams as error:
                    await _refused(error)(scope, receive, send)
                    return
            await self._app(scope, receive, send)

    async def _change(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on what may change something, and have it recorded whatever becomes of it."""
        record = Recorder(self._guard.audit, scope, scope["principal"], send)
        try:
            receive = await self._checked_body(scope, receive)
        except Problem as problem:
            await answer(problem)(scope, receive, record.send)
            return
        try:
            await self._app(scope, receive, record.send)
        except Exception:
            await record.failed()
            raise

    async def _caller(self, scope: Scope) -> Principal:
        headers = Headers(scope=scope)
        attempt = Attempt(headers.get("authorization"), client_address(scope), plain_path(scope))
        caller = await self._guard.identify(attempt)
        self._guard.count(caller)
        return caller

    def _check_sender(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        if scope["path"] in OPEN_PATHS:
            return
        self._check_host(headers)
        if scope["method"] not in SAFE_METHODS:
            self._check_origin(headers)

    def _check_host(self, headers: Headers) -> None:
        """Against DNS rebinding: a page elsewhere can make its own name point here, but not change what it's called.

        With a token and no list of names any name will do: such a page doesn't have the token.
        """
        if self._guard.keyring.asks and not self._settings.allowed_hosts:
            return
        host = re.sub(r":\d+$", "", headers.get("host", "")).lower()
        if host not in self._hosts:
            raise Problem(
                "unknown-host",
                "the service is not known under the name that the request was sent to",
                hint="Use 127.0.0.1 or localhost, or list the name in UNSHARD_ALLOWED_HOSTS.",
            )

    def _check_origin(self, headers: Headers) -> None:
        origin = headers.get("origin")
        if origin is not None and urlsplit(origin).netloc.lower() != headers.get("host", "").lower():
            raise Problem(
                "foreign-origin",
                "a page of another site may not change anything here",
                hint="Send the request from a program, or from the service's own pages.",
            )

    def _limit_bytes(self, path: str) -> int:
        """Batches list thousands of items; whatever else is sent is small."""
        is_batch = path == "/v1/batches"
        return self._settings.max_batch_bytes if is_batch else self._settings.max_body_bytes

    async def _checked_body(self, scope: Scope, receive: Receive) -> Receive:
        headers = Headers(scope=scope)
        limit_bytes = self._limit_bytes(scope["path"])
        announced = headers.get("content-length", "")
        if announced.isdecimal() and int(announced) > limit_bytes:
            raise _too_large(limit_bytes)
        body = await _read(receive, limit_bytes)
        if body.count(b"[") + body.count(b"{") > self._settings.max_json_depth:
            # Not on the event loop, where a long body would hold up everybody else's answers.
            await run_in_threadpool(_check_depth, body, self._settings.max_json_depth)
        if body:
            _check_kind(headers)
        pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            return pending.pop() if pending else await receive()

        return replay


async def _read(receive: Receive, limit_bytes: int) -> bytes:
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Problem("bad-request", "the request ended within its body", hint="Send it again.")
        body += message.get("body", b"")
        if len(body) > limit_bytes:
            raise _too_large(limit_bytes)
        if not message.get("more_body"):
            return bytes(body)


_OPEN_DOCUMENTS = {"/v1/docs", "/v1/openapi.json"}


def _too_large(limit_bytes: int) -> Problem:
    return Problem("payload-too-large", f"the body is larger than {limit_bytes} bytes", hint="Send less at a time.")


def _check_depth(body: bytes, limit: int) -> None:
    depth = 0
    for match in _TOKEN.finditer(body):
        if match[0] in (b"[", b"{"):
            depth += 1
            if depth > limit:
                raise Problem("bad-request", f"the body is nested deeper than {limit} levels", hint="Nest less.")
        elif match[0] in (b"]", b"}"):
            depth -= 1


def _check_kind(headers: Headers) -> None:
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != JSON and not (kind.startswith("application/") and kind.endswith("+json")):
        found = f"is of the kind {kind[:80]}" if kind else "is of no kind that is told"
        hint = f"Send JSON with the header Content-Type: {JSON}."
        raise Problem("unsupported-media-type", f"the body {found}, and not {JSON}", hint=hint)


def _asks_for_caller(path: str) -> bool:
    return path.startswith("/v1/") and path not in _OPEN_DOCUMENTS


def _refused(error: Exception) -> ASGIApp:
    problem = problem_of(error)
    return answer(problem, {"WWW-Authenticate": "Bearer"} if problem.name == "unauthenticated" else {})


def _with_headers(send: Send, *, no_store: bool) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name, value in HEADERS.items():
                headers[name] = value
            if no_store:
                headers["Cache-Control"] = "no-store"
        await send(message)

    return sending
