"""Another format: what a version of another format wrote is refused in words, never called damaged,
and nothing takes its place or removes it."""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from precompute.jobs.cli import _parser
from precompute.store.account.account import State, read_account
from precompute.store.answers.service import Refused
from precompute.store.disk.lease import holder
from precompute.store.disk.storage import known_identity
from precompute.store.errors import OnlineStoreError, OtherFormatError, SnapshotError
from precompute.store.http.app import create_app
from precompute.store.offline.log import Log
from precompute.store.online.table_file import TableFile
from precompute.store.times import Reason
from precompute.store.vectors.index_files import read_index_record
from tests.asgi import call
from tests.documents import is_here
from tests.fixtures import MakeProject, Prepared
from tests.formats import CHANGES, Change, earlier, make_other
from tests.scene import Scene

ROWS = [(i, float(i)) for i in range(8)]


def build(make_project: MakeProject) -> Scene:
    """Snapshots 1 to 3: 2 was rolled back from, 3 is live, 1 is pinned; a run was killed."""
    project = make_project(
        ROWS,
        project={
            "retention": {"keep": 1, "grace": "0s"},
            "online": "table:./online",
            "schedule": {"numbers": "0 2 1 1 *"},
        },
        view={"index": {"on": "vector", "metric": "l2"}, "gates": {"rows": None}},
    )
    (project.folder / "services").mkdir()
    (project.folder / "services" / "both.yaml").write_text(
        "name: both\nentity: [id]\nviews: {numbers: [double]}\n"
    )
    project.run()
    for x in (10.0, 20.0):
        change_source(project, x)
        project.run(full=True)
        if x == 10.0:
            project.rollback()
            project.store.log.resume_live()
    project.store.pin(1, "a test")
    project.store.journals.begin("killed", "recipe", None)
    project.status()
    return project


def change_source(project: Scene, x: float) -> None:
    rows = [(0, x), *ROWS[1:]]
    table = pa.table({"id": [i for i, _ in rows], "x": [x for _, x in rows]})
    pq.write_table(table, project.folder / "data.parquet")


def _account(project: Scene, _: Path) -> None:
    for finding in read_account(project.store.leases, "numbers").findings:
        if finding.state is State.OTHER_FORMAT:
            raise OtherFormatError(finding.found)


def _online(project: Scene, _: Path) -> None:
    with project.online_store() as online:
        online.live("numbers")


def _log(project: Scene) -> Log:
    """As a process has it that knows nothing yet."""
    return Log(project.store.folder / "log", "numbers")


Read = Callable[[Scene, Path], Any]
KINDS: dict[str, tuple[str, Read]] = {
    "event": ("var/numbers/log/0*.json", lambda project, _: _log(project).events()),
    "state": ("var/numbers/log/state-*.json", lambda project, _: _log(project).state()),
    "lease": (
        "var/numbers/notes/lease-publish.json",
        lambda project, _: holder(project.store.leases, "publish"),
    ),
    "account": ("var/numbers/notes/account.json", _account),
    "manifest": (
        "var/numbers/manifests/00000000000000000001.json",
        lambda project, _: project.store.snapshot(1),
    ),
    "live manifest": (
        "var/numbers/manifests/00000000000000000003.json",
        lambda project, _: project.store.snapshot(3),
    ),
    "report": ("var/numbers/runs/*.json", lambda project, _: project.store.runs.reports()),
    "journal": (
        "var/numbers/data/killed/journal.jsonl",
        lambda project, _: project.store.journals.partitions(),
    ),
    "index": (
        "var/numbers/index/*/meta.json",
        lambda _, path: read_index_record(path.parent),
    ),
    "identity": ("var/.identity.json", lambda project, _: known_identity(project.root)),
    "online pointer": ("online/numbers/live.json", _online),
    "table": ("online/numbers/*.table", lambda _, path: TableFile(path)),
}
"""What is stored → the newest file of its kind, and who reads it."""


def file_of(project: Scene, kind: str) -> Path:
    return max(project.folder.glob(KINDS[kind][0]))


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("kind", KINDS)
def test_each_reader_says_so(kind: str, change: Change, prepared: Prepared) -> None:
    project = prepared(build)
    path, read = file_of(project, kind), KINDS[kind][1]
    read(project, path)
    make_other(path, change)
    with pytest.raises(OtherFormatError, match="whole, and left as it is") as said:
        read(project, path)
    assert str(path) in str(said.value)
    assert "damaged" not in str(said.value)


