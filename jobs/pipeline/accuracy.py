"""Accuracy gate: how far a view's precision is from float32 on rows of its own. Where a model computes for several threads it is measured beside a run's
first batches, of which nothing is written before it has passed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pyarrow as pa

from jobs.config.view import ViewConfig
from jobs.pipeline.comparison import Comparison, KeptComparison, compared
from jobs.rows.engine import computed
from jobs.rows.open_view import OpenView
from precompute.engine.runner import Runner
from precompute.engine.window import Outcome
from precompute.techniques.table import REFERENCE
from store.errors import SourceError
from store.offline.snapshot import Verdict

if TYPE_CHECKING:
    from precompute.models.torch_model import TorchModel

CHECKED_ROWS = 512
"""Of the source: 10 neighbours among 512 tell 0.985 from 0.97 with room to spare."""
SHARE = 4
"""Of the compute threads, one in so many measures beside a run; one at least."""


class _Stopped(Exception):
    """Nobody waits for it any more."""


class AccuracyCheck:
    """The comparison of a view's precision with float32, on its way; :meth:`close` it when nobody asks any more.

    Args:
        config: the view's, which says how near it must be.
        opened: the view, its model converted, in another precision than float32. Its source is read here, and not afterwards.

    Raises:
        SourceError, ModelError: as a run would.
    """

    def __init__(self, config: ViewConfig, opened: OpenView) -> None:
        self._config, self._opened = config, opened
        sample = sample_of(opened, CHECKED_ROWS)
        self._rows = sample.num_rows
        self._kept = KeptComparison(opened, opened.variant, sample)
        self._found = self._kept.read()
        self._error: BaseException | None = None
        self._stopped = False
        self._thread: threading.Thread | None = None
        if self._found is not None:
            return
        # torch takes a second to import, and a model of pure Python needs none
        from precompute.models.torch_model import TorchModel

        model = opened.model
        assert isinstance(model, TorchModel), "no other model has another precision"
        if opened.wanted is not None:
            self._keep(*(computed(opened, sample, technique) for technique in (opened.variant, REFERENCE)))
        elif model.concurrent:
            self._begin(model, sample)
        else:
            self._keep(*(begun() for begun in self._both(model, sample)))

    @property
    def known(self) -> bool:
        """Whether there is nothing to wait for."""
        return self._thread is None

    def verdict(self) -> Verdict:
        """Wait for it.

        Raises:
            ModelError: measuring failed.
        """
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            raise self._error
        assert self._found is not None
        return self._found.verdict(self._config.accuracy, self._opened.variant)

    def close(self) -> None:
        """Give up what is not known yet, after the batch under way."""
        self._stopped = True
        if self._thread is not None:
            self._thread.join()

    def _both(self, model: TorchModel, sample: pa.RecordBatch) -> Iterator[Callable[[], Outcome]]:
        """By the model's technique, and in float32: rows made ready here, to be computed in any thread."""
        for one in (model, model.in_float32()):
            yield Runner(one, self._opened.view, search=False).begun(sample, self._go_on)

    def _begin(self, model: TorchModel, sample: pa.RecordBatch) -> None:
        begun = list(self._both(model, sample))
        threads = max(1, model.device.threads() // SHARE)

        def measure() -> None:
            try:
                model.device.compute_with(threads)
                self._keep(*(one() for one in begun))
            except _Stopped:
                pass
            except BaseException as exc:
                self._error = exc

        self._thread = threading.Thread(target=measure, name="accuracy", daemon=True)
        self._thread.start()

    def _go_on(self) -> None:
        if self._stopped:
            raise _Stopped

    def _keep(self, done: Outcome, reference: Outcome) -> None:
        self._found = compared(self._opened.view, reference, done, self._rows)
        self._kept.write(self._found)


def check_accuracy(config: ViewConfig, opened: OpenView) -> Verdict | None:
    """Compare a view's precision with float32 on a sample of its own rows, now; None for float32 itself."""
    return None if opened.variant == REFERENCE else AccuracyCheck(config, opened).verdict()


def keep_comparisons(opened: OpenView, sample: pa.RecordBatch, comparisons: dict[str, Comparison]) -> None:
    """What was measured of several techniques, where a run's check would be of the same rows: its :data:`CHECKED_ROWS` first."""
    rows = sample.slice(0, CHECKED_ROWS)
    for technique, comparison in comparisons.items():
        if technique != REFERENCE and comparison.rows == rows.num_rows:
            KeptComparison(opened, technique, rows).write(comparison)


def sample_of(opened: OpenView, rows: int) -> pa.RecordBatch:
    """Raises:
    SourceError: there are no rows.
    """
    table = opened.source.sample(rows).combine_chunks()
    if table.num_rows == 0:
        raise SourceError(f"view {opened.view.name!r}: the source yielded no rows: nothing to compare precisions on")
    batch: pa.RecordBatch = table.to_batches()[0]
    return batch
