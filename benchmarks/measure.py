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
from typing import NamedTuple


class Measured(NamedTuple):
    """What one run took. Seconds of processor hardly depend on what else a machine does; those of a clock do."""

    seconds: float
    peak_bytes: int = 0
    cpu_seconds: float = 0.0


@dataclass
class Series:
    """Repetitions of one measurement."""

    name: str
    seconds: list[float] = field(default_factory=list)
    peak_bytes: list[int] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def cpu(self) -> float:
        return statistics.median(self.cpu_seconds)

    @property
    def spread(self) -> str:
        return f"{min(self.seconds):.2f}-{max(self.seconds):.2f}"

    @property
    def peak(self) -> str:
        return f"{max(self.peak_bytes) / 2**20:,.0f}" if self.peak_bytes else ""


def run_command(command: Sequence[str]) -> Measured:
    """Measure a command; raises when it fails."""
    launcher = [sys.executable, "-S", str(Path(__file__).with_name("launch.py"))]
    began = time.perf_counter()
    done = subprocess.run([*launcher, *command], capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - began
    if done.returncode:
        raise RuntimeError(f"{command[0]} failed: {done.stderr}")
    peak, cpu = done.stdout.split()
    return Measured(seconds, int(peak) * 1024, float(cpu))


def copy_and_sync(source: Path, destination: Path) -> Measured:
    """Measure ``cp -r --reflink=never`` and an fsync of each file, which is what a conversion does, too."""
    began = time.perf_counter()
    subprocess.run(["cp", "-r", "--reflink=never", source, destination], check=True)
    for path in destination.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)
    return Measured(time.perf_counter() - began)


def interleave(measurements: dict[str, Callable[[Path], Measured]], scratch: Path, repetitions: int) -> list[Series]:
    """Run each measurement in turn, round after round; the first round warms up and doesn't count."""
    series = {name: Series(name) for name in measurements}
    for round_number in range(repetitions + 1):
        for name, measure in measurements.items():
            destination = scratch / "out"
            shutil.rmtree(destination, ignore_errors=True)
            os.sync()
            found = measure(destination)
            if round_number:
                series[name].seconds.append(found.seconds)
                series[name].cpu_seconds.append(found.cpu_seconds)
                if found.peak_bytes:
                    series[name].peak_bytes.append(found.peak_bytes)
    shutil.rmtree(scratch / "out", ignore_errors=True)
    return list(series.values())
