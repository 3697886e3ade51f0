"""Reading the pages: what a reader clicks and types, with JavaScript and without it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.web.browser.chromium import PHONE, View
from tests.web.browser.example import Email
from tests.web.browser.site import Site

OpenView = Callable[..., View]

everywhere = pytest.mark.parametrize(
    "options",
    [{}, {"javascript": False}, {"size": PHONE, "javascript": False}],
    ids=["script", "no-script", "phone"],
)


def keys(view: View) -> list[str]:
    return [each.strip() for each in view.page.locator("table.jobs tbody th.key").all_inner_texts()]


@everywhere
def test_from_the_queues_to_a_list_of_failed_jobs(open_view: OpenView, site: Site, options: dict[str, object]) -> None:
    view = open_view(site, **options).open()
    view.follow(view.page.locator("main").get_by_role("link", name="email", exact=True).first)
    assert view.text("h1") == "email"
    view.follow(view.page.get_by_role("link", name="SMTPRecipientsRefused"))
    assert len(keys(view)) == 6
    assert "SMTPRecipientsRefused" in view.text("ul.chips")
    view.follow(view.page.get_by_role("link", name="Remove the condition").first)
    assert len(keys(view)) > 6
    view.follow(view.page.get_by_role("link", name="Queues", exact=True).first)
    assert view.path == ""


@everywhere
def test_a_list_is_paged_there_and_back(open_view: OpenView, site: Site, options: dict[str, object]) -> None:
    view = open_view(site, **options).open("queues/email/jobs")
    first = keys(view)
    view.follow(view.page.get_by_role("link", name="Next"))
    second = keys(view)
    assert not set(first) & set(second)
    view.follow(view.page.get_by_role("link", name="Previous"))
    assert keys(view) == first


@everywhere
def test_a_list_is_filtered_by_a_form(open_view: OpenView, site: Site, options: dict[str, object]) -> None:
    view = open_view(site, **options).open("queues/email/jobs?state=failed")
    view.page.get_by_label("Kind of error").fill("TimeoutError")
    view.page.get_by_label("Kind of error").press("Enter")
    view.page.wait_for_url("**TimeoutError**")
    assert len(keys(view)) == 5
    view.page.get_by_label("Kind of error").fill("<script>alert(1)</script>")
    view.page.get_by_label("Kind of error").press("Enter")
    view.page.wait_for_url("**script**")
    assert keys(view) == []
    assert "<script>alert(1)</script>" in view.text("main")
    view.check()


def test_a_list_by_keyboard(open_view: OpenView, site: Site) -> None:
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
    view.page.wait_for_url(f"**{first}**")
    view.press("g", "o")
    view.page.wait_for_url(view.root)
    view.press("g", "h")
    view.page.wait_for_url("**/health")
    view.press("g", "s")
    view.page.wait_for_url("**/schedules")
    view.press("?")
    assert view.page.get_by_role("dialog", name="Keyboard").is_visible()


def test_a_list_follows_the_queue_and_keeps_the_selection(open_view: OpenView, own_site: Site) -> None:
    view = open_view(own_site).open("queues/email/jobs?state=pending").settle()
    selected = keys(view)[1]
    view.page.get_by_label(f"Select {selected}", exact=True).check()
    view.page.get_by_label("Key (id)").fill("12")
    own_site.add(Email(customer_id=1, to="new@example.com", subject="<b>bold</b> & <img src=x onerror=alert(1)>"))
    view.wait_for("() => document.querySelector('table.jobs').textContent.includes('new@example.com')")
    assert view.page.get_by_label(f"Select {selected}", exact=True).is_checked()
    assert view.text("[data-selected]") == "1 selected"
    assert view.page.get_by_label("Key (id)").input_value() == "12"
    # As text, also when a script has put it there.
    assert view.page.locator("table.jobs b, table.jobs img").count() == 0
    own_site.execute(f"DELETE FROM email WHERE id = {selected}")
    own_site.add(Email(customer_id=1, to="newer@example.com", subject="again"))
    view.wait_for("() => document.querySelector('table.jobs').textContent.includes('newer@example.com')")
    assert view.text("[data-selected]") == ""


def test_a_table_opened_in_a_chart_stays_open(open_view: OpenView, own_site: Site) -> None:
    view = open_view(own_site).open("queues/email").settle()
    view.page.get_by_text("As a table").click()
    before = view.page.locator("#depth").inner_text()
    own_site.add(Email(customer_id=1, to="new@example.com", subject="new"))
    view.wait_for("before => document.getElementById('depth').innerText !== before", before)
    assert view.page.locator("#throughput details").get_attribute("open") is not None


def test_the_chart_of_a_day(open_view: OpenView, site: Site) -> None:
    view = open_view(site).open("queues/email")
    view.follow(view.page.get_by_role("link", name="Last day"))
    assert view.page.get_by_role("link", name="Last day").get_attribute("aria-current") == "true"
    assert view.page.locator("#throughput svg.chart-bars").count() == 1


def test_the_fix_of_a_finding_is_copied(open_view: OpenView, own_site: Site) -> None:
    own_site.execute("ALTER TABLE thumbnail DISABLE TRIGGER sqlaqueue_message_insert")
    view = open_view(own_site).open("health")
    view.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    finding = view.page.locator("article").filter(has_text="sqlaqueue_message_insert")
    finding.get_by_role("button", name="Copy").click()
    finding.get_by_role("button", name="Copied").wait_for()
    fix = view.run("() => navigator.clipboard.readText()")
    assert fix == "ALTER TABLE thumbnail ENABLE TRIGGER sqlaqueue_message_insert;"
    own_site.execute(fix)
