import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.errors import InvalidOption
from workers.storage import FolderAddress, check_path, open_folder
from workers.storage.object_store import part_bytes
from workers.storage.ranges import coalesce, pick, scatter

MiB = 2**20


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
    picked = [pick(span, view, ranges) for span, view in zip(spans, views, strict=True)]
    parts = scatter(spans, picked, len(ranges))
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


@pytest.mark.parametrize("text", ["/a\nb", "s3://bucket/a\x1b[31m", "file:///a%0Ab"])
def test_a_control_character_in_an_address_is_told(text: str) -> None:
    with pytest.raises(InvalidOption, match="holds the end of a line or another control character"):
        open_folder(text)


def test_an_empty_address_is_told() -> None:
    with pytest.raises(InvalidOption, match="is not a path or URL"):
        open_folder("")
