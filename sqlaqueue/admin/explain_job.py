"""Say why a job does not run, or would not be enqueued: :func:`explain_job`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Mapper, RelationshipDirection, Session
from sqlalchemy.orm.attributes import instance_state, set_committed_value

from sqlaqueue._typing import AnySelect
from sqlaqueue.admin.job_reasons import MOST_COUNTED, Awaited, Facts, Reason, reasons_of
from sqlaqueue.admin.jobs import JobInfo, job, job_info
from sqlaqueue.admin.state import last_heartbeat, live_consumers, pause_moment
from sqlaqueue.exc import StatementError
from sqlaqueue.flow_control.held_back import held_back_by
from sqlaqueue.mapping.mixin import QueueMixin, spec_of
from sqlaqueue.mapping.runs import run_of
from sqlaqueue.postgresql.due_times import written_here
from sqlaqueue.postgresql.side_tables import HasName
from sqlaqueue.postgresql.waits import awaited_jobs
from sqlaqueue.postgresql.waits_at_commit import FAILED
from sqlaqueue.queue.names import CRASH_JOURNAL
from sqlaqueue.queue.options import FINISHED, STATES
from sqlaqueue.queue.run import Key, key_text, key_tuple, key_value
from sqlaqueue.queue.spec import QueueSpec, within_calendar
from sqlaqueue.sessions import routing_to_primary
from sqlaqueue.sql.engine import engine_of, sqlstate
from sqlaqueue.sql.portable import clock, converted, filtered, seconds_between
from sqlaqueue.statements.selection import select_jobs
from sqlaqueue.strategies.delete_returning import MessageStrategy, MessageTable
from sqlaqueue.strategies.listing import OTHER
from sqlaqueue.strategies.unique_key import unique_key
from sqlaqueue.strategies.update_status import waits_for_duplicate
from sqlaqueue.texts import moment_text, printable
from sqlaqueue.unique.existing import NewJob, search, set_created_at
from sqlaqueue.unique.relationships import set_foreign_key

MISSING, NEW = "missing", "new"
"""The states of a job without a row, and of an instance that is not in the database."""


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """The result of :meth:`QueueAdmin.explain`; ``str()`` returns it as lines of text.

    ::

        explanation = admin.explain(1)
        print(explanation)
        print([reason.code for reason in explanation.reasons])
    """

    queue: str
    key: Any
    """The key of the job, a tuple for a composite key; None for a new instance."""
    state: str
    """The name of the job's state; ``other`` for a status value that the queue does not use, ``missing`` if there is no
    such job, ``new`` for an instance that is not in the database."""
    reasons: tuple[Reason, ...]
    """The reasons, the most important one first; at least one."""

    def __str__(self) -> str:
        if self.state == NEW:
            head = f"{self.queue}: a new job"
        else:
            head = f"{self.queue} {key_text(self.key if isinstance(self.key, tuple) else (self.key,))} is {self.state}"
        lines = [head, *(f"  {reason.code}: {reason.text}" for reason in self.reasons)]
        return "\n".join(map(printable, lines))


def explain_job(session: Session, model: type[Any], job: Any, *, reads_chain: bool = True) -> Explanation:
    """Say why a job, given by its key or as an instance, does not run, or why a new instance would not be enqueued.

    :param reads_chain: whether to read what a waiting job waits for, which reads all members of a batch.
    """
    with session.no_autoflush, routing_to_primary(session):
        if isinstance(job, QueueMixin):
            return _explain_instance(session, job)
        return _explain(session, model, job, reads_chain=reads_chain)


def _explain_instance(session: Session, job: Any) -> Explanation:
    spec, state = spec_of(type(job)), sa.inspect(job)
    if state.key is not None:
        run = run_of(job)
        here = run is not None and run.transaction is not None and run.transaction is session.get_transaction()
        # The class of the queue: no statement selects a subclass with a table of its own.
        return _explain(session, spec.model, tuple(state.identity), claimed_here=here)
    if state.session is not None:
        msg = (
            f"QueueAdmin.explain(): this {type(job).__name__} waits in a session to be inserted; flush the session, or "
            "do not add the instance to it"
        )
        raise StatementError(msg)
    return Explanation(queue=spec.name, key=None, state=NEW, reasons=(_reason_of_new(session, job),))


def _explain(
    session: Session, model: type[Any], key: Any, *, claimed_here: bool = False, reads_chain: bool = True
) -> Explanation:
    facts = _read_facts(session, model, key, claimed_here=claimed_here, reads_chain=reads_chain)
    shown = key_value(key_tuple(key)) if facts.info is None else facts.info.key
    return Explanation(queue=facts.spec.name, key=shown, state=facts.state or MISSING, reasons=reasons_of(facts))


_MAY_NOT_LOCK = {"42501", "25006", "25P01", "40001"}
"""The SQLSTATEs of a missing privilege, of a read-only transaction, of autocommit, in which there is no savepoint, and
of a snapshot that is older than the row."""


def _read_facts(session: Session, model: type[Any], key: Any, *, claimed_here: bool, reads_chain: bool) -> Facts:
    """Read the facts about the job with this key, by few statements that change nothing."""
    spec = select_jobs(model, "explain").spec
    info = job_info(session, model, key)
    if info is None:
        return Facts(spec=spec, key=key, info=None, claimed_here=claimed_here)
    key = key_tuple(info.key)
    facts = Facts(spec=spec, key=key, info=info, claimed_here=claimed_here)
    if info.state in FINISHED:
        return replace(facts, duplicate=duplicate_of(session, spec, key)) if spec.has("status") else facts
    facts = replace(facts, row=_row(session, spec, key))
    circumstances = session.execute(_circumstances(spec, key), bind_arguments=_bind(spec)).mappings().first()
    if circumstances is None:
        # It was deleted after the first statement.
        return replace(facts, info=None)
    facts = replace(facts, **circumstances, consumers=live_consumers(session, spec))
    if facts.consumers is not None and not facts.consumers:
        facts = replace(facts, last_heartbeat=last_heartbeat(session, spec))
    if facts.waits_for_duplicate:
        facts = replace(facts, duplicate=duplicate_of(session, spec, key))
    if info.state == "waiting":
        is_open = facts.row.get(spec.columns["is_open"].name) if spec.has("is_open") else False
        awaited = [*_awaited(session, spec, key)] if reads_chain else None
        is_counted = engine_of(session.connection(bind_arguments=_bind(spec)).dialect) is None
        return replace(facts, awaited=awaited, is_open=bool(is_open), is_counted=is_counted)
    return _read_place(session, facts) if info.state == "pending" else facts


_CHAIN, _SHOWN_AWAITED = 20, 3
"""How many jobs of a chain are looked at, and how many of those that a job waits for are named."""


def _awaited(session: Session, spec: QueueSpec, key: Key) -> Iterator[Awaited]:
    """Yield what a job waits for, and what the first of those waits for, and so on."""
    chain = [(spec, key)]
    for number in range(_CHAIN):
        if number >= len(chain):
            return
        waiting, its = chain[number]
        for wait in waiting.waits:
            jobs, conditions = awaited_jobs(wait)
            other, status = wait.awaited, jobs.c[wait.awaited.columns["status"].key]
            known = [state for state in STATES if getattr(other.config.states, state) is not None]
            state = sa.case(
                *((status == other.literal(each), sa.literal(each, sa.Text())) for each in known), else_=OTHER
            )
            keys = [jobs.c[each.key] for each in other.keys]
            mine = waiting.key_in(waiting.keys, [its])
            joined = waiting.table.join(jobs, sa.and_(*conditions))
            first = sa.select(*keys, state).select_from(joined).where(mine)
            first = first.order_by(state.in_(FAILED).desc(), *keys).limit(_SHOWN_AWAITED)
            rows = session.execute(first, bind_arguments=_bind(waiting)).all()
            if rows:
                failed = filtered(sa.func.count(), state.in_(FAILED))
                left = filtered(sa.func.count(), conditions[-1])
                all_jobs = waiting.table.join(jobs, sa.and_(*conditions[:-1]))
                counted = sa.select(left, sa.func.count(), failed).select_from(all_jobs).where(mine)
                left_number, total, bad = session.execute(counted, bind_arguments=_bind(waiting)).one()
                shown = [(key_value(row[:-1]), row[-1]) for row in rows]
                yield Awaited(wait, key_value(its), left_number, total, bad, shown)
                chain += [(other, tuple(row[:-1])) for row in rows[:1] if row[-1] == "waiting"]


def _row(session: Session, spec: QueueSpec, key: Key) -> dict[str, Any]:
    kinds = [spec.columns.get("status"), spec.mapper.polymorphic_on]
    needed = [
        *spec.claim_order,
        *(spec.columns[role] for role in ("is_open", "waits_for_count") if spec.has(role)),
        *(each for each in kinds if isinstance(each, sa.Column) and each.table is spec.table),
    ]
    columns = list(dict.fromkeys(needed))
    shown = [_readable(each) for each in columns]
    row = session.execute(sa.select(*shown).where(spec.key_in(spec.keys, [key])), bind_arguments=_bind(spec)).first()
    return {} if row is None else {column.name: value for column, value in zip(columns, row, strict=True)}


def _readable(column: sa.Column[Any]) -> sa.ColumnElement[Any]:
    is_moment = isinstance(column.type, sa.DateTime) and column.type.timezone
    return within_calendar(column) if is_moment else column


def _read_place(session: Session, facts: Facts) -> Facts:
    """Add whether a pending job is locked, and how many jobs are before it."""
    spec, messages = facts.spec, messages_of(facts.spec)
    if messages is None:
        order: Sequence[sa.Column[Any]] = spec.claim_order
        place: Sequence[Any] | None = [facts.row[column.name] for column in order]
    else:
        order = messages.order
        its = sa.select(*map(_readable, order)).where(spec.key_in(messages.jobs, [facts.key]), *messages.waits)
        place = session.execute(its.order_by(*order).limit(1), bind_arguments=_bind(spec)).first()
    facts = replace(facts, locked=_is_locked(session, spec, facts.key, messages), has_message=place is not None)
    if place is None or not facts.may_be_claimed:
        return facts
    facts = replace(facts, held_back=[*held_back_by(session, spec, facts.key)])
    before = session.scalar(_count_jobs_before(spec, messages, order, list(place)), bind_arguments=_bind(spec))
    return replace(facts, before=before or 0)


def messages_of(spec: QueueSpec) -> MessageTable | None:
    return spec.strategy.messages(spec) if isinstance(spec.strategy, MessageStrategy) else None


def _bind(spec: QueueSpec) -> dict[str, Any]:
    return {"mapper": spec.mapper}


def _circumstances(spec: QueueSpec, key: Key) -> AnySelect:
    """Return a SELECT of facts about a row, the database's clock and the control table, by the names in Facts."""
    here = spec.table.alias("sqlaqueue_here")
    wrote = sa.select(written_here(here)).where(spec.key_in([here.c[each.key] for each in spec.keys], [key]))
    unique = unique_key(spec)
    may_wait = unique is not None and unique.config.on_return == "wait" and spec.has("lease_expires_at")
    columns: dict[str, sa.ColumnElement[Any]] = {
        "written_here": wrote.scalar_subquery(),
        "quarantined": _is_quarantined(spec, key),
        "waits_for_duplicate": waits_for_duplicate(spec) if may_wait else sa.false(),
    }
    for name, role in (("due_in", "run_at"), ("lease_left", "lease_expires_at")):
        if spec.has(role):
            # The column may have no time zone; the server then compares as claims do.
            moment = within_calendar(converted(spec.columns[role], sa.DateTime(timezone=True)))
            columns[name] = converted(seconds_between(clock(), moment), sa.Double())
    paused_at = pause_moment(spec)
    if paused_at is not None:
        columns["paused_since"] = paused_at.scalar_subquery()
    return sa.select(*(column.label(name) for name, column in columns.items())).where(spec.key_in(spec.keys, [key]))


