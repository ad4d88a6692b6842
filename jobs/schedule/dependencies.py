"""Dependencies: which views run before which, by ``after`` of the schedule and ``live.<view>`` in
sources and models. Their order, those that are named, pictures."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

from precompute.jobs.config.project import Project

AFTER, READS = "after", "reads"
"""How a view depends on another: it is scheduled after it; it reads its live rows."""


class Dependencies:
    """The views of a project, and what each depends on. Of a view whose file is wrong only the
    schedule is known.

    Args:
        project: the configuration.
    """

    def __init__(self, project: Project) -> None:
        self._project = project
        schedules = project.schedules()
        self.when: Mapping[str, str | None] = {
            name: schedules[name].when if name in schedules else None for name in project.names
        }
        self.parents: dict[str, dict[str, tuple[str, ...]]] = {}
        """View → each view it depends on → how: :data:`AFTER`, :data:`READS`, or both."""
        for name in project.names:
            ways: dict[str, tuple[str, ...]] = dict.fromkeys(
                schedules[name].parents if name in schedules else (), (AFTER,)
            )
            for other in project.views[name].inputs() if name in project.views else ():
                ways[other] = (*ways.get(other, ()), READS)
            self.parents[name] = {parent: ways[parent] for parent in sorted(ways) if parent != name}

    @cached_property
    def children(self) -> dict[str, list[str]]:
        """View → the views that depend on it."""
        return {
            name: [child for child in self.order if name in self.parents[child]]
            for name in self.order
        }

    @cached_property
    def order(self) -> list[str]:
        """All views, each behind those it depends on, by name where that leaves a choice. Views
        that read each other stand by name, behind what they are scheduled after."""
        left, order = sorted(self.parents), list[str]()
        while left:
            ready = [
                name for name in left if not any(parent in left for parent in self.parents[name])
            ]
            if not ready:
                ready = [
                    name
                    for name in left
                    if not any(AFTER in how and p in left for p, how in self.parents[name].items())
                ][:1]
            order += ready
            left = [name for name in left if name not in ready]
        return order

    def above(self, name: str) -> set[str]:
        """All that a view depends on, itself or through others; without it."""
        return self._reached(name, self.parents)

    def below(self, name: str) -> set[str]:
        """All that depends on a view; without it."""
        return self._reached(name, self.children)

    def _reached(self, name: str, steps: Mapping[str, Collection[str]]) -> set[str]:
        seen, ahead = set[str](), [name]
        while ahead:
            new = [other for other in steps[ahead.pop()] if other not in seen]
            seen.update(new)
            ahead += new
        return seen - {name}

    def select(self, selectors: Sequence[str]) -> list[str]:
        """The views that are named, in order: ``view``; ``view+``, it and what depends on it;
        ``+view``, it and what it depends on; ``+view+``, both.

        Raises:
            ConfigError: a selector names no view.
        """
        chosen = set[str]()
        for selector in selectors:
            name = self._project.named(selector.removeprefix("+").removesuffix("+"))
            chosen |= {name} | (self.above(name) if selector.startswith("+") else set())
            chosen |= self.below(name) if selector.endswith("+") else set()
        return [name for name in self.order if name in chosen]

    def words(self, name: str, parent: str) -> str:
        """How a view depends on another one, for people."""
        return ", ".join(self.parents[name][parent])

    def to_json(self) -> dict[str, Any]:
        """``order``, and of each view its schedule and ``depends_on``: view → how."""
        return {
            "order": self.order,
            "views": {
                name: {
                    "schedule": self.when[name],
                    "depends_on": {p: list(how) for p, how in self.parents[name].items()},
                }
                for name in self.order
            },
        }

    def text(self, chosen: Collection[str]) -> str:
        """A tree for each view that depends on none of the ``chosen`` ones; what depends on several
        stands whole below the first of them."""
        shown, lines = set[str](), list[str]()
        for name in (name for name in self.order if name in chosen):
            # what depends on another stands below that one already, which comes before it; but for
            # views that read each other
            if name not in shown:
                lines += self._tree(name, None, "", "", chosen, shown)
        return "\n".join(lines)

    def _tree(
        self,
        name: str,
        parent: str | None,
        branch: str,
        indent: str,
        chosen: Collection[str],
        shown: set[str],
    ) -> Iterator[str]:
        notes = [] if parent is None else [self.words(name, parent)]
        notes += (
            [self.when[name] or "not scheduled"]
            if parent is None or AFTER not in self.parents[name][parent]
            else []
        )
        children = [child for child in self.children[name] if child in chosen]
        again = name in shown and bool(children)
        yield f"{branch}{name}  ({', '.join(notes)}{'; see above' if again else ''})"
        if again:
            return
        shown.add(name)
        for child in children:
            last = child == children[-1]
            yield from self._tree(
                child,
                name,
                indent + ("└─ " if last else "├─ "),
                indent + ("   " if last else "│  "),
                chosen,
                shown,
            )

    def mermaid(self, chosen: Collection[str]) -> str:
        """The same as a Mermaid flowchart, for READMEs and wikis that draw it."""
        # numbered, for `end` and the like are words of Mermaid's
        ids = {
            name: f"v{number}"
            for number, name in enumerate(name for name in self.order if name in chosen)
        }
        lines = ["flowchart LR"]
        for name, id in ids.items():
            when = "" if self.when[name] is None else f"<br>{self.when[name]}"
            lines.append(f'  {id}["{name}{when}"]')
        for name, id in ids.items():
            for parent in (p for p in self.parents[name] if p in ids):
                arrow = "-->" if READS in self.parents[name][parent] else "-.->"
                lines.append(f"  {ids[parent]} {arrow}|{self.words(name, parent)}| {id}")
        return "\n".join(lines)
