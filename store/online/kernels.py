"""Kernels: the few steps of a bulk load and of a batch read that run over many packed rows at once."""

from __future__ import annotations

import itertools

import numpy as np
import xxhash

from store.online.packed import U8, Packed

COMPILED = False
"""Whether the C extension runs."""


def hashes(packed: Packed, skip: int = 0) -> U8:
    """xxh3_64 (seed 0) of each string without its first ``skip`` bytes, uint64 [n]; of a shorter string, that of nothing.

    A row's checksum is ``hashes(rows, 8) ^ hashes(keys)``: a row that is whole, and under another key, does not pass.
    """
    view, hash_of = memoryview(packed.data.data), xxhash.xxh3_64_intdigest
    bounds = packed.offsets.tolist()
    return np.fromiter(
        (hash_of(view[a + skip : b]) if a + skip < b else hash_of(b"") for a, b in itertools.pairwise(bounds)),
        np.uint64,
        len(packed),
    )
