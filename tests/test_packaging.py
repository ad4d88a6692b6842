"""What a stranger installs: every import is declared, and the wheel says its license and that it is
typed."""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import importlib.util
import json
import re
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from typing import Any

import pyarrow as pa
import pytest

import precompute
from precompute.store.doors import NAMES
from precompute.store.wire.arrow import encode_arrow
from tests import REPOSITORY
from tests.hostile import Hostile, Visit

ROOMS = ("store", "precompute", "jobs")
PROJECT: dict[str, Any] = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
EXTRAS: dict[str, list[str]] = PROJECT["project"]["optional-dependencies"]
USES = {
    "store": ["cpu", "s3"],
    "precompute": [
        "engine",
        "testing",
        "libraries",
    ],
    "precompute/plugins": [
        "engine",
        "endpoint",
        "iceberg",
        "images",
        "onnx",
        "openvino",
        "otel",
        "ray",
        "s3",
        "lightgbm",
        "xgboost",
        "catboost",
        "libraries",
        "notebook",
    ],
    "jobs": ["engine"],
    "demo": ["engine", "demo"],
    "docs": ["engine", "docs"],
    "tests": ["cpu", "demo", "dev"],
    "benchmarks": ["cpu", "demo", "bench"],
    "examples": ["client"],
}
"""Folder → extras that it may import from, beside what is always installed."""


@pytest.mark.skipif(shutil.which("c++") is None, reason="no compiler")
@pytest.mark.parametrize("name", ["precompute.store.online._kernels", "precompute.text._encoder"])
def test_an_extension_is_built_where_a_compiler_is(name: str) -> None:
    """It is optional to install, so that one that no longer compiles would go unseen: its tests are
    left out without it."""
    assert importlib.util.find_spec(name) is not None, (
        "python setup.py build_ext --inplace says why"
    )


def normalised(name: str) -> str:
    """As package registries compare names (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def declared(*extras: str) -> set[str]:
    """Distributions that installing with these extras brings by name, extras that they name
    included."""
    found: set[str] = set()
    todo = [
        *PROJECT["project"]["dependencies"],
        *(line for extra in extras for line in EXTRAS[extra]),
    ]
    while todo:
        line = todo.pop()
        nested = re.match(r"precompute-store\[(\w+)\]", line)
        if nested:
            todo += EXTRAS[nested[1]]
        else:
            found.add(normalised(re.split(r"[^\w.-]", line)[0]))
    return found


distributions = functools.cache(packages_distributions)
"""Top-level module → the distributions that it comes from."""


def outside_imports(folder: str) -> set[str]:
    """Top-level modules that the folder's files import anywhere, but for Python's own and ours;
    peers and orchestrators have an environment of their own."""
    found: set[str] = set()
    for path in (REPOSITORY / folder).rglob("*.py"):
        inner = path.relative_to(REPOSITORY / folder).parts
        if path.parent.name in ("peers", "deploy") or "plugins" in inner or "tests" in inner:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found.update(alias.name.partition(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                found.add(node.module.partition(".")[0])
    local = {path.stem for path in (REPOSITORY / folder).rglob("*.py")}
    return (
        found
        - sys.stdlib_module_names
        - {*ROOMS, "demo", "tests", "benchmarks", "examples"}
        - local
    )


@pytest.mark.parametrize("folder", USES)
def test_what_is_imported_is_declared(folder: str) -> None:
    """Also what is imported only when it is needed: `make bench` on a fresh machine finds all of
    it. But open_clip, which is asked where it is installed, wants a torchvision of its own."""
    known, have = distributions(), declared(*USES[folder])
    imported = outside_imports(folder)
    missing = {
        name
        for name in imported - {"open_clip"}
        if have.isdisjoint(map(normalised, known.get(name, [name])))
    }
    assert missing == set(), (
        f"{folder} imports them; add them to the dependencies, or to an extra of {USES[folder]}"
    )


ABSENT = """
import sys
from importlib.metadata import packages_distributions
allowed, known = set(sys.argv[1].split()), packages_distributions()

