"""The arguments of one call of ``wait()``, checked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import SessionTransaction, object_session

from sqlaqueue.consumer.core.intervals import longest_wait
from sqlaqueue.exc import StatementError
from sqlaqueue.mapping.mixin import QueueMixin, spec_of
from sqlaqueue.mapping.runs import run_of
from sqlaqueue.queue.retry_policies import Delay, seconds
from sqlaqueue.queue.run import Key, key_text
from sqlaqueue.queue.spec import QueueSpec
from sqlaqueue.waiting.wait_state import WaitState

DEFAULT_TIMEOUT = 10.0
"""The default timeout in seconds: a job that no Consumer runs must not block the caller for ever."""


@dataclass(eq=False)
class Waiter:
    """One call of ``wait()`` or ``async_wait()``."""

    function: str
    """The name of the called function, for errors."""
    model: type[Any]
    spec: QueueSpec
    key: Key
    state: WaitState
    check: bool
    timeout: float | None

    @property
    def bind(self) -> dict[str, Any]:
        """The ``bind_arguments`` of statements, as a session may have several engines."""
        return {"mapper": self.spec.mapper}

    @property
    def longest_reply(self) -> float:
        """The most seconds to wait for the database, whose connection is then given up."""
        return longest_wait((self.timeout or float("inf")) / 2)

    def __str__(self) -> str:
        return f"{self.model.__name__} {key_text(self.key)}"


def make_waiter(
    function: str, job: Any, key: Any, timeout: Delay | None, wake: Callable[[], object], *, check: bool
) -> Waiter:
    """Check the arguments of a call.

    :param job: an instance, its class, or a pair of its class and its key.
    :param key: the job's key if ``job`` is a class, else None.
    :param wake: called when a poll may be due.
    :raises NotAQueueError: if the class is not a queue.
    :raises StatementError: if the key is malformed, or the job has not been committed.
    """
    limit = None if timeout is None else seconds(timeout, f"{function}(timeout=...)")
    if isinstance(job, QueueMixin):
        if key is not None:
            msg = (
                f"{function}(..., <{type(job).__name__}>, {key!r}): remove the key, as the instance has one; give the "
                f"timeout as {function}(..., timeout={key!r})"
            )
            raise StatementError(msg)
        model: type[Any] = type(job)
        spec = spec_of(model)
        key = _committed_key(job, function)
    else:
        model, given = _class_and_key(function, job, key)
        spec = spec_of(model)
        key = given if isinstance(given, tuple) else (given,)
        if len(key) != len(spec.keys) or any(part is None for part in key):
            columns = ", ".join(column.key for column in spec.keys)
            msg = f"{function}(..., {model.__name__}, {given!r}): this is not a primary key, which is ({columns})"
            raise StatementError(msg)
    return Waiter(function, model, spec, key, WaitState(key_text(key), wake, limit), check, limit)


def _class_and_key(function: str, job: Any, key: Any) -> tuple[type[Any], Any]:
    if isinstance(job, type):
        return job, key
    if key is None and isinstance(job, tuple) and len(job) == 2 and isinstance(job[0], type):  # noqa: PLR2004 - a class and a key
        return job[0], job[1]
    msg = (
        f"{function}(..., {job!r}): give an instance of a queue class, or the class and a key, as in "
        f"{function}(..., Email, 5)"
    )
    raise StatementError(msg)


def _committed_key(job: Any, function: str) -> Key:
    """Return the key of an instance, if its changes are committed."""
    state, session, name = sa.inspect(job), object_session(job), type(job).__name__
    key: Key | None = state.identity
    if key is None:
        msg = f"{function}(): this {name} is not in the database; add it to a session and commit, then wait for it"
        raise StatementError(msg)
    name = f"{name} {key_text(key)}"
    transaction = None if session is None else session.get_nested_transaction() or session.get_transaction()
    uncommitted = session is not None and (job in session.deleted or session.is_modified(job))
    while transaction is not None and not uncommitted:
        uncommitted = state in _flushed(transaction)
        transaction = transaction.parent
    run = run_of(job)
    if run is not None and run.transaction is not None and run.transaction.is_active:
        msg = f"{function}(): {name} is claimed by an open transaction of this process; settle it and commit first"
        raise StatementError(msg)
    if uncommitted:
        msg = (
            f"{function}(): {name} has been changed in a transaction that is still open, which no Consumer can see; "
            "commit its session first"
        )
        raise StatementError(msg)
    return key


def _flushed(transaction: SessionTransaction) -> set[Any]:
    # SQLAlchemy has no public attribute for the objects that a transaction has flushed.
    return {*transaction._new, *transaction._dirty, *transaction._deleted}  # noqa: SLF001 - see above
