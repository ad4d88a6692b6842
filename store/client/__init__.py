"""Client: the HTTP API from Python, blocking and async, over TCP, TLS or a Unix socket. It brings
no torch, FAISS or DuckDB, and Arrow only where it is requested."""

from typing import TYPE_CHECKING, Any

from precompute.store.client.attempts import Tls
from precompute.store.client.calls import LookupWords, RowWords, SearchWords, ServiceWords
from precompute.store.client.client import Client
from precompute.store.wire.bodies import ViewLookupRequest

if TYPE_CHECKING:
    from precompute.store.client.client import AsyncClient

__all__ = [
    "AsyncClient",
    "Client",
    "LookupWords",
    "RowWords",
    "SearchWords",
    "ServiceWords",
    "Tls",
    "ViewLookupRequest",
]


def __getattr__(name: str) -> Any:
    """The async client, imported on first use: asyncio takes a third of the time that importing all
    the rest does."""
    if name == "AsyncClient":
        from precompute.store.client.client import AsyncClient

        return AsyncClient
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
