"""What carries conversions out: a process of our own that drives a Ray cluster, begun anew when it is lost."""

from __future__ import annotations

import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from service.jobs.child import Child, told_status
from service.jobs.driver import DriverOptions, Order
from service.jobs.planning import Planner, UnexpectedFault
from service.settings import Settings
from workers.convert import Result
from workers.errors import Cancelled
from workers.events import Observer
from workers.options import ConvertOptions

FIRST_RETRY_S = 1.0
LONGEST_RETRY_S = 30.0
SILENCE_S = 60.0
"""A process that says nothing for this long hangs: it tells its state every second."""

CANCEL_POLL_S = 0.1
CLOSE_TIMEOUT_S = 25.0
log = logging.getLogger(__name__)


class Interrupted(Exception):
    """An attempt lost what it needs, such as the cluster: the job is not at fault and can be begun again."""


@dataclass(frozen=True, slots=True)
class Controls:
    """How whoever runs a conversion hears of it and stops it; see ``workers.convert.convert``."""

    observer: Observer
    cancel: threading.Event
    attempt: str
    may_commit: Callable[[], None]
    """Called right before the commit; raises to prevent it."""

    def arguments(self) -> dict[str, Any]:
        """As ``convert`` takes them."""
        return {
            "observer": self.observer,
            "cancel": self.cancel,
            "attempt": self.attempt,
            "may_commit": self.may_commit,
        }


class Conversions(Protocol):
    """What carries conversions out."""

    def run(self, source: str, destination: str, options: ConvertOptions, controls: Controls) -> Result:
        """Convert, or raise an ``UnshardError``; ``Interrupted`` when the cluster is lost meanwhile."""

    def start(self) -> None:
        """Get ready, in the background."""

    def state(self) -> tuple[str, str]:
        """``starting``, ``ok`` or ``failed``, and a word on it."""

    def describe(self) -> dict[str, Any]:
        """The ``nodes`` of the cluster, and its ``items``: the workers and what each does now."""

    def close(self) -> None:
        """Let go of everything."""


NOBODY: dict[str, Any] = {"nodes": [], "items": []}


class GivenConversions:
    """Conversions by a function that stands in for ``convert``; there is nothing to wait for."""

    def __init__(self, function: Callable[..., Result]) -> None:
        self._function = function

    def start(self) -> None:
        pass

    def state(self) -> tuple[str, str]:
        return ("ok", "in this process")

    def describe(self) -> dict[str, Any]:
        return NOBODY

    def run(self, source: str, destination: str, options: ConvertOptions, controls: Controls) -> Result:
        return self._function(source, destination, options, **controls.arguments())

    def close(self) -> None:
        pass


