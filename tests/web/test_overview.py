"""All queues at a glance; one that cannot be read does not hide the others."""

from __future__ import annotations

import asyncio
import html
from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session, sessionmaker

from sqlaqueue import Limit, Schedule, admin
from sqlaqueue.mapping.mixin import spec_of
from sqlaqueue.queue.run import key_text
from sqlaqueue.web import Access, Dashboard
from sqlaqueue.web import queues as health_page
from sqlaqueue.web import queues as overview_page
from sqlaqueue.web.data.past import CappedCount, Throughput
from sqlaqueue.web.data.queues import QueueOverview, read_overview
from sqlaqueue.web.data.reader import Unavailable
from tests.admin.models import Setup
from tests.unique.models import KINDS
from tests.web.conftest import client, everything
from tests.web.models import Queues
from tests.web.queue_data import (
    HISTORY,
    attempt,
    counting_rows,
    counting_statements,
    fill,
    no_table_is_small,
    reading_role,
)


def overview(setup: Setup, **options: Any) -> QueueOverview:
    with Session(setup.engine) as session:
        return read_overview(session, spec_of(setup.model), **options)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [{}, HISTORY], ids=["plain", "history"])
def test_each_strategy_is_read_without_a_problem(engine: sa.Engine, kind: str, options: Any) -> None:
    setup = Setup.of(engine, kind, unique=None, **options)
    setup.add(*(setup.model() for _ in range(3)))
    setup.add_consumer(running=[["1"], ["2"]], claimed=4)
    setup.add_consumer("web:2", listening=False)
    with Session(engine) as session:
        admin.pause(session, setup.model)
    if options:
        attempt(setup, "completed", 10, 20)
    found = overview(setup)
    parts = [*vars(found.state).values(), found.throughput]
    assert [part.problem for part in parts] == [""] * 6
    state = found.state
    assert state.depth.value is not None
    assert (state.depth.value.pending, state.depth.value.due) == (3, 3)
    assert state.paused.value is True
    assert state.failed.value == CappedCount(number=0, is_capped=False)
    first, second = state.consumers.value or ()
    assert ([*map(key_text, first.running)], first.claimed, first.listening) == (["1", "2"], 4, True)
    assert (second.running, second.listening) == ([], False)
    assert state.at_limit.value == []
    if options:
        assert isinstance(found.throughput.value, Throughput)
        assert found.throughput.value.total == 2


def test_keys_at_their_limit_are_read(engine: sa.Engine) -> None:
    setup = Setup.of(engine, "update_status", unique=None, limits=[Limit(1, per="key")])
    setup.add(setup.model(key="a"), setup.model(key="b"))
    setup.execute(
        "UPDATE job SET status = 'processing', lease_expires_at = now() + interval '1 min', "
        "lease_token = gen_random_uuid() WHERE key = 'a'"
    )
    found = overview(setup).state
    assert [each.key for each in found.at_limit.value or ()] == [{"key": "a"}]
    assert found.depth.value is not None
    assert (found.depth.value.running, found.depth.value.pending) == (1, 1)


