"""Pickles of a few hundred bytes whose parts share each other so often that a walk through them would take centuries.

``KEYS`` have them hashed or compared while they are read; ``LISTS`` is a value that nobody may walk through or show.
"""

from __future__ import annotations

import struct

from tests.attacks.pickles import call, glob, pickled, text

LEVELS = 60
_SET, _FROZEN, _ORDERED = (
    glob(*name) for name in (("builtins", "set"), ("builtins", "frozenset"), ("collections", "OrderedDict"))
)
_RECORD = glob("torch.distributed.checkpoint.metadata", "MetadataIndex")


def _short(index: int) -> bytes:
    return bytes((index,))


def _long(index: int) -> bytes:
    return struct.pack("<I", index)


def _tower(join: bytes, *, put: bytes = b"q", fetch: bytes = b"h", first: bytes = b")", at: int = 0) -> bytes:
    """Each level is twice the one before, joined by an opcode; the last one stays on the stack, with index ``at``."""
    number = _short if put == b"q" else _long
    get = fetch + (_short(at) if fetch == b"h" else _long(at))
    return first + put + number(at) + (b"0" + get + get + join + put + number(at)) * LEVELS


def _memoized(join: bytes, first: bytes = b")", before: bytes = b"") -> bytes:
    """The same by the opcodes of protocol 4; ``before`` stands in each level, and is popped."""
    levels = (b"0" + before + b"h" + _short(n) * 1 + b"h" + _short(n) + join + b"\x94" for n in range(LEVELS))
    return first + b"\x94" + b"".join(levels)


def _four(*parts: bytes) -> bytes:
    return b"\x80\x04" + b"".join(parts) + b"."


def _after(filler: bytes) -> bytes:
    """A tower whose PUT comes after something else than what made the tuple, and that leaves it on the stack."""
    return b")q\x00" + (b"0h\x00h\x00\x86" + filler + b"q\x00") * LEVELS


def _two_towers(join: bytes) -> bytes:
    """Two that are equal and share nothing with each other: as keys of one dict they are compared."""
    return _tower(join, at=0) + b"N" + _tower(join, at=1) + b"N"


_TUPLE = _tower(b"\x86")
_WIDE = b"(" + b"K\x01" * 100_000 + b"tq\x00"

