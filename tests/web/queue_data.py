"""What the tests of the pages about queues put into the database, and what these have read of it."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from sqlaqueue.mapping.mixin import spec_of
from sqlaqueue.queue.spec import QueueSpec
from sqlaqueue.web.data import reader
from sqlaqueue.web.data.reader import QueueReader
from tests.admin.models import Setup

T = TypeVar("T")

HISTORY = {"attempt_history": timedelta(days=14)}


def read(engine: sa.Engine, model: Any, operation: Callable[..., T], *args: Any, **options: Any) -> T:
    """Return what an operation reads by a reader of a queue."""
    with Session(engine) as session:
        return operation(QueueReader.begin(session, spec_of(model)), *args, **options)


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
def counting_statements(engine: sa.Engine) -> Iterator[list[str]]:
    """Collect the statements of a block."""
    sent: list[str] = []

    def remember(_: Any, __: Any, statement: str, *___: Any) -> None:
        sent.append(statement)

    sa.event.listen(engine, "before_cursor_execute", remember)
    try:
        yield sent
    finally:
        sa.event.remove(engine, "before_cursor_execute", remember)


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
    with engine.begin() as connection:
        for statement in (*grants, *(each.format(role=role) for each in statements)):
            connection.exec_driver_sql(statement)
    limited = sa.create_engine(engine.url, poolclass=sa.NullPool)

    @sa.event.listens_for(limited, "connect")
    def become(connection: Any, _: Any) -> None:
        connection.execute(f"SET ROLE {role}")
        connection.commit()

    try:
        yield limited
    finally:
        with engine.begin() as connection:
            connection.exec_driver_sql(f"DROP OWNED BY {role}; DROP ROLE {role}")


def no_table_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat the few rows of a test as many."""
    monkeypatch.setattr(reader, "SMALL_TABLE", -1)


FILL = """
INSERT INTO job (status, priority, run_at, attempts, max_attempts, created_at, finished_at, last_error)
SELECT CASE WHEN n % 10 = 0 THEN 'failed' ELSE 'completed' END, 0, ended, 1, 5, ended, ended,
       CASE WHEN n % 10 = 0 THEN 'ValueError: ' || n END
FROM (SELECT n, now() - n * interval '100 ms' AS ended FROM generate_series(1, :number) AS n) AS x
"""


def fill(setup: Setup, number: int) -> None:
    """Insert finished jobs, ten for each second before now, every tenth of them failed."""
    setup.execute(FILL, number=number)
    with setup.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.exec_driver_sql("VACUUM ANALYZE")
