"""A conversion that is killed at any moment shows nothing and is resumed by the same command."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.distributed.tensor.placement_types import Shard

from tests.rank_files import Saved, write_rank_files
from tests.test_pipeline import read_model

COMMAND = Path(sys.executable).with_name("unshard")
TENSORS = 48
ROWS, COLUMNS = 512, 512


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    rng = np.random.default_rng(5)
    tensors = {
        f"model.layers.{number}.weight": Saved(
            (ROWS, COLUMNS), (Shard(0),), torch.float32, rng.integers(0, 2**30, (ROWS, COLUMNS), dtype=np.uint32)
        )
        for number in range(TENSORS)
    }
    write_rank_files(folder, tensors, (2,))
    (folder / "config.json").write_text(json.dumps({"model_type": "unknown", "architectures": ["None"]}))
    (folder / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 2, "world_size": 2}))
    return folder


def command(checkpoint: Path, destination: Path, engine: str) -> list[str]:
    options = ["--max-shard-size", "1MB", "--engine", engine, "--json"]
    return [str(COMMAND), "convert", str(checkpoint), str(destination), *options]


@pytest.mark.parametrize("engine", ["threads", "ray"])
@pytest.mark.parametrize("files", [1, 20])
def test_a_killed_conversion_is_resumed_from_its_finished_files(
    checkpoint: Path, tmp_path: Path, engine: str, files: int
) -> None:
    destination = tmp_path / "model"
    process = subprocess.Popen(
        command(checkpoint, destination, engine), stdout=subprocess.DEVNULL, start_new_session=True
    )
    deadline = time.monotonic() + 90
    while process.poll() is None and time.monotonic() < deadline:
        if len(list(tmp_path.glob(".model.unshard-*/.unshard-journal/*.json"))) >= files:
            break
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if process.returncode == 0:
        pytest.fail("the conversion ended before it was killed: make the checkpoint larger")
    assert not destination.exists()
    kept = {path.name: path.stat().st_mtime_ns for path in tmp_path.glob(".model.unshard-*/*.safetensors")}
    finished = list(tmp_path.glob(".model.unshard-*/.unshard-journal/*.json"))
    assert len(finished) >= files

    done = subprocess.run(command(checkpoint, destination, engine), check=True, capture_output=True, timeout=120)

    json.loads(done.stdout)
    names = {json.loads(path.read_text())["path"] for path in destination.glob(".unshard-journal/*")}
    assert not names
    unchanged = [name for name, time_ns in kept.items() if (destination / name).stat().st_mtime_ns == time_ns]
    assert len(unchanged) >= files
    assert len(read_model(str(destination))) == TENSORS
    assert (
        subprocess.run([COMMAND, "verify", checkpoint, destination], check=False, capture_output=True).returncode == 0
    )
    assert {path.name for path in tmp_path.iterdir()} == {"model"}
