"""Table: a view's snapshots as the versions of an Iceberg v2 table beside them, which
readers that are not ours find by its folder. Derived, and never believed: the manifests say what
is; a table that is lost, torn or behind is made again.

A version has its snapshot's number; ``main`` is what is live, and the snapshot log what was.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import time
import uuid
from collections.abc import Callable, Collection, Mapping
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from precompute.store.disk.durable_file import disk_message
from precompute.store.disk.record import digest_of
from precompute.store.disk.storage import File, FileCheck
from precompute.store.errors import ConfigError, SnapshotError, UnreadableError
from precompute.store.offline.snapshot import Entry
from precompute.store.offline.stored_file import check_file
from precompute.store.offline.view_store import ViewStore

log = logging.getLogger(__name__)

FOLDER = "iceberg"
"""Name of the table's folder in a view's."""
MOST_METADATA = 10
"""The newest files of metadata that stay, for readers of an older version."""
HINT = "version-hint.text"
"""Names the newest metadata, for readers without a catalog."""

LAST_COLUMN_ID = 2**30 - 1
"""The largest id that a part's column may have, which follows from its name and type."""

_SEAL = "precompute.digest"
"""Property that vouches for the rest of the metadata, of which the next has its versions."""
_FILES = "precompute.files"
"""Property that has size and SHA-256 (hex) of each file that a version names, as JSON."""

_METADATA = re.compile(r"v(\d+)\.metadata\.json")
_OF_VERSION = re.compile(r"\d+-.+\.(?:avro|parquet)")


class Hook:
    """Keeps the tables of views; as of :class:`precompute.store.offline.hooks.SnapshotHook`."""

    def committed(self, store: ViewStore, wanted: bool) -> list[str]:
        """Have a view's table say what there is, or have none."""
        table = _Table(store)
        try:
            if wanted:
                return table.write()
            if table.exists():
                store.storage.delete_all(table.folder)
        except (ConfigError, SnapshotError, UnreadableError, OSError) as exc:
            return [f"the Iceberg table is behind until the next run: {exc}"]
        return []

    def checks(self, store: ViewStore) -> list[FileCheck]:
        """Of each file of a view's table; what is damaged is written again once it was removed."""
        table = _Table(store)
        return table.checks() if table.exists() else []

    def published(self, store: ViewStore) -> None:
        """Have a view's table, if it has one, say what is live."""
        self.going(store, ())

    def going(self, store: ViewStore, numbers: Collection[int]) -> None:
        """Have a view's table, if it has one, say what is live and which snapshots will be there;
        where it cannot, that is logged, and the next run does."""
        table, wrong = _Table(store), list[str]()
        try:
            if table.exists():
                wrong = table.write(numbers)
        except (ConfigError, SnapshotError, UnreadableError) as exc:
            wrong = [f"it is behind until the next run: {exc}"]
        for sentence in wrong:
            log.warning("view %r: its Iceberg table: %s", store.name, sentence)


