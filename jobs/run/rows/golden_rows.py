"""Golden rows: unchanged rows of a snapshot that are computed again among the rows of a run, by the
same batches, and written nowhere."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pyarrow as pa

from precompute.engine.rows import Outcome, with_null_rows
from precompute.store.feature_view import FeatureView
from precompute.store.keys import key_column

_HASH = "input_hash"


class GoldenRows:
    """The golden rows of one run, or of one shard of it.

    Args:
        view: declares key and features.
        inputs: the rows, the source's columns; None without any.
    """

    def __init__(self, view: FeatureView, inputs: pa.Table | None = None) -> None:
        self._view, self.inputs = view, inputs
        schema = [("key", pa.string()), ("error", pa.string()), *view.feature_schema()]
        self.computed = pa.schema(schema).empty_table()
        """What came of them so far: ``key``, ``error`` (null unless a row was rejected), and the
        features."""

    @property
    def wanted(self) -> int:
        """How many there are."""
        return 0 if self.inputs is None else int(self.inputs.num_rows)

    def among(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The rows of a run in batches, these rows spread over the first of them; where there is
        none, they are not computed. They have no ``input_hash``, by which :meth:`take` knows
        them: so a row that is written cannot be one."""
        inputs = self.inputs
        for batch in batches:
            yield batch if inputs is None else _spread(batch, inputs)
            inputs = None

    def take(self, batch: pa.RecordBatch, done: Outcome) -> Outcome:
        """What came of the other rows of a batch; what came of these is kept.

        Args:
            batch: of :meth:`among`.
            done: the outcome of its rows, or of some.
        """
        is_golden = np.asarray(batch.column(_HASH).is_null())
        if not is_golden.any():
            return done
        own = is_golden[done.rows]
        rejected = [one for one in done.rejections if is_golden[one.row]]
        golden = Outcome(done.rows[own], done.features.filter(pa.array(own)), rejected)
        golden = with_null_rows(self._view, golden)
        self._keep(self._keys(batch, golden.rows.tolist()), golden.features)
        errors = [one.error for one in golden.rejections]
        self._keep(self._keys(batch, [one.row for one in golden.rejections]), None, errors)
        return replace(
            done,
            rows=done.rows[~own],
            features=done.features.filter(pa.array(~own)),
            rejections=[one for one in done.rejections if not is_golden[one.row]],
        )

    def add(self, computed: pa.Table) -> None:
        """Add what came of them elsewhere, as :attr:`computed` has it there."""
        self.computed = pa.concat_tables([self.computed, computed.cast(self.computed.schema)])

    def _keys(self, batch: pa.RecordBatch, rows: list[int]) -> pa.Array:
        entity = self._view.entity
        keys = batch.select(list(entity)).take(pa.array(rows, pa.int64()))
        return key_column(keys, entity).cast(pa.string())

    def _keep(
        self, keys: pa.Array, features: pa.RecordBatch | None, errors: list[str] | None = None
    ) -> None:
        nulls = [pa.nulls(len(keys), field.type) for field in self._view.feature_schema()]
        columns = nulls if features is None else features.columns
        said = pa.nulls(len(keys), pa.string()) if errors is None else pa.array(errors, pa.string())
        self.add(pa.Table.from_arrays([keys, said, *columns], schema=self.computed.schema))


def _spread(batch: pa.RecordBatch, inputs: pa.Table) -> pa.RecordBatch:
    """A batch with rows more, at equal distances: a model that names no costs computes its rows in
    their order, and these would be a batch of their own at an end."""
    more = inputs.append_column(_HASH, pa.nulls(inputs.num_rows, pa.int64()))
    more = more.select(batch.schema.names).cast(batch.schema).combine_chunks().to_batches()
    shares = [(np.arange(rows) + 0.5) / rows for rows in (batch.num_rows, inputs.num_rows)]
    order = np.argsort(np.concatenate(shares), kind="stable")
    return pa.concat_batches([batch, *more]).take(pa.array(order))
