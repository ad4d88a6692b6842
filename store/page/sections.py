"""Sections: views and their runs, what was asked of them and how long it took."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from precompute.store.clock import duration
from precompute.store.offline.runs import Report
from precompute.store.page.html import (
    Child,
    Figures,
    Html,
    Times,
    ViewFigures,
    columns_bar,
    counted,
    element,
    freshness_bar,
    joined,
    legend,
    runs_line,
    shares_bar,
)

_TOLD_RUNS = 6
"""In words."""
_BAD_ENDS = ("failed", "killed", "rejected", "refused", "cancelled")
_STATUSES = ("fresh", "stale", "computed", "missing")


_TROUBLE = ("missing", "stale", "fresh")


def by_trouble(view: ViewFigures) -> tuple[int, bool, str]:
    """What a card is sorted by: what is broken, then what has expired or is stale, then what failed last, then the others, by name."""
    no_model = view.told["fallback"] and not view.told.get("model_ready", True)
    broken = not view.readable or view.trouble is not None or no_model
    age = -1 if broken else _TROUBLE.index(view.told["status"] or "missing")
    return age, not (view.runs and view.runs[0].status in _BAD_ENDS), str(view.told["view"])


def view_card(view: ViewFigures, figures: Figures) -> Html:
    """One view: its freshness, what it is, its runs, its rows as they were asked for."""
    told = view.told
    status = told["status"] or "missing"
    word = "expired" if status == "missing" else status
    notes = [
        element("p", note, class_="bad")
        for holds, note in (
            (not view.readable, "what is live cannot be read now: this was last known"),
            (view.trouble is not None, view.trouble or ""),
        )
        if holds
    ]
    return element(
        "article",
        element(
            "div", element("h3", element("code", told["view"])), element("span", word, class_=f"word {status}"), class_="head"
        ),
        *notes,
        element(
            "p", "oldest row ", duration(told["age_s"]), f", snapshot {told['snapshot']}, {told['rows']:,} rows", class_="quiet"
        ),
        freshness_bar(told["age_s"], told["ttl_s"], told["stale_for_s"]),
        runs_line(view.runs, figures.at_s),
        _rows_asked(figures, str(told["view"])),
        _facts(told),
        _last_run(view.runs),
        _runs(view.runs),
        class_="card",
    )


def _facts(told: Mapping[str, Any]) -> Html:
    features = [_feature(feature) for feature in told["features"]]
    shown = ", ".join(features[:4]) + (f" and {len(features) - 4} more" if len(features) > 4 else "")
    coverage = "–" if told["coverage"] is None else f"{told['coverage']:.1%} of the source"
    facts: list[tuple[str, Child]] = [
        ("coverage", coverage),
        ("published", str(told["published_at"])[:19].replace("T", " ")),
        ("search", _search(told)),
        ("fallback", _fallback(told)),
        ("model", element("code", str(told["model"])[:12])),
    ]
    listed = element("dl", *(joined(element("dt", name), element("dd", value)) for name, value in facts))
    return element("details", element("summary", f"{', '.join(told['entity'])} → {shown}"), listed)


def _fallback(told: Mapping[str, Any]) -> Child:
    if not told["fallback"]:
        return "–"
    spec = told.get("semantic_cache")
    if not told.get("model_ready", True):
        return "no model answers misses now: the server's log says why"
    if spec is None:
        return "the model answers misses"
    near = f", or rows whose inputs are alike: by {spec['threshold']:g} or more in "
    return joined("the model answers misses", near, element("code", spec["view"]))


def _search(told: Mapping[str, Any]) -> str:
    """How much of the nearest a search finds, at least, and how: ``recall@10 ≥ 97.1 % by codes``."""
    if not told["searchable"]:
        return "–"
    index = told["index"]
    if index is None:
        return "yes"
    if index["kind"] == "exact":
        return "exact"
    took = "" if index.get("query_us") is None else f", {index['query_us']:.0f} µs"
    return f"recall@10 ≥ {index['recall_bound']:.1%} by {index['kind']}{took}"


def _feature(feature: Mapping[str, Any]) -> str:
    shape = f"[{feature['dim']}]" if "dim" in feature else f"[≤{feature['max_items']}]" if "max_items" in feature else ""
    packed = f" as {feature['packed']}" if "packed" in feature else ""
    return f"{feature['name']}: {feature['dtype']}{shape}{packed}"


def _rows_asked(figures: Figures, view: str) -> Html | None:
    """Rows answered by status, and why the missing ones were."""
    by_status, reasons = dict.fromkeys(_STATUSES, 0.0), dict[str, float]()
    for (status, _source, reason), rows in figures.counts(counted.ROWS, view).items():
        by_status[status] = by_status.get(status, 0.0) + rows
        if reason:
            reasons[reason] = reasons.get(reason, 0.0) + rows
    asked = sum(by_status.values())
    if not asked:
        return None
    there = {status: rows for status, rows in by_status.items() if rows}
    colours = [f"f-{status}" for status in there]
    why = f" ({', '.join(f'{reason} {rows:,.0f}' for reason, rows in sorted(reasons.items()))})" if reasons else ""
    words = [f"{rows:,.0f} {status}{why if status == 'missing' else ''}" for status, rows in there.items()]
    return joined(element("p", "rows asked for", class_="quiet"), shares_bar(there, colours), legend(words, colours))


def _last_run(runs: Sequence[Report]) -> Html | None:
    return joined(element("p", "last run", class_="quiet"), _run(runs[0])) if runs else None


def _runs(runs: Sequence[Report]) -> Html | None:
    before = runs[1:_TOLD_RUNS]
    if not before:
        return None
    return element("details", element("summary", f"{len(before)} more before it"), *map(_run, before))


def _run(run: Report) -> Html:
    """One run: when, what came of it, and where its time went."""
    snapshot = None if run.snapshot is None else f", snapshot {run.snapshot}"
    counts = (
        f": {run.counts.get('written', 0):,} rows written, {run.counts.get('rejected', 0):,} rejected, {duration_ms(run.seconds)}"
    )
    return joined(
        element("p", f"{run.started_at[:16].replace('T', ' ')} {run.command} ", _ended(run), snapshot, counts),
        None if run.error is None else element("p", run.error[:300], class_="quiet small"),
        _stages(run),
    )


def _ended(run: Report) -> Html:
    return element("span", run.status, class_="bad" if run.status in _BAD_ENDS else None)


def _stages(run: Report) -> Html | None:
    """Where the time went: the longest stages, side by side and in words."""
    stages = {name: seconds for name, seconds in sorted(run.stages_s.items(), key=lambda item: -item[1]) if seconds >= 0.001}
    most = dict(list(stages.items())[:5])
    if len(stages) > len(most):
        most["others"] = sum(stages.values()) - sum(most.values())
    if not most:
        return None
    colours = [f"s{i}" for i in range(len(most))]
    return joined(
        shares_bar(most, colours), legend([f"{name} {duration_ms(seconds)}" for name, seconds in most.items()], colours)
    )


def _head(names: Sequence[str], numbers: Sequence[str] = ()) -> Html:
    return element("thead", element("tr", *(element("th", name, class_="n" if name in numbers else None) for name in names)))


def duration_ms(seconds: float | None) -> str:
    """``250 µs``, ``2.5 ms``, ``1.3 s``, ``4 min``; beyond the last bucket ``> 60 s``."""
    if seconds is None:
        return "> 60 s"
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} µs"
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds:.3g} s" if seconds < 120 else duration(seconds)


def latency(figures: Figures) -> Html | None:
    """How long requests took, and the stages of them; upper ends of the histograms' buckets."""
    routes, stages = figures.times(counted.REQUEST_SECONDS), figures.times(counted.STAGE_SECONDS)
    if not routes:
        return None
    rows = [_times(route, times) for route, times in routes.items()] + [
        _times(f"· {stage}", times) for stage, times in stages.items()
    ]
    head = _head(("request", "count", "p50 ≤", "p99 ≤", "25 µs … 60 s"), numbers=("count", "p50 ≤", "p99 ≤"))
    return element(
        "section",
        element("h2", "Latency"),
        element("div", element("table", head, element("tbody", *rows)), class_="card"),
    )


