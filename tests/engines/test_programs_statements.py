"""A prepared engine compiles a program's own statements and tables as it did before."""

from __future__ import annotations

from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import aliased
from sqlalchemy.schema import CreateIndex, CreateTable

import sqlaqueue.mariadb
import sqlaqueue.sqlite

pytestmark = pytest.mark.once

MOMENT = datetime(2026, 1, 1, 12, 30, 15, 123456)  # noqa: DTZ001 - of a column without a time zone
METADATA = sa.MetaData()
NOTE = sa.Table(
    "note",
    METADATA,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("text", sa.String(50)),
    sa.Column("amount", sa.Numeric(10, 2)),
    sa.Column("day", sa.Date),
    sa.Column("at", sa.DateTime, server_default=sa.func.now()),
    sa.Column("other_at", sa.DateTime, server_default=sa.text("CURRENT_TIMESTAMP"), onupdate=sa.func.now()),
    sa.Column("took", sa.Interval),
    sa.Column("token", sa.Uuid),
    sa.Column("data", sa.JSON),
    sa.Column("done", sa.Boolean, server_default=sa.false()),
    sa.CheckConstraint("amount > 0", name="positive"),
)
COPY = sa.Table("copy", METADATA, sa.Column("id", sa.Integer, primary_key=True), sa.Column("text", sa.String(50)))
ZONED = sa.Table("zoned", METADATA, sa.Column("at", sa.DateTime(timezone=True), server_default=sa.func.now()))
INDEX = sa.Index("ix_note", sa.cast(NOTE.c.text, sa.String(20)), NOTE.c.day)

n = NOTE.c
RECENT = sa.select(n.id, n.text).where(n.at > MOMENT).cte("recent")
BOTH = [
    sa.select(sa.func.now()),
    sa.select(sa.cast(n.at, sa.Date)),
    sa.select(sa.cast(n.text, sa.Numeric(10, 2))),
    sa.select(sa.cast(n.amount, sa.String(20))),
    sa.select(sa.cast(n.amount, sa.Text)),
    sa.select(sa.cast(n.token, sa.String)),
    sa.select(sa.cast(n.text, sa.Integer)),
    sa.select(sa.cast(n.text, sa.DateTime)),
    sa.select(sa.func.concat(n.text, "-", n.id)),
    sa.select(n.text + "x", n.amount * 2, n.id - 1),
    sa.select(sa.func.coalesce(n.text, "none"), sa.func.max(n.id, 3)),
    sa.select(sa.func.max(n.id), sa.func.min(n.id)).group_by(n.day),
    sa.select(sa.extract("year", n.at), sa.extract("epoch", n.at)),
    sa.select(n.at - MOMENT),
    sa.select(n.took).where(n.took > timedelta(hours=1)),
    sa.select(NOTE).where(n.at < sa.func.now(), n.day == date(2026, 1, 1), n.text.in_(["a", "b"])),
    sa.select(RECENT).where(RECENT.c.text.like("a%")),
    sa.select(NOTE).with_for_update(),
    sa.select(sa.select(n.id).with_for_update().cte("locked")),
    sa.select(n.text).union(sa.select(COPY.c.text)).order_by("text"),
    sa.select(sa.case((n.id > 1, sa.func.now()), else_=n.at)),
    sa.insert(NOTE).values(text="a", at=sa.func.now()),
    sa.insert(NOTE).values(text="a").returning(n.id),
    sa.insert(COPY).from_select(["text"], sa.select(sa.func.concat(n.text, "!"))),
    sa.update(NOTE).values(text=sa.func.concat(n.text, "!")).where(n.at < sa.func.now()),
    sa.update(NOTE).values(text=sa.select(COPY.c.text).where(COPY.c.id == n.id).scalar_subquery()),
    sa.delete(NOTE).where(n.id.in_(sa.select(COPY.c.id))),
    sa.delete(NOTE).where(n.at < sa.func.now()).returning(n.id, n.at),
    sa.select(sa.exists().where(n.id == COPY.c.id)),
    sa.text("SELECT now() FROM note"),
    CreateTable(NOTE),
    CreateTable(COPY),
]
SQLITE = [
    *BOTH,
    sa.select(sa.func.count().filter(n.id > 1)),
    sa.select(n.id).order_by(n.text.nulls_first(), n.at.nulls_last()),
    CreateIndex(INDEX),
]
MARIADB = [*BOTH, sa.select(sa.func.greatest(n.id, 3), sa.func.least(n.id, 3))]
STATEMENTS = [("sqlite://", each) for each in SQLITE] + [("mariadb+pymysql://", each) for each in MARIADB]


