"""What a run takes is bounded by ``memory_mb`` in bytes, whatever the size of a row; what cannot be
is refused before it begins, with the figure that would do."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from precompute.store.errors import SourceError
from tests import REPOSITORY
from tests.scene import Scene

BESIDE_MB = 300
"""MB that a process may take beside ``memory_mb``: imports, and what allocators hold."""

RUN = """
import json, sys, threading
from pathlib import Path
from tests.scene import Scene

def own_mb():
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["RssAnon"].split()[0]) // 1024

looks, over = [own_mb()], threading.Event()
def look():
    while not over.wait(0.005):
        looks.append(own_mb())
thread = threading.Thread(target=look, daemon=True)
thread.start()
report = Scene(Path(sys.argv[1]), {}).run()
over.set()
thread.join()
print(json.dumps([report.status, report.counts["written"], max(looks)]))
"""


def scene(folder: Path, memory_mb: int, dtype: str = "string", **sizes: int) -> Scene:
    """A project whose view stores a column of ``items.parquet`` as it is."""
    (folder / "views").mkdir(parents=True, exist_ok=True)
    settings = {"root": "./var", "online": "table:./var/online", "memory_mb": memory_mb}
    (folder / "project.yaml").write_text(json.dumps(settings))
    view: dict[str, Any] = {
        "name": "numbers",
        "entity": ["id"],
        "ttl": "1d",
        "source": {"sql": "SELECT id, x FROM read_parquet('./items.parquet')"},
        "model": {"use": "columns"},
        "features": {"x": {"dtype": dtype} | sizes},
    }
    (folder / "views" / "numbers.yaml").write_text(json.dumps(view))
    return Scene(folder, {})


def by_duckdb(folder: Path, rows: int, x: str) -> None:
    """The file as DuckDB writes it, in one row group of one page."""
    folder.mkdir(exist_ok=True)
    with duckdb.connect() as connection:
        connection.execute(
            f"COPY (SELECT i AS id, {x} AS x FROM range({rows}) t(i)) TO"
            f" '{folder}/items.parquet' (FORMAT parquet)"
        )


def in_row_groups(folder: Path, values: list[Any], rows: int) -> None:
    """The file in row groups of so many rows."""
    folder.mkdir(exist_ok=True)
    table = pa.table({"id": pa.array(range(len(values)), pa.int64()), "x": pa.array(values)})
    pq.write_table(table, folder / "items.parquet", row_group_size=rows)


TEXT = "list_reduce(list_transform(range(36), lambda j: md5(i || 'x' || j)), lambda a, b: a || b)"
"""1,152 characters that do not compress."""


def test_what_cannot_be_read_is_refused_with_what_would_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    by_duckdb(tmp_path, 30_000, TEXT)
    small = scene(tmp_path, 64)
    with pytest.raises(SourceError) as refused:
        small.run()
    text = str(refused.value)
    assert "items.parquet takes" in text
    assert "column 'x'" in text
    assert "memory_mb is 64" in text
    found = re.search(r"set memory_mb: (\d+) in project.yaml", text)
    assert found is not None
    assert "SET threads" not in text
    assert small.cli("validate") == 1
    assert found[0] in capsys.readouterr().out
    assert scene(tmp_path, int(found[1])).run().status == "published"


def test_what_shows_on_the_way_names_what_to_set_too(tmp_path: Path) -> None:
    by_duckdb(tmp_path, 10, "i::VARCHAR")
    project = scene(tmp_path, 64)
    view = json.loads((tmp_path / "views" / "numbers.yaml").read_text())
    # a text is nothing that could be spilled by halves
    view["source"]["sql"] = (
        "SELECT 1 AS id, string_agg(repeat(md5(i::VARCHAR), 40), '') AS x FROM range(100000) t(i)"
    )
    (tmp_path / "views" / "numbers.yaml").write_text(json.dumps(view))
    with pytest.raises(SourceError, match=r"set memory_mb: \d+ in project\.yaml") as refused:
        project.reread().run()
    assert "SET " not in str(refused.value)


def test_a_row_that_is_too_large_is_refused_by_its_key(tmp_path: Path) -> None:
    in_row_groups(tmp_path, ["a", "b" * 9_000_000, "c"], 1)
    with pytest.raises(SourceError, match=r"the row of key '1' has 9 MB.*set memory_mb: 128"):
        scene(tmp_path, 64).run()
    assert scene(tmp_path, 128).run().status == "published"


SHAPES: dict[str, tuple[list[Any], int, dict[str, Any]]] = {
    "texts of 1 MB": ([f"{i:07}" * 150_000 for i in range(64)], 4, {"dtype": "string"}),
    "one text of 1 MB": (["same" * 250_000] * 64, 4, {"dtype": "string"}),
    "few large texts": (
        [f"{i}" * (100_000 if i % 1000 == 7 else 3) for i in range(20_000)],
        1000,
        {"dtype": "string"},
    ),
    "lists": (
        [list(range(i, i + 5000)) for i in range(500)],
        50,
        {"dtype": "int64", "max_items": 5000},
    ),
}


@pytest.mark.skipif(sys.platform != "linux", reason="memory is counted in /proc")
@pytest.mark.parametrize("shape", SHAPES)
def test_a_run_stays_within_its_memory(shape: str, tmp_path: Path) -> None:
    values, rows, feature = SHAPES[shape]
    in_row_groups(tmp_path, values, rows)
    project = scene(tmp_path, 96, **feature)
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(tmp_path)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    status, written, peak_mb = json.loads(done.stdout.splitlines()[-1])
    assert (status, written) == ("published", len(values))
    assert peak_mb <= 96 + BESIDE_MB
    assert [row["x"] for row in project.rows()] == values
