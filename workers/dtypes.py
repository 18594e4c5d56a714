"""Element types by their safetensors names, and how torch spells them.

Nothing here needs torch: weights are moved as raw elements (``numpy_type``), since numpy has neither
bfloat16 nor float8.
Source of the names: https://github.com/huggingface/safetensors (``safetensors/src/tensor.rs``, ``Dtype``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
class ElementType:
    """One element type: its safetensors name, torch's name, its width and whether a cast may touch it."""

    name: str
    torch_name: str
    size_bytes: int
    floating: bool

    @property
    def numpy_type(self) -> np.dtype[Any]:
        """An opaque numpy type of the same width, for moving elements without interpreting them."""
        return _RAW[self.size_bytes]


_RAW: dict[int, np.dtype[Any]] = {
    1: np.dtype(np.uint8),
    2: np.dtype(np.uint16),
    4: np.dtype(np.uint32),
    8: np.dtype(np.uint64),
    16: np.dtype(np.complex128),
}

ELEMENT_TYPES: dict[str, ElementType] = {
    kind.name: kind
    for kind in (
        ElementType("BOOL", "bool", 1, floating=False),
        ElementType("U8", "uint8", 1, floating=False),
        ElementType("I8", "int8", 1, floating=False),
        ElementType("U16", "uint16", 2, floating=False),
        ElementType("I16", "int16", 2, floating=False),
        ElementType("U32", "uint32", 4, floating=False),
        ElementType("I32", "int32", 4, floating=False),
        ElementType("U64", "uint64", 8, floating=False),
        ElementType("I64", "int64", 8, floating=False),
        ElementType("F8_E4M3", "float8_e4m3fn", 1, floating=True),
        ElementType("F8_E5M2", "float8_e5m2", 1, floating=True),
        ElementType("F8_E8M0", "float8_e8m0fnu", 1, floating=True),
        ElementType("F16", "float16", 2, floating=True),
        ElementType("BF16", "bfloat16", 2, floating=True),
        ElementType("F32", "float32", 4, floating=True),
        ElementType("F64", "float64", 8, floating=True),
        ElementType("C64", "complex64", 8, floating=False),
    )
}

BY_TORCH_NAME: dict[str, ElementType] = {kind.torch_name: kind for kind in ELEMENT_TYPES.values()}


def size_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor of this safetensors dtype and shape."""
    total = ELEMENT_TYPES[dtype].size_bytes
    for length in shape:
        total *= length
    return total
