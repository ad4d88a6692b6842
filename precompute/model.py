"""Model: the protocol of a model, input columns to features, with its optional parts; what goes
into a fingerprint; and what a relative path among its arguments means.

A user's own model is a class with the two methods of :class:`Model`, named by dotted path
(``mypackage.models:Ranker``): docs/reference.md.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from precompute.store.errors import ConfigError

Features = Mapping[str, npt.NDArray[Any] | pa.Array]


@runtime_checkable
class Model(Protocol):
    """What every model does. One object serves the batch job and the fallback, so both compute the
    same values."""

    def fingerprint(self) -> str:
        """A text that changes whenever any output may: weights, tokenizer, pooling, code version.
        See :func:`digest`."""

    def compute(self, batch: pa.RecordBatch) -> Features:
        """Features of a batch.

        Args:
            batch: the source's columns for 1 or more rows, without nulls the model declared
                unusable.

        Returns:
            feature name → numpy array [rows] or [rows, dim], or an Arrow array [rows]. For a
            feature with ``max_items``, a list for each row: a list of lists, tuples or arrays, an
            object array of them, a matrix, or an Arrow array of lists; they may differ in length,
            and None is a null. A row must not depend on its neighbours. The mapping, its arrays,
            numpy's and Arrow's, and its lists are copied before the next call, and may be used
            again.
        """


@runtime_checkable
class SizedModel(Model, Protocol):
    """A model whose rows cost differently: rows of like cost are batched together, up to
    ``max_cost`` a batch."""

    max_cost: int

    def costs(self, batch: pa.RecordBatch) -> npt.NDArray[np.int64]:
        """Cost of each row, for example its tokens: int64 [rows], at least 1."""


@dataclass(slots=True)
class Prepared:
    """Rows made ready for a device: their ``costs``, int64 [rows] and at least 1, and whatever the
    model needs to make inputs of them.

    ``bad`` are rows found unusable only now: position → reason. ``size_bytes`` is the payload's,
    where it is much larger than its rows were.
    """

    costs: npt.NDArray[np.int64]
    payload: Any = None
    bad: Mapping[int, str] = field(default_factory=dict)
    size_bytes: int = 0


class ComputeDevice(Protocol):
    """What the engine must know of the device a staged model runs on; sizes in bytes."""

    name: str
    depth: int
    """Batches launched before the first is waited for: 0 where launching means computing."""

    def free_bytes(self) -> int:
        """Memory that can still be taken."""

    def peak_bytes(self, reset: bool = False) -> int:
        """Largest memory in use since the last reset."""

    def release(self) -> None:
        """Give cached memory back, after running out of it."""

    def threads(self) -> int:
        """Threads that a CPU computes with; 1 of what is none."""

    def compute_with(self, threads: int) -> None:
        """Compute with so many in the calling thread, a new one, and in no other."""

    def peak_flops(self) -> float:
        """FLOP/s of a large matrix product here and now, in the model's precision."""


@runtime_checkable
class StagedModel(Model, Protocol):
    """A model in stages, so that the engine overlaps them and chooses the batches: see
    :class:`precompute.models.torch_model.TorchModel`.

    ``cost_unit`` names what a cost counts (tokens, rows); ``start_cost`` is the budget of the first
    batches, from which the best is searched; ``max_cost`` fixes it.
    """

    cost_unit: str
    start_cost: int
    max_cost: int | None

    @property
    def device(self) -> ComputeDevice:
        """Where it runs."""

    def prepare(self, batch: pa.RecordBatch) -> Prepared:
        """Tokenise, encode, convert: all that needs no device. Runs in a thread of its own, beside
        the other stages."""

    def inputs(self, prepared: Prepared, rows: npt.NDArray[np.int64]) -> Any:
        """The inputs of one batch: these positions of the prepared rows, at least one. In the same
        thread as :meth:`prepare`."""

    def launch(self, inputs: Any) -> Any:
        """Begin to compute; returns what :meth:`land` waits for."""

    def land(self, launched: Any) -> Features:
        """Wait for the features of a batch."""

    def flops(self, prepared: Prepared, rows: npt.NDArray[np.int64]) -> float:
        """Floating-point operations that these rows need, padding not counted; 0 when unknown."""


@runtime_checkable
class CheckingModel(Model, Protocol):
    """A model that knows which rows it cannot take, before it computes."""

    def unusable(self, batch: pa.RecordBatch) -> Mapping[int, str]:
        """Row number → reason, for rows to be rejected."""


