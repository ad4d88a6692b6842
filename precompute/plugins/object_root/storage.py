"""Storage: a root in an object store (S3, GCS, Azure), by obstore; the folder that it is mounted at
is the cache of its files.

When a reply is lost, the retry finds one's own write and takes it for another writer's. So every
record that is swapped begins with a line of its own, a nonce: a writer that is refused reads it,
and is done where it is its own.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import math
import os
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import obstore
from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    GenericError,
    NotFoundError,
    PreconditionError,
)

from precompute.plugins.object_root.keys import CacheKeys
from precompute.store.disk.bucket import failure, open_store
from precompute.store.disk.crashpoint import crashpoint
from precompute.store.disk.durable_file import replace_undurably, restore
from precompute.store.disk.record import content_of, digest_of
from precompute.store.disk.storage import File, Item, StorageError, is_mounted, mount
from precompute.store.errors import ConfigError, PrecomputeError, SnapshotError, UnreadableError

log = logging.getLogger(__name__)

FRESH_S = 0.5
"""A record or listing that was read so short a time ago is not read again. What is decided by it
is written by compare and swap, or under a lease: as if it was decided so much earlier."""
IMMUTABLE_S = 60.0
"""The same for a record that never changes, but may be removed."""

RETRY_S, REQUEST_S = 12.0, 6.0
"""Seconds for which a request for a record is tried again, and that one try may take: together
below a third of a lease's TTL of 60 s, so that its holder misses no sign of life for a store that
is slow."""
FILE_S = 300.0
"""The same for a file: parts are a few tens of MB."""
AT_ONCE, RECORDS_AT_ONCE = 8, 32
"""Files that are fetched, or sent, side by side; and records, and listings."""
CLOCK_S = 600.0
"""For how long the store's clock goes by what was learnt of it."""
RECORDS = ".records"
"""Folder of the cache where records are kept; each is believed while it bears the tag that a
listing has."""
AFTER_DATA = "data0"
"""After all that lies in a view's ``data/``, as names are sorted: a look does not list that, since
manifests and segments tell of it."""
UNUSED_S = 3600.0
"""A file that was used since stays in the cache, however full it is: a process may open it."""
TRIES = 4
"""Requests for what comes other than it was written: by then a network that flips bits is told from
damage in the store."""
MOST_SEEN = 1000
CHUNK_BYTES = 4 * 2**20
LOGS = ".logs"
"""Prefix of the logs: all of a view's are found by one listing, however many files its runs
have."""

_NONCE = b'{"nonce": "%s"}\n'
_NONCE_BYTES = len(_NONCE % uuid.uuid4().hex.encode())


_R = TypeVar("_R")

_forked = False


def _note_fork() -> None:
    global _forked
    _forked = True


def mounted(url: str, home: Path, keys: Collection[Any]) -> Path:
    """The folder that a root is mounted at: of its cache here. As the door ``root`` has it.

    Raises:
        ConfigError: the URL or the environment cannot be right.
    """
    own = next((one for one in keys if isinstance(one, CacheKeys)), CacheKeys())
    folder = (home / own.cache / digest_of(url.rstrip("/").encode())).absolute()
    if not is_mounted(folder):
        mount(folder, ObjectStorage(url, folder, int(own.cache_gb * 1e9)))
    return folder


