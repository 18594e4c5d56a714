"""The Ray engine: the same bytes as the threads engine, whatever dies on the way."""

from __future__ import annotations

import dataclasses
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import ray

from tests.seaweed import S3Server
from tests.synthetic import identity_plan, random_tensors, write_source
from tests.test_pipeline import expected, read_model
from workers.convert import run_plan
from workers.engines.ray_engine import RayEngine
from workers.engines.ray_pool import PoolOptions
from workers.engines.threads import ThreadsEngine
from workers.errors import Cancelled, CorruptFile, InsufficientResources, InvalidOption, StorageError
from workers.events import Event, Progress, Retried
from workers.expressions import Source
from workers.mapping import Target
from workers.options import ConvertOptions
from workers.plan import Plan, make_plan
from workers.quantization import SCHEMES
from workers.quantized import Quantize, Scales
from workers.storage import open_folder


@pytest.fixture(scope="module")
def engine(s3: S3Server) -> Iterator[RayEngine]:
    with pytest.MonkeyPatch.context() as environment:
        # Actors take credentials from the environment of their node, so it is set before the cluster starts.
        for name, value in s3.environment().items():
            environment.setenv(name, value)
        made = RayEngine(PoolOptions(mergers=2))
        made.start()
        yield made
        made.close()


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Plan:
    monkeypatch.setattr("workers.plan.part_size", lambda _: 256)
    checkpoint = write_source(tmp_path / "source", random_tensors(21, count=24), 21)
    return identity_plan(checkpoint, ConvertOptions(max_shard_size="2KB"))


def workers_of(engine: RayEngine, kind: str) -> list[int]:
    """Process ids of the engine's actors of one kind."""
    workers = engine._pool.mergers if kind == "merger" else engine._pool.collectors
    return list(ray.get([worker.handle.process.remote() for worker in workers]))


def test_both_engines_give_the_same_bytes(engine: RayEngine, plan: Plan, tmp_path: Path) -> None:
    run_plan(plan, str(tmp_path / "threads"), engine=ThreadsEngine())
    run_plan(plan, str(tmp_path / "ray"), engine=engine)
    for path in sorted((tmp_path / "threads").glob("*.safetensors*")):
        assert path.read_bytes() == (tmp_path / "ray" / path.name).read_bytes()
    assert read_model(str(tmp_path / "ray")) == expected(random_tensors(21, count=24))


def test_parts_travel_through_the_object_store_into_a_bucket(
    engine: RayEngine, plan: Plan, s3: S3Server, tmp_path: Path
) -> None:
    url = f"s3://{s3.bucket}/{tmp_path.name}/model"
    run_plan(plan, url, engine=engine)
    assert read_model(url) == expected(random_tensors(21, count=24))
    assert not [entry for entry in open_folder(url).list() if entry.path.startswith(".unshard")]


@pytest.mark.parametrize("target", ["file", "s3"])
def test_each_byte_of_a_tensor_is_merged_and_written_once(
    engine: RayEngine, plan: Plan, s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str
) -> None:
    monkeypatch.setattr("workers.collection.PROGRESS_EVERY_S", 0.0)
    url = str(tmp_path / "model") if target == "file" else f"s3://{s3.bucket}/{tmp_path.name}/model"
    told: list[Progress] = []
    hear = lambda event: told.append(event) if isinstance(event, Progress) else None  # noqa: E731
    result = run_plan(plan, url, engine=engine, observer=hear)
    weights = sum(values.nbytes for _, values in random_tensors(21, count=24).values())
    assert result.bytes_merged == told[-1].bytes_merged == weights
    assert told[-1].bytes_done == told[-1].bytes_total == sum(file.size_bytes for file in plan.layout.files)
    merged = [progress.bytes_merged for progress in told]
    assert merged == sorted(merged)
    headers = sum(len(file.header) for file in plan.layout.files)
    assert all(progress.bytes_done <= progress.bytes_merged + headers for progress in told)
    if target == "s3":
        assert any(progress.bytes_done < progress.bytes_merged for progress in told)


