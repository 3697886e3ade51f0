"""The status column: its types and values, in instances and in plain SQL; and the columns of a job's last run."""

import enum
import os
from collections.abc import Iterator
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.dialects import postgresql
from sqlalchemy.orm import Session, mapped_column, sessionmaker

from sqlaqueue import (
    Consumer,
    Fail,
    QueueConfig,
    QueueMixin,
    Retry,
    States,
    cancel,
    claim,
    complete,
    fail,
    queue_column,
    release,
    requeue,
    rescue,
    retry,
)
from sqlaqueue.exc import ConfigurationError, StatementError
from sqlaqueue.mapping.mixin import spec_of
from sqlaqueue.statements.claim import worker_name
from tests.mapping.conftest import PHASES, Letter, Phase, TidyDatabase, awaitable_engine, created
from tests.models import STRATEGIES, execute, insert, make_job, new_base


class Level(enum.IntEnum):
    PENDING = 10
    PROCESSING = 20
    COMPLETED = 30
    FAILED = 40
    CANCELLED = 50


LEVELS = States(**{level.name.lower(): level for level in Level})
LETTERS = States(pending="n", processing="r", completed="d", failed="x", cancelled="o")
NUMBERS = States(pending=0, processing=1, completed=2, failed=3, cancelled=4)


class Translated(sa.types.TypeDecorator[str]):
    """A TypeDecorator whose values are not members of its Enum."""

    impl = sa.Enum(Phase)
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: sa.Dialect) -> Phase | None:
        return None if value is None else Phase(value)

    def process_result_value(self, value: Phase | None, dialect: sa.Dialect) -> str | None:
        return value and value.value


def adopted(type_: Any, **options: Any) -> dict[str, Any]:
    return {"status": mapped_column(type_, nullable=False, **options)}


CASES: dict[str, tuple[States, Any, str, str, str]] = {
    "words": (States(), None, "pending", "processing", "completed"),
    "enum": (PHASES, None, "NEW", "RUNNING", "DONE"),
    "numbers": (NUMBERS, None, "0", "1", "2"),
    "adopted enum": (PHASES, sa.Enum(Phase), "NEW", "RUNNING", "DONE"),
    "adopted numbers": (LEVELS, sa.SmallInteger(), "10", "20", "30"),
    "adopted type of an application": (PHASES, Letter(), "n", "r", "d"),
    "adopted type over an enum": (LETTERS, Translated(), "NEW", "RUNNING", "DONE"),
    "adopted words": (States(pending="ready"), sa.Text(), "ready", "processing", "completed"),
}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("case", CASES)
def test_plain_sql_and_instances_use_the_values_of_the_states(strategy: str, case: str, engine: sa.Engine) -> None:
    states, type_, pending, processing, completed = CASES[case]
    columns = {} if type_ is None else {"status": "status"}
    attributes = {} if type_ is None else adopted(type_, server_default=pending)
    job = make_job(strategy, attributes, states=states, columns=columns)
    with created(engine, job.metadata), Session(engine) as session:
        session.execute(sa.text("INSERT INTO job DEFAULT VALUES"))
        session.execute(sa.text("INSERT INTO job DEFAULT VALUES"))
        session.commit()
        state = sa.text("SELECT status::text FROM job ORDER BY id")
        assert session.scalars(state).all() == [pending, pending]
        first, second = session.scalars(claim(job, 2)).all()
        assert first.status == states.processing
        assert session.scalars(state).all() == [processing if strategy == "update_status" else pending] * 2
        session.execute(complete(first))
        session.execute(retry(second))
        session.commit()
        assert (first.status, second.status) == (states.completed, states.pending)
        assert session.scalars(state).all() == [completed, pending]
        session.execute(sa.text(f"UPDATE job SET status = '{pending}' WHERE id = {first.id}"))
        session.commit()
        assert len(session.scalars(claim(job, 5)).all()) == 2
        session.rollback()
        session.execute(sa.text(f"UPDATE job SET status = '{completed}'"))
        session.commit()
        assert session.scalars(claim(job, 5)).all() == []


