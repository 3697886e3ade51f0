"""Claim by UPDATE: a lease with a token, and no open transaction while a job runs.

* **Stores** the status, the lease's end and the claim's token in the row itself.
* **Claims** by locking the first due rows (SKIP LOCKED) and updating them in one statement.
* **While a job runs** nothing is locked; a live worker extends its leases.
* **When a worker dies** its leases expire, and any Consumer rescues the jobs. Jobs that were claimed together are
  claimed one by one from then on, since one of them may have killed the worker.

Each execution of a claim has a new token. A statement that ends or extends a run compares it, so a worker that lost
its lease changes nothing. Martin Kleppmann describes fencing tokens in "How to do distributed locking" (2016).
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import sqlalchemy as sa

from sqlaqueue._typing import AnySelect
from sqlaqueue.exc import ConfigurationError
from sqlaqueue.queue.run import Key
from sqlaqueue.queue.spec import QueueSpec
from sqlaqueue.queue.strategy_protocol import (
    ChangeIfUnique,
    ClaimedJobs,
    ClaimRequest,
    JudgeSteps,
    LockSteps,
    RescueSteps,
    Settlement,
    Verb,
)
from sqlaqueue.sql.engine import in_steps
from sqlaqueue.sql.portable import after_epoch, clock, converted, greatest, later
from sqlaqueue.strategies.base import ClaimStrategy, cancels_behind
from sqlaqueue.strategies.columns import add_index, named
from sqlaqueue.strategies.listing import has_history, record_rescued, run_columns
from sqlaqueue.strategies.unique_key import DUPLICATE, UniqueKey, columns_to_judge, judge, unique_key, update_judged

# -- claim tokens ------------------------------------------------------------------------------------------------------
# The tokens of claims, and what a token that a dead worker left behind reveals about its run.
#
# Each execution of a claim has a new token. A rescued job keeps its last token while it waits. The kind of the token
# is in its UUID version, so it needs no column:
#
# * **alone**, version 4: while the job ran, its worker ran no job of another claim;
# * **shared**, version 8: its worker ran jobs of several claims at the same time;
# * **several quarantined jobs**, version 8: as shared, and all jobs of the claim had been quarantined before. A job
#   that waits with such a token has lost its worker a second time, and runs alone from then on.


_SHARED, _SEVERAL_QUARANTINED = 0x81, 0x82
"""The version, and the digit after it."""

_VERSION_AT = 15
"""The position of the version in the text of a UUID, from 1."""

alone_token = uuid.uuid4


def shared_token() -> uuid.UUID:
    """Return a token for a claim of a worker that runs jobs of several claims at the same time."""
    return _token(_SHARED)


def several_quarantined_token() -> uuid.UUID:
    """Return a token for a claim of several quarantined jobs, by a worker that runs other jobs as well."""
    return _token(_SEVERAL_QUARANTINED)


def ran_beside_others(token: sa.ColumnElement[uuid.UUID]) -> sa.ColumnElement[bool]:
    """Return the condition that a job's worker ran jobs of several claims at the same time."""
    return _digits(token, 1) == sa.literal_column("'8'", sa.Text())


def lost_twice(spec: QueueSpec) -> sa.ColumnElement[bool]:
    """Return the condition that a job lost its worker while it ran with other quarantined jobs."""
    return _digits(spec.columns["lease_token"], 2) == sa.literal_column(f"'{_SEVERAL_QUARANTINED:x}'", sa.Text())


def _token(kind: int) -> uuid.UUID:
    above, ninth_byte = 72, 56
    # MariaDB refuses a UUID of version 8 whose ninth byte is 0x80, which one in 64 would have; so it is odd.
    return uuid.UUID(int=uuid.uuid4().int & ~(0xFF << above) | kind << above | 1 << ninth_byte)


def _digits(token: sa.ColumnElement[uuid.UUID], number: int) -> sa.ColumnElement[str]:
    digits: sa.ColumnElement[str] = sa.func.substr(converted(token, sa.Text()), _VERSION_AT, number)
    return digits


LEASE_EXPIRED = "the lease expired: its worker died or lost the database"
"""The ``last_error`` of a rescued job."""

