"""The pipeline without a reader or a family: tilings in, safetensors out."""

from __future__ import annotations

import dataclasses
import json
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.synthetic import identity_plan, random_tensors, write_source
from workers import merge
from workers.checkpoint import SideFile, SourceFile
from workers.checks import refuse_changed_files
from workers.convert import run_plan
from workers.engines.threads import ThreadsEngine
from workers.errors import (
    Cancelled,
    CorruptFile,
    DestinationBusy,
    DestinationNotEmpty,
    GeometryMismatch,
    InsufficientResources,
    StorageError,
)
from workers.events import Event, Progress, Started
from workers.manifest import MANIFEST_NAME, digest
from workers.options import ConvertOptions
from workers.safetensors_file import open_safetensors
from workers.storage import Folder, open_folder
from workers.storage.object_store import ObjectFolder
from workers.verify import verify_model


def read_model(url: str) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    folder = open_folder(url)
    found = {}
    for entry in folder.list():
        if entry.path.endswith(".safetensors"):
            opened = open_safetensors(folder, entry.path, entry.size_bytes)
            for name, tensor in opened.tensors.items():
                data = folder.read(entry.path, tensor.offset, tensor.length_bytes)
                found[name] = tensor.dtype, tensor.shape, data
    return found


def expected(tensors: dict[str, tuple[str, np.ndarray[Any, Any]]]) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    return {name: (dtype, values.shape, values.tobytes()) for name, (dtype, values) in tensors.items()}


@pytest.fixture(params=["file", "memory"])
def destination(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "model") if request.param == "file" else f"memory://{tmp_path.name}/model"


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32), limit=st.sampled_from(["200", "3KB", "1MB"]), workers=st.integers(1, 3))
def test_any_tiling_gives_the_tensors_back(
    tmp_path_factory: pytest.TempPathFactory, seed: int, limit: str, workers: int
) -> None:
    folder = tmp_path_factory.mktemp("tiling")
    tensors = random_tensors(seed, count=8)
    checkpoint = write_source(folder / "source", tensors, seed)
    plan = identity_plan(checkpoint, ConvertOptions(max_shard_size=limit))
    for url in (str(folder / "model"), f"memory://{folder.name}/model"):
        run_plan(plan, url, engine=ThreadsEngine(workers))
        assert read_model(url) == expected(tensors)
        assert verify_model(url).problems == ()


