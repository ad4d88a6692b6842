"""Answer bodies: the rows of an answer as JSON, from the packed rows as they were read, and as an
Arrow IPC stream; and an estimate of their size, before a value is read or computed."""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa
from pybase64 import b64encode

from precompute.store.answers.answer import Answer
from precompute.store.answers.plan import ANSWER_FIELDS, AnswerPlan, base64_types
from precompute.store.answers.service import Refused, ServiceAnswer, refused_source, shared_of
from precompute.store.errors import RequestError
from precompute.store.feature_view import SCALAR_TYPES, FeatureView
from precompute.store.online.found_rows import FoundRows, PackedKeys, WholeColumns
from precompute.store.online.kernels import Buffer
from precompute.store.online.row_values import NUMPY_TYPES
from precompute.store.times import AnswerSource, Status, as_datetime
from precompute.store.wire.arrow import END_OF_STREAM, field_at, table_at


@lru_cache(256)
def _is_plain(plan: AnswerPlan) -> bool:
    """Whether the features' values lie in Arrow's buffers as they lie in rows: numbers and vectors
    of them."""
    return plan.reader is not None and all(
        f.packed is None and f.dtype != "bool" for f in plan.wanted
    )


key_json = _dumps = orjson.dumps
_NUMPY = orjson.OPT_SERIALIZE_NUMPY


def row_json(answer: Answer, i: int) -> bytes:
    """Row ``i`` from its key on, without the opening brace: ``"key":…,…,"features":{…}}``.

    A number of a float32 or float16 feature has as few digits as lead back to it, NaN and infinity
    are null: 384 float32 in 9 µs.
    """
    key, row, plan = _dumps(answer.keys[i]), answer.row(i), answer.plan
    if row.reason is not None:
        default = answer.default_row(i)
        members = b'"key":%b,"status":"missing","source":%b,"reason":"%b","computed_at":null,"age_s":null%b%b}'  # noqa: E501
        features = b"null" if default is None else features_json(plan, default)
        source = _dumps(answer.source(i))
        return members % (key, source, row.reason.encode(), _common(plan), features)
    value, more = answer.packed_row(i), answer.more(i)
    assert value is not None
    return b'"key":%b,"status":"%b","source":"%b",%b"computed_at":%b,"age_s":%b%b' % (
        key,
        row.status.encode(),
        row.source.encode(),
        _dumps(more)[1:-1] + b"," if more else b"",
        time_json(answer.computed_at_us(i)),
        _dumps(answer.age_s(i)),
        tail_json(plan, value, answer.model(i)),
    )


def tail_json(plan: AnswerPlan, value: Buffer, model: str | None = None) -> bytes:
    """What a row that is there says behind its age, the same as long as the pointer is:
    ``,"ttl_s":…,…,"features":{…}}``; ``model`` computed it, by default the pointer's."""
    return b"%b%b}" % (_common(plan, model), features_json(plan, value))


def tail_under(plan: AnswerPlan, tail: bytes) -> bytes:
    """As :func:`tail_json`, of a row whose tail under another plan of the same features is
    known."""
    return _common(plan) + tail.partition(b',"features":')[2]


def features_json(plan: AnswerPlan, value: Buffer) -> bytes:
    """The features of a packed row."""
    features = plan.codec.arrays_one(value, plan.features)[1]
    for name in plan.base64:
        if features[name] is not None:
            features[name] = b64encode(features[name]).decode()
    return _dumps(features, option=_NUMPY)


def head_json(plan: AnswerPlan) -> bytes:
    """What an answer says before its rows, from the view's name on, without the opening brace, and
    with a comma behind: of one row, no snapshot and model."""
    return b'"view":%b,' % _dumps(plan.view.name) + (
        b'"base64":%b,' % _dumps(plan.base64) if plan.base64 else b""
    )


@lru_cache(4096)
def time_json(us: int) -> bytes:
    """µs since 1970 as a JSON text, RFC 3339 in UTC; a snapshot's rows share few times."""
    return _dumps(as_datetime(us), option=orjson.OPT_UTC_Z)


def lookup_json(answer: Answer) -> bytes:
    """A lookup's whole answer."""
    return b"".join(lookup_pieces(answer, len(answer.keys)))


