"""What only a GPU runs, on a stand-in that computes on the CPU and finds races
(:mod:`tests.precompute.simulated_cuda`)."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest
import torch

from benchmarks.gpu_parts import write_encoder
from precompute.engine.batches import Preparation
from precompute.engine.forward import Forward
from precompute.engine.rows import Window
from precompute.engine.runner import Runner
from precompute.model import Prepared
from precompute.models import device as device_file
from precompute.models.device import Device, Graphed, bucketed_rows, check_rows
from precompute.models.text_encoder import Encoder, TextEncoder, UnpaddedEncoder
from precompute.models.top_k import TopK
from precompute.models.torch_model import Tensors, TorchModel
from precompute.store.doors import TECHNIQUES
from precompute.store.errors import ConfigError
from precompute.store.feature_view import Feature, FeatureView
from precompute.techniques.conversion import candidates, convert, use_variant
from precompute.techniques.pytorch import Fp8Linear, in_fp8, in_tf32
from precompute.techniques.technique import technique
from tests.precompute import simulated_cuda as simulated_cuda_file
from tests.precompute.simulated_cuda import Event, OnGpu, Stream, simulated_cuda
from tests.precompute.test_attention import FAMILIES, of_transformers

VIEW = FeatureView("rows", ("id",), (Feature("y", "float32", dim=4),), 60.0, 60.0)


class Rows(TorchModel):
    """x of 8 numbers → y of 4."""

    start_cost = max_cost = 16

    def fingerprint(self) -> str:
        return "rows"

    def prepare(self, batch: pa.RecordBatch) -> Prepared:
        x = np.stack(batch.column("x").to_pylist()).astype(np.float32)
        return Prepared(np.ones(len(x), np.int64), x)

    def tensors(self, prepared: Prepared, rows: npt.NDArray[np.int64]) -> Tensors:
        return (torch.from_numpy(prepared.payload[rows]),)

    def features(self, outputs: Sequence[npt.NDArray[Any]]) -> dict[str, Any]:
        return {"y": outputs[0]}


def mlp() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))


def batch(rows: int) -> pa.RecordBatch:
    return pa.record_batch({"x": list(np.random.default_rng(0).normal(size=(rows, 8)))})


def computed(model: Any, view: FeatureView, given: pa.RecordBatch) -> npt.NDArray[np.float32]:
    """By the engine's stages, one after the other in this thread, two batches ahead."""
    runner = Runner(model, view)
    preparation = Preparation(model, model, view, lambda _: runner.budget.next())
    forward = Forward(model, model, view, runner.meter, runner.budget)
    (window,) = forward.windows(preparation.batches([preparation.window(Window(given, given))]))
    assert not window.rejections
    rows = np.concatenate([rows for rows, _ in window.pieces])
    made = np.concatenate(
        [np.stack(features[view.features[0].name].to_pylist()) for _, features in window.pieces]
    )
    return made[np.argsort(rows)]


def test_batches_are_copied_computed_and_fetched_in_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = computed(Rows(mlp(), Device("cpu")), VIEW, batch(100))
    with simulated_cuda(monkeypatch) as machine:
        found = computed(Rows(mlp(), Device()), VIEW, batch(100))
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert (machine.races, machine.waits) == ([], [])


