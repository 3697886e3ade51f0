"""The sessions of handlers: checks of factories and pools, savepoints, and what a handler has done with its session."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, cast
from weakref import WeakKeyDictionary

import sqlalchemy as sa
from sqlalchemy import event, exc
from sqlalchemy.exc import DBAPIError, InvalidRequestError
from sqlalchemy.orm import Session, SessionTransaction
from sqlalchemy.orm.attributes import instance_state
from sqlalchemy.pool import AssertionPool, Pool, SingletonThreadPool, StaticPool

from sqlaqueue.consumer.core.errors import is_conflict
from sqlaqueue.consumer.core.waker import HANDLERS_FLUSH
from sqlaqueue.exc import ConfigurationError, HandlerMisuseError
from sqlaqueue.queue.options import STATES
from sqlaqueue.queue.run import Key, Run, key_text, keys_by_token, keys_from
from sqlaqueue.queue.spec import QueueSpec
from sqlaqueue.sessions import has_own_routing, primary_bind, routing_to_primary
from sqlaqueue.sql.engine import engine_of, pool_limit
from sqlaqueue.sql.portable import setting, transaction_number
from sqlaqueue.sql.types import RowLocation, check_dialect
from sqlaqueue.statements.selection import returning_keys
from sqlaqueue.strategies import ClaimedJobs, Settlement

READ_COMMITTED: Final = "READ COMMITTED"
SETTING = setting("transaction_isolation")

_STRICT = {"REPEATABLE READ", "SERIALIZABLE"}
_CALL, _LOCATIONS = "sqlaqueue_call", "sqlaqueue_row_locations"
_QUIET = {"synchronize_session": False}
_TRIES = 20
"""How often locking is tried while other transactions change the row; a lease is extended a few times a minute."""


_CTID = sa.literal_column("ctid", RowLocation())


class IsolationLevel:
    """The isolation levels of a Consumer's own transactions and of its handlers'.

    A Consumer uses READ COMMITTED, whatever the default of the database or the engine is: it changes rows that other
    transactions change as well, and would fail with conflicts under a stricter level. Handlers under a lease use the
    default, and may choose another level. From REPEATABLE READ on, a transaction cannot change a row that was changed
    after its snapshot, and each extension of the lease changes the job's row. So such a transaction begins with locking
    this row: extensions and rescues skip locked rows.

    Under SERIALIZABLE the row is found by its physical location (ctid). A search by its key would lock pages of the
    index, so that handlers that run at the same time would conflict.
    """

    def __init__(self, spec: QueueSpec) -> None:
        self._spec, self._bind = spec, {"mapper": spec.mapper}
        self.default: str | None = None
        """The default level of the sessions' transactions; None before the server has been asked."""

    @property
    def is_strict(self) -> bool:
        return self.default in _STRICT

    def begin(self, session: Session) -> None:
        """Begin a transaction at READ COMMITTED. It sends no statement: the driver sends the level with BEGIN."""
        if not self.is_strict:
            return
        transaction = session.get_transaction()
        if transaction is None or not transaction._connections:  # noqa: SLF001 - session.connection() would begin one
            options = {"isolation_level": READ_COMMITTED}
            with routing_to_primary(session):
                session.connection(bind_arguments=self._bind, execution_options=options)

    def of(self, connection: sa.Connection) -> str | None:
        """Return the level of a connection's transactions."""
        level = connection.get_execution_options().get("isolation_level")
        return self.default if level is None else str(level).upper().replace("_", " ")

    def lock_rows_on_begin(self, session: Session, running: Callable[[], Sequence[Run]]) -> None:
        """Lock the rows of the running jobs whenever their handler begins a transaction at a strict level."""
        session.info[_CALL] = (self, self._spec, running)
        session.info.pop(_LOCATIONS, None)

    @staticmethod
    def has_locked(session: Session) -> bool:
        """Return whether a transaction of this session has locked rows, as those at a strict level do."""
        return _LOCATIONS in session.info

    def complete_in_place(self, session: Session, claims: Mapping[Any, Sequence[Key]]) -> list[Key]:
        """Settle runs as completed in a SERIALIZABLE transaction of a handler.

        :return: the keys of the settled jobs; empty at any other isolation level. A row that the handler has written is
            not found, because the write moved it.
        """
        locations = session.info.pop(_LOCATIONS, None)
        if not locations:
            return []
        spec, connection = self._spec, session.connection(bind_arguments=self._bind)
        verb = spec.strategy.settle(spec, ClaimedJobs(list(claims.items())), Settlement("completed"))
        if self.of(connection) != "SERIALIZABLE" or not isinstance(verb, sa.Update | sa.Delete):
            return []
        # A sequential scan, as of a small table, would conflict with every other write to the table.
        _scan_tables(connection, "off")
        in_place = returning_keys(spec, verb.where(_is_at(locations)))
        return keys_from(session.execute(in_place, execution_options=_QUIET).scalars().all(), len(spec.keys))


