"""What a user runs today, as a script: load every rank's file, concatenate, ``save_pretrained``.

The steps are those of verl's ``model_merger``; files are loaded with torch's own allow-list instead of an open one.
Usage: python -m benchmarks.peer_merge SOURCE DESTINATION
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import torch
import transformers
from torch.distributed.tensor import DTensor


def main(source: str, destination: str) -> None:
    """Merge a checkpoint in one process."""
    folder = Path(source)
    paths = sorted(
        folder.glob("model_world_size_*_rank_*.pt"), key=lambda path: int(re.findall(r"\d+", path.name)[-1])
    )
    ranks = [torch.load(path, map_location="cpu", weights_only=True) for path in paths]
    merged = {}
    for name in list(ranks[0]):
        pieces = [rank.pop(name) for rank in ranks]
        merged[name] = torch.cat([piece.to_local() if isinstance(piece, DTensor) else piece for piece in pieces])
    config = transformers.AutoConfig.from_pretrained(folder / "huggingface")
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    model.to_empty(device="cpu")
    model.save_pretrained(destination, state_dict=merged)


if __name__ == "__main__":
    main(*sys.argv[1:])
