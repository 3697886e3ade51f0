"""What prepare() sets and refuses, in one line that says what to do; how moments, errors and tables are translated."""

import asyncio
import contextlib
import io
import re
import sqlite3
import sys
import warnings
from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from sqlalchemy.dialects import sqlite
from sqlalchemy.exc import OperationalError
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, mapped_column, sessionmaker
from sqlalchemy.pool import StaticPool

import sqlaqueue
import sqlaqueue.alembic
from sqlaqueue import (
    AsyncConsumer,
    Consumer,
    QueueMixin,
    Unique,
    claim,
)
from sqlaqueue.exc import ConfigurationError
from sqlaqueue.sql.engine import sqlstate, violated_column, violated_constraint
from sqlaqueue.sql.portable import clock, earlier
from sqlaqueue.testing import async_drain, drain
from tests.models import make_job, new_base
from tests.sqlite.models import Base, SQLiteBench

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "batch_select": ({"strategy": "batch_select"}, r'Job: strategy "batch_select".*SQLite.*update_status'),
    "delete_returning": ({"strategy": "delete_returning"}, r'Job: strategy "delete_returning".*update_status'),
    "nulls": ({"unique": Unique("customer", nulls_distinct=False)}, r"Job: Unique\(nulls_distinct=False\).*SQLite"),
}

pytestmark = pytest.mark.once


def make(strategy: str = "update_status", **config: Any) -> Any:
    return make_job(strategy, {"customer": mapped_column(sa.Integer())}, **config)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[sa.Engine]:
    engine = sqlaqueue.prepare(sa.create_engine(f"sqlite:///{tmp_path / 'jobs.db'}"))
    yield engine
    engine.dispose()


@pytest.mark.parametrize("option", REFUSED)
def test_an_option_is_refused_wherever_it_is_used(engine: sa.Engine, option: str) -> None:
    config, message = REFUSED[option]
    Job = make(**config)  # noqa: N806 - a class
    with pytest.raises(ConfigurationError, match=message):
        Job.metadata.create_all(engine)
    assert sa.inspect(engine).get_table_names() == []
    # The table of an earlier version of the program, without the option.
    make().metadata.create_all(engine)
    with Session(engine) as session, pytest.raises(ConfigurationError, match=message):
        session.execute(claim(Job, 1))
    consumer = Consumer(Job, lambda session, job: None, sessionmaker(engine))
    for start in (consumer.run, consumer.drain):
        with pytest.raises(ConfigurationError, match=message):
            start()


async def test_an_option_is_refused_by_async_code(tmp_path: Path) -> None:
    config, message = REFUSED["batch_select"]
    engine, Job = create_async_engine(f"sqlite+aiosqlite:///{tmp_path / 'jobs.db'}"), make(**config)  # noqa: N806 - a class
    sqlaqueue.prepare(engine)

    async def handle(session: Any, job: Any) -> None:
        """Do nothing."""

    make_session = async_sessionmaker(engine)
    async with engine.begin() as connection:
        with pytest.raises(ConfigurationError, match=message):
            await connection.run_sync(Job.metadata.create_all)
        await connection.run_sync(make().metadata.create_all)
    async with make_session() as session:
        with pytest.raises(ConfigurationError, match=message):
            await session.execute(claim(Job, 1))
    with pytest.raises(ConfigurationError, match=message):
        await AsyncConsumer(Job, handle, make_session).run()
    await engine.dispose()


# -- engines ------------------------------------------------------------------------------------------------------


def test_an_engine_that_is_not_prepared_creates_tables_that_are_no_queues() -> None:
    """An application that tests with SQLite what has nothing to do with its queues names its tables."""
    engine, metadata = sa.create_engine("sqlite://"), make().metadata
    other = sa.Table("other", metadata, sa.Column("id", sa.Integer, primary_key=True))
    with pytest.raises(ConfigurationError, match=r"Job: the engine that creates .* sqlaqueue\.prepare\("):
        metadata.create_all(engine)
    metadata.drop_all(engine)
    metadata.create_all(engine, tables=[other])
    assert sa.inspect(engine).get_table_names() == ["other"]
    engine.dispose()


