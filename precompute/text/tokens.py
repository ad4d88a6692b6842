"""Tokens: texts → token ids, cut at the longest input, which can be cached in files; and a long
text → overlapping chunks of at most so many tokens, in memory of a few times the text."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from tokenizers import Encoding, Tokenizer, normalizers

from precompute.model import resolve_path
from precompute.store.errors import ConfigError, ModelError
from precompute.text.tokenizer_file import read_tokenizer

CHARS_PER_TOKEN = 16
"""Characters of a text for each token of its limit that are tokenised at first, and the rest only
when they did not fill ``max_tokens``: a megabyte of words in one row costs no more than a page."""

BLANKS = " \n\t\r"
"""Characters between words, for any tokenizer; others are removed by some, such as the control
characters that Python takes for blanks."""


@dataclass(slots=True)
class Tokens:
    """Token ids of all rows in a row, int64; row ``i`` is ``ids[starts[i]:starts[i] +
    lengths[i]]``."""

    ids: npt.NDArray[np.int64]
    starts: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]


class TextTokenizer:
    """A model's tokenizer, without padding.

    Args:
        tokenizer: transformers' own.
        max_tokens: longest input, special tokens included.
        lowercase: whether sentence-transformers would have it so (``do_lower_case``).
        keep_long: a longer text is recognised by one token more than any may have, instead of cut.
    """

    def __init__(
        self, tokenizer: Any, max_tokens: int, *, lowercase: bool = False, keep_long: bool = False
    ) -> None:
        self._max_tokens, self._keep_long = max_tokens, keep_long
        self._special = frozenset(tokenizer.all_special_ids)
        self.padding = int(tokenizer.pad_token_id or 0)
        """The id of what fills a batch."""
        self._tokenizer: Tokenizer = tokenizer.backend_tokenizer
        self._tokenizer.no_padding()
        self._tokenizer.enable_truncation(max_tokens)
        if lowercase:
            _lowercase(self._tokenizer)

    def prompt_length(self, prompt: str) -> int:
        """Tokens of a prompt, as sentence-transformers counts them
        (``Transformer._get_prompt_length``)."""
        ids = self._tokenizer.encode(prompt).ids
        return len(ids) - (ids[-1] in self._special if ids else 0)

    def tokenized(
        self, texts: Sequence[str]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """(ids of all texts in a row, how many of each)."""
        heads = [_head(text, self._max_tokens * CHARS_PER_TOKEN) for text in texts]
        encodings = self._tokenizer.encode_batch_fast(heads)
        # what does not fill the longest input is not all there is, and half a word has other tokens
        # than the whole
        short = [
            row
            for row, (text, head) in enumerate(zip(texts, heads, strict=True))
            if len(head) < len(text)
            and not (
                encodings[row].overflowing
                and (text[len(head)] in BLANKS or _words_follow(encodings[row]))
            )
        ]
        for row, encoding in zip(
            short, self._tokenizer.encode_batch_fast([texts[row] for row in short]), strict=True
        ):
            encodings[row] = encoding
        lists = [encoding.ids for encoding in encodings]
        if self._keep_long:
            lists = [
                ids + [0] * (self._max_tokens + 1 - len(ids)) if encoding.overflowing else ids
                for ids, encoding in zip(lists, encodings, strict=True)
            ]
        lengths = np.fromiter(map(len, lists), np.int64, len(lists))
        return (
            np.fromiter(itertools.chain.from_iterable(lists), np.int64, int(lengths.sum())),
            lengths,
        )


def _head(text: str, limit: int) -> str:
    """The first ``limit`` characters of a text, about, up to the end of a word if there is one."""
    if len(text) <= limit:
        return text
    end = max(text.rfind(blank, 0, limit) for blank in BLANKS)
    return text[:end] if end > 0 else text[:limit]


def _words_follow(encoding: Encoding) -> bool:
    """Whether no token that is used is of the last word, which may be cut: of more than 100
    characters, WordPiece makes one token of a word."""
    retained = [word for word in encoding.word_ids if word is not None]
    left = [word for word in encoding.overflowing[-1].word_ids if word is not None]
    return bool(retained and left) and left[-1] > retained[-1]


def _lowercase(tokenizer: Tokenizer) -> None:
    """What sentence-transformers makes of ``do_lower_case``."""
    old = tokenizer.normalizer
    own = [] if old is None else [old]
    parts = [old[at] for at in range(len(old))] if isinstance(old, normalizers.Sequence) else own
    if not any(isinstance(part, normalizers.Lowercase) for part in parts):
        tokenizer.normalizer = normalizers.Sequence([normalizers.Lowercase(), *parts])


MAX_BYTES = 4 * 2**30
"""Size of a cache; the least recently used files are removed first."""


class TokenCache:
    """Files in one folder, shared by any number of processes.

    Args:
        folder: created when it is first written to.
        tokenizer: digest of the tokenizer and all that decides its ids.
        max_bytes: size of the cache.
    """

    def __init__(self, folder: Path, tokenizer: str, max_bytes: int = MAX_BYTES) -> None:
        self._folder, self._tokenizer, self._max_bytes = folder, tokenizer, max_bytes

    def key(self, texts: Sequence[str]) -> str:
        """The cache's key of a window of texts, in their order (BLAKE2b of each text's length and
        UTF-8 bytes)."""
        digest = hashlib.blake2b(self._tokenizer.encode(), digest_size=20)
        for text in texts:
            body = text.encode()
            digest.update(len(body).to_bytes(8, "little"))
            digest.update(body)
        return digest.hexdigest()

    def get(self, key: str) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]] | None:
        """(token ids of all texts in a row, tokens of each text), int64; None when not cached, or
        not readable."""
        path = self._folder / f"{key}.tokens"
        try:
            stored = path.read_bytes()
            # such as the zeros that a loss of power leaves; looked at before anything is made of it
            if (
                len(stored) % 4
                or len(stored) < 8
                or zlib.crc32(memoryview(stored)[4:]) != int.from_bytes(stored[:4], "little")
            ):
                return None
        except OSError:
            return None
        # read-only, such as a replica's mount
        with contextlib.suppress(OSError):
            os.utime(path)
        body = np.frombuffer(stored, "<i4", offset=4)
        texts = int(body[0])
        return body[texts + 1 :].astype(np.int64), body[1 : texts + 1].astype(np.int64)

    def put(self, key: str, ids: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]) -> None:
        """Cache them; that the disk is full is no error."""
        body = np.concatenate(([len(lengths)], lengths, ids)).astype("<i4").tobytes()
        path = self._folder / f"{key}.tokens"
        temporary = self._folder / f".{key}.{os.getpid()}.tmp"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with temporary.open("wb") as file:
                file.write(zlib.crc32(body).to_bytes(4, "little") + body)
            temporary.replace(path)
            self._evict()
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink()

    def _evict(self) -> None:
        files = []
        # what a killed process was writing counts as well
        for path in (*self._folder.glob("*.tokens"), *self._folder.glob(".*.tmp")):
            # another process evicted it
            with contextlib.suppress(OSError):
                file = path.stat()
                files.append((file.st_mtime_ns, file.st_size, path))
        total = sum(size for _, size, _ in files)
        for _, size, path in sorted(files):
            if total <= self._max_bytes:
                break
            with contextlib.suppress(OSError):
                path.unlink()
            total -= size


# ---- Pair tokens: one text or two → token ids and which text each is of, cut together at the
# longest input.


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
        prompt: put before each text, of a pair before the first.
        lowercase: whether sentence-transformers would have it so (``do_lower_case``).
    """

    def __init__(
        self, tokenizer: Any, max_tokens: int, prompt: str = "", lowercase: bool = False
    ) -> None:
        self._prompt = prompt
        self.padding = int(tokenizer.pad_token_id or 0)
        """The id of what fills a batch."""
        self._tokenizer: Tokenizer = tokenizer.backend_tokenizer
        self._tokenizer.no_padding()
        self._tokenizer.enable_truncation(max_tokens, strategy="longest_first")
        if lowercase:
            _lowercase(self._tokenizer)

    def tokenized(self, rows: Sequence[Any]) -> PairTokens:
        """The tokens of texts, or of pairs of them (tuples)."""
        if self._prompt:
            rows = [
                self._prompt + row if isinstance(row, str) else (self._prompt + row[0], *row[1:])
                for row in rows
            ]
        encodings = self._tokenizer.encode_batch_fast(rows)
        ids, types = ([getattr(one, name) for one in encodings] for name in ("ids", "type_ids"))
        lengths = np.fromiter(map(len, ids), np.int64, len(ids))
        total = int(lengths.sum())
        flat, of = (
            np.fromiter(itertools.chain.from_iterable(lists), np.int64, total)
            for lists in (ids, types)
        )
        return PairTokens(flat, of, np.cumsum(lengths) - lengths, lengths)


