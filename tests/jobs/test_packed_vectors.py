"""A view whose online store packs its vectors: what is kept and what is served, what a change of
mind costs, and the gate that judges it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from precompute.jobs.config.gates import GatesConfig
from precompute.jobs.run.judge.packed import judge_packed
from precompute.jobs.run.judge.verdicts import Verdicts
from precompute.store.errors import GateError
from precompute.store.feature_view import Feature, FeatureView
from precompute.store.online.row_values import packed_vectors, unpacked_vectors
from tests.fixtures import MakeProject
from tests.scene import Scene

HERE = "tests.jobs.test_packed_vectors"
DIM = 64
ROWS = 60
DATA = [(i, float(i)) for i in range(ROWS)]


class Directions:
    """``vector``: drawn for x; a row of -1 is unusable."""

    def fingerprint(self) -> str:
        return "directions"

    def unusable(self, batch: pa.RecordBatch) -> dict[int, str]:
        return {row: "-1" for row, x in enumerate(batch.column("x").to_pylist()) if x == -1}

    def compute(self, batch: pa.RecordBatch) -> dict[str, Any]:
        x = np.asarray(batch.column("x"))
        return {"double": 2 * x, "vector": np.array([direction(each) for each in x], np.float32)}


def direction(x: float) -> list[float]:
    """As good as any other: the nearest are not much nearer than the next."""
    vector: list[float] = (
        np.random.default_rng(int(x)).standard_normal(DIM).astype(np.float32).tolist()
    )
    return vector


def view(packed: str | None, **more: Any) -> dict[str, Any]:
    vector = {"dtype": "float32", "dim": DIM} | ({} if packed is None else {"packed": packed})
    features = {"double": {"dtype": "float64"}, "vector": vector}
    return {
        "model": {"use": f"{HERE}:Directions"},
        "features": features,
        "index": {"on": "vector", "metric": "cosine"},
    } | more


ANY = {"gates": {"packed": None}}
"""Gates that let binary pass."""


def served(project: Scene, keys: list[int]) -> list[Any]:
    """The vectors that a reader gets, the same by each way."""
    with project.lookup() as lookup:
        together = lookup.get("numbers", keys)
        rows = [lookup.row("numbers", key)["features"]["vector"] for key in keys]
    vectors: list[Any] = together["vector"].to_pylist()
    assert together.schema.field("vector").type == pa.list_(pa.float32(), DIM)
    assert [None if row is None else list(row) for row in rows] == vectors
    return vectors


def kept(packed: str, keys: list[int]) -> list[Any]:
    """What packing leaves of the vectors of keys."""
    feature = Feature("vector", "float32", dim=DIM, packed=packed)
    vectors = np.array([direction(key) for key in keys], np.float32)
    return list(unpacked_vectors(feature, *packed_vectors(feature, vectors)).tolist())


KEYS = [5, 0, 59]


# ---- what is kept, and what a change of mind costs


@pytest.mark.parametrize("packed", ["int8", "binary"])
def test_rows_are_packed_and_parquet_and_index_are_not(
    make_project: MakeProject, online: str, packed: str
) -> None:
    project = make_project(DATA, view=view(packed, **ANY), project={"online": online})
    project.run()
    assert served(project, KEYS) == kept(packed, KEYS)
    assert [row["vector"] for row in project.rows()] == [direction(x) for _, x in DATA]
    assert project.faults() == []
    with project.lookup() as lookup:
        by_key = lookup.search("numbers", key=5, k=9)
        by_vector = lookup.search("numbers", vector=direction(5), k=10)
        assert [row["key"] for row in by_key["rows"]] == [
            row["key"] for row in by_vector["rows"][1:]
        ]
        assert [row["score"] for row in by_key["rows"]] == pytest.approx(
            [row["score"] for row in by_vector["rows"][1:]]
        )
        assert by_vector["rows"][0]["score"] == pytest.approx(1)
        (told,) = lookup.views()
    assert told["features"][1] == {
        "name": "vector",
        "dtype": "float32",
        "dim": DIM,
        "packed": packed,
    }


def test_another_packing_computes_nothing_and_loads_a_base(
    make_project: MakeProject, online: str
) -> None:
    settings = {"online": online}
    full = [direction(key) for key in KEYS]
    for number, packed in enumerate((None, "int8", "binary", None), 1):
        project = make_project(DATA, view=view(packed, **ANY), project=settings)
        report = project.run()
        assert report.status == "published"
        assert report.counts["written"] == (ROWS if number == 1 else 0)
        assert project.pointer().numbers == (number,)
        assert served(project, KEYS) == (full if packed is None else kept(packed, KEYS))
        assert project.faults() == []
        assert project.run().status == "current"
    project.rollback()
    assert (project.live().snapshot, served(project, KEYS)) == (3, kept("binary", KEYS))
    project.publish(snapshot=2)
    assert (project.live().snapshot, served(project, KEYS)) == (2, kept("int8", KEYS))


@pytest.mark.parametrize("packed", ["int8", "binary"])
def test_what_the_fallback_computes_is_packed_as_what_is_stored(
    make_project: MakeProject, packed: str
) -> None:
    more = ANY | {"fallback": {"enabled": True, "deadline": "20s"}}
    project = make_project(DATA, view=view(packed, **more))
    project.run()
    with project.answering() as lookup:
        stored = lookup.get("numbers", KEYS)
        computed = lookup.get("numbers", KEYS, max_age_s=0)
        mixed = lookup.get("numbers", [*KEYS, 7], inputs={"7": {"x": 5.0}}, max_age_s=1e9)
        alone = lookup.row("numbers", 5)["features"]["vector"]
    assert set(stored["status"].to_pylist()) == {"fresh"}
    assert set(computed["status"].to_pylist()) == {"computed"}
    assert computed["vector"] == stored["vector"]
    assert mixed["vector"].to_pylist() == kept(packed, [*KEYS, 7])
    assert list(alone) == kept(packed, [5])[0]


# ---- the gate


def figures(project: Scene) -> dict[str, float]:
    quality = project.snapshot().quality
    return {
        name.removeprefix("vector.packed."): value
        for name, value in quality.items()
        if name.startswith("vector.packed.")
    }


def test_int8_passes_with_its_figures(make_project: MakeProject) -> None:
    project = make_project(DATA, view=view("int8"))
    assert project.run().status == "published"
    (verdict,) = [verdict for verdict in project.snapshot().gates if verdict.gate == "packed"]
    told = figures(project)
    assert (verdict.passed, verdict.measured, verdict.limit) == (True, told["recall_at_10"], 0.95)
    assert set(told) == {"mean_cosine", "min_cosine", "recall_at_10"}
    assert 0.9999 < told["min_cosine"] < told["mean_cosine"] < 1
    assert project.snapshot().quality["packed"] == told["recall_at_10"] > 0.95


def test_binary_is_refused_where_it_loses_neighbours_and_accepted_by_name(
    make_project: MakeProject, capsys: pytest.CaptureFixture[str]
) -> None:
    make_project(DATA, view=view(None)).run()
    project = make_project(DATA, view=view("binary"))
    assert project.cli("run", "numbers") == 3
    told, said = figures(project), capsys.readouterr().err
    assert 0.7 < told["mean_cosine"] < 0.9
    assert 0.2 < told["recall_at_10"] < 0.8
    message = (
        f"packed as binary, sampled vector keep {told['recall_at_10']:.1%} of their 10 nearest"
    )
    assert (
        f"packed: {message}, mean cosine {told['mean_cosine']:.4f}; as int8 they would keep 9"
        in said
    )
    assert "--accept packed" in said
    assert (project.live().snapshot, served(project, KEYS)) == (1, [direction(key) for key in KEYS])
    assert project.cli("publish", "numbers", "--snapshot", "2", "--accept", "packed") == 0
    assert served(project, KEYS) == kept("binary", KEYS)
    # unpacked again: nobody judges what is not packed
    project = make_project(DATA, view=view(None))
    assert project.run().status == "published"
    assert (figures(project), project.report().counts["written"]) == ({}, 0)


def test_a_limit_of_ones_own_and_none(make_project: MakeProject) -> None:
    project = make_project(DATA, view=view("binary", gates={"packed": 0.2}))
    assert project.run().status == "published"
    with pytest.raises(GateError, match="packed as int8"):
        make_project(DATA, view=view("int8", gates={"packed": 1.0})).run()
    project = make_project(DATA, view=view("binary", gates={"packed": None}))
    assert project.run().status == "published"
    assert "packed" in project.snapshot().quality
    assert "packed" not in [verdict.gate for verdict in project.snapshot().gates]


def test_what_is_null_or_not_finite_is_not_what_it_judges() -> None:
    feature = Feature("vector", "float32", dim=DIM, packed="int8")
    good: list[Any] = [direction(i) for i in range(ROWS)]
    holes: list[Any] = [None, [float("inf")] * DIM, [*good[0][1:], float("nan")]]
    told = []
    for vectors in (good, holes + good + holes, holes):
        sample = pa.table({"vector": pa.array(vectors, feature.arrow_type)})
        verdicts = Verdicts(GatesConfig())
        view = FeatureView("numbers", ("id",), (feature,), 1, 1)
        judge_packed(feature, sample, view, verdicts)
        told.append((verdicts.quality, verdicts.all))
    assert told[0] == told[1]
    assert (len(told[0][1]), told[2]) == (1, ({}, []))
