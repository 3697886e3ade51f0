"""Undo of actions: jobs get back what they had, unless they have run or were changed since; and the log of actions."""

import re
import subprocess
import sys
import uuid
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, date, datetime
from html import unescape
from typing import Any
from urllib.parse import parse_qs

import pytest
import sqlalchemy as sa
from markupsafe import escape
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from sqlaqueue import Consumer, QueueConfig, QueueMixin, Schedule, Unique, is_paused, pause, resume
from sqlaqueue.admin import QueueAdmin
from sqlaqueue.admin.state import pauses
from sqlaqueue.exc import ConfigurationError, StatementError
from sqlaqueue.mapping.mixin import spec_of
from sqlaqueue.schedules.schedule import schedule_groups
from sqlaqueue.schedules.store import declare
from sqlaqueue.web import Access, AuditMixin, Dashboard
from sqlaqueue.web.data import bulk
from sqlaqueue.web.data.bulk import BulkAction, Done
from sqlaqueue.web.data.records import MOST_CHANGES, MOST_RECORDS, Memory, Record, insert_record
from sqlaqueue.web.data.undo import Changes, Undone, look, roles_of, undo, why_not
from tests.models import execute, sent_statements
from tests.web.conftest import client, follow, hidden, post
from tests.web.jobs import KINDS, XSS, add, claimed, columns, created, fail_jobs, new_queue, states
from tests.web.models import Queues, new_base
from tests.web.test_bulk import do, of_keys
from tests.web.test_workers import heartbeat

UNDONE = ("update_status", "batch_select", "delete_returning")


def rows(engine: sa.Engine, model: Any) -> Any:
    table = spec_of(model).table
    with engine.connect() as connection:
        return connection.execute(sa.select(table).order_by(*spec_of(model).keys)).all()


def changes_of(model: Any, done: Done) -> Changes:
    made = Changes(roles_of(spec_of(model)), done.changes)
    assert Changes.of_json(made.as_json()) == Changes(made.roles, [*made.jobs])
    return made


def take_back(engine: sa.Engine, model: Any, done: Done) -> Undone:
    changes = changes_of(model, done)
    with Session(engine) as session:
        expected = look(session, columns(model), changes)
        session.rollback()
        found = undo(session, columns(model), changes)
    assert (sorted(found.left), sorted(found.gone)) == (sorted(expected.left), sorted(expected.gone))
    assert sorted(found.jobs + found.refused) == sorted(expected.jobs)
    return found


def run_all(engine: sa.Engine, model: Any) -> list[Any]:
    ran: list[Any] = []
    consumer = Consumer(model, lambda _, job: ran.append(job.id), lambda: Session(engine))
    consumer.drain()
    return ran


@pytest.mark.parametrize("kind", UNDONE)
@pytest.mark.parametrize("action", ["requeue", "cancel"])
def test_jobs_get_back_what_they_had(engine: sa.Engine, kind: str, action: BulkAction) -> None:
    model = new_queue(engine, kind)
    add(engine, *(model(id=number, priority=number) for number in range(1, 6)))
    if action == "requeue":
        fail_jobs(engine, model, 3, error="ValueError: x")
    else:
        execute(engine, "UPDATE job SET run_at = run_at + id * interval '1 hour', attempts = id")
    before = rows(engine, model)
    done = do(engine, action, of_keys(model, 1, 2, 3, 4))
    assert done.changed == (3 if action == "requeue" else 4)
    assert len(done.changes) == done.changed
    assert rows(engine, model) != before
    found = take_back(engine, model, done)
    assert (len(found.jobs), found.left, found.gone, found.refused) == (done.changed, [], [], [])
    assert rows(engine, model) == before
    # Once more does nothing.
    again = take_back(engine, model, done)
    assert (again.jobs, len(again.back), again.left) == ([], done.changed, [])
    if action == "requeue":
        # What is finished again is claimed by nobody, and what is pending again is.
        assert sorted(run_all(engine, model)) == [4, 5]
    else:
        execute(engine, "UPDATE job SET run_at = run_at - interval '1 day'")
        assert sorted(run_all(engine, model)) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("kind", UNDONE)
def test_jobs_that_have_run_or_changed_since_are_left_and_named(engine: sa.Engine, kind: str) -> None:
    model = new_queue(engine, kind)
    add(engine, *(model(id=number) for number in range(1, 7)))
    fail_jobs(engine, model, 6)
    done = do(engine, "requeue", of_keys(model, *range(1, 7)))
    # Three have run, one was changed, and one deleted.
    execute(engine, "UPDATE job SET run_at = now() + interval '1 hour' WHERE id > 3")
    assert sorted(run_all(engine, model)) == [1, 2, 3]
    execute(engine, "UPDATE job SET run_at = now() + interval '2 hours' WHERE id = 4")
    execute(engine, "DELETE FROM job WHERE id = 5")
    before = rows(engine, model)
    found = take_back(engine, model, done)
    # The time of 6 was changed as well.
    assert (found.jobs, sorted(found.left), found.gone) == ([], ["1", "2", "3", "4", "6"], ["5"])
    assert rows(engine, model) == before


