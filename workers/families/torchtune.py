"""torchtune's own names of models, as its TorchTune checkpointer and its adapters have them.

The Llama line, Mistral and Gemma have their rotary rows in pairs, Qwen and Phi in halves as the hub. Names of
adapters follow from those of the weights: what permutes rows of a weight permutes those of B and of the magnitude.
Sources: torchtune 0.2 to 0.7 ``models/convert_weights.py``, ``models/*/_convert_weights.py``,
``rlhf/utils/_convert_weights.py``, ``modules/peft``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from workers.families.adapters import PREFIX
from workers.families.operations import Concatenate, Operation
from workers.families.rotary import PairsToHalves
from workers.families.row_operations import JoinHeads
from workers.families.rules import Count, Drop, Rule, Table, rename

NAMING = "torchtune"
LAYER = "layers.{layer}."
HUB_LAYER = "model.layers.{layer}."
HALVES: dict[str, tuple[Operation, ...]] = {}
PAIRS: dict[str, tuple[Operation, ...]] = {"q": (PairsToHalves("query"),), "k": (PairsToHalves("key"),)}
"""What becomes of rows of q and k: nothing, or the order of rotary embeddings changes."""

MADE_ANEW = Drop("{module}.rope.cache", "rotary tables are made anew from the config")
ALREADY_ON_THE_HUB = rename(f"{PREFIX}{{rest}}", f"{PREFIX}{{rest}}")
"""Weights of the base model of an adapter, which come under peft's names."""


@dataclass(frozen=True, slots=True)
class Linear:
    """A linear layer: its names on both sides and what becomes of its rows."""

    own: str
    hub: str
    rows: tuple[Operation, ...] = ()
    leaves: tuple[str, ...] = ("weight",)

    def rules(self) -> tuple[Rule, ...]:
        """Rules for the weight, perhaps a bias, and for an adapter of it."""
        plain = tuple(Rule((f"{self.own}.{leaf}",), (f"{self.hub}.{leaf}",), self.rows) for leaf in self.leaves)
        target = f"{PREFIX}{self.hub}"
        return (
            *plain,
            rename(f"{self.own}.lora_a.weight", f"{target}.lora_A.weight"),
            Rule((f"{self.own}.lora_b.weight",), (f"{target}.lora_B.weight",), self.rows),
            Rule((f"{self.own}.magnitude",), (f"{target}.lora_magnitude_vector",), self.rows),
        )


def linear_rules(layers: Iterable[Linear]) -> tuple[Rule, ...]:
    """The rules of several linear layers."""
    return tuple(rule for layer in layers for rule in layer.rules())


def attention(rows: dict[str, tuple[Operation, ...]], own: str = LAYER, hub: str = HUB_LAYER) -> tuple[Linear, ...]:
    """q, k, v and the output projection; biases, too, where a model has them."""
    leaves = ("weight", "bias")
    projections = (Linear(f"{own}attn.{x}_proj", f"{hub}self_attn.{x}_proj", rows.get(x, ()), leaves) for x in "qkv")
    return (*projections, Linear(f"{own}attn.output_proj", f"{hub}self_attn.o_proj"))


MLP_NAMES = (("w1", "gate_proj"), ("w3", "up_proj"), ("w2", "down_proj"))


def mlp(own: str = f"{LAYER}mlp.", hub: str = f"{HUB_LAYER}mlp.") -> tuple[Linear, ...]:
    """The three matrices of a gated MLP."""
    return tuple(Linear(own + left, hub + right) for left, right in MLP_NAMES)


_NORMS = (
    rename(f"{LAYER}sa_norm.scale", f"{HUB_LAYER}input_layernorm.weight"),
    rename(f"{LAYER}mlp_norm.scale", f"{HUB_LAYER}post_attention_layernorm.weight"),
)
_HEAD_NORMS = tuple(rename(f"{LAYER}attn.{x}_norm.scale", f"{HUB_LAYER}self_attn.{x}_norm.weight") for x in ("q", "k"))
_EMBEDDING = rename("tok_embeddings.weight", "model.embed_tokens.weight")
_NORM = rename("norm.scale", "model.norm.weight")
_HEAD = Linear("output", "lm_head")
_CLASSIFIER = Linear("output", "score")
_LAYERS = Count("layers.{layer}.{rest}", "layer", ("num_hidden_layers",), "layers")

