"""The first argument of what is asked here: a session, and no engine."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

from sqlalchemy.orm import Session

from sqlaqueue.consumer.sessions.session_factory import check_session

P = ParamSpec("P")
T = TypeVar("T")


def takes_session(operation: Callable[Concatenate[Session, P], T]) -> Callable[Concatenate[Session, P], T]:
    """Return the same operation, which refuses an engine or a session factory with an error that names the fix."""

    @functools.wraps(operation)
    def run(session: Session, /, *args: P.args, **kwargs: P.kwargs) -> T:
        check_session(session, operation.__name__, is_async=False)
        return operation(session, *args, **kwargs)

    return run
