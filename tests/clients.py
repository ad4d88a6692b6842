"""Clients: the blocking and the async one behind one interface, so that one test calls either."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Coroutine, Iterator
from typing import Any, cast

from precompute.store.client import AsyncClient, Client
from precompute.store.wire.bodies import ViewRow


class Awaited:
    """An async client in a loop of its own thread, each call waited for; any thread may call it,
    as a blocking one."""

    def __init__(self, url: str, **arguments: Any) -> None:
        self.client = AsyncClient(url, **arguments)
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.client, name)
        return lambda *args, **words: self._done(method(*args, **words))

    def close(self) -> None:
        self._done(self.client.aclose())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()

    def _done(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result()


@contextlib.contextmanager
def opened(kind: str, url: str, **arguments: Any) -> Iterator[Client]:
    """A client of a kind, ``blocking`` or ``async``."""
    with contextlib.closing(
        Client(url, **arguments) if kind == "blocking" else cast(Client, Awaited(url, **arguments))
    ) as client:
        yield client


def features_of(row: ViewRow) -> dict[str, Any]:
    """Its features, which it has."""
    assert row.features is not None
    return row.features