def test_while_one_batch_is_waited_for_two_others_are_under_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One computing and one being copied: what an event is recorded for was copied in, launched,
    and its copy out begun."""
    with simulated_cuda(monkeypatch) as machine:
        computed(Rows(mlp(), Device()), VIEW, batch(160))
    assert machine.behind == [2] * 8 + [1, 0]


def no_wait_of(which: str) -> Callable[[pytest.MonkeyPatch], None]:
    def broken(monkeypatch: pytest.MonkeyPatch) -> None:
        own = Stream.wait_stream

        def wait_stream(self: Stream, other: Stream) -> None:
            if which not in (self.name, other.name) or "computing" not in (self.name, other.name):
                own(self, other)

        monkeypatch.setattr(Stream, "wait_stream", wait_stream)

    return broken


def no(of: type, name: str) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda monkeypatch: monkeypatch.setattr(of, name, lambda *_: None)


@pytest.mark.parametrize(
    ("broken", "race"),
    [
        (no_wait_of("a stream"), "reads a copy to the cuda before a stream has written it"),
        (no_wait_of("a stream 3"), "before computing has written it"),
        (
            no(Event, "synchronize"),
            "numpy by host reads pinned memory before a stream 3 has written it",
        ),
        (no(OnGpu, "record_stream"), "is freed while computing is at it"),
    ],
    ids=["inputs", "outputs", "landing", "memory"],
)
def test_every_wait_and_record_is_needed(
    broken: Callable[[pytest.MonkeyPatch], None], race: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without it the stand-in finds the race; so it would find it in what is written next."""
    with simulated_cuda(monkeypatch) as machine:
        broken(monkeypatch)
        computed(Rows(mlp(), Device()), VIEW, batch(100))
    assert any(race in found for found in machine.races), machine.races[:3]


# ---- graphs


@pytest.mark.parametrize("rows", [1, 2, 7, 8, 9, 31, 1000, 4097])
def test_rows_are_filled_up_by_a_fifth_at_most(rows: int) -> None:
    filled = bucketed_rows(rows)
    assert rows <= filled <= max(rows * 1.25, rows + 1 if rows > 8 else rows)
    assert bucketed_rows(filled) == filled


def test_graphs_are_recorded_for_shapes_that_repeat_and_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = mlp()
    given = [
        torch.randn(rows, 8, generator=torch.Generator().manual_seed(rows))
        for rows in (30, 32, 29, 31, 30, 5, 32)
    ]
    expected = [module(x) for x in given]
    with simulated_cuda(monkeypatch) as machine, torch.inference_mode():
        model = Rows(module, Device())
        graphed = Graphed(model.module, model.device.torch)
        model.use(graphed)
        # each is fetched while the next one is replayed into the same memory
        fetches = [model.launch(model.device.pin([x])) for x in given]
        found = [fetch.arrays()[0] for fetch in fetches]
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b.detach().numpy(), rtol=1e-5, atol=1e-6)
    assert graphed.counts == {"recorded": 1, "replayed": 3, "launched": 3, "failed": 0}
    assert (machine.replays, machine.races, machine.waits) == (4, [], [])


def test_a_graphs_inputs_are_not_written_while_it_is_replayed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As they would be from the stream that copies."""
    with simulated_cuda(monkeypatch) as machine, torch.inference_mode():
        model = Rows(mlp(), Device())
        graphed = Graphed(model.module, model.device.torch)
        aside = machine.stream("aside")
        for _ in range(5):
            (x,) = model.device.put(model.device.pin([torch.ones(4, 8)]))
            # the copies are another stream's
            own, machine.current = machine.current, aside
            graphed(x)
            machine.current = own
            graphed(x)
    assert any(
        "writes aten.new_zeros.default while" in race or "writes" in race for race in machine.races
    )


class Waiting(torch.nn.Module):
    """Decides on the host by what its inputs hold where there are 16 rows and more: that cannot be
    recorded."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.layers(x)
        return made * 2 if len(x) >= 16 and bool((x[:, 0] > 1e6).any()) else made


