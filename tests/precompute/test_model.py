"""Model: names and dotted paths, what a class may be, and fingerprints."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pytest

from precompute.model import (
    ProjectPath,
    Verbatim,
    digest,
    model_fingerprint,
    resolve_path,
    starting_from,
    table_digest,
)
from precompute.registry import check_use, described, load_model, load_with_fingerprint
from precompute.sources.source import Source
from precompute.store.errors import ConfigError, ModelError
from tests.models import Doubler

ITEMS = pa.table({"id": [1, 2, 3], "v": pa.array([[1.0], [2.0], [3.0]], pa.list_(pa.float32()))})


class NoCompute:
    def fingerprint(self) -> str:
        return ""


class Broken:
    def __init__(self, how: str) -> None:
        raise {"value": ValueError, "os": OSError, "own": ModelError}[how](f"broken by {how}")


class Meanwhile(Doubler):
    """Reads a file, lets the next of :data:`after` happen, and hashes the file when its fingerprint
    is taken.

    Args:
        path: the file; by default a place that no argument names.
        folder: then it is the only file of it.
    """

    after: ClassVar[list[Callable[[], object]]] = []
    elsewhere: ClassVar[Path]
    made = 0

    def __init__(self, path: str = "", folder: str = "") -> None:
        super().__init__()
        self._path = Path(path or (Path(folder, "weights") if folder else self.elsewhere))
        self.weights = self._path.read_text()
        type(self).made += 1
        if self.after:
            self.after.pop(0)()

    def fingerprint(self) -> str:
        return digest(self._path)


# ---- names


@pytest.mark.parametrize(
    ("use", "message"),
    [
        ("text_encodr", "unknown model 'text_encodr'.*did you mean 'text_encoder'"),
        ("", "unknown model ''"),
        ("tests.models", r"package\.module:Class"),
        ("tests.models.Doubler", r"package\.module:Class"),
        ("tests.models:", "unknown model"),
        ("nowhere:Model", "no module 'nowhere'"),
        ("tests.nowhere:Model", r"no module 'tests\.nowhere'"),
        ("..:x", "no module"),
        ("a b:x", "no module"),
    ],
)
def test_a_name_of_nothing_is_refused(use: str, message: str) -> None:
    for check in (check_use, lambda name: load_model(name, {})):
        with pytest.raises(ConfigError, match=message):
            check(use)


@pytest.mark.parametrize(
    ("use", "args", "error", "message"),
    [
        ("tests.models:Nope", {}, ConfigError, "no class 'Nope'"),
        (
            "tests.models:Doubler",
            {"dimm": 3},
            ConfigError,
            r"takes no argument 'dimm'; did you mean 'dim'\?$",
        ),
        ("tests.precompute.test_model:Broken", {}, ConfigError, "how"),
        (
            "tests.precompute.test_model:NoCompute",
            {},
            ConfigError,
            r"has no method compute\(batch\)",
        ),
        ("os:getcwd", {}, ConfigError, r"has no method fingerprint\(\) and no compute\(batch\)"),
        ("os:sep", {}, ConfigError, "no class 'sep'"),
        (
            "tests.precompute.test_model:Broken",
            {"how": "value"},
            ModelError,
            "ValueError: broken by value",
        ),
        ("tests.precompute.test_model:Broken", {"how": "os"}, ModelError, "OSError: broken by os"),
        ("tests.precompute.test_model:Broken", {"how": "own"}, ModelError, "^broken by own"),
    ],
)
def test_a_class_that_cannot_be_made_is_refused(
    use: str, args: Mapping[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        load_model(use, args)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("def (:", "SyntaxError"),
        ("raise RuntimeError('no GPU here')", "no GPU here"),
        ("import package_that_is_not_there", "package_that_is_not_there"),
        ("import sys; sys.exit('no license')", "no license"),
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
    model: Doubler | None = None,
    use: str = "a:B",
    precision: str = "fp32",
    tables: Mapping[str, pa.Table] | None = None,
) -> str:
    return model_fingerprint(
        (model or Doubler()).fingerprint(),
        use,
        precision,
        {"items": ITEMS} if tables is None else tables,
    )


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


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("chunks", pa.concat_tables([ITEMS.slice(0, 1), ITEMS.slice(1)])),
        ("metadata", ITEMS.replace_schema_metadata({"written_by": "somebody"})),
        ("offset", pa.concat_tables([ITEMS, ITEMS]).combine_chunks().slice(3, 3)),
    ],
)
def test_the_fingerprint_looks_at_a_tables_rows_and_not_at_how_they_lie(
    name: str, other: pa.Table
) -> None:
    assert fingerprint(tables={"items": other}) == fingerprint()


def test_what_lies_under_a_null_or_beside_a_slice_does_not_count() -> None:
    plain = pa.table({"n": [1, None, 3]})
    beside = pa.table({"n": [7, 1, None, 3, 9, None]}).slice(1, 3)
    with Source("SELECT 1 AS id", ("id",), {}) as source:
        under = source.table(
            "SELECT CASE WHEN n = 2 THEN NULL ELSE n END AS n FROM (SELECT unnest([1, 2, 3]::BIGINT[]) AS n)"
        )
    for other in (beside, under):
        assert other.equals(plain)
        assert table_digest(other) == table_digest(plain)


# ---- paths


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


# ---- digest: files by their content, however they are named


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    path = tmp_path / "deep" / "ranker.safetensors"
    path.parent.mkdir()
    path.write_bytes(b"one")
    return path


NAMED: dict[str, Any] = {
    "by position": lambda path: digest(path),
    "by position, as text": lambda path: digest(str(path)),
    "as a path": lambda path: digest(weights=path),
    "as a text": lambda path: digest(weights=str(path)),
    "as a path in a list": lambda path: digest(files=[path]),
    "as a text in a list": lambda path: digest(files=["x", str(path)]),
    "as a tuple in a mapping": lambda path: digest(files={"a": (path, "x")}),
    "in a set": lambda path: digest(files={str(path)}),
    "called path": lambda path: digest(path=os.path.relpath(path)),
    "called paths": lambda path: digest(paths=[os.path.relpath(path)]),
    "called …_path": lambda path: digest(weights_path={"a": os.path.relpath(path)}),
    "as an argument of a view": lambda path: digest(weights=ProjectPath(path)),
    "a folder, by position": lambda path: digest(path.parent),
    "a folder, as a path": lambda path: digest(model=path.parent),
    "a folder above": lambda path: digest(path=str(path.parents[1])),
    "a folder, as an argument of a view": lambda path: digest(model=ProjectPath(path.parent)),
}


@pytest.mark.parametrize("how", NAMED)
def test_a_file_counts_with_its_content_and_not_with_its_place(
    weights: Path, tmp_path: Path, how: str
) -> None:
    before = NAMED[how](weights)
    copy = tmp_path / "other" / "place"
    shutil.copytree(weights.parents[1], copy, ignore=shutil.ignore_patterns("other"))
    shutil.rmtree(weights.parent)
    moved = copy / "deep" / weights.name
    assert NAMED[how](moved) == before
    moved.write_bytes(b"two")
    assert NAMED[how](moved) != before


def test_a_relative_name_starts_from_the_projects_folder(weights: Path, tmp_path: Path) -> None:
    with starting_from(tmp_path):
        assert digest("deep/ranker.safetensors") == digest(weights)
        assert digest(path="deep/ranker.safetensors") == digest(path=str(weights))


@pytest.mark.parametrize(
    "text",
    [
        "deep/ranker.safetensors",
        "deep/../deep/ranker.safetensors",
        "ranker.safetensors",
        "deep/",
        "./deep",
    ],
)
@pytest.mark.parametrize("fact", [lambda text: text, lambda text: {"a": [text]}])
def test_the_relative_name_of_a_file_of_the_project_is_no_text(
    weights: Path, tmp_path: Path, text: str, fact: Callable[[str], Any]
) -> None:
    """Its content may change, and the rows that were computed before would count as computed by it.
    Outside a project it is a text as any."""
    shutil.copy(weights, tmp_path)
    as_text = digest(weights=fact(text))
    with starting_from(tmp_path):
        with pytest.raises(
            ConfigError,
            match=r"digest: (weights|a)='.*' names what lies in the project's folder.*_path=….*Verbatim",
        ):
            digest(weights=fact(text))
        assert digest(weights=Verbatim(fact(text))) == as_text
        assert digest(weights=fact("deep"), kind=fact("no/such.file")) != digest(
            weights=fact("deep"), kind=fact("other/such.file")
        )


@pytest.mark.parametrize(
    "make",
    [
        lambda missing: digest(missing),
        lambda missing: digest(str(missing)),
        lambda missing: digest(path=str(missing)),
        lambda missing: digest(path="missing.safetensors"),
        lambda missing: digest(weights=missing),
        lambda missing: digest(weights=[missing]),
        lambda missing: digest(weights=ProjectPath(missing)),
        lambda missing: digest(path=""),
        lambda missing: digest("a\0b"),
    ],
)
def test_a_path_where_nothing_is_is_refused(tmp_path: Path, make: Callable[[Path], str]) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        make(tmp_path / "missing.safetensors")


def test_a_text_stands_for_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the working directory has; and as it was, so that fingerprints stay what they
    are."""
    facts = {
        "name": "title length v1",
        "separator": "/",
        "rule": "./x",
        "scale": 1.5,
        "none": None,
        "layers": [1, 2],
    }
    expected = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    assert digest(**facts) == expected
    monkeypatch.chdir(tmp_path)
    (tmp_path / "title length v1").write_text("")
    (tmp_path / "x").write_text("")
    assert digest(**facts) == expected
    assert (
        len({digest(a="1"), digest(a=1), digest(a=True), digest(b="1"), digest(a=["1"]), digest()})
        == 6
    )


