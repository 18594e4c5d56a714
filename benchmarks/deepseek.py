"""DeepSeek-V3 as it is saved: true names, shapes and counts of its tensors, for planning without its weights.

Source of the sizes: the model's config.json and the index of its files on the hub (before FP8 scales, which a
training run in bfloat16 does not have).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

Shape = tuple[int, ...]

LAYERS, DENSE_LAYERS, NEXT_LAYERS = 61, 3, 1
HIDDEN, INNER, EXPERT_INNER = 7168, 18_432, 2048
EXPERTS = 256
HEADS, QUERY_RANK, KEY_RANK, ROTARY, PLAIN, VALUE = 128, 1536, 512, 64, 128, 128
VOCABULARY = 129_280

CONFIG = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "moe_intermediate_size": EXPERT_INNER,
    "num_hidden_layers": LAYERS,
    "first_k_dense_replace": DENSE_LAYERS,
    "num_nextn_predict_layers": NEXT_LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "q_lora_rank": QUERY_RANK,
    "kv_lora_rank": KEY_RANK,
    "qk_rope_head_dim": ROTARY,
    "qk_nope_head_dim": PLAIN,
    "v_head_dim": VALUE,
    "n_routed_experts": EXPERTS,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "vocab_size": VOCABULARY,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


class Chunk(NamedTuple):
    """A box of a tensor and the rank that saved it."""

    rank: int
    offsets: Shape
    sizes: Shape


class Saved(NamedTuple):
    """A tensor, and how a run saved it."""

    name: str
    shape: Shape
    chunks: list[Chunk]
    dtype: str = "bfloat16"


def hub_tensors(expert_groups: int, shards: int) -> Iterator[Saved]:
    """The hub's names, each expert a tensor: experts on one of the groups, rows over its shards; the rest over all."""
    world = expert_groups * shards
    for name, shape in _hub_shapes():
        dtype = "float32" if name.endswith("e_score_correction_bias") else "bfloat16"
        first, count = 0, world
        if ".experts." in name:
            expert = int(name.split(".experts.")[1].split(".")[0])
            first, count = expert * expert_groups // EXPERTS * shards, shards
        yield Saved(name, shape, list(_rows(shape, first, count)), dtype)


