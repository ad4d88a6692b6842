"""Runner: one bad row is one bad row, be it one that the model raises for or one that its answer
does not fit."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from precompute.engine import runner
from precompute.engine.rows import Declared, Misfit, Outcome
from precompute.engine.runner import Runner, compute
from precompute.store.errors import ModelError
from precompute.store.feature_view import Feature, FeatureView, IndexSpec
from tests.models import REFUSED_AT, Doubler

NUMBERS = (Feature("double", "float64"), Feature("vector", "float32", dim=4))
NAN, INF = float("nan"), float("inf")


def view(*features: Feature, index: IndexSpec | None = None) -> FeatureView:
    return FeatureView("numbers", ("id",), features, 60.0, 60.0, index)


def batch(xs: Sequence[float]) -> pa.RecordBatch:
    return pa.record_batch({"id": list(range(len(xs))), "x": pa.array(xs, pa.float64())})


def rejected(done: Outcome) -> list[tuple[int, str, str]]:
    return [(r.row, r.stage, r.error) for r in done.rejections]


class Returning:
    """Returns what ``make`` makes of the batch's x."""

    def __init__(self, make: Callable[[npt.NDArray[np.float64]], Any]) -> None:
        self._make = make

    def fingerprint(self) -> str:
        return "returning"

    def compute(self, batch: pa.RecordBatch) -> Any:
        return self._make(np.asarray(batch.column("x")))


class Sized(Doubler):
    """Row x costs x; batches are noted."""

    def __init__(self, max_cost: int, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.max_cost = max_cost
        self.batches: list[list[float]] = []

    def costs(self, batch: pa.RecordBatch) -> npt.NDArray[np.int64]:
        return np.asarray(batch.column("x")).astype(np.int64)

    def compute(self, batch: pa.RecordBatch) -> dict[str, np.ndarray]:
        self.batches.append(batch.column("x").to_pylist())
        return super().compute(batch)


class Checking(Sized):
    """Cannot take negative x."""

    def unusable(self, batch: pa.RecordBatch) -> Mapping[int, str]:
        return {
            row: "x is negative" for row, x in enumerate(batch.column("x").to_pylist()) if x < 0
        }


def expected(xs: Sequence[float]) -> list[dict[str, Any]]:
    return [{"double": 2 * x, "vector": [x, x + 1, x + 2, x + 3]} for x in xs]


# ---- rows


def test_order_stays_when_rows_are_computed_by_cost() -> None:
    model = Sized(max_cost=10)
    xs = [1.0, 9.0, 2.0, 5.0, 5.0, 40.0, 1.0]
    done = compute(model, view(*NUMBERS), batch(xs))
    assert model.batches == [[40.0], [9.0], [5.0, 5.0], [2.0, 1.0, 1.0]]
    assert done.features.to_pylist() == expected(xs)


def test_models_that_name_no_costs_get_a_bounded_number_of_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(runner, "MAX_BATCH_ROWS", 4)
    model = Doubler()
    assert compute(model, view(*NUMBERS), batch(range(10))).features.to_pylist() == expected(
        range(10)
    )
    assert model.calls == 3


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(-3, 12), max_size=40), st.integers(1, 30))
def test_each_row_is_computed_or_rejected_exactly_once(values: list[int], max_cost: int) -> None:
    model = Checking(max_cost, fail_on=7, nan_on=5)
    done = compute(model, view(*NUMBERS), batch(values))
    good = [i for i, x in enumerate(values) if x >= 0 and x not in (5, 7)]
    assert done.rows.tolist() == good
    assert done.features.to_pylist() == expected([values[i] for i in good])
    assert rejected(done) == [
        (i, "input", "x is negative")
        if x < 0
        else (i, "model", f"ValueError: cannot take 7{REFUSED_AT}")
        if x == 7
        else (i, "output", "double is not finite")
        for i, x in enumerate(values)
        if i not in good
    ]


