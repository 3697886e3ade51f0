"""The rows that a claim under flow control takes: the first jobs that no limit, rate or order blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import ARRAY, OID, array

from sqlaqueue._typing import AnySelect
from sqlaqueue.flow_control.checks import ClaimRecord, LimitCheck, OrderCheck, RateCheck, checks_of, order_name
from sqlaqueue.flow_control.functions import CONTENDED, hold_function, slot_text
from sqlaqueue.flow_control.keys import FlowControl, flow_control
from sqlaqueue.flow_control.rates import begin_jobs
from sqlaqueue.flow_control.turns import Groups
from sqlaqueue.postgresql.claim_scan import few_rows, first_in_order, lateral_each
from sqlaqueue.postgresql.ddl import call
from sqlaqueue.postgresql.side_tables import key_text
from sqlaqueue.queue.names import TURN
from sqlaqueue.queue.spec import QueueSpec
from sqlaqueue.queue.strategy_protocol import ClaimRequest
from sqlaqueue.sql.portable import setting
from sqlaqueue.sql.types import RowLocation

# -- admitted ----------------------------------------------------------------------------------------------------------
# Claims under flow control: the first jobs that no limit, rate or order blocks.
#
# For each group (:mod:`~sqlaqueue.flow_control.turns`), jobs are read in order, and pass these steps one by one:
#
# 1. *Checked*: for each limit, rate and order, a function locks the key and counts in a new snapshot what runs. The
#    lock is an advisory one of the transaction, so no other claim admits jobs of the key before this one is committed.
#    A key that is locked already is passed over. Before it is locked, each key is looked at: a lock takes a place in a
#    table of the server, and there may be thousands of keys without room.
# 2. *Locked*: the row itself, in its newest version.
# 3. *Recorded*: the claim's record, a setting of the transaction, gets the job and its keys, so that the checks of the
#    next jobs count this one as well.
#
# The server executes them row by row, and stops when it has enough.


_AGAIN = "sqlaqueue_again"
"""Whether the claim may have admitted a candidate already."""

Lock = Callable[[AnySelect], AnySelect]


class Admitted:
    """The statement of one claim, in parts.

    :param waiting: a SELECT of pending jobs with the columns that the strategy needs, the primary key among them.
    :param lock: locks rows as the strategy does.
    """

    def __init__(self, request: ClaimRequest, flow: FlowControl, waiting: AnySelect, lock: Lock) -> None:
        self._spec: QueueSpec = request.spec
        self._flow, self._waiting, self._lock = flow, waiting, lock
        # With a larger window, a claim would look at many jobs after the whole queue has no room left.
        numbers = [sa.literal_column(str(number), sa.Integer()) for number in flow.most_at_once]
        self._limit = sa.func.least(request.limit, *numbers, type_=sa.Integer()) if numbers else request.limit
        self._checks = checks_of(flow)
        self._groups = Groups(flow, self._limit, one=request.few, cursor=request.scan_range)
        self._record = ClaimRecord(self._spec, request.token)
        self._is_joined = request.candidates.get_final_froms() != [self._spec.table]
        self._named = [str(name) for name, _ in waiting.subquery().c.items()]
        self._ordered = list(dict.fromkeys([*self._spec.claim_order, *(() if flow.order is None else flow.order.by)]))

    def rows(self) -> sa.CTE:
        """Return the jobs that are admitted, locked."""
        groups = self._groups.all
        kinds = [self._group(groups, part=False)]
        if self._groups.part is not None:
            kinds.append(self._group(groups, part=True))
        laterals = [
            lateral_each(kind.correlate(groups), f"sqlaqueue_kind_{number}") for number, kind in enumerate(kinds)
        ]
        each = lateral_each(sa.union_all(*(sa.select(*kind.c) for kind in laterals)), "sqlaqueue_each")
        rows = few_rows(each, self._limit, groups.join(each, sa.true())).cte("sqlaqueue_admitted")
        # The rows of a CTE come in the order in which it has found them.
        turns = [] if self._flow.turn is None else [sa.func.row_number().over().label(TURN)]
        picked = sa.select(*(rows.c[name] for name in self._named), *turns)
        begun = self._begun(rows)
        return (picked.add_cte(*begun) if begun else picked).cte("sqlaqueue_picked")

    def _begun(self, rows: sa.CTE) -> list[sa.CTE]:
        """Return the statements that record the beginning of jobs with their rates."""
        rates = [check for check in self._checks if isinstance(check, RateCheck)]
        begun: list[sa.CTE] = []
        for check in rates:
            statement = begin_jobs(check, rows, begun[-1] if begun else None)
            begun.append(statement.returning(sa.literal_column("1")).cte(check.name("begun")))
        return begun

    def _group(self, groups: sa.CTE, *, part: bool) -> AnySelect:
        """Return the jobs of a group that may be admitted, locked.

        :param part: of a part, or of a window.
        """
        checked = self._checked(self._candidates(groups, part=part))
        locked = lateral_each(self._locked(checked), "sqlaqueue_locked")
        keys = [checked.c[check.name("key")] for check in self._checks]
        # A job without a limit runs beside those that have one. Where slots are counted, it has none.
        unlimited = not self._spec.strategy.holds_transaction
        recorded = self._record.with_job(checked, self._checks, itself=self._visits_twice, unlimited=unlimited)
        found = sa.select(*keys, recorded.label("sqlaqueue_recorded"), *(locked.c[name] for name in self._named))
        found = found.select_from(checked.join(locked, sa.true()))
        if self._groups.turn is None:
            return found
        first = groups.c.cycle == sa.literal_column("1")
        return found.limit(sa.case((first, self._turn_size(groups)), else_=self._limit))

    def _turn_size(self, groups: sa.CTE) -> sa.ColumnElement[int]:
        """Return how many jobs the key of a group may have in the first cycle."""
        level, turn = groups.c.level, groups.c.turn
        # The key whose turn had begun before comes once more at the end of the cycle, for its next turn.
        taken = sa.case((groups.c.turns_restarted == sa.literal_column("0"), self._groups.taken(level, turn)), else_=0)
        left = self._groups.turn_size(level, turn) - taken
        return sa.func.greatest(left, 0, type_=sa.Integer())

    def _candidates(self, groups: sa.CTE, *, part: bool) -> sa.FromClause:
        """Return the first jobs of a group."""
        spec, rows, flow = self._spec, self._spec.table, self._flow
        by = [column.label(order_name(column)) for column in self._ordered]
        visited = sa.or_(groups.c.cycle > sa.literal_column("1"), groups.c.turns_restarted > sa.literal_column("0"))
        again = sa.true() if part or self._is_joined else visited
        of_checks = [column for check in self._checks for column in check.columns]
        candidates = self._waiting.add_columns(*by, *of_checks, again.label(_AGAIN), *self._places())
        candidates = candidates.where(
            *spec.due(spec.columns.get("run_at")),
            *self._groups.of_turn(rows, groups.c.turn),
        )
        whole = self._groups.one or (self._groups.cursor is not None and not part)
        order = [*spec.claim_order] if whole else [*self._groups.order]
        level = groups.c.level
        if not part:
            in_window = candidates.where(groups.c.part.is_(None), *self._groups.in_window(rows, level))
            first = first_in_order(in_window, order, self._groups.window)
        else:
            assert self._groups.part is not None  # noqa: S101 - only asked for where there are parts
            of_part = candidates.where(
                *self._groups.of_level(rows, level), self._groups.part.hashed(rows) == groups.c.part
            )
            # The head of a key need not be the first one that is due.
            order = order if flow.order is None else [*flow.order.by]
            first = first_in_order(of_part, order, self._limit)
        return first.correlate(groups).subquery("sqlaqueue_candidate")

    def _places(self) -> list[sa.ColumnElement[Any]]:
        """Return where the rows are, for a function that locks them."""
        return []

    def _checked(self, candidates: sa.FromClause) -> sa.FromClause:
        """Return the candidates that every check allows; a check is made only of what those before it allow."""
        rows, before = candidates, self._not_before(candidates)
        # Keys are locked only for a job that has room in all of them; a single check looks before it locks.
        rounds = [True] if len(self._checks) == 1 else [False, True]
        for lock, check in product(rounds, self._checks):
            made = sa.select(*rows.c, check.free(rows, self._record.claim, lock=lock)).where(*before)
            rows = made.subquery(f"sqlaqueue_{'locked' if lock else 'looked'}_{check.number}")
            before = [check.allows(rows, lock=lock)]
        return sa.select(*rows.c).where(*before).subquery("sqlaqueue_checked")

    def _not_before(self, candidates: sa.FromClause) -> list[sa.ColumnElement[bool]]:
        """Return the conditions that a candidate has not been admitted before."""
        if not self._visits_twice:
            return []
        return [~sa.case((candidates.c[_AGAIN], self._record.has(candidates)), else_=sa.false())]

    @property
    def _visits_twice(self) -> bool:
        """Whether a claim may find a job twice: in two groups, or by two rows of a table that its filter joins."""
        return self._is_joined or self._groups.part is not None or self._groups.turn is not None

    def _locked(self, checked: sa.FromClause) -> AnySelect:
        """Return the row of a candidate, locked, if it is still what it was."""
        spec, table = self._spec, self._spec.table
        same = [key == checked.c[order_name(key)] for key in spec.keys]
        same += [
            check.job_key.of(table).is_not_distinct_from(checked.c[check.name("key")])
            for check in self._checks
            if check.job_key.names
        ]
        rows = self._waiting.where(*same, *spec.due(spec.columns.get("run_at")))
        if self._is_joined:
            rows = rows.limit(sa.literal_column("1", sa.Integer()))
        return self._lock(rows).correlate(checked)


def was_contended() -> sa.ColumnElement[bool]:
    """Return the condition that an earlier claim of this transaction has passed over a locked key."""
    contended = setting(CONTENDED, sa.true())
    return sa.func.coalesce(contended == "on", sa.false())


# -- held admitted -----------------------------------------------------------------------------------------------------
# Claims under flow control by strategies whose transaction holds the jobs.
#
# A function locks each candidate together with a slot of each of its keys (:mod:`sqlaqueue.flow_control.functions`),
# or nothing. Rates are only looked at: the transaction may be rolled back after its jobs have begun, so a Consumer
# reserves the beginnings in a transaction of their own.


_HELD = "sqlaqueue_held"


class HeldAdmitted(Admitted):
    """The statement of one claim of a held strategy, in parts."""

    def _begun(self, rows: sa.CTE) -> list[sa.CTE]:
        return []

    def _places(self) -> list[sa.ColumnElement[Any]]:
        job, *messages = self._spec.strategy.locked_tables(self._spec)
        places = [("row", job, "ctid", RowLocation()), ("part", job, "tableoid", OID())]
        places += [("message", table, "ctid", RowLocation()) for table in messages]
        return [_system_column(table, name, type_).label(f"sqlaqueue_{what}") for what, table, name, type_ in places]

    def _checked(self, candidates: sa.FromClause) -> sa.FromClause:
        rows, before = candidates, self._not_before(candidates)
        for check in self._checks:
            if isinstance(check, RateCheck):
                looked = sa.select(*rows.c, check.free(rows, self._record.claim, lock=False)).where(*before)
                rows = looked.subquery(f"sqlaqueue_looked_{check.number}")
                before = [check.allows(rows, lock=False)]
        order = next((check for check in self._checks if isinstance(check, OrderCheck)), None)
        limits = [check for check in self._checks if isinstance(check, LimitCheck)]
        if order is not None or limits:
            job = key_text(rows.c[order_name(key)] for key in self._spec.keys)
            places = (rows.c[place.name] for place in self._places())
            held = call(
                hold_function(self._spec),
                self._spec.table,
                self._record.claim,
                *places,
                job,
                sa.cast(sa.null(), sa.BigInteger()) if order is None else rows.c[order.name("key")],
                sa.literal_column(str(limits[0].number if limits else 0), sa.Integer()),
                _array([sa.literal(slot_text(check.job_key), sa.Text()) for check in limits], sa.Text()),
                _array([rows.c[check.name("key")] for check in limits], sa.BigInteger()),
                _array([rows.c[check.name("most")] for check in limits], sa.Integer()),
                _array([sa.literal(check.job_key.changes) for check in limits], sa.Boolean()),
                type_=sa.Boolean(),
            )
            rows = sa.select(*rows.c, held.label(_HELD)).where(*before).subquery("sqlaqueue_looked")
            before = [rows.c[_HELD]]
        return sa.select(*rows.c).where(*before).subquery("sqlaqueue_checked")


def _array(values: Sequence[Any], type_: Any) -> sa.ColumnElement[Any]:
    # Without elements ARRAY[] has no type.
    return sa.cast(array(values), ARRAY(type_))


def _system_column(table: sa.Table, name: str, type_: Any) -> sa.ColumnClause[Any]:
    column: sa.ColumnClause[Any] = sa.column(name, type_)
    vars(column)["table"] = table
    return column


def admit(request: ClaimRequest, waiting: AnySelect, *others: sa.FromClause) -> sa.CTE:
    """Return the first rows of ``waiting`` that the queue's flow control admits, locked with those of ``others``."""
    spec: QueueSpec = request.spec
    flow = flow_control(spec)
    assert flow is not None  # noqa: S101 - only called for queues with flow control
    admitted = HeldAdmitted if spec.strategy.holds_transaction else Admitted
    return admitted(request, flow, waiting, lambda rows: spec.strategy.lock(spec, rows, *others)).rows()
