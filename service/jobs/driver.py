"""The process that drives conversions on a Ray cluster, apart from the service, which outlives it.

Ray ends a process that has lost its cluster (after a minute without the head) and may keep its threads waiting until
then. So the service never loads Ray: it starts this process, hands it plans, and hears events and outcomes from it.
When the cluster is lost, this process says so and ends with all that it started; the service begins a new one.
"""

from __future__ import annotations

import logging
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from service.jobs.child import Channel
from service.jobs.parts import pack_rows, unpack_rows
from service.logs import configure, logged_as
from workers import events
from workers.convert import run_plan
from workers.errors import Cancelled, InputError, UnshardError

if TYPE_CHECKING:
    from workers.engines.ray_engine import RayEngine

STATE_EVERY_S = 1.0
"""How often the service is told how the cluster is: it takes longer silence for a process that hangs."""

LOOK_EVERY_S = 3.0
ANSWER_WITHIN_S = 15.0
"""How long the cluster may take to answer before it counts as lost."""

START_WITHIN_S = 300.0
END_WITHIN_S = 10.0

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DriverOptions:
    """Where the cluster is, and what to place on it."""

    address: str | None = None
    mergers: int | None = None
    num_cpus: float = 1.0
    num_gpus: float = 0.0


@dataclass(frozen=True, slots=True)
class Order:
    """A conversion to carry out: a pickled plan, and where its result goes."""

    plan: bytes
    destination: str
    attempt: str


class PackedTable:
    """A plan's table on its way from this process to the database, packed once and for all."""

    def __init__(self, packed: bytes) -> None:
        self.packed = packed

    def __call__(self) -> Iterator[dict[str, Any]]:
        return unpack_rows(self.packed)


@dataclass(slots=True)
class _Run:
    """A conversion under way."""

    cancel: threading.Event = field(default_factory=threading.Event)
    answered: threading.Event = field(default_factory=threading.Event)
    refusal: BaseException | None = None


