"""What is copied is what an INSERT would have written."""

from __future__ import annotations

import uuid
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from types import MappingProxyType
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from tests.copying.conftest import Way
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
    "local": datetime(2024, 2, 29, 1, 2, 3),  # noqa: DTZ001 - of a column without a zone
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


def test_each_type(way: Way, engine: sa.Engine) -> None:
    given = [FIRST, SECOND, EMPTY]
    rows = ({"id": number} | row for number, row in enumerate(given))
    assert way.copy(Anything, rows) == 3
    copied = rows_of(engine, Anything, *NAMES)
    with Session(engine) as session:
        session.execute(sa.delete(Anything))
        session.execute(sa.insert(Anything), [{"id": number} | row for number, row in enumerate(given)])
        session.commit()
    assert copied == rows_of(engine, Anything, *NAMES)
    assert copied[0][NAMES.index("to")] == HARD
    assert copied[0][NAMES.index("tags")] == FIRST["tags"]
    assert copied[0][NAMES.index("shouted")] == "LOUD"


def test_what_none_means_for_json(way: Way, engine: sa.Engine) -> None:
    way.copy(Anything, [{"id": 1, "json": None, "jsonb": None}, {"id": 2, "json": sa.null(), "jsonb": 1}])
    kinds = rows_of(engine, Anything, "id")
    with engine.connect() as connection:
        texts = connection.exec_driver_sql("SELECT json::text, jsonb::text FROM anything ORDER BY id").all()
    assert kinds == [(1,), (2,)]
    assert [tuple(row) for row in texts] == [("null", None), (None, "1")]


def test_defaults_of_each_kind(way: Way, engine: sa.Engine) -> None:
    assert way.copy(Defaults, [{"id": 1}, {"id": 2}, {"id": 3}], after=Session.rollback) == 3
    assert way.copy(Defaults, ({"size": size, "id": size} for size in (4, 5))) == 2
    names = ("size", "colour", "word", "server", "double", "version", "status", "priority", "attempts")
    assert rows_of(engine, Defaults, *names) == [
        (size, Colour.BLUE, f"{size}, {size}", "from the server", size * 2, 1, "pending", 0, 0) for size in (4, 5)
    ]
    (one,), (other,) = rows_of(engine, Defaults, "uid")
    assert one != other


@pytest.mark.once
def test_rows_may_be_other_mappings_in_another_order(one_way: Way, engine: sa.Engine) -> None:
    with engine.connect() as connection:
        query = sa.text("SELECT 3 AS id, 30 AS size, 'x' AS word")
        (row,) = connection.execute(query).mappings().all()
    rows = [{"id": 1, "size": 10, "word": "x"}, MappingProxyType({"size": 20, "word": "x", "id": 2}), row]
    assert one_way.copy(Defaults, rows) == 3
    assert rows_of(engine, Defaults, "id", "size") == [(1, 10), (2, 20), (3, 30)]


@pytest.mark.once
def test_rows_of_one_attribute_and_of_none(one_way: Way, engine: sa.Engine) -> None:
    assert one_way.copy(Email, [{"address": "a"}, {"address": "b"}]) == 2
    assert one_way.copy(Email, [{}, {}]) == 2
    assert rows_of(engine, Email, "address") == [("a",), ("b",), (None,), (None,)]


@pytest.mark.once
def test_a_subclass_of_the_same_table(one_way: Way, engine: sa.Engine) -> None:
    one_way.copy(Email, [{"id": 1, "address": "a"}])
    one_way.copy(Message, [{"id": 2}])
    one_way.copy(Message, [{"id": 3, "kind": "email"}])
    with Session(engine) as session:
        found = session.scalars(sa.select(Message).order_by(Message.id)).all()
    assert [type(each) for each in found] == [Email, Message, Email]


def test_names_that_have_to_be_quoted(way: Way, engine: sa.Engine) -> None:
    assert way.copy(Odd, [{"id": 1, "share": 2}]) == 1
    with engine.connect() as connection:
        table = Odd.__table__
        assert [tuple(row) for row in connection.execute(sa.select(*table.primary_key, table.c[1]))] == [(1, 2)]


def test_the_schema_that_the_connection_says(way: Way, copy_database: Database) -> None:
    way.copy(Moved, [{"id": 1}], options={"schema_translate_map": {None: "elsewhere"}}, after=_check_moved)


def _check_moved(session: Session) -> None:
    assert session.execute(sa.text("SELECT count(*) FROM elsewhere.moved")).scalar_one() == 1


class Numbers(int):
    """An int that is of another class to whoever looks at that only."""


class Words(str):
    __slots__ = ()

    def __str__(self) -> str:
        return "another word"


def test_values_of_subclasses(way: Way, engine: sa.Engine) -> None:
    way.copy(Anything, [{"id": 1, "text": Words("word"), "count": 1}, {"id": 2, "text": "x", "count": Numbers(5)}])
    (text, _), (_, count) = rows_of(engine, Anything, "text", "count")
    assert count == 5
    # asyncpg and psycopg 3 ask a string of a subclass for what it says it is.
    assert text in {"word", "another word"}
