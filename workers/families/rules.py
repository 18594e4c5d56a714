"""Rules and tables: which names of one naming become which of another, read in either direction.

A rule has name patterns on both sides and the operations from left to right. Placeholders in braces stand for parts
of names: ``{layer}`` and ``{expert}`` for numbers, any other for whatever is there. A placeholder that only one
side has counts the entries of a stacked dimension.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from workers.errors import GeometryMismatch, InternalError, UnmappedTensor
from workers.expressions import Expression
from workers.families.operations import NO_FACTS, Facts, Group, Operation, Version

NUMBERS = frozenset(("layer", "expert"))
"""Placeholders that stand for numbers."""

_NUMBER, _ANYTHING = r"\d+", ".+"
_PLACEHOLDER = re.compile(r"\{(\w+)(?:\+(\w+)|@(\w+))?\}")
_WHOLE_NUMBER = re.compile(r"(?:^|(?<=\.))\d+(?=\.|$)")
"""A part of a name that is a number, such as that of a layer."""


class Pattern:
    """A name with placeholders, such as ``{module}.experts.{expert}.w1.weight``.

    ``{layer+num_hidden_layers}`` stands for a number that is larger by a size of the config: numbers below that size
    do not fit. ``{layer@cross_attention_layers}`` stands for an entry of a list of the config, and its value is the
    entry's place in the list: other numbers do not fit.
    """

    def __init__(self, text: str, facts: Facts = NO_FACTS) -> None:
        parts = _PLACEHOLDER.split(text)
        self.text = text
        self.placeholders = names = tuple(parts[1::4])
        self._added = {name: facts.size(key) for name, key in zip(names, parts[2::4], strict=True) if key}
        self._listed = {name: facts.numbers(key) for name, key in zip(names, parts[3::4], strict=True) if key}
        self._plain = "".join(f"{before}{{{name}}}" for before, name in zip(parts[::4], names, strict=False))
        self._plain += parts[-1]
        literal = [re.escape(part) for part in parts[::4]]
        groups = [f"(?P<{name}>{_NUMBER if name in NUMBERS else _ANYTHING})" for name in names]
        regex = "".join(part for pair in zip(literal, [*groups, ""], strict=True) for part in pair)
        self._match = re.compile(regex).fullmatch
        self._begin, self._end = parts[0], parts[-1]
        self._is_numbered = any(map(_WHOLE_NUMBER.search, parts[::4]))

    def may_match(self, kind: str) -> bool:
        """Whether it may fit names that become ``kind`` when each part that is a number becomes 0."""
        return self._is_numbered or self._match(kind) is not None

    def match(self, name: str) -> dict[str, str] | None:
        """What the placeholders stand for in a name; None when it does not fit."""
        if not (name.endswith(self._end) and name.startswith(self._begin)):
            return None  # most names by far: a large model has many times as many as a table has rules
        found = self._match(name)
        if found is None:
            return None
        values = found.groupdict()
        for placeholder, added in self._added.items():
            number = int(values[placeholder]) - added
            if number < 0:
                return None
            values[placeholder] = str(number)
        for placeholder, numbers in self._listed.items():
            if int(values[placeholder]) not in numbers:
                return None
            values[placeholder] = str(numbers.index(int(values[placeholder])))
        return values

    def count(self, layers: int) -> int:
        """How many values a placeholder takes: as many as its list has entries, else ``layers``."""
        return min(map(len, self._listed.values()), default=layers)

    def name(self, values: dict[str, str]) -> str:
        """The name for these values of the placeholders."""
        moved = {name: str(int(values[name]) + added) for name, added in self._added.items()}
        moved |= {name: str(numbers[int(values[name])]) for name, numbers in self._listed.items()}
        return self._plain.format_map({**values, **moved})


@dataclass(frozen=True, slots=True)
class Rule:
    """Tensors named by ``sources`` become those named by ``targets`` through ``operations``; both ways.

    ``since`` is the first version of transformers whose modules have the names of the left side. From left to right
    the names tell; backwards the version does. ``back_beside`` is a name of the right side that must be there, too,
    for the rule to apply backwards: where the right side has one name for what the left side calls by two.
    """

    sources: tuple[str, ...]
    targets: tuple[str, ...]
    operations: tuple[Operation, ...] = ()
    since: Version = (0, 0)
    back_beside: str = ""
    beside: str = ""

    @property
    def inverse(self) -> Rule:
        """The rule from targets to sources."""
        operations = tuple(operation.inverse for operation in reversed(self.operations))
        return Rule(self.targets, self.sources, operations, self.since, self.beside, self.back_beside)


def rename(source: str, target: str, since: Version = (0, 0)) -> Rule:
    """A rule that changes a name and nothing else."""
    return Rule((source,), (target,), (), since)


@dataclass(frozen=True, slots=True)
class Drop:
    """Tensors that the other naming does not have. Lossy: nothing brings them back."""

    source: str
    reason: str


@dataclass(frozen=True, slots=True)
class Count:
    """That the numbers ``placeholder`` takes in names of the left side are 0 to one below a size of the config.

    The first of ``keys`` that the config has counts; for each value of the other placeholders anew.
    """

    pattern: str
    placeholder: str
    keys: tuple[str, ...]
    what: str


@dataclass(frozen=True, slots=True)
class Table:
    """How one framework's names of a family relate to the hub's. The first rule that fits a name counts.

    A name that no rule fits stays as it is. The model type ``*`` stands for every model.
    """

    name: str
    model_types: tuple[str, ...]
    rules: tuple[Rule | Drop, ...]
    naming: str = "transformers"
    """Whose names the left side has, as ``Checkpoint.naming`` says."""
    keep_float32: tuple[str, ...] = ()
    """Ends of names whose tensors no cast touches, beside those of every family."""
    counts: tuple[Count, ...] = ()
    """What must be there as often as the config says."""
    inside: bool = True
    """Whether it also fits a language model that is a part of a larger one, by the type in the config's part."""
    required: tuple[str, ...] = ()
    """Patterns of names that must be there, for each layer that the config tells."""
    architectures: str = ""
    """End of the names of the architectures that the table is for, where not for all of its model types."""

    def inverse_rules(self, transformers: Version) -> tuple[Rule, ...]:
        """The rules from the hub's names back to modules of that version; what was dropped has none."""
        return tuple(rule.inverse for rule in self.rules if isinstance(rule, Rule) and rule.since <= transformers)


