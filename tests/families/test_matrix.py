"""docs/families.md lists exactly the pairs of model type and naming that there are tables for, and all are proved."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.families import test_logits as logits
from tests.families import test_megatron_vision as megatron_vision
from workers.families import all_tables
from workers.families.registry import ANY_MODEL, HUB_LIKE

PAGE = (Path(__file__).parents[2] / "docs" / "families.md").read_text()
NAMINGS = {
    "Hugging Face": "transformers",
    "torchtune": "torchtune",
    "Meta": "meta",
    "Megatron-Core": "megatron",
    "verl before 0.4 (Megatron)": "verl-megatron",
    "torchtitan": "torchtitan",
}
NONE, KEPT = "–", "as it is"
# Pairs whose proof is a real checkpoint, or a pair beside it with the same table and the same modules.
BY_CASES = {
    ("llama4", "torchtune"): "llama4-tune-head",
    ("llama4", "meta"): "meta-llama4-tp2-interleaved",
    ("mllama", "torchtune"): "llama32-vision-tune-061",
    ("mllama", "meta"): "meta-llama32-vision-1file",
    ("llama", "verl-megatron"): "verl030-llama-tp2-pp2",
}
SAME_MODULES = {
    ("llama4_text", "torchtune"): ("llama4", "torchtune"),
    ("llama4_text", "meta"): ("llama4", "meta"),
    ("llama4", "torchtitan"): ("llama4_text", "torchtitan"),
    ("kimi_k2", "megatron"): ("deepseek_v3", "megatron"),
    ("qwen2", "verl-megatron"): ("llama", "verl-megatron"),
}
LOGITS = {
    *((kind, "torchtune") for kind in logits.TUNE),
    *((kind, "torchtitan") for kind in logits.TITAN),
    *((kind, "megatron") for kind in (*logits.MEGATRON, *megatron_vision.KINDS, "gemma3")),
    ("llama", "meta"),
    ("mistral", "meta"),
}


def rows() -> dict[str, dict[str, str]]:
    """The table: model type -> heading -> cell."""
    lines = [[cell.strip() for cell in line.strip("|\n").split("|")] for line in PAGE.splitlines() if line[:1] == "|"]
    headings, _, *body = lines
    assert headings == ["model_type", *NAMINGS]
    return {kind: dict(zip(headings[1:], cells, strict=True)) for kind, *cells in body}


def pairs() -> dict[tuple[str, str], str]:
    """The tables that there are, without those that differ by the head only."""
    return {
        (kind, table.naming): table.name
        for table in all_tables()
        for kind in table.model_types
        if kind != ANY_MODEL and not table.architectures
    }


def test_the_page_has_a_column_for_each_naming():
    assert {table.naming for table in all_tables()} <= {*NAMINGS.values(), *HUB_LIKE}


def test_every_cell_is_the_table_that_is_used():
    there, told = pairs(), rows()
    for kind, cells in told.items():
        for heading, naming in NAMINGS.items():
            absent = KEPT if naming in HUB_LIKE else NONE
            assert cells[heading] == there.get((kind, naming), absent), (kind, heading)
    unlisted = {kind for kind, naming in there if naming not in HUB_LIKE} - set(told)
    assert not unlisted


def test_the_page_lists_all_other_model_types_with_a_table():
    line = next(line for line in PAGE.splitlines() if line.startswith("Further `model_type`s"))
    named = re.findall(r"\w+", line.partition(":")[2])
    assert named == sorted({kind for kind, _ in pairs()} - set(rows()))


@pytest.mark.parametrize("pair", sorted(pair for pair in pairs() if pair[1] not in HUB_LIKE), ids="-".join)
def test_every_pair_is_proved_by_a_model_that_transformers_loads(pair):
    proof = SAME_MODULES.get(pair, pair)
    assert pairs()[proof] == pairs()[pair]
    assert (
        proof in LOGITS
        or ("torchtune", BY_CASES.get(proof)) in logits.CASES
        or (("megatron", BY_CASES.get(proof)) in logits.CASES)
    )
