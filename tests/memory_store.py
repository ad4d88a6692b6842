"""Memory store: in dictionaries, for tests that need a store and none in particular."""

from precompute.store.online.memory_store import MemoryStore

__all__ = ["MemoryStore"]
