"""Every kind of expression, box by box, against numpy on whole tensors."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.arithmetic import NumpyArithmetic
from workers.dora import AddDora
from workers.dtypes import ELEMENT_TYPES
from workers.expressions import AddLora, Cast, Concatenate, Select, Slice, Source, Stack, Transpose


@dataclass
class Memory:
    """Source tensors in memory, numbered as they are made, and the elements of them that were read."""

    tensors: list[np.ndarray] = field(default_factory=list)
    read_elements: set[tuple[int, int]] = field(default_factory=set)
    arithmetic: NumpyArithmetic = field(default_factory=NumpyArithmetic)

    def source(self, shape: tuple[int, ...]) -> Source:
        values = np.random.default_rng(len(self.tensors)).standard_normal(shape).astype(np.float32)
        self.tensors.append(values.view(np.uint32))
        return Source(len(self.tensors) - 1, "F32", shape)

    def read(self, tensor, offsets, out):
        out[...] = self.tensors[tensor][window(offsets, out.shape)]
        self.read_elements |= self.elements(tensor, offsets, out.shape)

    def elements(self, tensor, offsets, sizes):
        numbers = np.arange(self.tensors[tensor].size).reshape(self.tensors[tensor].shape)
        return {(tensor, int(number)) for number in numbers[window(offsets, sizes)].ravel()}


def window(offsets, sizes):
    return tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))


def evaluate(expression, memory):
    """The whole value, by numpy's own operations."""
    match expression:
        case Source(tensor):
            return memory.tensors[tensor]
        case Slice(inner, dim, start, stop):
            return np.take(evaluate(inner, memory), range(start, stop), axis=dim)
        case Select(inner, dim, index):
            return np.take(evaluate(inner, memory), index, axis=dim)
        case Concatenate(inputs, dim):
            return np.concatenate([evaluate(part, memory) for part in inputs], axis=dim)
        case Stack(inputs, dim):
            return np.stack([evaluate(part, memory) for part in inputs], axis=dim)
        case Transpose(inner, dim_a, dim_b):
            return np.swapaxes(evaluate(inner, memory), dim_a, dim_b)
    raise AssertionError(expression)


@st.composite
def trees(draw, memory, shape, depth):
    """An expression of a shape, made of any of the nodes that move elements."""
    if depth == 0 or draw(st.booleans()):
        return memory.source(shape)
    dim = draw(st.integers(0, len(shape) - 1))
    inner = lambda wanted: draw(trees(memory, wanted, depth - 1))  # noqa: E731
    kind = draw(st.sampled_from(["slice", "select", "concatenate", "stack", "transpose"]))
    if kind == "slice":
        before, after = draw(st.integers(0, 2)), draw(st.integers(0, 2))
        longer = (*shape[:dim], before + shape[dim] + after, *shape[dim + 1 :])
        return Slice(inner(longer), dim, before, before + shape[dim])
    if kind == "select":
        at, length = draw(st.integers(0, len(shape))), draw(st.integers(1, 3))
        return Select(inner((*shape[:at], length, *shape[at:])), at, draw(st.integers(0, length - 1)))
    if kind == "concatenate" and shape[dim] > 1:
        at = draw(st.integers(1, shape[dim] - 1))
        parts = [(*shape[:dim], length, *shape[dim + 1 :]) for length in (at, shape[dim] - at)]
        return Concatenate(tuple(map(inner, parts)), dim)
    if kind == "stack" and len(shape) > 1:
        entry = (*shape[:dim], *shape[dim + 1 :])
        return Stack(tuple(inner(entry) for _ in range(shape[dim])), dim)
    other = draw(st.integers(0, len(shape) - 1))
    swapped = list(shape)
    swapped[dim], swapped[other] = swapped[other], swapped[dim]
    return Transpose(inner(tuple(swapped)), dim, other)


@st.composite
def trees_and_boxes(draw):
    memory = Memory()
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    expression = draw(trees(memory, shape, 3))
    return memory, expression, draw(boxes(expression.shape))


@st.composite
def boxes(draw, shape):
    offsets = tuple(draw(st.integers(0, length - 1)) for length in shape)
    return offsets, tuple(draw(st.integers(1, n - o)) for n, o in zip(shape, offsets, strict=True))


