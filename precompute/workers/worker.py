"""Worker: the process of a worker: it takes windows from a pipe, computes them by a
:class:`precompute.engine.runner.Runner` and sends the features back.
:mod:`precompute.workers.worker_pool` alone starts ``python -m precompute.workers.worker``. Messages
are frames of JSON and Arrow."""

from __future__ import annotations

import contextlib
import os
import queue
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import pyarrow as pa

from precompute.engine.ahead import Meter
from precompute.engine.cores import move_to
from precompute.engine.memory import first_line, is_device_lost
from precompute.engine.runner import Runner
from precompute.engine.window import Outcome
from precompute.model import Model, model_fingerprint
from precompute.project_module import absolute_arguments, described, starting_from
from precompute.registry import load_model
from precompute.store.errors import ConfigError, ModelError, PrecomputeError
from precompute.store.feature_view import FeatureView
from precompute.workers.frames import read_frame, take_pipes, write_frame

# To the worker: the model to load, its tables, then windows, {} with the rows; it ends at once with
# the file. From it:
#   {"kind": "ready", "device": …}        the model is loaded
#   {"kind": "beat", "steps": n}          the process lives, and has finished so many batches
#   {"kind": "done", "last": …, …}        body: row numbers, then the features, of the first window
#                                         that is not done; ``last``: all that was left of it
#   {"kind": "error", "error": "ModelError", "text": …}        nothing follows

FIGURES = (
    "batches",
    "cost",
    "padded_cost",
    "flops",
    "retries",
    "out_of_memory",
    "forward_s",
    "landing_s",
)
"""Counts of a worker's meter, sent with every result, from its start."""

STAGES = ("prepare", "model", "check")
"""Stages of a worker's meter, too; the pool reports the waits of the other two."""

LOST_STATUS = 70
"""The exit status of a worker whose GPU is lost to it: another one goes on with its rows."""

SAMPLE = "__sample__"
"""Name of the table that is no argument of the model, but rows to show a conversion."""


def _check_fingerprint(
    model: Model, spec: Mapping[str, Any], tables: Mapping[str, pa.Table], folder: Path | None
) -> None:
    """Refuse a model, as loaded, before any conversion, that is not the one the run began with: its
    rows would stand beside those of the other in one snapshot."""
    if spec["fingerprint"] is None:
        return
    with starting_from(folder):
        own = model_fingerprint(model.fingerprint(), spec["use"], spec["precision"], tables)
    if own != spec["fingerprint"]:
        raise ConfigError(
            f"the model {spec['use']!r} has fingerprint {own[:12]} in a worker, and had"
            f" {spec['fingerprint'][:12]} when the run began: its files changed during the run, so"
            " run again (or its fingerprint() is another one in each process)"
        )


def main() -> None:
    """Serve until the input ends."""
    _Worker(*take_pipes()).run()
    # without waiting for threads of the model's
    os._exit(0)


class _Worker:
    def __init__(self, source: IO[bytes], sink: IO[bytes]) -> None:
        self._source, self._sink = source, sink
        self._writing = threading.Lock()
        self._meter = Meter()
        self._runner: Runner
        self._waiting: queue.SimpleQueue[pa.RecordBatch] = queue.SimpleQueue()

    def run(self) -> None:
        first = read_frame(self._source)
        if first is None:
            return
        spec = first[0]
        # of this thread, and so of all that it starts; others may have taken CPUs away meanwhile
        with contextlib.suppress(OSError):
            move_to(frozenset(spec["cpus"]))
        threading.Thread(
            target=self._beat, args=(spec["heartbeat_s"],), name="beat", daemon=True
        ).start()
        tables = {}
        for name in spec["tables"]:
            frame = read_frame(self._source)
            if frame is None:
                return
            tables[name] = frame[1].read_all()
        threading.Thread(target=self._take, name="take", daemon=True).start()
        view = FeatureView.from_json(spec["view"])
        try:
            sample = tables.pop(SAMPLE, None)
            folder, args = None if spec["folder"] is None else Path(spec["folder"]), spec["args"]
            if folder is not None:
                args = absolute_arguments(args, folder)
            model = load_model(spec["use"], {**args, **tables}, folder)
            _check_fingerprint(model, spec, tables, folder)
            if (convert := spec["convert"]) is not None:
                # imports torch
                from precompute.techniques.conversion import use_variant

                use_variant(model, convert["variant"], lambda: sample, Path(convert["folder"]))
            self._runner = runner = Runner(model, view, self._meter)
            self._send({"kind": "ready", "device": runner.device_figures()})
            for _, done in runner.stream(
                iter(self._waiting.get, None), memory_mb=spec["memory_mb"]
            ):
                self._send_done(done)
        except PrecomputeError as exc:
            _end_if_lost(exc)
            self._send({"kind": "error", "error": type(exc).__name__, "text": str(exc)})
        except (Exception, SystemExit) as exc:
            # raised by a module that is imported, or by a method that no row can be blamed for
            _end_if_lost(exc)
            text = f"the model of view {view.name!r} failed in its worker: {described(exc)}"
            self._send({"kind": "error", "error": ModelError.__name__, "text": text})

    def _take(self) -> None:
        """Read windows as they come, so that the end of the input is noticed whatever the model
        does."""
        while (frame := read_frame(self._source)) is not None:
            self._waiting.put(frame[1].read_next_batch())
        os._exit(0)

    def _send_done(self, done: Outcome) -> None:
        header = {
            "kind": "done",
            "last": done.last,
            "rejections": [(r.row, r.stage, r.error) for r in done.rejections],
            "figures": {name: getattr(self._meter, name) for name in FIGURES},
            "state": self._runner.state_figures(),
            "batch_steps": dict(self._meter.batch_steps),
            "stages": {
                name: [t.busy_s, t.starved_s, t.blocked_s]
                for name in STAGES
                for t in [self._meter.stage(name)]
            },
        }
        names = ["row", *done.features.schema.names]
        self._send(
            header,
            pa.RecordBatch.from_arrays([pa.array(done.rows), *done.features.columns], names=names),
        )

    def _beat(self, every_s: float) -> None:
        while True:
            self._send({"kind": "beat", "steps": self._meter.batches + self._meter.retries})
            time.sleep(every_s)

    def _send(self, header: Mapping[str, Any], body: pa.RecordBatch | None = None) -> None:
        try:
            with self._writing:
                write_frame(self._sink, header, body)
        except OSError:
            # the parent is gone
            os._exit(1)


def _end_if_lost(exc: BaseException) -> None:
    if is_device_lost(exc):
        # the pool shows the last line
        print(f"\n{first_line(exc)}", file=sys.stderr, flush=True)
        os._exit(LOST_STATUS)


if __name__ == "__main__":
    main()
