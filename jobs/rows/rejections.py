"""Rejections: the rows of a run that get no value, each with the stage, the error, and how often it was tried."""

from __future__ import annotations

from collections import Counter

import pyarrow as pa

from precompute.diff import refused_rows
from precompute.engine.window import MISFIT
from precompute.jobs.process.job import Job
from precompute.jobs.rows.open_view import OpenView
from precompute.jobs.rows.plan import Plan
from precompute.store.errors import RejectedError
from precompute.store.offline.snapshot import Part

_SCHEMA = pa.schema(
    [
        ("key", pa.string()),
        ("stage", pa.string()),
        ("error", pa.string()),
        ("input_hash", pa.int64()),
        ("attempts", pa.int32()),
    ]
)


class Rejections:
    """The rejected rows of one run, in memory: more than the view allows end it.

    Args:
        job: the run.
        opened: its view.
        allowed: how many there may be.

    Raises:
        RejectedError: from every method that takes rows: there are more than allowed, and ``rejected.parquet`` of the run has them; or
            ``bad_rows: fail`` and one is unusable.
    """

    def __init__(self, job: Job, opened: OpenView, allowed: int) -> None:
        self._job, self._opened, self._allowed = job, opened, allowed
        self.count = 0
        self.part: Part | None = None
        """The file of all of them, once written."""
        self._batches: list[pa.RecordBatch] = []
        self._journaled = 0
        """Batches that are in a chunk of the journal."""
        self._reasons: Counter[str] = Counter()
        self._misfits = 0
        """Those for which the model's answer is not what the view declares."""
        self._attempts: dict[tuple[str | None, int | None], int] = {}
        """Of the rows that are tried again: how often, by key and input hash."""

    def take_over(self, plan: Plan) -> None:
        """Begin with the rows that were rejected before with the same input, or count how often those were that are tried again."""
        if plan.diff.retried:
            before = refused_rows(self._opened.source)
            rows = zip(*(before.column(name).to_pylist() for name in ("key", "input_hash", "attempts")), strict=True)
            self._attempts = {(key, input_hash): attempts for key, input_hash, attempts in rows}
        if plan.diff.refused:
            table = refused_rows(self._opened.source).cast(_SCHEMA)
            self._batches = table.to_batches()
            self._journaled = len(self._batches)
            errors = table.column("error").to_pylist()
            self._reasons.update(errors)
            self.check_policy(table.column("key"), table.column("stage").to_pylist(), errors)
            self.count = table.num_rows
            self._check_count()

    def add(self, keys: pa.Array, stages: list[str], errors: list[str], hashes: pa.Array) -> None:
        """Note rejected rows: key as text, where it failed and why, input hash."""
        attempts = [1] * len(keys)
        if self._attempts:
            named = zip(keys.to_pylist(), hashes.to_pylist(), strict=True)
            attempts = [1 + self._attempts.get(row, 0) for row in named]
        columns = [keys, pa.array(stages, pa.string()), pa.array(errors, pa.string()), hashes, pa.array(attempts, pa.int32())]
        self._batches.append(pa.RecordBatch.from_arrays(columns, schema=_SCHEMA))
        self._reasons.update(errors)
        self._misfits += stages.count(MISFIT)
        self.count += len(keys)
        self._check_count()

    def check_policy(self, keys: pa.Array | pa.ChunkedArray, stages: list[str], errors: list[str]) -> None:
        """Raises:
        RejectedError: the view's policy is to fail, and a row is one that the model declared unusable.
        """
        if self._opened.view.definition.bad_rows == "fail" and "input" in stages:
            row = stages.index("input")
            raise RejectedError(
                f"view {self._job.store.name!r}: key {keys[row].as_py()!r}: {errors[row]}, and bad_rows is fail; nothing was published and the "
                "live snapshot stays. Mend the source, or set bad_rows to reject or null"
            )

    def for_journal(self) -> pa.Table | None:
        """Those that no chunk has yet, which the chunk about to be finished has from now on; None without any."""
        fresh = self._batches[self._journaled :]
        self._journaled = len(self._batches)
        return pa.Table.from_batches(fresh, _SCHEMA) if fresh else None

    def write(self) -> None:
        """Write all of them to ``rejected.parquet`` of the run, if there are any."""
        if self._batches:
            table = pa.Table.from_batches(self._batches, _SCHEMA)
            self.part = self._job.store.write_part(self._job.report.run, "rejected.parquet", table)

    @property
    def all_misfit(self) -> bool:
        """Whether there are any, and the model's answer fitted for none."""
        return 0 < self.count == self._misfits

    @property
    def path(self) -> str:
        """Where :meth:`write` writes them."""
        return str(self._job.store.data / self._job.report.run / "rejected.parquet")

    def reasons(self) -> str:
        """The commonest reasons, with counts."""
        return "; ".join(f"{n}× {reason}" for reason, n in self._reasons.most_common(3))

    def _check_count(self) -> None:
        if self.count > self._allowed:
            self.write()
            raise RejectedError(
                f"view {self._job.store.name!r}: {self.count} rows rejected so far, {self._allowed} allowed ({self.reasons()}); nothing was "
                f"published and the live snapshot stays. See {self.path}; mend the source, or raise max_rejected"
            )
