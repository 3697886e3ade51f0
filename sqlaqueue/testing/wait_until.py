"""Wait until a job that real workers run is in a state: :func:`wait_until`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Generator
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeVar, get_args, overload

from sqlalchemy.orm import Session

from sqlaqueue.consumer.core.driver import adrive, drive
from sqlaqueue.consumer.core.effects import ExecuteInOwnSession, Wait
from sqlaqueue.consumer.sessions import resolve_factory
from sqlaqueue.exc import ConfigurationError, JobResult, WaitTimeout
from sqlaqueue.queue.options import FINISHED
from sqlaqueue.queue.retry_policies import Delay
from sqlaqueue.waiting.wait import DEFAULT_TIMEOUT, Waiter, make_waiter, read_job
from sqlaqueue.write_routing import execute, open_session

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncSession

T = TypeVar("T")
State = Literal["pending", "processing", "completed", "failed", "cancelled", "gone"]

_PAUSE = 0.02
"""Seconds between two looks."""


@overload
def wait_until(
    session_factory: Callable[[], Session], job: tuple[type[T], Any], state: State, timeout: Delay = DEFAULT_TIMEOUT
) -> JobResult[T]: ...
@overload
def wait_until(
    session_factory: Callable[[], Session], job: T, state: State, timeout: Delay = DEFAULT_TIMEOUT
) -> JobResult[T]: ...
def wait_until(
    session_factory: Callable[[], Session], job: Any, state: State, timeout: Delay = DEFAULT_TIMEOUT
) -> JobResult[Any]:
    """Wait until a job is in a state, and return it; for tests with workers that really run.

    Each look is a transaction of its own, so it sees what workers have committed.

    :param session_factory: makes sessions of the test's database, such as a ``sessionmaker(engine)``.
    :param job: an instance whose row is committed, or the pair of its class and its key: ``(Email, 5)``.
    :param state: ``"pending"``, ``"processing"``, ``"completed"``, ``"failed"``, ``"cancelled"`` or ``"gone"``.
    :param timeout: seconds or a timedelta.
    :raises AssertionError: if the job has finished in another state, which it will not leave.
    :raises WaitTimeout: if the job is not in the state after ``timeout``.
    :raises StatementError: if the transaction that wrote the job is still open.
    """
    waiter = _waiter("wait_until", job, state, timeout)
    factory = resolve_factory(session_factory, "wait_until", is_async=False)

    def perform(effect: ExecuteInOwnSession | Wait) -> Any:
        if isinstance(effect, Wait):
            return time.sleep(effect.seconds)
        with open_session(factory) as session:
            return execute(session, effect.operation, effect.arguments)

    return drive(_look_until(waiter, state), perform)


@overload
async def async_wait_until(
    session_factory: Callable[[], AsyncSession],
    job: tuple[type[T], Any],
    state: State,
    timeout: Delay = DEFAULT_TIMEOUT,
) -> JobResult[T]: ...
@overload
async def async_wait_until(
    session_factory: Callable[[], AsyncSession], job: T, state: State, timeout: Delay = DEFAULT_TIMEOUT
) -> JobResult[T]: ...
async def async_wait_until(
    session_factory: Callable[[], AsyncSession], job: Any, state: State, timeout: Delay = DEFAULT_TIMEOUT
) -> JobResult[Any]:
    """Do what :func:`wait_until` does, with an ``async_sessionmaker(engine)``."""
    waiter = _waiter("async_wait_until", job, state, timeout)
    factory = resolve_factory(session_factory, "async_wait_until", is_async=True)

    async def perform(effect: ExecuteInOwnSession | Wait) -> Any:
        if isinstance(effect, Wait):
            return await asyncio.sleep(effect.seconds)
        async with open_session(factory) as session:
            return await session.run_sync(execute, effect.operation, effect.arguments)

    return await adrive(_look_until(waiter, state), perform)


def _waiter(function: str, job: Any, state: str, timeout: Delay) -> Waiter:
    waiter = make_waiter(function, job, None, timeout, lambda: None, check=False)
    if state not in get_args(State):
        msg = f"{function}(..., {state!r}): there is no such state; give one of {', '.join(get_args(State))}"
        raise ConfigurationError(msg)
    if state == "processing" and waiter.spec.strategy.holds_transaction:
        msg = (
            f"{function}(..., 'processing'): under {waiter.spec.strategy.name} other sessions see a running job as "
            "pending; wait for the state in which it ends"
        )
        raise ConfigurationError(msg)
    return waiter


def _look_until(waiter: Waiter, wanted: str) -> Generator[ExecuteInOwnSession | Wait, Any, JobResult[Any]]:
    read = partial(read_job, load_in=(wanted,))
    while True:
        # Before the look: a timeout that has passed during it must not hide what it has found.
        timed_out = waiter.state.timed_out
        found: JobResult[Any] = yield ExecuteInOwnSession(read, (waiter,))
        if found.state == wanted:
            return found
        if found.state in {*FINISHED, "gone"}:
            _refuse(waiter, wanted, found)
        if timed_out:
            msg = f"{waiter} is {found.state}, and not {wanted}, after {waiter.timeout:g} s"
            raise WaitTimeout(msg)
        yield Wait("poll", _PAUSE)


def _refuse(waiter: Waiter, wanted: str, found: JobResult[Any]) -> NoReturn:
    if found.state == "gone":
        msg = f"{waiter} is not in the database: it was deleted, or has not been committed"
        raise AssertionError(msg)
    error = f": {found.error}" if found.error else ""
    msg = f"{waiter} is {found.state}{error}; it does not become {wanted} any more"
    raise AssertionError(msg)
