"""Engines for the tests of strategies, and statements under EXPLAIN ANALYZE."""

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import sqlalchemy as sa
from psycopg import sql
from sqlalchemy.dialects.postgresql import asyncpg

from tests.servers import Server
from tests.shared_database import engine, shared

__all__ = ["engine", "shared"]


@pytest.fixture(scope="class")
def class_engine(server: Server) -> Iterator[sa.Engine]:
    """An engine on a database that the tests of one class share."""
    with server.database() as database:
        engine = sa.create_engine(database.url(), pool_size=12)
        yield engine
        engine.dispose()


GENERIC = "force_generic_plan"
CUSTOM = "force_custom_plan"
OWN_MESSAGE: dict[str, str | None] = {"status": None}
QUEUES = {
    "update_status": ("update_status", {}, False),
    "update_status-composite": ("update_status", {}, True),
    "batch_select": ("batch_select", {}, False),
    "delete_returning": ("delete_returning", {}, False),
    "delete_returning-composite": ("delete_returning", {}, True),
    "own_message": ("delete_returning", OWN_MESSAGE, False),
    "own_message-composite": ("delete_returning", OWN_MESSAGE, True),
}
"""The queues whose plans are looked at: strategy, columns, and whether the key is composite."""


def explain(engine: sa.Engine, statement: Any, parameters: Mapping[str, Any], cache: str = GENERIC) -> dict[str, Any]:
    """Execute a statement as a prepared one, roll it back, and return its executed plan."""
    # Its placeholders are those of PREPARE.
    prepared = statement.compile(dialect=asyncpg.dialect()).construct_expanded_state(parameters)
    values = [sql.Literal(prepared.parameters[name]) for name in prepared.positiontup or ()]
    with engine.connect() as connection:
        execute = sql.SQL("({})").format(sql.SQL(", ").join(values)) if values else sql.SQL("")
        arguments = execute.as_string(connection.connection.driver_connection)
        connection.exec_driver_sql(f"SET LOCAL plan_cache_mode = {cache}")
        statement_text = prepared.statement.replace("%", "%%")
        connection.exec_driver_sql(f"PREPARE explained AS {statement_text}")
        explained = connection.exec_driver_sql(
            f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) EXECUTE explained{arguments}"
        ).scalar_one()
        connection.exec_driver_sql("DEALLOCATE explained")
        plan: dict[str, Any] = explained[0]["Plan"]
        return plan


def buffers_of(plan: dict[str, Any]) -> int:
    blocks: int = plan["Shared Hit Blocks"] + plan["Shared Read Blocks"]
    return blocks


def nodes_of(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield plan
    for part in plan.get("Plans", ()):
        yield from nodes_of(part)
