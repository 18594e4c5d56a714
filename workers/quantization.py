"""Quantisation of weights: the schemes, and their arithmetic on the CPU.

A scheme cuts a matrix into groups, scales each so that its largest weight comes to the end of a small type's range,
and rounds to nearest, ties to even. Every step is one correctly rounded operation of IEEE 754, or one on integers, so
that a GPU gives the same bytes (``workers.engines.gpu``).

Sources: transformers 5.10 ``integrations/finegrained_fp8.py`` (``Fp8Quantize``) for FP8 in blocks, whose arithmetic is
in float32; compressed-tensors 0.20 ``quantization/utils/helpers.py`` (``calculate_qparams``),
``quantization/lifecycle/forward_helpers.py`` (``_quantize``) and ``compressors/pack_quantized/helpers.py`` for the
others, which round each step to the weight's dtype.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Elements = NDArray[Any]
Floats = NDArray[np.float32]

TILE_ELEMENTS = 1 << 16
"""Weights worked on at a time: they, their scaled values and the result stay in a core's cache."""

SOURCES = ("F32", "BF16", "F16")
"""Dtypes that can be quantised."""

NAN_FLOOR = {"F32": 0x7F800000, "BF16": 0x7F80, "F16": 0x7C00}
"""Bits of infinity: magnitudes from there on are infinite or no numbers."""

LARGEST_FLOAT32 = np.float32(np.finfo(np.float32).max)

EPSILON = {"F32": 2.0**-23, "BF16": 2.0**-7, "F16": 2.0**-10}
"""Scale of a group of nothing but zeros: the distance from 1 to the next number of the dtype."""


