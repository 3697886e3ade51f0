"""A worker in the transaction of a test: its sessions, its handlers, and what the test's instances show afterwards."""

from __future__ import annotations

from asyncio import CancelledError
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Self, TypeVar, get_args

import sqlalchemy as sa
from sqlalchemy.exc import InvalidRequestError
from sqlalchemy.orm import Session, object_session, scoped_session
from sqlalchemy.orm.attributes import instance_state

from sqlaqueue._typing import AnySelect
from sqlaqueue.consumer import sessions
from sqlaqueue.consumer.base import ConsumerBase
from sqlaqueue.consumer.claim import ClaimFailed
from sqlaqueue.consumer.consumer import Consumer
from sqlaqueue.consumer.context import ConsumerContext, ConsumerParts
from sqlaqueue.consumer.core.effects import ExecuteInOwnSession, Routine, WithSession
from sqlaqueue.consumer.core.events import EventName, JobEvent
from sqlaqueue.consumer.held import run_held_batch
from sqlaqueue.consumer.leased import (
    RescuedJob,
    WorkerTurn,
    apply,
    claim_leased_batch,
    report_rescued,
    run_leased,
    settle_finished,
)
from sqlaqueue.consumer.maintenance.cleanup import reconcile_all
from sqlaqueue.consumer.maintenance.leases import rescued_jobs
from sqlaqueue.consumer.sessions import ends_transaction, has_lost_connection
from sqlaqueue.consumer.settings import is_coroutine_function
from sqlaqueue.consumer.settle import BESIDE_ORM
from sqlaqueue.consumer.statements import ConsumerStatements
from sqlaqueue.consumer.threads import ThreadRunner
from sqlaqueue.exc import (
    ConfigurationError,
    DatabaseNotReadyError,
    HandlerMisuseError,
    NotAQueueError,
    NotClaimableError,
    StatementError,
    TransactionLostError,
)
from sqlaqueue.flow_control.held_back import held_back_by
from sqlaqueue.log import seconds_text
from sqlaqueue.mapping.mixin import QueueMixin, queue_spec, spec_of
from sqlaqueue.postgresql.checks_of import checks_of_error
from sqlaqueue.postgresql.due_times import written_here
from sqlaqueue.postgresql.side_tables import is_paused
from sqlaqueue.queue.names import CONTROL
from sqlaqueue.queue.run import Key, key_text, keys_from
from sqlaqueue.queue.spec import QueueSpec, clock
from sqlaqueue.session_types import check_session, session_in_scope
from sqlaqueue.sql.engine import OF_TEST
from sqlaqueue.statements.selection import JobSelection, instances, key_of, select_jobs
from sqlaqueue.statements.verbs import rescue
from sqlaqueue.waiting.wait import read_state
from sqlaqueue.write_routing import routing_to_primary

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session

    from sqlaqueue.consumer.async_consumer import AsyncConsumer

# --  types ------------------------------------------------------------------------------------------------------------
# Types of the arguments of this package's functions.


T = TypeVar("T")

AnySession = Session | scoped_session[Any]
Handler = Callable[[Any, T], object] | Mapping[Any, Callable[[Any, Any], object]] | Consumer[Any]
Jobs = type[T] | AnySelect
"""A queue class, or a select of its jobs."""

if TYPE_CHECKING:
    AnyAsyncSession = AsyncSession | async_scoped_session[Any]
    AsyncHandler = (
        Callable[[Any, T], Awaitable[object]]
        | Mapping[Any, Callable[[Any, Any], Awaitable[object]]]
        | AsyncConsumer[Any]
    )


# -- claimable ---------------------------------------------------------------------------------------------------------
# The one job that a function of this package was given: its key, and why it could not be claimed.


