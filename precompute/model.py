"""Model: input columns to features. The protocol, the registry of built-ins, and fingerprints.

A user's own model is a class with two methods, named by dotted path (``mypackage.models:Ranker``)::

    class Ranker:
        def __init__(self, weights: str, scale: float = 1.0) -> None: ...   # weights: ./ranker.safetensors in the view comes absolute
        def fingerprint(self) -> str:
            return digest(self.weights, scale=self.scale, version=1)        # the file's content, whatever it is called
        def compute(self, batch: pa.RecordBatch) -> dict[str, np.ndarray | pa.Array]: ...
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import sysconfig
import time
import traceback
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from precompute.project_module import import_module, module_exists, plain_name
from precompute.project_path import ProjectPath, absolute_path, starting_from
from store.errors import ConfigError, ModelError, PrecomputeError

BUILT_IN = {
    "text_encoder": "precompute.models.text_encoder:TextEncoder",
    "two_tower": "precompute.models.two_tower:TwoTower",
    "top_k": "precompute.models.top_k:TopK",
    "torch_module": "precompute.models.torch_module:TorchModule",
}
"""Name in a view's ``model.use`` → class."""

Features = Mapping[str, npt.NDArray[Any] | pa.Array]


@runtime_checkable
class Model(Protocol):
    """What every model does. One object serves the batch job and the fallback, so both compute the same values."""

    def fingerprint(self) -> str:
        """A text that changes whenever any output may: weights, tokenizer, pooling, code version. See :func:`digest`."""

    def compute(self, batch: pa.RecordBatch) -> Features:
        """Features of a batch.

        Args:
            batch: the source's columns for 1 or more rows, without nulls the model declared unusable.

        Returns:
            feature name → numpy array [rows] or [rows, dim], or an Arrow array [rows]. For a feature with ``max_items``, a list for each row: a list
            of lists, tuples or arrays, an object array of them, a matrix, or an Arrow array of lists; they may differ in length, and None is a
            null. A row must not depend on its neighbours. The mapping, its arrays, numpy's and Arrow's, and its lists are copied before the
            next call, and may be used again.
        """


@runtime_checkable
class SizedModel(Model, Protocol):
    """A model whose rows cost differently: rows of like cost are batched together, up to ``max_cost`` a batch."""

    max_cost: int

    def costs(self, batch: pa.RecordBatch) -> npt.NDArray[np.int64]:
        """Cost of each row, for example its tokens: int64 [rows], at least 1."""


@dataclass(slots=True)
class Prepared:
    """Rows made ready for a device: their ``costs``, int64 [rows] and at least 1, and whatever the model needs to make inputs of them.

    ``bad`` are rows found unusable only now: position → reason.
    """

    costs: npt.NDArray[np.int64]
    payload: Any = None
    bad: Mapping[int, str] = field(default_factory=dict)


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

    def peak_flops(self) -> float:
        """FLOP/s of a large matrix product here and now, in the model's precision."""


@runtime_checkable
class StagedModel(Model, Protocol):
    """A model in stages, so that the engine overlaps them and chooses the batches: see :class:`precompute.models.torch_model.TorchModel`.

    ``cost_unit`` names what a cost counts (tokens, rows); ``start_cost`` is the budget of the first batches, from which the best is searched;
    ``max_cost`` fixes it.
    """

    cost_unit: str
    start_cost: int
    max_cost: int | None

    @property
    def device(self) -> ComputeDevice:
        """Where it runs."""

    def prepare(self, batch: pa.RecordBatch) -> Prepared:
        """Tokenise, encode, convert: all that needs no device. Runs in a thread of its own, beside the other stages."""

    def inputs(self, prepared: Prepared, rows: npt.NDArray[np.int64]) -> Any:
        """The inputs of one batch: these positions of the prepared rows, at least one. In the same thread as :meth:`prepare`."""

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
class QueryModel(Model, Protocol):
    """A model that treats what is searched by otherwise than what is found, in one space: an encoder with a prompt for each."""

    def for_queries(self) -> Model:
        """The same model for the inputs of a search, its weights, precision and device shared: asked for anew after a conversion."""


