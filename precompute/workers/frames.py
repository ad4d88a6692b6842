"""Frames: what goes between the pool and its workers. A message is the lengths of a header and a body (uint32 and uint64, big-endian), the header as JSON,
the body as an Arrow IPC stream or empty."""

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


def write_frame(file: IO[bytes], header: Mapping[str, Any], body: pa.RecordBatch | pa.Table | None = None) -> None:
    """Write one message.

    Args:
        file: the pipe.
        header: JSON.
        body: rows, if there are any to send.

    Raises:
        OSError: nobody reads the pipe any more.
    """
    text = json.dumps(header, default=dict).encode()
    data: Any = b""
    if body is not None:
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, body.schema) as writer:
            writer.write(body)
        data = memoryview(sink.getvalue())
    file.write(_LENGTHS.pack(len(text), len(data)) + text)
    file.write(data)
    file.flush()


def read_frame(file: IO[bytes]) -> tuple[dict[str, Any], pa.RecordBatchReader] | None:
    """Read one message; None at the end of the file, also when it ends within a message.

    Returns:
        the header, and a reader of the body's batches (None, where the body is empty).
    """
    lengths = file.read(_LENGTHS.size)
    if len(lengths) < _LENGTHS.size:
        return None
    text_bytes, body_bytes = _LENGTHS.unpack(lengths)
    text = file.read(text_bytes)
    body = pa.allocate_buffer(body_bytes)
    if len(text) < text_bytes or (body_bytes and file.readinto(memoryview(body)) < body_bytes):  # type: ignore[attr-defined]
        return None
    return json.loads(text), pa.ipc.open_stream(body) if body_bytes else None
