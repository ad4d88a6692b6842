"""Run: the commands ``run``, ``materialize``, ``publish`` and ``backfill``, of one view or several
by selectors; and ``graph``, which view depends on which."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from precompute.jobs.commands.command import (
    DONE,
    FAILED,
    REJECTED,
    Commands,
    Parser,
    add_partition,
    answer,
    partition_of,
    project_of,
    table,
    with_history,
)
from precompute.jobs.run.command_process import (
    avoid_importing_pandas,
    progress_for,
    report_error,
    say,
    show,
)
from precompute.store.disk.record import plain
from precompute.store.errors import ConfigError, PrecomputeError

if TYPE_CHECKING:
    from precompute.jobs.config.project import Project
    from precompute.jobs.schedule.backfill_plan import Options, PartitionPlan
    from precompute.store.offline.runs import Report


def add(commands: Commands) -> None:
    """The commands ``run``, ``materialize`` and ``publish``."""
    run = commands.add(
        "run",
        _run,
        "materialize a view and publish it, or several in the order of what depends on what",
    )
    add_selection(run)
    materialize = commands.add(
        "materialize",
        _materialize,
        "compute a view into a new snapshot, without publishing it",
        view=True,
    )
    materialize.flag("--dry-run", "only report how many rows would be computed, and why")
    for command in (run, materialize):
        command.flag("--full", "compute every row, changed or not")
        command.flag(
            "--retry-rejected", "compute rejected rows again, though their input is the same"
        )
        add_partition(command)
        add_expect(command)
        command.add_argument("--due", help=argparse.SUPPRESS)
        command.add_argument("--root", help=argparse.SUPPRESS)
        command.add_argument("--backfill", help=argparse.SUPPRESS)
    materialize.add_argument("--live-before", type=int, help=argparse.SUPPRESS)
    materialize.add_argument("--partitions", help=argparse.SUPPRESS)
    materialize.add_argument("--in-order", action="store_true", help=argparse.SUPPRESS)
    publish = commands.add(
        "publish", _run, "load a snapshot into the online store and make it live", view=True
    )
    publish.option(
        "--snapshot", "N", "which one (default: the newest that may be published)", type=int
    )
    publish.flag("--reload", "load it again, though the online store seems to hold it")
    for command in (run, publish):
        command.flag(
            "--take-over",
            "publish it, though another project publishes the view in the online store",
        )
    for command in (run, materialize, publish):
        command.option(
            "--accept",
            "GATE",
            "publish although this gate refuses, by the name that it gave",
            action="append",
            default=[],
        )


def add_expect(command: Parser) -> None:
    """The option by which a change is announced."""
    command.option(
        "--expect",
        "GATES",
        "announce a change: these gates, as moved,shape, warn this time and refuse nothing",
        action="append",
        default=[],
    )


def _expected(arguments: argparse.Namespace) -> tuple[str, ...]:
    """The gates that ``--expect`` names.

    Raises:
        ConfigError: one is unknown, or stays whatever is announced.
    """
    from precompute.jobs.config.gates import check_announced

    given = [name.strip() for text in arguments.expect for name in text.split(",")]
    return check_announced([name for name in given if name], "--expect")


def _run(arguments: argparse.Namespace) -> int:
    if not is_one(arguments):
        return run_several(arguments)
    # torch and faiss are loaded only by the commands that need them: `status` takes 0.8 s in all
    from precompute.jobs.config.gates import check_gates
    from precompute.jobs.run.rows.plan import RunOptions
    from precompute.jobs.run.run_view import run_view
    from precompute.registry import is_built_in

    project = project_of(arguments)
    view = project.views.get(arguments.view)
    if arguments.own_process and view is not None and is_built_in(view.model.use):
        avoid_importing_pandas()
    check_gates(arguments.accept, "--accept")
    schedule = project.schedules().get(arguments.view)
    by_scheduler = getattr(arguments, "due", None) is not None
    requested = (
        "command",
        "accept",
        "full",
        "retry_rejected",
        "due",
        "root",
        "backfill",
        "snapshot",
        "reload",
        "take_over",
    )
    options = RunOptions(
        **{name: getattr(arguments, name) for name in requested if hasattr(arguments, name)},
        partition=partition_of(project, arguments),
        expect=_expected(arguments) if "expect" in arguments else (),
        # one that the scheduler began has its timer since its first line
        deadline_s=None if schedule is None or by_scheduler else schedule.deadline_s,
    )
    run_view(
        project,
        arguments.view,
        progress_for(arguments.json),
        options,
        finished=reporting(arguments),
    )
    return DONE


def _materialize(arguments: argparse.Namespace) -> int:
    if arguments.partitions is not None:
        return _materialize_each(arguments)
    if not arguments.dry_run:
        return _run(arguments)
    from precompute.jobs.run.rows.plan import RunOptions
    from precompute.jobs.run.run_view import plan_view

    project = project_of(arguments)
    partition = partition_of(project, arguments)
    options = RunOptions(
        partition=partition, full=arguments.full, retry_rejected=arguments.retry_rejected
    )
    plan = plan_view(project, arguments.view, options)
    return answer(
        arguments, plan.to_json(), with_history(f"{arguments.view}: {plan}", arguments.view)
    )


def _materialize_each(arguments: argparse.Namespace) -> int:
    """Compute some partitions, one after the other, with the model loaded once: a process of a
    backfill, which reads of each what its run's report says. One that fails does not stop the
    others; once the backfill is gone none is begun."""
    from precompute.jobs.run.rows.open_model import SharedModels
    from precompute.jobs.run.rows.plan import RunOptions
    from precompute.jobs.run.run_view import run_view

    project, parent, status = project_of(arguments), os.getppid(), DONE
    models = SharedModels(project.home)
    for text in arguments.partitions.split(","):
        if os.getppid() != parent:
            break
        arguments.partition = text
        options = RunOptions(
            command="materialize",
            full=arguments.full,
            accept=arguments.accept,
            expect=_expected(arguments),
            backfill=arguments.backfill,
            live_before=arguments.live_before,
            in_order=arguments.in_order,
            partition=partition_of(project, arguments),
        )
        ended: list[Report] = []
        try:
            run_view(
                project,
                arguments.view,
                progress_for(True),
                options,
                finished=ended.append,
                load=models,
            )
        except PrecomputeError as exc:
            report_error(str(exc))
            status = FAILED
            # one that never began is tried again, and those after it are compared with it then
            arguments.in_order &= bool(ended)
    return status


def reporting(arguments: argparse.Namespace) -> Callable[[Report], None]:
    """The function that a run calls with its report once it is over."""

    def print_report(report: Report) -> None:
        if arguments.json:
            # of a failed run too: that is when a program needs it
            show(json.dumps(plain(report)))
            arguments.reported = True
            return
        if report.error is None:
            print(describe_report(report))
        # of a failed run too: what changed in a model's code is why, perhaps
        for text in report.attention:
            say(f"{report.view}: {text}")
        if report.error is None:
            print(f"  shown by: precompute log {report.run} · precompute history {report.view}")
            if report.held is not None:
                print(f"{report.view}: {report.held}")

    return print_report


def describe_report(report: Report) -> str:
    """A run's report in two lines, three with what the engine did."""
    from precompute.jobs.run.report import engine_line

    head = f"{report.view}: {report.status}, snapshot {report.snapshot}"
    if report.command == "rollback" and report.status == "published":
        head = f"{report.view}: rolled back, snapshot {report.snapshot} is live"
    by_hand = report.command in ("publish", "resume")
    head += f" ({report.plan})" if by_hand and report.plan else ""
    head += f", partition {report.partition}" if report.partition else ""
    if report.counts:
        counts = report.counts
        head += f", {counts['written'] + counts['unchanged']:,} of {counts['source']:,} rows"
        counted = [
            ("unchanged", counts["unchanged"]),
            ("removed", counts["removed"]),
            ("rejected", counts["rejected"]),
        ]
        counted += [("null", counts.get("nulls", 0)), ("resumed", report.resumed)]
        shown = ", ".join(f"{n:,} {what}" for what, n in counted if n)
        head += f" ({shown})" if shown else ""
        head += f", {report.rows_per_s:,.0f} rows/s" if report.rows_per_s else ""
    refused = [
        f"  gate {v.gate}: {v.message}" + ("" if v.figures else f" (limit {v.limit:g})")
        for v in report.gates
        if not v.passed
    ]
    refused += announced_lines(report)
    refused += [f"  library: {report.library.said}"] if report.library is not None else []
    refused += [f"  engine: {engine}"] if (engine := engine_line(report.engine)) else []
    stages = " · ".join(f"{name} {seconds:.2f}" for name, seconds in report.stages_s.items())
    return "\n".join([f"{head}, {report.seconds:.1f} s", f"  seconds: {stages}", *refused])