@pytest.mark.parametrize("form", [lambda fact: fact, Verbatim])
def test_a_mapping_counts_with_its_keys_in_any_order(form: Callable[[Any], Any]) -> None:
    """Whatever they are; and as it was, so that fingerprints stay what they are."""
    for of_one_kind in ({"b": 1, "a": 2}, {10: 1, 2: 2, True: 3}, {1.5: 1, 2: 2}, {None: 1}):
        as_it_was = json.dumps({"a": [of_one_kind]}, sort_keys=True)
        assert digest(a=[form(of_one_kind)]) == hashlib.sha256(as_it_was.encode()).hexdigest()
    mixed = digest(a=form({1: 2, "b": 3, None: 4}))
    assert mixed == digest(a=form({"b": 3, None: 4, 1: 2}))
    assert (
        len(
            {
                mixed,
                digest(a=form({1: 2, "b": 4, None: 4})),
                digest(a=form({2: 2, "b": 3, None: 4})),
            }
        )
        == 3
    )
    for keys, message in (
        ({(1, 2): 3}, r"the key \(1, 2\), a tuple: give texts or numbers"),
        ({1: 2, "1": 3}, "keys 1, '1' of a mapping"),
    ):
        with pytest.raises(ConfigError, match=message):
            digest(a=form(keys))


