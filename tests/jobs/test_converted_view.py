"""The tuning file, and the accuracy gate: another precision is taken only where its values are near
enough, and never silently."""

from __future__ import annotations

import json
import shutil
import threading
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest
import torch
from safetensors.torch import save_file

from precompute.engine.rows import Outcome, RejectedRow
from precompute.jobs.config.project import tuning_path, write_tuning
from precompute.jobs.run import materialize as materialize_module
from precompute.jobs.run.judge import accuracy
from precompute.jobs.run.judge import accuracy as accuracy_module
from precompute.jobs.run.judge.accuracy import AccuracyCheck, limits_of
from precompute.jobs.run.rows.chunks import Chunks
from precompute.jobs.run.rows.open_view import open_view
from precompute.jobs.serve.fallback import ViewFallback
from precompute.models.device import PackedLinear
from precompute.models.torch_model import TorchModel
from precompute.store.errors import ConfigError, GateError, ModelError, RejectedError
from precompute.store.offline.snapshot import Verdict
from precompute.store.offline.view_store import OfflineStore
from precompute.store.times import containing
from precompute.techniques import onednn
from precompute.techniques.accuracy import compare
from precompute.techniques.conversion import PROOF_ROWS, proof_rows
from precompute.techniques.machine import has_bf16
from tests.fixtures import MakeProject
from tests.scene import Scene, values_of

HERE = "tests.jobs.test_converted_view"
ROWS = [(i, 1 + i / 100) for i in range(120)]
LOOSE = {"cosine": 0.9, "recall_at_10": 0.1}
"""What these rows come to in bfloat16: some neighbours change places."""
Captured = pytest.CaptureFixture[str]


class TorchDoubler(torch.nn.Module):
    """``x`` [rows, 1] → ``vector`` = [x, x + 1, x + 2, x + 3] and ``double`` = 2x [rows, 1], as
    :class:`tests.models.Doubler`."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(1, 4)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        vector = self.linear(x)
        return {"vector": vector, "double": 2 * vector[:, :1]}


class HalfLost(TorchDoubler):
    """The same; in bfloat16, every row is not a number."""

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        found = super().forward(x)
        return {
            name: t * float("nan") if t.dtype == torch.bfloat16 else t for name, t in found.items()
        }


def torch_model(
    module: str = "TorchDoubler", *, concurrent: Any = False, **changes: Any
) -> dict[str, Any]:
    """A view's ``model``; its weights are written by :func:`torch_project`."""
    args = {
        "module": f"{HERE}:{module}",
        "weights": "${data}/doubler.safetensors",
        "inputs": {"x": ["x"]},
        "outputs": {"vector": "vector", "double": "double"},
        "device": "cpu",
        "concurrent": concurrent,
    }
    return {"use": "torch_module", "args": args, **changes}


def torch_project(
    make_project: MakeProject,
    rows: list[tuple[Any, Any]] | pa.Table | None = None,
    *,
    module: str = "TorchDoubler",
    view: dict[str, Any] | None = None,
    **options: Any,
) -> Scene:
    """:func:`tests.fixtures.make_project` with :class:`TorchDoubler` in the place of the arithmetic
    model; ``view`` may hold ``precision``, ``backend`` and ``concurrent``."""
    view = dict(view or {})
    chosen = {key: view.pop(key) for key in ("precision", "backend", "concurrent") if key in view}
    view.setdefault("model", torch_model(module, **chosen))
    view.setdefault("gates", {"first": None})  # its vectors have nearly one direction
    project = make_project(rows, view=view, **options)
    state = {"linear.weight": torch.ones(4, 1), "linear.bias": torch.arange(4.0)}
    save_file(state, project.folder / "doubler.safetensors")
    return project


def expected(x: Any, dtype: torch.dtype = torch.float32) -> dict[str, npt.NDArray[Any]]:
    """What the module makes of ``x`` [rows], rounded where bfloat16 rounds."""
    taken = torch.tensor(np.asarray(x, np.float32)).to(dtype)
    vector = (taken[:, None].float() + torch.arange(4.0)).to(dtype)
    return {
        "double": (2 * vector[:, 0]).float().numpy().astype(np.float64),
        "vector": vector.float().numpy(),
    }


