"""How a worker keeps its memory: what is loaded is not looked through again, and what it frees
comes back to it."""

from __future__ import annotations

import os
import subprocess
import sys

from tests import REPOSITORY

SETTLED = """
import gc, resource
from precompute.jobs.serve.lookup_worker import settle

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def taken():
    before = faults()
    for _ in range(50):
        bytes(2**20)
    return faults() - before

first = taken()
settle()
taken()
print(first, taken(), gc.get_freeze_count() > 1000, gc.get_threshold())
"""


def test_freed_memory_stays_with_the_process() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SETTLED],
        cwd=REPOSITORY,
        env=os.environ,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    first, then, rest = done.stdout.split(maxsplit=2)
    assert rest.strip() == "True (50000, 50, 100)"
    # where it is not glibc's malloc nothing is gained, and nothing lost
    assert int(then) <= int(first)
