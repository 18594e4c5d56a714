"""Say what a source is, without converting it: what was recognised and why, its layout, where each slice lies."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from itertools import combinations, islice
from math import prod
from typing import Any

from workers.checkpoint import Checkpoint, Piece, padded_shapes
from workers.errors import InputError, InvalidOption
from workers.formats import open_checkpoint
from workers.geometry import cover_faults, intersect, uncovered_boxes
from workers.options import ConvertOptions
from workers.plan import source_summary
from workers.storage import FolderAddress, bounded, open_folder
from workers.tolerance import tolerated

MOST_PROBLEMS = 8
MOST_BOXES = 1000
"""Of the boxes that are uncovered or overlap in one tensor."""


@dataclass(frozen=True, slots=True)
class Inspection:
    """An opened source, and what is wrong with it where that was tolerated."""

    checkpoint: Checkpoint
    problems: tuple[InputError, ...] = ()

    def to_dict(self, tensor: str | None = None, *, table: bool = False) -> dict[str, Any]:
        """Everything as JSON values: with one ``tensor``'s pieces, with the ``table`` of all tensors.

        Raises ``InvalidOption`` for a tensor that is not in the source.
        """
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
            "problems": [_problem(error) for error in self.problems[:MOST_PROBLEMS]],
            "tensor": None if tensor is None else self._tensor(self._number(tensor)),
            "table": self._table() if table else None,
        }

    def _number(self, tensor: str) -> int:
        index = self.checkpoint.index
        number = index.get(tensor)
        if number is not None:
            return number
        near = difflib.get_close_matches(tensor, index, n=3, cutoff=0.5)
        raise InvalidOption(
            f"the checkpoint has no tensor named {tensor}",
            tensor=tensor,
            hint=f"The nearest names are: {', '.join(near)}." if near else "plan --tensors lists all names.",
        )

    def _tensor(self, number: int) -> dict[str, Any]:
        info = self.checkpoint.tensors[number]
        own = list(self.checkpoint.pieces_of(number))
        pieces = [(piece, False) for piece in own]
        pieces += [(piece, True) for piece in self.checkpoint.pieces_of(number, replicas=True)]
        uncovered = uncovered_boxes(info.shape, ((piece.offsets, piece.sizes) for piece in own), most=MOST_BOXES)
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
            "uncovered": [{"offsets": list(offsets), "sizes": list(sizes)} for offsets, sizes in uncovered],
            "overlaps": self._overlaps(own),
        }

    def _overlaps(self, pieces: list[Piece]) -> list[dict[str, Any]]:
        """The boxes that two pieces share; only what was tolerated can have any, so others are not searched."""
        if not self.problems:
            return []
        shared = (intersect(a.offsets, a.sizes, b.offsets, b.sizes) for a, b in combinations(pieces, 2))
        found = islice((box for box in shared if box is not None), MOST_BOXES)
        return [{"offsets": list(offsets), "sizes": list(sizes)} for offsets, sizes in found]

    def _table(self) -> dict[str, Any]:
        """All tensors in columns: tens of thousands of them are of a few dozen kinds."""
        checkpoint = self.checkpoint
        kinds: dict[tuple[str, tuple[int, ...], int], int] = {}
        kind = [kinds.setdefault((t.dtype, t.shape, t.size_bytes), len(kinds)) for t in checkpoint.tensors]
        first, copies = checkpoint.pieces.first, checkpoint.replicas.first
        return {
            "names": [tensor.name for tensor in checkpoint.tensors],
            "kind": kind,
            "pieces": (first[1:] - first[:-1] + copies[1:] - copies[:-1]).tolist(),
            "kinds": [
                {"dtype": dtype, "shape": list(shape), "size_bytes": size_bytes} for dtype, shape, size_bytes in kinds
            ],
            "faults": self._faults(),
        }

    def _faults(self) -> list[dict[str, Any]]:
        """Tensors that are not tiled exactly, by their numbers."""
        if not self.problems:
            return []
        checkpoint, pieces = self.checkpoint, self.checkpoint.pieces
        shapes = padded_shapes(checkpoint.tensors, pieces.offsets.shape[1])
        return [
            {
                "tensor": fault.owner,
                "elements": prod(checkpoint.tensors[fault.owner].shape),
                "missing_elements": max(0, fault.missing_elements),
                "overlaps": fault.overlapping_rows is not None,
            }
            for fault in cover_faults(pieces.tensor, pieces.offsets, pieces.sizes, shapes)
        ]


def inspect(
    source: str,
    options: ConvertOptions | None = None,
    *,
    partial: bool = False,
    within: tuple[str, ...] = (),
) -> Inspection:
    """Open a source by its metadata; ``within`` as in ``convert.plan_source``.

    With ``partial`` a source of which something is missing is opened, too, as far as its format can: see
    ``Inspection.problems``.
    """
    options = options or ConvertOptions()
    with bounded(within):
        folder = open_folder(FolderAddress(source, options.source_profile))
        try:
            if not partial:
                return Inspection(open_checkpoint(folder, options))
            with tolerated() as problems:
                return Inspection(open_checkpoint(folder, options), tuple(problems))
        finally:
            folder.close()


def _problem(error: InputError) -> dict[str, Any]:
    return {"type": error.code, "message": error.message, "hint": error.hint, **error.details()}
