"""Workers, watches and settings: what the cluster does, what waits and why, who may do what, and what was done."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from playwright.sync_api import expect

from service.settings import Settings
from tests.browser.conftest import assert_accessible, assert_fits, assert_good_in_every_width
from tests.browser.plays import Stage
from tests.service.conftest import TOKEN, Service, eventually, running

pytestmark = pytest.mark.system("chromium")
CASE = Path(__file__).parents[1] / "cases" / "verl-fsdp" / "llama-gqa-fsdp2-ws2" / "input"
GIB = 1 << 30
JOB = "job_06616fa51ecd04adb3f044afd0"
NODES = [
    {
        "id": f"{number}f3a9c0d17e5b",
        "address": f"10.1.0.{number}",
        "total": {"CPU": 16.0, "GPU": 8.0, "memory": 512.0 * GIB},
        "available": {"CPU": 16.0 - 5 * number, "GPU": 8.0, "memory": (512.0 - 160 * number) * GIB},
        "object_store_bytes": 64 * GIB,
        "object_store_used_bytes": 11 * number * GIB,
    }
    for number in (1, 2)
]
WORKERS = [
    {
        "name": f"merger-{number}",
        "kind": "merger",
        "node": NODES[number % 2]["id"],
        "pid": 4000 + number,
        "doing": []
        if number % 3 == 2
        else [{"job_id": JOB, "attempt": f"{JOB}-1", "file": f"model-{number:05}-of-00012.safetensors"}],
    }
    for number in range(6)
]


@pytest.fixture(scope="module")
def staffed(tmp_path_factory):
    """A service with a token, a cluster of two machines, watches, tokens, webhooks and an audit."""
    folder = tmp_path_factory.mktemp("staffed")
    settings = Settings(
        data_dir=folder / "data",
        poll_s=0.05,
        admin_token=TOKEN,
        allowed_sources=(str(folder),),
        allowed_destinations=("/models",),
        webhook_allow_http=True,
        webhook_allowed_networks="127.0.0.0/8",
        min_watch_interval_s=0.1,
    )
    with pytest.MonkeyPatch.context() as changes:
        changes.delenv("RAY_ADDRESS", raising=False)
        with running(settings, Stage(), TOKEN) as service:
            cluster = service.context.conversions
            changes.setattr(cluster, "describe", lambda: {"nodes": NODES, "items": WORKERS})
            changes.setattr(cluster, "state", lambda: ("ok", "Ray 2.55 at 10.1.0.1:6379"))
            _fill(service, folder)
            yield service, folder


def _fill(service: Service, folder: Path) -> None:
    shutil.copytree(CASE, folder / "runs" / "global_step_100")
    shutil.copytree(CASE, folder / "runs" / "global_step_120")
    next((folder / "runs" / "global_step_120").rglob("model_world_size_2_rank_1.pt")).unlink()
    watch = {"prefix": str(folder / "runs"), "pattern": "global_step_*", "name": "qwen3 run 7", "interval_s": 0.3}
    made = service.http.post("/v1/watches", json={**watch, "template": {"destination": "/models/seen/step-{step}"}})
    assert made.status_code == 201, made.text
    for name, scopes in (("training", ["jobs:read", "jobs:write"]), ("dashboard", ["jobs:read"])):
        body = {"name": name, "scopes": scopes, "max_queued": 200, "expires_in_s": 8_000_000}
        assert service.http.post("/v1/tokens", json=body).status_code == 201
    hook = {"url": "http://127.0.0.1:9/unshard", "events": ["job.succeeded", "job.failed"]}
    assert service.http.post("/v1/webhooks", json=hook).status_code == 201
    path = f"/v1/watches/{made.json()['id']}/items"
    eventually(lambda: len(service.http.get(path).json()["items"]) == 2, "both folders were seen")

    def seen() -> bool:
        one, other = service.http.get(path).json()["items"]
        return one["job_state"] == "succeeded" and "is missing" in (other["error"] or {}).get("message", "")

    eventually(seen, "one became a model, the other says why it waits")
    service.http.patch(f"/v1/watches/{made.json()['id']}", json={"interval_s": 60.0})


@pytest.fixture
def signed_in(staffed, open_page):
    """Open a path with the administrator's token."""
    service, _ = staffed
    open_page.forgiven = lambda told: "401" in told

    def opened(path: str, token: str = TOKEN, **how):
        page = open_page(service.url + path, **how)
        page.get_by_label("Token", exact=True).fill(token)
        page.get_by_role("button", name="Sign in").click()
        page.get_by_role("dialog").wait_for(state="hidden")
        return page

    return opened


