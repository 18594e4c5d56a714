"""Batches over HTTP: a list or a pattern in, jobs out, and what is told of them."""

from __future__ import annotations

import json
import shutil

import httpx
import pytest
from pydantic import SecretStr

from service.settings import Settings
from tests.seaweed import open_s3_folder
from tests.service.command import CASES
from tests.service.conftest import TOKEN, FakeConverter, eventually, running
from workers.convert import convert
from workers.errors import CorruptFile
from workers.options import ConvertOptions

CASE = CASES / "llama-gqa-fsdp2-ws2" / "input"
MANY = 10_000


def steps(folder, *numbers):
    for number in numbers:
        (folder / f"global_step_{number}").mkdir(parents=True)
    return folder


@pytest.fixture
def run(tmp_path):
    return steps(tmp_path / "runs" / "qwen", 100, 20, 3)


@pytest.fixture
def held(settings):
    """A service whose jobs wait, all but the two that it runs."""
    converter = FakeConverter()
    with running(settings, converter) as started:
        yield started
        converter.gate.set()


def submitted(service, request, status=201, headers=None, **params):
    response = service.http.post("/v1/batches", json=request, params=params, headers=headers)
    assert response.status_code == status, response.text
    return response.json()


def ended(service, batch):
    def look():
        told = service.http.get(f"/v1/batches/{batch['id']}").json()
        return told if told["state"] in ("completed", "cancelled") else None

    return eventually(look, f"{batch['id']} has ended")


def items(service, batch, **params):
    response = service.http.get(f"/v1/batches/{batch['id']}/items", params=params)
    assert response.status_code == 200, response.text
    return response.json()["items"]


def counts(**given):
    names = ("total", "queued", "running", "succeeded", "skipped", "failed", "cancelled", "refused")
    return {**dict.fromkeys(names, 0), **given}


def listed(*pairs, **fields):
    return {"items": [{"source": source, "destination": place} for source, place in pairs], **fields}


def test_every_step_of_a_run_becomes_a_job_in_the_order_of_the_steps(service, run, tmp_path):
    request = {
        "name": "all of it",
        "discover": {"prefix": str(run), "pattern": "global_step_*"},
        "template": {"destination": f"{tmp_path}/models/{{run}}-{{step}}", "labels": {"team": "a"}, "priority": 3},
    }
    batch = submitted(service, request)
    assert (batch["state"], batch["counts"]["total"], batch["counts"]["queued"]) == ("running", 3, 3)
    assert (batch["name"], batch["discover"], batch["if_done"]) == ("all of it", request["discover"], "skip")
    found = items(service, batch)
    assert [item["source"] for item in found] == [f"{run}/global_step_{step}" for step in (3, 20, 100)]
    assert [item["destination"] for item in found] == [f"{tmp_path}/models/qwen-{step}" for step in (3, 20, 100)]
    done = ended(service, batch)
    assert (done["state"], done["counts"]) == ("completed", counts(total=3, succeeded=3))
    assert (done["bytes_done"], done["bytes_total"], done["eta_s"]) == (30, 30, None)
    jobs = service.http.get(done["links"]["jobs"]).json()["items"]
    assert {(job["labels"]["team"], job["priority"], job["batch_id"]) for job in jobs} == {("a", 3, batch["id"])}


def test_the_steps_of_a_run_in_a_bucket_become_jobs(s3, monkeypatch, settings):
    folder = open_s3_folder(s3, monkeypatch)
    for step in (5, 50):
        folder.write(f"qwen/global_step_{step}/actor/model.pt", b"x")
    request = {
        "discover": {"prefix": f"{folder.address.url}/qwen", "pattern": "global_step_*/actor"},
        "template": {"destination": f"{folder.address.url}/models/{{flat}}"},
    }
    with running(settings, FakeConverter()) as service:
        found = items(service, submitted(service, request))
        assert [item["source"][len(folder.address.url) :] for item in found] == [
            "/qwen/global_step_5/actor",
            "/qwen/global_step_50/actor",
        ]
        assert found[1]["destination"] == f"{folder.address.url}/models/global_step_50"


