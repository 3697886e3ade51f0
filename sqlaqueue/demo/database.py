"""The database of the demo: an embedded one or the user's, with a schema that is there for as long as the demo."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import psycopg
import sqlalchemy as sa
from sqlalchemy.exc import ArgumentError, DBAPIError
from sqlalchemy.schema import CreateSchema, DropSchema

from sqlaqueue.demo.errors import CannotRunError
from sqlaqueue.demo.models import SCHEMA, Base
from sqlaqueue.demo.server import embedded_server


@contextlib.contextmanager
def demo_database(url: str | None) -> Iterator[sa.Engine]:
    """Yield an engine for a database with the tables of the demo, and remove them in the end.

    :param url: where the user's own server is; None for an embedded one.
    :raises CannotRunError: when the database cannot be used.
    """
    with contextlib.ExitStack() as stack:
        if url is None:
            # PGOPTIONS, PGSERVICE and their like are meant for another server than this.
            for name in [name for name in os.environ if name.startswith("PG")]:
                del os.environ[name]
            url = stack.enter_context(embedded_server())
        engine = sa.create_engine(_address(url))
        stack.callback(engine.dispose)
        stack.enter_context(_schema(engine))
        Base.metadata.create_all(engine)
        yield engine


def _address(url: str) -> sa.URL:
    try:
        address = sa.make_url(url)
    except (ArgumentError, ValueError) as error:
        msg = f"--url: {error}; give something like postgresql://user:password@host/database"
        raise CannotRunError(msg) from None
    if address.drivername not in {"postgresql", "postgres", "postgresql+psycopg"}:
        msg = f"--url: {address.drivername}:// is not served; the demo takes postgresql://, and uses psycopg 3"
        raise CannotRunError(msg)
    # A host that does not answer must not keep the user waiting for minutes.
    address = address.set(query={"connect_timeout": "10", **address.query})
    return address.set(drivername="postgresql+psycopg")


@contextlib.contextmanager
def _schema(engine: sa.Engine) -> Iterator[None]:
    try:
        with engine.begin() as connection:
            connection.execute(CreateSchema(SCHEMA))
    except DBAPIError as error:
        if isinstance(error.orig, psycopg.errors.DuplicateSchema):
            msg = (
                f"the database has a schema {SCHEMA} already: another demo is using it, or one was killed. "
                f"If it is not in use, DROP SCHEMA {SCHEMA} CASCADE"
            )
        else:
            msg = f"the database cannot be used: {error.orig}"
        raise CannotRunError(msg) from error
    try:
        yield
    finally:
        with engine.begin() as connection:
            connection.execute(DropSchema(SCHEMA, cascade=True))
