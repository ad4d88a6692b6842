"""Index files: what lies in a vector index's folder: a flat file that is mapped, and 4-bit codes,
both by FAISS, whose seam this is; and the record of their checksums and of what was measured.

Flat: every vector as it is compared with, float32 or float16. Codes: 4 bits for every 2 or 4
numbers, packed for FAISS's fast scan; the best of them are compared again with the flat vectors
(André, Kermarrec, Le Scouarnec: Quicker ADC, 2019; Douze and others: The Faiss library, 2024).
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import mmap
import threading
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from precompute.store.disk.durable_file import write_durably
from precompute.store.disk.record import FORMAT, Record, check_format, field, plain, record_of
from precompute.store.disk.storage import FileCheck


class ImportedLate:
    """Stands for a module until it is first used.

    Args:
        name: of the module.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        value = getattr(importlib.import_module(self._name), attribute)
        # found without this method from now on
        setattr(self, attribute, value)
        return value


if TYPE_CHECKING:
    import faiss
else:
    faiss = ImportedLate("faiss")

log = logging.getLogger(__name__)

NAME = "meta.json"
VECTORS, CODES, ROWS, HASHES, PARTS, GONE = (
    "vectors.faiss",
    "codes.faiss",
    "rows.arrow",
    "hashes.arrow",
    "parts.arrow",
    "gone.arrow",
)
METRICS = ("cosine", "dot", "l2")

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

    ``kind`` is ``exact`` (every float32 vector is compared with; of changed rows every vector,
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


class ListedSegment(Record, frozen=True):
    """A segment of a list: its name, and the SHA-256 (hex) of its record."""

    name: str
    sha256: str


class IndexRecord(Record, frozen=True):
    """What an index folder holds. ``model`` is the fingerprint of the model that made the vectors,
    ``segments`` the list of segments whose rows it has, and ``space`` the digest of what else these
    follow from. ``base`` is, of an index of changed rows, the name of the base that it lies over:
    with any other index it answers nothing."""

    metric: str
    dim: int
    rows: int
    dtype: str
    model: str
    files: dict[str, FileMark]
    figures: IndexFigures = field(default_factory=IndexFigures)
    base: str | None = None
    name: str = ""
    """Which one it is, as :func:`name_of` has it: in another folder it is refused."""
    segments: tuple[ListedSegment, ...] = ()
    """The lowest first."""
    space: str = ""
    format: int = FORMAT


def name_of(folder: Path) -> str:
    """View and name of an index folder, ``<root>/<view>/index/<name>``."""
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
        ValueError: it is damaged, or a file is of another size.
        OtherFormatError: it is of another format.
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
    check_format(dict(data["index"]), folder / NAME)
    record = record_of(IndexRecord, data["index"])
    wanted = (
        {VECTORS, ROWS, HASHES}
        | ({CODES} if record.figures.quantizers else set())
        | {GONE if record.base else PARTS}
    )
    if record.metric not in METRICS or record.dtype not in DTYPES or set(record.files) != wanted:
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


def index_checks(folder: Path, view: str) -> list[FileCheck]:
    """The checks of the files of a view's index, for the account.

    Raises:
        OSError, ValueError: as :func:`read_index_record` raises them.
    """

    def damage(path: Path, mark: FileMark) -> str | None:
        try:
            if mark_of(path) == mark:
                return None
            why = "differs from its checksum"
        except OSError as exc:
            why = exc.strerror or str(exc)
        return (
            f"{path} of the vector index of view {view!r} {why}: precompute publish {view}"
            " --reload builds it again"
        )

    return [
        FileCheck(str(folder / file), mark.size_bytes, partial(damage, folder / file, mark))
        for file, mark in read_index_record(folder)[0].files.items()
    ]


def index_figures(folder: Path) -> IndexFigures | None:
    """What was measured of an index; None when it is not there, or its record is damaged."""
    try:
        return read_index_record(folder)[0].figures
    except (OSError, ValueError):
        return None


# ---- FAISS: flat files and codes.


Floats = npt.NDArray[np.float32]
RowNumbers = npt.NDArray[np.int64]
Bits = npt.NDArray[np.uint8]

LARGEST_FLOAT16 = 65504.0

_TRAINED_ROWS = 16_384
_ROWS = 65_536
"""Rows that are read, coded or compared at once."""
_MOST_ON_GPU = 2048
"""Neighbours that FAISS finds on a GPU (its wiki, "Faiss on the GPU")."""
_SIGN_AND_MAGNITUDE, _BIASES_APART = (
    np.array(0x8FFFE000, np.uint32).view(np.int32),
    np.float32(2.0**112),
)
"""The bits that a float16, once shifted, has of a float32; and the factor between the two kinds'
exponents."""
_COUNT_AT = 8
"""Where a flat file's header has its row count (u64): after a word of four letters and the
dimension (i32), as FAISS writes every index."""


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    """Within, FAISS computes with ``count`` threads for the calling thread. A search takes one: a
    server has its own threads, and two teams of OpenMP on the same cores wait for each other."""
    before = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(count)
    try:
        yield
    finally:
        faiss.omp_set_num_threads(before)


class FlatFile:
    """A flat index's file, written in a stream, so that no more than a batch is in memory; FAISS
    maps it.

    Its bytes are those that FAISS writes of an index of the same vectors: header, row count, size,
    and then one vector after the other.

    Args:
        path: of the file.
        dim: length of the vectors.
        dtype: one of :data:`DTYPES`.
        l2: whether nearness is the L2 distance, and not the inner product.
    """

    def __init__(self, path: Path, dim: int, dtype: str, *, l2: bool) -> None:
        self.dim, self.rows, self._dtype = dim, 0, DTYPES[dtype]
        self._header = _flat_header(dim, dtype, l2)
        self._file: BinaryIO = path.open("wb")
        self._file.write(self._header)

    def add(self, vectors: Floats) -> None:
        """Append float32 [n, dim]. In a float16 file a number too large for it becomes infinity."""
        with np.errstate(over="ignore"):
            self._file.write(np.ascontiguousarray(vectors, self._dtype).data)
        self.rows += len(vectors)

    def close(self) -> None:
        """Write how many rows there are. FAISS counts a float16's bytes, and a float32's
        numbers."""
        size = self.rows * self.dim * (2 if self._dtype == DTYPES["float16"] else 1)
        self._file.seek(_COUNT_AT)
        self._file.write(self.rows.to_bytes(8, "little"))
        self._file.seek(len(self._header) - 8)
        self._file.write(size.to_bytes(8, "little"))
        self._file.close()

    def abandon(self) -> None:
        """Close the file as it is."""
        self._file.close()


def _flat_header(dim: int, dtype: str, l2: bool) -> bytes:
    """What FAISS writes before the vectors: of an index of one row, everything but that row."""
    metric = faiss.METRIC_L2 if l2 else faiss.METRIC_INNER_PRODUCT
    kinds = {"float32": "Flat", "float16": "SQfp16"}
    index = faiss.index_factory(dim, kinds[dtype], metric)
    index.add(np.zeros((1, dim), np.float32))
    whole: bytes = faiss.serialize_index(index).tobytes()
    return whole[: -dim * DTYPES[dtype].itemsize]


def mapped_vectors(path: Path, dim: int, dtype: str) -> npt.NDArray[Any]:
    """A flat file's vectors, [n, dim], read from the disk as they are looked at; of no rows, an
    empty array."""
    offset = len(_flat_header(dim, dtype, l2=False))
    rows = (path.stat().st_size - offset) // (dim * DTYPES[dtype].itemsize)
    if rows == 0:
        return np.zeros((0, dim), DTYPES[dtype])
    # as a plain array: every look at a memmap's rows costs 10 µs more
    return np.asarray(np.memmap(path, DTYPES[dtype], "r", offset, (rows, dim)))


def widened(vectors: npt.NDArray[Any]) -> Floats:
    """Vectors of a flat file, [n, dim], as float32.

    A finite float16 by way of its bits, the very same numbers: numpy takes 2 ns for each, and this
    0.4.
    """
    if vectors.dtype != DTYPES["float16"]:
        return vectors
    bits = vectors.view(np.int16).astype(np.int32)
    bits <<= 13
    bits &= _SIGN_AND_MAGNITUDE
    wide = bits.view(np.float32)
    wide *= _BIASES_APART
    return wide


def open_flat(path: Path) -> Any:
    """A flat file as FAISS's index, mapped and not read: 0.5 ms for 300 MB, where reading it takes
    150."""
    return faiss.read_index(str(path), faiss.IO_FLAG_MMAP_IFC)


def open_codes(path: Path) -> Any:
    """The codes that :func:`write_codes` wrote. They lie in memory: they are what every search
    reads."""
    return faiss.read_index(str(path))


def write_codes(index: Any, path: Path) -> None:
    """Write the codes of an index to a file.

    Raises:
        OSError, RuntimeError: the disk is full or refuses.
    """
    # by Python: FAISS's own writer says nothing of what it could not flush at the end
    with path.open("wb") as file:
        faiss.write_index(index, faiss.PyCallbackIOWriter(file.write))


def trained_codes(
    vectors: npt.NDArray[Any], held_out: RowNumbers, codes: Codes, *, l2: bool
) -> Any:
    """An index of codes over all ``vectors``, in their order; the same for the same vectors.

    Args:
        vectors: float32 [n, dim], perhaps mapped.
        held_out: rows that nothing is learnt from.
        codes: its quantizers.
        l2: whether nearness is the L2 distance.
    """
    rows, dim = vectors.shape
    # one list of all rows: without a list FAISS's fast scan takes no bitmap
    index = faiss.index_factory(
        dim, f"IVF1,PQ{codes.quantizers}x4fs", faiss.METRIC_L2 if l2 else faiss.METRIC_INNER_PRODUCT
    )
    learnt_from = np.delete(np.arange(rows), held_out)
    sample = np.sort(np.random.default_rng(0).permutation(learnt_from)[:_TRAINED_ROWS])
    # many small k-means: two threads take as long as one on idle cores, and 30 times as long on
    # busy ones, waiting for each other
    with threads(1):
        index.train(np.ascontiguousarray(vectors[sample]))
    for part in batches_of(vectors):
        index.add(np.ascontiguousarray(part))
    return index


def nearest_of_some(
    vectors: npt.NDArray[Any], rows: RowNumbers | None, queries: Floats, k: int, *, l2: bool
) -> RowNumbers:
    """The ``k`` nearest of every query among some rows, by comparing with all of these, on a GPU
    where there is one, or in as many threads as FAISS takes; no more than a batch is in memory.

    Args:
        vectors: float32 [n, dim], perhaps mapped.
        rows: which of them; None for all.
        queries: float32 [queries, dim].
        k: at most as many as there are rows.
        l2: whether nearness is the L2 distance.

    Returns:
        rows [queries, k], best first.
    """
    metric = faiss.METRIC_L2 if l2 else faiss.METRIC_INNER_PRODUCT
    total = len(vectors) if rows is None else len(rows)
    knn = _Knn(k)
    scores, found = np.zeros((len(queries), 0), np.float32), np.zeros((len(queries), 0), np.int64)
    for start in range(0, total, _ROWS):
        stop = min(start + _ROWS, total)
        part = np.arange(start, stop) if rows is None else rows[start:stop]
        of_part, places = knn(
            queries, np.ascontiguousarray(vectors[part]), min(k, len(part)), metric
        )
        scores, found = np.hstack([scores, of_part]), np.hstack([found, part[places]])
        order = np.argsort(scores if l2 else -scores, axis=1, kind="stable")[:, :k]
        scores, found = np.take_along_axis(scores, order, 1), np.take_along_axis(found, order, 1)
    return found


def gpus() -> int:
    """GPUs that FAISS can compute on: none with faiss-cpu."""
    return int(faiss.get_num_gpus())


class _Knn:
    """Comparing with every vector, on a GPU where there is one that can; once that fails, on the
    CPU. What else an index is built by stays there: a GPU has no codes of that kind.

    Args:
        k: how many are wanted at most.
    """

    def __init__(self, k: int) -> None:
        self._resources: Any = None
        if gpus() and k <= _MOST_ON_GPU:
            with self._or_on_the_cpu():
                self._resources = faiss.StandardGpuResources()

    def __call__(
        self, queries: Floats, vectors: Floats, k: int, metric: int
    ) -> tuple[Floats, RowNumbers]:
        if self._resources is not None:
            with self._or_on_the_cpu():
                scores, rows = faiss.knn_gpu(self._resources, queries, vectors, k, metric=metric)
                return scores, rows
        scores, rows = faiss.knn(queries, vectors, k, metric=metric)
        return scores, rows

    @contextlib.contextmanager
    def _or_on_the_cpu(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as exc:
            log.warning("a vector index is built on the CPU: %s", exc)
            self._resources = None


class _OnGpu:
    """A flat index copied to a GPU's memory, in the dtype of its file. Once a search fails there,
    the index on the CPU answers. FAISS answers one search at a time there."""

    def __init__(self, flat: Any) -> None:
        self._flat = flat
        self._index = faiss.index_cpu_to_gpu(faiss.StandardGpuResources(), 0, flat)
        self._lock = threading.Lock()

    def search(self, queries: Floats, k: int) -> tuple[Floats, RowNumbers]:
        with self._lock:
            if self._index is not None and k <= _MOST_ON_GPU:
                try:
                    scores, rows = self._index.search(queries, k)
                    return scores, rows
                except RuntimeError as exc:
                    log.warning("the vector index is searched on the CPU from now on: %s", exc)
                    self._index = None
        scores, rows = self._flat.search(queries, k)
        return scores, rows


def on_gpu(flat: Any) -> Any:
    """A flat index in a GPU's memory, where there is a GPU with room for it; else as it is."""
    if gpus() == 0:
        return flat
    try:
        return _OnGpu(flat)
    except RuntimeError as exc:
        log.warning("the vector index is searched on the CPU: %s", exc)
        return flat


def search_flat(
    flat: Any, query: Floats, k: int, bits: Bits | None = None
) -> tuple[Floats, RowNumbers]:
    """The ``k`` nearest of one query, by comparing with every row that is admitted.

    Args:
        flat: what :func:`open_flat` opened.
        query: float32 [dim].
        k: at most as many as there are rows.
        bits: a bit for each row, lowest first, set where it is admitted; all rows by default.

    Returns:
        scores and rows, best first, at most [k].
    """
    with threads(1):
        if bits is None:
            scores, rows = flat.search(query[None], k)
        else:
            selector = faiss.IDSelectorBitmap(bits)
            scores, rows = flat.search(query[None], k, params=faiss.SearchParameters(sel=selector))
    found = rows[0] >= 0
    return scores[0][found], rows[0][found]


def scan_codes(coded: Any, query: Floats, k: int, bits: Bits | None = None) -> RowNumbers:
    """The ``k`` rows that are nearest by their codes, best first.

    Args:
        coded: what :func:`trained_codes` made.
        query, k, bits: as for :func:`search_flat`.
    """
    parameters = (
        None if bits is None else faiss.IVFSearchParameters(sel=faiss.IDSelectorBitmap(bits))
    )
    with threads(1):
        _, rows = coded.search(query[None], k, params=parameters)
    found: RowNumbers = rows[0][rows[0] >= 0]
    return found


def batches_of(vectors: npt.NDArray[Any]) -> Iterable[npt.NDArray[Any]]:
    """``vectors`` in parts of :data:`_ROWS` rows."""
    return (vectors[start : start + _ROWS] for start in range(0, len(vectors), _ROWS))
