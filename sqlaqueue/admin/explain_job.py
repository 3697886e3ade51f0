"""Say why a job does not run, or would not be enqueued: :func:`explain_job`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Mapper, RelationshipDirection, Session
from sqlalchemy.orm.attributes import instance_state, set_committed_value

from sqlaqueue._typing import AnySelect
from sqlaqueue.admin.jobs import JobInfo, job, job_info
from sqlaqueue.exc import StatementError
from sqlaqueue.flow_control.held_back import HeldBackBy, held_back_by
from sqlaqueue.mapping.mixin import QueueMixin, spec_of
from sqlaqueue.mapping.runs import run_of
from sqlaqueue.postgresql.due_times import written_here
from sqlaqueue.postgresql.side_tables import PAUSE
from sqlaqueue.queue.names import CONSUMERS, CONTROL, CRASH_JOURNAL
from sqlaqueue.queue.options import FINISHED
from sqlaqueue.queue.run import Key, key_text, key_value
from sqlaqueue.queue.spec import QueueSpec, clock, within_calendar
from sqlaqueue.session_types import requires_session
from sqlaqueue.sql.errors import sqlstate
from sqlaqueue.statements.selection import select_jobs
from sqlaqueue.statements.verbs import consumers
from sqlaqueue.strategies.delete_returning import MessageStrategy, MessageTable
from sqlaqueue.strategies.existing_messages import ExistingMessages
from sqlaqueue.strategies.listing import OTHER
from sqlaqueue.strategies.twins import UniqueKey, twin_in, unique_key
from sqlaqueue.strategies.update_status import waits_for_twin
from sqlaqueue.texts import duration_text, moment_text, printable
from sqlaqueue.unique.insert import NewJob, search, set_created_at
from sqlaqueue.unique.relationships import set_foreign_key
from sqlaqueue.write_routing import routing_to_primary

# -- facts -------------------------------------------------------------------------------------------------------------
# What is known about a job and its queue, for the functions that make reasons of it.


MOST_COUNTED = 1000
"""Number of jobs up to which those before a job are counted."""


@dataclass(frozen=True, kw_only=True)
class LiveConsumer:
    """A Consumer that has sent a heartbeat recently."""

    name: str
    listening: bool
    running: Sequence[Sequence[str]]
    """The keys of the jobs whose handlers were running."""
    claimed: int
    """The number of its other claimed jobs."""
    unclaimable: Sequence[tuple[list[str], str]] = ()
    """The jobs that it cannot claim, each with its key as texts and the error."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What was read about one job. A fact that does not apply to the job, or was not needed, has its default."""

    spec: QueueSpec
    key: Any
    """The key as it was given: a value, or a tuple for a composite key."""
    info: JobInfo | None
    """The job; None if there is none."""
    row: Mapping[str, Any] = field(default_factory=dict)
    """The values of its row, by column name."""
    paused_since: datetime | None = None
    """When the queue was paused; None if it is not."""
    due_in: float | None = None
    """The seconds until the job is due, negative if it is; None if it has no time."""
    lease_left: float | None = None
    """The seconds until its lease ends, negative if it has expired; None if it has none."""
    consumers: Sequence[LiveConsumer] | None = None
    """The live Consumers of the queue; None if they are not known."""
    claimed_here: bool = False
    """Whether the session's own transaction holds the job."""
    written_here: bool = False
    """Whether the session's transaction, which is not committed, has written the row."""
    locked: bool | None = False
    """Whether another transaction has locked the pending job; None if the role or the session may not lock it."""
    has_message: bool = True
    """Whether the pending job has a message, if the strategy needs one."""
    quarantined: bool = False
    """Whether its last worker died."""
    waits_for_twin: bool = False
    """Whether it waits until a twin does not count any more."""
    twin: JobInfo | None = None
    """The twin that counts, of a job that waits for it or has finished; None if there is none."""
    held_back: Sequence[HeldBackBy] = ()
    """What holds the due job back, of the limits, rates and the order of its queue."""
    before: int = 0
    """The number of due jobs with an earlier place in the claim order, at most :data:`MOST_COUNTED`."""

    @property
    def state(self) -> str | None:
        """The name of the job's state; None if there is no such job."""
        return None if self.info is None else self.info.state

    @property
    def is_due(self) -> bool:
        """Whether the job is pending, and its time has come."""
        return self.state == "pending" and (self.due_in is None or self.due_in <= 0)

    @property
    def is_held(self) -> bool:
        """Whether a transaction holds the pending job."""
        return self.state == "pending" and (self.claimed_here or bool(self.locked))

    @property
    def may_be_claimed(self) -> bool:
        """Whether the next claim could take the job, as far as its row tells."""
        return self.is_due and not self.is_held and self.has_message

    def runners(self) -> list[str]:
        """Return the names of the live Consumers that were running the job at their last heartbeats."""
        return [each.name for each in self.consumers or () if self._key_texts in map(list, each.running)]

    def refused_by(self) -> list[tuple[str, str]]:
        """Return the names of the live Consumers that cannot claim the job, each with the error."""
        return [
            (each.name, error)
            for each in self.consumers or ()
            for key, error in each.unclaimable
            if key == self._key_texts
        ]

    @property
    def _key_texts(self) -> list[str]:
        return [] if self.info is None else list(map(str, self.info.key))


