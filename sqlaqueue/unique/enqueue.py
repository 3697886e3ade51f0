"""Enqueue jobs that are unique: :func:`enqueue`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, TypeVar, get_args, overload

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session, make_transient, scoped_session
from sqlalchemy.orm.attributes import instance_state

from sqlaqueue.exc import JobExists, StatementError
from sqlaqueue.mapping.mixin import spec_of
from sqlaqueue.queue.run import Key, key_text
from sqlaqueue.queue.spec import QueueSpec
from sqlaqueue.sessions import check_session, execute, session_in_scope
from sqlaqueue.sql.engine import own_work
from sqlaqueue.statements.selection import instances, without_criteria
from sqlaqueue.strategies.unique_key import UniqueKey, explaining_missing_index, unique_key
from sqlaqueue.texts import did_you_mean
from sqlaqueue.unique.insert import (
    Found,
    NewJob,
    Row,
    complete_rows,
    insert_rows,
    lock_waiting,
    make_persistent,
    replace,
    search,
    set_created_at,
    with_keys,
)
from sqlaqueue.unique.relationships import refuse_referrers

if TYPE_CHECKING:
    # It needs greenlet, which sync code may lack.
    from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session

T = TypeVar("T")

OnDuplicate = Literal["skip", "raise", "replace", "replace_keep_time"]

_MOST_ROUNDS = 20


class Enqueued(NamedTuple, Generic[T]):
    """What became of one job that was given to :func:`enqueue`.

    ::

        [(invoice, created)] = enqueue(session, Invoice(customer_id=7))
        print("invoice", invoice.id, "is new" if created else "existed")
    """

    job: T
    """The given instance if it was inserted; otherwise the job that exists, as an instance of the session."""
    created: bool
    """Whether it was inserted."""


class Enqueueing:
    """One call for a queue with ``QueueConfig(unique=...)``. Jobs are known by their place in the call.

    It finds out which jobs are duplicates, which are inserted, and which values move to an existing job.
    """

    def __init__(self, key: UniqueKey, jobs: Sequence[Any], on_duplicate: OnDuplicate) -> None:
        self.key, self.spec, self.on_duplicate = key, key.spec, on_duplicate
        self.replaces = on_duplicate.startswith("replace")
        self.jobs = [NewJob(job) for job in jobs]
        self.values: list[list[Any]] = []
        self.rows: dict[int, Row] = {}
        """The rows that were inserted."""
        self.duplicates: dict[int, Key] = {}
        """The jobs that are duplicates, each with the key of the existing job."""
        self.found: dict[Key, Any] = {}
        """The instances of existing jobs by their keys."""
        self.locked, self.running = set[Key](), set[Key]()
        """The keys of existing jobs whose values are to be replaced, and of those that are running."""

    def run(self, session: Session) -> list[Enqueued[Any]]:
        try:
            ids = {id(job.job) for job in self.jobs}
            with session.no_autoflush:
                # All of them at each step: what one job refers to may take others along.
                for job in self.jobs:
                    job.relationships.read(ids)
                for job in self.jobs:
                    job.relationships.add_parents(session)
                for job in self.jobs:
                    job.relationships.take_out(session)
                refuse_referrers(session, ids)
            session.flush()
            connection = session.connection(bind_arguments={"mapper": self.spec.mapper})
            for job in self.jobs:
                job.prepare()
            self._insert(session, connection)
        finally:
            for job in self.jobs:
                job.relationships.keep()
        # What refers to the new jobs.
        session.flush()
        return [
            Enqueued(job.job, created=True)
            if place not in self.duplicates
            else Enqueued(self.found[self.duplicates[place]], created=False)
            for place, job in enumerate(self.jobs)
        ]

    def _insert(self, session: Session, connection: sa.Connection) -> None:
        """Insert the jobs that are no duplicates, and find the existing jobs of the others."""
        set_created_at(connection, self.key, self.jobs)
        self.values = [job.unique_values(self.key, connection) for job in self.jobs]
        alone = {place for place in range(len(self.jobs)) if not self._may_be_duplicate(place)}
        # An error must not leave some of the rows in the transaction.
        with self._savepoint(connection):
            self._resolve(session, connection, [place for place in range(len(self.jobs)) if place not in alone])
            rows = [(self.jobs[place], row) for place, row in sorted(self.rows.items())]
            complete_rows(connection, self.key, rows)
            replaced = self._replace(session, connection) if self.replaces else set()
            created = [job for job, _ in rows]
            # No index refuses these, so the flush inserts them.
            others = [self.jobs[place] for place in sorted(alone)]
            with session.no_autoflush:
                for job in created + others:
                    job.relationships.put_parents_back(forget=job in replaced)
                make_persistent(session, created)
                for job in created + others:
                    job.relationships.put_others_back()
                session.add_all([job.job for job in others])
            try:
                for job in created:
                    job.mapper.dispatch.after_insert(job.mapper, connection, instance_state(job.job))
            except Exception:
                for job in created:
                    make_transient(job.job)
                raise
        for job in replaced:
            session.refresh(job.job, [*job.columns()])

    @contextlib.contextmanager
    def _savepoint(self, connection: sa.Connection) -> Iterator[None]:
        """Execute something in a savepoint; in none if each statement is a transaction, where that does no harm."""
        level = connection.get_execution_options().get("isolation_level", connection.default_isolation_level)
        if level == "AUTOCOMMIT":
            if self.on_duplicate != "skip":
                what = f"enqueue(on_duplicate={self.on_duplicate!r})"
                msg = f"{what}: it needs a transaction, and the engine has AUTOCOMMIT"
                raise StatementError(msg)
            yield
            return
        with own_work():
            savepoint = connection.begin_nested()
        try:
            yield
        except BaseException:
            # After a deadlock, MariaDB has rolled back the transaction, and its savepoints with it.
            with contextlib.suppress(DBAPIError):
                savepoint.rollback()
            raise
        savepoint.commit()

    def _may_be_duplicate(self, place: int) -> bool:
        """Return whether a job can be a duplicate: it counts, and none of its values is a NULL unlike all others."""
        job = self.jobs[place]
        status = job.given().get(self.spec.attributes.get("status", ""))
        if isinstance(status, sa.ClauseElement):
            msg = f"enqueue(): {job.name}.{self.spec.attributes['status']} is an SQL expression; leave it out"
            raise StatementError(msg)
        if status is not None and status not in [getattr(self.spec.config.states, each) for each in self.key.states]:
            return False
        return not (self.key.config.nulls_distinct and None in self.values[place])

    # -- find the existing jobs of duplicates, and insert the others ---------------------------------------------------

    def _resolve(self, session: Session, connection: sa.Connection, places: list[int]) -> None:
        """Insert each job or find the existing one; where that ends meanwhile, try again."""
        for _ in range(_MOST_ROUNDS):
            left = self._insert_or_find(session, connection, places)
            if self.replaces:
                left += self._lock(connection)
            places = left or self._load(session)
            if not places and not self._waits_again():
                return
        places = places or self._load(session)
        if not places:
            # Existing jobs that were running and waiting in turn are returned as they are.
            return
        msg = (
            f"enqueue(): this {self.jobs[places[0]].name} has a duplicate that cannot be seen; does row-level security "
            "hide it from this role?"
        )
        raise StatementError(msg)

    def _search(self, connection: sa.Connection, places: Sequence[int]) -> list[Found]:
        return search(connection, self.key, [self.values[place] for place in places])

    def _insert_or_find(self, session: Session, connection: sa.Connection, places: Sequence[int]) -> list[int]:
        """Find existing jobs, insert those that have none, and return those whose existing job has ended meanwhile."""
        if not places:
            return []
        found = self._search(connection, places)
        first_of = {place: places[one.first] for place, one in zip(places, found, strict=True)}
        for place, one in zip(places, found, strict=True):
            if one.existing is not None:
                self.duplicates[place] = one.existing
        if self.on_duplicate == "raise":
            self._refuse_duplicates(session, first_of)
        new = [place for place in places if place not in self.duplicates and first_of[place] == place]
        order = {place: one.order for place, one in zip(places, found, strict=True)}
        self._insert_new(connection, sorted(new, key=order.__getitem__))
        if self.on_duplicate == "raise":
            self._refuse_duplicates(session, first_of)
        left = {place for place in new if place not in self.rows and place not in self.duplicates}
        for place, first in first_of.items():
            if first in left:
                left.add(place)
            elif first != place and place not in self.duplicates:
                self.duplicates[place] = self._key_of(first)
        return sorted(left)

    def _insert_new(self, connection: sa.Connection, places: Sequence[int]) -> None:
        """Insert rows, and find out which of them were inserted and which are duplicates."""
        if not places:
            return
        for place in places:
            job = self.jobs[place]
            with job.relationships.shown():
                job.mapper.dispatch.before_insert(job.mapper, connection, instance_state(job.job))
            job.prepare()
            # A listener may have changed them.
            self.values[place] = job.unique_values(self.key, connection)
        alone = [place for place in places if not self._may_be_duplicate(place)]
        for place in alone:
            # By itself: no values would tell which of several rows is its own.
            [self.rows[place]] = insert_rows(connection, self.key, [self.jobs[place]]).values()
        places = [place for place in places if place not in alone]
        with explaining_missing_index(self.spec):
            rows = insert_rows(connection, self.key, [self.jobs[place] for place in places])
        if len(places) == len(rows) == 1:
            self.rows[places[0]] = next(iter(rows.values()))
            return
        for place, one in zip(places, self._search(connection, places), strict=True):
            row = None if one.existing is None else rows.pop(one.existing, None)
            if row is not None:
                self.rows[place] = row
            elif one.existing is not None:
                # Also for a second job whose values only the server knows to be equal.
                self.duplicates[place] = one.existing
        if rows:
            msg = (
                f"enqueue(): this {self.jobs[places[0]].name} was inserted with other unique values than it was given; "
                "does a trigger or the type of a column change them?"
            )
            raise StatementError(msg)

    def _key_of(self, place: int) -> Key:
        row = self.rows.get(place)
        return self.duplicates[place] if row is None else tuple(row[key] for key in self.spec.keys)

    def _load(self, session: Session) -> list[int]:
        """Load the existing jobs, and return the duplicates of those that have ended meanwhile."""
        self.found |= {self._key_of(place): self.jobs[place].job for place in self.rows}
        keys = dict.fromkeys(key for key in self.duplicates.values() if key not in self.found)
        if keys:
            existing = without_criteria(with_keys(self.spec, sa.select(self.spec.model), list(keys)))
            bind = {"mapper": self.spec.mapper}
            options = {"populate_existing": True}
            loaded = session.execute(existing, bind_arguments=bind, execution_options=options).unique().scalars()
            self.found |= {tuple(sa.inspect(each).identity): each for each in loaded}
        ended = [place for place, key in self.duplicates.items() if key not in self.found]
        for place in ended:
            del self.duplicates[place]
        return ended

    def _refuse_duplicates(self, session: Session, first_of: Mapping[int, int]) -> None:
        """Raise JobExists for the first job that is a duplicate."""
        again = [place for place, first in first_of.items() if place != first and place not in self.duplicates]
        refused = sorted([*self.duplicates, *again])
        if not refused:
            return
        place, job = refused[0], self.jobs[refused[0]]
        if place in again:
            existing, which = self.jobs[first_of[place]].job, "is given in the same call"
        elif place in self._load(session):
            return
        else:
            existing, which = self.found[self.duplicates[place]], f"has the key {key_text(self.duplicates[place])}"
        names = ", ".join(f"{name}={getattr(job.job, name)!r}" for name in self.key.config.attributes)
        msg = f"enqueue(on_duplicate='raise'): {job.name} with {names} exists; it {which}"
        raise JobExists(msg, job.job, existing)

    # -- replace the values of existing jobs ---------------------------------------------------------------------------

    def _lock(self, connection: sa.Connection) -> list[int]:
        """Lock the existing jobs that wait; return the duplicates of those that have ended meanwhile, or are others."""
        known = self.locked | self.running
        places = [place for place, key in self.duplicates.items() if key not in known]
        if not places:
            return []
        self.locked |= lock_waiting(connection, self.key, [self.duplicates[place] for place in places])
        rest = [place for place in places if self.duplicates[place] not in self.locked]
        ended = []
        for place, one in zip(rest, self._search(connection, rest) if rest else (), strict=True):
            if one.existing is not None and one.existing == self.duplicates[place]:
                self.running.add(one.existing)
            else:
                del self.duplicates[place]
                ended.append(place)
        return ended

    def _waits_again(self) -> bool:
        """Return whether an existing job that was running is pending by now, so that it can be replaced after all."""
        status = self.spec.attributes.get("status", "")
        pending = self.spec.config.states.pending
        again = {key for key in self.running if getattr(self.found.get(key), status, None) == pending}
        self.running -= again
        self.found = {key: job for key, job in self.found.items() if key not in again}
        return bool(again)

    def _replace(self, session: Session, connection: sa.Connection) -> set[NewJob]:
        """Write the values of duplicates into the rows of existing jobs; return those of them that are of this call."""
        own = {self._key_of(place): self.jobs[place] for place in self.rows}
        # The last of several duplicates of one job counts.
        replaced = {
            key: (self.jobs[place], self.found[key])
            for place, key in sorted(self.duplicates.items())
            if key in self.locked
        }
        replace(connection, self.key, replaced, keep_time=self.on_duplicate == "replace_keep_time")
        self.found = {key: job for key, job in self.found.items() if key not in replaced or key in own}
        self._load(session)
        return {own[key] for key in replaced if key in own}


@overload
def enqueue(
    session: Session | scoped_session[Any], jobs: Iterable[T], /, *, on_duplicate: OnDuplicate = "skip"
) -> list[Enqueued[T]]: ...
@overload
def enqueue(
    session: Session | scoped_session[Any], jobs: T, /, *, on_duplicate: OnDuplicate = "skip"
) -> list[Enqueued[T]]: ...
def enqueue(session: Any, jobs: Any, /, *, on_duplicate: OnDuplicate = "skip") -> list[Enqueued[Any]]:
    """Insert those jobs that are no duplicates, in the session's transaction, and return what became of each, in order.

    A job is a duplicate if a job with the same values exists, see :class:`~sqlaqueue.Unique`. The call looks for
    existing jobs first, so that it does not wait for one that it can see, regardless of what another transaction does
    with it. It does wait for a transaction that has inserted such a job and not committed it, up to the
    ``lock_timeout`` of the session. If that transaction is rolled back, the job is inserted.

    As ``session.add()`` and ``session.flush()`` do, it flushes the session, adds the objects that the jobs refer to,
    and applies defaults. Do not add the jobs to the session yourself.

    Of a queue with ``Unique("customer_id")``::

        results = enqueue(session, [Invoice(customer_id=7), Invoice(customer_id=8)])
        session.commit()
        print(sum(created for _, created in results), "are new")

    :param jobs: a new instance of a queue class, or several of one queue.
    :param on_duplicate: what to do about a duplicate. ``"skip"`` returns the existing job. ``"raise"`` inserts nothing,
        and raises an error. ``"replace"`` moves the values of the new job to the existing one if that is pending: all
        columns but its key, the attributes that make it unique, and those of the queue; its attempts count from 0.
        ``"replace_keep_time"`` moves all of these but ``run_at``. An existing job that is running is never changed.
    :raises JobExists: with ``on_duplicate="raise"``, for the first duplicate.
    :raises StatementError: for instances that are in the database, and for a queue that cannot replace.
    :raises sqlalchemy.exc.DBAPIError: if the server refuses a row; under REPEATABLE READ and SERIALIZABLE with the
        SQLSTATE 40001 if the existing job was committed after the transaction had begun. Roll back, and repeat the
        transaction.
    """
    check_session(session, "enqueue", is_async=False, has_async_version=True)
    return enqueue_in(session_in_scope(session), jobs, on_duplicate)


def enqueue_in(session: Session, jobs: Any, on_duplicate: OnDuplicate) -> list[Enqueued[Any]]:
    listed: list[Any] = instances(jobs, "enqueue")
    if on_duplicate not in get_args(OnDuplicate):
        known = get_args(OnDuplicate)
        msg = f"on_duplicate={on_duplicate!r}: use one of {', '.join(map(repr, known))}"
        raise StatementError(msg + did_you_mean(str(on_duplicate), known))
    if not listed:
        return []
    spec = spec_of(type(listed[0]))
    _check_new(session, listed)
    key = unique_key(spec)
    if on_duplicate.startswith("replace"):
        _check_can_replace(spec, key, on_duplicate)
    if key is None:
        session.add_all(listed)
        session.flush()
        return [Enqueued(job, created=True) for job in listed]
    result: list[Enqueued[Any]] = execute(session, Enqueueing(key, listed, on_duplicate).run)
    return result


def _check_new(session: Session, jobs: Sequence[Any]) -> None:
    """Refuse instances that are no new jobs of this session."""
    seen: set[int] = set()
    for job in jobs:
        name, state = type(job).__name__, sa.inspect(job)
        if id(job) in seen:
            msg = f"enqueue(): the same {name} is given twice; make an instance for each job"
            raise StatementError(msg)
        seen.add(id(job))
        if state.key is not None:
            msg = (
                f"enqueue(): this {name} is in the database already; give new instances, and do not add them to the "
                "session, which flushes them before a query"
            )
            raise StatementError(msg)
        if state.session is not None and state.session is not session:
            msg = f"enqueue(): this {name} was added to another session; do not add it, enqueue() does"
            raise StatementError(msg)


def _check_can_replace(spec: QueueSpec, key: UniqueKey | None, on_duplicate: OnDuplicate) -> None:
    """Refuse to replace where no job is a duplicate, or where a running job reads as pending."""
    what = f"enqueue(on_duplicate={on_duplicate!r}): {spec.model.__name__}"
    if key is None:
        msg = f"{what} is not unique, so no job is a duplicate; set QueueConfig(unique=Unique(...))"
        raise StatementError(msg)
    if not spec.strategy.tells_running_apart:
        msg = (
            f'{what}: under the strategy "{spec.strategy.name}" a running job still reads as pending, and its values '
            'would change while it runs; use strategy="update_status", or on_duplicate="skip"'
        )
        raise StatementError(msg)


@overload
async def async_enqueue(
    session: AsyncSession | async_scoped_session[Any], jobs: Iterable[T], /, *, on_duplicate: OnDuplicate = "skip"
) -> list[Enqueued[T]]: ...
@overload
async def async_enqueue(
    session: AsyncSession | async_scoped_session[Any], jobs: T, /, *, on_duplicate: OnDuplicate = "skip"
) -> list[Enqueued[T]]: ...
async def async_enqueue(session: Any, jobs: Any, /, *, on_duplicate: OnDuplicate = "skip") -> list[Enqueued[Any]]:
    """Insert those jobs that are no duplicates, like :func:`~sqlaqueue.enqueue`, which has parameters and errors.

    ::

        [(invoice, created)] = await async_enqueue(async_session, Invoice(customer_id=7))
        await async_session.commit()
    """
    check_session(session, "async_enqueue", is_async=True)
    result: list[Enqueued[Any]] = await session_in_scope(session).run_sync(enqueue_in, jobs, on_duplicate)
    return result
