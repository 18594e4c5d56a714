"""What verification finds."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.synthetic import identity_plan, random_tensors, write_source
from workers.convert import run_plan
from workers.errors import IncompleteCheckpoint
from workers.options import ConvertOptions
from workers.verify import compare_plans, verify_model


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


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "a flipped bit": (lambda m: flip_last_bit(m / "model-00001-of-00004.safetensors"), "model-00001-of-00004"),
    "a missing shard": (lambda m: (m / "model-00002-of-00004.safetensors").unlink(), "model-00002-of-00004"),
    "a cut file": (lambda m: (m / "model-00003-of-00004.safetensors").write_bytes(b"123"), "model-00003-of-00004"),
    "an index that forgets": (cut_index, "model.safetensors.index.json"),
    "an edited config": (lambda m: (m / "config.json").write_text('{"model_type": "other"}'), "config.json"),
    "a broken manifest": (lambda m: (m / "unshard.json").write_text("{}"), "unshard.json"),
}


def test_a_fresh_model_is_sound(model: Path) -> None:
    report = verify_model(str(model))
    assert report.equal
    assert report.tensors == 10


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
