"""Broken and hostile zip archives in torch's shape, written record by record so that any field can lie."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tests.attacks.pickles import pickled, tensor, text

WHOLE = 0xFFFFFFFF
PICKLE = pickled(b"}", text("w"), tensor(), b"s")
"""A dict of one tensor ``w`` of eight float32 in the storage ``0``."""


@dataclass(frozen=True)
class Claim:
    """What the central directory says of one record; ``extra`` is its extra field."""

    name: bytes
    crc: int
    packed: int
    plain: int
    offset: int
    flags: int = 0x808
    method: int = 0
    extra: bytes = b""

    def pack(self) -> bytes:
        fields = (b"PK\x01\x02", 0, 0, self.flags, self.method, 0, 0, self.crc, self.packed, self.plain)
        sizes = (len(self.name), len(self.extra), 0, 0, 0, 0, self.offset)
        return struct.pack("<4s6H3I5H2I", *fields, *sizes) + self.name + self.extra


Change = Callable[[list[Claim]], list[Claim]]


def torch_zip(
    records: Sequence[tuple[str, bytes]], *, change: Change | None = None, alignment: int = 64, stem: str = "archive"
) -> bytes:
    """Write records as torch does; ``change`` edits the central directory before it is written."""
    body = b""
    claims = []
    for short_name, data in records:
        name = f"{stem}/{short_name}".encode()
        flags = 0x808 if data else 0x800
        claims.append(Claim(name, zlib.crc32(data), len(data), len(data), len(body), flags))
        start = len(body) + 30 + len(name) + 4
        padding = -start % alignment
        body += struct.pack("<4s5H3I2H", b"PK\x03\x04", 0, flags, 0, 0, 0, 0, 0, 0, len(name), 4 + padding)
        body += name + b"FB" + struct.pack("<H", padding) + b"Z" * padding + data
        if data:
            body += struct.pack("<4s3I", b"PK\x07\x08", zlib.crc32(data), len(data), len(data))
    if change:
        claims = change(claims)
    return body + directory(claims, len(body))


def directory(claims: Sequence[Claim], offset: int, *, length: int | None = None, count: int | None = None) -> bytes:
    """The central directory, its zip64 record and locator and its end record, as torch writes all of them."""
    packed = b"".join(claim.pack() for claim in claims)
    length = len(packed) if length is None else length
    count = len(claims) if count is None else count
    end64 = struct.pack("<4sQ2H2I4Q", b"PK\x06\x06", 44, 798, 45, 0, 0, count, count, length, offset)
    locator = struct.pack("<4sIQI", b"PK\x06\x07", 0, offset + len(packed), 1)
    end = struct.pack("<4s4H2IH", b"PK\x05\x06", 0, 0, min(count, 0xFFFF), min(count, 0xFFFF), WHOLE, WHOLE, 0)
    return packed + end64 + locator + end


RECORDS = [("data.pkl", PICKLE), ("byteorder", b"little"), ("data/0", bytes(range(32))), ("version", b"3\n")]
GOOD = torch_zip(RECORDS)


def _storage(**fields: object) -> Change:
    return lambda claims: [replace(c, **fields) if c.name.endswith(b"data/0") else c for c in claims]


def _without(*names: str) -> list[tuple[str, bytes]]:
    return [record for record in RECORDS if record[0] not in names]


def _other_pickle(data: bytes) -> bytes:
    return torch_zip([("data.pkl", data), *RECORDS[1:]])


def _ends(**fields: int) -> bytes:
    end = GOOD.rfind(b"PK\x06\x06")
    values = {"disk": 0, "first_disk": 0, "count": 4, "length": 0, "offset": 0} | fields
    packed = struct.pack(
        "<4sQ2H2I4Q", b"PK\x06\x06", 44, 798, 45, values["disk"], values["first_disk"], 4, values["count"],
        values["length"], values["offset"],
    )  # fmt: skip
    return GOOD[:end] + packed + GOOD[end + 56 :]


LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 49631\n"

BROKEN: dict[str, tuple[bytes, tuple[str, ...]]] = {
    "empty": (b"", ("empty",)),
    "one byte": (b"P", ("begin with",)),
    "a Git LFS pointer": (LFS_POINTER, ("Git LFS pointer", "git lfs pull")),
    "a web page": (b"<!DOCTYPE html>", ("web page",)),
    "a bare pickle": (PICKLE, ("bare pickle",)),
    "a safetensors file": (struct.pack("<Q", 2) + b"{}", ("safetensors",)),
    "a tar archive": (bytes(257).replace(b"\0", b"a") + b"ustar" + bytes(250), ("tar archive",)),
    "gzip": (b"\x1f\x8b" + bytes(60), ("gzip",)),
    "GGUF": (b"GGUF" + bytes(60), ("GGUF",)),
    "zeros": (bytes(5000), ("zeros",)),
    "truncated": (GOOD[: len(GOOD) // 2], ("truncated",)),
    "truncated in the directory": (GOOD[:-30], ("truncated",)),
    "an archive of other things": (torch_zip([("a.txt", b"hello")]), ("not a torch file", "archive/a.txt")),
    "two pickles": (
        torch_zip(RECORDS, change=lambda cs: [*cs, replace(cs[0], name=b"other/data.pkl")]),
        ("2 data.pkl",),
    ),
    "TorchScript": (torch_zip([*RECORDS, ("code/__torch__.py", b"x")]), ("TorchScript",)),
    "big-endian": (torch_zip([RECORDS[0], ("byteorder", b"big"), *RECORDS[2:]]), ("byte order", "big")),
    "compressed": (torch_zip(RECORDS, change=_storage(method=8)), ("compressed", "data/0")),
    "encrypted": (torch_zip(RECORDS, change=_storage(flags=0x809)), ("encrypted", "data/0")),
    "sizes that differ": (torch_zip(RECORDS, change=_storage(packed=31)), ("data/0",)),
    "a record twice": (
        torch_zip(RECORDS, change=lambda cs: [*cs, cs[2]]),
        ("once",),
    ),
    "a record beyond the directory": (torch_zip(RECORDS, change=_storage(offset=1 << 20)), ("data/0",)),
    "a record larger than the file": (
        torch_zip(RECORDS, change=_storage(packed=1 << 30, plain=1 << 30)),
        ("data/0", str(1 << 30)),
    ),
    "a record of exabytes": (
        torch_zip(
            RECORDS,
            change=_storage(packed=WHOLE, plain=WHOLE, extra=struct.pack("<2H2Q", 1, 16, 1 << 62, 1 << 62)),
        ),
        ("data/0",),
    ),
    "a zip64 size that is missing": (torch_zip(RECORDS, change=_storage(packed=WHOLE, plain=WHOLE)), ("data/0",)),
    "overlapping records": (torch_zip(RECORDS, change=_storage(packed=100, plain=100)), ("data/0", "end before")),
    "two records in one place": (
        torch_zip(RECORDS, change=lambda cs: [replace(c, offset=cs[2].offset) for c in cs]),
        ("found something else",),
    ),
    "a record in the middle of another": (
        torch_zip(RECORDS, change=_storage(offset=GOOD.index(PICKLE) + 2)),
        ("archive/",),
    ),
    "a pickle whose checksum is wrong": (
        torch_zip(RECORDS, change=lambda cs: [replace(cs[0], crc=cs[0].crc ^ 1), *cs[1:]]),
        ("data.pkl", "CRC-32"),
    ),
    "a pickle without a checksum among records with": (
        torch_zip(RECORDS, change=lambda cs: [replace(cs[0], crc=0), *cs[1:]]),
        ("data.pkl", "CRC-32"),
    ),
    "a split archive": (_ends(disk=1), ("split",)),
    "a directory of exabytes": (_ends(length=1 << 62), ("directory",)),
    "a directory before the file": (_ends(offset=(1 << 64) - 1, length=1), ("directory",)),
    "more entries than the directory holds": (_ends(count=1 << 50), ("entries",)),
    "a text as its pickle": (_other_pickle(b"\xfehello"), ("pickle",)),
}


LEGACY_MAGIC = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."


def legacy(
    saved: bytes = PICKLE,
    *,
    protocol: bytes = pickled(b"M\xe9\x03"),
    little: bytes = b"\x88",
    keys: bytes = pickled(b"]", text("0"), b"a"),
    data: bytes = struct.pack("<q", 8) + bytes(range(32)),
) -> bytes:
    """A file of the old layout."""
    machine = pickled(b"}(", text("protocol_version"), b"M\xe9\x03", text("little_endian"), little, b"u")
    return LEGACY_MAGIC + protocol + machine + saved + keys + data


BROKEN_LEGACY: dict[str, tuple[bytes, tuple[str, ...]]] = {
    "an unknown protocol": (legacy(protocol=pickled(b"M\xea\x03")), ("protocol 1002",)),
    "big-endian": (legacy(little=b"\x89"), ("byte order",)),
    "nothing but the magic": (LEGACY_MAGIC, ("breaks off",)),
    "keys that are no list": (legacy(keys=pickled(b"}")), ("keys",)),
    "keys that are numbers": (legacy(keys=pickled(b"]K\x00a")), ("keys",)),
    "a key twice": (legacy(keys=pickled(b"](", text("0"), text("0"), b"e")), ("keys",)),
    "a key of no tensor": (legacy(keys=pickled(b"]", text("7"), b"a")), ("the key 7",)),
    "another number of elements": (legacy(data=struct.pack("<q", 9) + bytes(36)), ("8 elements", "found 9")),
    "no data": (legacy(data=b""), ("truncated",)),
    "truncated data": (legacy(data=struct.pack("<q", 8) + bytes(31)), ("truncated",)),
}
