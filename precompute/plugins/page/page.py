"""Page: the page at ``/``: views and how fresh they are, their runs, latency, fallback; a box to
look a key up and to search; and the page of one run. Neither has a script, or anything from
elsewhere."""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qs, urlencode

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from precompute.plugins.page.figures import (
    BAD_ENDS,
    Figures,
    ViewFigures,
    age_mark,
    by_trouble,
    duration_ms,
    feature_words,
    gather,
    percent,
    report_path,
    rows_answered,
    run_marks,
    search_words,
    stages,
    tables,
)
from precompute.plugins.page.night_lines import NightLine
from precompute.store.answers.lookup import Lookup
from precompute.store.errors import (
    OnlineStoreError,
    OtherFormatError,
    PrecomputeError,
    RequestError,
    VectorIndexError,
)
from precompute.store.feature_view import Feature
from precompute.store.http.telemetry.instruments import Meter
from precompute.store.keys import key_from_path
from precompute.store.offline.runs import Report
from precompute.store.offline.snapshot import Snapshot
from precompute.store.times import duration, shown_time
from precompute.store.wire.lookup_options import LookupOptions

_FOLDER = Path(__file__).with_name("templates")

STYLE = (_FOLDER / "style.css").read_text(encoding="utf-8")

POLICY = (
    "default-src 'none'; style-src 'sha256-"
    + base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
    + "'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
"""Content-Security-Policy of the page: no script at all, no style but this one, nothing from
elsewhere."""

LOOKUP, NEAR, TEXT = "lookup", "near", "text"
_WAYS = {LOOKUP: "Look up a key", NEAR: "Near a key", TEXT: "Search by text"}
_MOST_BYTES = 8192
_K = 10
_PATIENCE_MS = 3000.0
"""How long the page waits for the model: a person waits longer than a service."""
_TELLING = 3
"""Features of a row that a search found, at most."""
_SHOWN = 8
"""Numbers of a vector, or items of a list, that are shown."""


@dataclass(frozen=True)
class Question:
    """``text`` is a key or a text, by what is done with it: looked up, the nearest of it, or
    searched by."""

    view: str = ""
    text: str = ""
    way: str = LOOKUP
    refresh_s: int = 0
    report: str = ""
    """A view whose report is to be shown, in place of the page."""

    @classmethod
    def of(cls, query: bytes) -> Question:
        """The question of a query string; what cannot be read of it is left out."""
        try:
            given = parse_qs(query[:_MOST_BYTES].decode("latin-1"), max_num_fields=16)
        except ValueError:
            return cls()

        def first(name: str) -> str:
            return given.get(name, [""])[0]

        way, refresh = first("do"), first("refresh")
        return cls(
            first("view"),
            first("q"),
            way if way in _WAYS else LOOKUP,
            (
                min(max(int(refresh), 2), 3600)
                if refresh.isascii() and refresh.isdigit() and len(refresh) < 5
                else 0
            ),
            first("report"),
        )

    @property
    def posed(self) -> bool:
        """Whether there is anything to answer."""
        return bool(self.view and self.text)

    def query(self) -> str:
        """The same as a query string."""
        return urlencode({"view": self.view, "q": self.text, "do": self.way})


def forms(views: Sequence[Mapping[str, Any]], question: Question) -> list[dict[str, Any]]:
    """The forms: plain GETs, so that an answer has an address, and no script is needed. A text is
    for the views alone that can be searched by one."""
    by_key = (LOOKUP, NEAR) if any(view["searchable"] for view in views) else (LOOKUP,)
    by_text = [view["view"] for view in views if view.get("takes_text")]
    made = [
        _form(
            by_key,
            "Key (parts of a composite key with / between them)",
            [view["view"] for view in views],
            question,
        )
    ]
    return made + ([_form((TEXT,), "Text", by_text, question)] if by_text else [])


def _form(
    ways: Sequence[str], label: str, views: Sequence[str], question: Question
) -> dict[str, Any]:
    return {
        "name": ways[0],
        "label": label,
        "views": views,
        "ways": {way: _WAYS[way] for way in ways},
        "own": question.way in ways,
    }


def answered(lookup: Lookup, question: Question) -> tuple[int, dict[str, Any] | None]:
    """HTTP's status, and the answer for people: ``row``, or the ``rows`` that a search found, or
    the ``problem`` in words."""
    if not question.posed:
        return 200, None
    try:
        return 200, _row(lookup, question) if question.way == LOOKUP else _found(lookup, question)
    except PrecomputeError as exc:
        status = exc.status if isinstance(exc, RequestError) else 503
        if isinstance(exc, OtherFormatError):
            problem = "what is live is of a format that this version does not read"
        elif isinstance(exc, (OnlineStoreError, VectorIndexError)):
            problem = "the online store or the index does not answer"
        else:
            problem = str(exc)
        return status, {"problem": problem}


def _key(lookup: Lookup, question: Question) -> str:
    pointer = lookup.online.live(question.view)
    entity: Sequence[str] = ("key",) if pointer is None else pointer.view.entity
    return key_from_path(question.text.encode(), entity) if len(entity) > 1 else question.text


def _row(lookup: Lookup, question: Question) -> dict[str, Any]:
    answer = lookup.begin(
        question.view, [_key(lookup, question)], LookupOptions(deadline_ms=_PATIENCE_MS)
    )
    answer.wait()
    return {"row": answer.rows()[0]}


def _found(lookup: Lookup, question: Question) -> dict[str, Any]:
    pointer = lookup.online.live(question.view)
    features = [] if pointer is None else telling(pointer.view.features)
    if question.way == NEAR:
        found = lookup.search(question.view, key=_key(lookup, question), k=_K, features=features)
    else:
        found = lookup.search(
            question.view, text=question.text, k=_K, deadline_ms=_PATIENCE_MS, features=features
        )
    # from 0, so that lengths are to each other as scores are: of a cosine to 1, else to the largest
    longest = (
        1.0
        if found["metric"] == "cosine"
        else max((row["score"] for row in found["rows"]), default=0.0)
    )
    rows = [
        row
        | {
            "near": min(1.0, max(0.0, row["score"] / longest)) if longest > 0 else 0.0,
            "query": Question(question.view, row["key"]).query(),
        }
        for row in found["rows"]
    ]
    return {"rows": rows, "metric": found["metric"], "features": features}


def telling(features: Sequence[Feature]) -> list[str]:
    """The features by which a person knows a row again: texts first, then other values and lists;
    vectors where there is nothing else."""
    kinds = {f.name: 2 if f.dim is not None else 0 if f.dtype == "string" else 1 for f in features}
    names = sorted(kinds, key=kinds.__getitem__)
    return [name for name in names if kinds[name] < 2][:_TELLING] or names[:1]


def shown(value: Any) -> str:
    """A feature's value in a line: of a vector or list the first few, and how many there are."""
    if isinstance(value, float):
        return f"{value:.6g}"
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, (list, tuple)):
        first = ", ".join(shown(item) for item in value[:_SHOWN])
        return f"[{first}, … ] ({len(value)})" if len(value) > _SHOWN else f"[{first}]"
    text = str(value)
    return text if len(text) <= 500 else text[:497] + "…"


