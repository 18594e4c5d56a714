"""A folder that is a prefix of an object store (S3, GCS, Azure or a named store in memory), through obstore.

Large ranges are fetched as concurrent ranged GETs; a large file is one multipart upload. obstore has no way to
list or abort the uploads that a killed process leaves open: their parts are invisible but paid for until a
lifecycle rule of the bucket ("abort incomplete multipart uploads") removes them.

A conditional write whose answer is lost on the network may be repeated by the client and then find its own first
attempt: a writer that must know who won reads the file back and looks for its own mark.
"""

from __future__ import annotations

import asyncio
import builtins
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from obstore.exceptions import AlreadyExistsError, BaseError, PreconditionError
from obstore.store import MemoryStore

from workers.errors import CorruptFile, StorageError
from workers.storage.addresses import FolderAddress, Location, check_file_path, check_path, is_portable
from workers.storage.folder import (
    AlreadyExists,
    Buffer,
    FileEntry,
    Folder,
    Source,
    UsageMeter,
    VersionMismatch,
    at_most,
    exactly,
)
from workers.storage.object_errors import ErrorTeller, is_out_of_range
from workers.storage.profiles import Profile, environment_secrets
from workers.storage.ranges import Span, coalesce, cut, pick, scatter
from workers.storage.stores import build_store

if TYPE_CHECKING:
    from obstore import GetOptions, ListResult, ObjectMeta, PutMode
    from obstore.store import ObjectStore

MiB = 2**20
GET_BYTES = 8 * MiB
MIN_PART_BYTES = 16 * MiB
MAX_PARTS = 9_000  # stores allow 10,000 parts of one upload
_MAX_GAP_BYTES = MiB  # what a connection transfers during about one round trip to a store
_LIST_PAGE = 1_000
_LEVEL_S = 30.0
"""For what lies directly in a folder: some hundred thousand names at the pace of S3."""

_T = TypeVar("_T")

_CONCURRENT_GETS = 16

_memory_stores: dict[str, MemoryStore] = {}
_memory_lock = threading.Lock()