@pytest.mark.parametrize("text", ["/a\0b", "/" + "a" * 300, "/" + "a/" * 3000])
def test_a_text_that_can_be_no_files_name_stands_for_itself(text: str) -> None:
    assert digest(text=text) == digest(text=Verbatim(text))


def test_the_name_of_a_folder_is_refused_or_said_to_be_meant(weights: Path) -> None:
    with pytest.raises(ConfigError, match=r"digest\(model_path=…\).*Verbatim"):
        digest(model=str(weights.parent))
    text = str(weights)
    before = digest(prompt=Verbatim(text), route=Verbatim([str(weights.parent)]))
    weights.write_bytes(b"two")
    assert digest(prompt=Verbatim(text), route=Verbatim([str(weights.parent)])) == before


def test_a_folder_counts_with_its_file_names_but_for_hidden_ones(weights: Path) -> None:
    folder = weights.parent
    before = digest(folder)
    (folder / ".cache").mkdir()
    (folder / ".cache" / "x").write_text("")
    (folder / "__pycache__").mkdir()
    (folder / "__pycache__" / "x.pyc").write_text("")
    (folder / "up").symlink_to(folder)
    assert digest(folder) == before
    seen = {before}
    for change in (
        lambda: (folder / "more").write_text(""),
        lambda: (folder / "more").rename(folder / "less"),
        lambda: (folder / "inside").mkdir(),
        lambda: (folder / "less").rename(folder / "inside" / "less"),
        lambda: (folder / "link").symlink_to(weights),
    ):
        change()
        seen.add(digest(folder))
    assert len(seen) == 5  # an empty folder is nothing


