"""The engine of one process: a few threads, no start-up cost. The heavy work releases the interpreter's lock."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator

from workers.arithmetic import NumpyArithmetic
from workers.collect import LocalOutput, LocalSink, PartSink, StreamOutput, Window
from workers.engines import Work
from workers.errors import Cancelled, StorageError
from workers.merge import Merger
from workers.storage import Folder, open_folder

MOST_WORKERS = 16
FETCHED_PART = 4
"""One part in so many of the memory may be held by what workers have fetched: uploads need the rest."""

OPEN_STREAMS = 3
"""Uploads at a time: while one waits for the store's last answer, the next ones go on."""


class ThreadsEngine:
    """Makes parts in threads of this process."""

    name = "threads"

    def __init__(self, workers: int | None = None) -> None:
        self._workers = workers

    def run(self, work: Work) -> None:
        """See ``Engine.run``."""
        source, staging = open_folder(work.source), open_folder(work.staging)
        fetched = 0 if source.is_local else work.fetched_bytes
        try:
            if staging.is_local:
                _LocalRun(work, source, staging).run(self._count(work, work.worker_bytes + fetched))
            else:
                workers = self._count(work, max(_largest_part(work), FETCHED_PART * fetched))
                _StreamRun(work, source, staging, fetched * workers).run(workers)
        finally:
            source.close()
            staging.close()

    def _count(self, work: Work, worker_bytes: int) -> int:
        """Workers: one a core, fewer where the memory budget holds fewer."""
        wanted = self._workers or min(MOST_WORKERS, max(2, len(os.sched_getaffinity(0))))
        return max(1, min(wanted, work.memory_bytes // max(1, worker_bytes)))


def _largest_part(work: Work) -> int:
    return int(work.recipe.parts.length.max(initial=1))


class _Run:
    """Threads that take parts in order until there are none, one of them fails or the work is cancelled."""

    def __init__(self, work: Work, source: Folder) -> None:
        self.work = work
        self._source = source
        self._parts = self._next_parts()
        self._take_lock = threading.Lock()
        self._failures: list[BaseException] = []
        self._stop = threading.Event()

    def run(self, workers: int) -> None:
        """Start the threads, wait for all of them, raise what went wrong first."""
        threads = [
            threading.Thread(target=self._guarded, args=(self._worker, f"worker-{n}"), name=f"unshard-worker-{n}")
            for n in range(workers)
        ]
        watcher = threading.Thread(target=self._watch_cancel, name="unshard-cancel", daemon=True)
        watcher.start()
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            self.finish()
        except BaseException as error:  # an interrupt in this thread: nothing may go on behind its back
            self.fail(error)
            for thread in threads:
                if thread.ident is not None:
                    thread.join()
            self.finish()
            raise
        finally:
            self._stop.set()
        if self._failures:
            raise self._failures[0]

    def finish(self) -> None:
        """Wait for or put an end to what is open after the last worker has ended."""

    def stopped(self) -> None:
        """The run is failing or cancelled: wake whoever waits."""

    def make(self, merger: Merger, file: int, part: int, worker: str) -> None:
        """Make one part and put it where it belongs."""
        raise NotImplementedError

    def before_part(self, file: int, part: int) -> None:
        """Called in the order of writing, before a part is handed to a worker; may wait."""

    def fail(self, error: BaseException) -> None:
        """Note what went wrong; the first one is what the user sees."""
        self._failures.append(error)
        self._stop.set()
        self.stopped()

    @property
    def is_stopping(self) -> bool:
        return self._stop.is_set() or self.work.cancel.is_set()

    def stop_if_cancelled(self) -> None:
        """Raise in a worker when the run is over for whatever reason."""
        if self.is_stopping:
            raise Cancelled("the conversion was stopped", hint="Run the same command again to resume it.")

    def _next_parts(self) -> Iterator[tuple[int, int]]:
        for number in self.work.pending:
            file = self.work.files[number]
            if file.first_part == file.stop_part:
                self.make_empty(number)
            for part in range(file.first_part, file.stop_part):
                yield number, part

    def make_empty(self, file: int) -> None:
        """Make a file whose tensors have no elements."""
        raise NotImplementedError

    def _take(self) -> tuple[int, int] | None:
        with self._take_lock:
            if self.work.cancel.is_set():
                raise Cancelled("the conversion was stopped", hint="Run the same command again to resume it.")
            if self._stop.is_set():
                return None
            taken = next(self._parts, None)
            if taken is not None:
                self.before_part(*taken)
            return taken

    def _worker(self, name: str) -> None:
        merger = Merger(self.work.recipe, self._source, NumpyArithmetic())
        while (taken := self._take()) is not None:
            self.make(merger, *taken, name)

    def _guarded(self, target: Callable[..., None], *arguments: object) -> None:
        try:
            target(*arguments)
        except BaseException as error:  # noqa: BLE001 - handed to the thread that waits
            self.fail(error)

    def _watch_cancel(self) -> None:
        while not self._stop.wait(0.1):
            if self.work.cancel.is_set():
                self.stopped()


class _LocalRun(_Run):
    """Mergers write blocks in place."""

    def __init__(self, work: Work, source: Folder, staging: Folder) -> None:
        super().__init__(work, source)
        self._root = staging.local_path()
        self._outputs: dict[int, LocalOutput] = {}
        self._sinks = threading.local()

    def before_part(self, file: int, part: int) -> None:
        if part == self.work.files[file].first_part:
            self._outputs[file] = self._open(file)

    def make(self, merger: Merger, file: int, part: int, worker: str) -> None:
        sink = self._sinks.__dict__.setdefault("sink", _CancellableSink(self))
        sink.output = self._outputs[file]
        result = merger.make(part, sink)
        parts = self.work.recipe.parts
        sink.output.begin_writeback(int(parts.offset[part]), int(parts.length[part]))
        if self.work.collection.part_done(result, worker):
            self._outputs.pop(file).close(sync=True)
            self.work.file_finished(file, None)

    def make_empty(self, file: int) -> None:
        self._open(file).close(sync=True)
        self.work.file_finished(file, None)

    def finish(self) -> None:
        while self._outputs:  # each once, also when an interrupt makes this begin anew
            self._outputs.popitem()[1].close(sync=False)

    def _open(self, file: int) -> LocalOutput:
        if self._root is None:
            raise StorageError("the destination is not on a file system")
        return LocalOutput(self._root, self.work.files[file])


class _CancellableSink(LocalSink):
    """Stops between blocks, since a part of a slow source can take long."""

    def __init__(self, run: _Run) -> None:
        super().__init__()
        self._run = run

    def lend(self, offset: int, length: int) -> memoryview:
        self._run.stop_if_cancelled()
        return super().lend(offset, length)


class _CancellablePart(PartSink):
    def __init__(self, run: _Run, span: tuple[int, int]) -> None:
        super().__init__(*span)
        self._run = run

    def lend(self, offset: int, length: int) -> memoryview:
        self._run.stop_if_cancelled()
        return super().lend(offset, length)


class _StreamRun(_Run):
    """Finished parts wait in a window until the upload of their file takes them."""

    def __init__(self, work: Work, source: Folder, staging: Folder, fetched_bytes: int) -> None:
        super().__init__(work, source)
        self._staging = staging
        largest_file = max((work.files[number].size_bytes for number in work.pending), default=0)
        uploader = staging.stream_window_bytes(largest_file)
        self._streams = max(1, min(OPEN_STREAMS, work.memory_bytes // 2 // max(1, uploader)))
        self._window = Window(max(_largest_part(work), work.memory_bytes - self._streams * uploader - fetched_bytes))
        self._open_slots = threading.Semaphore(self._streams)
        self._outputs: dict[int, StreamOutput] = {}
        self._uploads: list[threading.Thread] = []

    def before_part(self, file: int, part: int) -> None:
        if part == self.work.files[file].first_part:
            self._open(file)
        self._window.reserve(int(self.work.recipe.parts.length[part]))

    def make(self, merger: Merger, file: int, part: int, worker: str) -> None:
        parts = self.work.recipe.parts
        sink = _CancellablePart(self, (int(parts.offset[part]), int(parts.length[part])))
        result = merger.make(part, sink)
        self.work.collection.part_merged(result, worker)
        self._outputs[file].put(part, sink.payload.data)

    def make_empty(self, file: int) -> None:
        self._open(file)

    def stopped(self) -> None:
        self._window.close()
        error = self._failures[0] if self._failures else Cancelled("the conversion was stopped")
        for output in list(self._outputs.values()):
            output.fail(error)

    def finish(self) -> None:
        for upload in self._uploads:
            upload.join()

    def _open(self, file: int) -> None:
        while not self._open_slots.acquire(timeout=0.1):
            if self.is_stopping:
                raise Cancelled("the conversion was stopped")
        self.work.before_file()
        output = StreamOutput(self.work.files[file], self._uploaded)
        self._outputs[file] = output
        upload = threading.Thread(
            target=self._guarded, args=(self._upload, file, output), name=f"unshard-upload-{file}"
        )
        self._uploads.append(upload)
        upload.start()

    def _upload(self, file: int, output: StreamOutput) -> None:
        try:
            described = self.work.files[file]
            entry = self._staging.write_stream(described.path, output.chunks(), described.size_bytes)
            self.work.file_finished(file, entry.etag)
        finally:
            self._open_slots.release()

    def _uploaded(self, part: int) -> None:
        self._window.release(int(self.work.recipe.parts.length[part]))
        self.work.collection.part_written(part)
