"""Client: the HTTP API from Python, blocking and async, over TCP, TLS or a Unix socket. It brings
no torch, FAISS or DuckDB, and Arrow only where it is requested."""

from precompute.store.client.attempts import Tls
from precompute.store.client.client import AsyncClient, Client
from precompute.store.wire.bodies import ViewLookupRequest
from precompute.store.wire.lookup_options import LookupWords, RowWords, SearchWords, ServiceWords

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
