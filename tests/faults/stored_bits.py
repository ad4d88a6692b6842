"""A bit flipped in any Parquet file beside the parts (deletes, rejected rows) of small views, one
after the other: each is told, no wrong row is served or committed, no command ends with a
traceback, no other view is stopped, and there is a way out.

    python -m tests.faults.stored_bits [--most 500] [--seed 1] [--parts]

For each bit the commands that read are called, then one of the ways on: the nightly run twice, a
run of every row, a rollback, a publishing, a reconciliation. After each, what every view serves is
compared with the states that it was ever in. Prints a line for each kind of file; ends with 1 where
anything is wrong.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import io
import logging
import random
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, get_args
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from precompute.jobs.config.gates import GatesConfig
from precompute.jobs.ops.status import project_status
from precompute.jobs.ops.verify import verify
from precompute.store.account import checker
from precompute.store.errors import PrecomputeError
from precompute.store.history import read
from precompute.store.times import containing
from tests.scene import Scene
from tests.server import make_folder

TODAY = datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
DAYS = [TODAY - timedelta(days=n) for n in (3, 2, 1)]
VIEWS = ("deltas", "days", "spoilt")
KEYS = range(60)
LAST_DAY = {0: 3.0, 11: 33.0}
UNGATED: dict[str, Any] = {
    name: None
    for name, of in GatesConfig.model_fields.items()
    if type(None) in get_args(of.annotation)
}
SOURCE = "SELECT id, x FROM read_parquet('${{data}}/{}.parquet')"
State = dict[int, float]
"""Key → x: all that a view serves is made of it."""


class Doubles:
    """``x`` → ``double``; a negative one is unusable."""

    def fingerprint(self) -> str:
        return "doubles"

    def unusable(self, batch: pa.RecordBatch) -> Mapping[int, str]:
        x = np.asarray(batch.column("x"))
        return dict.fromkeys(np.flatnonzero(x < 0).tolist(), "x is negative")

    def compute(self, batch: pa.RecordBatch) -> dict[str, np.ndarray]:
        return {"double": 2 * np.asarray(batch.column("x"))}


def view(source: str, **more: Any) -> dict[str, Any]:
    """A view of :class:`Doubles`."""
    return {
        "source": {"sql": SOURCE.format(source)},
        "model": {"use": f"{__name__}:Doubles"},
        "features": {"double": {"dtype": "float64"}},
        "index": None,
        "fallback": None,
        "gates": UNGATED,
        "ttl": "90d",
    } | more


@dataclass
class Stored:
    """A project of the three views, and each state that one was in, the newest last."""

    folder: Path
    states: dict[str, list[State]] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.states = self.states or {name: [] for name in VIEWS}
        self.project = Scene(self.folder, {}) if (self.folder / "project.yaml").exists() else None

    # ---- made once

    def write(self, name: str, rows: State) -> None:
        """The source of a view that has no partitions."""
        self.states[name].append({key: x for key, x in rows.items() if x >= 0})
        self._write(name, list(rows), list(rows.values()))

    def write_days(self, days: Sequence[State]) -> None:
        """The source of ``days``, a state for each partition."""
        lines = [(key, x, DAYS[n]) for n, of in enumerate(days) for key, x in of.items()]
        self.states["days"].append({key: x for of in days for key, x in of.items()})
        times = pa.array([at for _, _, at in lines], pa.timestamp("us", "UTC"))
        self._write("days", [key for key, *_ in lines], [x for _, x, _ in lines], t=times)

    def _write(self, name: str, keys: list[int], values: list[float], **more: pa.Array) -> None:
        columns = {"id": pa.array(keys, pa.int64()), "x": pa.array(values, pa.float64())} | more
        pq.write_table(pa.table(columns), self.folder / f"{name}.parquet")

    def make(self) -> Stored:
        """The views, each with a way back and something to compute."""
        sql = f"{SOURCE.format('days')} WHERE t >= $start AND t < $end"
        days = {"by": "day", "start": DAYS[0].date().isoformat(), "serve": "all"}
        views = {
            "deltas": view("deltas"),
            "days": view("days", partition=days) | {"source": {"sql": sql}},
            "spoilt": view("spoilt", max_rejected=0.5),
        }
        retention = {"keep": 5, "grace": "1h"}
        self.project = make_folder(self.folder, views, retention=retention)
        base = {key: float(key) for key in range(40)}
        self.write("deltas", base)
        self.project.run("deltas")
        self.write("deltas", base | {3: 300.0, 5: 500.0})
        self.project.run("deltas")
        without = {key: x for key, x in base.items() if key not in (7, 8)}
        self.write("deltas", without | {3: 301.0, 5: 500.0, 50: 50.0})
        self.project.run("deltas")
        first, second = dict.fromkeys(range(12), 1.0), dict.fromkeys(range(8), 2.0)
        for number, of in enumerate([[first], [first, second]]):
            self.write_days(of)
            self._run_day(number)
        first = first | {10: 11.0, 11: 12.0}
        self.write_days([first, second])
        self._run_day(0)
        self.write_days([first, {**second, 1: 22.0, 2: 23.0}])
        self._run_day(1)
        spoilt = {key: -1.0 if key % 4 == 0 else float(key) for key in range(40)}
        self.write("spoilt", spoilt)
        self.project.run("spoilt")
        self.write("spoilt", spoilt | {1: 100.0, 2: -2.0, 3: 300.0})
        self.project.run("spoilt")
        # what the next run of each is to find
        self.write("deltas", without | {3: 302.0, 5: 500.0, 50: 51.0, 9: 9.5})
        self.write("spoilt", spoilt | {1: 101.0, 2: -2.0, 3: 300.0, 4: 400.0})
        self.write_days([first, {**second, 1: 22.0, 2: 23.0}, LAST_DAY])
        return self

    def _run_day(self, number: int) -> None:
        assert self.project is not None
        self.project.run("days", partition=containing("day", DAYS[number]))

    def beside(self, *, parts: bool = False) -> list[Path]:
        """The Parquet files beside the parts that what is live is made of, or the next snapshot
        would be built on; or the ``parts`` themselves."""
        assert self.project is not None
        found = set[str]()
        for name in VIEWS:
            store = self.project.offline.view(name)
            live = self.project.live_snapshot(name)
            for of in (live, *map(store.snapshot, live.members.values())):
                beside = [layer.deletes for layer in store.chain(of)] + [of.rejected]
                own = [part for layer in store.chain(of) for part in layer.parts]
                files = own if parts else [part for part in beside if part is not None]
                found |= {f"{name}/{part.path}" for part in files}
        return sorted(self.folder / "var" / path for path in found)

    def copied(self, folder: Path) -> Stored:
        """A fresh copy, where the sources' paths are the same."""
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(self.folder, folder)
        return Stored(folder, self.states)

    # ---- what is done with it

    def call(self, *command: str) -> int | None:
        """Exit status of the command line; None where it ends with a traceback."""
        assert self.project is not None
        try:
            with (
                contextlib.redirect_stdout(io.StringIO()),
                contextlib.redirect_stderr(io.StringIO()),
            ):
                return self.project.cli(*command)
        except SystemExit as exc:
            return int(exc.code or 0)
        except BaseException as exc:
            self.wrong.append(f"traceback: {command}: {''.join(traceback.format_exception(exc))}")
            return None

    def wanted(self, name: str) -> list[dict[int, float]]:
        """What a view may serve: of each of its states, key → double; of ``days`` also what it was
        before, after a rollback, with the day that is computed next."""
        states = list(self.states[name])
        if name == "days":
            states[:-1] += [state | LAST_DAY for state in states[:-1]]
        return [{key: 2 * x for key, x in state.items()} for state in states]

    def served(self, name: str) -> dict[int, float]:
        """What it serves."""
        assert self.project is not None
        with self.project.lookup() as lookup:
            values = lookup.get(name, list(KEYS))["double"].to_pylist()
        return {key: value for key, value in zip(KEYS, values, strict=True) if value is not None}

    def check_rows(self, after: str) -> None:
        """What is served, and what was committed, is a state as a whole."""
        for name in VIEWS:
            served = self.served(name)
            if served not in self.wanted(name):
                self.wrong.append(f"wrong rows: {name} serves {served} after {after}")
            self._check_committed(name, after)

    def _check_committed(self, name: str, after: str) -> None:
        assert self.project is not None
        store = self.project.offline.view(name)
        for number in store.numbers():
            snapshot = store.snapshot(number)
            if name == "days" and not snapshot.members:
                continue
            try:
                store.compare_parts(snapshot)
                rows = [row for batch in store.batches(snapshot) for row in batch.to_pylist()]
            except PrecomputeError:
                continue
            found = {row["id"]: row["double"] for row in rows}
            if found not in self.wanted(name) or len(found) != len(rows):
                self.wrong.append(f"wrong rows: snapshot {number} of {name} after {after}")

    def read_all(self, damaged: str) -> bool:
        """Every command that reads; returns whether the damage is told."""
        assert self.project is not None
        lines = {line["view"]: line for line in project_status(self.project)}
        told = bool(lines[damaged]["attention"])
        for name in VIEWS:
            if name != damaged and lines[name]["attention"]:
                self.wrong.append(f"stopped: status of {name}: {lines[name]['attention']}")
            faults = [check for check in verify(self.project, name) if not check.ok]
            if name == damaged:
                told = told and bool(faults)
            elif faults:
                self.wrong.append(f"stopped: verify of {name}: {faults}")
        for command in (
            ["status"],
            ["verify", damaged],
            ["snapshots", damaged],
            ["history", damaged],
            ["log"],
            ["log", damaged],
            ["diff", damaged],
            ["explain", damaged, "3"],
            ["explain", damaged, "4"],
            ["export", damaged, "--to", str(self.folder / "out.parquet"), "--replace"],
            ["report", damaged],
            ["lookup", damaged, "3"],
            ["gc", "--dry-run"],
        ):
            self.call(*command)
        for as_of in (None, datetime.now(UTC)):
            try:
                found = read(self.project.offline.view(damaged), as_of)
            except PrecomputeError:
                continue
            except Exception as exc:
                self.wrong.append(f"traceback: read: {''.join(traceback.format_exception(exc))}")
                continue
            rows = dict(zip(found["id"].to_pylist(), found["double"].to_pylist(), strict=True))
            if rows not in self.wanted(damaged):
                self.wrong.append(f"wrong rows: read of {damaged}")
        self.check_rows("reading")
        return told


