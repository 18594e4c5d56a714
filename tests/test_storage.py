import os
import pickle
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.seaweed import S3Server, free_ports
from workers.errors import (
    CorruptFile,
    IncompleteCheckpoint,
    InternalError,
    InvalidOption,
    StorageError,
    UnshardError,
)
from workers.storage import (
    AlreadyExists,
    Folder,
    FolderAddress,
    VersionMismatch,
    check_path,
    load_profiles,
    open_folder,
)
from workers.storage.descriptors import DESCRIPTORS, DescriptorCache
from workers.storage.object_store import part_bytes
from workers.storage.ranges import coalesce, cut, scatter

MiB = 2**20
KINDS = ("local", "memory", "s3")


@pytest.fixture(params=KINDS)
def folder(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Folder:
    """An empty folder of each kind."""
    if request.param == "local":
        return open_folder(str(tmp_path / "data"))
    if request.param == "memory":
        return open_folder(f"memory://{uuid.uuid4()}/pre fix")
    return s3_folder(request.getfixturevalue("s3"), monkeypatch)


def s3_folder(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Folder:
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)
    return open_folder(f"s3://{server.bucket}/{uuid.uuid4()}/pre fix")


@pytest.fixture
def profiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Write the file of storage profiles and name it in the environment."""

    def write(text: str) -> None:
        path = tmp_path / "profiles.toml"
        path.write_text(text)
        monkeypatch.setenv("UNSHARD_STORAGE_PROFILES", str(path))

    return write


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
    for attempt in (lambda: folder.read("gone"), lambda: folder.read_ranges("gone", [(0, 10**10)])):
        with pytest.raises(IncompleteCheckpoint, match="gone is missing"):
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


# --- paths, addresses and ranges --------------------------------------------------------------------------------


@given(st.text(st.sampled_from("ab./\\\0\n~ é\ud800"), max_size=12))
def test_an_accepted_path_stays_below_its_folder(path: str) -> None:
    try:
        accepted = check_path(path)
    except InvalidOption:
        return
    assert os.path.normpath(f"/root/{accepted}").startswith("/root")
    assert os.path.normpath(f"/root/{accepted}") == f"/root/{accepted}".rstrip("/")
    assert check_path(accepted) == accepted


@given(
    st.lists(st.tuples(st.integers(0, 300), st.integers(0, 60))),
    st.integers(0, 20),
    st.integers(1, 80),
)
def test_coalesced_spans_serve_every_range_once(ranges: list[tuple[int, int]], gap: int, longest: int) -> None:
    data = bytes(index % 251 for index in range(400))
    spans = coalesce(ranges, max_gap=gap, max_length=longest)
    views = [memoryview(data)[span.offset : span.offset + span.length] for span in spans]
    parts = scatter(spans, views, ranges)
    assert [bytes(part) for part in parts] == [data[offset : offset + length] for offset, length in ranges]
    assert sorted(index for span in spans for index in span.members) == [
        index for index, (_, length) in enumerate(ranges) if length
    ]
    longest_range = max((length for _, length in ranges), default=0)
    assert all(span.length <= max(longest, longest_range) for span in spans)
    assert [span.offset for span in spans] == sorted(span.offset for span in spans)


@given(st.integers(0, 50_000 * 2**30))
def test_an_upload_stays_below_the_stores_limit_of_parts(size: int) -> None:
    assert -(-size // part_bytes(size)) <= 9_000
    assert part_bytes(size) >= 16 * MiB


def test_addresses_become_canonical(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    monkeypatch.chdir(tmp_path)
    spelled = {
        "~/x": "/home/someone/x",
        "file:///~/x%20y/": "/~/x y",
        "sub/../other": f"{tmp_path}/other",
        "S3://bucket/a b/%20/": "s3://bucket/a b/%20",
        "memory://name": "memory://name",
        "az://container/p": "az://container/p",
    }
    for text, canonical in spelled.items():
        assert open_folder(text).address.url == canonical
        assert open_folder(canonical).address.url == canonical
    assert FolderAddress("s3://b/run/model.pt", "lab").split() == (FolderAddress("s3://b/run", "lab"), "model.pt")
    assert FolderAddress("/data/model.pt").split() == (FolderAddress("/data"), "model.pt")


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("ftp://host/x", "ftp:// is not known"),
        ("s3:bucket/x", "neither a path nor a URL"),
        ("s3://", "names no bucket"),
        ("s3://bucket/a/../b", "not a path below"),
        ("file://host/x", "not a file URL of this machine"),
        ("", "not a path or URL"),
        ("a\0b", "not a path or URL"),
    ],
)
def test_a_malformed_address_is_refused_with_a_reason(url: str, said: str) -> None:
    with pytest.raises(InvalidOption, match=said):
        open_folder(url)


@pytest.mark.parametrize(
    "url", ["s3://key:canary@bucket/x", "az://c/x?sig=canary", "file:///x?canary", "s3://canary@b"]
)
def test_a_url_with_credentials_is_refused_without_repeating_them(url: str) -> None:
    with pytest.raises(InvalidOption, match="a user, a password or a query") as caught:
        open_folder(url)
    assert "canary" not in str(caught.value) + caught.value.hint


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


def test_a_profile_confines_folders_and_their_links(tmp_path: Path, profiles: Callable[[str], None]) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "leak").symlink_to(tmp_path / "secret")
    (tmp_path / "in" / "up").symlink_to(tmp_path)
    (tmp_path / "secret").write_bytes(b"x")
    profiles(f'[profiles.data]\nscheme = "file"\nprefixes = ["{tmp_path}/in"]')
    with pytest.raises(InvalidOption, match="does not allow"):
        open_folder(FolderAddress(f"{tmp_path}/in/../other", "data"))
    folder = open_folder(FolderAddress(f"{tmp_path}/in/", "data"))
    for attempt in (
        lambda: folder.read("leak"),
        lambda: folder.stat("leak"),
        lambda: folder.write("up/x", b""),
        lambda: folder.list("up"),
    ):
        with pytest.raises(StorageError, match="leads out of the folders"):
            attempt()
    folder.write("fine", b"")


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


# --- object storage ---------------------------------------------------------------------------------------------

DEAD = 'scheme = "s3"\nendpoint = "{endpoint}"\nallow_http = true\nregion = "us-east-1"\nretry_timeout_s = 2\n'
KEYS = 'access_key_id_env = "CANARY_ID"\nsecret_access_key_env = "CANARY"\n'
CANARY = "c4n4ry-secret"


def everything_shown(error: UnshardError) -> str:
    text = "".join(traceback.format_exception(error))
    return f"{text}{error!r}{error.hint}{error.details()}{pickle.dumps(error)!r}"


@pytest.mark.parametrize("action", ["list", "read", "write", "exists", "stream"])
def test_wrong_credentials_are_named_and_never_shown(
    s3: S3Server, profiles: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, action: str
) -> None:
    profiles("[profiles.wrong]\n" + DEAD.format(endpoint=s3.endpoint) + KEYS)
    monkeypatch.setenv("CANARY_ID", s3.access_key)
    monkeypatch.setenv("CANARY", CANARY)
    folder = open_folder(FolderAddress(f"s3://{s3.bucket}/x", "wrong"))
    actions = {
        "list": folder.list,
        "read": lambda: folder.read("f"),
        "write": lambda: folder.write("f", b"x"),
        "exists": folder.exists,
        "stream": lambda: folder.write_stream("f", [b"x"], 1),
    }
    with pytest.raises(StorageError, match=f"s3://{s3.bucket}/x.*refused access.*403") as caught:
        actions[action]()
    assert "profile 'wrong'" in caught.value.hint
    for shown in (everything_shown(caught.value), repr(folder), str(vars(folder)), repr(pickle.dumps(folder))):
        assert CANARY not in shown
    assert all(CANARY not in f"{profile!r}{pickle.dumps(profile)!r}" for profile in load_profiles().values())


def test_a_profile_with_files_and_variables_opens_the_store_whatever_the_environment_says(
    s3: S3Server, profiles: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "key").write_text(s3.secret_key + "\n")
    profiles(
        f"[profiles.good]\n{DEAD.format(endpoint=s3.endpoint)}"
        f'access_key_id_env = "GOOD_ID"\nsecret_access_key_file = "{tmp_path}/key"\nchecksum = "SHA256"\n'
        f'prefixes = ["s3://{s3.bucket}/allowed"]\n'
    )
    monkeypatch.setenv("GOOD_ID", s3.access_key)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "another")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "of-another")
    folder = open_folder(FolderAddress(f"s3://{s3.bucket}/allowed/a", "good"))
    folder.write_stream("f", [b"abc"], 3)
    assert folder.read("f") == b"abc"
    with pytest.raises(InvalidOption, match="does not allow"):
        open_folder(FolderAddress(f"s3://{s3.bucket}/allowed-not", "good"))
    with pytest.raises(InvalidOption, match="is for s3"):
        open_folder(FolderAddress("/etc", "good"))


def test_a_missing_bucket_is_told_from_a_missing_file(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    s3_folder(s3, monkeypatch)
    folder = open_folder("s3://no-such-bucket/x")
    for attempt in (lambda: folder.read("f"), folder.list, folder.exists):
        with pytest.raises(StorageError, match="no such bucket"):
            attempt()


def test_markers_of_folders_are_not_files(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = s3_folder(s3, monkeypatch)
    folder.write("sub/f", b"x")
    bucket, _, prefix = folder.address.url.removeprefix("s3://").partition("/")
    raw = open_folder(f"s3://{bucket}")
    raw.write(f"{prefix}/g", b"")
    assert paths(folder) == ["g", "sub/f"]


@pytest.mark.parametrize("action", ["list", "read", "write"])
def test_a_dead_endpoint_is_reported_in_bounded_time(
    profiles: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, action: str
) -> None:
    endpoint = f"http://127.0.0.1:{free_ports(1)[0]}"
    profiles("[profiles.dead]\n" + DEAD.format(endpoint=endpoint) + KEYS)
    monkeypatch.setenv("CANARY_ID", "id")
    monkeypatch.setenv("CANARY", CANARY)
    folder = open_folder(FolderAddress("s3://bucket/x", "dead"))
    began = time.monotonic()
    with pytest.raises(StorageError, match=r"s3://bucket/x.*endpoint cannot be reached") as caught:
        {"list": folder.list, "read": lambda: folder.read("f"), "write": lambda: folder.write("f", b"")}[action]()
    assert time.monotonic() - began < 15
    assert CANARY not in everything_shown(caught.value)


def test_plain_http_needs_to_be_allowed(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    s3_folder(s3, monkeypatch)
    monkeypatch.delenv("AWS_ALLOW_HTTP")
    with pytest.raises(StorageError, match="only https") as caught:
        open_folder(f"s3://{s3.bucket}/x").list()
    assert "allow_http" in caught.value.hint


# --- profiles ---------------------------------------------------------------------------------------------------


def test_an_unknown_profile_is_refused_with_the_known_ones(profiles: Callable[[str], None]) -> None:
    profiles('[profiles.b]\nscheme = "gs"\n[profiles.a]\nscheme = "memory"')
    with pytest.raises(InvalidOption, match="no storage profile 'c'") as caught:
        open_folder(FolderAddress("memory://x", "c"))
    assert "a, b" in caught.value.hint


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ('scheme = "ftp"', "needs a scheme"),
        (f'scheme = "s3"\nsecret_access_key = "{CANARY}"', "may not stand in the file itself"),
        (f'scheme = "s3"\nsecret_key = "{CANARY}"', "secret_key is unknown"),
        ('scheme = "s3"\naccess_key_id_env = "X"', "together"),
        ('scheme = "s3"\nconnect_timeout_s = 0', "connect_timeout_s cannot be 0"),
        ('scheme = "s3"\nprefixes = ["/etc"]', "every prefix has to be a s3:// URL"),
        ('scheme = "s3"\nprefixes = "s3://b"', "list of URLs"),
        ('scheme = "s3"\nproxy_url = 1', "proxy_url is a text"),
        (f'scheme = "s3"\n{KEYS}', "environment variable CANARY"),
        ('scheme = "az"\naccount_key_file = "/nowhere"', "file /nowhere is missing"),
        ('scheme = "s3"\nroot_certificate_file = "/nowhere"', "/nowhere: No such file"),
        ("scheme =", "cannot be read"),
        ('scheme = "az"', "cannot be opened: .*Account must be specified"),
    ],
)
def test_a_faulty_profile_is_refused_with_a_reason(
    profiles: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, table: str, said: str
) -> None:
    for name in ("CANARY", "AZURE_STORAGE_ACCOUNT_NAME"):
        monkeypatch.delenv(name, raising=False)
    profiles(f"[profiles.p]\n{table}")
    scheme = "az" if '"az"' in table else "s3"
    with pytest.raises(InvalidOption, match=said) as caught:
        open_folder(FolderAddress(f"{scheme}://bucket/x", "p"))
    assert CANARY not in everything_shown(caught.value)