def flushed_key(session: Session, job: Any, function: str) -> Key:
    """Flush, and return the key of a job.

    :raises NotAQueueError: if it is no instance of a queue class.
    :raises StatementError: if it belongs to another session, or to none and has no row.
    """
    if isinstance(job, Iterable) and not isinstance(job, QueueMixin):
        msg = f"{function}(): this is a {type(job).__name__}; give one job, and call it for each"
        raise NotAQueueError(msg)
    (job,) = instances([job], function)
    owner = object_session(job)
    if owner is not None and owner is not session:
        msg = (
            f"{function}(): this {type(job).__name__} belongs to another session, whose transaction this one may not "
            "see; give the session to which the job was added"
        )
        raise StatementError(msg)
    session.flush()
    return key_of(job, function)


def not_claimable(session: Session, model: type[Any], key: Key, function: str) -> NotClaimableError:
    """Return the error for a job that was not claimed, with the reason."""
    spec = spec_of(model)
    return NotClaimableError(f"{function}(): {model.__name__} {key_text(key)} {_reason(session, spec, key)}")


def _reason(session: Session, spec: QueueSpec, key: Key) -> str:
    bind = {"mapper": spec.mapper}
    state = read_state(session, spec, key)
    if not state.has_row:
        return "has no row in this transaction"
    if state.state == "processing":
        return "is already claimed and its run has not ended; to test a crash, call crash() while the job is pending"
    if state.state != "pending":
        return f"is {state.state}, so no worker claims it; requeue() makes it pending"
    if queue_is_paused(session, spec):
        name = spec.model.__name__
        return f"waits, since its queue is paused; session.execute(resume({name})) ends that"
    if spec.has("run_at"):
        wait = sa.select(spec.columns["run_at"] - clock()).where(spec.key_in(spec.keys, [key]))
        delay = session.execute(wait, bind_arguments=bind).scalar_one_or_none()
        if delay is not None and delay.total_seconds() > 0:
            left = delay.total_seconds()
            return f"is not due for {seconds_text(left)}; travel(session, {int(left) + 1}) moves it there"
    other = "was not claimed: another transaction has locked it, or the Consumer's select leaves it out"
    return _held_back(session, spec, key) or other


def _held_back(session: Session, spec: QueueSpec, key: Key) -> str:
    found = [*held_back_by(session, spec, key)]
    if not found:
        return ""
    waits = [one.seconds for one in found if one.kind == "rate"]
    hint = f" travel(session, {int(max(waits)) + 1}) moves it there." if waits else ""
    return f"is held back. {' '.join(one.text for one in found)}{hint}".removesuffix(".")


def queue_is_paused(session: Session, spec: QueueSpec) -> bool:
    if CONTROL not in spec.side_tables:
        return False
    paused = sa.select(is_paused(spec))
    return bool(session.execute(paused, bind_arguments={"mapper": spec.mapper}).scalar_one())


# -- existing rows -----------------------------------------------------------------------------------------------------
# Which jobs still have a row.


def existing_keys(session: Session, spec: QueueSpec, keys: Collection[Key]) -> set[Key]:
    found = sa.select(*spec.keys).where(spec.key_in(spec.keys, list(keys)))
    rows = session.execute(found, bind_arguments={"mapper": spec.mapper}).all()
    return set(keys_from((row if len(row) > 1 else row[0] for row in rows), len(spec.keys)))


# -- earlier jobs ------------------------------------------------------------------------------------------------------
# Which jobs the transaction of a test has enqueued, and which were there before.


_EARLIER = "sqlaqueue_earlier_jobs"
"""The key in ``Connection.info`` of jobs that were enqueued before the test's transaction, and written by a function of
this package: such a row looks like one that the transaction has enqueued."""


def enqueued_keys(session: Session, selection: JobSelection) -> list[Key]:
    """Return the keys of selected jobs that wait, and that the session's transaction has enqueued."""
    spec = selection.spec
    keys = spec.strategy.pick(spec, selection.select, *spec.keys).where(_written_here(spec)).order_by(*spec.keys)
    if spec.has("status"):
        keys = keys.where(spec.in_state("pending"))
    earlier = _earlier(session, spec)
    found = (tuple(row) for row in session.execute(keys, bind_arguments={"mapper": spec.mapper}))
    return [key for key in found if key not in earlier]


