from __future__ import annotations

import pickle
import shutil
from pathlib import Path

import pytest
from pydantic import SecretStr

from service.jobs.addresses import AllowedPlaces, NotAllowed, Places
from tests.service.conftest import TOKEN, FakeConverter, running
from tests.service.test_api import CASE, assert_problem
from workers.convert import plan_source, run_plan
from workers.errors import InvalidOption, StorageError
from workers.options import ConvertOptions
from workers.storage import FolderAddress, LocalFolder, bounded, open_folder

ADAPTER = Path(__file__).parent.parent / "cases" / "torchtune" / "adapter-qwen2-to-peft" / "input"


@pytest.mark.parametrize("name", ["config_dir", "base"])
def test_an_option_that_names_a_place_is_held_to_the_allowed_sources(tmp_path, name):
    places = Places.of((str(tmp_path / "runs"),), (str(tmp_path / "models"),))
    source, destination = str(tmp_path / "runs" / "1"), str(tmp_path / "models" / "1")
    inside = ConvertOptions.from_dict({name: str(tmp_path / "runs" / "beside")})
    assert places.check(source, destination, inside) == (source, destination)
    outside = ConvertOptions.from_dict({name: str(tmp_path / "secrets")})
    with pytest.raises(NotAllowed):
        places.check(source, destination, outside)


@pytest.fixture
def lists(tmp_path):
    """Folders ``runs`` and ``models`` that are allowed, and beside them what is not."""
    for name in ("runs/1", "runs-evil", "models", "secret"):
        (tmp_path / name).mkdir(parents=True)
    return Places.of((str(tmp_path / "runs"), "s3://runs/team"), (str(tmp_path / "models"),), only_listed_local=True)


@pytest.mark.parametrize(
    "address",
    [
        "{}/runs/%2e%2e/secret",
        "{}/runs/%252e%252e/secret",
        "{}/runs/..%2fsecret",
        "{}/runs/..\\secret",
        "{}\\runs",
        "file://{}/runs/%252e%252e/secret",
        "file://{}/runs/%5c..%5csecret",
        "file://{}/runs/%00",
        "file://elsewhere{}/runs",
        "file:{}/runs",
        "s3://runs/team/%2e%2e/other",
        "s3://runs/team/../other",
        "s3://runs/team\\..\\other",
        "s3://user:pass@runs/team",
        "s3://runs/team?endpoint=http://elsewhere",
        "http://127.0.0.1{}/runs",
        "{}/runs\x00",
        "runs",
        "~/runs",
        "",
    ],
)
def test_what_could_be_read_in_two_ways_is_refused(lists, tmp_path, address):
    with pytest.raises((InvalidOption, NotAllowed)) as caught:
        lists.sources.check(address.format(tmp_path))
    assert isinstance(caught.value, InvalidOption) or "s3://" not in address


@pytest.mark.parametrize("address", ["{}/runs-evil", "{}/RUNS/1", "{}/run", "{}", "s3://RUNS/team", "S3://runs/teams"])
def test_a_neighbour_of_a_prefix_is_no_part_of_it(lists, tmp_path, address):
    with pytest.raises(NotAllowed) as caught:
        lists.sources.check(address.format(tmp_path))
    assert "UNSHARD_ALLOWED_SOURCES" in caught.value.hint


@pytest.mark.parametrize(
    "address",
    ["{}/runs/1", "{}//runs//1/", "/{}/runs/1", "{}/runs/./1", "file://localhost{}/runs/1", "FILE://{}/runs/1"],
)
def test_one_place_has_one_spelling(lists, tmp_path, address):
    assert lists.sources.check(address.format(tmp_path)) == f"{tmp_path}/runs/1"


def test_names_that_only_look_alike_are_different_places(tmp_path):
    composed, decomposed = "caf\u00e9", "cafe\u0301"
    (tmp_path / decomposed).mkdir()
    places = AllowedPlaces("source", (str(tmp_path / composed),))
    with pytest.raises(NotAllowed):
        places.check(str(tmp_path / decomposed))


def test_a_link_in_the_middle_is_followed_before_the_comparison(lists, tmp_path):
    (tmp_path / "runs" / "1" / "latest").symlink_to(tmp_path / "secret")
    (tmp_path / "runs" / "own").symlink_to(tmp_path / "runs" / "1")
    with pytest.raises(NotAllowed):
        lists.sources.check(f"{tmp_path}/runs/1/latest/global_step_1")
    assert lists.sources.check(f"{tmp_path}/runs/own/global_step_1") == f"{tmp_path}/runs/1/global_step_1"