def beyond_the_table(
    ids: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64], vocabulary: int, column: str
) -> dict[int, str]:
    """Rows with a token that a model of so many has no vector for: position → reason. Some
    tokenizers have more of them, such as one that stands for a picture."""
    if not len(ids) or int(ids.max()) < vocabulary:
        return {}
    rows = np.repeat(np.arange(len(lengths)), lengths)[ids >= vocabulary]
    return {int(row): f"{column} has a token that the model has no vector for" for row in rows}


# ---- Text column: a source's texts, and which of them a model cannot take.


def texts(column: pa.Array) -> list[str]:
    """As Python has them, of a column that was checked."""
    return [value.decode() if isinstance(value, bytes) else value for value in column.to_pylist()]


def unusable_texts(column: pa.Array, name: str, use: str) -> dict[int, str]:
    """Null, empty and not UTF-8 texts: position → reason.

    Raises:
        ModelError: the column holds something else.
    """
    bad: dict[int, str] = {}
    if pa.types.is_binary(column.type) or pa.types.is_large_binary(column.type):
        for row, value in enumerate(column.to_pylist()):
            if value is not None:
                try:
                    if not value.decode().strip():
                        bad[row] = f"{name} is empty"
                except UnicodeDecodeError as exc:
                    bad[row] = f"{name} is not UTF-8: {exc.reason} at byte {exc.start}"
    elif not (pa.types.is_string(column.type) or pa.types.is_large_string(column.type)):
        raise ModelError(
            f"{use}: column {name!r} is {column.type}, not text: CAST it AS VARCHAR in the source"
        )
    # Of one text that begins with a letter, that is seen in a sixtieth of the time that the rest
    # takes.
    elif all(text and "!" <= text[0] <= "~" for text in column.to_pylist()):
        return bad
    else:
        blank = pc.equal(pc.utf8_length(pc.utf8_trim_whitespace(column)), 0)
        for row in pc.indices_nonzero(pc.fill_null(blank, False)).to_pylist():
            bad[row] = f"{name} is empty"
    for row in pc.indices_nonzero(column.is_null()).to_pylist():
        bad[row] = f"{name} is null"
    return bad


# ---- Chunks: spans of a long text, cut between words where there are any.

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
    try:
        tokenizer = read_tokenizer(file, "chunk.tokenizer")
    except ModelError as exc:
        # it is a key of the view that names it
        raise ConfigError(f"{exc}: {file} is no tokenizer") from exc
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
