"""What the tests of the dashboard do with jobs: enqueue, end and read them; as a program, run them."""

import sys
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session, sessionmaker

from sqlaqueue import Consumer, Unique, claim, complete, fail, release
from sqlaqueue.admin import QueueAdmin
from sqlaqueue.mapping.mixin import spec_of
from sqlaqueue.queue.run import key_text
from sqlaqueue.queue.spec import QueueSpec
from sqlaqueue.web.data import failures, job_sources, past, reader
from sqlaqueue.web.data.job_columns import JobColumns, columns_of
from sqlaqueue.web.data.job_filters import parse_filter
from sqlaqueue.web.data.job_pages import JobPage, parse_request, read_page, set_planner
from sqlaqueue.web.data.reader import QueueReader
from sqlaqueue.web.settings import Settings
from tests.admin.models import Setup
from tests.models import execute, sent_statements
from tests.strategies.conftest import buffers_of, nodes_of
from tests.unique.models import make_job

T = TypeVar("T")

KINDS = ("update_status", "batch_select", "delete_returning", "existing_messages", "rows_are_messages")
KEEPING_ROWS = KINDS[:-1]
HISTORY = {"attempt_history": timedelta(days=14)}
XSS = "<script>alert('x')</script>\"'><img src=x onerror=alert(1)>"


def created(engine: sa.Engine, model: Any) -> Any:
    model.metadata.create_all(engine)
    return model


def new_queue(engine: sa.Engine, kind: str = "update_status", unique: Unique | None = None, **options: Any) -> Any:
    """Return a class of jobs with a key and a note, whose tables are created."""
    return created(engine, make_job(kind, unique=unique, **options))


def columns(model: Any, *redact: str) -> JobColumns:
    return columns_of(spec_of(model), Settings.of([model], redact, {}, ()).is_redacted)


def wanted(model: Any, *pairs: tuple[str, str]) -> Any:
    return parse_filter(columns(model), pairs)


def add(engine: sa.Engine, *jobs: Any) -> None:
    with Session(engine) as session:
        session.add_all(jobs)
        session.commit()
        metadata = type(jobs[0]).metadata
        if "message" in metadata.tables:
            message = metadata.tables["message"]
            session.execute(sa.insert(message), [{"job_id": job.id} for job in jobs])
            session.commit()


def settle(engine: sa.Engine, model: Any, number: int, verb: Callable[..., Any], **options: Any) -> None:
    with Session(engine) as session:
        claimed = session.scalars(claim(model, number)).all()
        if not spec_of(model).strategy.holds_transaction:
            session.commit()
        assert len(claimed) == number
        session.execute(verb(claimed, **options))
        session.commit()


def fail_jobs(engine: sa.Engine, model: Any, number: int = 1, error: str = "ValueError: no stock") -> None:
    settle(engine, model, number, fail, error=error)


def complete_jobs(engine: sa.Engine, model: Any, number: int = 1) -> None:
    settle(engine, model, number, complete)


@contextmanager
def claimed(engine: sa.Engine, model: Any, number: int = 1) -> Iterator[list[Any]]:
    """Hold claimed jobs: by a lease or in an open transaction."""
    with Session(engine) as session:
        jobs = list(session.scalars(claim(model, number)).all())
        if not spec_of(model).strategy.holds_transaction:
            session.commit()
        yield jobs
        if not spec_of(model).strategy.holds_transaction:
            session.execute(release(jobs))
            session.commit()
        session.rollback()


def states(engine: sa.Engine, model: Any) -> dict[str, str]:
    """Return the state of each job, dead letters included, by its key."""
    with Session(engine) as session:
        return {key_text(job.key): job.state for job in QueueAdmin(session, model).jobs(limit=10_000)}


# -- ended jobs, and what was read of them ----------------------------------------------------------------------------


def finish(setup: Setup, state: str, *ago: float, error: str | None = None, **columns: float) -> None:
    """Insert a job in a state for each number of seconds since it has ended.

    :param columns: other moments, as seconds before the end.
    """
    spec: QueueSpec = spec_of(setup.model)
    table = spec.table
    with setup.engine.begin() as connection:
        for seconds in ago:
            ended = sa.text(f"now() - interval '{seconds} seconds'")
            values: dict[str, Any] = {
                spec.columns["status"].name: spec.status_value(state),
                spec.columns["finished_at"].name: ended,
            }
            for role, before in columns.items():
                values[spec.columns[role].name] = sa.text(f"now() - interval '{seconds + before} seconds'")
            if error is not None:
                values[spec.columns["last_error"].name] = error
            connection.execute(sa.insert(table).values(values))


