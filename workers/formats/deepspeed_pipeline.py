"""DeepSpeed's pipeline engine: one file for each layer (and tensor-parallel rank) of a ``PipelineModule``.

Layers are numbered and their tensors named relative to the layer, so that the user says with ``layer_prefixes`` what a
layer is called in the model. The layer files hold 16-bit weights; where ZeRO saved fp32 weights beside them, those
count unless exactly the dtype of the layer files is wanted.
Source: DeepSpeed ``runtime/pipe/module.py`` (``save_state_dict``, ``ckpt_layer_path``).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from workers.checkpoint import Checkpoint
from workers.dtypes import BY_TORCH_NAME
from workers.errors import GeometryMismatch, IncompleteCheckpoint, InvalidOption
from workers.formats._deepspeed.assembly import Assembly, Local, check_same_names
from workers.formats._deepspeed.model import HALF, find_config, make_checkpoint
from workers.formats._deepspeed.partitions import check_world, fp32_weights, read_all, read_rank
from workers.formats._deepspeed.states import ModelStates, open_state, state_tensors
from workers.formats._deepspeed.tags import (
    TagFiles,
    checked_model_ranks,
    choose_tag,
    collect_files,
    find_tags,
    holds_layers,
)
from workers.formats._deepspeed.tensor_parallel import REPLICATED, ROWS, TWO_PARTS, TensorParallelism
from workers.formats._format import Detection, Format, Listing, join
from workers.formats._state_dict import NAME_OPTIONS
from workers.formats._steps import STILL_WRITING
from workers.options import ConvertOptions

SIGNS = "layer_<L>-model_states.pt or layer_<L>-model_<M>-model_states.pt, here or in global_step<N>/"

# How Megatron-DeepSpeed cuts its layers, which it did not write down before it knew universal checkpoints.
# Source: Megatron-DeepSpeed ``tools/convert_checkpoint/deepspeed_checkpoint.py``.
_USUAL_CUTS = {
    REPLICATED: [
        r"\d+\.input_layernorm\..*",
        r"\d+\.post_attention_layernorm\..*",
        r"\d+\.self_attention\.dense\.bias$",
        r"\d+\.mlp\.dense_4h_to_h\.bias$",
        r"\d+\.position_embeddings\.weight$",
        r"\d+\.weight$",
        r"\d+\.bias$",
    ],
    ROWS: [r"\d+\.self_attention\.dense\.weight$", r"\d+\.mlp\.dense_4h_to_h\.weight$"],
}

_GATED = r"\d+\.mlp\.dense_h_to_4h\.weight$", r"\d+\.mlp\.dense_h_to_4h\.bias$"
_INTO_MLP, _OUT_OF_MLP = "mlp.dense_h_to_4h.weight", "mlp.dense_4h_to_h.weight"

_RANGE = re.compile(r"\s*(\d{1,9})\s*(-\s*(\d{1,9})\s*)?")
_OF_RANK = re.compile(r"-model_\d+-model_states")
_TIED = re.compile(r"tied_modules\.[^.]+\.(?P<name>.+)")


@dataclass(frozen=True, slots=True)
class Prefix:
    """What the tensors of layers ``first`` to ``last`` are called; None leaves these layers out."""

    first: int
    last: int
    text: str | None

    def name(self, layer: int, relative: str) -> str:
        prefix = (self.text or "").replace("{}", str(layer - self.first))
        return f"{prefix}{relative}" if not prefix or prefix.endswith(".") else f"{prefix}.{relative}"


def detect(listing: Listing) -> Detection | None:
    """Recognise a tag's folder, or a run folder with tags in it, by the layer files."""
    tags = find_tags(listing, lambda folder: holds_layers(listing, folder) is not None)
    if not tags:
        return None
    return Detection((f"{holds_layers(listing, tags[0])} in {tags[0] or 'the folder itself'}",))


