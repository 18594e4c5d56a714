"""The pipeline from end to end: what the command line, the service and Python callers use.

    result = convert("checkpoints/global_step_100", "models/step-100")

Imports neither torch nor ray.
"""

from __future__ import annotations

import dataclasses
import json
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from workers.checks import ByteProbe, compare_replicas, finish_checksums, refuse_changed_files
from workers.collection import Collection
from workers.destination import Destination, Intent, open_destination, order_of_writing
from workers.engines import Engine, Work
from workers.engines.threads import ThreadsEngine
from workers.errors import Cancelled, CorruptFile, DestinationNotEmpty, InputError, InsufficientResources
from workers.events import Committed, Observer, Planned, Started, Verifying, Warned, ignore
from workers.families import map_checkpoint
from workers.families.custom import read_mapping
from workers.finished import finished_manifest
from workers.formats import open_checkpoint
from workers.manifest import (
    FileRecord,
    WrittenFile,
    build_manifest,
    digest,
    value_warnings,
)
from workers.options import ConvertOptions
from workers.plan import Plan, make_plan
from workers.storage import Folder, FolderAddress, bounded, open_folder
from workers.tokenizer_files import content_of
from workers.verify import prove_record


@dataclass(frozen=True, slots=True)
class Result:
    """A finished conversion."""

    location: str
    manifest: dict[str, Any]
    plan_summary: dict[str, Any]
    seconds: float
    bytes_written: int
    bytes_read: int
    bytes_merged: int
    """Bytes of the weights that this attempt made; an earlier one's finished files are not in it."""
    warnings: tuple[str, ...]
    already_there: bool = False
    """An earlier attempt had finished this very plan: nothing was done."""


def plan(
    source: str, destination: str, options: ConvertOptions | None = None, *, within: tuple[str, ...] = ()
) -> Plan:
    """Plan a conversion and look whether its destination could take it, or has its model; nothing is written."""
    options = options or ConvertOptions()
    made = plan_source(source, options, within=within)
    target = _open_apart(made, destination)
    if finished_manifest(made, target, destination) is None:
        target.check(_intent(made, "preview"))
    return made


def plan_source(source: str, options: ConvertOptions, *, within: tuple[str, ...] = ()) -> Plan:
    """Open a source, map its names and lay the result out.

    ``within`` are the only trees of the file system that may be read, also behind links and when the plan is carried
    out; none given: all.
    """
    with bounded(within):
        return _plan_source(source, options)


def _plan_source(source: str, options: ConvertOptions) -> Plan:
    if options.mapping is not None:
        # From here on the options hold the mapping itself, so that the manifest does and no later change counts.
        mapping_text = read_mapping(options.mapping, options.source_profile).text
        options = dataclasses.replace(options, mapping=mapping_text)
    folder = open_folder(FolderAddress(source, options.source_profile))
    try:
        checkpoint = open_checkpoint(folder, options)
        mapping = map_checkpoint(checkpoint, options, ByteProbe(checkpoint, open_folder(checkpoint.address)))
        return make_plan(checkpoint, mapping, options)
    finally:
        folder.close()


def convert(  # noqa: PLR0913 - the one call of the Python interface; all but three are keywords
    source: str,
    destination: str,
    options: ConvertOptions | None = None,
    *,
    engine: Engine | None = None,
    observer: Observer = ignore,
    cancel: threading.Event | None = None,
    attempt: str | None = None,
    may_commit: Callable[[], None] | None = None,
) -> Result:
    """Convert a checkpoint into a Hugging Face model at ``destination``.

    Raises an ``UnshardError``; then nothing that loads as a model is at the destination that wasn't there before.
    Finished output files are kept for the next attempt, unless the source is at fault. ``cancel`` stops within a
    second. ``may_commit`` is called right before the commit and may raise, for whoever leases jobs.
    """
    began = time.monotonic()
    made = plan_source(source, options or ConvertOptions())
    result = run_plan(
        made,
        destination,
        engine=engine,
        observer=observer,
        cancel=cancel,
        attempt=attempt,
        may_commit=may_commit,
    )
    return dataclasses.replace(result, seconds=time.monotonic() - began)


