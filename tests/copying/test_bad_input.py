"""What cannot be copied is refused, with the row, the attribute and the fix in the message."""

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
from tests.copying.conftest import Way
from tests.copying.models import Anything, Customer, Defaults, Email, Message, Order, Parcel, SqlDefault, rows_of

pytestmark = pytest.mark.once

UNDO = "None of the rows is enqueued; roll the transaction, or the savepoint around the call, back"


def go_on(session: Session) -> None:
    """What the caller of a failed COPY does."""
    session.rollback()
    session.add(Order(id=99))
    session.commit()


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([{"id": 1}, {"id": 2, "size": 3}], "row 2 has size, which the first row does not give; give the same keys"),
        ([{"id": 1, "size": 3}, {"id": 2}], "row 2 lacks size, which the first row gives; give the same keys"),
        ([{"id": 1}, {"size": 2}], "row 2 lacks id"),
        ([{"id": 1}, defaultdict(int, size=2)], "row 2 has size"),
        ([{"id": 1}, Order(id=2)], "row 2 is Order, no mapping; give dicts of its attributes, or session.add_all()"),
        ([{"id": 1}, (2,)], "row 2 is tuple, no mapping; give mappings from attribute names to values"),
        ([{"id": 1}, None], "row 2 is NoneType, no mapping"),
        ([{"id": 1, "size": sa.func.now()}], r"Order.size = .* in row 1: it is SQL, which COPY does not evaluate"),
        ([{"id": 1, "size": 1}, {"id": 2, "size": Order.id}], r"Order.size = .* in row 2: it is SQL"),
        (
            [{"id": 1, "run_at": None}, {"id": 1, "run_at": datetime(2030, 1, 1)}],  # noqa: DTZ001 - that is the point
            r"Order.run_at = datetime.datetime\(2030.* in row 2: the column has a time zone; give a datetime with",
        ),
    ],
)
def test_a_row_that_is_not_like_the_first(rows: list[Any], expected: str, way: Way, engine: sa.Engine) -> None:
    with pytest.raises(StatementError, match=expected) as raised:
        way.copy(Order, rows, after=go_on)
    assert str(raised.value).startswith("async_copy_in(Order): " if way.is_async else "copy_in(Order): ")
    assert str(raised.value).endswith(UNDO)
    assert rows_of(engine, Order, "id") == [(99,)]


@pytest.mark.parametrize(
    ("model", "row", "expected"),
    [
        (Order, {"nonsense": 1}, "Order.nonsense is no attribute that holds a column; those are .*customer_id.* size"),
        (Order, {"double": 1}, "Order.double is no attribute that holds a column"),
        (Order, {3: 1}, "3 is no attribute that holds a column"),
        (Order, {"customer": None}, "Order.customer is a relationship, which COPY does not follow; give customer_id"),
        (Order, {"wrapped": "x"}, "the type of wrapped, wraps its values in SQL, .*; use session.execute"),
        (Order, Order(id=1), "row 1 is Order, no mapping; give dicts of its attributes"),
        (Order, "abc", "row 1 is str, no mapping"),
        (Anything, {"send to": "x"}, "Anything.send to is no attribute that holds a column; those are .*, to, "),
        (Message, {"address": "x"}, "Message.address is no attribute that holds a column"),
        (Parcel, {"id": 1}, "its rows are in .*, and COPY fills one table; use session.add_all"),
        (SqlDefault, {"id": 1, "number": 1}, "SqlDefault.made is an SQL expression, .*; give it as server_default"),
        (SqlDefault, {"id": 1, "made": None}, "SqlDefault.number is a sequence, which COPY does not evaluate"),
    ],
)
def test_a_first_row_that_cannot_be_copied(
    model: Any, row: Any, expected: str, one_way: Way, engine: sa.Engine
) -> None:
    """The transaction is as good as before: nothing has been sent."""
    with pytest.raises(StatementError, match=expected):
        one_way.copy(model, [row], before=lambda session: session.add(Order(id=1)))
    assert rows_of(engine, Order, "id") == [(1,)]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"by_name": 5}, "Anything.by_name = 5 in row 1: '5' is not among"),
        # Some drivers do it themselves.
        ({"json": object()}, r" row 1: .* is not JSON serializable"),
    ],
)
def test_a_value_that_its_type_refuses(row: dict[str, Any], expected: str, way: Way, engine: sa.Engine) -> None:
    with pytest.raises(StatementError, match=expected) as raised:
        way.copy(Anything, [{"id": 1} | row], after=go_on)
    assert str(raised.value).endswith(UNDO)
    assert rows_of(engine, Order, "id") == [(99,)]


