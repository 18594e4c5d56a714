"""Meta's own names of Llama models, as consolidated.NN.pth has them; Mistral's files have the same.

The rows of q and k are in pairs, as in torchtune. Models with a vision tower have tables of their own.
Sources: llama-models ``models/llama3/model.py``, ``models/checkpoint.py``; transformers
``convert_llama_weights_to_hf.py``, ``convert_mistral_weights_to_hf.py``.
"""

from __future__ import annotations

from workers.families.operations import Operation
from workers.families.rules import Count, Drop, Rule, Table, rename
from workers.families.torchtune import ALREADY_ON_THE_HUB, PAIRS, Linear, linear_rules

NAMING = "meta"
LAYER = "layers.{layer}."
HUB_LAYER = "model.layers.{layer}."
MLP_NAMES = (("w1", "gate_proj"), ("w3", "up_proj"), ("w2", "down_proj"))

ROTARY = tuple(
    Drop(name, "rotary tables are made anew from the config")
    for name in ("rope.freqs", "{module}.rope.freqs", "freq_cis", "{module}.freq_cis")
)


def attention(rows: dict[str, tuple[Operation, ...]], own: str = LAYER, hub: str = HUB_LAYER) -> tuple[Linear, ...]:
    """q, k, v and the output projection."""
    return tuple(Linear(f"{own}attention.w{x}", f"{hub}self_attn.{x}_proj", rows.get(x, ())) for x in "qkvo")


def mlp(own: str = f"{LAYER}feed_forward.", hub: str = f"{HUB_LAYER}mlp.") -> tuple[Linear, ...]:
    """The three matrices of a gated MLP."""
    return tuple(Linear(own + left, hub + right) for left, right in MLP_NAMES)


def norms(own: str = LAYER, hub: str = HUB_LAYER) -> tuple[Rule, ...]:
    """The two norms of a layer."""
    return (
        rename(f"{own}attention_norm.weight", f"{hub}input_layernorm.weight"),
        rename(f"{own}ffn_norm.weight", f"{hub}post_attention_layernorm.weight"),
    )


REQUIRED_LAYER = tuple(
    f"{LAYER}{name}.weight"
    for name in (
        *(f"attention.w{x}" for x in "qkvo"),
        *(f"feed_forward.{name}" for name, _ in MLP_NAMES),
        "attention_norm",
        "ffn_norm",
    )
)

TABLES = (
    Table(
        "meta_llama",
        ("llama", "mistral"),
        (
            *ROTARY,
            rename("tok_embeddings.weight", "model.embed_tokens.weight"),
            rename("norm.weight", "model.norm.weight"),
            *linear_rules((Linear("output", "lm_head"), *attention(PAIRS), *mlp())),
            *norms(),
            ALREADY_ON_THE_HUB,
        ),
        NAMING,
        counts=(Count("layers.{layer}.{rest}", "layer", ("num_hidden_layers",), "layers"),),
        required=("tok_embeddings.weight", *REQUIRED_LAYER, "norm.weight"),
    ),
)
