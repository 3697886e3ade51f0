"""What a reader clicks and types, with JavaScript and without it: reading, acting, signing in."""

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser
from sqlalchemy.orm import sessionmaker

from sqlaqueue.web import Access, Dashboard
from sqlaqueue.web.security import OneTimeToken, _respond
from tests.web.browser.conftest import PHONE, MakeView, View, Windows, viewing
from tests.web.browser.example import QUEUES, Email, Site, example_site
from tests.web.conftest import serving

WAYS = pytest.mark.parametrize(
    "options", [{}, {"javascript": False}, {"size": PHONE, "javascript": False}], ids=["script", "no-script", "phone"]
)


def everywhere(test: Any) -> Any:
    """Run a test in one of the ways to use the dashboard; `nox -s browser` runs it in each."""
    return pytest.mark.few(1)(WAYS(test))


def keys(view: View) -> list[str]:
    return [each.strip() for each in view.page.locator("table.jobs tbody th.key > a").all_inner_texts()]


@everywhere
def test_from_the_queues_to_a_list_of_failed_jobs(open_view: MakeView, site: Site, options: dict[str, object]) -> None:
    view = open_view(site, **options).open()
    view.follow(view.page.locator("main").get_by_role("link", name="email", exact=True).first)
    assert view.text("h1") == "email"
    view.follow(view.page.get_by_role("link", name="SMTPRecipientsRefused"))
    assert len(keys(view)) == 6
    assert "SMTPRecipientsRefused" in view.text("ul.chips")
    for _ in ("the kind", "the message"):
        view.follow(view.page.get_by_role("link", name="Remove the condition").first)
    assert len(keys(view)) > 6
    view.follow(view.page.get_by_role("link", name="Queues", exact=True).first)
    assert view.path == ""


@everywhere
def test_a_list_is_paged_there_and_back(open_view: MakeView, site: Site, options: dict[str, object]) -> None:
    view = open_view(site, **options).open("queues/email/jobs")
    first = keys(view)
    view.follow(view.page.get_by_role("link", name="Next"))
    second = keys(view)
    assert not set(first) & set(second)
    view.follow(view.page.get_by_role("link", name="Previous"))
    assert keys(view) == first


@everywhere
def test_a_list_is_filtered_by_a_form(open_view: MakeView, site: Site, options: dict[str, object]) -> None:
    view = open_view(site, **options).open("queues/email/jobs?state=failed")
    view.page.get_by_label("Add a condition").fill("error:TimeoutError")
    view.page.get_by_label("Add a condition").press("Enter")
    view.page.wait_for_url("**error=TimeoutError**")
    assert len(keys(view)) == 5
    view.page.get_by_label("Add a condition").fill("<script>alert(1)</script>")
    view.page.get_by_label("Add a condition").press("Enter")
    view.page.wait_for_url("**script**")
    assert keys(view) == []
    assert "<script>alert(1)</script>" in view.text("main")
    view.check()


@everywhere
def test_all_queues_are_searched(open_view: MakeView, site: Site, options: dict[str, object]) -> None:
    view = open_view(site, **options).open()
    view.page.get_by_label("Search all queues").fill("state:failed customer_id:5")
    view.page.get_by_label("Search all queues").press("Enter")
    view.page.wait_for_url("**/search**")
    first = keys(view)
    assert first
    view.follow(view.page.get_by_role("link", name="email", exact=True))
    assert keys(view)[: len(first)] == first
    assert "customer_id = 5" in view.text("ul.chips")
    # A further condition, from the menu.
    view.page.get_by_text("Choose from all conditions").click()
    view.page.get_by_label("Condition", exact=True).select_option("f.to.contains")
    view.page.get_by_label("Value").fill("@EXAMPLE")
    view.page.get_by_label("Value").press("Enter")
    view.page.wait_for_url("**f.to.contains**")
    assert keys(view)[: len(first)] == first
    assert view.path == "queues/email/jobs?state=failed&f.customer_id=5&f.to.contains=%40EXAMPLE"


def test_suggestions_are_those_of_the_last_word(open_view: MakeView, site: Site) -> None:
    view = open_view(site).open("search")
    values = "() => [...document.querySelector('#suggestions').options].map((each) => each.value)"
    plain = view.run(values)
    assert {"state:failed", "customer_id:", "arguments.month:"} <= {*plain}
    for typed, before in (("state:failed cus", "state:failed "), ("a b c", "a b "), ("cus", "")):
        view.page.get_by_label("Search", exact=True).fill(typed)
        assert view.run(values) == [before + each for each in plain]


