"""Plan: what a view takes at another number of rows: seconds, CPU and GPU hours, bytes, memory
and money, each a + b · rows, fitted to the view's own runs; and what would not fit.

CPU seconds are fitted stage by stage, since elapsed time says as much of a machine's other work.
Full runs and deltas are fitted apart.
"""

from __future__ import annotations

import math
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from precompute.engine.resources import available_bytes
from precompute.jobs.config.project import Project
from precompute.store.disk.storage import storage_of
from precompute.store.errors import PrecomputeError
from precompute.store.offline.runs import Report
from precompute.store.online.url import table_folder
from precompute.store.times import duration

LEAST_ROWS, LEAST_S = 1_000_000, 30.0
"""Rows, or seconds, that a run has at least to be fitted to: in smaller ones what a row takes is
lost in what a run takes besides."""
APART = 2.0
"""How many times the rows of the smallest run the largest must have: a line needs two ends."""
NOISE = 0.05
"""Relative standard deviation of the CPU seconds of equal runs, at least."""
NOTHING = 2.0
"""How many times the smallest run's error the point "no rows take nothing" has. By all
pairs of four runs of 10⁶ and four of 3·10⁶ on a crowded machine, 10⁷ rows took 0.89 to 1.17 times
what was said; vectors 0.98 to 1.35, where loading them once took twice as long."""
FLOOR_S = 0.05
"""Seconds below which stages are not fitted more closely."""
CROWDED = 0.2
"""Share of the machine that other processes may have taken in every run without a warning."""
FAR = 10.0
"""How many times the largest run's rows a line is trusted without a warning."""
SPILLED = 1.33
"""How much more the stages of :data:`OF_DUCKDB` take a row once DuckDB spills: 1.27 to 1.39 times
(``benchmarks.scale_plan``)."""
REPORTS = 200
"""Newest reports that are read: in an object store each is a request."""

OVERLAPPING = ("read", "model", "write")
"""Stages that run at once, and that workers divide among them."""
PUBLISHING = ("assemble", "check", "load", "verify", "index", "flip", "gc")
"""Stages of a publishing: one process does them, and they go by the rows that are loaded."""
OF_DUCKDB = ("source", "plan", "read")
"""Stages that go through the rows that DuckDB holds."""
OF_ALL_ROWS = (
    "open",
    "source",
    "plan",
    "library",
    "accuracy",
    "gates",
    "commit",
    "other",
    "late rows",
)
"""Stages that go by the rows of the source; those left go by the rows that are computed."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value, and the half width of the interval in which it lies in 19 of 20 runs, if what it was
    fitted to goes on in a line."""

    value: float
    error: float

    def times(self, factor: float) -> Estimate:
        """The estimate in another unit."""
        return Estimate(self.value * factor, self.error * factor)


@dataclass(frozen=True, slots=True)
class Line:
    """``a + b · x``, by weighted least squares; what it was found by says how sure it is."""

    a: float
    b: float
    noise: float
    weight: float
    middle: float
    spread: float

    def at(self, x: float) -> Estimate:
        """What it says of ``x``."""
        value = max(0.0, self.a + self.b * x)
        if not self.weight:
            return Estimate(value, 2 * self.noise * value)
        off = (x - self.middle) ** 2 / self.spread if self.spread else 0.0
        return Estimate(value, 2 * self.noise * math.sqrt(1 / self.weight + off + value**2))


