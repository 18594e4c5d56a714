"""The fp32 weights of one model-parallel rank, from the flat partitions of its data-parallel ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from math import prod
from typing import NamedTuple, TypeVar

from workers.errors import GeometryMismatch, IncompleteCheckpoint
from workers.formats._deepspeed.assembly import Assembly, Local, Run
from workers.formats._deepspeed.flat import DoesNotFitError, Fragment, split_each, split_group
from workers.formats._deepspeed.states import ModelStates, Partition, read_model_states, read_partition, refuse
from workers.formats._deepspeed.tags import ONE_CHECKPOINT, Rank, TagFiles, missing_model_rank
from workers.formats._format import Listing, join
from workers.formats._reading import read_ahead
from workers.formats._steps import STILL_WRITING
from workers.geometry import Shape
from workers.storage import FileEntry, Folder

_SHOWN = 8

Read = TypeVar("Read")


def read_all(
    folder: Folder, files: Mapping[Rank, FileEntry], read: Callable[[Folder, FileEntry, Rank], Read]
) -> list[Read]:
    """Read files in the order of their ranks; several at a time where waiting for a store is what takes time."""
    with read_ahead(folder, files.items(), lambda job: read(folder, job[1], job[0])) as coming:
        return list(coming)


def read_rank(listing: Listing, files: TagFiles, mp_rank: int) -> tuple[list[ModelStates], list[Partition]]:
    """Read one model-parallel rank: its model states, all of them only where each holds a part of frozen weights."""
    partitions = read_partitions(listing.folder, files, mp_rank)
    own = {rank: entry for rank, entry in files.model.items() if rank[0] == mp_rank}
    head = dict([next(iter(own.items()))])
    states = read_all(listing.folder, head, read_model_states)
    is_sharded = bool(partitions) and partitions[0].stage == 3
    if not is_sharded or not states[0].frozen:
        return states, partitions
    return [*states, *read_frozen_parts(listing, files, states[0], len(partitions))], partitions


def read_frozen_parts(listing: Listing, files: TagFiles, first: ModelStates, count: int) -> list[ModelStates]:
    """Read the model states of the data-parallel ranks behind the first, of ``count`` in all.

    Each holds a part of every frozen parameter, and says nowhere which: a rank that is missing moves those behind it.
    """
    mp_rank = first.file.rank[0]
    own = {rank[1]: entry for rank, entry in files.model.items() if rank[0] == mp_rank}
    missing = next((rank for rank in range(count) if rank not in own), None)
    if missing is not None:
        name = join(files.tag.path, f"zero_pp_rank_{missing}_mp_rank_{mp_rank:02d}_model_states.pt")
        raise IncompleteCheckpoint(
            f"{name} is missing: it holds a part of each of the {len(first.frozen)} frozen parameters",
            file=name,
            expected=f"{count} files of model states",
            found=f"{len(own)}",
            hint=f"Each node saves the files of its own ranks: copy them together. {STILL_WRITING}",
        )
    return read_all(listing.folder, {(mp_rank, rank): own[rank] for rank in range(1, count)}, read_model_states)


def check_world(files: TagFiles, first: ModelStates) -> None:
    """Compare the number of model-parallel ranks with what the states say."""
    told, ranks = first.mp_world_size, files.model_ranks
    if told is None or told == len(ranks):
        return
    reason = f"{first.file.path} says mp_world_size {told}"
    if told > len(ranks):
        raise missing_model_rank(files, len(ranks), reason)
    beyond = next(entry.path for (rank, _), entry in files.model.items() if rank == ranks[told])
    raise GeometryMismatch(
        f"{reason}, but there is also {beyond}",
        file=beyond,
        expected=f"model states of {told} model-parallel rank{'s' if told != 1 else ''}",
        found=f"those of {len(ranks)}",
        hint=f"It is left over from a run with more ranks: move it elsewhere. {ONE_CHECKPOINT}",
    )


def read_partitions(folder: Folder, files: TagFiles, mp_rank: int) -> list[Partition]:
    """The partitions of one model-parallel rank by data-parallel rank; all are there, and of one kind."""
    own = {rank: entry for rank, entry in files.optimizer.items() if rank[0] == mp_rank}
    partitions = read_all(folder, own, read_partition)
    if not partitions:
        return []
    first = partitions[0]
    expected = max(first.counts, default=len(partitions))
    if len(set(first.counts)) > 1:
        refuse(first.file.path, "groups in equally many partitions", f"partition_count {list(first.counts)}")
    ranks = [partition.file.rank[1] for partition in partitions]
    _check_ranks(files, mp_rank, ranks, expected)
    for partition in partitions[1:]:
        here, there = (
            (part.stage, part.counts, len(part.pieces), part.paddings and list(map(len, part.paddings)))
            for part in (partition, first)
        )
        if here != there:
            said = "stage {}, partition_count {}, {} groups".format(*here[:3])
            expected_text = "stage {}, partition_count {}, {} groups".format(*there[:3])
            raise GeometryMismatch(
                f"{partition.file.path} has {said}, but {first.file.path} {expected_text}",
                file=partition.file.path,
                expected=expected_text,
                found=said,
                hint=ONE_CHECKPOINT,
            )
    return partitions


def _check_ranks(files: TagFiles, mp_rank: int, ranks: Sequence[int], expected: int) -> None:
    """Compare the files that are there with the number of partitions that they claim to be."""
    beyond = [rank for rank in ranks if rank >= expected]
    if beyond:
        name = files.optimizer_name((mp_rank, beyond[0]))
        raise GeometryMismatch(
            f"the fp32 weights are in {expected} partitions (partition_count), but there is also {name}",
            file=name,
            expected=f"{expected} files, of the ranks 0 to {expected - 1}",
            found=f"{len(ranks)} file{'s' if len(ranks) != 1 else ''}",
            hint=f"It is left over from a run with more ranks: move it elsewhere. {ONE_CHECKPOINT}",
        )
    there = set(ranks)
    count = expected - len(there)
    if count:
        absent = islice((rank for rank in range(expected) if rank not in there), _SHOWN)
        missing = [files.optimizer_name((mp_rank, rank)) for rank in absent]
        listed = ", ".join(missing) + (f" and {count - _SHOWN} more" if count > _SHOWN else "")
        raise IncompleteCheckpoint(
            f"{listed} {'is' if count == 1 else 'are'} missing: the fp32 weights are in {expected} partitions "
            f"(partition_count), and {len(ranks)} files are there",
            file=missing[0],
            expected=f"{expected} files *zero_pp_rank_*_mp_rank_{mp_rank:02d}_optim_states.pt",
            found=f"{len(ranks)}",
            hint=f"Each node saves the files of its own ranks: copy them together. {STILL_WRITING}",
        )


def fp32_weights(assembly: Assembly, model: ModelStates, partitions: Sequence[Partition]) -> dict[str, Local]:
    """Where the fp32 weights of a model-parallel rank lie."""
    weights: dict[str, Local] = {}
    if not partitions:
        return weights
    for shapes, ranks, fragments in _groups(model, partitions):
        placed = [[_place(assembly, partition, number) for number in numbers] for partition, numbers in ranks]
        for name, shape in shapes.items():
            if name in weights:
                refuse(model.file.path, "each parameter in one group", f"{name} in two")
            weights[name] = Local("F32", shape)
        for fragment in fragments:
            runs = weights[fragment.name].runs
            runs.extend(_runs(fragment, placed[fragment.rank]))
    return weights


class _Group(NamedTuple):
    shapes: Mapping[str, Shape]
    ranks: list[tuple[Partition, range]]
    """For each rank the numbers of its pieces that follow on each other."""
    fragments: Iterator[Fragment]


class _Placed(NamedTuple):
    storage: int
    offset: int
    numel: int


def _groups(model: ModelStates, partitions: Sequence[Partition]) -> Iterator[_Group]:
    """The flat groups: one by one at stages 1 and 2; at stage 3 all in a row, since each is filled exactly."""
    if partitions[0].stage == 3:
        shapes = _joined(model)
        ranks = [(partition, range(len(partition.pieces))) for partition in partitions]
        lengths = [sum(piece.shape[0] for piece in partition.pieces) for partition in partitions]
        yield _Group(shapes, ranks, _checked(split_each(shapes, lengths), model, partitions[0], "all groups"))
        return
    first = partitions[0]
    paddings: Sequence[Sequence[int] | None] = first.paddings or [None] * len(model.groups)
    if not len(first.pieces) == len(model.groups) == len(paddings):
        raise GeometryMismatch(
            f"{first.file.path} has {len(first.pieces)} groups of fp32 weights, but {model.file.path} describes "
            f"{len(model.groups)}",
            file=first.file.path,
            expected=f"{len(model.groups)} groups (param_shapes)",
            found=f"{len(first.pieces)}",
            hint=ONE_CHECKPOINT,
        )
    for number, (shapes, gaps) in enumerate(zip(model.groups, paddings, strict=True)):
        if gaps is not None and len(gaps) != len(shapes):
            refuse(first.file.path, f"{len(shapes)} param_alignment_paddings for group {number}", f"{len(gaps)}")
        lengths = [partition.pieces[number].shape[0] for partition in partitions]
        ranks = [(partition, range(number, number + 1)) for partition in partitions]
        fragments = split_group(shapes, lengths, gaps)
        yield _Group(shapes, ranks, _checked(fragments, model, first, f"group {number}"))


def _joined(model: ModelStates) -> dict[str, Shape]:
    shapes = dict(chain.from_iterable(group.items() for group in model.groups))
    if len(shapes) != sum(map(len, model.groups)):
        refuse(model.file.path, "each parameter in one group of param_shapes", "some in two")
    return shapes


def _checked(fragments: Iterable[Fragment], model: ModelStates, first: Partition, group: str) -> Iterator[Fragment]:
    try:
        yield from fragments
    except DoesNotFitError as error:
        raise GeometryMismatch(
            f"the partitions {first.file.path} and so on hold {error.available} elements of {group}, but the "
            f"parameters in {model.file.path} need {error.needed}",
            file=first.file.path,
            expected=f"{error.needed} elements and little padding",
            found=f"{error.available}",
            hint=f"The files are of different runs or numbers of ranks. {ONE_CHECKPOINT}",
        ) from None


def _place(assembly: Assembly, partition: Partition, number: int) -> _Placed:
    record = partition.pieces[number]
    if record.dtype != "F32":
        refuse(partition.file.path, f"fp32 weights as group {number}", record.dtype)
    if record.stride != (1,) and record.shape[0] > 1:
        refuse(partition.file.path, f"group {number} in one run", f"stride {record.stride[0]}")
    placed = assembly.place(partition.file, record, f"group {number} of the fp32 weights")
    return _Placed(placed.storage, placed.offset, record.shape[0])


def _runs(fragment: Fragment, placed: Sequence[_Placed]) -> Iterator[Run]:
    """A fragment as runs of the rank's pieces, which it may straddle."""
    position, start = fragment.position, fragment.start
    for piece in placed:
        count = min(fragment.stop - start, piece.numel - position)
        if count > 0:
            yield Run(piece.storage, piece.offset + 4 * position, start, start + count)
            start += count
            position = 0
        else:
            position -= piece.numel
        if start >= fragment.stop:
            return


