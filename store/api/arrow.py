"""Arrow: bodies as Arrow IPC streams, both ways; apart from the JSON ones, so that who needs no Arrow loads none."""

from __future__ import annotations

import struct

import pyarrow as pa

from store.errors import RequestError
from store.lookup_options import MAX_KEYS


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