def fitted(points: Sequence[tuple[float, float]], *, from_nothing: bool = True) -> Line:
    """The line through (x, measured) of some runs, which does not fall. Errors count by their
    share, and by x: the larger the run, the more it says of larger ones. It goes through zero where
    their x are less than :data:`APART`: that says too much of more rows rather than too little.
    ``from_nothing``: what is measured is about nothing of no rows (:data:`NOTHING`)."""
    least, most = min(x for x, _ in points), max(x for x, _ in points)
    if not most:
        return Line(sum(measured for _, measured in points) / len(points), 0.0, NOISE, 0, 0, 0)
    if most < APART * least:
        shares = [measured / x for x, measured in points]
        mean = sum(shares) / len(shares)
        return Line(0.0, mean, max([NOISE, *(abs(s / mean - 1) for s in shares if mean)]), 0, 0, 0)
    first_s = max(FLOOR_S, min(measured for _, measured in points))
    runs = [(x / most / max(measured, FLOOR_S) ** 2, x, measured) for x, measured in points]
    nothing = (max(least, 1.0) / most / (NOTHING * first_s) ** 2, 0.0, 0.0)
    weighted = [*runs, nothing] if from_nothing else runs
    total = sum(w for w, _, _ in weighted)
    middle = sum(w * x for w, x, _ in weighted) / total
    mean = sum(w * y for w, _, y in weighted) / total
    spread = sum(w * (x - middle) ** 2 for w, x, _ in weighted)
    both = sum(w * (x - middle) * (y - mean) for w, x, y in weighted)
    slope = max(0.0, both / spread) if spread else 0.0
    start = mean - slope * middle
    rest = sum(w * (y - start - slope * x) ** 2 for w, x, y in runs)
    noise = max(NOISE, math.sqrt(rest / (len(runs) - 2))) if len(runs) > 2 else NOISE
    return Line(start, slope, noise, total, middle, spread)


@dataclass(frozen=True, slots=True)
class Point:
    """What one run took, of one kind of rows."""

    report: Report

    def rows(self, stage: str) -> int:
        """The rows that a stage goes by."""
        if stage in PUBLISHING:
            return self.report.usage.loaded_rows
        return self.report.counts["source" if stage in OF_ALL_ROWS else "written"]

    def cpu_s(self, stage: str) -> float:
        """CPU seconds of a stage in the run's process and its workers."""
        usage = self.report.usage
        return usage.cpu_s.get(stage, 0.0) + usage.workers_cpu_s.get(stage, 0.0)

    @property
    def spilled(self) -> bool:
        """Whether DuckDB did."""
        return self.report.usage.spilled_bytes > 0

    @property
    def workers(self) -> int:
        """How many workers, or processes, computed its rows."""
        return max(1, self.report.usage.workers)

    @property
    def others(self) -> float:
        """The share of the machine's CPU time that other processes took meanwhile, about."""
        usage, seconds = self.report.usage, max(self.report.seconds, 1e-9)
        taken_s = sum(usage.cpu_s.values()) + sum(usage.workers_cpu_s.values())
        idle = 1.0 if usage.idle is None else usage.idle
        return max(0.0, 1 - idle - taken_s / (seconds * usage.cores))

    def elapsed_s(self, part: str) -> float:
        """Seconds of a part of the run: ``compute``, what overlaps; ``publish``; ``rest``."""
        report = self.report
        compute = float(report.engine.get("seconds", report.stages_s.get("model", 0.0)))
        publish = sum(report.stages_s.get(stage, 0.0) for stage in PUBLISHING)
        return {
            "compute": compute,
            "publish": publish,
            "rest": max(0.0, report.seconds - compute - publish),
        }[part]


