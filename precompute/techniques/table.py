"""Table: every technique by name, and the file of this wing that makes it; others come in by the
door. Read without torch; a technique's file is imported on first use."""

from __future__ import annotations

from collections.abc import Mapping

from precompute.store.doors import TECHNIQUES

REFERENCE = "fp32-eager"
"""The technique that others are compared with, and the default."""

OWN: Mapping[str, str] = {
    "fp32-eager": "pytorch:Eager",
    "fp32-onednn": "onednn:Packed",
    "fp32-compile": "pytorch:Compiled",
    "fp32-autotune": "pytorch:Tuned",
    "fp32-graphs": "pytorch:Recorded",
    "bf16-eager": "pytorch:Eager",
    "bf16-onednn": "onednn:Packed",
    "bf16-compile": "pytorch:Compiled",
    "bf16-encoder": "encoder:Unpadded",
    "bf16-autotune": "pytorch:Tuned",
    "bf16-graphs": "pytorch:Recorded",
    "fp16-eager": "pytorch:Eager",
    "fp16-onednn": "onednn:Packed",
    "fp16-compile": "pytorch:Compiled",
    "fp16-autotune": "pytorch:Tuned",
    "fp16-graphs": "pytorch:Recorded",
    "tf32-eager": "pytorch:Tf32",
    "fp8-eager": "pytorch:Fp8",
    "fp8-compile": "pytorch:Fp8",
    "int8-dynamic-onednn": "onednn:PerRow",
    "int8-weights-eager": "pytorch:WeightOnly",
}
"""Name, as tables and fingerprints have it → file and class."""

NAMES = (
    *OWN,
    *TECHNIQUES.known(),
    *(name for name in TECHNIQUES.foreign() if name.rpartition("-")[0]),
)
"""Of every technique, whether what it comes with is installed or not. What stands before the last
dash is a view's ``precision``, what stands behind it its ``backend``; the first of a precision is
the one that ``backend: auto`` means."""

SHORT: Mapping[str, str] = {"int8": "int8-static"}
"""A view's word for a precision → the name's, where they differ."""


def words(name: str) -> tuple[str, str]:
    """``precision`` and ``backend``, as a view says them, of a technique's name."""
    precision, _, backend = name.rpartition("-")
    return next((short for short, long in SHORT.items() if long == precision), precision), backend


PRECISIONS = tuple(dict.fromkeys(words(name)[0] for name in NAMES))
BACKENDS = tuple(dict.fromkeys(words(name)[1] for name in NAMES))


def technique_name(precision: str, backend: str) -> str:
    """The name for a view's ``precision`` and ``backend``, ``auto`` included. Whether there is such
    a technique is checked by :func:`precompute.techniques.technique.technique`."""
    long = REFERENCE.rpartition("-")[0] if precision == "auto" else SHORT.get(precision, precision)
    if backend == "auto":
        return next(
            (name for name in NAMES if name.rpartition("-")[0] == long), f"{long}-{backend}"
        )
    return f"{long}-{backend}"


def is_here(name: str) -> bool:
    """Whether a technique of that name is one of ours, or what it comes with is installed."""
    return name in OWN or TECHNIQUES.is_here(name)
