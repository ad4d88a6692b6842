"""The C++ encoder: torch's values but for bfloat16's roundings, the same bits by every kernel, and
nothing read beside what it was given."""

from __future__ import annotations

import gc
import importlib.util
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
import sysconfig
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from transformers import AutoConfig, AutoModel

from precompute.models.device import Device
from precompute.models.text_encoder import Encoder
from precompute.store.errors import ConfigError
from precompute.techniques import encoder as technique_file
from precompute.techniques.conversion import candidates, convert
from precompute.techniques.machine import has_bf16
from precompute.techniques.technique import technique
from precompute.text import bert
from precompute.text.bert import UnpaddedBert, bert_config, kernel, load_bert, not_understood
from tests import REPOSITORY
from tests.precompute.test_precision import bert as small_bert
from tests.precompute.test_precision import mlp, outputs

NATIVE = bert._extension()
pytestmark = pytest.mark.skipif(
    NATIVE is None, reason="the C++ extension is not built: python setup.py build_ext --inplace"
)

HERE: list[str] = NATIVE.kernels() if NATIVE else []
SIZES = [(64, 2, 96, 2), (128, 2, 160, 1), (32, 1, 1056, 1)]
"""Width, heads, inner width, layers: heads of 32 and 64; an inner layer that no panels fill evenly,
and one that is done in three parts."""
LENGTHS = [1, 2, 11, 12, 13, 31, 32, 33, 5, 17, 64, 0, 13, 255]


def transformer(
    kind: str = "bert",
    size: tuple[int, int, int, int] = SIZES[0],
    positions: int = 340,
    **settings: Any,
) -> Any:
    """One with random weights; biases and gains, too."""
    torch.manual_seed(0)
    width, heads, inner, layers = size
    config = AutoConfig.for_model(
        kind,
        **{
            "hidden_size": width,
            "num_attention_heads": heads,
            "intermediate_size": inner,
            "num_hidden_layers": layers,
            "max_position_embeddings": positions,
            "vocab_size": 50,
            "pad_token_id": 1,
            # large enough to be seen
            "layer_norm_eps": 0.1,
            **settings,
        },
    )
    made = AutoModel.from_config(config).eval().requires_grad_(False)
    for parameter in made.parameters():
        parameter += torch.randn_like(parameter) * 0.05
    plain = bert_config(config.to_dict())
    return made if plain is None else load_bert(plain, made.state_dict())[0].requires_grad_(False)


