"""Frames: messages between our processes, each a JSON header and a body of bytes or rows, over
pipes or sockets."""

from __future__ import annotations

import json
import os
import struct
import sys
from collections.abc import Mapping
from typing import IO, Any

import pyarrow as pa

from precompute.workers.process import die_with_parent

_LENGTHS = struct.Struct(">IQ")


def framed(header: Mapping[str, Any], body_bytes: int = 0) -> bytes:
    """All of a message that comes before its body."""
    text = json.dumps(header, default=dict).encode()
    return _LENGTHS.pack(len(text), body_bytes) + text


def write_frame(
    file: IO[bytes], header: Mapping[str, Any], body: pa.RecordBatch | pa.Table | None = None
) -> None:
    """Write one message.

    Args:
        file: the pipe.
        header: JSON.
        body: rows, if there are any to send.

    Raises:
        OSError: the pipe has no reader any more.
    """
    data: Any = b""
    if body is not None:
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, body.schema) as writer:
            writer.write(body)
        data = memoryview(sink.getvalue())
    file.write(framed(header, len(data)))
    file.write(data)
    file.flush()


def read_frame(file: IO[bytes]) -> tuple[dict[str, Any], pa.RecordBatchReader] | None:
    """As :func:`read_message`, with a reader of the body's batches (None, where it is empty)."""
    message = read_message(file)
    if message is None:
        return None
    header, body = message
    return header, pa.ipc.open_stream(body) if body.size else None


def read_message(file: IO[bytes]) -> tuple[dict[str, Any], pa.Buffer] | None:
    """The header and the body of one message; None at the end of the file, also when it ends within
    a message."""
    lengths = file.read(_LENGTHS.size)
    if len(lengths) < _LENGTHS.size:
        return None
    text_bytes, body_bytes = _LENGTHS.unpack(lengths)
    text = file.read(text_bytes)
    body = pa.allocate_buffer(body_bytes)
    if len(text) < text_bytes or (body_bytes and file.readinto(memoryview(body)) < body_bytes):  # type: ignore[attr-defined]
        return None
    return json.loads(text), body


def take_pipes() -> tuple[IO[bytes], IO[bytes]]:
    """Take, in a child and first of all, its stdin and stdout for messages alone; what is printed,
    in Python or below it, goes to stderr. It ends with its parent."""
    die_with_parent()
    source, sink = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    return source, sink
