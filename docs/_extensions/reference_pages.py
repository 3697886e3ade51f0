"""The reference: Markdown that reads without a build, made from the docstrings.

``docs/_api`` has the pages with the directives of autodoc. ``python docs/_extensions/reference_pages.py`` writes
``docs/reference``, which is read in the repository. The site shows the first ones under the names of the second ones,
so that links are equal in both, and other projects find the objects.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

DOCS = Path(__file__).parent.parent
SOURCES, PAGES = DOCS / "_api", DOCS / "reference"
HEADING = re.compile(r"^(#{3,}) (?:\*(\w+(?: \w+)?)\* )?([\w.]+)(\(.*| \*[:=].*)?$", re.MULTILINE)
LINK = re.compile(r"\[([^\[\]]*)\]\([^()]*\)")
NOTICE = "<!-- Made from docstrings by `python docs/_extensions/reference_pages.py`. Edit those, or docs/_api. -->\n\n"
WIDTH = 100


def read_source(_app: Sphinx, page: str, source: list[str]) -> None:
    """Let the site show the directives instead of what was made from them."""
    if page.startswith("reference/"):
        source[0] = (DOCS / f"_api/{page.removeprefix('reference/')}.md").read_text()


def write_pages() -> None:
    """Build the pages as Markdown, and make them readable."""
    with tempfile.TemporaryDirectory() as directory:
        extensions = "myst_parser,sphinx.ext.autodoc,default_values,reference_pages,sphinx_markdown_builder"
        options = {"extensions": extensions, "markdown_anchor_signatures": 1, "markdown_uri_doc_suffix": ".md"}
        given = [f"-D{name}={value}" for name, value in options.items()]
        command = [sys.executable, "-m", "sphinx", "-q", "-b", "markdown", *given, DOCS, directory]
        subprocess.run([*command, *sorted(PAGES.glob("*.md"))], check=True, stderr=subprocess.DEVNULL)  # noqa: S603 - ours
        for source in SOURCES.glob("*.md"):
            made = (Path(directory) / "reference" / source.name).read_text()
            (PAGES / source.name).write_text(NOTICE + readable(made))


def readable(text: str) -> str:
    """Return a page with signatures as blocks of code, each parameter on a line of its own where they are long."""
    text = HEADING.sub(_with_signature, text)
    text = text.replace("```default\n", "```python\n").replace("```python\n$ ", "```sh\n$ ")
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def _with_signature(found: re.Match[str]) -> str:
    marks, kind, name, rest = found.groups()
    short = name.removeprefix("sqlaqueue.")
    if not rest:
        return f"{marks} `{short}`"
    plain = LINK.sub(r"\1", rest).replace("\\", "")
    # The registry of prometheus_client has an address in its text.
    plain = re.sub(r"<[\w.]*?(\w+) object at 0x\w+>", r"\1()", plain)
    if rest.startswith(" "):
        return f"{marks} `{short}`\n\n`{plain.replace('*', '').strip(' :')}`"
    # The builder leaves out the asterisk after which arguments are named.
    signature = plain.replace("(, ", "(*, ").replace(", , ", ", *, ").replace(" → ", " -> ")
    code = "\n".join(_lines(f"{kind or 'def'} {name.rpartition('.')[2]}{signature}"))
    return f"{marks} `{short}`\n\n```python\n{code}\n```"


def _lines(signature: str) -> list[str]:
    """Return a signature in one line, or with one line for each parameter."""
    if len(signature) <= WIDTH:
        return [signature]
    start = signature.index("(")
    depth, parts, part, quoted = 0, [], "", ""
    for place, character in enumerate(signature[start + 1 :], start + 1):
        if quoted or character in "'\"":
            quoted = "" if character == quoted else quoted or character
        elif character in "([{":
            depth += 1
        elif character in ")]}":
            depth -= 1
        if depth < 0:
            return [signature[: start + 1], *(f"    {each.strip()}," for each in [*parts, part]), signature[place:]]
        if character == "," and depth == 0 and not quoted:
            parts.append(part)
            part = ""
        else:
            part += character
    return [signature]


def setup(app: Sphinx) -> dict[str, Any]:
    """Register with Sphinx."""
    app.connect("source-read", read_source)
    return {"version": "1", "parallel_read_safe": True}


if __name__ == "__main__":
    write_pages()
