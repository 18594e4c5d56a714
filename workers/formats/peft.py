"""PEFT adapter folders: adapter_config.json beside adapter_model.safetensors or adapter_model.bin.

Source: peft ``utils/save_and_load.py``, ``utils/constants.py``.
"""

from __future__ import annotations

from dataclasses import replace

from workers.checkpoint import Checkpoint
from workers.errors import UnknownFormat
from workers.formats._adapter import ADAPTER_CONFIG, open_adapter
from workers.formats._format import Detection, Format, Listing
from workers.formats._weight_files import Weights
from workers.options import ConvertOptions

SIGNS = "adapter_model.safetensors or adapter_model.bin, and no model beside it"

_FILES = ("adapter_model.safetensors", "adapter_model.bin")
_OTHER_WEIGHTS = (".safetensors", ".bin", ".index.json", ".pt", ".pth")


def detect(listing: Listing) -> Detection | None:
    """Recognise an adapter that lies alone."""
    files = listing.files()
    name = next((name for name in _FILES if name in files), None)
    if name is None or any(other.endswith(_OTHER_WEIGHTS) and other not in _FILES for other in files):
        return None
    return Detection((name, *((ADAPTER_CONFIG,) if ADAPTER_CONFIG in files else ())))


def open_peft(listing: Listing, options: ConvertOptions) -> Checkpoint:
    """Open an adapter by its metadata."""
    files = listing.files()
    name = next((name for name in _FILES if name in files), None)
    if name is None:
        raise UnknownFormat(
            f"{listing.folder.address.url} has no adapter",
            expected=SIGNS,
            found=", ".join(list(files)[:8]) or "nothing",
            hint="Give the folder that holds adapter_model.safetensors.",
        )
    opened = open_adapter(listing, options, Weights((files[name],), name))
    return replace(opened, format="peft")


FORMAT = Format("peft", "PEFT adapters (LoRA)", SIGNS, detect, open_peft, frozenset({"base"}))
