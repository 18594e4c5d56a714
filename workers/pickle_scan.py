"""A look at a pickle's opcodes before the real unpickler runs, at the speed of one regular expression.

Python's unpickler trusts some numbers of its input: one memo index makes it allocate 64 GiB, one counted length a
buffer of any size, and a tuple nested a million times deep overflows the C stack when it is hashed. This module
refuses such input and the opcodes that no torch version has written since protocol 2. It must not interpret
anything: it only finds where each opcode ends.
"""

from __future__ import annotations

import pickletools
import re
from functools import cache
from typing import NamedTuple

import numpy as np

from workers.errors import CorruptFile, UnsafePickle
from workers.pickle_sharing import memoize_places, memoized_to_look_at, puts_to_look_at

_STOP = ord(".")
_COUNT_WIDTHS = dict.fromkeys(b"\x8a\x8cCU", 1) | dict.fromkeys(b"XBT", 4) | dict.fromkeys(b"\x8d\x8e\x96", 8)
_PLAIN = b"(N\x88\x89]})\x8f\x90\x91tsuaebR\x81\x85\x86\x87Q\x9301"
_MEMOIZE = b"\x94"
_PUTS = b"qr"
_OPERANDS_AHEAD = b"hqKjrJMGc\x80\x95"
_MEMOIZE_PROTOCOL = 4
"""From this protocol on the memo is filled by MEMOIZE, and before it by PUT: no pickler writes both."""
_LONGEST_OPERAND = 802

# Hashing a nested tuple takes two C frames a level, together measured at 64 bytes on x86-64; twice that for others.
STACK_BYTES_PER_TUPLE = 128


class EndsTooEarly(CorruptFile):
    """The data end before the pickle does: more of the file may help."""


class Scan(NamedTuple):
    """Where a pickle ends, and where it puts what may be shared tuples into its memo: places and indices."""

    end: int
    shared: list[tuple[int, int]]


def end_of(data: bytes, start: int, file: str) -> int:
    """Where the pickle that begins at ``start`` ends. Raises what ``scan`` does."""
    return _walk(data, start, [], file)[0]


def scan(data: bytes, file: str) -> Scan:
    """Check the pickle at the beginning of the data.

    Raises ``EndsTooEarly`` when the data are cut off, ``CorruptFile`` for numbers that cannot be true and
    ``UnsafePickle`` for opcodes that checkpoints do not need.
    """
    if _protocol(data, 0) < _MEMOIZE_PROTOCOL:
        puts = puts_to_look_at(data, 1 << _memo_bits(len(data)))
        end, reached, _ = _walk(data, 0, puts, file)
        return Scan(end, [(place, _index(data, place)) for place in reached])
    end, _, strays = _walk(data, 0, [], file)
    return Scan(end, memoized_to_look_at(data, memoize_places(data[:end], strays)))


def _walk(data: bytes, start: int, stops: list[int], file: str) -> tuple[int, list[int], list[tuple[int, int]]]:
    """Go through the opcodes to the end of the pickle.

    Gives back the end, those ``stops`` where an opcode begins, and the opcodes in whose operands MEMOIZE seems to be.
    """
    memoizes = _protocol(data, start) >= _MEMOIZE_PROTOCOL
    patterns = _patterns(_memo_bits(len(data) - start), memoizes)
    reached: list[int] = []
    strays: list[tuple[int, int]] = []
    position, ahead, stop = start, iter(stops), -1
    while True:
        while stop <= position:
            if stop == position and position > start:
                reached.append(stop)
            stop = next(ahead, len(data) + 1)
        found = patterns.run.match(data, position, stop)
        position = found.end() if found else position
        if position == stop:
            continue
        if position >= len(data):
            raise _ends_too_early(file, position)
        if data[position] == _STOP:
            return position + 1, reached, strays
        whole = patterns.one.match(data, position)
        end = whole.end() if whole else _step_over_long_item(data, position, file, memoizes)
        strays.append((position, end))
        position = end


def _protocol(data: bytes, start: int) -> int:
    return data[start + 1] if data[start : start + 1] == b"\x80" and len(data) > start + 1 else 0


def _index(data: bytes, place: int) -> int:
    """The index of the memo that the PUT at a place gives."""
    return int.from_bytes(data[place + 1 : place + (2 if data[place] == ord("q") else 5)], "little")


def tuple_depth_limit(data: bytes) -> int:
    """No tuple of this pickle can nest deeper than this: each level takes an opcode of its own."""
    limit = 0
    for start in range(0, len(data), 1 << 20):
        codes = np.frombuffer(data, np.uint8, min(1 << 20, len(data) - start), start)
        limit += int(np.count_nonzero(codes - np.uint8(0x85) < 3)) + int(np.count_nonzero(codes == ord("t")))
    return limit


