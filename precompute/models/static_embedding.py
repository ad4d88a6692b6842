"""Static embedding: text → the mean of its tokens' vectors, which are rows of a table: a model2vec
folder, or a ``StaticEmbedding`` of sentence-transformers. It costs a hundredth of a transformer.

A model2vec folder is computed as model2vec computes it, one of sentence-transformers as that does.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from tokenizers import Tokenizer

from precompute.foreign_file import KnownKeys, read_json
from precompute.model import Features, OwnLibrary, Prepared, digest, resolve_path
from precompute.models.device import Device
from precompute.models.torch_model import Tensors, TorchModel
from precompute.registry import described
from precompute.safetensors_file import INTEGERS, SCALES, read_tensors
from precompute.store.errors import ConfigError, ModelError
from precompute.text.sentence_folder import (
    SETTINGS_FILE,
    check_use,
    has_modules,
    no_settings,
    read_layer,
    read_modules,
)
from precompute.text.tokenizer_file import read_tokenizer
from precompute.text.tokens import texts, unusable_texts

CODE_VERSION = 2
"""Raised with each change of the values that this code computes; part of the fingerprint."""

MAX_LENGTH = 512
"""model2vec's own, of a folder that names none."""


class TableMean(torch.nn.Module):
    """Token ids → vectors [B, D].

    Args:
        table: float32 [vocabulary, D].
        normalize: whether vectors have the norm 1.
    """

    def __init__(self, table: torch.Tensor, normalize: bool) -> None:
        super().__init__()
        self.bag = torch.nn.EmbeddingBag.from_pretrained(table, mode="mean")
        self.normalize = normalize

    def forward(self, ids: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        """``ids`` int64 [tokens] of all texts in a row, ``starts`` int64 [B]."""
        mean: torch.Tensor = self.bag(ids, starts)
        return mean / (mean.norm(dim=1, keepdim=True) + 1e-32) if self.normalize else mean


MODEL2VEC_CONFIG = KnownKeys(
    "config.json of model2vec",
    used=("normalize", "max_length"),
    harmless={
        "model_type": "what wrote it",
        "architectures": "what wrote it",
        "tokenizer_name": "what it was distilled from; tokenizer.json has the tokenizer",
        "base_model*": "what it was distilled from",
        "pooling": "what it was distilled from",
        "apply_pca": "how the table was made",
        "pca_dims": "how the table was made",
        "apply_zipf": "how the table was made",
        "sif_coefficient": "how the table was made",
        "token_remove_pattern": "how the table was made",
        "hidden_dim": "the table's own size counts",
        "seq_length": "max_length is what model2vec cuts at",
        "embedding_dtype": "the table's own dtype counts",
        "vocabulary_quantization": "the tensor mapping has it",
        "head_config": "of a classifier behind the vectors, which are what is read",
    },
)
MODEL2VEC_TENSORS = KnownKeys(
    "the table of a model2vec folder (model.safetensors)",
    used=("embeddings", "mapping", "weights"),
    refused=SCALES,
)
STATIC_TENSORS = KnownKeys(
    "the table of a StaticEmbedding of sentence-transformers (model.safetensors)",
    used=("embedding.weight", "embeddings", "mapping", "weights"),
    refused=SCALES,
)


@dataclass(slots=True)
class _Folder:
    """What was read of one."""

    table: torch.Tensor
    tokenizer: Tokenizer
    normalize: bool
    max_length: int | None
    unknown: int | None
    files: dict[str, Path]


class StaticEmbedding(TorchModel):
    """Embeds one text column.

    Args:
        path: the folder; ``package:name/folder`` inside a package.
        column: the source's text column: string, or binary holding UTF-8.
        output: name of the feature.
        normalize: whether vectors have the norm 1; by default what the folder says.
        device: ``cpu``, ``cuda`` or ``cuda:1``; by default a GPU where there is one.

    Raises:
        ConfigError: no such folder or file.
        ModelError: a file of it is damaged, or tables of other sizes than its vocabulary.
    """

    cost_unit = "tokens"
    start_cost = 16384
    concurrent = True

    def __init__(
        self,
        path: str,
        column: str = "text",
        output: str = "embedding",
        normalize: bool | None = None,
        device: str | None = None,
    ) -> None:
        if normalize not in (None, True, False):
            raise ConfigError(f"static_embedding: normalize is true or false, got {normalize!r}")
        folder = resolve_path(path)
        try:
            read = _read(folder)
        except (OSError, ValueError) as exc:
            raise ModelError(f"static_embedding: {folder} is damaged: {described(exc)}") from exc
        self._column, self._output, self._files = column, output, read.files
        self._given = {
            "path": str(folder),
            "column": column,
            "output": output,
            "normalize": normalize,
        }
        self._tokenizer = read.tokenizer
        self._unknown = read.unknown
        self._max_length = read.max_length
        # a text is cut by its characters first, as model2vec does
        vocabulary = [len(token) for token in read.tokenizer.get_vocab()]
        self._most_chars = (
            None if read.max_length is None else read.max_length * int(np.median(vocabulary))
        )
        self._normalize = read.normalize if normalize is None else normalize
        super().__init__(TableMean(read.table, self._normalize), Device(device))

    def fingerprint(self) -> str:
        return digest(
            code=CODE_VERSION, files=self._files, column=self._column, normalize=self._normalize
        )

    def own_library(self) -> OwnLibrary:
        name = "model2vec" if "config.json" in self._files else "sentence-transformers"
        by = f"precompute.models.static_embedding:by_{name.replace('-', '_')}"
        files = tuple(self._files.values())
        return OwnLibrary(name, by, self._given, files, (name.replace("-", "_"),))

    def reads(self) -> tuple[str]:
        return (self._column,)

    def unusable(self, batch: pa.RecordBatch) -> Mapping[int, str]:
        return unusable_texts(batch.column(self._column), self._column, "static_embedding")

    def prepare(self, batch: pa.RecordBatch) -> Prepared:
        """Token ids; a row costs its tokens. Bad is a text of which no token is known: it has no
        direction."""
        rows = [text[: self._most_chars] for text in texts(batch.column(self._column))]
        lists = [
            one.ids for one in self._tokenizer.encode_batch_fast(rows, add_special_tokens=False)
        ]
        if self._unknown is not None:
            lists = [
                [token for token in ids if token != self._unknown] if self._unknown in ids else ids
                for ids in lists
            ]
        lengths = np.fromiter(map(len, lists), np.int64, len(lists))
        ids = np.fromiter(itertools.chain.from_iterable(lists), np.int64, int(lengths.sum()))
        bad = {
            int(row): f"{self._column} has no token that the model knows"
            for row in np.flatnonzero(lengths == 0)
        }
        return Prepared(np.maximum(lengths, 1), (ids, np.cumsum(lengths) - lengths, lengths), bad)

    def tensors(self, prepared: Prepared, rows: npt.NDArray[np.int64]) -> Tensors:
        ids, starts, lengths = prepared.payload
        taken = lengths[rows]
        begin = np.cumsum(taken) - taken
        at = np.arange(int(taken.sum())) + np.repeat(starts[rows] - begin, taken)
        return torch.from_numpy(ids[at]), torch.from_numpy(begin)

    def features(self, outputs: Sequence[npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
        return {self._output: outputs[0]}


_USE = "static_embedding"


def _read(folder: Path) -> _Folder:
    """Raises:
    ConfigError: it lacks a file, or has something that is not understood.
    ModelError, ValueError: a file is damaged.
    """
    check_use(folder, _USE)
    own = (folder / SETTINGS_FILE).is_file() or not (folder / "config.json").is_file()
    if own and has_modules(folder, _USE):
        return _of_sentence_transformers(folder)
    files = _files(folder, folder, "config.json")
    config = read_json(files["config.json"], _USE, dict)
    MODEL2VEC_CONFIG.check(config, files["config.json"], _USE)
    # whole numbers of 8 bits are what model2vec's own quantizing leaves, and what it computes with
    integers = {"mapping": INTEGERS, "embeddings": ("I8",)}
    tensors = read_tensors(files["model.safetensors"], MODEL2VEC_TENSORS, _USE, integers)
    tokenizer = read_tokenizer(files["tokenizer.json"], _USE)
    table = _table(tensors, "embeddings", tokenizer, exactly=True)
    longest, normalize = config.get("max_length", MAX_LENGTH), config.get("normalize", False)
    if longest is not None and (type(longest) is not int or not 0 < longest < 2**31):
        raise ValueError(f"its max_length is {longest!r}")
    if not isinstance(normalize, bool):
        raise ValueError(f"normalize in its config.json is {normalize!r}")
    # as model2vec does, whatever tokenizer.json says
    tokenizer.no_padding()
    tokenizer.no_truncation()
    if longest is not None:
        tokenizer.enable_truncation(longest)
    model = json.loads(tokenizer.to_str())["model"]
    token = model.get("unk_token")
    unknown = model.get("unk_id") if token is None else tokenizer.token_to_id(token)
    return _Folder(table, tokenizer, normalize, longest, unknown, files)


def _of_sentence_transformers(folder: Path) -> _Folder:
    modules = read_modules(folder, _USE)
    kinds = [name for name, _ in modules]
    if kinds not in (["StaticEmbedding"], ["StaticEmbedding", "Normalize"]):
        raise ConfigError(
            f"static_embedding: {folder}/modules.json has {', '.join(kinds)}: StaticEmbedding,"
            " and Normalize after it, are computed"
        )
    files = _files(folder, modules[0][1], "modules.json")
    no_settings(folder, _USE)
    for name, place in modules[1:]:
        read_layer(name, place, _USE)
    tensors = read_tensors(files["model.safetensors"], STATIC_TENSORS, _USE, {"mapping": INTEGERS})
    name = "embedding.weight" if "embedding.weight" in tensors else "embeddings"
    if name == "embedding.weight" and len(tensors) > 1:
        raise ValueError(f"it has two tables: {', '.join(sorted(tensors))}")
    tokenizer = read_tokenizer(files["tokenizer.json"], _USE)
    table = _table(tensors, name, tokenizer)
    # a text is cut where tokenizer.json says so, and nowhere else
    tokenizer.no_padding()
    return _Folder(table, tokenizer, len(kinds) == 2, None, None, files)


def _files(folder: Path, inner: Path, about: str) -> dict[str, Path]:
    places = {"model.safetensors": inner, "tokenizer.json": inner, about: folder}
    files = {name: place / name for name, place in places.items()}
    for file in files.values():
        if not file.is_file():
            raise ConfigError(
                f"static_embedding: {folder} has no {file.name}; give a folder that model2vec or"
                " sentence-transformers saved"
            )
    return files


def _table(
    tensors: Mapping[str, torch.Tensor], name: str, tokenizer: Tokenizer, exactly: bool = False
) -> torch.Tensor:
    """Float32 [vocabulary, dim]: a row for each token, of a table that several tokens may share,
    times the token's weight.

    Args:
        exactly: whether a table that tokens do not share has a row for each token, and no more.

    Raises:
        ValueError: it has not a row for each token, or a number that is none.
    """
    if name not in tensors:
        raise ValueError(f"it has no table ({name})")
    table = tensors[name]
    if table.dim() != 2:
        raise ValueError(f"its table has the shape {list(table.shape)}")
    table = table.float()
    if "mapping" in tensors:
        mapping = tensors["mapping"]
        if mapping.is_floating_point() or mapping.dim() != 1:
            raise ValueError("its mapping is no list of whole numbers")
        mapping = mapping.long()
        if len(mapping) and not 0 <= int(mapping.min()) <= int(mapping.max()) < len(table):
            raise ValueError("its mapping names rows that are not there")
        table = table[mapping]
    if "weights" in tensors:
        weights = tensors["weights"]
        if list(weights.shape) != [len(table)]:
            raise ValueError(f"its weights have the shape {list(weights.shape)}")
        table = table * weights.float().reshape(-1, 1)
    if not bool(torch.isfinite(table).all()):
        raise ValueError("its table has a number that is not finite")
    size = max(tokenizer.get_vocab().values()) + 1
    if len(table) < size or (exactly and "mapping" not in tensors and len(table) > size):
        raise ValueError(f"its table has {len(table)} rows, its tokenizer {size} tokens")
    return table.contiguous()


# ---- the same by the library itself


def by_model2vec(
    path: str, column: str, output: str, normalize: bool | None
) -> Callable[[pa.RecordBatch], Features]:
    """Vectors as model2vec's ``StaticModel`` has them."""
    from model2vec import StaticModel

    model: Any = StaticModel.from_pretrained(path, normalize=normalize)

    def predict(batch: pa.RecordBatch) -> Features:
        return {output: np.asarray(model.encode(texts(batch.column(column))), np.float32)}

    return predict


def by_sentence_transformers(
    path: str, column: str, output: str, normalize: bool | None
) -> Callable[[pa.RecordBatch], Features]:
    """Vectors as ``SentenceTransformer`` has them of a folder whose first module is a
    ``StaticEmbedding``."""
    from sentence_transformers import SentenceTransformer

    model: Any = SentenceTransformer(path, device="cpu", local_files_only=True).float()
    if normalize is False:
        model = SentenceTransformer(modules=[model[0]], device="cpu")

    def predict(batch: pa.RecordBatch) -> Features:
        rows = texts(batch.column(column))
        return {
            output: model.encode(
                rows, show_progress_bar=False, normalize_embeddings=normalize is True
            )
        }

    return predict
