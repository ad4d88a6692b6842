"""Precision: every variant computes the reference's values, leaves the reference alone, and refuses
what it cannot do in one line."""

from __future__ import annotations

import errno
import inspect
import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest
import torch
import torch._inductor.config

from precompute.model import Prepared
from precompute.models.device import Device, PackedLinear
from precompute.models.text_encoder import Encoder
from precompute.models.torch_model import Tensors, TorchModel
from precompute.store.errors import ConfigError
from precompute.techniques import onednn, pytorch
from precompute.techniques.conversion import candidates, convert
from precompute.techniques.machine import has_int8_products
from precompute.techniques.onednn import PerRowLinear, fitted
from precompute.techniques.pytorch import Fp8Linear, Int8Linear
from precompute.techniques.row_errors import relative_errors
from precompute.techniques.row_errors import tolerance as tolerance_of
from precompute.techniques.table import NAMES, is_here, technique_name, words
from precompute.techniques.technique import copied, technique
from precompute.text.bert import Bert, BertConfig
from precompute.text.sentence_folder import Head, Normalize, Pooling


class Mlp(torch.nn.Module):
    """[rows, 8] → ([rows, 4], [rows]), float32; with a layer used twice and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = torch.nn.Linear(8, 8)
        self.again = self.first
        self.out = torch.nn.Linear(8, 4, bias=False)
        self.shift: torch.Tensor
        self.register_buffer("shift", torch.linspace(0, 1, 8))

    def forward(self, x: torch.Tensor) -> Tensors:
        hidden = torch.relu(self.again(torch.relu(self.first(x + self.shift))))
        return self.out(hidden), hidden.sum(1)


class Arithmetic(TorchModel):
    """A model of any module, straight from tensors."""

    def fingerprint(self) -> str:
        return "arithmetic"

    def prepare(self, batch: pa.RecordBatch) -> Prepared:
        return Prepared(np.ones(batch.num_rows, np.int64), batch)

    def tensors(self, prepared: Prepared, rows: npt.NDArray[np.int64]) -> Tensors:
        return ()

    def features(self, outputs: Sequence[npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
        return dict(zip("ab", outputs, strict=False))


def mlp() -> Arithmetic:
    return Arithmetic(Mlp(), Device("cpu"))


POOLED = Pooling(
    ("cls", "max", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"), include_prompt=False
)


def head(size: int = 8) -> Head:
    """Every pooling but the mean, of texts whose prompt is left out."""
    return Head(size, POOLED, (Normalize(),))


def bert(pooled: Callable[[int], Head] | None = None) -> Arithmetic:
    torch.manual_seed(0)
    transformer = Bert(BertConfig("bert", 50, 16, 2, 2, 32, 16, 2, 0, 1e-12))
    return Arithmetic(Encoder(transformer, pooled and pooled(16)), Device("cpu"))


def poolings() -> Arithmetic:
    return bert(head)


def rows(count: int, seed: int = 0) -> Tensors:
    return (torch.randn(count, 8, generator=torch.Generator().manual_seed(seed)),)


def texts(count: int, length: int) -> Tensors:
    ids = torch.randint(1, 50, (count, length), generator=torch.Generator().manual_seed(count))
    mask = torch.ones_like(ids)
    mask[0, length // 2 :] = 0
    return ids * mask, mask


def prompted(count: int, length: int) -> Tensors:
    """Texts whose first token is a prompt's."""
    ids, mask = texts(count, length)
    mask[:, 0] = 2
    return ids, mask


def hidden(count: int, length: int) -> Tensors:
    """What a transformer makes of them."""
    return torch.randn(count, length, 8, generator=torch.Generator().manual_seed(count)), prompted(
        count, length
    )[1]


def some_rows() -> list[Tensors]:
    return [rows(5), rows(64, 1), rows(17, 2)]


def some_texts() -> list[Tensors]:
    return [texts(4, 9), texts(7, 5)]


def outputs(model: TorchModel, inputs: Tensors) -> list[npt.NDArray[Any]]:
    return [a.copy() for a in model.launch(inputs).arrays()]


