"""What the library sends in the place of PostgreSQL's statements: verbs, their locks, transactions, RETURNING."""

import asyncio
import json
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any, ClassVar
from uuid import UUID, uuid4

import pytest
import sqlalchemy as sa
from sqlalchemy.engine.default import DefaultExecutionContext
from sqlalchemy.exc import OperationalError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, column_property, mapped_column, sessionmaker
from sqlalchemy.orm.exc import StaleDataError

import sqlaqueue
from sqlaqueue import QueueMixin, cancel, claim, complete, extend, purge, rescue, retry
from sqlaqueue.exc import StatementError
from sqlaqueue.queue.names import ATTEMPT
from sqlaqueue.sql.portable import is_among
from sqlaqueue.sql.types import key_array
from sqlaqueue.strategies.update_status import several_quarantined_token, shared_token
from tests.mariadb.conftest import Prepared
from tests.mariadb.models import Base, ByUuid, Child, Job, Pair, Report
from tests.models import add


def enqueue(engine: sa.Engine, *jobs: Any) -> None:
    with Session(engine) as session:
        session.add_all(jobs)
        session.commit()


def rows(engine: sa.Engine, *columns: Any) -> list[Any]:
    with Session(engine) as session:
        return [tuple(row) for row in session.execute(sa.select(*columns).order_by(columns[0]))]


def expire(engine: sa.Engine, model: Any) -> None:
    with engine.begin() as connection:
        connection.execute(sa.update(model).values(lease_expires_at=datetime(2020, 1, 1, tzinfo=UTC)))


@pytest.mark.parametrize("make_token", [shared_token, several_quarantined_token])
def test_the_server_takes_every_token_of_a_claim(engine: sa.Engine, make_token: Callable[[], UUID]) -> None:
    """It refuses some UUIDs of version 8; a job whose claim had such a token was set aside for a minute."""
    tokens = json.dumps([str(make_token()) for _ in range(1000)])
    taken = "SELECT count(CAST(token AS UUID)) FROM JSON_TABLE(:tokens, '$[*]' COLUMNS (token TEXT PATH '$')) AS tokens"
    with engine.connect() as connection:
        assert connection.scalar(sa.text(taken), {"tokens": tokens}) == 1000


def test_a_composite_key_and_an_attempt_history(engine: sa.Engine) -> None:
    enqueue(engine, *(Pair(site=site, number=n) for site in ("a", "b", "c ", "\N{SNOWMAN}") for n in (1, 2)))
    with Session(engine) as session:
        jobs = session.scalars(claim(Pair, 5)).all()
        session.commit()
        assert len({(job.site, job.number) for job in jobs}) == 5
        keys = {(job.site, job.number) for job in jobs[:2]}
        assert {*session.scalars(complete(jobs[:2])).all()} == keys
        assert {*session.scalars(extend(jobs[2:])).all()} == {(job.site, job.number) for job in jobs[2:]}
        session.commit()
        expire(engine, Pair)
        assert len(session.scalars(rescue(Pair)).all()) == 3
        session.commit()
        history = Base.metadata.tables[ATTEMPT]
        found = session.execute(sa.select(history.c.outcome, history.c.key, history.c.worker)).all()
        assert {outcome for outcome, *_ in found} == {"rescued"}
        assert {tuple(key) for _, key, _ in found} == {(job.site, job.number) for job in jobs[2:]}
        assert all(worker for *_, worker in found)
        session.scalars(cancel(sa.select(Pair).where(Pair.status == "pending"))).all()
        session.commit()
        assert len(session.scalars(purge(Pair)).all()) == 8


