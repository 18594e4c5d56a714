"""A result in an object store: everything that makes it look like a model comes after the weights.

A store has no rename, so files go where they belong at once. Bookkeeping lies under ``.unshard/``: a claim, which
keeps other conversions out while it is renewed, and the journal of whole files. An overwrite removes the old
manifest, config.json and index first and is therefore not atomic.
"""

from __future__ import annotations

import json
import threading
import time
from contextlib import suppress

from workers.destination import COMMIT_LAST, INDEX_SUFFIX, Destination, Intent, describe
from workers.errors import DestinationBusy, DestinationNotEmpty, UnshardError
from workers.manifest import MANIFEST_NAME, FileRecord, WrittenFile, digest
from workers.storage import Folder, FolderAddress, WriteConflict

BOOKKEEPING = ".unshard"
CLAIM = f"{BOOKKEEPING}/claim.json"
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

    def check(self, intent: Intent) -> None:
        present = [file.path for file in self._folder.list() if not file.path.startswith(f"{BOOKKEEPING}/")]
        ours = intent.paths if self._has_journal(intent) else frozenset()
        strangers = [path for path in present if path not in ours]
        if MANIFEST_NAME in present:
            strangers = present
        if strangers and not intent.overwrite:
            raise DestinationNotEmpty(
                f"{describe(self._folder)} is not empty: it holds {', '.join(strangers[:3])}"
                + (f" and {len(strangers) - 3} more" if len(strangers) > 3 else ""),
                file=describe(self._folder),
                hint="Choose another destination, or pass overwrite to replace the model there.",
            )
        if strangers and not {MANIFEST_NAME, "config.json", "adapter_config.json"} & set(present):
            raise DestinationNotEmpty(
                f"{describe(self._folder)} won't be overwritten: it holds {strangers[0]}, and no model",
                file=describe(self._folder),
                hint="overwrite replaces a model; move other objects away first.",
            )

    def claim(self, intent: Intent) -> None:
        self._intent = intent
        self._take_claim()
        try:
            self.check(intent)
            self._journal = f"{BOOKKEEPING}/{intent.fingerprint}"
            if not intent.resume:
                self._folder.delete_prefix(self._journal)
            if intent.overwrite:
                last = [MANIFEST_NAME, *COMMIT_LAST]
                last += [file.path for file in self._folder.list(recursive=False) if file.path.endswith(INDEX_SUFFIX)]
                self._folder.delete(last)
            self._folder.write(f"{self._journal}/started", intent.attempt.encode())
        except BaseException:
            self._give_claim_back()
            raise

    def finished(self) -> list[FileRecord]:
        records = []
        for entry in self._folder.list(self._journal):
            if not entry.path.endswith(".json"):
                continue
            with suppress(ValueError, TypeError, KeyError, UnshardError):
                record = FileRecord.from_json(self._folder.read(entry.path))
                there = self._folder.stat(record.path)
                if there and there.size_bytes == record.size_bytes and record.etag and there.etag == record.etag:
                    records.append(record)
        return records

    @property
    def staging(self) -> FolderAddress:
        return self._folder.address

    def record(self, record: FileRecord) -> None:
        self._folder.write(f"{self._journal}/{digest(record.path.encode())}.json", record.to_json())

    def put(self, path: str, data: bytes) -> WrittenFile:
        self._folder.write(path, data)
        return WrittenFile(path, len(data), digest(data))

    def commit(self, manifest: bytes) -> None:
        self._keep_claim()
        try:
            self._folder.write(MANIFEST_NAME, manifest, if_absent=True)
        except WriteConflict:
            raise DestinationBusy(
                f"another conversion finished at {describe(self._folder)} first",
                file=describe(self._folder),
                hint="Look at the model that is there; its unshard.json says what it was made from.",
            ) from None
        keep = self._intent.paths | {MANIFEST_NAME}
        present = [file.path for file in self._folder.list() if not file.path.startswith(f"{BOOKKEEPING}/")]
        if self._intent.overwrite:
            self._folder.delete([path for path in present if path not in keep])
        self._give_claim_back()
        self._folder.delete_prefix(BOOKKEEPING)

    def release(self, *, discard: bool) -> None:
        if self._renewer is None:
            return
        with suppress(UnshardError):
            if discard:
                self._folder.delete(sorted(self._intent.paths))
                self._folder.delete_prefix(self._journal)
        self._give_claim_back()

    # --- claim ---------------------------------------------------------------------------------------------
    def _has_journal(self, intent: Intent) -> bool:
        return self._folder.stat(f"{BOOKKEEPING}/{intent.fingerprint}/started") is not None

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
        held = {}
        with suppress(ValueError, UnshardError):
            held = json.loads(self._folder.read(CLAIM))
        renewed = held.get("renewed_at", 0)
        if held.get("attempt") == self._intent.attempt and entry:
            return entry.version  # our own write, whose answer was lost
        if entry is None or time.time() - renewed < STALE_AFTER_S:
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
        raise DestinationBusy(
            f"another conversion has taken over {describe(self._folder)}: this one was silent for too long",
            file=describe(self._folder),
            hint="Let the other one finish.",
        )

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
