"""Metadata work, done in processes that can be killed: planning, previews and inspections of untrusted sources.

A hostile or huge source can keep the interpreter busy for ever or eat the memory of its process. Here that costs one
process of a small pool: it is ended after a time limit, when its job is cancelled, or by its memory limit.
"""

from __future__ import annotations

import logging
import pickle
import resource
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from service.jobs.child import Channel, Child, told_status
from service.jobs.looking import Look, look_into
from service.logs import configure
from service.room import Room
from workers.compare import Compared, compare_sources
from workers.convert import plan, plan_source
from workers.errors import Cancelled, InsufficientResources, UnshardError
from workers.finished import is_made
from workers.options import ConvertOptions
from workers.verify_pairs import THREADS as COMPARING_THREADS
from workers.verify_pairs import CompareLimits

POLL_S = 0.1
MOST_IDLE = 2
LARGEST_IDLE_BYTES = 1 << 30
"""A process that grew beyond this is not kept for the next request."""

SPARE_CPU_S = 60
"""Processor time that a process may use beyond its limit on the clock, with its helpers' start-up."""

SPARE_COMPARE_S = 5.0
"""Of the time of a comparison, kept for the blocks that are under way at its end, and for its answer."""

SPARE_COMPARE_SHARE = 0.25
"""No more of a short time than this is kept."""

log = logging.getLogger(__name__)


class TookTooLong(Exception):
    """Reading the metadata was ended after the time that it may take; ``setting`` says how long that is."""

    def __init__(
        self,
        limit_s: float,
        setting: str = "UNSHARD_PLANNING_TIMEOUT_S",
        what: str = "the source's metadata could not be read",
    ) -> None:
        super().__init__(f"{what} within {round(limit_s, 1):g} s")
        self.limit_s = limit_s
        self.hint = f"A source may be damaged or made to keep readers busy. If it is honest and huge, raise {setting}."


class UnexpectedFault(Exception):
    """Something broke in a process of ours; its log has the details, ``name`` is the class of the error."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


@dataclass(frozen=True, slots=True)
class PlanningLimits:
    """What metadata work may take."""

    plan_s: float = 600.0
    inspect_s: float = 60.0
    memory_bytes: int | None = None
    """Of each process; None: as much as the machine has."""
    at_once: int = 4
    """Processes for requests; those for jobs are not counted, since jobs are limited elsewhere."""
    waiting: int = 8
    """Requests that wait for one of them."""
    within: tuple[str, ...] = ()
    """The only trees of the file system that sources may be read from, also behind links; none given: all."""


@dataclass(frozen=True, slots=True)
class ComparingLimits:
    """What a comparison of two checkpoints may take."""

    time_s: float = 120.0
    most_bytes: int = 8 << 30
    """Of either; of larger ones only the metadata are compared."""


class Planner:
    """The pool. Thread-safe; a process does one thing at a time."""

    def __init__(self, limits: PlanningLimits | None = None) -> None:
        self._limits = limits or PlanningLimits()
        self._lock = threading.Lock()
        self._idle: list[Child] = []
        self._busy: set[Child] = set()
        self._closed = False
        self._room = Room("sources are being read", self._limits.at_once, self._limits.waiting)

    def plan(self, source: str, options: ConvertOptions, cancel: threading.Event) -> bytes:
        """A pickled ``Plan``, for the process that carries it out.

        Raises what ``plan_source`` does, ``Cancelled`` within a second after ``cancel``, and ``TookTooLong``.
        """
        packed: bytes = self._call(("plan", source, options), self._limits.plan_s, cancel.is_set)
        return packed

    def preview(self, source: str, destination: str, options: ConvertOptions) -> dict[str, Any]:
        """The summary of a plan whose destination was looked at; nothing is written."""
        return dict(self._asked(("preview", source, destination, options)))

    def inspect(self, source: str, options: ConvertOptions, look: Look | None = None) -> bytes:
        """What a source is, as JSON; see ``workers.inspect``."""
        return bytes(self._asked(("inspect", source, options, look or Look())))

    def compare(self, a: Compared, b: Compared, atol: float, limits: ComparingLimits) -> dict[str, Any]:
        """Compare two sources as far as the limits let; see ``workers.compare``."""
        # It should end by itself before it is ended. Waiting for room and a process to start count: on Linux this
        # clock is the same in all processes.
        until = time.monotonic() + limits.time_s - min(SPARE_COMPARE_S, SPARE_COMPARE_SHARE * limits.time_s)
        try:
            return dict(self._asked(("compare", a, b, (atol, limits.most_bytes, until)), limits.time_s))
        except TookTooLong:
            setting, what = "UNSHARD_COMPARE_TIMEOUT_S", "the two sources could not be read and compared"
            raise TookTooLong(limits.time_s, setting, what) from None

    def check(self, source: str, options: ConvertOptions, limit_s: float) -> None:
        """See whether a source can be converted; raises what ``plan_source`` does."""
        self._asked(("check", source, options), limit_s)

    def made(self, source: str, destination: str, options: ConvertOptions, limit_s: float | None = None) -> str | None:
        """The fingerprint of this conversion's plan, when the destination holds its model already; else None."""
        found: str | None = self._asked(("made", source, destination, options), limit_s)
        return found

    def close(self) -> None:
        """End all processes."""
        with self._lock:
            self._closed = True
            children, self._idle = [*self._idle, *self._busy], []
        for child in children:
            child.kill()

    def _asked(self, request: tuple[Any, ...], limit_s: float | None = None) -> Any:
        """Do what somebody waits for: within its own time, and few at once; ``Overloaded`` else."""
        limit_s = self._limits.inspect_s if limit_s is None else max(0.0, limit_s)
        deadline = time.monotonic() + limit_s
        with self._room.entered(limit_s):
            left_s = deadline - time.monotonic()
            try:
                content = self._call(request, left_s, lambda: False)
            except TookTooLong as error:
                raise TookTooLong(error.limit_s, "UNSHARD_INSPECT_TIMEOUT_S") from None
        return pickle.loads(content)  # noqa: S301 - what our own process wrote

    def _call(self, request: tuple[Any, ...], limit_s: float, is_cancelled: Callable[[], bool]) -> bytes:
        child = self._take()
        try:
            answer = self._answer(child, request, limit_s, is_cancelled)
        except BaseException:
            self._drop(child)
            raise
        self._put_back(child)
        kind, content = answer
        if kind == "done":
            return bytes(content)
        raise content if kind == "failed" else UnexpectedFault(content)

    def _answer(
        self, child: Child, request: tuple[Any, ...], limit_s: float, is_cancelled: Callable[[], bool]
    ) -> tuple[str, Any]:
        deadline = time.monotonic() + limit_s
        try:
            child.channel.send((limit_s, self._limits.memory_bytes, self._limits.within, request))
            while not child.channel.waits(POLL_S):
                if self._closed or is_cancelled():
                    raise Cancelled("the conversion was stopped")
                if time.monotonic() > deadline:
                    raise TookTooLong(limit_s)
            kind, content = child.channel.receive()
            return kind, child.channel.receive_packed() if kind == "done" else content
        except (EOFError, OSError):
            status = child.status()
            if status == -signal.SIGXCPU:
                raise TookTooLong(limit_s) from None
            if self._closed:
                raise Cancelled("the conversion was stopped") from None
            raise _died(told_status(status)) from None

    def _take(self) -> Child:
        with self._lock:
            if self._closed:
                raise Cancelled("the service is being stopped")
            child = self._idle.pop() if self._idle else Child("service.jobs.planning:serve")
            self._busy.add(child)
            return child

    def _put_back(self, child: Child) -> None:
        if _resident_bytes(child.pid) > LARGEST_IDLE_BYTES:
            self._drop(child)
            return
        with self._lock:
            self._busy.discard(child)
            if not self._closed and len(self._idle) < MOST_IDLE:
                self._idle.append(child)
                return
        child.kill()

    def _drop(self, child: Child) -> None:
        with self._lock:
            self._busy.discard(child)
        child.kill()