def test_two_queues_share_an_enum(tidy: TidyDatabase, engine: sa.Engine) -> None:
    base = new_base()
    for name in ("One", "Two"):
        key = mapped_column(sa.Integer, primary_key=True)
        type(name, (QueueMixin, base), {"__tablename__": name, "__queue__": QueueConfig(states=PHASES), "id": key})
    with created(engine, base.metadata):
        assert ("type", "phase") in tidy.objects()
    assert tidy.objects() == tidy.empty


def test_enum_members_named_like_states_need_no_config(engine: sa.Engine) -> None:
    class Life(enum.Enum):
        DRAFT = enum.auto()
        PENDING = enum.auto()
        PROCESSING = enum.auto()
        COMPLETED = enum.auto()
        FAILED = enum.auto()

    job = make_job("update_status", adopted(sa.Enum(Life)), columns={"status": "status"})
    with created(engine, job.metadata), Session(engine) as session:
        session.add_all([job(status=Life.DRAFT), job(status=Life.PENDING)])
        session.commit()
        claimed = session.scalars(claim(job, 5)).one()
        assert claimed.status is Life.PROCESSING
        session.execute(fail(claimed))
        session.commit()
        assert claimed.status is Life.FAILED
        assert session.scalars(requeue(job)).all() == [claimed.id]


def test_an_enum_without_a_pending_value_is_refused() -> None:
    said = "Job: its status column has no value 'pending'; name its value with"
    for type_ in (sa.Enum(Phase), postgresql.ENUM("a", "b", name="ab")):
        with pytest.raises(ConfigurationError, match=said):
            make_job("update_status", adopted(type_), columns={"status": "status"})


@pytest.mark.parametrize(
    ("states", "type_"),
    [
        (States(), sa.Integer()),
        (States(pending="new"), sa.SmallInteger()),
        (States(completed=Phase.DONE), sa.Text()),
        (NUMBERS, sa.Text()),
        (States(pending=Phase.NEW, completed=Level.COMPLETED), sa.Enum(Phase)),
        (States(pending="z"), Translated()),
        (States(failed="dead"), sa.Enum("pending", "processing", "completed", "failed", name="e")),
    ],
    ids=str,
)
def test_a_value_that_the_column_cannot_store_is_refused(states: States, type_: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"Job: its status column cannot hold .*QueueConfig\(states=States\("):
        make_job("update_status", adopted(type_), states=states, columns={"status": "status"})


def test_values_of_mixed_types_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="cannot hold 'processing'"):
        make_job(states=States(pending=0))
    with pytest.raises(ConfigurationError, match="cannot hold 1"):
        make_job(states=States(processing=1))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_state_without_a_value_is_refused_only_where_it_is_needed(strategy: str, engine: sa.Engine) -> None:
    job = make_job(strategy, states=States(cancelled=None))
    with created(engine, job.metadata), Session(engine) as session:
        session.add(job())
        session.commit()
        claimed = session.scalars(claim(job, 1)).one()
        session.execute(fail(claimed))
        session.execute(requeue(job))
        session.commit()
        with pytest.raises(StatementError, match=r"Job has no value for the state 'cancelled'; set one with"):
            cancel(job)


def test_a_lease_needs_a_value_for_processing() -> None:
    with pytest.raises(ConfigurationError, match=r"Job: strategy .* needs a status value for running jobs"):
        make_job(states=States(processing=None))


@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_status_values_that_need_quotes(strategy: str, driver: str, tidy: TidyDatabase) -> None:
    states = States(pending="it's 1% :new", processing="%s {x}", completed="\\ done")
    job = make_job(strategy, states=states)
    async with awaitable_engine(tidy.database, driver, {}) as engine:
        await engine.ddl(job.metadata.create_all)
        async with engine.session() as session:
            session.add_all([job()])
            await session.commit()
            (claimed,) = (await session.scalars(claim(job, 1))).all()
            assert claimed.status == states.processing
            await session.execute(complete(claimed))
            await session.commit()
            words = await session.scalars(sa.text("SELECT status FROM job"))
            assert words.all() == [states.completed]
        await engine.ddl(job.metadata.drop_all)


