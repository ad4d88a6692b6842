"""Models people have, from their own formats: each published, its bad rows rejected alone, its
misses answered with the same values, its damaged file named."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from precompute.registry import built_in, class_of, load_model
from precompute.store.errors import ConfigError, ModelError
from precompute.techniques.row_errors import differing
from tests.fixtures import MakeProject
from tests.people import cases, view_of


@pytest.fixture(params=cases())
def case(request: pytest.FixtureRequest) -> str:
    """Name of a built-in."""
    return str(request.param)


def test_it_is_published_and_answers_misses_alike(
    make_project: MakeProject, tmp_path: Path, case: str
) -> None:
    """And a column that the source lacks is named."""
    (tmp_path / "project").mkdir()
    made = cases()[case](tmp_path / "project")
    column = made.table.column_names[-1]
    lacking = made.table.rename_columns([*made.table.column_names[:-1], column.upper() + "S"])
    with pytest.raises(
        ConfigError,
        match=rf"the source yields no column '{column}', which the model {case} reads.*; did you mean '{column.upper()}S'",
    ):
        make_project(lacking, view=view_of(case, made)).run()
    project = make_project(made.table, view=view_of(case, made))
    report = project.run()
    assert (report.status, report.counts["written"], report.counts["rejected"]) == (
        "published",
        made.table.num_rows - len(made.bad),
        len(made.bad),
    )
    # of the gates, parity computes rows again one by one, as a miss would
    assert {gate.gate: gate.message for gate in report.gates}["parity"].startswith("0 of ")
    rejected = (
        pq.read_table(
            project.root / "numbers" / "data" / report.run / "rejected.parquet"
        ).to_pylist()
        if made.bad
        else []
    )
    reasons = {int(row["key"]): (row["stage"], row["error"]) for row in rejected}
    assert {key: stage for key, (stage, _) in reasons.items()} == dict.fromkeys(made.bad, "input")
    for key, reason in made.bad.items():
        assert reasons[key][1].endswith(reason), reasons[key]
    rows = pa.Table.from_batches(project.store.batches(project.live_snapshot())).sort_by("id")
    good = [row for row in range(made.table.num_rows) if row not in made.bad]
    assert rows["id"].to_pylist() == good
    for name, values in made.expected.items():
        got = rows[name].to_pylist()
        if isinstance(got[0], str):
            assert got == [values[row] for row in good]
        else:
            np.testing.assert_allclose(
                np.array(got),
                np.asarray(values)[good],
                rtol=2e-3 if "float16" in str(made.features) else 1e-5,
                atol=1e-6,
            )

    project = make_project(view=view_of(case, made, ttl="0s", stale_for="0s"))
    project.run()
    snapshot = project.live_snapshot()
    with project.answering() as lookup:
        answers = pa.concat_tables(
            [lookup.get("numbers", keys) for keys in (good[:20], *([key] for key in good[20:24]))]
        )
        bad = lookup.get("numbers", list(made.bad)).to_pylist() if made.bad else []
    assert set(answers["status"].to_pylist()) == {"computed"}
    assert differing(rows.slice(0, 24), answers, snapshot.view, "fp32-eager") == {}
    assert [row["reason"] for row in bad] == ["model_error"] * len(bad)


def test_every_built_in_says_what_it_reads() -> None:
    # what `columns` hands on is its view's features
    for use in set(built_in()) - {"columns"}:
        made_by: Any = class_of(use)
        assert callable(made_by.reads), use


def test_its_fingerprint_is_that_of_its_values_and_damage_is_one_message(
    tmp_path: Path, case: str
) -> None:
    made = cases()[case](tmp_path)

    def load(**more: Any) -> str:
        return load_model(case, made.args | more, tmp_path).fingerprint()

    known = [load()] + [load(**more) for more in made.others]
    assert len(set(known)) == len(known)
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    for inside in list(tmp_path.iterdir()):
        if inside != moved:
            inside.rename(moved / inside.name)
    assert load_model(case, made.args, moved).fingerprint() == known[0], (
        "where it lies does not count"
    )
    file = moved / made.file
    content = file.read_bytes()
    for damaged in (b"", content[: len(content) // 2], b'{"a": [1, 2]}'):
        file.write_bytes(damaged)
        with pytest.raises(
            ModelError, match=rf"^{case}: .*{re.escape(made.file.partition('/')[0])}"
        ) as raised:
            load_model(case, made.args, moved)
        assert "\n" not in str(raised.value)
