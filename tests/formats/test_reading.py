"""Reading ahead: in order, bounded, and at an end when the reader is, whatever still holds the error."""

from __future__ import annotations

import json
import threading
import uuid

import numpy as np
import pytest
from safetensors.numpy import save

from workers.errors import CorruptFile, GeometryMismatch
from workers.formats import open_checkpoint
from workers.formats._reading import FILES_AT_ONCE, read_ahead
from workers.options import ConvertOptions
from workers.storage import open_folder


def store():
    return open_folder(f"memory://{uuid.uuid4()}/source")


def readers():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("read-ahead")]


def test_results_come_in_the_order_of_the_jobs():
    late = threading.Event()

    def read(number):
        if number == 0:
            late.wait(10)
        late.set()  # the first ends only when a later one has begun
        return number * 2

    with read_ahead(store(), range(40), read) as coming:
        assert list(coming) == [number * 2 for number in range(40)]


def test_no_more_than_a_few_jobs_begin_before_their_turn():
    begun = []
    with read_ahead(store(), range(1000), begun.append) as coming:
        for _ in range(3):
            next(coming)
    assert 3 <= len(begun) <= FILES_AT_ONCE + 3


def test_files_of_a_disk_are_read_when_they_are_asked_for(tmp_path):
    begun = []
    with read_ahead(open_folder(str(tmp_path)), range(9), begun.append) as coming:
        next(coming)
        assert begun == [0]


@pytest.mark.parametrize("kind", ["job", "reader"])
def test_an_error_leaves_no_thread_behind_while_somebody_holds_it(kind):
    def read(number):
        if kind == "job" and number == 5:
            raise OSError(number)
        return number

    def consume():
        with read_ahead(store(), range(100), read) as coming:
            for number in coming:
                if number == 7:
                    raise OSError(number)

    with pytest.raises(OSError, match="5" if kind == "job" else "7") as held:
        consume()
    assert held.value.__traceback__ is not None
    assert readers() == []


SOURCES = {
    # The third file has a tensor of the first, and nothing says which counts.
    "hf": lambda number: (
        f"model-{number + 1:05d}-of-00030.safetensors",
        save({"twice" if number in (0, 2) else f"t{number}": np.zeros(2, np.float32)}),
    ),
    # The third file doesn't say where its chunks lie.
    "dcp": lambda number: (
        f"shard-{number + 1:05d}-model-00001-of-00001.safetensors",
        save(
            {"t": np.zeros(2, np.float32)},
            {} if number == 2 else {"DCP_SHARDING_INFO": json.dumps({"t": {"saved_offsets": [2 * number]}})},
        ),
    ),
}
REFUSALS = {"hf": GeometryMismatch, "dcp": CorruptFile}


@pytest.mark.parametrize("kind", SOURCES)
def test_a_folder_in_a_store_that_is_refused_leaves_no_thread_behind(kind):
    folder = store()
    for number in range(30):
        folder.write(*SOURCES[kind](number))
    with pytest.raises(REFUSALS[kind]) as held:
        open_checkpoint(folder, ConvertOptions())
    assert held.value.__traceback__ is not None
    assert readers() == []
