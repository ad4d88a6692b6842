"""Top-k: for each user the k items of the largest dot product, seen items excluded. Exact, in tiles.

score(u, i) = u · i, over all items: a matrix product of [users, dim] × [dim, items], a tile of items at a time, merged into a running
top-k, so that memory is users × (tile + k) whatever the number of items.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import torch

from precompute.model import digest
from store.errors import ConfigError, ModelError

CODE_VERSION = 1
ITEM_TILE = 16384
"""Items scored at once; 512 users × 16,384 items × 4 bytes = 32 MiB."""


class TopK:
    """Ranks all items for each row of the batch.

    Args:
        items: table of (item id int64 or string, vector, all of one length): give it as ``{sql: SELECT item_id, embedding FROM live.item_vector}``.
        k: length of the list.
        vector: the source's vector column, of the items' length.
        exclude: the source's list column of item ids never to return (``list(item_id)`` in SQL), or null.
        outputs: names of the two features: item ids, and scores float32; both best first.

    Raises:
        ConfigError: the items' table has another shape, or an id twice.
    """

    def __init__(
        self,
        items: pa.Table,
        k: int = 100,
        vector: str = "vector",
        exclude: str | None = None,
        outputs: tuple[str, str] | list[str] = ("items", "scores"),
    ) -> None:
        if not isinstance(k, int) or k < 1:
            raise ConfigError(f"top_k: k is a whole number from 1, got {k!r}")
        if len(outputs) != 2 or outputs[0] == outputs[1]:
            raise ConfigError(f"top_k: outputs are two different names, for the items and the scores, got {list(outputs)}")
        if not isinstance(items, pa.Table) or items.num_columns != 2:
            raise ConfigError("top_k: `items` is {sql: SELECT <item id>, <vector> FROM live.<view>}: two columns")
        if items.num_rows == 0:
            raise ConfigError("top_k: `items` has no rows: publish the items' view first")
        self._ids = items.column(0).combine_chunks()
        vectors = items.column(1).combine_chunks()
        if not (pa.types.is_fixed_size_list(vectors.type) or pa.types.is_list(vectors.type)) or vectors.null_count:
            raise ConfigError(f"top_k: the items' second column is {vectors.type}, not a vector without nulls")
        if (
            self._ids.null_count
            or vectors.flatten().null_count
            or not np.isfinite(np.asarray(vectors.flatten(), np.float64)).all()
        ):
            raise ConfigError("top_k: an item has a null id, or a vector with a null or a number that is not finite")
        if len(pc.unique(self._ids)) != len(self._ids):
            raise ConfigError("top_k: `items` has an id twice")
        self._dim = len(vectors[0])  # DuckDB reads a Parquet vector as a list, so the type does not tell
        self._items = torch.from_numpy(_matrix(vectors, self._dim))  # [I, D] float32
        self._k, self._vector, self._exclude = k, vector, exclude
        self._outputs = tuple(outputs)
        self.max_cost = 512

    def fingerprint(self) -> str:
        """Parameters and code version; the items' content is added by the caller, as of every table argument."""
        return digest(code=CODE_VERSION, k=self._k, vector=self._vector, exclude=self._exclude)

    def costs(self, batch: pa.RecordBatch) -> npt.NDArray[np.int64]:
        """Every user costs 1, so a batch is at most ``max_cost`` users."""
        return np.ones(batch.num_rows, np.int64)

    def unusable(self, batch: pa.RecordBatch) -> dict[int, str]:
        """Rows without a whole, finite vector."""
        self._check(batch)
        vectors = batch.column(self._vector)
        bad = dict.fromkeys(pc.indices_nonzero(vectors.is_null()).to_pylist(), f"{self._vector} is null")
        whole = np.isfinite(np.asarray(pc.fill_null(vectors.flatten(), float("nan")), np.float64))
        broken = np.unique(np.asarray(pc.list_parent_indices(vectors))[~whole]).tolist()
        return bad | dict.fromkeys(broken, f"{self._vector} has a null or a number that is not finite")

    @torch.inference_mode()
    def compute(self, batch: pa.RecordBatch) -> dict[str, Any]:
        """Item ids and float32 scores: lists of at most k a row, shorter where fewer items are left after exclusion."""
        self._check(batch)
        users = torch.from_numpy(_matrix(batch.column(self._vector), self._dim))  # [U, D]
        seen_row, seen_item = self._seen(batch)
        k = min(self._k, len(self._ids))
        best = torch.full((len(users), k), -torch.inf)
        best_item = torch.zeros((len(users), k), dtype=torch.long)
        for start in range(0, len(self._ids), ITEM_TILE):
            scores = users @ self._items[start : start + ITEM_TILE].T  # [U, tile]
            inside = (seen_item >= start) & (seen_item < start + ITEM_TILE)
            scores[seen_row[inside], seen_item[inside] - start] = -torch.inf
            tile_best, tile_item = scores.topk(min(k, scores.shape[1]), dim=1)
            both = torch.cat([best, tile_best], dim=1)
            both_item = torch.cat([best_item, tile_item + start], dim=1)
            best, position = both.topk(k, dim=1)
            best_item = both_item.gather(1, position)
        kept = torch.isfinite(best)
        offsets = pa.array(np.concatenate(([0], kept.sum(1).cumsum(0).numpy())), pa.int32())
        ids = self._ids.take(pa.array(best_item[kept].numpy()))
        return {
            self._outputs[0]: pa.ListArray.from_arrays(offsets, ids),
            self._outputs[1]: pa.ListArray.from_arrays(offsets, pa.array(best[kept].numpy())),
        }

    def _seen(self, batch: pa.RecordBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """(row in the batch, row in the items) of every excluded pair; ids that are no items are ignored."""
        if self._exclude is None:
            return torch.empty(0, dtype=torch.long), torch.empty(0, dtype=torch.long)
        lists = batch.column(self._exclude)
        if pa.types.is_null(lists.type):
            return torch.empty(0, dtype=torch.long), torch.empty(0, dtype=torch.long)
        counts = np.asarray(pc.fill_null(pc.list_value_length(lists), 0))
        rows = np.repeat(np.arange(batch.num_rows), counts)
        items = pc.index_in(*_comparable(lists.flatten(), self._ids))
        known = np.asarray(items.is_valid())
        found = np.asarray(pc.fill_null(items, 0)).astype(np.int64)
        return torch.from_numpy(rows[known]), torch.from_numpy(found[known])

    def _check(self, batch: pa.RecordBatch) -> None:
        wanted = [self._vector] if self._exclude is None else [self._vector, self._exclude]
        for name in wanted:
            if name not in batch.schema.names:
                raise ModelError(f"top_k: the input has no column {name!r} (it has: {', '.join(batch.schema.names)})")
        if self._exclude is not None:
            kind = batch.schema.field(self._exclude).type
            if not (_is_list(kind) or pa.types.is_null(kind)):
                raise ModelError(
                    f"top_k: column {self._exclude!r} is {kind}, not a list of item ids: use list(item_id) in the source"
                )
        kind = batch.schema.field(self._vector).type
        if not (pa.types.is_fixed_size_list(kind) and kind.list_size == self._dim) and not pa.types.is_list(kind):
            raise ModelError(f"top_k: column {self._vector!r} is {kind}, the items have vectors of {self._dim}")


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def _comparable(seen: pa.Array, ids: pa.Array) -> tuple[pa.Array, pa.Array]:
    """Both as one type, so that an id that is no item is unknown instead of an error: as they are, or both as text."""
    if seen.type == ids.type:
        return seen, ids
    if pa.types.is_floating(seen.type):
        seen = pc.cast(seen, pa.int64(), safe=False)
    return pc.cast(seen, pa.string()), pc.cast(ids, pa.string())


def _matrix(vectors: pa.Array, dim: int) -> npt.NDArray[np.float32]:
    """[rows, dim] float32, contiguous.

    Raises:
        ModelError: a vector of another length.
    """
    values = np.asarray(vectors.flatten()).astype(np.float32)
    lengths = pc.list_value_length(vectors)
    if len(values) != len(vectors) * dim or (len(vectors) and pc.max(lengths).as_py() != dim):
        raise ModelError(f"top_k: a vector does not have {dim} numbers, as the first item's has")
    return np.ascontiguousarray(values.reshape(-1, dim))
