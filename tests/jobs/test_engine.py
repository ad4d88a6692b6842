"""Engine: in the run's own process or in workers, and what is committed is the same, byte for
byte."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import save_file

from precompute.engine.ahead import Meter
from precompute.engine.runner import Runner
from precompute.jobs.config.project import EngineConfig
from precompute.jobs.run.judge.gate_table import TABLE
from precompute.jobs.run.report import engine_line
from precompute.jobs.run.rows import chunks
from precompute.jobs.run.rows.chunks import engine_of
from precompute.jobs.run.rows.open_view import open_view
from precompute.model import digest
from precompute.store.answers.lookup import Lookup
from precompute.store.errors import ConfigError
from precompute.store.offline.runs import Report
from precompute.workers.worker_pool import WorkerPool
from tests.fixtures import MakeProject
from tests.models import Doubler
from tests.precompute.dying_models import Launching
from tests.scene import Scene

HERE = "tests.jobs.test_engine"
TWO = {"workers": 2}
RNG = np.random.default_rng(7)
LINEAR = {
    "weight": RNG.normal(size=(8, 3)).astype(np.float32),
    "bias": RNG.normal(size=8).astype(np.float32),
}


class OnGpu(Launching):
    """A staged model that says it is on a GPU."""

    @property
    def device(self) -> Any:
        found = super().device
        found.name = "cuda:0"
        return found


class Weighed(Doubler):
    """Its weights are a file."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path

    def fingerprint(self) -> str:
        return digest(self.path)


TORCH: dict[str, Any] = {
    "model": {
        "use": "torch_module",
        "args": {
            "module": "torch.nn:Linear",
            "args": {"in_features": 3, "out_features": 8},
            "weights": "${data}/linear.safetensors",
            "inputs": {"input": ["x", "y", "z"]},
            "outputs": {"vector": 0},
            "device": "cpu",
            "max_cost": 16,
        },
    },
    "features": {"vector": {"dtype": "float32", "dim": 8}},
}
BF16 = TORCH | {
    "model": TORCH["model"] | {"precision": "bf16"},
    "accuracy": {"cosine": 0.9, "recall_at_10": 0.0},
}
TOP_K = {
    "source": {
        "sql": "SELECT id, [x, y, z]::FLOAT[3] AS vector, [id % 5] AS seen FROM read_parquet('${data}/data.parquet')"
    },
    "model": {
        "use": "top_k",
        "args": {
            "k": 3,
            "exclude": "seen",
            "items": {
                "sql": "SELECT id AS item, [z, x, y]::FLOAT[3] AS vector FROM read_parquet('${data}/data.parquet') WHERE id < 9"
            },
            "device": "cpu",
        },
    },
    "features": {
        "items": {"dtype": "int64", "max_items": 3},
        "scores": {"dtype": "float32", "max_items": 3},
    },
}
DYING = {
    "model": {"use": "tests.precompute.dying_models:Dying", "args": {"how": "leave", "on": 5.0}}
}


@pytest.fixture(autouse=True)
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that every worker gets some."""
    monkeypatch.setattr(chunks, "WINDOW_ROWS", 40)


def numbers(rows: int = 200) -> pa.Table:
    values = np.random.default_rng(3).normal(size=(3, rows)).round(3)
    return pa.table({"id": range(rows), "x": values[0], "y": values[1], "z": values[2]})


def run(
    make_project: MakeProject, table: Any, engine: dict[str, Any] | None, **options: Any
) -> tuple[Scene, Report]:
    """A run that computes every row; publishing is the store's part."""
    command, view = options.pop("command", "materialize"), options.pop("view", {})
    project = make_project(
        table, view=view, project={} if engine is None else {"engine": engine}, **options
    )
    save_file(LINEAR, project.folder / "linear.safetensors")
    return project, project.run(command=command, full=True)


def committed(project: Scene, number: int) -> pa.Table:
    """Every row of a snapshot, in the order it was written, without the time of its computing."""
    store = project.store
    snapshot = store.snapshot(number)
    return pa.concat_tables(
        pq.read_table(path) for path in store.part_paths(snapshot)
    ).drop_columns(["computed_at"])


