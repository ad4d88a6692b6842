"""Arrow: bodies as Arrow IPC streams, both ways, a few fields of which are read and written by
hand."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa

from precompute.store.errors import RequestError
from precompute.store.wire.lookup_options import MAX_KEYS

END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"
"""format/Columnar.rst, "IPC Streaming Format"."""


def field_at(data: bytes | bytearray, table: int, field: int) -> int:
    """Position of a table's field, 0 when it is absent.

    Raises:
        struct.error: the data ends before.
    """
    vtable = table - struct.unpack_from("<i", data, table)[0]
    size, at = struct.unpack_from("<H", data, vtable)[0], 4 + 2 * field
    offset: int = struct.unpack_from("<H", data, vtable + at)[0] if at < size else 0
    return table + offset if offset else 0


def table_at(data: bytes | bytearray, field: int) -> int:
    """Position of the table or vector that a field refers to.

    Raises:
        struct.error: the data ends before.
    """
    position: int = field + struct.unpack_from("<I", data, field)[0]
    return position


MAX_MESSAGES = 16
"""Messages of an Arrow body at most: schema, dictionaries and batches. Each batch has its whole
dictionary looked through, and a dictionary that comes in pieces is copied for each."""


def decode_arrow_keys(body: bytes, names: Sequence[str] = ("key",)) -> dict[str, list[str | None]]:
    """The columns of an Arrow IPC stream: text or integers, at most
    :data:`precompute.store.wire.lookup_options.MAX_KEYS` rows; a null is one bad key.

    Arrow trusts its input by default; every batch is validated in full before a value is read.

    Args:
        body: the stream.
        names: of its columns, in whatever order.

    Raises:
        RequestError: broken, compressed, in too many pieces, another column or type, or too many
            rows.
    """
    keys: dict[str, list[str | None]] = {name: [] for name in names}
    try:
        _refuse_what_takes_long(body)
        with pa.ipc.open_stream(pa.py_buffer(body)) as reader:
            if sorted(reader.schema.names) != sorted(names):
                takes = "one: key" if names == ("key",) else ", ".join(names)
                raise RequestError(
                    f"the Arrow body has columns {reader.schema.names[:5]}, it takes {takes}",
                    code="bad_arrow",
                )
            for name in names:
                kind = reader.schema.field(name).type
                if not _is_key(kind.value_type if pa.types.is_dictionary(kind) else kind):
                    raise RequestError(
                        f"the Arrow body's {name} column is {kind}, it takes string, large_string,"
                        " string_view, an integer type, or a dictionary of one",
                        code="bad_arrow",
                    )
            rows = 0
            for batch in reader:
                rows += batch.num_rows
                if rows > MAX_KEYS:
                    raise RequestError(
                        f"a request has 1 to {MAX_KEYS} keys", status=413, code="too_many_keys"
                    )
                batch.validate(full=True)
                for name, values in keys.items():
                    values.extend(_texts(batch.column(name), len(body)))
    except (pa.ArrowException, OSError, ValueError, UnicodeDecodeError) as exc:
        raise RequestError(
            f"the body is not an Arrow IPC stream: {str(exc)[:200]}", code="bad_arrow"
        ) from exc
    return keys


def _is_key(kind: pa.DataType) -> bool:
    types = pa.types
    return any(
        (
            types.is_integer(kind),
            types.is_string(kind),
            types.is_large_string(kind),
            types.is_string_view(kind),
        )
    )


def _texts(column: pa.Array, most_bytes: int) -> list[str | None]:
    """The keys of a column, None for a null.

    Views and dictionaries name one text many times: a body of 4 MB may stand for gigabytes.

    Raises:
        RequestError: the keys have more than ``most_bytes``.
    """
    if pa.types.is_dictionary(column.type):
        # of a dictionary with everybody's keys a few may be meant; there is no `take` of
        # string_view
        used, where = np.unique(column.indices.drop_null().to_numpy(), return_inverse=True)
        named = [column.dictionary.slice(i, 1) for i in used.tolist()]
        values, numbers = (
            _texts(pa.concat_arrays(named), most_bytes) if named else [],
            iter(where.tolist()),
        )
        texts = [
            values[next(numbers)] if there else None
            for there in column.indices.is_valid().to_pylist()
        ]
        size = sum(len(text) for text in texts if text is not None)
    else:
        size = 0
        if pa.types.is_string_view(column.type):
            # a view is 16 bytes, its length the first four (format/Columnar.rst, "Variable-size
            # Binary View Layout"); a null's are anything
            lengths = np.frombuffer(column.buffers()[1], "<i4")[::4][
                column.offset : column.offset + len(column)
            ]
            size = int(
                lengths[column.is_valid().to_numpy(zero_copy_only=False)].sum(dtype=np.int64)
            )
        texts = column.cast(pa.string()).to_pylist() if size <= most_bytes else []
    if size > most_bytes:
        raise RequestError(
            f"the keys of the Arrow body have {size:,} bytes", status=413, code="body_too_large"
        )
    return texts


def _refuse_what_takes_long(body: bytes) -> None:
    """Refuse a stream of too many messages, and one with compressed buffers before any is expanded:
    four megabytes may unpack to gigabytes.

    Arrow has no switch for that, so the one field that says so is read from each message's
    flatbuffer: RecordBatch.compression, field 3 of the table that Message.header, field 2, refers
    to, or, of a dictionary, of the one that DictionaryBatch.data, field 1, of that refers to
    (format/Message.fbs). Arrow before 1.0 said it in the message's custom metadata, and is still
    read.

    Raises:
        RequestError: a record batch is compressed, or there are too many.
        pyarrow.ArrowInvalid, ValueError: not an IPC stream.
    """
    for number, message in enumerate(pa.ipc.MessageReader.open_stream(pa.py_buffer(body)), 1):
        if number > MAX_MESSAGES:
            raise RequestError(
                f"the Arrow body has more than {MAX_MESSAGES} messages: put its batches together",
                code="bad_arrow",
            )
        if message.type in ("record batch", "dictionary"):
            metadata = message.metadata.to_pybytes()
            try:
                batch = table_at(
                    metadata, field_at(metadata, struct.unpack_from("<I", metadata)[0], 2)
                )
                if message.type == "dictionary":
                    batch = table_at(metadata, field_at(metadata, batch, 1))
                compressed = (
                    field_at(metadata, batch, 3) != 0 or b"experimental_compression" in metadata
                )
            except struct.error as exc:
                raise ValueError("a message's metadata is cut short") from exc
            if compressed:
                raise RequestError(
                    "the Arrow body's buffers are compressed: send them plain", code="bad_arrow"
                )


def arrow_pieces(table: pa.Table, rows: int) -> Iterator[memoryview]:
    """A table as an Arrow IPC stream of record batches of so many rows each, message by message
    (format/IPC.md, "IPC Streaming Format")."""
    yield memoryview(table.schema.serialize())
    for batch in table.to_batches(max_chunksize=rows):
        yield memoryview(batch.serialize())
    yield memoryview(END_OF_STREAM)


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
