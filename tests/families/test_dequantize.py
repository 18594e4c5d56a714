"""FP8 weights in blocks: against torch's arithmetic, and everything that does not fit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.test_expressions import Memory
from workers.dtypes import ELEMENT_TYPES
from workers.errors import GeometryMismatch, IncompleteCheckpoint, InvalidOption
from workers.expressions import Source
from workers.families.dequantize import check_scales, dequantize

CONFIG = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [4, 3]}}
NAME = "model.layers.0.mlp.up_proj.weight"


def source(memory: Memory, tensor: torch.Tensor, dtype: str) -> Source:
    raw = tensor.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()]).numpy()
    memory.tensors.append(raw.view(f"u{tensor.element_size()}"))
    return Source(len(memory.tensors) - 1, dtype, tuple(tensor.shape))


def values(memory: Memory, expression) -> np.ndarray:
    out = np.empty(expression.shape, dtype=ELEMENT_TYPES[expression.dtype].numpy_type)
    expression.fill(out, (0,) * out.ndim, memory)
    return out


def quantised(rows: int, columns: int, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator).to(torch.float8_e4m3fn)
    grid = (-(-rows // 4), -(-columns // 3))
    return weight, torch.rand(grid, generator=generator)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 14), st.integers(1, 14), st.integers(0, 99))
def test_a_weight_is_the_product_with_its_blocks_scales_rounded_once(rows, columns, seed):
    memory = Memory()
    weight, scale = quantised(rows, columns, seed)
    entries = [(NAME, source(memory, weight, "F8_E4M3")), (f"{NAME}_scale_inv", source(memory, scale, "F32"))]
    found = dequantize(entries, CONFIG, "bfloat16")
    wide = scale.repeat_interleave(4, 0)[:rows].repeat_interleave(3, 1)[:, :columns]
    expected = (weight.float() * wide).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    ((name, expression),) = found.entries
    assert name == NAME
    assert (values(memory, expression) == expected).all()
    assert [drop.name for drop in found.dropped] == [f"{NAME}_scale_inv"]


@pytest.mark.parametrize("as_bytes", [False, True])
def test_scales_may_be_powers_of_two(as_bytes):
    memory = Memory()
    weight, _ = quantised(4, 3)
    exponents = torch.tensor([[125]], dtype=torch.uint8)
    scale = source(memory, exponents, "U8" if as_bytes else "F8_E8M0")
    entries = [(NAME, source(memory, weight, "F8_E4M3")), (f"{NAME}_scale_inv", scale)]
    ((_, expression),) = dequantize(entries, CONFIG, "float32").entries
    assert (values(memory, expression).view(np.float32) == (weight.float() * 0.25).numpy()).all()


def test_stacked_experts_are_dequantised_one_by_one():
    memory = Memory()
    weight = torch.ones(2, 4, 3).to(torch.float8_e4m3fn)
    scale = torch.tensor([[[2.0]], [[3.0]]])
    name = "model.layers.0.mlp.experts.gate_up_proj"
    entries = [(name, source(memory, weight, "F8_E4M3")), (f"{name}_scale_inv", source(memory, scale, "F32"))]
    ((_, expression),) = dequantize(entries, CONFIG, "float32").entries
    assert values(memory, expression).view(np.float32)[:, 0, 0].tolist() == [2.0, 3.0]


def test_weights_without_scales_and_scales_without_weights_are_named():
    memory = Memory()
    weight, scale = quantised(4, 3)
    with pytest.raises(IncompleteCheckpoint) as caught:
        check_scales([(NAME, source(memory, weight, "F8_E4M3"))])
    assert caught.value.tensor == NAME
    with pytest.raises(IncompleteCheckpoint) as caught:
        check_scales([(f"{NAME}_scale_inv", source(memory, scale, "F32"))])
    assert caught.value.expected == NAME


def test_a_grid_that_does_not_fit_the_block_is_refused():
    memory = Memory()
    weight, _ = quantised(9, 3)
    entries = [
        (NAME, source(memory, weight, "F8_E4M3")),
        (f"{NAME}_scale_inv", source(memory, torch.ones(2, 1), "F32")),
    ]
    with pytest.raises(GeometryMismatch, match=r"\[3, 1\]"):
        dequantize(entries, CONFIG, None)
    with pytest.raises(GeometryMismatch, match="weight_block_size"):
        dequantize(entries, {"quantization_config": {"quant_method": "fp8", "weight_block_size": [0]}}, None)


@pytest.mark.parametrize("config", [{}, {"quantization_config": {"quant_method": "awq"}}])
def test_what_is_not_quantised_so_cannot_be_dequantised(config):
    with pytest.raises(InvalidOption, match="dequantize"):
        dequantize([(NAME, Memory().source((2, 2)))], config, None)
