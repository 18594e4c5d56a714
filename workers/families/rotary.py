"""Rotary embeddings in two row orders: pairs (Meta, torchtune, torchtitan's llama) and halves (the hub).

A head of d rows rotates row 2i with 2i + 1 in the one order, and row i with i + d/2 in the other.
Sources: transformers ``convert_llama_weights_to_hf.py`` (``permute``), torchtitan ``state_dict_adapter.py`` of llama3.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from workers.errors import GeometryMismatch
from workers.expressions import Expression, Reshape, Transpose
from workers.families.operations import Facts, Group, Operation
from workers.families.row_operations import attention_heads

Projection = Literal["query", "key"]


@dataclass(frozen=True, slots=True)
class PairsToHalves:
    """Rows of each head of a query or key projection (weight or bias), from pairs to halves."""

    projection: Projection

    def apply(self, group: Group, facts: Facts) -> Group:
        return _regrouped(group, facts, self.projection, to_halves=True)

    @property
    def inverse(self) -> Operation:
        return HalvesToPairs(self.projection)


@dataclass(frozen=True, slots=True)
class HalvesToPairs:
    """The inverse of ``PairsToHalves``."""

    projection: Projection

    def apply(self, group: Group, facts: Facts) -> Group:
        return _regrouped(group, facts, self.projection, to_halves=False)

    @property
    def inverse(self) -> Operation:
        return PairsToHalves(self.projection)


def _regrouped(group: Group, facts: Facts, projection: Projection, *, to_halves: bool) -> Group:
    heads = attention_heads(facts)
    count = heads.queries if projection == "query" else heads.groups
    return tuple(
        tuple(_permuted(entry, count, heads.size, to_halves=to_halves) for entry in column) for column in group
    )


def _permuted(entry: Expression, heads: int, size: int, *, to_halves: bool) -> Expression:
    if not entry.shape or entry.shape[0] != heads * size or size % 2:
        raise GeometryMismatch(
            f"config.json or the options tell {heads} heads of {size} rows, so {heads * size}, but the tensor has the "
            f"shape {list(entry.shape)}",
            expected=f"{heads * size} rows, of an even number for each head",
            found=str(list(entry.shape)),
            hint="The config belongs to another model: name the right one with the option config_dir. Or set "
            "num_attention_heads, num_key_value_heads or head_dim.",
        )
    rest = entry.shape[1:]
    apart = (heads, size // 2, 2, *rest) if to_halves else (heads, 2, size // 2, *rest)
    return Reshape(Transpose(Reshape(entry, apart), 1, 2), entry.shape)
