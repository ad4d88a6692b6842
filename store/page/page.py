"""The page at ``/``: views and how fresh they are, their runs, latency, fallback; a box to look a key up and to search. No script, nothing from elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime

from precompute.store.lookup import Lookup
from precompute.store.page.figures import Figures, ViewFigures, gather
from precompute.store.page.html import Html, element, joined
from precompute.store.page.question import Question, answered, box
from precompute.store.page.sections import by_trouble, caches, fallback, latency, view_card
from precompute.store.page.style import STYLE
from precompute.store.telemetry.instruments import Meter


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
