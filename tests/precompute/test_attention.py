"""Attention without padding is attention: text by text on a CPU, and by what torch has for a
GPU."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from precompute.models.text_encoder import Encoder, UnpaddedEncoder
from precompute.text import bert as bert_file
from precompute.text import unpadded as unpadded_file
from precompute.text.bert import Bert, BertConfig
from precompute.text.sentence_folder import Head
from precompute.text.unpadded import (
    TRANSFORMERS,
    UnpaddedTransformer,
    computes_the_same,
    has_unpadded_attention,
    understood,
    unpadded_attention,
)

LENGTHS = [7, 1, 12, 3, 12]
CPU = torch.device("cpu")


def bert(kind: str = "bert", padding: int = 0) -> Bert:
    torch.manual_seed(0)
    return Bert(BertConfig(kind, 50, 16, 2, 2, 32, 512, 2, padding, 1e-12)).eval()


SMALL = {
    "vocab_size": 50,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id"), 0),
    "mask_token_id": 0,
    "sep_token_id": 0,
}
GROUPED = SMALL | {"num_key_value_heads": 2, "head_dim": 8}
GEMMA = GROUPED | {
    "sliding_window": 5,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "albert": ("albert", SMALL | {"embedding_size": 16}),
    "bert of relu": ("bert", SMALL | {"hidden_act": "relu"}),
    "distilbert": ("distilbert", SMALL | {"dim": 32, "n_layers": 2, "n_heads": 4}),
    "electra": ("electra", SMALL | {"embedding_size": 16}),
    "ernie": ("ernie", SMALL),
    "eurobert": ("eurobert", GROUPED),
    "gemma3": ("gemma3_text", GEMMA),
    "embedding gemma": ("gemma3_text", GEMMA | {"use_bidirectional_attention": True}),
    "gte": ("gte", SMALL),
    "llama": ("llama", GROUPED),
    "mistral": ("mistral", GROUPED | {"sliding_window": 5}),
    "modernbert": ("modernbert", SMALL | {"local_attention": 8, "global_attn_every_n_layers": 2}),
    "nomic_bert": ("nomic_bert", SMALL),
    "qwen2": ("qwen2", GROUPED),
    "qwen3": ("qwen3", GROUPED),
}


def of_transformers(kind: str, settings: dict[str, Any]) -> Any:
    from transformers import AutoConfig, AutoModel

    torch.manual_seed(0)
    made = AutoModel.from_config(AutoConfig.for_model(kind, **settings)).eval()
    for weight in made.parameters():
        if weight.dim() > 1:
            # transformers' own are so small that attention would be a mean
            torch.nn.init.normal_(weight, std=0.3)
    made.config.use_cache = False
    return made


def check_unpadded(transformer: Any, padding: int = 0, odd: int | None = None) -> None:
    """Against padded texts; ``odd`` is put in the middle of one."""
    ids = torch.randint(
        5, 50, (len(LENGTHS), max(LENGTHS)), generator=torch.Generator().manual_seed(1)
    )
    if odd is not None:
        ids[0, 3] = odd
    lengths = torch.tensor(LENGTHS)
    mask = (torch.arange(max(LENGTHS)) < lengths[:, None]).long()
    flat = ids[mask > 0][None]
    ids[mask == 0] = padding
    starts = torch.cat([torch.zeros(1, dtype=torch.int32), lengths.cumsum(0).int()])
    head = Head(transformer.config.hidden_size)
    with torch.inference_mode():
        unpadded = UnpaddedEncoder(UnpaddedTransformer(transformer), head)(
            flat, starts, torch.tensor(max(LENGTHS))
        )
        # computed as it was, after another attention took its place in the copy
        padded = Encoder(transformer, head)(ids, mask)
    torch.testing.assert_close(unpadded, padded, atol=2e-6, rtol=0)


@pytest.mark.parametrize(
    ("kind", "padding", "odd"), [("bert", 0, None), ("roberta", 1, None), ("xlm-roberta", 1, 1)]
)
def test_texts_laid_end_to_end_come_out_as_padded_ones(
    kind: str, padding: int, odd: int | None
) -> None:
    """A text may hold the padding's own token, which RoBERTa's kinds do not count."""
    check_unpadded(bert(kind, padding), padding, odd)


@pytest.mark.parametrize("name", list(FAMILIES))
def test_every_family_comes_out_unpadded_as_padded(name: str) -> None:
    transformer = of_transformers(*FAMILIES[name])
    assert understood(transformer)
    check_unpadded(transformer)


def test_every_family_that_is_unpadded_was_compared() -> None:
    assert {kind for kind, _ in FAMILIES.values()} == set(TRANSFORMERS)


@pytest.mark.parametrize("kind", ["mpnet", "deberta-v2", "roberta"])
def test_what_adds_to_its_scores_or_counts_its_positions_is_padded(kind: str) -> None:
    transformer = of_transformers(kind, SMALL | {"hidden_act": "relu"})
    assert not understood(transformer)
    assert not computes_the_same(UnpaddedTransformer(transformer), transformer, 40, CPU)


def test_a_transformer_is_tried_before_it_is_relied_on(monkeypatch: pytest.MonkeyPatch) -> None:
    transformer = of_transformers(*FAMILIES["modernbert"])
    unpadded = UnpaddedTransformer(transformer)
    assert computes_the_same(unpadded, transformer, 40, CPU)
    # as if the kernel knew no window
    own = unpadded_file.unpadded_attention
    monkeypatch.setattr(
        unpadded_file, "unpadded_attention", lambda *given, window, **rest: own(*given, **rest)
    )
    assert not computes_the_same(unpadded, transformer, 40, CPU)

    def refused(*_: Any, **__: Any) -> None:
        raise RuntimeError("FlashAttention is not built")

    monkeypatch.setattr(unpadded_file, "unpadded_attention", refused)
    assert not computes_the_same(unpadded, transformer, 40, CPU)


def test_each_text_attends_to_itself_only() -> None:
    q, k, v = torch.randn(3, 1, 2, sum(LENGTHS), 8, generator=torch.Generator().manual_seed(2))
    starts = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0).tolist()], dtype=torch.int32)
    found = unpadded_attention(q, k, v, starts, 12)
    scores = q @ k.transpose(-1, -2) * 8**-0.5
    text = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    scores[..., text[:, None] != text[None, :]] = -torch.inf
    torch.testing.assert_close(found, (scores.softmax(-1) @ v).transpose(1, 2), atol=1e-6, rtol=0)


def test_torchs_own_takes_what_it_is_given_on_a_gpu() -> None:
    """Its signature moves between versions: called with tensors of a GPU that have no values."""
    with FakeTensorMode():
        q = torch.empty(1, 2, sum(LENGTHS), 64, device="cuda", dtype=torch.bfloat16)
        starts = torch.empty(len(LENGTHS) + 1, device="cuda", dtype=torch.int32)
        found = unpadded_attention(q, q, q, starts, 12)
        assert (found.shape, found.dtype, found.device.type) == (
            (1, sum(LENGTHS), 2, 64),
            torch.bfloat16,
            "cuda",
        )


@pytest.mark.parametrize(
    ("capability", "dtype", "dim"),
    [
        ((7, 5), torch.float16, 64),
        ((9, 0), torch.float32, 64),
        ((9, 0), torch.bfloat16, 264),
        ((9, 0), torch.bfloat16, 20),
    ],
)
def test_what_its_kernels_do_not_compute_is_padded(
    capability: tuple[int, int], dtype: torch.dtype, dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    assert not has_unpadded_attention(torch.device("cuda"), dtype, dim)
    assert not has_unpadded_attention(torch.device("cpu"), torch.bfloat16, 64)


@torch.library.custom_op("varlen_on_a_cpu::attention", mutates_args=())
def varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    starts: torch.Tensor,
    longest: int,
    scale: float | None,
    window: list[int],
) -> torch.Tensor:
    """What a compiler sees as one operator, as torch's own on a GPU; on a CPU."""
    assert longest >= int(starts.diff().max())
    return OWN(q, k, v, starts, longest, scale=scale, window=(window[0], window[1])).clone()


