"""Classes for COPY: columns of each type, with each kind of default; a database with their tables; and each driver."""

import asyncio
import enum
import uuid
from collections.abc import Callable, Iterable, Iterator
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.dialects import postgresql
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, column_property, mapped_column, relationship
from sqlalchemy.pool import NullPool

from sqlaqueue import QueueConfig, QueueMixin, async_copy_in, copy_in
from tests.servers import Database, Server


class Base(DeclarativeBase):
    pass


Unmapped = sa.MetaData()
"""The MetaData of a table that is in another schema."""


class Colour(enum.Enum):
    RED = "r"
    BLUE = "b"


class Shouted(sa.TypeDecorator[str]):
    impl = sa.Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: sa.Dialect) -> str | None:
        return None if value is None else value.upper()


class Wrapped(sa.types.UserDefinedType[str]):
    cache_ok = True

    def get_col_spec(self, **_: Any) -> str:
        return "text"

    def bind_expression(self, bindparam: Any) -> Any:
        return sa.func.lower(bindparam)


class Anything(QueueMixin, Base):
    __tablename__ = "anything"
    id: Mapped[int] = mapped_column(primary_key=True)
    to: Mapped[str] = mapped_column("send to", default="nobody")
    by_name: Mapped[Colour | None]
    by_value: Mapped[Colour | None] = mapped_column(
        sa.Enum(Colour, name="by_value", values_callable=lambda kind: [member.value for member in kind])
    )
    json: Mapped[Any] = mapped_column(sa.JSON, nullable=True)
    jsonb: Mapped[Any] = mapped_column(postgresql.JSONB(none_as_null=True), nullable=True)
    shouted: Mapped[str | None] = mapped_column(Shouted)
    uid: Mapped[uuid.UUID | None]
    uid_as_text: Mapped[str | None] = mapped_column(sa.Uuid(as_uuid=False))
    uid_as_char: Mapped[uuid.UUID | None] = mapped_column(sa.Uuid(native_uuid=False))
    moment: Mapped[datetime | None] = mapped_column(sa.DateTime(timezone=True))
    local: Mapped[datetime | None] = mapped_column(sa.DateTime())
    day: Mapped[date | None]
    clock: Mapped[time | None]
    span: Mapped[timedelta | None]
    tags: Mapped[list[str | None] | None] = mapped_column(postgresql.ARRAY(sa.Text))
    grid: Mapped[list[list[int]] | None] = mapped_column(postgresql.ARRAY(sa.Integer, dimensions=2))
    colours: Mapped[list[Colour] | None] = mapped_column(postgresql.ARRAY(sa.Enum(Colour, name="colour")))
    picture: Mapped[bytes | None]
    price: Mapped[Decimal | None] = mapped_column(sa.Numeric)
    share: Mapped[float | None]
    flag: Mapped[bool | None]
    count: Mapped[int | None]
    text: Mapped[str | None] = mapped_column(sa.Text)


def _word_of(context: Any) -> str:
    return f"{context.get_current_parameters()['id']}, {context.current_parameters['size']}"


class Defaults(QueueMixin, Base):
    __tablename__ = "defaults"
    id: Mapped[int] = mapped_column(primary_key=True)
    version: Mapped[int] = mapped_column()
    size: Mapped[int] = mapped_column(default=3)
    colour: Mapped[Colour] = mapped_column(sa.Enum(Colour, name="colour"), default=Colour.BLUE)
    uid: Mapped[uuid.UUID] = mapped_column(default=uuid.uuid4)
    word: Mapped[str] = mapped_column(default=_word_of)
    server: Mapped[str] = mapped_column(server_default="from the server")
    double: Mapped[int] = mapped_column(sa.Computed("size * 2", persisted=True))

    __mapper_args__ = {"version_id_col": version}  # noqa: RUF012 - as SQLAlchemy reads it


class SqlDefault(QueueMixin, Base):
    __tablename__ = "sql_default"
    id: Mapped[int] = mapped_column(primary_key=True)
    made: Mapped[datetime] = mapped_column(default=sa.func.now())
    number: Mapped[int] = mapped_column(sa.Sequence("sql_default_numbers"))


class Customer(Base):
    __tablename__ = "customer"
    id: Mapped[int] = mapped_column(primary_key=True)


class Order(QueueMixin, Base):
    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)
    customer_id: Mapped[int | None] = mapped_column(sa.ForeignKey(Customer.id))
    customer: Mapped[Customer | None] = relationship()
    size: Mapped[int] = mapped_column(default=1)
    double: Mapped[int] = column_property(sa.literal_column("1"))
    wrapped: Mapped[str | None] = mapped_column(Wrapped)


class Message(QueueMixin, Base):
    __tablename__ = "message"
    __mapper_args__ = {"polymorphic_on": "kind", "polymorphic_identity": "message"}  # noqa: RUF012 - as SQLAlchemy reads it
    id: Mapped[int] = mapped_column(primary_key=True)
    kind: Mapped[str]


class Email(Message):
    __mapper_args__ = {"polymorphic_identity": "email"}  # noqa: RUF012 - as SQLAlchemy reads it
    address: Mapped[str | None]


