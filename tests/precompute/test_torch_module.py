"""Torch module: columns in, features out, the same from a class and from an exported program; what
does not fit is said by name."""

from __future__ import annotations

import pickle
import random
import warnings
import zipfile
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from safetensors.torch import load_model as load_into
from safetensors.torch import save_file

from precompute.engine import batches
from precompute.engine.rows import Outcome
from precompute.engine.runner import Runner
from precompute.models.torch_module import TorchModule
from precompute.registry import load_model
from precompute.store.errors import ConfigError, ModelError
from precompute.store.feature_view import Feature, FeatureView

HERE = "tests.precompute.test_torch_module"
EMBEDDING = torch.arange(10.0).view(5, 2)


class Ranker(torch.nn.Module):
    """``total`` = x₀ + 2x₁ + 3x₂ + e(genre)₀, [rows, 1]; ``both`` = [total, e(genre)₁]."""

    def __init__(self, genres: int = 5) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, 1)
        self.embedding = torch.nn.Embedding(genres, 2)

    def forward(self, x: torch.Tensor, genre: torch.Tensor) -> dict[str, torch.Tensor]:
        found = self.embedding(genre)
        total = self.linear(x) + found[:, :1]
        return {"total": total, "both": torch.cat([total, found[:, 1:]], 1)}


class Echo(torch.nn.Module):
    """Its input, unless another is named."""

    def __init__(self, returns: str = "x") -> None:
        super().__init__()
        self.returns = returns

    def forward(self, x: torch.Tensor) -> Any:
        made: dict[str, Callable[[], Any]] = {
            "x": lambda: x,
            "pair": lambda: (x, 2 * x),
            "text": lambda: "x",
            "texts": lambda: ["x"],
            "cube": lambda: x.view(-1, 1, 1),
            "short": lambda: x[1:],
            "written": lambda: x.mul_(2),
        }
        return made[self.returns]()


class Raises(torch.nn.Module):
    """Cannot be made."""

    def __init__(self) -> None:
        raise RuntimeError("no luck")


