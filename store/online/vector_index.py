"""Vector index: the nearest rows of a vector feature, by FAISS. Built from a snapshot, immutable, found through the live pointer."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

import faiss
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from store.disk.durable_file import disk_message, make_folder, sync_file, sync_folder, write_durably
from store.errors import RequestError, SnapshotError, VectorIndexError

RECALL = 1.0
"""Share of the true nearest that a search finds: a flat index compares with every row, so it keeps whatever a view asks of ``recall_at_10``."""

METRICS = ("cosine", "dot", "l2")
_FILES = ("vectors.faiss", "keys.arrow")
_FLOAT = npt.NDArray[np.float32]


class VectorIndex:
    """Exact nearest neighbours over one snapshot's vectors; safe to search from several threads.

        <root>/<view>/index/<epoch:020d>/vectors.faiss · keys.arrow · meta.json

    Recall@10 is 1, whatever the view asks for. A search takes about 0.05 µs a row (57 ms at a million rows of 384), so an approximate index only pays
    beyond that; see docs/decisions.md.

    Args:
        folder: what :func:`build_index` wrote.

    Raises:
        VectorIndexError: missing, or damaged (every file's SHA-256 is checked before FAISS reads it).
    """

    def __init__(self, folder: Path) -> None:
        try:
            meta = json.loads((folder / "meta.json").read_bytes())
            if set(meta["sha256"]) != set(_FILES):
                raise ValueError("meta.json does not vouch for every file")
            for name in _FILES:
                with (folder / name).open("rb") as file:
                    if hashlib.file_digest(file, "sha256").hexdigest() != meta["sha256"][name]:
                        raise ValueError(f"{name} differs from its checksum")
            self._index = faiss.read_index(str(folder / "vectors.faiss"))
            with pa.ipc.open_file(pa.memory_map(str(folder / "keys.arrow"))) as reader:
                self._keys = reader.read_all().column("key").combine_chunks()
            shape = {"metric": meta["metric"], "dim": self._index.d, "rows": self._index.ntotal}
            if meta["metric"] not in METRICS or {k: meta[k] for k in shape} != shape or len(self._keys) != meta["rows"]:
                raise ValueError("meta.json does not fit the index")
        except (OSError, ValueError, KeyError, TypeError, RuntimeError) as exc:
            raise VectorIndexError(
                f"the vector index {folder} cannot be opened ({exc}): `precompute publish <view> --reload` builds it again"
            ) from exc
        self.metric: str = meta["metric"]
        self.dim: int = self._index.d

    def __len__(self) -> int:
        return int(self._index.ntotal)

    def search(self, vector: npt.ArrayLike, k: int, exclude: frozenset[str] = frozenset()) -> tuple[list[str], list[float]]:
        """The ``k`` nearest keys and their scores, best first.

        Args:
            vector: [dim] numbers.
            k: how many; fewer come back from a smaller index.
            exclude: keys left out of the answer.

        Returns:
            key texts, and for each the cosine or dot product (larger is nearer) or the squared L2 distance (smaller is nearer).

        Raises:
            RequestError: another length than ``dim``, or not finite.
        """
        try:
            wide = np.asarray(vector, np.float64)
        except (ValueError, TypeError) as exc:
            raise RequestError("the vector is not a list of numbers", code="bad_vector") from exc
        if isinstance(vector, str) or wide.ndim != 1:
            raise RequestError("the vector is not a list of numbers", code="bad_vector")
        if len(wide) != self.dim:
            raise RequestError(f"the vector has {len(wide)} numbers, this index takes {self.dim}", code="bad_vector")
        largest = np.abs(wide).max(initial=0.0)
        # NaN is not, either.
        if not largest <= np.finfo(np.float32).max:
            raise RequestError("the vector has a number that is not a finite float32", code="bad_vector")
        if self.metric == "cosine":
            if largest == 0:
                raise RequestError("the vector is all zeros, which has no direction for cosine", code="bad_vector")
            # So that squares neither overflow nor vanish.
            wide = wide / largest
            wide /= np.linalg.norm(wide)
        if len(self) == 0:
            return [], []
        query = wide.astype(np.float32).reshape(1, -1)
        scores, rows = self._index.search(query, min(k + len(exclude), len(self)))
        filled = rows[0] >= 0
        keys = self._keys.take(pa.array(rows[0][filled])).to_pylist()
        kept = [(key, score) for key, score in zip(keys, scores[0][filled].tolist(), strict=True) if key not in exclude][:k]
        return [key for key, _ in kept], [score for _, score in kept]


def is_there(folder: Path) -> bool:
    """Whether an index's files are there; opening it tells whether they are whole."""
    return all((folder / name).is_file() for name in (*_FILES, "meta.json"))


def build_index(folder: Path, rows: Iterable[tuple[pa.Array, pa.Array]], dim: int, metric: str) -> int:
    """Build an index folder, whole or not at all; one that is there already is replaced.

    Args:
        folder: where; its parent is created.
        rows: batches of (key texts [n], FixedSizeList of ``dim`` numbers [n]); null vectors are left out.
        dim: length of the vectors.
        metric: one of :data:`METRICS`.

    Returns:
        rows indexed.

    Raises:
        SnapshotError: the disk is full or refuses.
    """
    index = faiss.IndexFlatL2(dim) if metric == "l2" else faiss.IndexFlatIP(dim)
    keys: list[pa.Array] = []
    for key, vector in rows:
        if vector.null_count:
            key, vector = key.filter(vector.is_valid()), pc.drop_null(vector)
        values = np.asarray(vector.flatten()).astype(np.float32).reshape(-1, dim)
        index.add(_normalised(values) if metric == "cosine" else values)
        keys.append(pc.cast(key, pa.large_string()))
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        make_folder(folder.parent)
        temporary.mkdir()
        faiss.write_index(index, str(temporary / "vectors.faiss"))
        table = pa.table({"key": pa.chunked_array(keys, pa.large_string())})
        with pa.ipc.new_file(str(temporary / "keys.arrow"), table.schema) as writer:
            writer.write_table(table.combine_chunks())
        digests = {}
        for name in _FILES:
            with (temporary / name).open("rb") as file:
                digests[name] = hashlib.file_digest(file, "sha256").hexdigest()
            sync_file(temporary / name)
        meta = {"metric": metric, "dim": dim, "rows": int(index.ntotal), "recall_at_10": RECALL, "sha256": digests}
        write_durably(temporary / "meta.json", json.dumps(meta).encode())
        sync_folder(temporary)
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(temporary, folder)
        sync_folder(folder.parent)
    except OSError as exc:
        raise SnapshotError(disk_message(folder, exc)) from exc
    except RuntimeError as exc:
        # How FAISS reports a failed write.
        raise SnapshotError(f"cannot write {folder / 'vectors.faiss'}: {exc} (the live snapshot is untouched)") from exc
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return int(index.ntotal)


def _normalised(vectors: _FLOAT) -> _FLOAT:
    scaled = vectors / np.maximum(np.abs(vectors).max(axis=1, keepdims=True), np.finfo(np.float32).tiny)
    norms = np.linalg.norm(scaled, axis=1, keepdims=True)
    return np.asarray(scaled / np.maximum(norms, np.finfo(np.float32).tiny), np.float32)
