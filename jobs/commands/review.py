"""Review: the commands that show what happened to a view and what its snapshots hold (``history``,
``diff``, ``gates``, ``log``, ``export``), and what is live and needs attention (``status``,
``verify``)."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from precompute.jobs.commands.command import (
    DONE,
    FAILED,
    Commands,
    answer,
    project_of,
    show_checks,
    table,
    with_history,
)
from precompute.store.disk.record import plain
from precompute.store.doors import COMMANDS
from precompute.store.errors import ConfigError, did_you_mean
from precompute.store.times import duration, shown_time

if TYPE_CHECKING:
    from precompute.jobs.ops.gate_history import GateHistory
    from precompute.jobs.ops.history import SnapshotDiff
    from precompute.store.offline.runs import Report

SHOWN_EVENTS = 30
_BLOCKS, _DOTS = "▁▂▃▄▅▆▇█", ".:-=+*#%"


def add(commands: Commands) -> None:
    """The commands ``history``, ``diff``, ``gates``, ``log`` and ``export``."""
    history = commands.add(
        "history",
        _history,
        "what happened to a view: its snapshots, its runs, and what its log says",
        view=True,
        only=True,
        reads=True,
    )
    history.option(
        "--limit", "N", f"how many events (default: {SHOWN_EVENTS})", type=int, default=SHOWN_EVENTS
    )
    diff = commands.add(
        "diff",
        _diff,
        "two snapshots of a view: rows changed, added, gone; figures of each feature; the worst"
        " rows",
        view=True,
        only=True,
        reads=True,
    )
    diff.option(
        "first",
        "A",
        "see `precompute history VIEW` (default: what was live before the live one)",
        nargs="?",
        type=int,
    )
    diff.option("second", "B", "of another one (default: the live one)", nargs="?", type=int)
    gates = commands.add(
        "gates",
        _gates,
        "what a snapshot was judged by: each figure with its limit, and what it was in the nights"
        " before",
        view=True,
        only=True,
        reads=True,
    )
    gates.option("--feature", "NAME", "this feature alone")
    gates.option("--snapshot", "N", "another one than the newest", type=int)
    log = commands.add(
        "log",
        _log,
        "one run: what it did, stage by stage, its gates, what it rejected, and how it ended",
        reads=True,
    )
    log.option(
        "run",
        "RUN",
        "its id or the beginning of it, as `history` lists them; or a view, whose last run it"
        " is (default: the last of all)",
        nargs="?",
    )
    export = commands.add(
        "export",
        _export,
        "the live snapshot as one file, its deltas merged",
        view=True,
        only=True,
        reads=True,
    )
    export.option(
        "--to", "FILE", "ends with .parquet or .csv (default: VIEW-SNAPSHOT.parquet)", type=Path
    )
    export.option("--snapshot", "N", "another one than the live one", type=int)
    export.flag("--replace", "though there is such a file")


def _history(arguments: argparse.Namespace) -> int:
    from precompute.jobs.ops.history import history

    if arguments.limit < 1:
        raise ConfigError(f"--limit: {arguments.limit} is not at least 1")
    events = history(project_of(arguments), arguments.view, arguments.limit)
    return answer(arguments, events, describe_history(arguments.view, events, arguments.limit))


def describe_history(view: str, events: Sequence[Mapping[str, Any]], limit: int) -> str:
    """:func:`precompute.jobs.ops.history.history` as a table."""
    if not events:
        return f"{view}: nothing happened yet; run `precompute run {view}`"
    rows = [("at", "what", "")]
    for event in events:
        rows.append((shown_time(event["at"]), event["kind"], _EVENTS[event["kind"]](event)))
    more = ["", f"the newest {limit} of it; --limit N for more"] if len(events) == limit else []
    snapshots = [event for event in events if event["kind"] == "snapshot"]
    # the live one beside what was live before it, where both are among them
    both = [event for event in snapshots if event["live"] or event["previous"]]
    numbers = sorted(event["snapshot"] for event in (both if len(both) == 2 else snapshots[:2]))
    next_step = (
        [f"compare two snapshots: precompute diff {view} {numbers[0]} {numbers[1]}"]
        if len(numbers) == 2
        else []
    )
    return "\n".join([*table(rows), *more, *next_step])


def _snapshot_words(event: Mapping[str, Any]) -> str:
    if event["error"] is not None:
        return f"{event['snapshot']}: {event['error']}"
    kind = (
        event["kind_of_snapshot"]
        if event["kind_of_snapshot"] == "full"
        else f"{event['kind_of_snapshot']} of {event['parent']}"
    )
    words = [f"{event['snapshot']}: {kind}, {event['rows']:,} rows, model {event['model'][:12]}"]
    words += [f"partition {event['partition'].partition('/')[0]}"] if event["partition"] else []
    words += [event["library"]["said"]] if event["library"] else []
    words += [f"refused by {', '.join(event['refused_by'])}"] if event["refused_by"] else []
    words += [f"bad: {event['bad']}"] if event["bad"] else []
    return ", ".join([*words, *(mark for mark in ("live", "previous", "pinned") if event[mark])])


def _run_words(event: Mapping[str, Any]) -> str:
    number = "" if event["snapshot"] is None else f", snapshot {event['snapshot']}"
    error = "" if event["error"] is None else f": {event['error'][:120]}"
    return (
        f"{event['run']}  {event['command']} {event['status']}{number},"
        f" {_took(event['seconds'])}{error}"
    )


def _took(seconds: float | None) -> str:
    return f"{seconds:,.1f} s" if seconds else "–"


def _pointer_words(event: Mapping[str, Any]) -> str:
    times = f", the last of {event['publishings']} publishings" * (event["publishings"] > 1)
    return (
        f"to {'nothing' if event['snapshot'] is None else event['snapshot']}, epoch"
        f" {event['epoch']}, by {event['reason']} ({event['run']}){times}".replace(" ()", "")
        + (f"; held: {event['held']}" if event["held"] else "")
        + (f"; bad: {', '.join(map(str, event['marks']))}" if event["marks"] else "")
    )


def _event_words(event: Mapping[str, Any]) -> str:
    words = [event["event"]]
    words += [] if event["snapshot"] is None else [f"snapshot {event['snapshot']}"]
    words += [", ".join(event["gates"])] if event["gates"] else []
    words += [f"not bad any more: {', '.join(map(str, event['unmarked']))}"] * bool(
        event["unmarked"]
    )
    reason = f": {event['reason']}" if event["reason"] else ""
    return f"{' '.join(words)}, by {event['by']}{reason}"


_EVENTS = {
    "snapshot": _snapshot_words,
    "run": _run_words,
    "pointer": _pointer_words,
    "event": _event_words,
}


def _diff(arguments: argparse.Namespace) -> int:
    from precompute.jobs.ops.history import diff

    found = diff(project_of(arguments), arguments.view, arguments.first, arguments.second)
    return answer(arguments, found.to_json(), describe_diff(found))


def describe_diff(found: SnapshotDiff) -> str:
    """Two snapshots beside each other, for people."""
    first, second = found.first, found.second
    lines = [
        f"{found.view}: snapshot {first.number} ({shown_time(first.created_at)}) beside"
        f" {second.number} ({shown_time(second.created_at)})"
    ]
    lines.append(
        f"rows: {first.rows:,} → {second.rows:,}: {found.changed:,} changed, {found.added:,} added,"
        f" {found.gone:,} gone, {found.alike:,} alike"
    )
    if found.recomputed:
        lines[-1] += f" ({found.recomputed:,} of them computed again)"
    if first.model != second.model:
        lines.append(
            f"model: {first.model[:12]} → {second.model[:12]}: another fingerprint: vectors are of"
            " another space, and how far they are off says little"
        )
    lines += [
        f"feature {name}: only in {first.number}, or of another type" for name in found.only_first
    ]
    lines += [
        f"feature {name}: only in {second.number}, or of another type" for name in found.only_second
    ]
    rows = [("feature", "figure", str(first.number), str(second.number))]
    for name, feature in found.features.items():
        rows.append(
            (
                name,
                "changed rows",
                "",
                f"{feature.changed:,}"
                + (
                    f", off by {feature.mean:.3g} on average, {feature.most:.3g} at most"
                    if feature.changed
                    else ""
                ),
            )
        )
        # a share of nothing on both sides says nothing
        rows += [
            ("", line.words, *line.shown()) for line in feature.figures if line.first or line.second
        ]
    lines += ["", *table(rows)]
    if found.worst:
        worst = [("key", "feature", "off by", str(first.number), str(second.number))]
        worst += [
            (row.key, row.feature, f"{row.off:.3g}", _value(row.first), _value(row.second))
            for row in found.worst
        ]
        lines += [
            "",
            "the rows that are furthest off:",
            *table(worst),
            "",
            f"what a row was before: precompute explain {found.view} KEY",
        ]
    return "\n".join(lines)


def _value(value: Any) -> str:
    """A value in a few letters."""
    if isinstance(value, (list, tuple)):
        shown = ", ".join(_value(item) for item in value[:3])
        return f"[{shown}{', …' if len(value) > 3 else ''}]"
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 32 else f"{text[:31]}…"


def _gates(arguments: argparse.Namespace) -> int:
    from precompute.jobs.ops.gate_history import gate_history, judged_snapshot

    project, feature = project_of(arguments), arguments.feature
    store = project.stored(arguments.view)
    snapshot = judged_snapshot(store, arguments.snapshot)
    names = snapshot.view.feature_names
    if feature is not None and feature not in names:
        near = did_you_mean(feature, names) or f" (there are: {', '.join(names)})"
        raise ConfigError(
            f"--feature: snapshot {snapshot.number} of {store.name} has no feature"
            f" {feature!r}{near}"
        )
    found = gate_history(store, snapshot)
    if feature is not None:
        found = found._replace(figures=[one for one in found.figures if one.feature == feature])
    text = describe_gates(found, blocks=_has_blocks())
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    # of a letter that the terminal has not, a question mark
    text = text if _has_blocks() else text.replace("→", "->")
    text = text.encode(encoding, "replace").decode(encoding)
    return answer(arguments, found.to_json(), text)


def _has_blocks() -> bool:
    """Whether the terminal shows block characters."""
    try:
        _BLOCKS.encode(getattr(sys.stdout, "encoding", None) or "ascii")
    except UnicodeEncodeError:
        return False
    return os.environ.get("TERM") != "dumb"


def describe_gates(found: GateHistory, *, blocks: bool = True) -> str:
    """:func:`precompute.jobs.ops.gate_history.gate_history` as a table with a small picture of each
    figure: of ``blocks``, else of dots."""
    lines = [found.said()]
    if found.left_out:
        shown = ", ".join(f"{day} ({why})" for day, why in found.left_out[-5:])
        lines.append(f"left out, as they were announced: {shown}")
    for one in found.verdicts:
        if one.warned or not one.passed:
            state = "warns" if one.passed else "REFUSED"
            if state == "REFUSED" and one.gate in found.accepted:
                state = "REFUSED, and accepted"
            lines.append(f"{state}: {one.gate}: {one.message}")
    if not found.figures:
        return "\n".join(lines)
    nights = max(len(one.nights) for one in found.figures)
    head = f"{nights} nights, then tonight" if nights else ""
    rows = [("", "feature", "figure", "gate", "tonight", "passes", head)]
    for figure in found.figures:
        rows.append(
            (
                {"refused": "REFUSED", "warned": "warns"}.get(figure.state, ""),
                figure.feature,
                figure.words,
                ", ".join(figure.gates),
                f"{figure.value:.4g}",
                figure.passes(),
                _sparkline([v for _, v in figure.nights], figure.value, nights, blocks=blocks),
            )
        )
    return "\n".join([*lines, "", *table(rows, right=(4,))])


def _sparkline(before: Sequence[float], tonight: float, width: int, *, blocks: bool) -> str:
    """Values by the height of a character each, the newest to the right, tonight's apart."""
    steps = _BLOCKS if blocks else _DOTS
    low, high = min([*before, tonight]), max([*before, tonight])

    def step(value: float) -> str:
        share = (value - low) / (high - low) if high > low else 0.0
        return steps[min(len(steps) - 1, int(share * len(steps)))]

    return f"{''.join(map(step, before)).rjust(width)} {step(tonight)}" if before else ""