@pytest.mark.parametrize("kind", ["merger", "collector"])
@pytest.mark.parametrize("target", ["file", "s3"])
def test_a_killed_actor_costs_its_parts_and_nothing_else(
    engine: RayEngine, plan: Plan, s3: S3Server, tmp_path: Path, kind: str, target: str
) -> None:
    url = str(tmp_path / "model") if target == "file" else f"s3://{s3.bucket}/{tmp_path.name}/model"
    events: list[Event] = []
    victims = workers_of(engine, kind)[:1]

    def kill_once(event: Event) -> None:
        events.append(event)
        if isinstance(event, Progress) and event.files_done >= 1 and victims:
            os.kill(victims.pop(), signal.SIGKILL)

    run_plan(plan, url, engine=engine, observer=kill_once)
    assert not victims
    assert read_model(url) == expected(random_tensors(21, count=24))
    if kind == "merger":
        assert [event for event in events if isinstance(event, Retried)]


def test_a_part_that_kills_its_workers_is_named(
    engine: RayEngine, plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.engines.ray_run.MOST_ATTEMPTS", 1)
    victims = workers_of(engine, "merger")

    def kill_all(event: Event) -> None:
        while isinstance(event, Progress) and victims:
            os.kill(victims.pop(), signal.SIGKILL)

    with pytest.raises(InsufficientResources, match=r"layer\.\d+\.weight"):
        run_plan(plan, str(tmp_path / "model"), engine=engine, observer=kill_all)
    assert not (tmp_path / "model").exists()


def test_an_actors_error_is_the_users_error(engine: RayEngine, plan: Plan, tmp_path: Path) -> None:
    damaged = tmp_path / "source" / "rank-0.bin"
    damaged.write_bytes(damaged.read_bytes()[:-200])
    with pytest.raises(CorruptFile, match=r"rank-0\.bin") as caught:
        run_plan(plan, str(tmp_path / "model"), engine=engine)
    assert caught.value.file is not None


@pytest.mark.parametrize("target", ["file", "s3"])
def test_cancelling_takes_less_than_a_second_and_leaves_no_model(
    engine: RayEngine, plan: Plan, s3: S3Server, tmp_path: Path, target: str
) -> None:
    url = str(tmp_path / "model") if target == "file" else f"s3://{s3.bucket}/{tmp_path.name}/model"
    cancel = threading.Event()
    asked: list[float] = []

    def stop(event: Event) -> None:
        if isinstance(event, Progress) and not asked:
            asked.append(time.monotonic())
            cancel.set()

    with pytest.raises(Cancelled):
        run_plan(plan, url, engine=engine, observer=stop, cancel=cancel)
    assert time.monotonic() - asked[0] < 3
    names = {entry.path for entry in open_folder(url).list()}
    assert not names & {"config.json", "unshard.json", "model.safetensors.index.json"}
    run_plan(plan, url, engine=engine)
    assert read_model(url) == expected(random_tensors(21, count=24))


def test_a_window_of_few_parts_is_given_back_whole(
    engine: RayEngine, tmp_path: Path, s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.plan.part_size", lambda _: 256)
    monkeypatch.setattr("workers.engines.ray_run.RayRun._window_bytes", lambda _: 600)
    checkpoint = write_source(tmp_path / "source", random_tensors(3, count=60), 3)
    small = identity_plan(checkpoint, ConvertOptions(max_shard_size="400"))
    assert len(small.layout.files) > 20
    url = f"s3://{s3.bucket}/{tmp_path.name}/model"
    run_plan(small, url, engine=engine)
    assert read_model(url) == expected(random_tensors(3, count=60))


def test_two_jobs_share_the_actors(engine: RayEngine, plan: Plan, tmp_path: Path) -> None:
    problems: list[BaseException] = []

    def convert(name: str) -> None:
        try:
            run_plan(plan, str(tmp_path / name), engine=engine)
        except BaseException as error:  # noqa: BLE001 - shown by the assertion below
            problems.append(error)

    threads = [threading.Thread(target=convert, args=(f"model-{number}",)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems
    for number in range(2):
        assert read_model(str(tmp_path / f"model-{number}")) == expected(random_tensors(21, count=24))


def test_a_node_that_sees_the_destination_is_believed_and_one_that_hangs_is_named(
    engine: RayEngine, plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine._pool.mergers[0], "node", "far-node")
    run_plan(plan, str(tmp_path / "seen"), engine=engine)
    monkeypatch.setattr("workers.engines.ray_shared.TIMEOUT_S", 1.0)
    process = workers_of(engine, "merger")[0]
    os.kill(process, signal.SIGSTOP)
    try:
        with pytest.raises(StorageError, match="far-node did not say within 1 s whether it sees"):
            run_plan(plan, str(tmp_path / "model"), engine=engine)
    finally:
        os.kill(process, signal.SIGCONT)
    assert not (tmp_path / "model").exists()
    assert not list(tmp_path.rglob(".unshard-nonce"))


def test_the_engine_says_what_its_workers_are(engine: RayEngine) -> None:
    described = engine.describe()
    assert [worker["kind"] for worker in described] == ["merger", "merger", "collector"]
    assert all(worker["node"] for worker in described)


@pytest.mark.parametrize("scheme", sorted(SCHEMES))
def test_actors_quantise_to_the_same_bytes_and_name_a_weight_that_cannot_be(
    engine: RayEngine, tmp_path: Path, scheme: str
) -> None:
    finite = np.random.default_rng(5).standard_normal((300, 256)).astype(np.float32)
    made = {"whole": finite, "broken": finite.copy()}
    made["broken"][260, 3] = np.inf
    for name, values in made.items():
        checkpoint = write_source(tmp_path / name, {"m.weight": ("F32", values.view(np.uint32))}, 5)
        weight = Source(0, "F32", values.shape)
        targets = (
            Target("m.numbers", Quantize(weight, SCHEMES[scheme], "m.weight")),
            Target("m.scales", Scales(weight, SCHEMES[scheme], "m.weight")),
        )
        mapping = identity_plan(checkpoint).mapping
        quantised = make_plan(checkpoint, dataclasses.replace(mapping, targets=targets), ConvertOptions())
        if name == "broken":
            with pytest.raises(InvalidOption, match=r"\[260, 3\]"):
                run_plan(quantised, str(tmp_path / "never"), engine=engine)
            assert not (tmp_path / "never").exists()
            continue
        run_plan(quantised, str(tmp_path / "threads"), engine=ThreadsEngine())
        run_plan(quantised, str(tmp_path / "ray"), engine=engine)
        assert read_model(str(tmp_path / "threads")) == read_model(str(tmp_path / "ray"))


class Hog:
    """An actor that holds CPUs."""

    def ready(self) -> None:
        return None


def test_a_merger_that_finds_no_place_any_more_is_missed_until_it_does(
    engine: RayEngine, plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.engines.ray_pool.REPLACE_TIMEOUT_S", 2.0)
    # It waits for one CPU more than there is: that of the merger which is killed, so that none is left for another.
    free = ray.available_resources().get("CPU", 0)
    hog = ray.remote(num_cpus=free + 1)(Hog).remote()
    victims = workers_of(engine, "merger")[:1]

    def kill_once(event: Event) -> None:
        if isinstance(event, Progress) and victims:
            os.kill(victims.pop(), signal.SIGKILL)
            ray.get(hog.ready.remote())

    run_plan(plan, str(tmp_path / "model"), engine=engine, observer=kill_once)
    assert read_model(str(tmp_path / "model")) == expected(random_tensors(21, count=24))
    assert [worker["kind"] for worker in engine.describe()] == ["merger", "collector"]

    ray.kill(hog)
    deadline = time.monotonic() + 60
    while len(engine._pool.mergers) < 2 and time.monotonic() < deadline:
        assert engine.check() is None
        threading.Event().wait(0.2)
    assert [worker["kind"] for worker in engine.describe()] == ["merger", "merger", "collector"]
    [node] = engine.overview()["nodes"]
    assert node["available"].get("CPU", 0) < node["total"]["CPU"]


def test_a_worker_without_memory_is_told_as_what_is_missing(
    engine: RayEngine, plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    huge = plan.recipe.parts.length.copy()
    huge[:] = 1 << 62
    monkeypatch.setattr("workers.engines.ray_run.RayRun._window_bytes", lambda _: 1 << 63)
    url = f"memory://{tmp_path.name}/model"
    object.__setattr__(plan.layout.parts, "length", huge)
    with pytest.raises(InsufficientResources, match="ran out of memory") as caught:
        run_plan(plan, url, engine=engine)
    assert "--memory" in caught.value.hint
