"""Bad rows: what the model declares unusable is set aside, written with null features, or ends the
run, as the view says."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from precompute.jobs.ops.verify import verify
from precompute.jobs.run.rows import chunks
from precompute.store.answers.lookup import Lookup
from precompute.store.errors import ModelError, PrecomputeError, RejectedError, RequestError
from precompute.store.offline.runs import Report
from tests.fixtures import MakeProject
from tests.models import raised_at
from tests.scene import Scene

HERE = "tests.jobs.test_bad_rows"
NAMES = ("length", "vector", "words", "note")
NOTHING = dict.fromkeys(NAMES)
Rows = dict[int, str | None]
Captured = pytest.CaptureFixture[str]


def features(text: str | None) -> dict[str, Any]:
    """What :class:`Texts` makes of a text; nothing of one it cannot take."""
    if not text:
        return NOTHING
    vector = [float(len(text)), float(ord(text[0])), 1.0, 0.0]
    return {
        "length": len(text),
        "vector": vector,
        "words": text.split(),
        "note": text.upper() if text > "c" else None,
    }


class Texts:
    """:func:`features`. Null and empty texts are unusable; ``boom`` raises, ``nan`` is answered
    with NaN."""

    stop_on: ClassVar[str | None] = None
    """Text at which the whole run fails."""
    seen: ClassVar[list[str]] = []

    def fingerprint(self) -> str:
        return "texts 1"

    def unusable(self, batch: pa.RecordBatch) -> Mapping[int, str]:
        texts = enumerate(batch.column("x").to_pylist())
        return {
            row: "x is null" if text is None else "x is empty" for row, text in texts if not text
        }

    def compute(self, batch: pa.RecordBatch) -> dict[str, np.ndarray | pa.Array]:
        texts = batch.column("x").to_pylist()
        self.seen.extend(texts)
        if self.stop_on in texts:
            raise ModelError("stopped")
        if "boom" in texts:
            raise ValueError("boom")
        made = [features(text) for text in texts]
        vectors = np.array([row["vector"] for row in made], np.float32)
        vectors[[text == "nan" for text in texts]] = np.nan
        return {
            "length": np.array([row["length"] for row in made]),
            "vector": vectors,
            "words": pa.array([row["words"] for row in made], pa.list_(pa.string())),
            "note": pa.array([row["note"] for row in made], pa.string()),
        }


class Misshapen:
    """The ``vector`` of x: of 4 numbers, but for some x something else."""

    BAD: ClassVar[dict[int, Any]] = {
        3: [1.0],
        7: None,
        11: "a",
        13: [1.0, 2.0, 3.0, 4.0, 5.0],
        17: [[1.0] * 4],
    }

    def fingerprint(self) -> str:
        return "misshapen 1"

    def compute(self, batch: pa.RecordBatch) -> dict[str, Any]:
        numbers = batch.column("x").to_pylist()
        made = [self.BAD.get(x, [float(x), 1.0, 0.0, 0.0]) for x in numbers]
        # one value too few
        return {"vector": made[:-1] if 23 in numbers else made}


MISSHAPEN = {
    "model": {"use": f"{HERE}:Misshapen"},
    "features": {"vector": {"dtype": "float32", "dim": 4}},
    "max_rejected": 0.5,
    "gates": {"first": None, "parity": None},
}
BAD_KEYS = [*Misshapen.BAD, 23]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_row_that_the_models_answer_does_not_fit_is_rejected_by_its_key(
    make_project: MakeProject, workers: int
) -> None:
    project = make_project(
        [(i, i) for i in range(300)], view=MISSHAPEN, project={"engine": {"workers": workers}}
    )
    report = project.run()
    assert report.status == "published"
    assert report.counts["written"] == 294
    assert report.counts["rejected"] == 6
    snapshot = project.snapshot()
    assert snapshot.rejected is not None
    rows = pq.read_table(project.store.folder / snapshot.rejected.path).to_pylist()
    assert sorted((int(row["key"]), row["stage"]) for row in rows) == [
        (key, "misfit") for key in BAD_KEYS
    ]
    assert all("feature 'vector' of view 'numbers'" in row["error"] for row in rows)


def test_a_model_whose_answer_fits_for_no_row_fails_the_run_in_words(
    make_project: MakeProject,
) -> None:
    """Model and view are at fault then; of an incremental run a row is, since the same model's
    answer fitted before."""
    project = make_project([(i, 3) for i in range(50)], view=MISSHAPEN | {"max_rejected": 1.0})
    with pytest.raises(
        ModelError,
        match=r"of the model's answer fits the view \(50× feature 'vector' .*: declared as a vector of 4, but .* shape \[1, 1\]",
    ):
        project.run()
    assert (
        make_project([(i, i + 30) for i in range(50)], view=MISSHAPEN).run().status == "published"
    )
    report = make_project([(i, i + 30) for i in range(50)] + [(99, 3)], view=MISSHAPEN).run()
    assert (report.status, report.counts["rejected"]) == ("published", 1)


VIEW: dict[str, Any] = {
    "model": {"use": f"{HERE}:Texts"},
    "features": {
        "length": {"dtype": "int64"},
        "vector": {"dtype": "float32", "dim": 4},
        "words": {"dtype": "string", "max_items": 8},
        "note": {"dtype": "string"},
    },
    "index": {"on": "vector", "metric": "l2"},
    # a vector's dimensions are constant but for one, and nearly all have one direction
    "gates": {"first": None},
}
MIXED: Rows = {1: "a b", 2: None, 3: "", 4: "boom", 5: "nan", 6: "d", 7: "ee e", 8: "b"}
"""Four rows with a value, two unusable ones, and two that cannot be computed whatever the
policy."""


Make = Callable[..., Scene]


@pytest.fixture
def make(make_project: MakeProject) -> Make:
    """Makes a project of these texts by id."""

    def make(rows: Rows, online: str = "table:./online", **view: Any) -> Scene:
        table = pa.table(
            {"id": pa.array(rows, pa.int64()), "x": pa.array(rows.values(), pa.string())}
        )
        return make_project(table, view=VIEW | view, project={"online": online})

    return make


def stored(project: Scene, report: Report) -> dict[int, dict[str, Any]]:
    """Features by id, as a reader of the snapshot's chain sees them."""
    found = [
        row
        for batch in project.store.batches(project.snapshot_of(report))
        for row in batch.to_pylist()
    ]
    assert all(row["computed_at"] is not None and row["input_hash"] is not None for row in found)
    assert len({row["id"] for row in found}) == len(found)
    return {row["id"]: {name: row[name] for name in NAMES} for row in found}


