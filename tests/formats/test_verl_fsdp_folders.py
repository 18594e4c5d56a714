"""Which step, role and world size of a run are taken, and what is said when nothing decides."""

from __future__ import annotations

import json

import pytest

from workers.errors import AmbiguousSource, CorruptFile, IncompleteCheckpoint, InvalidOption, UnknownFormat
from workers.formats import Listing
from workers.formats._steps import TRACKER
from workers.formats.verl_fsdp.folders import RoleFolder, choose_role_folder, find_rank_files
from workers.options import ConvertOptions
from workers.storage import open_folder


def make(root, *folders, world_size=1, tracker=None):
    """Role folders with rank files that are never opened."""
    for folder in folders:
        place = root / folder
        place.mkdir(parents=True, exist_ok=True)
        for rank in range(world_size):
            (place / f"model_world_size_{world_size}_rank_{rank}.pt").write_bytes(b"x")
    if tracker is not None:
        (root / TRACKER).write_text(tracker)
    return root


def chosen(root, **options):
    return choose_role_folder(Listing(open_folder(str(root))), ConvertOptions(**options))


def rank_files(root):
    listing = Listing(open_folder(str(root)))
    return find_rank_files(listing, choose_role_folder(listing, ConvertOptions()))


def refused(kind, root, **options):
    with pytest.raises(kind) as caught:
        chosen(root, **options)
    assert caught.value.hint
    return caught.value


def test_the_tracker_decides_by_number_and_not_by_text(tmp_path):
    make(tmp_path, "global_step_3/actor", "global_step_12/actor", tracker="12")
    found = chosen(tmp_path)
    assert found.path == "global_step_12/actor"
    assert found.notes == (f"step 12, as {TRACKER} says",)


def test_a_step_after_the_tracked_one_is_not_taken_but_said(tmp_path):
    make(tmp_path, "global_step_3/actor", "global_step_12/actor", tracker="3\n")
    found = chosen(tmp_path)
    assert found.path == "global_step_3/actor"
    assert "12" in found.notes[1]
    assert "half-written" in found.notes[1]


def test_a_step_that_is_asked_for_comes_before_the_tracker(tmp_path):
    make(tmp_path, "global_step_3/actor", "global_step_12/actor", tracker="12")
    assert chosen(tmp_path, step=3).path == "global_step_3/actor"
    assert "the steps are 3, 12" in refused(IncompleteCheckpoint, tmp_path, step=4).message


def test_a_later_step_than_the_tracked_one_can_be_asked_for_but_is_doubted(tmp_path):
    make(tmp_path, "global_step_3/actor", "global_step_12/actor", tracker="3")
    found = chosen(tmp_path, step=12)
    assert found.path == "global_step_12/actor"
    assert "may be half-written" in found.notes[1]


def test_a_tracker_that_names_no_folder_may_be_of_a_running_trainer(tmp_path):
    make(tmp_path, "global_step_3/actor", tracker="7")
    error = refused(IncompleteCheckpoint, tmp_path)
    assert "global_step_7" in error.message
    assert "may be writing" in error.hint


def test_a_tracker_without_a_number_is_corrupt(tmp_path):
    make(tmp_path, "global_step_3/actor", tracker="step three")
    assert "'step three'" in refused(CorruptFile, tmp_path).message


def test_the_only_step_is_taken_without_a_tracker(tmp_path):
    assert chosen(make(tmp_path, "global_step_3/actor")).path == "global_step_3/actor"


def test_several_steps_and_no_tracker_are_a_choice(tmp_path):
    error = refused(AmbiguousSource, make(tmp_path, "global_step_3/actor", "global_step_12/actor"))
    assert error.found == "3, 12"


def test_the_actor_is_taken_where_a_critic_lies_beside_it(tmp_path):
    make(tmp_path, "global_step_1/actor", "global_step_1/critic", tracker="1")
    found = chosen(tmp_path)
    assert found.path == "global_step_1/actor"
    assert "critic lies beside it" in found.notes[-1]
    assert chosen(tmp_path, role="critic").path == "global_step_1/critic"


def test_forks_call_the_actor_policy(tmp_path):
    assert chosen(make(tmp_path, "policy", "critic")).path == "policy"


def test_unknown_roles_are_a_choice(tmp_path):
    assert "ref, reward" in refused(AmbiguousSource, make(tmp_path, "ref", "reward")).message
    assert chosen(tmp_path, role="reward").path == "reward"
    assert "the roles are ref, reward" in refused(IncompleteCheckpoint, tmp_path, role="actor").message


def test_the_only_role_is_taken(tmp_path):
    assert chosen(make(tmp_path, "actor")) == RoleFolder("actor")


