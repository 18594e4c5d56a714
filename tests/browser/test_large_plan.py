"""A plan of 40,000 tensors: what the page needs of time and memory, measured."""

from __future__ import annotations

import json
import re

import pytest
from playwright.sync_api import expect

from tests.browser.conftest import ARTIFACTS, keep_screenshot
from tests.browser.plays import Play

pytestmark = pytest.mark.system("chromium")
DESTINATION = "/models/large"
TENSORS = 40_000
MOST_MS = 100.0
MOST_HEAP_BYTES = 100_000_000
WATCH = """() => {
  window.latencies = [];
  new PerformanceObserver((list) => {
    for (const entry of list.getEntries()) window.latencies.push([entry.name, entry.processingEnd - entry.startTime]);
  }).observe({type: 'event', durationThreshold: 16});
}"""


def test_a_page_of_forty_thousand_tensors_answers_at_once_and_stays_small(service, stage, open_page):
    stage.plays[DESTINATION] = play = Play(layers=94, experts=141, file_bytes=4_000_000_000, until=0.5)
    assert len(play.rows) >= TENSORS
    job = service.client.submit("/in", DESTINATION)
    page = open_page(f"{service.url}/jobs/{job['id']}")
    page.wait_for_selector("#map-tensor[data-ready]", state="attached", timeout=60_000)
    page.evaluate(WATCH)
    page.locator(".map").focus()
    keys = ["End", "Home", *["ArrowRight", "ArrowDown", "PageDown", "ArrowUp"] * 6]
    took = [page.evaluate(PRESS, key) for key in keys]
    bar = page.locator(".map canvas").first
    for x in range(40, 600, 40):
        bar.hover(position={"x": x, "y": 5}, force=True)
    play.go(0.9)
    expect(page.locator(".far b")).to_have_text(re.compile("[89]\\d %"), timeout=15_000)
    took += [page.evaluate(PRESS, "ArrowLeft") for _ in range(6)]  # while news of progress come
    keep_screenshot(page, "job-40000-tensors")
    late = page.evaluate("() => window.latencies")
    client = page.context.new_cdp_session(page)
    client.send("HeapProfiler.collectGarbage")
    client.send("Performance.enable")
    metrics = {row["name"]: row["value"] for row in client.send("Performance.getMetrics")["metrics"]}
    heap = metrics["JSHeapUsedSize"]
    measured = {
        "tensors": len(play.rows),
        "files": len(play.files),
        "slowest_key_ms": round(max(took), 1),
        "median_key_ms": round(sorted(took)[len(took) // 2], 1),
        "slowest_event_ms": round(max((ms for _, ms in late), default=0.0), 1),
        "heap_bytes": int(heap),
    }
    ARTIFACTS.mkdir(exist_ok=True)
    (ARTIFACTS / "dashboard.json").write_text(json.dumps(measured, indent=1))
    # The slowest is recorded only: what else this machine did at that moment is in it.
    assert measured["median_key_ms"] < MOST_MS, measured
    assert heap < MOST_HEAP_BYTES, measured


PRESS = """(key) => {
  // From the key to what it draws: the work of the handler, of Preact and of the canvas, and the layout after it.
  const box = document.querySelector('.map');
  const began = performance.now();
  box.dispatchEvent(new KeyboardEvent('keydown', {key, bubbles: true, cancelable: true}));
  return new Promise((resolve) => requestAnimationFrame(() => setTimeout(() => {
    document.body.getBoundingClientRect();
    resolve(performance.now() - began);
  })));
}"""
