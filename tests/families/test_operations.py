"""Each operation undone by its inverse, in shapes and in values, and what it says of shapes that don't fit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.test_expressions import Memory
from workers.errors import GeometryMismatch, IncompleteCheckpoint
from workers.families.operations import Concatenate, Facts, Orient, Split, Stack, Transpose, Unstack

FACTS = Facts({"hidden_size": 6}, (5, 1))
MODULES_OF_4 = Facts({"hidden_size": 6}, (4, 57))


def values(expression, memory):
    out = np.zeros(expression.shape, dtype=np.uint32)
    expression.fill(out, (0,) * out.ndim, memory)
    return out


def all_values(group, memory):
    return [[values(entry, memory).tolist() for entry in column] for column in group]


@st.composite
def steps(draw):
    """An operation and a group that it applies to."""
    memory = Memory()
    shape = [draw(st.integers(1, 4)) for _ in range(3)]
    dim = draw(st.integers(0, 2))
    kind = draw(st.sampled_from(["split", "concatenate", "unstack", "stack", "transpose", "orient"]))
    entries = draw(st.integers(1, 3))
    if kind == "split":
        parts = draw(st.integers(1, 3))
        shape[dim] *= parts
        return memory, Split(dim, parts), (tuple(memory.source(tuple(shape)) for _ in range(entries)),)
    if kind == "concatenate":
        parts = draw(st.integers(1, 3))
        group = tuple(tuple(memory.source(tuple(shape)) for _ in range(entries)) for _ in range(parts))
        return memory, Concatenate(dim, parts), group
    columns = draw(st.integers(1, 2))
    if kind == "unstack":
        return memory, Unstack(dim), tuple((memory.source(tuple(shape)),) for _ in range(columns))
    if kind == "orient":
        wrong = (shape[0], shape[1], 6)
        return memory, Orient(1, 2, "hidden_size", (5, 0)), ((memory.source(wrong),),)
    group = tuple(tuple(memory.source(tuple(shape)) for _ in range(entries)) for _ in range(columns))
    return memory, Stack(dim) if kind == "stack" else Transpose(dim, draw(st.integers(0, 2))), group


@given(steps())
def test_an_operation_and_its_inverse_leave_everything_as_it_was(step):
    memory, operation, group = step
    there = operation.apply(group, FACTS)
    back = operation.inverse.apply(there, FACTS)
    assert [[entry.shape for entry in column] for column in back] == [[e.shape for e in column] for column in group]
    assert all_values(back, memory) == all_values(group, memory)
    assert operation.inverse.inverse == operation


@given(steps())
def test_an_inverse_is_undone_by_its_operation(step):
    memory, operation, group = step
    group = operation.apply(group, FACTS)
    again = operation.apply(operation.inverse.apply(group, FACTS), FACTS)
    assert all_values(again, memory) == all_values(group, memory)


def test_fused_experts_split_as_the_hub_has_them():
    memory = Memory()
    experts, inner, hidden = 3, 2, 5
    fused = memory.source((experts, 2 * inner, hidden))
    gate, up = Unstack(0).apply(Split(1, 2).apply(((fused,),), FACTS), FACTS)
    whole = memory.tensors[0]
    for expert in range(experts):
        assert (values(gate[expert], memory) == whole[expert, :inner]).all()
        assert (values(up[expert], memory) == whole[expert, inner:]).all()


@pytest.mark.parametrize(("shape", "exchanged"), [((2, 8, 6), True), ((2, 6, 8), False)])
def test_weights_are_oriented_by_their_shapes(shape, exchanged):
    ((found,),) = Orient(1, 2, "hidden_size", (5, 0)).apply(((Memory().source(shape),),), FACTS)
    assert found.shape == (2, 6, 8)
    assert (type(found).__name__ == "Transpose") == exchanged


def test_square_weights_are_oriented_by_the_version_that_saved_them():
    orient = Orient(1, 2, "hidden_size", (5, 0))
    for facts, exchanged in ((FACTS, True), (MODULES_OF_4, False)):
        ((found,),) = orient.apply(((Memory().source((2, 6, 6)),),), facts)
        assert (type(found).__name__ == "Transpose") == exchanged


def test_the_way_back_gives_the_form_of_the_version():
    orient = Orient(1, 2, "hidden_size", (5, 0))
    hub = ((Memory().source((2, 6, 8)),),)
    assert orient.inverse.apply(hub, FACTS)[0][0].shape == (2, 8, 6)
    assert orient.inverse.apply(hub, MODULES_OF_4)[0][0].shape == (2, 6, 8)


@pytest.mark.parametrize(
    ("operation", "shapes", "said"),
    [
        (Split(0, 2), [[(3, 4)]], "2 equal parts"),
        (Split(2, 2), [[(3, 4)]], "no dimension 2"),
        (Unstack(5), [[(3, 4)]], "no dimension 5"),
        (Concatenate(0, 2), [[(3, 4)], [(3, 5)]], "cannot join"),
        (Stack(0), [[(3, 4), (4, 3)]], "cannot stack"),
        (Transpose(0, 3), [[(3, 4)]], "no dimension 3"),
        (Orient(0, 1, "hidden_size", (5, 0)), [[(3, 4)]], "hidden_size = 6 in neither"),
    ],
)
def test_shapes_that_do_not_fit_are_told(operation, shapes, said):
    memory = Memory()
    group = tuple(tuple(map(memory.source, column)) for column in shapes)
    with pytest.raises(GeometryMismatch, match=said):
        operation.apply(group, FACTS)


def test_a_size_that_the_config_lacks_is_told_by_its_key():
    with pytest.raises(IncompleteCheckpoint, match="hidden_size"):
        Orient(0, 1, "hidden_size", (5, 0)).apply(((Memory().source((3, 4)),),), Facts())
