"""A thousand small jobs through the API of a real service on a real Ray cluster: rates, latencies, memory."""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

import psutil

import service.demo
from service.client import AsyncClient, Client
from tests.ci_skips import find_program
from tests.postgres import PostgresServer

SOURCE = Path(service.demo.__file__).parent / "checkpoint"
SUBMITTERS = 8
BATCH_ITEMS = 10_000
SETTLED_S = 600.0
COLUMNS = (
    "| database | submitted /s | submit p50 / p99 ms | done /s | end to end p50 / p99 s | alone p50 / p99 ms "
    "| service RSS MiB | batch of 10,000 s |"
)


@dataclass
class Soak:
    """What one run measured; times in seconds, memory in MiB."""

    database: str
    submits: list[float] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)
    alone: list[float] = field(default_factory=list)
    submit_seconds: float = 0.0
    total_seconds: float = 0.0
    memory: list[float] = field(default_factory=list)
    batch_seconds: float = 0.0

    def row(self, jobs: int) -> str:
        """A line of the table."""
        ends = f"{percentile(self.ends, 50):.1f} / {percentile(self.ends, 99):.1f}"
        alone = f"{percentile(self.alone, 50) * 1000:.0f} / {percentile(self.alone, 99) * 1000:.0f}"
        submits = f"{percentile(self.submits, 50) * 1000:.0f} / {percentile(self.submits, 99) * 1000:.0f}"
        memory = " → ".join(f"{value:.0f}" for value in self.memory)
        return (
            f"| {self.database} | {jobs / self.submit_seconds:.0f} | {submits} | {jobs / self.total_seconds:.1f} "
            f"| {ends} | {alone} | {memory} | {self.batch_seconds:.1f} |"
        )


def percentile(values: list[float], percent: int) -> float:
    """The value below which so many percent lie."""
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


def table(arguments: argparse.Namespace) -> list[str]:
    """The measurement on SQLite and, where its server is installed, on PostgreSQL."""
    rows = [
        f"### {arguments.jobs} small jobs through the API ({SUBMITTERS} submitters, embedded Ray)",
        "",
        COLUMNS,
        "|---|---|---|---|---|---|---|---|",
    ]
    scratch = Path(".bench/soak").absolute()
    shutil.rmtree(scratch, ignore_errors=True)
    rows.append(soak("SQLite", None, scratch / "sqlite", arguments.jobs).row(arguments.jobs))
    if find_program("initdb"):
        server = PostgresServer()
        try:
            rows.append(soak("PostgreSQL", server.new_database(), scratch / "pg", arguments.jobs).row(arguments.jobs))
        finally:
            server.close()
    return rows


def soak(database: str, url: str | None, scratch: Path, jobs: int) -> Soak:
    """One run against a fresh service."""
    with serving(scratch, url) as (process, address):
        run = Soak(database)
        memory = psutil.Process(process.pid)
        run.memory.append(memory.memory_info().rss / 2**20)
        asyncio.run(burst(run, address, scratch, jobs, memory))
        with Client(address, timeout_s=120) as client:
            for number in range(20):
                began = time.perf_counter()
                job = client.submit(str(SOURCE), str(scratch / "alone" / str(number)))
                client.wait(job["id"])
                run.alone.append(time.perf_counter() - began)
            run.batch_seconds = batch(client, scratch)
        run.memory.append(memory.memory_info().rss / 2**20)
        return run


async def burst(run: Soak, address: str, scratch: Path, jobs: int, memory: psutil.Process) -> None:
    """Submit all jobs as fast as answers come, then wait for the last one."""
    numbers = iter(range(jobs))
    began = time.perf_counter()
    async with AsyncClient(address, timeout_s=120) as client:

        async def submit_some() -> None:
            for number in numbers:
                start = time.perf_counter()
                await client.submit(str(SOURCE), str(scratch / "models" / f"{number:04}"), labels={"soak": "1"})
                run.submits.append(time.perf_counter() - start)

        await asyncio.gather(*(submit_some() for _ in range(SUBMITTERS)))
        run.submit_seconds = time.perf_counter() - began
        every = max(1, jobs // 4)
        seen = 0
        while True:
            done = len([job async for job in client.all_jobs(state="succeeded", labels={"soak": "1"})])
            while seen < done // every:
                seen += 1
                run.memory.append(memory.memory_info().rss / 2**20)
            if done == jobs:
                break
            if time.perf_counter() - began > SETTLED_S:
                raise TimeoutError(f"{done} of {jobs} jobs after {SETTLED_S:g} s")
            await asyncio.sleep(2)
        ended = [job async for job in client.all_jobs(labels={"soak": "1"})]
    times = [job["state_times"] for job in ended]
    run.ends = [(moment(each["succeeded"]) - moment(each["queued"])).total_seconds() for each in times]
    run.total_seconds = (
        max(moment(each["succeeded"]) for each in times) - min(moment(each["queued"]) for each in times)
    ).total_seconds()


def batch(client: Client, scratch: Path) -> float:
    """Seconds until a batch of ten thousand is stored; it is cancelled then."""
    items = [{"source": str(SOURCE), "destination": str(scratch / "batch" / f"{n:05}")} for n in range(BATCH_ITEMS)]
    began = time.perf_counter()
    made = client.create("batches", {"items": items})
    seconds = time.perf_counter() - began
    client.do(f"/v1/batches/{made['id']}", "cancel")
    return seconds


def moment(text: str) -> datetime:
    """A time of the API."""
    return datetime.fromisoformat(text)


@contextmanager
def serving(data: Path, database_url: str | None) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """``unshard serve`` in a process of its own, ready for jobs."""
    data.mkdir(parents=True)
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    environment = {**os.environ, "UNSHARD_DATA_DIR": str(data), "UNSHARD_MAX_CONCURRENT_JOBS": "4"}
    if database_url:
        environment["UNSHARD_DATABASE_URL"] = database_url
    with (data / "serve.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "service.cli", "serve", "--port", str(port)],
            stdout=log,
            stderr=log,
            text=True,
            env=environment,
            start_new_session=True,
        )
    address = f"http://127.0.0.1:{port}"
    try:
        with Client(address) as client:
            deadline = time.monotonic() + 90
            while not client.ready():
                if time.monotonic() > deadline or process.poll() is not None:
                    raise TimeoutError(f"the service is not ready: see {data / 'serve.log'}")
                time.sleep(0.2)
        yield process, address
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
