"""Followers: hosts that serve what another one publishes, where the root is not local: powers have
them hear of it and fetch it. Beside a root in a folder there are none."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from precompute.store.disk.storage import storage_of
from precompute.store.doors import FOLLOWERS
from precompute.store.offline.view_store import OfflineStore, ViewStore
from precompute.store.online.online_store import OnlineStore, Pointer


class Follower(Protocol):
    """Follows a root for several views, until it is stopped."""

    @property
    def restore_files(self) -> Callable[[str], None] | None:
        """Restores what a view serves here from the root, where it differs; None where nothing is
        followed."""

    def stop(self) -> None:
        """End it."""


class Followers(Protocol):
    """One view's, as its publisher tells them of what is live, and as one of them follows."""

    def __init__(self, store: ViewStore, online: OnlineStore) -> None:
        """``store`` is the view's, and ``online`` where it is served from on this host."""

    @staticmethod
    def follower(
        offline: OfflineStore, online: Callable[[], OnlineStore], names: Sequence[str]
    ) -> Follower:
        """Follow a root for the views of these names from now on; ``online`` opens the online store
        here."""
        ...

    def publish(self, pointer: Pointer, loaded: Collection[str] = ()) -> None:
        """Have all hosts serve what a pointer says; files that they have of the segments of the
        names in ``loaded`` may be others by now, under the same names.

        Raises:
            SnapshotError: they cannot hear of it.
        """

    def is_behind(self, epoch: int) -> bool:
        """Whether they hear of an older publishing, or of none."""
        ...

    def follow(self, *, again: bool = False) -> bool:
        """Serve what the root says; whether something new was flipped.

        Args:
            again: compare every file that is served with its checksum, and restore what differs.

        Raises:
            SnapshotError: the root cannot be read, or a file of it is damaged or just gone.
            OnlineStoreError: nothing can be written here.
            ConflictError: another project's rows are served here.
        """
        ...

    def drop_all_but(self, keep: set[str]) -> None:
        """Remove what was kept for other segments than these, but for later ones, of larger
        numbers: they are of a publishing by the lease's next holder."""

    def end(self) -> None:
        """Have no host serve the view any more."""


def followers(store: ViewStore, online: OnlineStore) -> list[Followers]:
    """Of a view, those of each power that is here."""
    return [] if store.storage.local else [kind(store, online) for _, kind in FOLLOWERS.all()]


def follow(
    offline: OfflineStore, online: Callable[[], OnlineStore], names: Sequence[str]
) -> list[Follower]:
    """As of :meth:`Followers.follower`, of each power that is here."""
    if storage_of(offline.root).local:
        return []
    return [kind.follower(offline, online, names) for _, kind in FOLLOWERS.all()]
