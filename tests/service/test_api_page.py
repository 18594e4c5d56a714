"""``docs/api.md`` against the API: every request of the page exists, and every answer has the fields that it shows."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import jsonschema
import pytest

from service.app import create_app
from service.batches.discovery import MOST_FOUND
from service.schemas import MOST_LABELS
from service.settings import Settings
from service.watches.store import MOST_PER_OWNER as MOST_WATCHES
from service.webhooks.outbox import EVENT_TYPES
from service.webhooks.store import MOST_PER_OWNER as MOST_WEBHOOKS
from tests.service.conftest import FakeConverter

PAGE = (Path(__file__).parents[2] / "docs" / "api.md").read_text()
BLOCK = re.compile(r"```http\n(?P<request>.*?)```\n\n```json\n(?P<answer>.*?)```", re.DOTALL)
SETTING = re.compile(r"`(UNSHARD_[A-Z_]+|RAY_ADDRESS)`")
NOT_OF_SETTINGS = {"UNSHARD_STORAGE_PROFILES", "UNSHARD_RAY_ADDRESS"}


@dataclass(frozen=True)
class Shown:
    """A request of the page and its answer."""

    method: str
    target: str
    body: Any
    answer: dict[str, Any]

    def __str__(self) -> str:
        return f"{self.method} {self.target}"


def shown() -> list[Shown]:
    found = []
    for match in BLOCK.finditer(PAGE):
        first, _, rest = match["request"].partition("\n")
        method, target = first.split(" ", 1)
        found.append(Shown(method, target, json.loads(rest) if rest.strip() else None, json.loads(match["answer"])))
    return found


@pytest.fixture(scope="module")
def description(tmp_path_factory):
    """The OpenAPI description, in which no field is required (the page leaves out empty ones) and none is unknown."""
    app = create_app(Settings(data_dir=tmp_path_factory.mktemp("page")), run_conversion=FakeConverter())
    return strict(json.loads(json.dumps(app.openapi())))


def strict(schema: Any) -> Any:
    if isinstance(schema, list):
        return [strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {name: strict(value) for name, value in schema.items() if not (name == "required" and value != bool(value))}
    if "properties" in kept and "type" in kept and "additionalProperties" not in kept:
        kept["additionalProperties"] = False
    return kept


def operation(description: Any, request: Shown) -> tuple[str, Any]:
    """The path of a request as the description spells it, and what it says of it."""
    path = urlsplit(request.target).path
    for template, methods in description["paths"].items():
        pattern = "[^/:]+".join(map(re.escape, re.split(r"\{\w+\}", template)))
        if request.method.lower() in methods and re.fullmatch(pattern, path):
            return template, methods[request.method.lower()]
    return pytest.fail(f"nothing answers {request}")


def fits(description: Any, schema: Any, value: Any) -> bool:
    return jsonschema.Draft202012Validator({**description, **schema}).is_valid(value)


@pytest.mark.parametrize("request_", shown(), ids=str)
def test_each_request_of_the_page_has_the_answer_that_the_page_shows(description, request_):
    _, told = operation(description, request_)
    is_problem = str(request_.answer.get("type", "")).startswith("/problems/")
    if request_.body is not None:
        body = told["requestBody"]["content"]["application/json"]["schema"]
        assert fits(description, body, request_.body) or is_problem
    kind = "application/problem+json" if is_problem else "application/json"
    answers = [each["content"][kind] for each in told["responses"].values() if kind in each.get("content", {})]
    assert any(fits(description, answer["schema"], request_.answer) for answer in answers)


def test_every_path_of_the_api_is_on_the_page(description):
    requests = {(each.method, operation(description, each)[0]) for each in shown()}
    named = set(re.findall(r"`(?:(GET|POST|PATCH|DELETE) )(/[^ `?]+)", PAGE)) | {("POST", "/v1/jobs")}
    wanted = {(method.upper(), path) for path, methods in description["paths"].items() for method in methods}
    assert wanted - requests - named == set()


def test_every_setting_is_on_the_page():
    on_page = set(SETTING.findall(PAGE[PAGE.index("## Settings") :]))
    settings = {f"UNSHARD_{name.upper()}" for name in Settings.model_fields}
    assert settings - on_page - NOT_OF_SETTINGS == set()
    assert on_page - settings - NOT_OF_SETTINGS - {"RAY_ADDRESS"} == set()


def test_the_page_lists_the_events_that_webhooks_may_hear():
    listed = re.search(r"this once\. Events: (.*?); `\*` stands for all", PAGE, re.DOTALL)[1]
    assert sorted(re.findall("`(.*?)`", listed)) == sorted(EVENT_TYPES)


def test_the_page_tells_how_many_there_may_be(description):
    for limit in (
        f"up to {MOST_WATCHES} watches",
        f"up to {MOST_WEBHOOKS} webhooks",
        f"`labels` (up to {MOST_LABELS})",
        f"`items` (up to {MOST_FOUND:,}",
    ):
        assert limit in PAGE
    tensors = "/v1/jobs/{job_id}/tensors"
    most = dict(limits_of_lists(description))
    assert most == dict.fromkeys(most, (50, 200)) | {tensors: (50, 5000)}
    assert "`limit` (50; up to 200, of tensors up to 5000)" in PAGE


def limits_of_lists(description: Any) -> Iterator[tuple[str, tuple[int, int]]]:
    """The path of each list that comes in pages, with how many it has on a page: by default, and at most."""
    for path, methods in description["paths"].items():
        for parameter in methods.get("get", {}).get("parameters", ()):
            if parameter["name"] == "limit":
                yield path, (parameter["schema"]["default"], parameter["schema"]["maximum"])