def remember_earlier_jobs(session: Session, spec: QueueSpec, key: Key | None = None) -> None:
    """Remember which jobs are not of this transaction, before their rows are written.

    :param key: the only pending job that will be written; by default all will.
    """
    others = sa.select(*spec.keys).where(~_written_here(spec))
    if spec.has("status"):
        pending = spec.in_state("pending")
        # Those with an expired lease become pending.
        expired = [] if spec.strategy.holds_transaction else [spec.in_state("processing")]
        if key is not None:
            pending = sa.and_(pending, spec.key_in(spec.keys, [key]))
        others = others.where(sa.or_(pending, *expired))
    elif key is not None:
        others = others.where(spec.key_in(spec.keys, [key]))
    found = session.execute(others, bind_arguments={"mapper": spec.mapper})
    _earlier(session, spec).update(tuple(row) for row in found)


def forget_deleted_jobs(session: Session, spec: QueueSpec, keys: Collection[Key]) -> None:
    """Forget those of some jobs whose rows are deleted: another job may be enqueued under the same key."""
    earlier = _earlier(session, spec)
    among = earlier.intersection(keys)
    if among:
        earlier -= among - existing_keys(session, spec, among)


def _written_here(spec: QueueSpec) -> sa.ColumnElement[bool]:
    written = spec.table.alias("sqlaqueue_written")
    same = [written.c[key.key] == key for key in spec.keys]
    return sa.exists().where(*same, written_here(written))


def _earlier(session: Session, spec: QueueSpec) -> set[Key]:
    """Return the remembered keys of the connection's present transaction, which several sessions may share."""
    connection = session.connection(bind_arguments={"mapper": spec.mapper})
    transaction, tables = connection.info.get(_EARLIER, (None, {}))
    if transaction is not connection.get_transaction():
        tables = {}
        connection.info[_EARLIER] = (connection.get_transaction(), tables)
    # By name, as several classes may be mapped to one table.
    remembered: set[Key] = tables.setdefault((spec.table.schema, spec.table.name), set())
    return remembered


# -- instances ---------------------------------------------------------------------------------------------------------
# What the instances of a test's session show after others have written in its transaction.


def show_changes(session: Session, *, is_async: bool = False) -> None:
    """Let the session's instances show what other sessions have written in its transaction.

    Instances of jobs whose rows are deleted are detached, and keep their values. The others expire, as after a commit;
    in async code they are read again, since the next access to an expired attribute would raise.
    """
    loaded: dict[QueueSpec, dict[Key, Any]] = {}
    for instance in session.identity_map.values():
        spec = queue_spec(type(instance))
        if spec is not None:
            loaded.setdefault(spec, {})[instance_state(instance).identity or ()] = instance
    for spec, jobs in loaded.items():
        for key in jobs.keys() - existing_keys(session, spec, jobs.keys()):
            session.expunge(jobs[key])
    if not is_async:
        session.expire_all()
        return
    for instance in list(session.identity_map.values()):
        state = instance_state(instance)
        columns = {one.key for one in state.mapper.column_attrs if not one.deferred}
        refresh_or_detach(session, instance, columns | state.mapper.attrs.keys() & state.dict.keys())


def load_before_deletion(session: Session, spec: QueueSpec) -> None:
    """Load the expired instances of a queue whose rows a run may delete: then they could not be loaded any more."""
    if spec.strategy.keeps_rows and spec.config.on_complete == "keep":
        return
    for instance in list(session.identity_map.values()):
        state = instance_state(instance)
        if queue_spec(type(instance)) is spec and state.expired_attributes:
            refresh_or_detach(session, instance, set(state.expired_attributes))


def refresh_or_detach(session: Session, instance: Any, names: Collection[str]) -> None:
    """Read attributes of an instance again; detach it if its row is deleted, so that it keeps its values."""
    try:
        session.refresh(instance, names)
    except InvalidRequestError:
        session.expunge(instance)


# -- settings ----------------------------------------------------------------------------------------------------------
# Restore the settings that a worker sets with SET LOCAL.
#
# In production they end with its transaction; in a test they would last until the test's rollback.