NO_MODULE = 5
STATE = {
    "linear.weight": torch.tensor([[1.0, 2.0, 3.0]]),
    "linear.bias": torch.zeros(1),
    "embedding.weight": EMBEDDING,
}
INPUTS = {"x": ["a", "b", "c"], "genre": "genre"}
OUTPUTS = {"total": "total", "both": "both"}
VIEW = FeatureView(
    "ranks", ("id",), (Feature("total", "float32"), Feature("both", "float32", dim=2)), 60.0, 60.0
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The ranker as a state and as a program."""
    folder = tmp_path_factory.mktemp("ranker")
    save_file(STATE, folder / "ranker.safetensors")
    export(folder / "ranker.pt2")
    return folder


def export(
    path: Path, module: torch.nn.Module | None = None, rows: Any = None, **inputs: torch.Tensor
) -> Path:
    if module is None:
        module = Ranker()
        module.load_state_dict(STATE)
        module.eval()
        inputs = {"x": torch.rand(4, 3), "genre": torch.arange(4)}
    rows = torch.export.Dim("rows") if rows is None else rows
    shapes = {name: {0: rows} for name in inputs} if rows != "fixed" else None
    torch.export.save(
        torch.export.export(module, tuple(inputs.values()), dynamic_shapes=shapes), path
    )
    return path


def ranker(folder: Path, **changed: Any) -> TorchModule:
    given = {
        "module": f"{HERE}:Ranker",
        "weights": str(folder / "ranker.safetensors"),
        "inputs": INPUTS,
        "outputs": OUTPUTS,
    }
    model = load_model(
        "torch_module", {k: v for k, v in (given | changed).items() if v is not None}
    )
    assert isinstance(model, TorchModule)
    return model


def program(path: Path, **changed: Any) -> TorchModule:
    return TorchModule(**({"module": str(path), "inputs": INPUTS, "outputs": OUTPUTS} | changed))


def echo(spec: Any, returns: str = "x", key: int | str = 0, **more: Any) -> TorchModule:
    return TorchModule(f"{HERE}:Echo", {"x": spec}, {"y": key}, {"returns": returns}, **more)


def made(model: TorchModule, **columns: Any) -> Any:
    return model.compute(pa.record_batch(columns))["y"]


def rows(n: int) -> pa.RecordBatch:
    number = np.arange(n)
    return pa.record_batch(
        {
            "id": number,
            "a": number % 7,
            "b": number / 2,
            "c": pa.array(number % 3, pa.int8()),
            "genre": number % 5,
        }
    )


def expected(batch: pa.RecordBatch) -> dict[str, Any]:
    a, b, c, genre = (
        np.asarray(batch.column(n)).astype(np.float64) for n in ("a", "b", "c", "genre")
    )
    total = a + 2 * b + 3 * c + 2 * genre
    return {"total": total, "both": np.stack([total, 2 * genre + 1], 1)}


# ---- values


def test_a_class_with_its_weights_computes_what_it_says(folder: Path) -> None:
    batch = rows(50)
    model = ranker(folder)
    got = model.compute(batch.select(model.reads()))
    assert {name: values.dtype for name, values in got.items()} == {
        "total": np.float32,
        "both": np.float32,
    }
    for name, values in expected(batch).items():
        np.testing.assert_array_equal(got[name], values)


def test_an_exported_program_computes_the_same_in_any_input_order(folder: Path) -> None:
    swapped = dict(reversed(INPUTS.items()))
    model = program(folder / "ranker.pt2", inputs=swapped)
    for n in (50, 1):
        for name, values in ranker(folder).compute(rows(n)).items():
            np.testing.assert_array_equal(model.compute(rows(n))[name], values)


def test_a_program_exported_with_keyword_arguments_takes_them_by_name(tmp_path: Path) -> None:
    module, dim = Ranker().eval(), torch.export.Dim("rows")
    module.load_state_dict(STATE)
    given = {"genre": torch.arange(4), "x": torch.rand(4, 3)}
    exported = torch.export.export(
        module, (), given, dynamic_shapes={"genre": {0: dim}, "x": {0: dim}}
    )
    torch.export.save(exported, tmp_path / "k.pt2")
    got = program(tmp_path / "k.pt2").compute(rows(9))
    np.testing.assert_array_equal(got["both"], expected(rows(9))["both"])


@pytest.mark.parametrize("kind", ["class", "program"])
def test_stream_and_compute_give_the_same_and_a_bad_row_is_one_bad_row(
    folder: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches, "START_WINDOW_ROWS", 8192)
    model = ranker(folder) if kind == "class" else program(folder / "ranker.pt2")
    batch = rows(20_000)
    genre = np.array(batch.column("genre"))
    a = pa.array([None if i == 9000 else i % 7 for i in range(20_000)])
    genre[[3, 12_345]] = 5, -1  # beyond the embedding's five rows
    batch = batch.set_column(1, "a", a).set_column(4, "genre", pa.array(genre))
    windows = [batch.slice(start, 8192) for start in range(0, 20_000, 8192)]
    streamed = [done for _, done in Runner(model, VIEW).stream(windows, hidden=("id",))]
    whole: list[Outcome] = [Runner(model, VIEW).compute(window) for window in windows]
    assert [d.features for d in streamed] == [d.features for d in whole]
    assert [d.rejections for d in streamed] == [d.rejections for d in whole]
    found = [
        (8192 * w + r.row, r.stage, r.error.partition(":")[0])
        for w, d in enumerate(streamed)
        for r in d.rejections
    ]
    assert found == [
        (3, "model", "IndexError"),
        (9000, "input", "a is null"),
        (12_345, "model", "IndexError"),
    ]
    good = np.concatenate([8192 * w + d.rows for w, d in enumerate(streamed)])
    np.testing.assert_array_equal(good, np.setdiff1d(np.arange(20_000), [3, 9000, 12_345]))
    got = np.concatenate([np.asarray(d.features.column("total")) for d in streamed])
    np.testing.assert_array_equal(got, expected(rows(20_000))["total"][good])


def test_flops_are_two_for_each_weight_of_linear_layers(folder: Path) -> None:
    for model in (ranker(folder), program(folder / "ranker.pt2")):
        assert model.flops(model.prepare(rows(4)), np.arange(3)) == 3 * 2 * 3


# ---- columns


@pytest.mark.parametrize(
    ("column", "values"),
    [
        (pa.array([1, 2], pa.int8()), np.array([1, 2])),
        (pa.array([2**40, -1], pa.int64()), np.array([2**40, -1])),
        (pa.array([True, False]), np.array([1, 0])),
        (pa.array([1.5, 2.0], pa.float64()), np.array([1.5, 2.0], np.float32)),
        (pa.array([Decimal("1.5"), Decimal("2.0")]), np.array([1.5, 2.0], np.float32)),
        (
            pa.array([[1.0, 2.0], [3.0, 4.0]], pa.list_(pa.float32(), 2)),
            np.array([[1, 2], [3, 4]], np.float32),
        ),
        (pa.array([[1, 2], [3, 4]], pa.list_(pa.int32(), 2)), np.array([[1, 2], [3, 4]])),
    ],
)
def test_one_column_keeps_its_own_shape(column: pa.Array, values: Any) -> None:
    got = made(echo("v"), v=column)
    np.testing.assert_array_equal(got, values)
    assert got.dtype == values.dtype
    cut = echo("v").compute(pa.record_batch({"v": pa.concat_arrays([column, column])}).slice(1, 2))[
        "y"
    ]
    np.testing.assert_array_equal(cut, values[[1, 0]])


def test_several_columns_are_one_float32_matrix() -> None:
    got = made(
        echo(["a", "b", "c"]),
        a=[1, 2],
        b=[True, False],
        c=pa.array([Decimal("0.5"), Decimal("1.5")]),
    )
    np.testing.assert_array_equal(got, np.array([[1, 1, 0.5], [2, 0, 1.5]], np.float32))
    assert made(echo(["a"]), a=[1, 2]).tolist() == [1, 2]  # [rows, 1] is one value a row


@pytest.mark.parametrize(
    "column",
    [
        pa.array([2**63 - 1, -(2**63), 2**24 + 1, (1 << 60) + (1 << 36) + 1], pa.int64()),
        pa.array([2**64 - 1, 2**63 + 2**39 + 1, 2**24 + 3, 0], pa.uint64()),
        pa.array([1e39, -1e300, 1 + 2**-24, 1e-46], pa.float64()),
        pa.array([float("nan"), float("inf"), -0.0, 65504.0], pa.float16()),
        pa.array([True, False, True, True]),
        pa.array(
            [Decimal("1.5"), Decimal("-0.1"), Decimal(10) ** 30, Decimal(0)], pa.decimal128(38, 5)
        ),
    ],
    ids=lambda column: str(column.type),
)
def test_a_matrix_has_the_floats_that_arrow_casts_to_the_bit(column: pa.Array) -> None:
    plain = column.cast(pa.uint8()) if column.type == pa.bool_() else column
    wanted = np.asarray(plain.cast(pa.float32(), safe=False)).view(np.int32)
    got = made(echo(["x", "y"]), x=column, y=column)
    np.testing.assert_array_equal(got.view(np.int32), np.stack([wanted, wanted], 1))


def test_a_list_column_has_the_length_that_dim_says() -> None:
    model = echo({"column": "v", "dim": 2})
    batch = pa.record_batch({"v": [[1.0, 2.0], None, [3.0], [4.0, None], [5.0, 6.0]]})
    bad = {1: "v is null", 2: "v has 1 numbers, not 2", 3: "v holds a null"}
    assert model.prepare(batch).bad == bad
    prepared = model.prepare(batch)
    assert model.tensors(prepared, np.array([0, 4]))[0].tolist() == [[1, 2], [5, 6]]
    # where the first row is a bad one, too
    (made,) = model.tensors(model.prepare(batch.slice(2)), np.array([2]))
    assert made.tolist() == [[5, 6]]
    with pytest.raises(ValueError, match="v is null"):
        model.compute(batch)
    assert model.prepare(batch.slice(1, 3)).bad == {row - 1: reason for row, reason in bad.items()}


@pytest.mark.parametrize("words", [["b", "a"], pa.table({"word": ["b", "a"]})])
@pytest.mark.parametrize(
    "kind", [pa.string(), pa.large_string(), pa.dictionary(pa.int8(), pa.string())]
)
def test_text_is_its_place_in_the_vocabulary_and_0_when_unknown_or_null(
    words: Any, kind: pa.DataType
) -> None:
    model = echo({"column": "v", "vocabulary": "known"}, known=words)
    column = pa.array(["a", "x", None, "b", "a"], pa.string()).cast(kind)
    assert made(model, v=column).tolist() == [2, 0, 0, 1, 2]
    assert model.prepare(pa.record_batch({"v": column})).bad == {}


def test_a_vocabulary_may_stand_in_place_and_hold_whole_numbers() -> None:
    model = echo({"column": "v", "vocabulary": [700, 7]})
    assert made(model, v=[7, 700, 70, None]).tolist() == [2, 1, 0, 0]


def test_nulls_are_filled_or_named() -> None:
    columns = {"a": [1, None, None], "b": pa.array([Decimal("0.5"), None, Decimal("2.5")])}
    assert made(echo({"columns": ["a", "b"], "fill": 9}), **columns).tolist() == [
        [1, 0.5],
        [9, 9],
        [9, 2.5],
    ]
    assert made(echo({"column": "a", "fill": 0}), **columns).tolist() == [1, 0, 0]
    # as it is, whatever the column's own type can hold
    narrow = {
        "a": pa.array([2, None], pa.uint8()),
        "b": [True, None],
        "c": pa.array([Decimal("0.25"), None], pa.decimal128(2, 2)),
    }
    filled = made(echo({"columns": ["a", "b", "c"], "fill": -0.5}), **narrow)
    assert filled.tolist() == [[2, 1, 0.25], [-0.5, -0.5, -0.5]]
    for name, value in (("a", 2), ("b", 1)):
        assert made(echo({"column": name, "fill": -300}), **narrow).tolist() == [value, -300]
    assert echo(["a", "b"]).prepare(pa.record_batch(columns)).bad == {
        1: "b is null",
        2: "a is null",
    }
    whole = echo("a")
    assert whole.prepare(pa.record_batch({"a": [1, 2]})).bad == {}
    assert whole.prepare(pa.record_batch({"a": pa.array([None, None], pa.int64())})).bad == {
        0: "a is null",
        1: "a is null",
    }


def test_outputs_are_chosen_by_position_or_key() -> None:
    model = TorchModule(f"{HERE}:Echo", {"x": "v"}, {"second": 1, "first": 0}, {"returns": "pair"})
    got = model.compute(pa.record_batch({"v": [1, 2]}))
    assert {name: values.tolist() for name, values in got.items()} == {
        "second": [2, 4],
        "first": [1, 2],
    }


# ---- what is wrong, said by name


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"inputs": {}}, "inputs maps forward's arguments to columns"),
        ({"inputs": {"x": 5}}, "inputs.x is a column, a list of columns or a mapping, got 5"),
        ({"inputs": {"x": {"col": "a"}}}, "inputs.x: unknown key 'col'; there are column"),
        ({"inputs": {"x": {"fill": 0}}}, "write one of both, column or columns"),
        ({"inputs": {"x": []}}, r"columns is a list of names, got \[\]"),
        ({"inputs": {"x": {"column": "a", "fill": float("nan")}}}, "that float32 holds, got nan"),
        ({"inputs": {"x": {"column": "a", "fill": 1e300}}}, "fill is a number that float32 holds"),
        ({"inputs": {"x": {"columns": ["a"], "fill": 10**400}}}, "that float32 holds, got 1000"),
        ({"inputs": {"x": {"column": "a", "dim": 0}}}, "dim is a length from 1, got 0"),
        ({"inputs": {"x": {"column": "a", "dim": 2, "fill": 0}}}, "do not go together"),
        ({"inputs": {"x": {"columns": ["a"], "vocabulary": ["b"]}}}, "do not go together"),
        (
            {"inputs": {"x": {"column": "a", "vocabulary": "words"}}},
            "there is no vocabulary 'words'; add `words:",
        ),
        (
            {"inputs": {"x": {"column": "a", "vocabulary": []}}},
            "vocabulary is empty.*first value has the id 1, 0 is null and unknown",
        ),
        (
            {"inputs": {"x": {"column": "a", "vocabulary": ["b", "b"]}}},
            "vocabulary has a value twice, 'b'.*each value has one",
        ),
        (
            {"inputs": {"x": {"column": "a", "vocabulary": [None]}}},
            "a list of text or whole numbers without nulls",
        ),
        ({"words": ["a"]}, "no input names the vocabulary 'words'"),
        ({"output": {"y": 0}}, "unknown argument 'output'; a further argument is a vocabulary"),
        ({"words": pa.table({"a": ["b"], "c": ["d"]})}, "words has 2 columns"),
        (
            {"words": pa.table({"a": [1.5]})},
            "words is double; a vocabulary holds text or whole numbers",
        ),
        ({"outputs": {}}, "outputs maps features to positions or keys"),
        ({"outputs": {"y": -1}}, "outputs.y is a position from 0 or a key, got -1"),
        ({"max_cost": 0}, "max_cost is a number of rows from 1, got 0"),
        ({"concurrent": "yes"}, "concurrent is true or false, got 'yes'"),
        (
            {"module": "Ranker"},
            "module is package.module:Class or a file ending in .pt2, got 'Ranker'",
        ),
        ({"module": "no.such:Ranker"}, "'no.such:Ranker' cannot be imported: ModuleNotFoundError"),
        ({"module": f"{HERE}:None"}, f"module '{HERE}' has no class 'None'"),
        ({"module": f"{HERE}:NO_MODULE"}, "not a torch.nn.Module"),
        ({"args": {"genre": 5}}, r"args: .*takes no argument 'genre'; did you mean 'genres'\?$"),
        (
            {"inputs": {"x": "a"}},
            r"has forward\(x.*; inputs names x: missing a required argument: 'genre'",
        ),
        ({"inputs": {**INPUTS, "y": "a"}}, "got an unexpected keyword argument 'y'"),
        (
            {"weights": None},
            "has weights .embedding.weight, linear.bias, linear.weight. and none were given: set `weights`",
        ),
        ({"weights": "/no/such"}, "nothing at /no/such"),
    ],
)
def test_a_configuration_that_is_wrong_in_itself(
    folder: Path, changed: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        ranker(folder, **changed)


def test_a_class_that_fails_and_weights_that_do_not_fit(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="Raises failed to load: RuntimeError: no luck"):
        TorchModule(f"{HERE}:Raises", {"x": "a"}, {"y": 0})
    with pytest.raises(
        ModelError, match=r"(?s)does not load into .*Ranker: .*size mismatch for embedding.weight"
    ):
        ranker(folder, args={"genres": 6})
    (tmp_path / "cut").write_bytes((folder / "ranker.safetensors").read_bytes()[:50])
    with pytest.raises(ModelError, match="cut does not load: "):
        ranker(folder, weights=str(tmp_path / "cut"))
    save_file({k: v for k, v in STATE.items() if k != "linear.bias"}, tmp_path / "less")
    with pytest.raises(ModelError, match=r"less has no weights for linear.bias; give"):
        ranker(folder, weights=str(tmp_path / "less"))
    save_file(STATE | {"extra": torch.zeros(1)}, tmp_path / "more")
    with pytest.raises(ModelError, match=r"more has weights that .*Ranker does not: extra; give"):
        ranker(folder, weights=str(tmp_path / "more"))


class Mixed(torch.nn.Module):
    """A weight in float32, one in float64, and buffers of whole numbers and of truth values."""

    ids: torch.Tensor
    mask: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.single = torch.nn.Parameter(torch.zeros(2))
        self.wide = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))
        self.register_buffer("ids", torch.zeros(2, dtype=torch.int64))
        self.register_buffer("mask", torch.zeros(2, dtype=torch.bool))
        self.scale = torch.nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, None] + self.single + self.wide + self.ids + self.mask + self.scale


MIXED = {name: tensor.clone() for name, tensor in Mixed().state_dict().items()}


@pytest.mark.parametrize(
    ("changed", "refused"),
    [
        ({}, ""),
        ({"single": torch.tensor([0.1, 2]).half(), "wide": torch.tensor([0.1, 2])}, ""),
        ({"single": torch.tensor([0.1, 2]).bfloat16(), "ids": torch.tensor([1, 2]).int()}, ""),
        ({"ids": torch.tensor([1, 200]).to(torch.uint8)}, ""),
        ({"single": torch.tensor([0.1, 2]).double()}, "single is F64, .* has it as float32"),
        ({"single": torch.tensor([1, 2]).to(torch.int8)}, "single is I8, .* has it as float32"),
        ({"single": torch.tensor([1, 2])}, "single is I64"),
        ({"single": torch.tensor([1, 2.0]).to(torch.float8_e4m3fn)}, "single is F8_E4M3"),
        ({"ids": torch.tensor([1.0, 2])}, "ids is F32, .* has it as int64"),
        ({"ids": torch.tensor([True, False])}, "ids is BOOL"),
        ({"mask": torch.tensor([1, 0])}, "mask is I64, .* has it as bool"),
        ({"single_scale": torch.ones(1)}, "has single_scale: its weights are quantized"),
        ({"w.qweight": torch.ones(1)}, "has w.qweight: its weights are quantized"),
    ],
)
def test_weights_are_of_the_modules_types_or_narrower_ones(
    tmp_path: Path, changed: dict[str, torch.Tensor], refused: str
) -> None:
    """Torch itself casts any to the module's, in silence."""
    file = tmp_path / "w.safetensors"
    save_file(MIXED | changed, file)
    args = {
        "module": f"{HERE}:Mixed",
        "inputs": {"x": "x"},
        "outputs": {"y": 0},
        "weights": str(file),
    }
    if refused:
        with pytest.raises(ConfigError, match=refused):
            load_model("torch_module", args)
        return
    module = Mixed()
    load_into(module, str(file))
    found = load_model("torch_module", args).compute(pa.record_batch({"x": [1.0, 2]}))["y"]
    assert np.array_equal(found, module(torch.tensor([1.0, 2])).detach().numpy())


def test_metadata_of_weights_is_of_torch_or_a_note(tmp_path: Path) -> None:
    file = tmp_path / "w.safetensors"
    args = {"module": f"{HERE}:Mixed", "inputs": {"x": "x"}, "outputs": {"y": 0}}
    for metadata in (None, {"format": "pt"}, {"format": "np", "note": "mine", "tied": "single"}):
        save_file(MIXED, file, metadata=metadata)
        load_model("torch_module", {**args, "weights": str(file)})
    save_file(MIXED, file, metadata={"format": "mlx"})
    with pytest.raises(ConfigError, match="format is 'mlx'; only 'pt' or 'np' is computed"):
        load_model("torch_module", {**args, "weights": str(file)})


def test_changed_weights_are_refused_or_are_those_in_the_file(folder: Path, tmp_path: Path) -> None:
    content, drawn = (folder / "ranker.safetensors").read_bytes(), random.Random(0)
    header = int.from_bytes(content[:8], "little") + 8
    file, batch, refused = tmp_path / "changed", rows(4), 0
    for number in range(30):
        changed = bytearray(content)
        match number % 3:
            case 0:
                del changed[drawn.randrange(len(changed)) :]
            case 1:
                changed[drawn.randrange(header)] ^= 1 << drawn.randrange(8)
            case _:
                changed[drawn.randrange(header, len(changed))] ^= 1 << drawn.randrange(8)
        file.write_bytes(changed)
        try:
            found = ranker(folder, weights=str(file)).compute(batch)
        except (ConfigError, ModelError):
            refused += 1
            continue
        module = Ranker()
        load_into(module, str(file))
        x = torch.from_numpy(np.stack([batch[name].to_numpy() for name in "abc"], 1)).float()
        wanted = module.eval()(x, torch.tensor(batch["genre"].to_pylist()))
        assert np.array_equal(found["both"], wanted["both"].detach().numpy(), equal_nan=True)
    assert refused > 15


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid", "a pointer of Git LFS"),
        (b"<!doctype html>", "a web page"),
        (b"\x80\x02}q\x00", "a pickle"),
        (b"PK\x03\x04", "a zip archive, which is what torch.save writes"),
        (b"", "empty"),
    ],
)
def test_what_is_no_file_of_weights_or_no_program_is_named(
    folder: Path, tmp_path: Path, content: bytes, said: str
) -> None:
    for name in ("w.safetensors", "w.pt2"):
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ModelError, match=f"torch_module: .*w.safetensors is {said}"):
        ranker(folder, weights=str(tmp_path / "w.safetensors"))
    of_program = "does not load: it is " + said if content[:2] != b"PK" else "does not load: Bad"
    with pytest.raises(ModelError, match=of_program):
        program(tmp_path / "w.pt2")
    with pytest.raises(ModelError, match="is a folder: name the file in it"):
        ranker(folder, weights=str(folder))


