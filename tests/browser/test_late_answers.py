"""Answers that come late, twice or not at all: nothing older replaces what is newer, and nothing stays lost."""

from __future__ import annotations

import re
import time
from datetime import UTC, datetime, timedelta

import pytest
from playwright.sync_api import expect

from service.api import events as routes
from service.settings import Settings
from tests.browser.conftest import SOON_MS, Held
from tests.browser.plays import Play
from tests.service.conftest import eventually, running

pytestmark = pytest.mark.system("chromium")
HEAR = """import('/static/live.js').then(({onJob}) => {
  window.heard = [];
  onJob((job) => heard.push(`${job.id} ${job.state}`));
})"""


def heard(page, job_id, state):
    page.wait_for_function(f"() => window.heard.includes('{job_id} {state}')")


def hold_up(service, stage, count=4):
    """As many jobs as run at once, so that the next ones wait and nothing more is told of them."""
    for number in range(count):
        stage.plays[f"/models/busy-{number}"] = Play(until=0.1)
        job = service.client.submit("/in", f"/models/busy-{number}")
        service.job_in(job["id"], "running")


def test_a_job_that_came_while_the_list_was_on_its_way_is_in_it(service, stage, open_page):
    hold_up(service, stage)
    page = open_page(f"{service.url}/workers")
    page.evaluate(HEAR)
    held = Held(page, re.compile(r"/v1/jobs\?"))
    page.get_by_role("link", name="Jobs", exact=True).click()
    held.wait()
    job = service.client.submit("/in", "/models/late")
    heard(page, job["id"], "queued")
    held.release()
    expect(page.locator("tr.job")).to_have_count(5, timeout=2000)
    expect(page.get_by_role("link", name="late", exact=True)).to_be_visible()


def test_an_older_page_that_comes_late_does_not_take_a_job_back(service, stage, open_page):
    stage.plays["/models/a"] = play = Play(until=0.1)
    job = service.client.submit("/in", "/models/a")
    service.job_in(job["id"], "running")
    page = open_page(f"{service.url}/workers")
    page.evaluate(HEAR)
    held = Held(page, re.compile(r"/v1/jobs\?"))
    page.get_by_role("link", name="Jobs", exact=True).click()
    held.wait()
    play.go(1.0)
    heard(page, job["id"], "succeeded")
    held.release()
    expect(page.locator("tr.job .badge")).to_have_text("Succeeded", timeout=2000)
    expect(page.get_by_role("button", name=re.compile("^Active"))).to_contain_text("0")


def test_of_two_filters_the_one_chosen_last_is_shown(service, open_page):
    for name in ("one", "two"):
        service.client.create(
            "batches", {"name": name, "items": [{"source": "/in", "destination": f"/models/{name}"}]}
        )
    eventually(
        lambda: all(b["state"] == "completed" for b in service.client.get("/v1/batches")["items"]), "both ended"
    )
    page = open_page(f"{service.url}/batches")
    expect(page.locator(".batch-row")).to_have_count(2)
    held = Held(page, re.compile(r"/v1/batches\?state=running"))
    page.get_by_role("button", name="Running").click()
    held.wait()
    page.get_by_role("button", name="Completed").click()
    expect(page.locator(".batch-row")).to_have_count(2)
    held.release()
    expect(page.locator(".batch-row")).to_have_count(2, timeout=2000)
    expect(page.locator(".skeleton")).to_have_count(0)


def test_older_batches_come_once_however_often_they_are_asked_for(service, open_page):
    for number in range(60):
        item = {"source": "/in", "destination": f"/models/{number}"}
        service.client.create("batches", {"name": f"batch {number}", "items": [item]})
    page = open_page(f"{service.url}/batches")
    expect(page.locator(".batch-row")).to_have_count(50)
    page.get_by_role("button", name="Show older batches").dblclick()
    expect(page.locator(".batch-row")).to_have_count(60)
    page.wait_for_timeout(SOON_MS)
    assert len(set(page.locator(".batch-row .name").all_text_contents())) == page.locator(".batch-row").count() == 60


def test_items_of_a_batch_that_ended_while_they_were_listed_are_shown_so(service, stage, open_page):
    stage.plays["/models/0"] = play = Play(until=0.1)
    batch = service.client.create("batches", {"items": [{"source": "/in", "destination": "/models/0"}]})
    [item] = service.client.batch_items(batch["id"])
    service.job_in(item["job_id"], "running")
    page = open_page(f"{service.url}/batches")
    page.evaluate(HEAR)
    held = Held(page, re.compile(r"/v1/batches/batch_\w+/items"))
    page.locator(".batch-row .name").click()
    held.wait()
    play.go(1.0)
    heard(page, item["job_id"], "succeeded")
    held.release()
    expect(page.locator(".square.is-succeeded")).to_have_count(1, timeout=2000)


def test_a_choice_in_a_batch_stays_with_its_item_while_others_leave_the_view(service, stage, open_page):
    for number in range(3):
        stage.plays[f"/models/{number}"] = Play(until=0.1)
    items = [{"source": f"/in/step_{number}", "destination": f"/models/{number}"} for number in range(3)]
    batch = service.client.create("batches", {"items": items})
    page = open_page(f"{service.url}/batches/{batch['id']}?show=running")
    expect(page.locator(".square")).to_have_count(3)
    page.locator(".square").nth(1).click()
    expect(page.locator(".item-facts")).to_contain_text("/models/1")
    stage.plays["/models/0"].go(1.0)
    expect(page.locator(".square")).to_have_count(2)
    expect(page.locator(".item-facts")).to_contain_text("/models/1")


