"""Routes: every route of the API, each written once: its path, what answers it, who may ask, and
its operation in the OpenAPI document. The application, the access control, the logs and that
document read this table; routes of plug-ins and of other packages come into it by their door."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from enum import Enum, auto
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from precompute.store.doors import ROUTES
from precompute.store.errors import ConfigError
from precompute.store.http import operations
from precompute.store.http.messages import NOT_STORED, Receive, Reply, Scope

if TYPE_CHECKING:
    from precompute.store.http.api import Api
    from precompute.store.http.pools import Serving
    from precompute.store.http.rows import RowRoutes
    from precompute.store.http.services import ServiceRoutes

Handler = Callable[..., Awaitable[Reply]]
"""Takes the ASGI scope and ``receive``; below a name in the path also that name, decoded, and the
rest of the path, undecoded: a row's key, else empty. Raises errors of ours, which are answered as
problems."""


class Who(Enum):
    """Who may ask for a route."""

    ANYONE = auto()
    """Without a token, as a probe does."""
    READERS = auto()
    """With a token, where there are tokens."""
    OPERATORS = auto()
    """With a token of scope ``admin``, and on the admin address alone where there is one."""


class Parts(NamedTuple):
    """What handlers are made of, once for each application."""

    serving: Serving
    rows: RowRoutes
    services: ServiceRoutes
    api: Api


class Route(NamedTuple):
    """One route of the API; a GET also answers HEAD."""

    path: str
    """As it is documented, and called in logs and traces: fixed, or with a name and perhaps a word
    after what is fixed, and below that word a key, which may have slashes:
    ``/v1/views/{view}/rows/{key}``."""
    method: str
    handler: Callable[[Parts], Handler]
    """Makes what answers, for one application."""
    who: Who = Who.READERS
    """Where it is not :attr:`Who.READERS` the path is fixed."""
    operation: Mapping[str, Any] | None = None
    """In the OpenAPI document: its summary, parameters, body and ``responses``, but for the
    refusals that any request may meet. None: it is none for programs."""


VIEWS, SERVICES, ROWS = "/v1/views/", "/v1/services/", "rows/"

_OURS = (
    Route(
        f"{VIEWS}{{view}}/{ROWS}{{key}}", "GET", lambda of: of.rows.row, operation=operations.ROW
    ),
    Route(
        f"{VIEWS}{{view}}/lookup", "POST", lambda of: of.rows.lookup, operation=operations.LOOKUP
    ),
    Route("/v1/lookup", "POST", lambda of: of.rows.multi_lookup, operation=operations.MULTI_LOOKUP),
    Route(f"{VIEWS}{{view}}/search", "POST", lambda of: of.api.search, operation=operations.SEARCH),
    Route(
        f"{SERVICES}{{service}}",
        "POST",
        lambda of: of.services.service,
        operation=operations.SERVICE,
    ),
    Route("/v1/services", "GET", lambda of: of.services.services, operation=operations.SERVICES),
    Route("/v1/views", "GET", lambda of: of.api.views, operation=operations.VIEWS),
    Route("/livez", "GET", lambda of: of.api.livez, Who.ANYONE, operations.LIVEZ),
    Route("/readyz", "GET", lambda of: of.api.ready, Who.ANYONE, operations.READYZ),
    Route("/metrics", "GET", lambda of: of.api.render_metrics, Who.OPERATORS, operations.METRICS),
    Route("/openapi.json", "GET", lambda of: of.api.openapi_json),
)

_WORD = r"[\w.~-]+"
_PATH = re.compile(rf"/|(/{_WORD})+|(/{_WORD})*/\{{\w+\}}(/{_WORD}(/\{{\w+\}})?)?")


class Routes:
    """Routes, found by a request's path.

    Raises:
        ConfigError: one is of no shape that is found, or is another's.
    """

    def __init__(self, routes: Iterable[Route]) -> None:
        self._routes: dict[tuple[str, str], Route] = {}
        self._fixed: dict[bytes, str] = {}
        """Path → the same."""
        self._below: dict[bytes, dict[bytes, str]] = {}
        """What stands before a name → what stands after it, up to a key → the whole path."""
        for route in routes:
            self._add(route)
        self._heads = [(head, len(head), below) for head, below in self._below.items()]

    def _add(self, route: Route) -> None:
        path = route.path
        if not _PATH.fullmatch(path) or (route.who is not Who.READERS and "{" in path):
            raise ConfigError(
                f"route {path!r}: a path is fixed, as /v1/greeting, or, of a route for readers, has"
                " one name, and below it a word and a key at most: /v1/views/{view}/rows/{key}"
            )
        head, brace, rest = path.partition("{")
        after = rest.partition("}")[2].partition("{")[0]
        same = self._below.setdefault(head.encode(), {}) if brace else self._fixed
        there = same.setdefault((after if brace else path).encode(), path)
        others = [other for other in self if other.path == path and other.who is not route.who]
        if there != path or others or (path, route.method) in self._routes:
            raise ConfigError(
                f"route {route.method} {path} is there already, as {there}: give it another path"
            )
        self._routes[path, route.method] = route

    def __iter__(self) -> Iterator[Route]:
        return iter(self._routes.values())

    def paths(self, who: Who) -> frozenset[bytes]:
        """The paths, all of them fixed, that are for operators, or for anyone."""
        return frozenset(route.path.encode() for route in self if route.who is who)

    def find(self, path: bytes) -> tuple[str | None, bytes | None, bytes]:
        """A path as it was requested, undecoded, so that an encoded slash in a name or a key is no
        separator → the route's path, None where there is none; the name in it, None where it is
        fixed; and the rest, which is a key."""
        # first, since who may ask is looked up by what is fixed
        found = self._fixed.get(path)
        if found is not None:
            return found, None, b""
        for head, length, below in self._heads:
            if path.startswith(head):
                name, slash, rest = path[length:].partition(b"/")
                word, deeper, key = rest.partition(b"/")
                found = below.get(slash + word + deeper)
                if found is not None:
                    return found, name, key
        return None, None, b""


@cache
def every_route() -> Routes:
    """The core's routes and those that come in by the door; one of ours whose plug-in is not
    installed says so in a line.

    Raises:
        ConfigError: one of another package cannot be used.
    """
    routes = [*_OURS]
    for name in (*ROUTES.known(), *ROUTES.foreign()):
        opened = ROUTES.open(name) if ROUTES.is_here(name) else _absent(name)
        if not isinstance(opened, Route):
            raise ConfigError(
                f"route {name!r} leads to no Route, but to a {type(opened).__name__}: mend that"
                " package, or take it out"
            )
        routes.append(opened)
    return Routes(routes)


def _absent(path: str) -> Route:
    line = f"{ROUTES.absence(path)}\n".encode()

    async def answer(scope: Scope, receive: Receive) -> Reply:
        return Reply(404, [(b"content-type", b"text/plain; charset=utf-8"), NOT_STORED], line)

    return Route(path, "GET", lambda of: answer)
