"""tokenizer.json from tiktoken's ranks: the same ids as merging pairs by rank gives."""

from __future__ import annotations

import base64
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from workers.errors import CorruptFile
from workers.tokenizer_files import ranks_of, special_tokens, tokenizer_json


def ranks_file(tokens: list[bytes]) -> bytes:
    return b"".join(base64.b64encode(token) + f" {rank}\n".encode() for rank, token in enumerate(tokens))


def merged_by_rank(word: bytes, ranks: dict[bytes, int]) -> list[int]:
    """tiktoken's ``byte_pair_merge``."""
    parts = [word[i : i + 1] for i in range(len(word))]
    if word in ranks:
        return [ranks[word]]
    while True:
        pairs = [(ranks.get(a + b, 1 << 30), i) for i, (a, b) in enumerate(pairwise(parts))]
        if not pairs or min(pairs)[0] == 1 << 30:
            return [ranks[part] for part in parts]
        place = min(pairs)[1]
        parts[place : place + 2] = [parts[place] + parts[place + 1]]


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_words_are_cut_as_tiktoken_cuts_them(data):
    tokens = [bytes([value]) for value in range(256)]
    for _ in range(data.draw(st.integers(0, 25))):
        letters = st.sampled_from([token for token in tokens if token.isalpha() and token.isascii()])
        token = data.draw(letters) + data.draw(letters)
        if token not in tokens:
            tokens.append(token)
    ranks = ranks_of(ranks_file(tokens), "tokenizer.model")
    tokenizer = Tokenizer.from_str(tokenizer_json(ranks, "3").decode())
    word = data.draw(st.text(st.sampled_from("abcdeé"), min_size=1, max_size=8))
    assert tokenizer.encode(word).ids == [len(tokens), *merged_by_rank(word.encode(), ranks)]


def test_the_special_tokens_have_the_numbers_of_the_releases():
    older, newer = special_tokens("3"), special_tokens("3.1")
    assert len(older) == len(newer) == 256
    places = {"<|begin_of_text|>": 0, "<|end_of_text|>": 1, "<|start_header_id|>": 6, "<|end_header_id|>": 7}
    assert all(older[place] == newer[place] == token for token, place in places.items())
    assert older[9] == newer[9] == "<|eot_id|>"
    assert (newer[4], newer[8], newer[10]) == ("<|finetune_right_pad_id|>", "<|eom_id|>", "<|python_tag|>")
    assert (older[-1], newer[-1]) == ("<|reserved_special_token_250|>", "<|reserved_special_token_247|>")
    assert special_tokens("3.2-vision")[256] == "<|image|>"


@pytest.mark.parametrize("content", [b"YQ== 1\n", b"YQ== 0\nYg== 0\n", b"!! 0\n", b"YQ==\n", b"YQ== x\n"])
def test_lines_that_are_no_ranks_are_refused(content):
    with pytest.raises(CorruptFile):
        ranks_of(content, "tokenizer.model")