class _Table:
    def __init__(self, store: ViewStore) -> None:
        self._store, self._storage = store, store.storage
        self.folder = store.folder.absolute() / FOLDER
        self._metadata = self.folder / "metadata"
        self._location = self._storage.shown(self.folder)

    def exists(self) -> bool:
        return bool(self._storage.names(self._metadata))

    def write(self, gone: Collection[int] = ()) -> list[str]:
        """Write the next metadata, if it says other than the last. Returns what is wrong.

        Raises:
            ConfigError: pyiceberg is not installed.
            SnapshotError: something cannot be read or written.
        """
        try:
            return self._write(gone)
        except OSError as exc:
            raise SnapshotError(disk_message(self.folder, exc)) from exc

    def _write(self, gone: Collection[int]) -> list[str]:
        newest = self._newest()
        while True:
            before = self._read(newest)
            versions = _Versions(self._store, self.folder, before, gone)
            body = self._body(versions, before)
            if _said(before) == _said(body):
                break
            newest += 1
            body["properties"][_SEAL] = _seal_of(body, newest)
            # another process's version is of what there was then: compare again before the next try
            with contextlib.suppress(FileExistsError):
                self._storage.create(self._path(newest), json.dumps(body, indent=1).encode())
                break
        newest = max(newest, self._newest())
        if self._text(self._metadata / HINT) != str(newest):
            self._storage.write(self._metadata / HINT, str(newest).encode())
        self._clean(newest, _marks_of(body))
        return versions.wrong

    def checks(self) -> list[FileCheck]:
        """Of what each file is: the newest metadata says what the versions have."""
        newest = self._newest()
        body = self._read(newest)

        def metadata(number: int) -> bool:
            return bool(self._read(number))

        def hint() -> bool:
            return self._text(self._metadata / HINT) == str(newest)

        def whole(file: File) -> bool:
            with contextlib.suppress(SnapshotError, FileNotFoundError):
                if not self._storage.local:
                    # what lies there, and not a copy that is here
                    self._storage.fetch([file], again=True)
                check_file(file, again=True)
                return True
            return False

        def check(path: Path, size_bytes: int, is_whole: Callable[[], bool]) -> FileCheck:
            def damage() -> str | None:
                # of what was written meanwhile the next look tells
                if is_whole() or self._newest() != newest:
                    return None
                return (
                    f"{path} of the Iceberg table is gone, of another place, or not what was"
                    f" written: precompute reconcile {self._store.name} writes it again"
                )

            return FileCheck(str(path), size_bytes, damage)

        found = [check(self._metadata / HINT, 0, hint)]
        for item in self._storage.items(self._metadata):
            known = _METADATA.fullmatch(item.name)
            # of a table of another place one is told
            if known and (body or int(known[1]) == newest):
                found.append(check(item.path, item.size_bytes, partial(metadata, int(known[1]))))
        for name, mark in _marks_of(body).items():
            file = File(self.folder / _folder_of(name) / name, *mark)
            found.append(check(file.path, file.size_bytes, partial(whole, file)))
        return found

    def _path(self, number: int) -> Path:
        return self._metadata / f"v{number}.metadata.json"

    def _newest(self) -> int:
        found = map(_METADATA.fullmatch, self._storage.names(self._metadata))
        return max((int(name[1]) for name in found if name), default=0)

    def _text(self, path: Path) -> str:
        try:
            return self._storage.read(path).decode(errors="replace").strip()
        except FileNotFoundError:
            return ""

    def _read(self, number: int) -> dict[str, Any]:
        """The metadata of this number; empty where there is none, one that is damaged, or one of
        another place: a root that was moved."""
        with contextlib.suppress(ValueError, RecursionError, KeyError, TypeError, AttributeError):
            body: dict[str, Any] = json.loads(self._text(self._path(number)))
            seal = body["properties"].pop(_SEAL)
            if seal == _seal_of(body, number) and body["location"] == self._location:
                return body
        return {}

    def _body(self, versions: _Versions, before: Mapping[str, Any]) -> dict[str, Any]:
        """What the metadata is to say."""
        ref = self._store.log.readable_live()
        schemas, snapshots = versions.listed()
        numbers = [entry["snapshot-id"] for entry in snapshots]
        # where what is live is no version, main is behind: an empty table would be worse
        wanted = () if ref is None else (ref.snapshot, before.get("current-snapshot-id"))
        live = next((number for number in wanted if number in numbers), None)
        current = live or max(numbers, default=None)
        return {
            "format-version": 2,
            "table-uuid": str(uuid.uuid5(uuid.NAMESPACE_URL, self._location)),
            "location": self._location,
            "last-sequence-number": max(numbers, default=0),
            "last-updated-ms": time.time_ns() // 1_000_000,
            "last-column-id": LAST_COLUMN_ID,
            "current-schema-id": next(
                (entry["schema-id"] for entry in snapshots if entry["snapshot-id"] == current), 0
            ),
            "schemas": [{"schema-id": n} | one for n, one in enumerate(schemas or [_NO_COLUMNS])],
            "default-spec-id": 0,
            "partition-specs": [{"spec-id": 0, "fields": []}],
            "last-partition-id": 999,
            "default-sort-order-id": 0,
            "sort-orders": [{"order-id": 0, "fields": []}],
            "properties": {_FILES: json.dumps(versions.marks(), sort_keys=True)},
            "current-snapshot-id": -1 if live is None else live,
            "refs": {} if live is None else {"main": {"snapshot-id": live, "type": "branch"}},
            "snapshots": snapshots,
            "snapshot-log": [] if live is None else self._log(numbers),
            "metadata-log": [],
        }

    def _log(self, numbers: Collection[int]) -> list[dict[str, int]]:
        """What was live, and from when on."""
        lines: list[dict[str, int]] = []
        for publishing in self._store.log.publishings():
            number, last = publishing.snapshot, lines[-1] if lines else {}
            if number is not None and number in numbers and last.get("snapshot-id") != number:
                since = max(_ms(publishing.published_at), last.get("timestamp-ms", 0))
                lines.append({"timestamp-ms": since, "snapshot-id": number})
        return lines

    def _clean(self, newest: int, named: Collection[str]) -> None:
        """Remove what no version has."""
        for folder in (self._metadata, self.folder / "data"):
            for name in self._storage.names(folder):
                version, metadata = _OF_VERSION.fullmatch(name), _METADATA.fullmatch(name)
                if (version and name not in named) or (
                    metadata and int(metadata[1]) <= newest - MOST_METADATA
                ):
                    self._storage.delete(folder / name)