@pytest.mark.parametrize(
    ("spec", "column", "message"),
    [
        ("v", ["a"], "column 'v' is string, not numbers: give a vocabulary"),
        ("v", pa.array([0], pa.date32()), "is date32.*, not numbers: CAST it"),
        ("v", [[1.0]], "say how long it is, as in {column: v, dim: 64}"),
        ("v", [["a"]], "not a list of numbers"),
        (["v"], [[1.0]], "a list among columns of numbers"),
        ({"column": "v", "fill": 0}, [[1.0]], "a list cannot be filled"),
        ({"column": "v", "fill": 0.5}, [1], "whole numbers, and its fill 0.5 is none: CAST it"),
        ({"column": "v", "fill": 10**30}, [1], "of 64 bits, which cannot hold its fill 1000"),
        ({"column": "v", "fill": 2.0**63}, [1], "of 64 bits, which cannot hold its fill 9.2"),
        ({"column": "v", "dim": 2}, [1.0], "not a list, which its dim says it is"),
        (
            {"column": "v", "dim": 2},
            pa.array([[1.0]], pa.list_(pa.float32(), 1)),
            "not of 2 numbers, as its dim says",
        ),
        (
            {"column": "v", "vocabulary": ["a"]},
            [1.5],
            "not text or whole numbers: CAST it AS VARCHAR",
        ),
    ],
)
def test_columns_that_do_not_fit(spec: Any, column: Any, message: str) -> None:
    model = echo(spec)
    with pytest.raises(ModelError, match=message):
        model.prepare(pa.record_batch({"v": column}))


