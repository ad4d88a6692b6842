"""Hooks: what powers derive from a view's snapshots, in a folder of their own beside them, hears
when one was committed, another one went live, or some are about to go."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable
from typing import Protocol

from precompute.store.disk.storage import FileCheck
from precompute.store.doors import FOLLOWERS, SNAPSHOTS
from precompute.store.offline.view_store import ViewStore

log = logging.getLogger(__name__)


class SnapshotHook(Protocol):
    """What a power derives in the folder ``<view>/<name of its door>``. The manifests stay the
    truth: what is derived may be behind, and is made again. So nothing is raised."""

    def committed(self, store: ViewStore, wanted: bool) -> list[str]:
        """A snapshot was committed, which stands whatever becomes of this.

        Args:
            store: of the view.
            wanted: whether the configuration asks for it; where not, what is there goes.

        Returns:
            sentences for the run's report, of what an operator should look at.
        """
        ...

    def published(self, store: ViewStore) -> None:
        """What is live is another snapshot, or files that :meth:`checks` names were removed, since
        they were damaged: what is not there is made again."""
        ...

    def checks(self, store: ViewStore) -> Iterable[FileCheck]:
        """The checks of the files in the folder, for the account; each says what is wrong, and that
        ``reconcile`` heals it."""
        ...

    def going(self, store: ViewStore, numbers: Collection[int]) -> None:
        """Snapshots of these numbers are about to be removed."""
        ...


def committed(store: ViewStore, wanted: Callable[[str], bool]) -> list[str]:
    """As of :class:`SnapshotHook`, of all that are here; ``wanted`` of each by its name."""
    return _each(lambda name, hook: hook.committed(store, wanted(name)))


def published(store: ViewStore) -> None:
    """As of :class:`SnapshotHook`, of all that are here; what is wrong is logged."""
    for sentence in _each(lambda _, hook: hook.published(store)):
        log.warning("view %r: %s", store.name, sentence)


def going(store: ViewStore, numbers: Collection[int]) -> None:
    """As of :class:`SnapshotHook`, of all that are here; what is wrong is logged."""
    for sentence in _each(lambda _, hook: hook.going(store, numbers)):
        log.warning("view %r: %s", store.name, sentence)


def checks(store: ViewStore) -> tuple[list[FileCheck], list[str]]:
    """As of :class:`SnapshotHook`, of all that are here; and sentences for what is not looked
    at."""
    found = list[FileCheck]()
    said = _each(lambda _, hook: found.extend(hook.checks(store)))
    return found, [*said, *left(store)]


def _each(call: Callable[[str, SnapshotHook], list[str] | None]) -> list[str]:
    """What every hook that is here says; one that fails says that: it may be somebody else's code,
    and what it hears of is done."""
    said = list[str]()
    for name in (*SNAPSHOTS.known(), *SNAPSHOTS.foreign()):
        if SNAPSHOTS.is_here(name):
            try:
                said += call(name, SNAPSHOTS.open(name)()) or []
            except Exception as exc:
                said.append(f"snapshots {name!r} failed: {type(exc).__name__}: {exc}")
    return said


def left(store: ViewStore) -> list[str]:
    """A sentence for what each power that is not here left in the view's folder: nobody keeps it up
    to date."""
    return [
        door.absence(name, f"remove what it left, {store.storage.shown(store.folder / name)}")
        for door in (SNAPSHOTS, FOLLOWERS)
        for name in door.known()
        if not door.is_here(name) and store.storage.names(store.folder / name)
    ]
