"""DeepSpeed universal checkpoints: one folder for each parameter, with its fp32 weights in full.

``ds_to_universal`` makes them of ZeRO checkpoints. From stage 3 the weights are flat and without a shape, which the
model states beside them tell. What has no optimizer state (buffers, in old versions frozen parameters) is only there.
Source: DeepSpeed ``checkpoint/ds_to_universal.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from workers.checkpoint import Checkpoint
from workers.errors import IncompleteCheckpoint
from workers.formats._deepspeed.assembly import Assembly, Local
from workers.formats._deepspeed.model import (
    Chooser,
    Weights,
    choice_notes,
    find_config,
    foreign_buffers,
    make_checkpoint,
)
from workers.formats._deepspeed.partitions import check_world, frozen_weights, read_all, read_frozen_parts
from workers.formats._deepspeed.states import ModelStates, StateFile, open_any, read_model_states, refuse
from workers.formats._deepspeed.tags import (
    LATEST_UNIVERSAL,
    TagFiles,
    checked_model_ranks,
    choose_tag,
    collect_files,
    find_tags,
    is_universal,
)
from workers.formats._deepspeed.tensor_parallel import TensorParallelism
from workers.formats._format import Detection, Format, Listing, join
from workers.formats._state_dict import NAME_OPTIONS, clean_name
from workers.formats._steps import STILL_WRITING
from workers.geometry import Shape
from workers.options import ConvertOptions
from workers.pickles import TensorRecord

SIGNS = "zero/<parameter>/fp32.pt, here or in the folder that latest_universal names"
WEIGHTS = "fp32.pt"


def detect(listing: Listing) -> Detection | None:
    """Recognise a universal checkpoint, or a run folder with one in it."""
    tags = find_tags(listing, lambda folder: is_universal(listing, folder))
    if not tags:
        return None
    return Detection((f"zero/ with {len(listing.folders(join(tags[0], 'zero')))} parameters",))


def open_deepspeed_universal(listing: Listing, options: ConvertOptions) -> Checkpoint:
    """Open the checkpoint that the options or the file ``latest_universal`` name."""
    tags = find_tags(listing, lambda folder: is_universal(listing, folder))
    tag = choose_tag(listing, tags, options, LATEST_UNIVERSAL)
    files = collect_files(listing, tag)
    assembly = Assembly()
    config = find_config(listing, files, options)
    by_rank = [_model_states(listing, files, rank) for rank in checked_model_ranks(files)]
    heads = [states[0] for states in by_rank]
    if heads:
        check_world(files, heads[0])
    fp32 = _weights(listing, tag.path, assembly, heads)
    chooser = Chooser(assembly, options, foreign_buffers(heads, config.config, options.family))
    tensors: list[dict[str, Local]] = []
    for states in by_rank:
        frozen = frozen_weights(assembly, states, is_sharded=len(states) > 1)
        chosen = chooser.tensors(Weights(states[0], fp32, frozen))
        # What the folders hold is whole already: once is enough.
        is_whole = {id(local) for local in fp32.values()} if tensors else set()
        tensors.append({name: local for name, local in chosen.items() if id(local) not in is_whole})
    parallel = TensorParallelism(heads[0].universal, heads[0].file.path) if len(heads) > 1 else None
    assembly.add_all(tensors or [fp32], parallel, options)
    assembly.notes += [*tag.notes, *choice_notes(chooser, has_fp32=True, options=options)]
    where = tag.path or "the folder itself"
    return replace(
        make_checkpoint(listing, assembly, config, options, "deepspeed-universal"),
        layout={"parameters": len(fp32), "model_states": len(files.model)},
        left_out=chooser.left_out,
        evidence=(f"{len(fp32)} parameters in {where}, zero/*/{WEIGHTS}", *config.evidence),
    )


def _model_states(listing: Listing, files: TagFiles, mp_rank: int) -> list[ModelStates]:
    """The model states of a model-parallel rank; those of further ranks only where they hold frozen weights."""
    own = {rank: entry for rank, entry in files.model.items() if rank[0] == mp_rank}
    (first,) = read_all(listing.folder, dict([next(iter(own.items()))]), read_model_states)
    last = max(rank for _, rank in own)
    if not first.frozen or last == 0:
        return [first]
    return [first, *read_frozen_parts(listing, files, first, last + 1)]


def _weights(listing: Listing, tag: str, assembly: Assembly, heads: Sequence[ModelStates]) -> dict[str, Local]:
    """The fp32 weights by parameter."""
    place = join(tag, "zero")
    entries = listing.folder.list(place)
    found = {entry.path.split("/")[-2]: entry for entry in entries if entry.path.endswith(f"/{WEIGHTS}")}
    named = set(listing.folders(place))
    absent = sorted(named - found.keys())
    if absent or not found:
        name = join(place, f"{absent[0] if absent else '<parameter>'}/{WEIGHTS}")
        raise IncompleteCheckpoint(
            f"{name} is missing: each folder in {place} has one",
            file=name,
            expected=f"{len(named)} files {WEIGHTS}",
            found=f"{len(found)}",
            hint=f"The conversion by ds_to_universal was not finished, or not all was copied. {STILL_WRITING}",
        )
    shapes = _known_shapes(heads)
    by_number = {(number, 0): found[name] for number, name in enumerate(sorted(found))}
    opened = read_all(listing.folder, by_number, open_any)
    weights: dict[str, Local] = {}
    for name, file in zip(sorted(found), opened, strict=True):
        assembly.add_file(file)
        short = clean_name(name)
        if short in weights:
            refuse(file.path, f"one folder for the parameter {short}", "another one of that name without wrappers")
        weights[short] = _parameter(assembly, file, short, shapes)
    return weights


def _known_shapes(heads: Sequence[ModelStates]) -> dict[str, Shape]:
    """Full shapes by the model states; with tensor parallelism these know only shards."""
    shapes: dict[str, Shape] = {}
    for model in heads if len(heads) == 1 else ():
        shapes.update({name: shape for name, (shape, _) in model.frozen.items()})
        for group in model.groups:
            shapes.update(group)
    return shapes


def _parameter(assembly: Assembly, file: StateFile, name: str, shapes: Mapping[str, Shape]) -> Local:
    saved = file.torch.root
    record = saved.get("param") if isinstance(saved, dict) else saved
    if not isinstance(record, TensorRecord):
        refuse(file.path, "the fp32 weights of a parameter", f"a {type(record).__name__}")
    shape = record.shape
    if not isinstance(saved, dict) and name in shapes:
        shape = shapes[name]
    elif not isinstance(saved, dict):
        raise IncompleteCheckpoint(
            f"{file.path} has a flat tensor and no shape, as from ZeRO stage 3, and "
            f"no model states say what shape {name} has",
            file=file.path,
            tensor=name,
            expected="*_model_states.pt beside zero/",
            found="none that knows the parameter",
            hint="Copy the model states of the ZeRO checkpoint into the folder that holds zero/.",
        )
    return assembly.local(file, record, name, shape)


FORMAT = Format(
    "deepspeed-universal",
    "DeepSpeed universal checkpoints",
    SIGNS,
    detect,
    open_deepspeed_universal,
    frozenset({"step"}) | NAME_OPTIONS,
)