def attempt(
    setup: Setup, outcome: str, *ago: float, key: Any = 1, number: int = 1, took: float = 1, **more: Any
) -> None:
    """Insert an ended attempt for each number of seconds since it has ended."""
    for seconds in ago:
        setup.execute(
            "INSERT INTO sqlaqueue_attempt (queue, key, attempt, started_at, ended_at, outcome, error) VALUES "
            "(:queue, CAST(:key AS jsonb), :number, now() - make_interval(secs => :started), "
            "now() - make_interval(secs => :ended), :outcome, :error)",
            queue=spec_of(setup.model).name,
            key=key if isinstance(key, str) else f"[{key}]",
            number=number,
            started=seconds + took,
            ended=seconds,
            outcome=outcome,
            error=more.get("error"),
        )


FINISHED = """
INSERT INTO job (status, priority, run_at, attempts, max_attempts, created_at, finished_at, last_error)
SELECT CASE WHEN n % 10 = 0 THEN 'failed' ELSE 'completed' END, 0, ended, 1, 5, ended, ended,
       CASE WHEN n % 10 = 0 THEN 'ValueError: ' || n END
FROM (SELECT n, now() - n * interval '100 ms' AS ended FROM generate_series(1, :number) AS n) AS x
"""


def fill_finished(setup: Setup, number: int, *, attempts: bool = False) -> None:
    """Insert finished jobs, ten for each second before now, every tenth of them failed; and an attempt of each."""
    setup.execute(FINISHED, number=number)
    if attempts:
        setup.execute(
            "INSERT INTO sqlaqueue_attempt (queue, key, attempt, started_at, ended_at, outcome) "
            "SELECT 'job', jsonb_build_array(id), 1, finished_at, finished_at, status FROM job"
        )
    execute(setup.engine.execution_options(isolation_level="AUTOCOMMIT"), "VACUUM ANALYZE")


def read(engine: sa.Engine, model: Any, operation: Callable[..., T], *args: Any, **options: Any) -> T:
    """Return what an operation reads by a reader of a queue."""
    with Session(engine) as session:
        return operation(QueueReader.begin(session, spec_of(model)), *args, **options)


@dataclass
class Reads:
    """The rows that statements have read, by table."""

    by_scan: dict[str, int]
    by_index: dict[str, int]


@contextmanager
def counting_rows(engine: sa.Engine) -> Iterator[Reads]:
    """Count the rows that the statements of a block read; each connection of the engine must end in it."""
    before, reads = _rows_read(engine), Reads({}, {})
    yield reads
    after = _rows_read(engine)
    for name, (scanned, fetched) in after.items():
        old = before.get(name, (0, 0))
        reads.by_scan[name], reads.by_index[name] = scanned - old[0], fetched - old[1]


def _rows_read(engine: sa.Engine) -> dict[str, tuple[int, int]]:
    # Other connections of the pool report what they have counted when they end.
    engine.dispose()
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        me = sa.text(
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
        while connection.scalar(me):
            pass
        rows = connection.exec_driver_sql(
            "SELECT relname, seq_tup_read, coalesce(idx_tup_fetch, 0) FROM pg_stat_user_tables"
        )
        return {row[0]: (row[1], row[2]) for row in rows}


@contextmanager
def reading_role(engine: sa.Engine, *statements: str) -> Iterator[sa.Engine]:
    """Return an engine whose role may read all tables and change none.

    :param statements: SQL that changes this, with ``{role}`` for the name of the role.
    """
    # Other processes of the tests use the same server.
    role = f"reader_{uuid.uuid4().hex}"
    grants = (
        f"CREATE ROLE {role}",
        f"GRANT USAGE ON SCHEMA public TO {role}",
        f"GRANT SELECT ON ALL TABLES IN SCHEMA public TO {role}",
    )
    for statement in (*grants, *(each.format(role=role) for each in statements)):
        execute(engine, statement)
    limited = sa.create_engine(engine.url, poolclass=sa.NullPool)

    @sa.event.listens_for(limited, "connect")
    def become(connection: Any, _: Any) -> None:
        connection.execute(f"SET ROLE {role}")
        connection.commit()

    try:
        yield limited
    finally:
        execute(engine, f"DROP OWNED BY {role}; DROP ROLE {role}")


def no_table_is_small(monkeypatch: pytest.MonkeyPatch, **limits: int) -> None:
    """Treat the few rows of a test as many.

    :param limits: limits of ``sqlaqueue.web.data.past`` and of its ``failures``, which fewer rows reach.
    """
    monkeypatch.setattr(reader, "SMALL_TABLE", -1)
    for name, limit in limits.items():
        for module in (past, failures):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, limit)


