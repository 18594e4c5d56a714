"""The grid of a training run: tensor, pipeline and expert parallelism, which file is which rank, what is missing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from workers.errors import GeometryMismatch, IncompleteCheckpoint
from workers.formats._format import join
from workers.formats._steps import STILL_WRITING
from workers.formats.megatron_legacy.folders import RankFolder
from workers.formats.megatron_legacy.rank_file import RankContent

_GRID_KEYS = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size")


@dataclass(frozen=True, slots=True)
class Rank:
    """A file's place in the grid."""

    tensor: int
    pipeline: int
    expert: int


@dataclass(frozen=True, slots=True)
class Grid:
    """Sizes of the parallel groups; ``expert_tensor`` is that of tensor parallelism inside of experts."""

    tensor: int
    pipeline: int
    expert: int
    expert_tensor: int

    def expert_place(self, rank: Rank) -> tuple[int, int]:
        """Rank and ranks of the tensor parallelism inside of experts."""
        return rank.tensor % self.expert_tensor, self.expert_tensor

    def folder_name(self, tensor: int | None, pipeline: int, expert: int | None) -> str:
        """The name of a rank's folder; None stands for any."""
        name = f"mp_rank_{_number(tensor, 2)}"
        name += f"_{_number(pipeline, 3)}" if self.pipeline > 1 else ""
        return name + (f"_{_number(expert, 3)}" if self.expert > 1 else "")


def _number(value: int | None, width: int) -> str:
    return "*" if value is None else f"{value:0{width}d}"


def find_grid(folders: Sequence[RankFolder], first: RankContent) -> tuple[Grid, list[Rank]]:
    """The grid, and each folder's place in it. ``first`` is the content of the first folder's file.

    Arguments of the run tell where there are any, else the numbers that occur: a second one is the pipeline rank,
    as verl has it. Raises ``GeometryMismatch`` for numbers that don't fit.
    """
    told = {key: value for key, value in first.arguments.items() if type(value) is int and value > 0}
    columns = [max(column) + 1 for column in zip(*(folder.numbers for folder in folders), strict=False)]
    sizes = {len(folder.numbers) for folder in folders}
    if len(sizes) != 1:
        names = ", ".join(sorted({folder.name for folder in folders}, key=len)[:: max(1, len(folders) - 1)])
        raise _mixed(names, "names of one form")
    tensor = told.get("tensor_model_parallel_size", columns[0])
    pipeline = told.get("pipeline_model_parallel_size")
    expert = told.get("expert_model_parallel_size")
    if pipeline is None or expert is None:
        pipeline, expert = _by_numbers(columns, pipeline, expert)
    expert_tensor = told.get("expert_tensor_parallel_size", tensor)
    if tensor % expert_tensor:
        raise _mixed(f"expert_tensor_parallel_size {expert_tensor}", f"a divisor of the tensor-parallel size {tensor}")
    grid = Grid(tensor, pipeline, expert, expert_tensor)
    return grid, [_rank(folder, grid) for folder in folders]


def _by_numbers(columns: Sequence[int], pipeline: int | None, expert: int | None) -> tuple[int, int]:
    """Sizes of the pipeline and of expert parallelism by the numbers that occur: pipeline first."""
    if len(columns) == 3:
        return columns[1], columns[2]
    if len(columns) == 2 and pipeline != 1:
        return columns[1], expert or 1
    return pipeline or 1, columns[1] if len(columns) == 2 else expert or 1


def _rank(folder: RankFolder, grid: Grid) -> Rank:
    numbers = list(folder.numbers)
    wanted = 1 + (grid.pipeline > 1) + (grid.expert > 1)
    if len(numbers) != wanted:
        expected = grid.folder_name(0, 0, 0)
        raise _mixed(folder.name, f"names such as {expected}, as the arguments in the files tell")
    tensor = numbers.pop(0)
    pipeline = numbers.pop(0) if grid.pipeline > 1 else 0
    expert = numbers.pop(0) if grid.expert > 1 else 0
    if tensor >= grid.tensor or pipeline >= grid.pipeline or expert >= grid.expert:
        raise _mixed(folder.name, f"ranks of a run with TP {grid.tensor}, PP {grid.pipeline}, EP {grid.expert}")
    return Rank(tensor, pipeline, expert)


def check_all_there(grid: Grid, ranks: Sequence[Rank], place: str, told: Mapping[str, Any]) -> None:
    """Raise ``IncompleteCheckpoint`` for a tensor rank of a stage, or an expert rank, that no file has.

    With experts the files are not all pairs of tensor and expert ranks, only those that a data-parallel group saved.
    """
    there = {(rank.tensor, rank.pipeline) for rank in ranks}
    for pipeline in range(grid.pipeline):
        for tensor in range(grid.tensor):
            if (tensor, pipeline) not in there:
                name = join(place, grid.folder_name(tensor, pipeline, None))
                raise _missing(grid, name, f"tensor-parallel rank {tensor}{_stage(grid, pipeline)}", told)
    experts = {(rank.pipeline, rank.expert, grid.expert_place(rank)[0]) for rank in ranks}
    for pipeline in range(grid.pipeline):
        for expert in range(grid.expert):
            for tensor in range(min(grid.expert_tensor, grid.tensor)):
                if (pipeline, expert, tensor) not in experts:
                    known = tensor if grid.expert_tensor == grid.tensor else None
                    name = join(place, grid.folder_name(known, pipeline, expert))
                    raise _missing(grid, name, f"expert-parallel rank {expert}{_stage(grid, pipeline)}", told)


def check_one_run(contents: Sequence[RankContent]) -> None:
    """Raise ``GeometryMismatch`` where files were saved at different steps or by runs on other grids."""
    first = contents[0]
    for content in contents[1:]:
        keys = ("iteration", *_GRID_KEYS)
        here, there = ((c.iteration, *(c.arguments.get(key) for key in _GRID_KEYS)) for c in (content, first))
        for key, found, expected in zip(keys, here, there, strict=True):
            if found != expected:
                raise GeometryMismatch(
                    f"{content.entry.path} has the {key} {found}, but {first.entry.path} has {expected}",
                    file=content.entry.path,
                    expected=f"{key} {expected}",
                    found=f"{key} {found}",
                    hint="The files are of different runs or steps: bring together those of one checkpoint.",
                )


def _stage(grid: Grid, pipeline: int) -> str:
    return f" of pipeline stage {pipeline}" if grid.pipeline > 1 else ""


def _missing(grid: Grid, name: str, which: str, told: Mapping[str, Any]) -> IncompleteCheckpoint:
    by = "the arguments in the files say" if told else "by the folders that are there, it is"
    sizes = f"TP {grid.tensor}, PP {grid.pipeline}, EP {grid.expert}"
    return IncompleteCheckpoint(
        f"{name} ({which}) is missing: {by} {sizes}",
        file=name,
        expected=f"{name} with the rank's file",
        found="no such file",
        hint=f"Without a shared disk each node saves only its own ranks: copy them together. {STILL_WRITING}",
    )


def _mixed(found: str, expected: str) -> GeometryMismatch:
    return GeometryMismatch(
        f"the folders of ranks are not those of one run: found {found}, expected {expected}",
        expected=expected,
        found=found,
        hint="Bring together the files of one checkpoint, and move those of another run elsewhere.",
    )
