"""Scaffold: writes the files of a new project, or of a new view, from templates, over the user's
data or a sample. Nothing is overwritten."""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from precompute.jobs.config.project import Project
from precompute.jobs.config.section import read_yaml
from precompute.plugins.init.data_file import look_at
from precompute.plugins.init.model_file import FOLDER, filled
from precompute.plugins.init.view_draft import Draft, checked_template, draft, suited
from precompute.store.disk.durable_file import disk_message, replace_undurably
from precompute.store.doors import MODELS
from precompute.store.errors import ConfigError, PrecomputeError
from precompute.store.feature_view import NAME

SAMPLE_MODEL = "lightgbm"
"""What reads the sample of the template model."""
HARMLESS = re.compile(
    r"\..*|(readme|license|licence|copying|changelog|notice)(\..*)?|.*\.(md|csv|tsv|parquet|gz)|(data|venv)",
    re.IGNORECASE,
)
"""Names of what may lie in a folder that becomes a project: nothing of it is read or written by
one."""


@dataclass(frozen=True, slots=True)
class Scaffold:
    """A project or view that was written: ``files`` below ``folder``, each with what it is."""

    folder: Path
    data: str
    rows: int
    template: str
    view: Draft
    files: Mapping[str, str] = field(default_factory=dict)

    @property
    def notes(self) -> list[str]:
        """What a user who did not look at the data should know."""
        return list(dict.fromkeys(self.view.notes))


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a draft is made of.

    ``source`` is a CSV or Parquet file; a sample is written where there is none. ``template`` is
    one of ours, or a model of a plug-in that brings one; by default the one that suits the source.
    ``key`` are the columns that make the key, found where none is named; ``encoder`` is a
    sentence-transformers folder, and ``model`` the file of the template ``model``.
    """

    source: Path | None = None
    template: str | None = None
    key: Sequence[str] = ()
    encoder: str | None = None
    model: Path | None = None


def new_project(folder: Path, wanted: Wanted) -> Scaffold:
    """Write a project that can be run at once.

    Args:
        folder: made where there is none; what lies in it must be harmless.
        wanted: what it is made of.

    Raises:
        ConfigError: the folder has something in it, or the source cannot be used.
        PrecomputeError: something cannot be written.
    """
    check_folder(folder, wanted)
    made = _planned(folder, wanted)
    files = _files(made, wanted)
    files[".gitignore"] = ((FOLDER / "gitignore").read_bytes(), "what git leaves out")
    # last: a folder without it is no project yet
    files["project.yaml"] = (
        filled("project.yaml", {"schedule": _schedule(made.view)}).encode(),
        "where results lie, and when views run",
    )
    return _written(made, files)


def new_view(project: Project, name: str, wanted: Wanted) -> Scaffold:
    """Write a view into a project that is there.

    Raises:
        ConfigError: the name is none of a view, or there is one of that name; or the source cannot
            be used.
        PrecomputeError: something cannot be written.
    """
    if not NAME.match(name):
        raise ConfigError(
            f"view {name!r}: a name has lower-case letters, digits and _, starts with a letter, and"
            " is at most 63 long"
        )
    made = _planned(project.folder, wanted, name)
    if name in project.names:
        raise ConfigError(
            f"{project.folder / 'views' / name}.yaml is there: give the new view another name"
        )
    return _written(made, _files(made, wanted))


def check_folder(folder: Path, wanted: Wanted) -> None:
    """Raises:
    ConfigError: something of it could be in a project's way.
    """
    if not folder.exists() and not folder.is_symlink():
        return
    if not folder.is_dir():
        raise ConfigError(f"{folder}: is a file; give a folder that is empty or not there yet")
    if (folder / "project.yaml").exists():
        raise ConfigError(
            f"{folder}: is a project; add a view to it: precompute -c {folder} new view NAME"
        )
    own = {
        Path(path).absolute()
        for path in (wanted.source, wanted.model, wanted.encoder)
        if path is not None
    }
    found = sorted(
        p.name
        for p in folder.iterdir()
        if not HARMLESS.fullmatch(p.name) and p.absolute() not in own
    )
    if found:
        more = f" and {len(found) - 3} more" if len(found) > 3 else ""
        raise ConfigError(
            f"{folder}: is not empty ({', '.join(found[:3])}{more}); give a folder that is empty or"
            " not there yet"
        )


def _planned(folder: Path, wanted: Wanted, name: str | None = None) -> Scaffold:
    """What will be written; nothing is yet."""
    source, template, encoder, model = wanted.source, wanted.template, wanted.encoder, wanted.model
    template = template or ("model" if model else None)
    if template is not None:
        checked_template(template)
    if encoder is not None and template not in (None, "embeddings"):
        raise ConfigError(f"--encoder: template {template} embeds nothing; leave it out")
    if model is not None and template != "model":
        raise ConfigError(
            f"--model: template {template} takes no model file; leave it out, or take --template"
            " model"
        )
    if template == "model" and (source is None) != (model is None):
        lacks = (
            "--model FILE, or neither for a sample"
            if model is None
            else "--from FILE, whose rows have the columns that the model reads"
        )
        raise ConfigError(f"--template model: give {lacks}, too")
    if source is None:
        template = template or "embeddings"
        if template == "model" and not MODELS.is_here(SAMPLE_MODEL):
            instead = "give a model's file and rows for it (--model FILE --from FILE)"
            raise ConfigError(f"--template model: {MODELS.absence(SAMPLE_MODEL, instead)}")
        # as it will lie in the project
        data, model = look_at(FOLDER / "books.csv", FOLDER), FOLDER / "book_price.txt"
    else:
        data = look_at(source, folder)
        template = template or suited(data)
    view = draft(template, data, folder, key=wanted.key, name=name, encoder=encoder, model=model)
    return Scaffold(folder, str(source or data.path.name), data.rows, template, view)


def _files(made: Scaffold, wanted: Wanted) -> dict[str, tuple[bytes, str]]:
    """File → its content, and what it is."""
    files: dict[str, tuple[bytes, str]] = {}
    if wanted.source is None:
        files[made.data] = ((FOLDER / made.data).read_bytes(), f"sample data, {made.rows} rows")
    view = made.view
    if view.module is not None:
        files[view.module] = ((FOLDER / view.module).read_bytes(), "the model, yours to change")
    files[f"views/{view.name}.yaml"] = (view.text.encode(), "what is computed from what")
    return files


def _written(made: Scaffold, files: Mapping[str, tuple[bytes, str]]) -> Scaffold:
    """Raises:
    ConfigError: a file is there, and has another text.
    PrecomputeError: one cannot be written.
    """
    new = {}
    for name, (content, what) in files.items():
        path = made.folder / name
        if path.exists() and path.name == ".gitignore":
            continue
        if path.exists() and (path.is_dir() or path.read_bytes() != content):
            raise ConfigError(
                f"{path} is there, and is another one: move it, or use another folder"
            )
        if not path.exists():
            new[name] = (content, what)
    missing = [folder for folder in (made.folder / "views", made.folder) if not folder.exists()]
    try:
        (made.folder / "views").mkdir(parents=True, exist_ok=True)
        for name, (content, _) in new.items():
            (made.folder / name).parent.mkdir(exist_ok=True)
            replace_undurably(made.folder / name, content)
    except OSError as exc:
        with contextlib.suppress(OSError):
            for name in new:
                (made.folder / name).unlink(missing_ok=True)
        for folder in missing:
            shutil.rmtree(folder, ignore_errors=True)
        raise PrecomputeError(disk_message(made.folder, exc, "nothing was changed")) from exc
    return Scaffold(
        made.folder,
        made.data,
        made.rows,
        made.template,
        made.view,
        {name: what for name, (_, what) in new.items()},
    )


def schedule_of(project: Project, view: Draft) -> str | None:
    """The line to add to the project's schedule; None where it has one."""
    if view.name in read_yaml(project.folder / "project.yaml").get("schedule", {}):
        return None
    return _schedule(view)


def _schedule(view: Draft) -> str:
    return f'{view.name}: "0 2 * * *"'
