"""What a view's live snapshot has is what a view that reads it as ``live.<view>`` sees: each type
and shape that a feature may have, with and without rows that no longer count."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from precompute.sources.database import Files
from precompute.sources.source import Source
from precompute.store.feature_view import SCALAR_TYPES, Feature, FeatureView

VALUES: dict[str, list[Any]] = {
    "float16": [float(np.float16(0.1)), -65504.0, 6e-8],
    "float32": [float(np.float32(0.1)), -0.0, float(np.float32(1e-45))],
    "float64": [0.1, -0.0, 5e-324],
    "int8": [-128, 127, 0],
    "int16": [-(2**15), 2**15 - 1, 0],
    "int32": [-(2**31), 2**31 - 1, 0],
    "int64": [-(2**63), 2**53 + 1, 2**63 - 1],
    "bool": [True, False, True],
    "string": ["007", "é\0", ""],
}
"""Of each type, those that another would change."""


def features() -> tuple[tuple[Feature, ...], pa.Table]:
    """A feature of each type and shape, and three rows of them."""
    kinds, columns = list[Feature](), dict[str, list[Any]]()
    for dtype in SCALAR_TYPES:
        values = VALUES[dtype]
        kinds.append(Feature(f"one_{dtype}", dtype))
        columns[f"one_{dtype}"] = [values[0], values[1], None]
        if dtype != "bool":
            kinds.append(Feature(f"list_{dtype}", dtype, max_items=3))
            columns[f"list_{dtype}"] = [values, [], values[:1]]
        if dtype not in ("bool", "string"):
            kinds.append(Feature(f"vector_{dtype}", dtype, dim=3))
            columns[f"vector_{dtype}"] = [values, values[::-1], values]
    schema = FeatureView("v", ("id",), tuple(kinds), 60, 0).feature_schema()
    arrays = [pa.array(columns[field.name], field.type) for field in schema]
    return tuple(kinds), pa.Table.from_arrays(arrays, schema=schema)


@pytest.mark.parametrize("dead", [False, True])
def test_the_types_of_a_snapshot_are_those_of_the_view_that_reads_it(
    dead: bool, tmp_path: Path
) -> None:
    kinds, rows = features()
    path = tmp_path / "part.parquet"
    pq.write_table(rows.add_column(0, "id", pa.array([1, 2, 3])), path)
    files = Files([path], {0: np.array([1])} if dead else {})
    with Source("SELECT * FROM live.v", ("id",), {"v": files}, folder=tmp_path) as source:
        source.load()
        seen = pa.Table.from_batches(list(source.batches(10)))
    wanted = rows.take([0, 2]) if dead else rows
    assert seen.column("id").to_pylist() == ([1, 3] if dead else [1, 2, 3])
    for kind in kinds:
        column, given = seen.column(kind.name), wanted.column(kind.name)
        # of bits, so that minus nought is seen
        assert repr(column.to_pylist()) == repr(given.to_pylist()), kind
        item = (
            column.type if kind.dim is None and kind.max_items is None else column.type.value_type
        )
        # DuckDB has no float16, and a float32 is as good
        held = {"float16": "float32"}.get(kind.dtype, kind.dtype)
        assert item == SCALAR_TYPES[held], kind
        # back in the view's own type, it is the same value
        assert column.cast(given.type).equals(given) or kind.dim is not None
