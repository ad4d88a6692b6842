"""Run, materialize, publish: one run of a view, or a part of it."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from precompute.jobs.commands.command import DONE, FAILED, Commands, add_partition, partition_of, project_of
from precompute.jobs.process.progress import progress_for
from precompute.jobs.process.spared_pandas import spare_pandas
from precompute.store.errors import ConfigError, PrecomputeError

if TYPE_CHECKING:
    from precompute.store.offline.runs import Report


def add(commands: Commands) -> None:
    """The commands ``run``, ``materialize`` and ``publish``."""
    run = commands.add("run", _run, "materialize a view and publish it", view=True)
    materialize = commands.add(
        "materialize", _materialize, "compute a view into a new snapshot, without publishing it", view=True
    )
    materialize.add_argument("--dry-run", action="store_true", help="only tell how many rows would be computed, and why")
    for command in (run, materialize):
        command.add_argument("--full", action="store_true", help="compute every row, changed or not")
        command.add_argument(
            "--retry-rejected", action="store_true", help="compute rejected rows again, though their input is the same"
        )
        add_partition(command)
        command.add_argument("--due", help=argparse.SUPPRESS)
        command.add_argument("--backfill", help=argparse.SUPPRESS)
    materialize.add_argument("--partitions", help=argparse.SUPPRESS)
    publish = commands.add("publish", _run, "load a snapshot into the online store and make it live", view=True)
    publish.add_argument("--snapshot", type=int, metavar="N", help="which one (default: the newest that may be published)")
    publish.add_argument(
        "--take-over", action="store_true", help="publish it, though another project publishes the view in the online store"
    )
    publish.add_argument("--reload", action="store_true", help="load it again, though the online store seems to hold it")
    for command in (run, materialize, publish):
        command.add_argument(
            "--accept",
            action="append",
            default=[],
            metavar="GATE",
            help="publish although this gate refuses, by the name that it gave",
        )


def _run(arguments: argparse.Namespace) -> int:
    # torch and faiss are loaded only by the commands that need them: `status` takes 0.8 s in all
    from precompute.jobs.pipeline.run import run_view
    from precompute.jobs.process.job import RunOptions
    from precompute.registry import BUILT_IN

    project = project_of(arguments)
    view = project.views.get(arguments.view)
    if arguments.own_process and view is not None and view.model.use in BUILT_IN:
        spare_pandas()
    _check_gates(arguments.accept)
    schedule = project.schedules().get(arguments.view)
    asked = ("command", "accept", "full", "retry_rejected", "due", "backfill", "reload", "take_over")
    options = RunOptions(
        **{name: getattr(arguments, name) for name in asked if hasattr(arguments, name)},
        number=getattr(arguments, "snapshot", None),
        partition=partition_of(project, arguments),
        deadline_s=None if schedule is None else schedule.deadline_s,
    )
    run_view(project, arguments.view, progress_for(arguments.json), options, finished=tell_report(arguments))
    return DONE


def _materialize(arguments: argparse.Namespace) -> int:
    if arguments.partitions is not None:
        return _materialize_each(arguments)
    if not arguments.dry_run:
        return _run(arguments)
    from precompute.jobs.pipeline.run import plan_view
    from precompute.jobs.process.job import RunOptions

    project = project_of(arguments)
    partition = partition_of(project, arguments)
    options = RunOptions(partition=partition, full=arguments.full, retry_rejected=arguments.retry_rejected)
    plan = plan_view(project, arguments.view, options)
    print(json.dumps(plan.to_json()) if arguments.json else f"{arguments.view}: {plan}")
    return DONE


def _materialize_each(arguments: argparse.Namespace) -> int:
    """Compute some partitions, one after the other, with the model loaded once: a process of a backfill, which reads of each what its run's report says. One
    that fails keeps none of the others; once the backfill is gone none is begun."""
    from precompute.jobs.pipeline.run import run_view
    from precompute.jobs.process.job import RunOptions
    from precompute.jobs.rows.open_view import SharedModels

    project, parent, status = project_of(arguments), os.getppid(), DONE
    models = SharedModels(project.home)
    for text in arguments.partitions.split(","):
        if os.getppid() != parent:
            break
        arguments.partition = text
        options = RunOptions(
            command="materialize", full=arguments.full, backfill=arguments.backfill, partition=partition_of(project, arguments)
        )
        try:
            run_view(project, arguments.view, progress_for(True), options, load=models)
        except PrecomputeError as exc:
            print(f"precompute: {exc}", file=sys.stderr)
            status = FAILED
    return status


def _check_gates(names: Sequence[str]) -> None:
    """Raises:
    ConfigError: there is no gate of such a name.
    """
    from precompute.jobs.config.view import GATES

    for name in names:
        if name not in GATES:
            raise ConfigError(f"--accept {name}: there is no such gate; it is one of {', '.join(GATES)}")


def tell_report(arguments: argparse.Namespace) -> Callable[[Report], None]:
    """What a run calls with its report once it is over."""
    from precompute.store.record import plain

    def tell(report: Report) -> None:
        if arguments.json:
            # of a failed run too: that is when a program needs it
            print(json.dumps(plain(report)))
        elif report.error is None:
            print(describe_report(report))

    return tell


def describe_report(report: Report) -> str:
    """A run's report in two lines, three with what the engine did."""
    from precompute.jobs.process.report import engine_line

    head = f"{report.view}: {report.status}, snapshot {report.snapshot}"
    if report.command == "rollback" and report.status == "published":
        head = f"{report.view}: rolled back, snapshot {report.snapshot} is live"
    head += f", partition {report.partition}" if report.partition else ""
    if report.counts:
        counts = report.counts
        head += f", {counts['written'] + counts['unchanged']:,} of {counts['source']:,} rows"
        told = [("unchanged", counts["unchanged"]), ("removed", counts["removed"]), ("rejected", counts["rejected"])]
        told += [("null", counts.get("nulls", 0)), ("resumed", report.resumed)]
        shown = ", ".join(f"{n:,} {what}" for what, n in told if n)
        head += f" ({shown})" if shown else ""
        head += f", {report.rows_per_s:,.0f} rows/s" if report.rows_per_s else ""
    refused = [f"  gate {v.gate}: {v.message} (limit {v.limit:g})" for v in report.gates if not v.passed]
    refused += [f"  engine: {engine}"] if (engine := engine_line(report.engine)) else []
    stages = " · ".join(f"{name} {seconds:.2f}" for name, seconds in report.stages_s.items())
    return "\n".join([f"{head}, {report.seconds:.1f} s", f"  seconds: {stages}", *refused])
