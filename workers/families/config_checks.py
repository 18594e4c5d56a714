"""Compare what a config and the user say with the tensors' shapes, under the hub's names, whatever the source was.

A config of another model, a vocabulary resized after saving, a layer that is missing: all load into a wrong model or
none, and show here. Only what is certain is compared: a right model must never be refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from workers.dtypes import ELEMENT_TYPES
from workers.errors import GeometryMismatch, InvalidOption
from workers.families.config_values import CONFIG, SIZE_OPTIONS, Told, given_sizes, no_size, told_sizes
from workers.families.registry import model_types, text_config
from workers.families.rules import Entry
from workers.families.sum_checks import FURTHER_LAYERS, GATED, LATENT, SumCheck, sum_checks
from workers.options import ConvertOptions

CERTAIN = frozenset(
    (
        "gemma",
        "gemma2",
        "gemma3",
        "gemma3_text",
        "glm4",
        "llama",
        "mistral",
        "mistral3",
        "mixtral",
        "olmo",
        "olmo2",
        "olmo3",
        "phimoe",
        "qwen2",
        "qwen2_5_vl",
        "qwen2_moe",
        "qwen2_vl",
        "qwen3",
        "qwen3_moe",
        "qwen3_vl",
        "qwen3_vl_moe",
    )
)
"""Model types whose config has these keys in the meaning below, and whose modules have no buffers of their own."""

CHECKED = (
    CERTAIN
    | LATENT
    | frozenset(
        (
            "apertus",
            "arcee",
            "cohere",
            "cohere2",
            "ernie4_5",
            "exaone4",
            "glm",
            "glm4_moe",
            "gpt_oss",
            "granite",
            "hunyuan_v1_dense",
            "ministral",
            "ministral3",
            "nemotron",
            "olmoe",
            "phi3",
            "qwen3_next",
            "seed_oss",
            "smollm3",
            "stablelm",
            "starcoder2",
        )
    )
)
"""Model types whose tensors are compared with the config: for each, models of several shapes pass."""

DERIVED_HEADS = frozenset(
    (
        "llama",
        "mistral",
        "mixtral",
        "olmo",
        "olmo2",
        "olmo3",
        "phi3",
        "phimoe",
        "qwen2",
        "qwen2_5_vl",
        "qwen2_5_vl_text",
        "qwen2_moe",
        "qwen2_vl",
        "qwen2_vl_text",
    )
)
"""Model types whose heads have hidden_size / num_attention_heads rows where there is no head_dim. Others have numbers
of their own in transformers' classes."""

UNGROUPED = frozenset(("llama", "olmo", "olmo2", "olmo3", "phi3"))
"""Model types that have as many key-value heads as heads where the config does not have the key. Others have numbers
of their own in transformers' classes, and take the number of heads only for a null."""

HEAD_NORMS = frozenset(
    ("qwen3", "qwen3_moe", "qwen3_next", "gemma3_text", "glm4_moe", "qwen3_vl_text", "qwen3_vl_moe_text")
)
"""Model types whose q_norm and k_norm are of one head."""

_TEXT = r"(?:model\.language_model\.|language_model\.model\.|model\.)"
_LAYERS = rf"{_TEXT}layers\.(\d+)\."
_LAYER = re.compile(rf"{_LAYERS}.+")
_ATTENTION = re.compile(rf"{_LAYERS}self_attn\.([qkvo])_proj\.(weight|bias)")
_EXPERT = re.compile(rf"{_LAYERS}(?:mlp|block_sparse_moe)\.experts\.(\d+)\..+")
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")
_HINT = (
    "The config belongs to another model, or a part of the checkpoint is missing; option config_dir names another "
    "config."
)
_OPTION_HINT = "Leave the option out, or correct it: the tensors have the shapes that they have."


@dataclass(frozen=True, slots=True)
class SizeCheck:
    """That dimension ``dim`` of the tensors whose names fit has the size of the first of ``keys`` that is told."""

    names: re.Pattern[str]
    dim: int
    keys: tuple[str, ...]


def _check(names: str, dim: int, *keys: str) -> SizeCheck:
    return SizeCheck(re.compile(names), dim, keys)


