"""Looks at watches when they are due, in a few threads of this process."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial

from service.batches.planning import check_whole
from service.db.database import Database
from service.jobs.addresses import Places
from service.jobs.failures import describe
from service.jobs.planning import Planner
from service.jobs.runner import Runner
from service.loop import Loop
from service.watches.look import LONGEST_LOOK_S, Look, Tools
from service.watches.looks import Looks
from workers.errors import StorageError

log = logging.getLogger(__name__)

THREADS = 2
"""So that one slow prefix does not hold up all others."""

STOP_TIMEOUT_S = 20.0


class Watcher:
    """The threads; each takes whatever look is due. ``submitted`` is called after each, since jobs may have come."""

    @classmethod
    def of(cls, database: Database, places: Places, planner: Planner, runner: Runner, poll_s: float) -> Watcher:
        """Of the parts of a service."""
        tools = Tools(Looks(database, LONGEST_LOOK_S), places, partial(check_whole, planner), threading.Event())
        return cls(tools, poll_s, runner.wake)

    def __init__(self, tools: Tools, poll_s: float, submitted: Callable[[], None] = lambda: None) -> None:
        self._tools = tools
        self._submitted = submitted
        self._hanging: dict[str, Future[None]] = {}
        self._loop = Loop("watcher", self.look, poll_s, THREADS)

    def start(self) -> None:
        """Begin."""
        self._loop.start()

    def stop(self) -> None:
        """Claim no more looks, and end those under way before their next folder."""
        self._tools.stop.set()
        self._loop.stop(STOP_TIMEOUT_S)

    def look(self) -> bool:
        """Make one look that is due; False when none is.

        In a thread of its own, which is left behind when its storage does not answer at all, as disks of a network
        may: the watch says so until it does, and the others have their turn.
        """
        turn = self._tools.looks.claim()
        if turn is None:
            return False
        watch_id = turn.watch.id
        look = self._hanging.pop(watch_id, None)
        if look is None or look.done():
            look = Future()
            run = partial(_into, look, Look(turn, self._tools).run)
            threading.Thread(target=run, name=watch_id, daemon=True).start()
            with suppress(TimeoutError):
                look.result(LONGEST_LOOK_S)
        if not look.done():
            self._hanging[watch_id] = look
            log.warning("%s is not answered by its storage", watch_id)
            self._tools.looks.end(turn, describe(_no_answer(turn.watch.prefix)), again=False)
        self._submitted()
        return True


def _into(look: Future[None], run: Callable[[], None]) -> None:
    try:
        run()
    except BaseException as error:  # noqa: BLE001 - whoever waits for the look is to see it
        look.set_exception(error)
    else:
        look.set_result(None)


def _no_answer(prefix: str) -> StorageError:
    return StorageError(
        f"the storage of {prefix} does not answer: a look has waited for it for more than {LONGEST_LOOK_S:g} s",
        file=prefix,
        hint="Check its mount, or its network, on the machine of the service. The watch goes on when it answers.",
    )
