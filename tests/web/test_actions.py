"""The actions: the right to each, what they do, the line of the audit, and what the user sees then."""

import re
import threading
from datetime import UTC, datetime, timedelta
from html import unescape
from typing import Any
from urllib.parse import urlsplit

import anyio
import pytest
import sqlalchemy as sa
from markupsafe import escape
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, sessionmaker

from sqlaqueue import Consumer, Schedule, Unique, claim
from sqlaqueue.admin import QueueAdmin, ScheduleAdmin, ScheduleInfo, changes
from sqlaqueue.web import Access
from sqlaqueue.web.data import bulk
from sqlaqueue.web.database import Database
from tests.models import execute
from tests.web.conftest import Fields, act, follow, hidden, post
from tests.web.jobs import KINDS, XSS, add, claimed, fail_jobs, new_queue, reading_role, states
from tests.web.models import Queues

ACTIONS = ("requeue", "cancel", "purge", "edit", "pause", "resume")
RIGHT = {action: action for action in ACTIONS} | {"resume": "pause"}


def values(text: str) -> dict[str, str]:
    """Return the fields of the form of an edit as a browser would send them."""
    found = dict(hidden(text))
    found |= {
        unescape(name): unescape(value)
        for name, value in re.findall(r'<input id="[^"]*" name="([^"]*)" value="([^"]*)"', text)
    }
    found |= {
        unescape(name): unescape(value)
        for name, value in re.findall(r'<textarea id="[^"]*" name="([^"]*)"[^>]*>\n([^<]*)</textarea>', text)
    }
    for name, options in re.findall(r'<select id="[^"]*" name="([^"]*)"[^>]*>(.*?)</select>', text, re.DOTALL):
        chosen = re.search(r'value="([^"]*)" selected', options)
        found[unescape(name)] = unescape(chosen[1]) if chosen else ""
    found |= dict.fromkeys(re.findall(r'type="checkbox" name="(null\.[^"]*)" value="1" checked', text), "1")
    return found


async def test_each_action_needs_its_right(engine: sa.Engine, queues: Queues, client_of: Any, audit: Any) -> None:
    add(engine, queues.Email(recipient="a"), queues.Email(recipient="a"))
    fail_jobs(engine, queues.Email)
    before = states(engine, queues.Email)
    for action in ACTIONS:
        others = [
            right for right in ("requeue", "cancel", "purge", "edit", "pause", "schedule") if right != RIGHT[action]
        ]
        access = Access(read=True, act={"email": others, "invoice": True})
        response = await act(client_of(access=lambda _, access=access: access), action, key=["1", "2"])
        assert response.status_code == 403, action
    for access in (Access(read=True), Access(read=["invoice"], act=True)):
        for action in ACTIONS:
            response = await act(client_of(access=lambda _, access=access: access), action, key=["1", "2"])
            assert response.status_code in {403, 404}
    assert (states(engine, queues.Email), audit()) == (before, [])
    with Session(engine) as session:
        assert not QueueAdmin(session, queues.Email).is_paused()


async def test_other_origins_do_nothing(engine: sa.Engine, queues: Queues, client_of: Any) -> None:
    add(engine, queues.Email(recipient="a"))
    for headers in ({"Origin": "https://evil.example", "Sec-Fetch-Site": "cross-site"}, {"Origin": "null"}):
        response = await post(client_of(), "/queues/email/actions/cancel", {"key": "1"}, headers=headers)
        assert response.status_code == 403
    for action in ACTIONS:
        async with client_of() as browser:
            assert (await browser.get(f"/queues/email/actions/{action}?key=1")).status_code in {404, 405}
    assert states(engine, queues.Email) == {"1": "pending"}


@pytest.mark.parametrize("kind", KINDS)
async def test_a_job_is_cancelled_requeued_and_deleted(
    engine: sa.Engine, kind: str, client_of: Any, audit: Any
) -> None:
    model = new_queue(engine, kind)
    add(engine, model(id=1))
    for action, state, notice in (
        ("cancel", "cancelled", "1 job was cancelled."),
        ("requeue", "pending", "1 job is pending again."),
    ):
        async with client_of(model) as browser:
            response = await browser.post(f"/queues/job/actions/{action}", data={"key": "1"})
            assert response.status_code == 303
            assert urlsplit(response.headers["location"]).path.endswith("/job")
            shown = await follow(browser, response)
        assert notice in shown.text
        assert states(engine, model) == {"1": state}
    fail_jobs(engine, model)
    response = await act(client_of(model), "purge", "job", key="1")
    assert urlsplit(response.headers["location"]).path.endswith("/jobs")
    assert states(engine, model) == {}
    assert audit() == [
        f"user='ada' action={action} queue='job' count=1 keys=['1']" for action in ("cancel", "requeue", "purge")
    ]


