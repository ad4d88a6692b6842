"""The page: what it shows, that nothing it is told becomes markup, and that a browser may take
nothing else from it."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from precompute.plugins.page.figures import (
    Figures,
    Times,
    ViewFigures,
    age_mark,
    duration_ms,
    run_marks,
)
from precompute.plugins.page.page import (
    LOOKUP,
    NEAR,
    POLICY,
    TEXT,
    Page,
    Question,
    answered,
    shown,
    status_page,
    telling,
)
from precompute.store.doors import METRICS
from precompute.store.feature_view import Feature
from precompute.store.http.metrics import totals
from precompute.store.http.telemetry import instruments as counted
from precompute.store.http.telemetry.instruments import BUCKETS, Meter
from precompute.store.offline.runs import Report, Runs
from tests.world import World

DETAILS: dict[str, Any] = {
    "view": "films",
    "entity": ["film_id"],
    "features": [
        {"name": "vector", "dtype": "float32", "dim": 4},
        {"name": "items", "dtype": "int64", "max_items": 9},
    ],
    "snapshot": 7,
    "published_at": "2026-11-22T13:00:00.000000Z",
    "model": "0123456789abcdef",
    "rows": 1234,
    "ttl_s": 3600.0,
    "stale_for_s": 7200.0,
    "age_s": 1800.0,
    "status": "fresh",
    "coverage": 0.5,
    "searchable": True,
    "index": {"kind": "codes", "recall_bound": 0.971, "query_us": 55.0},
    "fallback": True,
}


class Parsed(HTMLParser):
    """A page's elements and texts; its tags must be balanced."""

    VOID = frozenset({"meta", "input", "br"})

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self._open: list[str] = []
        self.feed(page)
        self.close()
        assert self._open == []
        self.text = " ".join(" ".join(self.texts).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open[-1:] != ["style"]:
            self.texts.append(data)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


def harmless(page: Parsed) -> None:
    """Nothing in it runs, is fetched or is styled from the texts that it shows."""
    assert not page.all("script")
    assert len(page.all("style")) == 1
    for tag, attributes in page.elements:
        assert not any(
            name.startswith("on") or name in ("style", "src", "srcset", "srcdoc")
            for name in attributes
        ), (tag, attributes)
        if "href" in attributes:
            assert tag == "a"
            assert str(attributes["href"]).startswith(("?", "openapi.json", "metrics", "readyz")), (
                attributes
            )


def report(status: str, day: int, **fields: Any) -> Report:
    return Report(
        f"r{day}", "films", "run", status, f"2026-11-{day:02d}T02:00:00.000000Z", **fields
    )


RUNS = [
    report("failed", 21, error="the source <b>cannot</b> be read", seconds=1.5),
    report("current", 20, snapshot=7),
    report(
        "published",
        19,
        snapshot=7,
        counts={"written": 1234, "rejected": 3},
        seconds=65.0,
        stages_s={"model": 60.0, "write": 4.0, "flip": 0.0001},
    ),
]
NOW_S = 1795312800.0
"""2026-11-22T02:00:00Z."""


def test_it_shows_a_view_its_runs_and_its_requests() -> None:
    meter = Meter()
    meter.counter(counted.ROWS, "films", "fresh", "store", "").add(90)
    meter.counter(counted.ROWS, "films", "missing", "", "deadline").add(10)
    for seconds in (0.0002, 0.0002, 0.02):
        meter.timer(counted.REQUEST_SECONDS, "row").observe(seconds)
    meter.counter(counted.FALLBACK_ROWS, "films", "computed").add(5)
    meter.gauge(counted.BREAKER_OPEN, "films").set(1)
    page = Parsed(
        status_page(
            Figures(
                [
                    ViewFigures(
                        DETAILS,
                        RUNS,
                        trouble="the online store lost rows of it; they are being loaded again",
                    )
                ],
                totals(meter),
                True,
                NOW_S,
            )
        )
    )
    harmless(page)
    for text in (
        "oldest row 30 min, snapshot 7, 1,234 rows",
        "vector: float32[4], items: int64[≤9]",
        "50.0% of the source",
        "recall@10 ≥ 97.1% by codes, 55 µs",
        "90 fresh 10 missing (deadline 10)",
        "last run 2026-11-21T02:00:00Z run failed : 0 rows written, 0 rejected, 1.5 s",
        "2 more before it",
        "2026-11-19T02:00:00Z run published , snapshot 7: 1,234 rows written, 3 rejected, 65 s",
        "the source <b>cannot</b> be read",
        "model 60 s write 4 s",
        "row 3 250 µs 25 ms",
        "films 5 computed 0 – open",
        "the online store lost rows of it; they are being loaded again",
    ):
        assert text in page.text


class Guesses:
    """What a power shows."""

    @staticmethod
    def caches(counts: counted.Counts) -> Iterator[counted.CacheFigures]:
        for (view,), found in counts(counted.FUTURE_ROWS).items():
            yield counted.CacheFigures("guesses of", view, found, 4.0, "calls saved", "all wrong")


def test_it_shows_what_was_answered_without_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(METRICS, "all", lambda: [("guesses", Guesses)])
    meter = Meter()
    for cache, outcome, rows in (
        ("l1", "hit", 30),
        ("l1", "miss", 10),
        ("miss_cache", "hit", 5),
        ("miss_cache", "miss", 15),
    ):
        meter.counter(counted.CACHE, cache, outcome).add(rows)
    for outcome, rows in (("stored", 7), ("dropped", 2)):
        meter.counter(counted.CACHE, "miss_cache", outcome).add(rows)
    meter.gauge(counted.CACHE_BYTES, "l1").set(3 * 1024)
    meter.counter(counted.FUTURE_ROWS, "films").add(4)
    details = DETAILS | {"beside_model": ["guesses", "a coin"]}
    page = Parsed(status_page(Figures([ViewFigures(details)], totals(meter), True, NOW_S)))
    harmless(page)
    for text in (
        "the model answers misses, or guesses, or a coin",
        "encoded rows 30 40 reads saved not found reads saved; 3 KiB",
        "cached rows 5 20 calls saved not found calls saved; 7 stored, 2 not",
        "guesses of films 4 8 calls saved not found all wrong",
    ):
        assert text in page.text
    assert "Caches" not in Parsed(status_page(Figures([ViewFigures(DETAILS)]))).texts


def test_without_a_view_it_says_what_to_do() -> None:
    page = Parsed(status_page(Figures()))
    harmless(page)
    assert "precompute run VIEW" in page.texts
    assert not page.all("form")


def test_a_store_that_does_not_answer_is_shown() -> None:
    page = Parsed(
        status_page(Figures([ViewFigures(DETAILS, (), readable=False)], store_answers=False))
    )
    assert "The online store does not answer: this is what was last known." in page.texts
    assert "what is live cannot be read now: this was last known" in page.texts


EVIL = "\"><script>alert(1)</script><img src=x onerror=alert(1)>'&amp;<!--"


def test_no_text_becomes_markup() -> None:
    details = DETAILS | {
        "view": EVIL,
        "entity": [EVIL],
        "model": EVIL,
        "published_at": EVIL,
        "features": [{"name": EVIL, "dtype": EVIL}],
    }
    run = Report(EVIL, EVIL, EVIL, EVIL, "2026-11-20T02:00:00Z", error=EVIL, stages_s={EVIL: 1.0})
    page = Parsed(
        status_page(
            Figures([ViewFigures(details, [run])], at_s=NOW_S),
            Question(EVIL, EVIL),
            {"problem": EVIL},
        )
    )
    harmless(page)
    assert EVIL in page.texts
    assert [given["value"] for given in page.all("input")] == [EVIL]


def test_its_policy_names_its_only_style_and_nothing_else() -> None:
    page = status_page(Figures([ViewFigures(DETAILS, RUNS)], at_s=NOW_S))
    style = page.partition("<style>")[2].partition("</style>")[0]
    hashed = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert (
        f"default-src 'none'; style-src 'sha256-{hashed}'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
        == POLICY
    )


@pytest.mark.parametrize(
    ("age_s", "at"),
    [(0.0, 0.0), (1800.0, 0.25), (3600.0, 0.5), (7200.0, 0.75), (10800.0, 1.0), (1e9, 1.0)],
)
def test_the_mark_stands_at_the_age(age_s: float, at: float) -> None:
    assert age_mark(age_s, 3600, 7200) == pytest.approx(0.99 * at)


def test_limits_of_zero_have_a_bar_too() -> None:
    assert age_mark(5.0, 0.0, 0.0) == 0.99
    page = Parsed(status_page(Figures([ViewFigures(DETAILS | {"age_s": None, "status": None})])))
    assert not [rect for rect in page.all("rect") if rect["class"] == "mark"]


def test_runs_stand_in_their_time_and_by_what_came_of_them() -> None:
    marks, span_s = run_marks(
        [
            *RUNS,
            report("published", 18, snapshot=5),
            Report("r", "films", "run", "failed", "when?"),
        ],
        NOW_S,
    )
    assert [(mark.kind, round(mark.at, 6)) for mark in marks] == [
        ("fresh", 0.01),
        ("fresh", 0.2525),
        ("other", 0.495),
        ("missing", 0.7375),
    ]
    assert (marks[1].words, span_s) == (
        "2026-11-19T02:00:00Z run: published, snapshot 7",
        4 * 86400,
    )
    page = Parsed(status_page(Figures([ViewFigures(DETAILS, RUNS)], at_s=NOW_S)))
    assert [mark["class"] for mark in page.all("circle")] == ["f-fresh", "f-other"]
    assert run_marks([], NOW_S)[0] == []


def test_quantiles_are_upper_ends_of_buckets() -> None:
    buckets = [0.0] * (len(BUCKETS) + 1)
    buckets[3], buckets[-1] = 98.0, 2.0
    times = Times(buckets, 1.0)
    assert (times.count, times.quantile_s(0.5), times.quantile_s(0.98), times.quantile_s(0.99)) == (
        100,
        BUCKETS[3],
        BUCKETS[3],
        None,
    )
    assert [duration_ms(s) for s in (None, 25e-6, 0.0025, 1.25, 300.0)] == [
        "> 60 s",
        "25 µs",
        "2.5 ms",
        "1.25 s",
        "5 min",
    ]


@pytest.mark.parametrize(
    ("query", "question"),
    [
        (b"", Question()),
        (b"view=a&q=1", Question("a", "1", LOOKUP)),
        (b"view=a&q=%C3%A9+x&do=text", Question("a", "é x", TEXT)),
        (b"view=a&q=1&do=near&view=b", Question("a", "1", NEAR)),
        (b"do=drop&q=%00", Question("", "\0", LOOKUP)),
        (b"refresh=10", Question(refresh_s=10)),
        (b"refresh=0", Question(refresh_s=2)),
        (b"refresh=-1", Question()),
        (b"&".join(b"a=1" for _ in range(100)), Question()),
        (b"\xff\xfe=%FF", Question()),
    ],
)
def test_a_question_is_read_from_the_address(query: bytes, question: Question) -> None:
    assert Question.of(query) == question


def test_values_are_shown_short() -> None:
    assert shown([0.123456789] * 3) == "[0.123457, 0.123457, 0.123457]"
    assert shown(list(range(9))) == "[0, 1, 2, 3, 4, 5, 6, 7, … ] (9)"
    assert shown("x" * 600) == "x" * 497 + "…"
    assert shown(None) == "None"


FRAMES = """<script>
const frames = WIDTHS.map(width => Object.assign(document.createElement("iframe"), {width, height: 900, src: "page.html"}))
frames.forEach(frame => { frame.style.border = 0; document.body.append(frame) })
onload = () => { document.title = JSON.stringify(frames.map(frame => {
  const page = frame.contentDocument
  const widest = [...page.querySelectorAll("body *")].map(one => [one.getBoundingClientRect().right, one.tagName + "." + one.getAttribute("class")])
  return [page.documentElement.clientWidth, Math.max(...widest.map(one => one[0])), frame.contentWindow.getComputedStyle(page.body).backgroundColor]
})) }
</script>"""


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium on the PATH")
@pytest.mark.parametrize(
    ("scheme", "ground"),
    [("1", "rgb(251, 251, 250)"), ("0", "rgb(18, 20, 22)")],
    ids=["light", "dark"],
)
def test_in_a_browser_its_style_counts_and_nothing_is_wider_than_a_phone(
    tmp_path: Path, scheme: str, ground: str
) -> None:
    """As Chromium lays it out, under the page's own policy: without the style that it names, the
    ground would be white."""
    meter = Meter()
    for i, timed in enumerate((counted.REQUEST_SECONDS, counted.STAGE_SECONDS)):
        meter.timer(timed, f"of_a_long_name_{i}").observe(61.0)
    for name in ("l1", "miss_cache"):
        meter.counter(counted.CACHE, name, "hit").add(1_234_567_890)
    meter.counter(counted.FALLBACK_ROWS, "films", "unknown_entity").add(1_234_567)
    details = DETAILS | {
        "view": "a_view_whose_name_is_as_long_as_names_may_be_in_this_world_63ch",
        "model": "f" * 64,
    }
    views = [
        ViewFigures(
            details, RUNS, trouble="the online store lost rows of it; they are being loaded again"
        ),
        ViewFigures(DETAILS, RUNS),
    ]
    page = status_page(
        Figures(views, totals(meter), False, NOW_S),
        Question("films", "x" * 200),
        {"problem": "an answer"},
    )
    policy = POLICY.partition("; frame-ancestors")[0]
    (tmp_path / "page.html").write_text(
        page.replace(
            "<head>", f'<head><meta http-equiv="Content-Security-Policy" content="{policy}">'
        )
    )
    (tmp_path / "frames.html").write_text("<body>" + FRAMES.replace("WIDTHS", "[320, 390, 1280]"))
    command = [
        "chromium",
        "--headless=old",
        "--no-sandbox",
        "--disable-gpu",
        "--allow-file-access-from-files",
        "--hide-scrollbars",
    ]
    command += [
        f"--blink-settings=preferredColorScheme={scheme}",
        "--dump-dom",
        f"file://{tmp_path}/frames.html",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    title = re.search("<title>(.*?)</title>", done.stdout)
    assert title is not None, done
    laid_out = json.loads(title[1])
    assert [(width, colour) for width, _, colour in laid_out] == [
        (width, ground) for width in (320, 390, 1280)
    ]
    assert all(right <= width for width, right, _ in laid_out), laid_out


def test_trouble_comes_first_and_texts_are_for_views_that_take_one() -> None:
    def view(name: str, **figures: Any) -> ViewFigures:
        details = {
            field: figures.pop(field)
            for field in ("status", "takes_text", "fallback", "model_ready")
            if field in figures
        }
        return ViewFigures(DETAILS | {"view": name} | details, **figures)

    views = [
        view("a_good", fallback=False, model_ready=False),
        view("b_failed", runs=RUNS, takes_text=True),
        view("c_stale", status="stale"),
        view("d_expired", status=None),
        view("e_lost", trouble="rows are gone"),
        view("f_no_model", model_ready=False),
    ]
    page = status_page(Figures(views, at_s=NOW_S))
    assert re.findall("<h3><code>(.)_", page) == ["e", "f", "d", "c", "b", "a"]
    forms = [
        (re.findall("<option.*?>(.)_", form), re.findall('value="([a-z]+)"', form))
        for form in page.split("<form")[1:]
    ]
    assert forms == [([*"abcdef"], [LOOKUP, NEAR]), (["b"], [TEXT])]
    assert page.count("<form") - 1 == status_page(Figures(views[:1], at_s=NOW_S)).count("<form")


@pytest.mark.parametrize(
    ("metric", "scores", "widths"),
    [
        ("cosine", (0.4819, 0.4736, -0.1), (48.19, 47.36, 0.0)),
        ("dot", (8.0, 6.0), (100.0, 75.0)),
        ("l2", (1.0, 4.0), (25.0, 100.0)),
        ("l2", (0.0,), (0.0,)),
    ],
)
def test_what_a_search_found_has_bars_from_0_and_what_a_person_knows_it_by(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    metric: str,
    scores: tuple[float, ...],
    widths: tuple[float, ...],
) -> None:
    world = World(tmp_path, {"a": 1.0}, fallback=False)
    wanted: list[Any] = []

    def search(view: str, **words: Any) -> Any:
        wanted.append(words["features"])
        row = {"key": "b", "status": "fresh", "age_s": 1.0, "features": {"double": 0.25}}
        return {"metric": metric, "rows": [row | {"score": score} for score in scores]}

    monkeypatch.setattr(world.lookup, "search", search)
    status, answer = answered(world.lookup, Question("things", "a", NEAR))
    assert (status, wanted) == (200, [["double"]])
    page = status_page(Figures(), Question("things", "a", NEAR), answer)
    assert [
        float(width) for width in re.findall(r'width="([0-9.]+)%" height="10" class="s0"', page)
    ] == [*widths]
    assert re.findall('class="found" data-is="double">([^<]*)<', page) == ["0.25"] * len(scores)


@pytest.mark.parametrize(
    ("features", "details"),
    [
        (
            (Feature("v", "float32", dim=2), Feature("n", "int32"), Feature("t", "string")),
            ["t", "n"],
        ),
        ((Feature("v", "float32", dim=2), Feature("w", "float32", dim=2)), ["v"]),
        (tuple(Feature(name, "int32") for name in "abcd"), ["a", "b", "c"]),
    ],
)
def test_a_row_shows_its_texts_before_numbers_and_vectors_last(
    features: tuple[Feature, ...], details: list[str]
) -> None:
    assert telling(features) == details


def test_the_page_links_reports_and_shows_those_of_views_alone(tmp_path: Path) -> None:
    world = World(tmp_path, {"a": 1.0}, fallback=False)
    page = Page(
        world.lookup, Meter(), lambda: ([ViewFigures(DETAILS | {"view": "things"}, RUNS)], True)
    )
    for folder in ("things", "others", "things/notes"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "report.html").write_text(f"<p>{folder}")
    Runs(tmp_path / "things" / "runs", tmp_path / "running", "things").write(RUNS[2])
    assert page.render(b"report=things") == (200, "<p>things")
    for query in (
        b"",
        b"report=others",
        b"report=things/notes",
        b"report=../others",
        b"report=",
        b"report=%00",
    ):
        status, text = page.render(query)
        assert status == 200
        assert "?report=things" in [a["href"] for a in Parsed(text).all("a")], query
    (tmp_path / "things" / "report.html").unlink()
    harmless(shown := Parsed(page.render(b"report=things")[1]))
    assert "precompute report things" in shown.text