def _died(how: str) -> InsufficientResources:
    return InsufficientResources(
        f"the process that read the source's metadata {how}",
        expected="enough memory for the metadata",
        found=how,
        hint="Most likely memory ran out: look at the service's log and the machine's memory, and give the service "
        "more; UNSHARD_PLANNING_MEMORY_BYTES limits such a process.",
    )


def _resident_bytes(pid: int) -> int:
    with suppress(OSError, ValueError, IndexError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()
    return 0


# --- in the process ----------------------------------------------------------------------------------------------
def serve(channel: Channel) -> None:
    """Answer one request after the other until the service's end of the channel closes."""
    configure()
    # When memory runs out, the system should end this process and not the service.
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("800")
    while True:
        limit_s, memory_bytes, within, request = channel.receive()
        _limit(limit_s * (COMPARING_THREADS if request[0] == "compare" else 1), memory_bytes)
        try:
            content = pickle.dumps(_do(within, *request), pickle.HIGHEST_PROTOCOL)
        except UnshardError as error:
            channel.send(("failed", error))
        except MemoryError:
            channel.send(("failed", _died("ran out of memory")))
            return
        except Exception as error:
            log.exception("unexpected fault while reading metadata")
            channel.send(("fault", type(error).__name__))
        else:
            channel.send(("done", None))
            channel.send_packed(content)


def _do(within: tuple[str, ...], kind: str, *arguments: Any) -> Any:
    if kind == "plan":
        return plan_source(*arguments, within=within)
    if kind == "preview":
        return plan(*arguments, within=within).summary()
    if kind == "check":
        plan_source(*arguments, within=within)
        return None
    if kind == "made":
        source, destination, options = arguments
        made = plan_source(source, options, within=within)
        return made.fingerprint if is_made(made, destination) else None
    if kind == "compare":
        a, b, (atol, most, until) = arguments
        return compare_sources(a, b, atol=atol, limits=CompareLimits(most, until), within=within).to_dict()
    return look_into(within, *arguments)


def _limit(processor_s: float, memory_bytes: int | None) -> None:
    """Limits of the operating system, which hold even where the interpreter doesn't answer and the service is gone."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    seconds = int(used.ru_utime + used.ru_stime + processor_s) + SPARE_CPU_S
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, resource.getrlimit(resource.RLIMIT_CPU)[1]))
    if memory_bytes is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, resource.getrlimit(resource.RLIMIT_DATA)[1]))
