"""The page at ``/``: views and how fresh they are, their runs, latency, fallback; a box to look a key up and to search. No script, nothing from elsewhere.
Its box searches and looks up."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from urllib.parse import parse_qs, urlencode

from precompute.store.clock import duration
from precompute.store.errors import OnlineStoreError, PrecomputeError, RequestError, VectorIndexError
from precompute.store.feature_view import Feature
from precompute.store.key_text import key_from_path
from precompute.store.lookup import Lookup
from precompute.store.lookup_options import LookupOptions
from precompute.store.page.html import STYLE, Child, Figures, Html, ViewFigures, element, gather, joined, shares_bar
from precompute.store.page.sections import by_trouble, caches, fallback, latency, view_card
from precompute.store.search import text_column
from precompute.store.telemetry.instruments import Meter

LOOKUP, NEAR, TEXT = "lookup", "near", "text"
_WAYS = {LOOKUP: "Look up a key", NEAR: "Near a key", TEXT: "Search by text"}
_MOST_BYTES = 8192
_K = 10
_PATIENCE_MS = 3000.0
"""For the model: a person waits longer than a service."""
_TELLING = 3
"""Features of a row that a search found, at most."""
_SHOWN = 8
"""Numbers of a vector, or items of a list, that are shown."""


@dataclass(frozen=True)
class Question:
    """``text`` is a key or a text, by what is done with it: looked up, the nearest of it, or searched by."""

    view: str = ""
    text: str = ""
    way: str = LOOKUP
    refresh_s: int = 0

    @classmethod
    def of(cls, query: bytes) -> Question:
        """What the query string asks; what it does not understand is not asked."""
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
            min(max(int(refresh), 2), 3600) if refresh.isascii() and refresh.isdigit() and len(refresh) < 5 else 0,
        )

    @property
    def asked(self) -> bool:
        """Whether there is anything to answer."""
        return bool(self.view and self.text)

    def query(self) -> str:
        """The same as a query string."""
        return urlencode({"view": self.view, "q": self.text, "do": self.way})


def box(views: Sequence[Mapping[str, Any]], asked: Question) -> Html:
    """The forms: plain GETs, so that an answer has an address, and no script is needed. A text is asked of the views alone that can be searched by one."""
    by_key = (LOOKUP, NEAR) if any(view["searchable"] for view in views) else (LOOKUP,)
    by_text = [view["view"] for view in views if view.get("takes_text")]
    forms = [_form(by_key, [view["view"] for view in views], asked)] + ([_form((TEXT,), by_text, asked)] if by_text else [])
    return element("div", *forms, class_="card ask")


def _form(ways: Sequence[str], views: Sequence[str], asked: Question) -> Html:
    own, name = asked.way in ways, ways[0]
    options = [element("option", view, selected=view == asked.view) for view in views]
    words = "Text" if TEXT in ways else "Key (parts of a composite key with / between them)"
    return element(
        "form",
        element(
            "div",
            element("label", "View", for_=f"{name}-view"),
            element("select", *options, name="view", id=f"{name}-view"),
        ),
        element(
            "div",
            element("label", words, for_=f"{name}-q"),
            element(
                "input",
                name="q",
                id=f"{name}-q",
                value=asked.text if own else "",
                autocomplete="off",
                maxlength=2000,
                required=True,
            ),
            class_="wide",
        ),
        *(element("button", _WAYS[way], name="do", value=way) for way in ways),
        method="get",
    )


def answered(lookup: Lookup, asked: Question) -> tuple[int, Html | None]:
    """HTTP's status, and the answer for people; what cannot be answered is reported in words."""
    if not asked.asked:
        return 200, None
    try:
        body = _row(lookup, asked) if asked.way == LOOKUP else _found(lookup, asked)
        return 200, element("section", element("h2", f"{asked.text[:80]} in {asked.view[:80]}"), body)
    except PrecomputeError as exc:
        status = exc.status if isinstance(exc, RequestError) else 503
        words = (
            "the online store or the index does not answer" if isinstance(exc, (OnlineStoreError, VectorIndexError)) else str(exc)
        )
        return status, element("section", element("h2", "No answer"), element("p", words, class_="bad"), class_="card answer")


def _key(lookup: Lookup, asked: Question) -> str:
    pointer = lookup.online.live(asked.view)
    entity: Sequence[str] = ("key",) if pointer is None else pointer.view.entity
    return key_from_path(asked.text.encode(), entity) if len(entity) > 1 else asked.text


def _row(lookup: Lookup, asked: Question) -> Html:
    answer = lookup.begin(asked.view, [_key(lookup, asked)], LookupOptions(deadline_ms=_PATIENCE_MS))
    answer.wait()
    row = answer.rows()[0]
    told: list[tuple[str, Child]] = [("status", element("span", _status(row), class_=f"word {row['status']}"))]
    if row["status"] != "missing":
        told += [
            ("age", f"{duration(row['age_s'])} of {duration(row['ttl_s'])}"),
            ("computed", f"{row['computed_at']:%Y-%m-%d %H:%M:%S} UTC"),
        ]
    told += [("snapshot", row["snapshot"]), ("model", element("code", row["model"][:12]))]
    told += [(name, shown(value)) for name, value in (row["features"] or {}).items()]
    return element(
        "div", element("dl", *(joined(element("dt", name), element("dd", value)) for name, value in told)), class_="card answer"
    )