@pytest.mark.parametrize("rows", [1, 2, 1000])
@pytest.mark.parametrize("at", [0, 1, -1])
def test_one_raising_row_among_many_is_found_and_rejected_alone(rows: int, at: int) -> None:
    xs = [float(i) for i in range(rows)]
    bad = xs[at % rows]
    model = Doubler(fail_on=bad)
    done = compute(model, view(*NUMBERS), batch(xs))
    assert rejected(done) == [(int(bad), "model", f"ValueError: cannot take {bad}{REFUSED_AT}")]
    assert done.features.to_pylist() == expected([x for x in xs if x != bad])
    assert model.calls <= 2 * 10 + 1  # halving, not row by row


class Quoting(Doubler):
    """Quotes what it refuses, which is half of a character."""

    def unusable(self, batch: pa.RecordBatch) -> dict[int, str]:
        return {row: "no \ud800" for row, x in enumerate(batch.column("x").to_pylist()) if x == 1}

    def compute(self, batch: pa.RecordBatch) -> Any:
        if 2.0 in batch.column("x").to_pylist():
            raise ValueError("no \udfff")
        return super().compute(batch)


def test_a_reason_that_no_file_can_hold_is_escaped() -> None:
    done = compute(Quoting(), view(*NUMBERS), batch([0, 1, 2]))
    assert [(row, stage, error.split(" (")[0]) for row, stage, error in rejected(done)] == [
        (1, "input", "no \\ud800"),
        (2, "model", "ValueError: no \\udfff"),
    ]


def test_no_rows_are_no_error() -> None:
    for model in (Doubler(), Checking(3)):
        done = compute(model, view(*NUMBERS), batch([]))
        assert (done.rows.tolist(), done.features.num_rows, done.rejections) == ([], 0, [])


# ---- numbers that are none


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize(
    ("feature", "make"),
    [
        (Feature("f", "float64"), lambda x: {"f": x}),
        (Feature("f", "float32"), lambda x: {"f": pa.array(x)}),
        (Feature("f", "float16"), lambda x: {"f": x.astype(np.float16)}),
        (Feature("f", "float32", dim=2), lambda x: {"f": np.stack([np.zeros_like(x), x], 1)}),
        (Feature("f", "float16", dim=2), lambda x: {"f": np.stack([x, x], 1)}),
        (
            Feature("f", "float32", dim=1),
            lambda x: {"f": pa.array([[v] for v in x.tolist()], pa.list_(pa.float64(), 1))},
        ),
        (
            Feature("f", "float32", max_items=2),
            lambda x: {"f": pa.array([[1.0, v] for v in x.tolist()])},
        ),
    ],
)
def test_a_row_with_a_number_that_is_not_finite_is_rejected_alone(
    feature: Feature, make: Any, value: float
) -> None:
    done = compute(Returning(make), view(feature), batch([1, value, 3]))
    assert done.rows.tolist() == [0, 2]
    assert rejected(done) == [(1, "output", "f is not finite")]


@pytest.mark.parametrize("feature", [Feature("f", "float16"), Feature("f", "float16", dim=1)])
def test_a_number_too_large_for_the_declared_type_is_not_finite(feature: Feature) -> None:
    made = Returning(lambda x: {"f": x if feature.dim is None else x[:, None]})
    done = compute(made, view(feature), batch([1, 1e6, 3]))
    assert rejected(done) == [(1, "output", "f is not finite")]


@pytest.mark.parametrize(
    ("metric", "rows"), [("cosine", [0, 2]), ("dot", [0, 1, 2]), ("l2", [0, 1, 2])]
)
def test_a_zero_vector_is_rejected_where_it_has_no_direction(metric: str, rows: list[int]) -> None:
    features = (Feature("v", "float32", dim=2), Feature("free", "float32", dim=2))
    model = Returning(lambda x: {"v": np.stack([x, x], 1), "free": np.zeros((len(x), 2))})
    done = compute(model, view(*features, index=IndexSpec("v", metric)), batch([1, 0, -1]))
    assert done.rows.tolist() == rows
    assert [r.error for r in done.rejections] == [
        "v is all zeros, which has no direction for cosine"
    ] * (3 - len(rows))


