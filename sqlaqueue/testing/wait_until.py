"""Wait until a job that real workers run is in a state: :func:`wait_until`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeVar, get_args, overload

from sqlalchemy.orm import Session, registry

from sqlaqueue.consumer.base import ConsumerBase
from sqlaqueue.consumer.core.effects import ExecuteInOwnSession, Wait, adrive, drive
from sqlaqueue.consumer.settings import annotations_of, check_handler, is_coroutine_function, is_mapped
from sqlaqueue.exc import ConfigurationError, JobResult, StatementError, WaitTimeout
from sqlaqueue.mapping.mixin import queue_spec
from sqlaqueue.queue.options import FINISHED
from sqlaqueue.queue.retry_policies import Delay
from sqlaqueue.sessions import execute, open_session, resolve_factory
from sqlaqueue.waiting.wait import DEFAULT_TIMEOUT, Waiter, read_job

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncSession

T = TypeVar("T")
State = Literal["waiting", "pending", "processing", "completed", "failed", "cancelled", "gone"]

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

    ::

        with Consumer(Email, send, sessions):
            wait_until(sessions, (Email, 1), "completed")

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
    """The version of :func:`wait_until` for an ``async_sessionmaker(engine)``.

    ::

        async with AsyncConsumer(Email, async_send, async_sessions):
            await async_wait_until(async_sessions, (Email, 1), "completed")
    """
    waiter = _waiter("async_wait_until", job, state, timeout)
    factory = resolve_factory(session_factory, "async_wait_until", is_async=True)

    async def perform(effect: ExecuteInOwnSession | Wait) -> Any:
        if isinstance(effect, Wait):
            return await asyncio.sleep(effect.seconds)
        async with open_session(factory) as session:
            return await session.run_sync(execute, effect.operation, effect.arguments)

    return await adrive(_look_until(waiter, state), perform)


def _waiter(function: str, job: Any, state: str, timeout: Delay) -> Waiter:
    waiter = Waiter(function, job, None, timeout, lambda: None, check=False)
    if state not in get_args(State):
        raise ConfigurationError(
            f"{function}(..., {state!r}): there is no such state; give one of {', '.join(get_args(State))}"
        )
    if state == "processing" and waiter.spec.strategy.holds_transaction:
        raise ConfigurationError(
            f"{function}(..., 'processing'): under {waiter.spec.strategy.name} other sessions see a running job as "
            "pending; wait for the state in which it ends"
        )
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
            raise WaitTimeout(f"{waiter} is {found.state}, and not {wanted}, after {waiter.timeout:g} s")
        yield Wait("poll", _PAUSE)


def _refuse(waiter: Waiter, wanted: str, found: JobResult[Any]) -> NoReturn:
    if found.state == "gone":
        raise AssertionError(f"{waiter} is not in the database: it was deleted, or has not been committed")
    error = f": {found.error}" if found.error else ""
    raise AssertionError(f"{waiter} is {found.state}{error}; it does not become {wanted} any more")


def check_handlers(base: Any, handlers: Mapping[type[Any], Any] | Iterable[Any]) -> None:
    """Check that each queue mapped by ``base`` has a handler, and that each handler can be called with its jobs.

    A handler takes a session and a job, or a list of jobs if its Consumer has ``batch=True``. Annotations are
    compared: the job's with the queue class, and the session's with the kind of the function, as a coroutine function
    is called with an AsyncSession.

    ::

        check_handlers(Base, {Email: send, Invoice: lambda session, invoice: None})

    :param base: the declarative base of the application, or its ``registry``.
    :param handlers: the handler of each queue class, or the application's Consumers.
    :raises AssertionError: with all queues that have no handler, and all handlers that do not fit.
    :raises StatementError: if ``base`` or ``handlers`` is something else.
    """
    mapped = base if isinstance(base, registry) else getattr(base, "registry", None)
    if not isinstance(mapped, registry):
        raise StatementError(
            f"check_handlers({base!r}, ...): give the declarative base of the models, or their registry"
        )
    mapped.configure()
    found = list(_pairs(handlers))
    problems = [problem for model, handler, batch in found for problem in _problems(model, handler, batch=batch)]
    served = [model for model, *_ in found]
    for mapper in mapped.mappers:
        spec = queue_spec(mapper.class_)
        if spec is None or (mapper.polymorphic_on is not None and mapper.polymorphic_identity is None):
            continue
        if not any(issubclass(mapper.class_, model) for model in served):
            problems.append(f"{mapper.class_.__name__}: there is no handler for its jobs")
    if problems:
        raise AssertionError("\n".join(sorted(problems)))


def _pairs(handlers: Any) -> Iterable[tuple[type[Any], Any, bool]]:
    """Return each class with its handler, and whether that takes a list of jobs."""
    if isinstance(handlers, Mapping):
        for model, handler in handlers.items():
            if not isinstance(model, type) or queue_spec(model) is None:
                raise StatementError(f"check_handlers(..., {{{model!r}: ...}}): give queue classes as keys")
            yield model, handler, False
        return
    for consumer in handlers if isinstance(handlers, Iterable) else [handlers]:
        if not isinstance(consumer, ConsumerBase):
            raise StatementError(f"check_handlers(..., [{consumer!r}]): give a dict of handlers by class, or Consumers")
        settings = consumer.settings
        if settings.dispatch is None:
            yield settings.selection.entity, consumer.handler, settings.batch
        else:
            for model, handler in settings.dispatch.by_class.items():
                yield model, handler, settings.batch


def _problems(model: type[Any], handler: Any, *, batch: bool) -> Sequence[str]:
    try:
        check_handler(handler, model.__name__, batch=batch)
    except ConfigurationError as error:
        return [str(error)]
    name = getattr(handler, "__name__", repr(handler))
    session, job = annotations_of(handler)
    problems = []
    is_async = is_coroutine_function(handler)
    if isinstance(session, type) and not _fits_session(session, is_async=is_async):
        kind, right = ("a coroutine function", "AsyncSession") if is_async else ("a function", "Session")
        problems.append(
            f"{model.__name__}: {name} is {kind}, so its first argument is of class {right} and not {session.__name__}"
        )
    if not batch and is_mapped(job) and not issubclass(model, job):
        problems.append(f"{model.__name__}: {name} takes jobs of class {job.__name__}")
    return problems


def _fits_session(annotated: type[Any], *, is_async: bool) -> bool:
    if is_mapped(annotated):
        return False
    if issubclass(annotated, Session):
        return not is_async
    is_of_async = any(cls.__module__.startswith("sqlalchemy.ext.asyncio") for cls in annotated.__mro__)
    return is_async or not is_of_async