def lookup_pieces(answer: Answer, rows: int) -> Iterator[bytes]:
    """A lookup's answer in pieces of so many rows."""
    pointer = answer.pointer
    before = b'{%b"snapshot":%d,"model":%b,"rows":[{' % (
        head_json(answer.plan),
        pointer.snapshot,
        _dumps(pointer.model),
    )
    count, columns = len(answer.keys), _plain_columns(answer)
    for start in range(0, count, rows):
        yield before + b",{".join(_rows(answer, columns, start, min(count, start + rows)))
        before = b",{"
    yield b"]}"


def _plain_columns(answer: Answer) -> WholeColumns | None:
    """The rows' columns, where JSON can be made of them one by one."""
    columns = answer.whole_columns()
    return (
        columns
        if columns is not None and _is_plain(answer.plan) and columns.has_no_nulls()
        else None
    )


def _rows(answer: Answer, columns: WholeColumns | None, start: int, end: int) -> list[bytes]:
    """:func:`row_json` of these rows."""
    return (
        [row_json(answer, i) for i in range(start, end)]
        if columns is None
        else _fresh_rows(answer, columns, start, end)
    )


def service_pieces(answer: ServiceAnswer, rows: int) -> Iterator[bytes]:
    """A service's answer in pieces of so many rows."""
    service, entities = answer.service, answer.entities
    head = b'{"service":%b,"version":%b,"views":%b,"rows":[{'
    before = head % (_dumps(service.name), _dumps(service.fingerprint), _dumps(answer.views()))
    columns = [_plain_columns(part) if isinstance(part, Answer) else None for part in answer.parts]
    for start in range(0, entities.count, rows):
        end = min(entities.count, start + rows)
        named = [(_dumps(name), texts[start:end]) for name, texts in entities.texts.items()]
        entity = [
            b",".join([b"%b:%b" % (name, _dumps(texts[i])) for name, texts in named])
            for i in range(end - start)
        ]
        views = zip(
            *(_part_rows(answer, i, columns[i], start, end) for i in range(len(answer.parts))),
            strict=True,
        )
        joined = zip(entity, map(b",".join, views), strict=True)
        yield before + b",{".join([b'"entity":{%b},"views":{%b}}' % row for row in joined])
        before = b",{"
    yield b"]}"


def _part_rows(
    answer: ServiceAnswer, number: int, columns: WholeColumns | None, start: int, end: int
) -> list[bytes]:
    """A view's rows of a service's answer, its name before each."""
    part, answered = answer.service.parts[number], answer.parts[number]
    name = _dumps(part.view)
    if isinstance(answered, Refused):
        features = (
            {feature: part.defaults.get(feature) for feature in part.features}
            if part.defaults
            else None
        )
        row: dict[str, Any] = dict.fromkeys(name for name, _ in ANSWER_FIELDS)
        row |= {
            "status": str(Status.MISSING),
            "source": refused_source(part),
            "reason": str(answered.reason),
        }
        return [b"%b:%b" % (name, _dumps({**row, "features": features}))] * (end - start)
    rows = _rows(answered, columns, start, end)
    unknown = shared_of(part, answered.plan).get("unknown_features", ())
    if unknown:
        # as in Arrow: what a service names has its place, and is null
        nulls = b",".join([b"%b:null" % _dumps(feature) for feature in unknown])
        rows = [
            (
                row
                if row.endswith(b"null}")
                else row[:-2] + (b"" if row[-3:-2] == b"{" else b",") + nulls + b"}}"
            )
            for row in rows
        ]
    return [b"%b:{%b" % (name, row) for row in rows]


def _fresh_rows(answer: Answer, columns: WholeColumns, start: int, end: int) -> list[bytes]:
    """:func:`row_json` of these rows, whose values lie in columns: 12 µs a row of 384 float32 in
    place of 15; 10 of these are its digits."""
    members = _fresh_form(answer.plan)
    times = columns.computed_at_us[start:end]
    ages = answer.sighting.ages_us(times, answer.now_us) / 1e6
    texts: list[Iterable[bytes]] = [
        map(_dumps, answer.keys[start:end]),
        map(time_json, times.tolist()),
        map(_dumps, ages.tolist()),
    ]
    for feature, values in zip(answer.plan.wanted, columns.values[1:], strict=True):
        numbers = values.view(NUMPY_TYPES[feature.dtype])
        if feature.dim is None:
            texts.append(_dumps(numbers[start:end], option=_NUMPY)[1:-1].split(b","))
        elif feature.name in answer.plan.base64:
            texts.append(_base64_rows(numbers.reshape(-1, feature.dim)[start:end]))
        else:
            texts.append(
                [
                    _dumps(vector, option=_NUMPY)
                    for vector in numbers.reshape(-1, feature.dim)[start:end]
                ]
            )
    return [members % row for row in zip(*texts, strict=True)]


