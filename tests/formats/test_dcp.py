"""torch DCP folders: any cuts in any files, and everything that can be wrong with them."""

from __future__ import annotations

import json
import pickle
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorProperties

from tests.dcp_files import DcpFolder, DcpSaved, write_dcp
from tests.formats.evaluator import Evaluator
from workers import merge
from workers.arithmetic import NumpyArithmetic
from workers.checkpoint import Checkpoint
from workers.convert import plan_source
from workers.errors import (
    AmbiguousSource,
    CorruptFile,
    GeometryMismatch,
    IncompleteCheckpoint,
    InputError,
    InvalidOption,
    UnknownFormat,
    UnmappedTensor,
    UnshardError,
)
from workers.formats import open_checkpoint
from workers.merge import decompress_zstd
from workers.options import ConvertOptions
from workers.storage import open_folder

WEIGHT = "model.layers.0.mlp.up_proj.weight"
DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.float8_e4m3fn, torch.bool)


def opened(folder: Path, **options) -> Checkpoint:
    return open_checkpoint(open_folder(str(folder)), ConvertOptions(**options))


def refused(folder: Path, kind: type[UnshardError], **options) -> UnshardError:
    with pytest.raises(kind) as caught:
        opened(folder, **options)
    assert caught.value.hint
    return caught.value


def raw(values: torch.Tensor) -> np.ndarray:
    width = values.element_size()
    flat = values.contiguous().reshape(-1).view(torch.uint8).numpy()
    return flat.view(f"u{width}").reshape(values.shape)


def assert_same(checkpoint: Checkpoint, tensors: dict[str, torch.Tensor]) -> None:
    assert sorted(checkpoint.index) == sorted(tensors)
    evaluator = Evaluator(checkpoint)
    for name, values in tensors.items():
        assert (evaluator.whole(checkpoint.index[name]) == raw(values)).all(), name