VIEWS = {
    "workers": ("/workers", ".actors"),
    "watches": ("/watches", ".watch td"),
    "watch-new": ("/watches?new=1", "#interval"),
    "settings-tokens": ("/settings?tab=tokens", ".tokens"),
    "settings-webhooks": ("/settings?tab=webhooks", ".hook"),
    "settings-audit": ("/settings?tab=audit", ".audit"),
}


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("view", VIEWS)
def test_a_page_for_administrators_is_accessible_in_every_width(signed_in, view, scheme):
    path, ready = VIEWS[view]
    page = signed_in(path, scheme=scheme)
    page.wait_for_selector(ready)
    assert_good_in_every_width(page, view, scheme)


WALKED = ["/checkpoint", "/batches/new", "/watches", "/settings?tab=webhooks"]
FOCUSED = """() => {
  const at = document.activeElement;
  if (at === document.body) return null;
  const outlined = [null, '::after'].some((part) => getComputedStyle(at, part).outlineStyle !== 'none');
  const place = [...document.querySelectorAll('*')].indexOf(at);
  return {name: at.outerHTML.slice(0, 90), place, outlined, wide: at.getBoundingClientRect().width};
}"""
REACHABLE = "a[href], button:not([disabled]), input, select, summary, [tabindex='0']"


def test_the_tab_key_reaches_everything_and_shows_where_it_is(signed_in, staffed):
    page = signed_in(WALKED[0])
    for path in WALKED:
        page.goto(staffed[0].url + path)
        page.wait_for_selector("main h1")
        page.wait_for_timeout(300)
        shown = page.locator(REACHABLE).evaluate_all("all => all.filter((one) => one.checkVisibility()).length")
        seen = set()
        for _ in range(shown + 5):
            page.keyboard.press("Tab")
            focused = page.evaluate(FOCUSED)
            if focused is None:
                break
            assert focused["outlined"], f"{path}: {focused['name']} does not show that it has the focus"
            assert focused["wide"] > 0
            seen.add(focused["place"])
        assert len(seen) >= shown, f"{path}: {len(seen)} of {shown} were reached"


def test_workers_shows_each_machine_with_its_actors_and_their_work(signed_in):
    page = signed_in("/workers")
    machine = page.get_by_label("Machine 10.1.0.1", exact=True)
    expect(machine.locator(".meter")).to_have_count(4)
    expect(machine).to_contain_text("5 of 16")
    expect(machine.locator("tbody tr")).to_have_count(3)
    link = page.get_by_role("link", name="model-00001-of-00012.safetensors")
    assert link.get_attribute("href") == f"/jobs/{JOB}"
    expect(page.locator(".idle")).to_have_count(2)


def test_without_a_cluster_workers_says_how_to_get_one(service, open_page):
    page = open_page(f"{service.url}/workers")
    expect(page.get_by_text("ray start --head")).to_be_visible()
    assert_accessible(page)


def test_a_watch_tells_why_something_waits_and_can_be_paused_and_ended(staffed, signed_in):
    service, _ = staffed
    page = signed_in("/watches")
    watch = page.get_by_label("qwen3 run 7", exact=True)
    expect(watch.locator("tbody")).to_contain_text("model_world_size_2_rank_1.pt is missing")
    expect(watch.locator("tbody")).to_contain_text("global_step_100")
    page.get_by_role("button", name="Pause qwen3 run 7").click()
    expect(watch.locator(".badge").first).to_have_text("Paused")
    page.get_by_role("button", name="Resume qwen3 run 7").click()
    expect(watch.locator(".badge").first).to_have_text("Active")
    page.get_by_role("button", name="Look now at qwen3 run 7").click()
    page.get_by_role("button", name="New watch").click()
    page.get_by_label("Look below").fill(str(staffed[1] / "runs"))
    page.get_by_label("For folders named").fill("none_*")
    page.get_by_label("Each becomes").fill("/models/second/{step}")
    page.get_by_label("Name", exact=True).fill("second")
    page.get_by_role("button", name="Make the watch").click()
    expect(page.get_by_label("second", exact=True)).to_contain_text("Nothing that fits the pattern")
    page.get_by_role("button", name="End the watch second").click()
    page.get_by_role("button", name="Really end it?").click()
    expect(page.get_by_label("second", exact=True)).to_have_count(0)
    assert [one["name"] for one in service.http.get("/v1/watches").json()["items"]] == ["qwen3 run 7"]


