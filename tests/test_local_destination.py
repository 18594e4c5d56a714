"""Publication on a disk: at each moment one whole model is at the destination, also where folders can't be swapped."""

from __future__ import annotations

import ctypes
import errno
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.synthetic import identity_plan, random_tensors, write_source
from workers import local_destination
from workers.convert import run_plan
from workers.errors import StorageError
from workers.options import ConvertOptions
from workers.plan import Plan
from workers.storage import open_folder
from workers.verify import verify_model

OVERWRITE = ConvertOptions(overwrite=True)


class _NoSwap:
    """The C library on a file system that can't exchange two folders, as NFS."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def renameat2(self, *_: object) -> int:
        ctypes.set_errno(errno.EINVAL)
        return -1


@pytest.fixture
def plans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Plan]:
    monkeypatch.setattr("workers.local_destination.ctypes.CDLL", _NoSwap)
    sources = [write_source(tmp_path / f"source-{seed}", random_tensors(seed), seed) for seed in (1, 2)]
    return [identity_plan(source, OVERWRITE) for source in sources]


def made_of(model: Path) -> list[str]:
    """The source of the model at a place, and what else lies beside it."""
    assert verify_model(str(model)).equal
    others = [path.name for path in model.parent.iterdir() if path.name.startswith(f".{model.name}.")]
    manifest = open_folder(str(model)).read("unshard.json").decode()
    return [*(name for name in ("source-1", "source-2") if f"/{name}" in manifest), *others]


def test_a_swap_in_two_steps_leaves_the_new_model_and_nothing_else(plans: list[Plan], tmp_path: Path) -> None:
    for plan in plans:
        run_plan(plan, str(tmp_path / "model"))
    assert made_of(tmp_path / "model") == ["source-2"]


def test_a_swap_that_fails_in_its_second_step_leaves_the_old_model(
    plans: list[Plan], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_plan(plans[0], str(tmp_path / "model"))
    rename = Path.rename

    def failing(path: Path, target: Path) -> Path:
        if (
            path.name.startswith(".model.unshard-")
            and not tmp_path.joinpath("model").exists()
            and "replaced" not in path.name
        ):
            raise OSError(errno.EIO, "Input/output error")
        return rename(path, target)

    with monkeypatch.context() as broken:
        broken.setattr(Path, "rename", failing)
        with pytest.raises(StorageError, match="Input/output error"):
            run_plan(plans[1], str(tmp_path / "model"))
    assert made_of(tmp_path / "model")[0] == "source-1"
    run_plan(plans[1], str(tmp_path / "model"))
    assert made_of(tmp_path / "model") == ["source-2"]


@pytest.mark.parametrize("found", ["the new model", "nothing", "an empty folder"])
def test_an_overwrite_follows_one_that_was_killed_between_its_steps(
    plans: list[Plan], tmp_path: Path, found: str
) -> None:
    model, aside = tmp_path / "model", tmp_path / ".model.unshard-replaced"
    run_plan(plans[0], str(model))
    if found == "the new model":
        aside.mkdir()
        (aside / "model.safetensors").write_bytes(b"the one before")
    else:
        model.rename(aside)
    if found == "an empty folder":
        model.mkdir()
    run_plan(plans[1], str(model))
    assert made_of(model) == ["source-2"]


def test_the_old_model_goes_when_the_new_one_is_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = (
        identity_plan(write_source(tmp_path / f"source-{seed}", random_tensors(seed), seed), OVERWRITE)
        for seed in (1, 2)
    )
    run_plan(first, str(tmp_path / "model"))
    done: list[tuple[str, Path]] = []

    def noted(name: str) -> Callable[[Path], None]:
        real = getattr(local_destination, name)

        def call(path: Path) -> None:
            done.append((name, path))
            real(path)

        return call

    for name in ("_sync", "_remove_tree"):
        monkeypatch.setattr(local_destination, name, noted(name))
    run_plan(second, str(tmp_path / "model"))
    removed = next(
        number
        for number, (name, path) in enumerate(done)
        if name == "_remove_tree" and path.name != ".unshard-journal"
    )
    assert ("_sync", tmp_path) in done[:removed]
