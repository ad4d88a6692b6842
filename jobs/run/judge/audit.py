"""Audit: rows of a run that are computed once more after the last one: in float32, to know how many
are off, and in other batches, to know whether a row depends on its neighbours.

The sample is drawn from all batches; a run of shards draws a part of it in each of them. It takes a
small share of the run's time; the verdict says what a sample of that size can say of all rows.
"""

from __future__ import annotations

import bisect
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from precompute.engine.rows import Outcome
from precompute.engine.runner import Runner
from precompute.jobs.config.view import ViewConfig
from precompute.jobs.run.judge.accuracy import EXTREME_ROWS, joined, limits_of
from precompute.jobs.run.rows.chunks import compute_in_worker
from precompute.jobs.run.rows.open_model import OpenModel
from precompute.model import Model
from precompute.store.feature_view import Feature, FeatureView
from precompute.store.keys import key_column
from precompute.store.offline.snapshot import Verdict
from precompute.techniques.accuracy import judged_rows
from precompute.techniques.row_errors import (
    differing,
    first_of,
    is_measured,
    row_errors,
    row_figures,
    share_between,
)
from precompute.techniques.table import REFERENCE

AUDITED_ROWS = 5000
"""The sample's size. If 1 row of 1,000 is broken, 1 such sample of 150 has none; a sample without
any shows that fewer than 0.06 % are (95 %)."""
AUDIT_SHARE = 0.03
"""Share of the run's time that the audit takes at most."""
AUDIT_LEAST_S = 0.05
"""Seconds that the audit may take, if that is more."""
SLOWER = 4.0
"""How much longer a row is expected to take in float32, before that is measured: MiniLM takes 4
times as long as in bfloat16."""
FEWEST_ROWS = 8
"""Rows below which no audit is made, unless the run has no more."""
ALONE_ROWS = 64
"""Rows that are computed again in other batches."""
ALONE_TOGETHER = 16
"""Rows of these in one batch, at most."""
WORKER_S = 10.0
"""How long a worker on a GPU takes to start; it computes float32 at an eighth of the run's rate or
more."""
ASSUMED_PRECISION = "bf16-eager"
"""The precision that a user's model is assumed to have, since it does not say: two computations may
differ by that."""


