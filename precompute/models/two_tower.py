"""Two-tower: users and items as vectors of one space, whose dot product ranks items for a user (Yi
et al., RecSys 2019).

A tower is a bag of categorical tokens per field (an id, a genre list, an age group), each embedded
and summed, then one residual layer. Ids are dropped at random while training, so a tower still
places an entity it never saw by its other fields: token 0 of every vocabulary is "unknown". One
safetensors file holds both towers; vocabularies travel in its metadata as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import torch
from safetensors.torch import save

from precompute.foreign_file import KnownKeys, key_paths, parsed_json
from precompute.model import Prepared, digest, resolve_path
from precompute.models.device import Device
from precompute.models.torch_model import Tensors, TorchModel
from precompute.registry import described
from precompute.safetensors_file import opened
from precompute.store.disk.durable_file import replace_durably
from precompute.store.errors import ConfigError, ModelError

CODE_VERSION = 1
UNKNOWN = 0

TWO_TOWER_METADATA = KnownKeys("the metadata of a two-tower's safetensors", used=("two_tower",))
TWO_TOWER_JSON = KnownKeys(
    "a two-tower's JSON",
    used=(
        "dim",
        "towers",
        "towers{}[].column",
        "towers{}[].multiple",
        "towers{}[].vocabulary",
    ),
)

Tokens = tuple[torch.Tensor, ...]
"""Numbers of each field's tokens: [rows] for a field with one token a row; for one with several,
those of all rows [1, tokens] and the place of each row's first [rows]."""


@dataclass(frozen=True, slots=True)
class Field:
    """One input column of a tower: one token a row, or several separated by spaces
    (``multiple``)."""

    column: str
    vocabulary: tuple[str, ...]
    multiple: bool = False


class Column(NamedTuple):
    """Token numbers of a field, int64: all rows' in a row; and, where a row has several, how many
    each has."""

    ids: npt.NDArray[np.int64]
    counts: npt.NDArray[np.int64] | None


class Tower(torch.nn.Module):
    """Fields → vector: the sum of the fields' mean token embeddings, plus one hidden layer of it.

    Args:
        fields: columns and vocabularies.
        dim: length of the vector.
    """

    def __init__(self, fields: Sequence[Field], dim: int) -> None:
        super().__init__()
        self.fields = tuple(fields)
        bags = [
            torch.nn.EmbeddingBag(len(f.vocabulary) + 1, dim, mode="mean", padding_idx=None)
            for f in fields
        ]
        for bag in bags:
            torch.nn.init.normal_(bag.weight, std=0.1)
        self.bags = torch.nn.ModuleList(bags)
        self.hidden = torch.nn.Linear(dim, dim)
        self.out = torch.nn.Linear(dim, dim)

    def tokens(self, batch: pa.RecordBatch | pa.Table) -> Tokens:
        """What :meth:`forward` takes of a batch."""
        return chosen(self.columns(batch))

    def columns(self, batch: pa.RecordBatch | pa.Table) -> list[Column]:
        """Its fields' tokens."""
        return [_column(f, batch) for f in self.fields]

    def forward(self, *tokens: torch.Tensor) -> torch.Tensor:
        """[rows, dim]."""
        left, parts = iter(tokens), []
        for bag, field in zip(self.bags, self.fields, strict=True):
            ids = next(left)
            if field.multiple:
                parts.append(bag(ids[0], next(left)))
            else:
                parts.append(bag(ids, torch.arange(len(ids), device=ids.device)))
        total = torch.stack(parts).sum(0)
        vector: torch.Tensor = total + self.out(torch.relu(self.hidden(total)))
        return vector