@pytest.mark.parametrize(
    ("returns", "key", "message"),
    [
        ("text", 0, "returns str, not a tensor, a tuple or a dict"),
        ("texts", 0, "output 0 is str, not a tensor"),
        ("pair", 2, "outputs names 2, but the module returns 0, 1"),
        ("x", "y", "outputs names 'y', but the module returns 0"),
        ("cube", 0, r"output 'y' has shape \[2, 1, 1\]"),
        ("written", 0, r"writes into its input 'x': let it work on a clone\(\)"),
    ],
)
def test_outputs_that_do_not_fit_fail_the_run(returns: str, key: int | str, message: str) -> None:
    view = FeatureView("echoes", ("id",), (Feature("y", "float32"),), 60.0, 60.0)
    with pytest.raises(ModelError, match=message):
        Runner(echo("v", returns, key), view).compute(pa.record_batch({"v": [1.0, 2.0]}))


def test_an_output_with_too_few_rows_is_the_rows_own() -> None:
    view = FeatureView("echoes", ("id",), (Feature("y", "float32"),), 60.0, 60.0)
    done = Runner(echo("v", "short", 0), view).compute(pa.record_batch({"v": [1.0, 2.0]}))
    assert [(row.row, row.error) for row in done.rejections] == [
        (row, "feature 'y' of view 'echoes': the model returned 0 values for 1 rows")
        for row in (0, 1)
    ]