def test_a_vector_that_becomes_zero_in_the_declared_type_is_rejected() -> None:
    model = Returning(lambda x: {"v": np.stack([x, x], 1)})
    done = compute(
        model, view(Feature("v", "float16", dim=2), index=IndexSpec("v")), batch([1, 1e-12])
    )
    assert done.rows.tolist() == [0]


def test_null_scalars_and_lists_are_values() -> None:
    features = (Feature("s", "string"), Feature("n", "float32"), Feature("l", "int64", max_items=2))
    made = {"s": pa.array(["a", None]), "n": pa.array([None, 2.0]), "l": pa.array([None, [1, 2]])}
    done = compute(Returning(lambda x: made), view(*features), batch([1, 2]))
    assert done.features.to_pylist() == [
        {"s": "a", "n": None, "l": None},
        {"s": None, "n": 2.0, "l": [1, 2]},
    ]


# ---- a model that breaks its view's declaration

VECTOR = Feature("f", "float32", dim=2)
SCALAR = Feature("f", "float32")
LIST = Feature("f", "int64", max_items=2)


@pytest.mark.parametrize(
    ("feature", "make", "message"),
    [
        (VECTOR, lambda x: {"f": np.zeros((len(x), 5))}, r"'f'.*vector of 2.*\[3, 5\].*`dim`"),
        (VECTOR, lambda x: {"f": np.zeros(len(x))}, r"'f'.*vector of 2.*\[3\]"),
        (
            VECTOR,
            lambda x: {"f": pa.array([[1.0, 2.0, 3.0]] * len(x), pa.list_(pa.float32(), 3))},
            r"'f'.*\[3\].*\[2\]",
        ),
        (
            VECTOR,
            lambda x: {"f": pa.array([[1.0, 2.0], None, [1.0, 2.0]], pa.list_(pa.float32(), 2))},
            "'f'.*null",
        ),
        (
            SCALAR,
            lambda x: {"f": np.zeros((len(x), 1))},
            r"'f'.*one value a row.*\[3, 1\]; declare `dim` \(or `max_items`, of a list\)",
        ),
        (SCALAR, lambda x: {"f": np.zeros(len(x) - 1)}, "'f'.*2 values for 3 rows"),
        (VECTOR, lambda x: {"f": np.zeros((len(x) + 1, 2))}, "'f'.*4 values for 3 rows"),
        (SCALAR, lambda x: {"g": x}, r"no 'f' \(it returned: g\)"),
        (SCALAR, lambda x: {}, r"no 'f' \(it returned: nothing\)"),
        (SCALAR, lambda x: {"f": np.array(["a"] * len(x))}, "'f'.*float"),
        (SCALAR, lambda x: {"f": None}, "'f'"),
        (SCALAR, lambda x: {"f": np.float32(3)}, "'f'"),
        (SCALAR, lambda x: None, "numbers.*NoneType"),
        (LIST, lambda x: {"f": pa.array([[1], [1, 2, 3], []])}, "'f'.*3 items.*at most 2"),
        (LIST, lambda x: {"f": pa.array([[1], [None], []])}, "'f'.*null"),
        (LIST, lambda x: {"f": pa.array([["a"], [], []])}, "'f'.*int64"),
        (Feature("f", "int8"), lambda x: {"f": np.full(len(x), 300)}, "'f'.*int8.*300"),
        (Feature("f", "int8", dim=2), lambda x: {"f": np.full((len(x), 2), 1.7)}, "'f'.*int8"),
        (Feature("f", "int32", dim=2), lambda x: {"f": np.full((len(x), 2), 2**40)}, "'f'.*int32"),
        (
            Feature("f", "int8", dim=2),
            lambda x: {"f": pa.array([[1, None]] * len(x), pa.list_(pa.int8(), 2))},
            "'f'.*null",
        ),
        (Feature("f", "int32"), lambda x: {"f": x + 0.5}, "'f'.*int32"),
        (Feature("f", "string"), lambda x: {"f": pa.array([b"\xff"] * len(x))}, "'f'"),
    ],
)
def test_anything_but_what_the_view_declares_does_not_fit(
    feature: Feature, make: Any, message: str
) -> None:
    with pytest.raises(Misfit, match=message):
        Declared(view(feature)).columns(make(np.array([1.0, 2.0, 3.0])), 3)


