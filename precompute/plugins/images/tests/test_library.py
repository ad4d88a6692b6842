"""A tower that open_clip saved, beside open_clip itself, where that is installed."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from precompute.jobs.run.judge import library
from precompute.plugins.images.tests.people import image_encoder
from precompute.store.errors import ModelError
from tests.fixtures import MakeProject
from tests.jobs.test_own_library import Libraries, check_of
from tests.people import Made, view_of


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch) -> Libraries:
    made = Libraries()
    monkeypatch.setattr(library, "ask", made.ask)
    return made


def pictures_of_open_clip(folder: Path, tower: Callable[[Path], object]) -> Made:
    """As transformers' CLIP has them, for a tower that is saved in the folder."""
    made = image_encoder(folder)
    tower(folder / "open_clip")
    return dataclasses.replace(made, args={"path": "./open_clip", "device": "cpu"})


def tower_by_open_clip(folder: Path, **vision: Any) -> None:
    """A whole model with both of its towers, as open_clip itself makes it."""
    open_clip = pytest.importorskip("open_clip", reason="wants a torchvision of its own")
    from safetensors.torch import save_file

    from precompute.plugins.images.tests.test_open_clip_folder import CLIP, CONFIG, WEIGHTS

    text = {"context_length": 8, "vocab_size": 64, "width": 16, "heads": 2, "layers": 1}
    settings = {"embed_dim": 8, "vision_cfg": CLIP | vision, "text_cfg": text}
    torch.manual_seed(0)
    model = open_clip.model.CLIP(**settings)
    folder.mkdir()
    preprocess = {"mean": [0.48, 0.45, 0.4], "std": [0.26, 0.26, 0.27]}
    written = {"model_cfg": settings, "preprocess_cfg": preprocess}
    (folder / CONFIG).write_text(json.dumps(written))
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    save_file(tensors, folder / WEIGHTS)


@pytest.mark.parametrize("vision", [{}, {"output_tokens": True}])
def test_a_tower_that_open_clip_made_is_equal_to_open_clip(
    make_project: MakeProject, tmp_path: Path, libraries: Libraries, vision: dict[str, Any]
) -> None:
    """Where it is installed, which it is not by an extra of ours."""
    (tmp_path / "project").mkdir()
    made = pictures_of_open_clip(
        tmp_path / "project", lambda folder: tower_by_open_clip(folder, **vision)
    )
    found = check_of(make_project(made.table, view=view_of("image_encoder", made)).run())
    assert found.said.startswith(f"equal to open_clip_torch {found.version} in 8 rows (")
    assert libraries.asked == ["open_clip_torch"]


OPEN_CLIP = '''
"""Stands for open_clip, which is not installed: its front door, and a tower by hand behind it."""
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch.nn.functional import gelu

from precompute.plugins.images.tests.test_open_clip_folder import WEIGHTS, by_hand_clip, fitted


class Model:
    def __init__(self, folder):
        self._weights, self._training = load_file(folder / WEIGHTS), True

    def eval(self):
        self._training = False

    def encode_image(self, pixels):
        assert not self._training
        return {sign}by_hand_clip(self._weights, pixels, gelu)


def create_model_and_transforms(model_name, device):
    schema, _, folder = model_name.partition(":")
    assert (schema, device) == ("local-dir", "cpu")
    return Model(Path(folder)), None, lambda image: fitted(image, False)[0]
'''


@pytest.mark.parametrize("sign", ["", "-"])
def test_what_stands_for_open_clip_is_asked_of_its_folders(
    make_project: MakeProject,
    tmp_path: Path,
    libraries: Libraries,
    monkeypatch: pytest.MonkeyPatch,
    sign: str,
) -> None:
    """That it is asked as open_clip's front door is, and compared: its values are ours, by hand."""
    from precompute.plugins.images.tests.test_open_clip_folder import CLIP, clip_weights, saved

    stands = tmp_path / "stands"
    for name, content in (
        ("open_clip/__init__.py", OPEN_CLIP.replace("{sign}", sign)),
        ("open_clip_torch-9.9.dist-info/METADATA", "Name: open_clip_torch\nVersion: 9.9\n"),
    ):
        (stands / name).parent.mkdir(parents=True)
        (stands / name).write_text(content)
    monkeypatch.syspath_prepend(stands)
    for name in [name for name in sys.modules if name.partition(".")[0] == "open_clip"]:
        monkeypatch.delitem(sys.modules, name)
    (tmp_path / "project").mkdir()
    made = pictures_of_open_clip(
        tmp_path / "project", lambda folder: saved(folder, clip_weights(), CLIP)
    )
    project = make_project(made.table, view=view_of("image_encoder", made))
    try:
        if sign:
            with pytest.raises(ModelError, match=r"differs from open_clip_torch 9\.9 in 8 of 8"):
                project.run()
        else:
            said = check_of(project.run()).said
            assert said.startswith("equal to open_clip_torch 9.9 in 8 rows (")
    finally:
        sys.modules.pop("open_clip", None)
