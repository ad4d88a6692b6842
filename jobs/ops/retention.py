"""Retention: which snapshots a view still has; which of its partitions are served, and why others
are not (not computed, of an older model, with late rows); the removal of what nothing can reach, or
of the whole view."""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from precompute.jobs.config.project import Project
from precompute.store.account.followers import followers
from precompute.store.disk.durable_file import spending_reserve
from precompute.store.disk.lease import holder, is_held, take
from precompute.store.disk.record import plain
from precompute.store.disk.storage import LOCAL, known_identity, storage_of
from precompute.store.errors import (
    ConfigError,
    ConflictError,
    DamagedPointerError,
    SnapshotError,
    UnreadableError,
    nearest_or_all,
)
from precompute.store.feature_view import NAME, FeatureView
from precompute.store.offline.gc import Garbage, collect, damage, forget
from precompute.store.offline.log import (
    BACKFILLS,
    DROP_LEASE,
    EVENTS,
    PUBLISH_LEASE,
    backfill_lease,
)
from precompute.store.offline.runs import Report
from precompute.store.offline.snapshot import NEIGHBOURS, Entry, Snapshot
from precompute.store.offline.standing import Bad, Standing
from precompute.store.offline.view_store import ViewStore
from precompute.store.online.url import open_online_store
from precompute.store.times import Partition

if TYPE_CHECKING:
    from precompute.jobs.config.view import ViewConfig

log = logging.getLogger(__name__)

NAMED = 3
"""Late partitions that are named in a line."""


@dataclass(frozen=True, slots=True)
class Dropped:
    """What a drop did, or is about to: whether the view was served, how many snapshots it has,
    whether they go too, and their size."""

    view: str
    served: bool
    configured: bool
    snapshots: int
    size_bytes: int
    data: bool


def look(project: Project, name: str, *, data: bool = False) -> Dropped:
    """What :func:`drop` would remove.

    Raises:
        ConfigError: there is no such view anywhere, or another one reads it.
        OnlineStoreError: the online store does not answer.
    """
    offline, configured = project.offline, name in project.names
    store = offline.view(name)
    with contextlib.closing(open_online_store(project.online)) as online:
        served = name in online.views()
    # the second: a removal that was stopped
    folders = [store.folder, *([store.removed_folder] if data else [])]
    there = any(folder.is_dir() for folder in folders) or name in offline.views()
    exists = NAME.match(name) is not None and (served or configured or there)
    if not exists:
        near = nearest_or_all(name, sorted({*offline.views(), *project.names}))
        raise ConfigError(
            f"no view {name!r}: neither configured, nor served, nor under {offline.root}{near}"
        )
    readers = _readers(project, store)
    if readers:
        raise ConfigError(
            f"view {name!r} is read by {', '.join(readers)}, as live.{name}: change and run, or"
            " drop, these first"
        )
    size_bytes = store.storage.size_bytes(store.folder) + sum(map(LOCAL.size_bytes, folders[1:]))
    return Dropped(name, served, configured, len(store.numbers()), size_bytes, data)


def _readers(project: Project, store: ViewStore) -> list[str]:
    """Views that read it: as they are configured, and as what is live of them was computed, whose
    fallback reads it whatever became of their files."""
    name, offline = store.name, store.offline
    readers = {other for other, view in project.views.items() if name in view.inputs()}
    for other in offline.views():
        # where it is not known what is live, what was known before
        ref = offline.view(other).log.state().live
        try:
            if ref is not None and name in offline.view(other).snapshot(ref.snapshot).inputs:
                readers.add(other)
        except SnapshotError as exc:
            # then its fallback reads nothing
            log.warning("%s", exc)
    return sorted(readers - {name})


def drop(project: Project, name: str, *, data: bool = False, take_over: bool = False) -> Dropped:
    """End a view: readers find no such view from the first step on, and whatever a crash leaves,
    doing it again removes.

    Args:
        project: the configuration; the view need not be in it any more.
        data: remove its snapshots and reports too, for good.
        take_over: end it though another project publishes it.

    Raises:
        ConfigError: as :func:`look`.
        ConflictError: a run or backfill of it is going on, or it is being published; or another
            project publishes it.
        OnlineStoreError, SnapshotError: a store failed; what was begun is finished by doing it
            again.
    """
    dropped, store = look(project, name, data=data), project.offline.view(name)
    folder = store.leases
    # one of another format is left alone, with all that it names
    store.catalog()
    if not take_over:
        _check_ours(project, name)
    with spending_reserve(project.root), contextlib.ExitStack() as held:
        if not storage_of(folder).local or folder.is_dir():
            busy = f"view {name!r} is being published, rolled back or cleaned up; wait for it"
            held.enter_context(
                take(folder, PUBLISH_LEASE, "drop", ttl_s=project.settings.lease, busy=busy)
            )
            # a run that begins from here on sees this lease, and one that began before is seen now.
            held.enter_context(
                take(folder, DROP_LEASE, "drop", ttl_s=project.settings.lease, busy=busy)
            )
            _check_idle(folder, name)
        with contextlib.closing(open_online_store(project.online)) as online:
            online.forget(name)
            for each in followers(store, online):
                each.end()
        try:
            store.storage.delete_all(store.indexes)
        except OSError as exc:
            raise SnapshotError(
                f"{store.indexes} cannot be removed: {exc.strerror or exc}; do it once more"
            ) from exc
        store.log.end_live()
        if data:
            store.remove()
    return dropped


