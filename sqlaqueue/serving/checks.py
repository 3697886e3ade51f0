"""What a Consumer finds out about its database before its first claim: plain functions ``operation(session, plan)``."""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa
from sqlalchemy.orm import Session

from sqlaqueue.exc import ConfigurationError
from sqlaqueue.log import fields, logger
from sqlaqueue.privileges import what_is_hidden, what_is_not_granted, what_policies_hide
from sqlaqueue.serving.plan import Plan
from sqlaqueue.serving.sessions import check_writable
from sqlaqueue.spec import QueueSpec
from sqlaqueue.versions import check_complete, what_is_apart, what_is_outdated


def check_transactions(session: Session, plan: Plan) -> None:
    """Refuse sessions in which every statement commits by itself.

    A held batch would be handed out to others at once, and nothing would commit or roll back together. Refuse those as
    well that route their writes to a read-only server.

    :raises ConfigurationError: saying which engine to change.
    """
    check_writable(session, plan.spec.model.__name__, plan.bind)
    number = sa.select(sa.func.txid_current())
    first, second = (session.scalar(number, bind_arguments=plan.bind) for _ in range(2))
    if first != second:
        msg = (
            f"the sessions for {plan.spec.model.__name__} commit each statement by itself (AUTOCOMMIT); a Consumer "
            "needs transactions: give it a sessionmaker of an engine with another isolation_level"
        )
        raise ConfigurationError(msg)


def check_database(session: Session, plan: Plan) -> bool:
    """Refuse a database that lacks what the queue needs, or a role that lacks rights; say what is of another version.

    :return: whether the queue's table tells idle consumers of new jobs.
    :raises ConfigurationError: naming what is missing, and what makes it or grants it.
    """
    # Asked by its connection: some of it names no mapped class, and a session may have several engines.
    connection = session.connection(bind_arguments=plan.bind)
    try:
        _check_there(connection, plan.spec)
        _check_rights(connection, plan.spec)
        outdated = what_is_outdated(connection, plan.spec)
    finally:
        session.rollback()
    if outdated is not None:
        extra = fields("objects_outdated", queue=plan.spec.name, worker=plan.worker())
        logger.warning("%s", outdated, extra=extra)
    return plan.is_told and outdated is None


def _check_there(connection: sa.Connection, spec: QueueSpec) -> None:
    name = spec.model.__name__
    _refuse(name, what_is_hidden(connection, spec))
    check_complete(connection, spec)
    apart = what_is_apart(connection, spec)
    if apart is not None:
        raise ConfigurationError(apart)


def _check_rights(connection: sa.Connection, spec: QueueSpec) -> None:
    name = spec.model.__name__
    _refuse(name, what_is_not_granted(connection, spec))
    policies = what_policies_hide(connection, spec)
    if policies:
        msg = (
            f"row-level security hides every row from the role of this Consumer of {name}; let the owner of the table "
            f"execute: {'; '.join(policies)}; or let a superuser give the role BYPASSRLS"
        )
        raise ConfigurationError(msg)


def _refuse(name: str, grants: Sequence[str]) -> None:
    if grants:
        msg = (
            f"the role of this Consumer of {name} may not do what its queue needs; let the owner of the tables "
            f"execute: {'; '.join(grants)}"
        )
        raise ConfigurationError(msg)
