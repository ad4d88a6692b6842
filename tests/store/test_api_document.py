"""The API against its own document, by schemathesis with all of its checks: what conforms is
answered, what does not is refused, all in the forms described."""

from __future__ import annotations

import re
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, settings

from precompute.store.answers.lookup import Lookup
from precompute.store.answers.service import Service, ServicePart
from precompute.store.errors import ConfigError
from precompute.store.http.app import create_app
from precompute.store.http.openapi import Credentials, openapi_document
from precompute.store.http.routes import Handler, Parts, Route, Routes, Who, every_route
from precompute.store.http.telemetry.access_log import route_of
from tests import REPOSITORY
from tests.memory_store import MemoryStore
from tests.world import World

# what it does not know to make, tests/store/test_api.py does
pytestmark = pytest.mark.filterwarnings(
    "ignore:Skipped test cases with unsupported payload media types:UserWarning"
)

EXAMPLES = settings(
    max_examples=25,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)


class Served:
    """The application that is asked: an empty one while the tests are collected, then one with a
    view."""

    app = create_app(Lookup(MemoryStore()))

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self.app(scope, receive, send)


SERVED = Served()


def document_of(served: Served, real_views: bool = False) -> Any:
    """The document as it is served; of real views, requests are for the one that is there."""
    document = schemathesis.openapi.from_asgi("/openapi.json", served)
    # too many keys, or too long a body, is a refusal as good as any
    document.config.checks.negative_data_rejection.expected_statuses.append("413")
    # a deadline that passes, or a model that is down, is an answer of the document, and no crash
    document.config.checks.not_a_server_error.expected_statuses += ["502", "503", "504"]
    # which features it has, and which inputs, is not the document's to tell
    document.config.checks.positive_data_acceptance.enabled = not real_views
    return document


ANY, OF_A_VIEW = document_of(SERVED), document_of(SERVED, True)


@OF_A_VIEW.hook
def map_path_parameters(_: Any, parameters: Any) -> Any:
    return parameters and {
        name: "things" if name in ("view", "service") else value
        for name, value in parameters.items()
    }


@OF_A_VIEW.hook
def map_body(_: Any, body: Any) -> Any:
    for one in body.get("requests") or () if isinstance(body, dict) else ():
        if isinstance(one, dict) and isinstance(one.get("view"), str):
            one["view"] = "things"
    if isinstance(body, dict) and isinstance(entities := body.get("entities"), dict) and entities:
        body["entities"] = {"id": next(iter(entities.values()))}
    return body


@pytest.fixture(scope="module", autouse=True)
def _serves_a_view(tmp_path_factory: pytest.TempPathFactory) -> None:
    world = World(tmp_path_factory.mktemp("world"), {"new": 1.0, "old": 9.0, "expired": 20.0})
    world.model.known = frozenset({"0", "a", "expired"})
    world.lookup.services["things"] = Service(
        "things", ("id",), (ServicePart("things", ("vector",)), ServicePart("others", ("x",)))
    )
    SERVED.app = world.app


@ANY.parametrize()
@EXAMPLES
def test_what_the_document_describes_is_answered_by_it(case: Any) -> None:
    case.call_and_validate()


@OF_A_VIEW.parametrize()
@EXAMPLES
def test_and_so_it_is_of_a_view_that_is_there(case: Any) -> None:
    case.call_and_validate()


def test_every_route_is_in_the_document_and_has_its_name_in_logs() -> None:
    routes = {(route.path, route.method) for route in every_route()}
    documented = openapi_document()["paths"].items()
    operations = {(path, name.upper()) for path, methods in documented for name in methods}
    assert operations | {("/", "GET"), ("/openapi.json", "GET")} == routes
    assert [path for path, _ in routes if route_of({"raw_path": path.encode()})[0] != path] == []


def handled(parts: Parts) -> Handler:
    raise AssertionError


@pytest.mark.parametrize(
    ("path", "asked", "name", "rest"),
    [
        ("/a", "/a", None, ""),
        ("/a/b.c-d", "/a/b.c-d", None, ""),
        ("/a/{x}", "/a/", "", ""),
        ("/a/{x}", "/a/%2F", "%2F", ""),
        ("/{x}", "/b", "b", ""),
        ("/a/{x}/b", "/a/1/b", "1", ""),
        ("/a/{x}/b/{key}", "/a/1/b/", "1", ""),
        ("/a/{x}/b/{key}", "/a/1/b/2/b/3", "1", "2/b/3"),
        *((path, asked, None, None) for path, asked in (("/a", "/a/"), ("/a", "/A"), ("/a", ""))),
        *(("/a/{x}", asked, None, None) for asked in ("/a", "/a/1/", "/a/1/2")),
        *(("/a/{x}/b", asked, None, None) for asked in ("/a/b", "/a/1/b/", "/a/1/b/2", "/a/1/c")),
        *(("/a/{x}/b/{key}", asked, None, None) for asked in ("/a/1/b", "/a/1/", "/a/1/c/2")),
    ],
)
def test_a_path_leads_to_its_route_alone(
    path: str, asked: str, name: str | None, rest: str | None
) -> None:
    routes = Routes([Route("/z/{other}/b", "GET", handled), Route(path, "GET", handled)])
    found = routes.find(asked.encode())
    if rest is None:
        assert found == (None, None, b"")
    else:
        assert found == (path, None if name is None else name.encode(), rest.encode())


