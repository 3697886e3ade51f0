"""Other schemas, search paths and policies: nobody runs code as another role, or reads or writes its tables."""

import logging
import re
import time

import pytest
import sqlalchemy as sa
from sqlalchemy.exc import ProgrammingError
from sqlalchemy.orm import Session, sessionmaker

from sqlaqueue import Consumer, reconcile
from sqlaqueue.admin.doctor.server import check_privileges
from sqlaqueue.exc import ConfigurationError
from tests.doctor.conftest import codes
from tests.privileges.conftest import Base, Letter, Note, Roles, count, enqueue

pytestmark = pytest.mark.once

SPY = """
    CREATE FUNCTION public.spy() RETURNS trigger LANGUAGE plpgsql
    AS 'BEGIN RAISE EXCEPTION ''spied as %%'', current_user; END'
"""
SPYING_OPERATOR = [
    """CREATE FUNCTION public.spy(varchar, varchar) RETURNS boolean LANGUAGE plpgsql
       AS 'BEGIN RAISE EXCEPTION ''spied as %%'', current_user; END'""",
    "CREATE OPERATOR public.= (LEFTARG = varchar, RIGHTARG = varchar, FUNCTION = public.spy)",
    """CREATE FUNCTION public.spy(integer, integer) RETURNS boolean LANGUAGE plpgsql
       AS 'BEGIN RAISE EXCEPTION ''spied as %%'', current_user; END'""",
    "CREATE OPERATOR public.= (LEFTARG = integer, RIGHTARG = integer, FUNCTION = public.spy)",
]


@pytest.fixture
def web(roles: Roles) -> sa.Connection:
    roles.grant_web()
    roles.execute("GRANT CREATE, USAGE ON SCHEMA public TO web", "GRANT UPDATE, DELETE ON orders TO web")
    return roles.engine("web").connect().execution_options(isolation_level="AUTOCOMMIT")


@pytest.mark.parametrize("kind", ["delete_returning"])
def test_the_function_cannot_be_attached_to_another_table(roles: Roles, web: sa.Connection) -> None:
    with web:
        web.exec_driver_sql("CREATE TEMP TABLE mine (id int, priority int, run_at date, status text)")
        with pytest.raises(ProgrammingError, match="permission denied for function"):
            web.exec_driver_sql(
                "CREATE TRIGGER t AFTER TRUNCATE ON mine EXECUTE FUNCTION sqlaqueue_message_orders_sync()"
            )


@pytest.mark.parametrize("kind", ["delete_returning"])
def test_a_temporary_table_does_not_replace_the_messages(roles: Roles, web: sa.Connection) -> None:
    with web:
        web.exec_driver_sql(SPY)
        web.exec_driver_sql(
            "CREATE TEMP TABLE sqlaqueue_message_orders (id int PRIMARY KEY, priority int, run_at date)"
        )
        web.exec_driver_sql("CREATE TRIGGER t BEFORE INSERT ON sqlaqueue_message_orders EXECUTE FUNCTION public.spy()")
        web.exec_driver_sql("INSERT INTO orders (tenant) VALUES ('a')")
    assert count(roles, "public.sqlaqueue_message_orders") == 1


@pytest.mark.parametrize("kind", ["delete_returning"])
def test_operators_in_the_search_path_are_not_called(roles: Roles, web: sa.Connection) -> None:
    """Neither with the privileges of the owner nor with those of another enqueueing role."""
    with web:
        for statement in SPYING_OPERATOR:
            web.exec_driver_sql(statement)
    with roles.database.connect() as connection:
        connection.execute("SET search_path = public")
        with pytest.raises(Exception, match="spied as postgres"):
            connection.execute("SELECT FROM pg_class WHERE 'a'::varchar = 'b'::varchar")
        connection.execute("INSERT INTO orders (tenant, status) VALUES ('a', 'pending'), ('b', 'pending')")
        connection.execute("UPDATE orders SET status = 'failed'")
        connection.execute("UPDATE orders SET status = 'pending'")
        connection.execute("DELETE FROM orders WHERE id > 1")
    assert count(roles, "sqlaqueue_message_orders") == 1