_CHANGED = ("lock_timeout", "synchronous_commit")
"""Entries of the crash journal change these."""


def read_settings(session: Session, spec: QueueSpec) -> tuple[str, ...]:
    """Return the settings that runs of a queue change; empty if they change none."""
    if not spec.strategy.holds_transaction:
        return ()
    current = sa.select(*(sa.func.current_setting(name, type_=sa.Text()) for name in _CHANGED))
    return tuple(session.execute(current, bind_arguments={"mapper": spec.mapper}).one())


def restore_settings(session: Session, spec: QueueSpec, settings: tuple[str, ...]) -> None:
    """Set them as :func:`read_settings` returned them."""
    if settings:
        before = [sa.func.set_config(name, value, sa.true()) for name, value in zip(_CHANGED, settings, strict=True)]
        session.execute(sa.select(*before), bind_arguments={"mapper": spec.mapper})


# -- transaction guard -------------------------------------------------------------------------------------------------
# Keeps handlers from ending the transaction of a test.


_METHODS = ("commit", "rollback", "close")


class TransactionGuard:
    """Refuses to commit or roll back the connections of a test while a worker uses them.

    The worker's sessions end only savepoints. A handler may end more: by ``session.connection().commit()``, or by a
    statement such as COMMIT. Then nothing could be rolled back after the test.
    """

    def __init__(self) -> None:
        self._watched: dict[sa.Connection, tuple[sa.RootTransaction | None, Any, Any]] = {}

    def watch(self, connection: sa.Connection) -> None:
        if connection in self._watched:
            return

        def execute(_: sa.Connection, __: Any, statement: str, *___: Any) -> None:
            if ends_transaction(statement):
                raise _refusal(f"the statement {statement}")

        sessions.listen(connection, "before_cursor_execute", execute)
        # Not by the events of commit and rollback: an error in them would leave SQLAlchemy's transaction half ended.
        for name in _METHODS:
            connection.__dict__[name] = partial(_refuse, f"session.connection().{name}()")
        info = connection.info
        info[OF_TEST] = True
        self._watched[connection] = (connection.get_transaction(), execute, info)

    def check(self) -> None:
        """Raise an error if a transaction was ended all the same, such as by ``get_transaction().commit()``.

        :raises HandlerMisuseError: if one was.
        """
        if any(transaction is None or not transaction.is_active for transaction, *_ in self._watched.values()):
            raise _refusal("the object of the connection's transaction")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for connection, (_, execute, info) in self._watched.items():
            info.pop(OF_TEST, None)
            sessions.remove(connection, "before_cursor_execute", execute)
            for name in _METHODS:
                del connection.__dict__[name]
        self._watched.clear()


def _refuse(what: str) -> NoReturn:
    raise _refusal(what)


def _refusal(what: str) -> HandlerMisuseError:
    return HandlerMisuseError(
        f"a handler ended its transaction by {what}, which in a test is the transaction of the test; use "
        "session.commit() and session.rollback() under a lease, and neither in a held transaction"
    )


# -- joined sessions ---------------------------------------------------------------------------------------------------
# Sessions that work in the transaction of a test's session, each in a savepoint of its own.
#
# SQLAlchemy calls this "joining a session into an external transaction": a commit of such a session releases its
# savepoint, and the test's rollback undoes everything.


_OPTIONS = ("_query_cls", "enable_baked_queries", "execution_options")
"""The attributes for options of a Session beside those that its constructor is given; the last is of SQLAlchemy 2.1."""


def resolve_session(session: Any, function: str, *, is_async: bool) -> Any:
    """Return the session itself; of a scoped session, the one of the current scope.

    :param function: the function that was given it, for errors.
    :raises ConfigurationError: if it is no session of this kind.
    """
    check_session(session, function, is_async=is_async, has_async_version=True)
    return session_in_scope(session)


