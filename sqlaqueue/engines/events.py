"""Carries out the statements of the library on the connections of a prepared engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakSet

import sqlalchemy as sa
from sqlalchemy import event

from sqlaqueue.engines.steps import execute_steps, steps_of
from sqlaqueue.queue.engine import OtherEngine, mark_of, own_work

RunStep = Callable[[sa.Connection, Any, Mapping[str, Any]], list[list[Any]]]


def carry_out_statements(
    engine: sa.Engine, other: OtherEngine, run_step: RunStep, *, locks_apart: bool = False
) -> None:
    """Execute the steps of each statement of the library before the statement itself.

    :param other: refuses the claims of queues that its database cannot carry.
    :param locks_apart: whether a CTE that locks rows is a step, see :func:`~sqlaqueue.engines.steps.is_step`.
    """
    supported: WeakSet[Any] = WeakSet()

    @event.listens_for(engine, "before_execute", retval=True)
    def execute(
        connection: sa.Connection,
        statement: Any,
        multiparams: Any,
        params: Mapping[str, Any],
        execution_options: Mapping[str, Any],
    ) -> tuple[Any, Any, Any]:
        mark = mark_of(statement, execution_options)
        if mark is None:
            return statement, multiparams, params
        if mark is not True and mark not in supported:
            other.check_supported(mark)
            supported.add(mark)
        if steps_of(statement, locks_apart=locks_apart):
            with own_work():
                rows = execute_steps(connection, statement, params, run_step, locks_apart=locks_apart)
            return statement, multiparams, {**params, **rows}
        return statement, multiparams, params
