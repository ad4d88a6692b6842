"""Candidates: which techniques are worth trying with a model on this machine. More can be forced by name."""

from __future__ import annotations

from precompute.models.device import Device
from precompute.models.torch_model import TorchModel
from precompute.techniques.table import REFERENCE, TABLE
from precompute.techniques.technique import Technique, technique


def candidates(device: Device, model: TorchModel) -> list[Technique]:
    """What this machine has of what they need, by what each is expected to gain, the most first; before them the reference."""
    gains = {name: technique(name).gain(device, model) for name in TABLE if name != REFERENCE}
    worthwhile = sorted((name for name in gains if gains[name] > 0), key=lambda name: -gains[name])
    return [technique(name) for name in (REFERENCE, *worthwhile)]