def part_bytes(size_bytes: int) -> int:
    """The size of the parts in which ``write_stream`` uploads a file of this size."""
    return max(MIN_PART_BYTES, -(-size_bytes // MAX_PARTS))


@dataclass(frozen=True, slots=True)
class _Got:
    data: memoryview
    file_bytes: int
    etag: str | None


@dataclass(frozen=True, slots=True)
class Connection:
    """What a folder and its subfolders share."""

    store: ObjectStore
    teller: ErrorTeller
    upload_concurrency: int
    by_generation: bool = False
    """Whether a version is replaced by its generation number (GCS) and not by its ETag."""
    fetchers: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(_CONCURRENT_GETS, thread_name_prefix="unshard-get")
    )
    """Its threads only wait for the network, and none of its tasks submits another one."""

    def together(self, tasks: Sequence[Callable[[], _T]]) -> list[_T]:
        """Run tasks at once and return their results; raises the first error after every one of them has ended."""
        if len(tasks) == 1:
            return [tasks[0]()]
        futures = [self.fetchers.submit(task) for task in tasks]
        try:
            wait(futures, return_when=FIRST_EXCEPTION)
        finally:
            for future in futures:
                future.cancel()
            wait(futures)  # they write into memory that belongs to the caller
        for future in futures:
            if not future.cancelled() and (error := future.exception()) is not None:
                raise error
        return [future.result() for future in futures]


def open_object_folder(address: FolderAddress, location: Location, profile: Profile) -> ObjectFolder:
    """Connect a folder of a store; sends no request."""
    secrets = profile.secrets()
    teller = ErrorTeller(address.profile, (*secrets.values(), *environment_secrets()))
    store: ObjectStore
    if location.scheme == "memory":
        with _memory_lock:
            store = _memory_stores.setdefault(location.bucket, MemoryStore())
    else:
        try:
            store = build_store(location, profile, secrets)
        except (BaseError, ValueError) as error:
            raise teller.misconfigured(error, address.url) from None
    connection = Connection(store, teller, profile.limits.upload_concurrency, by_generation=location.scheme == "gs")
    return ObjectFolder(address, location.path, connection, UsageMeter())


class ObjectFolder(Folder):
    """A prefix in a bucket."""

    def __init__(self, address: FolderAddress, prefix: str, connection: Connection, meter: UsageMeter) -> None:
        self.address = address
        self._prefix = prefix
        self._connection = connection
        self._store = connection.store
        self._meter = meter

    def __repr__(self) -> str:
        return f"ObjectFolder({self.address.url!r}, profile={self.address.profile!r})"

    @property
    def is_local(self) -> bool:
        return False

    def local_path(self, path: str = "") -> None:
        check_path(path)

    def subfolder(self, path: str) -> ObjectFolder:
        return ObjectFolder(self.address.child(path), self._key(check_path(path)), self._connection, self._meter)

    def exists(self) -> bool:
        self._meter.add("lists")
        with self._told():
            return any(page for page in self._store.list(self._prefix or None, chunk_size=1))

    # --- reading -------------------------------------------------------------------------------------------
    def list(self, prefix: str = "", *, recursive: bool = True, most: int | None = None) -> builtins.list[FileEntry]:
        base = self._key(check_path(prefix)) or None
        with self._told(prefix):
            if recursive:
                pages = self._store.list(base, chunk_size=_LIST_PAGE)
                found = builtins.list(at_most(most, (meta for page in pages for meta in page), self._url(prefix)))
            else:
                found = builtins.list(at_most(most, self._one_level(prefix)["objects"], self._url(prefix)))
        self._meter.add("lists", 1 + len(found) // _LIST_PAGE)
        entries = _without_markers([self._entry(meta) for meta in found], prefix)
        return sorted(entries, key=lambda entry: entry.path)

    def subfolders(self, prefix: str = "") -> builtins.list[str]:
        self._meter.add("lists")
        with self._told(prefix):
            found = self._one_level(prefix)["common_prefixes"]
        return sorted(name.rstrip("/").rpartition("/")[2] for name in found)

    def _one_level(self, prefix: str) -> ListResult[Sequence[ObjectMeta]]:
        """What lies directly below a prefix. obstore collects all of it, which can be bounded by time alone."""
        base = self._key(check_path(prefix)) or None

        async def asked() -> ListResult[Sequence[ObjectMeta]]:
            return await asyncio.wait_for(self._store.list_with_delimiter_async(base), _LEVEL_S)

        try:
            # In a thread, since the caller's may run an event loop itself.
            return self._connection.fetchers.submit(asyncio.run, asked()).result()
        except TimeoutError:
            raise StorageError(
                f"{self._url(prefix)}: what lies directly in this folder could not be listed within {_LEVEL_S:g} s",
                file=self._url(prefix),
                hint="It may hold hundreds of thousands of objects: name a folder below it, or one beside them.",
            ) from None

    def stat(self, path: str) -> FileEntry | None:
        key = self._key(check_file_path(path))
        self._meter.add("heads")
        with self._told(path):
            try:
                return self._entry(self._store.head(key))
            except FileNotFoundError:
                return None

    def read(self, path: str, offset: int = 0, length: int | None = None, *, version: str | None = None) -> bytes:
        if length == 0:
            return b""
        first = self._get(path, offset, GET_BYTES if length is None else min(length, GET_BYTES), version)
        wanted = first.file_bytes - offset if length is None else length
        if not 0 <= wanted <= first.file_bytes - offset:  # before anything is allocated
            raise self._short(path, offset, max(wanted, 0), max(first.file_bytes - offset, 0))
        if len(first.data) == wanted:
            return bytes(first.data)
        whole = bytearray(wanted)
        done = len(first.data)
        whole[:done] = first.data
        self.read_into(path, offset + done, memoryview(whole)[done:], version=version or first.etag)
        return bytes(whole)

    def read_into(self, path: str, offset: int, buffer: memoryview, *, version: str | None = None) -> None:
        flat = buffer.cast("B")
        self._connection.together(
            [
                partial(self._fill, path, offset + at, flat[at : at + size], version)
                for at, size in cut(len(flat), GET_BYTES)
            ]
        )

    def read_ranges(
        self, path: str, ranges: Sequence[tuple[int, int]], *, version: str | None = None
    ) -> Sequence[memoryview]:
        spans = coalesce(ranges, max_gap=_MAX_GAP_BYTES, max_length=GET_BYTES)
        self._check_large(path, spans)
        short = iter(
            self._connection.together(
                [partial(self._pick, path, span, ranges, version) for span in spans if span.length <= GET_BYTES]
            )
        )
        picked = [
            next(short) if span.length <= GET_BYTES else pick(span, self._read_long(path, span, version), ranges)
            for span in spans
        ]
        return scatter(spans, picked, len(ranges))

    # --- writing -------------------------------------------------------------------------------------------
    def write(self, path: str, data: Buffer, *, if_absent: bool = False, if_version: str | None = None) -> FileEntry:
        key, view = self._key(check_file_path(path)), memoryview(data).cast("B")
        with self._told(path):
            try:
                mode: PutMode = "create" if if_absent else "overwrite"
                if if_version is not None:
                    mode = self._only_over(key, if_version)
                result = self._store.put(key, view, mode=mode, use_multipart=False)
            except AlreadyExistsError:
                raise AlreadyExists(f"{self._url(path)} exists already", file=path) from None
            except PreconditionError:
                raise VersionMismatch(f"{self._url(path)} was changed", file=path, expected=if_version) from None
        self._meter.wrote(len(view))
        return FileEntry(path, len(view), result["e_tag"], result["e_tag"] or "")

    def write_stream(self, path: str, chunks: Iterable[Buffer], size_bytes: int) -> FileEntry:
        if not size_bytes:
            return self.write(path, b"".join(exactly(chunks, 0, path)))
        key, part = self._key(check_file_path(path)), part_bytes(size_bytes)
        source = Source(exactly(chunks, size_bytes, path))
        try:
            self._store.put(
                key, source, chunk_size=part, max_concurrency=self._connection.upload_concurrency, use_multipart=True
            )
        except BaseException as error:
            if source.failure is not None and source.failure is not error:
                raise source.failure from source.failure.__cause__
            if source.failure is None and isinstance(error, BaseError | OSError | ValueError):
                raise self._connection.teller.translate(error, self._url(path)) from None
            raise
        self._meter.wrote(size_bytes, requests=2 + -(-size_bytes // part))
        return self._confirm(path, size_bytes)

    def stream_window_bytes(self, size_bytes: int) -> int:
        return (self._connection.upload_concurrency + 1) * part_bytes(size_bytes)

    def delete(self, paths: Sequence[str]) -> None:
        keys = [self._key(check_file_path(path)) for path in paths]
        if not keys:
            return
        self._meter.add("deletes", -(-len(keys) // _LIST_PAGE))
        with self._told():
            try:
                self._store.delete(keys)
            except FileNotFoundError:
                self._delete_one_by_one(keys)

    def delete_prefix(self, prefix: str) -> None:
        self.delete([entry.path for entry in self.list(check_file_path(prefix))])

    def free_bytes(self) -> int | None:
        return None

    # -------------------------------------------------------------------------------------------------------
    def _told(self, path: str = "") -> AbstractContextManager[None]:
        return self._connection.teller.told(self._url(path))

    def _url(self, path: str) -> str:
        return f"{self.address.url}/{path}" if path else self.address.url

    def _key(self, path: str) -> str:
        return f"{self._prefix}/{path}" if self._prefix and path else self._prefix or path

    def _entry(self, meta: ObjectMeta) -> FileEntry:
        path = meta["path"][len(self._prefix) + 1 :] if self._prefix else meta["path"]
        etag = meta["e_tag"]
        return FileEntry(path, meta["size"], etag, etag or "", meta["last_modified"].timestamp())

    def _get(self, path: str, offset: int, length: int, version: str | None) -> _Got:
        """One GET: at most ``length`` bytes, fewer or none when the file ends before."""
        options: GetOptions = {"range": (offset, offset + length)}
        if version:  # empty where a store has no ETags
            options["if_match"] = version
        with self._told(path):
            try:
                found = self._store.get(self._key(check_file_path(path)), options=options)
                data = memoryview(found.bytes())
            except PreconditionError:
                raise self._changed(path, version) from None
            except BaseError as error:
                if not is_out_of_range(error):
                    raise
                entry = self.stat(path)
                return _Got(memoryview(b""), entry.size_bytes if entry else 0, None)
        self._meter.read(len(data))
        return _Got(data, found.meta["size"], found.meta["e_tag"])

    def _fetch(self, path: str, offset: int, length: int, version: str | None) -> memoryview:
        data = self._get(path, offset, length, version).data
        if len(data) != length:
            raise self._short(path, offset, length, len(data))
        return data

    def _fill(self, path: str, offset: int, buffer: memoryview, version: str | None) -> None:
        buffer[:] = self._fetch(path, offset, len(buffer), version)

    def _pick(
        self, path: str, span: Span, ranges: Sequence[tuple[int, int]], version: str | None
    ) -> builtins.list[memoryview]:
        return pick(span, self._fetch(path, span.offset, span.length, version), ranges)

    def _read_long(self, path: str, span: Span, version: str | None) -> memoryview:
        view = memoryview(bytearray(span.length))
        self.read_into(path, span.offset, view, version=version)
        return view

    def _check_large(self, path: str, spans: Sequence[Span]) -> None:
        """Refuse ranges beyond the end before memory is taken for them: a damaged header may ask for terabytes."""
        if not spans or max(span.length for span in spans) <= GET_BYTES:
            return
        entry = self.stat(path)
        if entry is None:
            raise self._connection.teller.translate(FileNotFoundError(), self._url(path))
        for span in spans:
            if span.offset + span.length > entry.size_bytes:
                raise self._short(path, span.offset, span.length, max(entry.size_bytes - span.offset, 0))

    def _only_over(self, key: str, version: str) -> PutMode:
        """The condition that a write replaces this version and no other."""
        if not self._connection.by_generation:
            return {"e_tag": version}
        try:
            meta = self._store.head(key)
        except FileNotFoundError:
            raise PreconditionError from None
        if meta["e_tag"] != version or meta["version"] is None:
            raise PreconditionError
        return {"version": meta["version"]}

    def _confirm(self, path: str, size_bytes: int) -> FileEntry:
        """Ask the store what it has now, and insist on the size.

        Not on the ETag: a late writer of the same plan may have put the same bytes there.
        """
        entry = self.stat(path)
        if entry is None or entry.size_bytes != size_bytes:
            found = f"{entry.size_bytes} bytes" if entry else "nothing"
            raise StorageError(
                f"{self._url(path)} is not what was just written",
                file=path,
                expected=f"{size_bytes} bytes",
                found=found,
                hint="Check that nothing else writes there, then start again.",
            )
        return entry

    def _delete_one_by_one(self, keys: Sequence[str]) -> None:
        """For stores that stop a bulk deletion at a missing object."""
        for key in keys:
            with suppress(FileNotFoundError):
                self._store.delete(key)

    def _short(self, path: str, offset: int, expected: int, found: int) -> CorruptFile:
        return CorruptFile(
            f"{self._url(path)} changed or is truncated: expected {expected} bytes at offset {offset}, found {found}",
            file=path,
            expected=f"{expected} bytes",
            found=f"{found} bytes",
            hint="Copy the file again, or wait until the trainer has finished writing it.",
        )

    def _changed(self, path: str, version: str | None) -> CorruptFile:
        return CorruptFile(
            f"{self._url(path)} changed since it was first looked at",
            file=path,
            expected=version,
            hint="Wait until nothing writes to the checkpoint, then start again.",
        )


def _without_markers(entries: list[FileEntry], prefix: str) -> list[FileEntry]:
    """Leave out the empty objects with which consoles and mounts of buckets mark folders, and unusable names."""
    folders = {prefix.rstrip("/"), *(path for entry in entries for path in _parents(entry.path))}
    return [entry for entry in entries if (entry.size_bytes or entry.path not in folders) and is_portable(entry.path)]


def _parents(path: str) -> Iterator[str]:
    end = path.rfind("/")
    while end > 0:
        yield path[:end]
        end = path.rfind("/", 0, end)