def _base64_rows(vectors: npt.NDArray[Any]) -> list[bytes]:
    """Each row of (rows, dim) as base64: of rows that fill whole groups of three bytes all at once,
    0.2 µs a row of 384 float32, where one by one they take 0.4, by ``binascii`` 1.2 and as digits
    10."""
    row_bytes = vectors.shape[1] * vectors.itemsize
    if row_bytes % 3:
        return [b64encode(vector.data) for vector in vectors]
    text, step = b64encode(vectors.data), row_bytes // 3 * 4
    return [text[at : at + step] for at in range(0, len(text), step)]


@lru_cache(256)
def _fresh_form(plan: AnswerPlan) -> bytes:
    """A fresh row of the store, with room for its key, time, age and values."""
    values = [
        (b'"%b":"%%b"' if f.name in plan.base64 else b'"%b":%%b') % f.name.encode()
        for f in plan.wanted
    ]
    before = b'"key":%%b,"status":"%b","source":"%b","computed_at":%%b,"age_s":%%b' % (
        Status.FRESH.encode(),
        AnswerSource.STORE.encode(),
    )
    return before + _common(plan).replace(b"%", b"%%") + b"{%b}}" % b",".join(values)


def search_json(
    found: Mapping[str, Any], view: FeatureView, encoded: Collection[str] | None = None
) -> bytes:
    """A search's answer, as :meth:`precompute.store.answers.lookup.Lookup.find` gives both; numbers
    as :func:`row_json` has them, so that a row reads the same wherever it is found.

    Args:
        encoded: features whose vectors are base64, where they can be; None: as lists.
    """
    narrow = {f.name: np.dtype(f.dtype) for f in view.features if f.dtype in ("float16", "float32")}
    base64 = {} if encoded is None else base64_types(view.feature(name) for name in encoded)
    # one by one: other threads have their turn between them
    rows = b",".join([_neighbour_json(row, narrow, base64) for row in found["rows"]])
    members = {name: value for name, value in found.items() if name != "rows"} | (
        {"base64": base64} if base64 else {}
    )
    return b'%b,"rows":[%b]}' % (_dumps(members)[:-1], rows)


def _neighbour_json(
    row: Mapping[str, Any], narrow: Mapping[str, np.dtype[Any]], base64: Collection[str]
) -> bytes:
    features: dict[str, Any] = {
        # [()]: a number on its own is no array
        name: value if value is None or name not in narrow else np.array(value, narrow[name])[()]
        for name, value in row["features"].items()
    }
    for name in base64:
        if features[name] is not None:
            features[name] = b64encode(features[name]).decode()
    return _dumps({**row, "features": features}, option=_NUMPY | orjson.OPT_UTC_Z)


@lru_cache(256)
def _common(plan: AnswerPlan, model: str | None = None) -> bytes:
    pointer = plan.pointer
    return b',"ttl_s":%b,"snapshot":%d,"model":%b,"features":' % (
        _dumps(float(plan.view.ttl_s)),
        pointer.snapshot,
        _dumps(model or pointer.model),
    )


# ---- Arrow: the stream of an answer whose rows are all fresh and whole, put together from one that
# was made before of as many rows. Only the keys, the times, the ages and the features' values are
# others, and only the keys have another size. With these last, all that is changed in the message's
# metadata are two lengths: 100 rows of 384 float32 take 20 µs, where a table and pyarrow's writer
# take 55.

_LINE_BYTES = 64
"""Where buffers begin, as pyarrow's own do."""
_KEY_OFFSETS, _KEY_TEXT = 1, 2
"""Numbers of buffers: the columns' in the order of the schema, of each its validity first
(format/Message.fbs, RecordBatch)."""
_PLACE = struct.Struct("<qq")
_LENGTH = struct.Struct("<q")