def check_use(use: str, folder: Path | None = None) -> None:
    """Refuse a ``model.use`` that names nothing, without importing the model's libraries.

    Args:
        use: as :func:`load_model` takes it.
        folder: the project's, where modules are looked for first.

    Raises:
        ConfigError: no built-in of that name, or no module of that dotted path.
    """
    if use in BUILT_IN:
        return
    module, _, attribute = use.partition(":")
    if not module or not attribute:
        raise ConfigError(
            f"unknown model {use!r}: write one of {', '.join(BUILT_IN)}, or a class of yours as package.module:Class"
        )
    try:
        found = module_exists(module, folder)
    except ModuleNotFoundError as exc:
        if not (module + ".").startswith(f"{plain_name(str(exc.name))}."):
            raise ConfigError(f"model {use!r} cannot be imported: {plain_name(str(exc))}") from exc
        found = False
    except (ImportError, ValueError):  # a relative or an empty name
        found = False
    except (Exception, SystemExit) as exc:  # finding a module inside a package runs the package's own code
        raise ConfigError(f"model {use!r} cannot be imported: {told(exc)}") from exc
    if not found:
        raise ConfigError(
            f"unknown model {use!r}: there is no module {module!r} on the Python path or in the project's folder (install its package, "
            "or set PYTHONPATH)"
        )


_OURS = tuple(f"{path}{os.sep}" for path in Path(__file__).parents[1].iterdir() if path.name in ("jobs", "precompute", "store"))
_OTHERS = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})


def told(exc: BaseException, longest: int = 500) -> str:
    """What a user's code raised, and where: ``ValueError: no such word (mine_models.py:17)``, by the innermost line that is neither ours nor
    a library's; without one, the exception alone. Modules of the project's folder have the names that it knows them by. At most ``longest``
    characters."""
    text = plain_name(f"{type(exc).__name__}: {exc}").removesuffix(": ")
    lines = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(exc.__traceback__)]
    theirs = [(file, line) for file, line in lines if not file.startswith((*_OURS, *_OTHERS, "<"))]
    where = f" ({Path(theirs[-1][0]).name}:{theirs[-1][1]})" if theirs else ""
    return text[: longest - len(where)] + where


def load_model(use: str, args: Mapping[str, Any], folder: Path | None = None) -> Model:
    """Import and construct a model.

    Args:
        use: built-in name or dotted path.
        args: keyword arguments of the class; ``{sql: …}`` arguments are Arrow tables by now, and relative paths absolute.
        folder: the project's, absolute: a module that lies there is this project's own, and read anew when it has changed.

    Raises:
        ConfigError: the class is not there, is no model, or refuses the arguments.
        ModelError: it failed to load.
    """
    check_use(use, folder)
    module, _, attribute = BUILT_IN.get(use, use).partition(":")
    try:
        imported = import_module(module, None if use in BUILT_IN else folder)
    except (Exception, SystemExit) as exc:  # a user's module may fail in any way, a syntax error included
        raise ConfigError(f"model {use!r} cannot be imported: {told(exc)}") from exc
    factory = getattr(imported, attribute, None)
    if factory is None:
        raise ConfigError(f"unknown model {use!r}: module {module!r} has no class {attribute!r}")
    try:
        with starting_from(folder):
            model = factory(**args)
    except TypeError as exc:
        raise ConfigError(
            f"model {use!r} does not take these args ({', '.join(args) or 'none'}): {plain_name(str(exc))}"
        ) from exc
    except PrecomputeError:
        raise
    except (Exception, SystemExit) as exc:  # a user's class may raise anything
        raise ModelError(f"model {use!r} failed to load: {told(exc)}") from exc
    if not isinstance(model, Model):
        raise ConfigError(f"model {use!r} has no fingerprint() and compute(batch) methods: see 'your own model' in the README")
    return model


class LoadedModel(NamedTuple):
    """A model, and its own fingerprint: that of the files it was loaded from, which may be others by now."""

    model: Model
    fingerprint: str


_READ: ContextVar[set[Path] | None] = ContextVar("read", default=None)
"""The files whose content :func:`digest` took for the model that is being loaded."""

MOST_NAMED_FILES = 1000
"""In a folder that a model's argument names; of further ones only the times are looked at."""


