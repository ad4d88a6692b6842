"""Kernels: equal to the published hash, on every length, over both of their kinds."""

from __future__ import annotations

import numpy as np
import xxhash

from store.online.kernels import hashes
from store.online.packed import Packed


def test_hashes_are_xxh3_64_of_every_length() -> None:
    rng = np.random.default_rng(0)
    strings = [rng.bytes(size) for size in range(2101)]
    packed = Packed.of(strings)
    assert hashes(packed).tolist() == [xxhash.xxh3_64_intdigest(s) for s in strings]
    assert hashes(packed, 8).tolist() == [xxhash.xxh3_64_intdigest(s[8:]) for s in strings]
    assert hashes(packed.slice(1000, 1003)).tolist() == [xxhash.xxh3_64_intdigest(s) for s in strings[1000:1003]]
    assert hashes(Packed.of([])).dtype == np.uint64
