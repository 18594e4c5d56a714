"""The tables of torchtune's and Meta's names: every real checkpoint goes to the hub's names and comes back."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from tests.families.runs import Result
from tests.formats.cases import Area
from tests.formats.evaluator import Evaluator, sha256
from workers.families import find_tables, map_checkpoint
from workers.families.registry import all_tables, model_facts
from workers.families.rules import Rule, apply_rules
from workers.families.sources import source_entries
from workers.formats import open_checkpoint
from workers.options import ConvertOptions
from workers.storage import open_folder

AREA = Area("torchtune")
MODELS = [
    name
    for name in AREA.split()[0]
    if any(part in name for part in ("-tune-", "meta-", "qlora")) and not name.startswith(("hf-", "dcp-"))
]
# Names that have older synonyms on the left side, and values that the hub does not keep.
SYNONYMS = {
    "attention.wqkv.layer_norm_weight": "attention_norm.weight",
    "feed_forward.norm.weight": "ffn_norm.weight",
    "feed_forward.mlp.layer_norm_weight": "ffn_norm.weight",
    "feed_forward.mlp.fc2_weight": "feed_forward.w2.weight",
}
LOSSY = ("tile_pos_embed.embedding", "gated_positional_embedding", "global_token_positional_embedding")


def synonym(name: str) -> str:
    end = next((end for end in SYNONYMS if name.endswith(end)), None)
    return name if end is None else name.removesuffix(end) + SYNONYMS[end]


@pytest.mark.parametrize("name", MODELS)
def test_a_model_comes_back_from_the_hubs_names_as_it_was(name):
    options = AREA.options(name)
    checkpoint, evaluator, _ = AREA.converted(name)
    config = checkpoint.config
    facts = model_facts(config, options)
    start = source_entries(checkpoint)
    entries, dropped = start, set()
    tables = find_tables(checkpoint.naming, config)
    for table in tables:
        applied = apply_rules(table.rules, entries, facts)
        assert not applied.unmatched
        entries = applied.entries
        dropped |= {name for name, _ in applied.dropped}
    for table in reversed(tables):
        applied = apply_rules(table.inverse_rules(facts.transformers), entries, facts)
        assert not applied.unmatched
        entries = applied.entries
    back = dict(entries)
    assert set(back) == {synonym(name) for name, _ in start if name not in dropped}
    for key, expression in start:
        if key not in dropped and not key.endswith(LOSSY):
            again = back[synonym(key)]
            assert (again.dtype, again.shape) == (expression.dtype, expression.shape), key
            assert sha256(evaluator.evaluate(again)) == sha256(evaluator.evaluate(expression)), key


def test_permuted_families_are_the_llama_line_mistral_and_gemma():
    permuted = {
        table.name
        for table in all_tables()
        if table.naming in ("torchtune", "meta")
        for rule in table.rules
        if isinstance(rule, Rule) and any(type(step).__name__ == "PairsToHalves" for step in rule.operations)
    }
    assert permuted == {
        "meta_llama",
        "meta_llama_vision",
        "torchtune_gemma",
        "torchtune_gemma2",
        "torchtune_llama",
        "torchtune_llama_classifier",
        "torchtune_llama_vision",
        "torchtune_mistral",
        "torchtune_mistral_classifier",
    }


GEMMA2 = {
    "architectures": ["Gemma2ForCausalLM"],
    "model_type": "gemma2",
    "hidden_size": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "num_hidden_layers": 1,
    "intermediate_size": 12,
    "vocab_size": 10,
    "tie_word_embeddings": True,
}


def test_gemma2s_norms_cross(tmp_path):
    layer = {
        "attn.q_proj.weight": (8, 8),
        "attn.k_proj.weight": (4, 8),
        "attn.v_proj.weight": (4, 8),
        "attn.output_proj.weight": (8, 8),
        "mlp.w1.weight": (12, 8),
        "mlp.w3.weight": (12, 8),
        "mlp.w2.weight": (8, 12),
    }
    norms = ("sa_norm", "sa_scale", "mlp_norm", "mlp_scale")
    state = {f"layers.0.{name}": torch.randn(shape) for name, shape in layer.items()}
    state |= {f"layers.0.{name}.scale": torch.full((8,), float(number)) for number, name in enumerate(norms)}
    state |= {"tok_embeddings.weight": torch.randn(10, 8), "norm.rms_norm.scale": torch.randn(8)}
    torch.save(state, tmp_path / "torchtune_model_0.pt")
    (tmp_path / "config.json").write_text(json.dumps(GEMMA2))
    found = converted(tmp_path).tensors()
    hub = ("input", "post_attention", "pre_feedforward", "post_feedforward")
    assert [found[f"model.layers.0.{name}_layernorm.weight"][0].item() for name in hub] == [0.0, 1.0, 2.0, 3.0]
    assert torch.equal(found["model.norm.weight"], state["norm.rms_norm.scale"])
    q = state["layers.0.attn.q_proj.weight"].view(2, 2, 2, 8).transpose(1, 2).reshape(8, 8)
    assert torch.equal(found["model.layers.0.self_attn.q_proj.weight"], q)


def converted(folder, **options) -> Result:
    asked = ConvertOptions(**options)
    checkpoint = open_checkpoint(open_folder(str(folder)), asked)
    evaluator = Evaluator(checkpoint)
    return Result(map_checkpoint(checkpoint, asked, evaluator), evaluator)


def phi_adapter(rank=2):
    names = {"attn.q_proj": (8, 8), "attn.k_proj": (4, 8), "mlp.w3": (12, 8), "mlp.w2": (8, 12)}
    parts = {}
    for name, (rows, columns) in names.items():
        parts[f"layers.0.{name}.lora_a.weight"] = torch.randint(-3, 4, (rank, columns)).float()
        parts[f"layers.0.{name}.lora_b.weight"] = torch.randint(-3, 4, (rows, rank)).float()
    return parts


def test_a_phi_adapter_is_merged_into_the_rows_of_the_fused_matrices(tmp_path):
    config = GEMMA2 | {"model_type": "phi3", "architectures": ["Phi3ForCausalLM"], "tie_word_embeddings": False}
    base = {
        "model.embed_tokens.weight": torch.zeros(10, 8),
        "model.layers.0.self_attn.qkv_proj.weight": torch.randint(-9, 9, (16, 8)).float(),
        "model.layers.0.self_attn.o_proj.weight": torch.zeros(8, 8),
        "model.layers.0.mlp.gate_up_proj.weight": torch.randint(-9, 9, (24, 8)).float(),
        "model.layers.0.mlp.down_proj.weight": torch.randint(-9, 9, (8, 12)).float(),
        "model.layers.0.input_layernorm.weight": torch.ones(8),
        "model.layers.0.post_attention_layernorm.weight": torch.ones(8),
        "model.norm.weight": torch.ones(8),
        "lm_head.weight": torch.zeros(10, 8),
    }
    for folder in ("base", "adapter"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "config.json").write_text(json.dumps(config))
    save_file(base, tmp_path / "base/model.safetensors")
    adapter = phi_adapter()
    torch.save(adapter, tmp_path / "adapter/adapter_model.pt")
    found = converted(tmp_path / "adapter", base=str(tmp_path / "base"), lora="merge", lora_alpha=4.0).tensors()

    def delta(name):
        return 2 * adapter[f"layers.0.{name}.lora_b.weight"] @ adapter[f"layers.0.{name}.lora_a.weight"]

    expected = {name: tensor.clone() for name, tensor in base.items()}
    expected["model.layers.0.self_attn.qkv_proj.weight"][:8] += delta("attn.q_proj")
    expected["model.layers.0.self_attn.qkv_proj.weight"][8:12] += delta("attn.k_proj")
    expected["model.layers.0.mlp.gate_up_proj.weight"][12:] += delta("mlp.w3")
    expected["model.layers.0.mlp.down_proj.weight"] += delta("mlp.w2")
    assert sorted(found) == sorted(expected)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
