"""Quantised models: which weights become small numbers with scales, under which names, and what the config says.

Only matrices of linear layers are quantised. What is left alone, as those who publish quantised models do: embeddings,
output heads, routers of experts, vision and audio towers with their projectors, and some small layers that the
kernels of inference engines want in full (``KEPT``).
Sources: compressed-tensors 0.20 ``quantization/quant_scheme.py`` (``FP8_DYNAMIC``, ``INT8_W8A8``, ``W4A16``) and
``utils/match.py`` for ``ignore``; transformers 5.10 ``FineGrainedFP8Config``; configs of DeepSeek-V3 and Qwen3-FP8.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from workers.dtypes import ELEMENT_TYPES
from workers.errors import GeometryMismatch, InvalidOption
from workers.families.dequantize import QUANTIZATION
from workers.families.registry import model_types
from workers.mapping import Target
from workers.options import ConvertOptions
from workers.quantization import SCHEMES, SOURCES, Scheme
from workers.quantized import Constant, Quantize, Scales

REGULAR = "re:"
"""What begins a regular expression in ``ignore``; it must match from the module's first letter on."""

LONGEST_PATTERN = 1000
"""Characters of a pattern that messages show."""

HEAD = "lm_head"

EMBEDDINGS = frozenset(
    (
        "embed_in",
        "embed_positions",
        "embed_tokens",
        "embed_tokens_per_layer",
        "embeddings",
        "position_embedding",
        "position_embeddings",
        "relative_attention_bias",
        "token_type_embeddings",
        "tok_embeddings",
        "word_embeddings",
        "wpe",
        "wte",
    )
)
"""Last names of modules that are tables and no linear layers; no loader looks for these among the quantised."""

KEPT = frozenset(
    (
        HEAD,
        *("classifier", "embed_out", "output", "qa_outputs", "score", "summary", "v_head"),  # other heads
        *("eh_proj", "head"),  # of multi-token prediction
        *("in_proj_a", "in_proj_b", "in_proj_ba", "weights_proj"),  # of linear and of sparse attention
    )
)
"""Last names of linear layers that stay as they are."""

KEPT_INSIDE = frozenset(
    (
        *("gate", "moe_gate", "router", "shared_expert_gate"),
        *("aligner", "audio_encoder", "audio_tower", "connector", "embed_audio", "embed_vision", "mm_projector"),
        *("multi_modal_projector", "vision_embedding", "vision_encoder", "vision_model", "vision_tower", "visual"),
    )
)
"""Names of modules in which everything stays as it is: routers, towers, projectors."""

TRANSPOSED = frozenset(("gpt2", "openai-gpt", "imagegpt", "decision_transformer"))
"""Model types whose layers are transformers' ``Conv1D``: matrices [in, out] that no loader takes quantised."""

_WEIGHT = ".weight"
_EXPERTS = "experts"
_NAMES_SHOWN = 3


@dataclass(slots=True)
class Quantized:
    """The targets after quantisation, the part of the config that describes it, and what a user should know."""

    targets: list[Target] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def check_ignore(options: ConvertOptions) -> None:
    """Raise ``InvalidOption`` for modules to leave alone where nothing is quantised."""
    if options.ignore and options.quantization is None:
        raise InvalidOption(
            "the option ignore names modules that aren't quantised, but nothing is",
            expected="the option quantization",
            found="none",
            hint=f"Set quantization to one of: {', '.join(SCHEMES)}. Or leave ignore out.",
        )


def quantize(targets: Sequence[Target], config: Mapping[str, Any], options: ConvertOptions) -> Quantized:
    """Replace the weights of linear layers by quantised ones and their scales; ``config`` is the source's.

    Raises ``InvalidOption`` for a model that can't be quantised so: one that is quantised already, has its experts in
    one tensor, or is of another dtype; and for a pattern of ``ignore`` that names nothing. ``GeometryMismatch`` for a
    weight whose columns don't fit the scheme's groups.
    """
    scheme = SCHEMES[str(options.quantization)]
    _check_source(targets, config)
    ignored = _ignored(options.ignore, [_module(target.name) for target in targets])
    result = Quantized()
    done, kept = [], []
    for target in targets:
        module = _module(target.name)
        if module not in ignored and _is_fused(target):
            raise _fused(target, module)
        if not (_is_linear(target) or _is_fused(target)):
            result.targets.append(target)
        elif module in ignored or _is_left_alone(target, module):
            kept.append(module)
            result.targets.append(target)
        else:
            _check_weight(target, scheme)
            done.append(target)
            result.targets += _quantized(target, module, scheme)
    if not done:
        raise _nothing(options.ignore, scheme)
    names = _listed(kept, [_module(target.name) for target in done])
    result.config = _described(scheme, names)
    result.notes = _notes(scheme, done, names)
    return result


def _module(name: str) -> str:
    return name.rpartition(".")[0]


