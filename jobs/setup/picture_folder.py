"""Picture folder: pictures that somebody brings, or a few painted ones, and the SQL that reads
them."""

from __future__ import annotations

import json
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path

from precompute.jobs.setup.data_file import literal, name_from
from precompute.models.images.image_file import check_installed
from precompute.store.errors import ConfigError

ENDINGS = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff")
PAINTED = {
    "ruby": (200, 20, 40),
    "brick": (180, 60, 50),
    "sun": (250, 210, 40),
    "sand": (220, 190, 120),
    "grass": (60, 160, 50),
    "forest": (20, 80, 30),
    "sky": (110, 180, 240),
    "sea": (20, 70, 150),
}
"""Name → red, green and blue of a sample."""


@dataclass(frozen=True, slots=True)
class PictureFolder:
    """``read`` is the SQL that reads the pictures from the project's folder, ``example`` one's
    name, ``others`` are files of other kinds."""

    path: Path
    read: str
    pictures: int
    others: int
    example: str


def look_at_pictures(folder: Path, project: Path, *, sample: bool = False) -> PictureFolder:
    """Look at the names in a folder; of a ``sample`` that is not painted yet they are known.

    Raises:
        ConfigError: there is no picture, its name cannot stand in SQL, or what reads pictures is
            not installed.
    """
    check_installed()
    if not sample and not folder.is_dir():
        raise ConfigError(
            f"{folder}: is no folder: --template images takes a folder with pictures"
            f" ({', '.join(ENDINGS)}); for a table with their names see `files` of image_encoder"
        )
    files = (
        sorted(f"{name}.png" for name in PAINTED)
        if sample
        else sorted(path.name for path in folder.iterdir() if path.is_file())
    )
    pictures = [name for name in files if name.lower().endswith(ENDINGS)]
    if not pictures:
        raise ConfigError(
            f"{folder}: has no pictures ({', '.join(ENDINGS)}); those of folders below it are not"
            " looked for"
        )
    endings = sorted({Path(name).suffix for name in pictures})
    patterns = ", ".join(literal(f"{name_from(folder, project)}/*{ending}") for ending in endings)
    return PictureFolder(
        folder, f"read_blob([{patterns}])", len(pictures), len(files) - len(pictures), pictures[0]
    )


def painted() -> dict[str, bytes]:
    """File → PNG, of the samples."""
    return {f"photos/{name}.png": _png(color) for name, color in PAINTED.items()}


def image_dim(folder: Path) -> int:
    """The length of the vectors of a CLIP or SigLIP folder, by its ``config.json``.

    Raises:
        ConfigError: there is none, or it names no size.
    """
    try:
        config = json.loads((folder.expanduser() / "config.json").read_text(encoding="utf-8"))
        sizes = (
            config.get("projection_dim"),
            config.get("vision_config", {}).get("hidden_size"),
            config.get("hidden_size"),
        )
        return next(size for size in sizes if isinstance(size, int))
    except (OSError, ValueError, AttributeError, StopIteration) as exc:
        why = str(exc) or "its config.json names no size"
        raise ConfigError(
            f"--encoder {folder}: is no CLIP or SigLIP folder, as transformers saves it: {why}"
        ) from exc


def _png(color: tuple[int, int, int], size: int = 32) -> bytes:
    """A square that darkens from top to bottom."""
    rows = b"".join(
        b"\0" + bytes(value * (2 * size - row) // (2 * size) for value in color) * size
        for row in range(size)
    )
    chunks = (
        (b"IHDR", struct.pack(">IIBBBBB", size, size, 8, 2, 0, 0, 0)),
        (b"IDAT", zlib.compress(rows)),
        (b"IEND", b""),
    )
    whole = (
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(whole)
