"""The functions work with whatever an application has: its sessions, its mappings, and libraries on SQLAlchemy."""

from __future__ import annotations

import asyncio
import unittest
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any, ClassVar

import factory
import pytest
import sqlalchemy as sa
import sqlmodel
from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session, async_sessionmaker, create_async_engine
from sqlalchemy.orm import (
    DeclarativeBase,
    Mapped,
    Query,
    Session,
    mapped_column,
    relationship,
    scoped_session,
    selectinload,
    sessionmaker,
)

from sqlaqueue import QueueConfig, QueueMixin, States
from sqlaqueue.exc import ConfigurationError, NotClaimableError
from sqlaqueue.testing import async_drain, async_enqueued, async_run_job, crash, drain, enqueued, run_job, travel
from tests.servers import Database
from tests.testing.app import Email, HeldEmail, LeasedEmail, MessageEmail, Sent, send


@pytest.mark.parametrize("model", [LeasedEmail, HeldEmail, MessageEmail])
def test_the_recipe_of_sqlalchemy(engine: sa.Engine, model: type[Email]) -> None:
    """As in "Joining a Session into an External Transaction" of SQLAlchemy's documentation."""

    class SomeTest(unittest.TestCase):
        def setUp(self) -> None:
            self.connection = engine.connect()
            self.trans = self.connection.begin()
            self.session = sessionmaker()(bind=self.connection, join_transaction_mode="create_savepoint")

        def test_something(self) -> None:
            self.session.add(email := model(to="ada@example.com"))
            self.session.commit()
            assert enqueued(self.session, model, to="ada@example.com") == [email]
            assert run_job(self.session, email, send).state == "completed"
            assert email.status == "completed"

        def test_something_with_rollbacks(self) -> None:
            self.session.add(model(to="undone@example.com"))
            self.session.flush()
            self.session.rollback()
            self.session.add(email := model(to="nobody"))
            self.session.commit()
            assert run_job(self.session, email, send).outcome == "retried"
            self.session.commit()
            assert email.attempts == 1
            crash_and_travel(self.session, email)
            assert drain(self.session, model, send) == 1
            self.session.commit()
            assert email.status == "failed"

        def tearDown(self) -> None:
            self.session.close()
            self.trans.rollback()
            self.connection.close()

    result = unittest.TestResult()
    unittest.defaultTestLoader.loadTestsFromTestCase(SomeTest).run(result)
    assert (result.testsRun, result.errors, result.failures) == (2, [], [])


def crash_and_travel(session: Session, email: Any) -> None:
    with pytest.raises(AssertionError, match="is not due"):
        crash(session, email)
    travel(session, 60)


@pytest.mark.parametrize("model", [LeasedEmail, HeldEmail])
def test_a_session_of_an_engine(session: Session, model: type[Email]) -> None:
    session.add(email := model(to="ada@example.com"))
    assert run_job(session, email, send).state == "completed"
    assert email.status == "completed"
    session.rollback()


def test_within_a_savepoint_of_the_test(session: Session) -> None:
    savepoint = session.begin_nested()
    session.add(email := LeasedEmail(to="ada@example.com"))
    assert run_job(session, email, send).state == "completed"
    savepoint.rollback()
    assert session.scalars(sa.select(LeasedEmail)).all() == []


class AppSession(Session):
    """A session with a constructor of its own, and with listeners."""

    def __init__(self, tenant: str, **options: Any) -> None:
        super().__init__(**options)
        self.tenant = tenant
        self.flushes = 0


@sa.event.listens_for(AppSession, "after_flush")
def _count(session: AppSession, _: object) -> None:
    session.flushes += 1


def test_a_session_class_of_the_application(engine: sa.Engine) -> None:
    seen: list[Any] = []

    def look(session: Session, email: Email) -> None:
        assert isinstance(session, AppSession)
        session.add(Sent(to="x"))
        session.flush()
        seen.append((session.tenant, session.flushes, session.info["user"], session.autoflush))

    with sessionmaker(engine, class_=AppSession, tenant="acme", info={"user": "ada"}, autoflush=False)() as session:
        session.add(email := LeasedEmail(to="ada@example.com"))
        assert run_job(session, email, look).exception is None
        assert seen == [("acme", 2, "ada", False)]


class Emails(Query[Any]):
    def active(self) -> Emails:
        return self.filter(LeasedEmail.status == "processing")


def test_the_query_class_of_the_application(engine: sa.Engine) -> None:
    def look(session: Any, email: Email) -> None:
        assert session.query(LeasedEmail).active().count() == 1

    with sessionmaker(engine, query_cls=Emails)() as session:
        session.add(email := LeasedEmail(to="ada@example.com"))
        run_job(session, email, look, check=True)


