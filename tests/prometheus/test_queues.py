"""The gauges of queues: what each says of a prepared database, what a scrape costs, and what fails."""

import asyncio
import logging
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
import sqlalchemy as sa
from prometheus_client import CollectorRegistry
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from sqlaqueue import AsyncConsumer, ConcurrencyLimit, QueueConfig, QueueMixin, Unique, claim, complete
from sqlaqueue.admin import QueueAdmin, ScheduleAdmin
from sqlaqueue.exc import ConfigurationError, NotAQueueError, StatementError
from sqlaqueue.prometheus import QueueCollector, metrics_app, queues
from sqlaqueue.prometheus.queues import GAUGES
from tests.admin.models import HELD, Setup
from tests.models import execute, sent_statements
from tests.prometheus.conftest import STATEMENT_TIMEOUT, collect, make_two, parse, values
from tests.schedules.models import hourly, make_report, start
from tests.servers import Database
from tests.strategies.conftest import buffers_of, nodes_of
from tests.unique.models import make_job

NOW = datetime.now(UTC)
AGO, LATER = NOW - timedelta(hours=1), NOW + timedelta(days=1)


def kind_of(setup: Setup) -> str:
    return "rows" if "sqlaqueue_dead_letter" in setup.model.metadata.tables else "status"


def test_an_empty_queue(setup: Setup) -> None:
    found = collect(setup.engine, setup.model)
    assert found.pop(("scrape_duration_seconds", "job")) >= 0
    has_leases = setup.model.__queue__.strategy == "update_status"
    assert found == {
        ("jobs", "job", "pending"): 0,
        ("due_jobs", "job"): 0,
        ("oldest_due_job_age_seconds", "job"): 0,
        ("running_jobs", "job"): 0,
        ("consumers", "job"): 0,
        ("consumers_listening", "job"): 0,
        ("paused", "job"): 0,
        ("keys_at_limit", "job"): 0,
        ("missing_indexes", "job"): 0,
        ("scrape_success", "job"): 1,
        **({("jobs", "job", "processing"): 0, ("expired_leases", "job"): 0} if has_leases else {}),
    }


def test_pending_and_due_jobs(setup: Setup) -> None:
    setup.add(setup.model(run_at=AGO), setup.model(run_at=AGO + timedelta(minutes=30)), setup.model(run_at=LATER))
    found = collect(setup.engine, setup.model)
    assert found["jobs", "job", "pending"] == 3
    assert found["due_jobs", "job"] == 2
    age = datetime.now(UTC) - AGO
    assert 3600 <= found["oldest_due_job_age_seconds", "job"] <= age.total_seconds()


def test_the_oldest_due_job_is_found_among_all_priorities(engine: sa.Engine) -> None:
    setup = Setup.of(engine, "update_status", unique=None)
    setup.add(setup.model(priority=0), setup.model(priority=1, run_at=LATER), setup.model(priority=7, run_at=AGO))
    found = collect(engine, setup.model)
    assert found["due_jobs", "job"] == 2
    assert found["oldest_due_job_age_seconds", "job"] >= 3600


def test_unfinished_jobs_are_counted_up_to_a_limit(setup: Setup) -> None:
    setup.add(*(setup.model(run_at=AGO + timedelta(seconds=number)) for number in range(12)))
    found = collect(setup.engine, setup.model, count_limit=5)
    assert found["jobs", "job", "pending"] == found["due_jobs", "job"] == 5
    assert found["oldest_due_job_age_seconds", "job"] >= 3600
    assert collect(setup.engine, setup.model, count_limit=12)["due_jobs", "job"] == 12


def test_the_limit_is_that_of_all_priorities(engine: sa.Engine) -> None:
    setup = Setup.of(engine, "update_status", unique=None)
    setup.add(*(setup.model(priority=number % 3, run_at=AGO) for number in range(12)))
    assert collect(engine, setup.model, count_limit=5)["due_jobs", "job"] == 5


def test_running_jobs_and_expired_leases(engine: sa.Engine) -> None:
    setup = Setup.of(engine, "update_status", unique=None)
    setup.add(*(setup.model() for _ in range(4)))
    with Session(engine) as session, session.begin():
        assert len(session.scalars(claim(setup.model, 3)).all()) == 3
    setup.execute("UPDATE job SET lease_expires_at = now() - interval '1 s' WHERE id = 2")
    found = collect(engine, setup.model)
    assert found["jobs", "job", "pending"] == 1
    assert found["jobs", "job", "processing"] == found["running_jobs", "job"] == 3
    assert found["expired_leases", "job"] == 1
    assert collect(engine, setup.model, count_limit=2)["running_jobs", "job"] == 2