def open_deepspeed_pipeline(listing: Listing, options: ConvertOptions) -> Checkpoint:
    """Open the checkpoint of the tag that the options or the file ``latest`` name."""
    tags = find_tags(listing, lambda folder: holds_layers(listing, folder) is not None)
    tag = choose_tag(listing, tags, options)
    files = collect_files(listing, tag)
    assembly = Assembly()
    layers = _read_layers(listing, files, assembly)
    fp32, parallel = _fp32(listing, files, assembly, usual=_usual_cuts(layers[0]))
    from_layers = _replace_by_fp32(layers, fp32, options)
    if fp32 and from_layers:
        assembly.notes.append(f"{len(from_layers)} tensors have the layer files' precision, such as {from_layers[0]}")
    left_out = _add(assembly, layers, parallel, options)
    assembly.notes += tag.notes
    where = tag.path or "the folder itself"
    config = find_config(listing, files, options)
    return replace(
        make_checkpoint(listing, assembly, config, options, "deepspeed-pipeline"),
        layout={"layers": len({layer for layer, _ in files.layers}), "tensor_parallel": len(layers)},
        left_out=tuple((name, "layer_prefixes leaves its layer out") for name in left_out),
        evidence=(f"{len(files.layers)} layer files in {where}", *config.evidence),
    )


def read_prefixes(text: str) -> list[Prefix]:
    """Read the option ``layer_prefixes``: JSON, a list by layer or an object of layers and ranges."""
    try:
        told = json.loads(text)
    except (ValueError, RecursionError):
        told = None
    if isinstance(told, list):
        told = {str(layer): prefix for layer, prefix in enumerate(told)}
    if not isinstance(told, dict) or not told:
        raise _bad_prefixes(text)
    prefixes = []
    for key, prefix in told.items():
        match = _RANGE.fullmatch(key)
        if match is None or not isinstance(prefix, str | None):
            raise _bad_prefixes(f"{key}: {prefix!r}")
        prefixes.append(Prefix(int(match[1]), int(match[3] or match[1]), prefix))
    return prefixes


def _bad_prefixes(found: str) -> InvalidOption:
    return InvalidOption(
        f"option layer_prefixes: {found[:120]!r} does not say what layers are called",
        expected='JSON such as {"0": "model.embed_tokens", "1-24": "model.layers.{}", "25": "model.norm"}',
        found=found[:120],
        hint="{} stands for the layer's place in its range, counted from 0; null leaves layers out.",
    )


def _read_layers(listing: Listing, files: TagFiles, assembly: Assembly) -> list[dict[str, Local]]:
    """The tensors of each tensor-parallel rank, as ``<layer>.<name>``; each layer must have all ranks."""
    numbers = sorted({layer for layer, _ in files.layers})
    ranks = max(rank for _, rank in files.layers) + 1
    all_files = ((layer, rank) for layer in numbers for rank in range(ranks))
    absent = next((place for place in all_files if place not in files.layers), None)
    if absent is not None:
        name = _layer_file(files, *absent)
        raise IncompleteCheckpoint(
            f"{name} is missing: other layers have files of {ranks} tensor-parallel ranks",
            file=name,
            expected=f"{len(numbers) * ranks} layer files",
            found=f"{len(files.layers)}",
            hint=f"Each node saves its own layers: copy them together. {STILL_WRITING}",
        )
    by_rank: list[dict[str, Local]] = [{} for _ in range(ranks)]
    for file in read_all(listing.folder, files.layers, open_state):
        assembly.add_file(file)
        layer, rank = file.rank
        for name, record in state_tensors(file.torch.root, file.path).items():
            by_rank[rank][f"{layer}.{name}"] = assembly.local(file, record, name)
    check_same_names(by_rank, lambda name, rank: _layer_file(files, int(name.partition(".")[0]), rank))
    return by_rank


def _layer_file(files: TagFiles, layer: int, rank: int) -> str:
    """The name of a layer file; there is a rank in it where the others' names have one, or must have."""
    numbered = rank > 0 or any(_OF_RANK.search(entry.path) for entry in files.layers.values())
    return join(files.tag.path, f"layer_{layer:02d}-{f'model_{rank:02d}-' if numbered else ''}model_states.pt")


