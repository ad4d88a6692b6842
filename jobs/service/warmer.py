"""Warmer: keeps the models and the indexes of what is live open, so that no miss and no search pays for loading."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Protocol

from precompute.store.api.live_views import LiveViews
from precompute.store.clock import parsed_time
from precompute.store.errors import PrecomputeError
from precompute.store.lookup import Lookup
from precompute.store.offline.view_store import OfflineStore
from precompute.store.online.online_store import Pointer
from precompute.store.record import replace

log = logging.getLogger(__name__)

WARM_EVERY_S = 5.0
"""How often new publishings are looked for."""

AGAIN_S = 30.0
"""Before what could not be opened is tried once more: loading takes seconds, and weights that are not there yet may come."""

OPEN_S = 600.0
"""How long opening may take: see :data:`precompute.jobs.service.fallback.LOAD_S`."""


COMING_S = 1800.0
"""How long what was computed and not published may be published yet; what a gate refused lies there for ever."""


class Models(Protocol):
    """The models behind the misses, as :class:`precompute.jobs.service.remote_fallback.RemoteFallback` has them."""

    def begin_warm(self, pointer: Pointer, deadline: float) -> Future[Any]:
        """Have what a pointer names opened."""

    def ready(self, pointer: Pointer) -> bool:
        """Whether it is open."""


@dataclass(slots=True)
class _Seen:
    """A view's publishing, and what is open of it; the times are when to try again, monotonic, infinity once it need not be."""

    publishing: tuple[int, str]
    index_at: float = 0.0
    model_at: float = 0.0
    opening: Future[Any] | None = None


class Warmer:
    """Looks in a thread of its own. ``warming`` is true until all that was live at first is open, or could not be opened.

    Args:
        lookup: whose indexes are opened.
        models: behind its misses.
        want: told again and again which models are live, or about to be.
        offline: where what is computed is seen before it is live: another model is loaded by then.
    """

    def __init__(
        self,
        lookup: Lookup,
        models: Models,
        want: Callable[[set[str]], None] = lambda models: None,
        offline: OfflineStore | None = None,
    ) -> None:
        self._lookup, self._models, self._want, self._offline = lookup, models, want, offline
        self._views = LiveViews(lookup)
        self._ahead: dict[str, _Seen] = {}
        self._seen: dict[str, _Seen] = {}
        self._stop, self._look = False, threading.Event()
        self.warming = True
        self._thread = threading.Thread(target=self._loop, name="warmer", daemon=True)
        self._thread.start()

    def look(self) -> None:
        """Look now: what was open may be so no more."""
        self._look.set()

    def stop(self) -> None:
        """End after the round in progress."""
        self._stop = True
        self._look.set()
        self._thread.join(timeout=30)

    def _loop(self) -> None:
        with contextlib.suppress(PrecomputeError):
            # one that is not there is told by those who look
            self._lookup.online.warm()
        while not self._stop:
            self._look.clear()
            try:
                self._round()
            except Exception:
                # an index that is there no more, no file left to be opened: it is tried again, for all views depend on this thread
                log.exception("looking for new snapshots failed")
            self.warming = self.warming and any(s.opening is not None and not s.opening.done() for s in self._seen.values())
            self._look.wait(WARM_EVERY_S)

    def _round(self) -> None:
        seen = self._views.look()
        if seen.unreadable or not seen.store_answers:
            log.warning(
                "what is live of %s cannot be read: it is taken to be what it was",
                ", ".join(sorted(seen.unreadable)) or "any view",
            )
        # those of the others, and of all where the store does not answer, too: their models must not be ended meanwhile
        pointers = seen.pointers
        behind = [pointer for pointer in pointers if pointer.view.fallback]
        ahead = [coming for pointer in behind if (coming := self._coming(pointer)) is not None]
        self._want({pointer.model for pointer in (*behind, *ahead)})
        # all models first: each is loaded by a process of its own, while the indexes are opened here
        for pointer in pointers:
            name = pointer.view.name
            if name not in self._seen or self._seen[name].publishing != pointer.publishing:
                self._seen[name] = _Seen(pointer.publishing)
                log.info("view %r: snapshot %d is live, %d rows", name, pointer.snapshot, pointer.rows)
            if pointer.view.fallback:
                self._open_model(pointer, self._seen[name])
        for pointer in ahead:
            name = pointer.view.name
            if name not in self._ahead or self._ahead[name].publishing != pointer.publishing:
                self._ahead[name] = _Seen(pointer.publishing)
                log.info("view %r: snapshot %d, by another model, is about to be live", name, pointer.snapshot)
            self._open_model(pointer, self._ahead[name])
        for pointer in pointers:
            if not self._stop:
                self._open_index(pointer, self._seen[pointer.view.name])

    def _coming(self, live: Pointer) -> Pointer | None:
        """What was computed since by another model and may be published soon, as its pointer might be; None where nothing was."""
        if self._offline is None:
            return None
        store = self._offline.view(live.view.name)
        try:
            newest = max(store.numbers(), default=0)
            if newest <= live.snapshot:
                return None
            snapshot = store.snapshot(newest)
        except PrecomputeError as exc:
            log.warning("cannot look for new snapshots: %s", exc)
            return None
        created = parsed_time(snapshot.created_at)
        over = created is None or (datetime.now(UTC) - created).total_seconds() > COMING_S
        if over or snapshot.model == live.model or not snapshot.view.fallback:
            return None
        return replace(
            live,
            view=snapshot.view,
            snapshot=newest,
            base_snapshot=newest,
            epoch=live.epoch + 1,
            model=snapshot.model,
            at=snapshot.created_at,
            input_columns=dict(snapshot.input_columns),
            inputs=dict(snapshot.inputs),
            partition=snapshot.partition,
        )

    def _open_model(self, pointer: Pointer, seen: _Seen) -> None:
        now = time.monotonic()
        if self._models.ready(pointer):
            # once it is lost it is opened again at once
            seen.model_at = 0.0
        elif now >= seen.model_at and (seen.opening is None or seen.opening.done()):
            seen.model_at = now + AGAIN_S
            seen.opening = self._models.begin_warm(pointer, now + OPEN_S)
            seen.opening.add_done_callback(lambda _: self._look.set())

    def _open_index(self, pointer: Pointer, seen: _Seen) -> None:
        if time.monotonic() < seen.index_at:
            return
        try:
            self._lookup.warm(pointer)
            seen.index_at = math.inf
        except PrecomputeError as exc:
            log.error("view %r is not searchable: %s", pointer.view.name, exc)
            seen.index_at = time.monotonic() + AGAIN_S