def test_listed_items_take_from_the_template_what_they_do_not_say(held):
    request = {
        "items": [
            {"source": "/in/a", "options": {"dtype": "float16"}, "labels": {"x": "1"}},
            {"source": "/in/b", "destination": "/out/other"},
        ],
        "template": {
            "destination": "/out/{name}",
            "options": {"dtype": "bfloat16", "family": "none"},
            "labels": {"x": "0", "y": "0"},
        },
    }
    batch = submitted(held, request)
    first, second = (held.client.job(item["job_id"]) for item in items(held, batch))
    assert (first["destination"], second["destination"]) == ("/out/a", "/out/other")
    assert (first["options"], second["options"]) == (
        {"dtype": "float16", "family": "none"},
        {"dtype": "bfloat16", "family": "none"},
    )
    assert (first["labels"], second["labels"]) == ({"x": "1", "y": "0"}, {"x": "0", "y": "0"})


BAD_ITEMS = {
    "items": [
        {"source": "/in/0", "destination": "/out/0"},
        {"source": "/in/1", "destination": "relative"},
        {"source": "/in/2", "destination": "/out/2", "options": {"dtype": "int7"}},
        {"source": "/in/3", "destination": "/out/0/"},
        {"source": "/in/4"},
        {"source": "ftp://x/y", "destination": "/out/5"},
        {"source": "/in/6", "destination": "/out/6", "options": {"overwrite": True}},
    ]
}
REFUSALS = [
    (1, "/items/1/destination", "invalid-option", "neither an absolute path nor a URL"),
    (2, "/items/2/options/dtype", "invalid-option", "dtype"),
    (3, "/items/3/destination", "duplicate-destination", "/out/0 is also the destination of item 0"),
    (4, "/template/destination", "invalid-option", "neither a destination nor a template"),
    (5, "/items/5/source", "invalid-option", "ftp"),
    (6, "/items/6/options/overwrite", "invalid-option", "if_done says skip"),
]


def test_items_that_cannot_be_done_are_refused_and_the_others_go_on(held):
    batch = submitted(held, BAD_ITEMS)
    assert batch["counts"] == counts(total=7, queued=1, refused=6)
    found = items(held, batch, state="refused")
    assert [(item["position"], item["error"]["type"]) for item in found] == [(row[0], row[2]) for row in REFUSALS]
    for item, (_, _, _, said) in zip(found, REFUSALS, strict=True):
        assert said in item["error"]["message"]
        assert (item["job_id"], item["state"]) == (None, "refused")


def test_with_fail_nothing_is_stored_and_every_bad_item_is_named(held):
    problem = submitted(held, {**BAD_ITEMS, "on_item_error": "fail"}, status=422)
    assert problem["type"] == "/problems/validation"
    assert "6 of 7 items" in problem["detail"]
    assert [(fault["position"], fault["pointer"], fault["type"]) for fault in problem["errors"]] == [
        row[:3] for row in REFUSALS
    ]
    assert held.http.get("/v1/batches").json()["items"] == []
    assert held.http.get("/v1/jobs").json()["items"] == []


def tally(service, batch):
    return service.http.get(f"/v1/batches/{batch['id']}").json()["counts"]


class FirstFails(FakeConverter):
    """Fails at once for the first destination; the others wait for the gate."""

    def __call__(self, source, destination, options, **controls):
        if destination == "/out/0":
            raise CorruptFile("broken", hint="copy it again")
        return super().__call__(source, destination, options, **controls)


def test_a_failing_job_stops_the_rest_of_a_batch_that_wants_all(settings):
    converter = FirstFails()
    with running(settings.model_copy(update={"max_concurrent_jobs": 1}), converter) as service:
        request = listed(*((f"/in/{n}", f"/out/{n}") for n in range(20)), on_item_error="fail", max_running=1)
        batch = submitted(service, request)
        # One may have begun before the failure was seen; it is not stopped.
        eventually(lambda: tally(service, batch)["cancelled"] >= 18, "what waited is cancelled")
        converter.gate.set()
        done = ended(service, batch)
        assert done["state"] == "completed"
        assert done["counts"]["failed"] == 1
        assert done["counts"]["cancelled"] + done["counts"]["succeeded"] == 19
        assert items(service, done)[0]["error"]["message"] == "broken"


