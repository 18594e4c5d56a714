"""What belongs to a job beside its row: attempts, output files, and documents that are large and seldom read."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import zstandard
from sqlalchemy import Connection, delete, insert, select, update

from service.db.database import Database
from service.db.tables import job_attempts, job_documents, shards
from service.jobs.records import JsonObject, now

TENSORS = "tensors"
REPORT = "report"
BLOCK_ROWS = 1000
"""Rows of a list in one line of its document: a page is found without reading what lies before it as JSON."""


@dataclass(frozen=True, slots=True)
class JobAttempt:
    """One try at a job; ``outcome`` is None while it runs."""

    attempt: int
    started_at: datetime
    ended_at: datetime | None
    outcome: str | None
    error: JsonObject | None


@dataclass(frozen=True, slots=True)
class Shard:
    """An output file of a job's plan."""

    position: int
    path: str
    size_bytes: int
    tensors: int
    digest: str | None
    finished_at: datetime | None

    @property
    def state(self) -> str:
        return "pending" if self.finished_at is None else "done"


class JobParts:
    """Reads what belongs to a job; whether the caller may see the job is asked elsewhere."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def attempts(self, job_id: str) -> list[JobAttempt]:
        """All attempts, the first one first."""
        columns = [job_attempts.c[name] for name in JobAttempt.__dataclass_fields__]
        query = select(*columns).where(job_attempts.c.job_id == job_id).order_by(job_attempts.c.attempt)
        with self._database.read() as connection:
            return [JobAttempt(*row) for row in connection.execute(query)]

    def shards(self, job_id: str, after: int, limit: int) -> list[Shard]:
        """Output files in the order of writing, from the one after position ``after`` on."""
        columns = [shards.c[name] for name in Shard.__dataclass_fields__]
        query = select(*columns).where(shards.c.job_id == job_id, shards.c.position > after)
        with self._database.read() as connection:
            return [Shard(*row) for row in connection.execute(query.order_by(shards.c.position).limit(limit))]

    def document(self, job_id: str, name: str) -> bytes | None:
        """A document as it was packed."""
        table = job_documents
        query = select(table.c.content).where(table.c.job_id == job_id, table.c.name == name)
        with self._database.read() as connection:
            content: bytes | None = connection.execute(query).scalar()
            return content


def pack(value: Any) -> bytes:
    """A JSON value, compressed."""
    return zstandard.compress(json.dumps(value, separators=(",", ":")).encode())


def unpack(content: bytes) -> Any:
    """The JSON value of ``pack``."""
    return json.loads(zstandard.decompress(content))


def pack_rows(rows: Iterable[JsonObject]) -> bytes:
    """A list of objects, compressed block by block so that it is never whole in memory as objects."""
    compressor = zstandard.ZstdCompressor().compressobj()
    packed, block = bytearray(), []
    for row in rows:
        block.append(row)
        if len(block) == BLOCK_ROWS:
            packed += compressor.compress(json.dumps(block, separators=(",", ":")).encode() + b"\n")
            block = []
    if block:
        packed += compressor.compress(json.dumps(block, separators=(",", ":")).encode() + b"\n")
    return bytes(packed + compressor.flush())


def unpack_rows(content: bytes, start: int = 0) -> Iterator[JsonObject]:
    """The objects of ``pack_rows`` from number ``start`` on."""
    # Line by line: of a large model all of them together are many times the size of what is stored.
    with zstandard.ZstdDecompressor().stream_reader(content) as reader:
        for number, line in enumerate(io.BufferedReader(reader)):
            if (number + 1) * BLOCK_ROWS > start:
                yield from json.loads(line)[max(0, start - number * BLOCK_ROWS) :]


def begin_attempt(connection: Connection, job_id: str, attempt: int, lease_owner: str) -> None:
    """Note that an attempt starts now."""
    values = {"job_id": job_id, "attempt": attempt, "lease_owner": lease_owner, "started_at": now()}
    connection.execute(insert(job_attempts).values(**values))


def end_attempt(connection: Connection, job_id: str, attempt: int, outcome: str, error: JsonObject | None) -> None:
    """Note how an attempt ended; one that has ended already stays as it is."""
    where = (job_attempts.c.job_id == job_id, job_attempts.c.attempt == attempt, job_attempts.c.ended_at.is_(None))
    connection.execute(update(job_attempts).where(*where).values(ended_at=now(), outcome=outcome, error=error))


def enter_shards(connection: Connection, job_id: str, files: Sequence[JsonObject]) -> None:
    """Replace a job's output files by those of its new plan."""
    connection.execute(delete(shards).where(shards.c.job_id == job_id))
    rows = [
        {
            "job_id": job_id,
            "position": position,
            "path": file["name"],
            "size_bytes": file["size_bytes"],
            "tensors": file["tensors"],
        }
        for position, file in enumerate(files)
    ]
    if rows:
        connection.execute(insert(shards), rows)


def finish_shards(connection: Connection, job_id: str, digests: Mapping[str, str | None]) -> None:
    """Mark output files as finished; a digest of None leaves open which it is."""
    moment = now()
    for path, digest in digests.items():
        where = (shards.c.job_id == job_id, shards.c.path == path)
        connection.execute(update(shards).where(*where).values(digest=digest, finished_at=moment))


def keep_document(connection: Connection, job_id: str, name: str, content: bytes) -> None:
    """Store a document, in place of an earlier one of the same name."""
    connection.execute(delete(job_documents).where(job_documents.c.job_id == job_id, job_documents.c.name == name))
    connection.execute(insert(job_documents).values(job_id=job_id, name=name, content=content))
