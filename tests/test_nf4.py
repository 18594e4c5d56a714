"""NF4 against torch's own bfloat16 arithmetic, whole and box by box."""

from __future__ import annotations

from math import prod

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.arithmetic import NumpyArithmetic
from workers.checkpoint import PackedTensor
from workers.expressions import Source
from workers.nf4 import PARTS, unpacked

KINDS = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


class Arrays:
    """A context that reads from arrays."""

    def __init__(self, arrays):
        self.arithmetic = NumpyArithmetic()
        self.arrays = arrays

    def read(self, tensor, offsets, out):
        window = tuple(slice(o, o + n) for o, n in zip(offsets, out.shape, strict=True))
        out[...] = self.arrays[tensor][window]


def raw(tensor):
    width = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}[tensor.element_size()]
    return tensor.contiguous().view(width).numpy()


def reference(parts, packed):
    """As torchao's ``dequantize_scalers`` and ``get_original_weight``, in torch."""
    dtype = KINDS[packed.dtype]
    scalers = parts["quantized_scalers"].to(dtype)
    factors = parts["quantization_factor"].repeat_interleave(packed.scaler_block_size)[: len(scalers)]
    scales = (scalers / factors) + parts["scaler_mean"]
    data = parts["quantized_data"]
    halves = torch.stack((data >> 4, data & 15), dim=1).reshape(-1).long()
    values = parts["nf4"][halves] * scales.repeat_interleave(packed.block_size)
    return values.reshape(packed.shape)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_every_box_is_what_torch_computes(data):
    dtype = data.draw(st.sampled_from(sorted(KINDS)))
    block, scaler_block = data.draw(st.sampled_from([(2, 1), (4, 2), (8, 3)]))
    columns = data.draw(st.integers(1, 5))
    shape = (block * data.draw(st.integers(1, 6)), columns)
    blocks = prod(shape) // block
    groups = -(-blocks // scaler_block)
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    parts = {
        "quantized_data": torch.randint(0, 256, (prod(shape) // 2,), generator=generator).to(torch.uint8),
        "quantized_scalers": torch.randint(-127, 128, (blocks,), generator=generator).to(torch.int8),
        "quantization_factor": (torch.rand(groups, generator=generator) * 900 + 1).to(KINDS[dtype]),
        "scaler_mean": torch.rand((), generator=generator).to(KINDS[dtype]),
        "nf4": torch.randn(16, generator=generator).to(KINDS[dtype]),
    }
    packed = PackedTensor("w", dtype, shape, block, scaler_block)
    kinds = {"quantized_data": "U8", "quantized_scalers": "I8"}
    sources = {
        part: Source(number, kinds.get(part, dtype), tuple(parts[part].shape)) for number, part in enumerate(PARTS)
    }
    expression = unpacked(packed, sources)
    context = Arrays([raw(parts[part]) for part in PARTS])
    whole = raw(reference(parts, packed))
    start = data.draw(st.integers(0, shape[0] - 1)), data.draw(st.integers(0, shape[1] - 1))
    sizes = data.draw(st.integers(1, shape[0] - start[0])), data.draw(st.integers(1, shape[1] - start[1]))
    out = np.empty(sizes, dtype=whole.dtype)
    expression.fill(out, start, context)
    assert (out == whole[start[0] : start[0] + sizes[0], start[1] : start[1] + sizes[1]]).all()
    assert {need.tensor for need in expression.requires(start, sizes)} == set(range(len(PARTS)))
