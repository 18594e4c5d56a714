"""One browser for all tests of this package; a context for each page, with the policy that the service sends."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from service.settings import Settings
from tests.browser.plays import Stage
from tests.service.conftest import Service, running

FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
AXE = Path(__file__).parent / "vendor" / "axe.min.js"
ARTIFACTS = Path(__file__).parents[2] / ".artifacts"
WAIT_MS = 15_000
expect.set_options(timeout=WAIT_MS)


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    """Chromium; no longer than this package, since Playwright keeps an event loop in this thread."""
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=FLAGS)
        yield started
        started.close()


class Opener:
    """Opens pages, and has collected what the browser complained of."""

    def __init__(self, browser: Browser) -> None:
        self._browser = browser
        self._contexts: list[Any] = []
        self.complaints: list[str] = []
        self.forgiven: Callable[[str], bool] = lambda _: False

    def __call__(self, url: str, *, width: int = 1440, scheme: str = "light", **options: Any) -> Page:
        context = self._browser.new_context(
            viewport={"width": width, "height": 900}, color_scheme=scheme, locale="en-GB", **options
        )
        self._contexts.append(context)
        context.set_default_timeout(WAIT_MS)
        page = context.new_page()
        page.on("console", lambda told: self._hear(told.type, told.text))
        page.on("pageerror", lambda error: self._hear("error", str(error)))
        page.goto(url)
        return page

    def _hear(self, kind: str, text: str) -> None:
        if kind in ("error", "warning") and not self.forgiven(text):
            self.complaints.append(text)

    def close(self) -> None:
        for context in self._contexts:
            context.close()


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Opener]:
    """Open an address in a context of its own. The test fails when the browser complains of anything."""
    opener = Opener(browser)
    yield opener
    opener.close()
    assert opener.complaints == []


@pytest.fixture
def stage() -> Stage:
    return Stage()


@pytest.fixture
def service(tmp_path: Path, stage: Stage, monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    """A service of this test's own, whose jobs follow the plays of ``stage``."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with running(Settings(data_dir=tmp_path / "data", poll_s=0.05, max_concurrent_jobs=4), stage) as started:
        yield started
        for play in stage.plays.values():
            play.go(1.0)


def assert_accessible(page: Page) -> None:
    """No violation of axe's rules: WCAG 2.2 A and AA, and best practices."""
    page.evaluate(AXE.read_text(encoding="utf-8"))
    found = page.evaluate("() => axe.run(document, {resultTypes: ['violations']}).then((told) => told.violations)")
    told = [f"{rule['id']}: {rule['help']}: {[node['target'] for node in rule['nodes']][:5]}" for rule in found]
    assert told == []


def assert_fits(page: Page) -> None:
    """Nothing is wider than the window."""
    wide = page.evaluate("() => document.documentElement.scrollWidth - document.documentElement.clientWidth")
    assert wide <= 0, f"{page.url} scrolls sideways by {wide} pixels"


def keep_screenshot(page: Page, name: str, *, full: bool = False) -> None:
    """Keep what the page looks like for people to see."""
    folder = Path(os.environ.get("UNSHARD_SCREENSHOTS", ARTIFACTS / "screenshots"))
    folder.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=folder / f"{name}.png", animations="disabled", full_page=full)


SOON_MS = 400
"""After which a page has taken what it was given."""


class Held:
    """Requests that were answered by the service, and whose answers the page does not have yet."""

    def __init__(self, page, pattern, times=1) -> None:
        self._page = page
        self._answers = []
        page.route(pattern, lambda route: self._answers.append((route, route.fetch())), times=times)

    def wait(self) -> None:
        for _ in range(200):
            if self._answers:
                return
            self._page.wait_for_timeout(25)
        pytest.fail("the page has not asked")

    def release(self) -> None:
        self._page.wait_for_timeout(SOON_MS)  # what was told meanwhile has been taken
        for route, answer in self._answers:
            route.fulfill(response=answer)
        self._answers = []
        self._page.wait_for_timeout(SOON_MS)


def assert_good_in_every_width(page: Page, name: str, scheme: str) -> None:
    """Nothing is too wide, from a desk's screen to a phone's, and nothing breaks axe's rules; keeps the pictures."""
    for width in (1440, 768, 375) if scheme == "light" else (1440, 375):
        page.set_viewport_size({"width": width, "height": 900})
        page.wait_for_timeout(80)
        assert_fits(page)
        keep_screenshot(page, f"{name}-{width}-{scheme}", full=True)
    assert_accessible(page)
