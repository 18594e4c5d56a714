"""Patterns, templates, and the folders that are found by them, on a disk and in a bucket."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.batches import discovery
from service.batches.discovery import NothingFound, TooManyFound, discover, look_for
from service.batches.naming import Found, NoStep, Pattern, Template, natural
from tests.seaweed import open_s3_folder
from workers.errors import InvalidOption, StorageError
from workers.storage.local import LocalFolder
from workers.storage.object_store import ObjectFolder

PATHS = (
    "run-a/global_step_2/actor/model.pt",
    "run-a/global_step_10/actor/model.pt",
    "run-a/global_step_10/critic/model.pt",
    "run-a/global_step_30/critic/model.pt",
    "run-a/latest_checkpointed_iteration.txt",
    "run-a/.global_step_9.unshard-1/actor/model.pt",
    "run-b/global_step_1/actor/model.pt",
    "global_step_7/actor/model.pt",
)
PATTERNS = {
    "global_step_*": ["global_step_7"],
    "*": ["global_step_7", "run-a", "run-b"],
    "run-a/global_step_*": ["run-a/global_step_2", "run-a/global_step_10", "run-a/global_step_30"],
    "run-?/global_step_*/actor": [
        "run-a/global_step_2/actor",
        "run-a/global_step_10/actor",
        "run-b/global_step_1/actor",
    ],
    "run-[b-z]/*": ["run-b/global_step_1"],
    "run-a/global_step_[!1]*": ["run-a/global_step_2", "run-a/global_step_30"],
    "run-a/.global_step*": ["run-a/.global_step_9.unshard-1"],
    "*/*/c*": ["run-a/global_step_10/critic", "run-a/global_step_30/critic"],
}


@pytest.fixture
def local(tmp_path):
    for path in PATHS:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(b"x")
    return tmp_path


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_pattern_finds_folders_segment_by_segment_and_by_step(local, pattern):
    found = discover(str(local), Pattern.parse(pattern))
    assert [each.source for each in found] == [f"{local}/{path}" for path in PATTERNS[pattern]]


def test_a_bucket_is_asked_for_names_of_folders_and_never_for_all_its_objects(s3, monkeypatch):
    def never(*_, **__):
        pytest.fail("all objects were listed")

    folder = open_s3_folder(s3, monkeypatch)
    for path in PATHS:
        folder.write(path, b"x")
    monkeypatch.setattr(ObjectFolder, "list", never)
    prefix = folder.address.url
    for pattern, paths in PATTERNS.items():
        found = discover(prefix, Pattern.parse(pattern))
        assert [each.source for each in found] == [f"{prefix}/{path}" for path in paths], pattern
    assert look_for(prefix, Pattern.parse("run-c/*")) == []
    with pytest.raises(NothingFound, match="there is nothing at"):
        look_for(f"{prefix}/none", Pattern.parse("*"))
    with pytest.raises(NothingFound, match="there are global_step_7, run-a, run-b"):
        discover(prefix, Pattern.parse("step*"))


def test_links_to_folders_are_found_like_folders(local):
    (local / "global_step_8").symlink_to(local / "run-b" / "global_step_1")
    assert [each.field("name") for each in discover(str(local), Pattern.parse("global_step_*"))] == [
        "global_step_7",
        "global_step_8",
    ]


def test_when_nothing_fits_it_is_said_what_is_there(local):
    with pytest.raises(NothingFound, match=r"'step_\*': there are global_step_7, run-a, run-b") as caught:
        discover(str(local), Pattern.parse("step_*"))
    assert caught.value.hint
    with pytest.raises(NothingFound, match="there is nothing at"):
        discover(f"{local}/none", Pattern.parse("*"))
    (local / "empty").mkdir()
    with pytest.raises(NothingFound, match="it has no folders"):
        discover(f"{local}/empty", Pattern.parse("*"))
    for number in range(30):
        (local / "many" / f"x{number}").mkdir(parents=True)
    with pytest.raises(NothingFound, match="x8, x9 and 20 more"):
        discover(f"{local}/many", Pattern.parse("y*"))


def test_more_folders_than_one_request_may_name_are_refused(local, monkeypatch):
    monkeypatch.setattr(discovery, "MOST_FOUND", 3)
    assert len(discover(str(local), Pattern.parse("*"))) == 3
    with pytest.raises(TooManyFound, match="more than 3 folders") as caught:
        discover(str(local), Pattern.parse("*/*"))
    assert "several batches" in caught.value.hint


def test_a_storage_that_does_not_answer_holds_nobody(local, monkeypatch):
    answer = threading.Event()

    def hang(*_):
        answer.wait(30)
        return []

    monkeypatch.setattr(LocalFolder, "subfolders", hang)
    monkeypatch.setattr(discovery, "LIMIT_S", 0.1)
    with pytest.raises(StorageError, match="could not be listed within") as caught:
        look_for(str(local), Pattern.parse("*"))
    answer.set()
    assert caught.value.hint


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        ("", "no *, "),
        ("global_step_1", "no *, "),
        ("/global_step_*", "not a pattern"),
        ("a/../*", "not a pattern"),
        ("./*", "not a pattern"),
        ("a//*", "not a pattern"),
        ("a\\*", "not a pattern"),
        ("**/global_step_*", "which isn't known"),
        ("*/" * 8 + "*", "deeper than 8"),
    ],
)
def test_patterns_that_mean_nothing_are_refused(pattern, said):
    with pytest.raises(InvalidOption) as caught:
        Pattern.parse(pattern)
    assert said in caught.value.message
    assert "global_step_*" in caught.value.hint


def found(path, pattern="run-*/global_step_*/actor", prefix="/runs"):
    return Found(f"{prefix}/{path}", tuple(path.split("/")[: Pattern.parse(pattern).named + 1]), "runs")


@pytest.mark.parametrize(
    ("template", "destination"),
    [
        ("/m/{name}", "/m/global_step_0100"),
        ("/m/{run}-{step}", "/m/run-a-100"),
        ("s3://m/{path}", "s3://m/run-a/global_step_0100"),
        ("/m/{flat}", "/m/run-a-global_step_0100"),
        ("/m/{{x}}/{step}{step}", "/m/{x}/100100"),
    ],
)
def test_a_template_names_a_destination(template, destination):
    assert Template.parse(template).destination(found("run-a/global_step_0100/actor")) == destination


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("global_step_100", "100"),
        ("iter_0000500", "500"),
        ("checkpoint-12", "12"),
        ("qwen2-step-7-fp8", "7"),
        ("epoch=3", "3"),
        ("v2_epoch_1_step_40", "40"),
        ("7", "7"),
        ("000", "0"),
    ],
)
def test_the_step_is_the_number_in_a_name(name, step):
    assert Found("/x", (name,)).field("step") == step


def test_a_name_without_a_number_has_no_step():
    with pytest.raises(NoStep, match="'latest' has none") as caught:
        Template.parse("/m/{step}").destination(Found("/x/latest", ("latest",)))
    assert "{name}" in caught.value.hint


def test_the_run_of_a_folder_right_below_the_prefix_is_the_prefix(local):
    [only] = discover(str(local / "run-b"), Pattern.parse("global_step_*"))
    assert (only.field("run"), only.field("path")) == ("run-b", "global_step_1")


@pytest.mark.parametrize("template", ["/m/{steps}", "/m/{}", "/m/{0}", "/m/{name!r}", "/m/{step:06}", "/m/{name.x}"])
def test_unknown_fields_are_refused_with_the_known_ones(template):
    with pytest.raises(InvalidOption, match="unknown field") as caught:
        Template.parse(template)
    assert "{flat}" in caught.value.hint


@pytest.mark.parametrize("template", ["/m/{step", "/m/step}", "/m/{a{b}}"])
def test_braces_that_do_not_fit_are_refused(template):
    with pytest.raises(InvalidOption):
        Template.parse(template)


@given(st.lists(st.integers(0, 10**6), unique=True, min_size=2))
def test_natural_order_is_that_of_the_numbers(numbers):
    names = sorted((f"step_{number}" for number in numbers), key=natural)
    assert names == [f"step_{number}" for number in sorted(numbers)]


@given(st.lists(st.text(), min_size=2))
def test_any_names_have_a_natural_order(names):
    assert [natural(name) for name in sorted(names, key=natural)] == sorted(map(natural, names))
