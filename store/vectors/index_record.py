"""Index record: the record beside a vector index: what it is, what was measured of it, and a
checksum of every file."""

from __future__ import annotations

import json
import mmap
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash

from precompute.store.disk.durable_file import write_durably
from precompute.store.disk.record import Record, field, plain, record_of

NAME = "meta.json"
VECTORS, CODES, ROWS, HASHES, REPLACED = (
    "vectors.faiss",
    "codes.faiss",
    "rows.arrow",
    "hashes.arrow",
    "replaced.arrow",
)
METRICS = ("cosine", "dot", "l2")
FORMAT = 1

DTYPES: dict[str, np.dtype[Any]] = {"float32": np.dtype("<f4"), "float16": np.dtype("<f2")}
"""What a flat file may hold."""

MOST_RESCORED = 16_384
"""Rows of one search that are compared again at first, at most, unless its ``k`` is larger."""


class Codes(NamedTuple):
    """How vectors are coded and how far a search goes.

    ``quantizers``: codes of 4 bits for each row. ``rescored``: how many of the best by code are
    compared again at first, for 10 neighbours. ``margin``: by how many standard deviations the last
    of these must be worse than the tenth; until then more are compared.
    """

    quantizers: int
    rescored: int = 20
    margin: float = 3.0

    @property
    def bytes_a_row(self) -> int:
        """In memory: the codes and FAISS's own number of the row."""
        return (self.quantizers + 1) // 2 + 8

    def to_rescore(self, k: int) -> int:
        """How many rows are compared again at first for ``k`` neighbours: ``rescored`` for up to 10
        and the query's own row, for more in proportion."""
        return max(k, min(-(-max(k - 1, 10) * self.rescored // 10), MOST_RESCORED))


class QueryRecall(Record, frozen=True):
    """What one kind of query found of the 10 nearest that it may find: the mean over ``queries``
    that nothing was chosen by, what it is at least with 99 % confidence, and a search's median
    time. ``by`` is the feature that was filtered by, None where it was none.
    """

    recall_at_10: float
    recall_bound: float
    queries: int
    query_us: float | None = None
    by: str | None = None


class IndexFigures(Record, frozen=True):
    """What was measured when an index was built; what operators read of it.

    ``kind`` is ``exact`` (every float32 vector is compared with; of an overlay every vector,
    whatever its dtype), ``float16`` (every vector, rounded), or ``codes`` (the best by a code of 4
    bits for some numbers are compared again). ``by_query`` has each kind of query that was measured
    (:mod:`precompute.store.vectors.index_choice`); ``recall_at_10`` and ``recall_bound`` are the
    least of them, both 1 of an exact index, and ``queries`` how many of each kind. ``query_us`` is
    a search by one thread without a filter, ``exact_us`` what comparing with every float32 vector
    takes: None where nothing was measured. ``why`` says what the choice came down to.
    """

    kind: str = "exact"
    promised: float = 1.0
    recall_at_10: float = 1.0
    recall_bound: float = 1.0
    queries: int = 0
    by_query: dict[str, QueryRecall] = field(default_factory=dict)
    query_us: float | None = None
    exact_us: float | None = None
    build_s: float = 0.0
    size_bytes: int = 0
    quantizers: int = 0
    rescored: int = 0
    margin: float = 0.0
    why: str = ""

    @property
    def codes(self) -> Codes | None:
        """How its codes are searched; None without codes."""
        return Codes(self.quantizers, self.rescored, self.margin) if self.quantizers else None


class FileMark(Record, frozen=True):
    """A file's size, and xxh3_128 (hex) of its bytes."""

    size_bytes: int
    xxh3: str


class IndexRecord(Record, frozen=True):
    """What an index folder holds. ``model`` is the fingerprint of the model that made the vectors.
    ``base`` is, of an overlay, the mark of its base's record: with any other index it answers
    nothing."""

    metric: str
    dim: int
    rows: int
    dtype: str
    model: str
    files: dict[str, FileMark]
    figures: IndexFigures = field(default_factory=IndexFigures)
    base: str | None = None
    name: str = ""
    """Which one it is, as :func:`name_of` has it: in the folder of another view or generation it is
    refused."""
    format: int = FORMAT


def name_of(folder: Path) -> str:
    """View and generation of an index folder, ``<root>/<view>/index/<generation>``."""
    return f"{folder.parent.parent.name}/{folder.name}"


def mark_of(path: Path) -> FileMark:
    """A file's mark. xxh3 reads a mapped file at 17 GB/s where SHA-256 makes 1.6 (EPYC, 293 MB in
    the page cache): so a whole index is checked whenever it is opened.

    Raises:
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        size = path.stat().st_size
        if size == 0:
            return FileMark(0, xxhash.xxh3_128_hexdigest(b""))
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return FileMark(size, xxhash.xxh3_128_hexdigest(data))


def write_index_record(folder: Path, record: IndexRecord) -> str:
    """Write it durably; returns its mark."""
    body = json.dumps(plain(record), sort_keys=True)
    mark = xxhash.xxh3_128_hexdigest(body.encode())
    write_durably(folder / NAME, f'{{"xxh3": "{mark}", "index": {body}}}'.encode())
    return mark


def read_index_record(folder: Path) -> tuple[IndexRecord, str]:
    """The record of an index folder, and its mark; the files are not looked at, but for their
    sizes.

    Raises:
        OSError: it, or a file that it names, is not there.
        ValueError: it is damaged or of another version, or a file is of another size.
    """
    try:
        data = json.loads((folder / NAME).read_bytes())
    except RecursionError as exc:
        raise ValueError(f"{NAME} is nested too deeply") from exc
    if not isinstance(data, dict) or set(data) != {"xxh3", "index"}:
        raise ValueError(f"{NAME} is not of this version")
    mark = xxhash.xxh3_128_hexdigest(json.dumps(data["index"], sort_keys=True).encode())
    if mark != data["xxh3"]:
        raise ValueError(f"{NAME} differs from its checksum")
    record = record_of(IndexRecord, data["index"])
    wanted = (
        {VECTORS, ROWS, HASHES}
        | ({CODES} if record.figures.quantizers else set())
        | ({REPLACED} if record.base else set())
    )
    if (
        record.format != FORMAT
        or record.metric not in METRICS
        or record.dtype not in DTYPES
        or set(record.files) != wanted
    ):
        raise ValueError(f"{NAME} is not of this version")
    if record.name != name_of(folder):
        raise ValueError(f"it is the index {record.name}")
    for name, file in record.files.items():
        if (folder / name).stat().st_size != file.size_bytes:
            raise ValueError(f"{name} has another size")
    return record, mark


def check_files(folder: Path, record: IndexRecord) -> None:
    """Compare every file with its checksum.

    Raises:
        OSError: one cannot be read.
        ValueError: one differs.
    """
    for name, file in record.files.items():
        if mark_of(folder / name) != file:
            raise ValueError(f"{name} differs from its checksum")


def index_figures(folder: Path) -> IndexFigures | None:
    """What was measured of an index; None when it is not there, or its record is damaged."""
    try:
        return read_index_record(folder)[0].figures
    except (OSError, ValueError):
        return None
