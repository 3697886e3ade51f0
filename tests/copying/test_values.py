"""COPY writes the values that an INSERT writes."""

from __future__ import annotations

import uuid
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from types import MappingProxyType
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from tests.copying.conftest import Driver
from tests.copying.models import Anything, Colour, Defaults, Email, Message, Moved, Odd, rows_of
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
