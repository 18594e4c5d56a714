"""A slow and simple way from a checkpoint to the values of its target tensors, for comparison with what is expected.

It shares no code with the pipeline: it reads each piece by itself and lets each expression fill itself whole.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np

from workers.arithmetic import NumpyArithmetic
from workers.checkpoint import Checkpoint
from workers.dtypes import ELEMENT_TYPES
from workers.expressions import Expression
from workers.geometry import intersect

CASES = Path(__file__).parent.parent / "cases" / "verl-fsdp"


class Evaluator:
    """Reads source tensors from local files: a context for ``Expression.fill``, and a probe for ties."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.arithmetic = NumpyArithmetic()
        self._checkpoint = checkpoint
        self._roots = {file.path: Path((file.folder or checkpoint.address).url) for file in checkpoint.files}

    def equal(self, tensor_a: int, tensor_b: int) -> bool:
        return bool((self.whole(tensor_a) == self.whole(tensor_b)).all())

    def whole(self, tensor: int, *, replicas: bool = False) -> np.ndarray:
        info = self._checkpoint.tensors[tensor]
        values = np.empty(info.shape, dtype=ELEMENT_TYPES[info.dtype].numpy_type)
        for piece in self._checkpoint.pieces_of(tensor, replicas=replicas):
            window = tuple(slice(o, o + s) for o, s in zip(piece.offsets, piece.sizes, strict=True))
            values[window] = self._piece(piece, values.dtype)
        return values

    def read(self, tensor: int, offsets, out) -> None:
        """Read a box piece by piece; every element must come from exactly one piece."""
        seen = np.zeros(out.shape, dtype=int)
        for piece in self._checkpoint.pieces_of(tensor):
            shared = intersect(offsets, out.shape, piece.offsets, piece.sizes)
            if shared is None:
                continue
            starts, sizes = shared
            target = tuple(slice(s - o, s - o + n) for s, o, n in zip(starts, offsets, sizes, strict=True))
            source = tuple(slice(s - o, s - o + n) for s, o, n in zip(starts, piece.offsets, sizes, strict=True))
            out[target] = self._piece(piece, out.dtype)[source]
            seen[target] += 1
        assert (seen == 1).all()

    def _piece(self, piece, dtype):
        data = (self._roots[piece.file] / piece.file).read_bytes()
        strides = tuple(stride * dtype.itemsize for stride in piece.strides)
        return np.ndarray(piece.sizes, dtype, data, piece.offset, strides)

    def evaluate(self, expression: Expression) -> np.ndarray:
        values = np.empty(expression.shape, dtype=ELEMENT_TYPES[expression.dtype].numpy_type)
        expression.fill(values, (0,) * values.ndim, self)
        return values


def sha256(values: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(values).tobytes()).hexdigest()
