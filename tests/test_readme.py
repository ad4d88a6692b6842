"""The README and the documents are true: the demo runs, every command works, the README's project
gives what is printed there, and nothing is left out."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest

from demo.__main__ import VIEWS
from precompute.jobs.cli import _parser
from precompute.jobs.config.gates import GatesConfig
from precompute.jobs.config.project import ProjectConfig
from precompute.jobs.config.schedule import ScheduleConfig
from precompute.jobs.config.section import Section
from precompute.jobs.config.serve import ServiceConfig
from precompute.jobs.config.view import FeatureConfig, ViewConfig
from precompute.store.doors import KNOWN
from precompute.store.feature_view import RESERVED
from precompute.store.wire.bodies import LookupRequest, SearchRequest, ServiceRequest
from precompute.techniques.machine import has_bf16
from precompute.text.bert import kernel
from tests import REPOSITORY
from tests.documents import (
    PRECOMPUTE,
    Running,
    blocks,
    check_printed,
    command_of,
    commands,
    curl,
    in_process,
    is_here,
    printed_by,
    read,
    unset_settings,
    wait_until_ready,
)
from tests.jobs.test_every_cpu import tried
from tests.online_rig import rig_of, rigged

LIMIT, DOCS, EPOCHS = 400, 32, 6
"""Users and items of the demo here, its documents, and passes of its training: its recommendations
are 1.5 times as good as the baseline after them. It takes half a minute of CPU; with all users and
items, 64 documents and 3 passes 67 s."""
DOCUMENTS = [
    "README.md",
    *sorted(str(path.relative_to(REPOSITORY)) for path in (REPOSITORY / "docs").glob("*.md")),
]
RUN = ["README.md", "docs/demo.md", "docs/gpu.md", "docs/reference.md"]
"""Documents whose commands are run as they stand; those of the others have made-up names and are
only parsed."""


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, str], str]:
    """(environment that points the demo's project at a folder of the test, what the demo
    printed)."""
    var = tmp_path_factory.mktemp("demo")
    overrides = {
        "PRECOMPUTE_ROOT": str(var),
        "PRECOMPUTE_ONLINE": f"table:{var}/online",
        "PRECOMPUTE_VARS__DATA": f"{var}/data",
    }
    environment = os.environ | overrides | {"PRECOMPUTE_SERVE__BIND": "127.0.0.1:0"}
    command = [sys.executable, "-m", "demo", "-c", "configs/movielens", "--limit", str(LIMIT)]
    command += ["--documents", str(DOCS), "--epochs", str(EPOCHS)]
    return environment, printed_by(command, environment, timeout_s=600)


@pytest.mark.timeout(700)
def test_the_demo_prints_what_it_promises(demo: tuple[dict[str, str], str]) -> None:
    _, printed = demo
    published = re.findall(
        r"^(\w+): published, snapshot 1, ([\d,]+) of ([\d,]+) rows, [\d,]+ rows/s",
        printed,
        re.MULTILINE,
    )
    rows = dict.fromkeys(VIEWS, str(LIMIT)) | {"doc_embedding": str(DOCS)}
    assert published == [(name, written, written) for name, written in rows.items()]
    assert len(re.findall(r"^ ?\d+\. .+ -?\d+\.\d\d$", printed, re.MULTILINE)) == 10
    assert "50: fresh from store" in printed
    assert "9999: computed from fallback" in printed
    assert "8888: missing (unknown_entity)" in printed
    ours, baseline = map(
        float,
        re.search(r"as served: (0\.\d+)   most popular: (0\.\d+)", printed).groups(),  # type: ignore[union-attr]
    )
    assert ours > 1.2 * baseline > 0
    of_bf16 = ["bf16-onednn", *(["bf16-encoder"] if kernel() else [])] if has_bf16() else []
    assert tried(printed) == (["fp32-onednn", *of_bf16] if is_here("tune") else [])


@pytest.mark.timeout(400)
def test_every_command_of_the_documents_works(
    demo: tuple[dict[str, str], str],
    request: pytest.FixtureRequest,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those that run until they are told to end, and the first of the others, as the command that
    is installed; the rest in this process."""
    monkeypatch.chdir(REPOSITORY)
    environment = demo[0] | {"PYTHONPATH": str(REPOSITORY)}
    settings = {
        name: value for name, value in environment.items() if name.startswith("PRECOMPUTE_")
    }
    seen = [line for document in RUN for line, _ in commands(document) if "-c books" not in line]
    assert len(seen) > 15
    serve = ["-c", "configs/movielens", "serve"]
    # ended soon: each model has a second process after ten seconds
    server, started = Running([*PRECOMPUTE, *serve], environment), set[str]()
    try:
        address = server.first.removeprefix("serving on ").strip()
        wait_until_ready(address)
        for line in seen:
            if line.startswith("curl"):
                answer = curl(shlex.split(line), address)
                assert answer, line
                assert all(
                    row["status"] in ("fresh", "missing", "computed")
                    for row in answer.get("rows", [])
                ), line
    finally:
        assert server.end() == 0
    for line in seen:
        # what is measured there is not looked at here
        words = shlex.split(re.sub("--rows (256|64)", "--rows 16", line))
        if words[0] == "make":
            target = {"demo": "-m demo", "serve": "serve", "test": "pytest"}[words[1]]
            assert target in printed_by(["make", "-n", words[1]], environment)
        elif words[-1] in ("serve", "schedule"):
            started.add(words[-1])
            if words[1:] != serve:
                running = Running([*PRECOMPUTE, *words[1:]], environment)
                assert running.first, line
                assert running.end() == 0, line
        elif words[0].startswith("PRECOMPUTE_ONLINE=") and rig_of(words[0][18:]) is None:
            continue  # it comes with a power that is not here
        elif words[0] != "curl":
            given = (
                {"PRECOMPUTE_ONLINE": request.getfixturevalue(rigged(words[0][18:]).url)}
                if words[0].startswith("PRECOMPUTE_")
                else {}
            )
            words = words[words.index("precompute") + 1 :]
            if not is_here(command_of(words)):
                continue
            if "run" not in started:
                started.add("run")
                ended = 0, printed_by([*PRECOMPUTE, *words], environment | given), ""
            else:
                ended = in_process(words, settings | given, capsys)
            assert ended[0] == 0, f"{line}\n{ended}"
            assert ended[1], line
            assert "Traceback" not in ended[2]
    assert started == {"run", "schedule", "serve"}


