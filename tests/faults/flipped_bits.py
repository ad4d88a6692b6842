"""Bits flipped in every kind of file and record under root and online, one after the other, under
readers, a scheduler's looks and the nightly run: each is seen or harmless, healed where it can be,
none is served.

    python -m tests.faults.flipped_bits [--flips 500] [--seed 1] [--online redis://…]

The scheduler's reconciler looks again and again, and heals by processes of its own; two readers
never rest: every row and every neighbour that they are given is compared with what was computed. A
flip counts as *seen* when the account, ``status`` or a refusal tells of it; as *rewritten* when
nobody minds and the file is another by the next run; as *unseen* when neither: then `verify` is
asked, and the script ends with 1 where it finds damage that nobody reported. Prints a line for each
kind of file.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import random
import re
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import redis

from precompute.jobs.ops.status import project_status
from precompute.jobs.ops.verify import verify
from precompute.jobs.schedule.reconciler import Reconciler
from precompute.store.account import checker
from precompute.store.errors import PrecomputeError
from tests.fixtures import PROCESSES
from tests.scene import Scene
from tests.server import make_folder, write_numbers

ROWS = 3_000
SEEN_S = 60.0
NOT_FLIPPED = (".lock", ".tmp", "account.json", "sightings.jsonl", "noise")
"""What no flip is aimed at: the account and what it is made of are derived, the reserve holds
nothing."""


def files(project: Scene) -> list[Path]:
    """All that lies under the root, the online store's folder in it, and has bytes."""
    found = [path for path in project.root.rglob("*") if path.is_file() and path.stat().st_size]
    return sorted(path for path in found if not path.name.endswith(NOT_FLIPPED))


def kind_of(project: Scene, path: Path) -> str:
    """What sort of file it is: its path without what differs from one to the next."""
    name = re.sub(
        r"[0-9]{4,}[0-9TZ.a-f-]*|(?<=-)[0-9]+(?=\.)", "N", str(path.relative_to(project.folder))
    )
    return re.sub(r"/[0-9]+\.json", "/N.json", name)


@dataclass(frozen=True)
class Place:
    """Bytes that lie somewhere: ``read`` finds None where nothing is any more."""

    kind: str
    name: str
    read: Callable[[], bytes | None]
    write: Callable[[bytes], object]

    def flip(self, rng: random.Random) -> tuple[bytes, bytes]:
        """One bit; what lay there, and what lies there now."""
        whole = self.read() or b"\0"
        at = rng.randrange(len(whole))
        damaged = whole[:at] + bytes([whole[at] ^ (1 << rng.randrange(8))]) + whole[at + 1 :]
        self.write(damaged)
        return whole, damaged


def places(project: Scene, client: Any = None) -> list[Place]:
    """Every file, and of a Redis every value and field."""
    found = [
        Place(kind_of(project, path), str(path), partial(_read, path), partial(_overwrite, path))
        for path in files(project)
    ]
    for key in [] if client is None else client.scan_iter(count=1000):
        kind = "redis " + re.sub(r"[0-9a-f]{6,}|[0-9]+", "N", key.decode(errors="replace"))
        sort = client.type(key)
        if sort == b"hash":
            for field in client.hkeys(key):
                named = (
                    re.sub(r"[0-9]+", "N", field.decode())
                    if (field.isascii() and b":" in field) or field.isalpha()
                    else "a row"
                )
                write = partial(client.hset, key, field)
                found.append(
                    Place(
                        f"{kind} {named}",
                        f"{key!r} {field!r}",
                        partial(client.hget, key, field),
                        write,
                    )
                )
        elif sort == b"string":
            # not one that has gone meanwhile
            found.append(
                Place(
                    kind,
                    repr(key),
                    partial(client.get, key),
                    partial(client.set, key, keepttl=True),
                )
            )
    return found


def draw(found: Sequence[Place], rng: random.Random) -> Place:
    """One of them, each kind as likely as the other."""
    by_kind: dict[str, list[Place]] = collections.defaultdict(list)
    for place in found:
        by_kind[place.kind].append(place)
    return rng.choice(by_kind[rng.choice(sorted(by_kind))])


def _read(path: Path) -> bytes | None:
    with contextlib.suppress(FileNotFoundError):
        return path.read_bytes()
    return None


def _overwrite(path: Path, data: bytes) -> None:
    """In place: it may be mapped."""
    with path.open("r+b") as file:
        file.write(data)


class Readers:
    """Two threads that look up and search; ``wrong`` is what they were given and must not be."""

    def __init__(self, project: Scene) -> None:
        self.project, self.wrong, self.refused, self.rows = project, list[str](), 0, 0
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._read, args=(seed,)) for seed in range(2)]
        for thread in self._threads:
            thread.start()

    def _read(self, seed: int) -> None:
        try:
            self._look_up(random.Random(seed))
        except Exception as exc:
            # of what no reader may meet
            self.wrong.append("".join(traceback.format_exception(exc)))

    def _look_up(self, rng: random.Random) -> None:
        with self.project.lookup() as lookup:
            while not self._stop.wait(0.002):
                keys = rng.sample(range(ROWS), 50)
                with contextlib.suppress(PrecomputeError):
                    found = lookup.get("numbers", keys).to_pylist()
                    self.rows += len(found)
                    self.wrong += [
                        str(row)
                        for row in found
                        if row["double"] is not None and row["double"] != 2.0 * int(row["key"])
                    ]
                    near = lookup.search("numbers", key=keys[0], k=3)["rows"]
                    self.wrong += [
                        f"{keys[0]} near {row}"
                        for row in near
                        if abs(int(row["key"]) - keys[0]) > 40
                    ]

    def stop(self) -> None:
        """End both."""
        self._stop.set()
        for thread in self._threads:
            thread.join()