def test_a_list_by_keyboard(open_view: MakeView, site: Site) -> None:
    view = open_view(site).open("queues/email").press("g", "j")
    view.page.wait_for_url("**/queues/email/jobs")
    view.press("j", "x", "j", "x")
    first, second = keys(view)[:2]
    assert view.text("[data-selected]") == "2 selected"
    assert view.run("() => document.activeElement.textContent.trim()") == second
    view.press("/")
    assert view.run("() => document.activeElement.matches('[data-filter]')")
    view.page.keyboard.type(first)
    view.press("Enter")
    view.page.wait_for_url(f"**job={first}")
    view.press("g", "o")
    view.page.wait_for_url(view.root)
    view.press("g", "h")
    view.page.wait_for_url("**/health")
    view.press("g", "s")
    view.page.wait_for_url("**/schedules")
    view.press("?")
    assert view.page.get_by_role("dialog", name="Keyboard").is_visible()


def test_a_list_follows_the_queue_and_keeps_the_selection(own_site: Site, open_view: MakeView) -> None:
    view = open_view(own_site).open("queues/email/jobs?state=pending").settle()
    selected = keys(view)[1]
    view.page.get_by_label(f"Select {selected}", exact=True).check()
    view.page.get_by_label("Add a condition").fill("12")
    own_site.add(Email(customer_id=1, to="new@example.com", subject="<b>bold</b> & <img src=x onerror=alert(1)>"))
    view.wait_for("() => document.querySelector('table.jobs').textContent.includes('new@example.com')")
    assert view.page.get_by_label(f"Select {selected}", exact=True).is_checked()
    assert view.text("[data-selected]") == "1 selected"
    assert view.page.get_by_label("Add a condition").input_value() == "12"
    # As text, also when a script has put it there.
    assert view.page.locator("table.jobs b, table.jobs img").count() == 0
    own_site.execute(f"DELETE FROM email WHERE id = {selected}")
    own_site.add(Email(customer_id=1, to="newer@example.com", subject="again"))
    view.wait_for("() => document.querySelector('table.jobs').textContent.includes('newer@example.com')")
    assert view.text("[data-selected]") == ""


def test_a_table_opened_in_a_chart_stays_open(own_site: Site, open_view: MakeView) -> None:
    view = open_view(own_site).open("queues/email").settle()
    for part in ("throughput", "history"):
        view.page.locator(f"#{part}").get_by_text("As a table").click()
    before = view.page.locator("#depth").inner_text()
    own_site.add(Email(customer_id=1, to="new@example.com", subject="new"))
    view.wait_for("before => document.getElementById('depth').innerText !== before", before)
    for part in ("throughput", "history"):
        assert view.page.locator(f"#{part} details").get_attribute("open") is not None


def test_the_fix_of_a_finding_is_copied(own_site: Site, open_view: MakeView) -> None:
    own_site.execute("ALTER TABLE thumbnail DISABLE TRIGGER sqlaqueue_message_insert")
    view = open_view(own_site).open("health")
    view.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    finding = view.page.locator("article").filter(has_text="sqlaqueue_message_insert")
    finding.get_by_role("button", name="Copy").click()
    finding.get_by_role("button", name="Copied").wait_for()
    fix = view.run("() => navigator.clipboard.readText()")
    assert fix == "ALTER TABLE thumbnail ENABLE TRIGGER sqlaqueue_message_insert;"
    own_site.execute(fix)


# -- charts, their tables, and the way from a number to its jobs ---------------------------------------------------


def test_a_chart_has_a_table_that_opens_by_keyboard(view: View) -> None:
    view.open("queues/email")
    summary = view.page.locator("#throughput-chart summary")
    assert not view.page.locator("#throughput-chart table").is_visible()
    summary.focus()
    view.press("Enter")
    rows = view.page.locator("#throughput-chart tbody tr")
    assert rows.first.is_visible()
    # All that the bars show is in the table.
    counted, legend = (
        sum(map(int, view.page.locator(cells).all_inner_texts()))
        for cells in ("#throughput-chart td", "#throughput .legend b")
    )
    assert counted == legend > 0