def test_an_old_sqlite_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = sa.create_engine(f"sqlite:///{tmp_path / 'jobs.db'}")
    monkeypatch.setattr(engine.dialect.dbapi, "sqlite_version_info", (3, 34, 1))
    with pytest.raises(ConfigurationError, match=r"SQLite 3\.34\.1 .*3\.35 or newer"):
        sqlaqueue.prepare(engine)
    # It was left as it was.
    with Session(engine) as session, pytest.raises(ConfigurationError, match="not prepared"):
        session.execute(claim(make(), 1))
    engine.dispose()


@pytest.mark.parametrize(
    ("url", "options"),
    [
        ("sqlite://", {}),
        ("sqlite:///:memory:", {}),
        ("sqlite://", {"poolclass": StaticPool}),
        ("sqlite:///file::memory:?cache=shared&uri=true", {}),
        ("sqlite:///file:jobs?mode=memory&cache=shared&uri=true", {"poolclass": sa.QueuePool}),
    ],
)
def test_a_consumer_refuses_a_database_in_memory(url: str, options: dict[str, Any]) -> None:
    """Its handlers would share one connection; ``drain()`` of the testing helpers needs one only."""
    engine, Job = sa.create_engine(url, **options), make()  # noqa: N806 - a class
    sqlaqueue.prepare(engine)
    Job.metadata.create_all(engine)
    with pytest.raises(ConfigurationError, match=r"in memory.*drain\(session, Model, handler\)"):
        Consumer(Job, lambda session, job: None, sessionmaker(engine)).run()
    with Session(engine) as session:
        session.add_all([Job(customer=number) for number in range(3)])
        session.flush()
        ran: list[int] = []
        assert drain(session, Job, lambda session, job: ran.append(job.customer)) == 3
        assert ran == [0, 1, 2]
    engine.dispose()


async def test_an_async_consumer_refuses_a_database_in_memory() -> None:
    engine, Job = create_async_engine("sqlite+aiosqlite://"), make()  # noqa: N806 - a class
    sqlaqueue.prepare(engine)
    ran: list[int] = []

    async def handle(session: Any, job: Any) -> None:
        ran.append(job.customer)

    async with engine.begin() as connection:
        await connection.run_sync(Job.metadata.create_all)
    make_session = async_sessionmaker(engine)
    with pytest.raises(ConfigurationError, match=r"in memory.*drain\(session, Model, handler\)"):
        await AsyncConsumer(Job, handle, make_session).run()
    async with make_session() as session:
        session.add(Job(customer=7))
        await session.flush()
        assert await async_drain(session, Job, handle) == 1
    assert ran == [7]
    await engine.dispose()


# -- listeners of the program --------------------------------------------------------------------------------------


def listen(engine: sa.Engine, kind: str) -> None:
    """Add a listener that a program for SQLite has: ``journal_mode=..``, ``isolation_level=..``, or a statement."""
    name, _, value = kind.partition("=")

    def connected(connection: Any, record: Any) -> None:
        if name == "isolation_level":
            connection.isolation_level = value
        else:
            cursor = connection.cursor()
            cursor.execute(f"PRAGMA {kind}")
            cursor.close()

    if kind.startswith("BEGIN"):
        sa.event.listen(engine, "begin", lambda connection: connection.exec_driver_sql(kind))
    else:
        sa.event.listen(engine, "connect", connected)


def run_consumer(engine: Any, job: Any, *allowed: type[Exception]) -> None:
    """Drain a queue.

    :param allowed: errors with which it may fail.
    """
    if isinstance(engine, sa.Engine):
        with contextlib.suppress(*allowed):
            Consumer(job, lambda *_: None, sessionmaker(engine)).drain()
        engine.dispose()
        return

    async def handle(session: AsyncSession, job: Any) -> None:
        pass

    async def run() -> None:
        with contextlib.suppress(*allowed):
            await AsyncConsumer(job, handle, async_sessionmaker(engine)).drain()
        await engine.dispose()

    asyncio.run(run())


