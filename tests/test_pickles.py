from __future__ import annotations

import argparse
import collections
import datetime as dt
import gc
import pathlib
import pickle
import struct
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.attacks import pickles as attacks
from tests.attacks.pickles import call, glob, pickled, text
from workers import pickle_names, pickle_scan, pickles
from workers.errors import CorruptFile, InsufficientResources, UnsafePickle, UnshardError
from workers.pickles import DType, Record, Storage, TensorRecord, load

CASES = Path(__file__).parent / "cases" / "verl-fsdp"
GENERATIONS = {
    "2.4": "torch24-fsdp1-hsdp-2x2-llama",
    "2.7": "torch27-fsdp2-hsdp-2x2-llama",
    "2.9": "torch29-fsdp2-hsdp-2x2-qwen2-tied",
    "2.11": "torch211-fsdp2-hsdp-2x2-llama",
    "2.13": "llama-fsdp2-hsdp-2x2",
}


def pickle_of(case: str, name: str = "model*rank_0.pt") -> bytes:
    path = next((CASES / case / "input").rglob(name))
    with zipfile.ZipFile(path) as archive:
        return archive.read(next(member for member in archive.namelist() if member.endswith("/data.pkl")))


def refused(data: bytes) -> UnsafePickle:
    with pytest.raises(UnsafePickle) as caught:
        load(data, file="bad.pt")
    assert caught.value.file == "bad.pt"
    assert "bad.pt" in str(caught.value)
    assert caught.value.hint
    return caught.value


@pytest.mark.parametrize("attack", attacks.calls("true"))
def test_a_call_of_anything_unlisted_is_refused_by_name_and_not_made(attack, tmp_path):
    marker = tmp_path / "executed"
    data, found = attacks.calls(f"touch {marker}")[attack]
    error = refused(data)
    assert found in str(error)
    assert error.found is not None
    assert found in error.found
    assert not marker.exists()


@pytest.mark.parametrize("attack", attacks.MENTIONS)
def test_the_mere_mention_of_a_dangerous_name_is_refused(attack):
    data, found = attacks.MENTIONS[attack]
    assert found in str(refused(data))


@pytest.mark.parametrize("attack", attacks.NONSENSE)
def test_nonsense_is_a_corrupt_file_and_nothing_else(attack):
    with pytest.raises(CorruptFile) as caught:
        load(attacks.NONSENSE[attack], file="bad.pt")
    assert str(caught.value).startswith("bad.pt: ")
    assert caught.value.hint


def test_the_case_with_the_malicious_pickle_is_refused():
    assert refused(pickle_of("error-malicious-pickle", "model*rank_1.pt")).found == "posix.system"


def test_deeply_nested_keys_do_not_overflow_the_stack():
    root = load(attacks.nested_tuple_as_key(400_000), file="deep.pt")
    assert len(root) == 1


def test_keys_that_are_nested_through_the_memo_are_refused_when_they_are_deep():
    assert len(load(attacks.nested_tuple_through_the_memo(60), file="deep.pt")) == 1
    assert "a tuple of" in str(refused(attacks.nested_tuple_through_the_memo(400_000)))


def test_nesting_that_no_stack_is_large_enough_for_is_refused(monkeypatch):
    monkeypatch.setattr(pickles, "_LARGEST_STACK_BYTES", 1 << 20)
    with pytest.raises(InsufficientResources, match="deep"):
        load(attacks.nested_tuple_as_key(20_000), file="deep.pt")


def test_the_bound_on_nesting_counts_every_opcode_that_makes_a_tuple():
    assert pickle_scan.tuple_depth_limit(b"))\x85\x86\x87t\x84\x88" * 3) == 12
    assert pickle_scan.tuple_depth_limit(b"\x85" * 3_000_000) == 3_000_000


def test_deep_lists_and_dicts_are_no_problem():
    root = load(pickled(b"]" * 300_000 + b"a" * 299_999), file="deep.pt")
    assert type(root) is list


