"""Random kills: runs over a source that changes at random, killed at a random moment or crash
point, over and over; then every row is looked at.

    python -m tests.faults.random_kills --kills 500 [--seed N] [--online redis://127.0.0.1:6379/15]
    [--folder DIR]

A given seed makes the same changes and the same draws; where a kill by time hits is up to the
machine. Ends with status 1, and leaves the folder for inspection, when a row was lost, doubled, or
of another state of the source than its neighbours.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from precompute.store.disk.crashpoint import POINTS
from precompute.store.errors import PrecomputeError
from precompute.store.online.url import open_online_store
from tests.faults.harness import (
    VIEW,
    Child,
    FaultScene,
    act,
    changed,
    check_everything,
    check_online_is_tidy,
    check_snapshots,
    read_online,
    small_chunks,
    values_of,
)

ROWS = 300
CHUNKS = {"window_rows": 8}
OFTEN = ("part.write", "part.fsync", "part.rename", "dir.fsync", "journal.append")
"""Points that a run passes once for every chunk."""


class Tally:
    """What was looked at and what was wrong with it."""

    def __init__(self) -> None:
        self.kills = self.runs = self.checked = self.lost = self.doubled = self.mixed = 0
        self.where: Counter[str] = Counter()

    @property
    def wrong(self) -> int:
        """Rows that are not as they should be."""
        return self.lost + self.doubled + self.mixed

    def __str__(self) -> str:
        return f"{self.kills} kills, {self.runs} runs, {self.checked:,} rows checked: {self.lost} lost, {self.doubled} doubled, {self.mixed} mixed"


def compare(tally: Tally, scene: FaultScene, found: Mapping[int, Any]) -> None:
    """Count the rows against the state of the source that is most like them."""
    best: tuple[int, int] | None = None
    for state in reversed(scene.history):
        wanted = values_of(state)
        if wanted == found:
            best = 0, 0
            break
        lost = len(wanted.keys() - found.keys())
        mixed = sum(wanted.get(key) != row for key, row in found.items())
        if best is None or lost + mixed < sum(best):
            best = lost, mixed
    assert best is not None
    tally.checked += len(found)
    tally.lost, tally.mixed = tally.lost + best[0], tally.mixed + best[1]


def check_live(tally: Tally, scene: FaultScene) -> None:
    """The rows a reader gets, and those of the live snapshot in Parquet: all of one state."""
    online = open_online_store(scene.project().online)
    try:
        pointer = online.live(VIEW)
        assert pointer is not None
        _, found = read_online(scene, online)
        compare(tally, scene, found)
        tally.doubled += max(0, len(found) - pointer.rows)
    finally:
        online.close()
    ref = scene.store.log.live()
    assert ref is not None
    snapshot = scene.store.snapshot(ref.snapshot)
    rows = [row for batch in scene.store.batches(snapshot) for row in batch.to_pylist()]
    by_key = {row["id"]: (row["double"], tuple(row["vector"])) for row in rows}
    tally.doubled += len(rows) - len(by_key)
    compare(tally, scene, by_key)


def change(draw: random.Random, scene: FaultScene) -> None:
    """A few rows with other values, a few new, a few gone; now and then another model, so that all
    are computed."""
    keys = list(scene.rows)
    top = max(keys)
    rows = changed(
        scene.rows,
        draw.sample(keys, draw.randrange(8, 40)),
        range(top + 1, top + 1 + draw.randrange(20)),
        draw.sample(keys, draw.randrange(20) if len(keys) > ROWS // 2 else 0),
    )
    if draw.random() < 0.2 and len(scene.history) > 1:
        rows = dict(draw.choice(scene.history[-4:])[0])  # values that were there before
    scene.write(rows, version=scene.version + (draw.random() < 0.03))


def kill_one(draw: random.Random, scene: FaultScene, duration_s: float, tally: Tally) -> str | None:
    """Start a run and kill it; None when it was killed, else how it ended."""
    what = "rollback" if draw.random() < 0.05 and len(scene.store.numbers()) > 1 else "run"
    if draw.random() < 0.5:
        point = draw.choice(POINTS)
        nth = draw.randrange(1, 4) if point in OFTEN else 1
        child = Child(scene, what, crash=(point, nth, draw.choice(("kill", "torn"))), chunks=CHUNKS)
        ended = child.ended()
        where = f"{point}"
    else:
        child = Child(scene, what, chunks=CHUNKS)
        time.sleep(draw.uniform(0, duration_s))
        ended = child.kill()
        where = "at a random moment"
    if ended.signal == 9:
        tally.kills += 1
        tally.where[where] += 1
        return None
    return ended.status or ended.error


def main(arguments: list[str] | None = None) -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=500)
    parser.add_argument("--seed", type=int)
    parser.add_argument(
        "--online",
        default="table:./var/online",
        help="table:./folder or a Redis URL; the database is used as it is",
    )
    parser.add_argument(
        "--folder", help="where to work; a folder in memory, removed at the end, by default"
    )
    options = parser.parse_args(arguments)
    seed = random.SystemRandom().randrange(2**32) if options.seed is None else options.seed
    draw = random.Random(seed)
    memory = Path("/dev/shm") if Path("/dev/shm").is_dir() else None
    folder = Path(options.folder or tempfile.mkdtemp(prefix="random-kills-", dir=memory))
    print(f"seed {seed}, {options.online.rpartition('@')[2]}, in {folder}", flush=True)
    tally = Tally()
    scene = FaultScene(
        folder / "project", "table:./var/online" if options.online == "table" else options.online
    )
    scene.settings = {"notify": [], "retention": {"keep": 2, "grace": "0s"}}
    scene.write({key: key * 10 for key in range(ROWS)})
    begun = time.monotonic()
    with small_chunks(**CHUNKS):
        scene.run()
        Child(scene, chunks=CHUNKS).ended()  # the first child takes longer to start than all others
        scene.write(changed(scene.rows, range(30)))
        began = time.monotonic()
        assert Child(scene, chunks=CHUNKS).ended().status == "published"
        duration_s = time.monotonic() - began
    try:
        while tally.kills < options.kills:
            if draw.random() < 0.75:
                change(draw, scene)
            ended = kill_one(draw, scene, duration_s * 1.1, tally)
            tally.runs += 1
            check_live(tally, scene)
            if tally.wrong:
                break
            if draw.random() < 0.1:  # now and then one that is left in peace: it must get through
                whole_run(tally, scene)
            elif (
                ended is not None
                and ended not in ("published", "current", "committed")
                and "GateError" not in ended
            ):
                print(
                    f"kill {tally.kills}: a run that was not killed ended with {ended}", flush=True
                )
            if tally.runs % 100 == 0:
                print(f"{tally}, {time.monotonic() - begun:.0f} s", flush=True)
        if not tally.wrong:
            whole_run(tally, scene)
            check_snapshots(scene)
            check_everything(scene)
    except (AssertionError, PrecomputeError) as exc:
        print(
            f"{tally}\nFAILED after {tally.kills} kills, seed {seed}: {type(exc).__name__}: {exc}\nleft for inspection: {folder}"
        )
        return 1
    print(", ".join(f"{where} {n}" for where, n in tally.where.most_common()))
    print(f"seed {seed}: {tally}; {time.monotonic() - begun:.0f} s")
    if tally.wrong:
        print(f"left for inspection: {folder}")
        return 1
    if options.folder is None:
        shutil.rmtree(folder)
    return 0


def whole_run(tally: Tally, scene: FaultScene) -> None:
    """A run nobody disturbs, after which live is the newest state of the source."""
    bad = scene.store.log.bad()
    tally.runs += 1
    with small_chunks(**CHUNKS):
        if bad:  # what was rolled back from is never published again: other rows are
            scene.write(changed(scene.rows, [next(iter(scene.rows))]))
        is_held = scene.store.log.held() is not None
        status = act(scene, "run")
        if is_held:  # a rollback was not killed before it held the view
            assert status in ("committed", "current"), status
            status = act(scene, "resume")
    assert status in ("published", "current", "resumed"), status
    online = open_online_store(scene.project().online)
    try:
        assert read_online(scene, online)[1] == values_of((scene.rows, scene.version))
    finally:
        online.close()
    check_live(tally, scene)
    check_online_is_tidy(scene)


if __name__ == "__main__":
    sys.exit(main())
