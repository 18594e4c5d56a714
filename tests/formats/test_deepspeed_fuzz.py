"""Damaged pickles in intact archives of DeepSpeed's files: a named error or an answer that holds together."""

from __future__ import annotations

import copy
import shutil
import tempfile
import zipfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests import deepspeed_files as write
from tests.formats.cases import CASES
from tests.formats.evaluator import Evaluator
from workers.errors import InputError
from workers.formats import open_checkpoint
from workers.options import ConvertOptions
from workers.storage import open_folder

FILES = {
    "model states with an affine map": "ds-autotp2-z1-bf16-w4-llama/input/global_step1/mp_rank_00_model_states.pt",
    "model states of stage 2": "ds-z2-bf16-w2-qwen3-two-groups-buffers/input/global_step2/mp_rank_00_model_states.pt",
    "optimizer states of stage 2": (
        "ds-z2-bf16-w3-qwen2-tied-roundrobin/input/global_step2/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    ),
    "model states of stage 3": (
        "ds-z3-bf16-w3-llama-uneven/input/global_step2/zero_pp_rank_0_mp_rank_00_model_states.pt"
    ),
    "optimizer states of stage 3": (
        "ds-z3-bf16-w3-llama-uneven/input/global_step2/bf16_zero_pp_rank_2_mp_rank_00_optim_states.pt"
    ),
    "a universal parameter": "ds-universal-from-z2-w3-llama/input/universal/zero/lm_head.weight/fp32.pt",
}


@cache
def records(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def rewrite(path: Path, source: Path, changes: list[tuple[int, int]]) -> None:
    """The same archive with some bytes of its pickle changed, and checksums that fit."""
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in records(source).items():
            content = bytearray(data)
            for position, value in changes if name.endswith("/data.pkl") else ():
                content[position % len(content)] = value
            archive.writestr(name, bytes(content))


def copied(source: Path, target: Path) -> None:
    """The case's input with links instead of files, so that one can be replaced."""
    shutil.copytree(source, target, copy_function=lambda here, there: Path(there).symlink_to(here))


@pytest.mark.parametrize("kind", FILES)
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(changes=st.lists(st.tuples(st.integers(0, 1 << 20), st.integers(0, 255)), min_size=1, max_size=4))
def test_a_damaged_pickle_is_a_named_error_or_a_checkpoint_that_can_be_read(kind, changes):
    source = CASES / "deepspeed" / FILES[kind]
    root = CASES / "deepspeed" / Path(FILES[kind]).parts[0] / "input"
    with tempfile.TemporaryDirectory() as folder:
        copied(root, Path(folder) / "input")
        damaged = Path(folder) / "input" / source.relative_to(root)
        damaged.unlink()
        rewrite(damaged, source, changes)
        try:
            checkpoint = open_checkpoint(open_folder(str(Path(folder) / "input")), ConvertOptions())
        except InputError as error:
            assert error.message  # noqa: PT017 - either outcome is fine
            return
        evaluator = Evaluator(checkpoint)
        for number in range(0, len(checkpoint.tensors), 5):
            evaluator.whole(number)


JUNK = [
    None,
    -1,
    2**62,
    "x",
    b"",
    [],
    {},
    [1, "a"],
    {1: 2},
    {"a": [0]},
    (3,),
    True,
    torch.zeros(()),
    torch.zeros(3, 4),
    torch.zeros(5, dtype=torch.int64),
    torch.zeros(0),
]

PIECE = {"shape": [3, 4], "source": [0, [4, 1]], "dest": [0, [4, 1]], "locations": [0, 1]}
INFO = {
    "tp_replicated_parameter_patterns": ["^b$"],
    "parameter_with_row_parallelism_patterns": ["^c$"],
    "vocabulary_parameter_patterns": ["^d$"],
    "parameter_with_2_sub_params_cat_dim_0": ["^e$"],
    "parameter_with_sub_params": [{"patterns": ["^f$"], "shape": ((4, 8), 4), "partition_dim": 0}],
    "original_vocab_size": 5,
    "affine_map": {
        "version": 1,
        "params": {
            "^a$": {"logical_shape": [3, 4], "ranks": {r: {"shard_shape": [3, 4], "pieces": [PIECE]} for r in (0, 1)}}
        },
    },
}
SHAPES = {"a": (3, 4), "b": (4,), "c": (4, 3), "d": (4, 2), "e": (4, 2), "f": (6, 4)}


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """All places in nested dicts and lists, as keys to follow."""
    if isinstance(value, dict):
        items = list(value.items())
    else:
        items = list(enumerate(value)) if isinstance(value, list) else []
    return [path, *(place for key, inner in items for place in places(inner, (*path, key)))]


def spoilt(states: dict[str, Any], number: int, junk: Any) -> dict[str, Any]:
    """The states with one value replaced."""
    found = [place for place in places(states) if place]
    *above, last = found[number % len(found)]
    changed = copy.deepcopy(states)
    inner = changed
    for key in above:
        inner = inner[key]
    inner[last] = junk
    return changed


@cache
def whole_checkpoint(stage: int) -> dict[str, dict[str, Any]]:
    """The states of all files of a checkpoint, by file name."""
    with tempfile.TemporaryDirectory() as name:
        folder, values = Path(name), write.values_of(SHAPES)
        if stage == 3:
            write.stage_3(folder, [values], 2, write.values_of({"frozen": (3,)}), shared_params={"alias": "a"})
        else:
            for mp in (0, 1):
                write.stage_1_or_2(folder, [values], 2, mp=mp, gap=1, universal_checkpoint_info=INFO)
        return {path.name: torch.load(path, weights_only=True) for path in sorted(folder.iterdir())}


@pytest.mark.parametrize("stage", [1, 3])
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(file=st.integers(0, 7), number=st.integers(0, 1 << 16), junk=st.sampled_from(JUNK))
def test_a_value_that_is_something_else_is_a_named_error_or_a_checkpoint_that_can_be_read(stage, file, number, junk):
    files = whole_checkpoint(stage)
    chosen = list(files)[file % len(files)]
    with tempfile.TemporaryDirectory() as name:
        for path, states in files.items():
            torch.save(spoilt(states, number, junk) if path == chosen else states, Path(name) / path)
        try:
            checkpoint = open_checkpoint(open_folder(name), ConvertOptions())
        except InputError:
            return
        evaluator = Evaluator(checkpoint)
        for tensor in range(len(checkpoint.tensors)):
            evaluator.whole(tensor)