def dialects(url: str) -> tuple[sa.Dialect, sa.Dialect]:
    """Return the dialect of an engine that is not prepared, and of one that is."""
    pytest.importorskip("pymysql")
    before, prepared = sa.create_engine(url), sa.create_engine(url)
    (sqlaqueue.sqlite if "sqlite" in url else sqlaqueue.mariadb).prepare(prepared)
    for each in (before, prepared):
        # As the first connection would find them.
        each.dialect.server_version_info = (11, 4) if "mariadb" in url else (3, 45)
        if "mariadb" in url:
            each.dialect.insert_returning = each.dialect.delete_returning = True  # type: ignore[misc] # of this one
    return before.dialect, prepared.dialect


@pytest.mark.parametrize(("url", "statement"), STATEMENTS, ids=lambda value: " ".join(str(value).split())[:60])
def test_a_programs_statement_is_compiled_as_before(url: str, statement: Any) -> None:
    before, prepared = dialects(url)
    first, second = statement.compile(dialect=before), statement.compile(dialect=prepared)
    expected, found = str(first), str(second)
    if "mariadb" in url:
        # As the documentation says, moments have microseconds.
        expected = expected.replace("DATETIME", "DATETIME(6)")
    assert found == expected
    if hasattr(first, "params"):
        assert second.params == first.params


VALUES = [
    (sa.Integer(), 3),
    (sa.String(), "a"),
    (sa.Numeric(10, 2), Decimal("1.50")),
    (sa.Float(), 1.5),
    (sa.Date(), date(2026, 1, 1)),
    (sa.DateTime(), MOMENT),
    (sa.Time(), time(12, 30)),
    (sa.Boolean(), True),
    (sa.JSON(), {"a": [1, None]}),
    (sa.LargeBinary(), b"a"),
    (sa.Enum("a", "b"), "a"),
    (sa.Interval(), timedelta(hours=30, microseconds=5)),
]


@pytest.mark.filterwarnings("ignore:Dialect sqlite.* does .*not.* support Decimal")
@pytest.mark.parametrize(("type_", "value"), VALUES, ids=lambda value: repr(value)[:20])
def test_a_value_is_stored_and_read_as_before(type_: Any, value: object) -> None:
    stored: list[Any] = []
    for prepares in (False, True):
        engine = sa.create_engine("sqlite://")
        if prepares:
            sqlaqueue.sqlite.prepare(engine)
        table = sa.Table("one", sa.MetaData(), sa.Column("value", type_))
        with engine.connect() as connection:
            table.create(connection)
            connection.execute(sa.insert(table).values(value=value))
            assert connection.scalar(sa.select(table.c.value)) == value
            stored.append(connection.exec_driver_sql("SELECT value, typeof(value) FROM one").one())
        engine.dispose()
    assert stored[0] == stored[1]


def test_statements_about_tables_of_the_library_are_translated() -> None:
    """As its columns have texts in UTC with microseconds, with which ``CURRENT_TIMESTAMP`` does not compare."""
    from tests.sqlite.features import Email  # noqa: PLC0415 - it has the tables of a file

    _, prepared = dialects("sqlite://")
    email = aliased(Email)
    for statement in (
        sa.select(Email).where(Email.run_at < sa.func.now()),
        sa.select(email.id).where(email.run_at < sa.func.now()),
        sa.select(NOTE).where(sa.exists().where(Email.id == n.id), n.at < sa.func.now()),
        sa.update(Email).values(run_at=sa.func.now()),
        sa.insert(Email).values(run_at=sa.func.now()),
        # So are moments with a time zone, which a prepared engine has in UTC.
        sa.select(sa.func.now(type_=sa.DateTime(timezone=True))),
        sa.select(ZONED).where(ZONED.c.at < sa.func.now()),
        sa.update(ZONED).values(at=sa.func.now()),
        CreateTable(ZONED),
        sa.select(sa.select(Email.run_at).subquery().c.run_at < sa.func.now()),
    ):
        assert "CURRENT_TIMESTAMP" not in str(statement.compile(dialect=prepared))