def _usual_cuts(tensors: Mapping[str, Local]) -> dict[str, list[str]]:
    """How Megatron-DeepSpeed cuts its layers: a gated MLP, which has two rows for each column behind it, in halves."""
    for name, into in tensors.items():
        layer, _, relative = name.partition(".")
        out = tensors.get(f"{layer}.{_OUT_OF_MLP}") if relative == _INTO_MLP else None
        if out is not None and len(out.shape) == 2 and into.shape[:1] == (2 * out.shape[1],):
            return {**_USUAL_CUTS, TWO_PARTS: [*_GATED]}
    return _USUAL_CUTS


def _fp32(
    listing: Listing, files: TagFiles, assembly: Assembly, usual: Mapping[str, list[str]]
) -> tuple[dict[str, list[Local]], TensorParallelism]:
    """fp32 weights by name, one for each tensor-parallel rank, and how ranks cut tensors.

    Files are numbered by stage and tensor-parallel rank together, so that of each name the ranks follow on each other.
    """
    found: dict[str, list[Local]] = {}
    parallel = TensorParallelism(usual, "the layer files")
    for rank in checked_model_ranks(files):
        states, partitions = read_rank(listing, files, rank)
        _check_stage(files, states[0])
        if files.optimizer and not partitions and any(states[0].groups):
            raise _missing_partitions(files, states[0])
        for file in (*(state.file for state in states), *(partition.file for partition in partitions)):
            assembly.add_file(file)
        told = TensorParallelism(states[0].universal, states[0].file.path)
        parallel = told if told.is_known else parallel
        for name, local in fp32_weights(assembly, states[0], partitions).items():
            found.setdefault(name, []).append(local)
    return found, parallel


def _check_stage(files: TagFiles, states: ModelStates) -> None:
    """A stage's model states name the parameters of its layers, each of which must have its file."""
    check_world(files, states)
    numbers = {layer for layer, _ in files.layers}
    for name in dict.fromkeys(name for group in states.groups for name in group):
        layer, _, relative = name.partition(".")
        if layer.isdecimal() and int(layer) not in numbers:
            absent = _layer_file(files, int(layer), 0)
            raise IncompleteCheckpoint(
                f"{absent} is missing: {states.file.path} says that layer {layer} has the parameter {relative}",
                file=absent,
                tensor=name,
                expected=f"a file of layer {layer}",
                found=f"files of the layers {', '.join(map(str, sorted(numbers)[:16]))}",
                hint=f"Each node saves its own layers: copy them together. {STILL_WRITING}",
            )


def _missing_partitions(files: TagFiles, states: ModelStates) -> IncompleteCheckpoint:
    name = files.optimizer_name((states.file.rank[0], 0))
    return IncompleteCheckpoint(
        f"{name} is missing: other stages have their fp32 weights, but none holds those of {states.file.path}",
        file=name,
        expected="optimizer files of all stages, or of none",
        found=f"{len(files.optimizer)} files of other stages",
        hint=f"Each node saves the files of its own ranks: copy them together. {STILL_WRITING}",
    )


def _replace_by_fp32(
    layers: list[dict[str, Local]], fp32: Mapping[str, list[Local]], options: ConvertOptions
) -> list[str]:
    """Put the fp32 weights in the layer files' place, unless their dtype is what is wanted; returns what stayed.

    Several stages that share a module all have its weights; those of the first are taken.
    """
    wanted = BY_TORCH_NAME[options.dtype].name if options.dtype in HALF else None
    stayed = []
    for name, local in layers[0].items():
        if local.dtype == wanted:
            continue
        better = fp32.get(name) or _tied(name, local, fp32)
        if better is None:
            stayed.append(name)
            continue
        if len(better) % len(layers):
            raise _missing_fp32(name, len(better), len(layers))
        for tensors, weight in zip(layers, better[: len(layers)], strict=True):
            if tensors[name].shape != weight.shape:
                raise GeometryMismatch(
                    f"tensor {name} is {list(tensors[name].shape)} in its layer file and {list(weight.shape)} in fp32",
                    tensor=name,
                    expected=str(list(tensors[name].shape)),
                    found=str(list(weight.shape)),
                    hint="The layer files and the optimizer files are of different runs; bring together those of one.",
                )
            tensors[name] = replace(weight)
    return stayed


