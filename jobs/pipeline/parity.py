"""Parity: whether batch and fallback give the same value, on some rows computed once more."""

from __future__ import annotations

import pyarrow as pa

from precompute.engine.features import with_null_rows
from precompute.engine.runner import compute
from precompute.jobs.pipeline.verdicts import Verdicts
from precompute.jobs.rows.engine import computed
from precompute.jobs.rows.open_view import OpenView
from precompute.precision.same_value import differing

PARITY_ROWS = 20


def judge_parity(opened: OpenView, sample: pa.Table, limit: float, verdicts: Verdicts) -> None:
    """The gate ``parity``.

    Args:
        opened: source and model.
        sample: some rows of the snapshot, with a column ``key``.
        limit: share of the compared rows that may differ.
        verdicts: gets the verdict; none where no row could be compared.

    Raises:
        SourceError, ModelError: something cannot be read or computed.
    """
    compared, different = _parity(opened, sample)
    if compared:
        message = f"{len(different)} of {compared} sampled rows come out differently from the fallback"
        if different:
            message += "; the first, {!r}: {}".format(*next(iter(different.items())))
        verdicts.at_most("parity", len(different) / compared, limit, message)


def _parity(opened: OpenView, sample: pa.Table) -> tuple[int, dict[str, str]]:
    """(rows compared, key → what differs): some rows computed once more, from the source by key, as the fallback does; rows whose input
    changed since are left out."""
    step = max(1, sample.num_rows // PARITY_ROWS)
    stored = sample.take(pa.array(range(0, sample.num_rows, step))).slice(0, PARITY_ROWS)
    position = {key: row for row, key in enumerate(stored.column("key").to_pylist())}
    hashes = stored.column("input_hash").to_pylist()
    again = opened.source.rows(list(position), with_hash=True).combine_chunks()
    keys = again.column("key").to_pylist()
    same = [row for row, h in enumerate(again.column("input_hash").to_pylist()) if hashes[position[keys[row]]] == h]
    if not same:
        return 0, {}
    batch = again.take(pa.array(same)).drop_columns(["key", "input_hash"]).combine_chunks().to_batches()[0]
    keys = [keys[row] for row in same]
    outcome = compute(opened.model, opened.view, batch) if opened.wanted is None else computed(opened, batch, opened.variant)
    done = with_null_rows(opened.view, outcome)
    differs = {keys[rejection.row]: rejection.error for rejection in done.rejections}
    keys = [keys[row] for row in done.rows.tolist()]
    # a torch model knows how it computes; without importing torch, that is how to tell one from a model of the user's own
    known = opened.wanted is not None or getattr(opened.model, "variant", None) == opened.variant
    precision = opened.variant if known else None
    rows = differing(stored.take(pa.array([position[key] for key in keys], pa.int64())), done.features, opened.view, precision)
    return len(same), differs | {keys[row]: what for row, what in rows.items()}
