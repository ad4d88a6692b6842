"""OpenAPI 3.1 document of the HTTP API; the schemas of what is sent and answered come from :mod:`store.api.wire`."""

from __future__ import annotations

from enum import Flag, auto
from typing import Any

from store.api import wire
from store.lookup_options import MAX_KEYS, MAX_NEIGHBOURS


class Asks(Flag):
    """What a server asks its callers for; both, where both are named."""

    NOTHING = 0
    TOKEN = auto()
    CERTIFICATE = auto()


_TOKEN, _CERTIFICATE = "token", "certificate"
_SCHEMES = {
    _TOKEN: {
        "type": "http",
        "scheme": "bearer",
        "description": "A token of `precompute token NAME`. Its scope is `read`, which opens what services ask, or `admin`, which opens that and what operators look at. "
        "As the password of HTTP's Basic scheme it opens the same.",
    },
    _CERTIFICATE: {
        "type": "mutualTLS",
        "description": "A client's certificate that an authority of `serve.tls.client_ca` signed; it opens every route.",
    },
}


def _security(asks: Asks, scope: str) -> list[dict[str, list[str]]]:
    """The ways in, any of which will do; of a server that asks for nothing they may be shown all the same."""
    token, certificate = {_TOKEN: [scope]}, {_CERTIFICATE: list[str]()}
    if asks is Asks.NOTHING:
        return [{}, token, certificate]
    return [(token if Asks.TOKEN in asks else {}) | (certificate if Asks.CERTIFICATE in asks else {})]


_NOT_LET_IN = "no token, or none that is valid"


