"""The little arithmetic that conversions need, defined so that every device gives the same bytes.

Casts are defined on the bits: round to nearest, ties to even; a NaN keeps its sign and becomes the quiet NaN of the
target type, since the libraries and devices differ only there. ``NumpyArithmetic`` is the reference and
runs anywhere; ``workers.engines.gpu`` does the same on a GPU.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from workers import quantization
from workers.quantization import Scheme

Elements = NDArray[Any]

BLOCK_ELEMENTS = 1 << 16
"""Elements cast at a time: input, output and temporaries of a block stay in a core's cache."""


class Arithmetic(Protocol):
    """Casts, sums and quantisation over opaque elements (see ``ElementType.numpy_type``)."""

    def cast(self, values: Elements, source: str, out: Elements, target: str) -> None:
        """Write ``values`` (safetensors dtype ``source``) into ``out`` as dtype ``target``; shapes are equal."""

    def add_lora(
        self,
        operands: tuple[tuple[Elements, str], tuple[Elements, str], tuple[Elements, str]],
        scale: float,
        out: Elements,
        target: str,
    ) -> None:
        """Write base + scale * (b @ a) into ``out``; operands are (base, a, b), each with its dtype."""

    def multiply(
        self, values: tuple[Elements, str], factors: tuple[Elements, str], out: Elements, target: str
    ) -> None:
        """Write the product, made in float32, into ``out``; each operand comes with its dtype."""

    def quantize(self, values: Elements, dtype: str, scheme: Scheme) -> Elements:
        """Weights of a scheme, as ``workers.quantization.quantize`` makes them."""

    def scales(self, values: Elements, dtype: str, scheme: Scheme) -> Elements:
        """Scales of a scheme, as ``workers.quantization.scales`` makes them."""


class NumpyArithmetic:
    """Arithmetic on the CPU."""

    def cast(self, values: Elements, source: str, out: Elements, target: str) -> None:
        if source == target:
            out[...] = values
            return
        if not out.flags.c_contiguous:
            dense = np.empty(out.shape, dtype=out.dtype)
            self.cast(values, source, dense, target)
            out[...] = dense
            return
        flat, result = np.ascontiguousarray(values).reshape(-1), out.reshape(-1)
        for start in range(0, len(flat), BLOCK_ELEMENTS):
            block = slice(start, start + BLOCK_ELEMENTS)
            _cast_block(flat[block], source, result[block], target)

    def add_lora(
        self,
        operands: tuple[tuple[Elements, str], tuple[Elements, str], tuple[Elements, str]],
        scale: float,
        out: Elements,
        target: str,
    ) -> None:
        base, a, b = (self.as_float32(values, dtype) for values, dtype in operands)
        merged = b @ a  # in place from here on: blocks are as large as the budget lets them be
        merged *= np.float32(scale)
        np.add(base, merged, out=merged)
        self.cast(merged.view(np.uint32), "F32", out, target)

    def multiply(
        self, values: tuple[Elements, str], factors: tuple[Elements, str], out: Elements, target: str
    ) -> None:
        """See ``Arithmetic.multiply``."""
        numbers = self.as_float32(*values)
        # In place where the numbers are a copy already, as in ``add_lora``.
        product = np.multiply(numbers, self.as_float32(*factors), out=numbers if values[1] != "F32" else None)
        self.cast(product.view(np.uint32), "F32", out, target)

    def quantize(self, values: Elements, dtype: str, scheme: Scheme) -> Elements:
        """See ``Arithmetic.quantize``."""
        return quantization.quantize(values, dtype, scheme)

    def scales(self, values: Elements, dtype: str, scheme: Scheme) -> Elements:
        """See ``Arithmetic.scales``."""
        return quantization.scales(values, dtype, scheme)

    def as_float32(self, values: Elements, dtype: str) -> NDArray[np.float32]:
        """The values as float32 numbers."""
        if dtype == "F32":
            return np.ascontiguousarray(values).view(np.float32)
        if dtype in _FLOAT8_VALUES:
            return _FLOAT8_VALUES[dtype][values]
        wide = np.empty(values.shape, dtype=np.uint32)
        self.cast(values, dtype, wide, "F32")
        return wide.view(np.float32)


