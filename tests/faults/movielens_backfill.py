"""A backfill of thirty days of MovieLens-100k's ratings, by their own timestamps, killed twice on
the way and completed by ``--resume``.

    python -m tests.faults.movielens_backfill

The first kill takes the backfill and leaves its two runs alive, the second takes the backfill with
its runs. Then every row is compared with a count of the ratings made apart. Ends with status 1 when
one is lost, doubled or wrong.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa
import yaml

from demo.data import movielens_folder
from precompute.store.history import read
from precompute.store.offline.view_store import OfflineStore, ViewStore
from precompute.store.times import Partition
from tests import REPOSITORY

RANGE = ["--from", "1997-11-01", "--to", "1997-11-30"]
DAYS = 30

VIEW = {
    "name": "item_day",
    "entity": ["item_id"],
    "source": {
        "sql": "SELECT item_id, rated_at::DATE AS day, count(*) AS n, avg(rating) AS mean FROM read_parquet('${data}/ratings.parquet') "
        "WHERE rated_at >= $start AND rated_at < $end GROUP BY item_id, day"
    },
    "model": {"use": "tests.faults.movielens_backfill:ItemDay", "args": {"prior": 10}},
    "features": {"ratings": {"dtype": "int32"}, "mean": {"dtype": "float32"}},
    "ttl": "26h",
    "partition": {"by": "day", "column": "day", "start": "1997-10-01"},
}


class ItemDay:
    """Per item and day: how often it was rated, and the mean, drawn to 3.5 by a prior."""

    def __init__(self, prior: float) -> None:
        self.prior = prior

    def fingerprint(self) -> str:
        """See :class:`precompute.model.Model`."""
        return f"item day 1, prior {self.prior}"

    def compute(self, batch: pa.RecordBatch) -> dict[str, np.ndarray]:
        """See :class:`precompute.model.Model`."""
        n, mean = np.asarray(batch.column("n")).astype(np.float64), np.asarray(batch.column("mean"))
        return {
            "ratings": n.astype(np.int32),
            "mean": (mean * n + 3.5 * self.prior) / (n + self.prior),
        }


def write_project(folder: Path) -> None:
    """The ratings as Parquet, and a project over them."""
    (folder / "views").mkdir()
    (folder / "views" / "item_day.yaml").write_text(yaml.safe_dump(VIEW))
    (folder / "project.yaml").write_text(
        yaml.safe_dump({"root": "./var", "online": "table:./var/online", "vars": {"data": "./"}})
    )
    with duckdb.connect() as connection:
        connection.execute(
            'COPY (SELECT "item_id:token"::BIGINT AS item_id, "rating:float"::FLOAT AS rating, '
            'to_timestamp("timestamp:float"::BIGINT)::TIMESTAMP AS rated_at '
            f"FROM read_csv('{movielens_folder()}/ml-100k.inter', delim='\t', header=true, quote='', all_varchar=true)) "
            f"TO '{folder}/ratings.parquet'"
        )


def backfill(folder: Path, *options: str) -> subprocess.Popen[bytes]:
    """Begin ``precompute backfill``."""
    command = [
        sys.executable,
        "-m",
        "precompute.jobs.cli",
        "-c",
        str(folder),
        "backfill",
        "item_day",
        *options,
    ]
    return subprocess.Popen(
        command,
        cwd=REPOSITORY,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.DEVNULL,
    )


def await_snapshots(store: ViewStore, count: int) -> None:
    """Wait until so many are committed."""
    while len(store.numbers()) < count:
        time.sleep(0.02)


def children(process: int) -> list[int]:
    """Processes it has begun."""
    found = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    return [int(child) for child in found]


def wrong_rows(store: ViewStore, folder: Path) -> dict[str, int]:
    """Every row of every day, against a count made apart."""
    found = {"rows": 0, "lost": 0, "doubled": 0, "wrong": 0}
    with duckdb.connect() as connection:
        for number in store.numbers():
            snapshot = store.snapshot(number)
            assert snapshot.partition is not None
            day = Partition.parse(snapshot.partition).start.date()
            counted = connection.execute(
                f"SELECT item_id, count(*), avg(rating) FROM '{folder}/ratings.parquet' WHERE rated_at::DATE = ? GROUP BY item_id",
                [day],
            ).fetchall()
            wanted = {item: (n, (mean * n + 35) / (n + 10)) for item, n, mean in counted}
            rows = [row for batch in store.batches(snapshot) for row in batch.to_pylist()]
            got = {row["item_id"]: row for row in rows}
            found["rows"] += len(rows)
            found["lost"] += len(wanted.keys() - got.keys())
            found["doubled"] += len(rows) - len(got)
            for item, row in got.items():
                n, mean = wanted.get(item, (-1, 0.0))
                found["wrong"] += row["ratings"] != n or abs(row["mean"] - mean) > 1e-5
    return found


def main() -> int:
    """Run, kill twice, resume, compare; 0 when all is well."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_project(folder)
        store, started = OfflineStore(folder / "var").view("item_day"), time.monotonic()
        first = backfill(folder, *RANGE, "--max-active", "2")
        await_snapshots(store, 8)
        first.kill()
        first.wait()
        print(f"killed at {len(store.numbers())} snapshots; its runs go on")
        (state,) = (folder / "var" / "item_day" / "backfills").glob("*.json")
        second = backfill(folder, "--resume", state.stem)
        await_snapshots(store, 19)
        for process in [second.pid, *children(second.pid)]:
            os.kill(process, signal.SIGKILL)
        second.wait()
        print(f"killed, with its runs, at {len(store.numbers())} snapshots")
        status = backfill(folder, "--resume", state.stem).wait()
        seconds = time.monotonic() - started
        numbers = store.numbers()
        days = {store.snapshot(number).partition for number in numbers}
        found = wrong_rows(store, folder)
        live = read(store).num_rows
        print(
            f"resumed: exit status {status}, {len(numbers)} snapshots of {len(days)} days, {seconds:.1f} s in all; live: {live} rows"
        )
        print(", ".join(f"{n:,} {what}" for what, n in found.items()))
    return int(
        status != 0
        or (len(numbers), len(days)) != (DAYS, DAYS)
        or found["lost"] + found["doubled"] + found["wrong"] > 0
    )


if __name__ == "__main__":
    sys.exit(main())
