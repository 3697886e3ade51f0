"""COPY in the transaction of the session: commit, rollback, savepoints, errors and privileges."""

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
from sqlaqueue.postgresql.triggers import channel_of
from tests.copying.conftest import Driver, nothing
from tests.copying.models import STRATEGIES, Customer, Order, rows_of
from tests.servers import Database


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_copied_jobs_are_announced_and_claimed(
    strategy: str, psycopg_driver: Driver, engine: sa.Engine, copy_database: Database
) -> None:
    model = STRATEGIES[strategy]
    with psycopg.connect(copy_database.dsn, autocommit=True) as listener:
        listener.execute(f'LISTEN "{channel_of(spec_of(model))}"'.encode())
        assert psycopg_driver.copy(model, ({"id": number} for number in range(250))) == 250
        # One statement, one notification.
        assert len(list(listener.notifies(timeout=0.2, stop_after=2))) == 1
    with Session(engine) as session:
        assert sorted(job.id for job in session.scalars(claim(model, 300))) == list(range(250))


def test_a_rollback_undoes_the_copy(driver: Driver, engine: sa.Engine) -> None:
    # Here SQLAlchemy has not begun a transaction in the database before the COPY.
    assert driver.copy(Order, [{"id": 1}], after=Session.rollback) == 1
    assert driver.copy(Order, [{"id": 2}], before=_select, after=Session.rollback) == 1
    assert driver.copy(Order, [{"id": 3}], after=nothing) == 1
    assert rows_of(engine, Order, "id") == []


def _select(session: Session) -> None:
    session.execute(sa.select(1))


def test_pending_instances_are_flushed_before_the_copy(driver: Driver, engine: sa.Engine) -> None:
    driver.copy(Order, [{"id": 1, "customer_id": 5}], before=lambda session: session.add(Customer(id=5)))
    assert rows_of(engine, Order, "id", "customer_id") == [(1, 5)]


@pytest.mark.once
def test_no_autoflush_is_respected(engine: sa.Engine) -> None:
    with Session(engine) as session, session.no_autoflush:
        session.add(Customer(id=5))
        copy_in(session, Order, [{"id": 1}])
        assert len(session.new) == 1


@pytest.mark.once
def test_without_rows_no_statement_is_sent(driver: Driver, engine: sa.Engine) -> None:
    seen: list[bool] = []
    assert driver.copy(Order, [], after=lambda session: seen.append(session.in_transaction())) == 0
    assert driver.copy(Order, iter(()), after=lambda session: seen.append(session.in_transaction())) == 0
    assert seen == [False, False]


@pytest.mark.once
def test_scoped_sessions_and_sessions_of_a_connection(engine: sa.Engine) -> None:
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
def test_autocommit(driver: Driver, engine: sa.Engine) -> None:
    driver.copy(Order, [{"id": 1}], options={"isolation_level": "AUTOCOMMIT"}, after=Session.rollback)
    assert rows_of(engine, Order, "id") == [(1,)]


class Row(dict[str, Any]):
    """A dict that can be weakly referenced."""


def test_rows_are_streamed(driver: Driver) -> None:
    rows: list[weakref.ref[Row]] = []
    most = 0

    def make() -> Iterator[Row]:
        nonlocal most
        for number in range(5000):
            row = Row(id=number)
            rows.append(weakref.ref(row))
            most = max(most, sum(each() is not None for each in rows[-500:]))
            yield row

    assert driver.copy(Order, make(), after=Session.rollback) == 5000
    assert most < 10


# -- errors of the server --------------------------------------------------------------------------------------


def test_a_duplicate_key_raises_integrity_error(driver: Driver, engine: sa.Engine) -> None:
    driver.copy(Order, [{"id": 1}])
    with pytest.raises(IntegrityError, match="orders_pkey") as raised:
        driver.copy(Order, ({"id": number} for number in (3, 2, 1)), after=_roll_back_and_add)
    assert raised.value.statement is not None
    assert raised.value.statement.startswith("COPY orders (id, ")
    assert not raised.value.connection_invalidated
    state: Any = raised.value.orig
    assert state.sqlstate == "23505" if driver.name != "psycopg2" else state.pgcode == "23505"
    assert rows_of(engine, Order, "id") == [(1,), (9,)]


def _roll_back_and_add(session: Session) -> None:
    session.rollback()
    session.add(Order(id=9))
    session.commit()


def test_after_an_error_a_savepoint_can_be_rolled_back(driver: Driver, engine: sa.Engine) -> None:
    def begin(session: Session) -> None:
        session.add(Order(id=1))
        session.begin_nested()

    def end(session: Session) -> None:
        nested = session.get_nested_transaction()
        assert nested is not None
        nested.rollback()
        session.commit()

    with pytest.raises(IntegrityError):
        driver.copy(Order, [{"id": 2, "customer_id": 77}], before=begin, after=end)
    assert rows_of(engine, Order, "id") == [(1,)]


def test_a_missing_table_raises_programming_error(driver: Driver) -> None:
    options = {"schema_translate_map": {None: "nowhere"}}
    with pytest.raises(ProgrammingError, match="nowhere"):
        driver.copy(Order, [{"id": 1}], options=options, after=Session.rollback)


def test_a_connection_lost_during_the_copy_is_invalidated(
    driver: Driver, engine: sa.Engine, copy_database: Database
) -> None:
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
        driver.copy(Order, make(), after=after)
    assert raised.value.connection_invalidated
    assert seen == [True, 2]
    engine.dispose()
    assert rows_of(engine, Order, "id") == []


@pytest.mark.once
def test_defaults_are_called_once_per_row_even_after_an_error(psycopg_driver: Driver, engine: sa.Engine) -> None:
    made: list[int] = []
    column = Order.__table__.c.size
    before, column.default = column.default, sa.ColumnDefault(lambda: made.append(1) or 1)
    try:
        with pytest.raises(IntegrityError):
            psycopg_driver.copy(Order, [{"id": 1}, {"id": 1}], after=Session.rollback)
    finally:
        column.default = before
    assert made == [1, 1]


# -- privileges ------------------------------------------------------------------------------------------------


@pytest.fixture
def clerk(copy_database: Database) -> Iterator[str]:
    """A role with the INSERT privilege only."""
    role = f"clerk_{copy_database.name}"
    with copy_database.connect() as connection:
        connection.execute(f"CREATE ROLE {role}; GRANT INSERT ON orders TO {role}".encode())
        yield role
        connection.execute("ALTER TABLE orders DISABLE ROW LEVEL SECURITY")
        connection.execute(f"DROP OWNED BY {role}; DROP ROLE {role}".encode())


def test_the_insert_privilege_is_sufficient(driver: Driver, engine: sa.Engine, clerk: str) -> None:
    def become(session: Session) -> None:
        session.execute(sa.text(f"SET LOCAL ROLE {clerk}"))

    assert driver.copy(Order, [{"id": 1}], before=become) == 1


@pytest.mark.once
def test_row_level_security(psycopg_driver: Driver, engine: sa.Engine, clerk: str) -> None:
    with engine.begin() as connection:
        connection.exec_driver_sql("ALTER TABLE orders ENABLE ROW LEVEL SECURITY")

    def become(session: Session) -> None:
        session.execute(sa.text(f"SET LOCAL ROLE {clerk}"))

    with pytest.raises(NotSupportedError, match="COPY FROM not supported with row-level security"):
        psycopg_driver.copy(Order, [{"id": 1}], before=become, after=Session.rollback)
