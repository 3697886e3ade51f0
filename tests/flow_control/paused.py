"""Claims that wait in the middle, while another transaction commits a change."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import Session

from tests.flow_control.models import claimed, ids

_GATE = 77
_WAIT = f"PERFORM pg_catalog.pg_advisory_xact_lock({_GATE});"


def pause_before(engine: sa.Engine, function: str, when: str = "true") -> None:
    """Let a function of a claim wait when it is called.

    :param when: the condition of the calls that wait, with the arguments of the function.
    """
    described = sa.text(
        "SELECT pg_get_function_arguments(oid), pg_get_function_result(oid), pronargs "
        "FROM pg_catalog.pg_proc WHERE proname = :name"
    )
    with engine.begin() as connection:
        arguments, result, number = connection.execute(described, {"name": function}).one()
        given = ", ".join(f"${each + 1}" for each in range(number))
        connection.exec_driver_sql(f"ALTER FUNCTION {function} RENAME TO quick")
        connection.exec_driver_sql(
            f"CREATE FUNCTION {function}({arguments}) RETURNS {result} LANGUAGE plpgsql AS "
            f"$$ BEGIN IF {when} THEN {_WAIT} END IF; RETURN quick({given}); END $$"
        )


def pause_inside(engine: sa.Engine, function: str, before: str) -> None:
    """Let a function of a claim wait each time it comes to a statement, which its text has once."""
    defined = sa.text("SELECT pg_get_functiondef(oid) FROM pg_catalog.pg_proc WHERE proname = :name")
    with engine.begin() as connection:
        definition: str = connection.execute(defined, {"name": function}).scalar_one()
        assert definition.count(before) == 1
        connection.exec_driver_sql(definition.replace(before, f"{_WAIT} {before}").replace("%", "%%"))


def claimed_with_change(engine: sa.Engine, model: Any, n: int, change: Callable[[], object]) -> list[int]:
    """Claim, make a change while the claim waits, and return the keys of the jobs."""
    waits = f"SELECT 1 FROM pg_locks WHERE locktype = 'advisory' AND objid = {_GATE} AND NOT granted"
    with engine.connect() as gate, Session(engine) as session, ThreadPoolExecutor(1) as pool:
        gate.exec_driver_sql(f"SELECT pg_advisory_lock({_GATE})")
        late = pool.submit(claimed, session, model, n)
        while not gate.exec_driver_sql(waits).first():
            assert not late.done()
        change()
        gate.exec_driver_sql(f"SELECT pg_advisory_unlock({_GATE})")
        return ids(late.result())
