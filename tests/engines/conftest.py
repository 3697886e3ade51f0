"""A database of each engine that has to be prepared, given as a URL."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session, sessionmaker

import sqlaqueue

Sessions = Callable[[Any], sessionmaker[Session]]


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
