"""Code check: whether a model whose code changed under the same fingerprint still gives the values
that were published: some unchanged rows are computed again before any other."""

from __future__ import annotations

import contextlib
from dataclasses import replace

from precompute.jobs.run.judge.gates import computed_again
from precompute.jobs.run.judge.library import newest_reports
from precompute.jobs.run.rows.open_view import OpenView, open_source
from precompute.jobs.run.rows.plan import Plan
from precompute.model_code import code_changes
from precompute.store.errors import GateError, SnapshotError
from precompute.store.keys import key_column
from precompute.store.offline.runs import Report
from precompute.store.offline.snapshot import Snapshot
from precompute.store.offline.view_store import ViewStore
from precompute.store.times import Partition

DRAWN_ROWS, CODE_ROWS = 256, 64
"""Rows that are drawn, and how many of those with an unchanged input are computed again."""


def check_code(
    store: ViewStore, opened: OpenView, plan: Plan, report: Report, source_mb: int
) -> str | None:
    """Compare the code of a user's model with the code that computed what the run builds on, or, of
    a partition that is new, what was computed last; where it is another one, compute unchanged rows
    again.

    The report has another code whose values are the same, so that the runs after it, which may
    commit nothing, neither compute them once more nor tell it again.

    Returns:
        what is to be told of another code whose values are the same; None where the code is the
            same, or was told, or nothing is known of it.

    Raises:
        GateError: a row comes out otherwise: names the code that changed, the row, and both ways
            out.
        SourceError, SnapshotError, ModelError: something cannot be read or computed.
    """
    before = plan.parent or _last(store, report.partition, plan)
    changes = "" if before is None else code_changes(before.code, opened.code())
    if before is None or not changes:
        return None
    if _is_told(store, before, opened):
        report.code = opened.code()
        return None
    with report.stage("code"):
        rows, differs = _compared(store, opened, before, report.partition, source_mb)
    said = f"the code of the model changed ({changes}), and its fingerprint did not: "
    if not differs:
        report.code = opened.code() if rows else {}
        again = (
            f"{rows} unchanged rows of snapshot {before.number} were computed again, and are equal"
        )
        return said + (again if rows else "no row is unchanged that could be compared")
    key, what = next(iter(differs.items()))
    raise GateError(
        f"view {store.name!r}: {said}of {rows} unchanged rows of snapshot {before.number} that"
        f" were computed again {len(differs)} come out otherwise (the first, key {key!r}: {what})."
        " Nothing was computed, and the live snapshot stays. Have fingerprint() of"
        f" {opened.view.definition.model.use} return another text, so that every row is computed by"
        " the code as it is now; or put the code back as it was"
    )


def _is_told(store: ViewStore, before: Snapshot, opened: OpenView) -> bool:
    """Whether an earlier run that found nothing to do has compared this code with that snapshot."""
    reports = (
        one
        for one in newest_reports(store)
        if one.snapshot == before.number and one.finished and one.model == opened.fingerprint
    )
    return any(one.code == opened.code() for one in reports)


def _last(store: ViewStore, partition: str | None, plan: Plan) -> Snapshot | None:
    """The partition that was computed last, if as this one is to be; None for a view that has no
    partitions, of which every row is computed."""
    if partition is None:
        return None
    numbers = [
        entry.number
        for entry in store.catalog().entries.values()
        if entry.partition not in (None, partition)
    ]
    if not numbers:
        return None
    try:
        last = store.snapshot(max(numbers))
    except SnapshotError:
        # damaged: `status` says so
        return None
    return last if last.recipe == plan.recipe and last.rows else None


def _compared(
    store: ViewStore, opened: OpenView, before: Snapshot, partition: str | None, source_mb: int
) -> tuple[int, dict[str, str]]:
    """(rows compared, key → what differs)."""
    view = opened.view
    opened.convert()
    names = [*view.entity, *view.feature_names, "input_hash"]
    sample = store.sample(before, DRAWN_ROWS, names)
    sample = sample.append_column("key", key_column(sample, view.entity))
    if before.partition == partition:
        return computed_again(opened, sample, DRAWN_ROWS, CODE_ROWS)
    source, _ = open_source(
        before.view,
        store.offline,
        opened.folder,
        pinned=before.inputs,
        partition=Partition.parse(str(before.partition)),
        memory_mb=source_mb,
    )
    with contextlib.closing(source):
        return computed_again(replace(opened, source=source), sample, DRAWN_ROWS, CODE_ROWS)
