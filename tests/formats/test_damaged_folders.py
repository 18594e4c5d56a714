"""Whole folders of every format, damaged: a named error or a plan, never a crash, whatever file it hits.

The other tests of damage aim at one parser each, with checksums that fit again; these hit any byte of any file, and
take files away, empty them, cut them, and put one in place of another.
"""

from __future__ import annotations

import shutil
import tempfile
from functools import cache
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from workers.convert import plan_source
from workers.errors import UnshardError
from workers.formats import known_formats
from workers.options import ConvertOptions

CASES = Path(__file__).parent.parent / "cases"
FOLDERS: dict[str, tuple[str, dict[str, str]]] = {
    "accelerate-fsdp": ("torch/accelerate-fsdp2-perrank-bin-w2", {"config_dir": "hf"}),
    "dcp": ("torch/dcp-fsdp2-w2-qwen2-tied", {"config_dir": "hf"}),
    "dcp of safetensors": ("torch/dcp-hfstore-sharded-w3", {}),
    "deepspeed-zero": ("deepspeed/ds-z1-bf16-w2-llama", {"config_dir": "hf"}),
    "deepspeed-zero 3": ("deepspeed/ds-hftrainer-z3-w2-qwen3", {}),
    "deepspeed-universal": ("deepspeed/ds-universal-from-z2-w3-llama", {"config_dir": "hf"}),
    "hf": ("torch/hf-reshard-with-side-files", {}),
    "hf-bin": ("torch/hf-bin-sharded-mistral", {}),
    "megatron-dist": ("megatron/mbridge-mistral-tp2-pp3", {}),
    "megatron-legacy": ("megatron/mlm-torch-mixtral-ep2", {"config_dir": "huggingface"}),
    "meta": ("torchtune/meta-llama3-gqa-tp4", {"llama_version": "3"}),
    "peft": ("torchtune/peft-lora-merge-bf16", {"base": "base", "lora": "merge"}),
    "torch-pt": ("torch/torch-zip-views", {"family": "none"}),
    "torchtune": ("torchtune/llama3-tune-061", {}),
    "torchtune steps": ("torchtune/hf-head-step-dirs", {}),
    "verl-fsdp": ("verl-fsdp/qwen3moe-fused-experts-fsdp2-ws2", {}),
}
ELSEWHERE = {"deepspeed-pipeline": "its folders are made by tests/formats/test_deepspeed_states.py"}
DAMAGES = ("bytes", "bytes", "bytes", "cut", "empty", "gone", "swapped", "longer", "folder")


@cache
def files(case: str) -> tuple[Path, ...]:
    return tuple(
        sorted(path.relative_to(CASES / case) for path in (CASES / case / "input").rglob("*") if path.is_file())
    )


def damage(folder: Path, names: tuple[Path, ...], change: tuple[str, int, int, int]) -> None:
    kind, which, position, value = change
    path, other = folder / names[which % len(names)], folder / names[position % len(names)]
    if not path.is_file():
        return  # an earlier damage took it away
    data = bytearray(path.read_bytes())
    if kind == "bytes" and data:
        # Near the ends, where heads, indexes and directories are, more often than in the middle.
        place = position % min(len(data), 4096)
        data[place if value % 2 else -1 - place] = value
        path.write_bytes(data)
    elif kind == "cut":
        path.write_bytes(data[: position % (len(data) + 1)])
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "longer":
        path.write_bytes(data + bytes([value]) * (1 + position % 64))
    elif kind == "swapped" and other.is_file():
        path.write_bytes(other.read_bytes())
    elif kind in ("gone", "folder"):
        path.unlink()
        if kind == "folder":
            path.mkdir()


def test_every_format_has_a_folder_here():
    formats = {name.split()[0] for name in FOLDERS} | set(ELSEWHERE)
    assert formats == {known.name for known in known_formats()}


CHANGE = st.tuples(st.sampled_from(DAMAGES), st.integers(0, 1 << 16), st.integers(0, 1 << 24), st.integers(0, 255))


@pytest.mark.parametrize("name", FOLDERS)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(changes=st.lists(CHANGE, min_size=1, max_size=3))
def test_a_damaged_folder_is_a_named_error_or_can_be_planned(name, changes):
    case, given_options = FOLDERS[name]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        shutil.copytree(CASES / case / "input", folder / "input")
        for change in changes:
            damage(folder, files(case), change)
        options = {
            key: str(folder / "input" / value) if key in ("config_dir", "base") else value
            for key, value in given_options.items()
        }
        refused = None
        try:
            plan_source(str(folder / "input"), ConvertOptions.from_dict(options))
        except UnshardError as error:
            refused = error
        assert refused is None or (refused.message and refused.code != "internal"), refused
