"""Conversion: makes a model compute by a technique, lists the techniques worth trying on a machine,
and gives float32 to compare with.

The reference is always the module in float32, run eagerly: a conversion leaves it as it is, so that
both can be computed and compared by :mod:`precompute.techniques.accuracy`.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch

from precompute.engine.batches import batches_by_cost
from precompute.engine.rows import Outcome, Rows
from precompute.model import CheckingModel, Model
from precompute.models.device import Device
from precompute.models.torch_model import Tensors, TorchModel
from precompute.registry import built_in, class_of, described
from precompute.store.errors import ConfigError, PrecomputeError
from precompute.store.feature_view import FeatureView
from precompute.techniques.row_errors import differing
from precompute.techniques.table import NAMES, REFERENCE, is_here
from precompute.techniques.technique import Technique, elements, technique


def not_torch() -> str:
    """What is said of a model that torch does not compute."""
    classes = [(use, class_of(use)) for use in built_in()]
    names = [
        use
        for use, made_by in classes
        if isinstance(made_by, type) and issubclass(made_by, TorchModel)
    ]
    return (
        f"this model computes in its own way; only torch models ({', '.join(names)}) have other"
        " precisions"
    )


def use_variant(
    model: Model, variant: str, sample: Callable[[], pa.Table], folder: Path | None
) -> None:
    """:func:`convert` a model as it was loaded, by the name of a technique; nothing is done when it
    computes by that already.

    Args:
        sample: makes some hundred rows of the source: shapes to expect, and the scales of a static
            int8. The same rows each time.
        folder: as for :func:`convert`.

    Raises:
        ConfigError: it cannot be done with this model or on this machine.
    """
    wanted = technique(variant)
    if not isinstance(model, TorchModel):
        raise ConfigError(f"precision {variant}: {not_torch()}")
    if model.variant == variant:
        return

    convert(model, wanted, lambda: _examples(model, sample()), folder)
    model.variant = variant


def _examples(model: TorchModel, rows: pa.Table) -> Sequence[Tensors]:
    """Batches of those rows that the model can take.

    Raises:
        ConfigError: there are none.
    """
    batches: list[Tensors] = []
    for batch in rows.combine_chunks().to_batches():
        bad = model.unusable(batch) if isinstance(model, CheckingModel) else {}
        good = [row for row in range(batch.num_rows) if row not in bad]
        if good:
            prepared = model.prepare(batch.take(pa.array(good)))
            usable = np.setdiff1d(np.arange(len(good)), list(prepared.bad))
            chosen = [
                usable[positions]
                for positions in batches_by_cost(prepared.costs[usable], model.start_cost)
            ]
            # one number of rows would be taken for a constant
            if len({len(positions) for positions in chosen}) == 1:
                chosen.append(np.append(chosen[0], chosen[0][:1]))
            batches += [model.tensors(prepared, positions) for positions in chosen]
    if not batches:
        if not rows.num_rows:
            raise ConfigError(
                "the source has no rows, to show the conversion; what needs none is float32"
            )
        raise ConfigError(
            f"none of the source's first {rows.num_rows:,} rows is usable, to show the conversion:"
            " let its SQL leave out or order last what is bad, or compute in float32"
        )
    return batches


def convert(
    model: TorchModel,
    wanted: Technique,
    examples: Callable[[], Sequence[Tensors]],
    folder: Path | None = None,
) -> None:
    """Let a model compute by a technique from now on. Its ``module``, the reference, stays as it
    is; float32 weights are shared with it.

    Args:
        model: its ``forward`` is replaced, see :meth:`TorchModel.use`.
        examples: makes some batches as :meth:`TorchModel.tensors` does, for the reference; not
            called for the reference itself. A dimension that differs between them is compiled as
            variable, so there should be two or more, of different sizes. For one that calibrates
            their rows give the scales: some hundred rows, of all lengths.
        folder: keeps what took long to make (graphs, engines), in files named by the model's
            fingerprint, its weights, the versions and the CPU. A static one keeps its scales,
            whatever the examples are later. What lies there is trusted.
            Without a folder it is made again each time.

    Raises:
        ConfigError: it cannot be done on this machine, or not with this module; the model then
            computes the reference.
    """
    try:
        with warnings.catch_warnings(), _quiet():
            # torch's exporter deprecates parts of itself
            warnings.simplefilter("ignore")
            _convert(model, wanted, examples, folder)
    except PrecomputeError as exc:
        raise ConfigError(f"precision {wanted.name}: {exc}") from exc
    except Exception as exc:
        # a compiler or an exporter may raise anything about a module it does not know
        cause = (str(exc).strip().splitlines() or [""])[0]
        raise ConfigError(
            f"precision {wanted.name} does not work with this model: {type(exc).__name__}: {cause}"
        ) from exc


def _convert(
    model: TorchModel,
    wanted: Technique,
    examples: Callable[[], Sequence[Tensors]],
    folder: Path | None,
) -> None:
    # before examples are made: a model may lay out its inputs by what computes them
    model.use(model.module)
    if wanted.name == REFERENCE:
        return
    missing = wanted.missing(model.device)
    if missing:
        raise ConfigError(missing)
    batches = [model.device.put(example) for example in examples()]
    forward = wanted.converted(model, batches, folder)
    model.use(forward, wanted.dtype)
    try:
        if model.device.is_cuda:
            # as the model lays them out for what computes them now
            batches = [model.device.put(example) for example in examples()]
        with torch.inference_mode():
            # the first calls compile; and a module that reads its layers' weights fails here, not
            # in the run
            for batch in (max(batches, key=elements), min(batches, key=elements)):
                model.forward(*batch)
    except BaseException:
        model.use(model.module)
        raise
    model.device.pack = wanted.pack


@contextmanager
def _quiet() -> Iterator[None]:
    """Exporters and quantisers log advice for their own developers."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


