"""Whatever the search path, no table of the same name in another schema is read or written."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.exc import ProgrammingError
from sqlalchemy.orm import Session, sessionmaker

from sqlaqueue import Consumer
from sqlaqueue.exc import ConfigurationError
from tests.privileges.conftest import Base, Roles
from tests.privileges.test_roles import count, enqueue

pytestmark = pytest.mark.once
TRIGGERED = pytest.mark.parametrize("kind", ["update_status", "delete_returning"])


def consumer(roles: Roles, **options: Any) -> Consumer[Any]:
    return Consumer(roles.Job, lambda session, job: None, sessionmaker(roles.engine("worker", **options)))


@pytest.fixture
def other_schema(roles: Roles) -> Roles:
    """Create the same tables in another schema, where every role has all privileges."""
    roles.grant_web()
    roles.execute(*roles.grants_of_worker(), "CREATE SCHEMA other")
    engine = sa.create_engine(roles.database.url(), execution_options={"schema_translate_map": {None: "other"}})
    Base.metadata.create_all(engine)
    engine.dispose()
    for name in ("web", "worker"):
        roles.execute(
            f"GRANT USAGE ON SCHEMA other TO {name}",
            f"GRANT ALL ON ALL TABLES IN SCHEMA other TO {name}",
            f"GRANT ALL ON ALL SEQUENCES IN SCHEMA other TO {name}",
        )
    return roles


@TRIGGERED
def test_messages_go_where_the_jobs_are(other_schema: Roles) -> None:
    """Whatever search path the enqueueing role or its session has."""
    roles, name = other_schema, other_schema.table.name
    roles.execute("ALTER ROLE web SET search_path = other")
    enqueue(roles)
    with Session(roles.engine("web")) as session, session.begin():
        session.execute(sa.text(f"INSERT INTO public.{name} (tenant, status) VALUES ('a', 'pending')"))
        session.execute(sa.text("SET LOCAL search_path = pg_catalog"))
        session.execute(sa.text(f"INSERT INTO public.{name} (tenant, status) VALUES ('a', 'pending')"))
    counts = {schema: count(roles, f"{schema}.{name}") for schema in ("public", "other")}
    assert counts == {"public": 2, "other": 1}
    if roles.kind == "delete_returning":
        messages = {schema: count(roles, f"{schema}.sqlaqueue_message_orders") for schema in counts}
        assert messages == counts
    assert consumer(roles).drain() == 2
    path = {"options": "-csearch_path=other"}
    assert consumer(roles, connect_args=path).drain() == 1


@TRIGGERED
def test_a_search_path_without_the_tables(other_schema: Roles) -> None:
    roles = other_schema
    roles.execute("ALTER ROLE worker SET search_path = pg_catalog", "ALTER ROLE web SET search_path = pg_catalog")
    with pytest.raises(ConfigurationError) as refused:
        consumer(roles).drain()
    name = roles.table.name
    for schema in ("public", "other"):
        assert f"it is in the schema {schema}, to which the search_path does not lead" in str(refused.value)
    with pytest.raises(ProgrammingError, match=f'relation "{name}" does not exist'):
        enqueue(roles)


@pytest.mark.parametrize("kind", ["update_status"])
def test_a_search_path_to_side_tables_of_another_queue(other_schema: Roles) -> None:
    """A pause or a heartbeat would be written into a table that this queue does not read."""
    roles = other_schema
    roles.execute("DROP TABLE other.email", "ALTER ROLE worker SET search_path = other, public")
    with pytest.raises(ConfigurationError) as refused:
        consumer(roles).drain()
    said = str(refused.value)
    assert "by the search_path of this session (other, public)" in said
    assert "the table email is found in the schema public, but" in said
    assert "sqlaqueue_control in other" in said
    roles.execute("ALTER ROLE worker SET search_path = public, other")
    enqueue(roles)
    assert consumer(roles).drain() == 1


@TRIGGERED
def test_triggers_run_without_privileges_on_schemas_of_the_path(
    other_schema: Roles, caplog: pytest.LogCaptureFixture
) -> None:
    roles = other_schema
    roles.execute("REVOKE ALL ON SCHEMA other FROM web", "ALTER ROLE web SET search_path = other, public")
    enqueue(roles)
    with caplog.at_level(logging.WARNING, "sqlaqueue"):
        assert consumer(roles).drain() == 1
    assert caplog.text == ""
