"""Own library: a loaded model's values beside those of the library that people compute its files
by, such as sentence-transformers, on a few rows of its view.

The library is imported in a process of its own, which ends with the answer: it takes a gigabyte and
seconds, and does to its process what it likes. Its front door is asked, as a user would.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import os
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from precompute.engine.rows import Declared, Misfit
from precompute.model import Features, LibraryModel, Model, OwnLibrary
from precompute.registry import described
from precompute.store.feature_view import FeatureView, LibraryCheck
from precompute.techniques.row_errors import differing, largest_error
from precompute.workers.process import (
    KILL_S,
    ChildProcess,
    end_all,
    end_in_words,
    python_module,
    read_frame,
    take_pipes,
    write_frame,
)

ROWS = 8
"""Rows that are compared."""
TRIED_ROWS = 2 * ROWS
"""Rows that the model is given, since some may have no value."""
LIMIT_S = 300.0
"""How long a library may take to be imported, to load the model and to answer;
sentence-transformers takes 6 to 10 s for its import alone, on two cores that are free."""

PRECISION = "fp32"
"""What both compute in, whatever the view's precision, which is compared with float32 itself."""

_QUIET = {
    "CUDA_VISIBLE_DEVICES": "",
    "HF_DATASETS_OFFLINE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_OFFLINE": "1",
    "PYTHONWARNINGS": "ignore",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
}
"""Nothing is fetched, nothing is said, and GPUs are left alone."""

Predict = Callable[[pa.RecordBatch], Features]
"""Features of a batch, by the library."""


def own_library_of(model: Model) -> OwnLibrary | None:
    """The library of a model; None of one that has none, such as a user's own class."""
    return model.own_library() if isinstance(model, LibraryModel) else None


def without_asking(own: OwnLibrary, memory_mb: int) -> LibraryCheck | None:
    """What is said where the library is not asked: it is what computes, it is not installed, or
    there is no room for the model's weights once more; None where it can be.

    Args:
        memory_mb: how much they may take.
    """
    if not own.by:
        return LibraryCheck("itself", own.name, f"computed by {own.name} itself")
    # its own module stands first of those that it needs
    absent = [name for name in own.needs if importlib.util.find_spec(name) is None]
    if version_of(own) is None or (absent and absent[0] == own.needs[0]):
        return unchecked(own, f"{own.name} is not installed")
    if absent:
        return unchecked(own, f"{absent[0]}, by which {own.name} is asked, is not installed")
    size_bytes = sum(path.stat().st_size for path in own.files if path.is_file())
    if size_bytes > memory_mb * 1e6:
        return unchecked(
            own,
            f"the model has {size_bytes / 1e6:,.0f} MB, and memory_mb is {memory_mb:,}: there is no"
            " room for it once more",
        )
    return None


def unchecked(own: OwnLibrary, why: str) -> LibraryCheck:
    """The verdict that there is none, which holds for no version: another run may get an answer."""
    return LibraryCheck("not checked", own.name, f"not checked: {why}")


