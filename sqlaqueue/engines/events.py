"""Carries out the statements of the library on the connections of a prepared engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any
from weakref import WeakSet

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.engine import ExceptionContext

from sqlaqueue.engines.steps import execute_steps, steps_of
from sqlaqueue.sql.engine import OtherEngine, mark_of, own_work

_IN_STEP: ContextVar[bool] = ContextVar("sqlaqueue_in_step", default=False)
"""Whether a step is being executed, whose own steps have been executed before it."""

RunStep = Callable[[sa.Connection, Any, Mapping[str, Any]], list[list[Any]]]
Forget = Callable[[sa.Connection], None]


def carry_out_statements(
    engine: sa.Engine,
    other: OtherEngine,
    run_step: RunStep,
    *,
    locks_apart: bool = False,
    forget: Forget = lambda _: None,
) -> None:
    """Execute the steps of each statement of the library before the statement itself.

    :param other: refuses the claims of queues that its database cannot carry.
    :param locks_apart: whether a CTE that locks rows is a step, see :func:`~sqlaqueue.engines.steps.is_step`.
    :param forget: is called when a statement has ended, also by an error, and drops what its steps have kept.
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
        if mark is None or _IN_STEP.get():
            return statement, multiparams, params
        if mark is not True and mark not in supported:
            other.check_supported(mark)
            supported.add(mark)
        if steps_of(statement, locks_apart=locks_apart):
            token = _IN_STEP.set(True)
            try:
                with own_work():
                    rows = execute_steps(connection, statement, params, run_step, locks_apart=locks_apart)
            except BaseException:
                forget(connection)
                raise
            finally:
                _IN_STEP.reset(token)
            return statement, multiparams, {**params, **rows}
        return statement, multiparams, params

    @event.listens_for(engine, "after_execute")
    def executed(connection: sa.Connection, *_: Any) -> None:
        if not _IN_STEP.get():
            forget(connection)

    @event.listens_for(engine, "handle_error")
    def failed(context: ExceptionContext) -> None:
        if context.connection is not None:
            forget(context.connection)
