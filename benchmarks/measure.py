"""Run things and note wall time and peak memory; put repetitions together."""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Series:
    """Repetitions of one measurement."""

    name: str
    seconds: list[float] = field(default_factory=list)
    peak_bytes: list[int] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def spread(self) -> str:
        return f"{min(self.seconds):.2f}-{max(self.seconds):.2f}"

    @property
    def peak(self) -> str:
        return f"{max(self.peak_bytes) / 2**20:,.0f}" if self.peak_bytes else ""


def run_command(command: Sequence[str]) -> tuple[float, int]:
    """Seconds and peak resident bytes of a command; raises when it fails."""
    launcher = [sys.executable, "-S", str(Path(__file__).with_name("launch.py"))]
    began = time.perf_counter()
    done = subprocess.run([*launcher, *command], capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - began
    if done.returncode:
        raise RuntimeError(f"{command[0]} failed: {done.stderr}")
    return seconds, int(done.stdout) * 1024


def copy_and_sync(source: Path, destination: Path) -> float:
    """Seconds of ``cp -r --reflink=never`` and an fsync of each file, which is what a conversion does, too."""
    began = time.perf_counter()
    subprocess.run(["cp", "-r", "--reflink=never", source, destination], check=True)
    for path in destination.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)
    return time.perf_counter() - began


def interleave(
    measurements: dict[str, Callable[[Path], tuple[float, int]]], scratch: Path, repetitions: int
) -> list[Series]:
    """Run each measurement in turn, round after round; the first round warms up and doesn't count."""
    series = {name: Series(name) for name in measurements}
    for round_number in range(repetitions + 1):
        for name, measure in measurements.items():
            destination = scratch / "out"
            shutil.rmtree(destination, ignore_errors=True)
            os.sync()
            seconds, peak = measure(destination)
            if round_number:
                series[name].seconds.append(seconds)
                if peak:
                    series[name].peak_bytes.append(peak)
    shutil.rmtree(scratch / "out", ignore_errors=True)
    return list(series.values())
