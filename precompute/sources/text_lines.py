"""Text lines: the lines of a file of text, plain or gzipped, for messages that name one."""

from __future__ import annotations

import codecs
import contextlib
import gzip
import re
from collections.abc import Iterator, Mapping
from typing import Any

from precompute.sources.file_names import is_remote
from precompute.store.errors import SourceError

_NO_UTF_8 = re.compile("[\udc80-\udcff]")
"""What ``surrogateescape`` makes of a byte that is none of UTF-8's."""


def lines_of(
    file: str, options: Mapping[str, Any], errors: str = "replace"
) -> Iterator[str] | None:
    """The lines of a file, each with its end; None of one that is not read here: of an object
    store, compressed by another than gzip, or of an encoding that Python does not know.

    Args:
        options: of the reader's call, ``compression`` and ``encoding`` among them.
        errors: what becomes of bytes that are none of the encoding, as of ``open``.
    """
    compressed = str(options.get("compression", "auto")).lower()
    gzipped = compressed == "gzip" or (compressed == "auto" and file.endswith(".gz"))
    if is_remote(file) or compressed not in ("auto", "none", "gzip") or file.endswith(".zst"):
        return None
    encoding = str(options.get("encoding", "utf-8")).lower().replace("utf-8", "utf-8-sig")
    # of UTF-16 Python wants a mark at the beginning
    with contextlib.suppress(LookupError):
        if codecs.lookup(encoding).name.startswith(("utf-16", "utf-32")):
            return None
        return _read(file, encoding, errors, gzip.open if gzipped else open)
    return None


def _read(file: str, encoding: str, errors: str, opened: Any) -> Iterator[str]:
    try:
        with opened(file, "rt", encoding=encoding, errors=errors, newline="") as lines:
            yield from lines
    except (OSError, EOFError) as exc:
        raise SourceError(f"{file} cannot be read: {exc}") from exc


def line_of_no_utf_8(file: str) -> int | None:
    """The first line of a file that is not UTF-8, from 1; None where it cannot be told here."""
    lines = lines_of(file, {}, "surrogateescape")
    found = (number for number, line in enumerate(lines or (), 1) if _NO_UTF_8.search(line))
    return next(found, None)


def line_of(file: str, begin: str, row: int) -> int | None:
    """The first line of a file that is ``begin`` and stands where a row of that number may, since a
    row has one line or more; None where there is none, or it cannot be told here."""
    lines = lines_of(file, {})
    found = (n for n, line in enumerate(lines or (), 1) if n >= row and line.strip() == begin)
    return next(found, None)
