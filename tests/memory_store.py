"""Memory store: the one of the stand-in, for tests that need a store and none in particular."""

from precompute.store.stand_in.memory_store import MemoryStore

__all__ = ["MemoryStore"]
