"""``unshard convert``: drive the pipeline, show how far it is, sum up."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from service.cli.interrupt import StopSignals
from service.cli.output import count, duration, emit_json, say, say_fields, size
from service.cli.planning import remarks, where_from
from service.cli.progress import Watcher
from workers.convert import Result, convert
from workers.engines import Engine, Work
from workers.options import ConvertOptions


@dataclass(frozen=True, slots=True)
class Request:
    """What the user asked for."""

    source: str
    destination: str
    options: ConvertOptions
    engine: str = "threads"
    workers: int | None = None


def run_convert(request: Request, *, as_json: bool) -> int:
    """Convert; raises whatever the conversion does."""
    with StopSignals() as stop, _engine(request, stop) as engine:
        watcher = Watcher(visible=sys.stderr.isatty() and not as_json, planned=stop.defer)
        try:
            result = convert(
                request.source,
                request.destination,
                request.options,
                engine=engine,
                observer=watcher,
                cancel=stop.event,
            )
        finally:
            watcher.close()
    if as_json:
        emit_json(_document(result, watcher))
    else:
        _say_summary(request, result, watcher)
    return 0


@contextmanager
def _engine(request: Request, stop: StopSignals) -> Iterator[Engine]:
    if request.engine == "threads":
        from workers.engines.threads import ThreadsEngine  # noqa: PLC0415 - only the engine asked for

        yield ThreadsEngine(request.workers)
        return
    from workers.engines.ray_engine import RayEngine  # noqa: PLC0415 - loads Ray
    from workers.engines.ray_pool import PoolOptions  # noqa: PLC0415

    engine = RayEngine(PoolOptions(mergers=request.workers))
    try:
        yield _KeepingSignals(engine, stop)
    finally:
        engine.close()


class _KeepingSignals:
    """An engine whose start takes the signal handlers away, as Ray's does with SIGTERM."""

    def __init__(self, engine: _Startable, stop: StopSignals) -> None:
        self.name = engine.name
        self._engine = engine
        self._stop = stop

    def run(self, work: Work) -> None:
        self._engine.start()
        self._stop.install()
        self._engine.run(work)


class _Startable(Engine, Protocol):
    def start(self) -> None: ...


def _document(result: Result, watcher: Watcher) -> dict[str, Any]:
    return {
        "location": result.location,
        "seconds": round(result.seconds, 3),
        "already_there": result.already_there,
        "bytes_written": result.bytes_written,
        "bytes_read": result.bytes_read,
        "kept_files": list(watcher.kept_files),
        "retries": watcher.retries,
        "warnings": _warnings(result, watcher),
        "plan": result.plan_summary,
    }


def _warnings(result: Result, watcher: Watcher) -> list[str]:
    return list(dict.fromkeys([*result.warnings, *watcher.warnings]))


def _say_summary(request: Request, result: Result, watcher: Watcher) -> None:
    if result.already_there:
        say(f"{result.location} holds this very model already, made from {request.source} with the same options")
        return
    summary = result.plan_summary
    files, small = len(summary["files"]), len(summary["small_files"])
    # A summary's rate is of what was made now, not of files that an earlier attempt had finished.
    made = result.bytes_written - sum(f["size_bytes"] for f in summary["files"] if f["name"] in watcher.kept_files)
    say(f"Converted {request.source}")
    say(f"     into {result.location}")
    fields = [
        ("source", where_from(summary["source"])),
        ("weights", f"{count(summary['tensors'], 'tensor')}, {size(result.bytes_written)} in {count(files, 'file')}"),
        ("beside", f"{count(small, 'file')}{': ' * bool(small)}{', '.join(summary['small_files'])}"),
        ("time", f"{duration(result.seconds)}, {size(made / max(result.seconds, 1e-9))}/s"),
    ]
    if watcher.kept_files:
        fields.append(("resumed", f"{count(len(watcher.kept_files), 'file')} kept from an earlier attempt"))
    if watcher.retries:
        fields.append(("retries", f"{count(watcher.retries, 'part')} made again after a worker was lost"))
    say_fields(fields + remarks(summary, _warnings(result, watcher)))
