"""What a soak saw, second by second, as lines of text and as a picture."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from math import ceil, log10
from pathlib import Path
from typing import Protocol

import numpy as np

WIDTH, HEIGHT, LEFT, RIGHT = 960, 400, 64, 12
TIMES = (46, 276)
"""Where the times stand, from top to bottom; below them the memory."""
MEMORY = (300, 360)
LOW_MS = 0.1
COLOURS = {
    "flip": "#8ab4f8",
    "rollback": "#f6ae2d",
    "kill": "#d64550",
    "poison": "#7a3e9d",
    "bit": "#2a9d5c",
    "flushall": "#000",
    "failover": "#8c8c8c",
    "night": "#b08968",
}
P50, P99 = "#08519c", "#e6843a"


class Second(Protocol):
    """See :class:`tests.faults.serve_soak.Second`."""

    times_ms: list[float]
    failed: int
    cut: int
    mixed: int
    computed: int
    resident_mb: dict[str, float]


def write_csv(seconds: Mapping[int, Second], path: Path) -> None:
    """A line for each second."""
    lines = ["second,requests,p50_ms,p99_ms,computed,failed,cut,mixed,worker_mb,supervisor_mb"]
    for number, second in sorted(seconds.items()):
        p50, p99 = np.percentile(second.times_ms, [50, 99]) if second.times_ms else (0.0, 0.0)
        seen = f"{number},{len(second.times_ms)},{p50:.2f},{p99:.2f},{second.computed},{second.failed},{second.cut},{second.mixed}"
        lines.append(
            f"{seen},{second.resident_mb.get('worker', 0):.1f},{second.resident_mb.get('supervisor', 0):.1f}"
        )
    path.write_text("\n".join(lines) + "\n")


def write_svg(
    seconds: Mapping[int, Second], events: Sequence[tuple[float, str]], path: Path, length_s: float
) -> None:
    """p50 and p99 over time on a logarithmic scale, what happened meanwhile, and the memory of the
    worker that is never killed."""
    most_mb = 1.25 * max(
        (second.resident_mb.get("worker", 0.0) for second in seconds.values()), default=1.0
    )

    slowest_ms = max(
        (
            float(np.percentile(second.times_ms, 99))
            for second in seconds.values()
            if second.times_ms
        ),
        default=1.0,
    )
    decades = max(3, ceil(log10(slowest_ms / LOW_MS)))

    def x(at: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * min(at, length_s) / length_s

    def ms_y(ms: float) -> float:
        return TIMES[1] - (TIMES[1] - TIMES[0]) * log10(max(ms, LOW_MS) / LOW_MS) / decades

    def mb_y(mb: float) -> float:
        return MEMORY[1] - (MEMORY[1] - MEMORY[0]) * mb / most_mb

    def line(points: Sequence[tuple[float, float]], colour: str) -> str:
        line = " ".join(f"{x(at):.1f},{y:.1f}" for at, y in points)
        return f'<polyline fill="none" stroke="{colour}" stroke-width="1.5" points="{line}"/>'

    def quantile(share: float, colour: str) -> str:
        # the last second is no whole one
        timed = [
            (n, second.times_ms)
            for n, second in sorted(seconds.items())
            if second.times_ms and n < int(length_s)
        ]
        return line(
            [(n + 0.5, ms_y(float(np.percentile(times, share)))) for n, times in timed], colour
        )

    marks = [_mark(x(at), COLOURS[what]) for at, what in events]
    grid = [
        _grid(ms_y(ms), f"{ms:,g} ms") for ms in (LOW_MS * 10**n for n in range(decades + 1))
    ] + [
        _grid(MEMORY[1], "0 MB"),
        _grid(mb_y(most_mb), f"{most_mb:.0f} MB"),
    ]
    ticks = [
        _text(
            x(length_s * part / 6),
            HEIGHT - 22,
            f"{length_s * part / 6:.0f} s",
            "end" if part == 6 else "middle",
        )
        for part in range(7)
    ]
    worker = line(
        [
            (n, mb_y(second.resident_mb["worker"]))
            for n, second in sorted(seconds.items())
            if "worker" in second.resident_mb
        ],
        P50,
    )
    path.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">'
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>{_legend(seconds, events)}{"".join(grid)}{"".join(marks)}'
        f"{quantile(99, P99)}{quantile(50, P50)}{worker}{''.join(ticks)}"
        f"{_text(LEFT, HEIGHT - 6, 'Above: time to answer, each second. Below: resident memory of the worker that is never killed.')}</svg>\n"
    )


def _legend(seconds: Mapping[int, Second], events: Sequence[tuple[float, str]]) -> str:
    """What the colours mean, and what was seen in all."""
    total, at, parts = list(seconds.values()), float(LEFT), []
    times = Counter(what for _, what in events)
    named = [
        (f"{what} ({times[what]})", colour, True) for what, colour in COLOURS.items() if times[what]
    ]
    for words, colour, dashed in [("p50", P50, False), ("p99", P99, False), *named]:
        dash = ' stroke-dasharray="2 3"' if dashed else ""
        parts.append(
            f'<path d="M{at} 32h18" stroke="{colour}" stroke-width="2.5"{dash}/>{_text(at + 23, 36, words)}'
        )
        at += 45 + 7 * len(words)
    summary = f"{sum(len(s.times_ms) for s in total):,} answers: {sum(s.failed for s in total)} failed, {sum(s.mixed for s in total)} of two models; {sum(s.cut for s in total)} connections cut"
    return _text(LEFT, 16, summary) + "".join(parts)


def _mark(x: float, colour: str) -> str:
    return f'<path d="M{x:.1f} {TIMES[0]}V{MEMORY[1]}" stroke="{colour}" stroke-dasharray="2 3"/>'


def _grid(y: float, words: str) -> str:
    return f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="#ddd"/>{_text(LEFT - 6, y + 4, words, "end")}'


def _text(x: float, y: float, words: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{words}</text>'