Entry = tuple[str, Expression]


@dataclass(frozen=True, slots=True)
class Applied:
    """Tensors after a table, in their order, and what it dropped: names with reasons."""

    entries: list[Entry]
    dropped: list[tuple[str, str]] = field(default_factory=list)
    unmatched: list[str] = field(default_factory=list)
    """Names that no rule fits."""
    used: set[int] = field(default_factory=set)
    """Numbers of the rules that fit some name."""
    made_by: dict[str, int] = field(default_factory=dict)
    """The number of the rule that made a tensor, by the tensor's new name."""


def apply_rules(rules: Sequence[Rule | Drop], entries: Iterable[Entry], facts: Facts) -> Applied:
    """Carry tensors over to the other naming. What a rule makes stands where the first of its inputs stood."""
    entries = list(entries)
    names = {name for name, _ in entries}
    compiled = _Candidates([_Compiled(rule, facts, names) for rule in rules])
    applied = Applied([])
    slots: list[list[Entry]] = []
    open_groups: dict[tuple[int, tuple[str, ...]], tuple[_Gathering, list[Entry]]] = {}
    for name, expression in entries:
        for number, rule in compiled.of(name):
            hit = rule.match(name)
            if hit is None:
                continue
            applied.used.add(number)
            if isinstance(rule.rule, Drop):
                applied.dropped.append((name, rule.rule.reason))
                break
            column, values = hit
            key = number, tuple(values[shared] for shared in rule.shared)
            if key not in open_groups:
                open_groups[key] = _Gathering(rule, values), []
                slots.append(open_groups[key][1])
            open_groups[key][0].add(column, name, values, expression)
            break
        else:
            slots.append([(name, expression)])
            applied.unmatched.append(name)
    for (number, _), (gathering, slot) in open_groups.items():
        slot.extend(gathering.results(facts))
        applied.made_by.update((name, number) for name, _ in slot)
    applied.entries.extend(entry for slot in slots for entry in slot)
    return applied


