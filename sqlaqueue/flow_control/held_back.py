"""What holds a due job back: limits, rates and the order of its queue. Few statements, which change nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import OID
from sqlalchemy.orm import Session

from sqlaqueue._typing import AnySelect
from sqlaqueue.flow_control.admission import was_contended
from sqlaqueue.flow_control.functions import SLOT_BITS, slot_text
from sqlaqueue.flow_control.keys import FlowControl, JobKey, KeyLimit, KeyOrder, KeyRate, flow_control
from sqlaqueue.postgresql.catalog import TableId, system_table
from sqlaqueue.queue.names import RATE
from sqlaqueue.queue.run import Key, key_text
from sqlaqueue.queue.spec import QueueSpec
from sqlaqueue.sql.portable import clock, converted, least, seconds_between, ticking_clock
from sqlaqueue.texts import duration_text

# -- held slots --------------------------------------------------------------------------------------------------------
# The slots that transactions hold, for reports; :mod:`sqlaqueue.flow_control.functions` locks them.


_BIGINT = sa.BigInteger()
_WITHOUT_NUMBER = sa.literal_column(str(-(1 << SLOT_BITS)), _BIGINT)


def held_slots() -> sa.FromClause:
    """Return the slots without their numbers, each with the number of transactions that hold it."""
    locks = system_table("pg_locks", "locktype", "database", "classid", "objid", "objsubid", "virtualtransaction").c
    databases = system_table("pg_database", "oid", "datname").c
    here = sa.select(databases.oid).where(databases.datname == sa.func.current_database()).scalar_subquery()
    upper, lower = sa.cast(locks.classid, _BIGINT), sa.cast(locks.objid, _BIGINT)
    whole = upper.op("<<")(sa.literal_column("32")).op("|")(lower)
    slot: Any = sa.type_coerce(whole, _BIGINT).op("&")(_WITHOUT_NUMBER).label("slot")
    number = sa.func.count(locks.virtualtransaction.distinct()).label("number")
    # One key of 64 bits has the 1 there; two keys of 32 bits have a 2.
    mine = sa.and_(locks.locktype == "advisory", locks.objsubid == sa.literal_column("1"), locks.database == here)
    return sa.select(slot, number).where(mine).group_by(slot).cte("sqlaqueue_slots")


def slot_of(key: JobKey, hashed: sa.ColumnElement[int]) -> sa.ColumnElement[int]:
    table = sa.cast(sa.cast(TableId(key.spec.table), OID()), _BIGINT)
    seed = sa.func.hashtextextended(slot_text(key), table)
    slot: Any = sa.func.hashint8extended(hashed, seed, type_=_BIGINT)
    return sa.type_coerce(slot.op("&")(_WITHOUT_NUMBER), _BIGINT)


_MOST_JOBS = 3
"""Number of jobs that are named."""


@dataclass(frozen=True, kw_only=True)
class HeldBackBy:
    """One limit, rate or order that holds a job back."""

    kind: str
    """``limit``, ``rate`` or ``order``."""
    key: str
    """The attributes with the values of the job, empty for the whole queue."""
    most: int = 0
    """The limit."""
    jobs: Sequence[str] = ()
    """The keys of some jobs that run; of an order, the job that comes before."""
    transactions: int = 0
    """How many transactions hold slots of the limit, under a held strategy; their jobs cannot be seen."""
    state: str = ""
    """The state of the job that comes before."""
    seconds: float = 0.0
    """When the rate lets a job begin."""

    @property
    def text(self) -> str:
        """A sentence with these facts, and what ends them."""
        of_key = f" of {self.key}" if self.key else ""
        if self.kind == "rate":
            return f"The rate{of_key} is used up; a job may start in {duration_text(self.seconds)}."
        if self.kind == "order":
            what = {"failed": "has failed and blocks its key; requeue or delete it", "processing": "runs"}
            return f"Job {self.jobs[0]}{of_key} comes first, and {what.get(self.state, 'has not finished')}."
        number = "1 job" if self.most == 1 else f"{self.most} jobs"
        held = f", held by {', '.join(self.jobs)}" if self.jobs else ""
        if self.transactions:
            held = f", held by {self.transactions} transaction{'s' if self.transactions > 1 else ''}"
        then = "the end of one lets another start" if self.most else "raise it to let jobs start"
        return f"The limit of {number}{of_key} is reached{held}; {then}."


def held_back_by(session: Session, spec: QueueSpec, job: Key) -> Iterator[HeldBackBy]:
    """Yield what holds a pending job back."""
    flow = flow_control(spec)
    if flow is None:
        return
    bind = {"mapper": spec.mapper}
    for limit in flow.limits:
        yield from _limit(session, limit, job, bind)
    if flow.order is not None:
        yield from _order(session, flow.order, job, bind)
    for rate in flow.rates:
        yield from _rate(session, rate, job, bind)


def _of_job(job_key: JobKey, job: Key, *others: Any) -> AnySelect:
    spec = job_key.spec
    return sa.select(job_key.of(spec.table), *others, *job_key.columns).where(spec.key_in(spec.keys, [job]))


def _text(job_key: JobKey, values: Sequence[Any]) -> str:
    pairs = zip(job_key.names, values[len(values) - len(job_key.names) :], strict=True)
    return ", ".join(f"{name} {value!r}" for name, value in pairs)


def _keys(session: Session, statement: AnySelect, bind: Any) -> list[str]:
    return [key_text(tuple(row)) for row in session.execute(statement, bind_arguments=bind)]


def _limit(session: Session, limit: KeyLimit, job: Key, bind: Any) -> Iterator[HeldBackBy]:
    spec = limit.spec
    found: Any = session.execute(_of_job(limit, job, limit.most), bind_arguments=bind).first()
    if found is None or found[0] is None or found[1] is None:
        return
    if spec.strategy.holds_transaction:
        held = session.scalar(_transactions(limit, found[0]), bind_arguments=bind) or 0
        if held >= found[1]:
            yield HeldBackBy(kind="limit", key=_text(limit, found), most=found[1], transactions=held)
        return
    runs = limit.running(spec.table) == found[0] if limit.names else spec.in_state("processing")
    running = sa.select(*spec.keys).where(runs).order_by(*spec.keys).limit(max(found[1], 1))
    jobs = _keys(session, running, bind)
    if len(jobs) >= found[1]:
        yield HeldBackBy(kind="limit", key=_text(limit, found), most=found[1], jobs=jobs[:_MOST_JOBS])


def _transactions(limit: KeyLimit, hashed: int) -> AnySelect:
    slots = held_slots()
    mine = slot_of(limit, sa.literal(hashed, sa.BigInteger()))
    return sa.select(slots.c.number).where(slots.c.slot == mine)


def _order(session: Session, order: KeyOrder, job: Key, bind: Any) -> Iterator[HeldBackBy]:
    spec = order.spec
    found: Any = session.execute(_of_job(order, job, *order.by), bind_arguments=bind).first()
    if found is None or found[0] is None:
        return
    values: Sequence[Any] = found[1 : 1 + len(order.by)]
    place = [sa.literal(value, column.type) for value, column in zip(values, order.by, strict=True)]
    waits = sa.or_(spec.columns["started_at"].is_not(None), *spec.due(spec.columns.get("run_at")))
    unfinished: list[sa.ColumnElement[bool]] = [waits]
    runs: sa.ColumnElement[bool] = sa.false()
    its_state: sa.ColumnElement[str] = sa.literal("pending", sa.Text())
    if spec.has("status"):
        unfinished, failed = [sa.and_(spec.in_state("pending"), waits)], spec.in_state("failed")
        unfinished += [failed] if order.config.on_failure == "block" else []
        if not spec.strategy.holds_transaction:
            runs = spec.in_state("processing")
        its_state = sa.case((runs, "processing"), (failed, "failed"), else_="pending")
    before = sa.and_(sa.or_(*unfinished, runs), sa.tuple_(*order.by) < sa.tuple_(*place))
    others = sa.select(*spec.keys, its_state)
    others = others.where(order.hashed(spec.table) == found[0], sa.or_(before, runs))
    first = session.execute(others.order_by(*order.by).limit(1), bind_arguments=bind).first()
    if first is not None:
        *key, state = first
        yield HeldBackBy(kind="order", key=_text(order, found), jobs=[key_text(tuple(key))], state=state)


def _rate(session: Session, rate: KeyRate, job: Key, bind: Any) -> Iterator[HeldBackBy]:
    spec, table = rate.spec, rate.spec.side_tables[RATE]
    found: Any = session.execute(_of_job(rate, job), bind_arguments=bind).first()
    if found is None or found[0] is None:
        return
    free_at = rate.free_at(table)
    mine = sa.and_(table.c.queue == spec.name, table.c.rate == rate.name, table.c.key == found[0])
    seconds: Any = converted(seconds_between(clock(), free_at), sa.Double())
    left = session.scalar(sa.select(seconds).where(mine, free_at > clock()), bind_arguments=bind)
    if left is not None:
        yield HeldBackBy(kind="rate", key=_text(rate, found), seconds=left)


def held_back(flow: FlowControl) -> AnySelect:
    """Return a SELECT for the transaction of a claim that found nothing.

    Its columns: whether another transaction had locked a key; whether a job is due; in how many seconds the next job of
    a rate may begin, NULL if no rate is used up.
    """
    spec = flow.spec
    run_at = spec.columns.get("run_at")
    waiting = [spec.in_state("pending")] if spec.has("status") else []
    due: Any = sa.select(sa.literal_column("1")).select_from(spec.table).where(*waiting, *spec.due(run_at)).limit(1)
    waits = [_next_beginning(rate) for rate in flow.rates]
    next_rate: Any = least(*waits, type_=sa.Double()) if waits else converted(sa.null(), sa.Double())
    return sa.select(was_contended(), sa.exists(due), next_rate)


def _next_beginning(rate: KeyRate) -> sa.ColumnElement[float]:
    """Return in how many seconds the next job of a key may begin, of those that are used up."""
    table = rate.spec.side_tables[RATE]
    now = ticking_clock()
    free_at = rate.free_at(table)
    seconds = seconds_between(now, sa.func.min(free_at))
    # Later than the beginning of the transaction, and so of the claim: a job may have become free since.
    mine = sa.and_(table.c.queue == rate.spec.name, table.c.rate == rate.name, free_at > sa.func.now())
    return converted(sa.select(seconds).where(mine).scalar_subquery(), sa.Double())
