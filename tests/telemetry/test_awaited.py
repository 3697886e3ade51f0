"""Links of a run to what its job has waited for."""

import logging
import secrets
from collections.abc import Iterator
from typing import Any

import pytest
import sqlalchemy as sa
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, sessionmaker

from sqlaqueue import AsyncConsumer, Consumer
from sqlaqueue.mapping.mixin import spec_of
from sqlaqueue.otel import instrument, instrument_sessions
from sqlaqueue.otel.spans import MOST_AWAITED
from tests.models import execute, sent_statements
from tests.servers import Database
from tests.telemetry.conftest import TRACED, Recorded, Sessions
from tests.waits.models import STRATEGIES, make_batch, make_dependent

TRACE = {"extra_columns": TRACED}


@pytest.fixture
def own(database: Database) -> Iterator[sa.Engine]:
    engine = sa.create_engine(database.url(), pool_size=2, max_overflow=0)
    yield engine
    engine.dispose()


def made(engine: sa.Engine, classes: tuple[Any, Any]) -> tuple[Any, Any]:
    classes[0].metadata.create_all(engine)
    return classes


def batch_of(engine: sa.Engine, strategy: str = "update_status", **members: Any) -> tuple[Any, Any]:
    traced = {"extra_columns": ("is_open", *TRACED), "strategy": strategy}
    return made(engine, make_batch(config=traced, members=TRACE | members))


def enqueued(sessions: Sessions, recorded: Recorded, *jobs: Any) -> ReadableSpan:
    """Enqueue jobs in a span of a program, and return the span that they store."""
    name = f"send {type(jobs[0]).__tablename__}"
    with recorded.tracer_provider.get_tracer("application").start_as_current_span("request"), sessions.begin() as own:
        own.add_all(jobs)
    return recorded.spans(name)[-1]


def run(consumer: Any, recorded: Any, span: str = "process batch") -> dict[int, str | None]:
    """Let a Consumer run its jobs, and return the links of the span: the relationships by the ids of linked spans."""
    instrument(consumer, **recorded.providers)
    assert consumer.drain() > 0
    return links_of(recorded, span)


def links_of(recorded: Recorded, name: str) -> dict[int, str | None]:
    [span] = recorded.spans(name)
    return {link.context.span_id: (link.attributes or {}).get("sqlaqueue.waits_for") for link in span.links}


def id_of(span: ReadableSpan) -> int:
    return span.get_span_context().span_id


def instrumented(engine: sa.Engine, recorded: Recorded) -> Sessions:
    sessions = sessionmaker(engine)
    instrument_sessions(sessions, **recorded.providers)
    return sessions


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_batch_has_links_to_what_enqueued_its_members(own: sa.Engine, recorded: Recorded, strategy: str) -> None:
    batch, member = batch_of(own, strategy)
    sessions = instrumented(own, recorded)
    began = enqueued(sessions, recorded, batch(id=1, is_open=True))
    enqueued(sessions, recorded, batch(id=2, is_open=True), member(batch_id=2))
    added = [enqueued(sessions, recorded, member(batch_id=1), member(batch_id=1)) for _ in range(2)]
    enqueued(sessions, recorded, member())
    execute(own, "UPDATE member SET status = 'completed'; UPDATE batch SET is_open = false WHERE id = 1")
    found = run(Consumer(batch, lambda *_: None, sessions, concurrency=1), recorded)
    assert found == {id_of(began): None, **{id_of(span): "members" for span in added}}
    assert execute(own, "SELECT status FROM batch WHERE id = 1") == "completed"


def test_a_job_has_links_to_its_parents(own: sa.Engine, recorded: Recorded) -> None:
    parent, child = made(own, make_dependent(config=TRACE, parents=TRACE))
    sessions = instrumented(own, recorded)
    first, second = (enqueued(sessions, recorded, parent(id=number)) for number in (1, 2))
    began = enqueued(sessions, recorded, child(id=1, a_id=1, b_id=2))
    execute(own, "UPDATE parent SET status = 'completed'")
    found = run(Consumer(child, lambda *_: None, sessions, concurrency=1), recorded, "process child")
    assert found == {id_of(began): None, id_of(first): "a", id_of(second): "b"}


def test_jobs_that_a_handler_takes_together(own: sa.Engine, recorded: Recorded) -> None:
    batch, member = batch_of(own)
    sessions = instrumented(own, recorded)
    enqueued(sessions, recorded, *(batch(id=number, is_open=True) for number in (1, 2)))
    added = [enqueued(sessions, recorded, member(batch_id=number)) for number in (1, 2)]
    execute(own, "UPDATE member SET status = 'completed'; UPDATE batch SET is_open = false")
    found = run(Consumer(batch, lambda *_: None, sessions, batch=True, batch_size=5, concurrency=1), recorded)
    assert {span for span, name in found.items() if name} == {id_of(span) for span in added}


@pytest.mark.parametrize("strategy", ["update_status", "batch_select"])
async def test_an_async_consumer(database: Database, own: sa.Engine, recorded: Recorded, strategy: str) -> None:
    batch, member = batch_of(own, strategy)
    sessions = instrumented(own, recorded)
    began = enqueued(sessions, recorded, batch(id=1, is_open=True))
    added = enqueued(sessions, recorded, member(batch_id=1))
    execute(own, "UPDATE member SET status = 'completed'; UPDATE batch SET is_open = false")
    engine = create_async_engine(database.url("asyncpg"), pool_size=2, max_overflow=0)

    async def handler(*_: Any) -> None:
        """Do nothing."""

    consumer = AsyncConsumer(batch, handler, async_sessionmaker(engine), concurrency=1)
    instrument(consumer, **recorded.providers)
    assert await consumer.drain() == 1
    assert links_of(recorded, "process batch") == {id_of(began): None, id_of(added): "members"}
    await engine.dispose()


