"""Models under the names and in the row orders of training frameworks, from the hub's tensors: an own account.

Says of each framework what its modules are (fused qkv by groups, experts stacked, rotary rows in pairs) in plain
torch, and shares nothing with the tables. Sources: Megatron-Core's layer specs, torchtitan's and torchtune's modules.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch

Tensors = dict[str, torch.Tensor]
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")


def take(tensors: Tensors, layer: int) -> Tensors:
    """The tensors of a layer, without its prefix."""
    prefix = f"model.layers.{layer}."
    return {name.removeprefix(prefix): values for name, values in tensors.items() if name.startswith(prefix)}


def layers_of(tensors: Tensors) -> range:
    return range(1 + max(int(found[1]) for name in tensors if (found := _LAYER.fullmatch(name))))


def to_pairs(values: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows that rotate together, half a head apart on the hub, become neighbours."""
    head = values.shape[0] // heads
    order = [h * head + half * head // 2 + row for h in range(heads) for row in range(head // 2) for half in (0, 1)]
    return values[order]


def ends(tensors: Tensors, names: dict[str, str]) -> Tensors:
    return {new: tensors[old] for old, new in names.items() if old in tensors}


def experts(layer: Tensors, name: str, module: str = "mlp.experts") -> torch.Tensor:
    """One matrix of all experts, stacked."""
    found = [key for key in layer if re.fullmatch(rf"{re.escape(module)}\.\d+\.{name}\.weight", key)]
    return torch.stack([layer[f"{module}.{number}.{name}.weight"] for number in range(len(found))])


# --- torchtune, Meta -----------------------------------------------------------------------------------------------

TUNE_LAYER = {
    "self_attn.o_proj.weight": "attn.output_proj.weight",
    "self_attn.q_norm.weight": "attn.q_norm.scale",
    "self_attn.k_norm.weight": "attn.k_norm.scale",
    "mlp.gate_proj.weight": "mlp.w1.weight",
    "mlp.up_proj.weight": "mlp.w3.weight",
    "mlp.down_proj.weight": "mlp.w2.weight",
    "input_layernorm.weight": "sa_norm.scale",
    "post_attention_layernorm.weight": "mlp_norm.scale",
}
# By what torchtune's layers compute; its own import from the hub has the two norms around the MLP the other way round.
GEMMA2_NORMS = {
    "post_attention_layernorm.weight": "sa_scale.scale",
    "pre_feedforward_layernorm.weight": "mlp_norm.scale",
    "post_feedforward_layernorm.weight": "mlp_scale.scale",
}
IN_PAIRS = ("llama", "mistral", "gemma", "gemma2")


def torchtune(tensors: Tensors, config: Any) -> Tensors:
    """A decoder of torchtune."""
    kind = config.model_type
    heads = {"q": config.num_attention_heads, "k": config.num_key_value_heads}
    head = getattr(config, "head_dim", None) or config.hidden_size // heads["q"]
    names = TUNE_LAYER | (GEMMA2_NORMS if kind == "gemma2" else {})
    norm = "norm.rms_norm.scale" if kind == "gemma2" else "norm.scale"
    made = ends(tensors, {"model.embed_tokens.weight": "tok_embeddings.weight", "model.norm.weight": norm})
    made |= ends(tensors, {"lm_head.weight": "output.weight", "score.weight": "output.weight"})
    for number in layers_of(tensors):
        for name, values in take(tensors, number).items():
            at = f"layers.{number}."
            if name == "self_attn.qkv_proj.weight":
                rows = [heads["q"] * head, heads["k"] * head, heads["k"] * head]
                for letter, part in zip("qkv", values.split(rows), strict=True):
                    made[f"{at}attn.{letter}_proj.weight"] = part.clone()
            elif name == "mlp.gate_up_proj.weight":
                made[f"{at}mlp.w1.weight"], made[f"{at}mlp.w3.weight"] = (half.clone() for half in values.chunk(2))
            elif found := re.fullmatch(r"self_attn\.([qkv])_proj\.(weight|bias)", name):
                turned = found[1] in heads and kind in IN_PAIRS
                made[f"{at}attn.{found[1]}_proj.{found[2]}"] = to_pairs(values, heads[found[1]]) if turned else values
            else:
                made[at + names[name]] = values
    return made


META_LAYER = {
    "self_attn.v_proj.weight": "attention.wv.weight",
    "self_attn.o_proj.weight": "attention.wo.weight",
    "mlp.gate_proj.weight": "feed_forward.w1.weight",
    "mlp.up_proj.weight": "feed_forward.w3.weight",
    "mlp.down_proj.weight": "feed_forward.w2.weight",
    "input_layernorm.weight": "attention_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
}
META_ENDS = {
    "model.embed_tokens.weight": "tok_embeddings.weight",
    "model.norm.weight": "norm.weight",
    "lm_head.weight": "output.weight",
}


def meta(tensors: Tensors, config: Any) -> Tensors:
    """A Llama of Meta's, whole."""
    made = ends(tensors, META_ENDS)
    for number in layers_of(tensors):
        layer = take(tensors, number)
        for letter, heads in (("q", config.num_attention_heads), ("k", config.num_key_value_heads)):
            rows = to_pairs(layer.pop(f"self_attn.{letter}_proj.weight"), heads)
            made[f"layers.{number}.attention.w{letter}.weight"] = rows
        made |= {f"layers.{number}.{META_LAYER[name]}": values for name, values in layer.items()}
    return made


# --- torchtitan ----------------------------------------------------------------------------------------------------

TITAN_LAYER = META_LAYER | {
    "self_attn.o_proj.bias": "attention.wo.bias",
    "self_attn.q_norm.weight": "attention.q_norm.weight",
    "self_attn.k_norm.weight": "attention.k_norm.weight",
    "self_attn.sinks": "attention.sinks",
    "self_attn.q_a_proj.weight": "attention.wq_a.weight",
    "self_attn.q_a_layernorm.weight": "attention.q_norm.weight",
    "self_attn.q_b_proj.weight": "attention.wq_b.weight",
    "self_attn.kv_a_proj_with_mqa.weight": "attention.wkv_a.weight",
    "self_attn.kv_a_layernorm.weight": "attention.kv_norm.weight",
    "self_attn.kv_b_proj.weight": "attention.wkv_b.weight",
    "mlp.gate.weight": "moe.router.gate.weight",
    "mlp.gate.e_score_correction_bias": "moe.expert_bias_E",
    "mlp.shared_experts.gate_proj.weight": "moe.shared_experts.w1.weight",
    "mlp.shared_experts.up_proj.weight": "moe.shared_experts.w3.weight",
    "mlp.shared_experts.down_proj.weight": "moe.shared_experts.w2.weight",
    "mlp.router.weight": "moe.router.gate.weight",
    "mlp.router.bias": "moe.router.gate.bias",
    "feed_forward.router.weight": "moe.router.gate.weight",
    "feed_forward.shared_expert.gate_proj.weight": "moe.shared_experts.w1.weight",
    "feed_forward.shared_expert.up_proj.weight": "moe.shared_experts.w3.weight",
    "feed_forward.shared_expert.down_proj.weight": "moe.shared_experts.w2.weight",
    "feed_forward.gate_proj.weight": "feed_forward.w1.weight",
    "feed_forward.up_proj.weight": "feed_forward.w3.weight",
    "feed_forward.down_proj.weight": "feed_forward.w2.weight",
}
TITAN_ENDS = META_ENDS | {"lm_head.weight": "lm_head.weight"}


def torchtitan(tensors: Tensors, config: Any) -> Tensors:
    """A model of torchtitan 0.3."""
    made = ends(tensors, TITAN_ENDS)
    heads = {"q": config.num_attention_heads, "k": config.num_key_value_heads}
    for number in layers_of(tensors):
        layer, at = take(tensors, number), f"layers.{number}."
        inner = f"{at}moe.routed_experts.inner_experts."
        if "mlp.experts.0.gate_proj.weight" in layer:
            for own, hub, end in (("w1", "gate", "EFD"), ("w3", "up", "EFD"), ("w2", "down", "EDF")):
                made[f"{inner}{own}_{end}"] = experts(layer, f"{hub}_proj")
        if config.model_type == "gpt_oss":
            made[f"{inner}mlp1_weight"] = layer["mlp.experts.gate_up_proj"].transpose(1, 2)
            made[f"{inner}mlp2_weight"] = layer["mlp.experts.down_proj"].transpose(1, 2)
            made[f"{inner}mlp1_bias"] = layer["mlp.experts.gate_up_proj_bias"]
            made[f"{inner}mlp2_bias"] = layer["mlp.experts.down_proj_bias"]
        if "feed_forward.experts.gate_up_proj" in layer:
            gate, up = layer["feed_forward.experts.gate_up_proj"].transpose(1, 2).chunk(2, 1)
            made |= {f"{inner}w1_EFD": gate, f"{inner}w3_EFD": up}
            made[f"{inner}w2_EDF"] = layer["feed_forward.experts.down_proj"].transpose(1, 2)
        for name, values in layer.items():
            if found := re.fullmatch(r"self_attn\.([qkv])_proj\.(weight|bias)", name):
                turned = config.model_type == "llama" and found[1] in heads
                rows = to_pairs(values, heads[found[1]]) if turned else values
                made[f"{at}attention.qkv_linear.w{found[1]}.{found[2]}"] = rows
            elif ".experts." not in name:
                made[at + TITAN_LAYER[name]] = values
    return made


# --- Megatron-Core -------------------------------------------------------------------------------------------------

MEGATRON_ENDS = {
    "model.embed_tokens.weight": "embedding.word_embeddings.weight",
    "model.norm.weight": "decoder.final_layernorm.weight",
    "lm_head.weight": "output_layer.weight",
}
MEGATRON_LAYER = {
    "self_attn.o_proj.weight": "self_attention.linear_proj.weight",
    "self_attn.o_proj.bias": "self_attention.linear_proj.bias",
    "self_attn.q_norm.weight": "self_attention.q_layernorm.weight",
    "self_attn.k_norm.weight": "self_attention.k_layernorm.weight",
    "self_attn.sinks": "self_attention.core_attention.softmax_offset",
    "self_attn.q_a_proj.weight": "self_attention.linear_q_down_proj.weight",
    "self_attn.q_a_layernorm.weight": "self_attention.linear_q_up_proj.layer_norm_weight",
    "self_attn.q_b_proj.weight": "self_attention.linear_q_up_proj.weight",
    "self_attn.kv_a_proj_with_mqa.weight": "self_attention.linear_kv_down_proj.weight",
    "self_attn.kv_a_layernorm.weight": "self_attention.linear_kv_up_proj.layer_norm_weight",
    "self_attn.kv_b_proj.weight": "self_attention.linear_kv_up_proj.weight",
    "mlp.gate.weight": "mlp.router.weight",
    "block_sparse_moe.gate.weight": "mlp.router.weight",
    "mlp.router.weight": "mlp.router.weight",
    "mlp.router.bias": "mlp.router.bias",
    "mlp.gate.e_score_correction_bias": "mlp.router.expert_bias",
    "mlp.shared_expert_gate.weight": "mlp.shared_experts.gate_weight",
    "mlp.down_proj.weight": "mlp.linear_fc2.weight",
    "mlp.gate_up_proj.weight": "mlp.linear_fc1.weight",
    "mlp.shared_expert.down_proj.weight": "mlp.shared_experts.linear_fc2.weight",
    "mlp.shared_experts.down_proj.weight": "mlp.shared_experts.linear_fc2.weight",
    "post_self_attn_layernorm.weight": "post_self_attn_layernorm.weight",
    "post_mlp_layernorm.weight": "post_mlp_layernorm.weight",
}
SANDWICH = {
    "post_attention_layernorm.weight": "self_attention.linear_proj.post_layernorm.weight",
    "pre_feedforward_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
    "post_feedforward_layernorm.weight": "mlp.linear_fc2.post_layernorm.weight",
}
EXPERT_NAMES = {
    "mlp.experts": ("gate_proj", "up_proj", "down_proj"),
    "block_sparse_moe.experts": ("w1", "w3", "w2"),
}
_GATES = re.compile(r"(mlp|mlp\.shared_experts?)\.gate_proj\.weight")


def by_groups(layer: Tensors, leaf: str, groups: int) -> torch.Tensor:
    """``linear_qkv``: for each key-value head its queries, its key and its value."""
    parts = [layer[f"self_attn.{letter}_proj.{leaf}"] for letter in "qkv"]
    split = [part.chunk(groups) for part in parts]
    return torch.cat([split[kind][group] for group in range(groups) for kind in range(3)])


def megatron(tensors: Tensors, config: Any) -> Tensors:
    """A GPTModel of Megatron-Core (TransformerEngine's layer spec) as ``dist_checkpointing`` holds it."""
    made = ends(tensors, MEGATRON_ENDS)
    for number in layers_of(tensors):
        layer = take(tensors, number)
        parts = _megatron_attention(layer, config)
        parts |= _megatron_mlp(layer, config)
        names = MEGATRON_LAYER | (SANDWICH if "pre_feedforward_layernorm.weight" in layer else {})
        parts |= {names[name]: values for name, values in layer.items() if name in names}
        made |= {f"decoder.layers.{number}.{name}": values for name, values in parts.items()}
    return made


def _megatron_attention(layer: Tensors, config: Any) -> Tensors:
    norm = layer["input_layernorm.weight"]
    if "self_attn.kv_b_proj.weight" in layer:
        own = {"self_attn.q_proj.weight": "self_attention.linear_q_proj.weight"}
        return {"input_layernorm.weight": norm, **{own[n]: layer[n] for n in own if n in layer}}
    made = {"self_attention.linear_qkv.layer_norm_weight": norm}
    for leaf in ("weight", "bias"):
        if f"self_attn.q_proj.{leaf}" in layer:
            made[f"self_attention.linear_qkv.{leaf}"] = by_groups(layer, leaf, config.num_key_value_heads)
    return made


def _megatron_mlp(layer: Tensors, config: Any) -> Tensors:
    made = {}
    for name in layer:
        if found := _GATES.fullmatch(name):
            up = layer[name.replace("gate_proj", "up_proj")]
            module = "mlp" if found[1] == "mlp" else "mlp.shared_experts"
            made[f"{module}.linear_fc1.weight"] = torch.cat([layer[name], up])
    stacked = "mlp.experts.experts."
    for module, hub in EXPERT_NAMES.items():
        if f"{module}.0.{hub[0]}.weight" in layer:
            gate, up, down = (experts(layer, name, module) for name in hub)
            made |= {f"{stacked}linear_fc1.weight": torch.cat([gate, up], 1), f"{stacked}linear_fc2.weight": down}
    if config.model_type == "gpt_oss":
        columns = layer["mlp.experts.gate_up_proj"]
        both = torch.cat([columns[..., 0::2], columns[..., 1::2]], -1)
        bias = layer["mlp.experts.gate_up_proj_bias"]
        made[f"{stacked}linear_fc1.weight"] = both.transpose(1, 2)
        made[f"{stacked}linear_fc1.bias"] = torch.cat([bias[:, 0::2], bias[:, 1::2]], -1)
        made[f"{stacked}linear_fc2.weight"] = layer["mlp.experts.down_proj"].transpose(1, 2)
        made[f"{stacked}linear_fc2.bias"] = layer["mlp.experts.down_proj_bias"]
    if "pre_feedforward_layernorm.weight" not in layer:
        mixture = f"{stacked}linear_fc1.weight" in made
        norm = "pre_mlp_layernorm.weight" if mixture else "mlp.linear_fc1.layer_norm_weight"
        made[norm] = layer["post_attention_layernorm.weight"]
    return made


def megatron_gemma3(tensors: Tensors, config: Any) -> Tensors:
    """Gemma 3 as Megatron-Bridge builds it: the hub's tower, a projector of Megatron's, Megatron's language model.

    Source: Megatron-Bridge ``models/gemma_vl`` (``modeling_gemma3_vl.py``, ``gemma3_vl_bridge.py``).
    """
    inner = "language_model.model."
    text = {name.replace(inner, "model.", 1): values for name, values in tensors.items() if name.startswith(inner)}
    made = {f"language_model.{name}": values for name, values in megatron(text, config.text_config).items()}
    made |= {name: values for name, values in tensors.items() if name.startswith("vision_tower.")}
    projector = "multi_modal_projector."
    made[f"{projector}mm_soft_embed_norm.weight"] = tensors[f"{projector}mm_soft_emb_norm.weight"]
    made[f"{projector}proj.weight"] = tensors[f"{projector}mm_input_projection_weight"].t()
    return made


def megatron_vision(tensors: Tensors, config: Any) -> Tensors:
    """Qwen's vision-language models as mbridge and Megatron-Bridge build them of Megatron-Core's layers.

    Sources: mbridge ``models/qwen3_vl/base_bridge.py`` and ``models/qwen2_5_vl`` (``_weight_to_mcore_format``).
    """
    inner = "model.language_model." if config.model_type.startswith("qwen3") else "model."
    text = {name.replace(inner, "model.", 1): values for name, values in tensors.items() if "visual." not in name}
    for name in [name for name in text if name.endswith("mlp.experts.gate_up_proj")]:
        text |= _apart(text, name.removesuffix("gate_up_proj"), config.text_config.hidden_size)
    made = {f"language_model.{name}": values for name, values in megatron(text, config.text_config).items()}
    tower = {name.partition("visual.")[2]: values for name, values in tensors.items() if "visual." in name}
    return made | {f"vision_model.{name}": values for name, values in _tower(tower, config.vision_config).items()}


def _apart(text: Tensors, at: str, hidden: int) -> Tensors:
    """Experts one by one, each matrix with the hidden size where a linear layer has it."""
    both, down = text.pop(f"{at}gate_up_proj"), text.pop(f"{at}down_proj")
    both = both if both.shape[2] == hidden else both.transpose(1, 2)
    down = down if down.shape[1] == hidden else down.transpose(1, 2)
    made = {}
    for number in range(both.shape[0]):
        made[f"{at}{number}.gate_proj.weight"], made[f"{at}{number}.up_proj.weight"] = both[number].chunk(2)
        made[f"{at}{number}.down_proj.weight"] = down[number]
    return made


TOWER_ENDS = {
    "merger.ln_q.weight": "decoder.final_layernorm.weight",
    "merger.mlp.0.weight": "projection.encoder.linear_fc1.weight",
    "merger.mlp.0.bias": "projection.encoder.linear_fc1.bias",
    "merger.mlp.2.weight": "projection.encoder.linear_fc2.weight",
    "merger.mlp.2.bias": "projection.encoder.linear_fc2.bias",
    "merger.norm.weight": "merger.patch_norm.weight",
    "merger.norm.bias": "merger.patch_norm.bias",
}
TOWER_BLOCK = {
    "attn.proj": "self_attention.linear_proj.",
    "norm1": "self_attention.linear_qkv.layer_norm_",
    "norm2": "mlp.linear_fc1.layer_norm_",
    "mlp.linear_fc1": "mlp.linear_fc1.",
    "mlp.linear_fc2": "mlp.linear_fc2.",
    "mlp.down_proj": "mlp.linear_fc2.",
}


def _tower(tower: Tensors, config: Any) -> Tensors:
    made = {}
    for name, values in tower.items():
        if found := re.fullmatch(r"deepstack_merger_list\.(\d+)\.(\w+)\.(\w+)", name):
            module = found[2].replace("norm", "patch_norm")
            made[f"decoder.deepstack_merger_list.{found[1]}.{module}.{found[3]}"] = values
        elif not (block := re.fullmatch(r"blocks\.(\d+)\.(.+)\.(weight|bias)", name)):
            made[TOWER_ENDS.get(name, name)] = values
        elif block[2] == "attn.qkv":
            heads = [part.chunk(config.num_heads) for part in values.chunk(3)]
            rows = torch.cat([heads[kind][head] for head in range(config.num_heads) for kind in range(3)])
            made[f"decoder.layers.{block[1]}.self_attention.linear_qkv.{block[3]}"] = rows
        elif block[2] == "mlp.gate_proj":
            up = tower[name.replace("gate_proj", "up_proj")]
            made[f"decoder.layers.{block[1]}.mlp.linear_fc1.{block[3]}"] = torch.cat([values, up])
        elif block[2] != "mlp.up_proj":
            made[f"decoder.layers.{block[1]}.{TOWER_BLOCK[block[2]]}{block[3]}"] = values
    return made


WRITERS: dict[str, Callable[[Tensors, Any], Tensors]] = {
    "torchtune": torchtune,
    "meta": meta,
    "torchtitan": torchtitan,
    "megatron": megatron,
    "megatron-vision": megatron_vision,
    "megatron-gemma3": megatron_gemma3,
    "hub": lambda tensors, _: dict(tensors),
}
