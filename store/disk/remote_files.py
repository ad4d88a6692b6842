"""Remote files: what DuckDB reads of ``s3://``, ``gs://`` and ``az://``, by obstore. Which objects
there are, and what each is, is read once, not each time that DuckDB looks; one
that is replaced while it is read is an error, never half of each.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from datetime import datetime
from typing import Any, TypeVar

import obstore
from fsspec import AbstractFileSystem
from obstore.exceptions import BaseError, NotFoundError, PreconditionError

from precompute.store.disk.bucket import failure, open_store
from precompute.store.disk.storage import OBJECT_STORES
from precompute.store.errors import ConfigError

_R = TypeVar("_R")

RETRY_S, REQUEST_S = 30.0, 30.0
"""How long a request is tried again, and how long one may take: DuckDB reads a few MB at once."""
FRESH_S = 5.0
"""How long it is known which objects there are and what each is. One that is replaced within it
is not read: its tag is compared."""
MOST_KNOWN = 10_000
READ_BYTES = 2**20
"""Bytes that are read at once at least, for reads that go on."""


class RemoteFileError(OSError):
    """A request for a remote file failed; one line, since DuckDB hands on no more of an error than
    its text."""


class RemoteFiles(AbstractFileSystem):  # type: ignore[misc]
    """A file system that only reads, for ``duckdb.register_filesystem``, which takes fsspec's."""

    protocol = OBJECT_STORES
    cachable = False

    def __init__(self) -> None:
        super().__init__()
        self._stores: dict[str, Any] = {}
        self._known: dict[str, tuple[float, Any]] = {}
        self._lock = threading.Lock()

    # ---- what DuckDB calls

    def open(self, path: str, mode: str = "rb", **_: Any) -> RemoteFile:
        """An object, as it is now.

        Raises:
            RemoteFileError: it is to be written, or the object store gives no answer.
            FileNotFoundError: there is no such object.
        """
        if mode != "rb":
            raise RemoteFileError(f"{path}: a source is read, never written")
        return RemoteFile(self, path, self.meta(path))

    def glob(self, path: str, **_: Any) -> list[str]:
        """URLs of all objects that a pattern finds, sorted: ``*`` and ``?`` end at a slash, ``**``
        does not."""
        bucket, key = _split(path)
        folder = re.split(r"[*?\[]", key, maxsplit=1)[0]
        if folder == key:
            return [path] if self.exists(path) else []
        found = self._listed(bucket, folder.rpartition("/")[0])
        try:
            matches = re.compile(_pattern(key)).fullmatch
        except re.error:
            # a range that runs backwards, such as [z-a]
            return []
        return sorted(f"{bucket}/{item['path']}" for item in found if matches(item["path"]))

    def exists(self, path: str, **_: Any) -> bool:
        """Whether there is such an object."""
        try:
            self.meta(path)
        except FileNotFoundError:
            return False
        return True

    def isdir(self, path: str) -> bool:
        """An object store has no folders."""
        return False

    def isfile(self, path: str) -> bool:
        """As :meth:`exists`."""
        return self.exists(path)

    def size(self, path: str) -> int:
        """Size of a file, in bytes."""
        return int(self.meta(path)["size"])

    def modified(self, path: str) -> datetime:
        """When the object was written, by the store's clock."""
        written: datetime = self.meta(path)["last_modified"]
        return written

    def tag(self, path: str) -> str:
        """The object's entity tag and size: those of another content are others."""
        meta = self.meta(path)
        return f"{meta['e_tag']} {meta['size']}"

    # ---- requests

    def meta(self, path: str) -> Any:
        """What obstore knows of an object: ``size``, ``e_tag``, ``last_modified``.

        Raises:
            FileNotFoundError: there is none.
            RemoteFileError: the object store gives no answer.
        """
        store, key = self._store(path)
        return self._once(path, lambda: self._tried(path, lambda: obstore.head(store, key)))

    def read_range(self, path: str, meta: Any, start: int, stop: int) -> bytes:
        """The bytes from ``start`` up to but not with ``stop`` of the object that ``meta`` is of.

        Raises:
            RemoteFileError: it was replaced since, or the object store gives no answer.
        """
        if start >= stop:
            return b""
        store, key = self._store(path)
        options: Any = {"range": (start, stop), "if_match": meta["e_tag"]}
        return self._tried(
            path, lambda: obstore.get(store, key, options=options).bytes().to_bytes()
        )

    def _listed(self, bucket: str, folder: str) -> list[Any]:
        store, _ = self._store(f"{bucket}/")

        def listed() -> list[Any]:
            chunks = obstore.list(store, folder or None, chunk_size=1000)
            found = [item for chunk in chunks for item in chunk]
            for item in found:
                self._keep(f"{bucket}/{item['path']}", item)
            return found

        url = f"{bucket}/{folder}"
        return self._once(f"{url}/*", lambda: self._tried(url, listed))

    def _once(self, name: str, request: Callable[[], _R]) -> _R:
        with self._lock:
            at, known = self._known.get(name, (0.0, None))
        if known is None or time.monotonic() >= at + FRESH_S:
            known = self._keep(name, request())
        found: _R = known
        return found

    def _keep(self, name: str, value: _R) -> _R:
        with self._lock:
            if len(self._known) >= MOST_KNOWN:
                self._known.clear()
            self._known[name] = time.monotonic(), value
        return value

    def _store(self, path: str) -> tuple[Any, str]:
        bucket, key = _split(path)
        try:
            store = self._stores.get(bucket) or open_store(bucket, RETRY_S, REQUEST_S)
        except ConfigError as exc:
            raise RemoteFileError(str(exc)) from exc
        self._stores[bucket] = store
        return store, key

    def _tried(self, url: str, request: Callable[[], _R]) -> _R:
        try:
            return request()
        except (NotFoundError, FileNotFoundError) as exc:
            if any(word in str(exc) for word in ("NoSuchBucket", "ContainerNotFound")):
                raise RemoteFileError(f"{url}: there is no such bucket") from exc
            raise FileNotFoundError(f"there is no {url}") from exc
        except PreconditionError as exc:
            with self._lock:
                self._known.clear()
            raise RemoteFileError(f"{url} was replaced while it was read: run again") from exc
        except BaseError as exc:
            raise RemoteFileError(failure(url, exc)) from exc


