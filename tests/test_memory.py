"""Conversions stay under their memory cap, however large the model: each runs in a process of its own."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from tests.seaweed import S3Server
from workers.storage import open_folder

MODEL_BYTES = 768 << 20
BUDGET_BYTES = 128 << 20
CAP_BYTES = BUDGET_BYTES + (300 << 20)
FETCHING_CAP_BYTES = BUDGET_BYTES + (200 << 20)
"""About 80 MiB are Python's and its libraries' own; the store's client holds what it receives twice for a moment."""

RUN = """
import dataclasses, json, pickle, sys
from pathlib import Path
from workers.convert import run_plan
from workers.engines.threads import ThreadsEngine
plan = pickle.loads(Path(sys.argv[1]).read_bytes())
run_plan(plan, sys.argv[2], engine=ThreadsEngine(int(sys.argv[3])))
peak = next(l for l in Path("/proc/self/status").read_text().splitlines() if l.startswith("VmHWM"))
print(json.dumps({"peak_bytes": int(peak.split()[1]) * 1024}))
"""

PLAN = """
import pickle, sys
from pathlib import Path
import numpy as np
from tests.synthetic import identity_plan, write_source
from workers.expressions import Cast
from workers.mapping import Target
from workers.options import ConvertOptions
import dataclasses
from workers.plan import make_plan
from workers.quantization import FP8_BLOCK
from workers.quantized import Quantize, Scales

rows = int(sys.argv[3]) // (6 * 4096 * 4)
tensors = {f"layer.{n}.weight": ("F32", np.ones((rows, 4096), np.uint32)) for n in range(6)}
checkpoint = write_source(Path(sys.argv[1]), tensors, seed=1, transposed=False)
plan = identity_plan(checkpoint, ConvertOptions(memory=sys.argv[4], max_shard_size="300MB"))
cast = tuple(Target(t.name, Cast(t.expression, "BF16")) for t in plan.mapping.targets)
quantised = tuple(
    Target(f"{kind.__name__}.{t.name}", kind(t.expression, FP8_BLOCK, t.name))
    for t in plan.mapping.targets for kind in (Quantize, Scales)
)
for name, targets in {"plain": plan.mapping.targets, "cast": cast, "quantised": quantised}.items():
    made = make_plan(checkpoint, dataclasses.replace(plan.mapping, targets=targets), plan.options)
    Path(sys.argv[2], name).write_bytes(pickle.dumps(made))
"""


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plans")
    arguments = [str(folder / "source"), str(folder), str(MODEL_BYTES), str(BUDGET_BYTES)]
    subprocess.run([sys.executable, "-c", PLAN, *arguments], check=True)
    return folder


def peak_of(plan: Path, destination: str, environment: dict[str, str], workers: int = 2) -> int:
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(plan), destination, str(workers)],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
    )
    return int(json.loads(done.stdout)["peak_bytes"])


@pytest.mark.parametrize("kind", ["plain", "cast", "quantised"])
def test_a_conversion_to_a_disk_needs_little_memory(plans: Path, tmp_path: Path, kind: str) -> None:
    assert peak_of(plans / kind, str(tmp_path / "model"), {}) < CAP_BYTES


def test_a_conversion_to_a_bucket_stays_under_its_budget(plans: Path, tmp_path: Path, s3: S3Server) -> None:
    assert peak_of(plans / "plain", f"s3://{s3.bucket}/{tmp_path.name}", s3.environment()) < CAP_BYTES


@pytest.fixture(scope="module")
def remote(tmp_path_factory: pytest.TempPathFactory, s3: S3Server) -> Path:
    """The plan of a cast whose source lies in a bucket, with enough parts for many workers."""
    folder = tmp_path_factory.mktemp("remote")
    arguments = [str(folder / "source"), str(folder), str(MODEL_BYTES // 2), str(BUDGET_BYTES)]
    subprocess.run([sys.executable, "-c", PLAN, *arguments], check=True)
    plan = pickle.loads((folder / "cast").read_bytes())
    with pytest.MonkeyPatch.context() as patched:
        for name, value in s3.environment().items():
            patched.setenv(name, value)
        source = open_folder(f"s3://{s3.bucket}/{folder.name}/source")
        for file in plan.checkpoint.files:
            data = (folder / "source" / file.path).read_bytes()
            source.write_stream(file.path, iter([data]), len(data))
    there = dataclasses.replace(plan, checkpoint=dataclasses.replace(plan.checkpoint, address=source.address))
    (folder / "cast").write_bytes(pickle.dumps(there))
    return folder / "cast"


@pytest.mark.parametrize("to", ["a disk", "a bucket"])
def test_many_workers_read_a_bucket_within_the_budget(remote: Path, tmp_path: Path, s3: S3Server, to: str) -> None:
    destination = str(tmp_path / "model") if to == "a disk" else f"s3://{s3.bucket}/{tmp_path.name}"
    assert peak_of(remote, destination, s3.environment(), workers=16) < FETCHING_CAP_BYTES
