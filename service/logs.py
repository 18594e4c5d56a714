"""Logs of the service: plain lines on a terminal, JSON lines elsewhere, each with the job it is about."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime

_job_id: ContextVar[str | None] = ContextVar("job_id", default=None)


@contextmanager
def logged_as(job_id: str) -> Iterator[None]:
    """Mark what this thread logs meanwhile as being about a job."""
    token = _job_id.set(job_id)
    try:
        yield
    finally:
        _job_id.reset(token)


class JsonLines(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "at": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            "job_id": _job_id.get(),
            "trace": self.formatException(record.exc_info) if record.exc_info else None,
        }
        return json.dumps({key: value for key, value in entry.items() if value is not None})


class PlainLines(logging.Formatter):
    """For a person at a terminal."""

    def format(self, record: logging.LogRecord) -> str:
        job_id = _job_id.get()
        line = f"{self.formatTime(record, '%H:%M:%S')} {record.levelname.lower():7} {record.getMessage()}"
        line += f" ({job_id})" if job_id else ""
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def configure() -> None:
    """Send the logs of this process to standard error."""
    stream = logging.StreamHandler(sys.stderr)
    stream.setFormatter(PlainLines() if sys.stderr.isatty() else JsonLines())
    logging.basicConfig(level=logging.INFO, handlers=[stream], force=True)
    # Each request as a line would bury the rest; metrics count them. Alembic tells of each start.
    for name in ("uvicorn.access", "alembic", "httpx", "httpcore"):
        logging.getLogger(name).setLevel(logging.WARNING)