def unclaimable_jobs(consumer: Any) -> list[tuple[list[str], str]]:
    """Return the keys, as texts, of the jobs that a live Consumer cannot claim, each with the error.

    :param consumer: a row of ``consumers()``; whatever another program has written there.
    """
    listed = consumer.unclaimable if isinstance(consumer.unclaimable, list) else []
    return [
        ([str(part) for part in one["key"]], str(one.get("error")))
        for one in listed
        if isinstance(one, dict) and isinstance(one.get("key"), list)
    ]


def text_of(key: Key | Any) -> str:
    """Return a key as text; one that is given as a text is one already."""
    return key_text(key) if isinstance(key, tuple | list) else str(key)


# -- read facts --------------------------------------------------------------------------------------------------------
# Read the facts about one job, by few statements that change nothing.


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
    before = session.scalar(_count_jobs_before(spec, messages, order, list(place)), bind_arguments=_bind(spec))
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
        "quarantined": _is_quarantined(spec, key),
        "waits_for_twin": _is_waiting_for_twin(spec),
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


def _is_quarantined(spec: QueueSpec, key: Key) -> sa.ColumnElement[bool]:
    by_row = spec.strategy.quarantined(spec)
    if by_row is not None:
        return sa.and_(spec.in_state("pending"), by_row) if spec.has("status") else by_row
    if CRASH_JOURNAL not in spec.side_tables:
        return sa.false()
    journal = spec.side_tables[CRASH_JOURNAL]
    return sa.exists().where(journal.c.queue == spec.name, journal.c["keys"].has_key(key_text(key)))


def _is_waiting_for_twin(spec: QueueSpec) -> sa.ColumnElement[bool]:
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


# -- result ------------------------------------------------------------------------------------------------------------
# The result of an explanation: :class:`Explanation`, which has a :class:`Reason` or several.


MISSING, NEW = "missing", "new"
"""The states of a job without a row, and of an instance that is not in the database."""


@dataclass(frozen=True)
class Reason:
    """One reason why a job does not run, or what there is to say about its state."""

    code: str
    """A stable identifier, such as ``paused``."""
    text: str
    """A sentence with the facts, and what to do about it."""


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """The result of :func:`~sqlaqueue.admin.explain_job`; ``str()`` returns it as lines of text."""

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


# -- new instance ------------------------------------------------------------------------------------------------------
# Why a new instance of a queue class would not be enqueued: its twin.