@pytest.mark.parametrize("kind", KINDS)
def test_a_flipped_bit_is_damage_and_never_another_format(kind: str, prepared: Prepared) -> None:
    project = prepared(build)
    path, read = file_of(project, kind), KINDS[kind][1]
    whole = path.read_bytes()
    for at in range(0, min(len(whole), 600), 3):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << at % 8]) + whole[at + 1 :])
        # another error says that it is damaged, and where a second copy or nothing decides by it
        # there is none
        with contextlib.suppress(SnapshotError, OnlineStoreError, ValueError):
            read(project, path)


STATUS, RUN, ALL_ROWS = ("status",), ("run", "numbers"), ("run", "numbers", "--full")
PUBLISH, ROLLBACK, RECONCILE = (
    ("publish", "numbers", "--reload"),
    ("rollback", "numbers"),
    ("reconcile",),
)
GC, VERIFY, HISTORY = ("gc",), ("verify", "numbers"), ("history", "numbers")
SNAPSHOTS, LOOKUP, DROP = (
    ("snapshots", "numbers"),
    ("lookup", "numbers", "1"),
    ("drop", "numbers", "--data", "--yes"),
)
COMMANDS = (
    *(STATUS, RUN, ALL_ROWS, PUBLISH, ROLLBACK, RECONCILE),
    *(GC, VERIFY, HISTORY, SNAPSHOTS, LOOKUP, DROP),
)
OF_ROOT = set(COMMANDS) - {LOOKUP}
REFUSED: dict[str, set[tuple[str, ...]]] = {
    "identity": OF_ROOT,
    "pointer": OF_ROOT,
    "manifest": {STATUS, RUN, ALL_ROWS, GC, DROP},
    "live manifest": OF_ROOT,
    "mark": OF_ROOT - {DROP},
    "lease": {STATUS, ALL_ROWS, PUBLISH, ROLLBACK, RECONCILE, GC, VERIFY, DROP},
    "report": {STATUS, HISTORY},
    "journal": {RUN, ALL_ROWS, GC},
    "online pointer": {*OF_ROOT, LOOKUP} - {GC, HISTORY, SNAPSHOTS},
    "table": {*OF_ROOT, LOOKUP} - {GC, HISTORY, SNAPSHOTS},
}
"""What is of another format → which commands end with that sentence, at least."""


@pytest.mark.parametrize("kind", KINDS)
def test_no_command_takes_its_place_or_calls_it_damaged(
    kind: str, prepared: Prepared, capsys: pytest.CaptureFixture[str]
) -> None:
    project = prepared(build)
    change_source(project, 30.0)
    path = file_of(project, kind)
    make_other(path)
    data = path.read_bytes()
    for command in COMMANDS[: None if DROP in REFUSED.get(kind, ()) else -1]:
        status = project.cli(*command)
        said = "".join(capsys.readouterr())
        assert path.read_bytes() == data, command
        assert f"{path.name} is damaged" not in said, command
        if command in REFUSED.get(kind, ()):
            assert status == 1, command
            assert "is of format 4, and this version reads format 3" in said, command


