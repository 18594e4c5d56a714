"""The real checkpoints of ``tests/cases/deepspeed``, from the readers through the families to the expected bytes."""

from __future__ import annotations

import dataclasses
import shutil

import numpy as np
import pytest
import torch

from tests.formats.cases import Area
from tests.formats.evaluator import Evaluator
from workers.convert import convert
from workers.errors import IncompleteCheckpoint
from workers.formats import open_checkpoint
from workers.options import ConvertOptions
from workers.storage import open_folder

AREA = Area("deepspeed")
GOOD, REFUSED = AREA.split()
UNEVEN = AREA.folder / "ds-z3-bf16-w3-llama-uneven"


@pytest.mark.parametrize("name", GOOD)
def test_a_case_gives_exactly_the_expected_tensors_config_and_files(name):
    checkpoint, _, _ = AREA.assert_converted(name)
    assert checkpoint.format == AREA.described(name)["source_format"]


def test_all_cases_are_good_ones():
    assert (len(GOOD), REFUSED) == (10, [])


def test_buffers_that_the_model_does_not_have_are_left_out_and_listed():
    _, _, mapped = AREA.converted("ds-z2-bf16-w2-qwen3-two-groups-buffers")
    assert {dropped.name for dropped in mapped.dropped} == {"model.step_table", "model.scale_buf"}


@pytest.mark.parametrize("name", ["ds-z1-bf16-w2-llama", "ds-autotp2-z1-bf16-w4-llama", "ds-hftrainer-z3-w2-qwen3"])
def test_the_fp32_weights_rounded_are_the_weights_of_the_module(name):
    """Without a wish the fp32 weights are taken; rounded they are what the case expects in bfloat16."""
    options = AREA.options(name)
    folder = open_folder(str(AREA.folder / name / "input"))
    full = open_checkpoint(folder, dataclasses.replace(options, dtype=None))
    rounded = open_checkpoint(folder, options)
    for tensor in full.tensors:
        values = Evaluator(full).whole(full.index[tensor.name]).view(np.float32)
        number = rounded.index[tensor.name]
        expected = Evaluator(rounded).whole(number)
        if rounded.tensors[number].dtype == "BF16":
            values = torch.from_numpy(values).to(torch.bfloat16).view(torch.uint16).numpy()
            assert (values == expected).all(), tensor.name
        else:
            assert (values == expected.view(np.float32)).all(), tensor.name


def test_only_the_fp32_weights_of_optimizer_files_are_read(tmp_path):
    source = AREA.folder / "ds-z2-bf16-w3-qwen2-tied-roundrobin"
    options = dataclasses.replace(AREA.options(source.name), verify="none")
    result = convert(str(source / "input"), str(tmp_path / "out"), options)
    assert result.bytes_read < sum(path.stat().st_size for path in source.rglob("*optim_states.pt")) / 2


def test_a_missing_rank_is_named(tmp_path):
    shutil.copytree(UNEVEN / "input", tmp_path / "input")
    (tmp_path / "input/global_step2/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(IncompleteCheckpoint, match=r"bf16_zero_pp_rank_1_mp_rank_00_optim_states\.pt is missing"):
        open_checkpoint(open_folder(str(tmp_path / "input")), ConvertOptions())


def test_a_tag_that_latest_names_and_that_is_not_there_is_named_with_those_that_are(tmp_path):
    shutil.copytree(UNEVEN / "input", tmp_path / "input")
    (tmp_path / "input/latest").write_text("global_step9")
    with pytest.raises(IncompleteCheckpoint, match=r"names global_step9.*global_step2"):
        open_checkpoint(open_folder(str(tmp_path / "input")), ConvertOptions())
    step = open_checkpoint(open_folder(str(tmp_path / "input")), ConvertOptions(step=2))
    assert step.files[0].path.startswith("global_step2/")
