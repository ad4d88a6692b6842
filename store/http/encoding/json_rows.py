"""JSON rows: an answer's rows as JSON, from the packed rows as they were read."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
from pybase64 import b64encode

from precompute.store.answers.answer import Answer, AnswerPlan, base64_types
from precompute.store.answers.service import Refused, ServiceAnswer, refused_source, shared_of
from precompute.store.feature_view import Feature, FeatureView
from precompute.store.http.encoding.arrow_template import is_plain
from precompute.store.online.found_rows import WholeColumns
from precompute.store.online.packed import Buffer
from precompute.store.online.row_values import NUMPY_TYPES
from precompute.store.times import AnswerSource, Status, as_datetime

key_json = _dumps = orjson.dumps
_NUMPY = orjson.OPT_SERIALIZE_NUMPY


def row_json(answer: Answer, i: int) -> bytes:
    """Row ``i`` from its key on, without the opening brace: ``"key":…,…,"features":{…}}``.

    A number of a float32 or float16 feature has as few digits as lead back to it, NaN and infinity
    are null: 384 float32 in 9 µs.
    """
    key, reason = _dumps(answer.keys[i]), answer.reason(i)
    if reason is not None:
        default, plan = answer.default_row(i), answer.plan
        members = b'"key":%b,"status":"missing","source":%b,"reason":"%b","computed_at":null,"age_s":null%b%b}'  # noqa: E501
        features = b"null" if default is None else features_json(plan, default)
        return members % (key, _dumps(answer.source(i)), reason.encode(), _common(plan), features)
    members, value = (
        b'"key":%b,"status":"%b","source":"%b",%b"computed_at":%b,"age_s":%b%b',
        answer.packed_row(i),
    )
    assert value is not None
    status, source, like = (
        answer.status(i).encode(),
        str(answer.source(i)).encode(),
        answer.likes.get(i),
    )
    whose = (
        b""
        if like is None
        else b'"similarity":%b,"nearest":%b,' % (_dumps(like.similarity), _dumps(like.key))
    )
    return members % (
        key,
        status,
        source,
        whose,
        time_json(answer.computed_at_us(i)),
        _dumps(answer.age_s(i)),
        tail_json(answer.plan, value),
    )


def tail_json(plan: AnswerPlan, value: Buffer) -> bytes:
    """What a row that is there says behind its age, the same as long as the pointer is:
    ``,"ttl_s":…,…,"features":{…}}``."""
    return b"%b%b}" % (_common(plan), features_json(plan, value))


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
        if columns is not None and is_plain(answer.plan) and columns.has_no_nulls()
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
        row = dict.fromkeys(
            (
                "key",
                "status",
                "source",
                "reason",
                "computed_at",
                "age_s",
                "ttl_s",
                "snapshot",
                "model",
            )
        )
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
    members, features = _fresh_form(answer.plan)
    times = columns.computed_at_us[start:end]
    ages = answer.sighting.ages_us(times, answer.now_us) / 1e6
    texts: list[Iterable[bytes]] = [
        map(_dumps, answer.keys[start:end]),
        map(time_json, times.tolist()),
        map(_dumps, ages.tolist()),
    ]
    for feature, values in zip(features, columns.values[1:], strict=True):
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
def _fresh_form(plan: AnswerPlan) -> tuple[bytes, list[Feature]]:
    """A fresh row of the store, with room for its key, time, age and values; and the features that
    these are of."""
    view = plan.view
    features = (
        list(view.features)
        if plan.features is None
        else [view.feature(name) for name in plan.features]
    )
    values = [
        (b'"%b":"%%b"' if f.name in plan.base64 else b'"%b":%%b') % f.name.encode()
        for f in features
    ]
    before = b'"key":%%b,"status":"%b","source":"%b","computed_at":%%b,"age_s":%%b' % (
        Status.FRESH.encode(),
        AnswerSource.STORE.encode(),
    )
    return before + _common(plan).replace(b"%", b"%%") + b"{%b}}" % b",".join(values), features


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
def _common(plan: AnswerPlan) -> bytes:
    """What all rows under one plan say."""
    pointer = plan.pointer
    return b',"ttl_s":%b,"snapshot":%d,"model":%b,"features":' % (
        _dumps(float(plan.view.ttl_s)),
        pointer.snapshot,
        _dumps(pointer.model),
    )
