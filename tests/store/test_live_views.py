"""Live views: what operators are shown when the store stops to answer while it is asked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from precompute.store.answers.lookup import Lookup
from precompute.store.errors import OnlineStoreError
from precompute.store.http.app import create_app
from precompute.store.online.online_store import Pointer, Segment
from tests.asgi import call, samples
from tests.memory_store import MemoryStore
from tests.online import TABLE, back_to, named, over, pointer, publish, rows_of, segment
from tests.server import OPERATORS


class Remote(MemoryStore):
    """A store behind a network that tells its views' names, and then is gone."""

    blocking = True

    def views(self) -> list[str]:
        return ["a", "b", "c"]

    def live(self, view: str) -> Pointer | None:
        raise OnlineStoreError(f"db.internal:6379 does not answer ({view})")


@pytest.mark.parametrize(
    ("path", "status"),
    [("/readyz", 503), ("/v1/views", 503), *((path, 200) for path in OPERATORS)],
)
def test_a_store_that_goes_away_between_two_views_is_reported(path: str, status: int) -> None:
    app = create_app(Lookup(Remote()))
    reply = call(app, "GET", path)
    assert reply.status == status
    if path == "/metrics":
        up = {
            labels: value
            for (name, labels), value in samples(reply.body).items()
            if name == "precompute_view_up"
        }
        assert up == {(("view", view),): 0.0 for view in ("a", "b", "c")}


def test_an_error_of_every_request_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    class Gone(MemoryStore):
        def read(self, view: str, keys: Any) -> Any:
            raise OnlineStoreError("db.internal:6379 does not answer, as it was asked")

    app: Callable[..., Any] = create_app(Lookup(Gone()))
    for i in range(300):
        # the name of a view is the caller's
        call(
            app,
            "GET",
            f"/v1/views/a{i}%0A2026-01-01 CRITICAL store: all is lost{'x' * 1000}/rows/1",
        ).check_problem(503)
    (record,) = caplog.records
    assert len(record.getMessage()) < 250


LIVE = over(1, 2)
UNLIKE: dict[str, tuple[int, str]] = {
    "the lowest is gone": (
        1,
        f"segment {named(1)} of view 'numbers' is not in the online store",
    ),
    "the upper is gone": (
        2,
        f"segment {named(2)} of view 'numbers' is not in the online store",
    ),
}


@pytest.mark.parametrize(("lost", "why"), UNLIKE.values(), ids=UNLIKE.keys())
def test_a_pointer_to_a_segment_that_is_gone_is_reported_everywhere(
    lost: int, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    store = MemoryStore()
    app = create_app(Lookup(store))
    publish(store, 1, TABLE)
    store.load("numbers", segment(2, upper=True), rows_of(TABLE))

    def told() -> tuple[str, str | None, bool]:
        ready = call(app, "GET", "/readyz")
        assert (ready.status, ready.json["views"]) == (
            200,
            {"numbers": store.live("numbers").snapshot},  # type: ignore[union-attr]
        )
        readable = b'precompute_view_up{view="numbers"} 1.0' in call(app, "GET", "/metrics").body
        return ready.json["status"], ready.json.get("why"), readable

    for _ in range(2):
        store.flip(LIVE)
        assert told() == ("ready", None, True)
        held = store._segments["numbers"].pop(named(lost))
        unreadable = "what is live of numbers cannot be read; the server's log says why"
        assert [told() for _ in range(3)] == [("degraded", unreadable, False)] * 3
        store._segments["numbers"][named(lost)] = held
    messages = [record.getMessage() for record in caplog.records]
    assert [
        message.startswith(f"view 'numbers': what is live cannot be read: {why}")
        for message in messages
    ] == [True] * 2


def test_a_segment_that_goes_while_its_pointer_moves_on_is_no_trouble() -> None:
    class Moving(MemoryStore):
        def loaded(self, view: str, numbers: Any) -> list[Segment]:
            self.flip(back_to(3, 3))
            self.drop(view, named(2))
            return super().loaded(view, numbers)

    store = Moving()
    for number in (2, 3):
        publish(store, number, TABLE)
    store._pointers["numbers"] = pointer(2)
    assert call(create_app(Lookup(store)), "GET", "/readyz").json["status"] == "ready"
