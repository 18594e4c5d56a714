"""One look at a watch: which folders are there, which of them are whole and quiet, and what the others wait for."""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta

from service.batches.discovery import look_for
from service.batches.drafts import Ask, Drafter, Shape
from service.batches.naming import Found, Pattern
from service.jobs.addresses import NotAllowed, Places
from service.jobs.failures import describe
from service.jobs.records import JsonObject, NewJob, now
from service.jobs.store import BusyDestination, TooManyQueued
from service.jobs.submit import BadOption, read_options
from service.watches.looks import DestinationTaken, LookOver, Looks, Turn
from service.watches.records import Seen, Watch
from workers.errors import Cancelled, InvalidOption, UnshardError
from workers.options import ConvertOptions
from workers.storage import FolderAddress, open_folder

log = logging.getLogger(__name__)

LOOK_S = 60.0
"""After which a look leaves the rest to the next one, which then comes at once."""

PLAN_S = 120.0
"""For the metadata of one checkpoint to be read."""

LONGEST_LOOK_S = LOOK_S + 2 * PLAN_S
JUDGE_AGAIN = timedelta(minutes=10)
"""When a checkpoint that was found broken is planned again, though none of its files has changed: what it needs
besides them, such as a folder with its config, may be there by now."""

MOST_QUIET = timedelta(seconds=60)
CONCURRENT_LISTINGS = 8
MOST_FILES = 200_000
"""Of one checkpoint: several for each of tens of thousands of ranks. What holds more is something else."""

SETTLING, GONE = "settling", "gone"

CheckWhole = Callable[[str, ConvertOptions, float], None]


@dataclass(frozen=True, slots=True)
class Tools:
    """What a look works with. ``check_whole`` raises what is missing of a checkpoint, within so many seconds."""

    looks: Looks
    places: Places
    check_whole: CheckWhole
    stop: threading.Event


class Look:
    """The look of one turn."""

    def __init__(self, turn: Turn, tools: Tools) -> None:
        self._turn = turn
        self._watch = turn.watch
        self._tools = tools
        self._looks = tools.looks
        self._deadline = time.monotonic() + LOOK_S
        self._drafter = Drafter(shape_of(self._watch), tools.places)

    def run(self) -> None:
        """Look, judge, submit, and write down how it went."""
        try:
            error, again = None, self._look()
        except LookOver:
            return
        except (NotAllowed, UnshardError) as problem:
            error, again = describe(problem), False
        except BadOption as problem:
            error, again = describe(InvalidOption(str(problem), hint=problem.hint)), False
        except Exception as fault:
            log.exception("a look at %s broke", self._watch.id)
            error, again = describe(fault), False
        self._looks.end(self._turn, error, again=again)

    def _look(self) -> bool:
        """Whether folders are left that there was no time for."""
        watch = self._watch
        options = read_options(watch.template.get("options", {}))
        prefix = self._tools.places.check_source(watch.prefix, options)
        self._looks.max_queued(self._turn)
        found = look_for(prefix, Pattern.parse(watch.pattern), options.source_profile)
        seen = self._looks.seen(self._turn)
        open_ones = [each for each in found if _is_open(seen.get(each.source))]
        with ThreadPoolExecutor(CONCURRENT_LISTINGS, "watch") as pool:
            listings = list(pool.map(lambda each: _listing(each.source, options.source_profile), open_ones))
        self._note_gone(seen, found)
        for each, listing in zip(open_ones, listings, strict=True):
            if self._tools.stop.is_set() or time.monotonic() > self._deadline:
                return True
            self._judge(each, seen.get(each.source), listing)
        return False

    def _judge(self, found: Found, before: Seen | None, listing: str | UnshardError | None) -> None:
        turn, source = self._turn, found.source
        if isinstance(listing, UnshardError):
            if before is None:
                self._looks.note_listing(turn, source, None, describe(listing))
            else:
                self._looks.note_verdict(turn, source, describe(listing))
        elif before is None or listing is None or before.listing != listing or before.listing_since is None:
            self._looks.note_listing(turn, source, listing, _settling(before, listing))
        elif now() - before.listing_since >= quiet_for(self._watch) and _is_due(before):
            self._decide(found, listing)

    def _decide(self, found: Found, listing: str) -> None:
        """Submit a folder whose files have come to rest, or say why not."""
        turn, source = self._turn, found.source
        draft = self._drafter.draft(Ask(found))
        if draft.job is None:
            self._looks.note_verdict(turn, source, draft.error or {}, state="refused")
            return
        try:
            self._tools.check_whole(draft.job.source, ConvertOptions.from_dict(draft.job.options), PLAN_S)
        except Cancelled:
            return
        except Exception as error:
            # Whatever it is: the folder waits, and the others have their turn.
            if not isinstance(error, UnshardError):
                log.exception("%s could not be judged", source)
            self._looks.note_verdict(turn, source, describe(error))
            return
        if not self._tools.stop.is_set():
            self._submit(source, listing, draft.job)

    def _submit(self, source: str, listing: str, job: NewJob) -> None:
        try:
            job_id = self._looks.submit(self._turn, source, listing, job)
        except DestinationTaken as error:
            self._looks.note_verdict(self._turn, source, describe(error), state="refused")
        except BusyDestination as error:
            hint = "It becomes a job when the other one has ended."
            told: JsonObject = {"kind": "destination", "type": "destination-busy", "message": str(error), "hint": hint}
            self._looks.note_verdict(self._turn, source, told)
        except TooManyQueued as error:
            hint = "It becomes a job when others have started."
            told = {"kind": "resource", "type": "too-many-queued", "message": str(error), "hint": hint}
            self._looks.note_verdict(self._turn, source, told)
        else:
            log.info("%s of %s became %s", source, self._watch.id, job_id)

    def _note_gone(self, seen: dict[str, Seen], found: Sequence[Found]) -> None:
        there = {each.source for each in found}
        for source, before in seen.items():
            if source not in there and before.state == "waiting" and (before.error or {}).get("type") != GONE:
                self._looks.note_listing(self._turn, source, None, _GONE)


