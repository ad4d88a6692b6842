"""View graph: which of the views that are served depend on which, as their last runs reported it,
laid out as a drawing: what depends on others stands right of them."""

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
    """From a view to one that depends on it, as an SVG path: by what it ``reads``, or by its
    schedule alone."""

    path: str
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
    lanes = _lanes(parents, columns)
    nodes, edges = dict[str, Node](), list[Edge]()
    ends: dict[tuple[str, int], tuple[int, int, int]] = {}
    """(view or line, column) → x of its left and its right end, and y."""
    x = 2
    for number, lane in enumerate(lanes):
        width = round(24 + _LETTER * max(len(name) for name in lane if name in status))
        for row, name in enumerate(lane):
            ends[name, number] = x, x + width, 17 + _ROW * row
            if name in status:
                nodes[name] = Node(name, status[name], x, 2 + _ROW * row, width)
        x += width + _GAP
    for name, of in parents.items():
        for parent, reads in of.items():
            between = [
                ends[f"{parent} {name}", number]
                for number in range(columns[parent] + 1, columns[name])
            ]
            path = _path([ends[parent, columns[parent]], *between, ends[name, columns[name]]])
            edges.append(Edge(path, reads, f"{name} {'reads' if reads else 'runs after'} {parent}"))
    return Drawing(list(nodes.values()), edges, x - _GAP + 2, 2 + _ROW * max(map(len, lanes)))


def _lanes(
    parents: Mapping[str, Mapping[str, bool]], columns: Mapping[str, int]
) -> list[list[str]]:
    """Of each column the views from top to bottom, near those that they depend on, and lines (two
    names) that pass between them."""
    lanes: list[list[str]] = []
    for number in range(max(columns.values()) + 1):
        rows = {name: row for row, name in enumerate(lanes[-1])} if lanes else {}
        height: dict[str, float] = {}
        for name, of in parents.items():
            passed = [parent for parent in of if columns[parent] < number]
            if columns[name] == number:
                near = [rows.get(parent, rows.get(f"{parent} {name}", 0)) for parent in passed]
                height[name] = sum(near) / len(near) if near else 0.0
            elif columns[name] > number:
                for parent in passed:
                    height[f"{parent} {name}"] = rows.get(parent, rows.get(f"{parent} {name}", 0))
        lanes.append(sorted(height, key=lambda name: (height[name], name)))
    return lanes


def _path(ends: Sequence[tuple[int, int, int]]) -> str:
    """A curve from the right end of the first, through the others, to the left end of the last."""
    _, x, y = ends[0]
    path = f"M{x} {y}"
    for number, (left, right, at) in enumerate(ends[1:], 2):
        middle = (x + left) / 2
        path += f"C{middle:g} {y} {middle:g} {at} {left} {at}" + (
            f"H{right}" if number < len(ends) else ""
        )
        x, y = right, at
    return path


def _parents(view: ViewFigures, known: Mapping[str, str]) -> dict[str, bool]:
    """The views that this one depends on → whether it reads them, by the last run that says so."""
    run = next((run for run in view.runs if run.finished and (run.inputs or run.parents)), None)
    if run is None:
        return {}
    own = str(view.details["view"])
    return {
        name: name in run.inputs
        for name in sorted({*run.inputs, *run.parents})
        if name in known and name != own
    }


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
