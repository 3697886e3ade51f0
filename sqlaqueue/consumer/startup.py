"""The start of a run: checks of sessions, tables, triggers and privileges, and the log record of the start."""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa
from sqlalchemy.orm import Session

from sqlaqueue.consumer.context import ConsumerContext
from sqlaqueue.consumer.core.effects import Execute, ExecuteInOwnSession, Routine, WithSession
from sqlaqueue.consumer.errors import is_database_error, may_be_of_a_row
from sqlaqueue.consumer.sessions import check_transactions, driver_connection, shared_connection_error
from sqlaqueue.exc import ConfigurationError, DatabaseNotReadyError
from sqlaqueue.log import database_text, fields, logger
from sqlaqueue.postgresql.checks_of import checks_of
from sqlaqueue.queue.spec import QueueSpec
from sqlaqueue.sql.engine import engine_of


def check(context: ConsumerContext) -> Routine:
    """Check sessions and database, unless a claim has worked before."""
    if context.has_claimed:
        return
    try:
        yield WithSession(_check_connections(context))
        yield ExecuteInOwnSession(check_transactions, (context.spec, context.isolation))
    except Exception as error:
        if not is_database_error(error):
            # No session has worked yet, and the error is not the database's.
            context.fail(error)
        raise
    notified = yield ExecuteInOwnSession(check_database, (context,))
    log_started(context, notified=notified)
    if notified and not context.draining and not context.polls.peers.subscribed:
        context.runner.listen()


def _check_connections(context: ConsumerContext) -> Routine:
    """Refuse sessions that share a connection, whatever the engine's pool is called."""
    bind = context.settings.bind_arguments
    own = yield Execute(driver_connection, (bind,))
    other = yield ExecuteInOwnSession(driver_connection, (bind,))
    if own is other:
        raise shared_connection_error(context.name, "the engine")


def check_database(session: Session, context: ConsumerContext) -> bool:
    """Refuse a database that lacks objects or privileges of the queue; log outdated objects and missing indexes.

    :return: whether the table sends notifications.
    :raises DatabaseNotReadyError: if something is missing; the message names the fix.
    """
    # By the connection, as some statements name no mapped class, and a session may have several engines.
    connection = session.connection(bind_arguments=context.settings.bind_arguments)
    distribution = context.settings.distribution
    try:
        if distribution is not None:
            distribution.check(context.spec.mapper.columns[distribution.attribute])
        hidden = check_ready(connection, context.settings.spec_of_shard)
        _check_name(connection, context)
        outdated = checks_of(connection).outdated_triggers(connection, context.spec)
        old = checks_of(connection).outdated_functions(connection, context.spec)
        slow = checks_of(connection).missing_index_advice(connection, context.spec)
    finally:
        session.rollback()
    names = {"queue": context.spec.name, "worker": context.settings.worker()}
    if hidden is not None:
        logger.warning("%s", hidden, extra=fields("rows_hidden", **names))
    if outdated is not None:
        logger.warning("%s", outdated, extra=fields("triggers_outdated", **names))
    if old is not None:
        logger.warning("%s", old, extra=fields("functions_outdated", **names))
    if slow is not None:
        logger.warning("%s", slow, extra=fields("indexes_missing", **names))
    return context.settings.notifies and outdated is None and engine_of(connection.dialect) is None


def _check_name(connection: sa.Connection, context: ConsumerContext) -> None:
    """Refuse a name that the database cannot store in its encoding, as each claim would fail.

    :raises ConfigurationError: if it is one.
    """
    name = context.settings.worker()
    if name.isascii():
        return
    try:
        connection.execute(sa.select(sa.literal(name, sa.Text())))
    except Exception as error:
        if not may_be_of_a_row(error):
            raise
        msg = f"{context.name}: the database cannot store the name {name!r}, by its encoding; give name= in ASCII"
        raise ConfigurationError(msg) from error


def check_ready(connection: sa.Connection, spec: QueueSpec) -> str | None:
    """Refuse a database that lacks tables, triggers, functions or privileges of the queue.

    :return: a warning if row-level security hides every row of the queue.
    :raises ConfigurationError: if it cannot carry an option of the queue.
    :raises DatabaseNotReadyError: if something is missing; the message names the fix.
    """
    other = engine_of(connection.dialect)
    if other is not None:
        other.check_supported(spec)
    _check_objects(connection, spec)
    return _check_privileges(connection, spec)


def _check_objects(connection: sa.Connection, spec: QueueSpec) -> None:
    name = spec.model.__name__
    _refuse(name, checks_of(connection).missing_schema_grants(connection, spec))
    checks_of(connection).check_complete(connection, spec)
    apart = checks_of(connection).split_schemas(connection, spec)
    if apart is not None:
        raise DatabaseNotReadyError(apart)


def _check_privileges(connection: sa.Connection, spec: QueueSpec) -> str | None:
    name = spec.model.__name__
    _refuse(name, checks_of(connection).missing_grants(connection, spec))
    policies, hidden = checks_of(connection).row_security(connection, spec)
    if policies:
        msg = (
            f"row-level security hides every row from the role of this Consumer of {name}; let the owner of the table "
            f"execute: {'; '.join(policies)}; or let a superuser give the role BYPASSRLS"
        )
        raise DatabaseNotReadyError(msg)
    return hidden


def _refuse(name: str, grants: Sequence[str]) -> None:
    if grants:
        msg = (
            f"the role of this Consumer of {name} lacks privileges that its queue needs; let the owner of the tables "
            f"execute: {'; '.join(grants)}"
        )
        raise DatabaseNotReadyError(msg)


def log_started(context: ConsumerContext, *, notified: bool) -> None:
    """Log once which queue is served, its database, the concurrency, and how new jobs are found.

    :param notified: whether the table in the database sends notifications.
    """
    if context.start_logged:
        return
    context.start_logged = True
    settings, where = context.settings, database_text(context.engine)
    worker_kind = "task" if context.runner.can_interrupt else "thread"
    poll = f"polling every {settings.poll_interval:g} s"
    mode = "draining" if context.draining else "listening" if notified else "polling"
    how = {"draining": "until no job is due", "listening": f"listening for notifications, {poll}", "polling": poll}
    strategy = context.spec.strategy.name
    logger.info(
        "queue %s: started, %s, serves %s with %d worker %s%s, %s",
        context.spec.name,
        strategy,
        where,
        settings.concurrency,
        worker_kind,
        "" if settings.concurrency == 1 else "s",
        how[mode],
        extra=context.log_fields(
            "consumer_started",
            strategy=strategy,
            database=where,
            concurrency=settings.concurrency,
            mode=mode,
        ),
    )
