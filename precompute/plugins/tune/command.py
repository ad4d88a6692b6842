"""Command ``tune``: what it measured, as a table."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from precompute.jobs.commands.command import (
    Commands,
    add_partition,
    answer,
    partition_of,
    project_of,
    seconds_of,
)
from precompute.jobs.commands.measure import check_rows
from precompute.jobs.run.command_process import say
from precompute.store.doors import COMMANDS


def add(commands: Commands) -> None:
    """The command ``tune``."""
    tune = commands.add(
        "tune",
        _tune,
        COMMANDS.what("tune"),
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


def _tune(arguments: argparse.Namespace) -> int:
    from precompute.plugins.tune.tune import tune

    project = project_of(arguments)
    check_rows(arguments.rows)
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