def one_bad(feature: Feature, good: Any, bad: Any) -> Any:
    """A model that answers row 3 with something else; it may fail as it puts a batch together."""
    return Returning(lambda x: {feature.name: [bad if row == 3 else good for row in x]})


WHOLE = {
    "int8": 1,
    "int32": 1,
    "int64": 1,
    "float16": 1.5,
    "float32": 1.5,
    "float64": 1.5,
    "bool": True,
    "string": "a",
}
BAD_OF_ANY = ["{}", "[[[1]]]", "object()", "np.zeros((2, 2))", "b'\\xff'", "torch.zeros(2, 2)"]
BAD_OF: dict[str, list[str]] = {
    "scalar": ["[1, 2]", "np.zeros(2)", "torch.zeros(3)", "(1,)", "1j"],
    "vector": [
        "None",
        "[1]",
        "[1, 2, 3]",
        "5",
        "[1, None]",
        "'ab'",
        "['a', 'b']",
        "[[1], [2]]",
        "np.ma.array([1, 2], mask=[0, 1])",
        "[]",
    ],
    "list": ["[1, 2, 3]", "5", "[None]", "[[1]]", "[1, 'a']", "{'a': 1}", "np.array(3)"],
    "number": ["'a'", "'1'"],
    "integer": ["float('nan')", "0.5", "2**70", "float('inf')"],
    "string": ["1", "0.5", "True"],
}
SHAPES: dict[str, dict[str, Any]] = {"scalar": {}, "vector": {"dim": 2}, "list": {"max_items": 2}}


def bad_answers() -> Iterator[Any]:
    for dtype, shape in itertools.product(WHOLE, SHAPES):
        if dtype in ("string", "bool") and shape == "vector":
            continue
        values = [*BAD_OF_ANY, *BAD_OF[shape]]
        if shape == "scalar":
            values += (
                BAD_OF["string"]
                if dtype == "string"
                else BAD_OF["number"]
                if dtype != "bool"
                else ["'a'"]
            )
            values += (
                [*BAD_OF["integer"], "128 if dtype == 'int8' else 2**63"]
                if dtype.startswith("int")
                else []
            )
        yield pytest.param(
            Feature("f", dtype, **SHAPES[shape]), WHOLE[dtype], values, id=f"{dtype}-{shape}"
        )


@pytest.mark.parametrize(("feature", "one", "values"), list(bad_answers()))
def test_a_row_whose_answer_does_not_fit_is_one_bad_row(
    feature: Feature, one: Any, values: list[str]
) -> None:
    good = [one, one] if feature.dim or feature.max_items else one
    for text in values:
        bad = eval(text, {"np": np, "torch": torch, "dtype": feature.dtype})
        done = compute(one_bad(feature, good, bad), view(feature), batch(range(10)))
        found = [(rejected.row, rejected.stage) for rejected in done.rejections]
        assert (text, done.rows.tolist(), found) == (
            text,
            [0, 1, 2, 4, 5, 6, 7, 8, 9],
            [(3, "misfit")],
        )
        assert done.features.to_pylist() == [{"f": good}] * 9, text


def test_a_number_in_a_text_is_no_number_whatever_stands_beside_it() -> None:
    """numpy makes texts of numbers beside a text."""
    done = compute(
        Returning(lambda x: {"f": ["2.5" if row == 1 else row for row in x.tolist()]}),
        view(SCALAR),
        batch([1, 2, 3]),
    )
    assert ([r.row for r in done.rejections], done.features.to_pylist()) == (
        [0],
        [{"f": 2.0}, {"f": 3.0}],
    )


def test_what_is_masked_is_null_or_does_not_fit() -> None:
    def masked(x: Any) -> Any:
        return np.ma.array(x, mask=x == 2)

    made = Returning(
        lambda x: {
            "f": masked(x),
            "v": np.ma.array(np.stack([x, x], 1), mask=np.stack([x == 3, x == 9], 1)),
        }
    )
    done = compute(made, view(SCALAR, Feature("v", "float32", dim=2)), batch([1, 2, 3]))
    assert done.features.to_pylist() == [{"f": 1.0, "v": [1.0, 1.0]}, {"f": None, "v": [2.0, 2.0]}]
    assert [(r.row, r.stage) for r in done.rejections] == [(2, "misfit")]