def announced_lines(report: Report) -> list[str]:
    """A line for each gate that warned."""
    told = f"announced ({report.announced})"
    if not report.announced:
        told = "told, since what it is compared with was announced, or is of another recipe"
    return [
        f"  {told}: {verdict.gate}: {verdict.message} – {report.status}"
        for verdict in report.gates
        if verdict.warned
    ]


_DESCRIPTION = """Compute the partitions of a view over a range of data time, each in a process of its own; then publish the newest
snapshot that may be, unless what is live is newer.

--reprocess  missing  partitions that have no snapshot: never run, or interrupted
             failed   also those whose last run failed, or had too many rows rejected
             refused  also those that a gate refused: without other rows they are judged again only, by the limits of now
             stale    also those computed by another model, SQL or features than configured now, or (--check-inputs) from other rows
             all      every one; each computes what changed, or all rows with --full

A partition is judged alone, beside its own earlier snapshot, and beside the partitions before it in data time, once all of these are there:
never beside what went live meanwhile. So with --backwards nothing goes live before the oldest is there. What a gate refused, or what failed before, is not done, also where this backfill leaves it as it is.
SIGINT or SIGTERM cancels a backfill, for good. One that was killed, or in which something failed, goes on with --resume.
Exit status: 0 all done; 1 a partition or publishing failed; 3 only refused ones are left."""  # noqa: E501

