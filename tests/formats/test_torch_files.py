"""State dicts in torch files, model folders of ``.bin`` and accelerate's rank files: what is read and refused."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor.placement_types import Shard

from tests.formats.evaluator import Evaluator
from tests.formats.test_dcp import assert_same, opened, refused
from tests.rank_files import Saved, write_rank_file
from workers.convert import plan_source
from workers.errors import (
    AmbiguousSource,
    CorruptFile,
    GeometryMismatch,
    IncompleteCheckpoint,
    InputError,
    UnmappedTensor,
)
from workers.options import ConvertOptions

WEIGHT = "model.layers.0.mlp.up_proj.weight"


def saved(folder: Path, content: object, name: str = "model.pt", **how) -> Path:
    folder.mkdir(exist_ok=True)
    torch.save(content, folder / name, **how)
    return folder


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("name", ["model.pt", "weights.pth", "pytorch_model.bin", "pytorch_model_fsdp.bin"])
def test_a_state_dict_is_read_whatever_its_file_is_called(tmp_path, name, zipped):
    tensors = {WEIGHT: torch.arange(6.0).reshape(2, 3), "norm.weight": torch.arange(3, dtype=torch.int64)}
    assert_same(opened(saved(tmp_path, tensors, name, _use_new_zipfile_serialization=zipped)), tensors)


def test_the_model_is_found_in_nested_dicts(tmp_path):
    weights = {WEIGHT: torch.ones(2, 2)}
    content = {"model": weights, "optimizer": {"state": {0: {"exp_avg": torch.ones(2, 2)}}}, "step": 3}
    found = opened(saved(tmp_path, content))
    assert_same(found, weights)
    assert [name for name, _ in found.left_out] == ["optimizer.state.0.exp_avg"]


def test_two_state_dicts_in_a_file_are_ambiguous_until_the_user_says_which(tmp_path):
    content = {"model": {WEIGHT: torch.ones(2, 2)}, "ema": {WEIGHT: torch.zeros(2, 2)}}
    refused(saved(tmp_path, content), AmbiguousSource)
    assert_same(opened(tmp_path, state_dict_key="ema"), {WEIGHT: torch.zeros(2, 2)})


def test_several_files_are_ambiguous_and_training_state_is_none_of_them(tmp_path):
    saved(saved(tmp_path, {WEIGHT: torch.ones(2)}), {"x": 1}, "optimizer.pt")
    assert list(opened(tmp_path).index) == [WEIGHT]
    assert "other.pt" in refused(saved(tmp_path, {WEIGHT: torch.ones(2)}, "other.pt"), AmbiguousSource).message


def test_views_are_read_from_their_storages_and_small_ones_do_not_read_big_ones(tmp_path):
    base = torch.arange(1 << 20, dtype=torch.float32)
    tensors = {"rows.weight": base[8:14].reshape(2, 3), "wide.weight": base[:6].reshape(2, 3).t()}
    found = opened(saved(tmp_path, tensors))
    assert_same(found, tensors)
    assert len(found.storages) == 1
    assert found.storages.crc32.tolist() == [-1]


def test_an_expanded_tensor_is_read_and_one_that_claims_what_no_file_holds_is_refused(tmp_path):
    mask = torch.arange(64.0).expand(5000, 64)
    assert_same(opened(saved(tmp_path, {"mask": mask}), family="none"), {"mask": mask})
    for shape, words in (((1 << 20, 1 << 20), "4 of its storage"), ((1 << 31, 1 << 31), "more than a model can have")):
        error = refused(saved(tmp_path, {WEIGHT: torch.ones(1).expand(shape)}), GeometryMismatch)
        assert words in error.message
        assert error.tensor == WEIGHT


def test_a_result_that_is_larger_than_any_model_is_not_planned(tmp_path):
    many = {f"layers.{number}.mask": torch.ones(1).expand(1 << 16, 1 << 16) for number in range(4097)}
    with pytest.raises(GeometryMismatch, match=r"more than any model; tensor layers\.0\.mask"):
        plan_source(str(saved(tmp_path, many)), ConvertOptions(family="none"))


def test_a_module_or_a_tensor_is_no_state_dict(tmp_path):
    assert "state_dict" in refused(saved(tmp_path, torch.nn.Linear(2, 2)), CorruptFile).hint
    assert "one tensor" in refused(saved(tmp_path, torch.ones(2)), CorruptFile).message


def test_weights_that_are_no_plain_tensors_are_named(tmp_path):
    sparse = torch.eye(3).to_sparse()
    error = refused(saved(tmp_path, {WEIGHT: sparse, "norm.weight": torch.ones(2)}), GeometryMismatch)
    assert (error.tensor, error.found) == (WEIGHT, "a sparse tensor")
    meta = refused(saved(tmp_path, {WEIGHT: torch.ones(3, device="meta")}), GeometryMismatch)
    assert "no values" in meta.message


class Subclass(torch.Tensor):
    """A tensor whose values may mean anything, as those of bitsandbytes do."""


class Wrapper(torch.Tensor):
    """A tensor that holds others, as those of quantising libraries do."""

    @staticmethod
    def __new__(cls, inner):
        wrapper = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        wrapper.inner = inner
        return wrapper

    @classmethod
    def __torch_dispatch__(cls, function, _types, args=(), _kwargs=None):
        return function(*args)


@pytest.mark.parametrize("weight", [torch.ones(3).as_subclass(Subclass), Wrapper(torch.ones(3))])
def test_a_tensor_of_an_unknown_class_is_named_where_the_model_is(tmp_path, weight):
    content = {"model": {WEIGHT: torch.ones(2), "b.weight": weight}}
    error = refused(saved(tmp_path, content), GeometryMismatch)
    assert (error.tensor, type(weight).__name__ in error.message) == ("model.b.weight", True)
    beside = {"model": {WEIGHT: torch.ones(2)}, "optimizer": {"state": weight}}
    assert_same(opened(saved(tmp_path, beside)), {WEIGHT: torch.ones(2)})


def test_a_lazy_conjugate_is_refused(tmp_path):
    values = torch.ones(3, dtype=torch.complex64).conj()
    assert refused(saved(tmp_path, {WEIGHT: values}), GeometryMismatch).tensor == WEIGHT
    assert "negative" in refused(saved(tmp_path, {WEIGHT: torch._neg_view(torch.ones(3))}), GeometryMismatch).message


def test_a_dict_inside_of_itself_is_refused(tmp_path):
    content: dict[str, object] = {WEIGHT: torch.ones(2)}
    content["again"] = content
    assert "nested" in refused(saved(tmp_path, content), CorruptFile).message


def test_dicts_that_hold_each_other_again_and_again_are_refused(tmp_path):
    content: list[object] = [torch.ones(1)]
    for _ in range(25):
        content = [content, content]
    error = refused(saved(tmp_path, {WEIGHT: torch.ones(2), "optimizer": content}), CorruptFile)
    assert "again and again" in error.message


def test_one_dict_in_two_places_is_read_in_both(tmp_path):
    weights = {WEIGHT: torch.ones(2)}
    found = opened(saved(tmp_path, {"model": weights, "optimizer": {"masters": weights}}))
    assert_same(found, weights)
    assert [name for name, _ in found.left_out] == [f"optimizer.masters.{WEIGHT}"]


def test_what_is_no_tensor_beside_the_weights_is_said(tmp_path):
    weights = {WEIGHT: torch.ones(2), "norm.weight": np.ones(2), "layer._extra_state": None}
    found = opened(saved(tmp_path, {"model": weights, "masks": {"a": torch.eye(3).to_sparse()}, "epoch": 3}))
    assert_same(found, {WEIGHT: torch.ones(2)})
    told = dict(found.left_out)
    assert told.pop("model.norm.weight").startswith("no tensor: numpy.")
    assert told == {"masks.a": "a sparse tensor", "model.layer._extra_state": "no tensor: NoneType"}


@pytest.mark.parametrize("key", [("a", 1), True, b"norm.weight"])
def test_a_tensor_of_the_model_under_a_key_that_is_no_name_is_told(tmp_path, key):
    error = refused(saved(tmp_path, {WEIGHT: torch.ones(2), key: torch.ones(3)}), GeometryMismatch)
    assert repr(key) in error.message


def sharded(folder: Path) -> Path:
    files = [f"pytorch_model-0000{number}-of-00002.bin" for number in (1, 2)]
    saved(folder, {"a.weight": torch.ones(2)}, files[0])
    saved(folder, {"b.weight": torch.zeros(2)}, files[1])
    where = {"a.weight": files[0], "b.weight": files[1]}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": where}))
    return folder


def test_sharded_files_are_read_through_their_index(tmp_path):
    assert_same(opened(sharded(tmp_path)), {"a.weight": torch.ones(2), "b.weight": torch.zeros(2)})
    (tmp_path / "pytorch_model-00002-of-00002.bin").unlink()
    assert refused(tmp_path, IncompleteCheckpoint).tensor == "b.weight"


def test_a_tensor_that_is_not_where_the_index_says_is_told(tmp_path):
    saved(sharded(tmp_path), {"c.weight": torch.ones(2)}, "pytorch_model-00002-of-00002.bin")
    assert refused(tmp_path, IncompleteCheckpoint).tensor == "b.weight"


def test_a_tensor_in_two_files_is_refused(tmp_path):
    saved(
        sharded(tmp_path), {"a.weight": torch.ones(2), "b.weight": torch.ones(2)}, "pytorch_model-00002-of-00002.bin"
    )
    assert refused(tmp_path, GeometryMismatch).tensor == "a.weight"


def test_a_whole_file_beside_numbered_ones_and_no_index_is_ambiguous(tmp_path):
    (sharded(tmp_path) / "pytorch_model.bin.index.json").unlink()
    assert_same(opened(tmp_path), {"a.weight": torch.ones(2), "b.weight": torch.zeros(2)})
    saved(tmp_path, {"a.weight": torch.ones(2)}, "pytorch_model.bin")
    assert "pytorch_model-00001-of-00002.bin" in refused(tmp_path, AmbiguousSource).message


def test_accelerates_rank_files_are_put_together_and_a_missing_one_is_named(tmp_path):
    content = {WEIGHT: Saved((4, 3), (Shard(0),))}
    for rank in range(2):
        write_rank_file(tmp_path / f"pytorch_model_fsdp_0_rank{rank}.bin", content, (2,), rank)
    found = opened(tmp_path)
    assert found.format == "accelerate-fsdp"
    Evaluator(found).whole(found.index[WEIGHT])
    (tmp_path / "pytorch_model_fsdp_0_rank1.bin").unlink()
    assert "pytorch_model_fsdp_0_rank1.bin" in refused(tmp_path, IncompleteCheckpoint).message


def test_accelerates_flat_parameters_are_refused(tmp_path):
    for rank in range(2):
        saved(tmp_path, {"layers.0._flat_param": torch.ones(4)}, f"pytorch_model_fsdp_rank{rank}.bin")
    assert "use_orig_params" in refused(tmp_path, UnmappedTensor).hint


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 1 << 20), st.integers(0, 255)), min_size=1, max_size=4), st.booleans())
def test_a_damaged_file_is_a_named_error_or_tensors_that_can_be_read(changes, zipped):
    with tempfile.TemporaryDirectory() as path:
        folder = saved(
            Path(path), {"a.weight": torch.ones(4, 3), "b": {"c": 1}}, _use_new_zipfile_serialization=zipped
        )
        content = bytearray((folder / "model.pt").read_bytes())
        for position, value in changes:
            content[position % len(content)] = value
        (folder / "model.pt").write_bytes(content)
        try:
            found = opened(folder, family="none")
        except InputError:
            return
        evaluator = Evaluator(found)
        for number in range(len(found.tensors)):
            evaluator.whole(number)