RAGGED = [[1, 2], [], [3]]
LISTS: dict[str, tuple[str, Any, list[Any]]] = {
    "lists": ("int64", RAGGED, RAGGED),
    "tuples": ("int32", [(1, 2), (), (3,)], RAGGED),
    "of one length": ("int64", [[1, 2], [3, 4], [5, 6]], [[1, 2], [3, 4], [5, 6]]),
    "arrays": ("float32", [np.array(row, np.float64) for row in RAGGED], RAGGED),
    "half arrays": ("float16", [np.array(row, np.float16) for row in RAGGED], RAGGED),
    "objects": ("int64", np.array([[1, 2], [], [3]], object), RAGGED),
    "objects of arrays": (
        "int16",
        np.array([np.array(row, np.int64) for row in RAGGED] + [None], object)[:3],
        RAGGED,
    ),
    "matrix": ("float32", np.array([[1, 2], [3, 4], [5, 6]]), [[1, 2], [3, 4], [5, 6]]),
    "empty": ("int64", [[], [], []], [[], [], []]),
    "nulls": ("int64", [[1], None, [2, 3]], [[1], None, [2, 3]]),
    "texts": ("string", [["a", "ü"], [], np.array(["c"])], [["a", "ü"], [], ["c"]]),
    "arrow": ("int64", pa.array(RAGGED, pa.list_(pa.int32())), RAGGED),
}


@pytest.mark.parametrize("how", LISTS)
def test_a_list_feature_takes_whatever_holds_a_list_for_each_row(how: str) -> None:
    dtype, values, expected = LISTS[how]
    feature = Feature("f", dtype, max_items=2)
    done = compute(Returning(lambda _: {"f": values}), view(feature), batch([1, 2, 3]))
    assert done.features.column("f").to_pylist() == expected
    assert done.features.schema.field("f").type == feature.arrow_type


REUSED: dict[str, tuple[Feature, Callable[[npt.NDArray[np.float64]], Any]]] = {
    "a matrix": (Feature("f", "float64", max_items=2), lambda buffer: buffer),
    "a list of arrays": (Feature("f", "float64", max_items=2), list),
    "a tuple of arrays": (Feature("f", "float64", max_items=2), tuple),
    "an object array": (
        Feature("f", "float64", max_items=2),
        lambda buffer: np.array([*buffer, None], object)[:-1],
    ),
    "an object array of lists": (
        Feature("f", "float64", max_items=2),
        lambda buffer: kept_lists(buffer),
    ),
    "an Arrow array": (Feature("f", "float64", dim=2), lambda buffer: arrow_of(buffer)),
    "an Arrow array in chunks": (
        Feature("f", "float64", dim=2),
        lambda buffer: pa.chunked_array([arrow_of(buffer)]),
    ),
    "vectors": (Feature("f", "float64", dim=2), list),
    "a tensor": (Feature("f", "float64", dim=2), torch.from_numpy),
}


def arrow_of(buffer: npt.NDArray[np.float64]) -> pa.Array:
    """The same memory."""
    return pa.FixedSizeListArray.from_arrays(pa.array(buffer.reshape(-1)), 2)


KEPT_LISTS = [[0.0, 0.0] for _ in range(100)]


def kept_lists(buffer: npt.NDArray[np.float64]) -> npt.NDArray[np.object_]:
    """Lists that are filled again each time."""
    for row, own in zip(buffer.tolist(), KEPT_LISTS, strict=False):
        own[:] = row
    return np.array([*KEPT_LISTS[: len(buffer)], None], object)[:-1]