def reasons_of_new(session: Session, given: Any) -> tuple[Reason, ...]:
    """Return whether a twin keeps a new instance from being enqueued. The instance is left as it is.

    :raises StatementError: if the database computes a value that makes the job unique.
    """
    spec = spec_of(type(given))
    key = unique_key(spec)
    if key is None:
        return (
            Reason(
                "ready",
                f"Nothing keeps it from being enqueued: {spec.name} has no QueueConfig(unique=...), so no twins.",
            ),
        )
    connection = session.connection(bind_arguments={"mapper": spec.mapper})
    new = NewJob(_copy(given))
    set_created_at(connection, key, [new])
    values = new.unique_values(key, connection)
    pairs = ", ".join(f"{name}={getattr(new.job, name)!r}" for name in key.config.attributes)
    if key.config.nulls_distinct and None in values:
        return (
            Reason("ready", f"It has no twin, as it has a None in {pairs} and NULLs differ; enqueue() inserts it."),
        )
    twin = search(connection, key, [values])[0].twin
    found = None if twin is None else job(session, spec.model, twin)
    if twin is not None and found is not None:
        return (_twin(key, twin, found[0], pairs),)
    return (
        Reason(
            "ready",
            f"No job with {pairs} counts, so enqueue() inserts it; it would wait for a transaction that has inserted "
            "one and is not committed.",
        ),
    )


