"""Rows of another snapshot beside the new rows of the same keys, from the samples of both."""

from __future__ import annotations

import logging
import zlib

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from precompute.jobs.run.judge.judgement import Pairs
from precompute.jobs.run.judge.row_count import FEWEST_ROWS
from precompute.jobs.run.rows.samples import Samples, SnapshotSample
from precompute.store.errors import SnapshotError
from precompute.store.keys import key_column
from precompute.store.offline.segment import Part
from precompute.store.offline.selection import rows_beside
from precompute.store.offline.snapshot import Snapshot
from precompute.store.offline.stored_file import parsing
from precompute.store.offline.view_store import ViewStore

log = logging.getLogger(__name__)

JUDGED_ROWS = 8192
"""Rows of a snapshot's sample that its figures are of, at most: a share of them is within 0.55 %,
as a standard deviation."""
ANCHOR_ROWS = 512
"""Rows that are kept of a night."""
PAIRED_ROWS = 2048
"""Rows that are compared by key, at most."""


def judged(sample: SnapshotSample) -> pa.Table:
    """Up to :data:`JUDGED_ROWS` of a sample's rows: those of the least key hashes, so that two
    snapshots have the same keys."""
    return sample.rows.slice(0, JUDGED_ROWS)


def sample_beside(samples: Samples, other: Snapshot) -> SnapshotSample | None:
    """The sample of a snapshot that another one is compared with; None of a damaged one, which is
    to be replaced, so that it refuses nothing."""
    try:
        return samples.of(other)
    except SnapshotError as exc:
        log.warning("%s", exc)
        return None


def _comparable(
    samples: Samples, now: SnapshotSample, snapshot: Snapshot, other: Snapshot
) -> tuple[SnapshotSample, npt.NDArray[np.int64]] | None:
    """The sample of another snapshot, and positions of its rows that can be looked for in ``now``;
    None where that cannot be told."""
    entity = snapshot.view.entity
    then = sample_beside(samples, other) if other.view.entity == entity else None
    known = None if then is None else then.comparable(now, entity)
    return None if then is None or known is None else (then, known)


def pairs_of(
    samples: Samples, now: SnapshotSample, snapshot: Snapshot, other: Snapshot
) -> Pairs | None:
    """The rows of both snapshots by key; None where nothing can be compared: only vectors of
    another model, another entity, or a damaged snapshot.

    Args:
        samples: reads them.
        now: the sample of ``snapshot``.
        snapshot: with the rows that it has from the other in the files of that.
        other: what is compared with.
    """
    same_space, entity = other.made_by == snapshot.made_by, snapshot.view.entity
    features = [
        f.name
        for f in snapshot.view.features
        if (f.dim is None or same_space) and f.name in other.view.feature_names
    ]
    found = _comparable(samples, now, snapshot, other) if features else None
    if found is None:
        return None
    then, known = found
    gone = rows_beside(samples.layers(other), samples.layers(snapshot)).count
    # a row in the same place of the same file is the same
    old = then.rows.take(pa.array(known[~np.isin(then.places[known], now.places)]))
    new = now.rows.take(pa.array(np.flatnonzero(~np.isin(now.places, then.places))))
    place = pc.index_in(key_column(new, entity), key_column(old, entity))
    # keys that left the source, or were rejected, are not found; the same share of all changed rows
    # is gone
    again = np.flatnonzero(np.asarray(place.is_valid()))
    changed = gone * len(again) / max(1, old.num_rows)
    drawn = pa.array(again[_drawn(len(again), snapshot)])
    columns = [*entity, *features]
    pairs = new.select(columns).take(drawn), old.select(columns).take(place.take(drawn))
    everything = other.rows - gone + changed
    share = changed / everything if everything else 0.0
    common = len(known) - old.num_rows + len(again)
    return Pairs(*pairs, share, common, other.number)