def contents(project: Scene, *folders: str) -> dict[str, str]:
    """Every stored file → a digest of its bytes, but for those that only lock or reserve space."""
    return {
        str(path.relative_to(project.folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for folder in folders
        for path in sorted((project.folder / folder).rglob("*"))
        if path.is_file() and ".reserve" not in path.parts and not path.name.endswith(".lock")
    }


def make_all_earlier(project: Scene, *folders: str) -> None:
    """As the version before there were formats left it."""
    for folder in folders:
        for path in sorted((project.folder / folder).rglob("*")):
            if path.suffix in (".json", ".jsonl", ".table") and path.name != "catalog.jsonl":
                make_other(path, earlier)


MORE = (
    *(("validate", "numbers"), ("materialize", "numbers"), ("resume", "numbers")),
    *(("pin", "numbers", "--snapshot", "1"), ("work", "numbers"), ("schedule",), ("serve",)),
    ("backfill", "numbers", "--from", "2026-01-01", "--to", "2026-01-02"),
    *(("search", "numbers", "--key", "1"), ("explain", "numbers", "1"), ("diff", "numbers")),
    *(("log", "numbers"), ("export", "numbers", "--to", "x.parquet"), ("profile", "numbers")),
    ("training", "both", "data.parquet", "--to", "x.parquet"),
    *(("doctor",), ("optimize", "numbers"), ("tune", "numbers"), ("plan", "numbers")),
    *(("report", "numbers"), ("gates", "numbers")),
)
BESIDE = {"graph", "schema", "completion", "token", "init", "new"}
"""Commands that neither read nor write anything of a view."""
UNTRIED = {"thresholds"}
"""It wants a view with a semantic cache before it reads anything: the tests of that try it."""
OF_LINES = {"validate", "doctor"}
"""Commands that say all that they find, each thing for itself."""


def test_each_command_is_tried() -> None:
    tried = {command[0] for command in (*COMMANDS, *MORE)}
    assert tried.isdisjoint(BESIDE)
    commands = _parser().commands
    assert commands is not None
    shown = commands.shown().keys()
    assert {name for name in tried | BESIDE | UNTRIED if is_here(name)} == shown


@pytest.mark.parametrize(
    ("named", "command"),
    [
        *((True, command) for command in (*COMMANDS, *MORE)),
        # one that nothing was published from
        *((False, command) for command in COMMANDS),
    ],
)
def test_an_earlier_root_is_refused_before_anything_is_written(
    named: bool,
    command: tuple[str, ...],
    prepared: Prepared,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not is_here(command[0]):
        pytest.skip(f"{command[0]} is not here")
    project = prepared(build)
    make_all_earlier(project, "var", "online")
    for path in () if named else project.root.glob(".identity*.json"):
        path.unlink()
    before = contents(project, "var", "online")
    monkeypatch.chdir(project.folder)
    assert project.cli(*command) == 1
    said = "".join(capsys.readouterr())
    assert "is of format before 3, and this version reads format 3 alone" in said
    assert "a root and an online store of its own" in said
    assert "damaged" not in said
    if named and command[0] not in OF_LINES:
        assert said.count("reads format 3 alone") == 1
    assert contents(project, "var", "online") == before


def test_an_earlier_online_store_is_left_alone_by_a_new_root(
    prepared: Prepared, capsys: pytest.CaptureFixture[str]
) -> None:
    project = prepared(build)
    make_all_earlier(project, "online")
    (project.folder / "var").rename(project.folder / "earlier")
    before = contents(project, "online")
    for command in COMMANDS:
        project.cli(*command)
        assert "damaged" not in "".join(capsys.readouterr())
        assert contents(project, "online") == before
    assert project.cli("run", "numbers") == 1
    assert "online/numbers/live.json is of format before 3" in capsys.readouterr().err


def test_a_server_answers_that_it_cannot_read_and_computes_nothing(prepared: Prepared) -> None:
    project = prepared(build)
    ways: list[tuple[str, str, Any]] = [
        ("GET", "/v1/views/numbers/rows/1", None),
        ("POST", "/v1/views/numbers/lookup", {"keys": [1, 2]}),
        ("POST", "/v1/views/numbers/search", {"key": 1, "k": 2}),
    ]
    # whatever would compute a row breaks the answer
    with project.lookup(object()) as lookup:
        app = create_app(lookup)
        assert call(app, "GET", "/v1/views/numbers/rows/1").json["status"] == "fresh"
        assert call(app, "GET", "/readyz").status == 200
        make_other(file_of(project, "online pointer"))
        for method, path, body in ways:
            call(app, method, path, body).check_problem(503, "other_format")
        several = {"requests": [{"view": "numbers", "keys": [1]}]}
        found = call(app, "POST", "/v1/lookup", several).json["responses"][0]["problem"]
        assert found["type"] == "urn:precompute:problem:other_format"
        ready = call(app, "GET", "/readyz")
        assert (ready.status, ready.json["status"]) == (503, "not ready")
        assert "numbers is of a format that this version does not read" in ready.json["why"]
        with pytest.raises(OtherFormatError, match=r"online/numbers/live\.json is of format 4"):
            lookup.row("numbers", 1)


def test_a_service_goes_on_without_a_view_of_another_format() -> None:
    refused = Refused.by(OtherFormatError("its pointer is of format 4"))
    assert (refused.reason, refused.problem) == (Reason.OTHER_FORMAT, "its pointer is of format 4")


def test_an_index_of_another_format_is_neither_searched_nor_removed(prepared: Prepared) -> None:
    project = prepared(build)
    with project.lookup() as lookup:
        path = file_of(project, "index")
        make_other(path)
        data = path.read_bytes()
        with pytest.raises(OtherFormatError, match=r"meta\.json is of format 4"):
            lookup.search("numbers", key=1, k=2)
    change_source(project, 30.0)
    for x in (30.0, 40.0, 50.0):
        change_source(project, x)
        project.run(full=True)
    assert path.read_bytes() == data


def test_another_projects_view_stops_no_status(
    prepared: Prepared, capsys: pytest.CaptureFixture[str]
) -> None:
    """One online store, and a view in it that is not configured here."""
    project = prepared(build)
    folder = project.folder / "online"
    shutil.copytree(folder / "numbers", folder / "theirs")
    make_other(folder / "theirs" / "live.json")
    project.cli("status", "--json")
    lines = {line["view"]: line for line in json.loads(capsys.readouterr().out)}
    assert lines["numbers"]["online"]
    assert lines["theirs"]["status"] == "unconfigured"
