"""Measure: the commands that compute a sample (``profile``, ``tune`` and ``thresholds``), and
``plan``, which says by what was measured of a view's runs what others will take."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from precompute.jobs.commands.command import (
    Commands,
    add_partition,
    answer,
    partition_of,
    project_of,
    seconds_of,
    table,
)
from precompute.jobs.run.command_process import say
from precompute.store.errors import ConfigError
from precompute.store.times import duration

PACE = {
    "read": (
        "reading the source",
        (
            "the source's SQL is the limit: filter and join less, or materialize it once to Parquet"
            " and read that"
        ),
    ),
    "prepare": (
        "preparing the rows (tokenising, encoding)",
        (
            "the CPU cannot prepare as fast as the model computes: shorten `max_tokens`, give it"
            " more cores, or a model that takes numbers"
        ),
    ),
    "batch": (
        "putting batches together",
        (
            "batches are very small or their inputs very large: raise the model's `max_cost`, or"
            " have it take fewer columns"
        ),
    ),
    "model": (
        "the model",
        (
            "the rest waits for it: `precompute tune` looks for a faster precision, and a GPU"
            " computes more"
        ),
    ),
    "check": (
        "checking what came out, and putting it back in order",
        "the features are large or many for so light a model: declare fewer, or float16",
    ),
    "write": (
        "writing Parquet",
        (
            "the disk or the size of the features is the limit: declare float16, or a faster disk"
            " for `root`"
        ),
    ),
}
"""Stage → what it does, and what to do when it is the slowest."""


def add(commands: Commands) -> None:
    """The commands ``profile``, ``tune`` and ``thresholds``."""
    profile = commands.add(
        "profile",
        _profile,
        "run a sample of a view and report where the time goes; nothing is written",
        view=True,
        only=True,
    )
    profile.option("--rows", "N", "size of the sample (default: 4096)", type=int, default=4096)
    add_partition(profile)
    profile.option(
        "--trace",
        "FILE.json",
        "write a trace of one window for chrome://tracing or ui.perfetto.dev",
        type=Path,
    )
    profile.flag("--replace", "though there is such a file")
    tune = commands.add(
        "tune",
        _tune,
        "measure precisions and back ends on a view's rows, and pick the fastest that is accurate",
        view=True,
        only=True,
    )
    tune.option("--rows", "N", "size of the sample (default: 1024)", type=int, default=1024)
    add_partition(tune)
    tune.flag("--dry-run", "only measure: write no tuning file")
    tune.option(
        "--within",
        "TIME",
        "what candidates may take in all, the most promising first; those named are all"
        " measured (default: 5m)",
        default="5m",
    )
    tune.option(
        "--only",
        "NAME",
        "measure this one, as bf16-onednn; may be repeated",
        action="append",
        default=[],
    )
    cache = commands.add(
        "thresholds",
        _thresholds,
        "measure on a view's rows what a semantic cache would save and cost, and suggest its"
        " threshold",
        view=True,
        only=True,
    )
    cache.option(
        "--by", "VIEW", "embeds the same text (default: the one that semantic_cache names)"
    )
    cache.option("--rows", "N", "size of the sample (default: 1000)", type=int, default=1000)
    cache.option(
        "--agreement",
        "SHARE",
        "of the answers that must be right (default: 0.95)",
        type=float,
        default=0.95,
    )


def add_plan(commands: Commands) -> None:
    """The command ``plan``."""
    plan = commands.add(
        "plan",
        _plan,
        "what a view takes at another number of rows: time, CPU and GPU hours, bytes, memory and"
        " money, fitted to its own runs; what will not fit is said first",
        view=True,
        only=True,
    )
    plan.option("--rows", "N", "of its source, as 1e9 (default: those of its largest run)")
    plan.option(
        "--workers",
        "N",
        "that compute rows at once, like those of its runs, or like their one process (default: as"
        " many as they had)",
        type=int,
    )
    plan.option("--price", "MONEY", "of a worker's machine for an hour, as 0.80", type=float)


def _plan(arguments: argparse.Namespace) -> int:
    from precompute.jobs.ops.capacity import plan

    project, workers, price = project_of(arguments), arguments.workers, arguments.price
    rows = None if arguments.rows is None else _whole(arguments.rows)
    if workers is not None and workers < 1:
        raise ConfigError(f"--workers: {workers}: at least 1")
    if price is not None and not 0 < price < math.inf:
        raise ConfigError(f"--price: {price:g}: more than 0")
    planned = plan(project, arguments.view, rows=rows, workers=workers, price=price)
    return answer(arguments, planned, describe_plan(planned))


def _whole(text: str) -> int:
    """A number of rows, as 1000000000, 1_000_000_000 or 1e9."""
    try:
        rows = int(float(text))
    except (ValueError, OverflowError):
        rows = 0
    if rows < 1:
        raise ConfigError(f"--rows: {text!r}: a number of rows of at least 1, as 1e9")
    return rows


def _profile(arguments: argparse.Namespace) -> int:
    from precompute.jobs.ops.snapshots import checked_target
    from precompute.jobs.ops.tune import profile

    project = project_of(arguments)
    _check_rows(arguments.rows)
    if arguments.trace is not None:
        checked_target(arguments.trace, (".json",), arguments.replace, "--trace")
    partition = partition_of(project, arguments)
    figures = profile(
        project, arguments.view, rows=arguments.rows, partition=partition, trace=arguments.trace
    )
    return answer(arguments, figures, describe_profile(figures))


def _tune(arguments: argparse.Namespace) -> int:
    from precompute.jobs.ops.tune import tune

    project = project_of(arguments)
    _check_rows(arguments.rows)
    tuning = tune(
        project,
        arguments.view,
        rows=arguments.rows,
        partition=partition_of(project, arguments),
        only=arguments.only,
        within_s=seconds_of(arguments.within, "--within"),
        write=not arguments.dry_run,
        announce=(lambda _: None) if arguments.json else say,
    )
    return answer(arguments, tuning, describe_tuning(tuning))


def _thresholds(arguments: argparse.Namespace) -> int:
    from precompute.jobs.ops.thresholds import thresholds

    project = project_of(arguments)
    _check_rows(arguments.rows)
    if not 0 < arguments.agreement < 1:
        raise ConfigError(f"--agreement: {arguments.agreement:g}: between 0 and 1")
    measured = thresholds(
        project, arguments.view, by=arguments.by, rows=arguments.rows, agreement=arguments.agreement
    )
    return answer(arguments, measured, describe_thresholds(measured))


def _check_rows(rows: int) -> None:
    if rows < 1:
        raise ConfigError(f"--rows: {rows}: at least 1")


def describe_plan(planned: Mapping[str, Any]) -> str:
    """What does not fit, then what a run takes, and the lines that say so."""
    workers, cores = planned["workers"], planned["cores"]
    lines = [
        f"{planned['view']}: {planned['rows']:,} rows by {workers} worker{'s' * (workers > 1)} like"
        f" its runs' ({cores} core{'s' * (cores > 1)}, {planned['device']})"
    ]
    fit = [limit for limit in planned["limits"] if limit["share"] <= 1]
    for limit in planned["limits"][: -len(fit) or None]:
        lines.append(f"  DOES NOT FIT: {_limit_words(limit)}; {limit['remedy']}")
    lines += [f"  fits: {_limit_words(limit)}" for limit in fit if limit["needed"]]
    growing = [limit for limit in planned["limits"] if limit["breaks_at_rows"]]
    if growing:
        first = min(growing, key=lambda limit: limit["breaks_at_rows"])
        lines.append(f"  breaks first: {first['what']}, at some {first['breaks_at_rows']:.1e} rows")
    found = {kind: planned[kind] for kind in ("full", "delta") if planned[kind] is not None}
    lines += ["", *table([*_plan_rows(planned, found)])]
    for kind, predicted in found.items():
        lines += ["", *table([*_stage_rows(kind, predicted)])]
    lines.append("")
    for kind, predicted in found.items():
        lines += [f"{kind}: {note}" for note in _plan_notes(planned["rows"], kind, predicted)]
    lines += [f"{kind}: cannot tell: {why}" for kind, why in planned["cannot_tell"].items()]
    return "\n".join([*lines, "elapsed goes by the cores that the least disturbed run kept busy"])


def _limit_words(limit: Mapping[str, Any]) -> str:
    shown = _seconds if limit["what"].startswith("seconds") else _bytes
    what = limit["what"].removeprefix("seconds ")
    return f"{what}: {shown(limit['needed'])} needed, {shown(limit['there'])} there"


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 60 else duration(seconds)


def _bytes(size_bytes: float) -> str:
    return f"{size_bytes / 1e9:,.1f} GB" if size_bytes >= 1e9 else f"{size_bytes / 1e6:,.1f} MB"


_FIGURES: dict[str, tuple[str, Callable[[float], str]]] = {
    "seconds": ("elapsed", _seconds),
    "undivided_s": ("  that no worker shortens", _seconds),
    "cpu_s": ("CPU", _seconds),
    "gpu_s": ("GPU", _seconds),
    "root_bytes": ("written to the root", _bytes),
    "online_bytes": ("loaded online", _bytes),
    "memory_bytes": ("memory, at most", _bytes),
    "worker_memory_bytes": ("memory of a worker, at most", _bytes),
    "money": ("money", "{:,.2f}".format),
    "money_held": ("  if all are held to the end", "{:,.2f}".format),
}


def _plan_rows(
    planned: Mapping[str, Any], found: Mapping[str, Mapping[str, Any]]
) -> Iterator[tuple[str, ...]]:
    heads = {
        "full": "full run",
        "delta": f"delta of {found['delta']['changed_share']:.2%}" if "delta" in found else "",
    }
    yield ("", *(heads[kind] for kind in found))
    for figure, (name, shown) in _FIGURES.items():
        if figure == "money_held" and planned["workers"] == 1:
            continue
        if any(predicted[figure] for predicted in found.values()):
            yield (name, *(_estimate(predicted[figure], shown) for predicted in found.values()))


def _estimate(estimate: Mapping[str, float] | None, shown: Callable[[float], str]) -> str:
    if estimate is None:
        return "–"
    value, error = estimate["value"], estimate["error"]
    return f"{shown(value)} ± {error / value:.0%}" if value and error else shown(value)


def _stage_rows(kind: str, predicted: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    yield (f"{kind}: stage", "CPU s", "± s", "start s", "µs a row", "rows", "divided")
    for line in sorted(predicted["stages"], key=lambda line: -line["value"]):
        if line["value"] >= 0.01 * predicted["cpu_s"]["value"]:
            yield (
                line["stage"],
                f"{line['value']:,.2f}",
                f"{line['error']:,.2f}",
                f"{round(line['start_s'], 2) + 0.0:.2f}",
                f"{1e6 * line['row_s']:.3f}",
                f"{line['rows']:,} {line['by']}",
                "among workers" if line["divides"] else "no",
            )


def _plan_notes(rows: int, kind: str, predicted: Mapping[str, Any]) -> Iterator[str]:
    from precompute.jobs.ops.capacity import CROWDED, FAR, OF_DUCKDB, SPILLED

    first, last = predicted["rows_of_runs"]
    idle = [share for share in predicted["idle"] if share is not None]
    yield (
        f"fitted to {predicted['runs']} runs of {first:,} to {last:,} rows"
        + (f" (the machine {min(idle):.0%} to {max(idle):.0%} idle)" if idle else "")
        + f" and {predicted['publishings']} publishings"
        + ("" if predicted["publishings"] else ", so that publishing is not in it")
    )
    if kind == "full":
        yield (
            "with one after the other the root holds as many snapshots as retention.keep says, and"
            " there are three table files while one is loaded: it, the live one, the one before"
        )
    else:
        yield f"{predicted['changed_share']:.2%} of the rows change, as in these runs"
    if predicted["others"] > CROWDED:
        yield (
            f"others took {predicted['others']:.0%} of the machine or more in each of these runs:"
            " elapsed time and money are too high; CPU seconds are not, but for what crowding adds"
        )
    if rows > FAR * last:
        yield (
            f"{rows / last:,.0f} times the rows of the largest run: what does not grow in a line is"
            " not in it"
        )
    if predicted["first_spill"]:
        yield (
            f"DuckDB spills some {_bytes(predicted['spill_bytes'])}, which no run did: of"
            f" {', '.join(OF_DUCKDB)} a row counts {SPILLED:g} times"
        )


def describe_profile(figures: dict[str, Any]) -> str:
    """A table for people, and its conclusion in a sentence."""
    seconds = max(figures["seconds"], 1e-9)
    lines = [
        (
            f"{figures['view']}: {figures['rows']:,} rows in {figures['seconds']:.2f} s,"
            f" {figures['rows_per_s']:,.0f} rows/s, after {figures['load_s']:.1f} s of loading;"
            f" {figures['rejected']:,} rejected"
        ),
        "",
        (
            f"  {'stage':<12}{'busy s':>9}{'of the time':>13}{'waits for rows':>16}{'waits for room':>16}{'µs/row':>9}"  # noqa: E501
        ),
    ]
    for name, stage in figures["stages"].items():
        lines.append(
            f"  {name:<12}{stage['busy_s']:>9.2f}{stage['busy_s'] / seconds:>13.0%}{stage['starved_s'] / seconds:>16.0%}"  # noqa: E501
            f"{stage['blocked_s'] / seconds:>16.0%}{stage['busy_s'] / max(figures['rows'], 1) * 1e6:>9.1f}"  # noqa: E501
        )
        if name == "model":
            for part, spent in figures["model_s"].items():
                lines.append(
                    f"    {part:<10}{spent:>9.2f}{spent / seconds:>13.0%}{'':>32}{spent / max(figures['rows'], 1) * 1e6:>9.1f}"  # noqa: E501
                )
    from precompute.jobs.run.report import engine_line

    engine = engine_line(figures)
    pace = max(figures["stages"], key=lambda name: figures["stages"][name]["busy_s"])
    what, remedy = PACE[pace]
    lines += ["", f"  {engine}"] if engine else []
    if batch := figures.get("batch_ms"):
        lines.append(
            f"  a batch takes {batch['p50']:g} ms (p50), {batch['p95']:g} (p95), {batch['p99']:g}"
            " (p99)"
        )
    return "\n".join(
        [
            *lines,
            "",
            f"{figures['stages'][pace]['busy_s'] / seconds:.0%} of the time is {what}; {remedy}.",
        ]
    )


def describe_tuning(tuning: Mapping[str, Any]) -> str:
    """Speed against accuracy as a table, and what was picked."""
    from precompute.jobs.run.judge.accuracy import figures_text

    figures = [figures_text(row.get("accuracy", {})) for row in tuning["measured"]]
    width = max(len(text) for text in ("accuracy against float32", *figures)) + 2
    head = f"{'rows/s':>9}{'speed':>8}{'p50 ms':>9}{'p95':>8}{'p99':>8}{'MiB':>7}"
    lines = [f"  {'precision':<20}{head}  {'accuracy against float32':<{width}}verdict"]
    for row, accuracy in zip(tuning["measured"], figures, strict=True):
        rate = (
            f"{row['rows_per_s']:>9,.0f}{row['speed']:>7.2f}×"
            if row["rows_per_s"] is not None
            else f"{'–':>9}{'–':>8}"
        )
        batch, memory = row.get("batch_ms", {}), row.get("memory_bytes")
        for share, room in (("p50", 9), ("p95", 8), ("p99", 8)):
            ms = batch.get(share)
            rate += f"{'–' if ms is None else f'{ms:,.0f}' if ms >= 100 else f'{ms:.3g}':>{room}}"
        rate += f"{memory / 2**20:>7,.0f}" if memory else f"{'–':>7}"
        verdict = (
            "picked"
            if row["name"] == tuning["picked"]
            else "passes"
            if row["refused"] is None
            else f"refused: {row['refused']}"
        )
        lines.append(f"  {row['name']:<20}{rate}  {accuracy:<{width}}{verdict}")
    budget = (
        f"the view's accuracy (cosine {tuning['budget']['cosine']:g}, recall@10"
        f" {tuning['budget']['recall_at_10']:g})"
    )
    return "\n".join(
        [
            f"{tuning['view']}: {tuning['rows']:,} rows of its source, {tuning['machine']}",
            *lines,
            *(
                [
                    f"left out, since {tuning['within_s']:,.0f} s are short for them:"
                    f" {', '.join(tuning['left_out'])}"
                ]
                if tuning.get("left_out")
                else []
            ),
            f"{tuning['picked']} is the fastest within {budget}; "
            + (
                f"written to {tuning['file']}, which `precision: auto` reads."
                if tuning["file"]
                else "nothing was written."
            ),
        ]
    )


def describe_thresholds(measured: Mapping[str, Any]) -> str:
    """What each threshold saves and costs as a table, and the one that is suggested."""
    lines = [f"  {'threshold':>9}{'calls saved':>13}{'answers':>9}{'agree':>8}{'at least':>10}"]
    for line in measured["thresholds"]:
        agree = (
            f"{'–':>8}{'–':>10}"
            if line["agree"] is None
            else f"{line['agree']:>8.3f}{line['at_least']:>10.3f}"
        )
        lines.append(
            f"  {line['threshold']:>9g}{line['saved']:>13.1%}{line['answered']:>9,}{agree}"
        )
    wanted, picked = measured["agreement"], measured["suggested"]
    agreeing = [
        line
        for line in measured["thresholds"]
        if line["agree"] is not None and line["agree"] >= wanted
    ]
    if picked is None and not agreeing:
        verdict = f"At no threshold do answers agree by {wanted:g}: do without."
    elif picked is None:
        verdict = (
            f"No threshold surely keeps {wanted:g}: {agreeing[0]['answered']:,} answers are too few"
            " to be sure. Measure more rows, or do without."
        )
    else:
        (saved,) = (line["saved"] for line in measured["thresholds"] if line["threshold"] == picked)
        verdict = (
            f"{picked:g} is the smallest that surely keeps {wanted:g}, and saves {saved:.0%} of the"
            f" calls: semantic_cache: {{view: {measured['by']}, threshold: {picked:g}}}"
        )
    return "\n".join(
        [
            (
                f"{measured['view']}: {measured['rows']:,} rows of snapshot {measured['snapshot']},"
                f" each answered by the row of the nearest other input by {measured['by']}"
            ),
            *lines,
            verdict,
            (
                "Rows were compared with each other: requests may be less like them, so that less"
                " is saved, or like them in another way. `precompute_semantic_cache_rows` counts"
                " what real ones come to."
            ),
        ]
    )
