"""What both clients share: the requests that they send, how they read answers, and their patience."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

from workers.errors import InternalError, InvalidOption, StorageError, UnshardError

JsonObject = dict[str, Any]

TERMINAL_STATES = frozenset({"succeeded", "failed", "cancelled"})
Options = Mapping[str, Any] | None

ADDRESS_HINT = "Start a service with: unshard serve; or name its address, such as http://127.0.0.1:8000."

POLL_S = 0.2
LONG_POLL_S = 20
PATIENCE_S = 60.0
"""How long a client that waits for a job outlasts a service that doesn't answer: a restart takes less."""

SILENCE_S = 45.0
"""After which a stream is lost: the service speaks every 15 seconds."""

IDENTIFIER = re.compile(r"[A-Za-z0-9_-]+")

TOO_FAST = 429
AWAY = frozenset({502, 503, 504})
"""What a proxy answers for a service that is started again, and the service for a database that is."""


class ApiError(UnshardError):
    """The service refused. ``code`` is the problem's type, ``problem`` the whole document."""

    def __init__(self, status: int, problem: JsonObject) -> None:
        super().__init__(str(problem.get("detail") or f"HTTP status {status}"), hint=str(problem.get("hint") or ""))
        self.status = status
        self.problem = problem
        self.code = str(problem.get("type", "")).rpartition("/")[2] or "error"
        self.exit_status = InternalError.exit_status if status >= 500 and status != 503 else 1

    @property
    def retry_after_s(self) -> float:
        """How long the service, or a proxy before it, wants to be left alone; 0 when it says nothing."""
        told = self.problem.get("retry_after_s", 0)
        return float(told) if isinstance(told, int | float) else 0.0


class Unreachable(StorageError):
    """No service answers at the address."""


@dataclass(frozen=True, slots=True)
class Call:
    """One request; ``pages`` of a list ask for it again with the next cursor."""

    method: str
    path: str
    params: Mapping[str, Any] = field(default_factory=dict)
    body: Any = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def arguments(self) -> dict[str, Any]:
        """As httpx takes them."""
        body = {} if self.body is None else {"json": self.body}
        params = {name: value for name, value in self.params.items() if value is not None}
        return {
            "method": self.method,
            "url": self.path,
            "params": params,
            "headers": dict(self.headers),
            **body,
        }

    @property
    def held_s(self) -> float:
        """How long the service may hold the answer back, beyond the time that an answer takes."""
        wait = str(self.params.get("wait") or "0").removesuffix("s")
        return float(wait) if wait.replace(".", "", 1).isdecimal() else 0.0

    def at(self, cursor: str) -> Call:
        """The same list from a cursor on."""
        return Call(self.method, self.path, {**self.params, "cursor": cursor}, self.body, self.headers)


def submit(
    ends: tuple[str, str],
    options: Mapping[str, Any] | None,
    labels: Mapping[str, str] | None,
    key: str | None,
    params: Mapping[str, Any],
) -> Call:
    """Hand a job in, from the first of ``ends`` to the second."""
    priority = params.get("priority", 0)
    body = {
        "source": ends[0],
        "destination": ends[1],
        "options": dict(options or {}),
        "labels": dict(labels or {}),
        "priority": priority,
    }
    query = {name: value for name, value in params.items() if name != "priority"}
    return Call("POST", "/v1/jobs", query, body, _keyed(key))


def preview(source: str, destination: str, options: Mapping[str, Any] | None) -> Call:
    """Ask for a job's plan without handing it in."""
    body = {"source": source, "destination": destination, "options": dict(options or {})}
    return Call("POST", "/v1/jobs", {"dry_run": "true"}, body)


def jobs(limit: int, **wanted: Any) -> Call:
    """List jobs; labels as a mapping."""
    labels = [f"{name}:{value}" for name, value in (wanted.pop("labels", None) or {}).items()]
    return Call("GET", "/v1/jobs", {"limit": limit, **wanted, **({"label": labels} if labels else {})})


def of_job(job_id: str, part: str = "", **params: Any) -> Call:
    """Read a job or a part of it."""
    return Call("GET", path_of("jobs", job_id, part), params)


def path_of(kind: str, identifier: str, part: str = "") -> str:
    """The path of a resource, or of a part of it. Raises ``InvalidOption`` for what can be no id.

    Anything else in its place would make another path: of the whole list, say, or of another resource.
    """
    if not IDENTIFIER.fullmatch(identifier):
        raise InvalidOption(
            f"{identifier!r} is no id of one of the {kind}",
            expected="letters, digits, _ and -",
            found=identifier,
            hint=f"GET /v1/{kind} lists them with their ids.",
        )
    return f"/v1/{kind}/{identifier}{part and '/' + part}"