async def test_a_whole_list_is_changed_as_its_preview_says(
    engine: sa.Engine, queues: Queues, client_of: Any, audit: Any
) -> None:
    add(engine, *(queues.Email(recipient=each) for each in ("a", "b", "a")))
    fail_jobs(engine, queues.Email, 3)
    async with client_of() as browser:
        query = {"all": "1", "action": "requeue", "state": "failed", "f.recipient": "a"}
        shown = await browser.get("/queues/email/confirm", params=query)
        assert "Requeue 2 jobs?" in shown.text
        later = "INSERT INTO email (recipient, status, created_at) VALUES ('a', 'failed', now() + interval '1 s')"
        execute(engine, later)
        response = await browser.post("/queues/email/actions/requeue", data=dict(hidden(shown.text)))
        assert response.status_code == 303
        target = str(response.url.join(response.headers["location"]))
        listed = await browser.get(target)
        assert "2 jobs are pending again." in listed.text
        # A reload of the page asks for it again, and does not repeat the action.
        assert (await browser.get(target)).status_code == 200
    assert states(engine, queues.Email) == {"1": "pending", "2": "failed", "3": "pending", "4": "failed"}
    assert audit() == [
        "user='ada' action=requeue queue='email' count=2 keys=['3', '1'] filter='state=failed&f.recipient=a'"
    ]


@pytest.mark.parametrize("by", [{"key": ["1", "2"]}, {"all": "1", "state": "failed"}], ids=["keys", "filter"])
async def test_a_preview_shows_columns_and_errors_without_redacted_ones(
    engine: sa.Engine, queues: Queues, client_of: Any, by: Any
) -> None:
    add(engine, *(queues.Email(recipient=f"to {XSS}", subject="the secret") for _ in range(2)))
    fail_jobs(engine, queues.Email, 2, error="ValueError: the error")
    for redact in ([], ["subject", "last_error"]):
        page = (await client_of(redact=redact).get("/queues/email/confirm", params={"action": "requeue", **by})).text
        assert XSS not in page
        assert page.count(escape(f"to {XSS}")) >= 2
        for text in ("the secret", "ValueError: the error"):
            assert (text in page) is (not redact), (text, redact)
    assert "redacted" in page


async def test_a_whole_list_needs_its_preview(engine: sa.Engine, queues: Queues, client_of: Any) -> None:
    add(engine, queues.Email(recipient="a"))
    response = await act(client_of(), "cancel", all="1")
    assert response.status_code == 400
    assert states(engine, queues.Email) == {"1": "pending"}


async def test_a_large_action_offers_to_go_on(
    engine: sa.Engine, queues: Queues, client_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bulk, "MOST_AT_ONCE", 1000)
    execute(engine, "INSERT INTO email (recipient, status) SELECT 'a', 'failed' FROM generate_series(1, 1700)")
    async with client_of() as browser:
        shown = await browser.get("/queues/email/confirm", params={"all": "1", "action": "purge", "state": "failed"})
        assert "Delete 1,700 jobs?" in shown.text
        response = await browser.post("/queues/email/actions/purge", data=dict(hidden(shown.text)))
        shown = await follow(browser, response)
        assert "1,000 jobs were deleted." in shown.text
        assert "Delete 700 jobs?" in shown.text
        response = await browser.post("/queues/email/actions/purge", data=dict(hidden(shown.text)))
        shown = await follow(browser, response)
        assert "700 jobs were deleted." in shown.text
    assert states(engine, queues.Email) == {}


async def test_what_was_not_changed_is_told(engine: sa.Engine, client_of: Any, audit: Any) -> None:
    model = new_queue(engine, unique=Unique("key"))
    add(engine, model(id=1, key="a"), model(id=2, key="b"))
    fail_jobs(engine, model, 2)
    add(engine, model(id=3, key="a"))
    response = await act(client_of(model), "requeue", "job", key=["1", "2", "3", "9"])
    assert "notice=requeued%3A1&notice=duplicates%3A1&notice=unchanged%3A2" in response.headers["location"]
    assert audit() == ["user='ada' action=requeue queue='job' count=1 keys=['1', '2', '3', '9'] duplicates=1"]
    with claimed(engine, model):
        response = await act(client_of(model), "cancel", "job", key=["2", "3"])
        assert "notice=cancelled%3A1&notice=asked%3A1" in response.headers["location"]


