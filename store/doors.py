"""Doors: every extension point on one page. A door is opened by a name that a user writes, and
leads to the power that has it: a folder ``precompute/plugins/<power>``, or the installed package of
somebody else, which names its own as entry points of ``precompute.plugins``."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from functools import cache, cached_property
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from precompute.store.errors import ConfigError, nearest_or_all

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

T = TypeVar("T")


class Way(NamedTuple):
    """Where a name leads."""

    power: str
    """The folder in ``precompute/plugins``."""
    target: str
    """``module:attribute``, of the folder's module."""
    what: str = ""
    """A line for people."""
    extra: str = ""
    """What is installed for it beside the engine: ``pip install 'precompute-store[extra]'``."""
    asked: bool = True
    """Whether :meth:`Door.all` has it: not what takes seconds to import, for nothing."""


KNOWN: Mapping[str, Mapping[str, Way]] = {
    "command": {
        "init": Way(
            "init",
            "command:add",
            "make a project that runs at once, over a file of yours or a sample",
        ),
        "new": Way(
            "init",
            "command:add_new",
            "add a view to the project, over a file of yours or a sample",
        ),
        "plan": Way(
            "capacity",
            "command:add",
            "what a view takes at another number of rows: time, CPU and GPU hours, bytes, memory"
            " and money, fitted to its own runs; what will not fit is said first",
        ),
        "thresholds": Way(
            "semantic",
            "command:add",
            "measure on a view's rows what a semantic cache would save and cost, and suggest its"
            " threshold",
        ),
        "tune": Way(
            "tune",
            "command:add",
            "measure precisions and back ends on a view's rows, and pick the fastest that is"
            " accurate",
        ),
        "optimize": Way(
            "students",
            "command:add",
            "make cheaper models from what a view published, and judge them on rows they never"
            " saw; nothing goes live by itself",
        ),
        "doctor": Way(
            "doctor",
            "command:add",
            "look at the machine, the installation and the project's stores: each line with its"
            " remedy",
        ),
        "report": Way(
            "page",
            "command:add",
            "one HTML file of a run: stages, rejections, figures beside what is live, a map",
        ),
    },
    "metrics": {
        "semantic_cache": Way("semantic", "figures:SemanticFigures"),
    },
    "misses": {
        "fallback.model": Way("students", "misses:StudentMisses"),
        "semantic_cache": Way("semantic", "cache:SemanticCache"),
    },
    "model": {
        "chat_endpoint": Way(
            "endpoints", "chat:ChatEndpoint", "labels, scores and summaries by a service"
        ),
        "embedding_endpoint": Way(
            "endpoints", "embedding:EmbeddingEndpoint", "vectors of texts by a service"
        ),
        "image_encoder": Way(
            "images", "image_encoder:ImageEncoder", "vectors of pictures", "images", asked=False
        ),
        "onnx": Way("onnx", "model:OnnxModel", "any graph over columns", "onnx"),
        "lightgbm": Way("trees", "lightgbm_model:LightGbm", "trees of LightGBM", "lightgbm"),
        "xgboost": Way("trees", "xgboost_model:XgBoost", "trees of XGBoost", "xgboost"),
        "catboost": Way("trees", "catboost_model:CatBoost", "trees of CatBoost", "catboost"),
    },
    "technique": {
        "fp32-onnx": Way("onnx", "technique:Exported", "ONNX Runtime", "onnx"),
        "tf32-tensorrt": Way("onnx", "technique:Engine", "TensorRT, by ONNX Runtime", "onnx"),
        "fp16-tensorrt": Way("onnx", "technique:Engine", "TensorRT, by ONNX Runtime", "onnx"),
        "fp32-openvino": Way("openvino", "technique:Graph", "OpenVINO", "openvino"),
        "bf16-openvino": Way("openvino", "technique:Graph", "OpenVINO", "openvino"),
        "int8-static-openvino": Way("openvino", "technique:Static", "OpenVINO", "openvino"),
        "int8-dynamic-openvino": Way("openvino", "technique:Grouped", "OpenVINO", "openvino"),
    },
    # each form as people write it
    "online": {
        "redis": Way("redis", "kind:KIND", "redis://host:6379/0"),
        "rediss": Way("redis", "kind:KIND", "rediss://…"),
        "unix": Way("redis", "kind:KIND", "unix:///socket"),
        "redis+cluster": Way("redis", "kind:KIND", "redis+cluster://host:6379,host:6379"),
        "rediss+cluster": Way("redis", "kind:KIND", "rediss+cluster://…"),
    },
    "root": {
        "s3": Way("object_root", "storage:mounted", "s3://bucket/prefix", "s3"),
        "gs": Way("object_root", "storage:mounted", "gs://bucket/prefix", "s3"),
        "az": Way("object_root", "storage:mounted", "az://container/prefix", "s3"),
    },
    "followers": {
        "online": Way("object_root", "replica:Replica"),
    },
    "route": {
        "/": Way(
            "page",
            "route:ROUTE",
            "a page for people: views and how fresh they are, their runs, latency, fallback",
        ),
    },
    "name": {
        "precompute.OpenProject": Way(
            "notebook", "open_project:OpenProject", "a project from Python, by precompute.open"
        ),
        "precompute.testing.Request": Way(
            "stand_in", "stand_in:Request", "what a stand-in was asked", "testing"
        ),
        "precompute.testing.StandIn": Way(
            "stand_in",
            "stand_in:StandIn",
            "a lookup service inside a service's own tests",
            "testing",
        ),
    },
    "launcher": {
        "ray": Way("ray", "launcher:RayLauncher"),
    },
    "project key": {
        "cache": Way("object_root", "keys:CacheKeys"),
        "cache_gb": Way("object_root", "keys:CacheKeys"),
        "iceberg": Way("iceberg", "keys:IcebergKeys"),
        "serve.tracing": Way("traces", "keys:TracesKeys"),
    },
    "snapshots": {
        "iceberg": Way("iceberg", "table:Hook"),
    },
    "traces": {
        "serve.tracing": Way("traces", "spans:spans_of", extra="otel"),
    },
    "view key": {
        "fallback.model": Way("students", "keys:StudentKeys"),
        "semantic_cache": Way("semantic", "keys:SemanticKeys"),
    },
}
"""Door → the name that a user writes → where it leads."""