class Driver:
    """Carries orders out, each in a thread."""

    def __init__(self, channel: Channel, options: DriverOptions) -> None:
        self._channel = channel
        self._options = options
        self._engine: RayEngine | None = None
        self._state = ("starting", "waiting for the cluster")
        self._runs: dict[int, _Run] = {}
        self._ended = threading.Event()

    def serve(self) -> None:
        """Work until the service's end of the channel closes."""
        for work in (self._tell, self._keep_cluster):
            threading.Thread(target=work, name=work.__name__, daemon=True).start()
        try:
            while True:
                kind, number, content = self._channel.receive()
                if kind == "run":
                    self._runs[number] = _Run()
                    threading.Thread(target=self._run, args=(number, content), daemon=True).start()
                elif (run := self._runs.get(number)) is None:
                    continue
                elif kind == "cancel":
                    run.cancel.set()
                else:
                    run.refusal = content
                    run.answered.set()
        finally:
            self._end()

    # --- orders ---------------------------------------------------------------------------------------------
    def _run(self, number: int, order: Order) -> None:
        with logged_as(order.attempt.split("-")[0]):
            try:
                answer = ("done", number, self._convert(number, order))
            except UnshardError as error:
                answer = ("failed", number, error)
                if not isinstance(error, InputError | Cancelled):
                    self._require_cluster()
            except Exception as error:
                log.exception("unexpected fault in a conversion")
                answer = ("fault", number, type(error).__name__)
                self._require_cluster()
            self._send(answer)
            del self._runs[number]

    def _convert(self, number: int, order: Order) -> Any:
        run = self._runs[number]
        made = pickle.loads(order.plan)  # noqa: S301 - what our own process wrote

        def observe(event: events.Event) -> None:
            match event:
                case events.Planned(summary, table):
                    self._send(("event", number, events.Planned(summary, PackedTable(pack_rows(table())))))
                case events.Committed():
                    pass  # the outcome says it
                case _:
                    self._send(("event", number, event))

        def may_commit() -> None:
            run.answered.clear()
            self._send(("may_commit", number, None))
            run.answered.wait()
            if run.refusal is not None:
                raise run.refusal

        return run_plan(
            made,
            order.destination,
            engine=self._engine,
            observer=observe,
            cancel=run.cancel,
            attempt=order.attempt,
            may_commit=may_commit,
        )

    # --- the cluster ----------------------------------------------------------------------------------------
    def _keep_cluster(self) -> None:
        # Linux kills an embedded cluster with the thread that started it, so this one stays to the end.
        try:
            self._connect()
        except UnshardError as error:
            self._lost(f"{error.message}. {error.hint}".strip())
        except Exception:
            log.exception("Ray did not start")
            self._lost("Ray did not start: the service's log has the details")
        self._state = ("ok", self._options.address or "embedded")
        while not self._ended.wait(LOOK_EVERY_S):
            self._require_cluster()
        threading.Event().wait()

    def _connect(self) -> None:
        from workers.engines.ray_engine import RayEngine  # noqa: PLC0415 - takes seconds to import
        from workers.engines.ray_pool import PoolOptions  # noqa: PLC0415

        options = self._options
        engine = RayEngine(PoolOptions(options.address, options.mergers, options.num_cpus, options.num_gpus))
        engine.start()
        self._engine = engine

    def _require_cluster(self) -> None:
        """End this process when the cluster is lost: what its jobs say from then on is of no worth."""
        engine = self._engine
        if engine is not None and (fault := _within(engine.check, ANSWER_WITHIN_S)) is not None:
            self._lost(fault)

    def _lost(self, why: str) -> None:
        with suppress(OSError):
            self._channel.send(("state", "failed", why, None))
        _end_group()

    def _tell(self) -> None:
        described: dict[str, Any] | None = None
        began = time.monotonic()
        while not self._ended.is_set():
            engine = self._engine
            if engine is not None and self._state[0] == "ok":
                described = engine.overview()
            elif time.monotonic() - began > START_WITHIN_S:
                self._lost(f"the Ray cluster did not take a connection within {START_WITHIN_S:g} s")
            self._send(("state", *self._state, described))
            self._ended.wait(STATE_EVERY_S)

    def _send(self, message: tuple[Any, ...]) -> None:
        with suppress(OSError):  # the service is gone, which the reading thread notices
            self._channel.send(message)

    def _end(self) -> None:
        """Stop what runs and let go of the cluster; with the service gone nobody waits for more."""
        for run in list(self._runs.values()):
            run.cancel.set()
            run.refusal = Cancelled("the service is gone")
            run.answered.set()
        deadline = time.monotonic() + END_WITHIN_S
        while self._runs and time.monotonic() < deadline:
            time.sleep(0.02)
        self._ended.set()
        if self._engine is not None:
            _within(self._engine.close, END_WITHIN_S)
        _end_group()


def serve(channel: Channel) -> None:
    """The main program of the process; the first message is its options."""
    configure()
    Driver(channel, channel.receive()).serve()


def _within(work: Callable[[], Any], timeout_s: float) -> Any:
    """What ``work`` returns; of one that fails or takes too long, in words, how it did."""
    outcome: list[Any] = []

    def attempt() -> None:
        try:
            outcome.append(work())
        except Exception as error:  # noqa: BLE001 - whatever Ray raises, the cluster doesn't work
            outcome.append(f"the Ray cluster failed: {(str(error).splitlines() or [''])[0]} ({type(error).__name__})")

    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    thread.join(timeout_s)
    return outcome[0] if outcome else f"the Ray cluster did not answer within {timeout_s:g} s"


def _end_group() -> None:
    """End this process with all that it started, Ray's processes of an embedded cluster among them."""
    logging.shutdown()
    os.killpg(0, signal.SIGKILL)
