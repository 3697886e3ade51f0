"""What prepare() changes, what it refuses, how errors and times are read, and how tables are created."""

import contextlib
import io
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest
import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from sqlalchemy.exc import DBAPIError, IntegrityError, OperationalError
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker
from sqlalchemy.pool import StaticPool

import sqlaqueue
import sqlaqueue.alembic
from sqlaqueue import (
    ConcurrencyLimit,
    Consumer,
    QueueConfig,
    QueueMixin,
    Unique,
    claim,
    complete,
    enqueue,
)
from sqlaqueue.consumer.core.errors import is_conflict, is_connection_lost, is_lock_or_timeout
from sqlaqueue.engines.notifications import database_of, subscribe
from sqlaqueue.exc import ConfigurationError, DatabaseNotReadyError
from sqlaqueue.mariadb.base import violated_column, violated_constraint, violated_table
from sqlaqueue.sql.engine import sqlstate
from sqlaqueue.sql.portable import clock, earlier, notify, set_setting, setting
from tests.mariadb.conftest import Prepared
from tests.mariadb.models import Base, ByUuid, Child, Job, UniqueBase
from tests.mariadb.server import MariaDBServer
from tests.models import add, new_base

# -- without a server --------------------------------------------------------------------------------------------------


def test_other_drivers_are_refused() -> None:
    module = SimpleNamespace(paramstyle="pyformat", version_info=(2, 2), constants=SimpleNamespace(FIELD_TYPE=None))
    engine = sa.create_engine("mariadb+mysqldb://", module=module)
    with pytest.raises(ConfigurationError, match=r"mariadb with mysqldb; use create_engine\('mariadb\+pymysql://"):
        sqlaqueue.prepare(engine)


@pytest.mark.parametrize("url", ["mariadb+pymysql://localhost/none", "mysql+pymysql://localhost/none"])
def test_an_engine_that_is_not_prepared_is_refused(url: str) -> None:
    engine = sa.create_engine(url)
    statement = claim(Job, 1)
    said = r"is not prepared; use engine = sqlaqueue\.prepare\(create_engine\("
    with pytest.raises(ConfigurationError, match=said):
        Consumer(Job, lambda *_: None, sessionmaker(engine)).drain()
    assert "FOR UPDATE" in str(statement)


CONFIGS: dict[str, dict[str, Any]] = {
    'strategy "delete_returning" is': {"strategy": "delete_returning"},
    'limits, rates and orders under strategy "batch_select" are': {
        "strategy": "batch_select",
        "flow_control": [ConcurrencyLimit(2)],
    },
}


@pytest.mark.parametrize("option", CONFIGS)
def test_what_the_database_cannot_carry_is_refused_by_name(engine: sa.Engine, option: str) -> None:
    own = new_base()

    class Task(QueueMixin, own):
        __tablename__ = "task"
        __queue__ = QueueConfig(**CONFIGS[option])
        id: Mapped[int] = mapped_column(primary_key=True)
        customer: Mapped[int]

    for use in (
        lambda: own.metadata.create_all(engine),
        lambda: Session(engine).scalars(claim(Task, 1)),
        lambda: Consumer(Task, lambda *_: None, sessionmaker(engine)).drain(),
    ):
        with pytest.raises(ConfigurationError, match=rf"Task: .*{option}.* not available on MariaDB"):
            use()


# -- with one ----------------------------------------------------------------------------------------------------------


def test_an_engine_with_connections_is_refused(url: Callable[[str], str], engine: sa.Engine) -> None:
    own = sa.create_engine(url("mariadb+pymysql"))
    own.connect().close()
    with pytest.raises(ConfigurationError, match="has connections already"):
        sqlaqueue.prepare(own)
    own.dispose()
    sqlaqueue.prepare(engine)


@pytest.mark.parametrize(
    ("version", "said"),
    [
        # SQLAlchemy would ask a newer one for settings that MariaDB does not have.
        ("5.7.19", "MySQL 5.7.19, which has no INSERT .. RETURNING"),
        ("10.5.27-MariaDB", "MariaDB 10.5.27, which has no SKIP LOCKED"),
        ("10.6.0-MariaDB", None),
    ],
)
def test_other_servers_are_refused(
    mariadb: MariaDBServer, tmp_path_factory: pytest.TempPathFactory, version: str, said: str | None
) -> None:
    """The server only says that it is another one; what is tested is that its word is taken."""
    home = tmp_path_factory.mktemp("version")
    with MariaDBServer(home, mariadb.template, f"--version={version}") as server, server.database() as name:
        for use in ("connect", "session"):
            engine = sqlaqueue.prepare(sa.create_engine(server.url(name, "mysql+pymysql")))
            refused = pytest.raises(ConfigurationError, match=rf"{said}; use MariaDB 10.6 or newer")
            with contextlib.nullcontext() if said is None else refused:
                if use == "connect":
                    engine.connect().close()
                else:
                    Session(engine).execute(sa.select(1))
            engine.dispose()


