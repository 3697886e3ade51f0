"""Statements are compiled once: they have a cache key of SQLAlchemy, equal from call to call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from sqlaqueue import QueueConfig, QueueMixin, cancel, claim, complete, extend, fail, requeue, rescue, retry
from tests.contexts import statements_of

STATEMENTS = [
    "claim",
    "claim_and_notify",
    "claim_from_cursor",
    "claim_from_cursor_and_notify",
    "claim_quarantined",
    "claim_key",
    "complete",
]
VERBS: dict[str, Callable[[Any], Any]] = {
    "complete": complete,
    "retry": retry,
    "fail": lambda jobs: fail(jobs, error="why"),
    "extend": extend,
    "cancel": cancel,
    "requeue": requeue,
}


def make_model(strategy: str) -> Any:
    class Base(DeclarativeBase):
        pass

    class Job(QueueMixin, Base):
        __tablename__ = "job"
        __queue__ = QueueConfig(strategy=strategy.removesuffix("-own"), rows_are_messages=strategy.endswith("-own"))

        id: Mapped[int] = mapped_column(primary_key=True)

    return Job


@pytest.fixture(params=["update_status", "batch_select", "delete_returning", "delete_returning-own"])
def model(request: pytest.FixtureRequest) -> Any:
    return make_model(request.param)


@pytest.mark.each_value
@pytest.mark.everywhere
@pytest.mark.parametrize("name", STATEMENTS)
def test_statements_of_a_consumer(model: Any, name: str) -> None:
    statement, again = getattr(statements_of(model), name), getattr(statements_of(model), name)
    if statement is not None:
        assert statement._generate_cache_key() is not None
        assert statement._generate_cache_key() == again._generate_cache_key()


@pytest.mark.each_value
@pytest.mark.once  # before 2.1, SQLAlchemy has no key for an INSERT from a SELECT
@pytest.mark.parametrize("verb", VERBS)
def test_the_verbs(model: Any, verb: str, engine: sa.Engine) -> None:
    model.metadata.create_all(engine)
    try:
        with Session(engine) as session:
            session.add_all(model() for _ in range(4))
            session.flush()
            jobs = session.scalars(claim(model, 4)).all()
            keys = [VERBS[verb](some)._generate_cache_key() for some in (jobs[:2], jobs[2:])]
            assert keys[0] is not None
            assert keys[0] == keys[1]
    finally:
        model.metadata.drop_all(engine)


@pytest.mark.everywhere
def test_rescue() -> None:
    statement = rescue(make_model("update_status"))
    assert statement._generate_cache_key() is not None
