"""The real checkpoints of ``tests/cases/megatron``, from the readers through the families to the expected bytes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.formats.cases import Area
from workers.errors import GeometryMismatch, IncompleteCheckpoint, UnmappedTensor, UnsafePickle

ERRORS = {
    "err-config-experts-mismatch": GeometryMismatch,
    "err-config-heads-dont-divide": GeometryMismatch,
    "err-config-unknown-family": UnmappedTensor,
    "err-config-vocab-too-big": GeometryMismatch,
    "err-dist-evil-metadata": UnsafePickle,
    "err-dist-no-metadata": IncompleteCheckpoint,
    "err-dist-truncated-distcp": IncompleteCheckpoint,
    "err-mlm-missing-tp-rank": IncompleteCheckpoint,
    "err-verl030-missing-one-rank": IncompleteCheckpoint,
}
AREA = Area("megatron")
GOOD, REFUSED = AREA.split()


@pytest.mark.parametrize("name", GOOD)
def test_a_case_gives_exactly_the_expected_tensors_config_and_files(name):
    checkpoint, _, _ = AREA.assert_converted(name)
    is_distributed = "torch_dist" in AREA.described(name)["source_format"]
    assert checkpoint.format == ("megatron-dist" if is_distributed else "megatron-legacy")


@pytest.mark.parametrize("name", REFUSED)
def test_a_broken_case_is_refused_in_the_right_words(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert type(AREA.assert_refused(name)) is ERRORS[name]
    assert not [path for place in (tmp_path, AREA.folder) for path in Path(place).rglob("UNSHARD_WAS_FOOLED")]


def test_every_broken_case_has_its_kind_of_error():
    assert sorted(ERRORS) == REFUSED
