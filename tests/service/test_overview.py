"""What the pages for people ask for: the overview, search, texts of options, and their own files."""

from __future__ import annotations

import gzip

from service.api.overview import DEMO
from service.api.pages import FILES
from service.settings import Settings
from tests.service.conftest import FakeConverter, running


def test_the_overview_counts_jobs_by_state_and_offers_the_demo(service, settings):
    told = service.http.get("/v1/overview").json()
    assert told["jobs"] == {}
    assert told["demo"]["source"] == str(DEMO)
    assert told["demo"]["destination"] == str(settings.data_dir.resolve() / "models" / "qwen3-moe-demo")
    service.job_in(service.client.submit("/in", "/out")["id"], "succeeded")
    assert service.http.get("/v1/overview").json()["jobs"] == {"succeeded": 1}
    (settings.data_dir / "models" / "qwen3-moe-demo").mkdir(parents=True)
    assert service.http.get("/v1/overview").json()["demo"]["destination"].endswith("/models/qwen3-moe-demo-2")


def test_no_demo_is_offered_where_it_could_not_be_converted(tmp_path):
    settings = Settings(data_dir=tmp_path, allowed_sources=("/runs",), allowed_destinations=("/models",))
    with running(settings, FakeConverter()) as service:
        assert service.http.get("/v1/overview").json()["demo"] is None


def test_jobs_are_found_by_a_part_of_their_paths_or_id(service):
    first = service.client.submit("/runs/Qwen3/step_100", "/models/a%b")["id"]
    second = service.client.submit("/runs/llama/step_900", "/models/axb")["id"]

    def found(text):
        return [job["id"] for job in service.http.get("/v1/jobs", params={"search": text}).json()["items"]]

    assert found("qwen3/STEP") == [first]
    assert found("/models/") == [second, first]
    assert found("a%b") == [first]  # no wildcard
    assert found(second) == [second]
    assert found("nothing") == []


def test_every_option_says_what_it_means(idle):
    options = idle.http.get("/v1/formats").json()["options"]["properties"]
    assert [name for name, option in options.items() if len(option.get("description", "")) < 15] == []


def test_files_of_the_pages_are_sent_again_only_when_they_changed(idle):
    first = idle.http.get("/static/main.js", headers={"Accept-Encoding": "gzip"})
    assert first.headers["content-encoding"] == "gzip"
    assert first.content == FILES["main.js"].content
    assert gzip.decompress(FILES["main.js"].packed) == FILES["main.js"].content
    again = idle.http.get("/static/main.js", headers={"If-None-Match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    plain = idle.http.get("/static/main.js", headers={"Accept-Encoding": "identity"})
    assert "content-encoding" not in plain.headers
    assert plain.content == first.content


def test_only_files_for_browsers_are_sent(idle):
    for name in ("README.md", "vendor/VENDOR.md", "pages", "", "../settings.py", "%2e%2e/settings.py", "main.js/"):
        assert idle.http.get(f"/static/{name}").status_code == 404, name
    for view in ("/", "/jobs", "/jobs/job_00", "/new"):
        assert idle.http.get(view).headers["content-type"].startswith("text/html")
