"""Backfill: the partitions of a view over a range of data time."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from precompute.jobs.commands.command import DONE, FAILED, REJECTED, Commands, project_of
from precompute.store.errors import ConfigError
from precompute.store.record import plain

if TYPE_CHECKING:
    from precompute.jobs.schedule.backfill_plan import PartitionPlan
    from precompute.jobs.schedule.backfill_state import Options

_DESCRIPTION = """Compute the partitions of a view over a range of data time, each in a process of its own; then publish the newest
snapshot that may be, unless what is live is newer.

--reprocess  missing  partitions that have no snapshot: never run, or interrupted
             failed   also those whose last run failed, or had too many rows rejected
             stale    also those computed by another model, SQL or features than configured now, or (--check-inputs) from other rows
             all      every one; each computes what changed, or all rows with --full

SIGINT or SIGTERM cancels a backfill, for good. One that was killed, or in which something failed, goes on with --resume.
Exit status: 0 all done; 1 a partition or publishing failed; 3 only refused ones are left."""

_BEGUN_WITH = ("first", "last", "reprocess", "check_inputs", "full", "dry_run", "backwards", "no_publish")
"""What a backfill is begun with, and cannot be given again when it is resumed."""


def add(commands: Commands) -> None:
    """The command ``backfill``."""
    command = commands.add("backfill", _backfill, "compute the partitions of a view over a range of data time", view=True)
    command.formatter_class, command.description = argparse.RawDescriptionHelpFormatter, _DESCRIPTION
    command.add_argument(
        "--from", dest="first", metavar="TIME", help="begin with the partition that contains it, as 2026-01-01 (UTC)"
    )
    command.add_argument(
        "--to", dest="last", metavar="TIME", help="end with the partition that contains it, which is included too"
    )
    command.add_argument("--reprocess", choices=("missing", "failed", "stale", "all"), help="which partitions (default: missing)")
    command.add_argument(
        "--check-inputs", action="store_true", help="read every source to tell stale ones: as slow as reading them is"
    )
    command.add_argument("--full", action="store_true", help="compute every row of them, changed or not")
    command.add_argument("--dry-run", action="store_true", help="only tell what would be done, why, and how long it takes")
    command.add_argument("--max-active", type=int, metavar="N", help="how many at once (default: 1)")
    command.add_argument("--backwards", action="store_true", help="begin with the newest")
    command.add_argument("--no-publish", action="store_true", help="leave what is live as it is")
    command.add_argument("--resume", metavar="ID", help="go on with this one; all but --max-active is as it was")


def _backfill(arguments: argparse.Namespace) -> int:
    from precompute.jobs.schedule.backfill import resume_backfill, run_backfill
    from precompute.jobs.schedule.backfill_plan import plan_backfill, plans_json, range_of

    project, name = project_of(arguments), arguments.view
    if arguments.max_active is not None and arguments.max_active < 1:
        raise ConfigError(f"--max-active: {arguments.max_active}: at least 1 at once")
    tell: Callable[[str], None] = (lambda _: None) if arguments.json else (lambda line: print(line, flush=True))
    if arguments.resume is not None:
        _check_resumed(arguments)
        state = resume_backfill(project, name, arguments.resume, max_active=arguments.max_active, announce=tell)
    else:
        options = _options(arguments)
        if arguments.dry_run:
            first, last = range_of(options.first, options.last)
            plans = plan_backfill(project, name, first, last, reprocess=options.reprocess, check_inputs=options.check_inputs)
            print(json.dumps(plans_json(plans, options)) if arguments.json else describe_plans(plans, options))
            return DONE
        state = run_backfill(project, name, options, announce=tell)
    if arguments.json:
        print(json.dumps(plain(state)))
    if state.signal is not None:
        return 128 + state.signal
    return DONE if state.status == "done" else REJECTED if state.only_refused else FAILED


def _check_resumed(arguments: argparse.Namespace) -> None:
    again = [option for option in _BEGUN_WITH if getattr(arguments, option)]
    if again:
        option = {"first": "from", "last": "to"}.get(again[0], again[0]).replace("_", "-")
        raise ConfigError(
            f"--{option}: a resumed backfill does what it was begun with; leave it out, or begin anew without --resume"
        )


def _options(arguments: argparse.Namespace) -> Options:
    from precompute.jobs.schedule.backfill_state import Options

    if arguments.first is None or arguments.last is None:
        raise ConfigError("which partitions? Give --from and --to, as in --from 2026-01-01 --to 2026-01-31; or --resume ID")
    return Options(
        first=arguments.first,
        last=arguments.last,
        reprocess=arguments.reprocess or "missing",
        check_inputs=arguments.check_inputs,
        full=arguments.full,
        max_active=arguments.max_active or 1,
        backwards=arguments.backwards,
        publish=not arguments.no_publish,
    )


def describe_plans(plans: Sequence[PartitionPlan], options: Options) -> str:
    """A dry run, for people: a line for each partition, and the totals."""
    from precompute.jobs.schedule.backfill_plan import plans_json

    def measures(rows: float | None, seconds: float | None, size_bytes: float | None) -> tuple[str, str, str]:
        return (
            "unknown" if rows is None else f"{rows:,.0f}",
            "unknown" if seconds is None else f"{seconds:,.1f}",
            "unknown" if size_bytes is None else f"{size_bytes / 1e6:,.3f}",
        )

    table = [("partition", "action", "rows", "seconds", "MB", "why")]
    for plan in reversed(plans) if options.backwards else plans:
        shown = measures(plan.rows, plan.seconds, plan.size_bytes) if plan.action == "run" else ("", "", "")
        table.append((str(plan.partition).partition("/")[0], plan.action, *shown, f"{plan.why}: {plan.reason}"))
    widths = [max(len(row[column]) for row in table) for column in range(5)]
    lines = [
        "  ".join(cell.rjust(w) if 2 <= n <= 4 else cell.ljust(w) for n, (cell, w) in enumerate(zip(row, widths, strict=False)))
        + f"  {row[5]}"
        for row in table
    ]
    all_of = plans_json(plans, options)
    rows, seconds, size = measures(all_of["rows"], all_of["seconds"], all_of["size_bytes"])
    about = f", about {rows} rows, {seconds} s with {options.max_active} at once, {size} MB" if all_of["run"] else ""
    if all_of["run"] and all_of["rows"] is None:
        about = ", for how long is unknown: nothing was measured yet"
    return "\n".join([*lines, "", f"{all_of['run']} to run{about}; {all_of['skip']} to skip, {all_of['wait']} to wait for"])
