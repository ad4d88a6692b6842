"""Model: names and dotted paths, what a class may be, and fingerprints."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from precompute.model import BUILT_IN, check_use, digest, load_model, model_fingerprint, resolve_path, table_digest
from precompute.source import Source
from store.errors import ConfigError, ModelError
from tests.arithmetic import Doubler

ITEMS = pa.table({"id": [1, 2, 3], "v": pa.array([[1.0], [2.0], [3.0]], pa.list_(pa.float32()))})


class NoCompute:
    def fingerprint(self) -> str:
        return ""


class Broken:
    def __init__(self, how: str) -> None:
        raise {"value": ValueError, "os": OSError, "own": ModelError}[how](f"broken by {how}")


# ---- names


@pytest.mark.parametrize(
    ("use", "message"),
    [
        ("text_encodr", "unknown model 'text_encodr'.*text_encoder, two_tower, top_k"),
        ("", "unknown model ''"),
        ("tests.arithmetic", r"package\.module:Class"),
        ("tests.arithmetic.Doubler", r"package\.module:Class"),
        (":Doubler", "unknown model"),
        ("tests.arithmetic:", "unknown model"),
        ("nowhere:Model", "no module 'nowhere'"),
        ("tests.nowhere:Model", r"no module 'tests\.nowhere'"),
        ("tests.arithmetic.deeper:Model", "no module"),
        ("..:x", "no module"),
        ("a..b:x", "no module"),
        ("a b:x", "no module"),
    ],
)
def test_a_name_of_nothing_is_refused(use: str, message: str) -> None:
    for check in (check_use, lambda name: load_model(name, {})):
        with pytest.raises(ConfigError, match=message):
            check(use)


@pytest.mark.parametrize("use", [*BUILT_IN, "tests.arithmetic:Doubler"])
def test_built_ins_and_dotted_paths_are_known(use: str) -> None:
    check_use(use)


@pytest.mark.parametrize(
    ("use", "args", "error", "message"),
    [
        ("tests.arithmetic:Nope", {}, ConfigError, "no class 'Nope'"),
        ("tests.arithmetic:Doubler", {"dimm": 3}, ConfigError, r"does not take these args \(dimm\).*'dimm'"),
        ("tests.precompute.test_model:Broken", {}, ConfigError, "how"),
        ("tests.precompute.test_model:NoCompute", {}, ConfigError, r"fingerprint\(\) and compute"),
        ("os:getcwd", {}, ConfigError, r"fingerprint\(\) and compute"),
        ("os:sep", {}, ConfigError, "does not take|no model|fingerprint"),
        ("tests.precompute.test_model:Broken", {"how": "value"}, ModelError, "ValueError: broken by value"),
        ("tests.precompute.test_model:Broken", {"how": "os"}, ModelError, "OSError: broken by os"),
        ("tests.precompute.test_model:Broken", {"how": "own"}, ModelError, "^broken by own"),
    ],
)
def test_a_class_that_cannot_be_made_is_refused(use: str, args: Mapping[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        load_model(use, args)


def test_a_users_class_gets_its_arguments() -> None:
    model = load_model("tests.arithmetic:Doubler", {"dim": 7, "version": 3})
    assert isinstance(model, Doubler)
    assert (model.dim, model.version) == (7, 3)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("def (:", "SyntaxError"),
        ("raise RuntimeError('no GPU here')", "no GPU here"),
        ("import package_that_is_not_there", "package_that_is_not_there"),
        ("import os; os.nothing_of_this_name", "nothing_of_this_name"),
        ("1 / 0", "division by zero"),
    ],
)
@pytest.mark.parametrize("layout", ["module", "package"])
def test_a_module_that_fails_to_import_is_an_error_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, message: str, layout: str
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    if layout == "module":
        use = "failing_module"
        (tmp_path / "failing_module.py").write_text(body)
    else:
        use = "failing_package.models"
        (tmp_path / "failing_package").mkdir()
        (tmp_path / "failing_package" / "__init__.py").write_text(body)
        (tmp_path / "failing_package" / "models.py").write_text("class Model: pass")
    with pytest.raises((ConfigError, ModelError), match=message):
        load_model(f"{use}:Model", {})


# ---- fingerprints


def fingerprint(
    model: Doubler | None = None, use: str = "a:B", precision: str = "fp32", tables: Mapping[str, pa.Table] | None = None
) -> str:
    return model_fingerprint(model or Doubler(), use, precision, {"items": ITEMS} if tables is None else tables)


@pytest.mark.parametrize(
    "changed",
    [
        {"model": Doubler(version=2)},
        {"model": Doubler(dim=5)},
        {"use": "a:C"},
        {"precision": "bf16"},
        {"tables": {}},
        {"tables": {"others": ITEMS}},
        {"tables": {"items": ITEMS.slice(0, 2)}},
        {"tables": {"items": ITEMS.rename_columns(["id", "w"])}},
        {"tables": {"items": ITEMS.set_column(0, "id", pa.array([1, 2, 4]))}},
        {"tables": {"items": ITEMS.set_column(0, "id", pa.array([1, 2, 3], pa.int32()))}},
        {"tables": {"items": ITEMS.set_column(0, "id", pa.array([1, 2, None]))}},
    ],
)
def test_the_fingerprint_changes_with_whatever_may_change_a_value(changed: dict[str, Any]) -> None:
    assert fingerprint(**changed) != fingerprint()


def test_the_fingerprint_is_the_same_for_the_same_facts() -> None:
    assert fingerprint() == fingerprint(Doubler()) == fingerprint(tables={"items": ITEMS})
    assert len(fingerprint()) == 64


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("chunks", pa.concat_tables([ITEMS.slice(0, 1), ITEMS.slice(1)])),
        ("metadata", ITEMS.replace_schema_metadata({"written_by": "somebody"})),
        ("offset", pa.concat_tables([ITEMS, ITEMS]).combine_chunks().slice(3, 3)),
    ],
)
def test_the_fingerprint_looks_at_a_tables_rows_and_not_at_how_they_lie(name: str, other: pa.Table) -> None:
    assert fingerprint(tables={"items": other}) == fingerprint()


def test_what_lies_under_a_null_or_beside_a_slice_does_not_count() -> None:
    plain = pa.table({"n": [1, None, 3]})
    beside = pa.table({"n": [7, 1, None, 3, 9, None]}).slice(1, 3)
    with Source("SELECT 1 AS id", ("id",), {}) as source:
        under = source.table("SELECT CASE WHEN n = 2 THEN NULL ELSE n END AS n FROM (SELECT unnest([1, 2, 3]::BIGINT[]) AS n)")
    for other in (beside, under):
        assert other.equals(plain)
        assert table_digest(other) == table_digest(plain)


def test_a_path_in_a_digest_stands_for_its_bytes(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    one.write_bytes(b"weights")
    other.write_bytes(b"weights")
    assert digest(file=one) == digest(file=other)
    assert digest(files={"w": one}) == digest(files={"w": other})
    other.write_bytes(b"Weights")
    assert digest(file=one) != digest(file=other)
    assert digest(a=1, b=2) == digest(b=2, a=1) != digest(a=2, b=1)
    with pytest.raises(ConfigError, match="cannot be read"):
        digest(file=tmp_path / "missing")


# ---- paths


def test_a_path_inside_a_package_is_found(tmp_path: Path) -> None:
    assert resolve_path("package:store/api") == Path(__file__).parents[2] / "store" / "api"
    assert resolve_path(str(tmp_path)) == tmp_path


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("package:nowhere_at_all/model", "'nowhere_at_all' is not installed"),
        ("package:store/nothing", "nothing at"),
        ("package:json.decoder/x", "not installed"),
        ("package:nowhere.at.all/model", "not installed"),
        ("package:", "not installed"),
        ("/nowhere/at/all", "nothing at"),
    ],
)
def test_a_path_to_nothing_is_refused(path: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve_path(path)
