"""Metadata is read in processes: whatever a source does to them, the service goes on."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from service.jobs import planning
from service.jobs.failures import describe
from service.jobs.planning import ComparingLimits, Planner, PlanningLimits, TookTooLong, UnexpectedFault
from service.room import Overloaded
from tests.attacks.pickles import numbers_of_one_hash
from tests.attacks.torch_files import torch_zip
from tests.service.conftest import FakeConverter, eventually, running
from workers.compare import Compared
from workers.errors import Cancelled, IncompleteCheckpoint, InsufficientResources, UnshardError
from workers.options import ConvertOptions

CASE = Path(__file__).parent.parent / "cases" / "verl-fsdp" / "llama-gqa-fsdp2-ws2" / "input"


@pytest.fixture
def bomb(tmp_path: Path) -> str:
    """A checkpoint that keeps the interpreter busy, with its lock held, for longer than any limit of these tests."""
    folder = tmp_path / "bomb"
    folder.mkdir()
    (folder / "pytorch_model.bin").write_bytes(
        torch_zip([("data.pkl", numbers_of_one_hash(400_000)), ("version", b"3\n")])
    )
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return str(folder)


@pytest.fixture
def planner() -> Iterator[Planner]:
    made = Planner(PlanningLimits(plan_s=60, inspect_s=2, at_once=1))
    yield made
    made.close()


def processes_of(planner: Planner) -> list[int]:
    return [child.pid for child in (*planner._idle, *planner._busy)]


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_source_that_hangs_its_reader_is_given_up_and_its_process_ended(planner, bomb):
    began = time.monotonic()
    seen: list[int] = []
    watch = threading.Thread(target=lambda: seen.extend(eventually(lambda: processes_of(planner), "a process")))
    watch.start()
    with pytest.raises(TookTooLong, match="within 2 s") as caught:
        planner.inspect(bomb, ConvertOptions())
    assert time.monotonic() - began < 10
    watch.join()
    assert not is_running(seen[0])
    assert describe(caught.value)["kind"] == "timeout"
    assert "UNSHARD_INSPECT_TIMEOUT_S" in caught.value.hint
    assert json.loads(planner.inspect(str(CASE), ConvertOptions()))["format"]


def test_the_time_of_a_reader_is_limited_by_the_system_too(planner, bomb):
    # As if the service had died: nobody looks at the clock. This limit leaves a second of the processor's time.
    child = planner._take()
    request = ("plan", bomb, ConvertOptions())
    child.channel.send((1.0 - planning.SPARE_CPU_S, None, (), request))
    assert child.status(30) == -signal.SIGXCPU
    with pytest.raises(TookTooLong):
        planner._answer(child, request, 1.0, lambda: False)


def test_a_comparison_may_keep_its_threads_busy_all_the_time(planner):
    # As much time of the processor as threads take: else the system would end it before its own clock does.
    child = planner._take()
    both = Compared(str(CASE)), Compared(str(CASE))
    child.channel.send((1000.0, None, (), ("compare", *both, (0.0, 2**30, time.monotonic() + 60))))
    kind, _ = child.channel.receive()
    limits = Path(f"/proc/{child.pid}/limits").read_text().splitlines()
    soft = next(int(line.split()[3]) for line in limits if line.startswith("Max cpu time"))
    assert kind == "done"
    assert soft >= 2 * 1000


def test_a_comparison_whose_sources_cannot_be_read_in_time_names_its_own_limit(planner, bomb):
    with pytest.raises(TookTooLong, match=r"could not be read and compared within 0\.5 s") as caught:
        planner.compare(Compared(bomb), Compared(bomb), 0.0, ComparingLimits(time_s=0.5))
    assert "UNSHARD_COMPARE_TIMEOUT_S" in caught.value.hint


def test_planning_is_cancelled_within_a_second(planner, bomb):
    cancel = threading.Event()
    asked: list[float] = []

    def stop() -> None:
        eventually(lambda: processes_of(planner), "a process")
        asked.append(time.monotonic())
        cancel.set()

    thread = threading.Thread(target=stop)
    thread.start()
    with pytest.raises(Cancelled):
        planner.plan(bomb, ConvertOptions(), cancel)
    assert time.monotonic() - asked[0] < 1
    thread.join()


def test_a_process_that_is_ended_while_it_reads_is_a_lack_of_resources(planner, bomb):
    killer = threading.Thread(
        target=lambda: os.kill(eventually(lambda: processes_of(planner), "a process")[0], signal.SIGKILL)
    )
    killer.start()
    with pytest.raises(InsufficientResources, match="was ended by SIGKILL") as caught:
        planner.plan(bomb, ConvertOptions(), threading.Event())
    killer.join()
    assert describe(caught.value)["kind"] == "resource"
    assert "memory" in caught.value.hint


def test_a_reader_that_wants_more_memory_than_it_may_have_is_told():
    planner = Planner(PlanningLimits(memory_bytes=64 << 20))
    try:
        with pytest.raises(InsufficientResources):
            planner.plan(str(CASE), ConvertOptions(), threading.Event())
    finally:
        planner.close()


def test_errors_and_results_are_those_of_reading_in_the_own_process(planner, tmp_path):
    broken = CASE.parent.parent / "error-missing-rank-file" / "input"
    with pytest.raises(IncompleteCheckpoint) as caught:
        planner.plan(str(broken), ConvertOptions(), threading.Event())
    assert caught.value.hint
    with pytest.raises(UnshardError):
        planner.inspect(str(tmp_path / "none"), ConvertOptions())
    summary = planner.preview(str(CASE), str(tmp_path / "model"), ConvertOptions())
    assert summary["tensors"] > 0
    assert len(processes_of(planner)) == 1


def test_an_unexpected_fault_is_told_by_its_class_alone(planner):
    with pytest.raises(UnexpectedFault) as caught:
        planner._asked(("inspect",))
    assert describe(caught.value)["message"] == "an unexpected fault of unshard: TypeError"


def test_more_than_may_be_read_at_once_is_refused_for_now(planner, bomb):
    errors: list[BaseException] = []

    def inspect() -> None:
        try:
            planner.inspect(bomb, ConvertOptions())
        except (TookTooLong, Overloaded) as error:
            errors.append(error)

    threads = [threading.Thread(target=inspect) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {type(error) for error in errors} == {TookTooLong, Overloaded}


def test_a_closed_planner_ends_what_is_under_way(planner, bomb):
    closer = threading.Thread(target=lambda: (eventually(lambda: processes_of(planner), "one"), planner.close()))
    closer.start()
    with pytest.raises(Cancelled):
        planner.plan(bomb, ConvertOptions(), threading.Event())
    closer.join()


def test_the_service_answers_while_a_hostile_source_is_read(settings, bomb):
    settings = settings.model_copy(update={"inspect_timeout_s": 1.5})
    with running(settings, FakeConverter()) as service:
        told: list[object] = []
        thread = threading.Thread(target=lambda: told.append(service.http.post("/v1/inspect", json={"source": bomb})))
        thread.start()
        eventually(lambda: service.context.planner._busy, "the source is being read")
        began = time.monotonic()
        assert service.http.get("/healthz").status_code == 200
        assert time.monotonic() - began < 1
        thread.join()
        answer = told[0]
        assert (answer.status_code, answer.json()["type"]) == (504, "/problems/timeout")
        assert "UNSHARD_INSPECT_TIMEOUT_S" in answer.json()["hint"]
        dry = service.http.post(
            "/v1/jobs?dry_run=true", json={"source": bomb, "destination": str(settings.data_dir / "out")}
        )
        assert dry.status_code == 504


def test_a_large_process_is_not_kept(planner, monkeypatch):
    monkeypatch.setattr(planning, "LARGEST_IDLE_BYTES", 1)
    planner.inspect(str(CASE), ConvertOptions())
    assert processes_of(planner) == []