def _is_linear(target: Target) -> bool:
    """Whether a tensor is the weight of a linear layer, for all that its name and shape tell."""
    last = _module(target.name).rpartition(".")[2]
    return target.name.endswith(_WEIGHT) and len(target.expression.shape) == 2 and last not in EMBEDDINGS  # out, in


def _is_left_alone(target: Target, module: str) -> bool:
    """Whether a linear layer stays as it is without being named: see ``KEPT``."""
    names = module.split(".")
    return names[-1] in KEPT or not KEPT_INSIDE.isdisjoint(names) or 0 in target.expression.shape


def _is_fused(target: Target) -> bool:
    """Whether a tensor holds the matrices of several experts: [experts, rows, columns]."""
    expression = target.expression
    names = target.name.split(".")
    return len(expression.shape) == 3 and _EXPERTS in names and ELEMENT_TYPES[expression.dtype].floating


def _quantized(target: Target, module: str, scheme: Scheme) -> list[Target]:
    weight = target.expression
    made: list[Target] = [
        Target(f"{module}.{scheme.weight_suffix}", Quantize(weight, scheme, target.name), target.folder),
        Target(f"{module}.{scheme.scale_suffix}", Scales(weight, scheme, target.name), target.folder),
    ]
    if scheme.per_word > 1:
        made.append(Target(f"{module}.weight_shape", Constant(weight.shape), target.folder))
    return made


# --- what the user names ---------------------------------------------------------------------------------------
def _ignored(patterns: Iterable[str], modules: Sequence[str]) -> set[str]:
    """The modules that patterns name: by their whole name, or by a regular expression from its beginning on.

    Raises ``InvalidOption`` for a pattern that names no module. ``lm_head`` may be named where there is none: that of
    a tied model is its embedding.
    """
    ignored: set[str] = set()
    for pattern in patterns:
        found = _matches(pattern, modules)
        if not found and pattern != HEAD:
            raise _names_nothing(pattern, modules)
        ignored |= found
    return ignored


def _matches(pattern: str, modules: Iterable[str]) -> set[str]:
    if not pattern.startswith(REGULAR):
        return {module for module in modules if module == pattern}
    try:
        expression = re.compile(pattern.removeprefix(REGULAR))
    except re.error as error:
        raise InvalidOption(
            f"ignore: {pattern!r} is no regular expression: {error}",
            expected="a module's name, or a regular expression after re:",
            found=pattern,
            hint=r"Escape dots and brackets with a backslash, such as in re:.*\.mlp\.down_proj$.",
        ) from error
    return {module for module in modules if expression.match(module)}


def _names_nothing(pattern: str, modules: Sequence[str]) -> InvalidOption:
    kinds: dict[str, str] = {}  # one module of each kind, since a model has the same ones in every layer
    for module in filter(None, modules):
        kinds.setdefault(re.sub(r"\d+", "0", module), module)
    pattern = pattern[:LONGEST_PATTERN]
    plain = re.sub(r"\\|\.\*|\$$|^re:", "", pattern)
    near = difflib.get_close_matches(plain, kinds.values(), n=3, cutoff=0.3)
    hint = "Names are matched whole; a regular expression begins with re: and matches from the beginning on."
    if any(module.startswith(f"{pattern}.") for module in modules):
        hint = f"{pattern} holds other modules; to name them all: {REGULAR}{re.escape(pattern)}\\."
    return InvalidOption(
        f"ignore: {pattern!r} names no module of the model",
        expected=", ".join(near) or "the name of a module",
        found=pattern,
        hint=hint,
    )


# --- what the config says --------------------------------------------------------------------------------------
def _listed(kept: Sequence[str], done: Sequence[str]) -> list[str]:
    """Names of the linear layers that aren't quantised, as loaders look for them.

    Experts are one module to them: its name is listed with its experts', and some of them alone can't be kept.
    """
    names = dict.fromkeys(kept)
    quantized = {container for module in done if (container := _container(module))}
    for module in kept:
        container = _container(module)
        if container in quantized:
            raise InvalidOption(
                f"ignore: some experts of {container} would be quantised and some not, which no engine loads",
                tensor=module,
                expected="all experts of a layer or none",
                found=f"{module} is left alone",
                hint=f"Name them all: {REGULAR}{re.escape(container)}\\.",
            )
        if container:
            names[container] = None
    names[HEAD] = None  # tied models have no tensor of this name, and some that hold a language model another
    return list(names)


def _container(module: str) -> str:
    """The module that holds a layer's experts, for one of these; nothing for other modules."""
    names = module.split(".")
    return ".".join(names[: names.index(_EXPERTS) + 1]) if _EXPERTS in names[:-1] else ""