@runtime_checkable
class ReadingModel(Model, Protocol):
    """A model that says which columns it reads. Where the entity key's are not among them, its rows
    are functions of their inputs alone, and one that was computed from a request's inputs answers
    the next request that brings the same, for whatever key."""

    def reads(self) -> Collection[str]:
        """The source columns that may make a difference to any output: all others may hold what
        they will."""


Judge = Callable[[Features, int], str | None]
"""Features of so many rows → what the view that they are for has against one of them; None where it
accepts all. Called in any thread."""


class Unanswered(Exception):
    """Raised by a model for a row that the service behind it answered nothing to. Where it answered
    no other of a run either, that is an outage, and no row's fault."""


@runtime_checkable
class KeepingModel(Model, Protocol):
    """A model that keeps what it has paid for from one run to the next, and so has to know what the
    view accepts before it does."""

    once_more: str
    """How a row is computed once more whose value the view did not accept, said with the reason."""

    @property
    def answered(self) -> int:
        """Requests that the service behind it has answered so far, or refused for what was in
        them."""

    def judged_by(self, judge: Judge, *, in_run: bool = False, again: bool = False) -> Model:
        """The same model for one view, all else shared.

        Args:
            judge: the view's.
            in_run: it is for a run, which goes on with one that was killed.
            again: what an earlier run got and the view did not accept is computed once more
                (``run --retry-rejected``).
        """


@runtime_checkable
class OneProcessModel(Model, Protocol):
    """A model whose rates and budget are counted in one process."""

    in_run_process: bool
    """Whether a run computes it in its own, whatever ``engine.workers`` and shards say."""


@runtime_checkable
class CountingModel(StagedModel, Protocol):
    """A model that counts what its rows took."""

    def figures(self) -> dict[str, float]:
        """Name → how much, for the run's report, where they stand by the name of its device."""


@runtime_checkable
class NamingModel(Model, Protocol):
    """A model that knows the names of the features that it gives, since a call to find out is paid
    for."""

    @property
    def gives(self) -> tuple[str, ...]:
        """Those a view may name."""


def is_in_run_process(model: Model) -> bool:
    """Whether a run computes the model in its own process."""
    return isinstance(model, OneProcessModel) and model.in_run_process


@runtime_checkable
class QueryModel(Model, Protocol):
    """A model that treats what is searched by otherwise than what is found, in one space: an
    encoder with a prompt for each."""

    def for_queries(self) -> Model:
        """The same model for the inputs of a search, its weights, precision and device shared;
        called again after a conversion."""


@dataclass(frozen=True, slots=True)
class OwnLibrary:
    """The library that people compute a model's files by, and how it is asked.

    Args:
        name: of its distribution, as pip knows it.
        by: ``module:function`` of ours that imports it; an empty text where that library is what
            computes here, and there is nothing to compare. The function is called with ``given``,
            in a process of its own, and returns what makes features of a batch.
        given: its keyword arguments, which JSON can hold.
        files: the model's, which are in memory once more while it is asked.
        needs: modules, its own and others, that are imported to ask it.
    """

    name: str
    by: str = ""
    given: Mapping[str, Any] = field(default_factory=dict)
    files: Collection[Path] = ()
    needs: tuple[str, ...] = ()


@runtime_checkable
class FileKind(Protocol):
    """A model's class that knows its files, from which ``precompute init --model FILE`` makes a
    view: it loads by ``path`` alone, is a :class:`ReadingModel`, and takes ``columns``, a mapping
    of what it reads to columns."""

    saved: str
    """What the file is, and the library's call that writes it: said where none is known."""

    def is_its_file(self, name: str, head: bytes) -> bool:
        """Whether a file of this name that begins with these bytes, 64 KiB of it, is one."""


@dataclass(frozen=True, slots=True)
class ViewTemplate:
    """What ``precompute init --template MODEL`` makes a view of, over a table with texts."""

    text: Path
    """A view's file. In it ``{{view}}`` is its name, ``{{noun}}`` what a row is about, ``{{key}}``
    the columns of its key and ``{{example}}`` one of its keys, ``{{sql}}`` the source,
    ``{{columns}}`` a comment on the table's; and what :attr:`values` has."""
    makes: str
    """What the view's name ends with, after what a row is about: ``label`` of ``book_label``."""
    use: str
    """What becomes of the columns with texts, said in that comment: "in the prompt"."""
    values: Callable[[Sequence[str]], Mapping[str, str]]
    """Of the columns with texts that the source yields → name in the text → what stands there."""
    notes: tuple[str, ...] = ()
    """What the user should know before the view runs."""


