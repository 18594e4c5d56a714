"""Checkpoints of one process from plain state dicts, and what becomes of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.formats.evaluator import Evaluator
from workers.families import map_checkpoint
from workers.formats import open_checkpoint
from workers.mapping import Mapping
from workers.options import ConvertOptions
from workers.storage import open_folder

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64}


class Run:
    """A run folder with one rank file, in which ``convert`` shows what a conversion would write."""

    def __init__(self, folder: Path, state: dict[str, torch.Tensor], config: dict[str, Any] | None = None) -> None:
        self.folder = folder
        torch.save(state, folder / "model_world_size_1_rank_0.pt")
        if config is not None:
            (folder / "huggingface").mkdir()
            (folder / "huggingface" / "config.json").write_text(json.dumps(config))

    def convert(self, **options: Any) -> Result:
        checkpoint = open_checkpoint(open_folder(str(self.folder)), ConvertOptions(**options))
        evaluator = Evaluator(checkpoint)
        return Result(map_checkpoint(checkpoint, ConvertOptions(**options), evaluator), evaluator)


class Result:
    """A mapping, and the values that it stands for."""

    def __init__(self, mapping: Mapping, evaluator: Evaluator) -> None:
        self.mapping = mapping
        self._evaluator = evaluator

    def tensors(self, folder: str = "") -> dict[str, torch.Tensor]:
        """The targets of a folder as torch tensors, by name."""
        targets = [target for target in self.mapping.targets if target.folder == folder]
        return {target.name: self._tensor(target.expression) for target in targets}

    def _tensor(self, expression) -> torch.Tensor:
        values = np.ascontiguousarray(self._evaluator.evaluate(expression))
        return torch.frombuffer(bytearray(values.tobytes()), dtype=DTYPES[expression.dtype]).reshape(expression.shape)

    def json(self, path: str = "config.json") -> dict[str, Any]:
        """A file of the result that is JSON."""
        content: dict[str, Any] = json.loads(dict(self.mapping.files)[path])
        return content

    @property
    def dropped(self) -> list[str]:
        return [dropped.name for dropped in self.mapping.dropped]