def version_of(own: OwnLibrary) -> str | None:
    """The version of a library that is installed, without importing it."""
    # XGBoost's wheel without CUDA has a name of its own
    for name in (own.name, f"{own.name}-cpu"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return None


def exact_view(view: FeatureView) -> FeatureView:
    """The view with float32 in place of float16: rounded, values that differ look alike."""
    features = tuple(
        replace(feature, dtype="float32") if feature.dtype == "float16" else feature
        for feature in view.features
    )
    return replace(view, features=features)


# ---- which rows


def telling_rows(pool: pa.Table, columns: Sequence[str], rows: int = TRIED_ROWS) -> list[int]:
    """Positions of the rows that show most of what a source may hold: nulls, the longest and the
    shortest texts, the largest and the smallest numbers, and each category.

    Args:
        pool: to choose from.
        columns: those that are looked at.
        rows: how many at most; those that show nothing new come last, in their order.
    """
    shows: list[set[Any]] = [set() for _ in range(pool.num_rows)]
    for name in columns:
        column = pool.column(name).combine_chunks()
        for row in pc.indices_nonzero(column.is_null()).to_pylist():
            shows[row].add((name, "null"))
        if isinstance(column.type, pa.DictionaryType):
            column = column.cast(column.type.value_type)
        for row, value in _telling_values(column):
            shows[row].add((name, value))
    chosen: list[int] = []
    left, seen = list(range(pool.num_rows)), set[Any]()
    while left and len(chosen) < rows:
        best = max(left, key=lambda row: (len(shows[row] - seen), -row))
        chosen.append(best)
        left.remove(best)
        seen |= shows[best]
    return chosen


def _telling_values(column: pa.Array) -> list[tuple[int, Any]]:
    """(row, what it shows) of one column."""
    kind, sizes = column.type, None
    if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_boolean(kind):
        values = column.to_pylist()
        if len(set(values)) <= len(values) // 2:
            return [(row, value) for row, value in enumerate(values) if value is not None]
    if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_binary(kind):
        sizes = pc.binary_length(column)
    elif pa.types.is_integer(kind) or pa.types.is_floating(kind):
        sizes = column
    if sizes is None or len(sizes) == sizes.null_count:
        return []
    numbers = np.asarray(pc.fill_null(sizes.cast(pa.float64(), safe=False), np.nan))
    if np.isnan(numbers).all():
        return []
    return [(int(np.nanargmax(numbers)), "largest"), (int(np.nanargmin(numbers)), "smallest")]


# ---- asked


@dataclass(frozen=True, slots=True)
class Answer:
    """What a library answered: features of these ``rows`` of those it was given, the others it has
    no value for; or, without any, the ``error``."""

    features: pa.Table | None = None
    rows: tuple[int, ...] = ()
    error: str = ""


def ask(own: OwnLibrary, rows: pa.RecordBatch) -> Answer:
    """Ask a model's own library for features, in a process of its own; whatever it does is an
    answer.

    Args:
        rows: of the view's source.
    """
    command, environment = python_module("precompute.own_library")
    try:
        child = ChildProcess(command, output="piped", environment=environment | _QUIET)
    except OSError as exc:
        return Answer(error=f"no process could be started for it: {exc}")
    took_too_long = threading.Event()

    def kill() -> None:
        took_too_long.set()
        end_all([child], 0)

    timer = threading.Timer(LIMIT_S, kill)
    timer.daemon = True
    timer.start()
    sink, source = child.pipes()
    try:
        with source, contextlib.suppress(BrokenPipeError), sink:
            write_frame(sink, {"by": own.by, "given": dict(own.given)}, rows)
            found = read_frame(source)
            if found is not None:
                header, body = found
                made = None if body is None else body.read_all()
                return Answer(made, tuple(header["rows"]), header["error"])
        child.wait(KILL_S)
    finally:
        timer.cancel()
        end_all([child], 0)
    if took_too_long.is_set():
        return Answer(error=f"took longer than {LIMIT_S:g} s")
    return Answer(error=f"ended its process: it {end_in_words(child.status)}")


def main() -> None:
    """Answer one question, in a process of its own, which ends with the one that asks."""
    source, sink = take_pipes()
    # where memory runs out, the kernel ends this process and not the run that asks
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    # what a library prints is of no use to anybody
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    os.dup2(nothing, 2)
    found = read_frame(source)
    if found is None or found[1] is None:
        return
    header, reader = found
    (batch,) = reader.read_all().combine_chunks().to_batches()
    try:
        module, _, function = str(header["by"]).partition(":")
        predict: Predict = getattr(importlib.import_module(module), function)(**header["given"])
        rows, made = _answered(predict, batch)
        write_frame(sink, {"rows": rows, "error": ""}, made)
    except (Exception, SystemExit) as exc:
        write_frame(sink, {"rows": [], "error": f"raised {described(exc)}"})


def _answered(predict: Predict, batch: pa.RecordBatch) -> tuple[list[int], pa.Table]:
    """(rows that it has a value for, their features): of all rows, or of as many as it takes."""
    every = list(range(batch.num_rows))
    try:
        return every, _table(predict(batch))
    except Exception as exc:
        error = exc
    taken: list[int] = []
    # one that it does not take alone, such as a null of no known category, it may take among others
    for row in (*every, *every):
        if row not in taken:
            with contextlib.suppress(Exception):
                predict(batch.take(pa.array(sorted([*taken, row]))))
                taken.append(row)
    if not taken:
        raise error
    taken.sort()
    return taken, _table(predict(batch.take(pa.array(taken))))


def _table(features: Features) -> pa.Table:
    columns = {}
    for name, values in features.items():
        if isinstance(values, np.ndarray) and values.ndim == 2:
            flat = pa.array(np.ascontiguousarray(values).reshape(-1))
            columns[name] = pa.FixedSizeListArray.from_arrays(flat, values.shape[1])
        else:
            columns[name] = pa.array(values)
    return pa.table(columns)


# ---- compared


def compared(
    own: OwnLibrary,
    version: str,
    view: FeatureView,
    made: pa.RecordBatch,
    answer: Answer,
    keys: Sequence[str],
    left_out: int = 0,
) -> LibraryCheck:
    """The verdict.

    Args:
        own: the library, and its ``version``.
        view: as of :func:`exact_view`.
        made: the features that the model made, in float32.
        answer: the library's, of the same rows.
        keys: of these.
        left_out: how many rows the model was given besides, and rejected.
    """
    library = f"{own.name} {version}"
    if answer.features is None:
        return unchecked(own, f"{library} {answer.error}")
    lacks, made = len(keys) - len(answer.rows), made.take(pa.array(answer.rows, pa.int64()))
    keys, rows = [keys[row] for row in answer.rows], len(answer.rows)
    try:
        names = answer.features.column_names
        theirs = {name: answer.features.column(name).combine_chunks() for name in names}
        expected = Declared(view).columns(theirs, rows)
    except Misfit as exc:
        said = f"differs from {library}: its answer does not fit the view: {exc}"
        return LibraryCheck("differs", own.name, said, version, rows)
    there, here = (pa.Table.from_batches([batch]) for batch in (expected, made))
    worst = largest_error(there, here, view)
    if off := differing(there, here, view, PRECISION):
        row, what = next(iter(sorted(off.items())))
        said = (
            f"differs from {library} in {len(off)} of {rows} rows, such as {keys[row]!r}:"
            f" {what}{_values(view, what, there, here, row)}"
        )
        return LibraryCheck("differs", own.name, said, version, rows, _finite(worst))
    exactly = f"{worst:.0e}".replace("e-0", "e-") if worst else "to the bit"
    said = f"equal to {library} in {rows} {'row' if rows == 1 else 'rows'} ({exactly})"
    said += f"; {lacks} more it has no value for" if lacks else ""
    said += f"; {left_out} more have no value here" if left_out else ""
    return LibraryCheck("equal", own.name, said, version, rows, worst)


def _values(view: FeatureView, what: str, expected: pa.Table, made: pa.Table, row: int) -> str:
    """Both values of the feature that ``what`` begins with."""
    name = max((n for n in view.feature_names if what.startswith(f"{n} ")), key=len)
    here, there = (_shown(table.column(name)[row].as_py()) for table in (made, expected))
    return f" ({here} here, {there} there)"


def _shown(value: Any) -> str:
    if isinstance(value, list):
        more = ", …" if len(value) > 3 else ""
        return f"[{', '.join(map(_shown, value[:3]))}{more}]"
    return f"{value:.6g}" if isinstance(value, float) else f"{value!r:.60}"


def _finite(worst: float) -> float:
    """JSON has no infinity."""
    return min(worst, sys.float_info.max)


if __name__ == "__main__":
    main()
