"""INSERT .. ON CONFLICT: only duplicates are skipped, and each value is computed from the row that was there."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.dialects import postgresql
from sqlalchemy.exc import DataError, DBAPIError, IntegrityError
from sqlalchemy.ext.asyncio import AsyncEngine
from sqlalchemy.orm import Session, sessionmaker

import sqlaqueue
from sqlaqueue import Consumer, Schedule, claim
from sqlaqueue.admin import ScheduleAdmin
from sqlaqueue.exc import DatabaseNotReadyError, StatementError
from sqlaqueue.sql.engine import sqlstate
from tests.mariadb.models import Job, Report

METADATA = sa.MetaData()
ITEM = sa.Table(
    "item",
    METADATA,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("code", sa.String(3), unique=True),
    sa.Column("size", sa.SmallInteger, nullable=False),
    sa.Column("parent", sa.ForeignKey("item.id")),
    sa.Column("price", sa.Numeric(10, 2)),
)
IGNORING = postgresql.insert(ITEM).on_conflict_do_nothing()
RETURNING = IGNORING.returning(ITEM.c.code)

WRONG: dict[str, tuple[dict[str, Any], type[DBAPIError], str]] = {
    "long": ({"code": "longer", "size": 1}, DataError, "22001"),
    "range": ({"code": "b", "size": 70_000}, DataError, "22003"),
    "null": ({"code": "b", "size": None}, IntegrityError, "23502"),
    "foreign": ({"code": "b", "size": 1, "parent": 99}, IntegrityError, "23503"),
}


@pytest.fixture
def items(url: Callable[[str], str]) -> Iterator[sa.Engine]:
    """An item with the code "a"."""
    engine = sqlaqueue.prepare(sa.create_engine(url("mariadb+pymysql")))
    METADATA.create_all(engine)
    with engine.begin() as connection:
        connection.execute(sa.insert(ITEM).values(id=1, code="a", size=1))
    yield engine
    with engine.begin() as connection:
        connection.execute(sa.delete(ITEM))
    engine.dispose()


def codes(connection: sa.Connection) -> list[str | None]:
    return [*connection.scalars(sa.select(ITEM.c.code).order_by(ITEM.c.code))]


def test_duplicates_are_passed_over(items: sa.Engine) -> None:
    with items.begin() as connection:
        connection.execute(IGNORING, {"code": "a", "size": 2})
        connection.execute(IGNORING, [{"code": "a", "size": 2}, {"code": "b", "size": 2}])
        connection.execute(IGNORING.values([{"code": "a", "size": 2}, {"code": "c", "size": 2}]))
        connection.execute(IGNORING.from_select(["code", "size"], sa.select(ITEM.c.code, ITEM.c.size)))
        assert codes(connection) == ["a", "b", "c"]
        assert connection.scalar(sa.select(ITEM.c.size).where(ITEM.c.code == "a")) == 1


def test_new_rows_are_returned(items: sa.Engine) -> None:
    with items.begin() as connection:
        assert connection.execute(RETURNING, {"code": "a", "size": 2}).all() == []
        given = [{"code": "a", "size": 2, "price": "1.239"}, {"code": "b", "size": 2, "price": "1.239"}]
        assert connection.execute(RETURNING, given).all() == [("b",)]
        found = RETURNING.values([{"code": "a", "size": 2}, {"code": "c", "size": 2}])
        assert connection.execute(found).all() == [("c",)]


@pytest.mark.parametrize("case", WRONG)
@pytest.mark.parametrize("statement", [IGNORING, RETURNING], ids=["plain", "returning"])
def test_other_errors_are_raised_and_store_nothing(items: sa.Engine, statement: sa.Insert, case: str) -> None:
    row, kind, state = WRONG[case]
    with items.begin() as connection:
        good = {**dict.fromkeys(row), "code": "x", "size": 1}
        for given in (row, [good, row]):
            if statement is IGNORING and given is not row:
                # PyMySQL executes each row by itself.
                continue
            with pytest.raises(kind) as raised:
                connection.execute(statement, given)
            assert sqlstate(raised.value) == state
        assert codes(connection) == ["a"]


def test_an_error_of_a_select_is_raised(items: sa.Engine) -> None:
    with items.begin() as connection:
        longer = sa.select(sa.func.concat(ITEM.c.code, "-long"), ITEM.c.size)
        with pytest.raises(DataError):
            connection.execute(IGNORING.from_select(["code", "size"], longer))
        assert codes(connection) == ["a"]


def test_each_of_several_sets_of_parameters_is_checked(items: sa.Engine) -> None:
    given = sa.select(sa.bindparam("given", type_=sa.String), ITEM.c.size).where(ITEM.c.id == 1)
    statement = IGNORING.from_select(["code", "size"], given)
    with items.begin() as connection:
        assert connection.execute(statement, [{"given": "a"}, {"given": "b"}, {"given": "c"}]).rowcount == 2
        with pytest.raises(DataError):
            connection.execute(statement, [{"given": "longer"}, {"given": "d"}])
        assert codes(connection) == ["a", "b", "c"]


def test_new_rows_cannot_be_streamed(items: sa.Engine) -> None:
    with items.begin() as connection:
        with pytest.raises(StatementError, match="^item: .* cannot be streamed"):
            connection.execute(RETURNING, {"code": "b", "size": 2}, execution_options={"stream_results": True})
        assert codes(connection) == ["a"]


def test_more_duplicates_than_the_server_tells_of_are_refused(items: sa.Engine) -> None:
    """One of the warnings that it does not keep could be about another error."""
    with items.begin() as connection:
        connection.execute(sa.insert(ITEM), [{"code": str(n), "size": n} for n in range(4)])
        connection.detach()
        connection.execute(sa.text("SET SESSION max_error_count = 3"))
        again = IGNORING.from_select(["code", "size"], sa.select(ITEM.c.code, ITEM.c.size))
        with pytest.raises(StatementError, match="has skipped 5 rows, and MariaDB gives the reason for 3 of them"):
            connection.execute(again)


def test_a_duplicate_in_another_index_than_the_primary_key(items: sa.Engine) -> None:
    by_key = postgresql.insert(ITEM).on_conflict_do_nothing(index_elements=["id"]).returning(ITEM.c.id)
    with items.begin() as connection:
        assert connection.execute(by_key, {"id": 1, "code": "z", "size": 1}).all() == []
        with pytest.raises(IntegrityError) as raised:
            connection.execute(by_key, {"id": 2, "code": "a", "size": 1})
        assert sqlstate(raised.value) == "23505"


async def test_async_connections(async_engine: AsyncEngine, items: sa.Engine) -> None:
    async with async_engine.begin() as connection:
        given = [{"code": "a", "size": 2}, {"code": "b", "size": 2}]
        assert (await connection.execute(RETURNING, given)).all() == [("b",)]
        await connection.execute(IGNORING, given)
        for statement in (IGNORING, RETURNING):
            with pytest.raises(DataError) as raised:
                await connection.execute(statement, {"code": "longer", "size": 1})
            assert sqlstate(raised.value) == "22001"
    with items.connect() as connection:
        assert codes(connection) == ["a", "b"]


def test_a_schedule_whose_name_is_too_long_is_an_error(sessions: sessionmaker[Session]) -> None:
    with sessions() as session:
        admin = ScheduleAdmin(session, Report)
        admin.add(Schedule("n" * 100, Report, every=60))
        with pytest.raises(StatementError, match="there is a schedule"):
            admin.add(Schedule("n" * 100, Report, every=60))
        with pytest.raises(DataError):
            admin.add(Schedule("n" * 192, Report, every=60))


def test_each_column_is_computed_from_the_row_before(items: sa.Engine) -> None:
    insert = postgresql.insert(ITEM).values(id=1, code="b", size=5)
    with items.begin() as connection:
        # The condition reads a column that is written.
        once = {"size": insert.excluded.size, "price": 7, "code": insert.excluded.code}
        update = insert.on_conflict_do_update(index_elements=["id"], set_=once, where=ITEM.c.size == 1)
        for _ in range(2):
            connection.execute(update)
            assert connection.execute(sa.select(ITEM.c.code, ITEM.c.size, ITEM.c.price)).all() == [("b", 5, 7)]
        chain = {"size": ITEM.c.size + 1, "price": ITEM.c.size, "parent": sa.null()}
        connection.execute(insert.on_conflict_do_update(index_elements=["id"], set_=chain))
        assert connection.execute(sa.select(ITEM.c.size, ITEM.c.price)).all() == [(6, 5)]


def test_columns_that_are_computed_from_each_other_are_refused(items: sa.Engine) -> None:
    insert = postgresql.insert(ITEM).values(id=1, code="b", size=5)
    swap = insert.on_conflict_do_update(index_elements=["id"], set_={"size": ITEM.c.price, "price": ITEM.c.size})
    said = r"item: on_conflict_do_update\(\) computes .*(size and price|price and size).* by a statement of its own"
    with items.connect() as connection, pytest.raises(StatementError, match=said):
        connection.execute(swap)


def test_a_missing_claim_index(engine: sa.Engine) -> None:
    (index,) = (each for each in Job.__table__.indexes if str(each.name).endswith("_claim"))  # type: ignore[attr-defined] # a Table
    index.drop(engine)
    try:
        with Session(engine) as session, pytest.raises(DBAPIError) as raised:
            session.execute(claim(Job, 1))
        assert sqlstate(raised.value) == "42P10"
        with pytest.raises(DatabaseNotReadyError, match="the index ix_job_queue_claim; .*`alembic revision"):
            Consumer(Job, lambda *_: None, sessionmaker(engine)).drain()
    finally:
        index.create(engine, checkfirst=True)
    Consumer(Job, lambda *_: None, sessionmaker(engine)).drain()
