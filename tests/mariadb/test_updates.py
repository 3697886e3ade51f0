"""UPDATE and DELETE with RETURNING for models whose columns get values by themselves, and for values given late."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
import sqlalchemy as sa
from sqlalchemy.exc import OperationalError
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, column_property, mapped_column
from sqlalchemy.orm.exc import StaleDataError

import sqlaqueue.mariadb
from sqlaqueue import QueueMixin, cancel, claim, complete, retry
from sqlaqueue.exc import StatementError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from sqlalchemy.engine.default import DefaultExecutionContext


def hundred_more(context: DefaultExecutionContext) -> int:
    return int(context.get_current_parameters().get("size") or 0) + 100


class Upper(sa.TypeDecorator[str]):
    impl = sa.String(50)
    cache_ok = True

    def bind_expression(self, bindparam: Any) -> Any:
        return sa.func.upper(bindparam)


class Base(DeclarativeBase):
    pass


class Photo(QueueMixin, Base):
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
    """Three photos of size 1 to 3."""
    engine = sa.create_engine(url("mariadb+pymysql"))
    sqlaqueue.mariadb.prepare(engine)
    Base.metadata.create_all(engine)
    with Session(engine) as session:
        session.add_all([Photo(id=n, size=n) for n in range(1, 4)])
        session.commit()
    yield engine
    Base.metadata.drop_all(engine)
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


def test_the_same_in_async_sessions(url: Callable[[str], str], photos: sa.Engine) -> None:
    async def use() -> None:
        own = create_async_engine(url("mariadb+asyncmy"))
        sqlaqueue.mariadb.prepare(own)
        async with AsyncSession(own) as session:
            jobs = (await session.scalars(claim(Photo, 2))).all()
            assert [(job.id, job.size, job.before) for job in jobs] == [(1, 1, 1), (2, 2, 2)]
            assert all(has_new_values(job) for job in jobs)
            await session.commit()
            assert (await session.scalars(complete(jobs))).all() == [1, 2]
            await session.commit()
            third = await session.get_one(Photo, 3)
            third.title, third.size = "flushed", 30
            await session.flush()
            assert (third.larger, third.seven, third.version, third.before) == (130, 7, 2, 3)
            change = sa.update(PHOTO).where(PHOTO.c.id == sa.bindparam("key")).returning(PHOTO.c.title, PHOTO.c.size)
            connection = await session.connection()
            given = {"title": "50%s", "size": 5, "key": 1}
            assert (await connection.execute(change, given)).all() == [("50%s", 5)]
        await own.dispose()

    asyncio.run(use())


def test_a_flush_fetches_what_the_server_computes(photos: sa.Engine) -> None:
    """The mapper asks for it by RETURNING, as it has eager_defaults, and checks the version."""
    with Session(photos) as session, Session(photos) as other:
        photo, twin = session.get_one(Photo, 1), other.get_one(Photo, 1)
        touched = photo.touched
        photo.title, photo.code = "a %(title)s", "abc"
        session.flush()
        assert has_new_values(photo)
        state: Any = sa.inspect(photo)
        assert "touched" not in state.unloaded
        assert (photo.version, photo.touched != touched) == (2, True)
        session.commit()
        assert session.execute(sa.select(PHOTO.c.title, PHOTO.c.photo_code).limit(1)).all() == [("a %(title)s", "ABC")]
        twin.title = "another"
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


def test_a_text_reads_the_row_before_the_update(photos: sa.Engine) -> None:
    with photos.begin() as connection:
        change = sa.update(PHOTO).where(PHOTO.c.id == 3).values(size=PHOTO.c.size * 10)
        assert connection.execute(change.returning(PHOTO.c.size, PHOTO.c.before)).all() == [(30, 3)]


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
    wanted = sa.bindparam("wanted", ["1%", "3%"], type_=sa.ARRAY(sa.String))
    with Session(photos) as session:
        found = sa.select(Photo.id).where(sa.func.concat(Photo.size, "%") == sa.any_(wanted))
        assert session.scalars(found.order_by(Photo.id)).all() == [1, 3]


def test_a_key_is_changed(photos: sa.Engine) -> None:
    with photos.begin() as connection:
        change = sa.update(PHOTO).where(PHOTO.c.id < 3).values(id=PHOTO.c.id + 10)
        assert connection.execute(change.returning(PHOTO.c.id, PHOTO.c.size)).all() == [(11, 1), (12, 2)]
        change = sa.update(PHOTO).where(PHOTO.c.id == 11).values(id=21, size=PHOTO.c.id)
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
        with pytest.raises(StatementError, match="the recursive CTE again: MariaDB has no UPDATE .. RETURNING"):
            connection.execute(sa.update(plain).where(plain.c.id == again.c.id).values(n=0).returning(plain.c.id))
        plain.drop(connection)


def test_a_table_without_a_primary_key_is_refused(photos: sa.Engine) -> None:
    bare = sa.Table("bare", sa.MetaData(), sa.Column("n", sa.Integer))
    with (
        photos.connect() as connection,
        pytest.raises(StatementError, match="^bare: .* by the primary key, which this"),
    ):
        connection.execute(sa.update(bare).values(n=0).returning(bare.c.n))
