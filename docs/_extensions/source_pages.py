"""Links to Python files of the repository lead to a readable page of the site, at the test or function they name.

MyST makes a link to a file that is no page a download. On the site a reader wants to read a test, not to save it.
"""

from __future__ import annotations

import ast
import posixpath
from collections.abc import Iterator
from functools import cache
from html import escape
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.addnodes import download_reference
from sphinx.application import Sphinx
from sphinx.builders.html import StandaloneHTMLBuilder
from sphinx.transforms import SphinxTransform

ROOT = Path(__file__).parent.parent.parent
LINKED = "linked_source_files"


class LinkToSourcePage(SphinxTransform):
    """Replace downloads of Python files by links; runs before Sphinx collects what is to be copied."""

    default_priority = 50

    def apply(self, **_: Any) -> None:
        """Replace each download of this page."""
        here = Path(self.env.doc2path(self.env.docname)).parent
        for download in list(self.document.findall(download_reference)):
            target = download["reftarget"].split("#")[0]
            # A page that includes a file from the root of the repository has that file's links.
            found = [
                file for base in (here, ROOT) if (file := (base / target).resolve()).suffix == ".py" and file.is_file()
            ]
            if not found or not found[0].is_relative_to(ROOT):
                continue
            path = found[0].relative_to(ROOT).as_posix()
            page = posixpath.relpath(page_name(path), posixpath.dirname(self.env.docname) or ".")
            linked_in(self.env).setdefault(self.env.docname, set()).add(path)
            text = download.astext()
            anchor = f"#{text}" if text in definitions(path) else ""
            link = nodes.reference("", "", *download.children, refuri=f"{page}.html{anchor}", internal=True)
            download.replace_self(link)
        self._link_paths()

    def _link_paths(self) -> None:
        """Make links of the paths that stand in the text, such as ``queue/config.py``."""
        for literal in list(self.document.findall(nodes.literal)):
            text = literal.astext()
            if isinstance(literal.parent, nodes.reference) or not text.endswith(".py") or "/" not in text:
                continue
            for file in (ROOT / text, ROOT / "sqlaqueue" / text):
                if file.is_file():
                    path = file.relative_to(ROOT).as_posix()
                    page = posixpath.relpath(page_name(path), posixpath.dirname(self.env.docname) or ".")
                    linked_in(self.env).setdefault(self.env.docname, set()).add(path)
                    literal.replace_self(
                        nodes.reference("", "", literal.deepcopy(), refuri=f"{page}.html", internal=True)
                    )
                    break


def linked_in(env: Any) -> dict[str, set[str]]:
    """Return the files to which each page links."""
    if not hasattr(env, LINKED):
        setattr(env, LINKED, {})
    linked: dict[str, set[str]] = getattr(env, LINKED)
    return linked


def page_name(path: str) -> str:
    """Return the name of the page that shows a file."""
    return f"source/{path.removesuffix('.py')}"


@cache
def definitions(path: str) -> dict[str, int]:
    """Return the first line of each function and class of a file, decorators included."""
    return {
        node.name: min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        for node in ast.walk(ast.parse((ROOT / path).read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    }


def make_pages(app: Sphinx) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yield a page for each file to which some page links."""
    if not isinstance(app.builder, StandaloneHTMLBuilder):
        return
    for path in sorted(set().union(*linked_in(app.env).values())):
        html = app.builder.highlighter.highlight_block((ROOT / path).read_text(), "python")
        before, code = html.split("<pre>", 1)
        lines = code.splitlines(keepends=True)
        for name, line in definitions(path).items():
            lines[line - 1] = f'<span id="{name}"></span>{lines[line - 1]}'
        body = f"<h1><code>{escape(path)}</code></h1>{before}<pre>{''.join(lines)}"
        yield page_name(path), {"title": path, "body": body}, "page.html"


def forget(_app: Sphinx, env: Any, page: str) -> None:
    """Drop the links of a page that is read again or gone."""
    linked_in(env).pop(page, None)


def setup(app: Sphinx) -> dict[str, Any]:
    """Register with Sphinx."""
    app.add_transform(LinkToSourcePage)
    app.connect("env-purge-doc", forget)
    app.connect("html-collect-pages", make_pages)
    return {"version": "1", "parallel_read_safe": False}