_REQUIRED_LAYER = tuple(
    f"{LAYER}{name}"
    for name in (
        *(f"attn.{x}_proj.weight" for x in ("q", "k", "v", "output")),
        *(f"mlp.{name}.weight" for name, _ in MLP_NAMES),
        "sa_norm.scale",
        "mlp_norm.scale",
    )
)
_REQUIRED = ("tok_embeddings.weight", *_REQUIRED_LAYER, "norm.scale")


def _decoder(name: str, model_types: tuple[str, ...], rows: dict[str, tuple[Operation, ...]], *more: Rule) -> Table:
    """A dense decoder with the usual names."""
    rules: tuple[Rule | Drop, ...] = (
        MADE_ANEW,
        _EMBEDDING,
        _NORM,
        *linear_rules((_HEAD, *attention(rows), *mlp())),
        *(more or _NORMS),
        ALREADY_ON_THE_HUB,
    )
    return Table(name, model_types, rules, NAMING, counts=(_LAYERS,), required=_REQUIRED)


def _classifier(table: Table, architecture: str) -> Table:
    """The same model with a head for classes or rewards in place of the one for tokens.

    The head's bias is not part of the hub's classes, and torchtune ignores it, too.
    """
    rules = [rule for rule in table.rules if rule not in _HEAD.rules()]
    drop = Drop("output.bias", "the hub's classification heads have no bias")
    return Table(
        f"{table.name}_classifier",
        table.model_types,
        (*linear_rules((_CLASSIFIER,)), drop, *rules),
        table.naming,
        counts=table.counts,
        required=(*table.required, "output.weight"),
        architectures=architecture,
    )


# Gemma 2 normalises what attention and MLP give, too: names cross, since the hub counts norms by their places.
_GEMMA2_NORMS = (
    rename(f"{LAYER}sa_norm.scale", f"{HUB_LAYER}input_layernorm.weight"),
    rename(f"{LAYER}sa_scale.scale", f"{HUB_LAYER}post_attention_layernorm.weight"),
    rename(f"{LAYER}mlp_norm.scale", f"{HUB_LAYER}pre_feedforward_layernorm.weight"),
    rename(f"{LAYER}mlp_scale.scale", f"{HUB_LAYER}post_feedforward_layernorm.weight"),
)
_GEMMA2 = Table(
    "torchtune_gemma2",
    ("gemma2",),
    (
        MADE_ANEW,
        _EMBEDDING,
        rename("norm.rms_norm.scale", "model.norm.weight"),
        _NORM,
        *linear_rules((_HEAD, *attention(PAIRS), *mlp())),
        *_GEMMA2_NORMS,
        ALREADY_ON_THE_HUB,
    ),
    NAMING,
    counts=(_LAYERS,),
    required=("tok_embeddings.weight", *_REQUIRED_LAYER, f"{LAYER}sa_scale.scale", f"{LAYER}mlp_scale.scale"),
)

_PHI = Table(
    "torchtune_phi3",
    ("phi3",),
    (
        MADE_ANEW,
        _EMBEDDING,
        _NORM,
        *linear_rules((_HEAD,)),
        Rule(
            tuple(f"{LAYER}attn.{x}_proj.weight" for x in "qkv"),
            (f"{HUB_LAYER}self_attn.qkv_proj.weight",),
            (JoinHeads(),),
        ),
        *Linear(f"{LAYER}attn.output_proj", f"{HUB_LAYER}self_attn.o_proj").rules(),
        Rule(
            (f"{LAYER}mlp.w1.weight", f"{LAYER}mlp.w3.weight"),
            (f"{HUB_LAYER}mlp.gate_up_proj.weight",),
            (Concatenate(0, 2),),
        ),
        *Linear(f"{LAYER}mlp.w2", f"{HUB_LAYER}mlp.down_proj").rules(),
        *_NORMS,
        ALREADY_ON_THE_HUB,
    ),
    NAMING,
    counts=(_LAYERS,),
    required=_REQUIRED,
)

_LLAMA = _decoder("torchtune_llama", ("llama",), PAIRS)
_MISTRAL = _decoder("torchtune_mistral", ("mistral",), PAIRS)

TABLES = (
    _LLAMA,
    _MISTRAL,
    _decoder("torchtune_gemma", ("gemma",), PAIRS),
    _GEMMA2,
    _PHI,
    _decoder("torchtune_qwen2", ("qwen2",), HALVES),
    _decoder("torchtune_qwen3", ("qwen3",), HALVES, *_NORMS, *_HEAD_NORMS),
    _classifier(_LLAMA, "ForSequenceClassification"),
    _classifier(_MISTRAL, "ForSequenceClassification"),
)
