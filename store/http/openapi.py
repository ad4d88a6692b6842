"""OpenAPI: the OpenAPI 3.1 document of the HTTP API; the schemas of bodies come from
:mod:`precompute.store.wire.bodies`."""

from __future__ import annotations

from enum import Flag, auto
from typing import Any

from precompute.store.wire import bodies
from precompute.store.wire.lookup_options import (
    BASE64,
    FLOAT,
    MAX_DEADLINE_MS,
    MAX_KEYS,
    MAX_NEIGHBOURS,
)


class Credentials(Flag):
    """The credentials that a server requires of its callers; both, where both are named."""

    NOTHING = 0
    TOKEN = auto()
    CERTIFICATE = auto()


_TOKEN, _CERTIFICATE = "token", "certificate"
_SCHEMES = {
    _TOKEN: {
        "type": "http",
        "scheme": "bearer",
        "description": (
            "A token of `precompute token NAME`. Its scope is `read`, which opens what services"
            " ask, or `admin`, which opens that and what operators look at. As the password of"
            " HTTP's Basic scheme it opens the same."
        ),
    },
    _CERTIFICATE: {
        "type": "mutualTLS",
        "description": (
            "A client's certificate that an authority of `serve.tls.client_ca` signed; it opens"
            " every route."
        ),
    },
}


def _security(credentials: Credentials, scope: str) -> list[dict[str, list[str]]]:
    """The ways in, any of which will do; of a server that requires nothing they may be shown all
    the same."""
    token, certificate = {_TOKEN: [scope]}, {_CERTIFICATE: list[str]()}
    if credentials is Credentials.NOTHING:
        return [{}, token, certificate]
    return [
        (token if Credentials.TOKEN in credentials else {})
        | (certificate if Credentials.CERTIFICATE in credentials else {})
    ]


