"""Requests that wait for a model are so many at most that others find a connection; what is missed
beyond is shed, and who hangs up leaves his place at once."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from precompute.store.http.app import create_app
from precompute.store.http.request import client_of
from tests.asgi import exchange, scope_of
from tests.memory_store import MemoryStore
from tests.server import Reply
from tests.store.test_lookup import House, Row, Scripted

ROW = "/v1/views/things/rows/"


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
