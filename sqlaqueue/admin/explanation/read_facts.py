"""Read the facts about one job, by few statements that change nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from sqlaqueue._typing import AnySelect
from sqlaqueue.admin.explanation.facts import MOST_COUNTED, Facts, LiveConsumer, unclaimable_jobs
from sqlaqueue.admin.job_listing import JobInfo, job_info
from sqlaqueue.flow_control.held_back import held_back_by
from sqlaqueue.postgresql.due_times import written_here
from sqlaqueue.postgresql.side_tables import PAUSE
from sqlaqueue.queue.names import CONSUMERS, CONTROL, CRASH_JOURNAL
from sqlaqueue.queue.options import FINISHED
from sqlaqueue.queue.run import Key, key_text
from sqlaqueue.queue.spec import QueueSpec, clock, within_calendar
from sqlaqueue.sql.errors import sqlstate
from sqlaqueue.statements.selection import select_jobs
from sqlaqueue.statements.verbs import consumers
from sqlaqueue.strategies.delete_returning import MessageStrategy, MessageTable
from sqlaqueue.strategies.twins import UniqueKey, unique_key
from sqlaqueue.strategies.update_status import waits_for_twin

_MAY_NOT_LOCK = {"42501", "25006", "25P01", "40001"}
"""The SQLSTATEs of a missing privilege, of a read-only transaction, of autocommit, in which there is no savepoint, and
of a snapshot that is older than the row."""


def read_facts(session: Session, model: type[Any], key: Any, *, claimed_here: bool = False) -> Facts:
    """Return what is known about the job with this key.

    :param key: a value, a tuple for a composite key, or a text.
    :param claimed_here: whether the session's transaction holds the job.
    """
    spec = select_jobs(model, "explain_job").spec
    info = job_info(session, model, key)
    if info is None:
        return Facts(spec=spec, key=key, info=None, claimed_here=claimed_here)
    facts = Facts(spec=spec, key=info.key, info=info, claimed_here=claimed_here)
    if info.state in FINISHED:
        return replace(facts, twin=twin_of(session, spec, info.key)) if spec.has("status") else facts
    facts = replace(facts, row=_row(session, spec, info.key))
    circumstances = session.execute(_circumstances(spec, info.key), bind_arguments=_bind(spec)).mappings().first()
    if circumstances is None:
        # It was deleted after the first statement.
        return replace(facts, info=None)
    facts = replace(facts, **circumstances, consumers=_consumers(session, spec))
    if facts.waits_for_twin:
        facts = replace(facts, twin=twin_of(session, spec, info.key))
    return _read_place(session, facts, info) if info.state == "pending" else facts


def _row(session: Session, spec: QueueSpec, key: Key) -> dict[str, Any]:
    """Return the values of the columns that reasons are made of; the others may be large."""
    kinds = [spec.columns.get("status"), spec.mapper.polymorphic_on]
    needed = [*spec.claim_order, *(each for each in kinds if isinstance(each, sa.Column) and each.table is spec.table)]
    columns = list(dict.fromkeys(needed))
    shown = [_readable(each) for each in columns]
    row = session.execute(sa.select(*shown).where(spec.key_in(spec.keys, [key])), bind_arguments=_bind(spec)).first()
    return {} if row is None else {column.name: value for column, value in zip(columns, row, strict=True)}


def _readable(column: sa.Column[Any]) -> sa.ColumnElement[Any]:
    is_moment = isinstance(column.type, sa.DateTime) and column.type.timezone
    return within_calendar(column) if is_moment else column


def _read_place(session: Session, facts: Facts, info: JobInfo) -> Facts:
    """Add whether a pending job is locked, and how many jobs are before it."""
    spec, messages = facts.spec, messages_of(facts.spec)
    if messages is None:
        order: Sequence[sa.Column[Any]] = spec.claim_order
        place: Sequence[Any] | None = [facts.row[column.name] for column in order]
    else:
        order = messages.order
        place = session.execute(_first_message(spec, messages, info.key), bind_arguments=_bind(spec)).first()
    facts = replace(facts, locked=_is_locked(session, spec, info.key, messages), has_message=place is not None)
    if place is None or not facts.may_be_claimed:
        return facts
    facts = replace(facts, held_back=[*held_back_by(session, spec, info.key)])
    before = session.scalar(_jobs_before(spec, messages, order, list(place)), bind_arguments=_bind(spec))
    return replace(facts, before=before or 0)


def messages_of(spec: QueueSpec) -> MessageTable | None:
    """Return the message table of a queue; None if its claims do not use one."""
    return spec.strategy.messages(spec) if isinstance(spec.strategy, MessageStrategy) else None


def _bind(spec: QueueSpec) -> dict[str, Any]:
    return {"mapper": spec.mapper}


def _circumstances(spec: QueueSpec, key: Key) -> AnySelect:
    """Return a SELECT of facts about a row, the database's clock and the control table, by the names in Facts."""
    here = spec.table.alias("sqlaqueue_here")
    wrote = sa.select(written_here(here)).where(spec.key_in([here.c[each.key] for each in spec.keys], [key]))
    columns: dict[str, sa.ColumnElement[Any]] = {
        "written_here": wrote.scalar_subquery(),
        "quarantined": _quarantined(spec, key),
        "waits_for_twin": _waits_for_twin(spec),
    }
    for name, role in (("due_in", "run_at"), ("lease_left", "lease_expires_at")):
        if spec.has(role):
            # The column may have no time zone; the server then compares as claims do.
            moment = within_calendar(sa.cast(spec.columns[role], sa.DateTime(timezone=True)))
            columns[name] = sa.cast(sa.extract("epoch", moment - clock()), sa.Double())
    if CONTROL in spec.side_tables:
        control = spec.side_tables[CONTROL]
        paused = sa.and_(control.c.queue == spec.name, control.c.key == PAUSE)
        columns["paused_since"] = sa.select(control.c.created_at).where(paused).scalar_subquery()
    return sa.select(*(column.label(name) for name, column in columns.items())).where(spec.key_in(spec.keys, [key]))


