"""Failed jobs in groups: which errors are one group, what is shown of it, and what is done with all of its jobs."""

import itertools
import re
from datetime import datetime, timedelta
from html import unescape
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from sqlaqueue import Unique, claim
from sqlaqueue.admin.jobs import kind_of, message_of
from sqlaqueue.mapping.mixin import spec_of
from sqlaqueue.web import Access
from sqlaqueue.web.data.bulk import act as act_on
from sqlaqueue.web.data.bulk import by_filter
from sqlaqueue.web.data.failures import Failures, read_failures
from tests.admin.models import Setup
from tests.models import execute, sent_statements
from tests.web.conftest import act, follow, hidden
from tests.web.jobs import KINDS, add, fail_jobs, finish, new_queue, no_table_is_small, read, states, wanted
from tests.web.models import Queues

ID = "550e8400-e29b-41d4-a716-446655440000"


@pytest.mark.parametrize(
    ("errors", "kind", "message"),
    [
        (["LookupError: job 5 not found", "LookupError: job 66 not found"], "LookupError", "job … not found"),
        (["KeyError: 'ada'", 'KeyError: "o\'neill"', "KeyError: 7"], "KeyError", "…"),
        ([f"x: no {ID}", "x: no 0fa9b6c0-1111-4222-8333-abcdefabcdef"], "x", "no …"),
        (["E: <object at 0x7f3ab>", "E: <object at 0x1>"], "E", "<object at …>"),
        (["E: sha 3f786850e387550fdab836ed7e6dc881de23001b", "E: sha deadbeef01"], "E", "sha …"),
        (["E: at 10:20:30, 1,000.5", "E: at 1:2:3, 7"], "E", "at …, …"),
        (["E: can't open 'a b'", "E: can't open 'cut off"], "E", "can't open …"),
        (["S3Error: x\nTraceback 5", "S3Error: x"], "S3Error", "x"),
        (["order 1: no stock", "order 2: no stock"], "other", "order …: no stock"),
        (["E:", "E: "], "E", "(no text)"),
        (["", None], "", "(no error)"),
        (["E: " + "a " * 500 + "1", "E: " + "a " * 500 + "b"], "E", "a " * 148 + "a"),
    ],
)
def test_errors_of_one_message(engine: sa.Engine, errors: list[str | None], kind: str, message: str) -> None:
    with engine.connect() as connection:
        for error in errors:
            text = sa.literal(error, sa.Text())
            found = connection.execute(sa.select(kind_of(text), message_of(text))).one()
            assert (found[0], found[1].strip()) == (kind, message)


@pytest.mark.parametrize("errors", [("E: job 5", "E: task 5"), ("E: it's", "E: it is"), ("A: x", "B: x")])
def test_errors_of_different_groups(engine: sa.Engine, errors: tuple[str, str]) -> None:
    setup = Setup.of(engine, "update_status", unique=None)
    for error in errors:
        finish(setup, "failed", 10, error=error)
    assert len(found(engine, setup.model).groups) == 2


def found(engine: sa.Engine, model: Any, **options: Any) -> Failures:
    failures = read(engine, model, read_failures, **options)
    assert isinstance(failures, Failures), failures
    return failures


def test_a_group_has_its_first_and_newest_time_and_its_trend(engine: sa.Engine) -> None:
    setup = Setup.of(engine, "update_status", unique=None)
    hour = 3600
    finish(setup, "failed", 60, 120, error="E: job 1")
    finish(setup, "failed", 5 * hour + 60, error="E: job 2")
    finish(setup, "failed", 40 * hour, error="E: job 3")
    finish(setup, "failed", 30 * hour, error="Other: x")
    group, other = found(engine, setup.model).groups
    assert (group.kind, group.message, group.number, group.error) == ("E", "job …", 4, "E: job 1")
    assert group.newest is not None
    assert group.first is not None
    assert round((group.newest - group.first) / timedelta(hours=1)) == 40
    assert group.hours == [*[0] * 18, 1, *[0] * 4, 2]
    assert (other.last_hour, sum(other.hours)) == (0, 0)
    # Those of the last day only.
    assert found(engine, setup.model, within=timedelta(days=1)).groups[0].number == 3