# -- lists of jobs ---------------------------------------------------------------------------------------------------


def page(
    engine: sa.Engine, model: Any, *pairs: tuple[str, str], size: int = 50, redacted: Iterable[str] = ()
) -> JobPage:
    job_sources._known.clear()
    with Session(engine) as session:
        return read_page(session, parse_request(columns(model, *redacted), pairs), size)


def pages(
    engine: sa.Engine,
    model: Any,
    *pairs: tuple[str, str],
    size: int = 50,
    before: str | None = None,
    backwards: bool = False,
) -> Iterator[JobPage]:
    """Walk over all pages of a list, from its beginning or backwards from a cursor."""
    cursor = before
    for _ in range(10_000):
        at = [] if cursor is None else [("before" if backwards else "after", cursor)]
        found = page(engine, model, *pairs, *at, size=size)
        yield found
        cursor = found.previous if backwards else found.next
        if cursor is None:
            return
    raise AssertionError("the list has no end")


def keys(found: Iterable[JobPage]) -> list[str]:
    return [job.key for each in found for job in each.jobs]


def keys_by_sql(engine: sa.Engine, statement: str) -> list[str]:
    with engine.connect() as connection:
        return [str(key) for key in connection.scalars(sa.text(statement))]


def make_window_small(monkeypatch: pytest.MonkeyPatch, window: int) -> None:
    """Let lists examine fewer rows at once."""
    for module in ("job_windows", "job_pages"):
        monkeypatch.setattr(f"sqlaqueue.web.data.{module}.WINDOW", window)


def plan_of(engine: sa.Engine, model: Any, statement: str, parameters: Any) -> Any:
    with Session(engine) as session:
        set_planner(session, columns(model))
        explain = f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {statement}"
        return session.connection().exec_driver_sql(explain, parameters).scalar_one()[0]["Plan"]


def cost(engine: sa.Engine, model: Any, *pairs: tuple[str, str]) -> tuple[int, int]:
    """Return the buffers of all statements of a page, and the rows that their scans of the table return."""
    with sent_statements(engine) as sent:
        page(engine, model, *pairs)
    buffers, rows = 0, 0.0
    for statement, parameters in sent:
        if "FROM row" not in statement:
            continue
        plan = plan_of(engine, model, statement, parameters)
        buffers += buffers_of(plan)
        scans = [node for node in nodes_of(plan) if "Relation Name" in node]
        assert {node["Node Type"] for node in scans} <= {"Index Scan", "Index Only Scan"}, statement
        for node in scans:
            rows += (node["Actual Rows"] + node.get("Rows Removed by Filter", 0)) * node["Actual Loops"]
    return buffers, round(rows)


# -- a worker ----------------------------------------------------------------------------------------------------


RAN = "CREATE TABLE ran (id bigint NOT NULL, attempt int, pid int NOT NULL, at timestamptz NOT NULL)"
"""The table with a row for each call of a handler."""

WRITE = sa.text("INSERT INTO ran VALUES (:id, :attempt, pg_backend_pid(), clock_timestamp())")


def run_jobs(url: str, kind: str) -> None:
    engine = sa.create_engine(url)
    # A call is recorded at once, whatever becomes of the job's transaction.
    own = sa.create_engine(url, isolation_level="AUTOCOMMIT")

    def handler(_: Session, job: Any) -> None:
        with own.connect() as connection:
            connection.execute(WRITE, {"id": job.id, "attempt": getattr(job, "attempts", None)})
        time.sleep(0.02)

    Consumer(make_job(kind, unique=None), handler, sessionmaker(engine), concurrency=2).run()
    own.dispose()
    engine.dispose()


if __name__ == "__main__":
    run_jobs(*sys.argv[1:])
