"""HTML: elements from tags, attributes and texts. Every text is escaped unless an element of this module made it, so nothing can be forgotten.
Style, bars and figures of the page."""

from __future__ import annotations

import base64
import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import accumulate
from pathlib import Path
from typing import Any

from precompute.store.clock import duration, parsed_time
from precompute.store.offline.runs import Report
from precompute.store.offline.view_store import OfflineStore
from precompute.store.telemetry import instruments as counted
from precompute.store.telemetry.exposition import Totals, totals
from precompute.store.telemetry.instruments import BUCKETS, Instrument, Meter


class Html(str):
    """A piece of HTML that may stand as it is."""

    __slots__ = ()


Child = str | int | None
"""Html as it is, a text or number escaped, None not at all."""

_VOID = frozenset({"meta", "input", "br"})
"""Elements of HTML that have no end; those of SVG all have one, or the next would lie inside."""


def element(tag: str, *children: Child, **attributes: str | float | bool | None) -> Html:
    """``element("a", "text", href="…")``. ``class_`` and ``for_`` lose their underscore, others turn it to a dash; True is an attribute without a value, None or False none."""
    written = "".join(_attribute(name, value) for name, value in attributes.items() if value is not None and value is not False)
    inside = "".join(map(_text, children))
    return Html(f"<{tag}{written}>" if tag in _VOID else f"<{tag}{written}>{inside}</{tag}>")


def joined(*children: Child) -> Html:
    """Several pieces as one."""
    return Html("".join(map(_text, children)))


def _text(child: Child) -> str:
    if child is None:
        return ""
    return child if isinstance(child, Html) else escape(str(child))


def _attribute(name: str, value: str | float | bool) -> str:
    named = name.rstrip("_").replace("_", "-")
    return f" {named}" if value is True else f' {named}="{escape(str(value))}"'


STYLE = """
:root{color-scheme:light dark;--ground:#fbfbfa;--card:#fff;--text:#1c1e21;--quiet:#62676d;--line:#dfe1e4;--fresh:#1a7f37;--stale:#9a6700;--missing:#c4252f;--computed:#0b62b8;--accent:#0b62b8;
--fresh2:#cfe8d5;--stale2:#f3e3b8;--s0:#3b78c2;--s1:#d98b2b;--s2:#4d9a6a;--s3:#a55a9b;--s4:#c25450;--s5:#7b7f86}
@media(prefers-color-scheme:dark){:root{--ground:#121416;--card:#1b1e21;--text:#e5e7ea;--quiet:#9aa1a9;--line:#31363b;--fresh:#46b562;--stale:#d6a02b;--missing:#f2645d;--computed:#62a8f0;--accent:#62a8f0;
--fresh2:#1f3b28;--stale2:#43371a;--s0:#5b97df;--s1:#e2a24e;--s2:#64b283;--s3:#bd78b4;--s4:#dc736f;--s5:#8f949b}}
*{box-sizing:border-box}
body{margin:0;background:var(--ground);color:var(--text);font:15px/1.5 system-ui,-apple-system,"Segoe UI",sans-serif}
main,header,footer{max-width:84rem;margin:0 auto;padding:0 1rem}
header{padding-top:1.4rem}h1{font-size:1.35rem;margin:0}h2{font-size:1.05rem;margin:1.8rem 0 .6rem}h3{font-size:1rem;margin:0;overflow-wrap:anywhere}
p{margin:.25rem 0}.small{font-size:.85rem}.quiet,th,dt,summary,label,footer{color:var(--quiet)}a{color:var(--accent)}code{font-size:.92em;overflow-wrap:anywhere}
.cards{display:grid;gap:.9rem;grid-template-columns:repeat(auto-fit,minmax(min(100%,25rem),1fr))}
.card{background:var(--card);border:1px solid var(--line);border-radius:.6rem;padding:.9rem 1rem;min-width:0}
.head{display:flex;justify-content:space-between;gap:.6rem;align-items:baseline}
.word{font-weight:600;white-space:nowrap}.fresh{color:var(--fresh)}.stale{color:var(--stale)}.missing,.expired,.bad{color:var(--missing)}.computed{color:var(--computed)}
.key{display:inline-block;width:.65rem;height:.65rem;margin-right:.3rem}.legend span{white-space:nowrap;margin-right:.6rem}.found{overflow-wrap:anywhere}
svg:not(.key){display:block;width:100%;overflow:visible}svg text{fill:var(--quiet);font-size:11px}
.zone1{fill:var(--fresh2)}.zone2{fill:var(--stale2)}.mark{fill:var(--text)}.rest{fill:var(--line)}.axis{stroke:var(--line);stroke-width:1}
.f-fresh{fill:var(--fresh)}.f-stale{fill:var(--stale)}.f-missing{fill:var(--missing)}.f-computed{fill:var(--computed)}.f-other{fill:none;stroke:var(--quiet);stroke-width:1.5}
.s0{fill:var(--s0)}.s1{fill:var(--s1)}.s2{fill:var(--s2)}.s3{fill:var(--s3)}.s4{fill:var(--s4)}.s5{fill:var(--s5)}
dl{display:grid;grid-template-columns:max-content 1fr;gap:.1rem .9rem;margin:.6rem 0 0}dd{margin:0;overflow-wrap:anywhere;min-width:0}
summary{cursor:pointer;margin-top:.5rem}details[open] summary{margin-bottom:.3rem}
table{border-collapse:collapse;width:100%}th,td{text-align:left;padding:.3rem .8rem .3rem 0;border-bottom:1px solid var(--line);vertical-align:top;font-weight:400}
td.n,th.n{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}td.bar{width:30%;min-width:7rem}
.ask{display:grid;gap:.9rem}form{display:flex;flex-wrap:wrap;gap:.5rem;align-items:end}label{display:block;font-size:.85rem}
select,input,button{font:inherit;color:inherit;background:var(--card);border:1px solid var(--line);border-radius:.4rem;padding:.4rem .6rem;max-width:100%}
form>div{min-width:0;max-width:100%;flex:0 1 16rem}select{width:100%}form .wide{flex:1 1 16rem}form .wide input{width:100%}button{cursor:pointer}button:hover{border-color:var(--accent)}
.answer{border-left:3px solid var(--accent);margin-top:.9rem}footer{padding:2rem 1rem;font-size:.9rem}
@media(max-width:640px){table.hits thead{display:none}table.hits tr{display:flex;flex-wrap:wrap;gap:0 .8rem;border-bottom:1px solid var(--line);padding:.4rem 0}
table.hits td{border:0;padding:0}table.hits td.bar{order:1;flex:1 0 100%}table.hits td.found{order:2}
table:not([class]) td.bar,table:not([class]) th:last-child{display:none}th,td{padding-right:.5rem}td:first-child{overflow-wrap:anywhere}.legend span{white-space:normal}
table.fold thead{display:none}table.fold tr{display:block;border-bottom:1px solid var(--line);padding:.35rem 0}
table.fold td{display:flex;justify-content:space-between;gap:1rem;border:0;padding:.1rem 0;text-align:right;white-space:normal}
table.fold td::before{content:attr(data-is);color:var(--quiet);text-align:left;white-space:nowrap}table.fold td.bar{width:auto;align-items:center}table.fold td.bar svg{flex:1;width:0}form button{flex:1 1 auto}}
""".strip()

