"""Standing: which snapshots of a view count, and for what. Decided here and nowhere else.

A snapshot that is marked bad (rolled back from, or damaged), builds on one, copied rows of one or
repeats the content of one, and one that a gate refused, is never published and is no best known
history. Good to build on is more: one that a gate refused, whose rows are right by themselves.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping
from functools import cached_property

from precompute.store.errors import GateError, SnapshotError
from precompute.store.offline.log import BadMark, LiveRef
from precompute.store.offline.snapshot import Snapshot
from precompute.store.offline.view_store import ViewStore

log = logging.getLogger(__name__)

ROLLED_BACK = "rolled_back"
"""The gate that sees rows of a snapshot come again that was rolled back from."""


def keeps_live(snapshot: Snapshot) -> bool:
    """Whether a snapshot is a partition without rows, which takes the place of nothing unless its
    view says ``empty: publish``."""
    return (
        snapshot.partition is not None
        and not snapshot.rows
        and snapshot.view.definition.empty != "publish"
    )


def _if_wrong(snapshot: Snapshot) -> str:
    """What to do about a snapshot that a gate refused with reason, by where its rows come from."""
    full, retry = (
        ("--full", "--retry-rejected")
        if snapshot.frame is None
        else ("full=True", "retry_rejected=True")
    )
    what = "source" if snapshot.frame is None else "frame that the run is given"
    text = (
        f"If the rows are wrong: mend the {what} or the model, then run the view again. Until then"
        " every run is refused as this one was"
    )
    return (
        f"{text}, with {full} too; {full} is for what was mended where neither input nor"
        f" fingerprint shows it. A model that keeps the answers of a service is asked again by"
        f" {full} and {retry} for what was rejected, and for all inputs by {full} with another"
        " `cache` in model.args"
    )


def are_alike(one: Snapshot, other: Snapshot) -> bool:
    """Whether rows of both can be served as one set: of one model, entity and features."""
    return (
        one.model == other.model
        and one.view.entity == other.view.entity
        and one.view.features == other.view.features
    )


class Standing:
    """The snapshots of one view, as marks and live pointer stand when they are first read;
    made again for each decision.

    Args:
        store: of the view.
        manifests: of the view, where the caller has read them; others are not looked for then.
    """

    def __init__(self, store: ViewStore, manifests: Mapping[int, Snapshot] | None = None) -> None:
        self._store, self._manifests = store, manifests

    @cached_property
    def marks(self) -> dict[int, BadMark]:
        """Numbers of the snapshots that are never to be published → why."""
        return self._store.refs.bad()

    @cached_property
    def left(self) -> dict[int, BadMark]:
        """Those of :attr:`marks` whose rows are at fault: they were rolled back from."""
        return {number: mark for number, mark in self.marks.items() if mark.rows}

    # ---- one snapshot

    def bad_below(self, snapshot: Snapshot) -> int | None:
        """Number of the bad snapshot that this one is, builds on, or copied bad rows from; None
        when there is none.

        Raises:
            SnapshotError: an ancestor is missing or damaged.
        """
        # What need not be read is not.
        layer: Snapshot | None = snapshot if self.marks or self._manifests is not None else None
        while layer is not None:
            if layer.number in self.marks:
                return layer.number
            for number in (*layer.bases, *layer.members.values()):
                # Of one whose files broke later, the copied rows are good.
                if number in self.left:
                    return number
            layer = None if layer.parent is None else self._manifest(layer.parent)
        return None

    def bad(self, snapshot: Snapshot) -> int | None:
        """Number of the bad snapshot that this one is, builds on, copied bad rows from, or repeats;
        None when it is good.

        Raises:
            SnapshotError: an ancestor is missing or damaged.
        """
        below = self.bad_below(snapshot)
        if below is not None or ROLLED_BACK in snapshot.accepted:
            return below
        # Only what came after: the snapshot before a `--full` run holds the same content, and is
        # what one goes back to.
        same = (
            n for n, mark in self.marks.items() if mark.content and mark.content == snapshot.content
        )
        return next((number for number in same if number < snapshot.number), None)

    def why_void(self, snapshot: Snapshot) -> str | None:
        """Why a snapshot counts for nothing: what publishing would refuse is not best known either.
        None where it counts."""
        try:
            bad = self.bad(snapshot)
        except SnapshotError:
            # What it builds on is lost, which reading it will report.
            bad = None
        if bad == snapshot.number:
            return self.marks[bad].reason
        if bad is not None:
            return (
                f"it builds on snapshot {bad} or holds the very same rows: {self.marks[bad].reason}"
            )
        return f"refused by {', '.join(snapshot.refused_by)}" if snapshot.refused_by else None

    def check_publishable(self, snapshot: Snapshot) -> None:
        """Raises:
        GateError: a gate refused the snapshot and no operator accepted that, or it is bad: rolled
            back from, built on one that was, or the same rows once more.
        SnapshotError: it cannot be read.
        """
        number, bad = snapshot.number, self.bad(snapshot)
        if bad is not None:
            how = (
                ""
                if number == bad
                else f", and snapshot {number} builds on it or holds the very same rows"
            )
            mark = self._store.storage.shown(self._store.refs.bad_path(bad))
            accept = (
                f", or publish it with --accept {ROLLED_BACK}"
                if ROLLED_BACK in snapshot.refused_by
                else ""
            )
            raise GateError(
                f"view {self._store.name!r}: snapshot {bad} is marked bad"
                f" ({self.marks[bad].reason}){how}; the live one stays. Mend the source or the"
                f" model{accept}, or remove {mark} if the mark was a mistake"
            )
        if snapshot.refused_by:
            refusals = (
                verdict for verdict in snapshot.failed if verdict.gate in snapshot.refused_by
            )
            said = "; ".join(
                f"{verdict.gate}: {verdict.message} (limit {verdict.limit:g})"
                for verdict in refusals
            )
            accept = " ".join(f"--accept {name}" for name in snapshot.refused_by)
            raise GateError(
                f"view {self._store.name!r}: snapshot {number} is not published, the live one"
                f" stays. {said}. If this is as it should be: precompute publish {self._store.name}"
                f" --snapshot {number} {accept}. {_if_wrong(snapshot)}"
            )

    def why_unpublished(self, snapshot: Snapshot) -> str | None:
        """Why what a run or a backfill computed does not go live by itself, its gates aside; None
        where it does. What an operator publishes always does."""
        if keeps_live(snapshot):
            return f"partition {snapshot.partition} has no rows: it is done, and what is live stays"
        return self.why_stays(snapshot.partition)

    def why_stays(self, partition: str | None) -> str | None:
        """Why what is live stays, whatever a run of this partition (None: of a view that has none)
        computes; None where it does not."""
        ref = self._store.refs.readable_live()
        if ref is None:
            return None
        if ref.held is not None:
            return (
                f"the view is held ({ref.held}): `precompute resume {self._store.name}` ends that"
            )
        try:
            live = self._store.snapshot(ref.snapshot)
        except SnapshotError:
            # What is live is lost: a reason to replace it.
            return None
        if live.partition is not None and partition is not None and live.partition > partition:
            return f"partition {partition} is older than the live {live.partition}"
        return None

    # ---- one of all

    def newest(self, partition: str | None = None, *, refused: bool = True) -> Snapshot | None:
        """The newest snapshot of a partition (None: of a view that has none) that is not bad and
        whose files are all there, with all its ancestors; one that a gate refused counts only with
        ``refused``: its rows are good to build on, not to measure by.
        """
        numbers = self._store.numbers()
        # One of thousands: the others' manifests are not read.
        if partition is not None:
            entries = self._store.catalog().entries
            numbers = [
                number
                for number in numbers
                if number not in entries or entries[number].partition == partition
            ]
        for snapshot in self._readable(reversed(numbers)):
            try:
                ours = snapshot.partition == partition and not snapshot.members
                if (
                    ours
                    and (refused or not snapshot.refused_by)
                    and self.bad_below(snapshot) is None
                ):
                    self._store.layers(snapshot)
                    return snapshot
            except SnapshotError as exc:
                log.warning("%s", exc)
        return None

    def newest_publishable(self, accept: Collection[str] = ()) -> int:
        """Number of the newest snapshot of the newest partition that is not bad and that no gate
        refused but those in ``accept``; the newest of all when there is none such, to say why it
        cannot be published.

        Raises:
            SnapshotError: there is no snapshot, or only partitions without rows.
        """
        numbers = self._store.numbers()
        if not numbers:
            raise SnapshotError(
                f"view {self._store.name!r} has no snapshot yet: run `precompute run"
                f" {self._store.name}`"
            )
        assembled = {
            entry.number for entry in self._store.catalog().entries.values() if entry.members
        }
        numbers = [number for number in numbers if number not in assembled] or numbers
        last = next(
            (s for s in self._readable(reversed(numbers)) if self._may_be_published(s, accept)),
            None,
        )
        if last is None:
            return numbers[-1]
        # A view that lost or got its partitions: what it has now counts.
        if last.partition is None:
            return last.number
        entries = self._store.catalog().entries.values()
        days = sorted(
            (entry.partition, entry.number) for entry in entries if entry.partition is not None
        )
        for snapshot in self._readable(number for _, number in reversed(days)):
            if self._may_be_published(snapshot, accept) and not keeps_live(snapshot):
                return snapshot.number
        raise SnapshotError(
            f"view {self._store.name!r}: no partition that may be published has rows; to publish"
            " one without, name it with --snapshot"
        )

    def newest_of_each(
        self, accept: Collection[str] = (), like: Snapshot | None = None
    ) -> dict[str, Snapshot]:
        """Partition → its newest snapshot that is not bad and that no gate refused but those in
        ``accept``, in the order of the partitions. One without rows that takes the place of nothing
        is left out, and with ``like`` all those of another model, entity or features: rows of both
        are no one set.
        """
        entries = self._store.catalog().entries.values()
        days = sorted(
            (entry.partition, entry.number) for entry in entries if entry.partition is not None
        )
        newest: dict[str, Snapshot] = {}
        for partition, number in reversed(days):
            if partition not in newest:
                for snapshot in self._readable([number]):
                    alike = like is None or are_alike(like, snapshot)
                    if (
                        alike
                        and not keeps_live(snapshot)
                        and self._may_be_published(snapshot, accept)
                    ):
                        newest[partition] = snapshot
        return dict(sorted(newest.items()))

    def before(self, ref: LiveRef) -> int:
        """Number of the snapshot to go back to from what is live: what was live before, if it is
        still there and good, or the newest good one below.

        Raises:
            SnapshotError: there is none; names those there are.
        """
        entries = self._store.catalog().entries
        live = entries.get(ref.snapshot)
        day, assembled = (None, False) if live is None else (live.partition, bool(live.members))
        earlier = [
            entry
            for entry in entries.values()
            if entry.number != ref.snapshot
            and (entry.number < ref.snapshot or entry.number == ref.previous)
            and (day is None or (entry.partition or "") <= day)
            and (not assembled or entry.members or entry.number == ref.previous)
        ]
        earlier.sort(
            key=lambda entry: (entry.number == ref.previous, entry.partition or "", entry.number),
            reverse=True,
        )
        for snapshot in self._readable(entry.number for entry in earlier):
            try:
                self.check_publishable(snapshot)
                if not keeps_live(snapshot) or snapshot.number == ref.previous:
                    return snapshot.number
            except (SnapshotError, GateError) as exc:
                log.warning("%s", exc)
        raise SnapshotError(
            f"view {self._store.name!r} has no good snapshot before {ref.snapshot} to go back to"
            f" (there are: {self.numbers_text()})"
        )

    # ---- all

    def numbers_text(self) -> str:
        """The numbers there are, for a message."""
        return (
            ", ".join(f"{n} (bad)" if n in self.marks else str(n) for n in self._store.numbers())
            or "none"
        )

    def at_fault(self, numbers: Collection[int]) -> set[int]:
        """The newest of ``numbers`` that was rolled back from, what was gone back to then, and so
        on: by them its rows are recognised when they come again, since what both hold is good."""
        chain: set[int] = set()
        number = max((number for number in self.left if number in numbers), default=None)
        while number is not None and number not in chain:
            chain.add(number)
            number = self.marks[number].back_to if number in self.marks else None
        return chain

    def _may_be_published(self, snapshot: Snapshot, accept: Collection[str]) -> bool:
        try:
            # One that is accepted may hold the rows of a bad one once more.
            bad = self.bad_below if ROLLED_BACK in accept else self.bad
            return not set(snapshot.refused_by).difference(accept) and bad(snapshot) is None
        except SnapshotError as exc:
            log.warning("%s", exc)
            return False

    def _readable(self, numbers: Iterable[int]) -> Iterable[Snapshot]:
        for number in numbers:
            try:
                yield self._store.snapshot(number)
            except SnapshotError as exc:
                log.warning("%s", exc)

    def _manifest(self, number: int) -> Snapshot:
        if self._manifests is None:
            return self._store.snapshot(number)
        if number not in self._manifests:
            raise SnapshotError(
                f"snapshot {number} of view {self._store.name!r} is missing or damaged; publish"
                " another one"
            )
        return self._manifests[number]