# ---- programs


def test_programs_that_cannot_be_used(folder: Path, tmp_path: Path) -> None:
    path = folder / "ranker.pt2"
    with pytest.raises(ConfigError, match="leave out `args` and `weights`"):
        program(path, weights="w")
    with pytest.raises(ConfigError, match="takes x, genre; inputs names x"):
        program(path, inputs={"x": ["a", "b", "c"]})
    with pytest.raises(ConfigError, match="nothing at"):
        program(tmp_path / "none.pt2")
    x = torch.rand(4, 3)
    with pytest.raises(
        ModelError, match=r"takes x of shape \[4, 3\] only: export it with dynamic_shapes"
    ):
        program(export(tmp_path / "fixed.pt2", Echo(), "fixed", x=x))
    with pytest.raises(ModelError, match="takes at least 3 rows of x"):
        program(export(tmp_path / "three.pt2", Echo(), torch.export.Dim("rows", min=3), x=x))
    for content in (b"", b"PK", path.read_bytes()[:1000]):
        (tmp_path / "cut.pt2").write_bytes(content)
        with pytest.raises(ModelError, match=r"cut.pt2 does not load"):
            program(tmp_path / "cut.pt2")
    with zipfile.ZipFile(tmp_path / "other.pt2", "w") as other:
        other.writestr("archive/version", "1")
    with pytest.raises(
        ModelError, match=r"has no models/model.json: save it with torch.export.save"
    ):
        program(tmp_path / "other.pt2")