class ObjectStorage:
    """A root in an object store, behind :class:`precompute.store.disk.storage.Storage`.

    Args:
        url: ``s3://bucket/prefix``, ``gs://…`` or ``az://…``.
        folder: the cache, laid out as the root; absolute.
        cache_bytes: of parts there, at most.

    Raises:
        ConfigError: the URL or the environment cannot be right.
    """

    local = False

    def __init__(self, url: str, folder: Path, cache_bytes: int = 200 * 10**9) -> None:
        self.url, self._folder = url.rstrip("/"), folder
        try:
            self._records = open_store(url, RETRY_S, REQUEST_S)
            self._files = open_store(url, FILE_S, FILE_S)
        except ConfigError as exc:
            raise ConfigError(f"root: {exc}") from exc
        self._proven, self._lock, self._last_ns = False, threading.Lock(), 0
        self._seen = _Seen()
        self._look = _Look()
        self._ahead = 0.0, -math.inf
        self._cache_bytes = cache_bytes
        os.register_at_fork(after_in_child=_note_fork)

    # ---- records

    def read(self, path: Path, *, immutable: bool = False) -> bytes:
        key, looked = self._key(path), self._looked_at(path.parent)
        listed = looked
        if immutable and looked is None and (self._folder / RECORDS / key).exists():
            tags = self._seen.get(f"{self._key(path.parent)}//", IMMUTABLE_S)
            listed = tags or self._listed(path.parent)
        meta = None if listed is None else listed.objects.get(path.name)
        if looked is not None and meta is None:
            raise _gone(path)
        if meta is not None and (kept := self._kept(key, meta["e_tag"])) is not None:
            return _without_nonce(kept)
        return _without_nonce(self._read(path, IMMUTABLE_S if immutable else FRESH_S)[0])

    def read_ahead(self, folder: Path) -> None:
        def had(path: Path) -> None:
            # who reads it is told
            with contextlib.suppress(OSError):
                self.read(path, immutable=True)

        _at_once(had, [folder / name for name in self._listed(folder).objects], RECORDS_AT_ONCE)

    def _read(self, path: Path, fresh_s: float = 0.0) -> tuple[bytes, Any]:
        """Bytes, and what they are swapped by; as they were up to ``fresh_s`` ago."""
        key = self._key(path)
        seen: tuple[bytes, Any] | None = self._seen.get(key, fresh_s)
        if seen is _ABSENT and (seen := self._seen.get(key, min(fresh_s, FRESH_S))):
            raise _gone(path)
        if seen is None:
            came = list[tuple[bytes, Any]]()
            while True:
                try:
                    with self._translated(path):
                        found = obstore.get(self._records, key)
                        data = found.bytes().to_bytes()
                except FileNotFoundError:
                    self._seen.put(key, _ABSENT)
                    raise
                # what comes alike twice lies there so, and who parses it says that it is damaged
                came, before = [*came, (data, _token(found.meta))], came
                if came[-1] in before or _is_whole(path, data):
                    break
                if len(came) >= TRIES:
                    raise self._flipped(path)
                if before and came[-1][1] != before[-1][1]:
                    # it was replaced meanwhile
                    came = came[-1:]
            seen = self._seen.put(key, came[-1])
            self._keep(key, found.meta["e_tag"], data)
        return seen

    def _flipped(self, path: Path) -> StorageError:
        return StorageError(
            errno.EREMOTEIO,
            f"{self.shown(path)}: each of {TRIES} requests gave other bytes, and none those that"
            " were written: look at the network between this host and the store",
        )

    def _keep(self, key: str, tag: str | None, data: bytes) -> None:
        """Have a record here, below a checksum of its bytes and of the tag that the store gave
        them; that there is no room for it is no error."""
        path = self._folder / RECORDS / key
        with contextlib.suppress(OSError):
            _here(path)
            replace_undurably(path, _vouched(tag, data) + data)

    def _kept(self, key: str, tag: str | None) -> bytes | None:
        """The record that has a tag in the store, where it is here and whole."""
        try:
            kept = (self._folder / RECORDS / key).read_bytes()
        except OSError:
            return None
        data = kept[_VOUCHED_BYTES:]
        return data if tag and kept.startswith(_vouched(tag, data)) else None

    def create(self, path: Path, data: bytes, *, point: str | None = None) -> None:
        self.check_writable(self._folder)
        _here(path)
        if point is not None:
            crashpoint(f"{point}.write")
        while not self._put(path, data, "create"):
            try:
                found = self._read(path)[0]
            except FileNotFoundError:
                # two at once, and neither was first
                continue
            if found != data:
                raise FileExistsError(errno.EEXIST, "somebody else created it", str(path))
            break
        if point is not None:
            crashpoint(f"{point}.link")
            crashpoint(f"{point}.dirsync")

    def update(
        self,
        path: Path,
        change: Callable[[bytes | None], bytes],
        *,
        durably: bool = True,
    ) -> None:
        self.check_writable(self._folder)
        _here(path)
        ours, fresh_s = b"", FRESH_S
        while True:
            try:
                before, token = self._read(path, fresh_s)
            except FileNotFoundError:
                before, token = None, "create"
            if before is not None and ours and before.startswith(ours):
                # the reply to it was lost
                break
            try:
                data = change(None if before is None else _without_nonce(before))
            except PrecomputeError:
                if not fresh_s:
                    raise
                # it may be another by now
                fresh_s = 0.0
                continue
            if before is not None and data == _without_nonce(before):
                return None
            ours = _NONCE % uuid.uuid4().hex.encode()
            if self._put(path, ours + data, token):
                break
            fresh_s = 0.0
        return None

    @contextlib.contextmanager
    def _changing(self, path: Path) -> Iterator[None]:
        """As :meth:`_translated`; what was seen of it and of its folder is forgotten, what another
        thread sees meanwhile, too."""
        try:
            with self._translated(path):
                yield
        finally:
            folder = self._key(path.parent)
            # of what else is listed there the tags stay
            (self._seen.get(f"{folder}//", IMMUTABLE_S) or _NOTHING).objects.pop(path.name, None)
            self._seen.forget(self._key(path), f"{folder}/")
            self._written(folder)

    def _put(self, path: Path, data: bytes, mode: Any) -> bool:
        """Whether it was written as ``mode`` demands; where no answer came, whether it is there."""
        try:
            self._write(path, data, mode)
            return True
        except (AlreadyExistsError, PreconditionError, FileNotFoundError):
            # it changed, or was removed, since it was read
            return False
        except StorageError:
            # it may be there all the same
            with contextlib.suppress(OSError):
                if self._read(path)[0] == data:
                    return True
            raise

    def write(self, path: Path, data: bytes) -> None:
        _here(path)
        self._write(path, data, "overwrite")

    def _write(self, path: Path, data: bytes, mode: Any) -> None:
        key = self._key(path)
        with self._changing(path):
            put = _insist(
                partial(obstore.put, self._records, key, data, mode=mode, use_multipart=False)
            )
        self._keep(key, put["e_tag"], data)

    def delete(self, path: Path) -> None:
        with contextlib.suppress(FileNotFoundError), self._changing(path):
            _insist(partial(obstore.delete, self._records, self._key(path)))
        for here in (path, self._folder / RECORDS / self._key(path)):
            here.unlink(missing_ok=True)

    def delete_all(self, folder: Path) -> None:
        for prefix in (self._key(folder), f"{LOGS}/{self._key(folder)}"):
            with self._translated(folder):
                for found in obstore.list(self._records, prefix, chunk_size=1000):
                    gone = [item["path"] for item in found]
                    _insist(partial(obstore.delete, self._records, gone))
        self._seen.clear()
        self._written(self._key(folder))
        for here in (folder, self._folder / RECORDS / self._key(folder)):
            with contextlib.suppress(FileNotFoundError):
                shutil.rmtree(here)

    # ---- listings

    @contextlib.contextmanager
    def look(self, root: Path, folders: Collection[Path] | None = None) -> Iterator[None]:
        try:
            trees = {"": {"": self._listed(root)}}
            if folders is None:
                folders = [root / name for name in trees[""][""].folders if name[0] != "."]
            _at_once(lambda folder: trees.update([self._tree(folder)]), folders, RECORDS_AT_ONCE)
            self._look.trees = trees
        except StorageError as exc:
            # who reads is told, without a request that gets no answer for each
            self._look.trees = exc
        try:
            yield
        finally:
            self._look.trees = None

    def _tree(self, folder: Path) -> tuple[str, dict[str, _Listing]]:
        """What lies in a view's folder, and in those below it, but for its data, by folder; records
        that are kept here of what is there no more are removed."""
        key, tree = self._key(folder), dict[str, _Listing]()
        for meta in self._below(folder, key, f"{key}/{AFTER_DATA}"):
            above, _, name = meta["path"].rpartition("/")
            tree.setdefault(above, _Listing()).objects[name] = meta
            while above != key:
                above, _, name = above.rpartition("/")
                tree.setdefault(above, _Listing()).folders.add(name)
        kept = self._folder / RECORDS
        for path in (kept / key).rglob("*.json*"):
            of = tree.get(path.parent.relative_to(kept).as_posix(), _NOTHING)
            if path.name not in of.objects:
                path.unlink(missing_ok=True)
        return key, tree

    def _looked_at(self, folder: Path) -> _Listing | None:
        """What was in a folder when the look that goes on began; None where there is none, or it
        does not know."""
        trees, key = self._look.trees, self._key(folder)
        if isinstance(trees, StorageError):
            raise trees
        top, _, below = key.partition("/")
        if trees is None or top not in trees or "" < below < AFTER_DATA:
            return None
        return trees[top].get(key, _NOTHING)

    def _written(self, key: str) -> None:
        """Forget what the look knows of the view that a key is of."""
        if isinstance(self._look.trees, dict):
            self._look.trees.pop(key.partition("/")[0], None)

    def names(self, folder: Path) -> list[str]:
        found = self._listed(folder)
        return [*found.folders, *found.objects]

    def items(self, folder: Path) -> list[Item]:
        return [_item(folder / name, meta) for name, meta in self._listed(folder).objects.items()]

    def _listed(self, folder: Path) -> _Listing:
        key = self._key(folder)
        listed: _Listing | None = self._looked_at(folder) or self._seen.get(f"{key}/", FRESH_S)
        if listed is None:
            with self._translated(folder):
                found = obstore.list_with_delimiter(self._records, key or None)
            listed = _Listing(
                {name.rpartition("/")[2] for name in found["common_prefixes"]},
                {meta["path"].rpartition("/")[2]: meta for meta in found["objects"]},
            )
            self._seen.put(f"{key}/", listed)
            self._seen.put(f"{key}//", _Listing(set(), dict(listed.objects)))
        return listed

    def stat(self, path: Path) -> Item | None:
        if (looked := self._looked_at(path.parent)) is not None:
            meta = looked.objects.get(path.name)
            return None if meta is None else _item(path, meta)
        try:
            with self._translated(path):
                return _item(path, obstore.head(self._records, self._key(path)))
        except FileNotFoundError:
            return None

    def changed_ns(self, folder: Path) -> int | None:
        items = self.items(folder)
        # one that was removed counts, too
        return max(item.modified_ns for item in items) + len(items) if items else None

    def now_s(self, folder: Path) -> float:
        ahead_s, learnt_at_s = self._ahead
        # that clock may have been set right
        if _awake_s() >= learnt_at_s + CLOCK_S:
            probe = self._folder / f".probe-{uuid.uuid4().hex}"
            self.write(probe, b"")
            try:
                item, learnt_at_s = self.stat(probe), _awake_s()
            finally:
                self.delete(probe)
            if item is None:
                raise _gone(probe)
            ahead_s = item.modified_ns / 1e9 - learnt_at_s
            self._ahead = ahead_s, learnt_at_s
        return _awake_s() + ahead_s

    def afresh(self, folder: Path) -> None:
        self._written(self._key(folder))
        self._seen.clear()

    def size_bytes(self, folder: Path) -> int:
        key = self._key(folder)
        return sum(
            meta["size"]
            for prefix in (key, f"{LOGS}/{key}")
            for meta in self._below(folder, prefix)
        )

    # ---- files

    def put(self, paths: Sequence[Path]) -> None:
        _at_once(self._send, paths, AT_ONCE)

    def _send(self, path: Path) -> None:
        with self._changing(path):
            obstore.put(self._files, self._key(path), path)

    def fetch(self, files: Iterable[File], *, again: bool = False) -> bool:
        away = [file for file in files if again or not _is_here(file)]
        _at_once(partial(self._get, again=again), away, AT_ONCE)
        if away:
            self._trim()
        return True

    def _get(self, file: File, *, again: bool) -> None:
        path, before = file.path, ""
        temporary = path.with_name(f".{path.name}.{os.getpid()}.{uuid.uuid4().hex[:8]}.tmp")
        try:
            for _ in range(TRIES):
                digest = hashlib.sha256()
                with self._translated(path):
                    _here(path)
                    found = obstore.get(self._files, self._key(path))
                    with temporary.open("wb") as out:
                        for chunk in found.stream(min_chunk_size=CHUNK_BYTES):
                            digest.update(chunk)
                            out.write(chunk)
                if not file.sha256 or digest.hexdigest() == file.sha256:
                    break
                if digest.hexdigest() == before:
                    raise SnapshotError(
                        f"{self.shown(path)} differs from its checksum in the manifest: it was"
                        " damaged or changed in the store"
                    )
                before = digest.hexdigest()
            else:
                raise self._flipped(path)
            # no process maps one that is cut short beyond its end
            if again and path.is_file() and path.stat().st_size <= temporary.stat().st_size:
                restore(path, temporary)
            else:
                temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)

    def _trim(self) -> None:
        """Remove the parts that were not used for longest, where they are too many; what is served
        stays while it is. And what processes that were killed while they fetched left."""
        for folder in ("data/*", "online", "index/*"):
            for path in self._folder.glob(f"*/{folder}/.*.tmp"):
                with contextlib.suppress(OSError):
                    if path.stat().st_mtime < time.time() - UNUSED_S:
                        path.unlink()
        found = []
        for path in self._folder.glob("*/data/*/*.parquet"):
            with contextlib.suppress(OSError):
                stat = path.stat()
                found.append((stat.st_atime, stat.st_size, path))
        over = sum(size for _, size, _ in found) - self._cache_bytes
        for used_s, size, path in sorted(found):
            if over <= 0 or used_s > time.time() - UNUSED_S:
                return
            path.unlink(missing_ok=True)
            over -= size

    # ---- logs

    def append(self, path: Path, line: bytes, *, first: bool = False) -> None:
        with self._lock:
            self._last_ns = max(time.time_ns(), self._last_ns + 1)
            key = f"{self._log(path)}/{self._last_ns:020d}"
        with self._translated(path):
            obstore.put(self._records, key, line, use_multipart=False)
        if not first:
            crashpoint("journal.append")

    def appended(self, path: Path, *, first: bool = False) -> bytes:
        keys = sorted(meta["path"] for meta in self._below(path, self._log(path)))
        if not keys:
            raise _gone(path)

        def line(key: str) -> bytes:
            with self._translated(path):
                return obstore.get(self._records, key).bytes().to_bytes()

        with ThreadPoolExecutor(RECORDS_AT_ONCE) as pool:
            return b"".join(pool.map(line, keys[:1] if first else keys))

    def logs(self, folder: Path, name: str) -> list[Item]:
        prefix, logs = self._log(folder), dict[str, Item]()
        for meta in self._below(folder, prefix):
            run, log, _ = meta["path"].removeprefix(f"{prefix}/").split("/")
            if log == name:
                item, before = _item(folder / run / name, meta), logs.get(run)
                if before is not None:
                    item = item._replace(
                        size_bytes=item.size_bytes + before.size_bytes,
                        modified_ns=max(item.modified_ns, before.modified_ns),
                    )
                logs[run] = item
        return [logs[run] for run in sorted(logs)]

    def end_log(self, path: Path) -> None:
        keys = [meta["path"] for meta in self._below(path, self._log(path))]
        # the first line last: without it the others belong to no log
        with self._translated(path):
            for some in filter(None, (sorted(keys)[1:], sorted(keys)[:1])):
                _insist(partial(obstore.delete, self._records, some))

    def _below(self, path: Path, prefix: str, after: str | None = None) -> Iterator[Any]:
        with self._translated(path):
            for found in obstore.list(self._records, prefix, offset=after, chunk_size=1000):
                yield from found

    # ---- names and errors

    def shown(self, path: Path) -> str:
        return f"{self.url}/{self._key(path)}".rstrip("/")

    def _key(self, path: Path) -> str:
        relative = path.relative_to(self._folder).as_posix()
        return "" if relative == "." else relative

    def _log(self, path: Path) -> str:
        return f"{LOGS}/{self._key(path)}"

    @contextlib.contextmanager
    def _translated(self, path: Path) -> Iterator[None]:
        """Errors of the library as the house's; those that a conditional write expects pass."""
        if _forked:
            raise StorageError(
                errno.EREMOTEIO,
                f"{self.url}: this process was forked from one that talks to the object store, and"
                " cannot talk to it: start it by spawn or forkserver",
            )
        try:
            yield
        except (AlreadyExistsError, PreconditionError):
            raise
        except (NotFoundError, FileNotFoundError) as exc:
            if any(word in str(exc) for word in ("NoSuchBucket", "ContainerNotFound")):
                raise StorageError(
                    errno.EREMOTEIO,
                    f"{self.url}: there is no such bucket: make it, or mend `root` in project.yaml",
                ) from exc
            raise _gone(path) from exc
        except BaseError as exc:
            raise StorageError(errno.EREMOTEIO, failure(self.shown(path), exc)) from exc

    def check_writable(self, root: Path) -> None:
        """Refuse a store that takes a second creation or a stale swap for a first one: two writers
        would both believe that they won.

        Raises:
            ConfigError: it lies, or cannot swap.
            StorageError: it refuses, or gives no answer.
        """
        with self._lock:
            if self._proven:
                return
            path = self._folder / f".probe-{uuid.uuid4().hex}"
            key, wrong = self._key(path), list[str]()

            def put(data: bytes, mode: Any) -> Any:
                return _insist(
                    partial(obstore.put, self._records, key, data, mode=mode, use_multipart=False)
                )

            try:
                with self._translated(path):
                    # a lost reply may say so of one's own: only what is believed twice is a lie
                    first = _tried(partial(put, b"1", "create"))
                    if _tried(partial(put, b"2", "create")) is not None:
                        wrong.append("creates an object that is there (If-None-Match)")
                    tag = _token(first or obstore.head(self._records, key))
                    swapped = _tried(partial(put, b"3", tag))
                    if swapped is None and obstore.get(self._records, key).bytes() != b"3":
                        wrong.append("does not swap an object for another (If-Match)")
                    if _tried(partial(put, b"4", tag)) is not None:
                        wrong.append("swaps an object that changed meanwhile (If-Match)")
                    _insist(partial(obstore.delete, self._records, key))
            except StorageError as exc:
                if "not" not in str(exc) or "implement" not in str(exc):
                    raise
                wrong.append(f"has no conditional writes ({exc})")
            if wrong:
                raise ConfigError(
                    f"root: {self.url}: this object store {'; and it '.join(wrong)}, so that two"
                    " runs at once would lose each other's work: use one with conditional writes"
                    " (S3, GCS, Azure, MinIO, R2), or a folder"
                )
            self._proven = True


