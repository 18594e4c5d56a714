"""Large DCP metadata, read without an object for each chunk.

A pickle of millions of chunks takes the ordinary unpickler two kilobytes for each. Here a small interpreter goes
through the pickle, and where chunks and items follow each other in the form in which pickle writes them, regular
expressions take them into columns. Names have the same inert meaning as in ``pickles``, and whatever is unusual
ends it with ``UnusualError``: the caller then reads the pickle in the ordinary way, which also says what is wrong.
Sources: Python's ``pickletools`` for the opcodes, ``Modules/_pickle.c`` for the form.
"""

from __future__ import annotations

import re
from array import array
from bisect import bisect_left
from typing import Any, NamedTuple

from workers.errors import UnshardError
from workers.formats._dcp_opcodes import UnusualError, number_of, operations, without_frames
from workers.geometry import Shape
from workers.pickle_records import MalformedError, Record, RefusedError
from workers.pickle_sharing import SharedParts
from workers.pickles import inert_names, paused_collector

ITEM_COLUMNS = 5

_SHORT_TEXT = 0x8C
_PLANS = "all_local_plans"

_INT = rb"(?:K.|M..|J...[\x00-\x7f]|\x8a\x04....|\x8a\x05.....|\x8a\x06.{6}|\x8a\x07.{7}|\x8a\x08.{7}[\x00-\x7f])"
_LENGTHS = rb"(\)|%b\x85\x94|%b{2}\x86\x94|%b{3}\x87\x94|\(%b{4,8}t\x94)\x85\x94R\x94" % (_INT, _INT, _INT, _INT)
"""The argument of ``torch.Size`` and its call; what it is made of is captured."""
_TEXT = rb"(?:\x8c(.[^\x94]*)\x94|(h.|j....))"
"""A short text with its length before it, or a reference to one."""
_NEW, _END = rb"\)\x81\x94\}\x94\(", rb"ub"
_NO_LENGTHS = b")"
_CHUNK_MEMOS = 8
"""Entries of the memo that a chunk makes: itself, its state, and for each of two sizes a tuple, arguments, result."""


class Numbers(dict[Any, int]):
    """Gives each distinct value the next number."""

    def __missing__(self, key: Any) -> int:
        self[key] = number = len(self)
        return number


class Chunks(list[Any]):
    """A list of a tensor's chunks: those that are records, and ranges of rows of ``MetadataStream.chunks``."""

    __slots__ = ("runs",)

    def __init__(self) -> None:
        super().__init__()
        self.runs: list[tuple[int, int]] = []


class _Usual(NamedTuple):
    """The usual form of a record and what goes with it: how it begins, and all of it."""

    start: bytes
    pattern: re.Pattern[bytes]
    sizes_first: bool = False


