"""The steps from a checkpoint's tensors to a Hugging Face model's: adapters, names, ties, casts, config."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from workers.checkpoint import Adapter, Checkpoint
from workers.dtypes import BY_TORCH_NAME
from workers.errors import GeometryMismatch, IncompleteCheckpoint, InvalidOption, UnmappedTensor
from workers.expressions import Cast, Expression, Slice, Source
from workers.families import lora_config, own_adapters
from workers.families.adapters import PeftParts, adapter_entries, is_peft, take_apart
from workers.families.checks import check_config, check_counts, check_value_model
from workers.families.config_file import CONFIG, edited_config
from workers.families.dequantize import QUANTIZATION, Dequantized, check_scales, dequantize, is_fp8
from workers.families.lora_merge import merge
from workers.families.registry import (
    ANY_MODEL,
    HUB_LIKE,
    KEEP,
    NAMES_KEPT,
    TIES_UNDECIDED,
    find_tables,
    model_facts,
    model_types,
)
from workers.families.required import check_required
from workers.families.rules import Entry, Rule, Table, apply_rules
from workers.families.sources import source_entries
from workers.families.ties import Doubt, Tying, tie
from workers.mapping import Dropped, Mapping, Probe, Target
from workers.options import ConvertOptions

HUB_NAMING = "huggingface"
"""Naming of a source that is a Hugging Face model already: no table renames it."""

PEFT = "peft"
"""Target format whose result is the adapter alone."""

KEEP_FLOAT32 = ("e_score_correction_bias", "_scale_inv")
"""Ends of names that no cast to fewer bits touches: transformers' ``_keep_in_fp32_modules_strict``, scales of FP8."""

VOCABULARY_NAMES = ("embed_tokens.weight", "lm_head.weight")
"""Ends of names of tensors with a row for each token."""

CASTABLE = frozenset(("F64", "F32", "BF16", "F16"))
"""Dtypes that a cast may change; FP8 weights mean something only with their scales."""

FUSED_ON_THE_HUB = frozenset(("gpt_oss", "llama4", "llama4_text", "qwen3_vl_moe", "qwen3_5_moe", "qwen3_5_moe_text"))
"""Model types whose experts stay fused in the hub's files."""

_FUSED = ".experts.gate_up_proj"


@dataclass(frozen=True, slots=True)
class _Model:
    """The model's tensors under the hub's names, and what led to them."""

    entries: list[Entry]
    tables: tuple[Table, ...]
    family: str
    dropped: tuple[Dropped, ...]
    notes: tuple[str, ...]


def map_checkpoint(checkpoint: Checkpoint, options: ConvertOptions, probe: Probe) -> Mapping:
    """Say what a conversion to a Hugging Face model writes.

    Raises ``IncompleteCheckpoint`` without a config, ``UnmappedTensor`` and ``GeometryMismatch`` where tensors, rules
    and config do not fit together, ``InvalidOption`` for wishes that can't be met.
    """
    entries = source_entries(checkpoint)
    if own_adapters.is_own(name for name, _ in entries):
        config = _config(checkpoint)
        tables = find_tables(checkpoint.naming, config, options.family)
        renamed = own_adapters.hub_names(entries, tables, model_facts(config, options), merge=options.lora == "merge")
        entries = renamed.entries
        checkpoint = replace(checkpoint, naming=renamed.naming)
    parts = None
    if checkpoint.naming != HUB_NAMING and is_peft(name for name, _ in entries):
        parts = take_apart(entries)
    if parts is None:
        if options.target_format == PEFT:
            raise _no_adapter(checkpoint)
        return _map_model(checkpoint, entries, options, probe)
    adapter = checkpoint.adapter or Adapter(options.lora_alpha, "the checkpoint does not say")
    if adapter.needs_alpha and adapter.lora_alpha is None:
        raise own_adapters.no_alpha(adapter)
    if options.lora == "merge" and options.target_format != PEFT:
        return _merged(checkpoint, parts, adapter, options, probe)
    if parts.is_adapter_only or options.target_format == PEFT:
        files, notes = _adapter_files(checkpoint, parts, adapter, "")
        targets = _targets(adapter_entries(parts), options, (), "")
        if options.target_format != PEFT:
            notes = ("there are no base weights: the result is an adapter", *notes)
        return Mapping(NAMES_KEPT, targets, (), files, checkpoint.side_files, notes)
    base = _map_model(checkpoint, _in_order(parts), options, probe)
    files, notes = _adapter_files(checkpoint, parts, adapter, lora_config.ADAPTER_FOLDER)
    apart = _targets(adapter_entries(parts), options, (), lora_config.ADAPTER_FOLDER)
    return replace(base, targets=base.targets + apart, files=base.files + files, notes=base.notes + notes)


