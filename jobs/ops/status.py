"""Status: each view's live snapshot, its age against the TTL, what is due next, how the last run
ended, and which of its inputs were published since; for people and for alerts."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Literal, TypedDict

from precompute.jobs.config.project import Project
from precompute.jobs.ops.gate_history import nights_learned
from precompute.jobs.ops.retention import (
    not_done_in_words,
    partitions_in_words,
    partitions_served,
)
from precompute.jobs.run.report import COMPUTING, PUBLISHING, with_real_status
from precompute.jobs.run.rows.open_view import REPORTS, known_source_at
from precompute.jobs.schedule.due import outlook
from precompute.store.account.account import BEHIND_S, read_account, read_followed
from precompute.store.account.checker import LOOK_S, check_live
from precompute.store.disk.lease import is_held
from precompute.store.disk.record import Record, plain
from precompute.store.disk.storage import StorageError, read_record_file, storage_of
from precompute.store.doors import VIEW_KEYS
from precompute.store.errors import (
    OnlineStoreError,
    OtherFormatError,
    PrecomputeError,
    SnapshotError,
    UnreadableError,
)
from precompute.store.feature_view import status_of
from precompute.store.offline import hooks
from precompute.store.offline.log import LiveRef
from precompute.store.offline.runs import Report
from precompute.store.offline.snapshot import Snapshot
from precompute.store.offline.standing import Standing
from precompute.store.offline.view_store import ViewStore
from precompute.store.online.online_store import OnlineStore
from precompute.store.online.url import open_online_store
from precompute.store.times import (
    AHEAD_US,
    Sighting,
    Status,
    age_s,
    as_datetime,
    duration,
    iso,
    microseconds,
    parsed_time,
    shown_time,
)
from precompute.store.vectors.index_files import index_figures

log = logging.getLogger(__name__)


def inputs_behind(
    store: ViewStore, snapshot: Snapshot, reports: Sequence[Report]
) -> list[dict[str, Any]]:
    """The views whose live rows are others than those that ``snapshot`` was computed from:
    ``input``, the numbers ``computed_from`` and ``live``, and ``behind_s``, for how long."""
    # a run that found nothing changed commits nothing: which inputs it saw, its report says.
    did = (report for report in reports if report.finished and report.snapshot == snapshot.number)
    inputs = next((report.inputs for report in did if report.inputs), snapshot.inputs)
    computed, behind = datetime.fromisoformat(snapshot.created_at), []
    for name, used in sorted(inputs.items()):
        read = store.offline.view(name)
        ref = read.log.readable_live()
        since = None if ref is None else _other_rows_since(read, used, ref, computed)
        if ref is not None and since is not None:
            behind_s = max(0.0, (datetime.now(UTC) - since).total_seconds())
            behind.append(
                {"input": name, "computed_from": used, "live": ref.snapshot, "behind_s": behind_s}
            )
    return behind


def _other_rows_since(
    store: ViewStore, used: int, ref: LiveRef, computed: datetime
) -> datetime | None:
    """Since when other rows than those of the snapshot ``used`` are live; None when they are the
    same."""

    def manifest(number: int) -> Snapshot | None:
        try:
            return store.snapshot(number)
        except SnapshotError:
            # gone or damaged, which that view's own line says
            return None

    before, now = manifest(used) if ref.snapshot != used else None, manifest(ref.snapshot)
    if ref.snapshot == used or (
        before and now and before.content and before.content == now.content
    ):
        return None
    if ref.snapshot < used:
        # rolled back
        return parsed_time(ref.at)
    standing = Standing(store)
    newer = [number for number in store.numbers() if used < number <= ref.snapshot]
    if newer[:1] != [used + 1]:
        # the first of them is collected: it came soon after
        return computed
    for snapshot in map(manifest, newer):
        if (
            snapshot
            and not standing.refused_by(snapshot)
            and not (before and before.content == snapshot.content)
        ):
            return max(computed, datetime.fromisoformat(snapshot.created_at))
    return parsed_time(ref.at)


def is_late(project: Project, snapshot: Snapshot, behind: Mapping[str, Any]) -> bool:
    """Whether a view is behind for longer than its rows may be old, or nothing in the schedule will
    bring it up."""
    if behind["behind_s"] > snapshot.view.ttl_s:
        return True
    return bool(project.schedules()) and not _follows(project, snapshot.view.name, behind["input"])


def _follows(project: Project, name: str, other: str) -> bool:
    """Whether a view runs by the clock, or after ``other`` itself or views that are computed from
    it."""
    schedule = project.schedules().get(name)
    if schedule is None:
        return False
    if schedule.cron is not None:
        return True
    return any(
        parent == other or (_reads(project, parent, other) and _follows(project, parent, other))
        for parent in schedule.parents
    )


def _reads(project: Project, name: str, other: str) -> bool:
    """Whether a view is computed from another one, itself or through others, which may read each
    other."""
    seen, ahead = set[str](), [name]
    while ahead:
        at = ahead.pop()
        inputs = project.views[at].inputs() if at in project.views and at not in seen else []
        if other in inputs:
            return True
        seen.add(at)
        ahead += inputs
    return False


def in_words(behind: Mapping[str, Any]) -> str:
    """One of :func:`inputs_behind`, for people."""
    return (
        f"computed from snapshot {behind['computed_from']} of {behind['input']}, of which"
        f" {behind['live']} is live: behind for {duration(behind['behind_s'])}"
    )


class LastRun(TypedDict):
    """The newest run of a view, in short; its whole report is ``runs/<run>.json``."""

    run: str
    command: str
    status: str
    started_at: str
    seconds: float
    partition: str | None
    error: str | None


class StatusLine(TypedDict):
    """A view in ``status --json``. Ages and ``ttl_s`` in seconds, times ISO 8601 in UTC; null where
    it is not known, or there is none."""

    view: str
    status: Literal["fresh", "stale", "expired", "unpublished", "unconfigured", "unreadable"]
    snapshot: int | None
    partition: str | None
    rows: int | None
    age_s: float | None
    ttl_s: float | None
    source_at: str | None
    source_age_s: float | None
    coverage: float | None
    rejected: int | None
    gates: dict[str, int] | None
    online: bool | None
    index: dict[str, Any] | None
    held: dict[str, Any] | None
    last_run: LastRun | None
    schedule: str | None
    next_due: str | None
    next_due_why: str | None
    behind: list[dict[str, Any]] | None
    partitions: dict[str, Any] | None
    library: dict[str, Any] | None
    checked: str | None
    attention: list[str]


_NOTHING: dict[str, Any] = dict.fromkeys(StatusLine.__annotations__)
"""Of which nothing is known, its fields in the order that they are shown in."""
_ENDED_BADLY = ("failed", "killed", "rejected", "refused")


def view_status(project: Project, store: ViewStore, online: OnlineStore) -> dict[str, Any]:
    """One view: ``status`` is fresh, stale, expired or unpublished; ``online`` whether the online
    store serves what is live, None where it does not answer; ``attention`` what an operator should
    look at, empty when all is well.

    Raises:
        SnapshotError: something cannot be read.
    """
    name = store.name
    broken = project.broken.get(name)
    ref, reports = store.log.live(), store.runs.reports(REPORTS)
    last, next_run = _last_run(store, reports), outlook(project, store, datetime.now(UTC))
    schedule = project.schedules().get(name)
    line = _NOTHING | {
        "view": name,
        "status": "unpublished",
        "behind": [],
        "ttl_s": _ttl_s(project, name),
        "held": _held(store, ref),
        "last_run": None
        if last is None
        else {field: getattr(last, field) for field in LastRun.__annotations__},
        "schedule": None if schedule is None else schedule.when,
        "next_due": None if next_run.due is None else iso(next_run.due),
        "next_due_why": next_run.reason,
    }
    attention, answers, pointer = [] if next_run.trouble is None else [next_run.trouble], True, None
    try:
        pointer = online.live(name)
        account = check_live(store, online, budget_s=LOOK_S / len(project.names))
    except PrecomputeError as exc:
        account, answers = (
            read_account(store.leases, name),
            not isinstance(exc, OnlineStoreError),
        )
        attention.append(str(exc) if answers else f"whether it is served is not known: {exc}")
    line["checked"] = account.looked_at(time.time_ns() // 1000)
    attention += _ahead(
        {f"run {report.run} began": microseconds(report.started_at) for report in reports}
    )
    if ref is not None:
        snapshot = store.snapshot(ref.snapshot)
        dated = {
            "its newest row was computed": snapshot.computed_at_max,
            "it was published": microseconds(ref.at),
        }
        attention += _ahead(dated | {"it was found unchanged": ref.renewed_at})
        line |= _live(snapshot, ref) | {
            "online": pointer is not None and pointer.epoch == ref.epoch if answers else None
        }
        line |= {"gates": _gates(store, snapshot), "index": _index(store, ref)}
        line |= _source(known_source_at(snapshot, reports))
        attention += _too_old(project, name, line["source_age_s"])
        line["behind"] = inputs_behind(store, snapshot, reports)
        attention += [
            in_words(behind) for behind in line["behind"] if is_late(project, snapshot, behind)
        ]
        attention += [
            f"snapshot {snapshot.number}: {VIEW_KEYS.absence(key)}"
            for key in snapshot.view.powers
            if not VIEW_KEYS.is_here(key)
        ]
    if name not in project.broken:
        live = None if ref is None else snapshot
        parts = line["partitions"] = partitions_served(project.view(name), store, live, reports)
        attention += [] if parts is None else not_done_in_words(name, parts)
    attention += [str(broken)] if broken else []
    attention += _behind_root(store) + hooks.left(store)
    # where the pointer was moved since it was looked at, what is wrong is with another one
    lost = ref is not None and pointer is not None and pointer.epoch > ref.epoch
    attention += account.trouble if ref is None or line["online"] or lost else []
    return line | {"attention": _attention(line) + attention}


def _held(store: ViewStore, ref: LiveRef | None) -> dict[str, Any] | None:
    """Since when, by whom and why a view is held, which snapshot ``waits`` and which one it
    ``repeats``, and all of it in a sentence; None where it is not held."""
    held = Standing(store).held(ref)
    if held is None:
        return None
    hold = {"since": held.hold.at, "by": held.hold.by, "reason": held.hold.reason}
    return hold | {"waits": held.waits, "repeats": held.repeats, "said": str(held)}


def _behind_root(store: ViewStore, *, why: bool = True) -> list[str]:
    """How long a server on this host has not served what the root says, and ``why``, in words;
    nothing where it does, or there is none."""
    followed, now_us = read_followed(store.leases), time.time_ns() // 1000
    if followed is None or followed.noted_at_us < now_us - BEHIND_S * 1e6:
        return []
    behind_s = followed.behind_s(now_us)
    if behind_s is None:
        return []
    words = f"the server here is behind the root for {duration(behind_s)}, and serves what was live"
    return [f"{words}: {followed.why}" if why else words]


def _served(online: OnlineStore, name: str) -> dict[str, Any]:
    """What readers are served, as far as the online store can say."""
    with contextlib.suppress(OnlineStoreError, OtherFormatError):
        pointer = online.live(name)
        if pointer is not None:
            return {
                "snapshot": pointer.snapshot,
                "rows": pointer.rows,
                "ttl_s": pointer.view.ttl_s,
            }
    return {}


def _ttl_s(project: Project, name: str) -> float | None:
    """As configured; None where the view's file is wrong."""
    return None if name in project.broken else project.view(name).ttl


