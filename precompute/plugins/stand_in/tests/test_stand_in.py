"""The stand-in is the real thing but for its connections: what its clients answer and raise is held
equal to those of a server over the same rows."""

from __future__ import annotations

import asyncio
import inspect
import math
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest

from precompute import AsyncClient, Client, PrecomputeError, ViewLookupRequest
from precompute.plugins.stand_in.stand_in import IN_STEAD
from precompute.store.doors import VIEW_KEYS
from precompute.store.errors import (
    ConfigError,
    DeadlineError,
    DeniedError,
    NoAnswerError,
    OnlineStoreError,
    OverloadedError,
    RequestError,
    SnapshotError,
)
from precompute.testing import StandIn, stand_in
from tests import REPOSITORY
from tests.hostile import Hostile
from tests.server import Server, make_folder
from tests.store.test_client_faults import problem
from tests.test_packaging import ABSENT, declared

__all__ = ["stand_in"]

FEATURES: dict[str, dict[str, Any]] = {
    "double": {"dtype": "float64"},
    "vector": {"dtype": "float32", "dim": 4},
}


def kind(x: float) -> dict[str, Any]:
    """A feature of every kind, made of x; some are null."""
    return {
        "half": [0.1 * x, -1.0, x],
        "text": None if x == 2 else f"ü{x}",
        "flag": x > 1,
        "small": int(-x),
        "words": [] if x == 1 else ["a", "", "ü"],
        "numbers": [0.1, x],
    }


def doubled(x: float) -> dict[str, Any]:
    """What the model of :mod:`tests.models` makes of x."""
    return {"double": 2 * x, "vector": [x + i for i in range(4)]}


MODEL = f"""from __future__ import annotations

class Kinds:
    def fingerprint(self):
        return "kinds"

    def compute(self, batch):
        columns = {{}}
        for x in batch.column("x").to_pylist():
            for name, value in kind(x).items():
                columns.setdefault(name, []).append(value)
        return columns


{inspect.getsource(kind)}
"""
"""A model that makes :func:`kind`."""

KINDS: dict[str, Any] = {
    "entity": ["name", "id"],
    "source": {"sql": "SELECT 'a/b' AS name, id, x FROM read_parquet('${data}/data.parquet')"},
    "model": {"use": "kinds:Kinds"},
    "features": {
        # in the order that the file has them
        "flag": {"dtype": "bool"},
        "half": {"dtype": "float16", "dim": 3},
        "numbers": {"dtype": "float32", "max_items": 5},
        "small": {"dtype": "int8"},
        "text": {"dtype": "string"},
        "words": {"dtype": "string", "max_items": 5},
    },
    "index": {"on": "half", "metric": "cosine"},
    "fallback": None,
}