def _times(name: str, times: Times) -> Html:
    cells: list[tuple[str, Child, str | None]] = [
        ("request", name, None),
        ("count", f"{times.count:,}", "n"),
        ("p50 ≤", duration_ms(times.quantile_s(0.5)), "n"),
        ("p99 ≤", duration_ms(times.quantile_s(0.99)), "n"),
        ("25 µs … 60 s", columns_bar(times.buckets), "bar"),
    ]
    return element("tr", *(element("td", value, class_=kind, data_is=label) for label, value, kind in cells))


def fallback(figures: Figures) -> Html | None:
    """What became of misses that were given to models."""
    by_view: dict[str, dict[str, float]] = {}
    for (view, outcome), misses in figures.counts(counted.FALLBACK_ROWS).items():
        by_view.setdefault(view, {})[outcome] = misses
    if not by_view:
        return None
    took, opened = figures.times(counted.MODEL_SECONDS), figures.counts(counted.BREAKER_OPEN)
    rows = []
    for view, outcomes in sorted(by_view.items()):
        times = took.get(view)
        cells: list[tuple[str, Child, str | None]] = [
            ("view", element("code", view), None),
            ("misses", ", ".join(f"{count:,.0f} {outcome}" for outcome, count in sorted(outcomes.items())), None),
            ("waiting", f"{figures.counts(counted.FALLBACK_QUEUE, view).get((), 0):,.0f}", "n"),
            ("a batch p50 ≤", "–" if times is None else duration_ms(times.quantile_s(0.5)), "n"),
            ("breaker", element("span", "open", class_="bad") if opened.get((view,)) else "closed", None),
        ]
        rows.append(element("tr", *(element("td", value, class_=kind, data_is=label) for label, value, kind in cells)))
    head = _head(("view", "misses", "waiting", "a batch p50 ≤", "breaker"), numbers=("waiting", "a batch p50 ≤"))
    return element(
        "section",
        element("h2", "Fallback"),
        element("div", element("table", head, element("tbody", *rows), class_="fold"), class_="card"),
    )


