"""Queues in the programs that others write: their engines, names and statements, and sessions of several engines."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from typing import Any

import httpx
import pytest
import sqlalchemy as sa
from sqlalchemy.dialects import postgresql
from sqlalchemy.exc import CompileError
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, aliased, mapped_column, sessionmaker
from sqlalchemy.schema import CreateIndex, CreateTable

import sqlaqueue
from sqlaqueue import Consumer, QueueConfig, QueueMixin, Unique, claim, complete, enqueue, retry
from sqlaqueue.admin import QueueAdmin, doctor
from sqlaqueue.exc import StatementError
from sqlaqueue.web import Access, Dashboard
from tests.engines.conftest import Sessions
from tests.models import TEXT, make_job
from tests.servers import Database

pytestmark = pytest.mark.once


class Base(DeclarativeBase):
    pass


class Percent(QueueMixin, Base):
    """Names that need quotes, and have what the drivers take for parameters."""

    __tablename__ = "Jobs in %s"
    __queue__ = QueueConfig(unique=Unique("customer"))

    id: Mapped[int] = mapped_column("Key %s", primary_key=True)
    customer: Mapped[str] = mapped_column("the Customer's %x", sa.String(20))


class Visit(QueueMixin, Base):
    """A key of several columns, with names of their own."""

    __tablename__ = "visit"

    day: Mapped[date] = mapped_column("visit_day", primary_key=True)
    at: Mapped[datetime] = mapped_column("visit_at", sa.DateTime(timezone=True), primary_key=True)
    place: Mapped[str] = mapped_column("visit_place", sa.String(20), primary_key=True)


class Local(QueueMixin, Base):
    __tablename__ = "local"
    __queue__ = QueueConfig(columns={"run_at": "at"})

    id: Mapped[int] = mapped_column(primary_key=True)
    at: Mapped[datetime] = mapped_column(sa.DateTime)


class Note(Base):
    __tablename__ = "note"

    id: Mapped[int] = mapped_column(primary_key=True)
    at: Mapped[datetime] = mapped_column(sa.DateTime)


def test_an_engine_with_options_is_prepared_with_the_one_it_was_made_from(place: str) -> None:
    engine = sa.create_engine(place)
    with_options = engine.execution_options(yield_per=None)
    sqlaqueue.prepare(with_options)
    for each in (engine, with_options, engine.execution_options(stream_results=False)):
        Base.metadata.create_all(each)
        with Session(each) as session:
            session.add(Percent(customer="ada"))
            session.commit()
            (job,) = session.scalars(claim(Percent, 1)).all()
            session.execute(complete([job]))
            session.commit()
    engine.dispose()


def test_a_claim_within_a_statement(sessions: Sessions) -> None:
    with sessions(Base)() as session:
        session.add(Percent(customer="ada"))
        session.commit()
        (job,) = session.scalars(sa.select(Percent).from_statement(claim(Percent, 1))).all()
        assert job.status == "processing"


@pytest.mark.every_combination
def test_names_with_percent_signs(sessions: Sessions) -> None:
    with sessions(Base)() as session:
        found = enqueue(session, [Percent(customer=name) for name in ("ada", "bob", "ada")])
        assert [each.created for each in found] == [True, True, False]
        enqueue(session, [Percent(customer="ada")], on_duplicate="replace")
        session.commit()
        jobs = session.scalars(claim(Percent, 2)).all()
        session.commit()
        assert session.scalars(complete(jobs[:1])).all() == [jobs[0].id]
        session.execute(retry(jobs[1:]))
        session.commit()
        assert [job.status for job in jobs] == ["completed", "pending"]
        changed = sa.update(Percent).where(Percent.id == jobs[1].id).values(customer="eve").returning(Percent)
        assert [job.customer for job in session.scalars(changed)] == ["eve"]
        key = {"index_elements": [Percent.__table__.c["Key %s"]]}
        row = {"Key %s": jobs[1].id, "the Customer's %x": "zoe"}
        insert: Any = postgresql.insert(Percent.__table__).values(row)
        session.execute(insert.on_conflict_do_update(set_={"the Customer's %x": insert.excluded[1]}, **key))
        assert session.scalar(sa.select(Percent.customer).where(Percent.id == jobs[1].id)) == "zoe"


def test_a_key_of_several_columns_with_names_of_their_own(sessions: Sessions) -> None:
    with sessions(Base)() as session:
        moment = datetime(2026, 1, 1, tzinfo=UTC)
        session.add_all([Visit(day=date(2026, 1, n), at=moment, place="here") for n in (1, 2)])
        session.commit()
        jobs = session.scalars(claim(Visit, 2)).all()
        session.commit()
        assert session.scalars(complete(jobs[:1])).all() == [(jobs[0].day, moment, "here")]
        session.execute(retry(jobs[1:]))
        session.commit()
        assert session.scalars(sa.select(Visit.status).order_by(Visit.day)).all() == ["completed", "pending"]


def test_a_lock_in_a_programs_cte_is_refused(sessions: Sessions) -> None:
    """MariaDB locks no rows there. What the program has written must not pass for a statement without rows."""
    picked = sa.select(Percent.id).with_for_update(skip_locked=True).limit(1).cte("picked")
    wanted = sa.select(picked.c[0])
    with sessions(Base)() as session:
        session.add(Percent(customer="ada"))
        session.commit()
        statement = sa.update(Percent).where(Percent.id.in_(wanted)).values(customer="bob").returning(Percent.id)
        if session.get_bind().dialect.name == "sqlite":
            assert session.scalars(statement).all() == [1]
        else:
            with pytest.raises(StatementError, match="the CTE picked locks rows, which MariaDB cannot do"):
                session.execute(statement)


def test_a_moment_with_a_time_zone_in_a_queues_column_without_one(sessions: Sessions) -> None:
    """It is compared with the clock in UTC. A column of another table has what the driver makes of it."""
    local = datetime.now(timezone(timedelta(hours=5)))
    with sessions(Base)() as session:
        session.add_all(
            [Local(at=local - timedelta(seconds=1)), Local(at=local + timedelta(minutes=5)), Note(at=local)]
        )
        session.commit()
        (job,) = session.scalars(claim(Local, 2)).all()
        session.execute(retry([job], at=local + timedelta(minutes=1)))
        session.commit()
        assert session.scalar(claim(Local, 1)) is None
        wanted = sa.select(sa.func.count()).where(Local.at <= local + timedelta(minutes=2))
        assert session.scalar(wanted) == 1
        assert session.scalar(sa.select(Note.at)).hour == local.hour


# -- the program's own statements and tables are compiled as before ------------------------------------------------
MOMENT = datetime(2026, 1, 1, 12, 30, 15, 123456)  # noqa: DTZ001 - of a column without a time zone
METADATA = sa.MetaData()
NOTE = sa.Table(
    "note",
    METADATA,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("text", sa.String(50)),
    sa.Column("amount", sa.Numeric(10, 2)),
    sa.Column("day", sa.Date),
    sa.Column("at", sa.DateTime, server_default=sa.func.now()),
    sa.Column("other_at", sa.DateTime, server_default=sa.text("CURRENT_TIMESTAMP"), onupdate=sa.func.now()),
    sa.Column("took", sa.Interval),
    sa.Column("token", sa.Uuid),
    sa.Column("data", sa.JSON),
    sa.Column("done", sa.Boolean, server_default=sa.false()),
    sa.CheckConstraint("amount > 0", name="positive"),
)
COPY = sa.Table(
    "copy",
    METADATA,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("text", sa.String(50)),
    sa.Column("xmin", sa.Integer, system=True),
)
ZONED = sa.Table("zoned", METADATA, sa.Column("at", sa.DateTime(timezone=True), server_default=sa.func.now()))
INDEX = sa.Index("ix_note", sa.cast(NOTE.c.text, sa.String(20)), NOTE.c.day)
RECENT_DAYS = sa.Index("ix_recent", NOTE.c.day, unique=True, postgresql_where=NOTE.c.done)
n = NOTE.c
RECENT = sa.select(n.id, n.text).where(n.at > MOMENT).cte("recent")
BOTH = [
    sa.select(sa.func.now()),
    sa.select(sa.cast(n.at, sa.Date)),
    sa.select(sa.cast(n.text, sa.Numeric(10, 2))),
    sa.select(sa.cast(n.amount, sa.String(20))),
    sa.select(sa.cast(n.amount, sa.Text)),
    sa.select(sa.cast(n.token, sa.String)),
    sa.select(sa.cast(n.text, sa.Integer)),
    sa.select(sa.cast(n.text, sa.DateTime)),
    sa.select(sa.func.concat(n.text, "-", n.id)),
    sa.select(n.text + "x", n.amount * 2, n.id - 1),
    sa.select(sa.func.coalesce(n.text, "none"), sa.func.max(n.id, 3)),
    sa.select(sa.func.max(n.id), sa.func.min(n.id)).group_by(n.day),
    sa.select(sa.extract("year", n.at), sa.extract("epoch", n.at)),
    sa.select(n.at - MOMENT),
    sa.select(n.took).where(n.took > timedelta(hours=1)),
    sa.select(NOTE).where(n.at < sa.func.now(), n.day == date(2026, 1, 1), n.text.in_(["a", "b"])),
    sa.select(RECENT).where(RECENT.c.text.like("a%")),
    sa.select(NOTE).with_for_update(),
    sa.select(sa.select(n.id).with_for_update().cte("locked")),
    sa.select(n.text).union(sa.select(COPY.c.text)).order_by("text"),
    sa.select(sa.case((n.id > 1, sa.func.now()), else_=n.at)),
    sa.insert(NOTE).values(text="a", at=sa.func.now()),
    sa.insert(NOTE).values(text="a").returning(n.id),
    sa.insert(COPY).from_select(["text"], sa.select(sa.func.concat(n.text, "!"))),
    sa.update(NOTE).values(text=sa.func.concat(n.text, "!")).where(n.at < sa.func.now()),
    sa.update(NOTE).values(text=sa.select(COPY.c.text).where(COPY.c.id == n.id).scalar_subquery()),
    sa.delete(NOTE).where(n.id.in_(sa.select(COPY.c.id))),
    sa.delete(NOTE).where(n.at < sa.func.now()).returning(n.id, n.at),
    sa.select(sa.exists().where(n.id == COPY.c.id)),
    sa.text("SELECT now() FROM note"),
    CreateTable(NOTE),
    CreateTable(COPY),
    CreateIndex(RECENT_DAYS),
]
SQLITE = [
    *BOTH,
    sa.select(sa.func.count().filter(n.id > 1)),
    sa.select(n.id).order_by(n.text.nulls_first(), n.at.nulls_last()),
    CreateIndex(INDEX),
]
MARIADB = [*BOTH, sa.select(sa.func.greatest(n.id, 3), sa.func.least(n.id, 3))]
STATEMENTS = [("sqlite://", each) for each in SQLITE] + [("mariadb+pymysql://", each) for each in MARIADB]


def dialects(url: str) -> tuple[sa.Dialect, sa.Dialect]:
    """Return the dialect of an engine that is not prepared, and of one that is."""
    pytest.importorskip("pymysql")
    before, prepared = sa.create_engine(url), sa.create_engine(url)
    sqlaqueue.prepare(prepared)
    for each in (before, prepared):
        # As the first connection would find them.
        each.dialect.server_version_info = (11, 4) if "mariadb" in url else (3, 45)
        if "mariadb" in url:
            each.dialect.insert_returning = each.dialect.delete_returning = True  # type: ignore[misc] # of this one
    return before.dialect, prepared.dialect


@pytest.mark.parametrize(("url", "statement"), STATEMENTS, ids=lambda value: " ".join(str(value).split())[:60])
def test_a_programs_statement_is_compiled_as_before(url: str, statement: Any) -> None:
    before, prepared = dialects(url)
    first, second = statement.compile(dialect=before), statement.compile(dialect=prepared)
    expected, found = str(first), str(second)
    if "mariadb" in url:
        # As the documentation says, moments have microseconds.
        expected = expected.replace("DATETIME", "DATETIME(6)")
    assert found == expected
    # A column of the system is none of CREATE TABLE.
    assert "None" not in found
    if hasattr(first, "params"):
        assert second.params == first.params


TYPES = [
    ("sqlite://", sa.BigInteger(), "BIGINT", "INTEGER"),
    ("sqlite://", sa.DateTime(), "DATETIME", "DATETIME"),
    ("mariadb+pymysql://", sa.BigInteger(), "BIGINT", "BIGINT"),
    ("mariadb+pymysql://", sa.DateTime(), "DATETIME", "DATETIME(6)"),
    ("mariadb+pymysql://", sa.ARRAY(sa.Text), None, "JSON"),
    ("mariadb+pymysql://", postgresql.JSONB(), None, "JSON"),
]


@pytest.mark.parametrize(("url", "type_", "before", "prepared"), TYPES)
def test_types_differ_on_prepared_engines_only(url: str, type_: Any, before: str | None, prepared: str) -> None:
    not_prepared, dialect = dialects(url)
    assert type_.compile(dialect=dialect) == prepared
    if before is not None:
        assert type_.compile(dialect=not_prepared) == before
    else:
        with pytest.raises(CompileError):
            type_.compile(dialect=not_prepared)


HOOKS = """
import sqlalchemy as sa
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.schema import CreateColumn, CreateTable

