"""A real receiver of webhooks: an HTTP server in a thread that remembers what came and answers as it is told."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Received:
    """A request as it came."""

    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def id(self) -> str:
        return self.headers["webhook-id"]

    @property
    def event(self) -> dict[str, Any]:
        return json.loads(self.body)

    def is_signed_with(self, secret: str) -> bool:
        """Check the signature as a receiver does, written from the specification alone."""
        key = base64.b64decode(secret.split("_", 1)[1])
        text = f"{self.headers['webhook-id']}.{self.headers['webhook-timestamp']}.".encode() + self.body
        wanted = base64.b64encode(hmac.new(key, text, hashlib.sha256).digest()).decode()
        return f"v1,{wanted}" in self.headers["webhook-signature"].split(" ")


@dataclass
class Receiver:
    """``answer`` gets the handler, after the request was read; by default it says 204."""

    url: str = ""
    came: list[Received] = field(default_factory=list)
    answer: Callable[[BaseHTTPRequestHandler], None] = lambda handler: reply(handler, 204)

    def events(self, *types: str) -> list[dict[str, Any]]:
        return [got.event for got in self.came if got.event["type"] in types]


def reply(handler: BaseHTTPRequestHandler, status: int, headers: dict[str, str] | None = None) -> None:
    handler.send_response(status)
    for name, value in (headers or {}).items():
        handler.send_header(name, value)
    handler.send_header("Content-Length", "0")
    handler.end_headers()


@contextmanager
def receiver(tls: ssl.SSLContext | None = None, host: str = "127.0.0.1") -> Iterator[Receiver]:
    made = Receiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            made.came.append(Received(self.path, {k.lower(): v for k, v in self.headers.items()}, body))
            made.answer(self)

        def log_message(self, *_: Any) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        block_on_close = False

        def handle_error(self, *_: Any) -> None:  # a sender that hangs up is what some tests are about
            pass

    with Server((host, 0), Handler) as server:
        if tls is not None:
            server.socket = tls.wrap_socket(server.socket, server_side=True)
        made.url = f"{'https' if tls else 'http'}://{host}:{server.server_address[1]}/hook"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        yield made
        server.shutdown()
        thread.join()
