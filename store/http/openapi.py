"""OpenAPI: the OpenAPI 3.1 document of the HTTP API, of the table of routes; the schemas of bodies
come from :mod:`precompute.store.wire.bodies`."""

from __future__ import annotations

from enum import Flag, auto
from typing import Any

import pyarrow as pa

from precompute.store.doors import MISSES
from precompute.store.http.operations import DEADLINE, FROM_0, refusal
from precompute.store.http.routes import Route, Who, every_route
from precompute.store.wire import bodies
from precompute.store.wire.lookup_options import MAX_KEYS, MAX_NEIGHBOURS


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
_OF_OPERATORS = {
    "403": "a token of scope read",
    "404": "they are on the server's other address, `serve.admin`",
}
"""More refusals, of what is for operators."""

_KEYS = {"minItems": 1, "maxItems": MAX_KEYS}
_LIMITS: dict[str, dict[str, dict[str, Any]]] = {
    "LookupRequest": {
        "keys": _KEYS,
        "deadline_ms": DEADLINE,
        "max_age_s": FROM_0,
        "features": {"uniqueItems": True},
    },
    "MultiLookupRequest": {"requests": {"minItems": 1, "maxItems": bodies.MAX_REQUESTS}},
    "ServiceRequest": {"deadline_ms": DEADLINE, "max_age_s": FROM_0},
    "SearchRequest": {
        "k": {"type": "integer", "minimum": 1, "maximum": MAX_NEIGHBOURS},
        "only": {"maxItems": MAX_KEYS},
        "exclude": {"maxItems": MAX_KEYS},
        "features": {"uniqueItems": True},
        "deadline_ms": DEADLINE,
    },
}
"""What is refused beside what does not fit the types: by body and field. One lookup of several is
not refused, but answered with its problem."""
_SEARCHED_BY = ("key", "text", "vector", "inputs")


def _type_of(kind: pa.DataType) -> dict[str, Any]:
    """The JSON Schema of a column's values; any where it is none of one value."""
    types = (
        (pa.types.is_string, "string"),
        (pa.types.is_floating, "number"),
        (pa.types.is_integer, "integer"),
        (pa.types.is_boolean, "boolean"),
    )
    return next(({"type": name} for is_one, name in types if is_one(kind)), {})


def _add_columns(schemas: dict[str, Any]) -> None:
    """What rows say besides, by what answers misses and is here, behind their reasons."""
    said = {
        column.name: {"description": column.what, **_type_of(column.type)}
        for _, kind in MISSES.all()
        for column in kind.columns
    }
    for schema in schemas.values():
        properties = schema.get("properties", {})
        if "reason" in properties:
            names = list(properties)
            at = names.index("reason") + 1
            order = [*names[:at], *said, *names[at:]]
            schema["properties"] = {name: (said | properties)[name] for name in order}


def _schemas() -> dict[str, Any]:
    schemas = bodies.schemas()
    _add_columns(schemas)
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


def openapi_document(credentials: Credentials = Credentials.NOTHING) -> dict[str, Any]:
    """The document served at ``/openapi.json``.

    Args:
        credentials: those that the server requires. The scopes of tokens stand where OpenAPI 3.1
            has the roles of such schemes.

    Raises:
        ConfigError: a route of another package cannot be used.
    """
    paths: dict[str, dict[str, Any]] = {}
    for route in every_route():
        if route.operation is not None:
            paths.setdefault(route.path, {})[route.method.lower()] = _told(route, credentials)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Precompute",
            "version": "1",
            "description": "Pre-computed features by key, with their freshness.",
        },
        "security": _security(credentials, "read"),
        "paths": paths,
        "components": {
            "schemas": _schemas(),
            "responses": {status: refusal(what) for status, what in _EVERYWHERE.items()},
            "securitySchemes": _SCHEMES,
        },
    }


def _told(route: Route, credentials: Credentials) -> dict[str, Any]:
    """A route's operation, with what any request may be refused with, and by who may ask."""
    assert route.operation is not None
    given = route.operation["responses"]
    everywhere = {status: {"$ref": f"#/components/responses/{status}"} for status in _EVERYWHERE}
    responses = {"200": given["200"], **everywhere, **given}
    operation = {**route.operation, "responses": responses}
    if route.who is Who.OPERATORS:
        responses |= {status: refusal(what) for status, what in _OF_OPERATORS.items()}
        operation["security"] = _security(credentials, "admin")
    if route.who is Who.ANYONE:
        del responses["401"]
        # without a certificate there is no connection
        needed = Credentials.CERTIFICATE in credentials
        operation["security"] = [{_CERTIFICATE: []}] if needed else []
    return operation