def _memo_bits(size_bytes: int) -> int:
    """Bits of the largest honest memo index: picklers count up, and each entry past the first 256 takes 6 bytes."""
    return max(16, (256 + size_bytes // 6).bit_length())


class _Patterns(NamedTuple):
    """What matches a run of whole opcodes, except those whose operand is long, and what matches one of them."""

    run: re.Pattern[bytes]
    one: re.Pattern[bytes]


@cache
def _patterns(memo_bits: int, memoizes: bool) -> _Patterns:  # noqa: FBT001 - cached by its two values
    """The patterns for a kind of pickle; where MEMOIZE is used, a run ends before an operand that has its byte in it.

    Possessive throughout: the pattern never goes back, takes constant memory, and costs about 25 ns an opcode. The
    alternatives stand in the order of their frequency.
    """
    codes = _PLAIN + _MEMOIZE if memoizes else _PLAIN
    plain = b"[" + b"".join(b"\\x%02x" % code for code in codes) + b"]"
    with_operand = b"|".join(_with_operand(memo_bits, memoizes, b"[^\\x94]" if memoizes else b"."))
    run = b"(?:" + plain + b"*+(?:" + with_operand + b"))*+" + plain + b"*+"
    one = b"|".join((plain, *_with_operand(memo_bits, memoizes, b".")))
    return _Patterns(re.compile(run, re.DOTALL), re.compile(one, re.DOTALL))


def _with_operand(memo_bits: int, memoizes: bool, byte: bytes) -> tuple[bytes, ...]:  # noqa: FBT001
    """Opcodes with an operand, whose bytes are as ``byte`` matches them."""
    top = b"\\x%02x" % ((1 << (memo_bits - 1) % 8 + 1) - 1)
    memo_index = b"...[\\x00-" + top + b"]" if memo_bits > 24 else b"..[\\x00-" + top + b"]\\x00"
    if memo_bits == 16:
        memo_index = b"..\\x00\\x00"
    name = byte.replace(b"[^", b"[^\\n") if memoizes and byte != b"." else b"[^\\n]"
    fetch = (b"[hK]" + byte,) if memoizes else (b"r" + memo_index, b"[hqK].")
    return (
        *fetch,
        b"X" + _counted(b"\\x00\\x00\\x00", 160, byte),
        b"[jJ]" + byte * 4,
        b"M" + byte * 2,
        b"\\x8a" + _counted(b"", 20, byte),
        b"[\\x8cCU]" + _counted(b"", 160, byte),
        b"c" + name + b"{1,400}\\n" + name + b"{1,400}\\n",
        b"G" + byte + b"{8}",
        b"\\x80[\\x02-\\x05]",
        b"\\x95" + byte + b"{8}",
    )


def _counted(after_length: bytes, limit: int, byte: bytes) -> bytes:
    """An alternative for each length: a regular expression cannot count, but it can look a byte up."""
    counts = (count for count in range(limit) if byte == b"." or count != _MEMOIZE[0])
    return b"(?:" + b"|".join(b"\\x%02x%b%b{%d}" % (count, after_length, byte, count) for count in counts) + b")"


def _step_over_long_item(data: bytes, position: int, file: str, memoizes: bool) -> int:  # noqa: FBT001
    width = _COUNT_WIDTHS.get(data[position])
    if width is None and memoizes and data[position] in _PUTS:
        raise _unneeded(data[position], file)
    if width is None:
        raise _refusal(data, position, file)
    first = position + 1 + width
    end = first + int.from_bytes(data[position + 1 : first], "little")
    if first > len(data) or end > len(data):
        raise _ends_too_early(file, len(data), needed=end)
    return end


def _refusal(data: bytes, position: int, file: str) -> CorruptFile | UnsafePickle:
    code = data[position]
    if code == ord("r") and len(data) - position >= 5:
        return _bad_memo_index(data, position, file)
    if code in _OPERANDS_AHEAD and len(data) - position <= _LONGEST_OPERAND:
        return _ends_too_early(file, len(data))
    if code == ord("c"):
        return UnsafePickle(f"{file}: its pickle refers to a global whose name is absurdly long", file=file)
    if _name(code) is None:
        return CorruptFile(
            f"{file}: byte {position} of its pickle is {code:#04x}, which is no pickle opcode",
            file=file,
            expected="a pickle opcode",
            found=f"{code:#04x}",
            hint="The file is damaged or is not a checkpoint; fetch it again from where it was saved.",
        )
    return _unneeded(code, file)


def _name(code: int) -> str | None:
    return next((opcode.name for opcode in pickletools.opcodes if opcode.code == chr(code)), None)


def _unneeded(code: int, file: str) -> UnsafePickle:
    name = _name(code)
    return UnsafePickle(
        f"{file}: its pickle uses the opcode {name}, which checkpoints have no need for; nothing was executed",
        file=file,
        found=name,
        expected="opcodes of pickle protocols 2 to 5 as torch writes them",
        hint="If the file comes from a trusted source, load it there and save it again with torch.save.",
    )


def _bad_memo_index(data: bytes, position: int, file: str) -> CorruptFile:
    index = int.from_bytes(data[position + 1 : position + 5], "little")
    return CorruptFile(
        f"{file}: its pickle of {len(data)} bytes claims a memo of {index} entries",
        file=file,
        expected=f"a memo index below {1 << _memo_bits(len(data))}",
        found=str(index),
        hint="The file is damaged or was made to exhaust memory; fetch it again from where it was saved.",
    )


def _ends_too_early(file: str, size_bytes: int, needed: int | None = None) -> EndsTooEarly:
    more = f", at least {needed} are needed" if needed is not None else ""
    return EndsTooEarly(
        f"{file}: its pickle breaks off after {size_bytes} bytes{more}",
        file=file,
        expected="a complete pickle",
        found=f"{size_bytes} bytes without an end",
        hint="The file is truncated or damaged; fetch it again from where it was saved.",
    )