@varlen.register_fake
def _(q: torch.Tensor, *_: Any) -> torch.Tensor:
    return q.new_empty(q.shape[0], q.shape[2], q.shape[1], q.shape[3])


OWN = unpadded_attention


@pytest.mark.parametrize("name", ["own", "modernbert"])
def test_unpadded_transformers_compile_to_one_graph_for_all_shapes(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def one_operator(q: Any, k: Any, v: Any, starts: Any, longest: int, **rest: Any) -> Any:
        window = list(rest.get("window", (-1, -1)))
        return varlen(q, k, v, starts, longest, rest.get("scale"), window)

    for file in (unpadded_file, bert_file):
        monkeypatch.setattr(file, "unpadded_attention", one_operator)
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    transformer = bert() if name == "own" else of_transformers(*FAMILIES[name])
    unpadded = UnpaddedTransformer(transformer)
    torch._dynamo.reset()
    compiled: Any = torch.compile(unpadded, backend=backend, dynamic=True)
    with torch.inference_mode():
        for lengths in ([9, 5], [3, 8, 2], [17, 6]):
            ids = torch.arange(sum(lengths))[None] % 40 + 5
            places = torch.cat([torch.arange(n) for n in lengths])[None]
            starts = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
            given = (ids, places, starts, max(lengths))
            torch.testing.assert_close(compiled(*given), unpadded(*given), atol=1e-5, rtol=0)
    assert len(graphs) == 1
