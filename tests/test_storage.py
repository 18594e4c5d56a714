import os
import pickle
import threading
import time
import uuid
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import pytest
from obstore.store import MemoryStore

from tests.seaweed import S3Server, open_s3_folder
from workers.errors import CorruptFile, IncompleteCheckpoint, InternalError, InvalidOption, StorageError
from workers.storage import AlreadyExists, Folder, FolderAddress, VersionMismatch, open_folder
from workers.storage.descriptors import DESCRIPTORS, DescriptorCache
from workers.storage.folder import FileEntry, UsageMeter
from workers.storage.object_errors import ErrorTeller
from workers.storage.object_store import Connection, ObjectFolder
from workers.storage.ranges import cut

MiB = 2**20
KINDS = ("local", "memory", "s3")


@pytest.fixture(params=KINDS)
def folder(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Folder:
    """An empty folder of each kind."""
    if request.param == "local":
        return open_folder(str(tmp_path / "data"))
    if request.param == "memory":
        return open_folder(f"memory://{uuid.uuid4()}/pre fix")
    return open_s3_folder(request.getfixturevalue("s3"), monkeypatch)


def paths(folder: Folder, prefix: str = "", *, recursive: bool = True) -> list[str]:
    return [entry.path for entry in folder.list(prefix, recursive=recursive)]


# --- every kind of folder ---------------------------------------------------------------------------------------


def test_a_written_file_is_read_listed_and_stated_alike(folder: Folder) -> None:
    written = folder.write("a/ü b+%41.bin", b"hello")
    assert folder.read("a/ü b+%41.bin") == b"hello"
    assert folder.list() == [written]
    assert folder.stat("a/ü b+%41.bin") == written
    assert written.size_bytes == 5
    assert (written.etag is None) == folder.is_local
    assert abs((folder.list()[0].modified_at or 0) - time.time()) < 60


def test_listing_is_sorted_and_can_stay_in_one_folder(folder: Folder) -> None:
    for path in ("b/2", "b/10", "a", "b/c/1", "bb"):
        folder.write(path, b"x")
    assert paths(folder) == ["a", "b/10", "b/2", "b/c/1", "bb"]
    assert paths(folder, "b") == ["b/10", "b/2", "b/c/1"]
    assert paths(folder, recursive=False) == ["a", "bb"]
    assert paths(folder, "b/", recursive=False) == ["b/10", "b/2"]
    assert folder.subfolders() == ["b"]
    assert folder.subfolders("b") == ["c"]


def test_a_folder_that_is_not_there_is_empty(folder: Folder) -> None:
    assert not folder.exists()
    assert folder.list() == []
    assert folder.subfolders("x") == []
    assert folder.stat("x") is None


def test_a_subfolder_sees_its_own_paths_and_shares_the_counters(folder: Folder) -> None:
    folder.subfolder("sub").write("x", b"1")
    assert paths(folder) == ["sub/x"]
    assert folder.exists()
    assert folder.subfolder("sub").read("x") == b"1"
    assert folder.usage() == folder.subfolder("sub").usage()


def test_parts_of_a_file_are_read_exactly(folder: Folder) -> None:
    folder.write("f", bytes(range(100)))
    buffer = bytearray(12)
    folder.read_into("f", 5, memoryview(buffer)[1:11])
    assert bytes(buffer) == b"\0" + bytes(range(5, 15)) + b"\0"
    assert folder.read("f", 90) == bytes(range(90, 100))
    assert folder.read("f", 100) == folder.read("f", 3, 0) == b""
    ranges = [(50, 3), (0, 2), (51, 9), (7, 0), (99, 1)]
    assert [bytes(part) for part in folder.read_ranges("f", ranges)] == [
        bytes(range(offset, offset + length)) for offset, length in ranges
    ]


def test_far_ranges_hold_no_memory_for_what_lies_between_them(folder: Folder) -> None:
    data = os.urandom(4 * MiB)
    folder.write("f", data)
    ranges = [(offset, 64) for offset in range(0, 4 * MiB, 16 * 2**10)]
    parts = folder.read_ranges("f", ranges)
    assert [bytes(part) for part in parts] == [data[offset : offset + 64] for offset, _ in ranges]
    held = {id(part.obj): memoryview(part.obj).nbytes for part in parts}
    assert sum(held.values()) <= 2 * 64 * len(ranges)


def test_large_files_survive_a_round_trip_in_pieces(folder: Folder) -> None:
    data = os.urandom(35 * MiB + 3)
    chunks = (memoryview(data)[offset : offset + size] for offset, size in cut(len(data), 3 * MiB + 1))
    entry = folder.write_stream("large", chunks, len(data))
    assert entry == folder.stat("large")
    assert entry.size_bytes == len(data)
    assert folder.read("large") == data
    buffer = bytearray(20 * MiB)
    folder.read_into("large", 7 * MiB, memoryview(buffer))
    assert buffer == data[7 * MiB : 27 * MiB]
    parts = folder.read_ranges("large", [(34 * MiB, MiB), (1, 18 * MiB), (18 * MiB, 1)])
    assert [bytes(part) for part in parts] == [data[34 * MiB : 35 * MiB], data[1 : 18 * MiB + 1], data[18 * MiB :][:1]]


@pytest.mark.parametrize("size", [0, 1])
def test_tiny_streams_and_empty_files_are_files(folder: Folder, size: int) -> None:
    assert folder.write_stream("f", iter([b"x" * size]), size).size_bytes == size
    assert folder.read("f") == b"x" * size


@pytest.mark.parametrize(("offset", "length", "found"), [(3, 10, 2), (90, 10, 0), (0, 10**13, 5), (4, 9 * MiB, 1)])
def test_a_short_file_is_corrupt_and_the_error_says_what_was_there(
    folder: Folder, offset: int, length: int, found: int
) -> None:
    folder.write("f", b"hello")
    with pytest.raises(CorruptFile, match=f"expected {length} bytes at offset {offset}, found {found}"):
        folder.read("f", offset, length)
    with pytest.raises(CorruptFile, match=f"expected {length} bytes at offset {offset}, found {found}"):
        folder.read_ranges("f", [(offset, length)])
    if length < 100 * MiB:
        with pytest.raises(CorruptFile, match="truncated"):
            folder.read_into("f", offset, memoryview(bytearray(length)))


def test_a_missing_file_is_named(folder: Folder) -> None:
    sub = folder.subfolder("sub")
    for attempt in (lambda: sub.read("gone"), lambda: sub.read_ranges("gone", [(0, 10**10)])):
        with pytest.raises(IncompleteCheckpoint, match=f"{folder.address.url}/sub/gone is missing"):
            attempt()


def test_a_file_that_changed_is_noticed(folder: Folder) -> None:
    version = folder.write("f", b"first").version
    assert folder.read("f", version=version) == b"first"
    assert folder.write("f", b"later").version != version
    for attempt in (
        lambda: folder.read("f", version=version),
        lambda: folder.read_into("f", 0, memoryview(bytearray(5)), version=version),
        lambda: folder.read_ranges("f", [(0, 1)], version=version),
    ):
        with pytest.raises(CorruptFile, match="changed"):
            attempt()
    assert folder.read("f") == b"later"


def test_an_exclusive_write_leaves_what_is_there(folder: Folder) -> None:
    folder.write("f", b"first", if_absent=True)
    with pytest.raises(AlreadyExists):
        folder.write("f", b"second", if_absent=True)
    assert folder.read("f") == b"first"


def test_a_compare_and_swap_needs_the_current_version(folder: Folder) -> None:
    with pytest.raises(VersionMismatch):
        folder.write("f", b"0", if_version='"none"')
    first = folder.write("f", b"1").version
    second = folder.write("f", b"2", if_version=first).version
    with pytest.raises(VersionMismatch):
        folder.write("f", b"3", if_version=first)
    folder.write("f", b"4", if_version=second)
    assert folder.read("f") == b"4"
    assert paths(folder) == ["f"]


@pytest.mark.parametrize("conditional", ["if_absent", "if_version"])
def test_of_eight_racing_writers_exactly_one_wins(folder: Folder, conditional: str) -> None:
    version = None if conditional == "if_absent" else folder.write("claim", b"old").version
    start = threading.Barrier(8)

    def attempt(number: int) -> int | None:
        start.wait()
        try:
            folder.write("claim", str(number).encode(), if_absent=version is None, if_version=version)
        except (AlreadyExists, VersionMismatch):
            return None
        return number

    with ThreadPoolExecutor(8) as pool:
        winners = [number for number in pool.map(attempt, range(8)) if number is not None]
    assert len(winners) == 1
    assert folder.read("claim") == str(winners[0]).encode()
    assert paths(folder) == ["claim"]


def test_a_stream_whose_producer_fails_leaves_the_old_file(folder: Folder) -> None:
    def broken() -> Iterator[bytes]:
        yield bytes(17 * MiB)
        raise FileNotFoundError("the producer's own")

    folder.write("kept", b"old")
    for name in ("kept", "new"):
        with pytest.raises(FileNotFoundError, match="the producer's own"):
            folder.write_stream(name, broken(), 40 * MiB)
    assert paths(folder) == ["kept"]
    assert folder.read("kept") == b"old"


@pytest.mark.parametrize("announced", [5, 7])
def test_a_stream_of_another_size_than_announced_is_refused(folder: Folder, announced: int) -> None:
    with pytest.raises(InternalError, match="announced size"):
        folder.write_stream("f", [b"abc", b"def"], announced)
    assert folder.list() == []


def test_deleting_is_quiet_about_what_is_not_there(folder: Folder) -> None:
    for path in ("a", "b/1", "b/c/2", "bb"):
        folder.write(path, b"x")
    folder.delete(["a", "gone", "b/gone"])
    folder.delete_prefix("b")
    folder.delete_prefix("gone")
    assert paths(folder) == ["bb"]
    with pytest.raises(InvalidOption):
        folder.delete_prefix("")


def test_usage_counts_requests_and_bytes(folder: Folder) -> None:
    folder.write("f", bytes(1000))
    folder.read("f", 10, 100)
    folder.read_ranges("f", [(0, 10), (20, 10), (900, 10)])
    folder.stat("f")
    folder.list()
    usage = folder.usage()
    assert (usage.gets, usage.puts, usage.heads, usage.lists) == (2, 1, 1, 1)
    assert (usage.bytes_read, usage.bytes_written) == (1010, 1000)


def test_a_folder_pickles_as_its_address(folder: Folder) -> None:
    folder.write("f", b"x")
    assert pickle.loads(pickle.dumps(folder)).read("f") == b"x"


@pytest.mark.parametrize("path", ["../x", "/x", "a/../x", "a\\b", "a\0b", "a//b", ".", "a/./b", "a\nb", "", "a/"])
def test_no_path_leaves_its_folder(folder: Folder, path: str) -> None:
    for attempt in (
        folder.read,
        folder.stat,
        lambda path: folder.write(path, b""),
        lambda path: folder.delete([path]),
    ):
        with pytest.raises(InvalidOption):
            attempt(path)


def test_a_stream_borrows_no_more_chunks_than_it_says(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, size, chunk = open_s3_folder(s3, monkeypatch), 160 * MiB, 4 * MiB
    alive, peak = weakref.WeakSet[Chunk](), 0

    def produce() -> Iterator[Chunk]:
        nonlocal peak
        for _ in range(size // chunk):
            made = Chunk(chunk)
            alive.add(made)
            peak = max(peak, len(alive) * chunk)
            yield made
            del made

    folder.write_stream("f", produce(), size)
    assert peak <= folder.stream_window_bytes(size) + 2 * chunk < size


class Chunk(bytearray):
    """One that can be counted."""

    __hash__ = object.__hash__


def test_markers_of_folders_are_not_files() -> None:
    folder = open_folder(f"memory://{uuid.uuid4()}/data")
    for path in ("sub", "sub/deeper", "sub/deeper/f", "empty"):
        folder.write(path, b"x" * path.endswith("f"))
    assert paths(folder) == ["empty", "sub/deeper/f"]
    assert paths(folder, "sub") == ["sub/deeper/f"]


class Generations:
    """A store that replaces versions by generation only, as GCS does, in front of one that knows ETags."""

    def __init__(self) -> None:
        self._store = MemoryStore()

    def head(self, key: str) -> dict[str, Any]:
        meta = self._store.head(key)
        return {**meta, "version": f"generation-{meta['e_tag']}"}

    def put(self, key: str, data: memoryview, *, mode: Any, use_multipart: bool) -> Any:
        if isinstance(mode, dict):
            mode = {"e_tag": mode["version"].removeprefix("generation-")}
        return self._store.put(key, data, mode=mode, use_multipart=use_multipart)


def test_a_version_is_swapped_by_generation_where_the_store_wants_that() -> None:
    connection = Connection(cast("MemoryStore", Generations()), ErrorTeller(None), 4, by_generation=True)
    folder = ObjectFolder(FolderAddress("gs://bucket"), "", connection, UsageMeter())
    with pytest.raises(VersionMismatch):
        folder.write("f", b"0", if_version='"0"')
    first = folder.write("f", b"1", if_absent=True).version
    second = folder.write("f", b"2", if_version=first).version
    with pytest.raises(VersionMismatch):
        folder.write("f", b"3", if_version=first)
    assert folder.stat("f") == FileEntry("f", 1, second, second)


# --- local ------------------------------------------------------------------------------------------------------


def test_links_to_files_are_read_and_links_to_folders_are_not_entered(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "b").write_bytes(b"blob")
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "snapshot" / "model").symlink_to("../blobs/b")
    (tmp_path / "snapshot" / "circle").symlink_to(".")
    (tmp_path / "snapshot" / "dangling").symlink_to("nowhere")
    folder = open_folder(str(tmp_path / "snapshot"))
    assert paths(folder) == ["model"]
    assert folder.subfolders() == ["circle"]
    assert folder.read("model") == folder.read("circle/model") == b"blob"
    folder.write("model", b"new")
    assert (tmp_path / "blobs" / "b").read_bytes() == b"blob"
    folder.delete_prefix("circle")
    assert paths(folder) == ["model"]


def test_a_pipe_or_folder_in_place_of_a_file_does_not_hang(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "sub").mkdir()
    folder = open_folder(str(tmp_path))
    with pytest.raises(CorruptFile, match="not a regular file"):
        folder.read("pipe")
    with pytest.raises(StorageError, match="folder where a file is needed"):
        folder.read("sub")
    with pytest.raises(StorageError):
        folder.write("sub", b"x")
    assert (folder.list(), folder.stat("pipe"), folder.stat("sub")) == ([], None, None)


def test_a_replaced_file_is_read_anew_and_a_deleted_one_is_let_go(tmp_path: Path) -> None:
    folder = open_folder(str(tmp_path))
    (tmp_path / "f").write_bytes(b"one")
    assert folder.read("f") == b"one"
    (tmp_path / "g").write_bytes(b"two")
    (tmp_path / "g").rename(tmp_path / "f")
    assert folder.read("f") == b"two"
    before = len(DESCRIPTORS)
    folder.close()
    assert len(DESCRIPTORS) == before - 1
    assert folder.read("f") == b"two"


def test_the_descriptor_cache_stays_bounded_under_concurrent_use(tmp_path: Path) -> None:
    files = [str(tmp_path / str(number)) for number in range(12)]
    for number, path in enumerate(files):
        Path(path).write_bytes(bytes([number]) * 8)
    cache = DescriptorCache(4)
    before = len(list(Path("/proc/self/fd").iterdir()))

    def read_many(seed: int) -> bool:
        good = True
        for step in range(400):
            number = (seed * 7 + step * step) % 12
            opened, status = cache.borrow(files[number])
            try:
                good &= os.pread(opened.descriptor, 8, 0) == bytes([number]) * 8 and status.st_size == 8
                if step % 50 == 0:
                    cache.forget(files[number])
            finally:
                cache.give_back(opened)
        return good

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(read_many, range(8)))
    assert len(cache) <= 4
    cache.forget_below(str(tmp_path))
    assert len(list(Path("/proc/self/fd").iterdir())) <= before


def test_space_is_told_for_a_folder_that_is_still_to_be_made(tmp_path: Path) -> None:
    free = open_folder(str(tmp_path / "a" / "b")).free_bytes()
    assert free is not None
    assert free > 0
    assert not (tmp_path / "a").exists()
