"""Rows: the commands that read rows: ``lookup``, ``search``, ``explain`` (how a row was made), and
``training`` (what a service would have answered at the times of a table's rows)."""

from __future__ import annotations

import argparse
import contextlib
import json
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from precompute.jobs.commands.command import DONE, FAILED, Commands, answer, project_of
from precompute.jobs.run.command_process import show
from precompute.store.disk.durable_file import disk_message, replacing
from precompute.store.errors import ConfigError, OnlineStoreError, SnapshotError
from precompute.store.keys import key_from_path
from precompute.store.times import duration, shown_time
from precompute.store.wire.lookup_options import LookupOptions

if TYPE_CHECKING:
    import pyarrow as pa

    from precompute.jobs.config.project import Project
    from precompute.store.answers.lookup import Lookup
    from precompute.store.history import Explanation, Version
    from precompute.store.online.online_store import OnlineStore, Pointer

DEADLINE_MS = 60_000
"""Deadline of the fallback on the command line, which has to load the model first."""


def add(commands: Commands) -> None:
    """The commands ``lookup``, ``search`` and ``explain``."""
    lookup = commands.add(
        "lookup",
        _lookup,
        "look up rows by key, with their freshness",
        view=True,
        reads=True,
    )
    lookup.option("keys", "KEY", "entity keys; parts of a composite one separated by /", nargs="+")
    lookup.option("--features", "A,B", "only these")
    lookup.flag("--fallback", "load the model and run it for a miss")
    search = commands.add(
        "search",
        _search,
        "the nearest rows of a view's vector index",
        view=True,
        only=True,
        reads=True,
    )
    what = search.add_mutually_exclusive_group(required=True)
    what.add_argument("--key", help="neighbours of this row")
    what.add_argument("--text", help="neighbours of this text, embedded now by the view's model")
    search.add_argument("-k", type=int, default=10, help="how many (default: 10)")
    search.option(
        "--filter",
        "JSON",
        'which rows: \'{"lang": ["de", "en"], "price": {"lt": 10}}\'',
        type=_conditions,
    )
    search.option(
        "--only",
        "KEY",
        "a key that alone may be found, or of chunks a text's, for all of its chunks; may be"
        " given again",
        action="append",
    )
    search.option(
        "--exclude", "KEY", "a key to leave out; may be given again", action="append", default=[]
    )
    explain = commands.add(
        "explain",
        _explain,
        "which run, snapshot, input and model made a row, and what it was before",
        view=True,
        reads=True,
    )
    explain.option("key", "KEY", "entity key; parts of a composite one separated by /")


def _lookup(arguments: argparse.Namespace) -> int:
    with _opened(arguments, fallback=arguments.fallback) as (lookup, published):
        view = published.view
        if arguments.fallback and not view.fallback:
            from precompute.store.answers.fallback import no_fallback

            raise no_fallback(view)
        keys = [_key(text, view.entity) for text in arguments.keys]
        features = arguments.features.split(",") if arguments.features else None
        options = LookupOptions(features, arguments.fallback, DEADLINE_MS)
        answer = lookup.begin(view.name, keys, options)
        answer.wait()
        rows = answer.rows()
    if arguments.json:
        pointer = answer.pointer
        body = {
            "view": view.name,
            "snapshot": pointer.snapshot,
            "model": pointer.model,
            "rows": rows,
        }
        show(json.dumps(body, default=_plain_text))
    else:
        for row in rows:
            print(describe_row(row))
        for hint in answer.hints(lambda key: f"precompute explain {view.name} {shlex.quote(key)}"):
            print(hint, file=sys.stderr)
    return DONE if all(row["status"] != "missing" for row in rows) else FAILED


def _search(arguments: argparse.Namespace) -> int:
    with _opened(arguments, fallback=arguments.text is not None) as (lookup, pointer):
        only, exclude = arguments.only, arguments.exclude
        entity = pointer.view.entity
        neighbours = lookup.search(
            pointer.view.name,
            key=arguments.key,
            text=arguments.text,
            k=arguments.k,
            filter=arguments.filter,
            only=None if only is None else [_parts(text, entity) for text in only],
            exclude=[_parts(text, entity) for text in exclude],
            deadline_ms=DEADLINE_MS,
        )
    if arguments.json:
        show(json.dumps(neighbours, default=_plain_text))
    else:
        if "query_model" in neighbours:
            print(
                f"embedded by another model, {neighbours['query_model'][:12]}, agreement"
                f" {neighbours['agreement']:.3f}"
            )
        for row in neighbours["rows"]:
            print(
                f"{row['score']:.4f}  {row['key']}  ({row['status']}, {duration(row['age_s'])} old)"
            )
    return DONE


def _explain(arguments: argparse.Namespace) -> int:
    from precompute.store.history import explain

    project = project_of(arguments)
    store = project.stored(arguments.view)
    numbers = store.numbers()
    entity = store.snapshot(numbers[-1]).view.entity if numbers else ()
    explanation = explain(store, _key(arguments.key, entity), memory_mb=project.settings.memory_mb)
    return answer(arguments, explanation.to_json(), describe_explanation(explanation))