def _described(scheme: Scheme, kept: list[str]) -> dict[str, Any]:
    """``quantization_config`` of a model."""
    if scheme.in_float32:
        return {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "modules_to_not_convert": kept,
            "quant_method": "fp8",
            "weight_block_size": list(scheme.group),
        }
    kind = "float" if scheme.dtype == "F8_E4M3" else "int"
    bits = 32 // scheme.per_word if scheme.per_word > 1 else 8
    packed = scheme.per_word > 1
    form = "pack-quantized" if packed else f"{kind}-quantized"
    numbers = {"num_bits": bits, "symmetric": True, "type": kind}
    groups = {"strategy": "group", "group_size": scheme.group[1]} if packed else {"strategy": "channel"}
    tokens = {"dynamic": True, "group_size": None, "strategy": "token"}
    return {
        "config_groups": {
            "group_0": {
                "format": form,
                "input_activations": None if packed else numbers | tokens,
                "output_activations": None,
                "targets": ["Linear"],
                "weights": numbers | {"dynamic": False, "group_size": None} | groups,
            }
        },
        "format": form,
        "global_compression_ratio": None,
        "ignore": kept,
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "sparsity_config": {},
        "transform_config": {},
    }


def _notes(scheme: Scheme, done: Sequence[Target], kept: Sequence[str]) -> list[str]:
    more = f" and {len(kept) - _NAMES_SHOWN} more" if len(kept) > _NAMES_SHOWN else ""
    notes = [
        f"{len(done)} weights are quantised to {scheme.name}; as they are stay {', '.join(kept[:_NAMES_SHOWN])}{more}"
    ]
    if not scheme.in_float32:
        if any(_container(_module(target.name)) for target in done):
            notes.append(
                "the experts are quantised one by one, as inference engines read them; transformers 5, which keeps "
                "them in one tensor, doesn't load them from compressed-tensors"
            )
        return notes
    ragged = [target.name for target in done if any(length % 128 for length in target.expression.shape)]
    if ragged:
        notes.append(
            f"{len(ragged)} weights, such as {ragged[0]}, have blocks cut short at their edges, as DeepSeek's have; "
            "not every program reads these"
        )
    # transformers takes a name of the list as the beginning of others.
    hidden = [(name, target.name) for name in kept for target in done if target.name.startswith(name)]
    if hidden:
        notes.append(
            f"{hidden[0][1]} is quantised, but transformers takes it for a part of {hidden[0][0]}, which is not: "
            "name both with ignore"
        )
    return notes


# --- what can't be quantised -----------------------------------------------------------------------------------
def _check_source(targets: Sequence[Target], config: Mapping[str, Any]) -> None:
    told = config.get(QUANTIZATION, config.get("compression_config"))
    scaled = next((target.name for target in targets if target.expression.dtype.startswith("F8")), None)
    if told is not None or scaled is not None:
        method = str(told.get("quant_method", "some method") if isinstance(told, dict) else "some method")
        raise InvalidOption(
            f"the model is quantised already: {f'config.json says {method}' if told is not None else scaled}",
            tensor=scaled,
            expected="weights in floating point",
            found=method if told is not None else "FP8 weights",
            hint="Leave quantization out to keep the weights as they are. FP8 in blocks can be quantised anew: set "
            "dequantize, too.",
        )
    transposed = TRANSPOSED.intersection(model_types(config))
    if transposed:
        raise InvalidOption(
            f"models of type {min(transposed)} keep their matrices transposed, which no quantised format provides for",
            expected="linear layers [out, in]",
            found=f"layers [in, out] of {min(transposed)}",
            hint="Leave quantization out.",
        )


def _check_weight(target: Target, scheme: Scheme) -> None:
    dtype, shape = target.expression.dtype, target.expression.shape
    module = _module(target.name)
    if dtype not in SOURCES:
        raise InvalidOption(
            f"{target.name} is {dtype}, which is not quantised",
            tensor=target.name,
            expected=", ".join(SOURCES),
            found=dtype,
            hint="Set dtype to bfloat16." if dtype == "F64" else f"Name its module with ignore: {module}.",
        )
    if scheme.per_word > 1 and shape[1] % scheme.group[1]:
        raise GeometryMismatch(
            f"{target.name} has {shape[1]} columns, which groups of {scheme.group[1]} don't divide",
            tensor=target.name,
            expected=f"a multiple of {scheme.group[1]} columns",
            found=f"{shape[1]} columns",
            hint=f"Choose another scheme, or keep the weight as it is: ignore={module}.",
        )


def _fused(target: Target, module: str) -> InvalidOption:
    return InvalidOption(
        f"{target.name} holds the matrices of {target.expression.shape[0]} experts in one tensor; quantised formats "
        "have one for each expert",
        tensor=target.name,
        expected="one matrix for each expert",
        found=f"a tensor of shape {list(target.expression.shape)}",
        hint=f"Keep the experts as they are: ignore={REGULAR}.*\\.{_EXPERTS}$. {module} is the first.",
    )


def _nothing(patterns: Sequence[str], scheme: Scheme) -> InvalidOption:
    return InvalidOption(
        f"the option quantization asks for {scheme.name}, but nothing is left to quantise",
        expected="weights of linear layers",
        found=f"none outside of ignore: {', '.join(patterns)[:200]}" if patterns else "none",
        hint="Leave quantization out, or name less with ignore.",
    )