def stream_of(answer: Answer) -> list[Buffer] | None:
    """The answer as an Arrow IPC stream, in parts that are sent one after the other; None where it
    takes a table: rows are missing, stale or computed, or values null or of other types."""
    columns, keys = answer.whole_columns(), answer.found.keys
    if (
        columns is None
        or not isinstance(keys, PackedKeys)
        or not (_is_plain(answer.plan) and columns.has_no_nulls())
    ):
        return None
    template = _retained(answer.plan, len(keys))
    if template.head == b"":
        template.make(answer.table(), answer.plan.own_columns)
    ages = answer.sighting.ages_us(columns.computed_at_us, answer.now_us) / 1e6
    offsets = keys.packed.offsets.astype(np.int32)
    return template.filled(
        [columns.computed_at_us, ages, offsets, *columns.values[1:]], keys.packed.data
    )


class _Template:
    """What answers of so many rows under one plan share, once :meth:`make` was given the first of
    them."""

    def __init__(self) -> None:
        self.head = b""
        self._constants = b""
        self._key_length_at = self._body_length_at = 0
        self._start = 0

    def make(self, table: pa.Table, own: int) -> None:
        """Take the table of a whole answer apart, which has ``own`` columns before the features."""
        schema = table.schema.serialize().to_pybytes()
        message = table.to_batches()[0].serialize().to_pybytes()
        # a marker, the size of the metadata, the metadata, the body
        body_at = 8 + _LENGTH.unpack_from(message[4:8] + bytes(4))[0]
        metadata, body = bytearray(message[8:body_at]), message[body_at:]
        root = struct.unpack_from("<I", metadata)[0]
        batch = table_at(metadata, field_at(metadata, root, 2))
        places = table_at(metadata, field_at(metadata, batch, 2)) + 4
        changing = _changing(table.schema, own)
        constants = bytearray()
        for number in range(struct.unpack_from("<I", metadata, places - 4)[0]):
            if number not in changing:
                at, size = _PLACE.unpack_from(metadata, places + 16 * number)
                _PLACE.pack_into(metadata, places + 16 * number, len(constants), size)
                constants += body[at : at + size] + bytes(-size % _LINE_BYTES)
        end = len(constants)
        for number in changing:
            size = _PLACE.unpack_from(metadata, places + 16 * number)[1]
            _PLACE.pack_into(metadata, places + 16 * number, end, size)
            end += size + -size % _LINE_BYTES
        self._start = _PLACE.unpack_from(metadata, places + 16 * _KEY_TEXT)[0]
        self._constants = bytes(constants)
        before = len(schema) + 8
        self._key_length_at = before + places + 16 * _KEY_TEXT + 8
        self._body_length_at = before + field_at(metadata, root, 3)
        self.head = schema + message[:8] + bytes(metadata)

    def filled(self, values: list[np.ndarray], keys: np.ndarray) -> list[Buffer]:
        """The stream of an answer: of its times, ages, offsets of the keys and each feature's
        values, as they lie in memory, and the keys' text."""
        head = bytearray(self.head)
        size = keys.nbytes
        _LENGTH.pack_into(head, self._key_length_at, size)
        _LENGTH.pack_into(head, self._body_length_at, self._start + size + -size % _LINE_BYTES)
        parts: list[Buffer] = [memoryview(head), self._constants]
        for value in [*values, keys]:
            # without the extension a column may be read where it lies, row by row
            parts += (
                np.ascontiguousarray(value).data.cast("B"),
                _PADDING[-value.nbytes % _LINE_BYTES],
            )
        parts.append(END_OF_STREAM)
        return parts


_PADDING = [bytes(size) for size in range(_LINE_BYTES)]


@lru_cache(32)
def _retained(plan: AnswerPlan, rows: int) -> _Template:
    """100 kB for a thousand rows; of the plans and row counts used last."""
    return _Template()


def _changing(schema: pa.Schema, own: int) -> list[int]:
    """Numbers of the buffers that are another answer's own, in the order that
    :meth:`_Template.filled` is given them."""
    first, number = {}, 0
    for field in schema:
        first[field.name] = number
        number += (
            3 if pa.types.is_string(field.type) or pa.types.is_fixed_size_list(field.type) else 2
        )
    features = schema.names[own:]
    # of a list the child's values: behind its own validity comes the child's
    values = [
        first[name] + (2 if pa.types.is_fixed_size_list(schema.field(name).type) else 1)
        for name in features
    ]
    return [first["computed_at"] + 1, first["age_s"] + 1, _KEY_OFFSETS, *values, _KEY_TEXT]


