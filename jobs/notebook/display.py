"""Display: tables as a notebook shows them, and as a terminal does: few rows, short values, all of
it escaped."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from precompute.store.clock import duration, shown_time

MOST_ROWS, MOST_NUMBERS, MOST_CHARACTERS = 20, 4, 60
"""Of what is shown: rows of a table, numbers of a vector, characters of a text."""


def shown(value: Any, column: str = "") -> str:
    """A value in a cell; of a column whose name ends with ``_s`` as a time, and of a fingerprint
    its beginning, as the command line has them."""
    if value is None:
        return "–"
    if column == "model":
        return str(value)[:12]
    if column.endswith("_s") and isinstance(value, (int, float)):
        return duration(value)
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, datetime):
        return shown_time(value) if value.tzinfo else f"{value:%Y-%m-%d %H:%M:%S}"
    if isinstance(value, (list, tuple)):
        first = ", ".join(map(shown, value[:MOST_NUMBERS]))
        return f"[{first}, …] ({len(value)})" if len(value) > MOST_NUMBERS else f"[{first}]"
    if isinstance(value, Mapping):
        value = ", ".join(f"{name}: {shown(one)}" for name, one in value.items())
    text = " ".join(str(value).split())
    return text if len(text) <= MOST_CHARACTERS else f"{text[: MOST_CHARACTERS - 1]}…"


def counted(number: int, what: str) -> str:
    """``1 row``, ``2,500 rows``."""
    return f"{number:,} {what}{'s' * (number != 1)}"


def table_html(
    caption: str, head: Sequence[str], rows: Sequence[Sequence[Any]], notes: Sequence[str] = ()
) -> str:
    """A table for ``_repr_html_``: ``rows`` of values, at most :data:`MOST_ROWS` of which are
    shown; ``notes`` below it are what needs attention."""
    lines = ["<tr>" + "".join(f"<th>{html.escape(name)}</th>" for name in head) + "</tr>"]
    for row in rows[:MOST_ROWS]:
        values = (html.escape(shown(value, name)) for name, value in zip(head, row, strict=True))
        lines.append("<tr>" + "".join(f"<td>{value}</td>" for value in values) + "</tr>")
    body = f"<div><b>{html.escape(caption)}</b>"
    body += f"<table>{''.join(lines)}</table>" if head else ""
    body += f"<div>… {len(rows) - MOST_ROWS:,} more</div>" if len(rows) > MOST_ROWS else ""
    return body + "".join(f"<div>⚠ {html.escape(note)}</div>" for note in notes) + "</div>"


def table_text(
    caption: str, head: Sequence[str], rows: Sequence[Sequence[Any]], notes: Sequence[str] = ()
) -> str:
    """The same for ``repr``."""
    shown_rows = (
        [shown(value, name) for name, value in zip(head, row, strict=True)]
        for row in rows[:MOST_ROWS]
    )
    lines = [list(head), *shown_rows] if head else []
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    text = [caption]
    text += [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]
    text += [f"… {len(rows) - MOST_ROWS:,} more"] if len(rows) > MOST_ROWS else []
    return "\n".join([*text, *notes])