def load_with_fingerprint(use: str, args: Mapping[str, Any], folder: Path | None = None) -> LoadedModel:
    """:func:`load_model`, and the fingerprint of what was loaded: a model loads its files first and has them hashed then, and in between another
    may take the place of one, so that the old values would have the fingerprint of the new ones.

    Where a file may have changed meanwhile (or is so new that its times do not tell), the model is loaded once more. What it was loaded from then
    lies between two readings for a fingerprint, which must be the same.

    Raises:
        ConfigError, ModelError: see :func:`load_model`.
        ModelError: its files changed while it was loaded the second time.
    """
    with starting_from(folder):
        named = {path: _stamp(path) for path in _named_files(args)}
    began_ns, read = time.time_ns(), set[Path]()
    token = _READ.set(read)
    try:
        model = load_model(use, args, folder)
        with starting_from(folder):
            fingerprint = model.fingerprint()
    finally:
        _READ.reset(token)
    if not any(_may_have_changed(path, named, began_ns) for path in read):
        return LoadedModel(model, fingerprint)
    del model  # there may be no room for two
    model = load_model(use, args, folder)
    with starting_from(folder):
        if model.fingerprint() != fingerprint:
            raise ModelError(
                f"model {use!r}: its files were replaced while it was loaded, and again when it was loaded once more: run again once all are in their "
                "place (or its fingerprint() is another one for each object)"
            )
    return LoadedModel(model, fingerprint)


class _Stamp(NamedTuple):
    """What tells a file from another in its place, and from itself after it was written to; times in ns."""

    device: int
    inode: int
    size: int
    modified: int
    changed: int


def _stamp(path: Path) -> _Stamp | None:
    try:
        file, link = path.stat(), path.lstat()
    except (OSError, ValueError):
        return None
    return _Stamp(file.st_dev, file.st_ino, file.st_size, file.st_mtime_ns, max(file.st_ctime_ns, link.st_ctime_ns))


def _may_have_changed(path: Path, before: Mapping[Path, _Stamp | None], began_ns: int) -> bool:
    """Since ``began_ns``, when the stamps ``before`` had been taken: of a file that is not among them the times alone tell."""
    now = _stamp(path)
    if now is None or before.get(path, now) != now:
        return True
    # What changes within a step of the file system's clock has no other time: the kernel's tick, or two seconds where times are whole seconds.
    step_ns = 50_000_000 if now.changed % 1_000_000_000 else 2_000_000_000
    return now.changed > began_ns - step_ns


def _named_files(value: Any) -> Iterator[Path]:
    """The files that a model's arguments name, at any depth, and those in the folders that they name."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for inner in value:
            yield from _named_files(inner)
    elif isinstance(value, (str, Path)) and value != "":
        try:
            found = resolve_path(str(value))
        except (ConfigError, OSError, ValueError):  # a text that is no path
            return
        yield from islice(_files_in(found), MOST_NAMED_FILES) if found.is_dir() else [found]


def model_fingerprint(own: str, use: str, precision: str, tables: Mapping[str, pa.Table]) -> str:
    """The fingerprint that the manifest records (SHA-256, hex): the model's own, its class, the precision, and the content of the tables
    it was given, in their order (which decides ties). Paths do not count."""
    contents = {name: table_digest(table) for name, table in tables.items()}
    return digest(use=use, precision=precision, model=own, tables=contents)


def table_digest(table: pa.Table) -> str:
    """SHA-256 (hex) of a table's schema and rows, in their order; how they lie in memory does not count."""
    sha = hashlib.sha256(str(table.schema.remove_metadata()).encode())
    # take() writes the rows anew, with zeros under nulls, whatever was there and around them before
    plain = table.combine_chunks().take(pa.array(range(table.num_rows), pa.int64())).combine_chunks()
    for batch in plain.to_batches():
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, batch.schema.remove_metadata()) as writer:
            writer.write_batch(batch.replace_schema_metadata(None))
        sha.update(sink.getvalue())
    return sha.hexdigest()


@dataclass(frozen=True, slots=True)
class Verbatim:
    """A fact for :func:`digest` that is data, whatever its texts look like."""

    value: Any