def texts(lengths: list[int], seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids, padded by 1, and the mask."""
    longest = max(lengths)
    mask = (torch.arange(longest) < torch.tensor(lengths).unsqueeze(1)).long()
    ids = torch.randint(2, 50, mask.shape, generator=torch.Generator().manual_seed(seed))
    return torch.where(mask > 0, ids, 1), mask


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", ["bert", "xlm-roberta"])
def test_values_are_torchs_and_equal_bits_by_every_kernel(
    kind: str, size: tuple[int, int, int, int]
) -> None:
    model = transformer(kind, size)
    ids, mask = texts(LENGTHS)
    expected = model(input_ids=ids, attention_mask=mask).last_hidden_state
    plain = UnpaddedBert(model, "plain")(ids, mask)
    there = mask > 0
    assert torch.nn.functional.cosine_similarity(plain[there], expected[there]).min() > 0.9999
    assert (plain[there] - expected[there]).abs().max() < 0.06
    assert not plain[~there].any()
    # "amx" adds up in another order
    for name in set(HERE) - {"plain", "amx"}:
        assert torch.equal(UnpaddedBert(model, name)(ids, mask), plain), name
    if "amx" in HERE:
        assert torch.allclose(UnpaddedBert(model, "amx")(ids, mask), plain, atol=0.02)


def rounded(x: torch.Tensor) -> torch.Tensor:
    return x.bfloat16().float()


def by_the_recipe(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """One text's last hidden state [tokens, width], rounded where the extension rounds, by torch's
    own functions in float32."""
    config, embeddings = model.config, model.embeddings
    x = embeddings.LayerNorm(
        embeddings.word_embeddings(ids)
        + (
            embeddings.position_embeddings.weight[: len(ids)]
            + embeddings.token_type_embeddings.weight[0]
        )
    )
    for layer in model.encoder.layer:
        attention = layer.attention.self
        q, k, v = (
            rounded(rounded(x) @ rounded(part.weight).T + part.bias)
            .view(len(ids), config.num_attention_heads, -1)
            .transpose(0, 1)
            for part in (attention.query, attention.key, attention.value)
        )
        scores = q @ k.mT / q.shape[-1] ** 0.5
        weights = (scores - scores.amax(-1, keepdim=True)).exp()
        context = (
            rounded(rounded(weights) @ v / weights.sum(-1, keepdim=True)).transpose(0, 1).flatten(1)
        )
        out = layer.attention.output
        x = out.LayerNorm(x + context @ rounded(out.dense.weight).T + out.dense.bias)
        up, down = layer.intermediate.dense, layer.output
        inner = rounded(torch.nn.functional.gelu(rounded(x) @ rounded(up.weight).T + up.bias))
        x = down.LayerNorm(x + inner @ rounded(down.dense.weight).T + down.dense.bias)
    result: torch.Tensor = x
    return result


def test_only_what_goes_into_products_is_rounded() -> None:
    """What remains, by GELU's polynomial and where a number lay between two of bfloat16's, is a
    sixth to a third of what the roundings do."""
    for size in SIZES:
        model = transformer(size=size)
        ids, mask = texts([100])
        computed = UnpaddedBert(model, HERE[0])(ids, mask)[0]
        expected, exact = by_the_recipe(model, ids[0]), model(input_ids=ids).last_hidden_state[0]
        assert (computed - expected).abs().mean() < 0.4 * (computed - exact).abs().mean()


def test_gelu_is_as_near_as_it_says() -> None:
    """A model that gives gelu(its bias), rounded, less the mean: its LayerNorm divides by what it
    multiplies with."""
    model = transformer(size=(64, 2, 64, 1), layer_norm_eps=1e6)
    for parameter in model.parameters():
        parameter.zero_()
    layer, (ids, mask) = model.encoder.layer[0], texts([1])
    layer.output.LayerNorm.weight += 1e3
    layer.output.dense.weight += torch.eye(64)
    for least, most in ((-9, -3), (-3, 0), (0, 3), (3, 9)):
        layer.intermediate.dense.bias.copy_(torch.linspace(least, most, 64))
        expected = torch.nn.functional.gelu(layer.intermediate.dense.bias)
        for name in HERE:
            difference = UnpaddedBert(model, name)(ids, mask)[0, 0] - (expected - expected.mean())
            # half of bfloat16's step, and as much for the mean's
            assert (
                difference.abs() <= 1e-4 + expected.abs() / 256 + expected.abs().mean() / 512
            ).all(), (least, name)


def test_a_text_has_the_same_bits_alone_and_among_others(monkeypatch: pytest.MonkeyPatch) -> None:
    model = transformer()
    generator = np.random.default_rng(3)
    lengths = [int(n) for n in generator.integers(0, 120, 40)] + [340, 1]
    ids, mask = texts(lengths)
    for name in HERE:
        encoded = UnpaddedBert(model, name)
        together = encoded(ids, mask)
        for row in (0, 7, 40, 41):
            length = lengths[row]
            alone = encoded(ids[row : row + 1, :length], mask[row : row + 1, :length])
            assert torch.equal(alone[0], together[row, :length]), (name, row)
        for threads in (1, 3, 1000):
            monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
            assert torch.equal(encoded(ids, mask), together), (name, threads)


def test_texts_longer_than_a_chunk_and_none_at_all() -> None:
    model = transformer(positions=700)
    ids, mask = texts([513, 1, 600])
    expected = model(input_ids=ids, attention_mask=mask).last_hidden_state
    for name in HERE:
        hidden = UnpaddedBert(model, name)(ids, mask)
        assert (
            torch.nn.functional.cosine_similarity(hidden[mask > 0], expected[mask > 0]).min()
            > 0.9999
        )
        assert UnpaddedBert(model, name)(ids[:0], mask[:0]).shape == (0, 600, 64)
        assert not UnpaddedBert(model, name)(ids, mask * 0).any()
        # tokens of a prompt that the pooling leaves out are marked by 2
        assert torch.equal(UnpaddedBert(model, name)(ids, mask * 2), hidden)


def test_huge_and_nan_weights_stay_in_their_text() -> None:
    model = transformer()
    model.embeddings.word_embeddings.weight[7] = float("nan")
    model.embeddings.word_embeddings.weight[8] = 3e38
    ids, mask = texts([40, 40, 40])
    ids[:] = 5
    ids[1, 3], ids[2, 4] = 7, 8
    for name in HERE:
        hidden = UnpaddedBert(model, name)(ids, mask)
        assert hidden[0].isfinite().all()
        assert hidden[1].isnan().any()
        assert torch.equal(hidden[0], UnpaddedBert(model, name)(ids[:1], mask[:1])[0])


def test_scores_in_the_thousands_numbers_far_below_zero_and_nan() -> None:
    ids, mask = texts([40, 3])
    for name in HERE:
        model = transformer()
        attention = model.encoder.layer[0].attention.self
        attention.query.weight *= 300
        attention.key.weight *= 300
        expected = model(input_ids=ids, attention_mask=mask).last_hidden_state
        assert (UnpaddedBert(model, name)(ids, mask) - expected)[mask > 0].abs().mean() < 0.02
        for part in ("query", "key", "value"):
            model = transformer()
            getattr(model.encoder.layer[0].attention.self, part).bias[3] = float("nan")
            assert UnpaddedBert(model, name)(ids, mask)[mask > 0].isnan().all(), (name, part)
        model = transformer()
        model.encoder.layer[0].intermediate.dense.bias -= 1e6
        expected = model(input_ids=ids, attention_mask=mask).last_hidden_state
        assert (UnpaddedBert(model, name)(ids, mask) - expected)[mask > 0].abs().max() < 0.02


@pytest.mark.parametrize(
    ("kind", "settings", "reason"),
    [
        ("electra", {}, "the transformer is no plain BERT (ElectraModel)"),
        ("bert", {"hidden_act": "gelu_new"}, "the transformer is no plain BERT (BertModel)"),
        ("bert", {"is_decoder": True}, "the transformer is no plain BERT (BertModel)"),
        (
            "bert",
            {"hidden_size": 48},
            "a width of 48, heads of 24 and an inner layer of 96 numbers: only multiples of 32 are understood",
        ),
        (
            "bert",
            {"intermediate_size": 100},
            "a width of 64, heads of 32 and an inner layer of 100 numbers: only multiples of 32 are understood",
        ),
    ],
)
def test_what_is_not_understood_is_left_to_torch(
    kind: str, settings: dict[str, Any], reason: str
) -> None:
    model = transformer(kind, **settings)
    assert not_understood(model) == reason
    with pytest.raises(ConfigError, match=re.escape(reason)):
        UnpaddedBert(model, "plain")


def arguments(lengths: list[int]) -> dict[str, Any]:
    """What the extension is called with, of a model of 32 numbers, one layer, 50 words and 40
    places."""
    ids, mask = texts(lengths)
    made = UnpaddedBert(transformer(size=(32, 1, 64, 1), positions=40), "plain")
    held = {name: getattr(made, f"_{name}") for name in ("words", "places", "vectors", "panels")}
    rest = {
        "ids": ids.numpy(),
        "positions": made._positions(ids.numpy()),
        "lengths": mask.sum(1).numpy(),
        "out": np.zeros((*ids.shape, 32), np.float32),
    }
    return {
        "kernel": "plain",
        "threads": 2,
        "shape": (1, 32, 1, 32, 64),
        "epsilon": 1e-12,
        **held,
        **rest,
    }


def changed(array: npt.NDArray[Any], at: tuple[int, ...], value: int) -> npt.NDArray[Any]:
    copy = array.copy()
    copy[at] = value
    return copy


def shifted(array: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """Its bytes, a byte behind where its items may lie."""
    copy = np.frombuffer(b"." + array.tobytes(), np.uint8)
    return copy[1:]


BAD: dict[str, Any] = {
    "an id beyond the words": lambda a: {"ids": changed(a["ids"], (1, 4), 50)},
    "a negative id": lambda a: {"ids": changed(a["ids"], (0, 0), -1)},
    "an id beyond 32 bits": lambda a: {"ids": changed(a["ids"], (0, 0), 2**32 + 5)},
    "a position beyond the places": lambda a: {"positions": changed(a["positions"], (1, 4), 40)},
    "a negative position": lambda a: {"positions": changed(a["positions"], (1, 0), -(2**63))},
    "a length beyond its row": lambda a: {"lengths": changed(a["lengths"], (0,), 6)},
    "a negative length": lambda a: {"lengths": changed(a["lengths"], (0,), -1)},
    "lengths for other texts": lambda a: {"lengths": np.repeat(a["lengths"], 2)[:3]},
    "more lengths": lambda a: {"lengths": np.repeat(a["lengths"], 4)},
    "no lengths": lambda a: {"lengths": a["lengths"][:0]},
    "fewer positions": lambda a: {"positions": a["positions"][:1]},
    "a small out": lambda a: {"out": a["out"][:, :, :16].copy()},
    "half an out": lambda a: {"out": a["out"].astype(np.float16)},
    "an out that is read only": lambda a: {"out": a["out"].tobytes()},
    "an out with gaps": lambda a: {"out": np.zeros((2, 5, 64), np.float32)[:, :, ::2]},
    "no words": lambda a: {"words": a["words"][:0]},
    "half a word": lambda a: {"words": a["words"].ravel()[:-16]},
    "short vectors": lambda a: {"vectors": a["vectors"][:-1]},
    "short panels": lambda a: {"panels": a["panels"][:-2]},
    "more layers": lambda a: {"shape": (2, 32, 1, 32, 64)},
    "no layers": lambda a: {"shape": (0, 32, 1, 32, 64)},
    "no heads": lambda a: {"shape": (1, 32, 0, 32, 64)},
    "small heads": lambda a: {"shape": (1, 32, 2, 16, 64)},
    "heads that overflow": lambda a: {"shape": (1, 32, 2**15, 2**16, 64)},
    "more heads than weights": lambda a: {"shape": (1, 32, 2, 32, 64)},
    "a negative width": lambda a: {"shape": (1, -32, 1, 32, 64)},
    "half a place": lambda a: {"places": a["places"].ravel()[:-16]},
    "three numbers more": lambda a: {"out": np.zeros(a["out"].size + 3, np.float32)},
    "an odd inner width that weights have, too": lambda a: {
        "shape": (1, 32, 1, 32, 65),
        "vectors": np.zeros(11 * 32 + 65, np.float32),
        "panels": np.zeros(4 * 32 * 32 + 2 * 32 * 65, np.int16),
    },
    "a row beyond 32,768 tokens": lambda a: {
        "ids": np.zeros((1, 32769), np.int64),
        "positions": np.zeros((1, 32769), np.int64),
        "lengths": np.ones(1, np.int64),
        "out": np.zeros((32769, 32), np.float32),
    },
    "an overflowing width": lambda a: {"shape": (1, 2**30, 1, 32, 2**30)},
    "an odd inner width": lambda a: {"shape": (1, 32, 1, 32, 65)},
    "no threads": lambda a: {"threads": 0},
    "ids at an odd address": lambda a: {"ids": shifted(a["ids"])},
    "positions at an odd address": lambda a: {"positions": shifted(a["positions"])},
    "lengths at an odd address": lambda a: {"lengths": shifted(a["lengths"])},
    "panels at an odd address": lambda a: {"panels": shifted(a["panels"])},
    "another kernel": lambda a: {"kernel": "neon"},
}


@pytest.mark.parametrize("case", BAD)
def test_what_does_not_fit_together_is_refused(case: str) -> None:
    assert NATIVE is not None
    good = arguments([5, 5])
    NATIVE.encode(*good.values())
    assert good["out"].any()
    with pytest.raises((ValueError, BufferError)):
        NATIVE.encode(*(good | BAD[case](good)).values())


def test_threads_at_once_get_each_its_own_answer() -> None:
    models = [UnpaddedBert(transformer(kind), HERE[0]) for kind in ("bert", "roberta")]
    given = [texts([3 + seed, 60, 7 * seed + 1], seed) for seed in range(12)]
    expected = [models[seed % 2](*one) for seed, one in enumerate(given)]
    with ThreadPoolExecutor(6) as pool:
        for _ in range(3):
            got = list(pool.map(lambda seed: models[seed % 2](*given[seed]), range(12)))
            assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_others_run_meanwhile() -> None:
    encoded, given = UnpaddedBert(transformer(), "plain"), texts([200] * 8)
    began, ended = threading.Event(), threading.Event()

    def compute() -> None:
        began.set()
        encoded(*given)
        ended.set()

    thread = threading.Thread(target=compute)
    thread.start()
    began.wait()
    turns = 0
    while not ended.wait(0.001):
        turns += 1
    thread.join()
    assert turns > 5


def test_nothing_is_held_after_a_call_or_an_error() -> None:
    assert NATIVE is not None
    encoded, given, bad = UnpaddedBert(transformer(), HERE[0]), texts([300, 20]), arguments([5, 5])
    bad["ids"] = changed(bad["ids"], (0, 0), 50)

    def rounds() -> int:
        for _ in range(150):
            encoded(*given)
            with pytest.raises(ValueError, match="no table"):
                NATIVE.encode(*bad.values())
        gc.collect()
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    before = rounds()
    counts = [sys.getrefcount(value) for value in bad.values()]
    # 150 chunks would be 60 MB
    assert rounds() - before < 20_000
    assert [sys.getrefcount(value) for value in bad.values()] == counts


WITH_LITTLE_MEMORY = """
import array, resource
from precompute.text import _encoder as native

def encode(texts, tokens, width, threads):
    floats = lambda n: array.array("f", [(i * 37 % 101 - 50) / 200 for i in range(n)])
    weights = floats(2 * width), floats(tokens * width), floats(11 * width + 32), array.array("H", [0x3C80]) * (4 * width * width + 64 * width)
    inputs = array.array("q", [1]) * (texts * tokens), array.array("q", range(tokens)) * texts, array.array("q", [tokens]) * texts
    out = array.array("f", [0]) * (texts * tokens * width)
    return lambda: (native.encode("plain", threads, (1, width, width // 32, 32, 32), 1e-12, *weights, *inputs, out), out.tobytes())[1]

# a thread's chunk takes 2.4 MB
whole, parted, large = encode(8, 3, 512, 1)(), encode(8, 3, 512, 8), encode(1, 20_000, 32, 2)
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 8_000_000,) * 2)
assert parted() == whole
try:
    large()
except MemoryError:
    print("refused")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere memory is not bounded by this")
def test_few_threads_and_little_memory_suffice() -> None:
    small_stacks = [
        "sh",
        "-c",
        'ulimit -s 256; exec "$@"',
        "sh",
        sys.executable,
        "-c",
        WITH_LITTLE_MEMORY,
    ]
    done = subprocess.run(small_stacks, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert done.stdout == "refused\n"


def test_what_was_not_built_or_is_of_another_version_is_not_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for built in (None, SimpleNamespace(VERSION=bert._VERSION - 1)):
        monkeypatch.setitem(sys.modules, "precompute.text._encoder", built)
        assert kernel() is None
        with pytest.raises(ConfigError, match="was not built"):
            UnpaddedBert(transformer(), "plain")


@pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64", reason="no flags to compare with"
)
def test_kernels_are_those_of_the_cpu() -> None:
    found = re.search(
        r"^flags\s*: (.*)", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert found is not None
    flags = set(found[1].split())
    assert ("avx512" in HERE) == (
        flags >= {"avx512f", "avx512dq", "avx512bw", "avx512vl", "avx512_bf16"}
    )
    # the system may not lend the tiles that the CPU has
    assert "amx" not in HERE or flags >= {"amx_tile", "amx_bf16"}


@pytest.mark.parametrize(
    ("isa", "there", "expected"),
    [
        ("", ["amx", "avx512", "plain"], "amx"),
        ("avx512_core_amx", ["amx", "avx512", "plain"], "amx"),
        ("AVX512_CORE_BF16", ["amx", "avx512", "plain"], "avx512"),
        ("AVX512_CORE", ["amx", "avx512", "plain"], None),
        ("AVX2", ["avx512", "plain"], None),
        ("DEFAULT", ["avx512", "plain"], "avx512"),
        ("", ["plain"], None),
    ],
)
def test_a_newer_cpu_may_compute_as_an_older_one(
    isa: str, there: list[str], expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bert, "_extension", lambda: SimpleNamespace(kernels=lambda: there))
    monkeypatch.delenv("DNNL_MAX_CPU_ISA", raising=False)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", isa)
    assert kernel() == expected


def test_tiles_give_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The layers over AMX's tiles, with each tile instruction written out in C."""
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler) is None:
        pytest.skip(f"no C++ compiler {compiler}")
    made = tmp_path / "_encoder.so"
    # what it computes takes as long by -O2, and compiling longer
    flags = [
        "-std=c++17",
        "-O0",
        "-ffp-contract=off",
        "-fPIC",
        "-shared",
        "-pthread",
        "-DENCODER_EMULATE_TILES",
    ]
    source = REPOSITORY / "precompute" / "text" / "_encoder.cpp"
    subprocess.run(
        [compiler, *flags, f"-I{sysconfig.get_paths()['include']}", str(source), "-o", str(made)],
        check=True,
        timeout=110,
    )
    emulated, without_tiles = _loaded(made), next(name for name in HERE if name != "amx")
    for seed, (kind, size) in enumerate(
        (("bert", SIZES[0]), ("roberta", SIZES[1]), ("bert", SIZES[2]))
    ):
        model = transformer(kind, size)
        lengths = [int(n) for n in np.random.default_rng(seed).integers(0, 70, 20)] + [300, 1, 257]
        ids, mask = texts(lengths, seed)
        expected = UnpaddedBert(model, without_tiles)(ids, mask)
        with monkeypatch.context() as patched:
            patched.setattr(bert, "_extension", lambda: emulated)
            assert torch.equal(UnpaddedBert(model, "amx")(ids, mask), expected), (kind, seed)


def test_a_model_computes_by_it_and_its_reference_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(technique_file, "kernel", lambda: HERE[0])
    model = small_bert()
    model.module = Encoder(transformer()).eval()
    convert(model, technique("fp32-eager"), list)
    given = texts([40, 12, 40, 1])
    before = outputs(model, given)[0]
    convert(model, technique("bf16-encoder"), lambda: [given, texts([3])])
    computed = outputs(model, given)[0]
    assert computed.dtype == np.float32
    assert (computed * before).sum(1).min() > 0.9999
    assert not np.array_equal(computed, before)
    assert model.device.dtype == torch.bfloat16
    convert(model, technique("fp32-eager"), list)
    assert np.array_equal(outputs(model, given)[0], before)


def test_it_is_proposed_to_what_it_understands_where_the_cpu_has_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, device = small_bert(), Device("cpu")
    assert "bf16-encoder" not in {one.name for one in candidates(device, model)}  # heads of 8
    model.module = Encoder(transformer()).eval()
    assert ("bf16-encoder" in {one.name for one in candidates(device, model)}) == (
        has_bf16() and kernel() is not None
    )
    monkeypatch.setattr(technique_file, "computes_in", lambda *_: True)
    monkeypatch.setattr(technique_file, "kernel", lambda: "avx512")
    assert [one.name for one in candidates(device, model)][:2] == ["fp32-eager", "bf16-encoder"]
    monkeypatch.setattr(technique_file, "kernel", lambda: None)
    assert "bf16-encoder" not in {one.name for one in candidates(device, model)}


def test_what_it_cannot_do_is_reported_and_the_reference_computes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(technique_file, "kernel", lambda: "plain")
    for model, reason in (
        (mlp(), "this model is no text encoder"),
        (small_bert(), "a width of 16, heads of 8 and an inner layer of 32 numbers"),
    ):
        with pytest.raises(ConfigError, match=f"precision bf16-encoder: {reason}"):
            convert(model, technique("bf16-encoder"), lambda: [texts([2])])
        assert model.forward is model.module
    model = small_bert()
    model.module = Encoder(transformer()).eval()
    monkeypatch.setattr(
        UnpaddedBert, "__call__", lambda self, ids, mask: torch.randn(*ids.shape, 64)
    )
    with pytest.raises(
        ConfigError, match=r"computes something else than this transformer \(cosine"
    ):
        convert(model, technique("bf16-encoder"), lambda: [texts([20, 9])])
    monkeypatch.setattr(technique_file, "kernel", lambda: None)
    with pytest.raises(
        ConfigError, match="was not built, or this CPU has neither AVX512-BF16 nor AMX"
    ):
        convert(model, technique("bf16-encoder"), lambda: [texts([2])])


def _loaded(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("_encoder", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