def test_a_value_that_the_driver_refuses(way: Way, engine: sa.Engine) -> None:
    rows = [{"id": 1, "text": "x"}, {"id": 2, "text": object()}]
    with pytest.raises((StatementError, sa.exc.DBAPIError), match="object"):
        way.copy(Anything, rows, after=go_on)
    assert rows_of(engine, Order, "id") == [(99,)]


def test_a_value_that_the_column_refuses(way: Way, engine: sa.Engine) -> None:
    # asyncpg knows what the column holds.
    with pytest.raises(StatementError if way.name == "asyncpg" else sa.exc.DBAPIError, match="out of "):
        way.copy(Anything, [{"id": 1, "count": 1}, {"id": 2, "count": 2**40}], after=go_on)
    assert rows_of(engine, Order, "id") == [(99,)]


def test_a_default_that_raises(one_way: Way, engine: sa.Engine) -> None:
    class Wrong(Exception):
        pass

    def fail() -> str:
        raise Wrong

    column = Defaults.__table__.c.word
    before, column.default = column.default, sa.ColumnDefault(fail)
    try:
        with pytest.raises(StatementError, match="Defaults.word = .* in row 1: this default raises Wrong"):
            one_way.copy(Defaults, [{"id": 1}], after=go_on)
    finally:
        column.default = before


class Oops(Exception):
    """Of whoever makes the rows."""


def test_an_error_of_whoever_makes_the_rows_is_left_alone(way: Way, engine: sa.Engine) -> None:
    def make(error: Exception) -> Iterator[dict[str, Any]]:
        yield {"id": 1}
        try:
            raise cause
        except Oops:
            raise error from cause

    cause = Oops()
    for error in (Oops(), KeyError("id")):
        with pytest.raises(type(error)) as raised:
            way.copy(Order, make(error), after=Session.rollback)
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
def test_rows_that_need_the_connection_meanwhile(read: str, way: Way, engine: sa.Engine) -> None:
    """It is refused, and nobody waits for ever."""
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
        go_on(session)

    expected = (StatementError, sa.exc.SQLAlchemyError)
    with pytest.raises(expected, match=r"what makes row \d+ uses the session" if way.name == "psycopg" else None):
        way.copy(Order, make(), before=before, after=after)
    assert rows_of(engine, Order, "id") == [(99,)]


@pytest.mark.parametrize("way", ["psycopg", "psycopg2"], indirect=True)
def test_ctrl_c_while_rows_are_made(way: Way, engine: sa.Engine) -> None:
    def make() -> Iterator[dict[str, Any]]:
        yield {"id": 1}
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        way.copy(Order, make(), after=go_on)
    assert rows_of(engine, Order, "id") == [(99,)]


@pytest.mark.parametrize("rows", [None, 5, {"id": 1}, "abc"])
def test_what_is_no_iterable_of_rows(rows: Any, one_way: Way) -> None:
    with pytest.raises(StatementError, match=r"copy_in\(Order\): the rows are \w+; give an iterable of mappings"):
        one_way.copy(Order, rows)


@pytest.mark.parametrize("model", [Customer, 5])
def test_what_is_no_queue(model: Any, one_way: Way) -> None:
    with pytest.raises(NotAQueueError):
        one_way.copy(model, [{"id": 1}])


def test_a_session_of_the_other_colour(engine: sa.Engine) -> None:
    with pytest.raises(StatementError, match="for an AsyncSession there is async_copy_in"):
        copy_in(AsyncSession(), Order, [])  # type: ignore[arg-type]  # that is the point
    with pytest.raises(StatementError, match="give a Session"):
        copy_in(engine, Order, [])  # type: ignore[arg-type]  # that is the point
    with pytest.raises(StatementError, match="for a Session there is copy_in"):
        asyncio.run(async_copy_in(Session(), Order, []))  # type: ignore[arg-type]  # that is the point


def test_another_database_and_another_driver() -> None:
    with pytest.raises(ConfigurationError, match="is for sqlite, and sqlaqueue needs PostgreSQL"):
        copy_in(Session(sa.create_engine("sqlite://")), Email, [{"id": 1}])
    # Nobody connects.
    module = SimpleNamespace(paramstyle="format", __version__="1.31.1")
    engine = sa.create_engine("postgresql+pg8000://localhost/x", module=module)
    with pytest.raises(ConfigurationError, match=r"the driver pg8000 is not served by COPY, .*; use session.execute"):
        copy_in(Session(engine), Email, [{"id": 1}])