@pytest.mark.parametrize("how", REUSED)
def test_what_a_model_returned_may_be_used_again(how: str) -> None:
    feature, form = REUSED[how]
    buffer, made = np.empty((100, 2)), dict[str, Any]()

    def reusing(x: npt.NDArray[np.float64]) -> dict[str, Any]:
        buffer[: len(x)] = np.stack([x, -x], axis=1)
        made["f"] = form(buffer[: len(x)])
        return made

    again = Runner(Returning(reusing), view(feature))
    done = [
        row
        for _, computed in again.stream([batch(range(100))])
        for row in computed.features.column("f").to_pylist()
    ]
    assert done == [[x, -x] for x in range(100)]


def test_what_fits_is_cast_to_the_declared_type() -> None:
    features = (
        Feature("a", "int8", dim=2),
        Feature("b", "int16"),
        Feature("c", "bool"),
        Feature("d", "string"),
        Feature("e", "string", max_items=3),
        Feature("f", "float16", dim=2),
        Feature("g", "float32"),
    )
    made = {
        "a": [[1, 2], [-128, 127]],
        "b": np.array([1.0, 2.0]),
        "c": np.array([True, False]),
        "d": np.array(["é", None], object),
        "e": pa.chunked_array([[["x"]], [[]]], pa.list_(pa.large_string())),
        "f": np.arange(8).reshape(2, 4)[:, ::2],  # not contiguous
        "g": pa.chunked_array([[1.5], [2.5]]),
        "unasked": "for",
    }
    done = compute(Returning(lambda x: made), view(*features), batch([1, 2]))
    assert done.features.schema == view(*features).feature_schema()
    assert done.features.to_pylist() == [
        {"a": [1, 2], "b": 1, "c": True, "d": "é", "e": ["x"], "f": [0.0, 2.0], "g": 1.5},
        {"a": [-128, 127], "b": 2, "c": False, "d": None, "e": [], "f": [4.0, 6.0], "g": 2.5},
    ]


# ---- costs


@pytest.mark.parametrize(
    "costs",
    [
        lambda x: np.array([1, 2]),
        lambda x: np.array([1, 2, 3, 4]),
        lambda x: np.array([[1], [2], [3]]),
        lambda x: None,
    ],
)
def test_costs_of_another_number_of_rows_are_a_model_error(costs: Any) -> None:
    model = Sized(10)
    model.costs = lambda batch: costs(np.asarray(batch.column("x")))  # type: ignore[method-assign]
    with pytest.raises(ModelError, match="cost"):
        compute(model, view(*NUMBERS), batch([1, 2, 3]))


@pytest.mark.parametrize("most", [100.0, "100", None])
def test_a_cost_that_is_no_whole_number_is_a_model_error(most: Any) -> None:
    with pytest.raises(ModelError, match=rf"max_cost is {most!r}, not a whole number"):
        Runner(Sized(most), view(*NUMBERS))


@pytest.mark.parametrize("raised", [ValueError("cannot weigh"), SystemExit("cannot weigh")])
@pytest.mark.parametrize("method", ["costs", "unusable"])
def test_what_costs_or_unusable_raise_is_a_model_error(method: str, raised: BaseException) -> None:
    def raising(_: pa.RecordBatch) -> Any:
        raise raised

    model = Checking(10)
    setattr(model, method, raising)
    with pytest.raises(
        ModelError, match=rf"{method}\(\) raised {type(raised).__name__}: cannot weigh"
    ):
        compute(model, view(*NUMBERS), batch([1, 2, 3]))


@pytest.mark.parametrize("named", [[1], {"1": "empty"}, {3: "empty"}, {-1: "empty"}, None])
def test_unusable_rows_not_named_by_position_are_a_model_error(named: Any) -> None:
    model = Checking(10)
    model.unusable = lambda batch: named  # type: ignore[method-assign]
    with pytest.raises(ModelError, match=r"unusable\(\) is to return"):
        compute(model, view(*NUMBERS), batch([1, 2, 3]))


def test_costs_below_one_count_as_one() -> None:
    model = Sized(2)
    done = compute(model, view(*NUMBERS), batch([0, -5, 0]))
    assert done.features.to_pylist() == expected([0, -5, 0])
    assert sorted(map(len, model.batches)) == [1, 2]