def test_listeners_of_the_tests_session_are_not_called(engine: sa.Engine) -> None:
    commits: list[Any] = []
    with Session(engine) as session:
        sa.event.listen(session, "after_commit", commits.append)
        session.add(email := LeasedEmail(to="ada@example.com"))
        run_job(session, email, send)
    assert commits == []


def test_a_scoped_session(engine: sa.Engine) -> None:
    session = scoped_session(sessionmaker(engine))
    session.add(email := LeasedEmail(to="ada@example.com"))
    assert enqueued(session, LeasedEmail) == [email]  # type: ignore[arg-type]  # it has the methods of a Session
    assert run_job(session, email, send).state == "completed"  # type: ignore[arg-type]  # it has the methods of a Session
    session.remove()


def test_a_session_with_several_engines(engine: sa.Engine, shared_database: Database) -> None:
    other = sa.create_engine(shared_database.url())
    with Session(binds={Email: engine, Sent: other}) as session:
        session.add(email := LeasedEmail(to="ada@example.com"))
        assert run_job(session, email, send).exception is None
        assert [sent.to for sent in session.scalars(sa.select(Sent))] == ["ada@example.com"]
        travel(session, 60)
        session.rollback()
    other.dispose()


def test_a_session_that_reads_from_a_replica(engine: sa.Engine, shared_database: Database) -> None:
    replica = sa.create_engine(shared_database.url())

    class Routing(Session):
        def get_bind(self, mapper: Any = None, *, clause: Any = None, **_: Any) -> Any:
            return engine if self._flushing or isinstance(clause, sa.UpdateBase) else replica

    with Routing() as session:
        session.add(email := LeasedEmail(to="ada@example.com"))
        session.flush()
        seen: list[Any] = []

        def look(own: Session, job: Email) -> None:
            seen.extend(own.scalars(sa.select(LeasedEmail.to)))

        # Reads of the handler and of the library go to the connection that has written the job.
        assert run_job(session, email, look).state == "completed"
        assert seen == ["ada@example.com"]
    replica.dispose()


def test_autocommit_is_refused_by_the_database(engine: sa.Engine) -> None:
    with Session(engine.execution_options(isolation_level="AUTOCOMMIT")) as session:
        session.add(email := LeasedEmail(to="ada@example.com"))
        with pytest.raises(sa.exc.DBAPIError, match="SAVEPOINT can only be used in transaction blocks"):
            run_job(session, email, send)
        session.delete(email)
        session.flush()


@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
def test_other_isolation_levels(engine: sa.Engine, level: Any) -> None:
    with Session(engine.execution_options(isolation_level=level)) as session:
        session.add_all([email := LeasedEmail(to="ada@example.com"), HeldEmail(to="bob@example.com")])
        assert run_job(session, email, send).state == "completed"
        assert drain(session, HeldEmail, send) == 1
        session.rollback()


@pytest.mark.parametrize("model", [LeasedEmail, HeldEmail, MessageEmail])
def test_the_connection_is_left_as_it_was(engine: sa.Engine, model: type[Email]) -> None:
    """No listener, setting or savepoint remains."""

    def roll_back(session: Session, email: Email) -> None:
        session.rollback()

    names = ("commit", "rollback", "before_cursor_execute")
    with engine.connect() as connection:
        transaction = connection.begin()
        before = settings_of(connection)
        with Session(connection, join_transaction_mode="create_savepoint") as session:
            session.add_all([email := model(to="ada@example.com"), other := model(to="bob@example.com")])
            session.commit()
            run_job(session, email, send)
            crash(session, other)
            drain(session, model, roll_back, scheduled=True)
            # Here, as the end of the session rolls its savepoint back, and the settings with it.
            assert settings_of(connection) == before
        assert connection.get_nested_transaction() is None
        assert [list(getattr(connection.dispatch, name)) for name in names] == [[], [], []]
        transaction.rollback()


def settings_of(connection: sa.Connection) -> dict[str, str]:
    found = connection.execute(sa.text("SELECT name, setting FROM pg_settings"))
    return {row.name: row.setting for row in found}


# -- with other libraries ------------------------------------------------------------------------------------------


class EmailFactory(factory.alchemy.SQLAlchemyModelFactory):  # type: ignore[misc]  # factory_boy has no types
    class Meta:
        model = LeasedEmail
        sqlalchemy_session_persistence = "commit"

    to = factory.Sequence(lambda number: f"user{number}@example.com")


def test_factory_boy(engine: sa.Engine) -> None:
    with engine.connect() as connection:
        transaction = connection.begin()
        with Session(connection, join_transaction_mode="create_savepoint") as session:
            EmailFactory._meta.sqlalchemy_session = session
            emails = EmailFactory.create_batch(3)
            assert enqueued(session, LeasedEmail) == emails
            assert run_job(session, emails[0], send).state == "completed"
            assert drain(session, LeasedEmail, send) == 2
        transaction.rollback()