def _is_quarantined(spec: QueueSpec, key: Key) -> sa.ColumnElement[bool]:
    by_row = spec.strategy.quarantined(spec)
    if by_row is not None:
        return sa.and_(spec.in_state("pending"), by_row) if spec.has("status") else by_row
    if CRASH_JOURNAL not in spec.side_tables:
        return sa.false()
    journal = spec.side_tables[CRASH_JOURNAL]
    return sa.exists().where(
        journal.c.queue == spec.name, HasName(journal.c["keys"], sa.literal(key_text(key), sa.Text()))
    )


def duplicate_of(session: Session, spec: QueueSpec, key: Key) -> JobInfo | None:
    """Return the job that counts and has the same values as this one."""
    unique = unique_key(spec)
    if unique is None:
        return None
    mine, duplicate = spec.table.alias("sqlaqueue_mine"), spec.table.alias("sqlaqueue_duplicate")
    found = session.execute(
        sa.select(*(duplicate.c[each.key] for each in spec.keys)).where(
            spec.key_in([mine.c[each.key] for each in spec.keys], [key]),
            unique.are_duplicates(duplicate, mine),
            unique.counts(duplicate),
            sa.or_(*(duplicate.c[each.key] != mine.c[each.key] for each in spec.keys)),
        ),
        bind_arguments=_bind(spec),
    ).first()
    return None if found is None else job_info(session, spec.model, tuple(found))


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