@compiles(sa.BigInteger, "sqlite")
def render_big_integer(type_, compiler, **options):
    return "NUMBER"

@compiles(CreateColumn)
def render_column(create, compiler, **options):
    return compiler.visit_create_column(create, **options) + " /* mine */"

import sqlaqueue
prepared, other = sqlaqueue.prepare(sa.create_engine("sqlite://")), sa.create_engine("sqlite://")
moment = sa.Column("at", sa.DateTime(timezone=True), server_default=sa.func.now())
table = sa.Table("note", sa.MetaData(), sa.Column("n", sa.BigInteger), moment)
for engine in (prepared, other):
    print(" ".join(str(CreateTable(table).compile(engine)).split()))
"""


def test_renderings_of_the_program_stay() -> None:
    # In an interpreter of its own: they are registered for the whole process, before the library's.
    ran = subprocess.run([sys.executable, "-c", HOOKS], check=True, capture_output=True, text=True)
    prepared, other = ran.stdout.splitlines()
    assert other == "CREATE TABLE note ( n NUMBER /* mine */, at DATETIME DEFAULT CURRENT_TIMESTAMP /* mine */ )"
    assert prepared.startswith("CREATE TABLE note ( n INTEGER /* mine */, at DATETIME DEFAULT (strftime(")
    assert prepared.endswith(")) /* mine */ )")


VALUES = [
    (sa.Integer(), 3),
    (sa.String(), "a"),
    (sa.Numeric(10, 2), Decimal("1.50")),
    (sa.Float(), 1.5),
    (sa.Date(), date(2026, 1, 1)),
    (sa.DateTime(), MOMENT),
    (sa.Time(), time(12, 30)),
    (sa.Boolean(), True),
    (sa.JSON(), {"a": [1, None]}),
    (sa.LargeBinary(), b"a"),
    (sa.Enum("a", "b"), "a"),
    (sa.Interval(), timedelta(hours=30, microseconds=5)),
]


@pytest.mark.filterwarnings("ignore:Dialect sqlite.* does .*not.* support Decimal")
@pytest.mark.parametrize(("type_", "value"), VALUES, ids=lambda value: repr(value)[:20])
def test_a_value_is_stored_and_read_as_before(type_: Any, value: object) -> None:
    stored: list[Any] = []
    for prepares in (False, True):
        engine = sa.create_engine("sqlite://")
        if prepares:
            sqlaqueue.prepare(engine)
        table = sa.Table("one", sa.MetaData(), sa.Column("value", type_))
        with engine.connect() as connection:
            table.create(connection)
            connection.execute(sa.insert(table).values(value=value))
            assert connection.scalar(sa.select(table.c.value)) == value
            stored.append(connection.exec_driver_sql("SELECT value, typeof(value) FROM one").one())
        engine.dispose()
    assert stored[0] == stored[1]


def test_statements_about_tables_of_the_library_are_translated() -> None:
    """As its columns have texts in UTC with microseconds, with which ``CURRENT_TIMESTAMP`` does not compare."""
    from tests.sqlite.models import Email  # noqa: PLC0415 - it has the tables of a file

    _, prepared = dialects("sqlite://")
    email = aliased(Email)
    for statement in (
        sa.select(Email).where(Email.run_at < sa.func.now()),
        sa.select(email.id).where(email.run_at < sa.func.now()),
        sa.select(NOTE).where(sa.exists().where(Email.id == n.id), n.at < sa.func.now()),
        sa.update(Email).values(run_at=sa.func.now()),
        sa.insert(Email).values(run_at=sa.func.now()),
        # So are moments with a time zone, which a prepared engine has in UTC.
        sa.select(sa.func.now(type_=sa.DateTime(timezone=True))),
        sa.select(ZONED).where(ZONED.c.at < sa.func.now()),
        sa.update(ZONED).values(at=sa.func.now()),
        CreateTable(ZONED),
        sa.select(sa.select(Email.run_at).subquery().c.run_at < sa.func.now()),
    ):
        assert "CURRENT_TIMESTAMP" not in str(statement.compile(dialect=prepared))


# -- many jobs -----------------------------------------------------------------------------------------------------


@contextmanager
def counted_work(session: Session) -> Iterator[list[int]]:
    """Count the steps of SQLite's machine, or the rows that MariaDB reads one after another."""
    counts = [0]
    connection = session.connection()
    if connection.dialect.name == "sqlite":
        driver = connection.connection.driver_connection
        assert driver is not None

        def step() -> int:
            counts[0] += 1
            return 0

        driver.set_progress_handler(step, 1000)
        yield counts
        driver.set_progress_handler(None, 0)
        return
    status = sa.text("SHOW SESSION STATUS LIKE 'Handler_read_rnd_next'")
    before = int(session.execute(status).one()[1])
    yield counts
    counts[0] = int(session.execute(status).one()[1]) - before


