"""A service of four views, 100 entities as Arrow in one request, against the lookups of its four
views alone, one of which is the slowest.

    python -m benchmarks.serve_service [rows] [rounds]

``precompute serve`` over table files with one worker and a core of its own, the client on another;
one connection, one request at a time, and all five take turns: by ``Client``, from keys to a table,
and by a socket alone, from a request's bytes to an answer's. And in process, where there is no
round trip to share: what is computed, as CPU time. Every value of the joined rows must be the
lookup's.
"""

from __future__ import annotations

import contextlib
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from benchmarks.common import numbers, report, run, write_project
from benchmarks.serve_feast import ARROW, Connection, _post, our_server
from precompute import Client
from precompute.jobs.config.project import Project
from precompute.store.answers.lookup import Lookup

ROWS, ROUNDS, REQUESTS, KEYS = 20_000, 7, 200, 100
SERVICE = "ranking"
Shapes = dict[str, dict[str, Any]]
VIEWS: dict[str, Shapes] = {
    "embedding": {"vector": {"dtype": "float32", "dim": 384}},
    "taste": {"vector": {"dtype": "float32", "dim": 64}},
    "profile": {f"n{i}": {"dtype": "float32"} for i in range(8)},
    "picks": {
        "items": {"dtype": "int64", "max_items": 20},
        "scores": {"dtype": "float32", "max_items": 20},
    },
}
"""View → its features: vectors, numbers, lists."""


class Made:
    """``x`` → values of the features it is given: vectors and numbers by a sine, lists of 20."""

    def __init__(self, shapes: Shapes) -> None:
        self._shapes = shapes

    def fingerprint(self) -> str:
        """See :class:`precompute.model.Model`."""
        return "made"

    def compute(self, batch: pa.RecordBatch) -> dict[str, Any]:
        """See :class:`precompute.model.Model`."""
        x = np.asarray(batch.column("x"), np.float64)
        return {
            name: self._values(x, number, shape)
            for number, (name, shape) in enumerate(self._shapes.items(), 1)
        }

    def _values(self, x: np.ndarray[Any, Any], number: int, shape: dict[str, Any]) -> Any:
        if "max_items" in shape:
            return list(
                (np.floor(x * 1e6)[:, None] + np.arange(shape["max_items"])).astype(shape["dtype"])
            )
        return (
            np.sin(x[:, None] * np.arange(1, shape["dim"] + 1))
            if "dim" in shape
            else np.sin(x * number)
        )


def published(folder: Path, rows: int, views: dict[str, Shapes] = VIEWS) -> None:
    """A project of these views, with their rows live, and the service over them."""
    pq.write_table(
        pa.table({"id": np.arange(rows), "x": np.random.default_rng(0).random(rows)}),
        folder / "rows.parquet",
    )
    made = {
        name: {
            "source": {"sql": f"SELECT id, x FROM read_parquet('{folder}/rows.parquet')"},
            "model": {"use": "benchmarks.serve_service:Made", "args": {"shapes": shapes}},
            "features": shapes,
        }
        for name, shapes in views.items()
    }
    project = write_project(folder, made)
    for name in views:
        run(project, name)
    features = {name: list(shapes) for name, shapes in views.items()}
    service = {"name": SERVICE, "entity": ["id"], "views": features}
    (folder / "services").mkdir()
    (folder / "services" / f"{SERVICE}.yaml").write_text(yaml.safe_dump(service))


def requests_of(side: str, keys: list[list[str]]) -> list[bytes]:
    """Requests to a view, or of the service."""
    if side == SERVICE:
        return [
            _post(f"/v1/services/{SERVICE}", {"entities": {"id": some}}, ARROW) for some in keys
        ]
    return [_post(f"/v1/views/{side}/lookup", {"keys": some}, ARROW) for some in keys]


def check_equal(joined: pa.Table, alone: dict[str, pa.Table]) -> None:
    """Every value of the service is the lookup's, but for the age, which goes on."""
    for view, table in alone.items():
        assert joined["id"].to_pylist() == table["key"].to_pylist()
        for name in ("status", "source", "reason", "computed_at", *VIEWS[view]):
            assert joined[f"{view}__{name}"].equals(table[name]), (view, name)


