"""The real checkpoints of ``tests/cases/verl-fsdp``, from the reader through the families to the expected bytes."""

from __future__ import annotations

import json

import pytest

from tests.formats.cases import Area, assert_tensors
from workers.errors import (
    AmbiguousSource,
    CorruptFile,
    GeometryMismatch,
    IncompleteCheckpoint,
    UnsafePickle,
)

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
AREA = Area("verl-fsdp")
GOOD, REFUSED = AREA.split()


@pytest.mark.parametrize("name", GOOD)
def test_a_case_gives_exactly_the_expected_tensors_config_and_files(name):
    checkpoint, evaluator, mapped = AREA.assert_converted(name)
    expected = AREA.expected(name)
    if "adapter" in expected:
        assert_adapter(mapped, expected["adapter"], evaluator)
    if "chosen" in expected:
        assert all(file.path.startswith(expected["chosen"]) for file in checkpoint.files)


def assert_adapter(mapped, expected, evaluator):
    folder = expected["folder"]
    assert_tensors([t for t in mapped.targets if t.folder == folder], expected["tensors"], evaluator)
    settings = json.loads(dict(mapped.files)[f"{folder}/adapter_config.json"])
    wanted = dict(expected["config"])
    assert sorted(settings["target_modules"]) == sorted(wanted.pop("target_modules_as_set"))
    assert {key: settings[key] for key in wanted} == wanted


@pytest.mark.parametrize("name", REFUSED)
def test_a_broken_case_is_refused_in_the_right_words(name, tmp_path, monkeypatch):
    marker = tmp_path / "executed"
    monkeypatch.setenv("UNSHARD_MARKER_FILE", str(marker))
    assert type(AREA.assert_refused(name)) is ERRORS[name]
    assert not marker.exists()


def test_every_broken_case_has_its_kind_of_error():
    assert sorted(ERRORS) == REFUSED


def test_replicas_of_a_case_hold_what_the_pieces_hold():
    _, evaluator, _ = AREA.converted("llama-fsdp2-hsdp-2x2")
    for tensor in range(len(evaluator._checkpoint.tensors)):
        assert (evaluator.whole(tensor) == evaluator.whole(tensor, replicas=True)).all()
