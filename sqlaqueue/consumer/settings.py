"""The settings of a Consumer, checked and resolved once. They never change."""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, MutableSequence, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple, get_origin, get_type_hints

import sqlalchemy as sa
from sqlalchemy.orm import Mapper

from sqlaqueue._typing import AnySelect
from sqlaqueue.citus import SHARD, Distribution
from sqlaqueue.exc import ConfigurationError, HandlerMisuseError, JobTimeout
from sqlaqueue.postgresql.triggers import wakes
from sqlaqueue.queue.config import check_lease, is_count
from sqlaqueue.queue.retry_policies import Delay, RetryPolicy, seconds
from sqlaqueue.queue.spec import QueueSpec
from sqlaqueue.schedules.schedule import ScheduleGroup, schedule_groups
from sqlaqueue.statements.claim import worker_name as name_of_process
from sqlaqueue.statements.selection import JobSelection, select_jobs
from sqlaqueue.statements.verbs import storable


def _name_of(function: Any) -> str:
    return str(getattr(function, "__name__", type(function).__name__))


def check_handler(handler: Any, consumer: str, *, batch: bool) -> None:
    """Refuse a handler that cannot be called with a session and a job, or a list of jobs."""
    call = f"(session, {'jobs' if batch else 'job'})"
    if not callable(handler):
        msg = f"{consumer}(handler={handler!r}): a handler is a callable, handler{call}"
        raise ConfigurationError(msg)
    try:
        signature = inspect.signature(handler)
    except (TypeError, ValueError):
        return  # some built-in callables have no signature
    try:
        signature.bind(None, None)
    except TypeError as error:
        name = _name_of(handler)
        msg = f"{consumer}: the handler {name}{signature} is called as {name}{call}: {error}"
        raise ConfigurationError(msg) from None
    kind = kind_of_function(handler)
    if kind is not None and kind != COROUTINE_FUNCTION:
        msg = (
            f"{consumer}: the handler {_name_of(handler)} is {kind}, and a call of it runs nothing; remove its `yield`"
        )
        raise ConfigurationError(msg)
    _, job = annotations_of(handler)
    if not batch and (get_origin(job) or job) in _LISTS:
        msg = (
            f"{consumer}: the handler {_name_of(handler)} takes a list of jobs by its annotation, and is called with "
            "one job; give batch=True, or annotate the class of a job"
        )
        raise ConfigurationError(msg)
    if batch and is_mapped(job):
        msg = (
            f"{consumer}: with batch=True the handler {_name_of(handler)} is called with a list of jobs, and takes one "
            f"by its annotation; annotate list[{job.__name__}], or leave out batch=True"
        )
        raise ConfigurationError(msg)


def check_annotations(handler: Callable[..., Any], model: type[Any], consumer: str) -> None:
    """Refuse a handler that is annotated with the class of another queue, or whose parameters are swapped.

    Annotations that cannot be told, and those of a wrapped function, which gets what its wrapper gives it, are left
    alone.
    """
    if hasattr(function_of(handler), "__wrapped__"):
        return
    session, job = annotations_of(handler)
    what = f"{consumer}({model.__name__}, ...): the handler {_name_of(handler)}"
    if is_mapped(session):
        msg = f"{what} takes a {session.__name__} first by its annotation, and is called with the session first"
        raise ConfigurationError(msg)
    # A select may choose the jobs of one subclass.
    if is_mapped(job) and not issubclass(model, job) and not issubclass(job, model) and not _same_table(job, model):
        msg = f"{what} takes jobs of the class {job.__name__} by its annotation; give the handler of {model.__name__}"
        raise ConfigurationError(msg)


def _same_table(one: type[Any], other: type[Any]) -> bool:
    return bool(sa.inspect(one).local_table.description == sa.inspect(other).local_table.description)


