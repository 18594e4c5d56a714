"""How tensor parallelism cuts each parameter, and which rows of the whole a rank's shard holds.

Sources: Megatron-Core ``tensor_parallel/layers.py``, ``transformer/mlp.py`` (gate and up per rank) and
``transformer/multi_latent_attention.py``; verl 0.3 ``models/llama/megatron`` (queries, keys and values per rank).
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto
from typing import NamedTuple

from workers.errors import GeometryMismatch
from workers.families.operations import Facts
from workers.families.row_operations import attention_heads
from workers.geometry import Shape


class Cut(Enum):
    """What a rank holds of a parameter."""

    WHOLE = auto()
    """All of it; every rank the same."""
    ROWS = auto()
    """An equal block of rows."""
    COLUMNS = auto()
    """An equal block of columns."""
    GATE_AND_UP = auto()
    """A block of rows of the gate, then one of up."""
    QUERY_KEY_VALUE = auto()
    """verl's own modules: the rank's query heads, then its key heads, then its value heads."""
    LATENT = auto()
    """The down projections of latent attention: whole or a block of rows, as the layer spec was."""


_CUTS = {
    "word_embeddings.weight": Cut.ROWS,
    "output_layer.weight": Cut.ROWS,
    "output_layer.bias": Cut.ROWS,
    "linear_qkv.weight": Cut.ROWS,
    "linear_qkv.bias": Cut.ROWS,
    "linear_q_proj.weight": Cut.ROWS,
    "linear_q_up_proj.weight": Cut.ROWS,
    "linear_kv_up_proj.weight": Cut.ROWS,
    "linear_q_down_proj.weight": Cut.LATENT,
    "linear_kv_down_proj.weight": Cut.LATENT,
    "eh_proj.weight": Cut.ROWS,
    "core_attention.softmax_offset": Cut.ROWS,
    "linear_proj.weight": Cut.COLUMNS,
    "linear_proj.bias": Cut.WHOLE,
    "linear_fc1.weight": Cut.GATE_AND_UP,
    "linear_fc1.bias": Cut.GATE_AND_UP,
    "linear_fc2.weight": Cut.COLUMNS,
    "linear_fc2.bias": Cut.WHOLE,
    "router.weight": Cut.WHOLE,
    "router.bias": Cut.WHOLE,
    "router.expert_bias": Cut.WHOLE,
    "shared_experts.gate_weight": Cut.WHOLE,
    # verl's own modules
    "embed_tokens.weight": Cut.ROWS,
    "lm_head.weight": Cut.ROWS,
    "reward_head.weight": Cut.WHOLE,
    "qkv_proj.weight": Cut.QUERY_KEY_VALUE,
    "qkv_proj.bias": Cut.QUERY_KEY_VALUE,
    "o_proj.weight": Cut.COLUMNS,
    "gate_up_proj.weight": Cut.GATE_AND_UP,
    "down_proj.weight": Cut.COLUMNS,
    "rotary_emb.inv_freq": Cut.WHOLE,
}
"""By module and parameter; norms are known by their names' ends."""

_PARTS = ("language_model.", "vision_model.", "visual.", "vision_tower.", "multi_modal_projector.")
"""What models with a vision tower are made of. Their towers' ``linear_fc1`` may have a gate or none, and the numbers
of layers on a rank are those of two stacks: rank files of them are not put together."""

_NORMS = ("norm.weight", "norm.bias", ".layer_norm_weight", ".layer_norm_bias")
_HEADS = ("output_layer.weight", "lm_head.weight")
_LATENT_ROWS = {"linear_q_down_proj": ("q_lora_rank",), "linear_kv_down_proj": ("kv_lora_rank", "qk_rope_head_dim")}


class Segment(NamedTuple):
    """Rows or columns of a shard, and where they stand in the whole."""

    local: int
    length: int
    place: int


class Segments(NamedTuple):
    """A shard's share of the whole tensor: dimension, length of the whole along it, and the segments."""

    dim: int
    length: int
    parts: Sequence[Segment]


