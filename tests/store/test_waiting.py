"""Requests that wait for a model are so many at most that others find a connection; what is missed beyond is shed."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from store.api.app import create_app
from store.online.online_store import MemoryStore
from tests.asgi import exchange, scope_of
from tests.server import Reply
from tests.store.test_lookup import House, Row, Scripted

ROW = "/v1/views/things/rows/"


def test_beyond_those_that_may_wait_what_is_missed_is_shed_and_hits_are_answered(tmp_path: Path) -> None:
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
        batch = await ask("POST", "/v1/views/things/lookup", {"keys": ["hit", "other", "quick"], "deadline_ms": 60_000})
        hit = await ask("GET", ROW + "hit")
        assert not first.done()
        return beyond, batch, hit, await first, await ask("GET", ROW + "other?deadline_ms=10")

    beyond, batch, hit, first, after = asyncio.run(asked())
    beyond.check_problem(503, "shed")
    assert int(beyond.headers["retry-after"]) >= 1
    # what was done already is given all the same
    assert [row.get("reason", row["status"]) for row in batch.json["rows"]] == ["fresh", "shed", "computed"]
    assert hit.json["status"] == "fresh"
    first.check_problem(504, "deadline")
    # who waited has made room
    after.check_problem(504, "deadline")
