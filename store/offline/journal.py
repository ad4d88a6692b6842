"""Journal: what an unfinished run has finished, a line for each chunk. The next run of the same
recipe and partition takes it over.

    <root>/<view>/data/<run>/journal.jsonl      {recipe, partition, full}, then {part, rejected,
    figures} for each chunk

A line is written after the chunk's files are durable; one torn by a crash is a chunk that was not
finished.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from precompute.store.disk.crashpoint import crashpoint
from precompute.store.disk.durable_file import disk_message, make_folder, sha256_of
from precompute.store.errors import SnapshotError
from precompute.store.offline.row_figures import RowFigures
from precompute.store.offline.snapshot import Part
from precompute.store.record import Record, content_of, record_of, sealed

log = logging.getLogger(__name__)

NAME = "journal.jsonl"


class Finished(Record, frozen=True):
    """A chunk an unfinished run had finished: its part, its rejected rows, or both; never neither.
    ``figures`` are of all rows of the part; None in journals older than these figures."""

    part: Part | None
    rejected: Part | None
    figures: RowFigures | None = None

    @property
    def files(self) -> list[Part]:
        """Its files: part, rejected rows."""
        return [part for part in (self.part, self.rejected) if part is not None]


class Journals:
    """The journals of one view's runs that never committed.

    Args:
        folder: the view's.
        committed: tells which runs committed, and the paths of the files that manifests name.
    """

    def __init__(
        self, folder: Path, committed: Callable[[], tuple[frozenset[str], frozenset[str]]]
    ) -> None:
        self._folder, self._committed = folder, committed

    def _path(self, run: str) -> Path:
        return self._folder / "data" / run / NAME

    def begin(self, run: str, recipe: str, partition: str | None, *, full: bool = False) -> None:
        """Open a run's journal: the chunks it will finish are of this recipe and partition;
        ``full`` if it is to compute every row. It is durable by the first chunk: its part syncs the
        folder, its line the file.

        Raises:
            SnapshotError: the file system failed.
        """
        path = self._path(run)
        try:
            make_folder(path.parent)
            path.write_bytes(
                sealed({"recipe": recipe, "partition": partition, "full": full}) + b"\n"
            )
        except OSError as exc:
            raise SnapshotError(disk_message(path, exc)) from exc

    def add(self, run: str, chunk: Finished) -> None:
        """Note a finished chunk, durably; its files are so by now. A line torn by a crash is a
        chunk that was not finished.

        Raises:
            SnapshotError: the file system failed.
        """
        path = self._path(run)
        try:
            with path.open("ab") as file:
                file.write(sealed(chunk) + b"\n")
                file.flush()
                crashpoint("journal.append", path)
                os.fsync(file.fileno())
        except OSError as exc:
            raise SnapshotError(disk_message(path, exc)) from exc

    def end(self, run: str) -> None:
        """Remove a run's journal: its manifest names its parts now. A journal that stays by
        accident does no harm."""
        with contextlib.suppress(OSError):
            self._path(run).unlink(missing_ok=True)

    def partitions(self) -> dict[Path, str | None]:
        """Folders of runs that never committed → their partition. A journal whose first line is
        torn holds nothing and counts for none."""
        return {path.parent: _partition(path) for path in self._paths()}

    def unfinished(
        self, recipe: str, partition: str | None, *, full: bool = False
    ) -> list[Finished]:
        """Chunks of runs that never committed, of this recipe and partition, whose files are there
        with the size noted; the oldest first. With ``full`` only those of runs that computed every
        row.

        The caller holds the partition's lease, so that none of these runs goes on.
        """
        paths = self._paths()
        runs, files = self._committed() if paths else (frozenset(), frozenset())
        chunks = []
        for path in paths:
            if path.parent.name in runs:
                continue
            for chunk in _chunks(path, recipe, partition, full):
                # A part that a manifest names is that snapshot's: the run that took it over may not
                # do it twice, since his deletes of its other rows would hide them from the snapshot
                # he builds on.
                if chunk.part is not None and chunk.part.path in files:
                    continue
                if all(self._is_there(part) for part in chunk.files):
                    chunks.append(chunk)
        return chunks

    def whole(self, chunks: Sequence[Finished]) -> list[Finished]:
        """Those of the chunks whose files have the SHA-256 that their journal notes; the others are
        reported in the log. Reads them all."""
        return [chunk for chunk in chunks if all(self._is_whole(part) for part in chunk.files)]

    def _is_there(self, part: Part) -> bool:
        try:
            # A Path costs three times as much, 10,000 times.
            return os.stat(f"{self._folder}/{part.path}").st_size == part.size_bytes
        except OSError:
            return False

    def _is_whole(self, part: Part) -> bool:
        path = self._folder / part.path
        try:
            if sha256_of(path) == part.sha256:
                return True
            log.warning(
                "%s, which an interrupted run finished, differs from its checksum: its rows are"
                " computed once more",
                path,
            )
        except OSError as exc:
            log.warning(
                "%s, which an interrupted run finished, cannot be read (%s): its rows are computed"
                " once more",
                path,
                exc,
            )
        return False

    def _paths(self) -> list[Path]:
        folder = f"{self._folder}/data"
        try:
            runs = os.listdir(folder)
        except (FileNotFoundError, NotADirectoryError):
            return []
        # A glob, with a Path for each of a thousand runs, takes ten times as long.
        return [
            Path(folder, run, NAME)
            for run in sorted(runs)
            if os.path.exists(f"{folder}/{run}/{NAME}")
        ]


def _partition(path: Path) -> str | None:
    """The partition its run was for; None of a view that has none, and of a journal whose first
    line is torn."""
    try:
        partition: str | None = content_of(path.read_bytes().partition(b"\n")[0])["partition"]
        return partition
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _chunks(path: Path, recipe: str, partition: str | None, full: bool) -> Iterator[Finished]:
    """Its chunks, if it is of this recipe and partition, and of a run of every row where ``full``
    is wanted."""
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError:
        return
    for number, line in enumerate(lines):
        try:
            entry = content_of(line)
            if number == 0:
                if (entry["recipe"], entry["partition"]) != (recipe, partition) or (
                    full and not entry["full"]
                ):
                    return
                continue
            yield record_of(Finished, entry)
        except (ValueError, KeyError, TypeError):
            # Torn: neither this line nor what follows it was finished.
            return
