"""What one client can do to a server: each attack for some seconds, while another client goes on
asking. Says what memory it came to, and how long that one waited.

    python -m tests.faults.serve_attacks [ATTACK ...] [--seconds 4]

Prints a line for each; exit status 1 where a worker took more memory than docs/security.md says,
died, or an honest request failed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import random
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import pyarrow as pa

from precompute.store.wire import bodies
from tests.faults.serve_soak import resident, workers_of
from tests.server import Server, make_folder, read_reply, write_numbers

MIB = 2**20
ROWS, DIM = 1000, 384
LOOKUP = "/v1/views/numbers/lookup"

Stop = threading.Event


class Crowd:
    """Connections that are opened, written to and never read, as an attacker has them."""

    def __init__(self, server: Server, stack: contextlib.ExitStack) -> None:
        self._server, self._stack = server, stack

    def one(self) -> socket.socket:
        connection = self._stack.enter_context(self._server.connect())
        connection.setblocking(False)
        return connection

    def many(self, number: int) -> list[socket.socket]:
        return [self.one() for _ in range(number)]


def pushed(connection: socket.socket, data: bytes | memoryview) -> int:
    """How much of it was taken at once; 0 when it is closed, too."""
    try:
        return connection.send(data)
    except OSError:
        return 0


def head(path: str, *headers: str, method: str = "GET") -> bytes:
    return "\r\n".join([f"{method} {path} HTTP/1.1", "Host: localhost", *headers, "", ""]).encode()


def post(path: str, body: bytes) -> bytes:
    return (
        head(path, "Content-Type: application/json", f"Content-Length: {len(body)}", method="POST")
        + body
    )


def endless_headers(crowd: Crowd, stop: Stop) -> None:
    """Heads that never end, as fast as they are taken."""
    while not stop.is_set():
        for connection in crowd.many(50):
            pushed(connection, b"GET / HTTP/1.1\r\nX: ")
            for _ in range(128):
                if not pushed(connection, b"x" * 65536):
                    break


def slow_heads(crowd: Crowd, stop: Stop) -> None:
    """900 heads, a byte at a time."""
    connections = crowd.many(900)
    for connection in connections:
        pushed(connection, b"GET / HTTP/1.1\r\nX: ")
    while not stop.is_set():
        for connection in connections:
            pushed(connection, b"x")
        stop.wait(0.2)


def silent(crowd: Crowd, stop: Stop) -> None:
    """1,100 connections that say nothing, again and again."""
    while not stop.is_set():
        crowd.many(1100)


def large_bodies(crowd: Crowd, stop: Stop) -> None:
    """200 bodies of just under the limit, of which the last byte never comes."""
    body = b'{"keys":["' + b"x" * (4 * MIB - 100)
    connections = {c: memoryview(post(LOOKUP, body + b"x" * 50)[:-1]) for c in crowd.many(200)}
    while not stop.is_set():
        for connection, left in connections.items():
            connections[connection] = left[pushed(connection, left[: 256 * 1024]) :]


def unread_answers(crowd: Crowd, stop: Stop) -> None:
    """The largest answers there are, asked for by 60 connections that read nothing."""
    wanted = {"requests": [{"view": "numbers", "keys": list(range(ROWS))}] * 5}
    data = post("/v1/lookup", json.dumps(wanted).encode())
    for connection in crowd.many(60):
        pushed(connection, data)
    stop.wait()


def unread_small_answers(crowd: Crowd, stop: Stop) -> None:
    """Requests by the thousand on each connection, whose answers nobody reads."""
    connections = crowd.many(60)
    data = head("/v1/views/numbers/rows/1") * 1000
    while not stop.is_set():
        for connection in connections:
            pushed(connection, data)
        stop.wait(0.01)


def garbage(crowd: Crowd, stop: Stop) -> None:
    """What is no HTTP."""
    chance = random.Random(1)
    while not stop.is_set():
        for connection in crowd.many(20):
            pushed(connection, chance.randbytes(chance.randint(1, 100_000)))


def misses(crowd: Crowd, stop: Stop) -> None:
    """Keys that are nowhere, a thousand a request."""
    number = 10**6
    connections = crowd.many(20)
    while not stop.is_set():
        for connection in connections:
            number += 1000
            wanted = {"keys": list(range(number, number + 1000)), "deadline_ms": 200}
            pushed(connection, post(LOOKUP, json.dumps(wanted).encode()))
            with contextlib.suppress(OSError):
                connection.recv(MIB)
        stop.wait(0.02)


def many_values(crowd: Crowd, stop: Stop) -> None:
    """4 MB of lists in JSON, and a dictionary that each of some thousand Arrow batches refers to,
    one request after the other."""
    sink = pa.BufferOutputStream()
    dictionary = pa.DictionaryArray.from_arrays(pa.array([], pa.int32()), ["1"] * 200_000)
    batch = pa.record_batch({"key": dictionary})
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        for _ in range(10_000):
            writer.write_batch(batch)
    arrow, lists = bytes(sink.getvalue()), b'{"keys":[' + b"[[]]," * (4 * MIB // 5 - 10) + b"1]}"
    what = (
        head(
            LOOKUP, f"Content-Type: {bodies.ARROW}", f"Content-Length: {len(arrow)}", method="POST"
        )
        + arrow
    )
    while not stop.is_set():
        for data in (what, post(LOOKUP, lists)):
            connection = crowd.one()
            connection.setblocking(True)
            with contextlib.suppress(OSError), connection:
                connection.sendall(data)
                connection.recv(MIB)


ATTACKS: dict[str, tuple[Callable[[Crowd, Stop], None], int]] = {
    "endless_headers": (endless_headers, 96),
    "slow_heads": (slow_heads, 96),
    "silent": (silent, 96),
    "large_bodies": (large_bodies, 640),
    "unread_answers": (unread_answers, 768),
    "unread_small_answers": (unread_small_answers, 160),
    "garbage": (garbage, 96),
    "misses": (misses, 160),
    "many_values": (many_values, 96),
}
"""Name → what it does, and MiB that it may cost a worker."""


def ask_honestly(server: Server, seconds: float, told: Connection) -> None:
    """Tells the seconds that each of an honest client's requests took, and how many failed. A
    connection that was closed while idle is opened again, as every client does."""
    took: list[float] = []
    failed = 0
    limit = time.monotonic() + seconds
    while time.monotonic() < limit:
        started = time.monotonic()
        for attempt in range(3):
            try:
                with server.connect() as connection:
                    connection.sendall(head("/v1/views/numbers/rows/1"))
                    if read_reply(connection).status == 200:
                        break
            except (OSError, ValueError):
                pass
            time.sleep(0.01 * attempt)
        else:
            failed += 1
        took.append(time.monotonic() - started)
        time.sleep(0.02)
    told.send((took, failed))


def attacked(server: Server, name: str, seconds: float) -> bool:
    """Whether the server bore it; prints a line."""
    attack, allowed_mib = ATTACKS[name]
    pid, stop = workers_of(server)[0], Stop()
    before = highest = resident(pid)
    answers, told_by = multiprocessing.Pipe()
    # of another process: attackers keep this one's lock
    client = multiprocessing.get_context("fork").Process(
        target=ask_honestly, args=(server, seconds, told_by)
    )
    client.start()
    with contextlib.ExitStack() as stack:
        thread = threading.Thread(target=lambda: attack(Crowd(server, stack), stop))
        thread.start()
        limit = time.monotonic() + seconds
        while time.monotonic() < limit:
            highest = max(highest, resident(pid))
            time.sleep(0.01)
        stop.set()
        thread.join()
    took, failed = answers.recv()
    client.join()
    took.sort()
    alive = workers_of(server)[0] == pid
    told = {
        "attack": name,
        "grew_mib": round(highest - before),
        "allowed_mib": allowed_mib,
        "honest_requests": len(took),
        "failed": failed,
        "median_s": round(took[len(took) // 2], 4),
        "longest_s": round(took[-1], 3),
        "same_worker": alive,
    }
    print(json.dumps(told), flush=True)
    return alive and not failed and highest - before <= allowed_mib


def main() -> int:
    """Runs the attacks; 0 where the server bore all of them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("attacks", nargs="*", metavar="ATTACK", default=[*ATTACKS])
    parser.add_argument("--seconds", type=float, default=4.0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        view = {
            "model": {"use": "tests.models:Doubler", "args": {"dim": DIM}},
            "features": {
                "double": {"dtype": "float64"},
                "vector": {"dtype": "float32", "dim": DIM},
            },
            "index": None,
        }
        make_folder(path, {"numbers": view})
        write_numbers(path, list(range(ROWS)))
        make_folder(path, {}).publish_all()
        with Server(path) as server:
            results = [attacked(server, name, arguments.seconds) for name in arguments.attacks]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
