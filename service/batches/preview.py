"""What a batch would do, found out without storing anything: which models are there already, above all."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial

from service.batches.drafts import Draft
from service.batches.planning import MOST_AT_ONCE, PlanningTooSlow, check_made
from service.jobs.planning import Planner
from service.jobs.records import NewJob
from workers.errors import UnshardError
from workers.manifest import MANIFEST_NAME
from workers.options import ConvertOptions
from workers.storage import FolderAddress, open_folder

TIME_S = 30.0
"""How long a request may look; what isn't found out by then is told as unknown."""

CONCURRENT_LOOKS = 16
_looks = ThreadPoolExecutor(CONCURRENT_LOOKS, "preview")
"""One for all requests, so that there are never more that wait for storage."""


def already_done(drafts: Sequence[Draft], planner: Planner, time_s: float = TIME_S) -> list[bool | None]:
    """Of each draft, whether its destination holds the model that it would make; None where that isn't known.

    Destinations without a manifest are told by one request each. Only for the others the source is planned, since
    nothing but the plan's fingerprint decides.
    """
    deadline = time.monotonic() + time_s
    jobs = [draft.job for draft in drafts]
    looks = [_looks.submit(_may_be_done, job, deadline) for job in jobs]
    wait(looks, max(0.0, deadline - time.monotonic()))
    # What hangs in a storage that does not answer keeps its thread, and nobody who asked.
    candidates = [look.result() if look.done() and not look.cancelled() else None for look in looks]
    for look in looks:
        look.cancel()
    with ThreadPoolExecutor(MOST_AT_ONCE, "preview") as pool:
        return list(pool.map(partial(_is_done, planner, deadline), jobs, candidates))


def _may_be_done(job: NewJob | None, deadline: float) -> bool | None:
    """False without a manifest at the destination."""
    if job is None:
        return False
    if time.monotonic() > deadline:
        return None
    options = ConvertOptions.from_dict(job.options)
    folder = open_folder(FolderAddress(job.destination, options.destination_profile))
    try:
        return folder.stat(MANIFEST_NAME) is not None
    except UnshardError:
        return None
    finally:
        folder.close()


def _is_done(planner: Planner, deadline: float, job: NewJob | None, candidate: bool | None) -> bool | None:  # noqa: FBT001
    if not candidate or job is None:
        return candidate
    try:
        options = ConvertOptions.from_dict(job.options)
        return check_made(planner, (job.source, job.destination), options, deadline - time.monotonic())
    except PlanningTooSlow:
        return None
    except UnshardError:
        # What can't be planned is not what the model there was made of.
        return False
