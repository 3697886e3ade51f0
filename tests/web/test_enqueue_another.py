"""Enqueue another job like one that is there: its values, what is typed instead, and who may do it."""

import asyncio
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from sqlaqueue import Unique
from sqlaqueue.exc import ConfigurationError
from sqlaqueue.web import Access
from tests.models import add, execute
from tests.web.conftest import act, ask, follow, hidden
from tests.web.jobs import complete_jobs, fail_jobs, new_queue
from tests.web.models import Kind, Queues

PATH = "/queues/email/enqueue?key=1"


def jobs_of(engine: sa.Engine, model: Any) -> list[Any]:
    with Session(engine) as session:
        return list(session.scalars(sa.select(model).order_by(*sa.inspect(model).primary_key)))


async def test_another_job_has_the_values_of_this_one(
    engine: sa.Engine, queues: Queues, client_of: Any, audit: Any
) -> None:
    values = {"subject": "Hi", "kind": Kind.RECEIPT, "payload": {"a": [1]}, "total": Decimal("1.5000"), "blob": b"x"}
    add(engine, queues.Email(recipient="secret", priority=7, max_attempts=3, **values))
    fail_jobs(engine, queues.Email, 1)
    began = datetime.now(UTC)
    async with client_of(redact=["recipient"]) as browser:
        assert (
            'href="../../queues/email/enqueue?key=1">Enqueue another'
            in (await browser.get("/queues/email/job?key=1")).text
        )
        form = (await browser.get(PATH)).text
        assert "secret" not in form
        assert "empty for now, or a time" in form
        assert ("key", "1") in hidden(form)
        fields = {"key": "1", "v.subject": "Ho", "v.payload": '{"a": [1]}', "v.run_at": "", "v.priority": "7"}
        shown = await follow(browser, await browser.post("/queues/email/actions/enqueue", data=fields))
        assert "The job was enqueued." in shown.text
        assert "Job 2" in shown.text
        assert "secret" not in shown.text
    first, second = jobs_of(engine, queues.Email)
    assert (first.status, first.subject) == ("failed", "Hi")
    assert {name: getattr(second, name) for name in values} == values | {"subject": "Ho"}
    assert (second.recipient, second.priority, second.max_attempts) == ("secret", 7, 3)
    assert (second.status, second.attempts, second.last_error, second.finished_at) == ("pending", 0, None, None)
    assert second.run_at >= began
    assert audit()[-1] == "user='ada' action=enqueue queue='email' count=1 keys=['2'] like='1'"


async def test_a_time_that_is_typed_is_used(engine: sa.Engine, queues: Queues, client_of: Any) -> None:
    at = datetime(2090, 1, 1, 8, tzinfo=UTC)
    add(engine, queues.Email(recipient="a", run_at=at))
    for given in (at.isoformat(), "2091-01-01T08:00Z"):
        answer = await act(client_of(), "enqueue", key="1", **{"v.run_at": given})
        assert answer.status_code == 303, answer.text
    assert [job.run_at.year for job in jobs_of(engine, queues.Email)] == [2090, 2090, 2091]


async def test_what_is_refused_is_shown_at_its_field(engine: sa.Engine, queues: Queues, client_of: Any) -> None:
    add(engine, queues.Email(recipient="a"))
    for given, text in (
        ({"v.big": "much"}, "Write an integer"),
        ({"v.customer_id": "99"}, "No row of customer has this value"),
        ({"v.recipient": "", "null.recipient": "1"}, "required"),
    ):
        answer = await act(client_of(), "enqueue", key="1", **given)
        assert answer.status_code == 422, answer.text
        assert text in answer.text
        assert "Enqueue another like 1" in answer.text
    assert (await act(client_of(), "enqueue", key="1", **{"v.status": "failed"})).status_code == 400
    assert (await act(client_of(), "enqueue", key="9")).status_code == 404
    assert (await act(client_of(), "enqueue")).status_code == 400
    assert len(jobs_of(engine, queues.Email)) == 1