@pytest.mark.parametrize("kind", UNDONE)
def test_jobs_that_a_worker_runs_are_left(engine: sa.Engine, kind: str) -> None:
    model = new_queue(engine, kind)
    add(engine, *(model(id=number) for number in range(1, 4)))
    fail_jobs(engine, model, 3)
    done = do(engine, "requeue", of_keys(model, 1, 2, 3))
    with claimed(engine, model, 2) as jobs, Session(engine) as session:
        running = {str(job.id) for job in jobs}
        found = undo(session, columns(model), changes_of(model, done))
        assert (set(found.left), len(found.jobs)) == (running, 1)
    # What ran has come back by the end of the claim, or of its lease.
    assert sorted(states(engine, model).values()).count("failed") == 1


def test_an_attempt_that_was_released_is_none(engine: sa.Engine) -> None:
    """A job that is as the action left it, whatever has happened between, is given back."""
    model = new_queue(engine)
    add(engine, model(id=1))
    fail_jobs(engine, model, 1)
    done = do(engine, "requeue", of_keys(model, 1))
    execute(engine, "UPDATE job SET status = 'processing', attempts = 1")
    execute(engine, "UPDATE job SET status = 'pending', attempts = 0")
    assert take_back(engine, model, done).jobs == ["1"]


@pytest.mark.parametrize("kind", UNDONE)
def test_a_job_whose_duplicate_is_there_by_now_is_named(engine: sa.Engine, kind: str) -> None:
    model = new_queue(engine, kind, unique=Unique("key"))
    add(engine, model(id=1, key="a"), model(id=2, key="b"), model(id=3, key="c"))
    done = do(engine, "cancel", of_keys(model, 1, 2, 3))
    assert done.changed == 3
    add(engine, model(id=4, key="b"))
    found = take_back(engine, model, done)
    assert (sorted(found.jobs), found.refused) == (["1", "3"], ["2"])
    assert states(engine, model) == {"1": "pending", "2": "cancelled", "3": "pending", "4": "pending"}


def test_only_what_the_action_has_changed_is_recorded(engine: sa.Engine) -> None:
    model = new_queue(engine)
    add(engine, *(model(id=number) for number in range(1, 5)))
    fail_jobs(engine, model, 1)
    with claimed(engine, model, 1) as jobs:
        # One has failed, one runs, and is asked to stop.
        done = do(engine, "cancel", of_keys(model, 1, 2, 3, 4))
        assert (done.changed, done.asked) == (2, 1)
        assert str(jobs[0].id) not in {each.key for each in done.changes}
    assert len(done.changes) == 2


def test_large_actions_are_undone_in_batches(engine: sa.Engine) -> None:
    model = new_queue(engine)
    add(engine, *(model(id=number) for number in range(1, 1202)))
    execute(engine, "UPDATE job SET status = 'failed', attempts = id, finished_at = now() - id * interval '1 min'")
    before = rows(engine, model)
    done = do(engine, "requeue", of_keys(model, *range(1, 1001)))
    done.changes += do(engine, "requeue", of_keys(model, *range(1001, 1202))).changes
    assert len(take_back(engine, model, done).jobs) == 1201
    assert rows(engine, model) == before


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in UNDONE])
def test_what_cannot_be_undone_says_why(engine: sa.Engine, kind: str) -> None:
    model = new_queue(engine, kind)
    assert why_not(spec_of(model)).endswith(".")
    add(engine, model(id=1))
    done = do(engine, "cancel", of_keys(model, 1))
    assert (done.changed, done.changes) == (1, [])


def test_keys_of_several_columns_and_types(engine: sa.Engine) -> None:
    class Odd(QueueMixin, new_base()):
        __tablename__ = "odd"
        __queue__ = QueueConfig()
        day: Mapped[date] = mapped_column(primary_key=True)
        name: Mapped[str] = mapped_column(primary_key=True)
        reference: Mapped[uuid.UUID] = mapped_column(primary_key=True)

    created(engine, Odd)
    add(engine, *(Odd(day=date(2030, 1, n), name='a, "b"', reference=uuid.UUID(int=n)) for n in (1, 2)))
    before = rows(engine, Odd)
    keys = [f'2030-01-0{n},"a, ""b""",{uuid.UUID(int=n)}' for n in (1, 2)]
    done = do(engine, "cancel", of_keys(Odd, *keys))
    assert done.changed == 2
    assert sorted(take_back(engine, Odd, done).jobs) == keys
    assert rows(engine, Odd) == before


