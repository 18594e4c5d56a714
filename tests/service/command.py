"""Run the command, in this process or as one of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from service.cli.run import run

ROOT = Path(__file__).resolve().parents[2]
CASES = ROOT / "tests" / "cases" / "verl-fsdp"
QWEN = CASES / "qwen3moe-fused-experts-fsdp2-ws2" / "input"


@dataclass(frozen=True)
class Done:
    """What a command left."""

    status: int
    out: str
    err: str


def unshard(capsys, *arguments) -> Done:
    """Run the command in this process."""
    capsys.readouterr()
    status = run([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return Done(status, captured.out, captured.err)


def start(*arguments, env=None, **kwargs) -> subprocess.Popen[str]:
    """Start the command as a process."""
    return subprocess.Popen(
        [sys.executable, "-m", "service.cli", *map(str, arguments)],
        cwd=kwargs.pop("cwd", ROOT),
        env={**os.environ, "PYTHONPATH": str(ROOT), **(env or {})},
        stdout=kwargs.pop("stdout", subprocess.PIPE),
        stderr=subprocess.PIPE,
        text=True,
        **kwargs,
    )


def finish(process: subprocess.Popen[str]) -> Done:
    """Wait for a process and take what it printed."""
    out, err = process.communicate(timeout=60)
    return Done(process.returncode, out or "", err)
