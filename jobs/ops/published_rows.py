"""Published rows: rows of a view's live snapshot beside the inputs that they were computed from."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from precompute.jobs.config.project import Project
from precompute.jobs.run.rows.open_view import OpenView, open_view
from precompute.model import digest
from precompute.store.errors import ConfigError, SnapshotError
from precompute.store.keys import key_column
from precompute.store.offline.snapshot import Snapshot
from precompute.store.times import Partition
from precompute.students.student import grouped_by, is_held_out

HASH, TIME = "input_hash", "computed_at"
"""Columns of a snapshot beside its key and features."""
ADDED = 3
"""Columns that come before the source's: of the key, the inputs' hash, and their group."""

HELD_OUT = 0.1
"""Share of the rows that are held out at random, by their inputs."""
NEWEST = 0.05
"""Share of the rows that are held out because they were computed last, unless one run computed all:
what comes next is more like them."""
ONE_RUN_US = 3_600_000_000
"""Rows that were computed within so long count as computed at once."""
LEAST_HELD_OUT = 200
LEAST_EITHER = 50
"""Different inputs to learn from and to judge by, at least."""


@dataclass(frozen=True, slots=True)
class PublishedRows:
    """Rows that both the live snapshot and its source have, with equal inputs: ``learned`` and
    ``held_out`` ones, of which none has the inputs of a learned one. Columns are the source's, and
    the view's features. ``share`` of the rows is held out at random, those that are equal in the
    columns ``grouped_by`` together (:mod:`precompute.students.student`); ``data`` is a digest of
    what is learned from."""

    snapshot: Snapshot
    learned: pa.Table
    held_out: pa.Table
    grouped_by: list[str]
    share: float
    data: str


@contextlib.contextmanager
def as_published(project: Project, name: str) -> Iterator[tuple[OpenView, Snapshot]]:
    """A view opened as its live snapshot was computed, in float32; of a view that serves all of its
    partitions, as the newest of these was.

    Raises:
        SnapshotError: nothing is live.
        ConfigError: the model on disk is another one than the snapshot's.
        SourceError, ModelError: as a run would.
    """
    project.view(name)
    store = project.offline.view(name)
    live = store.refs.live()
    if live is None:
        raise SnapshotError(
            f"view {name!r} was never published: there is nothing to learn from; `precompute run"
            f" {name}` first"
        )
    snapshot = store.snapshot(live.snapshot)
    if snapshot.members:
        snapshot = store.snapshot(snapshot.members[max(snapshot.members)])
    with open_view(
        snapshot.view,
        project.offline,
        project.home,
        pinned=snapshot.inputs,
        snapshot=snapshot.number,
        partition=None if snapshot.partition is None else Partition.parse(snapshot.partition),
        memory_mb=project.settings.memory_mb,
    ) as opened:
        if opened.fingerprint != snapshot.model:
            raise ConfigError(
                f"view {name!r}: the model on disk has fingerprint {opened.fingerprint[:12]}, live"
                f" snapshot {snapshot.number} {snapshot.model[:12]}: run `precompute run {name}`,"
                " and learn from what it publishes"
            )
        yield opened, snapshot


def published_rows(
    project: Project, opened: OpenView, snapshot: Snapshot, most: int, least: int
) -> PublishedRows:
    """Rows drawn at random from all over a snapshot.

    Args:
        opened: as :func:`as_published` opens it.
        snapshot: of the view.
        most: rows at most; they lie in memory.
        least: rows that a student needs.

    Raises:
        ConfigError: fewer rows than ``least`` have a value and the inputs that it was computed
            from; they have few different inputs; or a column of the source is named as a feature.
        SourceError, SnapshotError: something cannot be read.
    """
    view = opened.view
    drawn = project.offline.view(view.name).sample(snapshot, most)
    names = list(opened.source.schema.names)
    both = set(view.feature_names) & set(names)
    if both:
        raise ConfigError(
            f"{opened.place('features', min(both))}: the source has a column of that name, too, and"
            " a student learns one from the other: rename the column with AS"
        )
    keys = key_column(drawn, view.entity)
    by = grouped_by(opened.model, view, names)
    found = opened.source.rows(keys.to_pylist(), with_hash=True, grouped_by=by).combine_chunks()
    # of a key that the source has twice, the hash tells which row was computed
    taken = drawn.take(pc.index_in(found["key"], value_set=keys)).combine_chunks()
    same = pc.equal(taken[HASH], found[HASH])
    for feature in view.feature_names:
        same = pc.and_(same, pc.is_valid(taken[feature]))
    found, taken = found.filter(same), taken.filter(same)
    rows = found.select(range(ADDED, found.num_columns))
    for feature in view.feature_names:
        rows = rows.append_column(feature, taken[feature])
    if rows.num_rows < least:
        raise ConfigError(
            f"view {view.name!r}: {rows.num_rows:,} rows of snapshot {snapshot.number} have a value"
            f" and still the inputs it was computed from; a student needs {least:,}: publish more"
            " rows, or run the view where its source has changed since"
        )
    groups = np.asarray(found.column(ADDED - 1))
    share = max(HELD_OUT, LEAST_HELD_OUT / rows.num_rows)
    times = np.asarray(taken[TIME].cast(pa.int64()))
    held_out = np.isin(groups, groups[is_held_out(groups, share) | _newest(groups, times)])
    different = [len(np.unique(groups[part])) for part in (~held_out, held_out)]
    if min(different) < LEAST_EITHER:
        raise ConfigError(
            f"view {view.name!r}: its {rows.num_rows:,} rows have so few different inputs that"
            f" {different[0]:,} are left to learn from and {different[1]:,} to judge by; each"
            f" needs {LEAST_EITHER}: publish rows of more inputs"
        )
    learned, judged = (rows.filter(pa.array(part)) for part in (~held_out, held_out))
    hashes = np.sort(np.asarray(found[HASH])[~held_out])
    data = digest(rows=hashes, snapshot=snapshot.number)
    return PublishedRows(snapshot, learned, judged, by, share, data)


def _newest(groups: npt.NDArray[np.uint64], times: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """The newest :data:`NEWEST` of the rows; of those computed at the same time, whichever."""
    chosen = np.zeros(len(groups), np.bool_)
    if len(times) and times.max() - times.min() > ONE_RUN_US:
        chosen[np.lexsort((groups, times))[-max(1, int(NEWEST * len(times))) :]] = True
    return chosen