def test_a_shared_connection_is_refused(prepared: Prepared, engine: sa.Engine) -> None:
    own = prepared(poolclass=StaticPool)
    with pytest.raises(ConfigurationError, match="StaticPool does not give each session a connection of its own"):
        Consumer(Job, lambda *_: None, sessionmaker(own)).drain()


def test_autocommit_is_refused(prepared: Prepared, engine: sa.Engine) -> None:
    own = prepared(isolation_level="AUTOCOMMIT")
    with pytest.raises(ConfigurationError, match="AUTOCOMMIT"):
        Consumer(Job, lambda *_: None, sessionmaker(own)).drain()


def test_missing_tables_are_named(engine: sa.Engine) -> None:
    class Absent(QueueMixin, new_base()):
        __tablename__ = "absent"
        id: Mapped[int] = mapped_column(primary_key=True)

    with pytest.raises(DatabaseNotReadyError, match=r"the table absent; .*|lacks what Absent needs: the table absent"):
        Consumer(Absent, lambda *_: None, sessionmaker(engine)).drain()


def test_transactions_begin_at_read_committed(engine: sa.Engine, prepared: Prepared) -> None:
    """The server's default is another one."""
    level = sa.text("SELECT @@tx_isolation")
    with engine.connect() as connection:
        assert connection.scalar(level) == "READ-COMMITTED"
    with engine.connect().execution_options(isolation_level="SERIALIZABLE") as connection:
        assert connection.scalar(level) == "SERIALIZABLE"
    with engine.connect() as connection:
        assert connection.scalar(level) == "READ-COMMITTED"
    own = prepared(isolation_level="REPEATABLE READ")
    with own.connect() as connection:
        assert connection.scalar(level) == "REPEATABLE-READ"


@pytest.mark.parametrize("zone", ["SYSTEM", "+00:00", "-08:00", "+12:45"])
def test_times_are_in_utc_whatever_the_zone_of_the_session(engine: sa.Engine, zone: str) -> None:
    given = datetime(2024, 3, 31, 3, 30, 0, 123456, tzinfo=timezone(timedelta(hours=5)))
    before = datetime.now(UTC) - timedelta(seconds=1)
    with Session(engine) as session:
        session.execute(sa.text(f"SET time_zone = '{zone}'"))
        session.add_all([Job(id=1, run_at=given), Job(id=2)])
        session.add(ByUuid(id=uuid4(), local=given.replace(tzinfo=None)))
        session.commit()
        session.execute(sa.text("SET time_zone = '+02:00'"))
        assert session.get_one(Job, 1).run_at == given
        assert before < session.get_one(Job, 2).run_at < datetime.now(UTC) + timedelta(seconds=1)
        assert session.scalar(sa.select(ByUuid.local)) == given.replace(tzinfo=None)
        assert [job.id for job in session.scalars(claim(Job, 5))] == [1, 2]
        expires = session.get_one(Job, 1).lease_expires_at
        assert expires is not None
        assert timedelta(seconds=30) < expires - datetime.now(UTC) < timedelta(minutes=5)


def raised(engine: sa.Engine, *statements: Any) -> DBAPIError:
    with Session(engine) as session, pytest.raises(DBAPIError) as found:
        for statement in statements:
            session.execute(sa.text(statement) if isinstance(statement, str) else statement)
        session.commit()
    return found.value