def test_duplicates_are_looked_for_by_several_attributes(sessions: Sessions) -> None:
    """The time is in proportion to the number of jobs."""
    attributes = {name: mapped_column(type_) for name, type_ in {"day": sa.Integer, "kind": TEXT}.items()}
    reminder = make_job(attributes=attributes, unique=Unique("payload", "day", "kind"))
    make_session = sessions(reminder)
    work: list[int] = []
    for number in (300, 1200):
        with make_session() as session, counted_work(session) as counts:
            jobs = [reminder(payload=f"c{n}", day=n, kind="call") for n in range(number)]
            assert all(each.created for each in enqueue(session, jobs))
        work += counts
    assert work[1] < 6 * work[0]


# -- an engine for each class: what is refused depends on the class, not on the session ----------------------------


class TwoEngines(DeclarativeBase):
    pass


class Email(QueueMixin, TwoEngines):
    __tablename__ = "email"
    __queue__ = QueueConfig(strategy="update_status")
    id: Mapped[int] = mapped_column(primary_key=True)


class Thumbnail(QueueMixin, TwoEngines):
    __tablename__ = "thumbnail"
    __queue__ = QueueConfig(strategy="update_status")
    id: Mapped[int] = mapped_column(primary_key=True)


@pytest.fixture
def file(tmp_path: Any) -> Iterator[sa.Engine]:
    made = sqlaqueue.prepare(sa.create_engine(f"sqlite:///{tmp_path}/jobs.db"))
    TwoEngines.metadata.create_all(made)
    yield made
    made.dispose()


