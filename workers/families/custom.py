"""A user's own mapping: rules in the vocabulary of the built-in tables, read from a document and checked.

Everything that can be seen without tensors is refused here, with the place in the file: unknown keys, numbers out of
bounds, placeholders that fit nothing, operations that find another number of tensors than they work on.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from workers.families.custom_file import INLINE, load, to_text
from workers.families.custom_values import Value
from workers.families.custom_vocabulary import MOST_COLUMNS, Group, read_operation
from workers.families.operations import Operation
from workers.families.registry import KEEP
from workers.families.rules import NUMBERS, Drop, Rule, rename
from workers.families.size_operations import Trim

SCHEMA = 1
MOST_RULES = 10_000
MOST_OPERATIONS = 32
MOST_FREE_PLACEHOLDERS = 3
"""Placeholders for anything in one name: with more, a long name could be matched in too many ways."""

_DROP_REASON = "left out by the mapping"
_PLACEHOLDER = re.compile(r"\{([A-Za-z_]\w*)(?:\+(\w+)|@(\w+))?\}", re.ASCII)
_COMMENT = "comment"
_TOP = ("schema", "name", "extends", "strict", "rules", "keep_float32", _COMMENT)
_FORMS = ("drop", "keep", "source", "sources")
_SIDES = ("source", "sources", "target", "targets", "operations", _COMMENT)


@dataclass(frozen=True, slots=True)
class CustomMapping:
    """A user's mapping, checked."""

    text: str
    """All of it as one line of JSON, which options, plan and manifest hold."""
    name: str
    rules: tuple[Rule | Drop, ...]
    lossy: frozenset[int]
    """Numbers of the rules whose way back does not bring everything back."""
    extends: str | None = None
    """The family whose rules come after these, ``none`` for no other; None for the one that the config tells."""
    strict: bool = False
    """Whether a tensor that no rule fits is refused, where a family would leave it as it is."""
    keep_float32: tuple[str, ...] = ()
    """Ends of names whose tensors no cast touches."""

    def trims(self, rule: int) -> tuple[Trim, ...]:
        """The operations of a rule that cut elements off."""
        found = self.rules[rule]
        operations: Sequence[Operation] = found.operations if isinstance(found, Rule) else ()
        return tuple(operation for operation in operations if isinstance(operation, Trim))

    def label(self, rule: int) -> str:
        """A rule as messages call it: its place in the file and what it reads."""
        found = self.rules[rule]
        return f"rules[{rule}] ({', '.join(found.sources) if isinstance(found, Rule) else found.source})"


def read_mapping(option: str, profile: str | None = None) -> CustomMapping:
    """The mapping that the option ``mapping`` stands for: a JSON object, or the path or URL of a file.

    Raises ``InvalidOption`` that says where it is wrong, and what is expected there.
    """
    content, file = load(option, profile)
    value = Value(content, "", file).object(_TOP, ("schema", "rules"))
    if type(value["schema"].content) is not int or value["schema"].content != SCHEMA:
        raise value["schema"].fault(
            f"this version of unshard reads mappings of schema {SCHEMA}",
            expected=str(SCHEMA),
            found=repr(value["schema"].content)[:40],
            hint="A newer unshard may read it.",
        )
    _comment(value)
    extends = value["extends"].text() if value.has("extends") else None
    ends = value["keep_float32"].items(MOST_COLUMNS) if value.has("keep_float32") else ()
    rules, lossy = _rules(value["rules"])
    return CustomMapping(
        text=to_text(content),
        name=value["name"].text() if value.has("name") else INLINE,
        rules=rules,
        lossy=lossy,
        extends=extends,
        strict=value["strict"].flag() if value.has("strict") else extends == KEEP,
        keep_float32=tuple(entry.text() for entry in ends),
    )


def _rules(value: Value) -> tuple[tuple[Rule | Drop, ...], frozenset[int]]:
    rules: list[Rule | Drop] = []
    lossy: set[int] = set()
    seen: dict[str, str] = {}
    for number, entry in enumerate(value.items(MOST_RULES)):
        rule, loses = _rule(entry)
        rules.append(rule)
        if loses:
            lossy.add(number)
        for source in rule.sources if isinstance(rule, Rule) else (rule.source,):
            if source in seen:
                raise entry.fault(
                    f"{source} is read by {seen[source]} already, and the first rule that fits a name counts",
                    expected="one rule for a name",
                    found=f"{seen[source]} and {entry.path}",
                )
            seen[source] = entry.path
    return tuple(rules), frozenset(lossy)


def _rule(value: Value) -> tuple[Rule | Drop, bool]:
    """A rule, and whether it loses something."""
    form = next((form for form in _FORMS if value.has(form)), None)
    if form is None:
        value.object(("drop", "keep", "reason", *_SIDES))
        raise value.fault(
            "a rule has one of the keys source, sources, drop and keep",
            expected='a rule such as {"source": "a", "target": "b"}',
            found=", ".join(value.content) or "no key",
        )
    _comment(value)
    if form == "drop":
        value.object(("drop", "reason", _COMMENT))
        _placeholders(value["drop"], targets=False)
        reason = value["reason"].text() if value.has("reason") else _DROP_REASON
        return Drop(value["drop"].text(), reason), True
    if form == "keep":
        value.object(("keep", _COMMENT))
        _placeholders(value["keep"], targets=True)
        return rename(value["keep"].text(), value["keep"].text()), False
    return _renaming(value.object(_SIDES))