def joined_session(session: Session, guard: TransactionGuard) -> Session:
    """Return a new session of the same class, in the transaction of ``session``.

    It has the options and attributes of ``session``, but not the event listeners of that instance: a session factory
    would not have added them either.

    :param guard: watches the connections that it uses.
    """
    cls = type(session)
    joined = cls.__new__(cls)
    # The class may have a constructor of its own. What that has stored is copied, and SQLAlchemy's part made anew.
    joined.__dict__.update((name, value) for name, value in vars(session).items() if name not in {"dispatch", "info"})
    Session.__init__(
        joined,
        autoflush=session.autoflush,
        expire_on_commit=session.expire_on_commit,
        info=dict(session.info),
        join_transaction_mode="create_savepoint",
    )
    joined.__dict__.update((name, vars(session)[name]) for name in _OPTIONS if name in vars(session))

    def get_bind(mapper: Any = None, **arguments: Any) -> sa.Connection:
        # Other connections do not see what the test has written.
        with routing_to_primary(session):
            connection = session.connection(bind_arguments={"mapper": mapper, **arguments})
        guard.watch(connection)
        return connection

    joined.__dict__["get_bind"] = get_bind
    return joined


def joined_factory(session: Session, guard: TransactionGuard) -> Callable[[], Session]:
    return lambda: joined_session(session, guard)


def joined_async_factory(session: AsyncSession, guard: TransactionGuard) -> Callable[[], AsyncSession]:
    from sqlalchemy.ext.asyncio import AsyncSession as Base  # noqa: PLC0415 - it needs greenlet, which sync code may lack

    cls = type(session)

    def make() -> AsyncSession:
        joined = cls.__new__(cls)
        joined.__dict__.update(vars(session))
        Base.__init__(joined, sync_session_class=lambda **_: joined_session(session.sync_session, guard))  # type: ignore[arg-type]  # it takes any callable that makes a session
        return joined

    return make


# -- worker ------------------------------------------------------------------------------------------------------------
# One worker of a Consumer, in the transaction of a test.
#
# The routines are those of a running Consumer, and so are the statements, the savepoints and the rules of outcomes.
# What a test cannot have is left out: threads and further connections, the checks of them, polling and maintenance.


