"""Deleting finished jobs whose time is over: a few in each transaction, the oldest first.

A walk goes through the jobs of one state by their age, from the oldest to those that are just old enough, and then
waits for more to become so. What it could not delete it leaves behind: rows that somebody has locked, and those to
which others refer. It comes back to these an hour later, in the next walk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from sqlaqueue._typing import AnySelect
from sqlaqueue.consumer.settings import Plan
from sqlaqueue.consumer.settling.settle import QUIET
from sqlaqueue.keys import Key, key_text
from sqlaqueue.log import fields, logger
from sqlaqueue.queue.backend import DEAD_LETTER, ForeignKey, backend
from sqlaqueue.queue.retry_policies import seconds
from sqlaqueue.queue.spec import QueueSpec, clock
from sqlaqueue.statements.returning import returning_keys
from sqlaqueue.strategies.parts.retention_index import index_name

BATCH = 500
"""How many jobs are deleted at once, at most."""

WALK = 3600.0
"""Seconds between two beginnings of a walk."""

MOST_LEFT = 100
"""How many jobs that cannot be deleted are remembered one by one."""

_LONG = 0.25
"""Seconds that one batch may take before the next one is made smaller: the keeper has other things to do as well."""

_PATIENCE = 2.0
_OF_A_LEASE = 6
"""Which part of a lease one batch may take at most: the same thread extends leases."""


@dataclass(slots=True)
class Walk:
    """The walk through the finished jobs of one state."""

    state: str
    age: timedelta
    limit: int = BATCH
    since: datetime | None = None
    """All that ended before has been looked at."""
    left: list[Key] = field(default_factory=list)
    """What could not be deleted, and is not older than ``since``."""
    begins_at: float = float("-inf")
    """When it is time to begin from the oldest again."""

    is_new: bool = True
    """It has not come to its end since it began from the oldest."""

    def begin(self, now: float) -> None:
        """Begin from the oldest."""
        self.since, self.begins_at, self.is_new = None, now + WALK, True
        self.left.clear()

    def ends(self) -> bool:
        """Note that there is nothing more to delete; return whether that is so for the first time in this walk."""
        was_new, self.is_new = self.is_new, False
        return was_new

    def went(self, deleted: int, newest: datetime | None, bound: datetime | None, took: float) -> bool:
        """Note what a batch has deleted; return whether there may be more.

        :param newest: the end of the job that ended last among these, where that is known.
        :param bound: the time before which a job had to be over.
        """
        more = deleted >= self.limit
        self.since = (newest if more else bound) or self.since
        if took > _LONG:
            self.limit = max(1, self.limit // 2)
        else:
            self.limit = min(BATCH, self.limit * 2)
        return more

    def failed(self) -> bool:
        """Note that a batch could not be deleted; return whether it was a single job, and is the one to blame."""
        alone = self.limit == 1
        self.limit = max(1, self.limit // 2)
        return alone

    def leave(self, key: Key, ended_at: datetime) -> bool:
        """Go on without a job; return whether to pause, for there are more of these than can be remembered."""
        self.left.append(key)
        if len(self.left) < MOST_LEFT:
            return False
        self.since = ended_at + timedelta(microseconds=1)
        self.left.clear()
        return True


class Retention:
    """What a Consumer has to delete, and what it knows of that."""

    def __init__(self, spec: QueueSpec) -> None:
        self.walks = [
            Walk(state, timedelta(seconds=seconds(age)), BATCH) for state, age in spec.config.retention.items()
        ]
        self._spec = spec
        self._ready = False
        self._references: dict[str, sa.ColumnElement[bool]] = {}
        self._said: set[str] = set()

    def say_once(self, what: str, message: str, *arguments: object) -> None:
        """Write a warning into the log, unless it has been written about the same."""
        if what not in self._said:
            self._said.add(what)
            logger.warning(message, *arguments, extra=fields("retention_stopped", queue=self._spec.name))

    # -- one batch ---------------------------------------------------------------------------------------------

    def look_around(self, session: Session, plan: Plan) -> bool:
        """Ask the database for the index, and for foreign keys that forbid to delete; return whether to go on."""
        spec = self._spec
        connection = session.connection(bind_arguments=plan.bind)
        table = spec.table if spec.has("status") else spec.side_tables[DEAD_LETTER]
        self._ready = backend().checks.has_index(connection, table, index_name(table))
        if self._ready:
            known = backend().checks.foreign_keys_to(connection, table)
            self._references = {
                each.name: condition for each in known if (condition := _refers(spec, each)) is not None
            }
        else:
            self.say_once(
                "index",
                "%s: no finished job is deleted, for the database lacks the index %s of QueueConfig(retention=...): %s "
                "makes it",
                spec.model.__name__,
                index_name(table),
                backend().checks.UPDATE_COMMAND,
            )
        session.rollback()
        return self._ready

    def delete_some(self, session: Session, plan: Plan, walk: Walk) -> tuple[int, datetime | None, datetime | None]:
        """Delete a batch and commit.

        :return: how many were deleted, when the last of them ended, and before when they had to have ended; the two
            only where the queue has rows of finished jobs.
        """
        spec = self._spec
        bound = self._be_brief(session, plan, walk)
        verb = spec.strategy.purge(
            spec,
            self._chosen(walk),
            (walk.state,),
            sa.literal(walk.age, sa.Interval()),
            # A generic plan that knows no limit might prefer to sort the table.
            sa.literal(walk.limit).render_literal_execute(),
        )
        if isinstance(verb, sa.Delete):
            deleting = verb.where(backend().claims.planned_anew()).returning(spec.columns["finished_at"])
            ends = session.execute(deleting, execution_options=QUIET, bind_arguments=plan.bind).scalars()
            found: Sequence[Any] = ends.all()
        else:
            deleting = returning_keys(spec, verb)
            found = [None for _ in session.execute(deleting, execution_options=QUIET, bind_arguments=plan.bind)]
        session.commit()
        return len(found), max((end for end in found if end is not None), default=None), bound

    def _be_brief(self, session: Session, plan: Plan, walk: Walk) -> datetime | None:
        """Have the server end this transaction if it takes long, and return before when a job must have ended."""
        span = int(min(_PATIENCE, plan.lease.total_seconds() / _OF_A_LEASE) * 1000)
        names = ("lock_timeout", "statement_timeout", "idle_in_transaction_session_timeout")
        settings = [sa.func.set_config(name, str(span), sa.true()) for name in names]
        finished_at = self._spec.columns.get("finished_at")
        bound = sa.null() if finished_at is None else sa.cast(clock() - walk.age, finished_at.type)
        (*_, moment) = session.execute(sa.select(*settings, bound), bind_arguments=plan.bind).one()
        return moment if self._spec.has("status") else None

    def _chosen(self, walk: Walk) -> AnySelect:
        spec = self._spec
        chosen = sa.select(spec.model)
        if not spec.has("status"):
            return chosen
        finished_at = spec.columns["finished_at"]
        if walk.since is not None:
            chosen = chosen.where(finished_at >= sa.literal(walk.since, finished_at.type))
        if walk.left:
            chosen = chosen.where(~spec.key_in(spec.keys, walk.left))
        return chosen.where(*(~refers for refers in self._references.values()))

    # -- what stands in the way ----------------------------------------------------------------------------------

    def leave_first(self, session: Session, plan: Plan, walk: Walk, error: DBAPIError) -> bool:
        """Leave the oldest job behind, which could not be deleted; return whether to pause."""
        spec = self._spec
        if not spec.has("status"):
            self._complain(error, walk, None)
            return True
        finished_at = spec.columns["finished_at"]
        first = (
            self._chosen(walk)
            .with_only_columns(*spec.keys, finished_at)
            .where(spec.in_state(walk.state), finished_at <= clock() - walk.age)
            .order_by(finished_at)
            .limit(1)
            .with_for_update(skip_locked=True, of=spec.table)
        )
        row = session.execute(first, bind_arguments=plan.bind).one_or_none()
        session.rollback()
        if row is None:
            return True
        key = tuple(row[:-1])
        self._complain(error, walk, key)
        return walk.leave(key, row[-1])

    def _complain(self, error: DBAPIError, walk: Walk, key: Key | None) -> None:
        what = str(error.orig).strip().partition("\n")[0]
        constraint = getattr(getattr(error.orig, "diag", None), "constraint_name", None)
        self.say_once(
            constraint or getattr(error.orig, "sqlstate", None) or what,
            "%s: job %s is %s and older than %s, and cannot be deleted: %s. It stays, as do others for which the same "
            'is true; tables that refer to it need ondelete="CASCADE" or "SET NULL", and an index on their foreign key',
            self._spec.model.__name__,
            None if key is None else key_text(key),
            walk.state,
            walk.age,
            what,
        )

    def tell_what_stays(self, session: Session, plan: Plan, walk: Walk) -> None:
        """Say which foreign keys keep jobs from being deleted."""
        spec = self._spec
        for name, refers in self._references.items():
            if name in self._said:
                continue
            self._be_brief(session, plan, walk)
            finished_at = spec.columns["finished_at"]
            stays = (
                sa.select(*spec.keys)
                .where(spec.in_state(walk.state), finished_at <= clock() - walk.age, refers)
                .order_by(finished_at)
                .limit(1)
            )
            row = session.execute(stays, bind_arguments=plan.bind).one_or_none()
            session.rollback()
            if row is not None:
                self.say_once(
                    name,
                    "%s: job %s is %s and older than %s, and stays, as do others like it: the foreign key %s refers to "
                    'it and has no ON DELETE; give that foreign key ondelete="CASCADE" or "SET NULL" and an index, '
                    "or delete what refers to finished jobs first",
                    spec.model.__name__,
                    row[0] if len(row) == 1 else tuple(row),
                    walk.state,
                    walk.age,
                    name,
                )


def _refers(spec: QueueSpec, foreign_key: ForeignKey) -> sa.ColumnElement[bool] | None:
    """Return the condition that some row refers to a job; None where that cannot be said."""
    by_name = {column.name: column for column in spec.table.c}
    if not spec.has("status") or not set(foreign_key.referred) <= set(by_name):
        return None
    child = sa.table(
        foreign_key.table, *map(sa.column, {*foreign_key.columns, *by_name}), schema=foreign_key.schema
    ).alias("referring")
    same = [child.c[mine] == by_name[its] for mine, its in zip(foreign_key.columns, foreign_key.referred, strict=True)]
    if foreign_key.is_to_itself:
        # One that refers to itself may go.
        same.append(sa.or_(*(child.c[key.name] != key for key in spec.keys)))
    return sa.exists(sa.select(sa.literal_column("1")).select_from(child).where(*same).correlate(spec.table))
