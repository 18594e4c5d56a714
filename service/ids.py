"""Ids of everything that the service keeps: a word for the kind, then a time and chance, so that they sort by age."""

from __future__ import annotations

import re
import secrets
import time
from datetime import UTC, datetime


def new_id(kind: str) -> str:
    """A new id, such as ``job_06616dcc2a3a32a45a74439752``."""
    return f"{kind}_{time.time_ns() // 1000:014x}{secrets.token_hex(6)}"


def is_id(kind: str, text: str) -> bool:
    """Whether a text has the form of such an id; others are not worth asking the database, which may choke on them."""
    return re.fullmatch(rf"{kind}_[0-9a-f]{{1,34}}", text) is not None


def reserve_ids(kind: str, count: int) -> list[str]:
    """As many new ids, in the order that they sort."""
    start = time.time_ns() // 1000
    return [f"{kind}_{start + number:014x}{secrets.token_hex(6)}" for number in range(count)]


def id_at(kind: str, moment: datetime) -> str:
    """A new id of what came into being at a time; without a zone it is of UTC."""
    zoned = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    return f"{id_floor(kind, zoned)}{secrets.token_hex(6)}"


def id_floor(kind: str, moment: datetime) -> str:
    """What sorts before the ids of a kind that were made at a time or later, and after those made before."""
    return f"{kind}_{int(moment.timestamp() * 1_000_000):014x}"
