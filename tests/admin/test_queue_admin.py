"""``QueueAdmin`` and ``ScheduleAdmin``, with both kinds of sessions: what they are given, and what their methods do."""

import asyncio
import inspect
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import (
    AsyncSession,
    async_scoped_session,
    async_sessionmaker,
    create_async_engine,
)
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from sqlaqueue import Schedule, admin
from sqlaqueue.admin import (
    AsyncQueueAdmin,
    AsyncScheduleAdmin,
    Attempt,
    Cancelled,
    Depth,
    Explanation,
    FailureGroup,
    JobFilter,
    JobInfo,
    QueueAdmin,
    Requeued,
    ScheduleAdmin,
    ScheduleInfo,
    Stats,
    doctor,
)
from sqlaqueue.exc import ConfigurationError, NotAQueueError, SqlaqueueError, StatementError
from tests.admin.models import Setup, make_animals, make_rows
from tests.models import create, make_job
from tests.schedules.models import HOUR, hourly, make_report, prepared
from tests.servers import Database

SYNC, ASYNC = [QueueAdmin, ScheduleAdmin], [AsyncQueueAdmin, AsyncScheduleAdmin]
OF_QUEUES = {
    *("stats", "depth", "jobs", "job", "count", "failures", "attempts", "explain", "consumers", "is_paused"),
    *("cancel", "requeue", "purge", "rescue", "reconcile", "pause", "pause_info", "resume"),
}
OF_SCHEDULES = {"list", "get", "add", "edit", "pause", "resume", "remove", "reset", "run"}
HISTORY = {"attempt_history": timedelta(days=1)}
FAILED = {"status": "failed", "last_error": "ValueError: a"}


def methods(cls: type[Any]) -> dict[str, Any]:
    return {name: value for name, value in inspect.getmembers(cls, inspect.isfunction) if not name.startswith("_")}


@asynccontextmanager
async def async_session(shared: Database) -> AsyncIterator[AsyncSession]:
    engine = create_async_engine(shared.url("asyncpg"))
    async with AsyncSession(engine) as session:
        yield session
    await engine.dispose()


# -- the classes -------------------------------------------------------------------------------------------------------


@pytest.mark.once
def test_the_public_names() -> None:
    functions = {name for name in admin.__all__ if not isinstance(getattr(admin, name), type)}
    assert functions == {"AttemptOutcome", "doctor"}
    assert set(methods(QueueAdmin)) == OF_QUEUES
    assert set(methods(ScheduleAdmin)) == OF_SCHEDULES
    for cls in (*SYNC, *ASYNC):
        assert {name for name in dir(cls) if not name.startswith("_")} == set(methods(cls))


@pytest.mark.once
@pytest.mark.parametrize(("plain", "awaited"), [*zip(SYNC, ASYNC, strict=True)])
def test_the_methods_of_the_async_class_are_those_of_the_other(plain: Any, awaited: Any) -> None:
    assert list(methods(awaited)) == list(methods(plain))
    for name, method in methods(plain).items():
        of_async = methods(awaited)[name]
        assert inspect.iscoroutinefunction(of_async)
        assert inspect.signature(of_async) == inspect.signature(method)
        assert of_async.__doc__ == f"See :meth:`{plain.__name__}.{name}`."
        assert len(method.__doc__) > 20


@pytest.mark.once
@pytest.mark.parametrize(("plain", "awaited"), [*zip(SYNC, ASYNC, strict=True)])
async def test_an_async_method_gives_all_arguments_to_that_of_the_other(
    monkeypatch: pytest.MonkeyPatch, plain: Any, awaited: Any
) -> None:
    _, dog = make_animals()
    of_async = awaited(AsyncSession(create_async_engine("postgresql+asyncpg://")), dog)
    for name, method in methods(plain).items():
        signature, received = inspect.signature(method), list[Any]()
        parameters = [*signature.parameters.values()][1:]
        given = {each.name: object() for each in parameters if each.kind is not each.VAR_KEYWORD}
        named = {each.name: given[each.name] for each in parameters if each.kind is each.KEYWORD_ONLY}
        if any(each.kind is each.VAR_KEYWORD for each in parameters):
            given["changes"] = named = {"cron": object()}
        others = [value for key, value in given.items() if value is not named and key not in named]
        monkeypatch.setattr(plain, name, lambda *args, to=received, **options: to.append((args, options)) or to)
        result = await getattr(of_async, name)(*others, **named)
        assert result is (None if signature.return_annotation == "None" else received)
        [(args, options)] = received
        bound = signature.bind(*args, **options).arguments
        of_sync = bound.pop("self")
        assert (type(of_sync), of_sync.model, bound) == (plain, dog, given), name


