"""Sightings: what readers found damaged or missing, for the checker to look at first. Written
beside the view's refs, where that can be; lost, they cost nothing but time."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Sequence
from pathlib import Path

REFS = "refs"
"""Folder of a view, below the root, that has what points at its snapshots, and what is known of
what is live."""
LIVE = "live.json"
"""The live pointer in it."""
NAME = "sightings.jsonl"
MOST_BYTES = 65536
"""A file that no checker takes grows no further: the next look reads all that it can anyway."""
EVERY_S = 1.0
"""Seconds between two lines of one view and process: a damaged row may be requested a thousand
times a second."""
MOST_KEYS = 16

_last: dict[Path, float] = {}
_lock = threading.Lock()


def note(refs: Path, keys: Sequence[str] = ()) -> None:
    """Note rows that were read and are damaged, by their keys; without any, a vector index that
    does not open or search. Where nothing can be written nothing happens."""
    now_s = time.monotonic()
    with _lock:
        if now_s < _last.get(refs, -EVERY_S) + EVERY_S:
            return
        _last[refs] = now_s
    with contextlib.suppress(OSError), (refs / NAME).open("ab") as file:
        if file.tell() < MOST_BYTES:
            file.write(json.dumps(list(keys[:MOST_KEYS])).encode() + b"\n")


def are_there(refs: Path) -> bool:
    """Whether any were noted."""
    return (refs / NAME).exists()


def take(refs: Path) -> list[list[str]] | None:
    """The keys of each note, which is gone with that; None where there is none."""
    taken = refs / f".{NAME}.tmp"
    try:
        (refs / NAME).replace(taken)
        lines = taken.read_bytes().splitlines()
        taken.unlink()
    except OSError:
        return None
    notes = []
    for line in lines:
        with contextlib.suppress(ValueError):
            found = json.loads(line)
            if isinstance(found, list):
                notes.append([key for key in found if isinstance(key, str)])
    return notes