class Fitted:
    """The runs of one kind, ``full`` or ``delta``, that are fitted to; and what they say.

    Args:
        kind: of runs.
        reports: of the view's runs, the newest first.
        model: the fingerprint that they must be of.
    """

    def __init__(self, kind: str, reports: Sequence[Report], model: str | None) -> None:
        self.kind, self.left_out = kind, Counter[str]()
        self.computed: list[Point] = []
        self.published: list[Point] = []
        for report in reports:
            why = _why_left_out(report, model)
            of_kind = report.usage.kind == kind
            if of_kind and why is None:
                self.computed.append(Point(report))
            elif of_kind:
                self.left_out[str(why)] += 1
            upper = report.usage.upper_only and kind == "delta"
            base = not report.usage.upper_only and kind == "full"
            if why is None and report.usage.loaded_rows and (upper or base):
                self.published.append(Point(report))

    @property
    def source_rows(self) -> list[int]:
        """Rows of the source in each run that computed rows, ascending."""
        return sorted(point.report.counts["source"] for point in self.computed)

    @property
    def changed_share(self) -> float:
        """Rows computed, of all, in all these runs together; 1 of full runs."""
        written = sum(point.report.counts["written"] for point in self.computed)
        return 1.0 if self.kind == "full" else written / max(1, sum(self.source_rows))

    @property
    def largest(self) -> Report:
        """The report of the run with the most rows of the source, among those that computed
        rows."""
        return max(self.computed, key=lambda point: point.report.counts["source"]).report

    def spill_bytes(self, rows: int, memory_bytes: float) -> float:
        """What DuckDB puts on disk of a source of so many rows."""
        a_row = self.largest.usage.source_bytes / self.largest.counts["source"]
        return max(0.0, a_row * rows - memory_bytes)

    @property
    def why_not(self) -> str | None:
        """Why these runs do not tell; None where they do."""
        rows = self.source_rows
        if len(rows) > 1 and rows[-1] >= APART * rows[0]:
            return None
        there = " and ".join(f"{n:,}" for n in (rows if len(rows) < 3 else (rows[0], rows[-1])))
        have = f"there {'is' if len(rows) == 1 else 'are'} {len(rows) or 'none'}"
        have += f", of {there} rows" if rows else ""
        left = ", ".join(f"{count} {why}" for why, count in self.left_out.most_common())
        return (
            f"two {self.kind} runs of at least {LEAST_ROWS:,} rows or {LEAST_S:.0f} s are needed,"
            f" one of {APART:g} times the other's rows or more, and {have}"
            + (f" (left out: {left})" if left else "")
        )

    def line(self, stage: str, *, spills: bool) -> Line:
        """CPU seconds of a stage by its rows, where DuckDB spills or not: those of runs in which it
        was otherwise are converted."""
        points = self.published if stage in PUBLISHING else self.computed
        times = {True: SPILLED if stage in OF_DUCKDB else 1.0, False: 1.0}
        return fitted(
            [(p.rows(stage), p.cpu_s(stage) * times[spills] / times[p.spilled]) for p in points]
        )

    def stages(self) -> list[str]:
        """Those that took anything, in the order of the runs."""
        points = [(point, False) for point in self.computed]
        points += [(point, True) for point in self.published]
        names = dict.fromkeys(
            stage
            for point, published in points
            for stage in (*point.report.usage.cpu_s, *point.report.usage.workers_cpu_s)
            if (stage in PUBLISHING) == published
        )
        return list(names)

    def rows_of(self, stage: str, rows: int) -> int:
        """The rows that a stage goes by, of so many in the source."""
        return rows if stage in OF_ALL_ROWS else round(self.changed_share * rows)

    def size(self, figure: str, stage: str, rows: int) -> Estimate | None:
        """Any other figure of :class:`precompute.store.offline.runs.Usage`, by the rows that a
        stage goes by, of so many in the source; None where there is nothing of it."""
        points = self.published if stage in PUBLISHING else self.computed
        sizes = [
            (point.rows(stage), float(getattr(point.report.usage, figure))) for point in points
        ]
        if not any(size for _, size in sizes):
            return None
        return fitted(sizes).at(self.rows_of(stage, rows))

    def most(self, figure: str) -> Estimate | None:
        """The most of any run, of what does not grow with the rows; None where there is none."""
        most = max(float(getattr(point.report.usage, figure)) for point in self.computed)
        return Estimate(most, 0.0) if most else None

    def memory_bytes(self, rows: int, allowed_bytes: int) -> Estimate:
        """Memory of the run's process, at most: what it allocates beyond the largest run's is
        bounded."""
        usages = [(point.rows("source"), point.report.usage) for point in self.computed]
        line = fitted([(x, float(usage.peak_bytes)) for x, usage in usages], from_nothing=False)
        most_bytes = float(self.largest.usage.peak_bytes + allowed_bytes)
        found = line.at(rows)
        return found if found.value < most_bytes else Estimate(most_bytes, 0.0)

    def busy(self, part: str, stages: Sequence[str]) -> float:
        """CPU seconds in a second of a part of the run, for each worker: the most of any run, whose
        machine was the least crowded."""
        points = self.published if part == "publish" else self.computed
        rates = [
            sum(map(point.cpu_s, stages))
            / point.elapsed_s(part)
            / (point.workers if part == "compute" else 1)
            for point in points
            if point.elapsed_s(part) > FLOOR_S
        ]
        return max(rates, default=1.0) or 1.0


def _why_left_out(report: Report, model: str | None) -> str | None:
    usage = report.usage
    rows = max(report.counts.get("source", 0), usage.loaded_rows)
    if not report.finished:
        return "failed"
    if report.model != model:
        return "of another model"
    if report.resumed:
        return "took over rows of an interrupted run"
    small = rows < LEAST_ROWS and report.seconds < LEAST_S
    return "too small" if small or not rows else None