_BEGUN_WITH = (
    "first",
    "last",
    "reprocess",
    "check_inputs",
    "full",
    "dry_run",
    "backwards",
    "no_publish",
    "accept",
    "expect",
)
"""What a backfill is begun with, and cannot be given again when it is resumed."""


def add_backfill(commands: Commands) -> None:
    """The command ``backfill``."""
    command = commands.add(
        "backfill",
        _backfill,
        "compute the partitions of a view over a range of data time",
        view=True,
    )
    command.formatter_class, command.description = (
        argparse.RawDescriptionHelpFormatter,
        _DESCRIPTION,
    )
    command.option(
        "--from",
        "TIME",
        "begin with the partition that contains it, as 2026-01-01 (UTC)",
        dest="first",
    )
    command.option(
        "--to",
        "TIME",
        "end with the partition that contains it, which is included too",
        dest="last",
    )
    command.add_argument(
        "--reprocess",
        choices=("missing", "failed", "refused", "stale", "all"),
        help="which partitions (default: missing)",
    )
    command.flag(
        "--check-inputs", "read every source to tell stale ones: as slow as reading them is"
    )
    command.flag("--full", "compute every row of them, changed or not")
    command.flag("--dry-run", "only report what would be done, why, and how long it takes")
    command.option("--max-active", "N", "how many at once (default: 1)", type=int)
    command.flag("--backwards", "begin with the newest")
    command.flag("--no-publish", "leave what is live as it is")
    command.option(
        "--accept",
        "GATE",
        "count what this gate refuses as done, by its name; may be given again",
        action="append",
        default=[],
    )
    add_expect(command)
    command.option("--resume", "ID", "go on with this one; all but --max-active is as it was")


def _backfill(arguments: argparse.Namespace) -> int:
    from precompute.jobs.schedule.backfill import resume_backfill, run_backfill
    from precompute.jobs.schedule.backfill_plan import plan_backfill, range_of

    project, name = project_of(arguments), arguments.view
    if arguments.max_active is not None and arguments.max_active < 1:
        raise ConfigError(f"--max-active: {arguments.max_active}: at least 1 at once")
    announce: Callable[[str], None] = (
        (lambda _: None) if arguments.json else (lambda line: print(line, flush=True))
    )
    if arguments.resume is not None:
        _check_resumed(arguments)
        state = resume_backfill(
            project, name, arguments.resume, max_active=arguments.max_active, announce=announce
        )
    else:
        options = _options(arguments)
        if arguments.dry_run:
            first, last = range_of(options.first, options.last)
            plans = plan_backfill(
                project,
                name,
                first,
                last,
                reprocess=options.reprocess,
                check_inputs=options.check_inputs,
            )
            return answer(arguments, plans_json(plans, options), describe_plans(plans, options))
        state = run_backfill(project, name, options, announce=announce)
    if arguments.json:
        show(json.dumps(plain(state)))
    if state.signal is not None:
        return 128 + state.signal
    return DONE if state.status == "done" else REJECTED if state.only_refused else FAILED


