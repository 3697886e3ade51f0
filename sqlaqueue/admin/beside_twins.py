"""Make jobs of a unique queue pending again without waiting for a twin that is not committed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from sqlaqueue.admin.bulk_changes import NO_SYNCHRONIZATION, savepoint, warn_of_refusal
from sqlaqueue.admin.job_filter import bind_arguments
from sqlaqueue.consumer.errors import is_twin, may_be_of_a_row
from sqlaqueue.queue.run import Key
from sqlaqueue.sql.errors import sqlstate
from sqlaqueue.statements.selection import select_jobs

_LOCK_NOT_AVAILABLE = "55P03"

Rows = Sequence[Sequence[Any]]
"""The results of a verb: the key of each job, and the key of its twin."""


def attempt(session: Session, model: Any, verb: Any, *, lock_timeout: str, keys: Sequence[Key] = ()) -> Rows | None:
    """Execute a verb in a savepoint; return None if a job meets a twin that was not committed when it began.

    It returns None as well if the database refuses to change a job, and names the job if it is the only one.

    :param keys: the keys of the jobs, if they are known.
    """
    spec, bind = select_jobs(model, "attempt").spec, bind_arguments(model)
    former = session.scalar(sa.select(sa.func.current_setting("lock_timeout")), bind_arguments=bind)
    try:
        with savepoint(session, model):
            session.execute(_set_timeout(lock_timeout), bind_arguments=bind)
            rows = session.execute(verb, execution_options=NO_SYNCHRONIZATION, bind_arguments=bind).all()
            # It would outlive the savepoint.
            session.execute(_set_timeout(former), bind_arguments=bind)
            return rows
    except DBAPIError as error:
        if sqlstate(error) == _LOCK_NOT_AVAILABLE or is_twin(error, spec):
            return None
        if not may_be_of_a_row(error):
            raise
        if len(keys) == 1:
            warn_of_refusal(spec, keys[0], error)
        return None


def _set_timeout(value: Any) -> Any:
    return sa.select(sa.func.set_config("lock_timeout", value, sa.true()))
