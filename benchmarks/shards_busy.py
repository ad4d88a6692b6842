"""Shards on a device: which share of the time a simulated device is busy, from the first forward of
a run to the last, when a worker computes shard after shard, and when the engine's own workers
compute the same rows without shards.

The device is a model that sleeps for each unit of cost, as one that computes while the host does
other things.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from benchmarks.common import cpu, report, write_project

ROWS, SHARDS = 480_000, 12
"""Of texts of 4 to 60 words, 1.3 million words a shard."""
WORD_S, MOST_WORDS = 1e-6, 65_536
"""What the device takes for a word, and words of a batch, with padding."""
TURNS = 3


class Device:
    """Sleeps for each word; writes into a file when."""

    max_cost = MOST_WORDS

    def __init__(self, log: str) -> None:
        self._log = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def fingerprint(self) -> str:
        return "device"

    def costs(self, batch: pa.RecordBatch) -> npt.NDArray[np.int64]:
        return np.asarray(pc.count_substring(batch.column("text"), " ")) + 1

    def compute(self, batch: pa.RecordBatch) -> dict[str, npt.NDArray[Any]]:
        began, costs = time.monotonic(), self.costs(batch)
        time.sleep(WORD_S * len(costs) * int(costs.max()))
        os.write(self._log, f"{began} {time.monotonic()} {len(costs)}\n".encode())
        return {"vector": np.repeat(costs[:, None].astype(np.float32), 64, axis=1)}


def busy_share(folder: Path, engine: dict[str, int], shards: int | None) -> tuple[float, float]:
    """The share that the device is busy, and the seconds from the first forward to the last."""
    log = folder / "log"
    log.unlink(missing_ok=True)
    view = {
        "source": {"sql": "SELECT * FROM read_parquet('${data}/data.parquet')"},
        "model": {"use": "benchmarks.shards_busy:Device", "args": {"log": str(log)}},
        "features": {"vector": {"dtype": "float32", "dim": 64}},
        "shards": shards,
    }
    write_project(folder, {"texts": view}, engine=engine)
    command = [sys.executable, "-m", "precompute.jobs.cli", "-c", str(folder), "materialize"]
    subprocess.run(
        [*command, "texts", "--full"],
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    times = np.loadtxt(log)
    # the audit's few rows apart
    times = times[times[:, 2] > 32]
    seconds = float(times[:, 1].max() - times[:, 0].min())
    return float((times[:, 1] - times[:, 0]).sum()) / seconds, seconds


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=ROWS)
    rows = parser.parse_args().rows
    os.environ["PYTHONPATH"] = str(Path(__file__).parent.parent)
    words = np.random.default_rng(0).integers(4, 61, rows)
    shown = np.array(["word " * (n - 1) + "word" for n in range(61)])[words]
    figures: dict[str, Any] = {"cpu": cpu(), "rows": rows, "shards": SHARDS}
    lines = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pq.write_table(pa.table({"id": np.arange(rows), "text": shown}), folder / "data.parquet")
        ways = {"shards": SHARDS, "no shards": None}
        taken: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
        for _ in range(TURNS):
            for way, shards in ways.items():
                taken[way].append(busy_share(folder, {"workers": 1}, shards))
        for way, figure in taken.items():
            share, seconds = np.median(np.array(figure), axis=0)
            figures[way] = {"busy": round(float(share), 4), "seconds": round(float(seconds), 2)}
            lines.append(f"{way}: busy {share:.3f} of {seconds:.1f} s")
    report("shards_busy", lines, figures)


if __name__ == "__main__":
    main()