def test_bars_fill_their_chart_at_any_width(view: View) -> None:
    view.open("queues/email")
    for width in (390, 1280, 2000):
        view.page.set_viewport_size({"width": width, "height": 900})
        # In one call: an update may put another chart in its place.
        whole, first, number = view.page.evaluate(
            """() => {
              const chart = document.querySelector("#throughput-chart");
              const places = chart.querySelectorAll(".chart-place");
              const box = (element) => element.getBoundingClientRect().toJSON();
              return [box(chart.querySelector(".chart-bars")), box(places[0]), places.length];
            }"""
        )
        assert abs(first["x"] - whole["x"]) < 2
        assert abs(first["width"] * number - whole["width"]) < 2


def test_from_the_overview_to_the_last_day_of_a_queue(view: View) -> None:
    view.open()
    view.follow(view.page.get_by_role("link", name="email", exact=True))
    assert view.path == "queues/email"
    view.follow(view.page.get_by_role("link", name="Last day"))
    assert view.path == "queues/email?span=day"
    assert view.page.get_by_role("link", name="Last day").get_attribute("aria-current") == "true"
    assert view.page.locator("#throughput svg.chart-bars").count() == 1
    view.follow(view.page.get_by_role("link", name="Claim plan"))
    assert "rolled back" in view.text("#plan")


# -- acting on jobs: what the database has afterwards, and what the audit says -------------------------------------


@pytest.fixture
def audit(caplog: pytest.LogCaptureFixture) -> Callable[[], list[Any]]:
    """What was done so far: who did what, in which queue, to how many jobs."""
    caplog.set_level(logging.INFO, "sqlaqueue.audit")
    names = ("user", "action", "queue", "count")
    return lambda: [
        tuple(getattr(record, name, None) for name in names)
        for record in caplog.records
        if record.name == "sqlaqueue.audit"
    ]


def state(site: Site, key: int, table: str = "email") -> str:
    return str(site.execute(f"SELECT status FROM {table} WHERE id = {key}")[0][0])


def one(site: Site, status: str, table: str = "email") -> int:
    rows = site.execute(f"SELECT id FROM {table} WHERE status = '{status}' ORDER BY id LIMIT 1")
    return int(rows[0][0])


def button(view: View, name: str, **options: Any) -> Any:
    return view.page.locator("main").get_by_role("button", name=name, **options).first


@everywhere
def test_a_failed_job_is_requeued(own_site: Site, open_view: MakeView, audit: Any, options: dict[str, object]) -> None:
    key = one(own_site, "failed")
    view = open_view(own_site, **options).open(f"queues/email/job?key={key}")
    view.follow(button(view, "Requeue", exact=True))
    assert "1" in view.text(".notice")
    assert state(own_site, key) == "pending"
    assert audit() == [("ada", "requeue", "email", 1)]
    # A reload does not repeat it.
    view.page.reload()
    assert len(audit()) == 1


@everywhere
def test_a_pending_job_is_cancelled(own_site: Site, open_view: MakeView, audit: Any, options: Any) -> None:
    key = one(own_site, "pending")
    view = open_view(own_site, **options).open(f"queues/email/job?key={key}")
    view.follow(button(view, "Cancel", exact=True))
    assert state(own_site, key) == "cancelled"
    assert audit() == [("ada", "cancel", "email", 1)]


@everywhere
def test_the_arguments_of_a_job_are_edited(own_site: Site, open_view: MakeView, audit: Any, options: Any) -> None:
    key = one(own_site, "failed")
    view = open_view(own_site, **options).open(f"queues/email/job?key={key}")
    view.follow(view.page.locator("main").get_by_role("link", name="Edit"))
    view.page.get_by_label("to", exact=True).fill("Grace <grace@example.com> & 'co' 日本")
    view.follow(button(view, "Save and requeue"))
    assert state(own_site, key) == "pending"
    assert own_site.execute(f'SELECT "to" FROM email WHERE id = {key}')[0][0] == "Grace <grace@example.com> & 'co' 日本"
    assert "Grace <grace@example.com> & 'co' 日本" in view.text("main")
    assert {each[1] for each in audit()} >= {"edit"}


