"""Chunker: cuts a long text into overlapping chunks of at most so many tokens, between words where
there are any, in memory of a few times the text."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from tokenizers import Tokenizer

from precompute.model import resolve_path
from precompute.store.errors import ConfigError
from precompute.text.tokens import BLANKS

CHUNK_TYPE = pa.list_(pa.struct([("chunk", pa.int64()), ("piece", pa.string())]))

BLOCK_CHARS, BLOCKS = 32_768, 8
"""Characters of a text that are tokenised at a time, up to the end of a word; and how many such
blocks at once, a core each: a token takes a hundred bytes."""

_BLANKS = np.array([ord(blank) for blank in BLANKS], np.uint32)


class Chunker:
    """Cuts texts by one tokenizer.

    Args:
        tokenizer: a ``tokenizer.json``, or a model's folder that has one; ``package:name/folder``
            inside a package.
        tokens: of a chunk at most, the special ones that a model adds included.
        overlap: tokens that a chunk has in common with the one before, at most.

    Raises:
        ConfigError: there is no such tokenizer, or it leaves no room.
    """

    def __init__(self, tokenizer: str, tokens: int, overlap: int) -> None:
        self._tokenizer = _loaded(tokenizer)
        self._most = tokens - self._tokenizer.num_special_tokens_to_add(False)
        self._overlap = overlap
        if self._most <= overlap:
            raise ConfigError(
                f"chunk: of {tokens} tokens {self._most} are left beside the special ones, and"
                f" overlap is {overlap}: make tokens more"
            )

    def column(self, texts: pa.Array) -> pa.Array:
        """The chunks of each text, numbered from 0, as :data:`CHUNK_TYPE`; a null or blank text is
        one chunk."""
        made: list[list[dict[str, object]]] = []
        for text in texts:
            whole = text.as_py()
            pieces = (
                [whole] if whole is None else [whole[start:end] for start, end in self.spans(whole)]
            )
            made.append([{"chunk": number, "piece": piece} for number, piece in enumerate(pieces)])
        return pa.array(made, CHUNK_TYPE)

    def spans(self, text: str) -> Iterator[tuple[int, int]]:
        """Characters from and to of each chunk of a text; all of it where it has no tokens."""
        starts, ends, words = self._tokens(text)
        first, count = 0, len(starts)
        if not count:
            yield 0, len(text)
            return
        while True:
            stop = min(first + self._most, count)
            if stop < count:
                # the last word that begins within, or, of text without blanks, wherever a token
                # ends
                word = int(words[np.searchsorted(words, stop, side="right") - 1])
                stop = word if word > first + self._most // 2 else stop
            yield int(starts[first]), int(ends[stop - 1])
            if stop >= count:
                return
            at = np.searchsorted(words, stop - self._overlap)
            word = int(words[at]) if at < len(words) else stop
            first = max(first + 1, word if word <= stop else stop - self._overlap)

    def _tokens(
        self, text: str
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32], npt.NDArray[np.int64]]:
        """Where each token starts and ends, and the numbers of those that begin a word."""
        starts = [np.empty(0, np.int32)]
        ends = [np.empty(0, np.int32)]
        words = [np.empty(0, np.int64)]
        blocks, count = list(_blocks(text)), 0
        for at in range(0, len(blocks), BLOCKS):
            some = [(first, text[first:last]) for first, last in blocks[at : at + BLOCKS]]
            for (first, part), encoding in zip(
                some,
                self._tokenizer.encode_batch([part for _, part in some], add_special_tokens=False),
                strict=True,
            ):
                own = np.array(encoding.offsets, np.int32).reshape(-1, 2)
                # a word is what a blank stands before, which is part of the token for some
                blank = np.isin(
                    np.frombuffer(part.encode("utf-32-le", "replace"), np.uint32), _BLANKS
                )
                begins = (
                    (own[:, 0] == 0)
                    | blank[own[:, 0] - 1]
                    | blank[np.minimum(own[:, 0], len(part) - 1)]
                )
                # also behind what has no token, as a byte order mark
                begins[:1] = True
                starts.append(own[:, 0] + first)
                ends.append(own[:, 1] + first)
                words.append(np.flatnonzero(begins) + count)
                count += len(own)
        return np.concatenate(starts), np.concatenate(ends), np.concatenate(words)


def _blocks(text: str) -> Iterator[tuple[int, int]]:
    """Characters from and to, of at most :data:`BLOCK_CHARS` each, up to the end of a word if there
    is one."""
    first = 0
    while len(text) - first > BLOCK_CHARS:
        last = max(text.rfind(blank, first, first + BLOCK_CHARS) for blank in BLANKS)
        last = last if last > first else first + BLOCK_CHARS
        yield first, last
        first = last
    if first < len(text):
        yield first, len(text)


def _loaded(path: str) -> Tokenizer:
    folder = resolve_path(path)
    tried = (
        [folder]
        if folder.is_file()
        else [folder / "tokenizer.json", folder / "0_Transformer" / "tokenizer.json"]
    )
    file = next((one for one in tried if one.is_file()), None)
    if file is None:
        raise ConfigError(
            f"chunk.tokenizer: {folder} has no tokenizer.json: name a folder or file that has"
        )
    return _tokenizer(file)


def _tokenizer(file: Path) -> Tokenizer:
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as exc:
        # the library raises many errors for a file that is no tokenizer
        raise ConfigError(f"chunk.tokenizer: {file} is no tokenizer: {exc}") from exc
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