def test_with_a_token_and_no_list_this_machine_is_closed_and_buckets_are_open(tmp_path):
    places = Places.of((), (), only_listed_local=True)
    for address in (str(tmp_path), f"file://{tmp_path}", "memory://anything"):
        for side in (places.sources, places.destinations):
            with pytest.raises(NotAllowed) as caught:
                side.check(address)
            assert f"UNSHARD_ALLOWED_{side.role.upper()}S" in caught.value.hint
    assert places.sources.check("s3://runs/1") == "s3://runs/1"
    assert Places.of((), ()).sources.check(str(tmp_path)) == str(tmp_path)
    only_buckets = Places.of(("s3://runs",), (), only_listed_local=True)
    with pytest.raises(NotAllowed):
        only_buckets.sources.check(str(tmp_path))


@pytest.mark.parametrize("prefix", ["runs", "~/runs", "ftp://x/y", "s3://", "s3://a/../b"])
def test_a_list_with_a_wrong_entry_stops_the_service_at_its_start(prefix):
    with pytest.raises(InvalidOption, match="UNSHARD_ALLOWED_SOURCES"):
        Places.of((prefix,), ())
    with pytest.raises(InvalidOption, match="UNSHARD_ALLOWED_DESTINATIONS"):
        Places.of((), (prefix,))


# --- links inside of a source ---------------------------------------------------------------------------------------
@pytest.fixture
def linked(tmp_path):
    """A checkpoint in an allowed folder whose tokenizer is a link to what the service may read and jobs may not."""
    (tmp_path / "runs").mkdir()
    (tmp_path / "models").mkdir()
    (tmp_path / "shared").mkdir()
    source = tmp_path / "runs" / "1"
    shutil.copytree(CASE, source)
    config = next(source.rglob("config.json"))
    (config.parent / "tokenizer_config.json").unlink(missing_ok=True)
    (tmp_path / "shared" / "secret.json").write_text('{"canary": "of another"}')
    (config.parent / "tokenizer_config.json").symlink_to(tmp_path / "shared" / "secret.json")
    return source


@pytest.mark.parametrize("option", ["config_dir", "base", "mapping"])
def test_a_relative_path_is_told_by_its_option(option):
    with pytest.raises(InvalidOption, match=f"the option {option} 'here' is neither"):
        Places.of((), ()).check_source("/runs/a", ConvertOptions(**{option: "here"}))


def test_a_link_that_leads_out_is_not_followed(linked, tmp_path):
    runs = (str(tmp_path / "runs"),)
    with pytest.raises(StorageError, match="leads out of the folders that this service allows") as caught:
        run_plan(plan_source(str(linked), ConvertOptions(), within=runs), str(tmp_path / "models" / "1"))
    assert "tokenizer_config.json" in str(caught.value.file)
    assert caught.value.hint
    assert "canary" not in "".join(path.read_text() for path in (tmp_path / "models").rglob("*.json"))
    both = (*runs, str(tmp_path / "shared"))
    run_plan(plan_source(str(linked), ConvertOptions(), within=both), str(tmp_path / "models" / "2"))
    assert "of another" in (tmp_path / "models" / "2" / "tokenizer_config.json").read_text()


def test_the_bounds_of_a_plan_go_with_it_into_other_processes(linked, tmp_path):
    made = pickle.loads(pickle.dumps(plan_source(str(linked), ConvertOptions(), within=(str(tmp_path / "runs"),))))
    with pytest.raises(StorageError, match="leads out"):
        run_plan(made, str(tmp_path / "models" / "1"))


@pytest.mark.parametrize(
    ("option", "file", "source"),
    [
        ({"config_dir": "beside"}, "config.json", CASE),
        ({"base": "beside", "lora": "merge"}, "model.safetensors", ADAPTER),
        ({"mapping": "beside/mapping.json"}, "mapping.json", CASE),
    ],
)
def test_other_places_that_options_name_have_the_same_bounds(tmp_path, option, file, source):
    (tmp_path / "runs" / "beside").mkdir(parents=True)
    (tmp_path / "secret").write_text('{"canary": 1}')
    (tmp_path / "runs" / "beside" / file).symlink_to(tmp_path / "secret")
    shutil.copytree(source, tmp_path / "runs" / "1")
    name, below = next(iter(option.items()))
    options = ConvertOptions.from_dict({**option, name: f"{tmp_path}/runs/{below}"})
    with pytest.raises(StorageError, match="leads out") as caught:
        plan_source(f"{tmp_path}/runs/1", options, within=(f"{tmp_path}/runs",))
    assert "canary" not in str(caught.value)