def test_a_program_of_at_most_some_rows_is_given_no_more(tmp_path: Path) -> None:
    path = export(tmp_path / "few.pt2", Echo(), torch.export.Dim("rows", max=64), x=torch.rand(4))
    model = TorchModule(str(path), {"x": "v"}, {"y": 0})
    assert (model.max_cost, TorchModule(str(path), {"x": "v"}, {"y": 0}, max_cost=9).max_cost) == (
        64,
        9,
    )
    view = FeatureView("echoes", ("id",), (Feature("y", "float32"),), 60.0, 60.0)
    done = Runner(model, view).compute(pa.record_batch({"v": np.arange(1000.0)}))
    assert (done.rejections, np.asarray(done.features.column("y")).tolist()) == (
        [],
        list(range(1000)),
    )


class Evil:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


def rewritten(folder: Path, target: Path, change: Callable[[str, bytes], bytes]) -> Path:
    with zipfile.ZipFile(folder / "ranker.pt2") as source, zipfile.ZipFile(target, "w") as out:
        for name in source.namelist():
            out.writestr(name, change(name, source.read(name)))
    return target


class Counting(torch.nn.Module):
    """Adds how often it was called."""

    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        return x + self.calls


def test_a_class_computes_in_threads_where_declared_a_program_where_seen(
    folder: Path, tmp_path: Path
) -> None:
    counting = export(tmp_path / "counting.pt2", Counting().eval(), x=torch.rand(4, 1))
    models = (
        ranker(folder),
        ranker(folder, concurrent=True),
        program(folder / "ranker.pt2"),
        program(folder / "ranker.pt2", concurrent=False),
        TorchModule(str(counting), {"x": ["v"]}, {"y": 0}),
    )
    assert [model.concurrent for model in models] == [False, True, True, False, False]
    assert len({model.fingerprint() for model in models[:2]}) == 1
    batch = rows(20_000)
    windows = [batch.slice(at, 4096) for at in range(0, 20_000, 4096)]
    for model in models[1:3]:
        runner = Runner(model, VIEW, lanes=3)
        got = np.concatenate(
            [
                np.asarray(done.features.column("total"))
                for _, done in runner.stream(windows, hidden=("id",))
            ]
        )
        np.testing.assert_array_equal(got, expected(batch)["total"])
        assert runner.state_figures()["lanes"]["count"] == 3