def filled(expression, box, memory):
    offsets, sizes = box
    out = np.zeros(sizes, dtype=ELEMENT_TYPES[expression.dtype].numpy_type)
    expression.fill(out, offsets, memory)
    return out


@given(trees_and_boxes())
def test_a_box_of_any_expression_is_that_box_of_its_whole(case):
    memory, expression, box = case
    whole = evaluate(expression, memory)
    assert expression.shape == whole.shape
    assert (filled(expression, box, memory) == whole[window(*box)]).all()


@given(trees_and_boxes())
def test_an_expression_requires_exactly_what_filling_reads(case):
    memory, expression, box = case
    filled(expression, box, memory)
    needs = [memory.elements(need.tensor, need.offsets, need.sizes) for need in expression.requires(*box)]
    assert set().union(*needs) == memory.read_elements
    assert sum(map(len, needs)) == len(memory.read_elements)


@given(st.data(), st.integers(1, 6), st.integers(1, 6), st.integers(1, 3))
def test_a_lora_sum_is_the_base_plus_the_scaled_product(data, rows, columns, rank):
    memory = Memory()
    base, a, b = memory.source((rows, columns)), memory.source((rank, columns)), memory.source((rows, rank))
    expression = AddLora(base, a, b, 0.5)
    offsets, sizes = box = data.draw(boxes((rows, columns)))
    w, low, high = (memory.tensors[number].view(np.float32) for number in (0, 1, 2))
    expected = w + np.float32(0.5) * (high @ low)
    found = filled(expression, box, memory).view(np.float32)
    np.testing.assert_allclose(found, expected[window(offsets, sizes)], rtol=1e-5, atol=1e-6)
    needs = [memory.elements(need.tensor, need.offsets, need.sizes) for need in expression.requires(*box)]
    assert set().union(*needs) == memory.read_elements


@given(st.data(), st.integers(1, 6), st.integers(1, 6), st.integers(1, 3))
def test_a_dora_sum_has_rows_as_long_as_its_magnitude_says(data, rows, columns, rank):
    memory = Memory()
    base, a, b, magnitude = map(memory.source, ((rows, columns), (rank, columns), (rows, rank), (rows,)))
    memory.tensors[0][0], memory.tensors[2][0] = 0, 0  # a row of zeros, which has no direction
    expression = AddDora(AddLora(base, a, b, 0.5), magnitude)
    whole, first, second, lengths = (values.view(np.float32).astype(np.float64) for values in memory.tensors)
    total = whole + 0.5 * (second @ first)
    with np.errstate(invalid="ignore", divide="ignore"):
        expected = total * (lengths / np.linalg.norm(total, axis=1))[:, None]
    box = data.draw(boxes((rows, columns)))
    found = filled(expression, box, memory).view(np.float32)
    np.testing.assert_allclose(found, expected[window(*box)], rtol=1e-3, atol=1e-3)
    needs = [memory.elements(need.tensor, need.offsets, need.sizes) for need in expression.requires(*box)]
    assert set().union(*needs) == memory.read_elements


@given(st.data())
def test_a_cast_box_holds_rounded_values(data):
    memory = Memory()
    source = memory.source((4, 5))
    expression = Cast(Transpose(source, 0, 1), "BF16")
    box = data.draw(boxes(expression.shape))
    widened = filled(expression, box, memory).astype(np.uint32) << 16
    exact = memory.tensors[0].view(np.float32).T[window(*box)]
    np.testing.assert_allclose(widened.view(np.float32), exact, rtol=2**-8)


def test_a_transposition_wants_its_exchanged_dimensions_whole():
    memory = Memory()
    assert Transpose(memory.source((3, 4, 5)), 1, 2).unit_elements == 20
    assert memory.source((3, 4)).unit_elements == 1


@pytest.mark.parametrize("make", [lambda s: Slice(s, 0, 1, 3), lambda s: Concatenate((s, s), 0)])
def test_what_only_moves_elements_can_be_cut_anywhere(make):
    assert make(Memory().source((4, 6))).unit_elements == 1