def test_what_cannot_be_recorded_is_launched_counted_and_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sizes = [16, 4, 20, 16, 4, 16, 20, 4, 16, 20, 20, 4]
    given = [
        torch.randn(rows, 8, generator=torch.Generator().manual_seed(n))
        for n, rows in enumerate(sizes)
    ]
    expected = [mlp()(x) for x in given]
    with simulated_cuda(monkeypatch) as machine, torch.inference_mode():
        model = Rows(Waiting(), Device())
        model.use(graphed := Graphed(model.module, model.device.torch))
        found = []
        for x in given:
            found.append(model.land(model.launch(model.device.pin([x])))["y"])
            # where the next batch is launched, and its memory taken
            assert (machine.current.name, machine.open_pools) == ("computing", [])
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b.detach().numpy(), rtol=1e-5, atol=1e-6)
    assert graphed.counts == {"recorded": 1, "replayed": 1, "launched": 10, "failed": 2}
    assert machine.races == []
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith("a batch of 16 rows cannot be recorded as a graph")


def test_no_row_is_rejected_for_a_graph_that_cannot_be_recorded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = computed(Rows(mlp(), Device("cpu")), VIEW, batch(200))
    with simulated_cuda(monkeypatch):
        model = Rows(Waiting(), Device())
        model.use(graphed := Graphed(model.module, model.device.torch))
        # fails where a row was rejected
        found = computed(model, VIEW, batch(200))
        assert Runner(model, VIEW).state_figures()["graphs"]["failed"] == 1
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    assert graphed.counts == {"recorded": 0, "replayed": 0, "launched": 13, "failed": 1}


def test_a_gpu_lost_while_a_graph_is_recorded_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    with simulated_cuda(monkeypatch) as machine, torch.inference_mode():
        model = Rows(mlp(), Device())

        def lost(x: torch.Tensor) -> torch.Tensor:
            if machine.recording is not None:
                machine.recording.broken = True
                raise RuntimeError("CUDA error: an illegal memory access was encountered")
            out: torch.Tensor = model.module(x)
            return out

        graphed = Graphed(lost, model.device.torch)
        (x,) = model.device.put(model.device.pin([torch.ones(4, 8)]))
        graphed(x), graphed(x)
        with pytest.raises(RuntimeError, match="illegal memory access"):
            graphed(x)


def test_a_row_that_raises_while_recorded_leaves_its_shape_to_be_recorded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with simulated_cuda(monkeypatch), torch.inference_mode():
        model = Rows(mlp(), Device())
        bad = False

        def raising(x: torch.Tensor) -> torch.Tensor:
            if bad:
                raise ValueError("a bad row")
            out: torch.Tensor = model.module(x)
            return out

        graphed = Graphed(raising, model.device.torch)
        (x,) = model.device.put(model.device.pin([torch.ones(4, 8)]))
        graphed(x), graphed(x)
        bad = True
        with pytest.raises(ValueError, match="a bad row"):
            graphed(x)
        bad = False
        graphed(x), graphed(x)
    assert graphed.counts == {"recorded": 1, "replayed": 1, "launched": 2, "failed": 0}


