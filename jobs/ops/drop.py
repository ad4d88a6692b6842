"""Drop: the end of a view. It is taken out of the online store and the vector index, and, if asked to, out of the offline store too."""

from __future__ import annotations

import contextlib
import logging
import shutil
from dataclasses import dataclass
from pathlib import Path

from precompute.jobs.config.project import Project
from precompute.store.disk.identity import known_identity
from precompute.store.disk.lease import holder, is_held, take
from precompute.store.disk.reserve import spending_reserve
from precompute.store.errors import ConfigError, ConflictError, DamagedPointerError, SnapshotError
from precompute.store.feature_view import NAME
from precompute.store.offline.refs import DROP_LEASE, PUBLISH_LEASE
from precompute.store.offline.view_store import ViewStore
from precompute.store.online_url import open_online_store

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Dropped:
    """What a drop did, or is about to: whether the view was served, how many snapshots it has, whether they go too, and their size."""

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
    exists = NAME.match(name) is not None and (served or configured or any(folder.is_dir() for folder in folders))
    if not exists:
        names = ", ".join(sorted({*offline.views(), *project.names})) or "none"
        raise ConfigError(f"no view {name!r}: neither configured, nor served, nor under {offline.root} (there are: {names})")
    readers = _readers(project, store)
    if readers:
        raise ConfigError(f"view {name!r} is read by {', '.join(readers)}, as live.{name}: change and run, or drop, these first")
    size_bytes = sum(path.stat().st_size for folder in folders for path in folder.rglob("*") if path.is_file())
    return Dropped(name, served, configured, len(store.numbers()), size_bytes, data)


def _readers(project: Project, store: ViewStore) -> list[str]:
    """Views that read it: as they are configured, and as what is live of them was computed, whose fallback reads it whatever became of their files."""
    name, offline = store.name, store.offline
    readers = {other for other, view in project.views.items() if name in view.inputs()}
    for other in offline.views():
        ref = offline.view(other).refs.readable_live()
        try:
            if ref is not None and name in offline.view(other).snapshot(ref.snapshot).inputs:
                readers.add(other)
        except SnapshotError as exc:
            # then its fallback reads nothing
            log.warning("%s", exc)
    return sorted(readers - {name})


def drop(project: Project, name: str, *, data: bool = False, take_over: bool = False) -> Dropped:
    """End a view: readers find no such view from the first step on, and whatever a crash leaves, doing it again removes.

    Args:
        project: the configuration; the view need not be in it any more.
        name: of the view.
        data: remove its snapshots and reports too, for good.
        take_over: end it though another project publishes it.

    Raises:
        ConfigError: as :func:`look`.
        ConflictError: a run or backfill of it is going on, or it is being published; or another project publishes it.
        OnlineStoreError, SnapshotError: a store failed; what was begun is finished by doing it again.
    """
    dropped, store = look(project, name, data=data), project.offline.view(name)
    folder = store.leases
    if not take_over:
        _check_ours(project, name)
    with spending_reserve(project.root), contextlib.ExitStack() as held:
        if folder.is_dir():
            busy = f"view {name!r} is being published, rolled back or cleaned up; wait for it"
            held.enter_context(take(folder, PUBLISH_LEASE, "drop", ttl_s=project.settings.lease, busy=busy))
            # a run that begins from here on sees this lease, and one that began before is seen now.
            held.enter_context(take(folder, DROP_LEASE, "drop", ttl_s=project.settings.lease, busy=busy))
            _check_idle(folder, name)
        with contextlib.closing(open_online_store(project.online)) as online:
            online.forget(name)
        try:
            with contextlib.suppress(FileNotFoundError):
                shutil.rmtree(store.indexes)
        except OSError as exc:
            raise SnapshotError(f"{store.indexes} cannot be removed: {exc.strerror or exc}; do it once more") from exc
        store.refs.end_live()
        if data:
            store.remove()
    return dropped


def _check_ours(project: Project, name: str) -> None:
    """Raises:
    ConflictError: another project publishes the view; one whose pointer is damaged is nobody's.
    """
    with contextlib.closing(open_online_store(project.online)) as online, contextlib.suppress(DamagedPointerError):
        pointer, ours = online.live(name), known_identity(project.root)
        if pointer is not None and pointer.owner not in ("", ours):
            raise ConflictError(
                f"view {name!r} in the online store is published by another project ({pointer.owner}, this one is {ours or 'new'}): nothing was dropped. "
                f"Drop it there, or give this project an online store or a prefix of its own; where that project is gone, `precompute drop {name} --take-over`"
            )


def _check_idle(folder: Path, name: str) -> None:
    """Raises:
    ConflictError: a run, whose end would publish the view again, goes on.
    """
    for path in sorted(folder.glob("lease-*.json")):
        lease = path.stem.removeprefix("lease-")
        if lease not in (PUBLISH_LEASE, DROP_LEASE) and is_held(folder, lease):
            by = holder(folder, lease)
            raise ConflictError(
                f"view {name!r} is being computed (lease {lease!r}, process {by.pid if by else '?'}): wait for it, or end it with SIGTERM"
            )
