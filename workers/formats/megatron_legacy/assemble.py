"""Put the rank files of one checkpoint together: whole tensors with the numbers of layers and experts in the model."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from workers.checkpoint import SourceFile
from workers.checkpoint_builder import CheckpointBuilder
from workers.dtypes import ELEMENT_TYPES
from workers.errors import GeometryMismatch, UnmappedTensor
from workers.families.megatron import EXPERT
from workers.families.operations import Facts
from workers.formats.megatron_legacy.cuts import Cut, cut_of, segments
from workers.formats.megatron_legacy.rank_file import Held, RankContent
from workers.formats.megatron_legacy.topology import Grid, Rank
from workers.geometry import Shape, contiguous_strides

_LAYER = re.compile(r"(?P<before>(?:decoder|model)\.layers\.)(?P<number>\d+)(?P<after>\..+)")
# TEGroupedMLP and SequentialMLP, with the number of the expert on this rank.
_EXPERT = (
    re.compile(r"(?P<module>.+)\.mlp\.experts\.(?P<part>linear_fc[12])\.(?P<leaf>weight|bias)(?P<number>\d+)"),
    re.compile(
        r"(?P<module>.+)\.mlp\.experts\.local_experts\.(?P<number>\d+)\.(?P<part>linear_fc[12])\.(?P<leaf>\w+)"
    ),
)
_EXPERTS = ".mlp.experts."
_GROUPED = re.compile(r"(?P<module>.+)\.mlp\.experts\.weight(?P<number>[12])")


@dataclass(frozen=True, slots=True)
class RankPart:
    """A rank file's content and its place in the grid."""

    rank: Rank
    content: RankContent


