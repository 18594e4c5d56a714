"""From a checkpoint's names to the hub's: a user's own rules first, then the tables that fit the config."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from workers.checkpoint import Checkpoint
from workers.errors import GeometryMismatch, InvalidOption, UnmappedTensor
from workers.expressions import Expression, Slice, Source, inputs_of
from workers.families.checks import check_counts
from workers.families.custom import CustomMapping
from workers.families.operations import Facts
from workers.families.registry import (
    ANY_MODEL,
    HUB_LIKE,
    HUB_NAMING,
    KEEP,
    NAMES_KEPT,
    find_tables,
    model_types,
)
from workers.families.required import check_required
from workers.families.rules import Applied, Entry, Rule, Table, apply_rules
from workers.families.size_operations import resolved
from workers.mapping import Dropped

VOCABULARY_NAMES = ("embed_tokens.weight", "lm_head.weight")
"""Ends of names of tensors with a row for each token."""

FUSED_ON_THE_HUB = frozenset(("gpt_oss", "llama4", "llama4_text", "qwen3_vl_moe", "qwen3_5_moe", "qwen3_5_moe_text"))
"""Model types whose experts stay fused in the hub's files."""

_FUSED = ".experts.gate_up_proj"


@dataclass(frozen=True, slots=True)
class Naming:
    """What decides a model's names."""

    config: Mapping[str, Any]
    facts: Facts
    family: str | None
    """The option, or what a user's mapping says in its place."""
    custom: CustomMapping | None = None


@dataclass(frozen=True, slots=True)
class Renamed:
    """The model's tensors under the hub's names, and what led to them."""

    entries: list[Entry]
    family: str
    keep_float32: tuple[str, ...]
    """Ends of names whose tensors no cast touches."""
    dropped: tuple[Dropped, ...]
    notes: tuple[str, ...]


@dataclass(slots=True)
class _Chain:
    """Tensors on their way through the tables."""

    entries: list[Entry]
    used: list[str]
    dropped: list[Dropped]


def rename_tensors(checkpoint: Checkpoint, entries: list[Entry], naming: Naming) -> Renamed:
    """Apply a user's rules, and to what they leave the tables that fit the config, one after the other.

    Raises ``UnmappedTensor`` for a tensor that nothing says anything of where that matters, and ``GeometryMismatch``
    where shapes, config and rules do not fit together.
    """
    if naming.custom is None:
        tables = _tables(checkpoint, naming)
        chain = _by_tables(entries, tables, checkpoint, naming)
        chain.dropped += _padding(chain.entries)
        return _renamed(chain, tables, naming, ())
    own = apply_rules(naming.custom.rules, entries, naming.facts)
    left = set(own.unmatched)
    rest = [entry for entry in entries if entry[0] in left]
    tables = _tables_for(rest, checkpoint, naming)
    made = [entry for entry in own.entries if entry[0] in own.made_by]
    chain = _by_tables(rest, tables, checkpoint, naming, frozenset(own.made_by))
    chain.dropped += _padding(chain.entries)
    _check_names([*made, *chain.entries], naming.custom, own)
    chain.entries = sorted([*made, *chain.entries], key=lambda entry: _first_source(entry[1]))
    chain.used.insert(0, f"{naming.custom.name} (mapping)")
    chain.dropped[:0] = [Dropped(name, reason) for name, reason in own.dropped]
    chain.dropped += _trimmed(own, naming.custom, naming.facts)
    unused = [number for number in range(len(naming.custom.rules)) if number not in own.used]
    notes = tuple(f"no tensor fits {naming.custom.label(number)} of the mapping" for number in unused)
    return _renamed(chain, tables, naming, notes)


def _renamed(chain: _Chain, tables: Sequence[Table], naming: Naming, notes: tuple[str, ...]) -> Renamed:
    _check_names(chain.entries)
    ends = naming.custom.keep_float32 if naming.custom else ()
    return Renamed(
        entries=chain.entries,
        family=" + ".join(chain.used) or NAMES_KEPT,
        keep_float32=(*ends, *(end for table in tables for end in table.keep_float32)),
        dropped=tuple(chain.dropped),
        notes=(*notes, *_fused_note(chain.entries, naming.config)),
    )


def _tables(checkpoint: Checkpoint, naming: Naming) -> tuple[Table, ...]:
    if checkpoint.naming == HUB_NAMING:
        if naming.custom is None and naming.family not in (None, KEEP):
            raise InvalidOption(
                f"the option family says {naming.family}, but the tensors have Hugging Face's names already",
                expected="no family",
                found=naming.family,
                hint="Leave the option out.",
            )
        return ()
    return find_tables(checkpoint.naming, naming.config, naming.family)


def _tables_for(rest: list[Entry], checkpoint: Checkpoint, naming: Naming) -> tuple[Table, ...]:
    """The tables for what a user's rules leave; a model that no table knows needs none when they leave nothing."""
    try:
        return _tables(checkpoint, naming)
    except UnmappedTensor:
        if rest:
            raise
        return ()


