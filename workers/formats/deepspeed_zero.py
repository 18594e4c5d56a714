"""DeepSpeed ZeRO checkpoints, stages 0 to 3, with or without tensor parallelism.

The weights are in flat fp32 partitions, one file for each rank, and (stages 0 to 2) in 16 bits in the model states.
Sources: DeepSpeed ``utils/zero_to_fp32.py``, ``runtime/engine.py``; see ``_deepspeed``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from workers.checkpoint import Checkpoint
from workers.errors import UnmappedTensor
from workers.formats._deepspeed.assembly import Assembly, check_same_names
from workers.formats._deepspeed.model import (
    Chooser,
    Weights,
    choice_notes,
    find_config,
    foreign_buffers,
    make_checkpoint,
)
from workers.formats._deepspeed.partitions import check_world, fp32_weights, frozen_weights, read_rank
from workers.formats._deepspeed.states import Partition
from workers.formats._deepspeed.tags import (
    LATEST,
    TagFiles,
    checked_model_ranks,
    choose_tag,
    collect_files,
    find_tags,
    holds_layers,
    holds_states,
    is_universal,
)
from workers.formats._deepspeed.tensor_parallel import TensorParallelism
from workers.formats._format import Detection, Format, Listing
from workers.formats._state_dict import NAME_OPTIONS
from workers.options import ConvertOptions

SIGNS = "mp_rank_<M>_model_states.pt or zero_pp_rank_<D>_mp_rank_<M>_model_states.pt, here or in global_step<N>/"


def detect(listing: Listing) -> Detection | None:
    """Recognise a tag's folder, or a run folder with tags in it, by the model states."""
    tags = _tags(listing)
    if not tags:
        return None
    name = holds_states(listing, tags[0])
    evidence = [f"{name} in {tags[0] or 'the folder itself'}"]
    return Detection((*evidence, *(("a file latest",) if listing.file(LATEST) else ())))


def _tags(listing: Listing) -> list[str]:
    return find_tags(
        listing,
        lambda folder: (
            holds_states(listing, folder) is not None
            and not is_universal(listing, folder)
            and holds_layers(listing, folder) is None
        ),
    )


def open_deepspeed_zero(listing: Listing, options: ConvertOptions) -> Checkpoint:
    """Open the checkpoint of the tag that the options or the file ``latest`` name."""
    tag = choose_tag(listing, _tags(listing), options)
    files = collect_files(listing, tag)
    _check_experts(files)
    assembly = Assembly()
    config = find_config(listing, files, options)
    ranks = [read_rank(listing, files, rank) for rank in checked_model_ranks(files)]
    first = ranks[0][0][0]
    check_world(files, first)
    chooser = Chooser(
        assembly, options, foreign_buffers((states[0] for states, _ in ranks), config.config, options.family)
    )
    tensors = []
    for states, partitions in ranks:
        for file in (*(state.file for state in states), *(partition.file for partition in partitions)):
            assembly.add_file(file)
        is_sharded = bool(partitions) and partitions[0].stage == 3
        weights = Weights(
            states[0],
            fp32_weights(assembly, states[0], partitions),
            frozen_weights(assembly, states, is_sharded=is_sharded),
        )
        tensors.append(chooser.tensors(weights))
    check_same_names(tensors, lambda _, rank: ranks[rank][0][0].file.path)
    parallel = TensorParallelism(first.universal, first.file.path) if len(ranks) > 1 else None
    assembly.add_all(tensors, parallel, options)
    partitions = ranks[0][1]
    assembly.notes += [*tag.notes, *choice_notes(chooser, has_fp32=bool(partitions), options=options)]
    return replace(
        make_checkpoint(listing, assembly, config, options, "deepspeed-zero"),
        layout=_layout(partitions, len(ranks)),
        left_out=chooser.left_out,
        evidence=(*_evidence(files, partitions), *config.evidence),
    )


def _check_experts(files: TagFiles) -> None:
    if files.experts:
        raise UnmappedTensor(
            f"{files.experts[0]} belongs to a mixture of experts by DeepSpeed's own MoE layer, which has no "
            "Hugging Face model",
            file=files.experts[0],
            expected="experts inside of the model states",
            found=f"{len(files.experts)} files of experts",
            hint="Save the gathered state dict of the model in the training environment and convert that.",
        )


def _layout(partitions: Sequence[Partition], model_parallel: int) -> dict[str, object]:
    stage = partitions[0].stage if partitions else 0
    return {"stage": stage, "partitions": len(partitions), "model_parallel": model_parallel}


def _evidence(files: TagFiles, partitions: Sequence[Partition]) -> tuple[str, ...]:
    where = files.tag.path or "the folder itself"
    stage = f"ZeRO stage {partitions[0].stage}, {len(partitions)} partitions" if partitions else "no fp32 partitions"
    return (f"{len(files.model)} model states and {len(files.optimizer)} optimizer files in {where}", stage)


FORMAT = Format(
    "deepspeed-zero",
    "DeepSpeed ZeRO, stages 0 to 3",
    SIGNS,
    detect,
    open_deepspeed_zero,
    frozenset({"step"}) | NAME_OPTIONS,
)