class Parcel(Message):
    __tablename__ = "parcel"
    __mapper_args__ = {"polymorphic_identity": "parcel"}  # noqa: RUF012 - as SQLAlchemy reads it
    id: Mapped[int] = mapped_column(sa.ForeignKey(Message.id), primary_key=True)


class Odd(QueueMixin, Base):
    """Names that need quotes, and that a driver could take for parameters."""

    __tablename__ = 'Odd "table" 100%'
    __table_args__ = {"schema": "Post Office"}  # noqa: RUF012 - as SQLAlchemy reads it
    id: Mapped[int] = mapped_column(primary_key=True)
    share: Mapped[int] = mapped_column('%(share)s "of" all')


STRATEGIES: dict[str, Any] = {}
for _strategy in ("update_status", "delete_returning", "batch_select"):
    STRATEGIES[_strategy] = type(
        _strategy.title().replace("_", ""),
        (QueueMixin, Base),
        {
            "__tablename__": f"job_{_strategy}",
            "__queue__": QueueConfig(strategy=_strategy),
            "__module__": __name__,
            "id": mapped_column(sa.Integer, primary_key=True),
        },
    )


def make_elsewhere() -> Any:
    """Map a class whose schema is set by the engine's ``schema_translate_map``."""

    class Here(DeclarativeBase):
        metadata = Unmapped

    class Moved(QueueMixin, Here):
        __tablename__ = "moved"
        id: Mapped[int] = mapped_column(primary_key=True)

    return Moved


Moved = make_elsewhere()


def rows_of(engine: sa.Engine, model: Any, *attributes: str) -> list[Any]:
    columns = [getattr(model, attribute) for attribute in attributes]
    with Session(engine) as session:
        return [tuple(row) for row in session.execute(sa.select(*columns).order_by(model.id))]


# -- a database with all these tables, and each driver -----------------------------------------------------------------

HERE = "tests/copy/"
DRIVERS = ("psycopg", "psycopg2", "async psycopg", "asyncpg")
REDUNDANT = ("psycopg2", "async psycopg")
"""Each shares its protocol with one of the others, and sync or async code with the other."""
ON_ALL = ("test_copied_values_equal_inserted_values", "test_a_duplicate_key_", "test_a_rollback_undoes_the_copy")
Step = Callable[[Session], Any]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run redundant combinations only in the thorough session."""
    for item in items:
        parameters: dict[str, object] = getattr(getattr(item, "callspec", None), "params", {})
        if item.nodeid.startswith(HERE) and parameters.get("driver") in REDUNDANT and not item.name.startswith(ON_ALL):
            item.add_marker(pytest.mark.thorough)


def nothing(session: Session) -> None:
    pass


def roll_back_and_add(session: Session) -> None:
    """Continue after a failed COPY."""
    session.rollback()
    session.add(Order(id=99))
    session.commit()


class Driver:
    """A driver with ``copy_in()`` or ``async_copy_in()``."""

    def __init__(self, name: str, database: Database) -> None:
        self.name = name
        self.driver_name: Any = name.removeprefix("async ")
        self.is_async = name in {"async psycopg", "asyncpg"}
        self.url = database.url(self.driver_name)

    def copy(
        self,
        model: Any,
        rows: Iterable[Any],
        *,
        before: Step = nothing,
        after: Step = Session.commit,
        options: dict[str, Any] | None = None,
    ) -> int:
        """Copy in a new session, in which ``before`` and ``after`` are called as well."""
        arguments: dict[str, Any] = {"poolclass": NullPool, "execution_options": options or {}}
        if self.is_async:
            return asyncio.run(self._copy(model, rows, before, after, arguments))
        engine = sa.create_engine(self.url, **arguments)
        with Session(engine) as session:
            before(session)
            try:
                return copy_in(session, model, rows)
            finally:
                after(session)

    async def _copy(self, model: Any, rows: Iterable[Any], before: Step, after: Step, arguments: dict[str, Any]) -> int:
        engine = create_async_engine(self.url, **arguments)
        async with AsyncSession(engine) as session:
            await session.run_sync(before)
            try:
                return await async_copy_in(session, model, rows)
            finally:
                await session.run_sync(after)


@pytest.fixture(scope="package")
def copy_database(server: Server) -> Iterator[Database]:
    with server.database() as database:
        engine = sa.create_engine(database.url())
        with engine.begin() as connection:
            connection.exec_driver_sql('CREATE SCHEMA "Post Office"')
            connection.exec_driver_sql("CREATE SCHEMA elsewhere")
        Base.metadata.create_all(engine)
        Unmapped.create_all(engine.execution_options(schema_translate_map={None: "elsewhere"}))
        engine.dispose()
        yield database


@pytest.fixture
def engine(copy_database: Database) -> Iterator[sa.Engine]:
    engine = sa.create_engine(copy_database.url())
    with engine.begin() as connection:
        for table in reversed(Base.metadata.sorted_tables):
            connection.execute(sa.delete(table))
    yield engine
    engine.dispose()


@pytest.fixture(params=DRIVERS)
def driver(request: pytest.FixtureRequest, copy_database: Database, engine: sa.Engine) -> Driver:
    return Driver(request.param, copy_database)


@pytest.fixture
def psycopg_driver(copy_database: Database, engine: sa.Engine) -> Driver:
    return Driver("psycopg", copy_database)
