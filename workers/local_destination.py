"""A result on a local or shared file system: written in a hidden folder, synced, then renamed into place.

The hidden folder lies beside the destination, so that one rename makes the whole model appear. Where the
destination is a mount point or its parent can't be written, the hidden folder lies inside it and the files are
moved out one by one, the manifest last.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import glob
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from workers.collect import STAT_BLOCK_BYTES
from workers.destination import Destination, Intent, check_replaceable, describe, order_of_writing
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
from workers.storage.space import is_full, no_space

JOURNAL = ".unshard-journal"
MOVING = "moving.json"
FINGERPRINT_DIGITS = 16
"""Digits of a plan's fingerprint that name its hidden folder."""

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
                self._check_replaceable()
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
                self._restore_replaced()
                self._move_back()
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
            self._check_whole()
            if self._beside:
                self._swap_in()
            else:
                self._move_in()
        # The model is there: what can't be cleared away now is no failure.
        with suppress(OSError):
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

    def clear(self, fingerprint: str) -> None:
        short = fingerprint[:FINGERPRINT_DIGITS]
        beside, inside = self._beside_for(short), self._path / ".unshard" / short
        with self._told():
            for self._beside, staging in ((True, beside), (False, inside)):
                if not (staging / JOURNAL).is_dir():
                    continue
                self._claim = self._lock()
                try:
                    if not self._beside:
                        self._move_back()
                    _remove_tree(staging)
                finally:
                    self._unlock()

    def _restore_replaced(self) -> None:
        """Put the old model back that a swap in two steps, interrupted between them, has left aside.

        After the second step the new model is whole, and the old one only in the way of the next swap.
        """
        aside = _aside(self._path)
        if not aside.is_dir():
            return
        if not self._path.exists() or not any(self._path.iterdir()):
            aside.rename(self._path)
        elif self.manifest() is not None:
            _remove_tree(aside)

    # --- parts ---------------------------------------------------------------------------------------------
    def _check_is_folder(self) -> None:
        nearest = next(path for path in (self._path, *self._path.parents) if path.exists())
        if not nearest.is_dir():
            raise DestinationNotEmpty(
                f"{nearest} is a file, not a folder", file=str(nearest), hint="Name a folder that may be made."
            )

    def _present(self) -> list[str]:
        """Names at the destination that are not our own bookkeeping."""
        if not self._path.is_dir():
            return []
        moving = {path.partition("/")[0] for path in self._moving()}
        return sorted(entry.name for entry in self._path.iterdir() if entry.name not in {".unshard", *moving})

    def _check_replaceable(self) -> None:
        """Overwriting replaces the whole folder, so it must hold a model and nothing else."""
        present = {
            file.relative_to(self._path).as_posix(): file.lstat().st_size
            for file in self._path.rglob("*")
            if (file.is_symlink() or not file.is_dir()) and ".unshard" not in file.relative_to(self._path).parts[:1]
        }
        check_replaceable(str(self._path), present, self.manifest())

    def manifest(self) -> bytes | None:
        with suppress(OSError):
            return (self._path / MANIFEST_NAME).read_bytes()
        return None

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
        short = intent.fingerprint[:FINGERPRINT_DIGITS]
        return self._beside_for(short) if self._can_stage_beside() else self._path / ".unshard" / short

    def _beside_for(self, short: str) -> Path:
        return self._path.parent / f".{self._path.name}.unshard-{short}"

    def _lock(self) -> int:
        """Hold a lock that the operating system takes back if this process dies."""
        path = self._lock_path()
        while True:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                os.close(descriptor)
                if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                    raise StorageError(
                        f"the file system of {self._path} can't lock files: {error.strerror}",
                        file=str(path),
                        hint="Mount it with locks (Lustre: -o flock), or choose another destination.",
                    ) from None
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

    def _check_whole(self) -> None:
        """See that every file of the result is really here: on a cluster others have written them."""
        missing = sorted(path for path in self._intent.paths if not (self._staging / path).is_file())
        if missing:
            raise StorageError(
                f"{missing[0]} is not where it was written ({len(missing)} files are missing)",
                file=str(self._staging / missing[0]),
                hint="All nodes must mount the destination's file system at the same path; or convert to a bucket.",
            )

    def _remove_strangers(self) -> None:
        """Leave in the hidden folder only what belongs to the result: nothing of an earlier, other shape."""
        _remove_tree(self._staging / JOURNAL)
        keep = self._intent.paths | {MANIFEST_NAME}
        for file in [file for file in self._staging.rglob("*") if not file.is_dir()]:
            if file.relative_to(self._staging).as_posix() not in keep:
                file.unlink()
        for folder in (self._staging, *(f for f in self._staging.rglob("*") if f.is_dir())):
            _sync(folder)

    def _swap_in(self) -> None:
        self._remove_strangers()
        self._take_over_rights()
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
            self._check_replaceable()
            _exchange(self._staging, self._path)
            _sync(self._path.parent)  # the old model must not be gone from the disk before the new one is there
            with suppress(OSError):
                _remove_tree(self._staging)
        _sync(self._path.parent)

    def _take_over_rights(self) -> None:
        """Give the result the owner, group and mode of the folder that it replaces, as far as we may."""
        with suppress(OSError):
            before = self._path.stat()
            os.chown(self._staging, before.st_uid, before.st_gid)
            self._staging.chmod(before.st_mode & 0o7777)

    def _move_in(self) -> None:
        present = self._present()
        if present and not self._intent.overwrite and not self._moving():
            raise DestinationNotEmpty(f"{self._path} was filled by somebody else meanwhile", file=str(self._path))
        # From here on the files at the destination are ours: an attempt that is interrupted among the moves goes on.
        note = {
            "fingerprint": self._intent.fingerprint,
            "paths": sorted({*self._intent.paths, MANIFEST_NAME, *present}),
        }
        open_folder(FolderAddress(str(self._path / ".unshard"))).write(MOVING, json.dumps(note).encode())
        for name in (MANIFEST_NAME, "config.json", "model.safetensors.index.json"):
            if self._intent.overwrite:
                (self._path / name).unlink(missing_ok=True)
        weights = {path for path in self._intent.paths if path.endswith(".safetensors")}
        for path in [*sorted(weights), *order_of_writing(self._intent.paths - weights), MANIFEST_NAME]:
            target = self._path / path
            target.parent.mkdir(parents=True, exist_ok=True)
            (self._staging / path).replace(target)
            _sync(target.parent)
        keep = {path.partition("/")[0] for path in self._intent.paths} | {MANIFEST_NAME}
        with suppress(OSError):
            for name in set(present) - keep:  # an overwritten model's other files, all of them known as such
                stale = self._path / name
                _remove_tree(stale) if stale.is_dir() and not stale.is_symlink() else stale.unlink()
            (self._path / ".unshard" / MOVING).unlink()
            _remove_tree(self._staging)

    def _moving(self) -> set[str]:
        """Files at the destination that an interrupted move has left there or was about to replace."""
        with suppress(OSError, ValueError, TypeError, KeyError):
            return set(json.loads((self._path / ".unshard" / MOVING).read_bytes())["paths"])
        return set()

    def _move_back(self) -> None:
        """Undo an interrupted move: the files return to where their attempt has written them, or go."""
        with suppress(OSError, ValueError, TypeError, KeyError):
            note = json.loads((self._path / ".unshard" / MOVING).read_bytes())
            staging = self._path / ".unshard" / str(note["fingerprint"])[:FINGERPRINT_DIGITS]
            for path in map(check_path, note["paths"]):
                source = self._path / path
                if source.is_file() and staging.is_dir() and not (staging / path).exists():
                    (staging / path).parent.mkdir(parents=True, exist_ok=True)
                    source.replace(staging / path)
            (self._path / ".unshard" / MOVING).unlink()

    def _remove_other_attempts(self) -> None:
        """Clear away what attempts at other plans for this destination left: nobody can be at work on them."""
        pattern = f".{glob.escape(self._path.name)}.unshard-{'[0-9a-f]' * FINGERPRINT_DIGITS}"
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
            if is_full(error):
                raise no_space(str(error.filename or self._path)) from error
            raise StorageError(
                f"cannot write to {self._path}: {error.strerror or error}",
                file=str(error.filename or self._path),
                hint="Check the path and its permissions.",
            ) from error


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
    aside = _aside(b)
    b.rename(aside)
    try:
        a.rename(b)
    except BaseException:
        aside.rename(b)
        raise
    aside.rename(a)


def _aside(path: Path) -> Path:
    return path.with_name(f".{path.name}.unshard-replaced")


def _remove_tree(path: Path) -> None:
    if path.exists():
        shutil.rmtree(path)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
