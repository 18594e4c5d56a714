"""The steps from a checkpoint's tensors to a Hugging Face model's: adapters, names, ties, casts, config."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from workers.checkpoint import Adapter, Checkpoint
from workers.dtypes import BY_TORCH_NAME
from workers.errors import IncompleteCheckpoint, InvalidOption
from workers.expressions import Cast, Expression
from workers.families import lora_config, own_adapters
from workers.families.adapters import PeftParts, adapter_entries, is_peft, take_apart
from workers.families.checks import check_value_model
from workers.families.config_checks import check_config, check_used
from workers.families.config_file import corrected_sizes, correction_notes, edited_config
from workers.families.config_values import CONFIG, check_kind
from workers.families.custom import CustomMapping, read_mapping
from workers.families.dequantize import QUANTIZATION, Dequantized, check_scales, dequantize, is_fp8
from workers.families.lora_merge import merge
from workers.families.quantize import Quantized, check_ignore, quantize
from workers.families.registry import (
    HUB_LIKE,
    HUB_NAMING,
    KEEP,
    NAMES_KEPT,
    TIES_UNDECIDED,
    find_tables,
    model_facts,
)
from workers.families.renaming import Naming, rename_tensors
from workers.families.rules import Entry
from workers.families.sources import source_entries
from workers.families.ties import Doubt, Tying, tie
from workers.mapping import Dropped, Mapping, Probe, Target
from workers.options import ConvertOptions

PEFT = "peft"
"""Target format whose result is the adapter alone."""

KEEP_FLOAT32 = (
    "e_score_correction_bias",
    *("_scale_inv", ".weight_scale", "_global_scale", ".input_scale", ".k_scale", ".v_scale"),
)
"""Ends of names that no cast to fewer bits touches: transformers' ``_keep_in_fp32_modules_strict``, and the scales
of quantised weights and activations."""

CASTABLE = frozenset(("F64", "F32", "BF16", "F16"))
"""Dtypes that a cast may change; FP8 weights mean something only with their scales."""


def map_checkpoint(checkpoint: Checkpoint, options: ConvertOptions, probe: Probe) -> Mapping:
    """Say what a conversion to a Hugging Face model writes.

    Raises ``IncompleteCheckpoint`` without a config, ``UnmappedTensor`` and ``GeometryMismatch`` where tensors, rules
    and config do not fit together, ``InvalidOption`` for wishes that can't be met.
    """
    check_ignore(options)
    entries = source_entries(checkpoint)
    used: set[str] = set()
    if own_adapters.is_own(name for name, _ in entries):
        config = _config(checkpoint)
        tables = find_tables(checkpoint.naming, config, options.family)
        facts = model_facts(config, options)
        renamed = own_adapters.hub_names(entries, tables, facts, merge=options.lora == "merge")
        used = facts.asked
        entries = renamed.entries
        checkpoint = replace(checkpoint, naming=renamed.naming)
    parts = None
    if checkpoint.naming != HUB_NAMING and is_peft(name for name, _ in entries):
        parts = take_apart(entries)
        if options.mapping is not None and options.lora != "merge":
            raise _not_mapped(checkpoint)
    if parts is None:
        _check_none_is_meant(checkpoint, options)
        return _map_model(checkpoint, entries, options, probe)
    adapter = checkpoint.adapter or Adapter(options.lora_alpha, "the checkpoint does not say")
    if adapter.needs_alpha and adapter.lora_alpha is None:
        raise own_adapters.no_alpha(adapter)
    if options.lora == "merge":
        return _merged(checkpoint, parts, adapter, options, probe)
    if parts.is_adapter_only or options.target_format == PEFT:
        check_used(options, used)
        return _adapter_alone(checkpoint, parts, adapter, options)
    base = _map_model(checkpoint, _in_order(parts), options, probe)
    files, notes = _adapter_files(checkpoint, parts, adapter, lora_config.ADAPTER_FOLDER)
    apart = _targets(adapter_entries(parts), options, (), lora_config.ADAPTER_FOLDER)
    return replace(base, targets=base.targets + apart, files=base.files + files, notes=base.notes + notes)


def _check_none_is_meant(checkpoint: Checkpoint, options: ConvertOptions) -> None:
    """Refuse options that are for an adapter, where there is none."""
    if options.target_format == PEFT:
        raise _no_adapter(checkpoint)
    if options.lora_alpha is not None:
        raise _nothing_for(checkpoint, f"lora_alpha {options.lora_alpha:g}")
    if options.lora == "merge":
        raise _nothing_for(checkpoint, "lora merge")


def _no_adapter(checkpoint: Checkpoint) -> InvalidOption:
    return InvalidOption(
        f"{checkpoint.address.url} holds no adapter, which is what the target format {PEFT} is for",
        expected="a LoRA adapter",
        found=f"{len(checkpoint.tensors)} tensors of a model",
        hint="Leave the target format out: the result is then a model.",
    )


def _adapter_alone(checkpoint: Checkpoint, parts: PeftParts, adapter: Adapter, options: ConvertOptions) -> Mapping:
    if options.quantization is not None:
        raise InvalidOption(
            f"the result for {checkpoint.address.url} is an adapter alone, which is not quantised",
            expected="a model",
            found="an adapter",
            hint="Merge the adapter into its base (lora=merge), or leave quantization out.",
        )
    files, notes = _adapter_files(checkpoint, parts, adapter, "")
    targets = _targets(adapter_entries(parts), options, (), "")
    if options.target_format != PEFT:
        notes = ("there are no base weights: the result is an adapter", *notes)
    return Mapping(NAMES_KEPT, targets, (), files, checkpoint.side_files, notes)


def _nothing_for(checkpoint: Checkpoint, given: str) -> InvalidOption:
    option = given.partition(" ")[0]
    return InvalidOption(
        f"the option {option} is given, but {checkpoint.address.url} holds no adapter that it could be for",
        expected="a LoRA adapter",
        found=f"{given} and {len(checkpoint.tensors)} tensors of a model",
        hint="Leave the option out: the weights are merged already, or were never wrapped.",
    )


def _not_mapped(checkpoint: Checkpoint) -> InvalidOption:
    return InvalidOption(
        f"{checkpoint.address.url} holds an adapter, whose modules a mapping does not rename",
        expected="a model without an adapter, or lora=merge",
        found="an adapter that stays apart",
        hint="Merge the adapter (lora=merge): the mapping then renames the merged weights. Or leave the mapping out.",
    )


def _merged(
    checkpoint: Checkpoint, parts: PeftParts, adapter: Adapter, options: ConvertOptions, probe: Probe
) -> Mapping:
    mapped = _map_model(checkpoint, merge(parts, adapter), options, probe)
    note = f"{len(parts.modules)} modules are merged with lora_alpha {adapter.lora_alpha:g} ({adapter.alpha_source})"
    replaced = tuple(
        Dropped(f"{name} (before training)", "the module was trained as a whole and is there after training")
        for name, _ in parts.original
    )
    return replace(mapped, dropped=mapped.dropped + replaced, notes=(*mapped.notes, note))


def _in_order(parts: PeftParts) -> list[Entry]:
    tensors = dict((*parts.base, *parts.original))
    return [(name, tensors[name]) for name in dict.fromkeys(parts.order)]


def _map_model(checkpoint: Checkpoint, entries: list[Entry], options: ConvertOptions, probe: Probe) -> Mapping:
    custom = read_mapping(options.mapping, options.source_profile) if options.mapping is not None else None
    family = _family(options, custom)
    keeps_names = checkpoint.config is None and family == KEEP
    config = {} if keeps_names else _config(checkpoint)
    if not keeps_names:
        check_kind(config, family=family)
    facts = model_facts(config, options)
    model = rename_tensors(checkpoint, entries, Naming(config, facts, family, custom))
    used = facts.asked
    if custom is not None or family != KEEP:
        used |= check_config(model.entries, config, options)
        check_value_model(model.entries, asked=options.value_model)
    check_used(options, used)
    plain = _dequantized(model.entries, config, options)
    tied = _tie(checkpoint, plain.entries, config, options, probe)
    targets = _targets(tied.entries, options, model.keep_float32, "")
    if options.dequantize:
        config.pop(QUANTIZATION, None)
    final = _quantized(targets, config, options)
    corrected = corrected_sizes(config, options)
    content = edited_config(
        config | final.config, (target.expression for target in targets), tied=tied.flag, sizes=corrected
    )
    return Mapping(
        family=model.family,
        targets=tuple(final.targets),
        dropped=(
            *(Dropped(name, reason) for name, reason in checkpoint.left_out),
            *model.dropped,
            *plain.dropped,
            *tied.dropped,
        ),
        files=(*(() if keeps_names else ((CONFIG, content),)), *checkpoint.made_files),
        side_files=checkpoint.side_files,
        notes=(*model.notes, *plain.notes, *tied.notes, *final.notes, *correction_notes(config, corrected)),
    )


def _family(options: ConvertOptions, custom: CustomMapping | None) -> str | None:
    """The family that the option or a user's mapping names; both may, if they agree."""
    extends = custom.extends if custom is not None else None
    if None not in (options.family, extends) and options.family != extends:
        raise InvalidOption(
            f"the option family says {options.family}, but the mapping extends {extends}",
            expected=str(extends),
            found=str(options.family),
            hint="Leave the option out, or extends in the mapping.",
        )
    return options.family or extends


