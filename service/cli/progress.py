"""An observer for people: a bar with bytes, rate and time left on a terminal, silence elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from workers import events

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


@dataclass(slots=True)
class Watcher:
    """Observes a conversion: draws the bar if ``visible`` and remembers what the summary tells."""

    visible: bool
    planned: Callable[[], None] = lambda: None
    kept_files: tuple[str, ...] = ()
    retries: int = 0
    warnings: list[str] = field(default_factory=list)
    _bar: Bar | None = None

    def __call__(self, event: events.Event) -> None:
        match event:
            case events.Planned():
                self.planned()
            case events.Started(kept_files=kept):
                self.kept_files = kept
                self._bar = Bar() if self.visible else None
            case events.Retried():
                self.retries += 1
            case events.Warned(message=message):
                self.warnings.append(message)
            case _ if self._bar is not None:
                self._draw(self._bar, event)

    def _draw(self, bar: Bar, event: events.Event) -> None:
        match event:
            case events.Progress(bytes_done=done, bytes_total=total):
                bar.update(done, total)
            case events.Verifying():
                bar.describe("checking")
            case _:
                pass

    def close(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None


class Bar:
    """A bar that counts bytes, on stderr; shown from the first update on."""

    def __init__(self, description: str = "converting") -> None:
        self._description = description
        self._progress: Progress | None = None
        self._task: TaskID | None = None

    def update(self, done: int, total: int) -> None:
        """Show that so many bytes are done."""
        progress, task = self._shown()
        progress.update(task, completed=done, total=total)

    def describe(self, description: str) -> None:
        """Change the word before the bar."""
        progress, task = self._shown()
        progress.update(task, description=description)

    def close(self) -> None:
        """Take the bar away and give the cursor back."""
        if self._progress is not None:
            self._progress.stop()

    def _shown(self) -> tuple[Progress, TaskID]:
        if self._progress is None or self._task is None:
            self._progress = _rich_progress()
            self._task = self._progress.add_task(self._description, total=None)
            self._progress.start()
        return self._progress, self._task


def _rich_progress() -> Progress:
    from rich.console import Console  # noqa: PLC0415 - a tenth of a second that only a terminal is worth
    from rich.progress import (  # noqa: PLC0415
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=Console(file=sys.stderr),
        transient=True,
    )
