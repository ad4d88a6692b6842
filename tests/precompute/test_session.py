"""What a project's setup may do before a source's DuckDB is locked, and what it says when it
cannot."""

from __future__ import annotations

import re
import traceback
from pathlib import Path
from typing import Any

import duckdb
import pytest

from precompute.sources.session import Setup
from precompute.sources.source import Source
from precompute.store.errors import ConfigError, PrecomputeError, SourceError
from tests.fixtures import MakeProject
from tests.scene import Scene


def opened(sql: str, folder: Path, *setup: str) -> Source:
    return Source(sql, ("id",), {}, folder=folder, memory_mb=64, setup=Setup(setup, folder))


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    """A folder with a database ``shop.duckdb`` of three rows."""
    with duckdb.connect(str(tmp_path / "shop.duckdb")) as connection:
        connection.execute(
            "CREATE TABLE items AS SELECT range AS id, range / 2.0 AS x FROM range(3)"
        )
    return tmp_path


ATTACH = "ATTACH './shop.duckdb' AS shop (READ_ONLY)"


def test_a_database_is_read_and_nothing_is_known_of_its_age(shop: Path) -> None:
    with opened("SELECT * FROM shop.items", shop, ATTACH) as source:
        assert source.load() == 3
        assert source.modified_us() is None
        assert source.cached().rows(["1"]) is None
    (shop / "more.csv").write_text("id,y\n1,10\n")
    # it is not cached for a file that stands beside it, either
    joined = "SELECT id, x, y FROM shop.items JOIN 'more.csv' USING (id)"
    with opened(joined, shop, ATTACH) as source:
        assert source.rows(["1"]).to_pylist() == [{"key": "1", "id": 1, "x": 0.5, "y": 10}]
        assert source.modified_us() is None
        assert source.cached().rows(["1"]) is None


def test_a_session_is_locked_after_its_setup(shop: Path) -> None:
    with opened("SELECT 1 AS id", shop, "SET threads = 1", ATTACH) as source:
        with pytest.raises(SourceError, match="the configuration has been locked"):
            source.database.execute("SET TimeZone = 'Asia/Tokyo'")
        with pytest.raises(SourceError, match="read-only"):
            source.database.execute("DELETE FROM shop.items")
        with pytest.raises(ConfigError, match="exactly one SELECT"):
            source.table("ATTACH 'shop.duckdb' AS other (READ_ONLY)")


READ_ONLY = "a source's database is read and never written: attach it READ_ONLY"
ONLY = "a setup is of single LOAD, CREATE SECRET, ATTACH and SET statements"
REFUSED: list[tuple[str, type[PrecomputeError], str]] = [
    ("INSTALL postgres", ConfigError, "a run fetches nothing from the network: pip install"),
    ("ATTACH './new.duckdb' AS new", ConfigError, READ_ONLY),
    ("ATTACH './shop.duckdb' AS shop (READ_ONLY false)", ConfigError, READ_ONLY),
    ("ATTACH './nothere.duckdb' AS new (READ_ONLY)", SourceError, "/nothere.duckdb\" in read-only mode: database does not exist"),
    ("CREATE TABLE items AS SELECT 1", ConfigError, ONLY),
    ("CREATE PERSISTENT SECRET s (TYPE s3, SECRET 'x')", ConfigError, ONLY),
    ("SELECT 1", ConfigError, ONLY),
    ("SET threads = 1; SET threads = 2", ConfigError, ONLY),
    ("", ConfigError, ONLY),
    ("LOAD", ConfigError, "not valid SQL: Parser Error"),
    ("LOAD nosuchthing", ConfigError, f"it is not installed for DuckDB {duckdb.__version__}: pip install 'precompute-store[postgres]'"),
    ("SET nosuchthing = 1", ConfigError, "unrecognized configuration parameter"),
    ("ATTACH '${NOT_EXPORTED}' AS shop (READ_ONLY)", ConfigError, "the environment has no NOT_EXPORTED: export NOT_EXPORTED=…"),
    ("SET threads = '${SHOP_PASSWORD}'", ConfigError, "${SHOP_PASSWORD}"),
    ("SET threads = ${SHOP_PASSWORD}", ConfigError, "not valid SQL with its variables put in: write each inside a text, as in '${NAME}'"),
    ("SET threads = ${TABLE}", ConfigError, "not valid SQL with its variables put in: write each inside a text, as in '${NAME}'"),
    ("CREATE SECRET (TYPE ${TABLE}", ConfigError, "not valid SQL: Parser Error"),
    ("CREATE SECRET (TYPE nosuchtype, ${OPTIONS})", ConfigError, "nosuchtype"),
    ("SET ${OPTION} = 1", ConfigError, 'unrecognized configuration parameter "${OPTION}"'),
    ("SET threads == '${SHOP_PASSWORD}'", ConfigError, 'not valid SQL: Parser Error: syntax error at or near "=="'),
]  # fmt: skip