def expected(rows: Rows, *, nulls: bool = True) -> dict[int, dict[str, Any]]:
    """Features by id of the rows that are written."""
    return {
        i: features(text)
        for i, text in rows.items()
        if text not in ("boom", "nan") and (nulls or text)
    }


def served(lookup: Lookup, keys: Sequence[int], **options: Any) -> list[dict[str, Any]]:
    """Whole rows but for their times; the Arrow answer, which the plain one must equal."""
    table = lookup.get("numbers", keys, **options)
    for column in table.columns:
        column.validate(full=True)
    rows = table.drop_columns(["computed_at", "age_s", "ttl_s", "snapshot", "model"]).to_pylist()
    if not options:
        answer = lookup.begin("numbers", keys)
        answer.wait()
        plain = [dict(row["features"] or NOTHING) for row in answer.rows()]
        for row in plain:
            row["vector"] = None if row["vector"] is None else list(row["vector"])
        assert plain == [{name: row[name] for name in NAMES} for row in rows]
    return rows


def fresh(rows: Rows) -> list[dict[str, Any]]:
    """What :func:`served` gives of rows in the store."""
    return [
        {"key": str(i), "status": "fresh", "source": "store", "reason": None, **found}
        for i, found in expected(rows).items()
    ]


def missing(key: int, reason: str) -> dict[str, Any]:
    return {"key": str(key), "status": "missing", "source": None, "reason": reason, **NOTHING}


def rejected(project: Scene, report: Report) -> list[tuple[str, str, str]]:
    """(key, stage, error) of the rejected rows."""
    table = pq.read_table(project.root / "numbers" / "data" / report.run / "rejected.parquet")
    return sorted((row["key"], row["stage"], row["error"]) for row in table.to_pylist())


def all_is_well(project: Scene) -> list[str]:
    checks = verify(project, "numbers")
    assert [c.found for c in checks if not c.ok] == []
    return [c.found for c in checks]


COMPUTED_BADLY = [
    ("4", "model", "ValueError: boom" + raised_at(__file__, 'ValueError("boom")')),
    ("5", "output", "vector is not finite"),
]
UNUSABLE = [("2", "input", "x is null"), ("3", "input", "x is empty")]


# ---- the three policies


