"""Live views: what is live of each view, as last seen: what operators are shown does not depend on
a store that answers."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from precompute.store.account.account import REFS, Account, Followed, read_account, read_followed
from precompute.store.answers.lookup import Lookup
from precompute.store.errors import DamagedPointerError, OnlineStoreError, RowsLostError
from precompute.store.online.online_store import Pointer, check_own_rows
from precompute.store.times import duration

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Seen:
    """``pointers`` of the views that have one, the last known of those in ``unreadable``, which or
    whose rows cannot be read; ``store_answers`` is False where the store does not."""

    pointers: tuple[Pointer, ...]
    unreadable: frozenset[str]
    store_answers: bool
    accounts: Mapping[str, Account] = field(default_factory=dict)
    """View → its account, as it was last read; of a lookup that has a root."""
    followed: Mapping[str, Followed] = field(default_factory=dict)
    """View → when it last served what its root says; of views that follow a root in an object
    store."""

    def trouble(self, pointer: Pointer) -> str | None:
        """What of a view is not whole, in words that are safe to publish; None where all is."""
        account = self.accounts.get(pointer.view.name)
        name = pointer.view.name
        if pointer.degraded:
            return f"the online store lost rows of {name}; they are being loaded again"
        if account is None or not account.findings:
            return None
        return (
            f"not whole of {name}: {', '.join(account.kinds)}; `precompute status` says what"
            " mends it"
        )

    def behind(self, pointer: Pointer) -> str | None:
        """How long a view has not served what the root says, in words that are safe to publish;
        None where it does."""
        followed = self.followed.get(pointer.view.name)
        behind_s = None if followed is None else followed.behind_s(time.time_ns() // 1000)
        if followed is None or behind_s is None:
            return None
        why = "the server's log says why" if followed.why else "what was published is on its way"
        return f"{pointer.view.name} is behind the root for {duration(behind_s)}; {why}"


class LiveViews:
    """The views of a lookup's store, and what was last known of them."""

    def __init__(self, lookup: Lookup) -> None:
        self._lookup = lookup
        self._known: dict[str, Pointer] = {}
        self._reported: dict[str, str] = {}

    def read(self) -> Seen:
        """What is live now, and whether the generations that pointers name are what was loaded, by
        what these say of themselves: no row is read. A store behind a network that does not answer
        is queried once: all views are as they were last seen then."""
        online, unreadable = self._lookup.online, set[str]()
        # a copy: threads that look at the same time each put theirs in its place
        known, answers = dict(self._known), True
        try:
            names = online.views()
            unreadable.update(self._lookup.lost(names))
            known = {
                name: pointer
                for name, pointer in known.items()
                if name in names or name in unreadable
            }
        except OnlineStoreError:
            names, answers = list(known), False
        for name in names:
            try:
                pointer = online.live(name) if answers else known.get(name)
                if pointer is None:
                    known.pop(name, None)
                    continue
                known[name] = pointer
                if answers:
                    self._check(pointer)
                    self._reported.pop(name, None)
            except OnlineStoreError as exc:
                answers = not online.blocking or isinstance(
                    exc, (DamagedPointerError, RowsLostError)
                )
                unreadable.add(name)
                if answers and self._reported.get(name) != str(exc):
                    # once, however often it is looked
                    self._reported[name] = str(exc)
                    log.error("view %r: what is live cannot be read: %s", name, exc)
        if not answers:
            unreadable.update(names)
        self._known = known
        root = self._lookup.root
        refs = {} if root is None else {name: root / name / REFS for name in known}
        accounts = {name: read_account(folder, name) for name, folder in refs.items()}
        followed = {name: read_followed(folder) for name, folder in refs.items()}
        return Seen(
            tuple(known[name] for name in sorted(known)),
            frozenset(unreadable),
            answers,
            accounts,
            {name: one for name, one in followed.items() if one is not None},
        )

    def _check(self, pointer: Pointer) -> None:
        """Raises:
        OnlineStoreError: what the pointer names is not what was loaded; or the store does not
            answer.
        """
        online, name = self._lookup.online, pointer.view.name
        try:
            check_own_rows(pointer, online.loaded(name, pointer.generations))
        except RowsLostError:
            # of one that has moved on meanwhile they may be gone
            if online.live(name) == pointer:
                raise