_ENDS = rf"{_TEXT}embed_tokens\.weight|(language_model\.)?lm_head\.weight"
_IN_LAYER = rf"{_TEXT}layers\.\d+\."
CHECKS = (
    _check(_ENDS, 0, "vocab_size"),
    _check(_ENDS, 1, "hidden_size"),
    _check(rf"{_TEXT}norm\.weight|{_IN_LAYER}(input|post_attention)_layernorm\.weight", 0, "hidden_size"),
    _check(rf"{_IN_LAYER}self_attn\.[qkv]_proj\.weight", 1, "hidden_size"),
    _check(rf"{_IN_LAYER}self_attn\.o_proj\.weight", 0, "hidden_size"),
    _check(rf"{_IN_LAYER}mlp\.(gate|up)_proj\.weight", 0, "intermediate_size"),
    _check(rf"{_IN_LAYER}mlp\.(gate|up)_proj\.weight", 1, "hidden_size"),
    _check(rf"{_IN_LAYER}mlp\.down_proj\.weight", 0, "hidden_size"),
    _check(rf"{_IN_LAYER}mlp\.down_proj\.weight", 1, "intermediate_size"),
    _check(rf"{_IN_LAYER}mlp\.experts\.\d+\.(gate|up)_proj\.weight", 0, "moe_intermediate_size"),
    _check(rf"{_IN_LAYER}mlp\.experts\.\d+\.down_proj\.weight", 1, "moe_intermediate_size"),
    _check(rf"{_IN_LAYER}block_sparse_moe\.experts\.\d+\.w[13]\.weight", 0, "intermediate_size"),
    _check(rf"{_IN_LAYER}block_sparse_moe\.experts\.\d+\.w2\.weight", 1, "intermediate_size"),
    _check(rf"{_IN_LAYER}(mlp|block_sparse_moe)\.gate\.weight", 0, *_EXPERT_KEYS),
    _check(rf"{_IN_LAYER}(mlp|block_sparse_moe)\.gate\.weight", 1, "hidden_size"),
)
_HEAD_NORM = _check(rf"{_IN_LAYER}self_attn\.[qk]_norm\.weight", 0, "head_dim")


