"""The actors of the Ray engine: the plain mergers and collectors, each in a process of its own.

They hold no credentials: they are given addresses and open stores themselves. What they return is small, except
the parts on their way to an object store, which travel as uint8 arrays through Ray's object store.
"""

from __future__ import annotations

import asyncio
import os
from collections import OrderedDict, defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray
from numpy.typing import NDArray

from workers.arithmetic import Arithmetic, NumpyArithmetic
from workers.collect import LocalOutput, LocalSink, PartSink, StreamOutput
from workers.errors import Cancelled, StorageError
from workers.layout import OutputFile
from workers.merge import Merger, PartResult, Recipe
from workers.storage import Folder, FolderAddress, open_folder

JOBS_REMEMBERED = 4
"""Recipes that an actor keeps at hand: jobs that share it take turns."""


StreamKey = tuple[str, int, int]
"""Job, number of the output file, and how often its stream was begun anew."""


@dataclass(frozen=True, slots=True)
class JobAddress:
    """What an actor needs to work on a job; the recipe itself lies in Ray's object store."""

    job: str
    recipe: tuple[Any]
    """The recipe's ObjectRef, in a tuple so that Ray passes the reference and not its value."""
    source: FolderAddress
    staging: FolderAddress


class MergerActor:
    """A merger that many jobs use in turn. ``control`` calls run beside ``work`` calls."""

    def __init__(self, use_gpu: bool) -> None:  # noqa: FBT001 - Ray passes positions
        self._arithmetic: Arithmetic = NumpyArithmetic()
        if use_gpu:
            from workers.engines.gpu import TorchArithmetic  # noqa: PLC0415 - imports torch, which costs seconds

            self._arithmetic = TorchArithmetic.on_gpu()
        self._jobs: OrderedDict[str, tuple[Merger, Folder, Recipe]] = OrderedDict()
        self._outputs: dict[str, LocalOutput] = {}
        self._cancelled: set[str] = set()

    def ready(self) -> tuple[str, int]:
        """The node that this actor runs on, and its process id there."""
        return str(ray.get_runtime_context().get_node_id()), os.getpid()

    def process(self) -> int:
        """The process id, for people who look for it."""
        return os.getpid()

    def make_in_place(self, address: JobAddress, part: int, output: OutputFile) -> PartResult:
        """Make a part and write it into its place in a file that the collector has opened."""
        sink = _InPlaceSink(self, address.job)
        sink.output = self._output(address, output)
        result = self._merger(address).make(part, sink)
        parts = self._recipe(address).parts
        sink.output.begin_writeback(int(parts.offset[part]), int(parts.length[part]))
        return result

    def make_payload(self, address: JobAddress, part: int, span: tuple[int, int]) -> tuple[PartResult, NDArray[Any]]:
        """Make a part of ``span`` (offset, length) in memory."""
        sink = _PayloadSink(self, address.job, span)
        result = self._merger(address).make(part, sink)
        return result, sink.payload

    def sees(self, address: FolderAddress, name: str, content: bytes) -> bool:
        """Whether a file of that content is at an address, seen from this node."""
        return _sees(address, name, content)

    def finish(self, job: str, path: str) -> None:
        """Make durable what this actor wrote to a file, and close it."""
        output = self._outputs.pop(f"{job}\t{path}", None)
        if output is not None:
            output.close(sync=True)

    def cancel(self, job: str) -> None:
        """Stop work on a job at the next block."""
        self._cancelled.add(job)

    def forget(self, job: str) -> None:
        """Drop what is kept of a job."""
        merger = self._jobs.pop(job, None)
        if merger is not None:
            merger[1].close()
        for path in [path for path in self._outputs if path.startswith(f"{job}\t")]:
            self._outputs.pop(path).close(sync=False)

    def is_cancelled(self, job: str) -> bool:
        """Whether ``cancel`` was called for a job."""
        return job in self._cancelled

    def _merger(self, address: JobAddress) -> Merger:
        if address.job not in self._jobs:
            recipe: Recipe = ray.get(address.recipe[0])
            folder = open_folder(address.source)
            self._jobs[address.job] = Merger(recipe, folder, self._arithmetic), folder, recipe
            while len(self._jobs) > JOBS_REMEMBERED:
                self._jobs.popitem(last=False)[1][1].close()
        self._jobs.move_to_end(address.job)
        return self._jobs[address.job][0]

    def _recipe(self, address: JobAddress) -> Recipe:
        return self._jobs[address.job][2]

    def _output(self, address: JobAddress, output: OutputFile) -> LocalOutput:
        key = f"{address.job}\t{output.path}"
        if key not in self._outputs:
            root = open_folder(address.staging).local_path()
            if root is None:
                raise StorageError(f"{address.staging.url} is not on a file system")
            self._outputs[key] = LocalOutput.join(root, output)
        return self._outputs[key]


