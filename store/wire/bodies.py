"""Bodies: the requests and answers of the HTTP API in JSON and Arrow, their limits, and their
schemas for ``/openapi.json``."""

from __future__ import annotations

import json
import math
from datetime import datetime
from itertools import chain
from typing import Annotated, Any, Literal

import msgspec

from precompute.store.errors import RequestError
from precompute.store.times import AnswerSource, Reason, Status
from precompute.store.wire.lookup_options import LookupOptions, SearchOptions

JSON = "application/json"
ARROW = "application/vnd.apache.arrow.stream"
PROBLEM = "application/problem+json"
PROBLEM_URN = "urn:precompute:problem:"
"""Begins the ``type`` of every problem of this API; its code follows."""

MAX_BODY_BYTES = 4 * 2**20
MAX_REQUESTS = 32
"""Lookups in one ``POST /v1/lookup``."""
MAX_VALUES, CONTAINER_VALUES = 500_000, 10
"""Values in a JSON body at most, and as how many a list or an object counts, which takes that much
longer to make: decoding blocks the worker. 1,000 keys with 400 numbers each as inputs
fit, and 32 lookups of 1,000 keys of two parts."""
_FEW_BYTES = 64 * 1024
"""A body that holds few values, whatever they are."""
MAX_KEY_JSON_BYTES = 8192
"""Size of the JSON of a key of several parts at most: what one of
:data:`precompute.store.keys.MAX_KEY_BYTES` can take with all its characters escaped, and more. A
text is no more work however long it is."""
_PATIENT_VALUES = MAX_VALUES // 5
"""As :data:`MAX_VALUES`, of a body that is read a second time, by a parser that takes five times as
long for each."""


EncodingFormat = Annotated[
    Literal["float", "base64"],
    msgspec.Meta(
        description=(
            "of vectors in JSON: lists of numbers, or base64 of them, little-endian, where they are"
            " float16 or float32"
        )
    ),
]
Base64Types = Annotated[
    dict[str, Literal["float16", "float32"]] | msgspec.UnsetType,
    msgspec.Meta(
        description=(
            "with encoding_format base64: each feature that is base64, and the dtype of its numbers"
        )
    ),
]


class LookupRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Body of ``POST /v1/views/{view}/lookup``."""

    keys: list[Any]
    features: list[str] | None = None
    fallback: bool = True
    deadline_ms: float | None = None
    max_age_s: float | None = None
    inputs: dict[str, dict[str, Any]] | None = None
    encoding_format: EncodingFormat = "float"

    def options(self) -> LookupOptions:
        """What is requested beside the keys."""
        return LookupOptions(
            self.features,
            self.fallback,
            self.deadline_ms,
            self.max_age_s,
            self.inputs,
            self.encoding_format,
        )


class ViewLookupRequest(LookupRequest, kw_only=True):
    """One element of ``POST /v1/lookup``."""

    view: str


class MultiLookupRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Body of ``POST /v1/lookup``."""

    requests: list[ViewLookupRequest]


Scalar = bool | int | float | str