def test_models_that_are_there_are_skipped_by_the_fingerprint_of_the_plan_alone(settings, tmp_path):
    for step in (1, 2, 3):
        shutil.copytree(CASE, tmp_path / "run" / f"global_step_{step}")
    convert(str(tmp_path / "run" / "global_step_1"), str(tmp_path / "m" / "1"))
    convert(str(tmp_path / "run" / "global_step_2"), str(tmp_path / "m" / "2"), ConvertOptions(dtype="bfloat16"))
    request = {
        "discover": {"prefix": str(tmp_path / "run"), "pattern": "global_step_*"},
        "template": {"destination": f"{tmp_path}/m/{{step}}"},
    }

    def run_in_process(source, destination, options, **controls):
        return convert(source, destination, options, **controls)

    with running(settings, run_in_process) as service:
        preview = submitted(service, request, status=200, dry_run="true")
        assert [item["done"] for item in preview["items"]] == [True, False, False]
        assert (preview["total"], preview["done"], preview["unknown"], preview["refused"]) == (3, 1, 0, 0)
        assert service.http.get("/v1/batches").json()["items"] == []
        done = ended(service, submitted(service, request))
        assert done["counts"] == counts(total=3, succeeded=1, skipped=1, failed=1)
        first, second, third = items(service, done)
        assert (first["already_there"], third["already_there"]) == (True, False)
        assert second["error"]["type"] == "destination-not-empty"
        redone = ended(service, submitted(service, {**request, "if_done": "redo"}))
        assert redone["counts"] == counts(total=3, succeeded=3)
        again = ended(service, submitted(service, request))
        assert again["counts"] == counts(total=3, skipped=3)


def test_a_request_that_comes_twice_makes_one_batch(held, run):
    request = {
        "discover": {"prefix": str(run), "pattern": "*"},
        "template": {"destination": "/out/{name}"},
    }
    key = {"Idempotency-Key": "once"}
    first = submitted(held, request, headers=key)
    shutil.rmtree(run)
    again = held.http.post("/v1/batches", json=request, headers=key)
    assert (again.status_code, again.json()["id"]) == (201, first["id"])
    assert again.headers["Idempotency-Replayed"] == "true"
    assert again.headers["Location"] == f"/v1/batches/{first['id']}"
    problem = submitted(held, {**request, "name": "other"}, status=422, headers=key)
    assert problem["type"] == "/problems/idempotency-key-reuse"
    assert len(held.http.get("/v1/batches").json()["items"]) == 1


def test_a_batch_is_cancelled_and_its_jobs_are_queued_again(held):
    batch = submitted(held, listed(*((f"/in/{n}", f"/out/{n}") for n in range(5)), max_running=1))
    eventually(lambda: items(held, batch, state="running"), "a job runs")
    path = f"/v1/batches/{batch['id']}"
    cancelling = held.http.post(f"{path}:cancel")
    assert (cancelling.status_code, cancelling.json()["state"]) == (202, "cancelling")
    done = ended(held, batch)
    assert (done["state"], done["counts"]) == ("cancelled", counts(total=5, cancelled=5))
    assert held.http.post(f"{path}:cancel").status_code == 200
    retried = held.http.post(f"{path}:retry_failed").json()
    assert (retried["requeued"], retried["not_requeued"], retried["batch"]["state"]) == (5, [], "running")
    refused = held.http.delete(path)
    assert (refused.status_code, refused.json()["type"]) == (409, "/problems/invalid-state")
    held.http.post(f"{path}:cancel")
    ended(held, batch)
    assert held.http.delete(path).status_code == 204
    assert held.http.get(path).status_code == 404
    jobs = held.http.get("/v1/jobs", params={"batch_id": batch["id"]}).json()["items"]
    assert [job["state"] for job in jobs] == ["cancelled"] * 5