def test_errors_have_the_sqlstate_of_postgresql(engine: sa.Engine) -> None:
    state = sqlstate
    add(engine, Job(id=1))
    error = raised(engine, sa.insert(Job).values(id=1))
    assert isinstance(error, IntegrityError)
    assert (state(error), violated_constraint(error)) == ("23505", "PRIMARY")
    error = raised(engine, sa.insert(Child).values(id=1, job_id=77))
    assert (state(error), violated_table(error), violated_constraint(error)) == ("23503", "child", "child_ibfk_1")
    error = raised(engine, sa.update(Job).values(priority=None))
    assert (state(error), violated_column(error)) == ("23502", "priority")
    assert state(raised(engine, "SELECT * FROM nothing")) == "42P01"
    assert state(raised(engine, "SELECT nothing FROM job")) == "42703"
    assert state(raised(engine, "ROLLBACK TO SAVEPOINT nothing")) == "3B001"
    error = raised(engine, "SET TRANSACTION READ ONLY", "START TRANSACTION READ ONLY", sa.insert(Job).values(id=2))
    assert state(error) == "25006"
    long = "SELECT count(*) FROM seq_1_to_1000000 a, seq_1_to_1000000 b WHERE a.seq + b.seq = 0"
    assert is_lock_or_timeout(raised(engine, f"SET STATEMENT max_statement_time = 0.1 FOR {long}"))
    assert is_connection_lost(raised(engine, "KILL CONNECTION_ID()", "SELECT 1"))


