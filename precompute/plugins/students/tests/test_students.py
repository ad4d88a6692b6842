"""Students of a text encoder: what is made of a tiny teacher, and a training that is killed."""

from __future__ import annotations

import errno
import inspect
import itertools
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from model2vec import StaticModel
from tokenizers import Tokenizer, models, pre_tokenizers

from precompute.models.text_encoder import TextEncoder
from precompute.plugins.students import static_table, text_student, training
from precompute.plugins.students import student as student_file
from precompute.plugins.students.static_table import StaticTable
from precompute.plugins.students.student import USES, rates
from precompute.plugins.students.text_lesson import (
    _OF_ITS_TEACHER,
    TextLesson,
    trainable,
    transformer_of,
)
from precompute.plugins.students.text_student import (
    FewerLayers,
    Int8Aware,
    Pruned,
    RoundedLinear,
)
from precompute.plugins.students.training import Course, Lesson, Made, Recipe, Trained, train
from precompute.registry import load_model
from precompute.store.errors import ModelError
from precompute.store.feature_view import Feature, FeatureView
from precompute.techniques.machine import has_int8_products
from precompute.techniques.onednn import PerRowLinear
from tests.precompute.sentence_models import WORDS, read, sentence_model

WITH_VNNI = pytest.mark.skipif(
    not has_int8_products(), reason="oneDNN's 8-bit sums overflow without VNNI"
)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> TextEncoder:
    folder = tmp_path_factory.mktemp("teacher")
    sentence_model(folder, limit=20)
    return TextEncoder(str(folder / "saved"))


def texts(rows: int) -> list[str]:
    rng = np.random.default_rng(0)
    return [" ".join(rng.choice(WORDS, rng.integers(1, 30))) for _ in range(rows)]


@pytest.fixture
def lesson(teacher: TextEncoder, tmp_path: Path) -> Lesson:
    return lesson_of(teacher, tmp_path)


def lesson_of(teacher: TextEncoder, tmp_path: Path) -> Lesson:
    batch = pa.record_batch({"text": pa.array(texts(80))})
    vectors = pa.FixedSizeListArray.from_arrays(
        pa.array(teacher.compute(batch)["embedding"].ravel(), pa.float32()), 16
    )
    rows = pa.table({"text": batch.column("text"), "embedding": vectors})
    view = FeatureView("docs", ("id",), (Feature("embedding", "float32", 16),), 1.0, 1.0)
    args = {"path": str(teacher.folder), "max_tokens": 20, "token_cache": str(tmp_path)}
    return Lesson(
        view, teacher, "text_encoder", args, rows, 3, time.monotonic() + 60, tmp_path, said
    )


def said(line: str) -> None:
    """Nobody listens."""


def vectors_of(model: TextEncoder) -> np.ndarray:
    found = model.compute(pa.record_batch({"text": pa.array(texts(100)[80:])}))["embedding"]
    assert isinstance(found, np.ndarray)
    return found


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    return float((a * b).sum(1).mean())


class Killed(BaseException):
    """What a kill -9 leaves: the files that are there."""


def course(path: Path, steps: int | None = 12, **changes: object) -> Course:
    return Course("tiny", "d", path / "c.checkpoint", said, steps=steps, **changes)  # type: ignore[arg-type]


def trained(lesson: Lesson, course: Course, dies_at: int = -1) -> dict[str, torch.Tensor]:
    text = TextLesson(lesson)
    student = text_student.with_layers(transformer_of(lesson), [1])

    def loss(step: int, progress: float) -> torch.Tensor:
        if step == dies_at:
            raise Killed
        return text.loss(student, step)

    train(student, loss, course)
    return student.state_dict()