def _dequantized(entries: list[Entry], config: dict[str, Any], options: ConvertOptions) -> Dequantized:
    if options.dequantize:
        return dequantize(entries, config, options.dtype)
    if is_fp8(config):
        check_scales(entries)
    return Dequantized(entries)


def _quantized(targets: tuple[Target, ...], config: dict[str, Any], options: ConvertOptions) -> Quantized:
    if options.quantization is None:
        return Quantized(list(targets))
    if not config:
        raise InvalidOption(
            "a quantised model says so in its config.json, but the source has none",
            expected="a config.json",
            found="none",
            hint="Name a folder with the model's config.json with the option config_dir.",
        )
    made = quantize(targets, config, options)
    made.config = {QUANTIZATION: made.config}
    return made


def _config(checkpoint: Checkpoint) -> dict[str, Any]:
    if checkpoint.config is None:
        where = next((text for text in checkpoint.missing if text.startswith(CONFIG)), CONFIG)
        raise IncompleteCheckpoint(
            f"{where} is missing, so that the kind of model is not known",
            file=CONFIG,
            expected="the model's config.json",
            found="none",
            hint="Name a folder with the model's config.json and tokenizer with the option config_dir.",
        )
    return dict(checkpoint.config)


def _tie(
    checkpoint: Checkpoint, entries: list[Entry], config: dict[str, Any], options: ConvertOptions, probe: Probe
) -> Tying:
    """Tie as the config or the user says; a model from the hub stays as it is unless the user asks."""
    if checkpoint.naming == HUB_NAMING and options.tie_word_embeddings is None:
        return Tying(entries)
    doubt: Doubt = "refuse" if checkpoint.strict_ties or checkpoint.naming not in HUB_LIKE else "correct"
    if checkpoint.naming in TIES_UNDECIDED:
        doubt = "weights"
    return tie(entries, config, probe, wanted=options.tie_word_embeddings, doubt=doubt)