def cut_of(name: str, shape: Shape, *, gated: bool = True) -> Cut | None:
    """How the parameter of a name is cut; None for a name that no rule knows.

    ``gated`` says whether the first matrix of an MLP is a gate above what it scales, as in all of Llama's line.
    """
    if name.startswith(_PARTS):
        return None
    if name in _HEADS and shape[:1] == (1,):
        return Cut.WHOLE  # the head of a value model
    parts = name.rsplit(".", 2)
    cut = _CUTS.get(".".join(parts[-2:]))
    if cut is Cut.GATE_AND_UP and not gated:
        return Cut.ROWS
    return Cut.WHOLE if cut is None and name.endswith(_NORMS) else cut


def segments(name: str, shape: Shape, cut: Cut, place: tuple[int, int], facts: Facts) -> Segments | None:
    """What the shard of rank ``place`` = (rank, ranks) holds of the whole; None when it is the whole.

    Raises ``GeometryMismatch`` where the shard's shape does not allow the cut.
    """
    rank, ranks = place
    if cut is Cut.LATENT:
        cut = _latent_cut(name, shape, ranks, facts)
    if cut is Cut.WHOLE or ranks == 1:
        return None
    dim = 1 if cut is Cut.COLUMNS else 0
    if dim >= len(shape):
        raise _bad_shape(name, shape, f"at least {dim + 1} dimensions")
    length = shape[dim]
    if cut is Cut.QUERY_KEY_VALUE:
        return _heads(name, shape, place, facts)
    if cut is Cut.GATE_AND_UP:
        if length % 2:
            raise _bad_shape(name, shape, "an even number of rows, gate and up")
        half = length // 2
        parts = [Segment(0, half, rank * half), Segment(half, half, (ranks + rank) * half)]
        return Segments(0, length * ranks, parts)
    return Segments(dim, length * ranks, [Segment(0, length, rank * length)])


def _latent_cut(name: str, shape: Shape, ranks: int, facts: Facts) -> Cut:
    keys = next(keys for module, keys in _LATENT_ROWS.items() if module in name)
    if ranks == 1:
        return Cut.WHOLE
    rows = sum(map(facts.size, keys))
    if shape[0] == rows:
        return Cut.WHOLE
    if shape[0] * ranks == rows:
        return Cut.ROWS
    raise _bad_shape(name, shape, f"{rows} rows on each rank, or on all {ranks} together ({' + '.join(keys)})")


def _heads(name: str, shape: Shape, place: tuple[int, int], facts: Facts) -> Segments:
    """Segments of verl's ``qkv_proj``; with fewer key-value heads than ranks several ranks hold the same ones."""
    rank, ranks = place
    heads = attention_heads(facts)
    q, k, v = heads.rows
    fits = heads.queries % ranks == 0 and (heads.groups % ranks == 0 or ranks % heads.groups == 0)
    own_q = q // ranks
    own_k = max(heads.groups // ranks, 1) * heads.size
    if not fits or shape[0] != own_q + 2 * own_k:
        expected = (
            f"{own_q} + 2 * {own_k} rows ({heads.queries} query and {heads.groups} key-value heads on {ranks} ranks)"
        )
        raise _bad_shape(name, shape, expected)
    at = rank * heads.groups // ranks * heads.size
    parts = [
        Segment(0, own_q, rank * own_q),
        Segment(own_q, own_k, q + at),
        Segment(own_q + own_k, own_k, q + k + at),
    ]
    return Segments(0, q + k + v, parts)


def _bad_shape(name: str, shape: Shape, expected: str) -> GeometryMismatch:
    return GeometryMismatch(
        f"tensor {name} has the shape {list(shape)} on a rank, expected {expected}",
        tensor=name,
        expected=expected,
        found=str(list(shape)),
        hint="The config is of another model (the option config_dir names one), or the files are of different runs.",
    )