def test_a_form_is_not_sent_again_at_once(own_site: Site, open_view: MakeView, audit: Any) -> None:
    view = open_view(own_site).open("queues/email/jobs?state=pending")
    view.follow(view.page.locator("table.jobs tbody th.key > a").first)
    view.follow(view.page.get_by_role("link", name="Enqueue another"))
    # Browsers send it twice if the second click of two comes a little later.
    sent = """() => ["submit", "submit"].map((name) => document.querySelector("form.edit").dispatchEvent(
        new SubmitEvent(name, { bubbles: true, cancelable: true })))"""
    assert view.page.evaluate(sent) == [True, False]
    view.page.reload()
    with view.page.expect_navigation(url="**notice=enqueued**"):
        view.page.get_by_role("button", name="Enqueue", exact=True).dblclick()
    assert len(audit()) == 1


def test_an_argument_that_is_wrong_is_shown_beside_its_field(own_site: Site, open_view: MakeView) -> None:
    key = one(own_site, "failed")
    view = open_view(own_site).open(f"queues/email/edit?key={key}")
    field = view.page.get_by_label("customer_id", exact=True)
    field.fill("nobody")
    view.expect(400, 422)
    view.follow(button(view, "Save and requeue"))
    assert view.page.get_by_label("customer_id", exact=True).get_attribute("aria-invalid") == "true"
    assert state(own_site, key) == "failed"


@everywhere
def test_selected_jobs_are_requeued_after_a_preview(
    own_site: Site, open_view: MakeView, audit: Any, options: Any
) -> None:
    view = open_view(own_site, **options).open("queues/email/jobs?state=failed")
    boxes = view.page.locator("tbody input[type=checkbox]")
    chosen = [int(boxes.nth(place).get_attribute("value") or "") for place in (0, 2)]
    for place in (0, 2):
        boxes.nth(place).check()
    view.follow(view.page.get_by_role("group", name="Selected jobs").get_by_role("button", name="Requeue"))
    assert view.text("h1") == "Requeue 2 jobs?"
    assert {state(own_site, key) for key in chosen} == {"failed"}
    view.follow(button(view, "Requeue 2 jobs"))
    assert {state(own_site, key) for key in chosen} == {"pending"}
    assert own_site.execute("SELECT count(*) FROM email WHERE status = 'failed'")[0][0] == 15
    assert [(action, count) for _, action, _, count in audit()] == [("requeue", 2)]


@everywhere
def test_a_whole_list_is_deleted_after_a_count(own_site: Site, open_view: MakeView, audit: Any, options: Any) -> None:
    view = open_view(own_site, **options).open("queues/email/jobs?state=failed&error=TimeoutError")
    view.page.get_by_text("All 5 matching jobs").click()
    view.follow(view.page.get_by_role("group", name="All matching jobs").get_by_role("button", name="Delete"))
    assert view.text("h1") == "Delete 5 jobs?"
    view.follow(button(view, "Delete 5 jobs"))
    assert own_site.execute("SELECT count(*) FROM email WHERE status = 'failed'")[0][0] == 12
    assert [(action, count) for _, action, _, count in audit()] == [("purge", 5)]


def test_a_preview_can_be_left(own_site: Site, open_view: MakeView, audit: Any) -> None:
    key = one(own_site, "failed")
    view = open_view(own_site).open(f"queues/email/confirm?action=purge&key={key}")
    view.follow(view.page.get_by_role("link", name="Go back"))
    assert state(own_site, key) == "failed"
    assert audit() == []


@everywhere
def test_a_queue_is_paused_and_resumed(own_site: Site, open_view: MakeView, audit: Any, options: Any) -> None:
    view = open_view(own_site, **options).open("queues/email")
    view.follow(view.page.get_by_role("link", name="Pause…"))
    view.page.get_by_label("Reason").fill("the mail server is being moved")
    view.follow(button(view, "Pause", exact=True))
    assert "No job starts until the queue is resumed" in view.text("main")
    view.open("schedules")
    assert "by ada: the mail server is being moved" in view.text("#pauses")
    view.open("queues/email")
    view.follow(button(view, "Resume", exact=True))
    assert "No job starts" not in view.text("main")
    assert view.page.locator("#pauses p").count() == 0
    assert [each[:3] for each in audit()] == [("ada", "pause", "email"), ("ada", "resume", "email")]


@everywhere
def test_a_schedule_is_paused_resumed_and_run(own_site: Site, open_view: MakeView, audit: Any, options: Any) -> None:
    view = open_view(own_site, **options).open("schedules")

    def row() -> Any:
        return view.page.get_by_role("row").filter(has_text="nightly-sales")

    view.follow(row().get_by_role("button", name="Pause"))
    assert "paused" in row().inner_text()
    view.follow(row().get_by_role("button", name="Resume"))
    assert "paused" not in row().inner_text()
    view.follow(row().get_by_role("button", name="Run"))
    requested = own_site.execute("SELECT run_requested_at FROM sqlaqueue_schedule WHERE name = 'nightly-sales'")
    assert requested[0][0] is not None
    assert len(audit()) == 3


