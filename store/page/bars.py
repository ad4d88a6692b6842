"""Bars: ages, times and shares as small pictures; in SVG with attributes, since the page's policy takes no style of an element."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from precompute.store.clock import duration, parsed_time
from precompute.store.offline.runs import Report
from precompute.store.page.html import Html, element, joined


def percent(share: float) -> str:
    """A share as SVG takes it, between 0 and 100 %."""
    return f"{100 * min(1.0, max(0.0, share)):.2f}%"


def freshness_bar(age_s: float | None, ttl_s: float, stale_for_s: float) -> Html:
    """Age against its limits: the left half is the TTL, the right one ``stale_for``; the mark is the age, and what is past both stands at the end."""
    if age_s is None:
        at = 0.0
    elif age_s <= ttl_s:
        at = 0.5 * age_s / ttl_s if ttl_s else 0.5
    else:
        at = 0.5 + 0.5 * min(1.0, (age_s - ttl_s) / stale_for_s if stale_for_s else 1.0)
    told = (
        "nothing is published"
        if age_s is None
        else f"{duration(age_s)} old; fresh for {duration(ttl_s)}, then stale for {duration(stale_for_s)}"
    )
    return element(
        "svg",
        element("title", told),
        element("rect", class_="zone1", x="0", y="2", width="50%", height="10", rx="3"),
        element("rect", class_="zone2", x="50%", y="2", width="50%", height="10", rx="3"),
        None if age_s is None else element("rect", class_="mark", x=percent(at * 0.99), y="0", width="4", height="14", rx="2"),
        element("text", "0", x="0", y="26"),
        element("text", f"ttl {duration(ttl_s)}", x="50%", y="26", text_anchor="middle"),
        element("text", duration(ttl_s + stale_for_s), x="100%", y="26", text_anchor="end"),
        height="30",
        role="img",
        aria_label=told,
    )


def runs_line(runs: Sequence[Report], now_s: float) -> Html | None:
    """Runs over time, from the oldest shown until now: what flipped the live snapshot, what had nothing to do, what failed."""
    dated = [(at.timestamp(), run) for run in runs if (at := parsed_time(run.started_at)) is not None]
    if not dated:
        return None
    first = min(began for began, _ in dated)
    span = max(now_s - first, 1.0)
    marks = []
    for began, run in reversed(dated):
        x = percent(0.01 + 0.97 * (began - first) / span)
        told = element(
            "title",
            f"{run.started_at[:19]} {run.command}: {run.status}"
            + (f", snapshot {run.snapshot}" if run.snapshot is not None else ""),
        )
        if run.status == "published":
            marks.append(
                element("circle", told, cx=x, cy="9", r="5", class_="f-stale" if run.command == "rollback" else "f-fresh")
            )
        elif run.status in ("current", "committed", "running"):
            marks.append(element("circle", told, cx=x, cy="9", r="4", class_="f-other"))
        else:
            marks.append(element("rect", told, x=x, y="4", width="9", height="9", class_="f-missing"))
    ends = element("text", f"{duration(span)} ago", x="0", y="30"), element("text", "now", x="100%", y="30", text_anchor="end")
    line = element("line", x1="0", x2="100%", y1="9", y2="9", class_="axis")
    label = f"{len(dated)} runs of the last {duration(span)}"
    return element("svg", element("title", label), line, *marks, *ends, height="34", role="img", aria_label=label)


def shares_bar(parts: Mapping[str, float], classes: Sequence[str]) -> Html:
    """Parts of a whole side by side; ``classes`` are their colours."""
    whole, at, rects = sum(parts.values()) or 1.0, 0.0, []
    for (name, value), colour in zip(parts.items(), classes, strict=True):
        rects.append(
            element(
                "rect",
                element("title", name),
                x=percent(at / whole),
                y="0",
                width=percent(value / whole),
                height="10",
                class_=colour,
            )
        )
        at += value
    label = ", ".join(f"{name} {value / whole:.0%}" for name, value in parts.items())
    return element("svg", *rects, height="10", role="img", aria_label=label)


def legend(words: Sequence[str], classes: Sequence[str]) -> Html:
    """What the parts of :func:`shares_bar` are: a square of the colour before each one's words."""
    squares = [element("svg", element("rect", width="100%", height="100%", class_=colour), class_="key") for colour in classes]
    entries = [element("span", square, word) for square, word in zip(squares, words, strict=True)]
    return element("p", *(joined(entry, " ") for entry in entries), class_="legend quiet small")


def columns_bar(counts: Sequence[float]) -> Html:
    """A histogram's buckets, side by side, as high as they hold."""
    most, width = max(counts, default=0.0) or 1.0, 1 / max(1, len(counts))
    rects = [
        element(
            "rect",
            x=percent(i * width),
            y=f"{22 - 22 * count / most:.1f}",
            width=percent(width * 0.85),
            height=f"{22 * count / most:.1f}",
            class_="s0",
        )
        for i, count in enumerate(counts)
        if count
    ]
    return element("svg", joined(*rects), height="22", role="img", aria_label="how many took how long, from 25 µs to 60 s")
