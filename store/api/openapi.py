"""OpenAPI 3.1 document of the HTTP API; request schemas come from the structs that decode them."""

from __future__ import annotations

from typing import Any

from store.api import wire

_ROW = {
    "type": "object",
    "required": ["key", "status", "source", "computed_at", "age_s", "ttl_s", "snapshot", "model", "features"],
    "properties": {
        "key": {"type": "string"},
        "status": {"enum": ["fresh", "stale", "computed", "missing"]},
        "source": {"enum": ["store", "fallback", None]},
        "reason": {"enum": ["unknown_entity", "expired", "deadline", "shed", "model_error"], "description": "of a missing row"},
        "computed_at": {"type": ["string", "null"], "format": "date-time"},
        "age_s": {"type": ["number", "null"]},
        "ttl_s": {"type": "number"},
        "snapshot": {"type": "integer"},
        "model": {"type": "string", "description": "fingerprint of the model the row was computed by"},
        "features": {"type": ["object", "null"]},
    },
}

_ANSWER = {
    "type": "object",
    "required": ["view", "snapshot", "model", "rows"],
    "properties": {
        "view": {"type": "string"},
        "snapshot": {"type": "integer"},
        "model": {"type": "string"},
        "rows": {"type": "array", "items": {"$ref": "#/components/schemas/Row"}},
    },
}

_NEIGHBOURS = {
    "type": "object",
    "required": ["view", "snapshot", "model", "metric", "rows"],
    "properties": {**_ANSWER["properties"], "metric": {"enum": ["cosine", "dot", "l2"]}},  # type: ignore[dict-item]
}

_PROBLEM = {
    "type": "object",
    "required": ["type", "title", "status", "detail"],
    "properties": {
        "type": {"type": "string"},
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "detail": {"type": "string"},
    },
}


def _ref(name: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{name}"}


def _responses(schema: dict[str, Any], *, arrow: bool = False, more: dict[str, str] | None = None) -> dict[str, Any]:
    content: dict[str, Any] = {wire.JSON: {"schema": schema}}
    if arrow:
        content[wire.ARROW] = {"schema": {"type": "string", "format": "binary"}}
    problem = {wire.PROBLEM: {"schema": _ref("Problem")}}
    responses: dict[str, Any] = {"200": {"description": "answered", "content": content}}
    refusals = {
        "400": "a bad request",
        "404": "no such view",
        "413": "too many keys or bytes",
        "415": "another content type",
        "422": "the body does not fit",
        "503": "the store cannot be reached",
    }
    for status, what in {**refusals, **(more or {})}.items():
        responses[status] = {"description": what, "content": problem}
    return responses


def _parameter(name: str, place: str, kind: str, what: str) -> dict[str, Any]:
    return {"name": name, "in": place, "required": place == "path", "description": what, "schema": {"type": kind}}


def _body(name: str, *, arrow: bool = False) -> dict[str, Any]:
    content: dict[str, Any] = {wire.JSON: {"schema": _ref(name)}}
    if arrow:
        content[wire.ARROW] = {"schema": {"type": "string", "format": "binary"}}
    return {"required": True, "content": content}


def openapi_document() -> dict[str, Any]:
    """The document served at ``/openapi.json``."""
    view = _parameter("view", "path", "string", "name of a published view")
    options = [
        _parameter("features", "query", "string", "names, separated by commas"),
        _parameter("fallback", "query", "boolean", "false never runs the model"),
        _parameter("deadline_ms", "query", "number", "how long to wait for the model"),
        _parameter("max_age_s", "query", "number", "an older row counts as missing"),
    ]
    schemas = {**wire.schemas(), "Row": _ROW, "Answer": _ANSWER, "Neighbours": _NEIGHBOURS, "Problem": _PROBLEM}
    plain = {"200": {"description": "answered"}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Precompute", "version": "1", "description": "Pre-computed features by key, with their freshness."},
        "paths": {
            "/v1/views": {"get": {"summary": "The published views", "responses": plain}},
            "/v1/views/{view}/rows/{key}": {
                "get": {
                    "summary": "One row",
                    "parameters": [
                        view,
                        _parameter("key", "path", "string", "the entity key; parts of a composite one separated by /"),
                        *options,
                    ],
                    "responses": {
                        **_responses(
                            _ref("Row"),
                            arrow=True,
                            more={"404": "no such row or view", "502": "the model failed", "504": "the model was too slow"},
                        ),
                        "304": {"description": "not modified"},
                    },
                }
            },
            "/v1/views/{view}/lookup": {
                "post": {
                    "summary": "Many rows of one view",
                    "parameters": [view, *options],
                    "requestBody": _body("LookupRequest", arrow=True),
                    "responses": _responses(_ref("Answer"), arrow=True),
                }
            },
            "/v1/lookup": {
                "post": {
                    "summary": "Rows of several views",
                    "requestBody": _body("MultiLookupRequest"),
                    "responses": _responses(
                        {"type": "object", "properties": {"responses": {"type": "array", "items": _ref("Answer")}}}
                    ),
                }
            },
            "/v1/views/{view}/search": {
                "post": {
                    "summary": "Nearest rows",
                    "parameters": [view],
                    "requestBody": _body("SearchRequest"),
                    "responses": _responses(_ref("Neighbours"), more={"504": "the model was too slow"}),
                }
            },
            "/livez": {"get": {"summary": "The process lives", "responses": plain}},
            "/readyz": {
                "get": {
                    "summary": "Views are published and models loaded",
                    "responses": {**plain, "503": {"description": "not yet"}},
                }
            },
            "/metrics": {"get": {"summary": "Prometheus metrics", "responses": plain}},
        },
        "components": {"schemas": schemas},
    }
