"""The form for a new job."""

from __future__ import annotations

import json
import re
from urllib.parse import parse_qs, quote, urlsplit

import pytest
from playwright.sync_api import expect

from service.api.overview import DEMO
from tests.browser.conftest import keep_screenshot

pytestmark = pytest.mark.system("chromium")


def test_every_option_of_the_schema_can_be_set_and_is_explained(service, open_page):
    schema = service.http.get("/v1/formats").json()["options"]["properties"]
    page = open_page(f"{service.url}/new")
    page.get_by_text("More options").click()
    for name, option in schema.items():
        field = page.locator(f"#option-{name}")
        expect(field).to_be_visible()
        told = page.locator(f"#option-{name}-text").text_content()
        assert told == option["description"].replace("``", "")
        assert f"option-{name}-text" in field.get_attribute("aria-describedby")
    page.get_by_label("Path or URL").fill("/runs/one")
    page.get_by_label("Where it goes").fill("/models/one")
    page.get_by_label("Data type").select_option("bfloat16")
    page.get_by_label("Overwrite").check()
    page.locator("#option-resume").uncheck()
    page.locator("#option-step").fill("120")
    page.locator("#option-tie_word_embeddings").select_option("no")
    page.get_by_label("Labels").fill("run:one")
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Convert").click()
    page.wait_for_url("**/jobs/job_*")
    job = service.client.job(page.url.rsplit("/", 1)[1].split("?")[0])
    assert job["options"] == {
        "dtype": "bfloat16",
        "overwrite": True,
        "resume": False,
        "step": 120,
        "tie_word_embeddings": False,
    }
    assert job["labels"] == {"run": "one"}
    assert (job["source"], job["destination"]) == ("/runs/one", "/models/one")


def test_the_address_carries_the_whole_form(service, open_page):
    page = open_page(f"{service.url}/new")
    page.get_by_label("Where it goes").fill("/models/one")
    page.get_by_label("Data type").select_option("float16")
    expect(page).to_have_url(re.compile("options="))
    asked = parse_qs(urlsplit(page.url).query)
    assert asked["destination"] == ["/models/one"]
    assert json.loads(asked["options"][0]) == {"dtype": "float16"}
    page.reload()
    expect(page.get_by_label("Where it goes")).to_have_value("/models/one")
    expect(page.get_by_label("Data type")).to_have_value('"float16"')


def test_a_wrong_option_is_pointed_at_where_it_is(service, open_page):
    open_page.forgiven = lambda told: "422" in told  # the browser tells of the answer, too
    options = quote(json.dumps({"max_shard_size": "huge"}))
    page = open_page(f"{service.url}/new?source={quote(str(DEMO))}&destination=/models/one&options={options}")
    expect(page.get_by_text("'huge' is not a size").first).to_be_visible()
    expect(page.get_by_text("Write a number and a unit").first).to_be_visible()
    keep_screenshot(page, "new-job-wrong-option")


def test_a_source_that_is_no_checkpoint_tells_what_was_looked_for(service, open_page, tmp_path):
    open_page.forgiven = lambda told: "422" in told or "424" in told or "404" in told
    page = open_page(f"{service.url}/new")
    page.get_by_label("Path or URL").fill(str(tmp_path))
    page.get_by_role("button", name="Look into it").click()
    alert = page.get_by_role("alert")
    expect(alert).to_be_visible()
    assert alert.locator(".hint").text_content()


def test_a_destination_that_is_taken_is_told_before_anything_is_written(service, open_page, tmp_path):
    open_page.forgiven = lambda told: "409" in told
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "model.safetensors").write_bytes(b"a model of somebody else")
    page = open_page(f"{service.url}/new?source={quote(str(DEMO))}&destination={quote(str(tmp_path / 'taken'))}")
    page.get_by_role("button", name="Show the plan").click()
    expect(page.get_by_role("alert")).to_contain_text("taken")
    assert service.http.get("/v1/jobs").json()["items"] == []