def test_what_a_user_may_not_do_is_not_offered(site: Site, windows: Windows) -> None:
    rule = Access(read=["email"], act={"email": ["requeue"]})
    with example_site(site.database, access=lambda _: rule) as limited, windows.viewing(limited.root) as view:
        view.open("queues/email")
        assert view.page.get_by_role("link", name="Pause…").count() == 0
        key = one(site, "failed")
        view.open(f"queues/email/job?key={key}")
        assert button(view, "Requeue", exact=True).count() == 1
        assert view.page.locator("main").get_by_role("link", name="Delete").count() == 0
        view.open("queues/invoice", status=404)


def test_another_site_cannot_act(own_site: Site, open_view: MakeView, audit: Any) -> None:
    key = one(own_site, "failed")
    view = open_view(own_site)
    view.expect(403)
    # A page of another origin on this machine: the same host, and so the same cookies.
    attack = f"""<form method="post" action="{own_site.root}queues/email/actions/requeue">
        <input type="hidden" name="key" value="{key}"><button>Win</button></form>"""
    view.page.route("http://127.0.0.1:1/", lambda route: route.fulfill(body=attack, content_type="text/html"))
    view.page.goto("http://127.0.0.1:1/")
    view.follow(view.page.get_by_role("button", name="Win"))
    assert "Not allowed" in view.text("h1")
    assert state(own_site, key) == "failed"
    assert audit() == []


# -- what ``sqlaqueue web`` serves: the link signs a browser in ----------------------------------------------------