class Page:
    """The page over one lookup; what it does, a thread does that no lookup waits for.

    Args:
        lookup: answers the box's requests.
        meter: what the server's processes counted.
        look: each view as far as it is known, and whether the online store answers.
    """

    def __init__(
        self, lookup: Lookup, meter: Meter, look: Callable[[], tuple[Sequence[ViewFigures], bool]]
    ) -> None:
        self._lookup, self._meter, self._look = lookup, meter, look

    def render(self, query: bytes) -> tuple[int, str]:
        """HTTP's status and the HTML, for a query string.

        Raises:
            OSError: what the processes counted cannot be read.
        """
        question = Question.of(query)
        views, answers = self._look()
        # by the names of views alone: no address leads to another file
        if question.report in [str(view.details["view"]) for view in views]:
            path = report_path(self._lookup.root, question.report)
            if path is not None:
                return 200, path.read_text(encoding="utf-8", errors="replace")
        status, answer = answered(self._lookup, question)
        return status, status_page(
            gather(views, self._meter, self._lookup.root, answers), question, answer
        )


def render(template: str, **shown: Any) -> str:
    """One of the templates as HTML."""
    return _TEMPLATES.get_template(template).render(**shown)


_NOTHING = Question()


def status_page(
    figures: Figures, question: Question = _NOTHING, answer: Mapping[str, Any] | None = None
) -> str:
    """The page as HTML; ``answer`` is that to the question."""
    views = sorted(figures.views, key=by_trouble)
    return render(
        "page.html",
        figures=figures,
        views=views,
        question=question,
        answer=answer,
        forms=forms([view.details for view in figures.views], question),
        summary=_summary(figures),
        as_of=shown_time(datetime.fromtimestamp(figures.at_s, UTC)),
        sections=tables(figures),
    )