# One listener for all sessions: to add one to a session takes as long as to open the session.
@event.listens_for(Session, "after_begin")
def _lock_rows(session: Session, transaction: SessionTransaction, connection: sa.Connection) -> None:
    call = session.info.get(_CALL)
    if call is None:
        return
    isolation, spec, running = call
    level: Any = isolation.of(connection)
    # In a savepoint, also of a test's transaction that the session has joined, the level cannot change any more.
    if level not in _STRICT or transaction.nested or connection.in_nested_transaction():
        return
    if engine_of(connection.dialect) is not None:
        # Only in PostgreSQL do transactions fail because a row has been changed since their snapshot, and do claims
        # and rescues pass over locked rows.
        return
    runs = running()
    if runs and connection.engine.pool is primary_bind(session, spec.mapper).engine.pool:
        session.info[_LOCATIONS] = _lock(connection, spec, level, runs)


def _lock(connection: sa.Connection, spec: QueueSpec, level: Any, runs: Sequence[Run]) -> list[str]:
    """Lock the rows of runs whose lease is held, in a snapshot with their last change; return their locations."""
    dialect = connection.dialect
    driver: Any = connection.connection.dbapi_connection
    mine = spec.strategy.fence(spec, ClaimedJobs(list(keys_by_token(runs).items())))
    seqscan = sa.func.current_setting("enable_seqscan", type_=sa.Text())
    where = sa.select(sa.cast(_CTID, sa.Text()), seqscan).select_from(spec.table).where(mine)
    for _ in range(_TRIES):
        dialect.set_isolation_level(driver, READ_COMMITTED)
        found = connection.execute(where).all()
        dialect.do_rollback(driver)
        dialect.set_isolation_level(driver, cast("Any", level))
        if not found:
            # The lease is lost, which is detected when the run is settled.
            break
        locations = [row[0] for row in found]
        locking = sa.select(sa.literal(1)).select_from(spec.table).where(_is_at(locations), mine)
        try:
            _scan_tables(connection, "off")
            locked = connection.execute(locking.with_for_update(of=spec.table, key_share=True)).all()
            _scan_tables(connection, found[0][1])
        except exc.DBAPIError as error:
            if not is_conflict(error):
                raise
        else:
            if len(locked) == len(found):
                return locations
        dialect.do_rollback(driver)
    return []


def _is_at(locations: Sequence[str]) -> sa.ColumnElement[bool]:
    return sa.any_(sa.cast(sa.literal(locations, sa.ARRAY(sa.Text())), sa.ARRAY(RowLocation()))) == _CTID


def _scan_tables(connection: sa.Connection, setting: str) -> None:
    connection.execute(sa.select(sa.func.set_config("enable_seqscan", setting, sa.true())))


_SHARED_CONNECTION_POOLS = (StaticPool, SingletonThreadPool, AssertionPool)