def is_mapped(annotation: Any) -> bool:
    """Return whether an annotation is a mapped class."""
    return isinstance(annotation, type) and sa.inspect(annotation, raiseerr=False) is not None


# A tuple, as an annotation may be an object without a hash.
_LISTS = (list, MutableSequence, Sequence, Collection, Iterable)


def annotations_of(handler: Callable[..., Any]) -> tuple[Any, Any]:
    """Return what the first two parameters are annotated with; None for what cannot be told."""
    try:
        hints = get_type_hints(function_of(handler))
        # Those of a partial are the ones that are still to be given.
        names = list(inspect.signature(handler).parameters)
    except Exception:  # noqa: BLE001 - an annotation may be any expression, and name what only type checkers import
        return None, None
    known = [hints.get(name) for name in names[:2]]
    return (known[0], known[1]) if len(known) > 1 else (None, None)


def check_kind(handlers: Iterable[Callable[..., Any]], *, is_async: bool) -> None:
    """Refuse a coroutine function as a handler of a Consumer, and any other function as that of an AsyncConsumer."""
    for each in handlers:
        if not is_async and is_coroutine_function(each):
            msg = "Consumer: the handler is a coroutine function; use AsyncConsumer with an async_sessionmaker"
            raise ConfigurationError(msg)
        if is_async and inspect.isroutine(function_of(each)) and not is_coroutine_function(each):
            msg = "AsyncConsumer: the handler is not a coroutine function; define it with `async def`, or use Consumer"
            raise ConfigurationError(msg)


def function_of(handler: Any) -> Any:
    """Return the function that a call of ``handler`` executes, of a partial or a callable object as well."""
    while isinstance(handler, partial):
        handler = handler.func
    if inspect.isfunction(handler) or inspect.ismethod(handler):
        return handler
    return getattr(handler, "__call__", handler)  # noqa: B004 - it needs the method itself


def is_coroutine_function(handler: Any) -> bool:
    """Return whether a call of ``handler`` returns a coroutine; mocks say so themselves."""
    return inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(function_of(handler))


COROUTINE_FUNCTION = "a coroutine function"


def kind_of_function(function: Any) -> str | None:
    """Return what a callable is, in words, if a call of it runs nothing; None for any other one."""
    own = function_of(function)
    if is_coroutine_function(function):
        return COROUTINE_FUNCTION
    if inspect.isgeneratorfunction(own):
        return "a generator function"
    return "an async generator function" if inspect.isasyncgenfunction(own) else None


def refused_result(result: Any, *, is_async: bool) -> HandlerMisuseError | None:
    """Return the error for what a handler returned, if it is work that nobody has done; None for any other result.

    Not every such handler can be refused before its call, such as ``lambda session, job: coroutine(session, job)``. Its
    job would count as completed.
    """
    kind, fix = type(result).__name__, "await it" if is_async else "use AsyncConsumer for coroutines"
    if isinstance(result, asyncio.Future | concurrent.futures.Future):
        # The job is retried, and must not run twice at once. A Future of another thread's event loop is not ours.
        if is_async or not isinstance(result, asyncio.Future):
            result.cancel()
        fix = "await it" if is_async else "call its result()"
        return HandlerMisuseError(f"the handler returned a {kind}, for which nothing waits; {fix} in the handler")
    if inspect.isgenerator(result) or inspect.iscoroutine(result):
        result.close()
    elif not (inspect.isawaitable(result) or inspect.isasyncgen(result) or isinstance(result, map | filter)):
        return None
    return HandlerMisuseError(f"the handler returned a {kind}, and nothing of it has been run; {fix}")


