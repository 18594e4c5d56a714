"""Viewers who do not wait: who leave, go back, press twice, type on, or only have the keyboard or a voice."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import expect

from service.settings import Settings
from tests.browser.conftest import SOON_MS, Held
from tests.browser.plays import Play, Stage
from tests.service.conftest import TOKEN, eventually, running

pytestmark = pytest.mark.system("chromium")
HEAR = """() => {
  const voice = document.querySelector('[aria-live]');
  window.said = [];
  const hear = () => window.said.push(voice.textContent);
  new MutationObserver(hear).observe(voice, {childList: true, characterData: true, subtree: true});
}"""


def test_a_search_that_was_not_waited_for_does_not_follow_to_the_next_page(service, open_page):
    job = service.client.submit("/in", "/models/a")
    service.job_in(job["id"], "succeeded")
    page = open_page(service.url)
    row = page.get_by_role("link", name="a", exact=True)
    expect(row).to_be_visible()
    page.evaluate(
        """() => {
          const field = document.querySelector('input[type=search]');
          field.value = 'models';
          field.dispatchEvent(new Event('input', {bubbles: true}));
          document.querySelector('tr.job a.name').click();
        }"""
    )
    expect(page.get_by_role("heading", name="a", level=1)).to_be_visible()
    page.wait_for_timeout(SOON_MS)
    assert page.url == f"{service.url}/jobs/{job['id']}"


def test_the_search_field_shows_what_is_searched_for_after_a_link_and_the_way_back(service, open_page):
    for name in ("a", "b"):
        service.job_in(service.client.submit("/in", f"/models/{name}")["id"], "succeeded")
    page = open_page(service.url)
    field = page.get_by_role("searchbox")
    expect(page.locator("tr.job")).to_have_count(2)
    field.fill("models/a")
    expect(page.locator("tr.job")).to_have_count(1)
    page.get_by_role("button", name=re.compile("^Failed")).click()
    page.get_by_role("button", name="Show all jobs").click()
    expect(page.locator("tr.job")).to_have_count(2)
    expect(field).to_have_value("")
    page.go_back()
    expect(field).to_have_value("models/a")
    expect(page.get_by_text("No job fits")).to_be_visible()


def test_a_form_is_filled_by_the_way_back_and_emptied_by_its_link(service, open_page):
    page = open_page(f"{service.url}/new?destination=%2Fmodels%2Fx&options=%7B%22dtype%22%3A%22bfloat16%22%7D")
    field = page.get_by_label("Where it goes")
    expect(field).to_have_value("/models/x")
    page.get_by_role("link", name="New job", exact=True).click()
    expect(field).to_have_value("")
    expect(page).to_have_url(f"{service.url}/new")
    page.go_back()
    expect(field).to_have_value("/models/x")
    expect(page.locator("#option-dtype")).to_have_value('"bfloat16"')


def test_a_refused_token_is_not_shown_again_and_again(tmp_path, open_page, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    everything = {"allowed_sources": ("/",), "allowed_destinations": ("/",)}
    settings = Settings(
        data_dir=tmp_path / "data", admin_token=TOKEN, poll_s=0.05, failed_logins_per_minute=8, **everything
    )
    with running(settings, Stage(), TOKEN) as service:
        made = [
            service.http.post("/v1/tokens", json={"name": name, "scopes": ["jobs:read"]}).json() for name in ("a", "b")
        ]
        open_page.forgiven = lambda told: "401" in told
        page = open_page(service.url)
        question = page.get_by_role("dialog")
        page.get_by_label("Token", exact=True).fill("a-wrong-one")
        page.get_by_role("button", name="Sign in").click()
        expect(question.get_by_text("nobody has this one")).to_be_visible()
        page.get_by_label("Token", exact=True).fill(made[0]["token"])
        page.get_by_role("button", name="Sign in").click()
        expect(question).to_be_hidden()
        page.get_by_role("link", name="Workers").click()
        expect(page.get_by_text("The cluster works")).to_be_visible()
        service.http.delete(f"/v1/tokens/{made[0]['id']}")
        expect(question).to_be_visible()
        asked = []
        page.on("request", lambda request: asked.append(request.url))
        page.wait_for_timeout(4500)
        assert asked == []
        page.get_by_label("Token", exact=True).fill(made[1]["token"])
        page.get_by_role("button", name="Sign in").click()
        expect(question).to_be_hidden()
        expect(page.get_by_text("The cluster works")).to_be_visible()
        open_page.close()


def test_a_button_pressed_twice_asks_once_and_a_double_click_confirms_nothing(service, stage, open_page):
    stage.plays["/models/a"] = Play(until=0.1)
    job = service.client.submit("/in", "/models/a")
    service.job_in(job["id"], "running")
    page = open_page(f"{service.url}/jobs/{job['id']}")
    service.client.cancel(job["id"])
    retry = page.get_by_role("button", name="Retry the job")
    expect(retry).to_be_visible()
    retry.dblclick()
    expect(page.locator(".badge").first).not_to_have_text(re.compile("Cancelled"))
    page.wait_for_timeout(SOON_MS)
    expect(page.locator(".notice")).to_have_count(0)
    service.client.cancel(job["id"])
    forget = page.get_by_role("button", name="Forget this job")
    expect(forget).to_be_visible()
    place = forget.bounding_box()
    page.evaluate(  # the second half of a double click, on what has come there
        """async () => {
          document.querySelector('[aria-label="Forget this job"]').click();
          await new Promise((drawn) => setTimeout(drawn, 50));
          const sure = document.querySelector('[aria-label="Really forget this job"]');
          sure.dispatchEvent(new MouseEvent('click', {bubbles: true, detail: 2}));
        }"""
    )
    assert place
    page.wait_for_timeout(SOON_MS)
    assert service.client.job(job["id"])["state"] == "cancelled"


def test_the_keyboard_goes_on_beside_what_was_taken_away(service, stage, open_page):
    for name in ("a", "b"):
        stage.plays[f"/models/{name}"] = Play(until=0.1)
        service.job_in(service.client.submit("/in", f"/models/{name}")["id"], "running")
    page = open_page(f"{service.url}/?show=active")
    page.get_by_role("button", name="Cancel b", exact=True).focus()
    page.keyboard.press("Enter")
    expect(page.locator("tr.job")).to_have_count(1)
    page.wait_for_timeout(SOON_MS)
    assert page.evaluate(
        "() => document.activeElement.closest('main') !== null && document.activeElement !== document.body"
    )
    [job] = [job for job in service.client.jobs() if job["state"] == "cancelled"]
    page.goto(f"{service.url}/jobs/{job['id']}")
    page.get_by_role("button", name="Forget this job").focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("button", name="Keep it")).to_be_focused()
    page.keyboard.press("Escape")
    expect(page.get_by_role("button", name="Forget this job")).to_be_focused()


def test_a_form_whose_answer_comes_after_its_viewer_left_leads_nowhere(service, open_page, tmp_path):
    page = open_page(f"{service.url}/new?destination=%2Fmodels%2Fx")
    page.get_by_label("Path or URL").fill(str(tmp_path))
    held = Held(page, re.compile(r"/v1/jobs$"))
    page.get_by_role("button", name="Convert").click()
    held.wait()
    page.get_by_role("link", name="Batches").click()
    expect(page.get_by_role("heading", name="Batches")).to_be_visible()
    held.release()
    assert page.url == f"{service.url}/batches"


def test_many_changes_at_once_are_told_as_one(service, open_page):
    page = open_page(service.url)
    page.evaluate(HEAR)
    items = [{"source": "/in", "destination": f"/models/{number}"} for number in range(20)]
    batch = service.client.create("batches", {"items": items})
    eventually(lambda: service.client.batch(batch["id"])["state"] == "completed", "its end")
    page.wait_for_timeout(2500)
    said = page.evaluate("() => window.said")
    assert 0 < len(said) < 8, said
    assert any(re.fullmatch(r"\d+ jobs changed: .*\d+ succeeded.*", text) for text in said), said


def test_the_way_back_leads_to_where_the_list_was_left(service, open_page):
    items = [{"source": "/in", "destination": f"/models/{number}"} for number in range(60)]
    batch = service.client.create("batches", {"items": items})
    eventually(lambda: service.client.batch(batch["id"])["state"] == "completed", "its end")
    page = open_page(service.url)
    expect(page.locator("tr.job")).to_have_count(60)
    page.get_by_role("link", name="5", exact=True).scroll_into_view_if_needed()
    left_at = page.evaluate("() => scrollY")
    assert left_at > 500
    page.get_by_role("link", name="5", exact=True).click()
    expect(page.get_by_role("heading", level=1, name="5")).to_be_visible()
    page.go_back()
    expect(page.locator("tr.job")).to_have_count(60)
    page.wait_for_function(f"() => Math.abs(scrollY - {left_at}) < 5")
