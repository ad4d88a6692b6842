"""Safetensors file: a model's weights by name, each a float; what stands beside them as a scale, or
is stored in fewer bits than a float has, is refused and never cast."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from precompute.foreign_file import KnownKeys, what_it_is
from precompute.registry import described
from precompute.store.errors import ConfigError, ModelError

FLOATS = ("F64", "F32", "F16", "BF16")
"""Dtypes of weights, by the format's names."""

INTEGERS = ("I8", "I16", "I32", "I64")

DEQUANTIZE = (
    "load the model by the library that quantized it, and save it dequantized, in float32 or"
    " bfloat16"
)

SCALES: Mapping[str, str] = dict.fromkeys(
    (
        *(
            f"*{name}"
            for name in (
                "SCB",
                "weight_format",
                "weight_scale",
                "weight_scale_2",
                "weight_scale_inv",
                "input_scale",
                "output_scale",
                "k_scale",
                "v_scale",
                "weight_packed",
                "weight_shape",
                "weight_zero_point",
                "zero_point",
                "qweight",
                "qzeros",
                "qscales",
                ".scales",
                "g_idx",
                "absmax",
                "quant_map",
                "_blocks",
                "_scales",
            )
        ),
        "*quant_state*",
        "*nested_*",
    ),
    f"it belongs to weights that were quantized, and are others without it: {DEQUANTIZE}",
)
"""Tensors that bitsandbytes, GPTQ, AWQ, compressed-tensors, FP8 and torchao store beside weights
→ the remedy."""

SAFETENSORS = KnownKeys(
    "any model.safetensors",
    used=(f"dtype: {', '.join(FLOATS)}",),
    refused={**SCALES, "dtype: I8, U8, F8_E4M3, F8_E5M2, F4, …": DEQUANTIZE},
)
"""What holds for the weights of every model here, before their names are looked at."""


def check_floats(
    file: Path, known: KnownKeys, use: str, integers: Mapping[str, Collection[str]] = {}
) -> None:
    """Refuse tensors that are scales or no floats, by the file's head alone.

    Args:
        known: names of its tensors; one that it calls harmless may have any dtype.
        integers: name → dtypes, of tensors that may be integers in this format.

    Raises:
        ConfigError: names the tensor and the remedy.
        ModelError: the file is damaged, or no safetensors file.
    """
    for name, dtype in _dtypes(file, use).items():
        known.refuse(name, file, use)
        allowed = (*FLOATS, *integers.get(name, ()))
        if dtype not in allowed and known.why_harmless(name) is None:
            raise ConfigError(f"{use}: {file}: {name} is {dtype}, not a float: {DEQUANTIZE}")


def read_tensors(
    file: Path, known: KnownKeys, use: str, integers: Mapping[str, Collection[str]] = {}
) -> dict[str, torch.Tensor]:
    """The tensors of a file, on the CPU, without those that are harmless; see
    :func:`check_floats`.

    Raises:
        ConfigError: a tensor is a scale, no float, or not known.
        ModelError: the file is damaged, or no safetensors file.
    """
    check_floats(file, known, use, integers)
    with opened(file, use) as tensors:
        names = list(tensors.keys())
        known.check(names, file, use)
        return {name: tensors.get_tensor(name) for name in names if not known.why_harmless(name)}


def tensor_names(file: Path, use: str) -> list[str]:
    """Names of a file's tensors.

    Raises:
        ModelError: the file is damaged, or no safetensors file.
    """
    return list(_dtypes(file, use))


@contextmanager
def opened(file: Path, use: str) -> Iterator[Any]:
    """A file, as ``safetensors.safe_open`` gives it; what reading it raises within is translated.

    Raises:
        ModelError: the file is damaged, or no safetensors file.
    """
    try:
        with safe_open(str(file), framework="pt") as tensors:
            yield tensors
    except (SafetensorError, OSError, ValueError) as exc:
        is_a = "a folder: name the file in it" if file.is_dir() else what_it_is(file)
        if is_a:
            raise ModelError(f"{use}: {file} is {is_a}") from exc
        raise ModelError(
            f"{use}: {file} does not load: {described(exc)}; was it fetched or copied to its end?"
            " Fetch it again"
        ) from exc


def _dtypes(file: Path, use: str) -> dict[str, str]:
    with opened(file, use) as tensors:
        return {name: str(tensors.get_slice(name).get_dtype()) for name in tensors.keys()}  # noqa: SIM118