GROUP = "precompute.plugins"
"""Of the entry points of other packages; each is named ``<door>.<name>``, as ``command.hello``."""

FOLDER = Path(__file__).parents[1] / "plugins"
"""``precompute/plugins``: this file lies in ``precompute/store``, by a link or as installed."""


class Door(Generic[T]):
    """One kind of extension, ``T`` being its contract. Nothing is imported before :meth:`open`."""

    def __init__(self, name: str, *needs: str) -> None:
        """``needs`` are attributes that whatever comes in has: another package's is looked at."""
        self.name = name
        """As :data:`KNOWN` and entry points have it, such as ``command``."""
        self._known, self._needs = KNOWN[name], needs

    @cached_property
    def _foreign(self) -> dict[str, EntryPoint]:
        if not _may_have_foreign():
            return {}
        from importlib.metadata import entry_points

        own = f"{self.name.replace(' ', '-')}."
        return {
            point.name.removeprefix(own): point
            for point in entry_points(group=GROUP)
            if point.name.startswith(own)
        }

    def known(self) -> Iterator[str]:
        """The names of this door that are ours, whether their folders are there or not."""
        return iter(self._known)

    def foreign(self) -> Iterator[str]:
        """The names that other packages have."""
        return (name for name in self._foreign if name not in self._known)

    def has(self, name: str) -> bool:
        """Whether a name is this door's, here or not."""
        return name in self._known or name in self._foreign

    def is_here(self, name: str) -> bool:
        """Whether what a name of this door leads to is installed: a look at a folder."""
        way = self._known.get(name)
        return name in self._foreign if way is None else _is_here(FOLDER, way.power)

    def what(self, name: str) -> str:
        """A line for people about a name of this door."""
        if name in self._known:
            return self._known[name].what
        distribution = self._foreign[name].dist
        return f"of {distribution.name if distribution is not None else 'another package'}"

    def absence(self, name: str, otherwise: str = "") -> str:
        """What is said to whoever names what is not here: one line; ``otherwise`` is what else can
        be done than to install it, by default to do without."""
        way = self._known.get(name)
        if way is None:
            return (
                f"{self.name} {name!r} comes with another package, which is not installed here:"
                f" install that, or do without {name!r}"
            )
        return (
            f"{self.name} {name!r} comes with the plug-in {way.power}, which is not installed here"
            f" (no folder {os.path.join('precompute', 'plugins', way.power)}): install"
            f" precompute-store again, which has it, or {otherwise or f'do without {name!r}'}"
        )

    def open(self, name: str) -> T:
        """What a name leads to, imported.

        Raises:
            ConfigError: no name of this door, its folder is not there, or what it needs is not
                installed; a package of others fails while it is imported.
        """
        way = self._known.get(name)
        if way is None:
            return self._opened_foreign(name)
        if not _is_here(FOLDER, way.power):
            raise ConfigError(self.absence(name))
        module, _, attribute = way.target.partition(":")
        try:
            found: T = getattr(import_module(f"{GROUP}.{way.power}.{module}"), attribute)
        except ModuleNotFoundError as exc:
            if not way.extra or (exc.name or "").partition(".")[0] == "precompute":
                raise
            raise ConfigError(
                f"{self.name} {name!r} needs {exc.name}, which is not installed: pip install"
                f" 'precompute-store[{way.extra}]'"
            ) from exc
        return found

    def _opened_foreign(self, name: str) -> T:
        point = self._foreign.get(name)
        if point is None:
            near = nearest_or_all(name, [*self._known, *self._foreign])
            raise ConfigError(f"no {self.name} {name!r}{near}")
        try:
            found: T = point.load()
        except Exception as exc:
            raise ConfigError(
                f"{self.name} {name!r} of {point.value} cannot be loaded: {type(exc).__name__}:"
                f" {exc}; mend that package, or take it out"
            ) from exc
        if lacks := [need for need in self._needs if not hasattr(found, need)]:
            raise ConfigError(
                f"{self.name} {name!r} leads to {point.value}, which is none: it has no"
                f" {', '.join(lacks)}; mend that package, or take it out"
            )
        return found

    def all(self) -> Iterator[tuple[str, T]]:
        """Every name whose power is here, and what it leads to; of those that are asked."""
        unasked = {name for name, way in self._known.items() if not way.asked}
        for name in self.here():
            if name not in unasked:
                yield name, self.open(name)

    def here(self) -> list[str]:
        """Every name whose power is here."""
        return [name for name in (*self.known(), *self.foreign()) if self.is_here(name)]