class Bounds(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """What a feature must lie between."""

    gte: int | float | str | None = None
    gt: int | float | str | None = None
    lte: int | float | str | None = None
    lt: int | float | str | None = None


def _condition(wanted: Scalar | list[Scalar] | Bounds) -> Any:
    return msgspec.to_builtins(wanted) if isinstance(wanted, Bounds) else wanted


class SearchRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Body of ``POST /v1/views/{view}/search``: exactly one of key, text, vector and inputs."""

    key: Any = None
    text: Annotated[
        str | None,
        msgspec.Meta(description="for the one input column that takes texts, whatever its name"),
    ] = None
    vector: list[float] | None = None
    inputs: dict[str, Any] | None = None
    # 10.0 is an integer too, says JSON Schema
    k: int | float = 10
    filter: Annotated[
        dict[str, Scalar | list[Scalar] | Bounds] | None,
        msgspec.Meta(
            description=(
                "scalar feature → a value it must have, some that it may have, or bounds; all must"
                " hold"
            )
        ),
    ] = None
    only: Annotated[
        list[Any] | None,
        msgspec.Meta(
            description=(
                "the only keys that may be found; of a view of chunks a long text's key is all of"
                " its chunks"
            )
        ),
    ] = None
    exclude: Annotated[list[Any], msgspec.Meta(description="keys that are left out; likewise")] = []
    features: list[str] = []
    deadline_ms: float | None = None
    model: Annotated[
        str | None,
        msgspec.Meta(
            description=(
                "fingerprint of the model that made the vector; refused where it is not the"
                " live one"
            )
        ),
    ] = None
    encoding_format: EncodingFormat = "float"

    def options(self) -> SearchOptions:
        """What is requested."""
        conditions = (
            None
            if self.filter is None
            else {name: _condition(wanted) for name, wanted in self.filter.items()}
        )
        return SearchOptions(
            self.key,
            self.text,
            self.vector,
            self.inputs,
            # another one is refused with what else cannot be
            int(self.k) if self.k % 1 == 0 else self.k,  # type: ignore[arg-type]
            conditions,
            self.only,
            self.exclude,
            self.features,
            self.deadline_ms,
            self.model,
            self.encoding_format,
        )


class Row(msgspec.Struct, kw_only=True):
    """A row of an answer."""

    key: str
    status: Status
    source: AnswerSource | None
    reason: Annotated[Reason | msgspec.UnsetType, msgspec.Meta(description="of a missing row")] = (
        msgspec.UNSET
    )
    computed_at: Annotated[datetime, msgspec.Meta(tz=True)] | None
    age_s: float | None
    ttl_s: float
    snapshot: int
    model: Annotated[
        str, msgspec.Meta(description="fingerprint of the model the row was computed by")
    ]
    features: dict[str, Any] | None


class ViewRow(Row, kw_only=True):
    """Answer of ``GET /v1/views/{view}/rows/{key}``."""

    view: str
    base64: Base64Types = msgspec.UNSET


class LookupAnswer(msgspec.Struct):
    """Answer of ``POST /v1/views/{view}/lookup``: rows in the order of the keys."""

    view: str
    snapshot: int
    model: str
    rows: list[Row]
    base64: Base64Types = msgspec.UNSET


class Problem(msgspec.Struct):
    """A refusal, as RFC 9457 has it: ``type`` names the kind for programs, ``detail`` tells a
    person; of a missing row, whose it would have been."""

    type: str
    title: str
    status: int
    detail: str
    snapshot: int | msgspec.UnsetType = msgspec.UNSET
    model: str | msgspec.UnsetType = msgspec.UNSET


class ViewAnswer(msgspec.Struct):
    """What one view of several says: a lookup's answer, or the problem it has with the request."""

    view: str
    snapshot: int | msgspec.UnsetType = msgspec.UNSET
    model: str | msgspec.UnsetType = msgspec.UNSET
    rows: list[Row] | msgspec.UnsetType = msgspec.UNSET
    base64: Base64Types = msgspec.UNSET
    problem: Problem | msgspec.UnsetType = msgspec.UNSET


class MultiLookupAnswer(msgspec.Struct):
    """Answer of ``POST /v1/lookup``, in the order of the requests."""

    responses: list[ViewAnswer]


class ServiceRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Body of ``POST /v1/services/{service}``."""

    entities: Annotated[
        dict[str, list[Any]],
        msgspec.Meta(
            description="column of the service's entity → values, as many of each as there are rows"
        ),
    ]
    fallback: bool = True
    deadline_ms: Annotated[
        float | None, msgspec.Meta(description="how long to wait for models, all views together")
    ] = None
    max_age_s: float | None = None
    inputs: Annotated[
        dict[str, dict[str, dict[str, Any]]] | None,
        msgspec.Meta(description="view → its key → input column → value"),
    ] = None
    encoding_format: EncodingFormat = "float"

    def options(self) -> LookupOptions:
        """What is requested beside the entities."""
        return LookupOptions(
            None, self.fallback, self.deadline_ms, self.max_age_s, self.inputs, self.encoding_format
        )


class ServiceView(msgspec.Struct):
    """What all rows of a view of a service share, or the problem that it has: all its rows are
    missing then."""

    snapshot: int | msgspec.UnsetType = msgspec.UNSET
    model: str | msgspec.UnsetType = msgspec.UNSET
    ttl_s: float | msgspec.UnsetType = msgspec.UNSET
    miss_model: Annotated[
        str | msgspec.UnsetType,
        msgspec.Meta(
            description="fingerprint of what computes misses, where that is not the view's model"
        ),
    ] = msgspec.UNSET
    base64: Base64Types = msgspec.UNSET
    unknown_features: Annotated[
        list[str] | msgspec.UnsetType,
        msgspec.Meta(description="that the view has not, as it is live: they are null"),
    ] = msgspec.UNSET
    problem: Problem | msgspec.UnsetType = msgspec.UNSET


class PartRow(Row, kw_only=True):
    """A view's row in a joined one; of a view that has a problem there is less to say."""

    key: str | None  # type: ignore[assignment]
    ttl_s: float | None  # type: ignore[assignment]
    snapshot: int | None  # type: ignore[assignment]
    model: str | None  # type: ignore[assignment]


class ServiceRow(msgspec.Struct):
    """A joined row: the entity, and what each view has of it."""

    entity: dict[str, str]
    views: dict[str, PartRow]


class ServiceAnswer(msgspec.Struct):
    """Answer of ``POST /v1/services/{service}``: rows in the order of the entities."""

    service: str
    version: Annotated[str, msgspec.Meta(description="fingerprint of the service's definition")]
    views: dict[str, ServiceView]
    rows: list[ServiceRow]


class Neighbour(Row, kw_only=True):
    """A row that a search found."""

    score: float


class SearchAnswer(msgspec.Struct):
    """Answer of ``POST /v1/views/{view}/search``: the nearest first."""

    view: str
    snapshot: int
    model: str
    metric: Literal["cosine", "dot", "l2"]
    rows: list[Neighbour]
    query_model: Annotated[
        str | msgspec.UnsetType,
        msgspec.Meta(description="fingerprint of another model that embedded what is searched by"),
    ] = msgspec.UNSET
    agreement: Annotated[
        float | msgspec.UnsetType,
        msgspec.Meta(description="how well that one agreed with the rows as they were published"),
    ] = msgspec.UNSET
    base64: Base64Types = msgspec.UNSET


class _Keys(msgspec.Struct):
    """All that a body has of keys, as raw bytes."""

    keys: list[msgspec.Raw] = []
    only: list[msgspec.Raw] | None = None
    exclude: list[msgspec.Raw] = []
    key: msgspec.Raw = msgspec.Raw(b"null")
    requests: list[_Keys] = []
    entities: dict[str, list[msgspec.Raw]] = {}


_encoder = msgspec.json.Encoder()
encode = _encoder.encode
"""Anything of an answer → JSON bytes. NaN becomes null; datetimes RFC 3339 in UTC."""

decode_lookup = msgspec.json.Decoder(LookupRequest)
decode_multi = msgspec.json.Decoder(MultiLookupRequest)
decode_search = msgspec.json.Decoder(SearchRequest)
decode_service = msgspec.json.Decoder(ServiceRequest)
_decode_keys = msgspec.json.Decoder(_Keys).decode


def decode(decoder: msgspec.json.Decoder[Any], body: bytes) -> Any:
    """A request's body.

    Raises:
        RequestError: not JSON, or not of that form; says where. Or it has too many values.
    """
    if _has_more_values(body, MAX_VALUES):
        raise RequestError(
            f"a JSON body has at most {MAX_VALUES:,} values, of which a list or an object counts"
            f" for {CONTAINER_VALUES}",
            status=413,
            code="too_many_values",
        )
    if len(body) > _FEW_BYTES:
        _check_keys(body)
    try:
        try:
            return decoder.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError):
            patient = None if _has_more_values(body, _PATIENT_VALUES) else _patiently(decoder, body)
            if patient is None:
                raise
            return patient
    except RecursionError as exc:
        raise RequestError("the body is nested too deeply", code="bad_json") from exc
    except msgspec.ValidationError as exc:
        raise RequestError(f"the body does not fit: {exc}", status=422, code="bad_request") from exc
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise RequestError(f"the body is not JSON: {exc}", code="bad_json") from exc


