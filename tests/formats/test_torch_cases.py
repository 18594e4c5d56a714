"""Real checkpoints of torch DCP, accelerate, torch files and Hugging Face folders, to the expected bytes.

Cases that give a model go from the reader through the families; those that must be refused go through the whole
conversion, since a damaged byte shows only when it is moved.
"""

from __future__ import annotations

import hashlib
import json

import pytest

from tests.formats.cases import Area
from workers.convert import convert
from workers.errors import (
    CorruptFile,
    GeometryMismatch,
    IncompleteCheckpoint,
    UnsafePickle,
    UnshardError,
)

AREA = Area("torch")
GOOD, REFUSED = AREA.split()
COMPRESSED = "dcp-fsdp2-w2-zstd-llama"
"""The evaluator does not decompress: this case is converted as a whole."""

ERRORS = {
    "bad-bin-crc": CorruptFile,
    "bad-bin-malicious-pickle": UnsafePickle,
    "bad-bin-zero3-placeholders": IncompleteCheckpoint,
    "bad-dcp-crc": CorruptFile,
    "bad-dcp-malicious-metadata": UnsafePickle,
    "bad-dcp-missing-distcp": IncompleteCheckpoint,
    "bad-dcp-tied-but-different": GeometryMismatch,
    "bad-index-missing-shard": IncompleteCheckpoint,
    "bad-safetensors-duplicate-name": CorruptFile,
    "bad-safetensors-header-too-large": CorruptFile,
    "bad-safetensors-negative-offset": CorruptFile,
    "bad-safetensors-overlap": CorruptFile,
    "bad-safetensors-shape-size-mismatch": CorruptFile,
    "bad-safetensors-truncated": CorruptFile,
    "bad-two-shards-same-tensor": GeometryMismatch,
}
FORMATS = {"accelerate-fsdp-rank-files": "accelerate-fsdp", "torch-pt": "hf-bin"}
"""Formats of cases under unshard's own names; the folder of torch-pt's has a ``pytorch_model.bin``."""


@pytest.mark.parametrize("name", [name for name in GOOD if name != COMPRESSED])
def test_a_case_gives_exactly_the_expected_tensors_config_and_files(name):
    checkpoint, _, mapped = AREA.assert_converted(name)
    asked = AREA.described(name)["source_format"]
    assert checkpoint.format == FORMATS.get(asked, asked)
    config = json.loads(dict(mapped.files).get("config.json", "{}"))
    for key in AREA.expected(name).get("config_absent", ()):
        assert key not in config
    for absent in AREA.expected(name).get("absent", ()):
        assert absent not in {side.target_path for side in mapped.side_files}


@pytest.mark.parametrize("name", REFUSED)
def test_a_broken_case_is_refused_in_the_right_words_and_nothing_is_published(name, tmp_path):
    destination = tmp_path / "model"
    with pytest.raises(UnshardError) as caught:
        convert(str(AREA.folder / name / "input"), str(destination), AREA.options(name))
    error = caught.value
    assert type(error) is ERRORS[name]
    said = f"{error.message} {error.hint}".lower()
    for word in AREA.described(name)["expect"]["words"]:
        assert any(choice.lower() in said for choice in word.split("|")), word
    assert error.hint
    assert not destination.exists()


@pytest.mark.parametrize("name", [COMPRESSED, "dcp-hsdp-2x2-llama", "hf-fp8-block-uneven-to-bf16"])
def test_a_case_goes_through_the_whole_conversion(name, tmp_path):
    destination = tmp_path / "model"
    convert(str(AREA.folder / name / "input"), str(destination), AREA.options(name))
    found = {}
    for path in destination.glob("*.safetensors"):
        data = path.read_bytes()
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        header.pop("__metadata__", None)
        for tensor, entry in header.items():
            begin, end = (8 + length + offset for offset in entry["data_offsets"])
            digest = hashlib.sha256(data[begin:end]).hexdigest()
            found[tensor] = {"dtype": entry["dtype"], "shape": entry["shape"], "sha256": digest}
    assert found == AREA.expected(name)["tensors"]
