"""A COPY is a part of the session's transaction, and of what happens to it."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError, IntegrityError, NotSupportedError, ProgrammingError
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from sqlaqueue import claim, copy_in
from sqlaqueue.mapping.mixin import spec_of
from sqlaqueue.postgresql.notify import channel_of
from tests.copying.conftest import Way, nothing
from tests.copying.models import STRATEGIES, Customer, Order, rows_of
from tests.servers import Database


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_copied_jobs_are_claimed(strategy: str, one_way: Way, engine: sa.Engine, copy_database: Database) -> None:
    model = STRATEGIES[strategy]
    with psycopg.connect(copy_database.dsn, autocommit=True) as listener:
        listener.execute(f'LISTEN "{channel_of(spec_of(model))}"'.encode())
        assert one_way.copy(model, ({"id": number} for number in range(250))) == 250
        # One statement, one notification.
        assert len(list(listener.notifies(timeout=0.2, stop_after=2))) == 1
    with Session(engine) as session:
        assert sorted(job.id for job in session.scalars(claim(model, 300))) == list(range(250))


def test_it_is_rolled_back_with_its_transaction(way: Way, engine: sa.Engine) -> None:
    # For a SQLAlchemy that has not sent anything yet, the COPY is the first statement.
    assert way.copy(Order, [{"id": 1}], after=Session.rollback) == 1
    assert way.copy(Order, [{"id": 2}], before=_select, after=Session.rollback) == 1
    assert way.copy(Order, [{"id": 3}], after=nothing) == 1
    assert rows_of(engine, Order, "id") == []


def _select(session: Session) -> None:
    session.execute(sa.select(1))


def test_what_is_pending_comes_before(way: Way, engine: sa.Engine) -> None:
    way.copy(Order, [{"id": 1, "customer_id": 5}], before=lambda session: session.add(Customer(id=5)))
    assert rows_of(engine, Order, "id", "customer_id") == [(1, 5)]


@pytest.mark.once
def test_nothing_is_flushed_where_the_session_does_not(engine: sa.Engine) -> None:
    with Session(engine) as session, session.no_autoflush:
        session.add(Customer(id=5))
        copy_in(session, Order, [{"id": 1}])
        assert len(session.new) == 1


@pytest.mark.once
def test_no_rows_are_no_statement(way: Way, engine: sa.Engine) -> None:
    seen: list[bool] = []
    assert way.copy(Order, [], after=lambda session: seen.append(session.in_transaction())) == 0
    assert way.copy(Order, iter(()), after=lambda session: seen.append(session.in_transaction())) == 0
    assert seen == [False, False]


@pytest.mark.once
def test_a_scoped_session_and_one_that_is_bound_to_a_connection(engine: sa.Engine) -> None:
    registry = scoped_session(sessionmaker(engine))
    assert copy_in(registry, Order, [{"id": 1}]) == 1
    registry.rollback()
    registry.remove()
    with engine.connect() as connection, connection.begin():
        with Session(connection, join_transaction_mode="create_savepoint") as session:
            assert copy_in(session, Order, [{"id": 1}]) == 1
            session.rollback()
        assert connection.scalar(sa.select(sa.func.count()).select_from(Order)) == 0


@pytest.mark.once
def test_autocommit(way: Way, engine: sa.Engine) -> None:
    way.copy(Order, [{"id": 1}], options={"isolation_level": "AUTOCOMMIT"}, after=Session.rollback)
    assert rows_of(engine, Order, "id") == [(1,)]


class Row(dict[str, Any]):
    """One that a weak reference can point to."""


def test_rows_are_not_kept(way: Way) -> None:
    rows: list[weakref.ref[Row]] = []
    most = 0

    def make() -> Iterator[Row]:
        nonlocal most
        for number in range(5000):
            row = Row(id=number)
            rows.append(weakref.ref(row))
            most = max(most, sum(each() is not None for each in rows[-500:]))
            yield row

    assert way.copy(Order, make(), after=Session.rollback) == 5000
    assert most < 10


# -- errors of the server --------------------------------------------------------------------------------------


def test_a_key_that_is_there_already(way: Way, engine: sa.Engine) -> None:
    way.copy(Order, [{"id": 1}])
    with pytest.raises(IntegrityError, match="orders_pkey") as raised:
        way.copy(Order, ({"id": number} for number in (3, 2, 1)), after=_go_on)
    assert raised.value.statement is not None
    assert raised.value.statement.startswith("COPY orders (id, ")
    assert not raised.value.connection_invalidated
    state: Any = raised.value.orig
    assert state.sqlstate == "23505" if way.name != "psycopg2" else state.pgcode == "23505"
    assert rows_of(engine, Order, "id") == [(1,), (9,)]


def _go_on(session: Session) -> None:
    session.rollback()
    session.add(Order(id=9))
    session.commit()


def test_a_savepoint_keeps_the_rest(way: Way, engine: sa.Engine) -> None:
    def begin(session: Session) -> None:
        session.add(Order(id=1))
        session.begin_nested()

    def end(session: Session) -> None:
        nested = session.get_nested_transaction()
        assert nested is not None
        nested.rollback()
        session.commit()

    with pytest.raises(IntegrityError):
        way.copy(Order, [{"id": 2, "customer_id": 77}], before=begin, after=end)
    assert rows_of(engine, Order, "id") == [(1,)]


def test_a_table_that_is_missing(way: Way) -> None:
    options = {"schema_translate_map": {None: "nowhere"}}
    with pytest.raises(ProgrammingError, match="nowhere"):
        way.copy(Order, [{"id": 1}], options=options, after=Session.rollback)


def test_a_connection_that_is_lost_meanwhile(way: Way, engine: sa.Engine, copy_database: Database) -> None:
    def make() -> Iterator[dict[str, Any]]:
        yield {"id": 1}
        copy_database.kill_backends()
        for number in range(2, 100_000):
            yield {"id": number}

    seen: list[object] = []

    def after(session: Session) -> None:
        seen.append(session.connection().invalidated)
        session.rollback()
        seen.append(session.scalar(sa.select(2)))

    with pytest.raises(DBAPIError) as raised:
        way.copy(Order, make(), after=after)
    assert raised.value.connection_invalidated
    assert seen == [True, 2]
    engine.dispose()
    assert rows_of(engine, Order, "id") == []


@pytest.mark.once
def test_nothing_is_made_once_more_after_an_error_of_the_server(one_way: Way, engine: sa.Engine) -> None:
    made: list[int] = []
    column = Order.__table__.c.size
    before, column.default = column.default, sa.ColumnDefault(lambda: made.append(1) or 1)
    try:
        with pytest.raises(IntegrityError):
            one_way.copy(Order, [{"id": 1}, {"id": 1}], after=Session.rollback)
    finally:
        column.default = before
    assert made == [1, 1]


# -- rights ----------------------------------------------------------------------------------------------------


@pytest.fixture
def clerk(copy_database: Database) -> Iterator[str]:
    """A role that may enqueue, and nothing else."""
    role = f"clerk_{copy_database.name}"
    with copy_database.connect() as connection:
        connection.execute(f"CREATE ROLE {role}; GRANT INSERT ON orders TO {role}".encode())
        yield role
        connection.execute("ALTER TABLE orders DISABLE ROW LEVEL SECURITY")
        connection.execute(f"DROP OWNED BY {role}; DROP ROLE {role}".encode())


def test_the_right_to_insert_is_enough(way: Way, engine: sa.Engine, clerk: str) -> None:
    def become(session: Session) -> None:
        session.execute(sa.text(f"SET LOCAL ROLE {clerk}"))

    assert way.copy(Order, [{"id": 1}], before=become) == 1


@pytest.mark.once
def test_row_level_security(one_way: Way, engine: sa.Engine, clerk: str) -> None:
    with engine.begin() as connection:
        connection.exec_driver_sql("ALTER TABLE orders ENABLE ROW LEVEL SECURITY")

    def become(session: Session) -> None:
        session.execute(sa.text(f"SET LOCAL ROLE {clerk}"))

    with pytest.raises(NotSupportedError, match="COPY FROM not supported with row-level security"):
        one_way.copy(Order, [{"id": 1}], before=become, after=Session.rollback)