def test_batches_are_listed_by_state_and_label_and_changed(held):
    first = submitted(held, listed(("/in/1", "/out/1"), labels={"run": "a"}, name="one"))
    second = submitted(held, listed(("/in/2", "/out/2"), labels={"run": "b"}))

    def ids(**params):
        return [batch["id"] for batch in held.http.get("/v1/batches", params=params).json()["items"]]

    assert ids() == [second["id"], first["id"]]
    assert ids(label="run:a") == [first["id"]]
    assert ids(state=["completed", "cancelled"]) == []
    assert ids(created_before=first["created_at"]) == []
    page = held.http.get("/v1/batches", params={"limit": 1}).json()
    assert ids(cursor=page["next_cursor"]) == [first["id"]]
    path = f"/v1/batches/{first['id']}"
    changed = held.http.patch(path, json={"name": "two", "labels": {"run": "c"}, "max_running": 7}).json()
    assert (changed["name"], changed["labels"], changed["max_running"]) == ("two", {"run": "c"}, 7)
    assert held.http.patch(path, json={"max_running": None}).json()["max_running"] is None
    assert held.http.patch(path, json={"state": "completed"}).status_code == 422


def test_items_come_in_pages(held):
    batch = submitted(held, listed(*((f"/in/{n}", f"/out/{n}") for n in range(5))))
    found, cursor = [], None
    while True:
        params = {"limit": 2} | ({"cursor": cursor} if cursor else {})
        page = held.http.get(f"/v1/batches/{batch['id']}/items", params=params).json()
        found += [item["position"] for item in page["items"]]
        cursor = page["next_cursor"]
        if cursor is None:
            break
    assert found == list(range(5))


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        ({}, "either items or discover"),
        ({"items": [{"source": "/a"}], "discover": {"prefix": "/a", "pattern": "*"}}, "either items or discover"),
        ({"items": []}, "at least 1"),
        ({"items": [{"source": "/a", "colour": 1}]}, "Extra inputs"),
        ({"items": [{"source": "/a"}], "max_running": 0}, "greater than or equal"),
        ({"items": [{"source": "/a"}], "template": {"destination": "/m/{steps}"}}, "unknown field {steps}"),
        ({"discover": {"prefix": "/nowhere-at-all", "pattern": "*"}, "template": {"destination": "/m"}}, "nothing at"),
        ({"discover": {"prefix": "/usr", "pattern": "*"}, "template": {"destination": "/m"}}, "the same destination"),
        ({"discover": {"prefix": "/usr", "pattern": "global_step_*"}}, "no folder below /usr fits"),
        ({"discover": {"prefix": "relative", "pattern": "*"}}, "neither an absolute path nor a URL"),
        ({"discover": {"prefix": "/usr", "pattern": "lib"}}, "no *, ? or"),
        ({"discover": {"prefix": "/usr", "pattern": "*"}, "template": {"options": {"dtype": "x"}}}, "dtype"),
    ],
)
def test_a_request_that_makes_no_sense_is_refused(idle, request_, said):
    problem = submitted(idle, request_, status=422)
    assert said in f"{problem['detail']} {problem.get('errors')}"
    assert problem["hint"]


def test_places_that_are_not_allowed_are_refused(settings, run, tmp_path):
    limits = {"allowed_sources": (str(tmp_path / "runs"),), "allowed_destinations": (str(tmp_path / "models"),)}
    (run / "global_step_4").symlink_to("/usr")
    with running(settings.model_copy(update=limits), FakeConverter()) as service:
        pattern = {"pattern": "global_step_*"}
        request = {
            "discover": {"prefix": str(run), **pattern},
            "template": {"destination": f"{tmp_path}/models/{{name}}"},
        }
        [refused] = items(service, submitted(service, request), state="refused")
        assert (refused["source"][-1], refused["error"]["type"]) == ("4", "source-not-allowed")
        outside = submitted(service, {**request, "discover": {"prefix": "/usr", **pattern}}, status=403)
        assert outside["type"] == "/problems/source-not-allowed"
        elsewhere = {**request, "template": {"destination": "/elsewhere/{name}"}, "on_item_error": "fail"}
        problem = submitted(service, elsewhere, status=422)
        assert {fault["type"] for fault in problem["errors"]} == {"destination-not-allowed", "source-not-allowed"}