def test_null_writes_unusable_rows_with_null_features_and_answers_them(
    make: Make, online: str, open_lookup: Callable[[Scene], Lookup]
) -> None:
    project = make(MIXED, online, bad_rows="null")
    report = project.run()
    assert (report.status, stored(project, report)) == ("published", expected(MIXED))
    assert report.counts == {
        "source": 8,
        "written": 6,
        "rejected": 2,
        "unchanged": 0,
        "removed": 0,
        "duplicates": 0,
        "nulls": 2,
    }
    assert rejected(project, report) == COMPUTED_BADLY
    snapshot = project.snapshot_of(report)
    assert (snapshot.rows, snapshot.quality["nulls"], snapshot.quality["coverage"]) == (6, 2.0, 0.5)
    lookup = open_lookup(project)
    keys = list(expected(MIXED))
    assert served(lookup, [*keys, 4, 9]) == [
        *fresh(MIXED),
        missing(4, "unknown_entity"),
        missing(9, "unknown_entity"),
    ]
    assert lookup.row("numbers", 2, features=["note", "vector"])["features"] == {
        "note": None,
        "vector": None,
    }
    only_null = served(lookup, [2, 3])
    assert [row["status"] for row in only_null] == ["fresh", "fresh"]

    found = lookup.search("numbers", vector=features("d")["vector"], k=10)
    assert [row["key"] for row in found["rows"]] == [
        "6",
        "8",
        "7",
        "1",
    ]  # ones without a vector are nobody's neighbours
    found = lookup.search("numbers", key=6, k=10)
    assert [row["key"] for row in found["rows"]] == ["8", "7", "1"]
    with pytest.raises(
        RequestError, match="key 2 of view 'numbers' has no vector to search by: it is null"
    ) as caught:
        lookup.search("numbers", key=2)
    assert (caught.value.status, caught.value.code) == (404, "null_vector")
    with pytest.raises(RequestError, match="unknown_entity") as caught:
        lookup.search("numbers", key=4)
    assert all_is_well(project)[-2] == "4 vectors; 4 sampled ones find themselves"


def test_null_counts_nothing_against_max_rejected_but_coverage_does(
    make: Make, capsys: Captured
) -> None:
    rows: Rows = {i: "d" * i for i in range(1, 31)}
    project = make(rows, bad_rows="null", max_rejected=0.1)
    assert project.run().status == "published"
    few, many = rows | {1: None, 2: "", 3: None}, rows | {1: None, 2: "", 3: None, 4: ""}
    report = make(few, bad_rows="null", max_rejected=0.1).run()
    assert (report.status, report.counts["rejected"], report.counts["nulls"]) == ("published", 0, 3)
    project = make(many, bad_rows="null", max_rejected=0.1)
    capsys.readouterr()
    assert project.cli("run", "numbers") == 3
    assert "coverage: 26 of 30 source rows have a value (limit 0.9)" in capsys.readouterr().err
    live = project.live()
    assert live.snapshot == 2
    assert project.cli("run", "numbers") == 3  # nothing to do: judged once more
    last = project.report()
    assert (last.counts["unchanged"], last.counts["nulls"]) == (30, 4)
    assert (
        make(many, bad_rows="null", gates={"first": None, "coverage": 0.8}).run().counts["nulls"]
        == 4
    )


def test_fail_ends_the_run_and_leaves_what_is_live(
    make: Make, capsys: Captured, open_lookup: Callable[[Scene], Lookup]
) -> None:
    good: Rows = {1: "a", 2: "d", 3: "boom", 4: "nan"}
    project = make(good, bad_rows="fail")
    report = project.run()  # rows that the model only fails on are rejected, as ever
    assert report.status == "published"
    assert report.counts["rejected"] == 2
    assert stored(project, report) == expected(good)
    live = project.store.log.events()
    assert project.run().status == "current"
    renewed = project.store.log.events()
    lookup = open_lookup(project)
    before = served(lookup, [1, 2, 3, 5])
    project = make(good | {5: "e", 7: "", 8: None}, bad_rows="fail")
    capsys.readouterr()
    assert project.cli("run", "numbers") == 3
    captured = capsys.readouterr()
    for part in (
        "'numbers'",
        "key '7': x is empty",
        "bad_rows is fail",
        "the live snapshot stays",
        "reject or null",
    ):
        assert part in captured.err
    assert "Traceback" not in captured.err
    last = project.report()
    assert (last.status, last.snapshot) == ("rejected", None)
    assert project.numbers() == [1]
    assert project.store.log.events() == renewed != live
    assert served(lookup, [1, 2, 3, 5]) == before
    report = make(good | {5: "e"}, bad_rows="fail").run()
    assert (report.status, stored(project, report)) == ("published", expected(good | {5: "e"}))


