"""The pages of the documentation, and how tests find snippets, links and the names of tests in them."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
DOCS = ROOT / "docs"
_SOURCES = DOCS / "_api"
"""From which the pages of the reference are made, which are read instead."""

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted({*DOCS.glob("**/*.md")} - {*_SOURCES.glob("*.md")})]

SNIPPET = re.compile(r"^( *)```(python|sql)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#\"]+?)(?:#[^)\"]*)?(?: \"[^\"]*\")?\)")
TEST_NAME = re.compile(r"`(test_\w+)`(?:\]\(([^)]+)\))?")
TITLE = re.compile(r"\]\((\S+) \"(test_\w+)\"\)")
"""The file and the name of a test where only the title of a link names it."""


def page_id(page: Path) -> str:
    return str(page.relative_to(ROOT))