class Audit:
    """The audit of one run; ``sample`` are its rows.

    Args:
        config: the view's.
        opened: the view, its model converted.
        rows: to be computed.
        before_s: seconds that the run took so far.
    """

    def __init__(self, config: ViewConfig, opened: OpenModel, rows: int, before_s: float) -> None:
        self._config, self._opened = config, opened
        by_parity = opened.view.fallback and opened.view.misses_by is None
        self._in_batches = config.gates.parity is not None and not by_parity and opened.gpu is None
        sample_rows = (
            AUDITED_ROWS if opened.variant != REFERENCE else ALONE_ROWS if self._in_batches else 0
        )
        self.sample_rows = sample_rows
        """How many rows the sample is to have."""
        self.sample = Sample(opened.view, rows, sample_rows, extremes=opened.variant != REFERENCE)
        self._began = time.monotonic() - before_s

    def verdicts(self, model_s: float) -> list[Verdict]:
        """The verdicts of the gates ``accuracy`` and ``batch``, if there are rows and time for
        them.

        Args:
            model_s: seconds that the model took for all rows.

        Raises:
            ModelError: as a run would.
        """
        drawn = self.sample.rows_drawn()
        if drawn is None:
            return []
        budget_s = max(AUDIT_LEAST_S, AUDIT_SHARE * (time.monotonic() - self._began))
        # on crowded cores drawing takes longer than it should
        budget_s = max(budget_s - self.sample.spent_s, budget_s / 2)
        row_s = model_s / self.sample.rows
        inputs, made = drawn
        # in random order, since there may be time for the first ones only
        order = pa.array(np.random.default_rng(SEED).permutation(made.num_rows))
        inputs, made = inputs.take(order), made.take(order)
        began = time.monotonic()
        verdicts = (
            self._in_float32(inputs, made, budget_s, row_s)
            if self._opened.variant != REFERENCE
            else []
        )
        return verdicts + self._among_others(
            inputs, made, budget_s - (time.monotonic() - began), row_s
        )

    # ---- among other rows

    def _among_others(
        self, inputs: pa.RecordBatch, made: pa.RecordBatch, budget_s: float, row_s: float
    ) -> list[Verdict]:
        """The gate ``batch``, if a row differs. It does not judge on a GPU, where another worker
        would have to start, nor a view whose misses its model computes, which ``parity`` judges."""
        view, limit = self._opened.view, self._config.gates.parity
        rows = min(ALONE_ROWS, made.num_rows, int(budget_s / max(row_s, 1e-9)))
        if limit is None or not self._in_batches or rows < 2:
            return []
        step, until = min(ALONE_TOGETHER, rows // 2), time.monotonic() + budget_s
        outcomes, runner = [], Runner(self._opened.model, view, search=False)
        for start in range(0, rows, step):
            outcomes.append(runner.compute(inputs.slice(start, min(step, rows - start))))
            if time.monotonic() > until:
                rows = min(rows, start + step)
                break
        keys = key_column(inputs, view.entity).to_pylist()
        again = np.concatenate([step * n + done.rows for n, done in enumerate(outcomes)])
        differs = {
            keys[step * n + r.row]: r.error
            for n, done in enumerate(outcomes)
            for r in done.rejections
        }
        found = differing(
            pa.Table.from_batches([made.take(pa.array(again))]),
            pa.Table.from_batches([done.features for done in outcomes]),
            view,
            self._opened.known_precision or ASSUMED_PRECISION,
        )
        differs |= {keys[again[row]]: what for row, what in found.items()}
        if not differs:
            # no verdict: it would name how many rows there was time for, another number each time
            return []
        message = (
            f"{len(differs)} of {rows} rows come out differently among other rows than in the"
            f" batches of the run{first_of(differs)}"
        )
        share = len(differs) / rows
        return [Verdict("batch", share <= limit, share, limit, message)]

    # ---- in float32

    def _in_float32(
        self, inputs: pa.RecordBatch, made: pa.RecordBatch, budget_s: float, row_s: float
    ) -> list[Verdict]:
        """The gate ``accuracy``, on the sample and on the rows with extreme values."""
        extreme_inputs, stored = self.sample.extreme_rows()
        extremes = extreme_inputs.num_rows
        rows, until = pa.concat_batches([extreme_inputs, inputs]), time.monotonic() + budget_s
        done: Outcome | None = None
        start = 0
        for block in self._blocks(rows, budget_s, row_s, until):
            done, start = joined(done, block, start), start + block.done
        if done is None:
            return []
        at_extremes = int((done.rows < extremes).sum())
        if len(done.rows) - at_extremes < min(FEWEST_ROWS, inputs.num_rows):
            return []
        ran = pa.concat_batches([stored, made]).take(pa.array(done.rows))
        return [self._verdict(done.features, ran, at_extremes)]

    def _blocks(
        self, rows: pa.RecordBatch, budget_s: float, row_s: float, until: float
    ) -> Iterator[Outcome]:
        """The first rows computed in float32, as many as there is time for."""
        opened = self._opened
        if opened.gpu is not None:
            # in a worker, as the run's own
            count = int((budget_s - WORKER_S) / (8 * row_s))
            if count >= FEWEST_ROWS:
                yield compute_in_worker(opened, rows.slice(0, count), REFERENCE)
            return
        # torch takes a second to import, and a model of pure Python needs none
        from precompute.models.torch_model import TorchModel

        model: Model = opened.model
        assert isinstance(model, TorchModel), "no other model has another precision"
        exact: Model = model.in_float32()
        runner, start, next_s = Runner(exact, opened.view, search=False), 0, 2 * SLOWER * row_s
        while start < rows.num_rows:
            left_s = until - time.monotonic()
            # first half of the rows that fit by the guess, then by the time that these took
            count = min(int(left_s / max(next_s, 1e-9)), rows.num_rows - start)
            if count < min(FEWEST_ROWS, rows.num_rows - start):
                return
            began = time.monotonic()
            # in lanes: on crowded cores threads that wait for each other took 20 times as long
            yield runner.compute(rows.slice(start, count), lanes=runner.lanes_for(count))
            start += count
            next_s = (time.monotonic() - began) / count

    def _verdict(self, reference: pa.RecordBatch, made: pa.RecordBatch, extremes: int) -> Verdict:
        view, limits, details, judged = self._opened.view, limits_of(self._config.accuracy), [], []
        for feature in view.features:
            of = limits.of(feature)
            errors = row_errors(
                feature, reference.column(feature.name), made.column(feature.name), extremes
            )
            figures = row_figures(errors, of, extremes)
            judged += judged_rows(feature.name, figures, of)
            most = share_between(figures.beyond, figures.rows)[1]
            if figures.rows == self.sample.rows:
                most = figures.beyond / figures.rows
            far = (
                f"are off by more than {of.bound:.3g}"
                if is_measured(feature)
                else "differ from float32"
            )
            said = f"of {self.sample.rows:,} rows at most {most:.2%} {far} (95 %)"
            details.append(
                f"{feature.name}: " * (len(view.features) > 1)
                + f"{said}; worst {figures.worst:.3g}"
            )
        judged.sort(key=lambda figure: figure.room)
        reasons = [figure.shortfall for figure in judged if figure.room < 0]
        message = (
            f"{self._opened.variant} against float32, {made.num_rows - extremes:,} rows of the run:"
            f" {'; '.join(details)}"
        )
        if reasons:
            message += f": {'; '.join(reasons)}"
        return Verdict("accuracy", not reasons, judged[0].measured, judged[0].limit, message)


SAMPLE_BYTES = 32 * 2**20
"""Bytes of the sample at most; of larger rows fewer are drawn."""
TOGETHER_BYTES = 64 * 2**20
"""Windows are sampled together, up to so many bytes: beside threads that compute, the CPU's caches
hold nothing of it, and a window of 8,192 scores alone took 0.5 ms in place of 0.06."""

SEED = 0
"""Fixed, so that the same run draws the same rows."""


class Sample:
    """Rows drawn at random, and those with extreme values.

    Args:
        view: of the features.
        rows: to be computed.
        sample_rows: how many of them to draw.
        extremes: whether rows with extreme values are wanted, too.
    """

    def __init__(self, view: FeatureView, rows: int, sample_rows: int, *, extremes: bool) -> None:
        drawn = np.random.default_rng(SEED).choice(
            rows, min(rows, sample_rows), replace=False, shuffle=False
        )
        self._view = view
        self._positions: list[int] = np.sort(drawn).tolist()
        self._inputs: list[pa.RecordBatch] = []
        self._made: list[pa.RecordBatch] = []
        self._extremes = _Extremes(view) if extremes else None
        self._pending: list[tuple[int, pa.RecordBatch, Outcome]] = []
        self._bytes = self._pending_bytes = 0
        self.rows = 0
        """How many were drawn from."""
        self.spent_s = 0.0
        """Seconds that drawing took."""

    def draw(self, batch: pa.RecordBatch, done: Outcome) -> None:
        """Draw from rows that the model computed.

        Args:
            batch: as it was given to the engine, with a column ``input_hash``.
            done: the outcome of its rows, or of some.
        """
        start = self.rows
        self.rows += len(done.rows)
        if self._extremes is None and not self._drawn(start, len(done.rows)):
            return
        self._pending.append((start, batch, done))
        self._pending_bytes += batch.nbytes + done.features.nbytes
        # without float32 to compare with, a few windows are sampled as they come, and not kept
        if self._extremes is None or self._pending_bytes > TOGETHER_BYTES:
            self._look()

    def rows_drawn(self) -> tuple[pa.RecordBatch, pa.RecordBatch] | None:
        """Their inputs, and the features that were computed of them; None without any."""
        self._look()
        if not self._made:
            return None
        return pa.concat_batches(self._inputs), pa.concat_batches(self._made)

    def extreme_rows(self) -> tuple[pa.RecordBatch, pa.RecordBatch]:
        """The same for the rows with extreme values."""
        assert self._extremes is not None
        self._look()
        return self._extremes.rows()

    # ---- a part of it, drawn elsewhere

    def write(self, path: Path) -> bool:
        """Write it to a file for :meth:`add`; returns whether there was anything to write.

        Raises:
            OSError: the file system failed.
        """
        drawn = self.rows_drawn()
        pairs = [] if drawn is None else [(*drawn, False)]
        if self._extremes is not None and self._extremes.found:
            pairs.append((*self._extremes.rows(), True))
        batches = [
            pa.RecordBatch.from_arrays(
                [inputs.to_struct_array(), made.to_struct_array(), pa.repeat(at_end, len(made))],
                names=["shown", "made", "at_end"],
            )
            for inputs, made, at_end in pairs
        ]
        if not batches:
            return False
        path.parent.mkdir(parents=True, exist_ok=True)
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, batches[0].schema) as out:
            for batch in batches:
                out.write_batch(batch)
        return True

    def add(self, path: Path, rows: int) -> None:
        """Add what :meth:`write` wrote, drawn from ``rows`` rows.

        Raises:
            OSError: the file cannot be read.
        """
        self.rows += rows
        with pa.OSFile(str(path)) as file, pa.ipc.open_stream(file) as batches:
            for batch in batches:
                inputs = pa.RecordBatch.from_struct_array(batch.column("shown"))
                made = pa.RecordBatch.from_struct_array(batch.column("made"))
                made = made.cast(self._view.feature_schema())
                if self._extremes is not None:
                    self._extremes.see(inputs.schema)
                if not batch.column("at_end")[0].as_py():
                    self._inputs.append(inputs)
                    self._made.append(made)
                    self._bytes += inputs.nbytes + made.nbytes
                    if self._bytes > SAMPLE_BYTES:
                        self._halve(self.rows)
                elif self._extremes is not None:
                    self._extremes.add(inputs, made)

    # ---- drawing

    def _look(self) -> None:
        """Draw rows of the pending windows."""
        # CPU time of this thread: other time is the model's
        began = time.thread_time()
        for start, batch, done in self._pending:
            if not len(done.rows):
                continue
            if chosen := self._drawn(start, len(done.rows)):
                self._keep(batch, done, np.array(chosen) - start)
                if self._bytes > SAMPLE_BYTES:
                    self._halve(start + len(done.rows))
            if self._extremes is not None:
                self._extremes.look_at(batch, done)
        self._pending, self._pending_bytes = [], 0
        self.spent_s += time.thread_time() - began

    def _drawn(self, start: int, rows: int) -> list[int]:
        """The drawn positions among ``rows`` rows from ``start``."""
        first = bisect.bisect_left(self._positions, start)
        return self._positions[first : bisect.bisect_left(self._positions, start + rows, first)]

    def _keep(self, batch: pa.RecordBatch, done: Outcome, chosen: npt.NDArray[np.int64]) -> None:
        self._inputs.append(_inputs_of(batch).take(pa.array(done.rows[chosen])))
        self._made.append(done.features.take(pa.array(chosen)))
        self._bytes += self._inputs[-1].nbytes + self._made[-1].nbytes

    def _halve(self, end: int) -> None:
        """Drop every other row of the sample, and of the positions still to be drawn, from ``end``
        on."""
        self._inputs, self._made = (_every_other(of) for of in (self._inputs, self._made))
        self._bytes = sum(batch.nbytes for batch in (*self._inputs, *self._made))
        self._positions = [
            position
            for number, position in enumerate(self._positions)
            if position < end or number % 2
        ]