@pytest.mark.parametrize("driver", ["mariadb+pymysql", "mysql+pymysql"])
def test_uuid_keys_and_tokens(url: Callable[[str], str], tables: str, driver: str, engine: sa.Engine) -> None:
    # For the dialect mysql a UUID is a text of 32 characters; the tables have the native type.
    if driver == "mysql+pymysql":
        with engine.begin() as connection:
            ByUuid.__table__.drop(connection)
    own = sqlaqueue.prepare(sa.create_engine(url(driver)))
    Base.metadata.create_all(own)
    keys = [uuid4() for _ in range(4)]
    enqueue(own, *(ByUuid(id=key) for key in keys))
    with Session(own) as session:
        jobs = session.scalars(claim(ByUuid, 4)).all()
        session.commit()
        assert {type(job.lease_token) for job in jobs} == {UUID}
        assert {*session.scalars(complete(jobs[:1])).all()} == {jobs[0].id}
        assert {*session.scalars(cancel(sa.select(ByUuid).where(ByUuid.id == jobs[1].id))).all()} == set()
        session.commit()
        expire(own, ByUuid)
        # They ran beside each other, so none of them is known to be responsible.
        assert {*session.scalars(rescue(ByUuid)).all()} == {job.id for job in jobs[1:]}
        session.commit()
        assert {*session.scalars(sa.select(ByUuid.attempts))} == {0, 1}
    with own.begin() as connection:
        ByUuid.__table__.drop(connection)
    own.dispose()
    with engine.begin() as connection:
        ByUuid.__table__.create(connection, checkfirst=True)


def test_a_rescued_job_that_ran_alone_fails_after_its_last_attempt(engine: sa.Engine) -> None:
    enqueue(engine, Job(id=1, attempts=2), Job(id=2))
    for _ in range(2):
        with Session(engine) as session:
            session.scalars(claim(Job, 1)).all()
            session.commit()
    expire(engine, Job)
    with Session(engine) as session:
        # The new status, token and number of attempts are computed from the old ones, whatever their order is.
        assert sorted(session.scalars(rescue(Job)).all()) == [1, 2]
        session.commit()
    assert rows(engine, Job.id, Job.status, Job.attempts) == [(1, "failed", 3), (2, "pending", 1)]
    tokens = dict(rows(engine, Job.id, Job.lease_token))
    assert tokens[1] is None
    assert tokens[2] is not None


def test_an_update_of_the_program_may_return_rows(engine: sa.Engine) -> None:
    enqueue(engine, Job(id=1, priority=1, attempts=5), Job(id=2, priority=2, attempts=7))
    change = sa.update(Job).values(priority=Job.attempts + 1).returning(Job.id, Job.priority)
    with engine.begin() as connection:
        assert sorted(map(tuple, connection.execute(change))) == [(1, 6), (2, 8)]
        removed = sa.delete(Job).where(Job.priority > 6).returning(Job.id, Job.attempts)
        assert connection.execute(removed).all() == [(2, 7)]
    assert rows(engine, Job.id, Job.priority) == [(1, 6)]


async def test_async_sessions(async_engine: AsyncEngine, engine: sa.Engine) -> None:
    enqueue(engine, *(Job(id=n) for n in range(1, 5)))

    async with async_sessionmaker(async_engine)() as session:
        jobs = (await session.scalars(claim(Job, 3))).all()
        await session.commit()
        assert (await session.scalars(complete(jobs[0]))).all() == [1]
        assert (await session.scalars(retry(jobs[1:], delay=1))).all() == [2, 3]
        assert (await session.scalars(cancel(sa.select(Job).where(Job.id == 4)))).all() == [4]
        await session.commit()
    assert [status for _, status in rows(engine, Job.id, Job.status)] == [
        "completed",
        "pending",
        "pending",
        "cancelled",
    ]


def test_the_statements_of_a_queue_without_notifications(sessions: sessionmaker[Session]) -> None:
    with sessions() as session:
        session.add_all([Report(), Report()])
        session.commit()
        (job,) = session.scalars(claim(Report, 1)).all()
        session.commit()
        assert len(session.scalars(cancel(Report)).all()) == 1
        session.commit()
        session.execute(
            sa.update(Report).values(lease_expires_at=sa.func.now() - sa.literal(timedelta(1), sa.Interval()))
        )
        session.commit()
        assert session.scalars(rescue(Report)).all() == [job.id]
        session.commit()


# -- locks -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def two(engine: sa.Engine) -> Iterator[tuple[Session, Session]]:
    """Two sessions; a statement that waits for the other's locks fails after a second."""
    with Session(engine) as first, Session(engine) as second:
        for session in (first, second):
            session.execute(sa.text("SET SESSION innodb_lock_wait_timeout = 1"))
            session.commit()
        yield first, second


