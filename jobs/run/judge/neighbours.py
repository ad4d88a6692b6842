"""Neighbours: the partitions beside one in data time, by which it is judged; whatever was computed
first, and whatever is live.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from itertools import islice
from typing import NamedTuple

from precompute.jobs.run.judge.nights import MOST_NIGHTS, Night, night_of
from precompute.store.offline.snapshot import Snapshot
from precompute.store.offline.standing import Standing
from precompute.store.offline.view_store import ViewStore
from precompute.store.times import Partition

MOST_PARTITIONS = MOST_NIGHTS + 7
"""Partitions that are looked at for those that tell what is usual: some were announced."""


class Neighbours(NamedTuple):
    """What is known of what was before a snapshot: ``nights``, the figures of the last ones, the
    oldest first; of a partition besides ``before``, the one before it in data time, and ``week``,
    that of the week before, on the same weekday. Each was made as the snapshot was, is usable and
    has rows; None without any. ``steps``: how many partitions ago ``before`` was."""

    nights: Sequence[Night] = ()
    before: Snapshot | None = None
    week: Snapshot | None = None
    steps: float = 1.0

    def alternatives(self, readers: Snapshot | None = None) -> list[Snapshot]:
        """What a partition may have as many rows as, and the keys of: what readers have in place of
        the nearest one, and that of the week before."""
        found = [readers or self.before, self.week]
        return [one for one in found if one is not None]


def neighbours_of(store: ViewStore, snapshot: Snapshot) -> Neighbours:
    """The neighbours of a partition's snapshot, as they are now.

    Raises:
        UnreadableError: something cannot be read now.
    """
    own = Partition.parse(snapshot.partition or "")
    length, week = own.end - own.start, timedelta(days=7)
    earlier = list(islice(Standing(store).earlier_partitions(snapshot), MOST_PARTITIONS))
    if not earlier:
        return Neighbours()
    day = str(Partition(own.start - week, own.end - week))
    of_week = next((one for one in earlier[1:] if one.partition == day), None)
    nights = tuple(night_of(store, one) for one in reversed(earlier))
    steps = (own.start - Partition.parse(earlier[0].partition or "").start) / length
    return Neighbours(nights, earlier[0], of_week, max(1.0, float(round(steps))))
