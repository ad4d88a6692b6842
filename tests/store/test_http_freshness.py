"""Freshness over HTTP under a clock of the tests' own: what a request may ask of it, and that every
path tells the same of the same row."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from precompute.store.errors import RequestError
from precompute.store.feature_view import Feature, FeatureView
from precompute.store.http.app import create_app
from precompute.store.http.encoding.caching import MOST_PARTS, Caching, cache_control
from precompute.store.http.messages import both, wants_arrow
from precompute.store.wire import bodies
from precompute.store.wire.lookup_options import CacheControl, LookupOptions
from tests.server import OPERATORS
from tests.world import LOOKUP, PUBLISHED, ROW, SEARCH, World

# ---- what a request may ask


@pytest.mark.parametrize(
    ("header", "asked"),
    [
        (None, None),
        ("", None),
        ("no-store, no-transform, foo=1, bar", None),
        ("max-stale", None),
        ("no-cache", CacheControl(no_cache=True)),
        ("No-Cache ,ONLY-IF-CACHED", CacheControl(no_cache=True, only_if_cached=True)),
        ("max-age=5", CacheControl(max_age_s=5)),
        ('max-age="5"', CacheControl(max_age_s=5)),
        ("max-age=9,min-fresh=2 , max-stale=3", CacheControl(9, 2, 3)),
        ("max-age=9, max-age=4, min-fresh=1, min-fresh=2", CacheControl(4, 2)),
        ("max-age=" + "9" * 50, CacheControl(max_age_s=2**31)),
        ('foo="a, no-cache, \\" b", max-age=1', CacheControl(max_age_s=1)),
        (",,;;= =, max-age=1", CacheControl(max_age_s=1)),
        ("a," * (MOST_PARTS - 1) + "max-age=1", CacheControl(max_age_s=1)),
    ],
)
def test_what_cache_control_demands(header: str | None, asked: CacheControl | None) -> None:
    assert cache_control(None if header is None else header.encode()) == asked


@pytest.mark.parametrize(
    "text",
    [
        "max-age",
        "max-age=",
        "max-age=x",
        "max-age=-1",
        "max-age=1.5",
        "min-fresh=²",
        "max-stale=a",
        "a," * MOST_PARTS + "max-age=1",
    ],
)
def test_seconds_that_are_none_are_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(RequestError):
        cache_control(text.encode("latin-1", "replace"))
    world = World(tmp_path, {"new": 0})
    for reply in (
        world.get(ROW + "new", cache_control=text),
        world.post(LOOKUP, {"keys": ["new"]}, cache_control=text),
    ):
        reply.check_problem(400, "bad_request")


@pytest.mark.parametrize(("others", "arrow"), [(MOST_PARTS - 1, True), (MOST_PARTS, False)])
def test_a_list_of_types_is_read_as_far_as_anybody_writes_one(others: int, arrow: bool) -> None:
    assert wants_arrow({b"accept": b"a/b," * others + bodies.ARROW.encode()}) == arrow


AGES = {"new": 1.0, "old": 9.0, "stale": 12.0, "expired": 20.0}
DIRECTIVES = [
    ("", "fresh fresh stale expired"),
    ("max-age=1", "fresh expired expired expired"),
    ("max-age=11", "fresh fresh expired expired"),
    ("max-age=100", "fresh fresh stale expired"),
    ("min-fresh=1", "fresh fresh expired expired"),
    ("min-fresh=2", "fresh expired expired expired"),
    ("min-fresh=11", "expired expired expired expired"),
    ("max-stale=2", "fresh fresh stale expired"),
    ("max-stale=1", "fresh fresh expired expired"),
    ("max-stale=1000", "fresh fresh stale expired"),
    ("max-stale", "fresh fresh stale expired"),
    ("max-age=9, min-fresh=5", "fresh expired expired expired"),
]


def statuses(world: World, control: str) -> list[list[str]]:
    """Status, or reason, of each row by one request for it, by one for all as JSON, as Arrow, and
    by one of several views."""
    headers = {"cache_control": control} if control else {}
    single = []
    for key in AGES:
        # to be read, and again to be kept
        world.get(ROW + key + "?fallback=false")
        reply = world.get(ROW + key, **headers)
        single.append(
            reply.json["status"] if reply.status == 200 else reply.json["type"].rpartition(":")[2]
        )
    rows = world.post(LOOKUP, {"keys": list(AGES)}, **headers).json["rows"]
    table = world.post(LOOKUP, {"keys": list(AGES)}, accept=bodies.ARROW, **headers).arrow
    several = world.post(
        "/v1/lookup", {"requests": [{"view": "things", "keys": list(AGES)}]}, **headers
    ).json["responses"][0]
    return [
        single,
        [row.get("reason", row["status"]) for row in rows],
        [
            reason or status
            for status, reason in zip(
                table["status"].to_pylist(), table["reason"].to_pylist(), strict=True
            )
        ],
        [row.get("reason", row["status"]) for row in several["rows"]],
    ]


@pytest.mark.parametrize(("control", "expected"), DIRECTIVES)
def test_rows_older_than_cache_control_allows_are_missing(
    tmp_path: Path, control: str, expected: str
) -> None:
    world = World(tmp_path, AGES, fallback=False)
    assert statuses(world, control) == [expected.split()] * 4


@pytest.mark.parametrize(("control", "expected"), DIRECTIVES)
def test_and_are_computed_where_a_model_stands_behind_them(
    tmp_path: Path, control: str, expected: str
) -> None:
    world = World(tmp_path, AGES)
    world.model.known = frozenset(AGES)
    assert statuses(world, control) == [expected.replace("expired", "computed").split()] * 4


def test_no_cache_has_the_model_compute_or_takes_the_store(tmp_path: Path) -> None:
    world = World(tmp_path / "a", AGES)
    world.model.known = frozenset({"new", "old"})
    assert (
        statuses(world, "no-cache")
        == [["computed", "computed", "unknown_entity", "unknown_entity"]] * 4
    )
    reply = world.get(ROW + "new", cache_control="no-cache")
    assert reply.headers["cache-status"] == 'precompute; fwd=request; fwd-status=200; detail="v1"'
    assert world.get(ROW + "new?fallback=false", cache_control="no-cache").json["status"] == "fresh"
    assert (
        statuses(World(tmp_path / "b", AGES, fallback=False), "no-cache")
        == [["fresh", "fresh", "stale", "expired"]] * 4
    )


def test_only_if_cached_never_calls_the_model(tmp_path: Path) -> None:
    world = World(tmp_path, AGES)
    world.model.known = frozenset({*AGES, "nobody"})
    assert statuses(world, "only-if-cached") == [["fresh", "fresh", "stale", "expired"]] * 4
    assert statuses(world, "only-if-cached, no-cache") == [["expired"] * 4] * 4
    for key, control in (
        ("expired", "only-if-cached"),
        ("nobody", "only-if-cached"),
        ("old", "only-if-cached, max-age=1"),
    ):
        assert world.get(ROW + key, cache_control=control).status == 504
    assert world.model.asked == []


def test_the_strictest_of_body_query_and_header_counts(tmp_path: Path) -> None:
    deadlines = [LookupOptions(deadline_ms=ms) for ms in (40.0, None, 30.0)]
    merged = [both(body, query).deadline_ms for body in deadlines for query in deadlines]
    assert merged == [40.0, 40.0, 30.0, 40.0, None, 30.0, 30.0, 30.0, 30.0]
    world = World(tmp_path, {"new": 5.0}, fallback=False)
    for body, query, header, status in (
        (6, 7, 8, "fresh"),
        (4, 7, 8, "missing"),
        (6, 4, 8, "missing"),
        (6, 7, 4, "missing"),
        (None, 4, None, "missing"),
        (None, 5, None, "fresh"),
    ):
        headers = {} if header is None else {"cache_control": f"max-age={header}"}
        reply = world.post(
            f"{LOOKUP}?max_age_s={query}", {"keys": ["new"], "max_age_s": body}, **headers
        )
        assert reply.json["rows"][0]["status"] == status, (body, query, header)


@pytest.mark.parametrize(
    "path",
    [
        ROW + "new?max_age=1",
        LOOKUP + "?keys=1",
        LOOKUP + "?max_age_s=1&max_age_s=2",
        SEARCH + "?k=1",
        "/v1/views?x",
        "/v1/lookup?features=a",
    ],
)
def test_query_parameters_that_are_not_known_are_refused(tmp_path: Path, path: str) -> None:
    world = World(tmp_path, {"new": 0})
    body = {"vector": [1, 2]} if "search" in path else {"keys": ["new"]}
    reply = (
        world.get(path)
        if "rows" in path or path.startswith("/v1/views?")
        else world.post(path, body)
    )
    reply.check_problem(400, "bad_request")


# ---- when it is judged


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(0.5, ("fresh", 9.5)), (2.0, ("stale", 11.0)), (8.0, ("missing", None))],
)
def test_freshness_is_that_of_the_time_when_the_answer_is_sent(
    tmp_path: Path, seconds: float, expected: Any
) -> None:
    """A hit waits beside a miss."""
    for path, form in ((LOOKUP, bodies.JSON), (LOOKUP, bodies.ARROW), ("/v1/lookup", bodies.JSON)):
        world = World(tmp_path / form / path.strip("/"), {"hit": 9.0})
        world.model.seconds, world.model.known = seconds, frozenset({"miss"})
        body: Any = {"keys": ["hit", "miss"]}
        if path == "/v1/lookup":
            # the hit's own lookup waits for nothing, and is answered with the other
            body = {
                "requests": [
                    {"view": "things", "keys": ["hit"]},
                    {"view": "things", "keys": ["miss"]},
                ]
            }
        reply = world.post(path, body, accept=form)
        if form == bodies.ARROW:
            rows = reply.arrow.to_pylist()
        else:
            rows = (
                reply.json["rows"]
                if path == LOOKUP
                else [answer["rows"][0] for answer in reply.json["responses"]]
            )
        assert [(row["status"], row["age_s"]) for row in rows] == [expected, ("computed", 0.0)]


def test_what_was_read_first_is_judged_when_what_was_read_last_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path, {"row": 9.0}, fallback=False)
    read = world.lookup.online.read

    def slowly(view: str, keys: Sequence[bytes]) -> Any:
        # as over a network that has its bad moments
        world.now_s += 1.0
        return read(view, keys)

    monkeypatch.setattr(world.lookup.online, "read", slowly)
    reply = world.post("/v1/lookup", {"requests": [{"view": "things", "keys": ["row"]}] * 7})
    assert [row["status"] for answer in reply.json["responses"] for row in answer["rows"]] == [
        "missing"
    ] * 7


def test_caches_learn_the_same_of_a_row_on_every_path(tmp_path: Path) -> None:
    """A stale row, read and then kept, as JSON, as Arrow, as a 304, and one that was computed; not
    of POST, which no cache keeps unasked (RFC 9110 §9.3.3)."""
    world = World(tmp_path, {"stale": 12.0, "old": 9.0})
    world.model.known = frozenset({"nobody"})
    rows = [
        world.get(ROW + "old"),
        world.get(ROW + "old"),
        world.get(ROW + "stale", accept=bodies.ARROW),
        world.get(ROW + "nobody"),
    ]
    rows.append(world.get(ROW + "stale", if_none_match=world.get(ROW + "stale").headers["etag"]))
    assert [(reply.status, reply.headers["age"]) for reply in rows] == [
        (200, "9"),
        (200, "9"),
        (200, "12"),
        (200, "0"),
        (304, "12"),
    ]
    assert {reply.headers["cache-control"] for reply in rows} == {
        "private, max-age=10, stale-while-revalidate=5, stale-if-error=5"
    }
    assert world.get(ROW + "none").headers["cache-control"] == "no-store"
    for path in ("/v1/views", "/readyz", "/livez", *OPERATORS):
        assert world.get(path).headers["cache-control"] == "no-store", path
    several = {"requests": [{"view": "things", "keys": ["old"]}]}
    for path, body in (
        (LOOKUP, {"keys": ["old"]}),
        (SEARCH, {"vector": [1, 2]}),
        ("/v1/lookup", several),
    ):
        for accept in (bodies.JSON, bodies.ARROW):
            reply = world.post(path, body, accept=accept)
            assert (reply.status, reply.headers.keys() & {"cache-control", "age", "expires"}) == (
                200,
                set(),
            ), path


@pytest.mark.parametrize("loaded", [True, False])
def test_readyz_and_the_problem_say_whether_the_model_is_loaded(
    tmp_path: Path, loaded: bool
) -> None:
    world = World(tmp_path, {"new": 1.0})
    world.app = create_app(
        world.lookup, fallback_ready=lambda pointer: loaded and pointer.view.name == "things"
    )
    assert (
        f'precompute_fallback_up{{view="things"}} {float(loaded)}'.encode()
        in world.get("/metrics").body
    )
    assert world.get("/readyz").json["fallback"] == {"things": "ready" if loaded else "not ready"}
    for late in (world.get(ROW + "late"), world.post(SEARCH, {"inputs": {"x": 1.0}})):
        late.check_problem(504, "deadline")
        assert ("its model is not loaded yet: GET /readyz" in late.json["detail"]) is not loaded


def test_a_304_never_hides_that_a_row_has_become_stale(tmp_path: Path) -> None:
    world = World(tmp_path, {"row": 8.0}, fallback=False)
    for accept in (bodies.JSON, bodies.ARROW):
        world.now_s = PUBLISHED
        first = world.get(ROW + "row", accept=accept)
        world.now_s += 2.0
        again = world.get(ROW + "row", accept=accept, if_none_match=first.headers["etag"])
        assert (
            again.status,
            again.body,
            again.headers["age"],
            "content-length" in again.headers,
        ) == (304, b"", "10", False)
        world.now_s += 1.0
        changed = world.get(ROW + "row", accept=accept, if_none_match=first.headers["etag"])
        assert (changed.status, changed.headers["etag"] == first.headers["etag"]) == (200, False)
        stale = world.get(ROW + "row", accept=accept, if_none_match=changed.headers["etag"])
        assert (stale.status, stale.headers["age"], stale.headers["cache-status"]) == (
            304,
            "11",
            'precompute; hit; ttl=-1; detail="v1"',
        )
        world.now_s += 5.0
        world.get(
            ROW + "row", accept=accept, if_none_match=f"{first.headers['etag']}, *"
        ).check_problem(404, "expired")


def test_a_row_dated_ahead_has_the_age_that_is_known_and_is_counted(tmp_path: Path) -> None:
    world = World(tmp_path, {"ahead": -1000.0}, fallback=False)
    world.now_s += 4.0
    reply = world.get(ROW + "ahead")
    assert (reply.json["status"], reply.json["age_s"], reply.headers["age"]) == ("fresh", 4.0, "4")
    # no later than a Date that may be up to 2 s behind
    assert reply.headers["last-modified"] == "Tue, 14 Nov 2023 22:13:22 GMT"
    assert b'precompute_future_rows_total{view="things"} 1.0' in world.get("/metrics").body
    world.now_s += 12.0
    world.get(ROW + "ahead").check_problem(404, "expired")


@pytest.mark.parametrize(
    ("age_s", "caching", "fresh_s", "stale_s", "in_error_s"),
    [
        (0, Caching(), 60, 0, 172_740),
        (3_000, Caching(), 3_060, 0, 169_740),
        # the TTL ends before, and what is left the row may be stale
        (86_390, Caching(), 86_400, 50, 86_400),
        (90_000, Caching(), 86_400, 3_660, 86_400),
        (172_790, Caching(), 86_400, 86_400, 86_400),
        (3_000, Caching(300, shared=True), 3_300, 0, 169_500),
        (3_000, Caching(0, shared=True), 3_000, 0, 169_800),
    ],
)
def test_no_cache_between_outlives_a_rollback_beyond_its_time(
    age_s: int, caching: Caching, fresh_s: int, stale_s: int, in_error_s: int
) -> None:
    view = FeatureView(
        "things", ("id",), (Feature("x", "float32"),), ttl_s=86_400, stale_for_s=86_400
    )
    told = f"max-age={fresh_s}, stale-while-revalidate={stale_s}, stale-if-error={in_error_s}"
    whose = "" if caching.shared else "private, "
    assert caching.lifetime(view, age_s) == (b"cache-control", (whose + told).encode())
    # as a cache counts (RFC 9111 §4.2): how long it may answer by itself, from when it has fetched
    # the row
    assert max(0, fresh_s + stale_s - age_s) <= caching.most_s
