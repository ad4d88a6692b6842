"""The table as DuckDB 1.5.5 reads it, which alone has that extension from packages:
:mod:`test_duckdb_1_5` runs this in a process with that DuckDB."""

from __future__ import annotations

import pytest

from precompute.store.doors import ROOTS
from tests.fixtures import MakeProject
from tests.object_store import ObjectStore
from tests.precompute.on_duckdb_1_5 import opened, ordered
from tests.scene import UNJUDGED


def test_our_iceberg_table_is_what_we_read_and_a_source(make_project: MakeProject) -> None:
    gates = UNJUDGED | {"rows": None}
    rows = [(i, float(i)) for i in range(400)]
    scene = make_project(rows, view={"gates": gates}, project={"iceberg": ["numbers"]})
    scene.run()
    for step in range(1, 4):
        rows = [(i, x + (i % 40 == step or step == 3)) for i, x in rows if i % 100 != step]
        make_project(rows, view={"gates": gates}, project={"iceberg": ["numbers"]}).run()
    scene.rollback()
    table = f"{scene.root}/numbers/iceberg"
    setup = ("LOAD avro", "LOAD iceberg")
    for number in scene.numbers():
        sql = f"SELECT * EXCLUDE (input_hash) FROM iceberg_scan('{table}', snapshot_from_id = {number}::UBIGINT)"
        with opened(sql, scene.home, *setup) as source:
            assert ordered(source.head(1000).to_pylist()) == ordered(scene.rows(number))
    with opened(f"SELECT id, double FROM iceberg_scan('{table}')", scene.home, *setup) as source:
        live = {row["id"]: row["double"] for row in source.head(1000).to_pylist()}
    assert live == scene.doubles(scene.live().snapshot)


@pytest.mark.skipif(not ROOTS.is_here("s3"), reason="there are no roots in object stores here")
def test_an_iceberg_table_in_an_object_store_is_a_source(
    bucket: ObjectStore, make_project: MakeProject
) -> None:
    root = {"root": bucket.root, "online": "table:./online"}
    scene = make_project([(1, 1.0), (2, 2.5)], project=root | {"iceberg": ["numbers"]})
    scene.run()
    sql = f"SELECT id, double FROM iceberg_scan('s3://bucket/{bucket.prefix}/numbers/iceberg')"
    with opened(sql, scene.home, "LOAD avro", "LOAD iceberg") as source:
        assert ordered(source.head(9).to_pylist()) == [
            {"id": 1, "double": 2.0},
            {"id": 2, "double": 5.0},
        ]
        assert source.modified_us() is None
