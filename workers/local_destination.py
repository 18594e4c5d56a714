"""A result on a local or shared file system: written in a hidden folder, synced, then renamed into place.

The hidden folder lies beside the destination, so that one rename makes the whole model appear. Where the
destination is a mount point or its parent can't be written, the hidden folder lies inside it and the files are
moved out one by one, the manifest last.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from workers.destination import Destination, Intent, describe, order_of_writing
from workers.errors import (
    DestinationBusy,
    DestinationNotEmpty,
    InsufficientResources,
    InternalError,
    StorageError,
    UnshardError,
)
from workers.manifest import MANIFEST_NAME, FileRecord, WrittenFile, digest
from workers.storage import Folder, FolderAddress, check_path, open_folder

JOURNAL = ".unshard-journal"
STAT_BLOCK_BYTES = 512
"""Unit of ``st_blocks``, by stat(2)."""

RENAME_EXCHANGE = 2
"""Flag of Linux's renameat2(2): both names stay taken at each moment."""


class LocalDestination(Destination):
    """A folder of a file system."""

    def __init__(self, folder: Folder) -> None:
        path = folder.local_path()
        if path is None:
            raise InternalError(f"{describe(folder)} is not on a file system")
        self._path = Path(path).resolve()
        self._intent: Intent
        self._claim: int | None = None

    # --- before writing ------------------------------------------------------------------------------------
    def check(self, intent: Intent) -> None:
        with self._told():
            self._check_is_folder()
            present = self._present()
            if present and not intent.overwrite:
                raise DestinationNotEmpty(
                    f"{self._path} is not empty: it holds {_some(present)}",
                    file=str(self._path),
                    hint="Choose another destination, or pass overwrite to replace the model there.",
                )
            if present:
                self._check_replaceable(present)
            self._check_space(intent)

    def claim(self, intent: Intent) -> None:
        with self._told():
            self._check_is_folder()
            self._intent = intent
            self._beside = self._can_stage_beside()
            self._staging = self._staging_for(intent)
            self._staging.parent.mkdir(parents=True, exist_ok=True)
            self._claim = self._lock()
            try:
                self.check(intent)
                if not intent.resume:
                    _remove_tree(self._staging)
                (self._staging / JOURNAL).mkdir(parents=True, exist_ok=True)
            except BaseException:
                self._unlock()
                raise

    def finished(self) -> list[FileRecord]:
        records = []
        for entry in sorted((self._staging / JOURNAL).iterdir()):
            with suppress(ValueError, TypeError, KeyError, OSError):
                record = FileRecord.from_json(entry.read_bytes())
                if (self._staging / check_path(record.path)).stat().st_size == record.size_bytes:
                    records.append(record)
        return records

    # --- writing -------------------------------------------------------------------------------------------
    @property
    def staging(self) -> FolderAddress:
        return FolderAddress(str(self._staging))

    def record(self, record: FileRecord) -> None:
        open_folder(self.staging).write(f"{JOURNAL}/{digest(record.path.encode())}.json", record.to_json())

    def put(self, path: str, data: bytes) -> WrittenFile:
        open_folder(self.staging).write(path, data)
        return WrittenFile(path, len(data), digest(data))

    def commit(self, manifest: bytes) -> None:
        with self._told():
            self.put(MANIFEST_NAME, manifest)
            self._remove_strangers()
            if self._beside:
                self._swap_in()
            else:
                self._move_in()
            self._remove_other_attempts()
            self._unlock()

    def release(self, *, discard: bool) -> None:
        if self._claim is None:
            return
        with suppress(OSError):
            if discard:
                _remove_tree(self._staging)
                if not self._beside:
                    self._staging.parent.rmdir()
        self._unlock()

    # --- parts ---------------------------------------------------------------------------------------------
    def _check_is_folder(self) -> None:
        if self._path.exists() and not self._path.is_dir():
            raise DestinationNotEmpty(
                f"{self._path} is a file, not a folder", file=str(self._path), hint="Name a folder that may be made."
            )

    def _present(self) -> list[str]:
        """Names at the destination that are not our own bookkeeping."""
        if not self._path.is_dir():
            return []
        return sorted(entry.name for entry in self._path.iterdir() if entry.name != ".unshard")

    def _check_replaceable(self, present: list[str]) -> None:
        """Overwriting replaces the whole folder, so it must hold a model and nothing that looks like anything else."""
        is_model = MANIFEST_NAME in present or "config.json" in present or "adapter_config.json" in present
        strangers = [name for name in present if (self._path / name).is_dir() and not _model_folder(self._path / name)]
        if is_model and not strangers and not (self._path / ".git").exists():
            return
        what = f"the folder {strangers[0]}" if is_model and strangers else f"{_some(present)}, and no model"
        raise DestinationNotEmpty(
            f"{self._path} won't be overwritten: it holds {what}",
            file=str(self._path),
            hint="overwrite replaces a folder that holds a model and nothing else; move the rest away first.",
        )

    def _check_space(self, intent: Intent) -> None:
        free = open_folder(FolderAddress(str(self._path))).free_bytes()
        staged = self._staging_for(intent)
        have = sum(file.stat().st_blocks * STAT_BLOCK_BYTES for file in staged.rglob("*") if file.is_file())
        if free is not None and free + have < intent.size_bytes:
            raise InsufficientResources(
                f"the disk of {self._path} has too little space: {intent.size_bytes} bytes are needed, "
                f"{free + have} are free",
                file=str(self._path),
                expected=f"{intent.size_bytes} bytes",
                found=f"{free + have} bytes",
                hint="Free some space, choose another disk, or convert to a smaller dtype.",
            )

    def _can_stage_beside(self) -> bool:
        parent = self._path.parent
        if not self._path.exists():
            return True
        return os.access(parent, os.W_OK | os.X_OK) and not os.path.ismount(self._path)

    def _staging_for(self, intent: Intent) -> Path:
        short = intent.fingerprint[:16]
        if self._can_stage_beside():
            return self._path.parent / f".{self._path.name}.unshard-{short}"
        return self._path / ".unshard" / short

    def _lock(self) -> int:
        """Hold a lock that the operating system takes back if this process dies."""
        path = self._lock_path()
        while True:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(descriptor)
                raise DestinationBusy(
                    f"another conversion is writing to {self._path}",
                    file=str(self._path),
                    hint="Wait for it to end or stop it, or choose another destination.",
                ) from None
            with suppress(FileNotFoundError):
                if path.stat().st_ino == os.fstat(descriptor).st_ino:
                    return descriptor
            os.close(descriptor)  # the holder before us removed the file between our open and our lock

    def _lock_path(self) -> Path:
        if self._beside:
            return self._path.parent / f".{self._path.name}.unshard-lock"
        return self._path / ".unshard" / "lock"

    def _unlock(self) -> None:
        if self._claim is not None:
            with suppress(OSError):
                self._lock_path().unlink()
            os.close(self._claim)
            self._claim = None
            if not self._beside:
                with suppress(OSError):
                    self._lock_path().parent.rmdir()

    def _remove_strangers(self) -> None:
        """Leave in the hidden folder only what belongs to the result: nothing of an earlier, other shape."""
        shutil.rmtree(self._staging / JOURNAL)
        keep = self._intent.paths | {MANIFEST_NAME}
        for file in [file for file in self._staging.rglob("*") if not file.is_dir()]:
            if file.relative_to(self._staging).as_posix() not in keep:
                file.unlink()
        for folder in (self._staging, *(f for f in self._staging.rglob("*") if f.is_dir())):
            _sync(folder)

    def _swap_in(self) -> None:
        try:
            self._staging.rename(self._path)  # over nothing or an empty folder
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            if not self._intent.overwrite:
                raise DestinationNotEmpty(
                    f"{self._path} was filled by somebody else meanwhile",
                    file=str(self._path),
                    hint="Look at what is there; run the command again with another destination, or with overwrite.",
                ) from None
            self._check_replaceable(self._present())
            _exchange(self._staging, self._path)
            _remove_tree(self._staging)
        _sync(self._path.parent)

    def _move_in(self) -> None:
        if self._intent.overwrite:
            for name in (MANIFEST_NAME, "config.json", "model.safetensors.index.json"):
                (self._path / name).unlink(missing_ok=True)
        elif self._present():
            raise DestinationNotEmpty(f"{self._path} was filled by somebody else meanwhile", file=str(self._path))
        weights = {path for path in self._intent.paths if path.endswith(".safetensors")}
        for path in [*sorted(weights), *order_of_writing(self._intent.paths - weights), MANIFEST_NAME]:
            target = self._path / path
            target.parent.mkdir(parents=True, exist_ok=True)
            (self._staging / path).replace(target)
            _sync(target.parent)
        keep = {path.partition("/")[0] for path in self._intent.paths} | {MANIFEST_NAME}
        for name in set(self._present()) - keep:  # an overwritten model's other files
            stale = self._path / name
            _remove_tree(stale) if stale.is_dir() and not stale.is_symlink() else stale.unlink()
        _remove_tree(self._staging)

    def _remove_other_attempts(self) -> None:
        """Clear away what attempts at other plans for this destination left: nobody can be at work on them."""
        pattern = f".{self._path.name}.unshard-{'[0-9a-f]' * 16}"
        for folder in [*self._path.parent.glob(pattern)] if self._beside else [*(self._path / ".unshard").glob("*")]:
            if folder.is_dir():
                _remove_tree(folder)

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except UnshardError:
            raise
        except OSError as error:
            raise StorageError(
                f"cannot write to {self._path}: {error.strerror or error}",
                file=str(error.filename or self._path),
                hint="Check the path, its permissions and the free space of its disk.",
            ) from error


def _model_folder(path: Path) -> bool:
    return any((path / name).exists() for name in ("adapter_config.json", "config.json", MANIFEST_NAME))


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return f"{shown} and {len(names) - 3} more" if len(names) > 3 else shown


def _exchange(a: Path, b: Path) -> None:
    """Swap two folders so that at each moment one complete model is at ``b``."""
    libc = ctypes.CDLL(None, use_errno=True)
    at_cwd = -100
    if libc.renameat2(at_cwd, os.fsencode(a), at_cwd, os.fsencode(b), RENAME_EXCHANGE) == 0:
        return
    if ctypes.get_errno() not in (errno.EINVAL, errno.ENOSYS):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(b))
    # This file system can't swap: for a moment there is nothing, but never half a model.
    aside = b.with_name(f".{b.name}.unshard-replaced")
    b.rename(aside)
    a.rename(b)
    aside.rename(a)


def _remove_tree(path: Path) -> None:
    if path.exists():
        shutil.rmtree(path)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
