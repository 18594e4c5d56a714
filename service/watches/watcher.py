"""Looks at watches when they are due, in a few threads of this process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

from service.batches.planning import check_whole
from service.db.database import Database
from service.jobs.addresses import Places
from service.jobs.planning import Planner
from service.jobs.runner import Runner
from service.loop import Loop
from service.watches.look import LONGEST_LOOK_S, Look, Tools
from service.watches.looks import Looks

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
        self._loop = Loop("watcher", self.look, poll_s, THREADS)

    def start(self) -> None:
        """Begin."""
        self._loop.start()

    def stop(self) -> None:
        """Claim no more looks, and end those under way before their next folder."""
        self._tools.stop.set()
        self._loop.stop(STOP_TIMEOUT_S)

    def look(self) -> bool:
        """Make one look that is due; False when none is."""
        turn = self._tools.looks.claim()
        if turn is None:
            return False
        Look(turn, self._tools).run()
        self._submitted()
        return True