@pytest.mark.parametrize("kind", HELD)
def test_jobs_of_an_open_transaction_run_as_heartbeats_say(engine: sa.Engine, kind: str) -> None:
    setup = Setup.of(engine, kind, unique=None)
    setup.add(setup.model(), setup.model())
    setup.add_consumer(running=[["1"]])
    with Session(engine) as session:
        assert len(session.scalars(claim(setup.model, 1)).all()) == 1
        found = collect(engine, setup.model)
    assert found["jobs", "job", "pending"] == found["due_jobs", "job"] == 2
    assert found["running_jobs", "job"] == 1


def test_jobs_that_wait_for_a_duplicate_are_not_running(engine: sa.Engine) -> None:
    setup = Setup(engine, make_job("update_status", Unique("key", on_return="wait", states=("pending",))))
    setup.add(setup.model(key="a"))
    setup.execute("UPDATE job SET status = 'processing', lease_expires_at = to_timestamp(0)")
    found = collect(engine, setup.model)
    assert found["jobs", "job", "processing"] == 1
    assert found["running_jobs", "job"] == found["expired_leases", "job"] == 0


def test_consumers(setup: Setup) -> None:
    setup.add_consumer("web:1")
    setup.add_consumer("web:2", listening=False)
    setup.add_consumer("web:3")
    setup.execute("UPDATE sqlaqueue_consumer SET expires_at = now() - interval '1 s' WHERE id = 'web:3'")
    found = collect(setup.engine, setup.model)
    assert (found["consumers", "job"], found["consumers_listening", "job"]) == (2, 1)


def test_a_paused_queue(setup: Setup) -> None:
    with Session(setup.engine) as session:
        QueueAdmin(session, setup.model).pause()
    assert collect(setup.engine, setup.model)["paused", "job"] == 1


def test_finished_jobs_are_counted_only_if_asked_for(setup: Setup) -> None:
    setup.add(*(setup.model() for _ in range(3)))
    with Session(setup.engine) as session:
        QueueAdmin(session, setup.model).cancel(sa.select(setup.model).where(setup.model.id == 3))
        session.execute(complete(session.scalars(claim(setup.model, 1)).all()))
        session.commit()
    states = {key[2]: value for key, value in collect(setup.engine, setup.model).items() if key[0] == "jobs"}
    assert states.pop("processing", 0) == 0
    assert states == {"pending": 1}
    states = {
        key[2]: value for key, value in collect(setup.engine, setup.model, finished=True).items() if key[0] == "jobs"
    }
    assert states.pop("processing", 0) == 0
    completed = {} if kind_of(setup) == "rows" else {"completed": 1}
    assert states == {"pending": 1, "failed": 0, "cancelled": 1} | completed


def test_keys_at_their_limit(engine: sa.Engine) -> None:
    setup = Setup(engine, make_job("update_status", None, flow_control=[ConcurrencyLimit(1, per="key")]))
    setup.add(*(setup.model(key=key) for key in "aabbc"))
    with Session(engine) as session, session.begin():
        assert len(session.scalars(claim(sa.select(setup.model).where(setup.model.key != "c"), 10)).all()) == 2
    assert collect(engine, setup.model)["keys_at_limit", "job"] == 2


def test_missing_indexes(engine: sa.Engine) -> None:
    setup = Setup.of(engine, "update_status")
    setup.execute("DROP INDEX ix_job_queue_claim")
    setup.execute("DROP INDEX ix_job_queue_lease")
    assert collect(engine, setup.model)["missing_indexes", "job"] == 2


def test_schedules(engine: sa.Engine) -> None:
    model = make_report()
    nightly, weekly = hourly(model, "nightly"), hourly(model, "weekly")
    model.metadata.create_all(engine)
    start(engine, [nightly, weekly])
    execute(engine, "UPDATE sqlaqueue_schedule SET next_tick = now() - interval '2 hours' WHERE name = 'nightly'")
    with Session(engine) as session:
        ScheduleAdmin(session, model).pause("weekly")
    found = collect(engine, model)
    assert 7200 <= found["schedule_late_seconds", "report", "nightly"] < 7300
    assert found["schedule_paused", "report", "nightly"] == 0
    assert found["schedule_late_seconds", "report", "weekly"] == 0
    assert found["schedule_paused", "report", "weekly"] == 1


