"""Top-k: for each user the k items of the largest dot product, seen items excluded. Exact, in tiles
of users and items, so that memory is bounded.

Between items that score the same, the one that comes first in the table is the better: score and
position make one number (:func:`_keys`), and no two are equal.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import torch

from precompute.model import Prepared, digest
from precompute.models.device import Device, compute_with
from precompute.models.torch_model import Tensors, TorchModel
from precompute.store.errors import ConfigError, ModelError

CODE_VERSION = 3
"""2: of items that score the same, the first comes first. 3: products by oneDNN, with other last
bits."""

ITEM_TILE = 4096
USER_TILE = 256
"""Scored at once by a CPU's thread: 4 MiB of scores, which its cache holds. 15 MiB take 15 %
longer."""
GPU_SCORES = 2**26
"""Scored at once on a GPU: 256 MiB of scores, and some 2 GiB to rank them."""
ROUND = 16
"""Users and items are filled up to a multiple of it: with fewer, MKL, where it computes, adds in
another order, and a row's last bits depend on its neighbours."""
START_USERS = 4096
"""First batches on a GPU, the engine searches on from here; on a CPU a tile for each thread."""

LAST_SCORE = 0x7F800000
NOTHING = LAST_SCORE << 32 | 0xFFFFFFFF
"""The key of a place in a list that no item takes: worse than every item's, and its score reads as
-inf."""

Keys = npt.NDArray[np.int64]