def test_what_takes_longer_to_answer_than_the_page_waits_to_ask_again_is_shown(service, open_page, monkeypatch):
    cluster = service.context.conversions

    def slow():
        time.sleep(2.6)
        return {"nodes": [], "items": []}

    monkeypatch.setattr(cluster, "describe", slow)
    page = open_page(f"{service.url}/workers")
    expect(page.get_by_text("The cluster works")).to_be_visible(timeout=8000)


def test_a_preview_of_other_values_than_the_forms_is_not_shown_and_cannot_be_converted(service, open_page, tmp_path):
    for step in (1, 2):
        (tmp_path / f"step_{step}").mkdir()
    page = open_page(f"{service.url}/batches/new")
    page.get_by_label("Look below").fill(str(tmp_path))
    page.get_by_label("For folders named").fill("step_*")
    page.get_by_label("Each becomes").fill("/models/{name}")
    held = Held(page, re.compile("dry_run=true"))
    page.get_by_role("button", name="Show what would be done").click()
    held.wait()
    page.get_by_label("Each becomes").fill("/elsewhere/{name}")
    held.release()
    expect(page.get_by_text("checkpoints found")).to_have_count(0)
    expect(page.get_by_role("button", name="Convert")).to_be_disabled()
    page.get_by_role("button", name="Show what would be done").click()
    expect(page.get_by_role("cell", name="/elsewhere/step_1")).to_be_visible()


def test_a_submit_whose_answer_was_lost_is_made_good_by_the_next_one(service, open_page, tmp_path):
    open_page.forgiven = lambda told: "ERR_" in told
    page = open_page(f"{service.url}/new?destination=%2Fmodels%2Fonce")
    page.get_by_label("Path or URL").fill(str(tmp_path))

    def lose(route):
        route.fetch()
        route.abort()

    page.route(re.compile(r"/v1/jobs$"), lose, times=1)
    page.get_by_role("button", name="Convert").click()
    expect(page.get_by_text("It is not known whether")).to_be_visible()
    page.get_by_role("button", name="Convert").click()
    expect(page).to_have_url(re.compile("/jobs/job_"))
    assert len(service.client.jobs()) == 1


def test_times_are_told_by_the_services_clock(service, stage, open_page):
    stage.plays["/models/a"] = Play(until=0.1)
    job = service.client.submit("/in", "/models/a")
    service.job_in(job["id"], "running")
    page = open_page("about:blank")
    page.clock.install(time=datetime.now(UTC) + timedelta(hours=3))
    page.goto(service.url)
    expect(page.locator("tr.job td.when")).to_have_text("just now")
    page.get_by_role("link", name="a", exact=True).click()
    expect(page.locator(".step[aria-current] .times")).to_have_text(re.compile(r"· \d+(\.\d)? s$"))


def test_a_stream_that_went_silent_is_begun_anew(service, open_page, monkeypatch):
    monkeypatch.setattr(routes, "KEEP_ALIVE_S", 1000.0)
    page = open_page("about:blank")
    page.clock.install()
    asked = []
    page.on("request", lambda request: asked.append(request.url) if request.url.endswith("/v1/events") else None)
    page.goto(service.url)
    expect(page.get_by_text("Live", exact=True)).to_be_visible()
    assert len(asked) == 1
    page.clock.run_for(60_000)
    page.wait_for_timeout(SOON_MS)
    expect(page.get_by_text("Live", exact=True)).to_be_visible()
    assert len(asked) > 1


def test_files_that_could_not_be_asked_for_are_when_the_connection_is_back(service, stage, open_page):
    open_page.forgiven = lambda told: "ERR_" in told
    stage.plays["/models/a"] = play = Play(until=0.5)
    job = service.client.submit("/in", "/models/a")
    page = open_page(f"{service.url}/jobs/{job['id']}")
    expect(page.get_by_text(re.compile(r"^\d+ of \d+ files done$"))).to_be_visible()
    page.route(re.compile("/shards|/events\\?after"), lambda route: route.abort())
    play.go(1.0)
    expect(page.locator(".badge").first).to_have_text("Succeeded")
    page.wait_for_timeout(1500)
    page.unroute_all()
    page.evaluate("() => dispatchEvent(new Event('online'))")
    expect(page.get_by_text(re.compile(r"^(\d+) of \1 files done$"))).to_be_visible(timeout=5000)
    page.get_by_role("tab", name="Events").click()
    expect(page.get_by_role("cell", name="job.succeeded")).to_be_visible(timeout=5000)


def test_a_page_without_a_stream_of_its_own_asks_for_news(tmp_path, stage, open_page, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    settings = Settings(data_dir=tmp_path / "data", poll_s=0.05, max_streams=1)
    open_page.forgiven = lambda told: "429" in told
    with running(settings, stage) as service:
        stage.plays["/models/a"] = play = Play(until=0.1)
        with service.http.stream("GET", "/v1/events", headers={"Accept": "text/event-stream"}):
            page = open_page(f"{service.url}/batches")
            expect(page.get_by_text("Live", exact=True)).to_be_visible()
            item = {"source": "/in", "destination": "/models/a"}
            service.client.create("batches", {"name": "told by asking", "items": [item]})
            page.get_by_role("link", name="told by asking").click()
            expect(page.locator(".square.is-running")).to_have_count(1)
            play.go(1.0)
            expect(page.locator(".square.is-succeeded")).to_have_count(1)
            expect(page.locator(".badge").first).to_have_text("Completed")
            open_page.close()