async def test_wrong_fields_change_nothing(engine: sa.Engine, queues: Queues, client_of: Any) -> None:
    add(engine, queues.Email(recipient="a"))
    fields: Fields
    for fields in (
        {"list": "f.nothing=1"},
        {"list": ["state=failed", "state=failed"]},
        {"list": "x" * 9000},
        {"list": "state=%ff"},
        {"list": "&".join(f"a{number}=1" for number in range(300))},
        {"key": "x"},
        {"key": str(2**63)},
        {"key": ["1"] * 2 + ["2,3"]},
        {"all": "1", "until": "x"},
        {"all": "1", "until": "2030-01-01"},
        {"all": "1", "until": "2030-01-01T00:00Z", "f.nothing": "1"},
        {"all": "1", "until": "2030-01-01T00:00Z", "from": "x"},
        {"all": "1", "until": "2030-01-01T00:00Z", "most": "1e9"},
    ):
        response = await act(client_of(), "cancel", **fields)
        assert response.status_code == 400, fields
    assert states(engine, queues.Email) == {"1": "pending"}


async def test_unknown_actions_are_not_found(queues: Queues, client_of: Any) -> None:
    assert (await act(client_of(), "drop", key="1")).status_code == 404
    assert (await post(client_of(), "/schedules/drop", {"schedule": "nightly", "queue": "email"})).status_code == 404


async def test_pause_and_resume(engine: sa.Engine, queues: Queues, client_of: Any, audit: Any) -> None:
    for action, is_paused in (("pause", True), ("resume", False)):
        response = await act(client_of(), action)
        assert response.status_code == 303
        with Session(engine) as session:
            assert QueueAdmin(session, queues.Email).is_paused() is is_paused
            assert not QueueAdmin(session, queues.Invoice).is_paused()
    assert audit() == ["user='ada' action=pause queue='email'", "user='ada' action=resume queue='email'"]


async def test_user_cannot_forge_the_audit(engine: sa.Engine, queues: Queues, client_of: Any, audit: Any) -> None:
    add(engine, queues.Picture(tenant="a\nuser='root'", name="b"))
    name = "eve\nuser='root' action=purge"
    client = client_of(access=lambda _: Access(read=True, act=True, user=name))
    await act(client, "cancel", "picture", key="\"a\nuser='root'\",b")
    (line,) = audit()
    assert "\n" not in line


async def test_schedules_are_run_paused_and_resumed(
    engine: sa.Engine, queues: Queues, client_of: Any, audit: Any
) -> None:
    schedule = Schedule("hourly/de", queues.Email, every=timedelta(hours=1), values={"recipient": "a"})
    queues.metadata.create_all(engine)
    with Session(engine) as session:
        ScheduleAdmin(session, schedule.model).add(schedule)
        session.execute(sa.text("UPDATE sqlaqueue_schedule SET last_error = 'ValueError: x'"))
        session.commit()

    def stored() -> ScheduleInfo:
        with Session(engine) as session:
            return ScheduleAdmin(session, queues.Email).get("hourly/de")

    for action in ("pause", "resume", "run"):
        response = await post(client_of(), f"/schedules/{action}", {"schedule": "hourly/de", "queue": "email"})
        assert response.status_code == 303
        assert (stored().paused_at is not None) is (action == "pause")
    assert stored().run_requested_at is not None
    # It is the definition that is wrong, and this has not changed.
    assert stored().last_error == "ValueError: x"
    assert audit() == [
        f"user='ada' action={action}_schedule queue='email' schedule='hourly/de'"
        for action in ("pause", "resume", "run")
    ]
    for path, fields, status in (
        ("/schedules/pause", {"schedule": "hourly/de", "queue": "invoice"}, 404),
        ("/schedules/pause", {"schedule": "hourly/de", "queue": "nothing"}, 404),
        ("/schedules/pause", {"schedule": "hourly/de", "other": "email"}, 404),
        ("/schedules/pause", {}, 400),
        ("/schedules/pause", {"schedule": "daily", "queue": "email"}, 404),
    ):
        assert (await post(client_of(), path, fields)).status_code == status
    reader = client_of(access=lambda _: Access(read=True, act={"invoice": True, "email": ["pause"]}))
    assert (await post(reader, "/schedules/pause", {"schedule": "hourly/de", "queue": "email"})).status_code == 403
    hidden_queue = client_of(access=lambda _: Access(read=["invoice"], act=True))
    assert (
        await post(hidden_queue, "/schedules/pause", {"schedule": "hourly/de", "queue": "invoice"})
    ).status_code == 404
    assert stored().paused_at is None


