"""Look into a source, in the process that reads metadata.

The last source that was opened is kept for a while, so that one tensor after the other can be looked at without
reading the metadata of a hundred thousand again. It is only taken for a request that names the version which it has.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import Any

from workers.inspect import Inspection, inspect
from workers.manifest import version_of_files
from workers.options import ConvertOptions

KEPT_S = 120.0


@dataclass(frozen=True, slots=True)
class Look:
    """What is wanted to be known of a source."""

    tensor: str | None = None
    """Whose pieces are told."""
    partial: bool = False
    """Whether one is opened of which something is missing."""
    table: bool = False
    """Whether all tensors are listed."""
    version: str | None = None
    """The version that was looked at before: the answer may be what was read then."""


@dataclass(frozen=True, slots=True)
class _Kept:
    key: tuple[Any, ...]
    version: str
    until: float
    inspection: Inspection


_kept: list[_Kept] = []
"""At most one: this process does one thing at a time."""


def look_into(within: tuple[str, ...], source: str, options: ConvertOptions, look: Look) -> bytes:
    """What is there, as JSON."""
    key = (within, source, options, look.partial)
    known = _kept.pop() if _kept else None
    if known is None or (known.key, known.version) != (key, look.version) or time.monotonic() > known.until:
        inspection = inspect(source, options, partial=look.partial, within=within)
        version = version_of_files(inspection.checkpoint.files)
        known = _Kept(key, version, time.monotonic() + KEPT_S, inspection)
    _kept.append(known)
    told = known.inspection.to_dict(look.tensor, table=look.table)
    return json.dumps(told, separators=(",", ":"), ensure_ascii=False).encode()
