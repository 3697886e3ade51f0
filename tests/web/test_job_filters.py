"""Filters of a list of jobs: by type, exact, and refused if they are malformed."""

from __future__ import annotations

import hashlib
from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from sqlaqueue import QueueConfig, QueueMixin
from sqlaqueue.web.data.job import read_job
from sqlaqueue.web.data.job_filters import JobsWanted, parse_filter
from sqlaqueue.web.data.reader import ParameterError
from tests.web.job_lists import columns, create, make_messages, make_pairs, make_wide, page
from tests.web.test_job_columns import insert

BIG = 2**53 + 1


@pytest.fixture
def wide(engine: sa.Engine) -> Any:
    model = make_wide()
    model.__table__.c.doubled.computed.sqltext = sa.text("NULL::bigint")
    create(engine, model)
    for number in (BIG, BIG + 1):
        insert(
            engine,
            model,
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
    insert(engine, model, **{"The Number": 1, "mood": "GLAD", "flag": "false", "body": "", "at": "-infinity"})
    return model


@pytest.mark.parametrize(
    ("conditions", "found"),
    [
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
    ],
)
def test_condition_selects(engine: sa.Engine, wide: Any, conditions: dict[str, str], found: list[int]) -> None:
    for sort in ("number", "at", "exact"):
        jobs = page(engine, wide, *conditions.items(), ("sort", sort)).jobs
        assert sorted(int(job.key) for job in jobs) == found


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
def test_malformed_condition_is_refused(wide: Any, name: str, value: str) -> None:
    with pytest.raises(ParameterError) as caught:
        parse_filter(columns(wide), [(name, value)])
    assert caught.value.parameter == name
    assert len(str(caught.value)) < 300


def test_value_that_only_the_database_refuses_names_its_parameter(engine: sa.Engine, wide: Any) -> None:
    with pytest.raises(ParameterError, match="f\\.: the database has no such value"):
        page(engine, wide, ("f.ratio", "1e999"))
    assert page(engine, wide, ("f.at", "9998-12-31T23:59:59")).jobs == []


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
    model = make_pairs()
    create(engine, model)
    with engine.begin() as connection:
        connection.execute(sa.insert(model.__table__), [{"tenant": 'a,"b', "number": 1}, {"tenant": "", "number": 1}])
    first, second = page(engine, model).jobs
    for job in (first, second):
        assert [each.key for each in page(engine, model, ("job", job.key)).jobs] == [job.key]
    assert page(engine, model, ("job", "a,2")).jobs == []


@pytest.mark.parametrize("key", ["a\rb,1", "a\nb,1", '"a"b,1', '"a', "", ",", "a", "a,1,2"])
def test_a_text_that_is_no_composite_key_is_refused(key: str) -> None:
    with pytest.raises(ParameterError):
        JobsWanted(columns(make_pairs()), key=key).key_values()


def test_long_keys_are_found(engine: sa.Engine) -> None:
    model = make_pairs()
    create(engine, model)
    long = "".join(hashlib.sha256(bytes([number])).hexdigest() for number in range(40))
    with engine.begin() as connection:
        connection.execute(sa.insert(model.__table__), [{"tenant": long, "number": 1}])
    (job,) = page(engine, model).jobs
    assert [each.key for each in page(engine, model, ("job", job.key)).jobs] == [job.key]


@pytest.fixture
def spans(engine: sa.Engine) -> Any:
    class Base(DeclarativeBase):
        pass

    class Span(QueueMixin, Base):
        __tablename__ = "span"
        __queue__ = QueueConfig()
        code: Mapped[bytes] = mapped_column(primary_key=True)
        length: Mapped[timedelta] = mapped_column(primary_key=True)
        other: Mapped[timedelta | None]

    Base.metadata.create_all(engine)
    with Session(engine) as session:
        session.add_all(Span(code=bytes([number, 255]), length=timedelta(days=number)) for number in range(3))
        session.commit()
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