def _published(project: Project, online: OnlineStore, view: str) -> Pointer:
    """The view's pointer; no file of it is needed.

    Raises:
        ConfigError: there is no such view.
        OnlineStoreError: it was never published.
    """
    pointer = online.live(view)
    if pointer is None:
        if project.offline.view(project.named(view)).log.live() is not None:
            raise OnlineStoreError(
                f"the online store has no pointer of view {view!r}, which is live: it was emptied,"
                f" or another one took its place: precompute reconcile {view}"
            )
        raise OnlineStoreError(f"view {view!r} is not published yet: precompute run {view}")
    return pointer


@contextlib.contextmanager
def _opened(arguments: argparse.Namespace, *, fallback: bool) -> Iterator[tuple[Lookup, Pointer]]:
    """A lookup over the project's online store, with the models behind the misses on request; and
    the pointer of the view."""
    from precompute.store.answers.lookup import Lookup
    from precompute.store.online.url import open_online_store

    project = project_of(arguments)
    with contextlib.ExitStack() as opened:
        online = opened.enter_context(contextlib.closing(open_online_store(project.online)))
        pointer = _published(project, online, arguments.view)
        behind = None
        if fallback:
            from precompute.jobs.serve.fallback import ViewFallback

            behind = ViewFallback(project.offline, project.home)
        lookup = Lookup(online, project.root, behind)
        opened.callback(lookup.close)
        if behind is not None:
            opened.callback(behind.close)
        yield lookup, pointer


def _conditions(text: str) -> Any:
    """The JSON of ``--filter``; whether it fits the view is found out by the search."""
    try:
        return json.loads(text)
    except ValueError as exc:
        raise argparse.ArgumentTypeError(f"not JSON: {exc}") from exc


def _key(text: str, entity: tuple[str, ...]) -> Any:
    """A key as it is written on the command line: the parts of a composite one are separated by
    /."""
    return key_from_path(text.encode(), entity) if len(entity) > 1 else text


def _parts(text: str, entity: tuple[str, ...]) -> Any:
    """As :func:`_key`, of any number of parts: of a view of chunks a long text's key has one part
    less."""
    return [unquote(part) for part in text.split("/")] if len(entity) > 1 else text


def describe_row(row: Mapping[str, Any]) -> str:
    """One row of an answer, for people: freshness first, features shortened."""
    if row["status"] == "missing":
        return f"{row['key']}: missing ({row['reason']})"
    head = (
        f"{row['key']}: {row['status']} from {row['source']}, {duration(row['age_s'])} old of"
        f" {duration(row['ttl_s'])}, snapshot {row['snapshot']}, model {row['model'][:12]}"
    )
    if "approximates" in row:
        head += f", approximates {row['approximates'][:12]}, agreement {row['agreement']:.3f}"
    return "\n".join(
        [head, *(f"  {name}: {_short(value)}" for name, value in row["features"].items())]
    )


def describe_explanation(explanation: Explanation) -> str:
    """How a row came to be, for people: the newest version first."""
    live = explanation.live
    state = "never published" if live is None else f"live is snapshot {live}, without it"
    if any(version.live for version in explanation.versions):
        state = f"live in snapshot {live}"
    lines = [
        f"{explanation.view} {explanation.key}: {len(explanation.versions)} version(s), {state}"
    ]
    for rejection in explanation.rejections:
        where = (
            f"run {rejection.run}"
            if rejection.snapshot is None
            else f"snapshot {rejection.snapshot}"
        )
        lines.append(f"rejected by {where}, stage {rejection.stage}: {rejection.error}")
    for version in explanation.versions:
        lines += _version_lines(version)
    return "\n".join(lines)


def _times(served: Sequence[tuple[datetime, datetime | None]]) -> str:
    """When a version was served, from and until; the last three times."""
    times = [
        f"{shown_time(since)} to {'now' if until is None else shown_time(until)}"
        for since, until in served[-3:]
    ]
    return ", ".join([*([f"{len(served) - 3} times before"] if len(served) > 3 else []), *times])


def _version_lines(version: Version) -> list[str]:
    state = "live" if version.live else version.void or "replaced"
    if version.removed_in is not None and version.void is None:
        state = f"removed in snapshot {version.removed_in}, {shown_time(version.removed_at)}"
    facts = {
        "run": version.run or "unknown",
        "model": version.model[:12],
        "input": str(version.input_hash),
    }
    if version.served:
        facts["served"] = _times(version.served)
    if version.partition is not None:
        facts["partition"] = version.partition
    before = version.before or {}
    for name, value in version.features.items():
        facts[name] = _short(value) + (f"  (was {_short(before[name])})" if name in before else "")
    width = max(map(len, facts))
    return [
        f"{shown_time(version.computed_at)}  snapshot {version.snapshot} ({state})",
        *(f"  {name.ljust(width)}  {value}" for name, value in facts.items()),
    ]