def test_threads_get_their_usual_stack_and_collector_back():
    before = threading.stack_size()
    load(attacks.nested_tuple_as_key(20_000), file="deep.pt")
    assert threading.stack_size() == before
    assert gc.isenabled()


def test_no_pickle_can_change_what_the_next_one_sees():
    for data in attacks.NONSENSE.values():
        with pytest.raises(UnshardError):
            load(data, file="bad.pt")
    shard = load(pickled(attacks._SHARD, b")\x81}", text("dim"), b"K\x01sb"), file="good.pt")
    assert (shard.kind, shard.state) == ("Shard", {"dim": 1})
    assert type(shard).kind == "Shard"


def test_a_state_becomes_data_and_never_attributes():
    evil = {"kind": "Replicate", "get": 1, "__class__": 2, "state": 3, "__setstate__": 4}
    record = load(pickled(attacks._SHARD, b")\x81", pickle.dumps(evil, 2)[2:-1], b"b"), file="odd.pt")
    assert record.kind == "Shard"
    assert record.state == evil
    assert record.get("get") == 1
    assert record.get("absent", 7) == 7


def test_slots_and_attributes_come_as_one_state():
    both = load(pickled(attacks._SHARD, b")\x81", pickle.dumps(({"a": 1}, {"b": 2}), 2)[2:-1], b"b"), file="x")
    slots = load(pickled(attacks._SHARD, b")\x81", pickle.dumps((None, {"b": 2}), 2)[2:-1], b"b"), file="x")
    assert (both.state, slots.state) == ({"a": 1, "b": 2}, {"b": 2})


def test_unknown_classes_are_inert_records():
    made = glob("someones.training", "Config")
    record = load(pickled(made, b"K\x01\x85\x81}", text("lr"), b"K\x02sb"), file="x")
    assert isinstance(record, Record)
    assert (record.kind, record.args, record.state) == ("someones.training.Config", (1,), {"lr": 2})


def test_records_are_keys_by_identity():
    index = glob("torch.distributed.checkpoint.metadata", "MetadataIndex")
    root = load(pickled(b"}(", index, b")\x81K\x01", index, b")\x81K\x02u"), file="x")
    assert [record.kind for record in root] == ["MetadataIndex"] * 2


@pytest.mark.parametrize("generation", GENERATIONS)
def test_every_torch_generation_gives_the_same_kinds(generation):
    root = load(pickle_of(GENERATIONS[generation]), file="x")
    for name, value in root.items():
        assert value.kind == "DTensor", name
        spec = value.state["_spec"]
        local = value.state["_local_tensor"]
        assert spec.kind == "DTensorSpec"
        assert spec.state["mesh"].kind == "DeviceMesh"
        assert [placement.kind for placement in spec.state["placements"]] == ["Replicate", "Shard"]
        meta = spec.state["tensor_meta"]
        assert meta.kind == "TensorMeta"
        assert meta.args[0] == value.args[2]
        assert isinstance(meta.args[2], DType)
        assert isinstance(local, TensorRecord)
        assert len(local.shape) == len(meta.args[0])


def test_sharded_tensors_come_with_their_offsets():
    root = load(pickle_of("llama-fsdp1-shardedtensor-ws3"), file="x")
    value = root["model.embed_tokens.weight"]
    assert value.kind == "ShardedTensor"
    local_shards, metadata, _group, spec, _refs = value.state
    assert [shard.kind for shard in local_shards] == ["LocalShard"]
    assert local_shards[0].state["metadata"].kind == "ShardMetadata"
    assert local_shards[0].state["metadata"].state["shard_offsets"] == [0, 0]
    assert isinstance(local_shards[0].state["tensor"], TensorRecord)
    assert metadata.kind == "ShardedTensorMetadata"
    assert metadata.state["tensor_properties"].kind == "TensorProperties"
    assert spec.kind == "ChunkShardingSpec"


def test_plain_tensors_may_be_wrapped():
    root = load(pickle_of("llama-fsdp1-ws1-plain-tensors"), file="x")
    assert {type(value) for value in root.values()} == {TensorRecord}