@pytest.mark.few(4)
@pytest.mark.parametrize("driver", ["sqlite", "sqlite+aiosqlite"])
@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("journal_mode=delete", r"Job: the connections have journal_mode=delete, .*leave out PRAGMA"),
        ("journal_mode=truncate", "the connections have journal_mode=truncate, "),
        # What has no effect is not mentioned.
        ("isolation_level=EXCLUSIVE", None),
        ("isolation_level=", None),
        ("journal_mode=wal", None),
        ("foreign_keys=on", None),
    ],
)
def test_a_consumer_warns_of_a_listener_that_works_against_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str, said: str | None, driver: str
) -> None:
    Job, url = make(), f"{driver}:///{tmp_path / 'jobs.db'}"  # noqa: N806 - a class
    engine: Any = sqlaqueue.prepare(sa.create_engine(url) if driver == "sqlite" else create_async_engine(url))
    listen(getattr(engine, "sync_engine", engine), kind)
    made = sqlaqueue.prepare(sa.create_engine(f"sqlite:///{tmp_path / 'jobs.db'}"))
    Job.metadata.create_all(made)
    made.dispose()
    # As the warning says, "database is locked" is possible: the journal cannot be changed while another connection of
    # the Consumer reads by the write-ahead log.
    allowed = [] if said is None else [OperationalError]
    with caplog.at_level("WARNING"):
        run_consumer(engine, Job, *allowed)
    found = [record.getMessage() for record in caplog.records if getattr(record, "event", "") == "connection_changed"]
    if said is None:
        assert found == []
    else:
        # It is repeated when what it warns of has happened before the first claim.
        assert found
        assert all(re.search(said, text) for text in found)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("journal_mode=off", "Job: the connections have journal_mode=off, .*leave out PRAGMA journal_mode"),
        ("journal_mode=memory", "Job: the connections have journal_mode=memory, .*killed"),
        ("BEGIN", "Job: a listener to `begin` .*Remove the listener"),
        ("BEGIN IMMEDIATE", "Job: a listener to `begin` .*Remove the listener"),
    ],
)
@pytest.mark.parametrize("method", ["run", "drain"])
def test_a_consumer_refuses_a_listener_that_endangers_jobs(
    engine: sa.Engine, kind: str, said: str, method: str
) -> None:
    Job = make()  # noqa: N806 - a class
    Job.metadata.create_all(engine)
    engine.dispose()
    listen(engine, kind)
    with pytest.raises(ConfigurationError, match=said):
        getattr(Consumer(Job, lambda *_: None, sessionmaker(engine)), method)()


# -- what prepare() sets ------------------------------------------------------------------------------------------


def test_every_connection_is_set_up(tmp_path: Path) -> None:
    engine = sqlaqueue.prepare(sa.create_engine(f"sqlite:///{tmp_path / 'jobs.db'}"), busy_timeout=1.5)
    sqlaqueue.prepare(engine)
    sqlaqueue.prepare(engine, busy_timeout=1.5)
    with pytest.raises(
        ConfigurationError, match=r"busy_timeout=30\): the engine has been prepared with busy_timeout=1\.5"
    ):
        sqlaqueue.prepare(engine, busy_timeout=30)
    with engine.connect() as one, engine.connect() as two:
        for connection in (one, two):
            assert connection.exec_driver_sql("PRAGMA journal_mode").scalar() == "wal"
            assert connection.exec_driver_sql("PRAGMA busy_timeout").scalar() == 1500
    # Again by another part of the program, when it has connected: nothing is left to be done.
    sqlaqueue.prepare(engine)
    engine.dispose()


