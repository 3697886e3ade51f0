"""Enqueue jobs that are unique: :func:`enqueue`."""

from __future__ import annotations

import contextlib
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, TypeVar, get_args, overload

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError, IntegrityError, InvalidRequestError
from sqlalchemy.orm import Session, SessionTransaction, scoped_session
from sqlalchemy.orm.attributes import instance_state

from sqlaqueue.exc import JobExists, StatementError
from sqlaqueue.mapping.mixin import spec_of
from sqlaqueue.queue.run import Key, key_text
from sqlaqueue.queue.spec import QueueSpec
from sqlaqueue.sessions import check_session, execute, session_in_scope
from sqlaqueue.sql.engine import engine_of, own_work, violated_constraint
from sqlaqueue.sql.types import check_dialect
from sqlaqueue.statements.selection import instances, without_criteria
from sqlaqueue.strategies.unique_key import UniqueKey, names_unique_index, unique_key
from sqlaqueue.texts import did_you_mean
from sqlaqueue.unique.existing import (
    Found,
    NewJob,
    check_index,
    lock_waiting,
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
_SNAPSHOTS = ("REPEATABLE READ", "SERIALIZABLE")
_NOT_SERIALIZABLE = """DO $$BEGIN
  RAISE SQLSTATE '40001' USING MESSAGE = 'a duplicate of a job was committed after this transaction had started';
END$$"""


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

    It finds out which jobs are duplicates, inserts the others by a flush in a savepoint, and moves values to existing
    jobs. Where a flush meets a duplicate that is new, the savepoint is rolled back, and the search is repeated.
    """

    def __init__(self, session: Session, key: UniqueKey, jobs: Sequence[Any], on_duplicate: OnDuplicate) -> None:
        self.session, self.key, self.spec, self.on_duplicate = session, key, key.spec, on_duplicate
        self.replaces = on_duplicate.startswith("replace")
        self.jobs = [NewJob(job) for job in jobs]
        self.values: list[list[Any]] = []
        self.created = set[int]()
        """The jobs that were inserted."""
        self.duplicates: dict[int, Key] = {}
        """The jobs that are duplicates, each with the key of the existing job."""
        self.found: dict[Key, Any] = {}
        """The instances of existing jobs by their keys."""
        self.locked, self.running = set[Key](), set[Key]()
        """The keys of existing jobs whose values are to be replaced, and of those that are running."""
        self.savepoint: SessionTransaction | None = None
        """What undoes the call; None before anything is written."""
        self.most = len(jobs)
        """How many jobs are inserted at a time; fewer after two flushes that have met duplicates."""
        self.refusals = 0
        """How many flushes have met a duplicate."""
        self.refused: tuple[IntegrityError | None, Sequence[int]] = None, ()
        """The error of the last flush, and its jobs, if it has met a duplicate."""

    def run(self) -> list[Enqueued[Any]]:
        try:
            self._take_out(range(len(self.jobs)))
            self.session.flush()
            connection = self.session.connection(bind_arguments={"mapper": self.spec.mapper})
            self._enqueue(connection)
        except BaseException:
            self._undo()
            raise
        finally:
            for place, job in enumerate(self.jobs):
                if place not in self.created:
                    job.relationships.keep()
        if self.savepoint is not None:
            self.savepoint.commit()
        return [
            Enqueued(job.job, created=True)
            if place in self.created
            else Enqueued(self.found[self.duplicates[place]], created=False)
            for place, job in enumerate(self.jobs)
        ]

    def _take_out(self, places: Iterable[int]) -> None:
        """Take jobs out of the session, and out of the collections of other objects."""
        ids, jobs = {id(job.job) for job in self.jobs}, [self.jobs[place].relationships for place in places]
        with self.session.no_autoflush:
            # All of them at each step: what one job refers to may take others along.
            for job in jobs:
                job.read(ids)
            for job in jobs:
                job.add_parents(self.session)
            for job in jobs:
                job.take_out(self.session)
            refuse_referrers(self.session, ids)

    def _enqueue(self, connection: sa.Connection) -> None:
        """Insert the jobs that are no duplicates, and find the existing jobs of the others."""
        if _level(connection) == "AUTOCOMMIT" and self.on_duplicate != "skip":
            what = f"enqueue(on_duplicate={self.on_duplicate!r})"
            msg = f"{what}: it needs a transaction, and the engine has AUTOCOMMIT"
            raise StatementError(msg)
        check_index(connection, self.key)
        for job in self.jobs:
            job.set_foreign_keys()
        set_created_at(connection, self.key, self.jobs)
        self.values = [job.unique_values(self.key, connection) for job in self.jobs]
        self._resolve(connection)
        if self.replaces:
            self._replace(connection)

    def _undo(self) -> None:
        if self.savepoint is not None:
            _roll_back(self.savepoint)

    def _begin(self) -> SessionTransaction:
        """Begin a savepoint, so that an error leaves none of the rows in the transaction."""
        with own_work():
            savepoint = self.session.begin_nested()
            # Before the next statement of a connection, not of the session.
            self.session.connection(bind_arguments={"mapper": self.spec.mapper})
        return savepoint

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

    def _resolve(self, connection: sa.Connection) -> None:
        """Insert each job or find the existing one; where that ends meanwhile, or is a new one, try again."""
        places, stuck = list(range(len(self.jobs))), 0
        while stuck < _MOST_ROUNDS:
            before = len(self.created) + len(self.duplicates)
            places = self._insert_or_find(connection, places)
            if self.replaces:
                places += self._lock(connection)
            places = places or self._load()
            if not places and not self._waits_again():
                return
            stuck = 0 if len(self.created) + len(self.duplicates) > before else stuck + 1
        places = places or self._load()
        if not places:
            # Existing jobs that were running and waiting in turn are returned as they are.
            return
        msg = (
            f"enqueue(): this {self.jobs[places[0]].name} has a duplicate that cannot be seen; does row-level security "
            "hide it from this role, or a trigger change its values?"
        )
        raise StatementError(msg)

    def _search(self, connection: sa.Connection, places: Sequence[int]) -> list[Found]:
        return search(connection, self.key, [self.values[place] for place in places])

    def _insert_or_find(self, connection: sa.Connection, places: Sequence[int]) -> list[int]:
        """Find existing jobs, insert those that have none, and return those that are left for the next round."""
        searched = [place for place in places if self._may_be_duplicate(place)]
        first_of = {place: place for place in places}
        order = dict.fromkeys(places, 0)
        for place, one in zip(searched, self._search(connection, searched) if searched else (), strict=True):
            first_of[place], order[place] = searched[one.first], one.order
            if one.existing is not None:
                self.duplicates[place] = one.existing
        if self.on_duplicate == "raise":
            self._refuse_duplicates(first_of)
        self._check_snapshot(connection)
        new = [place for place in places if place not in self.duplicates and first_of[place] == place]
        repeated = {first for place, first in first_of.items() if first != place}
        batch = self._sorted(new, order)[: self.most]
        if batch:
            self._flush(connection, batch, repeated if self.replaces else ())
        left = {place for place in new if place not in self.created}
        for place, first in first_of.items():
            if first in left:
                left.add(place)
            elif first != place and place not in self.duplicates:
                self.duplicates[place] = self._key_of(first)
        return sorted(left)

    def _sorted(self, places: Sequence[int], order: Mapping[int, int]) -> list[int]:
        """Sort jobs by their values, so that two calls do not wait for each other in a circle.

        Those with the same attributes follow each other, as a flush inserts them by one statement.
        """
        groups: dict[frozenset[str], list[int]] = {}
        for place in sorted(places, key=order.__getitem__):
            present = instance_state(self.jobs[place].job).dict
            groups.setdefault(frozenset(name for name in present if present[name] is not None), []).append(place)
        return [place for group in groups.values() for place in group]

    def _flush(self, connection: sa.Connection, places: Sequence[int], repeated: Container[int]) -> None:
        """Insert jobs with what belongs to them; none of them if one has a duplicate by now.

        It waits for a transaction that has inserted or deleted a job with the same values.

        :param repeated: jobs whose values are replaced by those of later ones.
        """
        jobs = [self.jobs[place] for place in places]
        before = [set(instance_state(job.job).dict) for job in jobs]
        savepoint = None if _level(connection) == "AUTOCOMMIT" else self._begin()
        try:
            with self.session.no_autoflush:
                for place, job in zip(places, jobs, strict=True):
                    job.relationships.put_parents_back(forget=place in repeated)
                    job.relationships.put_others_back()
                self.session.add_all([job.job for job in jobs])
            self.session.flush()
        except BaseException as error:
            if savepoint is not None:
                _roll_back(savepoint)
            # After a deadlock on MariaDB, the flush has found no savepoint to return to.
            first = error.__context__
            if isinstance(error, DBAPIError) and isinstance(first, DBAPIError):
                raise first from first.orig
            if savepoint is None or not isinstance(error, IntegrityError) or not self._is_duplicate(error):
                raise
            self.refused, self.refusals = (error, places), self.refusals + 1
            if self.refusals > 1:
                # The fewer there are, the shorter is the time in which others may insert the same ones.
                self.most = max(1, len(places) // 2)
            for place, job, names in zip(places, jobs, before, strict=True):
                # A listener may have changed them.
                self.values[place] = job.unique_values(self.key, connection)
                job.forget(names, self.key.stored)
            self._take_out(places)
            return
        if self.savepoint is None:
            self.savepoint = savepoint
        elif savepoint is not None:
            savepoint.commit()
        self.most *= 2
        self.created.update(places)
        self.found |= {self._key_of(place): self.jobs[place].job for place in places}

    def _is_duplicate(self, error: IntegrityError) -> bool:
        return names_unique_index(self.spec, violated_constraint(error) or "")

    def _check_snapshot(self, connection: sa.Connection) -> None:
        """Raise an error if a duplicate was committed after the transaction had started: it never sees it."""
        error, places = self.refused
        self.refused = None, ()
        if error is None or any(place in self.duplicates for place in places) or _level(connection) not in _SNAPSHOTS:
            return
        if engine_of(connection.dialect) is None:
            # For programs that repeat the transaction: the INSERT has only said that there is a duplicate.
            connection.exec_driver_sql(_NOT_SERIALIZABLE)
        raise error

    def _key_of(self, place: int) -> Key:
        return tuple(sa.inspect(self.jobs[place].job).identity) if place in self.created else self.duplicates[place]

    def _load(self) -> list[int]:
        """Load the existing jobs, and return the duplicates of those that have ended meanwhile."""
        keys = dict.fromkeys(key for key in self.duplicates.values() if key not in self.found)
        if keys:
            existing = without_criteria(with_keys(self.spec, sa.select(self.spec.model), list(keys)))
            bind = {"mapper": self.spec.mapper}
            options = {"populate_existing": True}
            loaded = self.session.execute(existing, bind_arguments=bind, execution_options=options).unique().scalars()
            self.found |= {tuple(sa.inspect(each).identity): each for each in loaded}
        ended = [place for place, key in self.duplicates.items() if key not in self.found]
        for place in ended:
            del self.duplicates[place]
        return ended

    def _refuse_duplicates(self, first_of: Mapping[int, int]) -> None:
        """Raise JobExists for the first job that is a duplicate."""
        again = [place for place, first in first_of.items() if place != first and place not in self.duplicates]
        refused = sorted([*self.duplicates, *again])
        if not refused:
            return
        place, job = refused[0], self.jobs[refused[0]]
        if place in again:
            existing, which = self.jobs[first_of[place]].job, "is given in the same call"
        elif place in self._load():
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
        self.savepoint = self.savepoint or self._begin()
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

    def _replace(self, connection: sa.Connection) -> None:
        """Write the values of duplicates into the rows of existing jobs."""
        own = {self._key_of(place): self.jobs[place] for place in self.created}
        # The last of several duplicates of one job counts.
        replaced = {
            key: (self.jobs[place], self.found[key])
            for place, key in sorted(self.duplicates.items())
            if key in self.locked
        }
        replace(connection, self.key, replaced, keep_time=self.on_duplicate == "replace_keep_time")
        self.found = {key: job for key, job in self.found.items() if key not in replaced or key in own}
        self._load()
        for job in (own[key] for key in replaced if key in own):
            self.session.refresh(job.job, [*job.columns()])


def _roll_back(savepoint: SessionTransaction) -> None:
    # After a deadlock, MariaDB has rolled back the transaction, and its savepoints with it.
    with contextlib.suppress(DBAPIError, InvalidRequestError):
        savepoint.rollback()


def _level(connection: sa.Connection) -> str:
    """Return the isolation level of a connection, as the program has set it."""
    level = connection.get_execution_options().get("isolation_level", connection.default_isolation_level)
    return str(level).replace("_", " ").upper()


@overload
def enqueue(
    session: Session | scoped_session[Any], jobs: Iterable[T], /, *, on_duplicate: OnDuplicate = "skip"
) -> list[Enqueued[T]]: ...
@overload
def enqueue(
    session: Session | scoped_session[Any], jobs: T, /, *, on_duplicate: OnDuplicate = "skip"
) -> list[Enqueued[T]]: ...
def enqueue(session: Any, jobs: Any, /, *, on_duplicate: OnDuplicate = "skip") -> list[Enqueued[Any]]:
    """Insert those jobs that are no duplicates, in the session's transaction, and return what became of each.

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
        SQLSTATE 40001 if the existing job was committed after the transaction had started. Roll back, and repeat the
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
    check_dialect(session.get_bind(spec.mapper).dialect, f"enqueue({spec.model.__name__})", "the engine of the session")
    key = unique_key(spec)
    if on_duplicate.startswith("replace"):
        _check_can_replace(spec, key, on_duplicate)
    if key is None:
        session.add_all(listed)
        session.flush()
        return [Enqueued(job, created=True) for job in listed]
    result: list[Enqueued[Any]] = execute(session, lambda session: Enqueueing(session, key, listed, on_duplicate).run())
    return result


def _check_new(session: Session, jobs: Sequence[Any]) -> None:
    """Refuse instances that are no new jobs of this session."""
    seen: set[int] = set()
    for job in jobs:
        name, state = type(job).__name__, sa.inspect(job)
        if id(job) in seen:
            msg = f"enqueue(): one {name} is given twice; make an instance for each job"
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