class Guarded:
    """The dashboard behind the guard, whose origin is known when the server has its port."""

    def __init__(self, site: Site) -> None:
        self._dashboard = Dashboard(QUEUES, sessionmaker(site.engine), access=lambda _: Access(read=True, act=True))
        self.links: list[str] = []
        self.app: OneTimeToken | None = None

    async def __call__(self, scope, receive, send) -> None:  # type: ignore[no-untyped-def]  # noqa: ANN001 - as in ASGI
        if self.app is None:
            await self._dashboard(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    def guard(self, root: str) -> None:
        self.app = OneTimeToken(self._dashboard, origin=root.rstrip("/"), announce=self.links.append)


@pytest.fixture
def guarded(site: Site) -> Iterator[tuple[Guarded, str]]:
    app = Guarded(site)
    with serving(app) as root:
        app.guard(root)
        yield app, root


def test_a_link_signs_in_the_browser_that_opens_it(guarded: tuple[Guarded, str], browser: Browser) -> None:
    app, root = guarded
    link = app.app.new_link()
    with viewing(browser, root) as view:
        view.open(status=401)
        assert "Open the link" in view.text()
        view.open(link.removeprefix(root))
        view.wait_for("() => document.querySelector('h1').textContent === 'Queues'")
        # The token is neither in the address nor behind the button "Back".
        assert view.page.url == link.partition("?")[0]
        (cookie,) = (each for each in view.page.context.cookies() if each["name"] != "sqlaqueue_zone")
        assert (cookie.get("httpOnly"), cookie.get("sameSite")) == (True, "Strict")
        # Other ports do not receive it.
        assert root.rstrip("/") + str(cookie.get("path")) == view.page.url
        assert view.run("() => document.cookie").startswith("sqlaqueue_zone=")
        view.page.reload()
        assert view.text("h1") == "Queues"
    with viewing(browser, root) as another:
        another.open(link.removeprefix(root), status=401)
        another.open(app.links[0].removeprefix(root))
        another.wait_for("() => document.querySelector('h1').textContent === 'Queues'")


@pytest.mark.few(1)
@pytest.mark.parametrize("javascript", [True, False])
def test_links_work_on_pages_of_other_sites(
    guarded: tuple[Guarded, str],
    browser: Browser,
    javascript: bool,  # noqa: FBT001 - a parameter of the test
) -> None:
    app, root = guarded
    assert app.app is not None
    link = app.app.new_link()
    inside = f"{link.partition('?')[0]}health"

    async def chat(_: Any, __: Any, send: Any) -> None:
        await _respond(send, 200, f'<a href="{link}">link</a> <a href="{inside}">health</a>'.encode(), [])

    with serving(chat) as other, viewing(browser, root, javascript=javascript) as view:
        # Another site than 127.0.0.1, whose ports are one site.
        elsewhere = other.replace("127.0.0.1", "localhost")
        view.page.goto(elsewhere)
        view.page.get_by_role("link", name="link").click()
        view.page.get_by_role("heading", name="Queues", exact=True).wait_for()
        view.expect(401)
        view.page.goto(elsewhere)
        view.page.get_by_role("link", name="health").click()
        assert "clicked on a page of another site" in view.text()
        view.page.get_by_role("link", name="Continue").click()
        view.page.get_by_role("heading", name="Health", exact=True).wait_for()
    assert app.links == []


CUT = """() => [...document.querySelectorAll(".bar a, .bar button, .bar .user")]
    .filter((each) => each.checkVisibility())
    .filter((each) => {
      const { left, right, height } = each.getBoundingClientRect();
      const seen = document.elementFromPoint((left + right) / 2, each.getBoundingClientRect().top + height / 2);
      return left < 0 || right > document.documentElement.clientWidth || !each.contains(seen);
    })
    .map((each) => each.textContent.trim())"""
"""Returns what is in the bar at the top and is cut, or not seen."""


@pytest.mark.few(1)
@pytest.mark.parametrize("width", [390, 320])
def test_the_bar_on_a_phone(open_view: MakeView, site: Site, width: int) -> None:
    """Each page is reached without scrolling sideways, and the bar leaves the screen to the page."""
    view = open_view(site, size=PHONE)
    view.page.set_viewport_size({"width": width, "height": 844})
    for path in ("", "audit"):
        view.open(path).settle()
        links = view.page.get_by_role("navigation", name="Pages").get_by_role("link").all_inner_texts()
        assert [each.split()[0] for each in links] == [
            "Queues",
            "Consumers",
            "Failures",
            "Schedules",
            "Health",
            "Audit",
        ]
        assert view.run(CUT) == []
        assert view.run("() => document.documentElement.scrollWidth") <= width
    view.open("queues/email/jobs")
    view.page.mouse.wheel(0, 1500)
    view.wait_for("() => document.querySelector('.bar').getBoundingClientRect().bottom <= 0")


TARGETS = """() => [...document.querySelectorAll("#job-list a, #job-list button, #job-list label, #job-list summary")]
    .filter((each) => each.checkVisibility() && !each.closest("thead"))
    .map((each) => [each.textContent.trim(), Math.round(each.getBoundingClientRect().height)])
    .filter(([, height]) => height < 44)"""


WIDE = """() => [...document.querySelectorAll("#job-list .brief:not(.brief-rest)")]
    .filter((each) => each.getBoundingClientRect().right > each.closest("th").getBoundingClientRect().right + 1)
    .map((each) => each.textContent.trim())"""
UNSIGNED = """() => [...document.querySelectorAll("main summary")]
    .filter((each) => getComputedStyle(each).display !== "list-item")
    .map((each) => each.textContent.trim())"""


def test_a_list_on_a_phone(open_view: MakeView, site: Site) -> None:
    """Fifty jobs are a few screens, each is touched by a finger, and the actions stay in sight."""
    view = open_view(site, size=PHONE, follows=False)
    view.open("queues/email/jobs?state=completed&sort=id")
    assert view.page.locator("table.jobs tbody tr").count() == 50
    assert view.run("() => document.documentElement.scrollHeight") < 5000
    assert view.run(TARGETS) == []
    last = view.page.locator("table.jobs tbody tr").last
    last.scroll_into_view_if_needed()
    assert view.page.get_by_role("group", name="Selected jobs").get_by_role("button").first.is_visible()
    box = view.page.locator(".bulk").bounding_box()
    assert box is not None
    assert 0 <= box["y"] < 100
    # The state and the time are whole, and what is folded has a sign.
    view.open("queues/email/jobs")
    assert view.page.locator("table.jobs .brief", has_text="ago").count() >= 50
    assert view.run(WIDE) == []
    assert view.run(UNSIGNED) == []
    view.open("queues/email/jobs?state=failed")
    assert view.page.locator(".brief-rest").first.inner_text() == "SMTPRecipientsRefused: 550 5.1.1 mailbox unavailable"