def do(path: str, verb: str, body: Any = None) -> Call:
    """Have something done to a resource: ``cancel``, ``retry`` and the like."""
    return Call("POST", f"{path}:{verb}", body=body)


def create(kind: str, body: Mapping[str, Any], key: str | None = None, **params: Any) -> Call:
    """Make a batch, a watch, a webhook or a token."""
    return Call("POST", f"/v1/{kind}", params, dict(body), _keyed(key))


def inspect(source: str, options: Mapping[str, Any] | None, tensor: str | None) -> Call:
    """Look at a source."""
    body = {"source": source, "options": dict(options or {}), **({"tensor": tensor} if tensor else {})}
    return Call("POST", "/v1/inspect", body=body)


def data_lines(lines: Iterable[str]) -> Iterable[JsonObject]:
    """The objects of a stream of server-sent events."""
    for line in lines:
        if line.startswith("data:"):
            yield dict(json.loads(line[5:]))


def answer_of(response: httpx.Response, base_url: str) -> JsonObject:
    """The JSON object of an answer; an ``ApiError`` or ``Unreachable`` when it is none."""
    if response.is_error:
        raise error_of(response)
    if response.status_code == httpx.codes.NO_CONTENT:
        return {}
    try:
        return dict(response.json())
    except ValueError:
        raise Unreachable(f"{base_url} answers, but not as unshard does", hint=ADDRESS_HINT) from None


def error_of(response: httpx.Response) -> ApiError:
    """What the service said against a request; its body has been read."""
    try:
        problem = dict(response.json())
    except ValueError:
        problem = {}
    if (wait := response.headers.get("retry-after", "")).isdecimal():
        problem.setdefault("retry_after_s", int(wait))
    return ApiError(response.status_code, problem)


def unreachable(base_url: str, error: httpx.TransportError) -> Unreachable:
    """That nobody answered."""
    detail = str(error) or type(error).__name__
    return Unreachable(f"no service answers at {base_url}: {detail}", hint=ADDRESS_HINT)


def _keyed(key: str | None) -> dict[str, str]:
    return {"Idempotency-Key": key} if key else {}


def settings(base_url: str, token: str | None, timeout_s: float) -> dict[str, Any]:
    """How httpx is set up for a service."""
    if token and not (token.isascii() and token.isprintable() and " " not in token):
        raise InvalidOption(
            "the token holds a space, the end of a line or another character that no token has",
            hint="Look for what was copied along with it.",
        )
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    # A service on this machine or in this cluster is not behind the proxy of the environment.
    return {"base_url": base_url.rstrip("/"), "headers": headers, "timeout": timeout_s, "trust_env": False}


def no_address(base_url: str) -> Unreachable:
    """That what was given is no address."""
    return Unreachable(f"{base_url!r} is not the address of a service", hint=ADDRESS_HINT)


class Patience:
    """How long to go on asking about something that takes its time, of a service that may be away meanwhile."""

    def __init__(self, what: str, timeout_s: float | None = None) -> None:
        self._what = what
        self._timeout_s = timeout_s
        self._deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self._heard = time.monotonic()
        self._known = ""

    def heard(self) -> None:
        """The service answered."""
        self._heard = time.monotonic()

    def pause_s(self, error: UnshardError) -> float:
        """How long to wait before asking again; raises what was met when that won't help, or has lasted too long.

        ``TimeoutError`` when the caller's own time is over before.
        """
        wait_s = POLL_S
        if isinstance(error, ApiError):
            if error.status != TOO_FAST and error.status not in AWAY:
                raise error
            wait_s = max(POLL_S, error.retry_after_s)
        if isinstance(error, ApiError) and error.status == TOO_FAST:
            self.heard()
        elif time.monotonic() - self._heard > PATIENCE_S:
            raise error
        return min(wait_s, self.left_s(str(error)))

    def held(self) -> str:
        """How long the service is to hold its answer back."""
        return f"{min(LONG_POLL_S, self.left_s()):.3f}s"

    def left_s(self, known: str = "") -> float:
        """What is left of the caller's own time; ``TimeoutError`` when nothing is, with what was known last."""
        self._known = known or self._known
        if self._deadline is None:
            return LONG_POLL_S
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError(f"{self._what} has not ended after {self._timeout_s:g} s: {self._known}")
        return left
