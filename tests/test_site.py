"""The documents as a site: it is built without a warning and without a network, and what is written
by hand agrees with what is written from the code."""

from __future__ import annotations

import os
import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

import precompute
from precompute.jobs.cli import _parser
from precompute.jobs.config.project import ProjectConfig
from precompute.jobs.config.section import parse_duration
from precompute.jobs.config.view import ViewConfig
from precompute.store.doors import NAMES
from precompute.store.http.openapi import openapi_document
from tests import REPOSITORY
from tests.documents import blocks, printed_by, read
from tests.test_readme import settings

PAGES: dict[str, Callable[[], str]] = runpy.run_path(str(REPOSITORY / "docs/site/generated.py"))[
    "PAGES"
]
ROW = re.compile(r"^\| (.+?) \| (.*?) \|(.*)\|$", re.MULTILINE)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the site is built in."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    # whoever would fetch something finds nobody there
    environment = os.environ | {
        "NO_MKDOCS_2_WARNING": "1",
        "HTTPS_PROXY": "http://127.0.0.1:9",
        "HTTP_PROXY": "http://127.0.0.1:9",
    }
    printed_by(command, environment)
    return folder


def test_the_site_is_whole_and_loads_nothing_from_elsewhere(site: Path) -> None:
    """Every document has its page, each block of code its highlighting, and no page a script, style
    or picture of another host."""
    pages = {
        str(path.relative_to(site)): path.read_text(encoding="utf-8")
        for path in site.rglob("*.html")
    }
    documents = {f"{path.stem}.html" for path in (REPOSITORY / "docs").glob("*.md")}
    assert {
        "index.html",
        *documents,
        *(name.replace(".md", ".html") for name in PAGES),
    } <= pages.keys()
    assert not (site / "site").exists()
    for name, page in pages.items():
        assert (
            re.findall(r"<(?:script|link|img)[^>]+(?:src|href)=\"?(?:https?:)?//[^>]+", page) == []
        ), name
        text = re.sub(r"<(script|style|pre|code)\b.*?</\1>", "", page, flags=re.DOTALL)
        assert re.findall(r"```|^\| |\]\([\w./#-]+\)", text, re.MULTILINE) == [], (
            f"{name}: Markdown that was taken for text"
        )


# ---- what is written from the code


def defaults() -> dict[str, str]:
    """Key → default, as the page of the configuration has them."""
    rows = [
        [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        for line in PAGES["reference/configuration.md"]().splitlines()
        if line.startswith("| `")
    ]
    lacking = [key for key, _, _, what in rows if not what]
    assert lacking == [], "a key without a description: give its field one"
    return {key.strip("`"): default.strip("`") for key, _, default, _ in rows}


def test_the_generated_pages_leave_nothing_out() -> None:
    keys = {key.rpartition(".")[2] for key in defaults()}
    assert {*settings(ViewConfig), *settings(ProjectConfig)} <= keys
    commands = _parser().commands
    assert commands is not None
    assert commands.shown().keys() <= set(
        re.findall(r"^## `([\w ]+)`$", PAGES["reference/commands.md"](), re.MULTILINE)
    )
    routes = {
        f"{method.upper()} {path}"
        for path, methods in openapi_document()["paths"].items()
        for method in methods
    }
    assert routes == set(
        re.findall(r"^## `([A-Z]+ .+)`$", PAGES["reference/http.md"](), re.MULTILINE)
    )
    absent = {name for name in NAMES.known() if not NAMES.is_here(name)}
    assert {name for name in precompute.__all__ if f"precompute.{name}" not in absent} <= set(
        re.findall(r"^##+ `(\w+)`$", PAGES["reference/python.md"](), re.MULTILINE)
    )


def test_every_table_of_a_models_file_is_on_its_page() -> None:
    """Each that is written as a constant of a module; and each key of it with what becomes of
    it."""
    page = PAGES["reference/model-files.md"]()
    written = sum(
        len(re.findall(r"^[A-Z_0-9]+ = KnownKeys\($", path.read_text(), re.MULTILINE))
        + len(re.findall(r"^[A-Z_0-9]+ = KnownKeys\(.+\)$", path.read_text(), re.MULTILINE))
        for path in (REPOSITORY / "precompute").rglob("*.py")
        if not {"store", "jobs"} & set(path.relative_to(REPOSITORY / "precompute").parts)
    )
    assert page.count("\n### ") == written > 20
    assert "| `linear.weight`, `linear.bias`, `residual.weight` | read |" in page
    assert "| `position_embedding_type` | only `'absolute'` is computed |" in page
    assert "refused: it belongs to weights that were quantized" in page


def alike(value: str) -> Any:
    """A value as a document spells it: 24h and 1d are one, and so are 100,000 and 100000."""
    value = value.strip("`").replace(",", "")
    try:
        return parse_duration(value)
    except ValueError:
        return yaml.safe_load(value)


def test_what_is_written_by_hand_has_the_defaults_of_the_code() -> None:
    """In the tables of keys the default of each, and in their words: of a section ``name``
    (``default``)."""
    known, seen = defaults(), 0
    for cell, default, words in ROW.findall(read("docs/reference.md")):
        key = cell.strip("`")
        if known.get(key) and re.fullmatch("`[^`]+`", default):
            assert alike(default) == alike(known[key]), (
                f"{key}: {default} in docs/reference.md, {known[key]} in the code"
            )
            seen += 1
        for name, value in re.findall(r"`(\w+)` \((`[^`{]+`|[\d,]+)\)", words):
            if (inner := known.get(f"{key}.{name}")) is not None:
                assert alike(value) == alike(inner), (
                    f"{key}.{name}: {value} in docs/reference.md, {inner} in the code"
                )
                seen += 1
    assert seen > 15


# ---- snippets


def test_the_settings_of_the_gpu_page_are_settings() -> None:
    found = [yaml.safe_load(block) for block in blocks("docs/gpu.md", "yaml")]
    assert len(found) == 4
    for settings_ in found:
        for key, value in settings_.items():
            field = ({**ViewConfig.model_fields, **ProjectConfig.model_fields})[key]
            assert isinstance(field.annotation, type)
            field.annotation.model_validate(value)
