"""All benchmarks, one after the other: ``make bench``."""

from __future__ import annotations

import subprocess
import sys

SCRIPTS = (
    "serve_rows",
    "serve_service",
    "serve_misses",
    "serve_neighbours",
    "serve_fair",
    "serve_feast",
    "online_table",
    "online_redis",
    "online_faiss",
    "filtered_recall",
    "online_delta",
    "online_feast",
    "service_feast",
    "engine_text",
    "engine_mlp",
    "engine_row",
    "engine_top_k",
    "engine_trees",
    "engine_gpu",
    "engine_kill",
    "endpoint_rate",
    "accuracy_audit",
    "gates_table",
    "account",
    "run_memory",
    "run_rows",
    "gates_cost",
    "backfill",
    "source_types",
    "store_plan",
    "scale_plan",
    "scale_shards",
    "shards_busy",
    "store_chain",
    "store_resume",
    "store_write",
    "store_as_of",
    "store_history",
    "serve_all",
)

if __name__ == "__main__":
    sys.exit(
        max(
            subprocess.run([sys.executable, "-m", f"benchmarks.{name}"], check=False).returncode
            for name in SCRIPTS
        )
    )