def _log(arguments: argparse.Namespace) -> int:
    from precompute.jobs.ops.history import find_run, rejections

    store, report = find_run(project_of(arguments), arguments.run)
    rejected = rejections(store, report)
    return answer(
        arguments, plain(report) | {"rejections": rejected}, "\n".join(_log_lines(report, rejected))
    )


def _log_lines(report: Report, rejected: Mapping[str, Any] | None) -> Iterator[str]:
    from precompute.jobs.run.judge.gate_table import TABLE
    from precompute.jobs.run.report import engine_line, usage_line

    number = "" if report.snapshot is None else f", snapshot {report.snapshot}"
    yield f"{report.run}: {report.command} of {report.view}, {report.status}{number}"
    facts = {
        "began": (
            f"{shown_time(report.started_at)}, took {_took(report.seconds)}"
            + (f", due {report.due}" if report.due else "")
        ),
        "partition": report.partition,
        "backfill": report.backfill,
        "plan": report.plan,
        "rows": ", ".join(f"{count:,} {what}" for what, count in report.counts.items() if count),
        "resumed": f"{report.resumed:,} rows of an interrupted run" if report.resumed else "",
        "model": report.model,
        "library": "" if report.library is None else report.library.said,
        "read": ", ".join(f"snapshot {used} of {name}" for name, used in report.inputs.items()),
        "engine": engine_line(report.engine),
        "took": usage_line(report),
        "index": (
            report.index
            and f"{report.index.get('kind')}, recall@10 ≥ {report.index.get('recall_bound', 0.0):.1%}"  # noqa: E501
        ),
        "late": ", ".join(report.late),
        "error": report.error,
        "attention": "; ".join(report.attention),
    }
    yield from (f"  {name.ljust(9)}  {value}" for name, value in facts.items() if value)
    longest = sorted(report.stages_s.items(), key=lambda item: -item[1])
    yield from (f"  {seconds:>9.3f} s  {stage}" for stage, seconds in longest if seconds >= 0.001)
    for verdict in report.gates:
        state = "warns" if verdict.warned else "passed" if verdict.passed else "REFUSED"
        # the message of a gate on features has both, of each that is beyond its limits
        numbers = f", {verdict.measured:.4g} of {verdict.limit:.4g}"
        numbers = "" if verdict.gate in TABLE else numbers
        said = f": {verdict.message}" if verdict.message else ""
        yield f"  gate {verdict.gate}: {state}{numbers}{said}"
    if rejected:
        yield f"  {rejected['rows']:,} rejected, in {rejected['path']}"
        yield from (f"    {count:,} × {reason}" for reason, count in rejected["reasons"].items())
    shown = [f"precompute history {report.view}"]
    if COMMANDS.is_here("report"):
        shown.append(f"precompute report {report.view} --run {report.run}")
    yield f"  see also: {' · '.join(shown)}"