def test_a_claim_beside_an_open_one_takes_the_next_jobs(two: tuple[Session, Session], engine: sa.Engine) -> None:
    """Had the first one sorted, it would hold the locks of all jobs."""
    later = datetime.now(UTC) + timedelta(hours=1)
    enqueue(engine, *(Job(id=n, priority=n % 3) for n in range(1, 301)))
    enqueue(engine, *(Job(id=n, priority=-1, run_at=later) for n in range(301, 331)))
    first, second = two
    assert [job.id for job in first.scalars(claim(Job, 5))] == [3, 6, 9, 12, 15]
    assert [job.id for job in second.scalars(claim(Job, 5))] == [18, 21, 24, 27, 30]


def test_a_claim_reads_the_index_in_order(engine: sa.Engine) -> None:
    enqueue(engine, *(Job(id=n, priority=n % 3) for n in range(1, 301)))
    sent: list[str] = []

    @sa.event.listens_for(engine, "before_cursor_execute")
    def keep(_: Any, __: Any, statement: str, parameters: Any, *___: Any) -> None:
        if statement.startswith("SELECT job.id") and "SKIP LOCKED" in statement:
            sent.append(statement % {name: repr(value) for name, value in parameters.items()})

    with Session(engine) as session:
        session.scalars(claim(Job, 5)).all()
        session.rollback()
        (locking,) = sent
        plan, *_ = session.execute(sa.text(f"EXPLAIN {locking}")).all()
    assert plan.key == "ix_job_queue_claim"
    assert "filesort" not in plan.Extra


def test_a_job_whose_child_is_inserted_is_passed_over(two: tuple[Session, Session], engine: sa.Engine) -> None:
    """The foreign key takes a shared lock of the job. This is weaker than on PostgreSQL, as the docs say."""
    enqueue(engine, Job(id=1), Job(id=2))
    first, second = two
    first.add(Child(job_id=1))
    first.flush()
    assert [job.id for job in second.scalars(claim(Job, 2))] == [2]
    second.rollback()
    first.commit()
    assert [job.id for job in second.scalars(claim(Job, 2))] == [1, 2]


# -- statements of several parts, in transactions of each kind ---------------------------------------------------------


REFUSED = r"several statements for a claim.*AUTOCOMMIT.*use a session or connection whose isolation_level is not"


def states(engine: sa.Engine) -> set[str]:
    with Session(engine) as session:
        return {*session.scalars(sa.select(Job.status))}


@pytest.mark.parametrize("given_to", ["engine", "options", "statement"])
def test_autocommit_is_refused(prepared: Prepared, engine: sa.Engine, given_to: str) -> None:
    enqueue(engine, *(Job(id=n) for n in range(1, 4)), Pair(site="a", number=1))
    with Session(engine, expire_on_commit=False) as session:
        mine = session.scalars(claim(Job, 1)).all()
        session.commit()
    options = {"isolation_level": "AUTOCOMMIT"} if given_to == "engine" else {}
    own = prepared(**options)
    change = sa.update(Job).values(payload="changed")
    statements = [claim(Job, 1), claim(Pair, 1), complete(mine), extend(mine), rescue(Job), cancel(Job), purge(Job)]
    statements.append(change.returning(Job.id))
    for statement in statements:
        bind = own.execution_options(isolation_level="AUTOCOMMIT") if given_to == "options" else own
        with Session(bind) as session:
            if given_to == "statement":
                session.execute(sa.text("SET autocommit = 1"))
            with pytest.raises(StatementError, match=rf"^(job|pair): .*{REFUSED}"):
                session.execute(statement)
    with Session(own.execution_options(isolation_level="AUTOCOMMIT")) as session:
        # One statement is one also here.
        session.execute(change)
        session.execute(sa.delete(Job).where(Job.id > 3).returning(Job.id))
    assert states(engine) == {"pending", "processing"}


