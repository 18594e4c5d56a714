"""Which part of a tensor each of Meta's files holds, by its name and shape.

What a file fuses for its rank (q, k and v; w1 and w3) becomes tensors of their own here, since only then the parts of
all ranks join. Whether the embedding is cut by tokens or by features shows in its shape.
Sources: llama-models ``models/llama3/model.py``, ``models/llama4/{model,ffn,moe}.py``,
``models/checkpoint.py`` (``ShardedMerger``), ``models/llama3/multimodal/model.py``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from workers.errors import GeometryMismatch, IncompleteCheckpoint
from workers.geometry import Shape


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of the language model, and the file that tells them."""

    hidden: int
    heads: int
    key_value_heads: int
    head: int
    experts: int
    told_by: str


class Part(NamedTuple):
    """A box of a whole tensor, and the first row of a file's tensor that it comes from."""

    name: str
    shape: Shape
    offsets: Shape
    sizes: Shape
    first_row: int = 0


_ROWS = re.compile(
    r"""(.+\.)?( output\.weight | learnable_embedding\.weight | vision_projection\.(weight|bias)
    | attention\.w[qkv]\.weight | attn\.w[qkv]\.(weight|bias)
    | feed_forward\.w[13]\.weight | feed_forward\.(w_in_shared_FD|w_swiglu_FD)\.weight
    | mlp\.c_fc\.(weight|bias) | conv1\._linear\.weight )""",
    re.VERBOSE,
)
_COLUMNS = re.compile(
    r"""(.+\.)?( attention\.wo\.weight | attn\.wo\.weight | feed_forward\.w2\.weight | mlp\.fc2_weight
    | feed_forward\.w_out_shared_DF\.weight | experts\.moe_w_(in|swiglu)_eD_F | mlp\.c_proj\.weight )""",
    re.VERBOSE,
)
_EMBEDDING = re.compile(r"(.+\.)?tok_embeddings\.weight")
_FUSED_ATTENTION = re.compile(r"(?P<module>.+\.attention)\.wqkv\.weight")
_FUSED_MLP = re.compile(r"(?P<module>.+\.feed_forward)\.mlp\.fc1_weight")
_EXPERT_ROWS = re.compile(r".+\.experts\.moe_w_out_eF_D")
_TEXT_ATTENTION = re.compile(r"(.+\.)?(layers|cross_attention_layers)\.\d+\.attention\.w(?P<which>[qkv])\.weight")
_MATRIX = 2


def parts_of(name: str, shape: Shape, rank: tuple[int, int], sizes: Sizes) -> Iterator[Part]:
    """The parts that a file's tensor is made of; ``rank`` is the file's number and how many there are.

    Raises ``IncompleteCheckpoint`` and ``GeometryMismatch`` where the shape does not fit the sizes.
    """
    if fused := _FUSED_ATTENTION.fullmatch(name):
        yield from _attention(fused["module"], _matrix(name, shape), rank, sizes)
    elif fused := _FUSED_MLP.fullmatch(name):
        yield from _halves(fused["module"], _matrix(name, shape), rank)
    elif _EXPERT_ROWS.fullmatch(name):
        yield from _expert_rows(name, _matrix(name, shape), rank, sizes)
    elif projection := _TEXT_ATTENTION.fullmatch(name):
        yield _projection(name, projection["which"], _matrix(name, shape), rank, sizes)
    elif _EMBEDDING.fullmatch(name):
        yield _cut(name, shape, rank, _embedding_dimension(name, _matrix(name, shape), rank[1], sizes))
    elif _ROWS.fullmatch(name) and shape:
        yield _cut(name, shape, rank, 0)
    elif _COLUMNS.fullmatch(name):
        yield _cut(name, _matrix(name, shape), rank, 1)
    else:
        yield Part(name, shape, (0,) * len(shape), shape)


def _cut(name: str, shape: Shape, rank: tuple[int, int], dim: int) -> Part:
    number, count = rank
    whole = (*shape[:dim], shape[dim] * count, *shape[dim + 1 :])
    offsets = tuple(number * length if place == dim else 0 for place, length in enumerate(shape))
    return Part(name, whole, offsets, shape)


def _matrix(name: str, shape: Shape) -> Shape:
    if len(shape) != _MATRIX:
        raise _misfit(name, shape, "a matrix")
    return shape


