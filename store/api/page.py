"""The status page: each view's freshness at a glance, with no script and nothing fetched from elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from store.clock import duration

_STYLE = """
:root{color-scheme:light dark;--line:#8884;--fresh:#1a7f37;--stale:#9a6700;--missing:#cf222e}
body{font:15px/1.5 system-ui,sans-serif;margin:2.5rem auto;max-width:90rem;padding:0 1.5rem}
h1{font-size:1.4rem;margin:0}p{margin:.3rem 0 1.5rem;opacity:.75}
.wide{overflow-x:auto}table{border-collapse:collapse;width:100%}
th,td{text-align:left;padding:.5rem .9rem .5rem 0;border-bottom:1px solid var(--line);white-space:nowrap}
td.f{white-space:normal}th{font-weight:600;opacity:.7}td.n,th.n{text-align:right}code{font-size:.92em}
.fresh{color:var(--fresh)}.stale{color:var(--stale)}.missing{color:var(--missing)}.s{font-weight:600}
@media(prefers-color-scheme:dark){:root{--fresh:#3fb950;--stale:#d29922;--missing:#f85149}}
"""

_COLUMNS = ("View", "Status", "Age", "TTL", "Snapshot", "Rows", "Coverage", "Entity", "Search", "Fallback", "Model", "Features")
_NUMBERS = frozenset({"Age", "TTL", "Snapshot", "Rows", "Coverage"})


def status_page(views: Sequence[dict[str, Any]]) -> str:
    """HTML of :meth:`store.lookup.Lookup.views`."""
    head = "".join(f'<th class="n">{c}</th>' if c in _NUMBERS else f"<th>{c}</th>" for c in _COLUMNS)
    rows = "".join(_row(view) for view in views)
    empty = "<p>No view is published yet: <code>precompute run VIEW</code>.</p>" if not views else ""
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f'<meta http-equiv="refresh" content="10"><title>Precompute</title><style>{_STYLE}</style>'
        "<h1>Precompute</h1><p>Age is that of a view's oldest row. "
        'See <a href="/openapi.json">the API</a>, <a href="/metrics">metrics</a>, <a href="/readyz">readiness</a>.</p>'
        f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>{empty}</html>'
    )


def _row(view: dict[str, Any]) -> str:
    status = view["status"] or "missing"
    word = "expired" if status == "missing" else status
    coverage = "" if view["coverage"] is None else f"{view['coverage']:.1%}"
    features = [_feature(f) for f in view["features"]]
    shown = ", ".join(features[:3]) + (f" and {len(features) - 3} more" if len(features) > 3 else "")
    cells = [
        f"<td><code>{escape(view['view'])}</code></td>",
        f'<td class="s {status}">{word}</td>',
        f'<td class="n">{duration(view["age_s"])}</td>',
        f'<td class="n">{duration(view["ttl_s"])}</td>',
        f'<td class="n">{view["snapshot"]}</td>',
        f'<td class="n">{view["rows"]:,}</td>',
        f'<td class="n">{coverage}</td>',
        f"<td>{escape(', '.join(view['entity']))}</td>",
        f"<td>{_search(view)}</td>",
        f"<td>{'yes' if view['fallback'] else '–'}</td>",
        f"<td><code>{escape(view['model'][:12])}</code></td>",
        f'<td class="f">{escape(shown)}</td>',
    ]
    return f"<tr>{''.join(cells)}</tr>"


def _search(view: dict[str, Any]) -> str:
    """How much of the nearest a search finds, at least, and how: ``≥ 97.1 % by codes``."""
    if not view["searchable"]:
        return "–"
    index = view["index"]
    if index is None:
        return "yes"
    return "exact" if index["kind"] == "exact" else f"≥ {index['recall_bound']:.1%} by {escape(index['kind'])}"


def _feature(feature: dict[str, Any]) -> str:
    shape = f"[{feature['dim']}]" if "dim" in feature else f"[≤{feature['max_items']}]" if "max_items" in feature else ""
    packed = f" as {feature['packed']}" if "packed" in feature else ""
    return f"{feature['name']}: {feature['dtype']}{shape}{packed}"
