"""Examine queues: :func:`doctor` runs all checks, each in a savepoint, and returns what they find."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from sqlaqueue.admin.doctor import engines, server, service, vacuum
from sqlaqueue.admin.doctor.examination import SEVERITIES, Check, Examination, Finding, Thresholds
from sqlaqueue.consumer import pace
from sqlaqueue.consumer.core.waker import Deadlines
from sqlaqueue.exc import StatementError
from sqlaqueue.log import fields, logger
from sqlaqueue.postgresql.server import read_only
from sqlaqueue.queue.spec import QueueSpec
from sqlaqueue.sessions import check_session, routing_to_primary
from sqlaqueue.sql.engine import OtherEngine, sqlstate
from sqlaqueue.sql.types import check_dialect
from sqlaqueue.statements.selection import select_jobs

COMPLETE: tuple[Check, ...] = (server.check_schemas, server.check_tables)
"""The checks without which no other makes sense; a queue for which they find something is not examined further."""

CHEAP: tuple[Check, ...] = (
    server.check_server,
    vacuum.check_horizon,
    vacuum.check_autovacuum,
    vacuum.check_table_statistics,
    vacuum.check_keys,
    vacuum.check_notification_queue,
    server.check_defaults,
    server.check_refused_states,
    server.check_indexes,
    server.check_triggers,
    server.check_functions,
)
"""The checks that take next to no time, and do not depend on the role."""

CHECKS: tuple[Check, ...] = (
    server.check_blocked_tables,
    *CHEAP,
    server.check_altered_objects,
    server.check_durability,
    server.check_lock_table,
    server.check_clock,
    server.check_server_connections,
    server.check_pool,
    server.check_pooler,
    server.check_claim_indexes,
    vacuum.check_status_statistics,
    server.check_privileges,
    service.check_claim_plan,
    service.check_leases,
    service.check_table_versions,
    service.check_consumers,
    service.check_due_jobs,
    service.check_leftovers,
    service.check_messages,
    service.check_waiting,
    service.check_status_values,
    service.check_schedules,
)
"""All others, in the order in which they run."""

_OF_SERVICE: tuple[Check, ...] = (
    service.check_leases,
    service.check_table_versions,
    service.check_consumers,
    service.check_due_jobs,
    service.check_leftovers,
    service.check_status_values,
    service.check_schedules,
)
_OF_SQLITE: tuple[Check, ...] = (
    engines.check_journal_mode,
    engines.check_write_ahead_log,
    engines.check_file_settings,
)
_OF_MARIADB: tuple[Check, ...] = (engines.check_storage, engines.check_server_settings)

COMPLETE_OF_OTHERS: tuple[Check, ...] = (engines.check_missing_tables,)
"""What :data:`COMPLETE` is for PostgreSQL."""

CHEAP_OF_OTHERS: Mapping[str, tuple[Check, ...]] = {
    "sqlite": (engines.check_missing_indexes, *_OF_SQLITE),
    "mariadb": (engines.check_missing_indexes, *_OF_MARIADB),
}
"""What :data:`CHEAP` is for PostgreSQL, by the name of the dialect."""

CHECKS_OF_OTHERS: dict[str, tuple[Check, ...]] = {
    "sqlite": (*CHEAP_OF_OTHERS["sqlite"], server.check_pool, engines.check_claim_search, *_OF_SERVICE),
    "mariadb": (
        *CHEAP_OF_OTHERS["mariadb"],
        engines.check_history,
        engines.check_connections,
        server.check_clock,
        server.check_pool,
        engines.check_claim_search,
        *_OF_SERVICE,
    ),
}
"""What :data:`CHECKS` is for PostgreSQL, by the name of the dialect."""

ChecksOf = Callable[[OtherEngine | None], Sequence[Check]]
"""Returns the checks of an examination for an engine, None for PostgreSQL; the complete ones come first."""


def all_checks(other: OtherEngine | None) -> Sequence[Check]:
    if other is None:
        return (*COMPLETE, *CHECKS)
    return (*COMPLETE_OF_OTHERS, *CHECKS_OF_OTHERS[_kind(other)])


def cheap_checks(other: OtherEngine | None) -> Sequence[Check]:
    """Return the checks that take next to no time."""
    if other is None:
        return (*COMPLETE, *CHEAP)
    return (*COMPLETE_OF_OTHERS, *CHEAP_OF_OTHERS[_kind(other)])


def _kind(other: OtherEngine) -> str:
    # The dialect of MariaDB may be named mysql as well.
    return "sqlite" if other.name == "sqlite" else "mariadb"


DEFAULTS = Thresholds()
_STATEMENTS = 10
"""How many statements of a check may take as long as they may."""

_NO_TRANSACTION = "25P01"


def doctor(
    session: Session, *models: type[Any], deep: bool = False, thresholds: Thresholds = DEFAULTS
) -> list[Finding]:
    """Return what is wrong with some queues and their server, the worst first; an empty list if nothing is.

    ::

        for finding in doctor(session, Email, Invoice):
            print(finding.severity, finding.code, finding.summary)

    With an AsyncSession: ``await session.run_sync(doctor, Email, Invoice)``. It changes nothing: each statement is
    executed in a read-only transaction with a timeout, and what it has set is reset at the end. A transaction of the
    session stays open, as after a SELECT. On SQLite and MariaDB it makes the checks that mean something there.

    :param models: the queue classes.
    :param deep: whether to read all jobs and messages as well, which takes long for a large table.
    :param thresholds: from which values on something is a finding.
    :raises NotAQueueError: if a class is not a queue.
    :raises ConfigurationError: if an engine is not prepared, and for anything but a Session.
    :raises StatementError: if no class is given, or the session's connection is in autocommit mode.
    """
    check_session(session, "doctor", is_async=False)
    return examine(session, models, all_checks, deep=deep, thresholds=thresholds)


def examine(
    session: Session,
    models: Sequence[type[Any]],
    checks: ChecksOf,
    *,
    deep: bool = False,
    thresholds: Thresholds = DEFAULTS,
) -> list[Finding]:
    """Return what some checks find, the worst first."""
    specs = list(dict.fromkeys(select_jobs(model, "doctor").spec for model in models))
    if not specs:
        raise StatementError("doctor(): name at least one queue class, as in doctor(session, Email)")
    for spec in specs:
        check_dialect(session.get_bind(spec.mapper).dialect, "doctor()", "the engine of the session")
    found: list[Finding] = []
    # The server cancels what takes too long; without any reply the connection is silent, and is given up.
    longest = max(pace.LONGEST_WAIT, _STATEMENTS * thresholds.statement_timeout.total_seconds())
    # Rows of a replica may be old, and its catalogs say nothing of the primary's transactions.
    with (
        routing_to_primary(session),
        Deadlines(longest, "doctor()").watched() as deadlines,
        deadlines.limit(session) as wait,
    ):
        groups: dict[Any, list[QueueSpec]] = {}
        for spec in specs:
            groups.setdefault(session.get_bind(spec.mapper), []).append(spec)
        for group in groups.values():
            connection = session.connection(bind_arguments={"mapper": group[0].mapper})
            examination = Examination(connection, group, thresholds, deep)
            found += _examine(examination, checks(examination.other), wait.restart)
    return sorted(found, key=lambda finding: (SEVERITIES.index(finding.severity), finding.queue or ""))


def _examine(examination: Examination, checks: Iterable[Check], progressed: Callable[[], object]) -> list[Finding]:
    found: list[Finding] = []
    with _limited(examination):
        for check in checks:
            progressed()
            found += _run(check, examination)
            if check in COMPLETE or check in COMPLETE_OF_OTHERS:
                incomplete = {finding.queue for finding in found}
                rest = [spec for spec in examination.specs if spec.name not in incomplete]
                examination = replace(examination, specs=rest)
    # A check that was repeated for each queue may have found the same of the server each time.
    return list({(each.code, each.queue, each.summary): each for each in found}.values())


@contextmanager
def _limited(examination: Examination) -> Iterator[None]:
    """Limit what the statements of the block may do, and how long they may take."""
    if examination.other is not None:
        with engines.careful(examination):
            yield
        return
    connection, limits = examination.connection, examination.thresholds
    # Rolling the savepoint back resets the settings as well.
    with _savepoint(connection):
        read_only(
            connection,
            statement_timeout=_milliseconds(limits.statement_timeout),
            lock_timeout=_milliseconds(limits.lock_timeout),
        )
        yield


def _run(check: Check, examination: Examination) -> list[Finding]:
    """Return what a check finds; if it fails, what it finds for each queue by itself."""
    try:
        # The others go on with the transaction after an error; and a savepoint could lock a file of SQLite.
        with _savepoint(examination.connection) if examination.other is None else nullcontext():
            return list(check(examination))
    except Exception as error:
        connection = examination.connection
        # Not `error.connection_invalidated`: a check may have opened a connection of its own.
        if connection.invalidated or connection.closed:
            raise
        logger.debug("doctor: %s has failed", check.__name__, exc_info=True, extra=fields("doctor_failed"))
        failed = _failed(check, examination, error)
    if len(examination.specs) <= 1:
        return [failed]
    alone = [_run(check, replace(examination, specs=[spec])) for spec in examination.specs]
    # Something about the server fails for each queue.
    is_general = all([one.summary for one in found] == [failed.summary] for found in alone)
    return [failed] if is_general else [one for found in alone for one in found]


def _failed(check: Check, examination: Examination, error: Exception) -> Finding:
    name = check.__name__.removeprefix("check_").replace("_", " ")
    if isinstance(error, DBAPIError):
        # Drivers whose errors have a number give it before the text.
        text = error.orig if examination.other is None or error.orig is None else error.orig.args[-1]
        reason, state = str(text).strip().partition("\n")[0], sqlstate(error)
    else:
        reason, state = f"{type(error).__name__}: {error}".partition("\n")[0].removesuffix(": "), None
    return Finding(
        severity="notice",
        code="check_failed",
        queue=examination.specs[0].name if len(examination.specs) == 1 else None,
        summary=f"The check of {name} could not be made: {reason.removesuffix('.')}.",
        consequence="It is unknown whether what it looks for is wrong.",
        facts={"check": name, "sqlstate": state},
    )


@contextmanager
def _savepoint(connection: sa.Connection) -> Iterator[None]:
    """Roll back to where the block began, whatever happens in it; this releases its locks as well."""
    try:
        # Not Session.begin_nested(), which flushes.
        savepoint = connection.begin_nested()
    except DBAPIError as error:
        if sqlstate(error) != _NO_TRANSACTION:
            raise
        msg = "doctor(): the connection is in autocommit mode; give a session whose statements run in transactions"
        raise StatementError(msg) from error
    try:
        yield
    finally:
        if savepoint.is_active:
            savepoint.rollback()


def _milliseconds(timeout: timedelta) -> str:
    # Zero would be no limit.
    return str(max(1, round(timeout.total_seconds() * 1000)))