_WAITS = "sqlaqueue_waits"
_WAITS_SINCE = after_epoch(0)
"""The end of the lease of a job that waits for its duplicate. No run has such a lease."""


def waits_for_duplicate(spec: QueueSpec) -> sa.ColumnElement[bool]:
    """Return the condition that a job waits for its duplicate, as ``Unique(on_return="wait")`` says."""
    expires = sa.func.coalesce(spec.columns["lease_expires_at"] <= _WAITS_SINCE, sa.false())
    return sa.and_(spec.in_state("processing"), expires)


def has_expired(expires: sa.ColumnElement[Any], at: sa.ColumnElement[Any]) -> sa.ColumnElement[bool]:
    """Return the condition that a lease has expired at a moment, and is not that of a job that waits for its duplicate.

    :param expires: the end of the lease.
    """
    return sa.and_(expires > _WAITS_SINCE, expires <= at)


class UpdateStatus(ClaimStrategy):
    """The strategy for long handlers, network calls and many workers."""

    name: ClassVar[str] = "update_status"
    supports_scan_range: ClassVar[bool] = True
    supports_claim_token: ClassVar[bool] = True
    supports_flow_control: ClassVar[bool] = True
    tells_running_apart: ClassVar[bool] = True
    required_roles: ClassVar[Mapping[str, str]] = {"status": 'strategy "update_status"'}

    def attach(self, spec: QueueSpec) -> None:
        """Add three partial indexes: of pending rows, of quarantined ones among them, and of processing rows."""
        super().attach(spec)
        if spec.config.states.processing is None:
            msg = (
                f'{spec.model.__name__}: strategy "update_status" needs a status value for running jobs; '
                "give one with QueueConfig(states=States(processing=...))"
            )
            raise ConfigurationError(msg)
        add_index(spec, "claim", spec.claim_order, where=spec.in_state("pending"))
        quarantined = self.quarantined(spec)
        if quarantined is not None:
            where = sa.and_(spec.in_state("pending"), quarantined)
            add_index(spec, "quarantined", spec.claim_order, where, compared=[spec.columns["lease_token"]])
        if spec.has("lease_expires_at"):
            add_index(spec, "lease", [spec.columns["lease_expires_at"]], where=spec.in_state("processing"))

    def claim(self, request: ClaimRequest) -> AnySelect:
        """Lock the first due rows and set them to processing, in one statement."""
        spec = request.spec
        here, picked = spec.on_shard(spec.table), self.picked(request)
        claimed = (
            sa.update(spec.table)
            .where(self.among(spec, spec.keys, picked), *here)
            .values(self._claimed_values(request))
            .returning(*named(spec.table.c))
            .cte("sqlaqueue_claimed")
        )
        return self.in_claim_order(spec, claimed, picked)

    def claim_in_steps(self, request: ClaimRequest) -> tuple[AnySelect, sa.Update]:
        """Return a SELECT of the keys of pending rows, and the UPDATE that sets rows to processing."""
        return self._waiting(request), sa.update(request.spec.table).values(self._claimed_values(request))

    def picked(self, request: ClaimRequest) -> sa.CTE:
        """Return the keys of the first due rows, locked."""
        return self.take(request, self._waiting(request), request.spec.table)

    def _waiting(self, request: ClaimRequest) -> AnySelect:
        spec = request.spec
        waiting = self.pick(spec, request.candidates, *spec.keys)
        return waiting.where(spec.in_state("pending"), *spec.on_shard(spec.table))

    @staticmethod
    def _claimed_values(request: ClaimRequest) -> dict[sa.Column[Any], Any]:
        spec = request.spec
        values: dict[str, Any] = {"status": spec.status_value("processing"), "claimed_by": request.worker}
        if spec.has("attempts"):
            values["attempts"] = sa.func.coalesce(spec.columns["attempts"], 0) + 1
        if spec.has("lease_expires_at"):
            values["lease_expires_at"] = later(clock(), request.lease)
        if spec.has("started_at"):
            values["started_at"] = clock()
        if spec.has("lease_token"):
            values["lease_token"] = request.token
        return {spec.columns[role]: value for role, value in values.items() if spec.has(role)}

    def quarantined(self, spec: QueueSpec) -> sa.ColumnElement[bool] | None:
        """Return the condition that a pending row has a token: a rescued job keeps its last one."""
        if not spec.has("lease_token"):
            return None
        return spec.columns["lease_token"].is_not(None)

    def fence(self, spec: QueueSpec, held: ClaimedJobs) -> sa.ColumnElement[bool]:
        """Return the condition that a row still has the claim's token and is processing.

        The status is compared as well because plain SQL may have settled the row and left the token.
        """
        running = self._is_running(spec)
        if not spec.has("lease_token"):
            return sa.and_(super().fence(spec, held), running)
        claims = (
            sa.and_(spec.key_in(spec.keys, keys), spec.columns["lease_token"] == token) for token, keys in held.claims
        )
        return sa.and_(sa.or_(*claims), running)

    @staticmethod
    def _is_running(spec: QueueSpec) -> sa.ColumnElement[bool]:
        """Return the condition that a row is processing, in a form that the planner cannot use for an index.

        It is for rows that are found by their key. The planner would prefer the index of processing rows, in which it
        expects few entries; while an old snapshot is held, that index has an entry for every run since.
        """
        return sa.case((spec.in_state("processing"), sa.true()))

    def counted(self, attempts: sa.ColumnElement[Any], settlement: Settlement) -> sa.ColumnElement[Any] | None:
        """Return the count without this attempt if it does not count; otherwise None, as the claim has counted it."""
        if isinstance(settlement.starts, int) and settlement.starts == 0:
            return greatest(attempts - 1, 0)
        return None

    def extend(self, spec: QueueSpec, held: ClaimedJobs, lease: Any) -> Verb:
        """Extend leases, passing over locked rows.

        A handler that has flushed its own row holds its lock until it commits. Waiting for that lock would keep the
        leases of all other jobs from being extended. A locked row cannot be rescued either.
        """
        expires = spec.column("lease_expires_at", "extend()")
        mine = sa.select(*(getattr(spec.model, spec.mapper.get_property_by_column(key).key) for key in spec.keys))
        mine = mine.where(self.fence(spec, held)).order_by(*spec.keys)
        return self._change_locked(spec, sa.update(spec.model), mine).values({expires: later(clock(), lease)})

    def settle(self, spec: QueueSpec, held: ClaimedJobs, settlement: Settlement) -> Verb:
        """Settle the runs; a job that does not count while it runs comes back only if no duplicate of it counts."""
        unique = unique_key(spec)
        if unique is None or settlement.state != "pending" or not unique.returns_from_runs:
            return super().settle(spec, held, settlement)
        mine = sa.select(*named(spec.keys), *columns_to_judge(spec, unique)).where(self.fence(spec, held))
        back = {**self.settled_values(spec, settlement), spec.columns["status"]: spec.literal("pending")}

        def change(judged: Any) -> ChangeIfUnique:
            if unique.config.on_return != "cancel":
                return ChangeIfUnique(back, back | self._waiting_values(spec))
            instead = self.values_for_duplicate(spec, judged, settlement.error)
            return ChangeIfUnique(back, self._attempts_in(spec, back) | instead)

        return self._change_if_unique(
            unique, JudgeSteps(spec, mine.order_by(*spec.keys), waits=True, more=(), change=change)
        )

    @staticmethod
    def _attempts_in(spec: QueueSpec, values: Mapping[sa.Column[Any], Any]) -> dict[sa.Column[Any], Any]:
        """Return the count of attempts among some values."""
        return {column: value for column, value in values.items() if column is spec.columns.get("attempts")}

    @staticmethod
    def _waiting_values(spec: QueueSpec) -> dict[sa.Column[Any], Any]:
        """Return the values of a job that waits for its duplicate: rescues find it by its lease, which has no owner."""
        values = {"status": spec.literal("processing"), "lease_expires_at": _WAITS_SINCE, "finished_at": None}
        return {spec.columns[role]: value for role, value in values.items() if spec.has(role)}

    def not_running(self, spec: QueueSpec) -> sa.ColumnElement[bool]:
        """Return the condition that a job is pending, or waits for its duplicate."""
        unique, pending = unique_key(spec), super().not_running(spec)
        if unique is None or not (unique.returns_from_runs and spec.has("lease_expires_at")):
            return pending
        return sa.or_(pending, waits_for_duplicate(spec))

    def rescue(self, spec: QueueSpec) -> Verb:
        """Set jobs with an expired lease to pending, or to failed if a job ran alone and has no attempt left.

        A job ran alone if no other job of its claim was running, and its worker ran no job of another claim. Any other
        job gets its attempt back, since it is not known which job killed the worker. Both keep the token, which
        quarantines them.
        """
        return self._rescue_and_fail(spec, None)

    def rescue_some(self, spec: QueueSpec, keys: Sequence[Key]) -> Verb:
        """Return the rescue of those of some jobs whose lease has expired."""
        return self._rescue_and_fail(spec, keys)

    def _rescue_and_fail(self, spec: QueueSpec, keys: Sequence[Key] | None) -> Verb:
        rescue = self._rescue(spec, keys)
        if not cancels_behind(spec):
            return rescue
        expired = [spec.in_state("processing"), spec.column("lease_expires_at", "rescue()") <= clock()]
        among = [] if keys is None else [spec.key_in(spec.keys, keys)]
        spent = sa.and_(*expired, *among, ~waits_for_duplicate(spec), self._is_spent(spec, self._ran_alone(spec)))
        return self.failing(spec, rescue, spent, waits=False)

    def _rescue(self, spec: QueueSpec, keys: Sequence[Key] | None) -> Verb:
        status, expires = spec.columns["status"], spec.column("lease_expires_at", "rescue()")
        unique = unique_key(spec)
        if unique is not None and unique.returns_from_runs:
            return self._rescue_unless_duplicate(spec, unique, None if keys is None else spec.key_in(spec.keys, keys))
        job = spec.table.alias("sqlaqueue_expired_job")
        among = [] if keys is None else [spec.key_in([job.c[key.key] for key in spec.keys], keys)]
        rows = (
            sa.select(*(job.c[key.key] for key in spec.keys), *run_columns(spec, job))
            .where(job.c[status.key] == spec.literal("processing"), job.c[expires.key] <= clock(), *spec.on_shard(job))
            .where(*among)
            .order_by(*(job.c[key.key] for key in spec.keys))
        )
        expired = rows.with_for_update(of=job, skip_locked=True, key_share=True).cte("sqlaqueue_expired")
        # With an INSERT beside it, the UPDATE is a CTE, in which it can name the table only.
        update = sa.update(spec.table if has_history(spec) else spec.model)
        values = self._rescued_values(spec, expires)
        rescued = update.where(
            sa.and_(*(key == expired.c[key.key] for key in spec.keys)),
            self._is_running(spec),
            *spec.on_shard(spec.table),
        ).values(values)
        if not has_history(spec):
            return in_steps(rescued, LockSteps(spec.keys, rows, values=values, joins=True))
        verb = self.with_insert(spec, rescued, record_rescued(spec, expired, LEASE_EXPIRED))
        return in_steps(verb, RescueSteps(spec, rows, update.where(self._is_running(spec)), values))

    def _rescue_unless_duplicate(
        self, spec: QueueSpec, unique: UniqueKey, among: sa.ColumnElement[bool] | None = None
    ) -> AnySelect:
        """Return the rescue of jobs that come back only if no duplicate of them counts.

        :param among: limits the jobs; None for all.
        """
        expires, waits = spec.columns["lease_expires_at"], waits_for_duplicate(spec)
        fails = sa.and_(~waits, self._is_spent(spec, self._ran_alone(spec)))
        last_run = run_columns(spec, spec.table)
        expired = (
            sa.select(*named(spec.keys), waits.label(_WAITS), *columns_to_judge(spec, unique, ~fails), *last_run)
            .where(spec.in_state("processing"), expires <= clock(), sa.true() if among is None else among)
            .order_by(*spec.keys)
        )
        judged = judge(spec, unique, self.lock(spec, expired), _WAITS, *(column.name for column in last_run))
        rescued, status = self._rescued_values(spec, expires), spec.columns["status"]

        def change(judged: Any) -> ChangeIfUnique:
            waited = judged.c[_WAITS]
            back: dict[sa.Column[Any], Any] = {
                column: sa.case((waited, column), else_=value) for column, value in rescued.items()
            }
            back |= {expires: None, status: sa.case((waited, spec.literal("pending")), else_=rescued[status])}
            if unique.config.on_return == "cancel":
                return ChangeIfUnique(back, self._attempts_in(spec, rescued) | self.values_for_duplicate(spec, judged))
            stays = sa.and_(waited, judged.c[DUPLICATE].is_not(None))
            return ChangeIfUnique(back, rescued | self._waiting_values(spec), [~stays])

        changed = change(judged)
        verb = self._recorded(spec, judged, update_judged(spec, judged, changed).where(*changed.where))
        steps = JudgeSteps(spec, expired, waits=False, more=[_WAITS], change=change, rescues=True)
        return in_steps(verb, steps)

    @staticmethod
    def _recorded(spec: QueueSpec, judged: sa.CTE, verb: AnySelect) -> AnySelect:
        """Return a rescue that also inserts the attempts; a job that has waited for its duplicate had no run."""
        if not has_history(spec):
            return verb
        return verb.add_cte(record_rescued(spec, judged, LEASE_EXPIRED, ~judged.c[_WAITS]).cte("sqlaqueue_recorded"))

    def _rescued_values(self, spec: QueueSpec, expires: sa.Column[Any]) -> dict[sa.Column[Any], Any]:
        status = spec.columns["status"]
        alone = self._ran_alone(spec)
        spent = self._is_spent(spec, alone)
        # A CASE of literals has type text, which an enum column refuses. With the column as its last branch it has the
        # column's type, whatever type the model declares.
        branches = ((spent, spec.literal("failed")), (sa.true(), spec.literal("pending")))
        # Citus refuses a function of time in the CASE of an UPDATE. It has no queues that notify.
        moment = clock() if spec.config.notify else sa.select(clock()).scalar_subquery()
        values: dict[str, Any] = {
            "status": sa.case(*branches, else_=status),
            "claimed_by": None,
            "last_error": spec.truncated_error(sa.literal(LEASE_EXPIRED)),
            "finished_at": sa.case((spent, moment), else_=sa.null()),
        }
        if spec.keeps_claimed_by:
            del values["claimed_by"]
        if spec.has("attempts"):
            attempts = spec.columns["attempts"]
            values["attempts"] = sa.case((alone, attempts), else_=greatest(attempts - 1, 0))
        if spec.has("lease_token"):
            token = spec.columns["lease_token"]
            values["lease_token"] = sa.case((spent, sa.null()), else_=token)
        rescued = {spec.columns[role]: value for role, value in values.items() if spec.has(role)}
        return {**rescued, expires: None}

    def _is_spent(self, spec: QueueSpec, alone: sa.ColumnElement[bool]) -> sa.ColumnElement[bool]:
        """Return the condition that a job ran alone and has no attempt left."""
        return sa.and_(alone, self._attempts_spent(spec)) if spec.has("attempts") else sa.false()

    @staticmethod
    def _ran_alone(spec: QueueSpec) -> sa.ColumnElement[bool]:
        if not spec.has("lease_token"):
            return sa.true()
        mate, token = spec.table.alias("sqlaqueue_mate"), spec.columns["lease_token"]
        status, tokens = mate.c[spec.columns["status"].key], mate.c[token.key]
        running = sa.and_(status == spec.literal("processing"), tokens.is_not(None))
        quarantined = sa.and_(status == spec.literal("pending"), tokens.is_not(None))
        # All tokens of several jobs at once: a subquery for each expired job would scan the processing rows each time.
        some = sa.select(tokens).where(sa.or_(running, quarantined), *spec.on_shard(mate))
        several = some.group_by(tokens).having(sa.func.count() > 1)
        return sa.or_(token.is_(None), sa.and_(~ran_beside_others(token), token.not_in(several)))

    @staticmethod
    def _attempts_spent(spec: QueueSpec) -> sa.ColumnElement[bool]:
        limit: Any = sa.literal(spec.config.max_attempts)
        if spec.has("max_attempts"):
            limit = sa.func.coalesce(spec.columns["max_attempts"], limit)
        spent: sa.ColumnElement[bool] = spec.columns["attempts"] >= limit
        return spent
