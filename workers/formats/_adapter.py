"""LoRA adapters in files of their own, and what their adapter_config.json tells of them.

With the option ``base`` the base model comes with them.
Sources: peft ``utils/save_and_load.py``, ``tuners/lora/config.py``; torchtune
``training/checkpointing/_checkpointer.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from workers.checkpoint import Adapter, Checkpoint
from workers.errors import IncompleteCheckpoint, InvalidOption, UnmappedTensor
from workers.families.adapters import PREFIX
from workers.families.lora_merge import check_base
from workers.formats import hf_bin, huggingface
from workers.formats._combined import combine
from workers.formats._format import Listing
from workers.formats._model_folder import find_model_files, read_json
from workers.formats._namings import HUB, TORCHTUNE, naming_of_keys
from workers.formats._weight_files import Weights
from workers.options import ConvertOptions
from workers.storage import FolderAddress, open_folder

ADAPTER_CONFIG = "adapter_config.json"
_REPOSITORY = "original_repo_id.json"
"""Where torchtune keeps the name of the repository that the base came from."""

_ADAPTER_NAME = "default"
_WITHOUT_LEAF = ("lora_magnitude_vector.weight",)
_METHODS = frozenset(("LORA",))
_OWN_KEYS = frozenset(("r", "lora_alpha", "target_modules", "peft_type", "base_model_name_or_path"))
"""The keys of torchtune's own adapter_config.json, and no others."""


def open_adapter(listing: Listing, options: ConvertOptions, weights: Weights) -> Checkpoint:
    """Open an adapter, with its base model where the options name one."""
    settings = read_json(listing, ADAPTER_CONFIG) or {}
    _check_method(settings)
    if weights.files[0].path.endswith(".safetensors"):
        opened = huggingface.open_safetensors_model(listing, replace(options, config_dir=None), weights)
    else:
        opened = hf_bin.open_torch_model(listing, replace(options, config_dir=None), weights, "peft")
    names = [tensor.name for tensor in opened.tensors]
    _refuse_base_layers(names, weights.files[0].path)
    naming = naming_of_keys(names, weights.evidence)
    own = naming == TORCHTUNE or any(name.endswith(".lora_a.weight") for name in names)
    model = find_model_files(listing, {"": False}, options)
    renamed = dict(zip(names, names if own else names_as_wrapped(names), strict=True))
    opened = replace(
        opened,
        tensors=tuple(replace(tensor, name=renamed[tensor.name]) for tensor in opened.tensors),
        naming=TORCHTUNE if own else "transformers",
        adapter=_adapter(settings, listing, options),
        config=model.config,
        config_path=model.config_path,
        side_files=model.side_files,
        strict_ties=False,
        notes=(*opened.notes, *_doubts(settings, own=own)),
    )
    if options.base is not None:
        if options.lora == "merge":
            check_base(settings)
        return _with_base(opened, options)
    if options.lora == "merge":
        raise _no_base(listing, settings)
    return opened


def _refuse_base_layers(names: list[str], file: str) -> None:
    """Refuse a base weight that peft saved beside its adapter: the file does not tell whether it was trained."""
    name = next((name for name in names if ".base_layer." in name), None)
    if name is not None:
        raise UnmappedTensor(
            f"{file} holds {name}, a base weight beside the adapter, and nothing tells whether it was trained",
            file=file,
            tensor=name,
            hint="Save the adapter with save_embedding_layers=False, or merge it with peft where it was trained.",
        )


def names_as_wrapped(names: list[str]) -> list[str]:
    """The names that peft's wrapped model has for those of its file, where modules were trained as a whole.

    peft takes the adapter's name away when it saves, and with it what tells a trained module from a base's.
    """
    if all(".lora_" in name for name in names):
        return names
    return [_wrapped(name) for name in names]


def _wrapped(name: str) -> str:
    module, _, leaf = name.rpartition(".")
    if ".lora_" not in name:
        return name if ".modules_to_save." in name else f"{module}.modules_to_save.{_ADAPTER_NAME}.{leaf}"
    if leaf in ("weight", "bias") and not name.endswith(_WITHOUT_LEAF):
        return f"{module}.{_ADAPTER_NAME}.{leaf}"
    return f"{name}.{_ADAPTER_NAME}"


