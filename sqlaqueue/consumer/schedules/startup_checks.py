"""Checks of the database before schedules are fired."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import Session

from sqlaqueue.exc import ConfigurationError, DatabaseNotReadyError
from sqlaqueue.postgresql.checks_of import checks_of
from sqlaqueue.queue.strategy_protocol import RequiredPrivilege
from sqlaqueue.schedules.schedule import ScheduleGroup
from sqlaqueue.write_routing import primary_bind


def check_tables(session: Session, group: ScheduleGroup) -> tuple[sa.Engine, str | None]:
    """Refuse a database that lacks the tables of schedules, or privileges on them and on the tables of jobs.

    :return: the engine, and what is wrong with the trigger that announces changes; None if nothing is.
    :raises ConfigurationError: naming the fix.
    """
    tables, connection = group.tables, session.connection(bind_arguments=group.bind)
    checks = checks_of(connection)
    try:
        engine, *others = {primary_bind(session, spec.mapper).engine for spec in group.specs}
        if others:
            names = ", ".join(spec.model.__name__ for spec in group.specs)
            msg = f"the schedules of {names} share their tables, but the sessions use several engines for them"
            raise ConfigurationError(msg)
        checks.check_tables(connection, [tables.schedules, tables.ticks], "a process that fires schedules")
        required = list(_required_privileges(group))
        grants = checks.grants_for(connection, required) or checks.policies_for(connection, required)
        if grants:
            msg = (
                "the role of this process lacks privileges that it needs to fire schedules; let the owner of the "
                f"tables execute: {'; '.join(grants)}"
            )
            raise DatabaseNotReadyError(msg)
        return engine, checks.outdated_triggers_of(connection, tables.schedules, "Schedule")
    finally:
        session.rollback()


def _required_privileges(group: ScheduleGroup) -> Sequence[RequiredPrivilege]:
    schedules, ticks = group.tables.schedules, group.tables.ticks
    jobs: list[Any] = [table for spec in group.specs for table in spec.mapper.tables]
    return [
        *(RequiredPrivilege(each, schedules, list(schedules.c)) for each in ("SELECT", "INSERT", "UPDATE")),
        *(RequiredPrivilege(each, ticks) for each in ("SELECT", "INSERT", "DELETE")),
        *(RequiredPrivilege("SELECT", table, _read(group, table)) for table in dict.fromkeys(jobs)),
        *(
            RequiredPrivilege("INSERT", table, list(table.c), generated=_generated(table))
            for table in dict.fromkeys(jobs)
        ),
    ]


def _read(group: ScheduleGroup, table: sa.Table) -> list[sa.Column[Any]]:
    """Return the columns that an INSERT returns to the ORM, and those that say whether a job is finished."""
    states = {spec.columns["status"] for spec in group.specs if spec.has("status")}
    return [column for column in table.c if column.primary_key or column.server_default is not None or column in states]


def _generated(table: sa.Table) -> list[sa.Column[Any]]:
    column = table.autoincrement_column
    return [] if column is None else [column]