# ---- configuration


def test_a_bare_null_in_yaml_and_in_the_environment_is_the_policy(make: Make) -> None:
    project = make({1: "a"})
    file = project.folder / "views" / "numbers.yaml"
    text = file.read_text()
    for written, policy in (
        ("null", "null"),
        ("'null'", "null"),
        ("fail", "fail"),
        ("reject", "reject"),
    ):
        file.write_text(f"{text}\nbad_rows: {written}\n")
        assert project.reread().view("numbers").bad_rows == policy
    environment = {"PRECOMPUTE_VIEWS__NUMBERS__BAD_ROWS": "null"}
    assert Scene(project.folder, environment).view("numbers").bad_rows == "null"


# ---- another policy than before


def test_from_reject_to_null_rejected_rows_are_written_and_back_they_leave(
    make: Make, open_lookup: Callable[[Scene], Lookup]
) -> None:
    first = make(MIXED).run()
    project = make(MIXED, bad_rows="null")
    assert rejected(project, first) == sorted([*COMPUTED_BADLY, *UNUSABLE])
    plan = project.plan()
    assert str(plan) == (
        "full: 8 of 8 rows to compute (8 new); every row, since the policy for bad rows changed, reject → null"
    )
    report = project.run()
    assert (report.status, stored(project, report)) == ("published", expected(MIXED))
    assert (report.counts["rejected"], report.counts["nulls"]) == (2, 2)
    assert served(open_lookup(project), list(expected(MIXED))) == fresh(MIXED)
    assert (
        project.snapshot_of(first).content != project.snapshot_of(report).content
    )  # they do not hold the same values
    project = make(MIXED)  # and back: they leave, and what was computed so is there still
    report = project.run()
    assert str(report.plan).startswith("nothing to do: ")
    assert str(report.plan).endswith("builds on snapshot 1")
    assert (report.status, report.snapshot) == ("published", first.snapshot)
    assert stored(project, report) == expected(MIXED, nulls=False)
    assert served(open_lookup(project), [1, 2]) == [fresh(MIXED)[0], missing(2, "unknown_entity")]
    assert make(MIXED, bad_rows="reject").run().status == "current", "it is the default"


def test_to_fail_a_row_set_aside_before_with_the_same_input_ends_the_run(make: Make) -> None:
    make(MIXED).run()
    Texts.seen.clear()
    with pytest.raises(RejectedError, match="key '2': x is null, and bad_rows is fail"):
        make(MIXED, bad_rows="fail").run()
    assert Texts.seen == []  # what was computed is not computed again
    make(MIXED, bad_rows="null").run()
    with pytest.raises(RejectedError, match="key '2': x is null, and bad_rows is fail"):
        make(MIXED, bad_rows="fail").run()
    mended = MIXED | {2: "now", 3: "then"}
    project = make(mended, bad_rows="fail")
    assert stored(project, project.run()) == expected(mended)


def test_an_interrupted_runs_chunks_count_for_its_own_policy_only(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunks, "CHUNK_S", 0.0)
    monkeypatch.setattr(chunks, "WINDOW_ROWS", 2)
    rows: Rows = {1: None, 2: "d", 3: "", 4: "ee", 5: "f", 6: "stop", 7: "g", 8: "h"}

    def interrupted(policy: str) -> None:
        monkeypatch.setattr(Texts, "stop_on", "stop")
        with pytest.raises(PrecomputeError, match="stopped"):
            make(rows, bad_rows=policy).run()
        monkeypatch.setattr(Texts, "stop_on", None)

    interrupted("null")
    project = make(rows)
    report = project.run()
    assert (report.resumed, stored(project, report)) == (0, expected(rows, nulls=False))
    project = make(rows, bad_rows="null")
    report = project.run()
    assert (report.resumed, report.counts["written"], report.counts["nulls"]) == (4, 8, 2)
    assert stored(project, report) == expected(rows)


# ---- deltas


