"""Project: the views of golden roots, whatever format their root is of, and what is asked of them.

No file is read by a source, so that a root may lie anywhere: views take frames, or read each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, get_args

import yaml

from precompute.jobs.config.gates import GatesConfig
from precompute.jobs.ops.history import history
from precompute.store.errors import SnapshotError
from precompute.store.history import read
from precompute.store.times import containing
from tests.scene import Scene

Frame = dict[str, list[Any]]
Rows = Mapping[int, float]

DAYS = ("2026-01-01", "2026-01-02", "2026-01-03", "2026-01-04")
KEYS = range(40)
"""All keys that any snapshot of any view has."""
UNGATED: dict[str, Any] = {
    name: None
    for name, of in GatesConfig.model_fields.items()
    if type(None) in get_args(of.annotation)
}
PLAIN: dict[str, Any] = {
    "entity": ["id"],
    "source": {"frame": ["id", "double"]},
    "model": {"use": "columns"},
    "features": {"double": {"dtype": "float64"}},
    # they are opened years later
    "ttl": "36500d",
    "gates": UNGATED,
}
VIEWS: dict[str, dict[str, Any]] = {
    # three segments, with kills and removed keys, and a vector index over them
    "numbers": {
        "source": {"frame": ["id", "double", "vector"]},
        "features": {"double": {"dtype": "float64"}, "vector": {"dtype": "float32", "dim": 4}},
        "index": {"on": "vector", "metric": "l2"},
    },
    # the upper segments were made one
    "merged": {},
    # what `days` reads
    "entries": {
        "source": {"frame": ["id", "day", "double"]},
        "features": {"day": {"dtype": "string"}, "double": {"dtype": "float64"}},
    },
    # all partitions are served
    "days": {
        "source": {
            "sql": "SELECT id, double FROM live.entries WHERE CAST(day AS TIMESTAMP) >= $start"
            " AND CAST(day AS TIMESTAMP) < $end"
        },
        "partition": {"by": "day", "start": DAYS[0], "serve": "all"},
    },
    # rolled back, held, and a snapshot waits
    "held": {},
    # an early snapshot stays
    "pinned": {},
    # a refusal that was accepted, and one that was not
    "judged": {"gates": UNGATED | {"rows": 0.5}},
    # a rollback that did not hold left marks, and a damaged manifest was given up
    "marked": {},
    # a run was killed with its chunks computed
    "killed": {},
    # a publishing was killed between the log and the online store
    "ahead": {},
}


def write_project(folder: Path, online: str) -> Scene:
    """The project's files, over a root and an online store that are there or come to be."""
    (folder / "views").mkdir(parents=True, exist_ok=True)
    settings = {"root": "./var", "online": online, "retention": {"keep": 3}}
    (folder / "project.yaml").write_text(yaml.safe_dump(settings))
    for name, over in VIEWS.items():
        definition = {"name": name} | PLAIN | over
        (folder / "views" / f"{name}.yaml").write_text(yaml.safe_dump(definition))
    return Scene(folder, {})


def frame_of(view: str, rows: Rows) -> Frame:
    """What a run of a view is given for these rows, key → double; of ``entries`` the key says the
    day, eight a day."""
    frame: Frame = {"id": list(rows), "double": list(rows.values())}
    if view == "numbers":
        frame["vector"] = [vector_of(double) for double in rows.values()]
    if view == "entries":
        frame["day"] = [DAYS[key % len(DAYS)] for key in rows]
    return frame


def vector_of(double: float) -> list[float]:
    """The vector of a row of ``numbers``."""
    return [double, double + 1, double + 2, double + 3]


def run(scene: Scene, view: str, rows: Rows, **options: Any) -> str:
    """Run a view that takes a frame; the report's status."""
    return scene.run(view, frame=frame_of(view, rows), **options).status


def run_day(scene: Scene, day: str, **options: Any) -> str:
    """Run a partition of ``days``; the report's status."""
    at = datetime.fromisoformat(day).replace(tzinfo=UTC)
    return scene.run("days", partition=containing("day", at), **options).status


# ---- what is asked


def answers(scene: Scene) -> dict[str, Any]:
    """What all views answer now, as JSON has it: of each its live rows, what was served after each
    of its publishings, its history, and in words how it stands; and what is nearest to some
    vectors."""
    found: dict[str, Any] = {view: _of_view(scene, view) for view in VIEWS}
    found["nearest"] = {str(x): nearest(scene, x) for x in (0.0, 7.0, 1000.0)}
    return found


def live_rows(scene: Scene, view: str) -> dict[str, Any]:
    """Key → the row that a lookup answers, of those that it answers at all."""
    with scene.lookup() as lookup:
        rows = lookup.get(view, KEYS).to_pylist()
    return {
        str(key): {name: _plain(value) for name, value in row.items() if name in _OF_ROW}
        for key, row in zip(KEYS, rows, strict=True)
        if row["status"] != "missing"
    }


_OF_ROW = ("status", "source", "snapshot", "model", "computed_at", "day", "double", "vector")


def doubles(scene: Scene, view: str) -> dict[int, float]:
    """Key → double that a lookup answers."""
    return {int(key): row["double"] for key, row in live_rows(scene, view).items()}


def nearest(scene: Scene, x: float) -> list[Any]:
    """(key, score) of the three rows of ``numbers`` that are nearest to the vector of x."""
    with scene.lookup() as lookup:
        rows = lookup.search("numbers", vector=vector_of(x), k=3)["rows"]
    return [[int(row["key"]), row["score"]] for row in rows]


def served_at(scene: Scene, view: str, at: datetime) -> dict[str, Any]:
    """Key → row that was served at a time, read from the segments."""
    try:
        table = read(scene.offline.view(view), at)
    except SnapshotError:
        return {}
    rows = table.sort_by("id").drop_columns("input_hash").to_pylist()
    return {
        str(row.pop("id")): {name: _plain(value) for name, value in row.items()} for row in rows
    }


def _of_view(scene: Scene, view: str) -> dict[str, Any]:
    line = scene.status(view)
    store = scene.offline.view(view)
    moments = [entry.since for entry in store.log.publishings()]
    return {
        "rows": live_rows(scene, view),
        "then": {at: served_at(scene, view, datetime.fromisoformat(at)) for at in moments},
        "status": {name: line[name] for name in _OF_STATUS}
        | {"held": line["held"] and {name: line["held"][name] for name in _OF_HOLD}},
        "history": [
            {name: event[name] for name in _OF_HISTORY if event.get(name) is not None}
            for event in history(scene, view, 1000)
        ],
        "pins": sorted(store.log.pins()),
        "bad": sorted(store.log.bad()),
    }


_OF_STATUS = ("status", "snapshot", "partition", "rows", "online")
_OF_HOLD = ("since", "by", "reason", "waits", "repeats")
_OF_HISTORY = (
    *("at", "kind", "event", "snapshot", "status", "run", "rows", "reason", "by", "live"),
    *("previous", "pinned", "bad", "refused_by", "accepted"),
)


def _plain(value: Any) -> Any:
    return value.isoformat() if isinstance(value, datetime) else value