def check(
    model: TorchModel,
    name: str,
    batches: list[Tensors],
    tolerance: float,
    folder: Path | None = None,
) -> None:
    """Convert, compare every batch with the reference, and the reference with itself before."""
    state = {k: (v.data_ptr(), v.clone()) for k, v in model.module.state_dict().items()}
    expected = [outputs(model, b) for b in batches]
    structure = repr(model.module)
    convert(model, technique(name), lambda: batches[:-1], folder)
    found = [outputs(model, b) for b in batches]
    for a, b in zip(expected, found, strict=True):
        assert [x.shape for x in a] == [x.shape for x in b]
        for x, y in zip(a, b, strict=True):
            assert y.dtype == np.float32
            np.testing.assert_allclose(y, x, atol=tolerance, rtol=0)
    assert repr(model.module) == structure
    assert {k: v.data_ptr() for k, v in model.module.state_dict().items()} == {
        k: v for k, (v, _) in state.items()
    }
    assert all(torch.equal(v, state[k][1]) for k, v in model.module.state_dict().items())
    convert(model, technique("fp32-eager"), list)
    for a, b in zip(expected, [outputs(model, b) for b in batches], strict=True):
        for x, y in zip(a, b, strict=True):
            assert x.tobytes() == y.tobytes()


def test_a_name_is_one_technique_and_what_a_view_says_is_one_name() -> None:
    here = [name for name in NAMES if is_here(name)]
    made = [technique(name) for name in here]
    assert [one.name for one in made] == here
    assert [technique_name(one.precision, one.backend) for one in made] == here
    assert words("int8-static-openvino") == ("int8", "openvino")
    auto = {
        "auto": "fp32-eager",
        "fp32": "fp32-eager",
        "bf16": "bf16-eager",
        "fp16": "fp16-eager",
        "int8": "int8-static-openvino",
    }
    assert {said: technique_name(said, "auto") for said in auto} == auto
    assert technique_name("auto", "compile") == "fp32-compile"


@pytest.mark.parametrize("name", ["", "fp32-", "int8-openvino", "fp32-static-onnx", "FP32-eager"])
def test_unknown_names_are_refused_with_the_known_ones(name: str) -> None:
    with pytest.raises(
        ConfigError, match=r"unknown precision .*fp32-eager, .*int8-static-openvino"
    ):
        technique(name)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "fp16-onnx",
            "precision fp16 has no backend onnx: it has eager, onednn, compile, autotune, graphs, tensorrt; onnx there is of fp32",
        ),
        (
            "int8-dynamic-onnx",
            "precision int8-dynamic has no backend onnx: it has onednn, openvino; onnx there is of fp32",
        ),
    ],
)
def test_a_backend_that_a_precision_has_not_is_refused_in_the_views_words(
    name: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=f"^{message}$"):
        technique(name)


# What is computed


@pytest.mark.parametrize(
    ("make", "batches"),
    [
        (mlp, [*some_rows(), rows(1)]),
        (bert, [*some_texts(), texts(1, 1), texts(3, 16)]),
        (poolings, [prompted(4, 9), prompted(7, 5), prompted(1, 2), prompted(3, 16)]),
    ],
    ids=["mlp", "bert", "poolings"],
)
@pytest.mark.parametrize(
    ("name", "tolerance"), [("fp32-onednn", 1e-6), ("bf16-eager", 0.05), ("fp16-eager", 0.01)]
)
def test_values_are_the_references(
    make: Callable[[], Arithmetic], batches: list[Tensors], name: str, tolerance: float
) -> None:
    check(make(), name, batches, tolerance)


def wide() -> Arithmetic:
    """Layers as the kernels for integers want them, and one that they do not take."""
    torch.manual_seed(0)
    layers = torch.nn.Sequential(
        torch.nn.Linear(32, 64),
        torch.nn.ReLU(),
        torch.nn.Linear(64, 16, bias=False),
        torch.nn.Linear(16, 3),
    )
    return Arithmetic(layers, Device("cpu"))


def wide_rows(count: int, seed: int = 0) -> Tensors:
    return (torch.randn(count, 32, generator=torch.Generator().manual_seed(seed)),)


WITH_VNNI = pytest.mark.skipif(not has_int8_products(), reason="no products of 8-bit integers")


