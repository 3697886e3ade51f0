"""A worker in the transaction of a test: its sessions, its handlers, and what the test's instances show afterwards."""

from __future__ import annotations

from asyncio import CancelledError
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Self, TypeVar, get_args

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.orm import Session, scoped_session

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
from sqlaqueue.exc import ConfigurationError, DatabaseNotReadyError, HandlerMisuseError, TransactionLostError
from sqlaqueue.postgresql.checks_of import checks_of_error
from sqlaqueue.postgresql.ddl import queue_of
from sqlaqueue.postgresql.waits import AT_COMMIT
from sqlaqueue.queue.names import WAITS
from sqlaqueue.queue.run import Key, key_text, keys_from
from sqlaqueue.queue.spec import QueueSpec
from sqlaqueue.sessions import check_session, routing_to_primary, session_in_scope
from sqlaqueue.sql.engine import OF_TEST
from sqlaqueue.sql.types import NEUTRAL
from sqlaqueue.statements.selection import select_jobs
from sqlaqueue.statements.verbs import rescue
from sqlaqueue.testing.rows import (
    forget_deleted_jobs,
    load_before_deletion,
    read_settings,
    remember_earlier_jobs,
    restore_settings,
    show_changes,
)

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session

    from sqlaqueue.consumer.async_consumer import AsyncConsumer

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
        """Raise an error if a transaction was ended all the same, such as by ``get_transaction().commit()``."""
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
    """Return the session itself; of a scoped session, the one of the current scope."""
    check_session(session, function, is_async=is_async, has_async_version=True)
    return session_in_scope(session)


def count_waiting(spec: QueueSpec, session: Session) -> None:
    """Let the jobs that wait for others be counted, as at the commit of a transaction. Elsewhere claims count."""
    queues = (queue_of(table) for table in spec.table.metadata.tables.values())
    tables = [queue.side_tables[WAITS] for queue in queues if queue is not None and queue.waits]
    prefixes = {f"{NEUTRAL.identifier_preparer.quote(each.schema)}." if each.schema else "" for each in tables}
    if prefixes and (connection := session.connection()).dialect.name == "postgresql":
        session.flush()
        names = ", ".join(f"{each}{AT_COMMIT}" for each in sorted(prefixes))
        for mode in ("IMMEDIATE", "DEFERRED"):
            connection.exec_driver_sql(f"SET CONSTRAINTS {names} {mode}")


def joined_session(session: Session, guard: TransactionGuard, at_commit: Callable[[Session], None]) -> Session:
    """Return a new session of the same class, in the transaction of ``session``.

    It has the options and attributes of ``session``, but not the event listeners of that instance: a session factory
    would not have added them either.

    :param guard: watches the connections that it uses.
    :param at_commit: called before each commit of the session.
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
    event.listen(joined, "before_commit", at_commit)
    return joined


def joined_async_factory(
    session: AsyncSession, guard: TransactionGuard, at_commit: Callable[[Session], None]
) -> Callable[[], AsyncSession]:
    from sqlalchemy.ext.asyncio import AsyncSession as Base  # noqa: PLC0415 - it needs greenlet, which sync code may lack

    cls = type(session)

    def make() -> AsyncSession:
        joined = cls.__new__(cls)
        joined.__dict__.update(vars(session))
        Base.__init__(joined, sync_session_class=lambda **_: joined_session(session.sync_session, guard, at_commit))  # type: ignore[arg-type]  # it takes any callable that makes a session
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
        self._in_async_code = is_async
        count_waiting(self.spec, session)
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
                factory = partial(joined_session, session, guard, partial(count_waiting, self.spec))
                with closing(ThreadRunner(self._name, self._parts, factory, handler, draining=True)) as runner:
                    return runner.execute(routine(runner.context))
        except BaseException:
            self._end_after_error(session)
            raise

    async def run_async(self, session: AsyncSession, routine: Callable[[ConsumerContext], Routine]) -> Any:
        """Run a routine in a task; a handler that is no coroutine function is run as in sync code."""
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
                factory = joined_async_factory(session, guard, partial(count_waiting, self.spec))
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
            raise TransactionLostError(
                f"{self._function}(): the connection of the test's transaction was lost while a handler ran, and the "
                "jobs with it. A handler that ends its connection, or a coroutine that is cancelled while it executes "
                "a statement, has to be tested with committed jobs and a Consumer"
            ) from error

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
        """Rescue jobs, and claim and run until no job is due; return how many runs have ended."""
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
            raise AssertionError(
                f"{self._function}(): {self._runs.total()} runs have come to no end, {runs} of them of "
                f"{self.spec.model.__name__} {key_text(key)}; does a handler always snooze, or enqueue its own "
                f"successor? For more than {self._limit} runs give {self._function}(..., limit=...)"
            )


def _consumer(function: str, model: Any, handler: Any) -> ConsumerBase:
    handlers = [*handler.values()] if isinstance(handler, Mapping) else [handler]
    is_consumer = isinstance(handler, ConsumerBase)
    is_async = not isinstance(handler, Consumer) if is_consumer else any(map(is_coroutine_function, handlers))
    if is_async and not function.startswith("async_"):
        what = "an AsyncConsumer" if is_consumer else "a coroutine function"
        raise ConfigurationError(
            f"{function}(..., {handler!r}): for {what} use async_{function}() with an AsyncSession"
        )
    if is_consumer:
        if handler.model is not select_jobs(model, function).spec.model:
            raise ConfigurationError(
                f"{function}(..., {handler!r}): it works for {handler.model.__name__}, and not for these jobs"
            )
        if isinstance(model, sa.Select):
            raise ConfigurationError(
                f"{function}(..., {model}, {handler!r}): the Consumer chooses its jobs itself; give the class"
            )
        given: ConsumerBase = handler
        return given
    make: Any = Consumer
    if is_async:
        from sqlaqueue.consumer.async_consumer import AsyncConsumer as make  # noqa: PLC0415, N813 - it needs greenlet; one of two
    try:
        consumer: ConsumerBase = make(model, handler, _no_session)
    except ConfigurationError as error:
        raise ConfigurationError(f"{function}(): {str(error).removeprefix(f'{make.__name__}: ')}") from None
    return consumer


def _no_session() -> Any:
    raise RuntimeError("a worker in a test uses sessions of its own")


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
    context.settler.limits_locks = False
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
