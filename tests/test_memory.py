"""Conversions stay under their memory cap, however large the model: each runs in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.seaweed import S3Server

MODEL_BYTES = 768 << 20
BUDGET_BYTES = 128 << 20
CAP_BYTES = BUDGET_BYTES + (300 << 20)

RUN = """
import dataclasses, json, pickle, sys
from pathlib import Path
from workers.convert import run_plan
plan = pickle.loads(Path(sys.argv[1]).read_bytes())
run_plan(plan, sys.argv[2])
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


def peak_of(plan: Path, destination: str, environment: dict[str, str]) -> int:
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(plan), destination],
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
