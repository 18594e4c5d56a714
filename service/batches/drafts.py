"""From what a batch asks for to jobs that may be stored: destinations, options and places of each item, checked."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from service.batches.naming import Found, Template
from service.jobs.addresses import NotAllowed, Places
from service.jobs.failures import describe
from service.jobs.records import JsonObject, NewJob
from service.jobs.submit import BadOption, read_options
from service.schemas import MOST_LABELS
from workers.errors import InputError, InvalidOption, UnshardError
from workers.options import ConvertOptions


class DuplicateDestination(InputError):
    """Two items would write to the same place."""

    code = "duplicate-destination"


@dataclass(frozen=True, slots=True)
class Ask:
    """One item as it was asked for or found. ``destination`` None: as the template has it.

    ``pointer`` is where in the request it stands, as a JSON Pointer.
    """

    found: Found
    destination: str | None = None
    options: JsonObject = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)
    pointer: str = ""


@dataclass(frozen=True, slots=True)
class Shape:
    """What the jobs of one request have in common.

    ``if_done`` says what becomes of a model that is there: ``skip`` or ``redo``; None: what the options say.
    """

    owner: str
    destination: str | None = None
    options: JsonObject = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)
    priority: int = 0
    if_done: str | None = None
    watch_id: str | None = None


@dataclass(frozen=True, slots=True)
class Draft:
    """An item that is going to be a job, or the error for which it can't be; ``pointer`` is the place at fault."""

    source: str
    destination: str
    job: NewJob | None = None
    error: JsonObject | None = None
    pointer: str = ""

    def refused(self, error: JsonObject, pointer: str) -> Draft:
        """The same item, without a job."""
        return replace(self, job=None, error=error, pointer=pointer)


class Drafter:
    """Makes drafts of one shape. Options that many items share are read once."""

    def __init__(self, shape: Shape, places: Places) -> None:
        self._shape = shape
        self._places = places
        self._template = Template.parse(shape.destination) if shape.destination is not None else None
        self._read: dict[str, ConvertOptions] = {}

    def drafts(self, asks: Iterable[Ask]) -> list[Draft]:
        """A draft of each item; of several with one destination the first has it."""
        taken: dict[str, str] = {}
        made = []
        for number, ask in enumerate(asks):
            draft = self.draft(ask)
            if draft.job is not None and (first := taken.get(draft.job.destination)) is not None:
                draft = draft.refused(describe(_duplicate(draft.job, first)), self._destination_pointer(ask))
            elif draft.job is not None:
                taken[draft.job.destination] = f"item {number}, {draft.source}"
            made.append(draft)
        return made

    def draft(self, ask: Ask) -> Draft:
        """A draft of one item."""
        blank = Draft(ask.found.source, ask.destination or "")
        try:
            destination = self._destination(ask)
        except UnshardError as error:
            return blank.refused(describe(error), self._destination_pointer(ask))
        blank = replace(blank, destination=destination)
        try:
            options = self._options(ask)
        except BadOption as error:
            return blank.refused(
                _bad_option(error), f"{ask.pointer}/options" + (f"/{error.name}" if error.name else "")
            )
        return self._placed(ask, blank, options)

    def _placed(self, ask: Ask, blank: Draft, options: ConvertOptions) -> Draft:
        labels = {**self._shape.labels, **ask.labels}
        if len(labels) > MOST_LABELS:
            hint = "Leave some out of the template, or of the item."
            error = InvalidOption(f"a job has at most {MOST_LABELS} labels, with those of the template", hint=hint)
            return blank.refused(describe(error), f"{ask.pointer}/labels")
        try:
            source = self._places.check_source(blank.source, options)
        except (NotAllowed, UnshardError) as error:
            return blank.refused(describe(error), f"{ask.pointer}/source" if ask.pointer else "/discover/prefix")
        try:
            destination = self._places.destinations.check(blank.destination)
        except (NotAllowed, UnshardError) as error:
            return blank.refused(describe(error), self._destination_pointer(ask))
        shape = self._shape
        job = NewJob(
            source,
            destination,
            self._values(ask),
            labels,
            shape.priority,
            shape.owner,
            watch_id=shape.watch_id,
        )
        return replace(blank, job=job)

    def _destination(self, ask: Ask) -> str:
        if ask.destination is not None:
            return ask.destination
        if self._template is None:
            raise InvalidOption(
                "there is neither a destination nor a template for one",
                hint="Give each item a destination, or template.destination.",
            )
        return self._template.destination(ask.found)

    @staticmethod
    def _destination_pointer(ask: Ask) -> str:
        return f"{ask.pointer}/destination" if ask.pointer and ask.destination is not None else "/template/destination"

    def _values(self, ask: Ask) -> JsonObject:
        values = {**self._shape.options, **ask.options}
        return {**values, "overwrite": True} if self._shape.if_done == "redo" else values

    def _options(self, ask: Ask) -> ConvertOptions:
        values = self._values(ask)
        try:
            key = json.dumps(values, sort_keys=True)
        except ValueError:
            key = ""
        read = self._read.get(key) if key else None
        if read is None:
            read = self._read[key] = read_options(values)
        if self._shape.if_done == "skip" and (read.overwrite or not read.resume):
            name = "overwrite" if read.overwrite else "resume"
            hint = 'Ask for "if_done": "redo" to make models again that are there.'
            message = f"option {name}: a model that is there would be made again, but if_done says skip"
            raise BadOption(name, InvalidOption(message, hint=hint))
        return read


def _bad_option(error: BadOption) -> JsonObject:
    hint = error.hint or "GET /v1/formats lists the options and their values."
    return describe(InvalidOption(str(error), hint=hint))


def _duplicate(job: NewJob, first: str) -> UnshardError:
    return DuplicateDestination(
        f"{job.destination} is also the destination of {first}",
        hint="Give each checkpoint a destination of its own, by a field such as {path} or {flat} in the template.",
    )