@runtime_checkable
class TemplateKind(Protocol):
    """A model's class that brings a template of its views."""

    template: ViewTemplate


@runtime_checkable
class GraphKind(FileKind, Protocol):
    """Such a class whose files have named inputs and outputs, and no missing values: it takes
    ``inputs``, a mapping of these to lists of columns, and ``outputs``, feature → output."""

    def names_of(self, path: Path) -> tuple[dict[str, int], list[str]]:
        """The inputs, each with how many columns it takes, and the outputs."""


@runtime_checkable
class FittedKind(FileKind, Protocol):
    """Such a class that also learns, so that ``precompute optimize`` makes a file of it: one score
    of columns of numbers. It takes ``output``, the feature's name, besides."""

    def fitted(
        self,
        matrix: npt.NDArray[np.float64],
        scores: npt.NDArray[np.float32],
        names: Sequence[str],
        seed: int,
    ) -> bytes:
        """The file of a model that approximates scores; a static method.

        Args:
            matrix: float64 [rows, columns]; NaN is a null.
            scores: float32 [rows], finite.
            names: of the columns, in ASCII letters, digits and underscores.
            seed: of all that is drawn by chance.

        Raises:
            ConfigError: its library is not installed.
        """


@runtime_checkable
class LibraryModel(Model, Protocol):
    """A model of files that a library outside computes, too: its values are compared with that
    library's before a run computes its first row (:mod:`precompute.own_library`)."""

    def own_library(self) -> OwnLibrary | None:
        """That library; None where there is none for this model."""


def model_fingerprint(own: str, use: str, precision: str, tables: Mapping[str, pa.Table]) -> str:
    """The fingerprint that the manifest records (SHA-256, hex): the model's own, its class, the
    precision, and the content of the tables it was given, in their order (which decides ties).
    Paths do not count."""
    contents = {name: table_digest(table) for name, table in tables.items()}
    return digest(use=use, precision=precision, model=own, tables=contents)


def table_digest(table: pa.Table) -> str:
    """SHA-256 (hex) of a table's schema and rows, in their order; how they lie in memory does not
    count."""
    sha = hashlib.sha256(str(table.schema.remove_metadata()).encode())
    # take() writes the rows again, with zeros under nulls, whatever was there and around them
    # before
    plain = (
        table.combine_chunks().take(pa.array(range(table.num_rows), pa.int64())).combine_chunks()
    )
    for batch in plain.to_batches():
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, batch.schema.remove_metadata()) as writer:
            writer.write_batch(batch.replace_schema_metadata(None))
        sha.update(sink.getvalue())
    return sha.hexdigest()


_ON_HOST: ContextVar[bool] = ContextVar("on_host", default=False)


@contextlib.contextmanager
def on_host() -> Iterator[None]:
    """Models that are loaded within, in this thread, stay on the CPU: they are read for what they
    are, and compute in processes of their own."""
    token = _ON_HOST.set(True)
    try:
        yield
    finally:
        _ON_HOST.reset(token)


def stays_on_host() -> bool:
    """Whether a model that is loaded now leaves GPUs alone."""
    return _ON_HOST.get()


_FILES_READ: ContextVar[set[Path] | None] = ContextVar("files_read", default=None)


@contextlib.contextmanager
def files_read() -> Iterator[set[Path]]:
    """Collects the files whose content :func:`digest` takes within, in this thread."""
    files = set[Path]()
    token = _FILES_READ.set(files)
    try:
        yield files
    finally:
        _FILES_READ.reset(token)


@dataclass(frozen=True, slots=True)
class Verbatim:
    """A fact for :func:`digest` that is data, whatever its texts look like."""

    value: Any


