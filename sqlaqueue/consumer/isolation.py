"""The isolation levels of a Consumer's own transactions and of its handlers'.

A Consumer uses READ COMMITTED, whatever the default of the database or the engine is: it changes rows that other
transactions change as well, and would fail with conflicts under a stricter level. Handlers under a lease use the
default, and may choose another level. From REPEATABLE READ on, a transaction cannot change a row that was changed after
its snapshot, and each extension of the lease changes the job's row. So such a transaction begins with locking this row:
extensions and rescues skip locked rows.

Under SERIALIZABLE the row is found by its physical location (ctid). A search by its key would lock pages of the index,
so that handlers that run at the same time would conflict.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, cast

import sqlalchemy as sa
from sqlalchemy import event, exc
from sqlalchemy.orm import Session, SessionTransaction
from sqlalchemy.types import UserDefinedType

from sqlaqueue.consumer.errors import is_conflict
from sqlaqueue.queue.run import Key, Run, keys_by_token, keys_from
from sqlaqueue.queue.spec import QueueSpec
from sqlaqueue.sql.engine import engine_of
from sqlaqueue.statements.selection import returning_keys
from sqlaqueue.strategies import ClaimedJobs, Settlement
from sqlaqueue.write_routing import primary_bind, routing_to_primary

READ_COMMITTED: Final = "READ COMMITTED"
SETTING = sa.func.current_setting("transaction_isolation", type_=sa.Text())
"""The isolation level of the current transaction."""

_STRICT = {"REPEATABLE READ", "SERIALIZABLE"}
_CALL, _LOCATIONS = "sqlaqueue_call", "sqlaqueue_row_locations"
_QUIET = {"synchronize_session": False}
_TRIES = 20
"""How often locking is tried while other transactions change the row; a lease is extended a few times a minute."""


class _RowLocation(UserDefinedType[str]):
    """The physical location of a row in its table."""

    cache_ok = True

    def get_col_spec(self, **_: Any) -> str:
        return "tid"


_CTID = sa.literal_column("ctid", _RowLocation())


class IsolationLevel:
    """The isolation level of a Consumer's sessions, and what follows from it.

    :param spec: the queue.
    """

    def __init__(self, spec: QueueSpec) -> None:
        self._spec, self._bind = spec, {"mapper": spec.mapper}
        self.default: str | None = None
        """The default level of the sessions' transactions; None before the server has been asked."""

    @property
    def is_strict(self) -> bool:
        """Whether the default level is stricter than READ COMMITTED."""
        return self.default in _STRICT

    def begin(self, session: Session) -> None:
        """Begin a transaction of the Consumer at READ COMMITTED.

        This sends no statement of its own: the driver sends the level with BEGIN.
        """
        if self.is_strict and not _is_connected(session):
            options = {"isolation_level": READ_COMMITTED}
            with routing_to_primary(session):
                session.connection(bind_arguments=self._bind, execution_options=options)

    def of(self, connection: sa.Connection) -> str | None:
        """Return the level of a connection's transactions."""
        level = connection.get_execution_options().get("isolation_level")
        return self.default if level is None else str(level).upper().replace("_", " ")

    def lock_rows_on_begin(self, session: Session, running: Callable[[], Sequence[Run]]) -> None:
        """Lock the rows of jobs whenever their handler begins a transaction at a strict level.

        :param running: returns the runs of the current call of the handler.
        """
        if _CALL not in session.info:
            event.listen(session, "after_begin", _lock_rows)
        session.info[_CALL] = (self, self._spec, running)
        session.info.pop(_LOCATIONS, None)

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


def _is_connected(session: Session) -> bool:
    transaction = session.get_transaction()
    return transaction is not None and bool(transaction._connections)  # noqa: SLF001 - session.connection() would begin a transaction


def _lock_rows(session: Session, transaction: SessionTransaction, connection: sa.Connection) -> None:
    if engine_of(connection.dialect) is not None:
        # It has no locks of rows that a claim or a rescue would pass over.
        return
    isolation, spec, running = session.info[_CALL]
    level: Any = isolation.of(connection)
    # In a savepoint, also of a test's transaction that the session has joined, the level cannot change any more.
    if level not in _STRICT or transaction.nested or connection.in_nested_transaction():
        return
    if engine_of(connection.dialect) is not None:
        # Only in PostgreSQL do transactions fail because a row has been changed since their snapshot.
        return
    runs = running()
    if runs and connection.engine.pool is primary_bind(session, spec.mapper).engine.pool:
        session.info[_LOCATIONS] = _lock(connection, spec, level, runs)


def _lock(connection: sa.Connection, spec: QueueSpec, level: Any, runs: Sequence[Run]) -> list[str]:
    """Lock the rows of runs whose lease is held, in a snapshot that includes their last change.

    Their locations are read in a transaction of its own at READ COMMITTED.

    :return: the locations of the locked rows.
    """
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
    return sa.any_(sa.cast(sa.literal(locations, sa.ARRAY(sa.Text())), sa.ARRAY(_RowLocation()))) == _CTID


def _scan_tables(connection: sa.Connection, setting: str) -> None:
    connection.execute(sa.select(sa.func.set_config("enable_seqscan", setting, sa.true())))