def _token(meta: Any) -> dict[str, str]:
    """What an object is swapped by."""
    return {name: meta[name] for name in ("e_tag", "version") if meta.get(name)}


@dataclass
class _Listing:
    """What is in a folder: names of folders, and what obstore knows of each object, by name."""

    folders: set[str] = field(default_factory=set)
    objects: dict[str, Any] = field(default_factory=dict)


_NOTHING = _Listing()
_ABSENT = b"", None
"""What was read where there is nothing."""


class _Look(threading.local):
    """The look that a thread goes on with: the folders of each view, or why they are not known."""

    trees: dict[str, dict[str, _Listing]] | StorageError | None = None


class _Seen:
    """What was read or listed lately, by key; of a listing, by the folder's with a slash."""

    def __init__(self) -> None:
        self._values: dict[str, tuple[float, Any]] = {}
        self._lock = threading.Lock()

    def get(self, key: str, fresh_s: float) -> Any:
        """The value of a key; None where it is older."""
        at_s, value = self._values.get(key, (0.0, None))
        return value if _awake_s() < at_s + fresh_s else None

    def put(self, key: str, value: Any) -> Any:
        """Remember a value; returns it."""
        with self._lock:
            now_s = _awake_s()
            if len(self._values) > MOST_SEEN:
                self._values = {
                    k: seen for k, seen in self._values.items() if now_s < seen[0] + FRESH_S
                }
            self._values[key] = now_s, value
        return value

    def forget(self, *keys: str) -> None:
        with self._lock:
            for key in keys:
                self._values.pop(key, None)

    def clear(self) -> None:
        with self._lock:
            self._values.clear()