def _status(row: Mapping[str, Any]) -> str:
    return f"missing: {row['reason']}" if row["status"] == "missing" else f"{row['status']} from {row['source']}"


def _found(lookup: Lookup, asked: Question) -> Html:
    pointer = lookup.online.live(asked.view)
    features = [] if pointer is None else telling(pointer.view.features)
    if asked.way == NEAR:
        found = lookup.search(asked.view, key=_key(lookup, asked), k=_K, features=features)
    else:
        column = "text" if pointer is None else text_column(pointer)
        found = lookup.search(asked.view, inputs={column: asked.text}, k=_K, deadline_ms=_PATIENCE_MS, features=features)
    # from 0, so that lengths are to each other as scores are: of a cosine to 1, else to the largest
    longest = 1.0 if found["metric"] == "cosine" else max((row["score"] for row in found["rows"]), default=0.0)
    rows = []
    for row in found["rows"]:
        near = min(1.0, max(0.0, row["score"] / longest)) if longest > 0 else 0.0
        link = element("a", row["key"], href="?" + Question(asked.view, row["key"]).query())
        bar = shares_bar({"score": near, "rest": 1 - near}, ["s0", "rest"])
        cells: list[tuple[str, Child, str | None]] = [
            ("key", link, None),
            (found["metric"], f"{row['score']:.4f}", "n"),
            ("", bar, "bar"),
            *((name, shown(row["features"][name]), "found") for name in features),
            ("status", element("span", row["status"], class_=row["status"]), None),
            ("age", duration(row["age_s"]), "n"),
        ]
        rows.append(element("tr", *(element("td", value, class_=kind, data_is=name or None) for name, value, kind in cells)))
    if not rows:
        return element("p", "nothing is near", class_="card answer")
    names = ("key", found["metric"], "", *features, "status", "age")
    head = element(
        "thead", element("tr", *(element("th", name, class_="n" if name in (found["metric"], "age") else None) for name in names))
    )
    return element("div", element("table", head, element("tbody", *rows), class_="hits"), class_="card answer")


def telling(features: Sequence[Feature]) -> list[str]:
    """The features by which a person knows a row again: texts first, then other values and lists; vectors where there is nothing else."""
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
        lookup: answers what the box asks.
        meter: what the server's processes counted.
        look: each view as far as it is known, and whether the online store answers.
    """

    def __init__(self, lookup: Lookup, meter: Meter, look: Callable[[], tuple[Sequence[ViewFigures], bool]]) -> None:
        self._lookup, self._meter, self._look = lookup, meter, look

    def render(self, query: bytes) -> tuple[int, str]:
        """HTTP's status and the HTML, for a query string.

        Raises:
            OSError: what the processes counted cannot be read.
        """
        asked = Question.of(query)
        status, answer = answered(self._lookup, asked)
        views, answers = self._look()
        return status, status_page(gather(views, self._meter, self._lookup.root, answers), asked, answer)


_NOTHING = Question()


def status_page(figures: Figures, asked: Question = _NOTHING, answer: Html | None = None) -> str:
    """The page as HTML; ``answer`` is that to what was ``asked``."""
    views = [view.told for view in figures.views]
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", http_equiv="refresh", content=asked.refresh_s) if asked.refresh_s else None,
        element("title", "Precompute"),
        # the very bytes that the policy names
        Html(f"<style>{STYLE}</style>"),
    )
    body = element(
        "body",
        element("header", element("h1", "Precompute"), _summary(figures), _links()),
        element(
            "main",
            element("h2", "Ask") if views else None,
            box(views, asked) if views else None,
            answer,
            element("h2", "Views"),
            element("div", *(view_card(view, figures) for view in sorted(figures.views, key=by_trouble)), class_="cards")
            if views
            else element("p", "No view is published yet: ", element("code", "precompute run VIEW"), class_="card"),
            latency(figures),
            fallback(figures),
            caches(figures),
        ),
        element(
            "footer",
            element(
                "p",
                "A view's bar is the age of its oldest row: fresh up to the TTL in the middle, stale to the end, expired past it. Of its runs, a full circle is a "
                "snapshot that went live, an empty one a run that changed nothing that is live, a square one that failed. Latencies are upper ends of a histogram's buckets, since the server began.",
            ),
        ),
    )
    return "<!doctype html>" + element("html", head, body, lang="en")


def _summary(figures: Figures) -> Html:
    words = [(view.told["status"] or "missing") for view in figures.views]
    counts = {status: words.count(status) for status in ("fresh", "stale", "missing") if status in words}
    told = ", ".join(f"{count} {'expired' if status == 'missing' else status}" for status, count in counts.items())
    at = datetime.fromtimestamp(figures.at_s, UTC)
    return joined(
        element(
            "p",
            f"{len(words)} view{'s' if len(words) > 1 else ''}: {told}; " if words else "",
            f"as of {at:%Y-%m-%d %H:%M:%S} UTC",
            class_="quiet",
        ),
        None
        if figures.store_answers
        else element("p", "The online store does not answer: this is what was last known.", class_="bad"),
    )


def _links() -> Html:
    return element(
        "p",
        *(
            joined(element("a", words, href=to), " ")
            for words, to in (
                ("API", "openapi.json"),
                ("Metrics", "metrics"),
                ("Readiness", "readyz"),
                ("Refresh every 10 s", "?refresh=10"),
            )
        ),
    )
