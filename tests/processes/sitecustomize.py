"""What Python runs first in every process that a test starts: pandas and sentence-transformers are
not there, as with most who install this, whatever the tests have them for.

pyarrow imports pandas with the first array that it is given, where it is installed: 0.3 to 0.5 s of
each of about a thousand processes. Where sentence-transformers is, the first run of an encoder asks
it for rows: 10 s.
"""

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType


class WithoutPandas(PathFinder):
    """As who finds modules in the folders of ``sys.path``, but for these, which are neither
    imported nor, as by torch, only looked for."""

    @classmethod
    def find_spec(
        cls, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname in ("pandas", "sentence_transformers"):
            return None
        return PathFinder.find_spec(fullname, path, target)


sys.meta_path[sys.meta_path.index(PathFinder)] = WithoutPandas
