"""Frames: what goes between processes of ours, such as the pool and its workers. A message is the lengths of a header and a body (uint32 and uint64,
big-endian), the header as JSON, the body as bytes: to and from a worker an Arrow IPC stream, or empty."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import IO, Any

import pyarrow as pa

# to the worker:  the model to load, its tables, then windows, {} with the rows; end of file: end at once
# from it:        {"kind": "ready", "device": …}                       the model is loaded
#                 {"kind": "beat", "steps": n}                         the process lives, and has finished so many batches
#                 {"kind": "done", "last": …, "rejections": …, …}      body: row numbers, then the features; of the window that came first
#                                                                      of those not done, all that is left of it if it is the last
#                 {"kind": "error", "error": "ModelError", "text": …}  nothing follows

_LENGTHS = struct.Struct(">IQ")


def framed(header: Mapping[str, Any], body_bytes: int = 0) -> bytes:
    """All of a message that comes before its body."""
    text = json.dumps(header, default=dict).encode()
    return _LENGTHS.pack(len(text), body_bytes) + text


def write_frame(file: IO[bytes], header: Mapping[str, Any], body: pa.RecordBatch | pa.Table | None = None) -> None:
    """Write one message.

    Args:
        file: the pipe.
        header: JSON.
        body: rows, if there are any to send.

    Raises:
        OSError: nobody reads the pipe any more.
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
    """Read one message; None at the end of the file, also when it ends within a message.

    Returns:
        the header, and a reader of the body's batches (None, where the body is empty).
    """
    message = read_message(file)
    if message is None:
        return None
    header, body = message
    return header, pa.ipc.open_stream(body) if body.size else None


def read_message(file: IO[bytes]) -> tuple[dict[str, Any], pa.Buffer] | None:
    """As :func:`read_frame`, the body as it came."""
    lengths = file.read(_LENGTHS.size)
    if len(lengths) < _LENGTHS.size:
        return None
    text_bytes, body_bytes = _LENGTHS.unpack(lengths)
    text = file.read(text_bytes)
    body = pa.allocate_buffer(body_bytes)
    if len(text) < text_bytes or (body_bytes and file.readinto(memoryview(body)) < body_bytes):  # type: ignore[attr-defined]
        return None
    return json.loads(text), body