class Counting(torch.nn.Module):
    """Adds a number that the host has counted: what is played back adds the first."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x + self.calls


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (Waiting, "when stream is capturing|previous error during capture"),
        (Counting, "what its graph plays back is not what it computes"),
    ],
)
def test_a_conversion_refuses_what_cannot_be_recorded(
    module: type[torch.nn.Module], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("precompute.techniques.pytorch.compiled", lambda module: module)
    monkeypatch.setattr("precompute.techniques.pytorch.missing_compiler", lambda _: "")
    examples = [(torch.ones(3, 8),), (torch.ones(20, 8),)]
    with simulated_cuda(monkeypatch) as machine:
        model = Rows(module(), Device())
        with pytest.raises(ConfigError, match=reason):
            convert(model, technique("fp32-graphs"), lambda: examples)
        assert model.variant == "fp32-eager"
        assert (machine.current.name, machine.open_pools) == ("computing", [])
        convert(model_of := Rows(mlp(), Device()), technique("fp32-graphs"), lambda: examples)
        assert isinstance(model_of.forward, Graphed)


def test_a_module_that_takes_no_entry_a_row_has_no_graphs() -> None:
    assert check_rows(mlp(), [(torch.ones(3, 8),)]) == ""
    assert "output 0 has shape [] for 3 rows" in check_rows(
        lambda x: x.sum(), [(torch.ones(3, 8),)]
    )
    assert "input 1 has shape [4] for 3 rows" in check_rows(
        lambda x, _: x, [(torch.ones(3, 8), torch.ones(4))]
    )


# ---- memory


def test_a_gpu_holds_one_copy_of_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    with simulated_cuda(monkeypatch):
        model = Rows(mlp(), Device())
        convert(model, technique("bf16-eager"), lambda: [(torch.ones(3, 8),), (torch.ones(5, 8),)])
        places = [
            {p.device.type for p in module.parameters()}  # type: ignore[union-attr]
            for module in (model.module, model.forward)
        ]
        assert places == [{"cpu"}, {"cuda"}]
        # for the accuracy check, and back
        restore = model.restorer()
        model.use(model.module)
        assert {p.device.type for p in model.module.parameters()} == {"cuda"}
        restore()
        assert {p.device.type for p in model.module.parameters()} == {"cpu"}
        # what shares them needs no second copy
        model.use(torch.nn.Sequential(*model.module.children()).to("cuda"))
        found = computed(model, VIEW, batch(20))
    np.testing.assert_allclose(
        found, computed(Rows(mlp(), Device("cpu")), VIEW, batch(20)), rtol=1e-5, atol=1e-6
    )


# ---- models


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A small encoder of heads of 8 numbers."""
    made = tmp_path_factory.mktemp("encoder")
    write_encoder(made, layers=2, dim=16, heads=2)
    return str(made)


TEXTS = pa.record_batch(
    {
        "text": [
            " ".join(["snow", "the", "film", "music", "night"][: 1 + n % 5] * (1 + n % 7))
            for n in range(40)
        ]
    }
)
DOCS = FeatureView("docs", ("id",), (Feature("embedding", "float32", dim=16),), 60.0, 60.0)
SMALL: dict[str, Any] = {"max_tokens": 32, "max_cost": 128}


def converted(model: TextEncoder, name: str) -> TextEncoder:
    use_variant(model, name, lambda: pa.Table.from_batches([TEXTS.slice(0, 12)]), None)
    return model