class Absent:
    # what is not installed with the client, is not there
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        ours = top in sys.stdlib_module_names or top in ("precompute", "sitecustomize") or not allowed.isdisjoint(d.lower() for d in known.get(top, []))
        if not ours:
            raise ModuleNotFoundError(f"no {top} here", name=top)

sys.meta_path.insert(0, Absent())
"""
LEAN = (
    ABSENT
    + """
from precompute.store.client import AsyncClient, Client
from precompute.store.errors import ConfigError
with Client(sys.argv[2]) as client:
    print(client.views(), client.rows("numbers", [1]).rows[0].features)
    try:
        print(client.get("numbers", [1])["double"].to_pylist())
    except ConfigError as exc:
        print(exc)
print(sorted({name.partition(".")[0] for name in sys.modules} & {"numpy", "pyarrow", "torch", "duckdb", "pydantic", "asyncio"}))
"""
)


THEIR_OWN = {"h11", "anyio", "idna", "truststore", "typing-extensions"}
"""What httpcore2 and numpy need by themselves."""


@pytest.mark.parametrize("extras", [(), ("client",)])
def test_the_client_needs_what_it_says_and_no_more(extras: tuple[str, ...]) -> None:
    """Run where nothing else can be imported; what httpcore2 and numpy need by themselves is there
    too."""
    needed = declared(*extras) | THEIR_OWN
    features: dict[str, Any] = {"double": 2.0}
    row = {
        "key": "1",
        "status": "fresh",
        "source": "store",
        "computed_at": None,
        "age_s": 1,
        "ttl_s": 2,
        "snapshot": 3,
        "model": "m",
    }
    answer = {
        "view": "numbers",
        "snapshot": 3,
        "model": "m",
        "rows": [row | {"features": features}],
    }

    def answers(visit: Visit) -> None:
        if visit.request.startswith(b"GET"):
            visit.answer()
        elif b"arrow" in visit.request.partition(b"\r\n\r\n")[0]:
            visit.answer(
                200,
                bytes(
                    encode_arrow(
                        pa.table({"key": ["1"], "double": [2.0]}).replace_schema_metadata(
                            {"view": "numbers"}
                        )
                    )
                ),
            )
        else:
            visit.answer(200, json.dumps(answer).encode())

    with Hostile(answers) as server:
        command = [sys.executable, "-c", LEAN, " ".join(needed), server.url]
        done = subprocess.run(
            command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=False
        )
    if extras:
        expected = ["[] {'double': 2.0}", "[2.0]", "['asyncio', 'numpy', 'pyarrow']"]
    else:
        expected = [
            "[] {'double': 2.0}",
            "an answer as Arrow needs numpy: pip install 'precompute-store[client]'",
            "['asyncio']",
        ]
    assert (done.stdout.splitlines(), done.stderr) == (expected, "")


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_without_the_engine_the_command_says_what_to_install(options: list[str]) -> None:
    code = f"{ABSENT}\nfrom precompute.jobs.cli import main\nsys.argv[1:] = {['-c', '.', 'status', *options]}\nsys.exit(main())"
    command = [sys.executable, "-c", code, " ".join(declared("client"))]
    done = subprocess.run(
        command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, bool(done.stdout)) == (2, bool(options))
    if options:
        error = json.loads(done.stdout)["error"]
        assert done.stderr == f"precompute: {error['message']}\n"
    assert re.fullmatch(
        r"precompute: \w+ is not installed: .* pip install 'precompute-store\[cpu\]', or \[gpu\]\n",
        done.stderr,
    )
    assert PROJECT["project"]["scripts"] == {"precompute": "precompute.jobs.cli:main"}


def lean(code: str) -> subprocess.CompletedProcess[str]:
    """A program where nothing is installed but what always is."""
    command = [sys.executable, "-c", f"{ABSENT}\n{code}", " ".join(declared() | THEIR_OWN)]
    return subprocess.run(
        command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=False
    )


def test_the_version_is_told_without_the_engine() -> None:
    done = lean("from precompute.jobs.cli import main\nsys.argv[1:] = ['--version']\nmain()")
    assert (done.returncode, done.stdout, done.stderr) == (
        0,
        f"precompute {importlib.metadata.version('precompute-store')} (format 3)\n",
        "",
    )


def test_what_needs_the_engine_says_so_when_it_is_imported() -> None:
    names = ["Lookup", "Model", "Service", "digest"]
    names += ["OpenProject"] * NAMES.is_here("precompute.OpenProject")
    done = lean(
        "from precompute import AsyncClient, Client, Tls, ViewLookupRequest\n"
        "import precompute\n"
        f"for name in {names}:\n"
        "    try:\n"
        "        getattr(precompute, name)\n"
        "    except ImportError as exc:\n"
        "        print(name, 'pip install' in str(exc), f'precompute.{name} comes with' in str(exc))"
    )
    told = [f"{name} True True" for name in names]
    assert (done.stdout.splitlines(), done.stderr) == (told, "")


LIGHT = """
import sys
before = set(sys.modules) | sys.stdlib_module_names
def loaded():
    return sorted(name for name in set(sys.modules) - before if name.partition(".")[0] not in sys.stdlib_module_names)