def timed(
    ask: dict[str, Callable[[int], Any]],
    rounds: int,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Side → the median time of a request in each round, ms; ``ask`` sends the request of a
    number."""
    medians: dict[str, list[float]] = {side: [] for side in ask}
    for _ in range(rounds):
        seconds: dict[str, list[float]] = {side: [] for side in ask}
        for number in range(REQUESTS):  # in turn, so that a noisy neighbour hits all of them
            for side, one in ask.items():
                started = clock()
                one(number)
                seconds[side].append(clock() - started)
        for side, times in seconds.items():
            medians[side].append(statistics.median(times) * 1e3)
    return medians


def in_process(folder: Path, keys: list[list[str]], rounds: int) -> dict[str, list[float]]:
    """Side → the median CPU time of a lookup in each round, ms."""
    project = Project(folder)
    with contextlib.closing(
        Lookup.open(project.online, project.root, [project.service(SERVICE)])
    ) as lookup:

        def one_of(side: str) -> Callable[[int], Any]:
            if side == SERVICE:
                return lambda number: lookup.service(SERVICE, {"id": keys[number]})
            return lambda number: lookup.get(side, keys[number])

        return timed({side: one_of(side) for side in (*VIEWS, SERVICE)}, rounds, time.process_time)


def measured(port: int, keys: list[list[str]], rounds: int) -> dict[str, dict[str, list[float]]]:
    """How it is requested → side → the median time of a request in each round, ms."""
    requests = {side: requests_of(side, keys) for side in (*VIEWS, SERVICE)}

    def by_socket(side: str) -> Callable[[int], Any]:
        return lambda number: connection.ask(requests[side][number])

    def by_client(side: str) -> Callable[[int], Any]:
        if side == SERVICE:
            return lambda number: client.service(SERVICE, {"id": keys[number]})
        return lambda number: client.get(side, keys[number])

    with Client(f"http://127.0.0.1:{port}") as client:
        tables = {side: by_client(side)(0) for side in requests}
        check_equal(tables.pop(SERVICE), tables)
        found = {"Client": timed({side: by_client(side) for side in requests}, rounds)}
    # now, since one that is idle is closed
    with contextlib.closing(Connection(port)) as connection:
        return found | {"socket": timed({side: by_socket(side) for side in requests}, rounds)}


def main() -> None:
    """Measure and report."""
    rows, rounds = numbers(ROWS, ROUNDS)
    keys = np.random.default_rng(1).integers(0, rows, (REQUESTS, KEYS)).astype(str).tolist()
    with tempfile.TemporaryDirectory() as name:
        published(Path(name), rows)
        with our_server(Path(name)) as port:
            found = measured(port, keys, rounds)
        found["Lookup, CPU"] = in_process(Path(name), keys, rounds)
    lines = [
        f"{KEYS} of {rows:,} entities, Arrow, one connection; medians of {rounds} rounds of"
        f" {REQUESTS}, in turn, and the ratios' range"
    ]
    ratios = {}
    for how, medians in found.items():
        ms = {side: statistics.median(times) for side, times in medians.items()}
        slowest = max(VIEWS, key=ms.__getitem__)
        ratios[how] = {
            "of_slowest": [
                joined / alone
                for joined, alone in zip(medians[SERVICE], medians[slowest], strict=True)
            ],
            "of_all_four": [
                joined / sum(medians[view][i] for view in VIEWS)
                for i, joined in enumerate(medians[SERVICE])
            ],
        }
        of_slowest, of_all = (ratios[how][name] for name in ("of_slowest", "of_all_four"))
        lines += [
            f"{how}: lookups alone "
            + ", ".join(f"{view} {ms[view]:.3f} ms" for view in VIEWS)
            + f"; the service {ms[SERVICE]:.3f}",
            (
                f"  {statistics.median(of_slowest):.2f} × the slowest, {slowest}"
                f" [{min(of_slowest):.2f} to {max(of_slowest):.2f}];"
                f" {statistics.median(of_all):.2f} × all four one after the other"
                f" [{min(of_all):.2f} to {max(of_all):.2f}]"
            ),
        ]
    report("serve_service", lines, {"rows": rows, "rounds": rounds, "ms": found, "ratios": ratios})


if __name__ == "__main__":
    main()
