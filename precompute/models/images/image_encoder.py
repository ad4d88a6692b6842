"""Image encoder: a picture → embedding, by the vision tower of a CLIP or SigLIP folder. Pictures
are decoded and resized in the prepare stage, by several threads."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import torch

from precompute.engine.cores import allowed, usable_threads
from precompute.model import Prepared, Verbatim, digest, resolve_path
from precompute.models.device import Device
from precompute.models.images.image_file import UnusableImage, check_installed, pixels
from precompute.models.images.vision_tower import Tower, load_tower, tower_files
from precompute.models.torch_model import Tensors, TorchModel
from precompute.store.errors import ConfigError, ModelError

CODE_VERSION = 1
"""Raised with each change of the values that this code computes; part of the fingerprint."""

START_IMAGES = {"cpu": 8, "cuda": 64}

MOST_FILE_BYTES = 256 * 2**20


class ImageEncoder(TorchModel):
    """Embeds one column of pictures: their bytes, or names of files.

    Args:
        path: the folder: ``config.json``, ``model.safetensors``, ``preprocessor_config.json``;
            ``package:name/folder`` inside a package.
        column: the source's column: binary, or text with names of files.
        output: name of the feature.
        files: the folder that file names start from, and lie in. A changed file under the same name
            is not seen as changed: give the bytes (DuckDB's ``read_blob``), or a column besides
            that changes with it.
        normalize: whether vectors have the norm 1.
        device: ``cpu``, ``cuda`` or ``cuda:1``; by default a GPU where there is one.

    Raises:
        ConfigError: no such folder or file, a model of another kind, or Pillow is not installed.
        ModelError: the weights do not load.
    """

    cost_unit = "images"
    concurrent = True
    prepared_rows = 256
    """Rows of one window at most: a picture's pixels are thousands of times its row."""

    def __init__(
        self,
        path: str,
        column: str = "image",
        output: str = "embedding",
        files: str | None = None,
        normalize: bool = True,
        device: str | None = None,
    ) -> None:
        check_installed()
        if not isinstance(normalize, bool):
            raise ConfigError(f"image_encoder: normalize is true or false, got {normalize!r}")
        folder = resolve_path(path)
        self._files = tower_files(folder)
        self._named_root = files
        self._root = None if files is None else resolve_path(files).resolve()
        tower, self._recipe = load_tower(folder, self._files)
        self._column, self._output, self._normalize = column, output, normalize
        self._flops: float = (
            2.0 * _weights(tower) * int(tower.config.image_size // tower.config.patch_size) ** 2
        )
        self._pool = ThreadPoolExecutor(usable_threads(allowed()), "decode")
        super().__init__(Tower(tower, self._recipe, normalize), Device(device))
        self.start_cost = START_IMAGES[self.device.torch.type]

    def fingerprint(self) -> str:
        """Weights, config, how pictures are made ready, the folder they are named in, normalising
        and code version."""
        facts = {
            "column": self._column,
            "normalize": self._normalize,
            "root": Verbatim(self._named_root),
        }
        return digest(code=CODE_VERSION, files=self._files, **facts)

    def reads(self) -> tuple[str]:
        return (self._column,)

    def prepare(self, batch: pa.RecordBatch) -> Prepared:
        """Pixels uint8 [rows, 3, height, width]; a row costs 1. Bad are pictures that are null,
        broken, too large, animated, or of other colours.

        Raises:
            ModelError: the column holds something else.
        """
        column = self._checked(batch)
        made = np.zeros((batch.num_rows, 3, *self._recipe.shape), np.uint8)
        bad: dict[int, str] = {}

        def decode(row: int, value: Any) -> None:
            try:
                made[row] = pixels(
                    value if isinstance(value, bytes) else self._read(value), self._recipe
                )
            except UnusableImage as exc:
                bad[row] = f"{self._column} {exc}"

        values = column.to_pylist()
        bad |= dict.fromkeys(
            pc.indices_nonzero(column.is_null()).to_pylist(), f"{self._column} is null"
        )
        list(
            self._pool.map(
                lambda row: decode(row, values[row]),
                [row for row in range(len(values)) if row not in bad],
            )
        )
        return Prepared(np.ones(batch.num_rows, np.int64), made, bad, made.nbytes)

    def tensors(self, prepared: Prepared, rows: npt.NDArray[np.int64]) -> Tensors:
        return (torch.from_numpy(prepared.payload[rows]),)

    def features(self, outputs: Sequence[npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
        return {self._output: outputs[0]}

    def flops(self, prepared: Prepared, rows: npt.NDArray[np.int64]) -> float:
        """2 for each weight of a linear layer, for each patch of a picture; attention is not
        counted."""
        return self._flops * len(rows)

    def _checked(self, batch: pa.RecordBatch) -> pa.Array:
        column = batch.column(self._column)
        kind = column.type
        if pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_null(kind):
            return column
        if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
            raise ModelError(
                f"image_encoder: column {self._column!r} is {kind}, neither bytes nor names of"
                " files"
            )
        if self._root is None:
            raise ModelError(
                f"image_encoder: column {self._column!r} has names of files: set `files` to the"
                " folder that they lie in"
            )
        return column

    def _read(self, name: str) -> bytes:
        """A file in the folder: a request may bring any name.

        Raises:
            UnusableImage: it is not there, cannot be read, or lies elsewhere.
        """
        assert self._root is not None
        try:
            file = (self._root / name).resolve()
            if not file.is_relative_to(self._root):
                raise UnusableImage(f"{name!r:.200} lies outside {self._root.name}/")
            if not file.is_file():
                raise UnusableImage(f"{name!r:.200}: no such file in {self._root.name}/")
            if file.stat().st_size > MOST_FILE_BYTES:
                raise UnusableImage(f"{name!r:.200} has more than {MOST_FILE_BYTES // 2**20} MiB")
            return file.read_bytes()
        except (OSError, ValueError) as exc:
            # a NUL in the name
            raise UnusableImage(f"{name!r:.200} cannot be read: {exc}") from exc


def _weights(tower: Any) -> int:
    return sum(
        module.weight.numel() for module in tower.modules() if isinstance(module, torch.nn.Linear)
    )
