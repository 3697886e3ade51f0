"""Writes ``llms.txt`` into the site: its pages as links to Markdown, for programs that read it (https://llmstxt.org)."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx


def write(app: Sphinx, error: Exception | None) -> None:
    """Make it from the list of pages in ``index.md``."""
    if error is not None or app.builder.name != "html":
        return
    index = (Path(app.srcdir) / "index.md").read_text()
    summary = index.split("\n\n")[1].replace("\n", " ")
    sections = re.findall(r"^## .*?(?=^## |^Tests execute)", index, re.MULTILINE | re.DOTALL)
    repository = app.config.html_theme_options["source_repository"] + "raw/main/docs/"
    pages = re.sub(r"\]\(([\w./-]+\.md)\)", rf"]({repository}\1)", "".join(sections))
    (Path(app.outdir) / "llms.txt").write_text(f"# sqlaqueue\n\n> {summary}\n\n{pages}")


def setup(app: Sphinx) -> dict[str, Any]:
    """Register with Sphinx."""
    app.connect("build-finished", write)
    return {"version": "1", "parallel_read_safe": True}