def expected_batch(x: Any, dtype: torch.dtype, project: Scene) -> pa.RecordBatch:
    made = expected(x, dtype)
    vector = pa.FixedSizeListArray.from_arrays(pa.array(made["vector"].reshape(-1)), 4)
    return pa.RecordBatch.from_arrays(
        [pa.array(made["double"]), vector],
        schema=project.view("numbers").feature_view().feature_schema(),
    )


def stored(
    project: Scene, number: int, view: str = "numbers"
) -> dict[int, tuple[float, list[float]]]:
    """Every row of a snapshot: id → (double, vector)."""
    store = project.offline
    rows = [
        row
        for batch in store.view(view).batches(store.view(view).snapshot(number))
        for row in batch.to_pylist()
    ]
    assert len({row["id"] for row in rows}) == len(rows)
    return {row["id"]: (row["double"], row["vector"]) for row in rows}


def wanted(
    rows: list[tuple[int, float]], dtype: torch.dtype = torch.float32
) -> dict[int, tuple[float, list[float]]]:
    """As :func:`stored`, what must be there."""
    made = expected([x for _, x in rows], dtype)
    return {
        i: (made["double"][n].item(), made["vector"][n].tolist()) for n, (i, _) in enumerate(rows)
    }


def figures(project: Scene, dtype: torch.dtype, x: list[float]) -> dict[str, Any]:
    """The accuracy figures of a dtype against float32 over ``x``."""
    batches = [expected_batch(x, d, project) for d in (torch.float32, dtype)]
    config = project.view("numbers")
    found = compare(
        batches[0], batches[1], config.feature_view(), limits_of(config.accuracy)
    ).to_json()["features"]
    assert isinstance(found, dict)
    return found


def drawn(project: Scene, rows: int = 1000) -> list[float]:
    """``x`` of a sample of the source, in its order: which of equally near neighbours counts
    depends on it."""
    with open_view(project.view("numbers").feature_view(), project.offline, project.home) as opened:
        return [x for x in opened.source.sample(rows).column("x").to_pylist() if x is not None]


def files(folder: Path) -> dict[str, bytes]:
    return {
        str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()
    }


def again(project: Scene, **environment: str) -> Scene:
    return Scene(project.folder, environment)


# ---- tuning file


def tuned(project: Scene, precision: str = "bf16", backend: str = "eager") -> Path:
    return write_tuning(
        project.folder,
        "numbers",
        project.model_as_written("numbers"),
        {"precision": precision, "backend": backend},
    )


def chosen(project: Scene) -> tuple[str, str]:
    model = project.view("numbers").model
    return model.precision, model.backend


def test_a_tuning_file_is_what_auto_stands_for(make_project: MakeProject) -> None:
    project = torch_project(make_project, ROWS)
    assert chosen(project) == ("auto", "auto")
    path = tuned(project)
    assert (
        path == tuning_path(project.folder, "numbers") == project.folder / "tuning" / "numbers.json"
    )
    assert json.loads(path.read_text()) == {
        "version": 1,
        "view": "numbers",
        "model": {"use": "torch_module", "args": torch_model()["args"]},
        "precision": "bf16",
        "backend": "eager",
    }
    assert chosen(again(project)) == ("bf16", "eager")
    assert again(project).view("numbers").feature_view().definition.model.precision == "bf16"
    other = torch_project(make_project, module="HalfLost")
    assert chosen(other) == ("auto", "auto"), "it is of other arguments"
    project = torch_project(make_project)
    assert chosen(project) == ("bf16", "eager")
    path.unlink()
    assert chosen(again(project)) == ("auto", "auto")
    tuned(project, "bf17")
    with pytest.raises(ConfigError, match=r"numbers\.json: picked .* nothing this version knows"):
        again(project).view("numbers")