WAYS: list[list[list[str]]] = [
    [["run"], ["run"]],
    [["run", "--full"]],
    [["rollback", "--no-hold"], ["run"]],
    [["publish"], ["run"]],
    [["reconcile"], ["run"]],
    [["materialize"], ["publish"], ["rollback", "--no-hold"]],
]


def try_bit(prepared: Stored, stage: Path, path: Path, at: int, bit: int, way: int) -> Stored:
    """One bit, what reads, and one way on."""
    scene = prepared.copied(stage)
    harmed = stage / path.relative_to(prepared.folder)
    data = bytearray(harmed.read_bytes())
    data[at] ^= 1 << bit
    harmed.write_bytes(data)
    damaged = path.relative_to(prepared.folder / "var").parts[0]
    if not scene.read_all(damaged):
        scene.wrong.append(f"unseen: {path.name} of {damaged}, byte {at}")
    for command, *options in WAYS[way]:
        scene.call(command, damaged, *options)
        scene.check_rows(f"{command} {options}")
    other = next(name for name in VIEWS[at % 2 :] if name != damaged)
    if scene.call("run", other) != 0:
        scene.wrong.append(f"stopped: run of {other}")
    if ["rollback", "--no-hold"] not in WAYS[way]:
        # the way out that the messages name
        if scene.call("run", damaged) and damaged == "days":
            for day in DAYS[:2]:
                scene.call("run", "days", "--partition", day.date().isoformat())
        if scene.call("run", damaged) != 0 or scene.served(damaged) != scene.wanted(damaged)[-1]:
            scene.wrong.append(f"no way out: run of {damaged} after {WAYS[way]}")
    scene.check_rows("all")
    return scene