def digest(*paths: str | Path, **facts: Any) -> str:
    """SHA-256 (hex) of files and of named facts: what a model's ``fingerprint()`` returns. ::

        return digest(self.weights, version=2, scale=self.scale)

    What names a file counts with the file's content and not with its name, and what names a folder
    with every file in it (by name, but for hidden ones and ``__pycache__``). That is: each of
    ``paths``; a :class:`~pathlib.Path` anywhere in the facts; a view's argument that was written
    ``./…`` or ``../…``; a fact called ``path`` or ``paths``, or with a name that ends so; and any
    text that is the absolute path of a file there is. Every other text stands for itself, as does
    what is inside a :class:`Verbatim`; but of a model of a project one that looks like a relative
    path (it has a ``/`` or a suffix) and names something there is refused. An array counts with its
    type, shape and values.

    Raises:
        ConfigError: a path where there is nothing, or that cannot be read; a text that is the
            absolute path of a folder, or a relative one of something in the project, of which it
            cannot be known whether its content is meant; a fact without a text of its own; or a
            mapping whose keys are no texts and numbers.
    """
    resolved = {name: _fact(name, value) for name, value in facts.items()}
    if paths:
        # no keyword's name
        resolved["*"] = [_content(path) for path in paths]
    return hashlib.sha256(
        json.dumps(resolved, sort_keys=True, default=_unknown).encode()
    ).hexdigest()


def _fact(name: str, value: Any) -> Any:
    is_path = re.search(r"(^|_)paths?$", name) is not None
    match value:
        case Verbatim():
            return _verbatim(value.value)
        case Path() | ProjectPath():
            return _content(value)
        case str() if is_path:
            return _content(value)
        case str() if not value.startswith("/"):
            _check_no_file(name, value)
            # of the folder's own modules, wherever it lies
            return plain_name(value)
        case str():
            path = Path(value)
            # os.path takes any text, a NUL in it or too long for a name
            if os.path.isdir(value) and path != path.parent:
                raise ConfigError(
                    f"digest: {name}={value!r} names a folder: give it as digest({name}_path=…), so"
                    " that its files count, or as Verbatim(…), so that its name does"
                )
            return _content(path) if os.path.isfile(value) else value
        case Mapping():
            return _with_keys({k: _fact(name if is_path else str(k), v) for k, v in value.items()})
        case list() | tuple():
            return [_fact(name, v) for v in value]
        case set() | frozenset():
            return sorted((_fact(name, v) for v in value), key=str)
    return value


def _check_no_file(name: str, text: str) -> None:
    """Raises:
    ConfigError: it looks like a path and names something of the project whose model is being made.
        To count its content would make another fingerprint of a text that happens to name a file by
        now; to count the text keeps rows that other weights computed.
    """
    project = project_folder()
    if (
        project is not None
        and ("/" in text or os.path.splitext(text)[1])
        and os.path.exists(os.path.join(project, text))
    ):
        raise ConfigError(
            f"digest: {name}={text!r} names what lies in the project's folder, and would count as a"
            f" text, whatever is put there: give it as digest({name}_path=…) or Path(…), or write"
            f" ./{text.removeprefix('./')} in the view, so that its content counts; or as"
            " Verbatim(…), so that its name does"
        )


def _verbatim(value: Any) -> Any:
    if isinstance(value, dict):
        return _with_keys({k: _verbatim(v) for k, v in value.items()})
    return [_verbatim(v) for v in value] if isinstance(value, (list, tuple)) else value


def _with_keys(made: dict[Any, Any]) -> dict[Any, Any]:
    """A mapping that JSON can sort: with the texts that keys have there, where numbers stand beside
    texts."""
    for key in made:
        if not isinstance(key, str | int | float | None):
            raise ConfigError(
                f"digest: a mapping has the key {key!r:.80}, a {type(key).__name__}: give texts or"
                " numbers as keys, or a list of pairs"
            )
    if len({str if isinstance(key, str) else None if key is None else float for key in made}) < 2:
        return made
    texts = {key if isinstance(key, str) else json.dumps(key): value for key, value in made.items()}
    if len(texts) < len(made):
        raise ConfigError(
            f"digest: the keys {', '.join(f'{key!r:.80}' for key in made)} of a mapping are not"
            " distinguished as texts"
        )
    return texts


def _content(path: str | Path) -> str:
    """SHA-256 (hex) of a file, or of the names and SHA-256 of a folder's files."""
    file = absolute_path(path)
    if path == "":
        raise ConfigError("model file '' cannot be read: its name is empty")
    try:
        if not file.is_dir():
            if (read := _FILES_READ.get()) is not None:
                read.add(file)
            with file.open("rb") as content:
                return hashlib.file_digest(content, "sha256").hexdigest()
        files = {inside.relative_to(file).as_posix(): _content(inside) for inside in files_in(file)}
    except OSError as exc:
        raise ConfigError(f"model file {file} cannot be read: {exc.strerror}") from exc
    except ValueError as exc:
        # a NUL in the name
        raise ConfigError(f"model file {str(path)!r} cannot be read: {exc}") from exc
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()


