"""Read the rank files of a checkpoint: in order, several at a time, or in several processes.

Several at a time where waiting for a store is what takes time, processes where there is much to unpickle.
"""

from __future__ import annotations

from collections.abc import Generator

from workers.formats._processes import available_processes, map_in_processes
from workers.formats._reading import read_ahead
from workers.formats.verl_fsdp.folders import RankFiles
from workers.formats.verl_fsdp.ranks import RankTable, read_rank
from workers.storage import FileEntry, Folder, FolderAddress, open_folder

PIECES_WORTH_PROCESSES = 200_000
"""From here on, unpickling takes seconds, and starting helper processes a small share of them."""

Job = tuple[int, FileEntry]


def read_ranks(folder: Folder, ranks: RankFiles) -> Generator[RankTable, None, None]:
    """Read the rank files in the order of ranks; an error ends it at the lowest rank that has one.

    Close it when done: helpers may be under way.
    """
    jobs = list(ranks.files.items())
    first = read_rank(folder, jobs[0][1], jobs[0][0])
    yield first
    processes = available_processes()
    if processes > 1 and len(first.names) * (len(jobs) - 1) >= PIECES_WORTH_PROCESSES:
        work = [(folder.address, entry, rank) for rank, entry in jobs[1:]]
        yield from map_in_processes(f"{__name__}:read_rank_at", work, processes)
    else:
        with read_ahead(folder, jobs[1:], lambda job: read_rank(folder, job[1], job[0])) as coming:
            yield from coming


def read_rank_at(job: tuple[FolderAddress, FileEntry, int]) -> RankTable:
    """Read a rank file in a process that has yet to open the folder."""
    address, entry, rank = job
    return read_rank(open_folder(address), entry, rank)