def test_an_array_counts_with_every_value() -> None:
    values = np.zeros(5000, np.float32)
    prints = {
        digest(a=values),
        digest(a=values.astype(np.float64)),
        digest(a=values.reshape(50, 100)),
        digest(a=b"x"),
        digest(a="x"),
    }
    values[2500] = 1.0  # where the text of a long array has dots
    assert len({*prints, digest(a=values), digest(a=ITEMS), digest(a=ITEMS.slice(1))}) == 8
    for fact in (object(), lambda: 0, np.array([object()], object)):
        with pytest.raises(ConfigError, match="give its texts and numbers"):
            digest(fact=fact)


# ---- files that are replaced while they are loaded


@pytest.fixture
def places(tmp_path: Path) -> Iterator[Path]:
    """A folder with ``first/weights`` (old), ``second/weights`` (new), and links: ``link`` to the
    first, and ``linked/weights``."""
    for name, text in (("first", "old"), ("second", "new")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "weights").write_text(text)
        os.utime(tmp_path / name / "weights", (1.0, 1.0))
    (tmp_path / "link").symlink_to("first")
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "weights").symlink_to("../first/weights")
    Meanwhile.after, Meanwhile.made = [], 0
    yield tmp_path
    Meanwhile.after = []


def relink(link: Path, target: str) -> None:
    link.with_name("new link").symlink_to(target)
    os.replace(link.with_name("new link"), link)


REPLACED: dict[str, tuple[str, str, Callable[[Path], object]]] = {
    "a file, by another": ("path", "first/weights", lambda at: os.replace(at / "second/weights", at / "first/weights")),
    "a file, written to": ("path", "first/weights", lambda at: (at / "first/weights").write_text("new")),
    "a file, by a link": ("path", "linked/weights", lambda at: relink(at / "linked/weights", "../second/weights")),
    "a folder, by a link": ("folder", "link", lambda at: relink(at / "link", "second")),
    "a folder, by another": ("folder", "first", lambda at: [(at / a).rename(at / b) for a, b in (("first", "gone"), ("second", "first"))]),
    "a file in a folder": ("folder", "first", lambda at: os.replace(at / "second/weights", at / "first/weights")),
    "a link in a folder": ("folder", "linked", lambda at: relink(at / "linked/weights", "../second/weights")),
    "a file that nothing names": ("", "first/weights", lambda at: os.replace(at / "second/weights", at / "first/weights")),
    "a link that nothing names": ("", "linked/weights", lambda at: relink(at / "linked/weights", "../second/weights")),
}  # fmt: skip


def arguments(places: Path, name: str, path: str) -> dict[str, Any]:
    Meanwhile.elsewhere = places / path
    return {name: str(places / path)} if name else {}


