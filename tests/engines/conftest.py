"""A database of each engine that has to be prepared, given as a URL."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError, OperationalError
from sqlalchemy.orm import Session, sessionmaker

import sqlaqueue
from sqlaqueue import claim, complete, fail

Sessions = Callable[[Any], sessionmaker[Session]]

on_mariadb = pytest.mark.parametrize("place", ["mariadb"], indirect=True)
"""For tests with several transactions: SQLite has one that writes."""

REFUSED = (IntegrityError, OperationalError)
"""What a violated CHECK raises: the driver of MariaDB has its own opinion."""


@pytest.fixture(params=["sqlite", "mariadb"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path / 'jobs.db'}"
        return
    server = request.getfixturevalue("mariadb")
    with server.database() as name:
        yield server.url(name)


@pytest.fixture
def engine(place: str) -> Iterator[sa.Engine]:
    engine = sqlaqueue.prepare(sa.create_engine(place))
    yield engine
    engine.dispose()


@pytest.fixture
def sessions(engine: sa.Engine) -> Sessions:
    """A function: create the tables of a class, and return a maker of sessions on them."""

    def create(model: Any) -> sessionmaker[Session]:
        model.metadata.create_all(engine)
        return sessionmaker(engine)

    return create


def states(session: Session, model: Any) -> dict[Any, str]:
    session.rollback()
    return {row[0]: row[1] for row in session.execute(sa.select(model.id, model.status).order_by(model.id))}


def drain(session: Session, *models: Any, fails: tuple[int, ...] = ()) -> list[int]:
    """Claim and complete until no job is due; return the keys in their order."""
    order: list[int] = []
    while True:
        found = [job for model in models for job in session.scalars(claim(model, 2))]
        if not found:
            session.commit()
            return order
        for job in found:
            order.append(job.id)
            session.execute(fail(job) if job.id in fails else complete(job))
        session.commit()
