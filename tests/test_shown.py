from __future__ import annotations

import argparse
import collections
import pickle
import time
from typing import Any

import pytest

from tests.attacks.pickles import call, glob, pickled
from tests.attacks.shared_parts import LISTS
from workers.errors import GeometryMismatch, UnsafePickle
from workers.formats._distributed import RankReader
from workers.formats.megatron_legacy.rank_file import _stages
from workers.pickles import load
from workers.shown import shown
from workers.torch_file import TorchFile

MOST_S = 1.0


def tower(make: Any, levels: int = 60) -> Any:
    """Twice the same, twice the same, and so on: to walk through it whole would take centuries."""
    value: Any = make([])
    for _ in range(levels):
        value = make([value, value])
    return value


def in_a_dict(values: list[Any]) -> dict[str, Any]:
    return dict(zip("ab", values, strict=False))


@pytest.mark.parametrize(
    "value", [0, -1.5, None, True, "a'b", b"c", [], (), (1,), (1, "a"), {}, {"a": [1, {2: (3,)}]}]
)
def test_a_short_value_is_shown_as_python_writes_it(value):
    assert shown(value) == repr(value)


def test_sets_are_shown_in_braces():
    assert (shown({1}), shown(frozenset((1,)))) == ("{1}", "frozenset({1})")


@pytest.mark.parametrize("make", [list, tuple, in_a_dict, lambda values: collections.OrderedDict(in_a_dict(values))])
def test_what_shares_its_parts_is_shown_at_once_and_cut(make):
    began = time.process_time()
    text = shown(tower(make), 50)
    assert time.process_time() - began < MOST_S
    assert 0 < len(text) <= 50


def test_what_holds_itself_is_shown():
    value: list[Any] = []
    value += [value, value]
    assert shown(value, 10) == "[" * 10


def test_long_texts_are_cut():
    assert shown("x" * 10**6, 5) == "'xxxx"


def test_a_name_that_cannot_be_written_down_is_refused_at_once():
    with pytest.raises(UnsafePickle, match="getattr of"):
        load(pickled(LISTS, b"q\x01", call(glob("builtins", "getattr"), glob("torch", "Tensor"), b"h\x01")), file="x")


def test_a_tensor_that_is_such_a_list_is_refused_at_once():
    dtensor = load(pickled(glob("torch.distributed.tensor", "DTensor"), b")\x81", LISTS, b"b"), file="x")
    began = time.process_time()
    with pytest.raises(GeometryMismatch):
        RankReader("x").read("weight", dtensor)
    assert time.process_time() - began < MOST_S


def test_arguments_of_runs_are_compared_only_where_they_are_plain():
    arguments = {"lists": tower(list), "tensor_model_parallel_size": 2, "dtype": None, "rotary_percent": 1.0}
    root = load(
        pickle.dumps({"model": {}, "checkpoint_version": 3.0, "args": argparse.Namespace(**arguments)}, 2), file="x"
    )
    _, told = _stages(TorchFile("x", 0, root, {}, "little", ""))
    assert told == {"tensor_model_parallel_size": 2, "dtype": None, "rotary_percent": 1.0}