def test_schedules_of_two_queues_in_one_table_are_exported_once(engine: sa.Engine) -> None:
    first, second = make_two()
    schedules = [hourly(first, "a", values={}), hourly(second, "b", values={})]
    first.metadata.create_all(engine)
    start(engine, schedules)
    found = collect(engine, first, second)
    assert {key[1:] for key in found if key[0] == "schedule_paused"} == {("first", "a"), ("second", "b")}


def test_all_gauges_are_tested() -> None:
    here = Path(__file__).read_text(encoding="utf-8")
    missing = [each.name for each in GAUGES if f'"{each.name.removeprefix("sqlaqueue_")}"' not in here]
    assert missing == []


ROLES = ("priority", "run_at", "created_at")


@pytest.mark.parametrize("left_out", [("priority",), ("run_at",), ("run_at", "created_at"), ROLES])
@pytest.mark.parametrize("kind", ["update_status", "batch_select", "delete_returning", "rows_are_messages"])
def test_models_that_leave_attributes_out(engine: sa.Engine, kind: str, left_out: tuple[str, ...]) -> None:
    setup = Setup(engine, make_job(kind, None, columns=dict.fromkeys(left_out)))
    setup.add(setup.model(), setup.model())
    found = collect(engine, setup.model)
    assert found["scrape_success", "job"] == 1
    assert found["jobs", "job", "pending"] == found["due_jobs", "job"] == 2
    # Without a time of the jobs there is no age; a zero would be wrong.
    assert (("oldest_due_job_age_seconds", "job") in found) == (not {"run_at", "created_at"} <= set(left_out))


@pytest.mark.parametrize("kind", ["update_status", "delete_returning"])
def test_columns_that_may_be_null(engine: sa.Engine, kind: str) -> None:
    class Base(DeclarativeBase):
        pass

    class Job(QueueMixin, Base):
        __tablename__ = "job"
        __queue__ = QueueConfig(strategy=kind, adopt={"status": "state", "run_at": "due", "priority": "rank"})
        id: Mapped[int] = mapped_column(primary_key=True)
        state: Mapped[str] = mapped_column(default="pending")
        due: Mapped[datetime | None] = mapped_column(sa.DateTime(timezone=True))
        rank: Mapped[int | None]
        lease_expires_at: Mapped[datetime | None]

    setup = Setup(engine, Job)
    setup.add(Job(), Job(rank=1), Job(due=AGO), Job(due=AGO, rank=2), Job(due=LATER), Job(due=LATER, rank=3))
    found = collect(engine, Job)
    assert (found["jobs", "job", "pending"], found["due_jobs", "job"]) == (6, 4)
    assert found["oldest_due_job_age_seconds", "job"] >= 3600


# -- what fails does not hide the rest, and results are served again for a while -----------------------------------


@pytest.fixture
def statements(engine: sa.Engine) -> Iterator[list[str]]:
    """The statements that the engine executes."""
    seen: list[str] = []

    def remember(connection: Any, cursor: Any, statement: str, *others: Any) -> None:
        seen.append(statement)

    sa.event.listen(engine, "before_cursor_execute", remember)
    yield seen
    sa.event.remove(engine, "before_cursor_execute", remember)


def test_a_dropped_table_hides_neither_other_queues_nor_other_gauges(engine: sa.Engine, two: tuple[Any, Any]) -> None:
    execute(engine, "DROP TABLE first")
    found = collect(engine, *two)
    assert (found["scrape_success", "first"], found["scrape_success", "second"]) == (0, 1)
    assert ("jobs", "first", "pending") not in found
    assert found["consumers", "first"] == 0
    assert found["jobs", "second", "pending"] == 1


def test_a_locked_table_is_waited_for_no_longer_than_the_timeout(
    engine: sa.Engine, two: tuple[Any, Any], statements: list[str]
) -> None:
    with engine.connect() as connection:
        connection.exec_driver_sql("LOCK TABLE first")
        statements.clear()
        found = collect(engine, *two, statement_timeout=0.3)
        connection.rollback()
    assert (found["scrape_success", "first"], found["scrape_success", "second"]) == (0, 1)
    assert found["jobs", "second", "pending"] == 1
    # Nothing more is read of a queue that has taken as long as the timeout.
    begun = [number for number, statement in enumerate(statements) if "set_config" in statement]
    assert begun[1] - begun[0] == 2
    assert ("consumers", "first") not in found


