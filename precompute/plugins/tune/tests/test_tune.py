"""Tune: every candidate is compared with float32, and the fastest is picked only where its values
are near enough."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
import pytest
import torch

from precompute.engine.rows import Outcome
from precompute.engine.runner import Runner
from precompute.jobs.cli import main
from precompute.jobs.config.project import tuning_path
from precompute.jobs.run.judge.accuracy import AccuracyCheck
from precompute.models.torch_model import TorchModel
from precompute.plugins.tune import tune as tune_module
from precompute.plugins.tune.command import describe_tuning
from precompute.plugins.tune.tune import ROUNDS, Rate, Trials, tune
from precompute.store.errors import ConfigError, GateError, ModelError, SourceError
from precompute.techniques.technique import technique
from tests.fixtures import MakeProject
from tests.jobs.test_broken_view import MESSAGE, spoiled
from tests.jobs.test_converted_view import (
    LOOSE,
    ROWS,
    again,
    chosen,
    drawn,
    expected,
    figures,
    files,
    stored,
    torch_model,
    torch_project,
    wanted,
)

Captured = pytest.CaptureFixture[str]


def with_rates(monkeypatch: pytest.MonkeyPatch, **rates: float) -> None:
    """Rows/s as reported, by name with _ for -, whatever the machine is at."""

    def fixed(trials: Trials, until: float, announce: Any) -> dict[str, Rate]:
        return {
            name: Rate(rates[name.replace("-", "_")], {"p50": 1.0, "p95": 2.0, "p99": 3.0})
            for name in trials.ready
        }

    monkeypatch.setattr(Trials, "rates", fixed)


def test_tune_compares_every_candidate_and_picks_the_fastest_that_passes(
    make_project: MakeProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_rates(monkeypatch, fp32_eager=100.0, fp32_onednn=180.0, bf16_eager=200.0)
    project = torch_project(make_project, ROWS, view={"accuracy": LOOSE})
    before, announced = files(project.folder), list[str]()
    found = tune(
        project,
        "numbers",
        only=["bf16-eager", "fp32-onednn", "bf16-eager"],
        announce=announced.append,
    )
    x = drawn(project)
    for row in found["measured"]:
        assert row.pop("convert_s") >= 0
        assert row.pop("batch_ms") == {"p50": 1.0, "p95": 2.0, "p99": 3.0}
        memory = row.pop("memory_bytes")
        assert memory is None or 2**20 < memory < 2**40
    assert found["measured"] == [
        {
            "name": "fp32-eager",
            "rows_per_s": 100.0,
            "speed": 1.0,
            "refused": None,
            "accuracy": figures(project, torch.float32, x),
        },
        {
            "name": "bf16-eager",
            "rows_per_s": 200.0,
            "speed": 2.0,
            "refused": None,
            "accuracy": figures(project, torch.bfloat16, x),
        },
        {
            "name": "fp32-onednn",
            "rows_per_s": 180.0,
            "speed": 1.8,
            "refused": None,
            "accuracy": figures(project, torch.float32, x),
        },
    ]
    assert {
        k: found[k] for k in ("view", "picked", "precision", "backend", "rows", "budget", "file")
    } == {
        "view": "numbers",
        "picked": "bf16-eager",
        "precision": "bf16",
        "backend": "eager",
        "rows": 120,
        "budget": project.view("numbers").accuracy.model_dump(),
        "file": str(tuning_path(project.folder, "numbers")),
    }
    assert announced[0] == "fp32-eager: converting and comparing 120 rows"
    after = files(project.folder)
    written = json.loads(after.pop("tuning/numbers.json"))
    made = [path for path in after if path not in before]
    assert [path.rpartition("/")[2].rpartition("-")[0] for path in made] == [
        "accuracy-bf16-eager",
        "accuracy-fp32-onednn",
    ]
    assert {
        path: body for path, body in after.items() if path not in made
    } == before  # nothing else, above all no snapshot
    body = {key: value for key, value in written.items() if key not in ("version", "model")}
    for row in body["measured"]:
        assert [row.pop(name) is not row for name in ("convert_s", "batch_ms", "memory_bytes")] == [
            True
        ] * 3
    assert body == {key: value for key, value in found.items() if key != "file"}

    project = again(project)
    assert chosen(project) == ("bf16", "eager")
    report = project.run()
    assert report.snapshot is not None
    assert stored(project, report.snapshot) == wanted(ROWS, torch.bfloat16)


def test_each_candidate_is_measured_as_what_it_is_in_turns(
    make_project: MakeProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed: list[tuple[str, list[float]]] = []

    class Watched(Runner):
        def compute(self, batch: pa.RecordBatch, **how: Any) -> Any:
            done = super().compute(batch, **how)
            self.note(done)
            return done

        def stream(self, *given: Any, **how: Any) -> Any:
            for batch, done in super().stream(*given, **how):
                self.note(done)
                yield batch, done

        def note(self, done: Outcome) -> None:
            assert isinstance(self._model, TorchModel)
            computed.append((self._model.variant, done.features.column("double").to_pylist()))

    monkeypatch.setattr(tune_module, "Runner", Watched)
    project = torch_project(make_project, ROWS, view={"accuracy": LOOSE})
    tune(project, "numbers", rows=50, only=["bf16-eager", "fp32-onednn"])
    x = drawn(project, 50)
    assert x != [x for _, x in ROWS[:50]]  # from all over
    ends = sorted(x for _, x in ROWS)
    assert sorted(computed[0][1][:8]) == expected([*ends[:4], *ends[-4:]])["double"].tolist()
    computed = [(name, found[8:]) for name, found in computed]
    values = {
        "fp32-eager": expected(x)["double"].tolist(),
        "bf16-eager": expected(x, torch.bfloat16)["double"].tolist(),
    }
    values["fp32-onednn"] = values["fp32-eager"]
    names = ["fp32-eager", "bf16-eager", "fp32-onednn"]
    assert [name for name, _ in computed] == names * (1 + ROUNDS)
    assert all(found == values[name] for name, found in computed)


def test_what_computes_the_sample_and_not_its_batches_is_refused(
    make_project: MakeProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a graph whose batches all had one length when it was made."""
    own = Trials.tried

    def tried(self: Trials, name: str) -> dict[str, Any]:
        line = own(self, name)
        if name == "bf16-eager":

            def fails() -> None:
                raise ModelError("dimension 1 was 15, and is 13 now")

            self.ready[name] = fails
        return line

    monkeypatch.setattr(Trials, "tried", tried)
    project = torch_project(make_project, ROWS, view={"accuracy": LOOSE})
    found = tune(project, "numbers", only=["bf16-eager", "fp32-onednn"], write=False)
    reference, bf16, onednn = found["measured"]
    assert (bf16["refused"], bf16["speed"], bf16["batch_ms"]) == (
        "dimension 1 was 15, and is 13 now",
        None,
        {},
    )
    assert [line["refused"] for line in (reference, onednn)] == [None, None]
    assert reference["speed"] == 1.0
    assert onednn["rows_per_s"] > 0


