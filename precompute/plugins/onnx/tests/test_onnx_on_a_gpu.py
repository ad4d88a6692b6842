"""ONNX Runtime and TensorRT on a GPU: what they are given, and in whose order they compute, with a
session that stands in for theirs on the simulated GPU."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from precompute.models.device import Device
from precompute.plugins.onnx import technique as onnx
from precompute.store.errors import ConfigError
from precompute.techniques.conversion import candidates, convert
from precompute.techniques.technique import technique
from tests.precompute.simulated_cuda import Machine, simulated_cuda
from tests.precompute.test_cuda import VIEW, Rows, batch, computed, mlp

pytest.importorskip("onnxruntime")
pytest.importorskip("onnx")

BUILT = ["TensorrtExecutionProvider", "CUDAExecutionProvider", "CPUExecutionProvider"]
EXAMPLES = [(torch.ones(3, 8),), (torch.ones(5, 8),)]


class Session:
    """ONNX Runtime's, of a graph that is :func:`mlp`: it computes on the stream it was given, and
    returns before that is done only where its options say so."""

    made: ClassVar[list[Session]] = []
    loads: ClassVar[bool] = True
    """Whether the libraries of the wanted provider are there."""
    machine: ClassVar[Machine]
    own: ClassVar[Any]
    """ONNX Runtime's own."""

    def __init__(self, path: str, options: Any, providers: list[Any], **_: Any) -> None:
        graph = Session.own(path, options, providers=["CPUExecutionProvider"])
        self.providers, self.module = providers, mlp().to(torch.device("cuda"))
        self.inputs, self.outputs = graph.get_inputs(), graph.get_outputs()
        if providers != ["CPUExecutionProvider"]:
            Session.made.append(self)
            for _, given in providers:
                if folder := given.get("trt_engine_cache_path"):
                    (Path(folder) / "some.engine").touch()

    def get_inputs(self) -> Any:
        return self.inputs

    def get_outputs(self) -> Any:
        return self.outputs

    def get_providers(self) -> list[str]:
        names = [p if isinstance(p, str) else p[0] for p in self.providers]
        return names if Session.loads else ["CPUExecutionProvider"]

    def io_binding(self) -> Any:
        return Binding()

    def run_with_iobinding(self, binding: Any, options: Any) -> None:
        machine = Session.machine
        stream: Any = machine.streams[int(self.providers[0][1]["user_compute_stream"])]
        with torch.cuda.stream(stream):
            binding.out[0].copy_(self.module(binding.given[0]))
        wait = options.get_run_config_entry("disable_synchronize_execution_providers")
        if wait != "1":
            machine.waits.append("a session's run")