@pytest.mark.once
def test_the_import_of_the_module_needs_no_asyncio() -> None:
    program = "import sqlaqueue.admin, sys; sys.exit('sqlalchemy.ext.asyncio' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


@pytest.mark.once
def test_the_repr_names_the_queue() -> None:
    session: Any = Session(sa.create_engine("postgresql+psycopg://"))
    assert repr(QueueAdmin(session, make_job())) == "<QueueAdmin of 'job', Job>"
    assert repr(ScheduleAdmin(session, make_rows())) == "<ScheduleAdmin of 'row', Row>"


# -- wrong arguments ---------------------------------------------------------------------------------------------------


@pytest.mark.once
async def test_other_objects_than_sessions_are_refused() -> None:
    engine, async_engine = sa.create_engine("postgresql+psycopg://"), create_async_engine("postgresql+psycopg://")
    job = make_job()
    for cls in SYNC:
        name = cls.__name__
        for given, said in [
            (engine, rf"^{name}\(\): this is an Engine; give a Session, as in `with Session\(engine\) as session`$"),
            (async_engine, "this is an AsyncEngine; give a Session"),
            (sessionmaker(engine), "this is a sessionmaker; give a Session"),
            (job, "give a Session"),
            (AsyncSession(async_engine), rf"this is an AsyncSession; use Async{name}\(\)$"),
            (Session(), rf"^{name}\(\): this session has no engine for Job; give Session\(engine\)$"),
            (Session(binds={make_rows(): engine}), "this session has no engine for Job"),
        ]:
            with pytest.raises(ConfigurationError, match=said):
                cls(given, job)
    for cls in ASYNC:
        name = cls.__name__
        for given, said in [
            (async_engine, rf"^{name}\(\): this is an AsyncEngine; give an AsyncSession, as in `async with "),
            (Session(engine), rf"this is a Session; use {name.removeprefix('Async')}\(\)$"),
            (AsyncSession(), rf"^{name}\(\): this session has no engine for Job; give AsyncSession\(engine\)$"),
        ]:
            with pytest.raises(ConfigurationError, match=said):
                cls(given, job)


@pytest.mark.once
@pytest.mark.parametrize("cls", [*SYNC, *ASYNC])
async def test_other_objects_than_queue_classes_are_refused(cls: Any) -> None:
    job = make_job()
    if cls in SYNC:
        session: Any = Session(sa.create_engine("postgresql+psycopg://"))
    else:
        session = AsyncSession(create_async_engine("postgresql+psycopg://"))
    for given, said in [
        (job(), "is not a mapped class; give the class Job"),
        (Session, "Session is not a queue; let it inherit from sqlaqueue.QueueMixin"),
        (sa.select(job), "is not a mapped class"),
        ("job", "'job' is not a mapped class"),
    ]:
        with pytest.raises(NotAQueueError, match=said):
            cls(session, given)


@pytest.mark.parametrize("method", ["cancel", "requeue", "purge"])
def test_jobs_that_are_not_of_the_queue_are_refused(engine: sa.Engine, session: Session, method: str) -> None:
    setup, other = Setup.of(engine, "update_status").with_job(**FAILED), make_rows()
    call = getattr(QueueAdmin(session, setup.model), method)
    job = session.get_one(setup.model, 1)
    for given, said in [
        (other(), r"<QueueAdmin of 'job', Job>\.\w+\(\): this is of the class Row; use QueueAdmin\(session, Row\)"),
        ([job, other()], "this is of the class Row"),
        (sa.select(other), "this is of the class Row"),
        (setup.model, r"takes keys or instances of Job, a select\(\) or a JobFilter, not <class"),
        (None, "not None"),
        ([1, job], "not <"),
        (QueueAdmin(session, setup.model).jobs(), r"not JobInfo\("),
        ("one", "Job.id is an integer, and 'one' is not"),
    ]:
        with pytest.raises(SqlaqueueError, match=said):
            call(given)
    with pytest.raises(StatementError, match=r"narrows a select\(\), and this is 1; leave job_filter out"):
        call(1, JobFilter())
    session.rollback()
    assert QueueAdmin(session, setup.model).count() == {"failed": 1}