def _rows(shape: Shape, first_rank: int, ranks: int) -> Iterator[Chunk]:
    """Rows cut as torch's ``Shard(0)`` does: equal, the last ones shorter or empty."""
    step = -(-shape[0] // ranks)
    for rank in range(ranks):
        begin = rank * step
        if begin < shape[0]:
            zeros = (0,) * (len(shape) - 1)
            yield Chunk(first_rank + rank, (begin, *zeros), (min(step, shape[0] - begin), *shape[1:]))


def _hub_shapes() -> Iterator[tuple[str, Shape]]:
    yield "model.embed_tokens.weight", (VOCABULARY, HIDDEN)
    for layer in range(LAYERS + NEXT_LAYERS):
        at = f"model.layers.{layer}"
        yield from _hub_attention(at)
        yield from _gated(f"{at}.mlp", INNER) if layer < DENSE_LAYERS else _hub_mixture(f"{at}.mlp")
        if layer >= LAYERS:
            yield f"{at}.embed_tokens.weight", (VOCABULARY, HIDDEN)
            yield from ((f"{at}.{norm}.weight", (HIDDEN,)) for norm in ("enorm", "hnorm", "shared_head.norm"))
            yield f"{at}.eh_proj.weight", (HIDDEN, 2 * HIDDEN)
            yield f"{at}.shared_head.head.weight", (VOCABULARY, HIDDEN)
    yield "model.norm.weight", (HIDDEN,)
    yield "lm_head.weight", (VOCABULARY, HIDDEN)


def _hub_attention(at: str) -> Iterator[tuple[str, Shape]]:
    yield f"{at}.input_layernorm.weight", (HIDDEN,)
    yield f"{at}.post_attention_layernorm.weight", (HIDDEN,)
    shapes: dict[str, Shape] = {
        "q_a_proj": (QUERY_RANK, HIDDEN),
        "q_a_layernorm": (QUERY_RANK,),
        "q_b_proj": (HEADS * (PLAIN + ROTARY), QUERY_RANK),
        "kv_a_proj_with_mqa": (KEY_RANK + ROTARY, HIDDEN),
        "kv_a_layernorm": (KEY_RANK,),
        "kv_b_proj": (HEADS * (PLAIN + VALUE), KEY_RANK),
        "o_proj": (HIDDEN, HEADS * VALUE),
    }
    yield from ((f"{at}.self_attn.{name}.weight", shape) for name, shape in shapes.items())


def _gated(at: str, inner: int) -> Iterator[tuple[str, Shape]]:
    yield f"{at}.gate_proj.weight", (inner, HIDDEN)
    yield f"{at}.up_proj.weight", (inner, HIDDEN)
    yield f"{at}.down_proj.weight", (HIDDEN, inner)


def _hub_mixture(at: str) -> Iterator[tuple[str, Shape]]:
    yield f"{at}.gate.weight", (EXPERTS, HIDDEN)
    yield f"{at}.gate.e_score_correction_bias", (EXPERTS,)
    for expert in range(EXPERTS):
        yield from _gated(f"{at}.experts.{expert}", EXPERT_INNER)
    yield from _gated(f"{at}.shared_experts", EXPERT_INNER)


def megatron_tensors(tensor_ranks: int, expert_ranks: int, pipeline_ranks: int) -> Iterator[Saved]:
    """``torch_dist`` names: cut by tensor parallelism, experts stacked and cut by expert and tensor parallelism."""
    per_stage = tensor_ranks * expert_ranks
    for name, shape, dim in _megatron_shapes():
        parts = name.split(".")
        layer = int(parts[2]) if name.startswith("decoder.layers.") else 0 if name.startswith("embedding") else LAYERS
        stage = min(layer * pipeline_ranks // LAYERS, pipeline_ranks - 1)
        chunks = list(_grid(name, shape, dim, tensor_ranks))
        stacked = ".experts.experts." in name
        yield Saved(
            name,
            shape,
            [
                Chunk(
                    stage * per_stage
                    + (offsets[0] * expert_ranks // EXPERTS * tensor_ranks if stacked else 0)
                    + number % tensor_ranks,
                    offsets,
                    sizes,
                )
                for number, (offsets, sizes) in enumerate(chunks)
            ],
            "float32" if name.endswith("expert_bias") else "bfloat16",
        )


def _grid(name: str, shape: Shape, dim: int | None, ranks: int) -> Iterator[tuple[Shape, Shape]]:
    """Chunks: experts one by one, gate and up apart (``apply_swiglu_sharded_factory``), ``dim`` over the ranks."""
    stacked = ".experts.experts." in name
    cuts = 1 if dim is None else ranks * (2 if "linear_fc1.weight" in name else 1)
    for expert in range(shape[0] if stacked else 1):
        for part in range(cuts):
            offsets, sizes = [0] * len(shape), list(shape)
            if stacked:
                offsets[0], sizes[0] = expert, 1
            if dim is not None:
                sizes[dim] //= cuts
                offsets[dim] = part * sizes[dim]
            yield tuple(offsets), tuple(sizes)


def _megatron_shapes() -> Iterator[tuple[str, Shape, int | None]]:
    """Names, shapes and the dimension that tensor parallelism cuts."""
    yield "embedding.word_embeddings.weight", (VOCABULARY, HIDDEN), 0
    for layer in range(LAYERS):
        at = f"decoder.layers.{layer}"
        yield from _megatron_attention(at)
        yield from _megatron_dense(at) if layer < DENSE_LAYERS else _megatron_mixture(at)
    for layer in range(NEXT_LAYERS):
        at = f"mtp.layers.{layer}"
        yield from ((f"{at}.{norm}.weight", (HIDDEN,), None) for norm in ("enorm", "hnorm", "final_layernorm"))
        yield f"{at}.eh_proj.weight", (HIDDEN, 2 * HIDDEN), 0
        yield from _megatron_attention(f"{at}.transformer_layer")
        yield from _megatron_mixture(f"{at}.transformer_layer")
    yield "decoder.final_layernorm.weight", (HIDDEN,), None
    yield "output_layer.weight", (VOCABULARY, HIDDEN), 0


def _megatron_attention(at: str) -> Iterator[tuple[str, Shape, int | None]]:
    yield f"{at}.input_layernorm.weight", (HIDDEN,), None
    shapes: dict[str, tuple[Shape, int | None]] = {
        "linear_q_down_proj.weight": ((QUERY_RANK, HIDDEN), None),
        "linear_q_up_proj.layer_norm_weight": ((QUERY_RANK,), None),
        "linear_q_up_proj.weight": ((HEADS * (PLAIN + ROTARY), QUERY_RANK), 0),
        "linear_kv_down_proj.weight": ((KEY_RANK + ROTARY, HIDDEN), None),
        "linear_kv_up_proj.layer_norm_weight": ((KEY_RANK,), None),
        "linear_kv_up_proj.weight": ((HEADS * (PLAIN + VALUE), KEY_RANK), 0),
        "linear_proj.weight": ((HIDDEN, HEADS * VALUE), 1),
    }
    yield from ((f"{at}.self_attention.{name}", *cut) for name, cut in shapes.items())


def _megatron_dense(at: str) -> Iterator[tuple[str, Shape, int | None]]:
    yield f"{at}.mlp.linear_fc1.layer_norm_weight", (HIDDEN,), None
    yield f"{at}.mlp.linear_fc1.weight", (2 * INNER, HIDDEN), 0
    yield f"{at}.mlp.linear_fc2.weight", (HIDDEN, INNER), 1


def _megatron_mixture(at: str) -> Iterator[tuple[str, Shape, int | None]]:
    yield f"{at}.pre_mlp_layernorm.weight", (HIDDEN,), None
    yield f"{at}.mlp.router.weight", (EXPERTS, HIDDEN), None
    yield f"{at}.mlp.router.expert_bias", (EXPERTS,), None
    yield f"{at}.mlp.experts.experts.linear_fc1.weight", (EXPERTS, 2 * EXPERT_INNER, HIDDEN), 1
    yield f"{at}.mlp.experts.experts.linear_fc2.weight", (EXPERTS, HIDDEN, EXPERT_INNER), 2
    yield f"{at}.mlp.shared_experts.linear_fc1.weight", (2 * EXPERT_INNER, HIDDEN), 0
    yield f"{at}.mlp.shared_experts.linear_fc2.weight", (HIDDEN, EXPERT_INNER), 1