def _embedding_dimension(name: str, shape: Shape, count: int, sizes: Sizes) -> int:
    """Rows are cut since Llama 3, columns were before."""
    if shape[1] == sizes.hidden:
        return 0
    if shape[1] * count == sizes.hidden:
        return 1
    raise _too_few(name, shape, (shape[1], count), (sizes.hidden, "columns"), sizes)


def _projection(name: str, which: str, shape: Shape, rank: tuple[int, int], sizes: Sizes) -> Part:
    """Rows of q, k or v: whole heads of each rank, whose number must come to that of the model."""
    number, count = rank
    heads = sizes.heads if which == "q" else sizes.key_value_heads
    if shape[1] != sizes.hidden:
        raise _misfit(name, shape, f"{sizes.hidden} columns, as {sizes.told_by} says")
    if shape[0] * count == heads * sizes.head:
        return _cut(name, shape, rank, 0)
    if which != "q" and shape[0] == sizes.head and count > heads and count % heads == 0:
        # More ranks than heads: each head is there several times, in neighbouring files.
        head = number * heads // count
        return Part(name, (heads * sizes.head, shape[1]), (head * sizes.head, 0), shape)
    raise _too_few(name, shape, (shape[0], count), (heads * sizes.head, "rows"), sizes)


def _attention(module: str, shape: Shape, rank: tuple[int, int], sizes: Sizes) -> Iterator[Part]:
    """A rank's rows of q, then of k, then of v."""
    number, count = rank
    wholes = {x: (sizes.heads if x == "q" else sizes.key_value_heads) * sizes.head for x in "qkv"}
    if shape[0] * count != sum(wholes.values()):
        name = f"{module}.wqkv.weight"
        raise _too_few(name, shape, (shape[0], count), (sum(wholes.values()), "rows"), sizes)
    first = 0
    for x, whole in wholes.items():
        if whole % count:
            raise _misfit(f"{module}.wqkv.weight", shape, f"{whole} rows of {x} in {count} equal parts")
        rows = whole // count
        yield Part(f"{module}.w{x}.weight", (whole, shape[1]), (number * rows, 0), (rows, shape[1]), first)
        first += rows


def _halves(module: str, shape: Shape, rank: tuple[int, int]) -> Iterator[Part]:
    """A rank's rows of w1, then of w3."""
    number, count = rank
    if shape[0] % 2:
        raise _misfit(f"{module}.mlp.fc1_weight", shape, "an even number of rows: w1 and w3")
    rows = shape[0] // 2
    for place, x in enumerate(("w1", "w3")):
        whole = rows * count, shape[1]
        yield Part(f"{module}.{x}.weight", whole, (number * rows, 0), (rows, shape[1]), place * rows)


def _expert_rows(name: str, shape: Shape, rank: tuple[int, int], sizes: Sizes) -> Iterator[Part]:
    """For each expert a rank's rows, which in the whole tensor lie among those of the other ranks."""
    number, count = rank
    if shape[0] % sizes.experts:
        raise _misfit(name, shape, f"rows of {sizes.experts} experts, as {sizes.told_by} says")
    rows = shape[0] // sizes.experts
    whole = rows * count * sizes.experts, shape[1]
    for expert in range(sizes.experts):
        offsets = (expert * count + number) * rows, 0
        yield Part(name, whole, offsets, (rows, shape[1]), expert * rows)


def _misfit(name: str, shape: Shape, expected: str) -> GeometryMismatch:
    return GeometryMismatch(
        f"the tensor {name} has shape {list(shape)}, expected {expected}",
        tensor=name,
        expected=expected,
        found=str(list(shape)),
        hint="params.json and weights belong to different models: bring together those of one release.",
    )


def _too_few(
    name: str, shape: Shape, there: tuple[int, int], told: tuple[int, str], sizes: Sizes
) -> IncompleteCheckpoint:
    """The files together have another size than the model: most likely some are missing."""
    (length, count), (whole, what) = there, told
    fits = (
        f"; {whole // length} such files would" if length and whole % length == 0 and whole // length > count else ""
    )
    return IncompleteCheckpoint(
        f"{name} has {length} {what} in each of the {count} files consolidated.*.pth, {length * count} together, but "
        f"{sizes.told_by} tells {whole}{fits}",
        tensor=name,
        expected=f"{whole} {what}",
        found=f"{length * count} ({list(shape)} in each of {count} files)",
        hint=f"Files are missing, or {sizes.told_by} belongs to another model: fetch all files of one release.",
    )