def _check_ours(project: Project, name: str) -> None:
    """Raises:
    ConflictError: another project publishes the view; one whose pointer is damaged is no project's.
    """
    with (
        contextlib.closing(open_online_store(project.online)) as online,
        contextlib.suppress(DamagedPointerError),
    ):
        pointer, ours = online.live(name), known_identity(project.root)
        if pointer is not None and pointer.owner not in ("", ours):
            raise ConflictError(
                f"view {name!r} in the online store is published by another project"
                f" ({pointer.owner}, this one is {ours or 'new'}): nothing was dropped. Drop it"
                " there, or give this project an online store or a prefix of its own; where that"
                f" project is gone, `precompute drop {name} --take-over`"
            )


def _check_idle(folder: Path, name: str) -> None:
    """Raises:
    ConflictError: a run, whose end would publish the view again, goes on.
    """
    names = (Path(name) for name in sorted(storage_of(folder).names(folder)))
    for lease in (name.stem.removeprefix("lease-") for name in names if name.match("lease-*.json")):
        if lease not in (PUBLISH_LEASE, DROP_LEASE) and is_held(folder, lease):
            by = holder(folder, lease)
            raise ConflictError(
                f"view {name!r} is being computed (lease {lease!r}, process"
                f" {by.pid if by else '?'}): wait for it, or end it with SIGTERM"
            )


def gc(
    project: Project, *, forgotten: Sequence[str] | None, dry_run: bool
) -> tuple[list[Garbage], list[str]]:
    """Remove what cannot be reached, as the project's retention says.

    Args:
        project: the configuration; the views need not be in it any more.
        forgotten: a view's name and the number of a damaged snapshot that is given up first, or
            ``events``: those of its log that are damaged.
        dry_run: only list it.

    Returns:
        what was removed, or would be; and what needs attention: views that were left out, files
            that cannot be removed, damage.

    Raises:
        ConfigError: ``forgotten`` names no view, or nothing of it that is given up so, or is given
            with ``dry_run``.
    """
    offline, retention = project.offline, project.settings.retention
    names = offline.views()
    view, number = forgotten or (None, "")
    if view is not None and (
        view not in names or not (number.isdecimal() or number == EVENTS) or dry_run
    ):
        raise ConfigError(
            f"--forget {view} {number}: name a view ({', '.join(names)}) and the number of its"
            f" damaged snapshot, or `{EVENTS}`, without --dry-run"
        )
    garbage: list[Garbage] = []
    failures: list[str] = []
    with spending_reserve(project.root):
        for store in map(offline.view, names):
            try:
                busy = f"view {store.name!r} is being published"
                with take(
                    store.leases, PUBLISH_LEASE, "gc", ttl_s=project.settings.lease, busy=busy
                ) as lease:
                    if store.name == view and number == EVENTS:
                        store.log.give_up(lease)
                    elif store.name == view:
                        forget(store, int(number), lease)
                    garbage += collect(
                        store,
                        keep=retention.keep,
                        grace_s=retention.grace,
                        leases=[lease],
                        dry_run=dry_run,
                        report=failures.append,
                    )
                failures += damage(store)
            except (ConflictError, SnapshotError, UnreadableError) as exc:
                failures.append(str(exc))
    return garbage, list(dict.fromkeys(failures))


def list_snapshots(project: Project, name: str) -> list[dict[str, Any]]:
    """A view's snapshots, the newest first; of a view that is not configured any more, too.

    Returns:
        for each ``snapshot`` (its number), ``created_at``, ``kind`` (full or delta), ``parent``,
        ``partition``, ``rows``, ``model``, ``refused_by`` and ``accepted`` (gates), ``library``
        (how the model compares with its own, None where that is not known), ``live``, ``previous``,
        ``bad`` (why it is never published again), ``pinned``, and ``error`` when the manifest
        cannot be read, whose other fields are None then.

    Raises:
        ConfigError: no such view, neither configured nor in the offline store.
        SnapshotError: the live pointer cannot be read.
    """
    store = project.stored(name)
    ref, standing, pins = store.log.live(), Standing(store), store.log.pins()
    lines = []
    for number in reversed(store.numbers()):
        marks = {
            "live": ref is not None and ref.snapshot == number,
            "previous": ref is not None and ref.previous == number,
            "pinned": number in pins,
        }
        try:
            snapshot = store.snapshot(number)
            line = _facts(standing, store, snapshot) | {"error": None}
        except SnapshotError as exc:
            line = dict.fromkeys((*_FACTS, *_JUDGED)) | {
                "bad": standing.marks[number].reason if number in standing.marks else None,
                "error": str(exc),
            }
        lines.append({"snapshot": number} | line | marks)
    return lines


