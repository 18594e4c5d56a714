"""Geometry of byte ranges: joining near ones, cutting long ones. Nothing is read here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass


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


def scatter(spans: Sequence[Span], views: Sequence[memoryview], ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
    """The view of each range out of the views of the spans that hold them."""
    parts = [memoryview(b"")] * len(ranges)
    for span, view in zip(spans, views, strict=True):
        for index in span.members:
            offset, length = ranges[index]
            parts[index] = view[offset - span.offset : offset - span.offset + length]
    return parts
