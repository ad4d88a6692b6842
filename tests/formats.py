"""Formats: stored files as a version with another format would have written them, whole by their
own checksums."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import xxhash

from precompute.store.disk.record import digest_of
from precompute.store.online.kernels import hash_of

Change = Callable[[dict[str, Any]], Any]


def later(body: dict[str, Any]) -> None:
    """As the next format has it."""
    body["format"] = 4


def needy(body: dict[str, Any]) -> None:
    """Of this format, and with something that has to be known."""
    body["needs"] = ["colours"]


def earlier(body: dict[str, Any]) -> None:
    """As before there were formats."""
    del body["format"]
    if "blake2b" in body:
        body["seal"] = body.pop("blake2b")


CHANGES: list[Change] = [later, needy, earlier]


def resealed(data: bytes, change: Change) -> bytes:
    """A record, or the lines of a log, with another format."""
    if not data.endswith(b"\n") or data.startswith(b"{\n"):
        return _resealed(data, change)
    return b"".join(_resealed(line, change) + b"\n" for line in data.splitlines())


def _resealed(data: bytes, change: Change) -> bytes:
    body = json.loads(data)
    if "zz_sha256" in body:
        del body["zz_sha256"]
        change(body)
        text = json.dumps(body, indent=1, sort_keys=True)[: -len("\n}")]
        digest = hashlib.sha256(text.encode()).hexdigest()
        return f'{text},\n "zz_sha256": "{digest}"\n}}\n'.encode()
    if "xxh3" in body:
        change(body["index"])
        inner = json.dumps(body["index"], sort_keys=True)
        mark = xxhash.xxh3_128_hexdigest(inner.encode())
        return f'{{"xxh3": "{mark}", "index": {inner}}}'.encode()
    change(body)
    seal = "seal" if "seal" in body else "blake2b"
    del body[seal]
    digest = digest_of(json.dumps(body, sort_keys=True).encode())
    return json.dumps(body | {seal: digest}).encode()


def retabled(data: bytes, number: int) -> bytes:
    """A table file with another number of its format."""
    size = int.from_bytes(data[12:16], "little")
    head = data[:8] + number.to_bytes(4, "little") + data[12 : size - 8]
    return head + hash_of(head).to_bytes(8, "little") + data[size:]


def make_other(path: Path, change: Change = later) -> None:
    """Have a file be of another format."""
    data = path.read_bytes()
    if path.suffix == ".table":
        path.write_bytes(retabled(data, 4))
    elif path.name == "live.json" and path.parent.parent.name == "online":
        # as a publisher does it: readers look at its inode
        new = path.with_suffix(".new")
        new.write_bytes(resealed(data, change))
        new.replace(path)
    else:
        path.write_bytes(resealed(data, change))
