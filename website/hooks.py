"""Hooks of mkdocs: pages made from notebooks and code, and links to the repository's files.

A page of docs/ links to `../tests/unit/test_x.py` as on a code host. On the site that is a page
with the file's text, so that no link leaves the site.
"""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from mkdocs.structure.files import File, InclusionLevel

from website import gallery, reference, testing

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
_LINK = re.compile(r"(?<=\]\()([^)\s:#]+)((?:#[^)\s]*)?)(?=\))")
_LONG_CODE = re.compile(r"<code>(?=[^<]{40})")
_HIDDEN = "---\nsearch:\n  exclude: true\n---\n"
_LANGUAGES = {".py": "python", ".sh": "sh", ".txt": "text", ".yml": "yaml"}


def on_config(config: MkDocsConfig) -> None:
    """Put the pages of the gallery into the navigation."""
    tutorials = next(part["Tutorials"] for part in config.nav or [] if "Tutorials" in part)
    entry = next(part for part in tutorials if "Gallery" in part)
    pages = [{recipe.title: f"gallery/{recipe.name}.md"} for recipe in gallery.recipes()]
    entry["Gallery"] = ["gallery/index.md", *pages]


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Add the pages that have no file in docs/."""
    for path, content in _made_pages():
        files.append(File.generated(config, path, content=content))
    linked = {target for file in list(files.documentation_pages()) for target in _outside(file)}
    waiting = sorted(linked | {"CHANGELOG.md", "CONTRIBUTING.md"})
    for path in waiting:
        file = File.generated(config, _page_of(path), content=_source_page(path))
        file.inclusion = InclusionLevel.NOT_IN_NAV
        files.append(file)
        waiting += _outside(file) - {*waiting}  # a page of the repository links to others


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001
    """Make links to files outside docs/ point to their pages."""
    source = PurePosixPath(page.file.src_uri)

    def relocated(match: re.Match[str]) -> str:
        target = _resolve(_home(source), match[1])
        if target is None or not (ROOT / target).exists():  # such as a link to another site
            return match[0]
        anchor = "" if target.endswith((".py", ".sh")) else match[2]
        return os.path.relpath(_page_of(target), source.parent) + anchor

    return _LINK.sub(relocated, markdown)


def on_page_content(html: str, **_: object) -> str:
    """Mark long code, such as a message, which site.css breaks into lines in a table."""
    return _LONG_CODE.sub('<code class="long">', html)


def _made_pages() -> Iterator[tuple[str, str | bytes]]:
    """Yield path and content of all pages made here."""
    gallery.execute_changed()
    rows = ["| recipe | time | needs |\n|---|---|---|\n"]
    for recipe in gallery.recipes():
        text, images = recipe.page()
        yield f"gallery/{recipe.name}.md", text
        yield f"gallery/{recipe.name}.ipynb", recipe.path.read_bytes()
        yield from ((f"gallery/{path}", content) for path, content in images.items())
        rows.append(recipe.row())
    yield "gallery/index.md", gallery.INDEX + "".join(rows)
    yield "reference/magics.md", reference.magics_page()
    yield "reference/configuration.md", reference.configuration_page()
    yield "reference/messages.md", reference.messages_page()
    yield "decisions/index.md", reference.decisions_page()
    yield "how-we-test.md", testing.page()


def _home(source: PurePosixPath) -> PurePosixPath:
    """Return the folder in the repository to which the links of a page are relative."""
    if source.parts[0] == "source":
        return source.relative_to("source").parent
    if source.parts[0] == "gallery":
        return PurePosixPath("notebooks")
    return ("docs" / source).parent


def _resolve(home: PurePosixPath, link: str) -> str | None:
    """Return the path in the repository that a link points to; None inside docs/."""
    target = os.path.normpath(home / link)
    if home.parts[:1] != ("docs",):
        return None if target.startswith("..") else target
    return None if target.startswith(("docs/", "..")) else target


def _page_of(target: str) -> str:
    """Return the page of the site for a file of the repository."""
    path = PurePosixPath(target)
    if target == "notebooks":
        return "gallery/index.md"
    if path.suffix == ".ipynb":
        return f"gallery/{path.stem}.md"
    if path.parts[0] == "docs":
        inside = path.relative_to("docs")
        return str(inside if path.suffix else inside / "index.md")
    return f"source/{path if path.suffix == '.md' else f'{path}.md'}"


def _outside(file: File) -> set[str]:
    """Return the files outside docs/ that a page links to."""
    home = _home(PurePosixPath(file.src_uri))
    targets = {_resolve(home, match[1]) for match in _LINK.finditer(file.content_string)}
    return {
        target
        for target in targets - {None}
        if (ROOT / target).is_file() and not target.endswith(".ipynb") and target[:5] != "docs/"
    }


def _source_page(path: str) -> str:
    """Return the page with the text of a file of the repository."""
    text = (ROOT / path).read_text()
    if path.endswith(".md"):
        return text
    language = _LANGUAGES.get(Path(path).suffix, "text")
    return f"{_HIDDEN}# {path}\n\n`````{language}\n{text}\n`````\n"
