"""Watches over HTTP, by a service that looks by itself."""

from __future__ import annotations

import shutil

import pytest

from service.settings import Settings
from tests.seaweed import open_s3_folder
from tests.service.conftest import FakeConverter, eventually, running
from tests.service.test_watches import CASE, RANKS, begin, finish

TEMPLATE = {"destination": "/models/{name}"}


@pytest.fixture
def settings(tmp_path, monkeypatch) -> Settings:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return Settings(data_dir=tmp_path / "data", poll_s=0.05, min_watch_interval_s=0.1)


def created(service, status=201, **request):
    response = service.http.post("/v1/watches", json=request)
    assert response.status_code == status, response.text
    return response.json()


def items(service, watch, **params):
    response = service.http.get(f"/v1/watches/{watch['id']}/items", params=params)
    assert response.status_code == 200, response.text
    return response.json()["items"]


def item_with(service, watch, state, error):
    def look():
        for item in items(service, watch):
            if (item["state"], (item["error"] or {}).get("type")) == (state, error):
                return item
        return None

    return eventually(look, f"an item that is {state} for {error}")


def test_a_checkpoint_that_a_trainer_writes_file_by_file_is_converted_once(service, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    watch = created(
        service,
        name="qwen",
        prefix=str(run),
        pattern="global_step_*",
        template={"destination": f"{tmp_path}/models/{{run}}-{{step}}", "labels": {"run": "qwen"}},
        interval_s=0.2,
    )
    assert (watch["state"], watch["counts"]["waiting"], watch["error"]) == ("active", 0, None)
    folder = begin(run / "global_step_10")
    waiting = item_with(service, watch, "waiting", "incomplete-checkpoint")
    assert waiting["source"] == str(folder)
    assert RANKS[1] in f"{waiting['error']['message']} {waiting['error']['file']}"
    partial = (CASE / RANKS[1]).read_bytes()
    (folder / RANKS[1]).write_bytes(partial[: len(partial) // 2])
    item_with(service, watch, "waiting", "corrupt-file")
    finish(folder)
    submitted = item_with(service, watch, "submitted", None)
    job = service.job_in(submitted["job_id"], "succeeded")
    assert (job["destination"], job["labels"]) == (f"{tmp_path}/models/run-10", {"run": "qwen"})
    assert job["watch_id"] == watch["id"]
    told = service.http.get(f"/v1/watches/{watch['id']}").json()
    assert told["counts"] == {"waiting": 0, "submitted": 1, "refused": 0}
    assert [made["id"] for made in service.http.get(told["links"]["jobs"]).json()["items"]] == [job["id"]]


def test_a_watch_outlives_the_service(settings, tmp_path):
    run = tmp_path / "run"
    begin(run / "global_step_1")
    with running(settings, FakeConverter()) as service:
        request = {"prefix": str(run), "pattern": "*", "template": {"destination": f"{tmp_path}/m/{{name}}"}}
        watch = created(service, interval_s=0.1, **request)
        item_with(service, watch, "waiting", "incomplete-checkpoint")
    finish(run / "global_step_1")
    with running(settings, FakeConverter()) as service:
        job_id = item_with(service, watch, "submitted", None)["job_id"]
        assert service.client.job(job_id)["watch_id"] == watch["id"]
        service.client.cancel(job_id)


def test_watches_are_listed_changed_paused_looked_at_and_deleted(service, tmp_path):
    request = {"prefix": str(tmp_path), "pattern": "step_*", "template": TEMPLATE}
    first = created(service, name="a", interval_s=3600, **request)
    second = created(service, name="b", **request)
    listed = service.http.get("/v1/watches", params={"limit": 1}).json()
    assert [watch["name"] for watch in listed["items"]] == ["b"]
    rest = service.http.get("/v1/watches", params={"cursor": listed["next_cursor"]}).json()
    assert ([watch["name"] for watch in rest["items"]], rest["next_cursor"]) == (["a"], None)

    path = f"/v1/watches/{first['id']}"
    changed = service.http.patch(path, json={"name": "c", "state": "paused", "template": {"destination": "/m/{path}"}})
    assert changed.status_code == 200
    assert (changed.json()["name"], changed.json()["template"]["destination"]) == ("c", "/m/{path}")
    paused = service.http.get("/v1/watches", params={"state": "paused"}).json()["items"]
    assert [watch["id"] for watch in paused] == [first["id"]]
    refused = service.http.post(f"{path}:look")
    assert (refused.status_code, refused.json()["type"]) == (409, "/problems/invalid-state")
    service.http.patch(path, json={"state": "active"})
    before = service.http.get(path).json()["last_look_at"]
    assert service.http.post(f"{path}:look").status_code == 202
    eventually(lambda: service.http.get(path).json()["last_look_at"] != before, "it was looked at")
    assert service.http.delete(path).status_code == 204
    assert service.http.get(path).status_code == 404
    assert service.http.delete(f"/v1/watches/{second['id']}").status_code == 204


def test_items_come_in_pages_and_by_state(service, tmp_path):
    for number in range(5):
        shutil.copytree(CASE / "huggingface", tmp_path / "run" / f"global_step_{number}")
    request = {"prefix": str(tmp_path / "run"), "pattern": "global_step_*", "template": TEMPLATE}
    watch = created(service, **request)
    eventually(lambda: len(items(service, watch)) == 5, "all were seen")
    found, cursor = [], None
    while True:
        page = service.http.get(
            f"/v1/watches/{watch['id']}/items", params={"limit": 2} | ({"cursor": cursor} if cursor else {})
        ).json()
        found += [item["source"][-1] for item in page["items"]]
        cursor = page["next_cursor"]
        if cursor is None:
            break
    assert found == list("01234")
    assert items(service, watch, state="submitted") == []


@pytest.mark.parametrize(
    ("change", "pointer", "said"),
    [
        ({"pattern": "global_step"}, None, "no *, ? or"),
        ({"pattern": "../*"}, None, "not a pattern"),
        ({"pattern": "**"}, None, "**"),
        ({"template": {"destination": "/models/latest"}}, None, "the same destination"),
        ({"template": {"destination": "/models/{run}"}}, None, "the same destination"),
        ({"template": {"destination": "/models/{steps}"}}, None, "unknown field {steps}"),
        ({"template": {"destination": "/models/{step:06}"}}, None, "unknown field {step:06}"),
        ({"template": {"destination": "/models/{step"}}, None, "do not fit together"),
        ({"template": {"destination": "models/{step}"}}, None, "neither an absolute path nor a URL"),
        ({"template": {"destination": "/m/{step}", "options": {"dtype": "x"}}}, "/template/options/dtype", "dtype"),
        ({"template": {}}, "/template/destination", "required"),
        ({"prefix": "runs"}, None, "neither an absolute path nor a URL"),
        ({"interval_s": 0.01}, "/interval_s", "every 0.1 s at most"),
        ({"interval_s": 1e9}, "/interval_s", "less than or equal"),
        ({"colour": "red"}, "/colour", "Extra inputs"),
    ],
)
def test_what_could_never_work_is_refused_at_once(service, tmp_path, change, pointer, said):
    request = {"prefix": str(tmp_path), "pattern": "global_step_*", "template": TEMPLATE, **change}
    problem = created(service, status=422, **request)
    assert said in f"{problem['detail']} {problem.get('errors')}"
    assert problem["hint"]
    if pointer is not None:
        assert pointer in [fault["pointer"] for fault in problem["errors"]]


def test_prefixes_and_destinations_outside_of_what_is_allowed_are_refused(settings, tmp_path):
    allowed = settings.model_copy(
        update={"allowed_sources": (str(tmp_path / "in"),), "allowed_destinations": (str(tmp_path / "out"),)}
    )
    with running(allowed, FakeConverter()) as service:
        for prefix, destination, kind in (
            ("/other", f"{tmp_path}/out/{{name}}", "source-not-allowed"),
            (f"{tmp_path}/in", "/other/{name}", "destination-not-allowed"),
            (f"{tmp_path}/in/../x", f"{tmp_path}/out/{{name}}", "source-not-allowed"),
        ):
            request = {"prefix": prefix, "pattern": "*", "template": {"destination": destination}}
            assert created(service, status=403, **request)["type"] == f"/problems/{kind}"


def test_a_checkpoint_that_is_uploaded_object_by_object_is_converted_once(s3, monkeypatch, settings):
    bucket = open_s3_folder(s3, monkeypatch)

    def upload(name):
        bucket.write(f"run/global_step_4/{name}", (CASE / name).read_bytes())

    for path in sorted(CASE.rglob("*")):
        if path.is_file() and path.name != RANKS[1]:
            upload(path.relative_to(CASE).as_posix())
    url = bucket.address.url
    template = {"destination": f"{url}/models/{{step}}"}
    with running(settings, FakeConverter()) as service:
        watch = created(service, prefix=f"{url}/run", pattern="global_step_*", template=template, interval_s=0.3)
        item_with(service, watch, "waiting", "incomplete-checkpoint")
        upload(RANKS[1])
        submitted = item_with(service, watch, "submitted", None)
        assert submitted["source"] == f"{url}/run/global_step_4"
        assert service.client.job(submitted["job_id"])["destination"] == f"{url}/models/4"
        service.client.cancel(submitted["job_id"])


def test_an_owner_has_a_bounded_number_of_watches(service, tmp_path, monkeypatch):
    monkeypatch.setattr("service.watches.store.MOST_PER_OWNER", 1)
    request = {"prefix": str(tmp_path), "pattern": "step_*", "template": TEMPLATE}
    watch = created(service, **request)
    assert created(service, 409, **request)["type"] == "/problems/too-many-watches"
    assert service.http.delete(f"/v1/watches/{watch['id']}").status_code == 204
    created(service, **request)
