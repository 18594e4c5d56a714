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

import numpy as np

from workers.errors import CorruptFile, UnsafePickle

_STOP = ord(".")
_COUNT_WIDTHS = dict.fromkeys(b"\x8a\x8cCU", 1) | dict.fromkeys(b"XBT", 4) | dict.fromkeys(b"\x8d\x8e\x96", 8)
_PLAIN = b"(N\x88\x89]})\x8f\x90\x91\x94tsuaebR\x81\x85\x86\x87Q\x9301"
_OPERANDS_AHEAD = b"hqKjrJMGc\x80\x95"
_LONGEST_OPERAND = 802

# Hashing a nested tuple takes two C frames a level, together measured at 64 bytes on x86-64; twice that for others.
STACK_BYTES_PER_TUPLE = 128


class EndsTooEarly(CorruptFile):
    """The data end before the pickle does: more of the file may help."""


def scan(data: bytes, start: int, file: str) -> int:
    """Check the pickle that begins at ``start`` and return where it ends.

    Raises ``EndsTooEarly`` when the data are cut off, ``CorruptFile`` for numbers that cannot be true and
    ``UnsafePickle`` for opcodes that checkpoints do not need.
    """
    match = _items(_memo_bits(len(data) - start)).match
    position = start
    while True:
        found = match(data, position)
        position = found.end() if found else position
        if position >= len(data):
            raise _ends_too_early(file, position)
        if data[position] == _STOP:
            return position + 1
        position = _step_over_long_item(data, position, file)


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


@cache
def _items(memo_bits: int) -> re.Pattern[bytes]:
    """Match a run of whole opcodes, except those whose operand is long.

    Possessive throughout: the pattern never goes back, takes constant memory, and costs about 25 ns an opcode. The
    alternatives stand in the order of their frequency.
    """
    top = b"\\x%02x" % ((1 << (memo_bits - 1) % 8 + 1) - 1)
    memo_index = b"...[\\x00-" + top + b"]" if memo_bits > 24 else b"..[\\x00-" + top + b"]\\x00"
    if memo_bits == 16:
        memo_index = b"..\\x00\\x00"
    plain = b"[" + b"".join(b"\\x%02x" % code for code in _PLAIN) + b"]*+"
    with_operand = (
        b"r" + memo_index,
        b"[hqK].",
        b"X" + _counted(b"\\x00\\x00\\x00", 160),
        b"[jJ]....",
        b"M..",
        b"\\x8a" + _counted(b"", 20),
        b"[\\x8cCU]" + _counted(b"", 160),
        b"c[^\\n]{1,400}\\n[^\\n]{1,400}\\n",
        b"G.{8}",
        b"\\x80[\\x02-\\x05]",
        b"\\x95.{8}",
    )
    return re.compile(b"(?:" + plain + b"(?:" + b"|".join(with_operand) + b"))*+" + plain, re.DOTALL)


def _counted(after_length: bytes, limit: int) -> bytes:
    """An alternative for each length: a regular expression cannot count, but it can look a byte up."""
    return b"(?:" + b"|".join(b"\\x%02x%b.{%d}" % (count, after_length, count) for count in range(limit)) + b")"


def _step_over_long_item(data: bytes, position: int, file: str) -> int:
    width = _COUNT_WIDTHS.get(data[position])
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
    name = next((opcode.name for opcode in pickletools.opcodes if opcode.code == chr(code)), None)
    if name is None:
        return CorruptFile(
            f"{file}: byte {position} of its pickle is {code:#04x}, which is no pickle opcode",
            file=file,
            expected="a pickle opcode",
            found=f"{code:#04x}",
            hint="The file is damaged or is not a checkpoint; fetch it again from where it was saved.",
        )
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
