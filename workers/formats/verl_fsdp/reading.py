"""Read the rank files of a checkpoint: in order, several at a time, or in several processes.

Several at a time where waiting for a store is what takes time, processes where there is much to unpickle.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice

from workers.formats._processes import available_processes, map_in_processes
from workers.formats.verl_fsdp.folders import RankFiles
from workers.formats.verl_fsdp.ranks import RankTable, read_rank
from workers.storage import FileEntry, Folder, FolderAddress, open_folder

FILES_AT_ONCE = 8
"""Rank files asked of an object store at the same time; what is under way is held in memory."""

PIECES_WORTH_PROCESSES = 200_000
"""From here on, unpickling takes seconds, and starting helper processes a small share of them."""

Job = tuple[int, FileEntry]


def read_ranks(folder: Folder, ranks: RankFiles) -> Iterator[RankTable]:
    """Read the rank files in the order of ranks; an error ends it at the lowest rank that has one."""
    jobs = list(ranks.files.items())
    first = read_rank(folder, jobs[0][1], jobs[0][0])
    yield first
    processes = available_processes()
    if processes > 1 and len(first.names) * (len(jobs) - 1) >= PIECES_WORTH_PROCESSES:
        work = [(folder.address, entry, rank) for rank, entry in jobs[1:]]
        yield from map_in_processes(f"{__name__}:read_rank_at", work, processes)
    elif folder.is_local:
        for rank, entry in jobs[1:]:
            yield read_rank(folder, entry, rank)
    else:
        yield from _read_ahead(folder, jobs[1:])


def read_rank_at(job: tuple[FolderAddress, FileEntry, int]) -> RankTable:
    """Read a rank file in a process that has yet to open the folder."""
    address, entry, rank = job
    return read_rank(open_folder(address), entry, rank)


def _read_ahead(folder: Folder, jobs: Sequence[Job]) -> Iterator[RankTable]:
    """Read several files at once: the store answers while others are unpickled."""
    coming = iter(jobs)
    pool = ThreadPoolExecutor(FILES_AT_ONCE, thread_name_prefix="rank-files")
    try:
        waiting: deque[Future[RankTable]] = deque()
        for rank, entry in islice(coming, FILES_AT_ONCE):
            waiting.append(pool.submit(read_rank, folder, entry, rank))
        while waiting:
            yield waiting.popleft().result()
            for rank, entry in islice(coming, 1):
                waiting.append(pool.submit(read_rank, folder, entry, rank))
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