class Task(QueueMixin, sqlmodel.SQLModel, table=True):
    __queue__ = QueueConfig(strategy="update_status")
    id: int | None = sqlmodel.Field(default=None, primary_key=True)
    name: str


def test_sqlmodel(engine: sa.Engine) -> None:
    seen: list[Any] = []

    def handle(session: sqlmodel.Session, task: Task) -> None:
        seen.extend(session.exec(sqlmodel.select(Task.name)).all())

    with engine.connect() as connection:
        transaction = connection.begin()
        sqlmodel.SQLModel.metadata.create_all(connection)
        with sqlmodel.Session(connection, join_transaction_mode="create_savepoint") as session:
            session.add(task := Task(name="one"))
            assert enqueued(session, Task, name="one") == [task]
            assert run_job(session, task, handle).exception is None
            assert task.status == "completed"
        transaction.rollback()
    assert seen == ["one"]


# -- what the test's session shows afterwards ----------------------------------------------------------------------


class Shop(DeclarativeBase):
    pass


class Customer(Shop):
    __tablename__ = "customer"
    id: Mapped[int] = mapped_column(primary_key=True)
    balance: Mapped[int] = mapped_column(default=0)


class Invoice(QueueMixin, Shop):
    __tablename__ = "invoice"
    __queue__ = QueueConfig(strategy="update_status")
    id: Mapped[int] = mapped_column(primary_key=True)
    customer_id: Mapped[int] = mapped_column(sa.ForeignKey(Customer.id))
    customer: Mapped[Customer] = relationship()


def book(session: Session, invoice: Invoice) -> None:
    invoice.customer.balance += 10


def test_related_instances_show_the_changes(engine: sa.Engine) -> None:
    with engine.connect() as connection, Session(connection) as session:
        Shop.metadata.create_all(connection)
        session.add(invoice := Invoice(customer=Customer()))
        run_job(session, invoice, book)
        assert invoice.customer.balance == 10
        session.delete(invoice)
        run_job(session, other := _added(session, Invoice(customer=Customer())), book)
        assert other.status == "completed"


def _added(session: Session, job: Any) -> Any:
    session.add(job)
    return job


def test_async_instances_need_no_refresh(engine: sa.Engine, shared_database: Database) -> None:
    async def abook(session: AsyncSession, invoice: Invoice) -> None:
        customer = await session.get_one(Customer, invoice.customer_id)
        customer.balance += 10

    async def main() -> None:
        async_engine = create_async_engine(shared_database.url("asyncpg"), poolclass=sa.NullPool)
        async with async_engine.connect() as connection:
            await connection.run_sync(Shop.metadata.create_all)
            session = AsyncSession(connection)
            session.add(invoice := Invoice(customer=Customer()))
            assert (await async_run_job(session, invoice, abook)).exception is None
            assert invoice.status == "completed"
            assert invoice.customer.balance == 10
            found = await session.scalars(sa.select(Customer).options(selectinload("*")))
            assert [customer.balance for customer in found] == [10]
            await session.close()

    asyncio.run(main())


def test_async_sessions(shared_database: Database) -> None:
    class AppAsyncSession(AsyncSession):
        sync_session_class = AppSession

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, tenant="acme", **options)

    async def asend(session: AsyncSession, email: Email) -> None:
        assert isinstance(session, AppAsyncSession)
        assert session.sync_session.tenant == "acme"
        connection = await session.connection()
        await connection.execute(sa.insert(Sent).values(to=email.to))

    async def main() -> None:
        engine = create_async_engine(shared_database.url(), poolclass=sa.NullPool)
        scoped = async_scoped_session(async_sessionmaker(engine, class_=AppAsyncSession), asyncio.current_task)
        scoped.add(email := LeasedEmail(to="ada@example.com"))
        assert await async_enqueued(scoped, LeasedEmail) == [email]  # type: ignore[arg-type]  # it has the methods
        assert (await async_run_job(scoped, email, asend)).exception is None  # type: ignore[arg-type]  # it has the methods
        assert await async_drain(scoped, LeasedEmail, asend) == 0  # type: ignore[arg-type]  # it has the methods
        await scoped.remove()
        async with AsyncSession(engine) as session:
            with pytest.raises(ConfigurationError, match=r"use async_run_job"):
                run_job(session, email, send)  # type: ignore[arg-type]  # that is the mistake
        with pytest.raises(ConfigurationError, match=r"use run_job"):
            await async_run_job(Session(), email, asend)  # type: ignore[arg-type]  # that is the mistake

    asyncio.run(main())


# -- mappings ------------------------------------------------------------------------------------------------------