def content(table: pa.Table) -> bytes:
    """Equal for tables of the same bits only: 0.0 is not -0.0."""
    sink = pa.BufferOutputStream()
    table = table.replace_schema_metadata(None).combine_chunks()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(
            pa.Table.from_batches(
                [pa.RecordBatch.from_struct_array(table.to_struct_array().combine_chunks())]
            )
        )
    return bytes(sink.getvalue())


# ---- which engine


@pytest.mark.parametrize(
    ("workers", "gpus", "devices"),
    [
        (0, 0, None),
        (0, 2, "2 workers: cuda:0, cuda:1"),
        (1, 2, "1 workers: cuda:0"),
        (3, 2, "3 workers: cuda:0, cuda:1"),
        (3, 0, "3 workers: as they are"),
    ],
)
def test_workers_share_the_gpus_that_are_there(
    make_project: MakeProject,
    monkeypatch: pytest.MonkeyPatch,
    workers: int,
    gpus: int,
    devices: str | None,
) -> None:
    monkeypatch.setattr(
        "precompute.models.device.gpu_count", lambda: gpus
    )  # this machine may have none
    project = make_project(numbers(), view={"model": {"use": f"{HERE}:OnGpu"}})
    meter = Meter()
    with open_view(
        project.view("numbers").feature_view(), project.offline, project.home, gpu_reserved=True
    ) as opened:
        engine = engine_of(opened, EngineConfig(workers=workers), meter)
        assert isinstance(engine, Runner if devices is None else WorkerPool)
        assert devices is None or engine.figures(1.0)["device"] == devices
    project = make_project(
        view={"model": {"use": "tests.models:Doubler"}}
    )  # is on no GPU, however many there are
    with open_view(project.view("numbers").feature_view(), project.offline, project.home) as opened:
        engine = engine_of(opened, EngineConfig(workers=workers), meter)
        assert isinstance(engine, WorkerPool if workers else Runner)
        assert not workers or engine.figures(1.0)["device"] == f"{workers} workers: as they are"


def test_a_worker_that_loads_another_model_computes_nothing(
    make_project: MakeProject, tmp_path: Path
) -> None:
    """As one does that takes the place of a killed one, hours later."""
    weights = tmp_path / "weights"
    weights.write_text("2")
    project = make_project(
        numbers(), view={"model": {"use": f"{HERE}:Weighed", "args": {"path": str(weights)}}}
    )
    with open_view(project.view("numbers").feature_view(), project.offline, project.home) as opened:
        engine = engine_of(opened, EngineConfig(workers=1), Meter())
        window = opened.source.head(3).combine_chunks().to_batches()
        assert [done.done for _, done in engine.stream(window)] == [3]
        weights.write_text("3")
        with pytest.raises(ConfigError, match="changed during the run, so run again"):
            list(engine.stream(window))


# ---- the same rows


@pytest.mark.parametrize("view", [TORCH, TOP_K], ids=["torch", "top_k"])
def test_workers_commit_the_same_rows_byte_for_byte(
    make_project: MakeProject, view: dict[str, Any]
) -> None:
    project, alone = run(make_project, numbers(), None, view=view)
    _, theirs = run(make_project, None, TWO, view=view)
    assert (alone.status, theirs.status, theirs.snapshot) == ("committed", "committed", 2)
    assert ("workers" in alone.engine, theirs.engine["workers"]) == (False, 2)
    assert (alone.model, alone.counts) == (theirs.model, theirs.counts)
    ours, found = committed(project, 1), committed(project, 2)
    assert ours.column("id").to_pylist() == list(range(200))
    assert content(found) == content(ours)
    for report, processes in ((alone, 1), (theirs, 3)) if view is TORCH else ():
        check_figures(project, report, processes)


def check_figures(project: Scene, report: Report, processes: int) -> None:
    """The report holds the engine's figures: of 200 rows in 5 windows, each of batches of 16, 16
    and 8."""
    path = project.root / "numbers" / "runs" / f"{report.run}.json"
    written: dict[str, Any] = json.loads(path.read_text())["engine"]
    assert written == report.engine
    assert (written["rows"], written["cost"], written["batches"]) == (200, 200, 15)
    assert (written["budget"], written["cost_unit"]) == (16, "rows")
    assert written["batch_ms"].keys() == {"p50", "p95", "p99"}
    assert {"prepare", "model", "check", "write"} <= written["stages"].keys()
    assert written["peak_memory_bytes"] > processes * 100 * 2**20
    assert written["peak_flops"] > 1e8
    assert written["stages"]["model"]["busy_s"] > 0
    device = "cpu" if processes == 1 else "2 workers: as they are"
    assert (written["device"], engine_line(written).endswith(device)) == (device, processes > 1)


