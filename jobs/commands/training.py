"""Training: what a service would have been answered at the times of a table's rows, as a file to
train with."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from precompute.jobs.commands.command import DONE, Commands, project_of
from precompute.jobs.run.command_process import show
from precompute.store.disk.durable_file import disk_message, replacing
from precompute.store.errors import ConfigError, SnapshotError

if TYPE_CHECKING:
    import pyarrow as pa


def add(commands: Commands) -> None:
    """The command ``training``."""
    training = commands.add(
        "training",
        _training,
        "what a service would have answered at the times of a table's rows: a training set",
    )
    training.add_argument("service", metavar="SERVICE")
    training.add_argument(
        "entities",
        type=Path,
        metavar="FILE",
        help="CSV or Parquet: the service's entity columns and a time, and whatever else",
    )
    training.add_argument(
        "--to", type=Path, required=True, metavar="FILE", help="the Parquet file to write"
    )
    training.add_argument("--replace", action="store_true", help="though there is such a file")
    training.add_argument(
        "--timestamp",
        default="event_timestamp",
        metavar="COLUMN",
        help="the time, in UTC where it says nothing (default: event_timestamp)",
    )
    training.add_argument(
        "--best-known",
        action="store_true",
        help="the best values known of each partition, and not those that were served",
    )


def _training(arguments: argparse.Namespace) -> int:
    import pyarrow.parquet as pq

    from precompute.jobs.config.service import mistakes
    from precompute.jobs.ops.export import checked_target
    from precompute.store.answers.service import column_of
    from precompute.store.history import get_historical_features

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
    if arguments.json:
        body = {
            "service": service.name,
            "version": service.fingerprint,
            "rows": table.num_rows,
            "known": known,
            "to": str(arguments.to),
        }
        show(json.dumps(body))
    else:
        print(f"{arguments.to}: {table.num_rows:,} rows by {service.version}")
        for view, rows in known.items():
            print(
                f"  {view}: {rows:,} rows were there at their time"
                + ("" if rows == table.num_rows else ", the others are null or have defaults")
            )
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
        if pa.types.is_string(times.type):
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
