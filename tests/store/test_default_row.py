"""A view's default stands in for rows that are missing, says so, and is taken for nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from precompute.store.answers.fallback import Miss
from precompute.store.http.app import create_app
from precompute.store.http.encoding.answer_bodies import lookup_json
from precompute.store.times import Reason
from precompute.store.wire import bodies
from precompute.store.wire.lookup_options import LookupOptions
from tests.asgi import call
from tests.memory_store import MemoryStore
from tests.store.test_lookup import FEATURES, STALE_FOR, TTL, House, Row, Scripted
from tests.world import ROW


def plain(features: dict[str, Any] | None) -> dict[str, Any] | None:
    """Tuples as the lists that they are in JSON and Arrow."""
    return features and {
        name: list(value) if isinstance(value, tuple) else value for name, value in features.items()
    }


DEFAULT = {"double": -1.0, "vector": [0.5, 0.25], "tags": ["none"]}
WHOLE = {**{feature.name: None for feature in FEATURES}, **DEFAULT}


@pytest.fixture
def house(tmp_path: Path) -> House:
    changes = {"fallback": True, "fallback_deadline_s": 0.02, "fallback_default": DEFAULT}
    return House(MemoryStore(), tmp_path, changes=changes)


@pytest.mark.parametrize("features", [None, ["vector", "label"]], ids=["all", "some"])
def test_it_stands_in_for_every_missing_row_but_of_keys_that_can_be_none(
    house: House, features: list[str] | None
) -> None:
    house.publish({"there": Row(3.0), "old": Row(4.0, age=TTL + STALE_FOR + 1)})
    script: dict[str, Row | BaseException | None] = {
        "old": Miss(Reason.MODEL_ERROR),
        "nobody": Miss(Reason.UNKNOWN_ENTITY),
        "slow": None,
    }
    answer = house.lookup(Scripted(script)).begin(
        "things", ["there", "old", "nobody", "slow", "\0"], LookupOptions(features)
    )
    answer.wait()
    rows = answer.rows()
    assert [(row["status"], row["source"], row.get("reason")) for row in rows] == [
        ("fresh", "store", None),
        ("missing", "default", "model_error"),
        ("missing", "default", "unknown_entity"),
        ("missing", "default", "deadline"),
        ("missing", None, "bad_key"),
    ]
    default = {name: WHOLE[name] for name in features or WHOLE}
    told = [plain(row["features"]) for row in rows]
    assert told[1:] == [default, default, default, None]
    assert [(row["computed_at"], row["age_s"]) for row in rows[1:]] == [(None, None)] * 4
    by_table = answer.table().to_pylist()
    for row, features_told, column in zip(rows, told, by_table, strict=True):
        same: dict[str, Any] = {
            name: row.get(name)
            for name in ("key", "status", "source", "reason", "computed_at", "age_s")
        }
        assert {name: column[name] for name in same} == same
        assert {name: column[name] for name in default} == (features_told or dict.fromkeys(default))
    by_json = json.loads(lookup_json(answer))["rows"]
    assert [row["features"] for row in by_json] == told
    assert [(row["source"], row["computed_at"] is None) for row in by_json] == [
        (r["source"], r["computed_at"] is None) for r in rows
    ]
    assert answer.row_counts() == {
        ("fresh", "store", ""): 1,
        ("missing", "default", "model_error"): 1,
        ("missing", "default", "unknown_entity"): 1,
        ("missing", "default", "deadline"): 1,
        ("missing", "", "bad_key"): 1,
    }


def test_what_is_computed_or_in_the_store_has_no_use_for_it(house: House) -> None:
    house.publish({"there": Row(3.0)})
    answer = house.lookup(Scripted({"new": Row(5.0)})).begin("things", ["there", "new"])
    answer.wait()
    assert [(row["source"], row["features"]["double"]) for row in answer.rows()] == [
        ("store", 6.0),
        ("fallback", 10.0),
    ]
    assert answer.table()["double"].to_pylist() == [6.0, 10.0]


def test_by_itself_it_is_a_row_that_no_cache_may_have(house: House) -> None:
    house.publish({"there": Row(3.0)})
    app = create_app(house.lookup(Scripted({"nobody": Miss(Reason.UNKNOWN_ENTITY)})))
    reply = call(app, "GET", ROW + "nobody")
    told = {name: reply.json[name] for name in ("status", "source", "reason", "age_s", "features")}
    assert (reply.status, reply.headers["cache-control"], "etag" in reply.headers) == (
        200,
        "no-store",
        False,
    )
    assert told == {
        "status": "missing",
        "source": "default",
        "reason": "unknown_entity",
        "age_s": None,
        "features": WHOLE,
    }
    (arrow,) = call(app, "GET", ROW + "nobody", accept=bodies.ARROW).arrow.to_pylist()
    assert (arrow["source"], arrow["double"], arrow["computed_at"]) == ("default", -1.0, None)
    assert call(app, "GET", ROW + "nobody", cache_control="only-if-cached").status == 504