def _check_method(settings: Mapping[str, Any]) -> None:
    method = settings.get("peft_type", "LORA")
    if not isinstance(method, str) or method not in _METHODS:
        raise UnmappedTensor(
            f"{ADAPTER_CONFIG} says peft_type {method}, which unshard does not convert",
            file=ADAPTER_CONFIG,
            expected="LORA",
            found=str(method),
            hint="Merge it with peft (merge_and_unload) in the training environment and save the result.",
        )


def _adapter(settings: dict[str, Any], listing: Listing, options: ConvertOptions) -> Adapter:
    told = settings.get("lora_alpha")
    alpha = told if isinstance(told, int | float) and not isinstance(told, bool) and told > 0 else None
    settings = dict(settings)
    if not settings.get("base_model_name_or_path"):
        repository = (read_json(listing, _REPOSITORY) or {}).get("repo_id")
        if isinstance(repository, str):
            settings["base_model_name_or_path"] = repository
    if alpha is not None and options.lora_alpha is not None and options.lora_alpha != alpha:
        raise InvalidOption(
            f"the option lora_alpha says {options.lora_alpha:g}, but {ADAPTER_CONFIG} says {alpha:g}",
            expected=f"{alpha:g}",
            found=f"{options.lora_alpha:g}",
            hint="Leave the option out, or correct the file.",
        )
    if alpha is not None:
        return Adapter(alpha, ADAPTER_CONFIG, settings)
    if options.lora_alpha is not None:
        return Adapter(options.lora_alpha, "the option lora_alpha", settings)
    where = f"{ADAPTER_CONFIG} does not have it" if listing.file(ADAPTER_CONFIG) else f"there is no {ADAPTER_CONFIG}"
    return Adapter(None, where, settings, needs_alpha=True)


def _doubts(settings: Mapping[str, Any], *, own: bool) -> tuple[str, ...]:
    """What peft's files of torchtune's runs may have wrong: the sum of keys in the config gives them away."""
    if own or not settings or not set(settings) <= _OWN_KEYS:
        return ()
    doubt = "the adapter seems to be torchtune's own export, which is wrong for Qwen (rows of q and k) and for DoRA"
    return (f"{doubt}: convert adapter_model.pt of the same run, if there is one",)


def _with_base(adapter: Checkpoint, options: ConvertOptions) -> Checkpoint:
    """Join the adapter with its base model: config, tokenizer and embeddings are the base's."""
    from workers.formats import open_checkpoint  # noqa: PLC0415 - the registry imports this module

    folder = open_folder(FolderAddress(str(options.base), options.source_profile))
    base = open_checkpoint(folder, replace(options, base=None, source_format=None, epoch=None, step=None))
    hub = base.naming in (HUB, "transformers")
    if not hub and base.naming != adapter.naming:
        raise InvalidOption(
            f"the base {options.base} has {base.naming} names and the adapter {adapter.naming} ones",
            expected="a base with Hugging Face names",
            found=base.naming,
            hint="Convert the base to a Hugging Face model first.",
        )
    joined = combine(adapter, base, PREFIX if hub else "")
    side = tuple(replace(file, folder=file.folder or base.address) for file in base.side_files)
    own_config = base.config if options.config_dir is None else adapter.config
    return replace(
        joined,
        config=own_config,
        config_path=None,
        side_files=side or adapter.side_files,
        evidence=(*adapter.evidence, f"base model from {options.base}"),
        notes=(*adapter.notes, *base.notes),
        left_out=(*adapter.left_out, *base.left_out),
    )


def _no_base(listing: Listing, settings: Mapping[str, Any]) -> IncompleteCheckpoint:
    named = settings.get("base_model_name_or_path")
    told = f"; {ADAPTER_CONFIG} names {named}" if named else f"; {ADAPTER_CONFIG} names none"
    return IncompleteCheckpoint(
        f"{listing.folder.address.url} holds only an adapter, and no base model to merge it into was given{told}",
        expected="the folder of the base model",
        found="an adapter alone",
        hint="Name the base model's folder with the option base, or keep the adapter: lora=separate.",
    )