# -- the pages ---------------------------------------------------------------------------------------------------------


async def requeued(browser: Any, *keys: int) -> Any:
    """Requeue jobs, and return the page to which the link after it leads."""
    answer = await browser.post("/queues/email/actions/requeue", data={"key": list(map(str, keys))})
    page = await follow(browser, answer)
    (link,) = re.findall(
        r'<p class="notice"[^>]*>[^<]*<a href="([^"]*)">Show what was changed, or undo it</a>', page.text
    )
    return await browser.get(str(page.url.join(unescape(link))))


@pytest.fixture
def audit_model(queues: Queues, engine: sa.Engine) -> Iterator[Any]:
    class Base(DeclarativeBase):
        metadata = queues.metadata

    class Action(AuditMixin, Base):
        __tablename__ = "queue_action"

    queues.metadata.create_all(engine)
    yield Action
    queues.metadata.remove(Action.__table__)


@pytest.mark.parametrize("is_kept", [False, True], ids=["memory", "table"])
async def test_an_action_leads_to_its_jobs_and_is_undone(
    engine: sa.Engine,
    queues: Queues,
    client_of: Any,
    audit: Any,
    audit_model: Any,
    is_kept: bool,  # noqa: FBT001 - a parameter
) -> None:
    add(engine, *(queues.Email(recipient=f"to {XSS}", subject="the secret") for _ in range(4)))
    fail_jobs(engine, queues.Email, 4)
    before = rows(engine, queues.Email)
    options = {"audit": audit_model} if is_kept else {}
    async with client_of(redact=["subject"], **options) as browser:
        page = await requeued(browser, 1, 2, 3, 4)
        assert "the secret" not in page.text
        assert XSS not in page.text
        execute(engine, "UPDATE email SET attempts = 1 WHERE id = 4; DELETE FROM email WHERE id = 3")
        page = await browser.get(str(page.url))
        text = re.sub(r"<[^>]*>|\s+", " ", page.text)
        assert re.search(r"2 jobs\s+still are as this action left them", text)
        assert re.search(r"1 job\s+has run, or was changed, since, and will be left as it is:\s+4", text)
        assert re.search(r"1 job\s+does not exist any more: 3", text)
        answer = await browser.post("/queues/email/actions/undo", data=dict(hidden(page.text)))
        page = await follow(browser, answer)
        assert "2 jobs are as they were before." in page.text
        assert "1 job was left as it is: it has run, or was changed, since." in page.text
        assert "Undo it for" not in page.text
        assert "Undone" in page.text
    assert [row for row in rows(engine, queues.Email) if row.id < 3] == before[:2]
    done, undone = audit()
    assert "action=requeue" in done
    assert re.search(
        r"action=undo queue='email' count=2 keys=\['1', '2'\] of='requeue' of_id=\d+ left_alone=1 gone=1", undone
    )


@pytest.mark.parametrize("path", ["done?id={}", "actions/undo"])
async def test_what_was_done_is_shown_and_undone_only_with_the_right(
    engine: sa.Engine, queues: Queues, sessions: Any, audit: Any, path: str
) -> None:
    add(engine, queues.Email(recipient="a"), queues.Invoice())
    fail_jobs(engine, queues.Email, 1)
    rights = {"all": True, "others": {"email": ["cancel", "edit"]}, "none": False, "elsewhere": {"invoice": True}}

    def access(request: Any) -> Access:
        user = request.headers["x-user"]
        return Access(read=["invoice"] if user == "elsewhere" else True, act=rights[user], user=user)

    async with client(Dashboard(queues.all, sessions, access=access)) as browser:
        browser.headers["X-User"] = "all"
        page = await requeued(browser, 1)
        (number,) = (value for name, value in hidden(page.text) if name == "id")
        found = {}
        for user in rights:
            browser.headers["X-User"] = user
            if path == "actions/undo":
                found[user] = (await browser.post("/queues/email/actions/undo", data={"id": number})).status_code
            else:
                answer = await browser.get(f"/queues/email/{path.format(number)}")
                found[user] = answer.status_code
                if user == "others":
                    assert "You may not undo it: that needs the right requeue." in answer.text
                    assert "Undo it for" not in answer.text
            # The link after an action is no way around it.
            linked = await browser.get(f"/queues/email?notice=requeued:1&notice=undoable:{number}")
            assert ("Show what was changed" in linked.text) is (user in {"all", "others"})
        browser.headers["X-User"] = "all"
        # An action belongs to its queue.
        assert (await browser.get(f"/queues/invoice/done?id={number}")).status_code == 404
        assert (await browser.post("/queues/invoice/actions/undo", data={"id": number})).status_code == 404
        elsewhere = {"Origin": "https://evil.example", "Sec-Fetch-Site": "cross-site"}
        answer = await browser.post("/queues/email/actions/undo", data={"id": number}, headers=elsewhere)
        assert answer.status_code == 403
    if path == "actions/undo":
        assert found == {"all": 303, "others": 403, "none": 403, "elsewhere": 404}
        assert states(engine, queues.Email) == {"1": "failed"}
    else:
        assert found == {"all": 200, "others": 200, "none": 403, "elsewhere": 404}
        assert states(engine, queues.Email) == {"1": "pending"}


