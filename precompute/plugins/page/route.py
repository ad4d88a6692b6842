"""Route ``GET /``: the status page, as HTTP serves it."""

from __future__ import annotations

from precompute.store.answers.fallback import handlers_of
from precompute.store.answers.search import takes_text
from precompute.store.http.messages import NOT_STORED, Receive, Reply, Scope
from precompute.store.http.pools import Pool
from precompute.store.http.routes import Handler, Parts, Route, Who


def _handler(parts: Parts) -> Handler:
    # the templates, where they are served
    from precompute.plugins.page.figures import ViewFigures
    from precompute.plugins.page.page import POLICY, Page

    serving, renderers = parts.serving, Pool("page", 1, 4)
    headers = [
        (b"content-type", b"text/html; charset=utf-8"),
        (b"content-security-policy", POLICY.encode()),
        NOT_STORED,
    ]

    def known_views() -> tuple[list[ViewFigures], bool]:
        seen = serving.views.read()
        details = [
            ViewFigures(
                serving.lookup.describe(pointer)
                | {
                    "model_ready": serving.fallback_ready(pointer),
                    "takes_text": takes_text(pointer),
                    "beside_model": [
                        kind.words(pointer.view.powers[key])
                        for key, kind in handlers_of(pointer.view).items()
                        if key != pointer.view.misses_by
                    ],
                },
                readable=pointer.view.name not in seen.unreadable,
                trouble="; ".join(filter(None, (seen.trouble(pointer), seen.behind(pointer))))
                or None,
            )
            for pointer in seen.pointers
        ]
        return details, seen.store_answers

    page = Page(serving.lookup, serving.metrics.meter, known_views)

    async def answer(scope: Scope, receive: Receive) -> Reply:
        status, text = await renderers.run(page.render, scope["query_string"])
        return Reply(status, headers, text.encode())

    return answer


ROUTE = Route("/", "GET", _handler, Who.OPERATORS)