@pytest.mark.parametrize("name", ["extra_state*rank_0.pt", "optim*rank_0.pt"])
def test_files_of_other_things_are_read_too(name):
    for path in sorted(CASES.rglob(name))[:8]:
        with zipfile.ZipFile(path) as archive:
            member = next(member for member in archive.namelist() if member.endswith("/data.pkl"))
            assert isinstance(load(archive.read(member), file=str(path)), dict)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_plain_data_are_themselves(protocol):
    value = {
        "text": "ä€😀" * 200,
        "short": "x",
        "numbers": [0, -1, 255, 65536, -(2**31), 2**40, -(2**70), 1.5, float("inf")],
        "bytes": [b"", b"abc", bytes(range(256)) * 300, bytearray(b"abc")],
        "nested": ({"a": [(), (1,), (1, 2), (1, 2, 3), tuple(range(9))]}, None, True, False),
        "sets": [{1, 2}, frozenset((3, 4)), set()],
        "complex": 1 + 2j,
        "ordered": collections.OrderedDict(b=1, a=2),
        "default": collections.defaultdict(list, a=[1]),
        "counter": collections.Counter("abca"),
        "deque": collections.deque([1, 2], maxlen=4),
        1: "a number as a key",
        (1, 2): "a tuple as a key",
    }
    loaded = load(pickle.dumps(value, protocol), file="x")
    deque = loaded.pop("deque")
    assert list(deque) == list(value.pop("deque"))
    assert loaded == value
    assert list(loaded["ordered"]) == ["b", "a"]


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_classes_of_the_usual_libraries_are_inert_records(protocol):
    value = [
        argparse.Namespace(hidden_size=64),
        dt.date(2024, 1, 2),
        pathlib.PurePosixPath("/a/b"),
        np.dtype("<f4"),
        np.float32(1.5),
        np.arange(3, dtype=np.int32),
        np.random.default_rng(0).bit_generator.state["state"]["state"],
    ]
    namespace, date, path, dtype, scalar, array, number = load(pickle.dumps(value, protocol), file="x")
    assert (namespace.kind, namespace.state) == ("Namespace", {"hidden_size": 64})
    assert (date.kind, date.args) == ("date", (b"\x07\xe8\x01\x02",))
    assert (path.kind, path.args) == ("PurePosixPath", ("/", "a", "b"))
    assert (dtype.kind, dtype.args[0]) == ("numpy.dtype", "f4")
    assert (scalar.kind, scalar.args[1]) == ("numpy.scalar", struct.pack("<f", 1.5))
    assert array.kind in ("ndarray", "_frombuffer")
    assert number == value[-1]


def test_enum_members_are_the_numbers_they_were_made_from():
    encoding = glob("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING")
    record = load(pickled(call(encoding, b"K\x00")), file="x")
    assert (record.kind, record.args) == ("MEM_FORMAT_ENCODING", (0,))


def test_a_tensor_says_where_it_lies():
    record = load(pickled(attacks.tensor(offset=b"K\x03")), file="x")
    assert record == TensorRecord(Storage("0", "F32", 8), 3, (8,), (1,), "F32")


def test_conjugates_are_marked():
    bits = pickle.dumps({"conj": True}, 2)[2:-1]
    whole = call(attacks._V2, attacks.storage(), b"K\x00", b"K\x08\x85", b"K\x01\x85", b"\x89", b"}", bits)
    record = load(pickled(whole), file="x")
    assert (record.conjugate, record.negative) == (True, False)


def test_a_subclass_of_tensor_stays_a_record():
    rebuild = glob("torch._tensor", "_rebuild_from_type_v2")
    arguments = b"(" + attacks.storage() + b"K\x00K\x08\x85K\x01\x85\x89}t"
    record = load(pickled(call(rebuild, attacks._V2, glob("someones", "Float8Tensor"), arguments, b"N")), file="x")
    assert record.kind == "someones.Float8Tensor"
    assert isinstance(record.args[0], TensorRecord)


def test_memory_views_are_taken():
    assert load(memoryview(pickle.dumps([1], 2)), file="x") == [1]


