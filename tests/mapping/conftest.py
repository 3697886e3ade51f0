"""An empty database for tests of classes, which must drop all that they create; engines; and kinds of classes."""

import contextlib
import enum
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import sqlalchemy as sa
from psycopg import Connection, sql
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Session

from sqlaqueue import QueueConfig, QueueMixin, States
from tests.conftest import CONNECTIONS
from tests.models import STRATEGIES
from tests.servers import Database, Server

Objects = set[tuple[str, str]]
_OBJECTS = """
    SELECT 'relation', oid::regclass::text FROM pg_class WHERE relnamespace <> ALL (%(system)s)
    UNION ALL SELECT 'type', oid::regtype::text FROM pg_type WHERE typnamespace <> ALL (%(system)s)
    UNION ALL SELECT 'function', oid::regproc::text FROM pg_proc WHERE pronamespace <> ALL (%(system)s)
    UNION ALL SELECT 'trigger', tgname::text FROM pg_trigger
    UNION ALL SELECT 'schema', nspname::text FROM pg_namespace WHERE oid <> ALL (%(system)s)
"""
_SYSTEM_SCHEMAS = """
    SELECT array_agg(oid) FROM pg_namespace
    WHERE nspname IN ('pg_catalog', 'information_schema') OR nspname ~ '^pg_(toast|temp)'
"""


@dataclass
class TidyDatabase:
    """A database with a connection that reads its catalog; see the fixture ``tidy``."""

    database: Database
    connection: Connection[tuple[Any, ...]]
    empty: Objects = field(init=False)

    def __post_init__(self) -> None:
        self.empty = self.objects()

    def objects(self) -> Objects:
        """Return kind and name of all objects that are not in system schemas."""
        system = self.connection.execute(_SYSTEM_SCHEMAS).fetchone()
        assert system is not None
        rows = self.connection.execute(_OBJECTS, {"system": system[0]}).fetchall()
        return {(kind, name) for kind, name in rows}

    @contextlib.contextmanager
    def schemas(self, *names: str) -> Iterator[None]:
        """Create schemas, and drop them afterwards; they must be empty then."""
        for name in names:
            self.connection.execute(sql.SQL("CREATE SCHEMA {}").format(sql.Identifier(name)))
        yield
        for name in names:
            self.connection.execute(sql.SQL("DROP SCHEMA {}").format(sql.Identifier(name)))


@contextlib.contextmanager
def created(engine: sa.Engine, *collections: sa.MetaData) -> Iterator[None]:
    for metadata in collections:
        metadata.create_all(engine)
    yield
    for metadata in reversed(collections):
        metadata.drop_all(engine)


class DatabasePool:
    """Reuses one database while tests leave it empty, since creating a database takes longer than most tests."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._stack = contextlib.ExitStack()
        self._current: TidyDatabase | None = None

    def acquire(self) -> TidyDatabase:
        if self._current is None:
            database = self._stack.enter_context(self._server.database())
            connection = self._stack.enter_context(database.connect())
            del CONNECTIONS.made[connection]  # the next tests use it as well
            self._current = TidyDatabase(database, connection)
        return self._current

    def release(self, database: TidyDatabase) -> None:
        if database.objects() != database.empty:
            self.close()

    def close(self) -> None:
        self._current = None
        self._stack.close()


@pytest.fixture(scope="session")
def supply(server: Server) -> Iterator[DatabasePool]:
    supply = DatabasePool(server)
    yield supply
    supply.close()


@pytest.fixture
def tidy(supply: DatabasePool) -> Iterator[TidyDatabase]:
    """An empty database, which the test must leave empty."""
    database = supply.acquire()
    yield database
    supply.release(database)


@pytest.fixture
def engine(tidy: TidyDatabase) -> Iterator[sa.Engine]:
    engine = sa.create_engine(tidy.database.url())
    yield engine
    engine.dispose()


# -- one interface for tests with Session and AsyncSession -------------------------------------------------------------

DRIVERS = ("psycopg", "psycopg-async", "asyncpg", "psycopg2")


class AwaitedSession:
    """A Session with the interface of an AsyncSession."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.add_all = session.add_all

    def __contains__(self, instance: object) -> bool:
        return instance in self._session

    async def execute(self, *arguments: Any) -> Any:
        return self._session.execute(*arguments)

    async def scalars(self, *arguments: Any) -> Any:
        return self._session.scalars(*arguments)

    async def commit(self) -> None:
        self._session.commit()

    async def flush(self) -> None:
        self._session.flush()

    async def rollback(self) -> None:
        self._session.rollback()


class AwaitableEngine:
    """A sync or async engine; what it does is awaited."""

    def __init__(self, engine: sa.Engine | AsyncEngine) -> None:
        self._engine = engine

    @contextlib.asynccontextmanager
    async def session(self) -> AsyncIterator[Any]:
        """Open an AsyncSession, or a Session with the same interface."""
        if isinstance(self._engine, AsyncEngine):
            async with AsyncSession(self._engine) as async_session:
                yield async_session
        else:
            with Session(self._engine) as session:
                yield AwaitedSession(session)

    async def ddl(self, function: Callable[[sa.Connection], Any]) -> None:
        """Call a function such as ``metadata.create_all`` with a connection."""
        if isinstance(self._engine, AsyncEngine):
            async with self._engine.begin() as connection:
                await connection.run_sync(function)
        else:
            with self._engine.begin() as sync_connection:
                function(sync_connection)


