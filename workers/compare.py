"""Compare two models, or a checkpoint and a model: both are planned, and what the plans would make is compared."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from workers.convert import plan_source
from workers.errors import InputError
from workers.families.lora_config import ADAPTER_CONFIG, ADAPTER_FOLDER
from workers.manifest import MANIFEST_NAME
from workers.options import MAPPING, ConvertOptions
from workers.plan import Plan, source_fingerprint, source_summary
from workers.storage import FolderAddress, bounded, open_folder
from workers.verify import Report
from workers.verify_pairs import CompareLimits, compare_plans

SAME_DIGESTS = f"the digests of the weight files, by {MANIFEST_NAME}"
"""What a comparison of two models says that it checked when their manifests are why they are the same."""


DESTINATION_OPTIONS = frozenset({"overwrite", "resume", "verify", "destination_profile", "max_shard_size", "memory"})
"""Options that say nothing of how a source is read."""


@dataclass(frozen=True, slots=True)
class Compared:
    """One side of a comparison: a model or a checkpoint, and the options to read it with."""

    source: str
    options: ConvertOptions = field(default_factory=ConvertOptions)

    @property
    def has_options(self) -> bool:
        """Whether it was given options, beside a storage profile."""
        return self.options != ConvertOptions(source_profile=self.options.source_profile)


def compare_sources(
    a: str | Compared,
    b: str | Compared,
    *,
    atol: float = 0.0,
    limits: CompareLimits | None = None,
    within: tuple[str, ...] = (),
) -> Report:
    """Compare two models, or a checkpoint and a model, as Hugging Face would see them.

    When ``b`` says in its manifest that it was made from ``a``, then ``a`` is taken with the options it was made
    with, unless it was given some. ``within`` as in ``plan_source``.
    """
    first, second = (side if isinstance(side, Compared) else Compared(side) for side in (a, b))
    with bounded(within):
        with _naming(second):
            plan_b = _plan(second, within)
        with _naming(first):
            made_with, plan_a = (
                ({}, _plan(first, within)) if first.has_options else _as_result_was_made(first, second, within)
            )
        report = compare_plans(plan_a, plan_b, atol=atol, limits=limits or CompareLimits())
    models = [
        {**source_summary(plan.checkpoint), "tensors": len(plan.targets), "bytes": plan.bytes_total}
        for plan in (plan_a, plan_b)
    ]
    if not report.details["compared_bytes"] and _same_digests(first, second):
        report = dataclasses.replace(report, checks=(*report.checks, SAME_DIGESTS))
    report = dataclasses.replace(report, details={**report.details, "models": models})
    if not made_with:
        return report
    said = ", ".join(name if name == MAPPING else f"{name}={value}" for name, value in made_with.items())
    return dataclasses.replace(report, checks=(*report.checks, f"with the options of {MANIFEST_NAME}: {said}"))


@contextmanager
def _naming(side: Compared) -> Iterator[None]:
    """Say of which of the two sides an error tells."""
    try:
        yield
    except InputError as error:
        if side.source in error.message:
            raise
        raise type(error)(f"{side.source}: {error.message}", hint=error.hint, **error.details()) from error


def _as_result_was_made(source: Compared, result: Compared, within: tuple[str, ...]) -> tuple[dict[str, Any], Plan]:
    """The plan of a source, with the options of a result's manifest if the result was made of this very source."""
    fingerprint, options = _told_by_manifest(result)
    if options:
        # A source may not be readable at all without them: without its config, its mapping.
        with suppress(InputError):
            made = plan_source(
                source.source,
                dataclasses.replace(ConvertOptions.from_dict(options), source_profile=source.options.source_profile),
                within=within,
            )
            if source_fingerprint(made.checkpoint) == fingerprint:
                return options, made
    return {}, _plan(source, within)


def _plan(side: Compared, within: tuple[str, ...]) -> Plan:
    """The plan of one side; a model that was written with an adapter beside it is taken with that."""
    if side.has_options or not _has_adapter(side):
        return plan_source(side.source, side.options, within=within)
    adapter = Compared(f"{side.source.rstrip('/')}/{ADAPTER_FOLDER}", side.options)
    # How the adapter is scaled is not compared, and may not be known.
    alpha = None if _json(adapter, ADAPTER_CONFIG).get("lora_alpha") else 1.0
    options = dataclasses.replace(side.options, base=side.source, lora_alpha=alpha)
    return plan_source(adapter.source, options, within=within)


def _has_adapter(model: Compared) -> bool:
    with suppress(ValueError, TypeError, KeyError):
        return any(entry["path"].startswith(f"{ADAPTER_FOLDER}/") for entry in _manifest(model)["weights"])
    return False


def _same_digests(a: Compared, b: Compared) -> bool:
    """Whether both have manifests, which record the same weight files with the same digests."""
    try:
        told = [{row["path"]: row["digest"] for row in _manifest(side)["weights"]} for side in (a, b)]
    except (ValueError, TypeError, KeyError):
        return False
    return bool(told[0]) and told[0] == told[1]


def _manifest(model: Compared) -> Any:
    return _json(model, MANIFEST_NAME)


def _json(model: Compared, path: str) -> Any:
    folder = open_folder(FolderAddress(model.source, model.options.source_profile))
    try:
        return json.loads(folder.read(path)) if folder.stat(path) else {}
    finally:
        folder.close()


def _told_by_manifest(result: Compared) -> tuple[Any, dict[str, Any]]:
    """The fingerprint of its source and the options, but those for the destination, that a folder's manifest says."""
    try:
        manifest = _manifest(result)
        options = {name: value for name, value in manifest["options"].items() if name not in DESTINATION_OPTIONS}
        return manifest["source"]["fingerprint"], options
    except (ValueError, TypeError, KeyError, AttributeError):
        return None, {}