class Opaque(torch.nn.Module):
    """What is compiled: no Encoder to anybody."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *given: Any) -> Any:
        return self.module(*given)


@pytest.mark.parametrize("name", ["bf16-eager", "fp16-eager", "bf16-compile"])
@pytest.mark.parametrize(("capability", "unpadded"), [((9, 0), True), ((7, 5), False)])
def test_texts_are_laid_end_to_end_where_a_gpu_can_and_padded_elsewhere(
    folder: str,
    name: str,
    capability: tuple[int, int],
    unpadded: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = computed(TextEncoder(folder, device="cpu", **SMALL), DOCS, TEXTS)
    monkeypatch.setattr("precompute.techniques.pytorch.compiled", Opaque)
    monkeypatch.setattr("precompute.techniques.pytorch.missing_compiler", lambda _: "")
    with simulated_cuda(monkeypatch, capability) as machine:
        model = converted(TextEncoder(folder, **SMALL), name)
        machine.waits.clear()
        found = computed(model, DOCS, TEXTS)
        assert isinstance(model.forward, UnpaddedEncoder) is unpadded
    assert (found * expected).sum(1).min() > 0.999
    assert (machine.races, machine.waits) == ([], [])


@pytest.mark.parametrize("name", ["modernbert", "qwen3"])
def test_other_families_are_laid_end_to_end_without_waiting(
    name: str, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, settings = FAMILIES[name]
    # room for the token that transformers pads with
    transformer = of_transformers(kind, settings | {"vocab_size": 30528})
    transformer.save_pretrained(tmp_path)
    shutil.copy(Path(folder) / "tokenizer.json", tmp_path)
    # a decoder's folder says how it is pooled
    (tmp_path / "modules.json").write_text(MODULES)
    (tmp_path / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": 32, "pooling_mode_mean_tokens": True}
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    view = FeatureView("docs", ("id",), (Feature("embedding", "float32", dim=32),), 60.0, 60.0)
    expected = computed(TextEncoder(str(tmp_path), device="cpu", **SMALL), view, TEXTS)
    with simulated_cuda(monkeypatch) as machine:
        model = converted(TextEncoder(str(tmp_path), **SMALL), "bf16-eager")
        machine.waits.clear()
        found = computed(model, view, TEXTS)
        assert isinstance(model.forward, UnpaddedEncoder)
    cosines = (found * expected).sum(1) / np.linalg.norm(found, axis=1)
    assert (cosines / np.linalg.norm(expected, axis=1)).min() > 0.99
    assert (machine.races, machine.waits) == ([], [])


MODULES = json.dumps(
    [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {
            "idx": 1,
            "name": "1",
            "path": "1_Pooling",
            "type": "sentence_transformers.models.Pooling",
        },
    ]
)


def test_by_graphs_texts_are_padded_to_few_lengths(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = computed(TextEncoder(folder, device="cpu", **SMALL), DOCS, TEXTS)
    with simulated_cuda(monkeypatch) as machine:
        model = TextEncoder(folder, **SMALL)
        model.use(graphed := Graphed(model.module, model.device.torch))
        assert [
            t.shape[1] for t in model.inputs(model.prepare(TEXTS.slice(0, 1)), np.arange(1))
        ] == [8, 8]
        for _ in range(4):
            found = computed(model, DOCS, TEXTS)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert graphed.counts["replayed"] > graphed.counts["recorded"] > 1
    assert machine.races == []


def test_top_k_ranks_on_a_gpu_without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    items = pa.table(
        {"item": range(50), "vector": list(rng.normal(size=(50, 4)).astype(np.float32))}
    )
    users = pa.record_batch(
        {
            "vector": list(rng.normal(size=(30, 4)).astype(np.float32)),
            "seen": [[n % 7] for n in range(30)],
        }
    )
    view = FeatureView(
        "best",
        ("id",),
        (Feature("items", "int64", max_items=5), Feature("scores", "float32", max_items=5)),
        60,
        60,
    )

    def ranked(**device: Any) -> list[Any]:
        model = TopK(k=5, items=items, exclude="seen", **device)
        runner = Runner(model, view)
        return list(runner.compute(users).features.to_pylist())

    expected = ranked(device="cpu")
    with simulated_cuda(monkeypatch) as machine:
        found = ranked()
    assert [row["items"] for row in found] == [row["items"] for row in expected]
    assert (machine.races, machine.waits) == ([], [])


def test_a_torch_without_attention_of_that_kind_pads(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch.nn.attention.varlen as of_torch

    def refused(*_: Any, **__: Any) -> None:
        raise RuntimeError("FlashAttention is not built")

    monkeypatch.setattr(of_torch, "varlen_attn", refused)
    with simulated_cuda(monkeypatch):
        model = converted(TextEncoder(folder, **SMALL), "bf16-eager")
        assert isinstance(model.forward, Encoder)
        assert len(computed(model, DOCS, TEXTS)) == 40


# ---- fewer bits


def test_products_of_8_bit_floats_are_near_and_no_row_depends_on_another() -> None:
    """torch computes them on a CPU, too."""
    torch.manual_seed(0)
    module = in_fp8(torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.Linear(32, 5)).bfloat16())
    assert [type(part) for part in module] == [Fp8Linear, torch.nn.Linear]  # type: ignore[attr-defined]
    layer, x = torch.nn.Linear(64, 32).bfloat16(), torch.randn(7, 3, 64).bfloat16()
    x[0, 0] *= 1000
    with torch.inference_mode():
        found, expected = Fp8Linear(layer)(x).float(), layer(x).float()
        alone = Fp8Linear(layer)(x[1:2]).float()
    assert found.shape == expected.shape
    assert torch.nn.functional.cosine_similarity(found, expected, dim=-1).min() > 0.995
    assert torch.equal(alone[0], found[1])


def test_tf32_is_allowed_while_the_model_computes_and_not_beyond() -> None:
    matmul: Any = torch.backends.cuda.matmul
    seen = []
    in_tf32(lambda: seen.append(matmul.fp32_precision))()
    with pytest.raises(ValueError, match="broken"):
        in_tf32(lambda: (_ for _ in ()).throw(ValueError("broken")))()
    assert (seen, matmul.fp32_precision) == (["tf32"], "none")


@pytest.mark.parametrize(
    ("name", "product"),
    [
        ("fp32-eager", ("linear", torch.float32, "none")),
        ("tf32-eager", ("linear", torch.float32, "tf32")),
        ("bf16-eager", ("linear", torch.bfloat16, "none")),
        ("fp8-eager", ("_scaled_mm", torch.float8_e4m3fn, "none")),
    ],
)
def test_a_share_of_the_peak_is_of_the_precision_that_is_computed_in(
    name: str, product: tuple[str, torch.dtype, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_file, "PEAK_SIZE", 32)
    matmul: Any = torch.backends.cuda.matmul
    made: list[tuple[Any, ...]] = []
    own = simulated_cuda_file.launch

    def launch(machine: Any, called: str, func: Any, args: Any, kwargs: Any) -> Any:
        if called in ("linear", "_scaled_mm"):
            made.append((called, args[0].dtype, matmul.fp32_precision))
            if called == "_scaled_mm":
                assert kwargs["use_fast_accum"]
        elif made and called != "T":
            made.append((called,))
        return own(machine, called, func, args, kwargs)

    with simulated_cuda(monkeypatch):
        model = Rows(mlp(), Device())
        convert(model, technique(name), lambda: [(torch.ones(3, 8),), (torch.ones(5, 8),)])
        monkeypatch.setattr(simulated_cuda_file, "launch", launch)
        assert model.device.peak_flops() > 0
    # six products, and nothing in between that takes time
    assert made == [product] * 6


@pytest.mark.parametrize(
    ("capability", "offered"),
    [
        (
            (7, 5),
            {
                "fp16-eager",
                "fp16-compile",
                "fp16-graphs",
                "fp16-autotune",
                "fp32-compile",
                "fp32-graphs",
                "fp32-autotune",
            },
        ),
        ((8, 0), {"bf16-eager", "tf32-eager"}),
        ((9, 0), {"fp8-eager", "fp8-compile"}),
    ],
)
def test_a_gpu_is_offered_what_it_can(
    capability: tuple[int, int], offered: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)  # Triton, too
    for name in TECHNIQUES.known():
        # those of other libraries are not looked for
        monkeypatch.setitem(TECHNIQUES._known, name, TECHNIQUES._known[name]._replace(power="-"))
    with simulated_cuda(monkeypatch, capability):
        device = Device()
        names = {found.name for found in candidates(device, Rows(mlp(), device))}
        assert offered <= names
        assert not {"bf16-eager", "tf32-eager"} & names or capability >= (8, 0)
        assert not {"fp8-eager", "fp8-compile"} & names or capability >= (9, 0)
    assert not {"tf32-eager", "fp8-eager", "fp32-graphs", "fp32-autotune"} & {
        found.name for found in candidates(Device("cpu"), Rows(mlp(), Device("cpu")))
    }


@pytest.mark.parametrize("name", ["gpu", "mps", "meta", "cuda:-1", "cpu:1", "", 0, True])
def test_a_device_of_another_name_is_refused(name: Any) -> None:
    with pytest.raises(ConfigError, match=f"device is cpu, cuda or cuda:N, got {name!r}"):
        Device(name)
