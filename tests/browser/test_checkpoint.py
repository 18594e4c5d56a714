"""The page of a checkpoint: what is in it, who holds what, what is missing, and how two differ."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from urllib.parse import parse_qs, quote, urlsplit

import pytest
from playwright.sync_api import expect
from safetensors.torch import load_file, save_file

from service.settings import Settings
from tests.browser.checkpoints import write_large, write_run
from tests.browser.conftest import ARTIFACTS, assert_accessible, assert_good_in_every_width, keep_screenshot
from tests.browser.plays import Stage
from tests.service.conftest import running
from workers.convert import convert

pytestmark = pytest.mark.system("chromium")
CASE = Path(__file__).parents[1] / "cases" / "verl-fsdp" / "llama-gqa-fsdp2-ws2" / "input"
TENSOR = "model.layers.2.mlp.gate_proj.weight"
MOST_MS = 100.0
MOST_HEAP_BYTES = 100_000_000


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """A service, and a folder with checkpoints."""
    folder = tmp_path_factory.mktemp("checkpoints")
    write_run(folder / "step_100")
    write_run(folder / "step_120", lost=6)
    convert(str(CASE), str(folder / "model-a"))
    shutil.copytree(folder / "model-a", folder / "model-b")
    weights = load_file(folder / "model-b" / "model.safetensors")
    weights["model.embed_tokens.weight"][1, 2] += 0.5
    weights["model.layers.0.self_attn.q_proj.weight"] *= 1.01
    save_file(weights, folder / "model-b" / "model.safetensors", metadata={"format": "pt"})
    with pytest.MonkeyPatch.context() as environment:
        environment.delenv("RAY_ADDRESS", raising=False)
        settings = Settings(data_dir=folder / "data", poll_s=0.05)
    with running(settings, Stage()) as started:
        yield started, folder


def address(here, name: str, **more: str) -> str:
    service, folder = here
    asked = "".join(f"&{key}={quote(value)}" for key, value in more.items())
    return f"{service.url}/checkpoint?source={quote(str(folder / name))}{asked}"


VIEWS = {
    "checkpoint": ("step_100", {"tensor": TENSOR}),
    "checkpoint-incomplete": ("step_120", {"tensor": TENSOR}),
    "checkpoint-map": ("step_100", {"view": "map"}),
    "checkpoint-files": ("step_100", {"view": "files"}),
    "checkpoint-compare": ("model-a", {"view": "compare", "with": "model-b"}),
}


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("view", VIEWS)
def test_a_checkpoint_is_accessible_in_every_view_and_width(here, open_page, view, scheme):
    name, more = VIEWS[view]
    if "with" in more:
        more = {**more, "with": str(here[1] / more["with"])}
    page = open_page(address(here, name, **more), scheme=scheme)
    ready = {"tensor": ".picture", "map": ".treemap button", "files": ".files", "compare": ".comparison"}
    page.wait_for_selector(ready[more.get("view", "tensor")])
    expect(page.locator(".skeleton")).to_have_count(0)
    assert_good_in_every_width(page, view, scheme)


def test_without_a_source_the_page_tells_the_first_command_and_has_a_demo(here, open_page):
    service, _ = here
    page = open_page(f"{service.url}/checkpoint")
    expect(page.get_by_text("unshard inspect /path/to/checkpoint")).to_be_visible()
    assert_accessible(page)
    keep_screenshot(page, "checkpoint-empty")
    page.get_by_role("link", name="Look into the demo checkpoint").click()
    expect(page.get_by_text("Qwen3MoeForCausalLM")).to_be_visible()


def test_the_mesh_and_the_picture_show_the_pieces_that_the_api_tells(here, open_page):
    service, folder = here
    told = service.http.post("/v1/inspect", json={"source": str(folder / "step_100"), "tensor": TENSOR}).json()
    pieces = {piece["rank"]: piece for piece in told["tensor"]["pieces"]}
    assert len(pieces) == 8
    page = open_page(address(here, "step_100", tensor=TENSOR))
    cells = page.locator(".mesh .cell")
    expect(cells).to_have_count(8)
    assert page.locator(".mesh").evaluate("box => getComputedStyle(box).gridTemplateColumns.split(' ').length") == 4
    expect(page.locator(".picture .piece")).to_have_count(8)
    expect(page.locator(".picture .uncovered")).to_have_count(0)
    page.locator(".mesh").focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowRight")
    facts = page.locator(".cell-facts")
    expect(facts).to_contain_text("Rank 5")
    expect(facts).to_contain_text(pieces[5]["file"])
    expect(facts).to_contain_text(f"{pieces[5]['offset']:,} – {pieces[5]['offset'] + pieces[5]['length']:,}")
    spelled = ", ".join(
        f"{start}:{start + length}" for start, length in zip(pieces[5]["offsets"], pieces[5]["sizes"], strict=True)
    )
    expect(facts).to_contain_text(f"[{spelled}]")
    page.get_by_text("Table of 8 pieces").click()
    expect(page.locator(".pieces tbody tr")).to_have_count(8)


def test_a_missing_rank_is_red_and_what_to_do_is_told(here, open_page):
    page = open_page(address(here, "step_120", tensor=TENSOR))
    expect(page.get_by_text("model_world_size_8_rank_6.pt is missing")).to_be_visible()
    expect(page.get_by_text("copy them together")).to_be_visible()
    expect(page.locator(".mesh .cell.lost")).to_have_count(1)
    expect(page.locator(".mesh .cell.lost")).to_have_text("6")
    expect(page.locator(".picture .uncovered")).to_have_count(1)
    expect(page.locator(".not-whole")).to_contain_text("of 12,288 (13 %) are in no file")
    expect(page.get_by_role("link", name="Convert")).to_have_count(0)


def test_a_source_that_is_none_tells_what_was_looked_for(here, open_page):
    open_page.forgiven = lambda told: "422" in told
    page = open_page(address(here, "nothing"))
    expect(page.get_by_role("alert")).to_contain_text("does not exist")
    expect(page.locator(".refused")).to_contain_text("Expected")
    assert_accessible(page)


def test_the_tree_is_walked_by_keyboard_and_the_address_keeps_what_is_chosen(here, open_page):
    page = open_page(address(here, "step_100"))
    tree = page.get_by_role("tree")
    tree.focus()
    for key in ("Home", "ArrowLeft", "ArrowRight", "ArrowDown"):
        page.keyboard.press(key)
    active = tree.get_attribute("aria-activedescendant")
    assert page.locator(f"#{active}").get_attribute("role") == "treeitem"
    page.get_by_label("Search in names").fill("layers.3.self_attn.q")
    expect(page.get_by_role("treeitem")).to_have_count(1)
    tree.focus()
    page.keyboard.press("Enter")
    name = "model.layers.3.self_attn.q_proj.weight"
    expect(page.get_by_role("heading", name=name)).to_be_visible()
    page.wait_for_function("() => location.search.includes('q_proj.weight')")
    assert parse_qs(urlsplit(page.url).query)["tensor"] == [name]
    page.reload()
    expect(page.get_by_role("heading", name=name)).to_be_visible()
    expect(page.locator(".picture")).to_be_visible()


def test_the_treemap_goes_into_a_module_and_ends_at_a_tensor(here, open_page):
    page = open_page(address(here, "step_100", view="map"))
    page.get_by_role("button", name="model.layers.0:").press("Enter")  # other boxes lie upon its middle
    expect(page.locator(".treemap-view .trail [aria-current]")).to_have_text("0")
    page.get_by_role("button", name="model.layers.0.mlp.gate_proj.weight").press("Enter")
    expect(page.get_by_role("heading", name="model.layers.0.mlp.gate_proj.weight")).to_be_visible()


def test_two_models_are_compared_and_the_largest_difference_comes_first(here, open_page):
    page = open_page(address(here, "model-a", view="compare"))
    page.get_by_label("Compare with").fill(str(here[1] / "model-b"))
    page.get_by_role("button", name="Compare").last.click()
    expect(page.locator(".comparison .verdict")).to_contain_text("They differ")
    rows = page.locator(".comparison tbody tr")
    expect(rows).to_have_count(2)
    expect(rows.first).to_contain_text("model.embed_tokens.weight")
    expect(rows.first).to_contain_text("0.5")
    expect(rows.first).to_contain_text("[1, 2]")
    page.get_by_label("Tolerance").fill("1")
    page.keyboard.press("Enter")
    expect(page.locator(".comparison .verdict")).to_contain_text("They are equal")


def test_a_comparison_of_a_part_says_that_there_may_be_more(here, open_page):
    def stopped(route):
        told = route.fetch().json()
        reason = "the time of a comparison was over after 120 s (UNSHARD_COMPARE_TIMEOUT_S)"
        route.fulfill(json={**told, "compared": "part", "reason": reason, "compared_bytes": told["bytes"] // 2})

    page = open_page(address(here, "model-a", view="compare"))
    page.route("**/v1/compare", stopped)
    page.get_by_label("Compare with").fill(str(here[1] / "model-b"))
    page.get_by_role("button", name="Compare").last.click()
    verdict = page.locator(".comparison .verdict")
    expect(verdict).to_contain_text("They differ")
    expect(verdict).to_contain_text("only a part of the values was compared")
    expect(page.get_by_text("Not all values: the time of a comparison was over after 120 s")).to_be_visible()
    expect(page.locator(".comparison .tiles > div", has_text="Other values").locator("dd")).to_have_text("2 so far")
    expect(page.get_by_role("heading", name="2 tensors with other values, so far")).to_be_visible()


WATCH = """() => {
  window.latencies = [];
  new PerformanceObserver((list) => {
    for (const entry of list.getEntries()) window.latencies.push(entry.processingEnd - entry.startTime);
  }).observe({type: 'event', durationThreshold: 16});
}"""
PRESS = """(key) => {
  const box = document.querySelector('.tree');
  const began = performance.now();
  box.dispatchEvent(new KeyboardEvent('keydown', {key, bubbles: true, cancelable: true}));
  return new Promise((resolve) => requestAnimationFrame(() => setTimeout(() => {
    document.body.getBoundingClientRect();
    resolve(performance.now() - began);
  })));
}"""
TYPE = """(text) => {
  const field = document.querySelector('.tree-side input');
  const began = performance.now();
  field.value = text;
  field.dispatchEvent(new Event('input', {bubbles: true}));
  return new Promise((resolve) => requestAnimationFrame(() => setTimeout(() => {
    document.body.getBoundingClientRect();
    resolve(performance.now() - began);
  })));
}"""


def test_a_checkpoint_of_forty_thousand_tensors_answers_at_once_and_stays_small(here, open_page):
    tensors = write_large(here[1] / "large")
    assert tensors >= 40_000
    page = open_page(address(here, "large"))
    page.wait_for_selector("[role=treeitem]")
    page.evaluate(WATCH)
    took = [page.evaluate(PRESS, key) for key in ("End", "Home", "ArrowRight", "ArrowDown", "ArrowRight", "PageDown")]
    took += [page.evaluate(PRESS, key) for key in ["ArrowRight", "ArrowDown", "ArrowDown", "PageUp"] * 6]
    took += [page.evaluate(TYPE, "experts.7"[: end + 1]) for end in range(9)]
    took += [page.evaluate(PRESS, key) for key in ("End", "PageUp", "Home")]
    took.append(page.evaluate(TYPE, ""))
    keep_screenshot(page, "checkpoint-40000-tensors")
    page.get_by_role("button", name="Bytes by module").click()
    page.wait_for_selector(".treemap button")
    page.get_by_role("button", name="model.layers:").press("Enter")
    page.wait_for_timeout(300)
    keep_screenshot(page, "checkpoint-40000-map")
    events = page.evaluate("() => window.latencies")
    client = page.context.new_cdp_session(page)
    client.send("HeapProfiler.collectGarbage")
    client.send("Performance.enable")
    metrics = {row["name"]: row["value"] for row in client.send("Performance.getMetrics")["metrics"]}
    measured = {
        "tensors": tensors,
        "slowest_interaction_ms": round(max(took), 1),
        "median_interaction_ms": round(sorted(took)[len(took) // 2], 1),
        "slowest_event_ms": round(max(events, default=0.0), 1),
        "heap_bytes": int(metrics["JSHeapUsedSize"]),
    }
    ARTIFACTS.mkdir(exist_ok=True)
    (ARTIFACTS / "dashboard-checkpoint.json").write_text(json.dumps(measured, indent=1))
    assert max([*took, *events]) < MOST_MS, measured
    assert metrics["JSHeapUsedSize"] < MOST_HEAP_BYTES, measured
