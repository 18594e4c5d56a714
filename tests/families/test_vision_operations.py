"""Operations for vision towers, undone by their inverses, and names whose numbers are listed in the config."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.families.test_operations import all_values, values
from tests.test_expressions import Memory
from workers.errors import GeometryMismatch
from workers.families.layer_lists import CROSS, FUSION, SELF, layer_lists
from workers.families.operations import Facts
from workers.families.rules import Pattern
from workers.families.vision_operations import (
    FirstElement,
    Flatten,
    JoinRows,
    TilesToRatios,
    Unflatten,
    aspect_ratios,
)


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(0, 1))
def test_flattened_dimensions_come_back(rows, channels, patch, rest, dim):
    memory = Memory()
    facts = Facts({"channels": channels, "patch": patch})
    shape = [rows, rows]
    shape[dim] = channels * patch * rest
    group = ((memory.source(tuple(shape)),),)
    operation = Unflatten(dim, ("channels", "patch"))
    apart = operation.apply(group, facts)
    assert apart[0][0].shape[dim : dim + 3] == (channels, patch, rest)
    assert all_values(operation.inverse.apply(apart, facts), memory) == all_values(group, memory)
    assert operation.inverse == Flatten(dim, ("channels", "patch"))
    assert operation.inverse.inverse == operation


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3))
def test_rows_of_two_tables_are_joined_and_split(vocabulary, more, width):
    memory = Memory()
    facts = Facts({"vocab_size": vocabulary})
    group = (memory.source((vocabulary, width)),), (memory.source((more, width)),)
    operation = JoinRows("vocab_size")
    joined = operation.apply(group, facts)
    assert joined[0][0].shape == (vocabulary + more, width)
    assert all_values(operation.inverse.apply(joined, facts), memory) == all_values(group, memory)


def reference_rows(table, tiles):
    """As transformers' conversion computes them, in numpy."""
    ratios = [(a, b) for a in range(1, tiles + 1) for b in range(1, tiles + 1) if a * b <= tiles]
    rows = np.zeros((len(ratios) + 1, tiles, *table.shape[2:]), dtype=table.dtype)
    for number, (a, b) in enumerate(ratios, 1):
        rows[number, : a * b] = table[:a, :b].reshape(a * b, *table.shape[2:])
    return rows.reshape(len(rows), -1)


@given(st.integers(1, 5), st.integers(1, 3), st.integers(1, 3))
def test_tables_of_tiles_become_rows_of_arrangements_and_back(tiles, patches, width):
    memory = Memory()
    facts = Facts({"vision_config.max_num_tiles": tiles, "vision_config.hidden_size": width})
    source = memory.source((tiles, tiles, patches, width))
    operation = TilesToRatios()
    ((rows,),) = there = operation.apply(((source,),), facts)
    table = values(source, memory)
    assert (values(rows, memory) == reference_rows(table, tiles)).all()
    ((back,),) = operation.inverse.apply(there, facts)
    reached = np.zeros((tiles, tiles), dtype=bool)
    for a, b in aspect_ratios(tiles):
        if a * b == tiles:
            reached[:a, :b] = True
    assert (values(back, memory) == np.where(reached[:, :, None, None], table, 0)).all()


@pytest.mark.parametrize(
    ("operation", "shape", "said"),
    [
        (TilesToRatios(), (2, 2, 1, 4), "tells 3 tiles"),
        (TilesToRatios().inverse, (4, 5), "tells 3 tiles of width 4"),
        (Unflatten(0, ("hidden_size",)), (5, 2), r"shape \[5, 2\]"),
        (JoinRows("hidden_size").inverse, (4, 2), "no rows are left"),
        (FirstElement(), (2, 2), "a gate has shape"),
    ],
)
def test_shapes_that_do_not_fit_are_told(operation, shape, said):
    facts = Facts({"hidden_size": 4, "vision_config.max_num_tiles": 3, "vision_config.hidden_size": 4})
    with pytest.raises(GeometryMismatch, match=said):
        operation.apply(((Memory().source(shape),),), facts)


@given(st.integers(1, 5), st.integers(1, 5))
def test_woven_layers_are_counted_as_torchtune_counts_them(every, crosses):
    """``every`` self-attention layers for each of ``crosses`` layers of cross-attention."""
    listed = [every - 1 + number * (every + 1) for number in range(crosses)]
    lists = layer_lists({"num_hidden_layers": (every + 1) * crosses, CROSS: listed})
    assert lists[FUSION] == tuple((number + 1) * every - 1 for number in range(crosses))
    assert sorted(lists[SELF] + lists[CROSS]) == list(range((every + 1) * crosses))


def test_a_listed_number_is_its_place_in_the_list_and_others_do_not_fit():
    pattern = Pattern("layers.{layer@some}.weight", Facts(lists={"some": (1, 4)}))
    assert pattern.match("layers.4.weight") == {"layer": "1"}
    assert pattern.match("layers.2.weight") is None
    assert pattern.name({"layer": "1"}) == "layers.4.weight"