@pytest.mark.timeout(700)
def test_the_history_of_the_reference_is_there(demo: tuple[dict[str, str], str]) -> None:
    environment, _ = demo
    code = next(
        block
        for block in blocks("docs/reference.md", "python")
        if "get_historical_features" in block
    )
    code = code.replace('"var/movielens"', repr(environment["PRECOMPUTE_ROOT"]))
    code += "print(items.num_rows, training.column_names, len(past.versions), training['item_vector__vector'].null_count)"
    names = ["item_id", "event_timestamp", "item_vector__vector", "item_vector__computed_at"]
    printed = printed_by([sys.executable, "-c", code], environment)
    assert printed.strip() == f"{LIMIT} {names} 1 0"


def test_documents_and_examples_import_what_is_public() -> None:
    """As docs/reference.md lists it: the package itself, and a few modules by their whole names."""
    public = next(
        line
        for line in read("docs/reference.md").splitlines()
        if line.startswith("`MissingRowError`")
    )
    texts = {document: read(document) for document in DOCUMENTS}
    texts |= {
        str(path): path.read_text(encoding="utf-8")
        for path in (REPOSITORY / "examples").rglob("*.py")
    }
    imported = {
        (name, module)
        for name, text in texts.items()
        for module in re.findall(r"^\s*(?:from|import) (precompute\.[\w.]+)", text, re.MULTILINE)
    }
    assert len(imported) > 4
    assert [one for one in sorted(imported) if f"`{one[1]}`" not in public] == []


# ---- the README's own project