class RayConversions:
    """Conversions by the actors of a Ray cluster that all jobs share."""

    def __init__(self, settings: Settings, planner: Planner) -> None:
        self._options = DriverOptions(
            settings.ray_address, settings.mergers, settings.merger_cpus, settings.merger_gpus
        )
        self._planner = planner
        self._lock = threading.Lock()
        self._child: Child | None = None
        self._calls: dict[int, queue.SimpleQueue[tuple[str, Any]]] = {}
        self._numbers = itertools.count(1)
        self._state = ("starting", "waiting for the cluster")
        self._described = NOBODY
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="cluster", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def state(self) -> tuple[str, str]:
        return self._state

    def describe(self) -> dict[str, Any]:
        return self._described if self._state[0] == "ok" else NOBODY

    def run(self, source: str, destination: str, options: ConvertOptions, controls: Controls) -> Result:
        plan = self._planner.plan(source, options, controls.cancel)
        number = next(self._numbers)
        inbox: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        with self._lock:
            child = self._child
            if child is None or self._state[0] != "ok":
                raise Interrupted(self._state[1])
            self._calls[number] = inbox
        try:
            return self._follow(child, number, inbox, (Order(plan, destination, controls.attempt), controls))
        except BaseException:
            # Nobody listens any more. Where the outcome has come already, this says nothing new.
            _send(child, ("cancel", number, None))
            _send(child, ("commit", number, Cancelled("nobody waits for this attempt any more")))
            raise
        finally:
            with self._lock:
                self._calls.pop(number, None)

    def close(self) -> None:
        self._closed.set()
        with self._lock:
            child = self._child
        if child is not None:
            child.close(CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            self._thread.join(CLOSE_TIMEOUT_S)

    def _follow(
        self,
        child: Child,
        number: int,
        inbox: queue.SimpleQueue[tuple[str, Any]],
        asked: tuple[Order, Controls],
    ) -> Result:
        """Hand an order over and pass on what is said of it, until its outcome."""
        order, controls = asked
        _send(child, ("run", number, order))
        is_told = False
        while True:
            if controls.cancel.is_set() and not is_told:
                _send(child, ("cancel", number, None))
                is_told = True
            try:
                kind, content = inbox.get(timeout=CANCEL_POLL_S)
            except queue.Empty:
                continue
            if kind == "event":
                controls.observer(content)
            elif kind == "may_commit":
                _send(child, ("commit", number, _refusal(controls)))
            elif kind == "done":
                result: Result = content
                return result
            elif kind == "lost":
                raise Interrupted(content)
            else:
                raise content if kind == "failed" else UnexpectedFault(content)

    # --- the process ----------------------------------------------------------------------------------------
    def _keep(self) -> None:
        """Start the process, listen to it, and begin a new one when it has ended."""
        pause = FIRST_RETRY_S
        while not self._closed.is_set():
            was_ok = False
            try:
                was_ok = self._serve_once()
            except Exception as error:
                log.exception("the process that drives Ray could not be started or understood")
                self._forget(f"the process that drives Ray could not be used: {type(error).__name__}")
            if self._closed.is_set():
                return
            log.warning("the cluster is not available: %s", self._state[1])
            pause = FIRST_RETRY_S if was_ok else min(pause * 2, LONGEST_RETRY_S)
            self._closed.wait(pause)

    def _serve_once(self) -> bool:
        """One life of the process; whether its cluster was ready at some time."""
        child = Child("service.jobs.driver:serve")
        was_ok = False
        with self._lock:
            self._child = child
        status = None
        try:
            child.channel.send(self._options)
            while child.channel.waits(SILENCE_S):
                was_ok = self._take(*child.channel.receive()) or was_ok
        except (EOFError, OSError):
            status = child.status(0.5)
        finally:
            child.kill()
        self._forget(f"the process that drives Ray {told_status(status)}")
        return was_ok

    def _take(self, kind: str, *content: Any) -> bool:
        """Take a message in; whether it says that the cluster is ready."""
        if kind != "state":
            number, said = content
            with self._lock:
                inbox = self._calls.get(number)
            if inbox is not None:
                inbox.put((kind, said))
            return False
        state, detail, described = content
        if state == "ok" and self._state[0] != "ok":
            log.info("Ray is ready: %s", detail)
        if not (state == "starting" and self._state[0] == "failed"):  # until then the reason is worth more
            self._state = (state, detail)
        self._described = _with_jobs(described or NOBODY)
        return bool(state == "ok")

    def _forget(self, how: str) -> None:
        """The process is gone: so are its conversions."""
        with self._lock:
            self._child = None
            if self._state[0] != "failed":
                self._state = ("failed", how)
            why = self._state[1]
            for inbox in self._calls.values():
                inbox.put(("lost", why))


def _with_jobs(described: dict[str, Any]) -> dict[str, Any]:
    """Name the job of each attempt that a worker is at: attempts are named by job, number and fence."""
    items = [
        {**item, "doing": [{**doing, "job_id": doing["attempt"].split("-")[0]} for doing in item["doing"]]}
        for item in described["items"]
    ]
    return {**described, "items": items}


def _send(child: Child, message: tuple[Any, ...]) -> None:
    try:
        child.channel.send(message)
    except OSError:
        # What was lost with the process is told by its reader, to everybody alike.
        time.sleep(CANCEL_POLL_S)


def _refusal(controls: Controls) -> BaseException | None:
    """Why an attempt may not commit; None when it may."""
    try:
        controls.may_commit()
    except Exception as error:  # noqa: BLE001 - raised again in the process that was to commit
        return error
    return None