def test_a_scrape_cannot_write(engine: sa.Engine, two: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def write(reader: queues.GaugeReader, session: Session) -> Iterator[Any]:
        session.execute(sa.insert(two[0]))
        yield from ()

    monkeypatch.setattr(queues, "_PARTS", (*queues._PARTS, write))
    found = collect(engine, *two)
    assert (found["scrape_success", "first"], found["jobs", "first", "pending"]) == (0, 1)
    assert collect(engine, *two)["jobs", "first", "pending"] == 1


def test_a_server_that_does_not_answer(database: Any, two: tuple[Any, Any], caplog: pytest.LogCaptureFixture) -> None:
    engine = sa.create_engine(database.url().replace(database.name, "missing"), poolclass=sa.NullPool)
    registry, collector = CollectorRegistry(), QueueCollector(two, sessionmaker(engine), max_age=0)
    registry.register(collector)
    with caplog.at_level(logging.INFO, "sqlaqueue"):
        found = values(registry.collect())
        assert values(registry.collect())["scrape_success", "first"] == 0
    assert {key[0] for key in found} == {"scrape_success", "scrape_duration_seconds"}
    assert found["scrape_success", "first"] == found["scrape_success", "second"] == 0
    # The first failure of each queue is logged, not those that follow.
    assert [(record.event, record.queue) for record in caplog.records] == [
        ("scrape_failed", "first"),
        ("scrape_failed", "second"),
    ]


@pytest.mark.parametrize("driver", ["psycopg", "psycopg2"])
def test_closed_connections_of_the_pool_are_replaced(database: Database, two: tuple[Any, Any], driver: Any) -> None:
    engine = sa.create_engine(database.url(driver))
    two[0].metadata.create_all(engine)
    collector = QueueCollector(two, sessionmaker(engine), max_age=0, statement_timeout=STATEMENT_TIMEOUT)
    try:
        assert values(collector.collect())["scrape_success", "first"] == 1
        database.kill_backends()
        found = values(collector.collect())
        assert found["scrape_success", "first"] == found["scrape_success", "second"] == 1
    finally:
        engine.dispose()


async def test_closed_connections_of_an_async_pool_are_replaced(database: Database, two: tuple[Any, Any]) -> None:
    plain = sa.create_engine(database.url(), poolclass=sa.NullPool)
    two[0].metadata.create_all(plain)
    engine = create_async_engine(database.url("asyncpg"))
    app = metrics_app(two, async_sessionmaker(engine), max_age=0, statement_timeout=STATEMENT_TIMEOUT)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        for _ in range(2):
            found = parse((await client.get("/metrics")).text)
            assert found["scrape_success", "first"] == found["scrape_success", "second"] == 1
            await asyncio.to_thread(database.kill_backends)
    await engine.dispose()


def test_failure_and_recovery_are_logged_once(
    engine: sa.Engine, two: tuple[Any, Any], caplog: pytest.LogCaptureFixture
) -> None:
    collector = QueueCollector([two[0]], sessionmaker(engine), max_age=0, statement_timeout=STATEMENT_TIMEOUT)
    with caplog.at_level(logging.INFO, "sqlaqueue"):
        for statement in (
            "ALTER TABLE first RENAME TO away",
            "SELECT 1",
            "ALTER TABLE away RENAME TO first",
            "SELECT 1",
        ):
            execute(engine, statement)
            list(collector.collect())
    assert [record.event for record in caplog.records] == ["scrape_failed", "scrape_recovered"]


def test_a_result_is_served_again(engine: sa.Engine, two: tuple[Any, Any], statements: list[str]) -> None:
    collector = QueueCollector(two, sessionmaker(engine), max_age=3600, statement_timeout=STATEMENT_TIMEOUT)
    first = values(collector.collect())
    number = len(statements)
    assert number > 0
    with Session(engine) as session, session.begin():
        session.add(two[0]())
    statements.clear()
    assert values(collector.collect()) == first
    assert statements == []


def test_without_a_maximum_age_each_scrape_reads(engine: sa.Engine, two: tuple[Any, Any]) -> None:
    collector = QueueCollector(two, sessionmaker(engine), max_age=0, statement_timeout=STATEMENT_TIMEOUT)
    assert values(collector.collect())["jobs", "first", "pending"] == 1
    with Session(engine) as session, session.begin():
        session.add(two[0]())
    assert values(collector.collect())["jobs", "first", "pending"] == 2


def test_several_scrapes_at_once_cost_one(engine: sa.Engine, two: tuple[Any, Any], statements: list[str]) -> None:
    collector = QueueCollector(two, sessionmaker(engine), max_age=3600, statement_timeout=STATEMENT_TIMEOUT)
    with engine.connect() as connection:
        connection.exec_driver_sql("LOCK TABLE first")
        threads = [threading.Thread(target=collector.collect) for _ in range(5)]
        for thread in threads:
            thread.start()
        connection.rollback()
    for thread in threads:
        thread.join()
    assert sum("set_config" in statement for statement in statements) == len(two)


def test_registering_reads_nothing(engine: sa.Engine, two: tuple[Any, Any], statements: list[str]) -> None:
    CollectorRegistry(auto_describe=True).register(QueueCollector(two, sessionmaker(engine)))
    assert statements == []


def test_a_function_that_makes_async_sessions(two: tuple[Any, Any]) -> None:
    def make() -> Any:
        return AsyncSession()

    with pytest.raises(ConfigurationError, match=r"makes AsyncSession; give a sessionmaker, or use metrics_app"):
        list(QueueCollector(two, make).collect())


# -- the depth of a queue is read from indexes, and no more of them than is counted --------------------------------

JOBS = 10_000
FILL = """
INSERT INTO job (status, priority, run_at, attempts, max_attempts, created_at)
SELECT %s, number %% 3, now() + number * interval '1 ms' - interval '1 hour', 0, 5, now()
FROM generate_series(1, %s) number
"""


def plan_of_depth(engine: sa.Engine, model: Any, limit: int) -> dict[str, Any]:
    """Execute the statement of a scrape that counts jobs under EXPLAIN, with the settings of its transaction."""
    with sent_statements(engine) as seen:
        assert collect(engine, model, count_limit=limit)["due_jobs", "job"] == limit
    settings, (statement, parameters), *_ = seen
    with engine.connect() as connection:
        connection.exec_driver_sql(*settings)
        explained = connection.exec_driver_sql(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {statement}", parameters)
        plan: dict[str, Any] = explained.scalar_one()[0]["Plan"]
        return plan


@pytest.mark.parametrize("kind", ["update_status", "batch_select", "delete_returning"])
@pytest.mark.parametrize("analyzed", [True, False])
def test_a_backlog_costs_as_much_as_is_counted(engine: sa.Engine, kind: str, *, analyzed: bool) -> None:
    setup = Setup.of(engine, kind, unique=None)
    with engine.begin() as connection:
        connection.exec_driver_sql("ALTER TABLE job SET (autovacuum_enabled = false)")
        columns = {column.name for column in setup.model.__table__.c}
        assert {"status", "priority", "run_at", "attempts", "max_attempts", "created_at"} <= columns
        for status in ("completed", "pending"):
            connection.exec_driver_sql(FILL, (status, JOBS))
    if analyzed:
        with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            connection.exec_driver_sql("VACUUM ANALYZE")
    plan = plan_of_depth(engine, setup.model, 100)
    scans = [node for node in nodes_of(plan) if "Relation Name" in node]
    assert {node["Node Type"] for node in scans} <= {"Index Scan", "Index Only Scan"}
    # The three priorities, a hundred jobs of each, and the first hundred of all; the server rounds the means of loops.
    assert round(sum(node["Actual Rows"] * node["Actual Loops"] for node in scans)) <= 3 + 3 * 100 + 100 + 10
    if analyzed:
        assert buffers_of(plan) < 100


# -- the privileges of an exporter's role, as the page names them --------------------------------------------------

MESSAGES = ("sqlaqueue_message_job", "message")


def test_a_role_that_may_only_read(setup: Setup) -> None:
    """It reads the jobs or their messages, and the tables of pauses and Consumers."""
    setup.add(setup.model())
    role = f"reader_{uuid.uuid4().hex}"
    tables = ["job", "sqlaqueue_control", "sqlaqueue_consumer"]
    tables += [name for name in MESSAGES if name in setup.model.metadata.tables]
    engine = sa.create_engine(setup.engine.url, connect_args={"options": f"-c role={role}"}, poolclass=sa.NullPool)
    setup.execute(f"CREATE ROLE {role}")
    try:
        setup.execute(f"GRANT USAGE ON SCHEMA public TO {role}")
        setup.execute(f"GRANT SELECT ON {', '.join(tables)} TO {role}")
        found = collect(engine, setup.model)
        assert (found["scrape_success", "job"], found["jobs", "job", "pending"]) == (1, 1)
        for table in tables[1:]:
            setup.execute(f"REVOKE SELECT ON {table} FROM {role}")
            assert collect(engine, setup.model)["scrape_success", "job"] == 0
            setup.execute(f"GRANT SELECT ON {table} TO {role}")
    finally:
        setup.execute(f"DROP OWNED BY {role}")
        setup.execute(f"DROP ROLE {role}")


# -- wrong arguments, and a missing extra, are answered with the fix -----------------------------------------------

ENGINE = sa.create_engine("postgresql+psycopg://nowhere.invalid/none")
ASYNC_ENGINE = create_async_engine("postgresql+asyncpg://nowhere.invalid/none")
FIRST, _ = make_two()


async def handle(session: Any, job: Any) -> None:
    raise NotImplementedError


def make_consumer() -> AsyncConsumer[Any]:
    return AsyncConsumer(FIRST, handle, async_sessionmaker(ASYNC_ENGINE))


@pytest.mark.once
@pytest.mark.parametrize("export", [QueueCollector, metrics_app])
@pytest.mark.parametrize(
    ("models", "error", "words"),
    [
        (FIRST, ConfigurationError, "(First): give a list of queue classes"),
        (5, ConfigurationError, "(5): give a list of queue classes"),
        ([], ConfigurationError, "([]): give at least one queue class"),
        ([int], NotAQueueError, "int is not a queue"),
        ([FIRST, make_consumer()], NotAQueueError, "is not a mapped class"),
        ([make_job("update_status"), make_job("batch_select")], ConfigurationError, "are both named 'job'"),
    ],
)
def test_models(export: Any, models: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error) as raised:
        export(models, sessionmaker(ENGINE))
    assert words in str(raised.value)
    if error is ConfigurationError:
        assert export.__name__ in str(raised.value)


@pytest.mark.once
@pytest.mark.parametrize("export", [QueueCollector, metrics_app])
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"statement_timeout": 0}, "(statement_timeout=0): give more than zero"),
        ({"statement_timeout": -1}, "(statement_timeout=...) must be seconds"),
        ({"max_age": "soon"}, "(max_age=...) must be seconds"),
        ({"count_limit": 0}, "(count_limit=0): give an integer of 1 or more"),
        ({"count_limit": 1.5}, "(count_limit=1.5): give an integer of 1 or more"),
    ],
)
def test_options(export: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        export([FIRST], sessionmaker(ENGINE), **options)
    assert f"{export.__name__}{words}" in str(raised.value)


@pytest.mark.once
@pytest.mark.parametrize("given", [async_sessionmaker(ASYNC_ENGINE), ASYNC_ENGINE, make_consumer()])
def test_a_registry_collects_in_sync_code(given: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"use metrics_app\(models, async_sessionmaker\(engine\)\)"):
        QueueCollector([FIRST], given)


@pytest.mark.once
@pytest.mark.parametrize(
    ("given", "words"),
    [
        (ENGINE, "give sessionmaker(engine)"),
        (ASYNC_ENGINE, "give async_sessionmaker(engine)"),
        ("postgresql://user:secret@host/app", "the session factory is a str"),
    ],
)
def test_session_factories(given: Any, words: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        metrics_app([FIRST], given)
    assert words in str(raised.value)
    assert "secret" not in str(raised.value)


@pytest.mark.once
def test_the_limit_of_a_depth() -> None:
    with sessionmaker(ENGINE)() as session, pytest.raises(StatementError, match=r"depth\(limit=0\): give an integer"):
        QueueAdmin(session, FIRST).depth(limit=0)


@pytest.mark.once
@pytest.mark.parametrize("program", ["import sqlaqueue.prometheus", "from sqlaqueue.cli import main; main()"])
def test_a_missing_extra(program: str) -> None:
    code = f"import sys; sys.modules['prometheus_client'] = None; {program}"
    done = subprocess.run(
        [sys.executable, "-c", code, "metrics", "--alerts"], capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    assert "sqlaqueue.prometheus needs prometheus_client: pip install 'sqlaqueue[prometheus]'" in done.stderr
    assert "main" in program or done.stderr.count("Error") == 1 or "ModuleNotFoundError" in done.stderr
    if "main" in program:
        assert len(done.stderr.splitlines()) == 1