def drawn(files: Sequence[Path], most: int, seed: int) -> Iterator[tuple[Path, int, int, int]]:
    """A bit of every byte of the files, or of so many drawn from all; and a way on for each."""
    rng = random.Random(seed)
    every = [(path, at) for path in files for at in range(path.stat().st_size)]
    chosen = every if len(every) <= most else rng.sample(every, most)
    for number, (path, at) in enumerate(chosen):
        yield path, at, rng.randrange(8), number % len(WAYS)


@contextlib.contextmanager
def every_look_reads_all() -> Iterator[None]:
    """What takes an hour is done in one look; and runs have no audit."""
    with (
        mock.patch.object(checker, "OFTEN_S", -1.0),
        mock.patch("precompute.jobs.ops.status.LOOK_S", 60.0),
        mock.patch.object(checker, "LOOK_S", 60.0),
        mock.patch("precompute.jobs.run.judge.audit.AUDIT_LEAST_S", 0.0),
        mock.patch("precompute.jobs.run.judge.audit.AUDIT_SHARE", 0.0),
    ):
        yield


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--most", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--parts", action="store_true", help="of the parts, in their stead")
    arguments = parser.parse_args()
    logging.disable(logging.CRITICAL)
    began = time.monotonic()
    counts, wrong = collections.Counter[str](), list[str]()
    with tempfile.TemporaryDirectory() as name, every_look_reads_all():
        prepared, stage = prepare(Path(name))
        files = prepared.beside(parts=arguments.parts)
        for path, at, bit, way in drawn(files, arguments.most, arguments.seed):
            counts[f"{path.relative_to(prepared.folder / 'var').parts[0]}: {path.name}"] += 1
            wrong += try_bit(prepared, stage, path, at, bit, way).wrong
    for kind, number in sorted(counts.items()):
        print(f"{kind}: {number} bits")
    sorts = collections.Counter(text.partition(":")[0] for text in wrong)
    print(
        f"{counts.total()} bits; {dict(sorts) or 'nothing wrong'}; {time.monotonic() - began:.0f} s"
    )
    print("\n".join(wrong[:20]))
    sys.exit(bool(wrong))


def prepare(folder: Path) -> tuple[Stored, Path]:
    """The views, made where the copies will lie, since the path is part of their SQL; and there."""
    stage = folder / "stage"
    made = Stored(stage).make()
    stage.rename(folder / "prepared")
    return Stored(folder / "prepared", made.states), stage


if __name__ == "__main__":
    main()