_NO_COLUMNS: dict[str, Any] = {"type": "struct", "fields": []}


class _Versions:
    """The versions of a table: those that it had and that are whole, and those of other snapshots,
    which are written now.

    Args:
        store: of the view.
        folder: of the table.
        before: the last metadata.
        gone: snapshots that are to be none.
    """

    def __init__(
        self, store: ViewStore, folder: Path, before: Mapping[str, Any], gone: Collection[int]
    ) -> None:
        self._store, self.wrong = store, list[str]()
        names = {n for part in ("metadata", "data") for n in store.storage.names(folder / part)}
        self._marks = _marks_of(before)
        # what is not there is written again
        schemas = {one["schema-id"]: one for one in before.get("schemas", ())}
        had = {
            one["snapshot-id"]: (one, schemas[one["schema-id"]])
            for one in before.get("snapshots", ())
            if names & self._marks.keys() >= {*_files_of(one)}
        }
        self._found: dict[int, tuple[dict[str, Any], dict[str, Any]]] = {}
        """Number → what the metadata says of it, and its columns."""
        entries = store.catalog().entries
        for number in sorted(entries.keys() - set(gone)):
            try:
                self._found[number] = had.get(number) or self._written(number, entries)
            except (ConfigError, SnapshotError) as exc:
                self.wrong.append(f"snapshot {number} is no version of it: {exc}")

    def _written(
        self, number: int, entries: Mapping[int, Entry]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        try:
            from precompute.plugins.iceberg.files import write_version
        except ImportError as exc:
            raise ConfigError(
                "pyiceberg is not installed: pip install 'precompute-store[iceberg]', or take the"
                " view out of `iceberg` in project.yaml"
            ) from exc
        snapshot = self._store.snapshot(number)
        names = {*snapshot.names}
        shared = {n: len(names.intersection(entries[n].segments)) for n in self._found}
        earlier = max(shared, key=lambda n: shared[n], default=None)
        written = write_version(self._store, FOLDER, snapshot, earlier, self._marks)
        self._marks |= written.marks
        entry = {
            "snapshot-id": number,
            "sequence-number": number,
            "timestamp-ms": _ms(snapshot.created_at),
            "manifest-list": written.manifest_list,
            "summary": {
                "operation": "overwrite" if snapshot.kills else "append",
                "run": snapshot.run,
                "rows": str(snapshot.rows),
                "files": " ".join(written.names),
            },
        }
        return entry, written.columns

    def marks(self) -> dict[str, tuple[int, str]]:
        """Name of each file that they have → its size and SHA-256."""
        return {
            name: self._marks[name] for one, _ in self._found.values() for name in _files_of(one)
        }

    def listed(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """The sets of columns that the versions have, and the versions, each with the number of its
        own: a column that became another type has another id."""
        schemas, snapshots = list[dict[str, Any]](), list[dict[str, Any]]()
        for entry, schema in self._found.values():
            columns = {"type": "struct", "fields": schema["fields"]}
            if columns not in schemas:
                schemas.append(columns)
            snapshots.append(entry | {"schema-id": schemas.index(columns)})
        return schemas, snapshots


def _files_of(version: Mapping[str, Any]) -> list[str]:
    names: str = version["summary"]["files"]
    return names.split()


def _said(body: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in body.items() if name != "last-updated-ms"}


def _seal_of(body: Mapping[str, Any], number: int) -> str:
    return digest_of(f"{number} {json.dumps(body, sort_keys=True)}".encode())


def _marks_of(body: Mapping[str, Any]) -> dict[str, tuple[int, str]]:
    """Name of a file that the versions of a metadata have → its size and SHA-256."""
    marks = json.loads(body.get("properties", {}).get(_FILES, "{}"))
    return {name: (size_bytes, sha256) for name, (size_bytes, sha256) in marks.items()}


def _folder_of(name: str) -> str:
    return "data" if name.endswith(".parquet") else "metadata"


def _ms(at: str) -> int:
    return int(datetime.fromisoformat(at).timestamp() * 1000)