_FACTS = ("created_at", "kind", "parent", "partition", "rows", "model")
_JUDGED = ("refused_by", "accepted", "library", "bad")


def _facts(standing: Standing, store: ViewStore, snapshot: Snapshot) -> dict[str, Any]:
    number, found = snapshot.number, standing.verdict(snapshot)
    bad = None
    if isinstance(found, Bad):
        bad = f"{'' if found.number == number else f'builds on {found.number}: '}{found.reason}"
    return {name: getattr(snapshot, name) for name in _FACTS} | {
        "refused_by": list(standing.refused_by(snapshot)),
        "accepted": sorted(store.log.accepted(number)),
        "library": None if snapshot.library is None else plain(snapshot.library),
        "bad": bad,
    }


# ---- partitions


def partitions_served(
    config: ViewConfig, store: ViewStore, live: Snapshot | None, reports: Sequence[Report]
) -> dict[str, Any] | None:
    """What of a view's partitions is live; None for a view that has none. Read from the catalog and
    the runs' reports: few manifests are read, and no source.

    Args:
        config: of the view.
        store: its snapshots.
        live: the one that is served; None while nothing is.
        reports: its newest runs', the newest first.

    Returns:
        ``serve`` (newest or all, as what is live was published), ``served`` and ``computed``
        (partitions with rows), ``left_out``: reason → how many partitions are not served as they
        were computed last, ``refused``: partition → the gates that refuse its newest snapshot,
        ``uncompared``: those that their backfill has not compared with the days before them,
        ``older``: partitions of another model or source than the view would be computed with now,
        ``looked_at``: how many partitions' sources these runs
        read again to look for late rows, and ``late``: those of them that have other rows now.

    Raises:
        SnapshotError: a manifest cannot be read.
    """
    if config.partition is None:
        return None
    newest: dict[str, Entry] = {}
    for entry in store.catalog().entries.values():
        if entry.partition is not None:
            newest[entry.partition] = entry
    standing = Standing(store)
    refused = {
        name: list(gates)
        for name, of in sorted(newest.items())
        if (gates := standing.refused_by(of))
    }
    uncompared = [name for name, gates in refused.items() if NEIGHBOURS in gates]
    for name in uncompared:
        del refused[name]
    # one that goes on does it
    uncompared = [] if uncompared and _is_backfilled(store) else uncompared
    rest = {"refused": refused, "uncompared": uncompared, "older": _older(config, store, newest)}
    rest |= _late(newest, reports)
    newest = {partition: entry for partition, entry in newest.items() if entry.rows}
    served = 0 if live is None else 1
    facts = {"serve": "newest", "served": served, "computed": len(newest), "left_out": {}} | rest
    if live is not None and live.members:
        facts |= {
            "serve": "all",
            "served": len(live.members),
            "left_out": _left_out(config, store, live, newest),
        }
    return facts


def _is_backfilled(store: ViewStore) -> bool:
    """Whether a backfill of the view is going on."""
    ids = (Path(name).stem for name in store.storage.names(store.folder / BACKFILLS))
    return any(is_held(store.leases, backfill_lease(id)) for id in ids)


def _left_out(
    config: ViewConfig, store: ViewStore, live: Snapshot, newest: Mapping[str, Entry]
) -> dict[str, int]:
    assert config.partition is not None
    standing, left_out = Standing(store), Counter[str]()
    since = None
    if config.partition.keep is not None:
        since = Partition.parse(max(live.members)).end - timedelta(seconds=config.partition.keep)
    for partition, entry in sorted(newest.items()):
        if live.members.get(partition) == entry.number:
            continue
        if since is not None and Partition.parse(partition).end <= since:
            left_out["older than keep"] += 1
        elif entry.number in standing.marks:
            reason = standing.marks[entry.number].reason
            left_out[reason.partition(",")[0].partition(":")[0]] += 1
        elif gates := standing.refused_by(entry):
            left_out[f"refused by {', '.join(gates)}"] += 1
        else:
            left_out[
                (
                    "of another model"
                    if store.snapshot(entry.number).made_by != live.made_by
                    else "not published yet"
                )
            ] += 1
    return dict(left_out)