@pytest.mark.parametrize(
    ("name", "tolerance"),
    [
        pytest.param("int8-dynamic-onednn", 0.01, marks=WITH_VNNI),
        ("int8-weights-eager", 0.01),
    ],
)
def test_integers_come_near_and_no_row_depends_on_another(name: str, tolerance: float) -> None:
    """Outputs have a deviation of 0.2."""
    batches = [wide_rows(5), wide_rows(64, 1), wide_rows(1, 2)]
    check(wide(), name, batches, tolerance)
    model = wide()
    convert(model, technique(name), lambda: batches[:-1])
    (x,) = wide_rows(5)
    alone = outputs(model, (x[2:3],))[0]
    among = outputs(model, (torch.cat([1e4 * x[:2], x[2:3], torch.zeros(2, 32)]),))[0]
    assert relative_errors(alone, among[2:3])[0] <= tolerance_of(name, "float32").known
    assert np.isfinite(among).all()
    assert not np.array_equal(alone, outputs(wide(), (x[2:3],))[0])


@WITH_VNNI
def test_integers_are_exact_where_8_bits_hold_them() -> None:
    linear = torch.nn.Linear(64, 5, bias=False).requires_grad_(False)
    numbers = torch.Generator().manual_seed(0)
    for tensor in (linear.weight, x := torch.empty(7, 64)):
        tensor.copy_(torch.randint(-127, 128, tensor.shape, generator=numbers))
        # the largest sums there are would overflow 16 bits, two by two; the middle is 0
        tensor[:, :3] = torch.tensor([127, 127, -127])
    assert torch.equal(PerRowLinear(linear)(x), linear(x))


@WITH_VNNI
def test_a_full_disk_is_named_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(ConfigError, match=r"^precision int8-\S+: no space left while writing /.*"):
        convert(wide(), technique("int8-dynamic-onednn"), lambda: [wide_rows(5)], tmp_path)
    assert list(tmp_path.iterdir()) == []


@WITH_VNNI
def test_damaged_divisors_are_named(tmp_path: Path) -> None:
    convert(wide(), technique("int8-dynamic-onednn"), lambda: [wide_rows(5)], tmp_path)
    (file,) = tmp_path.glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:20])
    with pytest.raises(
        ConfigError, match=rf"{file.name} differs from the checksum in its name: .*; remove it"
    ):
        convert(wide(), technique("int8-dynamic-onednn"), lambda: [wide_rows(5)], tmp_path)


