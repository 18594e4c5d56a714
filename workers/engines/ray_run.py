"""One job on a cluster: a loop that keeps every merger supplied, within a window of bytes.

The window is reserved in the order of writing. What was lost with an actor or a node is done again; attempts are
counted per part, by us.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
import ray.exceptions

from workers.engines import Work
from workers.engines.ray_actors import JobAddress
from workers.engines.ray_pool import LOST, Pool, Worker
from workers.engines.ray_reasons import MEMORY_HINT, is_short_of_memory, reason_of
from workers.engines.ray_shared import prove_shared
from workers.errors import Cancelled, InsufficientResources, InternalError, StorageError, UnshardError
from workers.events import Retried
from workers.storage import open_folder

MOST_ATTEMPTS = 3
"""Times that a part is tried; one that loses its worker each time is the culprit itself."""

CALLS_PER_MERGER = 2
"""Calls that wait at a merger: one runs, one is at hand."""

POLL_S = 0.1
STOP_TIMEOUT_S = 10.0


@dataclass(slots=True)
class _Call:
    """A call that is under way."""

    kind: str
    """``make``, ``put``, ``open``, ``stream`` or ``finish``."""
    worker: Worker
    file: int
    part: int = -1
    payload: Any = None
    generation: int = 0


@dataclass(slots=True)
class _File:
    """An output file under way."""

    collector: Worker
    generation: int = 0
    """Counted up when its collector is lost: answers to older calls are void."""
    writers: dict[str, Worker] = field(default_factory=dict)
    made: dict[int, str] = field(default_factory=dict)
    """Part -> name of the merger that made it."""
    unsynced: int = 0


class RayRun:
    """One job on the pool."""

    def __init__(self, pool: Pool, work: Work, job: str) -> None:
        self._pool = pool
        self._work = work
        self.attempt = work.attempt
        self._recipe = work.recipe
        staging = open_folder(work.staging)
        self._is_local = staging.is_local
        self._root = staging
        # Mergers get only the reference: the recipe lies once on each node.
        self._address = JobAddress(job, (ray.put(work.recipe),), work.source, work.staging)
        self._calls: dict[Any, _Call] = {}
        self._queue: deque[int] = deque()
        self._attempts: dict[int, int] = {}
        self._reserved: dict[int, int] = {}
        self._files: dict[int, _File] = {}
        self._unopened = deque(work.pending)
        self._streams = len(pool.collectors) + 2
        self._budget = self._window_bytes()

    # --- the loop ------------------------------------------------------------------------------------------
    def run(self) -> None:
        """Make all pending files."""
        try:
            if self._is_local:
                prove_shared(self._pool, self._work.staging)
            while self._unopened or self._files:
                self._stop_if_cancelled()
                self._open_files()
                self._supply()
                self._collect()
                self._pool.refill()
        except BaseException:
            self._stop()
            raise
        finally:
            for worker in self._pool.mergers:
                worker.handle.forget.remote(self._address.job)

    def _stop_if_cancelled(self) -> None:
        if self._work.cancel.is_set():
            raise Cancelled("the conversion was stopped", hint="Run the same command again to resume it.")

    def doing(self) -> dict[str, str]:
        """Worker name -> what it makes."""
        files = self._work.files
        return {call.worker.name: files[call.file].path for call in list(self._calls.values()) if call.kind != "put"}

    def _open_files(self) -> None:
        """Open the next file when the parts of those before it are all handed out."""
        while self._unopened and not self._queue and len(self._files) < self._streams:
            self._work.before_file()
            number = self._unopened.popleft()
            collector = self._pool.collectors[number % len(self._pool.collectors)]
            self._files[number] = _File(collector)
            self._start_file(number)

    def _start_file(self, number: int) -> None:
        state, output = self._files[number], self._work.files[number]
        if self._is_local:
            ref = state.collector.handle.open.remote(self._work.staging, output)
            self._calls[ref] = _Call("open", state.collector, number, generation=state.generation)
            return
        ref = state.collector.handle.stream.remote(self._address, self._key(number, state), output)
        self._calls[ref] = _Call("stream", state.collector, number, generation=state.generation)
        self._queue.extend(range(output.first_part, output.stop_part))

    def _key(self, number: int, state: _File) -> tuple[str, int, int]:
        return self._address.job, number, state.generation

    def _supply(self) -> None:
        """Hand parts to mergers that have room, within the window, in the order of writing."""
        while self._queue:
            part = self._queue[0]
            merger = self._idle_merger(part)
            if merger is None or not self._reserve(part):
                return
            self._queue.popleft()
            self._make(part, merger)

    def _make(self, part: int, merger: Worker) -> None:
        file = int(self._recipe.parts.file[part])
        state, output = self._files[file], self._work.files[file]
        call = _Call("make", merger, file, part, generation=state.generation)
        if self._is_local:
            state.writers[merger.name] = merger
            self._calls[merger.handle.make_in_place.remote(self._address, part, output)] = call
            return
        span = int(self._recipe.parts.offset[part]), int(self._recipe.parts.length[part])
        result, call.payload = merger.handle.make_payload.options(num_returns=2).remote(self._address, part, span)
        self._calls[result] = call

    def _collect(self) -> None:
        """Take in what is ready."""
        if not self._calls:
            if self._queue:
                raise InternalError(f"{len(self._queue)} parts wait, but nothing is under way")
            return
        ready, _ = ray.wait(list(self._calls), num_returns=len(self._calls), timeout=0)
        if not ready:
            ready, _ = ray.wait(list(self._calls), num_returns=1, timeout=POLL_S)
        for ref in ready:
            call = self._calls.pop(ref, None)
            if call is None:
                continue
            try:
                answer = ray.get(ref)
            except LOST as error:
                self._lost(call, error)
            except ray.exceptions.RayTaskError as error:
                self._failed(call, error)
            else:
                self._answered(call, answer)

    def _answered(self, call: _Call, answer: Any) -> None:
        state = self._files.get(call.file)
        if state is None or call.generation != state.generation:
            return
        if call.kind == "open":
            output = self._work.files[call.file]
            self._queue.extend(range(output.first_part, output.stop_part))
            if output.first_part == output.stop_part:
                self._complete(call.file, None)
        elif call.kind == "make":
            self._made(call, state, answer)
        elif call.kind == "put":
            self._reserved.pop(call.part, None)
            self._work.collection.part_written(call.part)
        elif call.kind == "finish":
            state.unsynced -= 1
            if not state.unsynced:
                self._complete(call.file, None)
        else:
            self._complete(call.file, answer)

    def _made(self, call: _Call, state: _File, result: Any) -> None:
        state.made[call.part] = call.worker.name
        if not self._is_local:
            self._work.collection.part_merged(result, call.worker.name)
            ref = state.collector.handle.put.remote(self._key(call.file, state), call.part, (call.payload,))
            self._calls[ref] = _Call("put", state.collector, call.file, call.part, generation=state.generation)
        else:
            self._reserved.pop(call.part, None)
            if self._work.collection.part_done(result, call.worker.name):
                self._finish_writers(call.file, state)

    def _finish_writers(self, file: int, state: _File) -> None:
        state.unsynced = len(state.writers)
        for writer in state.writers.values():
            ref = writer.handle.finish.remote(self._address.job, self._work.files[file].path)
            self._calls[ref] = _Call("finish", writer, file, generation=state.generation)

    def _complete(self, file: int, etag: str | None) -> None:
        del self._files[file]
        # The stream's own answer may overtake those of its last parts.
        for part in range(self._work.files[file].first_part, self._work.files[file].stop_part):
            self._reserved.pop(part, None)
        self._work.file_finished(file, etag)

    # --- what goes wrong -----------------------------------------------------------------------------------
    def _failed(self, call: _Call, error: ray.exceptions.RayTaskError) -> None:
        """An actor raised: our own errors are the user's, lost objects are made again, others are our fault."""
        state = self._files.get(call.file)
        if state is None or call.generation != state.generation:
            return
        cause = error.cause
        if isinstance(cause, LOST) or (isinstance(cause, Cancelled) and not self._work.cancel.is_set()):
            self._lost(call, cause)
        elif isinstance(cause, UnshardError):
            raise cause
        elif isinstance(cause, MemoryError):
            raise InsufficientResources(
                f"worker {call.worker.name} ran out of memory while it made {self._work.files[call.file].path}",
                file=self._work.files[call.file].path,
                expected=f"{self._work.worker_bytes} bytes for each worker",
                hint=MEMORY_HINT,
            ) from error
        else:
            raise InternalError(f"a worker failed: {type(cause).__name__}: {cause}") from error

    def _lost(self, call: _Call, reason: BaseException) -> None:
        state = self._files.get(call.file)
        if state is None or call.generation != state.generation:
            return
        if call.kind == "make":
            self._lost_merger(call.worker)
            self._again([call.part], reason)
        elif call.kind == "finish":
            self._lost_merger(call.worker)
            self._restart_file(call.file, state, reason, replace=False)
        elif call.kind == "put" and _answers(call.worker):
            state.made.pop(call.part, None)
            self._work.collection.forget([call.part])
            self._again([call.part], reason)
        else:
            self._restart_file(call.file, state, reason, replace=True)

    def _lost_merger(self, dead: Worker) -> None:
        """Replace a merger; what it wrote to open files may not have reached the disk of a lost node."""
        if _answers(dead):
            return
        self._pool.replace_merger(dead)
        for state in self._files.values():
            state.writers.pop(dead.name, None)
            if self._is_local:
                lost = [part for part, name in state.made.items() if name == dead.name]
                for part in lost:
                    del state.made[part]
                if lost and state.unsynced:  # it was being finished: those answers are void now
                    state.generation, state.unsynced = state.generation + 1, 0
                self._work.collection.forget(lost)
                self._queue.extendleft(reversed(lost))

    def _restart_file(self, file: int, state: _File, reason: BaseException, *, replace: bool) -> None:
        """Make a file from its first byte again, with another collector where its own is gone."""
        output = self._work.files[file]
        parts = range(output.first_part, output.stop_part)
        self._work.collection.forget(state.made)
        self._queue = deque(part for part in self._queue if part not in parts)
        for part in parts:
            self._reserved.pop(part, None)
        key = -1 - file
        self._attempts[key] = self._attempts.get(key, 0) + 1
        if self._attempts[key] >= MOST_ATTEMPTS:
            raise StorageError(
                f"{output.path} could not be written: its collector was lost {self._attempts[key]} times: "
                f"{reason_of(reason)}",
                file=output.path,
                found=reason_of(reason),
                hint=MEMORY_HINT if is_short_of_memory(reason) else "Look at the logs of the cluster's nodes.",
            )
        self._work.collection.tell(Retried(output.first_part, self._attempts[key], reason_of(reason)))
        collector = self._pool.replace_collector(state.collector) if replace else state.collector
        self._files[file] = _File(collector, generation=state.generation + 1)
        waiting, self._queue = self._queue, deque()
        self._start_file(file)
        self._queue.extend(waiting)

    def _again(self, parts: Sequence[int], reason: BaseException) -> None:
        for part in reversed(parts):
            self._attempts[part] = self._attempts.get(part, 0) + 1
            if self._attempts[part] >= MOST_ATTEMPTS:
                first = int(self._recipe.parts.first_segment[part])
                name = self._recipe.targets[int(self._recipe.parts.target[first])].name
                raise InsufficientResources(
                    f"the part that holds tensor {name} lost its worker {self._attempts[part]} times: "
                    f"{reason_of(reason)}",
                    file=self._work.files[int(self._recipe.parts.file[part])].path,
                    tensor=name,
                    expected=f"{self._work.worker_bytes} bytes of memory for each worker, beside Python's own",
                    found=reason_of(reason),
                    hint=MEMORY_HINT if is_short_of_memory(reason) else "Look at the logs of the cluster's nodes.",
                )
            self._work.collection.tell(Retried(part, self._attempts[part], reason_of(reason)))
            self._queue.appendleft(part)

    def _stop(self) -> None:
        """Stop what is under way, here and in the actors."""
        for worker in self._pool.mergers:
            worker.handle.cancel.options(concurrency_group="control").remote(self._address.job)
        for worker in self._pool.collectors:
            worker.handle.abort.remote(self._address.job)
        if self._calls:
            ray.wait(list(self._calls), num_returns=len(self._calls), timeout=STOP_TIMEOUT_S)

    # --- the window ----------------------------------------------------------------------------------------
    def _window_bytes(self) -> int:
        if self._is_local:
            return self._work.memory_bytes
        largest = max((self._work.files[number].size_bytes for number in self._work.pending), default=0)
        uploader = self._root.stream_window_bytes(largest)
        self._streams = max(1, min(self._streams, self._work.memory_bytes // 2 // max(1, uploader)))
        left = self._work.memory_bytes - self._streams * uploader
        return max(int(self._recipe.parts.length.max(initial=1)), min(left, self._pool.store_budget_bytes()))

    def _reserve(self, part: int) -> bool:
        if part in self._reserved:
            return True
        size = int(self._recipe.parts.length[part])
        if self._reserved and sum(self._reserved.values()) + size > self._budget:
            return False
        self._reserved[part] = size
        return True

    def _idle_merger(self, part: int) -> Worker | None:
        """The merger with the least to do, on the collector's node if there is a choice."""
        busy: dict[str, int] = {}
        for call in self._calls.values():
            if call.kind == "make":
                busy[call.worker.name] = busy.get(call.worker.name, 0) + 1
        node = self._files[int(self._recipe.parts.file[part])].collector.node
        free = [worker for worker in self._pool.mergers if busy.get(worker.name, 0) < CALLS_PER_MERGER]
        return min(free, key=lambda worker: (busy.get(worker.name, 0), worker.node != node), default=None)


def _answers(worker: Worker) -> bool:
    """Whether an actor still lives: a lost object alone is no reason to replace it."""
    ready = worker.handle.ready
    if worker.name.startswith("merger"):
        ready = ready.options(concurrency_group="control")  # a merger's own calls may be busy with a part
    try:
        ray.get(ready.remote(), timeout=5)
    except (*LOST, ray.exceptions.GetTimeoutError):
        return False
    return True