@pytest.mark.parametrize(
    ("written", "is_"),
    [
        ({"precision": "fp32"}, ("fp32", "auto")),
        ({"backend": "onednn"}, ("auto", "onednn")),
        ({"precision": "fp32", "backend": "onednn"}, ("fp32", "onednn")),
    ],
)
def test_an_explicit_precision_or_back_end_stands(
    make_project: MakeProject, written: dict[str, Any], is_: tuple[str, str]
) -> None:
    tuned(torch_project(make_project, ROWS))
    assert chosen(torch_project(make_project, view=written)) == is_


def test_variables_are_not_filled_in_so_the_file_holds_on_every_machine(
    make_project: MakeProject, tmp_path: Path
) -> None:
    project = torch_project(make_project, ROWS)
    tuned(project)
    assert str(project.folder) not in tuning_path(project.folder, "numbers").read_text()
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(project.folder, elsewhere)
    moved = Scene(elsewhere, {"PRECOMPUTE_VARS__DATA": str(elsewhere)})
    assert moved.view("numbers").model.args["weights"] == f"{elsewhere}/doubler.safetensors"
    assert chosen(moved) == ("bf16", "eager")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "cannot be read"),
        ("", "cannot be read"),
        ("[]", "is no tuning file of this version"),
        ('{"version": 1, "model": {}}', "is no tuning file of this version"),
        (
            '{"version": 2, "model": {}, "precision": "fp32", "backend": "eager"}',
            "is no tuning file of this version",
        ),
        (b"\xff\xfe", "cannot be read"),
    ],
)
def test_a_damaged_tuning_file_is_named_and_what_helps_does_help(
    make_project: MakeProject, text: str | bytes, said: str, capsys: Captured
) -> None:
    project = torch_project(make_project, ROWS)
    path = tuned(project)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError) as caught:
        again(project).view("numbers")
    assert str(caught.value).startswith(f"{path}: ")
    assert said in str(caught.value)
    assert project.cli("profile", "numbers") == 2
    assert f"{path}: " in capsys.readouterr().err
    assert "remove it" in str(caught.value)
    path.unlink()
    assert chosen(again(project)) == ("auto", "auto")


def test_float32_as_picked_leaves_the_view_as_it_is(make_project: MakeProject) -> None:
    project = torch_project(make_project, ROWS)
    project.run()
    before = project.view("numbers").feature_view()
    tuned(project, "fp32", "eager")
    assert again(project).view("numbers").feature_view() == before
    plan = again(project).plan()
    assert (plan.same_view, plan.nothing_to_do) == (True, True)


# ---- the gate before a run


def test_a_precision_that_is_not_accurate_enough_computes_nothing(
    make_project: MakeProject, capsys: Captured
) -> None:
    project = torch_project(make_project, ROWS)
    assert project.cli("run", "numbers") == 0
    store = project.offline
    before, live = files(project.root), store.view("numbers").log.live()
    capsys.readouterr()

    project = torch_project(make_project, view={"precision": "bf16"})
    assert project.cli("run", "numbers") == 3
    said = capsys.readouterr().err.splitlines()[-1]
    report = project.report()
    found = figures(project, torch.bfloat16, drawn(project))
    recall = found["vector"]["recall_at_10"]
    (verdict,) = report.gates
    message = verdict.message
    assert verdict == Verdict("accuracy", False, recall, 0.985, message)
    assert message.startswith("bf16-eager against float32 on 120 rows: double: rank 0.99")
    assert message.endswith(f": vector: recall@10 {recall:.5g} is below 0.985")
    assert said == f"precompute: {report.error}"
    assert report.error == (
        f"view 'numbers': {message}. Nothing was computed; choose another precision (`precompute tune numbers` measures them all), change "
        "the view's `accuracy`, or accept it: precompute run numbers --accept accuracy"
    )
    assert (report.status, report.snapshot, report.counts, report.engine) == (
        "refused",
        None,
        {},
        {},
    )
    after = files(project.root)
    aside = ("/runs/", "lease", "/compiled/accuracy-")  # what was measured is stored
    assert {
        path: body for path, body in after.items() if not any(part in path for part in aside)
    } == {path: body for path, body in before.items() if not any(part in path for part in aside)}
    assert (store.view("numbers").numbers(), store.view("numbers").log.live()) == ([1], live)
    assert project.cli("lookup", "numbers", "7") == 0
    assert "double: 2.14" in capsys.readouterr().out


