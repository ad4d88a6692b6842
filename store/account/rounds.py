"""Rounds: in a server a thread has the checker look at what is live every minute, and sooner where
readers met damage."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence

from precompute.store.account.account import has_sightings, read_account
from precompute.store.account.checker import LOOK_S, check_live, share_of
from precompute.store.disk.lease import is_held
from precompute.store.errors import PrecomputeError
from precompute.store.offline.refs import PUBLISH_LEASE
from precompute.store.offline.view_store import OfflineStore, ViewStore
from precompute.store.online.online_store import OnlineStore

log = logging.getLogger(__name__)

EVERY_S = 60.0
"""Seconds between two looks at a view, whichever process looks."""
SOON_S = 5.0
"""Seconds after a look before sightings are looked at: readers may meet what cannot be healed every
second, and a look takes up to a third of one."""
POLL_S = 1.0
"""How often sightings are looked for."""
NICE = 10


def is_due(store: ViewStore, every_s: float = EVERY_S, *, here: bool = False) -> bool:
    """Whether a view is to be looked at: none did for so long, or for a while and readers met
    damage since. During a publishing no process looks, but for those that look only ``here``."""
    refs = store.refs.folder
    since_s = time.time() - read_account(refs, store.name).at_us / 1e6
    if since_s < min(every_s, SOON_S) or (since_s < every_s and not has_sightings(refs)):
        return False
    return here or not is_held(store.leases, PUBLISH_LEASE)


class Rounds:
    """The thread of a server that has the checker look at its views; begins at once.

    Args:
        offline: the root; a view whose refs cannot be written is not looked at.
        open_online: opens the online store, each time it is looked.
        names: of the views.
        every_s: between two looks.
        mend: on a host that follows a root, fetches again what of a view differs from there; the
            root is not read otherwise.
    """

    def __init__(
        self,
        offline: OfflineStore,
        open_online: Callable[[], OnlineStore],
        names: Sequence[str],
        every_s: float = EVERY_S,
        mend: Callable[[str], None] | None = None,
    ) -> None:
        self._stores = [offline.view(name) for name in names]
        self._open, self._every_s, self._mend = open_online, every_s, mend
        self._stopping, self._reported = threading.Event(), dict[str, list[str]]()
        self._thread = threading.Thread(target=self._run, name="rounds", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End, after the look in progress."""
        self._stopping.set()
        self._thread.join(timeout=30)

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
        while not self._stopping.wait(POLL_S):
            try:
                due = [store for store in self._stores if self._is_due(store)]
                if due:
                    self._look(due)
            except Exception:
                # what is looked at next time may be well again
                log.exception("looking at what is live failed")

    def _is_due(self, store: ViewStore) -> bool:
        return os.access(store.refs.folder, os.W_OK) and is_due(
            store, self._every_s, here=self._mend is not None
        )

    def _look(self, due: Sequence[ViewStore]) -> None:
        with contextlib.closing(self._open()) as online:
            for store in due:
                found = self._found(store, online)
                if found and self._mend is not None:
                    try:
                        self._mend(store.name)
                        found = self._found(store, online)
                    except PrecomputeError as exc:
                        log.error("view %r: nothing is mended: %s", store.name, exc)
                self._reported[store.name] = found
                if self._stopping.is_set():
                    return

    def _found(self, store: ViewStore, online: OnlineStore) -> list[str]:
        """Sentences about what is not whole; those that are new are logged."""
        share, budget_s = share_of(self._every_s), LOOK_S / len(self._stores)
        try:
            found = check_live(
                store, online, share=share, budget_s=budget_s, here=self._mend is not None
            ).trouble
        except PrecomputeError as exc:
            found = [f"whether what is live of view {store.name!r} is whole is not known: {exc}"]
        for sentence in found:
            if sentence not in self._reported.get(store.name, []):
                log.error("%s", sentence)
        return found
