"""Gc: what nothing can reach any more goes, of every view in turn; a view that is being published, or is damaged, does not keep the others."""

from __future__ import annotations

from collections.abc import Sequence

from precompute.jobs.config.project import Project
from precompute.store.disk.lease import take
from precompute.store.disk.reserve import spending_reserve
from precompute.store.errors import ConfigError, ConflictError, SnapshotError
from precompute.store.offline.gc import Garbage, collect, damage, forget
from precompute.store.offline.refs import PUBLISH_LEASE


def gc(project: Project, *, forgotten: Sequence[str] | None, dry_run: bool) -> tuple[list[Garbage], list[str]]:
    """Remove what cannot be reached, as the project's retention says.

    Args:
        project: the configuration; the views need not be in it any more.
        forgotten: a view's name and the number of a damaged snapshot that is given up first.
        dry_run: only list it.

    Returns:
        what was removed, or would be; and what needs attention: views that were left out, files that cannot be removed, damage.

    Raises:
        ConfigError: ``forgotten`` names no view and number, or is given with ``dry_run``.
    """
    offline, retention = project.offline, project.settings.retention
    names = offline.views()
    view, number = forgotten or (None, "")
    if view is not None and (view not in names or not number.isdecimal() or dry_run):
        raise ConfigError(
            f"--forget {view} {number}: name a view ({', '.join(names)}) and the number of its damaged snapshot, without --dry-run"
        )
    garbage: list[Garbage] = []
    failures: list[str] = []
    with spending_reserve(project.root):
        for store in map(offline.view, names):
            try:
                busy = f"view {store.name!r} is being published"
                with take(store.leases, PUBLISH_LEASE, "gc", ttl_s=project.settings.lease, busy=busy) as lease:
                    if store.name == view:
                        forget(store, int(number), lease)
                    garbage += collect(
                        store,
                        keep=retention.keep,
                        grace_s=retention.grace,
                        leases=[lease],
                        dry_run=dry_run,
                        told=failures.append,
                    )
                failures += damage(store)
            except (ConflictError, SnapshotError) as exc:
                failures.append(str(exc))
    return garbage, list(dict.fromkeys(failures))