def test_a_pickle_in_a_program_is_not_loaded(folder: Path, tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    bomb = pickle.dumps(Evil(mark))
    path = rewritten(
        folder, tmp_path / "bomb.pt2", lambda name, data: bomb if "sample_inputs" in name else data
    )
    np.testing.assert_array_equal(
        program(path).compute(rows(5))["total"], expected(rows(5))["total"]
    )

    def pickled(name: str, data: bytes) -> bytes:
        if name.endswith("weights_config.json"):
            return data.replace(b'"use_pickle": false', b'"use_pickle": true')
        return bomb if "/weights/weight_" in name else data

    with pytest.raises(ModelError, match=r"is refused: '.*' is a pickled object"):
        program(rewritten(folder, tmp_path / "weights.pt2", pickled))
    assert not mark.exists()


# ---- fingerprints


def with_members(folder: Path, target: Path, members: dict[str, bytes]) -> Path:
    rewritten(folder, target, lambda _, data: data)
    with zipfile.ZipFile(target, "a") as out:
        for name, data in members.items():
            out.writestr(f"ranker/{name}", data)
    return target


def test_members_of_a_program_are_known(folder: Path, tmp_path: Path) -> None:
    noted = with_members(folder, tmp_path / "noted.pt2", {"extra/note.txt": b"mine"})
    batch = rows(5)
    assert np.array_equal(
        program(noted).compute(batch)["both"],
        program(folder / "ranker.pt2").compute(batch)["both"],
    )
    for member, said in (
        ("models/other.json", "has models/other.json, which is not known of the archive"),
        ("data/aotinductor/model.so", "code for one machine"),
        ("data/weights/weight_9", "has data/weights/weight_9, which its program does not name"),
        ("surprise", "has surprise, which is not known of the archive"),
    ):
        path = with_members(folder, tmp_path / "more.pt2", {member: b"{}"})
        with pytest.raises(ConfigError, match=said):
            program(path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        twice = with_members(folder, tmp_path / "twice.pt2", {"models/model.json": b"{}"})
    with pytest.raises(ModelError, match="it has a member twice"):
        program(twice)


@pytest.mark.parametrize(
    ("member", "old", "new", "said"),
    [
        ("models/model.json", b'{"graph_module"', b'{"surprise": 1, "graph_module"', "surprise"),
        ("weights_config.json", b'"is_param"', b'"surprise": 1, "is_param"', "surprise, which is"),
        # float32's number → float16's: the bytes would be other numbers
        ("weights_config.json", b'"dtype": 7', b'"dtype": 6', "and its tensor is another"),
        (
            "weights_config.json",
            b'{"as_int": 3}',
            b'{"as_int": 2}',
            "ranker.pt2 (does not|is dama)",
        ),
        ("models/model.json", b'"major": 8', b'"major": 99', "does not load"),
        ("weights/weight_0", b"", None, "does not load"),
    ],
)
def test_a_program_whose_parts_do_not_fit_is_refused(
    folder: Path, tmp_path: Path, member: str, old: bytes, new: bytes | None, said: str
) -> None:
    def change(name: str, data: bytes) -> bytes:
        if not name.endswith(member):
            return data
        assert old in data
        return data[:-4] if new is None else data.replace(old, new, 1)

    path = rewritten(folder, tmp_path / "ranker.pt2", change)
    with pytest.raises((ConfigError, ModelError), match=said):
        program(path)


def test_the_fingerprint_is_of_weights_class_arguments_inputs_and_outputs(
    folder: Path, tmp_path: Path
) -> None:
    same = ranker(folder).fingerprint()
    copy = tmp_path / "copy.safetensors"
    copy.write_bytes((folder / "ranker.safetensors").read_bytes())
    assert ranker(folder, weights=str(copy)).fingerprint() == same
    save_file(STATE | {"linear.bias": torch.ones(1)}, tmp_path / "other.safetensors")
    changes: list[dict[str, Any]] = [
        {"weights": str(tmp_path / "other.safetensors")},
        {"args": {"genres": 5}},
        {"inputs": {"x": ["b", "a", "c"], "genre": "genre"}},
        {"inputs": {"x": ["a", "b", "c"], "genre": {"column": "genre", "vocabulary": [1]}}},
        {"outputs": {"total": "total"}},
    ]
    found = [ranker(folder, **change).fingerprint() for change in changes]
    words = [
        echo({"column": "v", "vocabulary": "known"}, known=known).fingerprint()
        for known in (["a", "b"], ["b", "a"])
    ]
    programs = [
        program(p).fingerprint()
        for p in (folder / "ranker.pt2", rewritten(folder, tmp_path / "p.pt2", lambda _, d: d))
    ]
    everything = [same, *found, *words, *programs]
    assert len(set(everything)) == len(everything)


def test_a_changed_class_is_another_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.syspath_prepend(tmp_path)
    found = []
    for factor in (2, 3):
        (tmp_path / "changing.py").write_text(
            f"import torch\nclass Times(torch.nn.Module):\n    def forward(self, x):\n        return {factor} * x\n"
        )
        sys.modules.pop("changing", None)
        found.append(TorchModule("changing:Times", {"x": "v"}, {"y": 0}).fingerprint())
    sys.modules.pop("changing", None)
    assert found[0] != found[1]
