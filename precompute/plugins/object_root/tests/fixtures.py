"""Fixtures: a root in an object store."""

from __future__ import annotations

import pytest

from tests.object_store import ObjectStore


@pytest.fixture
def object_root_url(bucket: ObjectStore) -> str:
    """The URL of one with nothing in it."""
    return bucket.root
