"""Operations: the operation of each route of ours in the OpenAPI document: what it does, its
parameters, its body, and what it answers but for the refusals that any request may meet."""

from __future__ import annotations

from typing import Any

from precompute.store.wire import bodies
from precompute.store.wire.lookup_options import BASE64, FLOAT, MAX_DEADLINE_MS, MAX_KEYS


def _ref(name: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{name}"}


def _content(name: str, arrow: bool) -> dict[str, Any]:
    content: dict[str, Any] = {bodies.JSON: {"schema": _ref(name)}}
    if arrow:
        content[bodies.ARROW] = {"schema": {"type": "string", "format": "binary"}}
    return content


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
    """By status; ``more`` are refusals that not all have, or of which there is more to say."""
    return {"200": answered, **{status: refusal(what) for status, what in (more or {}).items()}}


def refusal(what: str) -> dict[str, Any]:
    """A problem, as the document has it."""
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


FROM_0 = {"minimum": 0}
DEADLINE = FROM_0 | {"maximum": MAX_DEADLINE_MS}


def _body(name: str, *, arrow: bool = False) -> dict[str, Any]:
    return {"required": True, "content": _content(name, arrow)}


_ENCODING = (
    "of vectors in JSON: lists of numbers, or base64 of float16 or float32, little-endian; `base64`"
    " of the answer names those that are"
)
_SERVICE = (
    f"Each of 1 to {MAX_KEYS} rows has, of each view, what a lookup says of its row. A view that"
    " cannot be answered keeps no other from it: its rows are missing, for one of the reasons of a"
    " row or for `unknown_view`, `other_entity`, `other_format` or `store_unavailable`, and `views`"
    " has its problem. As Arrow the columns are the entity's, then of each view `view__status`,"
    " `view__source`, `view__reason`, `view__computed_at`, `view__age_s` and `view__feature`;"
    " `views` is in the schema's metadata."
)
_VIEWS = (
    "Of each feature its name, dtype, dim of a vector or max_items of a list, and packed where the"
    " store keeps a vector as int8 or binary: rows have the dtype then, and numbers that are near"
    " the model's."
)


_VIEW = _parameter("view", "path", "string", "name of a published view")
_KEY = _parameter(
    "key",
    "path",
    "string",
    "the entity key; parts of a composite one separated by /",
    minLength=1,
    pattern="^[^\\x00]+$",
)
_OPTIONS = [
    _parameter("features", "query", "string", "names of features, each once, separated by commas"),
    _parameter("fallback", "query", "boolean", "false never runs the model"),
    _parameter("deadline_ms", "query", "number", "how long to wait for the model", **DEADLINE),
    _parameter("max_age_s", "query", "number", "an older row counts as missing", **FROM_0),
    _parameter("encoding_format", "query", "string", _ENCODING, enum=[FLOAT, BASE64]),
]
_CONTROL = _parameter(
    "Cache-Control",
    "header",
    "string",
    "RFC 9111: no-cache, only-if-cached, max-age, min-fresh, max-stale: how fresh a row must be",
)

ROW = {
    "summary": "One row",
    "parameters": [_VIEW, _KEY, *_OPTIONS, _CONTROL],
    "responses": {
        **_responses(_answered("ViewRow", arrow=True), _OF_A_ROW),
        "304": {"description": "not modified"},
    },
}
LOOKUP = {
    "summary": "Many rows of one view",
    "parameters": [_VIEW, *_OPTIONS, _CONTROL],
    "requestBody": _body("LookupRequest", arrow=True),
    "responses": _responses(
        _answered("LookupAnswer", arrow=True), _OF_A_BODY | {"404": "no such view"}
    ),
}
MULTI_LOOKUP = {
    "summary": "Rows of several views",
    "parameters": [_CONTROL],
    "requestBody": _body("MultiLookupRequest"),
    "responses": _responses(_answered("MultiLookupAnswer"), _OF_A_BODY),
}
SEARCH = {
    "summary": "Nearest rows",
    "parameters": [_VIEW],
    "requestBody": _body("SearchRequest"),
    "responses": _responses(_answered("SearchAnswer"), _OF_A_SEARCH),
}
SERVICE = {
    "summary": "The features of a service: several views, joined to one row for each entity",
    "description": _SERVICE,
    "parameters": [
        _parameter("service", "path", "string", "name of a service"),
        *(option for option in _OPTIONS if option["name"] != "features"),
        _CONTROL,
    ],
    "requestBody": _body("ServiceRequest", arrow=True),
    "responses": _responses(
        _answered("ServiceAnswer", arrow=True), _OF_A_BODY | {"404": "no such service"}
    ),
}
_PLAIN = {"description": "answered"}
SERVICES = {
    "summary": "The services, each with its version, entity, views and features",
    "responses": _responses(_PLAIN),
}
VIEWS = {
    "summary": "The published views",
    "description": _VIEWS,
    "responses": _responses(_PLAIN),
}
LIVEZ = {"summary": "The process lives", "responses": _responses(_PLAIN)}
_NOT_READY = refusal("not yet, or too many wait for a store that does not answer")
_NOT_READY["content"][bodies.JSON] = {"schema": {"type": "object"}}
READYZ = {
    "summary": "Views are published and models loaded",
    "responses": {**_responses(_PLAIN), "503": _NOT_READY},
}
METRICS = {"summary": "Prometheus metrics", "responses": _responses(_PLAIN)}
