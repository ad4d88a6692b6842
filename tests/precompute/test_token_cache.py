"""Token cache: what is kept is what was tokenised, and whatever is damaged is tokenised again."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from precompute.text.token_cache import TokenCache

IDS, LENGTHS = np.array([101, 7, 102, 101, 102]), np.array([3, 2])


def test_what_was_put_is_got(tmp_path: Path) -> None:
    cache = TokenCache(tmp_path / "tokens", "tokenizer")
    key = cache.key(["a b", ""])
    assert cache.get(key) is None
    cache.put(key, IDS, LENGTHS)
    found = TokenCache(tmp_path / "tokens", "tokenizer").get(key)
    assert found is not None
    assert [part.tolist() for part in found] == [IDS.tolist(), LENGTHS.tolist()]


def test_a_key_is_of_each_text_their_order_and_the_tokenizer(tmp_path: Path) -> None:
    cache, other = TokenCache(tmp_path, "one"), TokenCache(tmp_path, "two")
    keys = [cache.key(texts) for texts in (["ab", "c"], ["a", "bc"], ["c", "ab"], ["ab", "c", ""], ["ab"])]
    assert len({*keys, other.key(["ab", "c"])}) == 6


@pytest.mark.parametrize("damage", [b"", b"\x93NUMPY", b"garbage" * 9])
def test_a_damaged_file_is_as_none(tmp_path: Path, damage: bytes) -> None:
    cache = TokenCache(tmp_path, "tokenizer")
    cache.put("k", IDS, LENGTHS)
    (tmp_path / "k.npy").write_bytes(damage)
    assert cache.get("k") is None


@pytest.mark.parametrize("size", [4, 8, 20, 60])
@pytest.mark.parametrize("zeros", [True, False])
def test_a_file_whose_end_never_reached_the_disk_is_as_none(tmp_path: Path, size: int, zeros: bool) -> None:
    """Zeros in place of the last bytes leave a file of the right length, whose last ids are those of another token."""
    cache, path = TokenCache(tmp_path, "tokenizer"), tmp_path / "k.npy"
    cache.put("k", IDS, LENGTHS)
    path.write_bytes(path.read_bytes()[:-size] + (bytes(size) if zeros else b""))
    assert cache.get("k") is None


def test_objects_are_never_unpickled(tmp_path: Path) -> None:
    np.save(tmp_path / "k.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    assert TokenCache(tmp_path, "tokenizer").get("k") is None


def test_what_was_not_used_for_longest_goes_first(tmp_path: Path) -> None:
    cache = TokenCache(tmp_path, "tokenizer", max_bytes=400)
    for number, key in enumerate(("old", "used", "new")):
        cache.put(key, IDS, LENGTHS)  # 164 bytes each
        os.utime(tmp_path / f"{key}.npy", (number, number)) if (tmp_path / f"{key}.npy").exists() else None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new.npy", "used.npy"]


def test_a_folder_that_cannot_be_written_keeps_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    cache = TokenCache(tmp_path / "file" / "tokens", "tokenizer")
    cache.put("k", IDS, LENGTHS)
    assert cache.get("k") is None