@WITH_VNNI
def test_outliers_go_into_the_weights_and_the_worst_layers_stay() -> None:
    numbers = torch.Generator().manual_seed(0)
    parts: list[torch.nn.Module] = []
    for _ in range(8):
        linear = torch.nn.Linear(32, 32).requires_grad_(False)
        linear.weight.copy_(torch.randn(32, 32, generator=numbers))
        parts += [linear, torch.nn.Tanh()]
    module = torch.nn.Sequential(*parts)
    x = torch.randn(200, 32, generator=numbers)
    x[:, 3] *= 50
    found = fitted(module, [(x[:100],), (x[100:],)])

    def error(divisors: torch.Tensor | None) -> float:
        layer = module[0]
        assert isinstance(layer, torch.nn.Linear)
        return float((PerRowLinear(layer, divisors)(x) - layer(x)).norm())

    class Named(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = module

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(input=x)
            return x

    # a caller may name the input
    assert set(fitted(Named(), [(x,)])) == {f"layers.{name}" for name in found}
    # two of eight stay in float32; and the first, of which a column is an outlier, need not
    assert len(found) == 6
    assert 2 * error(found["0"]) < error(None)
    assert found["0"].argmax() == 3


def test_layers_that_their_kernels_read_past_the_end_of_stay_as_they_are() -> None:
    model = wide()
    convert(model, technique("int8-weights-eager"), lambda: [wide_rows(5), wide_rows(6)])
    kinds = [type(part).__name__ for part in model.forward.modules()]  # type: ignore[attr-defined]
    assert (kinds.count("Int8Linear"), kinds.count("Linear")) == (2, 1)
    with pytest.raises(
        ConfigError,
        match="int8-weights-eager: no linear layer has multiples of 32 inputs and 16 outputs: choose bf16-eager",
    ):
        convert(mlp(), technique("int8-weights-eager"), some_rows)


def test_half_precision_computes_in_half_precision() -> None:
    model = bert()
    convert(model, technique("bf16-eager"), some_texts)
    assert model.device.dtype == torch.bfloat16
    assert isinstance(model.forward, Encoder)  # a text encoder on a GPU knows it by its class
    assert {p.dtype for p in model.forward.parameters()} == {torch.bfloat16}
    assert {p.dtype for p in model.module.parameters()} == {torch.float32}
    convert(model, technique("fp32-onednn"), some_texts)
    assert model.device.dtype == torch.float32


def test_every_linear_layer_is_packed_once() -> None:
    module = onednn.packed(copied(Mlp()))
    assert isinstance(module, Mlp)
    assert isinstance(module.first, PackedLinear)
    assert module.first is module.again
    alone = onednn.packed(torch.nn.Linear(3, 2).requires_grad_(False))
    assert isinstance(alone, PackedLinear)


def test_packed_layers_take_inputs_that_are_not_contiguous() -> None:
    linear = torch.nn.Linear(6, 4).requires_grad_(False)
    x = torch.randn(6, 5, 3).permute(2, 1, 0)
    torch.testing.assert_close(PackedLinear(linear)(x), linear(x), atol=1e-6, rtol=0)


@pytest.mark.parametrize("kind", [PackedLinear, PerRowLinear, Int8Linear, Fp8Linear])
def test_a_layer_in_anothers_place_takes_its_input_by_that_ones_name(
    kind: type[torch.nn.Module],
) -> None:
    named = [list(inspect.signature(layer.forward).parameters) for layer in (kind, torch.nn.Linear)]
    assert named == [["self", "input"]] * 2


def check_poolings(name: str, folder: Path) -> None:
    """Every pooling by a technique that compiles or exports."""
    batches = [hidden(4, 9), hidden(7, 5), hidden(3, 16)]
    check(Arithmetic(head(), Device("cpu")), name, batches, 1e-5, folder)


def test_every_pooling_is_compiled(tmp_path: Path) -> None:
    check_poolings("fp32-compile", tmp_path)


class Variadic(Mlp):
    """Takes what it takes as ``*args``, as the module of a torch_module view does."""

    def forward(self, *inputs: torch.Tensor) -> Tensors:
        return super().forward(*inputs)


def check_any_inputs(name: str, folder: Path) -> None:
    """A module of any number of inputs by a technique that exports."""
    check(Arithmetic(Variadic(), Device("cpu")), name, [*some_rows(), rows(1)], 1e-5, folder)


def check_lost_bit(name: str, folder: Path) -> None:
    """A converted model that lost a bit is not computed by, by a technique that keeps one file."""
    convert(mlp(), technique(name), some_rows, folder)
    (file,) = folder.iterdir()
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(ConfigError, match=rf"{file.name} differs from the checksum in its name"):
        convert(mlp(), technique(name), some_rows, folder)
    file.unlink()
    convert(mlp(), technique(name), some_rows, folder)


# What is refused


class Odd(torch.nn.Module):
    """Its way depends on the values: no single graph. It reads its layer's weight, too."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if float(x.sum()) > 0:
            x = -x
        return x @ self.layer.weight.T


def check_odd(name: str) -> None:
    """A module that cannot be converted computes the reference."""
    model = Arithmetic(Odd(), Device("cpu"))
    before = outputs(model, rows(3))
    convert(model, technique("bf16-eager"), some_rows)
    with pytest.raises(
        ConfigError, match=rf"^precision {name} does not work with this model: \w+: [^\n]+$"
    ):
        convert(model, technique(name), some_rows)
    assert model.forward is model.module
    assert model.device.dtype == torch.float32
    assert outputs(model, rows(3))[0].tobytes() == before[0].tobytes()


def test_a_module_that_cannot_be_converted_computes_the_reference() -> None:
    check_odd("fp32-onednn")


@pytest.mark.parametrize("operator", ["missing", "wrong"])
@pytest.mark.parametrize(
    ("layer", "name", "words"),
    [
        (PackedLinear, "fp32-onednn", "oneDNN linear layers.*: choose eager"),
        (PerRowLinear, "int8-dynamic-onednn", "8-bit linear layers.*: choose fp32-onednn"),
        (Int8Linear, "int8-weights-eager", "8-bit linear layers.*: choose bf16-eager"),
        (Fp8Linear, "fp8-eager", "8-bit float linear layers.*: choose bf16-eager"),
    ],
)
def test_operators_that_are_missing_or_wrong_are_refused(
    layer: Any, name: str, words: str, operator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What they compute for one input is that of its neighbour."""
    forward = layer.forward

    def found(self: Any, x: torch.Tensor) -> torch.Tensor:
        if operator == "missing":
            raise AttributeError(
                "'_OpNamespace' 'mkldnn' object has no attribute '_linear_pointwise'"
            )
        result: torch.Tensor = forward(self, x.roll(1, -1))
        return result

    chosen = technique(name)
    # as on a machine that has what it takes
    monkeypatch.setattr(type(chosen), "missing", lambda *_: "")
    monkeypatch.setattr(layer, "forward", found)
    with pytest.raises(ConfigError, match=f"precision {name}: .*{words}"):
        convert(mlp(), chosen, some_rows)


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(
        ConfigError, match="precision fp32-compile: there is no C\\+\\+ compiler 'no-such-compiler'"
    ):
        convert(mlp(), technique("fp32-compile"), some_rows)
    assert not {v.backend for v in candidates(Device("cpu"), mlp())} & {"compile"}


# What is proposed


@pytest.mark.parametrize(
    ("flags", "torchs", "onednns", "environment", "bf16"),
    [
        ([], "AVX512", True, {}, False),  # AVX-512 without it: oneDNN emulates it
        (["avx512_bf16"], "AVX512", True, {}, True),
        (
            ["avx512_bf16", "amx_bf16"],
            "AVX512",
            True,
            {"ONEDNN_MAX_CPU_ISA": "AVX10_1_512_AMX"},
            True,
        ),
        (["avx512_bf16"], "AVX512", True, {"ONEDNN_MAX_CPU_ISA": "avx512_core"}, False),
        (["avx512_bf16"], "AVX512", True, {"DNNL_MAX_CPU_ISA": "AVX512_CORE_VNNI"}, False),
        (["avx512_bf16"], "AVX512", False, {"ONEDNN_MAX_CPU_ISA": "AVX2"}, False),
        (["avx512_bf16"], "AVX2", True, {}, False),
        (["avx512_bf16"], "DEFAULT", True, {}, False),
        (["bf16"], "DEFAULT", True, {}, True),
        (["sve_bf16"], "SVE256", True, {}, True),
        (["bf16"], "DEFAULT", False, {}, False),
    ],
)
def test_bfloat16_is_proposed_where_the_cpu_has_it_and_it_may_be_used(
    flags: list[str],
    torchs: str,
    onednns: bool,
    environment: dict[str, str],
    bf16: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: dict.fromkeys(flags, True))
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: torchs)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: onednns)
    for name in ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    found = [v.name for v in candidates(Device("cpu"), mlp())]
    assert found[0] == "fp32-eager"
    assert "fp32-onednn" in found
    assert ("bf16-onednn" in found, "bf16-eager" in found) == (bf16, bf16)
    assert not any(name.startswith("fp16") for name in found)


