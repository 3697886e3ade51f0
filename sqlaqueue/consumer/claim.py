"""Claim jobs in a Session, pass over those that this process cannot claim, and say why a claim found nothing."""

from __future__ import annotations

import functools
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import sqlalchemy as sa
from sqlalchemy.orm import Session
from sqlalchemy.orm.attributes import instance_state

from sqlaqueue.citus import SHARD
from sqlaqueue.consumer.outcomes import FinishedRun
from sqlaqueue.consumer.pace import Cursor, DrainedCursor, ScanCursor, ShardTurns, Trail, WalkTimer
from sqlaqueue.consumer.quarantine import Quarantine
from sqlaqueue.consumer.sessions import IsolationLevel
from sqlaqueue.consumer.settings import ConsumerSettings
from sqlaqueue.consumer.statements import ANNOUNCEMENTS, EXCEPT, KEYS, LIMIT, ConsumerStatements
from sqlaqueue.flow_control.freed import FEW_PARTS, Freed, claim_parameters
from sqlaqueue.flow_control.keys import flow_control
from sqlaqueue.mapping.runs import record_run, run_of, runs_of
from sqlaqueue.postgresql.claim_scan import cursor_at, cursor_from
from sqlaqueue.queue.run import Key
from sqlaqueue.sql.engine import engine_of

_CONTENDED = 0.002, 0.01
"""Seconds until the next claim when another transaction had locked a key: as long as a claim takes, and not the same
for all."""

_PLENTY = 4
"""After so many claims that have found as many jobs as they might take, flow control seems to hold none back; also
after one that has found no job that is due."""


def contended() -> float:
    """Return in how many seconds to claim again when another transaction was faster."""
    return random.uniform(*_CONTENDED)  # noqa: S311 - only to spread claims over time


class HeldBack(NamedTuple):
    """Why a claim under flow control found nothing, and when the next one may find something.

    :param due: whether a job is due that was held back, so that the end of a run may let it begin.
    :param retry_in: seconds until the next claim may find something though no run ends; None if only a run's end helps.
    """

    due: bool = False
    retry_in: float | None = None
    contended: bool = False
    """Whether another transaction had locked a key."""

    @classmethod
    def of(cls, row: Any) -> HeldBack:
        was_contended, due, seconds = row
        waits = [] if seconds is None else [max(float(seconds), 0.0)]
        if was_contended:
            waits.append(contended())
        return cls(bool(due), min(waits) if due and waits else None, bool(was_contended))

    def within(self, seconds: float) -> HeldBack:
        """Return it with another claim within so many seconds."""
        return self._replace(retry_in=min(seconds, self.retry_in or seconds)) if self.due else self

    @property
    def looks_again(self) -> HeldBack:
        """Return it with another claim soon.

        Where a claim's transaction holds slots, a claim takes those of one limit before it knows that another limit has
        none, and releases them then. A claim that looks meanwhile finds them taken, and no run ends that would wake it.
        """
        return self._replace(retry_in=contended()) if self.due and self.retry_in is None else self


NOTHING = HeldBack()
"""A claim found jobs, or none is due."""


# -- unclaimable -------------------------------------------------------------------------------------------------------
# A claim of several jobs fails as a whole if one row cannot be loaded, such as an enum value of a newer version of
# the program, or if the database refuses to change one row. Then the jobs that the claim would have taken are
# *suspects*: they are claimed by their keys, and a part that fails is divided, until one job is left that fails by
# itself. A claim of the first half that succeeds shows that the second half contains it, so the search takes one
# claim for each halving.
#
# A job that is found is left out of other claims, and tried again now and then: somebody may have changed its row, or
# the constraint that refuses it.


TRY_AGAIN_AFTER = 60.0
"""Seconds between two tries to claim an unclaimable job, as long as there are few."""

_FEW, _MOST = 100, 10_000
_FAILURES_IN_ROW = 50
"""So many jobs in a row that cannot be claimed are probably no matter of these jobs, and the search slows down."""

Cause: TypeAlias = Literal["refused", "unchanged", "held up"]
"""Why a job is unclaimable: its claim fails; its claim leaves its row as it is, which a look finds out again and again;
or something else keeps it from being claimed, rescued or settled, which would be told again."""