def test_a_claim_is_refused_before_it_locks_rows(engine: sa.Engine) -> None:
    sent: list[str] = []
    with Session(engine.execution_options(isolation_level="AUTOCOMMIT")) as session:
        sa.event.listen(engine, "before_cursor_execute", lambda *event: sent.append(event[2]))
        with pytest.raises(StatementError, match=REFUSED):
            session.execute(claim(Pair, 1))
    assert not sent


def test_autocommit_is_refused_in_async_sessions(url: Callable[[str], str], engine: sa.Engine) -> None:
    enqueue(engine, Job(id=1))

    async def use() -> None:
        own = sqlaqueue.prepare(create_async_engine(url("mariadb+asyncmy"), isolation_level="AUTOCOMMIT"))
        async with AsyncSession(own) as session:
            for statement in (claim(Job, 1), sa.update(Job).values(payload="changed").returning(Job.id)):
                with pytest.raises(StatementError, match=rf"^job: .*{REFUSED}"):
                    await session.execute(statement)
            # The driver does not notice that it is switched off.
            await session.execute(sa.text("SET autocommit = 0"))
            assert [job.id for job in await session.scalars(claim(Job, 1))] == [1]
            await session.execute(sa.text("ROLLBACK"))
        await own.dispose()

    asyncio.run(use())
    assert states(engine) == {"pending"}


def test_a_transaction_that_the_program_has_begun_by_itself(engine: sa.Engine) -> None:
    enqueue(engine, Job(id=1))
    with Session(engine.execution_options(isolation_level="AUTOCOMMIT")) as session:
        session.execute(sa.text("START TRANSACTION"))
        assert [job.id for job in session.scalars(claim(Job, 1))] == [1]
        session.execute(sa.text("ROLLBACK"))
    assert states(engine) == {"pending"}


def test_the_argument_of_a_driver_does_not_switch_transactions_off(prepared: Prepared, engine: sa.Engine) -> None:
    enqueue(engine, Job(id=1))
    own = prepared(connect_args={"autocommit": True})
    with Session(own) as session:
        assert [job.id for job in session.scalars(claim(Job, 1))] == [1]
        session.rollback()
    assert states(engine) == {"pending"}


def test_a_claim_in_a_savepoint_is_undone_with_it(engine: sa.Engine) -> None:
    enqueue(engine, Job(id=1), Job(id=2))
    with Session(engine) as session:
        with session.begin_nested() as savepoint:
            assert [job.id for job in session.scalars(claim(Job, 1))] == [1]
            savepoint.rollback()
        assert states(engine) == {"pending"}
        with session.begin_nested():
            jobs = session.scalars(claim(Job, 1)).all()
            session.execute(complete(jobs))
        session.commit()
        assert {*session.execute(sa.select(Job.id, Job.status))} == {(1, "completed"), (2, "pending")}


@pytest.mark.parametrize("level", ["READ COMMITTED", "REPEATABLE READ"])
def test_what_is_returned_is_what_was_locked(engine: sa.Engine, level: str) -> None:
    """At REPEATABLE READ a SELECT without a lock reads what was there when the transaction began."""
    enqueue(engine, *(Job(id=n, payload="old") for n in range(1, 4)))
    with Session(engine.execution_options(isolation_level=level)) as session, Session(engine) as other:
        session.execute(sa.select(Job.id)).all()
        other.execute(sa.update(Job).values(payload="new"))
        other.add(Job(id=4, payload="new", priority=-1))
        other.commit()
        assert [(job.id, job.payload) for job in session.scalars(claim(Job, 2))] == [(4, "new"), (1, "new")]
        # An UPDATE that leaves a row as it is does not make it one of this transaction.
        same = sa.update(Job).where(Job.id == 2).values(priority=0).returning(Job.id, Job.payload)
        assert session.execute(same).all() == [(2, "new")]
        gone = sa.delete(Job).where(Job.id == 3).returning(Job.id, Job.payload)
        assert session.execute(gone).all() == [(3, "new")]