def _short(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        shown = ", ".join(f"{v:.4g}" if isinstance(v, float) else str(v) for v in value[:6])
        return f"[{shown}{', …' if len(value) > 6 else ''}] ({len(value)})"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _plain_text(value: Any) -> str:
    """A value of a type that JSON does not have, as one that it has."""
    from precompute.store.times import iso

    return iso(value) if isinstance(value, datetime) else str(value)


def add_training(commands: Commands) -> None:
    """The command ``training``."""
    training = commands.add(
        "training",
        _training,
        "what a service would have answered at the times of a table's rows: a training set",
        reads=True,
    )
    training.add_argument("service", metavar="SERVICE")
    training.option(
        "entities",
        "FILE",
        "CSV or Parquet: the service's entity columns and a time, and whatever else",
        type=Path,
    )
    training.option("--to", "FILE", "the Parquet file to write", type=Path, required=True)
    training.flag("--replace", "though there is such a file")
    training.option(
        "--timestamp",
        "COLUMN",
        "the time, in UTC where it says nothing (default: event_timestamp)",
        default="event_timestamp",
    )
    training.flag(
        "--best-known", "the best values known of each partition, and not those that were served"
    )


def _training(arguments: argparse.Namespace) -> int:
    import pyarrow.parquet as pq

    from precompute.jobs.config.serve import mistakes
    from precompute.jobs.ops.history import checked_target
    from precompute.store.answers.service import column_of
    from precompute.store.history import get_historical_features
    from precompute.store.history.gaps import Gaps

    checked_target(arguments.to, (".parquet",), arguments.replace)
    project = project_of(arguments)
    service = project.service(arguments.service)
    path = project.folder / "services" / f"{service.name}.yaml"
    if defaults := [
        line
        for line in mistakes(service, project.views, project.names, path)
        if ".defaults." in line
    ]:
        raise ConfigError("; ".join(defaults))
    table = get_historical_features(
        project.offline,
        _entities(arguments.entities, service.entity, arguments.timestamp),
        service=service,
        timestamp=arguments.timestamp,
        values="best_known" if arguments.best_known else "served",
        memory_mb=project.settings.memory_mb,
    )
    try:
        with replacing(arguments.to) as temporary:
            pq.write_table(table, temporary)
    except OSError as exc:
        raise SnapshotError(disk_message(arguments.to, exc, "nothing was written")) from exc
    known = {
        part.view: table.num_rows - table.column(column_of(part.view, "computed_at")).null_count
        for part in service.parts
    }
    gaps = json.loads((table.schema.metadata or {}).get(b"gaps", b"{}"))
    if arguments.json:
        body = {
            "service": service.name,
            "version": service.fingerprint,
            "rows": table.num_rows,
            "known": known,
            "to": str(arguments.to),
        }
        show(json.dumps(body | ({"gaps": gaps} if gaps else {})))
    else:
        print(f"{arguments.to}: {table.num_rows:,} rows by {service.version}")
        for view, rows in known.items():
            print(
                f"  {view}: {rows:,} rows were there at their time"
                + ("" if rows == table.num_rows else ", the others are null or have defaults")
            )
            if view in gaps:
                print(f"    {Gaps(**gaps[view])}")
    return DONE


def _entities(path: Path, entity: Sequence[str], timestamp: str) -> pa.Table:
    """The rows of a file; a time that says no zone is UTC. Of a CSV keys are the text that stands
    there: as a number ``007`` is another key.

    Raises:
        ConfigError: it cannot be read.
    """
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.csv
    import pyarrow.parquet as pq

    try:
        as_text = pyarrow.csv.ConvertOptions(column_types=dict.fromkeys(entity, pa.string()))
        table = (
            pq.read_table(path)
            if path.suffix == ".parquet"
            else pyarrow.csv.read_csv(path, convert_options=as_text)
        )
    except (OSError, pa.ArrowException) as exc:
        raise ConfigError(
            f"{path}: cannot be read as {path.suffix.removeprefix('.') or 'CSV'}: {exc}"
        ) from exc
    if table.column_names.count(timestamp) == 1:
        times = table.column(timestamp)
        # polars writes large_string
        if pa.types.is_string(times.type) or pa.types.is_large_string(times.type):
            times = _parsed(times.to_pylist(), path, timestamp)
        elif pa.types.is_date(times.type):
            times = times.cast(pa.timestamp("s"))
        if pa.types.is_timestamp(times.type) and times.type.tz is None:
            times = pc.assume_timezone(times, "UTC")
        table = table.set_column(table.column_names.index(timestamp), timestamp, times)
    return table


def _parsed(texts: list[str | None], path: Path, column: str) -> pa.Array:
    """Times, each as it is written."""
    import pyarrow as pa

    from precompute.jobs.config.section import parse_time

    times = []
    for number, text in enumerate(texts, 1):
        try:
            times.append(None if text is None else parse_time(text))
        except ValueError as exc:
            raise ConfigError(f"{path}: row {number}: {column}: {text!r}: {exc}") from exc
    return pa.array(times, pa.timestamp("us", "UTC"))
