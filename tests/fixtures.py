"""Fixtures: small real projects over an arithmetic model."""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import shutil
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from hypothesis import Phase, settings

from precompute.engine.resources import allowed
from precompute.store.answers.lookup import Lookup
from precompute.store.disk.storage import unmount_all
from precompute.store.online import kernels
from tests.object_store import ObjectStore, object_store
from tests.online_rig import KINDS, rig_of, url_of
from tests.scene import Scene
from tests.slow import SLOW, name_of

MEMORY = Path("/dev/shm")
"""A file system in memory: a killed process cannot lose what it wrote, there or on a disk, and
syncing takes no time."""

if MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > 4 * 2**30:
    # where pytest puts tmp_path; a third of the time of tests that commit is waiting for the disk
    # otherwise
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))

PROCESSES = str(Path(__file__).with_name("processes"))
"""What stands before all else on the path of processes that tests start, those that find their
modules as their parent does included."""


def _prepare_processes() -> None:
    """Processes that tests start find the models of tests wherever they begin, have no pandas, and
    keep what they have compiled of ours: 1.4 s of CPU for a small run become 0.85."""
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    # here too: a third of the time that collecting takes is making tests into code
    sys.dont_write_bytecode = False
    # pydantic looks through all that is installed for them: 20 ms of each process
    os.environ["PYDANTIC_DISABLE_PLUGINS"] = "__all__"
    if PROCESSES not in sys.path:
        sys.path.insert(0, PROCESSES)
    path = [
        PROCESSES,
        str(Path(__file__).parents[1]),
        *os.environ.get("PYTHONPATH", "").split(os.pathsep),
    ]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(entry for entry in path if entry))
    # one of xdist's own has begun as such a process
    sys.meta_path[:] = [
        PathFinder if getattr(finder, "__name__", "") == "WithoutPandas" else finder
        for finder in sys.meta_path
    ]


_prepare_processes()

# what tests are made of stays: looking through it as often as usual takes 2 % of all, and 1.6 s of
# the 12 of collecting
gc.set_threshold(50_000, 50, 100)

# Shrinking may take 300 s and explaining ten times as long for each example: a test that failed
# would end by its time limit, and never say of what.
settings.register_profile(
    "told at once", phases=[Phase.explicit, Phase.reuse, Phase.generate], print_blob=True
)
settings.load_profile("told at once")