POLICY = (
    "default-src 'none'; style-src 'sha256-"
    + base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
    + "'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
"""Content-Security-Policy of the page: no script at all, no style but this one, nothing from elsewhere."""


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


RUNS = 24
"""Of a view, the newest: what the line of its runs shows; the last few are reported in words."""


@dataclass(frozen=True)
class ViewFigures:
    """One view: ``told`` as :meth:`precompute.store.lookup.Lookup.describe` has it, and its ``runs``, the newest first."""

    told: Mapping[str, Any]
    runs: Sequence[Report] = ()
    readable: bool = True
    """False: what is live cannot be read now, and this is what was last known."""
    trouble: str | None = None
    """What of it is not whole, in words."""


@dataclass(frozen=True)
class Figures:
    """All that the page shows but for the answer to what was asked."""

    views: Sequence[ViewFigures] = ()
    totals: Totals = field(default_factory=dict)
    store_answers: bool = True
    at_s: float = 0.0
    """Seconds since 1970."""

    def counts(self, instrument: Instrument, *labels: str) -> dict[tuple[str, ...], float]:
        """Labels that are left → number, of a counter's series whose first labels are these."""
        series = self.totals.get(instrument.name, {})
        return {key[len(labels) :]: numbers[0] for key, numbers in series.items() if key[: len(labels)] == labels and numbers[0]}

    def times(self, instrument: Instrument) -> dict[str, Times]:
        """First label → what a histogram holds, of those that hold anything."""
        series = self.totals.get(instrument.name, {})
        return {key[0]: times for key, numbers in sorted(series.items()) if (times := Times(numbers[:-1], numbers[-1])).count}


@dataclass(frozen=True)
class Times:
    """A histogram: how many took how long, by :data:`BUCKETS`, and one beyond; and all their seconds."""

    buckets: Sequence[float]
    seconds: float

    @property
    def count(self) -> int:
        """How many were timed."""
        return int(sum(self.buckets))

    def quantile_s(self, share: float) -> float | None:
        """The upper end of the bucket that this share ends in; None beyond the last."""
        wanted = share * self.count
        for upper, below in zip(BUCKETS, accumulate(self.buckets), strict=False):
            if below >= wanted:
                return upper
        return None


def gather(views: Sequence[ViewFigures], meter: Meter, root: Path | None, store_answers: bool) -> Figures:
    """The page's figures: each view with the runs of which the offline store at ``root`` has reports.

    Raises:
        OSError: what the processes counted cannot be read.
    """
    store = None if root is None else OfflineStore(root)
    with_runs = [
        view if store is None else ViewFigures(view.told, _runs(store, str(view.told["view"])), view.readable, view.trouble)
        for view in views
    ]
    return Figures(with_runs, totals(meter), store_answers, time.time())


def _runs(store: OfflineStore, view: str) -> list[Report]:
    return store.view(view).runs.reports(RUNS)


__all__ = ["RUNS", "Figures", "Times", "ViewFigures", "counted", "gather"]