def _check_resumed(arguments: argparse.Namespace) -> None:
    again = [option for option in _BEGUN_WITH if getattr(arguments, option)]
    if again:
        option = {"first": "from", "last": "to"}.get(again[0], again[0]).replace("_", "-")
        raise ConfigError(
            f"--{option}: a resumed backfill does what it was begun with; leave it out, or begin"
            " again without --resume"
        )


def _options(arguments: argparse.Namespace) -> Options:
    from precompute.jobs.config.gates import check_gates
    from precompute.jobs.schedule.backfill_plan import Options

    if arguments.first is None or arguments.last is None:
        raise ConfigError(
            "which partitions? Give --from and --to, as in --from 2026-01-01 --to 2026-01-31; or"
            " --resume ID"
        )
    return Options(
        first=arguments.first,
        last=arguments.last,
        reprocess=arguments.reprocess or "missing",
        check_inputs=arguments.check_inputs,
        full=arguments.full,
        max_active=arguments.max_active or 1,
        backwards=arguments.backwards,
        publish=not arguments.no_publish,
        accept=tuple(check_gates(arguments.accept, "--accept")),
        expect=_expected(arguments),
    )


def plans_json(plans: Sequence[PartitionPlan], options: Options) -> dict[str, Any]:
    """A dry run, for programs: each partition, and the totals of those that would run; None where
    nothing was measured yet."""
    run = [plan for plan in plans if plan.action == "run"]

    def total(values: Sequence[float | None]) -> float | None:
        measured = [value for value in values if value is not None]
        return sum(measured) if len(measured) == len(values) else None

    seconds = total([plan.seconds for plan in run])
    return {
        "partitions": [
            plan.to_json() for plan in (reversed(plans) if options.backwards else plans)
        ],
        "run": len(run),
        "skip": sum(plan.action == "skip" for plan in plans),
        "wait": sum(plan.action == "wait" for plan in plans),
        "rows": total([plan.rows for plan in run]),
        "seconds": (
            None if seconds is None or not run else seconds / min(options.max_active, len(run))
        ),
        "size_bytes": total([plan.size_bytes for plan in run]),
        "max_active": options.max_active,
    }


def describe_plans(plans: Sequence[PartitionPlan], options: Options) -> str:
    """A dry run, for people: a line for each partition, and the totals."""

    def measures(
        rows: float | None, seconds: float | None, size_bytes: float | None
    ) -> tuple[str, str, str]:
        return (
            "unknown" if rows is None else f"{rows:,.0f}",
            "unknown" if seconds is None else f"{seconds:,.1f}",
            "unknown" if size_bytes is None else f"{size_bytes / 1e6:,.3f}",
        )

    rows_of = [("partition", "action", "rows", "seconds", "MB", "why")]
    for plan in reversed(plans) if options.backwards else plans:
        shown = (
            measures(plan.rows, plan.seconds, plan.size_bytes)
            if plan.action == "run"
            else ("", "", "")
        )
        rows_of.append(
            (
                str(plan.partition).partition("/")[0],
                plan.action,
                *shown,
                f"{plan.why}: {plan.reason}",
            )
        )
    all_of = plans_json(plans, options)
    rows, seconds, size = measures(all_of["rows"], all_of["seconds"], all_of["size_bytes"])
    about = (
        f", about {rows} rows, {seconds} s with {options.max_active} at once, {size} MB"
        if all_of["run"]
        else ""
    )
    if all_of["run"] and all_of["rows"] is None:
        about = ", for how long is unknown: nothing was measured yet"
    return "\n".join(
        [
            *table(rows_of, right=(2, 3, 4)),
            "",
            (
                f"{all_of['run']} to run{about}; {all_of['skip']} to skip, {all_of['wait']} to"
                " wait for"
            ),
        ]
    )


DESCRIPTION = """Materialize views and publish them.

VIEW    that one
VIEW+   it and what depends on it, in the order of `after` and live.<view>: see `precompute graph`
+VIEW   it and what it depends on
--all   every one; --stale and --failed leave of those that are named, or of all, the ones that need it, and what depends on them

Of several each has a process of its own; one that fails stops only what depends on it. Exit status is the worst of all: 2, then 1, 3, 0."""  # noqa: E501

_OF_ONE = ("accept", "expect", "partition", "due", "backfill", "take_over")
"""Options that make sense of one view alone."""


