from __future__ import annotations

import json
import struct

import pytest
import safetensors
import safetensors.numpy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save, save_file

from tests.attacks import safetensors_files as attacks
from workers.dtypes import ELEMENT_TYPES
from workers.errors import CorruptFile, UnshardError
from workers.safetensors_file import LARGEST_HEADER_BYTES, build_header, open_safetensors
from workers.storage import open_folder

TENSORS = {
    "weight": torch.arange(12, dtype=torch.float32).reshape(3, 4),
    "bias": torch.ones(4, dtype=torch.bfloat16),
    "scalar": torch.tensor(7, dtype=torch.int64),
    "empty": torch.zeros(0, 5, dtype=torch.float16),
    "flags": torch.tensor([True, False, True]),
    "float8": torch.zeros(3, dtype=torch.float8_e4m3fn),
    'ü "quoted"\n\x01': torch.zeros(2, dtype=torch.uint8),
}


def opened(folder, data: bytes, name: str = "model.safetensors"):
    (folder / name).write_bytes(data)
    return open_safetensors(open_folder(str(folder)), name, len(data))


def refused(folder, data: bytes) -> CorruptFile:
    with pytest.raises(CorruptFile) as caught:
        opened(folder, data)
    assert caught.value.file == "model.safetensors"
    assert "model.safetensors" in str(caught.value)
    assert caught.value.hint
    return caught.value


def test_tensors_lie_where_the_library_reads_them(tmp_path):
    data = save(TENSORS, metadata={"format": "pt"})
    file = opened(tmp_path, data)
    assert file.metadata == {"format": "pt"}
    assert set(file.tensors) == set(TENSORS)
    for name, stored in file.tensors.items():
        expected = TENSORS[name]
        assert stored.shape == tuple(expected.shape)
        assert ELEMENT_TYPES[stored.dtype].torch_name == str(expected.dtype).removeprefix("torch.")
        raw = data[stored.offset : stored.offset + stored.length_bytes]
        assert raw == expected.contiguous().flatten().view(torch.uint8).numpy().tobytes()


def test_headers_longer_than_the_first_read_are_read_whole(tmp_path):
    save_file({f"layer.{i}.{'x' * 60}": torch.zeros(1) for i in range(3000)}, tmp_path / "model.safetensors")
    size = (tmp_path / "model.safetensors").stat().st_size
    file = open_safetensors(open_folder(str(tmp_path)), "model.safetensors", size)
    assert len(file.tensors) == 3000
    assert file.header_bytes > 256 * 2**10


def test_a_file_inside_of_another_has_absolute_offsets(tmp_path):
    data = save(TENSORS)
    (tmp_path / "item").write_bytes(b"before" + data + b"after")
    file = open_safetensors(open_folder(str(tmp_path)), "item", len(data), offset=6)
    alone = opened(tmp_path, data)
    assert {name: t.offset - 6 for name, t in file.tensors.items()} == {n: t.offset for n, t in alone.tensors.items()}


@pytest.mark.parametrize("metadata", [{}, {"format": "pt"}, {"format": 'p"t\\ é\t'}])
def test_headers_are_byte_for_byte_those_of_the_library(metadata):
    data = save(TENSORS, metadata=metadata or None)
    length = struct.unpack("<Q", data[:8])[0]
    entries = json.loads(data[8 : 8 + length])
    entries.pop("__metadata__", None)
    order = sorted(entries.items(), key=lambda item: item[1]["data_offsets"])
    header = build_header([(name, entry["dtype"], entry["shape"]) for name, entry in order], metadata)
    assert header == data[: 8 + length]
    assert len(header) % 8 == 0


def test_the_library_reads_tensors_in_any_order_given(tmp_path):
    tensors = [("b", "F32", (2,)), ("a", "U8", (3,)), ("c", "I64", ())]
    data = build_header(tensors, {"format": "pt"}) + bytes(8 + 3 + 8)
    assert {name for name, _ in safetensors.deserialize(data)} == {"a", "b", "c"}
    assert list(opened(tmp_path, data).tensors) == ["b", "a", "c"]


def test_no_header_is_built_with_a_name_twice():
    with pytest.raises(ValueError, match="taken"):
        build_header([("a", "F32", ()), ("a", "F32", ())], {})
    with pytest.raises(ValueError, match="taken"):
        build_header([("__metadata__", "F32", ())], {})


def test_a_file_without_tensors_is_one(tmp_path):
    assert opened(tmp_path, build_header([], {})).tensors == {}


def test_white_space_and_any_order_are_accepted(tmp_path):
    header = (
        b' {"b":{"shape":[1],"data_offsets":[1,2],"dtype":"U8"}, "a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'
    )
    file = opened(tmp_path, struct.pack("<Q", len(header)) + header + b"xy")
    assert [file.tensors[name].offset - file.header_bytes for name in "ab"] == [0, 1]


@pytest.mark.parametrize("attack", attacks.BROKEN)
def test_a_broken_file_is_refused_with_what_is_wrong(attack, tmp_path):
    data, words = attacks.BROKEN[attack]
    error = refused(tmp_path, data)
    for word in words:
        assert word in str(error) + error.hint


def test_a_header_of_more_than_the_limit_is_not_read(tmp_path):
    head = struct.pack("<Q", LARGEST_HEADER_BYTES + 1) + b"{}"
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(head)
        file.truncate(LARGEST_HEADER_BYTES + 100)
    with pytest.raises(CorruptFile, match="safetensors"):
        open_safetensors(open_folder(str(tmp_path)), "model.safetensors", LARGEST_HEADER_BYTES + 100)


def test_every_truncation_is_refused(tmp_path):
    data = save(TENSORS)
    for end in range(len(data)):
        refused(tmp_path, data[:end])


WHOLE = save(TENSORS, metadata={"format": "pt"})


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.integers(0, len(WHOLE) - 1), st.integers(0, 255)), min_size=1, max_size=5))
def test_damage_gives_a_named_error_or_what_the_library_reads(scratch, edits):
    data = bytearray(WHOLE)
    for position, value in edits:
        data[position] = value
    error = None
    try:
        file = opened(scratch, bytes(data))
    except UnshardError as raised:
        error = raised
    if error is None:
        assert {name for name, _ in safetensors.deserialize(bytes(data))} == set(file.tensors)
    else:
        assert error.file == "model.safetensors"
