"""The database of the demo, embedded or the user's own, with a schema that is dropped afterwards."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator

import sqlalchemy as sa
from sqlalchemy.exc import ArgumentError, DBAPIError
from sqlalchemy.schema import CreateSchema, DropSchema

from sqlaqueue.demo.errors import CannotRunError
from sqlaqueue.demo.models import SCHEMA, Base, LeasedFile
from sqlaqueue.embedded_server import EmbeddedServerError, embedded_server
from sqlaqueue.mapping.mixin import spec_of
from sqlaqueue.sql.errors import sqlstate
from sqlaqueue.sqlite import prepare

_DRIVER = "postgresql+psycopg"
_DUPLICATE_SCHEMA = "42P06"


@contextlib.contextmanager
def demo_database(url: str | None, *, sqlite: bool = False) -> Iterator[sa.Engine]:
    """Yield an engine for a database with the tables of the demo, which are dropped afterwards.

    :param url: the user's own database; None for an embedded server.
    :param sqlite: whether to use a file in a temporary directory instead.
    :raises CannotRunError: if the database cannot be used.
    """
    if sqlite:
        with tempfile.TemporaryDirectory(prefix="sqlaqueue-demo-") as directory:
            engine = connect(f"sqlite:///{directory}/jobs.db")
            Base.metadata.create_all(engine, tables=[spec_of(LeasedFile).table])
            yield engine
            engine.dispose()
        return
    _check_driver()
    with contextlib.ExitStack() as stack:
        if url is None:
            # PGOPTIONS, PGSERVICE and the like are meant for another server.
            for name in [name for name in os.environ if name.startswith("PG")]:
                del os.environ[name]
            try:
                url = stack.enter_context(embedded_server())
            except EmbeddedServerError as error:
                raise CannotRunError(f"{error}; for a server of your own there is --url") from None
        engine = sa.create_engine(_with_driver(url))
        stack.callback(engine.dispose)
        stack.enter_context(_schema(engine))
        Base.metadata.create_all(engine)
        yield engine


def connect(url: str) -> sa.Engine:
    """Return an engine for the URL of a database that :func:`demo_database` has made."""
    engine = sa.create_engine(url)
    if engine.dialect.name != "sqlite":
        return engine
    prepare(engine)
    # A file has no schemas.
    return engine.execution_options(schema_translate_map={SCHEMA: None})


def _check_driver() -> None:
    try:
        sa.make_url(f"{_DRIVER}://").get_dialect().import_dbapi()
    except ModuleNotFoundError:
        msg = "the demo needs psycopg: pip install 'sqlaqueue[demo]'"
        raise CannotRunError(msg) from None


def _with_driver(text: str) -> sa.URL:
    try:
        url = sa.make_url(text)
    except (ArgumentError, ValueError) as error:
        msg = f"--url: {error}; give a URL such as postgresql://user:password@host/database"
        raise CannotRunError(msg) from None
    if url.drivername not in {"postgresql", "postgres", _DRIVER}:
        msg = f"--url: {url.drivername}:// is not supported; give postgresql://, the demo uses psycopg 3"
        raise CannotRunError(msg)
    # By default drivers wait for a minute or more if the host does not answer.
    return url.set(drivername=_DRIVER, query={"connect_timeout": "10", **url.query})


@contextlib.contextmanager
def _schema(engine: sa.Engine) -> Iterator[None]:
    try:
        with engine.begin() as connection:
            connection.execute(CreateSchema(SCHEMA))
    except DBAPIError as error:
        if sqlstate(error) == _DUPLICATE_SCHEMA:
            msg = (
                f"the database has a schema {SCHEMA}: another demo uses it, or was killed; if none is running, "
                f"DROP SCHEMA {SCHEMA} CASCADE"
            )
        else:
            msg = f"the database cannot be used: {error.orig}"
        raise CannotRunError(msg) from error
    try:
        yield
    finally:
        with engine.begin() as connection:
            connection.execute(DropSchema(SCHEMA, cascade=True))
