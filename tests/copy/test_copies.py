"""COPY writes what an INSERT writes, in the transaction of the session; invalid rows are refused with the fix."""

import asyncio
import uuid
import weakref
from collections import defaultdict
from collections.abc import Iterator
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from types import MappingProxyType, SimpleNamespace
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError, IntegrityError, NotSupportedError, ProgrammingError
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from sqlaqueue import async_copy_in, claim, copy_in
from sqlaqueue.exc import ConfigurationError, NotAQueueError, StatementError
from sqlaqueue.mapping.mixin import spec_of
from sqlaqueue.postgresql.triggers import channel_of, lock_numbers
from tests.copy.conftest import (
    STRATEGIES,
    Anything,
    Colour,
    Customer,
    Defaults,
    Driver,
    Email,
    Message,
    Moved,
    Odd,
    Order,
    Parcel,
    SqlDefault,
    nothing,
    roll_back_and_add,
    rows_of,
)
from tests.servers import Database

HARD = "a\tb\nc\rd\\e\\N \\. 'f' \"g\" {h,i} é ☂ %s %% \\t"
FIRST: dict[str, Any] = {
    "to": HARD,
    "by_name": Colour.RED,
    "by_value": Colour.BLUE,
    "json": {"a": [1, None, HARD]},
    "jsonb": {"b": HARD},
    "shouted": "loud",
    "uid": uuid.UUID(int=5),
    "uid_as_text": str(uuid.UUID(int=6)),
    "uid_as_char": uuid.UUID(int=7),
    "moment": datetime(2024, 2, 29, 23, 59, 59, 123456, tzinfo=timezone(timedelta(hours=5, minutes=30))),
    "local": datetime(2024, 2, 29, 1, 2, 3),  # noqa: DTZ001 - for a column without time zone
    "day": date(2, 1, 1),
    "clock": time(23, 59, 59, 999999),
    "span": timedelta(days=-3, seconds=5, microseconds=7),
    "tags": [HARD, "", None, "NULL", "a,b", "{}", " "],
    "grid": [[1, 2], [3, 4]],
    "colours": [Colour.RED, Colour.BLUE],
    "picture": bytes(range(256)),
    "price": Decimal("12345678901234567890.123456789"),
    "share": 0.1,
    "flag": True,
    "count": -5,
    "text": "",
    "status": "pending",
    "run_at": datetime(2030, 1, 1, tzinfo=UTC),
    "max_attempts": 7,
}
SECOND = FIRST | {"tags": [], "share": float("inf"), "flag": False, "price": Decimal("1E+5"), "json": [], "count": 0}
EMPTY = dict.fromkeys(FIRST) | {"to": "", "status": "pending", "run_at": FIRST["run_at"]}
NAMES = [*FIRST, "priority", "attempts", "lease_token", "finished_at"]


def test_copied_values_equal_inserted_values(driver: Driver, engine: sa.Engine) -> None:
    given = [FIRST, SECOND, EMPTY]
    rows = ({"id": number} | row for number, row in enumerate(given))
    assert driver.copy(Anything, rows) == 3
    copied = rows_of(engine, Anything, *NAMES)
    with Session(engine) as session:
        session.execute(sa.delete(Anything))
        session.execute(sa.insert(Anything), [{"id": number} | row for number, row in enumerate(given)])
        session.commit()
    assert copied == rows_of(engine, Anything, *NAMES)
    assert copied[0][NAMES.index("to")] == HARD
    assert copied[0][NAMES.index("tags")] == FIRST["tags"]
    assert copied[0][NAMES.index("shouted")] == "LOUD"


def test_none_and_null_of_json_columns(driver: Driver, engine: sa.Engine) -> None:
    driver.copy(Anything, [{"id": 1, "json": None, "jsonb": None}, {"id": 2, "json": sa.null(), "jsonb": 1}])
    kinds = rows_of(engine, Anything, "id")
    with engine.connect() as connection:
        texts = connection.exec_driver_sql("SELECT json::text, jsonb::text FROM anything ORDER BY id").all()
    assert kinds == [(1,), (2,)]
    assert [tuple(row) for row in texts] == [("null", None), (None, "1")]


