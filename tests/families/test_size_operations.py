"""Operations with sizes of their own against numpy, through a mapping's file, and undone by their inverses."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.families.test_operations import values
from tests.families.test_row_operations import same
from tests.test_expressions import Memory
from workers.arithmetic import NumpyArithmetic
from workers.errors import GeometryMismatch
from workers.families.custom import read_mapping
from workers.families.operations import Facts
from workers.families.size_operations import KEEP, ExpectShape, JoinSizes, Pad, Shape, SplitSizes, ToDtype, Trim

FACTS = Facts({"rows": 4, "vision_config.heads": 2, "negative": -1})
SHAPES = st.lists(st.integers(1, 4), min_size=1, max_size=3)


def operation(op, columns=1, made=1, **keys):
    """The operation that a file's object stands for."""
    sources, targets = [f"s{n}" for n in range(columns)], [f"t{n}" for n in range(made)]
    rule = {"sources": sources, "targets": targets, "operations": [{"op": op, **keys}]}
    (found,) = read_mapping(json.dumps({"schema": 1, "rules": [rule]})).rules
    return found.operations[0]


@given(st.data(), SHAPES, st.lists(st.integers(1, 3), min_size=1, max_size=4))
def test_pieces_of_sizes_come_apart_and_together(data, shape, sizes):
    dim = data.draw(st.integers(0, len(shape) - 1))
    shape[dim] = sum(sizes)
    memory = Memory()
    whole = ((memory.source(tuple(shape)),),)
    split = operation("split", made=len(sizes), dim=dim, sizes=sizes)
    parts = split.apply(whole, FACTS)
    expected = np.split(memory.tensors[0], np.cumsum(sizes)[:-1], axis=dim)
    for (part,), piece in zip(parts, expected, strict=True):
        np.testing.assert_array_equal(values(part, memory), piece)
    same(split.inverse.apply(parts, FACTS), whole, memory)
    assert split.inverse == operation("concatenate", columns=len(sizes), dim=dim, sizes=sizes)


@given(st.data(), SHAPES)
def test_elements_keep_their_order_in_another_shape(data, shape):
    wanted = data.draw(st.permutations(shape))
    after = [-1 if data.draw(st.booleans()) and number == 0 else size for number, size in enumerate(wanted)]
    memory = Memory()
    whole = ((memory.source(tuple(shape)),),)
    reshape = operation("reshape", shape=after, **{"from": shape})
    ((made,),) = changed = reshape.apply(whole, FACTS)
    np.testing.assert_array_equal(values(made, memory), memory.tensors[0].reshape(wanted))
    same(reshape.inverse.apply(changed, FACTS), whole, memory)


@given(st.data(), SHAPES, st.integers(0, 3))
def test_zeros_follow_and_are_cut_off_again(data, shape, more):
    dim = data.draw(st.integers(0, len(shape) - 1))
    memory = Memory()
    whole = ((memory.source(tuple(shape)),),)
    pad = operation("pad", dim=dim, size=shape[dim] + more, **{"from": shape[dim]})
    ((padded,),) = changed = pad.apply(whole, FACTS)
    width = [(0, more if number == dim else 0) for number in range(len(shape))]
    np.testing.assert_array_equal(values(padded, memory), np.pad(memory.tensors[0], width))
    same(pad.inverse.apply(changed, FACTS), whole, memory)
    assert pad.inverse == operation("trim", dim=dim, size=shape[dim], **{"from": shape[dim] + more})


@given(st.data(), SHAPES)
def test_what_was_cut_off_comes_back_as_zeros(data, shape):
    dim = data.draw(st.integers(0, len(shape) - 1))
    assume(shape[dim] > 1)
    memory = Memory()
    trim = operation("trim", dim=dim, size=1, **{"from": shape[dim]})
    ((cut,),) = changed = trim.apply(((memory.source(tuple(shape)),),), FACTS)
    np.testing.assert_array_equal(values(cut, memory), np.take(memory.tensors[0], [0], axis=dim))
    ((back,),) = trim.inverse.apply(changed, FACTS)
    assert back.shape == tuple(shape)
    assert not np.take(values(back, memory), range(1, shape[dim]), axis=dim).any()


