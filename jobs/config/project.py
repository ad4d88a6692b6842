"""Configuration: a project's ``project.yaml`` and the files of its views, read once and checked
whole; an error names file, key, value and remedy.

Relative paths start from the folder of ``project.yaml``; those of a view stay as they are written
until it is opened. A mistake in a view's file is that view's: the others go on. Secrets, such as
a password in a URL, belong in the environment and nowhere else.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Collection, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import Field, ValidationError, field_validator

from precompute.jobs.config.open_section import Mistake, OpenSection
from precompute.jobs.config.schedule import (
    RunsConfig,
    Schedule,
    When,
    check_schedules,
    check_timezone,
    spelled_out,
)
from precompute.jobs.config.section import (
    PREFIX,
    Duration,
    Name,
    Section,
    checked,
    config_files,
    merged,
    overrides,
    place,
    read_yaml,
    substituted,
)
from precompute.jobs.config.serve import (
    ServeConfig,
    ServiceConfig,
    fitted,
    mistakes,
    read_service,
)
from precompute.store.disk.durable_file import make_folder, replace_durably
from precompute.store.disk.record import digest_of
from precompute.store.disk.storage import StorageError, known_identity
from precompute.store.doors import LAUNCHERS, PROJECT_KEYS, ROOTS
from precompute.store.errors import (
    ConfigError,
    SnapshotError,
    did_you_mean,
    nearest_or_all,
)
from precompute.store.offline.view_store import OfflineStore, ViewStore
from precompute.store.online.url import FORMS as ONLINE_FORMS
from precompute.store.online.url import absolute_url, table_folder

if TYPE_CHECKING:
    from precompute.jobs.config.view import ViewConfig
    from precompute.store.answers.service import Service


VERSION = 1


def tuning_path(folder: Path, view: str) -> Path:
    """Where the tuning file of a view is."""
    return folder / "tuning" / f"{view}.json"


def write_tuning(
    folder: Path, view: str, model: Mapping[str, Any], tuning: Mapping[str, Any]
) -> Path:
    """Write ``tuning``: ``precision`` and ``backend`` as picked, and whatever else was measured.

    Args:
        model: the view's ``use`` and ``args`` that this holds for.
        tuning: the result, plain JSON.

    Raises:
        ConfigError: it cannot be written.
    """
    path = tuning_path(folder, view)
    body = {"version": VERSION, "view": view, "model": _model(model), **tuning}
    try:
        make_folder(path.parent)
        replace_durably(path, (json.dumps(body, indent=1) + "\n").encode())
    except OSError as exc:
        raise ConfigError(f"{path}: cannot be written: {exc.strerror}") from exc
    return path


def read_tuning(folder: Path, view: str, model: Mapping[str, Any]) -> dict[str, Any] | None:
    """The tuning of a view, None where there is none for this model.

    Raises:
        ConfigError: the file is damaged.
    """
    path = tuning_path(folder, view)
    try:
        body = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as exc:
        raise ConfigError(
            f"{path}: cannot be read ({exc}); run `precompute tune {view}` again, or remove it"
        ) from exc
    if not _is_tuning(body):
        raise ConfigError(
            f"{path}: is no tuning file of this version; run `precompute tune {view}` again, or"
            " remove it"
        )
    return body if body["model"] == _model(model) else None


def _is_tuning(body: Any) -> bool:
    """Whether it is what is written here, as far as anybody reads it."""
    wanted = {"version", "model", "precision", "backend"}
    if not isinstance(body, dict) or not wanted <= set(body) or body["version"] != VERSION:
        return False
    # what powers add has models, too
    added = [
        part["models"] for part in body.values() if isinstance(part, dict) and "models" in part
    ]
    return all(
        isinstance(lines, list)
        and all(isinstance(line, dict) and isinstance(line.get("name"), str) for line in lines)
        for lines in (body.get("measured", []), *added)
    )


def _model(model: Mapping[str, Any]) -> Any:
    return json.loads(json.dumps({"use": model["use"], "args": model["args"]}, default=str))


PLACES = ("local", "elsewhere")
"""Where workers run without a power."""


def _places() -> list[str]:
    """What ``engine.on`` may say."""
    return [*PLACES, *filter(LAUNCHERS.is_here, (*LAUNCHERS.known(), *LAUNCHERS.foreign()))]


class EngineConfig(Section):
    """What computes: the run's own process, or worker processes, one for each GPU where there are
    any (what breaks a GPU's context, breaks it for its process)."""

    workers: int = Field(default=0, ge=0, le=64)
    """processes that compute; 0: one for each GPU, and without any the run's own process"""
    hang: Duration = Field(default=600.0, gt=0)
    """a worker that finishes no batch for this long is replaced"""
    on: str = Field(
        default="local", json_schema_extra=lambda schema: schema.update(enum=[*_places()])
    )
    """where the workers of a view's shards run: `local`, processes of this machine; `elsewhere`,
    wherever others start `precompute work`; or what a plug-in starts them on, such as `ray`"""
    cpus: float = Field(default=1.0, ge=0)
    """that each of these workers wants of a cluster"""
    gpus: float = Field(default=0.0, ge=0)
    """the same of GPUs; of this machine, too"""

    @field_validator("on")
    @classmethod
    def _place(cls, on: str) -> str:
        if on in PLACES or LAUNCHERS.is_here(on):
            return on
        if LAUNCHERS.has(on):
            raise ValueError(LAUNCHERS.absence(on))
        raise ValueError(
            f"{on!r} is not one of {', '.join(_places())}{did_you_mean(on, _places())}"
        )


class RetentionConfig(Section):
    """Which snapshots ``gc`` keeps, beside the live one, the one before, pinned ones and what other
    views were computed from."""

    keep: int = Field(default=3, ge=1)
    """the newest, of each view; of a partitioned one, the newest of each partition: of what makes
    the rows that are live (model, SQL, features), and as many of the newest other model or SQL"""
    grace: Duration = 86400.0
    """nothing younger is removed"""


class SourcesConfig(Section):
    """What the SQL of all views can read besides files: extensions, secrets and databases, opened
    before each source's DuckDB is locked."""

    setup: list[str] = Field(default_factory=list)
    """LOAD, CREATE SECRET, ATTACH (… READ_ONLY) and SET statements of DuckDB, in order; ${NAME} in
    them is a variable of the environment, and relative paths start with ./ or ../"""


ROOT_URLS = [ROOTS.what(scheme) for scheme in ROOTS.known() if ROOTS.is_here(scheme)]
"""How those of roots that are no folders look, for people."""


class ProjectConfig(OpenSection):
    """``project.yaml``: where and when."""

    door = PROJECT_KEYS

    root: str = Field(description=", or ".join(["folder of the offline store", *ROOT_URLS]))
    online: str = Field(description=ONLINE_FORMS)
    vars: dict[str, str] = Field(default_factory=dict)
    """values for ${name} in the views; relative paths start with ./ or ../"""
    sources: SourcesConfig = SourcesConfig()
    serve: ServeConfig = ServeConfig()
    schedule: dict[Name, When] = Field(default_factory=dict)
    """view → five cron fields, 'after view[, view]', or either with options"""
    runs: RunsConfig = RunsConfig()
    engine: EngineConfig = EngineConfig()
    lease: Duration = Field(default=60.0, ge=1)
    """how long a run or the scheduler may be silent before another one takes over"""
    reconcile: Duration = Field(default=60.0, ge=1)
    """how often the scheduler looks whether the online store serves what is live"""
    timezone: str = "UTC"
    """of the cron lines"""
    retention: RetentionConfig = RetentionConfig()
    notify: list[str] = Field(default_factory=list)
    """a command and its arguments, run after every publishing, refusal, failure and rollback"""
    memory_mb: int = Field(default=1024, ge=64)
    """what a run may take in memory beside what it loads and imports: DuckDB, which spills to disk
    beyond its share, what lies between the stages, what publishing sorts; and the most that a
    vector index's codes may take"""

    @property
    def source_mb(self) -> int:
        """DuckDB's share of ``memory_mb``: it holds the rows while what is computed of them lies
        between the stages and in writers. What is not counted, the heaps of allocators and what
        DuckDB does not count itself, is about as much as all shares: of 10⁷ rows at 256 the process
        took 705 MB of its own with all of it for each, and takes 399 so
        (``benchmarks.run_memory``)."""
        return max(64, self.memory_mb // 4)

    @property
    def stream_mb(self) -> int:
        """The share of what lies between a run's stages."""
        return max(32, self.memory_mb // 4)

    @property
    def load_mb(self) -> int:
        """The share of what a publishing sorts, when a run's other stages are over."""
        return max(32, self.memory_mb // 4)

    @field_validator("vars")
    @classmethod
    def _fit_into_sql(cls, variables: dict[str, str]) -> dict[str, str]:
        for name, value in variables.items():
            if "'" in value or '"' in value:
                raise ValueError(
                    f"{name}: {value!r} holds a quote, which cannot stand inside SQL; use a path"
                    " without"
                )
        return variables

    @field_validator("timezone")
    @classmethod
    def _zone(cls, timezone: str) -> str:
        check_timezone(timezone)
        return timezone

    @field_validator("root")
    @classmethod
    def _folder(cls, root: str) -> str:
        scheme, found, rest = root.partition("://")
        if found and (not ROOTS.has(scheme) or not rest.strip("/")):
            raise ValueError(", or ".join(["give a folder", *ROOT_URLS]))
        if found and not ROOTS.is_here(scheme):
            raise ValueError(ROOTS.absence(scheme))
        return root

    @field_validator("online")
    @classmethod
    def _store(cls, online: str) -> str:
        try:
            table_folder(online)
        except ConfigError as exc:
            raise ValueError(str(exc).removeprefix("online: ")) from exc
        return online


def _kept(error: ConfigError) -> ConfigError:
    """An error without the frames that it came through: kept, they would keep what they hold, and
    DuckDB complains at the end of a process of types that are left."""
    error.__traceback__ = error.__context__ = error.__cause__ = None
    return error


def read_settings(folder: Path, over: Mapping[str, Any] | None = None) -> ProjectConfig:
    """What ``project.yaml`` says; its views are not looked at, and need not be there.

    Args:
        folder: that holds it.
        over: overrides; the environment's by default.

    Raises:
        ConfigError: every mistake found, each with file, key, value and remedy.
    """
    found = dict(overrides(os.environ) if over is None else over)
    found.pop("views", None)
    file = folder / "project.yaml"
    return checked(ProjectConfig, merged(read_yaml(file), found), file, found)


def files_stamp(folder: Path) -> str:
    """Another one after each change of a project's files: ``project.yaml``, those of views and
    services, what `tune` chose, and modules beside them."""
    kinds = ("project.yaml", "views/*.yaml", "services/*.yaml", "tuning/*.json", "*.py")
    found = []
    for path in sorted(path for kind in kinds for path in folder.glob(kind)):
        with contextlib.suppress(OSError):
            stat = path.stat()
            found.append(f"{path} {stat.st_size} {stat.st_mtime_ns}")
    return digest_of("\n".join(found).encode())


class _Views(NamedTuple):
    """What the file of every view says, or what is wrong with it; and ``use`` and ``args`` of its
    model as they are written."""

    right: dict[str, ViewConfig]
    broken: dict[str, ConfigError]
    models: dict[str, dict[str, Any]]


class Project:
    """A checked configuration. The files of views are read when they are first wanted: looking rows
    up needs none.

    Args:
        folder: holds ``project.yaml`` and ``views/``.
        environment: overrides; the process's by default.

    ``folder`` is as given, and ``home`` the same, absolute; ``names`` are those of all views that
    have a file, right or not, sorted.

    Raises:
        ConfigError: every mistake found in ``project.yaml`` or the environment, each with file,
            key, value and remedy; or there is no view.
    """

    def __init__(self, folder: str | Path, environment: Mapping[str, str] | None = None) -> None:
        self.folder = Path(folder)
        self.home = self.folder.absolute()
        if not self.folder.is_dir():
            raise ConfigError(
                f"no folder {str(folder)!r}: give the one with project.yaml, as in `precompute -c"
                " configs/movielens status`"
            )
        over = overrides(os.environ if environment is None else environment)
        project_file = self.folder / "project.yaml"
        self._changes = over.pop("views", {})
        if not isinstance(self._changes, dict):
            raise ConfigError(
                f"environment {PREFIX}VIEWS: name a view and a key, as in"
                f" {PREFIX}VIEWS__ITEM_VECTOR__TTL=1h"
            )
        self.settings = read_settings(self.folder, over)
        self.root, self._of_this_format = self._mounted_root(), False
        self.online = absolute_url(self.settings.online, self.folder)
        self._vars = {
            name: {".": "./", "..": "../"}.get(value, value)
            for name, value in self.settings.vars.items()
        }
        self.names = sorted(path.stem for path in config_files(self.folder / "views"))
        if not self.names:
            instead = (
                self._other_suffix("*") or "; add views/<name>.yaml (see 'a view' in the README)"
            )
            raise ConfigError(f"{self.folder / 'views'}: no view there{instead}")
        if unknown := [name for name in self._changes if name not in self.names]:
            raise ConfigError(
                f"environment {PREFIX}VIEWS__{unknown[0].upper()}…: no such"
                f" view{nearest_or_all(unknown[0], self.names)}"
            )
        check_schedules(self.schedules(), self.names, project_file, over)
        for keys in (*self.settings.powers, *self.settings.serve.powers):
            if (wrong := keys.check(self.names)) is not None:
                raise _mistaken(wrong, project_file)

    @property
    def views(self) -> Mapping[str, ViewConfig]:
        """Those whose file is right."""
        return self._read_views.right

    @property
    def broken(self) -> Mapping[str, ConfigError]:
        """What is wrong with the others."""
        return self._read_views.broken

    @cached_property
    def _read_views(self) -> _Views:
        read = _Views({}, {}, {})
        for name in self.names:
            try:
                read.right[name] = self._read(self.folder / "views" / f"{name}.yaml", read.models)
            except ConfigError as exc:
                read.broken[name] = _kept(exc)
        self._check_references(read)
        return read

    def _read(self, path: Path, models: dict[str, dict[str, Any]]) -> ViewConfig:
        # DuckDB, which checks its SQL, and the features' types are loaded with it
        from precompute.jobs.config.view import ViewConfig

        changes = self._changes.get(path.stem, {})
        if not isinstance(changes, Mapping):
            raise ConfigError(
                f"environment {PREFIX}VIEWS__{path.stem.upper()}: name a key too, as in …__TTL=1h"
            )
        written = merged(read_yaml(path), changes)
        data = substituted(written, self._vars, path)
        over = {"views": {path.stem: changes}}
        view = checked(ViewConfig, data, path, over, ("views", path.stem), self.home)
        if view.name != path.stem:
            named = (
                f"environment {PREFIX}VIEWS__{path.stem.upper()}__NAME"
                if "name" in changes
                else place(path, ("name",))
            )
            raise ConfigError(
                f"{named}: name: {view.name!r} differs from the file's name; call the file"
                f" views/{view.name}.yaml"
            )
        models[view.name] = {"use": view.model.use, "args": written["model"].get("args", {})}
        return self._tuned(view, models[view.name])

    def _tuned(self, view: ViewConfig, written: Mapping[str, Any]) -> ViewConfig:
        """The view with ``precision: auto`` as its tuning file says; where that says what auto is
        anyway, the view as it is."""
        if (view.model.precision, view.model.backend) != ("auto", "auto"):
            return view
        tuning = read_tuning(self.folder, view.name, written)
        if tuning is None or (tuning["precision"], tuning["backend"]) == ("fp32", "eager"):
            return view
        chosen = {"precision": tuning["precision"], "backend": tuning["backend"]}
        try:
            model = type(view.model).model_validate(
                view.model.model_dump() | chosen, context=self.home
            )
        except ValidationError as exc:
            path = tuning_path(self.folder, view.name)
            raise ConfigError(
                f"{path}: picked {chosen}, which is nothing this version knows; run `precompute"
                " tune` again"
            ) from exc
        return view.model_copy(update={"model": model})

    def model_as_written(self, name: str) -> Mapping[str, Any]:
        """``use`` and ``args`` of a view's model before ``${…}`` are filled in: the same on every
        machine."""
        return self._read_views.models[name]

    def view(self, name: str) -> ViewConfig:
        """One view's configuration.

        Raises:
            ConfigError: there is none of that name, or its file is wrong.
        """
        if name in self.broken:
            raise self.broken[name]
        return self.views[self.named(name)]

    def named(self, name: str, retained: Collection[str] = ()) -> str:
        """A view's name, for what needs no definition: one that has a file, right or wrong, or is
        among ``retained``.

        Raises:
            ConfigError: there is none of that name.
        """
        names = sorted({*self.names, *retained})
        if name not in names:
            raise ConfigError(
                f"no view {name!r} in"
                f" {self.folder / 'views'}{self._other_suffix(name) or nearest_or_all(name, names)}"
            )
        return name

    @cached_property
    def services(self) -> Mapping[str, Service | ConfigError]:
        """Name → each that has a file, or what is wrong with that: the others go on. Defaults that
        fit no feature as the view is configured are left out."""
        read = self._read_services()
        return {
            name: one if isinstance(one, ConfigError) else fitted(one, self.views)
            for name, one in read.items()
        }

    def _read_services(self) -> Mapping[str, Service | ConfigError]:
        read: dict[str, Service | ConfigError] = {}
        for path in config_files(self.folder / "services"):
            try:
                read[path.stem] = read_service(path)
            except ConfigError as exc:
                read[path.stem] = _kept(exc)
        return read

    def service(self, name: str) -> Service:
        """One service.

        Raises:
            ConfigError: there is none of that name, or its file is wrong.
        """
        found = self.services.get(name)
        if found is None:
            have = ", ".join(self.services) or "none"
            raise ConfigError(
                f"no service {name!r} in"
                f" {self.folder / 'services'}{did_you_mean(name, self.services)} (there are:"
                f" {have})"
            )
        if isinstance(found, ConfigError):
            raise found
        return found

    def service_mistakes(self) -> list[str]:
        """A line for each mistake in the services' files: what keeps one from being served, and
        where one does not fit the views."""
        lines = []
        for name, found in self._read_services().items():
            path = self.folder / "services" / f"{name}.yaml"
            lines += (
                [str(found)]
                if isinstance(found, ConfigError)
                else mistakes(found, self.views, self.names, path)
            )
        return lines

    def _other_suffix(self, name: str) -> str:
        """The end of a message about a view's file that ends as YAML's do elsewhere."""
        found = next(
            (path for path in (self.folder / "views").glob("*.yml") if name in ("*", path.stem)),
            None,
        )
        return "" if found is None else f"; rename {found.name} to {found.stem}.yaml"

    @property
    def offline(self) -> OfflineStore:
        """Its offline store.

        Raises:
            OtherFormatError: the root is of another format, and nothing of it is read or written.
        """
        if not self._of_this_format:
            # damaged, or not to be read now: who needs it says so
            with contextlib.suppress(SnapshotError, StorageError):
                known_identity(self.root)
            self._of_this_format = True
        return OfflineStore(self.root)

    def stored(self, name: str) -> ViewStore:
        """What is stored of a view, which may no longer be configured.

        Raises:
            ConfigError: it is neither configured, nor is there anything of it.
        """
        offline = self.offline
        return offline.view(self.named(name, offline.views()))

    def wants(self, view: ViewConfig, hook: str) -> bool:
        """Whether a view is to have what a hook derives: there is a key of its name, of the project
        or of the view, that asks for it."""
        powers = (*self.settings.powers, *view.powers)
        return any(hook in keys.known() and keys.wants(view.name) for keys in powers)

    def schedules(self) -> dict[str, Schedule]:
        """The schedule section, every view's options spelled out."""
        return spelled_out(self.settings.schedule, self.settings.runs, self.settings.timezone)

    def _mounted_root(self) -> Path:
        """The folder of the root; of one elsewhere, that which it is mounted at.

        Raises:
            ConfigError: it cannot be opened.
        """
        url = self.settings.root
        scheme, found, _ = url.partition("://")
        return (
            ROOTS.open(scheme)(url, self.home, self.settings.powers) if found else self.home / url
        )

    def _check_references(self, read: _Views) -> None:
        for name, view in list(read.right.items()):
            for other, key in view.reads().items():
                if other not in self.names:
                    where = place(self.folder / "views" / f"{name}.yaml", key)
                    read.broken[name] = ConfigError(
                        f"{where}: {'.'.join(key)}: live.{other}: no such"
                        f" view{nearest_or_all(other, self.names)}"
                    )
                    read.right.pop(name, None)
        views = dict(read.right)
        known = {name: view.feature_view() for name, view in views.items()}
        for name, view in views.items():
            powers = (*self.settings.powers, *view.powers)
            found = (keys.mistake(known[name], self.names, known) for keys in powers)
            if (wrong := next(filter(None, found), None)) is not None:
                path = self.folder / "views" / f"{name}.yaml"
                read.broken[name] = _mistaken(wrong, path)
                del read.right[name]


def _mistaken(wrong: Mistake, file: Path) -> ConfigError:
    """What a power finds wrong with a key of a file."""
    return ConfigError(f"{place(file, wrong.key)}: {'.'.join(map(str, wrong.key))}: {wrong.what}")


def json_schemas() -> dict[str, Any]:
    """JSON Schemas of the files, for editors: ``{"project": …, "view": …, "service": …}``."""
    from precompute.jobs.config.view import ViewConfig

    kinds: dict[str, type[Section]] = {
        "project": ProjectConfig,
        "view": ViewConfig,
        "service": ServiceConfig,
    }
    return {name: kind.model_json_schema() for name, kind in kinds.items()}