async def test_edit_and_requeue(engine: sa.Engine, queues: Queues, client_of: Any, audit: Any) -> None:
    add(engine, queues.Email(recipient="a", subject=None, payload={"a": [1, 2]}, urgent=True))
    fail_jobs(engine, queues.Email)
    async with client_of() as browser:
        shown = await browser.get("/queues/email/edit", params={"key": "1"})
        fields = values(shown.text)
        assert fields["v.payload"] == '{\n  "a": [\n    1,\n    2\n  ]\n}'
        unchanged = await browser.post("/queues/email/actions/edit", data={**fields, "then": "save"})
        assert "notice=unchanged" in unchanged.headers["location"]
        # The tick of null is still there, as a browser without JavaScript leaves it.
        fields |= {"v.subject": XSS, "v.recipient": "b", "v.urgent": "", "then": "requeue"}
        response = await browser.post("/queues/email/actions/edit", data=fields)
        shown = await follow(browser, response)
        assert "1 job is pending again." in shown.text
        again = await browser.post("/queues/email/actions/edit", data=fields)
        assert again.status_code == 409, "a second POST meets the changed job"
    with Session(engine) as session:
        email = session.get_one(queues.Email, 1)
        assert (email.recipient, email.subject, email.urgent, email.payload) == ("b", XSS, None, {"a": [1, 2]})
        assert (email.status, email.attempts) == ("pending", 0)
    (line,) = audit()
    assert line.startswith("user='ada' action=edit queue='email' count=1 keys=['1'] columns=")
    assert XSS not in line


async def test_edit_shows_both_versions_after_a_conflict(engine: sa.Engine, queues: Queues, client_of: Any) -> None:
    add(engine, queues.Email(recipient="a", subject="old"))
    async with client_of() as browser:
        fields = values((await browser.get("/queues/email/edit", params={"key": "1"})).text)
        execute(engine, "UPDATE email SET subject = 'theirs & more'")
        fields |= {"v.subject": "mine", "then": "save"}
        fields.pop("null.subject", None)
        response = await browser.post("/queues/email/actions/edit", data=fields)
        assert response.status_code == 409
        assert "theirs &amp; more" in response.text
        kept = values(response.text)
        assert kept["v.subject"] == "mine"
        response = await browser.post("/queues/email/actions/edit", data={**kept, "then": "save"})
        assert response.status_code == 303
    with Session(engine) as session:
        assert session.get_one(queues.Email, 1).subject == "mine"


async def test_edit_keeps_what_was_typed_beside_an_error(engine: sa.Engine, queues: Queues, client_of: Any) -> None:
    add(engine, queues.Email(recipient="a"))
    async with client_of() as browser:
        fields = values((await browser.get("/queues/email/edit", params={"key": "1"})).text)
        fields |= {"v.big": "many", "v.subject": XSS, "v.customer_id": "", "then": "save"}
        response = await browser.post("/queues/email/actions/edit", data=fields)
        assert response.status_code == 422
        assert "Write an integer" in response.text
        assert (values(response.text)["v.big"], values(response.text)["v.subject"]) == ("many", XSS)
        fields |= {"v.big": "5", "v.customer_id": "77"}
        response = await browser.post("/queues/email/actions/edit", data=fields)
        assert response.status_code == 422
        assert "email_customer_id_fkey" in response.text


async def test_edit_of_other_columns_is_refused(engine: sa.Engine, queues: Queues, client_of: Any) -> None:
    add(engine, queues.Email(recipient="a"))
    async with client_of(redact=["subject"]) as browser:
        fields = values((await browser.get("/queues/email/edit", params={"key": "1"})).text)
        for name in ("v.status", "v.id", "v.subject", "v.lease_token", "v.nothing"):
            response = await browser.post("/queues/email/actions/edit", data={**fields, name: "1", "then": "save"})
            assert response.status_code == 400, name
        response = await browser.post("/queues/email/actions/edit", data={**fields, "key": "2"})
        assert response.status_code == 404
        without = {name: value for name, value in fields.items() if name != "key"}
        assert (await browser.post("/queues/email/actions/edit", data=without)).status_code == 400