async def test_a_duplicate_is_refused(engine: sa.Engine) -> None:
    model = new_queue(engine, unique=Unique("note"))
    add(engine, model(note="a"))
    answer = await act(ask(engine, model), "enqueue", "job", key="1", **{"v.note": "a"})
    assert answer.status_code == 422
    assert "It would have a duplicate" in answer.text
    assert (await act(ask(engine, model), "enqueue", "job", key="1", **{"v.note": "b"})).status_code == 303
    complete_jobs(engine, model, 2)
    assert (await act(ask(engine, model), "enqueue", "job", key="1", **{"v.note": "a"})).status_code == 303


@pytest.mark.parametrize(
    ("kind", "text"),
    [("existing_messages", "fills the table of messages itself"), ("rows_are_messages", ""), ("batch_select", "")],
)
async def test_each_strategy(engine: sa.Engine, kind: str, text: str) -> None:
    model = new_queue(engine, kind)
    add(engine, model(note="a"))
    answer = await act(ask(engine, model), "enqueue", "job", key="1", **{"v.note": "b"})
    assert answer.status_code == (409 if text else 303), answer.text
    assert text in answer.text
    assert len(jobs_of(engine, model)) == (1 if text else 2)


async def test_keys_that_a_program_makes_are_refused(engine: sa.Engine, queues: Queues, client_of: Any) -> None:
    add(engine, queues.Picture(tenant="a", name="b"))
    async with client_of() as browser:
        page = await browser.get("/queues/picture/enqueue?key=a%2Cb")
        assert "Its key is made by the program" in page.text
        assert ">Enqueue</button>" not in page.text
    assert (await act(client_of(), "enqueue", "picture", key="a,b")).status_code == 409


async def test_it_is_a_right_of_its_own(engine: sa.Engine, queues: Queues, client_of: Any) -> None:
    add(engine, queues.Email(recipient="a"))

    def allowing(*actions: str) -> Any:
        return client_of(access=lambda _: Access(read=True, act={queues.Email: actions}, user="eve"))

    async with allowing("edit", "requeue", "cancel", "purge", "pause", "schedule") as browser:
        assert "Enqueue another" not in (await browser.get("/queues/email/job?key=1")).text
        assert (await browser.get(PATH)).status_code == 403
        assert (await browser.post("/queues/email/actions/enqueue", data={"key": "1"})).status_code == 403
    async with allowing("enqueue") as browser:
        assert (await browser.get(PATH)).status_code == 200
        assert "Edit" not in (await browser.get("/queues/email/job?key=1")).text
    with pytest.raises(ConfigurationError, match="the actions are enqueue, requeue"):
        Access(read=True, act={queues.Email: ["enque"]})


async def test_a_locked_job_can_be_copied(engine: sa.Engine, queues: Queues, client_of: Any) -> None:
    add(engine, queues.Email(recipient="a"))
    with Session(engine) as session:
        session.execute(sa.select(queues.Email).with_for_update())
        assert (await act(client_of(), "enqueue", key="1")).status_code == 303
    execute(engine, "DELETE FROM email WHERE id = 2")


async def test_a_form_that_is_sent_twice_enqueues_one_job(
    engine: sa.Engine, queues: Queues, client_of: Any, audit: Any
) -> None:
    add(engine, queues.Email(recipient="a"))
    async with client_of() as browser:
        fields = dict(hidden((await browser.get(PATH)).text))
        # What was refused is not remembered.
        assert (await browser.post("/queues/email/actions/enqueue", data=fields | {"v.total": "x"})).status_code == 422
        twice = [browser.post("/queues/email/actions/enqueue", data=fields | {"v.subject": "x"}) for _ in range(3)]
        answers = await asyncio.gather(*twice)
        assert [answer.status_code for answer in answers] == [303] * 3
        assert len({answer.headers["location"] for answer in answers}) == 1
        assert [job.id for job in jobs_of(engine, queues.Email)] == [1, 2]
        assert len(audit()) == 1
        # The next form is another one, and so is this one with another value.
        for other in (dict(hidden((await browser.get(PATH)).text)), fields | {"v.subject": "y"}):
            await browser.post("/queues/email/actions/enqueue", data=other)
    assert [job.id for job in jobs_of(engine, queues.Email)] == [1, 2, 3, 4]