def test_the_rows_of_a_statement_are_forgotten_when_it_has_ended(engine: sa.Engine) -> None:
    """They would be kept as long as the connection is, however many they are."""
    enqueue(engine, *(Pair(site="a", number=n) for n in range(1, 6)))
    with Session(engine) as session:
        info = session.connection().connection.info
        kept = info.copy()
        assert len(session.scalars(claim(Pair, 2)).all()) == 2
        assert info == kept
        # Its first steps succeed, and a later one fails.
        session.execute(sa.text("RENAME TABLE sqlaqueue_control TO renamed"))
        try:
            with pytest.raises(sa.exc.DBAPIError, match="sqlaqueue_control"):
                session.execute(cancel(Pair))
            assert info == kept
        finally:
            session.execute(sa.text("RENAME TABLE renamed TO sqlaqueue_control"))


# -- UPDATE and DELETE with RETURNING ----------------------------------------------------------------------------------


def hundred_more(context: DefaultExecutionContext) -> int:
    return int(context.get_current_parameters().get("size") or 0) + 100


class Upper(sa.TypeDecorator[str]):
    impl = sa.String(50)
    cache_ok = True

    def bind_expression(self, bindparam: Any) -> Any:
        return sa.func.upper(bindparam)


class PhotoBase(DeclarativeBase):
    pass


class Photo(QueueMixin, PhotoBase):
    __tablename__ = "photo"

    id: Mapped[int] = mapped_column(primary_key=True)
    size: Mapped[int] = mapped_column(default=0)
    title: Mapped[str | None] = mapped_column(sa.String(50))
    code: Mapped[str | None] = mapped_column("photo_code", Upper)
    updated_at: Mapped[datetime | None] = mapped_column(sa.DateTime(timezone=True), onupdate=sa.func.now())
    seen_at: Mapped[datetime | None] = mapped_column(sa.DateTime(timezone=True), onupdate=lambda: datetime.now(UTC))
    larger: Mapped[int | None] = mapped_column(onupdate=hundred_more)
    seven: Mapped[int | None] = mapped_column("photo_seven", onupdate=7)
    before: Mapped[int | None] = mapped_column(onupdate=sa.text("size"))
    touched: Mapped[datetime | None] = mapped_column(
        sa.DateTime,
        server_default=sa.text("CURRENT_TIMESTAMP(6) ON UPDATE CURRENT_TIMESTAMP(6)"),
        server_onupdate=sa.FetchedValue(),
    )
    version: Mapped[int] = mapped_column()
    twice: Mapped[int] = column_property(size * 2)

    __mapper_args__: ClassVar[dict[str, Any]] = {"version_id_col": version, "eager_defaults": True}


PHOTO: Any = Photo.__table__


@pytest.fixture
def photos(url: Callable[[str], str]) -> Iterator[sa.Engine]:
    engine = sqlaqueue.prepare(sa.create_engine(url("mariadb+pymysql")))
    PhotoBase.metadata.create_all(engine)
    add(engine, *(Photo(id=n, size=n) for n in range(1, 4)))
    yield engine
    PhotoBase.metadata.drop_all(engine)
    engine.dispose()


def has_new_values(photo: Photo) -> bool:
    moments = [photo.updated_at, photo.seen_at]
    assert all(moment is not None and abs((datetime.now(UTC) - moment).total_seconds()) < 60 for moment in moments)
    return (photo.seven, photo.larger) == (7, 100)


def test_a_queue_whose_columns_get_values_by_themselves(photos: sa.Engine) -> None:
    with Session(photos) as session:
        jobs = session.scalars(claim(Photo, 2)).all()
        assert [(job.id, job.size, job.before, job.twice) for job in jobs] == [(1, 1, 1, 2), (2, 2, 2, 4)]
        assert all(has_new_values(job) for job in jobs)
        session.commit()
        assert session.scalars(complete(jobs[0])).all() == [1]
        assert session.scalars(retry(jobs[1])).all() == [2]
        assert sorted(session.scalars(cancel(Photo)).all()) == [2, 3]
        session.commit()
        assert {*session.scalars(sa.select(Photo.status))} == {"completed", "cancelled"}


