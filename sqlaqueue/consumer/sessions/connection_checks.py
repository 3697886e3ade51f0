"""Checks of the sessions, the engine and the pool that a Consumer is given; each error says what to give instead."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import sqlalchemy as sa
from sqlalchemy.orm import Session
from sqlalchemy.pool import AssertionPool, Pool, SingletonThreadPool, StaticPool

from sqlaqueue.consumer.sessions.isolation_level import SETTING, IsolationLevel
from sqlaqueue.exc import ConfigurationError
from sqlaqueue.queue.spec import QueueSpec
from sqlaqueue.sql.engine import engine_of
from sqlaqueue.sql.types import check_dialect
from sqlaqueue.write_routing import has_own_routing, primary_bind

_SHARED_CONNECTION_POOLS = (StaticPool, SingletonThreadPool, AssertionPool)


class PoolUser(Protocol):
    """A Consumer, as far as its engine's pool is concerned."""

    @property
    def connections(self) -> int:
        """The most connections it uses at once."""
        ...


def check_engine(session: Session, mapper: Any, who: str, spec: QueueSpec | None = None) -> sa.Engine:
    """Return the engine to which a session writes the rows of ``mapper``.

    :param who: the Consumer, as the errors name it.
    :param spec: its queue.
    :raises ConfigurationError: if the session is bound to one connection, the database is none that the library
        supports or lacks what the queue needs, or sessions of this engine share connections.
    """
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
    """Return the error for sessions that share one connection.

    :param source: what gives them the same connection: the engine or its pool.
    """
    return ConfigurationError(
        f"{who}: {source} does not give each session a connection of its own, so handlers would commit and roll back "
        "each other's work; make the engine without poolclass= and creator=, or with poolclass=NullPool"
    )


def check_two_phase(session: Session, model: str) -> None:
    """Refuse sessions with two-phase commits for a queue whose table sends notifications.

    :raises ConfigurationError: if ``session`` is one.
    """
    if session.twophase:
        msg = (
            f"{model}: PostgreSQL cannot prepare a transaction that has sent a notification, so a queue whose sessions "
            f"use two-phase commits must not send any; set {model}.__queue__ = QueueConfig(notify=False), and run a "
            "migration that drops its triggers"
        )
        raise ConfigurationError(msg)


def check_pool(pool: Pool, consumer: PoolUser, who: str) -> None:
    """Refuse a pool with fewer connections than one Consumer uses at once.

    :raises ConfigurationError: if the pool is too small.
    """
    needed, limit = consumer.connections, pool_limit(pool)
    if limit is not None and limit < needed:
        msg = (
            f"{who} needs {needed} connections, one per handler, one for its maintenance and, with schedules=, one for "
            f"them, and the engine's pool allows {limit}; use create_engine(..., pool_size={needed}) or lower "
            "concurrency"
        )
        raise ConfigurationError(msg)


def check_shared_pool(engine: sa.Engine, consumers: Sequence[PoolUser], who: str) -> None:
    """Refuse an engine whose pool has fewer connections than all Consumers that share it use at once.

    :raises ConfigurationError: if the pool is too small.
    """
    limit, needed = pool_limit(engine.pool), sum(consumer.connections for consumer in consumers)
    if limit is not None and limit < needed:
        msg = (
            f"{who} that share this engine ({', '.join(map(repr, consumers))}) need {needed} connections, and its pool "
            f"allows {limit}; use create_engine(..., pool_size={needed})"
        )
        raise ConfigurationError(msg)


def pool_limit(pool: Pool) -> int | None:
    """Return how many connections a pool allows at once; None if there is no limit."""
    size: Callable[[], int] | None = getattr(pool, "size", None)
    overflow = getattr(pool, "_max_overflow", None)
    return None if size is None or overflow is None or overflow < 0 else size() + overflow


def check_writable(session: Session, model: str, bind: dict[str, Any]) -> None:
    """Refuse a session class that routes even writes to a read-only server.

    A session without routing of its own is not checked: its server may be a standby that is about to be promoted.

    :param bind: the bind arguments of the queue.
    :raises ConfigurationError: if the server is read-only.
    """
    if has_own_routing(session):
        read_only = sa.func.current_setting("transaction_read_only")
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

    :raises ConfigurationError: if a Consumer cannot work with these sessions.
    """
    name, bind = spec.model.__name__, {"mapper": spec.mapper}
    check_writable(session, name, bind)
    asked = sa.select(sa.func.txid_current(), SETTING)
    first, second = (session.execute(asked, bind_arguments=bind).one() for _ in range(2))
    if first[0] != second[0]:
        msg = (
            f"the sessions for {name} commit each statement by itself (AUTOCOMMIT); a Consumer needs transactions: "
            "give it a sessionmaker of an engine with another isolation_level"
        )
        raise ConfigurationError(msg)
    session.rollback()
    _check_level(session, spec, isolation, first[1])


def _check_level(session: Session, spec: QueueSpec, isolation: IsolationLevel, level: str) -> None:
    """Store the default isolation level, and refuse a strict one that the Consumer cannot override."""
    isolation.default = level.upper()
    if not isolation.is_strict:
        return
    isolation.begin(session)
    kept = session.scalar(sa.select(SETTING), bind_arguments={"mapper": spec.mapper})
    session.rollback()
    if kept == level:
        msg = (
            f"the sessions for {spec.model.__name__} set the isolation level {level.upper()} within each transaction, "
            "but a Consumer claims and settles at READ COMMITTED; give the level to the engine "
            "(create_engine(..., isolation_level=...)), which a Consumer overrides for its own transactions"
        )
        raise ConfigurationError(msg)


def driver_connection(session: Session, bind: dict[str, Any]) -> Any:
    """Return the driver's connection that a session uses."""
    return session.connection(bind_arguments=dict(bind)).connection.driver_connection
