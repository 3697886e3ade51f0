"""Types and values of the status column, in instances and in plain SQL."""

import enum
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.dialects import postgresql
from sqlalchemy.orm import DeclarativeBase, Session, mapped_column

from sqlaqueue import QueueConfig, QueueMixin, States, cancel, claim, complete, fail, requeue, retry
from sqlaqueue.exc import ConfigurationError, StatementError
from tests.mapping.awaitable_engine import awaitable_engine
from tests.mapping.tidy import TidyDatabase, created

STRATEGIES = ["update_status", "delete_returning", "batch_select"]


class Phase(enum.Enum):
    NEW = "n"
    RUNNING = "r"
    DONE = "d"
    DEAD = "x"
    OFF = "o"


class Level(enum.IntEnum):
    PENDING = 10
    PROCESSING = 20
    COMPLETED = 30
    FAILED = 40
    CANCELLED = 50


PHASES = States(
    pending=Phase.NEW, processing=Phase.RUNNING, completed=Phase.DONE, failed=Phase.DEAD, cancelled=Phase.OFF
)
LEVELS = States(**{state: Level[state.upper()] for state, _ in States().items()})
LETTERS = States(pending="n", processing="r", completed="d", failed="x", cancelled="o")
NUMBERS = States(pending=0, processing=1, completed=2, failed=3, cancelled=4)


def model(config: QueueConfig, **attributes: Any) -> type[Any]:
    class Base(DeclarativeBase):
        pass

    body = {"__tablename__": "job", "__queue__": config, "id": mapped_column(sa.Integer, primary_key=True)}
    return type("Job", (QueueMixin, Base), {**body, **attributes})


class Stored(sa.types.TypeDecorator[Phase]):
    """A TypeDecorator that stores one letter for a Phase."""

    impl = sa.String(1)
    cache_ok = True

    def process_bind_param(self, value: Phase | None, dialect: sa.Dialect) -> str | None:
        return value and value.value

    def process_result_value(self, value: str | None, dialect: sa.Dialect) -> Phase | None:
        return None if value is None else Phase(value)


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
    "adopted type of an application": (PHASES, Stored(), "n", "r", "d"),
    "adopted type over an enum": (LETTERS, Translated(), "NEW", "RUNNING", "DONE"),
    "adopted words": (States(pending="ready"), sa.Text(), "ready", "processing", "completed"),
}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("case", CASES)
def test_plain_sql_and_instances_use_the_values_of_the_states(strategy: str, case: str, engine: sa.Engine) -> None:
    states, type_, pending, processing, completed = CASES[case]
    columns = {} if type_ is None else {"status": "status"}
    attributes = {} if type_ is None else adopted(type_, server_default=pending)
    job = model(QueueConfig(strategy=strategy, states=states, columns=columns), **attributes)
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
    class Base(DeclarativeBase):
        pass

    for name in ("One", "Two"):
        body = {
            "__tablename__": name,
            "__queue__": QueueConfig(states=PHASES),
            "id": mapped_column(sa.Integer, primary_key=True),
        }
        type(name, (QueueMixin, Base), body)
    with created(engine, Base.metadata):
        assert ("type", "phase") in tidy.objects()
    assert tidy.objects() == tidy.empty


def test_enum_members_named_like_states_need_no_config(engine: sa.Engine) -> None:
    class Life(enum.Enum):
        DRAFT = enum.auto()
        PENDING = enum.auto()
        PROCESSING = enum.auto()
        COMPLETED = enum.auto()
        FAILED = enum.auto()

    job = model(QueueConfig(columns={"status": "status"}), **adopted(sa.Enum(Life)))
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
    with pytest.raises(ConfigurationError, match=r"Job: its status column has no value 'pending'; name its value with"):
        model(QueueConfig(columns={"status": "status"}), **adopted(sa.Enum(Phase)))
    with pytest.raises(ConfigurationError, match=r"Job: its status column has no value 'pending'; name its value with"):
        model(QueueConfig(columns={"status": "status"}), **adopted(postgresql.ENUM("a", "b", name="ab")))


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
        model(QueueConfig(states=states, columns={"status": "status"}), **adopted(type_))


def test_values_of_mixed_types_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="cannot hold 'processing'"):
        model(QueueConfig(states=States(pending=0)))
    with pytest.raises(ConfigurationError, match="cannot hold 1"):
        model(QueueConfig(states=States(processing=1)))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_state_without_a_value_is_refused_only_where_it_is_needed(strategy: str, engine: sa.Engine) -> None:
    states = States(cancelled=None)
    job = model(QueueConfig(strategy=strategy, states=states))
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
        model(QueueConfig(strategy="update_status", states=States(processing=None)))


@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_status_values_that_need_quotes(strategy: str, driver: str, tidy: TidyDatabase) -> None:
    states = States(pending="it's 1% :new", processing="%s {x}", completed="\\ done")
    job = model(QueueConfig(strategy=strategy, states=states))
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
