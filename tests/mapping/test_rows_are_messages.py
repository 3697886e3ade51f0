"""Models with rows_are_messages=True: the claim deletes the row, and release() and retry() insert the same row."""

import enum
import uuid
from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any, ClassVar

import pytest
import sqlalchemy as sa
from sqlalchemy.dialects import postgresql
from sqlalchemy.orm import DeclarativeBase, Mapped, MappedAsDataclass, Session, load_only, mapped_column

from sqlaqueue import QueueConfig, QueueMixin, claim, fail, release, requeue, retry
from sqlaqueue.exc import ConfigurationError, StatementError
from sqlaqueue.mapping.mixin import spec_of
from sqlaqueue.queue.config import ROLES
from sqlaqueue.strategies.delete_row import DeleteRow
from sqlaqueue.strategies.existing_messages import ExistingMessages
from tests.mapping.conftest import created
from tests.models import new_base

CONFIG = QueueConfig(strategy="delete_returning", rows_are_messages=True)


class Colour(enum.Enum):
    RED = "red"


class Base(DeclarativeBase):
    pass


class Task(QueueMixin, Base):
    __tablename__ = "task"
    __queue__ = CONFIG
    id: Mapped[int] = mapped_column(primary_key=True)
    text: Mapped[str | None]
    number: Mapped[float | None]
    amount: Mapped[Decimal | None] = mapped_column(sa.Numeric(30, 12))
    big: Mapped[int | None] = mapped_column(sa.BigInteger())
    yes: Mapped[bool | None]
    raw: Mapped[bytes | None]
    key: Mapped[uuid.UUID | None]
    colour: Mapped[Colour | None]
    day: Mapped[date | None]
    moment: Mapped[datetime | None]
    zoned: Mapped[datetime | None] = mapped_column(sa.DateTime(timezone=True))
    span: Mapped[timedelta | None]
    json: Mapped[Any] = mapped_column(sa.JSON(), nullable=True)
    jsonb: Mapped[Any] = mapped_column(postgresql.JSONB(), nullable=True)
    words: Mapped[Any] = mapped_column(postgresql.ARRAY(sa.Text()), nullable=True)
    numbers: Mapped[Any] = mapped_column(postgresql.ARRAY(sa.Integer(), dimensions=2), nullable=True)
    address: Mapped[Any] = mapped_column(postgresql.INET(), nullable=True)
    defaulted: Mapped[str | None] = mapped_column(server_default="from the server")
    doubled: Mapped[int | None] = mapped_column(sa.Computed("id * 2", persisted=True))


FULL = {
    "text": "'\"\\ %s %% :x ä\n\U0001f600",
    "number": 0.1 + 0.2,
    "amount": Decimal("123456789012345678.123456789012"),
    "big": 2**62 + 1,
    "yes": True,
    "raw": bytes(range(256)),
    "key": uuid.UUID(int=7),
    "colour": Colour.RED,
    "day": date(2020, 2, 29),
    "moment": datetime(2020, 2, 29, 12, 0, 0, 123456),  # noqa: DTZ001 - a column without a time zone
    "zoned": datetime(2020, 2, 29, 12, 0, 0, 123456, tzinfo=UTC),
    "span": timedelta(days=3, microseconds=1),
    "json": {"a": [1, None, "x"], "b": {"ä": 1.5}},
    "jsonb": [1, {"b": None}],
    "words": ["a", 'b"', None, "c,d", "{}"],
    "numbers": [[1, 2], [3, 4]],
    "address": "10.0.0.1",
}


@pytest.fixture
def tasks(engine: sa.Engine) -> Iterator[sa.Engine]:
    with created(engine, Base.metadata):
        with Session(engine) as session:
            session.add_all([Task(id=1, **FULL), Task(id=2), Task(id=3, priority=5, max_attempts=9)])
            session.flush()
            session.execute(sa.update(Task).where(Task.id == 2).values(defaulted=None))
            session.commit()
        yield engine