def candidates(device: Device, model: TorchModel) -> list[Technique]:
    """The techniques worth trying with this model on this machine, by expected gain, the largest
    first; before them the reference."""
    gains = {
        name: technique(name).gain(device, model)
        for name in NAMES
        if name != REFERENCE and is_here(name)
    }
    worthwhile = sorted((name for name in gains if gains[name] > 0), key=lambda name: -gains[name])
    return [technique(name) for name in (REFERENCE, *worthwhile)]


log = logging.getLogger(__name__)

QUICK = "fp32-onednn"
"""Float32 by the most library there is besides torch's own products: MiniLM 2.7 times as fast on
AVX512, 1.2 times on AVX2."""
PROOF_ROWS = 16
"""Rows that both compute: any of them, in batches of other sizes. They take as long as three times
as many by :data:`QUICK`."""


def quick_reference(model: TorchModel) -> TorchModel | None:
    """The same model by :data:`QUICK`, whatever it computes by; None where that gains nothing, or
    cannot be made."""
    quick = technique(QUICK)
    if quick.missing(model.device) or quick.gain(model.device, model) <= 1:
        return None
    other = model.in_float32()
    try:
        other.use(quick.converted(other, (), None), quick.dtype)
    except Exception as exc:
        # a user's own module may be anything; then the reference computes itself
        log.info(
            "%s cannot compute this model, and %s takes its place: %s",
            QUICK,
            REFERENCE,
            described(exc),
        )
        return None
    return other


def proof_rows(quick: Outcome) -> Rows:
    """Which rows the module itself should compute, to see that ``quick`` is what it would have
    made: some of those there, and all that were rejected."""
    rejected = np.array([rejection.row for rejection in quick.rejections], np.int64)
    return np.union1d(quick.rows[:PROOF_ROWS], rejected)


def is_proven(quick: Outcome, proof: Outcome, rows: Rows, view: FeatureView) -> bool:
    """Whether values of :data:`QUICK` are those of float32, and rows without any have none there
    either: a fault that its packed layers share with those of another precision would not be seen
    by comparing the two.

    Args:
        quick: of a sample, by :func:`quick_reference`.
        proof: of its rows ``rows``, by the module itself.
        rows: as of :func:`proof_rows`.
    """
    wanted = np.intersect1d(quick.rows, rows)
    if not len(wanted) or not np.array_equal(rows[proof.rows], wanted):
        return False
    made = quick.features.take(pa.array(np.searchsorted(quick.rows, wanted)))
    return not differing(
        pa.Table.from_batches([proof.features]), pa.Table.from_batches([made]), view, QUICK
    )