@pytest.mark.parametrize("options", [{}, HISTORY, {"retention": {"completed": 86400, "failed": 86400}}])
def test_a_large_table_costs_as_much_as_is_counted(
    engine: sa.Engine, options: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_table_is_small(monkeypatch)
    for name, limit in (("queues.COUNT_LIMIT", 100), ("queues.RECENT", 100), ("past.COUNTED", 100)):
        monkeypatch.setattr(f"sqlaqueue.web.data.{name}", limit)
    setup = Setup.of(engine, "update_status", unique=None, **options)
    fill(setup, 5000)
    setup.execute(
        "INSERT INTO job (status, priority, run_at, attempts, max_attempts, created_at) "
        "SELECT 'pending', n % 3, now() - n * interval '1 s', 0, 5, now() FROM generate_series(1, 2000) AS n"
    )
    if options == HISTORY:
        setup.execute(
            "INSERT INTO sqlaqueue_attempt (queue, key, attempt, ended_at, outcome) "
            "SELECT 'job', jsonb_build_array(id), 1, finished_at, 'completed' FROM job WHERE finished_at IS NOT NULL"
        )
    setup.execute("ANALYZE")
    with counting_rows(engine) as reads:
        found = overview(setup)
    assert found.state.depth.value is not None
    assert found.state.depth.value.due == 100
    assert isinstance(found.state.failed.value, CappedCount if "retention" in options else Unavailable)
    assert isinstance(found.throughput.value, Throughput if options else Unavailable)
    assert reads.by_scan["job"] == 0
    # The first hundred of all, and of each of the three priorities; the failed ones; the newest of each state.
    assert reads.by_index["job"] <= 400 + 101 + 200 + 10
    if options == HISTORY:
        assert reads.by_scan["sqlaqueue_attempt"] == 0
        assert reads.by_index["sqlaqueue_attempt"] <= 110


def test_what_there_is_to_read_is_remembered(engine: sa.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    no_table_is_small(monkeypatch)
    setup = Setup.of(engine, "update_status", unique=None)
    memory: Any = {}
    with counting_statements(engine) as first:
        overview(setup, memory=memory)
    with counting_statements(engine) as second:
        overview(setup, memory=memory)
    assert [each for each in second if each.startswith("EXPLAIN")] == []
    assert len([each for each in first if each.startswith("EXPLAIN")]) >= 4


async def test_the_page_shows_all_queues(client_of: Any, queues: Any, engine: sa.Engine) -> None:
    with Session(engine) as session:
        session.add_all([queues.Invoice(note=str(number)) for number in range(7)])
        session.commit()
    page = (await client_of().get("/")).text
    assert page.count('<th scope="row" class="queue-name">') == 3
    assert '"./queues/invoice/jobs?state=pending">7</a>' in page
    # Jobs are due and nothing serves them.
    assert "sqlaqueue worker tests.web.models:Queues.__init__.&lt;locals&gt;.Invoice=MODULE:HANDLER" in page


async def test_a_missing_table_hides_no_other_queue(client_of: Any, engine: sa.Engine) -> None:
    with engine.begin() as connection:
        connection.exec_driver_sql("DROP TABLE invoice CASCADE")
    response = await client_of().get("/")
    assert response.status_code == 200
    assert response.text.count('<th scope="row" class="queue-name">') == 3
    assert "A table is missing. Run the migrations of the application" in response.text
    assert response.text.count("problem") < 3


async def test_a_locked_table_hides_no_other_queue(client_of: Any, engine: sa.Engine) -> None:
    with engine.connect() as connection:
        connection.exec_driver_sql("LOCK TABLE invoice IN ACCESS EXCLUSIVE MODE")
        response = await client_of().get("/")
        connection.rollback()
    text = html.unescape(response.text)
    assert response.status_code == 200
    assert "A table is locked by another session" in text
    # The rest of the queue is not waited for as well.
    assert "This was not read, since what came before took too long." in text
    assert text.count('class="spark"') >= 2


async def test_a_role_without_rights_sees_what_it_lacks(queues: Any, engine: sa.Engine) -> None:
    with reading_role(engine, "REVOKE SELECT ON invoice FROM {role}") as limited:
        page = (await client(Dashboard(queues.all, sessionmaker(limited), access=everything)).get("/")).text
    assert "The role of the dashboard has no right to read this." in page
    assert page.count('class="spark"') == 2


async def test_queues_that_may_not_be_read_are_not(client_of: Any, engine: sa.Engine) -> None:
    with counting_statements(engine) as sent:
        page = (await client_of(access=lambda _: Access(read=["invoice"])).get("/")).text
    assert "email" not in page
    assert [each for each in sent if "email" in each] == []


async def test_numbers_that_are_capped_say_so(
    client_of: Any, queues: Any, engine: sa.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sqlaqueue.web.data.queues.COUNT_LIMIT", 5)
    monkeypatch.setattr("sqlaqueue.web.queues.COUNT_LIMIT", 5)
    with Session(engine) as session:
        session.add_all([queues.Invoice() for _ in range(7)])
        session.commit()
    assert ">5+</a>" in (await client_of().get("/")).text


async def test_no_queue_at_all(client_of: Any) -> None:
    page = (await client_of(access=lambda _: Access(read=False)).get("/")).text
    assert "You see no queue" in page


async def test_what_needs_a_look_on_other_pages_is_counted(
    engine: sa.Engine, queues: Queues, client_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    schedule = Schedule("hourly", queues.Invoice, every=timedelta(hours=1))
    queues.metadata.create_all(engine)
    with Session(engine) as session:
        admin.add_schedule(session, schedule)
        session.execute(sa.text("UPDATE sqlaqueue_schedule SET last_error = 'ValueError: x'"))
        session.commit()
    finding = admin.Finding(severity="critical", code="x", queue="email", summary="It is broken.")
    monkeypatch.setattr(health_page, "doctor", lambda *_, **__: [finding])
    async with client_of() as browser:
        # The first page is sent before the queues are examined.
        assert "1 critical finding<" not in (await browser.get("/")).text
        page = (await browser.get("/")).text
    assert "1 critical finding<" in page
    assert "1 schedule is late or failing<" in page


async def test_schedules_are_read_once_in_ten_seconds(
    client_of: Any, engine: sa.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def reads(browser: Any) -> int:
        with counting_statements(engine) as sent:
            await browser.get("/")
        return sum("sqlaqueue_schedule" in statement for statement in sent)

    monkeypatch.setattr(health_page, "doctor", lambda *_, **__: [])
    async with client_of() as browser:
        assert await reads(browser) > 0
        assert await reads(browser) == 0
        monkeypatch.setattr("sqlaqueue.web.context.SCHEDULES_READ_FOR", 0.0)
        assert await reads(browser) > 0


async def test_a_server_that_stops_ends_the_examination_without_an_error(client_of: Any, monkeypatch: Any) -> None:
    begun = asyncio.Event()

    async def examine(_: Any) -> None:
        begun.set()
        await asyncio.sleep(60)

    monkeypatch.setattr(overview_page, "examined", examine)
    async with client_of() as browser:
        request = asyncio.create_task(browser.get("/"))
        await begun.wait()
        request.cancel()
        assert (await request).status_code == 200


async def test_queues_are_examined_once_a_minute(client_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    examined: list[Any] = []
    monkeypatch.setattr(health_page, "doctor", lambda *given, **_: examined.append(given) or [])
    async with client_of() as browser:
        for _ in range(3):
            await browser.get("/")
    assert len(examined) == 1
    async with client_of(access=lambda _: Access(read=["email"])) as browser:
        await browser.get("/")
    assert len(examined) == 2