@pytest.mark.parametrize("how", REPLACED)
def test_a_fingerprint_is_that_of_what_was_loaded(
    places: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Also where what took its place is older, by its times."""
    name, path, replace = REPLACED[how]
    if name:
        _later(monkeypatch)
    Meanwhile.after = [lambda: replace(places)]
    loaded = load_with_fingerprint(
        "tests.precompute.test_model:Meanwhile", arguments(places, name, path)
    )
    assert isinstance(loaded.model, Meanwhile)
    (places / "same").write_text(loaded.model.weights)
    assert (loaded.model.weights, loaded.fingerprint, Meanwhile.made) == (
        "new",
        digest(places / "same"),
        2,
    )


def _later(monkeypatch: pytest.MonkeyPatch, seconds: float = 3600) -> None:
    """As if nothing had been written for an hour."""
    now = time.time_ns
    monkeypatch.setattr("precompute.registry.time.time_ns", lambda: now() + round(seconds * 1e9))


@pytest.mark.parametrize("name", ["path", ""])
def test_files_that_stay_are_loaded_once_and_new_ones_at_most_twice(
    places: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    use, args = "tests.precompute.test_model:Meanwhile", arguments(places, name, "first/weights")
    expected = digest(places / "first/weights")
    with monkeypatch.context() as patched:
        _later(patched)
        Meanwhile.after = [lambda: (places / "first/other").write_text("x")]
        assert (load_with_fingerprint(use, args).fingerprint, Meanwhile.made) == (expected, 1)
    _later(monkeypatch, -3600)  # by a clock that is behind, it will be new for long
    assert (load_with_fingerprint(use, args).fingerprint, Meanwhile.made) == (expected, 3)


def test_files_that_do_not_stop_changing_are_reported(places: Path) -> None:
    weights = places / "first/weights"
    Meanwhile.after = [lambda: weights.write_text("newer"), lambda: weights.write_text("newest")]
    with pytest.raises(
        ModelError, match=r"its files were replaced while it was loaded, and again .* run again"
    ):
        load_with_fingerprint("tests.precompute.test_model:Meanwhile", {"path": str(weights)})


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("raise KeyError('weights')", r"raised KeyError: 'weights' \(mine_models\.py:5\)$"),
        ("raise SystemExit('bye')", r"raised SystemExit: bye \(mine_models\.py:5\)$"),
        ("pass", r"returned None, not a text that changes whenever a value may: return precompute"),
        ("return ''", r"returned '', not a text"),
        ("return 5", r"returned 5, not a text"),
    ],
)
def test_a_fingerprint_that_says_nothing_is_refused(
    body: str, message: str, tmp_path: Path
) -> None:
    (tmp_path / "mine_models.py").write_text(
        f"class Mine:\n    def compute(self, batch):\n        return {{}}\n    def fingerprint(self):\n        {body}\n"
    )
    with pytest.raises(ModelError, match=rf"^model 'mine_models:Mine': fingerprint\(\) {message}"):
        load_with_fingerprint("mine_models:Mine", {}, tmp_path)


def test_what_a_users_code_raised_is_reported_with_their_line(tmp_path: Path) -> None:
    """The innermost line of theirs, though a library raised it; what is raised by us alone has
    none."""
    (tmp_path / "mine_models.py").write_text(
        "import json\n\nclass Mine:\n    def __init__(self, text):\n        self.read(text)\n\n    def read(self, text):\n        json.loads(text)\n"
    )
    with pytest.raises(
        ModelError, match=r"failed to load: JSONDecodeError: .* \(mine_models\.py:8\)$"
    ):
        load_model("mine_models:Mine", {"text": "{"}, tmp_path)
    assert described(ValueError("x" * 600)) == "ValueError: " + "x" * 488
    assert described(KeyboardInterrupt()) == "KeyboardInterrupt"

    class Silent(Exception):
        def __str__(self) -> str:
            raise AttributeError("no text")

    assert described(Silent()) == "Silent"


def test_a_feature_tables_times_are_texts_and_all_else_is_handed_on() -> None:
    noon = datetime(2024, 3, 1, 12, tzinfo=UTC)
    columns = {
        "date": (pa.array([noon.date(), None]), "2024-03-01"),
        "time": (pa.array([noon.time(), None], pa.time32("s")), "12:00:00"),
        "plain": (pa.array([noon, None], pa.timestamp("s")), "2024-03-01T12:00:00"),
        "zoned": (pa.array([noon, None], pa.timestamp("s", "Asia/Tokyo")), "2024-03-01T12:00:00Z"),
        "vector": (pa.array([[1.0], None]), [1.0]),
        "flag": (pa.array([True, None]), True),
    }
    model = load_model("columns", {})
    made: Any = model.compute(pa.record_batch({name: one for name, (one, _) in columns.items()}))
    assert {name: one.to_pylist() for name, one in made.items()} == {
        name: [value, None] for name, (_, value) in columns.items()
    }
