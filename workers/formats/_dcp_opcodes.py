"""The opcodes of pickle that DCP metadata are written with, for ``_dcp_stream``.

Not a general unpickler: what torch does not write there is an ``UnusualError`` or no entry in the table.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

from workers.pickle_records import Mapping, Record, SealedType, make_record
from workers.pickle_sharing import UNCOUNTED_PARTS

if TYPE_CHECKING:
    from workers.formats._dcp_stream import MetadataStream

_FRAME, _FRAME_BYTES, _PROTO_BYTES = 0x95, 9, 2

Operation = Callable[["MetadataStream"], None]


class UnusualError(Exception):
    """The pickle is not of the usual form."""


def without_frames(data: bytearray) -> None:
    """Take out the frames of protocol 4, in place: they say only how much to read at a time."""
    if len(data) <= _PROTO_BYTES or data[0] != 0x80 or data[_PROTO_BYTES] != _FRAME:
        return
    source = target = _PROTO_BYTES
    with memoryview(data) as view:
        while source < len(view):
            length = int.from_bytes(view[source + 1 : source + _FRAME_BYTES], "little")
            begin = source + _FRAME_BYTES
            if view[source] != _FRAME or begin + length > len(view):
                raise UnusualError("frames do not follow each other")
            view[target : target + length] = view[begin : begin + length]
            source, target = begin + length, target + length
    del data[target:]


def number_of(raw: bytes) -> int:
    """The whole number that an opcode and its operand spell; none is negative."""
    return int.from_bytes(raw[2 if raw[0] == 0x8A else 1 :], "little")


def _operand(width: int) -> Callable[[MetadataStream], bytes]:
    def read(stream: MetadataStream) -> bytes:
        begin = stream.position
        stream.position += width
        if stream.position > len(stream.data):
            raise UnusualError("it ends too early")
        return bytes(stream.data[begin : stream.position])

    return read


def _value(width: int, decode: Callable[[bytes], Any]) -> Operation:
    """An opcode that puts a value of fixed width on the stack."""
    operand = _operand(width)
    return lambda stream: stream.stack.append(decode(operand(stream)))


def _counted(width: int, decode: Callable[[bytes], Any]) -> Operation:
    """An opcode that puts a value on the stack which has its length before it."""
    count = _operand(width)

    def put(stream: MetadataStream) -> None:
        stream.stack.append(decode(_operand(int.from_bytes(count(stream), "little"))(stream)))

    return put


def _new(make: Callable[[], Any]) -> Operation:
    return lambda stream: stream.stack.append(make())


def _marked(stream: MetadataStream) -> list[Any]:
    mark = stream.marks.pop()
    values = stream.stack[mark:]
    del stream.stack[mark:]
    return values


def _mark(stream: MetadataStream) -> None:
    stream.marks.append(len(stream.stack))
    stream.take()


def _tuple(count: int) -> Operation:
    def put(stream: MetadataStream) -> None:
        values = tuple(stream.stack[-count:])
        del stream.stack[-count:]
        stream.stack.append(values)

    return put


def _memoize(stream: MetadataStream) -> None:
    stream.memo[stream.memo_size] = stream.stack[-1]
    stream.memo_size += 1


def _get(width: int) -> Operation:
    operand = _operand(width)

    def put(stream: MetadataStream) -> None:
        value = stream.memo[int.from_bytes(operand(stream), "little")]
        if isinstance(value, (tuple, frozenset)) and stream.shared.parts(value) > UNCOUNTED_PARTS:
            raise UnusualError("a large tuple stands in several places")
        stream.stack.append(value)

    return put


def _global(stream: MetadataStream) -> None:
    name, module = stream.stack.pop(), stream.stack.pop()
    if type(name) is not str or type(module) is not str:
        raise UnusualError("a name is no text")
    stream.stack.append(stream.find_class(module, name))


def _new_object(stream: MetadataStream) -> None:
    args, kind = stream.stack.pop(), stream.stack.pop()
    if not isinstance(kind, SealedType) or type(args) is not tuple:
        raise UnusualError("an object of no class")
    stream.stack.append(make_record(kind, args, None))


def _reduce(stream: MetadataStream) -> None:
    args, function = stream.stack.pop(), stream.stack.pop()
    if type(args) is not tuple:
        raise UnusualError("arguments are no tuple")
    stream.stack.append(function(*args))


def _build(stream: MetadataStream) -> None:
    state, record = stream.stack.pop(), stream.stack[-1]
    if not isinstance(record, (Record, Mapping)):
        raise UnusualError("a state of no record")
    record.__setstate__(state)
    stream.built(record)


def _set_items(stream: MetadataStream) -> None:
    _put_items(stream, _marked(stream))


def _set_item(stream: MetadataStream) -> None:
    value, key = stream.stack.pop(), stream.stack.pop()
    _put_items(stream, [key, value])


def _put_items(stream: MetadataStream, values: list[Any]) -> None:
    target, keys = stream.stack[-1], values[::2]
    if not isinstance(target, dict) or not all(isinstance(key, (str, Record)) for key in keys):
        raise UnusualError("keys are no names")
    target.update(zip(keys, values[1::2], strict=True))


def _append_marked(stream: MetadataStream) -> None:
    values = _marked(stream)
    stream.stack[-1].extend(values)


def _append(stream: MetadataStream) -> None:
    value = stream.stack.pop()
    stream.stack[-1].append(value)


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogatepass")


def _little(raw: bytes) -> int:
    return int.from_bytes(raw, "little", signed=True)


@cache
def operations() -> dict[int, Operation]:
    """What each opcode does."""
    from workers.formats._dcp_stream import Chunks  # noqa: PLC0415 - which imports this module

    table: dict[bytes, Operation] = {
        b"\x80": _skip_protocol,
        b"(": _mark,
        b"K": _value(1, lambda raw: raw[0]),
        b"M": _value(2, lambda raw: int.from_bytes(raw, "little")),
        b"J": _value(4, _little),
        b"\x8a": _counted(1, _little),
        b"G": _value(8, lambda raw: struct.unpack(">d", raw)[0]),
        b"N": _new(lambda: None),
        b"\x88": _new(lambda: True),
        b"\x89": _new(lambda: False),
        b"\x8c": _counted(1, _text),
        b"X": _counted(4, _text),
        b"C": _counted(1, bytes),
        b")": _new(tuple),
        b"}": _new(dict),
        b"]": _new(Chunks),
        b"\x85": _tuple(1),
        b"\x86": _tuple(2),
        b"\x87": _tuple(3),
        b"t": lambda stream: stream.stack.append(tuple(_marked(stream))),
        b"\x94": _memoize,
        b"h": _get(1),
        b"j": _get(4),
        b"\x93": _global,
        b"\x81": _new_object,
        b"R": _reduce,
        b"b": _build,
        b"u": _set_items,
        b"s": _set_item,
        b"e": _append_marked,
        b"a": _append,
    }
    return {code[0]: operation for code, operation in table.items()}


def _skip_protocol(stream: MetadataStream) -> None:
    stream.position += 1
