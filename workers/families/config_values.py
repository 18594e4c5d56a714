"""The sizes that a config tells and the user corrects: what they are, who says so, and that they are sizes at all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from workers.errors import GeometryMismatch, IncompleteCheckpoint
from workers.options import ConvertOptions

CONFIG = "config.json"

SIZE_OPTIONS = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
"""Options that stand for sizes of the config."""

_LARGEST = {
    "hidden_size": 1 << 24,
    "num_attention_heads": 1 << 20,
    "num_key_value_heads": 1 << 20,
    "head_dim": 1 << 20,
    "num_hidden_layers": 1 << 16,
    "vocab_size": 1 << 31,
}
"""Sizes of every language model that has them, with a bound that none comes near."""

_PERHAPS_NONE = {
    "intermediate_size": 1 << 24,
    "moe_intermediate_size": 1 << 24,
    "num_experts": 1 << 20,
    "num_local_experts": 1 << 20,
    "n_routed_experts": 1 << 20,
}
"""Sizes that may be 0: of parts that a model can do without."""


@dataclass(frozen=True, slots=True)
class Told:
    """A size, and who says so."""

    value: int
    by: str
    """``config.json``, or the option by its name."""


class Sizes(dict[str, int]):
    """Sizes by their keys, which remember what was asked for: an option that nobody asks for changes nothing."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        super().__init__(sizes)
        self.asked: set[str] = set()

    def __getitem__(self, key: str) -> int:
        self.asked.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        """As of any dict."""
        self.asked.add(key)
        return super().get(key, default)


def given_sizes(options: ConvertOptions) -> dict[str, int]:
    """The sizes that the user says, by their keys in the config."""
    asked = {key: getattr(options, key) for key in SIZE_OPTIONS}
    return {key: value for key, value in asked.items() if value is not None}


def told_sizes(text: Mapping[str, Any], options: ConvertOptions) -> dict[str, Told]:
    """The sizes of a language model, by its part of the config; where the user says otherwise, that counts."""
    told = {key: Told(value, CONFIG) for key, value in text.items() if type(value) is int}
    return told | {key: Told(value, f"the option {key}") for key, value in given_sizes(options).items()}


def check_values(text: Mapping[str, Any]) -> None:
    """Raise ``GeometryMismatch`` for a size of a language model's config that is none: a text, a negative number.

    ``null`` and lists (of one size for each layer) pass: some models have them.
    """
    for least, sizes in ((1, _LARGEST), (0, _PERHAPS_NONE)):
        for key, most in sizes.items():
            value = text.get(key)
            if value is None or isinstance(value, list):
                continue
            if type(value) is not int or not least <= value <= most:
                raise no_size(key, value, f"a whole number from {least} to {most}")


def no_size(key: str, value: Any, expected: str) -> GeometryMismatch:
    """The error for a value of the config that is no size."""
    shown = repr(value) if len(repr(value)) <= 80 else f"{repr(value)[:77]}..."
    return GeometryMismatch(
        f"{CONFIG} says that {key} is {shown}, which is no size",
        file=CONFIG,
        expected=f"{expected} for {key}",
        found=shown,
        hint="The config is damaged or was edited by hand: name the right one with the option config_dir.",
    )


def check_kind(config: Mapping[str, Any], *, family: str | None) -> None:
    """Raise ``IncompleteCheckpoint`` for a config that does not tell the kind of model, unless the user does."""
    if family is None and not any(config.get(key) for key in ("model_type", "architectures", "auto_map")):
        shown = ", ".join(list(config)[:8]) or "nothing"
        raise IncompleteCheckpoint(
            f"{CONFIG} says neither model_type nor architectures, so that the kind of model is not known",
            file=CONFIG,
            expected="model_type",
            found=shown,
            hint="Name a folder with the model's full config.json with the option config_dir, or the kind of model "
            "with the option family.",
        )