class Dispatch:
    """Calls the handler of a job's class: that of the class itself, or of the nearest one that it inherits from."""

    def __init__(self, kind: str, chosen: JobSelection, handlers: Mapping[Any, Callable[..., Any]]) -> None:
        self._kind, self._chosen = kind, chosen
        self.by_class = dict(handlers)
        model = chosen.entity
        for cls in self.by_class:
            if not (isinstance(cls, type) and issubclass(cls, model)):
                name = getattr(cls, "__name__", repr(cls))
                msg = f"{kind}({model.__name__}, {{{name}: ...}}): {name} is not {model.__name__} or a subclass of it"
                raise ConfigurationError(msg)
            if sa.inspect(cls, raiseerr=False) is None:
                msg = f"{kind}({model.__name__}, {{{cls.__name__}: ...}}): {cls.__name__} is not mapped"
                raise ConfigurationError(msg)
        self.check()

    def check(self) -> None:
        """Refuse to serve when some class has no handler, such as one that has been mapped in the meantime."""
        model = self._chosen.entity
        lacking = [mapper.class_.__name__ for mapper in self._mappers() if self._nearest(mapper.class_) is None]
        if lacking:
            msg = (
                f"{self._kind}({model.__name__}, {{...}}): there is no handler for {', '.join(sorted(lacking))}; add "
                f"{min(lacking)}: handler, or {model.__name__}: handler for all classes without one of their own"
            )
            raise ConfigurationError(msg)

    def _mappers(self) -> list[Mapper[Any]]:
        """Return the mappers of the classes whose instances a claim may hand out."""
        mapper = sa.inspect(self._chosen.entity)
        if mapper.polymorphic_on is None:
            return [mapper]
        return [each for each in mapper.self_and_descendants if each.polymorphic_identity is not None]

    def _nearest(self, cls: type[Any]) -> type[Any] | None:
        return next((each for each in cls.__mro__ if each in self.by_class), None)

    def narrowed(self, select: AnySelect) -> AnySelect:
        """Return the select of those of its jobs whose classes this process knows.

        A newer version of the program may have enqueued jobs of further classes: those are left to it.
        """
        mapper = sa.inspect(self._chosen.entity)
        column = mapper.polymorphic_on
        if column is None:
            return select
        known = sorted({each.polymorphic_identity for each in self._mappers()}, key=str)
        return select.where(column.in_(known))

    def groups(self, jobs: Sequence[Any]) -> list[list[Any]]:
        """Return jobs in lists for one call each: those of one handler together, in the order of their first."""
        found: dict[Any, list[Any]] = {}
        for job in jobs:
            found.setdefault(self._nearest(type(job)), []).append(job)
        return [*found.values()]

    @property
    def handlers(self) -> list[Callable[..., Any]]:
        return [*self.by_class.values()]

    def handler_of(self, job: Any) -> Callable[..., Any]:
        cls = self._nearest(type(job))
        if cls is None:
            msg = f"there is no handler for {type(job).__name__}, which was mapped after this Consumer was started"
            raise ConfigurationError(msg)
        handler: Callable[..., Any] = self.by_class[cls]
        return handler

    def __call__(self, session: Any, argument: Any) -> Any:
        return self.handler_of(argument[0] if isinstance(argument, list) else argument)(session, argument)


BATCH = 500
"""How many jobs one claim takes at most, unless ``batch_size`` is given or more handlers run at once."""


