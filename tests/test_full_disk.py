"""A disk that is full: the error says what is missing, nothing is half visible, a retry keeps what was finished."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.synthetic import identity_plan, random_tensors, write_source
from tests.test_pipeline import expected, read_model
from workers.convert import run_plan
from workers.engines.threads import ThreadsEngine
from workers.errors import InsufficientResources
from workers.events import Event, FileCompleted, Started
from workers.options import ConvertOptions
from workers.plan import Plan
from workers.storage import open_folder

DISK_BYTES = 256 * 1024
"""Of 4 KiB pages, which is what tmpfs counts in."""


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of its own, of a size that a test can fill."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(place)], check=False, capture_output=True
    )
    if mounted.returncode != 0:
        pytest.skip(f"a file system may not be mounted here: {mounted.stderr.decode().strip()}")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Plan:
    """A plan of several files of some 8 KiB."""
    monkeypatch.setattr("workers.plan.part_size", lambda _: 1024)
    checkpoint = write_source(tmp_path / "source", random_tensors(21, count=24), 21)
    return identity_plan(checkpoint, ConvertOptions(max_shard_size="8KB"))


def fill(disk: Path, leave_bytes: int) -> Path:
    """Fill a disk up to a rest of that size."""
    filler = disk / "filler"
    status = os.statvfs(disk)
    filler.write_bytes(b"x" * max(0, status.f_bavail * status.f_frsize - leave_bytes))
    return filler


@pytest.mark.system("mount")
def test_a_disk_that_fills_up_in_the_middle_costs_only_what_is_not_finished(disk: Path, plan: Plan) -> None:
    fillers: list[Path] = []

    def fill_after_the_first_file(event: Event) -> None:
        # Not at the first: its record in the journal is written right after this.
        if isinstance(event, FileCompleted) and list(disk.glob(".model.unshard-*/.unshard-journal/*")) and not fillers:
            fillers.append(fill(disk, 0))

    with pytest.raises(InsufficientResources, match=r"more are needed, 0 bytes are free") as caught:
        run_plan(plan, str(disk / "model"), engine=ThreadsEngine(1), observer=fill_after_the_first_file)
    assert caught.value.hint
    assert caught.value.expected is not None
    assert not (disk / "model").exists()

    fillers[0].unlink()
    kept: list[str] = []
    run_plan(
        plan,
        str(disk / "model"),
        observer=lambda event: kept.extend(event.kept_files) if isinstance(event, Started) else None,
    )
    assert kept
    assert read_model(str(disk / "model")) == expected(random_tensors(21, count=24))


@pytest.mark.system("mount")
def test_a_disk_without_room_for_the_manifest_holds_no_model(disk: Path, plan: Plan) -> None:
    fillers: list[Path] = []

    def fill_before_commit() -> None:
        fillers.append(fill(disk, 0))

    with pytest.raises(InsufficientResources, match=r"unshard\.json: \d+ bytes more are needed") as caught:
        run_plan(plan, str(disk / "model"), may_commit=fill_before_commit)
    assert caught.value.hint
    assert not (disk / "model").exists()
    fillers[0].unlink()
    run_plan(plan, str(disk / "model"))
    assert read_model(str(disk / "model")) == expected(random_tensors(21, count=24))


@pytest.mark.system("mount")
def test_a_disk_that_is_too_small_is_refused_before_anything_is_written(disk: Path, plan: Plan) -> None:
    fill(disk, 8 * 1024)
    with pytest.raises(InsufficientResources, match=rf"{plan.bytes_total} bytes are needed, 8192 are free"):
        run_plan(plan, str(disk / "model"))
    assert [entry.name for entry in disk.iterdir()] == ["filler"]


@pytest.mark.system("mount")
def test_a_small_file_that_finds_no_room_says_how_much_it_needs(disk: Path) -> None:
    fill(disk, 0)
    with pytest.raises(InsufficientResources, match=r"note\.json: 9000 bytes more are needed, 0 bytes are free"):
        open_folder(str(disk)).write("note.json", b"x" * 9000)
    assert [entry.path for entry in open_folder(str(disk)).list()] == ["filler"]


def test_memory_that_runs_out_is_told_as_what_is_missing(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def exhausted(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr("workers.merge.Merger.make", exhausted)
    with pytest.raises(InsufficientResources, match="memory ran out") as caught:
        run_plan(plan, str(tmp_path / "model"))
    assert "--memory" in caught.value.hint
    assert not (tmp_path / "model").exists()