def test_a_link_that_is_swapped_after_the_look_is_seen_when_it_is_open(tmp_path, monkeypatch):
    (tmp_path / "in").mkdir()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "secret").write_text("canary")
    (tmp_path / "in" / "link").symlink_to(tmp_path / "out" / "secret")
    folder = open_folder(FolderAddress(str(tmp_path / "in"), roots=(str(tmp_path / "in"),)))
    # The look sees what was there before the swap.
    monkeypatch.setattr(LocalFolder, "_confine", lambda _self, target: target)
    with pytest.raises(StorageError, match="leads out"):
        folder.read("link")
    with pytest.raises(StorageError, match="leads out"):
        folder.read_into("link", 0, memoryview(bytearray(6)))
    (tmp_path / "in" / "file").write_text("fine")
    assert folder.read("file") == b"fine"


def test_the_bounds_end_with_the_planning(tmp_path):
    (tmp_path / "in").mkdir()
    with bounded((str(tmp_path / "elsewhere"),)):
        inside = open_folder(str(tmp_path / "in"))
    assert inside.address.roots == (str(tmp_path / "elsewhere"),)
    assert inside.subfolder("x").address.roots == inside.address.roots == inside.address.split()[0].roots
    assert open_folder(str(tmp_path / "in")).address.roots == ()


def test_the_service_bounds_what_it_plans(settings, linked, tmp_path):
    lists = {"allowed_sources": (str(tmp_path / "runs"),), "allowed_destinations": (str(tmp_path / "models"),)}
    (linked / "stray.json").write_text("{}")
    config = next(linked.rglob("config.json"))
    (tmp_path / "shared" / "config.json").write_bytes(config.read_bytes())
    config.unlink()
    config.symlink_to(tmp_path / "shared" / "config.json")
    with running(settings.model_copy(update=lists), FakeConverter()) as service:
        for path, more in (("/v1/inspect", {}), ("/v1/jobs?dry_run=true", {"destination": f"{tmp_path}/models/1"})):
            answer = service.http.post(path, json={"source": str(linked), **more})
            document = assert_problem(answer, 424, "storage")
            assert "leads out" in document["detail"]


def test_a_destination_that_was_bent_while_the_work_went_on_gets_no_commit(settings, tmp_path):
    for name in ("models/1", "elsewhere"):
        (tmp_path / name).mkdir(parents=True)

    def bend():
        (tmp_path / "models" / "1").rmdir()
        (tmp_path / "models" / "1").symlink_to(tmp_path / "elsewhere")

    converter = FakeConverter(before_commit=bend)
    converter.gate.set()
    lists = {"allowed_destinations": (str(tmp_path / "models"),)}
    with running(settings.model_copy(update=lists), converter) as service:
        done = service.client.wait(service.client.submit("/in", str(tmp_path / "models" / "1"))["id"], timeout_s=10)
    assert (done["state"], done["error"]["kind"]) == ("failed", "destination")
    assert not converter.committed


def test_with_a_token_the_local_disk_is_closed_until_it_is_listed(settings, tmp_path):
    with running(settings.model_copy(update={"admin_token": SecretStr(TOKEN)}), FakeConverter(), TOKEN) as service:
        body = {"source": str(tmp_path), "destination": "s3://models/1"}
        told = assert_problem(service.http.post("/v1/jobs", json=body), 403, "source-not-allowed")
        assert "UNSHARD_ALLOWED_SOURCES" in told["hint"]
        body = {"source": "s3://runs/1", "destination": str(tmp_path)}
        told = assert_problem(service.http.post("/v1/jobs", json=body), 403, "destination-not-allowed")
        assert "UNSHARD_ALLOWED_DESTINATIONS" in told["hint"]
        assert_problem(service.http.post("/v1/inspect", json={"source": "/etc"}), 403, "source-not-allowed")