class MetadataStream:
    """Reads one metadata pickle. After ``read``, the columns have what is not in the objects.

    ``chunks`` has a number of ``boxes`` (offsets, sizes) for each chunk, ``items`` rows of (name, offsets, file,
    byte offset, length) with numbers of ``names``, ``offsets`` and ``files``. ``data`` is changed.
    """

    def __init__(self, data: bytearray) -> None:
        self.data = data
        self.position = 0
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}
        self.memo_size = 0
        self.find_class = inert_names()
        self.shared = SharedParts(b"")
        self.names, self.offsets, self.files, self.boxes = Numbers(), Numbers(), Numbers(), Numbers()
        self.chunks = array("i")
        self.items = array("q")
        self._named_at = array("q")
        self._lengths: dict[bytes, Shape] = {}
        self._chunk: _Usual | None = None
        self._item: _Usual | None = None

    def read(self) -> Any:
        """The object that was pickled. Raises ``UnusualError``."""
        try:
            with paused_collector:
                without_frames(self.data)
                return self._run()
        except (UnshardError, RefusedError, MalformedError, ArithmeticError, AttributeError, LookupError) as error:
            raise UnusualError(str(error)) from None
        except (TypeError, ValueError, RecursionError, OverflowError) as error:
            raise UnusualError(str(error)) from None

    def _run(self) -> Any:
        data, operate = self.data, operations()
        while True:
            code = data[self.position]
            self.position += 1
            if code == 0x2E:  # STOP
                return self.stack.pop()
            operate[code](self)
            if code == _SHORT_TEXT and self.stack[-1] == _PLANS and self.marks == [2]:
                return self._without_plans()

    def _without_plans(self) -> Any:
        """The metadata as far as they were read: Megatron-Core writes its plans of saving behind all else."""
        root, _, *state = self.stack[:-1]
        root.__setstate__(dict(zip(state[::2], state[1::2], strict=True)))
        return root

    def built(self, record: Any) -> None:
        """A record is complete: see how it was written, and take what follows in the same form."""
        if isinstance(record, Record):
            kind = type(record).kind
            if self._chunk is None and kind == "ChunkStorageMetadata":
                self._chunk = self._usual_chunk(record)
            elif self._item is None and kind == "_StorageInfo":
                self._item = self._usual_item(self.stack[-2], record)
        self.take()

    def take(self) -> None:
        """Take as many chunks or items as follow here in the usual form."""
        target = self.stack[self.marks[-1] - 1] if self.marks else None
        if self._chunk is not None and type(target) is Chunks:
            if self.data.startswith(self._chunk.start, self.position):
                self._take_chunks(self._chunk, target)
        elif self._item is not None and type(target) is dict and self.data.startswith(self._item.start, self.position):
            self._take_items(self._item)

    def _take_chunks(self, usual: _Usual, target: Chunks) -> None:
        match, data, position = usual.pattern.match, self.data, self.position
        known, boxes, chunks = self._lengths, self.boxes, self.chunks
        first, memos = len(chunks), 0
        while (found := match(data, position)) is not None:
            one, two = found.groups()
            memos += _CHUNK_MEMOS - (one == _NO_LENGTHS) - (two == _NO_LENGTHS)
            box = (
                self._shape(one) if one not in known else known[one],
                known[two] if two in known else self._shape(two),
            )
            chunks.append(boxes[box[::-1] if usual.sizes_first else box])
            position = found.end()
        self.position = position
        self.memo_size += memos
        if len(chunks) > first:
            target.runs.append((first, len(chunks)))

    def _take_items(self, usual: _Usual) -> None:
        match, data, position = usual.pattern.match, self.data, self.position
        known, items = self._lengths, self.items
        while (found := match(data, position)) is not None:
            name, name_before, lengths, file, file_before, offset, length = found.groups()
            named, filed = self._name(name, name_before), self._file(file, file_before)
            if named is None or filed is None:
                break
            at = self.memo_size + 2  # the record and its state come before
            self._named_at.append(at if name is not None else self._named_at[-1])
            at += (name is not None) + (2 if lengths == _NO_LENGTHS else 3) + 2
            if file is not None:
                self.memo[at] = file[1:].decode()
            shape = known[lengths] if lengths in known else self._shape(lengths)
            items.extend((named, self.offsets[shape], filed, number_of(offset), number_of(length)))
            self.memo_size = at + (file is not None)
            position = found.end()
        self.position = position

    def _name(self, written: bytes | None, reference: bytes) -> int | None:
        """The number of a name; None when it has the byte in it that seems to end it, or is not known."""
        if written is not None:
            return self.names[written[1:].decode()] if written[0] == len(written) - 1 else None
        # Names are as many as items: in place of a memo of texts, rows say where each was written.
        index = int.from_bytes(reference[1:], "little")
        row = bisect_left(self._named_at, index)
        if row < len(self._named_at) and self._named_at[row] == index:
            return self.items[ITEM_COLUMNS * row]
        known = self.memo.get(index)
        return self.names[known] if type(known) is str and self._named_at else None

    def _file(self, written: bytes | None, reference: bytes) -> int | None:
        if written is not None:
            return self.files[written[1:].decode()] if written[0] == len(written) - 1 else None
        known = self.memo.get(int.from_bytes(reference[1:], "little"))
        return self.files[known] if type(known) is str else None

    def _shape(self, raw: bytes) -> Shape:
        """The lengths that a tuple of numbers spells."""
        position, shape = int(raw[0] == ord("(")), []
        while position < len(raw) and (width := _WIDTHS.get(raw[position])) is not None:
            end = position + (width or 2 + raw[position + 1])
            shape.append(number_of(raw[position:end]))
            position = end
        self._lengths[raw] = lengths = tuple(shape)
        return lengths

    # --- what the usual form is: classes and keys are referred to by where they were written first ----------
    def _usual_chunk(self, chunk: Any) -> _Usual | None:
        keys = list(chunk.state)
        if sorted(keys) != ["offsets", "sizes"]:
            return None
        size = self._reference(self.find_class("torch", "Size"))
        parts = b"".join(self._reference(key) + size + _LENGTHS for key in keys)
        return self._usual(chunk, parts + _END, sizes_first=keys[0] == "sizes")

    def _usual_item(self, index: Any, info: Any) -> _Usual | None:
        keys = list(index.state)
        usual = sorted(keys) == ["fqn", "index", "offset"] and keys[0] == "fqn"
        if not usual or list(info.state) != ["relative_path", "offset", "length"]:
            return None
        size = self._reference(self.find_class("torch", "Size"))
        values = {"fqn": _TEXT, "index": rb"(?:N|%b)" % _INT, "offset": size + _LENGTHS}
        parts = b"".join(self._reference(key) + values[key] for key in keys) + _END
        parts += self._reference(type(info)) + _NEW + self._reference("relative_path") + _TEXT
        parts += b"".join(self._reference(key) + b"(" + _INT + b")" for key in ("offset", "length")) + _END
        return self._usual(index, parts)

    def _usual(self, record: Any, rest: bytes, *, sizes_first: bool = False) -> _Usual:
        plain = self._reference(type(record), escaped=False)
        return _Usual(plain, re.compile(re.escape(plain) + _NEW + rest, re.DOTALL), sizes_first)

    def _reference(self, value: Any, *, escaped: bool = True) -> bytes:
        """How the pickle refers to what it wrote before."""
        is_text = type(value) is str
        index = next(at for at, known in self.memo.items() if known is value or (is_text and known == value))
        plain = b"h" + bytes((index,)) if index < 256 else b"j" + index.to_bytes(4, "little")
        return re.escape(plain) if escaped else plain


_WIDTHS = {ord("K"): 2, ord("M"): 3, ord("J"): 5, 0x8A: 0}
"""Bytes of an opcode of a whole number with its operand; 0 where the operand begins with its own length."""
