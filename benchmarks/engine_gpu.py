"""A GPU's share, in ten minutes with all that they need to begin: encoders of MiniLM's and
BERT-base's size with random weights, texts to Parquet, an MLP, ``top_k``, a FAISS index, and every
technique once, each beside sentence-transformers or bare torch, with its share of what the GPU
multiplies at most in that precision.

It runs unattended. Each part (:mod:`benchmarks.gpu_parts`) is a process of its own that is ended
when its time is over; what it measured by then is kept, and an error is a figure. After each part
``results/engine_gpu.json`` is written, the most telling first. ``--device cpu --limit 120`` walks
the same way in miniature on any machine, and its figures mean nothing. Prints ``skipped: no GPU``
where there is none.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.common import RESULTS, report

LIMIT_S = 600.0
COMMAND = (sys.executable, "-m", "benchmarks.gpu_parts")
MARGIN = 0.04
"""Of the time, for processes that end and files that are written."""
SHARES: Mapping[str, float] = {
    "minilm": 0.13,
    "bert": 0.12,
    "parquet": 0.10,
    "techniques": 0.40,
    "mlp": 0.07,
    "top_k": 0.05,
    "faiss": 0.08,
    "lost": 0.05,
}
"""Parts, the most telling first, and what each may take of the time; what one leaves, those after
it have."""


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds in all")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", choices=tuple(SHARES), action="append", help="of the parts")
    arguments = parser.parse_args()
    began = time.monotonic()
    if arguments.device == "cuda" and not _gpus():
        print("\nengine_gpu\n  skipped: no GPU")
        return
    name = "engine_gpu" if arguments.device == "cuda" else "engine_gpu_walked_on_cpu"
    chosen = {part: SHARES[part] for part in arguments.only or SHARES}
    figures: dict[str, Any] = {}
    RESULTS.mkdir(exist_ok=True)
    for part, until in deadlines(chosen, began, arguments.limit).items():
        figures[part] = measured(part, arguments.device, until)
        figures["seconds"] = round(time.monotonic() - began, 1)
        print("\n".join(lines({part: figures[part]})), flush=True)
        # as the report at the end, which takes a second or more of imports to name the CPU
        (RESULTS / f"{name}.json").write_text(json.dumps(figures, indent=1))
    report(name, [f"all parts: {figures['seconds']} s of {arguments.limit:.0f}"], figures)


def _gpus() -> int:
    # 1.4 s that the CPU's walk needs in its parts alone
    from precompute.models.device import gpu_count

    return gpu_count()


def deadlines(shares: Mapping[str, float], began: float, limit_s: float) -> dict[str, float]:
    """When each part must be over, by the clock that ``began`` is read from."""
    whole, until, found = sum(shares.values()), 0.0, {}
    for part, share in shares.items():
        until += share / whole
        found[part] = began + until * limit_s * (1 - MARGIN)
    return found


def measured(part: str, device: str, until: float) -> dict[str, Any]:
    """What a part noted until it was over, failed, or was ended; of techniques, which may end a
    process, those after one that did are tried in another."""
    began, ended = time.monotonic(), ""
    notes: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        into, log = Path(folder) / "notes.jsonl", Path(folder) / "log"
        while not ended and time.monotonic() < until:
            noted = len(notes)
            status = _run(
                [part, device, str(into), str(until - time.monotonic()), *notes], log, until
            )
            notes |= _read(into)
            if status == 0:
                break
            tail = log.read_text(errors="replace").strip().splitlines()[-3:]
            ended = "its time was over" if status is None else f"exit status {status}: {tail}"
            # one that ended its process noted that it began
            if part == "techniques" and status is not None and len(notes) > noted:
                ended = ""
    return {
        "seconds": round(time.monotonic() - began, 1),
        **({"ended": ended} if ended else {}),
        "notes": notes if notes or ended else {"left out": "no time"},
    }


def _run(arguments: list[str], log: Path, until: float) -> int | None:
    """The exit status of a part's process, None if its time was over; processes that it began end
    with it."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*COMMAND, *arguments],
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            return process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            return None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _read(into: Path) -> dict[str, Any]:
    notes: dict[str, Any] = {}
    for line in into.read_text().splitlines() if into.is_file() else ():
        # the last may be half a line of a process that was ended
        with contextlib.suppress(ValueError):
            notes |= json.loads(line)
    return notes


def lines(parts: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """A line for each note of each part."""
    return [
        line
        for part, found in parts.items()
        for line in (
            f"{part}: {found['seconds']} s{', ' + found['ended'] if 'ended' in found else ''}",
            *(f"  {name}: {_words(note)}" for name, note in found["notes"].items()),
        )
    ]


def _words(note: Any) -> str:
    if isinstance(note, float):
        return f"{note:,.4g}" if abs(note) < 1000 else f"{note:,.0f}"
    if isinstance(note, dict):
        return ", ".join(f"{name} {_words(value)}" for name, value in note.items())
    return str(note)


if __name__ == "__main__":
    main()