def test_a_view_whose_file_is_wrong_is_refused_with_the_mistake(
    make_project: MakeProject, capsys: Captured
) -> None:
    folder = spoiled(make_project).folder
    capsys.readouterr()
    assert main(["-c", str(folder), "tune", "broken"]) == 2
    assert MESSAGE in capsys.readouterr().err


def test_what_cannot_be_converted_or_is_inaccurate_is_refused(
    make_project: MakeProject, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with_rates(monkeypatch, fp32_eager=100.0, bf16_eager=900.0)
    project = torch_project(make_project, ROWS)
    command = [
        "-c",
        str(project.folder),
        "tune",
        "numbers",
        "--only",
        "bf16-eager",
        "--only",
        "fp32-compile",
    ]
    assert main([*command, "--json"]) == 0
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert captured.err == ""
    reference, bf16, compiled = found["measured"]
    x = drawn(project)
    recall = figures(project, torch.bfloat16, x)["vector"]["recall_at_10"]
    rank = figures(project, torch.bfloat16, x)["double"]["rank_correlation"]
    assert recall < 0.985
    assert rank > 0.999
    assert bf16["refused"] == f"vector: recall@10 {recall:.5g} is below 0.985"
    assert bf16["speed"] == 9.0
    del compiled["convert_s"], compiled["batch_ms"]
    assert compiled == {
        "name": "fp32-compile",
        "refused": "precision fp32-compile: there is no C++ compiler 'no-such-compiler': install one, or name it in CXX",
        "rows_per_s": None,
        "speed": None,
    }
    assert (found["picked"], reference["refused"]) == ("fp32-eager", None)
    assert chosen(again(project)) == ("auto", "auto")

    assert main(command) == 0
    captured = capsys.readouterr()
    assert [line for line in captured.err.splitlines() if "converting" in line] == [
        f"{name}: converting and comparing 120 rows"
        for name in ("fp32-eager", "bf16-eager", "fp32-compile")
    ]
    lines = captured.out.splitlines()
    assert [line.split()[0] for line in lines[1:]] == [
        "precision",
        "fp32-eager",
        "bf16-eager",
        "fp32-compile",
        "fp32-eager",
    ]
    assert lines[2].endswith("picked")
    assert lines[3].endswith(f"refused: {bf16['refused']}")
    assert lines[4].endswith(f"refused: {compiled['refused']}")


def test_rows_that_are_lost_refuse_it_whatever_the_budget(
    make_project: MakeProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_rates(monkeypatch, fp32_eager=100.0, bf16_eager=900.0)
    project = torch_project(
        make_project,
        ROWS,
        module="HalfLost",
        view={"accuracy": {"cosine": 1e-9, "recall_at_10": 0.0}},
    )
    found = tune(project, "numbers", only=["bf16-eager"])
    assert found["measured"][1]["refused"] == "rows computed by both: 0 is below 1"
    assert (found["measured"][1]["accuracy"], found["picked"]) == ({}, "fp32-eager")
    with pytest.raises(GateError, match="rows computed by both: 0 is below 1"):
        torch_project(make_project, module="HalfLost", view={"precision": "bf16"}).run()


def row(name: str, speed: float | None, refused: str | None = None) -> dict[str, Any]:
    return {"name": name, "speed": speed, "refused": refused}


@pytest.mark.parametrize(
    ("rows", "picked"),
    [
        ([], "fp32-eager"),
        ([row("bf16-eager", 1.049)], "fp32-eager"),
        ([row("bf16-eager", 1.05)], "bf16-eager"),
        ([row("bf16-eager", 1.5), row("fp32-onnx", 1.4)], "bf16-eager"),
        ([row("bf16-eager", 9.0, "too far off"), row("fp32-onnx", 1.4)], "fp32-onnx"),
        ([row("bf16-eager", 9.0, "too far off")], "fp32-eager"),
        ([row("fp32-compile", None, "no compiler"), row("bf16-eager", 0.1)], "fp32-eager"),
    ],
)
def test_the_pick_is_the_fastest_that_passes_and_worth_it(
    rows: list[dict[str, Any]], picked: str
) -> None:
    assert tune_module._pick([row("fp32-eager", 1.0), *rows]) == picked


def test_what_there_is_no_time_for_is_left_out_and_said(
    make_project: MakeProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["fp32-eager", "bf16-eager", "fp32-compile", "fp32-onednn"]
    monkeypatch.setattr(
        "precompute.techniques.conversion.candidates",
        lambda *_: [technique(name) for name in names],
    )
    project = torch_project(make_project, ROWS, view={"accuracy": LOOSE})
    announced = list[str]()
    found = tune(
        project, "numbers", within_s=20, announce=announced.append
    )  # compiling takes about a minute
    assert ([row["name"] for row in found["measured"]], found["left_out"]) == (
        [*names[:2], names[3]],
        ["fp32-compile"],
    )
    assert "fp32-compile: left out, since it would take longer than there is time" in announced
    announced.clear()
    found = tune(project, "numbers", within_s=0, announce=announced.append)
    assert (len(found["measured"]), found["left_out"], found["picked"]) == (
        1,
        names[1:],
        "fp32-eager",
    )
    assert [line for line in announced if "round" in line] == [
        "measuring 1 candidates, round 1 of 3"
    ]
    found = tune(project, "numbers", within_s=0, only=["bf16-eager"])
    assert (len(found["measured"]), found["left_out"]) == (2, [])


def test_a_bad_row_is_no_obstacle(
    make_project: MakeProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_rates(monkeypatch, fp32_eager=100.0, bf16_eager=900.0)
    project = torch_project(make_project, [*ROWS, (500, None)], view={"accuracy": LOOSE})
    found = tune(project, "numbers", only=["bf16-eager"])
    assert (found["rows"], found["picked"]) == (121, "bf16-eager")
    assert found["measured"][1]["accuracy"] == figures(project, torch.bfloat16, drawn(project))


def test_what_cannot_be_tuned_is_said(make_project: MakeProject, capsys: Captured) -> None:
    plain = make_project(ROWS)
    folder = ["-c", str(plain.folder)]
    for command, status, said in (
        (
            ["tune", "numbers"],
            2,
            "view 'numbers': this model computes in its own way; only torch models",
        ),
        (["tune", "numbers", "--only", ""], 2, "unknown precision ''"),
        (["tune", "numbers", "--rows", "0"], 2, "--rows: 0: at least 1"),
        (["tune", "nombers"], 2, "no view 'nombers'"),
    ):
        assert main([*folder, *command]) == status
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.splitlines()[-1].startswith(f"precompute: {said}")
    assert not (plain.folder / "tuning").exists()

    empty = torch_project(
        make_project, pa.table({"id": pa.array([], pa.int64()), "x": pa.array([], pa.float64())})
    )
    with pytest.raises(
        SourceError,
        match="view 'numbers': the source yielded no rows: nothing to compare precisions on",
    ):
        tune(empty, "numbers")


def test_tune_of_a_sample_with_no_usable_row_writes_nothing(make_project: MakeProject) -> None:
    project = torch_project(
        make_project, pa.table({"id": [1, 2], "x": pa.array([None, None], pa.float64())})
    )
    with pytest.raises(
        SourceError,
        match=r"^view 'numbers': none of 2 rows could be computed in float32; the first: x is ",
    ):
        tune(project, "numbers", only=["fp32-onednn"])
    assert not (project.folder / "tuning").exists()


def test_the_table_can_be_read() -> None:
    vector = {"mean_cosine": 0.99999, "min_cosine": 0.9, "recall_at_10": 0.9912}
    found = {
        "view": "items",
        "rows": 1024,
        "machine": "x86_64, 2 CPUs, cpu",
        "picked": "bf16-eager",
        "budget": {"cosine": 0.999, "recall_at_10": 0.985},
        "file": "tuning/items.json",
        "left_out": ["bf16-compile", "fp32-compile"],
        "within_s": 300.0,
        "measured": [
            {
                "name": "fp32-eager",
                "rows_per_s": 1234.5,
                "speed": 1.0,
                "refused": None,
                "accuracy": {"vector": vector},
                "batch_ms": {"p50": 7.25, "p95": 112.0, "p99": 1230.0},
                "memory_bytes": 1234 * 2**20,
            },
            {
                "name": "bf16-eager",
                "rows_per_s": 98765.4,
                "speed": 80.005,
                "refused": None,
                "accuracy": {"vector": vector},
            },
            {"name": "fp32-compile", "rows_per_s": None, "speed": None, "refused": "no compiler"},
            {
                "name": "int8-dynamic-onednn",
                "rows_per_s": 2.0,
                "speed": 0.002,
                "refused": "vector: recall@10 0.5 is below 0.985",
                "accuracy": {
                    "vector": {"recall_at_10": 0.5},
                    "score": {"rank_correlation": 1.0, "max_abs_error": 1e-7},
                },
            },
        ],
    }
    assert describe_tuning(found).splitlines() == [
        "items: 1,024 rows of its source, x86_64, 2 CPUs, cpu",
        "  precision              rows/s   speed   p50 ms     p95     p99    MiB  accuracy against float32                                verdict",
        "  fp32-eager              1,234   1.00×     7.25     112   1,230  1,234  cosine 0.99999 · min 0.9 · recall@10 0.9912             passes",
        "  bf16-eager             98,765  80.00×        –       –       –      –  cosine 0.99999 · min 0.9 · recall@10 0.9912             picked",
        "  fp32-compile                –       –        –       –       –      –  –                                                       refused: "
        "no compiler",
        "  int8-dynamic-onednn         2   0.00×        –       –       –      –  vector: recall@10 0.5; score: rank 1 · max error 1e-07  refused: "
        "vector: recall@10 0.5 is below 0.985",
        "left out, since 300 s are short for them: bf16-compile, fp32-compile",
        "bf16-eager is the fastest within the view's accuracy (cosine 0.999, recall@10 0.985); written to tuning/items.json, "
        "which `precision: auto` reads.",
    ]


def test_what_tune_measured_no_run_measures_again(
    make_project: MakeProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_rates(monkeypatch, fp32_eager=100.0, bf16_eager=900.0)
    project = torch_project(make_project, ROWS, view={"accuracy": LOOSE})
    tune(project, "numbers", only=["bf16-eager"])
    measured: list[str] = []
    measure = AccuracyCheck._measure
    monkeypatch.setattr(
        AccuracyCheck,
        "_measure",
        lambda *given: measured.append("again") or measure(*given),  # type: ignore[func-returns-value]
    )
    project = again(project)
    report = project.run()
    assert (report.gates[0].gate, report.gates[0].passed, measured) == ("accuracy", True, [])
    # as it would be without
    (file,) = (project.store.compiled).glob("accuracy-*")
    before, message = file.read_bytes(), report.gates[0].message
    file.write_bytes(before.replace(b'"rows": 120', b'"rows": 121', 1))
    report = project.run(full=True)
    assert (report.gates[0].message, measured, file.read_bytes()) == (message, ["again"], before)
    # other rows, or other features of them, are measured
    other = torch_project(
        make_project, [*ROWS, (500, 9.5)], view={"precision": "bf16", "accuracy": LOOSE}
    )
    assert other.cli("run", "numbers", "--full") == 0
    assert len(measured) == 2


def test_what_tune_measured_on_few_rows_is_enough_for_a_run(
    make_project: MakeProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[int] = []
    computed = AccuracyCheck._compute

    def computing(check: AccuracyCheck, model: TorchModel, rows: pa.RecordBatch) -> Any:
        measured.append(rows.num_rows)
        return computed(check, model, rows)

    monkeypatch.setattr(AccuracyCheck, "_compute", computing)
    with_rates(monkeypatch, fp32_eager=100.0, bf16_eager=900.0)
    table = pa.table({"id": range(200), "x": [1 + i / 100 for i in range(200)]})
    model = torch_model()
    model["args"]["outputs"] = {"vector": "vector"}
    features = {"vector": {"dtype": "float32", "dim": 4}}
    view = {"model": model, "features": features, "accuracy": LOOSE}
    project = torch_project(make_project, table, view=view)
    tune(project, "numbers", rows=128, only=["bf16-eager"])
    assert "on 128 rows" in again(project).run(full=True).gates[0].message
    assert measured == []


def test_what_is_no_float32_is_compared_with_nothing(
    make_project: MakeProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    linear = torch.nn.functional.linear
    monkeypatch.setattr(
        torch.nn.functional,
        "linear",
        lambda x, weight, bias=None: linear(x.bfloat16().float(), weight.bfloat16().float(), bias),
    )
    project = torch_project(make_project, ROWS, view={"precision": "bf16", "accuracy": LOOSE})
    with pytest.raises(ConfigError, match=r"products in float32 are off by 0\.00\d on cpu"):
        tune(project, "numbers", only=["bf16-eager"])
    assert project.numbers() == []
