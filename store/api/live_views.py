"""Live views: what is live of each view, as far as it is known: what operators are shown must not depend on a store that answers."""

from __future__ import annotations

from dataclasses import dataclass

from store.errors import DamagedPointerError, OnlineStoreError
from store.lookup import Lookup
from store.online.online_store import Pointer


@dataclass(frozen=True)
class Seen:
    """``pointers`` of the views that have one, the last known of those in ``unreadable``; ``store_answers`` is False where the store does not."""

    pointers: tuple[Pointer, ...]
    unreadable: frozenset[str]
    store_answers: bool


class LiveViews:
    """The views of a lookup's store, and what was last known of them."""

    def __init__(self, lookup: Lookup) -> None:
        self._lookup = lookup
        self._known: dict[str, Pointer] = {}

    def look(self) -> Seen:
        """What is live now. A store behind a network that does not answer is asked once: all views are as they were last seen then."""
        online, unreadable = self._lookup.online, set[str]()
        # a copy: threads that look at the same time each put theirs in its place
        known, answers = dict(self._known), True
        try:
            names = online.views()
            known = {name: pointer for name, pointer in known.items() if name in names}
        except OnlineStoreError:
            names, answers = list(known), False
        for name in names:
            try:
                pointer = online.live(name) if answers else known.get(name)
            except OnlineStoreError as exc:
                answers = not online.blocking or isinstance(exc, DamagedPointerError)
                unreadable.add(name)
                continue
            if pointer is None:
                known.pop(name, None)
            else:
                known[name] = pointer
        if not answers:
            unreadable.update(names)
        self._known = known
        return Seen(tuple(known[name] for name in sorted(known)), frozenset(unreadable), answers)