async def test_the_same_in_async_sessions(async_engine: AsyncEngine, photos: sa.Engine) -> None:
    async with AsyncSession(async_engine) as session:
        jobs = (await session.scalars(claim(Photo, 2))).all()
        assert [(job.id, job.size, job.before) for job in jobs] == [(1, 1, 1), (2, 2, 2)]
        assert all(has_new_values(job) for job in jobs)
        await session.commit()
        assert (await session.scalars(complete(jobs))).all() == [1, 2]
        await session.commit()
        third = await session.get_one(Photo, 3)
        third.title, third.size = "flushed", 30
        await session.flush()
        assert (third.larger, third.seven, third.version, third.before) == (130, 7, 2, 30)
        change = sa.update(PHOTO).where(PHOTO.c.id == sa.bindparam("key")).returning(PHOTO.c.title, PHOTO.c.size)
        connection = await session.connection()
        given = {"title": "50%s", "size": 5, "key": 1}
        assert (await connection.execute(change, given)).all() == [("50%s", 5)]


def test_a_flush_fetches_what_the_server_computes(photos: sa.Engine) -> None:
    """The mapper asks for it by RETURNING, as it has eager_defaults, and checks the version."""
    with Session(photos) as session, Session(photos) as other:
        photo, duplicate = session.get_one(Photo, 1), other.get_one(Photo, 1)
        touched = photo.touched
        photo.title, photo.code = "a %(title)s", "abc"
        session.flush()
        assert has_new_values(photo)
        state: Any = sa.inspect(photo)
        assert "touched" not in state.unloaded
        assert (photo.version, photo.touched != touched) == (2, True)
        session.commit()
        assert session.execute(sa.select(PHOTO.c.title, PHOTO.c.photo_code).limit(1)).all() == [("a %(title)s", "ABC")]
        duplicate.title = "another"
        with pytest.raises(StaleDataError):
            other.flush()


def test_values_that_are_given_when_the_statement_is_executed(photos: sa.Engine) -> None:
    returned = (PHOTO.c.id, PHOTO.c.title, PHOTO.c.photo_seven)
    with photos.begin() as connection:
        change = sa.update(PHOTO).where(PHOTO.c.id == 2).returning(*returned)
        assert connection.execute(change, {"title": "a"}).all() == [(2, "a", 7)]
        assert connection.execute(change, {"title": "b", "photo_seven": 70}).all() == [(2, "b", 70)]
        both = change.values(size=PHOTO.c.size + sa.bindparam("more")).returning(PHOTO.c.size, PHOTO.c.photo_code)
        given = {"title": "c", "more": 10, "photo_code": "xyz"}
        assert connection.execute(both, given).all() == [(2, "c", 7, 12, "XYZ")]
        explicit = change.values(photo_seven=None, updated_at=None).returning(PHOTO.c.updated_at)
        assert connection.execute(explicit).all() == [(2, "c", None, None)]
    with Session(photos) as session:
        change = sa.update(Photo).where(Photo.id == 3).values(title="100%").returning(Photo)
        (photo,) = session.scalars(change)
        assert (photo.title, photo.twice, has_new_values(photo)) == ("100%", 6, True)


def test_expressions_that_are_returned(photos: sa.Engine) -> None:
    label = sa.func.concat(Photo.size + 1, "%s %(x)s%")
    with Session(photos) as session:
        change = sa.update(Photo).where(Photo.id == 3).values(size=5).returning(label, Photo.twice)
        assert session.execute(change).all() == [("6%s %(x)s%", 10)]
        assert session.execute(sa.delete(Photo).where(Photo.id == 3).returning(label)).all() == [("6%s %(x)s%",)]


@pytest.mark.parametrize("number", [1, 2])
def test_a_limit_of_an_update(photos: sa.Engine, number: int) -> None:
    change = sa.update(PHOTO).values(size=PHOTO.c.size + 10).with_dialect_options(mariadb_limit=number)
    with photos.begin() as connection:
        assert connection.scalars(change.returning(PHOTO.c.size)).all() == [11, 12][:number]
        assert connection.scalar(sa.select(sa.func.count()).where(PHOTO.c.size > 10)) == number