async def test_actions_that_are_final_say_so(engine: sa.Engine, queues: Queues, client_of: Any) -> None:
    add(engine, queues.Email(recipient="a"), queues.Email(recipient="b"))
    fail_jobs(engine, queues.Email, 2)
    async with client_of() as browser:
        answer = await browser.post("/queues/email/actions/purge", data={"key": "1"})
        page = await follow(browser, answer)
        (link,) = re.findall(r'<a href="([^"]*)">Show what was done</a>', page.text)
        page = await browser.get(str(page.url.join(unescape(link))))
        assert "Deleted jobs cannot be brought back." in page.text
        number = parse_qs(page.url.query.decode())["id"][0]
        answer = await browser.post("/queues/email/actions/undo", data={"id": number})
        assert answer.status_code == 400
        # Nothing was changed, so there is nothing to show.
        page = await follow(browser, await browser.post("/queues/email/actions/cancel", data={"key": "2"}))
        assert "Show what" not in page.text
        for wrong in ("", "0", "x", "9" * 30, "-1"):
            assert (await browser.get(f"/queues/email/done?id={wrong}")).status_code == 404


async def test_the_audit_lists_who_did_what(engine: sa.Engine, queues: Queues, sessions: Any, audit_model: Any) -> None:
    add(engine, *(queues.Email(recipient="a") for _ in range(3)), queues.Invoice())
    fail_jobs(engine, queues.Email, 3)

    def access(request: Any) -> Access:
        name = request.headers["x-user"]
        return Access(read=["email"] if name == "grace" else True, act=name != "eve", user=f"{name} {XSS}")

    made = Dashboard(queues.all, sessions, access=access, audit=audit_model)
    async with client(made) as browser:
        browser.headers["X-User"] = "ada"
        await browser.post("/queues/email/actions/requeue", data={"key": ["1", "2"]})
        await browser.post("/queues/email/actions/pause", data={})
        await browser.post("/queues/invoice/actions/cancel", data={"key": "1"})
        page = (await browser.get("/audit")).text
        assert XSS not in page
        found = re.findall(
            r'<th scope="row"><a href="[^"]*">(\w+)</a>.*?data-label="Queue"><a [^>]*>(\w+)</a>', page, re.DOTALL
        )
        assert found == [("cancel", "invoice"), ("pause", "email"), ("requeue", "email")]
        assert page.count("ada &lt;script") == 5, "three actions, the user, and the pause"
        assert 'aria-current="page">Audit</a>' in page
        # Those of queues that the user does not see are left out, and readers see none.
        browser.headers["X-User"] = "grace"
        page = (await browser.get("/audit")).text
        assert ("invoice" in page, page.count('data-label="User"')) == (False, 2)
        browser.headers["X-User"] = "eve"
        assert (await browser.get("/audit")).status_code == 403
        assert ">Audit</a>" not in (await browser.get("/")).text


async def test_the_audit_has_pages(engine: sa.Engine, queues: Queues, client_of: Any, audit_model: Any) -> None:
    with Session(engine) as session:
        for number in range(1, 121):
            record = Record(
                at=datetime.now(UTC), user="ada", action="pause", queue="email", facts={"reason": f"no {number}."}
            )
            assert insert_record(session, audit_model, record) == number
    seen: list[str] = []
    async with client_of(audit=audit_model) as browser:
        path: str | None = "/audit"
        while path is not None:
            page = await browser.get(path)
            seen += re.findall(r"no (\d+)\.", page.text)
            older = re.search(r'rel="next" href="([^"]*)"', page.text)
            path = None if older is None else str(page.url.join(unescape(older[1])))
        assert seen == [str(number) for number in range(120, 0, -1)]
        assert (await browser.get("/audit?before=x")).status_code == 400


async def test_without_a_table_the_page_says_what_to_configure(client_of: Any) -> None:
    async with client_of() as browser:
        assert "class Action(AuditMixin, Base)" in (await browser.get("/audit")).text
        assert ">Audit</a>" not in (await browser.get("/")).text