@dataclass(slots=True)
class _Comparison:
    """Config and tensors side by side."""

    told: Mapping[str, Told]
    kinds: tuple[str, ...]
    text: Mapping[str, Any]
    compared: set[str] = field(default_factory=set)
    """Keys whose sizes were seen in some tensor."""
    layers: set[int] = field(default_factory=set)
    experts: dict[int, set[int]] = field(default_factory=dict)
    by_kind: dict[str, list[tuple[SizeCheck, str]]] = field(default_factory=dict)
    """What is compared of tensors whose names differ only in numbers."""
    sums: dict[str, list[tuple[SumCheck, int]]] = field(default_factory=dict)
    """What is compared with several sizes together, and with what these make."""
    rows: dict[int, dict[str, Entry]] = field(default_factory=dict)
    """The projections of queries and keys of each layer, where no head_dim tells how many rows they must have."""

    def take(self, name: str, shape: tuple[int, ...], entry: Entry) -> None:
        """Compare one tensor."""
        if layer := _LAYER.fullmatch(name):
            self.layers.add(int(layer[1]))
        if expert := _EXPERT.fullmatch(name):
            self.experts.setdefault(int(expert[1]), set()).add(int(expert[2]))
        for check, key in self._checks(name):
            if len(shape) > check.dim:
                self.compared.add(key)
                if shape[check.dim] != self.told[key].value:
                    raise _contradiction(key, self.told[key], str(shape[check.dim]), (name, shape))
        for sums, size in self._sums(name):
            self.compared |= set(sums.keys) & self.told.keys()
            if -len(shape) <= sums.dim < len(shape) and shape[sums.dim] != size:
                raise _other_sum(sums, size, self.told, (name, shape))
        is_usual = self.kinds[-1] not in LATENT | GATED and not self.text.get("pruned_heads")
        if (attention := _ATTENTION.fullmatch(name)) and shape and is_usual:
            self._attention(attention[2], attention[3], entry, shape)
            self.rows.setdefault(int(attention[1]), {})[attention[2]] = entry

    def _checks(self, name: str) -> list[tuple[SizeCheck, str]]:
        """What is compared of a tensor, and with which key; worked out once for all layers and experts."""
        kind = _NUMBER.sub("0", name)
        if kind not in self.by_kind:
            head_norms = (_HEAD_NORM,) if self.kinds[-1] in HEAD_NORMS else ()
            keys = [
                (check, next(filter(self.told.__contains__, check.keys), None)) for check in (*CHECKS, *head_norms)
            ]
            self.by_kind[kind] = [(check, key) for check, key in keys if key and check.names.fullmatch(kind)]
        return self.by_kind[kind]

    def _sums(self, name: str) -> list[tuple[SumCheck, int]]:
        """What is compared of a tensor with several sizes together; worked out once for all layers and experts."""
        kind = _NUMBER.sub("0", name)
        if kind not in self.sums:
            sizes = {key: told.value for key, told in self.told.items()}
            if size := self._head_dim():
                sizes.setdefault("head_dim", size.value)
            if self.kinds[-1] in UNGROUPED and "num_attention_heads" in sizes:
                sizes.setdefault("num_key_value_heads", sizes["num_attention_heads"])
            fitting = (check for check in sum_checks(self.kinds[-1]) if check.names.fullmatch(kind))
            found = ((check, check.expected(sizes)) for check in fitting)
            self.sums[kind] = [(check, size) for check, size in found if size is not None]
        return self.sums[kind]

    def _attention(self, projection: str, leaf: str, entry: Entry, shape: tuple[int, ...]) -> None:
        """Compare the rows of queries, keys and values, and the columns of the output, with the heads."""
        size = self._head_dim()
        key = "num_attention_heads" if projection in "qo" else "num_key_value_heads"
        heads = self.told.get(key)
        if heads is None and (key in self.text or self.kinds[-1] in UNGROUPED):
            key, heads = "num_attention_heads", self.told.get("num_attention_heads")
        dim = 1 if projection == "o" else 0
        if size is None or heads is None or len(shape) <= dim or (projection == "o" and leaf == "bias"):
            return
        self.compared |= {key, *(("head_dim",) if "head_dim" in self.told else ("num_attention_heads", "hidden_size"))}
        if shape[dim] == heads.value * size.value:
            return
        if size.by != heads.by and size.by.startswith("the option"):
            blamed = "head_dim" if "head_dim" in self.told else "num_attention_heads"
            found = f"{shape[dim]} rows for {heads.value} heads{self._derived(size.value)}"
            raise _contradiction(blamed, self.told[blamed], found, (entry[0], shape))
        whole, rest = divmod(shape[dim], size.value)
        found = f"{whole} heads" if not rest else f"{shape[dim]} rows, no whole number of heads"
        raise _contradiction(key, heads, f"{found} of {size.value} rows{self._derived(size.value)}", (entry[0], shape))

    def _derived(self, size: int) -> str:
        """Where the rows of a head come from, if no key says them."""
        if "head_dim" in self.told:
            return ""
        hidden, heads = self.told["hidden_size"].value, self.told["num_attention_heads"].value
        return f" (hidden_size {hidden} / num_attention_heads {heads} = {size})"

    def _head_dim(self) -> Told | None:
        """Rows of a head, where that is certain."""
        heads, hidden = self.told.get("num_attention_heads"), self.told.get("hidden_size")
        if "head_dim" in self.told:
            return self.told["head_dim"]
        if heads is None or hidden is None or self.kinds[-1] not in DERIVED_HEADS or hidden.value % heads.value:
            return None
        return Told(hidden.value // heads.value, heads.by)

    def finish(self) -> None:
        """Compare what takes all tensors to see: layers, experts, and heads of a size that nothing tells."""
        layers = self.told.get("num_hidden_layers")
        if layers is not None and FURTHER_LAYERS.intersection(self.kinds):
            further = {layer for layer in self.layers if layer >= layers.value}
            self.layers = self.layers - further or further
        if layers is not None and self.layers and self.layers != set(range(layers.value)):
            raise _incomplete("num_hidden_layers", layers, self.layers, "layers")
        key = next((key for key in _EXPERT_KEYS if key in self.told), None)
        for layer, experts in self.experts.items():
            if key is not None and experts != set(range(self.told[key].value)):
                raise _incomplete(key, self.told[key], experts, f"experts in layer {layer}")
        heads, groups = self.told.get("num_attention_heads"), self.told.get("num_key_value_heads")
        if heads is not None and groups is not None and self._head_dim() is None:
            for parts in self.rows.values():
                self._in_proportion(parts, heads, groups)

    def _in_proportion(self, parts: Mapping[str, Entry], heads: Told, groups: Told) -> None:
        """Queries and keys have heads of one size, whatever it is."""
        if not {"q", "k"} <= set(parts):
            return
        self.compared |= {"num_attention_heads", "num_key_value_heads"}
        queries, keys = parts["q"][1].shape[0], parts["k"][1].shape[0]
        if queries % heads.value or queries * groups.value != keys * heads.value:
            found = f"{keys} rows beside {queries} of queries, for {heads.value} heads"
            raise _contradiction("num_key_value_heads", groups, found, (parts["k"][0], parts["k"][1].shape))


def check_config(entries: Iterable[Entry], config: Mapping[str, Any], options: ConvertOptions) -> set[str]:
    """Raise ``GeometryMismatch`` where tensors under the hub's names contradict config or options, with both values.

    Returns the keys of the config that were compared with some tensor.
    """
    kinds = tuple(model_types(config))
    if not CHECKED.intersection(kinds):
        return set()
    text = text_config(config)
    told = told_sizes(text, options)
    for key in (*SIZE_OPTIONS, "num_hidden_layers", "vocab_size", "intermediate_size"):
        if text.get(key) is not None and key not in told:
            raise no_size(key, text[key], "a whole number")
    comparison = _Comparison(told, kinds, text)
    for name, expression in entries:
        if ELEMENT_TYPES[expression.dtype].floating and not _is_value_head(name, expression.shape):
            comparison.take(name, expression.shape, (name, expression))
    comparison.finish()
    return comparison.compared


def check_used(options: ConvertOptions, used: Iterable[str]) -> None:
    """Refuse a size that the user gives and that neither a rule nor a check asked for: it would change nothing."""
    unused = sorted(given_sizes(options).keys() - set(used))
    if unused:
        raise InvalidOption(
            f"the option {unused[0]} changes nothing: no rule for these tensors needs it, and no tensor shows it",
            expected=f"a model whose tensors depend on {unused[0]}",
            found=str(getattr(options, unused[0])),
            hint="Leave it out. It is for models whose queries, keys and values are stored together or in another "
            "order of rows, where config.json does not tell their heads.",
        )


def _is_value_head(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a value model's head, of one row, stands in place of the one for tokens."""
    return name == "lm_head.weight" and shape[:1] == (1,)


def _incomplete(key: str, told: Told, found: set[int], what: str) -> GeometryMismatch:
    absent = sorted(set(range(told.value)) - found)
    which = f"; number {absent[0]} is the first that is missing" if absent else ""
    return GeometryMismatch(
        f"{told.by} says that {key} is {told.value}, but the tensors are those of {len(found)} {what}{which}",
        file="config.json",
        expected=f"{key} = {told.value}",
        found=str(len(found)),
        hint=_HINT,
    )


def _other_sum(
    check: SumCheck, size: int, told: Mapping[str, Told], tensor: tuple[str, tuple[int, ...]]
) -> GeometryMismatch:
    """The error for a size that several keys make; an option among them is to blame, since it says otherwise."""
    given = next((told[key] for key in check.keys if key in told and told[key].by != CONFIG), None)
    name, shape = tensor
    return GeometryMismatch(
        f"{given.by if given else CONFIG} says that {check.formula} is {size}, but tensor {name} {list(shape)} has "
        f"{shape[check.dim]}",
        file=None if given else CONFIG,
        tensor=name,
        expected=f"{check.formula} = {size}",
        found=str(shape[check.dim]),
        hint=_OPTION_HINT if given else _HINT,
    )


def _contradiction(key: str, told: Told, found: str, tensor: tuple[str, tuple[int, ...]]) -> GeometryMismatch:
    name, shape = tensor
    by_option = told.by.startswith("the option")
    return GeometryMismatch(
        f"{told.by} says that {key} is {told.value}, but tensor {name} {list(shape)} has {found}",
        file=None if by_option else "config.json",
        tensor=name,
        expected=f"{key} = {told.value}",
        found=found,
        hint=_OPTION_HINT if by_option else _HINT,
    )