def _export(arguments: argparse.Namespace) -> int:
    from precompute.jobs.ops.history import export

    done = export(
        project_of(arguments),
        arguments.view,
        arguments.to,
        number=arguments.snapshot,
        replace=arguments.replace,
    )
    text = (
        f"{done.path}: {done.rows:,} rows of snapshot {done.snapshot} of {done.view},"
        f" {done.size_bytes / 1e6:,.3f} MB"
    )
    return answer(arguments, plain(done), with_history(text, done.view))


def add_status(commands: Commands) -> None:
    """The command ``status``."""
    status = commands.add(
        "status",
        _status,
        "each view's live snapshot, its age against the TTL, and its last run",
        reads=True,
    )
    status.option("views", "VIEW", "which (default: all)", nargs="*")


def _status(arguments: argparse.Namespace) -> int:
    from precompute.jobs.ops.status import project_status

    lines = project_status(project_of(arguments), arguments.views)
    answer(arguments, lines, describe_status(lines))
    return FAILED if any(line["attention"] for line in lines) else DONE


def describe_status(lines: Sequence[Mapping[str, Any]]) -> str:
    """:func:`precompute.jobs.ops.status.project_status` as a table, and below it, what needs
    attention or is worth knowing."""
    from precompute.jobs.ops.status import notes

    below = [
        with_history(f"{line['view']}: {'; '.join(line['attention'])}", line["view"])
        for line in lines
        if line["attention"]
    ]
    below += [
        with_history(f"{line['view']}: {note}", line["view"])
        for line in lines
        for note in notes(line)
    ]
    below += [
        f"{line['view']}: {line['last_run']['error']}"
        for line in lines
        if line["last_run"] and line["last_run"]["error"]
    ]
    return "\n".join(table([_HEAD, *map(_cells, lines)]) + (["", *below] if below else []))