def test_a_precision_within_budget_is_committed_and_not_measured_again(
    make_project: MakeProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    view = {
        "precision": "bf16",
        "accuracy": LOOSE,
        "fallback": {"enabled": True},
    }  # the gate parity computes rows again, too
    project = torch_project(make_project, ROWS, view=view)
    assert project.cli("run", "numbers") == 0
    store = project.offline
    first = store.view("numbers").snapshot(1)
    verdict = first.gates[0]
    assert verdict.message.startswith("bf16-eager against float32 on 120 rows: double: rank 0.99")
    found = figures(project, torch.bfloat16, drawn(project))
    rank = found["double"]["rank_correlation"]  # of all figures the nearest to its limit
    assert 0.1 > rank - 0.9 < found["vector"]["mean_cosine"] - 0.9
    assert verdict == Verdict("accuracy", True, rank, 0.9, verdict.message)
    assert [g.gate for g in first.gates].count("accuracy") == 1
    assert "parity" in [g.gate for g in first.gates]
    assert project.report().gates == list(first.gates)
    assert "accuracy" in project.report().stages_s
    assert stored(project, 1) == wanted(ROWS, torch.bfloat16)

    def never(*_: Any) -> None:
        raise AssertionError("measured again")

    monkeypatch.setattr(materialize_module, "AccuracyCheck", never)
    changed = [*ROWS[:-1], (ROWS[-1][0], 1.003)]
    project = torch_project(make_project, changed, view=view)
    assert project.cli("run", "numbers") == 0
    second = store.view("numbers").snapshot(2)
    assert (second.kind, second.counts.written, second.model) == ("delta", 1, first.model)
    assert "accuracy" not in [g.gate for g in second.gates]
    assert stored(project, 2) == wanted(changed, torch.bfloat16)
    assert project.cli("run", "numbers") == 0  # nothing to do
    assert project.report().status == "current"


def test_beside_a_run_nothing_is_written_before_it_is_known(
    make_project: MakeProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    gathered, written = threading.Event(), list[list[str]]()
    project = torch_project(make_project, ROWS, view={"precision": "bf16", "concurrent": True})
    gather, compared = Chunks._gather, accuracy.compare_outcomes

    def gathering(*given: Any) -> None:
        gather(*given)
        gathered.set()

    def comparing(*given: Any) -> Any:
        assert gathered.wait(30), "the run waited for it"
        written.append([path for path in files(project.root) if path.endswith(".parquet")])
        return compared(*given)

    monkeypatch.setattr(Chunks, "_gather", gathering)
    monkeypatch.setattr(accuracy_module, "compare_outcomes", comparing)
    assert project.cli("run", "numbers") == 3
    assert "is below 0.985. Nothing was written; choose another precision" in str(
        project.report().error
    )
    left = [path for path in files(project.root) if path.startswith("numbers/")]
    assert [
        path
        for path in left
        if not path.startswith(("numbers/runs/", "numbers/notes/", "numbers/compiled/accuracy-"))
    ] == []
    assert project.numbers() == []
    assert project.cli("run", "numbers") == 3
    assert "Nothing was computed; choose another precision" in str(
        project.report().error
    )  # it was stored
    assert written == [[]]
    loose = torch_project(
        make_project,
        [*ROWS, (500, 9.5)],
        view={"precision": "bf16", "concurrent": True, "accuracy": LOOSE},
    )
    gathered.clear()
    report = loose.run()
    assert report.snapshot is not None
    assert (written, report.gates[0].passed) == ([[], []], True)
    assert stored(loose, report.snapshot) == wanted([*ROWS, (500, 9.5)], torch.bfloat16)


def test_a_check_that_fails_or_that_nobody_waits_for_ends(
    make_project: MakeProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> Any:
        raise ModelError("the reference fell over")

    project = torch_project(
        make_project, ROWS, view={"precision": "bf16", "concurrent": True, "accuracy": LOOSE}
    )
    with monkeypatch.context() as patched:
        patched.setattr(accuracy_module, "compare_outcomes", broken)
        with pytest.raises(ModelError, match="the reference fell over"):
            project.run()
    assert project.numbers() == []
    bad = torch_project(
        make_project,
        [*ROWS, (500, None)],
        view={"precision": "bf16", "concurrent": True, "accuracy": LOOSE, "bad_rows": "fail"},
    )
    with pytest.raises(RejectedError):
        bad.run()
    assert "accuracy" not in [thread.name for thread in threading.enumerate()]


@pytest.mark.skipif(not has_bf16(), reason="oneDNN packs bfloat16 where the CPU multiplies it")
def test_a_fault_of_both_packed_precisions_is_seen(
    make_project: MakeProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Float32 is computed by packed layers where that is quicker, and only while the module itself
    computes the same."""
    techniques: list[str] = []
    measured = AccuracyCheck._compute

    def computing(check: AccuracyCheck, model: TorchModel, rows: pa.RecordBatch) -> Any:
        techniques.append(
            f"{'module' if model.forward is model.module else 'packed'} {rows.num_rows}"
        )
        return measured(check, model, rows)

    monkeypatch.setattr(AccuracyCheck, "_compute", computing)
    project = torch_project(
        make_project, ROWS, view={"precision": "bf16", "backend": "onednn", "accuracy": LOOSE}
    )
    right = project.run().gates[0]
    assert right.passed
    assert techniques == ["packed 128", "packed 128", f"module {PROOF_ROWS}"]

    probe, forward = onednn.probe, PackedLinear.forward
    monkeypatch.setattr(onednn, "probe", lambda: None)
    for wrong in (lambda *given: -forward(*given), lambda *given: float("nan") * forward(*given)):
        techniques.clear()
        shutil.rmtree(project.store.compiled)
        with monkeypatch.context() as patched:
            patched.setattr(PackedLinear, "forward", wrong)
            with pytest.raises(GateError, match=r"mean cosine -1|rows computed by both"):
                project.run(full=True)
        assert techniques[-1] == "module 128"
    # a kind of layer that cannot be packed at all
    techniques.clear()
    monkeypatch.setattr(onednn, "probe", probe)
    monkeypatch.setattr(PackedLinear, "__init__", None)
    eager = torch_project(
        make_project, ROWS, view={"precision": "bf16", "backend": "eager", "accuracy": LOOSE}
    )
    assert eager.run(full=True).gates[0].passed
    assert techniques == ["packed 128", "module 128"]


def test_rows_that_were_rejected_are_among_those_that_prove() -> None:
    """A fault of the quick way alone may be that it rejects them."""
    features = pa.record_batch({"double": np.arange(100.0)})
    quick = Outcome(np.arange(100), features, [RejectedRow(120, "model", "no number")])
    assert proof_rows(quick).tolist() == [*range(PROOF_ROWS), 120]


def test_few_rows_do_where_they_leave_no_doubt(
    make_project: MakeProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what tune measured on as few spares a run its own."""
    measured: list[int] = []
    computed = AccuracyCheck._compute

    def computing(check: AccuracyCheck, model: TorchModel, rows: pa.RecordBatch) -> Any:
        measured.append(rows.num_rows)
        return computed(check, model, rows)

    monkeypatch.setattr(AccuracyCheck, "_compute", computing)
    table = pa.table({"id": range(200), "x": [1 + i / 100 for i in range(200)]})

    def project(budget: dict[str, float] | None = None, **chosen: str) -> Scene:
        model = torch_model(**chosen)
        model["args"]["outputs"] = {"vector": "vector"}
        view = {
            "model": model,
            "features": {"vector": {"dtype": "float32", "dim": 4}},
            "accuracy": budget or {},
        }
        return torch_project(make_project, table, view=view)

    assert (
        project(precision="fp32", backend="onednn")
        .run()
        .gates[0]
        .message.startswith("fp32-onednn against float32 on 128 rows: ")
    )
    assert measured == [136, 136]  # and four at each end
    measured.clear()
    with pytest.raises(
        GateError, match=r"bf16-eager against float32 on 200 rows: .* recall@10 .* is below 0\.985"
    ):
        project(precision="bf16").run()
    assert measured == [136, 136, 16, 72, 72, 16]
    # figures are stored, and the verdict is not
    measured.clear()
    for budget, rows in (({"recall_at_10": 0.1}, 200), ({"recall_at_10": 0.99}, 0)):
        if rows:
            assert (
                f"on {rows} rows"
                in project(budget, precision="bf16").run(full=True).gates[0].message
            )
        else:
            with pytest.raises(GateError, match="on 200 rows"):
                project(budget, precision="bf16").run(full=True)
    assert measured == []


def test_what_is_no_float32_is_compared_with_nothing(
    make_project: MakeProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    linear = torch.nn.functional.linear

    def rounded(
        x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        return linear(x.bfloat16().to(x.dtype), weight.bfloat16().to(x.dtype), bias)

    monkeypatch.setattr(torch.nn.functional, "linear", rounded)
    project = torch_project(make_project, ROWS, view={"precision": "bf16", "accuracy": LOOSE})
    with pytest.raises(
        ConfigError,
        match=r"products in float32 are off by 0\.00\d on cpu: something lets torch compute them by fewer bits",
    ):
        project.run()
    assert project.numbers() == []


def test_an_inaccurate_precision_is_computed_where_accepted(make_project: MakeProject) -> None:
    view = {"precision": "bf16"}
    project = torch_project(make_project, ROWS, view=view)
    assert project.cli("run", "numbers") == 3
    assert project.cli("run", "numbers", "--accept", "shape") == 3
    store = project.offline
    assert store.view("numbers").numbers() == []
    assert project.cli("run", "numbers", "--accept", "accuracy") == 0
    snapshot = store.view("numbers").snapshot(1)
    assert (snapshot.gates[0].gate, snapshot.gates[0].passed) == ("accuracy", False)
    assert (project.refused_by(), live_number(store)) == ([], 1)
    assert project.store.log.accepted(1) == {"accuracy"}
    assert stored(project, 1) == wanted(ROWS, torch.bfloat16)
    changed = [*ROWS[:-1], (ROWS[-1][0], 1.003)]  # a delta is of the precision that was accepted
    assert torch_project(make_project, changed, view=view).cli("run", "numbers") == 0
    assert (stored(project, 2), live_number(store)) == (wanted(changed, torch.bfloat16), 2)
    assert project.cli("run", "numbers", "--full") == 3
    assert live_number(store) == 2


def live_number(store: OfflineStore) -> int | None:
    ref = store.view("numbers").log.live()
    return None if ref is None else ref.snapshot


def test_a_conversion_without_a_usable_row_is_refused(make_project: MakeProject) -> None:
    rows = [*((i, None) for i in range(600)), *((i, 1.0 + i / 1000) for i in range(600, 1300))]
    project = torch_project(
        make_project, rows, view={"precision": "bf16", "accuracy": LOOSE, "max_rejected": 0.6}
    )
    assert project.cli("run", "numbers") == 2
    file, _, error = str(project.report().error).partition(":")
    assert file.endswith("project/views/numbers.yaml")
    assert error.partition(": ")[2] == (
        "model.precision: bf16-eager: none of the source's first 256 rows is usable, to show the conversion: let its SQL leave out or order last "
        "what is bad, or compute in float32"
    )


# ---- fingerprints and plans


def fingerprint(project: Scene) -> str:
    with open_view(project.view("numbers").feature_view(), project.offline, project.home) as opened:
        return opened.fingerprint


def test_a_fingerprint_tells_precisions_and_back_ends_apart(make_project: MakeProject) -> None:
    written: list[dict[str, Any]] = [
        {},
        {"precision": "fp32"},
        {"backend": "eager"},
        {"precision": "fp32", "backend": "eager"},
        {"precision": "bf16"},
        {"precision": "bf16", "backend": "eager"},
        {"precision": "fp32", "backend": "onednn"},
        {"backend": "onednn"},
        {"precision": "fp16"},
    ]
    found = [fingerprint(torch_project(make_project, ROWS, view=view)) for view in written]
    assert [found.index(f) for f in found] == [0, 0, 0, 0, 4, 4, 6, 6, 8]
    tuned(torch_project(make_project, ROWS))
    assert fingerprint(torch_project(make_project, ROWS)) == found[4]


@pytest.mark.parametrize(
    "after",
    [{"precision": "bf16"}, {"backend": "onednn"}],
)
def test_another_precision_or_back_end_recomputes_every_row_and_says_so(
    make_project: MakeProject, after: dict[str, Any], capsys: Captured
) -> None:
    project = torch_project(make_project, ROWS)
    assert project.cli("run", "numbers") == 0
    other = torch_project(make_project, view=after | {"accuracy": LOOSE})
    plan = other.plan()
    assert (plan.parent, plan.diff.compute) == (None, 120)
    assert plan.reason.startswith("every row, since the model's precision changed, fingerprint ")
    assert other.cli("run", "numbers") == 0
    dtype = torch.bfloat16 if after.get("precision") == "bf16" else torch.float32
    assert stored(other, 2) == wanted(ROWS, dtype)
    assert stored(other, 1) == wanted(ROWS)


def test_other_weights_are_not_called_another_precision(make_project: MakeProject) -> None:
    project = torch_project(make_project, ROWS)
    assert project.cli("run", "numbers") == 0
    other = torch_project(make_project, view={"precision": "fp32"})
    save_file(
        {"linear.weight": torch.ones(4, 1), "linear.bias": torch.zeros(4)},
        other.folder / "doubler.safetensors",
    )
    assert other.plan().reason.startswith(
        "every row, since the model (or its tokenizer or tables) changed"
    )


# ---- the fallback


def computed(project: Scene, fallback: ViewFallback, view: str, key: str) -> dict[str, Any]:
    """What the fallback answers for a key."""
    with project.online_store() as online:
        pointer = online.live(view)
        assert pointer is not None
        (answer,) = fallback.submit(pointer, [key], {}, time.monotonic() + 30)
        return values_of(pointer, answer.result(30))


def test_the_fallback_computes_in_the_precision_of_each_snapshot(make_project: MakeProject) -> None:
    on = {"accuracy": LOOSE, "gates": {"first": None}, "fallback": {"enabled": True}}
    plain = torch_project(make_project, ROWS, view=on)
    shared = {
        "entity": ["id"],
        "source": {"sql": "SELECT * FROM read_parquet('${data}/data.parquet')"},
        "features": {"double": {"dtype": "float64"}, "vector": {"dtype": "float32", "dim": 4}},
        "ttl": "1h",
    }
    views = {
        name: shared | on | {"model": torch_model(**model)}
        for name, model in (
            ("half", {"precision": "bf16"}),
            ("packed", {"backend": "onednn"}),
            ("half_too", {"precision": "bf16"}),
        )
    }
    project = torch_project(make_project, view=on, views=views)
    for name in project.views:
        project.run(name)
    tuned(plain)  # what is configured later is no matter: the live snapshot's definition is
    key, x = ROWS[33]
    exact = {"double": expected([x])["double"][0], "vector": expected([x])["vector"][0].tolist()}
    half = {
        "double": expected([x], torch.bfloat16)["double"][0],
        "vector": expected([x], torch.bfloat16)["vector"][0].tolist(),
    }
    assert exact != half
    fallback = ViewFallback(project.offline, project.home, memory_mb=64)
    try:
        for _ in range(2):
            for name, values in (
                ("numbers", exact),
                ("half", half),
                ("packed", exact),
                ("half_too", half),
                ("numbers", exact),
            ):
                assert (name, computed(project, fallback, name, str(key))) == (name, values)
    finally:
        fallback.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_an_empty_partition_needs_no_conversion(make_project: MakeProject, workers: int) -> None:
    sql = "SELECT * FROM read_parquet('${data}/data.parquet') WHERE $start < $end AND x < 0"
    view = {
        "source": {"sql": sql},
        "partition": {"by": "day", "start": "2026-01-01"},
        "precision": "bf16",
        "backend": "eager",
    }
    project = torch_project(make_project, ROWS, view=view, project={"engine": {"workers": workers}})
    day = containing("day", datetime(2026, 1, 1, tzinfo=UTC))
    assert project.run(partition=day).status == "committed"