def test_no_more_failures_are_read_than_the_limit(engine: sa.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    no_table_is_small(monkeypatch, GROUPED=3)
    setup = Setup.of(engine, "update_status", unique=None, retention={"failed": timedelta(days=1)})
    finish(setup, "failed", *range(10, 60, 10), error="E: job 1")
    failures = found(engine, setup.model)
    assert (failures.number, failures.is_capped) == (3, True)


def test_dead_letters_that_are_not_read_are_told(engine: sa.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    no_table_is_small(monkeypatch, GROUPED=3)
    model = new_queue(engine, "rows_are_messages")
    add(engine, *(model(id=number) for number in range(1, 4)))
    fail_jobs(engine, model, 2)
    assert not found(engine, model).is_capped
    # A cancelled one is read as well: no index tells them apart.
    execute(engine, "UPDATE sqlaqueue_dead_letter SET state = 'cancelled' WHERE key = '[1]'")
    fail_jobs(engine, model)
    failures = found(engine, model)
    assert (failures.number, failures.is_capped) == (2, True)


# -- pages ----------------------------------------------------------------------------------------------------------


def fail_emails(engine: sa.Engine, queues: Queues, *errors: str) -> None:
    for error in errors:
        add(engine, queues.Email(recipient="a"))
        fail_jobs(engine, queues.Email, error=error)


def links(text: str, label: str) -> list[str]:
    return [unescape(href) for href in re.findall(rf'href="([^"]*)"[^>]*>{label}</a>', text)]


async def test_the_page_has_the_groups_of_all_queues(engine: sa.Engine, queues: Queues, client_of: Any) -> None:
    fail_emails(engine, queues, *(f"LookupError: job {number} not found" for number in range(3)))
    add(engine, queues.Invoice())
    fail_jobs(engine, queues.Invoice, error="KeyError: 'x'")
    async with client_of() as browser:
        page = await browser.get("/failures")
        assert page.status_code == 200
        assert page.text.index("job … not found") < page.text.index("KeyError")
        assert "3 within the last 24 hours" in page.text
        listed = await browser.get(str(page.url.join(links(page.text, r"<b>LookupError</b> job … not found")[0])))
    assert listed.text.count('class="select"><label><input type="checkbox" form="selected-jobs"') == 3
    assert "message job … not found" in listed.text


async def test_the_page_has_no_group_of_a_queue_that_is_not_seen(
    engine: sa.Engine, queues: Queues, client_of: Any
) -> None:
    fail_emails(engine, queues, "E: secret")
    add(engine, queues.Invoice())
    fail_jobs(engine, queues.Invoice, error="KeyError: 'x'")
    # One dashboard, as what it has read for one user must not be shown to another.
    access = [Access(read=True), Access(read=["invoice"])]
    async with client_of(access=lambda _: access.pop(0)) as browser:
        assert "secret" in (await browser.get("/failures")).text
        page = (await browser.get("/failures")).text
    assert "secret" not in page
    assert "email" not in page
    assert "KeyError" in page


async def test_the_page_shows_no_redacted_error(engine: sa.Engine, queues: Queues, client_of: Any) -> None:
    fail_emails(engine, queues, "E: secret")
    async with client_of(redact=["Email.last_error"]) as browser:
        page = await browser.get("/failures")
        assert "secret" not in page.text
        assert "The errors of email are redacted." in page.text
        for path in ("jobs?", "confirm?action=requeue&all=1&"):
            refused = await browser.get(f"/queues/email/{path}message=secret")
            assert refused.status_code == 400
            assert "this queue does not show errors" in refused.text


@pytest.mark.parametrize("page", ["/failures", "/queues/email"])
@pytest.mark.parametrize(
    ("rights", "labels"),
    [
        (True, ["Requeue…", "Delete…", "Cancel retries…"]),
        (["requeue"], ["Requeue…"]),
        (["purge", "cancel"], ["Delete…", "Cancel retries…"]),
        (False, []),
    ],
)
async def test_each_action_on_a_group_needs_its_right(
    engine: sa.Engine, queues: Queues, client_of: Any, page: str, rights: Any, labels: list[str]
) -> None:
    fail_emails(engine, queues, "E: 1")
    async with client_of(access=lambda _: Access(read=True, act={"email": rights})) as browser:
        text = (await browser.get(page)).text
    part = text[text.index('id="failures"') :]
    assert [label for label in ("Requeue…", "Delete…", "Cancel retries…") if label in part] == labels


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("label", "action", "left"),
    [
        ("Requeue…", "requeue", {"1": "pending", "2": "pending", "3": "failed"}),
        ("Delete…", "purge", {"3": "failed"}),
        ("Cancel retries…", "cancel", {"1": "failed", "2": "failed", "3": "failed"}),
    ],
)
async def test_an_action_changes_the_jobs_of_the_group_only(
    engine: sa.Engine, queues: Queues, client_of: Any, label: str, action: str, left: dict[str, str]
) -> None:
    fail_emails(engine, queues, "E: job 1", "E: job 2", "E: other")
    async with client_of() as browser:
        page = await browser.get("/failures")
        preview = await browser.get(str(page.url.join(links(page.text, label)[0])))
        assert preview.status_code == 200
        done = await browser.post(f"/queues/email/actions/{action}", data=dict(hidden(preview.text)))
        assert done.status_code == 303
        shown = await follow(browser, done)
    assert shown.status_code == 200
    assert states(engine, queues.Email) == left


async def test_retries_with_the_error_of_a_group_are_cancelled(
    engine: sa.Engine, queues: Queues, client_of: Any
) -> None:
    fail_emails(engine, queues, "E: job 1")
    add(engine, queues.Email(recipient="a"), queues.Email(recipient="a"))
    execute(engine, "UPDATE email SET last_error = 'E: job 7', attempts = 1 WHERE id = 2")
    async with client_of() as browser:
        page = await browser.get("/failures")
        preview = await browser.get(str(page.url.join(links(page.text, "Cancel retries…")[0])))
        await browser.post("/queues/email/actions/cancel", data=dict(hidden(preview.text)))
    assert states(engine, queues.Email) == {"1": "failed", "2": "cancelled", "3": "pending"}


# -- requeue at a rate ----------------------------------------------------------------------------------------------


def due_times(engine: sa.Engine, model: Any) -> list[datetime]:
    spec = spec_of(model)
    with Session(engine) as session:
        pending = [spec.in_state("pending")] if spec.has("status") else []
        rows = session.execute(sa.select(spec.columns["run_at"]).where(*pending).order_by(*spec.keys))
        return [row[0] for row in rows]


def spread_evenly(times: list[datetime], distance: timedelta) -> bool:
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    return all(abs(gap - distance) < timedelta(milliseconds=1) for gap in gaps)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("unique", [None, Unique("key")])
def test_requeued_jobs_become_due_at_even_distances(
    engine: sa.Engine, kind: str, unique: Unique | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sqlaqueue.web.data.bulk._BATCH", 3)
    model = new_queue(engine, kind, unique=unique)
    add(engine, *(model(id=number, key=f"k{number}") for number in range(1, 11)))
    fail_jobs(engine, model, 10, error="E: 1")
    chosen = by_filter(wanted(model, ("state", "failed"), ("message", "…")), "requeue")
    with Session(engine) as session, sent_statements(engine) as sent:
        done = act_on(session, "requeue", chosen, spread=timedelta(minutes=10))
    assert done.changed == 10
    times = sorted(due_times(engine, model))
    assert len(times) == 10
    assert spread_evenly(times, timedelta(minutes=1))
    # One statement for each batch of jobs, whatever the number of its jobs.
    assert sum("sqlaqueue_places" in statement for statement, _ in sent) == 4
    with Session(engine) as session:
        assert len(session.scalars(claim(model, 10)).all()) == 1


async def test_a_requeue_is_spread_over_what_the_form_says(
    engine: sa.Engine, queues: Queues, client_of: Any, audit: Any
) -> None:
    fail_emails(engine, queues, "E: 1", "E: 2", "Other: x")
    async with client_of() as browser:
        page = await browser.get("/failures")
        preview = await browser.get(str(page.url.join(links(page.text, "Requeue…")[0])))
        assert '<option value="10min">one after the other within 10 minutes</option>' in preview.text
        fields = dict(hidden(preview.text)) | {"spread": "10min"}
        await browser.post("/queues/email/actions/requeue", data=fields)
    assert spread_evenly(due_times(engine, queues.Email), timedelta(minutes=5))
    assert "spread='10min'" in audit()[-1]


async def test_selected_jobs_are_spread_as_well(engine: sa.Engine, queues: Queues, client_of: Any) -> None:
    fail_emails(engine, queues, "E: 1", "E: 2", "E: 3")
    await act(client_of(), "requeue", key=["1", "3"], spread="1h")
    assert spread_evenly(due_times(engine, queues.Email), timedelta(minutes=30))


@pytest.mark.parametrize(
    ("action", "spread", "redact", "problem"),
    [
        ("requeue", "1y", [], "spread: use one of 1min, 10min, 1h, 6h, 1d"),
        ("purge", "1h", [], "spread: only a requeue is spread"),
        ("requeue", "1h", ["run_at"], "spread: this queue has no time that could be set"),
    ],
)
async def test_a_spread_that_cannot_be_is_refused(
    engine: sa.Engine, queues: Queues, client_of: Any, action: str, spread: str, redact: list[str], problem: str
) -> None:
    fail_emails(engine, queues, "E: 1")
    response = await act(client_of(redact=redact), action, key="1", spread=spread)
    assert response.status_code == 400
    assert problem in response.text
    assert states(engine, queues.Email) == {"1": "failed"}
    async with client_of(redact=redact) as browser:
        text = (await browser.get(f"/queues/email/confirm?action={action}&key=1")).text
    assert ('name="spread"' in text) == (action == "requeue" and not redact)


async def test_a_page_that_reads_a_part_of_the_failures_does_not_say_that_there_are_none(
    client_of: Any, queues: Queues, engine: sa.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Jobs may have failed before the attempt history was there."""
    add(engine, queues.Email(recipient="x"))
    fail_jobs(engine, queues.Email, 1, error="ValueError: x")
    no_table_is_small(monkeypatch)
    async with client_of() as browser:
        page = (await browser.get("/queues/email")).text
        assert "No attempt has failed within the last day" in page
        assert 'href="../queues/email/jobs?state=failed">The list of failed jobs</a>' in page
        page += (await browser.get("/failures")).text
        assert "No failures were found" in page
        assert "No failed jobs" not in page