def _count_jobs_before(
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


def _reason_of_new(session: Session, given: Any) -> Reason:
    """Return whether a duplicate keeps a new instance from being enqueued. The instance is left as it is.

    :raises StatementError: if the database computes a value that makes the job unique.
    """
    spec = spec_of(type(given))
    key = unique_key(spec)
    if key is None:
        return Reason("ready", f"Nothing keeps it from being enqueued: {spec.name} has no QueueConfig(unique=...).")
    connection = session.connection(bind_arguments={"mapper": spec.mapper})
    new = NewJob(_copy(given))
    set_created_at(connection, key, [new])
    values = new.unique_values(key, connection)
    pairs = ", ".join(f"{name}={getattr(new.job, name)!r}" for name in key.config.attributes)
    if key.config.nulls_distinct and None in values:
        return Reason(
            "ready", f"It has no duplicate, as it has a None in {pairs} and NULLs differ; enqueue() inserts it."
        )
    existing = search(connection, key, [values])[0].existing
    found = None if existing is None else job(session, spec.model, existing)
    if existing is None or found is None:
        return Reason(
            "ready",
            f"No job with {pairs} counts, so enqueue() inserts it; it would wait for a transaction that has inserted "
            "one and is not committed.",
        )
    info = found[0]
    since = "" if info.created_at is None else f", enqueued at {moment_text(info.created_at)}"
    until = "" if key.config.within is None else f", or the period of {key.config.within} is over"
    return Reason(
        "duplicate",
        f"Job {key_text(existing)} has {pairs} as well and is {info.state}{since}: enqueue() returns it and inserts "
        f"nothing, and an INSERT fails, until it is no longer {' or '.join(key.states)}{until}.",
    )


def _copy(given: Any) -> Any:
    """Return a copy of an instance with its values, in no session: defaults are set on this one only."""
    mapper: Mapper[Any] = sa.inspect(given).mapper
    copy = mapper.class_manager.new_instance()
    present = instance_state(given).dict
    for name, value in NewJob(given).given().items():
        set_committed_value(copy, name, value)
    for each in mapper.relationships:
        parent = present.get(each.key)
        if each.direction is not RelationshipDirection.MANYTOONE or each.viewonly or parent is None:
            continue
        set_foreign_key(copy, each, parent)
    return copy
