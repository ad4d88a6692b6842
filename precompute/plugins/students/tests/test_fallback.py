"""A student behind a view's misses: it answers in the model's stead, says so and how well it
agrees, and is refused where it does not agree as it promised."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from precompute.jobs.ops.status import view_status
from precompute.jobs.run.judge.audit import ALONE_ROWS, Audit
from precompute.jobs.run.rows.open_view import open_view
from precompute.jobs.serve.fallback import ViewFallback
from precompute.jobs.serve.lookup_worker import Warmer
from precompute.jobs.setup.validate import validate
from precompute.model import absolute_arguments, model_fingerprint
from precompute.plugins.students.misses import KEY
from precompute.plugins.students.open_student import OpenStudent
from precompute.plugins.students.student import (
    USES,
    Agreement,
    Student,
    agreement,
    is_held_out,
    student_bytes,
)
from precompute.plugins.students.tests.angles import Exact, angles
from precompute.registry import load_with_fingerprint
from precompute.store.answers.lookup import Lookup
from precompute.store.client import Client
from precompute.store.disk.record import replace
from precompute.store.doors import VIEW_KEYS
from precompute.store.errors import ConfigError, GateError, PrecomputeError, RejectedError
from precompute.store.feature_view import Substitute
from precompute.store.online.miss_cache import MissCacheLimits
from precompute.store.online.online_store import Pointer
from precompute.store.online.url import open_miss_cache
from precompute.store.times import Partition
from tests.fixtures import MakeProject
from tests.jobs.test_converted_view import LOOSE, expected, torch_model, torch_project
from tests.jobs.test_warmer import Models
from tests.scene import UNJUDGED, Scene
from tests.server import Server, eventually

HERE = "precompute.plugins.students.tests.angles"
ROWS = 100
FALLBACK = {"enabled": True, "deadline": "20s", "model": "students/rough"}


def rough(x: float, error: float = 2.0) -> dict[str, Any]:
    """The features of one row by the student."""
    made = angles(np.array([x]), error)
    return {"vector": tuple(made["vector"][0].tolist()), "score": float(made["score"][0])}


@pytest.fixture(autouse=True)
def _students_of_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Records may name the models of tests, too."""
    monkeypatch.setitem(USES, f"{HERE}:Rough", ("path", ("dim", "most")))
    of_torch = ("weights", tuple(torch_model()["args"]))
    monkeypatch.setitem(USES, "torch_module", of_torch)


PROMISED = {"vector": ("recall_at_10", 0.6), "score": ("rank_correlation", 0.9)}


def write_student(
    scene: Scene,
    *,
    error: float = 2.0,
    promised: dict[str, float] | None = None,
    teacher: str | None = None,
    view: str = "numbers",
    name: str = "rough",
    judged: Sequence[str] = tuple(PROMISED),
    held_out_share: float = 1.0,
    **args: Any,
) -> Student:
    """A student's folder in the project, as ``optimize`` makes it."""
    folder = scene.home / "students" / name
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "error").write_text(str(error))
    args = {"path": "./model/error"} | args
    _, own = load_with_fingerprint(f"{HERE}:Rough", absolute_arguments(args, folder), scene.home)
    student = Student(
        view=view,
        name=name,
        by="distil",
        use=f"{HERE}:Rough",
        args=args,
        fingerprint=own,
        approximates=teacher or scene.snapshot().model,
        snapshot=1,
        data="data",
        seed=0,
        learned_rows=0,
        held_out_rows=ROWS,
        grouped_by=["x"],
        held_out_share=held_out_share,
        agreement={
            one: Agreement(
                figure, 0.99, (promised or {}).get(one, least), ROWS, ROWS * (one == "vector")
            )
            for one, (figure, least) in PROMISED.items()
            if one in judged
        },
        figures={},
        made_s=1.0,
        made_at="2026-01-01T00:00:00+00:00",
    )
    (folder / "student.json").write_bytes(student_bytes(student))
    return student


def published(student: Student) -> str:
    """The fingerprint that what is published has of it."""
    return model_fingerprint(student.fingerprint, student.use, "fp32", {})


def write_rows(scene: Scene, rows: int, first: int = 1) -> None:
    ids = list(range(first, first + rows))
    table = pa.table({"id": ids, "x": [7 * i / 10 for i in ids]})
    pq.write_table(table, scene.folder / "data.parquet")


Make = Callable[..., Scene]