def test_a_killed_training_ends_as_one_that_was_not(lesson: Lesson, tmp_path: Path) -> None:
    whole = trained(lesson, course(tmp_path, checkpoint_s=1e9))
    assert not (tmp_path / "c.checkpoint").exists()
    for dies_at in (7, 10):
        with pytest.raises(Killed):
            trained(lesson, course(tmp_path, checkpoint_s=0), dies_at)
        assert (tmp_path / "c.checkpoint").exists()
    again = trained(lesson, course(tmp_path, checkpoint_s=1e9))
    assert {
        name: torch.equal(again[name], value) for name, value in whole.items()
    } == dict.fromkeys(whole, True)


def test_a_damaged_checkpoint_is_named(lesson: Lesson, tmp_path: Path) -> None:
    (tmp_path / "c.checkpoint").write_bytes(b"damaged")
    with pytest.raises(ModelError, match=r"c\.checkpoint is damaged .*: remove it"):
        trained(lesson, course(tmp_path))


@pytest.mark.parametrize("place", [0, 32, 40, 60, -1])
def test_a_checkpoint_that_lost_a_bit_is_not_learned_from(
    lesson: Lesson, tmp_path: Path, place: int
) -> None:
    """In its checksum, the length of its head, its head, and a weight."""
    with pytest.raises(Killed):
        trained(lesson, course(tmp_path, checkpoint_s=0), 3)
    file = tmp_path / "c.checkpoint"
    data = bytearray(file.read_bytes())
    data[place] ^= 1
    file.write_bytes(data)
    with pytest.raises(ModelError, match=r"c\.checkpoint is damaged \(it differs from its check"):
        trained(lesson, course(tmp_path))


def test_a_checkpoint_of_other_rows_is_left_alone(lesson: Lesson, tmp_path: Path) -> None:
    with pytest.raises(Killed):
        trained(lesson, course(tmp_path, checkpoint_s=0), 3)
    lines: list[str] = []
    other = replace(course(tmp_path, steps=2), digest="other", announce=lines.append)
    trained(lesson, other)
    assert "is of another training" in lines[0]