async def test_edit_and_requeue_needs_both_rights(engine: sa.Engine, queues: Queues, client_of: Any) -> None:
    add(engine, queues.Email(recipient="a"))
    fail_jobs(engine, queues.Email)
    access = Access(read=True, act={"email": ["edit"]})
    async with client_of(access=lambda _: access) as browser:
        shown = await browser.get("/queues/email/edit", params={"key": "1"})
        assert "Save and requeue" not in shown.text
        fields = {**values(shown.text), "v.recipient": "b"}
        response = await browser.post("/queues/email/actions/edit", data={**fields, "then": "requeue"})
        assert response.status_code == 403
        response = await browser.post("/queues/email/actions/edit", data={**fields, "then": "save"})
        assert response.status_code == 303
    assert states(engine, queues.Email) == {"1": "failed"}


@pytest.mark.parametrize("kind", KINDS)
async def test_edit_of_a_running_job_is_refused(engine: sa.Engine, kind: str, client_of: Any) -> None:
    model = new_queue(engine, kind)
    add(engine, model(id=1, note="old"))
    async with client_of(model) as browser:
        fields = values((await browser.get("/queues/job/edit", params={"key": "1"})).text)
        fields |= {"v.note": "new", "then": "save"}
        with claimed(engine, model) as (job,):
            response = await browser.post("/queues/job/actions/edit", data=fields)
            assert response.status_code == 409
            assert values(response.text)["v.note"] == "new"
            assert job.note == "old"


@pytest.mark.parametrize("kind", KINDS)
async def test_cancel_beside_a_consumer_loses_nothing(
    engine: sa.Engine, kind: str, client_of: Any, sessions: Any
) -> None:
    model = new_queue(engine, kind)
    add(engine, *(model(id=number) for number in range(1, 31)))
    ran: list[int] = []
    lock, begun = threading.Lock(), threading.Event()

    def handler(_: Session, job: Any) -> None:
        with lock:
            ran.append(job.id)
        begun.set()
        threading.Event().wait(0.02)

    with Consumer(model, handler, sessions, batch_size=2):
        assert begun.wait(30)
        response = await act(client_of(model), "cancel", "job", key=[str(number) for number in range(1, 31)])
        assert response.status_code == 303
        deadline = datetime.now(UTC) + timedelta(seconds=30)
        while {"pending", "processing"} & set(states(engine, model).values()) and datetime.now(UTC) < deadline:
            threading.Event().wait(0.05)
    found = states(engine, model)
    assert "pending" not in found.values()
    assert len(ran) == len(set(ran))
    cancelled = {int(key) for key, state in found.items() if state == "cancelled"}
    assert len(cancelled | set(ran)) == 30
    assert cancelled


async def test_async_sessions_serve_all_actions(engine: sa.Engine, queues: Queues, client_of: Any, shared: Any) -> None:
    add(engine, queues.Email(recipient="a", payload={"a": 1}), queues.Picture(tenant="a", name="b"))
    asynchronous = create_async_engine(shared.url("asyncpg"))
    factory = async_sessionmaker(asynchronous)
    async with client_of(factory=factory) as browser:
        for path in (
            "/queues/email/job?key=1",
            "/queues/picture/job?key=a,b",
            "/queues/email/confirm?action=cancel&key=1",
        ):
            assert (await browser.get(path)).status_code == 200
        fields = values((await browser.get("/queues/email/edit", params={"key": "1"})).text)
        response = await browser.post("/queues/email/actions/edit", data={**fields, "v.recipient": "b", "then": "save"})
        assert response.status_code == 303
        for action in ("cancel", "requeue", "cancel", "purge"):
            response = await browser.post(f"/queues/email/actions/{action}", data={"key": "1"})
            assert response.status_code == 303, response.text
        shown = await browser.get("/queues/picture/confirm", params={"action": "cancel", "all": "1"})
        response = await browser.post("/queues/picture/actions/cancel", data=dict(hidden(shown.text)))
        assert response.status_code == 303
    await asynchronous.dispose()
    assert (states(engine, queues.Email), states(engine, queues.Picture)) == ({}, {"a,b": "cancelled"})