def digest(*paths: str | Path, **facts: Any) -> str:
    """SHA-256 (hex) of files and of named facts: what a model's ``fingerprint()`` returns. ::

        return digest(self.weights, version=2, scale=self.scale)

    What names a file counts with the file's content and not with its name, and what names a folder with every file in it (by name, but for
    hidden ones and ``__pycache__``). That is: each of ``paths``; a :class:`~pathlib.Path` anywhere in the facts; a view's argument that was
    written ``./…`` or ``../…``; a fact called ``path`` or ``paths``, or with a name that ends so; and any text that is the absolute path of a file
    there is. Every other text stands for itself, as does what is inside a :class:`Verbatim`. An array counts with its type, shape and values.

    Raises:
        ConfigError: a path where there is nothing, or that cannot be read; a text that is the absolute path of a folder, of which it cannot be
            told whether its files are meant; a fact without a text of its own; or a mapping whose keys are no texts and numbers.
    """
    resolved = {name: _fact(name, value) for name, value in facts.items()}
    if paths:
        resolved["*"] = [_content(path) for path in paths]  # no keyword's name
    return hashlib.sha256(json.dumps(resolved, sort_keys=True, default=_unknown).encode()).hexdigest()


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
            return plain_name(value)  # of the folder's own modules, wherever it lies
        case str():
            path = Path(value)
            if os.path.isdir(value) and path != path.parent:  # os.path takes any text, a NUL in it or too long for a name
                raise ConfigError(
                    f"digest: {name}={value!r} names a folder: give it as digest({name}_path=…), so that its files count, or as "
                    "Verbatim(…), so that its name does"
                )
            return _content(path) if os.path.isfile(value) else value
        case Mapping():
            return _with_keys({k: _fact(name if is_path else str(k), v) for k, v in value.items()})
        case list() | tuple():
            return [_fact(name, v) for v in value]
        case set() | frozenset():
            return sorted((_fact(name, v) for v in value), key=str)
    return value


def _verbatim(value: Any) -> Any:
    if isinstance(value, dict):
        return _with_keys({k: _verbatim(v) for k, v in value.items()})
    return [_verbatim(v) for v in value] if isinstance(value, (list, tuple)) else value


def _with_keys(made: dict[Any, Any]) -> dict[Any, Any]:
    """A mapping that JSON can sort: with the texts that keys have there, where numbers stand beside texts."""
    for key in made:
        if not isinstance(key, str | int | float | None):
            raise ConfigError(
                f"digest: a mapping has the key {key!r:.80}, a {type(key).__name__}: give texts or numbers as keys, or a list of pairs"
            )
    if len({str if isinstance(key, str) else None if key is None else float for key in made}) < 2:
        return made
    texts = {key if isinstance(key, str) else json.dumps(key): value for key, value in made.items()}
    if len(texts) < len(made):
        raise ConfigError(
            f"digest: the keys {', '.join(f'{key!r:.80}' for key in made)} of a mapping are not told apart as texts"
        )
    return texts


def _content(path: str | Path) -> str:
    """SHA-256 (hex) of a file, or of the names and SHA-256 of a folder's files."""
    found = absolute_path(path)
    if path == "":
        raise ConfigError("model file '' cannot be read: its name is empty")
    try:
        if not found.is_dir():
            if (read := _READ.get()) is not None:
                read.add(found)
            with found.open("rb") as file:
                return hashlib.file_digest(file, "sha256").hexdigest()
        files = {inside.relative_to(found).as_posix(): _content(inside) for inside in _files_in(found)}
    except OSError as exc:
        raise ConfigError(f"model file {found} cannot be read: {exc.strerror}") from exc
    except ValueError as exc:  # a NUL in the name
        raise ConfigError(f"model file {str(path)!r} cannot be read: {exc}") from exc
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()


def _files_in(found: Path) -> Iterator[Path]:
    """A folder's files, at any depth, but for those that do not count."""
    seen = set[str]()
    for folder, inner, names in os.walk(found, followlinks=True):
        if (real := os.path.realpath(folder)) in seen:  # a link to a folder above
            inner.clear()
            continue
        seen.add(real)
        inner[:] = sorted(name for name in inner if not _is_passed_over(name))
        yield from (Path(folder, name) for name in names if not _is_passed_over(name))


def _is_passed_over(name: str) -> bool:
    return name.startswith(".") or name == "__pycache__"


def _unknown(value: Any) -> Any:
    """What JSON has no form for."""
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
        raise ConfigError(f"digest: a fact is a {type(value).__name__}, of which nothing can be told: give its texts and numbers")
    return plain_name(str(value))


def resolve_path(path: str) -> Path:
    """A model's folder or file; ``package:some_package/model`` is a path inside an installed package, and a relative one starts from the
    project's folder.

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
            raise ConfigError(f"model path {path!r}: package {package!r} is not installed in this environment")
        resolved = Path(spec.submodule_search_locations[0]) / inner
    else:
        resolved = absolute_path(path)
    if not resolved.exists():
        raise ConfigError(f"model path {path!r}: nothing at {resolved}")
    return resolved