@pytest.fixture
def make(make_project: MakeProject) -> Make:
    """Makes a project of ``numbers``, the angles of :data:`ROWS` rows; ``view`` replaces keys of
    its file."""

    def made(view: dict[str, Any] | None = None, **options: Any) -> Scene:
        definition = {
            "model": {"use": f"{HERE}:Exact", "args": {"path": "./teacher"}},
            "features": {
                "vector": {"dtype": "float32", "dim": 2},
                "score": {"dtype": "float64"},
            },
            "index": {"on": "vector"},
            "fallback": {"enabled": True, "deadline": "20s"},
            "gates": UNJUDGED | {"rows": None},
            "max_rejected": 0.1,
        }
        scene = make_project(None, view=definition | (view or {}), **options)
        (scene.folder / "teacher").write_text("")
        if not (scene.folder / "data.parquet").exists():
            write_rows(scene, ROWS)
        return scene

    return made


@pytest.fixture
def scene(make: Make) -> Scene:
    """Published by its model, then with a student behind its misses."""
    make().run()
    scene = make({"fallback": FALLBACK})
    write_student(scene)
    scene.run()
    return scene


@contextlib.contextmanager
def answering(scene: Scene, **options: Any) -> Iterator[Lookup]:
    with (
        contextlib.closing(ViewFallback(scene.offline, scene.home, 64)) as fallback,
        scene.lookup(fallback, **options) as lookup,
    ):
        yield lookup


def one(lookup: Lookup, key: int, **options: Any) -> dict[str, Any]:
    """The row of a key, without when it was computed."""
    row = lookup.row("numbers", key, **options)
    return {name: value for name, value in row.items() if name not in ("computed_at", "age_s")}


def test_a_miss_is_the_students_until_the_next_run(scene: Scene) -> None:
    student, teacher = scene.pointer().substitute, scene.pointer().model
    assert student is not None
    assert student.fingerprint != teacher
    # as many as were measured, of the rows that are live
    assert student.agreement.keys() == PROMISED.keys()
    assert 0.6 < student.agreement["vector"] < 0.99 < student.agreement["score"] < 1
    write_rows(scene, ROWS + 1)
    of_student = {
        "key": "101",
        "status": "computed",
        "source": "fallback",
        "approximates": teacher,
        "agreement": student.agreement["vector"],
        "ttl_s": 3600.0,
        "snapshot": 2,
        "model": student.fingerprint,
        "features": rough(70.7),
    }
    made = Exact.made
    with answering(scene) as lookup:
        first = one(lookup, 7)
        assert (first["status"], first["model"], "approximates" in first) == (
            "fresh",
            teacher,
            False,
        )
        assert one(lookup, 101) == of_student
        table = lookup.get("numbers", [7, 101, 999], features=[])
        assert table.select(["status", "model", "approximates", "agreement"]).to_pylist() == [
            {"status": "fresh", "model": teacher, "approximates": None, "agreement": None},
            {
                "status": "computed",
                "model": student.fingerprint,
                "approximates": teacher,
                "agreement": student.agreement["vector"],
            },
            {"status": "missing", "model": teacher, "approximates": None, "agreement": None},
        ]
        assert lookup.views()[0]["miss_model"] == {
            "fingerprint": student.fingerprint,
            "agreement": student.agreement,
        }
    # it was not even loaded
    assert Exact.made == made
    scene.run()
    with answering(scene) as lookup:
        row = one(lookup, 101)
    assert (row["status"], row["model"], row["features"]["score"]) == (
        "fresh",
        teacher,
        pytest.approx(70.7),
    )
    assert not {"approximates", "agreement"} & row.keys()


def test_a_service_says_whose_rows_they_are(scene: Scene, make: Make) -> None:
    (scene.folder / "services").mkdir()
    (scene.folder / "services" / "all.yaml").write_text(
        "name: all\nentity: [id]\nviews: {numbers: [score]}\n"
    )
    student, teacher = scene.pointer().substitute, scene.pointer().model
    assert student is not None
    write_rows(scene, ROWS + 1)
    scene = scene.reread()
    service = scene.service("all")
    with answering(scene, services=[service]) as lookup:
        table = lookup.service("all", {"id": [7, 101]})
    assert table["numbers__approximates"].to_pylist() == [None, teacher]
    assert table["numbers__agreement"].to_pylist() == [None, student.least]
    shared = json.loads(table.schema.metadata[b"views"])["numbers"]
    assert (shared["model"], shared["miss_model"]) == (teacher, student.fingerprint)