def _targets(
    entries: Iterable[Entry], options: ConvertOptions, keep_float32: tuple[str, ...], folder: str
) -> tuple[Target, ...]:
    kept = (*KEEP_FLOAT32, *keep_float32)
    return tuple(Target(name, _cast(name, expression, options, kept), folder) for name, expression in entries)


def _cast(name: str, expression: Expression, options: ConvertOptions, kept: tuple[str, ...]) -> Expression:
    if options.dtype is None:
        return expression
    dtype = BY_TORCH_NAME[options.dtype].name
    if expression.dtype == dtype or expression.dtype not in CASTABLE or (dtype != "F32" and name.endswith(kept)):
        return expression
    return Cast(expression, dtype)


def _adapter_files(
    checkpoint: Checkpoint, parts: PeftParts, adapter: Adapter, folder: str
) -> tuple[tuple[tuple[str, bytes], ...], tuple[str, ...]]:
    name = (checkpoint.config or {}).get("_name_or_path")
    settings = lora_config.adapter_config(parts, adapter, name if isinstance(name, str) and name else None)
    path = f"{folder}/{lora_config.ADAPTER_CONFIG}" if folder else lora_config.ADAPTER_CONFIG
    notes: tuple[str, ...] = ()
    if adapter.lora_alpha is None:
        notes = (f"{path} has no lora_alpha ({adapter.alpha_source}): set it before the adapter is used",)
    return ((path, lora_config.to_json(settings)),), notes
