"""The list of jobs."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import expect

from service.jobs.records import NewJob
from service.jobs.store import insert_jobs
from service.settings import Settings
from tests.browser.conftest import keep_screenshot
from tests.browser.plays import Play
from tests.service.conftest import running
from workers.convert import convert
from workers.errors import StorageError

pytestmark = pytest.mark.system("chromium")
HEAR = """() => {
  const voice = document.querySelector('[aria-live]');
  window.said = [];
  window.same = true;
  const hear = () => window.said.push(voice.textContent);
  new MutationObserver(hear).observe(voice, {childList: true, characterData: true, subtree: true});
}"""


def shown(page) -> list[str]:
    return page.locator("tr.job .name").all_text_contents()


def test_a_newcomer_converts_the_checkpoint_that_comes_along(tmp_path, open_page, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with running(Settings(data_dir=tmp_path, poll_s=0.05), convert) as service:
        page = open_page(service.url)
        page.get_by_role("link", name="Try the demo checkpoint").click()
        expect(page.get_by_text("Qwen3MoeForCausalLM")).to_be_visible()
        page.get_by_role("button", name="Show the plan").click()
        expect(page.get_by_text(re.compile("in 1 file$")).first).to_be_visible()
        keep_screenshot(page, "newcomer-plan")
        page.get_by_role("button", name="Convert").click()
        expect(page.get_by_text("The model is at")).to_be_visible()
        expect(page.locator(".badge")).to_have_text("Succeeded")
        keep_screenshot(page, "newcomer-done")
        assert (tmp_path / "models" / "qwen3-moe-demo" / "model.safetensors").is_file()
        open_page.close()  # before the service, which it would miss


def test_a_whole_life_is_seen_without_loading_again(service, stage, open_page):
    destination = "/models/qwen/step-1"
    stage.plays[destination] = play = Play(until=0.3)
    page = open_page(service.url)
    expect(page.get_by_role("heading", name="Convert a checkpoint")).to_be_visible()
    page.evaluate(HEAR)
    service.client.submit("/runs/qwen/1", destination)
    row = page.locator("tr.job")
    expect(row.locator(".badge")).to_have_text("Running")
    expect(row.locator("progress")).to_have_js_property("max", 1)
    expect(row.locator(".percent")).to_have_text(re.compile("[23]\\d %"))
    play.go(0.7)
    expect(row.locator(".percent")).to_have_text(re.compile("[67]\\d %"))
    assert row.locator("progress").evaluate("(bar) => bar.value") > 0.6
    play.go(1.0)
    expect(row.locator(".badge")).to_have_text("Succeeded")
    expect(page.get_by_role("button", name=re.compile("^Succeeded"))).to_contain_text("1")
    assert page.evaluate("() => window.same"), "the page was not loaded again"
    page.wait_for_function("() => window.said.at(-1)?.endsWith('Succeeded')")
    said = page.evaluate("() => window.said")
    assert said[-1] == "step-1: Succeeded"
    assert not [text for text in said if "%" in text], "progress is not read out"


def test_the_jobs_of_one_batch_are_a_link_away_and_stay_alone(service, open_page):
    items = [{"source": f"/in/{name}", "destination": f"/models/{name}"} for name in ("a", "b")]
    batch = service.client.create("batches", {"items": items, "name": "two"})
    page = open_page(f"{service.url}/batches/{batch['id']}")
    page.get_by_role("main").get_by_role("link", name="Jobs", exact=True).click()
    expect(page.locator("tr.job")).to_have_count(2)
    assert f"batch={batch['id']}" in page.url
    other = service.client.submit("/in/c", "/models/c")
    service.job_in(other["id"], "succeeded")
    page.reload()
    expect(page.locator("tr.job")).to_have_count(2)
    page.get_by_role("button", name="Take away the filter by batch").click()
    expect(page.locator("tr.job")).to_have_count(3)


def test_chips_search_and_labels_narrow_the_list_and_stay_in_the_address(service, stage, open_page):
    stage.plays["/models/b"] = Play(failure=StorageError("the disk is full", hint="Free some space."), until=0.5)
    for name, run in (("a", "one"), ("b", "one"), ("c", "two")):
        job = service.client.submit(f"/runs/{run}/{name}", f"/models/{name}", labels={"run": run})
        service.job_in(job["id"], "succeeded", "failed")
    page = open_page(service.url)
    expect(page.locator("tr.job")).to_have_count(3)
    expect(page.get_by_text("the disk is full")).to_be_visible()
    expect(page.get_by_text("Free some space.")).to_be_visible()
    page.get_by_role("button", name=re.compile("^Failed")).click()
    expect(page.locator("tr.job")).to_have_count(1)
    assert "show=failed" in page.url
    page.go_back()
    expect(page.locator("tr.job")).to_have_count(3)
    page.locator("tr.job", has_text="/runs/two/c").get_by_role("button", name="Only jobs with run two").click()
    expect(page.locator("tr.job")).to_have_count(1)
    assert shown(page) == ["c"]
    page.reload()
    expect(page.locator("tr.job")).to_have_count(1)
    page.get_by_role("button", name="Take away the filter run:two").click()
    page.keyboard.press("/")
    page.keyboard.type("RUNS/ONE")
    expect(page.locator("tr.job")).to_have_count(2)
    assert shown(page) == ["b", "a"]
    page.get_by_role("searchbox").fill("nothing like this")
    expect(page.get_by_text("No job fits this filter.")).to_be_visible()
    page.get_by_role("button", name="Show all jobs").click()
    expect(page.locator("tr.job")).to_have_count(3)


def test_a_job_that_no_longer_fits_leaves_the_list(service, stage, open_page):
    stage.plays["/models/a"] = play = Play(until=0.3)
    page = open_page(f"{service.url}/?show=active")
    service.client.submit("/in", "/models/a")
    expect(page.locator("tr.job")).to_have_count(1)
    play.go(1.0)
    expect(page.locator("tr.job")).to_have_count(0)


def test_many_jobs_are_cancelled_and_queued_again_at_once(service, stage, open_page):
    names = ["a", "b", "c", "d", "e", "f"]
    for name in names:
        stage.plays[f"/models/{name}"] = Play(until=0.3)
        service.client.submit("/in", f"/models/{name}")
    page = open_page(service.url)
    expect(page.locator("tr.job")).to_have_count(6)
    page.get_by_role("checkbox", name="Select f").click()
    page.get_by_role("checkbox", name="Select a", exact=True).click(modifiers=["Shift"])
    expect(page.get_by_role("region", name="Selected jobs")).to_contain_text("6 selected")
    page.get_by_role("button", name="Cancel 6 jobs").click()
    expect(page.get_by_text("Cancelled: 6 jobs")).to_be_visible()
    expect(page.locator("tr.job .badge", has_text=re.compile("^Cancelled"))).to_have_count(6)
    for play in stage.plays.values():
        play.go(1.0)
    page.get_by_role("checkbox", name="Select all that are shown").click()
    page.get_by_role("button", name="Retry 6 jobs").click()
    expect(page.locator("tr.job .badge", has_text="Succeeded")).to_have_count(6)


def test_three_hundred_jobs_come_as_they_are_asked_for_and_stay_live(service, stage, open_page):
    made = [NewJob("/in", f"/models/{number}", {}, {}) for number in range(300)]
    for number in range(4):  # as many as run at once: they hold the others up
        stage.plays[f"/models/{number}"] = Play(until=0.3)
    with service.context.database.write() as connection:
        ids = insert_jobs(connection, made)
    page = open_page(service.url)
    for count in (100, 200):
        expect(page.locator("tr.job")).to_have_count(count)
        page.get_by_role("button", name="Show older jobs").click()
    expect(page.locator("tr.job")).to_have_count(300)
    expect(page.get_by_role("button", name="Show older jobs")).to_have_count(0)
    assert shown(page) == [str(number) for number in reversed(range(300))]
    service.client.submit("/in", "/models/new")
    expect(page.locator("tr.job").first.locator(".name")).to_have_text("new")
    expect(page.locator("tr.job")).to_have_count(301)
    stage.plays["/models/0"].go(1.0)
    expect(page.locator(f"tr.job[data-id='{ids[0]}'] .badge")).to_have_text("Succeeded")
    for number in range(1, 4):
        service.client.cancel(ids[number])