# ---- publishing: judged, refused, accepted


def test_a_student_that_does_not_agree_as_promised_is_refused(make: Make) -> None:
    make().run()
    scene = make({"fallback": FALLBACK})
    write_student(scene, error=20.0, promised={"vector": 0.75, "score": 0.5})
    with pytest.raises(GateError) as raised:
        scene.run()
    measured = scene.snapshot().substitute
    assert measured is not None
    value = measured.agreement["vector"]
    assert 0 < value < 0.75 < measured.agreement["score"]
    assert (
        f"parity: vector: recall@10 {value:.3f} is below 0.750, which the student promised; make it"
        " again with `precompute optimize numbers`, or take fallback.model out of the view"
    ) in str(raised.value)
    assert "--accept parity" in str(raised.value)
    assert [
        (verdict.passed, verdict.measured, verdict.limit)
        for verdict in scene.snapshot().gates
        if verdict.gate == "parity"
    ] == [(True, measured.agreement["score"], 0.5), (False, value, 0.75)]
    assert (scene.live().snapshot, scene.pointer().substitute) == (1, None)
    # nobody changed anything, so nothing else is found
    with pytest.raises(GateError, match=f"recall@10 {value:.3f} is below 0.750"):
        scene.run()
    assert scene.run(accept=["parity"]).status == "published"
    assert scene.pointer().substitute == measured
    # by a gate that is off it is measured all the same
    scene = make({"fallback": FALLBACK, "gates": UNJUDGED | {"parity": None}})
    scene.run(full=True)
    assert scene.pointer().substitute == measured
    assert scene.snapshot().quality["parity"] == value


def test_a_student_that_computes_too_few_rows_is_refused(make: Make) -> None:
    make().run()
    scene = make({"fallback": FALLBACK})
    write_student(scene, most=63.0)
    scene.run()
    # ten of a hundred cannot be computed, and so many may be
    write_student(scene, most=62.0)
    with pytest.raises(GateError, match="the student rejects 12 of 100 sampled rows, the first"):
        scene.run()


def test_of_few_rows_nothing_is_judged(make: Make) -> None:
    scene = make()
    write_rows(scene, 49)
    scene.run()
    scene = make({"fallback": FALLBACK})
    write_student(scene, error=90.0)
    scene.run()
    student = scene.pointer().substitute
    assert student is not None
    assert student.agreement == {"vector": 0.99, "score": 0.99}
    assert "parity" not in [verdict.gate for verdict in scene.snapshot().gates]


def _damaged(scene: Scene) -> None:
    path = scene.home / "students/rough/student.json"
    path.write_bytes(path.read_bytes().replace(b'"promised": 0.6', b'"promised": 0.1'))


MISTAKES: dict[str, tuple[Callable[[Scene], object], str]] = {
    "no folder": (
        lambda scene: shutil.rmtree(scene.home / "students"),
        "is no student's folder: it has no student.json",
    ),
    "damaged": (_damaged, "student.json is damaged"),
    "other files": (
        lambda scene: (scene.home / "students/rough/model/error").write_text("3"),
        "the files of its model were changed: their fingerprint is",
    ),
    "no files": (
        lambda scene: (scene.home / "students/rough/model/error").unlink(),
        "failed to load",
    ),
    "another view": (
        lambda scene: write_student(scene, view="others"),
        "it is a student of view 'others'",
    ),
    "another teacher": (
        lambda scene: write_student(scene, teacher="f" * 64),
        f"approximates model {'f' * 12}, and the view's is ",
    ),
    "another feature": (
        lambda scene: write_student(scene, judged=["vector"]),
        "it was never judged on feature 'score' (its features: vector)",
    ),
    "other dimensions": (
        lambda scene: write_student(scene, dim=3),
        "the student computes none of the first 10 rows: ",
    ),
}


@pytest.mark.parametrize(("change", "said"), MISTAKES.values(), ids=MISTAKES.keys())
def test_what_is_no_student_of_the_view_is_refused(
    make: Make, change: Callable[[Scene], object], said: str
) -> None:
    make().run()
    scene = make({"fallback": FALLBACK})
    write_student(scene)
    assert [check.ok for check in validate(scene) if check.check == "fallback.model"] == [True]
    change(scene)
    before = Exact.computed
    with pytest.raises(PrecomputeError) as raised:
        scene.run(full=True)
    assert "views/numbers.yaml:" in str(raised.value)
    assert said in str(raised.value)
    assert Exact.computed == before
    assert scene.live().snapshot == 1
    (check,) = [check for check in validate(scene) if check.check == "fallback.model"]
    assert not check.ok
    assert said in check.found


