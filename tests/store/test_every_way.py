"""Freshness, keys, damage: one table of cases, whose answers are the same by the store, the lookup,
HTTP and the client."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import quote

import msgspec
import pytest

from precompute.store.client import ViewLookupRequest, calls
from precompute.store.client.calls import Call, Reply
from precompute.store.errors import RequestError
from precompute.store.online.codec import RowCodec, State
from precompute.store.online.online_store import OnlineStore
from precompute.store.online.url import open_online_store
from precompute.store.wire import bodies
from precompute.store.wire.lookup_options import LookupOptions
from tests.asgi import call
from tests.online_rig import KINDS, rigs
from tests.world import LOOKUP, PUBLISHED, ROW, STALE_FOR, TTL, World

AGES: dict[Any, float] = {
    "new": 1.0,
    "1": 2.0,
    "a/b %2F é": 2.25,
    "just fresh": TTL,
    "just stale": TTL + 1e-6,
    "still stale": TTL + STALE_FOR,
    "expired": TTL + STALE_FOR + 1e-6,
    "spoilt": 1.0,
}
PAIRS: dict[Any, float] = {("a", "1"): 1.0, ("a/b", "2"): 1.0, ("a", "b/2"): 1.0, ("", "%"): 1.0}
PAIR_TEXTS = dict(zip(["a/1", "a%2Fb/2", "a/b%2F2", "/%25"], PAIRS.values(), strict=True))
FEATURES = {"double": 2.0, "vector": [1.0, 2.0]}
STATUS_OF = {"unknown_entity": 404, "expired": 404, "damaged": 500, "deadline": 504}
"""Of a missing row by itself; among others it is a row like any other."""


@pytest.fixture(scope="module", params=[*KINDS, "memory"])
def worlds(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, World]]:
    """Without a model behind misses, with one, and of a key of two columns; each in every store."""
    folder, opened = tmp_path_factory.mktemp("worlds"), list[OnlineStore]()

    def online(name: str) -> OnlineStore | None:
        if request.param == "memory":
            return None
        url = f"table:{folder / name}"
        if request.param != "table":
            url = request.getfixturevalue(rigs()[request.param].apart)(len(opened))
        opened.append(open_online_store(url))
        return opened[-1]

    ages, spoilt = dict(AGES), {"spoilt"}
    alone = World(folder / "alone", ages, fallback=False, damaged=spoilt, online=online("alone"))
    backed = World(folder / "backed", ages, damaged=spoilt, online=online("backed"))
    backed.model.known = frozenset(AGES) | {"other"}
    pairs = World(
        folder / "pairs", PAIRS, fallback=False, entity=("shop", "item"), online=online("pairs")
    )
    yield {"alone": alone, "backed": backed, "pairs": pairs}
    for one in opened:
        one.close()


# ---- the cases


def all_of(outcomes: str) -> list[tuple[str, str]]:
    """Outcomes of all rows, in their order."""
    return list(zip(AGES, outcomes.split(), strict=True))


NOTHING: dict[str, Any] = {}
BAD = [
    (None, "null"),
    (1.5, "1.5"),
    (True, "true"),
    ({"id": 1}, '{"id": 1}'),
    ([None], "[null]"),
    ([["new"]], '[["new"]]'),
    (["new", "new"], '["new", "new"]'),
    ([], "[]"),
    (2**64, "18446744073709551616"),
    ([1] * 100, "[1, 1, 1, 1, 1, 1, ...]"),
    ("\ud800", "?"),
    (["\ud800"], r'["\ud800"]'),
    *((key, key) for key in ("", "\0", "new\0", "x" * 512, "é" * 256)),
]
CASES: list[tuple[str, Sequence[Any], dict[str, Any], list[tuple[str, str]]]] = [
    # freshness: of the time, of the caller's limit
    ("alone", list(AGES), {}, all_of("fresh fresh fresh fresh stale stale expired damaged")),
    *(
        ("alone", list(AGES), {"max_age_s": limit}, all_of(f"{outcomes} damaged"))
        for limit, outcomes in (
            (0, "expired expired expired expired expired expired expired"),
            (1.0, "fresh expired expired expired expired expired expired"),
            (TTL, "fresh fresh fresh fresh expired expired expired"),
            (TTL + 1e-6, "fresh fresh fresh fresh stale expired expired"),
            (1e9, "fresh fresh fresh fresh stale stale expired"),
        )
    ),
    ("backed", list(AGES), {}, all_of("fresh fresh fresh fresh stale stale computed computed")),
    ("backed", list(AGES), {"max_age_s": 0}, all_of("computed " * 8)),
    ("backed", ["expired", "spoilt"], {"fallback": False}, [("expired", "expired"), ("spoilt", "damaged")]),
    ("backed", ["late", "new"], {}, [("late", "deadline"), ("new", "fresh")]),
    # order, doubles, strangers
    ("alone", ["nobody", "new", "new", "expired", "new"], {},
     [("nobody", "unknown_entity"), ("new", "fresh"), ("new", "fresh"), ("expired", "expired"), ("new", "fresh")]),
    ("alone", ["nobody", "nobody"], {}, [("nobody", "unknown_entity")] * 2),
    ("backed", ["other", "nobody"], {}, [("other", "computed"), ("nobody", "unknown_entity")]),
    # damage stays with its row
    ("alone", ["spoilt"], {}, [("spoilt", "damaged")]),
    ("alone", ["new", "spoilt", "1"], {}, [("new", "fresh"), ("spoilt", "damaged"), ("1", "fresh")]),
    # features
    *(("alone", ["new", "nobody"], {"features": names}, [("new", "fresh"), ("nobody", "unknown_entity")])
      for names in (["vector"], ["vector", "double"], [])),
    # keys of every form, and what is none
    ("alone", [1, "01", ["1"], ("1",), "1"], {},
     [("1", "fresh"), ("01", "unknown_entity"), ("1", "fresh"), ("1", "fresh"), ("1", "fresh")]),
    *(("alone", ["new", bad, 1], {}, [("new", "fresh"), (shown, "bad_key"), ("1", "fresh")]) for bad, shown in BAD),
    *(("backed", [bad], {}, [(shown, "bad_key")]) for bad, shown in BAD),
    ("pairs", list(PAIRS), {}, [(text, "fresh") for text in PAIR_TEXTS]),
    ("pairs", [*PAIR_TEXTS, "a/9", ["a", 9]], {},
     [*((text, "fresh") for text in PAIR_TEXTS), ("a/9", "unknown_entity"), ("a/9", "unknown_entity")]),
    *(("pairs", [["a", 1], key], {}, [("a/1", "fresh"), (json.dumps(key), "bad_key")])
      for key in (["a"], ["a", "b", "c"], [], ["a", None])),
]  # fmt: skip


def row_of(key: str, outcome: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The whole row that an answer must have, its features as columns."""
    row: dict[str, Any] = {
        "key": key,
        "status": outcome,
        "source": "fallback" if outcome == "computed" else "store",
        "reason": None,
        "computed_at": None,
        "age_s": None,
        "ttl_s": TTL,
        "snapshot": 1,
        "model": "m",
    }
    features: dict[str, Any] = {name: FEATURES[name] for name in options.get("features", FEATURES)}
    if outcome not in ("fresh", "stale", "computed"):
        row |= {"status": "missing", "source": None, "reason": outcome}
        return row | dict.fromkeys(features)
    age = 0.0 if outcome == "computed" else {**AGES, **PAIR_TEXTS}[key]
    at_us = round(PUBLISHED * 1e6) - round(age * 1e6)
    at = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=at_us)
    return row | {"computed_at": at, "age_s": age} | features


