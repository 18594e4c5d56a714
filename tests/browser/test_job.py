"""The page of one job."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from playwright.sync_api import expect

from tests.browser.plays import Play
from workers.errors import CorruptFile

pytestmark = pytest.mark.system("chromium")
DESTINATION = "/models/qwen/step-1"
SEEN = """(canvas, variables) => {
  const pixels = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
  const seen = {};
  for (const variable of variables) {
    canvas.style.color = `var(${variable})`;
    const wanted = getComputedStyle(canvas).color.match(/\\d+/g).map(Number);
    canvas.style.color = "";
    seen[variable] = 0;
    for (let at = 0; at < pixels.length; at += 4) {
      const far = wanted.reduce((sum, value, part) => sum + Math.abs(value - pixels[at + part]), 0);
      if (far < 24 && pixels[at + 3] > 200) seen[variable] += 1;
    }
  }
  return seen;
}"""
"""How many pixels of a canvas have the colour of each CSS variable."""


@pytest.fixture
def play(stage) -> Play:
    stage.plays[DESTINATION] = Play(layers=6, experts=4, file_bytes=100_000_000)
    return stage.plays[DESTINATION]


def submitted(service, *states: str, **options) -> dict:
    job = service.client.submit("/runs/qwen/1", DESTINATION, **options)
    return service.job_in(job["id"], *states) if states else job


def tile(page, name: str):
    return page.locator(".tiles > div", has=page.locator("dt", has_text=re.compile(f"^{name}$"))).locator("dd")


def test_a_failure_tells_what_to_do_and_a_retry_is_seen_to_its_end(service, play, open_page):
    tensor = "model.layers.2.self_attn.o_proj.weight"
    play.failure, play.until = (
        CorruptFile(
            "a part of the checkpoint is damaged",
            hint="Copy it again.",
            file="rank_3.pt",
            tensor=tensor,
            expected="1f",
            found="00",
        ),
        0.5,
    )
    job = submitted(service, "failed")
    page = open_page(f"{service.url}/jobs/{job['id']}")
    panel = page.get_by_role("region", name="Failure")
    for text in ("a part of the checkpoint is damaged", "Copy it again.", "rank_3.pt", tensor, "1f", "00"):
        expect(panel.get_by_text(text, exact=True)).to_be_visible()
    # The map shows where it happened.
    expect(page.locator(".detail")).to_contain_text(tensor)
    expect(page.locator(".detail .is")).to_have_text("failed")
    panel.get_by_role("button", name="Retry", exact=True).click()
    expect(page.locator(".job-head .badge")).to_contain_text("Succeeded")
    expect(panel).to_have_count(0)
    expect(page.locator(".job-head .attempt")).to_have_text("×2")
    page.get_by_role("tab", name="Attempts").click()
    rows = page.get_by_role("tabpanel").locator("tbody tr")
    expect(rows).to_have_count(2)
    expect(rows.first).to_contain_text("a part of the checkpoint is damaged")
    assert "tab=attempts" in page.url


def test_progress_is_seen_as_it_happens_in_numbers_files_and_lanes(service, play, open_page):
    play.go(0.4)
    job = submitted(service, "running")
    page = open_page(f"{service.url}/jobs/{job['id']}")
    expect(page.locator(".far b")).to_have_text(re.compile("[34]\\d %"))
    expect(tile(page, "Tensors")).to_have_text(re.compile(rf"^\d+ of {len(play.rows)}$"))
    expect(page.locator(".map .row .amount .done").first).to_have_text("done")
    expect(page.locator(".map .row .amount", has_text="%")).to_have_count(1)
    expect(page.get_by_role("region", name="Workers").get_by_role("listitem")).to_have_count(6)
    play.go(1.0)
    expect(page.locator(".far b")).to_have_text("100 %")
    expect(page.get_by_text("The model is at")).to_be_visible()
    expect(page.locator(".map .row .amount .done")).to_have_count(len(play.files))
    expect(page).to_have_title(re.compile("^Succeeded · step-1"))


def test_the_rates_of_the_past_are_there_for_whoever_comes_later(service, play, open_page):
    play.step_s = 0.06  # 2.4 s in all: progress is told twice a second
    job = submitted(service, "succeeded")
    page = open_page(f"{service.url}/jobs/{job['id']}")
    chart = page.get_by_role("region", name="Rates").get_by_role("img")
    name = "^Rates over time; last: Read .*B/s, Merged .*B/s, Written .*B/s$"
    expect(chart).to_have_accessible_name(re.compile(name))
    expect(chart.locator("canvas")).to_be_visible()
    stages = ["--chart-read", "--chart-merge", "--chart-write"]
    drawn = chart.locator("canvas").evaluate(SEEN, stages)
    assert all(drawn[stage] > 50 for stage in stages), drawn
    legend = page.get_by_role("region", name="Rates").locator(".legend li")
    assert [re.match("[A-Za-z]*", text)[0] for text in legend.all_text_contents()] == ["Read", "Merged", "Written", ""]
    assert page.locator(".lane i").count() >= 6


def test_the_map_tells_of_each_tensor_by_pointer_by_keys_and_in_a_table(service, play, open_page):
    job = submitted(service, "succeeded")
    page = open_page(f"{service.url}/jobs/{job['id']}")
    page.wait_for_selector("#map-tensor[data-ready]", state="attached")
    bar = page.locator(".map canvas").first
    bar.hover(position={"x": 4, "y": 6})
    expect(page.locator(".detail code").first).to_have_text("model.embed_tokens.weight")
    expect(page.locator(".detail")).to_contain_text("32000 × 2048")
    page.locator(".map").focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator(".detail code").first).to_have_text(play.rows[1]["name"])
    page.keyboard.press("End")
    expect(page.locator(".detail code").first).to_have_text("lm_head.weight")
    page.keyboard.press("Home")
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    expect(page.locator(".detail")).to_contain_text(play.rows[3]["sources"][0])
    page.get_by_role("button", name="Table").click()
    table = page.get_by_role("region", name="Tensors")
    expect(table.locator("tbody tr")).to_have_count(min(100, len(play.rows)))
    page.get_by_role("searchbox", name="Search tensors by name").fill("LAYERS.3.self_attn.q")
    expect(table.locator("tbody tr")).to_have_count(1)
    expect(table).to_contain_text("model.layers.3.self_attn.q_proj.weight")
    assert "view=table" in page.url


def test_the_request_can_be_made_again_from_a_shell(service, open_page):
    labels = {"run": "it's one"}
    job = submitted(service, "succeeded", options={"dtype": "bfloat16"}, labels=labels)
    page = open_page(f"{service.url}/jobs/{job['id']}?tab=request")
    command = page.locator("pre", has_text="curl").first.text_content()
    words = shlex.split(command.replace("\\\n", " "))
    assert words[:3] == ["curl", "-s", f"{service.url}/v1/jobs"]
    body = json.loads(words[words.index("-d") + 1])
    assert body == {
        "source": "/runs/qwen/1",
        "destination": DESTINATION,
        "options": {"dtype": "bfloat16"},
        "labels": labels,
    }


def test_the_report_is_downloaded_as_the_service_has_it(service, open_page):
    job = submitted(service, "succeeded")
    page = open_page(f"{service.url}/jobs/{job['id']}")
    with page.expect_download() as started:
        page.get_by_role("button", name="Download the report").click()
    assert started.value.suggested_filename == f"{job['id']}-report.json"
    report = json.loads(Path(started.value.path()).read_text(encoding="utf-8"))
    assert report == service.http.get(f"/v1/jobs/{job['id']}/report").json()


def test_events_plan_and_waiting_are_told(service, stage, open_page):
    for name in "abcd":  # all the places there are
        stage.plays[f"/models/{name}"] = Play(until=0.2)
        service.job_in(service.client.submit("/in", f"/models/{name}")["id"], "running")
    job = submitted(service)
    page = open_page(f"{service.url}/jobs/{job['id']}?tab=events")
    expect(page.get_by_role("region", name="Waiting")).to_contain_text("4 jobs are active")
    for name in "abcd":
        stage.plays[f"/models/{name}"].go(1.0)
    expect(page.get_by_role("tabpanel").locator("tbody tr").first).to_contain_text("job.succeeded")
    expect(page.get_by_role("region", name="Waiting")).to_have_count(0)
    page.get_by_role("tab", name="Events").press("ArrowLeft")
    expect(page.get_by_role("tab", name="Plan")).to_be_focused()
    expect(page.get_by_role("tabpanel")).to_contain_text("rotary frequencies are computed, not stored")


def test_a_running_job_is_cancelled_and_a_finished_one_forgotten(service, play, open_page):
    play.go(0.3)
    job = submitted(service, "running")
    page = open_page(f"{service.url}/jobs/{job['id']}")
    page.get_by_role("button", name="Cancel the job").click()
    expect(page.locator(".job-head .badge")).to_contain_text("Cancelled")
    page.get_by_role("button", name="Forget this job").click()
    page.get_by_role("button", name="Really forget this job").click()
    expect(page.get_by_text("is forgotten")).to_be_visible()
    assert service.http.get(f"/v1/jobs/{job['id']}").status_code == 404
    assert page.url == f"{service.url}/"