def _cast_block(values: Elements, source: str, out: Elements, target: str) -> None:
    if source in ("F64", "F16"):
        with np.errstate(over="ignore", invalid="ignore"):  # beyond float32's range is infinity, as in torch
            single = values.view(_NUMPY_FLOATS[source]).astype(np.float32).view(np.uint32)
        quieten(single)
    elif source == "BF16":
        single = values.astype(np.uint32) << np.uint32(16)
    elif source in _FLOAT8_VALUES:
        single = _FLOAT8_VALUES[source][values].view(np.uint32)
    else:
        single = values.view(np.uint32)
    if target == "BF16":
        round_to_bfloat16(single, out)
    elif target == "F32":
        out[...] = single
    else:
        single = single.copy()
        quieten(single)
        with np.errstate(over="ignore"):  # beyond float16's range is infinity, as in torch
            out[...] = single.view(np.float32).astype(_NUMPY_FLOATS[target]).view(out.dtype)


def _float8_values(exponent_bits: int, *, has_infinity: bool) -> NDArray[np.float32]:
    """The float32 value of each of the 256 bit patterns of an 8-bit float.

    E4M3 has no infinity and one NaN pattern per sign; E5M2 is as IEEE 754 has it. Source: arXiv 2209.05433.
    """
    mantissa_bits = 7 - exponent_bits
    bias = 2 ** (exponent_bits - 1) - 1
    values = np.empty(256, dtype=np.float32)
    for pattern in range(128):
        exponent, mantissa = pattern >> mantissa_bits, pattern & (2**mantissa_bits - 1)
        fraction = mantissa / 2**mantissa_bits
        value = (1 + fraction) * 2.0 ** (exponent - bias) if exponent else fraction * 2.0 ** (1 - bias)
        if has_infinity and exponent == 2**exponent_bits - 1:
            value = np.nan if mantissa else np.inf
        values[pattern], values[pattern + 128] = value, -value
    if not has_infinity:
        values[127] = values[255] = np.nan
    return values


_FLOAT8_VALUES = {
    "F8_E4M3": _float8_values(4, has_infinity=False),
    "F8_E5M2": _float8_values(5, has_infinity=True),
    # Powers of two, as scales of blocks are. Source: OCP Microscaling Formats 1.0, 5.4.1.
    "F8_E8M0": np.array([2.0 ** (pattern - 127) for pattern in range(255)] + [np.nan], dtype=np.float32),
}
_NUMPY_FLOATS: dict[str, Any] = {"F64": np.float64, "F16": np.float16}


def quieten(single: NDArray[np.uint32]) -> None:
    """Give every NaN of float32 bits the one quiet pattern of its sign, in place."""
    nan = (single & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    if nan.any():
        single[nan] = (single[nan] & np.uint32(0x80000000)) | np.uint32(0x7FC00000)


def round_to_bfloat16(single: NDArray[np.uint32], out: NDArray[np.uint16]) -> None:
    """Round float32 bits to bfloat16 bits: add half of the last kept place, plus its own bit for ties, and cut."""
    rounded = single >> np.uint32(16)
    rounded &= np.uint32(1)
    rounded += np.uint32(0x7FFF)
    rounded += single
    rounded >>= np.uint32(16)
    out[...] = rounded
    magnitude = np.bitwise_and(single, np.uint32(0x7FFFFFFF), out=rounded)
    if magnitude.max(initial=0) > np.uint32(0x7F800000):
        nan = magnitude > np.uint32(0x7F800000)
        out[nan] = ((single[nan] >> np.uint32(16)) & np.uint32(0x8000)) | np.uint32(0x7FC0)
