"""Sources in object stores: the same rows as from files here, in few requests, and never half of
one object and half of the one that took its place."""

from __future__ import annotations

import io
import json
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import unquote

import duckdb
import obstore
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from obstore.store import from_url

from precompute.sources.source import Source
from precompute.store.disk import remote_files
from precompute.store.disk.remote_files import RemoteFileError, RemoteFiles
from precompute.store.errors import ConfigError, MissingFileError, OverMemoryError, SourceError
from tests.fixtures import MakeProject
from tests.object_store import ObjectStore
from tests.scene import Scene

ROWS: dict[str, list[Any]] = {"id": list(range(300)), "x": [i / 2 for i in range(300)]}


def put(bucket: ObjectStore, name: str, data: bytes) -> str:
    """An object of this test's own; returns its URL."""
    store = from_url("s3://bucket", client_options={"allow_http": True})
    obstore.put(store, f"{bucket.prefix}/{name}", data)
    return f"s3://bucket/{bucket.prefix}/{name}"


def parquet(first: int, last: int, **options: Any) -> bytes:
    out = io.BytesIO()
    rows = {name: values[first:last] for name, values in ROWS.items()}
    pq.write_table(pa.table(rows), out, **options)
    return out.getvalue()


@pytest.fixture
def days(bucket: ObjectStore) -> str:
    """Three Parquet files and other things; returns the URL of their folder."""
    for n in range(3):
        put(bucket, f"day={n}/part 1.parquet", parquet(100 * n, 100 * n + 100))
    put(bucket, "day=0/deeper/x.csv", b"id,x\n1,0.5\n")
    put(bucket, "a+b%20[1].csv", b"id,x\n7,3.5\n")
    return f"s3://bucket/{bucket.prefix}"


def read(sql: str, folder: Path = Path("/nowhere")) -> list[tuple[Any, ...]]:
    with Source(sql, ("id",), {}, folder=folder, memory_mb=256, threads=2) as source:
        source.load()
        table = source.database.query("SELECT id, x FROM input ORDER BY id")
        return list(zip(*table.to_pydict().values(), strict=True))


@pytest.mark.parametrize(
    ("files", "ids"),
    [
        ("read_parquet('{}/day=1/part 1.parquet')", range(100, 200)),
        ("read_parquet('{}/day=*/*.parquet')", range(300)),
        ("read_parquet('{}/day=[12]/part ?.parquet', hive_partitioning = true)", range(100, 300)),
        ("read_parquet('{}/day=[!02]/part ?.parquet')", range(100, 200)),
        (
            "read_parquet(['{}/day=0/part 1.parquet', '{}/day=2/part 1.parquet'])",
            [*range(100), *range(200, 300)],
        ),
        ("'{}/**/*.parquet'", range(300)),
        ("read_csv('{}/**/*.csv')", [1, 7]),
        ("read_csv('{}/day=0/deeper/x.csv')", [1]),
    ],
)
def test_the_rows_of_an_object_store_are_those_of_files(days: str, files: str, ids: Any) -> None:
    found = read(f"SELECT id, x FROM {files.replace('{}', days)}")
    assert found == [(i, i / 2) for i in ids]


def test_a_row_takes_few_requests(days: str, bucket: ObjectStore) -> None:
    sql = f"SELECT id, x FROM read_parquet('{days}/day=*/*.parquet')"
    with Source(sql, ("id",), {}, folder=Path("/nowhere"), memory_mb=64) as source:
        before = len(bucket.requests)
        assert source.rows(["150"]).to_pylist() == [{"key": "150", "id": 150, "x": 75.0}]
        # one listing, and no more than the footers and the rows of each file
        assert len(bucket.requests) - before <= 7
        assert source.modified_us() is not None


def test_an_object_that_is_replaced_while_it_is_read_is_an_error(bucket: ObjectStore) -> None:
    url = put(bucket, "x.bin", b"a" * 3_000_000)
    files = RemoteFiles()
    file = files.open(url)
    assert file.read(10) == b"a" * 10
    put(bucket, "x.bin", b"b" * 3_000_000)
    file.seek(2_000_000)
    with pytest.raises(RemoteFileError, match="was replaced while it was read: run again"):
        file.read(10)
    assert files.open(url).read(10) == b"b" * 10


