"""View graph: which of the views that are served depend on which, as their last runs reported it, laid out as a drawing: what depends on others stands right of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from precompute.store.page.figures import ViewFigures

_LETTER, _ROW, _GAP = 7.6, 42, 56
"""Of the drawing, in pixels: a letter's width, from one row to the next, between two columns."""


class Node(NamedTuple):
    """A view, its ``status`` (fresh, stale, missing), and its box of 30 pixels' height."""

    view: str
    status: str
    x: int
    y: int
    width: int


class Edge(NamedTuple):
    """From a view to one that depends on it: by what it ``reads``, or by its schedule alone."""

    x1: int
    y1: int
    x2: int
    y2: int
    reads: bool
    words: str


class Drawing(NamedTuple):
    """The boxes, the lines between them, and how large all is, in pixels."""

    nodes: Sequence[Node]
    edges: Sequence[Edge]
    width: int
    height: int


def graph(views: Sequence[ViewFigures]) -> Drawing | None:
    """The drawing; None where no view depends on another."""
    status = {str(view.details["view"]): view.details["status"] or "missing" for view in views}
    parents = {name: _parents(view, status) for name, view in zip(status, views, strict=True)}
    if not any(parents.values()):
        return None
    columns = _columns(parents)
    nodes: dict[str, Node] = {}
    x = 2
    for number in range(max(columns.values()) + 1):
        names = sorted(name for name in status if columns[name] == number)
        width = round(24 + _LETTER * max(map(len, names)))
        for row, name in enumerate(names):
            nodes[name] = Node(name, status[name], x, 2 + _ROW * row, width)
        x += width + _GAP
    edges = [
        Edge(
            nodes[parent].x + nodes[parent].width,
            nodes[parent].y + 15,
            nodes[name].x,
            nodes[name].y + 15,
            reads,
            f"{name} {'reads' if reads else 'runs after'} {parent}",
        )
        for name, of in parents.items()
        for parent, reads in of.items()
    ]
    height = max(node.y for node in nodes.values()) + 32
    return Drawing(list(nodes.values()), edges, x - _GAP + 2, height)


def _parents(view: ViewFigures, known: Mapping[str, str]) -> dict[str, bool]:
    """The views that this one depends on → whether it reads them, by the last run that says so."""
    run = next((run for run in view.runs if run.finished and (run.inputs or run.parents)), None)
    if run is None:
        return {}
    own = str(view.details["view"])
    return {name: name in run.inputs for name in sorted({*run.inputs, *run.parents}) if name in known and name != own}


def _columns(parents: Mapping[str, Mapping[str, bool]]) -> dict[str, int]:
    """Right of all that it depends on; views that read each other stand side by side."""
    columns = dict.fromkeys(parents, 0)
    for _ in parents:
        for name, of in parents.items():
            furthest = max((columns[parent] + 1 for parent in of), default=0)
            columns[name] = min(furthest, len(parents) - 1)
    # columns that a circle left empty
    used = sorted(set(columns.values()))
    return {name: used.index(column) for name, column in columns.items()}