def check_engine(session: Session, mapper: Any, who: str, spec: QueueSpec | None = None) -> sa.Engine:
    """Return the engine to which a session writes the rows of ``mapper``; each session needs its own connection."""
    bind = primary_bind(session, mapper)
    if isinstance(bind, sa.Connection):
        msg = (
            f"{who}: its sessions are bound to one connection, but a Consumer needs one connection per handler and one "
            "for its maintenance; give it sessionmaker(engine). In a test that rolls its connection back at the end, "
            "run its jobs by sqlaqueue.testing: run_job(session, job, handler) or drain(session, Model, handler)"
        )
        raise ConfigurationError(msg)
    check_dialect(bind.dialect, who)
    other = engine_of(bind.dialect)
    if other is not None:
        if spec is not None:
            other.check_supported(spec)
        other.check_pool(bind, who)
        return bind
    if isinstance(bind.pool, _SHARED_CONNECTION_POOLS):
        raise shared_connection_error(who, f"the engine's {type(bind.pool).__name__}")
    return bind


def shared_connection_error(who: str, source: str) -> ConfigurationError:
    return ConfigurationError(
        f"{who}: {source} does not give each session a connection of its own, so handlers would commit and roll back "
        "each other's work; make the engine without poolclass= and creator=, or with poolclass=NullPool"
    )


def check_two_phase(session: Session, model: str) -> None:
    if session.twophase:
        msg = (
            f"{model}: PostgreSQL cannot prepare a transaction that has sent a notification, so a queue whose sessions "
            f"use two-phase commits must not send any; set {model}.__queue__ = QueueConfig(notify=False), and run a "
            "migration that drops its triggers"
        )
        raise ConfigurationError(msg)


def check_pool(pool: Pool, consumer: Any, who: str) -> None:
    needed, limit = consumer.connections, pool_limit(pool)
    if limit is not None and limit < needed:
        msg = (
            f"{who} needs {needed} connections, one per handler, one for its maintenance and, with schedules=, one for "
            f"them, and the engine's pool allows {limit}; use create_engine(..., pool_size={needed}) or lower "
            "concurrency"
        )
        raise ConfigurationError(msg)


def check_shared_pool(engine: sa.Engine, consumers: Sequence[Any], who: str) -> None:
    limit, needed = pool_limit(engine.pool), sum(consumer.connections for consumer in consumers)
    if limit is not None and limit < needed:
        msg = (
            f"{who} that share this engine ({', '.join(map(repr, consumers))}) need {needed} connections, and its pool "
            f"allows {limit}; use create_engine(..., pool_size={needed})"
        )
        raise ConfigurationError(msg)


def check_writable(session: Session, model: str, bind: dict[str, Any]) -> None:
    """Refuse a session class that routes even writes to a read-only server.

    A session without routing of its own is not checked: its server may be a standby that is about to be promoted.
    """
    if has_own_routing(session):
        read_only = setting("transaction_read_only")
        if session.scalar(sa.select(read_only), bind_arguments=bind) == "on":
            msg = (
                f"{type(session).__name__}.get_bind() sends the writes of {model} to a server that is read-only; let "
                f"it return the primary's engine when it is called with clause=update({model}), as Consumers do for "
                "all of their statements, or give the Consumer a sessionmaker of the primary's engine"
            )
            raise ConfigurationError(msg)


def check_transactions(session: Session, spec: QueueSpec, isolation: IsolationLevel) -> None:
    """Refuse sessions without transactions, and sessions that write to a read-only server; read the isolation level.

    Under AUTOCOMMIT other Consumers could claim the jobs of a held batch, and writes could not be rolled back.
    """
    name, bind = spec.model.__name__, {"mapper": spec.mapper}
    check_writable(session, name, bind)
    asked = sa.select(transaction_number(), SETTING)
    first, second = (session.execute(asked, bind_arguments=bind).one() for _ in range(2))
    if first[0] != second[0]:
        msg = (
            f"the sessions for {name} commit each statement by itself (AUTOCOMMIT); a Consumer needs transactions: "
            "give it a sessionmaker of an engine with another isolation_level"
        )
        raise ConfigurationError(msg)
    session.rollback()
    level: str = first[1]
    isolation.default = level.upper()
    if not isolation.is_strict:
        return
    # A strict one must give way to that of the Consumer.
    isolation.begin(session)
    kept = session.scalar(sa.select(SETTING), bind_arguments=bind)
    session.rollback()
    if kept == level:
        msg = (
            f"the sessions for {spec.model.__name__} set the isolation level {level.upper()} within each transaction, "
            "but a Consumer claims and ends jobs at READ COMMITTED; give the level to the engine "
            "(create_engine(..., isolation_level=...)), which a Consumer overrides for its own transactions"
        )
        raise ConfigurationError(msg)