async def test_what_was_done_stays_without_the_table(
    engine: sa.Engine, queues: Queues, client_of: Any, audit: Any, audit_model: Any, caplog: pytest.LogCaptureFixture
) -> None:
    execute(engine, "DROP TABLE queue_action")
    add(engine, queues.Email(recipient="a"))
    async with client_of(audit=audit_model) as browser:
        page = await follow(browser, await browser.post("/queues/email/actions/cancel", data={"key": "1"}))
        assert "1 job was cancelled." in page.text
        text = "This could not be written to the table of the audit"
        assert f'<p class="notice notice--warning" role="status">{text}' in page.text
        assert "Show what" not in page.text
        assert (await browser.get("/audit")).status_code == 503
    assert states(engine, queues.Email) == {"1": "cancelled"}
    assert len(audit()) == 1
    told = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    assert [each.partition(":")[0] for each in told] == [
        "the dashboard cannot store what was done in the table of Action",
        "the dashboard cannot show a page",
    ]
    # Errors of the database have lines and repeat values, so that one could be read as another record.
    assert not any("\n" in each for each in told)


async def test_what_is_not_in_the_table_is_said_after_each_action(
    engine: sa.Engine, queues: Queues, client_of: Any, audit_model: Any, caplog: pytest.LogCaptureFixture
) -> None:
    heartbeat(engine)
    add(engine, queues.Email(recipient="a"))
    schedule = {"queue": "email", "schedule": "new", "every": "60", "timezone": "UTC", "values": '{"recipient": "a"}'}
    nightly = Schedule("nightly", queues.Email, every=60, values={"recipient": "a"})
    queues.metadata.create_all(engine)
    with Session(engine) as session:
        for group in schedule_groups([nightly], "test"):
            declare(session, group)
        session.commit()
    execute(engine, "DROP TABLE queue_action")
    actions: list[tuple[str, dict[str, str]]] = [
        ("queues/email/actions/rescue", {}),
        ("queues/email/actions/pause", {}),
        ("queues/email/actions/resume", {}),
        ("queues/email/actions/enqueue", {"key": "1"}),
        ("queues/email/actions/requeue", {"key": "1"}),
        ("workers/quiet", {"queue": "email", "id": "email-web:1"}),
        ("schedules/save", schedule),
        ("schedules/run", {"queue": "email", "schedule": "nightly"}),
    ]
    async with client_of(audit=audit_model) as browser:
        for path, fields in actions:
            answer = await browser.post(f"/{path}", data=fields)
            assert answer.headers["location"].count("notice=not_stored%3A1") == 1, path
    assert caplog.text.count("cannot store what was done in the table of Action") == len(actions)


async def test_what_was_undone_stays_without_a_note_of_it(
    engine: sa.Engine, queues: Queues, client_of: Any, audit_model: Any
) -> None:
    """The role of the dashboard may have no right to update the table."""
    add(engine, queues.Email(recipient="a"))
    execute(
        engine,
        "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'no'; END $$; "
        "CREATE TRIGGER refuse BEFORE UPDATE ON queue_action FOR EACH ROW EXECUTE FUNCTION refuse()",
    )
    async with client_of(audit=audit_model) as browser:
        for action, fields in (("cancel", {"key": "1"}), ("pause", {})):
            answer = await browser.post(f"/queues/email/actions/{action}", data=fields)
            (number,) = re.findall(r"undoable%3A(\d+)", answer.headers["location"])
            page = await follow(browser, await browser.post("/queues/email/actions/undo", data={"id": number}))
            assert page.status_code == 200
            assert "This could not be written to the table of the audit" in page.text
    assert states(engine, queues.Email) == {"1": "pending"}
    with Session(engine) as session:
        assert not session.scalar(is_paused(queues.Email))


def test_the_class_of_the_audit_is_checked(queues: Queues, sessions: Any) -> None:
    for wrong in (queues.Email, AuditMixin, "queue_action", 5):
        with pytest.raises(ConfigurationError, match=r"Dashboard\(audit=.*give a mapped class that inh"):
            Dashboard(queues.all, sessions, access=lambda _: None, audit=wrong)  # type: ignore[arg-type]  # as above