@pytest.mark.parametrize(
    ("view", "said"),
    [
        ({"fallback": {"model": "students/rough"}}, "without `enabled` there is no fallback"),
        (
            {"fallback": {"enabled": False, "model": "students/rough"}},
            "fallback.model: no misses are computed: write enabled: true, or take model out",
        ),
        (
            {"fallback": FALLBACK, "features": {"agreement": {"dtype": "float64"}}, "index": None},
            "fallback.model: answers have a column 'agreement' of their own then",
        ),
    ],
)
def test_what_cannot_have_a_student_is_refused(make: Make, view: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make(view).view("numbers")


def test_another_student_goes_live_and_no_row_is_computed(scene: Scene, make: Make) -> None:
    before, first = Exact.computed, scene.pointer()
    assert scene.run().status == "current"
    assert scene.pointer().substitute == first.substitute
    write_student(scene, error=1.0)
    report = scene.run()
    assert (report.status, report.counts["written"], report.counts["unchanged"]) == (
        "published",
        0,
        ROWS,
    )
    second = scene.pointer()
    assert first.substitute is not None
    assert second.substitute is not None
    assert second.substitute.fingerprint != first.substitute.fingerprint
    assert second.substitute.agreement["vector"] > first.substitute.agreement["vector"]
    # what was loaded stays: the rows, and what they are cached under, are the model's
    assert (second.segments, second.model) == (first.segments, first.model)
    scene = make()
    scene.run()
    assert scene.pointer().substitute is None
    # but for those that `parity` computes once more where no student does
    assert Exact.computed == before + 20
    scene.rollback()
    assert scene.pointer().substitute == second.substitute


FIRST, SECOND = (
    Partition.parse(f"2026-01-0{day}T00:00Z/2026-01-0{day + 1}T00:00Z") for day in (1, 2)
)


def days(**partition: str) -> dict[str, Any]:
    sql = "SELECT * FROM read_parquet('${data}/data.parquet') WHERE day >= $start AND day < $end"
    by_day = {"by": "day", "start": "2026-01-01"} | partition
    return {"source": {"sql": sql}, "partition": by_day, "ttl": "3650d"}


def test_all_partitions_have_the_student_of_the_newest(make: Make) -> None:
    numbers = range(2 * ROWS)
    day = [np.datetime64(f"2026-01-0{1 + i // ROWS}", "us") for i in numbers]
    table = pa.table({"id": numbers, "x": [7 * (i % ROWS) / 10 for i in numbers], "day": day})
    scene = make(days(serve="all"))
    pq.write_table(table, scene.folder / "data.parquet")
    scene.run(partition=FIRST)
    scene = make(days(serve="all") | {"fallback": FALLBACK})
    write_student(scene)
    scene.run(partition=SECOND)
    pointer = scene.pointer()
    assert (pointer.rows, pointer.partition) == (2 * ROWS, str(SECOND))
    snapshots = map(scene.snapshot, scene.numbers())
    (of_second,) = (one.substitute for one in snapshots if one.partition == pointer.partition)
    assert of_second is not None
    assert pointer.substitute == of_second


def test_rows_that_are_compared_are_as_many_as_were_promised(make: Make) -> None:
    make().run()
    scene = make({"fallback": FALLBACK})
    record = write_student(scene)
    rows = scene.store.sample(scene.snapshot(), 2 * ROWS)
    sample = rows.append_column("key", rows.column("id").cast(pa.string()))
    view = scene.view("numbers").feature_view()
    agreed = {name: replace(one, rows=60, among=60) for name, one in record.agreement.items()}
    with open_view(view, scene.offline, scene.home) as opened:
        student = OpenStudent(view, scene.home, record)
        every = student.compare_rows(opened, opened.source, sample)
        fewer = OpenStudent(view, scene.home, replace(record, agreement=agreed))
        assert (every.given, every.rejected) == (ROWS, 0)
        assert fewer.compare_rows(opened, opened.source, sample).given == 60
        # what the source says of a row by now is another input
        table = pa.table(
            {"id": range(1, ROWS + 1), "x": [-9.0] * 40 + [7 * i / 10 for i in range(41, ROWS + 1)]}
        )
        pq.write_table(table, scene.folder / "data.parquet")
        left = fewer.compare_rows(opened, opened.source, sample)
        too_few = student.compare_rows(opened, opened.source, sample)
    found = {one.feature: one for one in left.agreed}
    assert left.given == 60
    assert found["vector"].message.endswith(", on 60 rows")
    # neighbours among fewer are easier to find, and say nothing of the promise
    assert [one.feature for one in too_few.agreed] == ["score"]
    # and those are the rows of the same keys
    assert found["vector"].value > 0.7


def test_only_rows_that_it_never_learned_from_say_how_it_agrees(make: Make) -> None:
    make().run()
    scene = make({"fallback": FALLBACK})
    record = write_student(scene, held_out_share=0.7)
    view = scene.view("numbers").feature_view()
    rows = scene.store.sample(scene.snapshot(), ROWS)
    sample = rows.append_column("key", rows.column("id").cast(pa.string()))
    with open_view(view, scene.offline, scene.home) as opened:
        compared = OpenStudent(view, scene.home, record).compare_rows(opened, opened.source, sample)
        keys = sample.column("key").to_pylist()
        inputs = opened.source.rows(keys, grouped_by=["x"])
        # the source has no such column any more: it may have learned from any
        other = replace(record, grouped_by=["x", "gone"])
        unknown = OpenStudent(view, scene.home, other).compare_rows(opened, opened.source, sample)
    unseen = is_held_out(np.asarray(inputs.column("input_group")), 0.7)
    x = np.asarray(inputs.column("x"))
    x = np.concatenate([x[unseen], x[~unseen]])
    teachers, own = (
        pa.record_batch(
            {
                "vector": pa.FixedSizeListArray.from_arrays(made["vector"].astype("f4").ravel(), 2),
                "score": made["score"],
            }
        )
        for made in (angles(x, error) for error in (0.0, 2.0))
    )
    expected = agreement(view, teachers, own.slice(0, int(unseen.sum())))
    assert 50 <= unseen.sum() < ROWS
    assert {one.feature: one.value for one in compared.agreed} == {
        name: one.value for name, one in expected.items()
    }
    assert (unknown.given, list(unknown.agreed)) == (ROWS, [])


def test_rows_that_neither_can_take_say_nothing_of_the_student(make: Make) -> None:
    nulls = {"bad_rows": "null", "gates": UNJUDGED | {"rows": None, "coverage": None}}
    scene = make(nulls)
    x = [*[None] * 12, *(7 * i / 10 for i in range(ROWS))]
    table = pa.table({"id": range(len(x)), "x": pa.array(x, pa.float64())})
    pq.write_table(table, scene.folder / "data.parquet")
    scene.run()
    scene = make(nulls | {"fallback": FALLBACK, "max_rejected": 0.0})
    write_student(scene)
    scene.run()
    student = scene.pointer().substitute
    assert student is not None
    assert 0.6 < student.agreement["vector"] < 0.99


def test_a_model_behind_no_miss_is_audited_among_other_rows(make: Make) -> None:
    wanted = []
    make().run()
    for fallback in ({"enabled": True}, FALLBACK):
        scene = make({"fallback": fallback})
        config = scene.view("numbers")
        with open_view(config.feature_view(), scene.offline, scene.home) as opened:
            wanted.append(Audit(config, opened, ROWS, 0.0).sample_rows)
    # where the model answers misses, `parity` has its rows computed once more
    assert wanted == [0, ALONE_ROWS]


def test_a_partition_without_rows_has_its_student(make: Make) -> None:
    fallback = {"index": None, "fallback": FALLBACK}
    gates = {"gates": UNJUDGED | {"rows": None, "contract": None}}
    make().run()
    scene = make(days(empty="publish") | fallback | gates)
    student = write_student(scene)
    table = pa.table({"id": [1], "x": [7.0], "day": pa.array([np.datetime64("2026-01-02", "us")])})
    pq.write_table(table, scene.folder / "data.parquet")
    scene.run(partition=FIRST)
    pointer = scene.pointer()
    assert (pointer.rows, pointer.miss_model) == (0, published(student))
    with answering(scene) as lookup:
        row = lookup.get("numbers", [7], inputs={7: {"x": 7.0}})
    assert row["agreement"].to_pylist() == [0.99]


# ---- serving


@contextlib.contextmanager
def recording(scene: Scene, ahead: dict[str, float]) -> Iterator[tuple[Lookup, list[str]]]:
    """A lookup with a cache of misses, whose clock is so many hours ahead; and the keys that it has
    computed."""
    keys: list[str] = []
    cache = open_miss_cache(scene.online, MissCacheLimits())
    clock = {"clock": lambda: time.time() + 3600 * ahead["hours"], "monotonic": lambda: 0.0}
    with (
        contextlib.closing(cache),
        contextlib.closing(
            ViewFallback(scene.offline, scene.home, 64, miss_cache=cache)
        ) as fallback,
    ):
        submit = fallback.submit

        def recorded(pointer: Pointer, wanted: Sequence[str], *args: Any, **named: Any) -> Any:
            keys.extend(wanted)
            return submit(pointer, wanted, *args, **named)

        fallback.submit = recorded  # type: ignore[assignment,method-assign]
        with scene.lookup(fallback, miss_cache=cache, **clock) as lookup:
            yield lookup, keys


def said(row: dict[str, Any]) -> tuple[str, str | None, bool]:
    """Status, source, and whether a student computed it."""
    return row["status"], row["source"], "approximates" in row


BY_MODEL, BY_STUDENT = ("stale", "store", False), ("computed", "fallback", True)


def test_a_stale_row_of_the_model_stays_and_a_cached_one_says_whose_it_is(scene: Scene) -> None:
    write_rows(scene, ROWS + 1)
    pointer, ahead = scene.pointer(), {"hours": 0.0}
    with recording(scene, ahead) as (lookup, keys):
        assert said(lookup.row("numbers", 101)) == BY_STUDENT
        # who wants no stored row gets the student's, which is cached like any
        fresh = lookup.get("numbers", [7], max_age_s=0)
        assert fresh["approximates"].to_pylist() == [pointer.model]
        eventually(lambda: _cached(scene, pointer, ["7", "101"]) == {"7", "101"})
        assert keys == ["101", "7"]
        assert said(lookup.row("numbers", 7)) == ("fresh", "store", False)
        cached = lookup.row("numbers", 101)
        assert said(cached) == ("fresh", "cache", True)
        assert (cached["model"], cached["approximates"], cached["agreement"]) == (
            pointer.miss_model,
            pointer.model,
            pointer.substitute.least,  # type: ignore[union-attr]
        )
        ahead["hours"] = 2.0
        assert said(lookup.row("numbers", 7)) == BY_MODEL
        assert said(lookup.row("numbers", 8)) == BY_MODEL
        assert lookup.get("numbers", [7, 8])["approximates"].to_pylist() == [None, None]
        assert keys == ["101", "7"]
        # one of the student's is computed again behind its answer
        assert said(lookup.row("numbers", 101)) == ("stale", "cache", True)
        assert keys == ["101", "7", "101"]
        ahead["hours"] = 26.0
        assert said(lookup.row("numbers", 8)) == BY_STUDENT


def _cached(scene: Scene, pointer: Pointer, keys: list[str]) -> set[str]:
    with contextlib.closing(open_miss_cache(scene.online, MissCacheLimits())) as cache:
        return {key for key, row in cache.read(pointer, keys).items() if row is not None}


def test_where_the_student_fails_an_expired_row_is_the_models(make: Make) -> None:
    make().run()
    scene = make({"fallback": FALLBACK | {"stale_if_error": "2d"}})
    write_student(scene, most=0.7 * ROWS)
    scene.run()
    write_rows(scene, ROWS + 1)
    ahead = {"hours": 26.0}
    with recording(scene, ahead) as (lookup, _):
        assert said(lookup.row("numbers", 8)) == BY_STUDENT
        missing = lookup.row("numbers", 101)
        assert (missing["status"], missing["reason"]) == ("missing", "model_error")
    (scene.home / "students/rough/model/error").write_text("4")
    with recording(scene, ahead) as (lookup, _):
        assert said(lookup.row("numbers", 8)) == BY_MODEL


def test_a_student_that_was_changed_computes_nothing(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    write_rows(scene, ROWS + 1)
    live = scene.pointer()
    (scene.home / "students/rough/model/error").write_text("4")
    made = Exact.made
    with answering(scene) as lookup, caplog.at_level(logging.ERROR):
        row = lookup.row("numbers", 101)
        assert (row["status"], row["reason"]) == ("missing", "model_error")
        assert one(lookup, 7)["status"] == "fresh"
    assert "the fallback.model students/rough on disk has fingerprint" in caplog.text
    assert f"the live snapshot {live.miss_model[:12]}" in caplog.text
    # nor does the model in its stead
    assert Exact.made == made


def _forged(student: Substitute, **changes: Any) -> dict[str, Any]:
    model = dataclasses.replace(student.model, **changes)
    return {"substitute": dataclasses.replace(student, model=model)}


FORGED: dict[str, Callable[[Substitute, Path], dict[str, Any]]] = {
    "another class": lambda student, canary: _forged(
        student, use="subprocess:run", args={"args": ["touch", str(canary)]}
    ),
    "other arguments": lambda student, _: _forged(
        student, args={**student.model.args, "most": 1e9}
    ),
    "a student where there is none": lambda student, canary: _forged(
        student, use="subprocess:run", args={"args": ["touch", str(canary)]}
    ),
}


@pytest.mark.parametrize(("name", "manifest"), [*zip(FORGED, (True, False, True), strict=True)])
def test_a_student_that_only_the_online_store_names_is_not_run(
    scene: Scene,
    make: Make,
    name: str,
    manifest: bool,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    write_rows(scene, ROWS + 1)
    canary, pointer = tmp_path / "canary", scene.pointer()
    assert pointer.substitute is not None
    with answering(scene) as lookup:
        assert said(lookup.row("numbers", 101)) == BY_STUDENT
    forged = replace(pointer, epoch=pointer.epoch + 1, **FORGED[name](pointer.substitute, canary))
    if name == "a student where there is none":
        scene = make()
        scene.run()
        write_rows(scene, ROWS + 2)
        own = scene.pointer()
        view = dataclasses.replace(own.view, misses_by=KEY, powers=pointer.view.powers)
        forged = replace(own, epoch=9, substitute=forged.substitute, view=view)
    if not manifest:
        shutil.move(scene.store.manifest_path(1).parent, scene.folder / "elsewhere")
    with scene.online_store() as store:
        store.flip(forged)
    with answering(scene) as lookup:
        row = lookup.row("numbers", 102 if name == "a student where there is none" else 101)
    assert (row["status"], row.get("reason")) == ("missing", "model_error")
    assert "names SQL or a model that neither the manifest of snapshot" in caplog.text
    assert not canary.exists()


def test_a_student_that_may_be_live_soon_is_opened_before(scene: Scene) -> None:
    wanted: list[set[str]] = []
    write_student(scene, error=1.0)
    scene.materialize()
    coming = scene.snapshot().substitute
    assert coming is not None
    with scene.lookup() as lookup:
        warmer = Warmer(lookup, Models(), wanted.append, scene.offline)
        try:
            eventually(lambda: bool(wanted))
        finally:
            warmer.stop()
    assert wanted[0] == {scene.pointer().miss_model, coming.fingerprint}


def test_a_server_needs_no_teacher(
    scene: Scene, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    student, teacher = scene.pointer().substitute, scene.pointer().model
    assert student is not None
    write_rows(scene, ROWS + 2)
    # it cannot be made any more
    (scene.folder / "teacher").unlink()
    assert scene.cli("lookup", "numbers", "101", "--fallback") == 0
    assert f"approximates {teacher[:12]}, agreement {student.least:.3f}" in capsys.readouterr().out
    with Server(scene.folder) as server:
        row = server.get("/v1/views/numbers/rows/101").json
        assert said(row) == BY_STUDENT
        assert (row["model"], row["approximates"], row["agreement"]) == (
            student.fingerprint,
            teacher,
            student.least,
        )
        # 101 may be in the cache of misses by now
        of_model, of_student = server.lookup("numbers", [7, 102])
        assert (said(of_model), said(of_student)) == (("fresh", "store", False), BY_STUDENT)
        assert of_student["agreement"] == student.least
        by_key = server.post("/v1/views/numbers/search", {"key": "50", "k": 1}).json
        assert not {"query_model", "agreement"} & by_key.keys()
        with Client(server.url) as client:
            table = client.get("numbers", [7, 101])
            found = client.search("numbers", inputs={"x": 35.0}, k=1)
        assert table["approximates"].to_pylist() == [None, teacher]
        assert found.query_model == student.fingerprint
        # into the model's index, by the student's vector
        assert found.rows[0].key == str(round(rough(35.0)["score"] / 0.7)) != "50"
        metrics = server.get("/metrics").body.decode()
        assert f'precompute_fallback_agreement{{view="numbers"}} {student.least}' in metrics


@pytest.mark.parametrize(
    ("own", "made_for", "computes_by"),
    [("auto", "bf16-eager", "bf16"), ("bf16", None, "bf16"), ("auto", None, "auto")],
)
def test_it_computes_by_its_own_technique_or_the_views(
    make_project: MakeProject, own: str, made_for: str | None, computes_by: str
) -> None:
    x = 1001.0
    view = {"precision": own, "accuracy": LOOSE}
    scene = torch_project(make_project, [(1, 1.0), (2, 2.0)], view=view)
    scene.run()
    scene = torch_project(make_project, view=view | {"fallback": FALLBACK})
    args = {**torch_model()["args"], "weights": "./model/weights.safetensors"}
    del args["device"]
    record = write_student(scene)
    folder = scene.home / "students/rough"
    shutil.copy(scene.folder / "doubler.safetensors", folder / "model/weights.safetensors")
    _, fingerprint = load_with_fingerprint(
        "torch_module", absolute_arguments(args, folder), scene.home
    )
    agreed = dict.fromkeys(("vector", "double"), record.agreement["score"])
    record = replace(record, use="torch_module", args=args, technique=made_for)
    record = replace(record, fingerprint=fingerprint, agreement=agreed)
    (folder / "student.json").write_bytes(student_bytes(record))
    scene.run()
    student = scene.pointer().substitute
    assert student is not None
    assert (student.model.precision, student.fingerprint == scene.pointer().model) == (
        computes_by,
        computes_by == own,
    )
    pq.write_table(pa.table({"id": [1, 2, 3], "x": [1.0, 2.0, x]}), scene.folder / "data.parquet")
    with answering(scene) as lookup:
        row = lookup.row("numbers", 3)
    dtype = torch.bfloat16 if computes_by == "bf16" else torch.float32
    assert said(row) == BY_STUDENT
    assert row["features"]["double"] == expected([x], dtype)["double"][0]
    assert expected([x], torch.bfloat16)["double"][0] != expected([x])["double"][0]


def test_without_the_power_the_views_own_model_computes_misses(
    scene: Scene, make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And ``status`` tells of it; with the power the same pointer is the student's again."""
    write_rows(scene, ROWS + 1)
    scene, pointer = make(), scene.pointer()
    with monkeypatch.context() as patched:
        patched.setattr(VIEW_KEYS, "is_here", lambda name: name != KEY)
        with answering(scene) as lookup:
            rows = lookup.get("numbers", [7, 101])
            assert lookup.views()[0]["miss_model"] is None
        assert not {"approximates", "agreement"} & set(rows.column_names)
        assert rows.select(["status", "model", "score"]).to_pylist() == [
            {"status": "fresh", "model": pointer.model, "score": pytest.approx(4.9)},
            {"status": "computed", "model": pointer.model, "score": pytest.approx(70.7)},
        ]
        absence = VIEW_KEYS.absence(KEY)
        with scene.online_store() as online:
            line = view_status(scene, scene.store, online)
        assert f"snapshot {pointer.snapshot}: {absence}" in line["attention"]
    assert f"view 'numbers' is served without what its record names: {absence}" in caplog.text
    with answering(scene) as lookup:
        assert said(lookup.row("numbers", 101)) == BY_STUDENT


# ---- as any model


def test_as_the_batchs_model_a_student_is_judged_as_any(make: Make) -> None:
    make().run()
    scene = make()
    student = write_student(scene, error=5.0)
    of_student = {"use": student.use, "args": {"path": "./students/rough/model/error"}}
    scene = make({"model": of_student})
    scene.run()
    live = scene.live_snapshot()
    assert (live.number, live.model, live.substitute) == (2, published(student), None)
    assert scene.pointer().substitute is None
    # every row is new, and `parity` is its own again
    assert (live.kind, live.counts.written) == ("full", ROWS)
    (parity,) = [verdict for verdict in live.gates if verdict.gate == "parity"]
    assert parity.message == "0 of 20 sampled rows come out differently from the fallback"
    # one that cannot take the rows is refused as any is
    write_student(scene, name="wrong", most=35.0)
    wrong = {"path": "./students/wrong/model/error", "most": 35.0}
    scene = make({"model": of_student | {"args": wrong}})
    with pytest.raises(RejectedError, match="too large"):
        scene.run()
