"""Pools: searches that wait for a model hold up no row of a store that is waited for, too; what is
beyond the room for them is refused at once; what is traced stays so. Requests that wait for a model
leave connections to others, and who hangs up leaves his place at once."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from precompute.store.answers.fallback import Computed, Miss
from precompute.store.answers.lookup import Lookup
from precompute.store.errors import RequestError
from precompute.store.http.app import create_app
from precompute.store.http.messages import client_of
from precompute.store.http.pools import Pool
from precompute.store.http.telemetry.instruments import TRACE
from precompute.store.online.online_store import Pointer
from precompute.store.times import Reason
from tests.asgi import exchange, scope_of
from tests.memory_store import MemoryStore
from tests.server import Reply
from tests.store.test_lookup import House, Row, Scripted
from tests.world import ROW, SEARCH, World

AT_ONCE, IN_HAND = 8, 264
"""Searches that wait for a model, and those that may be in hand with those behind them."""


class Hanging:
    """A model that answers nothing until it is told to."""

    def __init__(self) -> None:
        self.asked: list[Future[Computed]] = []
        self.over = False

    def submit(
        self,
        pointer: Pointer,
        keys: Sequence[str],
        inputs: Any,
        deadline: float,
        *,
        query: bool = False,
    ) -> list[Future[Computed]]:
        future: Future[Computed] = Future()
        self.asked.append(future)
        if self.over:
            future.set_exception(Miss(Reason.SHED))
        return [future]

    def give_up(self) -> None:
        self.over = True
        for future in self.asked:
            if not future.done():
                future.set_exception(Miss(Reason.SHED))


def test_searches_that_wait_for_a_model_hold_up_no_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, model = World(tmp_path, {"new": 1.0}), Hanging()
    monkeypatch.setattr(type(world.lookup.online), "blocking", True)
    app = create_app(
        Lookup(
            world.lookup.online,
            tmp_path,
            model,
            clock=lambda: world.now_s,
            monotonic=lambda: world.now_s,
        )
    )

    async def ask(method: str, path: str, body: Any = None) -> Reply:
        return await exchange(app, *scope_of(method, path, body))

    async def scene() -> tuple[Reply, int, list[Reply], list[Reply]]:
        text = {"inputs": {"x": 1.0}, "deadline_ms": 60_000}
        searches = [asyncio.create_task(ask("POST", SEARCH, text)) for _ in range(IN_HAND + 20)]
        while len(model.asked) < AT_ONCE:
            await asyncio.sleep(0.01)
        row = await ask("GET", ROW + "new")
        waiting, refused = (
            len(model.asked),
            [search.result() for search in searches if search.done()],
        )
        model.give_up()
        return row, waiting, refused, await asyncio.gather(*searches)

    row, waiting, refused, answered = asyncio.run(asyncio.wait_for(scene(), 60))
    assert (row.status, row.json["status"], waiting) == (200, "fresh", AT_ONCE)
    assert len(refused) == 20
    for reply in refused:
        reply.check_problem(503, "busy")
    assert Counter(reply.json["type"].rpartition(":")[2] for reply in answered) == {
        "shed": IN_HAND,
        "busy": 20,
    }


def test_searches_whose_callers_hang_up_leave_their_places(tmp_path: Path) -> None:
    world, model = World(tmp_path, {"new": 1.0}), Hanging()
    app = create_app(
        Lookup(
            world.lookup.online,
            tmp_path,
            model,
            clock=lambda: world.now_s,
            monotonic=lambda: world.now_s,
        )
    )
    text = scope_of("POST", SEARCH, {"inputs": {"x": 1.0}, "deadline_ms": 60_000})

    async def scene() -> tuple[list[Reply], Reply]:
        hangs_up = asyncio.Event()
        searches = [asyncio.create_task(exchange(app, *text, hangs_up)) for _ in range(IN_HAND)]
        while len(model.asked) < AT_ONCE:
            await asyncio.sleep(0.01)
        assert app.waits_until() > time.monotonic() + 30
        hangs_up.set()
        gone = await asyncio.gather(*searches)
        stays = asyncio.create_task(exchange(app, *text))
        while len(model.asked) == AT_ONCE:
            await asyncio.sleep(0.01)
        model.give_up()
        return gone, await stays

    gone, stays = asyncio.run(asyncio.wait_for(scene(), 60))
    assert {reply.status for reply in gone} == {0}
    # those that waited for a thread have asked for nothing
    assert [future.cancelled() for future in model.asked] == [True] * AT_ONCE + [False]
    stays.check_problem(503, "shed")


def test_a_call_has_what_its_caller_is_traced_by_and_leaves_its_place(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scene() -> list[str | None]:
        pool, told = Pool("read", 1, 0), []
        for trace in ("00-1", None, "00-2"):
            TRACE.set(trace)
            told.append(await pool.run(TRACE.get))
            # its place is free in the loop's next round
            await asyncio.sleep(0)
        held = asyncio.create_task(pool.run(lambda: None))
        await asyncio.sleep(0)
        with pytest.raises(RequestError, match="1 read calls are in hand already"):
            await pool.run(lambda: None)
        await held
        return told

    async def without_room() -> str:
        pool, ran, usual = Pool("read", 1, 0), list[str](), threading.stack_size(2**46)
        try:
            for _ in range(2):
                with pytest.raises(RequestError, match="no thread can be started now"):
                    await pool.run(ran.append, "refused")
        finally:
            threading.stack_size(usual)
        return await pool.run(str, 1) + "".join(ran)

    assert asyncio.run(scene()) == ["00-1", None, "00-2"]
    # nor does a call hold one for which the system had no thread, or run later; the operator reads
    # of it once
    assert asyncio.run(without_room()) == "1"
    assert caplog.messages == ["read: can't start new thread"]


# ---- requests that wait for a model


def test_beyond_those_that_may_wait_misses_are_shed_and_hits_answered(tmp_path: Path) -> None:
    house = House(MemoryStore(), tmp_path, changes={"fallback": True})
    house.publish({"hit": Row(1.0)})
    never = dict.fromkeys(("slow", "other"))
    app = create_app(house.lookup(Scripted({**never, "quick": Row(2.0)})), waiting=1)

    async def ask(method: str, path: str, body: Any = None) -> Reply:
        return await exchange(app, *scope_of(method, path, body))

    async def asked() -> tuple[Reply, Reply, Reply, Reply, Reply]:
        first = asyncio.create_task(ask("GET", ROW + "slow?deadline_ms=500"))
        await asyncio.sleep(0.05)
        beyond = await ask("GET", ROW + "other?deadline_ms=60000")
        batch = await ask(
            "POST",
            "/v1/views/things/lookup",
            {"keys": ["hit", "other", "quick"], "deadline_ms": 60_000},
        )
        hit = await ask("GET", ROW + "hit")
        assert not first.done()
        return beyond, batch, hit, await first, await ask("GET", ROW + "other?deadline_ms=10")

    beyond, batch, hit, first, after = asyncio.run(asked())
    beyond.check_problem(503, "shed")
    assert int(beyond.headers["retry-after"]) >= 1
    # what was done already is given all the same
    assert [row.get("reason", row["status"]) for row in batch.json["rows"]] == [
        "fresh",
        "shed",
        "computed",
    ]
    assert hit.json["status"] == "fresh"
    first.check_problem(504, "deadline")
    # who waited has made room
    after.check_problem(504, "deadline")


def test_a_client_that_waits_for_all_it_may_leaves_places_for_others(tmp_path: Path) -> None:
    house = House(MemoryStore(), tmp_path, changes={"fallback": True})
    house.publish({"hit": Row(1.0)})
    app = create_app(house.lookup(Scripted({"slow": None})), waiting=9)

    async def ask(address: str, key: str) -> Reply:
        scope, body = scope_of("GET", f"{ROW}{key}?deadline_ms=300")
        return await exchange(app, scope | {"client": (address, 1)}, body)

    async def asked() -> tuple[list[int], list[int]]:
        # one host has a network of addresses
        greedy = [asyncio.create_task(ask(f"2001:db8::{number}", "slow")) for number in range(12)]
        await asyncio.sleep(0.05)
        others = await asyncio.gather(
            *(ask(address, "slow") for address in ("2001:db8::7", "2001:db8:0:1::7", "10.0.0.1"))
        )
        return sorted([(await one).status for one in greedy]), [other.status for other in others]

    greedy, others = asyncio.run(asked())
    assert greedy == [503] * 5 + [504] * 7
    assert others == [503, 504, 504]


@pytest.mark.parametrize(
    ("scope", "client"),
    [
        ({"client": ("10.0.0.1", 5)}, "10.0.0.1"),
        ({"client": ("::ffff:10.0.0.1", 5)}, "10.0.0.1"),
        ({"client": ("fe80::1%eth0", 5)}, "fe80::"),
        ({"client": ("10.0.0.1", 5), "token": "crawler"}, "crawler"),
        ({"client": None}, ""),
        ({}, ""),
    ],
)
def test_a_client_is_known_by_its_token_or_its_address(scope: dict[str, Any], client: str) -> None:
    assert client_of(scope) == client


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", ROW + "slow?deadline_ms=60000", None),
        ("POST", "/v1/views/things/lookup", {"keys": ["hit", "slow"], "deadline_ms": 60_000}),
        (
            "POST",
            "/v1/lookup",
            {"requests": [{"view": "things", "keys": ["slow"], "deadline_ms": 60_000}] * 2},
        ),
    ],
    ids=["row", "lookup", "several views"],
)
def test_many_that_ask_for_misses_and_hang_up_leave_others_their_places(
    tmp_path: Path, method: str, path: str, body: Any
) -> None:
    house = House(MemoryStore(), tmp_path, changes={"fallback": True})
    house.publish({"hit": Row(1.0)})
    model = Scripted({"slow": None, "quick": Row(2.0)})
    app = create_app(house.lookup(model), waiting=1)

    async def attacked() -> list[Reply]:
        replies = []
        for _ in range(20):
            hangs_up = asyncio.Event()
            asked = asyncio.create_task(exchange(app, *scope_of(method, path, body), hangs_up))
            while app.waits_until() < 0:
                await asyncio.sleep(0)
            hangs_up.set()
            replies.append(await asked)
        return [*replies, await exchange(app, *scope_of("GET", ROW + "slow?deadline_ms=10"))]

    *gone, after = asyncio.run(asyncio.wait_for(attacked(), 20))
    assert [reply.status for reply in gone] == [0] * 20
    after.check_problem(504, "deadline")
    # all but the last, whose caller waited to the end
    assert all(future.cancelled() for future in model.unanswered[:-1])
    assert not model.unanswered[-1].cancelled()