def driver_connection(session: Session, bind: dict[str, Any]) -> Any:
    return session.connection(bind_arguments=dict(bind)).connection.driver_connection


# -- connection events -------------------------------------------------------------------------------------------------
# A connection of ``engine.execution_options(...)``, such as of a tenant with its own schema, refuses listeners in the
# older versions of SQLAlchemy 2.0. There, one listener of the engine calls those of the connection.


Listener = Callable[..., Any]

_listeners: WeakKeyDictionary[sa.Connection, list[tuple[str, Listener]]] = WeakKeyDictionary()
_engines: WeakKeyDictionary[sa.Engine, set[str]] = WeakKeyDictionary()


def listen(connection: sa.Connection, name: str, listener: Listener) -> None:
    """Call ``listener`` with each event of this name on this connection.

    :param listener: must not refer to the connection for longer than it is used, or it would never be collected.
    """
    try:
        event.listen(connection, name, listener)
    except InvalidRequestError:
        _listeners.setdefault(connection, []).append((name, listener))
        names = _engines.setdefault(connection.engine, set())
        if name not in names:
            names.add(name)

            def call(connection: sa.Connection, *arguments: Any) -> None:
                for of_name, each in [*_listeners.get(connection, ())]:
                    if of_name == name:
                        each(connection, *arguments)

            event.listen(connection.engine, name, call)


def remove(connection: sa.Connection, name: str, listener: Listener) -> None:
    """Undo :func:`listen`."""
    of_connection = _listeners.get(connection, [])
    if (name, listener) in of_connection:
        of_connection.remove((name, listener))
    else:
        event.remove(connection, name, listener)


# -- handler misuse ----------------------------------------------------------------------------------------------------
# Only the Consumer settles a run. After a handler has changed the state or the key of its job, the run could not be
# settled, or the job would run again under the new key. A handler may change all other columns, and may delete the
# job through the session. The checks run before the handler's writes are committed.


_ENDS_TRANSACTION = re.compile(
    r"(\s|--[^\n]*\n|/\*.*?\*/)*(commit|end|abort|prepare\s+transaction|rollback(?!\s+(work\s+|transaction\s+)?to))\b",
    re.IGNORECASE | re.DOTALL,
)

_FIX = "return, or raise Retry, Snooze, Fail or Cancel, and the Consumer ends the run"


def ends_transaction(statement: str) -> bool:
    return _ENDS_TRANSACTION.match(statement) is not None


def transaction_ended_error() -> HandlerMisuseError:
    """Return the error for a handler that ended the transaction of its batch without using the session."""
    return HandlerMisuseError(
        "the handler ended the transaction that holds its batch: by commit() or rollback() of the connection or the "
        "driver, or by a statement such as COMMIT; leave this to the Consumer, and use session.begin_nested() to undo "
        "a part"
    )


def is_deleted(job: Any) -> bool:
    return bool(instance_state(job).was_deleted)


