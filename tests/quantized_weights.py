"""Quantisation as torch does it, written from the formats' descriptions: what ours is compared with."""

from __future__ import annotations

import numpy as np
import torch

KINDS = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
WIDTHS = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}


def raw(tensor: torch.Tensor) -> np.ndarray:
    """The elements of a tensor as unsigned numbers."""
    return tensor.contiguous().view(WIDTHS[tensor.element_size()]).numpy()


def reference(weight: torch.Tensor, scheme: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The numbers and the scales of a matrix under a scheme, by torch's own operations on whole tensors."""
    match scheme:
        case "fp8-block-128":
            return blocks(weight)
        case "fp8-dynamic":
            scale = step(weight.abs().amax(1, keepdim=True), 448)
            return (weight / scale).clamp(-448, 448).to(torch.float8_e4m3fn), scale
        case "int8-w8a8":
            scale = step(weight.abs().amax(1, keepdim=True), 127.5)
            return (weight / scale).clamp(-128, 127).round().to(torch.int8), scale
        case "int4-w4a16-g128":
            groups = weight.unflatten(1, (-1, 128))
            scale = step(groups.abs().amax(2), 7.5)
            numbers = (groups / scale[..., None]).clamp(-8, 7).round().to(torch.int64)
            return packed(numbers.flatten(1)), scale
    raise AssertionError(scheme)


def step(largest: torch.Tensor, limit: float) -> torch.Tensor:
    scale = largest / torch.tensor(limit, dtype=largest.dtype)
    return torch.where(scale == 0, torch.finfo(scale.dtype).eps, scale)


def blocks(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Block by block, by slices, so that blocks at the edges are what the slices leave of them."""
    numbers = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    rows, columns = (range(0, length, 128) for length in weight.shape)
    inverse = torch.empty(len(rows), len(columns))
    for i, row in enumerate(rows):
        for j, column in enumerate(columns):
            block = weight[row : row + 128, column : column + 128].float()
            largest = block.abs().amax()
            factor = torch.tensor(1.0) if largest == 0 else (448.0 / largest).clamp(max=torch.finfo(torch.float32).max)
            numbers[row : row + 128, column : column + 128] = (block * factor).clamp(-448, 448).to(numbers.dtype)
            inverse[i, j] = 1.0 / factor
    return numbers, inverse


def packed(numbers: torch.Tensor) -> torch.Tensor:
    """Four-bit numbers plus 8, eight in an int32, the first in the lowest bits."""
    words = sum((numbers[:, place::8] + 8) << (4 * place) for place in range(8))
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def unpacked(words: torch.Tensor, columns: int) -> torch.Tensor:
    """The four-bit numbers of packed words."""
    numbers = torch.stack([(words.long() >> (4 * place)) & 15 for place in range(8)], dim=2)
    return numbers.flatten(1)[:, :columns] - 8