def _summary(figures: Figures) -> str:
    words = [(view.details["status"] or "missing") for view in figures.views]
    counts = {
        status: words.count(status) for status in ("fresh", "stale", "missing") if status in words
    }
    details = ", ".join(
        f"{count} {'expired' if status == 'missing' else status}"
        for status, count in counts.items()
    )
    return f"{len(words)} view{'s' if len(words) > 1 else ''}: {details}; " if words else ""


_COUNT_COLOURS = {"written": "s2", "unchanged": "s5", "rejected": "s4", "removed": "s1"}


def _templates() -> Environment:
    """What the templates may call, beside what a page hands them; every text is escaped."""
    made = Environment(
        loader=FileSystemLoader(_FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
    )
    made.globals |= {
        "style": STYLE,
        "shown": shown,
        "duration": duration,
        "shown_time": shown_time,
        "duration_ms": duration_ms,
        "percent": percent,
        "age_mark": age_mark,
        "run_marks": run_marks,
        "rows_answered": rows_answered,
        "feature_words": feature_words,
        "search_words": search_words,
        "stages": stages,
        "stage_words": lambda longest: [
            f"{name} {duration_ms(seconds)}" for name, seconds in longest.items()
        ],
        "stage_colours": [f"s{i}" for i in range(6)],
        "status_colours": lambda rows: [f"f-{status}" for status in rows],
        "bad_ends": BAD_ENDS,
        "urlencode": urlencode,
        "pair_most": lambda bars: max(max(bar.first, bar.second) for bar in bars) or 1.0,
        "count_colours": lambda counts: [_COUNT_COLOURS.get(name, "rest") for name in counts],
        "count_words": lambda counts: [f"{rows:,} {name}" for name, rows in counts.items()],
    }
    return made


_TEMPLATES = _templates()


# ---- Run page: the page of one run, one file without script.


COMMONEST_VALUES = "commonest values"

_HEIGHT = 160.0
"""Height of the line of ages, in pixels."""
_MAP = 420.0
"""Width and height of the map, in pixels."""


class Point(NamedTuple):
    """A row on the map: where, from 0 to 1, of which ``kind`` (``new``: computed by the run;
    ``unchanged``; ``before``: of the other snapshot), and its key."""

    x: float
    y: float
    kind: str
    key: str


@dataclass(frozen=True)
class RowMap:
    """A sample of the vectors of ``feature`` along the two directions in which they differ most,
    which hold these ``shares`` of all variance."""

    feature: str
    points: Sequence[Point]
    shares: tuple[float, float]
    rows: int

    def counts(self) -> dict[str, int]:
        """How many points of each kind there are."""
        return {
            kind: n for kind in _KINDS if (n := sum(point.kind == kind for point in self.points))
        }


_KINDS = ("before", "unchanged", "new")


class Bar(NamedTuple):
    """A bar of a feature's values: what it stands for, and the shares of the rows of both snapshots
    that are there."""

    words: str
    first: float
    second: float


@dataclass(frozen=True)
class FeatureSection:
    """One feature: its name and type, ``lines`` of figure, value before and value now, and ``bars``
    of what is plotted of it (``of``: values, lengths, commonest values)."""

    name: str
    kind: str
    lines: Sequence[tuple[str, str, str]]
    bars: Sequence[Bar] = ()
    of: str = ""
    nights: Sequence[NightLine] = ()
    """What the gates look at of it; refused figures first."""

    @property
    def named(self) -> bool:
        """Whether each bar is a value of its own."""
        return self.of == COMMONEST_VALUES


class Age(NamedTuple):
    """The age of the oldest row that was served, in s, from ``since`` to ``until`` (seconds since
    1970); ``known`` is False where it was at least that."""

    since: float
    until: float
    first_s: float
    last_s: float
    known: bool


class Candidate(NamedTuple):
    """A way to compute a view's rows, as it was measured: its rate in float32's, how near it comes
    (a recall, an overlap or a rank correlation, at most 1), and why it is refused, if it is."""

    name: str
    speed: float
    nearness: float
    refused: str | None = None


@dataclass(frozen=True)
class RunFigures:
    """All that the page of a run shows. ``snapshot`` is the run's, or what is live where it
    committed none; ``compared`` the one whose figures stand beside it, and ``compared_as`` what
    that is: ``live``, or ``before``."""

    report: Report
    snapshot: Snapshot | None = None
    live: int | None = None
    compared: int | None = None
    compared_as: str = ""
    rejections: Mapping[str, Any] | None = None
    features: Sequence[FeatureSection] = ()
    maps: Sequence[RowMap] = ()
    index: Mapping[str, Any] | None = None
    ages: Sequence[Age] = ()
    runs: Sequence[Report] = ()
    at_s: float = 0.0
    days: float = 14.0
    notes: Sequence[str] = field(default=())
    """What could not be shown, and why."""
    judged_by: str = ""
    """How many nights its gates judged by, in a sentence."""
    shelf: Sequence[Candidate] = ()
    """What could compute the view's rows."""


def run_page(figures: RunFigures) -> str:
    """The page as HTML."""
    report = figures.report
    stages = sorted(report.stages_s.items(), key=lambda item: -item[1])
    return render(
        "run.html",
        figures=figures,
        report=report,
        snapshot=figures.snapshot,
        # what a browser takes from an element and no header
        policy=POLICY.partition("; frame-ancestors")[0],
        stages_of_run=[(name, seconds) for name, seconds in stages if seconds >= 0.0005],
        counts={name: n for name in _COUNTS if (n := report.counts.get(name, 0))},
        ages=age_lines(figures),
        shelf=shelf_points(figures.shelf),
        kinds={kind: _words(kind, figures) for kind in _KINDS},
        map_size=_MAP,
        as_of=shown_time(datetime.fromtimestamp(figures.at_s, UTC)),
    )


def _words(kind: str, figures: RunFigures) -> str:
    unchanged = "live" if figures.report.snapshot is None else "unchanged"
    return {
        "before": f"of snapshot {figures.compared}",
        "unchanged": unchanged,
        "new": "computed by this run",
    }[kind]


class ShelfPoints(NamedTuple):
    """The drawing of speed against nearness: ``points`` (x, y, candidate, whether none is both
    faster and nearer), ``frontier`` (x, y) of those, and ``ticks`` (x, words) of speed; x from 0 to
    1, y in pixels of ``height``; ``least`` is the nearness at the bottom."""

    points: Sequence[tuple[float, float, Candidate, bool]]
    frontier: Sequence[tuple[float, float]]
    ticks: Sequence[tuple[float, str]]
    least: float
    height: float = _HEIGHT


def shelf_points(shelf: Sequence[Candidate]) -> ShelfPoints | None:
    """Speed, on a scale of logarithms, against nearness; None of less than two candidates."""
    if len(shelf) < 2:
        return None
    speeds = [math.log10(one.speed) for one in shelf]
    low, high = min(speeds), max(speeds)
    # room for names on either side
    span = max(high - low, 0.1)
    least = min(0.9, math.floor(10 * min(one.nearness for one in shelf)) / 10)

    def x(log: float) -> float:
        return round(0.06 + 0.8 * (log - low) / span, 4)

    def is_best(one: Candidate) -> bool:
        return not any(
            (other.speed, other.nearness) != (one.speed, one.nearness)
            and other.speed >= one.speed
            and other.nearness >= one.nearness
            for other in shelf
        )

    points = [
        (x(log), round(_HEIGHT * (1 - (one.nearness - least) / (1 - least)), 2), one, is_best(one))
        for log, one in zip(speeds, shelf, strict=True)
    ]
    frontier = sorted((across, down) for across, down, _, best in points if best)
    ticks = [(x(log), f"{10**log:.3g} ×") for log in (low, high)]
    return ShelfPoints(points, frontier, ticks, least)


_COUNTS = ("written", "unchanged", "rejected", "removed")


class AgeLines(NamedTuple):
    """The drawing of ages: ``lines`` (x1, y1, x2, y2, known), ``limits`` (y, words) that lie in it,
    and ``ticks`` (x, words); x from 0 to 1, y in pixels of ``height``."""

    lines: Sequence[tuple[float, float, float, float, bool]]
    limits: Sequence[tuple[float, str]]
    ticks: Sequence[tuple[float, str]]
    top: str
    height: float = _HEIGHT


def age_lines(figures: RunFigures) -> AgeLines | None:
    """How old the oldest row was that was served; None where nothing was."""
    if not figures.ages or figures.snapshot is None:
        return None
    view = figures.snapshot.view
    begin, end = figures.ages[0].since, max(figures.ages[-1].until, figures.ages[0].since + 1)
    top_s = 1.1 * max(
        view.ttl_s if math.isfinite(view.ttl_s) else 0.0, *(age.last_s for age in figures.ages), 1.0
    )

    def x(at: float) -> float:
        return round((at - begin) / (end - begin), 4)

    def y(age_s: float) -> float:
        return round(_HEIGHT * (1 - min(age_s, top_s) / top_s), 2)

    lines = [(x(a.since), y(a.first_s), x(a.until), y(a.last_s), a.known) for a in figures.ages]
    limits = [(y(view.ttl_s), f"ttl {duration(view.ttl_s)}")] if view.ttl_s < top_s else []
    expires_s = view.ttl_s + view.stale_for_s
    limits += (
        [(y(expires_s), f"expired {duration(expires_s)}")] if view.ttl_s < expires_s < top_s else []
    )
    return AgeLines(lines, limits, _ticks(begin, end, x), duration(top_s))


def _ticks(begin: float, end: float, x: Callable[[float], float]) -> list[tuple[float, str]]:
    """Midnights, at most eight of them; of less than two days the ends alone."""
    first = datetime.fromtimestamp(begin, UTC)
    midnight = first.replace(hour=0, minute=0, second=0, microsecond=0) + timedelta(days=1)
    days = max(1, math.ceil((end - begin) / 86400 / 8))
    ticks = []
    while midnight.timestamp() < end and end - begin >= 2 * 86400:
        ticks.append((x(midnight.timestamp()), f"{midnight:%m-%d}"))
        midnight += timedelta(days=days)
    return ticks or [
        (0.0, f"{first:%m-%dT%H:%MZ}"),
        (1.0, f"{datetime.fromtimestamp(end, UTC):%m-%dT%H:%MZ}"),
    ]