class WorkerInTest:
    """Claims, runs and settles jobs, one after the other.

    :param function: the function of this package that needs it, for errors.
    :param model: the queue class, or a select of its jobs.
    :param handler: as a Consumer takes it, or a Consumer.
    :param narrow: chooses among the jobs that the Consumer serves.
    :param limit: the most runs, after which an AssertionError ends the test; None for no limit.
    """

    def __init__(
        self,
        function: str,
        model: Any,
        handler: Any,
        *,
        narrow: Callable[[AnySelect], AnySelect] = lambda select: select,
        limit: int | None = None,
    ) -> None:
        consumer = _consumer(function, model, handler)
        self._is_async = not isinstance(consumer, Consumer)
        selection = consumer.settings.selection
        narrowed = selection._replace(select=narrow(selection.select))
        settings = consumer.settings._replace(concurrency=1, selection=narrowed)
        self.spec = settings.spec
        self.selection = settings.selection
        self.events: list[JobEvent] = []
        """What has become of the jobs, in order."""
        self._function, self._name, self._limit = function, repr(consumer), limit
        self._handler = consumer.handler_call
        self._interrupted: list[BaseException] = []
        self._settings: tuple[str, ...] = ()
        self._in_async_code = False
        self._runs = Counter[Key]()
        self._parts = ConsumerParts(settings, ConsumerStatements(settings))
        for name in get_args(EventName):
            self._parts.events.add(name, self._record)
            self._parts.events.add(name, consumer.events.call_listeners)

    def _record(self, event: JobEvent) -> None:
        self.events.append(event)
        if event.name == "claimed":
            self._runs[event.key] += 1

    def begin(self, session: Session, key: Key | None = None, *, is_async: bool = False) -> None:
        """Prepare ``session`` for what the runs will do in its transaction.

        :param key: the only job that will run; by default all may.
        :param is_async: whether the test is async code.
        """
        self._in_async_code = is_async
        remember_earlier_jobs(session, self.spec, key)
        load_before_deletion(session, self.spec)
        self._settings = read_settings(session, self.spec)

    def end(self, session: Session) -> None:
        """Restore the settings of the transaction, and let the instances of ``session`` show the changed rows."""
        restore_settings(session, self.spec, self._settings)
        forget_deleted_jobs(session, self.spec, {event.key for event in self.events})
        show_changes(session, is_async=self._in_async_code)

    def _end_after_error(self, session: Session) -> None:
        # The transaction may be lost, and the first error matters.
        with suppress(Exception):
            self.end(session)

    def run(self, session: Session, routine: Callable[[ConsumerContext], Routine]) -> Any:

        def handler(own: Session, argument: Any) -> Any:
            try:
                return self._handler(own, argument)
            except BaseException as error:
                self._note_interrupt(error)
                raise

        try:
            with self._guarded(session) as guard:
                factory = joined_factory(session, guard)
                with closing(ThreadRunner(self._name, self._parts, factory, handler, draining=True)) as runner:
                    return runner.execute(routine(runner.context))
        except BaseException:
            self._end_after_error(session)
            raise

    async def run_async(self, session: AsyncSession, routine: Callable[[ConsumerContext], Routine]) -> Any:
        """Do what :meth:`run` does, in a task; a handler that is no coroutine function is run as in sync code."""
        if not self._is_async:
            return await session.run_sync(self.run, routine)
        from sqlaqueue.consumer.tasks import TaskRunner  # noqa: PLC0415 - it needs greenlet

        async def handler(own: AsyncSession, argument: Any) -> Any:
            try:
                return await self._handler(own, argument)
            except BaseException as error:
                self._note_interrupt(error)
                raise

        try:
            with self._guarded(session.sync_session) as guard:
                factory = joined_async_factory(session, guard)
                runner = TaskRunner(self._name, self._parts, factory, handler, draining=True)
                return await runner.execute(routine(runner.context))
        except BaseException:
            await session.run_sync(self._end_after_error)
            raise

    @contextmanager
    def _guarded(self, session: Session) -> Iterator[TransactionGuard]:
        """Guard the transaction of ``session``, and raise errors of the database with what to do about them.

        :raises HandlerMisuseError: if a handler ended the transaction.
        :raises DatabaseNotReadyError: if a table or column of the queue is missing.
        :raises TransactionLostError: if the connection is lost.
        """
        with TransactionGuard() as guard:
            try:
                yield guard
            except Exception as error:
                self._refuse_lost_connection(session, error)
                guard.check()
                advice = checks_of_error(error).undefined_object_advice(error, self.spec)
                if advice is None:
                    raise
                raise DatabaseNotReadyError(advice) from error
            # A routine may have handled such an error as the outcome of a run.
            self._refuse_lost_connection(session, None)
            guard.check()

    def _refuse_lost_connection(self, session: Session, error: Exception | None) -> None:
        if has_lost_connection(session):
            msg = (
                f"{self._function}(): the connection of the test's transaction was lost while a handler ran, and the "
                "jobs with it. A handler that ends its connection, or a coroutine that is cancelled while it executes "
                "a statement, has to be tested with committed jobs and a Consumer"
            )
            raise TransactionLostError(msg) from error

    def _note_interrupt(self, error: BaseException) -> None:
        # Ctrl-C, and pytest.fail() or pytest.skip(), are meant for the test, and not for the job.
        if not isinstance(error, Exception | SystemExit | CancelledError):
            self._interrupted.append(error)

    # -- routines --------------------------------------------------------------------------------------------------

    def run_one(self, context: ConsumerContext) -> Routine:
        """Rescue jobs of dead workers, then claim once and run what was claimed."""
        yield from _rescue(context)
        yield from _take_turn(context)
        self._check_progress()

    def run_all(self, context: ConsumerContext) -> Routine:
        """Do so until no job is due; return how many runs have ended."""
        yield from _rescue(context)
        while True:
            claimed = yield from _take_turn(context)
            self._check_progress()
            if not (claimed or (yield from reconcile_all(context))):
                return context.runs_ended

    def _check_progress(self) -> None:
        if self._interrupted:
            raise self._interrupted[0]
        if self._limit is not None and self._runs.total() > self._limit:
            ((key, runs),) = self._runs.most_common(1)
            msg = (
                f"{self._function}(): {self._runs.total()} runs have come to no end, {runs} of them of "
                f"{self.spec.model.__name__} {key_text(key)}; does a handler always snooze, or enqueue its own "
                f"successor? For more than {self._limit} runs give {self._function}(..., limit=...)"
            )
            raise AssertionError(msg)


