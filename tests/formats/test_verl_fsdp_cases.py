"""The real checkpoints of ``tests/cases/verl-fsdp``, from the reader through the families to the expected bytes."""

from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.formats.evaluator import CASES, Evaluator, sha256
from workers.errors import (
    AmbiguousSource,
    CorruptFile,
    GeometryMismatch,
    IncompleteCheckpoint,
    UnsafePickle,
    UnshardError,
)
from workers.families import map_checkpoint
from workers.formats import open_checkpoint
from workers.options import ConvertOptions
from workers.storage import open_folder

ERRORS = {
    "error-git-lfs-pointer": CorruptFile,
    "error-malicious-pickle": UnsafePickle,
    "error-missing-config-json": IncompleteCheckpoint,
    "error-missing-rank-file": IncompleteCheckpoint,
    "error-rank-from-other-world-size": GeometryMismatch,
    "error-truncated-pt": CorruptFile,
    "error-two-steps-none-chosen": AmbiguousSource,
    "error-two-world-sizes-no-config": AmbiguousSource,
    "error-world-size-in-config-differs": IncompleteCheckpoint,
}


def described(name: str) -> dict:
    return json.loads((CASES / name / "case.json").read_text())


NAMES = [path.parent.name for path in sorted(CASES.glob("*/case.json"))]
GOOD = [name for name in NAMES if described(name)["target_format"] == "hf" and name not in ERRORS]


def converted(name: str):
    case = described(name)
    options = ConvertOptions.from_dict(case["options"])
    checkpoint = open_checkpoint(open_folder(str(CASES / name / case["input"])), options)
    evaluator = Evaluator(checkpoint)
    return checkpoint, evaluator, map_checkpoint(checkpoint, options, evaluator)


def assert_tensors(targets, expected, evaluator, close):
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
    assert {key: content.get(key) for key in expected} == expected


@pytest.mark.parametrize("name", GOOD)
def test_a_case_gives_exactly_the_expected_tensors_config_and_files(name):
    checkpoint, evaluator, mapped = converted(name)
    expected = json.loads((CASES / name / "expected.json").read_text())
    close = expected.get("tensors_close", {"names": []})
    model = [target for target in mapped.targets if not target.folder]
    wanted = expected["tensors"] | _close_facts(name, close)
    assert_tensors(model, wanted, evaluator, close["names"])
    if close["names"]:
        assert_close(model, CASES / name, close, evaluator)
    files = dict(mapped.files)
    assert_config(json.loads(files["config.json"]), expected.get("config", {}))
    written = {*files, *(side.target_path for side in mapped.side_files)}
    assert set(expected["files_present"]) <= written
    assert not [path for path in written if path.endswith((".pt", ".safetensors", ".bin"))]
    if "adapter" in expected:
        assert_adapter(mapped, expected["adapter"], evaluator)
    if "chosen" in expected:
        assert all(file.path.startswith(expected["chosen"]) for file in checkpoint.files)


def _close_facts(name, close):
    if not close["names"]:
        return {}
    values = load_file(CASES / name / close["file"])
    return {key: {"dtype": "F32", "shape": list(values[key].shape)} for key in close["names"]}


def assert_adapter(mapped, expected, evaluator):
    folder = expected["folder"]
    assert_tensors([t for t in mapped.targets if t.folder == folder], expected["tensors"], evaluator, ())
    settings = json.loads(dict(mapped.files)[f"{folder}/adapter_config.json"])
    wanted = dict(expected["config"])
    assert sorted(settings["target_modules"]) == sorted(wanted.pop("target_modules_as_set"))
    assert {key: settings[key] for key in wanted} == wanted


@pytest.mark.parametrize("name", sorted(ERRORS))
def test_a_broken_case_is_refused_in_the_right_words(name, tmp_path, monkeypatch):
    marker = tmp_path / "executed"
    monkeypatch.setenv("UNSHARD_MARKER_FILE", str(marker))
    with pytest.raises(UnshardError) as caught:
        converted(name)
    error = caught.value
    assert type(error) is ERRORS[name]
    assert error.exit_status == 1
    said = f"{error.message} {error.hint}".lower()
    for word in described(name)["expect"]["words"]:
        assert any(choice.lower() in said for choice in word.split("|")), word
    assert error.hint
    assert not marker.exists()


def test_every_case_is_either_good_or_an_error_or_another_target():
    others = [name for name in NAMES if described(name)["target_format"] != "hf"]
    assert sorted([*GOOD, *ERRORS, *others]) == NAMES


def test_replicas_of_a_case_hold_what_the_pieces_hold():
    _, evaluator, _ = converted("llama-fsdp2-hsdp-2x2")
    for tensor in range(len(evaluator._checkpoint.tensors)):
        assert (evaluator.whole(tensor) == evaluator.whole(tensor, replicas=True)).all()