def _ref(name: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{name}"}


def _content(name: str, arrow: bool) -> dict[str, Any]:
    content: dict[str, Any] = {bodies.JSON: {"schema": _ref(name)}}
    if arrow:
        content[bodies.ARROW] = {"schema": {"type": "string", "format": "binary"}}
    return content


_EVERYWHERE = {
    "400": "no HTTP, or not what the route takes",
    "401": "no token, or none that is valid",
    "408": "the request took too long to come",
    "413": "more bytes, values or keys than are taken, or than would be sent",
    "414": "too long a URL",
    "421": (
        "addressed by a name that is none of `serve.hosts`, where neither tokens nor TLS keep"
        " strangers out"
    ),
    "429": "too many requests of this connection wait",
    "431": "too many bytes of headers",
    "500": "an error nobody foresaw; the server's log has it",
    "503": "the store cannot be reached, or too much is in hand already",
}
"""Refusals that any request may meet, most of them before its route is looked for."""


_OF_A_ROW = {
    "404": "no such row or view",
    "500": "the row is damaged, or an error nobody foresaw",
    "502": "the model failed",
    "503": "the store cannot be reached, or the model or the server has too much in hand already",
    "504": (
        "the model was too slow, or nothing is stored that is fresh enough, and no other answer was"
        " allowed"
    ),
}
_OF_A_BODY = {"415": "another content type, or an encoding", "422": "the body does not fit"}
_OF_A_SEARCH = _OF_A_BODY | {
    "404": "no such view, or no row that has a vector to search by",
    "409": "the vector is of another model",
    "422": "the body does not fit, or the model cannot take the inputs",
    "502": "the model failed",
    "504": "the model was too slow",
}
"""What not every operation may be refused with, or more to say of it."""


def _responses(answered: dict[str, Any], more: dict[str, str] | None = None) -> dict[str, Any]:
    """An operation's, by status; ``more`` are refusals that not all have, or of which there is more
    to say."""
    details = {status: {"$ref": f"#/components/responses/{status}"} for status in _EVERYWHERE}
    return {
        "200": answered,
        **details,
        **{status: _refusal(what) for status, what in (more or {}).items()},
    }


def _refusal(what: str) -> dict[str, Any]:
    return {"description": what, "content": {bodies.PROBLEM: {"schema": _ref("Problem")}}}


def _answered(name: str, *, arrow: bool = False) -> dict[str, Any]:
    return {"description": "answered", "content": _content(name, arrow)}


def _parameter(name: str, place: str, kind: str, what: str, **limits: Any) -> dict[str, Any]:
    return {
        "name": name,
        "in": place,
        "required": place == "path",
        "description": what,
        "schema": {"type": kind, **limits},
    }


_KEYS = {"minItems": 1, "maxItems": MAX_KEYS}
_FROM_0 = {"minimum": 0}
_DEADLINE = _FROM_0 | {"maximum": MAX_DEADLINE_MS}
_LIMITS: dict[str, dict[str, dict[str, Any]]] = {
    "LookupRequest": {
        "keys": _KEYS,
        "deadline_ms": _DEADLINE,
        "max_age_s": _FROM_0,
        "features": {"uniqueItems": True},
    },
    "MultiLookupRequest": {"requests": {"minItems": 1, "maxItems": bodies.MAX_REQUESTS}},
    "ServiceRequest": {"deadline_ms": _DEADLINE, "max_age_s": _FROM_0},
    "SearchRequest": {
        "k": {"type": "integer", "minimum": 1, "maximum": MAX_NEIGHBOURS},
        "only": {"maxItems": MAX_KEYS},
        "exclude": {"maxItems": MAX_KEYS},
        "features": {"uniqueItems": True},
        "deadline_ms": _DEADLINE,
    },
}
"""What is refused beside what does not fit the types: by body and field. One lookup of several is
not refused, but answered with its problem."""
_SEARCHED_BY = ("key", "text", "vector", "inputs")


def _schemas() -> dict[str, Any]:
    schemas = bodies.schemas()
    for name, fields in _LIMITS.items():
        for field, limits in fields.items():
            schema = schemas[name]["properties"][field]
            if "type" in limits:
                schema.pop("anyOf")
            schema |= limits
    # exactly one of the four, and null is none
    there = [
        {"required": [name], "properties": {name: {"not": {"type": "null"}}}}
        for name in _SEARCHED_BY
    ]
    schemas["SearchRequest"]["oneOf"] = there
    return schemas


def _body(name: str, *, arrow: bool = False) -> dict[str, Any]:
    return {"required": True, "content": _content(name, arrow)}


_ENCODING = (
    "of vectors in JSON: lists of numbers, or base64 of float16 or float32, little-endian; `base64`"
    " of the answer names those that are"
)
_SERVICE = (
    f"Each of 1 to {MAX_KEYS} rows has, of each view, what a lookup says of its row. A view that"
    " cannot be answered keeps no other from it: its rows are missing, for one of the reasons of a"
    " row or for `unknown_view`, `other_entity` or `store_unavailable`, and `views` has its"
    " problem. As Arrow the columns are the entity's, then of each view `view__status`,"
    " `view__source`, `view__reason`, `view__computed_at`, `view__age_s` and `view__feature`;"
    " `views` is in the schema's metadata."
)
_VIEWS = (
    "Of each feature its name, dtype, dim of a vector or max_items of a list, and packed where the"
    " store keeps a vector as int8 or binary: rows have the dtype then, and numbers that are near"
    " the model's."
)


def openapi_document(credentials: Credentials = Credentials.NOTHING) -> dict[str, Any]:
    """The document served at ``/openapi.json``.

    Args:
        credentials: those that the server requires. The scopes of tokens stand where OpenAPI 3.1
            has the roles of such schemes.
    """
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Precompute",
            "version": "1",
            "description": "Pre-computed features by key, with their freshness.",
        },
        "security": _security(credentials, "read"),
        "paths": {**_lookups(), **_of_the_server(credentials)},
        "components": {
            "schemas": _schemas(),
            "responses": {status: _refusal(what) for status, what in _EVERYWHERE.items()},
            "securitySchemes": _SCHEMES,
        },
    }


