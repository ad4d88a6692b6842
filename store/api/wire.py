"""Wire: how requests and answers look in JSON and Arrow, and the limits on them; `/openapi.json` has its schemas from here."""

from __future__ import annotations

import struct
from datetime import datetime
from typing import Annotated, Any, Literal

import msgspec
import pyarrow as pa

from store.errors import RequestError
from store.freshness import AnswerSource, Reason, Status
from store.lookup_options import MAX_KEYS, LookupOptions, SearchOptions

JSON = "application/json"
ARROW = "application/vnd.apache.arrow.stream"
PROBLEM = "application/problem+json"

MAX_BODY_BYTES = 4 * 2**20
MAX_REQUESTS = 32
"""Lookups in one ``POST /v1/lookup``."""


class LookupRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Body of ``POST /v1/views/{view}/lookup``."""

    keys: list[Any]
    features: list[str] | None = None
    fallback: bool = True
    deadline_ms: float | None = None
    max_age_s: float | None = None
    inputs: dict[str, dict[str, Any]] | None = None

    def options(self) -> LookupOptions:
        """What is asked for beside the keys."""
        return LookupOptions(self.features, self.fallback, self.deadline_ms, self.max_age_s, self.inputs)


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
    """Body of ``POST /v1/views/{view}/search``: exactly one of key, vector and inputs."""

    key: Any = None
    vector: list[float] | None = None
    inputs: dict[str, Any] | None = None
    k: int = 10
    filter: Annotated[
        dict[str, Scalar | list[Scalar] | Bounds] | None,
        msgspec.Meta(description="scalar feature → a value it must have, some that it may have, or bounds; all must hold"),
    ] = None
    only: Annotated[list[Any] | None, msgspec.Meta(description="the only keys that may be found")] = None
    exclude: Annotated[list[Any], msgspec.Meta(description="keys that are left out")] = []
    features: list[str] = []
    deadline_ms: float | None = None
    model: Annotated[
        str | None,
        msgspec.Meta(description="fingerprint of the model that made the vector; refused where it is not the live one"),
    ] = None

    def options(self) -> SearchOptions:
        """What is asked for."""
        conditions = None if self.filter is None else {name: _condition(wanted) for name, wanted in self.filter.items()}
        return SearchOptions(
            self.key,
            self.vector,
            self.inputs,
            self.k,
            conditions,
            self.only,
            self.exclude,
            self.features,
            self.deadline_ms,
            self.model,
        )


class Row(msgspec.Struct, kw_only=True):
    """A row of an answer."""

    key: str
    status: Status
    source: AnswerSource | None
    reason: Annotated[Reason | msgspec.UnsetType, msgspec.Meta(description="of a missing row")] = msgspec.UNSET
    computed_at: Annotated[datetime, msgspec.Meta(tz=True)] | None
    age_s: float | None
    ttl_s: float
    snapshot: int
    model: Annotated[str, msgspec.Meta(description="fingerprint of the model the row was computed by")]
    features: dict[str, Any] | None


class ViewRow(Row, kw_only=True):
    """Answer of ``GET /v1/views/{view}/rows/{key}``."""

    view: str


class LookupAnswer(msgspec.Struct):
    """Answer of ``POST /v1/views/{view}/lookup``: rows in the order of the keys."""

    view: str
    snapshot: int
    model: str
    rows: list[Row]


class MultiLookupAnswer(msgspec.Struct):
    """Answer of ``POST /v1/lookup``, in the order of the requests."""

    responses: list[LookupAnswer]


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


class Problem(msgspec.Struct):
    """A refusal, as RFC 9457 has it: ``type`` names the kind for programs, ``detail`` tells a person; of a missing row, whose it would have been."""

    type: str
    title: str
    status: int
    detail: str
    snapshot: int | msgspec.UnsetType = msgspec.UNSET
    model: str | msgspec.UnsetType = msgspec.UNSET


_encoder = msgspec.json.Encoder()
encode = _encoder.encode
"""Anything of an answer → JSON bytes. NaN becomes null; datetimes RFC 3339 in UTC."""

decode_lookup = msgspec.json.Decoder(LookupRequest)
decode_multi = msgspec.json.Decoder(MultiLookupRequest)
decode_search = msgspec.json.Decoder(SearchRequest)


def decode(decoder: msgspec.json.Decoder[Any], body: bytes) -> Any:
    """A request's body.

    Raises:
        RequestError: not JSON, or not of that form; says where.
    """
    try:
        return decoder.decode(body)
    except RecursionError as exc:
        raise RequestError("the body is nested too deeply", code="bad_json") from exc
    except msgspec.ValidationError as exc:
        raise RequestError(f"the body does not fit: {exc}", status=422, code="bad_request") from exc
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise RequestError(f"the body is not JSON: {exc}", code="bad_json") from exc


def decode_arrow_keys(body: bytes) -> list[str]:
    """The ``key`` column of an Arrow IPC stream: string or integer, at most :data:`store.answer.MAX_KEYS` rows.

    Arrow trusts its input by default; every batch is validated in full before a value is read.

    Raises:
        RequestError: broken, compressed, another column or type, nulls, or too many rows.
    """
    keys: list[str] = []
    try:
        _refuse_compression(body)
        with pa.ipc.open_stream(pa.py_buffer(body)) as reader:
            if reader.schema.names != ["key"]:
                raise RequestError(f"the Arrow body has columns {reader.schema.names[:5]}, it takes one: key", code="bad_arrow")
            kind = reader.schema.field("key").type
            if not (pa.types.is_string(kind) or pa.types.is_integer(kind)):
                raise RequestError(f"the Arrow body's key column is {kind}, it takes string or an integer type", code="bad_arrow")
            for batch in reader:
                if len(keys) + batch.num_rows > MAX_KEYS:
                    raise RequestError(f"a request has 1 to {MAX_KEYS} keys", status=413, code="too_many_keys")
                batch.validate(full=True)
                if batch.column(0).null_count:
                    raise RequestError("the Arrow body has a null key", code="bad_arrow")
                keys.extend(batch.column(0).cast(pa.string()).to_pylist())
    except (pa.ArrowException, OSError, ValueError, UnicodeDecodeError) as exc:
        raise RequestError(f"the body is not an Arrow IPC stream: {str(exc)[:200]}", code="bad_arrow") from exc
    return keys


def _refuse_compression(body: bytes) -> None:
    """Refuse a stream with compressed buffers before any is expanded: four megabytes may unpack to gigabytes.

    Arrow has no switch for that, so the one field that tells is read from each message's flatbuffer: RecordBatch.compression, field 3
    of the table that Message.header, field 2, refers to (format/Message.fbs). Arrow before 1.0 said it in the message's custom metadata, and is still read.

    Raises:
        RequestError: a record batch is compressed.
        pyarrow.ArrowInvalid, ValueError: not an IPC stream.
    """
    for message in pa.ipc.MessageReader.open_stream(pa.py_buffer(body)):
        if message.type == "record batch":
            metadata = message.metadata.to_pybytes()
            try:
                header = _flatbuffer_field(metadata, struct.unpack_from("<I", metadata)[0], 2)
                batch = header + struct.unpack_from("<I", metadata, header)[0]
                compressed = _flatbuffer_field(metadata, batch, 3) != 0 or b"experimental_compression" in metadata
            except struct.error as exc:
                raise ValueError("a message's metadata is cut short") from exc
            if compressed:
                raise RequestError("the Arrow body's buffers are compressed: send them plain", code="bad_arrow")


def _flatbuffer_field(data: bytes, table: int, field: int) -> int:
    """Position of a table's field, 0 when it is absent."""
    vtable = table - struct.unpack_from("<i", data, table)[0]
    size, at = struct.unpack_from("<H", data, vtable)[0], 4 + 2 * field
    offset: int = struct.unpack_from("<H", data, vtable + at)[0] if at < size else 0
    return table + offset if offset else 0


def encode_arrow(table: pa.Table) -> memoryview:
    """A table as an Arrow IPC stream."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return memoryview(sink.getvalue())


def decode_arrow(body: bytes) -> pa.Table:
    """The table that :func:`encode_arrow` wrote; for the client, which trusts its server."""
    with pa.ipc.open_stream(pa.py_buffer(body)) as reader:
        return reader.read_all()


def schemas() -> dict[str, Any]:
    """Name → JSON Schema of every body, for the OpenAPI document."""
    bodies = [LookupRequest, MultiLookupRequest, SearchRequest, ViewRow, LookupAnswer, MultiLookupAnswer, SearchAnswer, Problem]
    _, components = msgspec.json.schema_components(bodies, ref_template="#/components/schemas/{name}")
    return components