KEYS: dict[str, bytes] = {
    "pairs": pickled(b"}", _TUPLE, b"Ns"),
    "pairs of protocol 4": _four(b"}", _memoized(b"\x86"), b"Ns"),
    "pairs of protocol 4 among bytes like their opcodes": _four(
        b"}", _memoized(b"\x86", before=b"K\x94M\x94\x94\x8c\x01t000"), b"Ns"
    ),
    "triples": pickled(b"}", _tower(b"h\x00\x87"), b"Ns"),
    "tuples after a mark": pickled(b"}", b")q\x00" + b"0(h\x00h\x00h\x00h\x00tq\x00" * LEVELS, b"Ns"),
    "tuples that end with something else": pickled(b"}", b")q\x00" + b"0h\x00h\x00N\x87q\x00" * LEVELS, b"Ns"),
    "each level in a tuple of its own": pickled(b"}", b")q\x00" + b"0h\x00\x85h\x00\x85\x86q\x00" * LEVELS, b"Ns"),
    "each level in a tuple of its own, put into the memo": pickled(
        b"}", b")q\x00" + b"0h\x00h\x00\x86\x85q\x00" * LEVELS, b"Ns"
    ),
    "each level twice in the memo": _four(
        b"})\x94\x94",
        *(b"0h" + _short(n) + b"h" + _short(n) + b"\x86\x94\x94" for n in range(1, 2 * LEVELS, 2)),
        b"Ns",
    ),
    "long indices": pickled(b"}", _tower(b"\x86", put=b"r", fetch=b"j"), b"Ns"),
    "long indices put and short ones fetched": pickled(b"}", _tower(b"\x86", put=b"r"), b"Ns"),
    "indices beyond 255": pickled(b"}", b"N0" * 1000, _tower(b"\x86", put=b"r", fetch=b"j", at=700), b"Ns"),
    "a different index for each level": pickled(
        b"})q\x00", *(b"0h" + _short(n) + b"h" + _short(n) + b"\x86q" + _short(n + 1) for n in range(LEVELS)), b"Ns"
    ),
    "several keys at once": pickled(b"}(K\x01K\x02", _TUPLE, b"Nu"),
    "the key of an ordered dict": pickled(call(_ORDERED), _TUPLE, b"Ns"),
    "what an ordered dict is made of": pickled(call(_ORDERED, b"]" + _TUPLE + b"N\x86a")),
    "a member of a set": _four(b"\x8f(", _memoized(b"\x86"), b"\x90"),
    "a member of a set by a call": pickled(call(_SET, b"]" + _TUPLE + b"a")),
    "a member of a frozenset": _four(b"(", _memoized(b"\x86"), b"\x91"),
    "a member of a frozenset by a call": pickled(call(_FROZEN, b"]" + _TUPLE + b"a")),
    "a shape": pickled(call(glob("torch", "Size"), _TUPLE)),
    "the class of a storage": pickled(b"(" + text("storage") + _TUPLE + text("0") + text("cpu") + b"K\x01tQ"),
    "pairs of frozensets, compared": _four(
        b"}(",
        *(
            b"(K\x01\x91\x94"
            + b"".join(b"0(h" + _short(n) + b"h" + _short(n) + b"N\x86\x91\x94" for n in range(at, at + LEVELS))
            + b"N"
            for at in (0, LEVELS + 1)
        ),
        b"u",
    ),
    "pairs of frozensets by calls, compared": pickled(
        b"}(",
        *(
            call(_FROZEN, b"]K\x01a")
            + put
            + (b"0" + call(_FROZEN, b"](" + get + get + b"N\x86e") + put) * LEVELS
            + b"N"
            for put, get in ((b"q\x00", b"h\x00"), (b"q\x01", b"h\x01"))
        ),
        b"u",
    ),
    "equal pairs, compared": pickled(b"}(", _two_towers(b"\x86"), b"u"),
    "pairs that were in a record": pickled(b"}", _RECORD, b")\x81", _TUPLE, b"b0", b"h\x00Ns"),
    "arguments of a record": pickled(
        b"}", _RECORD, b"q\x01)q\x000", b"h\x01h\x00h\x00\x86q\x00\x810" * LEVELS, b"h\x00Ns"
    ),
    "put after nothing was set": pickled(b"}", _after(b"(u"), b"Ns"),
    "put after nothing was appended": pickled(b"}", _after(b"(e"), b"Ns"),
    "put after nothing was added": pickled(b"}", _after(b"(\x90"), b"Ns"),
    "put after a state of nothing": pickled(b"}", _after(b"Nb"), b"Ns"),
    "put after something was popped": pickled(b"}", _after(b"N0"), b"Ns"),
    "put after a mark was popped": pickled(b"}", _after(b"(N1"), b"Ns"),
    "put after a protocol": pickled(b"}", _after(b"\x80\x02"), b"Ns"),
    "put after a frame": pickled(b"}", _after(b"\x95" + bytes(8)), b"Ns"),
    "put after it was put elsewhere": pickled(b"}", _after(b"q\x01"), b"Ns"),
    "put after it was put far away": pickled(b"}", _after(b"r\x01\x00\x00\x00"), b"Ns"),
    "put after it was fetched from elsewhere": pickled(b"}", _after(b"q\x010h\x01"), b"Ns"),
    "put after it was fetched from far away": pickled(b"}", _after(b"q\x010j\x01\x00\x00\x00"), b"Ns"),
    "put after what looks as if it had been looked at": pickled(b"}", _after(b"K\x09\x86Q"), b"Ns"),
    "a wide tuple as each of many keys": pickled(_WIDE, b"}(", b"h\x00N" * 100_000, b"u"),
    "a wide tuple in each of many keys": pickled(_WIDE, b"}(", b"h\x00\x85N" * 100_000, b"u"),
    "a wide tuple that was fetched before, as keys": pickled(_WIDE, b"h\x00q\x01}(", b"h\x01N" * 100_000, b"u"),
    "a wide tuple that was fetched from far away, as keys": pickled(
        _WIDE, b"j\x00\x00\x00\x00q\x01}(", b"h\x01N" * 100_000, b"u"
    ),
    "wide tuples of wide tuples": pickled(_WIDE, b"(" + b"h\x00" * 10_000 + b"tq\x00", b"}h\x00Ns"),
}
"""Each is refused with the file's name, at once."""

LISTS = b"]q\x00" + b"0](h\x00h\x00eq\x00" * LEVELS
"""A list of two times the same list, and so on; what makes it ends with it on the stack."""
