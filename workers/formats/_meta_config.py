"""stub"""
from __future__ import annotations
from workers.checkpoint import Checkpoint
from workers.formats._format import Listing
from workers.options import ConvertOptions

def with_meta_config(checkpoint: Checkpoint, listing: Listing, options: ConvertOptions) -> Checkpoint:
    return checkpoint
