"""Plans outside of requests and transactions, for whoever has to know whether a checkpoint is whole."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

from workers.convert import is_made, plan_source
from workers.errors import InsufficientResources, UnshardError
from workers.options import ConvertOptions

MOST_AT_ONCE = 4
"""Plans under way in this process: each may hold the metadata of a large checkpoint."""

Answer = TypeVar("Answer")
_slots = threading.BoundedSemaphore(MOST_AT_ONCE)


class PlanningTooSlow(InsufficientResources):
    """A checkpoint's metadata could not be read in the time that is given to it."""

    code = "timeout"


def check_whole(source: str, options: ConvertOptions, limit_s: float) -> None:
    """Plan a conversion on metadata alone; what is missing or broken is the ``UnshardError`` that it raises."""
    _within(limit_s, source, lambda: plan_source(source, options))


def check_made(source: str, destination: str, options: ConvertOptions, limit_s: float) -> bool:
    """Whether the destination already holds the model that this conversion would make."""
    return _within(limit_s, source, lambda: is_made(plan_source(source, options), destination))


def _within(limit_s: float, source: str, work: Callable[[], Answer]) -> Answer:
    """The answer of work that is waited for no longer than that; it keeps its slot until it really ends."""
    deadline = time.monotonic() + limit_s
    if not _slots.acquire(timeout=max(limit_s, 0)):
        raise _too_slow(source, limit_s)
    answers: list[Answer] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            answers.append(work())
        except BaseException as error:  # noqa: BLE001 - raised again in the thread that waits
            errors.append(error)
        finally:
            _slots.release()

    thread = threading.Thread(target=run, name="planning", daemon=True)
    thread.start()
    thread.join(max(deadline - time.monotonic(), 0))
    if errors:
        raise errors[0]
    if not answers:
        raise _too_slow(source, limit_s)
    return answers[0]


def _too_slow(source: str, limit_s: float) -> UnshardError:
    return PlanningTooSlow(
        f"the metadata of {source} could not be read within {limit_s:.0f} s",
        file=source,
        hint="Check that its storage answers; large checkpoints can be handed in as jobs, which have more time.",
    )
