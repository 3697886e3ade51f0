"""Strategies that each lack one safeguard; the conformance suite has to find them."""

# ruff: noqa: ARG004 - what a mutant leaves out, it does not look at

import uuid
from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa

from sqlaqueue.queue.options import STATES
from sqlaqueue.queue.spec import QueueSpec
from sqlaqueue.sql.portable import is_among_rows
from sqlaqueue.strategies import ClaimedJobs, ClaimRequest, ClaimStrategy, Settlement, Verb
from sqlaqueue.strategies.batch_select import BatchSelect
from sqlaqueue.strategies.delete_returning import DeleteReturning
from sqlaqueue.strategies.delete_row import DeleteRow
from sqlaqueue.strategies.update_status import UpdateStatus

Rows = sa.Select[Any]
Condition = sa.ColumnElement[bool]

# -- locks -------------------------------------------------------------------------------------------------------------


class _Waits(ClaimStrategy):
    @staticmethod
    def lock(spec: QueueSpec, rows: Rows, *others: sa.FromClause, skip_locked: bool = True) -> Rows:
        return rows.with_for_update(of=[spec.table, *others], key_share=True)


class UpdateStatusWaits(_Waits, UpdateStatus):
    """Without SKIP LOCKED."""


class BatchSelectWaits(_Waits, BatchSelect):
    """Without SKIP LOCKED."""


class DeleteReturningWaits(_Waits, DeleteReturning):
    """Without SKIP LOCKED."""


class DeleteRowWaits(_Waits, DeleteRow):
    """Without SKIP LOCKED."""


class CancelWaits(UpdateStatus):
    """Without SKIP LOCKED in cancel()."""

    def cancel(self, spec: QueueSpec, chosen: Rows) -> Verb:
        return UpdateStatusWaits().cancel(spec, chosen)


class ExtendWaits(UpdateStatus):
    """Without SKIP LOCKED in extend()."""

    def extend(self, spec: QueueSpec, held: ClaimedJobs, lease: Any) -> Verb:
        return UpdateStatusWaits().extend(spec, held, lease)


class _LocksKeys(ClaimStrategy):
    @staticmethod
    def lock(spec: QueueSpec, rows: Rows, *others: sa.FromClause, skip_locked: bool = True) -> Rows:
        return rows.with_for_update(of=[spec.table, *others], skip_locked=skip_locked)


class UpdateStatusLocksKeys(_LocksKeys, UpdateStatus):
    """FOR UPDATE in place of FOR NO KEY UPDATE."""


class BatchSelectLocksKeys(_LocksKeys, BatchSelect):
    """FOR UPDATE in place of FOR NO KEY UPDATE."""


class DeleteReturningLocksKeys(_LocksKeys, DeleteReturning):
    """FOR UPDATE in place of FOR NO KEY UPDATE."""


class DeleteRowSharesKeys(DeleteRow):
    """FOR NO KEY UPDATE where the full lock is needed."""

    lock = staticmethod(ClaimStrategy.lock)


class _LocksEverything(ClaimStrategy):
    @staticmethod
    def lock(spec: QueueSpec, rows: Rows, *others: sa.FromClause, skip_locked: bool = True) -> Rows:
        return rows.with_for_update(skip_locked=skip_locked, key_share=True)


class UpdateStatusLocksEverything(_LocksEverything, UpdateStatus):
    """Without OF: the second table of a filter is locked as well."""


class BatchSelectLocksEverything(_LocksEverything, BatchSelect):
    """Without OF: the second table of a filter is locked as well."""


class LocksNothing(UpdateStatus):
    """Picks rows without a lock, and updates what it has seen."""

    @staticmethod
    def lock(spec: QueueSpec, rows: Rows, *others: sa.FromClause, skip_locked: bool = True) -> Rows:
        return rows


class LocksOnlyTheMessage(DeleteReturning):
    """Without the second lock: a locked job is claimed."""

    @staticmethod
    def lock(spec: QueueSpec, rows: Rows, *others: sa.FromClause, skip_locked: bool = True) -> Rows:
        return rows.with_for_update(of=[*others] or spec.table, skip_locked=skip_locked, key_share=True)


class LocksOnlyTheJob(DeleteReturning):
    """Without the second lock: the message may have changed since the snapshot."""

    @staticmethod
    def lock(spec: QueueSpec, rows: Rows, *others: sa.FromClause, skip_locked: bool = True) -> Rows:
        return rows.with_for_update(of=spec.table, skip_locked=skip_locked, key_share=True)


# -- the subquery of picked rows ---------------------------------------------------------------------------------------


class _RunsAgain(ClaimStrategy):
    @classmethod
    def among(cls, spec: QueueSpec, columns: Sequence[sa.ColumnElement[Any]], picked: Rows | sa.CTE) -> Condition:
        if isinstance(picked, sa.CTE):
            return sa.tuple_(*columns).in_(picked.element)
        return super().among(spec, columns, picked)


class UpdateStatusRunsAgain(_RunsAgain, UpdateStatus):
    """IN (SELECT .. LIMIT .. FOR UPDATE): a join may execute it for each row."""


class DeleteRowRunsAgain(_RunsAgain, DeleteRow):
    """IN (SELECT .. LIMIT .. FOR UPDATE): a join may execute it for each row."""


class PurgeCorrelates(UpdateStatus):
    """Without correlate(None): the subquery is correlated with the DELETE and executed for each row."""

    @classmethod
    def among(cls, spec: QueueSpec, columns: Sequence[sa.ColumnElement[Any]], picked: Rows | sa.CTE) -> Condition:
        if isinstance(picked, sa.CTE):
            return super().among(spec, columns, picked)
        return is_among_rows(columns[0], picked)