def test_a_null_row_is_carried_over_like_any_other(
    make: Make, online: str, open_lookup: Callable[[Scene], Lookup]
) -> None:
    rows: Rows = {**{i: "d" * i for i in range(1, 41)}, 50: None, 51: ""}
    project = make(rows, online, bad_rows="null")
    project.run()
    Texts.seen.clear()
    assert (project.run().status, project.run().counts["nulls"]) == ("current", 2)
    rows[1] = "new"
    changes: list[tuple[Rows, int]] = [
        ({}, 2),
        ({50: "found"}, 1),
        ({3: None}, 2),
        ({51: "", 4: "x"}, 2),
    ]
    for step, (change, nulls) in enumerate(changes, 2):
        rows |= change
        project = make(rows, online, bad_rows="null")
        report = project.run()
        snapshot = project.snapshot_of(report)
        assert (report.status, snapshot.number, snapshot.kind) == ("published", step, "delta")
        assert report.counts["written"] == 1
        assert report.counts["unchanged"] == 41
        assert report.counts["nulls"] == nulls
        assert stored(project, report) == expected(rows)
        assert all_is_well(project)[-2].startswith(f"{42 - nulls} vectors; ")
        assert served(open_lookup(project), list(rows)) == fresh(rows)
    assert Texts.seen == ["new", "found", "x"]
    rows = {i: text for i, text in rows.items() if i not in (3, 51)} | {
        60: None
    }  # null rows leave the source, and come
    project = make(rows, online, bad_rows="null")
    report = project.run()
    assert report.counts["removed"] == 2
    assert report.counts["nulls"] == 1
    assert stored(project, report) == expected(rows)


def test_compaction_copies_null_rows(make: Make) -> None:
    rows: Rows = {i: "d" * i for i in range(1, 9)} | {9: None}
    make(rows, bad_rows="null").run()
    rows |= {i: "e" * i for i in range(1, 6)}
    project = make(rows, bad_rows="null")
    report = project.run()
    assert project.snapshot_of(report).kind == "full"
    assert report.counts["unchanged"] == 4
    assert report.counts["nulls"] == 1
    assert stored(project, report) == expected(rows)
    all_is_well(project)


# ---- gates


def test_gates_measure_vectors_that_are_there(make: Make) -> None:
    rows: Rows = {i: "d" * i for i in range(1, 41)} | dict.fromkeys(range(41, 51))
    make(rows, bad_rows="null").run()
    changed = rows | {1: None, 41: "d" * 41}
    project = make(changed, bad_rows="null")
    quality = project.snapshot_of(project.run()).quality
    vectors = np.array([features(text)["vector"] for text in changed.values() if text])
    norms = np.linalg.norm(vectors, axis=1)
    cosines = (vectors / norms[:, None]) @ (vectors / norms[:, None]).T
    assert {
        name: value
        for name, value in quality.items()
        if "." not in name or name.startswith("vector.")
    } == pytest.approx(
        {
            "nulls": 10.0,
            "rejected": 0.0,
            "coverage": 40 / 50,
            "finite": 0.0,
            "contract": 0.0,
            "vector.null": 0.0,
            "vector.not_finite": 0.0,
            "vector.zero": 0.0,
            "vector.common": 1 / 40,
            "vector.repeated": 0.0,
            "vector.dead": 3 / 4,
            "vector.cosine": cosines[~np.eye(40, dtype=bool)].mean(),
            "vector.moved.cosine05": 1.0,
            "vector.moved.cosine50": 1.0,
            "vector.moved.turned": 0.0,
        }
        | {f"vector.norm.p{q:02}": np.percentile(norms, q) for q in (1, 5, 25, 50, 75, 95, 99)}
    )


def test_gates_of_a_snapshot_without_a_single_vector(
    make: Make, open_lookup: Callable[[Scene], Lookup]
) -> None:
    gates = {"gates": {"first": None, "coverage": None, "rows": None}}
    rows: Rows = dict.fromkeys(range(1, 31))
    project = make(rows, bad_rows="null", **gates)
    report = project.run()
    assert report.status == "published"
    assert report.counts["nulls"] == 30
    assert stored(project, report) == expected(rows)
    lookup = open_lookup(project)
    assert lookup.search("numbers", vector=[1.0, 2.0, 3.0, 4.0], k=3)["rows"] == []
    assert served(lookup, [1, 2]) == fresh(rows)[:2]
    assert all_is_well(project)[-2] == "0 vectors; 0 sampled ones find themselves"
    some: Rows = {i: "d" * i for i in range(1, 31)}
    project = make(some, bad_rows="null", **gates)  # nothing to measure the drift by
    report = project.run()
    assert (report.status, stored(project, report)) == ("published", expected(some))
    assert not project.snapshot_of(report).quality.keys() & {"norm", "drift"}


# ---- every kind of feature


# ---- every kind of feature