def test_a_padding_of_unknown_size_stays_off():
    memory = Memory()
    trim = Trim(0, 2)
    cut = trim.apply(((memory.source((4, 2)),),), FACTS)
    assert trim.inverse.apply(cut, FACTS) == cut


def test_a_cast_rounds_as_any_other_does():
    memory = Memory()
    cast = operation("cast", dtype="bfloat16")
    ((made,),) = cast.apply(((memory.source((3, 2)),),), FACTS)
    expected = np.empty((3, 2), np.uint16)
    NumpyArithmetic().cast(memory.tensors[0], "F32", expected, "BF16")
    np.testing.assert_array_equal(values(made, memory), expected)
    assert (cast.inverse, KEEP.inverse) == (KEEP, KEEP)


def test_sizes_may_be_keys_of_the_config():
    memory = Memory()
    ((made,),) = Shape((-1, "vision_config.heads")).apply(((memory.source((4, 3)),),), FACTS)
    assert made.shape == (6, 2)
    with pytest.raises(GeometryMismatch, match="negative is -1, which is no size"):
        Trim(0, "negative").apply(((memory.source((4,)),),), FACTS)


def test_heads_beside_an_operation_count_and_not_the_configs():
    memory, told = Memory(), Facts({"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 1})
    keys = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 3}
    split = operation("split_groups", made=3, **keys)
    whole = ((memory.source((12, 2)),),)
    parts = split.apply(whole, told)
    assert [part.shape for (part,) in parts] == [(6, 2), (3, 2), (3, 2)]
    same(split.inverse.apply(parts, told), whole, memory)


@pytest.mark.parametrize(
    ("refused", "words"),
    [
        (SplitSizes(0, (1, 2)), r"a tensor of shape \[4, 3\] cannot be cut into pieces of 1 \+ 2 along dimension 0"),
        (SplitSizes(2, (1, 2)), "cannot be cut into pieces"),
        (JoinSizes(0, (3,)), r"cannot join F32 \[4, 3\] along dimension 0 as pieces of 3"),
        (JoinSizes(2, (3,)), "cannot join"),
        (Shape((5, -1)), r"the 12 elements of a tensor of shape \[4, 3\] do not fill the shape \[5, -1\]"),
        (Shape((3, 3)), "do not fill"),
        (Shape((12,), (3, 4)), r"has the shape \[4, 3\], and its rule expects \[3, 4\]"),
        (Shape((12,), (5, -1)), r"expects \[5, any\]"),
        (ExpectShape((4,)), r"expects \[4\]"),
        (ExpectShape(("rows", 2)), r"expects \[4, 2\]"),
        (Trim(0, 5), r"cannot be cut to 5 along dimension 0"),
        (Trim(2, 1), "cannot be cut"),
        (Trim(0, 2, 8), "cannot be cut"),
        (Pad(0, 3), r"cannot be padded to 3 along dimension 0"),
        (Pad(2, 3), "cannot be padded"),
        (Pad(0, 8, 3), "cannot be padded"),
    ],
)
def test_shapes_that_do_not_fit_are_refused_with_both(refused, words):
    with pytest.raises(GeometryMismatch, match=words) as caught:
        refused.apply(((Memory().source((4, 3)),),), FACTS)
    assert caught.value.expected
    assert caught.value.found


def test_only_floating_point_numbers_are_cast():
    source = Memory().source((2,))
    for dtype in ("I64", "F8_E4M3"):
        whole = ((type(source)(0, dtype, (2,)),),)
        with pytest.raises(GeometryMismatch, match=f"dtype {dtype} cannot be cast"):
            ToDtype("float32").apply(whole, FACTS)