_HEAD = (
    "view",
    "status",
    "age",
    "ttl",
    "source",
    "snapshot",
    "rows",
    "coverage",
    "rejected",
    "gates",
    "online",
    "last run",
    "next due",
    "schedule",
)


def _cells(line: Mapping[str, Any]) -> tuple[str, ...]:
    """One for each of :data:`_HEAD`."""
    last = line["last_run"]
    return (
        line["view"],
        line["status"],
        duration(line["age_s"]),
        duration(line["ttl_s"]),
        duration(line["source_age_s"]),
        str(line["snapshot"] or "–"),
        "–" if line["rows"] is None else f"{line['rows']:,}",
        "–" if line["coverage"] is None else f"{line['coverage']:.1%}",
        "–" if line["rejected"] is None else f"{line['rejected']:,}",
        _nights(line["gates"]),
        {True: "yes", False: "NO", None: "–"}[line["online"]],
        "–" if last is None else last["status"],
        "–" if line["next_due"] is None else f"{line['next_due'][:16]}Z",
        line["schedule"] or "–",
    )


def _nights(gates: Mapping[str, Any] | None) -> str:
    """How many nights the gates of a view have learned from."""
    if gates is None:
        return "–"
    return "1 night" if gates["nights"] == 1 else f"{gates['nights']} nights"


def add_verify(commands: Commands) -> None:
    """The command ``verify``."""
    verify = commands.add(
        "verify", _verify, "re-read what is live: checksums, counts, online rows, index"
    )
    verify.option("views", "VIEW", "which (default: all)", nargs="*")


def _verify(arguments: argparse.Namespace) -> int:
    from precompute.jobs.ops.verify import verify

    project = project_of(arguments)
    views = arguments.views or project.names
    checks = ((view, check) for view in views for check in verify(project, view))
    return DONE if show_checks(arguments, checks) else FAILED
