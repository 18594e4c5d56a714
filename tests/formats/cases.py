"""Real checkpoints of one area of ``tests/cases``: open them, map them, compare with what is expected of each."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.formats.evaluator import Evaluator, sha256
from workers.checkpoint import Checkpoint
from workers.errors import UnshardError
from workers.families import map_checkpoint
from workers.formats import open_checkpoint
from workers.mapping import Mapping
from workers.options import ConvertOptions
from workers.storage import open_folder

CASES = Path(__file__).parent.parent / "cases"

# Options whose values are paths, and where in the case these begin.
PATHS = {"config_dir": ".", "mapping": ".", "base": ".", "adapter": ".", "hf_config": "input"}
OPTION_NAMES = {"hf_config": "config_dir", "iteration": "step"}


class Area:
    """The cases of one area whose result is a Hugging Face model."""

    def __init__(self, name: str) -> None:
        self.folder = CASES / name
        self.names = [path.parent.name for path in sorted(self.folder.glob("*/case.json"))]

    def described(self, name: str) -> dict:
        return json.loads((self.folder / name / "case.json").read_text())

    def expected(self, name: str) -> dict:
        return json.loads((self.folder / name / "expected.json").read_text())

    def split(self) -> tuple[list[str], list[str]]:
        """Names of cases that give a model, and of those that must be refused."""
        to_hub = [name for name in self.names if self.described(name).get("target_format", "hf") == "hf"]
        refused = [name for name in to_hub if isinstance(self.described(name)["expect"], dict)]
        return [name for name in to_hub if name not in refused], refused

    def options(self, name: str) -> ConvertOptions:
        values = {}
        for key, value in (self.described(name).get("options") or {}).items():
            if key in PATHS and isinstance(value, str):
                value = str(self.folder / name / PATHS[key] / value)  # noqa: PLW2901
            values[OPTION_NAMES.get(key, key)] = value
        if self.described(name).get("target_format") == "peft":
            values["target_format"] = "peft"
        return ConvertOptions.from_dict(values)

    def converted(self, name: str) -> tuple[Checkpoint, Evaluator, Mapping]:
        options = self.options(name)
        folder = open_folder(str(self.folder / name / self.described(name)["input"]))
        checkpoint = open_checkpoint(folder, options)
        evaluator = Evaluator(checkpoint)
        return checkpoint, evaluator, map_checkpoint(checkpoint, options, evaluator)

    def assert_converted(self, name: str) -> tuple[Checkpoint, Evaluator, Mapping]:
        """Convert a case and compare tensors, config and files; what was made, for more."""
        checkpoint, evaluator, mapped = self.converted(name)
        expected = self.expected(name)
        close = expected.get("tensors_close", {"names": []})
        model = [target for target in mapped.targets if not target.folder]
        wanted = expected["tensors"] | self._close_facts(name, close)
        assert_tensors(model, wanted, evaluator, close["names"])
        if close["names"]:
            assert_close(model, self.folder / name, close, evaluator)
        files = dict(mapped.files)
        config = json.loads(files.get("config.json", "{}"))
        assert_config(config, expected.get("config", {}))
        assert_config(config.get("quantization_config", {}), self._quantization(expected))
        written = {*files, *(side.target_path for side in mapped.side_files)}
        assert {*expected.get("files_present", []), *expected.get("files", [])} <= written
        assert not [path for path in written if path.endswith((".pt", ".safetensors", ".bin"))]
        return checkpoint, evaluator, mapped

    def _close_facts(self, name: str, close: dict) -> dict:
        if not close["names"]:
            return {}
        values = load_file(self.folder / name / close["file"])
        return {key: {"dtype": "F32", "shape": list(values[key].shape)} for key in close["names"]}

    def _quantization(self, expected: dict) -> dict:
        """What a config must say of quantisation, but for what names the program that wrote the case."""
        told = expected.get("quantization_config", {})
        return {key: value for key, value in told.items() if key not in ("version", "moe_sparsity_config")}

    def assert_refused(self, name: str) -> UnshardError:
        """See that a case is refused in the words that its description asks for; the error."""
        with pytest.raises(UnshardError) as caught:
            self.converted(name)
        error = caught.value
        assert error.exit_status == 1
        said = f"{error.message} {error.hint}".lower()
        for word in self.described(name)["expect"]["words"]:
            assert any(choice.lower() in said for choice in word.split("|")), word
        assert error.hint
        return error


def assert_tensors(targets, expected, evaluator, close=()):
    found = {target.name: target.expression for target in targets}
    assert sorted(found) == sorted(expected)
    for name, facts in expected.items():
        assert found[name].dtype == facts["dtype"], name
        assert list(found[name].shape) == facts["shape"], name
        if name not in close:
            assert sha256(evaluator.evaluate(found[name])) == facts["sha256"], name


def assert_close(targets, folder, close, evaluator):
    values = load_file(folder / close["file"])
    found = {target.name: target.expression for target in targets}
    for name in close["names"]:
        merged = evaluator.evaluate(found[name]).view(np.float32)
        np.testing.assert_allclose(merged, values[name], rtol=close["rtol"], atol=close["atol"], err_msg=name)


def assert_config(content: dict, expected: dict) -> None:
    expected = dict(expected)
    dtype = expected.pop("dtype_or_torch_dtype", None)
    assert dtype in (None, content.get("dtype"), content.get("torch_dtype"))
    for key, value in expected.items():
        if isinstance(value, dict):
            assert_config(content[key], value)
        else:
            assert content.get(key) == value, key
