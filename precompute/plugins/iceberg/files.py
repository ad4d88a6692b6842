"""Files: the manifests of one version of a table, by pyiceberg: which parts it has, and
which rows of them are no rows of it (position deletes).

A version is a snapshot under the same number. The manifests are its segments', which every version
that has a segment names; their sequence number is the segment's, so that its kills hold for its own
parts and for those of the segments below.
"""

from __future__ import annotations

import hashlib
import io
import json
import struct
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyiceberg.io import InputFile, InputStream, OutputFile, OutputStream
from pyiceberg.io.pyarrow import (
    UnsupportedPyArrowTypeException,
    compute_statistics_plan,
    data_file_statistics_from_parquet_metadata,
    parquet_path_to_id_mapping,
    pyarrow_to_schema,
)
from pyiceberg.manifest import (
    DataFile,
    DataFileContent,
    FileFormat,
    ManifestContent,
    ManifestEntry,
    ManifestFile,
    ManifestWriterV2,
    read_manifest_list,
    write_manifest_list,
)
from pyiceberg.partitioning import UNPARTITIONED_PARTITION_SPEC
from pyiceberg.schema import Schema
from pyiceberg.typedef import Record

from precompute.store.errors import SnapshotError
from precompute.store.offline.part_file import write_part_file
from precompute.store.offline.segment import Part, Segment, read_kills
from precompute.store.offline.snapshot import Snapshot
from precompute.store.offline.stored_file import parsing
from precompute.store.offline.view_store import ViewStore

_REFUSED = (
    *(ValueError, TypeError, KeyError, IndexError, OverflowError),
    *(NotImplementedError, AssertionError, EOFError, zlib.error, struct.error),
    UnsupportedPyArrowTypeException,
)
"""What pyiceberg raises of a type that it has not, and of a damaged list of its own."""
_PATH_ID, _POSITION_ID = 2147483546, 2147483545
"""Columns of a file of position deletes, as the format numbers them."""

_NONE = (pa.float16(), pa.uint32(), pa.uint64())
"""Types of columns that Iceberg has not, and pyiceberg takes for others."""


def schema_of(columns: pa.Schema) -> Schema:
    """The columns of a part as Iceberg's, by the ids that the part has.

    Raises:
        SnapshotError: a column is of a type that Iceberg has not.
    """
    for column in columns:
        nested = isinstance(column.type, pa.ListType | pa.FixedSizeListType)
        kind = column.type.value_type if nested else column.type
        if kind in _NONE:
            raise SnapshotError(
                f"column {column.name!r} is of {kind}, which Iceberg has not: give the feature"
                " another dtype, such as float32, or take the view out of `iceberg` in project.yaml"
            )
    return pyarrow_to_schema(columns)


class Written(NamedTuple):
    """A version that was written: where its list of manifests is, the names of its files, its
    columns as metadata has them, and of the files that were written now size and SHA-256 (hex)."""

    manifest_list: str
    names: list[str]
    columns: dict[str, Any]
    marks: dict[str, tuple[int, str]]


def write_version(
    store: ViewStore,
    table: str,
    snapshot: Snapshot,
    earlier: int | None,
    marks: Mapping[str, tuple[int, str]],
) -> Written:
    """Write what a version needs: of each segment that no version has yet a manifest of its parts
    and one of its kills, and the list of all.

    Args:
        store: of the view.
        table: name of the table's folder, in the view's.
        snapshot: to be a version.
        earlier: the version that has most of its segments; None without any.
        marks: size and SHA-256 (hex) of each file of earlier versions, by its name: a list that
            differs tells of no manifest.

    Raises:
        SnapshotError: a column is of a type that no table has, or something cannot be read.
        OSError: a file cannot be written.
    """
    try:
        return _written(store, table, snapshot, earlier, marks)
    except _REFUSED as exc:
        raise SnapshotError(f"pyiceberg cannot write it: {type(exc).__name__}: {exc}") from exc


def _written(
    store: ViewStore,
    table: str,
    snapshot: Snapshot,
    earlier: int | None,
    had_marks: Mapping[str, tuple[int, str]],
) -> Written:
    number, folder = snapshot.number, store.folder.absolute() / table / "metadata"
    marks = dict[str, tuple[int, str]]()
    schema = schema_of(_columns(store, snapshot))
    known = list[ManifestFile]()
    if earlier is not None:
        path = folder / _list_name(earlier)
        data = store.storage.read(path)
        if had_marks.get(path.name) == (len(data), hashlib.sha256(data).hexdigest()):
            known += read_manifest_list(_Bytes(str(path), data))
    names, manifests = list[str](), list[ManifestFile]()
    for segment in snapshot.segments:
        first = f"{segment.name}-"
        had = [one for one in known if Path(one.manifest_path).name.startswith(first)]
        made = had or _manifests_of(store, table, snapshot, segment, schema, marks)
        manifests += made
        names += [Path(one.manifest_path).name for one in made]
        # tombstones alone name no row
        if any(one.content == ManifestContent.DELETES for one in made):
            names.append(_kills_name(segment))
    path = folder / _list_name(number)
    out = _Bytes(store.storage.shown(path))
    with write_manifest_list(2, out, number, None, number, "deflate") as listed:
        listed.add_manifests(manifests)
    _write(store, path, out.data, marks)
    names.append(path.name)
    return Written(out.location, names, json.loads(schema.model_dump_json()), marks)


def _write(store: ViewStore, path: Path, data: bytes, marks: dict[str, tuple[int, str]]) -> None:
    marks[path.name] = len(data), hashlib.sha256(data).hexdigest()
    store.storage.write(path, data)


