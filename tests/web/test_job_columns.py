"""Columns of jobs: of every type, under any name, short in a list, and nothing of a redacted one."""

from __future__ import annotations

import json
from datetime import UTC, date, datetime
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from sqlaqueue.web.data.job_pages import parse_request, read_page
from sqlaqueue.web.data.reader import ParameterError
from tests.sent_statements import sent_statements
from tests.web.job_lists import columns, create, make_rows, make_wide, page

ALL = (
    "columns",
    "name,amount,exact,ratio,mood,flag,day,at,naive,reference,document,plain_json,tags,pause,address,blob,body,doubled,status,rank,problem",
)
VALUES = {
    "The Number": 9223372036854775807,
    'na"me %s': "O'Brien %s :x \\ ünï",
    "Amount": 1234,
    "exact": "12345678901234567890.0123456789",
    "ratio": 0.1,
    "mood": "SAD",
    "flag": True,
    "day": "2030-02-28",
    "at": "2030-12-31 23:59:59.123456+02",
    "naive": "2030-12-31 23:59:59",
    "reference": "6d5a2e3c-0000-4000-8000-000000000001",
    "document": json.dumps({"a": ["<b>", 1]}),
    "plain_json": "[1,  2]",
    "tags": '{a,"b,c"}',
    "pause": "1 day 02:03:04",
    "address": "10.0.0.1/8",
    "blob": "\\x00ff",
    "body": "",
    "status": "failed",
    "problem": "ValueError: 1",
}
SHOWN = {
    "name": "O'Brien %s :x \\ ünï",
    "amount": "1234",
    "exact": "12345678901234567890.0123456789",
    "ratio": "0.1",
    "mood": "SAD",
    "flag": "true",
    "day": "2030-02-28",
    "reference": "6d5a2e3c-0000-4000-8000-000000000001",
    "document": '{"a": ["<b>", 1]}',
    "plain_json": "[1,  2]",
    "tags": '{a,"b,c"}',
    "pause": "1 day 02:03:04",
    "address": "10.0.0.1/8",
    "blob": "\\x00ff",
    "body": "",
    "doubled": None,
    "status": "failed",
    "rank": "0",
    "problem": "ValueError: 1",
}


def insert(engine: sa.Engine, model: Any, **values: Any) -> None:
    """Insert a row by plain SQL, as another program would."""
    values = {"The Number": 1, **values}
    names = ", ".join('"{}"'.format(name.replace('"', '""')) for name in values)
    types = {column.name: column.type.compile(engine.dialect) for column in model.__table__.c}
    marks = ", ".join(f"CAST(CAST(:v{number} AS text) AS {types[name]})" for number, name in enumerate(values))
    parameters = {f"v{number}": None if value is None else str(value) for number, value in enumerate(values.values())}
    with engine.begin() as connection:
        connection.execute(sa.text(f'INSERT INTO "Wide table" ({names}) VALUES ({marks})'), parameters)


@pytest.fixture
def wide(engine: sa.Engine) -> Any:
    model = make_wide()
    # A doubled 64-bit key would overflow.
    model.__table__.c.doubled.computed.sqltext = sa.text("NULL::bigint")
    create(engine, model)
    return model


@pytest.mark.parametrize("style", ["ISO", "SQL, DMY", "German"])
def test_values_of_every_type_are_shown(engine: sa.Engine, wide: Any, style: str) -> None:
    insert(engine, wide, **VALUES)
    style = style.replace(" ", "")
    styled = sa.create_engine(engine.url, connect_args={"options": f"-c datestyle={style} -c timezone=Asia/Kolkata"})
    (job,) = page(styled, wide, ALL).jobs
    styled.dispose()
    cells = {cell.column.name: cell for cell in job.cells}
    assert (job.key, job.state) == ("9223372036854775807", "failed")
    assert {name: cells[name].text for name in SHOWN} == SHOWN
    assert cells["at"].moment == datetime(2030, 12, 31, 21, 59, 59, 123456, UTC)
    assert cells["naive"].moment == datetime(2030, 12, 31, 23, 59, 59)  # noqa: DTZ001 - the column has no time zone
    assert cells["day"].moment == date(2030, 2, 28)


def test_moments_that_python_does_not_have_are_shown_as_texts(engine: sa.Engine, wide: Any) -> None:
    insert(engine, wide, at="infinity", naive="0044-03-15 12:00:00 BC", day="20000-01-01")
    (job,) = page(engine, wide, ("columns", "at,naive,day")).jobs
    assert [cell.moment for cell in job.cells] == [None] * 3
    assert [cell.text for cell in job.cells] == ["infinity", "0044-03-15T12:00:00 BC", "20000-01-01"]
    for sort in ("at", "day"):
        for direction in ("", "-"):
            assert page(engine, wide, ("sort", f"{direction}{sort}")).jobs


