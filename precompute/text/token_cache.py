"""Token cache: what a window of texts was tokenised to, kept on disk by content, for the next run over the same texts.

It pays where tokenising is the limit: a small model on a GPU, whose view is run again with other weights or another precision. On a CPU
tokenising is 1 to 3 % of the time. A window is one file, named by the texts and the tokenizer, with a checksum; nothing in it can be run.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

MAX_BYTES = 4 * 2**30
"""Kept at most; the files not used for longest go first."""


class TokenCache:
    """Files in one folder, shared by any number of processes.

    Args:
        folder: created when it is first written to.
        tokenizer: digest of the tokenizer and all that decides its ids.
        max_bytes: kept at most.
    """

    def __init__(self, folder: Path, tokenizer: str, max_bytes: int = MAX_BYTES) -> None:
        self._folder, self._tokenizer, self._max_bytes = folder, tokenizer, max_bytes

    def key(self, texts: Sequence[str]) -> str:
        """Of a window of texts, in their order (BLAKE2b of each text's length and UTF-8 bytes)."""
        digest = hashlib.blake2b(self._tokenizer.encode(), digest_size=20)
        for text in texts:
            body = text.encode()
            digest.update(len(body).to_bytes(8, "little"))
            digest.update(body)
        return digest.hexdigest()

    def get(self, key: str) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]] | None:
        """(token ids of all texts in a row, tokens of each text), int64; None when not kept, or not readable."""
        path = self._folder / f"{key}.tokens"
        try:
            stored = path.read_bytes()
            # such as the zeros that a loss of power leaves; looked at before anything is made of it
            if len(stored) % 4 or len(stored) < 8 or zlib.crc32(memoryview(stored)[4:]) != int.from_bytes(stored[:4], "little"):
                return None
            os.utime(path)
        except OSError:
            return None
        body = np.frombuffer(stored, "<i4", offset=4)
        texts = int(body[0])
        return body[texts + 1 :].astype(np.int64), body[1 : texts + 1].astype(np.int64)

    def put(self, key: str, ids: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]) -> None:
        """Keep them; a disk without room keeps nothing, and that is no error."""
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
        for path in self._folder.glob("*.tokens"):
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