def _awake_s() -> float:
    """A clock that goes on while the process is stopped or the machine asleep."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _tried(put: Callable[[], Any]) -> Any:
    """What a conditional write returned; None where it was refused."""
    try:
        return put()
    except (AlreadyExistsError, PreconditionError):
        return None


def _insist(request: Callable[[], _R]) -> _R:
    """What a request comes to that the library tries once alone when its time is over: it may have
    been done."""
    ends_s = _awake_s() + RETRY_S
    while True:
        try:
            return request()
        except GenericError:
            if _awake_s() >= ends_s:
                raise
            time.sleep(0.1)


def _is_whole(path: Path, data: bytes) -> bool:
    """Whether a record is what was written; of other things that is not known."""
    data = _without_nonce(data)
    try:
        for record in data.splitlines() if path.suffix == ".jsonl" else (data,):
            content_of(record, path)
    except UnreadableError:
        # of another format: whole
        return True
    except ValueError:
        return False
    return True


def _vouched(tag: str | None, data: bytes) -> bytes:
    return digest_of(f"{tag} ".encode() + data).encode()


_VOUCHED_BYTES = len(_vouched("", b""))


def _at_once(do: Callable[[Any], None], things: Collection[Any], most: int) -> None:
    if things:
        with ThreadPoolExecutor(min(most, len(things))) as pool:
            # each of them is tried, whatever became of those before
            done = [pool.submit(do, thing) for thing in things]
        for future in done:
            future.result()


def _gone(path: Path) -> FileNotFoundError:
    return FileNotFoundError(errno.ENOENT, "there is no such object", str(path))


def _without_nonce(data: bytes) -> bytes:
    return data[_NONCE_BYTES:] if data.startswith(_NONCE[: _NONCE.index(b"%")]) else data


def _here(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)


def _is_here(file: File) -> bool:
    """Whether a file is in the cache; note that it was used just now."""
    try:
        stat = file.path.stat()
        if stat.st_size != file.size_bytes:
            return False
        os.utime(file.path, ns=(time.time_ns(), stat.st_mtime_ns))
    except OSError:
        return False
    return True


def _item(path: Path, meta: Any) -> Item:
    modified_ns = int(meta["last_modified"].timestamp() * 1e6) * 1000
    return Item(path.parent, path.name, meta["size"], modified_ns)