@pytest.mark.parametrize("autocommit", [False, True])
@pytest.mark.skipif(sys.version_info < (3, 12), reason="sqlite3.connect() has no autocommit=")
async def test_transactions_are_those_of_the_engine(tmp_path: Path, *, autocommit: bool) -> None:
    """SQLAlchemy's manual recommends ``autocommit=False``, with which the driver begins transactions by itself."""
    job = make()
    path, options = tmp_path / "jobs.db", {"autocommit": autocommit}
    engine = sa.create_engine(f"sqlite:///{path}", connect_args=options)
    async_engine = create_async_engine(f"sqlite+aiosqlite:///{path}", connect_args=options)
    sqlaqueue.prepare(engine)
    sqlaqueue.prepare(async_engine)
    job.metadata.create_all(engine)
    with Session(engine) as session:
        session.add(job())
        session.commit()
        assert len(session.scalars(claim(job, 1)).all()) == 1
    async with AsyncSession(async_engine) as async_session:
        assert len((await async_session.scalars(claim(job, 1))).all()) == 1
    with Session(engine) as session:
        assert session.scalar(sa.select(job.status)) == "pending"
    engine.dispose()
    await async_engine.dispose()
    opened = sqlaqueue.prepare(
        sa.create_engine("sqlite://", creator=lambda: sqlite3.connect(path, autocommit=autocommit))
    )
    changed = sqlaqueue.prepare(sa.create_engine(f"sqlite:///{path}"))
    sa.event.listen(changed, "connect", lambda connection, _: setattr(connection, "autocommit", autocommit))
    for refused in (opened, changed):
        with pytest.raises(ConfigurationError, match=f"has autocommit={autocommit}, with which a prepared engine"):
            refused.connect()


def test_an_engine_that_has_connected_is_refused(tmp_path: Path) -> None:
    engine = sa.create_engine(f"sqlite:///{tmp_path / 'jobs.db'}")
    with engine.connect():
        pass
    with pytest.raises(ConfigurationError, match=r"has connections already.*right after create_engine\(\)"):
        sqlaqueue.prepare(engine)
    engine.dispose()


async def test_every_async_connection_is_set_up(tmp_path: Path) -> None:
    engine = sqlaqueue.prepare(create_async_engine(f"sqlite+aiosqlite:///{tmp_path / 'jobs.db'}"))
    async with engine.connect() as connection:
        assert (await connection.exec_driver_sql("PRAGMA journal_mode")).scalar() == "wal"
        assert (await connection.exec_driver_sql("PRAGMA busy_timeout")).scalar() == 30_000
    await engine.dispose()


def test_a_key_of_bytes_is_refused(engine: sa.Engine) -> None:
    """Keys are given to statements as JSON, in which bytes would be a text."""
    base = new_base()

    class Digest(QueueMixin, base):
        __tablename__ = "digest"
        id = mapped_column(sa.LargeBinary(20), primary_key=True)

    with pytest.raises(ConfigurationError, match=r"Digest\.id: a key of bytes is not available on SQLite"):
        base.metadata.create_all(engine)


# -- moments that were stored before the engine was prepared are read, and stored in the same way ----------------------


LOCAL = datetime(2026, 1, 2, 3, 4, 5, 678, tzinfo=timezone(timedelta(hours=5)))
PLAIN = LOCAL.replace(tzinfo=None)
COMPACT = sqlite.DATETIME(
    storage_format="%(year)04d%(month)02d%(day)02d%(hour)02d%(minute)02d%(second)02d",
    regexp=r"(\d{4})(\d{2})(\d{2})(\d{2})(\d{2})(\d{2})",
)
TYPES: list[tuple[Any, Any]] = [
    (sa.DateTime(), PLAIN),
    (sa.DateTime(), LOCAL),
    (sa.DateTime(), date(2026, 1, 2)),
    (sa.TIMESTAMP(), LOCAL),
    (sqlite.DATETIME(truncate_microseconds=True), PLAIN),
    (COMPACT, PLAIN),
]