# ---- Answer size: an estimate of an answer's bytes, made before a value is read or computed; and
# the memory that all answers of a worker share.


MAX_ANSWER_BYTES = 64 * 2**20
"""Of one answer, unless configured."""
LARGE_BYTES, LARGE_ARROW_BYTES = 256 * 1024, 2 * 2**20
"""An answer of more is made and sent piece by piece: what takes longer than a millisecond or two to
make."""
_IN_HAND = 4
"""Largest answers that are being sent at a time."""

_JSON_FRAME_BYTES, _ARROW_FRAME_BYTES = 330, 160
"""Of a row beside key and features: status, times, the model's fingerprint; and their names in
JSON."""
_DIGITS = {
    "float16": 9,
    "float32": 13,
    "float64": 22,
    "int8": 5,
    "int16": 7,
    "int32": 12,
    "int64": 21,
    "bool": 6,
}
"""Characters of a number in JSON with its comma, about; of floats: most have no exponent."""


@lru_cache(256)
def _row_bytes(plan: AnswerPlan, as_arrow: bool) -> int:
    """Bytes of a row's fixed part and its frame."""
    total = _ARROW_FRAME_BYTES if as_arrow else _JSON_FRAME_BYTES
    for feature in plan.wanted:
        count = 1 if feature.dim is None else feature.dim
        if feature.dtype == "string" or feature.max_items is not None:
            total += len(feature.name) + 8
        elif as_arrow:
            total += count * ((SCALAR_TYPES[feature.dtype].bit_width + 7) // 8)
        elif feature.name in plan.base64:
            total += (
                len(feature.name)
                + 5
                + (count * SCALAR_TYPES[feature.dtype].bit_width // 8 + 2) // 3 * 4
            )
        else:
            total += len(feature.name) + 5 + count * _DIGITS[feature.dtype]
    return total


def answer_bytes(plan: AnswerPlan, found: FoundRows, as_arrow: bool) -> int:
    """The size of an answer with the rows that were found, about."""
    rows = len(found)
    variable = (
        0 if plan.codec.exact else max(0, found.packed.size_bytes - rows * plan.codec.fixed_bytes)
    )
    keys = (
        found.keys.packed.size_bytes
        if isinstance(found.keys, PackedKeys)
        else sum(map(len, found.keys))
    )
    # text takes its bytes, numbers of a list two to three times theirs as digits
    return rows * _row_bytes(plan, as_arrow) + keys + variable * (1 if as_arrow else 2)


class Measure:
    """What one request will be answered with, added up over its views.

    Args:
        limit: bytes of the whole answer.
        as_arrow: its form.
    """

    def __init__(self, limit: int, as_arrow: bool = False) -> None:
        self.total = 0
        self._limit, self.as_arrow = limit, as_arrow

    @property
    def is_large(self) -> bool:
        """Whether the answer is to be made and sent piece by piece."""
        return self.total > (LARGE_ARROW_BYTES if self.as_arrow else LARGE_BYTES)

    def add(self, plan: AnswerPlan, found: FoundRows) -> None:
        """Take what is about to be answered into account.

        Raises:
            RequestError: 413, with the figure.
        """
        total = self.total + answer_bytes(plan, found, self.as_arrow)
        if total > self._limit:
            raise RequestError(
                f"the answer would have about {total:,} bytes, at most {self._limit:,} are sent:"
                " ask for fewer keys or features, or for Arrow",
                status=413,
                code="answer_too_large",
            )
        self.total = total


class Room:
    """What the large answers that are being sent may take together.

    Args:
        answer_bytes: of one answer at most.
    """

    def __init__(self, answer_bytes: int) -> None:
        self._left = _IN_HAND * answer_bytes

    def take(self, size_bytes: int) -> None:
        """Take memory before an answer is sent; :meth:`give` it back after.

        Raises:
            RequestError: 503, others take it all.
        """
        if size_bytes > self._left:
            raise RequestError(
                "answers of many bytes are being sent to others; try again", status=503, code="busy"
            )
        self._left -= size_bytes

    def give(self, size_bytes: int) -> None:
        """Give memory back after an answer was sent, or could not be."""
        self._left += size_bytes