@cache
def _may_have_foreign() -> bool:
    """Whether an installed distribution names our group. To import ``importlib.metadata`` and parse
    them all took 60 ms with 195 of them, to look for the word in their files 3 ms."""
    for folder in sys.path:
        try:
            names = os.listdir(folder or ".")
        except NotADirectoryError:
            return True  # a ZIP archive
        except OSError:
            continue
        for name in names:
            if name.endswith((".dist-info", ".egg-info")):
                with suppress(OSError), open(Path(folder, name, "entry_points.txt"), "rb") as file:
                    if GROUP.encode() in file.read():
                        return True
    return False


@cache
def _is_here(folder: Path, power: str) -> bool:
    """One answer for a process: what computes misses, and what rows say of it, are asked apart."""
    # a folder of nothing but what was compiled once is none
    return (folder / power / "__init__.py").is_file()


COMMANDS: Door[Callable[[Any], None]] = Door("command", "__call__")
"""A word after ``precompute`` → ``add(commands)``, which adds the one command of this name."""

METRICS: Door[type[Any]] = Door("metrics", "instruments", "caches")
"""Of ours the key of the power → the class of
:class:`precompute.store.http.telemetry.instruments.PowerFigures` with what it counts."""

MISSES: Door[type[Any]] = Door("misses", "columns", "submit", "close", "words")
"""A key of a view's record (:attr:`precompute.store.feature_view.FeatureView.powers`) → the class
of a :class:`precompute.store.answers.misses.MissHandler`, which answers misses of such views."""

