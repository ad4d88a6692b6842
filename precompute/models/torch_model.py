"""Torch model: the base of models by torch: a :class:`torch.nn.Module` between Arrow columns and
features, in the stages that the engine overlaps.

A model of this kind says how rows become tensors (:meth:`TorchModel.prepare`,
:meth:`TorchModel.tensors`) and how the module's outputs become features
(:meth:`TorchModel.features`); copying, launching and waiting are the same for all and stand here.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from precompute.model import Features, Prepared
from precompute.models.device import Device, Fetch, shapes_of

Tensors = tuple[torch.Tensor, ...]


class TorchModel(ABC):
    """A :class:`precompute.model.StagedModel` around a module.

    Args:
        module: the reference, in float32; ``module(*tensors)`` returns a tensor or a tuple of them.
        device: where it runs; a GPU where there is one.
    """

    cost_unit = "rows"
    start_cost = 4096
    """Cost of the first batches, in rows, where a subclass knows no better: a small MLP in two
    lanes took 8 % (float32) and 20 % (bfloat16) less of an AMD Zen 5's time than with 2,048."""
    max_cost: int | None = None
    concurrent = False
    """Whether several threads may prepare and compute in it at once, each rows of its own: then on
    a CPU the engine tries that. A model and a module that keep nothing from one call to the next
    may say so."""
    variant = "fp32-eager"
    """Name of what it computes by: see :mod:`precompute.techniques.table`."""

    def __init__(self, module: torch.nn.Module, device: Device | None = None) -> None:
        self.device = device or Device()
        self.module = module.eval().requires_grad_(False).to(self.device.torch)
        self.device.shapes = shapes_of(self.module)
        self.forward: Callable[..., torch.Tensor | Tensors] = self.module

    @abstractmethod
    def fingerprint(self) -> str:
        """A text that changes whenever any output may."""

    @abstractmethod
    def prepare(self, batch: pa.RecordBatch) -> Prepared:
        """Rows made ready, without the device."""

    @abstractmethod
    def tensors(self, prepared: Prepared, rows: npt.NDArray[np.int64]) -> Tensors:
        """The module's inputs for these positions, on the host."""

    @abstractmethod
    def features(self, outputs: Sequence[npt.NDArray[Any]]) -> Features:
        """The module's outputs as features."""

    def use(
        self, forward: Callable[..., torch.Tensor | Tensors], dtype: torch.dtype = torch.float32
    ) -> None:
        """Compute with a converted module from now on; ``dtype`` is what its large products are
        computed in."""
        self.forward = forward
        self.device.dtype, self.device.pack = dtype, None
        # a conversion says what it is
        self.variant = "fp32-eager" if forward is self.module else "?"
        if self.device.is_cuda:
            self._place_reference(forward)

    def laid_out(
        self,
        module: torch.nn.Module,
        dtype: torch.dtype,
        compiled: Callable[[torch.nn.Module], Any] = lambda module: module,
    ) -> Any:
        """A copy of the reference as this model calls it on its device: where that takes another
        layout of its inputs than the reference, around the module.

        Args:
            module: computes as the reference does.
            dtype: what its large products are computed in.
            compiled: compiles what can be, the module or the larger part of it.
        """
        return compiled(module)

    def _place_reference(self, forward: Callable[..., torch.Tensor | Tensors]) -> None:
        """Keep one copy of the weights on the GPU: the reference's go to the host while something
        else computes that shares none of them, and come back when it computes itself."""
        module = (
            forward if isinstance(forward, torch.nn.Module) else getattr(forward, "module", None)
        )
        own = {id(parameter) for parameter in self.module.parameters()}
        apart = module is not None and own.isdisjoint(
            id(parameter) for parameter in module.parameters()
        )
        self.module.to("cpu" if apart else self.device.torch)
        if apart:
            self.device.release()

    def in_float32(self) -> Self:
        """The same model by the reference, whatever this one computes by: its weights are shared,
        and both may compute at once where the model is ``concurrent``."""
        other = copy.copy(self)
        other.device = copy.copy(self.device)
        other.use(other.module)
        return other

    def restorer(self) -> Callable[[], None]:
        """What puts the present conversion back after others were used."""
        forward = self.forward
        dtype = self.device.dtype
        pack = self.device.pack
        variant = self.variant

        def restore() -> None:
            self.use(forward, dtype)
            self.device.pack, self.variant = pack, variant

        return restore

    def flops(self, prepared: Prepared, rows: npt.NDArray[np.int64]) -> float:
        """Unknown, unless the model says so."""
        return 0.0

    def inputs(self, prepared: Prepared, rows: npt.NDArray[np.int64]) -> Tensors:
        return self.device.pin(self.tensors(prepared, rows))

    @torch.inference_mode()
    def launch(self, inputs: Tensors) -> Fetch:
        outputs = self.forward(*self.device.put(inputs))
        return self.device.fetch(outputs if isinstance(outputs, (tuple, list)) else [outputs])

    def land(self, launched: Fetch) -> Features:
        return self.features(launched.arrays())

    def compute(self, batch: pa.RecordBatch) -> Features:
        """All rows of a batch at once; one that the model finds unusable while preparing raises
        ValueError.

        Returns:
            the features, as :meth:`features` makes them.
        """
        prepared = self.prepare(batch)
        for reason in prepared.bad.values():
            raise ValueError(reason)
        return self.land(self.launch(self.inputs(prepared, np.arange(batch.num_rows))))