def test_memory_is_bounded() -> None:
    memory = Memory()
    one = Record(at=datetime.now(UTC), user="", action="requeue", queue="email")
    numbers = [memory.add(one) for _ in range(MOST_RECORDS + 5)]
    assert [memory.get(number, "email") is None for number in numbers] == [True] * 5 + [False] * MOST_RECORDS
    assert memory.get(numbers[-1], "invoice") is None
    large = replace(one, changes={"roles": [], "jobs": [[]] * (MOST_CHANGES // 2)})
    first, second, third = (memory.add(large) for _ in range(3))
    assert (memory.get(first, "email"), memory.get(numbers[-1], "email")) == (None, None)
    assert memory.get(second, "email") is not None
    # The last one is kept, however large it is.
    last = memory.add(replace(large, changes={"roles": [], "jobs": [[]] * (MOST_CHANGES * 2)}))
    assert memory.get(last, "email") is not None
    assert memory.get(third, "email") is None


def test_workers_load_the_class_of_the_audit_without_the_extra() -> None:
    program = (
        "import sys; sys.modules['jinja2'] = sys.modules['starlette'] = None\n"
        "from sqlaqueue.web import AuditMixin\n"
        "try:\n    from sqlaqueue.web import Dashboard\n"
        "except ModuleNotFoundError:\n    print('only', AuditMixin.__name__)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout == "only AuditMixin\n", done.stderr


# -- pauses ------------------------------------------------------------------------------------------------------------


def pause_of(engine: sa.Engine, model: Any) -> Any:
    with Session(engine) as session:
        return QueueAdmin(session, model).pause_info()


async def test_a_pause_has_a_reason_and_an_author_on_every_page(
    engine: sa.Engine, queues: Queues, client_of: Any, audit: Any
) -> None:
    add(engine, queues.Email(recipient="a"))
    async with client_of(access=lambda _: Access(read=True, act=True, user=f"ada {XSS}")) as browser:
        page = (await browser.get("/queues/email/pause")).text
        assert 'name="reason"' in page
        answer = await browser.post("/queues/email/actions/pause", data={"reason": f"  moved,\n {XSS}  "})
        assert answer.status_code == 303
        jobs = ("queues/email/jobs", "queues/email/job?key=1")
        for path in ("", "queues/invoice", *jobs, "schedules", "workers", "health"):
            page = (await browser.get(f"/{path}")).text
            (shown,) = re.findall(r'<section id="pauses"[^>]*>(.*?)</section>', page, re.DOTALL)
            assert XSS not in page, path
            assert f"moved, {escape(XSS)}" in shown, path
            assert f"by {escape('ada ' + XSS)[:50]}"[:12] in shown, path
        answer = await browser.post("/queues/email/actions/resume")
        assert '<p class="pause">' not in (await browser.get("/schedules")).text
    assert pause_of(engine, queues.Email) is None
    assert f"reason={f'moved, {XSS}'!r}" in audit()[0]


async def test_only_pauses_of_queues_that_the_user_sees_are_shown(
    engine: sa.Engine, queues: Queues, client_of: Any
) -> None:
    with Session(engine) as session:
        QueueAdmin(session, queues.Email).pause(reason="the secret plan")
        QueueAdmin(session, queues.Invoice).pause()
    page = (await client_of(access=lambda _: Access(read=["invoice"])).get("/")).text
    (shown,) = re.findall(r'<section id="pauses"[^>]*>(.*?)</section>', page, re.DOTALL)
    assert "invoice" in shown
    assert "the secret plan" not in page
    assert "email" not in page


async def test_a_reason_that_is_too_long_is_told_at_the_form(engine: sa.Engine, queues: Queues, client_of: Any) -> None:
    for wrong in ("x" * 201, "a\u202eb"):
        answer = await post(client_of(), "/queues/email/actions/pause", {"reason": wrong})
        assert answer.status_code == 422
        assert "Use at most 200 characters" in answer.text
    assert pause_of(engine, queues.Email) is None
    access = Access(read=True, act={"email": ["requeue"]})
    assert (await client_of(access=lambda _: access).get("/queues/email/pause")).status_code == 403


async def test_a_pause_is_undone_unless_it_is_another_one_by_now(
    engine: sa.Engine, queues: Queues, client_of: Any, audit: Any
) -> None:
    async with client_of() as browser:

        async def paused() -> Any:
            page = await follow(browser, await browser.post("/queues/email/actions/pause", data={"reason": "x"}))
            link = re.findall(r'<a href="([^"]*)">Show what was changed, or undo it<', page.text)
            return await browser.get(str(page.url.join(unescape(link[0])))) if link else None

        page = await paused()
        assert "Undo it: resume email" in page.text
        # One that was there already was not changed, so there is nothing to undo.
        assert await paused() is None
        fields = dict(hidden(page.text))
        page = await follow(browser, await browser.post("/queues/email/actions/undo", data=fields))
        assert "The queue is resumed" in page.text
        assert pause_of(engine, queues.Email) is None
        page = await paused()
        with Session(engine) as session:
            QueueAdmin(session, queues.Email).resume()
            QueueAdmin(session, queues.Email).pause(reason="another")
        # The pages tell the pause at most ten seconds later, the action at once.
        page = await browser.get(str(page.url))
        assert "was resumed since then" in page.text
        (number,) = parse_qs(page.url.query.decode())["id"]
        page = await follow(browser, await browser.post("/queues/email/actions/undo", data={"id": number}))
        assert "nothing was changed" in page.text
    assert pause_of(engine, queues.Email).reason == "another"
    assert [line.split()[1] for line in audit()] == ["action=pause", "action=pause", "action=undo", "action=pause"]


def test_reasons_of_pauses(engine: sa.Engine, queues: Queues) -> None:
    with Session(engine) as session:
        admin = QueueAdmin(session, queues.Email)
        admin.pause()
        assert (admin.pause_info().reason, admin.pause_info().author) == ("", "")
        # One without a reason gets one; after that the first stays.
        admin.pause(reason="first", author="ada")
        since = admin.pause_info().since
        admin.pause(reason="second", author="eve")
        assert vars(admin.pause_info()) == {"since": since, "reason": "first", "author": "ada"}
        # What an earlier pause has left says nothing about the next, even if that was resumed by SQL.
        session.execute(resume(queues.Email))
        session.commit()
        assert admin.pause_info() is None
        session.execute(pause(queues.Email))
        session.commit()
        assert admin.pause_info().reason == ""
        admin.pause(reason="third")
        assert (admin.pause_info().reason, admin.pause_info().author) == ("third", "")
        admin.resume()
        assert session.scalar(sa.text("SELECT count(*) FROM sqlaqueue_control")) == 0
        for wrong in ("x" * 201, "a\x1bb", None):
            with pytest.raises(StatementError, match=r"pause\(reason=.*at most 200 characters"):
                admin.pause(reason=wrong)
        with pytest.raises(StatementError, match=r"pause\(author=.*at most 50 characters"):
            admin.pause(author="x" * 51)
        assert not admin.is_paused()


def test_pauses_of_queues_in_one_table_are_read_by_one_statement(engine: sa.Engine, queues: Queues) -> None:
    specs = [spec_of(model) for model in queues.all]
    with Session(engine) as session:
        QueueAdmin(session, queues.Email).pause(reason="a")
        QueueAdmin(session, queues.Picture).pause()
        with sent_statements(engine) as sent:
            found = pauses(session, specs)
    assert {name: each.reason for name, each in found.items()} == {"email": "a", "picture": ""}
    assert len(sent) == 1


# -- new values for many jobs ------------------------------------------------------------------------------------------


async def changed(browser: Any, *pairs: tuple[str, Any], queue: str = "email", **values: str) -> Any:
    """Preview a change of many jobs, and carry it out with these values."""
    page = await browser.get(f"/queues/{queue}/confirm", params=[("action", "change"), *pairs])
    assert page.status_code == 200, page.text
    form = page.text[page.text.index('actions/change"') :]
    fields: dict[str, Any] = {}
    for name, value in hidden(form):
        fields.setdefault(name, []).append(value)
    return await browser.post(
        f"/queues/{queue}/actions/change", data=fields | {f"v.{name}": text for name, text in values.items()}
    )


@pytest.mark.parametrize("pairs", [[("key", "1"), ("key", "2"), ("key", "4")], [("all", "1"), ("f.recipient", "a")]])
async def test_values_of_many_jobs_are_changed_and_given_back(
    engine: sa.Engine, queues: Queues, client_of: Any, audit: Any, pairs: Any
) -> None:
    add(engine, *(queues.Email(recipient="a" if n in {1, 2, 4} else "b", max_attempts=n) for n in range(1, 5)))
    execute(engine, "UPDATE email SET status = 'failed', finished_at = now() WHERE id = 4")
    before = rows(engine, queues.Email)
    async with client_of() as browser:
        page = await browser.get("/queues/email/jobs?state=pending")
        assert page.text.count('value="change"') == 2
        answer = await changed(browser, *pairs, priority="7", run_at="2031-01-01T00:00Z", max_attempts=" ")
        page = await follow(browser, answer)
        assert "2 jobs were changed." in page.text
        found = execute(engine, "SELECT priority, to_char(run_at at time zone 'UTC', 'YYYY') FROM email WHERE id < 3")
        now = {row.id: (row.priority, row.max_attempts, row.run_at.year) for row in rows(engine, queues.Email)}
        assert (now[1], now[2]) == ((7, 1, 2031), (7, 2, 2031))
        assert [row for row in rows(engine, queues.Email) if row.id > 2] == before[2:], found
        link = re.findall(r'<a href="([^"]*)">Show what was changed, or undo it<', page.text)
        page = await browser.get(str(page.url.join(unescape(link[0]))))
        await browser.post("/queues/email/actions/undo", data=dict(hidden(page.text)))
        assert rows(engine, queues.Email) == before
        # A time may be that of the database.
        await changed(browser, ("key", "1"), run_at="now")
        assert execute(engine, "SELECT run_at > now() - interval '1 hour' AND run_at <= now() FROM email WHERE id = 1")
    assert "values={'priority': '7', 'run_at': '2031-01-01T00:00Z'}" in audit()[0]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "existing_messages"])
async def test_changed_jobs_are_claimed_by_their_new_values(engine: sa.Engine, client_of: Any, kind: str) -> None:
    model = new_queue(engine, kind)
    add(engine, *(model(id=number) for number in range(1, 4)))
    async with client_of(model) as browser:
        answer = await changed(browser, ("key", "3"), queue=spec_of(model).name, priority="-5")
        assert "changed%3A1" in answer.headers["location"]
    ran = run_all(engine, model)
    assert sorted(ran) == [1, 2, 3]
    assert ran[0] == 3


async def test_values_that_are_wrong_are_told_beside_their_fields(
    engine: sa.Engine, queues: Queues, client_of: Any, audit: Any
) -> None:
    add(engine, queues.Email(recipient="a"))
    before = rows(engine, queues.Email)
    async with client_of() as browser:
        for values, text in (
            ({"priority": "x"}, "Write an integer"),
            ({"priority": "9" * 12}, "Write an integer"),
            ({"run_at": "2030-01-01T00:00", "priority": XSS}, "Add the zone"),
            ({"run_at": "tomorrow"}, "Write a date and a time with its zone"),
            ({"priority": "", "max_attempts": "  "}, "Write at least one value."),
            ({}, "Write at least one value."),
        ):
            answer = await changed(browser, ("key", "1"), **values)
            assert answer.status_code == 422, values
            assert text in answer.text
            assert XSS not in answer.text
            # What was typed is there, and so is the selection.
            assert all(f'value="{escape(each)}"' in answer.text for each in values.values())
            assert ("key", "1") in hidden(answer.text)
        for wrong in ("recipient", "status", "attempts", "nothing"):
            assert (await changed(browser, ("key", "1"), **{wrong: "1"})).status_code == 400
    assert rows(engine, queues.Email) == before
    assert audit() == []


async def test_a_change_needs_the_right_to_edit_and_columns_that_are_shown(
    engine: sa.Engine, queues: Queues, client_of: Any
) -> None:
    add(engine, queues.Email(recipient="a", priority=77))
    for access, status in ((Access(read=True, act={"email": ["requeue", "cancel"]}), 403), (Access(read=True), 403)):
        async with client_of(access=lambda _, access=access: access) as browser:
            assert (await browser.get("/queues/email/confirm?action=change&key=1")).status_code == status
            fields = {"key": "1", "v.priority": "1"}
            assert (await browser.post("/queues/email/actions/change", data=fields)).status_code == status
            assert 'value="change"' not in (await browser.get("/queues/email/jobs")).text
    elsewhere = {"Origin": "https://evil.example", "Sec-Fetch-Site": "cross-site"}
    assert (await post(client_of(), "/queues/email/actions/change", fields, headers=elsewhere)).status_code == 403
    async with client_of(redact=["priority"]) as browser:
        page = (await browser.get("/queues/email/confirm?action=change&key=1")).text
        assert 'name="v.priority"' not in page
        assert 'name="v.run_at"' in page
        assert (await browser.post("/queues/email/actions/change", data=fields)).status_code == 400
    async with client_of(redact=["priority", "run_at", "max_attempts"]) as browser:
        assert 'value="change"' not in (await browser.get("/queues/email/jobs")).text
    assert execute(engine, "SELECT priority FROM email") == 77


@pytest.mark.parametrize("kind", UNDONE)
def test_jobs_that_run_or_that_the_database_refuses_keep_their_values(engine: sa.Engine, kind: str) -> None:
    model = new_queue(engine, kind)
    add(engine, *(model(id=number) for number in range(1, 6)))
    execute(engine, "ALTER TABLE job ADD CONSTRAINT no_five CHECK (id <> 5 OR priority < 9)")
    values, errors = bulk.new_values(columns(model), {"priority": "9"})
    assert errors == {}
    with claimed(engine, model, 1) as jobs:
        with Session(engine) as session:
            done = bulk.act(session, "change", of_keys(model, *range(1, 6)), values=values)
        running = jobs[0].id
        assert (done.changed, done.left + done.unchanged) == (3, 2)
        assert "refuses to change job 5" in done.problem
        assert len(done.changes) == 3
    found = {row.id: row.priority for row in rows(engine, model)}
    assert found == {number: 0 if number in {running, 5} else 9 for number in range(1, 6)}