# -- what it costs ---------------------------------------------------------------------------------------------------


def test_nothing_is_read_that_no_span_needs(own: sa.Engine, recorded: Recorded) -> None:
    batch, member = made(own, make_batch(config=TRACE))
    sessions = sessionmaker(own)
    execute(own, "INSERT INTO batch (id) SELECT generate_series(1, 3)")

    def statements(consumer: Any) -> list[str]:
        with sent_statements(own) as sent:
            consumer.drain()
        return [each[0] for each in sent if "sqlaqueue_traces" in each[0]]

    consumer = Consumer(batch, lambda *_: None, sessions)
    instrument(consumer, **recorded.providers)
    assert statements(consumer) == [], "the members store no trace"
    assert len(recorded.spans("process batch")) == 3
    batch.metadata.drop_all(own)
    batch, member = batch_of(own)
    execute(own, "INSERT INTO batch (id) SELECT generate_series(1, 3)")
    unsampled = TracerProvider(sampler=ALWAYS_OFF)
    consumer = Consumer(batch, lambda *_: None, sessions)
    instrument(consumer, tracer_provider=unsampled, meter_provider=recorded.meter_provider)
    assert statements(consumer) == [], "nothing records the span"
    execute(own, "INSERT INTO batch (id) SELECT generate_series(4, 6)")
    consumer = Consumer(batch, lambda *_: None, sessions)
    instrument(consumer, **recorded.providers)
    assert len(statements(consumer)) == 3
    execute(own, "INSERT INTO member DEFAULT VALUES")
    consumer = Consumer(member, lambda *_: None, sessions)
    instrument(consumer, **recorded.providers)
    assert statements(consumer) == []


def test_a_batch_of_many_traces_has_a_hundred_links(own: sa.Engine, recorded: Recorded) -> None:
    batch, _ = batch_of(own)
    sessions = sessionmaker(own)
    execute(own, "INSERT INTO batch (id, is_open) VALUES (1, true)")
    trace = "'00-' || lpad(to_hex(n), 32, '0') || '-' || lpad(to_hex(n), 16, '0') || '-01'"
    insert = "INSERT INTO member (batch_id, status, traceparent) SELECT 1, 'completed',"
    execute(own, f"{insert} {trace} FROM generate_series(1, 3000) AS n")
    execute(own, "UPDATE batch SET is_open = false")
    with sent_statements(own) as sent:
        found = run(Consumer(batch, lambda *_: None, sessions), recorded)
    assert len(found) == MOST_AWAITED == 100
    [(statement, parameters)] = [each for each in sent if "sqlaqueue_traces" in each[0]]
    with own.connect() as connection:
        plan = connection.exec_driver_sql(f"EXPLAIN (ANALYZE, FORMAT JSON) {statement}", parameters).scalar_one()
    members = [node for node in _nodes(plan[0]["Plan"]) if node.get("Relation Name") == "member"]
    assert sum(node["Actual Rows"] * node["Actual Loops"] for node in members) <= 1000


def _nodes(plan: Any) -> Iterator[Any]:
    yield plan
    for each in plan.get("Plans", ()):
        yield from _nodes(each)


# -- what it must not do ---------------------------------------------------------------------------------------------


def test_a_handler_under_a_lease_begins_its_own_transaction(own: sa.Engine, recorded: Recorded) -> None:
    batch, _ = batch_of(own)
    execute(own, "INSERT INTO batch (id) VALUES (1)")
    seen = []

    def handler(session: Session, _: Any) -> None:
        seen.append(session.in_transaction())
        options = {"isolation_level": "SERIALIZABLE"}
        connection = session.connection(execution_options=options)
        seen.append(connection.exec_driver_sql("SHOW transaction_isolation").scalar())

    consumer = Consumer(batch, handler, sessionmaker(own), concurrency=1)
    instrument(consumer, **recorded.providers)
    with sent_statements(own) as sent:
        assert consumer.drain() == 1
    assert seen == [False, "serializable"]
    assert [each for each in sent if "sqlaqueue_traces" in each[0]]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_job_runs_whose_links_cannot_be_read(
    database: Database, own: sa.Engine, recorded: Recorded, strategy: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A worker needs no privilege on the traces of what it waits for."""
    batch, _ = batch_of(own, strategy)
    execute(own, "INSERT INTO batch (id) VALUES (1), (2)")
    role = f"worker_{secrets.token_hex(4)}"
    execute(own, f"CREATE ROLE {role}")
    for each in spec_of(batch).strategy.required_privileges(spec_of(batch)):
        columns = "" if each.whole else f" ({', '.join(column.name for column in each.columns)})"
        execute(own, f"GRANT {each.privilege}{columns} ON {each.table.name} TO {role}")
    worker = sa.create_engine(database.url(), connect_args={"options": f"-c role={role}"})
    consumer = Consumer(batch, lambda session, job: session.execute(sa.text("SELECT 1")), sessionmaker(worker))
    instrument(consumer, **recorded.providers)
    try:
        with caplog.at_level(logging.ERROR, "sqlaqueue"):
            assert consumer.drain() == 2
        assert execute(own, "SELECT count(*) FROM batch WHERE status = 'completed'") == 2
        assert len(recorded.spans("complete batch")) == 2
        events = [getattr(record, "event", None) for record in caplog.records]
        assert events == ["telemetry_failed"] * 2
    finally:
        worker.dispose()
        execute(own, f"DROP OWNED BY {role}; DROP ROLE {role}")