class RemoteFile:
    """One object, read by ranges as it was when it was opened."""

    def __init__(self, files: RemoteFiles, path: str, meta: Any) -> None:
        self._files, self._path, self._meta = files, path, meta
        self.size, self.closed, self._at = int(meta["size"]), False, 0
        self._ahead_at, self._ahead = 0, b""

    def seek(self, offset: int, whence: int = 0) -> int:
        """As of any file."""
        self._at = offset + (0, self._at, self.size)[whence]
        return self._at

    def tell(self) -> int:
        """Where the next read begins."""
        return self._at

    def read(self, size: int = -1) -> bytes:
        """Read at most so many bytes from here on; fewer only at the end.

        Raises:
            RemoteFileError: the object was replaced, or the object store gives no answer.
        """
        start = self._at
        stop = self.size if size < 0 else min(start + size, self.size)
        if stop - start > READ_BYTES:
            # a column chunk, say: it is held once, and let go of by who asked for it
            self._at = stop
            return self._files.read_range(self._path, self._meta, start, stop)
        if not self._ahead_at <= start <= stop <= self._ahead_at + len(self._ahead):
            end = min(self.size, max(stop, start + READ_BYTES))
            self._ahead = self._files.read_range(self._path, self._meta, start, end)
            self._ahead_at = start
        self._at = stop
        return self._ahead[start - self._ahead_at : stop - self._ahead_at]

    def close(self) -> None:
        """Nothing is held open."""
        self.closed, self._ahead = True, b""


def _split(path: str) -> tuple[str, str]:
    """``s3://bucket`` and the key below it."""
    scheme, _, rest = path.partition("://")
    bucket, _, key = rest.partition("/")
    return f"{scheme}://{bucket}", key


def _pattern(key: str) -> str:
    """A regular expression for the names that a pattern of DuckDB's finds."""
    found = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    pieces = re.split(r"(\*\*/|\*\*|\*|\?|\[[^\]]+\])", key)
    return "".join(
        found.get(piece) or (_one_of(piece[1:-1]) if number % 2 else re.escape(piece))
        for number, piece in enumerate(pieces)
    )


def _one_of(letters: str) -> str:
    """Letters and ranges of them, such as ``a-c``, as a regular expression; after a ``!`` any
    others."""
    escaped = re.sub(r"[\\^\[]", r"\\\g<0>", letters.removeprefix("!"))
    return f"[^/{escaped}]" if letters.startswith("!") else f"[{escaped}]"
