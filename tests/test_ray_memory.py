"""Workers that are ended because memory runs out: by Ray's own monitor, and by a signal, as the system does."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from tests.synthetic import identity_plan, random_tensors, write_source
from workers.convert import run_plan
from workers.engines.ray_actors import MergerActor
from workers.engines.ray_engine import RayEngine
from workers.engines.ray_pool import PoolOptions
from workers.engines.ray_run import MOST_ATTEMPTS
from workers.errors import InsufficientResources
from workers.events import Event, Retried
from workers.options import ConvertOptions
from workers.plan import Plan

NEARLY_NOTHING = "0.001"
"""Share of a node's memory: any node uses more than this."""


class NeverDone(MergerActor):
    """A merger whose parts take longer than anybody waits."""

    def make_in_place(self, *_: Any) -> Any:
        time.sleep(300)


class EndsItself(MergerActor):
    """A merger that the system kills at each part."""

    def make_in_place(self, *_: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[RayEngine]:
    """An engine with a cluster of its own, whose monitor looks at memory every so many milliseconds; 0: never."""
    monkeypatch.setenv("RAY_memory_usage_threshold", NEARLY_NOTHING)
    monkeypatch.setenv("RAY_memory_monitor_refresh_ms", str(request.param))
    monkeypatch.setattr("workers.engines.ray_pool.EMBEDDED_STORE_BYTES", 80 << 20)
    made = RayEngine(PoolOptions(mergers=1, num_cpus=0.5))
    yield made
    made.close()
    ray.shutdown()


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    checkpoint = write_source(tmp_path / "source", random_tensors(21, count=3), 21)
    return identity_plan(checkpoint, ConvertOptions())


def told(error: InsufficientResources) -> str:
    assert error.code == "insufficient-resources"
    assert "\n" not in str(error)
    assert error.found is not None
    assert "memory" in error.found
    assert error.expected is not None
    assert all(word in error.hint for word in ("memory", "UNSHARD_MERGERS", "--memory"))
    return error.message


@pytest.mark.parametrize("engine", [200], indirect=True)
def test_a_cluster_without_memory_for_any_worker_says_so(engine: RayEngine) -> None:
    with pytest.raises(InsufficientResources, match=r"could not start: .* low on memory") as caught:
        engine.start()
    told(caught.value)


@pytest.mark.parametrize(("engine", "reason"), [(3000, "low on memory"), (0, "SIGKILL")], indirect=["engine"])
def test_a_part_whose_workers_are_killed_for_memory_is_given_up_after_a_few(
    engine: RayEngine, reason: str, plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    merger = EndsItself if reason == "SIGKILL" else NeverDone
    monkeypatch.setattr("workers.engines.ray_pool.MergerActor", merger)
    events: list[Event] = []
    with pytest.raises(InsufficientResources) as caught:
        run_plan(plan, str(tmp_path / "model"), engine=engine, observer=events.append)
    assert reason in told(caught.value)
    # On a slow machine a worker may be killed before it has begun with a part.
    if "could not start" not in caught.value.message:
        assert f"lost its worker {MOST_ATTEMPTS} times" in caught.value.message
        assert caught.value.tensor in random_tensors(21, count=3)
        assert str(plan.worker_bytes) in (caught.value.expected or "")
        retried = [event for event in events if isinstance(event, Retried)]
        assert {event.attempt for event in retried} == set(range(1, MOST_ATTEMPTS))
        assert all(reason in event.reason and "\n" not in event.reason for event in retried)
    assert not (tmp_path / "model").exists()