@pytest.mark.skipif(
    sa.__version__ in {f"2.0.{n}" for n in range(32, 37)}, reason="this SQLAlchemy has no DELETE with LIMIT"
)
@pytest.mark.parametrize("number", [1, 2])
def test_a_limit_of_a_delete(photos: sa.Engine, number: int) -> None:
    change = sa.delete(PHOTO).with_dialect_options(mariadb_limit=number)
    with photos.begin() as connection:
        assert len(connection.scalars(change.returning(PHOTO.c.size)).all()) == number
        assert connection.scalar(sa.select(sa.func.count()).select_from(PHOTO)) == 3 - number


def test_an_array_is_searched_for_an_expression_with_a_percent_sign(photos: sa.Engine) -> None:
    wanted = sa.bindparam("wanted", ["1%", "3%"], type_=key_array(sa.String()))
    with Session(photos) as session:
        found = sa.select(Photo.id).where(is_among(sa.func.concat(Photo.size, "%"), wanted))
        assert session.scalars(found.order_by(Photo.id)).all() == [1, 3]


def test_a_key_is_changed(photos: sa.Engine) -> None:
    with photos.begin() as connection:
        computed = sa.update(PHOTO).where(PHOTO.c.id < 3).values(id=PHOTO.c.id + 10)
        with pytest.raises(StatementError, match="^photo: this UPDATE computes id, which is in the primary key"):
            connection.execute(computed.returning(PHOTO.c.id))
        change = sa.update(PHOTO).where(PHOTO.c.id == 1).values(id=21, size=11)
        assert connection.execute(change.returning(PHOTO.c.size)).all() == [(11,)]
        given = sa.update(PHOTO).where(PHOTO.c.size == 11).returning(PHOTO.c.id)
        assert connection.execute(given, {"id": 31}).all() == [(31,)]
    with Session(photos) as session:
        photo = session.get_one(Photo, 31)
        photo.id = 41
        session.commit()
        assert (photo.id, has_new_values(photo)) == (41, True)


def test_a_change_that_fails_for_some_rows_changes_none(photos: sa.Engine) -> None:
    """Rows with different values are changed by several statements, each of which only undoes itself."""
    with photos.begin() as connection:
        connection.execute(sa.text("ALTER TABLE photo ADD CONSTRAINT small CHECK (size < 30)"))
        change = sa.update(PHOTO).values(size=PHOTO.c.id * 10).returning(PHOTO.c.id)
        with pytest.raises(OperationalError, match="small"):
            connection.execute(change)
        assert connection.scalars(sa.select(PHOTO.c.size).order_by(PHOTO.c.id)).all() == [1, 2, 3]
        assert connection.scalars(change.where(PHOTO.c.id < 3)).all() == [1, 2]


def test_a_cte_of_the_program(photos: sa.Engine) -> None:
    plain = sa.Table("plain", sa.MetaData(), sa.Column("id", sa.Integer, primary_key=True), sa.Column("n", sa.Integer))
    few = sa.select(plain.c.id).where(plain.c.n > 1).limit(2).cte("few")
    change = sa.update(plain).where(plain.c.id.in_(sa.select(few.c.id))).values(n=0).returning(plain.c.id)
    again = sa.select(plain.c.id).cte("again", recursive=True)
    with photos.begin() as connection:
        plain.create(connection)
        connection.execute(sa.insert(plain), [{"id": n, "n": n} for n in range(1, 5)])
        assert connection.scalars(change).all() == [2, 3]
        with pytest.raises(StatementError, match="the recursive CTE again: MariaDB has no UPDATE and no"):
            connection.execute(sa.update(plain).where(plain.c.id == again.c.id).values(n=0).returning(plain.c.id))
        plain.drop(connection)


def test_a_table_without_a_primary_key_is_refused(photos: sa.Engine) -> None:
    bare = sa.Table("bare", sa.MetaData(), sa.Column("n", sa.Integer))
    with (
        photos.connect() as connection,
        pytest.raises(StatementError, match="^bare: .* by the primary key, which this"),
    ):
        connection.execute(sa.update(bare).values(n=0).returning(bare.c.n))