BATCHED = ("cancel", "requeue", "purge")
COUNTS = [*((name, "batch_size") for name in BATCHED), *((name, "limit") for name in (*BATCHED, "depth", "jobs"))]


@pytest.mark.parametrize(("method", "option"), [*COUNTS, ("attempts", "limit")])
def test_numbers_are_integers_of_one_or_more(engine: sa.Engine, session: Session, method: str, option: str) -> None:
    setup = Setup.of(engine, "update_status", **HISTORY)
    call = getattr(QueueAdmin(session, setup.model), method)
    given = [1] if method == "attempts" else []
    for wrong in (0, -1, True, 1.0, "1"):
        said = f"QueueAdmin.{method}({option}={wrong!r}): give an integer of 1 or more"
        with pytest.raises(StatementError, match=re.escape(said)):
            call(*given, **{option: wrong})
    call(*given, **{option: 1})


@pytest.mark.once
@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"states": "failed"}, r"JobFilter\(states='failed'\): use a tuple of texts, states=\('failed',\)"),
        ({"states": ("faild",)}, "there is no state 'faild'; there are waiting, pending, .*; did you mean 'failed'"),
        (
            {"states": 5},
            r"JobFilter\(states=5\): there is no state 5; there are waiting, pending, processing, completed, failed",
        ),
        ({"keys": 5}, r"JobFilter\(keys=5\): use a tuple of texts, keys=\('5',\)"),
        ({"keys": ("1", 2)}, r"keys=\('1', 2\)\): use a tuple of texts, keys=\('1', '2'\)"),
        ({"keys": "12"}, r"JobFilter\(keys='12'\): use a tuple of texts, keys=\('12',\)"),
        ({"keys": (1,)}, r"JobFilter\(keys=\(1,\)\): use a tuple of texts, keys=\('1',\)"),
        ({"older_than": -1}, r"JobFilter\(older_than=...\) must be seconds or a timedelta, zero or more, not -1"),
        ({"newer_than": "1"}, r"JobFilter\(newer_than=...\) must be seconds or a timedelta"),
    ],
)
def test_a_filter_that_would_select_other_jobs_is_refused(given: Any, said: str) -> None:
    with pytest.raises(SqlaqueueError, match=said):
        JobFilter(**given)


@pytest.mark.once
@pytest.mark.parametrize("given", [iter, list, tuple, dict.fromkeys, lambda texts: (text for text in texts)])
def test_a_filter_takes_texts_from_any_iterable(given: Any) -> None:
    made = JobFilter(states=given(["failed", "pending"]), keys=given(["2", "1"]))
    assert (made.states, made.keys) == (("failed", "pending"), ("2", "1"))
    assert (JobFilter().states, JobFilter(older_than=0).older_than) == (None, timedelta(0))


