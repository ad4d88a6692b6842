"""Testing: a stand-in of a lookup service for a service's own tests: see :class:`StandIn`, and
docs/python.md.

As a plugin of pytest, ``pytest_plugins = ["precompute.testing"]`` in a ``conftest.py`` brings the
fixture ``stand_in``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from precompute.store.doors import NAMES

if TYPE_CHECKING:
    from precompute.plugins.stand_in.stand_in import Request, StandIn
else:
    StandIn = NAMES.open("precompute.testing.StandIn")
    Request = NAMES.open("precompute.testing.Request")

__all__ = ["Request", "StandIn", "stand_in"]


@pytest.fixture
def stand_in() -> Iterator[StandIn]:
    """A stand-in without views, for one test."""
    with StandIn() as stand_in:
        yield stand_in
