"""Telling what a file is from its first bytes, for messages about files that are not what their names say.

Nothing here reads a file or decides which reader to use.
"""

from __future__ import annotations

from workers.errors import CorruptFile

HEAD_BYTES = 512

LEGACY_TORCH_MAGIC = bytes.fromhex("80028a0a6cfc9c46f9206aa850192e")

_BEGINNINGS = (
    (b"version https://git-lfs", "a Git LFS pointer"),
    (LEGACY_TORCH_MAGIC, "a torch file of the time before torch 1.6"),
    (b"PK\x03\x04", "a zip archive"),
    (b"GGUF", "a GGUF file"),
    (b"\x1f\x8b", "gzip-compressed data"),
    (b"\x28\xb5\x2f\xfd", "zstd-compressed data"),
    (b"\x89HDF", "an HDF5 file"),
    (b"\x93NUMPY", "a NumPy file"),
    (b"<", "a web page or XML"),
    (b"{", "JSON text"),
    (b"\x80", "a bare pickle"),
)

_REFETCH = "Fetch it again from where it was saved."


def kind_of(head: bytes) -> str:
    """Say in words what a file that begins with ``head`` (up to 512 bytes) seems to be."""
    if not head:
        return "empty"
    if not head.strip(b"\0"):
        return "zeros"
    if head[257:262] == b"ustar":
        return "a tar archive"
    if len(head) > 8 and head[8:9] == b"{" and int.from_bytes(head[:8], "little") <= 100_000_000:
        return "a safetensors file"
    for beginning, kind in _BEGINNINGS:
        if head.startswith(beginning):
            return kind
    return f"data that begin with {head[:8].hex(' ')}"


def not_expected(path: str, head: bytes, size_bytes: int, expected: str) -> CorruptFile:
    """Build the error for a file that is something else than ``expected``."""
    kind = kind_of(head)
    hint = _REFETCH
    if kind == "a Git LFS pointer":
        hint = "The file itself was never downloaded: run `git lfs pull` in the repository, or download it again."
    elif kind == "a safetensors file":
        hint = "Rename it so that it ends in .safetensors."
    elif kind == "a tar archive":
        hint = "Unpack it; if it is a torch file of the time before torch 0.2, save it again with a newer torch."
    return CorruptFile(
        f"{path}: expected {expected}, found {kind} ({size_bytes} bytes)",
        file=path,
        expected=expected,
        found=kind,
        hint=hint,
    )
