"""What operators use: :class:`QueueAdmin` for the jobs of a queue, :class:`ScheduleAdmin` for schedules.

Each has a version for an AsyncSession, whose methods run those of the other one by ``AsyncSession.run_sync()``.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, TypeVar

import sqlalchemy as sa
from sqlalchemy.exc import UnboundExecutionError
from sqlalchemy.orm import Session, scoped_session

from sqlaqueue.admin import changes, state
from sqlaqueue.admin import jobs as reading
from sqlaqueue.admin import schedules as stored
from sqlaqueue.admin.changes import BATCH_SIZE, Cancelled, Requeued
from sqlaqueue.admin.explain_job import Explanation, explain_job
from sqlaqueue.admin.jobs import Attempt, FailureGroup, JobFilter, JobInfo
from sqlaqueue.admin.schedules import ScheduleInfo
from sqlaqueue.admin.state import DEFAULT_LIMIT, Depth, Pause, Stats
from sqlaqueue.exc import ConfigurationError, NotAQueueError, StatementError
from sqlaqueue.mapping.mixin import QueueMixin, spec_of
from sqlaqueue.queue.config import is_count
from sqlaqueue.queue.options import FINISHED, UNFINISHED
from sqlaqueue.queue.run import key_text
from sqlaqueue.queue.spec import QueueSpec
from sqlaqueue.schedules.schedule import Schedule
from sqlaqueue.sessions import check_session, session_in_scope
from sqlaqueue.sql.types import check_dialect
from sqlaqueue.statements.selection import key_of, select_jobs

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session

P = ParamSpec("P")
T = TypeVar("T")
Operation = TypeVar("Operation", bound="_SyncAdmin")

_ALL = JobFilter()
_UNFINISHED = JobFilter(states=UNFINISHED)
_FAILED = JobFilter(states=("failed",))
_FINISHED = JobFilter(states=FINISHED)


class _Admin:
    """A session and a queue, which are checked once."""

    session: Any
    model: type[Any]

    def _check(self, *, is_async: bool) -> None:
        name = type(self).__name__
        check_session(self.session, name, is_async=is_async, has_async_version=True)
        mapper = spec_of(self.model).mapper
        try:
            bind = self.session.get_bind(mapper)
        except UnboundExecutionError:
            kind = "AsyncSession" if is_async else "Session"
            msg = f"{name}(): this session has no engine for {self.model.__name__}; give {kind}(engine)"
            raise ConfigurationError(msg) from None
        check_dialect(bind.dialect, f"{name}({self.model.__name__})", "the engine of the session")

    @property
    def _spec(self) -> QueueSpec:
        return spec_of(self.model)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._spec.name!r}, {self.model.__name__}>"


class _SyncAdmin(_Admin):
    def __init__(self, session: Session | scoped_session[Any], model: type[Any]) -> None:
        self.session = session
        self.model = model
        self._check(is_async=False)

    @property
    def _session(self) -> Session:
        session: Session = session_in_scope(self.session)
        return session


class _AsyncAdmin(_Admin, Generic[Operation]):
    _sync: type[Operation]

    def __init__(self, session: AsyncSession | async_scoped_session[Any], model: type[Any]) -> None:
        self.session = session
        self.model = model
        self._check(is_async=True)

    async def _run(self, method: Callable[Concatenate[Operation, P], T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        def run(session: Session) -> T:
            return method(self._sync(session, self.model), *args, **kwargs)

        result: T = await session_in_scope(self.session).run_sync(run)
        return result


def _check_counts(method: str, *, limit: int | None, batch_size: int = 1) -> None:
    for name, count in (("batch_size", batch_size), ("limit", 1 if limit is None else limit)):
        if not is_count(count):
            msg = f"QueueAdmin.{method}({name}={count!r}): give an integer of 1 or more"
            raise StatementError(msg)


# -- queues ------------------------------------------------------------------------------------------------------------


class QueueAdmin(_SyncAdmin):
    """Shows what a queue holds, and changes its jobs.

    ::

        with Session(engine) as session:
            admin = QueueAdmin(session, Email)
            print(admin.stats().due)
            for group in admin.failures():
                print(group.kind, group.count)
            admin.requeue(JobFilter(states=("failed",), error="TimeoutError"))

    Methods that only read leave the transaction of the session open. Methods that change something execute and commit;
    those that change many jobs work in batches, and commit each.

    A key is the value of the primary key, or a tuple for a composite key; a text is converted by the database, so that
    the key may come from a command line.

    :param session: a Session, or a scoped_session.
    :param model: a queue class. Of a subclass with the table of its parent, only its own jobs are listed and changed.
    :raises ConfigurationError: for anything but a Session, such as an engine or an AsyncSession, and for a session
        without an engine.
    :raises NotAQueueError: if ``model`` is not a queue class.
    """

    # -- reading ---------------------------------------------------------------------------------------------------

    def stats(self, *, finished: bool = True) -> Stats:
        """Return statistics of the queue: jobs by state, due jobs, Consumers, and what is wrong.

        :param finished: whether to count finished jobs, which reads the whole table. Unfinished jobs are found by the
            indexes for claims and leases, if the strategy has them.
        """
        return state.stats(self._session, self.model, finished=finished)

    def depth(self, *, limit: int = DEFAULT_LIMIT) -> Depth:
        """Return how many jobs of the whole queue wait and run, of subclasses as well; cheaper than :meth:`stats`.

        It reads the indexes for claims and leases only, and at most ``limit`` entries of each, or of each priority.

        :param limit: the number up to which jobs are counted: a higher number of jobs is returned as this one.
        :raises StatementError: if ``limit`` is not an integer of 1 or more.
        """
        _check_counts("depth", limit=limit)
        return state.depth(self._session, self.model, limit=limit)

    def jobs(self, job_filter: JobFilter | None = None, *, limit: int = 20) -> list[JobInfo]:
        """Return jobs, newest first: by the time when they finished or else were enqueued.

        ::

            for info in admin.jobs(JobFilter(states=("failed",)), limit=5):
                print(info.key, info.last_error)

        :param job_filter: selects jobs; None for all.
        :param limit: maximum number of jobs.
        :raises StatementError: if the model leaves out an attribute that ``job_filter`` needs, or ``limit`` is not an
            integer of 1 or more.
        """
        _check_counts("jobs", limit=limit)
        return reading.jobs(self._session, self.model, job_filter, limit=limit)

    def job(self, key: Any) -> tuple[JobInfo, dict[str, Any]] | None:
        """Return one job, with the values of its row by column name; None if there is no such job.

        :param key: its primary key.
        """
        return reading.job(self._session, self.model, key)

    def count(self, job_filter: JobFilter | None = None) -> dict[str, int]:
        """Return the number of jobs by state, without states that no job has, such as ``{"failed": 3}``.

        :param job_filter: selects jobs; None for all.
        :raises StatementError: if the model leaves out an attribute that ``job_filter`` needs.
        """
        return reading.count(self._session, self.model, job_filter or _ALL)

    def failures(self, *, examples: int = 3) -> list[FailureGroup]:
        """Return the failed jobs in groups by the kind of their error, the largest first.

        :param examples: number of keys for each group.
        """
        return reading.failures(self._session, self.model, examples=examples)

    def attempts(self, key: Any, *, limit: int = 20) -> list[Attempt]:
        """Return the ended attempts of one job, newest first; the job itself may be deleted already.

        :param key: its primary key.
        :param limit: maximum number of attempts.
        :raises StatementError: if the queue has no attempt history, or ``limit`` is not an integer of 1 or more.
        """
        _check_counts("attempts", limit=limit)
        return reading.attempts(self._session, self.model, key, limit=limit)

    def explain(self, job: Any) -> Explanation:
        """Say why a job does not run, or why a new instance would not be enqueued.

        ::

            print(admin.explain(5))

        It changes nothing: it does not flush the session, adds no instance to it, and keeps no lock. For a moment it
        locks a pending job, to find out whether another transaction has.

        :param job: the primary key of a job; an instance that is in the database; or a new instance, which is not added
            to a session, to learn whether a duplicate of it exists, see :class:`~sqlaqueue.Unique`.
        :raises NotAQueueError: for an instance of another class.
        :raises StatementError: for an instance that waits for a flush.
        """
        if isinstance(job, QueueMixin):
            self._check_class(type(job), "explain")
        return explain_job(self._session, self.model, job)

    def consumers(self) -> Sequence[Any]:
        """Return the live Consumers, as rows with the columns of :func:`sqlaqueue.consumers`."""
        return state.consumers(self._session, self.model)

    def is_paused(self) -> bool:
        """Return whether the queue is paused."""
        return state.paused(self._session, self.model)

    # -- changing jobs ---------------------------------------------------------------------------------------------

    def cancel(
        self,
        jobs: Any = _UNFINISHED,
        job_filter: JobFilter | None = None,
        *,
        batch_size: int = BATCH_SIZE,
        limit: int | None = None,
    ) -> Cancelled:
        """Cancel pending jobs, request the cancellation of running ones, and commit each batch.

        ::

            admin.cancel(5)
            admin.cancel(select(Email).where(Email.customer_id == 7))
            admin.cancel(JobFilter(states=("pending",), since="created_at", older_than=timedelta(days=7)))

        :param jobs: a JobFilter, ``select(Model).where(...)``, a key, an instance, or a list of keys or instances;
            all pending and running jobs by default.
        :param job_filter: narrows a select; pending and running jobs by default.
        :param batch_size: number of jobs that are changed in one transaction.
        :param limit: maximum number of jobs of a filter or a select; None for all.
        :raises NotAQueueError: for an instance or a select of another class, and for anything else.
        :raises StatementError: if ``batch_size`` or ``limit`` is not an integer of 1 or more.
        """
        _check_counts("cancel", batch_size=batch_size, limit=limit)
        chosen = self._chosen("cancel", jobs, job_filter, _UNFINISHED, UNFINISHED)
        return changes.cancel(self._session, *chosen, batch_size=batch_size, limit=limit)

    def requeue(
        self,
        jobs: Any = _FAILED,
        job_filter: JobFilter | None = None,
        *,
        batch_size: int = BATCH_SIZE,
        limit: int | None = None,
    ) -> Requeued:
        """Make finished jobs pending again, with no attempt counted; commit each batch, and return their number.

        Of several jobs with the same values of :class:`~sqlaqueue.Unique` one becomes pending: in one batch the newest,
        and none if that of an earlier batch is pending already. Batches are in the order of the keys. The result names
        those left, of which ``Unique(on_return=...)`` says what becomes of them.

        ::

            admin.requeue(5)
            admin.requeue(JobFilter(states=("failed",), error="TimeoutError"), limit=100)

        :param jobs: a JobFilter, ``select(Model).where(...)``, a key, an instance, or a list of keys or instances;
            all failed jobs by default. A filter without ``states`` selects completed jobs as well.
        :param job_filter: narrows a select; failed jobs by default.
        :param batch_size: number of jobs that are changed in one transaction.
        :param limit: maximum number of jobs of a filter or a select; None for all.
        :raises NotAQueueError: for an instance or a select of another class, and for anything else.
        :raises StatementError: if ``batch_size`` or ``limit`` is not an integer of 1 or more.
        """
        _check_counts("requeue", batch_size=batch_size, limit=limit)
        chosen = self._chosen("requeue", jobs, job_filter, _FAILED, FINISHED)
        return changes.requeue(self._session, *chosen, batch_size=batch_size, limit=limit)

    def purge(
        self,
        jobs: Any = _FINISHED,
        job_filter: JobFilter | None = None,
        *,
        batch_size: int = BATCH_SIZE,
        limit: int | None = None,
    ) -> int:
        """Delete finished jobs, commit each batch, and return their number.

        ::

            admin.purge(JobFilter(states=("completed",), older_than=timedelta(days=30)))

        :param jobs: a JobFilter, ``select(Model).where(...)``, a key, an instance, or a list of keys or instances;
            all finished jobs by default.
        :param job_filter: narrows a select; finished jobs by default.
        :param batch_size: number of jobs that are deleted in one transaction.
        :param limit: maximum number of jobs; None for all.
        :raises NotAQueueError: for an instance or a select of another class, and for anything else.
        :raises StatementError: if ``batch_size`` or ``limit`` is not an integer of 1 or more.
        """
        _check_counts("purge", batch_size=batch_size, limit=limit)
        target, which = self._chosen("purge", jobs, job_filter, _FINISHED, FINISHED)
        if isinstance(target, list):
            target, which = self.model, self._of_keys([key_of(job, "purge") for job in target], FINISHED)
        return changes.purge(self._session, target, which, batch_size=batch_size, limit=limit)

    # -- the queue itself ------------------------------------------------------------------------------------------

    def rescue(self) -> int:
        """Make jobs whose lease has expired pending again, commit, and return their number, as Consumers regularly do.

        A job of a unique queue that has a duplicate by now counts as well. One whose duplicate is not committed yet is
        left as it is; if there are many of these, other jobs may be left to the next call.
        """
        return changes.rescue(self._session, self.model)

    def reconcile(self) -> int:
        """Insert missing messages and delete superfluous ones, commit, and return the number of jobs concerned."""
        return changes.reconcile(self._session, self.model)

    def pause(self, *, reason: str = "", author: str = "") -> None:
        """Pause the queue, so that none of its jobs is claimed, and commit. Running jobs finish.

        ::

            admin.pause(reason="the mail server is being moved", author="ada")

        :param reason: why, in at most 200 characters. A queue that is paused already keeps the reason that it has.
        :param author: who pauses it, in at most 50 characters.
        :raises StatementError: if one is longer, or has characters that cannot be printed.
        """
        changes.pause(self._session, self.model, reason=reason, author=author)

    def pause_info(self) -> Pause | None:
        """Return since when the queue has been paused, why and by whom; None if it is not."""
        spec = spec_of(self.model)
        return state.pauses(self._session, [spec]).get(spec.name)

    def resume(self) -> None:
        """Let Consumers claim jobs of a paused queue again, and commit."""
        changes.resume(self._session, self.model)

    # -- which jobs ------------------------------------------------------------------------------------------------

    def _chosen(
        self, method: str, jobs: Any, job_filter: JobFilter | None, default: JobFilter, states: tuple[str, ...]
    ) -> tuple[Any, JobFilter]:
        """Return the instances; or the select or the class, with a filter.

        :param default: the filter of a select without one.
        :param states: the states of jobs that are given by their keys.
        """
        if isinstance(jobs, sa.Select):
            self._check_class(select_jobs(jobs, method).entity, method)
            return jobs, job_filter or default
        if job_filter is not None:
            msg = f"QueueAdmin.{method}(): job_filter narrows a select(), and this is {jobs!r}; leave job_filter out"
            raise StatementError(msg)
        if isinstance(jobs, JobFilter):
            return self.model, jobs
        listed = self._listed(jobs)
        if all(isinstance(each, QueueMixin) for each in listed):
            for job in listed:
                self._check_class(type(job), method)
            return listed, default
        for each in listed:
            if each is None or isinstance(each, type | QueueMixin | JobInfo):
                msg = (
                    f"QueueAdmin.{method}() takes keys or instances of {self.model.__name__}, a select() or a "
                    f"JobFilter, not {each!r}"
                )
                raise NotAQueueError(msg)
        return self.model, self._of_keys(listed, states)

    def _listed(self, jobs: Any) -> list[Any]:
        if isinstance(jobs, QueueMixin | str | bytes) or not isinstance(jobs, Iterable):
            return [jobs]
        listed = list(jobs)
        # A tuple is one key if the primary key is composite, and several keys otherwise.
        may_be_key = isinstance(jobs, tuple) and len(self._spec.keys) > 1
        return [jobs] if may_be_key and listed and not isinstance(listed[0], tuple | QueueMixin) else listed

    def _of_keys(self, keys: Iterable[Any], states: tuple[str, ...]) -> JobFilter:
        return JobFilter(states=states, keys=tuple(map(key_text, keys)))

    def _check_class(self, given: type[Any], method: str) -> None:
        """Refuse jobs of other classes, which would be changed or read as those of this queue."""
        if not issubclass(given, self.model) or spec_of(given) is not self._spec:
            name = spec_of(given).model.__name__
            msg = f"{self!r}.{method}(): this is of the class {given.__name__}; use QueueAdmin(session, {name})"
            raise NotAQueueError(msg)


class AsyncQueueAdmin(_AsyncAdmin[QueueAdmin]):
    """The :class:`QueueAdmin` for an AsyncSession: the same methods, to be awaited.

    ::

        async with AsyncSession(async_engine) as session:
            admin = AsyncQueueAdmin(session, Email)
            print((await admin.stats()).due)
            await admin.requeue(JobFilter(states=("failed",), error="TimeoutError"))

    :param session: an AsyncSession, or an async_scoped_session.
    :param model: a queue class.
    :raises ConfigurationError: for anything but an AsyncSession, and for a session without an engine.
    :raises NotAQueueError: if ``model`` is not a queue class.
    """

    _sync = QueueAdmin

    async def stats(self, *, finished: bool = True) -> Stats:
        """See :meth:`QueueAdmin.stats`."""
        return await self._run(QueueAdmin.stats, finished=finished)

    async def depth(self, *, limit: int = DEFAULT_LIMIT) -> Depth:
        """See :meth:`QueueAdmin.depth`."""
        return await self._run(QueueAdmin.depth, limit=limit)

    async def jobs(self, job_filter: JobFilter | None = None, *, limit: int = 20) -> list[JobInfo]:
        """See :meth:`QueueAdmin.jobs`."""
        return await self._run(QueueAdmin.jobs, job_filter, limit=limit)

    async def job(self, key: Any) -> tuple[JobInfo, dict[str, Any]] | None:
        """See :meth:`QueueAdmin.job`."""
        return await self._run(QueueAdmin.job, key)

    async def count(self, job_filter: JobFilter | None = None) -> dict[str, int]:
        """See :meth:`QueueAdmin.count`."""
        return await self._run(QueueAdmin.count, job_filter)

    async def failures(self, *, examples: int = 3) -> list[FailureGroup]:
        """See :meth:`QueueAdmin.failures`."""
        return await self._run(QueueAdmin.failures, examples=examples)

    async def attempts(self, key: Any, *, limit: int = 20) -> list[Attempt]:
        """See :meth:`QueueAdmin.attempts`."""
        return await self._run(QueueAdmin.attempts, key, limit=limit)

    async def explain(self, job: Any) -> Explanation:
        """See :meth:`QueueAdmin.explain`."""
        return await self._run(QueueAdmin.explain, job)

    async def consumers(self) -> Sequence[Any]:
        """See :meth:`QueueAdmin.consumers`."""
        return await self._run(QueueAdmin.consumers)

    async def is_paused(self) -> bool:
        """See :meth:`QueueAdmin.is_paused`."""
        return await self._run(QueueAdmin.is_paused)

    async def cancel(
        self,
        jobs: Any = _UNFINISHED,
        job_filter: JobFilter | None = None,
        *,
        batch_size: int = BATCH_SIZE,
        limit: int | None = None,
    ) -> Cancelled:
        """See :meth:`QueueAdmin.cancel`."""
        return await self._run(QueueAdmin.cancel, jobs, job_filter, batch_size=batch_size, limit=limit)

    async def requeue(
        self,
        jobs: Any = _FAILED,
        job_filter: JobFilter | None = None,
        *,
        batch_size: int = BATCH_SIZE,
        limit: int | None = None,
    ) -> Requeued:
        """See :meth:`QueueAdmin.requeue`."""
        return await self._run(QueueAdmin.requeue, jobs, job_filter, batch_size=batch_size, limit=limit)

    async def purge(
        self,
        jobs: Any = _FINISHED,
        job_filter: JobFilter | None = None,
        *,
        batch_size: int = BATCH_SIZE,
        limit: int | None = None,
    ) -> int:
        """See :meth:`QueueAdmin.purge`."""
        return await self._run(QueueAdmin.purge, jobs, job_filter, batch_size=batch_size, limit=limit)

    async def rescue(self) -> int:
        """See :meth:`QueueAdmin.rescue`."""
        return await self._run(QueueAdmin.rescue)

    async def reconcile(self) -> int:
        """See :meth:`QueueAdmin.reconcile`."""
        return await self._run(QueueAdmin.reconcile)

    async def pause(self, *, reason: str = "", author: str = "") -> None:
        """See :meth:`QueueAdmin.pause`."""
        await self._run(QueueAdmin.pause, reason=reason, author=author)

    async def pause_info(self) -> Pause | None:
        """See :meth:`QueueAdmin.pause_info`."""
        return await self._run(QueueAdmin.pause_info)

    async def resume(self) -> None:
        """See :meth:`QueueAdmin.resume`."""
        await self._run(QueueAdmin.resume)


# -- schedules ---------------------------------------------------------------------------------------------------------


class ScheduleAdmin(_SyncAdmin):
    """Shows and changes the stored schedules in the tables of a queue; running processes follow within seconds.

    ::

        with Session(engine) as session:
            admin = ScheduleAdmin(session, Invoice)
            admin.add(Schedule("weekly", Invoice, cron="@weekly", values={"amount": 10}))
            admin.edit("weekly", cron="0 6 * * 1", timezone="Europe/Berlin")
            for info in admin.list():
                print(info.name, info.words, info.next_tick)

    Queues of one MetaData and schema share these tables. Methods that change a schedule execute and commit.

    :param session: a Session, or a scoped_session.
    :param model: a queue class.
    :raises ConfigurationError: for anything but a Session, such as an engine or an AsyncSession, and for a session
        without an engine.
    :raises NotAQueueError: if ``model`` is not a queue class.
    """

    def list(self) -> builtins.list[ScheduleInfo]:
        """Return all schedules, by name; they may be of other queues as well."""
        return stored.schedules(self._session, self.model)

    def get(self, name: str) -> ScheduleInfo:
        """Return one schedule.

        :raises StatementError: if no schedule has this name.
        """
        return stored.schedule(self._session, self.model, name)

    def add(self, schedule: Schedule[Any]) -> None:
        """Store a schedule, and commit. Running processes fire it that have imported the class of its jobs.

        :param schedule: a schedule of a class whose schedules are in the same tables.
        :raises StatementError: if there is one of this name, or its class has its schedules in other tables.
        """
        stored.add_schedule(self._session, self.model, schedule)

    def edit(self, name: str, /, **changes: Any) -> None:
        """Change the definition of a schedule, and commit.

        What a program declares under this name has no effect from then on, until :meth:`reset`.

        :param changes: new values of ``cron``, ``every``, ``timezone``, ``values``, ``jitter``, ``catch_up``,
            ``misfire_grace`` and ``skip_unfinished``, as in :class:`~sqlaqueue.Schedule`. ``cron`` replaces ``every``,
            and vice versa.
        :raises StatementError: if there is no schedule of this name, or nothing that can be changed under these names.
        :raises ConfigurationError: for an invalid value.
        """
        stored.edit_schedule(self._session, self.model, name, **changes)

    def pause(self, name: str) -> None:
        """Pause a schedule, and commit. The ticks until it is resumed are skipped.

        :raises StatementError: if no schedule has this name.
        """
        stored.pause_schedule(self._session, self.model, name)

    def resume(self, name: str) -> None:
        """Resume a paused schedule with its next tick, and commit.

        :raises StatementError: if no schedule has this name.
        """
        stored.resume_schedule(self._session, self.model, name)

    def remove(self, name: str) -> None:
        """Delete a schedule, and commit. A program that still declares it stores it again when it starts.

        :raises StatementError: if no schedule has this name.
        """
        stored.remove_schedule(self._session, self.model, name)

    def reset(self, name: str) -> None:
        """Replace what was changed at run time by the definition of the program, and commit.

        :raises StatementError: if no schedule has this name, or no program has declared it.
        """
        stored.reset_schedule(self._session, self.model, name)

    def run(self, name: str) -> None:
        """Let a running process fire a schedule now, in addition to its ticks and even if it is paused, and commit.

        :raises StatementError: if no schedule has this name.
        """
        stored.run_schedule(self._session, self.model, name)


class AsyncScheduleAdmin(_AsyncAdmin[ScheduleAdmin]):
    """The :class:`ScheduleAdmin` for an AsyncSession: the same methods, to be awaited.

    ::

        async with AsyncSession(async_engine) as session:
            print([info.name for info in await AsyncScheduleAdmin(session, Invoice).list()])

    :param session: an AsyncSession, or an async_scoped_session.
    :param model: a queue class.
    :raises ConfigurationError: for anything but an AsyncSession, and for a session without an engine.
    :raises NotAQueueError: if ``model`` is not a queue class.
    """

    _sync = ScheduleAdmin

    async def list(self) -> builtins.list[ScheduleInfo]:
        """See :meth:`ScheduleAdmin.list`."""
        return await self._run(ScheduleAdmin.list)

    async def get(self, name: str) -> ScheduleInfo:
        """See :meth:`ScheduleAdmin.get`."""
        return await self._run(ScheduleAdmin.get, name)

    async def add(self, schedule: Schedule[Any]) -> None:
        """See :meth:`ScheduleAdmin.add`."""
        await self._run(ScheduleAdmin.add, schedule)

    async def edit(self, name: str, /, **changes: Any) -> None:
        """See :meth:`ScheduleAdmin.edit`."""
        await self._run(ScheduleAdmin.edit, name, **changes)

    async def pause(self, name: str) -> None:
        """See :meth:`ScheduleAdmin.pause`."""
        await self._run(ScheduleAdmin.pause, name)

    async def resume(self, name: str) -> None:
        """See :meth:`ScheduleAdmin.resume`."""
        await self._run(ScheduleAdmin.resume, name)

    async def remove(self, name: str) -> None:
        """See :meth:`ScheduleAdmin.remove`."""
        await self._run(ScheduleAdmin.remove, name)

    async def reset(self, name: str) -> None:
        """See :meth:`ScheduleAdmin.reset`."""
        await self._run(ScheduleAdmin.reset, name)

    async def run(self, name: str) -> None:
        """See :meth:`ScheduleAdmin.run`."""
        await self._run(ScheduleAdmin.run, name)
