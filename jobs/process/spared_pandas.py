"""Spared pandas: pyarrow imports pandas, where it is installed, with the first Python value that it converts. Commands that only read need none of it."""

from __future__ import annotations

import sys


class _NoPandas:
    """A finder that finds no pandas, and leaves all else to those behind it."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        if name == "pandas":
            raise ModuleNotFoundError("not imported where nothing needs it", name=name)


def spare_pandas() -> None:
    """Let pyarrow find no pandas when it looks whether a value is one of pandas' (0.15 s and 45 MB to import). For processes that run nobody else's code."""
    import pyarrow as pa

    sys.meta_path.insert(0, _NoPandas)
    try:
        # its C++ and its Python part look once each
        pa.array([None])
        _ = pa.lib._pandas_api.have_pandas
    finally:
        sys.meta_path.remove(_NoPandas)
