"""Vector packing: float vectors as int8 or as signs with a scale a row, for the online store alone; and the floats that a reader gets for them.

Elementwise but for sums over one row at a time, so that a row packed alone, among others or on another CPU has the same bytes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from precompute.store.feature_view import Feature

F4 = npt.NDArray[np.float32]

INT8_STEPS = 127
"""Symmetric: −127 to 127, so that 0 is 0 and a vector's negative is packed as its own negative."""

_SMALLEST = np.finfo(np.float32).tiny
"""Least scale: below it are subnormal numbers, which some threads of some CPUs take for 0."""
_LARGEST = np.nextafter(np.float32(np.finfo(np.float32).max / INT8_STEPS), np.float32(0))
"""Largest scale: times 127 it is still a number."""


def stored_layout(feature: Feature) -> tuple[str, int]:
    """Type and number of what a packed vector is stored as beside its scale: a byte a number, or a bit a number, the lowest first."""
    assert feature.dim is not None
    return ("i1", feature.dim) if feature.packed == "int8" else ("u1", (feature.dim + 7) // 8)


def packed_vectors(feature: Feature, vectors: npt.NDArray[Any]) -> tuple[F4, npt.NDArray[Any]]:
    """(scales, stored) of vectors as the feature's ``packed`` says.

    - ``int8``: scale max|x| / 127, numbers x / scale rounded: each is off by half a scale at most.
    - ``binary``: scale mean|x|, a set bit for a number below 0; of all scales the nearest to the vector by L2 (Rastegari et al. 2016, XNOR-Net, §3.1).

    A vector with a NaN or infinity has the scale NaN, and comes back as NaN throughout: what cannot be kept is not made up.

    Args:
        feature: a vector of float16 or float32 with ``packed``.
        vectors: [rows, dim].

    Returns:
        float32 [rows]; int8 [rows, dim], or uint8 [rows, dim / 8 rounded up].
    """
    vectors = vectors.astype(np.float32, copy=False)
    if feature.packed == "int8":
        largest = np.abs(vectors).max(axis=1)
        scales = np.where(np.isfinite(largest), np.clip(largest / INT8_STEPS, _SMALLEST, _LARGEST), np.nan)
        scales = scales.astype(np.float32)
        steps = vectors / scales[:, None]
        np.rint(steps, out=steps)
        steps[np.isnan(scales)] = 0
        return scales, steps.astype(np.int8)
    # float64 first: where numpy converts on the way, its buffer cuts the sum of a row (told by 9,000 numbers), and how is no promise of numpy's
    means = np.abs(vectors.astype(np.float64)).mean(axis=1)
    means[means < _SMALLEST] = 0
    scales = np.where(np.isfinite(means), means, np.nan).astype(np.float32)
    return scales, np.packbits(vectors < 0, axis=1, bitorder="little")


def unpacked_vectors(feature: Feature, scales: F4, stored: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The vectors that a reader gets for what :func:`packed_vectors` made, in the feature's own dtype: [rows, dim]."""
    dtype = np.dtype(feature.dtype)
    if feature.packed == "int8":
        values = stored.astype(np.float32)
        values *= scales[:, None]
        return values.astype(dtype, copy=False)
    # the scale's own bits with the sign's: a tenth of the time of choosing between two numbers
    whole = np.dtype(f"u{dtype.itemsize}")
    signs = np.unpackbits(stored, axis=1, count=feature.dim, bitorder="little").astype(whole) << whole.type(
        8 * dtype.itemsize - 1
    )
    numbers: npt.NDArray[Any] = (scales.astype(dtype).view(whole)[:, None] ^ signs).view(dtype)
    return numbers
