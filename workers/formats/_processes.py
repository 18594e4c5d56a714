"""Spread work that keeps the interpreter busy over helper processes, results in order.

Not ``multiprocessing``: its fresh processes run the caller's main module again, which a script that calls unshard
as a library need not survive, and its forks are unsafe beside threads. A helper here is a plain interpreter that
is told its work on one pipe and answers on another, which also holds it back when nobody reads.
"""

from __future__ import annotations

import importlib
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from workers.errors import InternalError, UnshardError

MOST_PROCESSES = 8
_SERVE = "from workers.formats._processes import serve; serve()"


def available_processes() -> int:
    """How many helpers are worth having on this machine; less than 2 means none."""
    return min(len(os.sched_getaffinity(0)), MOST_PROCESSES) if sys.executable else 1


def map_in_processes(function: str, jobs: Sequence[Any], processes: int) -> Iterator[Any]:
    """Call ``module:function`` with each job in one of several processes, and yield the results in order.

    Jobs and results travel pickled. An ``UnshardError`` of a job is raised here when its turn comes. Leaving early
    ends the helpers.
    """
    processes = min(processes, len(jobs))
    helpers = [_start(function, jobs[start::processes]) for start in range(processes)]
    try:
        for number in range(len(jobs)):
            yield _answer(helpers[number % processes])
    finally:
        for helper in helpers:
            helper.kill()
        for helper in helpers:
            helper.communicate()


def _start(function: str, jobs: Sequence[Any]) -> subprocess.Popen[bytes]:
    # -P and no empty entries: nothing may be imported from the working directory, which can be a checkpoint's.
    path = os.pathsep.join((str(Path(__file__).parents[2]), *filter(None, sys.path)))
    helper = subprocess.Popen(  # noqa: S603 - this interpreter and a text of ours
        [sys.executable, "-P", "-c", _SERVE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": path},
    )
    with suppress(BrokenPipeError):  # it ended at once: reading its answer says so
        pickle.dump((function, list(jobs)), _pipe(helper.stdin))
        _pipe(helper.stdin).flush()
    return helper


def _answer(helper: subprocess.Popen[bytes]) -> Any:
    try:
        result = pickle.load(_pipe(helper.stdout))  # noqa: S301 - what our own helper wrote
    except (EOFError, pickle.UnpicklingError):
        raise InternalError(
            f"a helper process ended with status {helper.wait()} while it read metadata",
            hint="It may have been ended for lack of memory; watch the machine's memory and try again.",
        ) from None
    if isinstance(result, UnshardError):
        raise result
    return result


def _pipe(stream: Any) -> BinaryIO:
    pipe: BinaryIO = stream
    return pipe


def serve() -> None:
    """Do the work of a helper process: read a function's name and jobs, answer each in turn."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides, and ends its helpers
    function, jobs = pickle.load(sys.stdin.buffer)  # noqa: S301 - what our own parent wrote
    module, _, name = function.partition(":")
    call = getattr(importlib.import_module(module), name)
    with suppress(BrokenPipeError):
        for job in jobs:
            try:
                result = call(job)
            except UnshardError as error:
                result = error
            pickle.dump(result, sys.stdout.buffer, protocol=pickle.HIGHEST_PROTOCOL)
            sys.stdout.buffer.flush()
            if isinstance(result, UnshardError):
                return
