"""Examine queues: :func:`doctor` runs all checks, each in a savepoint, and returns what they find."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from sqlaqueue.admin.diagnosis.checks import claim_plan, leases, messages, objects, rights, schedules, service
from sqlaqueue.admin.diagnosis.examination import Check, Examination
from sqlaqueue.admin.diagnosis.finding import SEVERITIES, Finding
from sqlaqueue.admin.diagnosis.thresholds import Thresholds
from sqlaqueue.admin.session_checks import requires_session
from sqlaqueue.exc import StatementError
from sqlaqueue.queue.backend import backend
from sqlaqueue.queue.spec import QueueSpec
from sqlaqueue.statements.selection import select_jobs
from sqlaqueue.write_routing import routing_to_primary

COMPLETE: tuple[Check, ...] = (rights.schemas, objects.tables)
"""The checks without which no other makes sense; a queue for which they find something is not examined further."""

CHEAP: tuple[Check, ...] = (objects.indexes, objects.triggers, objects.functions)
"""The checks that read catalogs and statistics only, whatever the role."""

CHECKS: tuple[Check, ...] = (
    *CHEAP,
    rights.privileges,
    claim_plan.claim_plan,
    leases.leases,
    service.consumers,
    service.due_jobs,
    service.leftovers,
    messages.messages,
    messages.status_values,
    schedules.schedules,
)
"""The other checks, in the order in which they run."""

_NO_TRANSACTION = "25P01"


@requires_session
def doctor(
    session: Session, *models: type[Any], deep: bool = False, thresholds: Thresholds | None = None
) -> list[Finding]:
    """Return what is wrong with some queues and their server, the worst first; an empty list if nothing is.

    It changes nothing: each statement is executed in a read-only transaction with a timeout, and what it has set is
    reset at the end. A transaction of the session stays open, as after a SELECT.

    :param models: the queue classes.
    :param deep: whether to read all jobs and messages as well, which takes long for a large table.
    :param thresholds: from which values on something is a finding.
    :raises NotAQueueError: if a class is not a queue.
    :raises StatementError: if no class is given, or the session's connection is in autocommit mode.
    """
    return examine(session, models, (*COMPLETE, *CHECKS), deep=deep, thresholds=thresholds)


def examine(
    session: Session,
    models: Sequence[type[Any]],
    checks: Sequence[Check],
    *,
    deep: bool = False,
    thresholds: Thresholds | None = None,
) -> list[Finding]:
    """Return what some checks find, the worst first.

    :param checks: they begin with those in :data:`COMPLETE`.
    """
    specs = list(dict.fromkeys(select_jobs(model, "doctor").spec for model in models))
    if not specs:
        raise StatementError("doctor(): name at least one queue class, as in doctor(session, Email)")
    found: list[Finding] = []
    # Rows of a replica may be old, and its catalogs say nothing of the primary's transactions.
    with routing_to_primary(session):
        groups: dict[Any, list[QueueSpec]] = {}
        for spec in specs:
            groups.setdefault(session.get_bind(spec.mapper), []).append(spec)
        for group in groups.values():
            connection = session.connection(bind_arguments={"mapper": group[0].mapper})
            found += _examine(Examination(connection, group, thresholds or Thresholds(), deep), checks)
    return sorted(found, key=lambda finding: (SEVERITIES.index(finding.severity), finding.queue or ""))


def _examine(examination: Examination, checks: Iterable[Check]) -> list[Finding]:
    connection, limits = examination.connection, examination.thresholds
    found: list[Finding] = []
    # Rolling the savepoint back resets the settings as well.
    with _savepoint(connection):
        backend().diagnosis.read_only(
            connection,
            statement_timeout=_milliseconds(limits.statement_timeout.total_seconds()),
            lock_timeout=_milliseconds(limits.lock_timeout.total_seconds()),
        )
        for check in checks:
            found += _run(check, examination)
            if check in COMPLETE:
                incomplete = {finding.queue for finding in found}
                rest = [spec for spec in examination.specs if spec.name not in incomplete]
                examination = replace(examination, specs=rest)
    # A check that was repeated for each queue may have found the same of the server each time.
    return list({(each.code, each.queue, each.summary): each for each in found}.values())


def _run(check: Check, examination: Examination) -> list[Finding]:
    """Return what a check finds; if it fails, what it finds for each queue by itself."""
    if not examination.specs:
        return []
    try:
        with _savepoint(examination.connection):
            return list(check(examination))
    except DBAPIError as error:
        # Without an SQLSTATE the connection is gone.
        if error.connection_invalidated or backend().sqlstate(error) is None:
            raise
        if len(examination.specs) > 1:
            return [one for spec in examination.specs for one in _run(check, replace(examination, specs=[spec]))]
        return [_failed(check, examination.specs[0], error)]


def _failed(check: Check, spec: QueueSpec, error: DBAPIError) -> Finding:
    module = check.__module__.rpartition(".")[2].split("_")
    name = " ".join(dict.fromkeys([*module, *check.__name__.split("_")]))
    reason = str(error.orig).strip().splitlines()[0]
    return Finding(
        severity="notice",
        code="check_failed",
        queue=spec.name,
        summary=f"The check {name!r} could not be made: {reason}.",
        consequence="What it looks for may be wrong or not.",
        facts={"check": name, "sqlstate": backend().sqlstate(error)},
    )


class _savepoint:  # noqa: N801 - used as a function
    """Roll back to where the block began, whatever happens in it."""

    def __init__(self, connection: sa.Connection) -> None:
        self._connection = connection

    def __enter__(self) -> None:
        try:
            # Not Session.begin_nested(), which flushes.
            self._savepoint = self._connection.begin_nested()
        except DBAPIError as error:
            if backend().sqlstate(error) != _NO_TRANSACTION:
                raise
            msg = "doctor(): the connection is in autocommit mode; give a session whose statements run in transactions"
            raise StatementError(msg) from error

    def __exit__(self, *_: object) -> None:
        if self._savepoint.is_active:
            self._savepoint.rollback()


def _milliseconds(seconds: float) -> str:
    # Zero would be no limit.
    return str(max(1, round(seconds * 1000)))