class ConsumerSettings(NamedTuple):
    """What a Consumer was given, with the defaults of its queue's config."""

    selection: JobSelection
    worker: Callable[[], str]
    """Returns the name of the worker, as ``claimed_by`` and the log have it."""
    retry_policy: RetryPolicy
    lease: timedelta
    timeout: float | None
    batch: bool
    batch_size: int
    fixed_batch_size: bool
    concurrency: int
    poll_interval: float
    grace: float
    schedules: Sequence[ScheduleGroup] = ()
    distribution: Distribution | None = None
    """The shards that it works on in rotation, of a distributed table."""
    dispatch: Dispatch | None = None
    """Calls the handler of a job's class, where each class has its own."""

    @property
    def spec(self) -> QueueSpec:
        return self.selection.spec

    @property
    def serves_whole_queue(self) -> bool:
        """Whether it serves every job of its queue, so that a claim without result means an empty queue."""
        return self.selection.entity is self.spec.model and self.selection.select.whereclause is None

    @property
    def bind_arguments(self) -> dict[str, Any]:
        """Which engine statements go to, in a session with several engines: some statements name no mapped class."""
        return {"mapper": self.spec.mapper}

    @property
    def holds_transaction(self) -> bool:
        return self.spec.strategy.holds_transaction

    @property
    def spec_of_shard(self) -> QueueSpec:
        """The queue, with the statements of one shard of a distributed table; its value is the parameter ``SHARD``."""
        if self.distribution is None:
            return self.spec
        attribute = self.distribution.attribute
        return self.spec.for_shard(attribute, sa.bindparam(SHARD, None, self.spec.mapper.columns[attribute].type))

    @property
    def notifies(self) -> bool:
        return wakes(self.spec)

    @property
    def has_leases(self) -> bool:
        return not self.holds_transaction and self.spec.has("lease_expires_at")

    @property
    def has_flow_control(self) -> bool:
        """Whether limits, rates, an order or turns decide which jobs may begin."""
        return bool(self.spec.flow_rules)

    @property
    def connections(self) -> int:
        """How many connections it may need at once: for each handler, for maintenance, and for schedules."""
        return self.concurrency + (2 if self.schedules else 1)

    def timeout_error(self) -> JobTimeout:
        return JobTimeout(f"the handler ran for longer than {self.timeout:g} seconds")

    def call_groups(self, jobs: Sequence[Any]) -> list[list[Any]]:
        if not self.batch:
            return [[job] for job in jobs]
        if self.dispatch is not None:
            return self.dispatch.groups(jobs)
        return [list(jobs)] if jobs else []


def _namer(worker_name: str | None) -> Callable[[], str]:
    """Return a function that returns the name of the worker, with the process that runs it by then."""
    if worker_name is None:
        return name_of_process
    given: object = worker_name  # without a type checker, callers may pass any object
    if not isinstance(given, str) or given != storable(given):
        what = f"Consumer(worker_name={worker_name!r})"
        msg = f"{what}: give a text; no database stores a NUL, or the half of a character"
        raise ConfigurationError(msg)
    return lambda: f"{name_of_process()}:{worker_name}"


def make_settings(
    model: Any,
    *,
    handlers: Mapping[Any, Callable[..., Any]] | None,
    batch_size: int | None,
    concurrency: int,
    poll_interval: Delay,
    lease: Delay | None,
    timeout: Delay | None,
    grace: Delay,
    retry: RetryPolicy | None,
    worker_name: str | None,
    batch: bool,
    schedules: Sequence[Any] = (),
    distribution: Distribution | None = None,
) -> ConsumerSettings:
    for argument, number in (("concurrency", concurrency), ("batch_size", BATCH if batch_size is None else batch_size)):
        if not is_count(number):
            msg = f"Consumer({argument}={number!r}): give an integer from 1 on"
            raise ConfigurationError(msg)
    if retry is not None and not callable(retry):
        msg = f"Consumer(retry={retry!r}): give a policy such as sqlaqueue.Exponential(), or a callable"
        raise ConfigurationError(msg)
    selection = select_jobs(model, "Consumer")
    spec = selection.spec
    dispatch = None if handlers is None else Dispatch("Consumer", selection, handlers)
    if dispatch is not None:
        selection = selection._replace(select=dispatch.narrowed(selection.select))
    _check_states(spec)
    if distribution is not None:
        _check_distribution(spec, distribution)
    if lease is not None:
        check_lease(lease, "Consumer(lease=...)")
    if timeout is not None and seconds(timeout, "Consumer(timeout=...)") == 0:
        msg = f"Consumer(timeout={timeout!r}): a handler cannot end in zero seconds; give None for no limit"
        raise ConfigurationError(msg)
    interval = seconds(poll_interval, "Consumer(poll_interval=...)")
    if interval <= 0:
        msg = f"Consumer(poll_interval={poll_interval!r}): give more than zero seconds, or it polls without a pause"
        raise ConfigurationError(msg)

    return ConsumerSettings(
        selection=selection,
        worker=_namer(worker_name),
        retry_policy=retry or spec.config.retry,
        lease=spec.lease if lease is None else timedelta(seconds=seconds(lease)),
        timeout=None if timeout is None else seconds(timeout),
        batch=batch,
        batch_size=batch_size or max(BATCH, concurrency),
        fixed_batch_size=batch_size is not None,
        concurrency=concurrency,
        poll_interval=interval,
        grace=seconds(grace, "Consumer(grace=...)"),
        schedules=schedule_groups(schedules, "Consumer"),
        dispatch=dispatch,
        distribution=distribution,
    )