def test_defaults_of_each_kind(driver: Driver, engine: sa.Engine) -> None:
    assert driver.copy(Defaults, [{"id": 1}, {"id": 2}, {"id": 3}], after=Session.rollback) == 3
    assert driver.copy(Defaults, ({"size": size, "id": size} for size in (4, 5))) == 2
    names = ("size", "colour", "word", "server", "double", "version", "status", "priority", "attempts")
    assert rows_of(engine, Defaults, *names) == [
        (size, Colour.BLUE, f"{size}, {size}", "from the server", size * 2, 1, "pending", 0, 0) for size in (4, 5)
    ]
    (one,), (other,) = rows_of(engine, Defaults, "uid")
    assert one != other


@pytest.mark.once
def test_rows_may_be_any_mappings_in_any_order(psycopg_driver: Driver, engine: sa.Engine) -> None:
    with engine.connect() as connection:
        query = sa.text("SELECT 3 AS id, 30 AS size, 'x' AS word")
        (row,) = connection.execute(query).mappings().all()
    rows = [{"id": 1, "size": 10, "word": "x"}, MappingProxyType({"size": 20, "word": "x", "id": 2}), row]
    assert psycopg_driver.copy(Defaults, rows) == 3
    assert rows_of(engine, Defaults, "id", "size") == [(1, 10), (2, 20), (3, 30)]


@pytest.mark.once
def test_rows_with_one_attribute_and_empty_rows(psycopg_driver: Driver, engine: sa.Engine) -> None:
    assert psycopg_driver.copy(Email, [{"address": "a"}, {"address": "b"}]) == 2
    assert psycopg_driver.copy(Email, [{}, {}]) == 2
    assert rows_of(engine, Email, "address") == [("a",), ("b",), (None,), (None,)]


@pytest.mark.once
def test_a_subclass_of_the_same_table(psycopg_driver: Driver, engine: sa.Engine) -> None:
    psycopg_driver.copy(Email, [{"id": 1, "address": "a"}])
    psycopg_driver.copy(Message, [{"id": 2}])
    psycopg_driver.copy(Message, [{"id": 3, "kind": "email"}])
    with Session(engine) as session:
        found = session.scalars(sa.select(Message).order_by(Message.id)).all()
    assert [type(each) for each in found] == [Email, Message, Email]


def test_names_that_need_quotes(driver: Driver, engine: sa.Engine) -> None:
    assert driver.copy(Odd, [{"id": 1, "share": 2}]) == 1
    with engine.connect() as connection:
        table = Odd.__table__
        assert [tuple(row) for row in connection.execute(sa.select(*table.primary_key, table.c[1]))] == [(1, 2)]


def test_the_schema_translate_map_is_used(driver: Driver, copy_database: Database) -> None:
    driver.copy(Moved, [{"id": 1}], options={"schema_translate_map": {None: "elsewhere"}}, after=_check_moved)


def _check_moved(session: Session) -> None:
    assert session.execute(sa.text("SELECT count(*) FROM elsewhere.moved")).scalar_one() == 1


class Numbers(int):
    """A subclass of int, which a lookup by exact class does not find."""


class Words(str):
    __slots__ = ()

    def __str__(self) -> str:
        return "another word"


def test_values_of_subclasses_of_supported_types(driver: Driver, engine: sa.Engine) -> None:
    driver.copy(Anything, [{"id": 1, "text": Words("word"), "count": 1}, {"id": 2, "text": "x", "count": Numbers(5)}])
    (text, _), (_, count) = rows_of(engine, Anything, "text", "count")
    assert count == 5
    # asyncpg and psycopg 3 call __str__() of a subclass of str.
    assert text in {"word", "another word"}


# -- in the transaction of the session: commit, rollback and savepoints ------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_copied_jobs_are_announced_and_claimed(
    strategy: str, psycopg_driver: Driver, engine: sa.Engine, copy_database: Database
) -> None:
    model = STRATEGIES[strategy]
    with psycopg.connect(copy_database.dsn, autocommit=True) as listener:
        channel = channel_of(spec_of(model))
        listener.execute(f'LISTEN "{channel}"'.encode())
        listener.execute("SELECT pg_advisory_lock(%s, %s)", lock_numbers(channel))
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


# -- errors of the server ----------------------------------------------------------------------------------------------