class UnclaimableJob(NamedTuple):
    key: Key
    error: str
    next_try: float
    """By the monotonic clock. A job that is held up is left out of claims until then."""
    cause: Cause = "refused"
    quarantined: bool = False


class Suspects:
    """Jobs that are claimed together by their keys. If those of ``other_half`` can be claimed, one of these cannot."""

    def __init__(self, keys: Sequence[Key], other_half: Suspects | None = None, *, quarantined: bool = False) -> None:
        self.keys, self.other_half, self.quarantined = keys, other_half, quarantined


class Unclaimable:
    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now, self._lock = now, threading.RLock()
        self._jobs: dict[Key, UnclaimableJob] = {}
        self._waiting: list[Suspects] = []
        self._taken: list[Suspects] = []
        """Suspects that a worker claims at the moment."""
        self._in_row, self._tried_again = 0, False
        self.changes = 0
        self.settles_apart = False
        """A claim has failed, so the next ones are executed without settlements, which may be what failed."""

    def __bool__(self) -> bool:
        return bool(self._jobs or self._waiting or self._taken)

    @property
    def is_searching(self) -> bool:
        return bool(self._waiting or self._taken)

    @property
    def slows_down(self) -> bool:
        return self._in_row >= _FAILURES_IN_ROW

    def jobs(self) -> list[UnclaimableJob]:
        with self._lock:
            return list(self._jobs.values())

    def excluded(self) -> list[Key]:
        with self._lock:
            now = self._now()
            left_out = (key for key, job in self._jobs.items() if job.cause != "held up" or job.next_try > now)
            return list({*left_out, *self._suspected()})

    def _suspected(self) -> Iterator[Key]:
        return (key for suspects in (*self._waiting, *self._taken) for key in suspects.keys)

    def suspect(self, keys: Iterable[Key], *, quarantined: bool = False) -> bool:
        """Begin to search among the jobs that a failed claim would have taken; return whether any is a new one."""
        with self._lock:
            known = {*self._suspected(), *self._jobs}
            fresh = [key for key in keys if key not in known]
            if quarantined:
                self._waiting += [Suspects([key], quarantined=True) for key in reversed(fresh)]
            elif fresh:
                # The claim of all has failed already.
                self._divide(fresh)
            return bool(fresh)

    def _divide(self, keys: Sequence[Key]) -> None:
        half = (len(keys) + 1) // 2
        second = Suspects(keys[half:])
        self._waiting += [second, Suspects(keys[:half], second)] if second.keys else [Suspects(keys)]

    def take(self, *, quarantined: bool = False) -> Suspects | None:
        """Return suspects to claim now, or an unclaimable job whose next try is due; None if there are none.

        They belong to the caller until it calls :meth:`end`. Between two tries of known jobs there is a usual claim, so
        that many of them do not keep the others waiting.
        """
        with self._lock:
            found = next((one for one in reversed(self._waiting) if quarantined or not one.quarantined), None)
            if found is not None:
                self._waiting.remove(found)
            else:
                job = None if self._tried_again else self._next_due(quarantined=quarantined)
                self._tried_again = job is not None
                if job is None:
                    return None
                found = Suspects([job.key], quarantined=job.quarantined)
            self._taken.append(found)
            return found

    def _next_due(self, *, quarantined: bool) -> UnclaimableJob | None:
        now, taken = self._now(), {*self._suspected()}
        for job in [one for one in self._jobs.values() if one.next_try <= now]:
            if job.cause == "refused":
                if (quarantined or not job.quarantined) and job.key not in taken:
                    return job
            elif job.next_try + TRY_AGAIN_AFTER <= now:
                # Otherwise it would have been added again.
                self.remove(job.key)
        return None

    def end(self, suspects: Suspects | None) -> None:
        """Take suspects back, if it is still unknown whether they can be claimed: the claim has failed otherwise."""
        with self._lock:
            if suspects in self._taken:
                self._taken.remove(suspects)
                self._waiting.insert(0, suspects)

    def succeeded(self, suspects: Suspects | None, *, found: bool) -> None:
        """Record that a claim has been committed. If it has not found its suspects, they are not pending any more."""
        if found:
            self._in_row, self.settles_apart = 0, False
        if suspects is None:
            return
        with self._lock:
            self._taken.remove(suspects)
            for key in suspects.keys:
                self.remove(key)
            other = suspects.other_half
            if found and other in self._waiting and len(other.keys) > 1:
                self._waiting.remove(other)
                self._divide(other.keys)

    def failed(self, suspects: Suspects, error: str) -> UnclaimableJob | None:
        """Record that suspects cannot be claimed; return the job if it is only one that was not known."""
        with self._lock:
            if suspects in self._taken:
                self._taken.remove(suspects)
            if len(suspects.keys) > 1:
                self._divide(suspects.keys)
                return None
            job = self.add(suspects.keys[0], error, "refused", quarantined=suspects.quarantined)
            self._in_row += job is not None
            return job

    def add(
        self, key: Key, error: str, cause: Cause = "held up", *, quarantined: bool = False
    ) -> UnclaimableJob | None:
        """Record that a job cannot be claimed, rescued or settled; return it if it was not known."""
        with self._lock:
            known = self._jobs.pop(key, None)
            if len(self._jobs) * len(key) >= _MOST:
                del self._jobs[next(iter(self._jobs))]
            next_try = self._now() + TRY_AGAIN_AFTER * (1 + len(self._jobs) // _FEW)
            # The order is that of the next tries.
            job = self._jobs[key] = UnclaimableJob(key, error, next_try, cause, quarantined)
            if known is not None and known.error == error:
                return None
            self.changes += 1
            return job

    def unchanged(self) -> list[Key]:
        with self._lock:
            return [key for key, job in self._jobs.items() if job.cause == "unchanged"]

    def remove(self, key: Key) -> None:
        with self._lock:
            self.changes += self._jobs.pop(key, None) is not None


class ClaimFailed(Exception):
    """A claim has failed; its cause is the error. Without ``suspects`` it has taken those that are due."""

    def __init__(self, limit: int, suspects: Suspects | None = None, *, quarantined: bool = False) -> None:
        super().__init__("a claim has failed")
        self.limit, self.suspects, self.quarantined = limit, suspects, quarantined


class Claimer:
    """Claims the jobs of one consumer. Its methods are operations on a Session, and leave the commit to the caller."""

    def __init__(
        self,
        settings: ConsumerSettings,
        statements: ConsumerStatements,
        quarantine: Quarantine,
        isolation: IsolationLevel,
        *,
        draining: bool,
    ) -> None:
        self._draining = draining
        self._settings, self._spec, self._bind = settings, settings.spec, settings.bind_arguments
        self._usual_statements, self._isolation = statements, isolation
        self.quarantine, self._cursor, self._trail = quarantine, ScanCursor(), Trail()
        self.unclaimable = Unclaimable()
        self.held_back = NOTHING
        self.was_short = False
        """Whether the last claim of due jobs has found fewer than it might take."""
        self._full_in_row = _PLENTY
        self._has_looked_again = False
        flow = flow_control(self._spec) if self._spec.flow_rules else None
        # Keys of turns and other keys within them are walked over each time.
        by_keys = flow is not None and flow.keys and (flow.part is None) != (flow.turn is None)
        self._freed = Freed(flow) if by_keys else None
        self._walks, self._drained = WalkTimer(), DrainedCursor()
        self._level = self._spec.attributes.get("priority")
        self._shards = None if settings.distribution is None else ShardTurns(settings.distribution)

    @property
    def _statements(self) -> ConsumerStatements:
        return self._excluding if self.unclaimable else self._usual_statements

    @functools.cached_property
    def _excluding(self) -> ConsumerStatements:
        # Not sooner: nearly all Consumers never need these.
        return ConsumerStatements(self._settings, excluding=True)

    def claim(self, session: Session, limit: int, announcements: Sequence[str] = ()) -> tuple[list[Any], bool]:
        """Claim up to ``limit`` jobs, from the head or the scan cursor; return them, and whether there may be more.

        :param announcements: the ids of the announcements that this answers; the others are notified when it commits.
        """
        try:
            jobs, more = self._claim_due(session, limit, announcements)
        except Exception as error:
            # The next claim is to meet the same row, for which the search begins at the head.
            self._cursor.claimed(None, None, 0, 0.0)
            self._trail = Trail()
            raise ClaimFailed(limit) from error
        self.was_short = len(jobs) < limit
        if not self.was_short:
            self._full_in_row += 1
        else:
            self._full_in_row = 0 if jobs or self.held_back.due else _PLENTY
        return jobs, more

    @property
    def is_scarce(self) -> bool:
        """Whether flow control may have held jobs back from one of the last claims."""
        return self._statements.held_back is not None and self._full_in_row < _PLENTY

    def claim_suspects(self, session: Session, suspects: Suspects) -> list[Any]:
        """Claim jobs by their keys, to find out which one cannot be claimed. A quarantined one is to run alone."""
        alone = suspects.quarantined
        statement = self._excluding.claim_key if alone else self._excluding.claim_keys
        parameters = {} if alone else {LIMIT: len(suspects.keys)}
        try:
            self._isolation.begin(session)
            jobs = self._execute(session, statement, {**parameters, KEYS: self._spec.bind_keys(suspects.keys)})
        except Exception as error:
            raise ClaimFailed(len(suspects.keys), suspects) from error
        if alone:
            self._run_alone(jobs)
        return jobs

    def candidates(self, session: Session, limit: int, *, quarantined: bool = False) -> list[Key]:
        """Return the keys of the jobs that a claim would take, and roll back."""
        keys = self._candidates(session, limit, quarantined=quarantined)
        session.rollback()
        return keys

    def _candidates(self, session: Session, limit: int, *, quarantined: bool = False) -> list[Key]:
        statement = self._excluding.candidates_quarantined if quarantined else self._excluding.candidates
        self._isolation.begin(session)
        parameters = {LIMIT: limit, EXCEPT: self._spec.bind_keys(self._excluded())}
        found = session.execute(statement, parameters, bind_arguments=self._bind).all()
        return [tuple(row) for row in found]

    def look(self, session: Session, known: Sequence[Key], limit: int) -> tuple[list[Key], list[Key]]:
        """Claim due jobs and roll back, to see whose rows a claim leaves as they are, without an error.

        The rows are locked before they are claimed, so no other transaction is the reason.

        :param known: jobs of which this was known; they are looked at again.
        :return: the keys of all these jobs, and those whose rows did not change.
        """
        try:
            keys = self._candidates(session, limit)
            if known:
                among = {LIMIT: len(known), KEYS: self._spec.bind_keys(known)}
                found = session.execute(self._excluding.candidates_among, among, bind_arguments=self._bind)
                keys += [tuple(row) for row in found]
            if not keys:
                return [], []
            parameters = {LIMIT: len(keys), KEYS: self._spec.bind_keys(keys)}
            jobs = self._execute(session, self._excluding.claim_locked, parameters)
            changed = {run.key for run in map(run_of, jobs) if run is not None}
            return keys, [key for key in keys if key not in changed]
        finally:
            session.rollback()

    def _excluded(self) -> list[Key]:
        return [*self.quarantine.waiting(), *self.unclaimable.excluded()]

    def _claim_due(self, session: Session, limit: int, announcements: Sequence[str]) -> tuple[list[Any], bool]:
        self._isolation.begin(session)
        if self._statements.held_back is not None:
            return self._claim_admitted(session, limit, announcements)
        cursor, trail, self.held_back = self._cursor.begin(), None, NOTHING
        # Only a scan from the head shows that no job is due, which ends a drain.
        if cursor is None and not self._draining and self._shards is None:
            trail = self._trail.begin()
        jobs = self._claim_from(session, cursor or trail, limit, announcements)
        if cursor is not None and not jobs:
            cursor = None
            jobs = self._claim_from(session, cursor, limit, announcements)
        if self._shards is not None:
            # These are of one shard; others may have some as well.
            return jobs, bool(jobs)
        if trail is not None:
            self.held_back = HeldBack(retry_in=self._trail.until_head)
        return jobs, len(jobs) >= limit or cursor is not None

    def _claim_admitted(self, session: Session, limit: int, announcements: Sequence[str]) -> tuple[list[Any], bool]:
        """Claim jobs that flow control does not hold back. Fewer than the limit do not mean that no other is due.

        Behind jobs that are held back, most claims look at the keys in which a job may begin, and at a few others. Now
        and then one walks over all keys.
        """
        if self._freed is None:
            jobs = self._claim_from_drained(session, limit, announcements)
            held_back = NOTHING if jobs else self._what_is_held_back(session)
        else:
            jobs, held_back = self._claim_by_keys(session, self._freed, limit, announcements)
        if self._spec.strategy.holds_transaction:
            if not self._has_looked_again:
                held_back = held_back.looks_again
            self._has_looked_again = not jobs and not self._has_looked_again
        self.held_back = held_back
        return jobs, bool(jobs)

    def _claim_by_keys(
        self, session: Session, freed: Freed, limit: int, announcements: Sequence[str]
    ) -> tuple[list[Any], HeldBack]:
        """Claim jobs of the keys in which one may begin and of a few others; now and then of all keys."""
        given = freed.take()
        parameters = claim_parameters(given, most_parts=FEW_PARTS + limit)
        jobs = self._claim_from_drained(session, limit, announcements, parameters)
        held_back = NOTHING if jobs else self._what_is_held_back(session)
        full, walks = len(jobs) >= limit, self._walks.is_due
        if not full and (jobs or held_back.due) and walks:
            with self._walks:
                jobs += self._claim_from(session, None, limit - len(jobs))
            held_back = NOTHING if jobs else held_back
        parts = [run.part for run in map(run_of, jobs) if run is not None and run.part is not None]
        freed.claimed(given, parts, full=full or held_back.contended)
        return jobs, held_back if walks else held_back.within(0.0 if freed else self._walks.until_due)

    def _claim_from_drained(
        self, session: Session, limit: int, announcements: Sequence[str], parts: Mapping[str, Any] | None = None
    ) -> list[Any]:
        """Claim from the first pending job on if there are many dead entries before it, otherwise from the head."""
        drained, statements = self._drained, self._statements
        # Only claims with a backlog meet many of them.
        if drained.is_due and not self.was_short and statements.has_cursor:
            began = time.monotonic()
            first = session.execute(statements.first_pending, bind_arguments=self._bind).first()
            drained.found(None if first is None else cursor_from(tuple(first)), time.monotonic() - began)
        cursor = drained.cursor
        jobs = self._claim_from(session, cursor, limit, announcements, parts)
        if cursor is not None and len(jobs) < limit:
            drained.leave()
            if not jobs:
                jobs = self._claim_from(session, None, limit, announcements, parts)
        return jobs

    def _what_is_held_back(self, session: Session) -> HeldBack:
        return HeldBack.of(session.execute(self._statements.held_back, bind_arguments=self._bind).one())

    def ended(self, finished: Iterable[FinishedRun]) -> None:
        """Let the next claim look at the keys of runs that have ended."""
        freed = self._freed
        for one in finished if freed is not None else ():
            part, one.run.part = one.run.part, None
            if part is not None and freed is not None:
                freed.ended(part, one.outcome.delay if one.outcome.throttle is not None else None)

    def _claim_from(
        self,
        session: Session,
        cursor: Cursor | None,
        limit: int,
        announcements: Sequence[str] = (),
        parts: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        began, statements = time.monotonic(), self._statements
        parameters: dict[str, Any] = {LIMIT: limit, **(cursor or {}), **(parts or {})}
        if announcements:
            parameters[ANNOUNCEMENTS] = " ".join(announcements)
        if not statements.marks_rows or statements is not self._usual_statements:
            parameters[EXCEPT] = self._spec.bind_keys(self._excluded())
        if cursor is None:
            statement = statements.claim_and_notify if announcements else statements.claim
        else:
            statement = statements.claim_from_cursor_and_notify if announcements else statements.claim_from_cursor
        jobs = self._execute(session, statement, parameters)
        took = time.monotonic() - began
        ended_at = self._cursor_after(jobs) if len(jobs) >= limit else None
        self._cursor.claimed(cursor, ended_at, len(jobs), took)
        self._trail.claimed(cursor, len(jobs), took)
        if jobs and statements.has_cursor:
            self._trail.mark({job.__dict__.get(self._level) for job in jobs}, lambda: self._cursor_after(jobs))
        return jobs

    def _cursor_after(self, jobs: Sequence[Any]) -> Mapping[str, Any] | None:
        return cursor_at(self._spec, jobs[-1]) if self._statements.has_cursor and jobs else None

    def _execute(self, session: Session, statement: Any, parameters: dict[str, Any] | None = None) -> list[Any]:
        """Execute a claim, and return its instances; of a distributed table those of the next shard that has some."""
        if self._shards is None:
            return self._execute_once(session, statement, parameters)
        for value in self._shards.begin():
            try:
                jobs = self._execute_once(session, statement, {**(parameters or {}), SHARD: value})
            except Exception:
                self._shards.failed(value)
                raise
            self._shards.claimed(value, len(jobs))
            if jobs:
                return jobs
        return []

    def _execute_once(self, session: Session, statement: Any, parameters: dict[str, Any] | None) -> list[Any]:
        """Execute a claim of one shard, or of a table that is not distributed.

        ``populate_existing`` refreshes instances that are in the session already. Nearly always the session is new, so
        the option is False then: it costs a twentieth of the time that a job takes.
        """
        options = {"populate_existing": bool(session.identity_map)}
        found = session.execute(statement, parameters, execution_options=options, bind_arguments=self._bind)
        jobs = list(found.scalars())
        try:
            runs = runs_of(jobs)
        except KeyError:
            # A listener of the application has loaded a job, by a relationship of another job, before the claim
            # returned its row. So no event of the claim has recorded the run.
            for job in jobs:
                if run_of(job) is None:
                    record_run(instance_state(job), session)
            runs = runs_of(jobs)
        for run in runs:
            run.by_consumer = True
        if self._freed is not None:
            for job, run in zip(jobs, runs, strict=True):
                run.part = self._freed.part_of(job)
        if self._statements.load_rest is not None and jobs:
            keys = self._spec.bind_keys([run.key for run in runs])
            # A joined collection returns several rows for one job; reading them all makes the instances complete.
            session.execute(self._statements.load_rest, {KEYS: keys}, bind_arguments=self._bind).unique().all()
        return jobs

    def claim_key(self, session: Session, key: Key) -> list[Any]:
        try:
            self._isolation.begin(session)
            return self._execute(session, self._statements.claim_key, {KEYS: self._spec.bind_keys([key])})
        except Exception as error:
            raise ClaimFailed(1, Suspects([key])) from error

    def claim_to_settle(self, session: Session, key: Key) -> list[Any]:
        """Claim the job with this key to settle its run; neither its limits nor its rates hold it back."""
        self._isolation.begin(session)
        return self._execute(session, self._statements.claim_to_settle, {KEYS: self._spec.bind_keys([key])})

    def claim_quarantined(self, session: Session) -> list[Any]:
        """Claim one quarantined job, or several where they may run together; none while some are running."""
        statements, quarantine = self._statements, self.quarantine
        if not statements.marks_rows or not quarantine.may_wait or quarantine.is_running:
            return []
        # Before the query: of a job that is rescued meanwhile, it sees nothing.
        quarantine.may_wait = False
        try:
            jobs, waits = self._claim_quarantined(session, statements)
        except Exception as error:
            quarantine.may_wait = True
            raise ClaimFailed(quarantine.at_once, quarantined=True) from error
        if waits:
            quarantine.may_wait = True
        return jobs

    @staticmethod
    def _run_alone(jobs: Sequence[Any]) -> None:
        for run in map(run_of, jobs):
            if run is not None:
                run.isolated = True

    def _claim_quarantined(self, session: Session, statements: ConsumerStatements) -> tuple[list[Any], bool]:
        """Return the claimed jobs, and whether others may wait."""
        jobs, others = list[Any](), dict[str, Any]()
        if statements is not self._usual_statements:
            others = {EXCEPT: self._spec.bind_keys(self._excluded())}
        if statements.select_quarantined is not None:
            # A single job is claimed alone: then it is known to be responsible, should its worker die.
            waiting = session.execute(statements.select_quarantined, others, bind_arguments=self._bind)
            several, parameters = len(waiting.all()) > 1, {LIMIT: self.quarantine.at_once, **others}
            jobs = self._execute(session, statements.claim_quarantined_together, parameters) if several else []
        if not jobs:
            jobs = self._execute(session, statements.claim_quarantined, others)
            self._run_alone(jobs)
        waits = bool(jobs)
        locks_others = engine_of(session.connection(bind_arguments=self._bind).dialect) is not None
        if not jobs and (locks_others or statements.limits_keys):
            # One that flow control has held back is to be looked for again, when a run has ended. In MariaDB another
            # claim may have locked it for a moment, as it locks each row that it reads.
            waits = bool(session.execute(statements.quarantined_wait, others, bind_arguments=self._bind).scalar_one())
        return jobs, waits

    def began(self, jobs: Sequence[Any]) -> None:
        self.quarantine.begin(tuple(sa.inspect(job).identity) for job in jobs)
