"""Looks at watches when they are due, in a few threads of this process."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from functools import partial

from sqlalchemy.exc import SQLAlchemyError

from service.batches.planning import check_whole
from service.db.database import Database
from service.jobs.addresses import Places
from service.jobs.planning import Planner
from service.jobs.runner import Runner
from service.watches.look import LONGEST_LOOK_S, Look, Tools
from service.watches.looks import Looks

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
        self._stop = tools.stop
        self._submitted = submitted
        self._poll_s = poll_s
        self._threads = [
            threading.Thread(target=self._loop, name=f"watcher-{number}", daemon=True) for number in range(THREADS)
        ]

    def start(self) -> None:
        """Begin."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Claim no more looks, and end those under way before their next folder."""
        self._stop.set()
        for thread in self._threads:
            if thread.is_alive():
                thread.join(STOP_TIMEOUT_S)

    def _loop(self) -> None:
        while not self._stop.is_set():
            try:
                if self.look():
                    continue
            except SQLAlchemyError:
                log.warning("the job store does not answer", exc_info=True)
            except Exception:
                log.exception("the watcher stumbled and goes on")
            self._stop.wait(self._poll_s)

    def look(self) -> bool:
        """Make one look that is due; False when none is."""
        turn = self._tools.looks.claim()
        if turn is None:
            return False
        Look(turn, self._tools).run()
        self._submitted()
        return True