def test_a_duplicate_key_raises_integrity_error(driver: Driver, engine: sa.Engine) -> None:
    driver.copy(Order, [{"id": 1}])
    with pytest.raises(IntegrityError, match="orders_pkey") as raised:
        driver.copy(Order, ({"id": number} for number in (3, 2, 1)), after=roll_back_and_add)
    assert raised.value.statement is not None
    assert raised.value.statement.startswith("COPY orders (id, ")
    assert not raised.value.connection_invalidated
    state: Any = raised.value.orig
    assert state.sqlstate == "23505" if driver.name != "psycopg2" else state.pgcode == "23505"
    assert rows_of(engine, Order, "id") == [(1,), (99,)]


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


# -- privileges --------------------------------------------------------------------------------------------------------


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


# -- invalid rows are refused; the error contains the row, the attribute and the fix -------------------------------
UNDO = "No row is enqueued; roll back the transaction, or the savepoint around the call"


@pytest.mark.once
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


@pytest.mark.once
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


@pytest.mark.once
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


@pytest.mark.once
def test_a_value_refused_by_the_driver(driver: Driver, engine: sa.Engine) -> None:
    rows = [{"id": 1, "text": "x"}, {"id": 2, "text": object()}]
    with pytest.raises((StatementError, sa.exc.DBAPIError), match="object"):
        driver.copy(Anything, rows, after=roll_back_and_add)
    assert rows_of(engine, Order, "id") == [(99,)]


@pytest.mark.once
def test_a_value_refused_by_the_server(driver: Driver, engine: sa.Engine) -> None:
    # asyncpg checks the type of the column itself.
    with pytest.raises(StatementError if driver.name == "asyncpg" else sa.exc.DBAPIError, match="out of "):
        driver.copy(Anything, [{"id": 1, "count": 1}, {"id": 2, "count": 2**40}], after=roll_back_and_add)
    assert rows_of(engine, Order, "id") == [(99,)]


@pytest.mark.once
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


@pytest.mark.once
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


@pytest.mark.once
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


@pytest.mark.once
@pytest.mark.parametrize("driver", ["psycopg", "psycopg2"], indirect=True)
def test_keyboard_interrupt_in_the_generator_of_rows(driver: Driver, engine: sa.Engine) -> None:
    def make() -> Iterator[dict[str, Any]]:
        yield {"id": 1}
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        driver.copy(Order, make(), after=roll_back_and_add)
    assert rows_of(engine, Order, "id") == [(99,)]


@pytest.mark.once
@pytest.mark.parametrize("rows", [None, 5, {"id": 1}, "abc"])
def test_rows_that_are_not_an_iterable_of_mappings_are_refused(rows: Any, psycopg_driver: Driver) -> None:
    with pytest.raises(StatementError, match=r"copy_in\(Order\): the rows are \w+; use an iterable of mappings"):
        psycopg_driver.copy(Order, rows)


@pytest.mark.once
@pytest.mark.parametrize("model", [Customer, 5])
def test_a_class_that_is_not_a_queue_is_refused(model: Any, psycopg_driver: Driver) -> None:
    with pytest.raises(NotAQueueError):
        psycopg_driver.copy(model, [{"id": 1}])


@pytest.mark.once
def test_a_session_of_the_wrong_kind_is_refused(engine: sa.Engine) -> None:
    with pytest.raises(StatementError, match=r"use a Session, or async_copy_in\(\) for an AsyncSession"):
        copy_in(AsyncSession(), Order, [])  # type: ignore[arg-type]  # what the test is about
    with pytest.raises(StatementError, match="use a Session"):
        copy_in(engine, Order, [])  # type: ignore[arg-type]  # what the test is about
    with pytest.raises(StatementError, match=r"use an AsyncSession, or copy_in\(\)"):
        asyncio.run(async_copy_in(Session(), Order, []))  # type: ignore[arg-type]  # what the test is about


@pytest.mark.once
def test_other_databases_and_drivers_are_refused() -> None:
    with pytest.raises(
        ConfigurationError, match=r"is for sqlite, and is not prepared; use engine = sqlaqueue\.prepare\("
    ):
        copy_in(Session(sa.create_engine("sqlite://")), Email, [{"id": 1}])
    # The engine does not connect.
    module = SimpleNamespace(paramstyle="format", __version__="1.31.1")
    engine = sa.create_engine("postgresql+pg8000://localhost/x", module=module)
    with pytest.raises(ConfigurationError, match=r"the driver pg8000 is not supported; use .*, or session.execute"):
        copy_in(Session(engine), Email, [{"id": 1}])