@pytest.fixture(params=["binds", "another_default"])
def both(database: Database, file: sa.Engine, request: pytest.FixtureRequest) -> Iterator[sessionmaker[Session]]:
    postgresql = sa.create_engine(database.url())
    TwoEngines.metadata.create_all(postgresql)
    yield (
        sessionmaker(binds={Email: postgresql, Thumbnail: file})
        if request.param == "binds"
        else sessionmaker(file, binds={Email: postgresql})
    )
    postgresql.dispose()


def test_a_doctor_examines_the_queues_on_both(both: sessionmaker[Session], file: sa.Engine) -> None:
    with both() as session:
        # The server itself is one for tests.
        assert [found for found in doctor(session, Email, Thumbnail) if found.queue is not None] == []
    with file.begin() as connection:
        connection.execute(sa.text("DROP INDEX ix_thumbnail_queue_claim"))
    with both() as session:
        found = [each for each in doctor(session, Email, Thumbnail) if each.queue is not None]
        assert [(each.code, each.queue) for each in found] == [("missing_index", "thumbnail")]


async def test_a_dashboard_shows_the_queues_on_both(both: sessionmaker[Session]) -> None:
    with both() as session:
        session.add_all([Email(), Thumbnail(), Thumbnail()])
        session.commit()
    app = Dashboard([Email, Thumbnail], both, access=lambda _: Access(read=True), origins=["http://dashboard"])
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://dashboard") as client:
        queues = (await client.get("/api/queues")).json()["queues"]
        assert {each["name"]: each["pending"] for each in queues} == {"email": 1, "thumbnail": 2}
        for queue in ("email", "thumbnail"):
            page = await client.get(f"/queues/{queue}")
            assert (page.status_code, f"<h1>{queue}</h1>" in page.text) == (200, True)


def test_a_dashboard_with_an_engine_that_is_configured_later(both: sessionmaker[Session]) -> None:
    Dashboard([Email], sessionmaker(), access=lambda _: Access(read=True))


@pytest.mark.parametrize("model", [Email, Thumbnail])
def test_statistics_of_each(both: sessionmaker[Session], file: sa.Engine, model: Any) -> None:
    index = next(index for index in model.__table__.indexes if str(index.name).endswith("_claim"))
    with both() as session:
        session.add(model(id=1))
        session.commit()
        admin = QueueAdmin(session, model)
        assert admin.stats().states["pending"] == 1
        assert admin.stats().missing_indexes == []
        session.rollback()
        index.drop(session.get_bind(sa.inspect(model)))
        assert admin.stats().missing_indexes == [index.name]


@pytest.mark.parametrize("model", [Email, Thumbnail])
def test_a_consumer_of_each(both: sessionmaker[Session], model: Any) -> None:
    with both.begin() as session:
        session.add_all(model(id=number) for number in range(3))
    Consumer(model, lambda session, job: None, both).drain()
    with both() as session:
        assert session.scalars(sa.select(model.status)).all() == ["completed"] * 3
