"""Tuning file: what ``precompute tune`` measured and picked, ``<project>/tuning/<view>.json``. A model's ``precision: auto`` reads it.

It lies beside the configuration, to be committed with it: a view then computes in the same precision on every machine, or says that it
cannot. It counts as long as the model's ``use`` and ``args`` are what they were when it was written.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from precompute.store.disk.durable_file import make_folder, replace_durably
from precompute.store.errors import ConfigError

VERSION = 1


def tuning_path(folder: Path, view: str) -> Path:
    """Where the tuning file of a view is."""
    return folder / "tuning" / f"{view}.json"


def write_tuning(folder: Path, view: str, model: Mapping[str, Any], tuning: Mapping[str, Any]) -> Path:
    """Write ``tuning``: ``precision`` and ``backend`` as picked, and whatever else was measured.

    Args:
        folder: of the project.
        view: its name.
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
    except (OSError, ValueError) as exc:
        raise ConfigError(f"{path}: cannot be read ({exc}); run `precompute tune {view}` again, or remove it") from exc
    wanted = {"version", "model", "precision", "backend"}
    if not isinstance(body, dict) or not wanted <= set(body) or body["version"] != VERSION:
        raise ConfigError(f"{path}: is no tuning file of this version; run `precompute tune {view}` again, or remove it")
    return body if body["model"] == _model(model) else None


def _model(model: Mapping[str, Any]) -> Any:
    return json.loads(json.dumps({"use": model["use"], "args": model["args"]}, default=str))