def test_where_there_is_a_gpu_the_runs_own_process_computes_nothing(
    make_project: MakeProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the rows, nor what the gates compare: what breaks a GPU's context breaks it for its
    process. The GPU is only counted here, and its worker computes on a CPU."""
    args = {name: value for name, value in BF16["model"]["args"].items() if name != "device"}
    view = BF16 | {"model": BF16["model"] | {"args": args}, "fallback": {"enabled": True}}
    project, alone = run(make_project, numbers().slice(0, 100), None, view=view)
    monkeypatch.setattr("precompute.models.device.gpu_count", lambda: 1)
    monkeypatch.setattr("precompute.engine.runner.Forward", None)
    _, report = run(make_project, None, None, view=view)
    assert (alone.status, report.status, report.snapshot) == ("committed", "committed", 2)
    assert ("workers" in alone.engine, report.engine["workers"]) == (False, 1)
    # those that know the view have a night to compare with the second time
    again = [verdict for verdict in report.gates if verdict.gate not in TABLE]
    assert [(v.gate, v.passed, v.message) for v in again] == [
        (v.gate, v.passed, v.message) for v in alone.gates if v.gate not in TABLE
    ]
    assert {v.gate for v in report.gates} & {*TABLE} == {"null", "constant", "shape"}
    assert [v.message for v in report.gates if not v.passed] == []
    assert {"accuracy", "parity"} <= {verdict.gate for verdict in report.gates}
    found = committed(project, 2)
    assert content(found) == content(committed(project, 1))
    # and in the precision that is configured, or the same bytes would say little
    xyz = np.stack([numbers().slice(0, 100).column(name).to_numpy() for name in "xyz"], 1)
    exact = xyz @ LINEAR["weight"].T + LINEAR["bias"]
    assert 1e-3 < np.abs(np.stack(found.column("vector").to_numpy()) - exact).max() < 0.1


@pytest.mark.parametrize(("device", "count"), [("cuda", 0), ("cuda:2", 2)])
def test_a_gpu_that_is_not_there_is_refused_by_name(
    make_project: MakeProject, monkeypatch: pytest.MonkeyPatch, device: str, count: int
) -> None:
    monkeypatch.setattr("precompute.models.device.gpu_count", lambda: count)
    view = TORCH | {"model": TORCH["model"] | {"args": TORCH["model"]["args"] | {"device": device}}}
    with pytest.raises(
        ConfigError, match=f"device '{device}': torch .* finds {count or 'no'} GPUs"
    ):
        run(make_project, numbers(), None, view=view)


# ---- deaths


def test_a_row_that_kills_its_worker_is_rejected_alone(make_project: MakeProject) -> None:
    rows = [(i, float(i)) for i in range(12)]
    project, report = run(make_project, rows, TWO, view=DYING, command="run")
    assert report.status == "published"
    assert report.counts["written"] == 11
    assert report.counts["rejected"] == 1
    store = project.store
    (rejected,) = pq.read_table(store.folder / "data" / report.run / "rejected.parquet").to_pylist()
    assert (rejected["key"], rejected["stage"]) == ("5", "worker")
    assert (
        rejected["error"]
        == "its worker process exited with status 3; the last line of its stderr: last words (2 of 2 tries)"
    )
    assert committed(project, 1).select(["id", "double", "vector"]).to_pylist() == [
        {"id": i, "double": 2.0 * i, "vector": [i, i + 1.0, i + 2.0, i + 3.0]}
        for i in range(12)
        if i != 5
    ]
    with project.online_store() as online:
        lookup = Lookup(online, project.root)
        assert [lookup.row("numbers", key)["status"] for key in (4, 5, 6)] == [
            "fresh",
            "missing",
            "fresh",
        ]