# -- each method, with both kinds of sessions --------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["sync", "async"])
async def test_the_methods_for_jobs(shared: Database, engine: sa.Engine, kind: str) -> None:
    setup = Setup.of(engine, "update_status", **HISTORY)
    setup.add(*(setup.model(id=number, **FAILED) for number in (1, 2, 3)), setup.model(id=4), setup.model(id=5))
    setup.add_consumer()

    async with async_session(shared) as session:
        of_async = AsyncQueueAdmin(session, setup.model)

        async def call(name: str, *given: Any, **options: Any) -> Any:
            if kind == "async":
                return await getattr(of_async, name)(*given, **options)
            with Session(engine) as plain:
                return getattr(QueueAdmin(plain, setup.model), name)(*given, **options)

        stats, depth = await call("stats", finished=False), await call("depth", limit=10)
        assert isinstance(stats, Stats)
        assert (stats.due, stats.states) == (2, {"pending": 2, "processing": 0})
        assert isinstance(depth, Depth)
        assert depth.pending == 2
        found = await call("jobs", JobFilter(states=("failed",)), limit=2)
        assert [isinstance(each, JobInfo) for each in found] == [True, True]
        assert {each.key for each in await call("jobs")} == {1, 2, 3, 4, 5}
        info, values = await call("job", 1)
        assert (info.state, values["id"]) == ("failed", 1)
        assert await call("job", 99) is None
        assert await call("count") == {"failed": 3, "pending": 2}
        assert await call("count", JobFilter(states=("failed",))) == {"failed": 3}
        [group] = await call("failures", examples=1)
        assert isinstance(group, FailureGroup)
        assert (group.kind, group.count, len(group.keys)) == ("ValueError", 3, 1)
        assert await call("attempts", 1, limit=1) == []
        explanation = await call("explain", 4)
        assert isinstance(explanation, Explanation)
        assert explanation.reasons[0].code == "ready"
        assert [each.name for each in await call("consumers")] == ["web:1"]
        await call("pause", reason="mail server", author="ada")
        assert await call("is_paused") is True
        info = await call("pause_info")
        assert (info.reason, info.author) == ("mail server", "ada")
        await call("resume")
        assert await call("is_paused") is False
        assert await call("cancel", sa.select(setup.model), batch_size=1, limit=1) == Cancelled(cancelled=[4])
        requeued = await call("requeue", limit=2, batch_size=1)
        assert isinstance(requeued, Requeued)
        assert (requeued, requeued.refused) == (2, {})
        assert await call("purge", limit=1) == 1
        assert await call("purge", batch_size=1) == 1
        assert await call("rescue") == await call("reconcile") == 0
        assert await call("count") == {"pending": 3}


async def test_the_attempts_of_a_job(shared: Database, engine: sa.Engine) -> None:
    setup = Setup.of(engine, "update_status", **HISTORY).with_job()
    setup.execute(
        "INSERT INTO sqlaqueue_attempt (queue, key, attempt, outcome, ended_at) "
        "VALUES ('job', '[1]', 1, 'retried', now())"
    )
    with Session(engine) as plain:
        [attempt] = QueueAdmin(plain, setup.model).attempts(1)
    assert isinstance(attempt, Attempt)
    assert (attempt.attempt, attempt.outcome) == (1, "retried")
    async with async_session(shared) as session:
        assert await AsyncQueueAdmin(session, setup.model).attempts("1") == [attempt]


@pytest.mark.parametrize("kind", ["sync", "async"])
async def test_the_methods_for_schedules(shared: Database, engine: sa.Engine, kind: str) -> None:
    report = make_report()
    prepared(engine, hourly(report))
    async with async_session(shared) as session:
        of_async = AsyncScheduleAdmin(session, report)

        async def call(name: str, *given: Any, **options: Any) -> Any:
            if kind == "async":
                return await getattr(of_async, name)(*given, **options)
            with Session(engine) as plain:
                return getattr(ScheduleAdmin(plain, report), name)(*given, **options)

        for name in ("a", "b"):
            await call("add", hourly(report, name))
        with pytest.raises(StatementError, match="there is a schedule 'a' already; edit it, or use another name"):
            await call("add", hourly(report, "a"))
        assert [each.name for each in await call("list")] == ["a", "b"]
        await call("edit", "a", every=2 * HOUR)
        info = await call("get", "a")
        assert isinstance(info, ScheduleInfo)
        assert (info.every, info.origin, info.paused_at) == (2 * HOUR, "added", None)
        await call("pause", "a")
        assert (await call("get", "a")).paused_at is not None
        await call("resume", "a")
        await call("run", "a")
        info = await call("get", "a")
        assert info.paused_at is None
        assert info.run_requested_at is not None
        with pytest.raises(StatementError, match="the schedule 'a' cannot be reset: it was added at run time"):
            await call("reset", "a")
        await call("remove", "a")
        with pytest.raises(StatementError, match="there is no schedule 'a'; there are 'b'"):
            await call("get", "a")


