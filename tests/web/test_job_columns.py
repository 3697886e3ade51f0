"""Columns of jobs, of every type and short in a list, and filters by them, exact or refused."""

import hashlib
import json
from datetime import UTC, date, datetime, timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Mapped, Session, mapped_column

from sqlaqueue import QueueConfig, QueueMixin
from sqlaqueue.web.data.job import read_job
from sqlaqueue.web.data.job_filters import JobsWanted, parse_filter
from sqlaqueue.web.data.job_pages import parse_request, read_page
from sqlaqueue.web.data.reader import ParameterError
from tests.models import add, execute, sent_statements
from tests.web.jobs import columns, created, page
from tests.web.models import make_messages, make_pairs, make_rows, make_wide, new_base

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
    execute(engine, f'INSERT INTO "Wide table" ({names}) VALUES ({marks})', **parameters)


@pytest.fixture
def wide(engine: sa.Engine) -> Any:
    model = make_wide()
    # A doubled 64-bit key would overflow.
    model.__table__.c.doubled.computed.sqltext = sa.text("NULL::bigint")
    model.metadata.create_all(engine)
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
    size = 4_000_000
    execute(
        engine,
        'INSERT INTO "Wide table" ("The Number", document, body, blob, tags, problem) '
        "SELECT 1, jsonb_build_object('a', string_agg(md5(g::text), '')), string_agg(md5(g::text), ''), "
        "convert_to(string_agg(md5(g::text), ''), 'UTF8'), array_agg(md5(g::text)), repeat('x', 1000) "
        f"FROM generate_series(1, {size // 32}) g",
    )
    names = ("columns", "document,body,blob,tags,problem")
    (job,) = page(engine, wide, names).jobs
    document, body, blob, tags, problem = job.cells
    assert (document.text, document.is_cut, tags.text, tags.is_cut) == (None, True, None, True)
    assert document.size is not None
    assert document.size > size // 2
    assert [len(cell.text or "") for cell in (body, blob, problem)] == [200] * 3
    assert all(cell.is_cut for cell in (body, blob, problem))
    # The server reads a few pages of the values of megabytes, and sends less than two kilobytes.
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
    model = created(engine, make_rows())
    add(engine, *(model(id=number, few=1, many=4711) for number in range(1, 6)))
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


# -- filters of a list of jobs: by type, exact, and refused if they are malformed ----------------------------------

BIG = 2**53 + 1


@pytest.fixture
def filled(engine: sa.Engine, wide: Any) -> Any:
    for number in (BIG, BIG + 1):
        insert(
            engine,
            wide,
            **{
                "The Number": number,
                'na"me %s': f"100% _{number}\\",
                "Amount": number,
                "exact": f"{number}.0000000001",
                "ratio": "0.1",
                "mood": "SAD",
                "flag": "true",
                "day": "2030-02-28",
                "at": "2030-12-31 23:00:00+00",
                "naive": "2030-12-31 23:00:00",
                "reference": "6d5a2e3c-0000-4000-8000-000000000001",
                "status": "failed",
                "problem": "ValueError: 1",
            },
        )
    insert(engine, wide, **{"The Number": 1, "mood": "GLAD", "flag": "false", "body": "", "at": "-infinity"})
    return wide


def test_condition_selects(engine: sa.Engine, filled: Any) -> None:
    conditions: dict[str, str]
    for conditions, found in (
        ({"f.number": str(BIG)}, [BIG]),
        ({"f.number.min": str(BIG), "f.number.max": str(BIG)}, [BIG]),
        ({"f.amount": str(BIG)}, [BIG]),
        ({"f.exact": f"{BIG}.0000000001"}, [BIG]),
        ({"f.exact.min": f"{BIG}.0000000002"}, [BIG + 1]),
        ({"f.ratio": "0.1"}, [BIG, BIG + 1]),
        ({"f.name": f"100% _{BIG}\\"}, [BIG]),
        ({"f.name.starts": "100% _"}, [BIG, BIG + 1]),
        ({"f.name.starts": "100%_"}, []),
        ({"f.name.null": "yes"}, [1]),
        ({"f.mood": "GLAD"}, [1]),
        ({"f.flag": "false"}, [1]),
        ({"f.day": "2030-02-28"}, [BIG, BIG + 1]),
        ({"f.day.max": "2030-02-27"}, []),
        ({"f.at": "2030-12-31T23:00"}, [BIG, BIG + 1]),
        ({"f.at": "2031-01-01T01:00:00+02:00"}, [BIG, BIG + 1]),
        ({"f.at": "2031-01-01T01:00:00 02:00"}, [BIG, BIG + 1]),
        ({"f.at.min": "2030-12-31T23:00:01"}, []),
        ({"f.at.max": "2030-01-01"}, [1]),
        ({"f.naive.min": "2030-12-31"}, [BIG, BIG + 1]),
        ({"f.reference": "6D5A2E3C00004000800000000000000" + "1"}, [BIG, BIG + 1]),
        ({"f.document.null": "no"}, []),
        ({"state": "failed"}, [BIG, BIG + 1]),
        ({"state": "pending"}, [1]),
        ({"error": "ValueError"}, [BIG, BIG + 1]),
        ({"error": "KeyError"}, []),
        ({"job": "1"}, [1]),
        ({"job": "1", "state": "failed"}, []),
        ({"f.name": "", "f.number": ""}, [1, BIG, BIG + 1]),
    ):
        for sort in ("number", "at", "exact"):
            jobs = page(engine, filled, *conditions.items(), ("sort", sort)).jobs
            assert sorted(int(job.key) for job in jobs) == found, (conditions, sort)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("f.number", "1.0"),
        ("f.number", "1e3"),
        ("f.number", " 1"),
        ("f.number", "\uff11"),
        ("f.number", str(2**63)),
        ("f.exact", "1,5"),
        ("f.exact", "NaN"),
        ("f.exact.min", "1e9999"),
        ("f.ratio", "infinity"),
        ("f.flag", "yes"),
        ("f.mood", "sad"),
        ("f.day", "2030-02-30"),
        ("f.at", "now"),
        ("f.at", "0001-01-01T00:00+14:00"),
        ("f.naive", "9999-12-31T23:59"),
        ("f.reference", "x"),
        ("f.name", "a\0"),
        ("f.name", "\ud800"),
        ("f.name", "x" * 2000),
        ("f.name.null", "true"),
        ("f.name.min", "a"),
        ("f.document", "{}"),
        ("f.blob", "\\x00"),
        ("f.", "1"),
        ("f.status", "failed"),
        ("f.The Number", "1"),
        ("state", "FAILED"),
        ("state", "others"),
        ("job", "1,2"),
        ("job", "one"),
    ],
)
def test_malformed_condition_is_refused(name: str, value: str) -> None:
    with pytest.raises(ParameterError) as caught:
        parse_filter(columns(make_wide()), [(name, value)])
    assert caught.value.parameter == name
    assert len(str(caught.value)) < 300


