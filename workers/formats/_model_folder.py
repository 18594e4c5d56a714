"""Config and side files of a Hugging Face model folder, wherever a training framework keeps them."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from workers.checkpoint import SideFile
from workers.errors import CorruptFile, IncompleteCheckpoint
from workers.formats._format import Listing, join
from workers.options import ConvertOptions
from workers.storage import FileEntry, FolderAddress, open_folder

CONFIG = "config.json"
LARGEST_JSON_BYTES = 256 << 20
"""No config, index or adapter config comes near; a larger one is not read into memory."""

_TEMPLATES = "additional_chat_templates"
"""Where transformers keeps further chat templates (``utils/hub.py``, ``CHAT_TEMPLATE_DIR``)."""

# What a tokenizer, a processor or custom code consists of, in a folder that holds other things, too.
_OWN = re.compile(
    r"""tokenizer.* | .*tokenizer.*\.json | special_tokens_map\.json | added_tokens\.json
    | vocab\..* | merges\.txt | .*\.model | .*\.tiktoken | .*\.spm | .*\.bpe
    | (.*_)?(pre)?processor(_config)?\.json | .*_processor\.json | generation_config\.json
    | chat_template.* | .*\.jinja | .*\.py | LICENSE.* | NOTICE.*""",
    re.VERBOSE,
)
# Further files of a folder that holds nothing but a model.
_MODEL_ONLY = re.compile(r".*\.(json|jsonl|txt|model|py|jinja|tiktoken|spm|bpe|vocab|md|yaml|yml)|LICENSE.*|NOTICE.*")
# Weights, their indexes, and what belongs to the training: none of it may end up beside the new weights.
_NEVER = re.compile(
    r"""config\.json | fsdp_config\.json | lora_train_meta\.json | adapter_config\.json | trainer_state\.json
    | .*\.index\.json | unshard\.json | latest.*\.txt | .*\.(pt|pth|bin|safetensors|gguf) | \..*""",
    re.VERBOSE,
)


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The config (None when there is none) and the side files of a model, and where they were found."""

    config: dict[str, Any] | None
    config_path: str | None
    side_files: tuple[SideFile, ...]
    looked_in: str
    """In plain words, for when there is no config."""

    @property
    def evidence(self) -> tuple[str, ...]:
        """Where the config comes from, in words, if there is one."""
        return (f"config from {self.config_path}",) if self.config_path is not None else ()

    @property
    def missing(self) -> tuple[str, ...]:
        """The config, if there is none."""
        return () if self.config is not None else (f"{CONFIG} (looked in {self.looked_in})",)


def find_model_files(listing: Listing, places: dict[str, bool], options: ConvertOptions) -> ModelFiles:
    """Find config.json and what goes with it.

    ``places`` are the subfolders to look in, in order, and whether each holds nothing but a model, so that all
    its small files belong to it. ``options.config_dir`` comes before all of them.
    """
    if options.config_dir is not None:
        return _in_config_dir(options)
    for place, only_model in places.items():
        if listing.file(join(place, CONFIG)) is not None:
            path = join(place, CONFIG)
            return ModelFiles(read_json(listing, path), path, side_files(listing, place, only_model=only_model), path)
    side = next(filter(None, (side_files(listing, p, only_model=only) for p, only in places.items())), ())
    where = " and ".join(f"{place}/" if place else "the folder itself" for place in places)
    return ModelFiles(None, None, side, where)


def _in_config_dir(options: ConvertOptions) -> ModelFiles:
    """Read config and side files from the folder the user named, with the source's storage profile."""
    listing = Listing(open_folder(FolderAddress(str(options.config_dir), options.source_profile)))
    config = read_json(listing, CONFIG)
    if config is None:
        raise IncompleteCheckpoint(
            f"there is no {CONFIG} in {options.config_dir}, which the option config_dir names",
            file=CONFIG,
            hint="Name a folder that holds the model's config.json and tokenizer.",
        )
    side = side_files(listing, "", only_model=False, elsewhere=True)
    return ModelFiles(config, f"{options.config_dir}/{CONFIG}", side, str(options.config_dir))


def side_files(listing: Listing, place: str, *, only_model: bool, elsewhere: bool = False) -> tuple[SideFile, ...]:
    """The small files of a model in a subfolder: tokenizer, processor, generation config, templates, code.

    Never weights, and never what belongs to the training. ``elsewhere`` notes the listing's folder in each.
    """
    wanted = _MODEL_ONLY if only_model else _OWN
    found = [
        (name, entry)
        for name, entry in listing.files(place).items()
        if wanted.fullmatch(name) and not _NEVER.fullmatch(name)
    ]
    if _TEMPLATES in listing.folders(place):
        below = listing.files(join(place, _TEMPLATES)).items()
        found += [(f"{_TEMPLATES}/{name}", entry) for name, entry in below if name.endswith(".jinja")]
    address = listing.folder.address if elsewhere else None
    return tuple(SideFile(entry.path, name, entry.size_bytes, address) for name, entry in sorted(found))


def read_json(listing: Listing, path: str) -> dict[str, Any] | None:
    """Read a JSON object; None when the file is not there, ``CorruptFile`` when it is anything else."""
    entry = listing.file(path)
    if entry is None:
        return None
    try:
        value = json.loads(_read_small(listing, entry))
    except (ValueError, RecursionError) as error:
        raise CorruptFile(
            f"{path} is not JSON: {error}",
            file=path,
            expected="a JSON object",
            hint="It may be a Git LFS pointer or half-written; fetch it again.",
        ) from None
    if not isinstance(value, dict):
        raise CorruptFile(
            f"{path} holds a JSON {type(value).__name__}, not an object", file=path, expected="a JSON object"
        )
    return value


def _read_small(listing: Listing, entry: FileEntry) -> bytes:
    if entry.size_bytes > LARGEST_JSON_BYTES:
        raise CorruptFile(
            f"{entry.path} has {entry.size_bytes} bytes, more than any JSON file of a model",
            file=entry.path,
            expected=f"at most {LARGEST_JSON_BYTES} bytes",
        )
    return listing.folder.read(entry.path)