def frozen_weights(assembly: Assembly, states: Sequence[ModelStates], *, is_sharded: bool) -> dict[str, Local]:
    """Parameters that are not trained, from the fragments in the model states; at stage 3 each rank has a part."""
    found: dict[str, Local] = {}
    for name, (shape, record) in states[0].frozen.items():
        if not is_sharded or record.shape == shape:
            found[name] = assembly.local(states[0].file, record, name, shape)
            continue
        share = -(-prod(shape) // len(states))
        local = found[name] = Local(record.dtype, shape)
        for rank, model in enumerate(states):
            own_shape, own = model.frozen.get(name, (None, None))
            if own is None or own_shape != shape or own.dtype != record.dtype or own.shape != (share,):
                raise GeometryMismatch(
                    f"{model.file.path}: the frozen parameter {name} {list(shape)} should have {share} elements there",
                    file=model.file.path,
                    tensor=name,
                    expected=f"{share} elements of {record.dtype}",
                    found="none" if own is None else f"{list(own.shape)} of {own.dtype}",
                    hint=ONE_CHECKPOINT,
                )
            start, stop = min(rank * share, prod(shape)), min((rank + 1) * share, prod(shape))
            for run in assembly.local(model.file, own, name).runs if start < stop else ():
                local.runs.append(Run(run.storage, run.offset, start, stop))
    return found