def test_what_changed_is_seen_after_a_while(
    bucket: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = put(bucket, "x.csv", b"id,x\n1,1.5\n")
    monkeypatch.setattr(remote_files, "FRESH_S", 0.0)
    with Source(f"FROM '{url}'", ("id",), {}, folder=Path("/nowhere")) as source:
        assert source.rows(["1"])["x"].to_pylist() == [1.5]
        # of one object the time has steps of a second
        time.sleep(1.1)
        put(bucket, "x.csv", b"id,x\n1,2.5\n2,3.5\n")
        assert source.rows(["1", "2"])["x"].to_pylist() == [2.5, 3.5]


def test_a_file_reads_as_any_file_does(bucket: ObjectStore) -> None:
    data = bytes(range(256)) * 20_000
    file, ours = RemoteFiles().open(put(bucket, "x.bin", data)), io.BytesIO(data)
    for offset, whence, size in [(0, 0, 5), (3, 1, 2_000_000), (-9, 2, 100), (7, 0, -1), (0, 2, 1)]:
        assert file.seek(offset, whence) == ours.seek(offset, whence)
        assert file.read(size) == ours.read(size)
        assert file.tell() == ours.tell()


FAILURES = [
    ("FROM 's3://bucket/{}/none.csv'", None, MissingFileError, "nothing matches s3://bucket/{}/none.csv"),
    ("FROM 's3://bucket/{}/none/*.csv'", None, MissingFileError, "nothing matches s3://bucket/{}/none/*.csv"),
    ("FROM 's3://bucket/{}/[z-a].csv'", None, MissingFileError, "nothing matches s3://bucket/{}/[z-a].csv"),
    ("FROM 's3://elsewhere/*.csv'", None, SourceError, "s3://elsewhere/: the object store gave no answer that can be used"),
    ("FROM 's3://bucket/{}/x.csv'", "forbid", SourceError, "s3://bucket/{}/x.csv: the object store refuses these credentials"),
    ("FROM 'az://container/x.csv'", None, SourceError, "az://container: Generic MicrosoftAzure error: Account must be specified"),
]  # fmt: skip


@pytest.mark.parametrize(("sql", "fault", "error", "message"), FAILURES)
def test_a_failure_says_what_and_where(
    bucket: ObjectStore, sql: str, fault: str | None, error: type[Exception], message: str
) -> None:
    put(bucket, "x.csv", b"id,x\n1,1.5\n")
    bucket.fault = lambda _: fault
    with pytest.raises(error) as raised:
        read(sql.format(bucket.prefix))
    assert message.format(bucket.prefix) in str(raised.value)
    assert "\n" not in str(raised.value)
    assert "Traceback" not in str(raised.value)


def test_a_source_cannot_be_written(bucket: ObjectStore) -> None:
    with pytest.raises(RemoteFileError, match="a source is read, never written"):
        RemoteFiles().open(f"s3://bucket/{bucket.prefix}/x", "wb")


def test_without_obstore_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "precompute.store.disk.remote_files", None)
    with pytest.raises(ConfigError, match=r"s3://b/x.csv: .*pip install 'precompute-store\[s3\]'"):
        read("FROM 's3://b/x.csv'")


class OneFile(BaseHTTPRequestHandler):
    """What Google's and Azure's stores answer for an object ``x.csv``."""

    def do_HEAD(self, body: bool = False) -> None:
        data = b"id,x\n2,2.5\n"
        found = unquote(self.path).partition("?")[0].endswith("/x.csv")
        self.send_response((206 if body else 200) if found else 404)
        self.send_header("Content-Length", str(len(data) if found else 0))
        self.send_header("Content-Range", f"bytes 0-{len(data) - 1}/{len(data)}")
        self.send_header("ETag", '"1"')
        self.send_header("Last-Modified", "Wed, 25 Nov 2026 00:00:00 GMT")
        self.end_headers()
        if body and found:
            self.wfile.write(data)

    def do_GET(self) -> None:
        self.do_HEAD(body=True)

    def log_message(self, *_: object) -> None:
        """Nothing."""


