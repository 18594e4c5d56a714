"""What holds for every page: reachable by everyone, in both schemes, on every width, under the real policy."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvicorn
from playwright.sync_api import expect

from service.app import create_app
from service.client import Client
from service.settings import Settings
from tests.browser.conftest import assert_accessible, assert_fits, keep_screenshot
from tests.browser.plays import Play, Stage
from tests.service.conftest import TOKEN, Service, eventually, running
from workers.errors import CorruptFile

pytestmark = pytest.mark.system("chromium")
DAMAGE = CorruptFile(
    "the checksum of a tensor differs from the one in its file",
    hint="Copy the file again from where it was saved, then retry: finished files are kept.",
    file="iter_0004000/__3_1.distcp",
    tensor="model.layers.5.mlp.experts.2.up_proj.weight",
    expected="crc32 9a0b77f1",
    found="crc32 00000000",
)
RUN = {"run": "qwen3-moe", "team": "pretraining"}


@pytest.fixture(scope="module")
def busy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Service, dict[str, str]]]:
    """A service with a job in each state that people look at, and those jobs' ids by state."""
    stage = Stage(
        {
            "/models/qwen3-moe/step-3000": Play(step_s=0.05),
            "/models/qwen3-moe/step-4000": Play(step_s=0.05, until=0.55, failure=DAMAGE),
            "/models/qwen3-moe/step-2000": Play(until=0.1),
            "s3://models/qwen3-moe/step-5000": Play(step_s=0.15, until=0.62),
            "/models/llama-3/step-800": Play(step_s=0.05, until=0.2),
        }
    )
    with pytest.MonkeyPatch.context() as environment:
        environment.delenv("RAY_ADDRESS", raising=False)
        settings = Settings(data_dir=tmp_path_factory.mktemp("busy"), poll_s=0.05, max_concurrent_jobs=2)
    with running(settings, stage) as started:
        ids: dict[str, str] = {}

        def submit(state: str, source: str, destination: str, **labels: str) -> None:
            options = {"dtype": "bfloat16", "max_shard_size": "300MB"}
            ids[state] = started.client.submit(source, destination, options=options, labels={**RUN, **labels})["id"]

        submit("cancelled", "/runs/qwen3-moe/iter_0002000", "/models/qwen3-moe/step-2000")
        started.job_in(ids["cancelled"], "running")
        started.client.cancel(ids["cancelled"])
        submit("succeeded", "/runs/qwen3-moe/iter_0003000", "/models/qwen3-moe/step-3000")
        submit("failed", "/runs/qwen3-moe/iter_0004000", "/models/qwen3-moe/step-4000")
        started.job_in(ids["failed"], "failed")
        submit("running", "/runs/qwen3-moe/iter_0005000", "s3://models/qwen3-moe/step-5000")
        submit("running2", "s3://training/llama-3/step_800", "/models/llama-3/step-800", run="llama-3")
        submit("queued", "s3://training/llama-3/step_900", "/models/llama-3/step-900", run="llama-3")

        def far() -> bool:
            progress = started.client.job(ids["running"]).get("progress") or {}
            return progress.get("bytes_done", 0) > 0.55 * progress.get("bytes_total", 1)

        eventually(far, "the running job is on its way")
        yield started, ids
        for play in stage.plays.values():
            play.go(1.0)


FOCUSED = """() => {
  const at = document.activeElement;
  const outlined = [null, '::after'].some((part) => getComputedStyle(at, part).outlineStyle !== 'none');
  return {href: at.getAttribute('href') ?? '', text: at.textContent, wide: at.getBoundingClientRect().width, outlined};
}"""
VIEWS = {
    "jobs": "/",
    "jobs-failed": "/?show=failed",
    "job-running": "/jobs/{running}",
    "job-failed": "/jobs/{failed}",
    "job-done": "/jobs/{succeeded}?view=table&tab=attempts",
    "job-queued": "/jobs/{queued}?tab=request",
    "new-job": "/new",
}


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("view", VIEWS)
def test_a_page_is_accessible_fits_every_width_and_makes_nothing_complain(busy, open_page, view, scheme):
    service, ids = busy
    page = open_page(service.url + VIEWS[view].format(**ids), scheme=scheme)
    page.wait_for_selector("main h1")
    if view == "new-job":
        page.wait_for_selector("#option-dtype")
    page.wait_for_timeout(300)  # what the page asks for by itself has come
    assert_accessible(page)
    for width in (1440, 768, 375):
        page.set_viewport_size({"width": width, "height": 900})
        page.wait_for_timeout(80)
        assert_fits(page)
        keep_screenshot(page, f"{view}-{width}-{scheme}")
    if scheme == "light":  # on a phone, too; of its colours all were looked at above
        assert_accessible(page)


def test_the_first_page_of_an_empty_service_is_accessible(service, open_page):
    for scheme in ("light", "dark"):
        page = open_page(service.url, scheme=scheme)
        expect(page.get_by_role("heading", name="Convert a checkpoint")).to_be_visible()
        assert_accessible(page)
        for width in (1440, 375):
            page.set_viewport_size({"width": width, "height": 900})
            assert_fits(page)
            keep_screenshot(page, f"empty-{width}-{scheme}")