def _older(config: ViewConfig, store: ViewStore, newest: Mapping[str, Entry]) -> list[str]:
    """Partitions that were computed otherwise than the one that was computed last, or all, where
    the view's file says another model or source by now. That a model's own files changed, the next
    run finds."""
    if not newest:
        return []
    # they load DuckDB, which most commands of this file do without
    from precompute.jobs.config.view import model_queries
    from precompute.sources.database import parameters

    last = max(newest.values(), key=lambda entry: entry.number)
    made = store.snapshot(last.number)
    if _made_by(config.feature_view()) != _made_by(made.view):
        return sorted(newest)
    if any(parameters(sql) for sql in model_queries(config.model.args).values()):
        # each partition has a model of its own
        return []
    return sorted(
        partition
        for partition, entry in newest.items()
        if entry.computation != last.computation
        # of views that read none, the model is all that there is
        or (made.input_models and store.snapshot(entry.number).made_by != made.made_by)
    )


def _made_by(view: FeatureView) -> tuple[Any, ...]:
    made_by = view.definition
    return (
        view.entity,
        view.features,
        made_by.source.strip(),
        made_by.model,
        made_by.bad_rows == "null",
    )


def _late(newest: Mapping[str, Entry], reports: Sequence[Report]) -> dict[str, Any]:
    """Late rows of each partition by the last run that looked at it, but where it was computed
    again since."""
    looked_at, late = set[str](), []
    for report in reports:
        for partition in set(report.looked_at) - looked_at:
            if (
                partition in report.late
                and partition in newest
                and newest[partition].run < report.run
            ):
                late.append(partition)
        looked_at.update(report.looked_at)
    return {"looked_at": len(looked_at), "late": sorted(late)}


def partitions_in_words(
    view: str, partitions: Mapping[str, Any], live: str | None, rows: int
) -> list[str]:
    """One glance shows what is online, and what would mend the rest; empty where all is as it
    should be.

    Args:
        view: its name.
        partitions: what of them is live, as :func:`partitions_served` says.
        live: the partition that is live, if one alone is.
        rows: that are live.
    """
    lines = []
    if partitions["serve"] == "all":
        why = ", ".join(f"{count:,} {reason}" for reason, count in partitions["left_out"].items())
        lines.append(
            f"all partitions: {partitions['served']:,} served"
            + (f"; not served as computed last: {why}" if why else "")
        )
    elif partitions["computed"] > 1 and live is not None:
        lines.append(
            f"newest partition only: {rows:,} keys of {_date(live)}; lookups see no other of the"
            f" {partitions['computed']:,} partitions computed so far"
        )
    lines += not_done_in_words(view, partitions)
    if partitions["older"]:
        older = partitions["older"]
        lines.append(
            f"{_count(older)} of an older model or source: {_backfill(view, older)} --reprocess"
            " stale` computes what is to be computed again"
        )
    if partitions["late"]:
        late = partitions["late"]
        lines.append(
            f"late rows in {_count(late)} ({_named(late)}) of the {partitions['looked_at']:,} that"
            f" runs looked at: {_backfill(view, late)} --reprocess stale --check-inputs` computes"
            " these, and looks at all others"
        )
    return lines


def not_done_in_words(view: str, partitions: Mapping[str, Any]) -> list[str]:
    """Which partitions were computed and do not count, and what would mend that: readers and
    training sets have older rows in their place. As :func:`partitions_in_words`."""
    lines, uncompared = [], partitions["uncompared"]
    if partitions["refused"]:
        refused = list(partitions["refused"])
        gates = sorted({gate for by in partitions["refused"].values() for gate in by})
        lines.append(
            f"{_count(refused)} refused by {', '.join(gates)} ({_named(refused)}):"
            f" {_backfill(view, refused)} --reprocess refused` judges these again; with --accept"
            " and the gate's name they count as they are"
        )
    if uncompared:
        lines.append(
            f"{_count(uncompared)} not compared with the days before ({_named(uncompared)}), since"
            f" a backfill ended before: {_backfill(view, uncompared)}` does it"
        )
    return lines


def _count(partitions: Sequence[str]) -> str:
    return f"{len(partitions):,} partition{'s' if len(partitions) > 1 else ''}"


def _named(partitions: Sequence[str]) -> str:
    """The newest of some partitions."""
    others = " and others" if len(partitions) > NAMED else ""
    return ", ".join(_date(partition) for partition in partitions[-NAMED:]) + others


def _backfill(view: str, partitions: Sequence[str]) -> str:
    return f"`precompute backfill {view} --from {_date(partitions[0])} --to {_date(partitions[-1])}"


def _date(partition: str) -> str:
    """Where a partition begins, as ``--from`` and ``--to`` take it."""
    return partition.partition("/")[0].removesuffix("T00:00Z")