import precompute
print(*loaded())
precompute.PrecomputeError, precompute.open
print(*loaded())
"""


def test_to_import_it_loads_nothing() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LIGHT],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.stdout, done.stderr) == (
        "precompute\nprecompute precompute.store precompute.store.errors\n",
        "",
    )


def test_every_public_name_is_where_it_is_said_to_be() -> None:
    absent = {name for name in NAMES.known() if not NAMES.is_here(name)}
    for name in precompute.__all__:
        if f"precompute.{name}" in absent:
            continue
        assert getattr(precompute, name).__name__ == name
    named = set[str]()
    for path in (REPOSITORY / "docs").glob("*.md"):
        for names in re.findall(
            r"^from precompute import ([\w, ]+)$", path.read_text(encoding="utf-8"), re.MULTILINE
        ):
            named |= {name.strip() for name in names.split(",")}
    assert "Tls" in named
    assert named <= {*precompute.__all__}


def test_what_is_declared_is_pinned() -> None:
    """``faiss-gpu`` and recbole are chosen by hand."""
    lines = (REPOSITORY / "constraints.txt").read_text(encoding="utf-8").split()
    pinned = {normalised(line.partition("==")[0]) for line in lines}
    assert declared(*EXTRAS) - pinned == {"faiss-gpu"}


@pytest.mark.parametrize("target", ["bench", "test"])
def test_a_make_target_installs_what_it_imports(target: str) -> None:
    makefile = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
    installed = {
        extra
        for found in re.findall(r'"(?:\.|precompute-store)\[([\w,]+)\]"', makefile)
        for extra in found.split(",")
    }
    assert set(USES["benchmarks" if target == "bench" else "tests"]) <= installed
    assert re.search(
        rf"^{target}: .*\.bench$" if target == "bench" else rf"^{target}-core: setup$",
        makefile,
        re.MULTILINE,
    )


def test_nobody_is_told_to_install_a_name_that_is_not_ours() -> None:
    """The index has a package ``precompute`` of a stranger's."""
    folders = [REPOSITORY / folder for folder in (*ROOMS, "demo", "docs", "examples")]
    files = [path for folder in folders for path in folder.rglob("*.*")]
    named = set[str]()
    for path in (*REPOSITORY.glob("*.md"), *files):
        if path.suffix in (".md", ".py") and "tests" not in path.parts:
            # a message may be wrapped anywhere
            text = re.sub(r'"\s*\n\s*f?"', "", path.read_text(encoding="utf-8"))
            named |= set(
                map(
                    normalised,
                    re.findall(r"pip install (?:-[^c]\S* )*['\"]?([A-Za-z][\w-]*)", text),
                )
            )
    # the latter by a plug-in, where that is here
    assert {"precompute-store"} <= named <= {"precompute-store", "onnxruntime-gpu"}
    assert PROJECT["project"]["name"] == "precompute-store"
