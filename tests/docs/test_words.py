"""Pages, messages, log lines and the dashboard are plain English: the patterns that readers stumble over do not occur.

A pattern names what to write instead. Code in a page is not read, nor are comments and names in the code.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.pages import DOCS, PAGES, ROOT, page_id

INSTEAD = {
    r"in order\b(?! (?:of|by)\b)": "gracefully, one after the other",
    r"at once": "immediately, at the same time",
    r"beg[iau]n(?:s|ning|nings)?": "start",
    r"besides?": "alongside, compared with, in addition to",
    r"for ?ever": "indefinitely",
    r"the same(?=\s*(?:[.,;:)]|$))": "repeat the noun",
    r"(?:does|do|did) so": "repeat the verb",
    r"(?:is|are|was|were|has|have|had) none": "has no ..",
    r"others": "name them: other jobs, other workers",
    r"(?:whatever|whichever|whoever|however (?:many|long|much|often|large))": "regardless of",
    r"pass(?:es|ed|ing)? over": "skip",
    r"(?:hold|holds|held|holding) back": "block",
    r"(?:go|goes|going|went|gone) on": "continue, still run",
    r"obey\w*": "honour, follow",
    r"(?:tells?|told|telling)": "report, show, say",
    r"serve[sd]?": "work for, answer, support",
    r"(?:come|comes|came|coming) back": "be retried, be returned",
    r"also (?:if|of|when|for|in|without|with|to|by|on|after|while|where|as)": "even if, including",
    r"not before": "only after",
    r"twins?": "duplicate",
}
OF_THE_CODE = {
    r"(?<!replication )slots?": "capacity",
    r"verbs?": "statement",
    r"turns?\b(?! (?:on|off|into|out))": "round",
    r"settl(?:e|es|ed|ing|ement|ements)": "end, complete",
}
"""Words that only pages about the code itself have."""

ABOUT_THE_CODE = {ROOT / "CONTRIBUTING.md", DOCS / "architecture.md", DOCS / "reference" / "strategies.md"}
CODE = re.compile(r"^( *)```.*?^\1```$|<!--.*?-->|`[^`\n]*`|\]\([^)]*\)|<[^>\n]*>", re.MULTILINE | re.DOTALL)
TEMPLATE = re.compile(r"\{%.*?%\}|\{\{.*?\}\}|\{#.*?#\}|<[^>]*>", re.DOTALL)
SQL = re.compile(r"\b(?:pg_catalog|RAISE|EXCEPTION WHEN|SELECT)\b|sqlaqueue_")


def found(text: str, patterns: dict[str, str]) -> list[str]:
    hits = (
        (pattern, hit) for pattern in patterns for hit in re.finditer(rf"(?<!\w){pattern}(?!\w)", text, re.IGNORECASE)
    )
    # In capitals it is a word of SQL, as in BEGIN; None is a value.
    return [
        f"{text[max(0, hit.start() - 40) : hit.end() + 20]!r}: {patterns[pattern]}"
        for pattern, hit in hits
        if not hit[0].isupper() and not hit[0].endswith("None")
    ]


@pytest.mark.once
@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md", ROOT / ".github" / "SECURITY.md"], ids=page_id)
def test_a_page_is_plain_english(page: Path) -> None:
    patterns = INSTEAD if page in ABOUT_THE_CODE else INSTEAD | OF_THE_CODE
    assert found(CODE.sub("", page.read_text()), patterns) == []


def messages(path: Path) -> Iterator[str]:
    """Yield the texts of a module that are no docstrings, names or SQL."""
    tree = ast.parse(path.read_text())
    bodies = [body for node in ast.walk(tree) if isinstance(body := getattr(node, "body", None), list)]
    documented = {id(each.value) for body in bodies for each in body if isinstance(each, ast.Expr)}
    for node in ast.walk(tree):
        is_text = isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documented
        if is_text and " " in node.value and not SQL.search(node.value):
            yield node.value


@pytest.mark.once
def test_messages_and_log_lines_are_plain_english() -> None:
    package = [path for path in (ROOT / "sqlaqueue").rglob("*.py") if "conformance" not in path.parts]
    texts = [(path.name, re.sub(r"`[^`\n]*`|\w+\.\w+\(\)", "", text)) for path in package for text in messages(path)]
    assert len(texts) > 2000
    assert [(name, hit) for name, text in texts for hit in found(text, INSTEAD | OF_THE_CODE)] == []


@pytest.mark.once
@pytest.mark.parametrize("template", sorted((ROOT / "sqlaqueue" / "web" / "templates").glob("*.html")), ids=page_id)
def test_the_dashboard_is_plain_english(template: Path) -> None:
    assert found(TEMPLATE.sub("", template.read_text()), INSTEAD | OF_THE_CODE) == []


@pytest.mark.once
def test_a_pattern_is_found() -> None:
    assert len(found("Both begin at once, and others serve the same.", INSTEAD)) == 5
    assert found("BEGIN; the same queue; a place in order of age", INSTEAD) == []
