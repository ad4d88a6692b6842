"""Pair tokens: one text or two → token ids and which text each is of, cut together at the longest
input."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer


@dataclass(slots=True)
class PairTokens:
    """Token ids of all rows in a row, and 0 or 1 for each by the text it is of, int64; row ``i`` is
    ``[starts[i]:starts[i] + lengths[i]]``."""

    ids: npt.NDArray[np.int64]
    types: npt.NDArray[np.int64]
    starts: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]


class PairTokenizer:
    """A model's tokenizer, without padding; of two texts the longer loses its end first, as
    transformers cuts pairs.

    Args:
        tokenizer: transformers' own.
        max_tokens: longest input, special tokens included.
    """

    def __init__(self, tokenizer: Any, max_tokens: int) -> None:
        self.padding = int(tokenizer.pad_token_id or 0)
        """The id of what fills a batch."""
        self._tokenizer: Tokenizer = tokenizer.backend_tokenizer
        self._tokenizer.no_padding()
        self._tokenizer.enable_truncation(max_tokens, strategy="longest_first")

    def tokenized(self, rows: Sequence[Any]) -> PairTokens:
        """Of texts, or of pairs of them (tuples)."""
        encodings = self._tokenizer.encode_batch_fast(rows)
        ids, types = ([getattr(one, name) for one in encodings] for name in ("ids", "type_ids"))
        lengths = np.fromiter(map(len, ids), np.int64, len(ids))
        total = int(lengths.sum())
        flat, of = (
            np.fromiter(itertools.chain.from_iterable(lists), np.int64, total)
            for lists in (ids, types)
        )
        return PairTokens(flat, of, np.cumsum(lengths) - lengths, lengths)
