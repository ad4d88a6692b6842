"""The API against its own document, by schemathesis with all of its checks: what conforms is answered, what does not is refused, all in the forms described."""

from __future__ import annotations

from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, settings

from store.api.app import create_app
from store.lookup import Lookup
from store.online.online_store import MemoryStore
from tests.store.test_http_freshness import World

# what it does not know to make, tests/store/test_api.py does
pytestmark = pytest.mark.filterwarnings("ignore:Skipped test cases with unsupported payload media types:UserWarning")

EXAMPLES = settings(max_examples=25, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))


class Served:
    """The application that is asked: an empty one while the tests are collected, then one with a view."""

    app = create_app(Lookup(MemoryStore()))

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self.app(scope, receive, send)


SERVED = Served()


def document_of(real_views: bool) -> Any:
    """The document as it is served; of real views, requests are for the one that is there."""
    document = schemathesis.openapi.from_asgi("/openapi.json", SERVED)
    # too many keys, or too long a body, is a refusal as good as any
    document.config.checks.negative_data_rejection.expected_statuses.append("413")
    # which features it has, and which inputs, is not the document's to tell
    document.config.checks.positive_data_acceptance.enabled = not real_views
    return document


ANY, OF_A_VIEW = document_of(False), document_of(True)


@OF_A_VIEW.hook
def map_path_parameters(_: Any, parameters: Any) -> Any:
    return parameters | {"view": "things"} if parameters and "view" in parameters else parameters


@OF_A_VIEW.hook
def map_body(_: Any, body: Any) -> Any:
    for one in body.get("requests") or () if isinstance(body, dict) else ():
        if isinstance(one, dict) and isinstance(one.get("view"), str):
            one["view"] = "things"
    return body


@pytest.fixture(scope="module", autouse=True)
def world(tmp_path_factory: pytest.TempPathFactory) -> None:
    world = World(tmp_path_factory.mktemp("world"), {"new": 1.0, "old": 9.0, "expired": 20.0})
    world.model.known = frozenset({"0", "a", "expired"})
    SERVED.app = world.app


@ANY.parametrize()
@EXAMPLES
def test_what_is_asked_by_the_document_is_answered_by_it(case: Any) -> None:
    case.call_and_validate()


@OF_A_VIEW.parametrize()
@EXAMPLES
def test_and_so_it_is_of_a_view_that_is_there(case: Any) -> None:
    case.call_and_validate()
