"""Check that the first argument is a Session."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

from sqlalchemy.orm import Session

from sqlaqueue.session_types import check_session

P = ParamSpec("P")
T = TypeVar("T")


def requires_session(operation: Callable[Concatenate[Session, P], T]) -> Callable[Concatenate[Session, P], T]:
    """Decorate a function so that it refuses an engine or a session factory, with an error that names the fix."""

    @functools.wraps(operation)
    def run(session: Session, /, *args: P.args, **kwargs: P.kwargs) -> T:
        check_session(session, operation.__name__, is_async=False)
        return operation(session, *args, **kwargs)

    return run
