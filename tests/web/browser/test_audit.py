"""The audit of pages finds what it looks for."""

from __future__ import annotations

import pytest

from tests.web.browser.chromium import View
from tests.web.browser.test_pages import AUDIT

GOOD = """<!doctype html><html lang="en"><head><title>Queues</title></head>
<body><main><h1>Queues</h1>{}</main></body></html>"""


@pytest.mark.parametrize(
    ("html", "problem"),
    [
        ("<p>Nothing is wrong with <b>this</b>.</p>", None),
        ("<h3>Deep</h3>", "leaves out a level"),
        ("<h1>Another</h1>", "headings of level 1"),
        ("<input name='q'>", "a field without a label"),
        ("<label for='q'>Filter</label><input id='q'>", None),
        ("<a href='/'></a>", "no name"),
        ("<button aria-label='Copy'></button>", None),
        ("<svg width='10' height='10'></svg>", "no text"),
        ("<table><thead><tr><th>Key</th></tr></thead></table>", "no scope"),
        ("<p id='a'>1</p><p id='a'>2</p>", "several elements a"),
        ("<section data-live>1</section>", "a live section without an id"),
        ("<p aria-describedby='nothing'>1</p>", "no element nothing"),
        ("<p style='margin: 0'>1</p>", "inline"),
        ("<p onclick='stop()'>1</p>", "handler"),
        ("<p style='color: #999'>1</p>", "contrast 2.85"),
        ("<p style='width: 3000px'>1</p>", "wider than the window"),
    ],
)
def test_it_finds(view: View, html: str, problem: str | None) -> None:
    # Elements with an attribute style are among the problems themselves.
    view.page.set_content(GOOD.format(html))
    found = view.run(AUDIT)
    assert any(problem in each for each in found) if problem else found == []
