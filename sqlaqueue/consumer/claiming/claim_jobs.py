"""Operations that claim jobs in a Session."""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping, Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import Session
from sqlalchemy.orm.attributes import instance_state

from sqlaqueue.consumer.claiming.held_back import NOTHING, HeldBack
from sqlaqueue.consumer.claiming.quarantine import Quarantine
from sqlaqueue.consumer.claiming.scan_cursor import Cursor, ScanCursor
from sqlaqueue.consumer.claiming.shard_turns import ShardTurns
from sqlaqueue.consumer.claiming.unclaimable import Suspects, Unclaimable
from sqlaqueue.consumer.configuration.settings import ConsumerSettings
from sqlaqueue.consumer.configuration.statements import (
    ANNOUNCEMENTS,
    EXCEPT,
    KEYS,
    LIMIT,
    ConsumerStatements,
    make_statements,
)
from sqlaqueue.consumer.sessions.isolation_level import IsolationLevel
from sqlaqueue.mapping.runs import record_run, run_of
from sqlaqueue.postgresql.claim_scan import cursor_at
from sqlaqueue.queue.options import SHARD
from sqlaqueue.queue.run import Key


class ClaimFailed(Exception):
    """A claim has failed; its cause is the error.

    :param suspects: the jobs that it has claimed by their keys; None if it has taken those that are due.
    """

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
    ) -> None:
        self._settings, self._spec, self._bind = settings, settings.spec, settings.bind_arguments
        self._usual_statements, self._isolation = statements, isolation
        self.quarantine, self._cursor = quarantine, ScanCursor()
        self.unclaimable = Unclaimable()
        self.held_back = NOTHING
        """What held jobs back from the last claim."""
        self.was_short = False
        """Whether the last claim of due jobs has found fewer than it might take."""
        self._has_looked_again = False
        self._shards = None if settings.distribution is None else ShardTurns(settings.distribution)

    @property
    def _statements(self) -> ConsumerStatements:
        return self._excluding if self.unclaimable else self._usual_statements

    @functools.cached_property
    def _excluding(self) -> ConsumerStatements:
        # Not sooner: nearly all Consumers never need these.
        return make_statements(self._settings, excluding=True)

    def claim(self, session: Session, limit: int, announcements: Sequence[str] = ()) -> tuple[list[Any], bool]:
        """Claim up to ``limit`` jobs, from the head of the queue or from the scan cursor.

        :param announcements: the ids of the announcements that this answers; the others are notified when it commits.
        :return: the jobs, and whether there may be more.
        :raises ClaimFailed: whatever the error is.
        """
        try:
            jobs, more = self._claim_due(session, limit, announcements)
        except Exception as error:
            # The next claim is to meet the same row, for which the search begins at the head.
            self._cursor.claimed(None, None, 0, 0.0)
            raise ClaimFailed(limit) from error
        self.was_short = len(jobs) < limit
        return jobs, more

    def claim_suspects(self, session: Session, suspects: Suspects) -> list[Any]:
        """Claim jobs by their keys, to find out which one cannot be claimed. A quarantined one is to run alone.

        :raises ClaimFailed: whatever the error is.
        """
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
        :param limit: how many others are looked at.
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
        cursor = self._cursor.begin()
        jobs = self._claim_from(session, cursor, limit, announcements)
        if cursor is not None and not jobs:
            cursor = None
            jobs = self._claim_from(session, cursor, limit, announcements)
        if self._shards is not None:
            # These are of one shard; others may have some as well.
            return jobs, bool(jobs)
        return jobs, len(jobs) >= limit or cursor is not None

    def _claim_admitted(self, session: Session, limit: int, announcements: Sequence[str]) -> tuple[list[Any], bool]:
        """Claim jobs that flow control does not hold back. Fewer than the limit do not mean that no other is due."""
        jobs, held_back = self._claim_from(session, None, limit, announcements), NOTHING
        if not jobs:
            found = session.execute(self._statements.held_back, bind_arguments=self._bind)
            held_back = HeldBack.of(found.one())
        if self._spec.strategy.holds_transaction:
            if not self._has_looked_again:
                held_back = held_back.looks_again
            self._has_looked_again = not jobs and not self._has_looked_again
        self.held_back = held_back
        return jobs, bool(jobs)

    def _claim_from(
        self, session: Session, cursor: Cursor | None, limit: int, announcements: Sequence[str]
    ) -> list[Any]:
        began, statements = time.monotonic(), self._statements
        parameters: dict[str, Any] = {LIMIT: limit, **(cursor or {})}
        if announcements:
            parameters[ANNOUNCEMENTS] = " ".join(announcements)
        if statements.claim_quarantined is None or statements is not self._usual_statements:
            parameters[EXCEPT] = self._spec.bind_keys(self._excluded())
        if cursor is None:
            statement = statements.claim_and_notify if announcements else statements.claim
        else:
            statement = statements.claim_from_cursor_and_notify if announcements else statements.claim_from_cursor
        jobs = self._execute(session, statement, parameters)
        ended_at = self._cursor_after(jobs) if len(jobs) >= limit else None
        self._cursor.claimed(cursor, ended_at, len(jobs), time.monotonic() - began)
        return jobs

    def _cursor_after(self, jobs: Sequence[Any]) -> Mapping[str, Any] | None:
        """Return the scan cursor at the last of ``jobs``, where the next claim begins; None if there is none."""
        if self._statements.claim_from_cursor is None or not jobs:
            return None
        return cursor_at(self._spec, jobs[-1])

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
        for job in jobs:
            run = run_of(job)
            if run is None:
                # A listener of the application has loaded this job, by a relationship of another job, before the claim
                # returned its row. So no event of the claim has recorded the run.
                record_run(instance_state(job), session)
                run = run_of(job)
            if run is not None:
                run.by_consumer = True
        if self._statements.load_rest is not None and jobs:
            keys = self._spec.bind_keys([run.key for job in jobs if (run := run_of(job)) is not None])
            # A joined collection returns several rows for one job; reading them all makes the instances complete.
            session.execute(self._statements.load_rest, {KEYS: keys}, bind_arguments=self._bind).unique().all()
        return jobs

    def claim_key(self, session: Session, key: Key) -> list[Any]:
        """Claim the one job with this key, if it is free and due.

        :raises ClaimFailed: whatever the error is.
        """
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
        """Claim one quarantined job, or several where they may run together; none while some are running.

        :raises ClaimFailed: whatever the error is.
        """
        statements, quarantine = self._statements, self.quarantine
        if statements.claim_quarantined is None or not quarantine.may_wait or quarantine.is_running:
            return []
        try:
            return self._claim_quarantined(session, statements)
        except Exception as error:
            raise ClaimFailed(quarantine.at_once, quarantined=True) from error

    @staticmethod
    def _run_alone(jobs: Sequence[Any]) -> None:
        for run in map(run_of, jobs):
            if run is not None:
                run.isolated = True

    def _claim_quarantined(self, session: Session, statements: ConsumerStatements) -> list[Any]:
        quarantine, jobs, others = self.quarantine, list[Any](), dict[str, Any]()
        if statements is not self._usual_statements:
            others = {EXCEPT: self._spec.bind_keys(self._excluded())}
        if statements.claim_quarantined_together is not None:
            # A single job is claimed alone: then it is known to be responsible, should its worker die.
            waiting = session.execute(statements.select_quarantined, others, bind_arguments=self._bind)
            several, parameters = len(waiting.all()) > 1, {LIMIT: quarantine.at_once, **others}
            jobs = self._execute(session, statements.claim_quarantined_together, parameters) if several else []
        if not jobs:
            jobs = self._execute(session, statements.claim_quarantined, others)
            self._run_alone(jobs)
        quarantine.may_wait = bool(jobs)
        if not jobs and statements.quarantined_wait is not None:
            # One that flow control has held back is to be looked for again, when a run has ended.
            waits = session.execute(statements.quarantined_wait, others, bind_arguments=self._bind).scalar_one()
            quarantine.may_wait = bool(waits)
        return jobs

    def began(self, jobs: Sequence[Any]) -> None:
        """Record that claimed jobs which are quarantined run from now on."""
        self.quarantine.begin(tuple(sa.inspect(job).identity) for job in jobs)
