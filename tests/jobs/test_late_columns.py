"""A column that one value made text, where a run meets it: as a feature, as the input of a model,
on trial; the message names the value, and costs nothing where all is well."""

from __future__ import annotations

from pathlib import Path

import pytest

from precompute.jobs.cli import main
from precompute.sources.source import Source

WHY = (
    "prices.csv, line 5: price is 'N/A', which makes the whole column VARCHAR; 3 of its 4 values"
    ' are BIGINT: mend it, or write TRY_CAST("price" AS BIGINT) AS "price" in the SQL, which makes'
    " null of it"
)
MODEL = """\
class Half:
    def fingerprint(self):
        return "half"

    def compute(self, batch):
        return {"half": [value / 2 for value in batch["p"].to_pylist()]}
"""
FEATURE = "model: {use: columns}\nfeatures: {price: {dtype: int64}}"
INPUT = "model: {use: models_of_prices:Half}\nfeatures: {half: {dtype: float32}}"


@pytest.fixture
def prices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project without a view, over prices of which the last is none."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "shop"
    (folder / "views").mkdir(parents=True)
    (folder / "project.yaml").write_text("root: ./var\nonline: table:./var/online\n")
    (folder / "prices.csv").write_text("id,price\n1,10\n2,20\n3,30\n4,N/A\n")
    (folder / "models_of_prices.py").write_text(MODEL)
    return folder


def view(folder: Path, column: str, rest: str) -> None:
    sql = f"SELECT id, {column} FROM 'prices.csv'"
    (folder / "views" / "v.yaml").write_text(
        f"name: v\nentity: [id]\nsource:\n  sql: {sql}\n{rest}\nttl: 26h\n"
    )


def said(capsys: pytest.CaptureFixture[str], *command: str) -> str:
    capsys.readouterr()
    main(["-c", "shop", *command])
    captured = capsys.readouterr()
    return captured.out + captured.err


def test_the_value_is_named_that_made_text_of_a_feature(
    prices: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    view(prices, "price", FEATURE)
    assert (
        "shop/views/v.yaml:6: features.price: no row of the model's answer fits the view;"
        f" {WHY} (1× feature 'price' of view 'v': the model returned string (10), declared int64;"
    ) in said(capsys, "run", "v")
    assert f"correct `dtype` or the model; {WHY}" in said(capsys, "validate", "v")
    assert f"correct `dtype` or the model); {WHY}" in said(capsys, "profile", "v")


def test_the_value_is_named_that_made_text_of_a_models_input(
    prices: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    view(prices, "price AS p", INPUT)
    assert "unsupported operand" in (run := said(capsys, "run", "v"))
    assert f"or raise max_rejected; {WHY}" in run
    view(prices, "price AS p", f"{INPUT}\nmax_rejected: 1.0")
    assert f"rejected.parquet; {WHY}" in said(capsys, "run", "v")
    assert WHY in said(capsys, "validate", "v")


def test_what_is_advised_runs_and_looks_for_no_value(
    prices: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(Source, "late_values")
    view(prices, 'TRY_CAST("price" AS BIGINT) AS "price"', FEATURE)
    assert "4 of 4 rows" in said(capsys, "run", "v")
    assert "BAD" not in said(capsys, "validate", "v")