def _by_tables(
    entries: list[Entry],
    tables: Sequence[Table],
    checkpoint: Checkpoint,
    naming: Naming,
    made: frozenset[str] = frozenset(),
) -> _Chain:
    """Apply tables one after the other; ``made`` are hub names that a user's rules give."""
    facts, custom = naming.facts, naming.custom
    names_are_known = checkpoint.naming in HUB_LIKE or naming.family == KEEP
    chain = _Chain(entries, [table.name for table in tables if ANY_MODEL not in table.model_types], [])
    unknown = {name for name, _ in entries}
    for table in tables:
        before = [name for name, _ in chain.entries]
        if custom is None:
            check_counts(before, table.counts, facts)
        check_required(set(before), table, facts, made)
        applied = apply_rules(table.rules, chain.entries, facts)
        if applied.unmatched and not names_are_known and ANY_MODEL not in table.model_types:
            raise _unmapped(applied.unmatched, table.name, _patterns(naming, [table]))
        unknown &= set(applied.unmatched)
        chain.dropped.extend(Dropped(name, reason) for name, reason in applied.dropped)
        chain.entries = applied.entries
        if ANY_MODEL in table.model_types and before != [name for name, _ in chain.entries]:
            chain.used.insert(0, table.name)
    if custom is not None and custom.strict and unknown:
        names = [name for name, _ in entries if name in unknown]
        raise _unmapped(names, custom.name, _patterns(naming, tables))
    return chain


def _patterns(naming: Naming, tables: Sequence[Table]) -> list[str]:
    """The names that rules read, a user's first."""
    rules = [*(naming.custom.rules if naming.custom else ()), *(rule for table in tables for rule in table.rules)]
    return [text for rule in rules for text in (rule.sources if isinstance(rule, Rule) else (rule.source,))]


def _unmapped(names: Sequence[str], family: str, patterns: list[str]) -> UnmappedTensor:
    """No tensor is left out silently: say which has no rule, and which rules come near."""
    near = difflib.get_close_matches(names[0], dict.fromkeys(patterns), n=3, cutoff=0.5)
    more = f", nor for {len(names) - 1} more such as {names[-1]}" if len(names) > 1 else ""
    return UnmappedTensor(
        f"the family {family} has no rule for the tensor {names[0]}{more}",
        tensor=names[0],
        expected=", ".join(near) or f"a name of the family {family}",
        found=names[0],
        hint="The config belongs to another model, or the model has parts that this family does not know: set the "
        "option family, or config_dir, or write a rule for it (option mapping; keep leaves a tensor as it is). The "
        "nearest rules are listed as expected.",
    )


def _trimmed(own: Applied, custom: CustomMapping, facts: Facts) -> Iterator[Dropped]:
    """What a user's rules cut off."""
    for name, expression in own.entries:
        for trim in custom.trims(own.made_by[name]) if name in own.made_by else ():
            size = resolved(trim.size, facts)
            if any(_cuts(node, trim.dim, size) for node in _nodes(expression)):
                yield Dropped(
                    f"{name}, beyond {size} in dimension {trim.dim}", f"cut off by {custom.label(own.made_by[name])}"
                )


def _nodes(expression: Expression) -> Iterator[Expression]:
    yield expression
    for inner in inputs_of(expression):
        yield from _nodes(inner)


def _cuts(node: Expression, dim: int, size: int) -> bool:
    is_start = isinstance(node, Slice) and (node.dim, node.start, node.stop) == (dim, 0, size)
    return is_start and next(inputs_of(node)).shape[dim] > size


def _padding(entries: Iterable[Entry]) -> Iterator[Dropped]:
    """What was cut off at the end of vocabularies."""
    for name, expression in entries:
        if isinstance(expression, Slice) and isinstance(expression.inner, Source) and expression.start == 0:
            rows = expression.inner.shape[expression.dim]
            if name.endswith(VOCABULARY_NAMES) and expression.dim == 0 and rows > expression.stop:
                yield Dropped(f"{name}, rows {expression.stop} to {rows - 1}", "padding beyond vocab_size")


def _check_names(entries: Sequence[Entry], custom: CustomMapping | None = None, own: Applied | None = None) -> None:
    """No two tensors may come to have one name."""
    seen: set[str] = set()
    for name, _ in entries:
        if name in seen:
            rule = own.made_by.get(name) if own else None
            by = f", one of them by {custom.label(rule)} of the mapping" if custom and rule is not None else ""
            raise GeometryMismatch(
                f"two tensors of the checkpoint come to have the name {name}{by}",
                tensor=name,
                expected="one tensor of each name",
                found="two",
                hint="The checkpoint mixes two namings, or the family or a mapping does not fit: set the option "
                "family, or none, or correct the mapping's targets.",
            )
        seen.add(name)


def _first_source(expression: Expression) -> int:
    """The number of the first source tensor that something is made of, by which the source's order is kept."""
    if isinstance(expression, Source):
        return expression.tensor
    return min(map(_first_source, inputs_of(expression)), default=1 << 62)


def _fused_note(entries: Iterable[Entry], config: Mapping[str, Any]) -> tuple[str, ...]:
    known = FUSED_ON_THE_HUB.intersection(model_types(config))
    fused = next((name for name, _ in entries if name.endswith(_FUSED)), None)
    if fused is None or known:
        return ()
    return (f"experts stay fused ({fused}): no family knows how the hub names those of this model type",)
