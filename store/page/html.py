"""HTML: elements from tags, attributes and texts. Every text is escaped unless an element of this module made it, so nothing can be forgotten."""

from __future__ import annotations

from html import escape


class Html(str):
    """A piece of HTML that may stand as it is."""

    __slots__ = ()


Child = str | int | None
"""Html as it is, a text or number escaped, None not at all."""

_VOID = frozenset({"meta", "input", "br"})
"""Elements of HTML that have no end; those of SVG all have one, or the next would lie inside."""


def element(tag: str, *children: Child, **attributes: str | float | bool | None) -> Html:
    """``element("a", "text", href="…")``. ``class_`` and ``for_`` lose their underscore, others turn it to a dash; True is an attribute without a value, None or False none."""
    written = "".join(_attribute(name, value) for name, value in attributes.items() if value is not None and value is not False)
    inside = "".join(map(_text, children))
    return Html(f"<{tag}{written}>" if tag in _VOID else f"<{tag}{written}>{inside}</{tag}>")


def joined(*children: Child) -> Html:
    """Several pieces as one."""
    return Html("".join(map(_text, children)))


def _text(child: Child) -> str:
    if child is None:
        return ""
    return child if isinstance(child, Html) else escape(str(child))


def _attribute(name: str, value: str | float | bool) -> str:
    named = name.rstrip("_").replace("_", "-")
    return f" {named}" if value is True else f' {named}="{escape(str(value))}"'
