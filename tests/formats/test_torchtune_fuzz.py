"""Damaged metadata of torchtune's, Meta's and PEFT's files: a named error or an answer that holds together."""

from __future__ import annotations

import json
import shutil
import tempfile
import zipfile
from functools import cache
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.formats.cases import Area
from tests.formats.evaluator import Evaluator
from workers.errors import InputError
from workers.families import map_checkpoint
from workers.formats import open_checkpoint
from workers.options import ConvertOptions
from workers.storage import open_folder

AREA = Area("torchtune")
PICKLES = {
    "torchtune": ("llama32-tied-tune-061/input/epoch_0", "model-00001-of-00001.bin"),
    "adapter": ("adapter-llama3-dora-to-peft/input/epoch_0", "adapter_model.pt"),
    "meta": ("meta-llama2-tp2-fp16/input", "consolidated.01.pth"),
    "llama4": ("meta-llama4-tp2-interleaved/input", "consolidated.00.pth"),
    "nf4": ("qlora-nf4-raw-base/input", "torchtune_model_0.pt"),
}
TEXTS = {
    "params": ("meta-llama4-tp2-interleaved/input", "params.json"),
    "config": ("llama32-vision-tune-061/input/epoch_0", "config.json"),
    "adapter": ("peft-lora-merge-bf16/input/adapter", "adapter_config.json"),
    "tokenizer": ("meta-llama3-1file/input", "tokenizer.model"),
    "index": ("hf-050-ft-model-stale-index/input/epoch_0", "model.safetensors.index.json"),
}
QUIET = [HealthCheck.too_slow]


@cache
def records(kind: str) -> dict[str, bytes]:
    folder, name = PICKLES[kind]
    with zipfile.ZipFile(AREA.folder / folder / name) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def linked(folder: str, without: str, target: Path) -> None:
    for path in (AREA.folder / folder).iterdir():
        if path.name != without:
            (target / path.name).symlink_to(path)


def assert_named_error_or_readable(folder: str, **options) -> None:
    asked = ConvertOptions(**options)
    try:
        checkpoint = open_checkpoint(open_folder(folder), asked)
        evaluator = Evaluator(checkpoint)
        mapped = map_checkpoint(checkpoint, asked, evaluator)
    except InputError:
        return
    for target in mapped.targets[::5]:
        evaluator.evaluate(target.expression)


@pytest.mark.parametrize("kind", PICKLES)
@settings(max_examples=60, deadline=None, suppress_health_check=QUIET)
@given(changes=st.lists(st.tuples(st.integers(0, 1 << 20), st.integers(0, 255)), min_size=1, max_size=4))
def test_a_damaged_pickle_is_a_named_error_or_can_be_read(kind, changes):
    source, name = PICKLES[kind]
    with tempfile.TemporaryDirectory() as folder:
        linked(source, name, Path(folder))
        with zipfile.ZipFile(Path(folder) / name, "w") as archive:
            for record, data in records(kind).items():
                content = bytearray(data)
                if record.endswith("/data.pkl"):
                    for position, value in changes:
                        content[position % len(content)] = value
                archive.writestr(record, bytes(content))
        assert_named_error_or_readable(folder)


@pytest.mark.parametrize("kind", TEXTS)
@settings(max_examples=40, deadline=None, suppress_health_check=QUIET)
@given(changes=st.lists(st.tuples(st.integers(0, 1 << 20), st.integers(0, 255)), min_size=1, max_size=3))
def test_a_damaged_text_is_a_named_error_or_can_be_read(kind, changes):
    source, name = TEXTS[kind]
    content = bytearray((AREA.folder / source / name).read_bytes())
    for position, value in changes:
        content[position % len(content)] = value
    with tempfile.TemporaryDirectory() as folder:
        linked(source, name, Path(folder))
        (Path(folder) / name).write_bytes(bytes(content))
        assert_named_error_or_readable(folder)


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 1 << 40),
    st.floats(allow_nan=True),
    st.text(max_size=3),
    st.lists(st.integers()),
)


@pytest.mark.parametrize("kind", ["params", "config", "adapter"])
@settings(max_examples=80, deadline=None, suppress_health_check=QUIET)
@given(data=st.data())
def test_a_value_of_another_kind_is_a_named_error_or_can_be_read(kind, data):
    source, name = TEXTS[kind]
    content = json.loads((AREA.folder / source / name).read_text())
    part = content
    while True:
        key = data.draw(st.sampled_from(sorted(part)))
        if not isinstance(part[key], dict) or not part[key] or data.draw(st.booleans()):
            break
        part = part[key]
    part[key] = data.draw(VALUES)
    with tempfile.TemporaryDirectory() as folder:
        linked(source, name, Path(folder))
        (Path(folder) / name).write_text(json.dumps(content))
        assert_named_error_or_readable(folder)


def test_names_of_files_alone_never_crash(tmp_path):
    """Empty files under the names that are looked for."""
    names = [
        "torchtune_model_0.pt",
        "hf_model_0002_1.pt",
        "adapter_model.pt",
        "consolidated.00.pth",
        "model-00001-of-00002.bin",
    ]
    names += ["model-00001-of-00002_3.safetensors", "adapter_3.pt", "adapter_model.safetensors"]
    for name in names:
        folder = tmp_path / name.replace(".", "_")
        folder.mkdir()
        (folder / name).write_bytes(b"")
        assert_named_error_or_readable(str(folder))
        shutil.rmtree(folder)