def _ref(name: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{name}"}


def _content(name: str, arrow: bool) -> dict[str, Any]:
    content: dict[str, Any] = {wire.JSON: {"schema": _ref(name)}}
    if arrow:
        content[wire.ARROW] = {"schema": {"type": "string", "format": "binary"}}
    return content


def _responses(name: str, *, arrow: bool = False, more: dict[str, str] | None = None) -> dict[str, Any]:
    problem = {wire.PROBLEM: {"schema": _ref("Problem")}}
    responses: dict[str, Any] = {"200": {"description": "answered", "content": _content(name, arrow)}}
    refusals = {
        "400": "a bad request",
        "401": _NOT_LET_IN,
        "404": "no such view",
        "413": "too many keys or bytes",
        "415": "another content type",
        "422": "the body does not fit",
        "503": "the store cannot be reached",
    }
    for status, what in {**refusals, **(more or {})}.items():
        responses[status] = {"description": what, "content": problem}
    return responses


def _parameter(name: str, place: str, kind: str, what: str, **limits: Any) -> dict[str, Any]:
    return {"name": name, "in": place, "required": place == "path", "description": what, "schema": {"type": kind, **limits}}


_KEYS = {"minItems": 1, "maxItems": MAX_KEYS}
_FROM_0 = {"minimum": 0}
_LIMITS: dict[str, dict[str, dict[str, Any]]] = {
    "LookupRequest": {"keys": _KEYS, "deadline_ms": _FROM_0, "max_age_s": _FROM_0, "features": {"uniqueItems": True}},
    "MultiLookupRequest": {"requests": {"minItems": 1, "maxItems": wire.MAX_REQUESTS}},
    "SearchRequest": {
        "k": {"type": "integer", "minimum": 1, "maximum": MAX_NEIGHBOURS},
        "only": {"maxItems": MAX_KEYS},
        "exclude": {"maxItems": MAX_KEYS},
        "features": {"uniqueItems": True},
        "deadline_ms": _FROM_0,
    },
}
"""What is refused beside what does not fit the types: by body and field. One lookup of several is not refused, but answered with its problem."""
_SEARCHED_BY = ("key", "vector", "inputs")


def _schemas() -> dict[str, Any]:
    """Of every body, with the limits on it."""
    schemas = wire.schemas()
    for name, fields in _LIMITS.items():
        for field, limits in fields.items():
            schema = schemas[name]["properties"][field]
            if "type" in limits:
                schema.pop("anyOf")
            schema |= limits
    # exactly one of the three, and null is none
    there = [{"required": [name], "properties": {name: {"not": {"type": "null"}}}} for name in _SEARCHED_BY]
    schemas["SearchRequest"]["oneOf"] = there
    return schemas


def _body(name: str, *, arrow: bool = False) -> dict[str, Any]:
    return {"required": True, "content": _content(name, arrow)}


_VIEWS = (
    "Of each feature its name, dtype, dim of a vector or max_items of a list, and packed where the store keeps a vector as int8 or binary: "
    "rows have the dtype then, and numbers that are near the model's."
)


def openapi_document(asks: Asks = Asks.NOTHING) -> dict[str, Any]:
    """The document served at ``/openapi.json``.

    Args:
        asks: what the server that serves it asks for. The scopes of tokens stand where OpenAPI 3.1 has the roles of such schemes.
    """
    return {
        "openapi": "3.1.0",
        "info": {"title": "Precompute", "version": "1", "description": "Pre-computed features by key, with their freshness."},
        "security": _security(asks, "read"),
        "paths": {**_lookups(), **_of_the_server(asks)},
        "components": {"schemas": _schemas(), "securitySchemes": _SCHEMES},
    }


def _of_the_server(asks: Asks) -> dict[str, Any]:
    """The paths that tell of views and processes."""
    plain = {"200": {"description": "answered"}}
    problem = {wire.PROBLEM: {"schema": _ref("Problem")}}
    refused = {"401": {"description": _NOT_LET_IN, "content": problem}}
    views = {
        **plain,
        **refused,
        "400": {"description": "a query parameter, and there are none", "content": problem},
        "503": {"description": "the store cannot be reached", "content": problem},
    }
    ready = {**plain, **refused, "503": {"description": "not yet, or too many wait for a store that does not answer"}}
    metrics = {
        **plain,
        **refused,
        "403": {"description": "a token of scope read", "content": problem},
        "404": {"description": "they are on the server's other address, `serve.admin`", "content": problem},
    }
    alive: dict[str, Any] = {"summary": "The process lives", "responses": plain, "security": []}
    if Asks.CERTIFICATE in asks:
        # without one there is no connection
        alive["security"] = [{_CERTIFICATE: []}]
    return {
        "/v1/views": {"get": {"summary": "The published views", "description": _VIEWS, "responses": views}},
        "/livez": {"get": alive},
        "/readyz": {"get": {"summary": "Views are published and models loaded", "responses": ready}},
        "/metrics": {"get": {"summary": "Prometheus metrics", "responses": metrics, "security": _security(asks, "admin")}},
    }


def _lookups() -> dict[str, Any]:
    """The paths that answer with rows."""
    view = _parameter("view", "path", "string", "name of a published view")
    key = _parameter(
        "key", "path", "string", "the entity key; parts of a composite one separated by /", minLength=1, pattern="^[^\\x00]+$"
    )
    options = [
        _parameter("features", "query", "string", "names of features, each once, separated by commas"),
        _parameter("fallback", "query", "boolean", "false never runs the model"),
        _parameter("deadline_ms", "query", "number", "how long to wait for the model", **_FROM_0),
        _parameter("max_age_s", "query", "number", "an older row counts as missing", **_FROM_0),
    ]
    control = _parameter(
        "Cache-Control",
        "header",
        "string",
        "RFC 9111: no-cache, only-if-cached, max-age, min-fresh, max-stale: how fresh a row must be",
    )
    failed = {"404": "no such row or view", "502": "the model failed", "504": "the model was too slow"}
    row = {
        "summary": "One row",
        "parameters": [view, key, *options, control],
        "responses": {**_responses("ViewRow", arrow=True, more=failed), "304": {"description": "not modified"}},
    }
    lookup = {
        "summary": "Many rows of one view",
        "parameters": [view, *options, control],
        "requestBody": _body("LookupRequest", arrow=True),
        "responses": _responses("LookupAnswer", arrow=True),
    }
    multi_lookup = {
        "summary": "Rows of several views",
        "parameters": [control],
        "requestBody": _body("MultiLookupRequest"),
        "responses": _responses("MultiLookupAnswer"),
    }
    search = {
        "summary": "Nearest rows",
        "parameters": [view],
        "requestBody": _body("SearchRequest"),
        "responses": _responses("SearchAnswer", more={"409": "the vector is of another model", "504": "the model was too slow"}),
    }
    return {
        "/v1/views/{view}/rows/{key}": {"get": row},
        "/v1/views/{view}/lookup": {"post": lookup},
        "/v1/lookup": {"post": multi_lookup},
        "/v1/views/{view}/search": {"post": search},
    }