def plan(
    project: Project,
    name: str,
    *,
    rows: int | None = None,
    workers: int | None = None,
    price: float | None = None,
) -> dict[str, Any]:
    """What a run of a view will take, and what would not fit.

    Args:
        project: the configuration.
        name: of the view.
        rows: of its source; by default those of the largest run that is fitted to.
        workers: like those of the runs, which compute rows at once, beside one that does all else;
            by default as many as the runs had. Of runs without any, the run's own process is one.
        price: of a worker's machine for an hour, in any currency.

    Returns:
        ``view``, ``rows``, ``workers``, ``cores`` and ``device`` (of the runs); ``limits``, what
            is needed of something as a share of what there is, and at how many rows it breaks;
            ``full`` and ``delta``: see :func:`_predicted`, None where that cannot be told, which
            ``cannot_tell`` explains.

    Raises:
        ConfigError: no such view.
        PrecomputeError: its runs say too little; says how to get those that are needed.
    """
    config, store = project.view(name), project.offline.view(name)
    reports = [r for r in store.runs.reports(REPORTS) if r.status != "running"]
    model = next((r.model for r in reports if r.usage.kind and r.finished), None)
    kinds = {kind: Fitted(kind, reports, model) for kind in ("full", "delta")}
    cannot_tell = {kind: why for kind, of in kinds.items() if (why := of.why_not) is not None}
    fit = {kind: of for kind, of in kinds.items() if kind not in cannot_tell}
    if not fit:
        raise PrecomputeError(
            f"what view {name!r} takes cannot be told: {cannot_tell['full']}. {_how_to(name, rows)}"
        )
    newest = next(iter(fit.values())).computed[0]
    rows = rows or max(of.source_rows[-1] for of in fit.values())
    workers = workers or newest.workers
    found = {kind: _predicted(of, rows, workers, price, project) for kind, of in fit.items()}
    return {
        "view": name,
        "rows": rows,
        "workers": workers,
        "cores": newest.report.usage.cores,
        "device": newest.report.usage.device,
        "limits": _limits(project, found, rows, config.ttl),
        **dict.fromkeys(kinds),
        **found,
        "cannot_tell": cannot_tell,
    }


def _how_to(name: str, rows: int | None) -> str:
    return (
        f"For an estimate copy views/{name}.yaml to views/{name}_sample.yaml, with that name and"
        f" LIMIT {LEAST_ROWS} in its SQL, and `precompute run {name}_sample`; then with LIMIT"
        f" {3 * LEAST_ROWS}, `precompute run {name}_sample --accept rows` and `precompute plan"
        f" {name}_sample --rows {rows or 10**9}`"
    )


def _predicted(
    of: Fitted, rows: int, workers: int, price: float | None, project: Project
) -> dict[str, Any]:
    """What a run of one kind takes: of each figure ``value`` and ``error`` (:class:`Estimate`), or
    None; ``seconds`` of an otherwise idle machine, ``undivided_s`` of it that workers do not
    shorten, ``spill_bytes`` of DuckDB at most, and ``stages`` with the line of each."""
    spill_bytes = of.spill_bytes(rows, 1e6 * project.settings.source_mb)
    first_spill = bool(spill_bytes) and not any(point.spilled for point in of.computed)
    stages = [_stage(of, name, rows, spills=bool(spill_bytes)) for name in of.stages()]
    cpu = {line["stage"]: Estimate(line["value"], line["error"]) for line in stages}
    parts = {
        "compute": [s for s in cpu if s in OVERLAPPING],
        "publish": [s for s in cpu if s in PUBLISHING],
        "rest": [s for s in cpu if s not in (*OVERLAPPING, *PUBLISHING)],
    }
    took = {
        part: _sum(cpu[s] for s in names).times(1 / of.busy(part, names))
        for part, names in parts.items()
    }
    undivided, divided = _sum((took["rest"], took["publish"])), took["compute"]
    seconds = _sum((undivided, divided.times(1 / workers)))
    machine_h = _sum((undivided, divided)).times(1 / 3600)
    figures = {
        "seconds": seconds,
        "undivided_s": undivided,
        "cpu_s": _sum(cpu.values()),
        "gpu_s": of.size("gpu_s", "model", rows),
        "root_bytes": of.size("written_bytes", "model", rows),
        "online_bytes": of.size("loaded_bytes", "load", rows),
        "memory_bytes": of.memory_bytes(rows, project.settings.memory_mb * 2**20),
        "worker_memory_bytes": of.most("worker_peak_bytes"),
        "machine_h": machine_h,
        "money": None if price is None else machine_h.times(price),
        "money_held": None if price is None else seconds.times(price * workers / 3600),
    }
    return {
        "runs": len(of.computed),
        "publishings": len(of.published),
        "rows_of_runs": [of.source_rows[0], of.source_rows[-1]],
        "changed_share": of.changed_share,
        "idle": [point.report.usage.idle for point in of.computed],
        "others": min(point.others for point in of.computed),
        **{name: None if e is None else asdict(e) for name, e in figures.items()},
        "spill_bytes": spill_bytes,
        "first_spill": first_spill,
        "stages": stages,
    }


