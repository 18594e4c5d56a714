"""A result in an object store: everything that makes it look like a model comes after the weights.

A store has no rename, so files go where they belong at once. Bookkeeping lies under ``.unshard/``: a claim, which
keeps other conversions out while it is renewed, and the journal of whole files. An overwrite removes the old
manifest, config.json and index first and is therefore not atomic.
"""

from __future__ import annotations

import json
import re
import secrets
import threading
import time
from contextlib import suppress
from typing import Any

from workers.destination import COMMIT_LAST, INDEX_SUFFIX, Destination, Intent, check_replaceable, describe
from workers.errors import DestinationBusy, DestinationNotEmpty, UnshardError
from workers.manifest import MANIFEST_NAME, FileRecord, WrittenFile, digest
from workers.storage import Folder, FolderAddress, WriteConflict

BOOKKEEPING = ".unshard"
CLAIM = f"{BOOKKEEPING}/claim.json"
STARTED = "started.json"
RENEW_EVERY_S = 20.0
STALE_AFTER_S = 90.0
"""A claim that was not renewed for this long belongs to a process that died. Clocks may differ by less than that."""


class StoreDestination(Destination):
    """A prefix of a bucket."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._stop = threading.Event()
        self._renewer: threading.Thread | None = None
        self._claim_version = ""
        self._claim_lock = threading.Lock()
        self._lost = threading.Event()
        self._replaced: set[str] = set()
        self._written: set[str] = set()
        """Files here that this attempt has written, or an earlier one at the same plan."""

    def check(self, intent: Intent) -> None:
        present = {file.path: file.size_bytes for file in self._folder.list() if not _is_bookkeeping(file.path)}
        ours = frozenset() if MANIFEST_NAME in present else self._started()
        strangers = {path: size for path, size in present.items() if path not in ours}
        if not strangers:
            return
        if not intent.overwrite:
            shown = ", ".join(sorted(strangers)[:3])
            more = f" and {len(strangers) - 3} more" if len(strangers) > 3 else ""
            raise DestinationNotEmpty(
                f"{describe(self._folder)} is not empty: it holds {shown}{more}",
                file=describe(self._folder),
                hint="Choose another destination, or pass overwrite to replace the model there.",
            )
        check_replaceable(describe(self._folder), strangers, self.manifest())

    def manifest(self) -> bytes | None:
        return self._folder.read(MANIFEST_NAME) if self._folder.stat(MANIFEST_NAME) else None

    def claim(self, intent: Intent) -> None:
        self._intent = intent
        self._take_claim()
        try:
            self.check(intent)
            self._journal = f"{BOOKKEEPING}/{intent.fingerprint}"
            self._replaced = {file.path for file in self._folder.list() if not _is_bookkeeping(file.path)}
            if not intent.resume:
                self._folder.delete_prefix(self._journal)
            # What is there now and what will be is this attempt's from here on, also for one that comes after it.
            started = {"attempt": intent.attempt, "paths": sorted(intent.paths | self._replaced)}
            self._folder.write(f"{self._journal}/{STARTED}", json.dumps(started).encode())
            last = [MANIFEST_NAME, *COMMIT_LAST, *(path for path in self._replaced if path.endswith(INDEX_SUFFIX))]
            self._folder.delete([path for path in last if path in self._replaced])
        except BaseException:
            self._give_claim_back()
            raise

    def finished(self) -> list[FileRecord]:
        records = []
        for entry in self._folder.list(self._journal):
            if entry.path.endswith(STARTED):
                continue
            with suppress(ValueError, TypeError, KeyError, UnshardError):
                record = FileRecord.from_json(self._folder.read(entry.path))
                there = self._folder.stat(record.path)
                if there and there.size_bytes == record.size_bytes and record.etag and there.etag == record.etag:
                    records.append(record)
        self._written.update(record.path for record in records)
        return records

    @property
    def staging(self) -> FolderAddress:
        return self._folder.address

    def keep(self) -> None:
        self._keep_claim()

    def record(self, record: FileRecord) -> None:
        self._stop_if_lost()
        self._written.add(record.path)
        self._folder.write(f"{self._journal}/{digest(record.path.encode())}.json", record.to_json())

    def put(self, path: str, data: bytes) -> WrittenFile:
        self._stop_if_lost()
        self._written.add(path)
        self._folder.write(path, data)
        return WrittenFile(path, len(data), digest(data))

    def commit(self, manifest: bytes) -> None:
        self._keep_claim()
        try:
            self._folder.write(MANIFEST_NAME, manifest, if_absent=True)
        except WriteConflict:
            if self.manifest() != manifest:  # a write whose answer was lost conflicts with itself
                raise DestinationBusy(
                    f"another conversion finished at {describe(self._folder)} first",
                    file=describe(self._folder),
                    hint="Look at the model that is there; its unshard.json says what it was made from.",
                ) from None
        # The model is there: what can't be cleared away now is no failure.
        with suppress(UnshardError):
            self._folder.delete(sorted(self._replaced - self._intent.paths - {MANIFEST_NAME}))
            for journal in {file.path.split("/")[1] for file in self._folder.list(BOOKKEEPING)} - {"claim.json"}:
                self._folder.delete_prefix(f"{BOOKKEEPING}/{journal}")
        self._give_claim_back()

    def release(self, *, discard: bool) -> None:
        if self._renewer is None:
            return
        with suppress(UnshardError):
            if discard and not self._lost.is_set() and self._is_ours(self._folder.read(CLAIM)):
                # Without overwrite nothing was here but what attempts at unfinished plans have left.
                began = frozenset() if self._intent.overwrite else self._intent.paths
                self._folder.delete(sorted(self._written | began))
                self._folder.delete_prefix(self._journal)
        self._give_claim_back()

    def clear(self, fingerprint: str) -> None:
        self._journal = f"{BOOKKEEPING}/{fingerprint}"
        if not self._folder.list(self._journal):
            return
        nothing: frozenset[str] = frozenset()
        self._intent = Intent(fingerprint, f"clear-{secrets.token_hex(8)}", nothing, 0, overwrite=False, resume=True)
        self._take_claim()
        try:
            if self.manifest() is None:
                # What the journal proves by its ETag; anything else may be somebody else's by now.
                self._folder.delete([record.path for record in self.finished()])
            self._folder.delete_prefix(self._journal)
        finally:
            self._give_claim_back()

    def lost(self) -> UnshardError | None:
        return self._taken_over() if self._lost.is_set() else None

    def _stop_if_lost(self) -> None:
        if self._lost.is_set():
            raise self._taken_over()

    def _taken_over(self) -> DestinationBusy:
        return DestinationBusy(
            f"another conversion has taken over {describe(self._folder)}: this one was silent for too long",
            file=describe(self._folder),
            hint="Let the other one finish.",
        )

    # --- claim ---------------------------------------------------------------------------------------------
    def _started(self) -> frozenset[str]:
        """Files here that belong to attempts which did not finish, whatever their plan was."""
        paths: set[str] = set()
        for entry in self._folder.list(BOOKKEEPING):
            if entry.path.endswith(STARTED):
                with suppress(ValueError, TypeError, KeyError, UnshardError):
                    paths.update(json.loads(self._folder.read(entry.path))["paths"])
        return frozenset(paths)

    def _take_claim(self) -> None:
        content = self._claim_content()
        try:
            self._claim_version = self._folder.write(CLAIM, content, if_absent=True).version
        except WriteConflict:
            self._claim_version = self._take_over(content)
        self._stop.clear()
        self._renewer = threading.Thread(target=self._renew, name="unshard-claim", daemon=True)
        self._renewer.start()

    def _take_over(self, content: bytes) -> str:
        entry = self._folder.stat(CLAIM)
        held: dict[str, Any] = {}
        with suppress(ValueError, TypeError, UnshardError):
            held = dict(json.loads(self._folder.read(CLAIM)))
        renewed = held.get("renewed_at", 0)
        if held.get("attempt") == self._intent.attempt and entry:
            return entry.version  # our own write, whose answer was lost
        is_void = time.time() - renewed >= STALE_AFTER_S or _succeeds(self._intent.attempt, held.get("attempt"))
        if entry is None or not is_void:
            raise DestinationBusy(
                f"another conversion ({held.get('attempt', 'unknown')}) is writing to {describe(self._folder)}",
                file=describe(self._folder),
                hint=f"Wait for it to end. If it died, its claim is void after {STALE_AFTER_S:.0f} s.",
            )
        try:
            return self._folder.write(CLAIM, content, if_version=entry.version).version
        except WriteConflict:
            raise DestinationBusy(
                f"another conversion has just taken over {describe(self._folder)}", file=describe(self._folder)
            ) from None

    def _claim_content(self) -> bytes:
        return json.dumps({"attempt": self._intent.attempt, "renewed_at": time.time()}).encode()

    def _renew(self) -> None:
        while not self._stop.wait(RENEW_EVERY_S):
            with suppress(UnshardError):  # a store that is away for a moment; commit looks again
                self._keep_claim()

    def _keep_claim(self) -> None:
        """Renew the claim, or find out that somebody else has it."""
        with self._claim_lock:
            try:
                entry = self._folder.write(CLAIM, self._claim_content(), if_version=self._claim_version)
            except WriteConflict:
                self._claim_version = self._own_version()  # a renewal whose answer was lost conflicts with itself
            else:
                self._claim_version = entry.version

    def _own_version(self) -> str:
        entry = self._folder.stat(CLAIM)
        if entry is not None and self._is_ours(self._folder.read(CLAIM)):
            return entry.version
        self._stop.set()
        self._lost.set()
        self.on_lost()
        raise self._taken_over()

    def _is_ours(self, claim: bytes) -> bool:
        with suppress(ValueError, AttributeError):
            return bool(json.loads(claim).get("attempt") == self._intent.attempt)
        return False

    def _give_claim_back(self) -> None:
        if self._renewer is not None:
            self._stop.set()
            self._renewer.join()
            self._renewer = None
        with suppress(UnshardError):
            if self._is_ours(self._folder.read(CLAIM)):
                self._folder.delete([CLAIM])


def _succeeds(attempt: str, held: object) -> bool:
    """Whether an attempt comes after another one at the same job, which then has lost its claim.

    Should that one be alive, it finds this out when it renews the claim or commits; what both write is the same.
    """
    mine, theirs = _NUMBERED.fullmatch(attempt), _NUMBERED.fullmatch(held if isinstance(held, str) else "")
    return bool(mine and theirs and mine[1] == theirs[1] and int(mine[2]) > int(theirs[2]))


_NUMBERED = re.compile(r"(job_\w+)-\d+-(\d+)")
"""Attempts of a service: job, attempt, and a number that grows whenever somebody takes the job."""


def _is_bookkeeping(path: str) -> bool:
    return path.startswith(f"{BOOKKEEPING}/")
