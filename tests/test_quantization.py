"""Quantised weights and their scales: every bit as torch computes it, whole, box by box, and on both devices."""

from __future__ import annotations

import dataclasses
from math import prod

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.quantized_weights import KINDS, raw, reference
from tests.synthetic import write_source
from tests.test_expressions import Memory, boxes, filled, window
from workers.arithmetic import NumpyArithmetic
from workers.dtypes import size_bytes
from workers.engines.gpu import TorchArithmetic
from workers.errors import InvalidOption
from workers.expressions import Cast, Source, Transpose
from workers.layout import part_size
from workers.mapping import Mapping, Target
from workers.merge import blocks_of
from workers.options import ConvertOptions
from workers.plan import make_plan
from workers.quantization import SCHEMES, to_e4m3
from workers.quantized import Constant, Quantize, Scales

NAME = "model.layers.0.mlp.up_proj.weight"
BOTH = pytest.mark.parametrize("arithmetic", [NumpyArithmetic(), TorchArithmetic("cpu")], ids=["numpy", "torch"])


@st.composite
def weights(draw, scheme, dtype=None):
    """A matrix that the scheme takes: any size up to a few groups, any magnitude, zeros of both signs, ties."""
    dtype = dtype or draw(st.sampled_from(sorted(KINDS)))
    rows = draw(st.integers(1, 5) | st.integers(120, 300))
    columns = 128 * draw(st.integers(1, 3)) if scheme == "int4-w4a16-g128" else draw(st.integers(1, 300))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10_000)))
    exponent = draw(st.integers(-5, 3) if dtype == "F16" else st.integers(-38, 30))
    weight = torch.randn(rows, columns, generator=generator) * 10.0**exponent
    if draw(st.booleans()):  # halves of whole numbers: ties of every scheme, where the largest is the scheme's limit
        weight = torch.randint(-15, 16, (rows, columns), generator=generator) / 2
    weight[torch.rand(rows, columns, generator=generator) < draw(st.sampled_from([0, 0.3]))] = -0.0
    weight[: draw(st.integers(0, rows))] *= draw(st.sampled_from([0.0, 1.0]))
    return dtype, weight.to(KINDS[dtype])


@BOTH
@pytest.mark.parametrize("scheme", sorted(SCHEMES))
@settings(max_examples=40, deadline=None)
@given(st.data())
def test_numbers_and_scales_are_those_of_torch(arithmetic, scheme, data):
    dtype, weight = data.draw(weights(scheme))
    numbers, scale = reference(weight, scheme)
    found = arithmetic.scales(raw(weight), dtype, SCHEMES[scheme])
    np.testing.assert_array_equal(found, raw(scale))
    np.testing.assert_array_equal(arithmetic.quantize(raw(weight), dtype, SCHEMES[scheme]), raw(numbers))


@pytest.mark.parametrize("scheme", sorted(SCHEMES))
@settings(max_examples=40, deadline=None)
@given(st.data())
def test_a_box_is_that_box_of_the_whole_and_reads_whole_groups_only(scheme, data):
    dtype, weight = data.draw(weights(scheme))
    numbers, scale = reference(weight, scheme)
    memory = Memory(tensors=[raw(weight)])
    source = Source(0, dtype, tuple(weight.shape))
    for kind, whole in ((Quantize, numbers), (Scales, scale)):
        expression = kind(source, SCHEMES[scheme], NAME)
        assert (expression.dtype, expression.shape) == (safetensors_name(whole), tuple(whole.shape))
        box = data.draw(boxes(expression.shape))
        memory.read_elements.clear()
        np.testing.assert_array_equal(filled(expression, box, memory), raw(whole)[window(*box)])
        needs = list(expression.requires(*box))
        assert set().union(*(memory.elements(n.tensor, n.offsets, n.sizes) for n in needs)) == memory.read_elements
        for need in needs:  # borders of groups, or of the matrix
            for offset, size, length, group in zip(
                need.offsets, need.sizes, weight.shape, SCHEMES[scheme].group, strict=True
            ):
                assert offset % (group or length) == 0
                assert (offset + size) % (group or length) == 0 or offset + size == length


def safetensors_name(tensor):
    names = {torch.float8_e4m3fn: "F8_E4M3", torch.int8: "I8", torch.int32: "I32"}
    return (names | {kind: name for name, kind in KINDS.items()})[tensor.dtype]


@pytest.mark.parametrize("bits", range(0, 1 << 16, 1 << 12))
def test_e4m3_rounds_as_torchs_cast(bits):
    high = np.arange(bits, bits + (1 << 12), dtype=np.uint32) << 16
    values = np.concatenate([high | low for low in (0, 1, 0x7FFF, 0x8000, 0xFFFF)]).view(np.float32)
    values = values[np.isfinite(values)]
    wanted = torch.from_numpy(values.copy()).clamp(-448, 448).to(torch.float8_e4m3fn)
    np.testing.assert_array_equal(to_e4m3(values), raw(wanted))


