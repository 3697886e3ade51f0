"""``-x live=table``: steps that do not block other sessions, and can be run again after an interruption."""

import contextlib
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa
from alembic.util import CommandError
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session, mapped_column

from sqlaqueue import QueueConfig, claim, complete, reconcile
from sqlaqueue.alembic import implementations
from tests.alembic.conftest import Project, dump, enqueue, execute, in_any_order, order, run_all, wanted
from tests.servers import Database

BY_ROW = """sa.text("CASE WHEN sent THEN 'completed' ELSE 'pending' END")"""


def sent() -> Any:
    return mapped_column(sa.Boolean, nullable=False, server_default=sa.false())


def upgrade_with_interruption(project: Project) -> None:
    """Interrupt an upgrade before its last commit, and run it again."""
    project.edit("\ndef downgrade", "    raise InterruptedError\n\n\ndef downgrade")
    with pytest.raises(InterruptedError):
        project.upgrade()
    project.edit("    raise InterruptedError\n", "")
    project.upgrade()
    project.check()


@pytest.mark.parametrize("answer", ["'pending'", BY_ROW], ids=["one state", "by row"])
def test_an_interrupted_adoption_can_be_run_again(
    database: Database, make: Any, engine: sa.Engine, answer: str
) -> None:
    """Together with another new table, and with a dropped column that the expression for the status reads."""
    project = make(order(None, sent=sent()))
    execute(engine, "INSERT INTO orders (article) VALUES ('1')")
    before = dump(database)
    model = order(QueueConfig(strategy="delete_returning"), kind=mapped_column(sa.Text, index=True))
    sa.Table(
        "other", model.metadata, sa.Column("id", sa.Integer, primary_key=True), sa.Column("x", sa.Text, index=True)
    )
    project.revise("adopt", model, live="orders")
    project.edit("existing_rows=...", f"existing_rows={answer}")
    upgrade_with_interruption(project)
    assert in_any_order(dump(database)) == in_any_order(wanted(model, database))
    assert run_all(engine, model) == ["1"]
    project.downgrade()
    assert in_any_order(dump(database)) == in_any_order(before)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        pytest.param({}, {"columns": {"priority": None}}, id="drop a column"),
        pytest.param(
            {"strategy": "delete_returning", "columns": {"priority": None}},
            {},
            id="change the strategy and add a column",
        ),
        *(
            pytest.param(*pair, id=name, marks=pytest.mark.thorough)
            for name, pair in {
                "add a column": ({"columns": {"priority": None}}, {}),
                "add messages": ({}, {"strategy": "delete_returning"}),
                "drop messages": ({"strategy": "delete_returning"}, {}),
                "drop a column of messages": (
                    {"strategy": "delete_returning"},
                    {"strategy": "delete_returning", "columns": {"priority": None}},
                ),
            }.items()
        ),
    ],
)
def test_an_interrupted_change_can_be_run_again(
    database: Database, make: Any, engine: sa.Engine, old: dict[str, Any], new: dict[str, Any]
) -> None:
    before, after = order(QueueConfig(**old)), order(QueueConfig(**new))
    project = make(before)
    enqueue(engine, before, "1", "2")
    schema = dump(database)
    project.revise("change", after, live="orders")
    upgrade_with_interruption(project)
    assert in_any_order(dump(database)) == in_any_order(wanted(after, database))
    with Session(engine) as session:
        assert [job.article for job in session.scalars(claim(after, 5))] == ["1", "2"]
    project.downgrade()
    assert in_any_order(dump(database)) == in_any_order(schema)
    assert run_all(engine, before) == ["1", "2"]