def run_plan(  # noqa: PLR0913 - as convert
    made: Plan,
    destination: str,
    *,
    engine: Engine | None = None,
    observer: Observer = ignore,
    cancel: threading.Event | None = None,
    attempt: str | None = None,
    may_commit: Callable[[], None] | None = None,
) -> Result:
    """Carry a plan out; see ``convert``."""
    began = time.monotonic()
    summary = made.summary()
    observer(Planned(summary, made.table))
    target = _open_apart(made, destination)
    if (manifest := finished_manifest(made, target, destination)) is not None:
        observer(Committed(destination, manifest))
        return Result(destination, manifest, summary, time.monotonic() - began, 0, 0, 0, (), already_there=True)
    run = _Conversion(
        plan=made,
        summary=summary,
        destination=target,
        engine=engine or ThreadsEngine(),
        observer=observer,
        cancel=cancel or threading.Event(),
        attempt=attempt or f"attempt-{secrets.token_hex(8)}",
        may_commit=may_commit or (lambda: None),
    )
    manifest, bytes_read, bytes_merged = run.run()
    observer(Committed(destination, manifest))
    return Result(
        location=destination,
        manifest=manifest,
        plan_summary=summary,
        seconds=time.monotonic() - began,
        bytes_written=made.bytes_total,
        bytes_read=bytes_read,
        bytes_merged=bytes_merged,
        warnings=tuple(manifest["warnings"]),
    )


def _open_apart(made: Plan, destination: str) -> Destination:
    """Open the destination; refuse one that the source's own files lie in, since overwriting would take them away."""
    address = FolderAddress(destination, made.options.destination_profile)
    place = _place(open_folder(address))
    checkpoint = made.checkpoint
    sources = [(file.folder or checkpoint.address, file.path) for file in checkpoint.files]
    sources += [(side.folder or checkpoint.address, side.source_path) for side in made.mapping.side_files]
    if checkpoint.config_path:
        sources.append((checkpoint.address, checkpoint.config_path))
    places = {folder: _place(open_folder(folder)) for folder in {folder for folder, _ in sources}}
    for folder, path in sources:
        if f"{places[folder]}/{path}".startswith(f"{place}/"):
            raise DestinationNotEmpty(
                f"{destination} can't be the destination: {path} of the source lies in it",
                file=path,
                hint="Choose a folder that holds nothing of the source; a new one inside of it will do.",
            )
    return open_destination(address)


def _place(folder: Folder) -> str:
    """Where a folder is, with links followed, to compare with others."""
    local = folder.local_path()
    return folder.address.url.rstrip("/") if local is None else str(Path(local).resolve())


def _intent(made: Plan, attempt: str) -> Intent:
    return Intent(
        fingerprint=made.fingerprint,
        attempt=attempt,
        paths=made.paths,
        size_bytes=made.bytes_total,
        overwrite=made.options.overwrite,
        resume=made.options.resume,
    )


