"""Which tests are slow: those whose cases took more than a second together, by the durations that
``make test`` recorded.

python -m tests.slow var/tests.xml > tests/slow.txt
"""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path
from xml.etree import ElementTree

SLOW = frozenset(Path(__file__).with_suffix(".txt").read_text().splitlines())
"""``path::test``, or ``path::Class::test``, of all cases of a test."""
LIMIT_S = 1.0


def name_of(node_id: str) -> str:
    """A test's name without its case."""
    return node_id.partition("[")[0]


def slow(recorded: Path) -> list[str]:
    """Names of the slow tests of a JUnit file."""
    seconds: dict[str, float] = defaultdict(float)
    for case in ElementTree.parse(recorded).iter("testcase"):
        module, *classes = case.attrib["classname"].partition(".Test")
        path = module.replace(".", "/") + ".py"
        owner = [f"Test{classes[1]}"] if classes[1] else []
        seconds[name_of("::".join([path, *owner, case.attrib["name"]]))] += float(
            case.attrib["time"]
        )
    return sorted(name for name, taken in seconds.items() if taken > LIMIT_S)


if __name__ == "__main__":
    print("\n".join(sorted({name for path in sys.argv[1:] for name in slow(Path(path))})))
