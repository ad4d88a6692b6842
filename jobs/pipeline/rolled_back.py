"""Rolled back: whether rows of a snapshot that was rolled back from come again.

A row is told by key, input hash and recipe, so it does not matter through which snapshots it comes. What the snapshot that was gone back to held
too is not at fault. What came again since and is live by now counts as what comes now, or all of them would return in slices; but for as many as were
accepted, or came while the gate was off. Of damaged snapshots, what can be read counts.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from precompute.diff import returned_rows
from precompute.jobs.pipeline.verdicts import Verdicts
from precompute.jobs.rows.open_view import OpenView, files_of
from precompute.jobs.rows.plan import recipe_of
from precompute.source import Files
from precompute.store.errors import SnapshotError
from precompute.store.offline.layers import Layers, dead_rows
from precompute.store.offline.selection import all_rows
from precompute.store.offline.snapshot import Snapshot
from precompute.store.offline.standing import ROLLED_BACK, Standing
from precompute.store.offline.view_store import ViewStore

log = logging.getLogger(__name__)


def judge_rolled_back(opened: OpenView, store: ViewStore, snapshot: Snapshot, limit: float | None, verdicts: Verdicts) -> None:
    """The gate :data:`precompute.store.offline.standing.ROLLED_BACK`.

    Args:
        opened: its source is loaded.
        store: of the view.
        snapshot: about to be committed.
        limit: share of a bad snapshot's own rows that may come again; None switches the gate off.
        verdicts: gets the verdict.
    """
    unrecognised, again = _unrecognised(opened, store, snapshot), _returned(opened, store, snapshot, verdicts)
    if unrecognised is not None:
        message = (
            f"the rows of snapshot {unrecognised}, which was rolled back from, cannot be recognised after the change of hash (another version of "
            f"DuckDB, or the first run of every row); look whether they come again, then --accept {ROLLED_BACK}"
        )
        verdicts.at_most(ROLLED_BACK, 1.0, limit, message)
    elif again is not None:
        number, own, back, live = again
        message = f"{back:,} of the {own:,} rows come again that snapshot {number} had computed, which was rolled back from"
        if live:
            message += f", {live:,} of them live already"
        verdicts.add(ROLLED_BACK, back / own, limit, limit is None or back <= limit * own, message)


def _returned(opened: OpenView, store: ViewStore, snapshot: Snapshot, verdicts: Verdicts) -> tuple[int, int, int, int] | None:
    """(a snapshot that was rolled back from, the rows it computed, those of them that come again and nobody let pass, those of these that are live), of
    which the largest share does; None without any."""
    worst: tuple[int, int, int, int] | None = None
    marks = Standing(store).left
    live = _live(store) if marks else None
    let_pass = {} if live is None else _let_pass(live)
    # of one that cannot be read today, too
    verdicts.excused |= let_pass
    for number, mark in marks.items():
        bad = _readable(store, number)
        if bad is None or not bad.recipe or bad.recipe != snapshot.recipe:
            continue
        went_to = None if mark.back_to is None else _readable(store, mark.back_to)
        past = [of if of is not None and of.recipe == snapshot.recipe else None for of in (bad, went_to or live, live)]
        try:
            try:
                own, new, old = returned_rows(
                    opened.source, *(Files() if of is None else files_of(store.layers(of)) for of in past)
                )
            except SnapshotError as exc:
                log.warning("%s", exc)
                own, new, old = returned_rows(opened.source, *(Files() if of is None else _whole_files(store, of) for of in past))
        except SnapshotError as exc:
            # Of the past, and damaged: no reason to refuse what comes after it.
            log.warning("%s", exc)
            continue
        excused = min(old, let_pass.get(number, 0))
        verdicts.returned[number], verdicts.excused[number] = new + old, excused
        back = new + old - excused
        if own and (worst is None or back / own > worst[2] / worst[1]):
            worst = (number, own, back, old - excused)
    return worst


def _let_pass(live: Snapshot) -> Mapping[int, int]:
    """Snapshots that were rolled back from → rows of theirs in what is live that an operator let pass: those it came with when it was accepted or the gate
    was off, or those that were live already and let pass then."""
    judged = any(verdict.gate == ROLLED_BACK for verdict in live.gates)
    return live.excused if judged and ROLLED_BACK not in live.accepted else {**live.excused, **live.returned}


def _unrecognised(opened: OpenView, store: ViewStore, snapshot: Snapshot) -> int | None:
    """A snapshot that was rolled back from, whose rows are made alike but whose inputs were hashed in another way, so that nobody can tell whether
    they come again; None without any. One that is older than what is live and hashed as this one is no news: somebody looked before that was published.
    """
    marked = Standing(store).left
    if not marked:
        return None
    live, made = _live(store), recipe_of(opened, hashed=False)
    looked_at = live.number if live is not None and live.recipe == snapshot.recipe else 0
    for number in marked:
        bad = _readable(store, number) if number > looked_at else None
        if bad is not None and bad.recipe != snapshot.recipe and made == bad.computation:
            return number
    return None


def _live(store: ViewStore) -> Snapshot | None:
    ref = store.refs.readable_live()
    return None if ref is None else _readable(store, ref.snapshot)


def _readable(store: ViewStore, number: int) -> Snapshot | None:
    try:
        return store.snapshot(number) if number in store.numbers() else None
    except SnapshotError as exc:
        log.warning("%s", exc)
        return None


def _whole_files(store: ViewStore, snapshot: Snapshot) -> Files:
    """Of a damaged snapshot, the files whose keys and hashes can be read. Where those that tell which rows are dead cannot, the rows count as alive.

    Raises:
        SnapshotError: a manifest cannot be read.
    """
    chain = store.chain(snapshot)
    parts = {part.path: (layer, part) for layer in chain for part in layer.parts}
    deletes: list[Path] = []
    for layer in chain:
        if layer.deletes is not None:
            try:
                path = store.checked_path(layer, layer.deletes)
                dead_rows(list(parts), [path])
                deletes.append(path)
            except SnapshotError as exc:
                log.warning("%s", exc)
    dead = dead_rows(list(parts), deletes)
    whole: list[Path] = []
    dead_of_whole = {}
    for position, (layer, part) in enumerate(parts.values()):
        try:
            path = store.checked_path(layer, part)
            for _ in all_rows(Layers([path], [part.rows], {})).batches([*snapshot.view.entity, "input_hash"]):
                pass
        except SnapshotError as exc:
            log.warning("%s", exc)
            continue
        if position in dead:
            dead_of_whole[len(whole)] = dead[position]
        whole.append(path)
    return Files(whole, dead_of_whole)