def _source(at: str | None) -> dict[str, Any]:
    at_us = None if at is None else microseconds(at)
    return {
        "source_at": at,
        "source_age_s": None if at_us is None else age_s(at_us, time.time_ns() // 1000),
    }


def _too_old(project: Project, name: str, source_age_s: float | None) -> list[str]:
    max_age = None if name in project.broken else project.view(name).source.max_age
    if max_age is None or (source_age_s is not None and source_age_s <= max_age):
        return []
    if source_age_s is None:
        return [
            "how old its source is, which source.max_age limits, is not known: name a column of it"
            " as source.updated_at, and run it"
        ]
    return [
        f"its source was last modified {duration(source_age_s)} ago, and source.max_age is"
        f" {duration(max_age)}"
    ]


def _last_run(store: ViewStore, reports: Sequence[Report]) -> Report | None:
    """The newest run's report, with its true end, which a run that was killed could not write."""
    last = next(iter(reports), None)
    if last is not None and last.command in PUBLISHING and last.finished:
        # what a run failed at is not done by publishing another snapshot than its own
        run = next((report for report in reports if report.command in COMPUTING), last)
        last = last if run.finished or run.snapshot == last.snapshot else run
    return None if last is None else with_real_status(store, last)


def _ahead(times_us: Mapping[str, int | None]) -> list[str]:
    """What lies furthest in the future of ``times_us`` (µs since 1970): a clock was wrong, or
    is."""
    now_us = time.time_ns() // 1000
    what, at_us = max(
        ((what, us or 0) for what, us in times_us.items()),
        key=lambda item: item[1],
        default=("", 0),
    )
    if at_us <= now_us + AHEAD_US:
        return []
    return [
        f"{what} {duration((at_us - now_us) / 1e6)} ahead of this clock,"
        f" {shown_time(as_datetime(at_us))}: a clock jumped, or was wrong"
    ]


def notes(line: Mapping[str, Any]) -> list[str]:
    """What of a view's line is worth knowing and needs no action: inputs that its next run will
    catch up with, how its model compares with its own library, and which partitions are served, of
    an older model, or late."""
    details = [in_words(behind) for behind in line["behind"] or ()]
    details += [f"its model: {line['library']['said']}"] if line["library"] else []
    details += (
        partitions_in_words(line["view"], line["partitions"], line["partition"], line["rows"])
        if line["partitions"]
        else []
    )
    return [text for text in details if text and text not in line["attention"]]


def _gates(store: ViewStore, snapshot: Snapshot) -> dict[str, int] | None:
    """From how many nights the gates have learned; None where the partition that was judged last is
    damaged, which `verify` tells."""
    try:
        return {"nights": nights_learned(store, snapshot)}
    except SnapshotError as exc:
        log.warning("%s", exc)
        return None


def _index(store: ViewStore, ref: LiveRef) -> dict[str, Any] | None:
    """What was measured of the vector index that is searched."""
    found = index_figures(store.index_folder(ref.indexes[0])) if ref.indexes else None
    return None if found is None else plain(found)


def _live(snapshot: Snapshot, ref: LiveRef) -> dict[str, Any]:
    now_us = time.time_ns() // 1000
    sighting = Sighting(microseconds(ref.at), max(snapshot.renewed_at or 0, ref.renewed_at or 0), 0)
    oldest = snapshot.computed_at_min if snapshot.rows else microseconds(snapshot.created_at)
    age = sighting.age_us(oldest or 0, now_us) / 1e6
    # as it is served; an edited TTL takes effect with the next run
    status = status_of(snapshot.view, age)
    return {
        "status": "expired" if status is Status.MISSING else str(status),
        "snapshot": ref.snapshot,
        "partition": snapshot.partition,
        "ttl_s": snapshot.view.ttl_s,
        "rows": snapshot.rows,
        "age_s": age,
        "coverage": snapshot.rows / snapshot.counts.source if snapshot.counts.source else None,
        "rejected": snapshot.counts.rejected,
        "library": None if snapshot.library is None else plain(snapshot.library),
    }


def _attention(line: dict[str, Any]) -> list[str]:
    attention = []
    if line["status"] != "fresh":
        attention.append(line["status"])
    if line["online"] is False:
        attention.append(
            f"the online store does not serve what is live: precompute reconcile {line['view']}"
        )
    if line["held"] is not None:
        attention.append(line["held"]["said"])
    last = line["last_run"]
    if last is not None and last["status"] in _ENDED_BADLY:
        attention.append(f"the last run {last['status']}")
    return attention


WAITING = ".run_all/waiting.json"
"""Below the root: which views a ``run`` of several began with, until it ends; beside it its lease,
of the same name."""


class Waiting(Record, frozen=True):
    """What a ``run`` of several views began with, ``at`` in ISO 8601 (UTC)."""

    at: str
    views: list[str]


def never_began(project: Project) -> dict[str, str]:
    """View → when the ``run`` of several began that was ended before this one's turn; those that
    ran since are left out."""
    path = project.root / WAITING
    try:
        record = read_record_file(Waiting, path, "remove it")
        if record is None or is_held(path.parent, path.stem):
            return {}
    except (SnapshotError, UnreadableError) as exc:
        log.warning("%s", exc)
        return {}
    last = {
        name: project.offline.view(name).runs.last()
        for name in record.views
        if name in project.names
    }
    # both are as `utc_now` writes them
    return {
        name: record.at for name, run in last.items() if run is None or run.started_at < record.at
    }


def project_status(project: Project, views: Collection[str] = ()) -> list[dict[str, Any]]:
    """:func:`view_status` of every view, or of these; one that cannot be read, or is served without
    being configured, says so under ``attention``.

    Raises:
        ConfigError: one of ``views`` is neither configured nor served.
    """
    offline, online = project.offline, open_online_store(project.online)
    storage = storage_of(project.root)
    folders = [offline.view(n).folder for n in project.names if not views or n in views]
    with storage.look(project.root, folders), contextlib.closing(online):
        lines, waited = [], never_began(project)
        unconfigured = _unconfigured(project, online)
        for name in views:
            project.named(name, [line["view"] for line in unconfigured])
        for name in project.names:
            if views and name not in views:
                continue
            try:
                line = view_status(project, offline.view(name), online)
            except PrecomputeError as exc:
                line = _NOTHING | {"view": name, "status": "unreadable"}
                line["ttl_s"] = _ttl_s(project, name)
                # an object store that gave no answer
                line |= _served(online, name) if isinstance(exc, StorageError) else {}
                line["attention"] = [str(exc), *_behind_root(offline.view(name), why=False)]
            if name in waited:
                line["attention"].append(
                    f"the run of several views of {shown_time(waited[name])} was killed before this"
                    f" one began: precompute run {name}"
                )
            lines.append(line)
        return lines + [line for line in unconfigured if not views or line["view"] in views]


def _unconfigured(project: Project, online: OnlineStore) -> list[dict[str, Any]]:
    """Lines of the views that are served though there is no file of them any more."""
    try:
        names = [name for name in online.views() if name not in project.names]
    except OnlineStoreError:
        # every view's own line says so
        return []
    lines = []
    for name in names:
        line = _NOTHING | {"view": name, "status": "unconfigured"}
        served = _served(online, name)
        line |= served | ({"online": True} if served else {})
        why = (
            f"served, though there is no views/{name}.yaml: put it back, or end the view with"
            f" `precompute drop {name}`"
        )
        lines.append(line | {"attention": [why]})
    return lines
