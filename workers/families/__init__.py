"""Families: what becomes of each tensor of a checkpoint in a Hugging Face model.

``map_checkpoint`` is the one way in. It works on names, shapes and the config; the only bytes it asks for are those
that tell whether tied embeddings are equal.
"""

from __future__ import annotations

from workers.families.apply import map_checkpoint
from workers.families.registry import all_tables, find_tables

__all__ = ["all_tables", "find_tables", "map_checkpoint"]
