"""Damaged pickles in intact archives: a named error or an answer that holds together, never a crash."""

from __future__ import annotations

import tempfile
import zipfile
from functools import cache
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.formats.evaluator import CASES, Evaluator
from workers.errors import InputError
from workers.formats import open_checkpoint
from workers.options import ConvertOptions
from workers.storage import open_folder

SMALL = {
    "dtensor": "hsdp-first-replica-only/input/model_world_size_4_rank_1.pt",
    "strided": "llama-fsdp2-tp-2x2-strided/input/model_world_size_4_rank_3.pt",
    "sharded_tensor": "llama-fsdp1-shardedtensor-ws3/input/model_world_size_3_rank_1.pt",
    "torch24": "torch24-fsdp1-hsdp-2x2-llama/input/model_world_size_4_rank_2.pt",
}


@cache
def records(kind: str) -> dict[str, bytes]:
    with zipfile.ZipFile(CASES / SMALL[kind]) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def rewritten(path: Path, kind: str, changes: list[tuple[int, int]]) -> None:
    """The same archive with some bytes of its pickle changed, and checksums that fit."""
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in records(kind).items():
            content = bytearray(data)
            if name.endswith("/data.pkl"):
                for position, value in changes:
                    content[position % len(content)] = value
            archive.writestr(name, bytes(content))


@pytest.mark.parametrize("kind", SMALL)
@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(changes=st.lists(st.tuples(st.integers(0, 1 << 20), st.integers(0, 255)), min_size=1, max_size=4))
def test_a_damaged_pickle_is_a_named_error_or_a_checkpoint_that_can_be_read(kind, changes):
    source = CASES / SMALL[kind]
    with tempfile.TemporaryDirectory() as folder:
        for path in source.parent.glob("model_*.pt"):
            if path != source:
                (Path(folder) / path.name).symlink_to(path)
        rewritten(Path(folder) / source.name, kind, changes)
        try:
            checkpoint = open_checkpoint(open_folder(folder), ConvertOptions())
        except InputError:
            return
        evaluator = Evaluator(checkpoint)
        for number in range(0, len(checkpoint.tensors), 5):
            evaluator.whole(number)
