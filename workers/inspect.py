"""Say what a source is, without converting it: what was recognised and why, its layout, where each slice lies."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Any

from workers.checkpoint import Checkpoint
from workers.errors import InvalidOption
from workers.formats import open_checkpoint
from workers.options import ConvertOptions
from workers.plan import source_summary
from workers.storage import FolderAddress, bounded, open_folder


@dataclass(frozen=True, slots=True)
class Inspection:
    """An opened source, and the tensor that was asked for."""

    checkpoint: Checkpoint
    tensor: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON values."""
        checkpoint = self.checkpoint
        summary = source_summary(checkpoint)
        config = checkpoint.config or {}
        return summary | {
            "files": [{"path": f.path, "size_bytes": f.size_bytes, "rank": f.rank} for f in checkpoint.files],
            "model_type": config.get("model_type"),
            "architectures": config.get("architectures"),
            "config": checkpoint.config_path,
            "replicas": len(checkpoint.replicas),
            "side_files": [file.target_path for file in checkpoint.side_files],
            "notes": list(checkpoint.notes),
            "missing": list(checkpoint.missing),
            "tensor": self._tensor(),
        }

    def _tensor(self) -> dict[str, Any] | None:
        if self.tensor is None:
            return None
        info = self.checkpoint.tensors[self.tensor]
        pieces = [(piece, False) for piece in self.checkpoint.pieces_of(self.tensor)]
        pieces += [(piece, True) for piece in self.checkpoint.pieces_of(self.tensor, replicas=True)]
        return {
            "name": info.name,
            "dtype": info.dtype,
            "shape": list(info.shape),
            "pieces": [
                {
                    "rank": piece.rank,
                    "file": piece.file,
                    "offset": piece.offset,
                    "length": piece.length,
                    "offsets": list(piece.offsets),
                    "sizes": list(piece.sizes),
                    "replica": is_replica,
                }
                for piece, is_replica in sorted(pieces, key=lambda row: (row[0].rank or 0, row[0].offsets))
            ],
        }


def inspect(
    source: str,
    options: ConvertOptions | None = None,
    *,
    tensor: str | None = None,
    within: tuple[str, ...] = (),
) -> Inspection:
    """Open a source by its metadata; ``tensor`` is a name in the source, ``within`` as in ``convert.plan_source``."""
    options = options or ConvertOptions()
    with bounded(within):
        folder = open_folder(FolderAddress(source, options.source_profile))
        try:
            checkpoint = open_checkpoint(folder, options)
        finally:
            folder.close()
    if tensor is None:
        return Inspection(checkpoint)
    number = checkpoint.index.get(tensor)
    if number is None:
        near = difflib.get_close_matches(tensor, checkpoint.index, n=3, cutoff=0.5)
        raise InvalidOption(
            f"the checkpoint has no tensor named {tensor}",
            tensor=tensor,
            hint=f"The nearest names are: {', '.join(near)}." if near else "plan --tensors lists all names.",
        )
    return Inspection(checkpoint, number)
