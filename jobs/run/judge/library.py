"""Library: a model that is new to a view is compared with its own library, once; later runs of the
same fingerprint find the verdict in the manifest that they build on, or in an earlier run's report.
A library that gave no answer is asked again by the next run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace

import pyarrow as pa

from precompute.engine.runner import Runner
from precompute.jobs.config.view import ViewConfig
from precompute.jobs.run.rows.open_view import REPORTS, OpenView
from precompute.model import Model, OwnLibrary
from precompute.own_library import (
    ROWS,
    TRIED_ROWS,
    ask,
    compared,
    exact_view,
    own_library_of,
    telling_rows,
    unchecked,
    version_of,
    without_asking,
)
from precompute.sources.source import Source
from precompute.store.errors import ModelError, SnapshotError, UnreadableError
from precompute.store.feature_view import LibraryCheck
from precompute.store.keys import key_column
from precompute.store.offline.runs import Report
from precompute.store.offline.snapshot import Snapshot
from precompute.store.offline.view_store import ViewStore

POOL_ROWS = 256
"""Rows that those to compare are chosen from."""
POOL_PICTURES = 16
"""The same of a source with bytes, such as pictures."""
NULL_ROWS = 4
"""Rows with a null among them, at most, where there are some."""


def check_by_library(
    config: ViewConfig,
    store: ViewStore,
    opened: OpenView,
    parent: Snapshot | None,
    accept: Collection[str],
    report: Report,
    memory_mb: int,
) -> None:
    """Compare the view's model with its own library, before a row is computed: as it is known, or
    else by asking it. One without a library is as it is.

    Args:
        config: of the view.
        store: of the view, with the reports of its earlier runs.
        opened: the view, its source loaded and its model in float32.
        parent: the snapshot that the run builds on.
        accept: gates that the run accepts, ``library`` perhaps among them.
        report: of the run; gets the verdict, and the seconds.
        memory_mb: how much the weights may take once more.

    Raises:
        ModelError: it differs, and that is not accepted; or it did when it was asked last, and has
            no answer now.
        SourceError: the source cannot be read.
    """
    own = own_library_of(opened.model)
    if own is None:
        return None
    found = (
        known_check(own, opened.fingerprint, [] if parent is None else [parent])
        or without_asking(own, memory_mb)
        or known_check(own, opened.fingerprint, newest_reports(store), report.backfill)
    )
    if found is None:
        with report.stage("library"):
            found = compare_rows(opened, own, memory_mb)
    if found.verdict == "not checked":
        found = _refused(opened.fingerprint, newest_reports(store)) or found
    if found.verdict == "differs" and "library" in accept:
        found = replace(found, accepted=True)
    # that of a refused run, too: it stands until a later one knows better
    report.library = found
    if found.verdict == "differs" and not found.accepted:
        raise ModelError(
            f"{opened.place('model', 'use')}: the model {found.said}. Nothing was computed. If the"
            " library is right, set in model.args what the folder or file does not say (a prompt,"
            " the longest input, the columns), or write a model class of your own that calls it; if"
            f" this is as it should be: {config.accepting('library')}"
        )


def known_check(
    own: OwnLibrary,
    fingerprint: str,
    earlier: Iterable[Snapshot | Report],
    backfill: str | None = None,
) -> LibraryCheck | None:
    """What the first of earlier runs found that asked the same version of the library about the
    same fingerprint. A difference that nobody accepted is looked at again, and so is what could not
    be checked, but within one backfill, which may have a thousand partitions.

    Args:
        own: the library.
        fingerprint: of the view's model.
        earlier: manifests or reports.
        backfill: id of the one that the run is a part of.
    """
    version = version_of(own)
    for one in earlier:
        found = one.library if one.model == fingerprint else None
        if found is None or found.library != own.name:
            continue
        if found.verdict == "not checked":
            if backfill is not None and isinstance(one, Report) and one.backfill == backfill:
                return found
        elif found.version == version and (found.verdict != "differs" or found.accepted):
            return found
    return None


def _refused(fingerprint: str, earlier: Iterable[Report]) -> LibraryCheck | None:
    """The difference for which the last run of a fingerprint was refused, if it was."""
    last = next((one.library for one in earlier if one.model == fingerprint and one.library), None)
    return last if last is not None and last.verdict == "differs" and not last.accepted else None


def newest_reports(store: ViewStore) -> Iterator[Report]:
    """Those of a view's newest runs, each read when it is looked at: in an object store it is a
    request."""
    for run in store.runs.ids()[:REPORTS]:
        # one that cannot be read tells nothing
        with contextlib.suppress(SnapshotError, UnreadableError):
            yield store.runs.read(run)


def compare_rows(opened: OpenView, own: OwnLibrary, memory_mb: int) -> LibraryCheck:
    """Ask the library of a model for some rows of the view's source, and compare.

    Args:
        opened: the view, its model in float32; of a source that is not loaded the first rows are
            chosen from.
        own: the library.
        memory_mb: how much the weights may take once more.

    Raises:
        SourceError: the source cannot be read.
        ModelError: the view and its source do not fit the model.
    """
    if (known := without_asking(own, memory_mb)) is not None:
        return known
    view, batch = exact_view(opened.view), _rows(opened.source)
    if batch is None:
        return unchecked(own, "there is no row to compare")
    with _exactly(opened.model):
        done = Runner(opened.model, view, search=False).compute(batch)
    if not len(done.rows):
        return unchecked(own, f"the model has a value for none of {batch.num_rows} rows")
    rows = batch.take(pa.array(done.rows[:ROWS]))
    keys = key_column(rows, view.entity).to_pylist()
    made, left_out = done.features.slice(0, ROWS), len(done.rejections)
    return compared(own, version_of(own) or "", view, made, ask(own, rows), keys, left_out)


def _exactly(model: Model) -> contextlib.AbstractContextManager[None]:
    """A GPU's float32 by all of its bits, as the library's is."""
    if not getattr(getattr(model, "device", None), "is_cuda", False):
        return contextlib.nullcontext()
    # torch takes a second to import, and a tree needs none
    from precompute.techniques.machine import products_in

    return products_in("ieee")


def _rows(source: Source) -> pa.RecordBatch | None:
    """Rows of the source that tell most; None where there are none."""
    of_bytes = any(pa.types.is_binary(field.type) for field in source.schema)
    most = POOL_PICTURES if of_bytes else POOL_ROWS
    if source.loaded:
        parts = [source.extremes(1), source.with_nulls(NULL_ROWS), source.sample(most)]
        pool = pa.concat_tables(parts)
    else:
        pool = source.head(most)
    keys = key_column(pool, source.entity).to_pylist()
    first = {key: row for row, key in reversed(list(enumerate(keys)))}
    pool = pool.take(pa.array(sorted(first.values()), pa.int64()))
    chosen = telling_rows(pool, source.input_columns or source.entity, TRIED_ROWS)
    batches = pool.take(pa.array(chosen, pa.int64())).combine_chunks().to_batches()
    return batches[0] if chosen else None