class _InPlaceSink(LocalSink):
    def __init__(self, actor: MergerActor, job: str) -> None:
        super().__init__()
        self._actor, self._job = actor, job

    def lend(self, offset: int, length: int) -> memoryview:
        if self._actor.is_cancelled(self._job):
            raise Cancelled("stopped")
        return super().lend(offset, length)


class _PayloadSink(PartSink):
    def __init__(self, actor: MergerActor, job: str, span: tuple[int, int]) -> None:
        super().__init__(*span)
        self._actor, self._job = actor, job

    def lend(self, offset: int, length: int) -> memoryview:
        if self._actor.is_cancelled(self._job):
            raise Cancelled("stopped")
        return super().lend(offset, length)


class CollectorActor:
    """Owns output files: opens and completes those on a file system, streams those of an object store."""

    def __init__(self) -> None:
        self._streams: dict[StreamKey, tuple[StreamOutput, dict[int, asyncio.Event]]] = {}
        self._opened: defaultdict[StreamKey, asyncio.Event] = defaultdict(asyncio.Event)
        self._uploads = ThreadPoolExecutor(max_workers=32, thread_name_prefix="unshard-upload")

    async def ready(self) -> tuple[str, int]:
        """The node that this actor runs on, and its process id there."""
        return str(ray.get_runtime_context().get_node_id()), os.getpid()

    async def process(self) -> int:
        """The process id, for people who look for it."""
        return os.getpid()

    async def sees(self, address: FolderAddress, name: str, content: bytes) -> bool:
        """Whether a file of that content is at an address, seen from this node."""
        return bool(await self._in_thread(lambda: _sees(address, name, content)))

    async def open(self, address: FolderAddress, output: OutputFile) -> None:
        """Make an output file of its final size on a file system and write its header."""
        root = open_folder(address).local_path()
        if root is None:
            raise StorageError(f"{address.url} is not on a file system")
        await self._in_thread(lambda: LocalOutput(root, output).close(sync=True))

    async def stream(self, address: JobAddress, key: StreamKey, output: OutputFile) -> str | None:
        """Upload a file, part after part as they are ``put``; its ETag."""
        loop = asyncio.get_running_loop()
        consumed = {part: asyncio.Event() for part in range(output.first_part, output.stop_part)}

        def done(part: int) -> None:
            loop.call_soon_threadsafe(consumed[part].set)

        stream = StreamOutput(output, done)
        self._streams[key] = stream, consumed
        self._opened[key].set()

        def upload() -> str | None:
            folder = open_folder(address.staging)
            try:
                return folder.write_stream(output.path, stream.chunks(), output.size_bytes).etag
            finally:
                folder.close()

        try:
            etag: str | None = await self._in_thread(upload)
            return etag
        finally:
            del self._streams[key]
            for event in consumed.values():
                event.set()

    async def put(self, key: StreamKey, part: int, payload: tuple[Any]) -> None:
        """Hand a part to its stream; returns when the upload has taken it, or has ended without it."""
        await self._opened[key].wait()  # calls may overtake each other
        if key not in self._streams:
            return  # the stream has failed, which its own call tells
        stream, consumed = self._streams[key]
        data: NDArray[np.uint8] = await payload[0]
        stream.put(part, data.data)
        del data, payload
        await consumed[part].wait()

    async def abort(self, job: str) -> None:
        """Stop all streams of a job; nothing of them appears."""
        for key, (stream, _) in list(self._streams.items()):
            if key[0] == job:
                stream.fail(Cancelled("stopped"))
        for key in [key for key in self._opened if key[0] == job and key not in self._streams]:
            self._opened.pop(key).set()

    async def _in_thread(self, work: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._uploads, work)


def _sees(address: FolderAddress, name: str, content: bytes) -> bool:
    folder = open_folder(address)
    try:
        entry = folder.stat(name)
        return entry is not None and folder.read(name) == content
    finally:
        folder.close()
