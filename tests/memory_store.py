"""Memory store: the one of the stand-in, for tests that need a store and none in particular."""

from precompute.store.http.stand_in.memory import MemoryStore

__all__ = ["MemoryStore"]