# ---- the ways


def plain_row(row: Any) -> dict[str, Any]:
    return {
        name: value
        for name, value in msgspec.structs.asdict(row).items()
        if value is not msgspec.UNSET
    }


def flat(rows: Any, features: Sequence[str]) -> list[dict[str, Any]]:
    """Rows of JSON, of the client or in process, as those of a table."""
    plain = [row if isinstance(row, dict) else plain_row(row) for row in rows]
    found = []
    for row in plain:
        at = row["computed_at"]
        values = row.pop("features") or dict.fromkeys(features)
        values = {n: list(v) if isinstance(v, tuple) else v for n, v in values.items()}
        found.append(
            {"reason": None}
            | row
            | {"computed_at": datetime.fromisoformat(at) if isinstance(at, str) else at}
            | values
        )
    return found


def ask(world: World, asked: Call[Any]) -> Any:
    """What the client makes of the API's answer, with no socket between."""
    reply = call(world.app, asked.method.decode(), asked.path, asked.body, accept=asked.accept)
    headers = [(name.encode(), value.encode()) for name, value in reply.headers.items()]
    return asked.answer(Reply(reply.status, headers, reply.body), "here")


def by_store(world: World, keys: Sequence[str]) -> list[State]:
    """What the store has under texts, by what the rows themselves say."""
    read = world.lookup.online.read("things", [key.encode() for key in keys])
    assert read is not None
    states, _ = read[1].verified(RowCodec(read[0].view), frozenset({1}))
    return [State(state) for state in states.tolist()]