def rows(session: Session, *but: str) -> list[Any]:
    return list(
        session.scalars(sa.text(f"SELECT to_jsonb(task) - '{{{','.join(but)}}}'::text[] FROM task ORDER BY id"))
    )


def nulls(session: Session) -> list[Any]:
    return list(session.execute(sa.text("SELECT json IS NULL, jsonb IS NULL, defaulted IS NULL FROM task ORDER BY id")))


@pytest.mark.parametrize("n", [1, 3])
def test_a_released_row_is_unchanged(tasks: sa.Engine, n: int) -> None:
    with Session(tasks) as session:
        before = rows(session), nulls(session)
        session.execute(release(session.execute(claim(Task, n)).scalars().all()))
        session.commit()
        assert (rows(session), nulls(session)) == before


def test_a_retried_row_differs_only_in_its_attempt(tasks: sa.Engine) -> None:
    with Session(tasks) as session:
        changed = "attempts", "run_at", "last_error"
        before = rows(session, *changed), nulls(session)
        for task in session.execute(claim(Task, 3)).scalars().all():
            session.execute(retry(task, error="x"))
        session.commit()
        assert (rows(session, *changed), nulls(session)) == before
        assert session.scalars(sa.select(Task.attempts)).all() == [1, 1, 1]


@pytest.mark.parametrize("together", [True, False], ids=["together", "one by one"])
def test_a_failed_and_requeued_row_is_unchanged(tasks: sa.Engine, together: bool) -> None:  # noqa: FBT001 - a parameter
    with Session(tasks) as session:
        changed = "run_at", "last_error"
        before = rows(session, *changed), nulls(session)
        claimed = session.execute(claim(Task, 3)).scalars().all()
        for jobs in [claimed] if together else [[job] for job in claimed]:
            session.execute(fail(jobs, error="bad"))
        session.commit()
        assert rows(session) == []
        assert sorted(session.scalars(requeue(Task)).all()) == [1, 2, 3]
        session.commit()
        assert (rows(session, *changed), nulls(session)) == before


def test_a_claimed_instance_is_detached(tasks: sa.Engine) -> None:
    with Session(tasks) as session:
        job = session.execute(claim(Task, 1)).scalar_one()
        assert sa.inspect(job).detached
        assert (job.text, job.doubled, job.attempts) == (FULL["text"], 2, 1)
        job.text = "changed by the handler"
        session.commit()
        assert job.text == "changed by the handler"
    with Session(tasks) as session:
        assert session.get(Task, 1) is None


def test_changes_of_a_handler_are_stored_on_retry(tasks: sa.Engine) -> None:
    with Session(tasks) as session:
        job = session.execute(claim(Task, 1)).scalar_one()
        job.text = "changed by the handler"
        session.execute(retry(job))
        session.commit()
        assert session.get_one(Task, 1).text == "changed by the handler"


def test_loader_options_are_refused_for_detached_instances(tasks: sa.Engine) -> None:
    with pytest.raises(StatementError, match=r"claim\(select\(Task\).options.* returns a detached instance"):
        claim(sa.select(Task).options(load_only(Task.text)), 1)
    with Session(tasks) as session, pytest.raises(sa.exc.ArgumentError):
        session.execute(claim(Task, 1).options(load_only(Task.text)))


def test_subclasses_in_one_table(engine: sa.Engine) -> None:
    base = new_base()

    class Job(QueueMixin, base):
        __tablename__ = "job"
        __queue__ = CONFIG
        __mapper_args__: ClassVar = {"polymorphic_on": "kind", "polymorphic_identity": "job"}
        id: Mapped[int] = mapped_column(primary_key=True)
        kind: Mapped[str]

    class Letter(Job):
        __mapper_args__: ClassVar = {"polymorphic_identity": "letter"}
        address: Mapped[str | None]

    with created(engine, base.metadata), Session(engine) as session:
        session.add_all([Job(id=1), Letter(id=2, address="Rome"), Job(id=3), Letter(id=4, address="Oslo")])
        session.commit()
        jobs = session.execute(claim(Job, 4)).scalars().all()
        assert [type(job) for job in jobs] == [Job, Letter, Job, Letter]
        session.execute(release(jobs[:2]))
        session.execute(fail(jobs[2:]))
        session.execute(requeue(Job))
        session.commit()
        letters = session.scalars(sa.select(Letter).order_by(Letter.id)).all()
        assert [(letter.id, letter.address) for letter in letters] == [(2, "Rome"), (4, "Oslo")]


