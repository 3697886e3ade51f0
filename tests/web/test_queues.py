"""All queues at a glance, the page of one queue, and the plan of its claims."""

import asyncio
import functools
import html
import re
from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from sqlaqueue import ConcurrencyLimit, Schedule, claim
from sqlaqueue.admin import Finding, QueueAdmin, ScheduleAdmin, Thresholds, doctor
from sqlaqueue.mapping.mixin import spec_of
from sqlaqueue.queue.run import key_text
from sqlaqueue.web import Access
from sqlaqueue.web import queues as health_page
from sqlaqueue.web import queues as overview_page
from sqlaqueue.web.data.failures import CappedCount
from sqlaqueue.web.data.past import Throughput
from sqlaqueue.web.data.queues import (
    ClaimPlan,
    QueueOverview,
    measure_claim,
    plan_claim,
    read_horizon,
    read_overview,
    read_tables,
)
from sqlaqueue.web.data.reader import Unavailable
from tests.admin.models import Setup
from tests.models import add, execute, sent_statements
from tests.web.conftest import ask
from tests.web.jobs import (
    HISTORY,
    KINDS,
    attempt,
    counting_rows,
    fill_finished,
    finish,
    no_table_is_small,
    reading_role,
)
from tests.web.models import Queues

RUN = (
    "UPDATE job SET status = 'processing', lease_expires_at = now() + interval '1 min', "
    "lease_token = gen_random_uuid() WHERE key IS NOT NULL"
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
        QueueAdmin(session, setup.model).pause()
    if options:
        attempt(setup, "completed", 10, 20)
    found = overview(setup)
    parts = [*vars(found.state).values(), found.throughput]
    assert [part.problem for part in parts] == [""] * 6
    state = found.state
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
    setup = Setup.of(engine, "update_status", unique=None, flow_control=[ConcurrencyLimit(1, per="key")])
    setup.add(setup.model(key="a"), setup.model(key="b"))
    setup.execute(f"{RUN} AND key = 'a'")
    found = overview(setup).state
    assert [each.key for each in found.at_limit.value or ()] == [{"key": "a"}]
    assert (found.depth.value.running, found.depth.value.pending) == (1, 1)


@pytest.mark.parametrize("options", [{}, HISTORY, {"retention": {"completed": 86400, "failed": 86400}}])
def test_a_large_table_costs_as_much_as_is_counted(
    engine: sa.Engine, options: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_table_is_small(monkeypatch, COUNTED=100)
    for name in ("COUNT_LIMIT", "RECENT"):
        monkeypatch.setattr(f"sqlaqueue.web.data.queues.{name}", 100)
    setup = Setup.of(engine, "update_status", unique=None, **options)
    fill_finished(setup, 5000)
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
    with sent_statements(engine) as first:
        overview(setup, memory=memory)
    with sent_statements(engine) as second:
        overview(setup, memory=memory)
    assert [each for each, _ in second if each.startswith("EXPLAIN")] == []
    assert len([each for each, _ in first if each.startswith("EXPLAIN")]) >= 4


async def test_the_page_shows_all_queues(client_of: Any, queues: Any, engine: sa.Engine) -> None:
    add(engine, *(queues.Invoice(note=str(number)) for number in range(7)))
    page = (await client_of().get("/")).text
    assert page.count('<th scope="row" class="queue-name">') == 3
    assert '"./queues/invoice/jobs?state=pending">7</a>' in page
    # Jobs are due and nothing serves them.
    assert '<span class="mono">tests.web.models:Queues.__init__.&lt;locals&gt;.Invoice</span>' in page
    assert "HANDLER" not in page


async def test_a_missing_table_hides_no_other_queue(client_of: Any, engine: sa.Engine) -> None:
    execute(engine, "DROP TABLE invoice CASCADE")
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
        page = (await ask(limited, *queues.all).get("/")).text
    assert "The role of the dashboard has no right to read this." in page
    assert page.count('class="spark"') == 2


async def test_queues_that_may_not_be_read_are_not(client_of: Any, engine: sa.Engine) -> None:
    with sent_statements(engine) as sent:
        page = (await client_of(access=lambda _: Access(read=["invoice"])).get("/")).text
    assert "email" not in page
    assert [each for each, _ in sent if "email" in each] == []


@pytest.mark.usefixtures("no_examination")
async def test_numbers_that_are_capped_say_so(
    client_of: Any, queues: Any, engine: sa.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sqlaqueue.web.data.queues.COUNT_LIMIT", 5)
    monkeypatch.setattr("sqlaqueue.web.queues.COUNT_LIMIT", 5)
    add(engine, *(queues.Invoice() for _ in range(7)))
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
        ScheduleAdmin(session, schedule.model).add(schedule)
        session.execute(sa.text("UPDATE sqlaqueue_schedule SET last_error = 'ValueError: x'"))
        session.commit()
    finding = Finding(severity="critical", code="x", queue="email", summary="It is broken.")
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
        with sent_statements(engine) as sent:
            await browser.get("/")
        return sum("sqlaqueue_schedule" in statement for statement, _ in sent)

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


# -- the page of one queue -----------------------------------------------------------------------------------------

CLAIM = "queues/job/claim"
CODE = "<script>alert(1)</script>"


async def page_of(
    setup: Setup, path: str = "queues/job", *, engine: sa.Engine | None = None, status: int = 200, **options: Any
) -> str:
    """Return the page of a queue, without entities."""
    response = await ask(engine or setup.engine, setup.model, **options).get(f"/{path}")
    assert response.status_code == status, response.text
    assert CODE not in response.text
    return html.unescape(response.text)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [{}, HISTORY], ids=["plain", "history"])
async def test_each_strategy_has_a_page(engine: sa.Engine, kind: str, options: Any) -> None:
    setup = Setup.of(engine, kind, unique=None, **options)
    setup.add(*(setup.model() for _ in range(3)))
    if options:
        attempt(setup, "completed", 10, 20)
    for span in ("hour", "day"):
        page = await page_of(setup, f"queues/job?span={span}")
        assert 'class="problem"' not in page
        assert re.search(r'<dt>Due</dt><dd><a href="[^"]+">3</a></dd>', page)
        assert ('id="throughput-chart"' in page) == bool(options)
        assert "Start a worker process with the function that handles its jobs." in page


@pytest.mark.parametrize(
    ("ended", "opened"),
    [
        ((1, 40), "hour"),
        ((4000, 90_000), "6hours"),
        ((30_000,), "day"),
        ((90_000, 10**6), "week"),
        ((2 * 10**6,), "month"),
    ],
)
async def test_the_page_opens_on_the_span_in_which_something_has_ended(
    engine: sa.Engine, ended: tuple[int, ...], opened: str
) -> None:
    setup = Setup.of(engine, "update_status", unique=None)
    finish(setup, "completed", *ended)
    page = await page_of(setup, "queues/job")
    (current,) = re.findall(r'span=(\w+)" aria-current="true"', page)
    assert current == opened
    assert "Nothing has ended" not in page
    assert "Nothing has ended within the last hour" not in page
    # A span that was chosen stays, although it is empty.
    chosen = await page_of(setup, "queues/job?span=hour")
    assert ("Nothing has ended within the last hour" in chosen) == (opened != "hour")
    assert 'span=hour" aria-current="true"' in chosen


async def test_the_times_are_those_of_the_span_that_is_shown(engine: sa.Engine) -> None:
    setup = Setup.of(engine, "update_status", unique=None, extra_columns=("started_at",))
    finish(setup, "completed", 2 * 86400, 3 * 86400, started_at=7, created_at=9)
    page = await page_of(setup, "queues/job")
    assert "Of the newest runs of the last 7 days" in page
    assert "7.0 s" in page
    assert "No job has run within the last day" in await page_of(setup, "queues/job?span=day")


async def test_an_empty_queue_says_how_to_begin(engine: sa.Engine) -> None:
    page = await page_of(Setup.of(engine, "update_status", unique=None, **HISTORY))
    for text in (
        "session.add(Job(...))",
        "No Consumer runs",
        "Nothing has ended within the last 30 days",
        "No failed jobs",
    ):
        assert text in page


async def test_without_a_history_the_page_says_what_to_configure(engine: sa.Engine, monkeypatch: Any) -> None:
    no_table_is_small(monkeypatch)
    page = await page_of(Setup.of(engine, "update_status", unique=None))
    assert "QueueConfig(..., attempt_history=timedelta(days=14))" in page
    assert "CREATE INDEX CONCURRENTLY ix_job_finished ON public.job (status, finished_at)" in page


async def test_failures_lead_to_the_jobs(engine: sa.Engine) -> None:
    setup = Setup.of(engine, "update_status", unique=None)
    finish(setup, "failed", 10, error="smtp.Refused: 550")
    finish(setup, "failed", 10)
    page = await page_of(setup)
    assert 'href="../queues/job/jobs?state=failed&error=smtp.Refused&message=%E2%80%A6"' in page
    assert 'href="../queues/job/jobs?state=failed&message=%28no+error%29">(no error)</a>' in page


async def test_consumers_lead_to_what_they_run(engine: sa.Engine) -> None:
    setup = Setup.of(engine, "update_status", unique=None)
    setup.add_consumer(running=[["9223372036854775807"], ["2"]])
    setup.add_consumer("web:2", running=[[str(number)] for number in range(100, 130)], listening=False)
    page = await page_of(setup)
    assert 'href="../queues/job/job?key=9223372036854775807">9223372036854775807</a>' in page
    assert "and 10 more" in page
    assert "only polls" in page


async def test_texts_of_the_database_are_no_code(engine: sa.Engine) -> None:
    setup = Setup.of(engine, "update_status", unique=None, flow_control=[ConcurrencyLimit(1, per="key")], **HISTORY)
    finish(setup, "failed", 10, error=f"{CODE}: x")
    finish(setup, "failed", 10, error=f"ValueError: {CODE}")
    attempt(setup, "failed", 10, error=CODE)
    setup.add_consumer(CODE, running=[[CODE]])
    setup.add(setup.model(key=CODE))
    setup.execute(RUN)
    page = await page_of(setup)
    assert f"key {CODE}" in page


async def test_redacted_columns_are_not_shown(engine: sa.Engine) -> None:
    setup = Setup.of(engine, "update_status", unique=None, flow_control=[ConcurrencyLimit(1, per="key")])
    finish(setup, "failed", 10, error="ValueError: the secret")
    setup.add(setup.model(key="the secret"))
    setup.execute(RUN)
    assert "the secret" in await page_of(setup)
    page = await page_of(setup, redact=["key", "last_error"])
    assert "the secret" not in page
    assert "key redacted" in page
    assert "The texts of errors are redacted." in page


@pytest.mark.parametrize(
    ("access", "shown"),
    [
        (Access(read=True, act=True), True),
        (Access(read=True, act={"job": ["pause"]}), True),
        (Access(read=True, act={"job": ["requeue"]}), False),
        (Access(read=True), False),
    ],
)
async def test_pausing_is_offered_to_whom_it_is_allowed(engine: sa.Engine, access: Access, *, shown: bool) -> None:
    setup = Setup.of(engine, "update_status", unique=None)
    page = await page_of(setup, access=lambda _: access)
    assert ('href="../queues/job/pause"' in page) == shown
    setup.execute("INSERT INTO sqlaqueue_control (queue, key) VALUES (:queue, '[]')", queue=spec_of(setup.model).name)
    page = await page_of(setup, access=lambda _: access)
    assert ('action="../queues/job/actions/resume"' in page) == shown
    assert "No job starts until the queue is resumed." in page


@pytest.mark.parametrize(
    ("path", "status"),
    [("queues/job?span=year", 400), ("queues/job?span=", 400), ("queues/jobs", 404), ("queues/~x", 404)],
)
async def test_wrong_addresses(engine: sa.Engine, path: str, status: int) -> None:
    page = await page_of(Setup.of(engine, "update_status", unique=None), path, status=status)
    if status == 400:
        assert "span=" in page


async def test_a_queue_that_may_not_be_read_is_as_unknown_as_another(client_of: Any) -> None:
    browser = client_of(access=lambda _: Access(read=["invoice"]))
    hidden, unknown = [await browser.get(f"/queues/{name}") for name in ("email", "nothing")]
    assert (hidden.status_code, hidden.text) == (404, unknown.text)


@pytest.mark.parametrize("table", ["sqlaqueue_attempt", "sqlaqueue_consumer", "sqlaqueue_control"])
async def test_a_missing_side_table_hides_its_panel_only(engine: sa.Engine, table: str) -> None:
    setup = Setup.of(engine, "update_status", unique=None, **HISTORY)
    finish(setup, "failed", 10, error="ValueError: x")
    setup.execute(f"DROP TABLE {table} CASCADE")
    page = await page_of(setup)
    assert "A table is missing." in page
    assert "<dt>Pending</dt>" in page
    assert "<b>ValueError</b>" in page


async def test_a_page_of_a_large_table_reads_few_rows(engine: sa.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    no_table_is_small(monkeypatch, LIMIT=100, COUNTED=100, GROUPED=100, SAMPLE=100, JOINED=100)
    monkeypatch.setattr("sqlaqueue.web.data.queues.COUNT_LIMIT", 100)
    monkeypatch.setattr("sqlaqueue.web.data.past.read_throughput.__kwdefaults__", {"limit": 100, "source": None})
    setup = Setup.of(engine, "update_status", unique=None, **HISTORY)
    fill_finished(setup, 5000, attempts=True)
    with counting_rows(engine) as reads, sent_statements(engine) as sent:
        page = await page_of(setup)
    assert "These are the newest 100" in page
    assert (reads.by_scan["job"], reads.by_scan["sqlaqueue_attempt"]) == (0, 0)
    assert reads.by_index["job"] <= 110
    assert reads.by_index["sqlaqueue_attempt"] <= 410
    assert len(sent) <= 50


# -- the plan of a claim: executed and rolled back, beside running workers -----------------------------------------


def measured(setup: Setup) -> ClaimPlan:
    with Session(setup.engine) as session:
        found = measure_claim(session, spec_of(setup.model))
        assert isinstance(found, ClaimPlan)
        # What it has locked is free, though the transaction goes on.
        with Session(setup.engine) as other:
            assert len(other.scalars(claim(setup.model, 10)).all()) == 3
            other.rollback()
        return found


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        *((kind, {}) for kind in KINDS),
        # Existing messages have no flow control.
        *((kind, {"flow_control": [ConcurrencyLimit(2, per="key")]}) for kind in KINDS if kind != "existing_messages"),
    ],
)
def test_a_measured_claim_leaves_nothing_behind(engine: sa.Engine, kind: str, options: Any) -> None:
    setup = Setup.of(engine, kind, unique=None, **options)
    setup.add(*(setup.model(key=str(number)) for number in range(3)))
    with engine.connect() as connection:
        rows = connection.execute(sa.select(setup.model.__table__)).all()
    found = measured(setup)
    assert found.is_measured
    assert found.claimed == 1
    assert found.plan.execution_milliseconds is not None
    assert found.plan.root.buffers.used > 0
    assert found.plan.root.buffers.used == max(node.buffers.used for node in found.plan.root.nodes())
    with engine.connect() as connection:
        assert connection.execute(sa.select(setup.model.__table__)).all() == rows


def test_jobs_that_others_have_locked_are_not_waited_for(engine: sa.Engine) -> None:
    setup = Setup.of(engine, "batch_select", unique=None)
    setup.add(setup.model(), setup.model())
    with Session(engine) as worker, Session(engine) as session:
        worker.scalars(claim(setup.model, 2)).all()
        found = measure_claim(session, spec_of(setup.model))
        assert isinstance(found, ClaimPlan)
        assert found.claimed == 0


def test_a_plan_needs_no_execution(engine: sa.Engine) -> None:
    setup = Setup.of(engine, "update_status", unique=None)
    setup.add(setup.model())
    with Session(engine) as session:
        session.execute(sa.text("SET TRANSACTION READ ONLY"))
        found = plan_claim(session, spec_of(setup.model))
    assert isinstance(found, ClaimPlan)
    assert (found.is_measured, found.claimed) == (False, None)
    assert "ix_job_queue_claim" in found.indexes
    assert found.plan.sql.startswith("WITH")


def test_a_claim_without_its_index_reads_the_whole_table(engine: sa.Engine) -> None:
    setup = Setup.of(engine, "update_status", unique=None)
    setup.execute(
        "INSERT INTO job (status, priority, run_at, attempts, max_attempts, created_at) "
        "SELECT 'pending', 0, now(), 0, 5, now() FROM generate_series(1, 3000)"
    )
    setup.execute("DROP INDEX ix_job_queue_claim")
    setup.execute("ANALYZE job")
    with Session(engine) as session:
        found = measure_claim(session, spec_of(setup.model))
    assert isinstance(found, ClaimPlan)
    assert found.whole_tables == ["job"]


@pytest.mark.parametrize("kind", KINDS)
async def test_the_page_shows_buffers_tables_and_indexes(engine: sa.Engine, kind: str) -> None:
    setup = Setup.of(engine, kind, unique=None)
    setup.add(setup.model())
    page = await page_of(setup, CLAIM)
    assert 'class="problem"' not in page
    assert "<dt>Buffers</dt>" in page
    assert "Executed by EXPLAIN (ANALYZE, BUFFERS)" in page
    assert "public.job" in page
    # The verdict is above the plan, which is folded.
    plan = page.partition("Plan of a claim")[2]
    assert '<span class="badge badge--alive">good</span> It finds its jobs by index: ' in plan
    assert plan.index("It finds its jobs by index") < plan.index("<details") < plan.index("Steps of the plan")


async def test_missing_and_invalid_indexes_of_claims_are_shown_with_their_fix(engine: sa.Engine) -> None:
    setup = Setup.of(engine, "update_status", unique=None)
    assert "What is wrong with the indexes" not in (await page_of(setup, CLAIM))
    setup.execute("DROP INDEX ix_job_queue_claim")
    setup.execute("UPDATE pg_index SET indisvalid = false WHERE indexrelid = 'ix_job_queue_lease'::regclass")
    setup.execute("CREATE INDEX mine ON job (attempts)")
    setup.execute("UPDATE pg_index SET indisvalid = false WHERE indexrelid = 'mine'::regclass")
    page = await page_of(setup, CLAIM)
    findings, _, plan = page.partition("Plan of a claim")
    assert "CREATE INDEX CONCURRENTLY ix_job_queue_claim" in findings
    assert "REINDEX INDEX CONCURRENTLY" in findings
    assert "ix_job_queue_lease" in findings
    assert "mine" not in findings, "it is no index of claims"
    assert "<dt>Buffers</dt>" in plan
    assert 'badge--warning">warning</span> An index of claims is missing or damaged' in plan


async def test_a_held_queue_says_why_nothing_reads_as_processing(client_of: Any) -> None:
    for queue, is_held in (("email", False), ("invoice", True), ("picture", True)):
        page = (await client_of().get(f"/queues/{queue}")).text
        assert ("Nothing reads as processing here" in page) is is_held


async def test_a_missing_index_of_messages_is_shown(engine: sa.Engine) -> None:
    setup = Setup.of(engine, "delete_returning", unique=None)
    setup.execute("DROP INDEX ix_sqlaqueue_message_job_claim")
    assert "ix_sqlaqueue_message_job_claim" in (await page_of(setup, CLAIM)).partition("Plan of a claim")[0]


async def test_many_viewers_claim_once(engine: sa.Engine) -> None:
    setup = Setup.of(engine, "update_status", unique=None)
    with sent_statements(engine) as sent:
        async with ask(engine, setup.model) as browser:
            for _ in range(3):
                assert (await browser.get("/queues/job/claim")).status_code == 200
    assert len([each for each, _ in sent if each.startswith("EXPLAIN (ANALYZE")]) == 1


async def test_a_role_that_may_not_claim_sees_why(engine: sa.Engine) -> None:
    setup = Setup.of(engine, "update_status", unique=None)
    with reading_role(engine) as limited:
        page = await page_of(setup, CLAIM, engine=limited)
    assert "The claim was not executed, so there are no buffers" in page
    assert "no right to read this" in page
    assert "public.job" in page


async def test_a_locked_table_ends_the_claim(engine: sa.Engine) -> None:
    setup = Setup.of(engine, "update_status", unique=None)
    with engine.connect() as connection:
        connection.exec_driver_sql("LOCK TABLE job IN ACCESS EXCLUSIVE MODE")
        page = await page_of(setup, CLAIM)
        connection.rollback()
    assert "A table is locked by another session" in page
    assert "Who keeps dead rows" in page


async def test_who_keeps_dead_rows_is_named_without_statements(engine: sa.Engine) -> None:
    setup = Setup.of(engine, "update_status", unique=None)
    with engine.connect() as connection:
        connection.exec_driver_sql("SELECT pg_current_xact_id(), 'the secret'")
        pid = connection.exec_driver_sql("SELECT pg_backend_pid()").scalar_one()
        with Session(engine) as session:
            horizon = read_horizon(session, spec_of(setup.model))
        page = await page_of(setup, CLAIM)
    assert [each.doing for each in horizon.holders] == ["idle in transaction"]
    assert horizon.holders[0].since is not None
    assert f"Session {pid} (role postgres" in page
    assert "the secret" not in page


async def test_a_reader_of_one_queue_does_not_learn_whose_sessions_there_are(
    engine: sa.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = Setup.of(engine, "update_status", unique=None)
    at_once = functools.partial(doctor, thresholds=Thresholds(transaction_open=timedelta(0)))
    monkeypatch.setattr(health_page, "doctor", at_once)

    async def pages(*, read: Any) -> str:
        async with ask(engine, setup.model, access=lambda _: Access(read=read)) as browser:
            return html.unescape(
                "".join([(await browser.get(f"/{path}")).text for path in ("queues/job/claim", "health")])
            )

    other = sa.create_engine(engine.url, connect_args={"application_name": "of another application"})
    with other.connect() as connection:
        connection.exec_driver_sql("SELECT pg_current_xact_id()")
        pid = connection.exec_driver_sql("SELECT pg_backend_pid()").scalar_one()
        everything, one = await pages(read=True), await pages(read=["job"])
    other.dispose()
    for text in ("of another application", f"Session {pid}", f"pg_terminate_backend({pid})", "role postgres"):
        assert text in everything, text
        assert text not in one, text
    assert "A session that is idle in a transaction keeps dead rows." in one
    assert '<th scope="row">A session' in one


def test_tables_of_messages_and_the_history_are_read(engine: sa.Engine) -> None:
    setup = Setup.of(engine, "delete_returning", unique=None, attempt_history=86400)
    with Session(engine) as session:
        names = [each.statistics.name for each in read_tables(session, spec_of(setup.model))]
    assert names == ["public.job", "public.sqlaqueue_message_job", "public.sqlaqueue_attempt"]
