"""The pytest plug-in: a database for tests, and sessions whose transaction is rolled back.

It is installed as a module of its own beside the package, ``sqlaqueue_pytest_plugin`` (see ``pyproject.toml``): pytest
loads it in every run, also of projects that do not use it, and importing ``sqlaqueue`` would import SQLAlchemy. So this
file imports only pytest, and each fixture what it needs.

To use it, define one fixture in ``conftest.py``::

    @pytest.fixture(scope="session")
    def sqlaqueue_metadata():
        return Base.metadata

Every fixture can be overridden in the same way. ``sqlaqueue_server_url`` is the one for a server of your own,
``sqlaqueue_engine`` the one for a schema made by migrations.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import AsyncIterator, Callable, Iterator
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    import sqlalchemy as sa
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, async_sessionmaker
    from sqlalchemy.orm import Session, sessionmaker


_ASYNCIO_FIXTURES = "sqlaqueue_pytest_asyncio"

_LOOP_SCOPES = ("function", "class", "module", "package", "session")


@pytest.fixture(scope="session")
def sqlaqueue_metadata() -> Any:
    """The MetaData of the tables to create, or a list of several: define it in ``conftest.py``."""
    pytest.fail(
        "the fixture sqlaqueue_metadata is not defined; put one with scope='session' into conftest.py that returns the "
        "MetaData of your models, such as Base.metadata",
        pytrace=False,
    )


@pytest.fixture(scope="session")
def sqlaqueue_server_url() -> Iterator[str]:
    """The URL of a PostgreSQL server on which databases can be created; by default of an embedded one.

    The embedded server is started when it is first asked for, by each worker of pytest-xdist for itself, and its files
    are removed at the end.
    """
    from sqlaqueue.embedded_server import EmbeddedServerError, embedded_server

    with contextlib.ExitStack() as stack:
        try:
            url = stack.enter_context(embedded_server())
        except EmbeddedServerError as error:
            pytest.fail(f"{error}, by a fixture sqlaqueue_server_url", pytrace=False)
        yield url


@pytest.fixture(scope="session")
def sqlaqueue_url(sqlaqueue_server_url: str) -> Iterator[str]:
    """The URL of an empty database of this run, and of this worker of pytest-xdist; it is dropped at the end."""
    import sqlalchemy as sa

    url = sa.make_url(sqlaqueue_server_url)
    name = f"sqlaqueue_{os.environ.get('PYTEST_XDIST_WORKER', 'test')}_{secrets.token_hex(4)}"
    server = sa.create_engine(url, isolation_level="AUTOCOMMIT", poolclass=sa.NullPool)
    with server.connect() as connection:
        connection.exec_driver_sql(f"CREATE DATABASE {name}")
    yield url.set(database=name).render_as_string(hide_password=False)
    with server.connect() as connection:
        # A connection that a test has not closed must not keep the database.
        connection.exec_driver_sql(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture(scope="session")
def sqlaqueue_engine(sqlaqueue_metadata: Any, sqlaqueue_url: str) -> Iterator[sa.Engine]:
    """An engine of the database, in which the tables of ``sqlaqueue_metadata`` and their schemas are created."""
    import sqlalchemy as sa

    engine = sa.create_engine(sqlaqueue_url)
    given: Any = sqlaqueue_metadata if isinstance(sqlaqueue_metadata, list | tuple) else [sqlaqueue_metadata]
    for each in given:
        metadata: sa.MetaData = getattr(each, "metadata", each)
        with engine.begin() as connection:
            # Only those that are missing: even IF NOT EXISTS needs the privilege to create one.
            schemas = {table.schema for table in metadata.tables.values() if table.schema is not None}
            for schema in sorted(schemas - {*sa.inspect(connection).get_schema_names()}):
                connection.execute(sa.schema.CreateSchema(schema))
            metadata.create_all(connection)
    yield engine
    engine.dispose()


# -- sync ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def sqlaqueue_connection(sqlaqueue_engine: sa.Engine) -> Iterator[sa.Connection]:
    """A connection in a transaction that is rolled back after the test."""
    with sqlaqueue_engine.connect() as connection:
        transaction = connection.begin()
        yield connection
        transaction.rollback()


@pytest.fixture
def sqlaqueue_session_factory(sqlaqueue_connection: sa.Connection) -> sessionmaker[Session]:
    """A ``sessionmaker`` for code under test that makes its own sessions, all in the test's transaction."""
    from sqlalchemy.orm import sessionmaker

    return sessionmaker(sqlaqueue_connection, join_transaction_mode="create_savepoint")


