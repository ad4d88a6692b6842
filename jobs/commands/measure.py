"""Measure: ``profile``, which computes a sample of a view, and ``optimize``, which makes cheaper
models behind a view and shows them beside its own."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
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
    """The command ``profile``."""
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


def add_optimize(commands: Commands) -> None:
    """The command ``optimize``."""
    optimize = commands.add(
        "optimize",
        _optimize,
        "make cheaper models from what a view published, and judge them on rows they never saw;"
        " nothing goes live by itself",
        view=True,
        only=True,
    )
    optimize.option(
        "--by",
        "WAY",
        "distil, prune or qat (default: all that fit the view's model)",
        choices=("distil", "prune", "qat"),
    )
    optimize.option(
        "--for",
        "PURPOSE",
        "batch, for what computes a view's rows, or fallback, for what answers its misses"
        " (default: both)",
        choices=("batch", "fallback"),
        dest="purpose",
    )
    optimize.option(
        "--within", "TIME", "what making them may take in all (default: 20m)", default="20m"
    )


def _profile(arguments: argparse.Namespace) -> int:
    from precompute.jobs.ops.history import checked_target
    from precompute.jobs.ops.profile import profile

    project = project_of(arguments)
    check_rows(arguments.rows)
    if arguments.trace is not None:
        checked_target(arguments.trace, (".json",), arguments.replace, "--trace")
    partition = partition_of(project, arguments)
    figures = profile(
        project, arguments.view, rows=arguments.rows, partition=partition, trace=arguments.trace
    )
    return answer(arguments, figures, describe_profile(figures))


def check_rows(rows: int) -> None:
    """Raises:
    ConfigError: ``--rows`` is none of at least 1.
    """
    if rows < 1:
        raise ConfigError(f"--rows: {rows}: at least 1")


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


# ---- optimize

FIGURES = {
    "mean_cosine": "cosine",
    "tail_cosine": "p5",
    "into_index": "into its index",
    "own_index": "own index",
    "rank_correlation": "rank",
    "overlap": "overlap",
}
"""Figure of a feature → what it is called in the table."""


def _optimize(arguments: argparse.Namespace) -> int:
    from precompute.jobs.ops.optimize import optimize

    outcome = optimize(
        project_of(arguments),
        arguments.view,
        by=arguments.by,
        purpose=arguments.purpose,
        within_s=seconds_of(arguments.within, "--within"),
        announce=say,
    )
    return answer(arguments, outcome, describe_optimized(outcome))


def describe_optimized(outcome: Mapping[str, Any]) -> str:
    """Speed against agreement as a table, and how each student is used."""
    made = [line for line in outcome["students"] if line["refused"] is None]
    rows = [
        (
            *(
                "model",
                "rows/s",
                "speed",
                "batch p50 ms",
                "p95",
                "p99",
                "miss p50 ms",
                "p95",
                "p99",
            ),
            *("MiB", "made in", "held-out rows against the teacher", "as the view's model"),
        )
    ]
    for line in made:
        batch, miss, memory = line["batch_ms"], line["miss_ms"], line["memory_bytes"]
        rows.append(
            (
                line["name"],
                f"{line['rows_per_s']:,.0f}",
                f"{line['speed']:.2f}×",
                *(f"{batch[point]:.3g}" for point in ("p50", "p95", "p99")),
                *(f"{miss[point]:.2f}" for point in ("p50", "p95", "p99")),
                f"{memory / 2**20:,.0f}" if memory else "–",
                "–" if line["make_s"] is None else f"{line['make_s']:,.0f} s",
                _figures(line["accuracy"]),
                _verdict(line, outcome["picked"]),
            )
        )
    lines = [
        f"{outcome['view']}, snapshot {outcome['snapshot']}: {outcome['learned_rows']:,} rows to"
        f" learn from, {outcome['held_out_rows']:,} held out",
        *table(rows),
        *(
            f"  {line['name']}: not made: {line['refused']}"
            for line in outcome["students"]
            if line["refused"] is not None
        ),
    ]
    lines += [
        f"  {one['name']}: rejects {rows:,} of the judged rows; no figure counts them"
        for one in made[1:]
        if (rows := one["rejected_rows"])
    ]
    behind = next((one for one in made if one["name"] == outcome["behind_misses"]), None)
    if behind is not None:
        lines.append(
            f"behind misses: fallback: {{enabled: true, model: {behind['path']}}}, which answers"
            f" with {_agreement(behind)}"
        )
    elif len(made) > 1:
        lines.append(
            "behind misses: no student answers in half the teacher's time and promises an agreement"
            " above 0.5"
        )
    if outcome["picked"] is None:
        lines.append("no student is both faster and within the view's accuracy")
    lines.append(
        f"students lie in {outcome['folder']}, each with a card; the table is in {outcome['file']}"
    )
    return "\n".join(lines)


def _figures(accuracy: Mapping[str, Mapping[str, float]]) -> str:
    shown = []
    for name, figures in list(accuracy.items())[:4]:
        found = [f"{word} {figures[key]:.3f}" for key, word in FIGURES.items() if key in figures]
        shown.append(f"{name}: " * (len(accuracy) > 1) + " · ".join(found))
    more = len(accuracy) - len(shown)
    return "; ".join(shown) + (f"; and {more} features more" if more > 0 else "") or "–"


def _agreement(line: Mapping[str, Any]) -> str:
    name, value = min(line["agreement"].items(), key=lambda pair: float(pair[1]))
    return f"an agreement of {value:.3f} ({name})"


def _verdict(line: Mapping[str, Any], picked: str | None) -> str:
    if line["by"] is None:
        return "teacher"
    if line["beyond"]:
        return f"refused: {line['beyond']}"
    return "picked" if line["name"] == picked else "within its accuracy"
