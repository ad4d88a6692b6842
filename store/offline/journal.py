"""Journal: what an unfinished run has finished, a line for each chunk. The next run of the same recipe and partition takes it over.

    <root>/<view>/data/<run>/journal.jsonl      {recipe, partition, full}, then {part, rejected, figures} for each chunk

A line is written after the chunk's files are durable; one torn by a crash is a chunk that was not finished.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from store.disk.crashpoint import crashpoint
from store.disk.durable_file import make_folder
from store.feature_view import known_fields
from store.offline.row_figures import RowFigures
from store.offline.snapshot import Part

NAME = "journal.jsonl"


@dataclass(frozen=True, slots=True)
class Finished:
    """A chunk an unfinished run had finished: its part, its rejected rows, or both; never neither. ``figures`` are of all rows of the part; None in
    journals older than these figures."""

    part: Part | None
    rejected: Part | None
    figures: RowFigures | None = None


def begin(path: Path, recipe: str, partition: str | None, *, full: bool) -> None:
    """Create a journal and its folder. Durable by the first chunk: its part syncs the folder, its line the file.

    Raises:
        OSError: the file system failed.
    """
    make_folder(path.parent)
    path.write_bytes(json.dumps({"recipe": recipe, "partition": partition, "full": full}).encode() + b"\n")


def add(path: Path, chunk: Finished) -> None:
    """Append a chunk, durably.

    Raises:
        OSError: the file system failed.
    """
    with path.open("ab") as file:
        file.write(json.dumps(asdict(chunk)).encode() + b"\n")
        file.flush()
        crashpoint("journal.append", path)
        os.fsync(file.fileno())


def partition_of(path: Path) -> str | None:
    """The partition its run was for; None of a view that has none, and of a journal whose first line is torn, which holds nothing."""
    try:
        partition: str | None = json.loads(path.read_bytes().partition(b"\n")[0])["partition"]
        return partition
    except (OSError, ValueError, KeyError, TypeError):
        return None


def read(path: Path, recipe: str, partition: str | None, full: bool) -> Iterator[Finished]:
    """Its chunks, if it is of this recipe and partition, and of a run asked for every row where ``full`` is wanted."""
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError:
        return
    for number, line in enumerate(lines):
        try:
            entry = json.loads(line)
            if number == 0:
                if (entry["recipe"], entry["partition"]) != (recipe, partition) or (full and not entry["full"]):
                    return
                continue
            part, rejected = (None if entry[k] is None else known_fields(Part, entry[k]) for k in ("part", "rejected"))
            figures = None if entry.get("figures") is None else RowFigures.from_json(entry["figures"])
            yield Finished(part, rejected, figures)
        except (ValueError, KeyError, TypeError):
            return  # torn: neither this line nor what follows it was finished