@pytest.fixture
def sqlaqueue_session(sqlaqueue_session_factory: sessionmaker[Session]) -> Iterator[Session]:
    """A session in the test's transaction: it may commit, and everything is rolled back after the test."""
    with sqlaqueue_session_factory() as session:
        yield session


# -- async ---------------------------------------------------------------------------------------------------------
#
# pytest-asyncio and anyio run a fixture in the event loop of its test only if it is marked as theirs. So each has a
# fixtures of its own, and `sqlaqueue_async_connection` asks for the one that the test needs.


@pytest.fixture
def sqlaqueue_async_url(sqlaqueue_engine: sa.Engine) -> str:
    """The URL of the same database with an async driver: psycopg, or else asyncpg."""
    url = sqlaqueue_engine.url
    driver = url if url.drivername == "postgresql+psycopg" else url.set(drivername="postgresql+asyncpg")
    return driver.render_as_string(hide_password=False)


async def _async_connection(url: str) -> AsyncIterator[AsyncConnection]:
    from sqlalchemy import NullPool
    from sqlalchemy.ext.asyncio import create_async_engine

    # Without a pool: a connection belongs to the event loop of its test.
    engine = create_async_engine(url, poolclass=NullPool)
    async with engine.connect() as connection:
        transaction = await connection.begin()
        yield connection
        await transaction.rollback()


@pytest.fixture
async def sqlaqueue_anyio_connection(sqlaqueue_async_url: str) -> AsyncIterator[AsyncConnection]:
    """The connection of a test that anyio runs."""
    async for connection in _async_connection(sqlaqueue_async_url):
        yield connection


def _asyncio_connection() -> Callable[[str], AsyncIterator[AsyncConnection]]:
    """Return a new function, as the decorator of pytest-asyncio stores the scope of the loop in it."""

    async def connection(sqlaqueue_async_url: str) -> AsyncIterator[AsyncConnection]:
        """The connection of a test that pytest-asyncio runs in the loop of this scope."""
        async for connection in _async_connection(sqlaqueue_async_url):
            yield connection

    return connection


def pytest_configure(config: pytest.Config) -> None:
    """Add the fixtures for pytest-asyncio, whose decorator they need, if pytest has imported it."""
    # It has the second name if it is not loaded by its entry point, but by `-p`.
    found = (config.pluginmanager.get_plugin(name) for name in ("asyncio", "pytest_asyncio.plugin"))
    plugin: Any = next((each for each in found if hasattr(each, "fixture")), None)
    if plugin is not None:
        fixtures: Any = ModuleType(_ASYNCIO_FIXTURES)
        for scope in _LOOP_SCOPES:
            name = f"sqlaqueue_asyncio_{scope}_connection"
            setattr(fixtures, name, plugin.fixture(_asyncio_connection(), name=name, loop_scope=scope))
        config.pluginmanager.register(fixtures, _ASYNCIO_FIXTURES)


def _loop_scope(request: pytest.FixtureRequest) -> str:
    """Return the scope of the event loop in which pytest-asyncio runs a test: a connection belongs to its loop."""
    marker = request.node.get_closest_marker("asyncio")
    options = {} if marker is None else marker.kwargs
    scope = options.get("loop_scope") or options.get("scope")
    return str(scope or request.config.getini("asyncio_default_test_loop_scope") or "function")


@pytest.fixture
def sqlaqueue_async_connection(request: pytest.FixtureRequest) -> AsyncConnection:
    """An async connection in a transaction that is rolled back after the test, for pytest-asyncio and for anyio."""
    if "anyio_backend" in request.fixturenames:
        runner = "anyio"
    elif request.config.pluginmanager.has_plugin(_ASYNCIO_FIXTURES):
        runner = f"asyncio_{_loop_scope(request)}"
    else:
        pytest.fail("async tests need a runner: install pytest-asyncio, or mark the test for anyio", pytrace=False)
    connection: AsyncConnection = request.getfixturevalue(f"sqlaqueue_{runner}_connection")
    return connection


@pytest.fixture
def sqlaqueue_async_session_factory(sqlaqueue_async_connection: AsyncConnection) -> async_sessionmaker[AsyncSession]:
    """An ``async_sessionmaker`` for code under test that makes its own sessions, all in the test's transaction."""
    from sqlalchemy.ext.asyncio import async_sessionmaker

    return async_sessionmaker(
        sqlaqueue_async_connection, join_transaction_mode="create_savepoint", expire_on_commit=False
    )


@pytest.fixture
def sqlaqueue_async_session(sqlaqueue_async_session_factory: async_sessionmaker[AsyncSession]) -> AsyncSession:
    """An async session in the test's transaction: it may commit, and everything is rolled back after the test."""
    return sqlaqueue_async_session_factory()
