"""Invalid rows are refused; the error contains the row, the attribute and the fix."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterator
from datetime import datetime
from types import SimpleNamespace
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from sqlaqueue import async_copy_in, copy_in
from sqlaqueue.exc import ConfigurationError, NotAQueueError, StatementError
from tests.copy.conftest import (
    Anything,
    Customer,
    Defaults,
    Driver,
    Email,
    Message,
    Order,
    Parcel,
    SqlDefault,
    roll_back_and_add,
    rows_of,
)

pytestmark = pytest.mark.once

UNDO = "No row is enqueued; roll back the transaction, or the savepoint around the call"


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([{"id": 1}, {"id": 2, "size": 3}], "row 2 has size, which the first row lacks; use the same keys"),
        ([{"id": 1, "size": 3}, {"id": 2}], "row 2 lacks size, which the first row has; use the same keys"),
        ([{"id": 1}, {"size": 2}], "row 2 lacks id"),
        ([{"id": 1}, defaultdict(int, size=2)], "row 2 has size"),
        ([{"id": 1}, Order(id=2)], "row 2 is Order, not a mapping; use dicts of its attributes, or session.add_all()"),
        ([{"id": 1}, (2,)], "row 2 is tuple, not a mapping; use mappings from attribute names to values"),
        ([{"id": 1}, None], "row 2 is NoneType, not a mapping"),
        ([{"id": 1, "size": sa.func.now()}], r"Order.size = .* in row 1: COPY does not evaluate SQL"),
        ([{"id": 1, "size": 1}, {"id": 2, "size": Order.id}], r"Order.size = .* in row 2: COPY does not evaluate SQL"),
        (
            [{"id": 1, "run_at": None}, {"id": 1, "run_at": datetime(2030, 1, 1)}],  # noqa: DTZ001 - what the test is about
            r"Order.run_at = datetime.datetime\(2030.* in row 2: the column has a time zone; use a datetime with",
        ),
    ],
)
def test_a_row_that_differs_from_the_first_is_refused(
    rows: list[Any], expected: str, driver: Driver, engine: sa.Engine
) -> None:
    with pytest.raises(StatementError, match=expected) as raised:
        driver.copy(Order, rows, after=roll_back_and_add)
    assert str(raised.value).startswith("async_copy_in(Order): " if driver.is_async else "copy_in(Order): ")
    assert str(raised.value).endswith(UNDO)
    assert rows_of(engine, Order, "id") == [(99,)]


@pytest.mark.parametrize(
    ("model", "row", "expected"),
    [
        (Order, {"nonsense": 1}, "Order.nonsense is not an attribute of a column; those are .*customer_id.* size"),
        (Order, {"double": 1}, "Order.double is not an attribute of a column"),
        (Order, {3: 1}, "3 is not an attribute of a column"),
        (Order, {"customer": None}, "Order.customer is a relationship, which COPY does not follow; set customer_id"),
        (Order, {"wrapped": "x"}, "the type of wrapped, wraps its values in SQL, .*; use session.execute"),
        (Order, Order(id=1), "row 1 is Order, not a mapping; use dicts of its attributes"),
        (Order, "abc", "row 1 is str, not a mapping"),
        (Anything, {"send to": "x"}, "Anything.send to is not an attribute of a column; those are .*, to, "),
        (Message, {"address": "x"}, "Message.address is not an attribute of a column"),
        (Parcel, {"id": 1}, "its rows are in .*, but COPY writes to one table; use session.add_all"),
        (SqlDefault, {"id": 1, "number": 1}, "SqlDefault.made is an SQL expression, .*; use server_default"),
        (SqlDefault, {"id": 1, "made": None}, "SqlDefault.number is a sequence, which COPY does not evaluate"),
    ],
)
def test_an_invalid_first_row_is_refused_before_the_copy_begins(
    model: Any, row: Any, expected: str, psycopg_driver: Driver, engine: sa.Engine
) -> None:
    """The transaction is not aborted."""
    with pytest.raises(StatementError, match=expected):
        psycopg_driver.copy(model, [row], before=lambda session: session.add(Order(id=1)))
    assert rows_of(engine, Order, "id") == [(1,)]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"by_name": 5}, "Anything.by_name = 5 in row 1: '5' is not among"),
        # Some drivers serialize JSON themselves.
        ({"json": object()}, r" row 1: .* is not JSON serializable"),
    ],
)
def test_a_value_refused_by_its_type(row: dict[str, Any], expected: str, driver: Driver, engine: sa.Engine) -> None:
    with pytest.raises(StatementError, match=expected) as raised:
        driver.copy(Anything, [{"id": 1} | row], after=roll_back_and_add)
    assert str(raised.value).endswith(UNDO)
    assert rows_of(engine, Order, "id") == [(99,)]


def test_a_value_refused_by_the_driver(driver: Driver, engine: sa.Engine) -> None:
    rows = [{"id": 1, "text": "x"}, {"id": 2, "text": object()}]
    with pytest.raises((StatementError, sa.exc.DBAPIError), match="object"):
        driver.copy(Anything, rows, after=roll_back_and_add)
    assert rows_of(engine, Order, "id") == [(99,)]


def test_a_value_refused_by_the_server(driver: Driver, engine: sa.Engine) -> None:
    # asyncpg checks the type of the column itself.
    with pytest.raises(StatementError if driver.name == "asyncpg" else sa.exc.DBAPIError, match="out of "):
        driver.copy(Anything, [{"id": 1, "count": 1}, {"id": 2, "count": 2**40}], after=roll_back_and_add)
    assert rows_of(engine, Order, "id") == [(99,)]


def test_the_error_of_a_default_is_reported(psycopg_driver: Driver, engine: sa.Engine) -> None:
    class Wrong(Exception):
        pass

    def fail() -> str:
        raise Wrong

    column = Defaults.__table__.c.word
    before, column.default = column.default, sa.ColumnDefault(fail)
    try:
        with pytest.raises(StatementError, match="Defaults.word = .* in row 1: the default raised Wrong"):
            psycopg_driver.copy(Defaults, [{"id": 1}], after=roll_back_and_add)
    finally:
        column.default = before


class Oops(Exception):
    """An error of the generator of rows."""


def test_an_error_of_the_generator_of_rows_is_raised_unchanged(driver: Driver, engine: sa.Engine) -> None:
    def make(error: Exception) -> Iterator[dict[str, Any]]:
        yield {"id": 1}
        try:
            raise cause
        except Oops:
            raise error from cause

    cause = Oops()
    for error in (Oops(), KeyError("id")):
        with pytest.raises(type(error)) as raised:
            driver.copy(Order, make(error), after=Session.rollback)
        assert raised.value is error
        assert raised.value.__cause__ is cause
        assert raised.value.__context__ is cause
    assert rows_of(engine, Order, "id") == []


READS = {
    "execute": lambda session: session.scalar(sa.select(2)),
    "fetch": lambda session: next(session.info["stream"]),
    "commit": Session.commit,
}


@pytest.mark.parametrize("read", READS)
def test_a_generator_of_rows_that_uses_the_session_is_refused(read: str, driver: Driver, engine: sa.Engine) -> None:
    """Without the check psycopg would wait forever for its own lock."""
    sessions: list[Session] = []

    def before(session: Session) -> None:
        sessions.append(session)
        many = sa.select(sa.func.generate_series(1, 1000)).execution_options(yield_per=10)
        session.info["result"] = session.scalars(many)
        session.info["stream"] = iter(session.info["result"])

    def make() -> Iterator[dict[str, Any]]:
        for number in range(500):
            yield {"id": number}
            READS[read](sessions[0])

    def after(session: Session) -> None:
        session.info["result"].close()
        roll_back_and_add(session)

    expected = (StatementError, sa.exc.SQLAlchemyError)
    with pytest.raises(
        expected, match=r"the generator of row \d+ uses the session" if driver.name == "psycopg" else None
    ):
        driver.copy(Order, make(), before=before, after=after)
    assert rows_of(engine, Order, "id") == [(99,)]


@pytest.mark.parametrize("driver", ["psycopg", "psycopg2"], indirect=True)
def test_keyboard_interrupt_in_the_generator_of_rows(driver: Driver, engine: sa.Engine) -> None:
    def make() -> Iterator[dict[str, Any]]:
        yield {"id": 1}
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        driver.copy(Order, make(), after=roll_back_and_add)
    assert rows_of(engine, Order, "id") == [(99,)]


@pytest.mark.parametrize("rows", [None, 5, {"id": 1}, "abc"])
def test_rows_that_are_not_an_iterable_of_mappings_are_refused(rows: Any, psycopg_driver: Driver) -> None:
    with pytest.raises(StatementError, match=r"copy_in\(Order\): the rows are \w+; use an iterable of mappings"):
        psycopg_driver.copy(Order, rows)


@pytest.mark.parametrize("model", [Customer, 5])
def test_a_class_that_is_not_a_queue_is_refused(model: Any, psycopg_driver: Driver) -> None:
    with pytest.raises(NotAQueueError):
        psycopg_driver.copy(model, [{"id": 1}])


def test_a_session_of_the_wrong_kind_is_refused(engine: sa.Engine) -> None:
    with pytest.raises(StatementError, match=r"use a Session, or async_copy_in\(\) for an AsyncSession"):
        copy_in(AsyncSession(), Order, [])  # type: ignore[arg-type]  # what the test is about
    with pytest.raises(StatementError, match="use a Session"):
        copy_in(engine, Order, [])  # type: ignore[arg-type]  # what the test is about
    with pytest.raises(StatementError, match=r"use an AsyncSession, or copy_in\(\)"):
        asyncio.run(async_copy_in(Session(), Order, []))  # type: ignore[arg-type]  # what the test is about


def test_other_databases_and_drivers_are_refused() -> None:
    with pytest.raises(
        ConfigurationError, match=r"is for sqlite, and is not prepared; call sqlaqueue.sqlite.prepare\(engine\)"
    ):
        copy_in(Session(sa.create_engine("sqlite://")), Email, [{"id": 1}])
    # The engine does not connect.
    module = SimpleNamespace(paramstyle="format", __version__="1.31.1")
    engine = sa.create_engine("postgresql+pg8000://localhost/x", module=module)
    with pytest.raises(ConfigurationError, match=r"the driver pg8000 is not supported; use .*, or session.execute"):
        copy_in(Session(engine), Email, [{"id": 1}])
