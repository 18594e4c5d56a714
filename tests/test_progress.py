"""What a conversion tells of its progress."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.synthetic import identity_plan, random_tensors, write_source
from workers import collect
from workers.convert import run_plan
from workers.events import Event, FileCompleted, Progress
from workers.options import ConvertOptions


def test_the_written_ranges_and_the_finished_files_are_the_bytes_that_are_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collect, "PROGRESS_EVERY_S", 0.0)
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
