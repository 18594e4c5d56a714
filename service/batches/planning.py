"""Whether checkpoints are whole and models are there, asked of the processes that read metadata."""

from __future__ import annotations

from service.jobs.planning import Planner, TookTooLong, UnexpectedFault
from service.room import Overloaded
from workers.errors import InsufficientResources, InternalError, UnshardError
from workers.options import ConvertOptions

MOST_AT_ONCE = 2
"""Plans that one request or all watches ask for at once: fewer than there may be, so that others get through."""


class PlanningTooSlow(InsufficientResources):
    """A checkpoint's metadata could not be read in the time that is given to it."""

    code = "timeout"


def check_whole(planner: Planner, source: str, options: ConvertOptions, limit_s: float) -> None:
    """Plan a conversion on metadata alone; what is missing or broken is the ``UnshardError`` that it raises."""
    try:
        planner.check(source, options, limit_s)
    except TookTooLong:
        raise _too_slow(source, limit_s) from None
    except Overloaded as overloaded:
        raise PlanningTooSlow(str(overloaded), file=source, hint="It is tried again.") from None
    except UnexpectedFault as fault:
        raise _fault(source, fault) from None


def check_made(planner: Planner, job: tuple[str, str], options: ConvertOptions, limit_s: float) -> bool:
    """Whether the second place of a job already holds the model that it would make of the first."""
    source, destination = job
    try:
        return planner.made(source, destination, options, limit_s) is not None
    except (TookTooLong, Overloaded):
        raise _too_slow(source, limit_s) from None
    except UnexpectedFault as fault:
        raise _fault(source, fault) from None


def _too_slow(source: str, limit_s: float) -> UnshardError:
    return PlanningTooSlow(
        f"the metadata of {source} could not be read within {limit_s:.0f} s",
        file=source,
        hint="Check that its storage answers; large checkpoints can be handed in as jobs, which have more time.",
    )


def _fault(source: str, fault: UnexpectedFault) -> UnshardError:
    return InternalError(
        f"an unexpected fault while the metadata of {source} was read: {fault.name}",
        file=source,
        hint="The service's log has the details.",
    )