@dataclass(slots=True)
class _Conversion:
    """One attempt at a plan."""

    plan: Plan
    summary: dict[str, Any]
    """The plan's, which asks every target what it reads: made once."""
    destination: Destination
    engine: Engine
    observer: Observer
    cancel: threading.Event
    attempt: str
    may_commit: Callable[[], None]
    warnings: list[str] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self) -> tuple[dict[str, Any], int, int]:
        """From the claim to the commit; the manifest, the bytes that were read and those that were merged."""
        self.destination.on_lost = self.cancel.set
        self.destination.claim(_intent(self.plan, self.attempt))
        try:
            return self._make()
        except BaseException as error:
            # A damaged source won't get better by itself; after anything else finished files are worth keeping.
            lost = self.destination.lost()
            self.destination.release(discard=isinstance(error, InputError))
            if lost is not None:
                raise lost from error
            if isinstance(error, MemoryError):
                raise InsufficientResources(
                    "memory ran out in the middle of the conversion",
                    expected=f"{self.plan.worker_bytes} bytes for each worker",
                    hint="Give the machine more memory, or allow less with --memory; finished files are kept.",
                ) from error
            raise

    def _make(self) -> tuple[dict[str, Any], int, int]:
        files = self.plan.layout.files
        collection = Collection(self.plan.recipe, files, self.observer)
        kept = self._keep_finished(collection)
        self.observer(Started(self.attempt, tuple(files[number].path for number in kept)))
        self.engine.run(self._work(collection, tuple(n for n in range(len(files)) if n not in kept)))
        self._stop_if_cancelled()
        self.observer(Verifying())
        bytes_read = collection.bytes_read + self._check_source(collection)
        records = [collection.records[number] for number in range(len(files))]
        self._check_written(records)
        for warning in (*self.warnings, *value_warnings(records)):
            self.observer(Warned(warning))
        small = self._write_small_files()
        self._stop_if_cancelled()
        self.may_commit()
        manifest = build_manifest(
            self.summary, [(record, self._parts_of(n)) for n, record in enumerate(records)], small, self.attempt
        )
        manifest["warnings"] += self.warnings
        self.destination.commit((json.dumps(manifest, indent=1) + "\n").encode())
        return manifest, bytes_read, collection.bytes_merged

    def _work(self, collection: Collection, pending: tuple[int, ...]) -> Work:
        return Work(
            recipe=self.plan.recipe,
            files=self.plan.layout.files,
            pending=pending,
            source=self.plan.checkpoint.address,
            staging=self.destination.staging,
            memory_bytes=self.plan.options.memory_bytes,
            worker_bytes=self.plan.worker_bytes,
            fetched_bytes=self.plan.fetched_bytes,
            collection=collection,
            before_file=self.destination.keep,
            file_finished=lambda file, etag: self._file_finished(collection, file, etag),
            cancel=self.cancel,
            attempt=self.attempt,
        )

    def _file_finished(self, collection: Collection, file: int, etag: str | None) -> None:
        record = collection.file_done(file, etag)
        with self._lock:
            self.destination.record(record)

    def _keep_finished(self, collection: Collection) -> set[int]:
        """Files that an earlier attempt finished, proved by their digests (or by the store's ETag)."""
        numbers = {file.path: number for number, file in enumerate(self.plan.layout.files)}
        kept: set[int] = set()
        for record in self.destination.finished():
            number = numbers.get(record.path)
            if number is None or not self._fits(number, record) or record.source_version != collection.source_version:
                continue
            if record.etag is None and not self._is_whole(record, number):
                continue
            collection.keep(record, number)
            kept.add(number)
        return kept

    def _fits(self, number: int, record: FileRecord) -> bool:
        file = self.plan.layout.files[number]
        told = len(record.part_digests), record.size_bytes, record.header_digest
        return told == (file.stop_part - file.first_part, file.size_bytes, digest(file.header))

    def _is_whole(self, record: FileRecord, number: int) -> bool:
        folder = open_folder(self.destination.staging)
        try:
            prove_record(folder, record, self._parts_of(number), cancel=self.cancel)
        except CorruptFile:
            return False
        finally:
            folder.close()
        return True

    def _parts_of(self, file: int) -> list[tuple[int, int]]:
        parts = self.plan.layout.parts
        rows = slice(self.plan.layout.files[file].first_part, self.plan.layout.files[file].stop_part)
        return list(zip(parts.offset[rows].tolist(), parts.length[rows].tolist(), strict=True))

    def _check_source(self, collection: Collection) -> int:
        """Finish the checksums of what was read in part, compare replicas, see that no file changed meanwhile."""
        checkpoint = self.plan.checkpoint
        folder = open_folder(checkpoint.address)
        try:
            if self.plan.options.verify == "none":
                return 0
            extra = finish_checksums(checkpoint, folder, collection.ledger, self.cancel)
            self.warnings += compare_replicas(checkpoint, folder, list(self.plan.doubtful_replicas), self.cancel)
            refuse_changed_files(checkpoint, folder, self.cancel)
            return extra
        finally:
            folder.close()

    def _check_written(self, records: Sequence[FileRecord]) -> None:
        if self.plan.options.verify != "reread":
            return
        folder = open_folder(self.destination.staging)
        try:
            for number, record in enumerate(records):
                prove_record(folder, record, self._parts_of(number), cancel=self.cancel)
        finally:
            folder.close()

    def _write_small_files(self) -> list[WrittenFile]:
        contents: dict[str, Callable[[], bytes]] = {}
        folder = open_folder(self.plan.checkpoint.address)
        for side in self.plan.mapping.side_files:
            contents[side.target_path] = partial(content_of, side, folder)
        for path, data in (*self.plan.layout.indexes, *self.plan.mapping.files):
            contents[path] = lambda data=data: data  # type: ignore[misc]
        return [self.destination.put(path, contents[path]()) for path in order_of_writing(contents)]

    def _stop_if_cancelled(self) -> None:
        if self.cancel.is_set():
            raise Cancelled("the conversion was stopped", hint="Run the same command again to resume it.")