@pytest.mark.parametrize(("type_", "value"), TYPES, ids=repr)
def test_a_moment_of_the_program_is_stored_and_read_as_before(type_: Any, value: Any, tmp_path: Path) -> None:
    table = sa.Table("note", sa.MetaData(), sa.Column("id", sa.Integer, primary_key=True), sa.Column("at", type_))
    engines = [sa.create_engine(f"sqlite:///{tmp_path / 'notes.db'}") for _ in range(2)]
    sqlaqueue.prepare(engines[1])
    table.create(engines[0])
    for engine in engines:
        with engine.begin() as connection:
            connection.execute(sa.insert(table).values(at=value))
    for engine in engines:
        with engine.connect() as connection:
            stored = connection.exec_driver_sql("SELECT DISTINCT at FROM note").all()
            assert len(stored) == 1
            found = connection.scalars(sa.select(table.c.at)).all()
            assert found[0] == found[1]
            if isinstance(value, datetime):
                literal = sa.select(table.c.id).where(table.c.at == value)
                text = str(literal.compile(engine, compile_kwargs={"literal_binds": True}))
                assert len(connection.exec_driver_sql(text).all()) == 2
        engine.dispose()


def test_the_distance_to_utc_that_another_program_has_written(engine: sa.Engine) -> None:
    table = sa.Table("note", sa.MetaData(), sa.Column("at", sa.DateTime(timezone=True)))
    with engine.begin() as connection:
        table.create(connection)
        connection.exec_driver_sql("INSERT INTO note VALUES ('2026-01-02 12:00:00+02:00'), ('2026-01-02 10:00:00')")
        assert connection.scalars(sa.select(table.c.at)).all() == [datetime(2026, 1, 2, 10, tzinfo=UTC)] * 2


def test_the_clock_of_the_library_in_a_statement_without_tables(engine: sa.Engine) -> None:
    day = timedelta(days=1)
    query = sa.select(clock(), earlier(clock(), day))
    with engine.connect() as connection:
        now, before = connection.execute(query).one()
    assert abs(now - day - before) < timedelta(seconds=1)


# -- errors have the SQLSTATE of PostgreSQL, by which the library classifies them --------------------------------------


TABLE = """
CREATE TABLE thing (
  id integer PRIMARY KEY, name text UNIQUE, n integer NOT NULL CHECK (n > 0),
  other integer REFERENCES thing (id) ON DELETE RESTRICT
)
"""
STATES = {
    "INSERT INTO thing VALUES (1, 'b', 1, NULL)": ("23505", "thing.id", None),
    "INSERT INTO thing VALUES (2, 'a', 1, NULL)": ("23505", "thing.name", None),
    "INSERT INTO thing VALUES (2, 'b', NULL, NULL)": ("23502", None, "n"),
    "INSERT INTO thing VALUES (2, 'b', 0, NULL)": ("23514", "", None),
    "INSERT INTO thing VALUES (2, 'b', 1, 9)": ("23503", "", None),
    "DELETE FROM thing WHERE id = 1": ("23503", "", None),
    "DELETE FROM thing WHERE id = 5": ("23000", None, None),
    "INSERT INTO missing VALUES (1)": ("42P01", None, None),
    "SELECT missing FROM thing": ("42703", None, None),
    "INSERT INTO thing (id, missing) VALUES (2, 1)": ("42703", None, None),
    "INSERT INTO thing VALUES (3, randomblob(100000), 1, NULL)": ("53100", None, None),
    "ROLLBACK TO nowhere": ("3B001", None, None),
}


@pytest.mark.parametrize("api", ["sync"])
@pytest.mark.parametrize("statement", STATES)
def test_an_error_has_its_state(bench: SQLiteBench, statement: str) -> None:
    bench.execute(TABLE)
    bench.execute("INSERT INTO thing VALUES (1, 'a', 1, NULL), (4, 'd', 1, 1), (5, 'e', 1, NULL)")
    bench.execute(
        "CREATE TRIGGER kept BEFORE DELETE ON thing WHEN OLD.id = 5 BEGIN SELECT RAISE(ABORT, 'it is kept'); END"
    )
    with bench.engine.connect() as connection:
        connection.exec_driver_sql("PRAGMA foreign_keys = ON")
        pages = connection.exec_driver_sql("PRAGMA page_count").scalar()
        connection.exec_driver_sql(f"PRAGMA max_page_count = {pages}")
        # A statement that does nothing, so that a transaction has begun.
        connection.execute(sa.text("DELETE FROM thing WHERE id = 9"))
        with pytest.raises(sa.exc.DBAPIError) as raised:
            connection.execute(sa.text(statement))
        connection.exec_driver_sql("PRAGMA max_page_count = 1000000")
        connection.rollback()
        connection.exec_driver_sql("PRAGMA foreign_keys = OFF")
    error = raised.value
    found = sqlstate(error), violated_constraint(error), violated_column(error)
    assert found == STATES[statement]