# -- whatever the search path, no table of the same name in another schema is read or written --------------------------

TRIGGERED = pytest.mark.parametrize("kind", ["update_status", "delete_returning"])


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
        session.execute(sa.text(f"INSERT INTO public.{name} (tenant) VALUES ('a')"))
        session.execute(sa.text("SET LOCAL search_path = pg_catalog"))
        session.execute(sa.text(f"INSERT INTO public.{name} (tenant) VALUES ('a')"))
    counts = {schema: count(roles, f"{schema}.{name}") for schema in ("public", "other")}
    assert counts == {"public": 2, "other": 1}
    if roles.kind == "delete_returning":
        messages = {schema: count(roles, f"{schema}.sqlaqueue_message_orders") for schema in counts}
        assert messages == counts
    assert roles.consumer().drain() == 2
    path = {"options": "-csearch_path=other"}
    assert roles.consumer(connect_args=path).drain() == 1


@TRIGGERED
def test_a_search_path_without_the_tables(other_schema: Roles) -> None:
    roles = other_schema
    roles.execute("ALTER ROLE worker SET search_path = pg_catalog", "ALTER ROLE web SET search_path = pg_catalog")
    with pytest.raises(ConfigurationError) as refused:
        roles.consumer().drain()
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
        roles.consumer().drain()
    said = str(refused.value)
    assert "by the search_path of this session (other, public)" in said
    assert "the table email is found in the schema public, but" in said
    assert "sqlaqueue_control in other" in said
    roles.execute("ALTER ROLE worker SET search_path = public, other")
    enqueue(roles)
    assert roles.consumer().drain() == 1


@TRIGGERED
def test_triggers_run_without_privileges_on_schemas_of_the_path(
    other_schema: Roles, caplog: pytest.LogCaptureFixture
) -> None:
    roles = other_schema
    roles.execute("REVOKE ALL ON SCHEMA other FROM web", "ALTER ROLE web SET search_path = other, public")
    enqueue(roles)
    with caplog.at_level(logging.WARNING, "sqlaqueue"):
        assert roles.consumer().drain() == 1
    assert caplog.text == ""


# -- row-level security on the job table: tenants see their jobs, and a Consumer without a policy does not start -------


@pytest.fixture
def secured(roles: Roles) -> Roles:
    """Enable row-level security, with a policy by which the enqueueing role sees its tenant's jobs."""
    roles.grant_web()
    roles.execute(*roles.grants_of_worker())
    name = roles.table.name
    roles.execute(
        f"ALTER TABLE {name} ENABLE ROW LEVEL SECURITY",
        f"GRANT SELECT ON {name} TO web",
        f"CREATE POLICY own ON {name} TO web USING (tenant = current_setting('app.tenant'))",
    )
    return roles


def enqueue_as(roles: Roles, tenant: str, *, as_tenant: str | None = None) -> list[str]:
    """Enqueue a job as a tenant, and return the tenants of all jobs that it sees."""
    with Session(roles.engine("web")) as session:
        session.execute(sa.select(sa.func.set_config("app.tenant", as_tenant or tenant, sa.true())))
        job = roles.Job(tenant=tenant)
        session.add(job)
        session.flush()
        if roles.Job is Letter:
            session.add(Note(about=job.id))
        seen = list(session.scalars(sa.select(roles.Job.tenant)))
        session.commit()
        return seen


def serve(roles: Roles) -> list[str]:
    """Let a Consumer drain the queue, and return the tenants of its jobs."""
    served: list[str] = []
    engine = roles.engine("worker")
    Consumer(roles.Job, lambda session, job: served.append(job.tenant), sessionmaker(engine)).drain()
    return sorted(served)


def test_tenants_see_their_own_jobs_and_a_consumer_all(secured: Roles) -> None:
    secured.execute(f"CREATE POLICY all_jobs ON {secured.table.name} TO worker USING (true)")
    assert enqueue_as(secured, "a") == ["a"]
    assert enqueue_as(secured, "b") == ["b"]
    with pytest.raises(ProgrammingError, match="violates row-level security"):
        enqueue_as(secured, "a", as_tenant="b")
    assert serve(secured) == ["a", "b"]


