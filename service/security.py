"""What every request passes before a route sees it: name, origin, token, size, depth; and headers of every answer.

Plain ASGI, so that streams pass through untouched.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.errors import Problem, answer
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
_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*"|[\[{]|[\]}]', re.DOTALL)


class Gate:
    """The checks, in the order of their cost."""

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app = app
        self._settings = settings
        token = settings.admin_token.get_secret_value() if settings.admin_token else None
        self._token_digest = None if token is None else _digest(token)
        self._hosts = LOOPBACK_NAMES | {name.lower() for name in (settings.host, *settings.allowed_hosts)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer it with a problem."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        sending = _with_headers(send, no_store=scope["path"].startswith("/v1"))
        try:
            self._check(scope)
            if scope["method"] not in SAFE_METHODS:
                receive = await self._checked_body(receive, self._limit_bytes(scope["path"]))
        except Problem as problem:
            challenge = {"WWW-Authenticate": "Bearer"} if problem.name == "unauthenticated" else {}
            await answer(problem, challenge)(scope, receive, sending)
            return
        await self._app(scope, receive, sending)

    def _check(self, scope: Scope) -> None:
        path, headers = scope["path"], Headers(scope=scope)
        if path in OPEN_PATHS:
            return
        self._check_host(headers)
        if scope["method"] not in SAFE_METHODS:
            self._check_origin(headers)
        if self._token_digest is not None and path.startswith("/v1/") and path not in _OPEN_DOCUMENTS:
            self._check_token(headers)

    def _check_host(self, headers: Headers) -> None:
        """Against DNS rebinding: a page elsewhere can make its own name point here, but not change what it's called.

        With a token and no list of names any name will do: such a page doesn't have the token.
        """
        if self._token_digest is not None and not self._settings.allowed_hosts:
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

    def _check_token(self, headers: Headers) -> None:
        scheme, _, token = headers.get("authorization", "").partition(" ")
        # Digests, so that neither content nor length of the token shows in the time that this takes.
        if scheme.lower() != "bearer" or not hmac.compare_digest(_digest(token.strip()), self._token_digest or b""):
            raise Problem(
                "unauthenticated",
                "the request shows no valid token",
                hint="Send the header Authorization: Bearer TOKEN; the administrator has the token.",
            )

    def _limit_bytes(self, path: str) -> int:
        """Batches list thousands of items; whatever else is sent is small."""
        is_batch = path == "/v1/batches"
        return self._settings.max_batch_bytes if is_batch else self._settings.max_body_bytes

    async def _checked_body(self, receive: Receive, limit_bytes: int) -> Receive:
        body = await _read(receive, limit_bytes)
        if body.count(b"[") + body.count(b"{") > self._settings.max_json_depth:
            _check_depth(body, self._settings.max_json_depth)
        pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            return pending.pop() if pending else await receive()

        return replay


async def _read(receive: Receive, limit_bytes: int) -> bytes:
    body = bytearray()
    while True:
        message = await receive()
        body += message.get("body", b"")
        if len(body) > limit_bytes:
            raise Problem(
                "payload-too-large",
                f"the body is larger than {limit_bytes} bytes",
                hint="Send less at a time.",
            )
        if not message.get("more_body"):
            return bytes(body)


_OPEN_DOCUMENTS = {"/v1/docs", "/v1/openapi.json"}


def _check_depth(body: bytes, limit: int) -> None:
    depth = 0
    for match in _TOKEN.finditer(body):
        if match[0] in (b"[", b"{"):
            depth += 1
            if depth > limit:
                raise Problem("bad-request", f"the body is nested deeper than {limit} levels", hint="Nest less.")
        elif match[0] in (b"]", b"}"):
            depth -= 1


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()


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
