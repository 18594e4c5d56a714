"""Tokenizer files that are made of others while they are written: Hugging Face's tokenizer.json from tiktoken's ranks.

Sources: llama-models ``models/llama3/tokenizer.py`` (pattern, special tokens); transformers
``convert_slow_tokenizer.py`` (``TikTokenConverter``).
"""

from __future__ import annotations

import base64
import binascii
import json
from typing import Any

from workers.checkpoint import SideFile
from workers.errors import CorruptFile
from workers.storage import Folder, open_folder

TIKTOKEN = "tiktoken"
BEGIN, END = "<|begin_of_text|>", "<|end_of_text|>"

_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_SPECIAL = 256
_IMAGE_SINCE = "3.2-vision"


def special_tokens(version: str) -> list[str]:
    """The special tokens that follow the ranks, in their order: those of Llama 3, or of 3.1 and later."""
    if version == "3":
        named = ["begin_of_text", "end_of_text", *_reserved(0, 4), "start_header_id", "end_header_id"]
        named += [*_reserved(4, 5), "eot_id"]
        first = 5
    else:
        named = ["begin_of_text", "end_of_text", *_reserved(0, 2), "finetune_right_pad_id", *_reserved(2, 3)]
        named += ["start_header_id", "end_header_id", "eom_id", "eot_id", "python_tag"]
        first = 3
    named += _reserved(first, first + _SPECIAL - len(named))
    named += ["image"] if version == _IMAGE_SINCE else []
    return [f"<|{name}|>" for name in named]


def _reserved(start: int, stop: int) -> list[str]:
    return [f"reserved_special_token_{number}" for number in range(start, stop)]


def content_of(side: SideFile, own: Folder) -> bytes:
    """What a side file of the result holds; ``own`` is the checkpoint's folder, where most are read from."""
    folder = own if side.folder is None else open_folder(side.folder)
    return converted(folder.read(side.source_path), side.conversion, side.source_path)


def converted(data: bytes, conversion: str, file: str) -> bytes:
    """The content of a side file that is made of another one; "" leaves it as it is."""
    if not conversion:
        return data
    _, _, version = conversion.partition(":")
    return tokenizer_json(ranks_of(data, file), version)


def ranks_of(data: bytes, file: str) -> dict[bytes, int]:
    """Tokens and their ranks, of lines with a token in base64 and its rank; ``CorruptFile`` for anything else."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(data.splitlines(), 1):
        if not line:
            continue
        token, _, rank = line.partition(b" ")
        try:
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (binascii.Error, ValueError):
            raise CorruptFile(
                f"{file}: line {number} is no token in base64 and its rank",
                file=file,
                expected="base64 and a number",
                found=repr(line[:40]),
                hint="Fetch tokenizer.model again from where the weights came from.",
            ) from None
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise CorruptFile(
            f"{file}: the ranks of its {len(ranks)} tokens are not 0 to {len(ranks) - 1}",
            file=file,
            hint="Fetch tokenizer.model again from where the weights came from.",
        )
    return ranks


def tokenizer_json(ranks: dict[bytes, int], version: str) -> bytes:
    """Hugging Face's tokenizer.json: byte-level BPE with these ranks, and the special tokens after them."""
    letters = _byte_letters()

    def spelled(token: bytes) -> str:
        return "".join(letters[value] for value in token)

    specials = special_tokens(version)
    begin = len(ranks)
    content: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_added(begin + place, text) for place, text in enumerate(specials)],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": _PATTERN}, "behavior": "Isolated", "invert": False},
                {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
            ],
        },
        "post_processor": _begin_of_text(begin),
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": True,
            "vocab": {spelled(token): rank for token, rank in ranks.items()},
            "merges": [[spelled(left), spelled(right)] for left, right in merges_of(ranks)],
        },
    }
    return json.dumps(content, ensure_ascii=False).encode()


def merges_of(ranks: dict[bytes, int]) -> list[tuple[bytes, bytes]]:
    """Merges in the order in which BPE tries them: every way to make a token of two others, tokens by rank."""
    merges: list[tuple[bytes, bytes]] = []
    for token in sorted(ranks, key=lambda token: ranks[token]):
        ways = [
            (token[:cut], token[cut:]) for cut in range(1, len(token)) if token[:cut] in ranks and token[cut:] in ranks
        ]
        merges += sorted(ways, key=lambda way: (ranks[way[0]], ranks[way[1]]))
    return merges


def _added(number: int, text: str) -> dict[str, Any]:
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {"id": number, "content": text, **plain}


def _begin_of_text(number: int) -> dict[str, Any]:
    begin = {"SpecialToken": {"id": BEGIN, "type_id": 0}}
    first = {"Sequence": {"id": "A", "type_id": 0}}
    second = {"Sequence": {"id": "B", "type_id": 1}}
    template = {
        "type": "TemplateProcessing",
        "single": [begin, first],
        "pair": [begin, first, {"SpecialToken": {"id": BEGIN, "type_id": 1}}, second],
        "special_tokens": {BEGIN: {"id": BEGIN, "ids": [number], "tokens": [BEGIN]}},
    }
    level = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True}
    return {"type": "Sequence", "processors": [level, template]}


def _byte_letters() -> dict[int, str]:
    """GPT-2's printable stand-ins for bytes: ``transformers`` calls this ``bytes_to_unicode``."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [value for value in range(256) if value not in printable]
    return {value: chr(value) for value in printable} | {value: chr(256 + n) for n, value in enumerate(others)}
