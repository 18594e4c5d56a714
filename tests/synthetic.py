"""Checkpoints made by hand for tests of the pipeline: random tilings of known tensors in raw files."""

from __future__ import annotations

import random
from collections.abc import Mapping as Dictionary
from pathlib import Path
from typing import Any

import numpy as np

from workers.checkpoint import Checkpoint, SourceFile
from workers.checkpoint_builder import CheckpointBuilder
from workers.checksums import crc32
from workers.dtypes import ELEMENT_TYPES
from workers.expressions import Source
from workers.geometry import contiguous_strides
from workers.mapping import Dropped, Mapping, Target
from workers.options import ConvertOptions
from workers.plan import Plan, make_plan
from workers.storage import open_folder

FILES = 3
DTYPES = {"F32": np.uint32, "BF16": np.uint16, "U8": np.uint8, "I64": np.uint64}


def random_tensors(seed: int, count: int = 6) -> dict[str, tuple[str, np.ndarray[Any, Any]]]:
    """Name -> (dtype, raw elements) of tensors of many shapes."""
    rng = np.random.default_rng(seed)
    shapes = [(), (1,), (7,), (33, 5), (4, 6, 5), (64, 48), (3, 1, 2, 5), (0, 4)]
    tensors = {}
    for number in range(count):
        dtype = sorted(DTYPES)[number % len(DTYPES)]
        shape = shapes[int(rng.integers(len(shapes)))]
        values = rng.integers(0, 2 ** (8 * ELEMENT_TYPES[dtype].size_bytes - 2), size=shape, dtype=np.uint64)
        tensors[f"layer.{number}.weight"] = dtype, np.asarray(values).astype(DTYPES[dtype])
    return tensors


def tiling(
    shape: tuple[int, ...], random_: random.Random, depth: int = 3
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Boxes that tile a shape, by random cuts."""
    boxes = [(tuple(0 for _ in shape), shape)]
    for _ in range(depth if shape and 0 not in shape else 0):
        offsets, sizes = boxes.pop(random_.randrange(len(boxes)))
        dim = random_.randrange(len(shape))
        if sizes[dim] < 2:
            boxes.append((offsets, sizes))
            continue
        cut = random_.randrange(1, sizes[dim])
        boxes.append((offsets, (*sizes[:dim], cut, *sizes[dim + 1 :])))
        moved = (*offsets[:dim], offsets[dim] + cut, *offsets[dim + 1 :])
        boxes.append((moved, (*sizes[:dim], sizes[dim] - cut, *sizes[dim + 1 :])))
    return boxes


def write_source(
    folder: Path, tensors: Dictionary[str, tuple[str, np.ndarray[Any, Any]]], seed: int, *, transposed: bool = True
) -> Checkpoint:
    """Write tensors as pieces in raw files, some transposed, some with padding behind them, with checksums."""
    random_ = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    builder = CheckpointBuilder()
    contents = [bytearray(b"head") for _ in range(FILES)]
    rows = []
    for name, (dtype, values) in tensors.items():
        for offsets, sizes in tiling(values.shape, random_):
            window = values[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))]
            strides = contiguous_strides(sizes)
            if transposed and len(sizes) == 2 and random_.random() < 0.3:
                window, strides = window.T, (1, sizes[0])
            data = np.ascontiguousarray(window).tobytes()
            padding = random_.choice([0, 0, 24])
            file = random_.randrange(FILES)
            rows.append(
                (name, dtype, values.shape, (offsets, sizes), strides, file, len(contents[file]), data, padding)
            )
            contents[file] += data + b"\0" * padding
    for number, content in enumerate(contents):
        path = folder / f"rank-{number}.bin"
        path.write_bytes(content)
        builder.add_file(SourceFile(path.name, len(content), rank=number, digest=f"{crc32(bytes(content)):x}"))
    for name, dtype, shape, box, strides, file, offset, data, padding in rows:
        tensor = builder.add_tensor(name, dtype, shape)
        whole = data + b"\0" * padding
        storage = builder.add_storage(file, offset, len(whole), crc32(whole))
        builder.add_piece(tensor, storage, offset, box, strides)
    return checkpoint_of(builder, folder)


def checkpoint_of(builder: CheckpointBuilder, folder: Path) -> Checkpoint:
    """What a builder holds, of files in a folder."""
    storages, pieces, replicas = builder.tables()
    return Checkpoint(
        address=open_folder(str(folder)).address,
        format="synthetic",
        naming="none",
        files=tuple(builder.files),
        tensors=tuple(builder.tensors),
        storages=storages,
        pieces=pieces,
        replicas=replicas,
    )


def identity_plan(checkpoint: Checkpoint, options: ConvertOptions | None = None) -> Plan:
    """A plan that keeps every tensor as it is."""
    targets = tuple(Target(t.name, Source(n, t.dtype, t.shape)) for n, t in enumerate(checkpoint.tensors))
    mapping = Mapping(
        "names kept", targets, (Dropped("x", "for show"),), (("config.json", b'{"model_type": "synthetic"}'),), (), ()
    )
    return make_plan(checkpoint, mapping, options or ConvertOptions())