def test_a_fixed_path_is_found_before_a_name() -> None:
    """Since who may ask for it is looked up by the path as it was requested."""
    routes = [Route("/a/{x}", "GET", handled), Route("/a/free", "GET", handled, Who.ANYONE)]
    for both in (routes, routes[::-1]):
        assert Routes(both).find(b"/a/free") == ("/a/free", None, b"")
        assert Routes(both).find(b"/a/fre") == ("/a/{x}", b"fre", b"")


FORM = "a path is fixed, as /v1/greeting, or"


@pytest.mark.parametrize(
    ("route", "why"),
    [
        *(
            (Route(path, "GET", handled), FORM)
            for path in (
                "",
                "a",
                "/a/",
                "/a b",
                "/{x}{y}",
                "/{x}/{y}",
                "/a/{x}/b/c",
                "/{x}/b/{y}/c",
            )
        ),
        # who may ask is looked up by the path as it was requested
        (Route("/a/{x}", "GET", handled, Who.OPERATORS), FORM),
        (Route("/a/{x}", "GET", handled, Who.ANYONE), FORM),
        (Route("/livez", "GET", handled, Who.ANYONE), "is there already, as /livez"),
        (Route("/livez", "POST", handled), "is there already, as /livez"),
        (
            Route("/v1/views/{name}/rows/{id}", "POST", handled),
            "is there already, as /v1/views/{view}/rows/{key}",
        ),
    ],
)
def test_a_route_that_would_hide_or_open_another_is_refused(route: Route, why: str) -> None:
    with pytest.raises(ConfigError, match=f"^route .*{re.escape(why)}"):
        Routes([*every_route(), route])
    # another method, by the same who
    assert Route("/v1/lookup", "GET", handled) in Routes(
        [*every_route(), Route("/v1/lookup", "GET", handled)]
    )


def test_every_status_that_the_code_names_is_in_the_document() -> None:
    """By the numbers in the files that answer: also those that come before any route is looked for,
    which no test of a route meets."""
    http = REPOSITORY / "store/http"
    files = [*http.glob("*.py"), *http.glob("guard/*.py")]
    named = {
        int(number)
        for path in files
        for number in re.findall(r"(?<![\w.])[45]\d\d(?!\w)", path.read_text())
    }
    # of another method, which is no operation
    told = {
        int(status)
        for methods in openapi_document()["paths"].values()
        for one in methods.values()
        for status in one["responses"]
    }
    assert named - {405} <= told
    assert named >= {408, 421, 431, 504}


@pytest.mark.parametrize(
    ("credentials", "read", "metrics", "livez"),
    [
        (
            Credentials.NOTHING,
            [{}, {"token": ["read"]}, {"certificate": []}],
            [{}, {"token": ["admin"]}, {"certificate": []}],
            [],
        ),
        (Credentials.TOKEN, [{"token": ["read"]}], [{"token": ["admin"]}], []),
        (
            Credentials.CERTIFICATE,
            [{"certificate": []}],
            [{"certificate": []}],
            [{"certificate": []}],
        ),
        (
            Credentials.TOKEN | Credentials.CERTIFICATE,
            [{"token": ["read"], "certificate": []}],
            [{"token": ["admin"], "certificate": []}],
            [{"certificate": []}],
        ),
    ],
)
def test_the_document_says_which_credentials_its_server_requires(
    credentials: Credentials, read: Any, metrics: Any, livez: Any
) -> None:
    document = openapi_document(credentials)
    told = {
        path: next(iter(methods.values())).get("security", document["security"])
        for path, methods in document["paths"].items()
    }
    assert told == dict.fromkeys(document["paths"], read) | {
        "/metrics": metrics,
        "/livez": livez,
        "/readyz": livez,
    }
    schemes = document["components"]["securitySchemes"]
    assert {name: (scheme["type"], scheme.get("scheme")) for name, scheme in schemes.items()} == {
        "token": ("http", "bearer"),
        "certificate": ("mutualTLS", None),
    }
