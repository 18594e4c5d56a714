"""Read the rank files of a checkpoint one after the other, or several at a time where waiting is what takes time."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice

from workers.formats.verl_fsdp.folders import RankFiles
from workers.formats.verl_fsdp.ranks import RankTable, read_rank
from workers.storage import Folder

FILES_AT_ONCE = 8
"""Rank files asked of an object store at the same time; what is under way is held in memory."""


def read_ranks(folder: Folder, ranks: RankFiles) -> Iterator[RankTable]:
    """Read the rank files in the order of ranks; an error ends it at the lowest rank that has one."""
    jobs = iter(ranks.files.items())
    if folder.is_local:
        # Reading a local file is work for the interpreter alone, which threads cannot share.
        for rank, entry in jobs:
            yield read_rank(folder, entry, rank)
        return
    pool = ThreadPoolExecutor(FILES_AT_ONCE, thread_name_prefix="rank-files")
    try:
        waiting: deque[Future[RankTable]] = deque()
        for rank, entry in islice(jobs, FILES_AT_ONCE):
            waiting.append(pool.submit(read_rank, folder, entry, rank))
        while waiting:
            yield waiting.popleft().result()
            for rank, entry in islice(jobs, 1):
                waiting.append(pool.submit(read_rank, folder, entry, rank))
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
