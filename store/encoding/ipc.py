"""IPC: the little of Arrow's streams that is read or written by hand: their end, and where the
fields of a message's flatbuffer lie (https://flatbuffers.dev/internals, Arrow's
format/Message.fbs)."""

from __future__ import annotations

import struct

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
