"""The client's types say what the service sends: the same fields, null in the same places."""

from __future__ import annotations

import re
import types
import typing
from typing import Any, get_args, get_type_hints

import pytest
from pydantic import BaseModel

from service import answers
from service.batches import schemas as of_batches
from service.jobs import schemas
from service.watches import schemas as of_watches

MODELS: dict[str, type[BaseModel]] = {
    **{name: getattr(schemas, name) for name in ("Job", "JobError", "JobResult", "ResultFile", "Progress")},
    **{name: getattr(schemas, name) for name in ("Event", "Shard", "Tensor", "JobAttempt")},
    "Batch": of_batches.Batch,
    "BatchCounts": of_batches.Counts,
    "BatchItem": of_batches.BatchItem,
    "Watch": of_watches.Watch,
    "WatchCounts": of_watches.WatchCounts,
    "WatchItem": of_watches.WatchItem,
}


def typed_dicts() -> dict[str, Any]:
    return {name: made for name, made in vars(answers).items() if typing.is_typeddict(made)}


def is_nullable(kind: Any) -> bool:
    return typing.get_origin(kind) in (types.UnionType, typing.Union) and type(None) in get_args(kind)


def test_every_type_of_the_client_is_compared_with_a_model():
    assert typed_dicts().keys() == MODELS.keys()


@pytest.mark.parametrize("name", MODELS)
def test_a_type_of_the_client_has_the_fields_of_its_answer(name):
    told = get_type_hints(typed_dicts()[name])
    sent = MODELS[name].model_fields
    assert list(told) == list(sent)
    nullable = {field for field, info in sent.items() if is_nullable(info.annotation)}
    assert {field for field, kind in told.items() if is_nullable(kind)} == nullable
    nested = {field: of for field, kind in told.items() for of in re.findall(r"service\.answers\.(\w+)", str(kind))}
    assert {field: MODELS[of].__name__ for field, of in nested.items()} == {
        field: of
        for field, info in sent.items()
        for of in re.findall(r"service\.\w*\.?schemas\.(\w+)", repr(info.annotation))
        if of in {model.__name__ for model in MODELS.values()}
    }