def test_batches_are_logged(
    make: Any, engine: sa.Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """On the driver that hands on what the server says meanwhile."""
    monkeypatch.setattr(implementations, "PAGES_PER_BATCH", 1)
    monkeypatch.setattr(implementations, "SECONDS_BETWEEN_NOTICES", 0)
    project = make(order(None, sent=sent()))
    execute(engine, "INSERT INTO orders (article) SELECT repeat('x', 1000) FROM generate_series(1, 20)")
    project.revise("adopt", order(QueueConfig(strategy="delete_returning")), live="orders")
    project.edit("existing_rows=...", f"existing_rows={BY_ROW}")
    with caplog.at_level(logging.INFO, "alembic.sqlaqueue"):
        project.upgrade()
    said = [record.message for record in caplog.records if record.name == "alembic.sqlaqueue"]
    assert [each for each in said if "done" in each][:3] == [
        f"orders: {page} of 3 pages are done" for page in range(1, 4)
    ]
    project.check()


def test_an_index_keeps_its_options(database: Database, make: Any) -> None:
    """An index of the application on the same table."""
    options: dict[str, Any] = {
        "postgresql_using": "gin",
        "postgresql_ops": {"tags": "array_ops"},
        "postgresql_with": {"fastupdate": "off"},
    }
    project = make(order(None, tags=mapped_column(sa.ARRAY(sa.Text))))
    indexes = (
        sa.Index("ix_tags", "tags", **options),
        sa.Index("ix_article", sa.text("lower(article)"), unique=True, postgresql_include=["tags"]),
    )
    model = order(QueueConfig(), __table_args__=indexes, tags=mapped_column(sa.ARRAY(sa.Text)))
    project.revise("adopt", model, live="orders")
    project.edit("existing_rows=...", "existing_rows='completed'")
    project.upgrade()
    assert in_any_order(dump(database)) == in_any_order(wanted(model, database))


@pytest.mark.parametrize("strategy", ["update_status", "delete_returning"])
def test_a_partitioned_table(database: Database, make: Any, engine: sa.Engine, strategy: str) -> None:
    def model(config: QueueConfig | None) -> type[Any]:
        return order(config, __table_args__={"postgresql_partition_by": "HASH (id)"})

    def include_name(name: str | None, kind: str, _: Any) -> bool:
        return kind != "table" or not (name or "").startswith("part")

    project = make(model(None), include_name=include_name)
    execute(
        engine,
        *(f"CREATE TABLE part{n} PARTITION OF orders FOR VALUES WITH (MODULUS 2, REMAINDER {n})" for n in range(2)),
        "INSERT INTO orders SELECT n, n FROM generate_series(1, 100) AS n",
    )
    queue = model(QueueConfig(strategy=strategy))
    project.metadata = queue.metadata
    if strategy == "update_status":
        with pytest.raises(CommandError, match="-x live=orders: the table is partitioned"):
            project.revise("adopt", live="orders")
        return
    project.revise("adopt", live="orders")
    answer = """sa.text("CASE WHEN id % 50 = 0 THEN 'pending' ELSE 'completed' END")"""
    project.edit("existing_rows=...", f"existing_rows={answer}")
    project.upgrade()
    project.check()
    assert run_all(engine, queue) == ["100", "50"]


def test_a_misspelled_table_is_refused(make: Any) -> None:
    project = make(order(QueueConfig()))
    project.metadata = order(QueueConfig(notify=False)).metadata
    with pytest.raises(CommandError, match="-x live=order, theirs: no queue of the models has a table of that name"):
        project.revise("switch", live="order,orders,theirs")


# -- a large table becomes a queue while other sessions read it, write it, and run its jobs ----------------------------
# Each of these sessions has a lock_timeout of one second: a migration that blocks them for longer fails the test.

UNSENT = 500
SENT = "SELECT 'old ' || n, n > :unsent FROM generate_series(1, :rows) AS n"
HAS_STATUS = "SELECT 1 FROM pg_attribute WHERE attrelid = 'orders'::regclass AND attname = 'status'"
MIGRATION_WAITS = """
    SELECT 1 FROM pg_locks
    WHERE relation = 'orders'::regclass AND NOT granted AND mode IN ('AccessExclusiveLock', 'ShareRowExclusiveLock')
"""
PAUSE_BEFORE_TRIGGERS = """
    CREATE FUNCTION wait_here() RETURNS event_trigger LANGUAGE plpgsql
    AS 'BEGIN PERFORM pg_advisory_xact_lock(1); END';
    CREATE EVENT TRIGGER wait_here ON ddl_command_start WHEN TAG IN ('CREATE FUNCTION') EXECUTE FUNCTION wait_here()
"""
MIGRATION_IS_PAUSED = "SELECT 1 FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
UNDEFINED = {"42P01", "42703"}
"""The table or column does not exist yet: the migration has not reached it."""


def sendable(config: QueueConfig | None) -> type[Any]:
    return order(config, sent=mapped_column(sa.Boolean, server_default=sa.false(), nullable=False))


class Traffic:
    """Writers, readers and consumers of the table, until they are stopped."""

    def __init__(self, database: Database, queue: type[Any], rows: int, *, by_row: bool) -> None:
        self.database = database
        self.queue = queue
        self.rows = rows
        self.by_row = by_row
        self.stopped = threading.Event()
        self.blocking = threading.Event()
        self.written: list[str] = []
        self.blocked = 0
        """How often a report blocked the migration."""
        self.done: Counter[str] = Counter()

    @contextlib.contextmanager
    def flowing(self) -> Iterator[None]:
        """Run all sessions during the block; raise the error of any of them."""
        with ThreadPoolExecutor() as pool:
            busy: list[Callable[[], None]] = [self.insert, self.change, self.report, self.consume]
            futures = [pool.submit(self._guarded, each) for each in busy]
            try:
                assert self.blocking.wait(60)
                yield
            finally:
                self.stopped.set()
        for future in futures:
            future.result()

    def _guarded(self, task: Callable[[], None]) -> None:
        try:
            task()
        except BaseException:
            self.stopped.set()
            raise

    @contextlib.contextmanager
    def connection(self) -> Iterator[psycopg.Connection[Any]]:
        with self.database.connect() as connection:
            connection.execute("SET lock_timeout = '1s'")
            yield connection

    def insert(self) -> None:
        with self.connection() as connection:
            while not self.stopped.wait(0.005):
                article = f"new {len(self.written)}"
                connection.execute("INSERT INTO orders (article) VALUES (%s)", [article])
                self.written.append(article)

    def change(self) -> None:
        with self.connection() as connection:
            while not self.stopped.wait(0.005):
                statement = "UPDATE orders SET article = article WHERE id = 1 + floor(random() * %s)"
                connection.execute(statement, [self.rows])

    def report(self) -> None:
        """Block the migration with open transactions until the writers have overtaken both.

        First when it adds columns, then when it makes the status column NOT NULL after filling it, then when it creates
        triggers.
        """
        with self.connection() as reader, self.connection() as watch:
            reader.execute("SELECT pg_advisory_lock(1)")
            self.block(reader, watch, "ACCESS SHARE")
            if self.by_row:
                while not self.stopped.is_set() and not watch.execute(HAS_STATUS).fetchone():
                    pass
                self.block(reader, watch, "ACCESS SHARE")
            while not self.stopped.wait(0.01) and not watch.execute(MIGRATION_IS_PAUSED).fetchone():
                pass
            self.block(reader, watch, "ROW EXCLUSIVE")

    def block(self, reader: psycopg.Connection[Any], watch: psycopg.Connection[Any], mode: str) -> None:
        with reader.transaction():
            # Only a lock: an old snapshot would block CREATE INDEX CONCURRENTLY until the transaction ends.
            reader.execute(f"LOCK TABLE orders IN {mode} MODE".encode())
            if mode == "ROW EXCLUSIVE":
                reader.execute("SELECT pg_advisory_unlock(1)")
            self.blocking.set()
            while not watch.execute(MIGRATION_WAITS).fetchone():
                if self.stopped.wait(0.01):
                    return
            enough = len(self.written) + 50
            while not self.stopped.wait(0.01) and len(self.written) < enough:
                pass
        self.blocked += 1

    def consume(self) -> None:
        engine = sa.create_engine(self.database.url(), connect_args={"options": "-c lock_timeout=1s"})
        try:
            while not self.stopped.wait(0.01):
                try:
                    self.run_some(engine)
                except DBAPIError as error:
                    if getattr(error.orig, "sqlstate", None) not in UNDEFINED:
                        raise
        finally:
            engine.dispose()

    def run_some(self, engine: sa.Engine) -> bool:
        with Session(engine) as session:
            jobs = session.scalars(claim(self.queue, 50)).all()
            articles = [job.article for job in jobs]
            if jobs:
                session.execute(complete(jobs))
            session.commit()
        self.done.update(articles)
        return bool(articles)


@pytest.mark.once
@pytest.mark.parametrize("rows", [20_000, pytest.param(1_000_000, marks=pytest.mark.thorough)])
@pytest.mark.parametrize(
    ("strategy", "answer"),
    [("update_status", "'completed'"), ("delete_returning", BY_ROW)],
    ids=["no old row runs", "the unsent ones run"],
)
def test_a_table_in_use_becomes_a_queue(database: Database, make: Any, strategy: str, answer: str, rows: int) -> None:
    queue = sendable(QueueConfig(strategy=strategy))
    project = make(sendable(None))
    engine = sa.create_engine(database.url())
    with engine.begin() as connection:
        connection.execute(
            sa.text(f"INSERT INTO orders (article, sent) {SENT}"),
            {"unsent": UNSENT, "rows": rows},
        )
    project.revise("adopt", queue, live="orders")
    project.edit("existing_rows=...", f"existing_rows={answer}")
    traffic = Traffic(database, queue, rows, by_row=answer == BY_ROW)
    with database.connect() as connection:
        connection.execute(PAUSE_BEFORE_TRIGGERS)
    with traffic.flowing():
        project.upgrade()
    assert traffic.blocked == 2 + traffic.by_row
    project.check()
    with Session(engine) as session:
        assert session.scalars(reconcile(queue)).all() == []
    while traffic.run_some(engine):
        pass
    engine.dispose()
    ran = [*traffic.done.items()]
    old = {article: count for article, count in ran if article.startswith("old")}
    assert old == ({} if strategy == "update_status" else {f"old {n}": 1 for n in range(1, UNSENT + 1)})
    new = {article: count for article, count in ran if article.startswith("new")}
    with database.connect() as connection:
        query = "SELECT article, attempts FROM orders WHERE article LIKE 'new %' ORDER BY id"
        written = [*connection.execute(query)]
        assert connection.execute("SELECT DISTINCT status FROM orders").fetchall() == [("completed",)]
    assert [article for article, _ in written] == traffic.written
    # Rows inserted before the columns existed are existing rows as well.
    first = (
        0
        if strategy == "delete_returning"
        else next(number for number, (_, attempts) in enumerate(written) if attempts)
    )
    assert new == dict.fromkeys(traffic.written[first:], 1)
