"""What a conversion tells of its progress."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.synthetic import identity_plan, random_tensors, write_source
from workers import collection
from workers.collection import Collection
from workers.convert import convert, run_plan
from workers.errors import Cancelled
from workers.events import Event, FileCompleted, Progress, Started
from workers.merge import PartResult
from workers.options import ConvertOptions
from workers.plan import Plan
from workers.storage.object_store import ObjectFolder

CASE = Path(__file__).parent / "cases" / "verl-fsdp" / "llama-gqa-fsdp2-ws2" / "input"
CASE_ELEMENTS = 60_912


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[Progress]:
    """All progress of the test's conversions, none left out, when ``hear`` observes them."""
    monkeypatch.setattr(collection, "PROGRESS_EVERY_S", 0.0)
    return []


def hearing(told: list[Progress]) -> Callable[[Event], None]:
    return lambda event: told.append(event) if isinstance(event, Progress) else None


def in_small_parts(source: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Plan, int]:
    """A plan of one file in many parts, and the bytes of its tensors."""
    monkeypatch.setattr("workers.plan.part_size", lambda _: 256)
    tensors = random_tensors(5, count=12)
    plan = identity_plan(write_source(source, tensors, 5))
    assert len(plan.layout.files) == 1
    assert len(plan.layout.parts) > 10
    return plan, sum(values.nbytes for _, values in tensors.values())


def test_the_written_ranges_and_the_finished_files_are_the_bytes_that_are_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collection, "PROGRESS_EVERY_S", 0.0)
    source = write_source(tmp_path / "source", random_tensors(5, count=12), 5)
    plan = identity_plan(source, ConvertOptions(max_shard_size="2KB", memory="64MiB"))
    headers = {file.path: len(file.header) for file in plan.layout.files}
    told: list[Event] = []
    run_plan(plan, str(tmp_path / "model"), observer=told.append)
    finished = 0
    partly = 0
    for event in told:
        if isinstance(event, FileCompleted):
            finished += event.size_bytes
        if not isinstance(event, Progress):
            continue
        under_way = sum(stop - start for ranges in event.written.values() for start, stop in ranges)
        # A file's last progress comes just before it is told as completed, and counts it already.
        completing = event.bytes_done - under_way - finished
        assert completing == 0 or completing in [file.size_bytes for file in plan.layout.files]
        for path, ranges in event.written.items():
            assert all(headers[path] <= start < stop for start, stop in ranges)
            assert ranges == sorted(ranges)
        partly += bool(event.written)
    assert partly, "at least one file was told while it was under way"
    assert finished == sum(file.size_bytes for file in plan.layout.files)


@pytest.mark.parametrize("place", ["disk", "store"])
def test_what_is_merged_is_each_byte_of_the_target_tensors_and_not_what_was_read(
    told: list[Progress], tmp_path: Path, place: str
) -> None:
    destination = f"memory://{tmp_path.name}/model" if place == "store" else str(tmp_path / "model")
    result = convert(str(CASE), destination, ConvertOptions(dtype="bfloat16"), observer=hearing(told))
    last = told[-1]
    assert (last.bytes_read, last.bytes_merged) == (4 * CASE_ELEMENTS, 2 * CASE_ELEMENTS)
    assert last.bytes_done == last.bytes_total > last.bytes_merged  # with the file's header
    assert result.bytes_merged == 2 * CASE_ELEMENTS


def test_on_a_disk_all_that_is_merged_is_written(
    told: list[Progress], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, weights = in_small_parts(tmp_path / "source", monkeypatch)
    run_plan(plan, str(tmp_path / "model"), observer=hearing(told))
    assert len(told) > 10
    assert all(progress.bytes_done == progress.bytes_merged for progress in told[:-1])
    assert told[-1].bytes_merged == weights
    assert told[-1].bytes_done == told[-1].bytes_total


def test_of_parts_that_wait_for_their_upload_nothing_is_written(
    told: list[Progress], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, weights = in_small_parts(tmp_path / "source", monkeypatch)
    all_merged = threading.Event()
    write_stream = ObjectFolder.write_stream

    def held(folder: ObjectFolder, path: str, chunks: Iterable[memoryview], size_bytes: int) -> Any:
        def after_all_is_merged() -> Iterator[memoryview]:
            parts = iter(chunks)
            yield next(parts)  # the header
            assert all_merged.wait(30)
            yield from parts

        return write_stream(folder, path, after_all_is_merged(), size_bytes)

    def hear(event: Event) -> None:
        hearing(told)(event)
        if isinstance(event, Progress) and event.bytes_merged == weights:
            all_merged.set()

    monkeypatch.setattr(ObjectFolder, "write_stream", held)
    run_plan(plan, f"memory://{tmp_path.name}/model", observer=hear)
    waiting = [progress for progress in told if progress.bytes_merged < weights]
    assert len(waiting) > 9
    assert all((each.bytes_done, each.tensors_done, each.written) == (0, 0, {}) for each in waiting)
    assert told[len(waiting)].bytes_done == 0
    taken = [progress.bytes_done for progress in told[len(waiting) :]]
    assert taken == sorted(taken)
    assert len(set(taken)) > 10
    assert told[-1].bytes_done == told[-1].bytes_total


def test_a_part_that_is_lost_is_not_written_any_more_and_counts_as_merged_again(
    told: list[Progress], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, _ = in_small_parts(tmp_path / "source", monkeypatch)
    length = int(plan.layout.parts.length[0])
    account = Collection(plan.recipe, plan.layout.files, hearing(told))
    made = PartResult(part=0, digest=bytes(16), checksums=(), bytes_read=100, seconds=0.1)
    account.part_merged(made, "merger-0")
    account.part_written(0)
    account.part_written(0)
    account.part_merged(made, "merger-1")  # made twice: counted once
    assert (told[-1].bytes_read, told[-1].bytes_merged, told[-1].bytes_done) == (100, length, length)
    account.forget([0])
    account.part_merged(made, "merger-1")
    assert (told[-1].bytes_read, told[-1].bytes_merged, told[-1].bytes_done) == (200, 2 * length, 0)
    account.forget([0])  # on its way, and lost before it was written
    account.part_done(made, "merger-1")
    assert (told[-1].bytes_merged, told[-1].bytes_done) == (3 * length, length)


def test_a_retry_merges_what_is_left(told: list[Progress], tmp_path: Path) -> None:
    tensors = random_tensors(5, count=12)
    plan = identity_plan(write_source(tmp_path / "source", tensors, 5), ConvertOptions(max_shard_size="2KB"))
    cancel = threading.Event()

    def stop(event: Event) -> None:
        if isinstance(event, FileCompleted):
            cancel.set()

    with pytest.raises(Cancelled):
        run_plan(plan, str(tmp_path / "model"), observer=stop, cancel=cancel)
    cancel.clear()
    kept: list[str] = []

    def hear(event: Event) -> None:
        hearing(told)(event)
        if isinstance(event, Started):
            kept.extend(event.kept_files)

    result = run_plan(plan, str(tmp_path / "model"), observer=hear)
    assert kept
    left = [file for file in plan.layout.files if file.path not in kept]
    assert result.bytes_merged == sum(file.size_bytes - len(file.header) for file in left)
    assert told[-1].bytes_done == told[-1].bytes_total