def test_a_token_is_shown_once_works_and_ends(staffed, signed_in):
    service, _ = staffed
    page = signed_in("/settings")
    page.get_by_role("button", name="New token").click()
    page.get_by_label("Whose it is").fill("evaluation")
    page.get_by_label("jobs:write").uncheck()
    page.get_by_label("Jobs that wait").fill("5")
    assert_accessible(page)
    page.get_by_role("button", name="Make the token").click()
    text = page.get_by_label("The secret", exact=True).text_content()
    headers = {"Authorization": f"Bearer {text}"}
    told = service.http.get("/v1/tokens/self", headers=headers).json()
    assert (told["name"], told["scopes"], told["max_queued"]) == ("evaluation", ["jobs:read"], 5)
    page.reload()
    expect(page.get_by_text("evaluation")).to_be_visible()
    expect(page.get_by_text(text)).to_have_count(0)
    page.get_by_role("button", name="Revoke evaluation", exact=True).click()
    page.get_by_role("button", name="Really revoke? evaluation").click()
    expect(page.locator("tr.ended")).to_contain_text("revoked")
    assert service.http.get("/v1/tokens/self", headers=headers).status_code == 401
    page.get_by_role("button", name="Audit").click()
    expect(page.locator(".audit tbody tr").filter(has_text="DELETE /v1/tokens")).not_to_have_count(0)
    page.get_by_label("What", exact=True).fill("POST /v1/watches")
    page.get_by_role("button", name="Filter").click()
    expect(page).to_have_url(re.compile("action=POST"))
    expect(page.locator(".audit tbody tr").first).to_contain_text("POST /v1/watches")


def test_a_token_is_revoked_with_its_jobs_or_kept(staffed, signed_in):
    service, _ = staffed
    made = service.http.post("/v1/tokens", json={"name": "leaked", "scopes": ["jobs:write"]}).json()
    page = signed_in("/settings")
    page.set_viewport_size({"width": 375, "height": 800})
    page.get_by_role("button", name="Revoke leaked", exact=True).click()
    expect(page.get_by_role("button", name="Keep it")).to_be_focused()
    assert_fits(page)
    assert_accessible(page)
    page.keyboard.press("Enter")
    expect(page.get_by_role("button", name="Revoke leaked", exact=True)).to_be_focused()
    page.keyboard.press("Enter")
    with page.expect_request(lambda request: request.method == "DELETE") as asked:
        page.get_by_role("button", name="With its jobs: revoke leaked").click()
    assert asked.value.url.endswith(f"/v1/tokens/{made['id']}?cancel_jobs=true")
    expect(page.get_by_text("its jobs are cancelled")).to_be_visible()


def test_a_webhook_is_made_tested_and_its_deliveries_are_told(signed_in):
    page = signed_in("/settings?tab=webhooks")
    page.get_by_role("button", name="New webhook").click()
    page.get_by_label("Where to").fill("http://127.0.0.1:9/second")
    assert_accessible(page)
    page.get_by_role("button", name="Make the webhook").click()
    expect(page.get_by_label("The secret", exact=True)).to_contain_text("whsec_")
    page.get_by_role("button", name="Test http://127.0.0.1:9/second").click()
    expect(page.get_by_text("The test was not delivered")).to_be_visible()
    deliveries = page.get_by_role("region", name="Deliveries to http://127.0.0.1:9/second")
    expect(deliveries.locator("tbody tr")).to_have_count(1)
    deliveries.get_by_role("button", name="webhook.test").first.click()
    expect(deliveries.get_by_label("body of the delivery", exact=True)).to_contain_text("webhook.test")
    page.get_by_role("button", name="New secret for http://127.0.0.1:9/second").click()
    before = page.get_by_label("The secret", exact=True).text_content()
    page.get_by_role("button", name="Really a new secret?").click()
    expect(page.get_by_label("The secret", exact=True)).not_to_have_text(before)
    page.get_by_role("button", name="Forget http://127.0.0.1:9/second").click()
    page.get_by_role("button", name="Really forget it?").click()
    expect(page.get_by_label("http://127.0.0.1:9/second", exact=True)).to_have_count(0)


def test_who_is_no_administrator_is_told_so(staffed, signed_in):
    service, _ = staffed
    body = {"name": "reader", "scopes": ["jobs:read"]}
    token = service.http.post("/v1/tokens", json=body).json()["token"]
    page = signed_in("/settings", token)
    expect(page.get_by_text("Settings are for administrators")).to_be_visible()
    expect(page.get_by_role("button", name="New token")).to_have_count(0)
    assert_accessible(page)
