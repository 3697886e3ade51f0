"""A role that can enqueue and create objects cannot run code with the privileges of another role."""

from __future__ import annotations

import pytest
import sqlalchemy as sa
from sqlalchemy.exc import ProgrammingError

from tests.privileges.conftest import Roles
from tests.privileges.test_roles import count

pytestmark = [pytest.mark.once, pytest.mark.parametrize("kind", ["delete_returning"])]

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


def test_the_function_cannot_be_attached_to_another_table(roles: Roles, web: sa.Connection) -> None:
    with web:
        web.exec_driver_sql("CREATE TEMP TABLE mine (id int, priority int, run_at date, status text)")
        with pytest.raises(ProgrammingError, match="permission denied for function"):
            web.exec_driver_sql(
                "CREATE TRIGGER t AFTER TRUNCATE ON mine EXECUTE FUNCTION sqlaqueue_message_orders_sync()"
            )


def test_a_temporary_table_does_not_replace_the_messages(roles: Roles, web: sa.Connection) -> None:
    with web:
        web.exec_driver_sql(SPY)
        web.exec_driver_sql(
            "CREATE TEMP TABLE sqlaqueue_message_orders (id int PRIMARY KEY, priority int, run_at date)"
        )
        web.exec_driver_sql("CREATE TRIGGER t BEFORE INSERT ON sqlaqueue_message_orders EXECUTE FUNCTION public.spy()")
        web.exec_driver_sql("INSERT INTO orders (tenant, status) VALUES ('a', 'pending')")
    assert count(roles, "public.sqlaqueue_message_orders") == 1


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
