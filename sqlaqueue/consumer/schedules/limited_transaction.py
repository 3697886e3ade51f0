"""The transactions of a process that fires schedules: at READ COMMITTED, and limited in time."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import Session

from sqlaqueue.consumer.core.effects import ExecuteInOwnSession
from sqlaqueue.consumer.schedules.firing_process import GroupState

_LIMITS = {"lock_timeout": "500ms", "idle_in_transaction_session_timeout": "30s"}
"""A transaction locks rows that other processes pass over, so it must not wait for long, nor stand still."""


def limited(state: GroupState, operation: Callable[..., Any], **options: Any) -> ExecuteInOwnSession:
    """Return the effect that executes ``operation(session, group, **options)``, which is one transaction."""
    return ExecuteInOwnSession(_execute, (state, partial(operation, **options)))


def _execute(session: Session, state: GroupState, operation: Callable[..., Any]) -> Any:
    state.isolation.begin(session)
    limits = [sa.func.set_config(name, value, sa.true()) for name, value in _LIMITS.items()]
    session.execute(sa.select(*limits), bind_arguments=state.group.bind)
    return operation(session, state.group)
