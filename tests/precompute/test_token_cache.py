"""Token cache: what is cached is what was tokenised, and whatever is damaged is tokenised again."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pytest

from precompute.text.tokens import TokenCache

IDS, LENGTHS = np.array([101, 7, 102, 101, 102]), np.array([3, 2])


def test_what_was_put_is_got(tmp_path: Path) -> None:
    cache = TokenCache(tmp_path / "tokens", "tokenizer")
    key = cache.key(["a b", ""])
    assert cache.get(key) is None
    cache.put(key, IDS, LENGTHS)
    found = TokenCache(tmp_path / "tokens", "tokenizer").get(key)
    assert found is not None
    assert [part.tolist() for part in found] == [IDS.tolist(), LENGTHS.tolist()]


def test_what_may_not_be_written_is_got_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = TokenCache(tmp_path, "tokenizer")
    cache.put("k", IDS, LENGTHS)

    def read_only(path: Path) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    monkeypatch.setattr("precompute.text.tokens.os.utime", read_only)
    assert cache.get("k") is not None


def test_a_key_is_of_each_text_their_order_and_the_tokenizer(tmp_path: Path) -> None:
    cache, other = TokenCache(tmp_path, "one"), TokenCache(tmp_path, "two")
    keys = [
        cache.key(texts)
        for texts in (["ab", "c"], ["a", "bc"], ["c", "ab"], ["ab", "c", ""], ["ab"])
    ]
    assert len({*keys, other.key(["ab", "c"])}) == 6


def test_a_damaged_file_is_as_none_whatever_it_holds(tmp_path: Path) -> None:
    """Cut anywhere, any byte another, or zeros in place of the last ones, which leave a file of the
    right length; nothing is raised."""
    cache, path = TokenCache(tmp_path, "tokenizer"), tmp_path / "k.tokens"
    cache.put("k", IDS, LENGTHS)
    whole = path.read_bytes()
    damaged = [b"garbage" * 9, b"\x93NUMPY\x01\x00v\x00{'descr'", bytes(8)]
    damaged += [
        whole[:size] + end
        for size in range(len(whole))
        for end in (b"", bytes(len(whole) - size))
        if whole[:size] + end != whole
    ]
    damaged += [
        whole[:at] + bytes([whole[at] ^ 0x55]) + whole[at + 1 :] for at in range(len(whole))
    ]
    for content in damaged:
        path.write_bytes(content)
        assert cache.get("k") is None, content
    path.write_bytes(whole)
    assert cache.get("k") is not None


def test_what_was_not_used_for_longest_goes_first(tmp_path: Path) -> None:
    """So does what a killed process left in the middle of writing; another's file stays."""
    cache = TokenCache(tmp_path, "tokenizer", max_bytes=80)
    for name in (".k.123.tmp", "notes"):
        (tmp_path / name).write_bytes(bytes(40))
        os.utime(tmp_path / name, (0, 0))
    for number, key in enumerate(("old", "used", "new")):
        cache.put(key, IDS, LENGTHS)  # 36 bytes each
        os.utime(tmp_path / f"{key}.tokens", (number, number)) if (
            tmp_path / f"{key}.tokens"
        ).exists() else None
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "new.tokens",
        "notes",
        "used.tokens",
    ]


def test_a_folder_that_cannot_be_written_caches_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    cache = TokenCache(tmp_path / "file" / "tokens", "tokenizer")
    cache.put("k", IDS, LENGTHS)
    assert cache.get("k") is None
