"""UBJSON: the binary JSON that XGBoost writes unless a file's name ends in ``.json``, read as JSON
is."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

NUMBERS = {"i": "i1", "U": "u1", "I": ">i2", "l": ">i4", "L": ">i8", "d": ">f4", "D": ">f8"}
"""Mark → numpy's name of the type."""
WORDS = {"Z": None, "T": True, "F": False}
DEEPEST = 100


def is_ubjson(content: bytes) -> bool:
    """Whether an object begins as UBJSON's do: by the type of its first key's length."""
    return content[:1] == b"{" and content[1:2] in (b"L", b"l", b"I", b"i", b"U")


def parsed_ubjson(content: bytes) -> Any:
    """What :func:`json.loads` makes of the same in JSON; a float32 has its own digits.

    Raises:
        ValueError: it is none, is cut, has more behind its end, or a key twice.
    """
    reader = _Reader(content)
    try:
        found = reader.value(reader.mark(), 0)
    except (struct.error, UnicodeDecodeError) as exc:
        raise ValueError(f"it is no UBJSON: {exc}") from exc
    if reader.at != len(content):
        raise ValueError(f"it goes on behind its end, at byte {reader.at}")
    return found


class _Reader:
    def __init__(self, content: bytes) -> None:
        self._content, self.at = content, 0

    def mark(self) -> str:
        return self._taken(1).decode("latin-1")

    def value(self, mark: str, depth: int) -> Any:
        if depth > DEEPEST:
            raise ValueError(f"its objects are more than {DEEPEST} deep")
        if mark in WORDS:
            return WORDS[mark]
        if mark in NUMBERS:
            return self._numbers(mark, 1)[0]
        if mark == "S":
            return self._text()
        if mark == "[":
            return self._array(depth)
        if mark == "{":
            return self._object(depth)
        raise ValueError(f"it is no UBJSON: {mark!r} at byte {self.at - 1} begins no value")

    def _array(self, depth: int) -> list[Any]:
        mark, kind = self.mark(), None
        if mark == "$":
            kind, mark = self.mark(), self.mark()
        if mark != "#":
            if kind is not None:
                raise ValueError(f"it is no UBJSON: an array has no size, at byte {self.at}")
            found = []
            while mark != "]":
                found.append(self.value(mark, depth + 1))
                mark = self.mark()
            return found
        count = self._size()
        if kind in NUMBERS:
            return self._numbers(str(kind), count)
        # each takes a byte at least
        if count > len(self._content) - self.at:
            raise ValueError(f"it is cut at byte {self.at}")
        return [self.value(kind or self.mark(), depth + 1) for _ in range(count)]

    def _object(self, depth: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        while self._content[self.at : self.at + 1] != b"}":
            key = self._text()
            if key in found:
                raise ValueError(f"it has the key {key!r} twice")
            found[key] = self.value(self.mark(), depth + 1)
        self.at += 1
        return found

    def _text(self) -> str:
        return self._taken(self._size()).decode()

    def _size(self) -> int:
        mark = self.mark()
        size = self._numbers(mark, 1)[0] if mark in NUMBERS and mark not in "dD" else -1
        if size < 0:
            raise ValueError(f"it is no UBJSON: a size that cannot be, at byte {self.at}")
        return int(size)

    def _numbers(self, mark: str, count: int) -> list[Any]:
        kind = np.dtype(NUMBERS[mark])
        numbers = np.frombuffer(self._taken(count * kind.itemsize), kind)
        if mark == "d":
            # by the fewest digits that are this float32, as the library writes it in JSON
            numbers = numbers.astype("<f4").astype("U").astype(np.float64)
        return list(numbers.tolist())

    def _taken(self, size: int) -> bytes:
        taken = self._content[self.at : self.at + size]
        if len(taken) < size:
            raise ValueError(f"it is cut at byte {len(self._content)}")
        self.at += size
        return taken