# -- start and worker of the last run ----------------------------------------------------------------------------------


@pytest.fixture(params=[*STRATEGIES, "rows_are_messages"])
def job(request: pytest.FixtureRequest, engine: sa.Engine) -> Iterator[Any]:
    extra = ("started_at", *(() if request.param == "update_status" else ("claimed_by",)))
    job = make_job(request.param, extra_columns=extra, columns={"started_at": "began"})
    with created(engine, job.metadata):
        yield job


def rows(engine: sa.Engine, job: Any) -> list[Any]:
    with engine.connect() as connection:
        return [*connection.execute(sa.select(job.__table__).order_by(job.__table__.c.id))]


def test_every_outcome_stores_start_and_worker_of_its_run(job: Any, engine: sa.Engine) -> None:
    """The start is a time of the database's clock, under all strategies."""
    ends: dict[int, Exception] = {2: Retry(3600), 3: Fail("no")}

    def work(session: Session, job: Any) -> None:
        if job.id in ends:
            raise ends[job.id]
        session.execute(sa.text("SELECT 1"))

    insert(engine, job, 3)
    before = execute(engine, sa.select(sa.func.clock_timestamp()))
    Consumer(job, work, sessionmaker(engine), worker_name="me").drain()
    after = execute(engine, sa.select(sa.func.clock_timestamp()))
    found = rows(engine, job)
    if "status" in job.__table__.c:
        assert [row.id for row in found] == [1, 2, 3]
    else:
        assert [row.id for row in found] == [2]
        letter = "SELECT row->>'claimed_by' AS claimed_by, (row->>'began')::timestamptz AS began FROM {}"
        with engine.connect() as connection:
            found += connection.execute(sa.text(letter.format("sqlaqueue_dead_letter"))).all()
        assert len(found) == 2
    for row in found:
        assert row.claimed_by == f"{worker_name()}:me"
        assert before <= row.began <= after
        assert getattr(row, "finished_at", None) is None or row.began <= row.finished_at


def test_verbs_store_start_and_worker(job: Any, engine: sa.Engine) -> None:
    insert(engine, job, 2)
    before = execute(engine, sa.select(sa.func.statement_timestamp()))
    with Session(engine) as session:
        jobs = session.scalars(claim(job, 2)).all()
        session.execute(release(jobs[1]))
        session.execute(complete(jobs[0]))
        session.commit()
    *completed, released = rows(engine, job)
    # If the claim writes nothing, a released run leaves no trace.
    assert (released.began is not None) == ("lease_token" in job.__table__.c)
    assert len(completed) == ("status" in job.__table__.c)
    for row in completed:
        assert row.began >= before
        assert row.claimed_by == worker_name()


def test_a_rescue_keeps_start_and_worker(engine: sa.Engine) -> None:
    job = make_job(extra_columns=("started_at",), columns={"started_at": "began"})
    with created(engine, job.metadata), Session(engine) as session:
        session.add(job())
        session.commit()
        session.scalars(claim(job, 1)).all()
        session.execute(sa.text("UPDATE job SET lease_expires_at = now() - interval '1 s'"))
        session.execute(rescue(job))
        session.commit()
        (row,) = rows(engine, job)
    assert (row.status, row.claimed_by) == ("pending", worker_name())
    assert row.began is not None


@pytest.mark.once
def test_other_queues_have_no_started_at() -> None:
    assert "started_at" not in make_job().__table__.c
    assert not spec_of(make_job()).keeps_claimed_by
    assert str(os.getpid()) in worker_name()


@pytest.mark.once
def test_started_at_can_be_placed_by_columns_adopt_and_queue_column() -> None:
    attributes = {"state": mapped_column(sa.Text), "began": mapped_column(sa.DateTime(timezone=True))}
    adopting = make_job("update_status", attributes, adopt={"status": "state", "started_at": "began"})
    declaring = make_job("update_status", {"began": queue_column("started_at")})
    for model in (adopting, declaring):
        assert spec_of(model).columns["started_at"] is model.__table__.c.began
        assert spec_of(model).keeps_claimed_by
    assert isinstance(declaring.__table__.c.began.type, sa.DateTime)
