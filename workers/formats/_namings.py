"""Whose names the tensors of a file have: the hub's, torchtune's or Meta's.

Names of files do not tell, those of tensors do. They decide in which order rows of q and k are, so that a mixture is
refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from workers.errors import GeometryMismatch

HUB, TORCHTUNE, META, PEFT = "huggingface", "torchtune", "meta", "peft"

_KEYS = {
    HUB: re.compile(
        r"(model\.embed_tokens|lm_head|score)\.weight|model\.layers\.\d+\..+|language_model\.(model\.|lm_head\.).+"
    ),
    TORCHTUNE: re.compile(
        r"(decoder\.)?layers\.\d+\.(fusion_layer\.)?(attn\.\w+_proj|sa_norm|mlp_norm|mlp\.w[123])\..+"
        r"|(decoder\.)?tok_embeddings\.fusion_embedding\..+|relative_position_bias\.embedding\.weight"
        r"|(encoders?\.(vision\.)?)(clip|projection)\..+"
    ),
    META: re.compile(
        r"(text_model\.)?(layers|cross_attention_layers)\.\d+\.(attention\.(wqkv|w[qkvo])\.|feed_forward\.(w[123]\.|mlp\.fc"
        r"|experts\.moe_w)|attention_norm\.|ffn_norm\.).*|vision_(model|embeddings)\.vision_encoder\..+"
    ),
    PEFT: re.compile(r"base_model\.model\..+"),
}


def naming_of_keys(names: Iterable[str], file: str) -> str | None:
    """The naming of tensors, None where no name tells; ``GeometryMismatch`` when names of two namings are mixed."""
    examples: dict[str, list[str]] = {}
    for name in names:
        for naming, pattern in _KEYS.items():
            if pattern.fullmatch(name):
                examples.setdefault(naming, []).append(name)
                break
    if len(examples) > 1:
        raise _mixed(examples, file)
    return next(iter(examples), None)


def _mixed(examples: dict[str, list[str]], file: str) -> GeometryMismatch:
    few, many = sorted(examples, key=lambda naming: len(examples[naming]))[:: len(examples) - 1]
    odd, usual = examples[few][0], examples[many][0]
    return GeometryMismatch(
        f"{file} mixes names of two kinds: {odd} is one of {_OWNERS[few]}, {usual} one of {_OWNERS[many]}; in which "
        "order the rows of q and k are can't be told",
        file=file,
        tensor=odd,
        expected=f"names of {_OWNERS[many]} only",
        found=odd,
        hint="The file was put together from two models or edited: save it again from one.",
    )


_OWNERS = {HUB: "Hugging Face", TORCHTUNE: "torchtune", META: "Meta", PEFT: "peft"}