class Flipper:
    """Flips a bit, waits until that is seen, and until all is well again."""

    def __init__(
        self,
        project: Scene,
        seed: int,
        counts: dict[str, collections.Counter[str]],
        unseen: list[str],
        by_hand: list[str],
    ) -> None:
        self.project, self.rng, self.said = project, random.Random(seed), list[str]()
        self.counts, self.unseen, self.by_hand = counts, unseen, by_hand
        online = project.online
        self.redis = None if online.startswith("table:") else redis.Redis.from_url(online)
        self.reconciler = Reconciler(project, self.said.append)

    def trouble(self) -> list[str]:
        """What ``status`` minds."""
        return [said for line in project_status(self.project) for said in line["attention"]]

    def flip(self) -> bool:
        """One bit somewhere, each kind as likely as the other; whether all is well again after it,
        without a hand."""
        place = draw(places(self.project, self.redis), self.rng)
        whole, damaged = place.flip(self.rng)
        outcome = self._outcome(place, damaged)
        self.counts[place.kind][outcome] += 1
        if outcome == "unseen":
            self.unseen.append(
                f"{place.name}: {sum(a != b for a, b in zip(whole, damaged, strict=True))} byte differs"
            )
            if place.read() is not None:
                place.write(whole)
        return self._wait_until_well(place)

    def _outcome(self, place: Place, damaged: bytes) -> str:
        before = len(self.said)
        self.reconciler.check()
        if len(self.said) > before:
            return "seen"
        if self.trouble():
            return "seen"
        try:
            self.project.run(full=False)
            self.project.cli("gc")
        except PrecomputeError:
            return "seen"
        if self.trouble():
            return "seen"
        if place.read() != damaged:
            return "rewritten"
        return (
            "unseen"
            if any(not check.ok for check in verify(self.project, "numbers"))
            else "harmless"
        )

    def _wait_until_well(self, place: Place) -> bool:
        ends = time.monotonic() + SEEN_S
        while time.monotonic() < ends:
            self.reconciler.check()
            self.reconciler.wait()
            self.reconciler._not_before.clear()
            if not self.trouble():
                return True
            with contextlib.suppress(PrecomputeError):
                self.project.run()
            if not self.trouble():
                return True
            if time.monotonic() > ends - SEEN_S + 5:
                break
        self.by_hand.append(f"{place.kind}: {'; '.join(self.trouble())}")
        return False


def project_in(folder: Path, online: str | None) -> Scene:
    """A view with an index, live as two segments, a snapshot to go back to, a pin, a
    mark, cached rows."""
    if online is not None:
        # what another folder published there is another project's
        with redis.Redis.from_url(online) as client:
            client.flushdb()
    view = {
        "index": {"on": "vector", "metric": "l2"},
        "source": {"sql": "SELECT * FROM read_parquet('${data}/data.parquet')"},
    }
    project = make_folder(
        folder, {"numbers": view}, **({} if online is None else {"online": online})
    )
    write_numbers(folder, list(range(ROWS - 10)))
    project.run()
    write_numbers(folder, list(range(ROWS)))
    project.run()
    project.offline.view("numbers").pin(1, "kept for the test")
    return project


@contextlib.contextmanager
def every_look_reads_all() -> Iterator[None]:
    """What takes an hour is done in one look."""
    with mock.patch.object(checker, "OFTEN_S", -1.0):
        yield


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--flips", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--online")
    arguments = parser.parse_args()
    sys.path.insert(0, PROCESSES)
    began, number, rows, wrong = time.monotonic(), 0, 0, list[str]()
    counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    unseen, by_hand = list[str](), list[str]()
    while number < arguments.flips:
        # what needs a hand is begun again in another folder
        with tempfile.TemporaryDirectory() as name, every_look_reads_all():
            flipper = Flipper(
                project_in(Path(name), arguments.online),
                arguments.seed + number,
                counts,
                unseen,
                by_hand,
            )
            readers = Readers(flipper.project)
            try:
                well = True
                while well and number < arguments.flips:
                    well = flipper.flip()
                    number += 1
            finally:
                readers.stop()
                flipper.reconciler.stop()
                flipper.reconciler.wait()
            rows += readers.rows
            wrong += readers.wrong
    for kind, outcomes in sorted(counts.items()):
        print(
            f"{kind}: "
            + ", ".join(f"{number} {outcome}" for outcome, number in sorted(outcomes.items()))
        )
    print(
        f"{number} flips, {rows:,} rows read, {len(wrong)} wrong; {len(unseen)} unseen; {len(by_hand)} mended by hand; {time.monotonic() - began:.0f} s"
    )
    print("\n".join([*unseen, *by_hand, *wrong[:20]]))
    sys.exit(bool(unseen or wrong))


if __name__ == "__main__":
    main()
