"""Every page, as a reader meets it: on a desktop and a phone, light and dark, with and without JavaScript."""

from pathlib import Path
from typing import Any, Literal

import pytest
import sqlalchemy as sa

from tests.web.browser.conftest import DESKTOP, PHONE, MakeView, View
from tests.web.browser.example import FAILED, PAGES, RUNNING, Site, Thumbnail

AUDIT = (Path(__file__).parent / "audit.js").read_text()
SCHEMES: tuple[Literal["light", "dark"], ...] = ("light", "dark")


def audit(view: View) -> list[str]:
    """Return what is wrong with the page that is shown, light or dark."""
    found = []
    for scheme in SCHEMES:
        view.page.emulate_media(color_scheme=scheme)
        found += [f"{view.path or 'overview'} ({scheme}): {problem}" for problem in view.run(AUDIT)]
    return found


@pytest.mark.few(1)
@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_each_page_is_for_everybody(open_view: MakeView, site: Site, size: Any) -> None:
    view = open_view(site, size=size, follows=False)
    problems = [problem for path in PAGES.values() for problem in audit(view.open(path))]
    assert not problems, "\n".join(problems)


def test_each_page_is_complete_without_javascript(open_view: MakeView, site: Site) -> None:
    with_script, without = open_view(site, follows=False), open_view(site, javascript=False)

    def headings(view: View, path: str) -> list[str]:
        return [each.strip() for each in view.open(path).page.locator("main :is(h1, h2, h3)").all_text_contents()]

    for path in PAGES.values():
        assert headings(without, path) == headings(with_script, path)
        assert without.text("main").strip()


FOCUSED = """() => {
    const { activeElement } = document;
    if (activeElement === document.body) return null;
    const { outlineStyle, outlineWidth } = getComputedStyle(activeElement);
    return [activeElement.outerHTML.slice(0, 80), outlineStyle !== "none" && outlineWidth !== "0px"];
}"""


def test_each_page_is_read_by_keyboard_alone(open_view: MakeView, site: Site) -> None:
    view = open_view(site, follows=False)
    for path in PAGES.values():
        view.open(path).press("Tab")
        assert view.run("() => document.activeElement.className") == "skip"
        view.press("Enter")
        # From the content on, the focus is always seen.
        for _ in range(12):
            view.press("Tab")
            focused = view.run(FOCUSED)
            if focused is None:
                break
            assert focused[1], f"{path}: the focus cannot be seen: {focused[0]}"


def test_times_are_those_of_the_reader(open_view: MakeView, site: Site) -> None:
    view = open_view(site, timezone="Asia/Kolkata", follows=False)
    zone = view.open(PAGES["overview"]).run("() => Intl.DateTimeFormat().resolvedOptions().timeZone")
    shown = 0
    for path in PAGES.values():
        view.open(path)
        assert view.text("#zone b") == zone
        titles = [each.get_attribute("title") or "" for each in view.page.locator("time[datetime]").all()]
        shown += sum(title.endswith(f" {zone}") for title in titles)
    assert shown > 10
    view.follow(view.page.locator("#zone").get_by_role("button", name="UTC"))
    assert view.text("#zone b") == "UTC"
    # What was chosen is not replaced by the zone of the browser, which is offered.
    view.open(PAGES["jobs"])
    assert view.text("#zone b") == "UTC"
    view.follow(view.page.locator("#zone").get_by_role("button", name=zone))
    assert view.text("#zone b") == zone


@pytest.mark.parametrize("path", ["queues/none", "queues/email/job?key=0", "nothing"])
def test_an_error_is_a_page(open_view: MakeView, site: Site, path: str) -> None:
    for size in (DESKTOP, PHONE):
        view = open_view(site, size=size, follows=False).open(path, status=404)
        assert audit(view) == []
        view.follow(view.page.get_by_role("link", name="All queues"))
        assert view.text("h1") == "Queues"


# -- the audit finds what it looks for ------------------------------------------------------------------------------

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


# -- every text of the database is code: no page executes it, or takes it for elements -----------------------------

CODE = (
    "</title></textarea></pre></style>\"'><img src=x onerror=window.executed=1><svg onload=window.executed=1></svg>"
    "<script>window.executed=1</script><a href=javascript:window.executed=1>x</a>{{7*7}}<!--"
)
KEPT = {"status", "queue", "name", "state", "outcome", "timezone", "cron", "token", "lease_token", "channel"}
"""Columns by whose values rows are found."""
INJECTED = (
    "() => document.querySelectorAll('img, script:not([src]), a[href^=javascript], svg[onload], [onerror]').length"
)


def poison(site: Site) -> int:
    """Write code into all texts, and return the number of columns."""
    written = 0
    columns = site.execute(
        "SELECT table_name, column_name, data_type FROM information_schema.columns WHERE table_schema = 'public' "
        "AND data_type IN ('text', 'character varying', 'jsonb') ORDER BY 1, 2"
    )
    for table, column, kind in columns:
        if column in KEPT:
            continue
        value = "jsonb_build_object(CAST(:code AS text), CAST(:code AS text))" if kind == "jsonb" else ":code"
        try:
            changed = site.execute(f'UPDATE "{table}" SET "{column}" = {value}', code=CODE)
        except sa.exc.DBAPIError:
            continue  # a unique or a short one
        written += changed > 0
    return written


@pytest.mark.few(1)
@pytest.mark.parametrize("javascript", [True, False])
def test_no_page_executes_a_value(own_site: Site, open_view: MakeView, *, javascript: bool) -> None:
    assert poison(own_site) > 10
    own_site.execute("UPDATE sqlaqueue_consumer SET name = :code", code=CODE)
    own_site.execute("UPDATE sqlaqueue_schedule SET name = :code WHERE name = 'heartbeat'", code=CODE)
    view = open_view(own_site, javascript=javascript)
    paths = [
        *PAGES.values(),
        *(f"queues/email/job?key={RUNNING}", "queues/report", "queues/report/jobs", "queues/invoice"),
        "queues/email/jobs?columns=subject,to,last_error,claimed_by",
        f"queues/email/confirm?action=purge&key={FAILED}",
    ]
    seen = 0
    for path in paths:
        view.open(path)
        if not javascript:
            assert "<img" not in view.page.content(), path
            continue
        view.settle()
        assert view.run(INJECTED) == 0, path
        assert view.run("() => window.executed === undefined"), path
        seen += "onerror=window.executed" in view.text()
        view.check()
    assert seen >= 5 or not javascript


# -- the one test of the default session ---------------------------------------------------------------------------


def test_the_first_page_is_shown_and_live(open_view: MakeView, site: Site) -> None:
    view = open_view(site).open().settle()
    assert view.text("h1") == "Queues"
    before = site.execute("SELECT count(*) FROM thumbnail WHERE status = 'pending'")[0][0]
    row = view.page.get_by_role("row").filter(has=view.page.get_by_role("link", name="thumbnail"))
    assert str(before) in row.inner_text().split()
    site.add(*(Thumbnail(path="/media/new.jpg", width=64) for _ in range(5)))
    view.wait_for("number => document.querySelector('main').innerText.split(/\\s+/).includes(number)", str(before + 5))