def add_selection(run: Parser) -> None:
    """What ``run`` takes beside the options of one view."""
    run.formatter_class, run.description = argparse.RawDescriptionHelpFormatter, DESCRIPTION
    run.option(
        "view", "VIEW", "which; VIEW+ and +VIEW take what depends on it, or it on, too", nargs="*"
    )
    run.flag("--all", "every view, each after those it depends on")
    run.flag(
        "--stale", "those that are not fresh, or whose inputs are newer, and what depends on them"
    )
    run.flag("--failed", "those whose last run went wrong or never began, and what depends on them")


def is_one(arguments: argparse.Namespace) -> bool:
    """Whether one view is named, and nothing else chooses; then ``arguments.view`` is its name."""
    if isinstance(arguments.view, str):
        return True
    several = arguments.all or arguments.stale or arguments.failed
    if (
        several
        or len(arguments.view) != 1
        or "+" in (arguments.view[0][:1], arguments.view[0][-1:])
    ):
        return False
    (arguments.view,) = arguments.view
    return True


def run_several(arguments: argparse.Namespace) -> int:
    """Run the views that are selected, with one report of all."""
    from precompute.jobs.ops.run_all import Selection, run_all, selected, summary

    project = project_of(arguments)
    if arguments.all and arguments.view:
        raise ConfigError(f"--all and {arguments.view[0]}: name views, or all of them")
    if not (arguments.view or arguments.all or arguments.stale or arguments.failed):
        raise ConfigError(
            f"run what? Name a view ({', '.join(project.names)}), or say --all, --stale or --failed"
        )
    if given := [f"--{name.replace('_', '-')}" for name in _OF_ONE if getattr(arguments, name)]:
        raise ConfigError(f"{given[0]} is of one view: run that one alone")
    options = [
        f"--{name.replace('_', '-')}"
        for name in ("full", "retry_rejected")
        if getattr(arguments, name)
    ]
    names, started = (
        selected(project, Selection(arguments.view, arguments.stale, arguments.failed)),
        time.monotonic(),
    )
    sys.stdout.flush()
    outcomes = run_all(
        project,
        names,
        options,
        output="captured" if arguments.json else "inherited",
        announce=(lambda _: None) if arguments.json else say,
    )
    report = summary(outcomes, time.monotonic() - started)
    answer(arguments, report, describe_summary(report))
    return int(report["exit_status"])


def describe_summary(report: Mapping[str, Any]) -> str:
    """:func:`precompute.jobs.ops.run_all.summary` as a table, for people."""
    if not report["views"]:
        return "nothing to run"
    rows = [("view", "status", "snapshot", "rows", "took", "")]
    for view in report["views"]:
        took = "–" if view["exit_status"] is None else f"{view['seconds']:,.1f} s"
        number = "–" if view["snapshot"] is None else str(view["snapshot"])
        shown = "–" if view["rows"] is None else f"{view['rows']:,}"
        rows.append((view["view"], view["status"], number, shown, took, view["error"] or ""))
    counts = ", ".join(f"{n} {status}" for status, n in report["counts"].items())
    lines = ["", *table(rows), f"{counts}, {report['seconds']:,.1f} s"]
    if failed := [view for view in report["views"] if view["exit_status"] not in (DONE, None)]:
        # of what never began no report says that it failed
        again = (
            "--failed"
            if all(view["run"] for view in failed)
            else " ".join(f"{view['view']}+" for view in failed)
        )
        lines.append(
            "once it is mended, what failed, and what waits for it, is run by: precompute run"
            f" {again}"
        )
    return "\n".join(lines)


def add_graph(commands: Commands) -> None:
    """The command ``graph``."""
    graph = commands.add(
        "graph",
        _graph,
        "which views depend on which, by their schedule and by what they read",
        reads=True,
    )
    graph.option(
        "view", "VIEW", "only these; VIEW+ and +VIEW as of `run` (default: all)", nargs="*"
    )
    graph.flag("--mermaid", "as a Mermaid flowchart, for a README or a wiki")


def _graph(arguments: argparse.Namespace) -> int:
    from precompute.jobs.schedule.dependencies import Dependencies

    project: Project = project_of(arguments)
    dependencies = Dependencies(project)
    chosen = dependencies.select(arguments.view or project.names)
    if arguments.json:
        found = dependencies.to_json()
        views = {name: found["views"][name] for name in chosen}
        show(json.dumps({"order": chosen, "views": views, "mermaid": dependencies.mermaid(chosen)}))
    else:
        print(dependencies.mermaid(chosen) if arguments.mermaid else dependencies.text(chosen))
    return DONE
