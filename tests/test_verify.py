"""What verification finds."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import zstandard
from numpy.typing import NDArray

from tests.synthetic import checkpoint_of, identity_plan, random_tensors, write_source
from workers.checkpoint import Checkpoint, SourceFile
from workers.checkpoint_builder import CheckpointBuilder
from workers.compare import compare_sources
from workers.convert import convert, run_plan
from workers.errors import IncompleteCheckpoint
from workers.manifest import DIGEST_PREFIX, digest, digest_of_list
from workers.merge import decompress_zstd
from workers.options import ConvertOptions
from workers.safetensors_file import build_header
from workers.verify import Report, verify_model
from workers.verify_pairs import THREADS, CompareLimits, compare_plans

CASES = Path(__file__).parent / "cases"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    plan = identity_plan(
        write_source(tmp_path / "source", random_tensors(4, count=10), 4), ConvertOptions(max_shard_size="1KB")
    )
    run_plan(plan, str(tmp_path / "model"))
    return tmp_path / "model"


def flip_last_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def cut_index(model: Path) -> None:
    path = model / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"].popitem()
    path.write_text(json.dumps(index))


def drop_from_manifest(model: Path) -> None:
    """Damage a file, and make the manifest say nothing of it."""
    flip_last_bit(model / "model-00001-of-00004.safetensors")
    manifest = json.loads((model / "unshard.json").read_text())
    del manifest["weights"][0]
    (model / "unshard.json").write_text(json.dumps(manifest))


def drop_a_part(model: Path) -> None:
    """Damage the last part of a file, and make the manifest forget it in a way that fits together."""
    manifest = json.loads((model / "unshard.json").read_text())
    entry = next(entry for entry in manifest["weights"] if entry["parts"])
    flip_last_bit(model / entry["path"])
    header, part = entry["header_digest"], {"offset": entry["parts"][0]["offset"], "length": 0, "digest": digest(b"")}
    entry.update(parts=[part], digest=DIGEST_PREFIX + digest_of_list([header, part["digest"]]))
    (model / "unshard.json").write_text(json.dumps(manifest))


def repeat_a_tensor(model: Path) -> None:
    """Put a tensor of another shard into one more, with other values; the index still names the right one."""
    index = json.loads((model / "model.safetensors.index.json").read_text())
    name, shard = max(index["weight_map"].items(), key=lambda item: item[1])
    extra = model / "model-00000-of-00004.safetensors"
    extra.write_bytes(build_header([(name, "U8", (1,)), ("other", "U8", (1,))], {}) + b"\1\2")
    index["weight_map"]["other"] = extra.name
    assert shard != extra.name
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    (model / "unshard.json").unlink()


EMPTY = (8).to_bytes(8, "little") + b"{}      "
DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "a flipped bit": (lambda m: flip_last_bit(m / "model-00001-of-00004.safetensors"), "model-00001-of-00004"),
    "a missing shard": (lambda m: (m / "model-00002-of-00004.safetensors").unlink(), "model-00002-of-00004"),
    "a cut file": (lambda m: (m / "model-00003-of-00004.safetensors").write_bytes(b"123"), "model-00003-of-00004"),
    "an index that forgets": (cut_index, "model.safetensors.index.json"),
    "a weight file too many": (lambda m: (m / "extra.safetensors").write_bytes(EMPTY), "extra.safetensors"),
    "an edited config": (lambda m: (m / "config.json").write_text('{"model_type": "other"}'), "config.json"),
    "a manifest that forgets a file": (drop_from_manifest, "model-00001-of-00004"),
    "a manifest that forgets a part": (drop_a_part, "no digest for some bytes"),
    "a tensor in two files": (repeat_a_tensor, "model-00000-of-00004.safetensors and in model-"),
    "code that was added": (lambda m: (m / "modeling_x.py").write_text("import os"), "modeling_x.py"),
    "pickled weights that were added": (lambda m: (m / "pytorch_model.bin").write_bytes(b""), "pytorch_model.bin"),
    "weights that were added below": (
        lambda m: [(m / "more").mkdir(), (m / "more" / "adapter_model.safetensors").write_bytes(EMPTY)],
        "more/adapter_model.safetensors",
    ),
    "a broken manifest": (lambda m: (m / "unshard.json").write_text("{}"), "unshard.json"),
}


def test_a_fresh_model_is_sound(model: Path) -> None:
    report = verify_model(str(model))
    assert report.equal
    assert report.tensors == 10


def test_what_is_written_for_people_may_be_added(model: Path) -> None:
    (model / "README.md").write_text("# Model")
    (model / "eval.json").write_text("{}")
    assert verify_model(str(model)).equal


def test_the_index_of_a_folder_below_is_compared_too(model: Path) -> None:
    (model / "unshard.json").unlink()
    shutil.copytree(model, model / "critic")
    assert verify_model(str(model)).equal
    cut_index(model / "critic")
    assert any("critic/model.safetensors.index.json says nothing" in p for p in verify_model(str(model)).problems)


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_found_and_its_file_named(model: Path, name: str) -> None:
    damage, word = DAMAGE[name]
    damage(model)
    report = verify_model(str(model))
    assert not report.equal
    assert any(word in problem for problem in report.problems)


def test_a_model_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(IncompleteCheckpoint, match="nothing"):
        verify_model(str(tmp_path / "nowhere"))


def test_a_file_of_a_model_is_no_model(model: Path) -> None:
    with pytest.raises(IncompleteCheckpoint, match=r"config\.json is a file, not a folder"):
        verify_model(str(model / "config.json"))


def test_the_first_difference_is_told_with_its_place_and_values(tmp_path: Path) -> None:
    values = np.linspace(1, 2, 12, dtype=np.float32).reshape(3, 4)
    other = values.copy()
    other[1, 2] += 0.5
    plans = [
        identity_plan(write_source(tmp_path / name, {"w": ("F32", v.view(np.uint32))}, 1))
        for name, v in (("a", values), ("b", other))
    ]
    report = compare_plans(*plans)
    assert "tensor w: 1 of 12 elements differ, by up to 0.5; first at [1, 2]" in report.problems[0]
    assert compare_plans(*plans, atol=0.6).equal
    assert not compare_plans(*plans, atol=0.4).equal


def test_a_comparison_whose_time_is_over_tells_how_far_it_came(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.plan.part_size", lambda _: 256)
    monkeypatch.setattr("workers.verify_pairs.THREADS", 1)
    values = np.linspace(1, 2, 256, dtype=np.float32).reshape(4, 64)
    other = values.copy()
    other[1, 2] += 0.5
    other[3, 0] += 0.5
    plans = {
        name: identity_plan(write_source(tmp_path / name, {"w": ("F32", v.view(np.uint32))}, 1))
        for name, v in (("a", values), ("b", other), ("end", np.concatenate([values[:3], other[3:]])))
    }

    def compared(second: str, blocks: int) -> Report:
        """As if looking at the clock were all that takes time: one look for each block, of one row."""
        monkeypatch.setattr("workers.verify_pairs.time", SimpleNamespace(monotonic=itertools.count(1).__next__))
        return compare_plans(plans["a"], plans[second], limits=CompareLimits(until=blocks))

    report = compared("b", 3)
    assert report.details["compared_bytes"] == 3 * 64 * 4
    assert report.checks == ("names, dtypes and shapes", "every bit of 768 of 1024 bytes")
    [difference] = report.details["differences"]
    assert (difference["different_elements"], difference["index"]) == (1, [1, 2])
    assert compared("end", 3).equal
    report = compared("end", 4)
    assert (report.equal, report.details["compared_bytes"]) == (False, 1024)
    assert report.details["differences"][0]["index"] == [3, 0]
    assert report.checks[-1] == "every bit"
    assert compared("end", 0).details["compared_bytes"] == 0


def test_names_dtypes_and_shapes_are_compared(tmp_path: Path) -> None:
    a = {
        "same": ("U8", np.zeros(3, np.uint8)),
        "shape": ("U8", np.zeros(3, np.uint8)),
        "gone": ("U8", np.zeros(1, np.uint8)),
    }
    b = {"same": ("U8", np.zeros(3, np.uint8)), "shape": ("U8", np.zeros(4, np.uint8))}
    plans = [identity_plan(write_source(tmp_path / name, t, 1)) for name, t in (("a", a), ("b", b))]
    problems = compare_plans(*plans).problems
    assert any("lacks 1 tensors: gone" in problem for problem in problems)
    assert any("tensor shape: U8 [3] in the first, U8 [4] in the second" in problem for problem in problems)


def test_nan_differs_from_a_number_whatever_the_tolerance(tmp_path: Path) -> None:
    plans = [
        identity_plan(write_source(tmp_path / name, {"w": ("F32", np.array([bits], np.uint32))}, 1))
        for name, bits in (("a", 0x7FC00000), ("b", 0))
    ]
    assert not compare_plans(*plans, atol=1e9).equal


def test_every_bit_is_compared_whatever_it_means(tmp_path: Path) -> None:
    pairs = {
        "I64": (np.array([2**64 - 1], np.uint64), np.array([2**64 - 2], np.uint64)),
        "F32": (np.array([0], np.uint32), np.array([0x80000000], np.uint32)),
        "F8_E4M3": (np.array([0x7E], np.uint8), np.array([0x7D], np.uint8)),
    }
    for dtype, values in pairs.items():
        plans = [
            identity_plan(write_source(tmp_path / f"{dtype}-{n}", {"w": (dtype, v)}, 1)) for n, v in enumerate(values)
        ]
        assert not compare_plans(*plans).equal
    assert not compare_plans(*plans, atol=1).equal


def test_a_cast_model_is_compared_with_its_source_as_it_was_made(tmp_path: Path) -> None:
    source = str(CASES / "verl-fsdp" / "llama-gqa-fsdp2-ws2" / "input")
    convert(source, str(tmp_path / "model"), ConvertOptions(dtype="bfloat16"))
    report = compare_sources(source, str(tmp_path / "model"))
    assert report.equal
    assert report.tensors == 21
    assert "dtype=bfloat16" in report.checks[-1]
    flip_last_bit(tmp_path / "model" / "model.safetensors")
    assert not compare_sources(source, str(tmp_path / "model")).equal


def test_a_compressed_storage_is_decoded_once_for_its_neighbours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = identity_plan(compressed_source(tmp_path, np.arange(8 << 20, dtype=np.uint8)))
    decoded: list[str] = []

    def counted(data: bytes, length: int, path: str) -> memoryview:
        decoded.append(path)
        return decompress_zstd(data, length, path)

    monkeypatch.setattr("workers.merge.decompress_zstd", counted)
    report = compare_plans(plan, plan)
    assert report.equal
    assert len(decoded) <= 2 * THREADS


def compressed_source(folder: Path, values: NDArray[np.uint8]) -> Checkpoint:
    """One tensor in one compressed storage."""
    data = zstandard.compress(values.tobytes())
    (folder / "file").write_bytes(data)
    builder = CheckpointBuilder()
    file = builder.add_file(SourceFile("file", len(data)))
    storage = builder.add_storage(file, 0, len(data), None, zstd_decoded_length=values.nbytes)
    builder.add_piece(builder.add_tensor("weight", "U8", values.shape), storage, 0, ((0,), values.shape), (1,))
    return checkpoint_of(builder, folder)


@pytest.mark.parametrize("broken", [0, 1])
def test_an_error_of_a_comparison_says_of_which_side(model: Path, tmp_path: Path, broken: int) -> None:
    sides = [tmp_path / "one", tmp_path / "two"]
    for side in sides:
        shutil.copytree(model, side)
    (sides[broken] / "model-00002-of-00004.safetensors").unlink()
    with pytest.raises(IncompleteCheckpoint, match=f"^{sides[broken]}: weights are missing: model-00002") as caught:
        compare_sources(*map(str, sides))
    assert caught.value.file == "model-00002-of-00004.safetensors"


@pytest.mark.parametrize("told", [True, False], ids=["alpha", "no-alpha"])
def test_an_adapter_beside_a_model_is_compared_with_it(tmp_path: Path, told: bool) -> None:
    source, model, other = tmp_path / "source", tmp_path / "model", tmp_path / "other"
    shutil.copytree(CASES / "verl-fsdp" / "lora-actor-fsdp2-ws2-train-meta" / "input", source)
    if not told:
        (source / "lora_train_meta.json").unlink()
    convert(str(source), str(model))
    shutil.copytree(model, other)
    for pair in ((source, model), (model, source), (model, other)):
        report = compare_sources(*map(str, pair))
        assert (report.problems, report.tensors) == ((), 49)
    flip_last_bit(other / "lora_adapter" / "adapter_model.safetensors")
    for first in (source, model):
        [problem] = compare_sources(str(first), str(other)).problems
        assert problem.startswith("tensor lora_adapter:base_model.model.")