def shape_of(watch: Watch) -> Shape:
    """What the jobs of a watch have in common."""
    template = watch.template
    return Shape(
        watch.owner,
        template["destination"],
        template.get("options", {}),
        template.get("labels", {}),
        template.get("priority", 0),
        watch_id=watch.id,
    )


def quiet_for(watch: Watch) -> timedelta:
    """How long no file of a checkpoint may have changed: less than from one look to the next, so that two will do."""
    return min(timedelta(seconds=watch.interval_s), MOST_QUIET) / 2


def _is_open(before: Seen | None) -> bool:
    return before is None or before.state == "waiting"


def _is_due(before: Seen) -> bool:
    """Whether a folder at rest is to be planned; not again if only a change of its files could change the result."""
    error = before.error
    if error is None or error["type"] in (SETTLING, GONE) or error["kind"] != "input":
        return True
    return now() - before.updated_at > JUDGE_AGAIN


def _listing(source: str, profile: str | None) -> str | UnshardError | None:
    """A digest of the names, sizes and versions of all files; None without any, an error where it can't be had."""
    try:
        folder = open_folder(FolderAddress(source, profile))
        try:
            entries = folder.list(most=MOST_FILES)
        finally:
            folder.close()
    except UnshardError as error:
        return error
    if not entries:
        return None
    digest = hashlib.sha256()
    for entry in entries:
        digest.update(f"{entry.path}\0{entry.size_bytes}\0{entry.version}\0".encode())
    return digest.hexdigest()


def _settling(before: Seen | None, listing: str | None) -> JsonObject:
    if listing is None:
        message = "there is no file in it yet"
    elif before is None or before.listing is None:
        message = "it was seen for the first time"
    else:
        message = "its files have changed since the last look"
    return {"kind": "input", "type": SETTLING, "message": message, "hint": SETTLING_HINT}


SETTLING_HINT = "It becomes a job when two looks find the same files and none is missing."
_GONE: JsonObject = {
    "kind": "input",
    "type": GONE,
    "message": "it was there at an earlier look and is gone",
    "hint": "It is taken up again when it comes back.",
}