def test_a_schedule_of_other_tables_is_refused(engine: sa.Engine, session: Session) -> None:
    report, other = make_report(), make_rows()
    prepared(engine, hourly(report))
    said = (
        r"add\(\): Schedule\('a', Row, .*\): the schedules of Row are in other tables than those of Job; use Schedule"
    )
    with pytest.raises(StatementError, match=said):
        ScheduleAdmin(session, report).add(Schedule("a", other, every=HOUR, values={"year": 1, "name": "a"}))


async def test_sessions_of_a_scope(shared: Database, engine: sa.Engine) -> None:
    setup = Setup.of(engine, "update_status").with_job()
    scoped = scoped_session(sessionmaker(engine))
    assert QueueAdmin(scoped, setup.model).count() == {"pending": 1}
    scoped.remove()
    async_engine = create_async_engine(shared.url("asyncpg"))
    async_scoped = async_scoped_session(async_sessionmaker(async_engine), scopefunc=asyncio.current_task)
    assert await AsyncQueueAdmin(async_scoped, setup.model).count() == {"pending": 1}
    await async_scoped.remove()
    await async_engine.dispose()


def test_changes_in_a_session_of_a_scope_reach_the_primary(engine: sa.Engine) -> None:
    setup = Setup.of(engine, "update_status")
    replica = sa.create_engine("postgresql+psycopg://nobody@127.0.0.1:1/")

    class Routing(Session):
        def get_bind(self, mapper: Any = None, *, clause: Any = None, **more: Any) -> sa.Engine:
            return engine if isinstance(clause, sa.Update | sa.Delete) else replica

    QueueAdmin(scoped_session(sessionmaker(class_=Routing)), setup.model).pause()
    with Session(engine) as session:
        assert QueueAdmin(session, setup.model).is_paused()


async def test_the_doctor_of_an_async_session(shared: Database, engine: sa.Engine) -> None:
    setup = Setup.of(engine, "update_status")
    setup.execute("DROP INDEX ix_job_queue_claim")
    async with async_session(shared) as session:
        found = await session.run_sync(doctor, setup.model)
        assert "missing_index" in [each.code for each in found]
        with pytest.raises(ConfigurationError, match=r"use `await session.run_sync\(doctor, ...\)`"):
            doctor(session, setup.model)  # type: ignore[arg-type]  # it is refused


# -- which jobs are changed --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("chosen", "changed"),
    [
        (lambda _: 2, {2}),
        (lambda _: "2", {2}),
        (lambda _: (2,), {2}),
        (lambda _: [1, "2", (3,)], {1, 2, 3}),
        (lambda _: (1, 3), {1, 3}),
        (lambda _: {3}, {3}),
        (lambda _: [], set()),
        (lambda _: 99, set()),
        (lambda session: session.get_one(Job, 1), {1}),
        (lambda session: session.scalars(sa.select(Job).where(Job.id > 1)), {2, 3}),
        (lambda _: sa.select(Job).where(Job.id < 3), {1, 2}),
        (lambda _: JobFilter(keys=("1", "3")), {1, 3}),
    ],
)
@pytest.mark.parametrize(
    ("method", "status"), [("cancel", "pending"), ("requeue", "failed"), ("purge", "failed"), ("requeue", "completed")]
)
def test_which_jobs_are_changed(
    engine: sa.Engine, session: Session, method: str, status: str, chosen: Any, changed: set[int]
) -> None:
    create(engine, Job)
    session.add_all(Job(id=number, status=status) for number in (1, 2, 3))
    session.commit()
    given = chosen(session)
    if status == "completed" and isinstance(given, sa.Select):
        # Without a filter the failed ones of a select are requeued.
        assert QueueAdmin(session, Job).requeue(given) == 0
        getattr(QueueAdmin(session, Job), method)(given, JobFilter(states=("completed",)))
    else:
        getattr(QueueAdmin(session, Job), method)(given)
    same = sa.select(Job.id).where(Job.status == status)
    assert {1, 2, 3} - {*session.scalars(same)} == changed


Job = make_job()


