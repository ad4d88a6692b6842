"""Measure: ``profile``, which computes a sample of a view."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from precompute.jobs.commands.command import (
    Commands,
    add_partition,
    answer,
    partition_of,
    project_of,
)
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
