"""Hooks: how mkdocs makes a site of the repository's documents. They stay as GitHub shows them;
what differs is made up for here.

The README is the first page. A link to a file outside ``docs/`` leads to a page that shows the
file. The reference's pages are written from the code.
"""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

from generated import PAGES
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

REPOSITORY = Path(__file__).parents[2]
LINK = re.compile(r"\]\((?!\w+:|#)([^)\s#]+)")
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_ITEM = re.compile(r"^(?:[-*]|\d+\.) ")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Headings get the anchors that they have on GitHub."""
    config.mdx_configs.setdefault("toc", {})["slugify"] = anchor
    return config


def anchor(heading: str, _: str = "-") -> str:
    """A heading's anchor, by GitHub's rule."""
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the README, the pages written from the code, and the files outside ``docs/`` that
    documents link to."""
    for name, write in PAGES.items():
        files.append(File.generated(config, name, content=write()))
    todo = {
        "README.md",
        *(
            f"docs/{file.src_uri}"
            for file in files.documentation_pages()
            if file.src_uri not in PAGES
        ),
    }
    done = set[str]()
    while todo:
        path = todo.pop()
        done.add(path)
        text = _shown(path)
        todo |= {found for found in map(_file, _targets(path, text)) if found is not None} - done
        if not path.startswith("docs/"):
            page = File.generated(config, _page(path), content=text)
            page.inclusion = (
                page.inclusion if path == "README.md" else type(page.inclusion).NOT_IN_NAV
            )
            files.append(page)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """What GitHub reads otherwise than Python-Markdown: links out of ``docs/``, and lists with no
    empty line before them."""
    here = page.file.src_uri
    if here in PAGES:
        return markdown
    path = _source(here)

    def leads(found: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(path), found[1]))
        return f"]({posixpath.relpath(_page(target), posixpath.dirname(here) or '.')}"

    return "".join(
        text if code else _spaced(LINK.sub(leads, text)) for code, text in _parts(markdown)
    )


def _parts(markdown: str) -> Iterator[tuple[bool, str]]:
    """(whether it is a block of code, text) in order."""
    end = 0
    for block in FENCE.finditer(markdown):
        yield False, markdown[end : block.start()]
        yield True, block[0]
        end = block.end()
    yield False, markdown[end:]


def _spaced(text: str) -> str:
    """An empty line before each list that begins below a paragraph."""
    lines: list[str] = []
    for line in text.split("\n"):
        if (
            _ITEM.match(line)
            and lines
            and lines[-1].strip()
            and not _ITEM.match(lines[-1])
            and not lines[-1].startswith(" ")
        ):
            lines.append("")
        lines.append(line)
    return "\n".join(lines)


def _targets(path: str, text: str) -> set[str]:
    """Paths in the repository that a document links to."""
    found = {link for code, part in _parts(text) if not code for link in LINK.findall(part)}
    return {posixpath.normpath(posixpath.join(posixpath.dirname(path), link)) for link in found}


def _file(target: str) -> str | None:
    """Of a link's target, what is to be shown beside ``docs/``: a folder's README, where it has
    one; None for what is in ``docs/``, or nowhere."""
    if target.startswith(("docs/", "..")) or not (REPOSITORY / target).exists():
        return None
    readme = posixpath.join(target, "README.md")
    return readme if (REPOSITORY / readme).exists() else target


def _shown(path: str) -> str:
    """A file outside ``docs/`` as a page: Markdown as it is, a folder as a list, all else as
    code."""
    file = REPOSITORY / path
    if file.is_dir():
        inside = sorted(
            p.relative_to(file).as_posix()
            for p in file.rglob("*")
            if p.is_file() and not _ignored(p)
        )
        return (
            f"# {path}\n\n"
            + "\n".join(f"- [{name}]({posixpath.basename(path)}/{name})" for name in inside)
            + "\n"
        )
    text = file.read_text(encoding="utf-8")
    kind = {".py": "python", ".yaml": "yaml", ".json": "json"}.get(file.suffix, "text")
    return text if file.suffix == ".md" else f"# {path}\n\n````{kind}\n{text}````\n"


def _ignored(file: Path) -> bool:
    """Not what the repository has: what a run or a tool left."""
    inside = file.relative_to(REPOSITORY).parts
    made = ("var", "tuning", "students") if inside[0] == "configs" else ("var",)
    return any(part in made or part.startswith((".", "__")) for part in inside)


def _page(path: str) -> str:
    """Where a file of the repository is in the site."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    path = _file(path) or path
    if path == "README.md":
        return "index.md"
    return f"repository/{path}" if path.endswith(".md") else f"repository/{path}.md"


def _source(page: str) -> str:
    """What file of the repository a page is of."""
    if page == "index.md":
        return "README.md"
    if not page.startswith("repository/"):
        return f"docs/{page}"
    path = page.removeprefix("repository/")
    return path if os.path.exists(REPOSITORY / path) else path.removesuffix(".md")