class Mappings(DeclarativeBase):
    pass


class Message(QueueMixin, Mappings):
    """Single-table and joined inheritance."""

    __tablename__ = "message"
    __queue__ = QueueConfig(strategy="update_status")
    __mapper_args__: ClassVar[dict[str, Any]] = {"polymorphic_on": "kind", "polymorphic_identity": "message"}
    id: Mapped[int] = mapped_column(primary_key=True)
    kind: Mapped[str]
    done: Mapped[str | None]


class Text(Message):
    __mapper_args__: ClassVar[dict[str, Any]] = {"polymorphic_identity": "text"}


class Letter(Message):
    __tablename__ = "letter"
    __mapper_args__: ClassVar[dict[str, Any]] = {"polymorphic_identity": "letter"}
    id: Mapped[int] = mapped_column(sa.ForeignKey(Message.id), primary_key=True)
    street: Mapped[str]


class Parcel(QueueMixin, Mappings):
    """A composite key, other names and values, its own version, in a schema of its own."""

    __tablename__ = "parcel"
    __table_args__: ClassVar[dict[str, Any]] = {"schema": "depot"}
    __queue__ = QueueConfig(
        strategy="batch_select",
        columns={"status": "state", "run_at": "due", "attempts": "tries"},
        states=States(pending="waiting", processing="moving", completed="there"),
    )
    country: Mapped[str] = mapped_column(primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True)
    version: Mapped[int] = mapped_column()
    __mapper_args__: ClassVar[dict[str, Any]] = {"version_id_col": version}


class Legacy(QueueMixin, Mappings):
    """An adopted table, with times without a zone and no count of attempts."""

    __tablename__ = "legacy"
    __queue__ = QueueConfig(strategy="batch_select", adopt={"status": "state", "run_at": "due"})
    id: Mapped[int] = mapped_column(primary_key=True)
    state: Mapped[str] = mapped_column(sa.String(20), default="pending")
    due: Mapped[datetime] = mapped_column(sa.DateTime(), server_default=sa.func.now())


@pytest.fixture
def mapped(engine: sa.Engine) -> Iterator[Session]:
    with engine.connect() as connection:
        transaction = connection.begin()
        connection.execute(sa.text("CREATE SCHEMA depot"))
        Mappings.metadata.create_all(connection)
        with Session(connection, join_transaction_mode="create_savepoint") as session:
            yield session
        transaction.rollback()


def mark(session: Session, message: Message) -> None:
    message.done = type(message).__name__


def test_inheritance(mapped: Session) -> None:
    jobs: list[Message] = [Message(), Text(), Letter(street="Main")]
    mapped.add_all(jobs)
    assert enqueued(mapped, Message) == jobs
    assert enqueued(mapped, Text) == jobs[1:2]
    for job in jobs:
        assert run_job(mapped, job, mark).state == "completed"
    assert [job.done for job in jobs] == ["Message", "Text", "Letter"]


def test_handlers_by_class(mapped: Session) -> None:
    handlers = {Message: mark, Letter: lambda session, letter: setattr(letter, "done", letter.street)}
    mapped.add_all([text := Text(), letter := Letter(street="Main")])
    assert run_job(mapped, letter, handlers).state == "completed"
    assert drain(mapped, Message, handlers) == 1
    assert (text.done, letter.done) == ("Text", "Main")


def test_composite_keys_and_other_names(mapped: Session) -> None:
    def fail(own: Session, parcel: Parcel) -> None:
        raise ValueError

    mapped.add_all([first := Parcel(country="de", number=1), second := Parcel(country="fr", number=1)])
    assert enqueued(mapped, Parcel, country="fr") == [second]
    result = run_job(mapped, first, fail)
    assert (result.state, first.state, first.tries) == ("pending", "waiting", 1)
    assert enqueued(mapped, Parcel) == [first, second]
    crash(mapped, second)
    travel(mapped, timedelta(hours=1))
    assert drain(mapped, Parcel, lambda own, parcel: None) == 2
    assert (first.state, second.state) == ("there", "there")


def test_an_adopted_table(mapped: Session) -> None:
    later = datetime.now(UTC).replace(tzinfo=None) + timedelta(hours=1)
    mapped.add(job := Legacy(due=later))
    with pytest.raises(NotClaimableError, match="is not due"):
        run_job(mapped, job, lambda own, legacy: None)
    travel(mapped, timedelta(hours=1))
    assert drain(mapped, Legacy, lambda own, legacy: None) == 1
    assert job.state == "completed"


def test_a_handler_that_deletes_its_job(mapped: Session) -> None:
    mapped.add(text := Text())
    result = run_job(mapped, text, lambda own, job: own.delete(job))
    assert (result.outcome, result.state, result.job) == ("completed", "gone", None)
