"""A Consumer's role must be allowed to execute the functions that its statements call; by default every role is."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import DeclarativeBase, mapped_column, sessionmaker

from sqlaqueue import Consumer, QueueConfig, QueueMixin
from sqlaqueue.exc import DatabaseNotReadyError
from tests.mapping.test_claim_functions import attach_function, count, name_of
from tests.privileges.conftest import Roles
from tests.servers import Server

pytestmark = pytest.mark.once


class Base(DeclarativeBase):
    pass


class Parcel(QueueMixin, Base):
    __tablename__ = "a parcel"
    __queue__ = QueueConfig()
    id = mapped_column(sa.Integer, primary_key=True)


TABLE = sa.inspect(Parcel).local_table
attach_function(TABLE)


@pytest.fixture
def roles(server: Server) -> Iterator[Roles]:
    with server.database() as database:
        roles = Roles(database, "update_status")
        try:
            yield roles
        finally:
            roles.close()


@pytest.mark.parametrize("schema", [None, "other place"])
def test_a_function_that_the_role_may_not_execute_is_named(roles: Roles, schema: str | None) -> None:
    translated = {"execution_options": {"schema_translate_map": {None: schema}}}
    if schema is not None:
        roles.execute(f'CREATE SCHEMA "{schema}"', f'GRANT ALL ON SCHEMA "{schema}" TO owner')
        roles.execute(f'GRANT USAGE ON SCHEMA "{schema}" TO worker')
    place = f'"{schema or "public"}"'
    Base.metadata.create_all(roles.engine("owner", **translated))
    engine = roles.engine("worker", **translated)
    roles.execute(f"GRANT ALL ON ALL TABLES IN SCHEMA {place} TO worker")
    consumer = Consumer(Parcel, lambda session, job: None, sessionmaker(engine))
    assert consumer.drain() == 0
    roles.execute(f'REVOKE EXECUTE ON FUNCTION {place}."{name_of(TABLE)}" FROM PUBLIC')
    with pytest.raises(DatabaseNotReadyError) as refused:
        consumer.drain()
    (grant,) = re.findall(r"GRANT .*? TO \w+", str(refused.value))
    named = f'{place}."{name_of(TABLE)}"' if schema else f'"{name_of(TABLE)}"'
    assert grant.startswith(f"GRANT EXECUTE ON FUNCTION {named}(bigint,timestamp with time zone) TO worker_")
    # The statement in the error is the fix.
    roles.execute(grant)
    assert consumer.drain() == 0
    with engine.connect() as connection:
        assert connection.scalar(count(TABLE, 0)) == 0