def write_anchor(store: ViewStore, snapshot: Snapshot, sample: SnapshotSample) -> Part:
    """Write some rows of a snapshot beside its parts, those of the least key hashes: what later
    nights are compared with when the snapshot itself is gone.

    Raises:
        SnapshotError: the file system failed.
    """
    view = snapshot.view
    rows = sample.rows.slice(0, ANCHOR_ROWS).select([*view.entity, *view.feature_names])
    return store.write_part(snapshot.run, "anchor.parquet", rows)


def anchor_pairs(
    store: ViewStore, now: SnapshotSample, snapshot: Snapshot, anchor: Part, number: int
) -> Pairs | None:
    """The rows of an earlier night beside those of the same keys now; None where its file is gone,
    or has other keys.

    Args:
        store: of the view.
        now: the sample of ``snapshot``.
        snapshot: what is judged.
        anchor: the file that :func:`write_anchor` wrote.
        number: of the snapshot that it is of.

    Raises:
        SnapshotError: the file is damaged.
    """
    path, entity = store.file(anchor), list(snapshot.view.entity)
    if path is None:
        return None
    with parsing(path), pq.ParquetFile(path) as file:
        then = file.read()
    if then.select(entity).schema.types != now.rows.select(entity).schema.types:
        return None
    place = pc.index_in(key_column(then, entity), key_column(now.rows, entity))
    there = pa.array(np.flatnonzero(np.asarray(place.is_valid())))
    rows = now.rows.select(then.column_names).take(place.take(there))
    return Pairs(rows, then.take(there), 1.0, len(there), number)


def keys_gone(
    samples: Samples, now: SnapshotSample, snapshot: Snapshot, other: Snapshot
) -> float | None:
    """The share of another snapshot's keys that one lacks, by their samples; None where it cannot
    be told: the other is damaged, has another entity, or keys of another type.

    Args:
        samples: reads them.
        now: the one's.
        snapshot: the one.
        other: the other.
    """
    found = _comparable(samples, now, snapshot, other)
    if found is None or not len(found[1]):
        return None
    (then, known), entity = found, snapshot.view.entity
    keys = key_column(then.rows.take(pa.array(known)), entity)
    return 1 - (pc.sum(pc.is_in(keys, key_column(now.rows, entity))).as_py() or 0) / len(keys)


def computed_rows(
    samples: Samples, now: SnapshotSample, draft: Snapshot, live: Snapshot | None
) -> pa.Table:
    """Rows of a sample that were computed after those that are live: by this run, by one that was
    refused and that it builds on, or by the one that made a snapshot that is judged again. Where
    they are few, those of the newest segments, too."""
    last_us = None if live is None else live.computed_at_max
    computed_us = np.asarray(now.rows.column("computed_at").cast(pa.int64()))
    new = np.full(len(computed_us), True) if last_us is None else computed_us > last_us
    # by a clock that was set back they were computed earlier; what was copied of others was not
    theirs = set() if live is None else {part.path for part in live.parts}
    own = [part.path for one in draft.segments if not one.merged for part in one.parts]
    new |= samples.are_of(now, {path for path in own if path not in theirs})
    paths: set[str] = set()
    for segment in reversed(draft.segments if new.any() else ()):
        if np.count_nonzero(new) >= FEWEST_ROWS:
            break
        paths |= {part.path for part in segment.parts}
        new |= samples.are_of(now, paths)
    return now.rows.take(pa.array(np.flatnonzero(new)))


def _drawn(rows: int, snapshot: Snapshot) -> npt.NDArray[np.int64]:
    """Numbers of up to :data:`PAIRED_ROWS` of so many rows, ascending: the same ones of the same
    keys and inputs, whoever computed them and when."""
    if rows <= PAIRED_ROWS:
        return np.arange(rows)
    random = np.random.default_rng(zlib.crc32(snapshot.content.encode()))
    return np.sort(random.choice(rows, PAIRED_ROWS, replace=False))