def test_a_deadlock_and_a_lock_timeout_are_transient(engine: sa.Engine) -> None:
    """The first rolls the whole transaction back, the second one statement."""
    add(engine, Job(id=1), Job(id=2))
    lock = "SELECT id FROM job WHERE id = {} FOR UPDATE"
    with Session(engine) as first, Session(engine) as second:
        second.execute(sa.text("SET SESSION innodb_lock_wait_timeout = 1"))
        first.execute(sa.text(lock.format(1)))
        with pytest.raises(OperationalError) as timeout:
            second.execute(sa.text(lock.format(1)))
        assert is_lock_or_timeout(timeout.value)
        second.rollback()
        second.execute(sa.text("SET SESSION innodb_lock_wait_timeout = 50"))
        second.execute(sa.text(lock.format(2)))
        errors: list[BaseException] = []

        def cross(session: Session, key: int) -> None:
            try:
                session.execute(sa.text(lock.format(key)))
            except OperationalError as error:
                errors.append(error)
            session.rollback()

        threads = [threading.Thread(target=cross, args=each) for each in ((first, 2), (second, 1))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        # One of the two.
        assert [is_conflict(error) for error in errors] == [True]


def test_texts_are_compared_byte_by_byte(engine: sa.Engine) -> None:
    """The database has a collation for which upper and lower case, and trailing spaces, are the same."""
    with Session(engine) as session:
        session.add_all([Job(id=1), Job(id=2)])
        session.commit()
        session.execute(sa.text("UPDATE job SET status = 'Pending' WHERE id = 1"))
        session.commit()
        assert [job.id for job in session.scalars(claim(Job, 5))] == [2]
    queue = Base.metadata.tables["sqlaqueue_control"].c
    for left, right in (("a", "A"), ("a", "a ")):
        with engine.begin() as connection:
            table = queue.queue.table
            connection.execute(sa.insert(table), [{"queue": left, "key": [1]}, {"queue": right, "key": [1]}])
            connection.execute(sa.delete(table))


def test_a_span_in_a_column_of_the_program_is_as_before(url: Callable[[str], str], engine: sa.Engine) -> None:
    """A row that was written before the engine was prepared is read as it was."""
    table = sa.Table(
        "lap", sa.MetaData(), sa.Column("id", sa.Integer, primary_key=True), sa.Column("took", sa.Interval)
    )
    before, took = sa.create_engine(url("mariadb+pymysql")), timedelta(minutes=90)
    with before.begin() as connection:
        table.create(connection)
        connection.execute(sa.insert(table).values(id=1, took=took))
    with engine.begin() as connection:
        connection.execute(sa.insert(table).values(id=2, took=took))
        both = sa.select(table.c.took).where(table.c.took > timedelta(hours=1))
        assert connection.scalars(both).all() == [took, took]
        # Beside a table of the library as well.
        beside = both.where(~sa.exists().where(Job.id == table.c.id), table.c.took == took)
        assert connection.scalars(beside).all() == [took, took]
        later = sa.literal(datetime(2026, 1, 1, tzinfo=UTC), sa.DateTime(timezone=True)) + table.c.took
        found = connection.scalars(sa.select(later).where(~sa.exists().where(Job.id == table.c.id))).all()
        assert found == [datetime(2026, 1, 1, 1, 30, tzinfo=UTC)] * 2
        table.drop(connection)
    before.dispose()


def test_a_statement_that_is_compiled_once_serves_other_parameters(engine: sa.Engine) -> None:
    """SQLAlchemy's cache knows the statement, not the name of the setting or of the channel."""
    sent: list[tuple[str, str]] = []
    end = subscribe(engine, lambda channel, text: sent.append((channel, text)))
    with engine.connect() as connection:
        names = ("lock_timeout", "transaction_read_only", "transaction_isolation")
        settings = [connection.scalar(sa.select(setting(name))) for name in names]
        assert settings == [None, "off", "read committed"]
        before = connection.exec_driver_sql("SELECT @@innodb_lock_wait_timeout").scalar()
        for name, seconds in (("idle_in_transaction_session_timeout", before), ("lock_timeout", 2)):
            connection.execute(sa.select(set_setting(name, "2s")))
            assert connection.exec_driver_sql("SELECT @@innodb_lock_wait_timeout").scalar() == seconds
        for channel, text in (("a", "x"), ("b", "y")):
            connection.execute(sa.select(notify(channel, text)))
        connection.commit()
        assert connection.exec_driver_sql("SELECT @@innodb_lock_wait_timeout").scalar() == before
    end()
    assert sent == [("a", "x"), ("b", "y")]


@pytest.mark.parametrize("end", ["commit", "rollback", "rollback_unprepared"])
def test_the_limit_of_lock_waits_ends_with_a_transaction_of_two_phases(engine: sa.Engine, end: str) -> None:
    setting = "SELECT @@innodb_lock_wait_timeout"
    with engine.connect() as connection:
        before = connection.exec_driver_sql(setting).scalar()
        connection.rollback()
        transaction = connection.begin_twophase()
        connection.execute(sa.select(set_setting("lock_timeout", "2s")))
        assert connection.exec_driver_sql(setting).scalar() == 2
        if end != "rollback_unprepared":
            transaction.prepare()
        (transaction.commit if end == "commit" else transaction.rollback)()
        assert connection.exec_driver_sql(setting).scalar() == before


def test_the_clock_of_the_library_in_a_statement_without_tables(engine: sa.Engine) -> None:
    day = timedelta(days=1)
    query = sa.select(clock(), earlier(clock(), day))
    with engine.connect() as connection:
        now, before = connection.execute(query).one()
    assert abs(now - day - before) < timedelta(seconds=1)


def test_engines_of_one_database_are_woken_together() -> None:
    urls = [
        "mariadb+pymysql://ada:secret@localhost/shop?charset=utf8mb4",
        "mysql+pymysql://bob@localhost:3306/shop",
        "mariadb+asyncmy:///shop?connect_timeout=3",
    ]
    assert len({database_of(sa.create_engine(url)) for url in urls}) == 1
    others = ["mariadb+pymysql://localhost/other", "mariadb+pymysql://localhost/shop?unix_socket=/run/mysqld.sock"]
    assert len({database_of(sa.create_engine(url)) for url in [*urls, *others]}) == 3


def test_settings_of_the_server_that_would_stop_the_library(url: Callable[[str], str]) -> None:
    engine = sqlaqueue.prepare(
        sa.create_engine(
            url("mariadb+pymysql"),
            connect_args={"init_command": "SET SESSION sql_safe_updates = 1, sql_select_limit = 1"},
        )
    )
    with Session(engine) as session:
        session.add_all([Job(payload="a"), Job(payload="a")])
        session.flush()
        assert len(session.scalars(claim(Job, 2)).all()) == 2
        session.execute(sa.delete(Job).where(Job.payload == "a"))
    engine.dispose()


# -- tables of old servers: in another character set, or of another storage engine -------------------------------------


class OldBase(DeclarativeBase):
    pass


class Purchase(QueueMixin, OldBase):
    __tablename__ = "orders"
    __queue__ = QueueConfig(unique=Unique("customer"))

    id: Mapped[int] = mapped_column(primary_key=True)
    customer: Mapped[str] = mapped_column(sa.String(50))


class File(QueueMixin, OldBase):
    __tablename__ = "file"
    __queue__ = QueueConfig(strategy="update_status")

    path: Mapped[str] = mapped_column(sa.String(50), primary_key=True)


@pytest.fixture(params=["latin1", "utf8mb3"])
def old_engine(request: pytest.FixtureRequest, mariadb: MariaDBServer) -> Iterator[sa.Engine]:
    with mariadb.database() as name:
        old_engine = sqlaqueue.prepare(sa.create_engine(mariadb.url(name)))
        with old_engine.begin() as connection:
            connection.execute(sa.text(f"ALTER DATABASE {name} CHARACTER SET {request.param}"))
        OldBase.metadata.create_all(old_engine)
        yield old_engine
        old_engine.dispose()


@pytest.mark.once
def test_texts_are_compared_as_elsewhere(old_engine: sa.Engine) -> None:
    with Session(old_engine) as session:
        assert [enqueue(session, Purchase(customer=name))[0].created for name in ("é", "É", "é", "e")] == [
            True,
            True,
            False,
            True,
        ]
        session.commit()
        jobs = session.scalars(claim(Purchase, 5)).all()
        assert [job.customer for job in jobs] == ["é", "É", "e"]
        session.execute(complete(jobs))
        session.commit()


@pytest.mark.once
def test_a_key_of_another_character_set_is_refused(old_engine: sa.Engine) -> None:
    consumer = Consumer(File, lambda *_: None, sessionmaker(old_engine))
    with pytest.raises(DatabaseNotReadyError, match=r"File\.path: .*ALTER TABLE file CONVERT TO CHARACTER SET utf8mb4"):
        consumer.drain()
    with old_engine.begin() as connection:
        connection.execute(sa.text("ALTER TABLE file CONVERT TO CHARACTER SET utf8mb4"))
    add(old_engine, File(path="\N{SNOWMAN}"))
    assert consumer.drain() == 1


@pytest.mark.once
def test_an_index_begins_with_the_columns_of_its_condition(engine: sa.Engine) -> None:
    indexes = {each["name"]: each["column_names"] for each in sa.inspect(engine).get_indexes("job")}
    assert indexes == {
        "ix_job_queue_claim": ["status", "priority", "run_at", "id"],
        "ix_job_queue_quarantined": ["status", "lease_token", "priority", "run_at", "id"],
        "ix_job_queue_lease": ["status", "lease_expires_at"],
        "ix_job_queue_finished": ["status", "finished_at"],
    }


@pytest.mark.once
def test_a_table_without_transactions_is_refused(old_engine: sa.Engine) -> None:
    """A claim locks no row there, and a rollback undoes nothing."""
    with old_engine.begin() as connection:
        connection.execute(sa.text("ALTER TABLE file ENGINE = Aria TRANSACTIONAL = 0"))
    with pytest.raises(DatabaseNotReadyError, match=r"File: .*table file is Aria.*ALTER TABLE file ENGINE = InnoDB"):
        Consumer(File, lambda *_: None, sessionmaker(old_engine)).drain()


# -- migrations: tests/engines has those of each change ----------------------------------------------------------------


ENV = """
from alembic import context

attributes = context.config.attributes
with attributes["engine"].connect() as connection:
    # A prepared engine takes a DATETIME without digits, as one of whole seconds is reflected, for one with six.
    compare_type = "typed" not in attributes["metadata"].tables
    context.configure(connection=connection, target_metadata=attributes["metadata"], compare_type=compare_type)
    with context.begin_transaction():
        context.run_migrations()
"""


@pytest.fixture
def database(mariadb: MariaDBServer) -> Iterator[str]:
    with mariadb.database() as name:
        yield name


@pytest.mark.few(2)
@pytest.mark.once
@pytest.mark.parametrize("driver", ["mariadb+pymysql", "mysql+pymysql"])
@pytest.mark.parametrize("unique", [False, True], ids=["plain", "unique"])
def test_migrations_of_all_models(
    mariadb: MariaDBServer, database: str, tmp_path: Path, driver: str, *, unique: bool
) -> None:
    engine = sqlaqueue.prepare(sa.create_engine(mariadb.url(database, driver)))
    config = Config(tmp_path / "alembic.ini", stdout=io.StringIO())
    config.set_main_option("script_location", str(tmp_path / "migrations"))
    config.attributes |= {"engine": engine, "metadata": (UniqueBase if unique else Base).metadata}
    command.init(config, str(tmp_path / "migrations"))
    (tmp_path / "migrations" / "env.py").write_text(ENV)
    script: Any = command.revision(config, "create", autogenerate=True)
    # One of the models has a type of the application.
    path = Path(script.path)
    path.write_text(
        path.read_text().replace("import sqlalchemy as sa", "import sqlalchemy as sa, tests.mariadb.models")
    )
    command.upgrade(config, "head")
    command.check(config)
    if not unique:
        with Session(engine) as session:
            session.add(Job(id=1))
            session.commit()
            assert [job.id for job in session.scalars(claim(Job, 1))] == [1]
    command.downgrade(config, "base")
    assert sa.inspect(engine).get_table_names() == ["alembic_version"]
    engine.dispose()