def test_large_values_are_cut_by_the_database(engine: sa.Engine, wide: Any) -> None:
    size = 10_000_000
    with engine.begin() as connection:
        connection.exec_driver_sql(
            'INSERT INTO "Wide table" ("The Number", document, body, blob, tags, problem) '
            "SELECT 1, jsonb_build_object('a', string_agg(md5(g::text), '')), string_agg(md5(g::text), ''), "
            "convert_to(string_agg(md5(g::text), ''), 'UTF8'), array_agg(md5(g::text)), repeat('x', 1000) "
            f"FROM generate_series(1, {size // 32}) g"
        )
    names = ("columns", "document,body,blob,tags,problem")
    (job,) = page(engine, wide, names).jobs
    document, body, blob, tags, problem = job.cells
    assert (document.text, document.is_cut, tags.text, tags.is_cut) == (None, True, None, True)
    assert document.size is not None
    assert document.size > size // 2
    assert [len(cell.text or "") for cell in (body, blob, problem)] == [200] * 3
    assert all(cell.is_cut for cell in (body, blob, problem))
    # The server reads a few pages of the values of ten megabytes, and sends less than two kilobytes.
    with sent_statements(engine) as sent:
        page(engine, wide, names)
    statement, parameters = next((text, given) for text, given in sent if '"Wide table"' in text and "stored_" in text)
    with engine.connect() as connection:
        rows = connection.exec_driver_sql(statement, parameters).all()
        assert sum(len(str(value)) for value in rows[0]) < 2000
        plan = connection.exec_driver_sql(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {statement}", parameters)
        found = plan.scalar_one()[0]["Plan"]
        assert found["Shared Hit Blocks"] + found["Shared Read Blocks"] < 60


def test_nothing_of_a_redacted_column_leaves_the_database(engine: sa.Engine, wide: Any) -> None:
    insert(engine, wide, body="secret", **{'na"me %s': "secret", "problem": "secret: 1"})
    redacted = ("body", 'na"me %s', "last_error")
    with sent_statements(engine) as sent:
        found = page(engine, wide, ("columns", "name,body,problem"), redacted=redacted)
    (job,) = found.jobs
    assert [(cell.text, cell.is_redacted) for cell in job.cells] == [(None, True)] * 3
    assert "name" not in found.sorts
    with engine.connect() as connection:
        for statement, parameters in sent:
            if statement.startswith("SELECT"):
                assert "secret" not in str(connection.exec_driver_sql(statement, parameters).all())
    for parameter in ("f.name", "f.name.starts", "f.name.null", "f.body", "f.problem", "error"):
        with pytest.raises(ParameterError, match="no such condition|does not show errors"):
            page(engine, wide, (parameter, "yes"), redacted=redacted)
    with pytest.raises(ParameterError, match="sort"):
        page(engine, wide, ("sort", "name"), redacted=redacted)


def test_redacted_column_of_an_index_is_not_in_cursors(engine: sa.Engine) -> None:
    model = make_rows()
    create(engine, model)
    with Session(engine) as session:
        session.add_all(model(id=number, few=1, many=4711) for number in range(1, 6))
        session.commit()
    found = page(engine, model, ("sort", "few"), size=2, redacted=("many",))
    assert [job.position for job in found.jobs] == [("1", "1"), ("1", "2")]


def test_first_columns_are_short_ones_with_the_life_of_a_job(wide: Any) -> None:
    names = [column.name for column in columns(wide).chosen(None)]
    own = ["name", "amount", "exact", "ratio"]
    assert names == ["status", *own, "problem", "created_at", "finished_at", "attempts"]
    pending = [column.name for column in columns(wide).chosen(None, "pending")]
    assert pending == ["status", *own, "run_at", "problem", "created_at", "attempts"]
    with pytest.raises(ParameterError, match="columns"):
        columns(wide).chosen("name,nothing")


async def test_asyncpg_reads_the_same(engine: sa.Engine, wide: Any) -> None:
    insert(engine, wide, **VALUES)
    asynchronous = create_async_engine(engine.url.set(drivername="postgresql+asyncpg"))
    pairs = [
        ALL,
        ("f.number", str(VALUES["The Number"])),
        ("f.exact.min", "1.5"),
        ("f.mood", "SAD"),
        ("f.flag", "true"),
    ]
    pairs += [
        ("f.at.min", "2030-01-01T00:00"),
        ("f.naive.max", "2031-01-01"),
        ("f.reference", SHOWN["reference"] or ""),
    ]
    pairs += [("f.day", "2030-02-28"), ("f.ratio", "0.1"), ("f.name.starts", "O'B"), ("f.blob.null", "no")]
    async with AsyncSession(asynchronous) as session:
        for sort in ("-number", "at", "-exact", "mood", "reference", "day", "name"):
            for cursor in (None, "next"):
                request = parse_request(columns(wide), [*pairs, ("sort", sort)])
                found = await session.run_sync(read_page, request)
                assert len(found.jobs) == 1, (sort, cursor)
    await asynchronous.dispose()