@pytest.mark.few(6)
@pytest.mark.parametrize(("method", "status"), [("cancel", "pending"), ("requeue", "failed"), ("purge", "failed")])
@pytest.mark.parametrize(("size", "number"), [(1, 3), (2, 2), (3, 1)])
@pytest.mark.parametrize("given", ["all", "instances"])
def test_each_batch_is_committed(
    engine: sa.Engine, session: Session, method: str, status: str, size: int, number: int, given: str
) -> None:
    create(engine, Job)
    session.add_all(Job(id=key, status=status) for key in (1, 2, 3))
    session.commit()
    commits: list[sa.Connection] = []
    with engine.connect() as connection, Session(connection) as own:
        chosen = [own.scalars(sa.select(Job)).all()] if given == "instances" else []
        sa.event.listen(connection, "commit", commits.append)
        getattr(QueueAdmin(own, Job), method)(*chosen, batch_size=size)
    assert len(commits) == number
    assert status not in session.scalars(sa.select(Job.status)).all()


def test_what_is_missing(engine: sa.Engine, session: Session) -> None:
    setup = Setup.of(engine, "update_status")
    setup.add(setup.model(id=1), setup.model(id=2, status="completed"))
    done = QueueAdmin(session, setup.model).cancel([1, 2, "99"])
    assert done == Cancelled(cancelled=[1], missing=[2, 99])
    done = QueueAdmin(session, setup.model).cancel(JobFilter(keys=("98",)))
    assert done == Cancelled(missing=[98])


def test_what_is_missing_of_a_composite_key(engine: sa.Engine, session: Session) -> None:
    row = create(engine, make_rows())
    assert QueueAdmin(session, row).cancel([(1, "a"), '2,"b,c"']) == Cancelled(missing=[(1, "a"), (2, "b,c")])


def test_a_key_that_is_shown_can_be_given(engine: sa.Engine, session: Session) -> None:
    setup, row = Setup.of(engine, "update_status").with_job(**FAILED), create(engine, make_rows())
    session.add(row(year=1, name="b,c"))
    session.commit()
    for model, key in ((setup.model, 1), (row, (1, "b,c"))):
        admin = QueueAdmin(session, model)
        [info] = admin.jobs()
        assert (info.key, admin.explain(info.key).key) == (key, key)
        found = admin.job(info.key)
        assert found is not None
        assert found[0] == info
    assert QueueAdmin(session, setup.model).failures()[0].keys == [1]
    assert QueueAdmin(session, setup.model).requeue([1]) == 1


@pytest.mark.parametrize(
    ("chosen", "changed"),
    [
        ((1, "a"), {(1, "a")}),
        ('1,"b,c"', {(1, "b,c")}),
        ([(1, "a"), '1,"b,c"'], {(1, "a"), (1, "b,c")}),
        (((1, "a"), (1, "b,c")), {(1, "a"), (1, "b,c")}),
        ((), set()),
    ],
)
def test_which_jobs_of_a_composite_key(engine: sa.Engine, session: Session, chosen: Any, changed: Any) -> None:
    row = create(engine, make_rows())
    session.add_all(row(year=1, name=name) for name in ("a", "b,c"))
    session.commit()
    assert {*QueueAdmin(session, row).cancel(chosen).cancelled} == changed


def test_a_subclass_has_its_own_jobs_only(engine: sa.Engine, session: Session) -> None:
    animal, dog = make_animals()
    create(engine, animal)
    session.add_all([animal(id=1), dog(id=2)])
    session.commit()
    admin = QueueAdmin(session, dog)
    assert [info.key for info in admin.jobs()] == [2]
    assert (admin.count(), admin.stats().states["pending"], admin.depth().pending) == ({"pending": 1}, 1, 2)
    with pytest.raises(NotAQueueError, match=r"this is of the class Animal; use QueueAdmin\(session, Animal\)"):
        admin.cancel(session.get_one(animal, 1))
    with pytest.raises(NotAQueueError, match="this is of the class Animal"):
        admin.cancel(sa.select(animal))
    assert admin.cancel([1]) == Cancelled(missing=[1])
    assert admin.cancel() == Cancelled(cancelled=[2])
    assert QueueAdmin(session, animal).requeue(session.get_one(dog, 2)) == 1
    for job in session.scalars(sa.select(animal)):
        job.status = "failed"
    session.commit()
    assert [group.keys for group in admin.failures()] == [[2]]
