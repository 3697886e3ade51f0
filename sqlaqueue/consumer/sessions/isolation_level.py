"""Which isolation level a Consumer's transactions have, and what those of its handlers need at a strict one.

A Consumer works at READ COMMITTED, whatever the default of the database or the engine is: it changes rows that others
change as well, so a transaction with a snapshot of its own would fail again and again. Handlers under a lease keep the
default, and may choose another level. From REPEATABLE READ on, a transaction cannot change a row that another one has
changed since its snapshot, and every heartbeat changes the row of the job. So such a transaction begins by locking that
row: heartbeats and rescues pass over locked rows.

At SERIALIZABLE the row is found by its place, for a search by its key would look to the server as if it
depended on all that is written to the same pages of the index: handlers that run at the same time would be a conflict.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, cast

import sqlalchemy as sa
from sqlalchemy import event, exc
from sqlalchemy.orm import Session, SessionTransaction
from sqlalchemy.types import UserDefinedType

from sqlaqueue.consumer.core.transient_errors import is_conflict
from sqlaqueue.consumer.sessions.write_routing import primary_bind, routing_to_primary
from sqlaqueue.consumer.settings import Plan
from sqlaqueue.keys import Key, keys_by_token, keys_from
from sqlaqueue.queue.run import Run
from sqlaqueue.statements.returning import returning_keys
from sqlaqueue.strategies import ClaimedJobs, Settlement

READ_COMMITTED: Final = "READ COMMITTED"
SETTING = sa.func.current_setting("transaction_isolation", type_=sa.Text())
"""The level that a transaction has, as the server says."""

_STRICT = {"REPEATABLE READ", "SERIALIZABLE"}
_CALL, _PLACES = "sqlaqueue_call", "sqlaqueue_places"
_QUIET = {"synchronize_session": False}
_TRIES = 20
"""How often a row that somebody changes at the same time is locked anew; a heartbeat comes a few times a minute."""


class _Place(UserDefinedType[str]):
    """Where a row is in its table."""

    cache_ok = True

    def get_col_spec(self, **_: Any) -> str:
        return "tid"


_PLACE = sa.literal_column("ctid", _Place())


def is_strict(plan: Plan) -> bool:
    """Return whether the sessions' transactions have a strict level by default."""
    return plan.level in _STRICT


def begin_read_committed(session: Session, plan: Plan) -> None:
    """Begin a transaction of the Consumer's own.

    The driver puts the level into its BEGIN, so this is no statement, and nothing at all where the default suits.
    """
    if is_strict(plan) and not _is_connected(session):
        options = {"isolation_level": READ_COMMITTED}
        with routing_to_primary(session):
            session.connection(bind_arguments=plan.bind, execution_options=options)


def run_read_committed(session: Session, plan: Plan, operation: Callable[[Session], Any]) -> Any:
    """Carry out an operation in a transaction of the Consumer's own."""
    begin_read_committed(session, plan)
    return operation(session)


def _is_connected(session: Session) -> bool:
    transaction = session.get_transaction()
    return transaction is not None and bool(transaction._connections)  # noqa: SLF001 - asking by session.connection() would begin one


def _asked_for(connection: sa.Connection, plan: Plan) -> str | None:
    level = connection.get_execution_options().get("isolation_level")
    return plan.level if level is None else str(level).upper().replace("_", " ")


def lock_rows_on_begin(session: Session, plan: Plan, running: Callable[[], Sequence[Run]]) -> None:
    """Have the rows of jobs locked when their handler begins a transaction at a strict level.

    :param running: returns the runs for which the handler is called, as long as it is.
    """
    if _CALL not in session.info:
        event.listen(session, "after_begin", _lock_rows)
    session.info[_CALL] = (plan, running)
    session.info.pop(_PLACES, None)


def _lock_rows(session: Session, transaction: SessionTransaction, connection: sa.Connection) -> None:
    plan, running = session.info[_CALL]
    level: Any = _asked_for(connection, plan)
    if level not in _STRICT or transaction.nested:
        return
    runs = running()
    if runs and connection.engine.pool is primary_bind(session, plan.spec.mapper).engine.pool:
        session.info[_PLACES] = _lock(connection, plan, level, runs)


def _lock(connection: sa.Connection, plan: Plan, level: Any, runs: Sequence[Run]) -> list[str]:
    """Lock the rows of runs that are still held, in a snapshot that is not older than they are.

    Where they are is read in a transaction of its own.

    :return: the places of these rows.
    """
    spec, dialect = plan.spec, connection.dialect
    driver: Any = connection.connection.dbapi_connection
    mine = spec.strategy.fence(spec, ClaimedJobs(list(keys_by_token(runs).items())))
    seqscan = sa.func.current_setting("enable_seqscan", type_=sa.Text())
    where = sa.select(sa.cast(_PLACE, sa.Text()), seqscan).select_from(spec.table).where(mine)
    for _ in range(_TRIES):
        dialect.set_isolation_level(driver, READ_COMMITTED)
        found = connection.execute(where).all()
        dialect.do_rollback(driver)
        dialect.set_isolation_level(driver, cast("Any", level))
        if not found:
            # The lease is lost, as the end of the run will say.
            break
        places = [row[0] for row in found]
        locking = sa.select(sa.literal(1)).select_from(spec.table).where(_is_at(places), mine)
        try:
            _scan_tables(connection, "off")
            locked = connection.execute(locking.with_for_update(of=spec.table, key_share=True)).all()
            _scan_tables(connection, found[0][1])
        except exc.DBAPIError as error:
            if not is_conflict(error):
                raise
        else:
            if len(locked) == len(found):
                return places
        dialect.do_rollback(driver)
    return []


def _is_at(places: Sequence[str]) -> sa.ColumnElement[bool]:
    return sa.any_(sa.cast(sa.literal(places, sa.ARRAY(sa.Text())), sa.ARRAY(_Place()))) == _PLACE


def _scan_tables(connection: sa.Connection, setting: str) -> None:
    connection.execute(sa.select(sa.func.set_config("enable_seqscan", setting, sa.true())))


def complete_in_place(session: Session, plan: Plan, claims: Mapping[Any, Sequence[Key]]) -> list[Key]:
    """End runs with success in a handler's transaction that is SERIALIZABLE.

    :return: the keys of those that it has ended: none in other transactions, nor where a handler has written the row of
        its job, which is elsewhere now.
    """
    places = session.info.pop(_PLACES, None)
    if not places:
        return []
    spec, connection = plan.spec, session.connection(bind_arguments=plan.bind)
    verb = spec.strategy.settle(spec, ClaimedJobs(list(claims.items())), Settlement("completed"))
    if _asked_for(connection, plan) != "SERIALIZABLE" or not isinstance(verb, sa.Update | sa.Delete):
        return []
    # A small table would be read from end to end, which conflicts with all that others do to it.
    _scan_tables(connection, "off")
    ended = session.execute(returning_keys(spec, verb.where(_is_at(places))), execution_options=_QUIET).scalars().all()
    return keys_from(ended, len(spec.keys))