class TwoTower(TorchModel):
    """One tower of a trained pair, as a model.

    Args:
        path: safetensors file that :func:`train_two_tower` wrote.
        tower: ``user`` or ``item``.
        output: name of the feature.
        device: ``cpu``, ``cuda`` or ``cuda:1``; by default a GPU where there is one.

    Raises:
        ConfigError: no such file or tower.
        ModelError: the file is damaged or of another architecture.
    """

    concurrent = True

    def __init__(
        self, path: str, tower: str, output: str = "embedding", device: str | None = None
    ) -> None:
        self._path = resolve_path(path)
        self._name, self._output = tower, output
        try:
            dim, fields, state = _read(self._path, tower)
            module = Tower(fields, dim)
            module.load_state_dict(state)
        except (KeyError, TypeError, AttributeError, RuntimeError) as exc:
            raise ModelError(f"two_tower: {self._path} does not load: {described(exc)}") from exc
        super().__init__(module, Device(device))
        self._tower, self._flops = module, 4.0 * float(dim) ** 2

    def fingerprint(self) -> str:
        return digest(code=CODE_VERSION, file=self._path, tower=self._name)

    def reads(self) -> list[str]:
        return [field.column for field in self._tower.fields]

    def prepare(self, batch: pa.RecordBatch) -> Prepared:
        return Prepared(np.ones(batch.num_rows, np.int64), self._tower.columns(batch))

    def tensors(self, prepared: Prepared, rows: npt.NDArray[np.int64]) -> Tensors:
        return chosen(prepared.payload, rows)

    def features(self, outputs: Sequence[npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
        """``output`` → float32 [rows, dim], not normalised: its length carries popularity."""
        return {self._output: outputs[0]}

    def flops(self, prepared: Prepared, rows: npt.NDArray[np.int64]) -> float:
        """Operations of its two layers; sums are as good as nothing."""
        return self._flops * len(rows)


def _read(path: Path, tower: str) -> tuple[int, list[Field], dict[str, torch.Tensor]]:
    """(dim, the tower's fields, its weights by name).

    Raises:
        ConfigError: it has no such tower, or has what is not known.
        ModelError: it is damaged, or no safetensors file.
        KeyError, TypeError, AttributeError: none that :func:`train_two_tower` wrote.
    """
    with opened(path, "two_tower") as file:
        notes = file.metadata() or {}
        meta = parsed_json(notes["two_tower"].encode(), path, "two_tower")
        TWO_TOWER_METADATA.check(notes, path, "two_tower")
        TWO_TOWER_JSON.check(key_paths(meta, maps=("towers",)), path, "two_tower")
        if tower not in meta["towers"]:
            raise ConfigError(
                f"two_tower: {path} has no tower {tower!r} (it has: {', '.join(meta['towers'])})"
            )
        fields = [
            Field(f["column"], tuple(f["vocabulary"]), f["multiple"]) for f in meta["towers"][tower]
        ]
        if not fields:
            raise ValueError("a tower without fields")
        if not all(
            isinstance(f.column, str)
            and isinstance(f.multiple, bool)
            and all(isinstance(token, str) for token in f.vocabulary)
            and len(set(f.vocabulary)) == len(f.vocabulary)
            for f in fields
        ):
            raise ValueError("a field whose tokens are not different texts")
        state = {}
        for name in file.keys():  # noqa: SIM118
            owner, _, rest = name.partition(".")
            if owner not in meta["towers"]:
                raise ValueError(f"{name} is of none of its towers")
            if owner == tower:
                state[rest] = file.get_tensor(name)
                if state[rest].dtype != torch.float32:
                    raise ValueError(f"{name} is {state[rest].dtype}, and not float32")
        return meta["dim"], fields, state


def train_two_tower(
    path: Path,
    users: pa.Table,
    items: pa.Table,
    pairs: npt.NDArray[np.int64],
    user_fields: Mapping[str, bool],
    item_fields: Mapping[str, bool],
    *,
    dim: int = 64,
    epochs: int = 20,
    batch_pairs: int = 2048,
    learning_rate: float = 3e-3,
    weight_decay: float = 1e-5,
    id_dropout: float = 0.1,
    dropout: float = 0.3,
    seed: int = 0,
    progress: Callable[[int, float], None] | None = None,
) -> None:
    """Train both towers on positive pairs, with the softmax over all items as loss, and write them
    to ``path``.

    Args:
        path: safetensors file to write, or to replace when all is trained.
        users: one row a user, with the columns of ``user_fields``.
        items: one row an item, with the columns of ``item_fields``.
        pairs: [n, 2] row numbers of (user, item).
        user_fields: column → whether it holds several tokens; the first one is the id.
        item_fields: likewise.
        learning_rate: of Adam, falling to 0 along a cosine.
        weight_decay: of Adam, decoupled.
        id_dropout: share of ids replaced by "unknown" while training.
        dropout: share of each user vector's elements dropped while training.
        seed: of everything random here. With one thread the result is the same bytes every time;
            with several, sums differ in their last bits.
        progress: called with (epoch, mean loss) after each.
    """
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    towers = {
        "user": Tower(_fields(users, user_fields), dim),
        "item": Tower(_fields(items, item_fields), dim),
    }
    tokens = {"user": towers["user"].tokens(users), "item": towers["item"].tokens(items)}
    parameters = [p for tower in towers.values() for p in tower.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=learning_rate, weight_decay=weight_decay)
    steps = epochs * -(-len(pairs) // batch_pairs)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    positives = torch.from_numpy(pairs)
    for epoch in range(epochs):
        total = 0.0
        for chosen in torch.randperm(len(positives), generator=generator).split(batch_pairs):  # type: ignore[no-untyped-call]
            seen = {
                name: _without_ids(of_tower, id_dropout, generator)
                for name, of_tower in tokens.items()
            }
            loss = _loss(towers, seen, positives[chosen], dropout)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
            total += loss.item() * len(chosen)
        if progress is not None:
            progress(epoch + 1, total / len(positives))
    _save(path, dim, towers)


def _loss(
    towers: Mapping[str, Tower], tokens: Mapping[str, Tokens], pairs: torch.Tensor, dropout: float
) -> torch.Tensor:
    user_rows, item_rows = pairs.T
    u = torch.nn.functional.dropout(towers["user"](*tokens["user"])[user_rows], dropout)
    return torch.nn.functional.cross_entropy(u @ towers["item"](*tokens["item"]).T, item_rows)


def _save(path: Path, dim: int, towers: Mapping[str, Tower]) -> None:
    state = {
        f"{name}.{k}": v.contiguous()
        for name, tower in towers.items()
        for k, v in tower.state_dict().items()
    }
    meta = {
        "dim": dim,
        "towers": {name: [asdict(f) for f in tower.fields] for name, tower in towers.items()},
    }
    # others may load it meanwhile, and the one before is better than half of this one
    replace_durably(path, save(state, {"two_tower": json.dumps(meta)}))


def _fields(table: pa.Table, columns: Mapping[str, bool]) -> list[Field]:
    fields = []
    for column, multiple in columns.items():
        text = _text(table, column, multiple)[0]
        fields.append(
            Field(column, tuple(sorted(t for t in pc.unique(text).to_pylist() if t)), multiple)
        )
    return fields


def _text(
    batch: pa.RecordBatch | pa.Table, column: str, multiple: bool
) -> tuple[pa.Array, npt.NDArray[np.int64]]:
    """(all tokens in a row, tokens per row); a null is one empty token, which no vocabulary has.

    Raises:
        ModelError: the column holds lists.
    """
    values = batch.column(column)
    if pa.types.is_nested(values.type):
        raise ModelError(
            f"two_tower: column {column!r} is {values.type}, neither an id nor a text with tokens:"
            f" write array_to_string({column}, ' ') in the source"
        )
    values = values.combine_chunks() if isinstance(values, pa.ChunkedArray) else values
    text = pc.fill_null(pc.cast(values, pa.string()), "")
    if not multiple:
        return text, np.ones(len(text), np.int64)
    lists = pc.split_pattern(text, " ")
    return lists.flatten(), np.asarray(pc.list_value_length(lists)).astype(np.int64)


def _column(f: Field, batch: pa.RecordBatch | pa.Table) -> Column:
    text, counts = _text(batch, f.column, f.multiple)
    places = pc.index_in(text, pa.array(f.vocabulary, pa.string()))
    ids = np.asarray(pc.fill_null(pc.add(places, 1), UNKNOWN)).astype(np.int64)
    return Column(ids, counts if f.multiple else None)


def chosen(columns: Sequence[Column], rows: npt.NDArray[np.int64] | None = None) -> Tokens:
    """What a tower takes of these rows, by default of all."""
    tensors = []
    for ids, counts in columns:
        if counts is None:
            tensors.append(torch.from_numpy(ids if rows is None else ids[rows]))
            continue
        # of one row there is nothing to choose: a third of its time
        if rows is not None and len(counts) > 1:
            first = (np.cumsum(counts) - counts)[rows]
            counts = counts[rows]
            ends = np.cumsum(counts)
            ids = ids[np.arange(counts.sum()) + np.repeat(first - (ends - counts), counts)]
        starts = np.cumsum(counts) - counts
        tensors += [torch.from_numpy(ids[None]), torch.from_numpy(starts)]
    return tuple(tensors)


def _without_ids(tokens: Tokens, share: float, generator: torch.Generator) -> Tokens:
    ids, *others = tokens
    retained = torch.rand(ids.shape, generator=generator) >= share
    return (torch.where(retained, ids, UNKNOWN), *others)