@pytest.mark.parametrize(("statement", "error", "message"), REFUSED)
def test_a_setup_that_cannot_be_says_which_statement_and_why(
    shop: Path,
    monkeypatch: pytest.MonkeyPatch,
    statement: str,
    error: type[PrecomputeError],
    message: str,
) -> None:
    monkeypatch.setenv("SHOP_PASSWORD", "it's zebra")
    monkeypatch.setenv("TABLE", "zebra x")
    monkeypatch.setenv("OPTIONS", "KEY_ID zebra")
    monkeypatch.setenv("OPTION", "Zebra ")
    with pytest.raises(error) as raised:
        opened("SELECT 1 AS id", shop, "SET threads = 1", statement)
    assert str(raised.value).startswith("sources.setup[1]: ")
    assert message in str(raised.value)
    assert "zebra" not in "".join(traceback.format_exception(raised.value))
    assert {path.name for path in shop.iterdir()} == {"shop.duckdb"}


@pytest.mark.parametrize(
    ("statement", "value"),
    [
        ("SET memory_limit = ${LIMIT}", '"1GB"'),
        ("ATTACH './shop.duckdb' AS ${TABLE} (READ_ONLY)", "mine"),
        ("SET threads = 1${N}", "0"),
        ("${ALL}", "SET threads = 1"),
    ],
)
def test_a_variable_may_stand_for_any_part(
    shop: Path, monkeypatch: pytest.MonkeyPatch, statement: str, value: str
) -> None:
    (name,) = re.findall(r"\{(\w+)\}", statement)
    monkeypatch.setenv(name, value)
    with opened("SELECT 1 AS id", shop, statement) as source:
        assert source.load() == 1


def test_what_comes_from_the_environment_is_in_no_message(
    shop: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOP", "shop.duckdb")
    attach = "ATTACH './${SHOP}' AS shop (READ_ONLY)"
    with opened("SELECT * FROM shop.items", shop, attach) as source:
        with pytest.raises(SourceError) as raised:
            source.table(
                "SELECT error('no: ' || path) FROM duckdb_databases() WHERE path IS NOT NULL"
            )
        assert "no: ${SHOP}" in str(raised.value)
        assert "shop.duckdb" not in "".join(traceback.format_exception(raised.value))
        # nor a part of it, where a message is cut
        for length in range(260, 300):
            with pytest.raises(SourceError) as raised:
                source.table(f"SELECT error(repeat('-', {length}) || 'shop.duckdb')")
            assert "-sh" not in str(raised.value)


def project(make_project: MakeProject, *setup: str, **view: Any) -> Scene:
    sql = {"source": {"sql": "SELECT * FROM shop.items"}}
    return make_project(view=sql | view, project={"sources": {"setup": list(setup)}})


def test_every_command_opens_what_the_project_says(
    make_project: MakeProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = project(make_project, "ATTACH './${SHOP}' AS shop (READ_ONLY)", fallback={"enabled": True, "deadline": "30s"})  # fmt: skip
    items = scene.home / "shop.duckdb"

    def write(sql: str) -> None:
        with duckdb.connect(str(items)) as connection:
            connection.execute(sql)

    write("CREATE TABLE items AS SELECT range AS id, range / 2.0::DOUBLE AS x FROM range(3)")
    with pytest.raises(ConfigError, match=r"project.yaml:\d+: sources.setup\[0\]: the environment has no SHOP"):  # fmt: skip
        scene.run()
    monkeypatch.setenv("SHOP", "shop.duckdb")
    assert scene.run().counts["written"] == 3
    assert scene.cli("validate") == 0
    write("UPDATE items SET x = 7 WHERE id = 1; INSERT INTO items VALUES (9, 4.5)")
    assert scene.run().counts["written"] == 2
    write("INSERT INTO items VALUES (10, 5.0)")
    with scene.answering() as lookup:
        assert lookup.get("numbers", [1, 10])["double"].to_pylist() == [14.0, 10.0]
    for path in scene.root.rglob("*.json"):
        assert "shop.duckdb" not in path.read_text(), path
