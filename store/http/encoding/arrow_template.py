"""Arrow template: the IPC stream of an answer whose rows are all fresh and whole, put together from
one made before of as many rows.

Of such an answer only the keys, the times, the ages and the features' values are others, and only
the keys have another size. With these last, all that is changed in the message's metadata are two
lengths: 100 rows of 384 float32 take 20 µs, where a table and pyarrow's writer take 55.
"""

from __future__ import annotations

import struct
from functools import lru_cache

import numpy as np
import pyarrow as pa

from precompute.store.answers.answer import Answer, AnswerPlan
from precompute.store.online.found_rows import PackedKeys
from precompute.store.online.packed import Buffer
from precompute.store.wire.arrow import END_OF_STREAM, field_at, table_at

_LINE_BYTES = 64
"""Where buffers begin, as pyarrow's own do."""
_KEY_OFFSETS, _KEY_TEXT = 1, 2
"""Numbers of buffers: the columns' in the order of the schema, of each its validity first
(format/Message.fbs, RecordBatch)."""
_PLACE = struct.Struct("<qq")
_LENGTH = struct.Struct("<q")


@lru_cache(256)
def is_plain(plan: AnswerPlan) -> bool:
    """Whether the features' values lie in Arrow's buffers as they lie in rows: numbers and vectors
    of them."""
    features = (
        plan.view.features
        if plan.features is None
        else [plan.view.feature(name) for name in plan.features]
    )
    return plan.reader is not None and all(f.packed is None and f.dtype != "bool" for f in features)


def stream_of(answer: Answer) -> list[Buffer] | None:
    """The answer as an Arrow IPC stream, in parts that are sent one after the other; None where it
    takes a table: rows are missing, stale or computed, or values null or of other types."""
    columns, keys = answer.whole_columns(), answer.found.keys
    if (
        columns is None
        or not isinstance(keys, PackedKeys)
        or not (is_plain(answer.plan) and columns.has_no_nulls())
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
        """Take a table of a whole answer apart.

        Args:
            table: as :meth:`precompute.store.answers.answer.Answer.table` gives it.
            own: how many columns it has before those of the features.
        """
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
        """The stream of an answer.

        Args:
            values: times, ages, offsets of the keys, and each feature's values, as they lie in
                memory.
            keys: the keys' text.
        """
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