def _consumer(function: str, model: Any, handler: Any) -> ConsumerBase:
    """Return the Consumer that a test was given, or one for its handler.

    :raises ConfigurationError: if a handler cannot run these jobs, or is a coroutine function in sync code.
    """
    handlers = [*handler.values()] if isinstance(handler, Mapping) else [handler]
    is_consumer = isinstance(handler, ConsumerBase)
    is_async = not isinstance(handler, Consumer) if is_consumer else any(map(is_coroutine_function, handlers))
    if is_async and not function.startswith("async_"):
        what = "an AsyncConsumer" if is_consumer else "a coroutine function"
        msg = f"{function}(..., {handler!r}): for {what} use async_{function}() with an AsyncSession"
        raise ConfigurationError(msg)
    if is_consumer:
        if handler.model is not select_jobs(model, function).spec.model:
            msg = f"{function}(..., {handler!r}): it serves {handler.model.__name__}, and not these jobs"
            raise ConfigurationError(msg)
        if isinstance(model, sa.Select):
            msg = f"{function}(..., {model}, {handler!r}): the Consumer chooses its jobs itself; give the class"
            raise ConfigurationError(msg)
        given: ConsumerBase = handler
        return given
    make: Any = Consumer
    if is_async:
        from sqlaqueue.consumer.async_consumer import AsyncConsumer as make  # noqa: PLC0415, N813 - it needs greenlet; one of two
    try:
        consumer: ConsumerBase = make(model, handler, _no_session)
    except ConfigurationError as error:
        msg = f"{function}(): {str(error).removeprefix(f'{make.__name__}: ')}"
        raise ConfigurationError(msg) from None
    return consumer


def _no_session() -> Any:
    msg = "a worker in a test uses sessions of its own"
    raise RuntimeError(msg)


def _rescue(context: ConsumerContext) -> Routine:
    if context.settings.has_leases:
        report_rescued(context, (yield ExecuteInOwnSession(rescue_expired, (context.spec,))))


def rescue_expired(session: Session, spec: QueueSpec) -> list[RescuedJob]:
    """Rescue jobs whose lease has expired, and commit.

    Not by the maintenance task of a Consumer, which sets a timeout for its transaction: this one is the test's.
    """
    bind = {"mapper": spec.mapper}
    found = session.execute(rescue(spec.model), execution_options=BESIDE_ORM, bind_arguments=bind).scalars()
    rescued = rescued_jobs(session, spec, keys_from(found, len(spec.keys)))
    session.commit()
    return rescued


def _take_turn(context: ConsumerContext) -> Routine:
    """Claim once, run what was claimed, and settle; return how many jobs were claimed."""
    try:
        return (yield from _turn(context))
    except ClaimFailed as failed:
        raise failed.__cause__ or failed from None


def _turn(context: ConsumerContext) -> Routine:
    turn = WorkerTurn(context)
    turn.may_claim()
    if context.settings.holds_transaction:
        quarantined = context.quarantine.take()
        done = yield WithSession(run_held_batch(context, turn, quarantined))
        turn.end()
        if quarantined is not None:
            context.quarantine.end([quarantined.key])
        apply(context, done)
        return done.claimed
    claimed = yield WithSession(claim_leased_batch(context, turn, []))
    turn.end()
    while (executor := turn.take_jobs()) is not None:
        yield WithSession(run_leased(context, executor))
        turn.end()
    yield from settle_finished(context)
    return claimed