class _Unsorted(ClaimStrategy):
    @staticmethod
    def in_claim_order(spec: QueueSpec, claimed: sa.FromClause, picked: sa.CTE | None = None) -> Rows:
        return sa.select(*claimed.c)


class UpdateStatusUnsorted(_Unsorted, UpdateStatus):
    """In the order of RETURNING."""


# -- fencing -----------------------------------------------------------------------------------------------------------


class ComparesNoToken(UpdateStatus):
    """Settles a run by the key alone."""

    def fence(self, spec: QueueSpec, held: ClaimedJobs) -> Condition:
        return sa.and_(ClaimStrategy.fence(self, spec, held), spec.in_state("processing"))


class ComparesTheTokenOnly(UpdateStatus):
    """Without the status: a rescued job keeps its token."""

    def fence(self, spec: QueueSpec, held: ClaimedJobs) -> Condition:
        return sa.or_(
            *(
                sa.and_(spec.key_in(spec.keys, keys), spec.columns["lease_token"] == token)
                for token, keys in held.claims
            )
        )


class OneTokenForAll(UpdateStatus):
    """One token for each statement instead of each execution."""

    @staticmethod
    def _claimed_values(request: ClaimRequest) -> dict[sa.Column[Any], Any]:
        values = UpdateStatus._claimed_values(request)
        return values | {request.spec.columns["lease_token"]: uuid.uuid4()}


class BlamesEverybody(UpdateStatus):
    """Every rescued job keeps its attempt, as if it had run alone."""

    @staticmethod
    def _ran_alone(spec: QueueSpec) -> Condition:
        return sa.true()


class BlamesNobody(UpdateStatus):
    """No rescued job keeps its attempt."""

    @staticmethod
    def _ran_alone(spec: QueueSpec) -> Condition:
        return sa.false()


class KeepsReleasedAttempts(UpdateStatus):
    """release() without returning the attempt."""

    def counted(self, attempts: sa.ColumnElement[Any], settlement: Settlement) -> sa.ColumnElement[Any] | None:
        return None


# -- messages ----------------------------------------------------------------------------------------------------------


class LosesReleasedMessages(DeleteReturning):
    """The message is not inserted again: for the triggers the row was pending all the time."""

    settle = ClaimStrategy.settle


class NeverReconciles(DeleteReturning):
    """What bypassed the triggers is not repaired."""

    reconcile = ClaimStrategy.reconcile


class DeleteRowSettlesAnyRun(DeleteRow):
    """Settles runs that an earlier transaction held."""

    def settle(self, spec: QueueSpec, held: ClaimedJobs, settlement: Settlement) -> Verb:
        now = sa.cast(sa.func.pg_current_xact_id(), sa.Text())
        claims: Any = [(now, keys) for _, keys in held.claims]
        return super().settle(spec, ClaimedJobs(claims, held.jobs), settlement)


# -- maintenance and administration ------------------------------------------------------------------------------------


class PurgesTooMuch(BatchSelect):
    """purge() without its limit."""

    def purge(self, spec: QueueSpec, chosen: Rows, states: Sequence[str], age: Any, limit: Any) -> Verb:
        return super().purge(spec, chosen, states, age, sa.literal(1000))


class RequeuesWithItsPast(BatchSelect):
    """requeue() without resetting the attempts."""

    def requeue(self, spec: QueueSpec, chosen: Rows) -> Verb:
        finished = self.pick(spec, chosen, *spec.keys).where(spec.finished)
        return sa.update(spec.model).where(self.among(spec, spec.keys, finished)).values(status="pending")


class ListsOneTable(DeleteRow):
    """list_jobs() of the rows, without the dead letters."""

    def list_jobs(self, spec: QueueSpec, chosen: Rows, states: Sequence[str] | None = None) -> Rows:
        every = super().list_jobs(spec, chosen, states).subquery()
        return sa.select(*every.c).where(every.c.state == "pending")


class ListsAllLetters(DeleteRow):
    """list_jobs() of all dead letters, whatever the filter."""

    def list_jobs(self, spec: QueueSpec, chosen: Rows, states: Sequence[str] | None = None) -> Rows:
        every = super().list_jobs(spec, sa.select(spec.model), states).subquery()
        some = super().list_jobs(spec, chosen, states)
        return some.union_all(sa.select(*every.c).where(every.c.state == "failed")).subquery().select().distinct()


class ListsEveryState(UpdateStatus):
    def list_jobs(self, spec: QueueSpec, chosen: Rows, states: Sequence[str] | None = None) -> Rows:
        return super().list_jobs(spec, chosen)


class ListsTwice(BatchSelect):
    """list_jobs() that joins each job with all owners."""

    def list_jobs(self, spec: QueueSpec, chosen: Rows, states: Sequence[str] | None = None) -> Rows:
        other = spec.table.metadata.tables["conformance_owner"].alias()
        return super().list_jobs(spec, chosen.join(other, sa.true()), states)


class ListsUnderALock(BatchSelect):
    """list_jobs() that locks what it shows."""

    def list_jobs(self, spec: QueueSpec, chosen: Rows, states: Sequence[str] | None = None) -> Rows:
        return super().list_jobs(spec, chosen.with_for_update(of=spec.table), states)


class ListsNoErrors(DeleteReturning):
    def list_jobs(self, spec: QueueSpec, chosen: Rows, states: Sequence[str] | None = None) -> Rows:
        listing = super().list_jobs(spec, chosen, states).subquery()
        return sa.select(*(column for column in listing.c if column.name != "last_error"))


class ListsKnownStates(BatchSelect):
    """list_jobs() without rows of an unknown status."""

    def list_jobs(self, spec: QueueSpec, chosen: Rows, states: Sequence[str] | None = None) -> Rows:
        return super().list_jobs(spec, chosen, STATES if states is None else states)