def _renaming(value: Value) -> tuple[Rule, bool]:
    sources, left = _side(value, "source", targets=False)
    targets, right = _side(value, "target", targets=True)
    gathered, spread = _counting(value, left - right, "sources"), _counting(value, right - left, "targets")
    operations = []
    lossy = False
    group = Group(len(sources), counted=gathered)
    if value.has("operations"):
        for entry in value["operations"].items(MOST_OPERATIONS):
            step = read_operation(entry, group)
            operations.append(step.operation)
            group, lossy = step.after, lossy or step.lossy
    if group.columns != len(targets):
        raise value.fault(
            f"the operations make {group.columns} of the {len(sources)} sources, but there are {len(targets)} targets",
            expected=f"{group.columns} in targets",
            found=str(len(targets)),
            hint="split, concatenate and the operations on heads change the number of tensors.",
        )
    if group.counted != spread:
        side, verb = ("targets", "unstack") if spread else ("sources", "stack")
        which = ", ".join(sorted(right - left if spread else left - right)) or "no placeholder"
        raise value.fault(
            f"the operations make {'many tensors' if group.counted else 'one tensor'} of each use of the rule, which "
            f"does not go with the placeholders ({which} only in the {side})",
            expected=f"the operation {verb}, or the same placeholders on both sides",
            found=which,
        )
    return Rule(sources, targets, tuple(operations)), lossy


def _side(value: Value, key: str, *, targets: bool) -> tuple[tuple[str, ...], frozenset[str]]:
    """The names of one side of a rule, and the placeholders that each of them has."""
    many = f"{key}s"
    if value.has(key) == value.has(many):
        raise value.fault(
            f"a rule has either {key} or {many}",
            expected=f"{key} or {many}",
            found="both" if value.has(key) else "none",
        )
    entries = [value[key]] if value.has(key) else list(value[many].items(MOST_COLUMNS, least=1))
    placeholders = [_placeholders(entry, targets=targets) for entry in entries]
    names = tuple(entry.text() for entry in entries)
    for number, (entry, found) in enumerate(zip(entries, placeholders, strict=True)):
        if found != placeholders[0]:
            told = ", ".join(sorted(placeholders[0])) or "none"
            raise entry.fault(
                f"all {many} of a rule have the same placeholders",
                expected=told,
                found=", ".join(sorted(found)) or "none",
            )
        if names[number] in names[:number]:
            raise entry.fault(
                f"{names[number]} is there twice", expected="different names", found=f"{names[number]} twice"
            )
    return names, placeholders[0]


def _placeholders(value: Value, *, targets: bool) -> frozenset[str]:
    """The placeholders of a name, when it is one that can be matched and made."""
    text = value.text()
    found = list(_PLACEHOLDER.finditer(text))
    if any(brace in _PLACEHOLDER.sub("", text) for brace in "{}"):
        raise value.fault(
            f"the braces in {text!r} are no placeholder",
            expected="{layer}, {expert} or another name in braces",
            found=text,
        )
    names = [match[1] for match in found]
    for match in found:
        if (match[2] or match[3]) and match[1] not in NUMBERS:
            raise value.fault(
                f"{match[0]} is no number, which + and @ are for", expected="{layer+KEY}, {expert@KEY}", found=match[0]
            )
    if len(set(names)) != len(names):
        raise value.fault(f"a placeholder is there twice in {text!r}", expected="different placeholders", found=text)
    free = [name for name in names if name not in NUMBERS]
    if not targets and (len(free) > MOST_FREE_PLACEHOLDERS or "}{" in text):
        raise value.fault(
            f"{text!r} fits names in too many ways",
            expected=f"at most {MOST_FREE_PLACEHOLDERS} placeholders beside {{layer}} and {{expert}}, none right "
            "after another",
            found=text,
        )
    return frozenset(names)


def _counting(value: Value, only: frozenset[str], side: str) -> bool:
    """Whether a side of a rule counts tensors by a placeholder that the other does not have."""
    if len(only) > 1 or not only <= NUMBERS:
        listed = ", ".join(f"{{{name}}}" for name in sorted(only))
        raise value.fault(
            f"the {side} have {listed}, and the other side doesn't",
            expected="the same placeholders on both sides, or one of {layer} and {expert} more, which is stacked",
            found=listed,
        )
    return bool(only)


def _comment(value: Value) -> None:
    """A comment may be any text."""
    if value.has(_COMMENT) and not isinstance(value[_COMMENT].content, str):
        raise value[_COMMENT].fault("a comment is a text", expected="a text")