@pytest.fixture(params=["numpy", "C"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Which kernels run in this test: it is run with each."""
    if request.param == "numpy":
        monkeypatch.setattr(kernels, "native", None)
    elif kernels.native is None:
        pytest.skip(
            "the C extension is not built here (`make setup` does where a compiler is), or PRECOMPUTE_KERNELS forbids it"
        )
    return str(request.param)


@pytest.fixture(scope="session")
def object_server() -> Iterator[ObjectStore]:
    """One for all tests of this process."""
    with object_store() as store:
        yield store


@pytest.fixture
def bucket(object_server: ObjectStore, tmp_path: Path) -> Iterator[ObjectStore]:
    """An object store, with a root of the test's own."""
    object_server.prefix = tmp_path.name
    yield object_server
    object_server.fault, object_server.ahead_s = lambda _: None, 0
    unmount_all()


@pytest.fixture(params=KINDS)
def online(request: pytest.FixtureRequest) -> str:
    """The value of ``online``: beside the root, not inside, so that either can be lost alone."""
    return url_of(request, request.param, "table:./online")


@pytest.fixture
def away(tmp_path: Path) -> str:
    """The value of ``online`` whose store can be neither read nor written."""
    (tmp_path / "file").touch()
    return f"table:{tmp_path / 'file'}/online"


MakeProject = Callable[..., Scene]


def write_project(
    folder: Path,
    rows: list[tuple[Any, Any]] | pa.Table | None = None,
    *,
    view: dict[str, Any] | None = None,
    project: dict[str, Any] | None = None,
    views: dict[str, dict[str, Any]] | None = None,
    environment: dict[str, str] | None = None,
) -> Scene:
    """A project of one view ``numbers`` (key ``id``, input ``x``) over a doubling model.

    Args:
        folder: where it is written, over what is there.
        rows: [(id, x), …] or a table for ``data.parquet``.
        view, project: replace top-level keys of the two files; None removes one.
        views: further view files by name.
        environment: variables that override settings.
    """
    (folder / "views").mkdir(parents=True, exist_ok=True)
    if rows is not None:
        table = (
            rows
            if isinstance(rows, pa.Table)
            else pa.table({"id": [i for i, _ in rows], "x": [x for _, x in rows]})
        )
        pq.write_table(table, folder / "data.parquet")
    settings: dict[str, Any] = {
        "root": "./var",
        "online": "table:./var/online",
        "vars": {"data": "./"},
    }
    definition: dict[str, Any] = {
        "name": "numbers",
        "entity": ["id"],
        "source": {"sql": "SELECT * FROM read_parquet('${data}/data.parquet')"},
        "model": {"use": "tests.models:Doubler"},
        "features": {"double": {"dtype": "float64"}, "vector": {"dtype": "float32", "dim": 4}},
        "ttl": "1h",
        "stale_for": "1d",
        "max_rejected": 0.5,
    }
    model = str((view or {}).get("model") or definition["model"])
    if "tests.models:Doubler" in model or "features" not in (view or {}):
        # the vectors of a Doubler have nearly one direction
        definition["gates"] = {"first": None}
    for base, over in ((settings, project or {}), (definition, view or {})):
        base |= over
        for key in [k for k, v in base.items() if v is None]:
            del base[key]
    (folder / "project.yaml").write_text(yaml.safe_dump(settings))
    (folder / "views" / "numbers.yaml").write_text(yaml.safe_dump(definition))
    for name, extra in (views or {}).items():
        (folder / "views" / f"{name}.yaml").write_text(yaml.safe_dump({"name": name} | extra))
    return Scene(folder, environment or {})


@pytest.fixture(autouse=True)
def no_library_is_asked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Models are not compared with their own libraries, which takes seconds for each fingerprint,
    but in tests with the fixture ``libraries``."""
    if "libraries" not in request.fixturenames:
        for module in ("run.judge.library", "setup.validate"):
            monkeypatch.setattr(f"precompute.jobs.{module}.own_library_of", lambda _: None)


@pytest.fixture
def make_project(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> MakeProject:
    """:func:`write_project` into a folder of the test's own; called again, it rewrites the files of
    the same project, also of a ``prepared`` one.

    Runs in the test's own process have no audit, for which there is time for other rows each time,
    and no golden rows: tests count what the model computes, and change it under one fingerprint.
    """
    for name in ("AUDIT_LEAST_S", "AUDIT_SHARE"):
        monkeypatch.setattr(f"precompute.jobs.run.judge.audit.{name}", 0.0)
    monkeypatch.setattr("precompute.jobs.run.judge.golden.GOLDEN_ROWS", 0)
    own = tmp_path
    if "prepared" in request.fixturenames:
        # the path of a source's file is part of its SQL: a copy lies where the original was made
        own = tmp_path_factory.getbasetemp() / "stage"
        shutil.rmtree(own / "project", ignore_errors=True)
    return partial(write_project, own / "project")


Prepared = Callable[..., Scene]
_prepared: dict[str, tuple[Path, Any]] = {}
"""What was prepared → the copy of its folder, and of an online store elsewhere."""


@pytest.fixture
def prepared(
    make_project: MakeProject,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> Prepared:
    """``prepared(build, *args, **options)`` is what ``build(make_project, *args, **options)``
    returns: with no project there yet, made once for all tests of this process and copied for each,
    5 ms in place of 0.1 s for each run."""
    folder = tmp_path_factory.getbasetemp() / "stage" / "project"
    # what this process noted of the project that lay there before
    monkeypatch.setattr("precompute.store.account.account._last", {})

    def copied(build: Callable[..., Scene], *args: Any, **options: Any) -> Scene:
        if folder.exists():
            return build(make_project, *args, **options)
        name = f"{build.__module__}.{build.__qualname__} {args} {options}"
        if name not in _prepared:
            scene = build(make_project, *args, **options)
            copy = tmp_path_factory.mktemp("prepared") / "project"
            shutil.copytree(folder, copy, symlinks=True)
            rig = rig_of(scene.online)
            _prepared[name] = copy, None if rig is None else rig.contents(scene.online)
            return scene
        copy, contents = _prepared[name]
        shutil.copytree(copy, folder, symlinks=True)
        scene = Scene(folder, options.get("environment", {}))
        if (rig := rig_of(scene.online)) is not None:
            rig.restore(scene.online, contents)
        return scene

    return copied


@pytest.fixture
def open_lookup() -> Iterator[Callable[[Scene], Lookup]]:
    """Opens :meth:`Scene.answering` until the test ends."""
    with contextlib.ExitStack() as opened:
        yield lambda scene: opened.enter_context(scene.answering())


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who finds a view's lease taken is refused at once, and not after two seconds."""
    monkeypatch.setattr("precompute.jobs.run.run_view.BRIEFLY_S", 0.1)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Four for two cores: nearly half of what tests take is waiting, for a process to start or a
    deadline to pass. Each collects by itself, which takes 14 s of CPU."""
    return max(4, allowed() * 3 // 2)


def pytest_collection_finish() -> None:
    """What thousands of tests are made of is no garbage: each search through it took 0.8 s."""
    gc.collect()
    gc.freeze()
    # libraries in C complain of what is left at the end; pytest's last search would take 1 s more
    atexit.register(gc.unfreeze)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What is slow is marked, and the files that take longest come first: last, they would run
    alone; and those that wait, as for a killed process's lease, run beside those that compute."""
    slow: dict[Path, dict[str, int]] = defaultdict(dict)
    for item in items:
        if (name := name_of(item.nodeid)) in SLOW:
            item.add_marker("slow")
            slow[item.path][name] = SLOW[name]
    items.sort(key=lambda item: -sum(slow[item.path].values()))
