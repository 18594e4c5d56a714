"""Checkpoints that are looked into and compared over the API."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from service.jobs import looking
from service.jobs.looking import Look, look_into
from service.settings import Settings
from tests.service.conftest import TOKEN, FakeConverter, running
from workers.convert import convert
from workers.options import ConvertOptions

CASE = Path(__file__).parents[1] / "cases" / "verl-fsdp" / "llama-gqa-fsdp2-ws2" / "input"
TENSOR = "model.embed_tokens.weight"


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> tuple[Path, Path]:
    """A model, and a copy in which one element of one tensor is another."""
    folder = tmp_path_factory.mktemp("models")
    convert(str(CASE), str(folder / "a"))
    shutil.copytree(folder / "a", folder / "b")
    weights = load_file(folder / "b" / "model.safetensors")
    weights[TENSOR][1, 2] += 0.5
    save_file(weights, folder / "b" / "model.safetensors", metadata={"format": "pt"})
    return folder / "a", folder / "b"


def asked(service, path: str, body: dict, status: int = 200) -> dict:
    response = service.http.post(path, json=body)
    assert response.status_code == status, response.text
    return response.json()


def test_all_tensors_come_in_columns_and_packed(idle):
    response = idle.http.post("/v1/inspect", json={"source": str(CASE), "table": True})
    assert response.headers["content-encoding"] == "gzip"
    told = response.json()
    table = told["table"]
    number = table["names"].index(TENSOR)
    assert table["kinds"][table["kind"][number]] == {"dtype": "F32", "shape": [136, 48], "size_bytes": 26112}
    assert table["pieces"][number] == 2
    assert told["tensor"] is None
    assert told["problems"] == table["faults"] == []
    plain = idle.http.post("/v1/inspect", json={"source": str(CASE)}, headers={"Accept-Encoding": "identity"})
    assert "content-encoding" not in plain.headers


def test_an_incomplete_checkpoint_is_a_problem_unless_it_is_asked_for_in_part(idle, tmp_path):
    shutil.copytree(CASE, tmp_path / "half")
    next((tmp_path / "half").rglob("model_world_size_2_rank_1.pt")).unlink()
    body = {"source": str(tmp_path / "half"), "tensor": TENSOR, "table": True}
    assert asked(idle, "/v1/inspect", body, 422)["type"] == "/problems/incomplete-checkpoint"
    told = asked(idle, "/v1/inspect", {**body, "partial": True})
    assert told["problems"][0]["file"] == "model_world_size_2_rank_1.pt"
    assert told["tensor"]["uncovered"] == [{"offsets": [68, 0], "sizes": [68, 48]}]
    assert told["table"]["faults"]


def test_what_was_read_is_used_again_for_its_version_alone(tmp_path, monkeypatch):
    opened = []
    real = looking.inspect
    monkeypatch.setattr(looking, "inspect", lambda *given, **named: opened.append(given) or real(*given, **named))
    shutil.copytree(CASE, tmp_path / "run")
    source = str(tmp_path / "run")

    def look(tensor: str | None = None, version: str | None = None, within: tuple[str, ...] = ()) -> dict:
        return json.loads(look_into(within, source, ConvertOptions(), Look(tensor, version=version)))

    version = look()["version"]
    assert look(TENSOR, version)["tensor"]["name"] == TENSOR
    assert len(opened) == 1
    look(TENSOR)
    assert len(opened) == 2
    look(TENSOR, "another")
    assert len(opened) == 3
    look(TENSOR, version, within=(str(tmp_path),))
    assert len(opened) == 4


def test_a_comparison_names_what_differs_where_and_by_how_much(idle, models):
    a, b = map(str, models)
    told = asked(idle, "/v1/compare", {"a": a, "b": b})
    assert (told["equal"], told["compared"], told["different_tensors"]) == (False, "values", 1)
    assert told["compared_bytes"] == told["bytes"]
    [difference] = told["differences"]
    assert difference["tensor"] == TENSOR
    assert (difference["different_elements"], difference["elements"]) == (1, 136 * 48)
    assert difference["index"] == [1, 2]
    assert difference["largest"] == pytest.approx(0.5)
    assert difference["second"] - difference["first"] == pytest.approx(0.5)
    assert asked(idle, "/v1/compare", {"a": a, "b": b, "atol": 0.6})["equal"] is True
    assert asked(idle, "/v1/compare", {"a": str(CASE), "b": a})["equal"] is True
    assert [model["format"] for model in told["models"]] == ["hf", "hf"]


def test_a_comparison_names_tensors_that_one_lacks_and_other_types(idle, models, tmp_path):
    shutil.copytree(models[0], tmp_path / "c")
    (tmp_path / "c" / "unshard.json").unlink()
    weights = load_file(tmp_path / "c" / "model.safetensors")
    norm = weights.pop("model.norm.weight")
    weights["model.layers.0.input_layernorm.weight"] = weights["model.layers.0.input_layernorm.weight"].half()
    weights["model.extra.weight"] = norm
    save_file(weights, tmp_path / "c" / "model.safetensors", metadata={"format": "pt"})
    response = idle.http.post("/v1/compare", json={"a": str(models[0]), "b": str(tmp_path / "c")})
    told = response.json()
    assert told["only_in_first"] == ["model.norm.weight"], told
    assert told["only_in_second"] == ["model.extra.weight"]
    [other] = told["other_kinds"]
    assert (other["first"]["dtype"], other["second"]["dtype"]) == ("F32", "F16")
    assert told["equal"] is False


def test_of_large_checkpoints_only_metadata_are_compared_and_the_answer_says_so(tmp_path, models, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    a, b = map(str, models)
    settings = Settings(
        data_dir=tmp_path, poll_s=0.05, compare_bytes=1000, admin_token=TOKEN, allowed_sources=(str(models[0].parent),)
    )
    with running(settings, FakeConverter(), TOKEN) as service:
        told = asked(service, "/v1/compare", {"a": a, "b": str(CASE)}, 403)
        assert told["type"] == "/problems/source-not-allowed"
        shutil.copytree(a, models[0].parent / "bare")
        (models[0].parent / "bare" / "unshard.json").unlink()
        told = asked(service, "/v1/compare", {"a": a, "b": str(models[0].parent / "bare")})
        assert (told["equal"], told["compared"], told["compared_bytes"]) == (None, "metadata", 0)
        assert "UNSHARD_COMPARE_BYTES" in told["reason"]
        told = asked(service, "/v1/compare", {"a": a, "b": b})
        assert (told["equal"], told["compared"]) == (None, "digests")  # b's manifest is still that of a
        assert "verify" in told["reason"]
        assert service.http.post("/v1/compare", json={"a": a, "b": b, "atol": -1}).status_code == 422
        service.http.headers.pop("authorization")
        assert service.http.post("/v1/compare", json={"a": a, "b": b}).status_code == 401


ROWS = 2**20
ROW = 2**14
"""Elements. Models of 64 GiB, nearly all of them holes: far more than any machine compares in a second or two."""


def sparse_model(folder: Path, *, first: float = 0.0, last: float = 0.0) -> str:
    """A model of one large tensor of zeros, but for its first and its last element."""
    size = ROWS * ROW * 4
    header = json.dumps({"large.weight": {"dtype": "F32", "shape": [ROWS, ROW], "data_offsets": [0, size]}}).encode()
    folder.mkdir()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header + struct.pack("<f", first))
        file.seek(8 + len(header) + size - 4)
        file.write(struct.pack("<f", last))
    (folder / "config.json").write_text('{"model_type": "sparse"}')
    return str(folder)


def test_a_comparison_that_is_stopped_by_its_time_tells_what_it_found_until_then(tmp_path, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    a = sparse_model(tmp_path / "a")
    settings = Settings(data_dir=tmp_path / "data", poll_s=0.05, compare_timeout_s=3, compare_bytes=2**40)
    with running(settings, FakeConverter()) as service:
        asked(service, "/v1/inspect", {"source": a})  # a process to read in is there: its start takes no time any more
        told = asked(service, "/v1/compare", {"a": a, "b": sparse_model(tmp_path / "b", first=0.5, last=2.0)})
        assert (told["equal"], told["compared"], told["different_tensors"]) == (False, "part", 1)
        assert told["bytes"] == ROWS * ROW * 4
        assert 0 < told["compared_bytes"] < told["bytes"]
        assert told["reason"] == "the time of a comparison was over after 3 s (UNSHARD_COMPARE_TIMEOUT_S)"
        assert told["checks"][1] == f"every bit of {told['compared_bytes']} of {told['bytes']} bytes"
        [difference] = told["differences"]
        assert (difference["different_elements"], difference["index"]) == (1, [0, 0])
        assert (difference["first"], difference["second"], difference["largest"]) == (0.0, 0.5, 0.5)
        told = asked(service, "/v1/compare", {"a": a, "b": sparse_model(tmp_path / "c", last=2.0)})
        assert (told["equal"], told["compared"], told["differences"]) == (None, "part", [])
