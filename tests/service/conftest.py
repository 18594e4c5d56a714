"""A real service on a free port for each test: uvicorn in a thread, an SQLite file, and a converter to steer."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

from service.app import create_app
from service.client import Client
from service.db.database import Database
from service.server import Server
from service.settings import Settings
from workers.convert import Result
from workers.errors import Cancelled
from workers.events import FileCompleted, Planned, Progress, Started, Verifying

DEADLINE_S = 15.0
TOKEN = "canary-0123456789abcdef"


def eventually(found: Callable[[], Any], wanted: str, within_s: float = DEADLINE_S) -> Any:
    """The first true answer; a failure that says what was wanted when none comes in time."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if answer := found():
            return answer
        threading.Event().wait(0.02)
    return pytest.fail(f"not within {within_s} s: {wanted}")


PLAN = {
    "tensors": 2,
    "bytes_total": 10,
    "fingerprint": "f",
    "files": [{"name": "model.safetensors", "size_bytes": 10, "tensors": 2, "parts": 1}],
}
TENSORS = [
    {
        "name": name,
        "dtype": "bfloat16",
        "shape": [2],
        "file": "model.safetensors",
        "offset": offset,
        "size_bytes": 4,
        "sources": [name],
        "operation": "copy",
    }
    for name, offset in (("a.weight", 2), ("b.weight", 6))
]
PROGRESS = Progress(5, 10, 7, 6, 1, 2, 0, 1, {"merger-0": "model.layers.0"})


@dataclass
class FakeConverter:
    """Stands in for ``convert``: goes on when it is let, fails when it is told to, obeys ``cancel``."""

    fail_with: list[BaseException] = field(default_factory=list)
    when_cancelled: BaseException = field(default_factory=lambda: Cancelled("stopped"))
    gate: threading.Event = field(default_factory=threading.Event)
    before_commit: Callable[[], None] = lambda: None
    calls: list[dict[str, Any]] = field(default_factory=list)
    committed: list[str] = field(default_factory=list)

    def __call__(self, source, destination, options, *, observer, cancel, attempt, may_commit):
        self.calls.append({"source": source, "destination": destination, "options": options, "attempt": attempt})
        observer(Planned(PLAN, lambda: iter(TENSORS)))
        observer(Started(attempt, ()))
        observer(PROGRESS)
        while not self.gate.wait(0.01):
            if cancel.is_set():
                raise self.when_cancelled
        if self.fail_with:
            raise self.fail_with.pop(0)
        observer(FileCompleted("model.safetensors", 10, "d"))
        observer(Verifying())
        self.before_commit()
        may_commit()
        self.committed.append(attempt)
        manifest = {"weights": [{"path": "model.safetensors", "size_bytes": 10, "digest": "xxh3-128:d"}], "files": []}
        return Result(destination, manifest, {"tensors": 2}, 0.1, 10, 7, 8, ("all zeros",))


@dataclass
class Service:
    """A running service."""

    url: str
    server: uvicorn.Server
    thread: threading.Thread
    client: Client
    http: httpx.Client
    context: Any

    def job_in(self, job_id: str, *states: str) -> dict[str, Any]:
        def look():
            job = self.client.job(job_id)
            return job if job["state"] in states else None

        return eventually(look, f"{job_id} in {states}")

    def stop(self) -> None:
        self.server.should_exit = True
        self.thread.join(DEADLINE_S)


@contextmanager
def running(settings: Settings, converter: Any = None, token: str | None = None) -> Iterator[Service]:
    listener = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    app = create_app(settings, run_conversion=converter)
    config = uvicorn.Config(app, log_config=None, access_log=False, timeout_graceful_shutdown=1)
    server = Server(config, app.state.context.changes.close)
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    with (
        Client(url, token) as client,
        httpx.Client(base_url=url, headers=headers, trust_env=False, timeout=DEADLINE_S) as http,
    ):
        service = Service(url, server, thread, client, http, app.state.context)
        try:
            eventually(lambda: server.started, "the service has started")
            yield service
        finally:
            service.stop()
            listener.close()


DATABASES = ["sqlite", pytest.param("postgresql", marks=pytest.mark.system("initdb"))]


@pytest.fixture(params=DATABASES)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of an empty database: what takes this fixture runs on both kinds."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/jobs.db"
    return str(request.getfixturevalue("postgres_url"))


@pytest.fixture
def database(url: str) -> Iterator[Database]:
    made = Database(url)
    made.migrate()
    yield made
    made.close()


@pytest.fixture(scope="module")
def idle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A service that several tests share: for those that leave nothing behind."""
    with pytest.MonkeyPatch.context() as environment:
        environment.delenv("RAY_ADDRESS", raising=False)
        settings = Settings(data_dir=tmp_path_factory.mktemp("idle"), poll_s=0.05)
    with running(settings, FakeConverter()) as started:
        yield started


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return Settings(data_dir=tmp_path / "data", poll_s=0.05)


@pytest.fixture
def converter() -> FakeConverter:
    fake = FakeConverter()
    fake.gate.set()
    return fake


@pytest.fixture
def service(settings: Settings, converter: FakeConverter) -> Iterator[Service]:
    with running(settings, converter) as started:
        yield started
        converter.gate.set()
