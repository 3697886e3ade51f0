"""Rates: when the next job of each key may begin, reservations of beginnings, and :class:`sqlaqueue.Throttle`."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import OID, insert

from sqlaqueue._typing import AnySelect
from sqlaqueue.flow_control.checks import RateCheck, checks_of
from sqlaqueue.flow_control.keys import KeyRate, flow_control
from sqlaqueue.postgresql.catalog import TableId
from sqlaqueue.queue.names import BEGUN, RATE
from sqlaqueue.queue.run import Key
from sqlaqueue.queue.spec import QueueSpec
from sqlaqueue.queue.strategy_protocol import LockSteps
from sqlaqueue.sql.engine import OURS, in_steps
from sqlaqueue.sql.portable import Span, clock, for_effect, later, ticking_clock
from sqlaqueue.sql.types import insert_or_replace, key_array

# -- rate rows ---------------------------------------------------------------------------------------------------------
# The rows of rates: when the next job of each key may begin.
#
# A rate is a GCRA (generic cell rate algorithm): one time for each key, which each beginning moves by the interval
# between two. How far it is ahead of the clock tells how much of the burst is used.


def begin_jobs(check: RateCheck, rows: sa.FromClause, after: sa.CTE | None = None) -> sa.Insert:
    """Return the statement that moves the times of the keys of jobs that begin.

    The keys are locked, so the newest rows are those that the claim has read.

    :param rows: the jobs that are admitted, with the hashes of their keys.
    :param after: the statement that is executed first. Each transaction writes the rates in the same order, so that no
        two of them wait for each other.
    """
    rate, table = check.job_key, check.spec.side_tables[RATE]
    key, moment = rows.c[check.name("key")], sa.DateTime(timezone=True)
    now: sa.ColumnElement[Any] = ticking_clock()
    named = [sa.literal(text, sa.Text()) for text in (check.spec.name, rate.name)]
    # One reading for both uses: between two of them, the row may have been waited for.
    clock = sa.select(now.label("now")).cte(check.name("clock"))
    read: Any = sa.select(clock.c.now).scalar_subquery()
    moved = read + _seconds(sa.func.count() * sa.literal(rate.interval, sa.Double()))
    begun = sa.select(*named, key, moved).where(key.is_not(None)).group_by(key).order_by(key)
    if after is not None:
        begun = begun.where(sa.select(sa.func.count()).select_from(after).scalar_subquery() >= _ZERO)
    inserted = insert(table).from_select(["queue", "rate", "key", "next_at"], begun)
    # The difference to the reading is how many intervals these jobs take.
    taken = inserted.excluded.next_at - read
    most = now + _seconds(sa.literal(rate.interval * rate.config.burst, sa.Double()))
    base = sa.func.least(sa.func.greatest(table.c.next_at, now), most, type_=moment)
    keys = list(table.primary_key)
    return inserted.on_conflict_do_update(index_elements=keys, set_={"next_at": base + taken})


_ZERO = sa.literal_column("0", sa.Integer())


def _seconds(number: sa.ColumnElement[Any]) -> sa.ColumnElement[Any]:
    return sa.func.make_interval(0, 0, 0, 0, 0, 0, number, type_=sa.Interval())


# -- reserve -----------------------------------------------------------------------------------------------------------
# Reservations of beginnings, which a held strategy commits before its jobs run.
#
# The transaction of the claim may be rolled back after handlers have called what the rate is for, and until it ends
# the others would not see what it has written.


def reservation(spec: QueueSpec, chosen: sa.ColumnElement[bool]) -> tuple[AnySelect, Sequence[sa.Insert]]:
    """Return the statements that reserve beginnings of jobs for a held strategy.

    The first locks the keys of the chosen jobs in all rates, and selects for each job its primary key, and for each
    rate its hash and how many jobs of that may begin. The others, one for each rate, record as many beginnings of a key
    as the bound array ``sqlaqueue_begun`` has its hash.
    """
    flow = flow_control(spec)
    checks = [check for check in (() if flow is None else checks_of(flow)) if isinstance(check, RateCheck)]
    columns = [column for check in checks for column in check.columns]
    jobs = sa.select(*(key.label(f"sqlaqueue_job_{number}") for number, key in enumerate(spec.keys)), *columns)
    rows = jobs.where(chosen).subquery("sqlaqueue_chosen")
    # In a record of its own: what the claim has recorded belongs to another transaction.
    record: Any = sa.bindparam(None, callable_=lambda: str(uuid.uuid4()), type_=sa.Text())
    found: list[sa.ColumnElement[Any]] = [rows.c[f"sqlaqueue_job_{number}"] for number in range(len(spec.keys))]
    for check in checks:
        found += [rows.c[check.name("key")], check.free(rows, record, lock=True)]
    array: Any = sa.bindparam(BEGUN, (), type_=key_array(sa.BigInteger()), unique=False)
    begins = [begin_jobs(check, _hashes(check, array)) for check in checks]
    return sa.select(*found), begins


def _hashes(check: RateCheck, array: Any) -> sa.FromClause:
    column = sa.column(check.name("key"), sa.BigInteger())
    return sa.func.unnest(array).table_valued(column, name="sqlaqueue_begun").render_derived("sqlaqueue_begun")


def hold_back(spec: QueueSpec, per: Sequence[str], jobs: Sequence[Key], delay: float) -> Iterator[sa.Insert]:
    """Yield the statements that hold back the keys of some jobs in all rates of these attributes.

    :param delay: seconds until when no job of the keys begins.
    """
    flow = flow_control(spec)
    for rate in [] if flow is None else flow.rates:
        if tuple(rate.names) == tuple(per):
            yield _hold_back(rate, jobs, delay)


def _hold_back(rate: KeyRate, jobs: Sequence[Key], delay: float) -> sa.Insert:
    spec, table, hashed = rate.spec, rate.spec.side_tables[RATE], rate.of(rate.spec.table)
    key = hashed.label("key")
    until = later(clock(), sa.literal(timedelta(seconds=delay), Span()))
    held = sa.select(key).where(spec.key_in(spec.keys, jobs), hashed.is_not(None)).distinct()
    # In the order in which claims write them, or the two could wait for each other. By name: the key of a rate without
    # attributes is a number, which ORDER BY would read as a position.
    keys = held.order_by(key).subquery("sqlaqueue_keys")
    rows = sa.select(sa.literal(spec.name), sa.literal(rate.name), keys.c.key, clock(), until)
    names = ["queue", "rate", "key", "next_at", "throttled_until"]
    # A claim passes a key that is locked. It cannot pass a row that is not committed yet, which it does not see: it
    # would wait for this transaction when it inserts that row itself.
    locked = for_effect(_lock(rate, keys.c.key))
    return insert_or_replace(table, (names, rows.where(locked)), raised=["throttled_until"])


def _lock(rate: KeyRate, key: sa.ColumnElement[int]) -> sa.ColumnElement[Any]:
    """Return the lock of a key that the function of the rates takes as well."""
    table = sa.cast(sa.cast(TableId(rate.spec.side_tables[RATE]), OID), sa.BigInteger())
    seed = sa.func.hashtextextended(sa.literal(f"{rate.spec.name} {rate.name}", sa.Text()), table)
    return sa.func.pg_advisory_xact_lock(sa.func.hashint8extended(key, seed))


def delete_idle(spec: QueueSpec) -> sa.Delete:
    """Return the statement that deletes the rows of rates whose time has passed, unless a claim has locked them."""
    table = spec.side_tables[RATE]
    passed = sa.and_(table.c.next_at < clock(), sa.func.coalesce(table.c.throttled_until < clock(), sa.true()))
    keys = [*table.primary_key]
    idle = sa.select(*keys).where(table.c.queue == spec.name, passed).order_by(*keys)
    chosen = idle.with_for_update(skip_locked=True).cte("sqlaqueue_idle")
    deleted = sa.delete(table).where(sa.tuple_(*keys).in_(sa.select(*chosen.c)))
    return in_steps(deleted.execution_options(**{OURS: True}), LockSteps(keys, idle, joins=True))