def _every_other(batches: list[pa.RecordBatch]) -> list[pa.RecordBatch]:
    """The first row of them all, the third, and so on; each batch is let go as it is done with."""
    taken, first = list[pa.RecordBatch](), 0
    while batches:
        batch = batches.pop(0)
        if rows := list(range(first, len(batch), 2)):
            taken.append(batch.take(pa.array(rows)))
        first = (first - len(batch)) % 2
    return taken


class _Extremes:
    """The rows of a run with the largest and the smallest values, or lengths of vectors, of each
    feature of floats."""

    def __init__(self, view: FeatureView) -> None:
        self._features = [
            f for f in view.features if f.dtype.startswith("float") and f.max_items is None
        ]
        self._found: dict[tuple[str, int], list[tuple[float, pa.RecordBatch, pa.RecordBatch]]] = {}
        self._none = pa.RecordBatch.from_pylist([], view.feature_schema())
        self._schema: pa.Schema | None = None

    def look_at(self, batch: pa.RecordBatch, done: Outcome) -> None:
        """Look at a window, or a piece of one: its row with the largest and with the smallest
        value."""
        self.see(_inputs_of(batch).schema)
        for feature in self._features:
            sizes = _sizes(feature, done.features.column(feature.name))
            # a null is neither the largest nor the smallest
            known = np.flatnonzero(~np.isnan(sizes))
            for sign in (1, -1) if len(known) else ():
                row_index = int(known[np.argmax(sign * sizes[known])])
                farthest = self._found.get((feature.name, sign), [])
                if len(farthest) < EXTREME_ROWS or sign * float(sizes[row_index]) > farthest[-1][0]:
                    inputs = _inputs_of(batch).take(pa.array([done.rows[row_index]]))
                    made = done.features.take(pa.array([row_index]))
                    self._take(feature, sign, float(sizes[row_index]), inputs, made)

    def see(self, schema: pa.Schema) -> None:
        """Learn what inputs look like, of which none may be extreme."""
        if self._schema is None:
            self._schema = schema

    def _take(
        self, feature: Feature, sign: int, size: float, inputs: pa.RecordBatch, made: pa.RecordBatch
    ) -> None:
        """Take a row, if it is farther out than one that is kept."""
        farthest = self._found.setdefault((feature.name, sign), [])
        farthest.append((sign * size, inputs, made))
        farthest.sort(key=lambda row: -row[0])
        del farthest[EXTREME_ROWS:]

    def add(self, inputs: pa.RecordBatch, made: pa.RecordBatch) -> None:
        """Add rows that were found elsewhere: their inputs, and the features computed of them."""
        for feature in self._features:
            sizes = _sizes(feature, made.column(feature.name))
            for row, size in enumerate(sizes.tolist()):
                for sign in (1, -1) if size == size else ():
                    self._take(feature, sign, size, inputs.slice(row, 1), made.slice(row, 1))

    @property
    def found(self) -> bool:
        """Whether there are any."""
        return bool(self._found)

    def rows(self) -> tuple[pa.RecordBatch, pa.RecordBatch]:
        """Their inputs, and the features that the run computed."""
        assert self._schema is not None
        rows = [row for farthest in self._found.values() for row in farthest]
        inputs = pa.concat_batches(
            [pa.RecordBatch.from_pylist([], self._schema), *(row[1] for row in rows)]
        )
        return inputs, pa.concat_batches([self._none, *(row[2] for row in rows)])


def _inputs_of(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch.drop_columns(["input_hash"])


def _sizes(feature: Feature, column: pa.Array) -> npt.NDArray[Any]:
    if feature.dim is None:
        return np.asarray(column)
    values = np.asarray(column.flatten()).reshape(-1, feature.dim).astype(np.float32, copy=False)
    squares: npt.NDArray[np.float32] = np.asarray(np.einsum("ij,ij->i", values, values))
    return squares