def _of_the_server(credentials: Credentials) -> dict[str, Any]:
    plain = {"description": "answered"}
    ready = _responses(plain, {"503": "not yet, or too many wait for a store that does not answer"})
    ready["503"]["content"][bodies.JSON] = {"schema": {"type": "object"}}
    metrics = _responses(
        plain,
        {
            "403": "a token of scope read",
            "404": "they are on the server's other address, `serve.admin`",
        },
    )
    everybody = _responses(plain)
    # open to all
    del everybody["401"], ready["401"]
    alive: dict[str, Any] = {"summary": "The process lives", "responses": everybody, "security": []}
    if Credentials.CERTIFICATE in credentials:
        # without one there is no connection
        alive["security"] = [{_CERTIFICATE: []}]
    return {
        "/v1/services": {
            "get": {
                "summary": "The services, each with its version, entity, views and features",
                "responses": _responses(plain),
            }
        },
        "/v1/views": {
            "get": {
                "summary": "The published views",
                "description": _VIEWS,
                "responses": _responses(plain),
            }
        },
        "/livez": {"get": alive},
        "/readyz": {
            "get": alive | {"summary": "Views are published and models loaded", "responses": ready}
        },
        "/metrics": {
            "get": {
                "summary": "Prometheus metrics",
                "responses": metrics,
                "security": _security(credentials, "admin"),
            }
        },
    }


def _query_options() -> list[dict[str, Any]]:
    return [
        _parameter(
            "features", "query", "string", "names of features, each once, separated by commas"
        ),
        _parameter("fallback", "query", "boolean", "false never runs the model"),
        _parameter("deadline_ms", "query", "number", "how long to wait for the model", **_DEADLINE),
        _parameter("max_age_s", "query", "number", "an older row counts as missing", **_FROM_0),
        _parameter("encoding_format", "query", "string", _ENCODING, enum=[FLOAT, BASE64]),
    ]


def _lookups() -> dict[str, Any]:
    view = _parameter("view", "path", "string", "name of a published view")
    key = _parameter(
        "key",
        "path",
        "string",
        "the entity key; parts of a composite one separated by /",
        minLength=1,
        pattern="^[^\\x00]+$",
    )
    options = _query_options()
    control = _parameter(
        "Cache-Control",
        "header",
        "string",
        "RFC 9111: no-cache, only-if-cached, max-age, min-fresh, max-stale: how fresh a row"
        " must be",
    )
    row = {
        "summary": "One row",
        "parameters": [view, key, *options, control],
        "responses": {
            **_responses(_answered("ViewRow", arrow=True), _OF_A_ROW),
            "304": {"description": "not modified"},
        },
    }
    lookup = {
        "summary": "Many rows of one view",
        "parameters": [view, *options, control],
        "requestBody": _body("LookupRequest", arrow=True),
        "responses": _responses(
            _answered("LookupAnswer", arrow=True), _OF_A_BODY | {"404": "no such view"}
        ),
    }
    multi_lookup = {
        "summary": "Rows of several views",
        "parameters": [control],
        "requestBody": _body("MultiLookupRequest"),
        "responses": _responses(_answered("MultiLookupAnswer"), _OF_A_BODY),
    }
    service = {
        "summary": "The features of a service: several views, joined to one row for each entity",
        "description": _SERVICE,
        "parameters": [
            _parameter("service", "path", "string", "name of a service"),
            *(option for option in options if option["name"] != "features"),
            control,
        ],
        "requestBody": _body("ServiceRequest", arrow=True),
        "responses": _responses(
            _answered("ServiceAnswer", arrow=True), _OF_A_BODY | {"404": "no such service"}
        ),
    }
    search = {
        "summary": "Nearest rows",
        "parameters": [view],
        "requestBody": _body("SearchRequest"),
        "responses": _responses(_answered("SearchAnswer"), _OF_A_SEARCH),
    }
    return {
        "/v1/views/{view}/rows/{key}": {"get": row},
        "/v1/views/{view}/lookup": {"post": lookup},
        "/v1/lookup": {"post": multi_lookup},
        "/v1/views/{view}/search": {"post": search},
        "/v1/services/{service}": {"post": service},
    }
