"""``unshard verify``: one model against what it says of itself, or two against each other."""

from __future__ import annotations

from contextlib import suppress

from service.cli.output import count, emit_json, say, size
from workers.compare import compare_sources
from workers.errors import UnshardError
from workers.inspect import inspect
from workers.options import ConvertOptions
from workers.verify import Report, verify_model

PROBLEMS_SHOWN = 20
DIFFERENT = 1


def run_verify(a: str, b: str | None, *, atol: float, forward: bool, as_json: bool) -> int:
    """Print what was checked and what differs; the status says whether all is well."""
    report = _report(a, b, atol=atol, forward=forward)
    if as_json:
        emit_json(report.to_dict())
    else:
        _say_report(report, a, b)
        if b is None and not report.tensors:
            _say_what_else(a)
    return 0 if report.equal else DIFFERENT


def _report(a: str, b: str | None, *, atol: float, forward: bool) -> Report:
    if b is None:
        return verify_model(a)
    if forward:
        from workers.forward import compare_logits  # noqa: PLC0415 - loads torch and transformers

        return compare_logits(a, b, atol=atol)
    return compare_sources(a, b, atol=atol)


def _say_what_else(place: str) -> None:
    """Where there is no model there may be a checkpoint, which is verified against one."""
    with suppress(UnshardError):
        found = inspect(place, ConvertOptions()).to_dict()["format"]
        say(f"hint: this is a checkpoint ({found}), not a model; compare it with one: unshard verify {place} MODEL")


def _say_report(report: Report, a: str, b: str | None) -> None:
    what = f"{a} and {b}" if b else a
    verdict = ("are equal" if b else "is sound") if report.equal else ("differ" if b else "is not sound")
    say(f"{what} {verdict}")
    say(f"  checked: {'; '.join(report.checks)} ({count(report.tensors, 'tensor')}, {size(report.bytes)})")
    for problem in report.problems[:PROBLEMS_SHOWN]:
        say(f"  - {problem}")
    if len(report.problems) > PROBLEMS_SHOWN:
        say(f"  … and {len(report.problems) - PROBLEMS_SHOWN} more")