def _twin(key: UniqueKey, twin: Key, info: JobInfo, pairs: str) -> Reason:
    since = "" if info.created_at is None else f", enqueued at {moment_text(info.created_at)}"
    until = "" if key.config.per is None else f", or the period of {key.config.per} is over"
    return Reason(
        "twin",
        f"Job {key_text(twin)} has {pairs} as well and is {info.state}{since}: enqueue() returns it and inserts "
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


# -- reasons -----------------------------------------------------------------------------------------------------------
# The reasons why a job does not run: pure functions of its facts.
#
# To add a reason, write a function that yields it, and put it into :data:`REASONS`. If it needs another fact, add
# that to :class:`~sqlaqueue.admin.explain_job.Facts` and read it in :mod:`sqlaqueue.admin.explain_job`.


_MOST_NAMES = 3
"""Number of Consumers that a sentence names."""


def _missing(facts: Facts) -> Iterator[Reason]:
    if facts.state is not None:
        return
    ways = ["it was never enqueued", "the transaction that inserts it is not committed", "it was deleted"]
    spec = facts.spec
    if not spec.strategy.keeps_rows:
        ways.append(
            "it is completed, as a claim deletes the row and only failed and cancelled jobs become dead letters"
        )
    elif spec.config.on_complete == "delete":
        ways.append('it is completed, as on_complete="delete" deletes the rows of completed jobs')
    if spec.config.retention:
        ways.append(f"it has finished ({', '.join(spec.config.retention)}) and its retention time is over")
    yield Reason("missing", f"There is no job {text_of(facts.key)} in {spec.name}: {', or '.join(ways)}.")


def _finished(facts: Facts) -> Iterator[Reason]:
    info = facts.info
    if info is None or info.state not in FINISHED:
        return
    when = f" at {moment_text(info.finished_at)}" if info.finished_at is not None else ""
    verb = {"completed": "was completed", "failed": "failed", "cancelled": "was cancelled"}[info.state]
    error = (info.last_error or "").splitlines()[:1]
    after = f" after {info.attempts} attempts" if info.state == "failed" and info.attempts else ""
    said = f" with the last error {error[0]!r}" if error else ""
    again = "requeue() makes it pending again"
    if facts.spec.config.unique is not None and not facts.spec.has("status"):
        again += ", unless a twin of it counts by then"
    if facts.twin is not None:
        again = f"requeue() does not make it pending again while its twin, job {key_text(facts.twin.key)}, counts"
    yield Reason("finished", f"It {verb}{when}{after}{said}; {again}.")


def _cancelled_for_twin(facts: Facts) -> Iterator[Reason]:
    info = facts.info
    if info is None or info.state != "cancelled" or facts.spec.config.unique is None:
        return
    twin = twin_in(info.last_error)
    if twin is not None:
        names = ", ".join(facts.spec.config.unique.attributes)
        yield Reason(
            "twin",
            f"It was cancelled when it was to be pending again, since job {twin} had the same {names} and counted.",
        )


def _unknown_status(facts: Facts) -> Iterator[Reason]:
    if facts.state != OTHER:
        return
    column = facts.spec.columns["status"]
    yield Reason(
        "unknown_status",
        f"Its {column.name} is {facts.row.get(column.name)!r}, which is no status value of the queue, so no claim "
        "takes it; write the value for pending into the row, or name this value in QueueConfig(states=States(...)).",
    )


def _unknown_class(facts: Facts) -> Iterator[Reason]:
    mapper = facts.spec.mapper
    column = mapper.polymorphic_on
    if facts.state in {None, *FINISHED} or not isinstance(column, sa.Column):
        return
    value = facts.row.get(column.name)
    # NULL loads the class of the queue itself.
    if value is not None and value not in mapper.polymorphic_map:
        known = ", ".join(repr(each) for each in mapper.polymorphic_map)
        yield Reason(
            "unknown_class",
            f"Its {column.name} is {value!r}, which is none of the classes mapped in this process ({known}): a claim "
            "of it cannot load the instance; import the class with this polymorphic_identity in the worker, or correct "
            "the row.",
        )


def _uncommitted(facts: Facts) -> Iterator[Reason]:
    if facts.state is not None and facts.written_here and not facts.claimed_here:
        yield Reason(
            "uncommitted",
            "The transaction of this session has written the row and is not committed, so no worker sees the job as it "
            "is here; commit.",
        )


def _waits_for_twin(facts: Facts) -> Iterator[Reason]:
    unique = facts.spec.config.unique
    if not facts.waits_for_twin or unique is None:
        return
    start = 'A run of it has ended, and as Unique(on_return="wait") says it waits'
    if facts.twin is None:
        yield Reason(
            "waits_for_twin",
            f"{start} until its twin does not count any more; the twin is gone, so the next rescue of a Consumer, or "
            "rescue(), makes it pending.",
        )
        return
    yield Reason(
        "waits_for_twin",
        f"{start} for job {key_text(facts.twin.key)}, which has the same {', '.join(unique.attributes)} and is "
        f"{facts.twin.state}; when that does not count any more, a rescue makes this job pending.",
    )


def _lease_expired(facts: Facts) -> Iterator[Reason]:
    info = facts.info
    if info is None or not _has_expired(facts):
        return
    rescue = (
        f"one of the live Consumers ({_names([each.name for each in facts.consumers])}) rescues it soon"
        if facts.consumers
        else "no live Consumer is there to rescue it: start one, or call rescue()"
    )
    owner = "" if info.claimed_by is None else f" of {info.claimed_by}"
    when = f"{moment_text(info.lease_expires_at)}, {duration_text(-(facts.lease_left or 0))} ago"
    yield Reason(
        "lease_expired",
        f"The lease{owner} expired at {when}: its worker died or lost the database; {rescue}.",
    )


def _has_expired(facts: Facts) -> bool:
    running = facts.state == "processing" and not facts.waits_for_twin
    return running and facts.lease_left is not None and facts.lease_left <= 0


def _running(facts: Facts) -> Iterator[Reason]:
    info = facts.info
    if info is None or info.state != "processing" or facts.waits_for_twin or _has_expired(facts):
        return
    if facts.spec.strategy.holds_transaction:
        name = facts.spec.strategy.name
        yield Reason(
            "running",
            f'Its row reads as processing, which the strategy "{name}" never writes, so no claim takes it; set it to '
            "pending if no other program runs it.",
        )
        return
    since = "" if info.started_at is None else f" since {moment_text(info.started_at)}"
    text = f"It is running{since}, claimed by {info.claimed_by or 'an unknown worker'}"
    if facts.lease_left is None:
        text += "; it has no lease, so nothing rescues it if its worker has died"
    else:
        text += f", with a lease until {moment_text(info.lease_expires_at)}, in {duration_text(facts.lease_left)}"
    yield Reason("running", f"{text}. {_owner(facts, info.claimed_by)}")


def _owner(facts: Facts, name: str | None) -> str:
    """Return a sentence about the worker that holds a job."""
    if facts.runners():
        return f"The Consumer {_names(facts.runners())} was running its handler at the last heartbeat."
    if any(each.name == name for each in facts.consumers or ()):
        return "That Consumer is alive, and had not called the handler at its last heartbeat."
    return (
        "No live Consumer has this name: it is a program that calls claim() itself, or it has died and the job is "
        "rescued after the end of the lease."
    )


def _unclaimable(facts: Facts) -> Iterator[Reason]:
    refused = facts.refused_by()
    if refused and facts.state not in FINISHED:
        errors = list(dict.fromkeys(error for _, error in refused))
        others = len(facts.consumers or ()) - len({name for name, _ in refused})
        rest = "the other Consumers may claim it" if others > 0 else "no other Consumer is alive"
        yield Reason(
            "unclaimable",
            f"{_names([name for name, _ in refused])} cannot claim, rescue or settle it: {_names(errors)}; {rest}. "
            "Start a version of the program that can load the row, or correct the row or what refuses the change.",
        )


def _held(facts: Facts) -> Iterator[Reason]:
    if facts.claimed_here:
        yield Reason("running", "The transaction of this session has claimed it; settle the run, and commit.")
    elif facts.is_held and facts.runners():
        yield Reason("running", f"The Consumer {_names(facts.runners())} runs it in a transaction that is open.")
    elif facts.is_held:
        claimed = [each.name for each in facts.consumers or () if each.claimed]
        holder = "one that has written the row and is not committed"
        if facts.spec.strategy.holds_transaction:
            holder += ", or that of a worker which has claimed it"
        if claimed:
            holder += f" ({_names(claimed)} had claimed jobs that were not running at the last heartbeat)"
        yield Reason(
            "locked",
            f"Another transaction has locked it, so claims pass over it: {holder}; pg_stat_activity shows open "
            "transactions.",
        )


def _no_message(facts: Facts) -> Iterator[Reason]:
    if facts.has_message or facts.claimed_here:
        return
    fix = "reconcile(), which Consumers execute regularly, inserts it"
    if isinstance(facts.spec.strategy, ExistingMessages):
        fix = "the application inserts the messages, so it has to insert one for this job"
    yield Reason("no_message", f"It is pending and has no message, without which no claim finds it; {fix}.")


def _paused(facts: Facts) -> Iterator[Reason]:
    if facts.state == "pending" and facts.paused_since is not None:
        yield Reason(
            "paused",
            f"The queue {facts.spec.name} has been paused since {moment_text(facts.paused_since)}, so no claim takes a "
            "job; resume() or `sqlaqueue resume` ends that.",
        )


def _not_due(facts: Facts) -> Iterator[Reason]:
    if facts.info is not None and facts.state == "pending" and not facts.is_due:
        attempts = facts.info.attempts
        after = f"; its attempt {attempts} has failed or was released" if attempts else ""
        yield Reason(
            "not_due",
            f"It is due at {moment_text(facts.info.run_at)}, in {duration_text(facts.due_in)}{after}.",
        )


def _no_consumer(facts: Facts) -> Iterator[Reason]:
    if facts.state == "pending" and not facts.is_held and facts.consumers is not None and not facts.consumers:
        yield Reason(
            "no_consumer",
            f"No live Consumer serves {facts.spec.name}: none has sent a heartbeat recently; start one, for instance "
            "with `sqlaqueue worker`.",
        )


def _quarantined(facts: Facts) -> Iterator[Reason]:
    if facts.quarantined and facts.state == "pending" and not facts.is_held:
        yield Reason(
            "quarantined",
            "The worker that ran it last has died, so Consumers claim it apart from other jobs, a few of these at a "
            "time.",
        )


def _held_back(facts: Facts) -> Iterator[Reason]:
    for one in facts.held_back:
        yield Reason(one.kind, one.text)


def _jobs_before(facts: Facts) -> Iterator[Reason]:
    if facts.before:
        number = f"at least {MOST_COUNTED}" if facts.before >= MOST_COUNTED else str(facts.before)
        jobs = "1 due job is" if facts.before == 1 else f"{number} due jobs are"
        yield Reason("jobs_before", f"{jobs} before it in the claim order; more workers would reach it sooner.")


def _busy(facts: Facts) -> Iterator[Reason]:
    if facts.may_be_claimed and facts.consumers and all(each.running for each in facts.consumers):
        parts = [f"{each.name} ({len(each.running)} running, {each.claimed} claimed)" for each in facts.consumers]
        yield Reason(
            "busy",
            f"Every live Consumer was running jobs at its last heartbeat: {_names(parts)}; if their handlers are all "
            "in use, the job waits for the end of one.",
        )


def _polling(facts: Facts) -> Iterator[Reason]:
    if facts.may_be_claimed and facts.consumers and not any(each.listening for each in facts.consumers):
        yield Reason(
            "polling",
            f"The live Consumers ({_names([each.name for each in facts.consumers])}) receive no notifications and only "
            "poll, so they find the job at their next poll_interval.",
        )


def _names(names: list[str]) -> str:
    more = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")


REASONS: tuple[Callable[[Facts], Iterator[Reason]], ...] = (
    _missing,
    _unknown_class,
    _unknown_status,
    _cancelled_for_twin,
    _finished,
    _uncommitted,
    _waits_for_twin,
    _lease_expired,
    _running,
    _unclaimable,
    _held,
    _no_message,
    _paused,
    _not_due,
    _no_consumer,
    _quarantined,
    _held_back,
    _jobs_before,
    _busy,
    _polling,
)
"""The functions that yield reasons, in the order of their importance."""


def reasons_of(facts: Facts) -> tuple[Reason, ...]:
    """Return all reasons; if there is none, that the job is ready."""
    found = tuple(reason for function in REASONS for reason in function(facts))
    return found or (_ready(facts),)


def _ready(facts: Facts) -> Reason:
    text = "It is due, and nothing stands against it: the next claim takes it, unless the Consumers select other jobs."
    if facts.locked is None:
        text += (
            " Whether another transaction has locked it is not known, since this session may not lock it (the "
            "privilege UPDATE is missing, or the transaction is read-only)."
        )
    return Reason("ready", text)


@requires_session
def explain_job(session: Session, job_or_model: Any, key: Any = None) -> Explanation:
    """Say why a job does not run, or why a new instance would not be enqueued.

    It changes nothing: it does not flush the session, adds no instance to it, and keeps no lock. For a moment it locks
    a pending job, to find out whether another transaction has.

    :param job_or_model: an instance that is in the database; a queue class, with ``key``; or a new instance, which is
        not added to a session, to learn whether a twin of it exists, see :class:`~sqlaqueue.Unique`.
    :param key: the primary key of a job of the class: a value, or a tuple for a composite key; a text is converted by
        the database.
    :raises NotAQueueError: for anything else than a queue class or an instance of one.
    :raises StatementError: for a class without a key, an instance with one, and an instance that waits for a flush.
    """
    with session.no_autoflush, routing_to_primary(session):
        if not isinstance(job_or_model, QueueMixin):
            spec = spec_of(job_or_model)
            if key is None:
                name = spec.model.__name__
                msg = f"explain_job({name}): give the key of the job as well, as in explain_job(session, {name}, 5)"
                raise StatementError(msg)
            return _explain(session, job_or_model, key)
        return _explain_instance(session, job_or_model, key)


def _explain_instance(session: Session, job: Any, key: Any) -> Explanation:
    name, state = type(job).__name__, sa.inspect(job)
    spec = spec_of(type(job))
    if key is not None:
        msg = f"explain_job({name}(...), key={key!r}): an instance has its key; give the class {name}, or leave out key"
        raise StatementError(msg)
    if state.key is not None:
        run = run_of(job)
        here = run is not None and run.transaction is not None and run.transaction is session.get_transaction()
        # The class of the queue: no statement selects a subclass with a table of its own.
        return _explain(session, spec.model, tuple(state.identity), claimed_here=here)
    if state.session is not None:
        msg = (
            f"explain_job(): this {name} waits in a session to be inserted; flush the session, or do not add the "
            "instance to it"
        )
        raise StatementError(msg)
    return Explanation(queue=spec.name, key=None, state=NEW, reasons=reasons_of_new(session, job))


def _explain(session: Session, model: type[Any], key: Any, *, claimed_here: bool = False) -> Explanation:
    facts = read_facts(session, model, key, claimed_here=claimed_here)
    shown = key_value(facts.info.key) if facts.info is not None else key_value(key) if isinstance(key, tuple) else key
    return Explanation(queue=facts.spec.name, key=shown, state=facts.state or MISSING, reasons=reasons_of(facts))