def _check_distribution(spec: QueueSpec, distribution: Any) -> None:
    """Refuse shards of a table whose statements cannot be limited to one shard."""
    name = spec.model.__name__
    if not isinstance(distribution, Distribution):
        msg = (
            f"Consumer(distribution={distribution!r}): give a sqlaqueue.citus.Distribution, with an attribute and "
            "values"
        )
        raise ConfigurationError(msg)
    attributes = [spec.mapper.get_property_by_column(column).key for column in spec.keys]
    if distribution.attribute not in attributes or len(attributes) == 1:
        msg = (
            f"Consumer(distribution=Distribution({distribution.attribute!r})): the attribute must be one of several "
            f"that make the primary key of {name}, which is {', '.join(attributes)}"
        )
        raise ConfigurationError(msg)
    refused = {
        f"strategy={spec.config.strategy!r}": spec.config.strategy != "update_status",
        "unique": spec.config.unique is not None,
        " and ".join(spec.flow_rules): bool(spec.flow_rules),
        "retention": bool(spec.config.retention),
        "attempt_history": spec.config.attempt_history is not None,
        "statistics": spec.config.statistics,
    }
    for option, used in refused.items():
        if used:
            instead = 'use strategy="update_status"' if option.startswith("strategy") else "leave it out"
            msg = (
                f"Consumer(distribution=...): {name} has {option} in its QueueConfig, which needs statements on "
                f"several shards of {spec.table.fullname}; {instead}"
            )
            raise ConfigurationError(msg)
    if not callable(distribution.values):
        distribution.check(spec.mapper.columns[distribution.attribute])


def _check_states(spec: QueueSpec) -> None:
    needed = {"failed": "a job ends that has spent its attempts"}
    if spec.config.on_complete == "keep":
        needed["completed"] = 'a job ends that succeeded; or delete such jobs with on_complete="delete"'
    for state, why in needed.items():
        if spec.has("status") and getattr(spec.config.states, state) is None:
            msg = (
                f"Consumer: {spec.model.__name__} has no value for the state {state!r}; give one in "
                f"QueueConfig(states=States({state}=...)), for how {why}"
            )
            raise ConfigurationError(msg)


# -- middleware --------------------------------------------------------------------------------------------------------
# The idea is that of WSGI's middleware and of ``River``'s worker middleware: a callable receives the next one.


def check_middleware(middleware: object, consumer: str, *, is_async: bool) -> tuple[Callable[..., Any], ...]:
    """Return the middleware of a Consumer, outermost first, after checking how each can be called."""
    if callable(middleware) or not isinstance(middleware, Iterable):
        msg = f"{consumer}(middleware={middleware!r}): give a list of callables, middleware=[function]"
        raise ConfigurationError(msg)
    found = tuple(middleware)
    for each in found:
        _check(each, consumer, is_async=is_async)
    return found