def test_dataclasses(engine: sa.Engine) -> None:
    class Base(MappedAsDataclass, DeclarativeBase):
        pass

    class Job(QueueMixin, Base):
        __tablename__ = "job"
        __queue__ = CONFIG
        id: Mapped[int] = mapped_column(primary_key=True, init=False)
        payload: Mapped[str]

    with created(engine, Base.metadata), Session(engine) as session:
        session.add(Job("a"))
        session.commit()
        job = session.execute(claim(Job, 4)).scalar_one()
        assert repr(job).startswith(f"{Job.__qualname__}(id=1, payload='a'")
        session.execute(retry(job))
        session.commit()
        assert session.execute(claim(Job, 4)).scalar_one().payload == "a"


# -- refused classes ---------------------------------------------------------------------------------------------------


def order(config: QueueConfig, **attributes: Any) -> Any:
    body = {
        "__tablename__": "orders",
        "__queue__": config,
        "id": mapped_column(sa.Integer, primary_key=True),
        "state": mapped_column(sa.Text, default="pending"),
        "due": mapped_column(sa.DateTime(timezone=True)),
    }
    return type("Order", (QueueMixin, new_base()), body | attributes)


def test_a_generated_always_key_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"Order\.id is GENERATED ALWAYS"):
        order(CONFIG, id=mapped_column(sa.Integer, sa.Identity(always=True), primary_key=True))


OTHERS = {role: None for role in ROLES if role != "status"}
MISTAKES: dict[str, dict[str, Any]] = {
    "the wrong order": {"columns": {"status": "state", **dict.fromkeys(ROLES)}},
    "left out": {"columns": {"status": None}},
    "nothing named": {"adopt": {}},
    "something else named": {"adopt": {"run_at": "due"}},
}


@pytest.mark.once
@pytest.mark.parametrize("mistake", MISTAKES)
def test_deleting_rows_needs_rows_are_messages(mistake: str) -> None:
    columns = MISTAKES[mistake]
    fix = "adopt={'status': ...}" if "adopt" in columns else "remove 'status': None from QueueConfig(columns=...)"
    with pytest.raises(ConfigurationError) as refused:
        order(QueueConfig(strategy="delete_returning", **columns))
    assert str(refused.value).startswith("Order: without the queue attribute 'status' a claim")
    assert fix in str(refused.value)
    assert "QueueConfig(rows_are_messages=True)" in str(refused.value)


@pytest.mark.once
@pytest.mark.parametrize("columns", [{}, {"columns": OTHERS}, {"columns": {"status": None, **OTHERS}}, {"adopt": {}}])
def test_rows_are_messages_has_no_status(columns: dict[str, Any]) -> None:
    spec = spec_of(order(QueueConfig(strategy="delete_returning", rows_are_messages=True, **columns)))
    assert isinstance(spec.strategy, DeleteRow)
    assert bool(spec.attributes) is (columns == {})
    assert not spec.has("status")


@pytest.mark.once
@pytest.mark.parametrize("strategy", ["update_status", "batch_select", ExistingMessages(sa.Table, job="id")], ids=str)
def test_rows_are_messages_is_refused_for_strategies_that_keep_rows(strategy: Any) -> None:
    said = r"Order: QueueConfig\(rows_are_messages=True\): the strategy .* does not delete the rows"
    with pytest.raises(ConfigurationError, match=said):
        order(QueueConfig(strategy=strategy, rows_are_messages=True))


@pytest.mark.once
def test_a_strategy_that_always_deletes_rows_needs_rows_are_messages() -> None:
    with pytest.raises(ConfigurationError, match=r"Order: .*rows_are_messages=True"):
        order(QueueConfig(strategy=DeleteRow(), columns={"status": None}))