def test_the_keyboard_alone_leads_from_the_list_into_a_job_and_its_tensors(busy, open_page):
    service, ids = busy
    page = open_page(service.url)
    page.wait_for_selector("tr.job")
    page.keyboard.press("Tab")
    expect(page.get_by_text("Skip to the content")).to_be_focused()
    seen: list[str] = []
    for _ in range(60):
        page.keyboard.press("Tab")
        focused = page.evaluate(FOCUSED)
        assert focused["outlined"], f"{focused['text']!r} does not show that it has the focus"
        assert focused["wide"] > 0
        seen.append(focused["href"])
        if focused["href"] == f"/jobs/{ids['succeeded']}":
            break
    assert seen[-1] == f"/jobs/{ids['succeeded']}"
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", level=1)).to_be_focused()
    page.wait_for_selector("#map-tensor[data-ready]", state="attached")
    page.locator(".map").focus()
    page.keyboard.press("Home")
    first = page.locator("#map-tensor").text_content()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowDown")
    assert page.locator("#map-tensor").text_content() != first
    assert page.locator(".map").get_attribute("aria-activedescendant") == "map-tensor"


def test_nothing_moves_for_whoever_wants_less_motion(busy, open_page):
    service, ids = busy
    page = open_page(f"{service.url}/jobs/{ids['running']}", reduced_motion="reduce")
    page.wait_for_selector(".badge")
    assert page.evaluate("() => document.getAnimations().filter((one) => one.playState === 'running').length") == 0


def test_the_colour_scheme_that_was_chosen_stays(busy, open_page):
    service, _ = busy
    page = open_page(service.url)
    ground = "() => getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(ground)
    page.get_by_role("button", name="Scheme of the system").click()
    page.get_by_role("button", name="Light scheme").click()
    expect(page.get_by_role("button", name="Dark scheme")).to_be_visible()
    dark = page.evaluate(ground)
    assert dark != light
    page.reload()
    expect(page.get_by_role("button", name="Dark scheme")).to_be_visible()
    assert page.evaluate(ground) == dark


def test_an_address_that_is_none_says_so(busy, open_page):
    service, _ = busy
    page = open_page(f"{service.url}/jobs/nothing")
    expect(page.get_by_role("heading", name="There is no such page")).to_be_visible()


def test_a_page_asks_for_the_token_and_keeps_it_in_its_tab(tmp_path, open_page):
    everything = {"allowed_sources": ("/",), "allowed_destinations": ("/",)}
    settings = Settings(data_dir=tmp_path / "data", admin_token=TOKEN, poll_s=0.05, **everything)
    with running(settings, Stage(), TOKEN) as service:
        service.client.submit("/in", "/models/secret")
        open_page.forgiven = lambda told: "401" in told  # what the browser says of every answer of this kind
        page = open_page(service.url)
        field = page.get_by_role("textbox", name="Token")
        field.fill("wrong-0123456789abcdef")
        page.get_by_role("button", name="Sign in").click()
        expect(page.get_by_role("dialog").get_by_text("nobody has this one")).to_be_visible()
        assert_accessible(page)
        field.fill(TOKEN)
        page.get_by_role("button", name="Sign in").click()
        expect(page.get_by_role("link", name="secret")).to_be_visible()
        page.reload()
        expect(page.get_by_role("link", name="secret")).to_be_visible()
        assert page.evaluate("() => Object.keys(localStorage).some((name) => name.includes('token'))") is False
        open_page.close()  # before the service, which it would miss


def test_a_late_refusal_of_what_was_asked_before_the_sign_in_does_not_ask_again(tmp_path, open_page):
    everything = {"allowed_sources": ("/",), "allowed_destinations": ("/",)}
    settings = Settings(data_dir=tmp_path / "data", admin_token=TOKEN, poll_s=0.05, **everything)
    with running(settings, Stage(), TOKEN) as service:
        open_page.forgiven = lambda told: "401" in told
        page = open_page("about:blank")
        held = []
        page.route("**/v1/overview", lambda route: held.append(route), times=1)  # noqa: PLW0108 - Playwright wants a function
        page.goto(service.url)
        page.get_by_label("Token", exact=True).fill(TOKEN)
        page.get_by_role("button", name="Sign in").click()
        question = page.get_by_role("dialog")
        expect(question).to_be_hidden()
        with page.expect_response("**/v1/overview") as refused:
            held[0].fulfill(status=401, json={"title": "A token is needed", "status": 401})
        refused.value.finished()
        page.evaluate("() => new Promise((drawn) => requestAnimationFrame(() => setTimeout(drawn, 50)))")
        expect(question).to_be_hidden(timeout=1)
        open_page.close()


class Restartable:
    """A service that stops and comes back at the same address with the same data."""

    def __init__(self, data: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.data = data

    def start(self) -> None:
        app = create_app(Settings(data_dir=self.data, poll_s=0.05), run_conversion=Stage())
        config = uvicorn.Config(app, port=self.port, log_config=None, access_log=False, timeout_graceful_shutdown=1)
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(target=self.server.run, daemon=True)
        self.thread.start()
        eventually(lambda: self.server.started, "the service has started")

    def stop(self) -> None:
        self.server.should_exit = True
        self.thread.join(15)


def test_a_page_finds_back_to_a_service_that_was_started_again(tmp_path, open_page, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    service = Restartable(tmp_path / "data")
    service.start()
    try:
        with Client(service.url) as client:
            client.submit("/in", "/models/before")
        open_page.forgiven = lambda told: "ERR_" in told  # the browser tells that nobody answered
        page = open_page(service.url)
        expect(page.get_by_role("link", name="before")).to_be_visible()
        service.stop()
        expect(page.get_by_text("Offline")).to_be_visible()
        service.start()
        with Client(service.url) as client:
            client.submit("/in", "/models/after")
        expect(page.get_by_role("link", name="after")).to_be_visible()
        expect(page.get_by_text("Live", exact=True)).to_be_visible()
        expect(page.locator("tr.job")).to_have_count(2)
    finally:
        service.stop()
