"""Tokens: of any text, and at any longest input, those that transformers' own call makes, though
most of a long text is never looked at."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from precompute.text.tokens import TextTokenizer
from tests.precompute.sentence_models import WORDS, tokenizer

PIECES = [
    *WORDS[:6],
    "b",
    "b" * 40,
    "b" * 101,
    "b" * 150,
    "-",
    " ",
    "  ",
    "\t",
    "\n",
    "\x0b",
    "\x1c",
    "\x85",
    "\xa0",
    "\u3000",
    "\u2028",
    "日本語",
    "\u0301",
]
TEXTS = st.lists(st.sampled_from(PIECES), max_size=40).map("".join) | st.text(max_size=300)


@cache
def tokenizers(kind: str, max_tokens: int, keep_long: bool) -> tuple[TextTokenizer, object]:
    return TextTokenizer(tokenizer(kind), max_tokens, keep_long=keep_long), tokenizer(kind)


def check(kind: str, text: str, max_tokens: int) -> None:
    ours, theirs = tokenizers(kind, max_tokens, False)
    ids, lengths = ours.tokenized([text])
    assert ids.tolist() == theirs(text, truncation=True, max_length=max_tokens)["input_ids"]  # type: ignore[operator]
    assert lengths.tolist() == [len(ids)]
    longer = len(theirs(text)["input_ids"]) > max_tokens  # type: ignore[operator]
    assert tokenizers(kind, max_tokens, True)[0].tokenized([text])[1].tolist() == [
        max_tokens + 1 if longer else len(ids)
    ]


@pytest.mark.parametrize("kind", ["bert", "distilbert", "roberta", "xlm-roberta"])
@settings(max_examples=150, deadline=None)
@given(text=TEXTS, max_tokens=st.integers(3, 12))
@example(text="b" * 150, max_tokens=3)
@example(text="b" * 150 + " snow", max_tokens=6)
@example(text="heist-heist-" + "b" * 150, max_tokens=7)
@example(text="a\x1c" * 60 + "b" * 30, max_tokens=3)
def test_tokens_are_transformers_own(kind: str, text: str, max_tokens: int) -> None:
    check(kind, text, max_tokens)
