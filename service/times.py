"""Points in time, as the service takes and spells them."""

from __future__ import annotations

from datetime import UTC, datetime


def now() -> datetime:
    """The time, in UTC."""
    return datetime.now(UTC)


def spelled(moment: datetime) -> str:
    """A time as it stands in JSON columns and answers."""
    return moment.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