def _no_adapter(checkpoint: Checkpoint) -> InvalidOption:
    return InvalidOption(
        f"{checkpoint.address.url} holds no adapter, which is what the target format {PEFT} is for",
        expected="a LoRA adapter",
        found=f"{len(checkpoint.tensors)} tensors of a model",
        hint="Leave the target format out: the result is then a model.",
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
    keeps_names = checkpoint.config is None and options.family == KEEP
    config = {} if keeps_names else _config(checkpoint)
    model = _rename(checkpoint, entries, config, options)
    if options.family != KEEP:
        check_config(model.entries, config)
        check_value_model(model.entries, asked=options.value_model)
    plain = _dequantized(model.entries, config, options)
    tied = _tie(checkpoint, plain.entries, config, options, probe)
    targets = _targets(tied.entries, options, model.tables, "")
    if options.dequantize:
        config.pop(QUANTIZATION, None)
    content = edited_config(config, (target.expression for target in targets), tied=tied.flag)
    return Mapping(
        family=model.family,
        targets=targets,
        dropped=(
            *(Dropped(name, reason) for name, reason in checkpoint.left_out),
            *model.dropped,
            *plain.dropped,
            *tied.dropped,
        ),
        files=(*(() if keeps_names else ((CONFIG, content),)), *checkpoint.made_files),
        side_files=checkpoint.side_files,
        notes=(*model.notes, *plain.notes, *tied.notes),
    )


def _dequantized(entries: list[Entry], config: dict[str, Any], options: ConvertOptions) -> Dequantized:
    if options.dequantize:
        return dequantize(entries, config, options.dtype)
    if is_fp8(config):
        check_scales(entries)
    return Dequantized(entries)


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


def _rename(checkpoint: Checkpoint, entries: list[Entry], config: dict[str, Any], options: ConvertOptions) -> _Model:
    """Apply the tables that fit the config, one after the other."""
    tables = () if checkpoint.naming == HUB_NAMING else find_tables(checkpoint.naming, config, options.family)
    facts = model_facts(config, options)
    names_are_known = checkpoint.naming in HUB_LIKE or options.family == KEEP
    dropped: list[Dropped] = []
    used = [table.name for table in tables if ANY_MODEL not in table.model_types]
    for table in tables:
        before = [name for name, _ in entries]
        check_counts(before, table.counts, facts)
        check_required(set(before), table, facts)
        applied = apply_rules(table.rules, entries, facts)
        if applied.unmatched and not names_are_known and ANY_MODEL not in table.model_types:
            raise _unmapped(applied.unmatched, table)
        dropped.extend(Dropped(name, reason) for name, reason in applied.dropped)
        entries = applied.entries
        if ANY_MODEL in table.model_types and before != [name for name, _ in entries]:
            used.insert(0, table.name)
    _check_names(entries)
    dropped.extend(_padding(entries))
    return _Model(entries, tables, " + ".join(used) or NAMES_KEPT, tuple(dropped), _fused_note(entries, config))


def _unmapped(names: Sequence[str], table: Table) -> UnmappedTensor:
    """No tensor is left out silently: say which has no rule, and which rules come near."""
    patterns = [text for rule in table.rules for text in (rule.sources if isinstance(rule, Rule) else (rule.source,))]
    near = difflib.get_close_matches(names[0], patterns, n=3, cutoff=0.5)
    more = f", nor for {len(names) - 1} more such as {names[-1]}" if len(names) > 1 else ""
    return UnmappedTensor(
        f"the family {table.name} has no rule for the tensor {names[0]}{more}",
        tensor=names[0],
        expected=", ".join(near) or f"a name of the family {table.name}",
        found=names[0],
        hint="The config belongs to another model, or the model has parts that this family does not know: set the "
        "option family, or config_dir; the nearest rules are listed as expected.",
    )


def _padding(entries: Iterable[Entry]) -> Iterator[Dropped]:
    """What was cut off at the end of vocabularies."""
    for name, expression in entries:
        if isinstance(expression, Slice) and isinstance(expression.inner, Source) and expression.start == 0:
            rows = expression.inner.shape[expression.dim]
            if name.endswith(VOCABULARY_NAMES) and expression.dim == 0 and rows > expression.stop:
                yield Dropped(f"{name}, rows {expression.stop} to {rows - 1}", "padding beyond vocab_size")


def _check_names(entries: Sequence[Entry]) -> None:
    """No two tensors may come to have one name."""
    seen: set[str] = set()
    for name, _ in entries:
        if name in seen:
            raise GeometryMismatch(
                f"two tensors of the checkpoint come to have the name {name}",
                tensor=name,
                expected="one tensor of each name",
                found="two",
                hint="The checkpoint mixes two namings, or the family does not fit: set the option family, or none.",
            )
        seen.add(name)


def _fused_note(entries: Iterable[Entry], config: dict[str, Any]) -> tuple[str, ...]:
    known = FUSED_ON_THE_HUB.intersection(model_types(config))
    fused = next((name for name, _ in entries if name.endswith(_FUSED)), None)
    if fused is None or known:
        return ()
    return (f"experts stay fused ({fused}): no family knows how the hub names those of this model type",)


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
    entries: Iterable[Entry], options: ConvertOptions, tables: Sequence[Table], folder: str
) -> tuple[Target, ...]:
    kept = (*KEEP_FLOAT32, *(end for table in tables for end in table.keep_float32))
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
