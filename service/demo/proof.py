"""Compare a model with known digests, tensor by tensor."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from workers.errors import VerificationFailed
from workers.safetensors_file import open_safetensors
from workers.storage import Folder, FolderAddress, open_folder


def compare(model: FolderAddress, expected: Path) -> tuple[int, int]:
    """Read every tensor again; how many there are, and their bytes.

    Raises ``VerificationFailed`` with the first difference: a tensor that is missing, unknown or has other bytes.
    """
    wanted = json.loads(expected.read_text(encoding="utf-8"))["tensors"]
    folder = open_folder(model)
    try:
        found, size_bytes = _digests(folder)
    finally:
        folder.close()
    for name in sorted(wanted.keys() | found.keys()):
        if wanted.get(name) != found.get(name):
            raise VerificationFailed(
                f"tensor {name} of {model.url} is not what it should be",
                tensor=name,
                expected=json.dumps(wanted.get(name)),
                found=json.dumps(found.get(name)),
            )
    return len(found), size_bytes


def _digests(folder: Folder) -> tuple[dict[str, dict[str, object]], int]:
    found: dict[str, dict[str, object]] = {}
    size_bytes = 0
    for entry in folder.list():
        if not entry.path.endswith(".safetensors"):
            continue
        for name, tensor in open_safetensors(folder, entry.path, entry.size_bytes).tensors.items():
            data = folder.read(entry.path, tensor.offset, tensor.length_bytes)
            size_bytes += len(data)
            found[name] = {
                "dtype": tensor.dtype,
                "shape": list(tensor.shape),
                "sha256": hashlib.sha256(data).hexdigest(),
            }
    return found, size_bytes