def _manifests_of(
    store: ViewStore,
    table: str,
    snapshot: Snapshot,
    segment: Segment,
    schema: Schema,
    marks: dict[str, tuple[int, str]],
) -> list[ManifestFile]:
    """The manifests of a segment, written."""
    folder, manifests = store.folder.absolute() / table / "metadata", list[ManifestFile]()
    parts = [_data_file(store, snapshot, part, schema) for part in segment.parts]
    for content, files in (
        (ManifestContent.DATA, parts),
        (ManifestContent.DELETES, _deletes(store, table, snapshot, segment, marks)),
    ):
        if files:
            path = folder / f"{segment.name}-{content.name.lower()}.avro"
            out = _Bytes(store.storage.shown(path))
            with _Manifest(content, schema, out, segment.number) as writer:
                for file in files:
                    entry = ManifestEntry.from_args(data_file=file, sequence_number=None)
                    writer.add(entry)
            _write(store, path, out.data, marks)
            one = writer.to_manifest_file()
            # else a list gives it the number of the version that it is written for
            one.sequence_number = one.min_sequence_number = segment.number
            manifests.append(one)
    return manifests


def _columns(store: ViewStore, snapshot: Snapshot) -> pa.Schema:
    """Those of its parts; all have the same."""
    for part in reversed(snapshot.parts):
        return _reading(pq.read_schema, store.checked_path(snapshot, part))
    raise SnapshotError("it has no part")


def _reading(read: Callable[[Path], Any], path: Path) -> Any:
    with parsing(path):
        return read(path)


def _list_name(number: int) -> str:
    """Name of the file that lists a version's manifests."""
    return f"{number:020d}-list.avro"


def _data_file(store: ViewStore, snapshot: Snapshot, part: Part, schema: Schema) -> DataFile:
    path = store.checked_path(snapshot, part)
    footer = _reading(pq.read_metadata, path)
    statistics = data_file_statistics_from_parquet_metadata(
        footer, compute_statistics_plan(schema, {}), parquet_path_to_id_mapping(schema)
    )
    return DataFile.from_args(
        content=DataFileContent.DATA,
        file_path=store.storage.shown(path),
        file_format=FileFormat.PARQUET,
        partition=Record(),
        file_size_in_bytes=part.size_bytes,
        spec_id=0,
        **statistics.to_serialized_dict(),
    )


def _kills_name(segment: Segment) -> str:
    """Name of the file of a segment's position deletes."""
    return f"{segment.name}-kills.parquet"


def _deletes(
    store: ViewStore,
    table: str,
    snapshot: Snapshot,
    segment: Segment,
    marks: dict[str, tuple[int, str]],
) -> list[DataFile]:
    """The file of a segment's position deletes, written; none where it kills no row."""
    found = {} if segment.kills is None else read_kills(store.whole_path(snapshot, segment.kills))
    if not found:
        return []
    view = store.folder.absolute()
    shown = {store.storage.shown(view / part): rows for part, rows in found.items()}
    # in the order that the format requires: by path, then by position
    names = sorted(shown)
    counts, rows = [len(shown[name]) for name in names], [np.sort(shown[name]) for name in names]
    codes = pa.array(np.repeat(np.arange(len(names), dtype=np.int32), counts))
    deletes = pa.table(
        [pa.DictionaryArray.from_arrays(codes, names).cast(pa.string()), np.concatenate(rows)],
        pa.schema(
            [
                _numbered("file_path", pa.string(), _PATH_ID),
                _numbered("pos", pa.int64(), _POSITION_ID),
            ]
        ),
    )
    path = view / table / "data" / _kills_name(segment)
    marks[path.name] = size_bytes, _ = write_part_file(path, deletes)
    store.storage.put([path])
    return [
        DataFile.from_args(
            content=DataFileContent.POSITION_DELETES,
            file_path=store.storage.shown(path),
            file_format=FileFormat.PARQUET,
            partition=Record(),
            record_count=deletes.num_rows,
            file_size_in_bytes=size_bytes,
            lower_bounds={_PATH_ID: names[0].encode()},
            upper_bounds={_PATH_ID: names[-1].encode()},
            spec_id=0,
        )
    ]


def _numbered(name: str, kind: pa.DataType, number: int) -> pa.Field:
    return pa.field(name, kind, nullable=False, metadata={"PARQUET:field_id": str(number)})


class _Manifest(ManifestWriterV2):
    """A manifest of data or of deletes, where pyiceberg's own are of data alone: rows whose
    deletion readers cannot see would be read without notice."""

    def __init__(self, content: ManifestContent, schema: Schema, out: OutputFile, number: int):
        super().__init__(UNPARTITIONED_PARTITION_SPEC, schema, out, number, "deflate")
        self._content = content

    def content(self) -> ManifestContent:
        return self._content

    @property
    def _meta(self) -> dict[str, str]:
        return super()._meta | {"content": self._content.name.lower()}


class _Bytes(InputFile, OutputFile):
    """A file in memory under the name that it will have."""

    def __init__(self, location: str, data: bytes = b"") -> None:
        super().__init__(location)
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def exists(self) -> bool:
        return bool(self.data)

    def open(self, seekable: bool = True) -> InputStream:
        return io.BytesIO(self.data)

    def to_input_file(self) -> InputFile:
        return self

    def create(self, overwrite: bool = False) -> OutputStream:
        return _Stream(self)


class _Stream(io.BytesIO):
    def __init__(self, file: _Bytes) -> None:
        super().__init__()
        self._file = file

    def close(self) -> None:
        if not self.closed:
            # what ends a block of Avro is drawn at random: of one name all have the same bytes
            data, name = self.getvalue(), self._file.location.encode()
            self._file.data = data.replace(data[-16:], hashlib.sha256(name).digest()[:16])
        super().close()
