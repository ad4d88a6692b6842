"""Golden: the gate that computes unchanged rows again, among the rows of a run, and compares them
with what is stored of them: a model whose code, files, libraries or machine changed what it gives,
and whose fingerprint did not change, is refused before its rows lie beside the others'.

The rows are those of the lowest key hashes, so that the same data has the same ones on every
machine. What a run computes anyway is not computed twice: it is compared as it was written.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from precompute.jobs.config.view import ViewConfig
from precompute.jobs.run.judge.audit import ASSUMED_PRECISION
from precompute.jobs.run.judge.gates import served_snapshot
from precompute.jobs.run.rows.golden_rows import GoldenRows
from precompute.jobs.run.rows.open_view import OpenView, open_source
from precompute.jobs.run.rows.plan import Plan
from precompute.jobs.run.rows.samples import Samples
from precompute.model import KeepingModel
from precompute.model_code import code_changes
from precompute.sources.source import BATCH_BYTES
from precompute.store.errors import GateError, SnapshotError
from precompute.store.keys import key_column
from precompute.store.offline.runs import Report
from precompute.store.offline.segment import ALL_HASHES
from precompute.store.offline.snapshot import Snapshot, Verdict
from precompute.store.offline.standing import Standing
from precompute.store.offline.view_store import ViewStore
from precompute.store.times import Partition
from precompute.techniques.row_errors import differing, first_of

log = logging.getLogger(__name__)

GOLDEN_ROWS, DRAWN_ROWS = 64, 256
"""Unchanged rows that are compared at most, and rows that they are looked for among, about: where
more than three in four changed, fewer are compared."""


class Golden:
    """The golden rows of one run, and the verdict on them. There are none in a first run, by
    another recipe than what is live and what is built on, where nothing is computed, of a model
    that keeps what a service answered (it would pay, or repeat what it kept), nor where
    ``gates.golden`` is null.

    Args:
        config: the view's.
        store: of the view.
        opened: the view; its source is loaded and compared with what was computed before.
        plan: of the run.
        report: of the run; gets a verdict that refuses.
        accept: gates that the run accepts.
        source_mb: DuckDB's memory, for the source of another partition.

    Raises:
        SourceError, UnreadableError: something cannot be read.
    """

    def __init__(
        self,
        config: ViewConfig,
        store: ViewStore,
        opened: OpenView,
        plan: Plan,
        report: Report,
        accept: Collection[str],
        source_mb: int,
    ) -> None:
        self._config, self._store, self._opened, self._plan = config, store, opened, plan
        self._report, self._accept, self._source_mb = report, accept, source_mb
        self._changes = ""
        """What changed in the code of the model, since it computed the base."""
        self._stored = self._anyway = pa.table({"key": pa.array([], pa.string())})
        """What is stored of all golden rows, in the order of their hashes; and of those that the
        run computes anyway."""
        self._below, self._is_judged = 0, False
        self._said = "no row was compared" if plan.diff.compute else "no row was computed"
        self.rows = GoldenRows(opened.view)
        """Those that are computed again."""
        self._base = plan.parent if plan.nothing_to_do else self._live() or plan.parent
        if self._base is None and report.partition is not None:
            self._base = self._last_partition()
        if self._base is not None:
            self._changes = code_changes(self._base.code, opened.code())
            is_wanted = config.gates.golden is not None and plan.diff.compute > 0
            if is_wanted and not isinstance(opened.model, KeepingModel):
                with report.stage("golden"):
                    self._draw(self._base)

    # ---- what is compared with

    def _live(self) -> Snapshot | None:
        """What is live, or, of a partition, its newest one that passed, of the same recipe."""
        partition, recipe = self._report.partition, self._plan.recipe
        live = (
            served_snapshot(self._store)
            if partition is None
            else Standing(self._store).newest(partition, refused=False)
        )
        return live if live is not None and live.recipe == recipe and live.rows else None

    def _last_partition(self) -> Snapshot | None:
        """Of a partition that is new, the one that was computed last, where the model's code
        changed since: its source is read for that, which a run of each day need not pay."""
        numbers = [
            entry.number
            for entry in self._store.catalog().entries.values()
            if entry.partition not in (None, self._report.partition)
        ]
        last = None
        # a damaged one is told by `status`
        with contextlib.suppress(SnapshotError):
            last = self._store.snapshot(max(numbers)) if numbers else None
        if last is None or last.recipe != self._plan.recipe or not last.rows:
            return None
        return last if code_changes(last.code, self._opened.code()) else None

    # ---- which rows

    def _draw(self, base: Snapshot) -> None:
        self._below = min(ALL_HASHES, DRAWN_ROWS * ALL_HASHES // max(1, base.rows))
        try:
            drawn = Samples(self._store).of(base, self._below).rows
        except SnapshotError as exc:
            # of what is built on, the gates after this one say so
            log.warning("%s", exc)
            return
        entity = self._opened.view.entity
        drawn = drawn.append_column("key", key_column(drawn, entity).cast(pa.string()))
        if base.partition != self._report.partition:
            self._take_of_partition(base, drawn)
            return
        keys, hashes = (drawn.column(name).to_pylist() for name in ("key", "input_hash"))
        source = self._opened.source
        found = {row["key"]: row for row in source.unchanged(keys, hashes).to_pylist()}
        places = [n for n, key in enumerate(keys) if key in found][:GOLDEN_ROWS]
        sizes = np.cumsum([found[keys[n]]["size_bytes"] for n in places])
        places = places[: max(1, int(np.searchsorted(sizes, BATCH_BYTES, side="right")))]
        self._stored = drawn.take(pa.array(places, pa.int64()))
        todo = [found[keys[n]]["todo"] for n in places]
        self._anyway = self._stored.filter(pa.array(todo, pa.bool_()))
        numbers = [row["row"] for row in (found[keys[n]] for n in places) if not row["todo"]]
        if numbers:
            self.rows = GoldenRows(self._opened.view, source.numbered(numbers))

    def _take_of_partition(self, base: Snapshot, drawn: pa.Table) -> None:
        """Rows of another partition, from its own source as it is now."""
        source, _ = open_source(
            base.view,
            self._store.offline,
            self._opened.folder,
            pinned=base.inputs,
            partition=Partition.parse(str(base.partition)),
            memory_mb=self._source_mb,
        )
        keys, hashes = (drawn.column(name).to_pylist() for name in ("key", "input_hash"))
        with contextlib.closing(source):
            now = source.rows(keys, with_hash=True)
        found = zip(*(now.column(name).to_pylist() for name in ("key", "input_hash")), strict=True)
        place = {pair: n for n, pair in enumerate(found)}
        same = [n for n, pair in enumerate(zip(keys, hashes, strict=True)) if pair in place]
        same = same[:GOLDEN_ROWS]
        self._stored = drawn.take(pa.array(same, pa.int64()))
        if same:
            inputs = now.take(pa.array([place[keys[n], hashes[n]] for n in same], pa.int64()))
            inputs = inputs.drop_columns(["key", "input_hash"])
            self.rows = GoldenRows(self._opened.view, inputs)

    # ---- the verdict

    def checked(self) -> None:
        """Judge the rows that were computed again, once all of them were: called before anything
        is written.

        Raises:
            GateError: more of them come out otherwise than the view allows, and that is not
                accepted.
        """
        rows = self.rows
        if not self._is_judged and rows.wanted and rows.computed.num_rows == rows.wanted:
            self._is_judged = True
            self._judge(rows.computed)

    def verdicts(self, draft: Snapshot) -> list[Verdict]:
        """The verdict on all golden rows; empty where there are none.

        Args:
            draft: what the run wrote, not committed: has the rows that it computed anyway.

        Raises:
            GateError: as :meth:`checked`.
            SnapshotError: the draft cannot be read.
        """
        computed = self.rows.computed
        if self._anyway.num_rows:
            now = Samples(self._store).of(draft, self._below).rows
            now = now.append_column("key", key_column(now, draft.view.entity).cast(pa.string()))
            # those that were rejected are counted as such
            now = now.filter(pc.is_in(now.column("key"), self._anyway.column("key")))
            now = now.append_column("error", pa.nulls(now.num_rows, pa.string()))
            computed = pa.concat_tables([computed, now.select(computed.schema.names)])
        return [self._judge(computed)] if computed.num_rows else []

    def _judge(self, computed: pa.Table) -> Verdict:
        config, limit, base = self._config, self._config.gates.golden, self._base
        assert limit is not None
        assert base is not None
        differs = self._differing(computed)
        rows = computed.num_rows
        share, said = len(differs) / rows, f"of {rows} unchanged rows of snapshot {base.number}"
        message = f"{said} that were computed again {len(differs) or 'none'} come out otherwise"
        message += first_of(differs)
        self._said = message
        if differs and self._changes:
            message += f"; {self._of_code()}"
        verdict = Verdict("golden", share <= limit, share, limit, message)
        if not verdict.passed and "golden" not in self._accept:
            self._report.gates = [verdict]
            raise GateError(
                f"view {config.name!r}: {message}. Nothing was committed, and the live snapshot"
                f" stays. {self._way_out()}"
            )
        return verdict

    def _differing(self, computed: pa.Table) -> dict[str, str]:
        """Key → what differs, in the order of the key hashes."""
        place = {key: n for n, key in enumerate(computed.column("key").to_pylist())}
        stored = self._stored.filter(pc.is_in(self._stored.column("key"), computed.column("key")))
        keys = stored.column("key").to_pylist()
        computed = computed.take(pa.array([place[key] for key in keys], pa.int64()))
        errors = computed.column("error").to_pylist()
        made = [n for n, error in enumerate(errors) if error is None]
        rows = pa.array(made, pa.int64())
        view, precision = self._opened.view, self._precision()
        found = differing(stored.take(rows), computed.take(rows), view, precision)
        what = {made[n]: said for n, said in found.items()}
        what |= {n: error for n, error in enumerate(errors) if error is not None}
        return {keys[n]: what[n] for n in sorted(what)}

    def _precision(self) -> str | None:
        """By which two computations of one row may differ. A model of one's own does not say: it is
        held to what ``parity`` holds it to, or, where that does not judge, to what ``batch``
        does."""
        opened = self._opened
        by_parity = self._config.gates.parity is not None and opened.view.fallback
        assumed = None if by_parity and opened.substitute is None else ASSUMED_PRECISION
        return opened.known_precision or assumed

    def _way_out(self) -> str:
        use, config = self._opened.view.definition.model.use, self._config
        again = f"{config.accepting('golden')} --full"
        if config.source.frame:
            again = (
                f"precompute.open(…).run({config.name!r}, frame=df, full=True, accept=['golden'])"
            )
        return (
            f"Put back what changed since: the code of {use}, a file or variable that it reads, a"
            f" library, the machine. Or have every row computed by what is there now: let"
            f" fingerprint() of {use} return another text, or {again}. Where one input need not"
            " give the same twice (by chance, the time, or the other rows of its batch):"
            " gates: {golden: null}"
        )

    def _of_code(self) -> str:
        return f"the code of the model changed ({self._changes}), and its fingerprint did not"

    def told(self) -> list[str]:
        """What is to be told of a model whose code changed under the same fingerprint, and of how
        its rows compare; empty where it did not change."""
        return [f"{self._of_code()}: {self._said}"] if self._changes else []