class Kinds(Texts):
    """A feature of every type and shape, all ones."""

    def fingerprint(self) -> str:
        return "kinds 1"

    def compute(self, batch: pa.RecordBatch) -> dict[str, pa.Array]:
        return {name: pa.array([value] * batch.num_rows) for name, (_, value) in KINDS.items()}


def _kinds() -> dict[str, tuple[dict[str, Any], Any]]:
    """Name → (as configured, value)."""
    found: dict[str, tuple[dict[str, Any], Any]] = {}
    for dtype in (
        "float16",
        "float32",
        "float64",
        "int8",
        "int16",
        "int32",
        "int64",
        "bool",
        "string",
    ):
        one: Any = {"bool": True, "string": "é"}.get(dtype, 1.0 if dtype.startswith("float") else 1)
        found[f"one_{dtype}"] = ({"dtype": dtype}, one)
        if dtype not in ("bool", "string"):
            found[f"vector_{dtype}"] = ({"dtype": dtype, "dim": 3}, [one] * 3)
        if dtype != "bool":
            found[f"list_{dtype}"] = ({"dtype": dtype, "max_items": 3}, [one] * 2)
    return found


KINDS = _kinds()


def test_a_null_of_every_kind_of_feature_is_answered(
    make: Make, open_lookup: Callable[[Scene], Lookup]
) -> None:
    kinds = {name: kind for name, (kind, _) in KINDS.items()}
    view = {
        "model": {"use": f"{HERE}:Kinds"},
        "features": kinds,
        "index": None,
        "bad_rows": "null",
        "max_rejected": 0.7,
    }
    project = make({1: "a", 2: None, 3: "c", 4: ""}, **view)
    assert project.run().counts["nulls"] == 2
    lookup = open_lookup(project)
    full, nothing = {name: value for name, (_, value) in KINDS.items()}, dict.fromkeys(KINDS)
    for keys in ([1, 2, 3, 4], [2], [4, 2], [3, 1]):
        table = lookup.get("numbers", keys).select(list(KINDS))
        assert table.to_pylist() == [nothing if key % 2 == 0 else full for key in keys]
        for column in table.columns:
            column.validate(full=True)
    assert lookup.row("numbers", 2)["features"] == nothing
    plain = lookup.row("numbers", 1)["features"]
    assert {name: list(v) if isinstance(v, tuple) else v for name, v in plain.items()} == full


# ---- the fallback


FALLBACK = {"fallback": {"enabled": True, "deadline": "20s"}, "ttl": 0, "stale_for": 0}


def test_the_fallback_answers_an_unusable_row_as_the_batch_job_does(
    make: Make, open_lookup: Callable[[Scene], Lookup]
) -> None:
    project = make(MIXED, bad_rows="null", **FALLBACK)
    report = project.run()
    assert (report.status, project.snapshot_of(report).quality["parity"]) == ("published", 0.0)
    lookup = open_lookup(project)
    keys = list(MIXED)
    computed = [row | {"status": "computed", "source": "fallback"} for row in fresh(MIXED)]
    computed[3:3] = [missing(4, "model_error"), missing(5, "model_error")]
    assert served(lookup, keys) == computed
    assert served(lookup, [2]) == [computed[1]]
    given = {"98": {"x": "dd"}, "99": {"x": ""}}
    assert [
        (row["status"], row["length"], row["vector"])
        for row in served(lookup, [98, 99], inputs=given)
    ] == [
        ("computed", 2, features("dd")["vector"]),
        ("computed", None, None),
    ]
    with pytest.raises(
        RequestError, match="the inputs could not be embedded: the model cannot take them"
    ) as caught:
        lookup.search("numbers", inputs={"x": ""})
    assert (caught.value.status, caught.value.code) == (422, "model_error")


def test_parity_notices_a_null_where_the_fallback_has_a_value(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: Rows = {i: "d" * i for i in range(1, 31)}
    off = {"first": None, "coverage": None, "parity": 0.5}
    project = make(rows, bad_rows="null", gates=off, **FALLBACK)
    usable = Texts.unusable
    asked: list[int] = []

    def unusable(self: Texts, batch: pa.RecordBatch) -> Mapping[int, str]:
        asked.append(batch.num_rows)
        return (
            dict.fromkeys(range(batch.num_rows), "not today")
            if len(asked) == 1
            else usable(self, batch)
        )

    monkeypatch.setattr(Texts, "unusable", unusable)
    report = project.materialize()
    assert (report.counts["nulls"], project.snapshot_of(report).quality["parity"]) == (30, 1.0)
    assert project.refused_by() == ["parity"]
