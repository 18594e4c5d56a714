"""Read many files in order, several at a time where waiting for a store is what takes time.

The reader ends with the ``with`` that it was opened by, not when a generator happens to be collected: an error keeps
the frames of its traceback, and what they hold, alive.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import islice
from typing import TypeVar

from workers.storage import Folder

FILES_AT_ONCE = 8
"""Files asked of an object store at the same time; what is under way is held in memory."""

Job = TypeVar("Job")
Result = TypeVar("Result")


@contextmanager
def read_ahead(folder: Folder, jobs: Iterable[Job], read: Callable[[Job], Result]) -> Iterator[Iterator[Result]]:
    """Iterate over ``read(job)`` in the order of ``jobs``; an error ends it at the first job that has one.

    At most ``FILES_AT_ONCE`` jobs are under way or wait to be taken. Leaving the ``with`` starts no further one and
    waits for those under way. On a local disk each job is done when its result is asked for.
    """
    if folder.is_local:
        yield map(read, jobs)
        return
    pool = ThreadPoolExecutor(FILES_AT_ONCE, thread_name_prefix="read-ahead")
    try:
        yield _in_order(pool, iter(jobs), read)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _in_order(pool: ThreadPoolExecutor, jobs: Iterator[Job], read: Callable[[Job], Result]) -> Iterator[Result]:
    waiting: deque[Future[Result]] = deque(pool.submit(read, job) for job in islice(jobs, FILES_AT_ONCE))
    while waiting:
        yield waiting.popleft().result()
        waiting.extend(pool.submit(read, job) for job in islice(jobs, 1))
