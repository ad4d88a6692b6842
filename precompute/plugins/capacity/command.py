"""Command ``plan``: what a run will take, by what was measured of a view's runs."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from precompute.jobs.commands.command import Commands, answer, project_of, table
from precompute.store.doors import COMMANDS
from precompute.store.errors import ConfigError
from precompute.store.times import duration


def add(commands: Commands) -> None:
    """The command ``plan``."""
    plan = commands.add(
        "plan",
        _plan,
        COMMANDS.what("plan"),
        view=True,
        only=True,
        reads=True,
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
    from precompute.plugins.capacity.plan import plan

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
    from precompute.plugins.capacity.plan import CROWDED, FAR, OF_DUCKDB, SPILLED

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
