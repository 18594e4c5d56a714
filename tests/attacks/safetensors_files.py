"""Broken safetensors files, and the words that the refusal of each must say."""

from __future__ import annotations

import json
import struct


def file_of(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(dtype: object = "U8", shape: object = (2,), offsets: object = (0, 2)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def many_names(count: int) -> bytes:
    """A header of many tensors without elements, the last of them twice."""
    names = [*range(count), count - 1]
    entries = (f'"t{number}":{{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}' for number in names)
    return file_of(f"{{{','.join(entries)}}}".encode())


LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 4963189240\n"

BROKEN: dict[str, tuple[bytes, tuple[str, ...]]] = {
    "empty": (b"", ("empty",)),
    "a Git LFS pointer": (LFS_POINTER, ("Git LFS pointer", "git lfs pull")),
    "a zip": (b"PK\x03\x04" + bytes(60), ("zip archive",)),
    "a web page": (b"<!DOCTYPE html><html></html>", ("web page",)),
    "zeros": (bytes(100), ("JSON",)),
    "no JSON": (file_of(b"{nothing}"), ("JSON",)),
    "no UTF-8": (file_of(b'{"\xff":1}'), ("JSON",)),
    "a list": (file_of(b" []"), ("JSON object",)),
    "NaN": (file_of(b'{"a":NaN}'), ("NaN",)),
    "nested too deep": (file_of(b'{"a":' + b"[" * 200_000), ("JSON",)),
    "metadata that are numbers": (file_of({"__metadata__": {"a": 1}}), ("metadata",)),
    "a name twice": (
        file_of(
            b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}',
            b"x",
        ),
        ("'a' twice",),
    ),
    "no entry": (file_of({"a": 3}), ("tensor a", "data_offsets")),
    "an unknown dtype": (file_of({"a": entry("F7")}, b"xy"), ("tensor a", "F7")),
    "a dtype that is a list": (file_of({"a": entry(["U8"])}, b"xy"), ("tensor a",)),
    "a negative shape": (file_of({"a": entry(shape=(-2,))}, b"xy"), ("tensor a", "-2")),
    "a fractional shape": (file_of({"a": entry(shape=(2.0,))}, b"xy"), ("tensor a", "2.0")),
    "a boolean shape": (file_of({"a": entry(shape=(True, 2))}, b"xy"), ("tensor a",)),
    "three offsets": (file_of({"a": entry(offsets=(0, 1, 2))}, b"xy"), ("tensor a",)),
    "offsets of another size": (file_of({"a": entry(offsets=(0, 1))}, b"xy"), ("tensor a", "2 bytes")),
    "offsets beyond 64 bits": (file_of({"a": entry(offsets=(0, 1 << 70))}, b"xy"), ("tensor a",)),
    "a shape that overflows": (file_of({"a": entry(shape=(1 << 40, 1 << 40))}, b"xy"), ("tensor a",)),
    "a shape of very many dimensions": (
        file_of({"a": entry(shape=[1 << 62] * 100_000)}, b"xy"),
        ("tensor a", "100000", "64 dimensions"),
    ),
    "the last of many names twice": (many_names(60_000), ("'t59999' twice",)),
    "a hole": (file_of({"a": entry(offsets=(1, 3))}, b"xyz"), ("tensor a", "hole")),
    "an overlap": (file_of({"a": entry(), "b": entry(offsets=(1, 3))}, b"xyz"), ("tensor b", "overlap")),
    "other data behind": (file_of({"a": entry()}, b"xyz"), ("other data follow",)),
    "truncated": (file_of({"a": entry()}, b"x"), ("truncated",)),
}