@pytest.mark.few(2)
def test_a_consumer_that_bypasses_policies(secured: Roles) -> None:
    secured.execute("ALTER ROLE worker BYPASSRLS")
    enqueue_as(secured, "a")
    enqueue_as(secured, "b")
    assert serve(secured) == ["a", "b"]


def test_a_consumer_without_a_policy_does_not_start(secured: Roles) -> None:
    enqueue_as(secured, "a")
    with pytest.raises(ConfigurationError, match="row-level security hides every row") as refused:
        serve(secured)
    assert count(secured, secured.table.name) == 1
    # The statement in the error is the fix.
    secured.execute(*re.findall(r"CREATE POLICY .*? \(true\)", str(refused.value)))
    assert serve(secured) == ["a"]


@pytest.mark.few(1)
def test_a_policy_that_hides_every_row_is_told(secured: Roles, caplog: pytest.LogCaptureFixture) -> None:
    """Such as one whose setting the worker does not make; a queue without jobs is empty for every role."""

    def told() -> list[str]:
        caplog.clear()
        assert serve(secured) == []
        found = codes(secured.engine("worker"), [secured.Job], [check_privileges])
        logged = [record.getMessage() for record in caplog.records if record.event == "rows_hidden"]
        assert found.count("hidden_rows") == len(logged)
        return logged

    table = secured.table.name
    secured.execute(f"CREATE POLICY tenant ON {table} TO worker USING (tenant = current_setting('app.tenant', true))")
    assert told() == []
    enqueue_as(secured, "a")
    # A backend that ends writes its statistics at once; an idle one waits for ten seconds.
    secured.database.kill_backends()
    with secured.database.connect() as connection:
        deadline = time.monotonic() + 60
        while connection.execute(f"SELECT pg_stat_get_live_tuples('{table}'::regclass)".encode()).fetchone() == (0,):
            assert time.monotonic() < deadline
            connection.execute("SELECT pg_stat_clear_snapshot()")
            time.sleep(0.05)
    [warning] = told()
    assert f"no row of {table}, which has 1 or so" in warning
    secured.execute(f"CREATE POLICY all_jobs ON {table} TO worker USING (true)")
    assert serve(secured) == ["a"]
    assert told() == []


def test_a_policy_for_select_alone_is_not_enough(secured: Roles) -> None:
    """Without a policy for UPDATE no row can be locked, so claims return nothing."""
    secured.execute(f"CREATE POLICY reads ON {secured.table.name} FOR SELECT TO worker USING (true)")
    with pytest.raises(ConfigurationError, match="FOR UPDATE TO worker_") as refused:
        serve(secured)
    assert "FOR SELECT" not in str(refused.value)


@pytest.mark.parametrize("kind", ["delete_returning", "existing_messages"])
def test_a_hidden_job_keeps_its_message(secured: Roles) -> None:
    """A Consumer of one tenant does not see the jobs of others, whose messages look orphaned."""
    secured.execute(f"CREATE POLICY one ON {secured.table.name} TO worker USING (tenant = 'a')")
    enqueue_as(secured, "a")
    enqueue_as(secured, "b")
    messages = "note" if secured.kind == "existing_messages" else "sqlaqueue_message_orders"
    assert serve(secured) == ["a"]
    with Session(secured.engine("worker")) as session:
        assert session.scalars(reconcile(secured.Job)).all() == []
        session.commit()
    assert count(secured, messages) == 1
    # A role that sees all rows deletes orphaned messages.
    with secured.database.connect() as connection:
        connection.execute("SET session_replication_role = replica")
        connection.execute(f"DELETE FROM {secured.table.name} WHERE tenant = 'b'".encode())
    secured.execute("ALTER ROLE worker BYPASSRLS")
    with Session(secured.engine("worker")) as session:
        assert session.scalars(reconcile(secured.Job)).all() == [2]
        session.commit()
    assert count(secured, messages) == 0
