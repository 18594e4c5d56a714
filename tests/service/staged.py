"""Conversions that stand still at a stage of theirs until a test lets them go on, for faults in between."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.service.conftest import Service
from workers.convert import convert
from workers.events import Event, FileCompleted, Planned, Verifying

CASE = Path(__file__).parent.parent / "cases" / "verl-fsdp" / "llama-gqa-fsdp2-ws2" / "input"
OPTIONS = {"max_shard_size": "30KB"}
STAGES = ("planning", "planned", "shard", "verifying", "commit")


@dataclass
class Staged:
    """Real conversions, each of which stands still at the stage that its destination is named after."""

    reached: dict[str, threading.Event] = field(default_factory=lambda: {s: threading.Event() for s in STAGES})
    go_on: threading.Event = field(default_factory=threading.Event)
    commits: list[str] = field(default_factory=list)

    def __call__(self, source: str, destination: str, options: Any, **controls: Any) -> Any:
        stage = Path(destination).name
        observer, may_commit = controls["observer"], controls["may_commit"]
        stops = {"planned": Planned, "shard": FileCompleted, "verifying": Verifying}

        def observe(event: Event) -> None:
            if stage in stops and isinstance(event, stops[stage]):
                self._stop(stage)
            observer(event)

        def ask() -> None:
            if stage == "commit":
                self._stop(stage)
            may_commit()
            self.commits.append(stage)

        if stage == "planning":
            self._stop(stage)
        return convert(source, destination, options, **{**controls, "observer": observe, "may_commit": ask})

    def _stop(self, stage: str) -> None:
        self.reached[stage].set()
        assert self.go_on.wait(60)


def begin_all(service: Service, staged: Staged, folder: str, options: dict[str, Any] | None = None) -> dict[str, str]:
    """A job at each stage; the ids by stage."""
    ids = {
        stage: service.client.submit(str(CASE), f"{folder}/{stage}", OPTIONS | (options or {}))["id"]
        for stage in STAGES
    }
    for stage, reached in staged.reached.items():
        assert reached.wait(60), stage
    return ids