def files_in(folder: Path) -> Iterator[Path]:
    """A folder's files, at any depth, but for those that do not count."""
    seen = set[str]()
    for at, inner, names in os.walk(folder, followlinks=True):
        # a link to a folder above
        if (real := os.path.realpath(at)) in seen:
            inner.clear()
            continue
        seen.add(real)
        inner[:] = sorted(name for name in inner if not _is_passed_over(name))
        yield from (Path(at, name) for name in names if not _is_passed_over(name))


def _is_passed_over(name: str) -> bool:
    return name.startswith(".") or name == "__pycache__"


def _unknown(value: Any) -> Any:
    if isinstance(value, bytes):
        return ["bytes", hashlib.sha256(value).hexdigest()]
    if isinstance(value, pa.Table):
        return table_digest(value)
    if hasattr(value, "__array__"):
        array = np.asarray(value)
        if array.dtype != object:
            content = hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()
            return [str(array.dtype), list(array.shape), content]
    if hasattr(value, "__array__") or re.search(r" at 0x[0-9a-fA-F]+>", str(value)):
        raise ConfigError(
            f"digest: a fact is a {type(value).__name__}, of which nothing can be known: give its"
            " texts and numbers"
        )
    return plain_name(str(value))


def resolve_path(path: str) -> Path:
    """A model's folder or file; ``package:some_package/model`` is a path inside an installed
    package, and a relative one starts from the project's folder.

    Raises:
        ConfigError: the package is not installed, or nothing is there.
    """
    if path.startswith("package:"):
        package, _, inner = path.removeprefix("package:").partition("/")
        try:
            spec = importlib.util.find_spec(package)
        except (ImportError, ValueError):
            spec = None
        if spec is None or not spec.submodule_search_locations:
            raise ConfigError(
                f"model path {path!r}: package {package!r} is not installed in this environment"
            )
        resolved = Path(spec.submodule_search_locations[0]) / inner
    else:
        resolved = absolute_path(path)
    if not resolved.exists():
        raise ConfigError(f"model path {path!r}: nothing at {resolved}")
    return resolved


# ---- What a path among a model's arguments starts from.

_FOLDER: ContextVar[Path | None] = ContextVar("project_folder", default=None)


class ProjectPath(str):
    """A path of a model's argument, absolute. It is a text; :func:`precompute.model.digest` takes
    it for a path."""

    __slots__ = ()


def project_folder() -> Path | None:
    """The folder of the project whose model is being made; None outside, where paths start from the
    working directory."""
    return _FOLDER.get()


@contextlib.contextmanager
def starting_from(folder: Path | None) -> Iterator[None]:
    """Within, in this thread, relative paths and users' modules are those of a project's folder."""
    token = _FOLDER.set(folder)
    try:
        yield
    finally:
        _FOLDER.reset(token)


def absolute_path(path: str | Path) -> Path:
    """A path that is relative starts from the project's folder, where a model of one is being
    made."""
    return (_FOLDER.get() or Path()) / path


def is_path(text: str) -> bool:
    """Whether a model's argument is a path relative to the project's folder: it starts with ``./``
    or ``../``."""
    return text.startswith(("./", "../"))


def absolute_arguments(value: Any, folder: Path) -> Any:
    """A model's arguments, at any depth, with each text that :func:`is_path` made a
    :class:`ProjectPath`. Queries (``{sql: …}``) stay."""
    if isinstance(value, Mapping):
        return (
            value
            if set(value) == {"sql"}
            else {k: absolute_arguments(v, folder) for k, v in value.items()}
        )
    if isinstance(value, list):
        return [absolute_arguments(v, folder) for v in value]
    return ProjectPath(folder / value) if isinstance(value, str) and is_path(value) else value


# ---- The private names of a project's own modules.

PROJECT_PACKAGE = "_project_"
"""What the package of a project's own modules is called, up to a digest and a number: see
:mod:`precompute.registry`."""
_PRIVATE = re.compile(rf"\b{PROJECT_PACKAGE}[0-9a-f]{{12}}_\d+\.")


def plain_name(name: str) -> str:
    """A module's name as its project knows it: the same wherever the project lies."""
    return _PRIVATE.sub("", name)