MODELS: Door[Callable[..., Any]] = Door("model", "__call__", "fingerprint", "compute")
"""A view's ``model.use`` → the class, which makes a :class:`precompute.model.Model` of
``model.args``; of one that is also a :class:`precompute.model.FileKind`, ``precompute init --model
FILE`` knows the files, and of a :class:`precompute.model.TemplateKind` ``--template MODEL`` makes
a view."""

TECHNIQUES: Door[Callable[[str], Any]] = Door("technique", "__call__")
"""``<precision>-<backend>`` → the :class:`precompute.techniques.technique.Technique` of that name,
made from it."""

ONLINE: Door[Any] = Door("online", "open", "miss_cache")
"""The scheme of a URL in the configuration's ``online`` → the store that such a URL names, as an
:class:`~precompute.store.online.url.OnlineKind`. Table files are the rooms' own."""

ROOTS: Door[Callable[[str, Path, Collection[Any]], Path]] = Door("root", "__call__")
"""The scheme of a URL in the configuration's ``root`` → what opens such a root: given the URL, the
folder that holds ``project.yaml``, and the keys of powers there, it mounts a
:class:`precompute.store.disk.storage.Storage` unless that is mounted already, and returns the
folder that it is mounted at, an absolute one. Folders are the rooms' own."""

FOLLOWERS: Door[type[Any]] = Door("followers", "follower", "publish", "follow", "end")
"""A folder in a view's → the class of a :class:`precompute.store.account.followers.Followers`,
which has other hosts serve what is live, of a root that is not local, by what it keeps there."""

ROUTES: Door[Any] = Door("route")
"""Of ours the path → a :class:`precompute.store.http.routes.Route`."""

NAMES: Door[Any] = Door("name")
"""A name that users import of :mod:`precompute` or :mod:`precompute.testing` → what it is."""

LAUNCHERS: Door[Callable[[Any, int], Any]] = Door("launcher", "__call__")
"""A value of ``engine.on`` → what makes of that section and of how many workers there are at most a
:class:`precompute.jobs.run.shards.launcher.Launcher`."""

PROJECT_KEYS: Door[type[Any]] = Door("project key", "model_validate", "spec")
"""A key of ``project.yaml``, with the sections that it stands in, as ``serve.tracing`` → the class
of a :class:`precompute.jobs.config.open_section.Keys` that has it."""

SNAPSHOTS: Door[type[Any]] = Door("snapshots", "committed", "published", "checks", "going")
"""A folder in a view's, also the key that a configuration asks for it by → the class of a
:class:`precompute.store.offline.hooks.SnapshotHook`, which derives that folder from the view's
snapshots."""

TRACES: Door[Callable[[Any, str], Any]] = Door("traces", "__call__")
"""A key of the section ``serve``, with its name → what makes of that key's ``spec`` and the name of
a process of the server a :class:`precompute.store.http.telemetry.instruments.Tracer`."""

VIEW_KEYS: Door[type[Any]] = Door("view key", "model_validate", "spec")
"""A key of a view's file, with the sections that it stands in → as of :data:`PROJECT_KEYS`."""