def test_value_that_only_the_database_refuses_names_its_parameter(engine: sa.Engine, filled: Any) -> None:
    with pytest.raises(ParameterError, match="f\\.: the database has no such value"):
        page(engine, filled, ("f.ratio", "1e999"))
    assert page(engine, filled, ("f.at", "9998-12-31T23:59:59")).jobs == []


def test_parameters_of_a_filter_give_the_same_filter(wide: Any) -> None:
    given = [
        ("f.number.min", "5"),
        ("state", "failed"),
        ("error", "A"),
        ("f.name.starts", "é &"),
        ("job", "7"),
        ("x", "y"),
    ]
    first = parse_filter(columns(wide), given)
    again = parse_filter(columns(wide), first.parameters())
    assert first.parameters() == again.parameters()
    assert sorted(first.parameters()) == sorted(pair for pair in given if pair[0] != "x")
    assert ("error", "A") not in first.parameters(without=["error"])


def test_composite_keys_are_found(engine: sa.Engine) -> None:
    model = created(engine, make_pairs())
    execute(engine, sa.insert(model.__table__).values([{"tenant": 'a,"b', "number": 1}, {"tenant": "", "number": 1}]))
    first, second = page(engine, model).jobs
    for job in (first, second):
        assert [each.key for each in page(engine, model, ("job", job.key)).jobs] == [job.key]
    assert page(engine, model, ("job", "a,2")).jobs == []


@pytest.mark.parametrize("key", ["a\rb,1", "a\nb,1", '"a"b,1', '"a', "", ",", "a", "a,1,2"])
def test_a_text_that_is_no_composite_key_is_refused(key: str) -> None:
    with pytest.raises(ParameterError):
        JobsWanted(columns(make_pairs()), key=key).key_values()


def test_long_keys_are_found(engine: sa.Engine) -> None:
    model = created(engine, make_pairs())
    long = "".join(hashlib.sha256(bytes([number])).hexdigest() for number in range(40))
    execute(engine, sa.insert(model.__table__).values(tenant=long, number=1))
    (job,) = page(engine, model).jobs
    assert [each.key for each in page(engine, model, ("job", job.key)).jobs] == [job.key]


@pytest.fixture
def spans(engine: sa.Engine) -> Any:
    class Span(QueueMixin, new_base()):
        __tablename__ = "span"
        __queue__ = QueueConfig()
        code: Mapped[bytes] = mapped_column(primary_key=True)
        length: Mapped[timedelta] = mapped_column(primary_key=True)
        other: Mapped[timedelta | None]

    created(engine, Span)
    add(engine, *(Span(code=bytes([number, 255]), length=timedelta(days=number)) for number in range(3)))
    return Span


def test_keys_of_bytes_and_intervals_are_found(engine: sa.Engine, spans: Any) -> None:
    listed = [job.key for job in page(engine, spans).jobs]
    assert listed == ["\\x02ff,2 days", "\\x01ff,1 day", "\\x00ff,00:00:00"]
    for key in listed:
        assert [each.key for each in page(engine, spans, ("job", key)).jobs] == [key]
        with Session(engine) as session:
            assert read_job(session, columns(spans), key) is not None
    # In pages as well.
    first = page(engine, spans, size=2)
    assert first.next is not None
    assert [job.key for job in page(engine, spans, ("after", first.next), size=2).jobs] == listed[2:]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("job", "zz,1 day"),
        ("job", "\\xzz,1 day"),
        ("job", "\\x0,1 day"),
        ("f.other", "2030-01-01"),
        ("f.other.min", "1"),
    ],
)
def test_what_is_no_such_value_is_refused(spans: Any, name: str, value: str) -> None:
    with pytest.raises(ParameterError):
        parse_filter(columns(spans), [(name, value)])


def test_queue_without_a_status_has_no_other_jobs() -> None:
    with pytest.raises(ParameterError, match="state"):
        parse_filter(columns(make_messages()), [("state", "other")])
