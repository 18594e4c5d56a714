"""A pytest plugin for what a machine may lack: programs and GPUs.

A test marked ``system`` names the programs it needs (``@pytest.mark.system("chromium")``) and skips with the reason
on a machine without them. The build server installs them, so that a skip there hides a test that nobody runs: with
``CI`` set every skip is a failure. A test marked ``gpu`` is deselected, and counted so, where there is no GPU; no
build server can install one.

Named by ``-p`` in pyproject.toml, not in a conftest, so that it sees every part of the suite from the first module on.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Generator
from pathlib import Path

import pytest

# Debian keeps PostgreSQL's server programs off the path, by version.
_PROGRAM_FOLDERS = "/usr/lib/postgresql/*/bin"


def find_program(name: str) -> str | None:
    """Return where a program is, on the path or in the folders that distributions keep off it."""
    beside = sorted(Path("/").glob(f"{_PROGRAM_FOLDERS[1:]}/{name}"))
    return shutil.which(name) or (str(beside[-1]) if beside else None)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests that need a GPU where there is none."""
    if Path("/dev/nvidiactl").exists():
        return
    without = [item for item in items if item.get_closest_marker("gpu")]
    if without:
        config.hook.pytest_deselected(items=without)
        items[:] = [item for item in items if item not in without]


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test whose system programs are missing."""
    needed = [name for marker in item.iter_markers("system") for name in marker.args]
    if missing := [name for name in needed if find_program(name) is None]:
        pytest.skip(f"needs the program {', '.join(missing)}")


def _fail_if_skipped(report: pytest.TestReport | pytest.CollectReport) -> None:
    on_build_server = os.environ.get("CI", "").lower() not in {"", "0", "false"}
    if not on_build_server or not report.skipped or hasattr(report, "wasxfail"):
        return
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    report.outcome = "failed"
    report.longrepr = f"skipped, and with CI set nothing may skip: {reason}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Judge the skip of a test."""
    report = yield
    _fail_if_skipped(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Judge the skip of a whole module, as by ``importorskip``."""
    report = yield
    _fail_if_skipped(report)
    return report