def _quarantined(spec: QueueSpec, key: Key) -> sa.ColumnElement[bool]:
    by_row = spec.strategy.quarantined(spec)
    if by_row is not None:
        return sa.and_(spec.in_state("pending"), by_row) if spec.has("status") else by_row
    if CRASH_JOURNAL not in spec.side_tables:
        return sa.false()
    journal = spec.side_tables[CRASH_JOURNAL]
    return sa.exists().where(journal.c.queue == spec.name, journal.c["keys"].has_key(key_text(key)))


def _waits_for_twin(spec: QueueSpec) -> sa.ColumnElement[bool]:
    unique = unique_key(spec)
    if unique is None or unique.config.on_return != "wait" or not spec.has("lease_expires_at"):
        return sa.false()
    return waits_for_twin(spec)


def twin_of(session: Session, spec: QueueSpec, key: Key) -> JobInfo | None:
    """Return the job that counts, and with which this one is a twin."""
    unique: UniqueKey | None = unique_key(spec)
    if unique is None:
        return None
    mine, twin = spec.table.alias("sqlaqueue_mine"), spec.table.alias("sqlaqueue_twin")
    found = session.execute(
        sa.select(*(twin.c[each.key] for each in spec.keys)).where(
            spec.key_in([mine.c[each.key] for each in spec.keys], [key]),
            unique.are_twins(twin, mine),
            unique.counts(twin),
            sa.or_(*(twin.c[each.key] != mine.c[each.key] for each in spec.keys)),
        ),
        bind_arguments=_bind(spec),
    ).first()
    return None if found is None else job_info(session, spec.model, tuple(found))


def _consumers(session: Session, spec: QueueSpec) -> list[LiveConsumer] | None:
    if CONSUMERS not in spec.side_tables:
        return None
    return [
        LiveConsumer(
            name=each.name,
            listening=each.listening,
            running=each.running,
            claimed=each.claimed,
            unclaimable=unclaimable_jobs(each),
        )
        for each in session.execute(consumers(spec.model), bind_arguments=_bind(spec))
    ]


def _first_message(spec: QueueSpec, messages: MessageTable, key: Key) -> AnySelect:
    """Return a SELECT of the place of a job's first message in the order of messages."""
    its = sa.select(*map(_readable, messages.order)).where(spec.key_in(messages.jobs, [key]), *messages.waits)
    return its.order_by(*messages.order).limit(1)


def _is_locked(session: Session, spec: QueueSpec, key: Key, messages: MessageTable | None) -> bool | None:
    """Return whether another transaction has locked a job or its message; None if this session may not lock it."""
    rows = sa.select(*spec.keys).where(spec.key_in(spec.keys, [key]))
    locked = spec.strategy.lock(spec, rows)
    connection = session.connection(bind_arguments=_bind(spec))
    try:
        # Not Session.begin_nested(), which flushes. Rolling back the savepoint releases the lock.
        savepoint = connection.begin_nested()
        try:
            if connection.execute(locked).first() is None:
                return True
            if messages is None:
                return False
            # A job without a message has no lock on it; it is not claimed either way.
            its = sa.select(*messages.ids).where(spec.key_in(messages.jobs, [key]), *messages.waits)
            free = connection.execute(its.with_for_update(of=messages.table, skip_locked=True)).all()
            return not free and bool(connection.execute(its).all())
        finally:
            savepoint.rollback()
    except DBAPIError as error:
        if sqlstate(error) in _MAY_NOT_LOCK:
            return None
        raise


def _jobs_before(
    spec: QueueSpec, messages: MessageTable | None, order: Sequence[sa.Column[Any]], place: Sequence[Any]
) -> AnySelect:
    """Return a SELECT of the number of due jobs before a place in the claim order, up to a limit."""
    waiting = [spec.in_state("pending")] if spec.has("status") else []
    if messages is not None:
        waiting = messages.of_pending_jobs(spec)
    first: AnySelect = sa.select(sa.literal_column("1").label("one")).where(
        *waiting, *spec.due(spec.columns.get("run_at")), _is_before(order, place)
    )
    return sa.select(sa.func.count()).select_from(first.limit(MOST_COUNTED).subquery("sqlaqueue_before"))


def _is_before(order: Sequence[sa.Column[Any]], place: Sequence[Any]) -> sa.ColumnElement[bool]:
    """Return the condition that a row comes before a place; a NULL comes last."""
    values = [sa.literal(value, column.type) for column, value in zip(order, place, strict=True)]
    if None not in place:
        # A comparison of rows bounds the scan of the index.
        return sa.tuple_(*order) < sa.tuple_(*values)
    ways: list[sa.ColumnElement[bool]] = []
    equal: list[sa.ColumnElement[bool]] = []
    for column, value, given in zip(order, values, place, strict=True):
        ways.append(sa.and_(*equal, column.is_not(None) if given is None else column < value))
        equal.append(column.is_(None) if given is None else column == value)
    return sa.or_(*ways)
