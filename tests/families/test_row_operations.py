"""Operations on rows against numpy, and undone by their inverses."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.families.test_operations import values
from tests.test_expressions import Memory
from workers.errors import GeometryMismatch, IncompleteCheckpoint
from workers.families.operations import Facts
from workers.families.row_operations import (
    CutRows,
    ExpectRows,
    Interleave,
    SplitGroups,
    SplitHeads,
    attention_heads,
)

SMALL = st.integers(1, 3)


def facts(groups: int, ratio: int, size: int) -> Facts:
    return Facts({"num_attention_heads": groups * ratio, "num_key_value_heads": groups, "head_dim": size})


def same(group, expected, memory):
    found = [[values(entry, memory).tolist() for entry in column] for column in group]
    assert found == [[values(entry, memory).tolist() for entry in column] for column in expected]


@given(SMALL, SMALL, SMALL, st.sampled_from([(), (1,), (3,)]))
def test_groups_of_heads_come_apart_as_megatron_reads_them(groups, ratio, size, width):
    memory, told = Memory(), facts(groups, ratio, size)
    whole = ((memory.source((groups * (ratio + 2) * size, *width)),),)
    parts = SplitGroups().apply(whole, told)
    view = memory.tensors[0].reshape(groups, ratio + 2, size, *width)
    for column, expected in zip(parts, (view[:, :ratio], view[:, ratio], view[:, ratio + 1]), strict=True):
        np.testing.assert_array_equal(values(column[0], memory), expected.reshape(-1, *width))
    same(SplitGroups().inverse.apply(parts, told), whole, memory)


@given(SMALL, SMALL, SMALL)
def test_heads_one_kind_after_the_other_come_apart(groups, ratio, size):
    memory, told = Memory(), facts(groups, ratio, size)
    whole = ((memory.source((groups * (ratio + 2) * size, 2)),),)
    parts = SplitHeads().apply(whole, told)
    assert [column[0].shape[0] for column in parts] == [groups * ratio * size, groups * size, groups * size]
    same(SplitHeads().inverse.apply(parts, told), whole, memory)


@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 2))
def test_blocks_come_to_alternate(parts, length, dim):
    memory, told = Memory(), Facts()
    shape = [2, 3, 2]
    shape[dim] = parts * length
    whole = ((memory.source(tuple(shape)),),)
    woven = Interleave(dim, parts).apply(whole, told)
    blocks = np.split(memory.tensors[0], parts, axis=dim)
    np.testing.assert_array_equal(values(woven[0][0], memory), np.stack(blocks, axis=dim + 1).reshape(shape))
    same(Interleave(dim, parts).inverse.apply(woven, told), whole, memory)


@given(st.integers(2, 5), st.integers(0, 4))
def test_padding_is_cut_and_made_of_zeros(size, more):
    memory = Memory()
    told = Facts({"vocab_size": size, "pad_vocab_to": size + more})
    whole = ((memory.source((size + more, 2)),),)
    cut = CutRows("vocab_size").apply(whole, told)
    np.testing.assert_array_equal(values(cut[0][0], memory), memory.tensors[0][:size])
    padded = values(CutRows("vocab_size").inverse.apply(cut, told)[0][0], memory)
    np.testing.assert_array_equal(padded[:size], memory.tensors[0][:size])
    assert padded.shape == (size + more, 2)
    assert not padded[size:].any()


def test_the_head_of_a_value_model_is_no_vocabulary():
    memory = Memory()
    head = ((memory.source((1, 4)),),)
    told = Facts({"vocab_size": 5, "pad_vocab_to": 8})
    assert CutRows("vocab_size", or_single=True).apply(head, told) == head
    assert CutRows("vocab_size", or_single=True).inverse.apply(head, told) == head


def test_fewer_rows_than_the_vocabulary_are_refused():
    with pytest.raises(GeometryMismatch, match=r"vocab_size is 5.*only 4 rows"):
        CutRows("vocab_size").apply(((Memory().source((4, 2)),),), Facts({"vocab_size": 5}))


def test_rows_that_the_config_does_not_tell_are_refused():
    told = Facts({"kv_lora_rank": 3, "qk_rope_head_dim": 2})
    expect = ExpectRows(("kv_lora_rank", "qk_rope_head_dim"))
    fits = ((Memory().source((5, 2)),),)
    assert expect.apply(fits, told) == fits == expect.inverse.apply(fits, told)
    with pytest.raises(GeometryMismatch, match=r"kv_lora_rank \+ qk_rope_head_dim is 5, but the tensor has 6"):
        expect.apply(((Memory().source((6, 2)),),), told)
    with pytest.raises(IncompleteCheckpoint, match="q_lora_rank"):
        ExpectRows(("q_lora_rank",)).apply(fits, told)


def test_the_size_of_a_head_is_what_the_config_says_or_a_share_of_the_hidden_size():
    assert attention_heads(Facts({"num_attention_heads": 4, "hidden_size": 12})).rows == (12, 12, 12)
    assert attention_heads(Facts({"num_attention_heads": 4, "head_dim": 8, "hidden_size": 12})).size == 8
    with pytest.raises(GeometryMismatch, match="6, which is not divisible by num_key_value_heads 4"):
        attention_heads(Facts({"num_attention_heads": 6, "num_key_value_heads": 4, "hidden_size": 12}))
    with pytest.raises(GeometryMismatch, match="hidden_size 13 is not divisible"):
        attention_heads(Facts({"num_attention_heads": 4, "hidden_size": 13}))


def test_heads_that_do_not_fit_the_rows_are_refused_with_all_numbers():
    memory = Memory()
    for operation in (SplitGroups(), SplitHeads()):
        with pytest.raises(GeometryMismatch, match=r"2 query heads and 1 key-value heads.*so 12 rows.*has 13"):
            operation.apply(((memory.source((13, 2)),),), facts(1, 2, 3))
        parts = tuple((memory.source((rows, 2)),) for rows in (6, 3, 4))
        with pytest.raises(GeometryMismatch, match=r"6, 3, 4 rows, but config\.json or the options tell 6, 3, 3"):
            operation.inverse.apply(parts, facts(1, 2, 3))
