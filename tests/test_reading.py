"""docs/reading.md is true: its very blocks give the rows that our own reader gives, of every
snapshot, whatever became of the view."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from pathlib import Path
from types import FunctionType
from typing import Any

import duckdb
import pyarrow as pa
from hypothesis import given, settings

from precompute.store.offline.snapshot import Snapshot
from precompute.store.offline.view_store import OfflineStore, ViewStore
from tests.faults.harness import Child, FaultScene, changed, recover, small_chunks
from tests.fixtures import MakeProject
from tests.jobs.test_bad_rows import VIEW as TEXTS
from tests.scene import Scene
from tests.store.test_history import ENTITIES, Made, build, histories

DOC = (Path(__file__).parents[1] / "docs" / "reading.md").read_text(encoding="utf-8")
EXAMPLE = "var/movielens/item_vector"


def block(kind: str) -> str:
    (found,) = re.findall(rf"^```{kind}\n(.*?)^```", DOC, re.MULTILINE | re.DOTALL)
    assert EXAMPLE in found
    return str(found)


def by_duckdb(folder: Path, number: int | None) -> pa.Table:
    """What the document's SQL yields; None for what it takes for live."""
    sql = block("sql").replace(EXAMPLE, str(folder).replace("'", "''"))
    if number is not None:
        sql = re.sub(r"SET VARIABLE number = .*", f"SET VARIABLE number = {number};", sql)
    *before, last = [statement for statement in sql.split(";\n") if statement.strip()]
    with duckdb.connect() as connection:
        for statement in before:
            connection.execute(statement)
        return connection.sql(last.rstrip().rstrip(";")).to_arrow_table()


def by_pandas(folder: Path, number: int | None) -> pa.Table:
    """What the document's function returns."""
    code = compile(block("python").rpartition("\n\n\n")[0], "docs/reading.md", "exec")
    names: dict[str, Any] = {}
    exec(code, names)
    read_view: FunctionType = names["read_view"]
    return pa.Table.from_pandas(read_view(folder, number), preserve_index=False)


READERS: list[Callable[[Path, int | None], pa.Table]] = [by_duckdb, by_pandas]


def told(rows: Iterable[dict[str, Any]]) -> list[str]:
    """Rows in an order of their own, with every value: what an Arrow type is called differs between
    tools, what it holds does not."""

    def plain(value: Any) -> Any:
        return value.astimezone(UTC) if isinstance(value, datetime) else value

    return sorted(repr({name: plain(value) for name, value in row.items()}) for row in rows)


def check(store: ViewStore) -> list[Snapshot]:
    """Outsiders read of every snapshot, and of the live one, what we read."""
    snapshots = [store.snapshot(number) for number in store.numbers()]
    ref = store.log.live()
    for snapshot in snapshots:
        ours = [row for batch in store.batches(snapshot) for row in batch.to_pylist()]
        assert len(ours) == snapshot.rows
        live = ref is not None and ref.snapshot == snapshot.number
        for read in READERS:
            for number in (snapshot.number, None) if live else (snapshot.number,):
                assert told(read(store.folder, number).to_pylist()) == told(ours), (
                    snapshot.number,
                    read.__name__,
                )
    return snapshots


@settings(max_examples=6, deadline=None)
@given(histories())
def test_of_any_history_and_every_kind_of_key(history: tuple[str, list[dict[str, Any]]]) -> None:
    kind, steps = history
    with tempfile.TemporaryDirectory() as folder:
        made = Made(
            OfflineStore(Path(folder) / "env=prod" / "id=9" / "it's a root").view("made"),
            ENTITIES[kind],
        )
        build(made, steps)
        check(made.store)


def test_of_killed_runs_compaction_and_rollback(tmp_path: Path) -> None:
    scene = FaultScene(
        tmp_path / "project", settings={"retention": {"keep": 20, "grace": "1d"}}
    ).write({i: i for i in range(400)})
    scene.run()
    kinds = set()
    with small_chunks(MOST_SHARE=0.2, MOST_DELTAS=2):
        for step in range(1, 7):
            scene.write(
                changed(scene.rows, [step, 40 + step % 3], new=[400 + step], gone=[80 + step])
            )
            if step == 2:
                scene.write(changed(scene.rows, range(10, 40)))
                assert Child(scene, crash=("part.write", 3, "kill")).ended().signal == 9
                scene.write(
                    changed(scene.rows, [10, 11])
                )  # rows that the killed run had computed are of no use
                assert recover(scene).resumed > 0
            recover(scene)
            newest = scene.store.snapshot(scene.store.numbers()[-1])
            kinds |= {Path(part.path).name.partition("-")[0] for part in newest.parts}
            kinds |= {newest.kind}
            kinds |= {"own kills" for segment in newest.segments if segment.own_kills}
    scene.project().rollback()
    assert kinds >= {"full", "delta", "part", "copied", "own kills"}
    assert len(check(scene.store)) >= 7


def run(project: Scene) -> ViewStore:
    assert project.run().status == "published"
    return project.store


def test_of_several_features_null_rows_and_a_key_of_two_columns(make_project: MakeProject) -> None:
    gates = {"first": None, "rows": None, "coverage": None}
    view = TEXTS | {"entity": ["shop", "id"], "bad_rows": "null", "gates": gates}
    texts = ["a b", None, "", "d", "é e e", "b", *(f"text {i}" for i in range(20))]

    def rows(texts: list[str | None]) -> pa.Table:
        return pa.table(
            {
                "shop": ["x/y", "z"] * (len(texts) // 2),
                "id": range(len(texts)),
                "x": pa.array(texts, pa.string()),
            }
        )

    run(make_project(rows([*texts]), view=view))
    store = run(make_project(rows([*texts[:4], None, "", *texts[6:24]]), view=view))
    first, second = check(store)
    assert (
        second.kind,
        second.counts.removed,
        first.quality["nulls"],
        second.quality["nulls"],
    ) == ("delta", 2, 2.0, 4.0)
