"""The columns that a claim loads."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, column_property, defer, load_only, mapped_column

from sqlaqueue import QueueConfig, QueueMixin, claim, complete, fail
from tests.mapping.tidy import created


@pytest.fixture(params=["update_status", "delete_returning", "batch_select"])
def model(request: pytest.FixtureRequest, engine: sa.Engine) -> Iterator[Any]:
    class Base(DeclarativeBase):
        pass

    class Job(QueueMixin, Base):
        __tablename__ = "job"
        __queue__ = QueueConfig(
            strategy=request.param,
            columns={name: name for name in ("attempts", "max_attempts", "last_error", "priority")},
        )

        id: Mapped[int] = mapped_column(primary_key=True)
        payload: Mapped[str | None] = mapped_column(deferred=True)
        attempts: Mapped[int] = mapped_column(default=0, deferred=True)
        max_attempts: Mapped[int | None] = mapped_column(deferred=True)
        last_error: Mapped[str | None] = mapped_column(deferred=True)
        priority: Mapped[int] = mapped_column(sa.SmallInteger, default=0, deferred=True)
        twice: Mapped[int] = column_property(sa.literal_column("id * 2", sa.Integer))

    with created(engine, Base.metadata):
        with Session(engine) as session:
            session.add(Job(payload="x", max_attempts=7))
            session.commit()
        yield Job


def test_deferred_columns_and_expressions_are_loaded_on_access(model: Any, engine: sa.Engine) -> None:
    with Session(engine) as session:
        job = session.scalars(claim(model, 1)).one()
        assert {"payload", "last_error", "twice"} <= sa.inspect(job).unloaded
        assert (job.payload, job.last_error, job.twice) == ("x", None, 2)
        assert (job.attempts, job.max_attempts) == (1, 7)
        assert session.scalars(fail(job, error="y")).all() == [1]
        session.commit()
        assert (job.attempts, job.last_error) == (1, "y")


@pytest.mark.parametrize(
    "option",
    [lambda job: load_only(job.payload), lambda job: load_only(job.payload, raiseload=True), lambda _: defer("*")],
    ids=["load only", "load only, raise for others", "defer all"],
)
@pytest.mark.parametrize("place", ["on the select", "on the claim"])
def test_a_run_is_recorded_whatever_columns_are_loaded(
    model: Any, engine: sa.Engine, option: Callable[[Any], Any], place: str
) -> None:
    if place == "on the select":
        statement = claim(sa.select(model).options(option(model)), 1)
    else:
        statement = claim(model, 1).options(option(model))
    with Session(engine) as session:
        job = session.scalars(statement).one()
        assert {"last_error", "run_at"} <= sa.inspect(job).unloaded
        assert (job.attempts, job.max_attempts) == (1, 7)
        assert session.scalars(complete(job)).all() == [1]
