"""Geometry of byte ranges: joining near ones, cutting long ones. Nothing is read here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

LARGEST_OVERHEAD = 2
"""Times the bytes asked for that may be kept in memory for them."""


@dataclass(frozen=True, slots=True)
class Span:
    """One read that serves several ranges; ``members`` are their positions in the sequence that was asked for."""

    offset: int
    length: int
    members: tuple[int, ...]


def coalesce(ranges: Sequence[tuple[int, int]], *, max_gap: int, max_length: int) -> list[Span]:
    """Join (offset, length) ranges that lie at most ``max_gap`` bytes apart, up to ``max_length`` bytes a span.

    Spans come sorted by offset. A range that is longer than ``max_length`` is a span of its own; one that lies
    inside the span before it joins that span whatever its length. Empty ranges are in no span.
    """
    spans: list[Span] = []
    start = stop = -1
    members: list[int] = []
    for index in sorted((i for i, (_, length) in enumerate(ranges) if length), key=lambda i: ranges[i]):
        offset, length = ranges[index]
        end = max(stop, offset + length)
        fits = end - start <= max_length or end == stop
        if members and offset - stop <= max_gap and fits:
            stop = end
            members.append(index)
            continue
        if members:
            spans.append(Span(start, stop - start, tuple(members)))
        start, stop, members = offset, offset + length, [index]
    if members:
        spans.append(Span(start, stop - start, tuple(members)))
    return spans


def cut(length: int, piece: int) -> Iterator[tuple[int, int]]:
    """(offset, length) pieces of at most ``piece`` bytes that cover ``length`` bytes."""
    for offset in range(0, length, piece):
        yield offset, min(piece, length - offset)


def pick(span: Span, view: memoryview, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
    """The bytes of a span's ranges, in the order of its members, out of the span's own.

    Where most of the span lies between its ranges they are copies, so that what was read for nothing goes.
    """
    wanted = [(ranges[index][0] - span.offset, ranges[index][1]) for index in span.members]
    size = sum(length for _, length in wanted)
    if span.length <= LARGEST_OVERHEAD * size:
        return [view[start : start + length] for start, length in wanted]
    dense = memoryview(bytearray(size))
    parts, end = [], 0
    for start, length in wanted:
        dense[end : end + length] = view[start : start + length]
        parts.append(dense[end : end + length])
        end += length
    return parts


def scatter(spans: Sequence[Span], picked: Sequence[Sequence[memoryview]], count: int) -> list[memoryview]:
    """What was picked for the members of each span, in the order in which ``count`` ranges were asked for."""
    parts = [memoryview(b"")] * count
    for span, views in zip(spans, picked, strict=True):
        for index, view in zip(span.members, views, strict=True):
            parts[index] = view
    return parts
