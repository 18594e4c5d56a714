"""Every broken checkpoint is refused in words that name what is wrong."""

from __future__ import annotations

import json

import pytest

from tests.service.command import CASES, unshard

BROKEN = sorted(path.name for path in CASES.glob("error-*"))


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_checkpoint_is_refused_in_plain_words_and_leaves_nothing(name, tmp_path, monkeypatch, capsys):
    marker = tmp_path / "marker"
    monkeypatch.setenv("UNSHARD_MARKER_FILE", str(marker))
    monkeypatch.chdir(tmp_path)
    case = json.loads((CASES / name / "case.json").read_text())
    options = [f"-o{key}={json.dumps(value)}" for key, value in case["options"].items()]

    done = unshard(capsys, "convert", CASES / name / "input", tmp_path / "model", *options)

    assert done.status == 1
    assert done.out == ""
    assert done.err.startswith("error: ")
    assert "Traceback" not in done.err
    for alternatives in case["expect"]["words"]:
        assert any(word.lower() in done.err.lower() for word in alternatives.split("|")), (alternatives, done.err)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", BROKEN)
def test_json_holds_the_same_error(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    done = unshard(capsys, "convert", CASES / name / "input", tmp_path / "model", "--json")
    error = json.loads(done.out)["error"]
    assert done.status == 1
    assert done.err == ""
    assert error.keys() == {"code", "message", "hint", "file", "tensor", "expected", "found"}
    assert error["code"] not in ("internal", "error", "system")


def test_there_are_broken_checkpoints_to_test_with():
    assert len(BROKEN) >= 9