@dataclass(slots=True)
class Assembly:
    """Collects the tensors of rank files in a ``CheckpointBuilder``."""

    grid: Grid
    facts: Facts
    first_layer: Mapping[tuple[int, int], int]
    """(virtual stage, pipeline rank) -> the number of its first layer in the model."""
    experts: int | None
    """Experts of the model, where something tells; else they are counted."""
    gated: bool = True
    """Whether the first matrix of an MLP is a gate and the matrix that it scales, on each rank."""
    builder: CheckpointBuilder = field(default_factory=CheckpointBuilder)
    _boxes: dict[tuple[Shape, Shape, Shape], int] = field(default_factory=dict)
    _shares: dict[tuple[Any, ...], tuple[Shape, list[tuple[int, int]]]] = field(default_factory=dict)

    def add(self, part: RankPart) -> None:
        """Add a rank file's tensors; raises ``UnmappedTensor`` for a parameter that no rule knows how to cut."""
        entry = part.content.entry
        file = self.builder.add_file(
            SourceFile(entry.path, entry.size_bytes, None, part.content.digest, entry.version)
        )
        storages: dict[tuple[int, int], int] = {}
        rows: list[tuple[int, int, int, int]] = []
        for stage, tensors in enumerate(part.content.stages):
            offset = self.first_layer[stage, part.rank.pipeline]
            for held, is_expert in self._numbered(tensors, part.rank, offset):
                stored = held.stored
                key = stored.offset, stored.length_bytes
                if key not in storages:
                    storages[key] = self.builder.add_storage(file, *key, stored.crc32)
                rows.extend(self._pieces(held, storages[key], part.rank, is_expert=is_expert))
        self.builder.add_pieces(np.array(rows, dtype=np.int64).reshape(-1, 4))

    def _numbered(self, tensors: Sequence[Held], rank: Rank, first_layer: int) -> Iterator[tuple[Held, bool]]:
        """The tensors of a stage with the model's own numbers of layers and experts, and whether they are experts'."""
        per_rank = self._experts_per_rank(tensors)
        for held in tensors:
            name = held.name
            if layer := _LAYER.fullmatch(name):
                name = f"{layer['before']}{int(layer['number']) + first_layer}{layer['after']}"
            if _EXPERTS not in name:
                yield held._replace(name=name), False
            elif grouped := _GROUPED.fullmatch(name):
                yield from ((expert, True) for expert in self._grouped(held._replace(name=name), grouped, rank))
            elif expert := _expert(name):
                number = int(expert["number"]) + rank.expert * per_rank
                place = EXPERT.format(expert=number)
                yield held._replace(name=f"{expert['module']}.{place}.{expert['part']}.{expert['leaf']}"), True
            else:
                yield held._replace(name=name), False

    def _experts_per_rank(self, tensors: Sequence[Held]) -> int:
        found = (_expert(held.name) for held in tensors if _EXPERTS in held.name)
        return max((int(match["number"]) + 1 for match in found if match), default=0)

    def _grouped(self, held: Held, match: re.Match[str], rank: Rank) -> Iterator[Held]:
        """The experts inside of GroupedMLP's two weights, whose memory holds them one after the other, transposed.

        Source: Megatron-Core ``transformer/moe/experts.py`` (``GroupedMLP.forward``: ``weight.view(experts, ...)``).
        """
        if self.experts is None or self.experts % self.grid.expert or len(held.shape) != 2:
            raise GeometryMismatch(
                f"tensor {held.name} holds several experts, and nothing tells how many the model has",
                tensor=held.name,
                expected="num_experts in config.json, a multiple of the expert ranks",
                found=str(self.experts),
                hint="Name a folder with the model's config.json with the option config_dir.",
            )
        count = self.experts // self.grid.expert
        columns_in = match["number"] == "1"
        hidden = held.shape[0] if columns_in else held.shape[1]
        wide = (held.shape[1] if columns_in else held.shape[0]) // count
        if held.strides != contiguous_strides(held.shape) or wide * count * hidden != held.shape[0] * held.shape[1]:
            raise GeometryMismatch(
                f"tensor {held.name} of shape {list(held.shape)} can't hold {count} experts one after the other",
                tensor=held.name,
                expected=f"a multiple of {count} rows or columns",
                found=str(list(held.shape)),
            )
        shape, strides = ((wide, hidden), (1, wide)) if columns_in else ((hidden, wide), (1, hidden))
        step = wide * hidden * ELEMENT_TYPES[held.dtype].size_bytes
        for local in range(count):
            place = EXPERT.format(expert=rank.expert * count + local)
            name = f"{match['module']}.{place}.linear_fc{match['number']}.weight"
            yield held._replace(name=name, shape=shape, strides=strides, start=held.start + local * step)

    def _pieces(self, held: Held, storage: int, rank: Rank, *, is_expert: bool) -> list[tuple[int, int, int, int]]:
        """Rows for ``add_pieces``. What layers and experts repeat is worked out once."""
        cut = cut_of(held.name, held.shape, gated=self.gated)
        if cut is None:
            raise _unknown(held.name)
        place = self.grid.expert_place(rank) if is_expert else (rank.tensor, self.grid.tensor)
        key = cut, held.name if cut is Cut.LATENT else "", held.dtype, held.shape, held.strides, place
        if key not in self._shares:
            self._shares[key] = self._share(held, cut, place)
        whole, boxes = self._shares[key]
        number = self.builder.add_tensor(held.name, held.dtype, whole)
        return [(number, storage, held.start + distance, box) for distance, box in boxes]

    def _share(self, held: Held, cut: Cut, place: tuple[int, int]) -> tuple[Shape, list[tuple[int, int]]]:
        """The shape of the whole, and for each segment the bytes before it and the number of its box."""
        share = segments(held.name, held.shape, cut, place, self.facts)
        if share is None:
            boxes = [(0, self._box(((0,) * len(held.shape), held.shape, held.strides)))]
            return held.shape, boxes if 0 not in held.shape else []
        dim = share.dim
        whole = (*held.shape[:dim], share.length, *held.shape[dim + 1 :])
        width = ELEMENT_TYPES[held.dtype].size_bytes * held.strides[dim]
        boxes = []
        for local, length, at in share.parts:
            offsets = tuple(at if other == dim else 0 for other in range(len(whole)))
            sizes = (*held.shape[:dim], length, *held.shape[dim + 1 :])
            if 0 not in sizes:
                boxes.append((local * width, self._box((offsets, sizes, held.strides))))
        return whole, boxes

    def _box(self, box: tuple[Shape, Shape, Shape]) -> int:
        if box not in self._boxes:
            self._boxes[box] = self.builder.add_box(*box)
        return self._boxes[box]


