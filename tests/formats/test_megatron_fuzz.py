"""Damaged metadata of Megatron checkpoints: a named error or an answer that holds together, never a crash."""

from __future__ import annotations

import shutil
import tempfile
import zipfile
from functools import cache
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.formats.cases import CASES
from tests.formats.evaluator import Evaluator
from workers.errors import InputError
from workers.families import map_checkpoint
from workers.formats import open_checkpoint
from workers.options import ConvertOptions
from workers.storage import open_folder

AREA = CASES / "megatron"
LEGACY = {
    "megatron-lm": "mlm-torch-mixtral-ep2/input/iter_0000010/mp_rank_00_001/model_optim_rng.pt",
    "verl": "verl030-qwen2-tp2/input/model/mp_rank_01/model.pt",
}
DISTRIBUTED = {
    "stacked": "verl-mixtral-ep2/input/dist_ckpt",
    "one-by-one": "mbridge-deepseek-v3-tp2-pp2/input/iter_0000000",
}
CHANGES = st.lists(st.tuples(st.integers(0, 1 << 20), st.integers(0, 255)), min_size=1, max_size=4)
SOME = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def damaged(data: bytes, changes: list[tuple[int, int]]) -> bytes:
    content = bytearray(data)
    for position, value in changes:
        content[position % len(content)] = value
    return bytes(content)


@cache
def records(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def answers_or_refuses(folder: Path, config: Path) -> None:
    """Open and map what lies in a folder, and read some of it, unless it is refused by name."""
    options = ConvertOptions(config_dir=str(config))
    try:
        checkpoint = open_checkpoint(open_folder(str(folder)), options)
        evaluator = Evaluator(checkpoint)
        mapped = map_checkpoint(checkpoint, options, evaluator)
    except InputError:
        return
    for target in mapped.targets[::7]:
        evaluator.evaluate(target.expression)


@pytest.mark.parametrize("kind", LEGACY)
@SOME
@given(changes=CHANGES)
def test_a_damaged_rank_file(kind, changes):
    source = AREA / LEGACY[kind]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "ranks"
        shutil.copytree(source.parent.parent, folder)
        with zipfile.ZipFile(folder / source.parent.name / source.name, "w") as archive:
            for name, data in records(source).items():
                archive.writestr(name, damaged(data, changes) if name.endswith("/data.pkl") else data)
        answers_or_refuses(folder, AREA / LEGACY[kind].partition("/")[0] / "input/huggingface")


@pytest.mark.parametrize("kind", DISTRIBUTED)
@SOME
@given(changes=CHANGES, name=st.sampled_from([".metadata", "metadata.json"]))
def test_damaged_metadata(kind, changes, name):
    source = AREA / DISTRIBUTED[kind]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "dist_ckpt"
        folder.mkdir()
        for path in source.iterdir():
            if path.name != name:
                (folder / path.name).symlink_to(path)
        (folder / name).write_bytes(damaged((source / name).read_bytes(), changes))
        answers_or_refuses(folder, AREA / DISTRIBUTED[kind].partition("/")[0] / "input/huggingface")
