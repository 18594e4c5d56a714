"""Batches: the list, the grid of a batch as its jobs go on, and the form with its preview."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import quote

import pytest
from playwright.sync_api import expect

from service.settings import Settings
from tests.browser.conftest import assert_accessible, assert_good_in_every_width, keep_screenshot
from tests.browser.plays import Play, Stage
from tests.service.conftest import eventually, running
from workers.errors import CorruptFile

pytestmark = pytest.mark.system("chromium")
STEPS = range(100, 3700, 100)
DAMAGE = CorruptFile("a file is truncated", hint="Copy it again.", file="rank_1.pt")


@pytest.fixture(scope="module")
def under_way(tmp_path_factory):
    """A service with a batch of which most is done, some failed and two run; and the folder with its run."""
    folder = tmp_path_factory.mktemp("batches")
    for step in STEPS:
        (folder / "qwen" / f"global_step_{step}").mkdir(parents=True)
    stage = Stage(
        {f"/models/qwen/step-{step}": Play(layers=1, experts=1, until=0, failure=DAMAGE) for step in (500, 900)}
    )
    stage.plays |= {f"/models/qwen/step-{step}": Play(until=0.4) for step in (2400, 2500)}
    with pytest.MonkeyPatch.context() as environment:
        environment.delenv("RAY_ADDRESS", raising=False)
        settings = Settings(data_dir=folder / "data", poll_s=0.05, max_concurrent_jobs=2)
    with running(settings, stage) as service:
        made = service.http.post(
            "/v1/batches",
            json={
                "name": "qwen3 run 7",
                "discover": {"prefix": str(folder / "qwen"), "pattern": "global_step_*"},
                "template": {"destination": "/models/qwen/step-{step}", "options": {"dtype": "bfloat16"}},
            },
        ).json()

        def counts():
            return service.http.get(f"/v1/batches/{made['id']}").json()["counts"]

        eventually(lambda: counts()["running"] == 2 and counts()["failed"] == 2, "two run and two failed")
        yield service, made["id"], folder, stage
        for play in stage.plays.values():
            play.go(1.0)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("view", ["batches", "batch", "batch-table", "new-batch"])
def test_batches_are_accessible_in_every_view_and_width(under_way, open_page, view, scheme):
    service, batch_id, folder, _ = under_way
    filled = f"/batches/new?prefix={quote(str(folder / 'qwen'))}&pattern=global_step_*&destination=/m/step-%7Bstep%7D"
    paths = {"batches": "/batches", "batch": f"/batches/{batch_id}", "new-batch": filled}
    paths["batch-table"] = f"/batches/{batch_id}?view=table&show=failed"
    page = open_page(service.url + paths[view], scheme=scheme)
    ready = {"batches": ".batch-row", "batch": ".square", "batch-table": "td", "new-batch": "#pattern-prefix"}
    page.wait_for_selector(ready[view])
    assert_good_in_every_width(page, view, scheme)


def test_a_newcomer_is_told_the_first_command(service, open_page):
    page = open_page(f"{service.url}/batches")
    expect(page.get_by_text("curl -s")).to_contain_text(f"{service.url}/v1/batches")
    assert_accessible(page)
    keep_screenshot(page, "batches-empty")


def test_the_grid_follows_the_jobs_and_the_keyboard_leads_into_one(under_way, open_page):
    service, batch_id, _, stage = under_way
    page = open_page(f"{service.url}/batches/{batch_id}")
    expect(page.locator(".square")).to_have_count(len(STEPS))
    expect(page.locator(".square.is-failed")).to_have_text(["500", "900"])
    grid = page.get_by_role("listbox")
    grid.focus()
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    expect(page.locator(".item-facts")).to_contain_text("global_step_200")
    page.keyboard.press("ArrowDown")
    chosen = page.locator(".square[aria-selected=true]")
    first_row = page.evaluate(
        "() => new Set([...document.querySelectorAll('.square')].map((one) => one.offsetTop)).size"
    )
    assert first_row > 1
    assert chosen.get_attribute("data-place") != "1"
    page.get_by_role("button", name="Failed 2").click()
    expect(page.locator(".square")).to_have_count(2)
    expect(page).to_have_url(re.compile("show=failed"))
    page.locator(".square").first.hover()
    expect(page.locator(".item-facts")).to_contain_text("Copy it again.")
    page.get_by_role("button", name="All").click()
    for step in (2400, 2500):
        stage.plays[f"/models/qwen/step-{step}"].go(1.0)
    expect(page.locator(".square.is-succeeded")).to_have_count(len(STEPS) - 2, timeout=20_000)
    expect(page.get_by_role("button", name="Retry 2 failed")).to_be_visible()
    page.get_by_role("button", name="Retry 2 failed").click()
    expect(page.locator(".square.is-succeeded")).to_have_count(len(STEPS))
    expect(page.locator(".head .badge")).to_have_text("Completed")
    grid.focus()
    page.keyboard.press("Home")
    page.keyboard.press("Enter")
    page.wait_for_url("**/jobs/job_*")


def test_the_form_shows_what_would_be_done_before_it_does_it(service, open_page, tmp_path):
    for step in (1, 2, 3):
        (tmp_path / "run" / f"step_{step}").mkdir(parents=True)
    page = open_page(f"{service.url}/batches/new")
    page.get_by_label("Look below").fill(str(tmp_path / "run"))
    page.get_by_label("For folders named").fill("step_*")
    page.get_by_label("Each becomes").fill("/models/form/{step}")
    page.get_by_role("button", name="Show what would be done").click()
    preview = page.locator(".preview")
    expect(preview).to_contain_text("3 checkpoints found")
    expect(preview.locator("tbody tr")).to_have_count(3)
    page.get_by_role("button", name="Look again").click()
    expect(preview.locator("tbody tr")).to_have_count(3)
    assert service.http.get("/v1/batches").json()["items"] == []
    page.get_by_role("button", name="Convert 3").click()
    page.wait_for_url("**/batches/batch_*")
    expect(page.locator(".square")).to_have_count(3)
    made = service.http.get("/v1/batches").json()["items"][0]
    assert made["discover"] == {"prefix": str(tmp_path / "run"), "pattern": "step_*"}
    assert made["template"]["destination"] == "/models/form/{step}"


def test_a_pattern_that_finds_nothing_says_so(service, open_page, tmp_path):
    open_page.forgiven = lambda told: "422" in told
    Path(tmp_path / "run").mkdir()
    page = open_page(f"{service.url}/batches/new")
    page.get_by_label("Look below").fill(str(tmp_path / "run"))
    page.get_by_label("For folders named").fill("step_*")
    page.get_by_label("Each becomes").fill("/models/{step}")
    page.get_by_role("button", name="Show what would be done").click()
    expect(page.get_by_role("alert")).to_be_visible()
