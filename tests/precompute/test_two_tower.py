"""Two-tower: the same bytes from the same seed, what it learns, and what it makes of entities it
never saw."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from precompute.models.device import check_rows
from precompute.models.two_tower import TwoTower, train_two_tower
from precompute.registry import load_model
from precompute.store.errors import ConfigError, ModelError
from precompute.store.feature_view import Feature, FeatureView
from precompute.techniques.conversion import use_variant
from tests.precompute.simulated_cuda import simulated_cuda
from tests.precompute.test_cuda import computed

N_USERS, N_ITEMS = 20, 10
USERS = pa.table(
    {
        "user_id": list(range(N_USERS)),
        "team": ["even" if u % 2 == 0 else "odd" for u in range(N_USERS)],
    }
)
ITEMS = pa.table(
    {
        "item_id": list(range(N_ITEMS)),
        "genres": ["a b" if i % 2 == 0 else "c" for i in range(N_ITEMS)],
    }
)
PAIRS = np.array(
    [(u, i) for u in range(N_USERS) for i in range(N_ITEMS) if u % 2 == i % 2 and (u + i) % 3],
    np.int64,
)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def train(path: Path, users: pa.Table = USERS, items: pa.Table = ITEMS, **changed: Any) -> Path:
    arguments = {
        "dim": 8,
        "epochs": 25,
        "batch_pairs": 16,
        "learning_rate": 0.02,
        "seed": 0,
    } | changed
    fields = {"user_id": False, "team": False}, {"item_id": False, "genres": True}
    train_two_tower(path, users, items, PAIRS, *fields, **arguments)
    return path


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("two_tower") / "towers.safetensors")


def vectors(
    path: Path, tower: str, table: pa.Table, device: str | None = None
) -> npt.NDArray[np.float32]:
    made: npt.NDArray[np.float32] = TwoTower(str(path), tower, device=device).compute(
        table.combine_chunks().to_batches()[0]
    )["embedding"]
    assert (made.dtype, made.shape) == (np.dtype(np.float32), (table.num_rows, 8))
    return made


def test_one_seed_gives_the_same_bytes_and_another_seed_others(tmp_path: Path) -> None:
    torch.rand(7)  # the global generator must not matter
    files = [
        train(tmp_path / name, epochs=2, seed=seed) for name, seed in (("a", 0), ("b", 0), ("c", 1))
    ]
    digests = [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]
    assert digests[0] == digests[1] != digests[2]


def test_a_full_disk_leaves_the_towers_that_were_there(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(file: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    (path := tmp_path / "towers").write_bytes(trained.read_bytes())
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        train(path, epochs=1)
    assert path.read_bytes() == trained.read_bytes()
    assert list(tmp_path.iterdir()) == [path]


def test_each_team_is_recommended_its_own_items(trained: Path) -> None:
    scores = vectors(trained, "user", USERS) @ vectors(trained, "item", ITEMS).T
    best = np.argsort(-scores, axis=1)[:, : N_ITEMS // 2]
    assert (best % 2 == np.arange(N_USERS)[:, None] % 2).all()


def test_the_loss_falls_and_every_epoch_is_reported(tmp_path: Path) -> None:
    reported: list[tuple[int, float]] = []
    train(tmp_path / "t", epochs=10, progress=lambda epoch, loss: reported.append((epoch, loss)))
    assert [epoch for epoch, _ in reported] == list(range(1, 11))
    assert reported[-1][1] < reported[0][1]


def test_an_unknown_user_is_placed_by_the_other_fields(trained: Path) -> None:
    new = pa.table({"user_id": [999, 1000, None], "team": ["even", "odd", "odd"]})
    scores = vectors(trained, "user", new) @ vectors(trained, "item", ITEMS).T
    # which is why the key counts where rows are cached by their inputs
    assert TwoTower(str(trained), "user").reads() == ["user_id", "team"]
    best = np.argsort(-scores, axis=1)[:, : N_ITEMS // 2] % 2
    assert best.tolist() == [[0] * 5, [1] * 5, [1] * 5]


GIVEN = pa.table({"item_id": [3, 4, 999, 5, None], "genres": ["c", "a b c", None, "b a", "zzz a"]})


def test_a_vector_is_the_sum_of_its_fields_means_and_one_layer_more(trained: Path) -> None:
    """By its weights, worked out once more."""
    w = {name: t.double() for name, t in load_file(trained).items()}
    known = {str(i): i + 1 for i in range(N_ITEMS)}
    ids = [known.get(str(i), 0) for i in GIVEN["item_id"].to_pylist()]
    genres = [
        [{"a": 1, "b": 2, "c": 3}.get(genre, 0) for genre in (text or "").split(" ")]
        for text in GIVEN["genres"].to_pylist()
    ]
    bags = w["item.bags.0.weight"], w["item.bags.1.weight"]
    total = bags[0][ids] + torch.stack([bags[1][one].mean(0) for one in genres])
    hidden = (total @ w["item.hidden.weight"].T + w["item.hidden.bias"]).relu()
    expected = total + hidden @ w["item.out.weight"].T + w["item.out.bias"]
    np.testing.assert_allclose(vectors(trained, "item", GIVEN), expected.numpy(), atol=1e-6)


def test_the_engine_computes_any_rows_of_a_window(trained: Path) -> None:
    model = TwoTower(str(trained), "item", device="cpu")
    prepared = model.prepare(GIVEN.combine_chunks().to_batches()[0])
    rows = np.array([4, 1, 0])
    made = model.land(model.launch(model.inputs(prepared, rows)))["embedding"]
    np.testing.assert_allclose(made, vectors(trained, "item", GIVEN)[rows], atol=1e-7)
    assert model.flops(prepared, rows) == 3 * 4 * 8**2


@pytest.mark.parametrize("name", ["bf16-eager", "fp32-onednn"])
def test_other_precisions_compute_nearly_the_same(trained: Path, name: str) -> None:
    for tower, table in (("user", USERS), ("item", ITEMS)):
        model = TwoTower(str(trained), tower, device="cpu")
        use_variant(model, name, partial(table.slice, 0), None)
        found = model.compute(table.combine_chunks().to_batches()[0])["embedding"]
        expected = vectors(trained, tower, table)
        assert (found * expected).sum() / np.linalg.norm(found) / np.linalg.norm(expected) > 0.9999


def test_on_a_gpu_nothing_waits_and_graphs_are_for_one_token_a_row(
    trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    view = FeatureView("v", ("id",), (Feature("embedding", "float32", dim=8),), 60.0, 60.0)
    with simulated_cuda(monkeypatch) as machine:
        for tower, table in (("user", USERS), ("item", ITEMS)):
            model = TwoTower(str(trained), tower)
            assert model.device.is_cuda
            machine.waits.clear()
            found = computed(model, view, table.combine_chunks().to_batches()[0])
            np.testing.assert_allclose(found, vectors(trained, tower, table, "cpu"), atol=1e-6)
            assert (machine.races, machine.waits) == ([], [])
        examples = [model.device.put(model._tower.tokens(ITEMS.slice(0, n))) for n in (1, 3)]
        assert "input 1 has shape [1, " in check_rows(model.module, examples)


def test_ids_may_be_text_or_numbers(trained: Path) -> None:
    texts = USERS.set_column(0, "user_id", USERS["user_id"].cast(pa.string()))
    np.testing.assert_array_equal(vectors(trained, "user", texts), vectors(trained, "user", USERS))
    lists = ITEMS.set_column(1, "genres", pa.array([["a"]] * N_ITEMS))
    with pytest.raises(
        ModelError, match=r"'genres' is list.*: write array_to_string\(genres, ' '\)"
    ):
        vectors(trained, "item", lists)


def test_the_fingerprint_is_of_the_files_bytes_and_the_tower(trained: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.write_bytes(trained.read_bytes())
    user = TwoTower(str(trained), "user").fingerprint()
    assert (
        TwoTower(str(copy), "user").fingerprint()
        == user
        != TwoTower(str(copy), "item").fingerprint()
    )
    assert TwoTower(str(train(tmp_path / "other", epochs=1)), "user").fingerprint() != user


# ---- bad files


@pytest.mark.parametrize("size", [0, 7, 100, -1])
def test_a_file_cut_short_is_a_model_error(trained: Path, tmp_path: Path, size: int) -> None:
    (tmp_path / "cut").write_bytes(trained.read_bytes()[:size])
    with pytest.raises(ModelError, match=r"two_tower: .*cut (does not load: |is empty: )"):
        TwoTower(str(tmp_path / "cut"), "user")


@pytest.mark.parametrize(
    "metadata",
    [
        None,
        {"other": "thing"},
        {"two_tower": "{"},
        {"two_tower": "[]"},
        {"two_tower": "{}"},
        {"two_tower": json.dumps({"dim": 8, "towers": {"user": []}})},
        {"two_tower": json.dumps({"dim": 8, "towers": {"user": None}})},
        {
            "two_tower": json.dumps(
                {
                    "dim": 9,
                    "towers": {"user": [{"column": "x", "vocabulary": ["a"], "multiple": False}]},
                }
            )
        },
    ],
)
def test_weights_of_another_architecture_are_a_model_error(
    trained: Path, tmp_path: Path, metadata: dict[str, str] | None
) -> None:
    save_file(load_file(trained), tmp_path / "other", metadata=metadata)
    with pytest.raises(ModelError, match="two_tower"):
        load_model("two_tower", {"path": str(tmp_path / "other"), "tower": "user"})


def test_a_pickle_is_not_loaded(tmp_path: Path) -> None:
    torch.save({"user.bags.0.weight": torch.zeros(1)}, tmp_path / "t.pt")
    with pytest.raises(ModelError, match=r"t\.pt is a zip archive, which is what torch\.save"):
        TwoTower(str(tmp_path / "t.pt"), "user")


def test_an_unknown_tower_or_file_is_a_config_error(trained: Path) -> None:
    with pytest.raises(ConfigError, match=r"no tower 'itm' \(it has: user, item\)"):
        TwoTower(str(trained), "itm")
    with pytest.raises(ConfigError, match="nothing at /nowhere"):
        TwoTower("/nowhere", "item")


def whole(trained: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    with safe_open(str(trained), framework="pt") as file:
        return load_file(trained), json.loads(file.metadata()["two_tower"])


def test_what_is_not_known_of_its_own_file_is_refused(trained: Path, tmp_path: Path) -> None:
    state, meta = whole(trained)
    field = meta["towers"]["user"][0]
    others: dict[str, list[tuple[Any, Any, dict[str, str]]]] = {
        "surprise, which is not known": [
            (state, meta | {"surprise": 1}, {}),
            (state, meta, {"surprise": "1"}),
            (state, {**meta, "towers": {"user": [field | {"surprise": 1}]}}, {}),
        ],
        "does not load": [
            (state | {"third.bags.0.weight": torch.zeros(1)}, meta, {}),
            (state | {"user.extra": torch.zeros(1)}, meta, {}),
            ({name: of for name, of in state.items() if name != "user.out.bias"}, meta, {}),
            ({name: of.double() for name, of in state.items()}, meta, {}),
            ({name: of.to(torch.int8) for name, of in state.items()}, meta, {}),
            *(
                (state, {**meta, "towers": meta["towers"] | {"user": [{**field, **wrong}]}}, {})
                for wrong in (
                    {"multiple": "no"},
                    {"vocabulary": field["vocabulary"][:-1] + field["vocabulary"][:1]},
                    {"vocabulary": [1] * len(field["vocabulary"])},
                    {"column": 3},
                )
            ),
        ],
    }
    for said, cases in others.items():
        for tensors, described, notes in cases:
            metadata = {"two_tower": json.dumps(described), **notes}
            save_file(tensors, tmp_path / "other", metadata=metadata)
            with pytest.raises((ConfigError, ModelError), match=said):
                TwoTower(str(tmp_path / "other"), "user")