def test_a_stream_tells_where_its_pickles_end():
    data = pickle.dumps("first", 2) + pickle.dumps({"second": 2}, 4) + b"rest"
    first = pickles.load_at(data, 0, file="x")
    second = pickles.load_at(data, first.end, file="x")
    assert (first.root, second.root) == ("first", {"second": 2})
    assert data[second.end :] == b"rest"


def test_long_texts_and_many_memo_entries_pass():
    value = ["x" * size for size in (0, 1, 159, 160, 161, 255, 256, 70_000)] + [str(i) for i in range(70_000)]
    for protocol in (2, 4):
        assert load(pickle.dumps(value, protocol), file="x") == value


def test_cut_pickles_end_too_early():
    data = pickle_of("llama-fsdp2-hsdp-2x2")
    for end in [*range(40), *range(40, len(data), 97)]:
        with pytest.raises(pickle_scan.EndsTooEarly):
            load(data[:end], file="x")


def test_dangerous_names_are_on_no_list():
    listed = pickle_names.RECORDS | pickle_names.CALLED_RECORDS
    assert not listed & pickle_names._DENIED_PAIRS
    assert not {name for _, name in listed} & {"eval", "exec", "compile", "getattr", "open", "system", "load"}


def test_nothing_is_imported_for_a_pickle():
    script = (
        "import sys, pickle; sys.path.insert(0, '.')\n"
        "from workers import pickles\n"
        "before = set(sys.modules)\n"
        "pickles.load(b'\\x80\\x02cjson.tool\\nMain\\n)\\x81.', file='x')\n"
        "pickles.load(b'\\x80\\x02ctorch\\nfloat32\\n.', file='x')\n"
        "assert not set(sys.modules) - before, set(sys.modules) - before\n"
    )
    root = Path(__file__).resolve().parent.parent
    subprocess.run([sys.executable, "-c", script], check=True, cwd=root)


def assert_named_error_or_data(data: bytes) -> None:
    error = None
    try:
        load(data, file="bad.pt")
    except UnshardError as raised:
        error = raised
    assert error is None or error.file == "bad.pt"


ORIGINALS = [
    pickle_of("llama-fsdp2-hsdp-2x2")[:3000] + b"u.",
    pickle_of("torch24-fsdp1-hsdp-2x2-llama"),
    pickle_of("llama-fsdp1-shardedtensor-ws3")[:4000],
    pickle_of("llama-fsdp1-ws1-plain-tensors"),
    pickle.dumps({"a": [(1, 2), {3}, frozenset((4,)), b"5" * 300, "6" * 300, bytearray(b"7")]}, 5),
    *attacks.NONSENSE.values(),
]
EDIT = st.tuples(st.integers(0, 1 << 30), st.one_of(st.binary(min_size=1, max_size=9), st.integers(0, 255)))


@settings(max_examples=600, deadline=None)
@given(st.sampled_from(ORIGINALS), st.lists(EDIT, min_size=1, max_size=6))
def test_damaged_pickles_give_a_named_error_or_data(original, edits):
    data = bytearray(original or b"\x80\x02N.")
    for position, edit in edits:
        at = position % len(data)
        if isinstance(edit, int):
            data[at] = edit
        else:
            data[at : at + len(edit) * (position & 1)] = edit
    assert_named_error_or_data(bytes(data))


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.sampled_from(
            [bytes([code]) for code in b"(N\x88]}\x8f)tsuaeb01R\x81\x85\x86\x87Q\x90\x91\x93\x94."]
            + [
                b"q\x00",
                b"h\x00",
                b"K\x01",
                attacks._SHARD,
                attacks._SIZE,
                attacks._V2,
                attacks._ORDERED,
                attacks.storage(),
                attacks.tensor(),
                text("a"),
                glob("collections", "deque"),
                glob("builtins", "set"),
                glob("a", "B"),
            ]
        ),
        max_size=40,
    )
)
def test_random_programs_give_a_named_error_or_data(program):
    assert_named_error_or_data(b"\x80\x04" + b"".join(program) + b".")