def publish(double: StandIn) -> None:
    """The view of :mod:`tests.server`, over the same rows."""

    def model(key: str, inputs: Any) -> dict[str, Any] | None:
        return None if inputs is None else doubled(inputs["x"])

    double.view(
        "numbers",
        {i: doubled(float(i)) for i in (1, 2, 3)},
        features=FEATURES,
        ttl_s=3600,
        stale_for_s=86400,
        index={"on": "vector", "metric": "l2"},
        model=model,
        inputs={"x": "double"},
        deadline_s=20,
    )
    rows = {("a/b", i): kind(float(i)) for i in (1, 2, 3)}
    options: dict[str, Any] = {name: KINDS[name] for name in ("entity", "features", "index")}
    double.view("kinds", rows, ttl_s=3600, stale_for_s=86400, **options)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The real one."""
    folder = tmp_path_factory.mktemp("stand-in") / "project"
    folder.mkdir()
    (folder / "kinds.py").write_text(MODEL)
    scene = make_folder(folder, {"numbers": {}, "kinds": KINDS})
    scene.publish_all("numbers", "kinds")
    with Server(folder) as server:
        yield server


WHEN = frozenset({"computed_at", "age_s", "published_at"})
MADE = frozenset({"model"})


def plain(value: Any) -> Any:
    """An answer, or an error, as it is compared: with its types, without times, ages and
    fingerprints that are there."""
    if isinstance(value, pa.Table):
        return value.schema, plain(value.to_pylist())
    if isinstance(value, PrecomputeError):
        return type(value), getattr(value, "status", None), getattr(value, "code", None), str(value)
    if isinstance(value, msgspec.Struct):
        return type(value), plain(msgspec.structs.asdict(value))
    if isinstance(value, dict):
        return {
            name: type(one) if name in WHEN | MADE else plain(one) for name, one in value.items()
        }
    return [plain(one) for one in value] if isinstance(value, (list, tuple)) else value


CALLS: dict[str, Callable[[Any], Any]] = {
    "get": lambda c: c.get("numbers", [1, "3", 9, None, 1.5]),
    "get of numpy": lambda c: c.get("numbers", np.array([2, 1]), features=["vector"]),
    "rows": lambda c: c.rows("numbers", [3, 1, 77]),
    "rows, computed": lambda c: c.rows("numbers", [9], inputs={9: {"x": 5.5}}),
    "rows, never the model": lambda c: c.rows(
        "numbers", [9], inputs={9: {"x": 5.5}}, only_if_cached=True
    ),
    "row": lambda c: c.row("numbers", 2),
    "row, missing": lambda c: c.row("numbers", 9, fallback=False),
    "several": lambda c: c.several(
        [
            ViewLookupRequest([1, 9], view="numbers", fallback=False),
            ViewLookupRequest([1], view="no"),
        ]
    ),
    "search by key": lambda c: c.search("numbers", key=1, k=2),
    "search by vector": lambda c: c.search(
        "numbers", vector=[2, 3, 4, 5], k=5, features=["double", "vector"], exclude=[3]
    ),
    "search by inputs": lambda c: c.search("numbers", inputs={"x": 2.9}, k=1),
    "inputs of no fallback": lambda c: c.rows("kinds", ["a/1"], inputs={"a/1": {"x": 1}}),
    "search, filtered": lambda c: c.search(
        "numbers", vector=[0, 0, 0, 0], filter={"double": {"gt": 2}}, only=[1, 2]
    ),
    "search, missing": lambda c: c.search("numbers", key=9),
    "search, of another length": lambda c: c.search("numbers", vector=[1]),
    "of every kind": lambda c: c.get(
        "kinds", [["a/b", 1], ("a/b", "2"), "a%2Fb/3", ["a/b"], ["a", 1]]
    ),
    "of every kind, as rows": lambda c: c.rows(
        "kinds", [["a/b", 1], ["a/b", 2]], features=["words", "half", "text"]
    ),
    "of every kind, a row": lambda c: c.row("kinds", ["a/b", 3]),
    "of every kind, searched": lambda c: [
        msgspec.structs.replace(row, score=round(row.score, 5))
        for row in c.search(
            "kinds", key=["a/b", 3], filter={"flag": True, "small": [-2, -3]}, features=["text"]
        ).rows
    ],
    "of every kind, near": lambda c: c.search(
        "kinds", vector=[0.3, -1, 3], k=1, features=["half", "small"], filter={"small": {"lt": 0}}
    ),
    "views": lambda c: [
        {
            name: one
            for name, one in line.items()
            if name not in ("index", "features", "source", "snapshot")
        }
        for line in c.views()
    ],
}


def answered(call: Callable[[Any], Any], client: Client) -> Any:
    try:
        return plain(call(client))
    except PrecomputeError as exc:
        return plain(exc)


async def answered_async(call: Callable[[Any], Any], client: AsyncClient) -> Any:
    async with client:
        try:
            return plain(await call(client))
        except PrecomputeError as exc:
            return plain(exc)


@pytest.mark.parametrize("call", CALLS.values(), ids=list(CALLS))
def test_an_answer_is_that_of_a_server(
    server: Server, stand_in: StandIn, call: Callable[[Any], Any]
) -> None:
    publish(stand_in)
    with Client(server.url) as real, stand_in.client() as double:
        assert answered(call, double) == (expected := answered(call, real))
        assert expected
    if call not in (CALLS["views"], CALLS["of every kind, searched"]):
        # not those that look into what is awaited
        double_answer, real_answer = (
            asyncio.run(answered_async(call, c))
            for c in (stand_in.async_client(), AsyncClient(server.url))
        )
        assert double_answer == real_answer


# ---- what goes wrong

FAILURES: dict[str, tuple[PrecomputeError, Callable[[Any], None] | None]] = {
    "busy": (
        OverloadedError("40 calls are in hand already", retry_after_s=1),
        lambda visit: visit.answer(
            503, problem(503, "busy", detail="40 calls are in hand already"), b"Retry-After: 1"
        ),
    ),
    "its store is gone": (
        OnlineStoreError("the online store does not answer"),
        lambda visit: visit.answer(
            503, problem(503, "store_unavailable", detail="the online store does not answer")
        ),
    ),
    "no token": (
        DeniedError("no token", status=401, code="no_token"),
        lambda visit: visit.answer(401, problem(401, "no_token", detail="no token")),
    ),
    "too many keys": (
        RequestError("too many", status=413, code="too_many_keys"),
        lambda visit: visit.answer(413, problem(413, "too_many_keys", detail="too many")),
    ),
    "nobody there": (NoAnswerError("gone"), None),
    "too late": (DeadlineError("late"), lambda visit: visit.hold()),
}


def raised(client: Client) -> PrecomputeError:
    with client, pytest.raises(PrecomputeError) as caught:
        client.get("numbers", [1], timeout_s=0.5)
    return caught.value


@pytest.mark.parametrize("name", FAILURES)
def test_a_failure_on_order_is_what_a_server_does(stand_in: StandIn, name: str) -> None:
    """The same class, status, code and attempts; of an answer that came, the same words."""
    error, behaviour = FAILURES[name]
    publish(stand_in)
    stand_in.fail(error)
    double = raised(stand_in.client())
    if behaviour is None:
        # nobody listens there
        real, requests = raised(Client("unix:./nobody.sock")), 3
    else:
        with Hostile(behaviour) as hostile:
            real = raised(Client(hostile.url))
            requests = len(hostile.requests)
    # of an answer that came, the same words
    words = slice(4 if name not in ("nobody there", "too late") else 3)
    assert plain(double)[words] == plain(real)[words]
    assert type(double) is type(error)
    assert getattr(double, "retry_after_s", None) == getattr(real, "retry_after_s", None)
    assert len(stand_in.requests) == requests


def test_what_is_on_order_comes_so_often_and_for_whom(stand_in: StandIn) -> None:
    publish(stand_in)
    stand_in.view("other", {"a": {"n": 1}})
    stand_in.fail(NoAnswerError("gone"), times=1, view="numbers")
    with stand_in.client() as client, stand_in.client(retries=0) as impatient:
        assert impatient.row("other", "a").features == {"n": 1}
        # the second attempt is answered
        assert client.row("numbers", 1).status == "fresh"
        stand_in.fail(OnlineStoreError("gone"), times=2, view="other")
        mixed = [ViewLookupRequest([1], view="numbers"), ViewLookupRequest(["a"], view="other")]
        with pytest.raises(OnlineStoreError, match="gone"):
            impatient.several(mixed)
        with pytest.raises(OnlineStoreError, match="gone"):
            impatient.row("other", "a")
        assert [one.view for one in impatient.several(mixed)] == ["numbers", "other"]
        stand_in.fail(NoAnswerError("gone"))
        stand_in.heal()
        assert impatient.row("numbers", 1).status == "fresh"
    assert [request.views for request in stand_in.requests[-3:]] == [
        ["other"],
        ["numbers", "other"],
        ["numbers"],
    ]
    assert stand_in.requests[0].path.startswith("/v1/views/other/rows/a")
    for wrong in (
        lambda: stand_in.fail(SnapshotError("no client raises it")),
        lambda: stand_in.fail(NoAnswerError("gone"), times=0),
        lambda: stand_in.delay(-1),
    ):
        with pytest.raises(ConfigError):
            wrong()


def test_an_answer_that_comes_late(stand_in: StandIn) -> None:
    publish(stand_in)
    stand_in.delay(0.2, times=2)
    began = time.monotonic()
    with stand_in.client() as client, pytest.raises(DeadlineError, match="in time"):
        client.row("numbers", 1, timeout_s=0.05)
    with stand_in.client() as client:
        assert client.row("numbers", 1).status == "fresh"
    assert time.monotonic() - began >= 0.25

    async def several() -> list[str]:
        async with stand_in.async_client() as client:
            stand_in.delay(5)
            with pytest.raises(DeadlineError, match="in time"):
                await client.row("numbers", 1, timeout_s=0.05)
            task = asyncio.create_task(client.row("numbers", 1))
            await asyncio.sleep(0.05)
            task.cancel()
            stand_in.heal()
            return [
                row.status
                for row in await asyncio.gather(*(client.row("numbers", 1) for _ in range(20)))
            ]

    assert asyncio.run(several()) == ["fresh"] * 20


def test_rows_change_age_and_break(stand_in: StandIn) -> None:
    publish(stand_in)
    with stand_in.client() as client:

        def seen(key: int = 1) -> tuple[str, Any, Any]:
            (row,) = client.rows("numbers", [key], fallback=False).rows
            return str(row.status), row.features and row.features["double"], row.reason or None

        stand_in.advance(3601)
        assert seen() == ("stale", 2.0, None)
        stand_in.put("numbers", 1, doubled(8.0))
        assert seen() == ("fresh", 16.0, None)
        assert client.search("numbers", vector=[8, 9, 10, 11], k=1).rows[0].key == "1"
        stand_in.put("numbers", 1, doubled(9.0), age_s=90_001)
        assert seen() == ("missing", None, "expired")
        stand_in.put("numbers", 1, {"vector": [1.0, 0, 0, 0]})
        assert client.row("numbers", 1).features == {"double": None, "vector": [1.0, 0, 0, 0]}
        stand_in.put("numbers", 1, {})
        assert client.row("numbers", 1).features == {"double": None, "vector": None}
        stand_in.damage("numbers", 1)
        assert seen() == ("missing", None, "damaged")
        stand_in.remove("numbers", 1)
        assert seen() == ("missing", None, "unknown_entity")
        assert {line["view"]: line["rows"] for line in client.views()} == {"kinds": 3, "numbers": 2}
    stand_in.close()
    with stand_in.client() as client, pytest.raises(NoAnswerError, match="closed"):
        client.views()


def test_a_row_that_is_searched_by_cosine_is_removed(stand_in: StandIn) -> None:
    rows = {key: {"vector": [float(key), 1.0]} for key in (1, 2, 3)}
    vector = {"vector": {"dtype": "float32", "dim": 2}}
    stand_in.view("near", rows, features=vector, index={"on": "vector"})
    stand_in.remove("near", 3)
    with stand_in.client() as client:
        found = client.search("near", vector=[3.0, 1.0], k=3).rows
    assert [row.key for row in found] == ["2", "1"]


@pytest.mark.skipif(not VIEW_KEYS.is_here(IN_STEAD), reason="nothing here has students")
def test_a_student_says_whose_stead_it_stands_in(stand_in: StandIn) -> None:
    stand_in.view(
        "lengths",
        {"a": {"length": 1}},
        model=lambda key, inputs: {"length": len(key) + 1},
        agreement=0.75,
    )
    with stand_in.client() as client:
        table = client.get("lengths", ["a", "bb"])
    assert table.select(["status", "model", "approximates", "agreement"]).to_pylist() == [
        {"status": "fresh", "model": "stand-in", "approximates": None, "agreement": None},
        {
            "status": "computed",
            "model": "substitute",
            "approximates": "stand-in",
            "agreement": 0.75,
        },
    ]


def test_a_model_that_is_slow_or_fails(stand_in: StandIn) -> None:
    def model(key: str, inputs: Any) -> dict[str, Any] | None:
        if key == "slow":
            time.sleep(0.5)
        if key == "late":
            raise TimeoutError
        if key == "broken":
            raise ValueError("cannot")
        return {"length": len(key), "words": [key]}

    features: dict[str, dict[str, Any]] = {
        "length": {"dtype": "int32"},
        "words": {"dtype": "string", "max_items": 9},
    }
    stand_in.view("names", features=features, model=model, default={"length": -1})
    with stand_in.client() as client:
        rows = client.rows("names", ["bob", "slow", "late", "broken"], deadline_ms=100).rows
    assert [(row.status, row.source, row.reason or None, row.features) for row in rows] == [
        ("computed", "fallback", None, {"length": 3, "words": ["bob"]}),
        ("missing", "default", "deadline", {"length": -1, "words": None}),
        ("missing", "default", "deadline", {"length": -1, "words": None}),
        ("missing", "default", "model_error", {"length": -1, "words": None}),
    ]


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"name": "Numbers", "rows": {1: {"a": 1}}}, "'Numbers' is no name"),
    ({"rows": {1: {"status": 1}}}, "'status' is no name"),
    ({"rows": {}}, "its features are not known"),
    ({"rows": {1: {"a": None}}}, "cannot be seen from None"),
    ({"rows": {1: {"a": 1}, 2: {"b": 1}}}, "has no feature 'b'"),
    ({"rows": {1: {"a": 1}, 2: {"a": "x"}}}, "key '2': a: "),
    ({"rows": {1: {"a": [1.0, 2.0]}, 2: {"a": [1.0]}}}, "key '2': a: "),
    ({"features": {"a": {"dtype": "float"}}}, "'float' is none of"),
    ({"features": {"a": {"kind": "float32"}}}, "each has a dtype"),
    ({"rows": {1: {"a": 1}}, "index": {"on": "a"}}, "index.on: 'a' is no vector"),
    (
        {"rows": {1: {"a": [1.0]}}, "index": {"on": "a", "metric": "cosin"}},
        "index.metric: 'cosin' is none of cosine, dot, l2",
    ),
    ({"rows": {1: {"a": [1.0]}}, "index": {"metric": "l2"}}, "index: it has on and metric"),
    (
        {"rows": {1: {"a": [1.0]}, 2: {}, 3: {"a": [0.0]}}, "index": {"on": "a"}},
        "key '3': a is all zeros",
    ),
    ({"rows": {1: {"a": 1.0}, 2: {"a": math.nan}}}, "key '2': a is not finite"),
    ({"rows": {1: {"a": [1.0]}, 2: {"a": [-math.inf]}}}, "key '2': a is not finite"),
    ({"rows": {1: {"a": [1.0]}, 2: {"a": [1e300]}}}, "key '2': a is not finite"),
    ({"rows": {1: {"a": [1.0], "b": 1}, 2: {"b": 1}}}, "key '2': a is null, and a vector"),
    ({"rows": {1: {"a": [1.0]}, 2: {"a": [None]}}}, "key '2': a holds a null"),
    (
        {
            "rows": {1: {"a": ["x"]}, 2: {"a": ["x", "y"]}},
            "features": {"a": {"dtype": "string", "max_items": 1}},
        },
        "key '2': a has more than 1 items",
    ),
    (
        {"rows": {1: {"a": 1}, 2: {"a": 0.5}}},
        "key '2': a: a value is a float, and the feature is int64",
    ),
    ({"rows": {"007": {"a": 1}}, "entity": ["x", "y"]}, "a key of this view has 2 part.* got 1"),
    ({"rows": {1: {"a": 1}}, "ttl_s": -1}, "ttl_s is -1.0: give seconds"),
    ({"rows": {1: {"a": 1}}, "stale_for_s": math.nan}, "stale_for_s is nan"),
    ({"rows": {1: {"a": 1}}, "deadline_s": -0.1}, "deadline_s is -0.1"),
    ({"rows": {1: {"a": 1}}, "default": {"a": "x"}}, "default: "),
]


@pytest.mark.parametrize(("options", "message"), WRONG, ids=[message for _, message in WRONG])
def test_a_view_that_could_not_be_is_refused(
    stand_in: StandIn, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        stand_in.view(**{"name": "numbers"} | options)
    for change in (stand_in.put, stand_in.remove):
        with pytest.raises(ConfigError, match="has no view 'numbers'"):
            change("numbers", 1, *([{}] if change == stand_in.put else []))
    with pytest.raises(ConfigError, match="has no view 'numbers'"):
        stand_in.delay(1.0, view="numbers")


NEEDS = f"""import sysconfig
sysconfig.get_config_vars()
{ABSENT}
from precompute.testing import StandIn
with StandIn() as stand_in, stand_in.client() as client:
    stand_in.view("items", {{1: {{"vector": [1.0, 2.0]}}, 2: {{"vector": [1.0, 0.0]}}}}, index={{"on": "vector"}})
    print(client.get("items", [1])["vector"].to_pylist(), client.search("items", key=1).rows[0].key)
"""


def test_it_needs_no_engine() -> None:
    """No torch, no DuckDB, no FAISS in the environment of a service's tests."""
    needed = declared("testing") | {
        "h11",
        "anyio",
        "idna",
        "truststore",
        "typing-extensions",
        "markupsafe",
    }
    needed |= {"pluggy", "iniconfig", "packaging", "pygments"} | {
        name.replace("-", "_") for name in needed
    }
    command = [sys.executable, "-c", NEEDS, " ".join(needed)]
    done = subprocess.run(
        command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.stdout, done.returncode) == ("[[1.0, 2.0]] 2\n", 0), done.stderr