def values_of(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    count = int(np.prod(shape))
    return (torch.arange(count) % 100).reshape(shape).to(dtype)


@st.composite
def saved_tensors(draw):
    shape = tuple(draw(st.lists(st.integers(0, 7), min_size=0, max_size=3)))
    cuts = [draw(st.lists(st.integers(0, 7), max_size=3)) for _ in shape]
    return DcpSaved(values_of(shape, draw(st.sampled_from(DTYPES))), cuts, draw(st.booleans()))


@settings(max_examples=40, deadline=None)
@given(st.lists(saved_tensors(), min_size=1, max_size=4), st.integers(1, 4))
def test_tensors_cut_anyhow_come_back_whole(saved, ranks):
    folder = DcpFolder()
    for number, tensor in enumerate(saved):
        folder.add(f"layers.{number}.weight", tensor, ranks=ranks)
    with tempfile.TemporaryDirectory() as path:
        found = opened(folder.write(Path(path) / "dcp"), family="none")
        assert_same(found, {f"layers.{number}.weight": tensor.values for number, tensor in enumerate(saved)})


def test_what_torch_itself_saves_is_read(tmp_path):
    tensors = {"model.norm.weight": torch.arange(6.0), WEIGHT: torch.arange(24.0).reshape(4, 6).t()}
    with pytest.warns(UserWarning, match="single process"):
        dcp.save({"model": tensors, "step": 3}, checkpoint_id=tmp_path, no_dist=True)
    assert_same(opened(tmp_path), tensors)


def test_files_saved_without_checksums_are_read(tmp_path):
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        write_dcp(tmp_path, {WEIGHT: torch.ones(4, 4)})
    finally:
        torch.serialization.set_crc32_options(before)
    found = opened(tmp_path)
    assert (found.storages.crc32 == -1).all()


# --- the model among other things --------------------------------------------------------------------------


def nested(path: Path, *parts: tuple[str, ...]) -> Path:
    folder = DcpFolder()
    for part in parts:
        folder.add(".".join((*part, WEIGHT)), DcpSaved(torch.ones(4, 2)), path=(*part, WEIGHT))
    folder.add("optim.state.exp_avg", DcpSaved(torch.ones(4, 2)), path=("optim", "state", "exp_avg"))
    folder.add("count", DcpSaved(torch.tensor(3)), path=("count",))
    folder.add_object("lr", ("optim", "lr"))
    return folder.write(path)


def test_the_model_is_found_below_its_keys_and_the_rest_is_listed(tmp_path):
    found = opened(nested(tmp_path, ("app", "model")))
    assert list(found.index) == [WEIGHT]
    assert {name for name, _ in found.left_out} == {"optim.state.exp_avg", "count"}
    assert any("objects such as lr" in note for note in found.notes)


def test_two_models_are_ambiguous_until_a_prefix_says_which(tmp_path):
    error = refused(nested(tmp_path, ("model",), ("ema",)), AmbiguousSource)
    assert "model_prefix" in error.hint
    assert list(opened(tmp_path, model_prefix="ema.").index) == [WEIGHT]
    assert list(opened(tmp_path, state_dict_key="model").index) == [WEIGHT]
    refused(tmp_path, InvalidOption, model_prefix="critic.")
    refused(tmp_path, InvalidOption, state_dict_key="critic")


def test_optimizer_state_alone_is_no_model(tmp_path):
    assert "optimizer" in refused(nested(tmp_path), UnknownFormat).hint


@pytest.mark.parametrize(
    "name", ["module.a.weight", "_orig_mod.a.weight", "module.module.a._fsdp_wrapped_module.weight"]
)
def test_segments_of_wrappers_are_taken_off(tmp_path, name):
    write_dcp(tmp_path, {name: torch.ones(2)})
    assert list(opened(tmp_path).index) == ["a.weight"]


def test_names_that_become_one_without_wrappers_are_refused(tmp_path):
    write_dcp(tmp_path, {"a.weight": torch.ones(2), "module.a.weight": torch.ones(2)})
    assert refused(tmp_path, GeometryMismatch).tensor == "a.weight"


def test_flat_parameters_are_refused(tmp_path):
    write_dcp(tmp_path, {"layers.0._flat_param": torch.ones(9)})
    assert "use_orig_params" in refused(tmp_path, UnmappedTensor).hint


# --- folders -----------------------------------------------------------------------------------------------


def test_steps_are_chosen_by_option_or_refused(tmp_path):
    for step in (5, 10):
        write_dcp(tmp_path / "checkpoint" / f"step-{step}", {WEIGHT: torch.full((2,), float(step))})
    refused(tmp_path, AmbiguousSource)
    found = opened(tmp_path, step=5)
    assert all(file.path.startswith("checkpoint/step-5/") for file in found.files)
    assert "step-7" in refused(tmp_path, IncompleteCheckpoint, step=7).message


def test_accelerates_model_folder_is_taken_and_not_its_optimizers(tmp_path):
    write_dcp(tmp_path / "checkpoint-3" / "pytorch_model_fsdp_0", {f"model.{WEIGHT}": torch.ones(2)})
    write_dcp(tmp_path / "checkpoint-3" / "optimizer_0", {"optimizer.state.x": torch.ones(2)})
    assert list(opened(tmp_path).index) == [WEIGHT]
    write_dcp(tmp_path / "checkpoint-3" / "pytorch_model_fsdp_1", {f"model.{WEIGHT}": torch.ones(2)})
    assert "pytorch_model_fsdp_1" in refused(tmp_path, AmbiguousSource).message


def test_a_save_without_metadata_is_not_finished(tmp_path):
    write_dcp(tmp_path, {WEIGHT: torch.ones(2)})
    (tmp_path / ".metadata").unlink()
    assert ".metadata" in refused(tmp_path, IncompleteCheckpoint).message


def test_metadata_of_ranks_are_brought_together_and_copies_compared(tmp_path):
    folder = write_dcp(tmp_path, {WEIGHT: torch.arange(8.0)})
    (tmp_path / "__0.metadata").write_bytes(pickle.dumps(folder.metadata))
    (tmp_path / "__1.metadata").write_bytes(pickle.dumps(folder.metadata))
    (tmp_path / ".metadata").unlink()
    found = opened(tmp_path)
    assert_same(found, {WEIGHT: torch.arange(8.0)})
    assert len(found.replicas) == len(found.pieces)
    (tmp_path / ".metadata").write_bytes((tmp_path / "__0.metadata").read_bytes())
    assert "two saves" in refused(tmp_path, AmbiguousSource).message
    (tmp_path / ".metadata").unlink()
    (tmp_path / "__0.metadata").rename(tmp_path / "__2.metadata")
    assert "__0.metadata" in refused(tmp_path, IncompleteCheckpoint).message


# --- what is wrong -----------------------------------------------------------------------------------------


def broken(tmp_path: Path, change) -> Path:
    folder = DcpFolder()
    folder.add(WEIGHT, DcpSaved(torch.arange(32.0).reshape(8, 4), [[4]]), ranks=2)
    change(folder)
    return folder.write(tmp_path)


def entry(folder: DcpFolder):
    return folder.metadata.state_dict_metadata[WEIGHT]


def infos(folder: DcpFolder):
    return list(folder.metadata.storage_data.values())


@pytest.mark.parametrize(("name", "size"), [(".metadata", 1 << 40), ("__999999999999.metadata", 1)])
def test_metadata_that_can_be_none_are_refused_at_once(tmp_path, name, size):
    with (tmp_path / name).open("wb") as file:
        file.truncate(size)
    kind = CorruptFile if size > 1 else IncompleteCheckpoint
    assert (str(size) if size > 1 else "__0.metadata") in refused(tmp_path, kind).message


def test_an_offset_beyond_any_tensor_is_refused(tmp_path):
    sharding = {"DCP_SHARDING_INFO": json.dumps({WEIGHT: {"saved_offsets": [(1 << 63) - 2, 0]}})}
    save_file({WEIGHT: torch.ones(2, 3)}, tmp_path / "shard-00001-model-00001-of-00001.safetensors", sharding)
    assert refused(tmp_path, GeometryMismatch).tensor == WEIGHT


def test_numbers_of_safetensors_that_no_rank_has_are_said(tmp_path):
    for rank in (1, 2):
        sharding = {"DCP_SHARDING_INFO": json.dumps({WEIGHT: {"saved_offsets": [2 * rank - 2, 0]}})}
        name = f"shard-0000{rank}-model-00002-of-00003.safetensors"
        save_file({WEIGHT: torch.full((2, 3), float(rank))}, tmp_path / name, sharding)
    found = opened(tmp_path)
    assert_same(found, {WEIGHT: torch.tensor([1.0, 1.0, 2.0, 2.0])[:, None].repeat(1, 3)})
    assert any("numbered 1, 3 of 3" in note for note in found.notes)


def test_a_chunk_without_an_item_is_told(tmp_path):
    error = refused(broken(tmp_path, lambda folder: folder.metadata.storage_data.popitem()), IncompleteCheckpoint)
    assert error.tensor == WEIGHT


def test_a_chunk_that_the_metadata_lack_is_a_gap(tmp_path):
    assert refused(broken(tmp_path, lambda folder: entry(folder).chunks.pop()), IncompleteCheckpoint).tensor == WEIGHT


def test_a_chunk_outside_of_its_tensor_is_refused(tmp_path):
    def change(folder):
        entry(folder).chunks[1] = ChunkStorageMetadata(torch.Size((6, 0)), torch.Size((4, 4)))

    assert "does not lie in tensor" in refused(broken(tmp_path, change), GeometryMismatch).message


def test_another_dtype_than_the_items_is_refused(tmp_path):
    def change(folder):
        entry(folder).properties = TensorProperties(dtype=torch.bfloat16)

    error = refused(broken(tmp_path, change), GeometryMismatch)
    assert (error.expected, error.found) == ("BF16 [4, 4]", "F32 [4, 4]")


def test_a_dtype_that_no_model_can_hold_is_refused(tmp_path):
    write_dcp(tmp_path, {WEIGHT: torch.ones(2, dtype=torch.complex128)})
    assert "complex128" in refused(tmp_path, GeometryMismatch).message


def test_an_unknown_transform_is_named(tmp_path):
    def change(folder):
        infos(folder)[0].transform_descriptors = ["stream.secret/9"]

    assert "stream.secret/9" in refused(broken(tmp_path, change), CorruptFile).message


@pytest.mark.parametrize("name", ["../x.distcp", "/etc/passwd", "a\\b", ""])
def test_files_outside_of_the_folder_are_refused(tmp_path, name):
    def change(folder):
        infos(folder)[0].relative_path = name

    assert refused(broken(tmp_path, change), CorruptFile).found == name


def test_a_file_that_is_too_short_is_told_with_a_tensor(tmp_path):
    error = refused(broken(tmp_path, lambda folder: folder.files["__1_0.distcp"].pop()), IncompleteCheckpoint)
    assert (error.file, error.tensor) == ("__1_0.distcp", WEIGHT)


def test_a_file_of_another_save_is_told(tmp_path):
    def change(folder):
        folder.files["__1_0.distcp"][:4] = b"\x00\x00\x00\x00"
        folder.files["__1_0.distcp"][-22:] = bytes(22)

    error = refused(broken(tmp_path, change), CorruptFile)
    assert (error.file, error.tensor) == ("__1_0.distcp", WEIGHT)


def test_a_compressed_item_is_decoded_and_checked(tmp_path):
    folder = DcpFolder()
    folder.add(WEIGHT, DcpSaved(torch.arange(32.0), [[16]]), zstd=True)
    found = opened(folder.write(tmp_path))
    assert (found.storages.encoding == 1).all()
    folder.files["__0_0.distcp"][40:60] = bytes(20)
    assert refused(folder.write(tmp_path), CorruptFile).tensor == WEIGHT


class Discarded:
    """A sink that keeps nothing."""

    def lend(self, _offset, length):
        return memoryview(bytearray(length))

    def take(self, offset, block):
        pass


def test_a_large_compressed_item_is_decoded_once_for_all_of_its_parts(tmp_path, monkeypatch):
    folder = DcpFolder()
    folder.add(WEIGHT, DcpSaved(torch.zeros(1 << 22)), zstd=True)
    folder.write(tmp_path)
    plan = plan_source(str(tmp_path), ConvertOptions(family="none", memory="64MiB"))
    assert len(plan.layout.parts) == 4
    decoded = []
    monkeypatch.setattr(merge, "decompress_zstd", lambda *args: decoded.append(args[1]) or decompress_zstd(*args))
    merger = merge.Merger(plan.recipe, open_folder(str(tmp_path)), NumpyArithmetic())
    for part in range(4):
        merger.make(part, Discarded())
    assert len(decoded) == 1


FUZZED = DcpFolder()
for _number in range(3):
    FUZZED.add(f"layers.{_number}.weight", DcpSaved(torch.arange(32.0).reshape(8, 4), [[4]]), ranks=2)


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from((".metadata", "__0_0.distcp")),
    st.lists(st.tuples(st.integers(0, 1 << 20), st.integers(0, 255)), min_size=1, max_size=4),
)
def test_a_damaged_folder_is_a_named_error_or_a_checkpoint_that_can_be_read(name, changes):
    with tempfile.TemporaryDirectory() as path:
        folder = FUZZED.write(Path(path))
        content = bytearray((folder / name).read_bytes())
        for position, value in changes:
            content[position % len(content)] = value
        (folder / name).write_bytes(content)
        try:
            found = opened(folder, family="none")
        except InputError:
            return
        evaluator = Evaluator(found)
        for number in range(len(found.tensors)):
            evaluator.whole(number)
