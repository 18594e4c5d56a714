"""The API against its own description: whatever a request holds, the answer is one that the description names."""

from __future__ import annotations

from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import CHECKS
from schemathesis.specs.openapi.checks import positive_data_acceptance

from service.app import create_app
from service.settings import Settings
from tests.service.conftest import FakeConverter, Service

EXAMPLES = 12
CHECKED = [check for check in CHECKS.get_all() if check is not positive_data_acceptance]
"""What a description can't say (a place that doesn't exist, a job that has ended) may well be refused."""


def operations() -> list[tuple[str, str]]:
    """Every path and method of the description."""
    paths = create_app(Settings(), run_conversion=FakeConverter()).openapi()["paths"]
    return [(path, method) for path, methods in paths.items() for method in methods]


@pytest.fixture(scope="module")
def described(idle: Service) -> Any:
    return schemathesis.openapi.from_url(f"{idle.url}/v1/openapi.json")


@pytest.mark.parametrize(("path", "method"), operations())
def test_every_answer_is_one_that_the_description_names(described: Any, path: str, method: str) -> None:
    @given(case=described[path][method.upper()].as_strategy())
    @settings(max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    def answers(case: Any) -> None:
        case.headers.pop("Accept", None)  # of streams the JSON form: another has no end
        case.call_and_validate(checks=CHECKED, timeout=30)

    answers()