@pytest.fixture(scope="module")
def books(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the folder ``books`` is, with the files of the README as their first lines name them
    (those of a CSV file would be data), and nothing else."""
    folder = tmp_path_factory.mktemp("readme")
    (folder / "books").mkdir()
    (rows,) = blocks("README.md", "csv")
    (folder / "books/books.csv").write_text(rows)
    for kind in ("yaml", "python"):
        for block in blocks("README.md", kind):
            named = re.match(r"# (books/[\w./]+).*\n", block)
            if named:
                path = folder / named[1]
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(block[named.end() :])
    assert sum(path.is_file() for path in folder.rglob("*")) == 5
    return folder


@pytest.mark.timeout(300)
def test_the_project_of_the_readme_prints_what_is_printed_there(
    books: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every command, in its order, in this process, which finds the project's own modules; and the
    Python below them in one of its own, with what it prints."""
    unset_settings(monkeypatch)
    monkeypatch.chdir(books)
    own = [(line, printed) for line, printed in commands("README.md") if "-c books" in line]
    assert len(own) == 5
    for line, expected in own:
        status, printed, told = in_process(shlex.split(line)[1:], {}, capsys)
        assert status == 0, told
        check_printed(printed, expected)
    code = next(block for block in blocks("README.md", "python") if "Lookup.open" in block)
    printed = printed_by([sys.executable, "-c", code], cwd=books)
    check_printed(printed, blocks("README.md", "text")[0].splitlines())


# ---- what the documents say is there, and all that is there


def test_the_commands_of_the_other_documents_are_commands() -> None:
    text = "".join(
        read(document) for document in DOCUMENTS if document != "docs/tutorial.md"
    )  # whose commands tests/test_pages.py runs
    found = re.findall(r"^\$ precompute (.+)$", text, re.MULTILINE)
    assert len(found) > 5
    for words in (shlex.split(line, comments=True) for line in found):
        if is_here(name := command_of(words)):
            assert _parser().parse_args(words).command == name, words


def test_the_view_of_the_demo_is_the_view_in_the_repository() -> None:
    assert (REPOSITORY / "configs/movielens/views/item_embedding.yaml").read_text() in blocks(
        "docs/demo.md", "yaml"
    )


def test_the_tree_names_every_file() -> None:
    tree = next(block for block in blocks("docs/architecture.md", "text") if "jobs/" in block)
    listed = Counter(re.findall(r"^ +(\w+)  ", tree, re.MULTILINE))
    files = Counter(
        path.stem
        for room in ("jobs", "precompute", "store")
        for path in (REPOSITORY / room).rglob("*.py")
        if path.name != "__init__.py" and path.parent.name != "templates"
        if REPOSITORY / "precompute/plugins" not in path.parents
    )
    powers = {
        path.parent.name for path in (REPOSITORY / "precompute/plugins").glob("*/__init__.py")
    }
    gone = {way.power for ways in KNOWN.values() for way in ways.values()} - powers
    assert listed == files + Counter(powers | gone)


def test_the_readme_is_short() -> None:
    assert len(read("README.md").splitlines()) < 200


def test_links_lead_somewhere() -> None:
    for document in DOCUMENTS:
        for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", read(document)):
            path, _, anchor = target.partition("#")
            file = (REPOSITORY / document).parent / path if path else REPOSITORY / document
            assert file.exists(), f"{document}: {target}"
            if anchor:
                heads = re.findall(r"^#+ (.+)$", file.read_text(encoding="utf-8"), re.MULTILINE)
                assert anchor in {
                    re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads
                }, f"{document}: {target}"


def settings(model: type[Section]) -> Iterator[str]:
    """Names of its keys and of those of every model in them, but for the gates, which have a
    table of their own."""
    for name, field in model.known().items():
        yield name
        for inner in (field.annotation, *get_args(field.annotation)):
            if inner is not GatesConfig and isinstance(inner, type) and issubclass(inner, Section):
                yield from settings(inner)


def test_the_reference_leaves_nothing_out() -> None:
    """Every key of a view, a service, a project and a request, every reserved name, every command,
    every gate."""

    def code(document: str) -> set[str]:
        return set(re.findall(r"\w+", " ".join(re.findall(r"`([^`\n]+)`", read(document)))))

    requests = {
        *LookupRequest.__struct_fields__,
        *SearchRequest.__struct_fields__,
        *ServiceRequest.__struct_fields__,
    }
    keys = {
        *settings(ViewConfig),
        *settings(ServiceConfig),
        *settings(ProjectConfig),
        *ScheduleConfig.model_fields,
        *FeatureConfig.model_fields,
    }
    named = next(a.choices for a in _parser()._actions if isinstance(a.choices, dict))
    assert {*keys, *requests, *RESERVED, *named} - code("docs/reference.md") == set()
    assert set(GatesConfig.model_fields) - code("docs/operations.md") == set()
