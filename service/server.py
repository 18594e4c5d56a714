"""Runs the service: one process, one port."""

from __future__ import annotations

import signal
import socket
import sys
from collections.abc import Callable

import uvicorn

from service import logs
from service.app import create_app
from service.db.database import Database
from service.settings import Settings
from workers.errors import StorageError

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
GRACE_S = 3
"""How long answers under way, streams above all, may take after a stop signal."""


class Server(uvicorn.Server):
    """Says where it listens as soon as it does, and ends streams as soon as it is to stop."""

    def __init__(self, config: uvicorn.Config, end_streams: Callable[[], None], greeting: str = "") -> None:
        super().__init__(config)
        self._end_streams = end_streams
        self._greeting = greeting

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            sys.stdout.write(self._greeting)
            sys.stdout.flush()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        # Before uvicorn waits for answers under way: those that follow a job would go on as long as it may wait.
        self._end_streams()
        await super().shutdown(sockets)


def serve(settings: Settings) -> None:
    """Serve until SIGTERM or SIGINT, then give running jobs back for the next start.

    Raises an ``UnshardError`` when it may not or cannot listen, or the database can't be used.
    """
    settings.check_may_listen()
    logs.configure()
    listener = _listen(settings.host, settings.port)
    database = Database(settings.effective_database_url)
    try:
        # Before uvicorn, which would tell the user of these in a traceback.
        database.own()
        database.migrate()
    finally:
        database.close()
    app = create_app(settings)
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        timeout_graceful_shutdown=GRACE_S,
        # Not even loopback is believed by itself: whoever is on this machine could pass for anybody in the audit.
        proxy_headers=bool(settings.trusted_proxies),
        forwarded_allow_ips=list(settings.trusted_proxies),
        server_header=False,
    )
    greeting = _greeting(settings, listener, database.shown)
    for number in STOP_SIGNALS:
        # After an orderly end uvicorn raises the signal again; there is nothing left for it to do then.
        signal.signal(number, lambda *_: None)
    try:
        Server(config, app.state.context.changes.close, greeting).run([listener])
    finally:
        listener.close()


def _listen(host: str, port: int) -> socket.socket:
    name = host.strip("[]")
    try:
        family = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((name, port), family=family)
    except OSError as error:
        raise StorageError(
            f"cannot listen on {host}:{port}: {error.strerror or error}",
            hint="Another program may use the port: choose one with --port, or 0 for any.",
        ) from None


def _greeting(settings: Settings, listener: socket.socket, database: str) -> str:
    address, port = listener.getsockname()[:2]
    url = f"http://{f'[{address}]' if ':' in address else address}:{port}"
    token = "asked for" if settings.admin_token else "none; only this machine can connect"
    lines = [
        f"unshard listens on {url}",
        f"  dashboard  {url}/",
        f"  API docs   {url}/v1/docs",
        f"  database   {database}",
        f"  Ray        {settings.ray_address or 'a cluster of its own on this machine'} (starting)",
        f"  token      {token}",
    ]
    return "\n".join(lines) + "\n"
