"""Audit: rows of a run that are computed once more after the last one: in float32, to know how many
are off, and in other batches, to know whether a row depends on its neighbours.

The sample is drawn from all batches. It takes a small share of the run's time; the verdict says
what a sample of that size can say of all rows.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from precompute.engine.runner import Runner
from precompute.engine.window import Outcome
from precompute.jobs.config.view import ViewConfig
from precompute.jobs.run.judge.accuracy import joined, limits_of
from precompute.jobs.run.judge.sample import SEED, Sample
from precompute.jobs.run.rows.chunks import computed
from precompute.jobs.run.rows.open_model import OpenModel
from precompute.model import Model
from precompute.store.keys import key_column
from precompute.store.offline.snapshot import Verdict
from precompute.techniques.accuracy import judged_rows
from precompute.techniques.row_errors import is_measured, row_errors, row_figures, share_between
from precompute.techniques.same_value import differing
from precompute.techniques.table import REFERENCE

AUDITED_ROWS = 5000
"""The sample's size. If 1 row of 1,000 is broken, 1 such sample of 150 has none; a sample without
any shows that fewer than 0.06 % are (95 %)."""
SHARE = 0.03
"""Share of the run's time that the audit takes at most."""
LEAST_S = 0.05
"""Seconds that the audit may take, if that is more."""
SLOWER = 4.0
"""How much longer a row is expected to take in float32, before that is measured: MiniLM takes 4
times as long as in bfloat16."""
FEWEST_ROWS = 8
"""Rows below which no audit is made, unless they are all: the check before the run says as much."""
ALONE_ROWS = 64
"""Rows that are computed again in other batches."""
ALONE_TOGETHER = 16
"""Rows of these in one batch, at most."""
WORKER_S = 10.0
"""How long a worker on a GPU takes to start; it computes float32 at an eighth of the run's rate or
more."""
OWN = "bf16-eager"
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
        by_parity = opened.view.fallback and opened.view.fallback_model is None
        self._in_batches = (
            config.gates.parity is not None and not by_parity and opened.wanted is None
        )
        wanted = (
            AUDITED_ROWS if opened.variant != REFERENCE else ALONE_ROWS if self._in_batches else 0
        )
        self.wanted = wanted
        """How many rows the sample is to have."""
        self.sample = Sample(opened.view, rows, wanted, ends=opened.variant != REFERENCE)
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
        budget_s = max(LEAST_S, SHARE * (time.monotonic() - self._began))
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
        # only a torch model has this attribute: a user's model says nothing of its precision
        known = getattr(self._opened.model, "variant", None) == self._opened.variant
        found = differing(
            pa.Table.from_batches([made.take(pa.array(again))]),
            pa.Table.from_batches([done.features for done in outcomes]),
            view,
            self._opened.variant if known else OWN,
        )
        differs |= {keys[again[row]]: what for row, what in found.items()}
        if not differs:
            # no verdict: it would name how many rows there was time for, another number each time
            return []
        message = (
            f"{len(differs)} of {rows} rows come out differently among other rows than in the"
            " batches of the run"
        )
        message += "; the first, {!r}: {}".format(*next(iter(differs.items())))
        share = len(differs) / rows
        return [Verdict("batch", share <= limit, share, limit, message)]

    # ---- in float32

    def _in_float32(
        self, inputs: pa.RecordBatch, made: pa.RecordBatch, budget_s: float, row_s: float
    ) -> list[Verdict]:
        """The gate ``accuracy``, on the sample and on the rows with extreme values."""
        shown, stored = self.sample.rows_at_ends()
        ends = shown.num_rows
        rows, until = pa.concat_batches([shown, inputs]), time.monotonic() + budget_s
        done: Outcome | None = None
        start = 0
        for block in self._blocks(rows, budget_s, row_s, until):
            done, start = joined(done, block, start), start + block.done
        if done is None:
            return []
        at_ends = int((done.rows < ends).sum())
        if len(done.rows) - at_ends < min(FEWEST_ROWS, inputs.num_rows):
            return []
        ran = pa.concat_batches([stored, made]).take(pa.array(done.rows))
        return [self._verdict(done.features, ran, at_ends)]

    def _blocks(
        self, rows: pa.RecordBatch, budget_s: float, row_s: float, until: float
    ) -> Iterator[Outcome]:
        """The first rows computed in float32, as many as there is time for."""
        opened = self._opened
        if opened.wanted is not None:
            # in a worker, as the run's own
            count = int((budget_s - WORKER_S) / (8 * row_s))
            if count >= FEWEST_ROWS:
                yield computed(opened, rows.slice(0, count), REFERENCE)
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

    def _verdict(self, reference: pa.RecordBatch, made: pa.RecordBatch, ends: int) -> Verdict:
        view, limits, details, judged = self._opened.view, limits_of(self._config.accuracy), [], []
        for feature in view.features:
            of = limits.of(feature)
            errors = row_errors(
                feature, reference.column(feature.name), made.column(feature.name), ends
            )
            figures = row_figures(errors, of, ends)
            judged += judged_rows(feature.name, figures, of)
            most = share_between(figures.beyond, figures.rows)[1]
            if figures.rows == self.sample.rows:
                most = figures.beyond / figures.rows
            far = f"off by more than {of.bound:.3g}" if is_measured(feature) else "others"
            said = f"of {self.sample.rows:,} rows at most {most:.2%} are {far} (95 %)"
            details.append(
                f"{feature.name}: " * (len(view.features) > 1)
                + f"{said}; worst {figures.worst:.3g}"
            )
        judged.sort(key=lambda figure: figure.room)
        reasons = [figure.shortfall for figure in judged if figure.room < 0]
        message = (
            f"{self._opened.variant} against float32, {made.num_rows - ends:,} rows of the run:"
            f" {'; '.join(details)}"
        )
        if reasons:
            message += f": {'; '.join(reasons)}"
        return Verdict("accuracy", not reasons, judged[0].measured, judged[0].limit, message)
