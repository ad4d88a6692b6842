"""Pools: searches that wait for a model hold up no row of a store that is waited for, too; what is
beyond the room for them is refused at once; what is traced stays so."""

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
from precompute.store.http.pools import Pool
from precompute.store.http.telemetry.caller import TRACE
from precompute.store.online.online_store import Pointer
from precompute.store.times import Reason
from tests.asgi import exchange, scope_of
from tests.server import Reply
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


@pytest.mark.parametrize("before", [True, False])
def test_a_call_that_is_cancelled_as_its_turn_comes_leaves_it_to_the_next(before: bool) -> None:
    async def scene() -> tuple[bool, str]:
        pool, go_on = Pool("search", 1, 2), threading.Event()
        first = asyncio.create_task(pool.run(go_on.wait, 20))
        await asyncio.sleep(0)
        second, third = (asyncio.create_task(pool.run(str, number)) for number in (2, 3))
        await asyncio.sleep(0)
        if before:
            second.cancel()
            pool._next()
        else:
            pool._next()
            second.cancel()
        go_on.set()
        return await first, await third

    assert asyncio.run(asyncio.wait_for(scene(), 20)) == (True, "3")


def test_a_call_has_what_its_caller_is_traced_by_and_leaves_its_place() -> None:
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
        pool, usual = Pool("read", 1, 0), threading.stack_size(2**46)
        try:
            with pytest.raises(RuntimeError, match="can't start new thread"):
                await pool.run(str)
        finally:
            threading.stack_size(usual)
        return await pool.run(str, 1)

    assert asyncio.run(scene()) == ["00-1", None, "00-2"]
    # nor does a call hold one for which the system had no thread
    assert asyncio.run(without_room()) == "1"
