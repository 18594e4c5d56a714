"""Which layers of a model are which, where its config lists them.

Models with cross-attention (Llama 3.2 Vision) weave its layers into those of self-attention on the hub; Meta and
torchtune count them apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

CROSS = "cross_attention_layers"
SELF = "self_attention_layers"
FUSION = "fusion_layers"


def layer_lists(text: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Lists of numbers of layers of a language model's config, and two that follow from ``CROSS``.

    ``SELF`` has the numbers of the other layers on the hub, ``FUSION`` the numbers torchtune gives to layers of
    cross-attention: that of the self-attention layer that comes after.
    Source: torchtune ``models/llama3_2_vision/_convert_weights.py``.
    """
    lists = {
        key: tuple(value)
        for key, value in text.items()
        if isinstance(value, list) and value and all(type(number) is int for number in value)
    }
    total = text.get("num_hidden_layers")
    if CROSS in lists and type(total) is int and 0 < total < 1 << 16:
        own = [number for number in range(total) if number not in lists[CROSS]]
        lists[SELF] = tuple(own)
        lists[FUSION] = tuple(sum(1 for number in own if number < cross) for cross in lists[CROSS])
    return lists