def _check_keys(body: bytes) -> None:
    """Check the keys of a body before an object is made of any: 7 keys that are lists of 70,000
    numbers are passed over in 5 ms, and took 140.

    Raises:
        RequestError: 413, a key has too many bytes.
    """
    try:
        found = _decode_keys(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        # reported where the whole body is decoded
        return
    for one in (found, *found.requests):
        for key in (
            *one.keys,
            *(one.only or ()),
            *one.exclude,
            one.key,
            *chain.from_iterable(one.entities.values()),
        ):
            text = memoryview(key)
            if len(text) > MAX_KEY_JSON_BYTES and text[0] != ord('"'):
                raise RequestError(
                    f"a key of several parts has at most {MAX_KEY_JSON_BYTES:,} bytes of JSON, got"
                    f" {len(text):,}",
                    status=413,
                    code="key_too_long",
                )


def _patiently(decoder: msgspec.json.Decoder[Any], body: bytes) -> Any:
    """A body by the standard library's parser, which takes what JSON allows and the quick one
    refuses whole: half of a surrogate pair, a number past float64 or of thousands of digits. What
    no key can be is one bad key then. None where it is no JSON for this one either.

    Raises:
        msgspec.ValidationError: not of that form.
        RecursionError: nested too deeply.
    """
    try:
        value = json.loads(
            body.decode(), parse_float=_number, parse_int=_integer, parse_constant=_no_constant
        )
        wanted = msgspec.convert(value, decoder.type)
    except msgspec.ValidationError:
        raise
    except ValueError:
        # or half of a surrogate pair where none can be
        return None
    for one in wanted.requests if isinstance(wanted, MultiLookupRequest) else ():
        # an unknown view, which its problem names
        one.view = one.view.encode(errors="replace").decode()
    return wanted


class _Past(float):
    """A number past float64, which is infinity; shown as it was written, so that two such keys can
    be distinguished."""

    text = ""

    def __repr__(self) -> str:
        return self.text


# which a refusal names
_Past.__name__ = "number past float64"


def _number(text: str) -> float:
    number = float(text)
    if math.isfinite(number):
        return number
    past = _Past(number)
    past.text = text
    return past


def _integer(digits: str) -> int | float:
    try:
        return int(digits)
    except ValueError:
        # more of them than Python reads: past float64 in any case
        return _number(digits)


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _has_more_values(body: bytes, most: int) -> bool:
    """Counted by the commas and brackets outside of strings, before any of it is decoded."""
    if len(body) <= _FEW_BYTES:
        return False
    # a client loads this file without it
    import numpy as np

    def values(letters: Any) -> int:
        commas, lists, objects = (int(np.count_nonzero(letters == letter)) for letter in b",[{")
        return commas + CONTAINER_VALUES * (lists + objects)

    if values(np.frombuffer(body, np.uint8)) <= most:
        return False
    if b"\\" in body:
        # in pairs from the left, as strings are read
        body = body.replace(rb"\\", b"").replace(rb"\"", b"")
    letters = np.frombuffer(body, np.uint8)
    inside = np.cumsum(letters == ord('"'), dtype=np.uint8) & 1
    return values(np.where(inside, ord(" "), letters)) > most


def schemas() -> dict[str, Any]:
    """Name → JSON Schema of every body, for the OpenAPI document."""
    requests = [LookupRequest, MultiLookupRequest, SearchRequest, ServiceRequest]
    bodies = [
        *requests,
        ViewRow,
        LookupAnswer,
        MultiLookupAnswer,
        SearchAnswer,
        ServiceAnswer,
        Problem,
    ]
    _, components = msgspec.json.schema_components(
        bodies, ref_template="#/components/schemas/{name}"
    )
    return components