class Ranking(torch.nn.Module):
    """Users and the items each has seen → the k best of the others, as keys: int64 [users, k],
    ascending, best first.

    Args:
        items: float32 [items, dim].
        k: length of a list; all items where there are fewer.
    """

    items: torch.Tensor

    def __init__(self, items: torch.Tensor, k: int) -> None:
        super().__init__()
        self.count, self.k = len(items), min(k, len(items))
        self.register_buffer(
            "items",
            torch.nn.functional.pad(items, (0, 0, 0, -len(items) % ROUND)),
            persistent=False,
        )

    def forward(
        self, users: torch.Tensor, starts: torch.Tensor, seen: torch.Tensor
    ) -> torch.Tensor:
        """``users`` float32 [B, dim]; the items that user b has seen are ``seen[starts[b]:starts[b
        + 1]]``, their positions, int64."""
        return (
            self.by_topk(users, starts, seen)
            if users.is_cuda
            else self.by_threshold(users, starts, seen)
        )

    def by_topk(
        self, users: torch.Tensor, starts: torch.Tensor, seen: torch.Tensor
    ) -> torch.Tensor:
        """:meth:`forward` for a GPU: the keys of every tile are ranked, and the host waits for
        nothing."""
        device, n = users.device, len(users)
        row = torch.repeat_interleave(
            torch.arange(n, device=device), starts.diff(), output_size=len(seen)
        )
        best = torch.full((n, self.k), NOTHING, device=device)
        tile = max(ROUND, GPU_SCORES // max(1, n) // ROUND * ROUND)
        for start in range(0, self.count, tile):
            stop = min(start + tile, self.count)
            # columns more, for what was seen in other tiles
            scores = torch.empty(n, stop - start + ROUND, device=device)
            torch.mm(users, self.items[start:stop].T, out=scores[:, :-ROUND])
            column = torch.where((seen >= start) & (seen < stop), seen - start, stop - start)
            scores[row, column] = -torch.inf
            # as _keys does
            bits = (scores[:, :-ROUND] + 0.0).view(torch.int32)
            keys = (~(bits ^ ((bits >> 31) & 0x7FFFFFFF))).long() << 32 | torch.arange(
                start, stop, device=device
            )
            best = torch.cat([best, keys], 1).topk(self.k, largest=False, sorted=True).values
        return best

    def by_threshold(
        self, users: torch.Tensor, starts: torch.Tensor, seen: torch.Tensor
    ) -> torch.Tensor:
        """:meth:`forward` for a CPU: only scores above the user's k-th best so far are ranked, each
        tile of users in a thread of its own."""
        offsets, items = starts.numpy(), seen.numpy()
        best = np.empty((len(users), self.k), np.int64)
        threads = torch.get_num_threads()
        tiles = max(1, -(-len(users) // (USER_TILE * threads))) * threads
        size = max(1, -(-len(users) // (tiles * ROUND))) * ROUND

        def rank(start: int) -> None:
            stop = min(start + size, len(users))
            row = np.repeat(np.arange(stop - start), np.diff(offsets[start : stop + 1]))
            best[start:stop] = self._ranked(
                users[start:stop], row, items[offsets[start] : offsets[stop]]
            )

        if threads == 1 or len(users) <= size:
            for start in range(0, len(users), size):
                rank(start)
        else:
            list(_workers(threads).map(rank, range(0, len(users), size)))
        return torch.from_numpy(best)

    @torch.inference_mode()
    def _ranked(
        self, users: torch.Tensor, row: npt.NDArray[np.int64], seen: npt.NDArray[np.int64]
    ) -> Keys:
        n = len(users)
        users = torch.nn.functional.pad(users, (0, 0, 0, -n % ROUND))  # [U, dim]
        score, width = _scorer(users), len(users)
        best = np.full((width, self.k), NOTHING)
        # what a score must exceed to be looked at
        above = np.full(width, -np.inf, np.float32)
        above[n:] = np.inf
        tile = -(-ITEM_TILE // ROUND) * ROUND
        passed = np.empty((min(tile, len(self.items)), width), np.bool_)
        for start in range(0, self.count, tile):
            stop = min(start + tile, len(self.items))
            scores = score(self.items[start:stop]).numpy()
            inside = (seen >= start) & (seen < stop)
            scores[seen[inside] - start, row[inside]] = -np.inf
            scores[self.count - start :] = -np.inf
            mask = passed[: stop - start]
            # torch's takes three times as long
            np.greater(scores, above, out=mask)
            # the first tile, and one much better than those before
            if np.count_nonzero(mask) > 2 * self.k * width:
                above = np.maximum(above, _lower_bound(scores, self.k))
                np.greater(scores, above, out=mask)
            best = _merged(best, scores, np.flatnonzero(mask), start)
            # a later item that scores as much as the k-th does not displace it, so it need not pass
            above = np.maximum(above, _scores(best[:, -1]))
        return np.sort(best[:n], axis=1)


def _scorer(users: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """What scores items [I, dim] for these users [U, dim]: [I, U].

    By oneDNN with the users laid out as its kernels read weights: of 64 numbers it multiplies 250
    GFLOP/s by a thread of an AMD Zen 5 (AVX-512; 128 with AVX2 alone), where MKL has 107 and 110.
    """
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return lambda items: torch.mm(items, users.T)
    packed = torch.ops.mkldnn._reorder_linear_weight(users, None)
    multiply = torch.ops.mkldnn._linear_pointwise
    return lambda items: multiply(items, packed, None, "none", [], "")


_pools: dict[int, ThreadPoolExecutor] = {}
_pools_lock = threading.Lock()


def _workers(count: int) -> ThreadPoolExecutor:
    """Threads in each of which torch computes with one, so that numpy's part, which knows no
    threads, runs on all cores too; and none waits for another within a tile, which on a machine
    with other work took three times as long."""
    with _pools_lock:
        if count not in _pools:
            _pools[count] = ThreadPoolExecutor(count, "top_k", compute_with, (1,))
        return _pools[count]


def _lower_bound(scores: npt.NDArray[np.float32], k: int) -> npt.NDArray[np.float32]:
    """A number for each user that at least k of these scores [items, users] exceed, or all if fewer
    are there: just below the k-th largest of the maxima of groups of items, of which there are 8k,
    so that 7 % more pass than must."""
    size = max(1, len(scores) // (8 * k))
    groups = len(scores) // size
    if groups < k:
        return np.full(scores.shape[1], -np.inf, np.float32)
    maxima = (
        torch.from_numpy(scores[: groups * size])
        .view(groups, size, -1)
        .amax(1)
        .T.contiguous()
        .numpy()
    )
    # numpy's partition takes 2 ns a number here, torch's topk 15
    kth: npt.NDArray[np.float32] = np.partition(maxima, groups - k, axis=1)[:, groups - k]
    return np.nextafter(kth, np.float32(-np.inf))


def _merged(
    best: Keys, scores: npt.NDArray[np.float32], chosen: npt.NDArray[np.int64], first: int
) -> Keys:
    """The k smallest keys of each user, in no order but the k-th last: of ``best`` [users, k] and
    of the chosen places in ``scores`` [items, users]."""
    if not len(chosen):
        return best
    width, k = best.shape
    item, user = np.divmod(chosen, width)
    keys = _keys(scores.reshape(-1)[chosen], item + first)
    # numpy sorts 16 bits by radix
    user = user.astype(np.uint16)
    order = np.argsort(user, kind="stable")
    user = user[order]
    counts = np.bincount(user, minlength=width)
    column = np.arange(len(user)) - np.repeat(np.cumsum(counts) - counts, counts)
    both = np.full((width, k + int(counts.max())), NOTHING)
    both[:, :k] = best
    both[user, column + k] = keys[order]
    both.partition(k - 1, axis=1)
    return both[:, :k]


def _keys(scores: npt.NDArray[np.float32], positions: npt.NDArray[np.int64]) -> Keys:
    """One number each, the smaller the better: a larger score first, then an earlier position,
    which is below 2³².

    The bits of a float32, read as an integer, order as the number does; of a negative one in
    reverse. Adding 0 makes 0 of -0.
    """
    bits = (scores + np.float32(0)).view(np.int32)
    return (~(bits ^ ((bits >> 31) & 0x7FFFFFFF))).astype(np.int64) << 32 | positions


def _scores(keys: Keys) -> npt.NDArray[np.float32]:
    """The scores that :func:`_keys` was given."""
    bits = ~(keys >> 32).astype(np.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).view(np.float32)


@dataclass(slots=True)
class _Users:
    """Vectors float32 [rows, dim]; the items that row i has seen are ``seen[starts[i]:starts[i +
    1]]``, their positions."""

    vectors: npt.NDArray[np.float32]
    starts: npt.NDArray[np.int64]
    seen: npt.NDArray[np.int64]


class TopK(TorchModel):
    """Ranks all items for each row of the batch.

    Args:
        items: table of (item id int64 or string, vector, all of one length): give it as ``{sql:
            SELECT item_id, embedding FROM live.item_vector}``.
        k: length of the list.
        vector: the source's vector column, of the items' length.
        exclude: the source's list column of item ids never to return (``list(item_id)`` in SQL), or
            null.
        outputs: names of the two features: item ids, and scores float32; both best first.
        device: ``cpu``, ``cuda`` or ``cuda:1``; by default a GPU where there is one.

    Raises:
        ConfigError: the items' table has another shape, or an id twice.
    """

    cost_unit = "users"

    def __init__(
        self,
        items: pa.Table,
        k: int = 100,
        vector: str = "vector",
        exclude: str | None = None,
        outputs: tuple[str, str] | list[str] = ("items", "scores"),
        device: str | None = None,
    ) -> None:
        if not isinstance(k, int) or k < 1:
            raise ConfigError(f"top_k: k is a whole number from 1, got {k!r}")
        if len(outputs) != 2 or outputs[0] == outputs[1]:
            raise ConfigError(
                "top_k: outputs are two different names, for the items and the scores, got"
                f" {list(outputs)}"
            )
        if not isinstance(items, pa.Table) or items.num_columns != 2:
            raise ConfigError(
                "top_k: `items` is {sql: SELECT <item id>, <vector> FROM live.<view>}: two columns"
            )
        if items.num_rows == 0:
            raise ConfigError("top_k: `items` has no rows: publish the items' view first")
        self._ids = items.column(0).combine_chunks()
        vectors = items.column(1).combine_chunks()
        if (
            not (pa.types.is_fixed_size_list(vectors.type) or pa.types.is_list(vectors.type))
            or vectors.null_count
        ):
            raise ConfigError(
                f"top_k: the items' second column is {vectors.type}, not a vector without nulls:"
                " add WHERE … IS NOT NULL to its SQL"
            )
        if (
            self._ids.null_count
            or vectors.flatten().null_count
            or not np.isfinite(_float32(vectors.flatten())).all()
        ):
            raise ConfigError(
                "top_k: an item has a null id, or a vector with a null or a number that is not"
                " finite"
            )
        if len(pc.unique(self._ids)) != len(self._ids):
            raise ConfigError("top_k: `items` has an id twice")
        # DuckDB reads a Parquet vector as a list, so the type does not tell
        self._dim = len(vectors[0])
        matrix = _matrix(vectors, self._dim)  # [I, D]
        self._longest = float(np.sqrt(np.square(matrix, dtype=np.float64).sum(1).max()))
        self._k, self._vector, self._exclude = k, vector, exclude
        self._outputs = tuple(outputs)
        super().__init__(Ranking(torch.from_numpy(matrix), k), Device(device))
        self.start_cost = (
            START_USERS if self.device.is_cuda else USER_TILE * torch.get_num_threads()
        )

    def fingerprint(self) -> str:
        """Parameters and code version; the items' content is added by the caller, as of every table
        argument."""
        return digest(code=CODE_VERSION, k=self._k, vector=self._vector, exclude=self._exclude)

    def reads(self) -> list[str]:
        return [self._vector] if self._exclude is None else [self._vector, self._exclude]

    def unusable(self, batch: pa.RecordBatch) -> dict[int, str]:
        """Rows without a whole, finite vector of the items' length, or with one so long that a
        score may not be finite."""
        self._check(batch)
        vectors = batch.column(self._vector)
        bad = dict.fromkeys(
            pc.indices_nonzero(vectors.is_null()).to_pylist(), f"{self._vector} is null"
        )
        lengths = pc.list_value_length(vectors)
        for row in pc.indices_nonzero(
            pc.fill_null(pc.not_equal(lengths, self._dim), False)
        ).to_pylist():
            bad[row] = f"{self._vector} has {lengths[row]} numbers, the items' vectors {self._dim}"
        values = _float32(pc.fill_null(vectors.flatten(), float("nan"))).astype(np.float64)
        rows = np.asarray(pc.list_parent_indices(vectors))
        norms = np.sqrt(np.bincount(rows, np.square(values), minlength=batch.num_rows))
        # |u · i| ≤ |u| |i| (Cauchy–Schwarz), and so are the sums on the way
        too_long = np.flatnonzero(norms * self._longest > np.finfo(np.float32).max).tolist()
        bad |= dict.fromkeys(
            too_long, f"{self._vector} is so long that scores are not finite in float32"
        )
        broken = np.unique(rows[~np.isfinite(values)]).tolist()
        return bad | dict.fromkeys(
            broken, f"{self._vector} has a null or a number that is not finite"
        )

    def prepare(self, batch: pa.RecordBatch) -> Prepared:
        """Vectors, and positions of the seen items; a row costs 1."""
        self._check(batch)
        vectors = _matrix(batch.column(self._vector), self._dim)
        return Prepared(np.ones(batch.num_rows, np.int64), _Users(vectors, *self._seen(batch)))

    def tensors(self, prepared: Prepared, rows: npt.NDArray[np.int64]) -> Tensors:
        users: _Users = prepared.payload
        counts = users.starts[rows + 1] - users.starts[rows]
        starts = np.append(0, np.cumsum(counts))
        place = np.arange(starts[-1]) + np.repeat(users.starts[rows] - starts[:-1], counts)
        return (
            torch.from_numpy(users.vectors[rows]),
            torch.from_numpy(starts),
            torch.from_numpy(users.seen[place]),
        )

    def features(self, outputs: Sequence[npt.NDArray[Any]]) -> dict[str, Any]:
        """Item ids and float32 scores: lists of at most k a row, shorter where fewer items are left
        after exclusion."""
        keys = outputs[0]
        retained = keys >> 32 < LAST_SCORE
        offsets = pa.array(np.append(0, np.cumsum(retained.sum(1))), pa.int32())
        best = keys[retained]
        return {
            self._outputs[0]: pa.ListArray.from_arrays(
                offsets, self._ids.take(pa.array(best & 0xFFFFFFFF))
            ),
            self._outputs[1]: pa.ListArray.from_arrays(offsets, pa.array(_scores(best))),
        }

    def flops(self, prepared: Prepared, rows: npt.NDArray[np.int64]) -> float:
        """Operations of the matrix product: 2 · users · items · dim."""
        return 2.0 * len(rows) * len(self._ids) * self._dim

    def _seen(self, batch: pa.RecordBatch) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """(where each row's begin [rows + 1], positions in the items) of what is excluded; ids that
        are no items are ignored."""
        nothing = np.zeros(batch.num_rows + 1, np.int64), np.empty(0, np.int64)
        if self._exclude is None:
            return nothing
        lists = batch.column(self._exclude)
        if pa.types.is_null(lists.type):
            return nothing
        counts = np.asarray(pc.fill_null(pc.list_value_length(lists), 0)).astype(np.int64)
        items = pc.index_in(*_comparable(lists.flatten(), self._ids))
        is_known = np.asarray(items.is_valid())
        # of each id in the lists, how many known ones
        before = np.append(0, np.cumsum(is_known))
        return before[np.append(0, np.cumsum(counts))], np.asarray(items.drop_null()).astype(
            np.int64
        )

    def _check(self, batch: pa.RecordBatch) -> None:
        if self._exclude is not None:
            kind = batch.schema.field(self._exclude).type
            if not (_is_list(kind) or pa.types.is_null(kind)):
                raise ModelError(
                    f"top_k: column {self._exclude!r} is {kind}, not a list of item ids: use"
                    " list(item_id) in the source"
                )
        kind = batch.schema.field(self._vector).type
        if not (
            pa.types.is_fixed_size_list(kind) and kind.list_size == self._dim
        ) and not pa.types.is_list(kind):
            raise ModelError(
                f"top_k: column {self._vector!r} is {kind}, the items have vectors of {self._dim}"
            )


def _is_list(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    )


def _comparable(seen: pa.Array, ids: pa.Array) -> tuple[pa.Array, pa.Array]:
    """Both as one type, so that an id that is no item is unknown instead of an error: as they are,
    or both as text."""
    if seen.type == ids.type:
        return seen, ids
    if pa.types.is_floating(seen.type):
        seen = pc.cast(seen, pa.int64(), safe=False)
    return pc.cast(seen, pa.string()), pc.cast(ids, pa.string())


def _float32(values: pa.Array) -> npt.NDArray[np.float32]:
    """What does not fit becomes infinite."""
    with np.errstate(over="ignore"):
        return np.asarray(values).astype(np.float32)


def _matrix(vectors: pa.Array, dim: int) -> npt.NDArray[np.float32]:
    """[rows, dim] float32, contiguous.

    Raises:
        ModelError: a vector of another length.
    """
    values = _float32(vectors.flatten())
    lengths = pc.list_value_length(vectors)
    if len(values) != len(vectors) * dim or (len(vectors) and pc.max(lengths).as_py() != dim):
        raise ModelError(f"top_k: a vector does not have {dim} numbers, as the first item's has")
    return np.ascontiguousarray(values.reshape(-1, dim))
