"""Bounds what hashing, comparing and writing down the parts of a pickle can take, however often they share parts.

A pickle fetches what it made before from its memo. A tuple of two times the same tuple, and so on sixty levels deep,
takes a few hundred bytes, and its hash, which the interpreter computes in one go, centuries. So what may be such a
tuple is found where it is put into the memo, and ``pickles`` has it looked at there, before anything fetches it.

Finding it takes two steps. Here whole columns of bytes are looked at without knowing where opcodes begin, which finds
too much at times and never too little; ``pickle_scan`` then knows which of these places are opcodes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]

_BLOCK_BYTES = 1 << 18
_SHORT = 256
_MEMOIZE = 0x94

# Opcodes after which what is on top of the stack may be a tuple, a frozenset or what holds one, told by the byte that
# they have one, two, five or nine places before what follows. Strings may end as they do: that takes a look in vain.
_MAKES_OR_UNCOVERS = b"t\x85\x86\x87\x91RQ01ue\x90b\x94"
_ENDS_BEFORE = {
    distance: np.array([code in codes for code in range(256)])
    for distance, codes in {1: _MAKES_OR_UNCOVERS, 2: b"hq\x80", 5: b"jr", 9: b"\x95"}.items()
}

UNCOUNTED_PARTS = 64
"""Tuples of so many parts or fewer may be fetched as often as a pickle likes; shapes and placements are such."""
_COUNTED_PARTS = 1_000_000
_COUNTED_PARTS_PER_BYTE = 4


def puts_to_look_at(data: bytes, most_indices: int) -> list[int]:
    """Where protocols 2 and 3 may PUT what may have many parts, with an index that is fetched again.

    All short indices count as fetched: they are few.
    """
    long = _fetched(data, most_indices)
    wanted = None
    if len(long):
        wanted = np.zeros(most_indices + 1, dtype=bool)
        wanted[:_SHORT] = wanted[long] = True
    places = np.concatenate([_puts(codes, wanted) + begin for codes, begin in _blocks(data)])
    return list(places[_may_be_shared(data, places)].tolist())


def memoized_to_look_at(data: bytes, places: Indices) -> list[tuple[int, int]]:
    """The same in protocol 4 and later: of the ``places`` of all MEMOIZE, those to look at with their indices."""
    indices = np.concatenate((np.arange(min(_SHORT, len(places))), _fetched(data, len(places))))
    chosen = _may_be_shared(data, places[indices])
    return list(zip(places[indices][chosen].tolist(), indices[chosen].tolist(), strict=True))


def memoize_places(data: bytes, strays: Iterable[tuple[int, int]]) -> Indices:
    """Where each MEMOIZE is: the bytes of its code, but for those in the operands at ``strays``."""
    places = np.flatnonzero(np.frombuffer(data, np.uint8) == _MEMOIZE)
    ranges = np.array([*strays], dtype=np.int64).reshape(-1, 2)
    if len(ranges):
        inside = np.searchsorted(ranges[:, 0], places, side="right") - 1
        places = places[(inside < 0) | (places >= ranges[inside, 1])]
    return places


def with_looks(data: bytes, places: Iterable[tuple[int, int]]) -> bytes:
    """The pickle with a persistent id of (value, index) written at each place, for which the value is put back."""
    pieces: list[bytes] = []
    position = 0
    for place, index in places:
        pieces += (data[position:place], b"J" + index.to_bytes(4, "little") + b"\x86Q")
        position = place
    return b"".join((*pieces, data[position:]))


class RepeatedError(Exception):
    """A tuple has too many parts for being fetched so often; ``pickles`` adds the file and raises ``UnsafePickle``."""

    def __init__(self, parts: int) -> None:
        super().__init__(parts)
        self.parts = parts


class SharedParts:
    """What one pickle puts into its memo and fetches again: how many parts it has, and whether that is too much.

    A value counts with all parts as often as a walk through it meets them, each time that the pickle fetches it.
    Lists, dicts and records count as one: they have no hash, or one of their own.
    """

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._left = _COUNTED_PARTS + _COUNTED_PARTS_PER_BYTE * len(data)
        # With the values, since the number of a value that is gone may be given to another.
        self._known: dict[int, tuple[Any, int]] = {}
        self._times: _Times | None = None

    def look(self, value: Any, index: int) -> Any:
        """Give back a value that is put into the memo. Raises ``RepeatedError`` when it has too many parts."""
        if not isinstance(value, (tuple, frozenset)):
            return value
        parts = self.parts(value)
        if parts > UNCOUNTED_PARTS:
            self._times = self._times or _Times(self._data)
            self._left -= parts * self._times.fetched(index)
        if self._left < 0:
            raise RepeatedError(parts)
        return value

    def parts(self, value: Any) -> int:
        """Parts of a tuple or frozenset, itself counted, as often as a walk meets them."""
        total, ahead = 0, [value]
        while ahead:
            part = ahead.pop()
            if not isinstance(part, (tuple, frozenset)):
                total += 1
            elif (known := self._known.get(id(part))) is not None:
                total += known[1]
            else:
                total += 1
                ahead.extend(part)
        self._known[id(value)] = value, total
        return total


class _Times:
    """How often a pickle fetches each index of its memo, at most: all bytes that look like a GET are counted."""

    def __init__(self, data: bytes) -> None:
        self._short = np.zeros(_SHORT, np.int64)
        for codes, _ in _blocks(data):
            self._short += np.bincount(codes[np.flatnonzero(codes[:-4] == ord("h")) + 1], minlength=_SHORT)
        indices = [_operands(codes, np.flatnonzero(codes[:-4] == ord("j"))) for codes, _ in _blocks(data)]
        self._long = np.sort(np.concatenate(indices))

    def fetched(self, index: int) -> int:
        """How often an index is fetched."""
        first, last = np.searchsorted(self._long, (index, index + 1))
        return int(last - first) + (int(self._short[index]) if index < _SHORT else 0)


def _fetched(data: bytes, most_indices: int) -> Indices:
    """The long indices below a limit that may be fetched, each once."""
    found = [np.zeros(0, np.int64)]
    for codes, _ in _blocks(data):
        places = codes[:-4] == ord("j")
        if most_indices <= 1 << 24:
            places &= codes[4:] == 0  # nearly all that are no opcode end here, at little cost
        if places.any():
            indices = _operands(codes, np.flatnonzero(places))
            found.append(indices[(indices >= _SHORT) & (indices < most_indices)])
    ordered = np.sort(np.concatenate(found))
    return ordered[np.flatnonzero(np.diff(ordered, prepend=-1))]


def _blocks(data: bytes) -> Iterator[tuple[npt.NDArray[np.uint8], int]]:
    """The data block by block, so that columns stay in the cache, each with four bytes more; and where each begins.

    What is found in a block begins before those four bytes: behind the last ones four zeros are put for that.
    """
    for begin in range(0, len(data) or 1, _BLOCK_BYTES):
        codes = np.frombuffer(data[begin : begin + _BLOCK_BYTES + 4], np.uint8)
        missing = _BLOCK_BYTES + 4 - len(codes)
        yield (np.pad(codes, (0, min(missing, 4))) if missing > 0 else codes), begin


def _operands(codes: npt.NDArray[np.uint8], places: Indices) -> Indices:
    """The four-byte numbers behind some places of a block."""
    numbers = np.ndarray((len(codes) - 4,), np.dtype("<u4"), codes, 1, (1,))
    return numbers[places].astype(np.int64)


def _puts(codes: npt.NDArray[np.uint8], wanted: npt.NDArray[np.bool_] | None) -> Indices:
    """Places in a block that look like a PUT of a wanted index; None: of a short one."""
    found = [np.flatnonzero(codes[:-4] == ord("q"))]
    places = codes[:-4] == ord("r")
    if wanted is not None:
        at = np.flatnonzero(places)
        found.append(at[wanted[np.minimum(_operands(codes, at), len(wanted) - 1)]])
    else:
        places &= (codes[2:-2] | codes[3:-1] | codes[4:]) == 0
        found.append(np.flatnonzero(places))
    return np.sort(np.concatenate(found))


def _may_be_shared(data: bytes, places: Indices) -> npt.NDArray[np.bool_]:
    """Which PUTs of those at some places may give an index to a tuple, or to what has an index already."""
    codes = np.frombuffer(data, np.uint8)
    found = np.zeros(len(places), dtype=bool)
    for distance, wanted in _ENDS_BEFORE.items():
        found |= wanted[codes[np.maximum(places - distance, 0)]]
    return found
