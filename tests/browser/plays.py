"""Conversions that follow a script: real plans of real sizes, and progress as far as a test lets it go."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from workers.convert import Result
from workers.errors import Cancelled
from workers.events import FileCompleted, Planned, Progress, Started, Verifying

HEADER = 4096
WORKERS = 6
STEPS = 40
AHEAD = 0.05
"""Merging runs ahead of the upload by this share of all."""


def rows_of_a_model(layers: int, experts: int, file_bytes: int) -> list[dict[str, Any]]:
    """The tensor table of a mixture of experts, in files of at most a size."""
    rows: list[dict[str, Any]] = []
    file, offset = 1, HEADER

    def add(name: str, *shape: int, sources: list[str] | None = None, operation: str = "copy") -> None:
        nonlocal file, offset
        size = 2
        for length in shape:
            size *= length
        if offset > HEADER and offset + size > file_bytes:
            file, offset = file + 1, HEADER
        place = {"file": str(file), "offset": offset, "size_bytes": size}
        made = {"sources": sources or [name], "operation": operation}
        rows.append({"name": name, "dtype": "bfloat16", "shape": list(shape), **place, **made})
        offset += size

    add("model.embed_tokens.weight", 32000, 2048)
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        fused = [f"decoder.layers.{layer}.self_attention.linear_qkv.weight"]
        add(prefix + "input_layernorm.weight", 2048)
        for part, length in (("q", 4096), ("k", 512), ("v", 512)):
            add(f"{prefix}self_attn.{part}_proj.weight", length, 2048, sources=fused, operation="split")
        add(prefix + "self_attn.o_proj.weight", 2048, 4096)
        for expert in range(experts):
            packed = [f"decoder.layers.{layer}.mlp.experts.linear_fc1.weight{expert}"]
            for part in ("gate_proj", "up_proj", "down_proj"):
                name = f"{prefix}mlp.experts.{expert}.{part}.weight"
                add(name, 768, 2048, sources=packed, operation="slice")
    add("lm_head.weight", 32000, 2048)
    for row in rows:
        row["file"] = f"model-{int(row['file']):05}-of-{file:05}.safetensors"
    return rows


@dataclass
class Play:
    """One conversion. It goes as far as ``until`` says, from 0 to 1, and then fails or waits or ends."""

    layers: int = 12
    experts: int = 6
    file_bytes: int = 300_000_000
    until: float = 1.0
    failure: BaseException | None = None
    step_s: float = 0.0
    _moved: threading.Condition = field(default_factory=threading.Condition)

    def __post_init__(self) -> None:
        self.rows = rows_of_a_model(self.layers, self.experts, self.file_bytes)
        self.files: list[dict[str, Any]] = []
        for row in self.rows:
            if not self.files or self.files[-1]["name"] != row["file"]:
                self.files.append({"name": row["file"], "size_bytes": HEADER, "tensors": 0, "parts": 4})
            self.files[-1]["size_bytes"] = row["offset"] + row["size_bytes"]
            self.files[-1]["tensors"] += 1
        self.total = sum(file["size_bytes"] for file in self.files)

    def go(self, until: float) -> None:
        with self._moved:
            self.until = until
            self._moved.notify_all()

    def summary(self) -> dict[str, Any]:
        return {
            "fingerprint": "6b1fd1f8a2f14f0e9a7d3c5b2e8f4a10",
            "source": {"format": "megatron-dist", "family": "qwen3_moe"},
            "tensors": len(self.rows),
            "bytes_total": self.total,
            "files": self.files,
            "small_files": ["config.json", "generation_config.json", "tokenizer.json"],
            "parts": 4 * len(self.files),
            "largest_part_bytes": 67_108_864,
            "worker_memory_bytes": 402_653_184,
            "dropped": [],
            "notes": ["rotary frequencies are computed, not stored"],
            "cost": {"bytes_read": 2 * self.total, "pieces_read": 4 * len(self.rows), "bytes_written": self.total},
        }

    def perform(self, destination: str, observer: Any, cancel: threading.Event, controls: dict[str, Any]) -> Result:
        observer(Planned(self.summary(), lambda: iter(self.rows)))
        observer(Started(controls["attempt"], ()))
        finished = 0
        for share in self._shares(cancel):
            if share > self.until and self.failure is not None:
                failure, self.failure, self.until = self.failure, None, 1.0
                raise failure
            progress, names = self._progress(share)
            for name in names[finished:]:
                size = next(file["size_bytes"] for file in self.files if file["name"] == name)
                observer(FileCompleted(name, size, "d"))
            finished = len(names)
            observer(progress)
        observer(Verifying())
        controls["may_commit"]()
        weights = [{"path": f["name"], "size_bytes": f["size_bytes"], "digest": "xxh3-128:d"} for f in self.files]
        manifest = {"weights": weights, "files": []}
        return Result(
            destination, manifest, {"tensors": len(self.rows)}, 2.0, self.total, 2 * self.total, self.total, ()
        )

    def _shares(self, cancel: threading.Event) -> Iterator[float]:
        """How far it is, step by step; where it may not go on the last one again and again, as engines do."""
        step = 0
        while step <= STEPS:
            if cancel.wait(self.step_s):
                raise Cancelled("stopped")
            if step / STEPS > self.until and self.failure is None:
                with self._moved:
                    self._moved.wait(0.05)
                yield max(0, step - 1) / STEPS
                continue
            yield step / STEPS
            step += 1

    def _progress(self, share: float) -> tuple[Progress, list[str]]:
        done, start, tensors = int(self.total * share), 0, 0
        names: list[str] = []
        written: dict[str, list[tuple[int, int]]] = {}
        for file in self.files:
            stop = start + file["size_bytes"]
            if stop <= done:
                names.append(file["name"])
                tensors += file["tensors"]
            elif done > start + HEADER:
                written[file["name"]] = [(HEADER, done - start)]
                tensors += file["tensors"] * (done - start) // file["size_bytes"]
            start = stop
        at_work = {
            f"merger-{worker}": self.files[min(len(self.files) - 1, len(names) + worker % 3)]["name"]
            for worker in range(WORKERS)
        }
        merged = int(self.total * min(1, share + AHEAD))
        told = Progress(
            bytes_done=done,
            bytes_total=self.total,
            bytes_read=2 * merged,  # of float32, made into bfloat16
            bytes_merged=merged,
            tensors_done=tensors,
            tensors_total=len(self.rows),
            files_done=len(names),
            files_total=len(self.files),
            workers=at_work,
            written=written,
        )
        return told, names


@dataclass
class Stage:
    """Stands in for ``convert``: each destination has its play; those without one are done at once."""

    plays: dict[str, Play] = field(default_factory=dict)

    def __call__(self, _source, destination, _options, *, observer, cancel, **controls):
        play = self.plays.get(destination) or Play(layers=1, experts=1)
        return play.perform(destination, observer, cancel, controls)
