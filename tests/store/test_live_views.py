"""Live views: what operators are shown when the store stops to answer while it is asked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from store.api.app import create_app
from store.errors import OnlineStoreError
from store.lookup import Lookup
from store.online.online_store import MemoryStore, Pointer
from tests.asgi import call


class Remote(MemoryStore):
    """A store behind a network that tells its views' names, and then is gone."""

    blocking = True

    def views(self) -> list[str]:
        return ["a", "b", "c"]

    def live(self, view: str) -> Pointer | None:
        raise OnlineStoreError(f"db.internal:6379 does not answer ({view})")


@pytest.mark.parametrize(("path", "status"), [("/readyz", 503), ("/metrics", 200), ("/", 200), ("/v1/views", 503)])
def test_a_store_that_goes_away_between_two_views_is_told_of(path: str, status: int) -> None:
    assert call(create_app(Lookup(Remote())), "GET", path).status == status


def test_an_error_that_every_request_meets_is_told_once_on_a_line_of_its_own(caplog: pytest.LogCaptureFixture) -> None:
    class Gone(MemoryStore):
        def read(self, view: str, keys: Any) -> Any:
            raise OnlineStoreError("db.internal:6379 does not answer, as it was asked")

    app: Callable[..., Any] = create_app(Lookup(Gone()))
    for i in range(300):
        # the name of a view is the caller's
        call(app, "GET", f"/v1/views/a{i}%0A2026-01-01 CRITICAL store: all is lost{'x' * 1000}/rows/1").check_problem(503)
    (record,) = caplog.records
    assert len(record.getMessage()) < 250