def test_a_full_disk_is_named(
    lesson: Lesson, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("precompute.store.disk.durable_file._write", full)
    with pytest.raises(ModelError, match=r"no space left while writing .*/c\.checkpoint: .* free"):
        trained(lesson, course(tmp_path, checkpoint_s=0))
    recipe = FewerLayers(1, steps=1)
    with pytest.raises(ModelError, match=r"no space left while writing .*/model: .* free"):
        recipe.make(lesson, tmp_path / "student")


def test_training_ends_when_its_time_is_over(
    lesson: Lesson, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[float] = []
    text = TextLesson(lesson)
    student = text_student.with_layers(transformer_of(lesson), [1])
    # a second a step, but for one that takes 20
    seconds = itertools.accumulate(20.0 if at == 10 else 1.0 for at in itertools.count())
    monkeypatch.setattr(training, "time", SimpleNamespace(monotonic=lambda: next(seconds)))

    def loss(step: int, progress: float) -> torch.Tensor:
        done.append(progress)
        return text.loss(student, step)

    assert train(student, loss, course(tmp_path, None, until=60.0)) == (40, 0.0)
    assert len(done) == 40
    assert done == sorted(done)
    # in equal steps, fewer of which are left after the long one
    assert done[8] == pytest.approx(0.08, abs=0.02)
    assert done[-1] == pytest.approx(1, abs=0.06)
    # along a line up to a twentieth, and then a cosine
    rates = [training._rate(progress) for progress in (0.01, 0.05, 0.5, 1.0)]
    assert rates == pytest.approx([0.2, 1, 0.5, 0], abs=0.01)


def test_without_time_nothing_is_trained(tmp_path: Path) -> None:
    layer = torch.nn.Linear(1, 1)
    with pytest.raises(ModelError, match="tiny: no time was left to train it"):
        train(
            layer,
            lambda step, _: layer(torch.ones(1)).square().sum(),
            course(tmp_path, None, until=time.monotonic()),
        )


def test_what_was_spent_before_a_stop_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = torch.nn.Linear(1, 1)
    # each call of it is a second
    seconds = itertools.count(time.monotonic()).__next__
    monkeypatch.setattr(training, "time", SimpleNamespace(monotonic=seconds))

    def until(dies_at: int) -> Trained:
        def loss(step: int, _: float) -> torch.Tensor:
            if step == dies_at:
                raise Killed
            return layer(torch.ones(1)).square().sum()

        return train(layer, loss, course(tmp_path, checkpoint_s=0))

    for dies_at in (3, 7):
        with pytest.raises(Killed):
            until(dies_at)
    done = until(12)
    assert done.steps == 12
    assert done.earlier_s == pytest.approx(7.0)


def test_every_epoch_has_every_text_whatever_the_step(lesson: Lesson, teacher: TextEncoder) -> None:
    text = TextLesson(lesson, spans=0.0)
    first, lengths, batches = text._epoch(0)
    assert sorted(np.concatenate(batches)) == list(range(80))
    assert set(first) == {0}
    assert lengths.max() == 20
    spans = TextLesson(lesson)
    first, lengths, _ = spans._epoch(1)
    assert 20 < (lengths < text._tokens.lengths).sum() < 60
    later = [spans._batch(step) for step in range(3)]
    for ids, mask in later:
        # whatever is cut, a text begins and ends as all do
        last = ids.gather(1, mask.sum(1, keepdim=True) - 1)
        assert (set(ids[:, 0].tolist()), set(last[:, 0].tolist())) == ({1}, {2})
        assert int((ids == 2).sum()) == len(ids)
    ids, mask = TextLesson(lesson)._batch(2)
    assert torch.equal(ids, later[2][0])
    assert torch.equal(mask, later[2][1])
    # a prompt would not stay whole
    prompted = TextEncoder(str(teacher.folder), prompt=f"{WORDS[0]} ")
    first, _, _ = TextLesson(replace(lesson, model=prompted))._epoch(1)
    assert set(first) == {0}


@pytest.mark.parametrize(
    ("recipe", "config", "least"),
    [
        (FewerLayers(1, steps=40), {"num_hidden_layers": 1}, 0.82),
        (Pruned(50, steps=40), {"intermediate_size": 12}, 0.9),
        pytest.param(Int8Aware(steps=40), {}, 0.99, marks=WITH_VNNI),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_a_student_is_a_folder_that_others_read(
    teacher: TextEncoder,
    lesson: Lesson,
    tmp_path: Path,
    recipe: Recipe,
    config: dict[str, int],
    least: float,
) -> None:
    assert recipe.refuses(lesson) == ""
    made = recipe.make(lesson, tmp_path / "student")
    assert made == Made(
        "text_encoder",
        {"path": "./model", "max_tokens": 20},
        "int8-dynamic-onednn" if recipe.by == "qat" else None,
    )
    folder = tmp_path / "student" / "model"
    student = TextEncoder(str(folder), max_tokens=20)
    made_config = transformer_of(replace(lesson, model=student)).config
    assert {name: getattr(made_config, name) for name in config} == config
    own = vectors_of(student)
    theirs = read(folder).encode(texts(100)[80:])
    assert cosine(own, theirs) == pytest.approx(1, abs=1e-5)
    assert cosine(own, vectors_of(teacher)) > least
    assert not list(tmp_path.glob("*.safetensors"))
    # words that no row has are as they were
    words, before = (
        transformer_of(replace(lesson, model=one)).embeddings.parameters()
        for one in (student, teacher)
    )
    assert all(map(torch.equal, words, before))


def test_neurons_that_do_nothing_go_first(lesson: Lesson) -> None:
    student = trainable(transformer_of(lesson).config, transformer_of(lesson).state_dict())
    layers: Any = student.encoder.layer
    for layer in layers:
        layer.output.dense.weight.data[:, 3:9] = 0
    masks = text_student.masked(student)
    text_student.take_out(TextLesson(lesson), student, masks, 18, 1.0, 0)
    left = [1.0] * 3 + [0.0] * 6 + [1.0] * 15
    assert [masked.mask.tolist() for masked in masks] == [left] * 2


def test_neurons_go_however_short_the_training_was(lesson: Lesson, tmp_path: Path) -> None:
    Pruned(50, steps=1).make(lesson, tmp_path / "student")
    made = TextEncoder(str(tmp_path / "student" / "model"))
    config = transformer_of(replace(lesson, model=made)).config
    assert (config.num_attention_heads, config.head_dim, config.intermediate_size) == (2, 8, 12)


def test_layers_begin_as_the_teachers_from_first_to_last(lesson: Lesson) -> None:
    assert text_student.spread(6, 3) == [0, 2, 5]
    assert text_student.spread(12, 1) == [0]
    teacher = transformer_of(lesson)
    last = text_student.with_layers(teacher, [1]).state_dict()
    for name, value in teacher.state_dict().items():
        if name.startswith("encoder.layer.1."):
            assert torch.equal(last[name.replace("layer.1.", "layer.0.")], value)


@WITH_VNNI
def test_rounding_is_what_the_technique_computes() -> None:
    linear = torch.nn.Linear(40, 24)
    x = torch.linspace(-2, 3, 200).reshape(5, 40).sin()
    with torch.no_grad():
        divisors = torch.linspace(0.5, 3, 40)
        trained, computed = RoundedLinear(linear, divisors), PerRowLinear(linear, divisors)
        assert torch.allclose(trained(x), computed(x), atol=1e-5)
        assert not torch.allclose(trained(x), PerRowLinear(linear)(x), atol=1e-5)
    weight = linear.weight
    trained(x).sum().backward()
    assert weight.grad is not None
    assert weight.grad.abs().min() > 0


def test_a_table_is_of_texts_and_of_texts_in_bytes(lesson: Lesson, tmp_path: Path) -> None:
    recipe = StaticTable(pieces=50, steps=3)
    in_bytes = lesson.rows.set_column(0, "text", lesson.rows["text"].cast(pa.binary()))
    made = [
        recipe.make(one, tmp_path / name)
        for name, one in (("a", lesson), ("b", replace(lesson, rows=in_bytes)))
    ]
    assert made[0] == made[1] == Made("static_embedding", {"path": "./model"})
    for name in ("model.safetensors", "tokenizer.json", "config.json"):
        first, second = ((tmp_path / of / "model" / name).read_bytes() for of in "ab")
        assert first == second


def test_a_table_is_a_folder_that_model2vec_reads(lesson: Lesson, tmp_path: Path) -> None:
    StaticTable(pieces=50, steps=3).make(lesson, tmp_path / "student")
    folder = tmp_path / "student" / "model"
    batch = pa.record_batch({"text": pa.array(texts(20))})
    student = load_model("static_embedding", {"path": str(folder), "device": "cpu"})
    theirs = StaticModel.from_pretrained(folder, force_download=False).encode(texts(20))
    made = np.asarray(student.compute(batch)["embedding"])
    np.testing.assert_allclose(made, theirs, rtol=1e-5, atol=1e-6)


def test_a_table_of_a_vocabulary_with_holes_is_one(tmp_path: Path) -> None:
    words = Tokenizer(models.WordLevel({"film": 0, "cold": 3}, unk_token="film"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "tokenizer.json"))
    table = static_table.Table(np.eye(4, dtype=np.float32))
    static_table._write(tmp_path / "model", table, tmp_path / "tokenizer.json", 9)
    model = StaticModel.from_pretrained(tmp_path / "model", force_download=False)
    student = load_model("static_embedding", {"path": str(tmp_path / "model")})
    found = student.compute(pa.record_batch({"text": pa.array(["cold"])}))["embedding"]
    assert model.encode(["cold"]).tolist() == np.asarray(found).tolist() == [[0, 0, 0, 1]]


def test_a_table_begins_in_its_time(lesson: Lesson, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[tuple[str, np.ndarray]] = []

    def killed(table: static_table.Table, loss: object, course: Course) -> Trained:
        begun.append((course.digest, table.bag.weight.detach().numpy().copy()))
        raise Killed

    monkeypatch.setattr(static_table, "train", killed)
    monkeypatch.setattr(static_table, "TEACHER_TEXTS", 8)
    for until in (lesson.until, 0.0):
        with pytest.raises(Killed):
            StaticTable(pieces=50).make(replace(lesson, until=until), lesson.checkpoints)
    (whole, every), (short, first) = begun
    # what there was time for changes nothing of whose training it is
    assert whole == short
    # nearly every token has a vector of its own
    assert len(np.unique(every, axis=0)) > len(every) - 5 > 20
    values, times = np.unique(first, axis=0, return_counts=True)
    assert sorted(times) == [*[1] * 8, len(first) - 8]
    (rest,) = values[times > 1]
    assert 0 < np.abs(rest).max() < 0.01


@pytest.mark.parametrize(
    ("prompts", "refused"),
    [
        ({}, False),
        ({"prompt": "document: ", "query_prompt": "document: "}, False),
        ({"query_prompt": "query: "}, True),
        ({"prompt": "document: "}, True),
    ],
)
def test_a_table_has_no_prompt_for_queries(
    lesson: Lesson, teacher: TextEncoder, prompts: dict[str, Any], refused: bool
) -> None:
    model = TextEncoder(str(teacher.folder), **prompts)
    why = StaticTable().refuses(replace(lesson, model=model))
    assert ("what is searched by with a prompt of its own" in why, why == "") == (
        refused,
        not refused,
    )


def test_a_students_record_has_every_argument_of_its_teacher() -> None:
    arguments = set(inspect.signature(TextEncoder).parameters) - set(_OF_ITS_TEACHER)
    place, others = USES["text_encoder"]
    assert {place, *others} == arguments | {"path"}


def test_what_is_quick_is_measured_for_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]

    class Takes:
        def __init__(self, s: float) -> None:
            self.s, self.rows = s, 0

        def fingerprint(self) -> str:
            return "takes"

        def compute(self, batch: pa.RecordBatch) -> dict[str, np.ndarray]:
            self.rows += batch.num_rows
            clock[0] += self.s * batch.num_rows
            return {"x": np.asarray(batch.column("x"))}

    monkeypatch.setattr(student_file, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    view = FeatureView("takes", ("id",), (Feature("x", "float64"),), 1.0, 1.0)
    models = {"quick": Takes(1e-5), "slow": Takes(0.01)}
    rows = pa.table({"x": np.arange(100.0)})
    found = rates({name: (one, list) for name, one in models.items()}, view, rows, 3, 1e9)
    assert {name: rate for name, (rate, _) in found.items()} == pytest.approx(
        {"quick": 1e5, "slow": 100.0}
    )
    # 1 ms, and then 200 times that; or a second, as ever
    assert {name: one.rows for name, one in models.items()} == {
        "quick": pytest.approx(3 * 201 * 100, abs=300),
        "slow": 3 * 100,
    }


def test_what_cannot_be_made_is_refused(
    lesson: Lesson, teacher: TextEncoder, tmp_path: Path
) -> None:
    recipe = FewerLayers(2)
    assert recipe.refuses(lesson) == "the teacher has 2 layers"
    few = replace(lesson, rows=lesson.rows.slice(0, 49))
    assert Pruned(30).refuses(few) == "there are 49 rows to learn from, and 50 are needed"
    sentence_model(tmp_path, "distilbert")
    other = TextEncoder(str(tmp_path / "saved"))
    assert "no plain BERT (DistilBertModel)" in recipe.refuses(replace(lesson, model=other))
    another = replace(lesson, model=teacher.__class__.__mro__[1], use="mine.Model")  # type: ignore[arg-type]
    assert Int8Aware().refuses(another) == "the teacher is no text_encoder (mine.Model)"