def test_gs_and_az_are_read_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = HTTPServer(("127.0.0.1", 0), OneFile)
    Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_address[1]}"
    account = dict.fromkeys(("client_email", "private_key", "private_key_id"), "")
    (tmp_path / "account.json").write_text(
        json.dumps(account | {"gcs_base_url": url, "disable_oauth": True})
    )
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT", str(tmp_path / "account.json"))
    monkeypatch.setenv("GOOGLE_ALLOW_HTTP", "true")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", url)
    monkeypatch.setenv("AZURE_ALLOW_HTTP", "true")
    monkeypatch.setenv("AZURE_SKIP_SIGNATURE", "true")
    # which allows plain HTTP for this store, and no other one
    monkeypatch.setenv("AWS_ENDPOINT_URL", url)
    try:
        for scheme in ("gs", "az"):
            assert read(f"FROM '{scheme}://bucket/x.csv'") == [(2, 2.5)]
    finally:
        server.shutdown()
        server.server_close()


def test_a_view_runs_and_answers_misses_from_an_object_store(
    bucket: ObjectStore, make_project: MakeProject
) -> None:
    url = put(bucket, "items.parquet", parquet(0, 100))
    view = {"source": {"sql": f"SELECT id, x FROM read_parquet('{url}') WHERE id < 99"}}
    scene = make_project(view=view | {"fallback": {"enabled": True, "deadline": "30s"}})
    assert scene.run().counts["written"] == 99
    assert scene.report().source_at is not None
    put(bucket, "items.parquet", parquet(1, 101))
    report = Scene(scene.folder, {}).run()
    assert (report.counts["unchanged"], report.counts["removed"]) == (98, 1)
    put(bucket, "items.parquet", parquet(0, 101))
    with scene.answering() as lookup:
        assert lookup.get("numbers", [0, 5])["double"].to_pylist() == [0.0, 5.0]


def test_a_value_of_another_type_is_named_with_its_row(bucket: ObjectStore, tmp_path: Path) -> None:
    """Lines are counted of files here alone."""
    url = put(bucket, "x.csv", b'id,x\n1,"1"\n2,"2"\n"3\n4",N/A\n')
    with Source(f"SELECT * FROM '{url}'", ("id",), {}, folder=tmp_path) as source:
        assert source.late_values({"x": "BIGINT"}).startswith(f"{url}, row 3: x is 'N/A', which")
    url = put(bucket, "no.csv", b'id,x\n1,"a\nb"\n2,\xe9\n')
    with pytest.raises(SourceError) as raised:
        Source(f"SELECT * FROM '{url}'", ("id",), {}, folder=tmp_path).close()
    assert str(raised.value).startswith(f"{url}, row 3: a value is not UTF-8")


def test_large_row_groups_elsewhere_are_told_by_footers(
    bucket: ObjectStore, tmp_path: Path
) -> None:
    text = (
        "list_reduce(list_transform(range(36), lambda j: md5(i || 'x' || j)), lambda a, b: a || b)"
    )
    sql = f"COPY (SELECT i AS id, {text} AS x FROM range(30000) t(i)) TO '{tmp_path}/x.parquet'"
    with duckdb.connect() as connection:
        connection.execute(sql)
    url = put(bucket, "large/x.parquet", (tmp_path / "x.parquet").read_bytes())
    needs = []
    for files in (f"{tmp_path}/x.parquet", url, url.replace("x.parquet", "*")):
        read_from = f"SELECT id, x FROM read_parquet('{files}')"
        with Source(read_from, ("id",), {}, folder=Path("/nowhere"), memory_mb=64) as source:
            with pytest.raises(OverMemoryError, match=r"set memory_mb: \d+") as refused:
                source.load()
            needs.append(str(refused.value).partition(" takes ")[2])
    assert "x.parquet takes" in str(refused.value)
    assert len({*needs}) == 1
    # what is fetched at once is let go of
    file = RemoteFiles().open(url)
    assert file.read() == (tmp_path / "x.parquet").read_bytes()
    assert (file.tell(), len(file._ahead)) == (file.size, 0)
