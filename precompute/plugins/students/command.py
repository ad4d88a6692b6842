"""Command ``optimize``: makes cheaper models behind a view, and shows them beside its own as a
table."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from precompute.jobs.commands.command import Commands, answer, project_of, seconds_of, table
from precompute.jobs.run.command_process import say
from precompute.store.doors import COMMANDS


def add(commands: Commands) -> None:
    """The command ``optimize``."""
    optimize = commands.add(
        "optimize",
        _optimize,
        COMMANDS.what("optimize"),
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
    from precompute.plugins.students.optimize import optimize

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
