"""Attention without padding is attention: text by text on a CPU, and by what torch has for a
GPU."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from precompute.models.text_encoder import Encoder, UnpaddedEncoder
from precompute.text.bert import Bert, BertConfig, has_unpadded_attention, unpadded_attention
from precompute.text.sentence_folder import Head

LENGTHS = [7, 1, 12, 3, 12]


def bert() -> Bert:
    torch.manual_seed(0)
    return Bert(BertConfig("bert", 50, 16, 2, 2, 32, 512, 2, 0, 1e-12)).eval()


def test_texts_laid_end_to_end_come_out_as_padded_ones() -> None:
    ids = torch.randint(
        1, 50, (len(LENGTHS), max(LENGTHS)), generator=torch.Generator().manual_seed(1)
    )
    lengths = torch.tensor(LENGTHS)
    mask = (torch.arange(max(LENGTHS)) < lengths[:, None]).long()
    flat, positions = ids[mask > 0][None], torch.cat([torch.arange(n) for n in LENGTHS])[None]
    starts = torch.cat([torch.zeros(1, dtype=torch.int32), lengths.cumsum(0).int()])
    with torch.inference_mode():
        padded = Encoder(bert())(ids, mask)
        unpadded = UnpaddedEncoder(bert(), Head(16))(
            flat, positions, starts, torch.tensor(max(LENGTHS))
        )
    torch.testing.assert_close(unpadded, padded, atol=1e-6, rtol=0)


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
