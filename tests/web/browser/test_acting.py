"""Acting on jobs: what a reader clicks, what the database has afterwards, and what the audit says."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest

from tests.web.browser.chromium import PHONE, View
from tests.web.browser.site import Site

OpenView = Callable[..., View]

everywhere = pytest.mark.parametrize(
    "options",
    [{}, {"javascript": False}, {"size": PHONE, "javascript": False}],
    ids=["script", "no-script", "phone"],
)


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
def test_a_failed_job_is_requeued(open_view: OpenView, own_site: Site, audit: Any, options: dict[str, object]) -> None:
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
def test_a_pending_job_is_cancelled(open_view: OpenView, own_site: Site, audit: Any, options: Any) -> None:
    key = one(own_site, "pending")
    view = open_view(own_site, **options).open(f"queues/email/job?key={key}")
    view.follow(button(view, "Cancel", exact=True))
    assert state(own_site, key) == "cancelled"
    assert audit() == [("ada", "cancel", "email", 1)]


@everywhere
def test_the_arguments_of_a_job_are_edited(open_view: OpenView, own_site: Site, audit: Any, options: Any) -> None:
    key = one(own_site, "failed")
    view = open_view(own_site, **options).open(f"queues/email/job?key={key}")
    view.follow(view.page.locator("main").get_by_role("link", name="Edit"))
    view.page.get_by_label("to", exact=True).fill("Grace <grace@example.com> & 'co' 日本")
    view.follow(button(view, "Save and requeue"))
    assert state(own_site, key) == "pending"
    assert own_site.execute(f'SELECT "to" FROM email WHERE id = {key}')[0][0] == "Grace <grace@example.com> & 'co' 日本"
    assert "Grace <grace@example.com> & 'co' 日本" in view.text("main")
    assert {each[1] for each in audit()} >= {"edit"}


def test_an_argument_that_is_wrong_is_shown_beside_its_field(open_view: OpenView, own_site: Site) -> None:
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
    open_view: OpenView, own_site: Site, audit: Any, options: Any
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
def test_a_whole_list_is_deleted_after_a_count(open_view: OpenView, own_site: Site, audit: Any, options: Any) -> None:
    view = open_view(own_site, **options).open("queues/email/jobs?state=failed&error=TimeoutError")
    view.page.get_by_text("All 5 matching jobs").click()
    view.follow(view.page.get_by_role("group", name="All matching jobs").get_by_role("button", name="Delete"))
    assert view.text("h1") == "Delete 5 jobs?"
    view.follow(button(view, "Delete 5 jobs"))
    assert own_site.execute("SELECT count(*) FROM email WHERE status = 'failed'")[0][0] == 12
    assert [(action, count) for _, action, _, count in audit()] == [("purge", 5)]


def test_a_preview_can_be_left(open_view: OpenView, own_site: Site, audit: Any) -> None:
    key = one(own_site, "failed")
    view = open_view(own_site).open(f"queues/email/confirm?action=purge&key={key}")
    view.follow(view.page.get_by_role("link", name="Go back"))
    assert state(own_site, key) == "failed"
    assert audit() == []


@everywhere
def test_a_queue_is_paused_and_resumed(open_view: OpenView, own_site: Site, audit: Any, options: Any) -> None:
    view = open_view(own_site, **options).open("queues/email")
    view.follow(button(view, "Pause", exact=True))
    assert "No job begins until the queue is resumed" in view.text("main")
    view.follow(button(view, "Resume", exact=True))
    assert "No job begins" not in view.text("main")
    assert [each[:3] for each in audit()] == [("ada", "pause", "email"), ("ada", "resume", "email")]


@everywhere
def test_a_schedule_is_paused_resumed_and_run(open_view: OpenView, own_site: Site, audit: Any, options: Any) -> None:
    view = open_view(own_site, **options).open("schedules")

    def row() -> Any:
        return view.page.get_by_role("row").filter(has_text="nightly-sales")

    view.follow(row().get_by_role("button", name="Pause"))
    assert "paused" in row().inner_text()
    view.follow(row().get_by_role("button", name="Resume"))
    assert "paused" not in row().inner_text()
    view.follow(row().get_by_role("button", name="Run"))
    assert own_site.execute("SELECT run_requested_at IS NOT NULL FROM sqlaqueue_schedule WHERE name = 'nightly-sales'")[
        0
    ][0]
    assert len(audit()) == 3


def test_what_a_user_may_not_do_is_not_offered(
    open_view: OpenView, module_database: Any, audit: Any, request: pytest.FixtureRequest
) -> None:
    from sqlaqueue.web import Access  # noqa: PLC0415 - the one test with a rule of its own
    from tests.web.browser.site import example_site  # noqa: PLC0415 - the one test with a rule of its own

    with example_site(module_database, access=lambda _: Access(read=["email"], act={"email": ["requeue"]})) as site:
        view = open_view(site).open("queues/email")
        assert button(view, "Pause", exact=True).count() == 0
        key = one(site, "failed")
        view.open(f"queues/email/job?key={key}")
        assert button(view, "Requeue", exact=True).count() == 1
        assert view.page.locator("main").get_by_role("link", name="Delete").count() == 0
        view.open("queues/invoice", status=404)


def test_another_site_cannot_act(open_view: OpenView, own_site: Site, audit: Any) -> None:
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