class _Compiled:
    """A rule with its patterns compiled: what both sides share, and the placeholder that counts entries."""

    def __init__(self, rule: Rule | Drop, facts: Facts, names: Collection[str]) -> None:
        self.rule = rule
        self._names = names
        self._beside = Pattern(rule.beside, facts) if isinstance(rule, Rule) and rule.beside else None
        sources, targets = ((rule.source,), ()) if isinstance(rule, Drop) else (rule.sources, rule.targets)
        self.sources = tuple(Pattern(text, facts) for text in sources)
        self.targets = tuple(Pattern(text, facts) for text in targets)
        left, right = (set[str]().union(*(p.placeholders for p in side)) for side in (self.sources, self.targets))
        self.shared = tuple(sorted(left & right if targets else left))
        self.gathered = tuple(left - right if targets else ())
        self.spread = tuple(right - left)
        if len(self.gathered) > 1 or len(self.spread) > 1:
            raise InternalError(f"a rule for {sources} counts entries by more than one placeholder")

    def match(self, name: str) -> tuple[int, dict[str, str]] | None:
        for column, pattern in enumerate(self.sources):
            values = pattern.match(name)
            if values is not None and (self._beside is None or self._beside.name(values) in self._names):
                return column, values
        return None


class _Candidates:
    """The rules that may fit a name: names that differ only in numbers fit the same patterns, so few are tried."""

    def __init__(self, rules: Sequence[_Compiled]) -> None:
        self._rules = tuple(enumerate(rules))
        self._by_kind: dict[str, list[tuple[int, _Compiled]]] = {}

    def of(self, name: str) -> list[tuple[int, _Compiled]]:
        """Rules and their numbers, in their order."""
        kind = _WHOLE_NUMBER.sub("0", name)
        if kind not in self._by_kind:
            fitting = [(n, rule) for n, rule in self._rules if any(p.may_match(kind) for p in rule.sources)]
            self._by_kind[kind] = fitting
        return self._by_kind[kind]


class _Gathering:
    """The inputs of one use of a rule, as they come in."""

    def __init__(self, rule: _Compiled, values: dict[str, str]) -> None:
        self._rule = rule
        self._values = values
        self._columns: list[dict[int, tuple[str, Expression]]] = [{} for _ in rule.sources]

    def add(self, column: int, name: str, values: dict[str, str], expression: Expression) -> None:
        index = int(values[self._rule.gathered[0]]) if self._rule.gathered else 0
        other, _ = self._columns[column].setdefault(index, (name, expression))
        if other != name:
            raise GeometryMismatch(
                f"{other} and {name} stand for the same part",
                tensor=name,
                expected="one tensor for each number",
                found=f"{other} and {name}",
                hint="The checkpoint was put together from two: leave the one out that isn't wanted.",
            )

    def results(self, facts: Facts) -> list[Entry]:
        rule = self._rule.rule
        if isinstance(rule, Drop):
            return []
        group = self._complete()
        try:
            for operation in rule.operations:
                group = operation.apply(group, facts)
            _check_alike(group)
        except GeometryMismatch as error:
            names = ", ".join(name for name, _ in self._columns[0].values())
            raise GeometryMismatch(
                f"{names}: {error.message}", tensor=names, expected=error.expected, found=error.found, hint=error.hint
            ) from None
        return list(self._named(group))

    def _complete(self) -> Group:
        """The inputs as a group, when none is missing."""
        count = max(map(len, self._columns))
        for pattern, column in zip(self._rule.sources, self._columns, strict=True):
            absent = next((index for index in range(count) if index not in column), None)
            if absent is not None:
                name = pattern.name({**self._values, **dict.fromkeys(self._rule.gathered, str(absent))})
                there = next(name for column in self._columns for name, _ in column.values())
                raise UnmappedTensor(
                    f"there is no tensor {name}, which belongs together with {there}",
                    tensor=name,
                    expected=name,
                    found=there,
                    hint="The checkpoint lacks a part, or the family does not fit: set the option family, or none.",
                )
        return tuple(tuple(column[index][1] for index in range(count)) for column in self._columns)

    def _named(self, group: Group) -> Iterable[Entry]:
        """Names for the results: entry by entry, and in the order of the target patterns within each."""
        for index in range(len(group[0])):
            values = {**self._values, **dict.fromkeys(self._rule.spread, str(index))}
            for pattern, column in zip(self._rule.targets, group, strict=True):
                yield pattern.name(values), column[index]


def _check_alike(group: Group) -> None:
    """Refuse columns of different lengths, which taking dimensions of different sizes apart can make."""
    lengths = sorted({len(column) for column in group})
    if len(lengths) > 1:
        raise GeometryMismatch(
            f"the tensors that belong together come apart into {' and '.join(map(str, lengths))} parts",
            expected="as many parts of each",
            found=", ".join(map(str, lengths)),
        )
