"""Which tests are slow: those whose cases took more than a second together, by the durations that
``make test`` recorded.

python -m tests.slow var/core.xml var/tests.xml > tests/slow.txt
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from xml.etree import ElementTree

SLOW = {
    name: int(seconds)
    for line in Path(__file__).with_suffix(".txt").read_text().splitlines()
    for name, seconds in [line.split()]
}
"""``path::test``, or ``path::Class::test``, of all cases of a test → seconds they took together."""
LIMIT_S = 1.0


def name_of(node_id: str) -> str:
    """A test's name without its case."""
    return node_id.partition("[")[0]


def slow(recorded: Iterable[Path]) -> dict[str, float]:
    """The slow tests of JUnit files, and the seconds of each."""
    seconds: dict[str, float] = defaultdict(float)
    for case in (case for path in recorded for case in ElementTree.parse(path).iter("testcase")):
        module, *classes = case.attrib["classname"].partition(".Test")
        path = module.replace(".", "/") + ".py"
        owner = [f"Test{classes[1]}"] if classes[1] else []
        seconds[name_of("::".join([path, *owner, case.attrib["name"]]))] += float(
            case.attrib["time"]
        )
    return {name: taken for name, taken in seconds.items() if taken > LIMIT_S}


if __name__ == "__main__":
    found = slow(map(Path, sys.argv[1:]))
    print("\n".join(f"{name} {found[name]:.0f}" for name in sorted(found)))
