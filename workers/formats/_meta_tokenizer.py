"""Meta's tokenizer.model: a sentencepiece model up to Llama 2, ranks of byte sequences since Llama 3.

Told apart by content. The first is copied; of the second a tokenizer.json is made when files are written.
Sources: llama-models ``models/llama3/tokenizer.py``; transformers ``convert_llama_weights_to_hf.py``
(``Llama3Converter``).
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from workers.checkpoint import SideFile
from workers.formats._format import Listing
from workers.tokenizer_files import BEGIN, END, TIKTOKEN

TOKENIZER = "tokenizer.model"
_RANK = re.compile(rb"[A-Za-z0-9+/]+={0,2} \d+")
_LARGEST_TOKENIZER_BYTES = 64 << 20
_MADE = ("tokenizer.json", "tokenizer_config.json")

Made = tuple[tuple[str, bytes], ...]


@dataclass(frozen=True, slots=True)
class Tokenizer:
    """What tokenizer.model is."""

    path: str
    size_bytes: int
    ranks: int | None
    """Tokens of a file of ranks, after which the special ones are numbered; None for a sentencepiece model."""

    @property
    def taken(self) -> frozenset[str]:
        """Names of side files that are not copied as they are."""
        return frozenset((TOKENIZER,)) if self.ranks is not None else frozenset()

    def files(self, version: str) -> tuple[tuple[SideFile, ...], Made]:
        """Files that are made of it: by conversion when they are written, or here."""
        if self.ranks is None:
            return (), ((_MADE[1], _json(_SENTENCEPIECE)),)
        how = f"{TIKTOKEN}:{version or '3'}"
        made = SideFile(self.path, _MADE[0], self.size_bytes, conversion=how)
        return (made,), ((_MADE[1], _json(_FAST)),)


def meta_tokenizer(listing: Listing) -> Tokenizer | None:
    """Look at tokenizer.model, here or in the folder above; None when there is none."""
    entry = listing.file(TOKENIZER)
    if entry is None or entry.size_bytes > _LARGEST_TOKENIZER_BYTES:
        return None
    lines = [line for line in listing.folder.read(entry.path).splitlines() if line]
    ranks = len(lines) if lines and all(map(_RANK.fullmatch, lines)) else None
    return Tokenizer(entry.path, entry.size_bytes, ranks)


def _json(values: dict[str, object]) -> bytes:
    return (json.dumps(values, indent=2, ensure_ascii=False) + "\n").encode()


_SENTENCEPIECE: dict[str, object] = {
    "add_bos_token": True,
    "add_eos_token": False,
    "bos_token": "<s>",
    "clean_up_tokenization_spaces": False,
    "eos_token": "</s>",
    "legacy": False,
    "tokenizer_class": "LlamaTokenizer",
    "unk_token": "<unk>",
}
_FAST: dict[str, object] = {
    "bos_token": BEGIN,
    "clean_up_tokenization_spaces": True,
    "eos_token": END,
    "model_input_names": ["input_ids", "attention_mask"],
    "tokenizer_class": "PreTrainedTokenizerFast",
}
