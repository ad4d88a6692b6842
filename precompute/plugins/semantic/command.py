"""Command ``thresholds``: what each threshold saves and costs, as a table, and the one that is
suggested."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from precompute.jobs.commands.command import Commands, answer, project_of
from precompute.jobs.commands.measure import check_rows
from precompute.store.doors import COMMANDS
from precompute.store.errors import ConfigError


def add(commands: Commands) -> None:
    """The command ``thresholds``."""
    thresholds = commands.add(
        "thresholds", _thresholds, COMMANDS.what("thresholds"), view=True, only=True
    )
    thresholds.option(
        "--by", "VIEW", "embeds the same text (default: the one that semantic_cache names)"
    )
    thresholds.option("--rows", "N", "size of the sample (default: 1000)", type=int, default=1000)
    thresholds.option(
        "--agreement",
        "SHARE",
        "of the answers that must be right (default: 0.95)",
        type=float,
        default=0.95,
    )


def _thresholds(arguments: argparse.Namespace) -> int:
    from precompute.plugins.semantic.thresholds import thresholds

    project = project_of(arguments)
    check_rows(arguments.rows)
    if not 0 < arguments.agreement < 1:
        raise ConfigError(f"--agreement: {arguments.agreement:g}: between 0 and 1")
    measured = thresholds(
        project, arguments.view, by=arguments.by, rows=arguments.rows, agreement=arguments.agreement
    )
    return answer(arguments, measured, describe_thresholds(measured))


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