def _stage(of: Fitted, stage: str, rows: int, *, spills: bool) -> dict[str, Any]:
    """The line of a stage's CPU seconds, and what it says; ``spills``: DuckDB does."""
    line, at = of.line(stage, spills=spills), of.rows_of(stage, rows)
    by = "loaded" if stage in PUBLISHING else "source" if stage in OF_ALL_ROWS else "computed"
    return {
        "stage": stage,
        "by": by,
        "rows": at,
        "start_s": line.a,
        "row_s": line.b,
        "divides": stage in OVERLAPPING,
        **asdict(line.at(at)),
    }


def _limits(
    project: Project, found: dict[str, dict[str, Any]], rows: int, ttl_s: float
) -> list[dict[str, Any]]:
    """What a full run, or else a delta, needs beside what there is; that of which most is needed
    first."""
    predicted, settings = found.get("full") or found["delta"], project.settings

    def needed(figure: str) -> float:
        return predicted[figure]["value"] if predicted[figure] else 0.0

    limits = [
        _limit(
            "memory",
            needed("memory_bytes"),
            available_bytes(),
            None,
            f"lower memory_mb ({settings.memory_mb} now), or take a larger machine",
        ),
        _limit(
            "seconds within the TTL",
            needed("seconds"),
            ttl_s,
            rows,
            f"{duration(needed('undivided_s'))} of it no worker shortens: run deltas, or raise ttl",
        ),
    ]
    folder = table_folder(project.online)
    on_disk = [
        ("root", project.root, needed("root_bytes")),
        ("table files", folder and Path(folder), needed("online_bytes")),
        ("DuckDB's spill in TMPDIR", Path(tempfile.gettempdir()), predicted["spill_bytes"]),
    ]
    disks = dict[int, list[tuple[str, Path, float]]]()
    for what, path, size_bytes in on_disk:
        # an object store has room for all of it, and Redis says at its preflight
        if size_bytes and path and storage_of(path).local:
            there = next(one for one in (path, *path.absolute().parents) if one.exists())
            disks.setdefault(there.stat().st_dev, []).append((what, there, size_bytes))
    for needs in disks.values():
        size_bytes = sum(size_bytes for _, _, size_bytes in needs)
        free_bytes = shutil.disk_usage(needs[0][1]).free
        what = f"disk of {needs[0][1]} ({', '.join(what for what, _, _ in needs)})"
        remedy = "a larger disk, or another one for one of these"
        limits.append(_limit(what, size_bytes, free_bytes, rows, remedy))
    return sorted(limits, key=lambda limit: -limit["share"])


def _limit(what: str, needed: float, there: float, rows: int | None, remedy: str) -> dict[str, Any]:
    """``rows`` where what is needed grows with them."""
    share = needed / max(there, 1.0)
    breaks_at_rows = int(rows / share) if rows and share else None
    return {
        "what": what,
        "needed": needed,
        "there": there,
        "share": share,
        "breaks_at_rows": breaks_at_rows,
        "remedy": remedy,
    }


def _sum(estimates: Iterable[Estimate]) -> Estimate:
    """Errors add up: what makes one stage slow makes the others slow."""
    found = list(estimates)
    return Estimate(sum(e.value for e in found), sum(e.error for e in found))