def test_small_blocks_and_parts_give_the_same_bytes(
    tmp_path: Path, destination: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(merge, "BLOCK_BYTES", 64)
    monkeypatch.setattr("workers.plan.part_size", lambda _: 512)
    tensors = random_tensors(7, count=12)
    plan = identity_plan(write_source(tmp_path / "source", tensors, 7))
    assert len(plan.layout.parts) > 10
    run_plan(plan, destination)
    assert read_model(destination) == expected(tensors)


def test_a_flipped_bit_is_found_before_the_commit(tmp_path: Path, destination: str) -> None:
    plan = identity_plan(write_source(tmp_path / "source", random_tensors(3), 3))
    damaged = tmp_path / "source" / "rank-1.bin"
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 4
    damaged.write_bytes(content)
    with pytest.raises(CorruptFile, match=r"rank-1\.bin"):
        run_plan(plan, destination)
    assert open_folder(destination).list() == []


def test_a_damaged_source_takes_away_what_an_earlier_attempt_had_finished(tmp_path: Path, destination: str) -> None:
    plan = identity_plan(
        write_source(tmp_path / "source", random_tensors(11, 10), 11), ConvertOptions(max_shard_size="300")
    )
    cancel = threading.Event()
    with pytest.raises(Cancelled):
        run_plan(
            plan,
            destination,
            engine=ThreadsEngine(1),
            cancel=cancel,
            observer=lambda event: cancel.set() if isinstance(event, Progress) and event.files_done >= 2 else None,
        )
    whole = {path: path.read_bytes() for path in (tmp_path / "source").iterdir()}
    for path, data in whole.items():
        path.write_bytes(bytes(byte ^ 1 for byte in data))
    with pytest.raises(CorruptFile):
        run_plan(plan, destination)
    assert not open_folder(destination).list()
    for path, data in whole.items():
        path.write_bytes(data)
    run_plan(plan, destination)
    assert verify_model(destination).equal


def test_damage_in_bytes_that_no_tensor_uses_is_found_too(tmp_path: Path) -> None:
    checkpoint = write_source(tmp_path / "source", random_tensors(3), 3)
    padded = next(
        row
        for row in range(len(checkpoint.storages))
        if (tmp_path / "source" / f"rank-{checkpoint.storages.file[row]}.bin").read_bytes()[
            int(checkpoint.storages.offset[row] + checkpoint.storages.length[row]) - 24 : int(
                checkpoint.storages.offset[row] + checkpoint.storages.length[row]
            )
        ]
        == b"\0" * 24
    )
    path = tmp_path / "source" / f"rank-{checkpoint.storages.file[padded]}.bin"
    content = bytearray(path.read_bytes())
    content[int(checkpoint.storages.offset[padded] + checkpoint.storages.length[padded]) - 1] = 1
    path.write_bytes(content)
    with pytest.raises(CorruptFile, match=path.name):
        run_plan(identity_plan(checkpoint), str(tmp_path / "model"))


@pytest.mark.parametrize("path", ["file", "file/model", "file/a/b"])
def test_a_destination_that_is_a_file_or_below_one_names_the_file(tmp_path, path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(DestinationNotEmpty, match="/file is a file, not a folder"):
        run_plan(identity_plan(write_source(tmp_path / "source", random_tensors(1), 1)), str(tmp_path / path))


def test_a_destination_that_holds_anything_is_left_alone(tmp_path: Path, destination: str) -> None:
    plan = identity_plan(write_source(tmp_path / "source", random_tensors(1), 1))
    open_folder(destination).write("notes.txt", b"mine")
    with pytest.raises(DestinationNotEmpty, match=r"notes\.txt"):
        run_plan(plan, destination)
    overwriting = dataclasses.replace(plan, options=ConvertOptions(overwrite=True))
    with pytest.raises(DestinationNotEmpty, match="no part of a model"):
        run_plan(overwriting, destination)
    assert open_folder(destination).read("notes.txt") == b"mine"


@pytest.mark.parametrize("stranger", ["optimizer.pt", "notes.md", "train.py", "run-2/data/x.bin"])
def test_overwrite_takes_nothing_away_that_is_no_part_of_a_model(
    tmp_path: Path, destination: str, stranger: str
) -> None:
    run_plan(identity_plan(write_source(tmp_path / "a", random_tensors(1), 1)), destination)
    open_folder(destination).write(stranger, b"mine")
    plan = identity_plan(write_source(tmp_path / "b", random_tensors(2), 2), ConvertOptions(overwrite=True))
    with pytest.raises(DestinationNotEmpty, match=stranger.rpartition(".")[0]):
        run_plan(plan, destination)
    assert read_model(destination) == expected(random_tensors(1))
    assert open_folder(destination).read(stranger) == b"mine"


def test_a_conversion_that_is_done_already_does_nothing(tmp_path: Path, destination: str) -> None:
    plan = identity_plan(write_source(tmp_path / "source", random_tensors(1), 1))
    first = run_plan(plan, destination)
    again = run_plan(plan, destination)
    assert again.already_there
    assert again.manifest == first.manifest
    assert not first.already_there


def test_a_side_file_that_changed_since_is_no_conversion_that_is_done(tmp_path: Path, destination: str) -> None:
    plan = identity_plan(write_source(tmp_path / "source", random_tensors(1), 1))
    side = SideFile("tokenizer.json", "tokenizer.json", 8)
    plan = dataclasses.replace(plan, mapping=dataclasses.replace(plan.mapping, side_files=(side,)))
    (tmp_path / "source" / "tokenizer.json").write_text('{"a": 1}')
    run_plan(plan, destination)
    assert run_plan(plan, destination).already_there
    (tmp_path / "source" / "tokenizer.json").write_text('{"a": 2}')
    with pytest.raises(DestinationNotEmpty):
        run_plan(plan, destination)
    run_plan(dataclasses.replace(plan, options=ConvertOptions(overwrite=True)), destination)
    assert open_folder(destination).read("tokenizer.json") == b'{"a": 2}'


@pytest.mark.parametrize("place", ["beside", "mount point", "store"])
def test_an_interrupted_overwrite_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    destination = f"memory://{tmp_path.name}/model" if place == "store" else str(tmp_path / "model")
    if place == "mount point":
        monkeypatch.setattr("workers.local_destination.os.path.ismount", lambda path: str(path) == destination)
    old, new = random_tensors(1), random_tensors(2, count=10)
    options = ConvertOptions(max_shard_size="400", overwrite=True)
    run_plan(identity_plan(write_source(tmp_path / "a", old, 1), options), destination)
    plan = identity_plan(write_source(tmp_path / "b", new, 2), options)
    failing = (
        "workers.store_destination.StoreDestination.commit" if place == "store" else "workers.local_destination._sync"
    )

    with monkeypatch.context() as broken:
        broken.setattr(failing, _refuse)
        with pytest.raises((StorageError, OSError)):
            run_plan(plan, destination)
    run_plan(plan, destination)

    assert read_model(destination) == expected(new)
    assert verify_model(destination).equal
    names = {entry.path for entry in open_folder(destination).list()}
    assert names == {
        *(file.path for file in plan.layout.files),
        "model.safetensors.index.json",
        "config.json",
        MANIFEST_NAME,
    }


def _refuse(*_: object) -> None:
    raise OSError(5, "Input/output error")


def test_a_lost_claim_stops_the_loser_and_spares_the_winners_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    destination = f"memory://{tmp_path.name}/model"
    monkeypatch.setattr("workers.store_destination.STALE_AFTER_S", 0.0)
    loser = identity_plan(write_source(tmp_path / "a", random_tensors(1), 1))
    winner = identity_plan(write_source(tmp_path / "b", random_tensors(2), 2))

    def overtake(event: Event) -> None:
        if isinstance(event, Started):
            run_plan(winner, destination)

    with pytest.raises(DestinationBusy):
        run_plan(loser, destination, observer=overtake)
    assert read_model(destination) == expected(random_tensors(2))
    assert verify_model(destination).equal


def test_a_changed_source_is_not_mixed_with_files_of_the_one_before(tmp_path: Path) -> None:
    def versioned(tensors: dict[str, Any]) -> Any:
        checkpoint = write_source(tmp_path / "source", tensors, 11)
        folder = open_folder(str(tmp_path / "source"))
        files = tuple(
            dataclasses.replace(file, digest="", version=entry.version)
            for file in checkpoint.files
            if (entry := folder.stat(file.path)) is not None
        )
        return identity_plan(dataclasses.replace(checkpoint, files=files), ConvertOptions(max_shard_size="300"))

    tensors = random_tensors(11, count=10)
    cancel = threading.Event()
    with pytest.raises(Cancelled):
        run_plan(
            versioned(tensors),
            str(tmp_path / "model"),
            cancel=cancel,
            observer=lambda event: cancel.set() if isinstance(event, Progress) and event.files_done >= 2 else None,
        )
    changed = {name: (dtype, values ^ values.dtype.type(1)) for name, (dtype, values) in tensors.items()}
    run_plan(versioned(changed), str(tmp_path / "model"))
    assert read_model(str(tmp_path / "model")) == expected(changed)


def test_an_existing_empty_folder_keeps_its_mode(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir(mode=0o700)
    (tmp_path / "model").chmod(0o2750)
    run_plan(identity_plan(write_source(tmp_path / "source", random_tensors(1), 1)), str(tmp_path / "model"))
    assert (tmp_path / "model").stat().st_mode & 0o7777 == 0o2750


def test_a_name_with_a_star_touches_nobody_elses_folder(tmp_path: Path) -> None:
    victim = tmp_path / ".abc.unshard-0123456789abcdef"
    victim.mkdir()
    run_plan(identity_plan(write_source(tmp_path / "source", random_tensors(1), 1)), str(tmp_path / "a*c"))
    assert victim.is_dir()


def test_overwrite_replaces_a_model_whole(tmp_path: Path, destination: str) -> None:
    first, second = random_tensors(1), random_tensors(2)
    options = ConvertOptions(max_shard_size="500", overwrite=True)
    run_plan(identity_plan(write_source(tmp_path / "a", first, 1), options), destination)
    options = ConvertOptions(max_shard_size="1MB", overwrite=True)
    run_plan(identity_plan(write_source(tmp_path / "b", second, 2), options), destination)
    assert read_model(destination) == expected(second)
    names = {entry.path for entry in open_folder(destination).list()}
    assert names == {"model.safetensors", "config.json", MANIFEST_NAME}


def test_a_cancelled_conversion_shows_nothing_and_is_resumed(tmp_path: Path, destination: str) -> None:
    tensors = random_tensors(11, count=10)
    plan = identity_plan(write_source(tmp_path / "source", tensors, 11), ConvertOptions(max_shard_size="300"))
    cancel = threading.Event()

    def stop_after_some(event: Event) -> None:
        if isinstance(event, Progress) and event.files_done >= 2:
            cancel.set()

    with pytest.raises(Cancelled):
        run_plan(plan, destination, observer=stop_after_some, cancel=cancel)
    assert not [e for e in open_folder(destination).list() if e.path in (MANIFEST_NAME, "config.json")]
    events: list[Event] = []
    run_plan(plan, destination, observer=events.append)
    started = next(event for event in events if isinstance(event, Started))
    assert len(started.kept_files) >= 2
    assert read_model(destination) == expected(tensors)


@pytest.mark.parametrize("journal_agrees", [False, True])
def test_a_kept_file_that_was_changed_meanwhile_is_made_again(tmp_path: Path, *, journal_agrees: bool) -> None:
    tensors = random_tensors(11, count=10)
    plan = identity_plan(write_source(tmp_path / "source", tensors, 11), ConvertOptions(max_shard_size="300"))
    destination = tmp_path / "model"
    cancel = threading.Event()
    with pytest.raises(Cancelled):
        run_plan(
            plan,
            str(destination),
            cancel=cancel,
            observer=lambda event: cancel.set() if isinstance(event, Progress) and event.files_done >= 2 else None,
        )
    staging = next(tmp_path.glob(".model.unshard-*"))
    shard = min(staging.glob("*.safetensors"))
    content = shard.read_bytes()
    if journal_agrees:  # as when another build of the same version wrote both
        header = plan.layout.files[0].header
        other = header.replace(b".weight", b".biases")
        shard.write_bytes(other + content[len(header) :])
        entry = next(path for path in (staging / ".unshard-journal").iterdir() if shard.name in path.read_text())
        entry.write_text(entry.read_text().replace(digest(header), digest(other)))
    else:
        shard.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    run_plan(plan, str(destination))
    assert read_model(str(destination)) == expected(tensors)
    assert {path.name for path in tmp_path.iterdir()} == {"source", "model"}


def test_two_conversions_to_one_place_do_not_meet(tmp_path: Path, destination: str) -> None:
    plan = identity_plan(write_source(tmp_path / "source", random_tensors(5), 5))
    refusals: list[BaseException] = []

    def second(event: Event) -> None:
        if isinstance(event, Started):
            with pytest.raises(DestinationBusy) as refusal:
                run_plan(plan, destination)
            refusals.append(refusal.value)

    run_plan(plan, destination, observer=second)
    assert len(refusals) == 1


def test_the_source_is_never_taken_for_the_destination(tmp_path: Path) -> None:
    checkpoint = write_source(tmp_path / "source", random_tensors(5), 5)
    (tmp_path / "source" / "config.json").write_text("{}")
    (tmp_path / "link").symlink_to(tmp_path / "source")
    plan = identity_plan(checkpoint, ConvertOptions(overwrite=True))
    for destination in (tmp_path / "source", tmp_path, tmp_path / "link"):
        with pytest.raises(DestinationNotEmpty, match=r"rank-0\.bin of the source"):
            run_plan(plan, str(destination))
    run_plan(plan, str(tmp_path / "source" / "model"))


def test_many_files_of_a_bucket_are_looked_at_together_and_the_changed_one_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = open_folder(f"memory://{tmp_path.name}/source")
    versions = {f"rank-{n}": folder.write(f"rank-{n}", b"x").version for n in range(40)}
    files = tuple(SourceFile(path, 1, version=version) for path, version in versions.items())
    checkpoint = dataclasses.replace(write_source(tmp_path / "source", random_tensors(1), 1), files=files)
    stat = ObjectFolder.stat

    def slow(self: ObjectFolder, path: str) -> Any:
        time.sleep(0.1)
        return stat(self, path)

    monkeypatch.setattr(ObjectFolder, "stat", slow)
    began = time.monotonic()
    refuse_changed_files(checkpoint, folder, threading.Event())
    assert time.monotonic() - began < 2
    folder.write("rank-39", b"y")
    with pytest.raises(CorruptFile, match="rank-39 was changed"):
        refuse_changed_files(checkpoint, folder, threading.Event())


def test_a_source_that_changes_meanwhile_is_an_error(tmp_path: Path) -> None:
    checkpoint = write_source(tmp_path / "source", random_tensors(5), 5)
    folder = open_folder(str(tmp_path / "source"))
    versioned = tuple(
        dataclasses.replace(file, version=entry.version)
        for file in checkpoint.files
        if (entry := folder.stat(file.path)) is not None
    )
    plan = identity_plan(dataclasses.replace(checkpoint, files=versioned))
    (tmp_path / "source" / "rank-0.bin").touch()
    with pytest.raises(CorruptFile, match=r"rank-0\.bin"):
        run_plan(plan, str(tmp_path / "model"))


def test_a_full_disk_is_told_and_leaves_nothing_that_looks_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = identity_plan(write_source(tmp_path / "source", random_tensors(5), 5))

    def no_space(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("workers.collect.os.pwrite", no_space)
    with pytest.raises(InsufficientResources, match=r"no space is left for .*safetensors"):
        run_plan(plan, str(tmp_path / "model"))
    assert not (tmp_path / "model").exists()


def test_the_manifest_names_what_was_made_of_what(tmp_path: Path, destination: str) -> None:
    plan = identity_plan(write_source(tmp_path / "source", random_tensors(5), 5))
    result = run_plan(plan, destination)
    manifest = json.loads(open_folder(destination).read(MANIFEST_NAME))
    assert manifest == result.manifest
    assert manifest["plan"] == plan.fingerprint
    assert manifest["dropped"] == [{"name": "x", "reason": "for show"}]
    assert [entry["path"] for entry in manifest["weights"]] == ["model.safetensors"]


@pytest.mark.parametrize("name", ["__metadata__", "\ud800"])
def test_a_name_that_no_safetensors_file_can_hold_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(GeometryMismatch, match="named"):
        identity_plan(write_source(tmp_path / "source", {name: ("U8", np.zeros(3, np.uint8))}, 1))


def test_a_plan_is_the_same_for_a_copy_of_the_source(tmp_path: Path) -> None:
    plans = [identity_plan(write_source(tmp_path / name, random_tensors(5), 5)) for name in ("a", "b")]
    assert plans[0].fingerprint == plans[1].fingerprint
    other = identity_plan(write_source(tmp_path / "c", random_tensors(6), 6))
    assert other.fingerprint != plans[0].fingerprint


def test_all_zero_and_nan_weights_are_mentioned(tmp_path: Path) -> None:
    nan = np.full((4, 4), 0x7FC00000, dtype=np.uint32)
    tensors = {
        "zero": ("F32", np.zeros((4, 4), np.uint32)),
        "nan": ("F32", nan),
        "bias": ("F32", np.zeros(4, np.uint32)),
    }
    plan = identity_plan(write_source(tmp_path / "source", tensors, 0))
    warnings = run_plan(plan, str(tmp_path / "model")).warnings
    assert len(warnings) == 2
    assert "nan" in warnings[0]
    assert "zero" in warnings[1]


def test_remote_sources_are_read_in_few_requests(tmp_path: Path) -> None:
    tensors = random_tensors(9, count=12)
    checkpoint = write_source(tmp_path / "source", tensors, 9)
    remote: Folder = open_folder(f"memory://{tmp_path.name}/source")
    for path in (tmp_path / "source").iterdir():
        remote.write(path.name, path.read_bytes())
    plan = identity_plan(dataclasses.replace(checkpoint, address=remote.address))
    run_plan(plan, str(tmp_path / "model"))
    assert read_model(str(tmp_path / "model")) == expected(tensors)