async def test_role_without_rights_is_told(engine: sa.Engine, queues: Queues, client_of: Any, audit: Any) -> None:
    add(engine, queues.Email(recipient="a"))
    with reading_role(engine) as limited:
        factory = sessionmaker(limited)
        response = await act(client_of(factory=factory), "cancel", key="1")
        assert response.status_code == 503
        assert "no right" in response.text, response.text
        assert "error='ProgrammingError'" in audit()[0]
        assert (await client_of(factory=factory).get("/queues/email/job?key=1")).status_code == 200


async def test_jobs_of_dead_workers_are_rescued(engine: sa.Engine, queues: Queues, client_of: Any, audit: Any) -> None:
    add(engine, queues.Email(recipient="a"))
    with Session(engine) as session:
        session.scalars(claim(queues.Email, 1)).all()
        session.commit()
        session.execute(sa.text("UPDATE email SET lease_expires_at = now() - interval '1 minute'"))
        session.commit()
    page = (await client_of().get("/queues/email")).text
    assert 'action="../queues/email/actions/rescue"' in page

    def reader(_: Any) -> Access:
        return Access(read=True, act={"email": ["cancel"]})

    assert "actions/rescue" not in (await client_of(access=reader).get("/queues/email")).text
    assert (await act(client_of(access=reader), "rescue")).status_code == 403
    assert states(engine, queues.Email) == {"1": "processing"}
    assert (await act(client_of(), "rescue")).status_code == 303
    assert states(engine, queues.Email) == {"1": "pending"}
    assert audit() == ["user='ada' action=rescue queue='email' count=1"]


async def test_requeueing_a_completed_job_is_asked(engine: sa.Engine, queues: Queues, client_of: Any) -> None:
    add(engine, queues.Email(recipient="a", status="completed"), queues.Email(recipient="b", status="failed"))
    completed, failed = [(await client_of().get(f"/queues/email/job?key={key}")).text for key in (1, 2)]
    assert "confirm?action=requeue&amp;key=1" in completed
    assert "actions/requeue" not in completed
    assert "actions/requeue" in failed


# -- the audit of actions: a line for each, also for those that fail -----------------------------------------------

FORM = {"Content-Type": "application/x-www-form-urlencoded"}


async def test_a_connection_that_is_lost_after_the_change(
    client_of: Any, engine: sa.Engine, queues: Queues, audit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    cancel = changes.cancel

    def lost(session: Any, *given: Any, **options: Any) -> Any:
        cancel(session, *given, **options)
        session.execute(sa.select(sa.func.pg_terminate_backend(sa.func.pg_backend_pid())))

    monkeypatch.setattr(changes, "cancel", lost)
    add(engine, queues.Email(recipient="a"))
    assert (await client_of().post("/queues/email/actions/cancel", data={"key": "1"})).status_code == 503
    assert states(engine, queues.Email) == {"1": "cancelled"}
    assert audit() == ["user='ada' action=cancel queue='email' keys=['1'] error='OperationalError'"]


@pytest.mark.parametrize("path", ["cancel", "edit", "pause", "resume"])
async def test_a_request_that_is_cancelled(
    client_of: Any, queues: Queues, audit: Any, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    async def never(*_: Any, **__: Any) -> None:
        await anyio.sleep_forever()

    monkeypatch.setattr(Database, "write", never)
    with anyio.move_on_after(0.2):
        await client_of().post(f"/queues/email/actions/{path}", content="key=1", headers=FORM)
    (line,) = audit()
    assert line.startswith(f"user='ada' action={path} queue='email'")
    assert line.endswith("error='CancelledError'")


async def test_a_paused_queue_that_cannot_be_paused(client_of: Any, engine: sa.Engine, audit: Any) -> None:
    execute(engine, "DROP TABLE sqlaqueue_control")
    assert (await client_of().post("/queues/email/actions/pause", content="", headers=FORM)).status_code == 503
    assert audit() == ["user='ada' action=pause queue='email' error='ProgrammingError'"]


async def test_a_value_of_a_filter_is_no_further_condition(
    client_of: Any, engine: sa.Engine, queues: Queues, audit: Any
) -> None:
    add(engine, *(queues.Email(recipient="a&state=failed b") for _ in range(2)))
    fail_jobs(engine, queues.Email, 1)
    form = {"all": "1", "f.recipient": "a&state=failed b", "until": "2100-01-01T00:00:00+00:00"}
    assert (await client_of().post("/queues/email/actions/purge", data=form)).status_code == 303
    assert audit() == [
        "user='ada' action=purge queue='email' count=1 keys=['1'] filter='f.recipient=a%26state%3Dfailed b'"
    ]
