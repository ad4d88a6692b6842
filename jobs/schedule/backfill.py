"""Backfill: compute the partitions of a view over a range of data time, by ``max_active`` processes at once.

What is to be done is planned from the manifests and the runs' reports. How far it is stands in ``<root>/<view>/backfills/<id>.json``, for people and for
``--resume``; it is believed only as far as manifests and reports agree. One that was killed goes on by ``--resume``, and waits for its processes that
still run; so does one that was cancelled by a signal. The live pointer moves now and then, and at the end, and only forward."""

from __future__ import annotations

import contextlib
import secrets
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime

from precompute.jobs.config.project import Project
from precompute.jobs.schedule.backfill_plan import Past, Recipes, plan_backfill, range_of, why_partition
from precompute.jobs.schedule.backfill_state import (
    Backfill,
    Item,
    Options,
    check_overlap,
    in_words,
    note_done,
    one_begins,
    read_backfill,
    save_backfill,
    take_backfill,
)
from precompute.jobs.schedule.conductor import Conductor
from precompute.store.offline.view_store import ViewStore
from precompute.store.partition import Partition
from precompute.store.record import replace


def run_backfill(
    project: Project,
    name: str,
    options: Options,
    *,
    announce: Callable[[str], None] = lambda _: None,
    now: datetime | None = None,
) -> Backfill:
    """Plan a backfill and carry it out; SIGINT and SIGTERM cancel it.

    Args:
        project: the configuration.
        name: of a view with a partition.
        options: what to do.
        announce: told how it goes, a line at a time.
        now: aware; the time by the clock by default.

    Returns:
        the backfill at its end: done, failed or cancelled.

    Raises:
        ConfigError, PrecomputeError: as :func:`plan_backfill`.
        ConflictError: another backfill of the view is at some of the partitions.
        SnapshotError: the file system failed; what was begun can be resumed.
    """
    store = project.offline.view(name)
    first, last = range_of(options.first, options.last)
    plans = plan_backfill(project, name, first, last, reprocess=options.reprocess, check_inputs=options.check_inputs, now=now)
    items = [Item(str(plan.partition), plan.why) for plan in plans if plan.action != "skip"]
    state = Backfill(f"{datetime.now(UTC):%Y%m%dT%H%M%S}-{secrets.token_hex(3)}", name, options, items)
    with contextlib.ExitStack() as held:
        with one_begins(store):
            lease = held.enter_context(take_backfill(store, state, project.settings.lease))
            check_overlap(store, [item.partition for item in items], state.id)
            save_backfill(store, state, lease)
        skipped = Counter(plan.why for plan in plans if plan.action == "skip")
        left_out = "; skipped: " + ", ".join(f"{n} {why}" for why, n in skipped.items()) if skipped else ""
        announce(f"backfill {state.id} of {name}: {in_words(len(items))}, {options.max_active} at once{left_out}")
        Conductor(project, store, state, lease, announce).conduct()
    return state


def resume_backfill(
    project: Project, name: str, id: str, *, max_active: int | None = None, announce: Callable[[str], None] = lambda _: None
) -> Backfill:
    """Go on with a backfill that was killed or cancelled, or try again what failed in it.

    What manifests and reports tell to be done is not done again; its processes that are still at work are waited for.

    Raises:
        ConfigError: there is no such backfill.
        ConflictError: it is going on, or another one is at some of its partitions.
        SnapshotError: the file system failed.
    """
    store = project.offline.view(name)
    state = read_backfill(store, id)
    with contextlib.ExitStack() as held:
        with one_begins(store):
            lease = held.enter_context(take_backfill(store, state, project.settings.lease))
            state = read_backfill(store, id)
            check_overlap(store, [item.partition for item in state.items if item.state != "done"], id)
            state.status, state.finished_at, state.signal = "running", None, None
            if max_active is not None:
                state.options = replace(state.options, max_active=max_active)
            save_backfill(store, state, lease)
        _settle(project, store, state)
        save_backfill(store, state, lease)
        left = in_words(state.count("pending"))
        announce(f"backfill {id} of {name} resumed: {state.count('done')} done, {left} left, {state.options.max_active} at once")
        Conductor(project, store, state, lease, announce).conduct()
    return state


def _settle(project: Project, store: ViewStore, state: Backfill) -> None:
    """Tell of each partition, by manifests and reports, whether it is done or still to do."""
    config, options = project.view(state.view), state.options
    todo = [item for item in state.items if item.state != "done"]
    running = {item.partition for item in todo if store.running(item.partition)}
    # read after: what does not run any more had written its report by then
    past = Past(store)
    with Recipes(config, store, project.home, project.settings.source_mb) as recipes:
        for item in todo:
            item.state, item.error = "pending", None
            if item.partition in running:
                continue
            report = past.done_by(state.id, item.partition)
            if report is not None:
                note_done(item, store, report)
            elif options.reprocess != "all" and not options.full:
                why, _ = why_partition(Partition.parse(item.partition), config, past, recipes, options.check_inputs)
                # by somebody else, meanwhile
                if why == "done":
                    note_done(item, store)