class Binding:
    def __init__(self) -> None:
        self.given: list[torch.Tensor] = []
        self.out: list[torch.Tensor] = []

    def bind_input(self, tensor: torch.Tensor) -> None:
        self.given.append(tensor)

    def bind_output(self, tensor: torch.Tensor) -> None:
        self.out.append(tensor)


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the inputs and outputs that :func:`mlp` has."""
    import onnx as library
    from onnx import TensorProto, helper

    x, y = (
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["rows", size])
        for name, size in (("x", 8), ("y", 4))
    )
    weight = helper.make_tensor("weight", TensorProto.FLOAT, [8, 4], [0.0] * 32)
    node = helper.make_node("MatMul", ["x", "weight"], ["y"])
    made = helper.make_model(
        helper.make_graph([node], "mlp", [x], [y], [weight]),
        opset_imports=[helper.make_opsetid("", 18)],
        ir_version=10,
    )
    path = tmp_path_factory.mktemp("graph") / "mlp.onnx"
    library.save(made, path)
    return path


@pytest.fixture
def machine(graph: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    import onnxruntime

    monkeypatch.setattr(Session, "own", onnxruntime.InferenceSession, raising=False)
    monkeypatch.setattr(Session, "made", [])
    monkeypatch.setattr(onnxruntime, "InferenceSession", Session)
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: BUILT)
    monkeypatch.setattr(onnx.Bound, "_bind", lambda _, bind, name, tensor: bind(tensor))
    monkeypatch.setattr(onnx, "write", lambda module, examples, path: shutil.copy(graph, path))
    with simulated_cuda(monkeypatch) as found:
        monkeypatch.setattr(Session, "machine", found, raising=False)
        yield found


def converted(name: str, folder: Path | None = None) -> Rows:
    model = Rows(mlp(), Device())
    convert(model, technique(name), lambda: EXAMPLES, folder)
    return model


@pytest.mark.parametrize("name", ["fp32-onnx", "tf32-tensorrt", "fp16-tensorrt"])
def test_a_session_computes_in_our_streams_order_and_nobody_waits(
    name: str, machine: Machine
) -> None:
    model = converted(name)
    machine.waits.clear()
    found = computed(model, VIEW, batch(100))
    np.testing.assert_allclose(
        found, computed(Rows(mlp(), Device("cpu")), VIEW, batch(100)), rtol=1e-5, atol=1e-6
    )
    assert (machine.races, machine.waits) == ([], [])


def test_float32_is_float32_and_on_a_stream_of_ours(machine: Machine) -> None:
    converted("fp32-onnx")
    (session,) = Session.made
    ((name, options),) = session.providers
    assert name == "CUDAExecutionProvider"
    assert options == {
        "device_id": "0",
        "user_compute_stream": options["user_compute_stream"],
        "use_tf32": "0",
    }
    # the default stream is 0, which is taken for none
    assert int(options["user_compute_stream"]) > 0


def test_tensorrt_keeps_its_engines_and_knows_the_shapes(machine: Machine, tmp_path: Path) -> None:
    converted("fp16-tensorrt", tmp_path)
    built, session = Session.made
    (first, options), (second, beside) = session.providers
    assert (first, second) == ("TensorrtExecutionProvider", "CUDAExecutionProvider")
    (name,) = onnx.input_names(next(tmp_path.glob("*.onnx")))
    (folder,) = tmp_path.glob("fp16-tensorrt-*.engines")
    assert options == {
        "device_id": "0",
        "user_compute_stream": beside["user_compute_stream"],
        "trt_engine_cache_enable": "True",
        "trt_engine_cache_path": str(folder),
        "trt_timing_cache_enable": "True",
        "trt_timing_cache_path": str(folder),
        "trt_fp16_enable": "True",
        "trt_layer_norm_fp32_fallback": "True",
        "trt_profile_min_shapes": f"{name}:1x8",
        "trt_profile_opt_shapes": f"{name}:5x8",
        "trt_profile_max_shapes": f"{name}:131072x8",
    }
    # made beside its place, where a half-made one would be taken for whole
    assert Path(built.providers[0][1]["trt_engine_cache_path"]).parent.parent == tmp_path
    converted("fp16-tensorrt", tmp_path)
    assert len(Session.made) == 3
    # other numbers, other engines
    converted("tf32-tensorrt", tmp_path)
    assert len(list(tmp_path.glob("*.engines"))) == 2
    assert Session.made[-1].providers[0][1]["trt_fp16_enable"] == "False"
    assert Session.made[-1].providers[1][1]["use_tf32"] == "1"


def test_engines_take_every_length_and_as_many_rows_as_memory_allows() -> None:
    texts = [
        (torch.ones(64, 16, dtype=torch.int64), torch.ones(64, 16, dtype=torch.int64)),
        (torch.ones(8, 300, dtype=torch.int64), torch.ones(8, 300, dtype=torch.int64)),
    ]
    assert onnx.profile(texts, 512) == ([(1, 1)] * 2, [(8, 300)] * 2, [(256, 512)] * 2)
    assert onnx.profile(texts, 0)[2] == [(2**17 // 300, 300)] * 2
    assert onnx.profile_options(["ids", "mask"], onnx.profile(texts, 512)) == {
        "trt_profile_min_shapes": "ids:1x1,mask:1x1",
        "trt_profile_opt_shapes": "ids:8x300,mask:8x300",
        "trt_profile_max_shapes": "ids:256x512,mask:256x512",
    }


def test_rows_beyond_an_engines_are_computed_in_parts() -> None:
    sizes = []

    def forward(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        sizes.append(len(x))
        return x + y, x

    x = torch.arange(11.0)
    found = onnx.in_parts(forward, 4)(x, 2 * x)
    assert sizes == [4, 4, 3]
    assert [t.tolist() for t in found] == [(3 * x).tolist(), x.tolist()]
    assert onnx.in_parts(lambda x: x, 4)(x).tolist() == x.tolist()


def test_what_does_not_load_is_refused_and_not_computed_by_another(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Session, "loads", False)
    with pytest.raises(ConfigError, match=r"could not load CUDAExecutionProvider: are CUDA's"):
        converted("fp32-onnx")
    with pytest.raises(ConfigError, match=r"could not load Tensorrt.*installed, and TensorRT\?"):
        converted("fp16-tensorrt")


@pytest.mark.parametrize(
    ("built", "offered"),
    [
        (BUILT, {"fp32-onnx", "tf32-tensorrt", "fp16-tensorrt"}),
        (BUILT[1:], {"fp32-onnx"}),
        (BUILT[2:], set()),
    ],
)
def test_a_build_of_onnx_runtime_is_offered_for_what_it_has(
    built: list[str], offered: set[str], machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    import onnxruntime

    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: built)
    device = Device()
    names = {found.name for found in candidates(device, Rows(mlp(), device))}
    assert {name for name in names if name.endswith(("onnx", "tensorrt"))} == offered
    assert onnx.providers(torch.device("cpu"), 0) == ["CPUExecutionProvider"]
    with warnings.catch_warnings(), pytest.raises(ConfigError, match="computes on a GPU"):
        convert(Rows(mlp(), Device("cpu")), technique("fp16-tensorrt"), lambda: EXAMPLES)