def by_lookup(world: World, keys: Any, options: Any, names: list[str]) -> Iterator[Any]:
    yield world.lookup.get("things", keys, **options).to_pylist()
    answer = world.lookup.begin("things", keys, LookupOptions(**options))
    answer.wait()
    yield flat(answer.rows(), names)


def by_http(world: World, keys: Any, options: Any, names: list[str]) -> Iterator[Any]:
    body = {"keys": keys, **options}
    yield flat(world.post(LOOKUP, body).json["rows"], names)
    yield world.post(LOOKUP, body, accept=bodies.ARROW).arrow.to_pylist()
    several = world.post("/v1/lookup", {"requests": [{"view": "things", **body}]})
    yield flat(several.json["responses"][0]["rows"], names)


def by_client(world: World, keys: Any, options: Any, names: list[str]) -> Iterator[Any]:
    yield ask(world, calls.table("things", keys, options)).to_pylist()
    yield flat(ask(world, calls.rows("things", keys, options)).rows, names)
    request = ViewLookupRequest(view="things", keys=keys, **options)
    yield flat(ask(world, calls.several([request], None, {}))[0].rows, names)


def one_by_one(world: World, key: str, options: Any, expected: dict[str, Any]) -> None:
    """A row by itself: in process, by its URL and by the client."""
    names = options.get("features", list(FEATURES))
    query = "&".join(
        f"{name}={','.join(value) if name == 'features' else json.dumps(value)}"
        for name, value in options.items()
    )
    # of several columns the text is what stands in a URL
    url = key if len(world.lookup.views()[0]["entity"]) > 1 else quote(key, safe="")
    reply = world.get(f"{ROW}{url}?{query}")
    if expected["status"] == "missing":
        reason = expected["reason"]
        reply.check_problem(STATUS_OF[reason], reason)
        with pytest.raises(RequestError) as caught:
            ask(world, calls.row("things", key, options))
        assert (caught.value.status, caught.value.code) == (STATUS_OF[reason], reason)
        return
    for row in (reply.json, ask(world, calls.row("things", key, options))):
        (found,) = flat([row], names)
        assert found.pop("view") == "things"
        assert found == expected


@pytest.mark.parametrize(
    ("name", "keys", "options", "told"), CASES, ids=lambda value: ascii(value)[:40]
)
def test_an_answer_is_the_same_by_every_way(
    worlds: dict[str, World], name: str, keys: list[Any], options: dict[str, Any], told: Any
) -> None:
    world, names = worlds[name], options.get("features", list(FEATURES))
    expected = [row_of(key, outcome, options) for key, outcome in told]
    world.model.asked.clear()
    for way in (by_lookup, by_http, by_client):
        for rows in way(world, keys, options, names):
            assert rows == expected, way
    for key, row in zip(keys, expected, strict=True):
        if isinstance(key, str) and row["reason"] != "bad_key":
            one_by_one(world, key, options, row)
    misses = {key for key, outcome in told if outcome != "bad_key"} if name == "backed" else set()
    assert set(world.model.asked) <= misses


def test_the_store_itself_has_whole_rows_damaged_ones_and_none(worlds: dict[str, World]) -> None:
    keys = [*AGES, "nobody"]
    states = [State.DAMAGED if key == "spoilt" else State.WHOLE for key in AGES]
    assert by_store(worlds["alone"], keys)[:-1] == states
    assert by_store(worlds["alone"], keys)[-1] not in (State.WHOLE, State.DAMAGED)