def check_rows(
    session: Session, spec: QueueSpec, jobs: Sequence[Any], runs: Sequence[Run]
) -> HandlerMisuseError | None:
    """Flush, and return an error if a handler changed the key or the state of one of its jobs by the ORM.

    Changes by other statements are detected when the run is settled.
    """
    # What the handler has changed may take as long as its other statements.
    session.info[HANDLERS_FLUSH] = True
    try:
        session.flush()
    finally:
        session.info[HANDLERS_FLUSH] = False
    if not spec.strategy.keeps_rows:
        return None
    status, states = spec.attributes["status"], spec.config.states
    running = states.pending if states.processing is None else states.processing
    for job, run in zip(jobs, runs, strict=True):
        if is_deleted(job):
            continue
        if instance_state(job).identity != run.key:
            return HandlerMisuseError(
                f"the handler changed the key of {type(job).__name__} {key_text(run.key)}, which the Consumer needs to "
                "end its run, so its writes were rolled back; enqueue another job instead"
            )
        value = job.__dict__.get(status, running)
        if value != running and value in [each for name in STATES if (each := getattr(states, name)) is not None]:
            return HandlerMisuseError(
                f"the handler set {type(job).__name__}.{status} itself, so its writes were rolled back; {_FIX}"
            )
    return None


def row_changed_error(spec: QueueSpec, key: Key) -> HandlerMisuseError:
    """Return the error for a job whose run cannot be settled, as its handler changed the row without the ORM."""
    return HandlerMisuseError(
        f"the handler changed the key or the state of {spec.model.__name__} {key_text(key)}, or deleted its row "
        f"by a statement, so its writes were rolled back; {_FIX}; delete a job by session.delete(job)"
    )


class RowsChanged(HandlerMisuseError):
    """Some runs of a held batch cannot be settled, because a handler changed the rows of their jobs."""

    def __init__(self, spec: QueueSpec, keys: Sequence[Key]) -> None:
        super().__init__(str(row_changed_error(spec, keys[0])))
        self.keys = keys


def refuse_missing_rows(spec: QueueSpec, missing: Iterable[tuple[Run, Any]]) -> None:
    """Refuse to commit a held batch if rows of jobs are missing that no handler has deleted by the session.

    The batch has locked these rows, so only its handlers can have changed them.
    """
    keys = [run.key for run, job in missing if job is None or not is_deleted(job)]
    if keys:
        raise RowsChanged(spec, keys)


def refuse_changed_rows(session: Session, spec: QueueSpec, lost: Sequence[Run]) -> None:
    """Roll back; raise for a run whose row its handler has changed, so that its lease is still held."""
    session.rollback()
    claimed = ClaimedJobs([(run.token, [run.key]) for run in lost])
    mine = sa.select(*spec.keys).where(spec.strategy.fence(spec, claimed))
    found = session.execute(mine, bind_arguments={"mapper": spec.mapper}).first()
    session.rollback()
    if found is not None:
        raise row_changed_error(spec, tuple(found))


def was_used(session: Session, job: Any) -> bool:
    """Return whether a handler of ``job`` has used a session that was clean, to read or to write."""
    # Adding, deleting or changing an instance begins a transaction as well.
    if session.in_transaction():
        return transaction_used(session, session.get_transaction())
    # The handler may have committed, rolled back or closed the session, or deleted the job and committed.
    state = instance_state(job)
    return state.expired or state.session_id is None or state.was_deleted


def transaction_used(session: Session, transaction: SessionTransaction | None) -> bool:
    """Return whether there is something to flush, or a transaction has executed a statement."""
    if not session._is_clean():  # noqa: SLF001 - the public attributes new, dirty and deleted build a set each, for every job
        return True
    return transaction is not None and bool(transaction._connections)  # noqa: SLF001 - session.connection() would begin a transaction


def has_lost_connection(session: Session) -> bool:
    """Return whether a connection of the session's transaction is lost; the handler may have caught that error."""
    transaction = session.get_transaction()
    if transaction is None:
        return False
    used = {id(each[0]): each[0] for each in transaction._connections.values()}  # noqa: SLF001 - session.connection() would begin one
    return any(connection.invalidated for connection in used.values())


def is_expired(job: Any) -> bool:
    """Return whether a job is expired, and with it all jobs of its session."""
    return instance_state(job).expired


_GUARD = "sqlaqueue_guard"


class BatchLost(Exception):
    """The connection of the transaction that holds a batch is lost, and the batch with it."""