@pytest.mark.parametrize("scheme", sorted(SCHEMES))
def test_rows_are_read_in_whole_groups(scheme):
    memory = Memory()
    source = memory.source((300, 256))
    rows = 128 if scheme == "fp8-block-128" else 1
    weight = Quantize(source, SCHEMES[scheme], NAME)
    assert weight.unit_elements == rows * weight.shape[1]
    scale = Scales(source, SCHEMES[scheme], NAME)
    assert scale.unit_elements == scale.shape[1]
    turned = Transpose(memory.source((256, 300)), 0, 1)  # wants to be made as a whole
    whole = Quantize(turned, SCHEMES[scheme], NAME)
    assert whole.unit_elements >= 300 * whole.shape[1]


@pytest.mark.parametrize("scheme", sorted(SCHEMES))
def test_a_weight_is_rounded_to_its_dtype_before_it_is_quantised(scheme):
    memory = Memory()
    source = memory.source((130, 128))
    weight = torch.from_numpy(memory.tensors[0].view(np.float32)).to(torch.bfloat16)
    cast = Cast(source, "BF16")
    box = (0, 0), Quantize(cast, SCHEMES[scheme], NAME).shape
    numbers, scale = reference(weight, scheme)
    np.testing.assert_array_equal(filled(Quantize(cast, SCHEMES[scheme], NAME), box, memory), raw(numbers))
    box = (0, 0), Scales(cast, SCHEMES[scheme], NAME).shape
    np.testing.assert_array_equal(filled(Scales(cast, SCHEMES[scheme], NAME), box, memory), raw(scale))


@pytest.mark.parametrize("scheme", sorted(SCHEMES))
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_what_is_not_finite_is_named_with_its_place(scheme, value):
    weight = torch.ones(140, 128)
    weight[133, 7] = value
    for dtype in KINDS:
        memory = Memory(tensors=[raw(weight.to(KINDS[dtype]))])
        source = Source(0, dtype, (140, 128))
        for kind in (Quantize, Scales):
            expression = kind(source, SCHEMES[scheme], NAME)
            with pytest.raises(InvalidOption, match=r"\[133, 7\]") as caught:
                filled(expression, ((0, 0), expression.shape), memory)
            assert caught.value.tensor == NAME
            assert NAME.removesuffix(".weight") in caught.value.hint


@BOTH
@pytest.mark.parametrize("scheme", sorted(SCHEMES))
def test_no_scale_is_zero_or_infinite(arithmetic, scheme):
    for dtype, kind in KINDS.items():
        for value in (0.0, torch.finfo(kind).smallest_normal / 2, torch.finfo(kind).max):
            weight = torch.full((2, 128), value, dtype=kind)
            scale = arithmetic.scales(raw(weight), dtype, SCHEMES[scheme])
            stored = torch.from_numpy(scale.copy()).view(KINDS[SCHEMES[scheme].scale_dtype(dtype)])
            assert (stored > 0).all()
            assert torch.isfinite(stored).all()


def test_a_shape_is_written_as_whole_numbers():
    constant = Constant((4096, 11008))
    assert (constant.dtype, constant.shape) == ("I64", (2,))
    assert filled(constant, ((0,), (2,)), Memory()).tolist() == [4096, 11008]
    assert filled(constant, ((1,), (1,)), Memory()).tolist() == [11008]


def large_plan(folder, scheme, dtype, shape=(4096, 8192)):
    """A plan for a large weight of a dtype, of which only the metadata exists."""
    checkpoint = write_source(folder, {NAME: (dtype, np.zeros((1, 1), np.uint32))}, 0)
    tensor = dataclasses.replace(checkpoint.tensors[0], shape=shape)
    checkpoint = dataclasses.replace(checkpoint, tensors=(tensor,))
    source = Source(0, dtype, shape)
    targets = (
        Target(NAME, Quantize(source, SCHEMES[scheme], NAME)),
        Target(f"{NAME}_scale", Scales(source, SCHEMES[scheme], NAME)),
    )
    options = ConvertOptions(memory="64MiB")
    return make_plan(checkpoint, Mapping("names kept", targets, (), (), (), ()), options)


def needed_bytes(plan, block):
    width = size_bytes(plan.checkpoint.tensors[0].dtype, (1,))
    needs = plan.targets[block.target].expression.requires(block.offsets, block.sizes)
    return sum(width * prod(need.sizes) for need in needs)


@pytest.mark.parametrize("dtype", sorted(KINDS))
@pytest.mark.parametrize("scheme", sorted(SCHEMES))
def test_neither_a_part_nor_a_block_reads_much_more_than_it_may_hold(scheme, dtype, tmp_path):
    plan = large_plan(tmp_path, scheme, dtype)
    budget = plan.options.memory_bytes
    for part in range(len(plan.layout.parts)):
        blocks = list(blocks_of(plan.recipe, part))
        assert all(needed_bytes(plan, block) <= plan.largest_unit_bytes for block in blocks)
        assert sum(needed_bytes(plan, block) for block in blocks) <= 4 * part_size(budget)
    assert plan.worker_bytes < budget // 2
    assert plan.cost()["bytes_read"] == 2 * size_bytes(dtype, (4096, 8192))