def _missing_fp32(name: str, found: int, ranks: int) -> IncompleteCheckpoint:
    return IncompleteCheckpoint(
        f"tensor {name} has layer files of {ranks} tensor-parallel ranks, but fp32 weights of {found}",
        tensor=name,
        expected=f"optimizer files of all {ranks} tensor-parallel ranks",
        found=f"the fp32 weights of {found}",
        hint="Copy the model states and optimizer files of all ranks into the folder, or leave out those of all to "
        "convert the layer files' own precision. Files of another run must not lie there.",
    )


def _tied(name: str, local: Local, fp32: Mapping[str, list[Local]]) -> list[Local] | None:
    """The fp32 weights of a layer that is used twice: they are kept under the module's key, not the layer's number."""
    relative = name.partition(".")[2]
    fits = [
        weights
        for key, weights in fp32.items()
        if (match := _TIED.fullmatch(key)) and match["name"] == relative and weights[0].shape == local.shape
    ]
    return fits[0] if len(fits) == 1 else None


def _add(
    assembly: Assembly, layers: list[dict[str, Local]], parallel: TensorParallelism, options: ConvertOptions
) -> list[str]:
    """Add all tensors under the names that the user gives the layers; returns those that are left out."""
    if options.layer_prefixes is None and options.mapping is None and options.family != "none":
        raise _needs_prefixes(layers[0])
    prefixes = read_prefixes(options.layer_prefixes) if options.layer_prefixes is not None else None
    names: dict[str, str | None] = dict(_names(layers[0], prefixes)) if prefixes is not None else {}
    kept = [
        {name: local for name, local in tensors.items() if prefixes is None or names.get(name) is not None}
        for tensors in layers
    ]
    final = {name: text for name, text in names.items() if text is not None}
    assembly.add_all(kept, parallel, options, final)
    return [name for name, text in names.items() if text is None]


def _names(tensors: Iterable[str], prefixes: list[Prefix]) -> Iterator[tuple[str, str | None]]:
    for name in tensors:
        number, _, relative = name.partition(".")
        prefix = next((p for p in prefixes if p.first <= int(number) <= p.last), None)
        if prefix is None:
            raise InvalidOption(
                f"option layer_prefixes does not say what layer {number} is called, which has {relative}",
                expected=f"a prefix for layer {number}, or null to leave it out",
                found=", ".join(f"{p.first}-{p.last}" for p in prefixes),
                hint="Name all layers that have files.",
            )
        yield name, None if prefix.text is None else prefix.name(int(number), relative)


def _needs_prefixes(tensors: Mapping[str, Local]) -> InvalidOption:
    """Show what the layers hold, so that the user can say what they are called."""
    layers: dict[str, list[str]] = {}
    for name, local in tensors.items():
        number, _, relative = name.partition(".")
        layers.setdefault(number, []).append(f"{relative} {list(local.shape)}")
    shown = "; ".join(f"layer {number}: {', '.join(names[:2])}" for number, names in layers.items())
    return InvalidOption(
        "the files of the pipeline engine number their layers, and nothing says what these are called in the model",
        expected='the option layer_prefixes, such as {"0": "model.embed_tokens", "1-24": "model.layers.{}"}',
        found=shown[:2000],
        hint="Set layer_prefixes; with family=none the names <layer>.<name> are kept, and a mapping finds them so.",
    )


FORMAT = Format(
    "deepspeed-pipeline",
    "DeepSpeed pipeline engine (layer files)",
    SIGNS,
    detect,
    open_deepspeed_pipeline,
    frozenset({"step", "layer_prefixes"}) | NAME_OPTIONS,
)