@dataclass(frozen=True, slots=True)
class Scheme:
    """How weights [out, in] become small numbers and scales."""

    name: str
    dtype: str
    """Safetensors dtype of the result."""
    group: tuple[int, int]
    """Rows and columns that share a scale; the last of a row or column may be cut short. 0 columns: the whole row."""
    limit: float
    """What the largest magnitude of a group is scaled to."""
    lowest: float
    highest: float
    weight_suffix: str
    """Ends of the names of weight and scale, after the module's."""
    scale_suffix: str
    per_word: int = 1
    """Results in one element of ``dtype``: eight four-bit numbers in an int32, the first in the lowest bits."""
    in_float32: bool = False
    """Whether weights are multiplied with ``limit / largest`` in float32, and its inverse is the scale; otherwise
    they are divided by the scale ``largest / limit``, and everything is rounded to the weight's dtype."""

    def columns(self, width: int) -> int:
        """Columns of a group in a matrix of ``width`` columns."""
        return self.group[1] or max(1, width)

    def scale_dtype(self, dtype: str) -> str:
        """Dtype of the scales of weights of a dtype."""
        return "F32" if self.in_float32 else dtype

    def grid(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Shape of the scales of a matrix."""
        return -(-shape[0] // self.group[0]), -(-shape[1] // self.columns(shape[1]))


FP8_BLOCK = Scheme(
    "fp8-block-128", "F8_E4M3", (128, 128), 448.0, -448.0, 448.0, "weight", "weight_scale_inv", in_float32=True
)
FP8_DYNAMIC = Scheme("fp8-dynamic", "F8_E4M3", (1, 0), 448.0, -448.0, 448.0, "weight", "weight_scale")
INT8 = Scheme("int8-w8a8", "I8", (1, 0), 127.5, -128.0, 127.0, "weight", "weight_scale")
INT4 = Scheme("int4-w4a16-g128", "I32", (1, 128), 7.5, -8.0, 7.0, "weight_packed", "weight_scale", per_word=8)

SCHEMES = {scheme.name: scheme for scheme in (FP8_BLOCK, FP8_DYNAMIC, INT8, INT4)}


def first_not_finite(values: Elements, dtype: str) -> tuple[int, ...] | None:
    """Index of the first element that is infinite or not a number."""
    kind = values.dtype.type
    magnitude = values & kind(2 ** (8 * values.itemsize - 1) - 1)
    if magnitude.max(initial=0) < kind(NAN_FLOOR[dtype]):
        return None
    return tuple(int(index) for index in np.argwhere(magnitude >= kind(NAN_FLOOR[dtype]))[0])


def scales(values: Elements, dtype: str, scheme: Scheme) -> Elements:
    """The scales of a matrix's groups, as raw elements [grid]; it begins at a border of groups and is finite."""
    largest = np.empty(scheme.grid(values.shape), dtype=values.dtype)
    for rows, columns in _tiles(values.shape, scheme):
        found = _largest(values[rows, columns], scheme)
        row, column = rows.start // scheme.group[0], columns.start // scheme.columns(values.shape[1])
        largest[row : row + found.shape[0], column : column + found.shape[1]] = found
    if scheme.in_float32:
        return (np.float32(1) / _factors(_widened(largest, dtype), scheme)).view(np.uint32)
    return _narrowed(_steps(_widened(largest, dtype), dtype, scheme), dtype)


def quantize(values: Elements, dtype: str, scheme: Scheme) -> Elements:
    """A matrix's weights as raw elements of ``scheme.dtype``; it begins at a border of groups and is finite."""
    packs = scheme.per_word > 1
    out = np.empty((values.shape[0], values.shape[1] // scheme.per_word), dtype=np.uint32 if packs else np.uint8)
    for rows, columns in _tiles(values.shape, scheme):
        numbers = _quantized(values[rows, columns], dtype, scheme)
        out[rows, columns.start // scheme.per_word : columns.stop // scheme.per_word] = (
            _packed(numbers) if packs else numbers
        )
    return out


def _tiles(shape: tuple[int, ...], scheme: Scheme) -> Iterator[tuple[slice, slice]]:
    """Rows and columns of whole groups to be worked on at a time."""
    rows, columns = shape
    high, wide = scheme.group[0], max(1, columns)
    if high > 1:
        wide = max(1, TILE_ELEMENTS // (high * scheme.group[1])) * scheme.group[1]
    else:
        high = max(1, TILE_ELEMENTS // wide)
    for row in range(0, rows, high):
        for column in range(0, columns, wide):
            yield slice(row, min(row + high, rows)), slice(column, min(column + wide, columns))


def _largest(values: Elements, scheme: Scheme) -> Elements:
    """The largest magnitude of each group, as bits: those of finite floats are ordered as the numbers are."""
    kind = values.dtype.type
    columns = scheme.columns(values.shape[1])
    magnitude = values & kind(2 ** (8 * values.itemsize - 1) - 1)
    if scheme.group[0] > 1:
        starts = range(0, len(magnitude), scheme.group[0])
        magnitude = np.stack([magnitude[row : row + scheme.group[0]].max(axis=0) for row in starts])
    if values.shape[1] % columns:
        found: Elements = np.maximum.reduceat(magnitude, np.arange(0, values.shape[1], columns), axis=1)
        return found
    return np.asarray(magnitude.reshape(len(magnitude), -1, columns).max(axis=2))


def _factors(largest: Floats, scheme: Scheme) -> Floats:
    """What groups are multiplied with; 1 for zeros, and never infinite, so that no scale is zero.

    The quotient is made as torch divides a number by a tensor: times the reciprocal, which is rounded for itself.
    """
    with np.errstate(divide="ignore", over="ignore"):
        factors = np.minimum(np.float32(1) / largest * np.float32(scheme.limit), LARGEST_FLOAT32)
    return np.where(largest > 0, factors, np.float32(1))


def _steps(largest: Floats, dtype: str, scheme: Scheme) -> Floats:
    """What groups are divided by, rounded to the weight's dtype; the dtype's epsilon where that is zero."""
    steps = _widened(_narrowed(largest / np.float32(scheme.limit), dtype), dtype)
    return np.where(steps > 0, steps, np.float32(EPSILON[dtype]))


def _quantized(values: Elements, dtype: str, scheme: Scheme) -> Elements:
    """One tile, unpacked: E4M3 bits, or the bits of int8."""
    largest = _widened(_largest(values, scheme), dtype)
    scaled = _widened(values, dtype)
    columns = scheme.columns(values.shape[1])
    if scheme.in_float32:
        scaled *= np.repeat(_factors(largest, scheme), columns, axis=1)[:, : values.shape[1]]
    else:
        groups = scaled.reshape(len(scaled), -1, columns)
        with np.errstate(over="ignore"):  # a float16 quotient may be infinite, which is the range's end
            groups /= _steps(largest, dtype, scheme)[:, :, None]
        scaled = _rounded(scaled, dtype)
    if scheme.dtype == "F8_E4M3":
        return to_e4m3(scaled)
    np.clip(scaled, np.float32(scheme.lowest), np.float32(scheme.highest), out=scaled)
    return np.rint(scaled, out=scaled).astype(np.int8).view(np.uint8)


def to_e4m3(values: Floats) -> NDArray[np.uint8]:
    """E4M3 bits of float32 numbers: to nearest, ties to even, saturating at 448. Source: arXiv 2209.05433."""
    bits = values.view(np.uint32)
    magnitude = bits & np.uint32(0x7FFFFFFF)
    np.minimum(magnitude, np.uint32(0x43E00000), out=magnitude)  # 448
    # Normal numbers: keep three bits of the mantissa, and change the exponent's bias from 127 to 7.
    rounded = magnitude >> np.uint32(20)
    rounded &= np.uint32(1)
    rounded += magnitude
    rounded += np.uint32(0x7FFFF)
    rounded >>= np.uint32(20)
    rounded -= np.uint32((127 - 7) << 3)
    # Below 2^-6: multiples of 2^-9, which is the distance of float32 numbers at 2^14.
    shifted = (magnitude.view(np.float32) + np.float32(2**14)).view(np.uint32)
    shifted -= np.uint32(0x46800000)  # 2^14
    np.copyto(rounded, shifted, where=magnitude < np.uint32(0x3C800000))  # 2^-6
    result = rounded.astype(np.uint8)
    result |= (bits >> np.uint32(24)).astype(np.uint8) & np.uint8(0x80)
    return result


def _packed(numbers: NDArray[np.uint8]) -> NDArray[np.uint32]:
    """Four-bit numbers, eight in a word: each plus 8, element j of a row in bits 4 (j mod 8) of word j / 8."""
    halves = (numbers + np.uint8(8)).reshape(len(numbers), -1, 2)
    pairs = halves[:, :, 0] | (halves[:, :, 1] << np.uint8(4))
    return np.ascontiguousarray(pairs).view("<u4")


def _widened(values: Elements, dtype: str) -> Floats:
    """Finite elements as a new array of float32 numbers."""
    if dtype == "F32":
        return values.view(np.float32).copy() if values.flags.c_contiguous else np.array(values).view(np.float32)
    if dtype == "F16":
        return values.view(np.float16).astype(np.float32)
    wide = values.astype(np.uint32)
    wide <<= np.uint32(16)
    return wide.view(np.float32)


def _narrowed(values: Floats, dtype: str) -> Elements:
    """Finite float32 numbers as elements of a dtype."""
    if dtype == "F32":
        return values.view(np.uint32)
    if dtype == "F16":
        return values.astype(np.float16).view(np.uint16)
    return (_rounded(values, dtype).view(np.uint32) >> np.uint32(16)).astype(np.uint16)


def _rounded(values: Floats, dtype: str) -> Floats:
    """Float32 numbers rounded to the nearest of a dtype, ties to even; beyond its range they are infinite."""
    if dtype == "F32":
        return values
    if dtype == "F16":
        return values.astype(np.float16).astype(np.float32)
    bits = values.view(np.uint32)
    rounded = bits >> np.uint32(16)
    rounded &= np.uint32(1)
    rounded += bits
    rounded += np.uint32(0x7FFF)
    rounded &= np.uint32(0xFFFF0000)
    return rounded.view(np.float32)