@pytest.mark.parametrize("url", ["file:{path}?mode=ro&uri=true", "{path}/missing/jobs.db"])
def test_a_consumer_ends_whose_file_cannot_be_written(bench: SQLiteBench, url: str) -> None:
    """Trying again would not help."""
    path = bench.file.path
    bench.enqueue()
    bench.engine.dispose()
    driver = "+aiosqlite" if bench.api == "async" else ""
    bench.file.url = lambda _="psycopg": f"sqlite{driver}:///{url.format(path=path)}"  # type: ignore[method-assign] # for the Consumer alone
    with pytest.raises(sa.exc.OperationalError, match="readonly database|unable to open"):
        bench.consumer().run()


# -- migrations --------------------------------------------------------------------------------------------------------


ENV = """
import contextlib

import sqlalchemy as sa
from alembic import context

import sqlaqueue
from tests.sqlite.models import Base

engine = sa.create_engine(context.config.get_main_option("sqlalchemy.url"))
if context.config.attributes["prepared"]:
    sqlaqueue.prepare(engine)
with contextlib.ExitStack() as stack:
    stack.callback(engine.dispose)
    connection = stack.enter_context(engine.connect())
    metadata = [sa.MetaData(), Base.metadata] if context.config.attributes["several"] else Base.metadata
    context.configure(connection=connection, target_metadata=metadata, render_as_batch=True)
    with context.begin_transaction():
        context.run_migrations()
"""


@pytest.fixture
def project(tmp_path: Path) -> Config:
    config = Config(tmp_path / "alembic.ini", stdout=io.StringIO())
    config.set_main_option("script_location", str(tmp_path / "migrations"))
    config.set_main_option("sqlalchemy.url", f"sqlite:///{tmp_path}/jobs.db")
    config.attributes |= {"prepared": True, "several": False}
    command.init(config, str(tmp_path / "migrations"))
    (tmp_path / "migrations" / "env.py").write_text(ENV)
    return config


def revise(project: Config, name: str) -> str:
    with warnings.catch_warnings():
        # SQLite does not tell what an index of expressions is made of.
        warnings.filterwarnings("ignore", "autogenerate skipping|Skipped unsupported reflection")
        script: Any = command.revision(project, name, autogenerate=True)
    return Path(script.path).read_text()


def schema(path: Path) -> set[str]:
    engine = sa.create_engine(f"sqlite:///{path}")
    with engine.connect() as connection:
        texts = connection.scalars(sa.text("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL")).all()
    engine.dispose()
    return {text for text in texts if "INDEX" in text or "TRIGGER" in text}


@pytest.mark.parametrize("several", [False, True], ids=["one_metadata", "several"])
def test_migrations_create_what_create_all_creates(project: Config, tmp_path: Path, *, several: bool) -> None:
    project.attributes["several"] = several
    revise(project, "create")
    command.upgrade(project, "head")
    made = sqlaqueue.prepare(sa.create_engine(f"sqlite:///{tmp_path}/made.db"))
    Base.metadata.create_all(made)
    made.dispose()
    assert schema(tmp_path / "jobs.db") == schema(tmp_path / "made.db")
    again = revise(project, "nothing")
    assert again.count("    pass\n") == 2
    command.upgrade(project, "head")
    command.downgrade(project, "base")
    assert schema(tmp_path / "jobs.db") == set()


@pytest.mark.parametrize("several", [False, True], ids=["one_metadata", "several"])
def test_an_engine_that_is_not_prepared_is_refused(project: Config, *, several: bool) -> None:
    project.attributes |= {"prepared": False, "several": several}
    with pytest.raises(ConfigurationError, match=r"env.py: .* use engine = sqlaqueue\.prepare\("):
        revise(project, "create")
