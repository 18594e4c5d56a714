"""The tensors of a checkpoint as expressions; those in NF4 as the values that they stand for."""

from __future__ import annotations

from workers.checkpoint import Checkpoint
from workers.expressions import Source
from workers.families.rules import Entry
from workers.nf4 import PARTS, part_name, unpacked


def source_entries(checkpoint: Checkpoint) -> list[Entry]:
    """Names and expressions in the order of the state dict."""
    plain = [
        (tensor.name, Source(number, tensor.dtype, tensor.shape)) for number, tensor in enumerate(checkpoint.tensors)
    ]
    if not checkpoint.packed:
        return list(plain)
    sources = dict(plain)
    packed = {part_name(tensor.name, PARTS[0]): tensor for tensor in checkpoint.packed}
    parts = {part_name(tensor.name, part) for tensor in checkpoint.packed for part in PARTS}
    entries: list[Entry] = []
    for name, source in sources.items():
        if name in packed:
            tensor = packed[name]
            own = {part: sources[part_name(tensor.name, part)] for part in PARTS}
            entries.append((tensor.name, unpacked(tensor, own)))
        elif name not in parts:
            entries.append((name, source))
    return entries
