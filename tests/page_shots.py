"""Page shots: the page of the example's project with some history behind it, as Chromium shows it:
``python -m tests.page_shots FOLDER``.

On a phone and on a desk, light and dark, without a question and with each kind of answer. Needs
chromium on the PATH; no part of the tests.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import urllib.parse
from datetime import UTC, datetime, timedelta
from pathlib import Path

from precompute.store.client import Client
from precompute.store.errors import PrecomputeError
from precompute.store.times import iso
from tests import REPOSITORY
from tests.scene import Scene
from tests.server import Server

PROJECT = REPOSITORY / "examples" / "recommender" / "project"
SIZES = {"phone": (390, 4600), "desk": (1280, 2280)}
LIGHT, DARK = "1", "0"
"""Of Chromium's setting preferredColorScheme."""

LARGE = """
name: film_large
entity: [film_id]
source: {sql: "SELECT film_id, genres AS text FROM read_csv('films.csv')"}
model: {use: "film_models:GenreVector", args: {dim: 256}}
features: {vector: {dtype: float32, dim: 256}}
ttl: 26h
stale_for: 7d
fallback: {enabled: true, deadline: 2s}
semantic_cache: {view: film_vector, threshold: 0.9}
"""
"""A view of a model that is worth a semantic cache."""

QUESTIONS = {
    "": {},
    "-row": {"view": "user_favourites", "q": "ada", "do": "lookup"},
    "-text": {"view": "film_vector", "q": "silent comedy", "do": "text"},
}


def with_history(folder: Path) -> Scene:
    """The example's project after some days: snapshots, a run without changes, one that failed, and
    a way back."""
    shutil.copytree(PROJECT, folder, ignore=shutil.ignore_patterns("var", "__pycache__"))
    (folder / "views" / "film_large.yaml").write_text(LARGE)
    scene = Scene(folder, {})
    films, users = folder / "films.csv", folder / "users.csv"
    whole = films.read_text()
    scene.publish_all("film_vector", "user_favourites", "film_large")
    films.write_text(whole.replace("horror silent", "horror fantasy silent"))
    scene.publish_all("film_vector", "user_favourites")
    scene.publish_all("film_vector")
    films.write_text(whole.replace("film_id,", "film,"))
    try:
        scene.run("film_vector")
    except PrecomputeError as exc:
        print(exc)
    films.write_text(whole + "41,The Red Shoes,1948,drama musical romance\n")
    scene.publish_all("film_vector", "user_favourites")
    scene.rollback("film_vector")
    users.write_text(users.read_text() + "mia,40 8\n")
    for view in scene.views:
        # days between what was done in seconds
        runs = scene.offline.view(view).runs
        for i, report in enumerate(runs.reports()):
            report.started_at = iso(datetime.now(UTC) - timedelta(hours=2 + 22.5 * i))
            runs.write(report)
    return scene


def asked(url: str) -> None:
    """Some requests, so that there is something to show."""
    with Client(url) as client:
        for _ in range(40):
            client.rows("film_vector", [1, 2, 3, 99])
            client.rows("user_favourites", ["ada", "ben", "mia", "nobody"])
            client.get("film_vector", list(range(1, 41)))
            client.search("film_vector", key=8)
            client.row("film_vector", 7)
            for number, text in enumerate(
                ("comedy silent", "comedy musical romance", "western noir")
            ):
                client.rows("film_large", [f"9{number}"], inputs={f"9{number}": {"text": text}})


def shoot(url: str, path: Path, width: int, height: int, scheme: str) -> None:
    """One picture of a page."""
    command = [
        *(
            "chromium",
            "--headless=old",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            "--force-device-scale-factor=1",
        ),
        *(
            f"--blink-settings=preferredColorScheme={scheme}",
            f"--window-size={width},{height}",
            f"--screenshot={path}",
            url,
        ),
    ]
    subprocess.run(command, check=True, capture_output=True, timeout=120)


def main(out: Path) -> None:
    """Take all pictures into a folder."""
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        scene = with_history(Path(temporary) / "project")
        with Server(scene.folder) as server:
            asked(server.url)
            for device, (width, height) in SIZES.items():
                for scheme in (LIGHT, DARK):
                    for name, question in QUESTIONS.items():
                        path = out / f"{device}-{'light' if scheme == LIGHT else 'dark'}{name}.png"
                        shoot(
                            f"{server.url}/?{urllib.parse.urlencode(question)}",
                            path,
                            width,
                            height,
                            scheme,
                        )
                        print(path, os.path.getsize(path))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