def test_what_the_environment_forbids_is_not_proposed() -> None:
    """That of oneDNN is read by us, and in the table above."""
    code = "from precompute.techniques.machine import has_bf16; print(has_bf16())"
    environment = os.environ | {"ATEN_CPU_CAPABILITY": "avx2"}
    assert (
        subprocess.run(
            [sys.executable, "-c", code],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        == "False\n"
    )


def test_packed_layers_are_not_proposed_to_a_module_without_any() -> None:
    model = Arithmetic(torch.nn.Sequential(torch.nn.ReLU()), Device("cpu"))
    assert not {v.precision for v in candidates(Device("cpu"), model)} & {"int8"}
    assert not {v.backend for v in candidates(Device("cpu"), model)} & {"onednn"}
    assert shutil.which("g++") is None or "compile" in {
        v.backend for v in candidates(Device("cpu"), model)
    }


def test_compiled_code_is_kept_apart_by_instruction_set(monkeypatch: pytest.MonkeyPatch) -> None:
    warnings.simplefilter(
        "ignore"
    )  # pytest restores them; torch deprecates parts of what it imports
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    folders = []
    for capability, given in (
        ("AVX2", None),
        ("AVX512", default_cache_dir()),
        ("AVX2", "/of/my/own"),
        ("AVX2", f"{default_cache_dir()}_avx512"),
        ("AVX2", f"{default_cache_dir()}_mine"),
    ):
        monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
        if given is not None:
            monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", given)
        monkeypatch.setattr(
            torch.backends.cpu, "get_cpu_capability", lambda capability=capability: capability
        )
        pytorch.compiled(torch.nn.Linear(2, 2))
        folders.append(os.environ["TORCHINDUCTOR_CACHE_DIR"].removeprefix(default_cache_dir()))
    assert folders == ["_avx2", "_avx512", "/of/my/own", "_avx2", "_mine"]