def _check(each: Any, consumer: str, *, is_async: bool) -> None:
    name = _name_of(each)
    if not callable(each):
        msg = f"{consumer}(middleware=[{each!r}]): a middleware is a callable, middleware(job, call)"
        raise ConfigurationError(msg)
    try:
        inspect.signature(each).bind(None, None)
    except ValueError:
        pass  # some built-in callables have no signature
    except TypeError as error:
        msg = f"{consumer}(middleware=[{name}]): a middleware is called as {name}(job, call): {error}"
        raise ConfigurationError(msg) from None
    kind = kind_of_function(each)
    if kind is not None and not is_coroutine_function(each):
        msg = f"{consumer}(middleware=[{name}]): {name} is {kind}, and a call of it runs nothing; remove its `yield`"
        raise ConfigurationError(msg)
    if is_async and inspect.isroutine(function_of(each)) and not is_coroutine_function(each):
        msg = f"{consumer}(middleware=[{name}]): {name} is not a coroutine function; define it with `async def`"
        raise ConfigurationError(msg)
    if not is_async and is_coroutine_function(each):
        msg = f"{consumer}(middleware=[{name}]): {name} is a coroutine function; define it with `def`"
        raise ConfigurationError(msg)


def surround(
    handler: Callable[..., Any], middleware: Sequence[Callable[..., Any]], *, is_async: bool
) -> Callable[..., Any]:
    if not middleware:
        return handler
    outwards = middleware[::-1]

    def call(session: Any, argument: Any) -> Any:
        innermost = _HandlerCall(handler, session, argument)
        inner: Callable[[], Any] = innermost
        for each in outwards:
            inner = partial(each, argument, inner)
        inner()
        return innermost.checked_result()

    async def call_async(session: Any, argument: Any) -> Any:
        innermost = _HandlerCall(handler, session, argument)
        inner: Callable[[], Any] = innermost.awaited
        for each in outwards:
            inner = partial(each, argument, inner)
        try:
            await inner()
        finally:
            # The attempt may have failed for another reason, and must not go on beside the next one.
            await innermost.wait()
        return innermost.checked_result()

    return call_async if is_async else call


class _HandlerCall:
    """One call of the handler, which each middleware makes once, or raises."""

    def __init__(self, handler: Callable[..., Any], session: Any, argument: Any) -> None:
        self._handler, self._session, self._argument = handler, session, argument
        self._result: Any = None
        self._begun = self._ended = self._over = self._left = False
        self._task: asyncio.Task[Any] | None = None

    def __call__(self) -> Any:
        self._begin()
        try:
            self._result = self._handler(self._session, self._argument)
        finally:
            self._ended = True
        return self._result

    async def awaited(self) -> Any:
        self._begin()
        self._task = asyncio.current_task()
        try:
            self._result = await self._handler(self._session, self._argument)
        finally:
            self._ended = True
        return self._result

    def _begin(self) -> None:
        if self._over:
            msg = "a middleware has returned before its call(); call it, or await it, in the middleware"
            raise HandlerMisuseError(msg)
        if self._begun:
            msg = "a middleware has called call() twice; the handler runs once in an attempt, raise Retry for another"
            raise HandlerMisuseError(msg)
        self._begun = True

    async def wait(self) -> None:
        """Cancel the handler if it runs in another task, and wait for its end."""
        task, self._over = self._task, True
        if task is not None and not self._ended:
            task.cancel()
            await asyncio.wait([task])
            self._left = True

    def checked_result(self) -> Any:
        """Return what the handler has returned. If it was not called, or goes on, the job would count as completed."""
        self._over = True
        if not self._begun:
            msg = (
                "a middleware returned without call(), or without awaiting it, so the handler has not run; raise "
                "Cancel, Snooze or Fail to leave a job out"
            )
            raise HandlerMisuseError(msg)
        if self._left or not self._ended:
            msg = "a middleware returned before its call() had ended; wait for it in the middleware"
            raise HandlerMisuseError(msg)
        return self._result