@contextlib.asynccontextmanager
async def awaitable_engine(database: Any, driver: str, options: dict[str, Any]) -> AsyncIterator[AwaitableEngine]:
    """Open an engine for a database, with the named driver and execution options."""
    if driver in {"psycopg", "psycopg2"}:
        engine = sa.create_engine(database.url(driver), execution_options=options)
        try:
            yield AwaitableEngine(engine)
        finally:
            engine.dispose()
    else:
        async_engine = create_async_engine(database.url(driver.removesuffix("-async")), execution_options=options)
        try:
            yield AwaitableEngine(async_engine)
        finally:
            await async_engine.dispose()


# -- kinds of models ---------------------------------------------------------------------------------------------------

MakeConfig = Callable[..., QueueConfig]
"""Makes a QueueConfig with the strategy of the test and other options."""


def payload(number: int) -> dict[str, Any]:
    """Return the values of a job that most kinds need."""
    return {"payload": f"job {number}"}


@dataclass(kw_only=True)
class Built:
    """A mapped class with an attribute ``payload``, and how to make its jobs."""

    model: type[Any]
    values: Callable[[int], dict[str, Any]] = payload
    """Returns the values of a job by number, without queue attributes."""
    status_values: Mapping[str, str] = field(default_factory=dict)
    """State to its value in the database, if they differ."""
    schemas: tuple[str, ...] = ()
    """The schemas that must exist."""
    options: dict[str, Any] = field(default_factory=dict)
    """The execution options of the engine."""

    @property
    def table(self) -> sa.Table:
        table = sa.inspect(self.model).local_table
        assert isinstance(table, sa.Table)
        return table

    @property
    def metadata(self) -> sa.MetaData:
        return self.table.metadata

    @property
    def config(self) -> QueueConfig:
        config = self.model.__queue__
        assert isinstance(config, QueueConfig)
        return config

    def attribute(self, role: str) -> str | None:
        return self.config.attribute_for(role, role)

    def column(self, attribute: str) -> sa.Column[Any]:
        column = sa.inspect(self.model).columns[attribute]
        assert isinstance(column, sa.Column)
        return column

    @property
    def is_own_message(self) -> bool:
        return self.attribute("status") is None

    def class_of(self, number: int) -> type[Any]:
        """Return the class of a job: of those in a hierarchy each in turn."""
        classes = [mapper.class_ for mapper in sa.inspect(self.model).self_and_descendants]
        return classes[number % len(classes)]

    def job_values(self, number: int, **roles: Any) -> dict[str, Any]:
        """Return the values of a job, with values for roles that the model has."""
        given = {self.attribute(role): value for role, value in roles.items()}
        given.pop(None, None)
        return {**self.values(number), **given}

    def job(self, number: int, **roles: Any) -> Any:
        return self.class_of(number)(**self.job_values(number, **roles))


@dataclass(frozen=True)
class Kind:
    """A way to write a model, and the strategies that support it."""

    map_class: Callable[[MakeConfig], type[Any]]
    strategies: tuple[str, ...]
    options: dict[str, Any]
    """What else is to know of the class; see :class:`Built`."""

    def build(self, queue: MakeConfig) -> Built:
        return Built(model=self.map_class(queue), **self.options)


KINDS: dict[str, Kind] = {}
MapClass = Callable[[MakeConfig], Any]


def kind(*strategies: str, **options: Any) -> Callable[[MapClass], MapClass]:
    """Add a function that maps a class to the matrix, under its own name."""

    def add(map_class: MapClass) -> MapClass:
        KINDS[map_class.__name__] = Kind(map_class, strategies or STRATEGIES, options)
        return map_class

    return add


def declare(config: QueueConfig, **attributes: Any) -> type[Any]:
    """Map a class with the default key and payload, unless ``attributes`` contains them."""

    class Base(DeclarativeBase):
        metadata = attributes.pop("metadata", None) or sa.MetaData()

    body = {
        "__tablename__": "job",
        "__queue__": config,
        "id": sa.Column(sa.Integer, primary_key=True),
        "payload": sa.Column(sa.Text, nullable=False),
        **attributes,
    }
    return type("Job", (QueueMixin, Base), {name: value for name, value in body.items() if value is not None})


# -- types of a status -------------------------------------------------------------------------------------------------


class Phase(enum.Enum):
    """States by another name."""

    NEW = "n"
    RUNNING = "r"
    DONE = "d"
    DEAD = "x"
    OFF = "o"


PHASES = States(
    pending=Phase.NEW, processing=Phase.RUNNING, completed=Phase.DONE, failed=Phase.DEAD, cancelled=Phase.OFF
)


class Letter(sa.types.TypeDecorator[Phase]):
    """An application's own type: one letter for a phase."""

    impl = sa.String(1)
    cache_ok = True

    def process_bind_param(self, value: Phase | None, dialect: sa.Dialect) -> str | None:
        return value and value.value

    def process_result_value(self, value: str | None, dialect: sa.Dialect) -> Phase | None:
        return None if value is None else Phase(value)