def test_ten_thousand_items_are_one_request(settings, tmp_path):
    held = FakeConverter()
    with running(settings, held) as service:
        service.http.timeout = 60
        body = json.dumps(listed(*((f"{tmp_path}/in/{n}", f"{tmp_path}/out/{n}") for n in range(MANY))))
        response = service.http.post("/v1/batches", content=body, headers={"Content-Type": "application/json"})
        assert response.status_code == 201, response.text[:500]
        batch = response.json()
        assert batch["counts"] == counts(total=MANY, queued=MANY)
        last = service.http.get(f"/v1/batches/{batch['id']}/items", params={"cursor": "OTk5OA=="}).json()
        assert [item["position"] for item in last["items"]] == [MANY - 1]
        assert service.http.post(f"/v1/batches/{batch['id']}:cancel").status_code == 202
        assert ended(service, batch)["counts"] == counts(total=MANY, cancelled=MANY)
        too_many = listed(*((f"/in/{n}", f"/out/{n}") for n in range(MANY + 1)))
        assert "at most 10000" in str(submitted(service, too_many, status=422)["errors"])
        held.gate.set()


def test_only_a_batch_may_be_large(tmp_path, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    settings = Settings(data_dir=tmp_path, max_body_bytes=2000, max_batch_bytes=5000, poll_s=0.05)
    with running(settings, FakeConverter()) as service:
        large = {"source": "/in", "destination": "/out", "labels": {"x": "y" * 200}}
        assert submitted(service, {"items": [large] * 10})["counts"]["refused"] == 9
        refused = submitted(service, {"items": [large] * 30}, status=413)
        assert "5000 bytes" in refused["detail"]
        job = service.http.post("/v1/jobs", json={**large, "options": {"x": "y" * 3000}})
        assert job.status_code == 413


def test_batches_and_watches_of_one_token_are_not_there_for_another(settings):
    places = {"allowed_sources": ("/",), "allowed_destinations": ("/",)}
    with running(
        settings.model_copy(update={"admin_token": SecretStr(TOKEN), **places}), FakeConverter(), TOKEN
    ) as service:

        def caller(*scopes):
            made = service.http.post("/v1/tokens", json={"name": "t", "scopes": list(scopes)}).json()
            headers = {"Authorization": f"Bearer {made['token']}"}
            return httpx.Client(base_url=service.url, headers=headers, trust_env=False, timeout=15)

        both = ("jobs:read", "batches:write")
        watch = {"prefix": "/nowhere", "pattern": "*", "template": {"destination": "/m/{name}"}}
        with caller(*both) as owner, caller(*both) as other, caller("jobs:read", "jobs:write") as reader:
            for kind, body in (("batches", listed(("/in/1", "/out/1"))), ("watches", watch)):
                made = owner.post(f"/v1/{kind}", json=body).json()
                path = f"/v1/{kind}/{made['id']}"
                for who, status in ((owner, 200), (service.http, 200), (other, 404), (reader, 404)):
                    assert who.get(path).status_code == status
                    assert who.get(f"{path}/items").status_code == status
                    seen = [each["id"] for each in who.get(f"/v1/{kind}").json()["items"]]
                    assert seen == ([made["id"]] if status == 200 else [])
                verbs = (":cancel", ":retry_failed") if kind == "batches" else (":look",)
                for verb in verbs:
                    assert other.post(path + verb).status_code == 404
                assert other.patch(path, json={"name": "mine"}).status_code == 404
                assert other.delete(path).status_code == 404
                refused = reader.post(f"/v1/{kind}", json=body)
                assert (refused.status_code, refused.json()["required_scope"]) == (403, "batches:write")
                assert reader.delete(path).status_code == 403


@pytest.mark.parametrize(
    ("options", "pointer"),
    [({"dtype": "\ud800"}, "/template/options/dtype"), ({"\ud800": 1}, "/template/options/\ud800")],
)
def test_options_that_nothing_can_hold_are_refused_where_they_stand(service, options, pointer):
    body = {"items": [{"source": "/in", "destination": "/out"}], "template": {"options": options}}
    content = json.dumps(body).encode()
    refused = service.http.post("/v1/batches", content=content, headers={"Content-Type": "application/json"})
    assert (refused.status_code, refused.json()["errors"][0]["pointer"]) == (422, pointer)
    body["items"][0]["options"] = body.pop("template")["options"]
    content = json.dumps(body).encode()
    made = service.http.post("/v1/batches", content=content, headers={"Content-Type": "application/json"})
    assert (made.status_code, made.json()["counts"]["refused"]) == (201, 1)
    items = service.http.get(f"/v1/batches/{made.json()['id']}/items").json()["items"]
    assert "cannot be stored" in items[0]["error"]["message"]