def _expert(name: str) -> re.Match[str] | None:
    return _EXPERT[0].fullmatch(name) or _EXPERT[1].fullmatch(name)


def first_layers(parts: Sequence[RankPart], path_of: Mapping[Rank, str]) -> dict[tuple[int, int], int]:
    """Where the layers of each (virtual stage, pipeline rank) begin: a running sum, whatever rule cut the model.

    Virtual stages are outermost: all ranks' first ones come before all ranks' second ones. Raises
    ``GeometryMismatch`` where ranks of a stage have different layers or numbers have gaps.
    """
    counts: dict[tuple[int, int], int] = {}
    for part in parts:
        for stage, tensors in enumerate(part.content.stages):
            numbers = {int(match["number"]) for held in tensors if (match := _LAYER.fullmatch(held.name))}
            key = stage, part.rank.pipeline
            expected = counts.setdefault(key, len(numbers))
            if numbers != set(range(expected)):
                raise GeometryMismatch(
                    f"{path_of[part.rank]}: stage {part.rank.pipeline} has the layers {_spans(numbers)}, expected "
                    f"0 to {expected - 1}, counted on the rank",
                    file=path_of[part.rank],
                    expected=f"{expected} layers",
                    found=_spans(numbers),
                    hint="The files are of different runs: bring together those of one checkpoint.",
                )
    first, total = {}, 0
    for key in sorted(counts):
        first[key] = total
        total += counts[key]
    return first


def check_same_names(parts: Sequence[RankPart]) -> None:
    """Raise ``GeometryMismatch`` for a tensor that one rank of a stage has and another does not."""
    first_of: dict[tuple[int, int], tuple[RankPart, set[str]]] = {}
    for part in parts:
        for stage, tensors in enumerate(part.content.stages):
            names = {held.name for held in tensors}
            first, known = first_of.setdefault((stage, part.rank.pipeline), (part, names))
            if differing := sorted(names ^ known):
                has, lacks = (part, first) if differing[0] in names else (first, part)
                raise GeometryMismatch(
                    f"{has.content.entry.path} has the tensor {differing[0]}, which {lacks.content.entry.path} of the "
                    "same pipeline stage does not have",
                    file=lacks.content.entry.path,
                    tensor=differing[0],
                    expected="the same tensors in all ranks of a stage",
                    found=f"{len(differing)} that only one of the two has",
                    hint="The files are of different runs or steps: bring together those of one checkpoint.",
                )


def _spans(numbers: set[int]) -> str:
    return ", ".join(map(str, sorted(numbers)[:16])) or "none"


def _unknown(name: str) -> UnmappedTensor:
    return UnmappedTensor(
        f"tensor {name} is none that unshard knows of Megatron's language models, so it is not known how ranks cut it",
        tensor=name,
        expected="a parameter of Megatron-Core's GPTModel, without a vision tower",
        found=name,
        hint="Save the model as a distributed checkpoint (torch_dist), which holds tensors whole, and convert that.",
    )


def has_gates(arguments: Mapping[str, Any]) -> bool:
    """Whether MLPs have gates, by the training run's arguments; as all the models here have, where these don't say.

    Source: Megatron-LM ``training/arguments.py`` (``core_transformer_config_from_args``).
    """
    others = ("quick_geglu", "gated_linear_unit")
    return arguments.get("swiglu") is not False or any(arguments.get(key) is True for key in others)


def expert_count(facts: Facts, arguments: Mapping[str, Any]) -> int | None:
    """How many experts the model has, by the config or the training run's arguments."""
    keys = ("num_local_experts", "num_experts", "n_routed_experts")
    told = next((facts.sizes[key] for key in keys if key in facts.sizes), arguments.get("num_experts"))
    return told if type(told) is int and told > 0 else None