class Savepoint:
    """A savepoint for calls of a handler, which is closed after the first call that used the session.

    While it is open, the session refuses to commit, which would unlock the rows of the whole batch. A rollback cannot
    be refused; :meth:`close` detects it.
    """

    def __init__(self, session: Session, bind: dict[str, Any]) -> None:
        self._session = session
        self._bind = bind
        self._root = session.get_transaction()
        if not session.info.get(_GUARD):
            event.listen(session, "before_commit", _guard)
            # Before the savepoint: asking for the connection within it would send SAVEPOINT, even for a handler that
            # executes nothing.
            connection = session.connection(bind_arguments=bind)
            # The transaction of a test is guarded by what runs the handler in it.
            if not connection.in_nested_transaction():
                self._guard_connection(connection)
        self._own: SessionTransaction = session.begin_nested()
        self.is_open = True
        self._not_released: list[tuple[sa.Connection, str]] = []
        session.info[_GUARD] = self

    def _guard_connection(self, connection: sa.Connection) -> None:
        """Refuse commits by the connection, and statements that end the transaction."""
        session = self._session

        def commit(_: sa.Connection) -> None:
            _guard(session)

        def execute(_: sa.Connection, __: Any, statement: str, *___: Any) -> None:
            savepoint: Savepoint | None = session.info.get(_GUARD)
            if savepoint is not None and savepoint.is_open and ends_transaction(statement):
                raise transaction_ended_error()

        listen(connection, "commit", commit)
        listen(connection, "before_cursor_execute", execute)

    def refuses(self) -> bool:
        """Return whether the commit in progress would end more than a savepoint of the handler."""
        return self.is_open and self._session.get_nested_transaction() in {self._own, None}

    def was_used(self) -> bool:
        """Return whether a handler has used the session, or ended the savepoint or the transaction."""
        session = self._session
        if session.get_transaction() is not self._root or session.get_nested_transaction() is not self._own:
            return True
        return transaction_used(session, self._own)

    def _release(self) -> None:
        # SQLAlchemy has no public access to the savepoints of a transaction.
        connections: Any = self._own._connections.values()  # noqa: SLF001 - see above
        used = {nested: (connection, nested) for connection, nested, *_ in connections}.values()
        try:
            self._own.commit()
        except DBAPIError:
            self._not_released = [(connection, nested._savepoint) for connection, nested in used]  # noqa: SLF001 - see above
            raise

    def _roll_back(self) -> None:
        """Roll back to the savepoint, also if the database has refused to release it.

        It refuses after the handler has caught the error of a statement. SQLAlchemy regards the savepoint as ended by
        then and sends nothing, and the server would refuse all further statements of the batch.
        """
        self._own.rollback()
        for connection, name in self._not_released:
            connection.dialect.do_rollback_to_savepoint(connection, name)
        self._not_released = []

    def close(self, *, keep: bool) -> None:
        """Release the savepoint, or roll back to it; raise if the transaction has ended or the connection is lost."""
        if self._session.get_transaction() is not self._root or self._root is None or not self._root.is_active:
            msg = (
                "the handler ended the transaction that holds its batch (session.rollback() or close()); "
                "leave this to the Consumer, and use session.begin_nested() to undo a part"
            )
            raise HandlerMisuseError(msg)
        if self._session.get_nested_transaction() is not None:  # else the handler has rolled it back itself
            self.is_open = False
            if keep:
                self._release()
            else:
                self._roll_back()
        self.is_open = False
        # Cancelling a task invalidates its connection; without this check only the commit of the batch would fail.
        if self._session.connection(bind_arguments=self._bind).invalidated:
            raise BatchLost


def _guard(session: Session) -> None:
    savepoint: Savepoint | None = session.info.get(_GUARD)
    if savepoint is not None and savepoint.refuses():
        msg = (
            "a handler must not commit the transaction that holds its batch; leave the commit to the Consumer, and use "
            "session.begin_nested() to undo a part"
        )
        raise HandlerMisuseError(msg)