_Cells = Sequence[tuple[str, Child, str | None]]


def caches(figures: Figures) -> Html | None:
    """What was answered without the online store, or without a model, because it had been answered before, or nearly."""
    rows = [row for row in (_encoded(figures), _kept(figures), *_near(figures)) if row is not None]
    if not rows:
        return None
    names = [name for name, _, _ in rows[0]]
    head = _head(names, numbers=("found", "of"))
    body = [element("tr", *(element("td", value, class_=kind, data_is=label) for label, value, kind in cells)) for cells in rows]
    return element(
        "section",
        element("h2", "Caches"),
        element("div", element("table", head, element("tbody", *body), class_="fold"), class_="card"),
    )


def _cache(name: Child, found: float, looked_for: float, saved: str, told: str) -> _Cells:
    share = found / looked_for if looked_for else 0.0
    return [
        ("cache", name, None),
        ("found", f"{found:,.0f}", "n"),
        ("of", f"{looked_for:,.0f}", "n"),
        ("share", shares_bar({saved: share, "not found": 1 - share}, ["s0", "rest"]), "bar"),
        ("", told, None),
    ]


def _encoded(figures: Figures) -> _Cells | None:
    counts = {outcome: rows for (outcome,), rows in figures.counts(counted.CACHE, "l1").items()}
    hits = counts.get("hit", 0.0)
    size = figures.counts(counted.CACHE_BYTES, "l1").get((), 0.0)
    if not counts:
        return None
    return _cache("encoded rows", hits, hits + counts.get("miss", 0.0), "reads saved", f"reads saved; {size / 1024:,.0f} KiB")


def _kept(figures: Figures) -> _Cells | None:
    counts = {outcome: rows for (outcome,), rows in figures.counts(counted.CACHE, "kept").items()}
    hits = counts.get("hit", 0.0)
    if not counts:
        return None
    told = f"calls saved; {counts.get('stored', 0.0):,.0f} stored, {counts.get('dropped', 0.0):,.0f} not"
    return _cache("cached rows", hits, hits + counts.get("miss", 0.0), "calls saved", told)


def _near(figures: Figures) -> list[_Cells]:
    """Of each view with a semantic cache."""
    by_view: dict[str, dict[str, float]] = {}
    for (view, outcome), rows in figures.counts(counted.SEMANTIC_CACHE).items():
        by_view.setdefault(view, {})[outcome] = rows
    told = []
    for view, outcomes in sorted(by_view.items()):
        hits = outcomes.pop("hit", 0.0)
        similarity = figures.counts(counted.SEMANTIC_SIMILARITY, view).get((), 0.0)
        words = ["calls saved" + (f" at a similarity of {similarity / hits:.3f}" if hits else "")]
        words += [f"{rows:,.0f} {outcome}" for outcome, rows in sorted(outcomes.items())]
        name = element("span", "similar inputs of ", element("code", view))
        told.append(_cache(name, hits, hits + sum(outcomes.values()), "calls saved", "; ".join(words)))
    return told