def test_an_unusual_role_is_said_where_it_is_the_only_one(tmp_path):
    only = make(tmp_path, "global_step_1/critic")
    assert chosen(only).path == "global_step_1/critic"
    assert chosen(only).notes[-1] == "role critic, the only one in global_step_1"
    assert not any("role critic" in note for note in chosen(only, role="critic").notes)


def test_no_other_role_stands_in_for_an_actor_whose_rank_files_are_lost(tmp_path):
    (make(tmp_path, "global_step_1/critic") / "global_step_1" / "actor" / "huggingface").mkdir(parents=True)
    error = refused(IncompleteCheckpoint, tmp_path)
    assert error.message == "actor/ in global_step_1 holds no weights, and critic does"
    assert chosen(tmp_path, role="critic").path == "global_step_1/critic"


def test_an_sft_step_holds_the_files_itself(tmp_path):
    assert chosen(make(tmp_path, "global_step_5", tracker="5")).path == "global_step_5"


def test_a_role_folder_is_taken_as_it_is_given(tmp_path):
    folder = make(tmp_path, "global_step_5/actor") / "global_step_5" / "actor"
    assert chosen(folder).path == ""
    assert chosen(folder, step=5, role="actor").path == ""


def test_options_that_contradict_the_given_folder_are_refused(tmp_path):
    folder = make(tmp_path, "global_step_5/actor") / "global_step_5" / "actor"
    assert "step 5" in refused(InvalidOption, folder, step=4).found
    assert refused(InvalidOption, folder, role="critic").found == "actor"
    assert refused(InvalidOption, folder.parent, step=4).expected == "global_step_4"


def test_a_step_without_rank_files_says_what_lies_there(tmp_path):
    (tmp_path / "global_step_5" / "actor" / "dist_ckpt").mkdir(parents=True)
    assert "found: actor/" in refused(IncompleteCheckpoint, tmp_path).message
    assert "found: nothing" in refused(UnknownFormat, tmp_path / "global_step_5" / "actor" / "dist_ckpt").message


def test_missing_ranks_are_told_as_ranges_of_file_names(tmp_path):
    make(tmp_path, ".", world_size=16)
    for rank in (0, 4, 5, 6, 15):
        (tmp_path / f"model_world_size_16_rank_{rank}.pt").unlink()
    found = rank_files(tmp_path)
    assert found.missing == [(0, 0), (4, 6), (15, 15)]
    assert found.missing_text() == (
        "model_world_size_16_rank_0.pt, model_world_size_16_rank_4.pt to model_world_size_16_rank_6.pt, "
        "model_world_size_16_rank_15.pt"
    )


def test_a_claim_of_a_billion_ranks_costs_nothing(tmp_path):
    (tmp_path / "model_world_size_999999999_rank_7.pt").write_bytes(b"x")
    assert rank_files(tmp_path).missing == [(0, 6), (8, 999999998)]


def test_the_config_settles_two_world_sizes(tmp_path):
    make(tmp_path, ".", world_size=2)
    make(tmp_path, ".", world_size=4)
    with pytest.raises(AmbiguousSource, match="world sizes 2 and 4"):
        rank_files(tmp_path)
    (tmp_path / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 1, "world_size": 4}))
    found = rank_files(tmp_path)
    assert (found.world_size, len(found.files), found.fsdp_version) == (4, 4, 1)
    assert "2 and 4" in found.notes[0]


def test_a_config_of_another_world_size_is_refused(tmp_path):
    make(tmp_path, ".", world_size=2)
    (tmp_path / "fsdp_config.json").write_text('{"world_size": 8}')
    with pytest.raises(IncompleteCheckpoint, match=r"fsdp_config\.json says that the world size is 8"):
        rank_files(tmp_path)


@pytest.mark.parametrize("content", ["", "[1]", "version https://git-lfs.github.com/spec/v1"])
def test_a_config_that_is_no_json_object_is_corrupt(tmp_path, content):
    make(tmp_path, ".")
    (tmp_path / "fsdp_config.json").write_text(content)
    with pytest.raises(CorruptFile, match=r"fsdp_config\.json"):
        rank_files(tmp_path)


def test_a_rank_beyond_the_world_size_is_refused(tmp_path):
    (tmp_path / "model_world_size_2_rank_2.pt").write_bytes(b"x")
    with pytest.raises(IncompleteCheckpoint, match="rank 2 of 2"):
        rank_files(tmp_path)


def test_names_that_are_not_spelt_as_verl_does_are_no_rank_files(tmp_path):
    make(tmp_path, ".")
    for name in ("model_world_size_01_rank_0.pt", "model_world_size_1_rank_0.pt.tmp", "optim_world_size_1_rank_0.pt"):
        (tmp_path / name).write_bytes(b"x")
    assert list(rank_files(tmp_path).files) == [0]
