"""Services: several views joined to one row for each entity, alike in process, by JSON, by Arrow
and by the clients; and what they were trained with."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import yaml

from precompute.store.answers.lookup import MAX_KEYS, Lookup
from precompute.store.answers.service import PART_FIELDS, Service, ServicePart
from precompute.store.client import Client
from precompute.store.errors import ConfigError, OnlineStoreError, PrecomputeError, RequestError
from precompute.store.history import get_historical_features
from precompute.store.wire import bodies
from tests.clients import opened
from tests.scene import Scene
from tests.server import Server, damage_row, make_folder, slow, write_numbers
from tests.store.test_api import arrow, arrow_table

PAIRS = {"sql": "SELECT * FROM (VALUES (1, '50%', 1.0), (2, 'a/b', 2.0)) AS t(id, item, x)"}
RENAMED = {"sql": "SELECT id AS user_id, x FROM read_parquet('${data}/data.parquet')"}
EVERYTHING = {
    "name": "everything",
    "entity": ["id", "item"],
    "views": {
        "numbers": ["vector", "double"],
        "plain": {"features": ["double"], "defaults": {"double": -1.5}},
        "stale": {"features": ["double"]},
        "limited": {"features": ["double"], "max_age": "1ms"},
        "expired": {"features": ["double", "vector"], "defaults": {"vector": [0, 0, 0, 1]}},
        "spoilt": ["double"],
        "grown": {"features": ["gone", "vector", "double"], "defaults": {"gone": 1.0}},
        "gone_only": ["gone"],
        "pairs": ["double"],
        "keyed": {"features": ["double"], "defaults": {"double": 7.0}},
        "unpublished": {"features": ["double", "label"], "defaults": {"double": 0.5}},
        "renamed": ["double"],
    },
}
PLAIN: dict[str, Any] = {"fallback": None, "index": None}
SERVICES = {
    "everything": EVERYTHING,
    "one": {"name": "one", "entity": ["id"], "views": {"numbers": ["vector"]}},
    "hasty": {
        "name": "hasty",
        "entity": ["id"],
        "views": {"slow_a": ["double"], "slow_b": ["double"], "numbers": ["double"]},
        "deadline": "200ms",
    },
    "wide": {
        "name": "wide",
        "entity": ["id"],
        "views": {"numbers": ["vector"], "huge": ["vector"]},
    },
    "wrong": {
        "name": "wrong",
        "entity": ["id"],
        "views": {"numbers": ["vector"]},
        "max_ages": "1h",
    },
}


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    """Rows 1, 2, 3 are published; 9 and 13 came into the source since, and the model fails on 13.
    Row 2 of the spoilt view was damaged."""
    folder = tmp_path_factory.mktemp("services")
    views: dict[str, dict[str, Any]] = {
        "numbers": slow(0, fail_on=13),
        "plain": PLAIN,
        "stale": PLAIN | {"ttl": 0},
        "limited": PLAIN,
        "expired": PLAIN | {"ttl": 0, "stale_for": 0},
        "spoilt": PLAIN,
        "grown": PLAIN,
        "gone_only": PLAIN,
        "pairs": PLAIN | {"entity": ["id", "item"], "source": PAIRS},
        "keyed": PLAIN | {"entity": ["user_id"], "source": RENAMED},
        "unpublished": PLAIN,
        "slow_a": slow(0.5, version=2),
        "slow_b": slow(0.5, version=2),
        "huge": PLAIN
        | {
            "features": {"vector": {"dtype": "float32", "dim": 4096}},
            "model": {"use": "tests.models:Doubler", "args": {"dim": 4096}},
        },
    }
    project = make_folder(
        folder, views, serve={"bind": "127.0.0.1:0", "limits": {"answer_bytes": 2**20}}
    )
    (folder / "services").mkdir()
    for name, service in SERVICES.items():
        (folder / "services" / f"{name}.yaml").write_text(yaml.safe_dump(service, sort_keys=False))
    project.publish_all(*(name for name in project.views if name != "unpublished"))
    damage_row(project, "spoilt", 2.0)
    write_numbers(folder, [1, 2, 3, 9, 13])
    return project.reread()


@pytest.fixture(scope="module")
def server(project: Scene) -> Iterator[Server]:
    with Server(project.folder) as server:
        yield server


@pytest.fixture(scope="module", params=["blocking", "async"])
def client(request: pytest.FixtureRequest, server: Server) -> Iterator[Client]:
    with opened(request.param, server.url) as client:
        yield client


def services_of(project: Scene) -> list[Service]:
    return [found for found in project.services.values() if isinstance(found, Service)]


@pytest.fixture(scope="module")
def lookup(project: Scene) -> Iterator[Lookup]:
    """The same views, services and models in this process."""
    with project.answering() as lookup:
        lookup.services = {service.name: service for service in services_of(project)}
        yield lookup


def of_table(table: pa.Table) -> list[dict[str, Any]]:
    """The rows of a table but for their ages, and for when those were computed that are computed
    for each answer."""
    rows = table.to_pylist()
    for row in rows:
        for name in [name for name in row if name.endswith("__age_s")]:
            view, age_s = name.removesuffix("__age_s"), row.pop(name)
            assert (age_s is None) == (row[f"{view}__status"] == "missing")
            assert age_s is None or 0 <= age_s < 3600
            if row[f"{view}__source"] == "fallback":
                del row[f"{view}__computed_at"]
    return rows


def of_rows(answer: Any, service: Service) -> list[dict[str, Any]]:
    """The same of an answer in JSON, which has the features of a view that is missing only where
    something stands in for them."""
    rows = []
    for reply in answer["rows"]:
        row = dict(reply["entity"])
        for part in service.parts:
            view = reply["views"][part.view]
            at = view["computed_at"]
            said = {name: view.get(name) for name in PART_FIELDS} | {
                "computed_at": None if at is None else datetime.fromisoformat(at)
            }
            for name, value in (
                said | {name: (view["features"] or {}).get(name) for name in part.features}
            ).items():
                row[f"{part.view}__{name}"] = value
        rows.append(row)
    return of_table(pa.Table.from_pylist(rows))


ENTITIES: list[dict[str, list[Any]]] = [
    {"id": [1, 2, 3], "item": ["50%", "a/b", "x"]},
    {"id": ["1", "9", "13", "77", "1"], "item": [1, 2, 3, 4, "50%"]},
    {"id": [1, None, 2.5, "", "x" * 600, "\0", True, [1], {}], "item": ["50%"] * 8 + [None]},
    {"item": ["a/b", "50%"], "id": [2, 2]},
]


@pytest.mark.parametrize("entities", ENTITIES, ids=["there", "missing", "bad", "turned round"])
def test_all_paths_answer_alike(
    lookup: Lookup, server: Server, client: Client, entities: dict[str, list[Any]]
) -> None:
    service = lookup.services["everything"]
    table = lookup.service("everything", entities)
    assert tuple(table.column_names) == service.columns
    alike = of_table(table)
    reply = server.post("/v1/services/everything", {"entities": entities})
    assert reply.status == 200, reply
    assert of_rows(reply.json, service) == alike
    streamed = server.post("/v1/services/everything", {"entities": entities}, accept=bodies.ARROW)
    assert of_table(streamed.arrow) == alike
    by_client = client.service("everything", entities)
    assert of_table(by_client) == alike
    assert by_client.schema.equals(table.schema)
    assert (
        of_rows(
            json.loads(msgspec.json.encode(client.service_rows("everything", entities))), service
        )
        == alike
    )
    # each view says what its own lookup says
    for part, key in (
        (part, "id")
        for part in service.parts
        if part.view in ("numbers", "stale", "spoilt", "limited")
    ):
        alone = lookup.get(part.view, entities[key], max_age_s=service.oldest_s(part))
        for name in ("status", "source", "reason", *part.features):
            assert table[f"{part.view}__{name}"].to_pylist() == alone[name].to_pylist(), (
                part.view,
                name,
            )


def test_inputs_come_along_by_view(lookup: Lookup, server: Server, client: Client) -> None:
    entities, inputs = {"id": [1, 500], "item": ["x", "x"]}, {"numbers": {"500": {"x": 2.5}}}
    table = lookup.service("everything", entities, inputs=inputs, deadline_ms=20_000)
    assert table["numbers__double"].to_pylist() == [2.0, 5.0]
    by_client = client.service(
        "everything", entities, inputs={"numbers": {500: {"x": 2.5}}}, deadline_ms=20_000
    )
    assert of_table(by_client) == of_table(table)
    assert table["numbers__status"].to_pylist() == ["fresh", "computed"]
    row = server.post(
        "/v1/services/everything", {"entities": entities, "inputs": inputs, "fallback": False}
    ).json["rows"][1]
    assert row["views"]["numbers"]["reason"] == "unknown_entity"


def said(row: dict[str, Any], view: str) -> tuple[Any, ...]:
    return (
        row[f"{view}__status"],
        row[f"{view}__source"],
        row[f"{view}__reason"],
        row.get(f"{view}__double"),
    )


def test_a_view_that_cannot_answer_fails_no_other(lookup: Lookup, server: Server) -> None:
    first, second, ninth = lookup.service(
        "everything", {"id": [1, 2, 9], "item": ["50%", "x", "x"]}
    ).to_pylist()
    assert said(first, "numbers") == ("fresh", "store", None, 2.0)
    assert said(ninth, "numbers") == ("computed", "fallback", None, 18.0)
    assert said(ninth, "plain") == ("missing", "default", "unknown_entity", -1.5)
    assert said(first, "stale") == ("stale", "store", None, 2.0)
    assert said(first, "limited") == ("missing", None, "expired", None)
    assert said(first, "expired") == ("missing", "default", "expired", None)
    assert first["expired__vector"] == [0, 0, 0, 1]
    assert said(second, "spoilt") == ("missing", None, "damaged", None)
    assert said(first, "grown") == ("fresh", "store", None, 2.0)
    assert first["grown__gone"] is None
    assert said(first, "gone_only") == ("fresh", "store", None, None)
    assert (said(first, "pairs"), said(second, "pairs")) == (
        ("fresh", "store", None, 2.0),
        ("missing", None, "unknown_entity", None),
    )
    assert said(first, "keyed") == ("missing", "default", "other_entity", 7.0)
    assert said(first, "unpublished") == ("missing", "default", "unknown_view", 0.5)
    assert said(first, "renamed") == ("missing", None, "unknown_view", None)

    views = server.post("/v1/services/everything", {"entities": {"id": [1], "item": ["x"]}}).json[
        "views"
    ]
    assert views["grown"]["unknown_features"] == views["gone_only"]["unknown_features"] == ["gone"]
    assert views["keyed"]["problem"]["type"] == "urn:precompute:problem:other_entity"
    assert "user_id" in views["keyed"]["problem"]["detail"]
    assert views["renamed"]["problem"]["type"] == "urn:precompute:problem:unknown_view"
    assert views["numbers"] == {
        "snapshot": 1,
        "model": lookup.get("numbers", [1])["model"][0].as_py(),
        "ttl_s": 3600.0,
    }


@pytest.mark.parametrize("over_http", [False, True])
def test_all_views_have_one_deadline(lookup: Lookup, server: Server, over_http: bool) -> None:
    """Of the service, or of the request; what is stored is there all the same."""
    views = ("slow_a", "slow_b", "numbers")
    with Client(server.url) as client:
        ask: Any = client.service if over_http else lookup.service

        def row(key: int, **words: Any) -> Any:
            return ask("hasty", {"id": [key]}, **words).to_pylist()[0]

        for words in ({}, {"deadline_ms": 100}):
            late = row(9, **words)
            assert {late[f"{view}__reason"] for view in views[:2]} == {"deadline"}
            assert late["numbers__status"] in ("computed", "missing")
            assert [row(1, **words)[f"{view}__double"] for view in views] == [2.0] * 3
        patient = row(9, deadline_ms=20_000)
        assert [patient[f"{view}__double"] for view in views] == [18.0] * 3
        assert row(9, fallback=False)["numbers__reason"] == "unknown_entity"


REFUSED: list[tuple[str, Any, int, str]] = [
    ("nobody", {"entities": {"id": [1]}}, 404, "unknown_service"),
    ("wrong", {"entities": {"id": [1]}}, 404, "unknown_service"),
    ("one", {"entities": {}}, 400, "bad_entities"),
    ("one", {"entities": {"id": [1], "item": [1]}}, 400, "bad_entities"),
    ("one", {"entities": {"user": [1]}}, 400, "bad_entities"),
    ("everything", {"entities": {"id": [1, 2], "item": [1]}}, 400, "bad_entities"),
    ("one", {"entities": {"id": []}}, 400, "no_keys"),
    ("one", {"entities": {"id": [1] * (MAX_KEYS + 1)}}, 413, "too_many_keys"),
    ("one", {"entities": {"id": [1]}, "deadline_ms": -1}, 400, "bad_request"),
    ("one", {"entities": {"id": [1]}, "max_age_s": -1}, 400, "bad_request"),
    ("one", {"entities": {"id": [1]}, "features": ["vector"]}, 422, "bad_request"),
    ("one", {"entities": {"id": 1}}, 422, "bad_request"),
    ("one", {"entities": {"id": [1]}, "inputs": {"numbrs": {"1": {"x": 1}}}}, 400, "bad_inputs"),
    ("one", {"entities": {"id": [1]}, "inputs": {"numbers": {"1": {"y": 1}}}}, 400, "bad_inputs"),
    ("one", {"entities": {"id": [1]}, "inputs": {"1": {"x": 1}}}, 422, "bad_request"),
    (
        "everything",
        {"entities": {"id": [1], "item": ["x"]}, "inputs": {"plain": {"1": {"x": 1}}}},
        400,
        "no_fallback",
    ),
    ("one", b"no json", 400, "bad_json"),
    ("one?features=vector", {"entities": {"id": [1]}}, 400, "bad_request"),
    ("wide", {"entities": {"id": [1] * 900}}, 413, "answer_too_large"),
]


@pytest.mark.parametrize(("path", "body", "status", "code"), REFUSED)
def test_what_is_too_much_or_does_not_fit_is_refused(
    server: Server, path: str, body: Any, status: int, code: str
) -> None:
    for accept in (bodies.JSON, bodies.ARROW):
        server.post(f"/v1/services/{path}", body, accept=accept).check_problem(status, code)
    assert (
        server.post("/v1/services/one", {"entities": {"id": [1]}}).json["rows"][0]["views"][
            "numbers"
        ]["status"]
        == "fresh"
    )


def test_the_wrong_method_or_route_is_refused(server: Server) -> None:
    server.get("/v1/services/one").check_problem(405, "method_not_allowed")
    server.post("/v1/services", {}).check_problem(405, "method_not_allowed")
    server.post("/v1/services/one/lookup", {}).check_problem(404, "no_such_route")
    assert [one["service"] for one in server.get("/v1/services").json["services"]] == [
        "everything",
        "hasty",
        "one",
        "wide",
    ]


def test_entities_come_as_arrow_and_as_tables(
    lookup: Lookup, server: Server, client: Client
) -> None:
    table = pa.table(
        {"item": pa.array(["50%", None]).dictionary_encode(), "id": pa.array([1, 2], pa.int16())}
    )
    alike = of_table(lookup.service("everything", {"id": [1, 2], "item": ["50%", None]}))
    posted = server.post(
        "/v1/services/everything",
        arrow_table(table),
        content_type=bodies.ARROW,
        accept=bodies.ARROW,
    )
    assert of_table(posted.arrow) == alike
    for entities in (
        table,
        table.to_pandas(),
        {"id": np.array([1, 2]), "item": pd.Series(["50%", None])},
    ):
        assert (
            of_table(lookup.service("everything", entities))
            == of_table(client.service("everything", entities))
            == alike
        )
    server.post(
        "/v1/services/everything", arrow(["1"], "id"), content_type=bodies.ARROW
    ).check_problem(400, "bad_arrow")
    twice = pa.table([[1], [2], ["x"]], names=["id", "id", "item"])
    server.post(
        "/v1/services/everything", arrow_table(twice), content_type=bodies.ARROW
    ).check_problem(400, "bad_arrow")
    for ask in (lookup.service, client.service):
        for wrong in (
            [1, 2],
            "ada",
            {"id": "ada", "item": ["x"]},
            twice,
            pd.DataFrame([[1, 2, "x"]], columns=["id", "id", "item"]),
        ):
            with pytest.raises(RequestError):
                ask("everything", wrong)


def test_large_answers_come_in_pieces(server: Server, lookup: Lookup, client: Client) -> None:
    entities = {"id": ["1", "2", "3"] * 40, "item": ["50%"] * 120}
    alike = of_table(lookup.service("everything", entities))
    assert (
        of_rows(
            server.post("/v1/services/everything", {"entities": entities}).json,
            lookup.services["everything"],
        )
        == alike
    )
    wide = {"id": ["1", "2", "3"] * 5}
    reply = server.post("/v1/services/wide", {"entities": wide})
    assert len(reply.body) > 256 * 1024
    assert (
        of_rows(reply.json, lookup.services["wide"])
        == of_table(client.service("wide", wide))
        == of_table(lookup.service("wide", wide))
    )


class Counted:
    """An online store that counts how often each view is read, and fails for some."""

    def __init__(self, store: Any, failing: frozenset[str] = frozenset()) -> None:
        self._store, self._failing, self.reads = store, failing, list[str]()

    def read(self, view: str, keys: Any) -> Any:
        self.reads.append(view)
        if view in self._failing:
            raise OnlineStoreError("the host of the store is down")
        return self._store.read(view, keys)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def test_each_view_is_read_once_and_a_store_that_fails_is_said(project: Scene) -> None:
    with project.online_store() as store:
        counted = Counted(store)
        lookup = Lookup(counted, services=services_of(project))  # type: ignore[arg-type]
        for _ in range(2):
            counted.reads.clear()
            lookup.service("everything", {"id": [1, 2], "item": ["50%", "x"]})
            assert sorted(counted.reads) == sorted(set(counted.reads))
        failing = Lookup(Counted(store, frozenset({"slow_a"})), services=services_of(project))  # type: ignore[arg-type]
        (row,) = failing.service("hasty", {"id": [1]}).to_pylist()
        assert said(row, "slow_a") == ("missing", None, "store_unavailable", None)
        assert said(row, "slow_b") == ("fresh", "store", None, 2.0)
        down = Lookup(Counted(store, frozenset({"numbers"})), services=services_of(project))  # type: ignore[arg-type]
        mixed = Service(
            "mixed",
            ("id",),
            (ServicePart("numbers", ("double",)), ServicePart("renamed", ("double",))),
        )
        for service in ("one", mixed):
            with pytest.raises(OnlineStoreError, match="is down"):
                down.service(service, {"id": [1]})


DEFINITION = Service(
    "s",
    ("id",),
    (ServicePart("a", ("x", "y"), 60.0, {"x": 1.0}), ServicePart("b", ("x",))),
    3600.0,
    100.0,
)
FIRST, SECOND = DEFINITION.parts
OTHERS = [
    dataclasses.replace(DEFINITION, **change)
    for change in (
        {"name": "t"},
        {"entity": ("id", "item")},
        {"parts": (FIRST,)},
        {"parts": (dataclasses.replace(FIRST, features=("y", "x")), SECOND)},
        {"parts": (dataclasses.replace(FIRST, max_age_s=61.0), SECOND)},
        {"parts": (dataclasses.replace(FIRST, defaults={"x": 2.0}), SECOND)},
        {"max_age_s": None},
        {"deadline_ms": None},
    )
]


def test_the_version_is_that_of_the_definition() -> None:
    again = Service.from_json(json.loads(json.dumps(DEFINITION.to_json())))
    assert again.fingerprint == DEFINITION.fingerprint
    assert len({one.fingerprint for one in (DEFINITION, *OTHERS)}) == 1 + len(OTHERS)


def test_a_request_may_ask_for_fresher_rows_but_never_for_older_ones() -> None:
    for part, own in ((FIRST, 60.0), (SECOND, 3600.0)):
        asked = [None, own / 2, own * 2]
        assert [DEFINITION.oldest_s(part, limit) for limit in asked] == [own, own / 2, own]


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        (("S", ("id",), (ServicePart("a", ("x",)),)), "'S' is no name"),
        (("s", (), (ServicePart("a", ("x",)),)), "has an entity"),
        (("s", ("id",), ()), "1 to 32 views"),
        (("s", ("id",), tuple(ServicePart(f"a{i}", ("x",)) for i in range(33))), "1 to 32 views"),
        (("s", ("id",), (ServicePart("a", ()),)), "features of each"),
        (
            ("s", ("id",), (ServicePart("a", ("x",)), ServicePart("a", ("y",)))),
            "names a view twice",
        ),
        (("s", ("id",), (ServicePart("a", ("x", "x")),)), "two columns 'a__x'"),
        (("s", ("a__x",), (ServicePart("a", ("x",)),)), "two columns 'a__x'"),
        (("s", ("id",), (ServicePart("a", ("status",)),)), "two columns 'a__status'"),
        (
            ("s", ("id",), (ServicePart("a", ("x",), defaults={"y": 1}),)),
            "'y' is no feature that 's' takes of a",
        ),
        (("s", ("id",), (ServicePart("a", ("x",)),), None, 61_000.0), "at most 60 s"),
    ],
)
def test_a_definition_that_cannot_be_is_refused(wrong: tuple[Any, ...], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        Service(*wrong)


def test_a_training_set_is_what_was_served(project: Scene, tmp_path: Path) -> None:
    """Features and times of each row are those of the answer that was given then, from the store;
    through three publishings and a rollback."""
    scene = make_folder(
        tmp_path,
        {
            "numbers": PLAIN | {"fallback": {"enabled": True}},
            "plain": PLAIN | {"ttl": 0, "stale_for": "1h"},
        },
    )
    parts = (
        ServicePart("numbers", ("double", "vector"), defaults={"double": -1.0}),
        ServicePart("plain", ("vector", "double"), 3000.0, {"vector": [9, 8, 7, 6], "double": 0.5}),
    )
    service = Service("both", ("id",), parts, 3500.0)
    ids = [1, 2, 3, 4, 77, None]
    served, times = list[pa.Table](), list[datetime]()

    def serve() -> None:
        with scene.lookup() as lookup:
            served.append(lookup.service(service, {"id": ids}))
        times.append(datetime.now(UTC))

    scene.publish_all()
    serve()
    write_numbers(tmp_path, [1, 3, 4])
    scene.publish_all()
    serve()
    write_numbers(tmp_path, [2, 4], 5.0)
    scene.run("numbers", accept=("rows", "constant", "shape", "computed", "moved"))
    serve()
    scene.rollback("numbers")
    serve()
    rows = pa.table(
        {
            "id": pa.array(ids * len(times)),
            "event_timestamp": pa.array(
                [at for at in times for _ in ids], pa.timestamp("us", "UTC")
            ),
        }
    )
    trained = get_historical_features(scene.offline, rows, service=service)
    assert trained.schema.metadata[b"version"].decode() == service.fingerprint
    columns = [name for name in trained.column_names if "__" in name]
    assert columns == [
        f"{part.view}__{name}" for part in parts for name in (*part.features, "computed_at")
    ]
    assert (
        trained.select(columns).to_pylist()
        == pa.concat_tables(
            [one.select(columns).replace_schema_metadata() for one in served]
        ).to_pylist()
    )
    assert len({str(row) for row in trained.select(columns).to_pylist()}) > 8

    # a row of an hour ago was not there; nor is one that is too old for the service
    late = pa.table(
        {
            "id": [1],
            "event_timestamp": pa.array(
                [times[-1] + timedelta(seconds=3200)], pa.timestamp("us", "UTC")
            ),
        }
    )
    (row,) = get_historical_features(scene.offline, late, service=service).to_pylist()
    assert (row["numbers__double"], row["plain__double"], row["plain__computed_at"]) == (
        2.0,
        0.5,
        None,
    )


@pytest.mark.parametrize(
    ("service", "match"),
    [
        (Service("s", ("id",), (ServicePart("numbers", ("gone",)),)), "no feature 'gone'"),
        (
            Service("s", ("item",), (ServicePart("numbers", ("double",)),)),
            "the key id, and the service the entity item",
        ),
        (Service("s", ("id",), (ServicePart("unpublished", ("double",)),)), "unpublished"),
    ],
)
def test_a_training_set_that_would_lack_a_feature_is_refused(
    project: Scene, service: Service, match: str
) -> None:
    """Where an answer is better with a gap than not at all, training without a word would not
    be."""
    rows = pa.table({"id": [1], "item": ["x"], "event_timestamp": pa.array([datetime.now(UTC)])})
    with pytest.raises(PrecomputeError, match=match):
        get_historical_features(project.offline, rows, service=service)
    with pytest.raises(RequestError, match="name the one or the other"), contextlib.nullcontext():
        get_historical_features(project.offline, rows, ["numbers"], service=service)
