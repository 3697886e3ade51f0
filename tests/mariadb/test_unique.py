"""Unique jobs: a generated column and its index keep twins out, whichever way they are written."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import TYPE_CHECKING, Any
from uuid import UUID

import pytest
import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

import sqlaqueue.mariadb
from sqlaqueue import (
    JobExists,
    QueueConfig,
    QueueMixin,
    Unique,
    claim,
    complete,
    enqueue,
)
from sqlaqueue.exc import ConfigurationError
from tests.mariadb.unique_models import Color, Customer, Mail, Order, Report, Single, Typed

if TYPE_CHECKING:
    from tests.mariadb.server import MariaDBServer

pytestmark = pytest.mark.once


def count(unique_engine: sa.Engine, model: Any) -> int:
    with unique_engine.connect() as connection:
        return connection.scalar(sa.select(sa.func.count()).select_from(model.__table__)) or 0


def created(session: Session, jobs: Any, **options: Any) -> list[bool]:
    return [each.created for each in enqueue(session, jobs, **options)]


# -- enqueue() ---------------------------------------------------------------------------------------------------------


def test_a_job_is_created_once(unique_engine: sa.Engine) -> None:
    with Session(unique_engine) as session:
        first = Order(key="a", note="first")
        assert enqueue(session, first) == [(first, True)]
        assert first.id is not None
        assert first.attempts == 0
        session.commit()
        assert enqueue(session, Order(key="a")) == [(first, False)]
        session.commit()
    assert count(unique_engine, Order) == 1


def test_the_answers_are_in_order(unique_engine: sa.Engine) -> None:
    with Session(unique_engine) as session:
        session.add(Order(id=7, key="c"))
        session.commit()
        jobs = [Order(key=key) for key in "bcabza"]
        result = enqueue(session, jobs)
        assert [each.created for each in result] == [True, False, True, False, True, False]
        assert result[1].job.id == 7
        assert result[3].job is jobs[0]
        assert result[5].job is jobs[2]
        session.commit()


def test_texts_are_compared_byte_by_byte(unique_engine: sa.Engine) -> None:
    """The collation of the database pads, and is the same for upper and lower case and for accents."""
    keys = ["a", "A", "a ", " a", "ä", "", "\U0001f600", "x" * 5000, "x" * 4999 + "y"]
    with Session(unique_engine) as session:
        assert created(session, [Order(key=key) for key in keys]) == [True] * len(keys)
        session.commit()
        assert created(session, [Order(key=key) for key in keys]) == [False] * len(keys)
        session.commit()
        session.add(Order(key="x" * 5000))
        with pytest.raises(IntegrityError, match="ix_orders_queue_unique"):
            session.flush()


def test_on_twin_raise_inserts_nothing(unique_engine: sa.Engine) -> None:
    with Session(unique_engine) as session:
        [(existing, _)] = enqueue(session, Order(key="b"), on_twin="raise")
        jobs = [Order(key="a"), Order(key="b")]
        with pytest.raises(JobExists, match=r"a Order with key='b' exists") as raised:
            enqueue(session, jobs, on_twin="raise")
        assert (raised.value.job, raised.value.twin) == (jobs[1], existing)
        session.commit()
    assert count(unique_engine, Order) == 1


def test_on_twin_replace(unique_engine: sa.Engine) -> None:
    later = datetime.now(UTC) + timedelta(hours=1)
    with Session(unique_engine) as session:
        [(first, _)] = enqueue(session, Order(key="a", note="first", priority=5))
        session.commit()
        assert enqueue(session, Order(key="a", note="second", run_at=later), on_twin="replace") == [(first, False)]
        session.commit()
        assert (first.note, first.priority, first.run_at) == ("second", 0, later)
        enqueue(session, Order(key="a", note="third", run_at=None), on_twin="replace_keep_time")
        session.commit()
        assert (first.note, first.run_at) == ("third", later)


def test_replacing_locks_the_twins_only(unique_engine: sa.Engine) -> None:
    """By the primary key: a scan would lock other jobs, and wait for theirs."""
    with Session(unique_engine) as session, Session(unique_engine) as other:
        session.add_all([Order(id=number, key=f"k{number}") for number in range(1, 40)])
        session.commit()
        other.execute(sa.select(Order).where(Order.id == 3).with_for_update()).all()
        session.execute(sa.text("SET SESSION innodb_lock_wait_timeout = 1"))
        jobs = [Order(key="k2", note="new"), Order(key="k30", note="new")]
        assert created(session, jobs, on_twin="replace") == [False, False]
        session.commit()
        other.rollback()
        assert session.scalar(sa.select(sa.func.count()).where(Order.note == "new")) == 2


@pytest.mark.parametrize("page_size", [1000, 100])
def test_many_jobs_of_which_one_has_a_twin_by_then(unique_engine: sa.Engine, page_size: int) -> None:
    """An INSERT of many rows inserts none of them if one has a twin; they are inserted one by one then."""
    sizes: list[int] = []
    twins: list[str] = []

    def insert_twin(_: Any, __: Any, statement: str, parameters: Any, *___: Any) -> None:
        if statement.startswith("/*sqlaqueue unless"):
            sizes.append(sum(name.startswith("key__") for name in parameters) or 1)
            if not twins:
                # Before the transaction has locked anything, for which this one would wait.
                twins.append(parameters["key__1"])
                with Session(unique_engine) as other:
                    other.add(Order(key=twins[0], note="twin"))
                    other.commit()

    with Session(unique_engine.execution_options(insertmanyvalues_page_size=page_size)) as session:
        jobs = [Order(key=f"k{number}") for number in range(1200)]
        sa.event.listen(unique_engine, "before_cursor_execute", insert_twin)
        try:
            result = enqueue(session, jobs)
        finally:
            sa.event.remove(unique_engine, "before_cursor_execute", insert_twin)
        assert sizes == [500, *[1] * 500, 500, 200]
        assert [(each.job.key, each.job.note) for each in result if not each.created] == [(twins[0], "twin")]
        assert {each.job.made_by for each in result} == {"app!"}
        session.commit()
    assert count(unique_engine, Order) == 1200


def test_errors_of_other_constraints_are_raised(unique_engine: sa.Engine) -> None:
    with Session(unique_engine) as session:
        session.add(Order(id=5, key="a"))
        session.commit()
        with pytest.raises(IntegrityError, match="PRIMARY"):
            enqueue(session, Order(id=5, key="b"))
        session.rollback()
        with pytest.raises(IntegrityError, match="foreign key"):
            enqueue(session, Report(site="x", number=1, customer_id=99))
        session.rollback()
        with pytest.raises(sa.exc.DataError):
            enqueue(session, [Order(key="c", note="n" * 51)])
    assert count(unique_engine, Order) == 1


def test_null_is_a_value_like_others(unique_engine: sa.Engine) -> None:
    with Session(unique_engine) as session:
        jobs = [Single(key=None), Single(key=0), Single(key=None)]
        assert [each.created for each in enqueue(session, jobs)] == [True, True, False]
        session.commit()
        assert not enqueue(session, Single(key=None))[0].created
        session.rollback()


@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
def test_a_twin_that_the_snapshot_does_not_have(
    mariadb: MariaDBServer, unique_tables: str, unique_engine: sa.Engine, level: Any
) -> None:
    other = sa.create_engine(mariadb.url(unique_tables), isolation_level=level)
    sqlaqueue.mariadb.prepare(other)
    with Session(other) as session, Session(unique_engine) as first:
        # The snapshot.
        session.scalar(sa.select(sa.func.count()).select_from(Mail))
        first.add(Order(key="a"))
        first.commit()
        if level == "SERIALIZABLE":
            # Each SELECT reads what is committed, and locks it.
            assert created(session, Order(key="a")) == [False]
        else:
            with pytest.raises(IntegrityError, match="ix_orders_queue_unique"):
                enqueue(session, Order(key="a"))
        session.rollback()
        assert created(session, Order(key="a")) == [False]
    other.dispose()


# -- values ------------------------------------------------------------------------------------------------------------


def test_null_keys_have_no_twins(unique_engine: sa.Engine) -> None:
    with Session(unique_engine) as session:
        assert created(session, [Order(), Order(), Order(key="a")]) == [True] * 3
        session.commit()
        assert created(session, Order()) == [True]


def test_null_keys_are_twins_if_configured(unique_engine: sa.Engine) -> None:
    with Session(unique_engine) as session:
        session.add(Customer(id=1))
        session.flush()
        noon = datetime(2026, 3, 1, 12, tzinfo=UTC)
        pairs = [(None, None), (1, None), (None, "a"), (1, "a"), (None, None), (1, None)]
        jobs = [
            Report(site="x", number=number, customer_id=customer, kind=kind, created_at=noon)
            for number, (customer, kind) in enumerate(pairs)
        ]
        assert created(session, jobs) == [True] * 4 + [False] * 2
        session.commit()
        session.add(Report(site="y", number=1, created_at=noon))
        with pytest.raises(IntegrityError, match="ix_report_queue_unique"):
            session.flush()
        session.rollback()
        # A cascade reaches the column too.
        session.execute(sa.delete(Customer))
        session.commit()
        assert session.scalar(sa.select(sa.func.count()).select_from(Report)) == 2


def test_a_period(unique_engine: sa.Engine) -> None:
    noon = datetime(2026, 3, 1, 12, tzinfo=UTC)
    long_ago = datetime(1965, 3, 1, 12, tzinfo=UTC)
    with Session(unique_engine) as session:
        for number, start in enumerate((noon, long_ago)):
            minutes = (0, 59, 60, -1, 61, -60)
            jobs = [
                Report(site=str(number), number=place, kind="a", created_at=start + timedelta(minutes=minute))
                for place, minute in enumerate(minutes)
            ]
            assert created(session, jobs) == [True, False, True, True, False, False]
        now = [Report(site="now", number=number, kind="a") for number in range(2)]
        assert created(session, now) == [True, False]
        session.commit()


def test_a_finished_job_counts_if_configured(unique_engine: sa.Engine) -> None:
    with Session(unique_engine) as session:
        for model, counts in ((Order, False), (Report, True)):
            key: dict[str, Any] = {"key": "a"} if model is Order else {"kind": "a"}
            numbers = iter(range(5))
            made: Any = lambda: model(**key, **({} if model is Order else {"site": "x", "number": next(numbers)}))  # noqa: B023, E731 - called within the round
            enqueue(session, made())
            session.commit()
            session.execute(complete(session.scalars(claim(model, 1)).all()))
            session.commit()
            assert created(session, made()) == [not counts]
            session.commit()


OTHER_VALUES: dict[str, Any] = {
    "number": 2**62,
    "name": "NAME",
    "at": datetime(2026, 1, 1, 0, 0, 0, 1, tzinfo=UTC),
    "second": datetime(2026, 1, 1, 0, 0, 1),  # noqa: DTZ001 - the column has no time zone
    "day": date(2026, 1, 3),
    "price": Decimal("1.51"),
    "ref": UUID(int=9),
    "text_ref": UUID(int=9),
    "color": Color.BLUE,
    "flag": True,
    "code": "A",
}


def typed(**values: Any) -> Typed:
    moments: dict[str, Any] = {
        "at": datetime(2026, 1, 1, tzinfo=UTC),
        "second": datetime(2026, 1, 1, 0, 0, 0, 700000),  # noqa: DTZ001 - the column has no time zone
    }
    return Typed(**{**moments, **values})


@pytest.mark.parametrize("attribute", OTHER_VALUES)
def test_each_type(unique_engine: sa.Engine, attribute: str) -> None:
    """A job with another value in one column is no twin, and one with the same values is, as the column stores them."""
    other = {attribute: OTHER_VALUES[attribute]}
    with Session(unique_engine) as session:
        # Seconds. The statements take milliseconds, and took twelve seconds when the server chose an order of its own
        # for the columns.
        session.execute(sa.text("SET SESSION max_statement_time = 5"))
        assert created(session, [typed(), typed(**other), typed()]) == [True, True, False]
        session.commit()
        assert created(session, [typed(), typed(**other)]) == [False, False]
        session.execute(sa.text("SET SESSION max_statement_time = DEFAULT"))
        session.commit()
    assert count(unique_engine, Typed) == 2


@pytest.mark.parametrize(
    "type_", [sa.Float(), sa.JSON(), sa.dialects.postgresql.JSONB(), sa.LargeBinary(), sa.Interval(), sa.Time()]
)
def test_other_types_are_refused(unique_engine: sa.Engine, type_: Any) -> None:
    class Other(DeclarativeBase):
        pass

    def define() -> Any:
        class Job(QueueMixin, Other):
            __tablename__ = "refused"
            __queue__ = QueueConfig(unique=Unique("value"))
            id: Mapped[int] = mapped_column(primary_key=True)
            value: Mapped[Any] = mapped_column(type_)

        return Job

    with pytest.raises(ConfigurationError, match=r"Job: Unique\('value'\)"):
        define().metadata.create_all(unique_engine)
